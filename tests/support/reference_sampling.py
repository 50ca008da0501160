"""What sampling means, slowly: one row, plain Python, in the order of TensorRT-LLM's kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tokenflow.executor.api import Request

_BANNED = -math.inf


def weighed(logits: Sequence[float], request: Request, sequence: Sequence[int]) -> list[float]:
    """Bias, temperature, penalties. sequence: prompt + generated tokens."""
    sampling = request.sampling_config
    bias = dict(request.embedding_bias)
    num_prompt = len(request.input_token_ids)
    ignored = min(sampling.prompt_ignore_length or 0, num_prompt)
    result = []
    for token, logit in enumerate(logits):
        value = (logit + bias.get(token, 0.0)) / (sampling.temperature or 1.0)
        if token in sequence:
            factor = 1.0 if sampling.repetition_penalty is None else sampling.repetition_penalty
            value = value * factor if value < 0 else value / factor
        count = list(sequence[ignored:]).count(token)
        if count > 0:
            value -= sampling.presence_penalty or 0.0
        value -= (sampling.frequency_penalty or 0.0) * count
        result.append(value)
    return result


def banned(request: Request, sequence: Sequence[int], num_generated: int) -> set[int]:
    """Every way in which a token would be the end of something forbidden, tried one by one."""
    sampling = request.sampling_config
    found = set()
    candidates = {word[-1] for word in request.bad_words} | set(sequence)
    size = sampling.no_repeat_ngram_size or 0
    ngrams = [tuple(sequence[i : i + size]) for i in range(len(sequence) - size + 1)]
    for token in candidates:
        longer = [*sequence, token]
        if any(longer[-len(word) :] == list(word) for word in request.bad_words):
            found.add(token)
        if size and tuple(longer[-size:]) in ngrams:
            found.add(token)
    if request.end_id is not None and num_generated < (sampling.min_tokens or 0):
        found.add(request.end_id)
    return found


def top_p_now(request: Request, generated: Sequence[int]) -> float:
    """The top_p after these tokens, one multiplication each."""
    sampling = request.sampling_config
    initial = 1.0 if sampling.top_p is None else sampling.top_p
    decay = 1.0 if sampling.top_p_decay is None else sampling.top_p_decay
    low = sampling.top_p_min
    if decay == 1.0 and low is None:
        return initial
    now = initial
    for token in generated:
        reset = token == sampling.top_p_reset_ids
        now = initial if reset else max(now * decay, 1e-6 if low is None else low)
    return now


def kept_weights(values: Sequence[float], request: Request, top_p: float) -> list[float]:
    """Probabilities after min_p, top_k, top_p, not normalised."""
    sampling = request.sampling_config
    peak = max(values)
    weights = [math.exp(value - peak) for value in values]
    weights = [w if w >= (sampling.min_p or 0.0) else 0.0 for w in weights]
    total = sum(weights)
    probs = [w / total for w in weights]
    order = sorted(range(len(probs)), key=lambda i: (-probs[i], i))
    order = order[: sampling.top_k or len(order)]
    share = sum(probs[i] for i in order)
    kept, reached = set(), 0.0
    for i in order:
        kept.add(i)
        reached += probs[i]
        if top_p < 1 and reached >= top_p * share:
            break
    return [p if i in kept else 0.0 for i, p in enumerate(probs)]


def acceptable(
    logits: Sequence[float],
    request: Request,
    sequence: Sequence[int],
    num_generated: int,
    uniform: float,
    tolerance: float = 1e-5,
) -> set[int]:
    """The token that must come next; several only where rounding decides between them."""
    values = weighed(logits, request, sequence)
    out = banned(request, sequence, num_generated)
    values = [_BANNED if i in out else value for i, value in enumerate(values)]
    best = max(values)
    if best == _BANNED:
        return {max(range(len(logits)), key=lambda i: (logits[i], -i))}
    sampling = request.sampling_config
    drawn = (sampling.top_k or sampling.top_p is not None) and sampling.top_k != 1
    if not drawn or sampling.temperature == 0:
        ties = [i for i, value in enumerate(values) if value == best]
        near = {i for i, value in enumerate(values) if best - value <= tolerance}
        return {ties[0]} if len(near) == len(ties) else near
    top_p = top_p_now(request, sequence[len(sequence) - num_generated :])
    accepted: set[int] = set()
    for share in {top_p, top_p * (1 - tolerance), min(1.0, top_p * (1 + tolerance))}:
        weights = kept_weights(values, request, share)
        for shift in (-tolerance, 0.0, tolerance):
            accepted.add(_at(weights, min(max(uniform + shift, 0.0), 1.0)))
    return accepted


def _at(weights: Sequence[float], uniform: float) -> int:
    target, reached = uniform * sum(weights), 0.0
    last = 0
    for i, weight in enumerate(weights):
        reached += weight
        last = i if weight > 0 else last
        if weight > 0 and reached > target:
            return i
    return last
