"""Drives a TorchRunner as a batcher would, with shuffled blocks and a pool full of rubbish."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tokenflow.executor.api import Request, SamplingConfig
from tokenflow.inflight.runner import SequenceChunk
from tokenflow.inflight.torch_runner import TorchRunner


class Blocks:
    """Hands out block ids in random order; every block holds rubbish first."""

    def __init__(
        self,
        runner: TorchRunner,
        num_blocks: int,
        tokens_per_block: int,
        num_host_blocks: int = 0,
    ) -> None:
        self.tokens_per_block = tokens_per_block
        self.free = list(range(num_blocks))
        runner.allocate_kv(num_blocks, tokens_per_block, num_host_blocks)
        rubbish = [5 + i % 50 for i in range(num_blocks * tokens_per_block)]
        runner.logits([SequenceChunk(-1, rubbish, 0, self.free, False, 0)])
        random.Random(3).shuffle(self.free)

    def take(self, count: int) -> list[int]:
        """Fresh blocks."""
        return [self.free.pop() for _ in range(count)]


@dataclass
class Sequence:
    """Known tokens, how many of them have KV, and where it lies."""

    request_id: int
    token_ids: list[int]
    blocks: Blocks
    num_computed: int = 0
    block_ids: list[int] = field(default_factory=list)

    def chunk(self, length: int, samples: bool = True, num_generated: int = 0) -> SequenceChunk:
        """The next `length` tokens; takes blocks as they are needed."""
        end = self.num_computed + length
        assert end <= len(self.token_ids)
        missing = -(-end // self.blocks.tokens_per_block) - len(self.block_ids)
        self.block_ids += self.blocks.take(missing)
        chunk = SequenceChunk(
            self.request_id,
            self.token_ids[self.num_computed : end],
            self.num_computed,
            list(self.block_ids),
            samples,
            num_generated,
        )
        self.num_computed = end
        return chunk


@dataclass
class Generated:
    """What one greedy generation gave. margins: distance of the two best logits, per token."""

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)


def generate(
    runner: TorchRunner,
    blocks: Blocks,
    prompts: list[list[int]],
    num_tokens: int,
    *,
    with_margins: bool = False,
    recompute_every: int = 0,
) -> list[Generated]:
    """Greedy, all prompts side by side: one prefill each, then decode.

    with_margins: fill `Generated.margins`, at the price of computing each step twice.
    recompute_every: every so many tokens all KV is dropped and computed again, as one prefill.
    """
    sequences = [Sequence(i, list(prompt), blocks) for i, prompt in enumerate(prompts)]
    results = [Generated() for _ in prompts]
    for i, prompt in enumerate(prompts):
        runner.add_request(i, Request(input_token_ids=tuple(prompt), max_tokens=num_tokens))
    for step in range(num_tokens):
        if recompute_every and step and step % recompute_every == 0:
            for sequence in sequences:
                blocks.free += sequence.block_ids
                sequence.block_ids, sequence.num_computed = [], 0
        chunks = [s.chunk(len(s.token_ids) - s.num_computed, True, step) for s in sequences]
        if with_margins:
            best = runner.logits(chunks).topk(2, dim=-1).values
            for result, (first, second) in zip(results, best.tolist(), strict=True):
                result.margins.append(first - second)
        output = runner.forward(chunks)
        for i, sequence in enumerate(sequences):
            sequence.token_ids.append(output.token_ids[i])
            results[i].token_ids.append(output.token_ids[i])
            results[i].log_probs.append(output.log_probs[i])
    for i, sequence in enumerate(sequences):
        runner.remove_request(i)
        blocks.free += sequence.block_ids
    return results


def assert_same_generation(reference: Generated, other: Generated) -> int:
    """float32 wording: equal ids up to the first position whose reference margin is < 1e-3,
    log-probabilities within 1e-3 up to there. Returns how many tokens were compared."""
    assert len(reference.margins) == len(reference.token_ids)
    count = 0
    for i, margin in enumerate(reference.margins):
        if margin < 1e-3:
            break
        assert other.token_ids[i] == reference.token_ids[i], i
        assert abs(other.log_probs[i] - reference.log_probs[i]) <= 1e-3, i
        count += 1
    return count


class Dense:
    """Reference: transformers' own attention over the whole sequence, float32."""

    def __init__(self, path: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """[len(token_ids), vocab]."""
        return self._model(input_ids=torch.tensor([token_ids])).logits[0]


def assert_rows_close(rows: torch.Tensor, reference: torch.Tensor, bound: float = 1e-4) -> None:
    """max|difference| / max|reference| per row."""
    assert rows.shape == reference.shape
    error = (rows - reference).abs().amax(-1) / reference.abs().amax(-1)
    assert float(error.max()) <= bound


def request(**sampling: object) -> Request:
    """A request of which only the sampling parameters matter."""
    end_id = sampling.pop("end_id", None)
    return Request(
        input_token_ids=(1,),
        max_tokens=100,
        end_id=end_id,
        sampling_config=SamplingConfig(**sampling),
    )
