"""Two tiers of KV under any interleaving of what an engine does with them, on real content.

The manager decides, the scripted runner holds the blocks: copies complete or fail when the machine
says so, and the runner refuses whatever a copy under way rules out. After each rule every stored
block must hold the KV of its history in each tier that it is said to be in, every running sequence
its own, and the events, replayed, must give the tree.
"""

from datetime import timedelta

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.inflight.mirror import Mirror, history_of, stored_blocks
from tests.inflight.tier_engine import MIN_PRIORITY, TierEngine
from tokenflow.executor.api import KvCacheRetentionConfig, TokenRangeRetentionConfig

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
        self.engine = TierEngine(
            num_blocks,
            num_host_blocks,
            size,
            partial=partial,
            copies=copies,
            inclusive=self.inclusive,
            overlap=overlap,
            max_blocks_in_flight=max_in_flight,
        )
        self.kv = self.engine.kv
        self.max_in_flight, self.finds_tails = max_in_flight, partial
        self.finds_all_tails = copies  # else not those that are read by somebody
        self.mirror = Mirror()
        self.now = 0.0

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
        if not self.engine.moves_wait:
            actions += [*[self.boundary] * 2, self.drop_host]
            if self.inclusive:
                actions += [*[self.offload] * 4, *[self.prefetch] * 4]
        if self.engine.pace.pending:
            actions += [self.end_of_a_copy] * 6
        names = [action.__name__ for action in actions]
        getattr(self, data.draw(st.sampled_from(names)))(data)

    # -- the planning of a step ----------------------------------------------------------------

    def serve(self, data):
        """A whole request, alone in its steps."""
        self.start(data)
        self.step(data, whole=True)
        if self.engine.running:
            self.engine.end(self.engine.running[-1], ended=data.draw(st.booleans()))

    def start(self, data):
        self.engine.take_blocks(data.draw(PROMPTS), data.draw(SALTS), data.draw(retentions()))

    def resume(self, data):
        token_ids, salt = data.draw(st.sampled_from(self.engine.past))
        more = data.draw(st.lists(st.integers(0, 1), max_size=3))
        self.engine.take_blocks([*token_ids, *more], salt, data.draw(retentions()))

    def grow(self, data):
        complete = [run for run in self.engine.running if run.num_computed == len(run.token_ids)]
        if not complete:
            return
        run = data.draw(st.sampled_from(complete))
        run.token_ids.append(data.draw(st.integers(0, 1)))
        self.engine.moves_wait = True
        if not self.kv.grow(run.blocks, len(run.token_ids)):
            assert self.kv.num_free_blocks == 0
            run.token_ids.pop()

    def stop(self, data):
        """Finish, pause, cancel or internal pause, at any moment outside a step's computation."""
        if self.engine.running:
            run = data.draw(st.sampled_from(self.engine.running))
            self.engine.end(run, ended=data.draw(st.booleans()))

    # -- a step --------------------------------------------------------------------------------

    def step(self, data, whole=False):
        """Its copies, then chunks of some sequences; as batcher.py does it."""
        if not self.engine.make_moves():
            return
        chunks = self.choose(data, whole)
        self.engine.compute(chunks)
        for run, count in chunks:
            run.num_computed += count
            self.kv.store_full_blocks(run.blocks, run.token_ids, run.num_computed)
        self.kv.begin(self.now)

    def step_that_fails(self, data):
        """Before or after the blocks were written."""
        if not self.engine.make_moves():
            return
        chunks = self.choose(data)
        if data.draw(st.booleans()):
            self.engine.compute(chunks)
        for run in list(self.engine.running):
            self.engine.discard(run)
        self.kv.begin(self.now)

    def choose(self, data, whole=False):
        chunks = []
        for run in self.engine.running:
            left = len(run.token_ids) - run.num_computed
            count = left if whole else min(left, data.draw(st.sampled_from([0, 1, 2, 5, 12])))
            if count:
                chunks.append((run, count))
        return chunks

    def step_whose_copies_fail(self, data):
        """All of those that it waits for, or the first ones of them, or those inside the device."""
        kind = data.draw(st.sampled_from(["link", "copies"]))
        self.engine.copy_fails = kind == "copies"
        self.engine.num_to_fail = data.draw(st.sampled_from([1, 2, 99])) if kind == "link" else 0
        self.engine.make_moves()
        self.engine.num_to_fail, self.engine.copy_fails = 0, False

    # -- between steps -------------------------------------------------------------------------

    def boundary(self, data):
        self.now += data.draw(st.sampled_from([0.0, 0.5, 2.0]))
        self.kv.begin(self.now)

    def some_tokens(self, data):
        known = [*self.engine.past, *((run.token_ids, run.salt) for run in self.engine.running)]
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
        which = data.draw(st.integers(0, len(self.engine.pace.pending) - 1))
        fails = data.draw(st.sampled_from([False, False, False, True]))
        (self.engine.pace.fail if fails else self.engine.pace.complete)(which)

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
        assert self.engine.runner.transport.num_under_way <= len(flights)
        self.engine.check_figures(flights)
        if not self.inclusive:
            assert not flights
            assert all(b.slot is None or b.host_slot is None for b in stored_blocks(self.kv))

    @invariant()
    def content_is_what_it_is_said_to_be(self):
        if not hasattr(self, "kv") or self.engine.moves_wait:
            return
        self.engine.check_content()

    def teardown(self):
        """Run to empty: nothing is used, on its way or pinned, and all of it can be had again."""
        if not hasattr(self, "kv"):
            return
        if self.engine.moves_wait:
            self.engine.make_moves()
        for run in list(self.engine.running):
            self.kv.release(run.blocks, run.token_ids, run.num_computed)
            self.engine.forget(run)
        self.engine.pace.complete_all()
        self.kv.begin(self.now)
        assert not self.kv.has_flights
        assert self.engine.runner.transport.num_under_way == 0
        assert self.kv.num_used_blocks == 0
        self.books_are_right()
        self.content_is_what_it_is_said_to_be()
        everything = [2] * (self.kv.num_total_blocks * self.engine.size)
        blocks = self.kv.allocate(everything, 99)
        assert blocks is not None
        self.kv.run_moves(self.engine.copy_blocks)
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
