"""Conservative admission, prefill first: SGLang's default scheduler.

Owns the new-token ratio, the admission it allows and who is retracted. Rules (SGLang's scheduler,
0.4 to 0.5, with its default constants):
- the queue is first come first served and stops at the first that does not fit; one that is
  retracted joins at its end;
- a request is admitted if its prompt and its whole output (counted up to 4,096 tokens) fit beside
  what is free, less the tokens that each one in the engine may still generate (up to 4,096) times
  the ratio;
- the ratio begins at 0.7 and falls over 600 decode steps without a retraction to 0.14 times that;
- when the next step would find no room, those with the fewest generated tokens (of these, the
  longest prompts) are retracted, until 20 steps of those that are left fit; then the ratio becomes
  the share of their outputs that those have generated, 20 steps on.

What differs: a pause takes effect some steps after it was decided, so retraction begins when the
growth until then does not fit. SGLang prefills in steps of their own, and nobody decodes meanwhile;
here the engine decodes in the same steps, which spares its readers gaps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tokenflow.baselines.room import Room
from tokenflow.types import Decision, Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangPolicy:
    """init_ratio, min_ratio_factor, decay_steps: the course of the new-token ratio.
    retract_steps: decode steps for which a retraction makes room. max_counted_tokens: tokens of a
    request's future output that are counted at most."""

    init_ratio: float = 0.7
    min_ratio_factor: float = 0.14
    decay_steps: int = 600
    retract_steps: int = 20
    max_counted_tokens: int = 4096


class SglangPlanner:
    """Plans for one run. ratio: the new-token ratio as of the last plan."""

    def __init__(self, policy: SglangPolicy | None = None) -> None:
        self.policy = policy or SglangPolicy()
        self.ratio = self.policy.init_ratio
        self._last_time: float | None = None

    def plan(self, snapshot: Snapshot) -> Decision:
        """The decision for this instant."""
        room = Room(snapshot)
        self._decay(room)
        if room.blocks < 0:
            self._retract(room)
        if not room.pause:
            self._admit(room)
        return room.decision()

    def _decay(self, room: Room) -> None:
        """The ratio after the decode steps since the last plan."""
        policy, now = self.policy, room.snapshot.now
        if self._last_time is not None and len(room.running):
            least = policy.init_ratio * policy.min_ratio_factor
            per_step = (policy.init_ratio - least) / policy.decay_steps
            num_steps = max(0.0, now - self._last_time) / room.step_s
            # A retraction may have left it below the least, where it stays.
            self.ratio = max(self.ratio - per_step * num_steps, min(self.ratio, least))
        self._last_time = now

    def _retract(self, room: Room) -> None:
        s, policy = room.snapshot.sessions, self.policy
        size = room.snapshot.kv.tokens_per_block
        rows = room.pausable
        order = np.lexsort((-s.num_prompt_tokens[rows], s.num_generated[rows]))
        for row in rows[order].tolist():
            num_left = room.num_staying
            wanted = -(-num_left * policy.retract_steps // size)
            if num_left <= 1 or (room.pause and room.free_blocks >= wanted and room.blocks >= 0):
                break
            room.take_out(row, "retracted", forced=True)
        left = np.setdiff1d(np.concatenate([room.running, room.starting]), room.pause)
        if room.pause and len(left):
            num_decoded = int(s.num_generated[left].sum()) + policy.retract_steps * len(left)
            self.ratio = min(1.0, num_decoded / int(s.max_tokens[left].sum()))

    def _admit(self, room: Room) -> None:
        s, policy = room.snapshot.sessions, self.policy
        size = room.snapshot.kv.tokens_per_block
        future = np.minimum(s.max_tokens - s.num_generated, policy.max_counted_tokens)
        inside = np.concatenate([room.running, room.starting])
        num_left = room.free_blocks * size - self.ratio * float(future[inside].sum())
        order = np.argsort(s.wait_since_time[room.outside], kind="stable")
        for row in room.outside[order].tolist():
            # What starts in this plan is counted in full, as within one of SGLang's batches.
            num_wanted = -(-int(room.num_tokens[row]) // size) * size + int(future[row])
            is_alone = not (room.num_staying or room.placed)
            if not room.fits(row) or (num_wanted > num_left and not is_alone):
                return
            room.place(row, "arrival")
            num_left -= num_wanted
