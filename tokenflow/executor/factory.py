"""Engines by configuration.

`start_engine` is what a server calls; `create_engine` builds the engine in this process, and is
what the engine's own process calls at the other end of the channel. Torch is imported only by the
process, and only for the engine, that needs it.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from tokenflow.config import ServingConfig
from tokenflow.errors import ConfigError, EngineError
from tokenflow.executor.api import Executor, Request
from tokenflow.executor.channel import EngineInfo
from tokenflow.executor.remote import RemoteExecutor
from tokenflow.executor.startup import StopSignal
from tokenflow.executor.trtllm import create_trtllm_engine
from tokenflow.executor.trtllm_executor import TrtllmExecutor
from tokenflow.inflight.executor import InflightExecutor
from tokenflow.inflight.runner import BlockCopy, KvTransport, Runner, SequenceChunk, StepOutput
from tokenflow.inflight.scripted_runner import create_scripted_runner

logger = logging.getLogger("tokenflow")

OnProgress = Callable[[float, str], None]
"""Called with the fraction done, in [0, 1], of what the text names."""

DEFAULT_SCRIPTED_VOCAB_SIZE = 256

_PROGRESS_STEP = 0.1


class GatedRunner:
    """A runner that waits in front of each step until `before_step` returns.

    The wait counts into that iteration's latency, which happens only when whoever takes the
    responses has stopped taking them for a whole window of iterations.
    """

    def __init__(self, runner: Runner, before_step: Callable[[], None]) -> None:
        self._runner = runner
        self._before_step = before_step

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
        self._runner.add_request(request_id, request)

    def remove_request(self, request_id: int) -> None:
        """See Runner."""
        self._runner.remove_request(request_id)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """See Runner."""
        self._runner.copy_blocks(copies)

    def forward(self, chunks: Sequence[SequenceChunk]) -> StepOutput:
        """See Runner."""
        self._before_step()
        return self._runner.forward(chunks)


def start_engine(
    config: ServingConfig,
    on_progress: OnProgress | None = None,
    stop: StopSignal | None = None,
) -> Executor:
    """A running engine: in a process of its own, or in this one if `engine_process` is off.

    Blocks until it takes requests. Raises ConfigError or EngineError with the reason otherwise.
    `stop` ends a start under way with an EngineError: at once where the engine has a process, and
    between two steps of loading, which may be seconds apart, where it has none.
    """
    if config.engine_process:
        return RemoteExecutor(
            config, on_progress, stop=stop, load_timeout_s=config.engine_load_timeout_s
        )
    return create_executor(config, _stoppable(on_progress or _no_progress, stop))


def create_executor(config: ServingConfig, on_progress: OnProgress | None = None) -> Executor:
    """The engine of `config` in this process."""
    executor, _ = create_engine(config, on_progress=on_progress)
    return executor


def served_config(config: ServingConfig, executor: Executor) -> ServingConfig:
    """`config` with the size of the KV pool that the running engine turned out to have, where it
    was left to the engine. Whoever starts an engine gives this one to all that plan for it, and to
    the next start, so that a later engine has no smaller pool."""
    if config.max_tokens_in_paged_kv_cache:
        return config
    assert isinstance(executor, (RemoteExecutor, TrtllmExecutor))
    num_tokens = executor.info.num_blocks * executor.info.tokens_per_block
    return dataclasses.replace(config, max_tokens_in_paged_kv_cache=num_tokens)


def create_engine(
    config: ServingConfig,
    *,
    on_progress: OnProgress | None = None,
    before_step: Callable[[], None] | None = None,
) -> tuple[Executor, EngineInfo]:
    """The engine of `config` in this process, and what it is (see `host.EngineFactory`).

    Raises ConfigError naming the key that is refused, CapacityError when the KV pool does not fit.
    `before_step` is not called for trtllm: its steps cannot be made to wait.
    """
    if config.engine == "trtllm":
        trtllm = create_trtllm_engine(config, on_progress or _no_progress)
        return trtllm, trtllm.info
    runner = _create_runner(config, on_progress or _no_progress)
    _check_host_tier(config, runner.kv_block_bytes(config.tokens_per_block))
    info = EngineInfo.from_config(config, vocab_size=runner.vocab_size)
    if before_step is not None:
        runner = GatedRunner(runner, before_step)
    executor = InflightExecutor(runner, config.executor_config())
    info = msgspec.structs.replace(
        info, num_host_blocks=executor.num_host_blocks, block_bytes=executor.block_bytes
    )
    return executor, info


def _check_host_tier(config: ServingConfig, block_bytes: int) -> None:
    """Raises ConfigError for kv_tiering without what it needs; warns of memory that is switched
    off. (Memory for less than a block is the engine's to tell.)"""
    num_bytes, unused = config.kv_cache_host_memory_bytes, None
    if not config.enable_kv_cache_reuse:
        unused = "enable_kv_cache_reuse is false"
    elif not config.kv_cache_onboard_blocks:
        unused = "kv_cache_onboard_blocks is false"
    if not config.kv_tiering:
        if unused and num_bytes:
            logger.warning(
                "%s: there is no host tier, kv_cache_host_memory_bytes is ignored", unused
            )
        return
    if unused or num_bytes < block_bytes:
        why = unused or f"one KV block takes {block_bytes}"
        raise ConfigError(
            "kv_tiering",
            f"needs a host tier, but kv_cache_host_memory_bytes is {num_bytes} and {why}",
        )
    if not config.kv_event_buffer_max_size:
        raise ConfigError(
            "kv_tiering", "needs kv_event_buffer_max_size > 0: only events tell what is copied"
        )


def _create_runner(config: ServingConfig, on_progress: OnProgress) -> Runner:
    if config.engine == "scripted":
        return create_scripted_runner(
            vocab_size=_scripted_vocab_size(config), step_s=config.scripted_step_s
        )
    return _create_torch_runner(config, on_progress)


def _create_torch_runner(config: ServingConfig, on_progress: OnProgress) -> Runner:
    if not config.gpt_model_path:
        raise ConfigError("gpt_model_path", "the inflight engine needs a checkpoint folder")
    on_progress(0.0, "importing torch")
    try:
        from tokenflow.inflight.torch_runner import TorchRunner
    except ImportError as error:
        raise ConfigError(
            "engine", f"the inflight engine needs the 'engine' extra installed: {error}"
        ) from error
    runner = TorchRunner(
        config.gpt_model_path,
        config.device,
        config.dtype,
        config.num_threads,
        progress=_in_steps(on_progress, "loading weights"),
    )
    longest = runner.max_position_embeddings
    if config.max_seq_len > longest:
        raise ConfigError(
            "max_seq_len", f"the model holds {longest} tokens, got {config.max_seq_len}"
        )
    return runner


def _stoppable(on_progress: OnProgress, stop: StopSignal | None) -> OnProgress:
    """Progress that raises EngineError in the loading thread once `stop` is set."""

    def report(fraction: float, text: str) -> None:
        if stop is not None and stop.is_set():
            raise EngineError("the start of the engine was stopped")
        on_progress(fraction, text)

    return report


def _in_steps(on_progress: OnProgress, text: str) -> Callable[[float], None]:
    """A model has hundreds of tensors; a log wants a few lines."""
    reported = -1.0

    def report(fraction: float) -> None:
        nonlocal reported
        if fraction >= 1.0 or fraction - reported >= _PROGRESS_STEP:
            reported = fraction
            on_progress(fraction, text)

    return report


def _scripted_vocab_size(config: ServingConfig) -> int:
    """That of the tokenizer in front of the engine, so that it takes every prompt and emits only
    tokens with a text; a fixed size where there is no tokenizer."""
    folder = config.tokenizer_dir or config.gpt_model_path
    path = Path(folder, "tokenizer.json")
    if not folder or not path.is_file():
        return DEFAULT_SCRIPTED_VOCAB_SIZE
    try:
        tokenizer = json.loads(path.read_text(encoding="utf-8"))
        ids = [*tokenizer["model"]["vocab"].values()]
        ids += [token["id"] for token in tokenizer.get("added_tokens", ())]
        return int(max(ids)) + 1
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError("tokenizer_dir", f"{path} is not a tokenizer: {error}") from None


def _no_progress(fraction: float, text: str) -> None:
    """Nobody wants to know."""
