"""What the capacity planner says: one record of everything.

Owns its keys. They end in their unit; rates are tokens/s unless they are called arrivals.
Invariant: nothing in it depends on the machine that simulated.

Of the load of an answer: `num_readers` are those who are there at once, from their arrival until
they have read the last token: arrivals/s times the mean of that time (Little's law), or the burst.
`sum_rate` is ΣR, what they read; `capacity` is Γ, what the machine decodes for so many at mid-life,
without the time of prefill, whose share is `prefill_share`. `uses_host`: of the host tier, if there
is one; a policy that does not computes again what it takes out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from build_engines.model_shapes import MODELS
from perf.lab.capacity import (
    MOST_SHARE,
    Answer,
    Question,
    decode_tokens_per_s,
    first_token_s,
    prefill_s,
)
from perf.lab.load_probe import MAX_SHARE_HELD_BACK, Probe
from perf.lab.measures import Record, known
from perf.lab.policies import PolicyRow
from perf.lab.summary import BASELINE
from tokenflow import metrics

CAPACITY = "capacity"
"""Why a load fails that is not tried: it is more than the machine can make (capacity.MOST_SHARE).
The other reasons are load_probe's."""


def to_record(question: Question, answers: Sequence[Answer]) -> Record:
    """Everything: the question, the machine, how it was simulated, the answer of each policy."""
    return {
        "question": _asked(question),
        "machine": _machine(question),
        "simulated": _simulated(question, answers),
        "answers": _answers(question, answers),
    }


def _asked(question: Question) -> Record:
    return {
        **asdict(question.machine),
        "read_rate": question.readers.rate,
        "prompt_tokens": question.readers.prompt_tokens,
        "output_tokens": question.readers.answer_tokens,
        "arrivals": {"kind": question.kind.name, **question.kind.shape},
        **asdict(question.limits),
        "seeds": list(question.seeds),
        "tolerance": question.tolerance,
    }


def _machine(question: Question) -> Record:
    machine, engine = question.machine, question.engine()
    pool_tokens = engine.num_total_blocks * engine.tokens_per_block
    return {
        "weight_bytes": MODELS[machine.model].weight_bytes,
        "kv_bytes_per_token": machine.kv_bytes_per_token,
        "kv_pool_tokens": pool_tokens,
        "kv_pool_bytes": engine.num_total_blocks * engine.block_bytes,
        "tokens_per_block": engine.tokens_per_block,
        "block_bytes": engine.block_bytes,
        "num_host_blocks": engine.num_host_blocks,
        "first_token_alone_s": first_token_s(question),
        "num_streams_in_pool": int(pool_tokens / question.mid_life),
    }


def _simulated(question: Question, answers: Sequence[Answer]) -> Record:
    probes = [one for answer in answers for one in answer.probes]
    goes_on = question.kind.goes_on
    return {
        "num_probes": len(probes),
        "num_runs": sum(len(one.runs) for one in probes),
        "num_requests": sum(one.total("num_requests") for one in probes),
        "num_measured_requests": sum(len(one.ttfts_s) for one in probes),
        "num_output_tokens": sum(one.total("num_output_tokens") for one in probes),
        "virtual_s": sum(one.virtual_s for one in probes),
        "max_share_held_back": MAX_SHARE_HELD_BACK if goes_on else None,
        "max_share_of_estimate": MOST_SHARE if goes_on else None,
    }


def _answers(question: Question, answers: Sequence[Answer]) -> list[Record]:
    base = next((a.bracket.passed for a in answers if a.row.name == BASELINE), None)
    return [_answer(question, one, base) for one in answers]


def _answer(question: Question, answer: Answer, base: float | None) -> Record:
    best = answer.best
    load = None if best is None else best.load
    return {
        "policy": answer.row.name,
        "words": answer.row.words,
        "load": load,
        "unit": question.kind.unit,
        "uses_host": answer.row.engine(question.engine()).num_host_blocks > 0,
        "num_filling_requests_per_seed": question.num_filling(answer.row),
        "ratio_to_fcfs_reserve": None if load is None or base is None else load / base,
        "estimated_load": answer.estimate,
        "failed_load": answer.bracket.failed,
        "failed_by": _failed_by(answer),
        **_worth(question, answer.row, best),
        "probes": [_probe(one) for one in answer.probes],
    }


def _failed_by(answer: Answer) -> list[str] | None:
    if answer.bracket.failed is None:
        return None
    return [CAPACITY] if answer.too_much is None else list(answer.too_much.reasons)


_EMPTY = (
    *("num_readers", "sum_rate", "capacity", "prefill_share"),
    *("ttft_mean_s", "ttft_p50_s", "ttft_p99_s", "share_stalled", "share_held_back"),
    *("kv_used_peak_tokens", "kv_used_peak_bytes", "paused_peak_tokens", "paused_peak_bytes"),
    *("num_host_blocks_peak", "host_peak_bytes", "offload_bytes", "onboard_bytes", "virtual_s"),
    *("num_pauses", "num_forced_pauses", "num_recomputed_tokens"),
)


def _worth(question: Question, row: PolicyRow, best: Probe | None) -> Record:
    """What the load of an answer means; all None where no load passed."""
    if best is None:
        return dict.fromkeys(_EMPTY)
    return {**_load(question, row, best), **_felt(best), **_memory(question, best)}


def _load(question: Question, row: PolicyRow, best: Probe) -> Record:
    readers, goes_on = question.readers, question.kind.goes_on
    reader_s = [seconds for run in best.runs for seconds in run.reader_s]
    mean_s = sum(reader_s) / len(reader_s)
    num_readers = best.load * mean_s if goes_on else best.load
    num_running = question.num_running(question.held_tokens(row))
    sum_rate = best.load * (readers.answer_tokens if goes_on else readers.rate)
    return {
        "num_readers": num_readers,
        "sum_rate": sum_rate,
        "capacity": decode_tokens_per_s(question, num_readers),
        "prefill_share": best.load * prefill_s(question, num_running) if goes_on else None,
    }


def _felt(best: Probe) -> Record:
    ttfts = best.ttfts_s
    return {
        "ttft_mean_s": sum(ttfts) / len(ttfts),
        "ttft_p50_s": known(metrics.percentile(ttfts, 50)),
        "ttft_p99_s": known(metrics.percentile(ttfts, 99)),
        "share_stalled": best.total("num_stalled") / len(ttfts),
        "share_held_back": best.total("num_held_back") / best.total("num_requests"),
    }


def _memory(question: Question, best: Probe) -> Record:
    engine, per_token = question.engine(), question.machine.kv_bytes_per_token
    num_used, num_paused = best.peak("num_used_blocks_peak"), best.peak("paused_tokens_peak")
    num_host = best.peak("num_host_blocks_peak")
    return {
        "kv_used_peak_tokens": num_used * engine.tokens_per_block,
        "kv_used_peak_bytes": num_used * engine.block_bytes,
        "paused_peak_tokens": num_paused,
        "paused_peak_bytes": num_paused * per_token,
        "num_host_blocks_peak": num_host,
        "host_peak_bytes": num_host * engine.block_bytes,
        "offload_bytes": best.total("num_offloaded_blocks") * engine.block_bytes,
        "onboard_bytes": best.total("num_onboarded_blocks") * engine.block_bytes,
        "virtual_s": best.virtual_s,
        "num_pauses": best.total("num_pauses"),
        "num_forced_pauses": best.total("num_forced_pauses"),
        "num_recomputed_tokens": best.total("num_recomputed_tokens"),
    }


def _probe(one: Probe) -> Record:
    ttfts = one.ttfts_s
    p99 = metrics.percentile(ttfts, 99)
    return {
        "load": one.load,
        "passes": one.passes,
        "failed_by": list(one.reasons),
        "num_seeds_run": len(one.runs),
        "num_measured": len(ttfts),
        "ttft_p99_s": None if p99 == float("inf") else p99,
        "num_stalled": one.total("num_stalled"),
        "num_held_back": one.total("num_held_back"),
        "num_failed": one.total("num_failed"),
        "virtual_s": one.virtual_s,
    }
