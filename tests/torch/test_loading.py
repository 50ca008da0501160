"""What the torch runner loads, and what it refuses, by name."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from build_engines.tiny import make_tiny_model
from tests.torch.driving import Blocks, Sequence, request
from tokenflow.errors import CapacityError, ConfigError, EngineError
from tokenflow.inflight.runner import SequenceChunk
from tokenflow.inflight.torch_linear import PackedLinear, PlainLinear, make_linear
from tokenflow.inflight.torch_loading import load_decoder
from tokenflow.inflight.torch_runner import TorchRunner, set_threads

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_tiny_models_are_the_same_bytes_every_time(
    tiny_model: Callable[[str], Path], family: str, tmp_path: Path
) -> None:
    again = make_tiny_model(tmp_path / "again", cast(Literal["llama"], family))
    other = make_tiny_model(tmp_path / "other", cast(Literal["llama"], family), seed=1)
    for path in tiny_model(family).iterdir():
        assert path.read_bytes() == (again / path.name).read_bytes()
    weights = "model.safetensors"
    assert (other / weights).read_bytes() != (again / weights).read_bytes()
    tokenizer = Tokenizer.from_file(str(again / "tokenizer.json"))
    text = "naïve 👩‍👩‍👧 \n\t x\u0000 中文 reads"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_an_unknown_family_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="family"):
        make_tiny_model(tmp_path, cast(Literal["llama"], "gpt"))


def test_loading_reports_progress_and_the_shape(tiny_model: Callable[[str], Path]) -> None:
    fractions: list[float] = []
    runner = TorchRunner(
        tiny_model("qwen2"), dtype="float32", num_threads=1, progress=fractions.append
    )
    assert runner.vocab_size == 384
    assert runner.max_position_embeddings == 4096
    assert fractions == sorted(fractions)
    assert (fractions[0], fractions[-1]) == (0.0, 1.0)
    assert len(fractions) > 10


def test_a_checkpoint_in_shards_gives_the_same_logits(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    whole = tiny_model("qwen2")
    sharded = Path(shutil.copytree(whole, tmp_path / "sharded"))
    tensors = load_file(sharded / "model.safetensors")
    (sharded / "model.safetensors").unlink()
    names = sorted(tensors)
    for i, part in enumerate((names[:9], names[9:])):
        path = sharded / f"model-{i + 1:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, path)
    rows = []
    for path in (whole, sharded):
        runner = TorchRunner(path, dtype="float32", num_threads=1)
        rows.append(runner.logits([Sequence(0, [5, 6, 7], Blocks(runner, 2, 8)).chunk(3)]))
    assert torch.equal(*rows)


def _changed(source: Path, target: Path, **changes: object) -> Path:
    folder = Path(shutil.copytree(source, target))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"model_type": "gpt2"}, "model type 'gpt2' is not supported.*llama, qwen2"),
        ("llama", {"vocab_size": 400}, r"embed_tokens.weight is \[384, 64\].*\[400, 64\]"),
        ("llama", {"num_hidden_layers": 3}, "lacks 9 tensors, first layers.2"),
        ("llama", {"num_hidden_layers": 1}, "unexpected tensor model.layers.1"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantised"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope type 'dynamic'",
        ),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 8, "layer_types": None},
            "sliding-window",
        ),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
    family: str,
    changes: dict[str, object],
    message: str,
) -> None:
    if "use_sliding_window" in changes:
        changes = {**changes, "max_window_layers": 0}
    folder = _changed(tiny_model(family), tmp_path / "model", **changes)
    with pytest.raises(ConfigError, match=message):
        TorchRunner(folder, num_threads=1)


def test_damaged_folders_are_refused(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gpt_model_path.*no config.json"):
        TorchRunner(tmp_path)
    folder = Path(shutil.copytree(tiny_model("qwen2"), tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"lacks lm_head.weight"):
        TorchRunner(folder)
    (folder / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ConfigError, match=r"model.safetensors is damaged"):
        TorchRunner(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="holds no"):
        TorchRunner(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not readable"):
        TorchRunner(folder)


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({"dtype": "float16"}, "dtype"),
        ({"device": "tpu9"}, "device"),
        ({"device": "meta"}, "device"),
    ],
)
def test_bad_arguments_are_refused(
    tiny_model: Callable[[str], Path], arguments: dict[str, str], key: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        TorchRunner(tiny_model("llama"), **arguments)
    assert caught.value.key == key


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_refused(tiny_model: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="no CUDA device"):
        TorchRunner(tiny_model("llama"), device="cuda")


def test_a_pool_that_memory_cannot_hold_is_a_capacity_error(
    tiny_model: Callable[[str], Path],
) -> None:
    runner = TorchRunner(tiny_model("llama"), num_threads=1)
    with pytest.raises(CapacityError, match="max_tokens_in_paged_kv_cache: no memory"):
        runner.allocate_kv(1 << 40, 32, 0)


def test_logits_that_are_not_finite_fail_the_step(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    runner = TorchRunner(folder, num_threads=1)
    blocks = Blocks(runner, 2, 8)
    runner.add_request(0, request())
    with pytest.raises(EngineError, match="not finite"):
        runner.forward([Sequence(0, [5, 6, 7], blocks).chunk(3)])


def test_a_step_that_is_not_finite_spoils_no_block_for_the_next_one(
    tiny_model: Callable[[str], Path],
) -> None:
    dtype, device = torch.float32, torch.device("cpu")
    decoder = load_decoder(
        tiny_model("qwen2"), device=device, dtype=dtype, progress=lambda fraction: None
    )
    with torch.inference_mode():
        cast(torch.Tensor, decoder.model.embed_tokens.weight)[7] = math.inf
    runner = TorchRunner(decoder, dtype="float32", num_threads=1)
    runner.allocate_kv(1, 8, 0)
    later = SequenceChunk(1, [5, 6, 8], 0, [0], True, 0)
    expected = runner.logits([later])
    for samples in (True, False):
        with pytest.raises(EngineError, match="not finite"):
            runner.forward([SequenceChunk(0, [5, 5, 5, 5, 7], 0, [0], samples, 0)])
        assert torch.equal(runner.logits([later]), expected)


@pytest.fixture
def _same_threads_afterwards() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.usefixtures("_same_threads_afterwards")
def test_spinning_threads_are_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        set_threads(1, {"OMP_WAIT_POLICY": "passive"})
        assert not caplog.text
        set_threads(1, {"OMP_WAIT_POLICY": "active"})
    assert "OMP_WAIT_POLICY" in caplog.text


@pytest.mark.usefixtures("_same_threads_afterwards")
def test_threads_follow_the_cores_that_this_process_may_use() -> None:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        set_threads(0, {"OMP_WAIT_POLICY": "PASSIVE"})
        assert torch.get_num_threads() == 1
    finally:
        os.sched_setaffinity(0, allowed)
    set_threads(0, {"OMP_WAIT_POLICY": "PASSIVE"})
    assert torch.get_num_threads() == len(allowed)
    set_threads(3, {"OMP_WAIT_POLICY": "PASSIVE"})
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_linear_layers_agree_and_rows_do_not_depend_on_each_other(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 1536, generator=generator).to(dtype)
    bias = torch.randn(48, generator=generator).to(dtype)
    x = torch.randn(1, 9, 1536, generator=generator).to(dtype)
    with torch.inference_mode():
        chosen, plain = make_linear(weight, bias), PlainLinear(weight, bias)
        y = chosen(x)
        tolerance = 1000 * torch.finfo(dtype).eps
        assert torch.allclose(y.double(), plain(x).double(), atol=tolerance)
        for row in range(9):
            alone = chosen(x[:, row : row + 1])
            assert alone.shape == (1, 1, 48)
            if isinstance(chosen, PackedLinear):
                assert torch.equal(alone[0, 0], y[0, row])
