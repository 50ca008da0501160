"""Chunk -> output tensors of a response.

Owns which outputs a response carries and their shapes. Pure. Shapes are those of a model with a
batch dimension: [1, 1], and [1, 1, n] for output_log_probs.

Sent: what the client asked for by name. A client that names nothing asks for everything that is
declared; it gets the text, the indices, the finish reason, and what its return_* flags ask for. An
output without meaning for this request or this response is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from triton_backend.codec import TextRequest
from triton_backend.stream import Chunk

OUTPUT_NAMES = (
    "text_output", "cum_log_probs", "output_log_probs", "context_logits", "generation_logits",
    "batch_index", "sequence_index", "kv_cache_alloc_new_blocks", "kv_cache_reused_blocks",
    "kv_cache_alloc_total_blocks", "arrival_time_ns", "first_scheduled_time_ns",
    "first_token_time_ns", "last_token_time_ns", "acceptance_rate",
    "total_accepted_draft_tokens", "total_draft_tokens", "num_input_tokens", "num_output_tokens",
    "finish_reason", "token_index",
)  # fmt: skip
"""Outputs that config.pbtxt declares."""

Array = npt.NDArray[Any]
_Encoder = Callable[[Chunk, TextRequest], Array | None]


def select_outputs(requested: Iterable[str], request: TextRequest) -> tuple[str, ...]:
    """Names of the outputs that the responses of a request carry, in order of declaration."""
    names = set(requested)
    if names >= set(OUTPUT_NAMES):
        if not request.return_num_input_tokens:
            names.discard("num_input_tokens")
        if not request.return_num_output_tokens:
            names.discard("num_output_tokens")
    if not request.generate.output_config.return_log_probs:
        names -= {"cum_log_probs", "output_log_probs"}
    return tuple(name for name in OUTPUT_NAMES if name in names and name in _ENCODERS)


def encode_chunk(
    chunk: Chunk, request: TextRequest, names: Iterable[str]
) -> list[tuple[str, Array]]:
    """The tensors of one response; `names` from `select_outputs`."""
    result = []
    for name in names:
        array = _ENCODERS[name](chunk, request)
        if array is not None:
            result.append((name, array))
    return result


def _text(value: str) -> Array:
    return np.array([[value.encode()]], dtype=np.object_)


def _int(value: int) -> Array:
    return np.array([[value]], dtype=np.int32)


_ZERO = _int(0)  # one prompt, one sequence: both indices are always 0


def _output_log_probs(chunk: Chunk, request: TextRequest) -> Array | None:
    if not chunk.log_probs:
        return None
    return np.array([[chunk.log_probs]], dtype=np.float32)


def _finish_reason(chunk: Chunk, request: TextRequest) -> Array | None:
    return _text(chunk.finish_reason) if chunk.final else None


_ENCODERS: dict[str, _Encoder] = {
    "text_output": lambda chunk, request: _text(chunk.text),
    "cum_log_probs": lambda chunk, request: np.array([[chunk.cum_log_prob]], dtype=np.float32),
    "output_log_probs": _output_log_probs,
    "batch_index": lambda chunk, request: _ZERO,
    "sequence_index": lambda chunk, request: _ZERO,
    "num_input_tokens": lambda chunk, request: _int(len(request.generate.input_token_ids)),
    "num_output_tokens": lambda chunk, request: _int(chunk.num_output_tokens),
    "finish_reason": _finish_reason,
    "token_index": lambda chunk, request: _int(chunk.token_index),
}
