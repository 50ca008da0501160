"""Fixed workloads: who asks what, when, and how fast they read.

A workload is a value: the whole list of requests is made before anything runs, sorted by the time
of sending, from a fixed seed. Invariants: same arguments, same workload; every prompt has exactly
the length it states, as the server's tokenizer counts it; output lengths are fixed (`max_tokens`
with no end token), so that policies are compared on the same work.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from perf.prompts import QUESTIONS, READER_OPENINGS
from tokenflow.executor.api import CapacitySchedulerPolicy, num_blocks_needed

READER = "reader"
NEWCOMER = "newcomer"

# Engine limits of the demo: 8 slots and 128 blocks of 32 tokens, fully reserved.
DEMO_ENGINE: dict[str, str] = {
    "max_batch_size": "8",
    "tokens_per_block": "32",
    "max_tokens_in_paged_kv_cache": "4096",
    "batch_scheduler_policy": "guaranteed_no_evict",
}
DEMO_SEED = 20260
DEMO_READ_RATE = 4.0
DEMO_BURST_TIME_S = 10.0
DEMO_BURST_LENGTH_S = 1.0
DEMO_NUM_READERS = 8
DEMO_NUM_NEWCOMERS = 16
# Engine limits of the demo of both KV tiers: more slots than anybody takes, 96 blocks of 32 tokens
# on the device, and host memory for all that started.
KV_DEMO_ENGINE: dict[str, str] = {
    "max_batch_size": "24",
    "tokens_per_block": "32",
    "max_tokens_in_paged_kv_cache": "3072",
    "kv_cache_host_memory_bytes": str(256 << 20),
}
KV_DEMO_NUM_READERS = 8
KV_DEMO_NUM_NEWCOMERS = 12
# ΣR/Γ above this has little room left for a burst, and the output says so.
HIGH_LOAD = 0.8


class Tokenizer(Protocol):
    """The part of a tokenizer that cutting prompts needs."""

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, as the server makes them."""
        ...

    def decode(self, ids: list[int]) -> str:
        """Text of `ids`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRequest:
    """One request of a workload. send_offset_s: seconds after the workload starts."""

    request_id: str
    kind: str
    prompt: str
    num_prompt_tokens: int
    max_tokens: int
    read_rate: float
    send_offset_s: float

    def num_blocks(self, tokens_per_block: int) -> int:
        """Blocks that GUARANTEED_NO_EVICT reserves for it."""
        return num_blocks_needed(
            CapacitySchedulerPolicy.GUARANTEED_NO_EVICT,
            tokens_per_block,
            self.num_prompt_tokens,
            self.max_tokens,
        )


class FileTokenizer:
    """`tokenizer.json` of a model folder."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer as Fast

        self._tokenizer = Fast.from_file(str(folder / "tokenizer.json"))

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids))


def demo_workload(tokenizer: Tokenizer, seed: int = DEMO_SEED) -> list[ClientRequest]:
    """The demo: readers fill every slot, then a burst of short questions comes.

    8 readers, prompts of 60-140 tokens and answers of 320-400, one every 0.3 s; from second 10 on,
    within one second, 16 questions of 30-60 tokens with answers of 40-60. Everybody reads 4
    tokens/s. All readers together fit in the KV pool, so it is the slots that are short.
    """
    rng = random.Random(seed)
    requests = [
        _request(
            tokenizer,
            READER,
            index,
            cut(tokenizer, READER_OPENINGS[index], rng.randint(60, 140)),
            rng.randint(320, 400),
            0.3 * index,
        )
        for index in range(DEMO_NUM_READERS)
    ]
    return requests + _burst(tokenizer, rng, DEMO_NUM_NEWCOMERS)


def kv_demo_workload(tokenizer: Tokenizer, seed: int = DEMO_SEED) -> list[ClientRequest]:
    """The demo of both KV tiers: readers of long texts fill the pool, then a burst comes.

    8 readers, prompts of 300-400 tokens and answers of 240-320, one every 0.3 s; from second 10 on,
    within one second, 12 questions of 30-60 tokens with answers of 40-60. Everybody reads 4
    tokens/s. The readers alone come to 1.6 times the pool when they are done, and everybody
    together has fewer streams than the engine has slots: it is the KV that is short.
    """
    rng = random.Random(seed)
    requests = []
    for index in range(KV_DEMO_NUM_READERS):
        texts = [READER_OPENINGS[(index + k) % len(READER_OPENINGS)] for k in range(4)]
        prompt = cut(tokenizer, " ".join(texts), rng.randint(300, 400))
        answer = rng.randint(240, 320)
        requests.append(_request(tokenizer, READER, index, prompt, answer, 0.3 * index))
    return requests + _burst(tokenizer, rng, KV_DEMO_NUM_NEWCOMERS)


def _burst(tokenizer: Tokenizer, rng: random.Random, num_newcomers: int) -> list[ClientRequest]:
    """Short questions with short answers within a second."""
    requests = []
    offsets = sorted(rng.uniform(0, DEMO_BURST_LENGTH_S) for _ in range(num_newcomers))
    for index, offset in enumerate(offsets):
        # Two questions in one message, so that there is enough text for the longest cut.
        text = f"{QUESTIONS[index]} {QUESTIONS[(index + 1) % len(QUESTIONS)]}"
        prompt = cut(tokenizer, text, rng.randint(30, 60))
        answer = rng.randint(40, 60)
        send = DEMO_BURST_TIME_S + offset
        requests.append(_request(tokenizer, NEWCOMER, index, prompt, answer, send))
    return requests


def cut(tokenizer: Tokenizer, text: str, num_tokens: int) -> str:
    """The longest head of `text` with at most `num_tokens` tokens when it is tokenized again.

    A head cut between two tokens may tokenize differently, hence the second look. The whole text
    when it is shorter. Raises ValueError for num_tokens < 1.
    """
    if num_tokens < 1:
        raise ValueError(f"num_tokens must be >= 1, got {num_tokens}")
    ids = tokenizer.encode(text)
    for keep in range(min(num_tokens, len(ids)), 0, -1):
        head = tokenizer.decode(ids[:keep])
        if head and len(tokenizer.encode(head)) <= num_tokens:
            return head
    raise ValueError(f"no head of {text[:40]!r} has {num_tokens} tokens or fewer")


def total_read_rate(requests: list[ClientRequest]) -> float:
    """ΣR: tokens/s that everybody together would read at the same time."""
    return sum(request.read_rate for request in requests)


def describe_load(load: float) -> str:
    """ΣR/Γ as text, with a word when it is high."""
    text = f"{load:.2f}"
    if load > 1:
        return f"{text} (more is read than the engine can make: somebody must wait)"
    if load > HIGH_LOAD:
        return f"{text} (high: little room is left for a burst)"
    return text


def _request(
    tokenizer: Tokenizer, kind: str, index: int, prompt: str, max_tokens: int, send_offset_s: float
) -> ClientRequest:
    return ClientRequest(
        request_id=f"{kind}-{index:02d}",
        kind=kind,
        prompt=prompt,
        num_prompt_tokens=len(tokenizer.encode(prompt)),
        max_tokens=max_tokens,
        read_rate=DEMO_READ_RATE,
        send_offset_s=send_offset_s,
    )
