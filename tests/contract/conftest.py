"""Executors by engine and limits, shared by the tests of this folder because some take seconds to
start; a test that ends its executor makes its own with `fresh`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from tests.contract.client import Client
from tests.contract.engines import ENGINES, Engine
from tokenflow.config import ServingConfig

LIMITS = {
    "engine": "scripted",
    "batch_scheduler_policy": "guaranteed_no_evict",
    "scripted_step_s": 0.001,
    "max_batch_size": 4,
    "max_num_tokens": 64,
    "max_seq_len": 256,
    "tokens_per_block": 8,
    "max_tokens_in_paged_kv_cache": 320,
}
# Every other set of limits costs the start of an engine; tests share these.
PAUSING = {"batch_scheduler_policy": "max_utilization"}
WIDE = {
    "max_batch_size": 8,
    "max_num_tokens": 128,
    "max_tokens_in_paged_kv_cache": 1024,
}
# For tests whose client must come in before a stream ends: a stream of 100 tokens takes a second.
SLOW = {"scripted_step_s": 0.01}
UNCHUNKED = {"enable_chunked_context": False, "max_tokens_in_paged_kv_cache": 128}


def _config(engine: Engine, limits: dict[str, object]) -> ServingConfig:
    """A model sets its own pace, so engines that differ only in that of the script are shared."""
    pace = {"scripted_step_s": LIMITS["scripted_step_s"]} if engine.is_torch else {}
    return ServingConfig(**{**LIMITS, **limits, **pace})


def _params(engines: Iterable[Engine]) -> list[Any]:
    return [pytest.param(e, id=e.name, marks=[pytest.mark.torch] * e.is_torch) for e in engines]


def skip_without_tiering(engine: Engine, kv_tiering: bool) -> None:
    """A test that moves KV is for engines that can be told to."""
    if kv_tiering and not engine.has_tiering:
        pytest.skip("this engine moves KV by itself only")


BOUNDED = _params(engine for engine in ENGINES if engine.create_bounded is not None)


@pytest.fixture(scope="session", params=_params(ENGINES))
def engine(request: pytest.FixtureRequest) -> Engine:
    return request.param


@pytest.fixture(scope="package")
def _clients(engine: Engine) -> Iterator[Callable[..., Client]]:
    clients: dict[ServingConfig, Client] = {}

    def get(**limits: object) -> Client:
        config = _config(engine, limits)
        if config not in clients:
            clients[config] = Client(engine.create(config), engine.script)
        return clients[config]

    yield get
    for client in clients.values():
        client.executor.shutdown()
    assert not [t for t in threading.enumerate() if t.name == "inflight-engine"]


@pytest.fixture
def client_with(_clients: Callable[..., Client]) -> Iterator[Callable[..., Client]]:
    """A client of an idle executor with the given limits."""
    used: list[Client] = []

    def get(**limits: object) -> Client:
        client = _clients(**limits)
        client.settle()
        used.append(client)
        return client

    yield get
    for client in used:
        client.settle()


@pytest.fixture
def client(client_with: Callable[..., Client]) -> Client:
    return client_with()


@pytest.fixture
def fresh(engine: Engine) -> Iterator[Callable[..., Client]]:
    """A client of an executor of one's own, shut down at the end."""
    made: list[Client] = []

    def get(max_queue_size: int | None = None, **limits: object) -> Client:
        config = _config(engine, limits)
        if max_queue_size is None:
            executor = engine.create(config)
        else:
            assert engine.create_bounded is not None
            executor = engine.create_bounded(config, max_queue_size)
        made.append(Client(executor, engine.script))
        return made[-1]

    yield get
    for client in made:
        client.executor.shutdown()
