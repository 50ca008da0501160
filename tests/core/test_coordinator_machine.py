"""Random interleavings of everything that can happen to a server: see machine.py.

Each machine is one configuration. By default the examples are the same in every run (each machine
has its own fixed seed, and nothing is kept between runs), so that a failure is caused by a change
of the code and the number of steps is known; the last test counts them. Hypothesis prints the
shortest sequence of rules that it found and a line to reproduce it.

TOKENFLOW_SOAK=n makes n times as many examples, new ones in each run, and remembers those that
failed:

    TOKENFLOW_SOAK=20 python -m pytest tests/core/test_coordinator_machine.py -s
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.core.machine import (
    BASE,
    EAGER,
    ChosenMachine,
    CoordinatorMachine,
    FcfsMachine,
    SlackMachine,
)
from tests.core.model import TOTALS
from tokenflow.inflight.scripted_runner import KV_BYTES_PER_TOKEN

SOAK = int(os.environ.get("TOKENFLOW_SOAK", "0"))
NUM_EXAMPLES = 45
MIN_STEPS = 50_000

pytestmark = pytest.mark.timeout(900 * max(1, SOAK))  # a failure is made short before it is told

MAX_UTILIZATION: Mapping[str, Any] = {"batch_scheduler_policy": "max_utilization"}
UNCHUNKED: Mapping[str, Any] = {"enable_chunked_context": False, "max_num_tokens": 40}
HOST: Mapping[str, Any] = {"kv_cache_host_memory_bytes": 10 * 4 * KV_BYTES_PER_TOKEN}
ROOMY: Mapping[str, Any] = {"max_tokens_in_paged_kv_cache": 768, "max_batch_size": 4}


class ChosenNoEvict(ChosenMachine):
    config = replace(BASE, max_tokens_in_paged_kv_cache=60)  # some requests are larger


class ChosenMaxUtilization(ChosenMachine):
    config = replace(BASE, **MAX_UTILIZATION)


class ChosenLeases(ChosenMachine):
    """The engine gives no KV events: where KV is is estimated."""

    config = replace(BASE, lease_tokens=5, kv_event_buffer_max_size=0)


class ChosenLeasesMaxUtilizationUnchunked(ChosenMachine):
    config = replace(BASE, lease_tokens=3, **MAX_UTILIZATION, **UNCHUNKED)


class ChosenRoomyUnchunked(ChosenMachine):
    config = replace(BASE, **UNCHUNKED, **ROOMY)


class SlackNoEvict(SlackMachine):
    config = BASE


class SlackMaxUtilization(SlackMachine):
    """Nobody has slack enough to be spared when the pool runs out."""

    config = replace(
        BASE, max_tokens_in_paged_kv_cache=48, kv_event_buffer_max_size=0, **MAX_UTILIZATION
    )
    policy = replace(EAGER, slack_margin_s=3.0)


class SlackLeases(SlackMachine):
    """So few events are kept that some are missed."""

    config = replace(BASE, lease_tokens=8, kv_event_buffer_max_size=3)


class SlackHost(SlackMachine):
    """A host tier by TensorRT-LLM's rules."""

    config = replace(BASE, max_tokens_in_paged_kv_cache=48, **HOST, **MAX_UTILIZATION)


class SlackTiering(SlackMachine):
    """A host tier that is told what to do."""

    config = replace(
        BASE, max_tokens_in_paged_kv_cache=48, kv_tiering=True, **HOST, **MAX_UTILIZATION
    )


class ChosenHost(ChosenMachine):
    config = replace(BASE, max_tokens_in_paged_kv_cache=40, **HOST)


class SlackLeasesMaxUtilizationUnchunkedRoomy(SlackMachine):
    config = replace(BASE, lease_tokens=4, **MAX_UTILIZATION, **UNCHUNKED, **ROOMY)


class FcfsNoEvict(FcfsMachine):
    config = replace(BASE, max_queue_size=12)


class FcfsLeasesMaxUtilization(FcfsMachine):
    config = replace(BASE, lease_tokens=6, **MAX_UTILIZATION)


MACHINES: tuple[type[CoordinatorMachine], ...] = (
    *(ChosenNoEvict, ChosenMaxUtilization, ChosenLeases, ChosenLeasesMaxUtilizationUnchunked),
    *(ChosenRoomyUnchunked, SlackNoEvict, SlackMaxUtilization, SlackLeases),
    *(SlackHost, SlackTiering, ChosenHost),
    *(SlackLeasesMaxUtilizationUnchunkedRoomy, FcfsNoEvict, FcfsLeasesMaxUtilization),
)

SETTINGS = settings(
    max_examples=NUM_EXAMPLES * max(1, SOAK),
    stateful_step_count=50,
    deadline=None,
    derandomize=not SOAK,
    print_blob=True,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)

MUST_HAPPEN = (
    *("num_ok", "num_failed", "num_cancelled", "num_timed_out", "num_overloaded"),
    *("num_pauses", "num_forced_pauses", "num_internal_pauses", "num_lease_ends", "num_resumes"),
    *("num_resumes_recomputed", "num_engine_losses", "num_recovered", "holds", "shutdowns"),
    *("second losses", "losses of what cannot be paused", "failed steps", "refused by the engine"),
    *("end length", "end stop", "SlackNoEvict pauses", "SlackMaxUtilization pauses"),
    *("num_resumes_from_cache", "num_resumes_from_host", "num_offloads_completed"),
    *("num_onboards_completed", "num_host_evicted_blocks", "num_kv_event_gaps"),
    "examples without eviction",
)

ran: set[str] = set()


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.__name__)
def test_any_interleaving(machine: type[CoordinatorMachine]) -> None:
    if not SOAK:
        seed(zlib.crc32(machine.__name__.encode()))(machine)
    run_state_machine_as_test(machine, settings=SETTINGS)
    ran.add(machine.__name__)


def test_all_of_it_happened_in_enough_steps() -> None:
    """Workers that share the tests of this file would each see a part: with xdist, use
    `--dist loadfile`."""
    if len(ran) < len(MACHINES):
        pytest.skip("only some of the machines ran here")
    print(dict(sorted(TOTALS.items())))  # noqa: T201
    assert TOTALS["steps"] >= MIN_STEPS * max(1, SOAK)
    assert not [name for name in MUST_HAPPEN if not TOTALS[name]]
