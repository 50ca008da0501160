"""A real server whose KV pool is short, with host memory behind it, in both ways to use it.

The engine counts: the token after n is n + 1, and its runner refuses KV of another history. So a
stream is right only if what came back from the host is what was sent there.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from perf.long_runs.known_answers import counting_text
from perf.long_runs.known_prompts import scripted_kill_config
from perf.long_runs.server_processes import ENGINE, find_process, find_processes
from tests.e2e.clients import (
    Answer,
    GrpcStream,
    descendants,
    is_alive,
    metric,
    num_active,
    shm_files,
    wait_until,
)
from tokenflow.inflight.scripted_runner import KV_BYTES_PER_TOKEN
from triton_backend.launcher import TritonServer
from triton_backend.repository import render_repository

OUTPUTS = ("text_output", "num_output_tokens", "token_index", "finish_reason")
NUM_HOST_BLOCKS = 64
NUM_TOKENS_LONG, NUM_TOKENS_SHORT = 150, 20


@pytest.fixture(scope="module", params=[False, True], ids=["trtllm-rules", "kv-tiering"])
def tiered(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    """16 blocks of 16 on the device, 64 on the host, more slots than the pool can fill."""
    folder = tmp_path_factory.mktemp("tiered")
    config = scripted_kill_config(
        folder,
        folder / "trace.jsonl",
        scripted_step_s=0.005,
        max_batch_size=12,
        tokens_per_block=16,
        max_tokens_in_paged_kv_cache=16 * 16,
        max_seq_len=256,
        kv_cache_host_memory_bytes=NUM_HOST_BLOCKS * 16 * KV_BYTES_PER_TOKEN,
        kv_tiering=request.param,
        max_engine_restarts=1000,
        engine_restart_window_s=1.0,
        stats_check_period_ms=20,
    )
    server = TritonServer(
        render_repository(config, folder / "repository"),
        log_path=folder / "server.log",
        exit_timeout_s=5,
    )
    with server:
        pids = [server.pid or 0, *descendants(server.pid or 0)]
        yield server
        pids += descendants(server.pid or 0)
    assert not [pid for pid in pids if is_alive(pid)]
    assert not shm_files(server.shm_prefix)
    assert "Traceback" not in (folder / "server.log").read_text()


def copied(server: TritonServer, what: str) -> float:
    return metric(server, f"tokenflow_kv_{what}_blocks_total", copies="completed")


def ask_many(stream: GrpcStream, first: int, count: int, max_tokens: int) -> list[str]:
    """Send requests whose answers count on from different numbers; their ids."""
    ids = []
    for index in range(first, first + count):
        stream.send(
            str(index),
            text_input=str(300 * index),
            max_tokens=max_tokens,
            stream=True,
            end_id=-1,
            read_rate=8.0,
            outputs=OUTPUTS,
        )
        ids.append(str(index))
    return ids


def assert_counted(answers: dict[str, Answer], ids: list[str], max_tokens: int) -> None:
    for request_id in ids:
        answer = answers[request_id]
        assert answer.error is None
        assert answer.text == counting_text(300 * int(request_id), max_tokens)
        assert answer.finish_reason == "length"


def join(first: dict[str, Answer], rest: dict[str, Answer]) -> dict[str, Answer]:
    joined = {}
    for request_id in {*first, *rest}:
        parts = [a[request_id] for a in (first, rest) if request_id in a]
        joined[request_id] = Answer(
            responses=[r for part in parts for r in part.responses],
            error=next((part.error for part in parts if part.error), None),
        )
    return joined


def assert_idle(server: TritonServer) -> None:
    """Nothing is held by anybody, nothing is on its way, and each tier adds up."""
    wait_until(lambda: num_active(server) == 0)
    wait_until(lambda: metric(server, "tokenflow_kv_blocks", state="used") == 0)
    for name in ("tokenflow_kv_blocks", "tokenflow_kv_host_blocks"):
        wait_until(lambda name=name: metric(server, name, state="in_transit") == 0)
    host = {
        state: metric(server, "tokenflow_kv_host_blocks", state=state)
        for state in ("total", "cached", "in_transit", "free")
    }
    assert host["total"] == NUM_HOST_BLOCKS
    assert host["cached"] + host["free"] == host["total"]
    assert min(host.values()) >= 0
    assert metric(server, "tokenflow_kv_blocks", state="free") == 16


def test_streams_that_share_too_small_a_pool_are_right(tiered: TritonServer) -> None:
    offloaded, onboarded = copied(tiered, "offloaded"), copied(tiered, "onboarded")
    with GrpcStream(tiered) as stream:
        long_ids = ask_many(stream, 0, 6, NUM_TOKENS_LONG)
        begun = stream.collect(10**6, until=lambda a: len(a) == 6)
        time.sleep(0.3)
        short_ids = ask_many(stream, 6, 6, NUM_TOKENS_SHORT)
        answers = join(begun, stream.collect(12))
    assert_counted(answers, long_ids, NUM_TOKENS_LONG)
    assert_counted(answers, short_ids, NUM_TOKENS_SHORT)
    assert copied(tiered, "offloaded") > offloaded
    assert copied(tiered, "onboarded") > onboarded
    assert metric(tiered, "tokenflow_pauses_total", kind="planned") > 0
    assert metric(tiered, "tokenflow_resumes_total", **{"from": "host"}) > 0
    assert_idle(tiered)
    started = metric(tiered, "tokenflow_kv_onboarded_blocks_total", copies="started")
    assert started == copied(tiered, "onboarded")


def test_engines_killed_while_they_copy_cost_no_stream_a_token(tiered: TritonServer) -> None:
    """The host tier goes with its engine: the streams are computed again and swap on."""
    losses = metric(tiered, "tokenflow_engine_losses_total")
    wait_until(lambda: metric(tiered, "tokenflow_healthy") == 1)
    before = copied(tiered, "onboarded")
    with GrpcStream(tiered) as stream:
        ids = ask_many(stream, 0, 8, NUM_TOKENS_LONG)
        answers = stream.collect(10**6, until=lambda a: len(a) >= 6)
        wait_until(lambda: copied(tiered, "onboarded") > before)  # they take turns
        old = find_process(tiered, ENGINE)
        os.kill(old, signal.SIGKILL)
        wait_until(lambda: find_processes(tiered, ENGINE) not in ([], [old]))
        answers = join(answers, stream.collect(8))
    assert_counted(answers, ids, NUM_TOKENS_LONG)
    assert metric(tiered, "tokenflow_engine_losses_total") == losses + 1
    assert_idle(tiered)
