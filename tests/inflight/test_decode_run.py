"""Steps of a run say what the batcher's own steps say, at each boundary."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.inflight.helpers import GUARANTEED, MAX_UTILIZATION, executor_config, request
from tokenflow.executor.api import FinishReason, IterationStats, OutputConfig, Response
from tokenflow.executor.kv_api import KVCacheEvent, KVCacheStoredData
from tokenflow.inflight.batcher import InflightBatcher
from tokenflow.inflight.decode_run import DecodeRuns
from tokenflow.inflight.tiering import EngineTiering
from tokenflow.inflight.virtual_runner import END_ID, TOKEN_ID, VirtualRunner
from tokenflow.inflight.virtual_transport import CopyCosts

COPY_COSTS = CopyCosts(
    block_bytes=64, offload_bytes_per_s=640.0, onboard_bytes_per_s=320.0, start_s=0.01
)
PLAIN = OutputConfig(return_perf_metrics=True)


@dataclass
class Said:
    """What an engine says at one boundary."""

    now: float
    responses: list[Response] = field(default_factory=list)
    stats: list[IterationStats] = field(default_factory=list)
    events: list[KVCacheEvent] = field(default_factory=list)
    num_free_blocks: int = 0


class Engine:
    """A batcher in virtual time, with or without runs. num_together: steps made in runs."""

    def __init__(self, config, *, has_runs: bool) -> None:
        self.ends: dict[int | None, int] = {}  # by client id
        self.runner = VirtualRunner(
            self._cost, COPY_COSTS, num_before_end=lambda request: self.ends.get(request.client_id)
        )
        self.batcher = InflightBatcher(self.runner, config)
        self._runs = DecodeRuns(self.batcher, self.runner) if has_runs else None
        self._is_together = False
        self.tiering = EngineTiering(self.batcher.command)
        self.said: list[Said] = []
        self.num_together = 0

    @staticmethod
    def _cost(chunks, step):
        """Depends on everything that a chunk has."""
        seconds = 0.1 + 0.01 * (step % 3)
        for chunk in chunks:
            seconds += (
                1e-3 * len(chunk.token_ids) + 1e-5 * chunk.start + 1e-6 * len(chunk.block_ids)
            )
            seconds += 1e-7 * chunk.num_generated + 1e-8 * sum(chunk.token_ids)
        return seconds

    def begin(self, now: float) -> None:
        said = Said(now)
        self.runner.reset(now)
        self._is_together = self._runs is not None and self._runs.begin(now)
        if not self._is_together:
            said.responses = self.batcher.begin_step(now)
            self.batcher.forward()
        self._hear(said)

    def end(self, now: float) -> None:
        said = Said(now)
        step = self._runs.end(now) if self._runs is not None else None
        if step is None:
            result = self.batcher.finish_step(now)
            said.responses = result.responses
            said.stats = [] if result.stats is None else [result.stats]
        else:
            self.num_together += 1
            said.responses, said.stats = step.responses(), [step.stats]
        self._hear(said)

    def _hear(self, said: Said) -> None:
        said.events = self.batcher.kv.events.get_latest_events(0)
        said.num_free_blocks = self.batcher.kv.num_free_blocks
        self.said.append(said)


class Asking:
    """Asks an engine for what a script says."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._prompts: list[list[int]] = []

    def __call__(self, asked) -> None:
        for what, number in asked:
            getattr(self, what)(number)

    def ask(self, number: int) -> None:
        # The same prompt twice makes twins: their blocks are stored once.
        self._prompts.append([number % 3 + 1] * (2 + number % 9))
        asked_for = request(
            self._prompts[-1],
            1 + (7 * number) % 40,
            output_config=PLAIN,
            priority=0.9 if number % 5 == 0 else 0.5,
            end_id=END_ID if number % 4 == 0 else None,
            client_id=len(self._prompts),
        )
        if number % 4 == 0:
            self._engine.ends[len(self._prompts)] = (5 * number) % 24
        self._engine.batcher.enqueue(len(self._prompts), asked_for)

    def cancel(self, number: int) -> None:
        self._engine.batcher.cancel(1 + number % max(1, len(self._prompts)))

    def offload(self, number: int) -> None:
        if self._prompts:
            self._engine.tiering.offload(self._prompts[number % len(self._prompts)], 2)

    def prefetch(self, number: int) -> None:
        if self._prompts:
            self._engine.tiering.prefetch(self._prompts[number % len(self._prompts)])


def run(script, config, *, has_runs: bool) -> Engine:
    """script: by step, what is asked during it, and after it if the number is odd."""
    engine, now = Engine(config, has_runs=has_runs), 0.0
    asking = Asking(engine)
    for asked in [*script, *([()] * 150)]:
        engine.begin(now)
        asking([a for a in asked if a[1] % 2 == 0])
        now += engine.runner.step_s
        engine.end(now)
        asking([a for a in asked if a[1] % 2])
        if not engine.batcher.has_work:
            break
    engine.batcher.check_integrity()
    return engine


SCRIPTS = st.lists(
    st.lists(
        st.tuples(
            st.sampled_from(["ask", "ask", "ask", "cancel", "offload", "prefetch"]),
            st.integers(0, 60),
        ),
        max_size=2,
    ).map(tuple),
    max_size=25,
)


@settings(max_examples=200, deadline=None)
@given(
    script=SCRIPTS,
    policy=st.sampled_from([GUARANTEED, MAX_UTILIZATION]),
    num_blocks=st.integers(14, 30),
    num_host_blocks=st.sampled_from([0, 12]),
    kv_tiering=st.booleans(),
)
def test_any_script(script, policy, num_blocks, num_host_blocks, kv_tiering):
    config = executor_config(
        policy=policy,
        num_blocks=num_blocks,
        host_cache_size=num_host_blocks * COPY_COSTS.block_bytes,
        kv_tiering=kv_tiering and num_host_blocks > 0,
        event_buffer_max_size=1 << 16,
    )
    expected = run(script, config, has_runs=False)
    got = run(script, config, has_runs=True)
    for ours, theirs in zip(got.said, expected.said, strict=True):
        assert ours == theirs
    assert got.runner.num_sampled == expected.runner.num_sampled
    assert got.runner.num_steps == expected.runner.num_steps


def told_blocks(event: KVCacheEvent) -> list[object]:
    """The blocks that an event says are stored."""
    return list(event.data.blocks) if isinstance(event.data, KVCacheStoredData) else []


def test_a_quiet_batch_is_one_run():
    config = executor_config(num_blocks=60, event_buffer_max_size=1 << 16)
    script = [(("ask", 3), ("ask", 5)), *([()] * 20)]
    expected, got = (run(script, config, has_runs=has_runs) for has_runs in (False, True))
    assert got.said == expected.said
    assert got.num_together > 0.8 * len(got.said) / 2


def test_a_run_is_over_before_an_answer_ends_by_itself():
    """Of two that run together, one has as many tokens as it may have; the other's end token comes
    before, and is no part of the answer."""
    config = executor_config(num_blocks=60, event_buffer_max_size=1 << 16)
    expected, got = (
        run([(("ask", 50),), (("ask", 44),)], config, has_runs=r) for r in (False, True)
    )
    assert got.said == expected.said
    assert got.num_together > 10
    finals = [r.result for s in got.said for r in s.responses if r.result.is_final]
    reasons = [result.finish_reasons[0] for result in finals]
    assert reasons == [FinishReason.END_ID, FinishReason.LENGTH]
    # Number 44: (5 * 44) % 24 tokens of the 1 + (7 * 44) % 40 that it may have.
    tokens = [r.result.output_token_ids[0] for s in got.said for r in s.responses]
    assert sum(map(len, tokens)) == (1 + (7 * 50) % 40) + (5 * 44) % 24
    assert {token for some in tokens for token in some} == {TOKEN_ID}


def test_a_run_does_not_begin_when_the_first_in_line_has_left():
    """The second one's reservation does not fit beside the first one's, and the third, which would,
    stands behind it until it is cancelled."""
    config = executor_config(policy=GUARANTEED, num_blocks=14, event_buffer_max_size=1 << 16)
    script = [(("ask", 45), ("ask", 45)), (("ask", 40),), (("cancel", 22),)]
    expected, got = (run(script, config, has_runs=has_runs) for has_runs in (False, True))
    assert got.said == expected.said
    third = [i for i, s in enumerate(got.said) for r in s.responses if r.request_id == 3]
    assert third == [7], "at the end of the step after"
    assert got.num_together > 20


def test_a_run_is_over_before_somebody_is_paused():
    """Two that together outgrow the pool: the batcher pauses the second, which comes back."""
    config = executor_config(policy=MAX_UTILIZATION, num_blocks=13, event_buffer_max_size=1 << 16)
    script = [(("ask", 5), ("ask", 11)), *([()] * 20)]
    expected, got = (run(script, config, has_runs=has_runs) for has_runs in (False, True))
    assert got.said == expected.said
    assert got.num_together > 20
    num_paused = [
        entry.inflight_batching_stats.num_paused_requests for s in got.said for entry in s.stats
    ]
    assert 1 in num_paused[10:]


@pytest.mark.parametrize("steps_per_run", [1000, 3])
def test_who_has_twins_stores_its_blocks_when_they_are_gone(steps_per_run):
    """Both have one prompt, and compute it at once; the second, whose blocks are twins of what the
    first one left, grows until it has taken all of that, in the middle of a run."""
    prompt = [1] * 8
    said: list[list[Said]] = []
    for has_runs in (False, True):
        config = executor_config(
            policy=MAX_UTILIZATION, num_blocks=12, event_buffer_max_size=1 << 16
        )
        engine, now = Engine(config, has_runs=has_runs), 0.0
        engine.batcher.enqueue(1, request(prompt, 2, output_config=PLAIN))
        engine.batcher.enqueue(2, request(prompt, 39, output_config=PLAIN))
        for step in itertools.count(1):
            engine.begin(now)
            now += engine.runner.step_s
            engine.end(now)
            if not engine.batcher.has_work:
                break
            if step % steps_per_run == 0 and step < 38:  # it is refused, but ends the run
                engine.batcher.enqueue(100 + step, request([1] * 500, 1))
        said.append(engine.said)
    assert said[1] == said[0]
    assert engine.num_together > 20
    (late,) = (e.data for s in engine.said[60:-4] for e in s.events if len(told_blocks(e)) > 3)
    assert late.parent_hash is None, "from the first block on, long after it was computed"
