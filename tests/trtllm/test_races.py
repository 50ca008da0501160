"""Orders of events in which the adapter could lose, repeat or mix something up, on the double."""

from __future__ import annotations

import random
import threading
import time
import types
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.contract.client import Client
from tests.trtllm.conftest import VOCAB, Starter
from tests.trtllm.test_double_refuses import MADE, MODULE
from tests.trtllm.wrong import make
from tests.trtllm_double.folder import Behind
from tokenflow.errors import InvalidRequestError
from tokenflow.executor.api import FinishReason, Request, SamplingConfig
from tokenflow.executor.trtllm_executor import TrtllmExecutor

FAST = Behind(vocab_size=VOCAB, script="pseudo_random", step_s=0.001)


def with_executor(module: types.ModuleType, make_executor: Any) -> types.SimpleNamespace:
    """The bindings with another class in the place of Executor."""
    names = {name: getattr(module, name) for name in vars(module) if not name.startswith("__")}
    return types.SimpleNamespace(**{**names, "Executor": make_executor})


class Around:
    """The double's Executor, with something around it."""

    def __init__(self, executor: Any) -> None:
        self.inner = executor

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class SlowToReturn(Around):
    """An enqueue returns long after the engine has begun."""

    def enqueue_requests(self, requests: list[Any]) -> list[int]:
        ids = self.inner.enqueue_requests(requests)
        time.sleep(0.03)
        return ids


def test_responses_that_come_before_the_enqueue_returns(
    start: Starter, double: types.ModuleType
) -> None:
    bindings = with_executor(double, lambda *args: SlowToReturn(double.Executor(*args)))
    executor = start.executor(FAST, bindings=bindings)
    seen: dict[int, list[int]] = {}
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            for response in executor.await_responses(timedelta(milliseconds=5)):
                seen.setdefault(response.request_id, []).extend(response.result.output_token_ids[0])

    reader = threading.Thread(target=read)
    reader.start()
    ids = [executor.enqueue_request(Request(input_token_ids=(i, 2), max_tokens=8))
           for i in range(6)]  # fmt: skip
    end = time.monotonic() + 20
    while any(executor.has_request(i) for i in ids) and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.02)
    stop.set()
    reader.join()
    assert [len(seen[i]) for i in ids] == [8] * 6, "nothing that came early was dropped"


class SaysMore(Around):
    """Sends errors for ids that nobody has, and for one that has ended."""

    def __init__(self, executor: Any, module: Any) -> None:
        super().__init__(executor)
        self._module = module

    def await_responses(self, timeout: Any) -> list[Any]:
        given = self.inner.await_responses(timeout=timeout)
        extra = []
        for response in given:
            if not response.has_error() and response.result.is_final:
                ended, nobody = response.request_id, response.request_id + 1000
                message = "Encountered an error in forwardAsync function: late"
                extra += [self._module.Response(i, message, None) for i in (ended, nobody)]
        return [*given, *extra]


def test_errors_of_nobody_change_nothing(start: Starter, double: types.ModuleType) -> None:
    bindings = with_executor(double, lambda *args: SaysMore(double.Executor(*args), double))
    client = Client(start.executor(FAST, bindings=bindings))
    for number in range(6):
        assert client.run((number, 2), 4).reason is FinishReason.LENGTH
    assert client.executor.can_enqueue_requests(), "late errors are no steps that failed"


class TellsNothing(Around):
    """Statistics of which both parts are missing, as their types allow."""

    def get_latest_iteration_stats(self) -> list[Any]:
        given = self.inner.get_latest_iteration_stats()
        for entry in given[1::2]:
            entry.inflight_batching_stats = None
        for entry in given[2::4]:
            entry.kv_cache_stats = None
        return given


def test_statistics_without_their_parts_are_left_out(
    start: Starter, double: types.ModuleType
) -> None:
    bindings = with_executor(double, lambda *args: TellsNothing(double.Executor(*args)))
    client = Client(start.executor(FAST, bindings=bindings))
    client.run((1, 2), 30)
    assert all(entry.inflight_batching_stats.num_gen_requests >= 0 for entry in client.stats)


@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization"])
def test_cancels_at_any_time_from_other_threads(start: Starter, policy: str) -> None:
    """Prompts of several chunks, cancelled before, at and after their first token: the double
    refuses those that come too early. Each ends once."""
    settings = {"batch_scheduler_policy": policy}
    executor = start.executor(FAST, max_queue_size=None, **settings)
    finals: dict[int, int] = {}
    tokens: dict[int, int] = {}
    errors: list[Exception] = []
    stop = threading.Event()

    def read() -> None:
        try:
            while not stop.is_set() or executor._live.ids():
                for response in executor.await_responses(timedelta(milliseconds=5)):
                    result = response.result
                    assert response.request_id not in finals
                    tokens[response.request_id] = tokens.get(response.request_id, 0) + len(
                        result.output_token_ids[0]
                    )
                    if result.is_final:
                        finals[response.request_id] = 1
                executor.get_latest_iteration_stats()
        except Exception as error:
            errors.append(error)

    def ask(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(12):
                prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.choice((3, 70, 150))))
                id = executor.enqueue_request(Request(input_token_ids=prompt, max_tokens=40))
                for _ in range(rng.randint(1, 3)):
                    time.sleep(rng.choice((0.0, 0.001, 0.004, 0.02)))
                    executor.cancel_request(id)
        except Exception as error:
            errors.append(error)

    reader = threading.Thread(target=read)
    askers = [threading.Thread(target=ask, args=(seed,)) for seed in range(3)]
    for thread in (reader, *askers):
        thread.start()
    for thread in askers:
        thread.join()
    stop.set()
    reader.join(30)
    assert not reader.is_alive()
    assert errors == []
    assert len(finals) == 36
    assert executor._executor.hazards == []
    assert min(tokens.values()) >= 1


class SaysItPaused(Around):
    """Its statistics tell once that the engine paused a request by itself. cancelled: in order."""

    def __init__(self, executor: Any) -> None:
        super().__init__(executor)
        self.has_paused = False
        self.cancelled: list[int] = []

    def get_latest_iteration_stats(self) -> list[Any]:
        given = self.inner.get_latest_iteration_stats()
        if given and self.has_paused:
            given[-1].inflight_batching_stats.num_paused_requests = 1
            self.has_paused = False
        return given

    def cancel_request(self, id: int) -> None:
        self.cancelled.append(id)
        self.inner.cancel_request(id)


@pytest.mark.parametrize("is_kept", [True, False])
def test_tokens_from_before_a_pause_of_the_engine_pass_no_cancel_on(
    start: Starter, double: types.ModuleType, is_kept: bool
) -> None:
    """Whoever was paused computes its context again, although a token of it still comes."""
    bindings = with_executor(double, lambda *args: SaysItPaused(double.Executor(*args)))
    behind = Behind(vocab_size=VOCAB, script="pseudo_random", step_s=0.01)
    executor = start.executor(behind, bindings=bindings)
    engine = executor._executor
    client = Client(executor)
    request_id = client.enqueue((1, 2), 200)
    client.wait_tokens(request_id, 1)
    while not engine.get_num_responses_ready():
        time.sleep(0.001)
    engine.has_paused = True
    while engine.has_paused:
        executor.get_latest_iteration_stats()
    if is_kept:
        executor.cancel_request(request_id)
    client.pump()
    if not is_kept:
        executor.cancel_request(request_id)
    assert engine.cancelled == []
    assert client.wait(request_id).reason is FinishReason.CANCELLED
    assert engine.cancelled == [request_id]


def test_shutdown_in_the_middle_of_everything(start: Starter) -> None:
    """Threads that enqueue, cancel and wait get RuntimeError and end."""
    executor = start.executor(FAST)
    ends: list[str] = []

    def until_it_ends(call: Any) -> None:
        try:
            while True:
                call()
                time.sleep(0.001)
        except RuntimeError as error:
            ends.append(str(error))

    rng = random.Random(1)
    calls = (
        lambda: executor.enqueue_request(Request(input_token_ids=(1,) * 100, max_tokens=20)),
        lambda: executor.cancel_request(rng.randrange(1, 60)),
        lambda: executor.await_responses(timedelta(seconds=5)),
        executor.get_latest_iteration_stats,
    )
    threads = [threading.Thread(target=until_it_ends, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    time.sleep(0.15)
    executor.shutdown()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)
    assert len(ends) == 4
    assert all(text.startswith("Shutdown called") for text in ends)
    assert isinstance(executor, TrtllmExecutor)
    assert executor._executor.hazards == []


def test_shutdown_cancels_what_an_enqueue_under_way_brings(
    start: Starter, double: types.ModuleType
) -> None:
    """Two seconds of tokens would be waited for otherwise."""
    bindings = with_executor(double, lambda *args: SlowToReturn(double.Executor(*args)))
    behind = Behind(vocab_size=VOCAB, script="pseudo_random", step_s=0.01)
    executor = start.executor(behind, bindings=bindings)
    request = Request(input_token_ids=(1, 2), max_tokens=200)
    asker = threading.Thread(target=lambda: executor.enqueue_request(request))
    asker.start()
    time.sleep(0.01)
    start_time = time.monotonic()
    executor.shutdown()
    assert time.monotonic() - start_time < 1.0
    asker.join()
    assert len(executor._live) == 0


# -- the double, where it took more than the bindings -----------------------------------------


@pytest.mark.parametrize("spec", MADE.values(), ids=lambda spec: spec.name)
def test_an_unknown_attribute_is_refused_where_the_binding_has_no_room(spec: Any) -> None:
    made = make(MODULE, spec)
    if spec.name in ("Request", "ExecutorConfig"):
        made.no_such_thing = 5
        assert made.no_such_thing == 5
    else:
        with pytest.raises(AttributeError, match="no attribute 'no_such_thing'"):
            made.no_such_thing = 5


@pytest.mark.parametrize(
    ("name", "value"),
    [("top_k", -1), ("top_p", 0.0), ("top_p", 1.5), ("temperature", -0.1), ("min_tokens", -1),
     ("repetition_penalty", 0.0), ("top_p_decay", 0.0), ("min_p", 1.5), ("beam_width", 0),
     ("num_return_sequences", 0), ("top_p_reset_ids", -1), ("no_repeat_ngram_size", -1)],
)  # fmt: skip
def test_sampling_out_of_range_is_refused(start: Starter, name: str, value: float) -> None:
    with pytest.raises(RuntimeError, match=name):
        MODULE.SamplingConfig(**{name: value})
    if name in SamplingConfig.__struct_fields__:
        executor = start.executor(FAST)
        sampling = SamplingConfig(**{name: value})
        with pytest.raises(InvalidRequestError, match=f"sampling_config: TensorRT-LLM.*{name}"):
            executor.enqueue_request(
                Request(input_token_ids=(1,), max_tokens=1, sampling_config=sampling)
            )


def test_a_link_makes_the_double_importable_beside_a_model(tmp_path: Path) -> None:
    from tests.trtllm_double.__main__ import link_into

    for _ in range(2):
        link_into(tmp_path)
    assert (tmp_path / "tensorrt_llm" / "bindings" / "executor.py").is_file()
