"""`python -m tokenflow.executor.trtllm_check`: do the installed bindings fit the adapter?

Owns the comparison of trtllm_facts.py with `tensorrt_llm.bindings.executor`, and a trial of what
can be made without an engine: the adapter's own requests and configurations. Loads no engine and
needs no GPU beyond what importing TensorRT-LLM needs. Exit code 0: nothing differs (optional facts
may be missing); 1: something does; 2: there are no bindings with an Executor.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from tokenflow.config import ServingConfig
from tokenflow.errors import ConfigError
from tokenflow.executor.api import (
    ExecutorConfig,
    KvCacheConfig,
    KvCacheRetentionConfig,
    Request,
    SamplingConfig,
    TokenRangeRetentionConfig,
)
from tokenflow.executor.lora import LoraConfig
from tokenflow.executor.trtllm import load_bindings
from tokenflow.executor.trtllm_config import make_executor_config
from tokenflow.executor.trtllm_engine import LoraBuild
from tokenflow.executor.trtllm_facts import CLASSES, ENUMS, OPTIONAL, ClassFacts, fact_names
from tokenflow.executor.trtllm_modes import Mode, ParallelPlan
from tokenflow.executor.trtllm_signatures import Overload, overloads
from tokenflow.executor.trtllm_values import RequestMaker


@dataclass
class Report:
    """differences: facts that do not hold, with what is there instead. missing: optional facts that
    do not hold. unseen: what could not be looked at."""

    num_facts: int = 0
    differences: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)

    def differs(self, fact: str, what: str) -> None:
        """`fact` does not hold."""
        (self.missing if fact in OPTIONAL else self.differences).append(f"{fact}: {what}")


def check(bindings: Any) -> Report:
    """Compare all facts with `bindings`."""
    report = Report(num_facts=sum(1 for _ in fact_names()))
    for name, facts in CLASSES.items():
        kind = _find(bindings, name)
        if kind is None:
            report.differs(name, "there is no such class")
            continue
        _check_arguments(report, name, kind, facts)
        for prop in (*facts.properties, *facts.defaults):
            if not hasattr(kind, prop):
                report.differs(f"{name}.{prop}", "there is no such property")
        for method, arguments in facts.methods.items():
            _check_method(report, f"{name}.{method}", getattr(kind, method, None), arguments)
    for name, members in ENUMS.items():
        kind = _find(bindings, name)
        for member in members:
            if not hasattr(kind, member):
                report.differs(f"{name}.{member}", "there is no such value")
    _check_defaults(report, bindings)
    _try_out(report, bindings)
    return report


def _find(bindings: Any, name: str) -> Any:
    found = bindings
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _check_arguments(report: Report, name: str, kind: Any, facts: ClassFacts) -> None:
    wanted = (*facts.positional, *facts.arguments)
    if not wanted:
        return
    known = overloads(kind.__init__)
    if not known:
        report.unseen.append(f"{name}: its constructor does not tell its arguments")
        return
    best = max(known, key=lambda overload: len(set(overload.names) & set(wanted)))
    for argument in wanted:
        if argument not in best.names:
            report.differs(f"{name}({argument})", "there is no such argument")
    places = best.names[: len(facts.positional)]
    if set(facts.positional) <= set(best.names) and places != facts.positional:
        report.differs(name, f"its first arguments are {', '.join(places)}")


def _check_method(report: Report, name: str, method: Any, arguments: tuple[str, ...]) -> None:
    if method is None:
        report.differs(name, "there is no such method")
        return
    if not arguments:
        return
    known = overloads(method)
    if not known:
        report.unseen.append(f"{name}: it does not tell its arguments")
        return
    if not any(_takes(overload, arguments) for overload in known):
        for argument in arguments:
            seen = " or ".join(f"({', '.join(overload.names)})" for overload in known)
            report.differs(f"{name}({argument})", f"its arguments are {seen}")


def _takes(overload: Overload, arguments: tuple[str, ...]) -> bool:
    return set(arguments) <= set(overload.names)


def _check_defaults(report: Report, bindings: Any) -> None:
    """Of instances that are made without the arguments in question."""
    required: dict[str, tuple[Any, ...]] = {"Request": ([1], 1)}
    for name, facts in CLASSES.items():
        kind = _find(bindings, name)
        if kind is None or not facts.defaults:
            continue
        try:
            made = kind(*required.get(name, ()))
        except Exception as error:
            report.differs(name, f"cannot be made without arguments: {_one_line(error)}")
            continue
        for prop, expected in facts.defaults.items():
            if not hasattr(kind, prop):
                continue
            value = getattr(made, prop)
            shown = f"{type(value).__name__}.{value.name}" if _is_member(value) else value
            if shown != expected or type(shown) is not type(expected):
                report.differs(f"{name}.{prop}", f"its default is {shown!r}, not {expected!r}")


def _is_member(value: Any) -> bool:
    return hasattr(value, "name") and hasattr(value, "value")


def _try_out(report: Report, bindings: Any) -> None:
    """Have the adapter make what it makes, with every field set. What is known to be missing is
    not tried."""
    if report.differences:
        report.unseen.append("what the adapter makes: not tried, because facts do not hold")
        return
    for what, make in _trials(bindings):
        try:
            make()
        except Exception as error:
            report.differences.append(f"{what}: {_one_line(error)}")


def _trials(bindings: Any) -> list[tuple[str, Callable[[], object]]]:
    config = ServingConfig(
        engine="trtllm",
        gpu_device_ids="0,1",
        executor_worker_path=sys.executable,
        lora_cache_gpu_memory_fraction=0.05,
        lora_cache_host_memory_bytes=1 << 30,
        lora_prefetch_dir="/adapters",
    )
    limits = ExecutorConfig(
        kv_cache_config=KvCacheConfig(
            max_tokens=4096,
            host_cache_size=1 << 20,
            secondary_offload_min_priority=30,
            event_buffer_max_size=16,
        ),
        max_queue_size=4,
    )
    leader = ParallelPlan(mode=Mode.LEADER, device_ids=(0, 1), num_nodes=2)
    workers = ParallelPlan(mode=Mode.ORCHESTRATOR, device_ids=(0, 1))
    maker = RequestMaker(bindings, 1000, "float32", LoraBuild(dtype="float16", max_adapter_size=64))
    return [
        ("a request", lambda: maker.make(_request(bindings))),
        ("a leader", lambda: make_executor_config(bindings, limits, config, leader, has_lora=True)),
        (
            "an orchestrator",
            lambda: make_executor_config(bindings, limits, config, workers, has_lora=False),
        ),
    ]


def _request(bindings: Any) -> Request:
    """Everything set that these bindings have, but a bias and weights: they need torch."""
    minute = timedelta(seconds=60)
    sampling: dict[str, Any] = {
        "top_k": 5, "top_p": 0.9, "top_p_min": 0.1, "top_p_reset_ids": 1, "top_p_decay": 0.9,
        "seed": 2**63, "temperature": 0.7, "min_tokens": 1, "repetition_penalty": 1.1,
        "presence_penalty": 0.1, "frequency_penalty": 0.1, "prompt_ignore_length": 1,
        "no_repeat_ngram_size": 3, "num_return_sequences": 1, "min_p": 0.1,
    }  # fmt: skip
    return Request(
        input_token_ids=(1, 2, 3),
        max_tokens=4,
        sampling_config=SamplingConfig(
            **{k: v for k, v in sampling.items() if hasattr(bindings.SamplingConfig, k)}
        ),
        end_id=2,
        pad_id=0,
        bad_words=((1, 2),),
        stop_words=((3,),),
        kv_cache_retention_config=KvCacheRetentionConfig(
            token_range_retention_configs=(
                TokenRangeRetentionConfig(
                    token_start=0, token_end=2, priority=60, duration_ms=minute
                ),
                TokenRangeRetentionConfig(token_start=2, token_end=None, priority=30),
            ),
            decode_retention_priority=30,
            decode_duration_ms=minute,
        ),
        client_id=1,
        cache_salt_id=1 if hasattr(bindings.Request, "cache_salt_id") else None,
        lora_config=LoraConfig(task_id=1) if _has_lora(bindings) else None,
    )


def _has_lora(bindings: Any) -> bool:
    return hasattr(bindings.Request, "lora_config") and hasattr(bindings, "LoraConfig")


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]


def format_report(report: Report, version: str) -> str:
    """For a person."""
    lines = [f"TensorRT-LLM {version}: {report.num_facts} facts"]
    lines += [f"differs   {line}" for line in report.differences]
    lines += [f"missing   {line} (only requests that ask for it are refused)"
              for line in report.missing]  # fmt: skip
    lines += [f"not seen  {line}" for line in report.unseen]
    lines.append("nothing differs" if not report.differences else "the adapter does not fit")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; returns the exit code."""
    parser = argparse.ArgumentParser(
        description="Compare the installed TensorRT-LLM bindings with what the adapter relies on."
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--output", type=Path, help="write the report to a file too")
    options = parser.parse_args(arguments)
    try:
        bindings = load_bindings()
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    report = check(bindings)
    version = str(getattr(bindings, "__version__", "of unknown version"))
    text = format_report(report, version)
    if options.json:
        text = json.dumps({"version": version, **vars(report)}, indent=1)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")
    sys.stdout.write(text + "\n")
    return 1 if report.differences else 0


if __name__ == "__main__":
    sys.exit(main())
