"""Sections on pauses and resumes: exactness, reuse, latency of a cancel, ends of leases."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from perf.trtllm_suite.compare import Comparison, compare
from perf.trtllm_suite.engines import Engines
from perf.trtllm_suite.streams import Output, Streams
from perf.trtllm_suite.values import Findings, SuiteError
from tokenflow.executor.api import FinishReason

MAX_MEDIAN_CANCEL_STEPS = 4.0
"""Steps from a cancel to its final response: the one in flight, the one whose end takes the cancel
in, and what the way to the engine's process and back takes."""

_NUM_CANCELS = 8


class Paused:
    """A request that is paused whenever it reached the next one of `pauses` (tokens of its output),
    and resumed with its prompt and what came. It is driven by `step` until `is_done`."""

    def __init__(
        self, streams: Streams, prompt: Sequence[int], max_tokens: int, pauses: Sequence[int]
    ) -> None:
        self._streams = streams
        self._prompt = tuple(prompt)
        self._max_tokens = max_tokens
        self._pauses = list(pauses)
        self._salt = streams.new_salt()
        self.token_ids: list[int] = []
        self.log_probs: list[float] = []
        self.num_pauses = 0
        self.num_early_ends = 0
        self.resumes: list[Output] = []
        self.resume()

    @property
    def is_done(self) -> bool:
        return len(self.token_ids) >= self._max_tokens

    @property
    def values(self) -> tuple[list[int], list[float]]:
        return self.token_ids, self.log_probs

    def resume(self) -> None:
        """Enqueue it, with all that came so far."""
        self._id = self._streams.enqueue(
            (*self._prompt, *self.token_ids), self._max_tokens - len(self.token_ids), self._salt
        )

    def step(self, resume: bool = True) -> None:
        """Up to the next pause, and on unless told otherwise; or to the end."""
        target = self._pauses.pop(0) if self._pauses else None
        if target is None:
            self._take(self._streams.wait_end(self._id))
            if not self.is_done:
                raise SuiteError(f"ended after {len(self.token_ids)} of {self._max_tokens} tokens")
            return
        output = self._streams.pause(self._id, max(1, target - len(self.token_ids)))
        self._take(output)
        if output.reason is FinishReason.CANCELLED:
            self.num_pauses += 1
            if resume:
                self.resume()
        elif self.is_done:
            self.num_early_ends += 1
        else:
            raise SuiteError(f"a cancelled request ended with {output.reason}")

    def _take(self, output: Output) -> None:
        self.token_ids += output.token_ids
        self.log_probs += output.log_probs
        self.resumes.append(output)

    def run(self) -> None:
        """To the end."""
        while not self.is_done:
            self.step()


def check_exactness(engines: Engines) -> Findings:
    """Output with pauses against output without; alone, and several at once."""
    found = Findings(figures={"tolerance_nats": engines.tolerance})
    found.figures["prompts"] = "English" if engines.prompts.are_english else "random tokens"
    shape = engines.shape
    length, size = shape.output_len, shape.tokens_per_block
    cases = [
        ("short prompt, 1 pause", shape.prompt_lens[0], [size]),
        ("whole blocks, 3 pauses", shape.prompt_lens[1], [1, size, length // 2]),
        ("chunked prompt, 4 pauses", shape.prompt_lens[2], [2, size - 1, size + 3, length - 8]),
    ]
    with engines.streams() as streams:
        prompts = [engines.prompts.make(num_tokens) for _, num_tokens, _ in cases]
        references = [streams.run(p, length, streams.new_salt()).values for p in prompts]
        control = streams.run(prompts[-1], length, streams.new_salt()).values
        _note(found, "control: repeated, no pause", compare(references[-1], control), None)
        for (name, _, pauses), prompt, reference in zip(cases, prompts, references, strict=True):
            request = Paused(streams, prompt, length, pauses)
            request.run()
            _note(found, name, compare(reference, request.values), engines.tolerance)
        together = [
            Paused(streams, prompt, length, pauses)
            for (_, _, pauses), prompt in zip(cases, prompts, strict=True)
        ]
        while any(not request.is_done for request in together):
            for request in together:
                if not request.is_done:
                    request.step()
        for (name, _, _), request, reference in zip(cases, together, references, strict=True):
            name = f"{name}, beside others"
            _note(found, name, compare(reference, request.values), engines.tolerance)
        found.figures["num_pauses_beside_others"] = sum(r.num_pauses for r in together)
    return found


def _note(found: Findings, name: str, comparison: Comparison, tolerance: float | None) -> None:
    found.figures[name] = comparison.figures()
    faults = [] if tolerance is None else comparison.faults(name, tolerance)
    found.faults += faults
    remark = comparison.remark(name)
    if remark is not None and not faults:
        found.remarks.append(remark)


def check_reuse(engines: Engines) -> Findings:
    """Every full block of what was computed before a pause is found by the resume."""
    found, shape = Findings(), engines.shape
    size, length = shape.tokens_per_block, shape.output_len
    rows, resume_s, cold_s = [], [], []
    with engines.streams() as streams:
        for index, pause_at in enumerate((1, size // 2, size, size + 1, length - 8)):
            prompt = engines.prompts.make(shape.prompt_lens[1] + index)
            request = Paused(streams, prompt, length, [pause_at])
            request.step()
            known = (*prompt, *request.token_ids)
            request.run()
            num_reused = request.resumes[-1].num_reused_blocks
            num_expected = (len(known) - 1) // size
            rows.append({"num_tokens": len(known), "num_full_blocks": num_expected,
                         "num_reused_blocks": num_reused})  # fmt: skip
            if num_reused < num_expected:
                found.faults.append(
                    f"a resume of {len(known)} tokens found {num_reused} blocks, "
                    f"{num_expected} were full"
                )
            resume_s.append(request.resumes[-1].first_token_s)
            cold_s.append(streams.run(known, 1, streams.new_salt()).first_token_s)
    found.figures = {
        "resumes": rows,
        "resume_first_token_s": round(statistics.median(resume_s), 4),
        "recomputed_first_token_s": round(statistics.median(cold_s), 4),
    }
    return found


def check_cancel(engines: Engines) -> Findings:
    """How many steps a cancel takes, with another stream beside it."""
    found, shape = Findings(), engines.shape
    latencies_s, num_late = [], 0
    with engines.streams() as streams:
        neighbour = streams.enqueue(engines.prompts.make(shape.prompt_lens[1]), shape.output_len)
        streams.wait_tokens(neighbour, 2)
        gaps: list[float] = []
        for index in range(_NUM_CANCELS):
            if streams.output(neighbour).reason is not None:
                neighbour = streams.enqueue(
                    engines.prompts.make(shape.prompt_lens[1]), shape.output_len
                )
            request_id = streams.enqueue(
                engines.prompts.make(shape.prompt_lens[0]), shape.output_len
            )
            output = streams.wait_tokens(request_id, 4 + index)
            num_before = len(output.token_ids)
            start_time = output.times[-1]
            streams.executor.cancel_request(request_id)
            streams.wait_end(request_id)
            if output.reason is not FinishReason.CANCELLED:
                found.faults.append(f"a cancelled request ended with {output.reason}")
            latencies_s.append(output.end_time - start_time)
            num_late = max(num_late, len(output.token_ids) - num_before)
            gaps += [b - a for a, b in zip(output.times, output.times[1:], strict=False) if b > a]
    step_s = statistics.median(gaps)
    steps = [latency / step_s for latency in latencies_s]
    found.figures = {
        "step_s": round(step_s, 5),
        "median_steps": round(statistics.median(steps), 2),
        "max_steps": round(max(steps), 2),
        "max_tokens_after_cancel": num_late,
    }
    if statistics.median(steps) > MAX_MEDIAN_CANCEL_STEPS:
        found.faults.append(
            f"a cancel took {statistics.median(steps):.1f} steps (median), "
            f"more than {MAX_MEDIAN_CANCEL_STEPS:g}"
        )
    return found


def check_leases(engines: Engines) -> Findings:
    """A request that is given a few tokens at a time: each lease ends with exactly those, none is
    lost or made twice, and the next one finds the blocks of the one before."""
    found, shape = Findings(), engines.shape
    size, length = shape.tokens_per_block, shape.output_len
    with engines.streams() as streams:
        prompt, salt = engines.prompts.make(shape.prompt_lens[1]), streams.new_salt()
        reference = streams.run(prompt, length, streams.new_salt())
        token_ids: list[int] = []
        log_probs: list[float] = []
        waits_s, num_leases = [], 0
        while len(token_ids) < length:
            lease = min(size // 2 + 3, length - len(token_ids))
            known = (*prompt, *token_ids)
            output = streams.run(known, lease, salt)
            num_leases += 1
            waits_s.append(output.first_token_s)
            if len(output.token_ids) != lease:
                found.faults.append(f"a lease of {lease} gave {len(output.token_ids)} tokens")
                break
            num_full = (len(known) - 1) // size if token_ids else 0
            if output.num_reused_blocks < num_full:
                found.faults.append(
                    f"lease {num_leases} found {output.num_reused_blocks} of {num_full} blocks"
                )
            token_ids += output.token_ids
            log_probs += output.log_probs
        same = compare(reference.values, (token_ids, log_probs))
        _note(found, "leases", same, engines.tolerance)
    found.figures["num_leases"] = num_leases
    found.figures["renewal_s"] = round(statistics.median(waits_s), 4)
    return found
