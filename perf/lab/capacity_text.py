"""The capacity planner's table, for a terminal.

Owns order, wording and digits. Everything shown is in the record (capacity_report.py); nothing is
computed here but units.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from perf.lab.capacity_report import CAPACITY
from perf.lab.measures import Record
from perf.lab.tables import format_table

_GB = 1e9
_NOT_TRIED = "not tried (cap)"
_Text = Callable[[Mapping[str, Any]], str]


def _gb(key: str) -> _Text:
    return lambda record: f"{record[key] / _GB:,.1f} GB"


def _moved(record: Mapping[str, Any]) -> str:
    minutes = record["virtual_s"] / 60
    out, back = (record[key] / _GB / minutes for key in ("offload_bytes", "onboard_bytes"))
    return f"{out:,.1f} / {back:,.1f}"


_ROWS: tuple[tuple[str, _Text], ...] = (
    ("readers at once", lambda r: f"{r['num_readers']:,.0f}"),
    ("ΣR / Γ, tok/s", lambda r: f"{r['sum_rate']:,.0f} / {r['capacity']:,.0f}"),
    ("first token, P99", lambda r: f"{r['ttft_p99_s']:,.2f} s"),
    ("readers with a stall > 250 ms", lambda r: f"{r['share_stalled']:.1%}"),
    ("KV of running streams, most", _gb("kv_used_peak_bytes")),
    ("KV of paused streams, most", _gb("paused_peak_bytes")),
    ("host memory used, most", _gb("host_peak_bytes")),
    ("to the host / back, GB per minute", _moved),
    ("pauses", lambda r: f"{r['num_pauses']:,}"),
    ("tokens computed again", lambda r: f"{r['num_recomputed_tokens']:,}"),
)


def text(record: Record) -> str:
    """The record's main figures, for a terminal."""
    answers = record["answers"]
    unit = answers[0]["unit"]
    table = [["", *(one["policy"] for one in answers)]]
    table.append([f"{unit} kept", *map(_kept, answers)])
    table.append(["first that fails", *map(_failed, answers)])
    table.append(["uses the host tier", *("yes" if a["uses_host"] else "no" for a in answers)])
    table.append(["closed-form estimate", *(f"{one['estimated_load']:.3g}" for one in answers)])
    table += [
        [words, *("–" if one["load"] is None else show(one) for one in answers)]
        for words, show in _ROWS
    ]
    return "\n\n".join([_head(record), format_table(table), _how(record)])


def _kept(one: Mapping[str, Any]) -> str:
    if one["load"] is None:
        return "none"
    ratio = one["ratio_to_fcfs_reserve"]
    more = "" if one["failed_load"] is not None else "≥ "
    return f"{more}{one['load']:,g}" + ("" if ratio is None else f" ({ratio:.2f}×)")


def _failed(one: Mapping[str, Any]) -> str:
    if one["failed_load"] is None:
        return "none tried"
    if one["failed_by"] == [CAPACITY]:
        return _NOT_TRIED
    return f"{one['failed_load']:,g} ({', '.join(one['failed_by'])})"


def _head(record: Record) -> str:
    asked, machine = record["question"], record["machine"]
    gpus = asked["gpu"] if asked["tp"] == 1 else f"{asked['tp']} x {asked['gpu']}"
    return "\n".join(
        (
            f"{asked['model']} on {gpus}: weights {machine['weight_bytes'] / _GB:.1f} GB; KV pool "
            f"{machine['kv_pool_tokens']:,} tokens, {machine['kv_pool_bytes'] / _GB:.1f} GB "
            f"({machine['kv_bytes_per_token'] / 1e3:.1f} kB a token),",
            f"{machine['num_streams_in_pool']:,} streams at mid-life; {asked['max_batch_size']:,} "
            f"batch slots; host tier {asked['host_bytes'] / _GB:g} GB.",
            f"Arrivals: {_arrivals(asked['arrivals'])}. Readers of {asked['read_rate']:g} tok/s, "
            f"prompts of {asked['prompt_tokens']:g} and answers of {asked['output_tokens']:g} "
            "tokens in the mean.",
            f"P99 of the first token within {asked['ttft_target_s']:g} s, at most "
            f"{asked['max_share_stalled']:.1%} of the readers with a stall.",
        )
    )


def _arrivals(arrivals: Mapping[str, Any]) -> str:
    shape = [f"{name} {value:g}" for name, value in arrivals.items() if name != "kind"]
    return f"{arrivals['kind']} ({', '.join(shape)})" if shape else str(arrivals["kind"])


def _filling(record: Record) -> str:
    """How many streams a run begins with; not the same where only some policies reserve."""
    nums = sorted({one["num_filling_requests_per_seed"] for one in record["answers"]})
    return " or ".join(f"{num:,}" for num in nums)


def _how(record: Record) -> str:
    done, asked = record["simulated"], record["question"]
    seeds = ", ".join(map(str, asked["seeds"]))
    lines = [
        f"Simulated: {done['num_probes']} loads in {done['num_runs']} runs of seeds {seeds}, "
        f"{done['num_requests']:,} requests, {done['num_output_tokens']:,} tokens,",
        f"{done['virtual_s']:,.0f} s of virtual time; costs from first principles. The next larger "
        "load, which",
        f"failed or was not tried, is at most {asked['tolerance']:.0%} above the one kept. Answers "
        "end exactly at max_tokens,",
        "which every policy knows; in production it is an upper bound.",
    ]
    if done["max_share_held_back"] is not None:
        lines += [
            f"A run begins with {_filling(record)} streams in the middle of "
            f"their lives and a warm-up; {done['num_measured_requests']:,} requests are measured.",
            f"A load also fails if over {done['max_share_held_back']:.0%} of the requests wait or "
            "stand paused when arrivals end (held back).",
            f"{_NOT_TRIED}: over {done['max_share_of_estimate']:g} x the estimate; there the "
            "closed form limits the answer.",
        ]
    if asked["host_bytes"] and not all(one["uses_host"] for one in record["answers"]):
        lines.append(
            "Who does not use the host tier recomputes, as its field does; rows named -host "
            "give it to them."
        )
    if any(one["host_peak_bytes"] for one in record["answers"]):
        lines.append(
            "Host memory also keeps KV of ended requests; needed is that of paused streams."
        )
    return "\n".join(lines)
