"""The suite for real hardware finds what is wrong: each section on an engine with one fault.

Faults sit in an executor around the scripted engine, where TensorRT-LLM would have them.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest

from perf.trtllm_suite.compare import Comparison, compare
from perf.trtllm_suite.resume import check_cancel, check_exactness, check_leases, check_reuse
from perf.trtllm_suite.shape import Prompts, Shape, fit_shape
from perf.trtllm_suite.streams import FIRST_SALT, Streams
from perf.trtllm_suite.tiers import check_events, check_host
from perf.trtllm_suite.values import Deadline, Findings, NotHere, Settings, SuiteError
from tokenflow.config import parse_parameters
from tokenflow.executor.api import Request, Response
from tokenflow.executor.trtllm_engine import BuiltEngine
from tokenflow.inflight.executor import InflightExecutor
from tokenflow.inflight.scripted_runner import ScriptedRunner
from tokenflow.inflight.scripts import pseudo_random

VOCAB, SIZE, BLOCK_BYTES = 500, 8, 8 * 1024
BUILT = BuiltEngine(
    folder=None, version="1.2.1", vocab_size=VOCAB, tokens_per_block=SIZE, max_batch_size=8,
    max_num_tokens=64, max_seq_len=128, world_size=1, kv_bytes_per_token=1024.0,
    logits_dtype="float32",
)  # fmt: skip
SETTINGS = Settings(engine=None, is_short=True)


@dataclass(frozen=True)
class _Info:
    num_blocks: int


class Faulty:
    """The scripted engine with something wrong. request: what becomes of a request; events: of
    drained events; responses: of responses; cancel_s: how late a cancel is passed on."""

    def __init__(
        self,
        shape: Shape,
        *,
        request: Callable[[Request], Request] = lambda request: request,
        events: Callable[[list[Any]], list[Any]] | None = lambda events: events,
        responses: Callable[[Response], Response] = lambda response: response,
        cancel_s: float = 0.0,
        num_host_bytes: int | None = None,
    ) -> None:
        parameters = shape.parameters()
        if num_host_bytes is not None:
            parameters["kv_cache_host_memory_bytes"] = str(num_host_bytes)
        config = parse_parameters(
            {"engine": "scripted", "max_seq_len": "128", "tokens_per_block": str(SIZE),
             **parameters}
        )  # fmt: skip
        runner = ScriptedRunner(pseudo_random(VOCAB), VOCAB, step_s=0.001)
        self._core = InflightExecutor(runner, config.executor_config())
        self._request, self._events, self._responses = request, events, responses
        self._cancel_s = cancel_s
        self.num_host_blocks = self._core.num_host_blocks
        self.info = _Info(shape.num_pool_blocks)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def enqueue_request(self, request: Request) -> int:
        return self._core.enqueue_request(self._request(request))

    def await_responses(self, timeout: Any) -> list[Response]:
        return [self._responses(response) for response in self._core.await_responses(timeout)]

    def cancel_request(self, id: int) -> None:
        time.sleep(self._cancel_s)
        self._core.cancel_request(id)

    def get_kv_cache_event_manager(self) -> Any:
        return self if self._events is not None else None

    def get_latest_events(self, timeout_ms: float) -> list[Any]:
        assert self._events is not None
        return self._events(self._core.get_kv_cache_event_manager().get_latest_events(timeout_ms))


class FaultyEngines:
    """What sections are given, on one such engine."""

    def __init__(self, **faults: Any) -> None:
        self.shape = fit_shape(BUILT, SETTINGS)
        self.settings, self.built = SETTINGS, BUILT
        self.prompts = Prompts(VOCAB)
        self.tolerance = 0.1
        self.executor = Faulty(self.shape, **faults)
        self._streams = Streams(self.executor, SIZE)

    @contextlib.contextmanager
    def streams(self) -> Iterator[Streams]:
        self._streams.deadline = Deadline(20.0)
        yield self._streams


@pytest.fixture
def check() -> Iterator[Callable[..., Findings]]:
    made: list[FaultyEngines] = []

    def run(section: Callable[[Any], Findings], **faults: Any) -> Findings:
        made.append(FaultyEngines(**faults))
        return section(made[-1])

    yield run
    for engines in made:
        engines.executor.shutdown()


SECTIONS = (check_exactness, check_reuse, check_cancel, check_leases, check_host, check_events)


@pytest.mark.parametrize("section", SECTIONS, ids=lambda s: s.__name__)
def test_nothing_is_wrong_with_a_right_engine(
    check: Callable[..., Findings], section: Callable[[Any], Findings]
) -> None:
    found = check(section)
    assert found.faults == []
    assert found.figures


def _is_resume(request: Request) -> bool:
    return len(request.input_token_ids) not in fit_shape(BUILT, SETTINGS).prompt_lens


def _with(request: Request, **changes: Any) -> Request:
    return msgspec.structs.replace(request, **changes)


def _other_token(request: Request) -> Request:
    """A resume reads one token wrong, as from a block of somebody else's."""
    if not _is_resume(request):
        return request
    ids = request.input_token_ids
    return _with(request, input_token_ids=(ids[0], ids[1] ^ 1, *ids[2:]))


_SALTS = iter(range(FIRST_SALT * 2, FIRST_SALT * 3))


def _nothing_found(request: Request) -> Request:
    return _with(request, cache_salt_id=next(_SALTS))


def _one_less(response: Response) -> Response:
    """The last token of a request is lost."""
    if response.payload is None or not response.payload.is_final:
        return response
    payload = response.payload
    ids, logs = payload.output_token_ids[0], payload.log_probs
    if not ids:
        return response
    return _with(
        response,
        payload=_with(
            payload, output_token_ids=[ids[:-1]], log_probs=[logs[0][:-1]] if logs else None
        ),
    )


def _every_third_missing(events: list[Any]) -> list[Any]:
    return [event for event in events if event.event_id % 3 or event.event_id == 0]


@pytest.mark.parametrize(
    ("section", "faults", "words"),
    [
        (check_exactness, {"request": _other_token}, "no near tie"),
        (check_leases, {"request": _other_token}, "no near tie"),
        (check_leases, {"responses": _one_less}, r"a lease of 7 gave 6 tokens"),
        (check_leases, {"request": _nothing_found}, r"lease 2 found 0 of \d blocks"),
        (check_reuse, {"request": _nothing_found}, r"found 0 blocks, \d were full"),
        (check_cancel, {"cancel_s": 0.05}, r"a cancel took \d+\.\d steps"),
        (check_host, {"request": _nothing_found}, r"the resume found 0 blocks"),
        (check_events, {"request": _nothing_found}, r"the mirror knows \d full blocks"),
        (check_events, {"events": _every_third_missing}, r"\d+ gaps in their ids"),
    ],
)
def test_what_is_wrong_is_found(
    check: Callable[..., Findings],
    section: Callable[[Any], Findings],
    faults: dict[str, Any],
    words: str,
) -> None:
    found = check(section, **faults)
    assert any(re.search(words, fault) for fault in found.faults), found.faults


def test_what_an_engine_does_not_have_is_skipped(check: Callable[..., Findings]) -> None:
    with pytest.raises(NotHere, match="no KV events"):
        check(check_events, events=None)
    with pytest.raises(NotHere, match="no host tier"):
        check(check_host, num_host_bytes=0)


def test_a_request_that_fails_ends_the_section(check: Callable[..., Findings]) -> None:
    def too_long(request: Request) -> Request:
        return _with(request, input_token_ids=request.input_token_ids * 20)

    with pytest.raises(SuiteError, match="a request failed: "):
        check(check_reuse, request=too_long)


# -- comparing ---------------------------------------------------------------------------------


def test_equal_outputs() -> None:
    same = compare(([1, 2], [-0.5, -0.25]), ([1, 2], [-0.5, -0.375]))
    assert same == Comparison(num_tokens=2, first_difference=None, drift=0.125, margin=None)
    assert same.faults("x", 0.2) == []
    assert same.remark("x") is None
    assert same.faults("x", 0.1) == [
        "x: log-probs of equal tokens differ by 0.125 nats, more than 0.1"
    ]


def test_a_near_tie_is_a_remark_and_anything_else_a_fault() -> None:
    def parted(log_prob: float) -> Comparison:
        return compare(([1, 2, 3], [-0.1, -0.7, -0.1]), ([1, 5, 9], [-0.1, log_prob, -3.0]))

    near = parted(-0.75)
    assert near.first_difference == 1
    assert near.faults("x", 0.1) == []
    assert near.remark("x") == "x: parts at token 1 of 3, 0.0500 nats apart"
    assert "token 1 differs" in parted(-2.0).faults("x", 0.1)[0]


@pytest.mark.parametrize("other", [[1], [1, 2, 3]])
def test_an_output_of_another_length_is_a_fault(other: Sequence[int]) -> None:
    found = compare(([1, 2], [-1.0, -1.0]), (other, [-1.0] * len(other)))
    assert found.faults("x", 0.1) == [f"x: one of them ends at token {min(2, len(other))}"]


# -- shapes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [16, 32, 64, 128])
@pytest.mark.parametrize("is_short", [False, True])
def test_what_is_asked_fits_the_engine(size: int, is_short: bool) -> None:
    built = replace(BUILT, tokens_per_block=size, max_seq_len=2048, max_num_tokens=8192)
    shape = fit_shape(built, replace(SETTINGS, is_short=is_short))
    assert max(shape.prompt_lens) + shape.output_len < shape.seq_len <= 2048
    assert shape.prompt_lens[2] > shape.max_num_tokens, "more than one chunk"
    assert shape.num_pool_blocks >= 4 * (shape.seq_len // size)
    assert shape.output_len - 8 > size + 3, "pauses are in order"


def test_a_short_engine_is_refused() -> None:
    with pytest.raises(SuiteError, match="max_seq_len is 128"):
        fit_shape(replace(BUILT, tokens_per_block=32), SETTINGS)


def test_prompts_differ_and_have_their_length() -> None:
    for prompts in (Prompts(VOCAB), Prompts(VOCAB, english=list(range(90)))):
        made = [prompts.make(num) for num in (3, 40, 40, 200)]
        assert [len(prompt) for prompt in made] == [3, 40, 40, 200]
        assert made[1] != made[2]
        assert all(0 <= token < VOCAB for prompt in made for token in prompt)
