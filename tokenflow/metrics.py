"""What a stream was worth to its reader: one definition of each measure.

Server, simulator and benchmarks all call these functions, so a number means the same everywhere.
Pure: instants are arguments, nothing reads a clock. Source: [P] TokenFlow (EuroSys'26, arXiv
2510.02758); what carries no [P] is this project's own definition.

The reader [P 3.2]: it starts with the first token and takes one token each 1/R seconds. When it
wants a token and none is there it stalls, and its whole timeline shifts by that stall, so that a
late token is counted once. R = None is a machine: it takes tokens as they come and never stalls.

Invariants: instants of a stream never decrease; a token is read at or after its receipt; the sum
of a stream's stalls is the shift of its last token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

# Ours: longer than this and a person sees the text freeze.
CLIENT_VISIBLE_STALL_S = 0.250
# Effective throughput [P 7.1.3]: full weight below the first share of the output unread, none
# from the second on.
FULL_WEIGHT_SHARE = 0.10
NO_WEIGHT_SHARE = 0.20
# Effective goodput, ours: the deadlines of a first token, and of a reader's wait for a later one.
GOODPUT_TTFT_S = 0.500
GOODPUT_STALL_S = 0.200
# QoE of Andes: when a reader expects its first token. Ours: under the 1.3 s of [P 2.2].
QOE_TTFT_S = 1.0
# Rounding of float instants: stalls shorter than this are none.
_EPSILON_S = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """One request as its client saw it.

    arrival_time: instant of sending (clients) or of arrival (server).
    token_times: receipt instant of every token, one entry per token, in order.
    read_rate: tokens/s of the reader; None for a machine.
    output_length: tokens of the whole answer; the receipts' number when it is not given.
    """

    arrival_time: float
    token_times: FloatArray
    read_rate: float | None = None
    output_length: int | None = None

    def __post_init__(self) -> None:
        times = np.asarray(self.token_times, dtype=np.float64)
        if times.ndim != 1 or np.any(np.diff(times) < 0):
            raise ValueError("token_times must be one dimension of instants that never decrease")
        if self.read_rate is not None and not self.read_rate > 0:
            raise ValueError(f"read_rate must be > 0, got {self.read_rate}")
        object.__setattr__(self, "token_times", times)

    @property
    def num_tokens(self) -> int:
        """Tokens received."""
        return len(self.token_times)

    @property
    def length(self) -> int:
        """Tokens of the whole answer."""
        return self.num_tokens if self.output_length is None else self.output_length


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """The reader wanted token `token_index` at `wanted_time` and got it `duration_s` later."""

    token_index: int
    wanted_time: float
    duration_s: float

    @property
    def end_time(self) -> float:
        """When the token came."""
        return self.wanted_time + self.duration_s


def ttft_s(stream: Stream) -> float:
    """Seconds from arrival to the first token [P 7.1.3]; NaN when none came."""
    return float(stream.token_times[0] - stream.arrival_time) if stream.num_tokens else float("nan")


def end_to_end_s(stream: Stream) -> float:
    """Seconds from arrival to the last token: the place where a pause cannot hide."""
    if not stream.num_tokens:
        return float("nan")
    return float(stream.token_times[-1] - stream.arrival_time)


def read_times(stream: Stream) -> FloatArray:
    """Instant [num_tokens] at which the reader takes each token [P 3.2].

    r_0 = t_0 and r_j = max(t_j, r_{j-1} + 1/R), in closed form: j/R plus the running maximum of
    t_k - k/R.
    """
    times = stream.token_times
    if stream.read_rate is None or not len(times):
        return times
    due = np.arange(len(times)) / stream.read_rate
    return np.asarray(np.maximum(due + np.maximum.accumulate(times - due), times))


def tbt_s(stream: Stream) -> FloatArray:
    """Gaps [num_tokens - 1] between tokens as the reader sees them, seconds: 1/R or longer."""
    return np.diff(read_times(stream))


def waits_s(stream: Stream) -> FloatArray:
    """How long the reader waited for each token, seconds [num_tokens]; 0 for the first one, for
    those that were there when they were wanted, and for a machine."""
    waits = np.zeros(stream.num_tokens)
    if stream.read_rate is None or stream.num_tokens < 2:
        return waits
    wanted = read_times(stream)[:-1] + 1.0 / stream.read_rate
    late = stream.token_times[1:] - wanted
    waits[1:] = np.where(late > _EPSILON_S, late, 0.0)
    return waits


def stalls(stream: Stream, longer_than_s: float = 0.0) -> tuple[Stall, ...]:
    """Every wait of the reader, after the first token, that lasted more than `longer_than_s`.

    Pass CLIENT_VISIBLE_STALL_S for those that a person notices.
    """
    waits = waits_s(stream)
    return tuple(
        Stall(
            token_index=int(j),
            wanted_time=float(stream.token_times[j] - waits[j]),
            duration_s=float(waits[j]),
        )
        for j in np.flatnonzero(waits > longer_than_s)
    )


def rebuffer_s(stream: Stream) -> float:
    """Total seconds in which the reader faced an empty buffer ("Rebuffer" of [P Eq. 2])."""
    return float(waits_s(stream).sum())


def unread_when_received(stream: Stream) -> FloatArray:
    """Tokens [num_tokens] that were received before, and not yet read, when each token came.

    This is B(i, j) of [P 3.2]; the token itself is not counted. Zero for a machine.
    """
    num = stream.num_tokens
    if stream.read_rate is None:
        return np.zeros(num)
    earlier = np.arange(num)
    taken = np.searchsorted(read_times(stream), stream.token_times, side="right")
    return np.asarray(earlier - np.minimum(taken, earlier), dtype=np.float64)


def token_weights(stream: Stream) -> FloatArray:
    """Worth [num_tokens] of each token, 0..1 [P Eq. 1 with the thresholds of 7.1.3].

    1 while less than 10 % of the request's output is unread, falling linearly to 0 at 20 %.
    """
    share = unread_when_received(stream) / max(1, stream.length)
    return np.clip((NO_WEIGHT_SHARE - share) / (NO_WEIGHT_SHARE - FULL_WEIGHT_SHARE), 0.0, 1.0)


def span_s(streams: Sequence[Stream]) -> float:
    """Seconds from the first arrival to the last token; 0 when no token came."""
    ends = [s.token_times[-1] for s in streams if s.num_tokens]
    return float(max(ends) - min(s.arrival_time for s in streams)) if ends else 0.0


def raw_throughput(streams: Sequence[Stream]) -> float:
    """Tokens/s: all output tokens / (last token - first arrival)."""
    return _per_second(sum(s.num_tokens for s in streams), span_s(streams))


def effective_throughput(streams: Sequence[Stream]) -> float:
    """Weighted tokens/s [P 7.1.3], over the same time as `raw_throughput`.

    It is highest when everybody starves, so it only counts beside few stalls: quote it with them.
    """
    return _per_second(sum(float(token_weights(s).sum()) for s in streams), span_s(streams))


def qos(
    streams: Sequence[Stream], *, ttft_weight: float = 1.0, rebuffer_weight: float = 1.0
) -> float:
    """[P Eq. 2]: (1/T) * sum over streams of (sum of weights - lambda*TTFT - mu*Rebuffer).

    lambda = `ttft_weight` and mu = `rebuffer_weight`, both in tokens per second of waiting. The
    paper prints no values; 1.0 each is what its authors' published analysis uses. A stream
    without a token must not be passed: its TTFT is not known yet.
    """
    total = 0.0
    for stream in streams:
        waits = ttft_weight * ttft_s(stream) + rebuffer_weight * rebuffer_s(stream)
        total += float(token_weights(stream).sum()) - waits
    return _per_second(total, span_s(streams))


def qoe(stream: Stream, *, expected_ttft_s: float = QOE_TTFT_S) -> float:
    """Andes' quality of experience, 0..1 (arXiv 2404.16283): 1 - S_delay / S_whole.

    S_whole is the area under the number of tokens over time of a reader who gets the first token
    `expected_ttft_s` after arrival and reads on at its rate, S_delay the area by which this reader
    stays below that; both up to the instant at which this reader takes its last token. A token that
    is read early gains nothing. 1 when no token is read late, 0 when none came (and for an answer
    of one late token: there is no more to weigh it against). NaN for a machine, which expects
    nothing.
    """
    if stream.read_rate is None:
        return float("nan")
    if not stream.num_tokens:
        return 0.0
    read = read_times(stream)
    first_expected = stream.arrival_time + expected_ttft_s
    expected = first_expected + np.arange(stream.num_tokens) / stream.read_rate
    whole = np.maximum(read[-1] - expected, 0.0).sum()
    delay = np.maximum(read - expected, 0.0).sum()
    return float(1.0 - delay / whole) if whole > 0 else 1.0


def effective_goodput(
    streams: Sequence[Stream],
    *,
    ttft_limit_s: float = GOODPUT_TTFT_S,
    stall_limit_s: float = GOODPUT_STALL_S,
) -> float:
    """Tokens/s that came within their deadline (our definition).

    A stream whose first token came after `ttft_limit_s` counts nothing; of the others each token
    counts unless the reader had to wait more than `stall_limit_s` for it. The limit is on lateness,
    not on the gap between two tokens: a reader of 4 tokens/s has gaps of 250 ms by choice.
    """
    in_time = sum(
        s.num_tokens - int(np.count_nonzero(waits_s(s) > stall_limit_s))
        for s in streams
        if s.num_tokens and ttft_s(s) <= ttft_limit_s
    )
    return _per_second(in_time, span_s(streams))


def percentile(values: Iterable[float], q: float) -> float:
    """The smallest of `values` that at least `q` percent of them do not exceed (nearest rank).

    A value that really occurred, so P99 of fewer than 100 values is their maximum. Runs are
    pooled by passing all their values at once. NaN when there are none.
    """
    pooled = np.asarray(list(values), dtype=np.float64)
    if not len(pooled):
        return float("nan")
    return float(np.percentile(pooled, q, method="inverted_cdf"))


def share_with_visible_stall(streams: Sequence[Stream]) -> float:
    """Share 0..1 of the readers (streams with a read rate) that saw a stall over 250 ms."""
    readers = [s for s in streams if s.read_rate is not None]
    if not readers:
        return 0.0
    return sum(bool(np.any(waits_s(s) > CLIENT_VISIBLE_STALL_S)) for s in readers) / len(readers)


def _per_second(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0
