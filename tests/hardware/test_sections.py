"""Every section of the suite (perf/trtllm_suite), in its order, on one engine where it can be."""

from __future__ import annotations

import pytest

from perf.trtllm_suite.engines import Engines
from perf.trtllm_suite.sections import SECTIONS, Section, run_section
from perf.trtllm_suite.values import Status


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.name)
def test_section(section: Section, engines: Engines) -> None:
    result = run_section(section, engines)
    print(result.name, dict(result.figures))  # noqa: T201
    if result.status is Status.SKIPPED:
        pytest.skip("; ".join(result.remarks))
    assert not result.faults, "\n".join([*result.faults, *result.log_tail])
