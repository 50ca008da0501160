"""After a loss everything is told anew: the mirror of the runtime against the engine's own tree."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.inflight.helpers import Driver, executor_config
from tests.inflight.mirror import history_of
from tokenflow.executor.kv_api import KVCacheCreatedData, KVCacheSnapshots
from tokenflow.inflight.kv_events import KvEvents
from tokenflow.inflight.reuse_tree import Block
from tokenflow.kv_mirror import KvMirror

SIZE = 4
Told = Counter[tuple[tuple[int, ...], bool, bool]]
"""(all tokens to the end of the block, on the device, with a copy on the host), how often."""


def held(driver: Driver) -> Told:
    return Counter(
        (
            history_of(block),
            block.slot is not None,
            block.slot is not None and block.host_slot is not None,
        )
        for block in driver.batcher.kv.stored_blocks()
    )


def mirrored(mirror: KvMirror) -> Told:
    found: Told = Counter()
    pending = [(mirror._tree.root_of(None), ())]
    while pending:
        node, before = pending.pop()
        for tokens, twins in node.children.items():
            for child in twins:
                found[(before + tokens, child.level == 0, child.has_host_copy)] += 1
                pending.append((child, before + tokens))
    assert sum(found.values()) == len(mirror)
    return found


def drain(driver: Driver, mirror: KvMirror) -> None:
    events = driver.batcher.kv.events
    assert events is not None
    mirror.apply(events.get_latest_events(0))


ACTIONS = st.lists(
    st.one_of(
        *[st.tuples(st.just("enqueue"), st.integers(0, 3), st.integers(1, 8))] * 2,
        st.tuples(st.just("cancel"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("offload"), st.integers(0, 3), st.integers(1, 3)),
        st.tuples(st.just("drop_host"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("steps"), st.integers(1, 6), st.just(0)),
        st.tuples(st.just("drain"), st.just(0), st.just(0)),
        st.tuples(st.just("request"), st.just(0), st.just(0)),
    ),
    min_size=20,
    max_size=60,
)
PROMPTS = ([1] * 5, [1] * 8 + [2] * 3, [1] * 4 + [3] * 6, [5, 6, 7])
"""Shared beginnings: what is missed there is beneath everything else."""


def act(driver: Driver, mirror: KvMirror, name: str, number: int, value: int) -> None:
    if name == "enqueue":
        salt = None if value % 4 else 1
        driver.enqueue(PROMPTS[number], value, cache_salt_id=salt)
    elif name == "cancel":
        driver.cancel(len(driver.outputs) - number)
    elif name == "offload":
        driver.tiering.offload([*PROMPTS[number], 0], value)
    elif name == "drop_host":
        driver.tiering.drop_host([*PROMPTS[number], 0])
    elif name == "steps":
        for _ in range(number):
            driver.step()
    elif name == "drain":
        drain(driver, mirror)
    else:
        driver.batcher.kv.events.request_snapshot()


@settings(max_examples=150, deadline=None)
@given(ACTIONS, st.sampled_from([1, 3, 24, 24, 40]), st.booleans())
def test_the_mirror_is_the_tree_again_after_the_next_look(
    actions: list[tuple[str, int, int]], buffer_size: int, kv_tiering: bool
) -> None:
    """8 blocks and 3 copies are 12 events at most, which fit half of the large buffers."""
    driver = Driver(
        executor_config(
            num_blocks=5,
            num_host_blocks=3,
            kv_tiering=kv_tiering,
            event_buffer_max_size=buffer_size,
        )
    )
    mirror = KvMirror(SIZE)
    for name, number, value in actions:
        act(driver, mirror, name, number, value)
        if mirror.is_complete and name == "drain":
            assert mirror.num_blocks_per_level == [5, 3]
    driver.run()
    drain(driver, mirror)  # what was left; now the engine may begin anew
    driver.batcher.kv.flush_events()
    drain(driver, mirror)
    truth = held(driver)
    if buffer_size >= 24:
        assert mirror.is_complete
        assert mirrored(mirror) == truth
        assert mirror.num_device_blocks == sum(n for (_, on, _), n in truth.items() if on)
    elif not mirror.is_complete:
        assert mirror.num_gaps > 0
        assert not mirrored(mirror) - truth, "it claims what is not there"
    else:
        assert mirrored(mirror) == truth


def test_beneath_a_shared_beginning_what_comes_later_is_known_again() -> None:
    driver = Driver(
        executor_config(num_blocks=16, num_host_blocks=8, kv_tiering=True, event_buffer_max_size=64)
    )
    mirror, shared = KvMirror(SIZE), list(range(1, 17))
    drain(driver, mirror)
    for i in range(40):
        driver.run_one([*shared, 50 + i, 51], 2)
    drain(driver, mirror)
    assert not mirror.is_complete
    assert mirror.num_gaps == 1
    driver.run_one([*shared, 95, 95, 95, 95, 95, 0], 3)
    drain(driver, mirror)
    assert mirror.is_complete
    assert mirror.locate([*shared, 95, 95, 95, 95, 95, 0]).num_device_blocks == 5
    assert mirrored(mirror) == held(driver)
    assert mirror.num_gaps == 1


def test_a_snapshot_has_one_event_for_each_end_of_the_tree_and_each_copy() -> None:
    driver = Driver(
        executor_config(num_host_blocks=64, kv_tiering=True, event_buffer_max_size=1000)
    )
    mirror, shared = KvMirror(SIZE), list(range(1, 17))
    for i in range(12):
        driver.run_one([*shared, *[60 + i] * 8], 6)
    driver.tiering.offload([*shared, *[60] * 8, 0], 3)
    driver.run()
    events = driver.batcher.kv.events
    assert events is not None
    events.request_snapshot()
    driver.batcher.kv.flush_events()
    assert len(events.get_latest_events(0)) > 20, "not before these are taken"
    driver.batcher.kv.flush_events()
    anew = events.get_latest_events(0)
    assert anew[0].data == KVCacheCreatedData([64, 64])
    blocks = driver.batcher.kv.stored_blocks()
    num_ends = sum(not block.children for block in blocks)
    assert len(blocks) > 2 * num_ends
    assert len(anew) == 1 + num_ends + 3
    mirror.apply(anew)
    assert mirrored(mirror) == held(driver)
    assert mirror.locate([*shared, 0]).num_copied_blocks == 3
    driver.batcher.kv.flush_events()
    assert events.get_latest_events(0) == [], "once is enough"


class Tree:
    """Blocks one beside the other, and how often they were looked through."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [_block(i) for i in range(num_blocks)]
        self.num_walks = 0

    def __iter__(self) -> Iterator[Block]:
        self.num_walks += 1
        return iter(self.blocks)


def _block(i: int) -> Block:
    block = Block(i)
    block.token_ids, block.block_hash = (i,) * SIZE, 1000 + i
    return block


def lose(events: KvEvents, tree: Tree, num_events: int) -> None:
    for i in range(num_events):
        events.record_stored(tree.blocks[i % len(tree.blocks)], 0)
        events.flush(tree)


def test_the_tree_is_looked_at_only_after_a_loss_and_only_once_the_reader_has_looked() -> None:
    events, tree = KvEvents(10, 8, 0), Tree(3)
    assert isinstance(events, KVCacheSnapshots)
    lose(events, tree, 9)  # and Created
    events.get_latest_events(0)
    lose(events, tree, 10)
    assert tree.num_walks == 0
    lose(events, tree, 5)
    assert tree.num_walks == 0, "nobody has read what is left"
    left = events.get_latest_events(0)
    assert len(left) == 10
    events.flush(tree)
    assert tree.num_walks == 1
    anew = events.get_latest_events(0)
    assert [e.event_id for e in anew] == list(range(left[-1].event_id + 1, left[-1].event_id + 5))
    events.flush(tree)
    assert tree.num_walks == 1
    events.request_snapshot()
    events.flush(tree)
    assert tree.num_walks == 2
    assert len(events.get_latest_events(0)) == 4


def test_what_does_not_fit_is_said_once_and_tried_seldom(
    caplog: pytest.LogCaptureFixture,
) -> None:
    events, tree = KvEvents(20, 50, 0), Tree(40)
    with caplog.at_level(logging.WARNING, logger="tokenflow"):
        lose(events, tree, 25)
        for _ in range(100):
            events.get_latest_events(0)
            lose(events, tree, 1)
    assert 4 <= tree.num_walks <= 6
    messages = [r.getMessage() for r in caplog.records]
    assert len(messages) == 2
    assert "event_buffer_max_size is 20" in messages[0]
    assert "cannot be told anew" in messages[1]
    del tree.blocks[9:]
    for _ in range(21):
        events.get_latest_events(0)
        lose(events, tree, 1)
        if any(isinstance(e.data, KVCacheCreatedData) for e in events.get_latest_events(0)):
            return
    raise AssertionError("9 blocks fit half of 20")
