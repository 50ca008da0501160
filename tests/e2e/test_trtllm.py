"""The real server with engine `trtllm`, on the double of TensorRT-LLM's bindings.

The double refuses a cancel before the first token, which would end the engine's process: so what is
counted as lost here is what was killed, and no more.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from perf.kills import format_report
from perf.long_runs.kill_plan import KillPlan, Moment, Outcome
from perf.long_runs.kill_run import run_kills
from perf.long_runs.known_answers import NUM_NUMBERS
from perf.long_runs.known_prompts import CountingPrompts, scripted_kill_config
from tests.e2e.clients import GrpcStream, descendants, is_alive, metric, num_active, wait_until
from tests.trtllm_double.__main__ import ROOT, SITE
from tests.trtllm_double.folder import Behind, write_engine
from tokenflow.config import format_parameters, parse_parameters
from tokenflow.executor.lora import MAX_WEIGHT_BYTES
from triton_backend.launcher import TritonServer
from triton_backend.repository import render_repository

MOMENTS = (Moment.ANY, Moment.PREFILL)
NUM_BLOCKS = 100


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TritonServer, Path]]:
    """Its limits are those that the engine was built for, its pool a share of the GPU's memory;
    with its trace file."""
    folder = tmp_path_factory.mktemp("trtllm")
    trace_path = folder / "trace.jsonl"
    scripted = scripted_kill_config(
        folder,
        trace_path,
        max_engine_restarts=1000,
        engine_restart_window_s=1.0,
        kv_cache_host_memory_bytes=8 << 20,
    )
    behind = Behind(
        vocab_size=NUM_NUMBERS, step_s=scripted.scripted_step_s, script="counting",
        free_gpu_memory_bytes=NUM_BLOCKS * 32 * 1024 * 2,
    )  # fmt: skip
    engine = write_engine(
        folder / "engine", behind, max_batch_size=8, max_num_tokens=64,
        plugins={"lora_plugin": "auto"},
    )  # fmt: skip
    given = format_parameters(
        dataclasses.replace(
            scripted,
            engine="trtllm",
            gpt_model_path=str(engine),
            kv_cache_free_gpu_mem_fraction=0.5,
        )
    )
    for name in ("max_batch_size", "max_num_tokens", "max_seq_len", "tokens_per_block",
                 "max_tokens_in_paged_kv_cache"):  # fmt: skip
        del given[name]
    config = parse_parameters(given)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(SITE), str(ROOT)]))
        patch.setenv("TMPDIR", str(folder))
        server = TritonServer(
            render_repository(config, folder / "repository"),
            log_path=folder / "server.log",
            exit_timeout_s=5,
        )
        with server:
            pids = [server.pid or 0, *descendants(server.pid or 0)]
            yield server, trace_path
            pids += descendants(server.pid or 0)
    assert not [pid for pid in pids if is_alive(pid)]
    log = (folder / "server.log").read_text()
    assert "(trtllm engine, tokenflow)" in log
    assert "Traceback" not in log, log[log.index("Traceback") - 500 :]
    assert "hazard" not in log


def test_streams_pause_and_go_on(server: tuple[TritonServer, Path]) -> None:
    triton, _ = server
    assert metric(triton, "tokenflow_kv_blocks", state="total") == NUM_BLOCKS
    request = {"max_tokens": 300, "stream": True, "end_id": -1, "read_rate": 4.0}
    with GrpcStream(triton) as stream:
        for number in range(16):
            stream.send(
                str(number), text_input=str(10 * number), outputs=("text_output",), **request
            )
        answers = stream.collect(16)
    for number in range(16):
        expected = " ".join(str(10 * number + 1 + index) for index in range(300))
        assert answers[str(number)].text == expected
    assert metric(triton, "tokenflow_pauses_total", kind="planned") > 0
    assert metric(triton, "tokenflow_kv_mirrored") == 1
    wait_until(lambda: num_active(triton) == 0)
    wait_until(lambda: metric(triton, "tokenflow_kv_blocks", state="used") == 0)


def test_streams_of_lora_adapters(server: tuple[TritonServer, Path]) -> None:
    """Two adapters, one as large as they come; later streams name them by their ids."""
    pytest.importorskip("torch")
    triton, _ = server
    before = metric(triton, "tokenflow_pauses_total", kind="planned")
    request = {"max_tokens": 150, "stream": True, "end_id": -1, "read_rate": 4.0}
    rows = np.array([[[0, 0, 8], [1, 0, 8]]], dtype=np.int32)
    adapters = {
        task_id: {
            "lora_weights": np.full((1, 2, size), task_id, dtype=np.float16),
            "lora_config": rows,
        }
        for task_id, size in ((1, 16), (2, MAX_WEIGHT_BYTES // 4))
    }
    with GrpcStream(triton) as stream:
        for number in range(16):
            task_id = 1 + number % 2
            inputs = adapters[task_id] if number < 2 else {}
            stream.send(
                str(number), text_input=str(10 * number), outputs=("text_output",), **request,
                lora_task_id=np.array([[task_id]], dtype=np.uint64), **inputs,
            )  # fmt: skip
            if number < 2:
                stream.next()  # its first token: the engine has the adapter
        stream.send("miss", text_input="1", lora_task_id=np.array([[3]], np.uint64), **request)
        answers = stream.collect(17)
    for number in range(16):
        text = " ".join(str(10 * number + 1 + index) for index in range(150))
        got = answers[str(number)].text
        assert got and text.endswith(got) if number < 2 else got == text
    assert "LoRA task 3 not found in cache" in str(answers[""].error)  # errors carry no id
    assert metric(triton, "tokenflow_pauses_total", kind="planned") > before


def test_killed_engines_cost_no_stream_a_token(server: tuple[TritonServer, Path]) -> None:
    triton, trace_path = server
    before = metric(triton, "tokenflow_engine_losses_total")
    plan = KillPlan(duration_s=4.0, moments=MOMENTS, seed=3)
    prompts = CountingPrompts(num_tokens=(30, 120), num_tokens_long=(150, 400))
    report = run_kills(triton, trace_path, plan, prompts, exact=True)
    assert report.faults == [], format_report(report)
    assert report.outcomes[Outcome.COMPLETE] > plan.num_streams
    assert report.metrics["recovered_requests_total"] > 0
    assert metric(triton, "tokenflow_engine_losses_total") - before == len(MOMENTS)
