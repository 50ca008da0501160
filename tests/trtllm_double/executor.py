"""Executor: the in-flight core behind the signatures and habits of TensorRT-LLM's.

Owns the engine of one folder. Besides what the core does as TensorRT-LLM does: the id overloads of
`await_responses`, ranks, errors of steps for ever (`sticky`), and the hazards, which are refused or
written down (folder.py, `on_hazard`):
- a cancel of a request of which no token was handed out yet, while context is chunked: the reuse
  cache would keep blocks that were never computed;
- two threads in `await_responses` at a time;
- `get_latest_events` without a timeout.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec

from tests.trtllm_double import parallel
from tests.trtllm_double.convert import Converter, Stamps, core_request
from tests.trtllm_double.engine import Engine
from tests.trtllm_double.events import EventManagerBase
from tests.trtllm_double.objects import Body, Bound
from tokenflow.errors import EngineLostError
from tokenflow.executor import api

logger = logging.getLogger("trtllm_double")

_SLICE = timedelta(milliseconds=20)


class ExecutorBase(Bound):
    """State of one executor; the classes of the values come from the module that made it."""

    _classes: Mapping[str, type]
    hazards: list[str]
    place: parallel.Place

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if "model_path" not in self._values:
            raise RuntimeError("the double loads engines from a folder only")
        self._start(Path(self._values["model_path"]), self._values["executor_config"])

    def _start(self, folder: Path, config: Any) -> None:
        vars(self)["hazards"] = []
        self._folder, self._config = folder, config
        self._engine = Engine(folder, config, self._values["model_type"].name)
        vars(self)["place"] = parallel.find_place(
            config._values["parallel_config"], self._engine.world_size, os.environ
        )
        self._is_shutdown = False
        self._lock = threading.Lock()
        self._awaiting = threading.Lock()
        self._live: dict[int, Stamps] = {}
        self._ended: set[int] = set()
        self._kept: deque[Any] = deque()
        self._sticky: str | None = None
        self._sticky_ids = itertools.count(1 << 40)
        self._convert = Converter(self._classes, self._engine.behind.log_probs)
        self._events: Any = None
        if not self.place.is_leader:
            return
        self._core = self._engine.start()
        size = config.get("kv_cache_config").get("event_buffer_max_size")
        manager = self._core.get_kv_cache_event_manager()
        if size and manager is not None and self.place.has_model:
            kind = self._classes["kv_cache.KVCacheEventManager"]
            self._events = kind.__new__(kind)
            self._events._values = {}
            window = self._engine.max_seq_len
            assert isinstance(self._events, EventManagerBase)
            self._events.attach(
                manager,
                size,
                lambda e: self._convert.event(self._engine.lora.mark(e), window),
                self.hazard,
            )

    def hazard(self, what: str) -> None:
        """A use that TensorRT-LLM 1.2 does not forgive."""
        self.hazards.append(what)
        if self._engine.behind.on_hazard == "raise":
            raise RuntimeError(f"hazard: {what}")
        logger.error("hazard: %s", what)
        with (self._folder / "hazards.txt").open("a", encoding="utf-8") as file:
            file.write(what + "\n")

    # -- requests ------------------------------------------------------------------------------

    def enqueue(self, requests: list[Any]) -> list[int]:
        self._check_usable()
        given = [self._core_request(request) for request in requests]
        with self._lock:
            if self._sticky is not None:
                return [self._fail(request.client_id) for request in given]
            errors = [self._engine.lora.take(r._values["lora_config"]) for r in requests]
            good = [r for r, error in zip(given, errors, strict=True) if error is None]
            try:
                ids = self._core.enqueue_requests(good)
            except EngineLostError as error:
                self._sticky = str(error)
                return [self._fail(request.client_id) for request in given]
            except RuntimeError as error:
                if not self.place.is_orchestrator or "Maximum queue size" not in str(error):
                    raise
                return [self._fail(r.client_id, str(error)) for r in given]
            self._live.update((request_id, Stamps()) for request_id in ids)
            rest = iter(ids)
            return [
                next(rest) if error is None else self._fail(r.client_id, error)
                for r, error in zip(given, errors, strict=True)
            ]

    def _core_request(self, request: Any) -> api.Request:
        made = core_request(request, self._engine.vocab_size)
        salt = self._engine.lora.salt(request._values["lora_config"], made.cache_salt_id)
        return msgspec.structs.replace(made, cache_salt_id=salt)

    def _fail(self, client_id: int | None, message: str | None = None) -> int:
        """An id whose request ends with an error at once."""
        request_id = next(self._sticky_ids)
        self._kept.append(self._convert.error(request_id, message or self._sticky or "", client_id))
        self._ended.add(request_id)
        return request_id

    def cancel(self, request_id: int) -> None:
        self._check_usable()
        stamps = self._live.get(request_id)
        if stamps is not None and not stamps.has_token and self._engine.is_chunked:
            self.hazard(
                f"request {request_id} is cancelled before its first token was seen: with chunked "
                "context blocks that were never computed are kept for reuse"
            )
        if self._sticky is None:
            self._core.cancel_request(request_id)

    # -- responses -----------------------------------------------------------------------------

    def await_any(self, timeout: timedelta | None) -> list[Any]:
        self._check_usable()
        if not self._awaiting.acquire(blocking=False):
            self.hazard("two threads wait for responses")
            self._awaiting.acquire()
        try:
            return self._take(timeout)
        finally:
            self._awaiting.release()

    def await_one(self, request_id: int, timeout: timedelta | None) -> list[Any]:
        end = None if timeout is None else time.monotonic() + timeout.total_seconds()
        while True:
            mine = [r for r in self._kept if r._values["request_id"] == request_id]
            for response in mine:
                self._kept.remove(response)
            if mine:
                return mine
            if request_id in self._ended:
                message = f"ReqId {request_id} has already been processed and was terminated."
                return [self._convert.error(request_id, message, None)]
            if end is not None and time.monotonic() >= end:
                return []
            self._kept.extend(self.await_any(_SLICE))

    def _take(self, timeout: timedelta | None) -> list[Any]:
        with self._lock:
            taken = list(self._kept)
            self._kept.clear()
        if self._sticky is not None:
            if not taken:
                time.sleep(min(_SLICE, timeout or _SLICE).total_seconds())
            return taken
        try:
            new = self._core.await_responses(timedelta(0) if taken else timeout)
        except EngineLostError as error:
            self._sticky = str(error)
            return taken
        with self._lock:  # an id is known here before its first response is looked at
            for given in new:
                stamps = self._live[given.request_id]
                taken.append(self._convert.response(given, stamps))
                if given.payload is None or given.payload.is_final:
                    del self._live[given.request_id]
                    self._ended.add(given.request_id)
        return taken

    def num_ready(self, request_id: int | None) -> int:
        self._check_usable()
        if request_id is not None:
            self._kept.extend(self.await_any(timedelta(0)))
            return sum(r._values["request_id"] == request_id for r in self._kept)
        num_ready = 0 if self._sticky is not None else self._core.get_num_responses_ready()
        return num_ready + len(self._kept)

    # -- the rest ------------------------------------------------------------------------------

    def iteration_stats(self) -> list[Any]:
        self._check_usable()
        if self._sticky is not None:
            return []
        return [self._convert.stats(entry) for entry in self._core.get_latest_iteration_stats()]

    @property
    def can_enqueue(self) -> bool:
        return self.place.is_leader and not self._is_shutdown

    def shut_down(self) -> None:
        if not self.place.is_leader:
            if not self._is_shutdown:
                parallel.wait_for_leader()
            self._is_shutdown = True
            return
        self._is_shutdown = True
        self._core.shutdown()

    def _check_usable(self) -> None:
        if not self.place.is_leader:
            raise RuntimeError("this API must be called on the leader rank only")
        if self._is_shutdown:
            raise RuntimeError("Shutdown called, executor is not accepting requests")


def _await(self: ExecutorBase, timeout: Any = None, id: Any = None, ids: Any = None) -> list[Any]:
    if ids is not None:
        return [self.await_one(request_id, timeout) for request_id in ids]
    return self.await_any(timeout) if id is None else self.await_one(id, timeout)


def _enter(self: ExecutorBase) -> ExecutorBase:
    return self


BODIES: dict[str, Body] = {
    "shutdown": lambda self: self.shut_down(),
    "__enter__": _enter,
    "__exit__": lambda self, type, value, traceback: self.shut_down(),
    "enqueue_request": lambda self, request: self.enqueue([request])[0],
    "enqueue_requests": lambda self, requests: self.enqueue(requests),
    "await_responses": _await,
    "get_num_responses_ready": lambda self, id: self.num_ready(id),
    "cancel_request": lambda self, id: self.cancel(id),
    "get_latest_iteration_stats": lambda self: self.iteration_stats(),
    "get_latest_request_stats": lambda self: [],
    "get_latest_debug_tensors": lambda self: [],
    "can_enqueue_requests": lambda self: self.can_enqueue,
    "get_kv_cache_event_manager": lambda self: self._events,
}
