"""`kv_api.KvTiering` of the embedded engine: commands for the engine's own thread.

Owns the way there and the questions that are open. A command is carried out between two steps,
where no copy that a step needs is outstanding. Invariant: a question ends with an answer, with the
engine's end (`close`), wherever it was then, or after 30 s.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

from tokenflow.errors import EngineError
from tokenflow.executor.kv_api import KvLocation
from tokenflow.inflight.kv_ahead import KvAhead

KvCommand = Callable[[KvAhead], None]

_LOCATE_TIMEOUT_S = 30.0


class EngineTiering:
    """Implements `kv_api.KvTiering`. post: takes a command to the engine's thread, in order with
    the requests; never blocks, and may leave it out once the engine has ended."""

    def __init__(self, post: Callable[[KvCommand], None]) -> None:
        self._post = post
        self._lock = threading.Lock()
        self._open: set[Future[KvLocation]] = set()
        self._end: Callable[[], Exception] | None = None

    def locate(self, token_ids: Sequence[int], cache_salt_id: int | None = None) -> KvLocation:
        """See KvTiering. Raises what `close` was given when the engine ends or has ended,
        EngineError when it does not answer in 30 s."""
        tokens = tuple(token_ids)
        answer: Future[KvLocation] = Future()
        with self._lock:
            if self._end is not None:
                raise self._end()
            self._open.add(answer)
        try:
            self._post(lambda kv: answer.set_result(kv.locate(tokens, cache_salt_id)))
            return answer.result(_LOCATE_TIMEOUT_S)
        except FutureTimeoutError:
            raise EngineError(f"no answer to locate within {_LOCATE_TIMEOUT_S:g} s") from None
        finally:
            with self._lock:
                self._open.discard(answer)

    def offload(
        self, token_ids: Sequence[int], max_blocks: int, cache_salt_id: int | None = None
    ) -> None:
        """See KvTiering."""
        tokens = tuple(token_ids)  # the caller may go on with its list before the engine looks
        self._post(lambda kv: kv.offload(tokens, max_blocks, cache_salt_id))

    def prefetch(self, token_ids: Sequence[int], cache_salt_id: int | None = None) -> None:
        """See KvTiering."""
        tokens = tuple(token_ids)
        self._post(lambda kv: kv.prefetch(tokens, cache_salt_id))

    def drop_host(self, token_ids: Sequence[int], cache_salt_id: int | None = None) -> None:
        """See KvTiering."""
        tokens = tuple(token_ids)
        self._post(lambda kv: kv.drop_host(tokens, cache_salt_id))

    def close(self, error: Callable[[], Exception]) -> None:
        """The engine's thread, in which commands are carried out, ends: no question is answered any
        more. error: makes what each of them raises."""
        with self._lock:
            self._end = error
            questions, self._open = self._open, set()
        for answer in questions:
            if not answer.done():
                answer.set_exception(error())
