"""What the engine's process costs: `python -m perf.channel [--json]`.

Measures through real processes, with an engine at the far end that computes nothing:
- iteration: one message of 16 responses and its statistics from the host to `await_responses`, and
  its acknowledgement back, before the next one (a window of one message makes each iteration a full
  round trip);
- pipelined: the same with the window of the product, i.e. throughput (mean only: batches arrive
  several at a time);
- enqueue: from `enqueue_request` (a prompt of 100 tokens) to its first response;
- bare socket: as many bytes there and back between two processes that do nothing else, i.e. what
  this machine takes at least.

The four take turns, round after round, and the numbers are of all rounds together.
"""

from __future__ import annotations

import argparse
import itertools
import json
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta

import numpy as np

from tokenflow.config import ServingConfig
from tokenflow.executor.api import (
    FinishReason,
    InflightBatchingStats,
    IterationStats,
    KvCacheStats,
    Request,
    Response,
    Result,
)
from tokenflow.executor.backpressure import DEFAULT_WINDOW
from tokenflow.executor.channel import (
    EngineInfo,
    Iteration,
    encode,
)
from tokenflow.executor.process import python_executable
from tokenflow.executor.remote import RemoteExecutor

BATCH_SIZE = 16
GOAL_US = 100.0

_NUM_WARM_UP = 200
_BARE_PEER = """
import socket, sys
peer = socket.socket(fileno=int(sys.argv[1]))
while peer.recv(1 << 16):
    peer.sendall(b"acknowledgement.")
"""


class BurstEngine:
    """Gives one token to each of 16 requests, as fast as it is asked; a lone request with
    max_tokens 1 is answered at once."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._requests: dict[int, int] = {}
        self._ready: deque[Response] = deque()
        self._last_id = 0
        self._iter = 0
        self._closed = False

    def enqueue_request(self, request: Request) -> int:
        with self._condition:
            self._last_id += 1
            if request.max_tokens == 1:
                self._ready.append(_response(self._last_id, 0, final=True))
            else:
                self._requests[self._last_id] = request.max_tokens
            self._condition.notify_all()
            return self._last_id

    def enqueue_requests(self, requests: Sequence[Request]) -> list[int]:
        return [self.enqueue_request(request) for request in requests]

    def await_responses(self, timeout: timedelta | None = None) -> list[Response]:
        with self._condition:
            self._condition.wait_for(
                self._has_work, None if timeout is None else timeout.total_seconds()
            )
            if self._closed:
                raise RuntimeError("shut down")
            responses = list(self._ready)
            self._ready.clear()
            if len(self._requests) == BATCH_SIZE:
                responses += self._step()
            return responses

    def get_num_responses_ready(self) -> int:
        return len(self._ready)

    def cancel_request(self, id: int) -> None:
        with self._condition:
            if self._requests.pop(id, None) is not None:
                self._ready.append(_response(id, self._iter, final=True))
                self._condition.notify_all()

    def get_latest_iteration_stats(self) -> list[IterationStats]:
        return [_stats(self._iter)] if self._requests else []

    def can_enqueue_requests(self) -> bool:
        return not self._closed

    def get_kv_cache_event_manager(self) -> None:
        return None

    def get_kv_tiering(self) -> None:
        return None

    def shutdown(self) -> None:
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def _has_work(self) -> bool:
        return self._closed or bool(self._ready) or len(self._requests) == BATCH_SIZE

    def _step(self) -> list[Response]:
        self._iter += 1
        responses = []
        for id in list(self._requests):
            self._requests[id] -= 1
            final = self._requests[id] == 0
            if final:
                del self._requests[id]
            responses.append(_response(id, self._iter, final=final))
        return responses


def create_burst_engine(
    config: ServingConfig,
    *,
    on_progress: Callable[[float, str], None],
    before_step: Callable[[], None],
) -> tuple[BurstEngine, EngineInfo]:
    """The host's factory."""
    return BurstEngine(), EngineInfo.from_config(config, vocab_size=50_000)


def measure_iterations(num_iterations: int, window: int) -> list[float]:
    """Seconds between two batches of 16 that arrive in `await_responses`."""
    total = num_iterations + _NUM_WARM_UP
    executor = _open(window)
    try:
        request = Request(input_token_ids=(1, 2, 3), max_tokens=total)
        executor.enqueue_requests([request] * BATCH_SIZE)
        times: list[float] = []
        num_responses = 0
        while num_responses < total * BATCH_SIZE:
            responses = executor.await_responses()
            executor.get_latest_iteration_stats()
            num_responses += len(responses)
            times += [time.perf_counter()] * (len(responses) // BATCH_SIZE)
    finally:
        executor.shutdown()
    return _differences(times[_NUM_WARM_UP:])


def measure_enqueues(num_requests: int) -> list[float]:
    """Seconds from an enqueue to its response."""
    executor = _open(DEFAULT_WINDOW)
    request = Request(input_token_ids=tuple(range(100, 200)), max_tokens=1)
    durations: list[float] = []
    try:
        for _ in range(num_requests + _NUM_WARM_UP):
            start = time.perf_counter()
            executor.enqueue_request(request)
            executor.await_responses()
            durations.append(time.perf_counter() - start)
    finally:
        executor.shutdown()
    return durations[_NUM_WARM_UP:]


def measure_bare_socket(num_iterations: int) -> list[float]:
    """Seconds of a round trip of the same bytes without threads, messages or statistics."""
    responses = [_response(id, 1, final=False) for id in range(1, BATCH_SIZE + 1)]
    message = encode(Iteration(1, responses, [_stats(1)]))
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            child = subprocess.Popen(
                [python_executable(), "-c", _BARE_PEER, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
            )
        times: list[float] = []
        for _ in range(num_iterations + _NUM_WARM_UP):
            ours.sendall(message)
            ours.recv(1 << 16)
            times.append(time.perf_counter())
    child.wait()
    return _differences(times[_NUM_WARM_UP:])


def run(num_iterations: int, num_rounds: int) -> dict[str, dict[str, float]]:
    """All of them, in microseconds; `num_iterations` of each in each round."""
    measures: dict[str, tuple[Callable[[], list[float]], int]] = {
        "iteration": (lambda: measure_iterations(num_iterations, window=1), BATCH_SIZE),
        "pipelined": (lambda: measure_iterations(num_iterations, DEFAULT_WINDOW), BATCH_SIZE),
        "enqueue": (lambda: measure_enqueues(num_iterations), 1),
        "bare socket": (lambda: measure_bare_socket(num_iterations), BATCH_SIZE),
    }
    durations: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(num_rounds):
        for name, (measure, _num_tokens) in measures.items():
            durations[name] += measure()
    return {
        name: _summary(durations[name], num_tokens)
        for name, (_measure, num_tokens) in measures.items()
    }


def main() -> None:
    """Print the table or, with --json, the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true", help="print numbers for a program")
    parser.add_argument("--iterations", type=int, default=1000, help="iterations in a round")
    parser.add_argument("--rounds", type=int, default=5, help="rounds")
    options = parser.parse_args()
    results = run(options.iterations, options.rounds)
    if options.json:
        print(json.dumps(results, indent=2))
        return
    names = {"p50_us": "p50 us", "p99_us": "p99 us", "mean_us": "mean us"}
    names["mean_per_token_us"] = "mean us/token"
    print(" " * 12 + "".join(f"{title:>15}" for title in names.values()))
    for name, row in results.items():
        print(f"{name:<12}" + "".join(f"{row[key]:>15.1f}" for key in names))
    p50 = results["iteration"]["p50_us"]
    verdict = "met" if p50 <= GOAL_US else "missed"
    print(
        f"goal: an iteration of {BATCH_SIZE} responses and its acknowledgement in <= "
        f"{GOAL_US:.0f} us (p50): {p50:.1f} us, {verdict}"
    )


def _open(window: int) -> RemoteExecutor:
    return RemoteExecutor(
        ServingConfig(max_batch_size=BATCH_SIZE),
        factory="perf.channel:create_burst_engine",
        window=window,
    )


def _differences(times: list[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(times)]


def _summary(durations: list[float], num_tokens: int) -> dict[str, float]:
    p50, p99 = np.percentile(durations, [50, 99]) * 1e6
    mean = float(np.mean(durations)) * 1e6
    return {
        "p50_us": float(p50),
        "p99_us": float(p99),
        "mean_us": mean,
        "mean_per_token_us": mean / num_tokens,
    }


def _response(id: int, iteration: int, *, final: bool) -> Response:
    return Response(
        request_id=id,
        payload=Result(
            is_final=final,
            output_token_ids=[[4523]],
            finish_reasons=[FinishReason.LENGTH if final else FinishReason.NOT_FINISHED],
            log_probs=[[-1.25]],
            cum_log_probs=[-20.5],
            is_sequence_final=final,
            decoding_iter=iteration,
        ),
    )


def _stats(iteration: int) -> IterationStats:
    return IterationStats(
        iter=iteration,
        iter_latency_ms=50.0,
        num_active_requests=BATCH_SIZE,
        num_queued_requests=0,
        num_completed_requests=0,
        max_num_active_requests=BATCH_SIZE,
        kv_cache_stats=KvCacheStats(
            max_num_blocks=256, free_num_blocks=100, used_num_blocks=156, tokens_per_block=32
        ),
        inflight_batching_stats=InflightBatchingStats(
            num_scheduled_requests=BATCH_SIZE,
            num_context_requests=0,
            num_gen_requests=BATCH_SIZE,
            num_paused_requests=0,
            num_ctx_tokens=0,
        ),
    )


if __name__ == "__main__":
    main()
