"""Two pools: one machine prefills, another decodes, the KV crosses a link between them (DistServe).

Owns the way of a request through two runs in virtual time, on the product's own engine:
1. the prefill machine, first come first served, gives the first token;
2. the KV of the prompt crosses the link, one request after the other, as soon as it is complete;
3. the decode machine, first come first served, takes blocks as they are needed, and computes again
   what it has to take out when its pool is full; a context that came over the link costs nothing.

Both machines are `engine`, so this is a policy for two: compare it per machine. In favour of it:
the link never waits for room on the other side, which a real one does. Against: how many machines
do which of the two is fixed at one each, and of a conversation the prefill machine knows the
prompts alone: it computes the answers in them, which the other machine made, and all crosses again.

Invariant: same arguments, same run; nothing is random.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from perf.virtual.prompts import ANSWER_TOKEN, PromptTokens
from perf.virtual.simulation import Simulation
from perf.virtual.values import SimEngine, SimRequest, SimResult, SimSeq
from tokenflow.inflight.runner import SequenceChunk
from tokenflow.policies import FcfsReservePolicy
from tokenflow.scheduler import plan
from tokenflow.types import Decision, EndReason, Snapshot

NUM_MACHINES = 2
LINK_BYTES_PER_S = 25e9
"""200 Gbit/s: one InfiniBand NDR200 or RoCE port per machine."""


def run(
    requests: Sequence[SimRequest],
    engine: SimEngine,
    *,
    link_bytes_per_s: float = LINK_BYTES_PER_S,
    until: float = 600.0,
) -> SimResult:
    """Run to the end of all requests; its counters are the decode machine's, its streams what the
    clients saw. RuntimeError as Simulation.run."""
    requests = sorted(requests, key=lambda r: r.arrival_time)
    known = PromptTokens()
    prompts = [known.token_ids(handle, request) for handle, request in enumerate(requests, 1)]
    first = Simulation(
        _prefills(requests),
        _fcfs,
        _prefill_engine(engine),
        prompts=lambda handle, _: prompts[handle - 1],
    ).run(until)
    rest: list[tuple[int, SimRequest]] = []
    free_time = 0.0
    for i, (request, seq) in enumerate(zip(requests, first.seqs, strict=True)):
        if not seq.token_times or request.max_tokens == 1:
            continue
        num_blocks = -(-request.num_prompt_tokens // engine.tokens_per_block)
        free_time = max(free_time, seq.token_times[0])
        free_time += num_blocks * engine.block_bytes / link_bytes_per_s
        decode = _decode(request, free_time)
        if decode is not None:
            rest.append((i, decode))
    second = Simulation(
        [r for _, r in rest],
        _fcfs,
        _decode_engine(engine),
        prompts=lambda handle, _: prompts[rest[handle - 1][0]] + (ANSWER_TOKEN,),
    ).run(until)
    ends = dict(zip((i for i, _ in rest), second.seqs, strict=True))
    seqs = [
        _joined(request, seq, ends.get(i))
        for i, (request, seq) in enumerate(zip(requests, first.seqs, strict=True))
    ]
    return dataclasses.replace(second, seqs=seqs)


def _fcfs(snapshot: Snapshot) -> Decision:
    return plan(snapshot, FcfsReservePolicy())


def _prefills(requests: Sequence[SimRequest]) -> list[SimRequest]:
    return [dataclasses.replace(r, max_tokens=1, limit_tokens=None) for r in requests]


def _prefill_engine(engine: SimEngine) -> SimEngine:
    return dataclasses.replace(
        engine, capacity_policy="guaranteed_no_evict", kv_tiering=False, has_retention=False
    )


def _decode(request: SimRequest, arrival_time: float) -> SimRequest | None:
    """What the decode machine is asked for; None if the client has left by then."""
    cancel_after_s = request.cancel_after_s
    if cancel_after_s is not None:
        cancel_after_s -= arrival_time - request.arrival_time
        if cancel_after_s <= 0:
            return None
    limit_tokens = request.limit_tokens
    return dataclasses.replace(
        request,
        arrival_time=arrival_time,
        num_prompt_tokens=request.num_prompt_tokens + 1,
        limit_tokens=None if limit_tokens is None else limit_tokens - 1,
        max_tokens=request.max_tokens - 1,
        cancel_after_s=cancel_after_s,
    )


def _decode_engine(engine: SimEngine) -> SimEngine:
    """Contexts that came over the link take no share of a step's tokens, so there is no limit."""
    chunk = engine.num_total_blocks * engine.tokens_per_block
    return dataclasses.replace(
        engine,
        capacity_policy="max_utilization",
        kv_tiering=False,
        num_host_blocks=0,
        has_retention=False,
        enable_chunked_context=True,
        max_num_tokens=chunk + engine.max_batch_size,
        step_cost=_DecodeCost(engine),
        step_factors=(1.0,),  # they are in the cost already
    )


class _DecodeCost:
    """Seconds of a step of the decode machine: of a context that came over the link only the last
    token is computed, the one that the prefill machine generated."""

    def __init__(self, engine: SimEngine) -> None:
        self._engine = engine

    def __call__(self, chunks: Sequence[SequenceChunk], step: int) -> float:
        return self._engine.step_s([_without_context(chunk) for chunk in chunks], step)


def _without_context(chunk: SequenceChunk) -> SequenceChunk:
    if chunk.num_generated or len(chunk.token_ids) == 1:
        return chunk
    last = chunk.start + len(chunk.token_ids) - 1
    return SequenceChunk(
        request_id=chunk.request_id,
        token_ids=chunk.token_ids[-1:],
        start=last,
        block_ids=chunk.block_ids,
        samples=chunk.samples,
        num_generated=chunk.num_generated,
    )


def _joined(request: SimRequest, first: SimSeq, rest: SimSeq | None) -> SimSeq:
    """What the client saw of both; `rest` is None if nothing came of the second."""
    if rest is None and request.max_tokens > 1 and first.end is EndReason.LENGTH:
        assert request.cancel_after_s is not None, "not handed over"
        left_time = request.arrival_time + request.cancel_after_s
        return dataclasses.replace(
            first, request=request, end=EndReason.CANCELLED, end_time=left_time
        )
    if rest is None:
        return dataclasses.replace(first, request=request)
    return dataclasses.replace(
        rest, request=request, token_times=[*first.token_times, *rest.token_times]
    )
