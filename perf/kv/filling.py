"""A runner that does not compute what only fills blocks.

Owns the short cut by which pools are filled in a moment: the chunks of requests that are named
leave the KV of somebody else's block in theirs, instead of that of their random tokens. The engine,
its blocks and all copies are real; nobody ever reads that KV.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenflow.executor.api import Request
from tokenflow.inflight.runner import BlockCopy, KvTransport, Runner, SequenceChunk, StepOutput


class FillingRunner:
    """Implements `runner.Runner` on another one.

    fillers: ids of requests that are not computed; they sample token 0.
    """

    def __init__(self, runner: Runner, tokens_per_block: int) -> None:
        self._runner = runner
        self._tokens_per_block = tokens_per_block
        self.fillers: set[int] = set()

    @property
    def vocab_size(self) -> int:
        """See Runner."""
        return self._runner.vocab_size

    def kv_block_bytes(self, tokens_per_block: int) -> int:
        """See Runner."""
        return self._runner.kv_block_bytes(tokens_per_block)

    def allocate_kv(self, num_blocks: int, tokens_per_block: int, num_host_blocks: int) -> None:
        """See Runner."""
        self._runner.allocate_kv(num_blocks, tokens_per_block, num_host_blocks)

    @property
    def transport(self) -> KvTransport:
        """See Runner."""
        return self._runner.transport

    def add_request(self, request_id: int, request: Request) -> None:
        """See Runner."""
        if request_id not in self.fillers:
            self._runner.add_request(request_id, request)

    def remove_request(self, request_id: int) -> None:
        """See Runner."""
        if request_id not in self.fillers:
            self._runner.remove_request(request_id)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """See Runner."""
        self._runner.copy_blocks(copies)

    def forward(self, chunks: Sequence[SequenceChunk]) -> StepOutput:
        """See Runner."""
        computed = [chunk for chunk in chunks if chunk.request_id not in self.fillers]
        for chunk in chunks:
            if chunk.request_id in self.fillers:
                self._fill(chunk, computed)
        output = self._runner.forward(computed) if computed else StepOutput([], [])
        samples = iter(zip(output.token_ids, output.log_probs, strict=True))
        merged = [
            (0, 0.0) if chunk.request_id in self.fillers else next(samples)
            for chunk in chunks
            if chunk.samples
        ]
        return StepOutput([token for token, _ in merged], [log_prob for _, log_prob in merged])

    def _fill(self, chunk: SequenceChunk, computed: Sequence[SequenceChunk]) -> None:
        """Write its blocks, if there is something to write: pages that nobody ever wrote to would
        be copied faster than others."""
        if computed:
            source, size = computed[0].block_ids[0], self._tokens_per_block
            first = chunk.start // size
            self._runner.copy_blocks(
                [BlockCopy(source, block, size) for block in chunk.block_ids[first:]]
            )
