"""Short requests of every kind, many at once, whose answers are known: the load of the long run.

Owns what each request is (by its number alone, so a run can be repeated), how its client behaves
and by what its answer is judged. Several requests share a gRPC stream, others come over HTTP; some
clients stop, hold, time out or leave, some at the very end of their answer; some requests are bad.
Everything runs in one asyncio loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from perf.long_runs.heard import Heard, Question
from perf.long_runs.known_answers import (
    NUM_NUMBERS,
    counting_log_probs,
    counting_prompt,
    counting_text,
)
from perf.long_runs.streams import GrpcLine, ask_http

READ_RATES = (2.0, 5.0, 10.0, 40.0)
NUM_LINES = 4
MAX_TOKENS = (2, 40)
_STOP_WORDS = ["@@", "never said", "€", "\n\n"]
_CUT_SHORT = ("cancelled", "timeout")
_END_TIMEOUT_S = 60.0
_JITTER_S = 0.02


class Kind(enum.Enum):
    """What a client does. The value is its share of the requests, in percent, and a name."""

    PLAIN = (58, "read to the end")
    ONE_SHOT = (6, "not streamed")
    BAD = (5, "bad request")
    STOP = (8, "stopped by id")
    LEAVE = (6, "left in the middle")
    LEAVE_AT_END = (6, "left around the last token")
    HOLD = (6, "held and resumed")
    TIMEOUT = (5, "with a time limit")


_BAD_INPUTS: tuple[dict[str, object], ...] = (
    {"top_p": 7.0},
    {"beam_width": 4},
    {"read_rate": 0.0},
    {"runtime_top_p_decay": 0.5},
    {"text_input": ""},
)


@dataclass(frozen=True, kw_only=True)
class Errand:
    """One request and what its client does. full_text: the whole answer, up to a stop word.

    after_tokens: tokens after which the client acts; delay_s: how much later.
    """

    kind: Kind
    question: Question
    last: int
    full_text: str
    ends_by_stop_word: bool
    after_tokens: int
    delay_s: float

    @classmethod
    def number(cls, seed: int, index: int) -> Errand:
        """The errand with this number."""
        rng = random.Random(f"{seed} {index}")
        kind = rng.choices(list(Kind), weights=[kind.value[0] for kind in Kind])[0]
        last = rng.randrange(NUM_NUMBERS)
        max_tokens = rng.randint(*MAX_TOKENS)
        full_text = counting_text(last, max_tokens)
        inputs: dict[str, object] = {"stream": kind is not Kind.ONE_SHOT}
        if rng.random() < 0.6:
            inputs["read_rate"] = rng.choice(READ_RATES)
        if rng.random() < 0.1:
            inputs["return_log_probs"] = True
        full_text, ends_by_stop_word = _add_stop_words(rng, inputs, full_text, max_tokens)
        if kind is Kind.BAD:
            inputs |= rng.choice(_BAD_INPUTS)
        after_tokens = rng.randrange(max_tokens)
        if kind is Kind.LEAVE_AT_END:
            after_tokens = max_tokens - 1
        return cls(
            kind=kind,
            question=Question(
                request_id=f"{index}",
                prompt=counting_prompt(last, rng.randint(1, 60)),
                max_tokens=max_tokens,
                inputs=inputs,
                timeout_us=rng.randint(1_000, 200_000) if kind is Kind.TIMEOUT else 0,
            ),
            last=last,
            full_text=full_text,
            ends_by_stop_word=ends_by_stop_word,
            after_tokens=after_tokens,
            delay_s=rng.uniform(0.0, _JITTER_S),
        )

    def judge(self, heard: Heard) -> list[str]:
        """What is wrong with an answer; whoever left has only what was right so far."""
        faults = list(heard.faults)
        if self.kind is Kind.BAD:
            if heard.error is None or heard.num_tokens:
                faults.append(f"a bad request was served: {heard.text!r}")
            return faults
        if not self.full_text.startswith(heard.text):
            faults.append(f"another text: {heard.text!r}, expected {self.full_text!r}")
        if self.kind in (Kind.LEAVE, Kind.LEAVE_AT_END):
            return faults
        return faults + self._judge_end(heard)

    def _judge_end(self, heard: Heard) -> list[str]:
        faults = []
        if heard.error is not None or heard.num_ends != 1:
            faults.append(f"{heard.num_ends} ends, error {heard.error}")
        usual = "stop" if self.ends_by_stop_word else "length"
        allowed = {Kind.STOP: "cancelled", Kind.TIMEOUT: "timeout"}
        if heard.finish_reason == usual:
            if heard.text != self.full_text:
                faults.append(f"incomplete: {heard.text!r}, expected {self.full_text!r}")
        elif heard.finish_reason != allowed.get(self.kind):
            faults.append(f"finish reason {heard.finish_reason!r}")
        if self.question.inputs.get("return_log_probs"):
            expected = counting_log_probs(self.last, heard.num_tokens)
            if heard.log_probs != expected:
                faults.append(f"log-probs {heard.log_probs}, expected {expected}")
        return faults


def _add_stop_words(
    rng: random.Random, inputs: dict[str, object], full_text: str, max_tokens: int
) -> tuple[str, bool]:
    """Four stop words for three of four requests; one in five of them says what will come."""
    if rng.random() < 0.25:
        return full_text, False
    words = list(_STOP_WORDS)
    if rng.random() < 0.2 and max_tokens > 2:
        words[rng.randrange(4)] = " " + rng.choice(full_text.split(" ")[1:])
    inputs["stop_words"] = words
    ends = [full_text.index(word) for word in words if word in full_text]
    return (full_text[: min(ends)], True) if ends else (full_text, False)


class Load:
    """Workers on a server; `run` may be called any number of times.

    num_done, num_cut_short: requests that ended, and those of them that a stop or a time limit
    ended before their time.
    """

    def __init__(self, grpc_url: str, http_url: str, *, num_workers: int, seed: int) -> None:
        self._grpc_url = grpc_url
        self._http_url = http_url
        self._num_workers = num_workers
        self._seed = seed
        self._indices = itertools.count()
        self._channel: Any = None
        self.num_done: Counter[Kind] = Counter()
        self.num_cut_short: Counter[Kind] = Counter()
        self.num_tokens = 0
        self.faults: list[str] = []

    async def run(self, num_requests: int, on_done: Callable[[], object]) -> None:
        """Send so many requests, the next ones by number, and wait for the end of all; on fresh
        connections, so that nothing is open afterwards."""
        import grpc

        work = iter([next(self._indices) for _ in range(num_requests)])
        async with (
            grpc.aio.insecure_channel(self._grpc_url) as self._channel,
            contextlib.AsyncExitStack() as opened,
        ):
            lines = [
                await opened.enter_async_context(GrpcLine(self._channel))
                for _ in range(NUM_LINES + 1)
            ]
            workers = [
                self._work(number, work, lines[number % NUM_LINES], lines[-1], on_done)
                for number in range(self._num_workers)
            ]
            await asyncio.gather(*workers)
        for line in lines:
            self.faults += [f"nobody asked for {stray}" for stray in line.stray]

    async def _work(
        self,
        number: int,
        work: Iterator[int],
        line: GrpcLine,
        control: GrpcLine,
        on_done: Callable[[], object],
    ) -> None:
        uses_http = number % 3 == 2
        for index in work:
            errand = Errand.number(self._seed, index)
            try:
                ask = self._over_http if uses_http else self._over_grpc
                heard = await asyncio.wait_for(ask(errand, line, control), _END_TIMEOUT_S)
            except (asyncio.TimeoutError, TimeoutError):
                self.faults.append(f"{index} ({errand.kind.name}): no end")
            else:
                self.faults += [
                    f"{index} ({errand.kind.name}): {text}" for text in errand.judge(heard)
                ]
                self.num_tokens += heard.num_tokens
                self.num_cut_short[errand.kind] += heard.finish_reason in _CUT_SHORT
            self.num_done[errand.kind] += 1
            on_done()

    async def _over_grpc(self, errand: Errand, line: GrpcLine, control: GrpcLine) -> Heard:
        if errand.kind not in (Kind.LEAVE, Kind.LEAVE_AT_END):
            heard = line.ask(errand.question)
            await self._act(errand, heard, control)
            await heard.wait_end()
            return heard
        own = GrpcLine(self._channel)
        heard = own.ask(errand.question)
        await self._act(errand, heard, control)
        own.cancel()
        await own.close()
        return heard

    async def _over_http(self, errand: Errand, line: GrpcLine, control: GrpcLine) -> Heard:
        heard = Heard(question=errand.question)
        asking = asyncio.create_task(ask_http(self._http_url, errand.question, heard))
        await self._act(errand, heard, control)
        if errand.kind in (Kind.LEAVE, Kind.LEAVE_AT_END):
            asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        return heard

    async def _act(self, errand: Errand, heard: Heard, control: GrpcLine) -> None:
        """What the client does besides reading."""
        if errand.kind in (Kind.PLAIN, Kind.ONE_SHOT, Kind.BAD, Kind.TIMEOUT):
            return
        if await heard.wait_tokens(errand.after_tokens):
            await asyncio.sleep(errand.delay_s)
        request_id = errand.question.request_id
        if errand.kind is Kind.STOP:
            await self._tell(control, request_id, "stop")
        elif errand.kind is Kind.HOLD:
            await self._tell(control, request_id, "pause")
            await asyncio.sleep(2 * errand.delay_s)
            await self._tell(control, request_id, "resume")

    async def _tell(self, control: GrpcLine, request_id: str, action: str) -> None:
        error = await control.tell(request_id, action)
        if error is not None and "no unfinished request has the id" not in error:
            self.faults.append(f"{request_id}: {action}: {error}")
