"""Blocks: sharing, copies, eviction order, what is stored, and that nothing is ever lost."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from tokenflow.errors import ConfigError
from tokenflow.executor.api import KvCacheConfig
from tokenflow.inflight.kv_cache import KvCacheManager
from tokenflow.inflight.runner import BlockCopy

SIZE = 4


def make(num_blocks=16, **config):
    return KvCacheManager(KvCacheConfig(max_tokens=num_blocks * SIZE, **config), SIZE)


def take_copies(kv):
    """The copies inside the device that the next step would make."""
    copies = []
    assert kv.run_moves(copies.extend) is None
    return copies


def put(kv, token_ids, salt=None):
    """Compute `token_ids` and release them; returns the slots they were in."""
    sequence = kv.allocate(token_ids, salt)
    slots = sequence.slots(99)
    take_copies(kv)
    kv.release(sequence, token_ids, len(token_ids))
    kv.check_integrity()
    return slots


def tokens(*groups):
    return [token for group in groups for token in group]


A, B, C, D = [1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16]


def test_full_blocks_are_shared_by_reference():
    kv = make()
    slots = put(kv, tokens(A, B, [9]))
    first = kv.allocate(tokens(A, B, [20]))
    second = kv.allocate(tokens(A, B, [21, 22]))
    assert first.slots(2) == second.slots(2) == slots[:2]
    assert first.num_reused_tokens == second.num_reused_tokens == 8
    assert kv.num_used_blocks == 4
    assert take_copies(kv) == []
    kv.check_integrity()


def test_the_last_token_is_never_looked_up():
    kv = make()
    put(kv, tokens(A, B))
    sequence = kv.allocate(tokens(A, B))
    assert sequence.num_reused_tokens == 7
    assert kv.allocate([1]).num_reused_tokens == 0


def test_what_a_cancelled_stream_leaves_makes_a_one_token_resume():
    for num_tokens in range(2, 20):
        kv = make()
        history = list(range(100, 100 + num_tokens))
        stream = kv.allocate(history[:1])
        assert kv.grow(stream, num_tokens)
        kv.release(stream, history, num_tokens - 1)  # the last sampled token has no KV
        resumed = kv.allocate(history)
        assert resumed.num_reused_tokens == num_tokens - 1
        assert take_copies(kv) == [], "the tail is taken over, not copied"
        kv.check_integrity()


def test_partial_block_is_copied_when_its_tail_would_be_lost():
    kv = make()
    slots = put(kv, tokens(A, B))
    sequence = kv.allocate(tokens(A, [5, 6, 99, 98]))
    assert sequence.num_reused_tokens == 6
    assert take_copies(kv) == [BlockCopy(slots[1], sequence.slots(2)[1], 2)]
    assert kv.allocate(tokens(A, B, [9])).num_reused_tokens == 8, "the source is still there"
    kv.check_integrity()


def test_partial_block_in_use_is_copied():
    kv = make()
    put(kv, tokens(A, B, [9]))
    user = kv.allocate(tokens(A, B, [9, 9]))
    other = kv.allocate(tokens(A, B))
    assert other.num_reused_tokens == 7
    assert take_copies(kv) == [BlockCopy(user.slots(2)[1], other.slots(2)[1], 3)]
    kv.check_integrity()


def test_partly_matching_leaf_is_taken_over_when_no_other_block_is_left():
    kv = make(num_blocks=2)
    slots = put(kv, tokens(A, B))
    sequence = kv.allocate(tokens(A, [5, 99]))
    assert sequence.slots(2) == slots
    assert sequence.num_reused_tokens == 5
    assert take_copies(kv) == []
    kv.check_integrity()


def test_matching_stops_after_a_partial_match():
    kv = make()
    put(kv, tokens(A, B, C, [1]))
    sequence = kv.allocate(tokens(A, [5, 6, 7, 99], C, [1]))
    assert sequence.num_reused_tokens == 7


def test_longest_partial_match_wins():
    kv = make()
    put(kv, [1, 2, 50, 51, 52])
    put(kv, [1, 2, 3, 60, 61])
    assert kv.allocate([1, 2, 3, 4]).num_reused_tokens == 3


def test_partial_reuse_can_be_switched_off():
    kv = make(enable_partial_reuse=False)
    put(kv, tokens(A, B, [9, 10]))
    assert kv.allocate(tokens(A, B, [9, 10, 11])).num_reused_tokens == 8


def test_without_copies_only_unused_leaves_are_partly_reused():
    kv = make(copy_on_partial_reuse=False)
    put(kv, tokens(A, B, C))
    assert kv.allocate(tokens(A, [5, 99])).num_reused_tokens == 4, "a block with children"
    sequence = kv.allocate(tokens(A, B, [9, 99]))
    assert sequence.num_reused_tokens == 9
    assert take_copies(kv) == []
    kv.check_integrity()


def test_salts_never_meet():
    kv = make()
    put(kv, tokens(A, B), salt=1)
    assert kv.allocate(tokens(A, B), 2).num_reused_tokens == 0
    assert kv.allocate(tokens(A, B)).num_reused_tokens == 0
    assert kv.allocate(tokens(A, B), 1).num_reused_tokens == 7


def test_reuse_can_be_switched_off():
    kv = make(enable_block_reuse=False)
    put(kv, tokens(A, B))
    assert kv.allocate(tokens(A, B)).num_reused_tokens == 0


def test_only_computed_tokens_are_stored():
    kv = make()
    sequence = kv.allocate(tokens(A, B, C))
    kv.release(sequence, tokens(A, B, C), 6)
    assert kv.allocate(tokens(A, B, C)).num_reused_tokens == 6
    other = make()
    sequence = other.allocate(tokens(A, B))
    other.release(sequence, tokens(A, B), 0)
    assert other.allocate(tokens(A, B)).num_reused_tokens == 0
    other.check_integrity()


def test_salts_of_which_nothing_was_computed_leave_no_root():
    kv = make()
    for salt in range(3):
        kv.release(kv.allocate(tokens(A, B), salt), tokens(A, B), 0)
    assert not kv._store._tree._roots


def test_nothing_more_is_stored_after_a_failure():
    kv = make()
    sequence = kv.allocate(tokens(A, B, C))
    kv.store_full_blocks(sequence, tokens(A, B, C), 5)
    kv.discard(sequence)
    kv.check_integrity()
    assert kv.allocate(tokens(A, B, C)).num_reused_tokens == 4


def test_full_blocks_are_found_while_their_owner_runs():
    kv = make()
    owner = kv.allocate(tokens(A, B, [9]))
    kv.store_full_blocks(owner, tokens(A, B, [9]), 9)
    other = kv.allocate(tokens(A, B, [10]))
    assert other.slots(2) == owner.slots(2)
    kv.check_integrity()


def test_duplicate_of_a_running_sequence_is_stored_at_its_end():
    kv = make()
    first, second = kv.allocate(tokens(A, B)), kv.allocate(tokens(A, C))
    kv.store_full_blocks(first, tokens(A, B), 8)
    kv.store_full_blocks(second, tokens(A, C), 8)
    kv.check_integrity()
    assert kv.allocate(tokens(A, C, [1])).num_reused_tokens == 4
    kv.release(first, tokens(A, B), 8)
    kv.release(second, tokens(A, C), 8)
    kv.check_integrity()
    assert kv.allocate(tokens(A, C, [1])).num_reused_tokens == 8


def test_least_recently_used_tail_goes_first():
    kv = make(num_blocks=5)
    put(kv, tokens(A, B))  # two blocks, oldest
    put(kv, tokens(C, D))
    kv.allocate([50] * 8)  # takes the free block and one victim: the tail B
    assert kv.allocate(tokens(A, [60])).num_reused_tokens == 4
    kv.check_integrity()


def test_beginning_in_recent_use_outlives_older_tails():
    kv = make(num_blocks=5)
    put(kv, tokens(A, B))
    put(kv, tokens(C, D))
    put(kv, tokens(A, [40]))  # uses A again, after C and D
    sequence = kv.allocate([50] * 12)  # evicts B, D and C, in this order
    kv.check_integrity()
    kv.release(sequence, [50] * 12, 0)
    assert kv.allocate(tokens(A, [40, 41])).num_reused_tokens == 5


def test_leaf_that_was_used_again_outlives_an_older_one():
    kv = make(num_blocks=3)
    put(kv, A)
    put(kv, B)
    again = kv.allocate(tokens(A, [9]))
    kv.release(again, tokens(A, [9]), 4)
    other = kv.allocate([50] * 8)  # the free block and one victim
    kv.release(other, [50] * 8, 0)
    assert kv.allocate(tokens(A, [9])).num_reused_tokens == 4
    kv.check_integrity()


def test_duplicates_refresh_what_they_duplicate():
    kv = make(num_blocks=5)
    first, second = kv.allocate(tokens(A, [9])), kv.allocate(tokens(A, [9]))
    kv.release(first, tokens(A, [9]), 4)
    put(kv, B)
    kv.release(second, tokens(A, [9]), 4)  # a second A: not stored, but A was used now
    other = kv.allocate([50] * 16)
    kv.release(other, [50] * 16, 0)
    assert kv.allocate(tokens(A, [9])).num_reused_tokens == 4
    kv.check_integrity()


def test_no_room_changes_nothing():
    kv = make(num_blocks=3)
    put(kv, tokens(A, B))
    before = kv.stats()
    assert kv.allocate(tokens(A, B, C, D)) is None
    assert kv.stats() == before
    user = kv.allocate(tokens(A, B, [9]))
    assert not kv.grow(user, 13)
    assert len(user.blocks) == 3
    kv.check_integrity()


def test_counters():
    kv = make()
    put(kv, tokens(A, B))
    kv.allocate(tokens(A, [5, 99, 98, 97], [20]))
    stats = kv.stats()
    assert (stats.alloc_total_blocks, stats.alloc_new_blocks) == (4, 3)
    assert (stats.reused_blocks, stats.missed_blocks) == (2, 3)
    assert stats.cache_hit_rate == 0.4
    assert (stats.max_num_blocks, stats.free_num_blocks, stats.used_num_blocks) == (16, 13, 3)


@pytest.mark.parametrize(
    "config",
    [
        {"free_gpu_memory_fraction": 0.5},
        {"event_buffer_max_size": -1},
    ],
)
def test_refused_configuration_names_its_key(config):
    with pytest.raises(ConfigError, match=next(iter(config))):
        make(**config)


def test_pool_without_a_block_is_refused():
    with pytest.raises(ConfigError, match="max_tokens"):
        KvCacheManager(KvCacheConfig(max_tokens=3), 4)
    with pytest.raises(ConfigError, match="max_tokens"):
        KvCacheManager(KvCacheConfig(), 4)


@settings(max_examples=150, deadline=None)
@given(
    num_blocks=st.integers(1, 7),
    actions=st.lists(
        st.tuples(
            st.lists(st.integers(0, 1), min_size=1, max_size=14),
            st.integers(0, 14),
            st.booleans(),
            st.integers(0, 2),
            st.integers(0, 1),
        ),
        max_size=25,
    ),
)
def test_content_is_always_what_the_key_says(num_blocks, actions):
    """Random prompts over two tokens; the model keeps what each position of each slot holds."""
    kv = make(num_blocks)
    content = {}
    running = []
    for prompt, num_computed, keep, which, salt in actions:
        sequence = kv.allocate(prompt, salt)
        kv.check_integrity()
        if sequence is None:
            if len(prompt) > num_blocks * SIZE:
                continue
            assert running, "an empty pool must take what fits in it"
            old, old_prompt, old_computed = running.pop(which % len(running))
            (kv.release(old, old_prompt, old_computed) if keep else kv.discard(old))
            kv.check_integrity()
            continue
        for copy in take_copies(kv):
            for i in range(copy.num_tokens):
                content[copy.target, i] = content[copy.source, i]
        slots = sequence.slots(99)
        computed = max(min(num_computed, len(prompt)), sequence.num_reused_tokens)
        for position in range(len(prompt)):
            cell = slots[position // SIZE], position % SIZE
            if position < sequence.num_reused_tokens:
                assert content[cell] == (salt, *prompt[: position + 1])
            elif position < computed:
                content[cell] = (salt, *prompt[: position + 1])
        kv.store_full_blocks(sequence, prompt, computed)
        kv.check_integrity()
        running.append((sequence, prompt, computed))
        if len(running) > 2:
            old, old_prompt, old_computed = running.pop(which)
            (kv.release(old, old_prompt, old_computed) if keep else kv.discard(old))
            kv.check_integrity()
    for sequence, prompt, computed in running:
        kv.release(sequence, prompt, computed)
    kv.check_integrity()
    assert kv.num_used_blocks == 0


def test_what_was_used_last_stays_longest_whoever_used_it():
    kv = make(num_blocks=4)
    put(kv, tokens(A, B))
    ended = kv.allocate(tokens(C, D))
    kv.release(ended, tokens(C, D), 8, ended=True)
    other = kv.allocate([50] * 8)
    kv.release(other, [50] * 8, 0)
    kv.check_integrity()
    assert kv.allocate(tokens(C, D, [9])).num_reused_tokens == 8
