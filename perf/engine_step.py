"""Decode step of the torch runner beside transformers' own cache.

    python -m perf.engine_step [--full] [--json]

Both sides run in one process, step by step in turn (so that a busy machine slows both), on the
same weights, greedy, every sequence with the same context. `ours` is `TorchRunner.forward`: paged
KV, float32 head and log-probabilities included. `transformers` is the model with its DynamicCache,
a batched forward and an argmax over its own head. Goal: not slower (ratio of medians <= 1).
"""

from __future__ import annotations

import os

# OpenMP reads this when torch is loaded: waiting threads must not spin on shared cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import inspect
import json
import logging
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils.logging import disable_progress_bar

from build_engines.fetch import default_model_path
from tokenflow.executor.api import Request
from tokenflow.inflight.runner import SequenceChunk
from tokenflow.inflight.torch_runner import TorchRunner

BATCH_SIZES = (1, 8, 16)
TOKENS_PER_BLOCK = 32
NUM_WARMUP_STEPS = 3


class OursStepper:
    """Decodes `batch_size` sequences of `context` tokens, one step a call."""

    def __init__(self, runner: TorchRunner, batch_size: int, context: int, max_steps: int) -> None:
        self._runner = runner
        self._length = context
        per_sequence = -(-(context + max_steps) // TOKENS_PER_BLOCK)
        self._blocks = [
            list(range(i * per_sequence, (i + 1) * per_sequence)) for i in range(batch_size)
        ]
        self._tokens = [7] * batch_size
        for i, block_ids in enumerate(self._blocks):
            request = Request(input_token_ids=tuple(range(context)), max_tokens=max_steps)
            runner.add_request(i, request)
            prompt = [100 + j % 1000 for j in range(context)]
            runner.forward([SequenceChunk(i, prompt, 0, block_ids, False, 0)])

    def step(self) -> None:
        """One token for every sequence."""
        chunks = [
            SequenceChunk(i, [token], self._length, block_ids, True, 0)
            for i, (token, block_ids) in enumerate(zip(self._tokens, self._blocks, strict=True))
        ]
        self._tokens = self._runner.forward(chunks).token_ids
        self._length += 1

    def close(self) -> None:
        """Forget the requests."""
        for i in range(len(self._blocks)):
            self._runner.remove_request(i)


class TransformersStepper:
    """The same work with transformers' DynamicCache."""

    def __init__(self, model: Any, batch_size: int, context: int) -> None:
        self._model = model
        # The argument was renamed; both names mean the same.
        parameters = inspect.signature(model.forward).parameters
        name = "cache" if "cache" in parameters else "past_key_values"
        self._cache = {name: DynamicCache(config=model.config)}
        prompt = torch.tensor([[100 + j % 1000 for j in range(context)]] * batch_size)
        self._tokens = self._forward(prompt.to(model.device))

    def step(self) -> None:
        """One token for every sequence."""
        self._tokens = self._forward(self._tokens)

    @torch.inference_mode()
    def _forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        out = self._model(input_ids=token_ids, use_cache=True, logits_to_keep=1, **self._cache)
        next_ids: torch.Tensor = out.logits[:, -1].argmax(dim=-1, keepdim=True)
        return next_ids


def measure(step: Callable[[], None]) -> float:
    """Milliseconds of one call."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def compare(
    runner: TorchRunner, model: Any, batch_size: int, context: int, steps: int
) -> dict[str, Any]:
    """p50 and p90 of both sides, ms, and the ratio of the medians (ours / transformers)."""
    ours = OursStepper(runner, batch_size, context, steps)
    theirs = TransformersStepper(model, batch_size, context)
    samples: dict[str, list[float]] = {"ours": [], "transformers": []}
    for _ in range(steps):
        samples["ours"].append(measure(ours.step))
        samples["transformers"].append(measure(theirs.step))
    ours.close()
    row: dict[str, Any] = {"batch": batch_size, "context": context}
    for name, values in samples.items():
        p50, p90 = np.percentile(values[NUM_WARMUP_STEPS:], (50, 90))
        row[name] = {"p50_ms": round(float(p50), 2), "p90_ms": round(float(p90), 2)}
    row["ratio"] = round(row["ours"]["p50_ms"] / row["transformers"]["p50_ms"], 3)
    return row


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m perf.engine_step", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", type=Path, default=default_model_path())
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--num-threads", type=int, default=0, help="0 = all cores")
    parser.add_argument("--steps", type=int, default=20, help="steps per side and batch size")
    parser.add_argument("--full", action="store_true", help="context 800 as well as 200")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    args = parser.parse_args(argv)
    if args.steps <= NUM_WARMUP_STEPS:
        parser.error(f"--steps must be > {NUM_WARMUP_STEPS}")
    if not (args.model / "config.json").is_file():
        parser.error(f"no checkpoint in {args.model}: run `tokenflow model fetch` first")
    return args


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    args = _parse(argv)
    logging.basicConfig(level=logging.WARNING)
    disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch|transformers")

    contexts = (200, 800) if args.full else (200,)
    runner = TorchRunner(args.model, args.device, args.dtype, args.num_threads)
    num_blocks = max(BATCH_SIZES) * -(-(max(contexts) + args.steps) // TOKENS_PER_BLOCK)
    runner.allocate_kv(num_blocks, TOKENS_PER_BLOCK, 0)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype))
    model = model.to(args.device).eval()
    rows = []
    if not args.json:
        print(f"{args.dtype} on {args.device}, {torch.get_num_threads()} threads; ms per step")
        print("batch  context     ours p50 / p90    transformers p50 / p90    ratio")
    for context in contexts:
        for batch_size in BATCH_SIZES:
            print(f"measuring batch {batch_size}, context {context} …", file=sys.stderr)
            row = compare(runner, model, batch_size, context, args.steps)
            rows.append(row)
            if not args.json:
                a, b = row["ours"], row["transformers"]
                print(
                    f"{batch_size:5}  {context:7}  {a['p50_ms']:8.1f} / {a['p90_ms']:6.1f}"
                    f"  {b['p50_ms']:14.1f} / {b['p90_ms']:6.1f}  {row['ratio']:10.2f}",
                    flush=True,
                )
    if args.json:
        threads = torch.get_num_threads()
        report = {"dtype": args.dtype, "device": args.device, "num_threads": threads, "rows": rows}
        print(json.dumps(report, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
