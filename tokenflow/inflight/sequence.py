"""One request inside the engine: its tokens, its progress, why it ends.

Owns the stop criteria. `token_ids` is the prompt followed by everything generated; the KV of its
first `num_computed` tokens exists, so a generating sequence has exactly one token more than KV.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tokenflow.executor.api import FinishReason, KvCacheMetrics, Request
from tokenflow.inflight.block_store import SequenceBlocks
from tokenflow.inflight.kv_cache import KvCacheManager


@dataclass(eq=False, slots=True, kw_only=True)
class SequenceState:
    """Mutable state of a request that the engine has accepted.

    order: position of arrival (FIFO inside a priority).
    max_tokens: the request's, lowered to what max_seq_len leaves.
    blocks: KV blocks; None while not started (waiting, or paused by the engine itself).
    context_length: tokens that are context since the last start; beyond it, it generates.
    num_sent: generated tokens that were part of a response.
    num_prompt_tokens: length of the prompt.
    num_final_blocks: blocks of prompt + max_tokens; 0 until somebody counted them (capacity.py).
    """

    request_id: int
    request: Request
    order: int
    max_tokens: int
    token_ids: list[int]
    blocks: SequenceBlocks | None = None
    num_computed: int = 0
    context_length: int = 0
    is_known_to_runner: bool = False
    finish_reason: FinishReason = FinishReason.NOT_FINISHED
    log_probs: list[float] = field(default_factory=list)
    cum_log_prob: float = 0.0
    num_sampled: int = 0
    num_sent: int = 0
    first_iter: int | None = None
    last_iter: int | None = None
    num_reused_tokens: int = 0
    num_onboarded_blocks: int = 0
    kv_metrics: KvCacheMetrics = field(default_factory=KvCacheMetrics)
    num_prompt_tokens: int = field(init=False)
    num_final_blocks: int = 0

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.request.input_token_ids)

    @property
    def sort_key(self) -> tuple[float, int]:
        """Descending priority, then arrival."""
        return (-self.request.priority, self.order)

    @property
    def is_started(self) -> bool:
        """True while it holds a batch slot and blocks."""
        return self.blocks is not None

    @property
    def is_generating(self) -> bool:
        """True once its context is computed."""
        return self.blocks is not None and self.num_computed >= self.context_length

    @property
    def num_generated(self) -> int:
        """Tokens of the output so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    def start(self, kv: KvCacheManager) -> bool:
        """Take blocks for all tokens; False when there is no room."""
        assert self.blocks is None
        request = self.request
        blocks = kv.allocate(
            self.token_ids, request.cache_salt_id, request.kv_cache_retention_config
        )
        if blocks is None:
            return False
        self.blocks = blocks
        self.num_computed = self.num_reused_tokens = blocks.num_reused_tokens
        self.context_length = len(self.token_ids)
        self.num_onboarded_blocks = blocks.num_onboarded_blocks
        self.kv_metrics = blocks.metrics
        return True

    def stop(self, kv: KvCacheManager, *, keep: bool) -> None:
        """Give the blocks back, with `keep` storing what is computed. The tokens stay: a sequence
        that is started again has its output as part of its context."""
        if self.blocks is None:
            return
        if keep:
            ended = self.finish_reason is not FinishReason.NOT_FINISHED
            kv.release(self.blocks, self.token_ids, self.num_computed, ended=ended)
        else:
            kv.discard(self.blocks)
        self.blocks = None
        self.num_computed = 0

    def restart(self, kv: KvCacheManager) -> None:
        """Give the blocks back because their content did not arrive; it is started anew."""
        assert self.blocks is not None
        kv.discard(self.blocks, ended=False)
        self.blocks = None
        self.num_computed = 0

    def append(self, token_id: int, log_prob: float, iteration: int) -> bool:
        """Take a sampled token; True if the sequence ends with it.

        The end token is not part of the output, the tokens of a stop word are. Stop words are
        compared with the end of the whole sequence, prompt included, so one may begin in the
        prompt and goes on across a resume. A stop on the last allowed token is a stop, not LENGTH.
        """
        self.num_sampled += 1
        if self.first_iter is None:
            self.first_iter = iteration
        self.last_iter = iteration
        request = self.request
        if token_id == request.end_id:
            self.finish_reason = FinishReason.END_ID
            return True
        self.token_ids.append(token_id)
        self.log_probs.append(log_prob)
        self.cum_log_prob += log_prob
        if request.stop_words and self._ends_with_any(request.stop_words):
            self.finish_reason = FinishReason.STOP_WORDS
        elif len(self.token_ids) - self.num_prompt_tokens < self.max_tokens:
            return False
        else:
            self.finish_reason = FinishReason.LENGTH
        return True

    def append_each(
        self, token_ids: Sequence[int], log_probs: Sequence[float], iteration: int
    ) -> None:
        """As `append` for each of them, the last one in `iteration`. None of them may end it."""
        self.num_sampled += len(token_ids)
        self.cum_log_prob += sum(log_probs)
        self.last_iter = iteration
        self.token_ids += token_ids
        self.log_probs += log_probs

    def _ends_with_any(self, words: Sequence[tuple[int, ...]]) -> bool:
        return any(tuple(self.token_ids[-len(word) :]) == word for word in words)


def started(sequences: Iterable[SequenceState]) -> list[SequenceState]:
    """Those that are started, in order."""
    return [s for s in sequences if s.blocks is not None]
