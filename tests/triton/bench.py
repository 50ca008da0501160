"""A sender that runs only when told, with a clock that moves only when told."""

from __future__ import annotations

from tests.triton.fakes import FakeChannel, FakeRuntime, byte_level_tokenizer
from tokenflow.clock import ManualClock
from tokenflow.types import GenerateRequest
from triton_backend.codec import TextRequest
from triton_backend.responses import OUTPUT_NAMES, select_outputs
from triton_backend.senders import Sender
from triton_backend.stream import TextStream
from triton_backend.work import Opened

TOKENIZER = byte_level_tokenizer()


class Bench:
    def __init__(self, on_tick: object = None) -> None:
        self.clock = ManualClock(100.0)
        self.runtime = FakeRuntime()
        self.sender = Sender(self.clock, poll_period_s=0.1, tick_period_s=0.1)
        self.sender.attach(self.runtime, on_tick)

    def open(
        self,
        handle: int,
        request_id: str = "",
        *,
        streaming: bool = True,
        stops: tuple = (),
        max_tokens: int = 99,
    ) -> FakeChannel:
        channel = FakeChannel()
        request = TextRequest(
            generate=GenerateRequest(
                request_id=request_id,
                input_token_ids=(1,),
                max_tokens=max_tokens,
                arrival_time=0.0,
                streaming=streaming,
            ),
            stop_strings=stops,
            return_num_output_tokens=True,
        )
        outputs = select_outputs(OUTPUT_NAMES, request)
        self.sender.post(Opened(handle, channel, TextStream(request, TOKENIZER), outputs))
        return channel

    def turn(self) -> bool:
        return self.sender.turn(max_wait_s=0.0)
