"""What sessions occupy in the engine's pool, by our own count, and how much each may ask for.

Owns the arithmetic between tokens, blocks, leases and the engine's limits. Pure: nothing is kept.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenflow.executor.api import CapacitySchedulerPolicy, num_blocks_needed
from tokenflow.preemption import lease_of, unpausable_reason
from tokenflow.session import IN_ENGINE, Session
from tokenflow.types import GenerateRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    """By one engine's limits. max_input_len: longest prompt that it takes, tokens. lease_tokens: of
    one enqueue at most; 0 = all that is left."""

    policy: CapacitySchedulerPolicy
    tokens_per_block: int
    max_seq_len: int
    max_input_len: int
    lease_tokens: int

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.tokens_per_block)

    def num_blocks_at_full_length(self, request: GenerateRequest) -> int:
        """Blocks of prompt and max_tokens, within max_seq_len; the last token needs none."""
        num_tokens = len(request.input_token_ids) + request.max_tokens
        return max(1, self.num_blocks(min(num_tokens, self.max_seq_len) - 1))

    def num_blocks_occupied(self, session: Session) -> int:
        """What the engine's capacity policy counts for this session at its present length."""
        num_tokens = session.num_tokens
        num_left = 1
        if self.policy is not CapacitySchedulerPolicy.MAX_UTILIZATION:  # else it is not asked for
            num_left = self._num_left(session, num_tokens)
        return num_blocks_needed(self.policy, self.tokens_per_block, num_tokens, num_left)

    def stays_until(self, session: Session) -> int:
        """Number of output tokens up to which what is reserved for a session stays: it begins no
        block beyond those that were last counted, and its end is ahead. Below 0 outside the
        engine, where it has none."""
        num_in_blocks = session.num_filled_blocks * self.tokens_per_block
        num_tokens = min(num_in_blocks, self.max_seq_len - 1)
        end = session.lease_end or session.request.max_tokens
        return min(num_tokens - len(session.request.input_token_ids), end - 1)

    def unpausable_reason(self, request: GenerateRequest) -> str | None:
        """Why the request can never be paused, or None."""
        return unpausable_reason(
            request, max_seq_len=self.max_seq_len, max_input_len=self.max_input_len
        )

    def max_tokens_to_enqueue(self, session: Session) -> int:
        """Tokens that its next enqueue may generate: what is left, at most a lease."""
        is_pausable = self.unpausable_reason(session.request) is None
        return lease_of(
            session.request,
            len(session.output_token_ids),
            self.lease_tokens if is_pausable else 0,
        )

    def lease_end(self, session: Session) -> int | None:
        """Output tokens at which its next enqueue ends although the request goes on, or None."""
        num_generated = len(session.output_token_ids)
        num_tokens = self.max_tokens_to_enqueue(session)
        rest = min(
            session.request.max_tokens - num_generated, self.max_seq_len - session.num_tokens
        )
        return None if num_tokens >= rest else num_generated + num_tokens

    def _num_left(self, session: Session, num_tokens: int) -> int:
        """Tokens that its enqueue, or its next one, has left."""
        if session.state not in IN_ENGINE:
            num_left = self.max_tokens_to_enqueue(session)
        else:
            end = session.lease_end or session.request.max_tokens
            num_left = max(1, end - len(session.output_token_ids))
        return max(1, min(num_left, self.max_seq_len - num_tokens))
