"""Checkpoints: tiny ones of both families are accepted, broken ones refused with the reason."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from build_engines.build_plan import BuildRequest, make_plan
from build_engines.checkpoint import read_checkpoint
from build_engines.recipes import FROM_CHECKPOINT
from build_engines.tiny import make_tiny_model
from tests.build.checkpoints import (
    CONFIG,
    QWEN2,
    change_header,
    change_json,
    tensors_of,
    write_checkpoint,
    write_json,
    write_safetensors,
)
from tokenflow.errors import ConfigError

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


def config(**changes: object) -> Callable[[Path], object]:
    return lambda folder: change_json(folder / "config.json", lambda value: value.update(changes))


def without(key: str) -> Callable[[Path], object]:
    return lambda folder: change_json(folder / "config.json", lambda value: value.pop(key))


def header(change: Callable[[dict], object]) -> Callable[[Path], object]:
    return lambda folder: change_header(folder / FIRST, change)


def cut(folder: Path) -> None:
    path = folder / SECOND
    path.write_bytes(path.read_bytes()[:-10])


def longer(folder: Path) -> None:
    with (folder / SECOND).open("ab") as file:
        file.write(b"more")


def single(folder: Path, **changes: object) -> None:
    """One file instead of shards, with tensors renamed, dropped or of another type."""
    for name in (FIRST, SECOND, INDEX):
        (folder / name).unlink()
    shapes = tensors_of(CONFIG)
    write_safetensors(
        folder / "model.safetensors", changes.get("shapes", shapes), **changes.get("how", {})
    )


def with_extra(folder: Path) -> None:
    single(folder, shapes={**tensors_of(CONFIG), "model.layers.0.self_attn.q_norm.weight": (16,)})


def with_misfit(folder: Path) -> None:
    single(folder, shapes={**tensors_of(CONFIG), "lm_head.weight": (95, 64)})


def short_of_one(folder: Path) -> None:
    shapes = tensors_of(CONFIG)
    del shapes["model.layers.1.mlp.up_proj.weight"]
    single(folder, shapes=shapes)


def twice(folder: Path) -> None:
    write_safetensors(folder / SECOND, tensors_of(CONFIG))


def pytorch_only(folder: Path) -> None:
    for name in (FIRST, SECOND, INDEX):
        (folder / name).unlink()
    (folder / "pytorch_model.bin").touch()


def text(name: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(content)


def gone(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def in_index(change: Callable[[dict], object]) -> Callable[[Path], object]:
    return lambda folder: change_json(folder / INDEX, change)


def tokenizer(vocabulary: object, **fields: object) -> Callable[[Path], object]:
    value = {"model": {"vocab": vocabulary}, **fields}
    return lambda folder: write_json(folder / "tokenizer.json", value)


def pipe(folder: Path) -> None:
    """Reading it would wait for ever."""
    (folder / FIRST).unlink()
    os.mkfifo(folder / FIRST)


def write_raw_header(path: Path, raw: bytes) -> None:
    path.write_bytes(len(raw).to_bytes(8, "little") + raw)


DEEP = '{"a":' + "[" * 100_000
EMBED = "model.embed_tokens.weight"
BROKEN = {
    "no config": (gone("config.json"), "checkpoint: .*config.json does not exist"),
    "config cut off": (text("config.json", '{"architectures": ['), "checkpoint: .* is not JSON"),
    "config a list": (text("config.json", "[]"), "must hold a JSON object, not list"),
    "config an LFS pointer": (text("config.json", POINTER), "is a Git LFS pointer"),
    "no architecture": (without("architectures"), "architectures: config.json must name one of"),
    "other architecture": (
        config(architectures=["MixtralForCausalLM"]),
        "architectures: must be one of LlamaForCausalLM, Qwen2ForCausalLM, got 'Mixtral",
    ),
    "type of another family": (config(model_type="qwen3"), "model_type: .* got 'qwen3'"),
    "no layers": (without("num_hidden_layers"), r"num_hidden_layers: must be a whole number"),
    "layers as text": (config(num_hidden_layers="2"), r"num_hidden_layers: .*got '2'"),
    "heads that do not divide": (config(hidden_size=66), "hidden_size: 66 is not divisible by 4"),
    "KV heads that do not divide": (config(num_key_value_heads=3), "num_key_value_heads: 4 query"),
    "more KV heads than heads": (config(num_key_value_heads=8), r"must be in \[1, 4\], got 8"),
    "quantized already": (
        config(quantization_config={"quant_method": "awq"}),
        r"quantization_config: the checkpoint is quantized already \(awq\)",
    ),
    "sliding window": (config(use_sliding_window=True), "use_sliding_window: must be false"),
    "attention with biases": (config(attention_bias=True), "attention_bias: must be false"),
    "odd activation": (config(hidden_act="gelu"), "hidden_act: must be 'silu', got 'gelu'"),
    "odd positions": (
        config(rope_scaling={"rope_type": "yarn", "factor": 4}),
        "rope_scaling: type must be one of default, llama3, linear, got 'yarn'",
    ),
    "base of the positions where converters do not look": (
        config(rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
        'rope_theta: stands in rope_parameters alone, .* write "rope_theta": 500000.0 among',
    ),
    "scaling where converters do not look": (
        config(
            rope_theta=5e5,
            rope_parameters={"rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5},
        ),
        'rope_scaling: stands .* write "rope_scaling": {"rope_type": "llama3", "factor": 8.0} amo',
    ),
    "scaling without a factor": (config(rope_scaling={"type": "linear"}), "factor must be in"),
    "scaling as a list": (config(rope_scaling=[]), r"rope_scaling: must be an object, got \[\]"),
    "tied as text": (
        config(tie_word_embeddings="false"),
        "tie_word_embeddings: must be true or false, got 'false'",
    ),
    "config too deep": (text("config.json", DEEP), "config.json is not JSON: maximum recursion"),
    "hidden size not a number": (config(hidden_size=float("nan")), "hidden_size: .* got nan"),
    "tokenizer with odd ids": (
        tokenizer({"a": "1"}),
        "tokenizer.json: has the id '1'",
    ),
    "tokenizer with odd added tokens": (
        tokenizer({"a": 1}, added_tokens=[{"id": "5"}]),
        "tokenizer.json: has the id '5'",
    ),
    "tokenizer with malformed added tokens": (
        tokenizer({"a": 1}, added_tokens=7),
        "tokenizer.json: added_tokens is malformed",
    ),
    "tokenizer with too many pieces": (
        tokenizer([["a", 0.0]] * 97),
        "vocab_size: config.json says 96, but tokenizer.json has the id 96",
    ),
    "no tokenizer": (gone("tokenizer.json"), "tokenizer.json: .* does not exist"),
    "tokenizer without a model": (text("tokenizer.json", "{}"), "tokenizer.json: has no model"),
    "tokenizer of another model": (
        lambda folder: write_json(folder / "tokenizer.json", {"model": {"vocab": {"a": 96}}}),
        "vocab_size: config.json says 96, but tokenizer.json has the id 96",
    ),
    "no weights": (
        pytorch_only,
        r"weights: .*pytorch_model.bin must be saved as",
    ),
    "index not JSON": (text(INDEX, "nonsense"), f"weights: {INDEX} cannot be used"),
    "index empty": (text(INDEX, '{"weight_map": {}}'), "weight_map must be an object"),
    "index leaves the folder": (
        in_index(lambda index: index["weight_map"].update({EMBED: "../x.safetensors"})),
        "which is not a file of the folder",
    ),
    "index names its parent": (
        in_index(lambda index: index["weight_map"].update({EMBED: ".."})),
        "names '..', which is not a file of the folder",
    ),
    "index with an endless name": (
        in_index(lambda index: index["weight_map"].update({EMBED: "a" * 5000})),
        "which is not a file of the folder",
    ),
    "index too deep": (text(INDEX, DEEP), f"weights: {INDEX} cannot be used: RecursionError"),
    "shard a pipe": (pipe, f"weights: {FIRST} is missing"),
    "header too deep": (
        lambda folder: write_raw_header(folder / FIRST, DEEP.encode()),
        f"{FIRST}: the header is no JSON object",
    ),
    "offset without end": (
        header(lambda value: value[EMBED].update(data_offsets=[0, float("inf")])),
        f"the entry of {EMBED} is malformed",
    ),
    "offsets as text": (
        header(lambda value: value[EMBED].update(data_offsets=["0", "12288"])),
        f"the entry of {EMBED} is malformed",
    ),
    "negative sizes": (
        header(lambda value: value[EMBED].update(shape=[-96, -64])),
        f"the entry of {EMBED} is malformed",
    ),
    "header longer than the file": (
        lambda folder: (folder / FIRST).write_bytes((2**63).to_bytes(8, "little") + b"{}"),
        f"{FIRST} has 10 bytes and a header of 9223372036854775808",
    ),
    "shard missing": (gone(SECOND), rf"weights: {SECOND} is missing; .* \(2 files\)"),
    "shard an LFS pointer": (text(FIRST, POINTER), f"{FIRST} is a Git LFS pointer"),
    "shard cut off": (cut, f"weights: {SECOND} has .* bytes of data, its header names"),
    "shard still written": (longer, f"weights: {SECOND} has .* still being written"),
    "shard empty": (text(FIRST, ""), f"weights: {FIRST} has 0 bytes"),
    "shard no safetensors": (
        text(FIRST, "x" * 100),
        f"{FIRST} has 100 bytes and a header",
    ),
    "index names the wrong shard": (
        in_index(lambda index: index["weight_map"].update({EMBED: SECOND})),
        f"says {EMBED} is in {SECOND}; it is not",
    ),
    "tensor in two shards": (twice, f"is in {FIRST} and in {SECOND}"),
    "entry malformed": (
        header(lambda value: value[EMBED].pop("shape")),
        f"the entry of {EMBED} is malformed",
    ),
    "shape and bytes differ": (
        header(lambda value: value[EMBED].update(shape=[1, 1])),
        f"{EMBED} has 12288 bytes, not those of its shape",
    ),
    "tensors overlap": (
        header(lambda value: value["model.norm.weight"].update(data_offsets=[0, 128])),
        "tensors overlap or leave a gap",
    ),
    "weights in FP8": (
        lambda folder: single(folder, how={"dtype": "F8_E4M3"}),
        "weights: .* is F8_E4M3; must be one of BF16, F16, F32",
    ),
    "tensor missing": (short_of_one, "weights: model.layers.1.mlp.up_proj.weight is missing"),
    "tensor of another shape": (
        with_misfit,
        r"lm_head.weight has shape \[95, 64\], not",
    ),
    "tensor of another architecture": (with_extra, "q_norm.weight is not a tensor of this"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_checkpoint_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    breaks, reason = BROKEN[name]
    folder = write_checkpoint(tmp_path / "checkpoint")
    read_checkpoint(folder)
    breaks(folder)
    with pytest.raises(ConfigError, match=reason):
        read_checkpoint(folder)


def test_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint: .* is not a folder"):
        read_checkpoint(tmp_path / "nothing")


@pytest.mark.parametrize("changes", [{}, QWEN2], ids=["llama", "qwen2"])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_tiny_checkpoint_is_accepted_and_planned(
    changes: dict, num_shards: int, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path / "tiny", num_shards=num_shards, **changes)
    checkpoint = read_checkpoint(folder)
    assert checkpoint.shape.num_params * 2 == sum(
        file.size_bytes - _header_bytes(file.path) for file in checkpoint.weights.files
    )
    request = BuildRequest(model=FROM_CHECKPOINT, gpu="h200", tp=2, checkpoint=folder)
    plan = make_plan(request, checkpoint)
    assert plan.limits.max_seq_len == CONFIG["max_position_embeddings"]
    assert str(folder) in plan.steps[0].argv
    assert checkpoint.family.converter in plan.steps[0].argv[1]


def test_a_field_that_is_null_counts_as_left_out(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "null", num_key_value_heads=4)
    change_json(
        folder / "config.json",
        lambda value: value.update(num_key_value_heads=None, tie_word_embeddings=None),
    )
    shape = read_checkpoint(folder).shape
    assert (shape.num_kv_heads, shape.tied_embeddings) == (4, False)


def test_a_checkpoint_of_links_is_followed(tmp_path: Path) -> None:
    """As a download's cache lays it out: names that lead to files elsewhere."""
    folder = write_checkpoint(tmp_path / "snapshot")
    (tmp_path / "blobs").mkdir()
    for index, path in enumerate(sorted(folder.iterdir())):
        path.rename(tmp_path / "blobs" / str(index))
        path.symlink_to(tmp_path / "blobs" / str(index))
    (tmp_path / "a link").symlink_to(folder)
    assert read_checkpoint(tmp_path / "a link").shape.num_layers == 2
    (folder / FIRST).resolve().unlink()
    with pytest.raises(ConfigError, match=rf"weights: {FIRST} is missing"):
        read_checkpoint(folder)


@pytest.mark.torch
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_what_transformers_saves_is_accepted(family: str, tmp_path: Path) -> None:
    checkpoint = read_checkpoint(make_tiny_model(tmp_path / family, family))
    assert checkpoint.family.name == family
    assert checkpoint.shape.tied_embeddings == (family == "llama")
    assert checkpoint.max_position_embeddings == 4096


def test_a_tied_head_may_be_stored_or_not(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tied", tie_word_embeddings=True)
    assert read_checkpoint(folder).shape.tied_embeddings
    single(folder, shapes={k: v for k, v in tensors_of(CONFIG).items() if k != "lm_head.weight"})
    assert read_checkpoint(folder).shape.tied_embeddings


def test_positions_reach_as_far_as_their_scaling_says(tmp_path: Path) -> None:
    def reach(name: str, **changes: object) -> int:
        return read_checkpoint(write_checkpoint(tmp_path / name, **changes)).max_position_embeddings

    assert reach("plain") == 4096
    assert reach("linear", rope_scaling={"rope_type": "linear", "factor": 2.0}) == 8192
    assert reach("llama3", rope_scaling={"rope_type": "llama3", "factor": 8.0}) == 4096
    assert reach("newer", rope_parameters={"rope_type": "default"}, rope_scaling=None) == 4096
    both = {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    assert reach("both", **both) == 4096


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tp": 4}, "tp: num_key_value_heads 2 is not divisible by 4"),
        ({"max_seq_len": 8192}, "max_seq_len: 8192 is more than the 4096 that the positions reach"),
        ({"model": "llama-3-8b"}, "num_layers: llama-3-8b has 32, the checkpoint 2"),
        ({"model": "qwen2.5-7b"}, "architectures: qwen2.5-7b is a Qwen2ForCausalLM"),
    ],
)
def test_a_plan_that_the_checkpoint_cannot_fill_is_refused(
    changes: dict, reason: str, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path / "tiny")
    request = {"model": FROM_CHECKPOINT, "gpu": "h200", "checkpoint": folder, **changes}
    with pytest.raises(ConfigError, match=reason):
        make_plan(BuildRequest(**request), read_checkpoint(folder))


def _header_bytes(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")
