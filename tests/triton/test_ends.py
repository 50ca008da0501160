"""How answers end, from the client's tensors through coordinator and batcher to the responses.

Everything is real but the model (a script), the threads and the clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from tests.core.harness import ChosenPlanner
from tests.support.stepped import SteppedExecutor
from tests.triton.fakes import EOS, FakeChannel, byte_level_tokenizer
from tokenflow.clock import ManualClock
from tokenflow.config import ServingConfig
from tokenflow.coordinator import Coordinator
from tokenflow.holds import HoldReply
from tokenflow.inflight.scripted_runner import ScriptedRunner
from tokenflow.inflight.scripts import fixed
from tokenflow.types import GenerateRequest, SessionState
from triton_backend.responses import OUTPUT_NAMES
from triton_backend.senders import Sender
from triton_backend.service import TextService
from triton_backend.text import TextTokenizer

TWO_ENDS = byte_level_tokenizer(special=["<end>", "[END]"], num_eos=2)
END, MARK = EOS + 1, EOS + 2
PROMPT = "hello"


class Server:
    """The text service on the in-flight batcher, moved step by step. The model says `script`
    after every prompt of `num_prompt_tokens` tokens, then `z` for ever. changes:
    of the settings."""

    def __init__(
        self,
        script: Sequence[int],
        tokenizer: TextTokenizer = TWO_ENDS,
        num_prompt_tokens: int = len(PROMPT),
        **changes: Any,
    ) -> None:
        config = ServingConfig(
            engine="scripted", max_seq_len=128, max_tokens_in_paged_kv_cache=1024,
            tokens_per_block=4, max_batch_size=8, **changes,
        )  # fmt: skip
        after = fixed(script, num_prompt_tokens, ord("z"))
        self.runner = ScriptedRunner(after, tokenizer.vocab_size)
        self.clock = ManualClock(100.0)
        self.executor = SteppedExecutor(self.runner, config.executor_config())
        self.planner = ChosenPlanner(config.max_batch_size)
        self.sender = Sender(self.clock, poll_period_s=1.0)
        self.coordinator = Coordinator(self.executor, config, self.planner, self.sender.post)
        self.sender.attach(self)
        self.service = TextService(config, tokenizer, self, self.sender, self.clock, lambda: 0)
        self._pauses: list[tuple[Sequence[int], HoldReply]] = []

    def ask(self, request_id: str = "", **inputs: Any) -> FakeChannel:
        tensors = {"text_input": np.array([[PROMPT.encode()]], dtype=np.object_)}
        for name, value in {"max_tokens": 12, "stream": True, **inputs}.items():
            if isinstance(value, (str, list)):
                texts = [value] if isinstance(value, str) else value
                tensors[name] = np.array([[text.encode() for text in texts]], dtype=np.object_)
            else:
                kind = np.bool_ if isinstance(value, bool) else np.int32
                tensors[name] = np.array([[value]], dtype=kind)
        channel = FakeChannel()
        outputs = (*OUTPUT_NAMES[:3], "num_output_tokens", "finish_reason", "token_index")
        self.service.accept(request_id, tensors, {}, outputs, channel)
        return channel

    def control(self, request_id: str, name: str) -> FakeChannel:
        """Post a control request; it is decided at the next step."""
        channel = FakeChannel()
        self.service.accept(request_id, {name: np.array([[True]])}, {}, (), channel)
        return channel

    def step(self) -> None:
        self.sender.turn(max_wait_s=0.0)
        for handles, reply in self._pauses:
            reply(self.coordinator.hold_all(handles, self.clock.now()))
        self._pauses.clear()
        self.coordinator.plan(self.clock.now())
        self.executor.begin(self.clock.now())
        self.clock.advance(0.05)
        self.executor.end(self.clock.now())
        self.coordinator.on_stats(self.executor.get_latest_iteration_stats(), self.clock.now())
        self.coordinator.on_responses(self.executor.await_responses(), self.clock.now())
        self.sender.turn(max_wait_s=0.0)

    def run(self, pause_after: frozenset[int] = frozenset()) -> None:
        """Until nothing is left; streams are paused when they have one of these lengths."""
        for _ in range(200):
            self.step()
            for session in self.coordinator.table:
                if len(session.output_token_ids) in pause_after:
                    self.planner.pause_next.add(session.slot)
            if not len(self.coordinator.table) and not self.executor.batcher.has_work:
                return
        raise AssertionError("the server does not come to rest")

    # The runtime, without its thread.

    def submit(self, request: GenerateRequest) -> int:
        handle = self.coordinator.new_handle()
        self.coordinator.submit(handle, request, self.clock.now())
        return handle

    def count_invalid(self) -> None:
        self.coordinator.count_invalid()

    def cancel(self, handle: int) -> None:
        self.coordinator.cancel(handle, self.clock.now())

    def finish(self, handle: int) -> None:
        self.coordinator.finish(handle, self.clock.now())

    def acknowledge(self, handle: int, num_consumed: int) -> None:
        self.coordinator.acknowledge(handle, num_consumed, self.clock.now())

    def pause_all(self, handles: Sequence[int], reply: HoldReply) -> None:
        self._pauses.append((handles, reply))

    def resume(self, handle: int) -> None:
        self.coordinator.release(handle, self.clock.now())

    def unpausable_reason(self, request: GenerateRequest) -> str | None:
        return self.coordinator.table.unpausable_reason(request)

    def start(self) -> None: ...

    def shutdown(self, timeout_s: float) -> None: ...


def check(channel: FakeChannel, text: str, num_tokens: int, reason: str) -> None:
    """The whole answer, with exactly one FINAL and one finish reason, on the last response."""
    assert not channel.errors
    assert (channel.text, channel.num_finals) == (text, 1)
    assert sum(response["num_output_tokens"] for response in channel.sent) == num_tokens
    reasons = [response.get("finish_reason") for response in channel.sent]
    assert reasons == [None] * (len(reasons) - 1) + [reason]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("script", "inputs", "text", "num_tokens", "reason"),
    [
        pytest.param(b"abcd", {"max_tokens": 3}, "abc", 3, "length", id="length"),
        pytest.param([97, EOS, 98], {}, "a", 1, "stop", id="end id of the model"),
        pytest.param([97, EOS, 98], {"end_id": EOS}, "a", 1, "stop", id="end id of the client"),
        pytest.param([97, END, 98], {}, "a", 1, "stop", id="the model's second end id"),
        pytest.param([97, END], {"max_tokens": 2}, "a", 1, "stop", id="end on the last token"),
        pytest.param([EOS], {}, "", 0, "stop", id="nothing but the end"),
        pytest.param([END], {}, "", 0, "stop", id="nothing but the second end"),
        pytest.param([97, END, 98], {"end_id": -1, "max_tokens": 3}, "ab", 3, "length", id="none"),
        pytest.param(b"abcd", {"stop_words": "cd"}, "ab", 4, "stop", id="stop word"),
        pytest.param(
            b"abcd", {"stop_words": ["zzz", "c", "qq"]}, "ab", 3, "stop", id="one of several"
        ),
        pytest.param(
            b"a[END]", {"stop_words": "[END]"}, "a", 6, "stop", id="text like a special token"
        ),
        pytest.param(
            [97, 98, MARK, 99], {"stop_words": "[END]"}, "ab", 2, "stop", id="special token named"
        ),
        pytest.param(
            [97, 99, END], {"stop_words": "cd"}, "ac", 2, "stop", id="held text before an end"
        ),
        pytest.param(
            [97, 99, 100, END], {"stop_words": "cd"}, "a", 3, "stop", id="stop before an end"
        ),
        pytest.param([97, 0xE4, END], {}, "a\ufffd", 2, "stop", id="end in a character"),
    ],
)
def test_ends(
    script: Sequence[int],
    inputs: dict[str, Any],
    text: str,
    num_tokens: int,
    reason: str,
    stream: bool,
) -> None:
    server = Server(script)
    channel = server.ask(stream=stream, **inputs)
    server.run()
    check(channel, text, num_tokens, reason)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("script", "min_tokens", "text", "num_tokens"),
    [
        ([END, 97, END], 2, "a", 2),
        ([97, END, 98], 1, "a", 1),
        ([97, END, 98, END], 3, "ab", 3),
        ([97, 98, END], 2, "ab", 2),
        ([97, EOS, 98, EOS], 3, "ab", 3),
    ],
)
def test_no_end_token_ends_an_answer_before_min_tokens(
    script: Sequence[int], min_tokens: int, text: str, num_tokens: int, stream: bool
) -> None:
    server = Server(script)
    channel = server.ask(min_tokens=min_tokens, stream=stream)
    server.run()
    check(channel, text, num_tokens, "stop")
    assert server.runner.num_steps <= num_tokens + 3  # the engine was told


def test_min_tokens_does_not_hold_back_stop_words_in_the_text() -> None:
    server = Server(b"abcd")
    channel = server.ask(min_tokens=8, stop_words="b")
    server.run()
    check(channel, "a", 2, "stop")


def test_log_probs_are_those_of_the_answer() -> None:
    for min_tokens in (0, 2):
        server = Server([97, 98, END])
        channel = server.ask(min_tokens=min_tokens, return_log_probs=True)
        server.run()
        log_probs = [p for r in channel.sent for p in r.get("output_log_probs", ())]
        assert len(log_probs) == 2
        assert channel.sent[-1]["cum_log_probs"] == sum(log_probs)


@pytest.mark.parametrize("end", [EOS, END])
@pytest.mark.parametrize("min_tokens", [0, 10])
def test_end_token_right_after_a_resume(end: int, min_tokens: int) -> None:
    server = Server([*b"abcdefghij", end])
    channel = server.ask(max_tokens=20, min_tokens=min_tokens)
    server.run(pause_after=frozenset({10}))
    check(channel, "abcdefghij", 10, "stop")
    assert server.coordinator.counters.num_resumes >= 1


_TOKENS = st.sampled_from([ord("a"), ord("b"), EOS, END, MARK, 0xC3, 0xA9])


@given(
    st.lists(_TOKENS, max_size=14),
    st.integers(1, 14),
    st.integers(0, 14),
    st.frozensets(st.integers(1, 14), max_size=3),
    st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_answer_against_its_definition(
    script: list[int], max_tokens: int, min_tokens: int, pauses: frozenset[int], stream: bool
) -> None:
    """The engine masks EOS before min_tokens (this script: by the id after it, which is END); every
    further end token there is a token without text."""
    output: list[int] = []
    reason = "length"
    for token_id in [*script, *[ord("z")] * 14][:max_tokens]:
        early = len(output) < min(min_tokens, max_tokens)
        if token_id in (EOS, END) and not early:
            reason = "stop"
            break
        output.append(END if token_id == EOS else token_id)
    server = Server(script)
    channel = server.ask(max_tokens=max_tokens, min_tokens=min_tokens, stream=stream)
    server.run(pause_after=pauses)
    check(channel, TWO_ENDS.decode(output), len(output), reason)
    assert server.coordinator.table.count(*SessionState) == 0


def test_stop_word_is_not_searched_with_the_bos_that_the_tokenizer_adds() -> None:
    tokenizer = byte_level_tokenizer(["[END]"])
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single="<eos> $A", special_tokens=[("<eos>", EOS)]
    )
    server = Server([97, 98, EOS + 1, 99], tokenizer, num_prompt_tokens=len(PROMPT) + 1)
    channel = server.ask(stop_words="[END]")
    server.run()
    check(channel, "ab", 3, "stop")


def test_many_at_once_with_an_end_id_and_quotes_in_the_prompt() -> None:
    prompt = 'She said \\"stop\\" \\\\ now'
    server = Server([*b"ok", END], num_prompt_tokens=len(prompt))
    channels = [server.ask(text_input=prompt, end_id=END, max_tokens=32) for _ in range(10)]
    server.run()
    for channel in channels:
        check(channel, "ok", 2, "stop")
