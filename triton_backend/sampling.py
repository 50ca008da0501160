"""The sampling inputs of a request: ranges, defaults, and which values mean "off".

Owns their meaning. Pure. Names are those of tensorrtllm_backend's `ensemble`, and for what only its
engine model has, of that: min_p, no_repeat_ngram_size, prompt_ignore_length, runtime_top_p_*. A
value that means "off" leaves the field unset, so that nothing above the engine takes the request
for one that uses it (a top_p that decays cannot be paused, one that decays by 1 can).

Greedy when top_k (0 is unset) and top_p are unset, top_k is 1, or temperature is 0. min_p, top_p
and the runtime_top_p_* inputs then have nothing to narrow; penalties, bad words, n-grams and biases
act all the same.
"""

from __future__ import annotations

from tokenflow.errors import InvalidRequestError
from tokenflow.executor.api import SamplingConfig
from triton_backend.fields import Fields

_INT32_MAX = (1 << 31) - 1
_MAX_PENALTY = 1e6
_MAX_NGRAM_SIZE = 32  # the engine's
_GREEDY_NOTE = "; without top_k and top_p the answer is greedy"


def read_sampling(
    fields: Fields, vocab_size: int, max_tokens: int, unset_seed: int
) -> SamplingConfig:
    """Raises InvalidRequestError. unset_seed: uint64 seed for a request that gives none."""
    top_k = fields.integer("top_k", 0, vocab_size) or None
    top_p = fields.number("top_p", 0.0, 1.0, above_low=True, note=_GREEDY_NOTE)
    decay, top_p_min, reset_id = _top_p_decay(fields, top_p, vocab_size)
    temperature = fields.number("temperature", 0.0, 1e6)
    min_p = _unless(0.0, fields.number("min_p", 0.0, 1.0))
    if temperature == 0.0:
        temperature, top_k = None, 1
    if top_k == 1:  # greedy; a temperature still weighs presence and frequency penalties
        top_p, min_p, decay, top_p_min, reset_id = None, None, None, None, None
    penalty = fields.number("repetition_penalty", 0.0, _MAX_PENALTY, above_low=True)
    return SamplingConfig(
        top_k=top_k,
        top_p=top_p,
        top_p_min=top_p_min,
        top_p_reset_ids=reset_id,
        top_p_decay=decay,
        seed=_seed(fields, unset_seed),
        temperature=temperature,
        min_tokens=_min_tokens(fields, max_tokens),
        repetition_penalty=_unless(1.0, penalty),
        presence_penalty=_signed(fields, "presence_penalty"),
        frequency_penalty=_signed(fields, "frequency_penalty"),
        prompt_ignore_length=fields.integer("prompt_ignore_length", 0, _INT32_MAX) or None,
        no_repeat_ngram_size=fields.integer("no_repeat_ngram_size", 0, _MAX_NGRAM_SIZE) or None,
        min_p=min_p,
    )


def _top_p_decay(
    fields: Fields, top_p: float | None, vocab_size: int
) -> tuple[float | None, float | None, int | None]:
    """runtime_top_p_decay with its floor and the token that starts it anew; without a decay the
    other two have nothing to do."""
    decay = fields.number("runtime_top_p_decay", 0.0, 1.0, above_low=True)
    low = fields.number("runtime_top_p_min", 0.0, 1.0, above_low=True)
    reset_id = fields.integer("runtime_top_p_reset_ids", -1, vocab_size - 1)
    if decay is None or decay == 1.0:
        return None, None, None
    if top_p is None:
        raise InvalidRequestError("runtime_top_p_decay", "needs a top_p that it can lower")
    return decay, low, None if reset_id == -1 else reset_id


def _seed(fields: Fields, unset_seed: int) -> int:
    given = _renamed("seed", fields.unsigned("seed"), "random_seed", fields.unsigned("random_seed"))
    return unset_seed if given is None else given


def _min_tokens(fields: Fields, max_tokens: int) -> int | None:
    given = _renamed(
        "min_tokens",
        fields.integer("min_tokens", 0, _INT32_MAX),
        "min_length",
        fields.integer("min_length", 0, _INT32_MAX),
    )
    return min(given, max_tokens) if given else None


def _renamed(name: str, value: int | None, old_name: str, old_value: int | None) -> int | None:
    if value is not None and old_value is not None and value != old_value:
        raise InvalidRequestError(old_name, f"is the old name of {name}, with another value")
    return old_value if value is None else value


def _signed(fields: Fields, name: str) -> float | None:
    return _unless(0.0, fields.number(name, -_MAX_PENALTY, _MAX_PENALTY))


def _unless(off: float, value: float | None) -> float | None:
    return None if value == off else value
