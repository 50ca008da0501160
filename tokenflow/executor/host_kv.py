"""The KV side of the engine's process: its events, and the hints and questions about its tiers.

Owns who waits for the engine's answer to a question: a thread of its own, because the answer may
take as long as a step, and the step may wait for an acknowledgement that only the thread which
reads commands can take. Invariants: `hint` and `ask` never block; a question is answered, with an
error where the engine raises one, unless the engine's end is the answer.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence

from tokenflow.errors import EngineError
from tokenflow.executor.api import Executor, IterationStats
from tokenflow.executor.channel import Locate, Located, Offload, Prefetch, TieringHint
from tokenflow.executor.kv_api import KVCacheEvent, KVCacheSnapshots, KvTiering

_POLLS_AFTER_HINT = 20
"""Polls for which an idle engine is looked at after a hint, until it has acted on it."""


class HostKv:
    """Speaks with `executor` about its KV.

    answer(located): sends the answer to a question; called in a thread of its own.
    has_events, has_tiering: what the executor offers.
    """

    def __init__(self, executor: Executor, answer: Callable[[Located], None]) -> None:
        self._executor = executor
        self._answer = answer
        self._events = executor.get_kv_cache_event_manager()
        self._tiering = executor.get_kv_tiering()
        self._questions: queue.SimpleQueue[Locate] = queue.SimpleQueue()
        self._answerer: threading.Thread | None = None
        self._num_hints = 0  # the reader's thread counts
        self._num_hints_seen = 0
        self._num_polls_left = 0
        self._has_copies = False

    @property
    def has_events(self) -> bool:
        """True if there will be KV events."""
        return self._events is not None

    @property
    def has_tiering(self) -> bool:
        """True if hints and questions are understood."""
        return self._tiering is not None

    def drain_events(self) -> list[KVCacheEvent]:
        """The events since the last call."""
        return [] if self._events is None else self._events.get_latest_events(0)

    def expects_more(self, stats: Sequence[IterationStats]) -> bool:
        """True while an idle engine may still have something to say: copies were under way at the
        last of the statistics (`stats`: those since the last call), so more of them come when the
        copies end; or some calls after a hint."""
        tiers = stats[-1].kv_tier_stats if stats else None
        if tiers is not None:
            num_blocks = tiers.num_device_in_transit_blocks + tiers.num_host_in_transit_blocks
            self._has_copies = num_blocks > 0
        if self._num_hints_seen != self._num_hints:
            self._num_hints_seen, self._num_polls_left = self._num_hints, _POLLS_AFTER_HINT
        elif not stats:  # an engine that still steps has not come to it
            self._num_polls_left = max(0, self._num_polls_left - 1)
        return self._has_copies or self._num_polls_left > 0

    def hint(self, message: TieringHint) -> None:
        """Pass a hint on; an engine that has failed takes none. Raises EngineError where there is
        no KvTiering."""
        tiering = self._get_tiering(message)
        try:
            if isinstance(message, Offload):
                tiering.offload(message.token_ids, message.max_blocks, message.cache_salt_id)
            elif isinstance(message, Prefetch):
                tiering.prefetch(message.token_ids, message.cache_salt_id)
            else:
                tiering.drop_host(message.token_ids, message.cache_salt_id)
        except Exception:
            if self._executor.can_enqueue_requests():
                raise
        self._num_hints += 1

    def request_snapshot(self) -> None:
        """Have the events told anew, by an engine that can."""
        if isinstance(self._events, KVCacheSnapshots):
            self._events.request_snapshot()

    def ask(self, message: Locate) -> None:
        """Have a question answered. Raises EngineError where there is no KvTiering."""
        self._get_tiering(message)
        if self._answerer is None:
            self._answerer = threading.Thread(
                target=self._answer_questions, name="engine-host-kv", daemon=True
            )
            self._answerer.start()
        self._questions.put(message)

    def _get_tiering(self, message: object) -> KvTiering:
        if self._tiering is None:
            raise EngineError(f"unexpected {type(message).__name__}: this engine has no KvTiering")
        return self._tiering

    def _answer_questions(self) -> None:
        while True:
            message = self._questions.get()
            assert self._tiering is not None
            try:
                location = self._tiering.locate(message.token_ids, message.cache_salt_id)
                answer = Located(message.question, location)
            except Exception as error:
                if not self._executor.can_enqueue_requests():
                    return  # the end of the process is the answer
                answer = Located(message.question, None, str(error) or repr(error))
            with contextlib.suppress(OSError):  # a proxy that is gone ends the process
                self._answer(answer)
