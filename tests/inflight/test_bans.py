"""Bad words, n-grams and min_tokens: the definition, and the same for a batch in arrays."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support import reference_sampling as reference
from tokenflow.errors import InternalError
from tokenflow.executor.api import Request, SamplingConfig
from tokenflow.inflight.bans import banned_token_ids, has_bans, next_allowed
from tokenflow.inflight.batched_bans import BatchedBans
from tokenflow.inflight.history import BatchHistory, TokenHistory


def make(prompt=(1,), bad_words=(), ngram=0, min_tokens=0, end_id=None) -> Request:
    sampling = SamplingConfig(no_repeat_ngram_size=ngram, min_tokens=min_tokens)
    return Request(
        input_token_ids=tuple(prompt),
        max_tokens=9,
        sampling_config=sampling,
        bad_words=tuple(bad_words),
        end_id=end_id,
    )


@pytest.mark.parametrize(
    ("fields", "sequence", "num_generated", "banned"),
    [
        ({"bad_words": [(3,), (0,)]}, [1], 0, {3, 0}),
        ({"bad_words": [(1, 3)]}, [2, 1], 0, {3}),
        ({"bad_words": [(1, 3)]}, [1, 2], 0, set()),
        ({"bad_words": [(5, 1, 3)]}, [1], 0, set()),
        ({"bad_words": [(1, 1, 2), (1, 3), (4,)]}, [1, 1], 0, {2, 3, 4}),
        ({"ngram": 1}, [4, 2, 4], 0, {4, 2}),
        ({"ngram": 2}, [1, 2, 3, 1, 4, 1], 0, {2, 4}),
        ({"ngram": 3}, [1, 2, 3, 1, 2], 0, {3}),
        ({"ngram": 3}, [1, 2], 0, set()),
        ({"ngram": 2}, [1], 0, set()),
        ({"ngram": 2}, [1, 1], 0, {1}),
        ({"min_tokens": 2, "end_id": 5}, [1, 5], 1, {5}),
        ({"min_tokens": 2, "end_id": 5}, [1, 5], 2, set()),
        ({"min_tokens": 2}, [1], 0, set()),
        ({}, [1, 1, 1], 2, set()),
    ],
)
def test_what_is_banned(fields, sequence, num_generated, banned):
    assert banned_token_ids(make(**fields), sequence, num_generated) == banned
    assert has_bans(make(**fields)) or not banned


def test_next_allowed():
    assert next_allowed(3, set(), 5) == 3
    assert next_allowed(3, {3, 4, 0}, 5) == 1
    assert next_allowed(3, {0, 1, 2, 3, 4}, 5) == 3


_tokens = st.integers(0, 4)
_requests = st.builds(
    make,
    prompt=st.lists(_tokens, min_size=1, max_size=20),
    bad_words=st.lists(st.lists(_tokens, min_size=1, max_size=5).map(tuple), max_size=8),
    ngram=st.integers(0, 5),
    min_tokens=st.integers(0, 4),
    end_id=st.none() | _tokens,
)


@settings(max_examples=200, deadline=None)
@given(requests=st.lists(_requests, min_size=1, max_size=5), more=st.lists(_tokens, max_size=4))
@example(requests=[make(prompt=(1,), bad_words=[(1, 1, 1, 2)])], more=[1, 1])
def test_batch_equals_the_definition_and_the_reference(requests, more):
    histories = [TokenHistory(r.input_token_ids) for r in requests]
    history = BatchHistory(histories)
    bans = BatchedBans(requests, history)
    for step in range(len(more) + 1):
        found = [set() for _ in requests]
        pairs = bans.find(np.full(len(requests), step), history)
        for row, token in zip(*(column.tolist() for column in pairs), strict=True):
            found[row].add(token)
        for request, tokens in zip(requests, found, strict=True):
            sequence = [*request.input_token_ids, *more[:step]]
            assert tokens == banned_token_ids(request, sequence, step)
            assert tokens == reference.banned(request, sequence, step)
        if step < len(more):
            history.append(np.full(len(requests), more[step]))


def test_histories_grow_and_move_between_batches():
    ones = {i: TokenHistory([i, 7]) for i in (1, 2)}
    expected = {i: [i, 7] for i in ones}
    for batch, num_tokens in (([1, 2], 300), ([2, None], 150), ([None, 2, 1], 1)):
        history = BatchHistory([None if i is None else ones[i] for i in batch])
        for step in range(num_tokens):
            history.append(np.array([0 if i is None else 1000 * i + step for i in batch]))
            for i in batch:
                if i is not None:
                    expected[i].append(1000 * i + step)
        for row, i in enumerate(batch):
            place = history.index[row]
            assert (place < 0) == (i is None)
            if i is not None:
                used = history.used(np.array([place]))[0]
                assert used.tolist() == expected[i]
                behind = history.token_ids[place, history.lengths[place] :]
                assert (behind == i).all(), "every column is a token of the row"
        num_generated = np.array([0 if i is None else len(expected[i]) - 2 for i in batch])
        history.check(num_generated)
        with pytest.raises(InternalError):
            history.check(num_generated + 1)
        history.save()
