"""Which tokens are computed in the next step, within `max_num_tokens`.

Pure. One token of each generating sequence comes first, then context chunks in the order of the
active list; a chunk that does not fit waits for the next step. Where a sequence's chunks end
depends on the sequence alone: at the multiples of one fixed length, which is a multiple of
`tokens_per_block` and fits beside a full batch of generating sequences. So the numerics of a
sequence do not depend on its neighbours, a recomputed context has the chunks of the first time, and
the first waiting context always proceeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from tokenflow.errors import ConfigError
from tokenflow.executor.api import ExecutorConfig
from tokenflow.inflight.sequence import SequenceState


class PlannedChunk(msgspec.Struct, frozen=True, gc=False):
    """`sequence` computes its tokens [start, end).

    samples: nothing known is left to compute behind it, so the next token is sampled.
    """

    sequence: SequenceState
    start: int
    end: int
    is_context: bool
    samples: bool

    @property
    def num_tokens(self) -> int:
        """Tokens computed."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """max_num_tokens: tokens of one step. chunk_length: None without chunked context."""

    max_num_tokens: int
    chunk_length: int | None

    @classmethod
    def of(cls, config: ExecutorConfig) -> TokenBudget:
        """Raises ConfigError if a full batch leaves no token for a context chunk."""
        room = config.max_num_tokens - (config.max_batch_size - 1)
        if room < 1:
            raise ConfigError(
                "max_num_tokens",
                f"must hold one token for each of max_batch_size ({config.max_batch_size}), "
                f"got {config.max_num_tokens}",
            )
        if not config.enable_chunked_context:
            return cls(config.max_num_tokens, None)
        size = config.tokens_per_block
        return cls(config.max_num_tokens, room // size * size or room)

    def choose(
        self, started: Sequence[SequenceState], *, context_waited: bool
    ) -> tuple[list[PlannedChunk], bool]:
        """The chunks of the next step, and whether context had to wait with none computed.

        That can only happen without chunks (a whole prompt beside generating sequences). If it
        happened last time (`context_waited`), the first context goes first and the generating
        sequences that no longer fit wait for one step instead.
        """
        generating: list[PlannedChunk] = []
        context: list[PlannedChunk] = []
        for s in started:
            start = s.num_computed
            if start >= s.context_length:
                generating.append(PlannedChunk(s, start, start + 1, False, True))
            else:
                context.append(self._next_chunk(s))
        left = self.max_num_tokens
        num_context = len(context)
        chosen: list[PlannedChunk] = []
        if context_waited and context:
            chosen.append(context.pop(0))
            left -= chosen[0].num_tokens
        chosen.extend(generating[:left])
        left -= min(left, len(generating))
        num_waiting = len(context)
        for chunk in context:
            if chunk.num_tokens <= left:
                chosen.append(chunk)
                left -= chunk.num_tokens
                num_waiting -= 1
        return chosen, 0 < num_waiting == num_context

    def _next_chunk(self, sequence: SequenceState) -> PlannedChunk:
        start, end = sequence.num_computed, sequence.context_length
        if self.chunk_length is not None:
            end = min(end, (start // self.chunk_length + 1) * self.chunk_length)
        return PlannedChunk(sequence, start, end, True, end == sequence.context_length)
