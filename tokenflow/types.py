"""Values that cross module borders: requests, session states, snapshots, decisions, events.

All are immutable. Instants are float seconds on CLOCK_MONOTONIC and end in `_time`; durations end
in `_s`. Nothing here reads a clock or holds a reference to an engine.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from tokenflow.executor.api import (
    CapacitySchedulerPolicy,
    FinishReason,
    OutputConfig,
    SamplingConfig,
)
from tokenflow.executor.lora import LoraConfig

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


class SessionState(enum.IntEnum):
    """Life of a request above the engine.

    WAITING → PREFILLING → RUNNING → PAUSING → PREEMPTED → RESUMING → RUNNING … → FINISHED, and
    CANCELLING from any state that the engine knows. PAUSING may end FINISHED: the request ended by
    itself in the step in flight. A lease that ends takes RUNNING to PREEMPTED directly. When the
    engine is lost, what had started becomes PREEMPTED and what had not WAITING again.
    """

    WAITING = 0
    PREFILLING = 1
    RUNNING = 2
    PAUSING = 3
    PREEMPTED = 4
    RESUMING = 5
    CANCELLING = 6
    FINISHED = 7


class EndReason(enum.Enum):
    """Why a client's stream ended; `value` is the finish reason that clients see."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One client request, validated.

    input_token_ids: the prompt, at least one token.
    max_tokens: tokens to generate at most (>= 1), over all pauses.
    read_rate: tokens/s that the client declared; None = undeclared (learned, else the default).
    has_reader: False when nobody reads along (a machine, or stream=false): it can never stall.
    priority: [0, 1], higher is more urgent, 0.5 by default.
    streaming: deliver tokens as they come; False = one response at the end.
    timeout_s: longest time from arrival to the end, pauses included; then the request ends with
        what it has (EndReason.TIMEOUT).
    lora_config: its LoRA adapter, with weights or by the id alone; None = the plain model.
    """

    request_id: str
    input_token_ids: tuple[int, ...]
    max_tokens: int
    arrival_time: float
    sampling_config: SamplingConfig = field(default_factory=SamplingConfig)
    output_config: OutputConfig = field(default_factory=OutputConfig)
    end_id: int | None = None
    stop_words: tuple[tuple[int, ...], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    embedding_bias: tuple[tuple[int, float], ...] = ()
    read_rate: float | None = None
    has_reader: bool = True
    priority: float = 0.5
    streaming: bool = True
    cache_salt_id: int | None = None
    timeout_s: float | None = None
    lora_config: LoraConfig | None = None

    @property
    def lora_task_id(self) -> int | None:
        """Of its LoRA adapter; KV of another one, or of none, is never its own."""
        return None if self.lora_config is None else self.lora_config.task_id


class TokenEvent(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What the runtime tells the sender about one request.

    handle: the runtime's key of the request (unique; request_id is the client's and may repeat).
    token_ids/log_probs: new tokens, in order, each exactly once over the request's life.
    end: set on the last event of a request, unless its sender ended the answer by its text; error:
        the message when end is ERROR.
    """

    handle: int
    request_id: str
    token_ids: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    time: float = 0.0
    end: EndReason | None = None
    error: str | None = None
    retryable: bool = False
    usage: Usage | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Counts of a whole request, whatever was paused or recomputed in between."""

    num_input_tokens: int
    num_output_tokens: int
    cum_log_prob: float = 0.0
    num_pauses: int = 0
    paused_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CostEstimate:
    """What the engine's work costs now, learned online (costs.py); never constants in code.

    A step computes `step_base_s + step_per_sequence_s * batch + step_per_context_token_s *
    context_tokens + num_prefill_tokens / prefill_tokens_per_s` seconds.
    pause_s: measured round trip of a pause, from cancel to the final response.
    resume_s: measured time from enqueue to the first token of a resume whose KV was kept.
    plan_interval_s: time between two plans.
    offload_block_s, onboard_block_s: copying one block to the host and back; 0 where there is no
        host tier or none was copied yet.
    copy_wait_share: share of the time of copies for which the steps waited: all of it by
        TensorRT-LLM's rules, next to nothing where copies run beside the steps.
    """

    prefill_tokens_per_s: float
    step_base_s: float
    step_per_sequence_s: float
    step_per_context_token_s: float
    pause_s: float
    resume_s: float
    plan_interval_s: float
    offload_block_s: float = 0.0
    onboard_block_s: float = 0.0
    copy_wait_share: float = 1.0

    def step_s(self, num_sequences: int, num_context_tokens: float) -> float:
        """Seconds of a decode step of `num_sequences` that read `num_context_tokens` of KV."""
        return (
            self.step_base_s
            + self.step_per_sequence_s * num_sequences
            + self.step_per_context_token_s * num_context_tokens
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionColumns:
    """The planner's view of every unfinished session, one row each, in order of arrival.

    slot: identity that a Decision refers to.
    state: SessionState values.
    wait_since_time: since when it waits (arrival, or the pause), or is being started; undefined
        while running.
    running_since_time: first token since its (re)start; undefined while it is not RUNNING.
    slack_s: seconds until its reader runs dry; NaN before the first token, +inf without a reader.
    held: the client holds its stream paused: it may not be started.
    read_rate: tokens/s; the reference rate for sessions without a reader.
    num_blocks_held: blocks of the engine's budget that a pause would free (0 outside the engine):
        the reservation, in GUARANTEED_NO_EVICT, else what it has filled. Blocks shared with others
        count in full, as they do in the engine's own reservations.
    num_blocks_needed: blocks that the engine must have obtainable to start or resume it (the
        reservation, in GUARANTEED_NO_EVICT); for a session in the engine, what it occupies of the
        budget now.
    num_blocks_final: blocks at its full length.
    num_resume_tokens: tokens a resume would compute, given what is still cached (1 = all kept);
        the prompt for a session that waits.
    num_host_blocks: blocks that a resume would bring back from the host tier; while it is RESUMING,
        those that it does.
    num_copied_blocks: leading blocks of a session in the engine that have a copy on the host, so
        that a pause frees them without one (only with KvTiering).
    """

    slot: IntArray
    state: IntArray
    arrival_time: FloatArray
    wait_since_time: FloatArray
    running_since_time: FloatArray
    slack_s: FloatArray
    read_rate: FloatArray
    has_reader: BoolArray
    started: BoolArray
    pausable: BoolArray
    held: BoolArray
    priority: FloatArray
    num_prompt_tokens: IntArray
    num_generated: IntArray
    max_tokens: IntArray
    num_blocks_held: IntArray
    num_blocks_needed: IntArray
    num_blocks_final: IntArray
    num_resume_tokens: IntArray
    num_pauses: IntArray
    num_host_blocks: IntArray
    num_copied_blocks: IntArray

    def __len__(self) -> int:
        return len(self.slot)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvView:
    """The engine's room. num_free_blocks: the pool less what sessions in the engine hold
    (`num_blocks_held`), those that are PAUSING included; cached blocks count as free. Below 0 while
    the engine holds back requests that find no block, or some that leave still hold theirs.

    num_host_blocks: size of the host tier. has_tiering: blocks can be copied ahead of need
    (`kv_api.KvTiering`).
    """

    capacity_policy: CapacitySchedulerPolicy
    tokens_per_block: int
    num_total_blocks: int
    num_free_blocks: int
    max_batch_size: int
    num_host_blocks: int = 0
    has_tiering: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalEstimate:
    """What the moving averages of arrivals say (arrivals.py).

    short_rate, long_rate: arrivals/s over the last few and over many seconds.
    blocks_per_arrival: blocks that one needs to start, mean of the recent ones.
    burst: True while the short average stands out from the long one.
    """

    short_rate: float = 0.0
    long_rate: float = 0.0
    blocks_per_arrival: float = 0.0
    burst: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthEstimate:
    """The share of answers that are longer than any length (output_lengths.py).

    survival [m]: share of the answers that have more than 0, 1, … tokens, > 0; what is longer than
    that may be of any length. restricted_means [m]: mean of the lesser of an answer's length and 0,
    1, … tokens.
    """

    survival: FloatArray
    restricted_means: FloatArray

    def expected(self, num_generated: IntArray, max_tokens: IntArray) -> IntArray:
        """Tokens of whole answers [n] that have `num_generated` so far and may have `max_tokens`:
        the mean of those that are longer than what they have."""
        survival, mean = self._at(num_generated)
        _, most = self._at(max_tokens)
        expected = np.ceil(num_generated + (most - mean) / survival).astype(np.int64)
        result: IntArray = np.minimum(np.maximum(expected, num_generated + 1), max_tokens)
        return result

    def _at(self, num_tokens: IntArray) -> tuple[FloatArray, FloatArray]:
        """Survival and restricted mean at any lengths."""
        known = np.minimum(num_tokens, len(self.survival) - 1)
        survival = self.survival[known]
        return survival, self.restricted_means[known] + survival * (num_tokens - known)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything `plan` may look at. lengths: what is known of how long answers are; None: nothing,
    they are taken to be as long as they may be."""

    now: float
    sessions: SessionColumns
    kv: KvView
    costs: CostEstimate
    arrivals: ArrivalEstimate = ArrivalEstimate()
    lengths: LengthEstimate | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do now, as slots, in the order to apply: pause first, then recompute, then resume,
    admit, prefetch and offload.

    recompute: those of `resume` whose blocks on the host are given up, because computing them is
        faster than loading.
    prefetch: paused ones whose blocks on the host are wanted on the device.
    offload: (slot, blocks) of running ones, so many of their oldest blocks are copied to the host.
    forced: those of `pause` taken against their slack because the pool would have run out.
    why: one short reason per slot named above, for traces and tests.
    """

    pause: tuple[int, ...] = ()
    resume: tuple[int, ...] = ()
    admit: tuple[int, ...] = ()
    forced: tuple[int, ...] = ()
    recompute: tuple[int, ...] = ()
    prefetch: tuple[int, ...] = ()
    offload: tuple[tuple[int, int], ...] = ()
    why: dict[int, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.pause or self.resume or self.admit or self.prefetch or self.offload)


def end_reason(reason: FinishReason) -> EndReason:
    """The client's end reason for an engine's finish reason that ends a stream."""
    if reason is FinishReason.LENGTH:
        return EndReason.LENGTH
    if reason in (FinishReason.END_ID, FinishReason.STOP_WORDS):
        return EndReason.STOP
    return EndReason.CANCELLED
