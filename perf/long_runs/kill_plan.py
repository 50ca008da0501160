"""When the engine is killed, and by what rule a client's answer is right afterwards.

Owns the moments of a kill run and the judgement of its streams; kills.py carries them out. Pure.
"""

from __future__ import annotations

import enum
import itertools
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from perf.long_runs.heard import Heard
from tokenflow import metrics


class Moment(enum.Enum):
    """What the engine does when it is killed."""

    ANY = "any"
    PREFILL = "prefill"  # of a long prompt, in chunks
    RESTART = "restart"  # the process that takes the place of the one killed just before
    IDLE = "idle"  # holds no request


FULL_MOMENTS = (Moment.ANY, Moment.PREFILL, Moment.ANY, Moment.RESTART, Moment.IDLE)
SHORT_MOMENTS = (Moment.ANY, Moment.RESTART, Moment.PREFILL)


@dataclass(frozen=True, kw_only=True)
class KillPlan:
    """A run: its length, its kills in order, its streams at once."""

    duration_s: float = 60.0
    moments: Sequence[Moment] = FULL_MOMENTS
    num_streams: int = 16
    seed: int = 20260

    def kill_offsets_s(self) -> list[float]:
        """Seconds after the start, one for each kill that is not of a restart: at random, one in
        each of as many equal parts of the run, of which a tenth stays free at either end."""
        rng = random.Random(self.seed)
        num_kills = sum(moment is not Moment.RESTART for moment in self.moments)
        part_s = self.duration_s * 0.8 / num_kills
        first_s = self.duration_s * 0.1
        return [first_s + part_s * (index + rng.uniform(0.1, 0.9)) for index in range(num_kills)]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """Something to ask. is_right: whether a text is the answer's beginning after so many tokens."""

    text: str
    max_tokens: int
    is_right: Callable[[str, int], bool]
    is_pausable: bool = True


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One kill, with what came of it; instants are CLOCK_MONOTONIC, None while it never came.

    started_time: the next engine took requests. first_token_time: of any client, after that.
    """

    moment: Moment
    kill_time: float
    lost_time: float | None
    started_time: float | None
    first_token_time: float | None


class Outcome(enum.Enum):
    """How a stream ended."""

    COMPLETE = "complete"
    SECOND_LOSS = "error: second loss"
    CANNOT_CONTINUE = "error: cannot be continued"
    DIFFERENT_TEXT = "complete, another text"
    WRONG = "wrong"


def judge(
    prompt: Prompt, heard: Heard, kill_times: Sequence[float], *, exact: bool
) -> tuple[Outcome, list[str]]:
    """How a stream ended, and what about it is wrong.

    Right are all its tokens and one end, or one of the two errors that recovery.py's rule knows
    after as many kills in the stream's life as it takes. exact: the text must be the known one.
    """
    faults = list(heard.faults)
    if heard.num_ends != 1:
        faults.append(f"{heard.num_ends} ends")
    right = prompt.is_right(heard.text, heard.num_tokens)
    if exact and not right:
        faults.append(f"another text after {heard.num_tokens} tokens: …{heard.text[-80:]!r}")
    outcome = Outcome.COMPLETE if right else Outcome.DIFFERENT_TEXT
    if heard.error is None:
        if (heard.finish_reason, heard.num_tokens) != ("length", prompt.max_tokens):
            faults.append(f"{heard.finish_reason} after {heard.num_tokens} of {prompt.max_tokens}")
    else:
        num_kills = sum(heard.send_time < time < heard.end_time for time in kill_times)
        outcome = _error_outcome(heard.error, prompt, num_kills)
        if outcome is Outcome.WRONG:
            faults.append(f"after {num_kills} kills in its life: {heard.error}")
    return (Outcome.WRONG if faults else outcome), faults


def _error_outcome(error: str, prompt: Prompt, num_kills: int) -> Outcome:
    if "the engine was lost a second time" in error and num_kills >= 2:
        return Outcome.SECOND_LOSS
    if "cannot be continued" in error and not prompt.is_pausable and num_kills:
        return Outcome.CANNOT_CONTINUE
    return Outcome.WRONG


def read_kills(
    kills: Sequence[tuple[Moment, float]],
    trace: Sequence[Mapping[str, object]],
    heard: Sequence[Heard],
) -> list[Kill]:
    """Kills with what the server's trace and the clients' receipt times say about them."""
    arrivals = sorted(time for one in heard for time, _ in one.arrivals)

    def first(event: str, after: float) -> float | None:
        times = (float(str(line["time"])) for line in trace if line["event"] == event)
        return min((time for time in times if time > after), default=None)

    result = []
    for moment, kill_time in kills:
        is_restart = moment is Moment.RESTART  # nothing was held by the engine
        started = first("engine_started", kill_time)
        token = None if started is None else next((t for t in arrivals if t > started), None)
        result.append(
            Kill(
                moment=moment,
                kill_time=kill_time,
                lost_time=None if is_restart else first("engine_lost", kill_time),
                started_time=started,
                first_token_time=token,
            )
        )
    return result


def longest_gaps_s(heard: Sequence[Heard], kill_times: Sequence[float]) -> list[float]:
    """For each stream that had tokens before and after a kill, its longest time between two
    responses around one, in rising order. Pauses by the scheduler count too."""
    longest = []
    for one in heard:
        times = [time for time, _ in one.arrivals]
        gaps = [
            later - time
            for time, later in itertools.pairwise(times)
            if any(time < kill_time < later for kill_time in kill_times)
        ]
        if gaps:
            longest.append(max(gaps))
    return sorted(longest)


def stalls_s(heard: Sequence[Heard]) -> list[float]:
    """Every wait of a reader that it notices, by its declared rate, in rising order."""
    found = []
    for one in heard:
        times = [time for time, num_tokens in one.arrivals for _ in range(num_tokens)]
        rate = one.question.inputs.get("read_rate")
        stream = metrics.Stream(
            arrival_time=one.send_time,
            token_times=np.array(times),
            read_rate=rate if isinstance(rate, float) else None,
        )
        stalls = metrics.stalls(stream, metrics.CLIENT_VISIBLE_STALL_S)
        found += [stall.duration_s for stall in stalls]
    return sorted(found)


def describe(values: Sequence[float]) -> str:
    """Number, middle and worst of sorted times."""
    if not values:
        return "none"
    return f"{len(values)}, P50 {statistics.median(values):.2f} s, worst {values[-1]:.2f} s"
