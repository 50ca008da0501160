"""What is certain without knowing whose turn it is when.

Owns the bounds for the usual case of an engine that is fast for its load: then the order of things
does not matter, only the most that each may take.

Invariant: what is called certain here `scheduler_load.Load` and `scheduler_forecast.can_bring_back`
find too; the converse need not hold.
"""

from __future__ import annotations

import math

import numpy as np

from tokenflow.executor.api import CapacitySchedulerPolicy
from tokenflow.scheduler_view import View, highest, lowest
from tokenflow.types import IntArray

MAX_ROUNDS = 8
"""Times that the same blocks are given on and come free again, at most."""

_SURELY = 1.0 + 1e-9
"""Beyond this ratio, one figure is greater than the other however both were rounded."""

_MIN_GAIN = 1e-3
"""Slack gained per second of decoding; with less, `_SURELY` does not cover how it was rounded."""


def surely_carried(view: View) -> bool:
    """True if the engine can surely carry everybody there is, so that it need not be known who will
    read what when: at any instant, whoever is left then.

    Each is taken to be as long as the longest. Those that fill a batch, or all, if they are fewer,
    get a token each step; a step with a full batch takes longest. Where KV may outgrow the device,
    everything is computed again at each turn, and turns are taken to be as short as the policy lets
    any be; with a host tier that is not looked for.
    """
    s, kv, costs = view.snapshot.sessions, view.snapshot.kv, view.snapshot.costs
    rate = float(np.add.reduce(s.read_rate))
    if costs.step_s(kv.max_batch_size, 0.0) * rate > view.policy.load_limit * kv.max_batch_size:
        return False  # too much even for the largest batch, if there were no KV to read
    num_full_tokens = s.num_prompt_tokens + s.max_tokens
    longest = highest(num_full_tokens)
    share_left, num_pool_tokens = 1.0, kv.num_total_blocks * kv.tokens_per_block
    if int(np.add.reduce(num_full_tokens)) > num_pool_tokens:
        if kv.num_host_blocks:
            return False
        turn = min(max(view.policy.min_quantum_s / view.step_s, 1.0), lowest(view.num_in_load))
        share_left -= rate * longest / turn / costs.prefill_tokens_per_s
    num_in_pool = num_pool_tokens / longest
    if kv.capacity_policy is CapacitySchedulerPolicy.GUARANTEED_NO_EVICT:
        num_in_pool = kv.num_total_blocks / highest(s.num_blocks_final)
    batch = max(1, int(min(kv.max_batch_size, num_in_pool / _SURELY)))
    step_s = costs.step_s(batch, batch * longest)
    limit = view.policy.load_limit * share_left
    return _SURELY * step_s * max(rate / batch, highest(s.read_rate)) <= limit


def surely_back(
    view: View,
    paused_rows: IntArray,
    placed_rows: IntArray,
    *,
    free_slots: int,
    free_blocks: int,
) -> bool:
    """True if everybody who is out surely finds a slot and blocks in time: all that is in the
    engine has come free, as often as it is given on, before the first of them has to be back.

    Arguments as those of `back_in_time`. Not looked for where KV is lost or loaded, where some
    have no reader or cannot be paused.
    """
    num_in = len(view.in_engine) - len(paused_rows) + len(placed_rows)
    if num_in < 1 or free_slots < 0 or free_blocks < 0:
        return False
    if not (view.all_read and view.all_pausable):
        return False
    if view.snapshot.costs.onboard_block_s or view.overflow.num_blocks:
        return False
    out_rows = np.concatenate([view.paused, view.pausing, paused_rows])
    if not len(out_rows):
        return False
    needs, frees = view.need[out_rows], view.frees
    num_given = _sum(frees[view.in_engine]) - _sum(frees[paused_rows])
    num_given += _sum(view.need[placed_rows])
    if highest(needs) > free_blocks + num_given:
        return False
    num_rounds, num_needed = 1 + len(out_rows) // num_in, _sum(needs)
    if num_needed > MAX_ROUNDS * num_given:  # more rounds than are looked at may be needed
        return False
    if num_needed > free_blocks:
        num_rounds = max(num_rounds, -(-(num_needed - free_blocks) // num_given))
    return _SURELY * _last_free_s(view, num_rounds) <= _first_due_s(view, out_rows)


def _sum(num_blocks: IntArray) -> int:
    return int(np.add.reduce(num_blocks))


def _first_due_s(view: View, rows: IntArray) -> float:
    """Seconds in which none of `rows` is due; less than none if computing KV again may take more
    than its share of them."""
    s, costs = view.snapshot.sessions, view.snapshot.costs
    recompute_s = 0.0
    if len(view.paused):
        num_tokens = highest(view.ways.num_tokens[view.paused])
        recompute_s = (num_tokens - 1) / costs.prefill_tokens_per_s
    first_s = lowest(s.slack_s[rows]) - (costs.resume_s + recompute_s)
    all_recompute_s = _SURELY * len(view.paused) * recompute_s
    return first_s if all_recompute_s <= view.policy.recompute_share * first_s else -math.inf


def _last_free_s(view: View, num_rounds: int) -> float:
    """Seconds after which everybody in the engine, and those placed now, may have been paused, and
    so have `num_rounds` - 1 others in the same places."""
    s, costs = view.snapshot.sessions, view.snapshot.costs
    gain = 1.0 / (view.step_s * highest(s.read_rate)) - 1.0
    if gain < _MIN_GAIN:
        return math.inf
    earn_s = view.turn_slack_s / gain
    start_s = 2 * view.step_s + highest(s.num_resume_tokens) / costs.prefill_tokens_per_s
    cycle_s = max(view.turn_s, 2 * view.step_s + earn_s)
    return start_s + earn_s + (num_rounds - 1) * cycle_s
