"""Many slow readers: a slot is free when the last token is generated, not when it is read.

`python -m perf.slow_readers` opens 512 HTTP streams of 200 tokens on a server with 64 slots and
reads each at its declared rate. Prints how much was read when all had been generated, and the time
between the engine's iterations meanwhile. Ends with 1 when a stream got something wrong or the
server was not done long before its readers.

Owns the slow client: it takes an event from its socket when its reader wants the next token, and
the rest at once when the server is done.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perf.harness import serving
from perf.long_runs.heard import Heard, Question
from perf.long_runs.known_answers import NUM_NUMBERS, counting_text, write_number_tokenizer
from perf.long_runs.server_processes import gauges_of, read_metrics
from perf.long_runs.streams import ask_http
from tokenflow.config import ServingConfig
from triton_backend.launcher import TritonServer

GAP_LIMIT_S = 0.05
_POLL_S = 0.1
_DONE_TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class ReadersPlan:
    """The crowd. rate: tokens per second that each declares and reads."""

    num_readers: int = 512
    num_tokens: int = 200
    num_slots: int = 64
    rate: float = 2.0


@dataclass(kw_only=True)
class ReadersReport:
    """generated_s: from the start until the server was done; share_read: of all tokens, then.

    gaps_s: between the ends of successive iterations of a busy engine, in rising order.
    """

    generated_s: float
    share_read: float
    gaps_s: list[float]
    faults: list[str]


def readers_config(
    folder: Path, plan: ReadersPlan, trace_path: Path, **changes: Any
) -> ServingConfig:
    """A server that holds the whole crowd."""
    num_blocks_each = -(-(plan.num_tokens + 8) // 32)
    settings: dict[str, Any] = {
        "engine": "scripted",
        "tokenizer_dir": str(write_number_tokenizer(folder / "tokenizer")),
        "scripted_step_s": 0.005,
        "max_batch_size": plan.num_slots,
        "max_queue_size": plan.num_readers,
        "max_tokens_in_paged_kv_cache": 32 * num_blocks_each * plan.num_slots,
        "trace_path": str(trace_path),
    }
    return ServingConfig(**{**settings, **changes})


async def read_slowly(server: TritonServer, trace_path: Path, plan: ReadersPlan) -> ReadersReport:
    """Play the crowd on a started server, to the end of every stream."""
    is_done = asyncio.Event()
    readers = [_SlowReader(number, plan, is_done) for number in range(plan.num_readers)]
    start = time.monotonic()
    reading = [asyncio.create_task(reader.read(server.http_url)) for reader in readers]
    faults = []
    while not await asyncio.to_thread(_has_ended, server, plan.num_readers):
        if time.monotonic() - start > _DONE_TIMEOUT_S:
            faults.append("the server was not done in time")
            break
        await asyncio.sleep(_POLL_S)
    end = time.monotonic()
    num_read = sum(reader.heard.num_tokens for reader in readers)
    is_done.set()
    await asyncio.gather(*reading)
    faults += [fault for reader in readers for fault in reader.faults()]
    return ReadersReport(
        generated_s=end - start,
        share_read=num_read / (plan.num_readers * plan.num_tokens),
        gaps_s=iteration_gaps_s(trace_path),
        faults=faults,
    )


class _SlowReader:
    """One reader. It stops reading its socket between two tokens."""

    def __init__(self, number: int, plan: ReadersPlan, is_done: asyncio.Event) -> None:
        self._last = number * 7 % NUM_NUMBERS
        self._plan = plan
        self._is_done = is_done
        question = Question(
            request_id=str(number),
            prompt=str(self._last),
            max_tokens=plan.num_tokens,
            inputs={"read_rate": plan.rate},
        )
        self.heard = Heard(question=question)

    async def read(self, http_url: str) -> None:
        await ask_http(http_url, self.heard.question, self.heard, after_event=self._wait)

    async def _wait(self) -> None:
        if not self.heard.num_tokens or self._is_done.is_set():
            return
        first_time = self.heard.arrivals[0][0]
        wanted_time = first_time + self.heard.num_tokens / self._plan.rate
        wait_s = wanted_time - time.monotonic()
        if wait_s > 0:
            try:
                await asyncio.wait_for(self._is_done.wait(), wait_s)
            except (asyncio.TimeoutError, TimeoutError):
                return

    def faults(self) -> list[str]:
        """What is wrong with what it got."""
        faults = list(self.heard.faults)
        if self.heard.error is not None:
            faults.append(self.heard.error)
        elif self.heard.text != counting_text(self._last, self._plan.num_tokens):
            faults.append(f"another text: {self.heard.text[-60:]}")
        return [f"{self.heard.question.request_id}: {fault}" for fault in faults]


def _has_ended(server: TritonServer, num_requests: int) -> bool:
    """So many requests were served, and none is left in a slot or in the queue."""
    values = read_metrics(server)
    num_ok = values["tokenflow_requests_total", 'outcome="ok"']
    return num_ok >= num_requests and gauges_of(values).num_active == 0


def iteration_gaps_s(trace_path: Path) -> list[float]:
    """Seconds between the ends of successive iterations while the engine had work, in rising
    order."""
    ends = []
    with trace_path.open("rb") as trace:
        for line in trace:
            if b'"event":"iteration"' in line:
                fields = json.loads(line)
                ends.append((fields["time"], fields["num_active"]))
    return sorted(
        later - time for (time, num_active), (later, _) in itertools.pairwise(ends) if num_active
    )


def format_report(report: ReadersReport) -> str:
    """What a person reads."""
    gaps = report.gaps_s
    late = sum(gap > GAP_LIMIT_S for gap in gaps)
    return (
        f"all generated after {report.generated_s:.1f} s, when {report.share_read:.1%} was read\n"
        f"between {len(gaps)} iterations: P50 {statistics.median(gaps) * 1e3:.1f} ms, "
        f"P99 {gaps[int(len(gaps) * 0.99)] * 1e3:.1f} ms, worst {gaps[-1] * 1e3:.1f} ms; "
        f"{late} over {GAP_LIMIT_S * 1e3:.0f} ms"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m perf.slow_readers", description=__doc__)
    parser.add_argument("--readers", type=int, default=ReadersPlan.num_readers)
    parser.add_argument("--tokens", type=int, default=ReadersPlan.num_tokens)
    parser.add_argument("--slots", type=int, default=ReadersPlan.num_slots)
    parser.add_argument("--rate", type=float, default=ReadersPlan.rate, help="tokens per second")
    options = parser.parse_args(arguments)
    plan = ReadersPlan(
        num_readers=options.readers,
        num_tokens=options.tokens,
        num_slots=options.slots,
        rate=options.rate,
    )
    with tempfile.TemporaryDirectory(prefix="tokenflow-readers-") as name:
        folder = Path(name)
        trace_path = folder / "trace.jsonl"
        config = readers_config(folder, plan, trace_path)
        with serving(config, folder / "server", "readers") as server:
            report = asyncio.run(read_slowly(server, trace_path, plan))
    print(format_report(report))
    for fault in report.faults[:20]:
        print("WRONG", fault)
    return 1 if report.faults or report.share_read > 0.9 else 0


if __name__ == "__main__":
    sys.exit(main())
