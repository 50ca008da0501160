"""Copies of a step: batches that respect what depends on what, and what a failed one spoils."""

import hypothesis.strategies as st
from hypothesis import given

from tokenflow.inflight.moves import StepMoves
from tokenflow.inflight.runner import CopyDirection

OFFLOAD, ONBOARD = CopyDirection.OFFLOAD, CopyDirection.ONBOARD


class Done:
    def __init__(self, error=None):
        self.error, self.seconds, self.waited_s = error, 1.0, 0.5

    def wait(self):
        pass


class Memory:
    """Two lists of values; copies happen at once. bad: (direction, block) whose transfer fails."""

    def __init__(self, num_blocks=6, bad=()):
        self.device = [f"d{i}" for i in range(num_blocks)]
        self.host = [f"h{i}" for i in range(num_blocks)]
        self.bad = set(bad)
        self.log = []

    def start(self, direction, copies):
        self.log.append((direction, [(c.device_block, c.host_block) for c in copies]))
        assert len({c.device_block for c in copies}) == len(copies)
        assert len({c.host_block for c in copies}) == len(copies)
        target = (lambda c: c.host_block) if direction is OFFLOAD else (lambda c: c.device_block)
        if any((direction, target(c)) in self.bad for c in copies):
            return Done("planned")
        for c in copies:
            if direction is OFFLOAD:
                self.host[c.host_block] = self.device[c.device_block]
            else:
                self.device[c.device_block] = self.host[c.host_block]
        return Done()

    def copy_blocks(self, copies):
        self.log.append(("copy", [(c.source, c.target) for c in copies]))
        for c in copies:
            self.device[c.target] = self.device[c.source]


def test_independent_copies_go_together_and_dependent_ones_after():
    memory, moves = Memory(), StepMoves()
    moves.offload(0, 0)
    moves.onboard(3, 0)  # into the block that was read
    moves.offload(1, 1)
    moves.onboard(4, 1)
    result = moves.run(memory.copy_blocks, memory)
    assert memory.log == [(OFFLOAD, [(0, 0), (1, 1)]), (ONBOARD, [(0, 3), (1, 4)])]
    assert memory.host[:2] == ["d0", "d1"]
    assert memory.device[:2] == ["h3", "h4"]
    assert (result.num_offloads, result.num_onboards) == (2, 2)
    assert (result.offload_s, result.onboard_s, result.wait_s) == (1.0, 1.0, 1.0)
    assert len(moves) == 0


def test_a_host_block_given_up_and_taken_again_is_read_first():
    memory, moves = Memory(), StepMoves()
    moves.onboard(2, 5)
    moves.offload(0, 2)
    moves.run(memory.copy_blocks, memory)
    assert memory.device[5] == "h2"
    assert memory.host[2] == "d0"


def test_one_source_for_two_is_named_once_in_a_transfer():
    memory, moves = Memory(), StepMoves()
    moves.onboard(2, 4)
    moves.onboard(2, 5)
    moves.run(memory.copy_blocks, memory)
    assert memory.device[4:] == ["h2", "h2"]
    assert len(memory.log) == 2


def test_a_failed_copy_spoils_what_was_to_be_made_of_it():
    memory, moves = Memory(bad=[(OFFLOAD, 1)]), StepMoves()
    moves.offload(0, 1)
    moves.onboard(1, 3)  # would read it
    moves.copy(3, 4, 2)  # and this would read that
    moves.onboard(5, 2)
    result = moves.run(memory.copy_blocks, memory)
    assert result.bad_host == {1}
    assert result.bad_device == {3, 4}
    assert (result.num_failed_offloads, result.num_failed_onboards) == (1, 1)
    assert result.error == "planned"
    assert memory.device[2] == "h5"


def test_a_spoiled_block_that_is_written_again_is_good():
    memory, moves = Memory(bad=[(ONBOARD, 3)]), StepMoves()
    moves.onboard(1, 3)
    moves.copy(0, 3, 4)
    result = moves.run(memory.copy_blocks, memory)
    assert result.bad_device == set()
    assert memory.device[3] == "d0"


def test_what_cannot_be_begun_and_what_the_device_refuses_is_told():
    def refuse(copies):
        raise RuntimeError("no")

    class Closed:
        def start(self, direction, copies):
            raise RuntimeError("closed")

    moves = StepMoves()
    moves.offload(0, 0)
    moves.copy(1, 2, 3)
    result = moves.run(refuse, Closed())
    assert result.bad_host == {0}
    assert result.bad_device == {2}
    assert result.error == "RuntimeError: closed"
    assert str(result.failure) == "no"


BLOCK = st.integers(0, 5)
MOVE = st.tuples(st.sampled_from(["offload", "onboard", "copy"]), BLOCK, BLOCK)


@given(st.lists(MOVE, max_size=20))
def test_batches_give_what_one_after_the_other_gives(recorded):
    memory, moves, wanted = Memory(), StepMoves(), Memory()
    for kind, source, target in recorded:
        if kind == "offload":
            moves.offload(source, target)
            wanted.host[target] = wanted.device[source]
        elif kind == "onboard":
            moves.onboard(source, target)
            wanted.device[target] = wanted.host[source]
        elif source != target:
            moves.copy(source, target, 1)
            wanted.device[target] = wanted.device[source]
    result = moves.run(memory.copy_blocks, memory)
    assert memory.device == wanted.device
    assert memory.host == wanted.host
    assert not result.bad_device | result.bad_host
