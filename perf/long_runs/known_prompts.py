"""Prompts of a kill run, with what makes their answers right.

Owns the two kinds: numbers for the scripted engine, whose answers are known to the token, and
English text for a model, whose answers are recorded before the first kill.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perf.long_runs.heard import Question
from perf.long_runs.kill_plan import Prompt
from perf.long_runs.known_answers import (
    NUM_NUMBERS,
    counting_prompt,
    counting_text,
    write_number_tokenizer,
)
from perf.long_runs.streams import GrpcLine
from perf.prompts import QUESTIONS, READER_OPENINGS
from tokenflow.config import ServingConfig
from triton_backend.launcher import TritonServer

_STEP_S = 0.01
_LONG_PROMPT_TOKENS = 1600
_RECORDED_TOKENS = 96


def scripted_kill_config(folder: Path, trace_path: Path, **changes: Any) -> ServingConfig:
    """A server for `CountingPrompts`: half as many slots as a kill run has streams, prompts in
    chunks of 64 tokens, a hundred steps a second."""
    settings: dict[str, Any] = {
        "engine": "scripted",
        "tokenizer_dir": str(write_number_tokenizer(folder / "tokenizer")),
        "scripted_step_s": _STEP_S,
        "max_num_tokens": 64,
        "min_quantum_s": 0.2,
        "slack_margin_s": 0.1,
        "trace_path": str(trace_path),
    }
    return ServingConfig(**{**settings, **changes})


@dataclass(frozen=True, kw_only=True)
class CountingPrompts:
    """Prompts of numbers: most answers take a few seconds, a tenth of them much longer, and a tenth
    is of a kind that cannot be paused. Lengths are the bounds of what is chosen at random."""

    num_tokens: tuple[int, int] = (50, 400)
    num_tokens_long: tuple[int, int] = (800, 1500)

    def __call__(self, rng: random.Random, is_long: bool) -> Prompt:
        """A prompt; is_long: one whose prefill takes many steps."""
        last = rng.randrange(NUM_NUMBERS)
        kind = rng.random()
        bounds = self.num_tokens_long if kind < 0.1 and not is_long else self.num_tokens
        num_prompt_tokens = _LONG_PROMPT_TOKENS if is_long else rng.randint(2, 200)
        return Prompt(
            text=counting_prompt(last, num_prompt_tokens),
            max_tokens=rng.randint(*bounds),
            is_right=lambda text, num_tokens: text == counting_text(last, num_tokens),
            is_pausable=is_long or kind < 0.9,
        )


async def recorded_prompts(server: TritonServer) -> Callable[[random.Random, bool], Prompt]:
    """Chooser of English prompts, whose greedy answers are recorded on this server beforehand.

    An answer counts as right when it is the beginning of the recorded one. Each is recorded alone,
    so that rounding which depends on the batch may make another text (bfloat16 more than float32).
    """
    import grpc

    prompts = [*READER_OPENINGS, *QUESTIONS[:8]]
    long_prompt = " ".join(READER_OPENINGS)
    recorded: dict[str, str] = {}
    async with grpc.aio.insecure_channel(server.grpc_url) as channel, GrpcLine(channel) as line:
        for text in [*prompts, long_prompt]:
            heard = line.ask(
                Question(request_id="reference", prompt=text, max_tokens=_RECORDED_TOKENS)
            )
            await heard.wait_end()
            recorded[text] = heard.text

    def choose(rng: random.Random, is_long: bool) -> Prompt:
        text = long_prompt if is_long else rng.choice(prompts)
        return Prompt(
            text=text,
            max_tokens=rng.randint(24, _RECORDED_TOKENS),
            is_right=lambda answer, _: recorded[text].startswith(answer.rstrip("\ufffd")),
        )

    return choose
