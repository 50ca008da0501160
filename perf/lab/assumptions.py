"""What the laboratory's figures rest on: a set-up with one assumption of its cost model changed.

Owns the changes and how they are shown. Each is a set-up under a name of its own, so that it is run
and compared like any other; ratios are to the baseline under the same assumption. None of them is a
prediction: they show which figures hold whatever the costs, and which come from them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from perf.lab import setups, summary, tables
from perf.lab.lengths import Fixed, Normal
from perf.lab.measures import Record
from perf.lab.setups import Setup
from perf.lab.workloads import Singles

_FREE = 1e3
"""Times as fast: takes no time."""

_MUCH_OVERHEAD, _SOME_OVERHEAD = 3.0, 1.5
"""Times the overhead of a step."""

_CONTEXTS = (512, 4608)
"""KV tokens of each sequence at which the speed of decoding is shown."""


class Assumption(NamedTuple):
    """What is taken to be otherwise. Raises ValueError for a set-up that it cannot be said of."""

    words: str
    change: Callable[[Setup], Setup]


def _with_gpu(setup: Setup, **changes: float | bool) -> Setup:
    return dataclasses.replace(setup, gpu_changes=(*setup.gpu_changes, *changes.items()))


def _faster_link(setup: Setup, factor: float) -> Setup:
    return _with_gpu(setup, pcie_bytes_per_s=factor * setup.hardware.pcie_bytes_per_s)


def _more_overhead(setup: Setup, factor: float) -> Setup:
    return _with_gpu(setup, step_overhead_s=factor * setup.hardware.step_overhead_s)


def _free_decode(setup: Setup) -> Setup:
    return _with_gpu(setup, decode_computes=False)


def _free_copies(setup: Setup) -> Setup:
    return _faster_link(setup, _FREE)


def _all_alike(setup: Setup) -> Setup:
    match setup.workload:
        case Singles(prompts=Normal() as prompts, answers=Normal() as answers) as work:
            alike = dataclasses.replace(
                work, prompts=Fixed(round(prompts.mean)), answers=Fixed(round(answers.mean))
            )
            return dataclasses.replace(setup, workload=alike)
    raise ValueError(f"{setup.name} has no lengths that could be all alike")


def _simple(setup: Setup) -> Setup:
    return _more_overhead(_free_copies(_free_decode(setup)), _SOME_OVERHEAD)


_SIMPLE = f"memory traffic and {_SOME_OVERHEAD:g} times the overhead alone, no time for copies"

ASSUMPTIONS = (
    Assumption("as it is", lambda setup: setup),
    Assumption("the link is half as fast", lambda setup: _faster_link(setup, 0.5)),
    Assumption("copies take no time", _free_copies),
    Assumption(
        f"{_MUCH_OVERHEAD:g} times the overhead of a step",
        lambda setup: _more_overhead(setup, _MUCH_OVERHEAD),
    ),
    Assumption("decoding takes no arithmetic", _free_decode),
    Assumption("prompts all alike, answers all alike", _all_alike),
    Assumption(_SIMPLE, _simple),
    Assumption(f"{_SIMPLE}, all alike", lambda setup: _all_alike(_simple(setup))),
)


def assumed(setup: Setup) -> list[Setup]:
    """`setup` under each assumption, named after it. Raises ValueError where one does not apply."""
    return [
        dataclasses.replace(one.change(setup), name=f"{setup.name}, {one.words}")
        for one in ASSUMPTIONS
    ]


def decode_speeds(setup: Setup) -> Record:
    """Tokens/s that its engine decodes with a full pool, by KV tokens of each sequence."""
    machine, num_streams = setups.engine(setup), len(setups.requests(setup, 1))
    return {str(c): setups.decode_capacity(machine, num_streams, c) for c in _CONTEXTS}


def rows(result: Mapping[str, Any]) -> list[list[str]]:
    """Header and rows as text, for each set-up and each policy but the baseline; of what
    `perf.assumptions` wrote."""
    contexts = " / ".join(f"{context:,}" for context in _CONTEXTS)
    table = [
        [
            "set-up and assumption",
            "policy",
            f"decoded at {contexts} tokens of context",
            "first token, mean",
            "first token, P99",
            "effective throughput",
            "raw throughput",
            "raw bound",
            "readers with a stall > 250 ms",
        ]
    ]
    for cell in summary.by_cell(result["summaries"]):
        base = cell[summary.BASELINE]
        speeds = result["decode_speeds"][base["setup"]].values()
        decoded = " / ".join(f"{speed:,.0f}" for speed in speeds) + " tok/s"
        for name, record in cell.items():
            if record is base:
                continue
            figures = tables.figures(
                record,
                "first token, mean",
                "first token, P99",
                "effective throughput",
                "raw throughput",
            )
            (stalled,) = tables.figures(record, "readers with a stall > 250 ms")
            most = record["raw_bound"]
            bound = "–" if most is None else f"{most / base['raw_throughput']:.3f}×"
            table.append([record["setup"], name, decoded, *figures, bound, stalled])
    return table


def document(results: Sequence[Mapping[str, Any]]) -> str:
    """The tables of these files, for a document."""
    return "\n\n".join(tables.markdown(rows(result)) for result in results)
