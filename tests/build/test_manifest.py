"""A manifest that was edited by hand: used as it is, or refused with the field that is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from build_engines.manifest import read_manifest
from build_engines.serving import find_source, parse_gpus, serving_models
from tests.build.test_builder import Bench
from tokenflow.errors import ConfigError


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    bench = Bench(tmp_path_factory.mktemp("built"))
    assert bench.build().returncode == 0
    return bench


def put(path: str, value: object) -> Callable[[Any], None]:
    def change(manifest: Any) -> None:
        *parts, last = path.split(".")
        for part in parts:
            manifest = manifest[part]
        manifest[last] = value

    return change


BROKEN = {
    "tp_size": (put("tp_size", "1"), "tp_size cannot be '1'"),
    "limit": (put("limits.max_seq_len", "many"), "limits.max_seq_len cannot be 'many'"),
    "limit left out": (
        lambda manifest: manifest["limits"].pop("max_num_tokens"),
        "limits.max_num_tokens cannot be None",
    ),
    "limits": (put("limits", []), "limits.max_batch_size cannot be None"),
    "no blocks": (put("memory.block_bytes", 0), "memory.block_bytes cannot be 0"),
    "no number": (put("memory.gpu_bytes", float("nan")), "memory.gpu_bytes cannot be nan"),
    "fraction": (put("memory.free_fraction", True), "memory.free_fraction cannot be True"),
    "host": (put("memory.host_bytes", -1), "memory.host_bytes cannot be -1"),
    "checkpoint": (put("checkpoint.path", 3), "checkpoint.path cannot be 3"),
    "steps": (put("steps", []), r"steps cannot be \[\]"),
    "engine": (put("engine", []), r"engine cannot be \[\]"),
    "engine's files": (put("engine.files", [1]), "engine cannot be"),
    "engine without files": (put("engine.files", {}), "engine cannot be"),
    "engine's folder": (put("engine.folder", 5), "engine cannot be"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_field_that_cannot_be_is_named(name: str, bench: Bench) -> None:
    change, reason = BROKEN[name]
    manifest = read_manifest(bench.output)
    change(manifest)
    edited = bench.output / "edited.json"
    edited.write_text(json.dumps(manifest))
    try:
        with pytest.raises(ConfigError, match=f"manifest: .*{reason}"):
            serving_models(find_source(None, edited, None), "trtllm", {})
    finally:
        edited.unlink()


def test_an_entry_of_a_step_that_cannot_be_is_built_again(bench: Bench) -> None:
    path = bench.output / "manifest.json"
    path.write_text(json.dumps({**read_manifest(bench.output), "steps": {"build": 5}}))
    assert bench.calls() == ["convert", "trtllm_build"]


def test_a_build_is_found_by_its_folders_and_nothing_near_them(bench: Bench) -> None:
    whole = find_source(bench.output, None, None)
    assert find_source(bench.output / "engine", None, None) == whole
    assert find_source(None, bench.output, None) == whole
    for name in ("engnie", "logs"):
        with pytest.raises(ConfigError, match=rf"engine_dir: no manifest.json in .*{name}"):
            find_source(bench.output / name, None, None)


OVERRIDES = {
    "engine": ({"engine": "inflight"}, "", "engine: is what --engine says"),
    "GPU of all": ({"gpu_device_ids": "0"}, "0;1", "gpu_device_ids: is what --gpus"),
    "pool of a share": (
        {"max_tokens_in_paged_kv_cache": "0"},
        "0;0;1",
        "max_tokens_in_paged_kv_cache: is what --gpus and --split say",
    ),
    "tiering": ({"kv_tiering": "true"}, "", "kv_tiering: the trtllm engine has no call"),
    "several machines": ({"num_nodes": "2"}, "", "num_nodes: an engine of one rank runs on one"),
}


@pytest.mark.parametrize("name", OVERRIDES)
def test_what_would_break_the_plan_cannot_be_set(name: str, bench: Bench) -> None:
    overrides, gpus, reason = OVERRIDES[name]
    source = find_source(bench.output, None, None)
    sets = parse_gpus(gpus) if gpus else ()
    with pytest.raises(ConfigError, match=reason):
        serving_models(source, "trtllm", overrides, sets, split=gpus == "0;0;1")


def test_several_machines_are_judged_as_the_job_would_be(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    assert bench.build("--tp", "2").returncode == 0
    source = find_source(bench.output, None, None)
    nodes = {"num_nodes": "2"}
    with pytest.raises(ConfigError, match="max_engine_restarts: must be 0 under mpirun"):
        serving_models(source, "trtllm", nodes)
    with pytest.raises(ConfigError, match="gpu_device_ids: must be empty with num_nodes > 1"):
        serving_models(source, "trtllm", {**nodes, "max_engine_restarts": "0"}, [(0, 1)])
    (model,) = serving_models(source, "trtllm", {**nodes, "max_engine_restarts": "0"})
    assert model.config.num_nodes == 2
