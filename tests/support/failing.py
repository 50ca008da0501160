"""A scripted runner that fails once when it is told to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from tokenflow.executor.api import Request
from tokenflow.inflight.runner import SequenceChunk, StepOutput
from tokenflow.inflight.scripted_runner import ScriptedRunner

FAILURE = "planned failure"

Failure = Literal["before the step", "after writing", "adding a request"]


class FailingRunner(ScriptedRunner):
    """fail_next: what fails next, once; None while nothing is planned. num_failures: how often it
    did."""

    fail_next: Failure | None = None
    num_failures = 0

    def add_request(self, request_id: int, request: Request) -> None:
        self._fail("adding a request")
        super().add_request(request_id, request)

    def forward(self, chunks: Sequence[SequenceChunk]) -> StepOutput:
        self._fail("before the step")
        output = super().forward(chunks)
        self._fail("after writing")
        return output

    def _fail(self, here: Failure) -> None:
        if self.fail_next == here:
            self.fail_next = None
            self.num_failures += 1
            raise RuntimeError(FAILURE)
