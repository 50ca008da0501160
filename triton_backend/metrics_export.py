"""Gauges, counters and the TTFT histogram on the server's /metrics.

Owns the metric objects. Invariant: they are made and touched by one thread only, the sender's; an
object used from two threads brings the whole server down. Hence they are made at the first update.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from tokenflow.runtime import RuntimeGauges
from triton_backend.kv_metrics import KV_COUNTERS, KV_GAUGES, kv_values

TTFT_BUCKETS_S = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 60.0)

_GAUGES = (
    ("tokenflow_active_requests", "Unfinished requests, each in one state; those being cancelled "
     "count as running until the engine let go", "state",
     {"waiting": "num_waiting", "running": "num_running", "paused": "num_paused"}),
    ("tokenflow_held_requests", "Those of the active requests that their client holds paused", None,
     {"": "num_held"}),
    *KV_GAUGES,
    ("tokenflow_healthy", "1 while the engine serves, else 0", None, {"": "healthy"}),
)  # fmt: skip
_COUNTERS = (
    ("tokenflow_requests_total", "Ended requests, each with one outcome", "outcome",
     {"ok": "num_ok", "failed": "num_failed", "cancelled": "num_cancelled",
      "timeout": "num_timed_out"}),
    ("tokenflow_requests_overloaded_total", "Requests refused or given up as overloaded "
     "(failed ones too)", None, {"": "num_overloaded"}),
    ("tokenflow_pauses_total", "Pauses of streams: planned (by the scheduler, or asked for by the "
     "client), forced by the scheduler against their slack, and internal to the engine", "kind",
     {"planned": "num_planned_pauses", "forced": "num_forced_pauses",
      "internal": "num_internal_pauses"}),
    ("tokenflow_resumes_total", "Resumes of paused streams by where their KV came from, as far as "
     "their runs have ended", "from",
     {"cache": "num_resumes_from_cache", "host": "num_resumes_from_host",
      "recompute": "num_resumes_recomputed"}),
    ("tokenflow_recomputed_tokens_total", "Tokens whose KV a resume had to compute again", None,
     {"": "num_recomputed_tokens"}),
    *KV_COUNTERS,
    ("tokenflow_lease_ends_total", "Leases that ended while their request went on", None,
     {"": "num_lease_ends"}),
    ("tokenflow_engine_losses_total", "Engines that ended or stood still while serving", None,
     {"": "num_engine_losses"}),
    ("tokenflow_recovered_requests_total", "Requests that a lost engine held and that went on",
     None, {"": "num_recovered"}),
    ("tokenflow_output_tokens_total", "Generated tokens", None, {"": "num_output_tokens"}),
)  # fmt: skip


class MetricsSource(Protocol):
    """The runtime, as metrics see it."""

    def gauges(self) -> RuntimeGauges: ...

    def drain_ttft_s(self) -> list[float]: ...


@dataclass(frozen=True, slots=True)
class MetricKinds:
    """Triton's metric family class with its kind constants (a fake in tests)."""

    family: Any
    gauge: Any
    counter: Any
    histogram: Any


class MetricsExporter:
    """`update` copies the runtime's numbers; call it from one thread only.

    labels: on every metric, e.g. model and version.
    """

    def __init__(
        self, kinds: MetricKinds, source: MetricsSource, labels: Mapping[str, str]
    ) -> None:
        self._kinds = kinds
        self._source = source
        self._labels = dict(labels)
        self._families: list[Any] = []  # a metric is unregistered when its family is collected
        self._gauges: list[tuple[str, Any]] = []
        self._counters: list[tuple[str, Any]] = []
        self._ttft: Any = None
        self._totals: dict[str, float] = {}

    def update(self) -> None:
        """Set the gauges, add to the counters what came since the last call."""
        if self._ttft is None:
            self._make()
        values = _values(self._source.gauges())
        for name, metric in self._gauges:
            metric.set(values[name])
        for name, metric in self._counters:
            delta = values[name] - self._totals.get(name, 0.0)
            if delta > 0:
                metric.increment(delta)
                self._totals[name] = values[name]
        for ttft_s in self._source.drain_ttft_s():
            self._ttft.observe(ttft_s)

    def _make(self) -> None:
        for name, help, label, fields in _GAUGES:
            self._gauges += self._make_family(name, help, self._kinds.gauge, label, fields)
        for name, help, label, fields in _COUNTERS:
            self._counters += self._make_family(name, help, self._kinds.counter, label, fields)
        family = self._kinds.family(
            name="tokenflow_ttft_seconds",
            description="Time from arrival to the first token, by the server's clock",
            kind=self._kinds.histogram,
        )
        self._families.append(family)
        self._ttft = family.Metric(labels=self._labels, buckets=list(TTFT_BUCKETS_S))

    def _make_family(
        self, name: str, help: str, kind: Any, label: str | None, fields: Mapping[str, str]
    ) -> list[tuple[str, Any]]:
        family = self._kinds.family(name=name, description=help, kind=kind)
        self._families.append(family)
        return [
            (field, family.Metric(labels={**self._labels, **({label: value} if label else {})}))
            for value, field in fields.items()
        ]


def _values(gauges: RuntimeGauges) -> dict[str, float]:
    counters = gauges.counters
    values = kv_values(gauges)
    values["num_planned_pauses"] = float(counters.num_pauses - counters.num_forced_pauses)
    names = {field for _, _, _, fields in (*_GAUGES, *_COUNTERS) for field in fields.values()}
    for name in names - values.keys():
        values[name] = float(getattr(counters if hasattr(counters, name) else gauges, name))
    return values
