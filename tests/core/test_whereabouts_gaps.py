"""Where KV is after events were missed, and what knowing it costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from tests.core.harness import CONFIG, ChosenPlanner, Harness
from tokenflow.answers import Counters
from tokenflow.executor.api import CapacitySchedulerPolicy
from tokenflow.executor.kv_api import (
    KVCacheCreatedData,
    KVCacheEvent,
    KVCacheEventData,
    KVCacheEventDiffInt,
    KVCacheStoredBlockData,
    KVCacheStoredData,
    KVCacheUpdatedData,
)
from tokenflow.inflight.scripted_runner import KV_BYTES_PER_TOKEN
from tokenflow.session import Session
from tokenflow.session_table import SessionTable
from tokenflow.types import Decision, GenerateRequest, SessionState, Snapshot
from tokenflow.whereabouts import KvWhereabouts

S = SessionState
PROMPT = (1, 2, 3, 4, 5, 6, 7, 8, 9)
TIERED = dataclasses.replace(
    CONFIG,
    kv_cache_host_memory_bytes=12 * 4 * KV_BYTES_PER_TOKEN,
    kv_tiering=True,
    kv_event_buffer_max_size=20,
)


class WritingThrough(ChosenPlanner):
    """Asks for the next block of each running stream to be copied, in each plan."""

    def __call__(self, snapshot: Snapshot) -> Decision:
        decision, s = super().__call__(snapshot), snapshot.sessions
        running = [
            (int(slot), 1)
            for slot, state in zip(s.slot, s.state, strict=True)
            if state == S.RUNNING and slot not in decision.pause
        ]
        return dataclasses.replace(decision, offload=tuple(running))


def session_of(h: Harness, handle: int) -> Session:
    session = h.coordinator.table.get(handle)
    assert session is not None
    return session


def engine_says(h: Harness, session: Session) -> tuple[int, int, int]:
    """num_resume_tokens, num_host_blocks, num_copied_blocks."""
    location = h.executor.batcher.kv.ahead.locate(session.token_ids)
    num_left = max(1, session.num_tokens - location.num_tokens)
    return num_left, location.num_host_blocks, location.num_copied_blocks


def test_after_a_gap_all_is_known_again_and_write_through_goes_on() -> None:
    planner = WritingThrough(CONFIG.max_batch_size)
    h = Harness(TIERED, planner)
    paused = h.submit(PROMPT, 30)
    while session_of(h, paused).num_tokens < 18:
        h.step()
    planner.hold_paused = True
    h.pause(paused)
    while h.state(paused) is not S.PREEMPTED:
        h.step()
    running = h.submit(tuple(range(40, 50)), 50)
    h.submit(tuple(range(60, 70)), 50)
    h.step()
    for _ in range(43):  # nobody listens
        h.begin()
        h.end(heard=False)
    h.hear()
    h.plan()
    counters = h.coordinator.counters
    assert not h.coordinator.kv_is_mirrored
    assert counters.num_kv_event_gaps == 1
    h.begin()
    h.end()
    h.plan()
    assert h.coordinator.kv_is_mirrored
    assert counters.num_kv_event_gaps == 1
    session = session_of(h, paused)
    assert (session.num_resume_tokens, session.num_host_blocks) == engine_says(h, session)[:2]
    session = session_of(h, running)
    assert session.state is S.RUNNING
    num_copied = session.num_copied_blocks
    assert num_copied == engine_says(h, session)[2]
    for _ in range(4):
        h.step()
    h.plan()
    assert session.num_copied_blocks == engine_says(h, session)[2] > num_copied
    planner.hold_paused = False
    h.run_to_empty()
    h.expect_whole(paused, PROMPT, 30)
    h.expect_nothing_left()


@pytest.mark.parametrize("buffer_size", [0, 1000], ids=["estimate", "mirror"])
def test_who_leaves_before_the_first_token_leaves_nothing_behind(buffer_size: int) -> None:
    h = Harness(dataclasses.replace(CONFIG, kv_event_buffer_max_size=buffer_size))
    whereabouts = h.coordinator._engine._whereabouts
    for _ in range(100):
        handle = h.submit(PROMPT, 20)
        h.plan()
        assert h.state(handle) is S.PREFILLING
        h.coordinator.cancel(handle, h.now)
        for _ in range(3):
            h.step()
    h.submit(PROMPT, 20)
    h.plan()
    h.plan()
    assert len(whereabouts._starting) == 1
    h.run_to_empty()


# -- what it costs -------------------------------------------------------------------------------

SIZE, NUM_BLOCKS_EACH = 4, 3


class CountedTokens(tuple[int, ...]):
    """A prompt that counts who reads it."""

    num_reads = 0

    def __iter__(self) -> Iterator[int]:
        CountedTokens.num_reads += 1
        return super().__iter__()


class EventSource:
    """An event manager that says what the test wants."""

    def __init__(self) -> None:
        self._events: list[KVCacheEvent] = []
        self._num_events = 0

    def say(self, data: KVCacheEventData) -> None:
        self._events.append(KVCacheEvent(self._num_events, data))
        self._num_events += 1

    def get_latest_events(self, timeout_ms: float | None = None) -> list[KVCacheEvent]:
        events, self._events = self._events, []
        return events


class Crowd:
    """Paused sessions with KV on the device, as many as fit, and requests that press on them."""

    def __init__(self, num_sessions: int) -> None:
        self.num_blocks = num_sessions * NUM_BLOCKS_EACH
        self.events = EventSource()
        self.events.say(KVCacheCreatedData([self.num_blocks, self.num_blocks]))
        self.table = SessionTable(
            capacity_policy=CapacitySchedulerPolicy.MAX_UTILIZATION,
            tokens_per_block=SIZE,
            default_read_rate=6.0,
            max_seq_len=1000,
            max_input_len=999,
            lease_tokens=0,
        )
        executor = SimpleNamespace(
            get_kv_cache_event_manager=lambda: self.events, get_kv_tiering=lambda: None
        )
        self.whereabouts = KvWhereabouts(executor, self.table, Counters(), self.num_blocks, SIZE)
        self.whereabouts.set_num_host_blocks(self.num_blocks)
        self.paused = [self._pause(handle) for handle in range(num_sessions)]
        self.whereabouts.refresh()

    def start(self, handle: int, num_tokens: int) -> Session:
        prompt = CountedTokens([handle, *range(num_tokens - 1)])
        request = GenerateRequest(
            request_id=str(handle), input_token_ids=prompt, max_tokens=50, arrival_time=0.0
        )
        session = self.table.add(handle, request, 0.0)
        self.table.enter_engine(session, handle, 0.0)
        self.whereabouts.started(session)
        return session

    def _pause(self, handle: int) -> Session:
        session = self.start(handle, NUM_BLOCKS_EACH * SIZE)
        tokens = session.token_ids
        self.events.say(
            KVCacheStoredData(
                None,
                [
                    KVCacheStoredBlockData(self.name(handle, i), tokens[i * SIZE :][:SIZE], 0, 35)
                    for i in range(NUM_BLOCKS_EACH)
                ],
            )
        )
        for state in (S.RUNNING, S.PAUSING, S.PREEMPTED):
            self.table.transition(session, state, 0.0)
            if state is S.RUNNING:
                self.whereabouts.running(session)
        self.whereabouts.released(session)
        self.whereabouts.paused(session)
        return session

    def name(self, handle: int, i: int) -> int:
        return handle * NUM_BLOCKS_EACH + i

    def move_out(self, session: Session) -> None:
        """To the host, the end first."""
        for i in reversed(range(NUM_BLOCKS_EACH)):
            diff = KVCacheEventDiffInt(0, 1)
            name = self.name(session.handle, i)
            self.events.say(KVCacheUpdatedData(name, cache_level=diff))

    @property
    def expected_host_blocks(self) -> list[int]:
        return [session.num_host_blocks for session in self.paused]


def test_who_is_about_to_lose_blocks_is_known_without_looking_at_anybody() -> None:
    crowd = Crowd(60)
    for session in crowd.paused[:20]:
        crowd.move_out(session)
    crowd.whereabouts.refresh()
    assert crowd.expected_host_blocks == [NUM_BLOCKS_EACH] * 20 + [0] * 40
    for handle in range(100, 106):
        crowd.start(handle, 11 * SIZE)
    CountedTokens.num_reads = 0
    for _ in range(3):
        crowd.whereabouts.refresh()
        # 66 blocks and the 6 that are not stored yet; 60 of them are free
        assert crowd.expected_host_blocks == [NUM_BLOCKS_EACH] * 24 + [0] * 36
    assert CountedTokens.num_reads == 0
    for session in crowd.paused[20:22]:
        crowd.move_out(session)
    crowd.whereabouts.refresh()
    assert CountedTokens.num_reads == 2, "those who moved"
    assert crowd.expected_host_blocks == [NUM_BLOCKS_EACH] * 24 + [0] * 36
    for handle in range(100, 106):
        session = crowd.table.get(handle)
        assert session is not None
        crowd.table.transition(session, S.RUNNING, 0.0)
        crowd.whereabouts.running(session)
    crowd.whereabouts.refresh()
    assert crowd.expected_host_blocks == [NUM_BLOCKS_EACH] * 22 + [0] * 38, "as it is"
    assert CountedTokens.num_reads == 2


def test_an_ended_session_is_not_kept() -> None:
    crowd = Crowd(400)
    for session in crowd.paused[10:]:
        crowd.table.transition(session, S.FINISHED, 0.0)
    crowd.whereabouts.refresh()
    assert len(crowd.whereabouts._paused) == 10
    assert crowd.whereabouts._mirror.num_watched == 10
