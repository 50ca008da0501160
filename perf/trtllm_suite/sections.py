"""The sections by name, in their order, and their running.

A section ends in PASSED, FAILED or SKIPPED, whatever happens in it; an engine that was lost is
started again for the next one.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from perf.trtllm_suite.burst import check_burst
from perf.trtllm_suite.engines import Engines
from perf.trtllm_suite.resume import check_cancel, check_exactness, check_leases, check_reuse
from perf.trtllm_suite.tiers import check_events, check_host
from perf.trtllm_suite.values import Findings, NotHere, SectionResult, Status, SuiteError
from tokenflow.errors import TokenFlowError

logger = logging.getLogger("tokenflow")

_CHECK_LIMIT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """check: raises TokenFlowError where it cannot go on, NotHere where there is nothing to see."""

    name: str
    title: str
    check: Callable[[Engines], Findings]


def check_api(engines: Engines) -> Findings:
    """The bindings have what the adapter relies on (tokenflow.executor.trtllm_check)."""
    command = [sys.executable, "-m", "tokenflow.executor.trtllm_check", "--json"]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=_CHECK_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise SuiteError(f"importing TensorRT-LLM took more than {_CHECK_LIMIT_S:g} s") from None
    start = result.stdout.find("{")
    try:
        report = json.loads(result.stdout[start:])
    except ValueError:
        said = (result.stderr or result.stdout).strip().splitlines()
        raise SuiteError(f"the check said: {said[-1] if said else 'nothing'}") from None
    return Findings(
        figures={"version": report["version"], "num_facts": report["num_facts"],
                 "num_not_seen": len(report["unseen"])},
        faults=list(report["differences"]),
        remarks=[*report["missing"], *report["unseen"]],
    )  # fmt: skip


def check_start(engines: Engines) -> Findings:
    """The engine loads, computes, and has the pools that were asked for."""
    info, shape = engines.executor.info, engines.shape
    found = Findings(
        figures={
            "load_s": round(engines.load_s, 2),
            "num_device_blocks": info.num_blocks,
            "num_host_blocks": info.num_host_blocks,
            "block_bytes": info.block_bytes,
            "vocab_size": info.vocab_size,
            "has_kv_events": engines.executor.get_kv_cache_event_manager() is not None,
        }
    )
    if info.num_blocks < shape.num_pool_blocks:
        found.faults.append(f"{info.num_blocks} device blocks, {shape.num_pool_blocks} were asked")
    num_host = shape.num_host_bytes // engines.built.block_bytes
    if info.num_host_blocks != num_host:
        found.remarks.append(f"{info.num_host_blocks} host blocks, {num_host} were expected")
    return found


SECTIONS = (
    Section(name="api", title="bindings against the adapter's facts", check=check_api),
    Section(name="start", title="an engine of its own process, its pools", check=check_start),
    Section(name="exactness", title="output with pauses = output without", check=check_exactness),
    Section(name="reuse", title="a resume finds what was kept", check=check_reuse),
    Section(name="cancel", title="steps that a cancel takes", check=check_cancel),
    Section(name="lease", title="ends of leases lose nothing", check=check_leases),
    Section(name="host", title="a paused request comes back from the host", check=check_host),
    Section(name="events", title="the mirror of KV events is the cache", check=check_events),
    Section(name="burst", title="first tokens of a burst, three policies", check=check_burst),
)


def run_section(section: Section, engines: Engines) -> SectionResult:
    """Its outcome; raises only what ends the whole program."""
    start_time = time.monotonic()
    found, status = Findings(), Status.PASSED
    try:
        found = section.check(engines)
    except NotHere as reason:
        found.remarks.append(str(reason))
        status = Status.SKIPPED
    except TokenFlowError as error:
        found.faults.append(str(error))
    except Exception as error:  # a fault of the suite or of the engine is a line, not the end
        logger.exception("section %s", section.name)
        found.faults.append(f"{type(error).__name__}: {error}")
    if found.faults:
        status = Status.FAILED
    return SectionResult(
        name=section.name,
        title=section.title,
        status=status,
        duration_s=round(time.monotonic() - start_time, 2),
        figures=found.figures,
        faults=tuple(found.faults),
        remarks=tuple(found.remarks),
        log_tail=engines.log_tail() if status is Status.FAILED else (),
    )
