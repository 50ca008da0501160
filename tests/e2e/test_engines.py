"""The server with a real (tiny, random) model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.clients import GrpcStream, metric
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
    request = {"max_tokens": 300, "stream": True, "end_id": -1, "read_rate": 2.0}
    with GrpcStream(server) as stream:
        alone = [stream.ask(text_input=prompt, **request).text for prompt in prompts]
        assert metric(server, "tokenflow_pauses_total", kind="planned") == 0
        for number, prompt in enumerate(prompts):
            stream.send(str(number), text_input=prompt, outputs=OUTPUTS, **request)
        together = stream.collect(len(prompts))
    assert metric(server, "tokenflow_pauses_total", kind="planned") > 0
    assert [together[str(number)].text for number in range(len(prompts))] == alone
    for answer in together.values():
        assert answer.num_tokens == 300
