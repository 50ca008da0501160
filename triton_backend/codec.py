"""Triton request -> GenerateRequest: every check that can be made before a token is generated.

Owns the meaning of the text model's inputs (the names, types and shapes of tensorrtllm_backend's
`ensemble`, plus read_rate and priority) and of its request parameters; sampling.py and words.py
have their part of it. Pure: plain numpy arrays in, values out; the seed of a request without one is
passed in. Every refusal is an InvalidRequestError that names the field as the client wrote it; an
input that is not supported is refused unless its value means "off".

Length: a request without max_tokens gets the configured default_max_tokens; either is lowered to
what max_seq_len leaves after the prompt.

Time: the parameter `timeout`, in microseconds as in KServe's protocol (0 = none), is the longest
time from arrival to end, waiting and pauses included; then the answer ends with what it has. Triton
does not act on it where a model takes requests at once; it hands gRPC's over, and leaves that of
HTTP generate among the parameters (triton_io.py puts both there).

End tokens: a model may have several, the executor surface knows one, `end_id`, which the engine
masks until min_tokens were generated. The others go to the engine as stop words of one id, so that
it stops at them at once. It would not hold stop words back, so with min_tokens they stay out of the
engine and the text layer ends the answer at the first one from min_tokens on (stream.py); an
earlier one is a token without text. `stop_words` are looked for in the text, and not held back by
min_tokens; but a special token has no text, so a stop word that names one makes it an end token.

Readers: a stream is read by somebody unless it declares a read_rate above MAX_READER_RATE, which
says that a machine takes the tokens as they come. stream=false has no reader either. Without one
the rate means nothing and is dropped: the scheduler uses its reference rate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tokenflow.config import ServingConfig
from tokenflow.errors import InvalidRequestError
from tokenflow.executor.api import (
    CapacitySchedulerPolicy,
    OutputConfig,
    num_blocks_needed,
)
from tokenflow.types import GenerateRequest
from triton_backend.fields import Fields, Tensor, check_id, check_number
from triton_backend.inputs import refuse_unknown, refuse_unsupported
from triton_backend.lora import read_lora
from triton_backend.sampling import read_sampling
from triton_backend.text import TextTokenizer
from triton_backend.words import read_bad_words, read_embedding_bias, read_words

READ_RATE_BOUNDS = (0.01, 10_000.0)
"""Tokens per second that a client may declare."""
MAX_READER_RATE = 100.0
"""Tokens per second; nobody reads or listens faster, so who declares more is a machine."""
MAX_TIMEOUT_US = 1e15
"""Longest `timeout`, some thirty years; a negative one of a gRPC client arrives as more."""
MAX_BYTES_PER_TOKEN = 16
"""Of a prompt, on average; texts have four or five. Tokens may have hundreds, so that a text of too
many could be told by its tokens only, which takes many seconds for tens of MB."""
_SHORT_PROMPT_BYTES = 1 << 18  # whose tokens take a fraction of a second
_INT32_MAX = (1 << 31) - 1
_DEFAULT_PRIORITY = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest:
    """A validated request: what the engine gets, and what the text layer needs for the answer.

    further_end_ids: end tokens besides `generate.end_id`; see the module.
    prefix: text that goes before the generated one (the prompt, if the client wants it back).
    """

    generate: GenerateRequest
    stop_strings: tuple[str, ...] = ()
    further_end_ids: frozenset[int] = frozenset()
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
    A prompt takes at most max_seq_len - 1 tokens, and without chunked context max_num_tokens.
    Raises InvalidRequestError.
    """
    check_id(request_id)
    fields = Fields(tensors)
    refuse_unknown(fields, tensors, parameters)
    refuse_unsupported(fields)
    fields.integer("pad_id", -1, _INT32_MAX)  # nothing is padded; checked all the same
    streaming = fields.boolean("stream", False)
    prompt, input_token_ids = _prompt(fields, tokenizer, config)
    max_tokens = _max_tokens(fields, len(input_token_ids), config)
    sampling_config = read_sampling(fields, tokenizer.vocab_size, max_tokens, unset_seed)
    stop_strings = read_words(fields, "stop_words")
    end_id, further_end_ids = _end_ids(fields, tokenizer, stop_strings)
    engine_stops = () if sampling_config.min_tokens else further_end_ids
    read_rate, has_reader = _reader(fields, parameters, streaming)
    exclude_input = fields.boolean("exclude_input_in_output", config.exclude_input_in_output)
    generate = GenerateRequest(
        request_id=request_id,
        input_token_ids=input_token_ids,
        max_tokens=max_tokens,
        arrival_time=arrival_time,
        sampling_config=sampling_config,
        output_config=OutputConfig(return_log_probs=fields.boolean("return_log_probs", False)),
        end_id=end_id,
        stop_words=tuple((token_id,) for token_id in engine_stops),
        bad_words=read_bad_words(fields, tokenizer),
        embedding_bias=read_embedding_bias(fields, tokenizer),
        lora_config=read_lora(fields, config),
        read_rate=read_rate,
        has_reader=has_reader,
        priority=_priority(fields, parameters),
        streaming=streaming,
        timeout_s=_timeout_s(parameters),
    )
    return TextRequest(
        generate=generate,
        stop_strings=stop_strings,
        further_end_ids=frozenset(further_end_ids),
        prefix="" if streaming or exclude_input else prompt,
        return_num_input_tokens=fields.boolean("return_num_input_tokens", False),
        return_num_output_tokens=fields.boolean("return_num_output_tokens", False),
    )


def _prompt(
    fields: Fields, tokenizer: TextTokenizer, config: ServingConfig
) -> tuple[str, tuple[int, ...]]:
    text = fields.text("text_input")
    if text is None:
        raise InvalidRequestError("text_input", "is required")
    if not text:
        raise InvalidRequestError("text_input", "must not be empty")
    limit, setting = _max_input_len(config)
    # Refuse what is certainly too long before spending time on its tokens: nobody is let in then.
    num_bytes = len(text.encode())
    at_least = num_bytes // tokenizer.max_token_bytes
    if at_least <= limit and num_bytes > max(_SHORT_PROMPT_BYTES, MAX_BYTES_PER_TOKEN * limit):
        raise InvalidRequestError(
            "text_input",
            f"has {num_bytes} bytes; {setting} leaves room for {limit} tokens, of at most "
            f"{MAX_BYTES_PER_TOKEN} bytes on average",
        )
    token_ids = tokenizer.encode(text) if at_least <= limit else ()
    if at_least > limit or len(token_ids) > limit:
        num_tokens = f"{len(token_ids)}" if token_ids else f"at least {at_least}"
        raise InvalidRequestError(
            "text_input",
            f"has {num_tokens} tokens; {setting} leaves room for {limit}",
        )
    if not token_ids:
        raise InvalidRequestError("text_input", "has no tokens")
    return text, token_ids


def _max_input_len(config: ServingConfig) -> tuple[int, str]:
    """Tokens of the longest prompt that the engine takes, and the setting that says so."""
    limit = config.executor_config().max_input_len
    if limit == config.max_seq_len - 1:
        return limit, f"max_seq_len {config.max_seq_len}"
    return limit, f"max_num_tokens {limit} without chunked context"


def _max_tokens(fields: Fields, num_input_tokens: int, config: ServingConfig) -> int:
    max_tokens = fields.integer("max_tokens", 1, _INT32_MAX)
    if max_tokens is None:
        max_tokens = config.default_max_tokens
    max_tokens = min(max_tokens, config.max_seq_len - num_input_tokens)
    size = config.tokens_per_block
    num_blocks = num_blocks_needed(  # at full length, however the engine reserves them
        CapacitySchedulerPolicy.GUARANTEED_NO_EVICT, size, num_input_tokens, max_tokens
    )
    num_total_blocks = config.max_tokens_in_paged_kv_cache // size
    if num_blocks > num_total_blocks:
        raise InvalidRequestError(
            "max_tokens",
            f"prompt of {num_input_tokens} and {max_tokens} tokens need {num_blocks} KV blocks of "
            f"{size} tokens; the pool has {num_total_blocks}",
        )
    return max_tokens


def _end_ids(
    fields: Fields, tokenizer: TextTokenizer, stop_strings: tuple[str, ...]
) -> tuple[int | None, tuple[int, ...]]:
    """The engine's end id, and further ones: the model's, unless the client names its own `end_id`
    (-1: none), and special tokens that are named as stop words."""
    given = fields.integer("end_id", -1, tokenizer.vocab_size - 1)
    own = tokenizer.eos_token_ids if given is None else (given,)
    end_id = own[0] if own and own[0] >= 0 else None
    ids_named = [tokenizer.special_token_id(stop) for stop in stop_strings]
    further = {*own[1:], *(token_id for token_id in ids_named if token_id is not None)}
    return end_id, tuple(sorted(further - {end_id}))


def _either(
    fields: Fields, parameters: Mapping[str, object], name: str, low: float, high: float
) -> float | None:
    """A number given as a tensor, else as a request parameter."""
    value = fields.number(name, low, high)
    if value is None and name in parameters:
        value = check_number(name, parameters[name], low, high)
    return value


def _reader(
    fields: Fields, parameters: Mapping[str, object], streaming: bool
) -> tuple[float | None, bool]:
    """read_rate of the reader (None: undeclared, or no reader), and whether there is one."""
    read_rate = _either(fields, parameters, "read_rate", *READ_RATE_BOUNDS)
    has_reader = streaming and (read_rate is None or read_rate <= MAX_READER_RATE)
    return (read_rate if has_reader else None), has_reader


def _priority(fields: Fields, parameters: Mapping[str, object]) -> float:
    value = _either(fields, parameters, "priority", 0.0, 1.0)
    return _DEFAULT_PRIORITY if value is None else value


def _timeout_s(parameters: Mapping[str, object]) -> float | None:
    value = parameters.get("timeout")
    if value is None:
        return None
    return check_number("timeout", value, 0.0, MAX_TIMEOUT_US, note=" microseconds") / 1e6 or None
