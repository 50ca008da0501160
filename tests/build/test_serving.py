"""From a build to a model repository: parameters, several engines, shared GPUs, refusals."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from build_engines.build_plan import BuildRequest, make_plan
from build_engines.serving import (
    Source,
    find_source,
    parse_gpus,
    serving_models,
    share_of_gpu,
)
from tests.build.test_builder import Bench
from tokenflow.cli import main
from tokenflow.config import ServingConfig, parse_parameters
from tokenflow.errors import ConfigError
from triton_backend.repository import require_one_instance

_PARAMETER = re.compile(r'key: "(\w+)" value: \{ string_value: "([^"]*)" \}')


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A build for two GPUs."""
    bench = Bench(tmp_path_factory.mktemp("built"))
    done = bench.build("--tp", "2", "--host-gb", "2", "--max-batch-size", "64")
    assert done.returncode == 0, done.stderr
    return bench


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A build for one GPU."""
    bench = Bench(tmp_path_factory.mktemp("single"))
    assert bench.build().returncode == 0
    return bench


def render(*arguments: object) -> int:
    return main.main(["repo", "render", *map(str, arguments)])


def parameters(repository: Path, model: str = "ensemble") -> dict[str, str]:
    text = (repository / model / "config.pbtxt").read_text()
    assert f'name: "{model}"' in text
    assert "${" not in text
    return dict(_PARAMETER.findall(text))


def test_a_build_becomes_a_repository(bench: Bench, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    assert render("--engine-dir", bench.output, "--output", repository) == 0
    found = parameters(repository)
    assert found["engine"] == "trtllm"
    assert found["gpt_model_path"] == str(bench.output / "engine")
    assert found["tokenizer_dir"] == str(bench.output / "tokenizer")
    assert found["max_batch_size"] == "64"
    assert found["max_num_tokens"] == "8192"
    assert found["max_seq_len"] == "4096"
    assert found["tokens_per_block"] == "32"
    assert found["kv_cache_host_memory_bytes"] == str(2 * 10**9)
    assert found["kv_cache_free_gpu_mem_fraction"] == "0.9"
    assert found["max_tokens_in_paged_kv_cache"] == "0"
    assert parse_parameters(found).engine == "trtllm"
    assert "${" not in (repository / "ensemble" / "1" / "model.py").read_text()


def test_every_parameter_is_described_above_its_line(bench: Bench, tmp_path: Path) -> None:
    assert render("--engine-dir", bench.output, "--output", tmp_path / "repository") == 0
    lines = (tmp_path / "repository" / "ensemble" / "config.pbtxt").read_text().splitlines()
    described = 0
    for above, line in pairwise(lines):
        match = _PARAMETER.search(line)
        if match is not None:
            assert above.startswith(f"# {match.group(1)}: ")
            described += 1
    assert described == len(ServingConfig.__dataclass_fields__)


def test_the_engine_folder_and_the_manifest_name_the_same_build(
    bench: Bench, tmp_path: Path
) -> None:
    manifest = bench.output / "manifest.json"
    ways = (
        ("--engine-dir", bench.output),
        ("--engine-dir", bench.output / "engine"),
        ("--manifest", manifest),
    )
    texts = []
    for index, way in enumerate(ways):
        assert render(*way, "--output", tmp_path / str(index)) == 0
        texts.append((tmp_path / str(index) / "ensemble" / "config.pbtxt").read_text())
    assert len(set(texts)) == 1


def test_the_same_build_serves_with_the_embedded_engine(bench: Bench, tmp_path: Path) -> None:
    for engine in ("trtllm", "inflight"):
        arguments = ("--engine-dir", bench.output, "--output", tmp_path / engine)
        assert render(*arguments, "--engine", engine, "--set", "default_read_rate=5") == 0
    theirs, ours = parameters(tmp_path / "trtllm"), parameters(tmp_path / "inflight")
    changed = {name for name in theirs if theirs[name] != ours[name]}
    assert {"engine", "gpt_model_path"} <= changed
    assert changed <= {
        "engine", "gpt_model_path", "tokenizer_dir", "max_tokens_in_paged_kv_cache",
        "kv_cache_host_memory_bytes", "kv_cache_free_gpu_mem_fraction",
    }  # fmt: skip
    assert ours["gpt_model_path"] == str(bench.checkpoint)
    shim = Path("ensemble", "1", "model.py")
    assert (tmp_path / "trtllm" / shim).read_text() == (tmp_path / "inflight" / shim).read_text()


def test_the_embedded_engines_pool_holds_the_longest_sequence(tmp_path: Path) -> None:
    bench = Bench(tmp_path, max_position_embeddings=16384)
    assert bench.build("--max-seq-len", "10000").returncode == 0
    (model,) = serving_models(find_source(bench.output, None, None), "inflight", {})
    config = model.config
    num_blocks = config.max_tokens_in_paged_kv_cache // config.tokens_per_block
    assert config.max_seq_len == 10000
    assert num_blocks * config.tokens_per_block >= config.max_seq_len


def test_a_checkpoint_alone_serves_with_the_embedded_engine(bench: Bench, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    assert render("--checkpoint", bench.checkpoint, "--output", repository) == 0
    found = parameters(repository)
    assert (found["engine"], found["gpt_model_path"]) == ("inflight", str(bench.checkpoint))


def test_settings_win(bench: Bench, tmp_path: Path) -> None:
    arguments = ("--engine-dir", bench.output, "--output", tmp_path / "repository")
    assert render(*arguments, "--set", "max_batch_size=8", "--set", "read_rate=1") == 1
    assert render(*arguments, "--set", "max_batch_size=8") == 0
    assert parameters(tmp_path / "repository")["max_batch_size"] == "8"


def test_each_set_of_gpus_is_a_model(bench: Bench, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    assert render("--engine-dir", bench.output, "--output", repository, "--gpus", "0,1;2,3") == 0
    assert {path.name for path in repository.iterdir()} == {"ensemble_0", "ensemble_1"}
    first, second = (parameters(repository, f"ensemble_{i}") for i in (0, 1))
    assert (first["gpu_device_ids"], second["gpu_device_ids"]) == ("0,1", "2,3")
    assert first["max_tokens_in_paged_kv_cache"] == "0"
    assert {k: v for k, v in first.items() if k != "gpu_device_ids"} == {
        k: v for k, v in second.items() if k != "gpu_device_ids"
    }


def test_two_engines_share_a_gpu_only_by_a_plan(single: Bench, tmp_path: Path) -> None:
    arguments = ("--engine-dir", single.output, "--output", tmp_path / "repository")
    assert render(*arguments, "--gpus", "0;0") == 1
    assert not (tmp_path / "repository").exists()
    assert render(*arguments, "--gpus", "0;0;1", "--split") == 0
    shared = parameters(tmp_path / "repository", "ensemble_0")
    alone = parameters(tmp_path / "repository", "ensemble_2")
    assert shared == {**parameters(tmp_path / "repository", "ensemble_1")}
    assert alone["max_tokens_in_paged_kv_cache"] == "0"
    assert int(shared["max_tokens_in_paged_kv_cache"]) > 4096
    assert 0.4 < float(shared["kv_cache_free_gpu_mem_fraction"]) <= 1


REFUSED = {
    "no source": ([], "engine_dir: name --engine-dir, --manifest or --checkpoint"),
    "two sources": (["--engine-dir", "BUILT", "--manifest", "BUILT"], "manifest: is in engine_dir"),
    "no manifest": (["--engine-dir", "CHECKPOINT"], "engine_dir: no manifest.json in"),
    "engine from a checkpoint": (
        ["--checkpoint", "CHECKPOINT", "--engine", "trtllm"],
        "engine_dir: engine trtllm needs a build",
    ),
    "a checkpoint that is not served": (
        ["--engine-dir", "BUILT", "--checkpoint", "CHECKPOINT"],
        "checkpoint: is for the embedded engine",
    ),
    "unknown engine": (["--engine-dir", "BUILT", "--engine", "vllm"], "engine: must be one of"),
    "unknown parameter": (["--engine-dir", "BUILT", "--set", "x=1"], "x: unknown parameter"),
    "no value": (["--engine-dir", "BUILT", "--set", "x"], "set: wants NAME=VALUE, got 'x'"),
    "bad value": (
        ["--engine-dir", "BUILT", "--set", "max_batch_size=many"],
        "max_batch_size: must be a whole number",
    ),
    "given twice": (
        ["--engine-dir", "BUILT", "--set", "max_batch_size=1", "--set", "max_batch_size=2"],
        "max_batch_size: is given twice",
    ),
    "more than built": (
        ["--engine-dir", "BUILT", "--set", "max_seq_len=8192"],
        "max_seq_len: the engine was built for 4096, got 8192",
    ),
    "other blocks": (
        ["--engine-dir", "BUILT", "--set", "tokens_per_block=64"],
        "tokens_per_block: the engine was built with 32, got 64",
    ),
    "too few GPUs": (["--engine-dir", "BUILT", "--gpus", "0;1"], "gpus: the engine needs 2 GPUs"),
    "overlapping": (
        ["--engine-dir", "BUILT", "--gpus", "0,1;1,2"],
        "gpus: GPU 1 is in 2 sets; two engines on one GPU need --split",
    ),
    "a GPU twice": (["--engine-dir", "BUILT", "--gpus", "1,1"], "gpus: a set names each GPU once"),
    "no numbers": (["--engine-dir", "BUILT", "--gpus", "all"], "gpus: must look like 0;1"),
    "split of nothing": (["--engine-dir", "BUILT", "--split"], "split: needs --gpus"),
    "GPUs of the embedded engine": (
        ["--checkpoint", "CHECKPOINT", "--gpus", "0"],
        "gpus: only engine trtllm is told its GPUs",
    ),
    "too many shares": (
        ["--engine-dir", "BUILT", "--gpus", ";".join(["0,1"] * 60), "--split"],
        r"split: a part of 2.35 GB leaves room for 0 tokens",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused(
    name: str, bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, reason = REFUSED[name]
    places = {"BUILT": str(bench.output), "CHECKPOINT": str(bench.checkpoint)}
    given = [places.get(argument, argument) for argument in arguments]
    assert render(*given, "--output", tmp_path / "repository") == 1
    error = capsys.readouterr().err
    assert re.search(reason, error), error
    assert not (tmp_path / "repository").exists()


def test_a_build_that_is_not_whole_is_refused(single: Bench, tmp_path: Path) -> None:
    copy = tmp_path / "manifest.json"
    manifest = json.loads((single.output / "manifest.json").read_text())
    copy.write_text(json.dumps({**manifest, "state": "building"}))
    with pytest.raises(ConfigError, match="manifest: the build has not ended"):
        serving_models(find_source(None, copy, None), "trtllm", {})
    copy.write_text(json.dumps(manifest))  # the engine is elsewhere
    with pytest.raises(ConfigError, match=r"engine_dir: .*config.json is missing"):
        serving_models(find_source(None, copy, None), "trtllm", {})
    manifest["engine"]["files"]["rank0.engine"] = 1
    copy = single.output / "other.json"
    copy.write_text(json.dumps(manifest))
    with pytest.raises(ConfigError, match=r"rank0.engine has 2000 bytes, not 1"):
        serving_models(find_source(None, copy, None), "trtllm", {})
    copy.write_text("{}")
    with pytest.raises(ConfigError, match=r"manifest: .* has format None"):
        find_source(None, copy, None)
    copy.unlink()


def test_a_repository_of_other_models_is_left_alone(bench: Bench, tmp_path: Path) -> None:
    arguments = ("--engine-dir", bench.output, "--output", tmp_path)
    assert render(*arguments, "--gpus", "0,1;2,3") == 0
    assert render(*arguments) == 1, "ensemble_0 and ensemble_1 would be served beside it"
    assert render(*arguments, "--gpus", "4,5;6,7") == 0
    assert parameters(tmp_path, "ensemble_1")["gpu_device_ids"] == "6,7"


@given(
    num_engines=st.integers(2, 4),
    fraction=st.floats(0.1, 0.99),
    gpu_gb=st.integers(40, 300),
)
def test_shares_are_the_same_whatever_the_order_of_loading(
    num_engines: int, fraction: float, gpu_gb: int
) -> None:
    """TensorRT-LLM takes the smaller of what the fraction of free memory gives and the tokens."""
    request = BuildRequest(
        model="llama-3-8b",
        gpu="4090",
        gpu_bytes=gpu_gb * 10**9,
        free_fraction=fraction,
        max_seq_len=128,
        context_tokens=128,
        max_num_tokens=128,
    )
    try:
        plan = make_plan(request)
        parts = share_of_gpu(plan.to_record(), num_engines)
    except ConfigError:
        return
    budget = plan.budget
    wanted = int(parts["max_tokens_in_paged_kv_cache"]) * budget.kv_bytes_per_token
    share = float(parts["kv_cache_free_gpu_mem_fraction"])
    assert 0 < share <= 0.99
    free = budget.gpu_bytes
    for _ in range(num_engines):
        free -= budget.fixed_bytes
        assert share * free >= wanted, "the last one gets as much as the first"
        free -= wanted
    assert free >= 0


@pytest.mark.parametrize("command", ["build", "repo", "repo render"])
def test_the_commands_explain_themselves(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main.main([*command.split(), "--help"])
    assert stopped.value.code == 0
    assert "usage: tokenflow" in capsys.readouterr().out


def test_sets_of_gpus_are_read() -> None:
    assert parse_gpus("0") == ((0,),)
    assert parse_gpus("0;1") == ((0,), (1,))
    assert parse_gpus("0,1;2,3") == ((0, 1), (2, 3))


def test_a_source_is_a_build_or_a_checkpoint(bench: Bench) -> None:
    assert find_source(None, None, bench.checkpoint) == Source(checkpoint=bench.checkpoint)
    assert find_source(bench.output, None, None).folder == bench.output


@pytest.mark.parametrize(
    ("groups", "count"),
    [
        ([{"count": 2, "kind": "KIND_CPU"}], 2),
        ([{"count": 1, "kind": "KIND_GPU", "gpus": [0, 1]}], 2),
        ([{"count": 1}, {"count": 1}], 2),
        ([{"count": 2, "gpus": [0, 1]}], 4),
    ],
)
def test_a_second_instance_of_an_engine_is_refused(groups: list, count: int) -> None:
    with pytest.raises(ConfigError, match=f"instance_group: asks for {count} instances, must be 1"):
        require_one_instance({"instance_group": groups})


@pytest.mark.parametrize("groups", [[], [{"count": 1, "kind": "KIND_CPU", "gpus": []}], [{}]])
def test_one_instance_is_fine(groups: list) -> None:
    require_one_instance({"instance_group": groups})
    require_one_instance({})
