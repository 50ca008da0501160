"""A repository that `tokenflow repo render` wrote, on the real server with the embedded engine.

What was built (by stand-ins for TensorRT-LLM's programs) is rendered for TensorRT-LLM and for the
embedded engine. They differ in parameters only, and the latter serves.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.build.test_builder import Bench
from tests.e2e.clients import GrpcStream, shm_files
from tokenflow.cli import main
from triton_backend.launcher import LaunchError, TritonServer


@pytest.fixture(scope="module")
def built(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    bench = Bench(tmp_path_factory.mktemp("built"))
    bench.checkpoint = tiny_model
    done = bench.build("--max-seq-len", "2048", "--max-batch-size", "4", "--max-num-tokens", "128")
    assert done.returncode == 0, done.stderr
    return bench.output


def render(built: Path, target: Path, engine: str) -> Path:
    command = ["repo", "render", "--engine-dir", str(built), "--output", str(target)]
    assert main.main([*command, "--engine", engine]) == 0
    return target / "ensemble"


def test_what_is_rendered_for_a_build_serves_with_the_embedded_engine(
    built: Path, tmp_path: Path
) -> None:
    theirs, ours = (render(built, tmp_path / name, name) for name in ("trtllm", "inflight"))
    files = {path.relative_to(ours) for path in ours.rglob("*") if path.is_file()}
    assert files == {path.relative_to(theirs) for path in theirs.rglob("*") if path.is_file()}
    texts = [(folder / "config.pbtxt").read_text().splitlines() for folder in (theirs, ours)]
    changed = [pair for pair in zip(*texts, strict=True) if pair[0] != pair[1]]
    assert changed
    assert all(line.startswith("parameters {") for pair in changed for line in pair)
    server = TritonServer(tmp_path / "inflight", exit_timeout_s=5)
    with server, GrpcStream(server) as stream:
        stream.send(
            "r",
            text_input="The reader",
            max_tokens=1500,
            stream=True,
            end_id=-1,
            return_num_output_tokens=True,
        )
        answer = stream.collect()["r"]
    assert answer.error is None
    assert answer.num_tokens == 1500
    assert answer.finish_reason == "length"
    assert len(answer.responses) > 1, "it streams"
    assert not shm_files(server.shm_prefix)


def test_two_instances_of_an_engine_are_refused_at_load(built: Path, tmp_path: Path) -> None:
    config = render(built, tmp_path / "repository", "inflight") / "config.pbtxt"
    text = config.read_text()
    assert "instance_group [ { count: 1" in text
    config.write_text(text.replace("instance_group [ { count: 1", "instance_group [ { count: 2"))
    server = TritonServer(tmp_path / "repository", exit_timeout_s=5)
    try:
        server.start()
        with pytest.raises(LaunchError, match="instance_group: asks for 2 instances, must be 1"):
            server.wait_ready(60)
    finally:
        server.stop(timeout_s=5.0)
    assert not shm_files(server.shm_prefix)
