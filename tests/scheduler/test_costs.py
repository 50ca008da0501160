"""The cost model: learns the true costs, follows a change of speed, ignores outliers."""

from __future__ import annotations

import random

import msgspec
import pytest

from tests.scheduler.build import paused, running, snapshot, waiting
from tokenflow.costs import CostModel
from tokenflow.executor.api import InflightBatchingStats, IterationStats, KvCacheStats
from tokenflow.policies import TokenflowPolicy
from tokenflow.scheduler import plan

TRUE = (0.045, 0.0013, 2.6e-6, 1 / 2600)


def iteration(num_gen: int, context: int, prefill: int, *, speed: float = 1.0, extra: float = 0.0):
    base, per_sequence, per_token, per_prefill = TRUE
    seconds = base + per_sequence * num_gen + per_token * context + per_prefill * prefill
    return IterationStats(
        iter=0,
        iter_latency_ms=1e3 * (seconds / speed + extra),
        num_active_requests=num_gen,
        num_queued_requests=0,
        num_completed_requests=0,
        max_num_active_requests=8,
        kv_cache_stats=KvCacheStats(
            max_num_blocks=1, free_num_blocks=0, used_num_blocks=0, tokens_per_block=32
        ),
        inflight_batching_stats=InflightBatchingStats(
            num_scheduled_requests=num_gen + (prefill > 0),
            num_context_requests=int(prefill > 0),
            num_gen_requests=num_gen,
            num_paused_requests=0,
            num_ctx_tokens=prefill,
        ),
        num_gen_context_tokens=context,
    )


def feed(model: CostModel, num: int, *, speed: float = 1.0, seed: int = 1, outliers: bool = False):
    rng = random.Random(seed)
    for i in range(num):
        num_gen = rng.randint(0, 8)
        prefill = rng.choice([0, 0, 64, 256]) if num_gen else 64
        late = 1.0 if outliers and i % 10 == 9 else 0.0
        context = num_gen * rng.randint(50, 400)
        model.observe_iteration(iteration(num_gen, context, prefill, speed=speed, extra=late))


def assert_true_costs(model: CostModel, *, speed: float = 1.0, rel: float = 0.1) -> None:
    estimate = model.estimate(0.05)
    assert estimate.step_s(8, 8 * 300) == pytest.approx(
        (TRUE[0] + TRUE[1] * 8 + TRUE[2] * 2400) / speed, rel=rel
    )
    assert estimate.step_s(1, 100) == pytest.approx(
        (TRUE[0] + TRUE[1] + TRUE[2] * 100) / speed, rel=rel
    )
    assert estimate.prefill_tokens_per_s == pytest.approx(2600 * speed, rel=rel)


def test_learns_all_costs() -> None:
    model = CostModel()
    feed(model, 200)
    assert_true_costs(model, rel=0.05)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_ten_iterations_outweigh_the_prior(seed: int) -> None:
    model = CostModel()
    feed(model, 10, seed=seed)
    assert_true_costs(model, rel=0.4)


def test_outliers_do_not_count() -> None:
    model = CostModel()
    feed(model, 200, outliers=True)
    assert_true_costs(model, rel=0.15)


def test_one_constant_load_gives_its_step_and_no_nonsense() -> None:
    model = CostModel()
    for _ in range(100):
        model.observe_iteration(iteration(8, 2400, 0))
    estimate = model.estimate(0.05)
    assert estimate.step_s(8, 2400) == pytest.approx(
        TRUE[0] + 8 * TRUE[1] + 2400 * TRUE[2], rel=0.02
    )
    assert 0 < estimate.prefill_tokens_per_s < 1e6
    assert min(estimate.step_per_sequence_s, estimate.step_per_context_token_s) >= 0


def test_the_cost_of_prefill_is_not_forgotten_while_nobody_is_prefilled() -> None:
    model = CostModel()
    feed(model, 200)
    for i in range(1000):
        num_gen = 1 + i % 8
        model.observe_iteration(iteration(num_gen, num_gen * (50 + i % 300), 0))
    assert model.estimate(0.05).prefill_tokens_per_s == pytest.approx(2600, rel=0.15)


def test_prefill_that_hides_the_reading_of_weights_does_not_make_decoding_look_fast() -> None:
    """An accelerator: 20 ms to read the weights, in which 170 tokens of a chunk are computed."""

    def step(num_gen: int, context: int, prefill: int) -> IterationStats:
        seconds = max(0.020, prefill / 8500) + 0.15e-6 * context
        template = iteration(num_gen, context, prefill)
        return msgspec.structs.replace(template, iter_latency_ms=1e3 * seconds)

    model, rng = CostModel(), random.Random(1)
    for i in range(1000):
        num_gen = rng.randint(1, 60)
        prefill = rng.randint(300, 1000) if i > 40 else 0
        model.observe_iteration(step(num_gen, num_gen * rng.randint(500, 800), prefill))
    estimate = model.estimate(0.05)
    assert estimate.step_s(28, 42_000) == pytest.approx(0.020 + 0.15e-6 * 42_000, rel=0.15)
    assert estimate.prefill_tokens_per_s == pytest.approx(8500, rel=0.1)


def test_follows_a_change_of_speed_within_a_few_iterations() -> None:
    model = CostModel()
    feed(model, 200)
    feed(model, 12, speed=0.5, seed=2)
    assert_true_costs(model, speed=0.5, rel=0.2)


def test_the_prior_is_conservative() -> None:
    prior = CostModel().estimate(0.05)
    known = CostModel()
    feed(known, 50)
    learned = known.estimate(0.05)
    assert prior.step_s(8, 2400) > 2 * learned.step_s(8, 2400)
    assert prior.prefill_tokens_per_s < learned.prefill_tokens_per_s / 2
    assert prior.pause_s > learned.pause_s
    assert prior.resume_s > learned.resume_s


def test_large_batches_do_not_make_small_ones_look_fast() -> None:
    """Reading the weights hides the arithmetic of the first 150 sequences; each more takes 20 µs.
    A crowd is all that is seen for long, after a few steps with one."""

    def seconds(num_gen: int, context: int) -> float:
        return 0.005 + 2e-5 * max(0, num_gen - 150) + 3.4e-8 * context

    model, rng = CostModel(), random.Random(2)
    stats = [(1, 1000 + i) for i in range(60)]
    for i in range(400):
        num_gen = rng.randint(180, 260)
        stats.append((num_gen, num_gen * (600 + i)))
    for num_gen, context in stats:
        seen = iteration(num_gen, context, 0)
        latency_ms = 1e3 * seconds(num_gen, context)
        model.observe_iteration(msgspec.structs.replace(seen, iter_latency_ms=latency_ms))
    estimate = model.estimate(0.05)
    assert estimate.step_base_s >= 0.0049
    assert estimate.step_s(220, 200_000) == pytest.approx(seconds(220, 200_000), rel=0.03)
    assert estimate.step_s(40, 200_000) >= 0.9 * seconds(40, 200_000)


def test_iterations_without_work_are_ignored() -> None:
    model = CostModel()
    model.observe_iteration(iteration(0, 0, 0))
    assert model.num_observed == 0


def test_round_trips_are_the_upper_quartile_of_what_was_seen() -> None:
    model = CostModel()
    feed(model, 50)
    for seconds in [0.1] * 12 + [0.2] * 3 + [9.0]:
        model.observe_pause(seconds)
        model.observe_resume(seconds + 259 / 2600, 260)
    estimate = model.estimate(0.05)
    assert estimate.pause_s == pytest.approx(0.1)
    assert estimate.resume_s == pytest.approx(0.1, abs=0.02)


def test_what_a_resume_waited_for_a_crowd_is_forgotten() -> None:
    """Where nobody may be paused because resumes took 6 s, no shorter one would be seen."""
    model = CostModel()
    feed(model, 50)
    for _ in range(40):
        model.observe_resume(6.0, 1)
    assert model.estimate(0.05).resume_s == 6.0
    feed(model, 100)
    assert model.estimate(0.05).resume_s == 6.0
    feed(model, 300)
    unknown_s = model.estimate(0.05).resume_s
    assert 0.1 < unknown_s < 0.4  # as before the first: two steps
    model.observe_resume(0.3, 1)
    assert model.estimate(0.05).resume_s == 0.3


def test_an_engine_of_half_the_speed_moves_the_pause_threshold() -> None:
    """The same streams: paused for a newcomer at full speed, not at half of it."""

    def pauses(speed: float) -> bool:
        model = CostModel()
        feed(model, 60, speed=speed)
        rows = [running(1.2), running(0.3), running(0.3), waiting()]
        decision = plan(
            snapshot(rows, max_batch_size=3, costs=model.estimate(0.05)), TokenflowPolicy()
        )
        return bool(decision.pause)

    assert pauses(1.0)
    assert not pauses(0.5)


def test_an_engine_of_half_the_speed_brings_streams_back_earlier() -> None:
    def resumes(speed: float) -> bool:
        model = CostModel()
        feed(model, 60, speed=speed)
        rows = [running(9.0), running(9.0), paused(0.85, num_generated=20, max_tokens=40)]
        decision = plan(
            snapshot(rows, max_batch_size=2, costs=model.estimate(0.05)), TokenflowPolicy()
        )
        return bool(decision.resume)

    assert not resumes(1.0)
    assert resumes(0.5)


def test_an_estimate_holds_until_something_new_is_observed() -> None:
    model = CostModel()
    first = model.estimate(0.05)
    assert model.estimate(0.05) is first
    assert model.estimate(0.1).plan_interval_s == 0.1
    model.observe_pause(9.0)
    assert model.estimate(0.05).pause_s > first.pause_s
    model.observe_resume(9.0, 1)
    assert model.estimate(0.05).resume_s > first.resume_s
