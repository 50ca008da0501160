"""In-flight batching: the engine's iteration, without threads and without a clock.

Owns the active list and the order of an iteration (TensorRT-LLM's, for a step that runs
synchronously):

    begin_step   boundary: cancels, KV commands, new requests, capacity, choice of tokens
    forward      the copies that the step needs, then the runner computes; cancels and requests may
                 be handed in meanwhile
    finish_step  boundary: sampled tokens, natural ends, cancels, responses, statistics

Cancels are taken at both boundaries, so `cancel(a)` then `enqueue(b)` at any moment gives b the
slot and the blocks of a in the next step. One that came during `forward` finds its request with a
token more: if that token ended the request, the natural final response is sent and nothing else;
otherwise the token is lost and the final response is CANCELLED without tokens. A cancelled request
that waits, or that the engine paused itself, ends at the next boundary too (TensorRT-LLM lets it
run a step first).

A request refused by admission.py gets its error response at the first boundary after `enqueue`,
even while the batch is full. Waiting requests become active while there are fewer active ones than
`max_batch_size`, and beyond that if their priority exceeds the lowest active one.

If the runner fails, every active request gets an error response and its blocks are freed without
being stored; what waits goes on. If only a copy between the KV tiers fails, those who needed it
start again and compute what was lost. Each request gets exactly one final response. How many
steps failed in a row is counted here; what follows from it is the executor's business.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tokenflow.errors import InternalError
from tokenflow.executor.api import (
    ExecutorConfig,
    IterationStats,
    Request,
    Response,
)
from tokenflow.inflight.admission import AdmissionLimits, check_engine_limits
from tokenflow.inflight.capacity import capacity_policy
from tokenflow.inflight.iteration import Iteration, IterationLog, StepResult
from tokenflow.inflight.kv_cache import KvCacheManager
from tokenflow.inflight.pools import allocate_pools, num_pool_blocks
from tokenflow.inflight.request_queue import RequestQueue
from tokenflow.inflight.responses import (
    cancelled_response,
    error_response,
    refusal_response,
    result_response,
)
from tokenflow.inflight.runner import Runner, SequenceChunk
from tokenflow.inflight.sequence import SequenceState, started
from tokenflow.inflight.tiering import KvCommand
from tokenflow.inflight.token_budget import PlannedChunk, TokenBudget

_MAX_COMMANDS = 256
"""KV commands carried out at one boundary: a flood of hints must not hold up who computes."""


class InflightBatcher:
    """Drives a runner. Not thread-safe; `enqueue` and `cancel` may be called at any moment between
    the phases of a step, by the thread that runs it.

    num_host_blocks, block_bytes: blocks of the host pool, and bytes of one block.
    num_failed_steps: steps that the runner failed since the last one that it computed.
    last_failure: what the last of them said.
    log: the iterations so far.
    """

    def __init__(self, runner: Runner, config: ExecutorConfig) -> None:
        """Allocates the runner's KV pool. Raises ConfigError for limits that cannot work."""
        check_engine_limits(config)
        self._runner = runner
        self._config = config
        self._budget = TokenBudget.of(config)
        self._capacity = capacity_policy(config.scheduler_config.capacity_scheduler_policy)
        num_blocks = num_pool_blocks(config.kv_cache_config, config.tokens_per_block)
        host = allocate_pools(runner, config, num_blocks)
        self.block_bytes = runner.kv_block_bytes(config.tokens_per_block)
        self.num_host_blocks = host.num_blocks if host else 0
        self.kv = KvCacheManager(
            config.kv_cache_config, config.tokens_per_block, host, block_bytes=self.block_bytes
        )
        self._queue = RequestQueue(AdmissionLimits(config, runner.vocab_size, num_blocks))
        self._kv_commands: list[KvCommand] = []
        self._active: list[SequenceState] = []
        self._iteration: Iteration | None = None
        self.log = IterationLog(config.max_batch_size)
        self._context_waited = False
        self._may_start_others = False
        self.num_failed_steps = 0
        self.last_failure = ""

    @property
    def num_active(self) -> int:
        """Requests taken from the queue, whether or not they hold blocks."""
        return len(self._active)

    @property
    def num_queued(self) -> int:
        """Requests that wait to become active."""
        return len(self._queue)

    @property
    def has_work(self) -> bool:
        """False when a step would do nothing."""
        return bool(self._queue or self._active or self.log.last_num_active or self._kv_commands)

    def enqueue(self, request_id: int, request: Request) -> None:
        """Queue a request; ids must be unique over the batcher's life."""
        self._queue.enqueue(request_id, request)

    def cancel(self, request_id: int) -> None:
        """Ask for the end of a request; unknown and finished ids are ignored."""
        self._queue.cancel(request_id)

    def command(self, command: KvCommand) -> None:
        """Carry out `command` at the next `begin_step`, or behind those given before."""
        self._kv_commands.append(command)

    def drop_queued(self) -> None:
        """Forget everything that is not active, without responses (shutdown)."""
        self._queue.drop()

    def begin_step(self, now: float) -> list[Response]:
        """First boundary at instant `now`: returns the final responses of cancelled and refused
        requests and fixes what `forward` computes."""
        if self._iteration is not None:
            raise InternalError("begin_step called twice")
        responses = self._queue.admit()
        responses += self._take_cancels()
        self.kv.begin(now)
        iteration = Iteration(now)
        iteration.has_commands = self.carry_out_commands()
        self._queue.fetch(self._active, self._config.max_batch_size)
        iteration.num_paused = self._capacity.schedule(
            self._active, self.kv, self._config.max_batch_size
        )
        self._may_start_others = False
        responses += self._introduce_to_runner()
        iteration.chunks, self._context_waited = self._budget.choose(
            started(self._active), context_waited=self._context_waited
        )
        iteration.num_active, iteration.num_queued = len(self._active), len(self._queue.waiting)
        self._iteration = iteration
        self.kv.flush_events()  # whoever hears of a pause is to find its KV
        return responses

    def forward(self) -> None:
        """Compute the step on the runner. Its failure is kept for `finish_step`."""
        iteration = self._current()
        try:
            failure = self.kv.run_moves(self._runner.copy_blocks)
            if failure is not None:
                raise failure
            self._restart_damaged(iteration)
            if not iteration.chunks:
                return
            output = self._runner.forward(self._runner_chunks(iteration.chunks))
            iteration.set_output(output, self._runner.vocab_size)
        except Exception as error:
            iteration.failure = f"Encountered an error in forward function: {error}"

    def _restart_damaged(self, iteration: Iteration) -> None:
        """Whose KV did not arrive from the host is started anew in the next step."""
        damaged = self.kv.take_damaged()
        for sequence in [s for s in self._active if s.blocks in damaged]:
            sequence.restart(self.kv)
            self._may_start_others = True
            iteration.drop(sequence)
        self.kv.forget_lost()

    def finish_step(self, now: float) -> StepResult:
        """Second boundary at instant `now`: takes the sampled tokens and returns the responses."""
        iteration = self._current()
        self._iteration = None
        if iteration.failure is not None:
            self.num_failed_steps += 1
            self.last_failure = iteration.failure
            responses = self._fail_active(iteration.failure)
            self.kv.take_damaged()
            self.kv.forget_lost()
        else:
            if iteration.chunks:
                self.num_failed_steps = 0
            responses = self._update(iteration)
        self.kv.begin(now)
        stats = None
        if iteration.num_active or self.log.last_num_active or iteration.has_commands:
            stats = self._stats(iteration, now)
        self.log.last_num_active = iteration.num_active
        self.kv.flush_events()
        return StepResult(responses, stats)

    def poll(self, now: float) -> IterationStats | None:
        """Between steps, while nothing is to be computed: see to copies that still run. Returns
        statistics once the last of them is done."""
        self.kv.begin(now)
        self.kv.flush_events()
        if self.kv.has_flights:
            return None
        return self._stats(Iteration(now), now)

    def _stats(self, iteration: Iteration, now: float) -> IterationStats:
        work = iteration.work()
        return self.log.entry(iteration, work, now, self.kv.stats(), self.kv.tier_stats())

    def step(self, now: float) -> StepResult:
        """A whole iteration that takes no time; its responses include those of `begin_step`."""
        responses = self.begin_step(now)
        self.forward()
        result = self.finish_step(now)
        return replace(result, responses=responses + result.responses)

    # -- steps that decode, and nothing else (decode_run.py) -----------------------------------

    def decoding(self) -> list[SequenceState] | None:
        """The active requests that are started, if the next step computes one token of each of them
        and, as far as is known now, nothing else happens in it. For decode_run.py, as `take_over`
        and the two looks between them."""
        running = started(self._active)
        if len(running) < len(self._active) and (
            self._may_start_others or not self._capacity.waits_for_an_end
        ):
            return None  # one of them may be started
        if not 0 < len(running) <= self._budget.max_num_tokens or not self.is_still:
            return None
        if not all(s.is_generating for s in running):
            return None
        self._context_waited = False  # as the budget finds where there is no context
        return running

    @property
    def is_still(self) -> bool:
        """True if nobody has come or is to end, and nobody may become active."""
        return self._queue.is_still(self._active, self._config.max_batch_size)

    @property
    def has_cancels(self) -> bool:
        """True if somebody is to end at the next boundary."""
        return self._queue.has_cancels

    def take_over(self, iteration: Iteration) -> None:
        """Have `finish_step` end an iteration that was begun elsewhere."""
        self._iteration = iteration

    def check_integrity(self) -> None:
        """Assert the invariants that hold between steps; for tests and idle moments."""
        self.kv.check_integrity()
        assert self._iteration is None
        assert sum(s.is_started for s in self._active) <= self._config.max_batch_size
        assert self._active == sorted(self._active, key=lambda s: s.sort_key)
        assert not any(s.is_started for s in self._queue.waiting)
        if not any(s.is_started for s in self._active):
            assert self.kv.num_used_blocks == 0, "blocks referenced by nobody"

    def carry_out_commands(self) -> bool:
        """Part of a first boundary. True if there were any."""
        commands = self._kv_commands[:_MAX_COMMANDS]
        del self._kv_commands[:_MAX_COMMANDS]
        for command in commands:
            command(self.kv.ahead)
        return bool(commands)

    def _current(self) -> Iteration:
        if self._iteration is None:
            raise InternalError("no step was begun")
        return self._iteration

    def _take_cancels(self) -> list[Response]:
        """End the cancelled requests; those not admitted yet wait for the next `begin_step`."""
        responses: list[Response] = []
        for sequence in self._queue.cancelled(self._active):
            responses.append(cancelled_response(sequence))
            self._remove(sequence, keep_kv=True)
        return responses

    def _introduce_to_runner(self) -> list[Response]:
        responses: list[Response] = []
        for sequence in [s for s in self._active if not s.is_known_to_runner and s.is_started]:
            try:
                self._runner.add_request(sequence.request_id, sequence.request)
            except Exception as error:
                responses.append(refusal_response(sequence.request_id, sequence.request, error))
                self._remove(sequence, keep_kv=False)
            else:
                sequence.is_known_to_runner = True
        return responses

    def _runner_chunks(self, planned: Sequence[PlannedChunk]) -> list[SequenceChunk]:
        chunks: list[SequenceChunk] = []
        tokens_per_block = self.kv.tokens_per_block
        for chunk in planned:
            sequence, start, end = chunk.sequence, chunk.start, chunk.end
            token_ids, blocks = sequence.token_ids, sequence.blocks
            assert blocks is not None
            chunks.append(
                SequenceChunk(
                    sequence.request_id,
                    tuple(token_ids[start:end]) if chunk.is_context else (token_ids[start],),
                    start,
                    blocks.slots(-(-end // tokens_per_block)),
                    chunk.samples,
                    len(token_ids) - sequence.num_prompt_tokens,
                )
            )
        return chunks

    def _update(self, iteration: Iteration) -> list[Response]:
        sampled: Iterator[tuple[int, float]] = iter(())
        if iteration.output is not None:
            sampled = zip(iteration.output.token_ids, iteration.output.log_probs, strict=True)
        responses: list[Response | None] = []
        ended: list[SequenceState] = []
        tokens_per_block, number = self.kv.tokens_per_block, self.log.number
        for chunk in iteration.chunks:
            sequence, end = chunk.sequence, chunk.end
            sequence.num_computed = end
            if chunk.samples:
                token_id, log_prob = next(sampled)
                if sequence.append(token_id, log_prob, number):
                    ended.append(sequence)
            blocks = sequence.blocks
            assert blocks is not None
            if blocks.num_stored < end // tokens_per_block:
                self.kv.store_full_blocks(blocks, sequence.token_ids, end)
        for sequence in sorted(ended, key=lambda s: s.sort_key):
            responses.append(result_response(sequence))
            self._remove(sequence, keep_kv=True)
        responses += self._take_cancels()
        responses += map(result_response, self._active)
        return [response for response in responses if response is not None]

    def _fail_active(self, message: str) -> list[Response]:
        responses = [error_response(s.request_id, s.request, message) for s in self._active]
        for sequence in list(self._active):
            self._remove(sequence, keep_kv=False)
        return responses + self._take_cancels()

    def _remove(self, sequence: SequenceState, *, keep_kv: bool) -> None:
        self._may_start_others = True  # one that was not started held up those behind it
        sequence.stop(self.kv, keep=keep_kv)
        if sequence.is_known_to_runner:
            sequence.is_known_to_runner = False
            self._runner.remove_request(sequence.request_id)
        (self._active if sequence in self._active else self._queue.waiting).remove(sequence)
        self._queue.forget(sequence.request_id)
        self.log.num_completed += 1
