"""What holds of a coordinator and its engine between any two calls.

Everything is worked out anew from the sessions, the engine's requests and the configuration. Cheap
enough to be checked after every step.
"""

from __future__ import annotations

import math
from dataclasses import asdict

from tests.core.harness import Harness
from tests.core.watching import NO_EVICT, WatchedExecutor
from tokenflow.cache_estimate import CacheEstimate
from tokenflow.executor.kv_api import KvLocation
from tokenflow.instants import Instants
from tokenflow.session import IN_ENGINE, Session
from tokenflow.session_table import SessionTable
from tokenflow.types import SessionState

S = SessionState
RUNNING_STATES = (S.PREFILLING, S.RUNNING, S.RESUMING, S.CANCELLING)  # of the gauge
_MIN_SWEEP = 64  # of instants.py


def engine_of(h: Harness) -> WatchedExecutor:
    assert isinstance(h.executor, WatchedExecutor)
    return h.executor


def check_table(h: Harness) -> None:
    """Counts, order and columns are those of the sessions."""
    table = h.coordinator.table
    sessions = list(table)
    states = [session.state for session in sessions]
    handles = [session.handle for session in sessions]
    assert len(table) == len(sessions)
    assert handles == sorted(handles)
    assert S.FINISHED not in states
    for state in S:
        assert table.count(state) == states.count(state)
    check_waits_and_holds(table)
    assert not table.groups.held_running  # each is paused at once
    assert table.num_filled_blocks == sum(
        _num_blocks(h, s.num_tokens) for s in sessions if s.state in IN_ENGINE
    )
    c = table.columns(h.now)
    columns = (
        *(c.slot, c.state, c.arrival_time, c.priority, c.has_reader, c.started, c.pausable, c.held),
        *(c.num_prompt_tokens, c.num_generated, c.max_tokens, c.num_pauses),
        *(c.num_blocks_held, c.num_blocks_needed, c.num_blocks_final),
    )
    rows = list(zip(*(column.tolist() for column in columns), strict=True))
    assert rows == [_row(h, session) for session in sessions]
    for session, slack_s, num_resume_tokens in zip(
        sessions, c.slack_s.tolist(), c.num_resume_tokens.tolist(), strict=True
    ):
        _check_reader(h, session, slack_s)
        if session.state is S.PREEMPTED and not h.executor.is_lost:
            assert 1 <= num_resume_tokens <= session.num_tokens
            assert num_resume_tokens == session.num_resume_tokens


def check_waits_and_holds(table: SessionTable) -> None:
    """Who waits and who is held is what a walk through all sessions finds."""
    groups = table.groups
    waiting = [s for s in table if s.state is S.WAITING and s.held_until is None]
    held = [s for s in table if s.held_until is not None and not s.answered]
    check_instants(groups.waits, at_least=len(waiting), at_most=len(waiting))
    for session in waiting:
        since = session.request.arrival_time + session.held_s
        assert groups.waits.get(session.handle) == since
    check_instants(groups.hold_ends, at_least=len(held), at_most=len(held))
    for session in held:
        assert groups.hold_ends.get(session.handle) == session.held_until
    running = [session.handle for session in held if session.state is S.RUNNING]
    assert sorted(groups.held_running) == running


def _row(h: Harness, session: Session) -> tuple[object, ...]:
    request = session.request
    num_prompt, num_generated = len(request.input_token_ids), len(session.output_token_ids)
    if session.state in IN_ENGINE:
        needed = held = _num_blocks_in_engine(h, session)
    else:
        needed, held = _num_blocks_to_start(h, session), 0
    full = min(num_prompt + request.max_tokens, h.config.max_seq_len) - 1
    return (
        *(session.slot, session.state, request.arrival_time, request.priority, request.has_reader),
        *(session.first_token_time is not None, _is_pausable(h, session)),
        *(session.held_until is not None, num_prompt, num_generated, request.max_tokens),
        *(session.num_pauses, held, needed, _num_blocks(h, full)),
    )


def _is_pausable(h: Harness, session: Session) -> bool:
    return h.coordinator.table.unpausable_reason(session.request) is None


def _num_blocks(h: Harness, num_tokens: int) -> int:
    return max(1, -(-num_tokens // h.config.tokens_per_block))


def _is_no_evict(h: Harness) -> bool:
    policy = h.config.executor_config().scheduler_config.capacity_scheduler_policy
    return policy is NO_EVICT


def _num_blocks_in_engine(h: Harness, session: Session) -> int:
    if _is_no_evict(h):
        assert session.executor_request_id is not None
        return engine_of(h).num_reserved_blocks(session.executor_request_id)
    return _num_blocks(h, session.num_tokens)


def _num_blocks_to_start(h: Harness, session: Session) -> int:
    if not _is_no_evict(h):
        return _num_blocks(h, session.num_tokens)
    num_left = session.request.max_tokens - len(session.output_token_ids)
    if h.config.lease_tokens and _is_pausable(h, session):
        num_left = min(num_left, h.config.lease_tokens)
    num_left = max(1, min(num_left, h.config.max_seq_len - session.num_tokens))
    return _num_blocks(h, session.num_tokens + num_left - 1)


def _check_reader(h: Harness, session: Session, slack_s: float) -> None:
    reader = session.reader
    assert reader.num_delivered == len(session.output_token_ids)
    assert 0 <= reader.unread(h.now) <= reader.num_delivered
    if session.first_token_time is None:
        assert math.isnan(slack_s)
    elif session.request.has_reader:
        assert math.isclose(slack_s, reader.slack_s(h.now), abs_tol=1e-9)
    else:
        assert slack_s == math.inf


def check_engine(h: Harness, orphan_ids: set[int]) -> None:
    """The engine knows the sessions that are in it and nobody else, but for `orphan_ids`."""
    coordinator, table = h.coordinator, h.coordinator.table
    known: set[int] = set()
    for session in table:
        id = session.executor_request_id
        if session.state in IN_ENGINE:
            assert coordinator.engine_is_up
            assert id is not None
            assert table.by_executor_id(id) is session
            known.add(id)
            if session.state in (S.PAUSING, S.CANCELLING):
                assert id in engine_of(h).cancelled_ids
        else:
            assert id is None
            assert session.lease_end is None
            assert not session.answered
        if not _is_pausable(h, session):
            assert session.state not in (S.PAUSING, S.PREEMPTED, S.RESUMING)
        if session.held_until is not None and not session.answered:
            assert session.state is not S.RUNNING
    if coordinator.engine_is_up:
        unfinished = engine_of(h).unfinished_ids
        assert known <= unfinished
        assert unfinished - known <= orphan_ids
    assert 0 <= coordinator.num_free_blocks <= coordinator.num_total_blocks


def check_counters(h: Harness) -> None:
    """Every request is counted once, and no gauge is negative."""
    coordinator, table = h.coordinator, h.coordinator.table
    c = coordinator.counters
    live = [session for session in table if not session.answered]
    ended = c.num_ok + c.num_failed + c.num_cancelled + c.num_timed_out
    assert c.num_received == ended + len(live)
    assert all(value >= 0 for value in asdict(c).values())
    assert c.num_forced_pauses <= c.num_pauses
    assert c.num_resumes_recomputed + c.num_resumes_from_host + c.num_resumes_from_cache <= (
        c.num_resumes
    )
    if _is_no_evict(h):
        assert c.num_internal_pauses == 0
    num_queued = coordinator.num_queued_in_engine
    assert 0 <= num_queued <= table.count(*RUNNING_STATES)
    assert coordinator.num_held == sum(session.held_until is not None for session in live)
    assert coordinator.stalled_s(h.now) >= 0
    deadlines = [s.deadline for s in live if s.request.timeout_s is not None]
    assert coordinator.next_plan_time() <= min(deadlines, default=math.inf)
    check_instants(table.groups.deadlines, at_least=len(deadlines), at_most=len(table))


def check_instants(instants: Instants, at_least: int, at_most: int) -> None:
    """So many are kept, and not many more entries."""
    assert at_least <= len(instants) <= at_most
    assert len(instants._heap) <= max(_MIN_SWEEP, 2 * len(instants))


def check_whereabouts(h: Harness) -> None:
    """As the planner is about to look: no more cached than there is room, and what a resume would
    compute and bring back follows from what is known."""
    coordinator = h.coordinator
    whereabouts = coordinator._engine._whereabouts
    _check_estimate(h, whereabouts._estimate)
    if h.executor.is_lost:
        return  # heard of, perhaps, but not told to the estimate
    if whereabouts.is_mirrored and _all_is_told(h):
        tiers, mirror = h.executor.batcher.kv.tier_stats(), whereabouts._mirror
        num_used, num_cached = tiers.num_device_used_blocks, tiers.num_device_cached_blocks
        assert num_cached <= mirror.num_device_blocks <= num_cached + num_used
    slots = coordinator.table.columns(h.now)
    num_host_blocks = dict(zip(slots.slot.tolist(), slots.num_host_blocks.tolist(), strict=True))
    for session in coordinator.table:
        if session.state is S.PREEMPTED:
            location = _location(h, session)
            num_left = max(1, session.num_tokens - location.num_tokens)
            num_host = location.num_host_blocks
            if whereabouts._starting:  # what they will take may be taken off already
                assert num_left <= session.num_resume_tokens <= session.num_tokens
                assert num_host <= num_host_blocks[session.slot] or not whereabouts.num_host_blocks
            else:
                assert session.num_resume_tokens == num_left
                assert num_host_blocks[session.slot] == num_host
        else:
            assert num_host_blocks[session.slot] == session.num_host_blocks
            assert session.num_host_blocks == 0 or session.state is S.RESUMING  # on the link


def _all_is_told(h: Harness) -> bool:
    """False in the middle of a step: events become visible at its end."""
    events = h.executor.batcher.kv.events
    return events is not None and not events._pending


def _location(h: Harness, session: Session) -> KvLocation:
    """What is known of a paused session; never more than the engine has, but for an estimate."""
    whereabouts = h.coordinator._engine._whereabouts
    device, host = whereabouts._estimate.num_blocks(session.handle)
    num_tokens = min((device + host) * h.config.tokens_per_block, session.num_tokens)
    estimated = KvLocation(num_tokens=num_tokens, num_device_blocks=device, num_host_blocks=host)
    if h.executor.get_kv_cache_event_manager() is None:
        return estimated
    mirrored = whereabouts._mirror.locate(session.token_ids)
    if _all_is_told(h):
        kv, token_ids = h.executor.batcher.kv, session.token_ids
        salts = {None} | {request.cache_salt_id for request in h.executor.requests.values()}
        there = max(kv.ahead.locate(token_ids, salt).num_tokens for salt in salts)
        assert min(mirrored.num_tokens, session.num_tokens - 1) <= there
    if whereabouts._has_salts:  # events do not tell whose tokens they are
        return min(mirrored, estimated, key=lambda location: location.num_tokens)
    if whereabouts.is_mirrored or mirrored.num_tokens >= estimated.num_tokens:
        return mirrored
    return estimated


def _check_estimate(h: Harness, estimate: CacheEstimate) -> None:
    coordinator = h.coordinator
    assert estimate._num_on_device == sum(estimate._device.values())
    assert estimate._num_on_host == sum(estimate._host.values()) <= estimate.num_host_blocks
    assert all(n > 0 for n in (*estimate._device.values(), *estimate._host.values()))
    num_filled = coordinator.table.num_filled_blocks
    num_cached = estimate._num_on_device
    assert num_cached == 0 or num_cached + num_filled <= coordinator.num_total_blocks
    for session in coordinator.table:
        num_kept = sum(estimate.num_blocks(session.handle)) * h.config.tokens_per_block
        if session.state is S.PREEMPTED:
            assert num_kept < session.num_tokens - 1 + h.config.tokens_per_block
        elif session.state in IN_ENGINE:
            assert num_kept == 0
