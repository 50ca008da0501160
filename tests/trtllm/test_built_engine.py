"""What an engine folder says, and the folders that are refused before anything is loaded."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.trtllm.conftest import LIMITS, Starter
from tests.trtllm_double.folder import KV_BYTES_PER_TOKEN, Behind, write_engine
from tokenflow.config import ServingConfig, parse_parameters
from tokenflow.errors import ConfigError
from tokenflow.executor.trtllm_engine import read_built_engine


def test_what_a_folder_says(tmp_path: Path) -> None:
    folder = write_engine(tmp_path / "e", Behind(vocab_size=321), **LIMITS)
    built = read_built_engine(str(folder))
    assert (built.vocab_size, built.world_size, built.version) == (321, 1, "1.2.1")
    assert built.kv_bytes_per_token == KV_BYTES_PER_TOKEN
    assert built.block_bytes == 8 * KV_BYTES_PER_TOKEN
    assert {name: getattr(built, name) for name in LIMITS} == LIMITS


@pytest.mark.parametrize(
    ("shape", "tp_size", "pp_size", "num_bytes"),
    [
        # Llama-3-8B: 131,072 bytes a token in bfloat16; Qwen2.5-7B: 57,344.
        ({"num_hidden_layers": 32, "num_key_value_heads": 8, "head_size": 128}, 1, 1, 131_072),
        ({"num_hidden_layers": 28, "num_key_value_heads": 4, "head_size": 128}, 1, 1, 57_344),
        ({"num_hidden_layers": 32, "num_key_value_heads": 8, "head_size": 128}, 4, 1, 32_768),
        ({"num_hidden_layers": 28, "num_key_value_heads": 4, "head_size": 128}, 8, 1, 14_336),
        ({"num_hidden_layers": 32, "num_key_value_heads": 8, "head_size": 128}, 1, 4, 32_768),
        (
            {
                "num_hidden_layers": 32,
                "num_key_value_heads": 8,
                "head_size": None,
                "hidden_size": 4096,
                "num_attention_heads": 32,
                "quantization": {"kv_cache_quant_algo": "FP8"},
            },
            1,
            1,
            65_536,
        ),
    ],
)
def test_kv_bytes_of_one_rank(
    tmp_path: Path, shape: dict[str, Any], tp_size: int, pp_size: int, num_bytes: int
) -> None:
    folder = write_engine(
        tmp_path / "e", Behind(), tp_size=tp_size, pp_size=pp_size, pretrained=_keep_mapping(
            shape, tp_size, pp_size)
    )  # fmt: skip
    assert read_built_engine(str(folder)).kv_bytes_per_token == num_bytes


def _keep_mapping(shape: dict[str, Any], tp_size: int, pp_size: int) -> dict[str, Any]:
    mapping = {"world_size": tp_size * pp_size, "tp_size": tp_size, "pp_size": pp_size}
    return {**shape, "mapping": mapping}


UNFIT = {
    "not paged": ({"build": {"kv_cache_type": "CONTINUOUS"}}, "kv_cache_type continuous"),
    "no cache": ({"build": {"kv_cache_type": "KVCacheType.DISABLED"}}, "kv_cache_type disabled"),
    "paged_kv_cache off": ({"plugins": {"paged_kv_cache": False}}, "--kv_cache_type paged"),
    "no paged context": (
        {"plugins": {"use_paged_context_fmha": False}},
        "--use_paged_context_fmha enable",
    ),
    "no context fmha": ({"plugins": {"context_fmha": False}}, "use_paged_context_fmha off"),
    "padded": ({"plugins": {"remove_input_padding": False}}, "remove_input_padding off"),
    "context logits": ({"build": {"gather_context_logits": True}}, "gather_context_logits on"),
    "beams": ({"build": {"max_beam_width": 4}}, "max_beam_width 4"),
    "medusa": ({"build": {"speculative_decoding_mode": 4}}, "speculative_decoding_mode 4"),
    "no vocabulary": ({"pretrained": {"vocab_size": 0}}, "vocab_size is 0"),
    "unknown dtype": ({"pretrained": {"dtype": "int3"}}, "int3"),
}


@pytest.mark.parametrize(("changes", "words"), UNFIT.values(), ids=UNFIT)
def test_engines_that_cannot_keep_what_is_paused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    folder = write_engine(tmp_path / "e", Behind(), **changes)
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        read_built_engine(str(folder))
    assert caught.value.key == "gpt_model_path"


def _without(name: str) -> Callable[[Path], None]:
    def remove(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        del config["build_config"]["plugin_config"][name]
        (folder / "config.json").write_text(json.dumps(config))

    return remove


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "no built engine there"),
    "no JSON": (lambda f: (f / "config.json").write_text("{"), "no JSON"),
    "a checkpoint": (lambda f: (f / "config.json").write_text('{"a": 1}'), "it is a checkpoint"),
    "a missing rank": (lambda f: (f / "rank1.engine").unlink(), "lacks rank1.engine"),
    "no tokens_per_block": (_without("tokens_per_block"), "tokens_per_block"),
    "no word of FMHA": (_without("use_paged_context_fmha"), "use_paged_context_fmha"),
}


@pytest.mark.parametrize(("damage", "words"), BROKEN.values(), ids=BROKEN)
def test_folders_that_are_no_engines(
    tmp_path: Path, damage: Callable[[Path], object], words: str
) -> None:
    folder = write_engine(tmp_path / "e", Behind(), tp_size=2)
    damage(folder)
    with pytest.raises(ConfigError, match=words):
        read_built_engine(str(folder))
    with pytest.raises(ConfigError, match="needs the folder"):
        read_built_engine("")


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("max_batch_size", 5, 4),
        ("max_num_tokens", 65, 64),
        ("max_seq_len", 257, 256),
        ("tokens_per_block", 16, 8),
        ("tokens_per_block", 4, 8),
    ],
)
def test_more_than_it_was_built_for_is_refused_before_it_is_loaded(
    start: Starter, name: str, value: int, limit: int
) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: the engine was built .* {limit}, got {value}"):
        start.executor(**{name: value})
    assert start.executors == []


def test_kv_tiering_is_refused(start: Starter) -> None:
    with pytest.raises(ConfigError, match=r"^kv_tiering: the trtllm engine has no call"):
        start.executor(kv_tiering=True, kv_cache_host_memory_bytes=1 << 20)


def test_limits_that_are_left_out_are_the_engines(tmp_path: Path) -> None:
    folder = write_engine(tmp_path / "e", Behind(), **LIMITS)
    given = {"engine": "trtllm", "gpt_model_path": str(folder), "max_batch_size": "2"}
    config = parse_parameters(given)
    assert {n: getattr(config, n) for n in LIMITS} == {**LIMITS, "max_batch_size": 2}
    assert config.max_tokens_in_paged_kv_cache == 0
    assert config.kv_cache_free_gpu_mem_fraction == 0.9
    with pytest.raises(ConfigError, match="gpt_model_path"):
        parse_parameters({"engine": "trtllm"})
    whole = {name: str(value) for name, value in LIMITS.items()}
    elsewhere = parse_parameters({"engine": "trtllm", "gpt_model_path": "/not/here", **whole})
    assert elsewhere.max_seq_len == 256, "a complete configuration needs no folder"


def test_a_pool_of_no_size_is_for_trtllm_only() -> None:
    with pytest.raises(ConfigError, match="max_tokens_in_paged_kv_cache: holds no block"):
        ServingConfig(max_tokens_in_paged_kv_cache=0)
    with pytest.raises(ConfigError, match="holds no block"):
        ServingConfig(engine="trtllm", max_tokens_in_paged_kv_cache=7)
