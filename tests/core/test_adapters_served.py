"""Streams with LoRA adapters on an engine that has a cache of them and forgets."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from tests.core.harness import ChosenPlanner, Harness
from tests.support.stepped import SteppedExecutor
from tests.trtllm.adapters import adapter, by_id
from tokenflow.executor.api import Request, Response
from tokenflow.executor.lora import LoraConfig
from tokenflow.types import EndReason, SessionState

PROMPT = (1, 2, 3)
S = SessionState


class LoraExecutor(SteppedExecutor):
    """Computes as without adapters, but wants to have each. sent: what each enqueue said of its
    adapter. cached: those that are there."""

    sent: list[LoraConfig | None]
    cached: set[int]

    def enqueue_requests(self, requests: Sequence[Request]) -> list[int]:
        if not hasattr(self, "cached"):
            self.sent, self.cached = [], set()
        return [self._enqueue(request) for request in requests]

    def _enqueue(self, request: Request) -> int:
        lora = request.lora_config
        self.sent.append(lora)
        if lora is None:
            return super().enqueue_requests([request])[0]
        if lora.has_weights:
            self.cached.add(lora.task_id)
        if lora.task_id in self.cached:
            plain = msgspec.structs.replace(
                request, lora_config=None, cache_salt_id=-1 - lora.task_id
            )
            return super().enqueue_requests([plain])[0]
        request_id, self._next_id = self._next_id, self._next_id + 1
        message = f"LoRA task {lora.task_id} not found in cache. Please send LoRA weights"
        self._responses.append(
            Response(request_id=request_id, client_id=request.client_id, error=message)
        )
        return request_id


class Served(Harness):
    def __init__(self) -> None:
        super().__init__(executor_type=LoraExecutor)

    @property
    def engine(self) -> LoraExecutor:
        assert isinstance(self.executor, LoraExecutor)
        return self.executor

    def running(self, lora: LoraConfig, num_tokens: int = 4, max_tokens: int = 30) -> int:
        handle = self.submit(PROMPT, max_tokens, lora_config=lora)
        while len(self.tokens_of(handle)) < num_tokens:
            self.step()
        return handle

    def paused(self, lora: LoraConfig) -> int:
        handle = self.running(lora)
        assert isinstance(self.planner, ChosenPlanner)
        self.planner.hold_paused = True
        self.pause(handle)
        while self.state(handle) is not S.PREEMPTED:
            self.step()
        return handle

    def resume(self) -> None:
        assert isinstance(self.planner, ChosenPlanner)
        self.planner.hold_paused = False
        self.run_to_empty()


def test_a_resume_names_the_id_and_so_do_others_of_the_adapter() -> None:
    h = Served()
    handle = h.paused(adapter(7))
    other = h.running(adapter(7), 1)
    third = h.submit(PROMPT, 5, lora_config=by_id(7))
    h.resume()
    for name, length in ((handle, 30), (other, 30), (third, 5)):
        h.expect_whole(name, PROMPT, length)
    assert h.engine.sent == [adapter(7)] + [by_id(7)] * 3


@pytest.mark.parametrize("names_id_alone", [False, True])
def test_an_adapter_that_was_forgotten_during_a_pause_is_sent_again(names_id_alone: bool) -> None:
    """Also for a stream that named the id alone: another request had brought the weights."""
    h = Served()
    if names_id_alone:
        h.running(adapter(7), max_tokens=5)
        h.run_to_empty()
    handle = h.paused(by_id(7) if names_id_alone else adapter(7))
    h.engine.cached.clear()
    num_before = len(h.engine.sent)
    h.resume()
    h.expect_whole(handle, PROMPT, 30)
    assert h.engine.sent[num_before:] == [by_id(7), adapter(7)]
    h.expect_nothing_left()


def test_a_start_that_misses_waits_again() -> None:
    h = Served()
    h.running(adapter(7), max_tokens=5)
    h.run_to_empty()
    h.engine.cached.clear()
    handles = [h.submit((n, 2), 6, lora_config=adapter(7)) for n in range(3)]
    h.run_to_empty()
    for n, handle in enumerate(handles):
        h.expect_whole(handle, (n, 2), 6)
    h.expect_nothing_left()


def test_the_next_engine_gets_the_weights() -> None:
    h = Served()
    streams = [h.running(adapter(7)), h.running(by_id(7)), h.running(adapter(8))]
    h.lose_engine()
    h.start_engine()
    h.run_to_empty()
    for handle in streams:
        h.expect_whole(handle, PROMPT, 30)
    brought = [lora for lora in h.engine.sent if lora is not None and lora.has_weights]
    assert {lora.task_id for lora in brought} == {7, 8}
    assert h.engine.sent[0] == adapter(7)


def test_an_adapter_that_nobody_brought_is_an_error_that_says_so() -> None:
    h = Served()
    handle = h.submit(PROMPT, 5, lora_config=by_id(9))
    h.run_to_empty()
    assert h.end_of(handle) is EndReason.ERROR
    assert "LoRA task 9 not found in cache" in str(h.events_of(handle)[-1].error)
    assert h.engine.sent == [by_id(9)]
    brings = h.running(adapter(9), 1)
    h.run_to_empty()
    h.expect_whole(brings, PROMPT, 30)
    h.expect_nothing_left()
