"""Policies: bounds, ranking formula, configuration."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tokenflow.config import ServingConfig
from tokenflow.errors import ConfigError
from tokenflow.policies import (
    FcfsReservePolicy,
    TokenflowPolicy,
    WaitForm,
    policy_from_config,
    rank,
)


def ranked(policy: TokenflowPolicy, slack: float, wait: float, started: bool, priority: float):
    arrays = (np.array([slack]), np.array([wait]), np.array([started]), np.array([priority]))
    return float(rank(policy, *arrays)[0])


def test_less_slack_ranks_higher_down_to_the_floor() -> None:
    policy = TokenflowPolicy()
    p = [ranked(policy, s, 0.0, True, 0.5) for s in (0.0, policy.slack_floor_s, 1.0, 10.0)]
    assert p[0] == p[1] > p[2] > p[3]
    assert np.isfinite(ranked(policy, np.inf, 0.0, True, 0.5))


def test_slack_before_the_first_token_is_not_looked_at() -> None:
    policy = TokenflowPolicy()
    assert ranked(policy, np.nan, 1.0, False, 0.5) == ranked(policy, 7.0, 1.0, False, 0.5)


def test_ageing_rises_and_the_other_form_falls_with_the_wait() -> None:
    ageing, falling = TokenflowPolicy(), TokenflowPolicy(wait_form=WaitForm.FALLING)
    assert ranked(ageing, 1.0, 9.0, False, 0.5) > ranked(ageing, 1.0, 1.0, False, 0.5)
    assert ranked(falling, 1.0, 9.0, False, 0.5) < ranked(falling, 1.0, 1.0, False, 0.5)


def test_a_low_class_overtakes_in_the_end() -> None:
    policy = TokenflowPolicy()
    assert ranked(policy, 1.0, 0.0, False, 1.0) > ranked(policy, 1.0, 10.0, False, 0.0)
    assert ranked(policy, 1.0, 0.0, False, 1.0) < ranked(policy, 1.0, 30.0, False, 0.0)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("conservativeness", 0.5),
        ("link_share", 0.0),
        ("turn_link_share", 0.5),  # more than link_share
        ("turn_recompute_share", 1.1),
        ("slack_floor_s", 0.0),
        ("load_limit", -1.0),
        ("slack_margin_s", float("nan")),
        ("high_share", 0.3),
    ],
)
def test_values_out_of_range_are_named(key: str, value: float) -> None:
    with pytest.raises(ConfigError) as caught:
        TokenflowPolicy(**{key: value})
    assert caught.value.key == key


def test_policies_come_from_the_configuration() -> None:
    config = ServingConfig(conservativeness=2.0, slack_margin_s=0.7, min_quantum_s=0.9)
    policy = policy_from_config(config)
    assert policy == TokenflowPolicy(conservativeness=2.0, slack_margin_s=0.7, min_quantum_s=0.9)
    fcfs = dataclasses.replace(config, scheduling_policy="fcfs-reserve")
    assert policy_from_config(fcfs) == FcfsReservePolicy()


def test_copies_ahead_of_need_need_somebody_who_says_which() -> None:
    with pytest.raises(ConfigError) as caught:
        ServingConfig(scheduling_policy="fcfs-reserve", kv_tiering=True)
    assert caught.value.key == "kv_tiering"
    assert "scheduling_policy" in str(caught.value)
    assert ServingConfig(scheduling_policy="tokenflow", kv_tiering=True).kv_tiering


@pytest.mark.parametrize(
    ("policy", "chunks", "asked", "got"),
    [
        ("tokenflow", True, "auto", "MAX_UTILIZATION"),
        ("tokenflow", False, "auto", "GUARANTEED_NO_EVICT"),
        ("fcfs-reserve", True, "auto", "GUARANTEED_NO_EVICT"),
        ("tokenflow", True, "guaranteed_no_evict", "GUARANTEED_NO_EVICT"),
        ("fcfs-reserve", True, "max_utilization", "MAX_UTILIZATION"),
    ],
)
def test_how_the_engine_takes_blocks(policy: str, chunks: bool, asked: str, got: str) -> None:
    config = ServingConfig(
        scheduling_policy=policy, enable_chunked_context=chunks, batch_scheduler_policy=asked
    )
    scheduler = config.executor_config().scheduler_config
    assert scheduler.capacity_scheduler_policy.name == got
