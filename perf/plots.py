"""The demo's picture: what every reader had unread, and how long every newcomer waited.

Two columns on the same scales, first come first served beside tokenflow. Above, a line per reader:
tokens received and not yet read. Below, a bar per newcomer: waiting for its first token, then
reading. Pure apart from the file it writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import numpy as np
import numpy.typing as npt
from matplotlib import pyplot as plt

from perf.analysis import to_stream
from perf.client import ClientRecord, WorkloadRecord
from perf.workloads import NEWCOMER, READER
from tokenflow import metrics

TITLES = {"fcfs": "First come, first served", "tokenflow": "TokenFlow"}
INK, QUIET, GRID = "#1d2733", "#6b7785", "#e6eaee"
READER_COLOURS = (
    "#0b6e75", "#11868c", "#2a9aa0", "#46adb0", "#1f5f8b", "#3579a8", "#5593bf", "#79add0",
)  # fmt: skip
WAITING, READING, BURST, STALL = "#e4572e", "#bcd9d3", "#fdf0e3", "#c1121f"
_SAMPLE_S = 0.05


def unread_over_time(
    client: ClientRecord, instants: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Tokens that `client` had received and not read at each instant."""
    stream = to_stream(client)
    received = np.searchsorted(stream.token_times, instants, side="right")
    read = np.searchsorted(metrics.read_times(stream), instants, side="right")
    return np.asarray(received - read, dtype=np.float64)


def draw_demo(records: Mapping[str, WorkloadRecord], result: Mapping[str, Any], path: Path) -> None:
    """Write the picture of one run per policy; `result` is the content of demo.json."""
    names = list(TITLES)
    figure, axes = plt.subplots(
        2, 2, figsize=(13, 8), sharex=True, sharey="row", height_ratios=(3, 2)
    )
    end_s = max(
        client.token_times[-1] - record.start_time
        for record in records.values()
        for client in record.clients
    )
    for column, name in enumerate(names):
        record = records[name]
        _draw_readers(axes[0][column], record, end_s)
        _draw_newcomers(axes[1][column], record)
        for axis in axes[:, column]:
            _dress(axis, record)
        _caption(axes[0][column], TITLES[name], result[name])
    axes[0][0].set_ylabel("tokens waiting to be read,\none line per reader", color=INK)
    axes[1][0].set_ylabel("newcomers of the burst", color=INK)
    axes[1][0].set_xlim(0, end_s * 1.02)
    for axis in axes[1]:
        axis.set_xlabel("seconds", color=QUIET)
    _legend(figure)
    figure.subplots_adjust(
        left=0.075, right=0.985, top=0.86, bottom=0.115, hspace=0.08, wspace=0.06
    )
    figure.savefig(path, dpi=130, facecolor="white")
    plt.close(figure)


def _draw_readers(axis: Any, record: WorkloadRecord, end_s: float) -> None:
    instants = record.start_time + np.arange(0, end_s, _SAMPLE_S)
    readers = [client for client in record.clients if client.kind == READER]
    for index, client in enumerate(readers):
        colour = READER_COLOURS[index % len(READER_COLOURS)]
        unread = unread_over_time(client, instants)
        axis.plot(instants - record.start_time, unread, color=colour, linewidth=1.6)
    for client in record.clients:
        for stall in metrics.stalls(to_stream(client), metrics.CLIENT_VISIBLE_STALL_S):
            at = stall.wanted_time - record.start_time
            axis.plot([at], [0], marker="x", color=STALL, markersize=8, markeredgewidth=2)
    axis.set_ylim(bottom=-4)


def _draw_newcomers(axis: Any, record: WorkloadRecord) -> None:
    newcomers = [client for client in record.clients if client.kind == NEWCOMER]
    for row, client in enumerate(newcomers):
        sent = client.send_time - record.start_time
        first = client.token_times[0] - record.start_time
        last = client.token_times[-1] - record.start_time
        axis.barh(row, last - first, left=first, height=0.66, color=READING)
        axis.barh(row, first - sent, left=sent, height=0.66, color=WAITING)
    axis.set_ylim(len(newcomers) - 0.4, -0.6)
    axis.set_yticks([])


def _burst_span(clients: Sequence[ClientRecord]) -> tuple[float, float]:
    times = [client.send_time for client in clients if client.kind == NEWCOMER]
    return min(times), max(times)


def _dress(axis: Any, record: WorkloadRecord) -> None:
    start, end = _burst_span(record.clients)
    axis.axvspan(
        start - record.start_time, end - record.start_time, color=BURST, zorder=0, linewidth=0
    )
    axis.grid(axis="x", color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.spines["bottom"].set_color(GRID)
    axis.tick_params(colors=QUIET, length=0)


def _caption(axis: Any, title: str, summary: Mapping[str, Any]) -> None:
    num_stalls = summary["stalls_over_250ms"]
    stalls = "nobody stalls" if num_stalls == 0 else f"{num_stalls} visible stalls"
    axis.text(0, 1.15, title, transform=axis.transAxes, fontsize=17, fontweight="bold", color=INK)
    axis.text(
        0,
        1.045,
        f"newcomers' first word after {summary['ttft_p50_s']:.1f} s, "
        f"at worst {summary['ttft_worst_s']:.1f} s  ·  {stalls}  ·  "
        f"{summary['raw_throughput']:.0f} tokens/s",
        transform=axis.transAxes,
        fontsize=10,
        color=QUIET,
    )


def _legend(figure: Any) -> None:
    def patch(colour: str, words: str) -> Any:
        return plt.Rectangle((0, 0), 1, 1, color=colour, label=words)

    handles = [
        patch(BURST, "burst arrives"),
        plt.Line2D([], [], color=READER_COLOURS[1], linewidth=2, label="unread by one reader"),
        patch(WAITING, "newcomer waits for its first word"),
        patch(READING, "newcomer's answer streams"),
        plt.Line2D(
            [], [], color=STALL, marker="x", linewidth=0, markeredgewidth=2, label="stall > 250 ms"
        ),
    ]
    figure.legend(
        handles=handles, loc="lower center", ncols=5, frameon=False, fontsize=10, labelcolor=INK
    )
