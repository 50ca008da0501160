"""Decode steps in virtual time, without looking at each sequence in each of them.

Owns the bookkeeping of a *run*: steps in which the same sequences decode one token each, nobody
comes, ends or is cancelled, and nobody has to be paused. What happens in such a step to a sequence
that fills no block is one more token, so that is written down for all the steps of the run when it
is over. Everything else is done in each step, by the batcher's own parts and in its order: copies
that land, KV commands, blocks that are taken and stored, statistics. A step in which something else
may happen is the batcher's.

Only for runners that can decode unseen (virtual_runner.py): the token is known before the step.

Invariants: what the batcher, the KV cache, statistics and responses say is what the same steps say
without runs, at each boundary; the sequences are up to date whenever the batcher makes a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenflow.errors import InternalError
from tokenflow.executor.api import IterationStats, Response
from tokenflow.inflight.batcher import InflightBatcher
from tokenflow.inflight.block_store import SequenceBlocks
from tokenflow.inflight.iteration import Iteration, StepWork
from tokenflow.inflight.responses import tokens_response
from tokenflow.inflight.runner import SequenceChunk, StepOutput
from tokenflow.inflight.sequence import SequenceState
from tokenflow.inflight.token_budget import PlannedChunk
from tokenflow.inflight.virtual_runner import LOG_PROB, TOKEN_ID, VirtualRunner


class DecodeBatch:
    """The sequences of a run, in the order of the batch.

    request_ids: the engine's. num_sampled: tokens that each had sampled before the run.
    """

    def __init__(self, sequences: Sequence[SequenceState]) -> None:
        self.request_ids = tuple(s.request_id for s in sequences)
        self._client_ids = [s.request.client_id for s in sequences]
        self._num_sampled = [s.num_sampled for s in sequences]

    def responses(self, number: int) -> list[Response]:
        """What the step with that number (from 1) of the run says."""
        return [
            tokens_response(request_id, client_id, [TOKEN_ID], num_sampled + number)
            for request_id, client_id, num_sampled in zip(
                self.request_ids, self._client_ids, self._num_sampled, strict=True
            )
        ]


@dataclass(frozen=True, slots=True)
class DecodedStep:
    """A step that ended: each sequence of `batch` got one more TOKEN_ID. number: in its run."""

    batch: DecodeBatch
    number: int
    stats: IterationStats

    def responses(self) -> list[Response]:
        """The same, one by one."""
        return self.batch.responses(self.number)


class DecodeRuns:
    """Makes the steps of a batcher that belong to a run."""

    def __init__(self, batcher: InflightBatcher, runner: VirtualRunner) -> None:
        self._batcher = batcher
        self._runner = runner
        self._run: _Run | None = None

    def begin(self, now: float) -> bool:
        """Begin and compute a step at `now`, if it belongs to a run; else nothing has happened, and
        the step is the batcher's."""
        run, batcher = self._run, self._batcher
        if run is not None and not (batcher.is_still and run.goes_on()):
            run.close()
            run = self._run = None
        if run is None:
            run = self._run = self._new_run()
            if run is None:
                return False
        run.begin(now)
        return True

    def end(self, now: float) -> DecodedStep | None:
        """End the step that `begin` began, at `now`. None if that is the batcher's: there was no
        such step, or somebody is to end with it."""
        run = self._run
        if run is None:
            return None
        if not self._batcher.has_cancels:
            return run.end(now)
        run.hand_over()
        self._run = None
        return None

    def _new_run(self) -> _Run | None:
        sequences = self._batcher.decoding()
        if sequences is None or not all(map(_is_predictable, sequences)):
            return None
        run = _Run(self._batcher, self._runner, sequences)
        return run if run.goes_on() else None


def _is_predictable(sequence: SequenceState) -> bool:
    """True if all that the next tokens may do is to reach a number that is known, and each is sent
    at once without more than itself."""
    request = sequence.request
    return (
        request.streaming
        and request.end_id != TOKEN_ID
        and not request.stop_words
        and not request.output_config.return_log_probs
        and sequence.num_sent == sequence.num_generated
    )


def _blocks(sequence: SequenceState) -> SequenceBlocks:
    assert sequence.blocks is not None
    return sequence.blocks


class _Run:
    """num_steps: steps that have ended. A sequence that begins a block in a step has filled one in
    the step before; `_borders[num_steps % tokens_per_block]` are those that begin one now."""

    def __init__(
        self, batcher: InflightBatcher, runner: VirtualRunner, sequences: list[SequenceState]
    ) -> None:
        self._batcher, self._runner, self._kv = batcher, runner, batcher.kv
        self._sequences = sequences
        self._lengths = [len(s.token_ids) for s in sequences]
        self._num_tokens = sum(self._lengths)
        self._num_written = [0] * len(sequences)
        self._max_steps = min(map(self._num_before_end, sequences))
        size = self._kv.tokens_per_block
        self._borders: list[list[int]] = [[] for _ in range(size)]
        for i, length in enumerate(self._lengths):
            self._borders[(1 - length) % size].append(i)
        self._unstored = {i for i, s in enumerate(sequences) if self._has_unstored(s)}
        self._iteration: Iteration | None = None
        self._batch = DecodeBatch(sequences)
        self.num_steps = 0

    def _num_before_end(self, sequence: SequenceState) -> float:
        """How many of its tokens do not end it."""
        num_generated = sequence.num_generated
        until_end = self._runner.num_until_end(sequence.request_id, num_generated)
        return min(sequence.max_tokens - num_generated - 1, until_end)

    def goes_on(self) -> bool:
        """True if one more step ends nobody and has the blocks that it needs."""
        if self.num_steps >= self._max_steps:
            return False
        return len(self._growing()) <= self._kv.num_free_blocks

    def begin(self, now: float) -> None:
        """First boundary, and the step."""
        batcher, kv = self._batcher, self._kv
        kv.begin(now)
        iteration = Iteration(now, num_active=batcher.num_active, num_queued=batcher.num_queued)
        self._iteration = iteration
        batcher.carry_out_commands()
        for i in self._growing():
            if not kv.grow(_blocks(self._sequences[i]), self._lengths[i] + self.num_steps):
                raise InternalError("no block for a batch that was said to fit")
        kv.flush_events()
        failure = kv.run_moves(self._runner.copy_blocks)
        if failure is not None or kv.take_damaged():
            raise InternalError(f"a copy failed in virtual time: {failure}")
        self._runner.decode(self._batch.request_ids, self._num_tokens, self._chunks)

    def end(self, now: float) -> DecodedStep:
        """Second boundary."""
        iteration, kv, log = self._iteration, self._kv, self._batcher.log
        assert iteration is not None
        num = len(self._sequences)
        work = StepWork(0, 0, num, self._num_tokens)
        self.num_steps += 1
        self._num_tokens += num
        self._store_full_blocks()
        self._batcher.num_failed_steps = 0
        kv.begin(now)
        stats = log.entry(iteration, work, now, kv.stats(), kv.tier_stats())
        log.last_num_active = iteration.num_active
        kv.flush_events()
        self._iteration = None
        return DecodedStep(self._batch, self.num_steps, stats)

    def close(self) -> None:
        """Bring the sequences up to date."""
        for i in range(len(self._sequences)):
            self._write(i, self._batcher.log.number - 1)

    def hand_over(self) -> None:
        """The step that was begun is ended by the batcher."""
        self.close()
        iteration = self._iteration
        assert iteration is not None
        for s in self._sequences:
            start = s.num_computed
            iteration.chunks.append(PlannedChunk(s, start, start + 1, False, True))
        num = len(self._sequences)
        iteration.set_output(
            StepOutput([TOKEN_ID] * num, [LOG_PROB] * num), self._runner.vocab_size
        )
        self._batcher.take_over(iteration)

    def _growing(self) -> list[int]:
        return self._borders[self.num_steps % len(self._borders)]

    def _store_full_blocks(self) -> None:
        """Of those who have filled one, and of those for whom there was a twin when they had."""
        filled = self._growing()
        due = sorted(self._unstored.union(filled)) if self._unstored else filled
        for i in due:
            sequence = self._sequences[i]
            self._write(i, self._batcher.log.number)
            self._kv.store_full_blocks(_blocks(sequence), sequence.token_ids, sequence.num_computed)
            if self._has_unstored(sequence):
                self._unstored.add(i)
            else:
                self._unstored.discard(i)

    def _has_unstored(self, sequence: SequenceState) -> bool:
        num_full = sequence.num_computed // self._kv.tokens_per_block
        return _blocks(sequence).num_stored < num_full

    def _write(self, i: int, iteration: int) -> None:
        """Write down the tokens of the steps that have ended, the last one in `iteration`."""
        num_new = self.num_steps - self._num_written[i]
        if not num_new:
            return
        self._num_written[i] = self.num_steps
        sequence = self._sequences[i]
        sequence.append_each([TOKEN_ID] * num_new, [LOG_PROB] * num_new, iteration)
        sequence.num_computed += num_new
        sequence.num_sent += num_new

    def _chunks(self) -> list[SequenceChunk]:
        """The step under way as a runner usually sees it."""
        chunks: list[SequenceChunk] = []
        for i, s in enumerate(self._sequences):
            length = self._lengths[i] + self.num_steps
            num_generated = length - s.num_prompt_tokens
            slots = _blocks(s).slots(self._kv.num_blocks_for(length))
            chunks.append(
                SequenceChunk(s.request_id, (TOKEN_ID,), length - 1, slots, True, num_generated)
            )
        return chunks
