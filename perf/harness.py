"""A real server for one benchmark run, and the client process that drives it.

Owns the processes of a run: the server is started with its own folder, ports and trace, the clients
run in a process of their own; both are gone when the block ends, however it ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from tqdm import tqdm

from perf.analysis import BenchmarkError, require_complete
from perf.client import Plan, WorkloadRecord, read_record, write_plan
from perf.workloads import ClientRequest, Tokenizer, cut
from tokenflow.config import ServingConfig, parse_parameters
from tokenflow.progress import Waiting
from triton_backend.launcher import TritonServer
from triton_backend.repository import render_repository

READY_TIMEOUT_S = 300.0
EXIT_TIMEOUT_S = 5
_ROOT = Path(__file__).resolve().parent.parent
_SETTLE_S = 1.0
# Nothing of this text is in a workload: a warm-up must not fill the reuse cache for it.
_WARM_UP_TEXT = (
    "Numbers, colours and names of towns follow each other here without any meaning, only so that "
    "every part of the engine has done its work once before somebody looks at a clock."
)


def make_config(
    model_path: Path, policy: str, trace_path: Path, settings: Mapping[str, str]
) -> ServingConfig:
    """A server's configuration: the same settings whatever the policy.

    Raises ConfigError for an unknown setting.
    """
    return parse_parameters(
        {
            "engine": "inflight",
            "gpt_model_path": str(model_path),
            **settings,
            "scheduling_policy": policy,
            "trace_path": str(trace_path),
        }
    )


@contextlib.contextmanager
def serving(config: ServingConfig, folder: Path, label: str) -> Iterator[TritonServer]:
    """A ready server; its repository and log lie in `folder`. A line shows that it is loading.

    Raises LaunchError with the log's tail when it cannot be started.
    """
    folder.mkdir(parents=True, exist_ok=True)
    server = TritonServer(
        render_repository(config, folder / "repository"),
        log_path=folder / "server.log",
        exit_timeout_s=EXIT_TIMEOUT_S,
    )
    try:
        with Waiting(f"{label}: starting the server") as waiting:
            server.start()
            server.wait_ready(READY_TIMEOUT_S, on_wait=waiting)
        yield server
    finally:
        server.stop()


def warm_up(server: TritonServer, tokenizer: Tokenizer, folder: Path, num_streams: int) -> None:
    """Run `num_streams` short requests at once, so that no first use falls into the measurement."""
    requests = [
        ClientRequest(
            request_id=f"warm-up-{index}",
            kind="warm-up",
            prompt=cut(tokenizer, f"{index}. {_WARM_UP_TEXT}", 24),
            num_prompt_tokens=24,
            max_tokens=16,
            read_rate=1000.0,
            send_offset_s=0.0,
        )
        for index in range(num_streams)
    ]
    record = play(server, requests, folder, timeout_s=120.0)
    require_complete(record.clients)
    time.sleep(_SETTLE_S)


def play(
    server: TritonServer,
    requests: list[ClientRequest],
    folder: Path,
    *,
    timeout_s: float,
    label: str | None = None,
) -> WorkloadRecord:
    """Play `requests` from a client process and return what it saw; a bar counts tokens.

    Raises BenchmarkError when the process fails, does not come to an end in `timeout_s` and half a
    minute, or the server is gone.
    """
    plan_path, record_path = folder / "plan.json", folder / "record.json"
    plan = Plan(
        url=server.grpc_url, record_path=str(record_path), timeout_s=timeout_s, requests=requests
    )
    write_plan(plan, plan_path)
    bar = tqdm(
        total=sum(request.max_tokens for request in requests),
        desc=label,
        unit=" tokens",
        disable=label is None,
        mininterval=0.4 if sys.stderr.isatty() else 10.0,
        file=sys.stderr,
    )
    with bar:
        command = [sys.executable, "-m", "perf.client", str(plan_path)]
        code = run_client(command, lambda tokens: _advance(bar, tokens), timeout_s + 30.0)
    if not server.is_running():
        raise BenchmarkError(f"the server ended during the run\n{server.log_tail()}")
    if code != 0:
        raise BenchmarkError(f"the client process ended with {code}")
    return read_record(record_path)


def run_client(command: Sequence[str], on_tokens: Callable[[int], None], limit_s: float) -> int:
    """Run a client process to its end and return its exit code.

    on_tokens: told the number in each progress line that the process prints.
    Raises BenchmarkError when the process is still there after `limit_s`; it is killed then, so
    that neither a silent process nor one that talks for ever is waited for.
    """
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        cwd=_ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GRPC_VERBOSITY": "ERROR"},
        text=True,
    )
    assert process.stdout is not None
    overdue = threading.Event()

    def end() -> None:
        overdue.set()
        process.kill()

    timer = threading.Timer(limit_s, end)
    timer.start()
    try:
        for line in process.stdout:
            with contextlib.suppress(ValueError, KeyError, TypeError):  # somebody else's line
                on_tokens(json.loads(line)["tokens"])
        code = process.wait()
    finally:
        timer.cancel()
        timer.join()
        process.kill()
        process.wait()
        process.stdout.close()
    if overdue.is_set():
        raise BenchmarkError(f"the client process did not end within {limit_s:.0f} s")
    return code


def _advance(bar: tqdm[None], num_tokens: int) -> None:
    bar.update(num_tokens - bar.n)
