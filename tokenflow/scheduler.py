"""plan(Snapshot, policy) -> Decision: who runs, who is paused, who comes back.

Owns the order in which room is given away (the rules that allow are in scheduler_rules.py, the
forecasts in scheduler_load.py and scheduler_forecast.py, what is certain without them in
scheduler_sure.py, the room itself in scheduler_draft.py):
1. pinned: running streams keep what they hold; where the pool is about to run out under their
   growth, those with most slack are paused first (against their slack only if nobody else is
   left: counted as forced);
2. due: paused streams whose readers run dry soon; their full need is set aside first;
3. waiting: newcomers by priority, while the load is schedulable;
4. low: other paused streams, nearly empty readers first, into free room;
5. rest: paused streams that are well ahead, then newcomers beyond what is schedulable, in order of
   arrival, into free room only: nobody yields for them;
then exchanges between running and paused streams that gain more than they cost. In a burst, room
that announced newcomers will need is left out of 4 (for streams well ahead), and there are no
exchanges. Last, what remains free is used ahead of need: copies to and from the host tier
(scheduler_ahead.py).

Invariants: pure and stateless, the same Snapshot and policy give the same Decision; the snapshot
is never written; blocks and slots are never exceeded; no more victims than needed; nobody is
paused against its slack except as forced.
"""

from __future__ import annotations

import numpy as np

from tokenflow.executor.api import CapacitySchedulerPolicy
from tokenflow.policies import FcfsReservePolicy, Policy, TokenflowPolicy, rank
from tokenflow.scheduler_ahead import announced, prefetch, write_through
from tokenflow.scheduler_balance import exchange
from tokenflow.scheduler_crowd import Step, place_crowd
from tokenflow.scheduler_draft import Draft
from tokenflow.scheduler_fixed import FixedShare
from tokenflow.scheduler_forecast import PrefillBudget, can_bring_back
from tokenflow.scheduler_load import Load
from tokenflow.scheduler_rules import (
    Pool,
    Victims,
    blocks_left_at_full_length,
    due_rows,
    excess_order,
    is_low,
    victims,
)
from tokenflow.scheduler_view import PREEMPTED, WAITING, View, lowest, view_of
from tokenflow.types import Decision, FloatArray, IntArray, Snapshot


def plan(snapshot: Snapshot, policy: Policy) -> Decision:
    """The decision for this instant; empty when nothing is to be done."""
    if isinstance(policy, FcfsReservePolicy):
        return _plan_fcfs(snapshot)
    return _plan_by_slack(snapshot, policy)


def _plan_fcfs(snapshot: Snapshot) -> Decision:
    """Hand everything to the engine in order of arrival; its own queue holds what does not fit.

    Paused rows exist only after an engine was lost or a hold; they arrived first and go first.
    """
    s = snapshot.sessions
    fits = np.maximum(s.num_blocks_needed, s.num_blocks_final) <= snapshot.kv.num_total_blocks
    may_start = fits & ~s.held
    resume = s.slot[(s.state == PREEMPTED) & may_start].tolist()
    admit = s.slot[(s.state == WAITING) & may_start].tolist()
    why = dict.fromkeys((*resume, *admit), "arrival")
    return Decision(resume=tuple(resume), admit=tuple(admit), why=why)


def _plan_by_slack(snapshot: Snapshot, policy: TokenflowPolicy) -> Decision:
    view = view_of(snapshot, policy)
    nobody_waits = not (view.num_in_state[WAITING] or view.num_in_state[PREEMPTED])
    reserved = snapshot.kv.capacity_policy is CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
    if nobody_waits and reserved and not snapshot.kv.has_tiering:
        return Decision()
    draft = Draft(view)
    if draft.blocks < 0:
        _relieve_pool(view, draft)
    if nobody_waits and not snapshot.kv.has_tiering:
        return draft.decision()
    able = victims(view)
    if not nobody_waits:
        _place_all(view, draft, able)
    if snapshot.kv.has_tiering:
        prefetch(view, draft)
        write_through(view, draft, able)
    return draft.decision()


def _place_all(view: View, draft: Draft, able: Victims) -> None:
    draft.blocks -= view.reserve
    if _place_due(view, draft, able):
        held_for_head = _place_waiting(view, draft, able)
        if not held_for_head and _place_paused(view, draft):
            _place_rest(view, draft)
        if not held_for_head and not draft.pause and not announced(view, draft)[0]:
            exchange(view, draft, able)
    draft.prune()


def _relieve_pool(view: View, draft: Draft) -> None:
    """Pause until the growth of those that stay fits: with slack to spare first, then forced."""
    able = victims(view)
    chosen = draft.victims_to_reach(0, 0, able.for_growth)
    if chosen is not None:
        for row in chosen:
            draft.take_out(row, "growth")
        return
    s = view.snapshot.sessions
    rows = view.running[s.pausable[view.running] & s.started[view.running]]
    order = np.argsort(-s.slack_s[rows], kind="stable")
    candidates: list[int] = rows[order].tolist()
    if len(candidates) == len(view.running) and not len(view.starting):
        candidates = candidates[:-1]  # somebody must go on, or nothing is ever freed
    chosen = draft.victims_to_reach(0, 0, candidates)
    for row in candidates if chosen is None else chosen:
        spared = row in able.rows
        draft.take_out(row, "growth" if spared else "forced", forced=not spared)


def _place_due(view: View, draft: Draft, able: Victims) -> bool:
    """Bring back streams that would run dry; False if one had to be left out.

    One that starves, or has no reader and was paused for as long as is allowed, keeps the room that
    comes free for itself once it was passed over for long: in the latter case readers may still
    take the place of those that yield to nobody else.
    """
    rows = due_rows(view)
    if not rows:
        return True
    s, policy, now = view.snapshot.sessions, view.policy, view.snapshot.now
    all_placed, pool = True, Pool(draft, able, due=True)
    for row in rows:
        chosen = pool.for_row(draft, row, view.engine_s(row))
        if chosen is not None:
            draft.place(row, "due", chosen)
            pool.take_out(chosen)
            continue
        all_placed = False
        waited_s = now - float(s.wait_since_time[row])
        if not s.has_reader[row]:
            if waited_s > policy.max_machine_pause_s + policy.max_bypass_s:
                draft.set_aside()
        elif not s.slack_s[row] > 0 and waited_s > policy.max_bypass_s:
            break
    return all_placed


def _place_waiting(view: View, draft: Draft, able: Victims) -> bool:
    """Admit schedulable newcomers by priority; True if room is kept for one too big for now.

    Pauses are drafted greedily, then cut back to what leaves every paused stream its way back.
    """
    fixed = FixedShare(view, draft)
    able_rows = fixed.admissible()
    if not len(able_rows):
        return False
    p = _priorities(view, able_rows)
    prefill = PrefillBudget(view)
    if not prefill.allows(int(able_rows[p.argmax()])):
        return False
    rows, load = _by_priority(view, able_rows, p), Load(view)
    if not load.num_admitted(rows[: view.snapshot.kv.max_batch_size]):
        return False
    trial = draft.copy()
    steps = place_crowd(view, trial, able, rows, load, prefill)
    pool, num_passed, head = Pool(trial, able), 0, -1
    for row in rows[len(steps) :].tolist():
        if not fixed.allows(row):
            continue
        if num_passed > view.policy.max_passes or not load.admits(row) or not prefill.allows(row):
            break
        chosen = pool.for_row(trial, row, prefill.seconds(row))
        if chosen is None:
            if _must_hold(view, row):
                head = row
                break
            num_passed += 1
            continue
        trial.place(row, "waiting", chosen)
        pool.take_out(chosen)
        load.add(row)
        prefill.take(row)
        fixed.take(row)
        steps.append((row, chosen))
    back = _brought_back(view, draft, trial, steps)
    draft.adopt(back)
    if head < 0 or back is trial:
        return head >= 0
    # Without those that have been taken back it may fit, and must hold up nobody.
    return Pool(draft, able).for_row(draft, head, prefill.seconds(head)) is None


def _priorities(view: View, rows: IntArray) -> FloatArray:
    """P of `rows`, which are not in the engine."""
    s = view.snapshot.sessions
    wait_s = view.snapshot.now - s.wait_since_time[rows]
    return rank(view.policy, s.slack_s[rows], wait_s, s.started[rows], s.priority[rows])


def _by_priority(view: View, rows: IntArray, p: FloatArray) -> IntArray:
    """The first of `rows` by P, ties by arrival: as many as one plan can place and pass over."""
    limit = view.snapshot.kv.max_batch_size + view.policy.max_passes
    if len(rows) > 4 * limit:
        # Everything down to the worst of the best `limit`, so that ties stay in order of arrival.
        near = p >= np.partition(p, len(p) - limit)[len(p) - limit]
        rows, p = rows[near], p[near]
    result: IntArray = rows[(-p).argsort(kind="stable")[:limit]]
    return result


def _must_hold(view: View, row: int) -> bool:
    """True if `row` waited so long that nobody may overtake it any more."""
    waited_s = view.snapshot.now - float(view.snapshot.sessions.arrival_time[row])
    return waited_s > view.policy.max_bypass_s


def _brought_back(view: View, draft: Draft, full: Draft, steps: list[Step]) -> Draft:
    """`draft` after the longest prefix of `steps` that leaves everybody paused a way back.

    full: the draft after all of them.
    """
    if not steps or _feasible(view, full):
        return full
    best, low, high = draft, 0, len(steps)
    while high - low > 1:
        middle = (low + high) // 2
        trial = best.copy()
        for row, chosen in steps[low:middle]:
            trial.place(row, "waiting", chosen)
        if _feasible(view, trial):
            best, low = trial, middle
        else:
            high = middle
    return best


def _feasible(view: View, draft: Draft) -> bool:
    return can_bring_back(
        view,
        paused=draft.pause,
        placed=[*draft.resume, *draft.admit],
        free_slots=draft.slots,
        free_blocks=draft.blocks,
    )


def _place_paused(view: View, draft: Draft) -> bool:
    """Give free room to paused streams; False if one is left outside."""
    if not len(view.paused):
        return True
    if draft.slots >= 1 and draft.blocks >= lowest(view.need[view.paused]):
        in_need, well_ahead = _paused_in_order(view)
        num_passed = _place_into(view, draft, in_need, (0, 0), 0)
        _place_into(view, draft, well_ahead, announced(view, draft), num_passed)
    return len(draft.resume) == len(view.paused)


def _place_into(
    view: View, draft: Draft, rows: list[int], kept: tuple[int, int], num_passed: int
) -> int:
    """Resume those of `rows` that fit beside `kept` slots and blocks; returns how many were passed
    over, with the `num_passed` before."""
    num_slots, num_blocks = kept
    for row in rows:
        if draft.slots < 1 + num_slots or num_passed > view.policy.max_passes:
            break
        if draft.named(row):
            continue
        if draft.fits(row) and draft.blocks >= int(view.need[row]) + num_blocks:
            draft.place(row, "free room")
        else:
            num_passed += 1
    return num_passed


def _paused_in_order(view: View) -> tuple[list[int], list[int]]:
    """Readers that have little to read, by P; and the others, and streams without a reader, in the
    order of excess."""
    rows = view.paused
    low = is_low(view, rows)
    well_ahead: list[int] = excess_order(view, rows[~low]).tolist()
    behind = rows[low]
    return _by_priority(view, behind, _priorities(view, behind)).tolist(), well_ahead


def _place_rest(view: View, draft: Draft) -> None:
    """Admit newcomers beyond the schedulable load into room that nobody else can use.

    A batch with idle slots helps nobody, and nobody has to yield later to keep them company: all
    that started are running, and the pool holds all of them to their ends.
    """
    if draft.slots < 1 or draft.pause or not len(view.waiting):
        return
    if draft.blocks < lowest(view.need[view.waiting]):
        return
    prefill = PrefillBudget(view)
    for row in draft.admit:
        prefill.take(row)
    s, blocks_left = view.snapshot.sessions, blocks_left_at_full_length(view, draft)
    limit, fixed = view.snapshot.kv.max_batch_size + view.policy.max_passes, FixedShare(view, draft)
    for row in fixed.admissible()[:limit].tolist():
        if draft.slots < 1 or not prefill.allows(row):
            return
        if draft.named(row) or not fixed.allows(row):
            continue
        if draft.fits(row) and s.num_blocks_final[row] <= blocks_left:
            draft.place(row, "free room")
            prefill.take(row)
            fixed.take(row)
            blocks_left -= int(s.num_blocks_final[row])
        elif _must_hold(view, row):
            return
