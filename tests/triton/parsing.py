"""Tensors as Triton hands them over, and requests made of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.triton.fakes import byte_level_tokenizer
from tokenflow.config import ServingConfig
from triton_backend.codec import TextRequest, parse_request
from triton_backend.text import TextTokenizer

TOKENIZER = byte_level_tokenizer()
CONFIG = ServingConfig(max_seq_len=64, max_tokens_in_paged_kv_cache=128, tokens_per_block=16)

_DTYPES = {bool: np.bool_, int: np.int32, float: np.float32}


def tensor(value: object, dtype: Any = None) -> np.ndarray:
    values = value if isinstance(value, list) else [value]
    if dtype is None:
        dtype = np.object_ if not values else _DTYPES.get(type(values[0]), np.object_)
    data = [v.encode() if isinstance(v, str) else v for v in values]
    return np.array([data], dtype=dtype).reshape(1, len(data))


def parse(
    parameters: Mapping[str, object] | None = None,
    *,
    tokenizer: TextTokenizer = TOKENIZER,
    config: ServingConfig = CONFIG,
    **inputs: Any,
) -> TextRequest:
    tensors = {"text_input": tensor("hello"), "max_tokens": tensor(4)}
    for name, value in inputs.items():
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value if isinstance(value, np.ndarray) else tensor(value)
    return parse_request(
        "r1",
        tensors,
        parameters or {},
        tokenizer=tokenizer,
        config=config,
        arrival_time=1.5,
        unset_seed=77,
    )


def uint64(value: int) -> np.ndarray:
    return np.array([[value]], dtype=np.uint64)
