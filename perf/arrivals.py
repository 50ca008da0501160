"""How soon a burst of arrivals is noticed and forgotten, and how often one is seen that is none.

`python -m perf.arrivals [--json]`. Seeded arrivals of several kinds at rates from 0.2 to 20/s go
through `tokenflow.arrivals`:

- *steady*: Poisson arrivals; every burst seen is a false alarm, counted per 1,000 arrivals;
- *step*: Poisson arrivals at the usual rate, then at 10, 30 or 100 times that rate until the burst
  is seen: after how many arrivals and seconds (median, and the 90th percentile of arrivals; 17 =
  not within the 16 of a burst), and how many bursts are over before; then, after 16 arrivals at 100
  times the rate and the usual one again, seconds until it is forgotten (median, 95th percentile);
- *gamma*: gaps of the same mean with a coefficient of variation of 4: bursts seen per 1,000
  arrivals (here they are real), and the share of all arrivals that came while one was seen;
- *on/off*: silence and bursts of 16 arrivals in turn: the share of bursts that are seen, and the
  arrivals of a burst until it is.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence

from tokenflow.arrivals import ArrivalAverages

RATES = (0.2, 1.0, 5.0, 20.0)
FACTORS = (10, 30, 100)
_BURST = 16
_MISSED = _BURST + 1
_NUM_BLOCKS = 4
_LOOK_S = 0.02

Gaps = Callable[[random.Random], float]


def poisson(rate: float) -> Gaps:
    """Gaps of arrivals at random, `rate` per second."""
    return lambda rng: rng.expovariate(rate)


def gamma(rate: float, cv: float = 4.0) -> Gaps:
    """Gamma-distributed gaps of mean 1/rate and coefficient of variation `cv`."""
    shape = 1.0 / cv**2
    return lambda rng: rng.gammavariate(shape, 1.0 / (rate * shape))


def onsets(gaps: Gaps, num: int, seed: int) -> tuple[int, int]:
    """(bursts seen, arrivals that came while one was seen) among `num` arrivals, after a quarter as
    many to learn what is usual."""
    rng, averages, now = random.Random(seed), ArrivalAverages(), 0.0
    num_onsets = num_inside = 0
    for i in range(num // 4 + num):
        now += gaps(rng)
        before = averages.estimate(now).burst
        averages.observe(now, _NUM_BLOCKS)
        inside = averages.estimate(now).burst
        if i >= num // 4:
            num_onsets += inside and not before
            num_inside += inside
    return num_onsets, num_inside


def noticed(rate: float, factor: float, seed: int) -> tuple[int | None, float]:
    """(arrivals, seconds) from the first fast arrival until the burst is seen; None: not within
    `_BURST` arrivals."""
    averages, rng, start = _usual(rate, seed)
    now = start
    for num in range(1, _BURST + 1):
        averages.observe(now, _NUM_BLOCKS)
        if averages.estimate(now).burst:
            return num, now - start
        now += rng.expovariate(rate * factor)
    return None, now - start


def forgotten_s(rate: float, factor: float, seed: int) -> float | None:
    """Seconds from the last fast arrival until the burst is over, the usual ones going on; None
    where it was not seen."""
    averages, rng, now = _usual(rate, seed)
    for _ in range(_BURST):
        averages.observe(now, _NUM_BLOCKS)
        last = now
        now += rng.expovariate(rate * factor)
    if not averages.estimate(last).burst:
        return None
    now = last
    arrival = now + rng.expovariate(rate)
    while averages.estimate(now).burst:
        now += _LOOK_S
        while arrival <= now:
            averages.observe(arrival, _NUM_BLOCKS)
            arrival += rng.expovariate(rate)
    return now - last


def on_off(rate: float, num_bursts: int, seed: int) -> Iterator[int | None]:
    """Arrivals of each burst until it is seen (None: not seen): 16 arrivals at 20 times the mean
    rate, then silence that brings the mean to `rate`."""
    rng, averages, now = random.Random(seed), ArrivalAverages(), 0.0
    for _ in range(num_bursts):
        seen: int | None = None
        for num in range(1, _BURST + 1):
            now += rng.expovariate(20 * rate)
            averages.observe(now, _NUM_BLOCKS)
            if seen is None and averages.estimate(now).burst:
                seen = num
        yield seen
        now += _BURST * (1 / rate - 1 / (20 * rate))


def _usual(rate: float, seed: int) -> tuple[ArrivalAverages, random.Random, float]:
    """Averages that know the usual rate, and the instant of the next arrival."""
    rng, averages, now = random.Random(seed), ArrivalAverages(), 0.0
    for _ in range(int(max(30, 60 * rate))):
        now += rng.expovariate(rate)
        averages.observe(now, _NUM_BLOCKS)
    return averages, rng, now + rng.expovariate(rate)


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of them lie; NaN for none."""
    ordered = sorted(values)
    return ordered[int(share * (len(ordered) - 1))] if ordered else float("nan")


def measure(rate: float, num: int = 4_000, num_runs: int = 200) -> dict[str, float]:
    """All figures at one rate; keys name them."""
    row: dict[str, float] = {"rate": rate}
    row["false_alarms"] = 1_000 * onsets(poisson(rate), num, seed=1)[0] / num
    for factor in FACTORS:
        seen = [noticed(rate, factor, seed) for seed in range(num_runs)]
        arrivals = [float(_MISSED if n is None else n) for n, _ in seen]
        row[f"x{factor}_arrivals"] = quantile(arrivals, 0.5)
        row[f"x{factor}_arrivals_p90"] = quantile(arrivals, 0.9)
        row[f"x{factor}_seconds"] = round(quantile([s for n, s in seen if n is not None], 0.5), 4)
        row[f"x{factor}_missed"] = arrivals.count(_MISSED) / num_runs
    ends = [forgotten_s(rate, 100, seed) for seed in range(num_runs)]
    known = [end for end in ends if end is not None]
    row["forgotten_s"] = round(quantile(known, 0.5), 2)
    row["forgotten_s_p95"] = round(quantile(known, 0.95), 2)
    num_onsets, num_inside = onsets(gamma(rate), num, seed=2)
    row["gamma_bursts"] = 1_000 * num_onsets / num
    row["gamma_share"] = round(num_inside / num, 3)
    cycles = list(on_off(rate, 50, seed=3))
    found = [float(n) for n in cycles if n is not None]
    row["on_off_seen"] = len(found) / len(cycles)
    row["on_off_arrivals"] = quantile(found, 0.5)
    return row


def format_table(rows: Sequence[dict[str, float]]) -> str:
    """The rows for a terminal."""
    steps = "".join(f"{f'x{factor}: arr. (p90)    s missed':>30}" for factor in FACTORS)
    lines = [
        f"{'rate':>6} {'false/1000':>10}{steps} {'forgotten s (p95)':>18} "
        f"{'gamma/1000 share':>17} {'on/off seen arr.':>17}"
    ]
    for row in rows:
        cells = "".join(
            f"{row[f'x{f}_arrivals']:>12.0f} ({row[f'x{f}_arrivals_p90']:>3.0f}) "
            f"{row[f'x{f}_seconds']:>5.2f} {row[f'x{f}_missed']:>6.0%}"
            for f in FACTORS
        )
        lines.append(
            f"{row['rate']:>6} {row['false_alarms']:>10.1f}{cells} "
            f"{row['forgotten_s']:>10.2f} ({row['forgotten_s_p95']:.2f}) "
            f"{row['gamma_bursts']:>10.1f} {row['gamma_share']:>6.1%} "
            f"{row['on_off_seen']:>10.0%} {row['on_off_arrivals']:>6.0f}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all rates and print."""
    parser = argparse.ArgumentParser(prog="python -m perf.arrivals", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    args = parser.parse_args(argv)
    rows = [measure(rate) for rate in RATES]
    print(json.dumps({"rows": rows}, indent=2) if args.json else format_table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
