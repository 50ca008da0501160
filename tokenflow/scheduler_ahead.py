"""Ahead of need: room for announced arrivals, copies before a pause and before a resume.

Owns how much of each is asked for. Nothing here pauses, resumes or admits anybody, and all of it
takes only what the draft left free.

Early pauses for announced arrivals are not among it: a pause and the start of the newcomer it is
for take effect at the same boundary of the engine, and its blocks are given away, or copied because
they are wanted, at that boundary too. Measured, earlier ones cost a fifth more pauses and gained no
time to the first token beyond what keeping room does.
"""

from __future__ import annotations

import math

import numpy as np

from tokenflow.scheduler_draft import Draft
from tokenflow.scheduler_rules import Victims, due_slack_s
from tokenflow.scheduler_tiers import loads
from tokenflow.scheduler_view import PAUSING, PREEMPTED, RESUMING, View

_UNKNOWN_NUM_BLOCKS = 8
"""Blocks copied per plan until it is known what a copy costs."""


def announced(view: View, draft: Draft) -> tuple[int, int]:
    """(slots, blocks) that the arrivals of a burst will want before room could be made for them.

    D = rate · h · blocks per arrival, h = time to free the blocks: a pause, the wait for its plan,
    and the copies that the pool then needs. Their growth is in the view's reserve. 0 while nobody
    is announced, in an empty engine, and while newcomers wait who may not start: those to come
    could not either.
    """
    arrivals, costs = view.snapshot.arrivals, view.snapshot.costs
    if not (view.policy.anticipate and arrivals.burst):
        return 0, 0
    if not len(view.running) + len(view.starting):
        return 0, 0
    if len(draft.admit) < len(view.waiting):
        return 0, 0
    horizon_s = costs.pause_s + costs.plan_interval_s
    if view.overflow.num_blocks and view.snapshot.kv.num_host_blocks:
        horizon_s += arrivals.blocks_per_arrival * costs.offload_block_s * costs.copy_wait_share
    num_arrivals = arrivals.short_rate * horizon_s
    return math.ceil(num_arrivals), math.ceil(num_arrivals * arrivals.blocks_per_arrival)


def write_through(view: View, draft: Draft, able: Victims) -> None:
    """Copy the oldest blocks of running streams that may be paused to the host, those with most
    slack first (TokenFlow, section 5.2): full blocks without a copy, as many as the link takes in
    its share of the time until the next plan. Nothing while the pool is far from full, nor where
    what was copied would be computed all the same."""
    snapshot, policy = view.snapshot, view.policy
    s, kv, costs = snapshot.sessions, snapshot.kv, snapshot.costs
    if not (policy.write_through and kv.has_tiering and loads(snapshot)):
        return
    fill = view.overflow.num_started_blocks / kv.num_total_blocks
    if fill < policy.write_through_fill and not snapshot.arrivals.burst:
        return
    num_left = _UNKNOWN_NUM_BLOCKS
    if costs.offload_block_s > 0:
        share_s = policy.write_through_share * costs.plan_interval_s
        num_left = max(1, int(share_s / costs.offload_block_s))
    num_left = min(num_left, kv.num_host_blocks - _num_kept_on_host(view, draft))
    rows = np.asarray(able.rows, dtype=np.int64)
    # The KV of the last token is written by the next step.
    full = (view.num_tokens[rows] - 1) // kv.tokens_per_block - s.num_copied_blocks[rows]
    order = np.argsort(-s.slack_s[rows], kind="stable")
    for i in order[full[order] > 0].tolist():
        if num_left < 1:
            return
        num_blocks = min(num_left, int(full[i]))
        draft.copy_out(able.rows[i], num_blocks)
        num_left -= num_blocks


def _num_kept_on_host(view: View, draft: Draft) -> int:
    """Host blocks that are spoken for: all of those that are paused, with those drafted (what is
    still on the device may have to go there), the copies of those in the engine, and what resumes
    under way load, whose copies stay."""
    snapshot = view.snapshot
    s = snapshot.sessions
    num_kept = s.num_copied_blocks + np.where(s.state == RESUMING, s.num_host_blocks, 0)
    out = (s.state == PREEMPTED) | (s.state == PAUSING)
    out[draft.pause] = True
    num_kept[out] = -(-view.num_tokens[out] // snapshot.kv.tokens_per_block)
    return int(num_kept.sum())


def prefetch(view: View, draft: Draft) -> None:
    """Bring the blocks of paused streams that are nearly due back to the device, most urgent first.

    Begun when slack is down to what makes the stream due once its blocks are there, and the time
    that loading them takes, behind the loads of more urgent ones, and two plans: one to order it,
    one to see that it is done. Blocks on the device of streams that are due earlier are
    no room.
    """
    snapshot, policy, ways = view.snapshot, view.policy, view.ways
    s, kv, costs = snapshot.sessions, snapshot.kv, snapshot.costs
    if not (policy.prefetch and kv.has_tiering and ways.num_blocks[view.paused].any()):
        return
    rows = view.paused[s.has_reader[view.paused]]
    num_on_device = -(-view.num_tokens[rows] // kv.tokens_per_block) - s.num_host_blocks[rows]
    num_on_device -= (s.num_resume_tokens[rows] - 1) // kv.tokens_per_block
    onboard_s = ways.num_blocks[rows] * costs.onboard_block_s
    spare_s = s.slack_s[rows] - (due_slack_s(view, rows) - policy.conservativeness * onboard_s)
    order = np.argsort(spare_s, kind="stable")
    _, num_announced = announced(view, draft)
    queued_s, num_due_blocks = 0.0, 0
    for i in order.tolist():
        row, num_blocks = int(rows[i]), int(ways.num_blocks[rows[i]])
        if draft.named(row):
            continue
        queued_s += float(onboard_s[i])
        if spare_s[i] > queued_s + 2 * costs.plan_interval_s:
            return
        num_due_blocks += max(0, int(num_on_device[i]))
        if num_blocks and draft.blocks - num_announced - num_due_blocks >= num_blocks:
            draft.fetch(row)
