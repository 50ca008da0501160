"""The engines that the contract suite runs on. A further engine is one more entry of ENGINES.

`create` makes a running executor from a ServingConfig; `same` says what it means that two outputs
of one request are the same: exactly, or, for a float32 model, ids equal up to the first position at
which the two best tokens are nearly as likely, log-probs within a thousandth.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from tests.contract.client import Output
from tests.trtllm_double.bindings import make_module
from tests.trtllm_double.folder import Behind, write_engine
from tokenflow.config import ServingConfig
from tokenflow.executor.api import Executor
from tokenflow.executor.channel import EngineInfo
from tokenflow.executor.factory import GatedRunner
from tokenflow.executor.trtllm import create_trtllm_engine
from tokenflow.executor.trtllm_engine import LIMITS
from tokenflow.inflight.executor import InflightExecutor
from tokenflow.inflight.runner import Runner
from tokenflow.inflight.scripted_runner import ScriptedRunner
from tokenflow.inflight.scripts import Script, pseudo_random

VOCAB = 251
SCRIPT = pseudo_random(VOCAB)
LOG_PROB_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Engine:
    """vocab_size: prompts use ids below it. create_bounded: with `max_queue_size` for the engine's
    own queue, or None where it cannot be set. script: the oracle, where tokens come from one.

    What TensorRT-LLM's Executor does not do: has_tiering, KV moves when it is told to;
    tells_partial_blocks, how many tokens of a partial block were reused, and how many blocks came
    from the host; cancels_at_once, also before the first token."""

    name: str
    vocab_size: int
    create: Callable[[ServingConfig], Executor]
    same: Callable[[Output, Output], bool]
    create_bounded: Callable[[ServingConfig, int], Executor] | None = None
    script: Script | None = None
    is_torch: bool = False
    has_tiering: bool = True
    tells_partial_blocks: bool = True
    cancels_at_once: bool = True


def same_exactly(a: Output, b: Output) -> bool:
    """Same tokens, log-probs, end."""
    return (a.token_ids, a.log_probs, a.reason) == (b.token_ids, b.log_probs, b.reason)


def same_in_float32(a: Output, b: Output) -> bool:
    """Greedy outputs of one float32 model, computed in different batches or chunks.

    Where the ids part, both engines chose their most likely token; a near tie therefore shows in
    equal log-probs there.
    """
    for token_a, token_b, log_a, log_b in zip(
        a.token_ids, b.token_ids, a.log_probs, b.log_probs, strict=False
    ):
        if abs(log_a - log_b) > LOG_PROB_TOLERANCE:
            return False
        if token_a != token_b:
            return True
    return len(a.token_ids) == len(b.token_ids) and a.reason == b.reason


def in_process(
    runner: Runner, config: ServingConfig, max_queue_size: int | None = None
) -> Executor:
    limits = msgspec.structs.replace(config.executor_config(), max_queue_size=max_queue_size)
    return InflightExecutor(runner, limits)


def scripted_runner(config: ServingConfig) -> Runner:
    return ScriptedRunner(SCRIPT, VOCAB, step_s=config.scripted_step_s)


def scripted_engine(
    config: ServingConfig, *, on_progress: object, before_step: Callable[[], None]
) -> tuple[Executor, EngineInfo]:
    """What the engine's process runs for `scripted-remote`."""
    info = EngineInfo.from_config(config, vocab_size=VOCAB)
    return in_process(GatedRunner(scripted_runner(config), before_step), config), info


def _scripted_remote(config: ServingConfig) -> Executor:
    from tokenflow.executor.remote import RemoteExecutor

    return RemoteExecutor(config, factory="tests.contract.engines:scripted_engine")


@functools.cache
def _tiny_model() -> tempfile.TemporaryDirectory[str]:
    """Kept until the interpreter ends."""
    from build_engines.tiny import make_tiny_model

    folder = tempfile.TemporaryDirectory(prefix="tokenflow-contract-")
    make_tiny_model(Path(folder.name, "model"))
    return folder


def _torch_config(config: ServingConfig) -> ServingConfig:
    return replace(
        config,
        engine="inflight",
        gpt_model_path=str(Path(_tiny_model().name, "model")),
        dtype="float32",
        num_threads=1,
    )


def _torch_in_process(config: ServingConfig, max_queue_size: int | None = None) -> Executor:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from tokenflow.inflight.torch_runner import TorchRunner

    config = _torch_config(config)
    runner = TorchRunner(config.gpt_model_path, config.device, config.dtype, config.num_threads)
    return in_process(runner, config, max_queue_size)


def _torch_remote(config: ServingConfig) -> Executor:
    from tokenflow.executor.remote import RemoteExecutor

    return RemoteExecutor(_torch_config(config))


@functools.cache
def _engine_folders() -> tempfile.TemporaryDirectory[str]:
    """Kept until the interpreter ends."""
    return tempfile.TemporaryDirectory(prefix="tokenflow-contract-")


def trtllm_config(config: ServingConfig, runner: str = "scripted") -> ServingConfig:
    """`config` for the double of TensorRT-LLM, with an engine built for its limits."""
    behind = Behind(
        runner=runner, script="pseudo_random", vocab_size=VOCAB, step_s=config.scripted_step_s
    )
    limits = {name: getattr(config, name) for name in LIMITS}
    name = f"{abs(hash((behind, *limits.values()))):x}"
    folder = write_engine(Path(_engine_folders().name, name), behind, **limits)
    return replace(config, engine="trtllm", gpt_model_path=str(folder))


def trtllm_in_process(
    config: ServingConfig, max_queue_size: int | None = None, runner: str = "scripted"
) -> Executor:
    config = trtllm_config(config, runner)
    limits = msgspec.structs.replace(config.executor_config(), max_queue_size=max_queue_size)
    return create_trtllm_engine(
        config,
        lambda fraction, text: None,
        bindings=make_module(),
        limits=limits,
        lock_folder=Path(_engine_folders().name),
    )


_AS_TRTLLM = {"has_tiering": False, "tells_partial_blocks": False, "cancels_at_once": False}

ENGINES = (
    Engine(
        "scripted",
        VOCAB,
        lambda config: in_process(scripted_runner(config), config),
        same_exactly,
        lambda config, size: in_process(scripted_runner(config), config, size),
        script=SCRIPT,
    ),
    Engine("scripted-remote", VOCAB, _scripted_remote, same_exactly, script=SCRIPT),
    Engine("torch", 384, _torch_in_process, same_in_float32, _torch_in_process, is_torch=True),
    Engine("torch-remote", 384, _torch_remote, same_in_float32, is_torch=True),
    Engine(
        "trtllm",
        VOCAB,
        trtllm_in_process,
        same_exactly,
        trtllm_in_process,
        script=SCRIPT,
        **_AS_TRTLLM,
    ),
)
