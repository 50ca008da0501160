"""What a request must produce, worked out from its script alone.

Knows nothing of blocks, batches or pauses, and states the meaning of the sampling fields anew (a
banned token is replaced by the next id that is not banned), so that it does not share a mistake
with the engine.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenflow.inflight.scripts import Script
from tokenflow.types import EndReason, GenerateRequest


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole answer: its tokens, their log-probs, and why it ends by itself."""

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    end: EndReason


def whole(request: GenerateRequest, script: Script, vocab_size: int, max_seq_len: int) -> Whole:
    """The answer of an engine that runs nothing else."""
    history = request.input_token_ids
    num_prompt = len(history)
    log_probs: list[float] = []
    end = EndReason.LENGTH
    for num_generated in range(min(request.max_tokens, max_seq_len - num_prompt)):
        token_id, log_prob = script(history)
        banned = _banned(request, history, num_generated)
        if token_id in banned:
            candidates = [(token_id + i) % vocab_size for i in range(vocab_size)]
            token_id = next((token for token in candidates if token not in banned), token_id)
        if token_id == request.end_id:
            end = EndReason.STOP
            break
        history = (*history, token_id)
        log_probs.append(log_prob)
        if any(history[-len(word) :] == word for word in request.stop_words):
            end = EndReason.STOP
            break
    return Whole(history[num_prompt:], tuple(log_probs), end)


def _banned(request: GenerateRequest, history: tuple[int, ...], num_generated: int) -> set[int]:
    banned = set()
    for word in request.bad_words:
        if word[:-1] == history[max(0, len(history) - len(word) + 1) :]:
            banned.add(word[-1])
    size = request.sampling_config.no_repeat_ngram_size
    if size:
        ngrams = {history[i : i + size] for i in range(len(history) - size + 1)}
        end = history[len(history) - size + 1 :]
        banned |= {ngram[-1] for ngram in ngrams if ngram[:-1] == end}
    if num_generated < (request.sampling_config.min_tokens or 0) and request.end_id is not None:
        banned.add(request.end_id)
    return banned
