"""Whether what is taken on can be carried for as long as it lasts: load against capacity.

Owns the test of schedulability, made from learned costs; it only reads the view.
"""

from __future__ import annotations

import numpy as np

from tokenflow.executor.api import CapacitySchedulerPolicy
from tokenflow.lazy import lazy
from tokenflow.scheduler_needs import Need, Needs
from tokenflow.scheduler_sure import surely_carried
from tokenflow.scheduler_tiers import loads
from tokenflow.scheduler_view import CANCELLING, View, num_first
from tokenflow.types import BoolArray, FloatArray, IntArray

_LEAST = 1e-9
"""tokens/s of an engine that only recomputes."""

_NO_ROWS: IntArray = np.zeros(0, dtype=np.int64)

_FINISHING = 0.5
"""Of what is made beyond what readers need, as much ends streams ahead of their readers; the rest
is spread, or goes to those that would run alone in the end."""


class Load:
    """What a set of streams needs against what the engine can make, newcomers added one by one.

    Looked at from now until the last answer has been read, at a few instants (scheduler_needs.py).
    The capacity Γ of an instant is the decode speed of a full batch at the mean context of the
    streams that are not over, less the time that recomputing takes, where the KV of the set
    outgrows the tiers that hold it, and that of copies for which steps wait, where it outgrows the
    device. The set can be carried if to make what readers need by any instant t takes the engine a
    share ρ of the time until then, at most: ∫ ΣR / Γ <= ρ·t. (What is made ahead of its time is
    made at the contexts of that later time: so it is time that adds up, and not tokens.)

    Σ R <= ρ·Γ (TokenFlow, section 4.3) at every instant is enough for that, and too strict: what is
    unread bridges a rush, those who came before will have ended when contexts have grown, and a
    crowd that started together is faster in the beginning.

    Some pauses with their margins are left out of what is unread: under a lasting load, streams
    whose readers have read everything cannot take turns. Streams that their clients hold paused do
    not count: they generate nothing, and if many are released at once, their clients asked for the
    crowd. An engine that can surely carry everybody there is (scheduler_sure.py) is not asked for
    each.
    """

    def __init__(self, view: View) -> None:
        self._view = view
        self._is_sure = surely_carried(view)
        self._added: list[int] = []
        self._asked: list[int] = []  # those added, and those that may come next
        self._rows = _NO_ROWS  # those served and those asked
        self._each = np.empty(0)  # each of them: [3, K, n]
        self._sets = np.empty(0)  # with the first of those asked, the second, ...: [3, K, m]
        self._is_carried = np.empty(0, dtype=np.bool_)  # each of these sets

    def admits(self, row: int) -> bool:
        """True if the set with `row`, which is not served, can be carried."""
        return self._is_sure or self._num_carried([row]) == 1

    def num_admitted(self, rows: IntArray) -> int:
        """How many of the first of `rows` are admitted when they are added one after the other."""
        return len(rows) if self._is_sure else self._num_carried(rows.tolist())

    def add(self, row: int) -> None:
        """Count `row` as served."""
        self._added.append(row)

    def add_first(self, rows: IntArray) -> None:
        """Count `rows` as served."""
        self._added += rows.tolist()

    def capacity(self, row: int) -> FloatArray:
        """Γ in tokens/s, [K], of the set with `row`."""
        self._look_at([row])
        result: FloatArray = self._capacity(Need(*self._sets))[:, len(self._added)]
        return result

    def _num_carried(self, rows: list[int]) -> int:
        self._look_at(rows)
        begin = len(self._added)
        return num_first(self._is_carried[begin : begin + len(rows)])

    def _look_at(self, rows: list[int]) -> None:
        """Find out about `rows`, added one after the other, unless that is known; and, as it costs
        little more, about those behind them that were asked about before."""
        asked = [*self._added, *rows]
        if self._asked[: len(asked)] == asked:
            return
        if rows[-1] in self._asked:
            asked += self._asked[self._asked.index(rows[-1]) + 1 :]
        self._rows = np.concatenate([self._served_rows, asked])
        self._each = self._needs.each(self._rows)
        self._sets = self._summed(self._each)
        self._asked, self._is_carried = asked, self._carried(Need(*self._sets))

    def _summed(self, each: FloatArray) -> FloatArray:
        """Of the sets, [..., m], what is known of each row, [..., n]."""
        num_served = len(self._served_rows)
        served = np.add.reduce(each[..., :num_served], axis=-1, keepdims=True)
        result: FloatArray = np.add.accumulate(each[..., num_served:], axis=-1)
        result += served
        return result

    def _carried(self, sets: Need) -> BoolArray:
        """Whether each of m sets, [K, m], can be carried."""
        needs, capacity = self._needs, np.maximum(self._capacity(sets), _LEAST)
        busy_s = needs.until_end(sets.rate / capacity)
        in_time: BoolArray = busy_s <= self._view.policy.load_limit * needs.end_s[:, None]
        is_carried: BoolArray = np.logical_and.reduce(in_time, axis=0)
        return is_carried

    @lazy
    def _needs(self) -> Needs:
        return Needs(self._view, self._served_rows)

    @lazy
    def _served_rows(self) -> IntArray:
        s, view = self._view.snapshot.sessions, self._view
        served = s.started & (s.state != CANCELLING)
        served[view.starting] = True
        rows: IntArray = (served & ~s.held).nonzero()[0]
        return rows

    def _capacity(self, sets: Need) -> FloatArray:
        """Γ in tokens/s, [K, ...], of sets; where nobody is left, that of one stream."""
        kv, costs = self._view.snapshot.kv, self._view.snapshot.costs
        num, context = np.maximum(sets.num, 1.0), np.maximum(sets.context, 1.0)
        num_pool_tokens = kv.num_total_blocks * kv.tokens_per_block
        if kv.capacity_policy is CapacitySchedulerPolicy.GUARANTEED_NO_EVICT:
            final = self._summed(self._needs.num_blocks_final(self._each[0], self._rows))
            in_pool = kv.num_total_blocks * num / np.maximum(final, 1.0)
        else:
            in_pool = num_pool_tokens * num / context
        batch = np.maximum(np.floor(np.minimum(np.minimum(in_pool, num), kv.max_batch_size)), 1.0)
        step_s = costs.step_base_s + costs.step_per_sequence_s * batch
        step_s = step_s + costs.step_per_context_token_s * (batch * context / num)
        decoded: FloatArray = batch / step_s
        # Each turn starts by bringing back what the pool could not keep. The pool lets go of what
        # was paused first, which is due first: the whole overflow meets each resume, up to its own
        # length.
        if context.max() > num_pool_tokens:
            held = context * self._share_unfinished(sets, decoded)
            overflow = np.maximum(held - num_pool_tokens, 0.0)
            turned = self._summed(self._needs.turned(self._each[2], self._rows))
            decoded *= self._share_left(turned, overflow, context, num / context)
        return decoded

    def _share_unfinished(self, sets: Need, decoded: FloatArray) -> FloatArray:
        """Share, [K, ...], of the streams that last which still hold KV: some have been finished
        ahead of their readers, with what is made beyond what readers need."""
        needs = self._needs
        needed, total = needs.until_middle(sets.rate), needs.until_end(sets.rate)[-1]
        made = needs.until_middle(self._view.policy.load_limit * decoded)
        finished = (made - needed) / np.maximum(total - needed, 1.0)
        share: FloatArray = 1.0 - _FINISHING * np.minimum(np.maximum(finished, 0.0), 1.0)
        return share

    def _not_kept(self, context: FloatArray) -> FloatArray:
        """Of the KV tokens `context` [K, ...], with what streams hold unread, those that both tiers
        cannot hold; none as long as the device holds all. Nobody counts as finished: that the host
        overflows costs each turn its KV."""
        kv, (lasts, reads, _) = self._view.snapshot.kv, self._each
        num_pool_tokens = kv.num_total_blocks * kv.tokens_per_block
        num_kept = num_pool_tokens + kv.num_host_blocks * kv.tokens_per_block
        unread = self._summed(self._needs.unread(lasts, reads, self._rows))
        not_kept = np.maximum(context + unread - num_kept, 0.0)
        return np.where(context > num_pool_tokens, not_kept, 0.0)

    def _share_left(
        self, turned: FloatArray, overflow: FloatArray, context: FloatArray, per_mean: FloatArray
    ) -> FloatArray:
        """Share of the engine's time that bringing streams back leaves for decoding, [K, ...].

        turned: KV tokens/s of the streams whose turn begins. overflow: KV tokens of those not
        finished that the device does not hold. context: KV tokens of all.
        per_mean: 1 / mean KV tokens of a stream. What the host takes is copied there, and back
        where that is not slower than computing: the time for which steps wait is lost, and a link
        that is busy all the time is the limit.
        """
        kv, costs = self._view.snapshot.kv, self._view.snapshot.costs
        out_share = np.minimum(overflow * per_mean, 1.0)
        lost_share = out_share
        if loads(self._view.snapshot):
            lost_share = np.minimum(self._not_kept(context) * per_mean, 1.0)
        recompute = turned * lost_share / costs.prefill_tokens_per_s
        if not kv.num_host_blocks:
            share: FloatArray = np.maximum(1.0 - recompute, 0.0)
            return share
        turned_blocks = turned / kv.tokens_per_block
        offload = turned_blocks * out_share * costs.offload_block_s
        loaded_share = np.maximum(out_share - lost_share, 0.0)
        onboard = turned_blocks * loaded_share * costs.onboard_block_s
        left = np.maximum(1.0 - recompute - costs.copy_wait_share * (offload + onboard), 0.0)
        link = np.maximum(offload, onboard) if kv.has_tiering else offload + onboard
        return np.where(link > 1.0, np.minimum(left, 1.0 / np.maximum(link, 1.0)), left)
