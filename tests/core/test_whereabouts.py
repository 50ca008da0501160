"""Where KV is, as the planner sees it, and what is asked of the tiers; on the real engine core."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

import pytest

from tests.core.harness import CONFIG, ChosenPlanner, Harness
from tests.support.stepped import SteppedExecutor
from tokenflow.config import ServingConfig
from tokenflow.errors import EngineLostError
from tokenflow.executor.kv_api import KvLocation, KvTiering
from tokenflow.inflight.scripted_runner import KV_BYTES_PER_TOKEN
from tokenflow.session import Session
from tokenflow.types import Decision, SessionState, Snapshot

HOST = dataclasses.replace(CONFIG, kv_cache_host_memory_bytes=12 * 4 * KV_BYTES_PER_TOKEN)
TIERED = dataclasses.replace(HOST, kv_tiering=True)
ESTIMATED = dataclasses.replace(HOST, kv_event_buffer_max_size=0)
PROMPT = (1, 2, 3, 4, 5, 6, 7, 8, 9)
OTHER = (40, 41, 42, 43, 44, 45, 46, 47, 48, 49)


class HintPlanner(ChosenPlanner):
    """Adds hints to the decisions of its base, once."""

    def __init__(self) -> None:
        super().__init__(CONFIG.max_batch_size)
        self.hints = Decision()
        self.repeats = False

    def __call__(self, snapshot: Snapshot) -> Decision:
        decision, hints = super().__call__(snapshot), self.hints
        if not self.repeats:
            self.hints = Decision()
        return dataclasses.replace(
            decision,
            offload=hints.offload,
            prefetch=hints.prefetch,
            recompute=tuple(slot for slot in hints.recompute if slot in decision.resume),
        )


class RecordedTiering:
    """Notes what was asked, and passes it on."""

    def __init__(self, tiering: KvTiering) -> None:
        self._tiering = tiering
        self.asked: list[tuple[str, int, int]] = []
        self.is_lost = False

    def _note(self, name: str, token_ids: Sequence[int], max_blocks: int) -> None:
        if self.is_lost:
            raise EngineLostError("it has ended")
        self.asked.append((name, len(token_ids), max_blocks))

    def locate(self, token_ids: Sequence[int], cache_salt_id: int | None = None) -> KvLocation:
        raise AssertionError("the loop must not wait")

    def offload(
        self, token_ids: Sequence[int], max_blocks: int, cache_salt_id: int | None = None
    ) -> None:
        self._note("offload", token_ids, max_blocks)
        self._tiering.offload(token_ids, max_blocks, cache_salt_id)

    def prefetch(self, token_ids: Sequence[int], cache_salt_id: int | None = None) -> None:
        self._note("prefetch", token_ids, 0)
        self._tiering.prefetch(token_ids, cache_salt_id)

    def drop_host(self, token_ids: Sequence[int], cache_salt_id: int | None = None) -> None:
        self._note("drop_host", token_ids, 0)
        self._tiering.drop_host(token_ids, cache_salt_id)


class TieringExecutor(SteppedExecutor):
    def get_kv_tiering(self) -> RecordedTiering | None:  # type: ignore[override]
        tiering = super().get_kv_tiering()
        if tiering is None:
            return None
        if not hasattr(self, "recorded"):
            self.recorded = RecordedTiering(tiering)
        return self.recorded


def make(config: ServingConfig) -> Harness:
    return Harness(config, HintPlanner(), executor_type=TieringExecutor)


def planner_of(h: Harness) -> HintPlanner:
    assert isinstance(h.planner, HintPlanner)
    return h.planner


def session_of(h: Harness, handle: int) -> Session:
    session = h.coordinator.table.get(handle)
    assert session is not None
    return session


def row(h: Harness, handle: int) -> tuple[int, int, int]:
    """num_resume_tokens, num_host_blocks, num_copied_blocks."""
    s = h.coordinator.snapshot(h.now).sessions
    i = s.slot.tolist().index(session_of(h, handle).slot)
    return int(s.num_resume_tokens[i]), int(s.num_host_blocks[i]), int(s.num_copied_blocks[i])


def paused(h: Harness, *, num_tokens: int = 20) -> int:
    """A stream paused at so many tokens in all, which nobody resumes."""
    handle = h.submit(PROMPT, 30)
    while session_of(h, handle).num_tokens < num_tokens:
        h.step()
    planner_of(h).hold_paused = True
    h.pause(handle)
    while h.state(handle) is not SessionState.PREEMPTED:
        h.step()
    return handle


def press(h: Harness) -> None:
    """Three other requests hold 39 of the 40 blocks together at their end, and go."""
    handles = []
    for _ in range(3):
        first = h.coordinator.new_handle() % 90
        handles.append(h.submit(tuple((first + i * i) % 97 for i in range(20)), 33))
    while any(h.state(handle) is not None for handle in handles):
        h.step()


@pytest.mark.parametrize("config", [HOST, TIERED, ESTIMATED], ids=["rules", "tiering", "estimate"])
def test_kept_then_on_the_host_then_gone(config: ServingConfig) -> None:
    h = make(config)
    handle = paused(h)
    num_tokens = session_of(h, handle).num_tokens
    assert row(h, handle) == (1, 0, 0)
    press(h)
    truth = h.executor.batcher.kv.ahead.locate(session_of(h, handle).token_ids)
    assert truth.num_host_blocks == 4
    num_resume_tokens, num_host_blocks, _ = row(h, handle)
    assert num_resume_tokens == max(1, num_tokens - truth.num_tokens) == 1
    spare = 1 if config is ESTIMATED else 0  # it counts blocks of tokens that have no KV
    assert 4 <= num_host_blocks <= 4 + spare
    if config is not TIERED:  # there, what has ended gives way first
        for _ in range(3):
            press(h)
        assert h.executor.batcher.kv.ahead.locate(session_of(h, handle).token_ids).num_tokens == 0
        assert row(h, handle) == (num_tokens, 0, 0)
    planner_of(h).hold_paused = False
    h.run_to_empty()
    h.expect_whole(handle, PROMPT, 30)
    assert h.coordinator.counters.num_resumes_recomputed == (config is not TIERED)


def test_a_resume_from_the_host_is_counted_as_one() -> None:
    h = make(HOST)
    handle = paused(h)
    press(h)
    planner_of(h).hold_paused = False
    h.run_to_empty()
    h.expect_whole(handle, PROMPT, 30)
    counters = h.coordinator.counters
    assert (counters.num_resumes_from_host, counters.num_resumes_recomputed) == (1, 0)
    assert counters.num_onboards_completed > 0
    assert counters.num_offloads_completed > 0
    tiers = h.coordinator.tiers
    assert tiers is not None
    assert tiers.num_device_used_blocks == 0
    assert tiers.num_device_in_transit_blocks == tiers.num_host_in_transit_blocks == 0
    assert h.coordinator.snapshot(h.now).kv.num_host_blocks == tiers.num_host_blocks == 12


def test_a_plan_costs_nothing_while_nothing_moves() -> None:
    h = make(HOST)
    paused(h)
    h.plan()
    mirror = h.coordinator._engine._whereabouts._mirror
    assert mirror.changed() == []
    running = h.submit((60, 61), 20)
    h.step()
    h.step()
    assert h.state(running) is SessionState.RUNNING
    h.coordinator._engine._whereabouts.hear()
    assert mirror.changed() == []


def test_watches_of_those_who_left_do_not_pile_up() -> None:
    h = make(dataclasses.replace(HOST, max_queue_size=4000))
    mirror = h.coordinator._engine._whereabouts._mirror
    for _ in range(300):
        handle = paused(h, num_tokens=11)
        h.plan()
        h.coordinator.cancel(handle, h.now)
        planner_of(h).hold_paused = False
    assert len(h.coordinator.table) <= 1
    h.plan()
    h.submit((1, 2), 1)
    h.run_to_empty()
    assert mirror.num_watched <= 260


def test_events_that_are_missed_leave_the_estimate(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="tokenflow"):
        h = make(dataclasses.replace(HOST, kv_event_buffer_max_size=4))
    assert "where KV is kept is mirrored" in [r.getMessage() for r in caplog.records]
    handle = paused(h)
    assert h.coordinator.kv_is_mirrored
    for first in (40, 50):
        h.submit(tuple(range(first, first + 20)), 8)
    h.plan()
    for _ in range(12):  # nobody listens
        h.begin()
        h.end(heard=False)
    h.hear()
    h.plan()
    assert not h.coordinator.kv_is_mirrored
    assert h.coordinator.counters.num_kv_event_gaps >= 1
    assert row(h, handle) == (1, 0, 0), "the estimate knows that the pool was never short"
    for _ in range(3):
        press(h)
    assert row(h, handle) == (session_of(h, handle).num_tokens, 0, 0)
    with caplog.at_level(logging.INFO, logger="tokenflow"):
        make(dataclasses.replace(HOST, kv_event_buffer_max_size=0))
    assert "the engine gives no KV events" in caplog.records[-1].getMessage()


# -- hints ---------------------------------------------------------------------------------------


def test_hints_reach_the_engine_and_their_effect_comes_back() -> None:
    h = make(TIERED)
    handle = h.submit(PROMPT, 30)
    for _ in range(8):
        h.step()
    slot = session_of(h, handle).slot
    planner_of(h).hints = Decision(offload=((slot, 2),))
    h.step()
    h.step()
    asked = h.executor.get_kv_tiering().asked
    assert asked == [("offload", 9, 2)]
    assert row(h, handle)[2] == 2
    planner_of(h).hints = Decision(offload=((slot, 1),))
    h.step()
    h.step()
    assert asked[1:] == [("offload", 13, 1)], "with the token behind it: the last is not looked up"
    assert row(h, handle)[2] == 3
    planner_of(h).hold_paused = True
    h.pause(handle)
    h.step()
    h.step()
    assert h.state(handle) is SessionState.PREEMPTED
    assert row(h, handle)[2] == 0, "only of what runs"
    planner_of(h).hold_paused = False
    h.run_to_empty()
    h.expect_whole(handle, PROMPT, 30)


def test_what_is_on_the_host_is_wanted_back_or_given_up() -> None:
    h = make(TIERED)
    handle = paused(h)
    press(h)
    planner, slot = planner_of(h), session_of(h, handle).slot
    assert row(h, handle)[1] > 0
    planner.hints, planner.repeats = Decision(prefetch=(slot,)), True
    for _ in range(3):
        h.step()
    asked = h.executor.get_kv_tiering().asked
    assert asked == [("prefetch", session_of(h, handle).num_tokens, 0)], "once in a while"
    planner.repeats, planner.hints = False, Decision()
    press(h)
    resume_tokens, num_host, _ = row(h, handle)
    assert num_host > 0
    planner.hold_paused = False
    planner.hints = Decision(recompute=(slot,))
    num_tokens = session_of(h, handle).num_tokens
    h.run_to_empty()
    assert asked[-1] == ("drop_host", num_tokens, 0)
    counters = h.coordinator.counters
    assert counters.num_resumes_recomputed == 1
    assert counters.num_recomputed_tokens >= resume_tokens + 4
    h.expect_whole(handle, PROMPT, 30)


def test_an_engine_without_tiering_is_never_asked() -> None:
    h = make(HOST)
    handle = h.submit(PROMPT, 20)
    for _ in range(5):
        h.step()
    assert not h.coordinator.snapshot(h.now).kv.has_tiering
    planner_of(h).hints = Decision(offload=((session_of(h, handle).slot, 2),))
    h.run_to_empty()
    assert h.coordinator.counters.num_offloads_started == 0
    h.expect_whole(handle, PROMPT, 20)


def test_a_lost_engine_is_asked_nothing_and_the_next_one_is() -> None:
    h = make(TIERED)
    handle = paused(h)
    press(h)
    counters = h.coordinator.counters
    num_offloads = counters.num_offloads_completed
    assert row(h, handle)[1] > 0
    assert num_offloads > 0
    old = h.executor.get_kv_tiering()
    planner, slot = planner_of(h), session_of(h, handle).slot
    old.is_lost = True
    h.executor.lose()
    planner.hints = Decision(prefetch=(slot,))
    h.plan()  # it has ended, and nobody knows yet: no failure of ours
    assert old.asked == []
    h.notice_loss()
    assert not h.coordinator.snapshot(h.now).kv.has_tiering
    assert h.coordinator.tiers is None
    assert row(h, handle) == (session_of(h, handle).num_tokens, 0, 0)
    assert h.coordinator.snapshot(h.now).kv.num_host_blocks == 0
    h.start_engine()
    assert h.coordinator.snapshot(h.now).kv.has_tiering
    assert h.coordinator.kv_is_mirrored
    assert row(h, handle) == (session_of(h, handle).num_tokens, 0, 0)
    planner.hold_paused = False
    for _ in range(4):
        h.step()
    assert h.state(handle) is SessionState.RUNNING
    planner.hints = Decision(offload=((slot, 1),))
    h.run_to_empty()
    assert old.asked == []
    assert [name for name, *_ in h.executor.get_kv_tiering().asked] == ["offload"]
    assert counters.num_offloads_completed >= num_offloads + 1, "totals outlive an engine"
    h.expect_whole(handle, PROMPT, 30)
    h.expect_nothing_left()
