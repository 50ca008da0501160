"""A kill run: clients that check every token, and the one who kills the engine.

Owns both, in one asyncio loop. It ends only the engine's process, found below its own server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perf.long_runs.heard import Heard, Question
from perf.long_runs.kill_plan import (
    Kill,
    KillPlan,
    Moment,
    Outcome,
    Prompt,
    judge,
    longest_gaps_s,
    read_kills,
    stalls_s,
)
from perf.long_runs.server_processes import (
    ENGINE,
    MeasurementError,
    find_processes,
    log_faults,
    read_metrics,
    wait_empty,
)
from perf.long_runs.streams import GrpcLine, ask_http
from triton_backend.launcher import TritonServer

READ_RATES = (4.0, 8.0, 15.0, 30.0, 60.0)
_POLL_S = 0.01
_END_TIMEOUT_S = 120.0
_RESTART_TIMEOUT_S = 60.0
_PREFILL_S = 0.03
_HTTP_EVERY = 4

ChoosePrompt = Callable[[random.Random, bool], Prompt]
"""A prompt to ask; True for one whose prefill takes many steps."""


@dataclass(kw_only=True)
class KillReport:
    """What came of a run. faults: everything that was wrong; empty for a good run."""

    kills: list[Kill]
    outcomes: Counter[Outcome]
    gaps_s: list[float]
    stalls_s: list[float]
    num_tokens: int
    metrics: dict[str, float]
    faults: list[str] = field(default_factory=list)


class KillRun:
    """One run on a started server. choose: the prompts; exact: their texts are known to the token.

    trace_path: the server's trace file.
    """

    def __init__(
        self,
        server: TritonServer,
        trace_path: Path,
        plan: KillPlan,
        choose: ChoosePrompt,
        *,
        exact: bool,
    ) -> None:
        self._server = server
        self._trace_path = trace_path
        self._plan = plan
        self._choose = choose
        self._exact = exact
        self._asked: list[tuple[Prompt, Heard]] = []
        self._kills: list[tuple[Moment, float]] = []
        self._killed: set[int] = set()
        self._may_ask = asyncio.Event()
        self._is_over = False
        self._stray: list[str] = []

    async def run(self) -> KillReport:
        """Play it to the end of its last stream.

        Raises MeasurementError when a killed engine has no successor in time.
        """
        import grpc

        self._may_ask.set()
        async with grpc.aio.insecure_channel(self._server.grpc_url) as channel:
            clients = [
                asyncio.create_task(self._client(channel, number))
                for number in range(self._plan.num_streams)
            ]
            start = time.monotonic()
            try:
                await self._kill_all(channel, start)
                await asyncio.sleep(max(0.0, start + self._plan.duration_s - time.monotonic()))
                self._is_over = True
                await asyncio.wait_for(asyncio.gather(*clients), _END_TIMEOUT_S)
            except (asyncio.TimeoutError, TimeoutError):
                self._stray.append("streams without an end at the end of the run")
            finally:
                for client in clients:
                    client.cancel()
                await asyncio.gather(*clients, return_exceptions=True)
        return await self._report()

    # -- clients -------------------------------------------------------------------------------

    async def _client(self, channel: Any, number: int) -> None:
        rng = random.Random(f"{self._plan.seed} {number}")
        async with _line(channel, self._stray) as line:
            count = 0
            while not self._is_over:
                await self._may_ask.wait()
                prompt = self._choose(rng, False)
                question = _question(prompt, f"{number}-{count}", rng)
                count += 1
                if number % _HTTP_EVERY == _HTTP_EVERY - 1:
                    heard = Heard(question=question)
                    self._asked.append((prompt, heard))
                    await ask_http(self._server.http_url, question, heard)
                else:
                    heard = line.ask(question)
                    self._asked.append((prompt, heard))
                    await heard.wait_end()
                if heard.error is not None:
                    await asyncio.sleep(0.1)  # as a client that tries again does

    # -- killer --------------------------------------------------------------------------------

    async def _kill_all(self, channel: Any, start: float) -> None:
        rng = random.Random(f"{self._plan.seed} killer")
        offsets = iter(self._plan.kill_offsets_s())
        async with _line(channel, self._stray) as line:
            for moment in self._plan.moments:
                if moment is Moment.RESTART:
                    await self._kill_new_engine()
                    continue
                await asyncio.sleep(max(0.0, start + next(offsets) - time.monotonic()))
                await self._wait_engine()
                if moment is Moment.PREFILL:
                    await self._kill_in_prefill(line, rng)
                elif moment is Moment.IDLE:
                    await self._kill_idle()
                else:
                    self._kill(moment, self._engines()[0])

    def _kill(self, moment: Moment, pid: int) -> None:
        self._kills.append((moment, time.monotonic()))
        self._killed.add(pid)
        os.kill(pid, signal.SIGKILL)

    def _engines(self) -> list[int]:
        return find_processes(self._server, ENGINE)

    async def _wait_engine(self) -> None:
        """Until the engine that was killed last has a successor that serves."""
        deadline = time.monotonic() + _RESTART_TIMEOUT_S
        while not await asyncio.to_thread(self._is_healthy) or not self._engines():
            await _poll_until(deadline, "no engine serves")

    def _is_healthy(self) -> bool:
        return read_metrics(self._server)["tokenflow_healthy", ""] == 1.0

    async def _kill_new_engine(self) -> None:
        """As soon as another process than those killed before appears."""
        deadline = time.monotonic() + _RESTART_TIMEOUT_S
        while not (new := [pid for pid in self._engines() if pid not in self._killed]):
            await _poll_until(deadline, "no engine is started again")
        self._kill(Moment.RESTART, new[0])

    async def _kill_in_prefill(self, line: GrpcLine, rng: random.Random) -> None:
        prompt = self._choose(rng, True)
        question = _question(prompt, "prefill", rng, priority=1.0)
        heard = line.ask(question)
        self._asked.append((prompt, heard))
        while not heard.num_ends and not self._is_traced("admit", "prefill"):
            await asyncio.sleep(_POLL_S)
        await asyncio.sleep(_PREFILL_S)
        if heard.num_tokens:
            self._stray.append("the long prompt was not in its prefill when the engine was killed")
        self._kill(Moment.PREFILL, self._engines()[0])

    async def _kill_idle(self) -> None:
        self._may_ask.clear()
        gauges = await asyncio.to_thread(wait_empty, self._server, _END_TIMEOUT_S)
        if not gauges.is_empty:
            self._stray.append(f"not idle without requests: {gauges}")
        self._kill(Moment.IDLE, self._engines()[0])
        self._may_ask.set()

    # -- report --------------------------------------------------------------------------------

    def _trace(self) -> list[dict[str, Any]]:
        lines = self._trace_path.read_bytes().split(b"\n")[:-1]
        wanted = (b'"engine_', b'"admit"')
        return [json.loads(line) for line in lines if any(name in line for name in wanted)]

    def _is_traced(self, event: str, request_id: str) -> bool:
        return any(
            line["event"] == event and line.get("request_id") == request_id
            for line in self._trace()
        )

    async def _report(self) -> KillReport:
        heard = [one for _, one in self._asked]
        kills = read_kills(self._kills, self._trace(), heard)
        faults = [*self._stray]
        outcomes: Counter[Outcome] = Counter()
        times = [time for _, time in self._kills]
        for prompt, one in self._asked:
            outcome, wrong = judge(prompt, one, times, exact=self._exact)
            outcomes[outcome] += 1
            faults += [f"{one.question.request_id}: {text}" for text in wrong]
        gauges = await asyncio.to_thread(wait_empty, self._server, 10.0)
        if not (gauges.is_empty and gauges.healthy):
            faults.append(f"left behind: {gauges}")
        faults += [
            f"no token after the kill: {kill}" for kill in kills if not kill.first_token_time
        ]
        faults += log_faults(self._server)
        values = read_metrics(self._server)
        return KillReport(
            kills=kills,
            outcomes=outcomes,
            gaps_s=longest_gaps_s(heard, times),
            stalls_s=stalls_s(heard),
            num_tokens=sum(one.num_tokens for one in heard),
            metrics={
                f"{name.removeprefix('tokenflow_')} {label}".strip(): value
                for (name, label), value in values.items()
                if name.startswith("tokenflow_") and name.endswith("_total")
            },
            faults=faults,
        )


@contextlib.asynccontextmanager
async def _line(channel: Any, stray: list[str]) -> AsyncIterator[GrpcLine]:
    async with GrpcLine(channel) as line:
        yield line
    stray += line.stray


async def _poll_until(deadline: float, what: str) -> None:
    """One look later. Raises MeasurementError saying `what` when it is too late for another."""
    if time.monotonic() > deadline:
        raise MeasurementError(f"{what} after {_RESTART_TIMEOUT_S:.0f} s")
    await asyncio.sleep(_POLL_S)


def _question(
    prompt: Prompt, request_id: str, rng: random.Random, *, priority: float | None = None
) -> Question:
    inputs: dict[str, object] = {"read_rate": rng.choice(READ_RATES)}
    if priority is not None:
        inputs["priority"] = priority
    if not prompt.is_pausable:
        inputs |= {"top_p": 0.9, "runtime_top_p_decay": 0.9}
    return Question(
        request_id=request_id, prompt=prompt.text, max_tokens=prompt.max_tokens, inputs=inputs
    )


def run_kills(
    server: TritonServer, trace_path: Path, plan: KillPlan, choose: ChoosePrompt, *, exact: bool
) -> KillReport:
    """Play a kill run; blocks until its last stream has ended."""
    return asyncio.run(KillRun(server, trace_path, plan, choose, exact=exact).run())
