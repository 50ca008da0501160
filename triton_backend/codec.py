"""Triton request -> GenerateRequest: every check that can be made before a token is generated.

Owns the meaning of the text model's inputs (the names, types and shapes of tensorrtllm_backend's
`ensemble`, plus read_rate and priority) and of its request parameters. Pure: plain numpy arrays in,
values out; the seed of a request without one is passed in. Every refusal is an InvalidRequestError
that names the field as the client wrote it; an input that is not supported yet is refused unless
its value means "off".
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from tokenflow.config import ServingConfig
from tokenflow.errors import InvalidRequestError
from tokenflow.executor.api import OutputConfig, SamplingConfig
from tokenflow.types import GenerateRequest
from triton_backend.fields import Fields, Tensor, check_number
from triton_backend.text import TextTokenizer

READ_RATE_BOUNDS = (0.01, 10_000.0)
"""Tokens per second that a client may declare."""
MAX_STOP_WORDS = 64
MAX_STOP_WORD_CHARACTERS = 1024
_INT32_MAX = (1 << 31) - 1
_DEFAULT_PRIORITY = 0.5

# Request parameters that Triton, its clients or its endpoints add by themselves.
_KNOWN_PARAMETERS = frozenset(
    {
        "id", "read_rate", "priority", "timeout",
        "sequence_id", "sequence_start", "sequence_end", "binary_data_output",
    }
)  # fmt: skip
_KNOWN_PREFIXES = ("triton_", "x-", "traceparent", "tracestate")

_NEUTRAL_NUMBERS: dict[str, tuple[float, ...]] = {
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "length_penalty": (0.0, 1.0),  # weighs beams against each other; there is one
    "embedding_bias_weights": (0.0,),
}
_ONLY_EMPTY_TEXTS = (
    "bad_words",
    "embedding_bias_words",
    "decoder_text_input",
    "guided_decoding_guide_type",
    "guided_decoding_guide",
)
_ONLY_EMPTY = ("prompt_embedding_table", "lora_task_id", "lora_weights", "lora_config")
_ONLY_FALSE = ("return_context_logits", "return_generation_logits", "return_perf_metrics")
_ONLY_INTEGER = {"beam_width": 1, "num_return_sequences": 1, "prompt_vocab_size": 0}

INPUT_NAMES = (
    "text_input", "max_tokens", "stream", "stop_words", "bad_words", "end_id", "pad_id", "top_k",
    "top_p", "temperature", "min_tokens", "min_length", "seed", "random_seed", "length_penalty",
    "repetition_penalty", "presence_penalty", "frequency_penalty", "beam_width",
    "num_return_sequences", "exclude_input_in_output", "return_log_probs",
    "return_num_input_tokens", "return_num_output_tokens", "return_context_logits",
    "return_generation_logits", "return_perf_metrics", "decoder_text_input",
    "prompt_embedding_table", "prompt_table_extra_id", "prompt_vocab_size", "embedding_bias_words",
    "embedding_bias_weights", "lora_task_id", "lora_weights", "lora_config",
    "guided_decoding_guide_type", "guided_decoding_guide", "read_rate", "priority", "stop",
    "ack_tokens",
)  # fmt: skip
"""Inputs that config.pbtxt declares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest:
    """A validated request: what the engine gets, and what the text layer needs for the answer.

    prefix: text that goes before the generated one (the prompt, if the client wants it back).
    """

    generate: GenerateRequest
    stop_strings: tuple[str, ...] = ()
    prefix: str = ""
    return_num_input_tokens: bool = False
    return_num_output_tokens: bool = False


def parse_request(
    request_id: str,
    tensors: Mapping[str, Tensor],
    parameters: Mapping[str, object],
    *,
    tokenizer: TextTokenizer,
    config: ServingConfig,
    arrival_time: float,
    unset_seed: int,
) -> TextRequest:
    """Validate a generation request (not a control request; control.py).

    unset_seed: uint64 seed for a request that gives none.
    A prompt takes at most max_seq_len - 1 tokens; max_tokens is lowered to what max_seq_len leaves.
    Raises InvalidRequestError.
    """
    fields = Fields(tensors)
    _refuse_unknown(fields, tensors, parameters)
    _refuse_unsupported(fields)
    fields.integer("pad_id", -1, _INT32_MAX)  # nothing is padded; checked all the same
    streaming = fields.boolean("stream", False)
    prompt, input_token_ids = _prompt(fields, tokenizer, config.max_seq_len)
    max_tokens = _max_tokens(fields, len(input_token_ids), config)
    end_id, stop_words = _end_tokens(fields, tokenizer)
    exclude_input = fields.boolean("exclude_input_in_output", config.exclude_input_in_output)
    generate = GenerateRequest(
        request_id=request_id,
        input_token_ids=input_token_ids,
        max_tokens=max_tokens,
        arrival_time=arrival_time,
        sampling_config=_sampling(fields, tokenizer.vocab_size, max_tokens, unset_seed),
        output_config=OutputConfig(return_log_probs=fields.boolean("return_log_probs", False)),
        end_id=end_id,
        stop_words=stop_words,
        read_rate=_either(fields, parameters, "read_rate", *READ_RATE_BOUNDS),
        has_reader=streaming,
        priority=_priority(fields, parameters),
        streaming=streaming,
    )
    return TextRequest(
        generate=generate,
        stop_strings=_stop_strings(fields),
        prefix="" if streaming or exclude_input else prompt,
        return_num_input_tokens=fields.boolean("return_num_input_tokens", False),
        return_num_output_tokens=fields.boolean("return_num_output_tokens", False),
    )


def _refuse_unknown(
    fields: Fields, tensors: Mapping[str, Tensor], parameters: Mapping[str, object]
) -> None:
    for name in tensors:
        if name not in INPUT_NAMES:
            raise InvalidRequestError(name, "unknown input" + _suggestion(name))
    for name in parameters:
        known = name in _KNOWN_PARAMETERS or name.lower().startswith(_KNOWN_PREFIXES)
        if not known:
            # HTTP generate turns a misspelt input into a parameter, without a word.
            raise InvalidRequestError(name, "unknown input or parameter" + _suggestion(name))
    if fields.boolean("stop", False) or "ack_tokens" in fields:
        raise InvalidRequestError(
            "stop" if "stop" in fields else "ack_tokens", "belongs to a control request"
        )


def _suggestion(name: str) -> str:
    close = difflib.get_close_matches(name, INPUT_NAMES, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _refuse_unsupported(fields: Fields) -> None:
    """Inputs of tensorrtllm_backend that have no effect here yet: only their "off" is accepted."""
    for name, neutral in _NEUTRAL_NUMBERS.items():
        for value in fields.numbers(name):
            if value not in neutral:
                raise InvalidRequestError(name, f"is not supported yet (only {neutral[0]:g})")
    for name in (*_ONLY_EMPTY_TEXTS, *_ONLY_EMPTY):
        given = fields.texts(name) if name in _ONLY_EMPTY_TEXTS else fields.size(name)
        if given:
            raise InvalidRequestError(name, "is not supported yet; leave it out")
    for name in _ONLY_FALSE:
        if fields.boolean(name, False):
            raise InvalidRequestError(name, "is not supported yet (only false)")
    for name, only in _ONLY_INTEGER.items():
        if fields.integer(name, only, _INT32_MAX) not in (None, only):
            raise InvalidRequestError(name, f"is not supported yet (only {only})")
    if fields.unsigned("prompt_table_extra_id"):
        raise InvalidRequestError("prompt_table_extra_id", "is not supported yet (only 0)")


def _prompt(
    fields: Fields, tokenizer: TextTokenizer, max_seq_len: int
) -> tuple[str, tuple[int, ...]]:
    text = fields.text("text_input")
    if text is None:
        raise InvalidRequestError("text_input", "is required")
    if not text:
        raise InvalidRequestError("text_input", "must not be empty")
    limit = max_seq_len - 1
    # Refuse what is certainly too long before spending time on its tokens.
    at_least = len(text.encode()) // tokenizer.max_token_bytes
    token_ids = tokenizer.encode(text) if at_least <= limit else ()
    if at_least > limit or len(token_ids) > limit:
        num_tokens = f"{len(token_ids)}" if token_ids else f"at least {at_least}"
        raise InvalidRequestError(
            "text_input",
            f"has {num_tokens} tokens; max_seq_len {max_seq_len} leaves room for {limit}",
        )
    if not token_ids:
        raise InvalidRequestError("text_input", "has no tokens")
    return text, token_ids


def _max_tokens(fields: Fields, num_input_tokens: int, config: ServingConfig) -> int:
    max_tokens = fields.integer("max_tokens", 1, _INT32_MAX)
    if max_tokens is None:
        raise InvalidRequestError("max_tokens", "is required")
    max_tokens = min(max_tokens, config.max_seq_len - num_input_tokens)
    size = config.tokens_per_block
    num_blocks = -(-(num_input_tokens + max_tokens - 1) // size)
    num_total_blocks = config.max_tokens_in_paged_kv_cache // size
    if num_blocks > num_total_blocks:
        raise InvalidRequestError(
            "max_tokens",
            f"prompt of {num_input_tokens} and {max_tokens} tokens need {num_blocks} KV blocks of "
            f"{size} tokens; the pool has {num_total_blocks}",
        )
    return max_tokens


def _end_tokens(
    fields: Fields, tokenizer: TextTokenizer
) -> tuple[int | None, tuple[tuple[int, ...], ...]]:
    """End id, and stop words by ids. Further end tokens of the model become stop words of one id:
    the engine knows one end id; their text is empty as for every special token."""
    end_id = fields.integer("end_id", -1, tokenizer.vocab_size - 1)
    if end_id is not None:
        return (None if end_id < 0 else end_id), ()
    eos_token_ids = tokenizer.eos_token_ids
    if not eos_token_ids:
        return None, ()
    return eos_token_ids[0], tuple((token_id,) for token_id in eos_token_ids[1:])


def _sampling(fields: Fields, vocab_size: int, max_tokens: int, unset_seed: int) -> SamplingConfig:
    """Greedy when top_k and top_p are unset (or top_k is 0 or 1), or temperature is 0."""
    top_k = fields.integer("top_k", 0, vocab_size) or None
    top_p = fields.number("top_p", 0.0, 1.0, above_low=True)
    temperature = fields.number("temperature", 0.0, 1e6)
    if temperature == 0.0:
        temperature, top_k, top_p = None, 1, None
    min_tokens = _renamed(
        "min_tokens",
        fields.integer("min_tokens", 0, _INT32_MAX),
        "min_length",
        fields.integer("min_length", 0, _INT32_MAX),
    )
    seed = _renamed("seed", fields.unsigned("seed"), "random_seed", fields.unsigned("random_seed"))
    return SamplingConfig(
        top_k=top_k,
        top_p=top_p,
        temperature=temperature,
        seed=unset_seed if seed is None else seed,
        min_tokens=min(min_tokens, max_tokens) if min_tokens else None,
    )


def _renamed(name: str, value: int | None, old_name: str, old_value: int | None) -> int | None:
    if value is not None and old_value is not None and value != old_value:
        raise InvalidRequestError(old_name, f"is the old name of {name}, with another value")
    return old_value if value is None else value


def _either(
    fields: Fields, parameters: Mapping[str, object], name: str, low: float, high: float
) -> float | None:
    """A number given as a tensor, else as a request parameter."""
    value = fields.number(name, low, high)
    if value is None and name in parameters:
        value = check_number(name, parameters[name], low, high)
    return value


def _priority(fields: Fields, parameters: Mapping[str, object]) -> float:
    value = _either(fields, parameters, "priority", 0.0, 1.0)
    return _DEFAULT_PRIORITY if value is None else value


def _stop_strings(fields: Fields) -> tuple[str, ...]:
    stops = fields.texts("stop_words")
    if len(stops) > MAX_STOP_WORDS:
        raise InvalidRequestError("stop_words", f"at most {MAX_STOP_WORDS}, got {len(stops)}")
    for stop in stops:
        if len(stop) > MAX_STOP_WORD_CHARACTERS:
            raise InvalidRequestError(
                "stop_words", f"at most {MAX_STOP_WORD_CHARACTERS} characters each, got {len(stop)}"
            )
    return tuple(dict.fromkeys(stops))
