"""The one file of a run: what a person reads, and below it the same as JSON.

Owns the format. `read_report` gives the JSON of a file back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from perf.trtllm_suite.environment import is_double
from perf.trtllm_suite.values import SectionResult, Status

FORMAT = 1
JSON_MARK = "----- JSON -----"
DOUBLE_WORDS = (
    "This ran on the DOUBLE of TensorRT-LLM's bindings, without TensorRT-LLM and without a GPU: it "
    "shows that the program works, and nothing about a GPU."
)


@dataclass(frozen=True, kw_only=True)
class Report:
    """A run. date: UTC. problems: why it was not even begun."""

    date: str
    form: str
    machine: Mapping[str, Any]
    versions: Mapping[str, str | None]
    engine: Mapping[str, Any]
    sections: Sequence[SectionResult] = ()
    problems: Sequence[str] = ()

    @property
    def failed(self) -> list[str]:
        """Names of the sections that failed."""
        return [s.name for s in self.sections if s.status is Status.FAILED]

    @property
    def exit_code(self) -> int:
        """0: nothing failed; 1: a section did; 2: the run was not begun."""
        if self.problems:
            return 2
        return 1 if self.failed or not self.sections else 0

    def values(self) -> dict[str, Any]:
        """All of it, plain."""
        return {
            "format": FORMAT,
            "date": self.date,
            "form": self.form,
            "is_double": is_double(self.versions),
            "result": ("passed", "failed", "not begun")[self.exit_code],
            "failed": self.failed,
            "problems": list(self.problems),
            "machine": dict(self.machine),
            "versions": dict(self.versions),
            "engine": dict(self.engine),
            "sections": [
                {**asdict(section), "status": section.status.value} for section in self.sections
            ],
        }

    def text(self) -> str:
        """For a person; ends with what failed."""
        lines = [f"TokenFlow on TensorRT-LLM: {self.form} form, {self.date}", ""]
        if is_double(self.versions):
            lines += [DOUBLE_WORDS, ""]
        lines += [*self._machine_lines(), ""]
        for section in self.sections:
            lines += _section_lines(section)
        lines += ["", *self._verdict()]
        return "\n".join(lines)

    def _machine_lines(self) -> list[str]:
        cards = self.machine.get("cards") or []
        lines = [
            f"card      {card['name']}, {card['memory.total']}, driver {card['driver_version']}"
            for card in cards
        ] or ["card      none that nvidia-smi tells of"]
        lines.append(
            "versions  " + ", ".join(f"{k} {v}" for k, v in self.versions.items() if v is not None)
        )
        names = ("architecture", "dtype", "quantization", "built_with", "world_size",
                 "tokens_per_block", "max_batch_size", "max_seq_len")  # fmt: skip
        lines.append("engine    " + ", ".join(f"{n} {self.engine.get(n)}" for n in names))
        if self.engine.get("manifest"):
            lines.append("          its manifest is in the JSON")
        return lines

    def _verdict(self) -> list[str]:
        if self.problems:
            return ["NOT BEGUN", *(f"  {problem}" for problem in self.problems)]
        num_skipped = sum(s.status is Status.SKIPPED for s in self.sections)
        words = f"{len(self.sections)} sections, {num_skipped} skipped"
        if not self.failed:
            return [f"PASSED: {words}, none failed"]
        return [
            f"FAILED: {', '.join(self.failed)} ({words})",
            *(f"  {s.name}: {fault}" for s in self.sections for fault in s.faults),
        ]


def _section_lines(section: SectionResult) -> list[str]:
    lines = [f"{section.status.value:<8}  {section.name:<10} {section.title} "
             f"({section.duration_s:g} s)"]  # fmt: skip
    for name, value in section.figures.items():
        lines += _figure_lines(name, value)
    lines += [f"            note: {remark}" for remark in section.remarks]
    lines += [f"            WRONG: {fault}" for fault in section.faults]
    if section.log_tail:
        lines.append("            last lines of the engines' output:")
        lines += [f"            | {line}" for line in section.log_tail]
    return lines


def _figure_lines(name: str, value: Any) -> list[str]:
    indent = " " * 12
    if isinstance(value, Mapping):
        inner = ", ".join(f"{k} {v}" for k, v in value.items())
        return [f"{indent}{name}: {inner}"]
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        rows = [" ".join(f"{k}={v}" for k, v in row.items()) for row in value]
        return [f"{indent}{name}:", *(f"{indent}  {row}" for row in rows)]
    return [f"{indent}{name}: {value}"]


def write_report(report: Report, path: Path) -> None:
    """Write the file, whole or not at all. Raises OSError."""
    partial = path.with_name(path.name + ".partial")
    text = f"{report.text()}\n\n{JSON_MARK}\n{json.dumps(report.values(), indent=1)}\n"
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def read_report(path: Path) -> dict[str, Any]:
    """The JSON of a report. Raises ValueError for a file that is none."""
    _, mark, text = path.read_text(encoding="utf-8").partition(f"\n{JSON_MARK}\n")
    if not mark:
        raise ValueError(f"{path} is no report: it has no line {JSON_MARK!r}")
    values: dict[str, Any] = json.loads(text)
    return values
