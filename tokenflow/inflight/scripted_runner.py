"""A runner without a model: tokens come from a script, "KV" is what was written into the blocks.

Each position of a block holds the token that was computed there and a fingerprint of its whole
history. The runner keeps nothing else about a sequence: at every step it reads the history back
*from the blocks it was given*, checks each fingerprint, that the prompt is the request's, and asks
the script what comes next. A block that belongs to somebody else, was overwritten, evicted while in
use, shared across different histories, or reused without having been computed is an error or a
wrong token, never a silent success. Blocks of the host tier hold cells too; scripted_transport.py
has the copies between the tiers and says which uses of a block they rule out meanwhile.

A script is a distribution with a single token. Fields that only reweigh (temperature, top_k, top_p,
min_p, penalties, biases) therefore change nothing; what bans (bad_words, no_repeat_ngram_size,
min_tokens; see `bans`) replaces a banned token by the next id, modulo the vocabulary, that is not
banned, and by itself if all are. The log-probability stays the script's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from tokenflow.executor.api import Request
from tokenflow.inflight.bans import banned_token_ids, has_bans, next_allowed
from tokenflow.inflight.runner import BlockCopy, SequenceChunk, StepOutput
from tokenflow.inflight.scripted_transport import (
    POISON,
    AtOnce,
    Cell,
    CellBlock,
    CopyPace,
    ScriptedTransport,
)
from tokenflow.inflight.scripts import Script, script_by_name

History = tuple[int, ...]
"""All tokens of a sequence, prompt included."""

KV_BYTES_PER_TOKEN = 1024
"""What a token's KV is said to take, so that pools can be given in bytes."""

_EMPTY_HISTORY = 0


class ScriptedRunner:
    """Implements `runner.Runner` on a script.

    step_s: seconds that a step takes, spent in `sleep`; a ManualClock's `advance` makes it virtual.
    pace: when copies between the tiers complete; by default at once.
    """

    def __init__(
        self,
        script: Script,
        vocab_size: int,
        *,
        step_s: float = 0.0,
        sleep: Callable[[float], object] = time.sleep,
        pace: CopyPace | None = None,
    ) -> None:
        self._script = script
        self._vocab_size = vocab_size
        self._step_s = step_s
        self._sleep = sleep
        self._tokens_per_block = 0
        self._blocks: list[CellBlock] = []
        self._transport = ScriptedTransport([], [], AtOnce())
        self._pace = pace or AtOnce()
        self._requests: dict[int, Request] = {}
        self.num_computed_tokens = 0
        self.num_steps = 0

    @property
    def vocab_size(self) -> int:
        """Token ids are in [0, vocab_size)."""
        return self._vocab_size

    @property
    def num_requests(self) -> int:
        """Requests added and not removed."""
        return len(self._requests)

    def kv_block_bytes(self, tokens_per_block: int) -> int:
        """KV_BYTES_PER_TOKEN for each token."""
        return KV_BYTES_PER_TOKEN * tokens_per_block

    def allocate_kv(self, num_blocks: int, tokens_per_block: int, num_host_blocks: int = 0) -> None:
        """Empty blocks in both tiers."""
        self._tokens_per_block = tokens_per_block
        self._blocks = [[None] * tokens_per_block for _ in range(num_blocks)]
        host: list[CellBlock] = [[None] * tokens_per_block for _ in range(num_host_blocks)]
        self._transport = ScriptedTransport(self._blocks, host, self._pace)

    @property
    def transport(self) -> ScriptedTransport:
        """Copies between the tiers; without a host tier it refuses all of them."""
        return self._transport

    def add_request(self, request_id: int, request: Request) -> None:
        """Raises ValueError for an id that is there already."""
        if request_id in self._requests:
            raise ValueError(f"request {request_id} was added twice")
        self._requests[request_id] = request

    def remove_request(self, request_id: int) -> None:
        """Raises KeyError for an id that is not there."""
        del self._requests[request_id]

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy the cells; the rest of the target becomes empty. Raises RuntimeError for cells that
        were never computed, and for blocks that a copy between the tiers is using."""
        for copy in copies:
            self._transport.check_device_use([copy.source], [copy.target])
            cells = self._blocks[copy.source][: copy.num_tokens]
            if None in cells:
                raise RuntimeError(f"copy of block {copy.source} reads KV that does not exist")
            rest = self._tokens_per_block - copy.num_tokens
            self._blocks[copy.target] = [*cells, *[None] * rest]

    def forward(self, chunks: Sequence[SequenceChunk]) -> StepOutput:
        """Write every chunk, then read every history back. Raises RuntimeError for wrong blocks."""
        if self._step_s > 0:
            self._sleep(self._step_s)
        self.num_steps += 1
        for chunk in chunks:
            self._write(chunk)
        sampled: list[tuple[SequenceChunk, History]] = []
        for chunk in chunks:
            history = self._history(chunk, chunk.start + len(chunk.token_ids))
            self._check_prompt(chunk, history)
            if chunk.samples:
                sampled.append((chunk, history))
        return self._sample(sampled)

    def _sample(self, sampled: Sequence[tuple[SequenceChunk, History]]) -> StepOutput:
        """What comes after each history that was read back."""
        output = StepOutput([], [])
        for chunk, history in sampled:
            token_id, log_prob = self._script(history)
            request = self._requests[chunk.request_id]
            if has_bans(request):
                banned = banned_token_ids(request, history, chunk.num_generated)
                token_id = next_allowed(token_id, banned, self._vocab_size)
            output.token_ids.append(token_id)
            output.log_probs.append(log_prob)
        return output

    def _write(self, chunk: SequenceChunk) -> None:
        size = self._tokens_per_block
        if not chunk.token_ids:
            raise RuntimeError(f"request {chunk.request_id}: empty chunk")
        if len(chunk.block_ids) != -(-(chunk.start + len(chunk.token_ids)) // size):
            raise RuntimeError(f"request {chunk.request_id}: blocks do not cover the chunk")
        first_written = chunk.start // size
        self._transport.check_device_use(
            chunk.block_ids[:first_written], chunk.block_ids[first_written:]
        )
        fingerprint = _EMPTY_HISTORY
        if chunk.start:
            fingerprint = self._cell(chunk, chunk.start - 1)[1]
        for position, token_id in enumerate(chunk.token_ids, chunk.start):
            fingerprint = hash((fingerprint, token_id))
            block = self._blocks[chunk.block_ids[position // size]]
            block[position % size] = (token_id, fingerprint)
        self.num_computed_tokens += len(chunk.token_ids)

    def _history(self, chunk: SequenceChunk, num_tokens: int) -> History:
        history: list[int] = []
        fingerprint = _EMPTY_HISTORY
        for position in range(num_tokens):
            token_id, stored = self._cell(chunk, position)
            fingerprint = hash((fingerprint, token_id))
            if stored != fingerprint:
                raise RuntimeError(
                    f"request {chunk.request_id}: position {position} holds the KV of another "
                    "history"
                )
            history.append(token_id)
        return tuple(history)

    def _cell(self, chunk: SequenceChunk, position: int) -> Cell:
        block_id = chunk.block_ids[position // self._tokens_per_block]
        cell = self._blocks[block_id][position % self._tokens_per_block]
        if cell is None:
            raise RuntimeError(f"request {chunk.request_id}: position {position} has no KV")
        if cell is POISON:
            raise RuntimeError(
                f"request {chunk.request_id}: position {position} holds what a failed copy left"
            )
        return cell

    def _check_prompt(self, chunk: SequenceChunk, history: History) -> None:
        prompt = self._requests[chunk.request_id].input_token_ids
        if history[: len(prompt)] != prompt[: len(history)]:
            raise RuntimeError(f"request {chunk.request_id}: KV of another prompt")


def create_scripted_runner(
    name: str = "counting", *, vocab_size: int = 256, step_s: float = 0.0
) -> ScriptedRunner:
    """The runner of the `scripted` engine: a script by name (scripts.py) at `step_s` a step."""
    return ScriptedRunner(script_by_name(name, vocab_size), vocab_size, step_s=step_s)
