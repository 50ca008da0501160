"""Which inputs and request parameters exist, and which of them are not supported.

Owns the names that config.pbtxt declares and the refusals by name: what nobody knows, and what
tensorrtllm_backend has but this server has not, unless its value means "off". Pure.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from tokenflow.errors import InvalidRequestError
from triton_backend.control import CONTROL_INPUTS
from triton_backend.fields import Fields, Tensor

INPUT_NAMES = (
    "text_input", "max_tokens", "stream", "stop_words", "bad_words", "end_id", "pad_id", "top_k",
    "top_p", "temperature", "min_tokens", "min_length", "seed", "random_seed", "length_penalty",
    "repetition_penalty", "presence_penalty", "frequency_penalty", "beam_width",
    "num_return_sequences", "exclude_input_in_output", "return_log_probs",
    "return_num_input_tokens", "return_num_output_tokens", "return_context_logits",
    "return_generation_logits", "return_perf_metrics", "decoder_text_input",
    "prompt_embedding_table", "prompt_table_extra_id", "prompt_vocab_size", "embedding_bias_words",
    "embedding_bias_weights", "lora_task_id", "lora_weights", "lora_config",
    "guided_decoding_guide_type", "guided_decoding_guide", "min_p", "no_repeat_ngram_size",
    "prompt_ignore_length", "runtime_top_p_min", "runtime_top_p_decay", "runtime_top_p_reset_ids",
    "read_rate", "priority", "stop", "pause", "resume", "ack_tokens",
)  # fmt: skip
"""Inputs that config.pbtxt declares."""

# Request parameters that Triton, its clients or its endpoints add by themselves.
_KNOWN_PARAMETERS = frozenset(
    {
        "id", "read_rate", "priority", "timeout",
        "sequence_id", "sequence_start", "sequence_end", "binary_data_output",
    }
)  # fmt: skip
_KNOWN_PREFIXES = ("triton_", "x-", "traceparent", "tracestate")

_NEUTRAL_LENGTH_PENALTIES = (0.0, 1.0)  # it weighs beams against each other; there is one
_ONLY_EMPTY_TEXTS = ("decoder_text_input", "guided_decoding_guide_type", "guided_decoding_guide")
_ONLY_EMPTY = ("prompt_embedding_table",)
_ONLY_FALSE = ("return_context_logits", "return_generation_logits", "return_perf_metrics")
_ONLY_INTEGER = {"beam_width": 1, "num_return_sequences": 1, "prompt_vocab_size": 0}

_MAX_MISSPELT_CHARACTERS = 64  # a longer name resembles none; comparing one of 30 MB takes seconds
_INT32_MAX = (1 << 31) - 1


def refuse_unknown(
    fields: Fields, tensors: Mapping[str, Tensor], parameters: Mapping[str, object]
) -> None:
    """Raises InvalidRequestError for a name that is no input or parameter of a generation."""
    for name in tensors:
        if name not in INPUT_NAMES:
            raise InvalidRequestError(name, "unknown input" + _suggestion(name))
    for name in parameters:
        known = name in _KNOWN_PARAMETERS or name.lower().startswith(_KNOWN_PREFIXES)
        if not known:
            # HTTP generate turns a misspelt input into a parameter, without a word.
            raise InvalidRequestError(name, "unknown input or parameter" + _suggestion(name))
    for name in CONTROL_INPUTS:
        if name in fields and (name == "ack_tokens" or fields.boolean(name, False)):
            raise InvalidRequestError(name, "belongs to a control request")


def _suggestion(name: str) -> str:
    if len(name) > _MAX_MISSPELT_CHARACTERS:
        return ""
    close = difflib.get_close_matches(name, INPUT_NAMES, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def refuse_unsupported(fields: Fields) -> None:
    """Inputs of tensorrtllm_backend that have no effect here: only their "off" is accepted."""
    for value in fields.numbers("length_penalty"):
        if value not in _NEUTRAL_LENGTH_PENALTIES:
            raise InvalidRequestError("length_penalty", "is not supported yet (only 0 or 1)")
    for name in (*_ONLY_EMPTY_TEXTS, *_ONLY_EMPTY):
        given = any(fields.texts(name)) if name in _ONLY_EMPTY_TEXTS else fields.size(name)
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
