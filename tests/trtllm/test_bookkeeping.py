"""What the adapter keeps of requests, steps and KV events, without an engine."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trtllm_double.bindings import make_module
from tokenflow.executor.api import FinishReason, Request
from tokenflow.executor.kv_api import (
    KVCacheCreatedData,
    KVCacheEvent,
    KVCacheEventData,
    KVCacheRemovedData,
    KVCacheStoredBlockData,
    KVCacheStoredData,
)
from tokenflow.executor.trtllm_events import BlockCount
from tokenflow.executor.trtllm_requests import FailedSteps, LiveRequests

BINDINGS = make_module()


def _result(token_ids: list[int], **fields: Any) -> Any:
    reason = fields.pop("reason", "NOT_FINISHED")
    return BINDINGS.Result.make(
        output_token_ids=[token_ids],
        finish_reasons=[BINDINGS.FinishReason[reason]],
        **{"is_final": False, "is_sequence_final": False, **fields},
    )


@given(st.lists(st.sampled_from(["token", "cancel", "pause", "empty"]), max_size=30))
def test_no_cancel_is_passed_on_while_context_may_be_unfinished(actions: list[str]) -> None:
    live = LiveRequests(8)
    live.add(1, Request(input_token_ids=(1, 2), max_tokens=100))
    is_safe, was_told, wanted = False, 0, False
    for action in actions:
        if action == "token":
            _, due = live.take(1, _result([7]))
            is_safe = True
            was_told += due
            assert not (wanted and not was_told), "a kept cancel is passed on with the next token"
        elif action == "empty":
            assert live.take(1, _result([])) == (None, False)
        elif action == "pause":
            live.paused_by_engine()
            is_safe = False
        else:
            told = live.want_cancel(1)
            assert not told or is_safe
            was_told += told
            wanted = True
            assert was_told or not is_safe
        assert was_told <= 1
    assert was_told == 0 or wanted


def test_log_probs_that_do_not_fit_are_an_error_of_the_request() -> None:
    live = LiveRequests(8)
    live.add(1, Request(input_token_ids=(1, 2), max_tokens=100))
    live.take(1, _result([7, 8, 9], log_probs=[[-1.0, -2.0, -3.0]]))
    response, told = live.take(1, _result([7, 8], log_probs=[[-1.0]]))
    assert response is not None
    assert response.error == "log_probs: TensorRT-LLM sent 1 of them with 2 tokens after 3"
    assert told, "nobody waits for the rest of it"
    assert len(live) == 0


@pytest.mark.parametrize("left", [[], [-4.0], [-1.0, -2.0, -3.0, -4.0]])
def test_a_cancel_may_leave_the_log_prob_of_the_token_that_it_took(left: list[float]) -> None:
    live = LiveRequests(8)
    live.add(1, Request(input_token_ids=(1, 2), max_tokens=100))
    live.take(1, _result([7, 8, 9], log_probs=[[-1.0, -2.0, -3.0]]))
    final = {"is_final": True, "is_sequence_final": True, "reason": "CANCELLED"}
    response, _ = live.take(1, _result([], log_probs=[left], **final))
    assert response is not None
    assert response.result.finish_reasons == [FinishReason.CANCELLED]
    assert response.result.log_probs == [[]]


def test_a_failure_counts_once_for_all_that_it_ends() -> None:
    steps = FailedSteps()
    for request_id in (1, 2, 3):
        steps.failed(request_id, [1, 2, 3])
    assert steps.num_in_a_row == 1
    steps.failed(4, [4, 5])
    steps.failed(5, [5])
    assert steps.num_in_a_row == 2
    steps.succeeded()
    assert steps.num_in_a_row == 0


def _event(event_id: int, data: KVCacheEventData) -> KVCacheEvent:
    return KVCacheEvent(event_id, data, 256)


def _stored(block_hash: int) -> KVCacheStoredData:
    return KVCacheStoredData(None, [KVCacheStoredBlockData(block_hash, [1, 2], 0, 35)])


def test_blocks_are_counted_from_the_creation_on_whatever_its_number_is() -> None:
    count = BlockCount()
    count.apply(_event(7, KVCacheCreatedData([10, 4])))
    for number in (8, 9):
        count.apply(_event(number, _stored(number)))
    count.apply(_event(10, KVCacheRemovedData([8])))
    tiers = count.tier_stats(1024, 10)
    assert tiers is not None
    assert (tiers.num_device_cached_blocks, tiers.num_host_blocks) == (1, 4)
    count.apply(_event(12, _stored(11)))
    assert count.tier_stats(1024, 10) is None, "one was missed"
    assert count.num_blocks_per_level == [10, 4]


def test_blocks_of_which_the_beginning_was_missed_are_unknown() -> None:
    count = BlockCount()
    count.apply(_event(0, _stored(1)))
    count.apply(_event(1, KVCacheCreatedData([10, 4])))
    assert count.tier_stats(1024, 10) is None
