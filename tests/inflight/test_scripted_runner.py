"""The scripted runner must notice wrong blocks, else the tests built on it prove nothing."""

import pytest

from tokenflow.errors import ConfigError
from tokenflow.executor.api import Request, SamplingConfig
from tokenflow.inflight.runner import BlockCopy, SequenceChunk
from tokenflow.inflight.scripted_runner import ScriptedRunner, create_scripted_runner
from tokenflow.inflight.scripts import counting, echo, expected, fixed, pseudo_random

VOCAB = 100


@pytest.fixture
def runner():
    runner = ScriptedRunner(pseudo_random(VOCAB), VOCAB)
    runner.allocate_kv(8, 4)
    runner.add_request(1, Request(input_token_ids=(1, 2, 3, 4, 5), max_tokens=9))
    runner.forward([SequenceChunk(1, (1, 2, 3, 4, 5), 0, [0, 1], True, 0)])
    return runner


def next_of(runner, block_ids):
    return runner.forward([SequenceChunk(1, (6,), 5, block_ids, True, 1)]).token_ids


def test_right_blocks_give_the_script(runner):
    assert next_of(runner, [0, 1]) == expected(pseudo_random(VOCAB), (1, 2, 3, 4, 5, 6), 1)[0]


def test_block_that_was_never_computed(runner):
    with pytest.raises(RuntimeError, match="no KV"):
        next_of(runner, [0, 2])
    with pytest.raises(RuntimeError, match="no KV"):
        next_of(runner, [3, 1])


def test_swapped_blocks(runner):
    with pytest.raises(RuntimeError):
        next_of(runner, [1, 0])


def test_same_tokens_behind_another_history(runner):
    runner.add_request(2, Request(input_token_ids=(9, 2, 3, 4, 5), max_tokens=9))
    runner.forward([SequenceChunk(2, (9, 2, 3, 4, 5), 0, [2, 3], True, 0)])
    with pytest.raises(RuntimeError, match="another history"):
        next_of(runner, [0, 3])


def test_blocks_of_another_request(runner):
    runner.add_request(2, Request(input_token_ids=(9, 2, 3, 4, 5), max_tokens=9))
    runner.forward([SequenceChunk(2, (9, 2, 3, 4, 5), 0, [2, 3], True, 0)])
    with pytest.raises(RuntimeError, match="another prompt"):
        next_of(runner, [2, 3])


def test_one_block_given_to_two_sequences(runner):
    runner.add_request(2, Request(input_token_ids=(1, 2, 3, 4, 7), max_tokens=9))
    chunks = [
        SequenceChunk(1, (6,), 5, [0, 1], True, 1),
        SequenceChunk(2, (7,), 4, [0, 1], True, 0),
    ]
    with pytest.raises(RuntimeError):
        runner.forward(chunks)


def test_copies_carry_content_and_nothing_more(runner):
    runner.copy_blocks([BlockCopy(0, 4, 3)])
    runner.add_request(2, Request(input_token_ids=(1, 2, 3, 8), max_tokens=9))
    output = runner.forward([SequenceChunk(2, (8,), 3, [4], True, 0)])
    assert output.token_ids == expected(pseudo_random(VOCAB), (1, 2, 3, 8), 1)[0]
    runner.copy_blocks([BlockCopy(0, 5, 3)])
    with pytest.raises(RuntimeError, match="no KV"):
        next_of(runner, [5, 1])
    with pytest.raises(RuntimeError, match="does not exist"):
        runner.copy_blocks([BlockCopy(1, 6, 3)])


def test_block_list_must_cover_the_chunk_exactly(runner):
    for block_ids in ([0], [0, 1, 2]):
        with pytest.raises(RuntimeError, match="cover"):
            next_of(runner, block_ids)


def test_requests_are_added_and_removed_once(runner):
    with pytest.raises(ValueError, match="twice"):
        runner.add_request(1, Request(input_token_ids=(1,), max_tokens=1))
    runner.remove_request(1)
    with pytest.raises(KeyError):
        runner.remove_request(1)


@pytest.mark.parametrize(
    ("fields", "output"),
    [
        ({"bad_words": ((7,),)}, [6, 8, 9]),
        ({"bad_words": ((6,), (7,))}, [8, 9, 10]),
        ({"bad_words": ((5, 6),)}, [7, 8, 9]),
        ({"bad_words": ((4, 5, 6), (7, 8))}, [7, 9, 10]),
        ({"bad_words": tuple((i,) for i in range(VOCAB))}, [6, 7, 8]),
        ({"sampling_config": SamplingConfig(no_repeat_ngram_size=1)}, [6, 7, 8]),
        ({"end_id": 7, "sampling_config": SamplingConfig(min_tokens=2)}, [6, 8, 9]),
        ({"end_id": 7, "sampling_config": SamplingConfig(min_tokens=1)}, [6, 7, 8]),
        (
            {
                "embedding_bias": ((6, -100.0),),
                "sampling_config": SamplingConfig(repetition_penalty=9.0, top_p=0.1, min_p=0.5),
            },
            [6, 7, 8],
        ),
    ],
)
def test_bans_replace_and_what_reweighs_changes_nothing(fields, output):
    runner = ScriptedRunner(counting(VOCAB), VOCAB)
    runner.allocate_kv(2, 8)
    prompt = (4, 5)
    runner.add_request(1, Request(input_token_ids=prompt, max_tokens=9, **fields))
    tokens, start = prompt, 0
    for step, expected_token in enumerate(output):
        result = runner.forward([SequenceChunk(1, tokens, start, [0], True, step)])
        assert result.token_ids == [expected_token]
        start += len(tokens)
        tokens = (expected_token,)


def test_no_repeated_ngram_in_a_script_that_repeats():
    runner = ScriptedRunner(echo(3), VOCAB)
    runner.allocate_kv(2, 8)
    sampling = SamplingConfig(no_repeat_ngram_size=2)
    request = Request(input_token_ids=(7, 8, 9), max_tokens=9, sampling_config=sampling)
    runner.add_request(1, request)
    first = runner.forward([SequenceChunk(1, (7, 8, 9), 0, [0], True, 0)])
    second = runner.forward([SequenceChunk(1, (7,), 3, [0], True, 1)])
    assert (first.token_ids, second.token_ids) == ([7], [9])
    assert first.log_probs + second.log_probs == expected(echo(3), (7, 8, 9), 2)[1]


def test_step_time_is_spent_in_the_given_sleep():
    slept = []
    runner = ScriptedRunner(counting(VOCAB), VOCAB, step_s=0.25, sleep=slept.append)
    runner.allocate_kv(1, 4)
    runner.add_request(1, Request(input_token_ids=(1,), max_tokens=1))
    runner.forward([SequenceChunk(1, (1,), 0, [0], True, 0)])
    assert slept == [0.25]


def test_scripts():
    assert expected(counting(5), (9, 2), 4)[0] == [3, 4, 0, 1]
    assert expected(echo(3), (7, 8, 9), 5)[0] == [7, 8, 9, 7, 8]
    assert expected(fixed([4, 5], 2, then=0), (1, 1), 4)[0] == [4, 5, 0, 0]
    ids, log_probs = expected(pseudo_random(VOCAB), (1, 2), 20)
    assert len(set(ids)) > 10
    assert all(log_prob < 0 for log_prob in log_probs)
    assert expected(pseudo_random(VOCAB), [1, 2, *ids[:7]], 13) == (ids[7:], log_probs[7:])
    assert expected(pseudo_random(VOCAB, seed=1), (1, 2), 20)[0] != ids


def test_runner_by_name():
    assert create_scripted_runner("echo", vocab_size=50).vocab_size == 50
    with pytest.raises(ConfigError, match="counting"):
        create_scripted_runner("nothing")
