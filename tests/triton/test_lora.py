"""The LoRA inputs: what an engine gets of them, and what is refused by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from tests.triton.parsing import CONFIG, parse, uint64
from tokenflow.errors import InvalidRequestError
from tokenflow.executor.lora import MAX_WEIGHT_BYTES, LoraConfig, TensorData

TRTLLM = dataclasses.replace(CONFIG, engine="trtllm", lora_cache_max_adapter_size=16)
WEIGHTS = np.arange(12, dtype=np.float16).reshape(1, 3, 4)
ROWS = np.array([[[0, 0, 8], [1, 0, 8], [0, 1, 16]]], dtype=np.int32)
GIVEN = {"lora_task_id": uint64(9), "lora_weights": WEIGHTS, "lora_config": ROWS}


def changed(row: int, column: int, value: int) -> np.ndarray:
    rows = ROWS.copy()
    rows[0, row, column] = value
    return rows


def test_weights_and_config_arrive() -> None:
    lora = parse(config=TRTLLM, **GIVEN).generate.lora_config
    assert lora is not None
    assert lora.task_id == 9
    assert lora.weights == TensorData((3, 4), "float16", WEIGHTS.tobytes())
    assert lora.config == TensorData((3, 3), "int32", ROWS.tobytes())
    np.testing.assert_array_equal(lora.weights.array(), WEIGHTS[0])


@pytest.mark.parametrize("task_id", [0, 1, 2**64 - 1])
def test_the_id_alone_is_enough(task_id: int) -> None:
    request = parse(config=TRTLLM, lora_task_id=uint64(task_id)).generate
    assert request.lora_config == LoraConfig(task_id=task_id)
    assert request.lora_task_id == task_id


def test_empty_arrays_are_as_good_as_none() -> None:
    none = np.zeros((1, 0, 0), dtype=np.float16)
    assert parse(config=TRTLLM, lora_weights=none).generate.lora_config is None
    assert parse(lora_weights=none).generate.lora_task_id is None
    request = parse(config=TRTLLM, lora_task_id=uint64(1), lora_weights=none).generate
    assert request.lora_config == LoraConfig(task_id=1)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "weights without id": ({"lora_task_id": None}, "lora_weights: needs lora_task_id"),
    "config alone": ({"lora_task_id": None, "lora_weights": None},
                     "lora_config: needs lora_task_id"),
    "weights without config": ({"lora_config": None}, "lora_weights: needs lora_config"),
    "config without weights": ({"lora_weights": None}, "lora_config: needs lora_weights"),
    "id of another type": ({"lora_task_id": np.array([[9]], dtype=np.int32)},
                           "lora_task_id: must be UINT64"),
    "two ids": ({"lora_task_id": np.array([[1, 2]], dtype=np.uint64)},
                "lora_task_id: must be one value"),
    "weights of another type": ({"lora_weights": WEIGHTS.astype(np.float32)},
                                "lora_weights: must be FP16"),
    "weights in a row": ({"lora_weights": WEIGHTS.reshape(1, 12)},
                         r"lora_weights: must be of shape \[1, rows, columns\], got \[1, 12\]"),
    "weights of another number": ({"lora_weights": WEIGHTS[:, :2]},
                                  "lora_config: 3 rows for 2 rows of lora_weights"),
    "not finite": ({"lora_weights": np.full_like(WEIGHTS, np.inf)},
                   "lora_weights: must hold finite numbers"),
    "too large": ({"lora_weights": np.zeros((1, 3, MAX_WEIGHT_BYTES // 6 + 1), np.float16)},
                  f"lora_weights: {MAX_WEIGHT_BYTES + 6} bytes, at most {MAX_WEIGHT_BYTES}"),
    "config of another type": ({"lora_config": ROWS.astype(np.int64)},
                               "lora_config: must be INT32"),
    "four columns": ({"lora_config": np.zeros((1, 3, 4), np.int32)},
                     r"lora_config: must be of shape \[1, rows, 3\], got \[1, 3, 4\]"),
    "module below 0": ({"lora_config": changed(1, 0, -1)},
                       "lora_config: module id must be >= 0, got -1"),
    "layer below 0": ({"lora_config": changed(2, 1, -2)},
                      "lora_config: layer must be >= 0, got -2"),
    "size 0": ({"lora_config": changed(0, 2, 0)},
               "lora_config: adapter size must be >= 1, got 0"),
    "size over the limit": ({"lora_config": changed(0, 2, 17)},
                            "lora_config: adapter size 17; lora_cache_max_adapter_size is 16"),
    "two requests in one": ({"lora_weights": np.concatenate([WEIGHTS, WEIGHTS])},
                            "lora_weights: the batch size must be 1"),
}  # fmt: skip


@pytest.mark.parametrize(("inputs", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_wrong_is_one_clear_error(inputs: dict[str, Any], message: str) -> None:
    given = {k: v for k, v in {**GIVEN, **inputs}.items() if v is not None}
    with pytest.raises(InvalidRequestError, match=f"^{message}") as caught:
        parse(config=TRTLLM, **given)
    assert caught.value.field == message.partition(":")[0]


@pytest.mark.parametrize("engine", ["inflight", "scripted"])
@pytest.mark.parametrize("name", GIVEN)
def test_engines_without_lora_refuse_by_name(engine: str, name: str) -> None:
    config = dataclasses.replace(CONFIG, engine=engine)
    with pytest.raises(InvalidRequestError, match=f"^{name}: the {engine} engine has no LoRA"):
        parse(config=config, **{name: GIVEN[name]})
