"""Settings of a run, results of its sections, and the time that a section may take."""

from __future__ import annotations

import enum
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenflow.errors import TokenFlowError


class SuiteError(TokenFlowError):
    """A section cannot go on; the message is what the report says of it."""


class NotHere(TokenFlowError):
    """What a section looks at does not exist in this engine; the message says why."""


class Status(enum.Enum):
    """Of a section. SKIPPED: this engine does not have what it looks at."""

    PASSED = "passed"
    FAILED = "FAILED"
    SKIPPED = "skipped"


@dataclass(kw_only=True)
class Findings:
    """What a section found. faults: each makes it fail. remarks: worth reading, no fault.
    figures: plain values for the report."""

    figures: dict[str, Any] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class SectionResult:
    """A section as the report has it. log_tail: last lines of the engine's output, of one that
    failed."""

    name: str
    title: str
    status: Status
    duration_s: float
    figures: Mapping[str, Any] = field(default_factory=dict)
    faults: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    log_tail: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run is told.

    engine: folder of the built engine. is_short: fewer and shorter requests, a burst of seconds.
    tokenizer: folder with tokenizer.json, for prompts in English; None = tokens without meaning.
    parameters: further parameters of the server (`gpu_device_ids`, `executor_worker_path`, …).
    log_prob_tolerance: see compare.py; None = by the number types of the engine.
    section_limit_s: longest time of a section after its engines are loaded. load_limit_s: of a
    load.
    """

    engine: Path
    is_short: bool = False
    tokenizer: Path | None = None
    parameters: Mapping[str, str] = field(default_factory=dict)
    log_prob_tolerance: float | None = None
    section_limit_s: float = 300.0
    load_limit_s: float = 900.0


class Deadline:
    """The instant at which whoever still waits gives up."""

    def __init__(self, duration_s: float) -> None:
        self._duration_s = duration_s
        self.end_time = time.monotonic() + duration_s

    def check(self, what: str) -> None:
        """Raises SuiteError, naming `what` was waited for, when the time is over."""
        if time.monotonic() > self.end_time:
            raise SuiteError(f"{what}: not within {self._duration_s:g} s")
