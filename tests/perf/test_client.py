"""The streaming client: over real gRPC against a fake server, and its files."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from perf import client
from perf.client import ClientRecord, Plan, ProtocolError, WorkloadRecord, take_response
from perf.workloads import ClientRequest
from tests.perf.fake_triton import FakeTriton, read_inputs, running


def make_request(index: int, prompt: str, max_tokens: int = 5, offset: float = 0.0):
    return ClientRequest(
        request_id=f"r{index}",
        kind="reader",
        prompt=prompt,
        num_prompt_tokens=3,
        max_tokens=max_tokens,
        read_rate=4.5,
        send_offset_s=offset,
    )


def play(requests: list[ClientRequest], fake: FakeTriton | None = None) -> WorkloadRecord:
    async def scenario() -> WorkloadRecord:
        async with running(fake or FakeTriton()) as url:
            return await client.play(url, requests, timeout_s=10.0)

    return asyncio.run(scenario())


def test_every_token_gets_its_receipt_time() -> None:
    fake = FakeTriton(step_s=0.03)
    record = play([make_request(0, "one"), make_request(1, "two", 4, offset=0.1)], fake)
    first, second = record.clients
    assert [len(c.token_times) for c in record.clients] == [5, 4]
    assert first.error is None
    assert first.finish_reason == "length"
    assert first.text == "ababa"
    # two tokens per response: pairs share an instant, pairs are a step apart
    assert first.token_times[0] == first.token_times[1]
    assert first.token_times[2] - first.token_times[1] >= 0.025
    assert first.token_times == sorted(first.token_times)
    assert record.start_time <= first.send_time <= first.token_times[0] <= record.end_time
    assert second.send_time - record.start_time >= 0.1


def test_requests_are_of_fixed_length_paced_and_named() -> None:
    fake = FakeTriton()
    play([make_request(7, "naïve “text”", 3)], fake)
    (request,) = fake.requests
    assert request.id == "r7"
    assert request.model_name == "ensemble"
    assert read_inputs(request) == {
        "text_input": "naïve “text”",
        "max_tokens": 3,
        "stream": True,
        "end_id": -1,
        "read_rate": 4.5,
        "return_num_output_tokens": True,
    }


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("refuse this", "max_tokens: too many"),
        ("skip one", "token_index 3, expected 2"),
        ("hang up", "without a finish reason"),
    ],
)
def test_a_broken_answer_is_an_error_of_its_request_only(prompt: str, expected: str) -> None:
    record = play([make_request(0, prompt), make_request(1, "fine")])
    broken, fine = record.clients
    assert broken.error is not None
    assert expected in broken.error
    assert fine.error is None
    assert len(fine.token_times) == 5


def test_a_server_that_is_not_there_is_an_error_not_a_hang() -> None:
    with pytest.raises(Exception, match="connect"):
        asyncio.run(client.play("127.0.0.1:9", [make_request(0, "x")], timeout_s=2.0))


def test_a_repeated_token_is_noticed() -> None:
    record = ClientRecord(
        request_id="r", kind="reader", read_rate=1, max_tokens=3, num_prompt_tokens=1
    )
    take_response(record, {"num_output_tokens": 2, "token_index": 0, "text_output": "a"}, 1.0)
    with pytest.raises(ProtocolError, match="token_index 1, expected 2"):
        take_response(record, {"num_output_tokens": 1, "token_index": 1}, 2.0)
    with pytest.raises(ProtocolError, match="token_index None"):
        take_response(record, {"num_output_tokens": 1}, 2.0)
    take_response(record, {"finish_reason": "length"}, 3.0)
    assert record.token_times == [1.0, 1.0]
    assert record.finish_reason == "length"


def test_plan_and_record_survive_their_files(tmp_path: Path) -> None:
    requests = [make_request(0, "one")]
    plan = Plan(url="h:1", record_path="r.json", timeout_s=3.0, requests=requests)
    client.write_plan(plan, tmp_path / "plan.json")
    assert client.read_plan(tmp_path / "plan.json") == plan
    record = play(requests)
    client.write_record(record, tmp_path / "record.json")
    assert client.read_record(tmp_path / "record.json") == record
