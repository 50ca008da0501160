"""The program: `python -m perf.trtllm_suite ENGINE [--short] …`, which perf/verify_trtllm.sh runs.

Owns the order of a run: what is there, then the sections, then the report. The report is written
after each section, so that a run that is stopped leaves what it had. Exit code: 0 nothing failed, 1
a section failed, 2 the run was not begun.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from perf.trtllm_suite.engines import Engines
from perf.trtllm_suite.environment import (
    describe_engine,
    describe_machine,
    describe_versions,
    is_double,
)
from perf.trtllm_suite.report import Report, write_report
from perf.trtllm_suite.sections import SECTIONS, Section, run_section
from perf.trtllm_suite.values import SectionResult, Settings
from tokenflow.errors import TokenFlowError

DEFAULT_OUTPUT = Path("tokenflow-trtllm-report.txt")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and write the report; returns the exit code."""
    options = _parse(arguments)
    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s: %(message)s")
    settings = Settings(
        engine=options.engine.resolve(),
        is_short=options.short,
        tokenizer=options.tokenizer or find_tokenizer(options.engine),
        parameters=dict(options.settings),
        log_prob_tolerance=options.log_prob_tolerance,
        section_limit_s=options.section_limit_s,
        load_limit_s=options.load_limit_s,
    )
    sections = [s for s in SECTIONS if not options.sections or s.name in options.sections]
    report = run(settings, sections, options.output)
    print(report.text())
    print(f"\nreport: {options.output}")
    return report.exit_code


def find_tokenizer(engine: Path) -> Path | None:
    """The folder that `tokenflow build` leaves beside the engine's; None where there is none."""
    folder = engine.resolve().parent / "tokenizer"
    return folder if (folder / "tokenizer.json").is_file() else None


def run(settings: Settings, sections: Sequence[Section], output: Path) -> Report:
    """All `sections`; the report, which is in `output` too."""
    date = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    machine, versions = describe_machine(os.environ), describe_versions()
    problems: list[str] = []
    if versions["tensorrt_llm"] is None:
        problems.append("tensorrt_llm cannot be imported by this Python")
    elif not machine["cards"] and not is_double(versions):
        problems.append("nvidia-smi tells of no GPU: run the container with --gpus all")
    results: list[SectionResult] = []
    engine: dict[str, object] = {}

    def written() -> Report:
        report = Report(
            date=date, form="short" if settings.is_short else "full", machine=machine,
            versions=versions, engine=engine, sections=tuple(results), problems=tuple(problems),
        )  # fmt: skip
        write_report(report, output)
        return report

    with tempfile.TemporaryDirectory(prefix="tokenflow-verify-") as folder:
        try:
            engine = describe_engine(settings.engine)
            engines = Engines(settings, Path(folder))
        except TokenFlowError as error:
            problems.append(str(error))
        if problems:
            return written()
        try:
            for section in sections:
                print(f"{section.name}: {section.title} …", file=sys.stderr, flush=True)
                results.append(run_section(section, engines))
                print(f"{section.name}: {results[-1].status.value}", file=sys.stderr, flush=True)
                report = written()
        finally:
            engines.close()
    return report


def _pair(text: str) -> tuple[str, str]:
    name, is_given, value = text.partition("=")
    if not is_given:
        raise argparse.ArgumentTypeError(f"wants NAME=VALUE, got {text!r}")
    return name, value


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="perf/verify_trtllm.sh",
        description="Check TokenFlow's adapter on TensorRT-LLM with a built engine, and write one "
        "report file.",
    )
    parser.add_argument("engine", type=Path, help="folder of the engine that trtllm-build made")
    parser.add_argument("--short", action="store_true", help="shorter requests, a burst of seconds")
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help="the report's file")
    parser.add_argument(
        "--sections", nargs="+", choices=[s.name for s in SECTIONS], help="only these"
    )
    parser.add_argument("--tokenizer", type=Path, help="folder with tokenizer.json, for English")
    parser.add_argument(
        "--set", dest="settings", metavar="NAME=VALUE", action="append", default=[], type=_pair,
        help="a parameter of the server, e.g. gpu_device_ids=1",
    )  # fmt: skip
    parser.add_argument("--log-prob-tolerance", type=float, help="nats; default by number type")
    parser.add_argument("--section-limit-s", type=float, default=300.0)
    parser.add_argument("--load-limit-s", type=float, default=900.0)
    return parser.parse_args(arguments)
