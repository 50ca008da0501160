"""LoRA in the core: what is sent of an adapter, whose KV is whose, engines without LoRA."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.harness import Harness
from tests.trtllm.adapters import adapter, by_id
from tokenflow.adapters import Adapters
from tokenflow.executor.api import Request
from tokenflow.executor.channel import Enqueue, decode_to_host, encode
from tokenflow.executor.kv_api import (
    KVCacheCreatedData,
    KVCacheEvent,
    KVCacheStoredBlockData,
    KVCacheStoredData,
)
from tokenflow.executor.lora import LoraConfig
from tokenflow.kv_mirror import KvMirror
from tokenflow.reader import Reader
from tokenflow.retention import PromptBeginnings
from tokenflow.session import Session
from tokenflow.types import EndReason, GenerateRequest

MISS = "LoRA task {} not found in cache. Please send LoRA weights with request"
BYTES = sum(len(part.data) for part in (adapter(1).weights, adapter(1).config) if part)


def session(lora: LoraConfig | None, handle: int = 1) -> Session:
    request = GenerateRequest(
        request_id="r", input_token_ids=(1,), max_tokens=4, arrival_time=0.0, lora_config=lora
    )
    return Session(handle=handle, slot=0, request=request, reader=Reader(None, 6.0))


def test_weights_go_until_they_were_answered_then_the_id() -> None:
    adapters, lora = Adapters(), adapter(7)
    first = session(lora)
    assert adapters.to_enqueue(first) == lora
    assert adapters.to_enqueue(first) == lora, "nobody has answered yet"
    adapters.answered(first)
    assert adapters.to_enqueue(first) == by_id(7)
    assert adapters.to_enqueue(session(adapter(8))) == adapter(8)
    adapters.lost()
    assert adapters.to_enqueue(first) == lora
    assert adapters.to_enqueue(session(None)) is None


def test_who_names_the_id_alone_gets_weights_that_are_known() -> None:
    adapters, lora = Adapters(), adapter(7)
    assert adapters.to_enqueue(session(by_id(7))) == by_id(7)
    adapters.keep(lora)
    assert adapters.to_enqueue(session(by_id(7))) == lora
    assert adapters.keep(adapter(7)) is lora, "equal ones are held once"
    other = adapter(7, 2.0)
    assert adapters.keep(other) is other


def test_what_is_kept_is_bounded() -> None:
    adapters = Adapters(max_kept_bytes=2 * BYTES)
    for task_id in (1, 2):
        adapters.keep(adapter(task_id))
    adapters.keep(by_id(1))  # asked for
    adapters.keep(adapter(3))
    known = [adapters.to_enqueue(session(by_id(i))).has_weights for i in (1, 2, 3)]  # type: ignore[union-attr]
    assert known == [True, False, True]
    assert adapters._num_kept_bytes == 2 * BYTES


def test_a_miss_is_made_good_once_per_enqueue_with_the_id_alone() -> None:
    adapters, s = Adapters(), session(adapter(7))
    adapters.to_enqueue(s)
    assert not adapters.can_send_again(s, MISS.format(7)), "it was sent with weights"
    adapters.answered(s)
    adapters.to_enqueue(s)
    assert not adapters.can_send_again(s, "Encountered an error in forwardAsync function")
    assert adapters.can_send_again(s, "Encountered an error …: " + MISS.format(7))
    assert adapters.to_enqueue(s) == adapter(7)
    assert not adapters.can_send_again(s, MISS.format(7))
    unknown = session(by_id(9))
    adapters.to_enqueue(unknown)
    assert not adapters.can_send_again(unknown, MISS.format(9)), "nobody has its weights"


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(
    ["start", "start", "start", "evict", "lose", "forget"])), max_size=40))  # fmt: skip
def test_a_request_that_brought_weights_always_gets_through(
    steps: list[tuple[int, str]],
) -> None:
    """Against an engine that forgets adapters whenever it likes: two enqueues at most."""
    adapters, cached = Adapters(max_kept_bytes=BYTES), set()
    sessions = [session(adapter(i % 3) if i < 3 else by_id(i % 3), handle=i) for i in range(6)]
    for s in sessions:
        adapters.keep(s.request.lora_config)  # type: ignore[arg-type]
    for number, step in steps:
        s = sessions[number]
        task_id = number % 3
        if step == "evict":
            cached.discard(task_id)
        elif step == "lose":
            cached.clear()
            adapters.lost()
        elif step == "forget":
            adapters.keep(adapter(100 + number))  # others push kept weights out
        else:
            for attempt in range(2):
                sent = adapters.to_enqueue(s)
                assert sent is not None
                assert sent.task_id == task_id
                cached |= {task_id} if sent.has_weights else set()
                if task_id in cached:
                    adapters.answered(s)
                    break
                again = adapters.can_send_again(s, MISS.format(task_id))
                assert again or not s.request.lora_config.has_weights  # type: ignore[union-attr]
                if not again:
                    break
                assert attempt == 0, "with its weights it cannot miss"


# -- whose KV is whose -------------------------------------------------------------------------


def stored(event_id: int, name: int, tokens: list[int], lora_id: int | None,
           parent: int | None = None) -> KVCacheEvent:  # fmt: skip
    block = KVCacheStoredBlockData(name, tokens, 0, 35, lora_id)
    return KVCacheEvent(event_id, KVCacheStoredData(parent, [block]))


def test_the_mirror_keeps_the_kv_of_adapters_apart() -> None:
    mirror, tokens = KvMirror(2), [1, 2, 3, 4]
    mirror.apply([KVCacheEvent(0, KVCacheCreatedData([8, 0]))])
    mirror.apply([stored(1, 11, [1, 2], 7), stored(2, 12, [3, 4], 7, 11)])
    assert mirror.locate(tokens, 7).num_tokens == 4
    assert mirror.locate(tokens).num_tokens == mirror.locate(tokens, 8).num_tokens == 0
    for handle, lora_id in enumerate((7, 8, None)):
        mirror.watch(handle, tokens, lora_id)
    mirror.apply([stored(3, 21, [1, 2], None)])
    assert mirror.changed() == [2]
    assert mirror.locate(tokens).num_tokens == 2
    assert mirror.locate(tokens, 7).num_tokens == 4
    assert mirror.num_device_blocks == 3


def test_beginnings_are_shared_among_requests_of_one_adapter() -> None:
    beginnings, prompt = PromptBeginnings(2), (1, 2, 3, 4)
    for salt, lora in ((None, None), (None, 7), (7, None), (7, 7), (None, 0), (0, None)):
        assert beginnings.observe(prompt, salt, lora) == 0
    assert beginnings.observe(prompt, None, 7) == 4
    assert beginnings.num_shared(prompt, None, 7) == 4
    assert beginnings.num_shared(prompt, None, None) == 0


# -- on its way --------------------------------------------------------------------------------


def test_an_adapter_crosses_the_channel_unchanged() -> None:
    request = Request(input_token_ids=(1,), max_tokens=1, lora_config=adapter(2**64 - 1))
    assert decode_to_host(encode(Enqueue([5], [request]))[4:]) == Enqueue([5], [request])
    assert "192 bytes" in repr(request)
    assert len(repr(request)) < 2000


@pytest.mark.parametrize("lora", [by_id(7), adapter(7)])
def test_an_engine_without_lora_refuses_before_any_token(lora: LoraConfig) -> None:
    h = Harness()
    handle = h.coordinator.new_handle()
    request = GenerateRequest(
        request_id="r", input_token_ids=(1, 2), max_tokens=4, arrival_time=h.now, lora_config=lora
    )
    h.coordinator.submit(handle, request, h.now)
    h.run_to_empty()
    (event,) = [event for event in h.events if event.handle == handle]
    assert event.end is EndReason.ERROR
    assert event.error is not None
    assert "lora_config: this engine has no LoRA" in event.error
    other = h.submit((1, 2, 3), 5)
    h.run_to_empty()
    h.expect_whole(other, (1, 2, 3), 5)
    h.expect_nothing_left()
