"""Two tiers of KV under any interleaving of what an engine does with them, on real content.

The manager decides, the scripted runner holds the blocks: copies complete or fail when the machine
says so, and the runner refuses whatever a copy under way rules out. After each rule every stored
block must hold the KV of its history in each tier that it is said to be in, every running sequence
its own, and the events, replayed, must give the tree.
"""

from dataclasses import dataclass
from datetime import timedelta

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.inflight.mirror import Mirror, history_of, stored_blocks
from tests.inflight.paces import WhenTold
from tokenflow.executor.api import (
    KvCacheConfig,
    KvCacheRetentionConfig,
    Request,
    TokenRangeRetentionConfig,
)
from tokenflow.inflight.block_store import SequenceBlocks
from tokenflow.inflight.kv_cache import KvCacheManager
from tokenflow.inflight.runner import CopyDirection, SequenceChunk
from tokenflow.inflight.scripted_runner import ScriptedRunner
from tokenflow.inflight.scripts import counting
from tokenflow.inflight.tiers import HostTier

MIN_PRIORITY = 30
VOCAB = 4
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=12)
SALTS = st.sampled_from([None, None, None, 1])
PRIORITIES = st.sampled_from([0, 29, 30, 35, 60, 100])
DURATIONS = st.sampled_from([None, timedelta(seconds=1), timedelta(seconds=3)])


@st.composite
def retentions(draw):
    """None, or priorities for two ranges of the prompt and for what is decoded."""
    if draw(st.booleans()):
        return None
    cut = draw(st.integers(1, 6))
    ranges = (
        TokenRangeRetentionConfig(
            token_start=0, token_end=cut, priority=draw(PRIORITIES), duration_ms=draw(DURATIONS)
        ),
        TokenRangeRetentionConfig(
            token_start=cut, token_end=None, priority=draw(PRIORITIES), duration_ms=None
        ),
    )
    return KvCacheRetentionConfig(
        token_range_retention_configs=ranges[: draw(st.integers(0, 2))],
        decode_retention_priority=draw(PRIORITIES),
        decode_duration_ms=draw(DURATIONS),
    )


@dataclass(eq=False)
class Running:
    """A sequence with blocks."""

    request_id: int
    token_ids: list[int]
    salt: int | None
    blocks: SequenceBlocks
    num_computed: int


class Tiers(RuleBasedStateMachine):
    inclusive = False

    @initialize(
        num_blocks=st.integers(2, 8),
        num_host_blocks=st.integers(1, 8),
        size=st.sampled_from([1, 2, 3]),
        overlap=st.sampled_from([True, True, True, False]),
        max_in_flight=st.sampled_from([1, 3, 100]),
        partial=st.booleans(),
        copies=st.booleans(),
    )
    def build(self, num_blocks, num_host_blocks, size, overlap, max_in_flight, partial, copies):
        self.num_to_fail, self.copy_fails = 0, False
        self.pace = WhenTold(self.fate)
        self.runner = ScriptedRunner(counting(VOCAB), VOCAB, pace=self.pace)
        self.runner.allocate_kv(num_blocks, size, num_host_blocks)
        host = HostTier(
            num_blocks=num_host_blocks,
            transport=self.runner.transport,
            min_priority=MIN_PRIORITY,
            inclusive=self.inclusive,
            overlap=overlap,
            max_blocks_in_flight=max_in_flight,
        )
        config = KvCacheConfig(
            max_tokens=num_blocks * size,
            event_buffer_max_size=10_000,
            enable_partial_reuse=partial,
            copy_on_partial_reuse=copies,
        )
        self.kv = KvCacheManager(config, size, host)
        self.size, self.max_in_flight, self.finds_tails = size, max_in_flight, partial
        self.finds_all_tails = copies  # else not those that are read by somebody
        self.mirror = Mirror()
        self.running: list[Running] = []
        self.past = [([0, 1] * 6, None)]
        self.now, self.next_id = 0.0, 1
        self.moves_wait = False  # copies were recorded that no step has made yet

    # One rule that draws what to do: with a rule for each, most runs would leave most of them out.
    @rule(data=st.data())
    def act(self, data):
        actions = [
            *[self.serve] * 4,
            *[self.start] * 3,
            *[self.resume] * 4,
            *[self.grow] * 4,
            *[self.step] * 8,
            *[self.stop] * 3,
            self.step_whose_copies_fail,
            self.step_that_fails,
        ]
        if not self.moves_wait:
            actions += [*[self.boundary] * 2, self.drop_host]
            if self.inclusive:
                actions += [*[self.offload] * 4, *[self.prefetch] * 4]
        if self.pace.pending:
            actions += [self.end_of_a_copy] * 6
        names = [action.__name__ for action in actions]
        getattr(self, data.draw(st.sampled_from(names)))(data)

    # -- the planning of a step ----------------------------------------------------------------

    def serve(self, data):
        """A whole request, alone in its steps."""
        self.start(data)
        self.step(data, whole=True)
        if self.running:
            self.end(self.running[-1], ended=data.draw(st.booleans()))

    def start(self, data):
        self.take_blocks(data.draw(PROMPTS), data.draw(SALTS), data.draw(retentions()))

    def resume(self, data):
        token_ids, salt = data.draw(st.sampled_from(self.past))
        more = data.draw(st.lists(st.integers(0, 1), max_size=3))
        self.take_blocks([*token_ids, *more], salt, data.draw(retentions()))

    def take_blocks(self, token_ids, salt, retention):
        if len(token_ids) > self.kv.num_total_blocks * self.size:
            return
        fits = self.kv.num_blocks_for(len(token_ids)) <= self.kv.num_free_blocks
        blocks = self.kv.allocate(token_ids, salt, retention)
        if blocks is None:
            assert not fits, "refused although there is room"
            return
        self.moves_wait = True
        assert blocks.num_reused_tokens < len(token_ids)
        request = Request(input_token_ids=tuple(token_ids), max_tokens=99)
        self.runner.add_request(self.next_id, request)
        self.running.append(
            Running(self.next_id, list(token_ids), salt, blocks, blocks.num_reused_tokens)
        )
        self.next_id += 1

    def grow(self, data):
        complete = [run for run in self.running if run.num_computed == len(run.token_ids)]
        if not complete:
            return
        run = data.draw(st.sampled_from(complete))
        run.token_ids.append(data.draw(st.integers(0, 1)))
        self.moves_wait = True
        if not self.kv.grow(run.blocks, len(run.token_ids)):
            assert self.kv.num_free_blocks == 0
            run.token_ids.pop()

    def stop(self, data):
        """Finish, pause, cancel or internal pause, at any moment outside a step's computation."""
        if self.running:
            run = data.draw(st.sampled_from(self.running))
            self.end(run, ended=data.draw(st.booleans()))

    def end(self, run, *, ended):
        self.past = [*self.past[-5:], (run.token_ids, run.salt)]
        self.kv.release(run.blocks, run.token_ids, run.num_computed, ended=ended)
        self.forget(run)

    def discard(self, run):
        self.kv.discard(run.blocks)
        self.forget(run)

    def forget(self, run):
        self.running.remove(run)
        self.runner.remove_request(run.request_id)

    # -- a step --------------------------------------------------------------------------------

    def step(self, data, whole=False):
        """Its copies, then chunks of some sequences; as batcher.py does it."""
        if not self.make_moves():
            return
        chunks = self.choose(data, whole)
        self.compute(chunks)
        for run, count in chunks:
            run.num_computed += count
            self.kv.store_full_blocks(run.blocks, run.token_ids, run.num_computed)
        self.kv.begin(self.now)

    def step_that_fails(self, data):
        """Before or after the blocks were written."""
        if not self.make_moves():
            return
        chunks = self.choose(data)
        if data.draw(st.booleans()):
            self.compute(chunks)
        for run in list(self.running):
            self.discard(run)
        self.kv.begin(self.now)

    def choose(self, data, whole=False):
        chunks = []
        for run in self.running:
            left = len(run.token_ids) - run.num_computed
            count = left if whole else min(left, data.draw(st.sampled_from([0, 1, 2, 5, 12])))
            if count:
                chunks.append((run, count))
        return chunks

    def step_whose_copies_fail(self, data):
        """All of those that it waits for, or the first ones of them, or those inside the device."""
        kind = data.draw(st.sampled_from(["link", "copies"]))
        self.copy_fails = kind == "copies"
        self.num_to_fail = data.draw(st.sampled_from([1, 2, 99])) if kind == "link" else 0
        self.make_moves()
        self.num_to_fail, self.copy_fails = 0, False

    def fate(self, transfer):
        """Why a transfer that was waited for fails, or None."""
        self.num_to_fail -= 1
        return "planned" if self.num_to_fail >= 0 else None

    def make_moves(self):
        """False if the step failed."""
        link_may_fail = self.num_to_fail > 0
        failure = self.kv.run_moves(self.copy_blocks)
        self.moves_wait = False
        damaged = self.kv.take_damaged()
        if not link_may_fail and failure is None:
            assert not damaged
        for run in list(self.running):
            if failure is not None or run.blocks in damaged:
                self.discard(run)
        self.kv.forget_lost()
        return failure is None

    def copy_blocks(self, copies):
        if self.copy_fails:
            raise RuntimeError("planned")
        self.runner.copy_blocks(copies)

    def compute(self, chunks):
        if chunks:
            self.runner.forward(
                [
                    SequenceChunk(
                        run.request_id,
                        run.token_ids[run.num_computed : run.num_computed + count],
                        run.num_computed,
                        run.blocks.slots(self.kv.num_blocks_for(run.num_computed + count)),
                        False,
                        0,
                    )
                    for run, count in chunks
                ]
            )

    # -- between steps -------------------------------------------------------------------------

    def boundary(self, data):
        self.now += data.draw(st.sampled_from([0.0, 0.5, 2.0]))
        self.kv.begin(self.now)

    def some_tokens(self, data):
        known = [*self.past, *((run.token_ids, run.salt) for run in self.running)]
        token_ids, salt = data.draw(st.sampled_from(known))
        return [*token_ids, 0], salt  # the last token is never looked up

    def offload(self, data):
        max_blocks = data.draw(st.integers(0, 5))
        token_ids, salt = self.some_tokens(data)
        before = self.kv.ahead.locate(token_ids, salt)
        num_started = self.kv.tier_stats().num_offloads_started
        self.kv.ahead.offload(token_ids, max_blocks, salt)
        assert self.kv.tier_stats().num_offloads_started - num_started <= max_blocks
        after = self.kv.ahead.locate(token_ids, salt)
        assert after.num_tokens <= before.num_tokens
        if self.finds_all_tails:
            assert after.num_device_blocks >= before.num_device_blocks, "the device blocks stay"

    def prefetch(self, data):
        token_ids, salt = self.some_tokens(data)
        before = self.kv.ahead.locate(token_ids, salt)
        stored = {history_of(block): block for block in stored_blocks(self.kv)}
        self.kv.ahead.prefetch(token_ids, salt)
        left = {history_of(block) for block in stored_blocks(self.kv)}
        for history in stored.keys() - left:
            block = stored[history]
            assert block.ended or block.priority < MIN_PRIORITY, "it costs nobody who comes back"
        assert self.kv.ahead.locate(token_ids, salt).num_device_blocks >= before.num_device_blocks

    def drop_host(self, data):
        self.told()
        token_ids, salt = self.some_tokens(data)
        before = self.kv.ahead.locate(token_ids, salt)
        self.kv.ahead.drop_host(token_ids, salt)
        self.told()
        for history in self.mirror.removed:
            assert history == tuple(token_ids[: len(history)]), "KV of somebody else"
        after = self.kv.ahead.locate(token_ids, salt)
        assert after.num_device_blocks >= before.num_device_blocks

    def end_of_a_copy(self, data):
        which = data.draw(st.integers(0, len(self.pace.pending) - 1))
        fails = data.draw(st.sampled_from([False, False, False, True]))
        (self.pace.fail if fails else self.pace.complete)(which)

    # -- what must hold ------------------------------------------------------------------------

    def told(self):
        self.kv.flush_events()
        self.mirror.replay(self.kv.events.get_latest_events(0))

    @invariant()
    def books_are_right(self):
        if not hasattr(self, "kv"):
            return
        self.kv.check_integrity()
        self.told()
        self.mirror.check(self.kv)
        assert self.mirror.levels == [self.kv.num_total_blocks, self.kv._tiers.num_host_blocks]
        flights = self.kv._tiers.ahead.flights
        assert len(flights) <= self.max_in_flight
        assert self.runner.transport.num_under_way <= len(flights)
        self.check_figures(flights)
        if not self.inclusive:
            assert not flights
            assert all(b.slot is None or b.host_slot is None for b in stored_blocks(self.kv))

    def check_figures(self, flights):
        """The published figures, counted another way. Nobody but the copy owns the slots of a block
        that was forgotten while it was copied."""
        s, stored, tiers = self.kv.tier_stats(), stored_blocks(self.kv), self.kv._tiers
        gone = sum(f.block.parent is None for f in flights)
        onboards = sum(f.direction is CopyDirection.ONBOARD for f in flights)
        to_device = sum(f.direction is CopyDirection.ONBOARD or not f.block.parent for f in flights)
        to_host = sum(f.direction is CopyDirection.OFFLOAD or not f.block.parent for f in flights)
        assert to_device + to_host == len(flights) + gone
        used = {slot for run in self.running for slot in run.blocks.slots(99)}
        cached = sum(b.slot is not None and b.ref_count == 0 for b in stored)
        copied = sum(b.host_slot is not None for b in stored)
        assert (
            s.num_device_used_blocks,
            s.num_device_cached_blocks,
            s.num_device_in_transit_blocks,
            s.num_host_cached_blocks,
            s.num_host_in_transit_blocks,
        ) == (len(used), cached, to_device, copied, to_host)
        free = len(tiers.free_device_slots)
        assert len(used) + cached + to_device + free == s.num_device_blocks
        assert copied + to_host + len(tiers.free_host_slots) == s.num_host_blocks
        assert s.num_onboards_started == (
            s.num_onboards_completed + s.num_onboards_failed + onboards
        )
        assert s.num_offloads_started == (
            s.num_offloads_completed + s.num_offloads_failed + len(flights) - onboards
        )

    @invariant()
    def content_is_what_it_is_said_to_be(self):
        if not hasattr(self, "kv") or self.moves_wait:
            return
        for block in stored_blocks(self.kv):
            history = history_of(block)
            start = len(history) - len(block.token_ids)
            if block.slot is not None:
                self.check_cells(self.runner._blocks[block.slot], history, start)
            if block.host_slot is not None:
                self.check_cells(self.host_blocks[block.host_slot], history, start)
        for run in self.running:
            for i, slot in enumerate(run.blocks.slots(self.kv.num_blocks_for(run.num_computed))):
                history = run.token_ids[: min((i + 1) * self.size, run.num_computed)]
                self.check_cells(self.runner._blocks[slot], history, i * self.size)

    @property
    def host_blocks(self):
        return self.runner.transport._host_blocks

    def check_cells(self, cells, history, start):
        """`cells` begin with the KV of history[start:]."""
        fingerprint = 0
        for position, token_id in enumerate(history):
            fingerprint = hash((fingerprint, token_id))
            if position >= start:
                assert cells[position - start] == (token_id, fingerprint)

    def teardown(self):
        """Run to empty: nothing is used, on its way or pinned, and all of it can be had again."""
        if not hasattr(self, "kv"):
            return
        if self.moves_wait:
            self.make_moves()
        for run in list(self.running):
            self.kv.release(run.blocks, run.token_ids, run.num_computed)
            self.forget(run)
        self.pace.complete_all()
        self.kv.begin(self.now)
        assert not self.kv.has_flights
        assert self.runner.transport.num_under_way == 0
        assert self.kv.num_used_blocks == 0
        self.books_are_right()
        self.content_is_what_it_is_said_to_be()
        everything = [2] * (self.kv.num_total_blocks * self.size)
        blocks = self.kv.allocate(everything, 99)
        assert blocks is not None
        self.kv.run_moves(self.copy_blocks)
        self.kv.discard(blocks)
        self.books_are_right()
        assert len(self.kv._tiers.free_device_slots) == self.kv.num_total_blocks
        if self.finds_tails:
            for block in [b for b in stored_blocks(self.kv) if not b.children]:
                for salt in (None, 1):
                    self.kv.ahead.drop_host([*history_of(block), 3], salt)
            assert not stored_blocks(self.kv)
            assert len(self.kv._tiers.free_host_slots) == self.kv._tiers.num_host_blocks
            self.books_are_right()


class DrivenTiers(Tiers):
    inclusive = True


SETTINGS = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestTiersByTheRulesOfTensorRtLlm = Tiers.TestCase
TestTiersByTheRulesOfTensorRtLlm.settings = SETTINGS
TestTiersDrivenFromAbove = DrivenTiers.TestCase
TestTiersDrivenFromAbove.settings = SETTINGS
