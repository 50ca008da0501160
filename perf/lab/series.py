"""What pictures of a run are drawn from: values over time, and every first token's wait.

Owns the sampling. Made from a run as measures.py makes numbers from it; kept apart from the records
because it is large. Invariant: `instants` rise in equal steps from 0 to the end of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from perf.lab.timeline import Timeline, on_grid
from tokenflow import metrics
from tokenflow.metrics import FloatArray, Stream

NUM_INSTANTS = 400
BANDS = (10.0, 50.0, 90.0)


@dataclass(frozen=True, kw_only=True)
class Series:
    """One run over time.

    ttfts: seconds to the first token, rising, of all who got one. instants: seconds from the first
    arrival [n]. running, waiting, paused: requests [n], see Timeline. unread_s: what readers in the
    middle of their answers have unread, in seconds of reading [len(BANDS), n]: these percentiles
    over readers; NaN while there are none.
    """

    ttfts: FloatArray
    instants: FloatArray
    running: FloatArray
    waiting: FloatArray
    paused: FloatArray
    unread_s: FloatArray


def series(streams: Sequence[Stream], timeline: Timeline) -> Series:
    """Those of one run."""
    start = min((s.arrival_time for s in streams), default=0.0)
    instants = np.linspace(0.0, metrics.span_s(streams), NUM_INSTANTS)
    at = start + instants
    times = timeline.step_end_times
    return Series(
        ttfts=np.sort([metrics.ttft_s(s) for s in streams if s.num_tokens]),
        instants=instants,
        running=on_grid(timeline.num_running, times, at),
        waiting=on_grid(timeline.num_waiting, times, at),
        paused=on_grid(timeline.num_paused, times, at),
        unread_s=_unread_s(streams, at),
    )


def _unread_s(streams: Sequence[Stream], at: FloatArray) -> FloatArray:
    rows = [_unread_of(s, at) for s in streams if s.read_rate is not None and s.num_tokens]
    bands = np.full((len(BANDS), len(at)), np.nan)
    if rows:
        unread = np.array(rows)
        there = ~np.isnan(unread).all(axis=0)
        bands[:, there] = np.nanpercentile(unread[:, there], BANDS, axis=0)
    return bands


def _unread_of(stream: Stream, at: FloatArray) -> FloatArray:
    """Seconds [n] that a reader could go on reading; NaN before its first token, and from the last
    one on: who has the whole answer can wait for nothing."""
    assert stream.read_rate is not None
    received = np.searchsorted(stream.token_times, at, side="right")
    read = np.searchsorted(metrics.read_times(stream), at, side="right")
    in_middle = (received > 0) & (received < stream.num_tokens)
    return np.where(in_middle, (received - read) / stream.read_rate, np.nan)
