"""`kv_api.KvTiering` of the embedded engine: commands for the engine's own thread.

Owns nothing but the way there: a command is carried out between two steps, where no copy that a
step needs is outstanding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

from tokenflow.errors import EngineError
from tokenflow.executor.kv_api import KvLocation
from tokenflow.inflight.kv_cache import KvCacheManager

KvCommand = Callable[[KvCacheManager], None]

_LOCATE_TIMEOUT_S = 30.0


class EngineTiering:
    """Implements `kv_api.KvTiering`. post: takes a command to the engine's thread, in order with
    the requests; never blocks."""

    def __init__(self, post: Callable[[KvCommand], None]) -> None:
        self._post = post

    def locate(self, token_ids: Sequence[int], cache_salt_id: int | None = None) -> KvLocation:
        """See KvTiering. Raises EngineError when the engine does not answer in 30 s."""
        answer: Future[KvLocation] = Future()
        self._post(lambda kv: answer.set_result(kv.locate(token_ids, cache_salt_id)))
        try:
            return answer.result(_LOCATE_TIMEOUT_S)
        except FutureTimeoutError:
            raise EngineError(f"no answer to locate within {_LOCATE_TIMEOUT_S:g} s") from None

    def offload(
        self, token_ids: Sequence[int], max_blocks: int, cache_salt_id: int | None = None
    ) -> None:
        """See KvTiering."""
        self._post(lambda kv: kv.offload(token_ids, max_blocks, cache_salt_id))

    def prefetch(self, token_ids: Sequence[int], cache_salt_id: int | None = None) -> None:
        """See KvTiering."""
        self._post(lambda kv: kv.prefetch(token_ids, cache_salt_id))

    def drop_host(self, token_ids: Sequence[int], cache_salt_id: int | None = None) -> None:
        """See KvTiering."""
        self._post(lambda kv: kv.drop_host(token_ids, cache_salt_id))
