"""Pictures of runs: first tokens, buffers and counts over time, and what each part is worth.

Owns colours and layout. Pure apart from the files that it writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import numpy as np
from matplotlib import pyplot as plt

from perf.lab.measures import Record
from perf.lab.series import BANDS, Series

INK, QUIET, GRID = "#1d2733", "#6b7785", "#e6eaee"
_OURS = ("#0b6e75", "#46adb0", "#1f5f8b")
_OTHERS = ("#e4572e", "#c98b2b", "#8a5fa8", "#7f7f7f", "#b04a5a", "#5b7f3a")
_DPI = 120
_MAX_BANDS = 3


def draw_runs(title: str, runs: Mapping[str, Series], path: Path) -> None:
    """Write a picture of runs on one set-up, a colour for each policy: the distribution of first
    tokens; what readers have unread; running requests; waiting and paused ones."""
    figure, axes = plt.subplots(2, 2, figsize=(13, 8))
    colours = _colours(list(runs))
    has_bands = len(runs) <= _MAX_BANDS
    for name, run in runs.items():
        _draw_first_tokens(axes[0][0], run, name, colours[name])
        _draw_unread(axes[0][1], run, colours[name], has_bands)
        axes[1][0].plot(run.instants, run.running, color=colours[name], linewidth=1.3)
        axes[1][1].plot(run.instants, run.waiting, color=colours[name], linewidth=1.3)
        axes[1][1].plot(run.instants, run.paused, color=colours[name], linewidth=1.3, linestyle=":")
    bands = f", P{BANDS[0]:.0f} to P{BANDS[-1]:.0f}" if has_bands else ""
    words = (
        ("share of requests with a first token by then", "seconds after arrival"),
        (f"unread, seconds of reading: median{bands}", "seconds"),
        ("requests in a step", "seconds"),
        ("requests that wait (full) or are paused (dotted)", "seconds"),
    )
    for axis, (above, below) in zip(axes.flat, words, strict=True):
        _dress(axis, above, below)
    axes[0][0].set_xscale("log")
    figure.legend(
        *axes[0][0].get_legend_handles_labels(),
        loc="lower center",
        ncols=min(len(runs), 7),
        frameon=False,
        fontsize=9,
        labelcolor=INK,
    )
    figure.suptitle(title, fontsize=12, color=INK, x=0.02, ha="left")
    _save(figure, path, bottom=0.05)


def draw_ablation(
    title: str,
    summaries: Mapping[str, Record],
    measures: Sequence[tuple[str, str]],
    path: Path,
) -> None:
    """Write bars: for each (key, words) of `measures` a panel, a bar for each policy, with its
    value; whiskers where there are intervals. A value that is None has no bar."""
    figure, axes = plt.subplots(1, len(measures), figsize=(4.2 * len(measures), 4.5), sharey=True)
    colours = _colours(list(summaries))
    names = list(summaries)
    for axis, (key, words) in zip(np.atleast_1d(axes), measures, strict=True):
        for row, name in enumerate(names):
            _draw_bar(axis, row, summaries[name], key, colours[name])
        axis.set_yticks(range(len(names)), names)
        axis.set_ylim(len(names) - 0.4, -0.6)
        axis.margins(x=0.2)
        _dress(axis, words, "")
    figure.suptitle(title, fontsize=12, color=INK, x=0.02, ha="left")
    _save(figure, path)


def _draw_first_tokens(axis: Any, run: Series, name: str, colour: str) -> None:
    shares = np.arange(1, len(run.ttfts) + 1) / max(1, len(run.ttfts))
    axis.step(run.ttfts, shares, where="post", color=colour, linewidth=1.6, label=name)


def _draw_unread(axis: Any, run: Series, colour: str, has_bands: bool) -> None:
    low, middle, high = run.unread_s
    axis.plot(run.instants, middle, color=colour, linewidth=1.5)
    if has_bands:
        axis.fill_between(run.instants, low, high, color=colour, alpha=0.15, linewidth=0)


def _draw_bar(axis: Any, row: int, summary: Record, key: str, colour: str) -> None:
    value = summary[key]
    if value is None:
        return
    axis.barh(row, value, height=0.66, color=colour)
    interval = summary.get("intervals", {}).get(key)
    if interval is not None:
        axis.plot(interval, [row, row], color=INK, linewidth=1.2)
    axis.annotate(
        f" {value:,.3g}" if abs(value) < 1000 else f" {value:,.0f}",
        (max(value, interval[1] if interval else value), row),
        va="center",
        fontsize=8,
        color=QUIET,
    )


def _colours(names: Sequence[str]) -> dict[str, str]:
    """Ours in one family of colours, all others in warm ones; the order decides which."""
    ours = [name for name in names if name.split("-")[0] == "tokenflow"]
    others = [name for name in names if name not in ours]
    return {
        **{name: _OURS[i % len(_OURS)] for i, name in enumerate(ours)},
        **{name: _OTHERS[i % len(_OTHERS)] for i, name in enumerate(others)},
    }


def _dress(axis: Any, above: str, below: str) -> None:
    axis.set_title(above, fontsize=10, color=QUIET, loc="left")
    axis.set_xlabel(below, fontsize=9, color=QUIET)
    axis.grid(color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axis.spines[side].set_color(GRID)
    axis.tick_params(colors=QUIET, length=0, labelsize=8)


def _save(figure: Any, path: Path, bottom: float = 0.0) -> None:
    figure.tight_layout(rect=(0.0, bottom, 1.0, 1.0))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_DPI, facecolor="white")
    plt.close(figure)
