"""Which LoRA adapters the engine has, and what of an adapter is sent with an enqueue.

Owns the choice between the id alone and the id with its weights, and the weights that are kept for
it. Runs in the coordinator's thread; holds no reference to an engine.

Invariants:
- weights are sent until an enqueue of their id was answered without an error by the engine of the
  moment, then the id alone: on resumes, and for whoever asks for the same adapter;
- an engine that has forgotten the adapter (its cache needed the room, or it is another engine) gets
  the weights again, as long as the request brought them or they are kept here. A request is started
  again for that once per enqueue with the id alone, so never twice with weights;
- what is kept here is bounded, those that were not asked for longest go first; equal weights of one
  id are held once, however many requests bring them.
"""

from __future__ import annotations

from collections import OrderedDict

from tokenflow.executor.lora import MAX_WEIGHT_BYTES, LoraConfig, is_cache_miss
from tokenflow.session import Session

MAX_KEPT_BYTES = 8 * MAX_WEIGHT_BYTES
_MAX_IDS = 4096


class Adapters:
    """max_kept_bytes: of weights that are kept beyond the requests that brought them."""

    def __init__(self, max_kept_bytes: int = MAX_KEPT_BYTES) -> None:
        self._max_kept_bytes = max_kept_bytes
        self._kept: OrderedDict[int, LoraConfig] = OrderedDict()
        self._num_kept_bytes = 0
        self._cached: OrderedDict[int, None] = OrderedDict()  # in the engine, as far as is known

    def keep(self, lora: LoraConfig) -> LoraConfig:
        """A request brings `lora`: the same value, or an equal one that is here already. The last
        weights that came under an id are those that are kept."""
        kept = self._kept.get(lora.task_id)
        if kept is not None:
            self._kept.move_to_end(lora.task_id)
            if lora == kept:
                return kept
        if not lora.has_weights:
            return lora
        self._num_kept_bytes += _num_bytes(lora) - (0 if kept is None else _num_bytes(kept))
        self._kept[lora.task_id] = lora
        while self._num_kept_bytes > self._max_kept_bytes:
            _, oldest = self._kept.popitem(last=False)
            self._num_kept_bytes -= _num_bytes(oldest)
        return lora

    def to_enqueue(self, session: Session) -> LoraConfig | None:
        """What the next enqueue of the session says of its adapter; notes which it is."""
        lora = session.request.lora_config
        session.names_lora_only = lora is not None and lora.task_id in self._cached
        if lora is None:
            return None
        if session.names_lora_only:
            self._cached.move_to_end(lora.task_id)
            return LoraConfig(task_id=lora.task_id)
        best = lora if lora.has_weights else self._kept.get(lora.task_id, lora)
        session.names_lora_only = not best.has_weights
        return best

    def answered(self, session: Session) -> None:
        """The first token after an enqueue came: the engine has the adapter."""
        lora = session.request.lora_config
        if lora is None:
            return
        self._cached[lora.task_id] = None
        self._cached.move_to_end(lora.task_id)
        if len(self._cached) > _MAX_IDS:
            self._cached.popitem(last=False)

    def can_send_again(self, session: Session, message: str) -> bool:
        """An enqueue ended with the error `message`: True if that was because the engine does not
        have the adapter, and its weights are here. They are sent with the next enqueue."""
        lora = session.request.lora_config
        if lora is None or not session.names_lora_only or not is_cache_miss(message):
            return False
        self._cached.pop(lora.task_id, None)
        return lora.has_weights or lora.task_id in self._kept

    def lost(self) -> None:
        """The engine is gone, and with it all it had."""
        self._cached.clear()


def _num_bytes(lora: LoraConfig) -> int:
    return sum(len(part.data) for part in (lora.weights, lora.config) if part is not None)
