"""How many readers a GPU keeps supplied: what `tokenflow size` runs.

Owns the way from the command's flags (tokenflow/cli/size.py) to a question, and what is refused:
each refusal is a ConfigError that names the flag and its limit. The answer is searched in virtual
time (perf/lab/capacity.py). Same arguments, same output; progress goes to stderr.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable

from build_engines.model_shapes import MODELS
from perf import simulate
from perf.lab.capacity import Machine, Question, answer, fastest_stream, first_token_s
from perf.lab.capacity_report import to_record
from perf.lab.capacity_text import text
from perf.lab.gpus import GPUS
from perf.lab.load_probe import Limits, Probe
from perf.lab.mixes import READ_RATE_BOUNDS
from perf.lab.planned_loads import InTurns, LoadKind, OneBurst, Readers, Steady
from perf.lab.policies import PolicyRow, policies
from perf.lab.setups import MAX_HOST_GB
from tokenflow.errors import ConfigError

_GB = 1e9
_MAX_TP = 64
_SHAPE_FLAGS = {
    "poisson": (),
    "gamma": ("cv",),
    "burst": ("requests",),
    "onoff": ("off_s", "on_s", "peak"),
}
"""Flags that only some kinds of arrivals have; `requests` is the one that a burst has not."""


def run(arguments: argparse.Namespace) -> int:
    """Answer and print. Raises ConfigError."""
    question = question_of(arguments)
    rows = _rows(arguments.policies)
    _check_engines(question, rows)
    answers = [answer(question, row, done=say) for row in rows]
    record = to_record(question, answers)
    if arguments.json:
        json.dump(record, sys.stdout, indent=1, allow_nan=False)
        print()
    else:
        print(text(record))
    return 0


def say(row: PolicyRow, probe: Probe) -> None:
    """A line of progress on stderr."""
    verdict = "kept" if probe.passes else f"too much: {', '.join(probe.reasons)}"
    seeds = f"{len(probe.runs)} of {probe.num_seeds} seeds"
    print(f"{row.name}: {probe.load:,g} ({seeds}): {verdict}", file=sys.stderr, flush=True)


def question_of(arguments: argparse.Namespace) -> Question:
    """What the flags ask. Raises ConfigError for what makes no sense or can never be served."""
    max_batch_size = int(_within("--max-batch-size", arguments.max_batch_size, 1, 4096))
    # A step has room for a token of each sequence.
    least_num_tokens = max(16, max_batch_size)
    machine = Machine(
        gpu=_one_of("--gpu", arguments.gpu, GPUS),
        model=_one_of("--model", arguments.model, MODELS),
        tp=int(_within("--tp", arguments.tp, 1, _MAX_TP)),
        memory_fraction=_within("--memory-fraction", arguments.memory_fraction, 0.01, 1),
        host_bytes=_GB * _within("--host-gb", arguments.host_gb, 0, MAX_HOST_GB),
        max_batch_size=max_batch_size,
        max_num_tokens=int(
            _within("--max-num-tokens", arguments.max_num_tokens, least_num_tokens, 1 << 20)
        ),
    )
    readers = Readers(
        rate=_within("--rate", arguments.rate, *READ_RATE_BOUNDS),
        prompt_tokens=_within("--prompt-tokens", arguments.prompt_tokens, 16, 1e6),
        answer_tokens=_within("--output-tokens", arguments.output_tokens, 16, 1e6),
    )
    question = Question(
        machine=machine,
        readers=readers,
        kind=_kind(arguments),
        limits=Limits(
            ttft_target_s=_within("--ttft-target", arguments.ttft_target, 0.001, 3600),
            max_share_stalled=_within("--max-stalled", arguments.max_stalled, 0, 1),
        ),
        seeds=_seeds(arguments.seeds),
        num_measured=int(_within("--requests", _given(arguments.requests, 200), 10, 1e5)),
    )
    _check_room(question)
    _check_speed(question)
    return question


def _kind(arguments: argparse.Namespace) -> LoadKind:
    kind = _one_of("--arrivals", arguments.arrivals, _SHAPE_FLAGS)
    for other, names in _SHAPE_FLAGS.items():
        for name in names:
            fits = (kind == other) != (name == "requests")
            if getattr(arguments, name) is not None and not fits:
                raise ConfigError(f"--{name.replace('_', '-')}", f"not with --arrivals {kind}")
    if kind == "burst":
        return OneBurst()
    if kind == "onoff":
        off_s = _within("--off-s", _given(arguments.off_s, 20.0), 0.1, 3600)
        on_s = _within("--on-s", _given(arguments.on_s, 10.0), 0.1, 3600)
        most = (off_s + on_s) / on_s
        peak = _within("--peak", _given(arguments.peak, min(2.0, most)), 1, most)
        return InTurns(off_s=off_s, on_s=on_s, peak=peak)
    default_cv = 1.0 if kind == "poisson" else 2.0
    return Steady(cv=_within("--cv", _given(arguments.cv, default_cv), 0.1, 10))


def _check_room(question: Question) -> None:
    """Weights and the longest sequence must fit; else say on how many GPUs they do."""
    machine = question.machine
    if _has_room(question, machine.tp):
        return
    more = range(machine.tp + 1, _MAX_TP + 1)
    enough = next((tp for tp in more if _has_room(question, tp)), None)
    model = MODELS[machine.model]
    where = f"{_gpus(machine)} at --memory-fraction {machine.memory_fraction:g}"
    if _is_split(machine, machine.tp):
        what = (
            f"{machine.model} ({model.weight_bytes / _GB:.1f} GB) and a sequence of "
            f"{question.longest:,} tokens (twice the mean) do not fit on {where}"
        )
    else:
        what = f"{machine.model} cannot be split over {machine.tp} GPUs"
    advice = f"no number of GPUs up to {_MAX_TP} does" if enough is None else f"--tp {enough} does"
    raise ConfigError("--tp", f"{what}; {advice}")


def _gpus(machine: Machine) -> str:
    return f"{machine.tp} {machine.gpu}"


def _has_room(question: Question, tp: int) -> bool:
    machine = _with_tp(question.machine, tp)
    try:
        return _is_split(machine, tp) and machine.pool_tokens > question.longest
    except ValueError:
        return False


def _is_split(machine: Machine, tp: int) -> bool:
    try:
        _with_tp(machine, tp).costs.decode_s(1, 1)
    except ValueError:
        return False
    return True


def _with_tp(machine: Machine, tp: int) -> Machine:
    return dataclasses.replace(machine, tp=tp)


def _check_speed(question: Question) -> None:
    """One reader alone must be served, or no load can be."""
    fastest = fastest_stream(question)
    if question.readers.rate > fastest:
        raise ConfigError(
            "--rate",
            f"{question.readers.rate:g} tokens/s are more than one stream alone gets on "
            f"{_gpus(question.machine)}, {fastest:,.0f}; no load can be served",
        )
    alone = first_token_s(question)
    if question.limits.ttft_target_s <= alone:
        raise ConfigError(
            "--ttft-target",
            f"{question.limits.ttft_target_s:g} s are less than the prefill of one prompt takes "
            f"on {_gpus(question.machine)}, {alone:.3f} s; no load can meet it",
        )


def _rows(names: str) -> list[PolicyRow]:
    try:
        rows = policies(dict.fromkeys(simulate.comma_separated(names)))
    except ValueError as error:
        raise ConfigError("--policies", str(error)) from None
    if not rows:
        raise ConfigError("--policies", "needs a name")
    for row in rows:
        if row.num_machines > 1:
            raise ConfigError("--policies", f"{row.name} needs {row.num_machines} machines, not 1")
    return rows


def _check_engines(question: Question, rows: Iterable[PolicyRow]) -> None:
    """Some need more of the machine: without chunks a step holds the longest sequence."""
    for row in rows:
        try:
            row.check(question.engine())
        except ConfigError as error:
            raise ConfigError("--policies", f"{row.name} cannot run here: {error}") from None


def _seeds(value: str) -> tuple[int, ...]:
    try:
        return tuple(simulate.seeds(value))
    except (ValueError, argparse.ArgumentTypeError):
        raise ConfigError("--seeds", f"must be like 1, 1,2,5 or 1-3, got {value!r}") from None


def _one_of(flag: str, value: str, names: Iterable[str]) -> str:
    known = list(names)
    if value not in known:
        raise ConfigError(flag, f"must be one of {', '.join(known)}, got {value!r}")
    return value


def _within(flag: str, value: float, low: float, high: float) -> float:
    if not low <= value <= high:
        raise ConfigError(flag, f"must be in [{low:g}, {high:g}], got {value:g}")
    return value


def _given(value: float | None, default: float) -> float:
    return default if value is None else value
