"""The server with a real (tiny, random) model, and the server when its engine dies."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.clients import GrpcStream, descendants, is_alive, metric, post, wait_until
from tests.e2e.conftest import Factory

OUTPUTS = ("text_output", "num_output_tokens", "finish_reason")


@pytest.mark.torch
def test_a_model_in_torch_gives_the_same_text_with_and_without_pauses(
    other_server: Factory, tiny_model: Path
) -> None:
    server = other_server.start(
        engine="inflight", gpt_model_path=str(tiny_model), tokenizer_dir="", dtype="float32",
        num_threads=1, max_batch_size=2,
    )  # fmt: skip
    prompts = [f"The reader reads the stream {number}" for number in range(4)]
    request = {"max_tokens": 80, "stream": True, "end_id": -1, "read_rate": 2.0}
    with GrpcStream(server) as stream:
        alone = [stream.ask(text_input=prompt, **request).text for prompt in prompts]
        assert metric(server, "tokenflow_pauses_total", kind="planned") == 0
        for number, prompt in enumerate(prompts):
            stream.send(str(number), text_input=prompt, outputs=OUTPUTS, **request)
        together = stream.collect(len(prompts))
    assert metric(server, "tokenflow_pauses_total", kind="planned") > 0
    assert [together[str(number)].text for number in range(len(prompts))] == alone
    for answer in together.values():
        assert sum(response["num_output_tokens"] for response in answer.responses) == 80


def test_an_engine_that_dies_ends_its_requests_with_an_error(other_server: Factory) -> None:
    server = other_server.start(max_batch_size=2)
    assert server.pid is not None
    (engine,) = (
        pid
        for pid in descendants(server.pid)
        if b"tokenflow.executor.host" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    with GrpcStream(server) as stream:
        for number in range(4):  # two run, two wait
            stream.send(
                str(number), text_input="x", max_tokens=400, stream=True, end_id=-1,
                read_rate=10_000.0, outputs=OUTPUTS,
            )  # fmt: skip
        stream.collect(10**6, until=lambda answers: len(answers) == 2)
        os.kill(engine, signal.SIGKILL)
        errors = []
        while len(errors) < 4:
            *_, error = stream.next()
            if error is not None:
                errors.append(error.message())
        assert all("engine" in message for message in errors), errors
        assert stream.is_silent(0.3)
    assert not is_alive(engine)
    wait_until(lambda: metric(server, "tokenflow_healthy") == 0)
    status, text = post(server, "generate", {"text_input": "x", "max_tokens": 2})
    assert (status, "engine" in text) == (400, True)
    assert metric(server, "tokenflow_requests_total", outcome="failed") >= 4
