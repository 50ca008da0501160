"""Requests for the state machine: few draws, much variety, and shrinking towards plain ones."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import strategies as st

from tests.core.oracle import whole
from tokenflow.executor.api import OutputConfig, SamplingConfig
from tokenflow.inflight.scripts import Script
from tokenflow.types import GenerateRequest

FAMILIES = ((7, 3, 5, 1, 0, 2, 9, 4, 8, 6, 1), (7, 3, 5, 1, 9, 9, 0, 2), ())
"""Beginnings of prompts; two of them begin alike."""

NATURES = (
    *("reader", "reader", "fast reader", "slow reader", "machine", "machine"),
    *("reader", "decay", "sampled", "no log probs", "salted", "malformed"),
)
ENDINGS = (
    *("length", "length", "end id", "end id late", "stop word", "stop words"),
    *("bad word", "bad words", "no ngram"),
)
MAX_TOKENS = st.sampled_from([1, 2, 5, 10, 20, 30, 45, 64])


@dataclass(frozen=True)
class Arrival:
    """The drawn part of a request. family, cut: its prompt's beginning; tail: tokens after it."""

    family: int
    cut: int
    tail: int
    salt: int
    max_tokens: int
    nature: str
    ending: str
    timeout_s: float | None
    priority: float

    @property
    def is_malformed(self) -> bool:
        """The engine refuses it when it looks at it."""
        return self.nature == "malformed"


def arrivals() -> st.SearchStrategy[Arrival]:
    return st.builds(
        Arrival,
        family=st.integers(0, len(FAMILIES) - 1),
        cut=st.integers(0, 11),
        tail=st.sampled_from([1, 2, 3, 4, 5, 8, 13, 20, 34]),
        salt=st.integers(0, 5),
        max_tokens=MAX_TOKENS,
        nature=st.sampled_from(NATURES),
        ending=st.sampled_from(ENDINGS),
        timeout_s=st.sampled_from([None, None, None, None, None, None, 0.3, 1.0, 3.0]),
        priority=st.sampled_from([0.5, 0.5, 0.5, 0.1, 0.9]),
    )


def request_of(
    arrival: Arrival, request_id: str, now: float, script: Script, vocab_size: int
) -> GenerateRequest:
    """The request; stop words are taken from its own answer, so that they come about."""
    a = arrival
    tail = tuple((a.salt * 7 + i * i * (a.salt + 3)) % 11 for i in range(a.tail))
    if a.nature == "malformed" and a.salt % 2:
        tail = (*tail, vocab_size)
    rates = {"fast reader": 30.0, "slow reader": 2.0}
    sampling: dict[str, object] = {}
    if a.nature == "decay":
        sampling = {"top_p": 0.9, "top_p_decay": 0.9}
    elif a.nature == "sampled":
        sampling = {"top_k": 4, "seed": a.salt}
    fields: dict[str, object] = {}
    token = (a.salt * 3 + a.cut) % 11
    if a.ending in ("end id", "end id late"):
        fields["end_id"] = token
        sampling["min_tokens"] = 3 + a.cut if a.ending == "end id late" else None
    elif a.ending == "bad word":
        fields["bad_words"] = ((token,),)
    elif a.ending == "bad words":
        fields["bad_words"] = ((token,), *(((n + token) % 11, n) for n in range(11)))
    elif a.ending == "no ngram":
        sampling["no_repeat_ngram_size"] = 2 + a.salt % 2
    if a.nature == "malformed" and not a.salt % 2:
        fields["end_id"] = vocab_size
    request = GenerateRequest(
        request_id=request_id,
        input_token_ids=FAMILIES[a.family][: a.cut] + tail,
        max_tokens=a.max_tokens,
        arrival_time=now,
        sampling_config=SamplingConfig(**sampling),  # type: ignore[arg-type]
        output_config=OutputConfig(return_log_probs=a.nature != "no log probs"),
        read_rate=rates.get(a.nature, None if a.nature == "machine" else 5.0),
        has_reader=a.nature != "machine",
        priority=a.priority,
        cache_salt_id=1 if a.nature == "salted" else None,
        timeout_s=a.timeout_s,
        **fields,  # type: ignore[arg-type]
    )
    return with_stop_words(request, a, script, vocab_size)


def with_stop_words(
    request: GenerateRequest, arrival: Arrival, script: Script, vocab_size: int
) -> GenerateRequest:
    if arrival.ending not in ("stop word", "stop words") or arrival.is_malformed:
        return request
    answer = whole(request, script, vocab_size, 64)
    sequence = request.input_token_ids + answer.token_ids
    at = min(len(sequence), len(request.input_token_ids) + 1 + 2 * arrival.cut)
    words: tuple[tuple[int, ...], ...] = (sequence[max(0, at - 2 - arrival.salt) : at],)
    if arrival.ending == "stop words":
        words = (*words, sequence[-1:], (1, 2, 3))
    return replace(request, stop_words=words)
