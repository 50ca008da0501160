"""The scripted runner with logits: the exact oracle of everything that sampling does.

Histories are read back from the blocks and checked, as in ScriptedRunner; the logits of what comes
next are a pure function of the whole history, and the real sampler chooses.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch

from tokenflow.executor.api import Request
from tokenflow.inflight.runner import SequenceChunk, StepOutput
from tokenflow.inflight.scripted_runner import History, ScriptedRunner
from tokenflow.inflight.scripts import counting
from tokenflow.inflight.torch_sampler import Sampler


def hashed_logits(history: History, vocab_size: int) -> np.ndarray:
    """[vocab_size] float32: noise that any other history changes altogether, on a preference for
    every ninth token, so that tokens come again and penalties have something to do."""
    digest = hashlib.blake2b(np.array(history, dtype=np.int64).tobytes(), digest_size=8).digest()
    noise = np.random.default_rng(int.from_bytes(digest, "little")).standard_normal(vocab_size)
    noise[::9] += 2.0
    return noise.astype(np.float32)


class LogitsRunner(ScriptedRunner):
    """Implements `runner.Runner` on `hashed_logits` and the sampler."""

    def __init__(self, vocab_size: int, *, step_s: float = 0.0) -> None:
        super().__init__(counting(vocab_size), vocab_size, step_s=step_s)
        self._sampler = Sampler(vocab_size, torch.device("cpu"))

    def add_request(self, request_id: int, request: Request) -> None:
        super().add_request(request_id, request)
        self._sampler.add(request_id, request)

    def remove_request(self, request_id: int) -> None:
        super().remove_request(request_id)
        self._sampler.remove(request_id)

    def _sample(self, sampled: Sequence[tuple[SequenceChunk, History]]) -> StepOutput:
        if not sampled:
            return StepOutput([], [])
        logits = np.stack([hashed_logits(history, self.vocab_size) for _, history in sampled])
        token_ids, log_probs = self._sampler.sample(
            torch.from_numpy(logits),
            [chunk.request_id for chunk, _ in sampled],
            [chunk.num_generated for chunk, _ in sampled],
        )
        return StepOutput(token_ids.tolist(), log_probs.tolist())
