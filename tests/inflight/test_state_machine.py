"""Any interleaving of requests, cancels, steps and failures, on content-checked blocks.

The scripted runner reads every history back from the blocks it is given and checks fingerprints, so
a wrong, stale or shared-by-mistake block ends in an error or a wrong token, which the model here
(each request's output is a beginning of what its script says) does not accept. The same with a host
tier, in both of its modes: its copies complete late, or fail, and nobody may notice.
"""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.inflight.helpers import GUARANTEED, MAX_UTILIZATION, VOCAB, Driver, executor_config
from tests.inflight.mirror import Mirror
from tests.inflight.paces import WhenTold
from tokenflow.executor.api import FinishReason
from tokenflow.inflight.scripted_runner import ScriptedRunner
from tokenflow.inflight.scripts import expected, pseudo_random

SCRIPT = pseudo_random(VOCAB)
ORDERLY = "Encountered an error in forward function: planned"


class FailingRunner(ScriptedRunner):
    """Fails on demand, before or after its blocks were written."""

    fail_after_writing: bool | None = None

    def forward(self, chunks):
        if self.fail_after_writing is False:
            raise RuntimeError("planned")
        output = super().forward(chunks)
        if self.fail_after_writing:
            raise RuntimeError("planned")
        return output


class Interleavings(RuleBasedStateMachine):
    kv_tiering = False
    host_sizes = st.just(0)

    @initialize(
        data=st.data(),
        num_blocks=st.integers(6, 14),
        tokens_per_block=st.sampled_from([1, 3, 4]),
        max_batch_size=st.integers(1, 4),
        max_num_tokens=st.integers(4, 16),
        policy=st.sampled_from([GUARANTEED, MAX_UTILIZATION]),
        chunked=st.booleans(),
        partial=st.booleans(),
        copies=st.booleans(),
    )
    def build(self, data, policy, partial, copies, **limits):
        config = executor_config(
            policy=policy,
            max_seq_len=64,
            enable_partial_reuse=partial,
            copy_on_partial_reuse=copies,
            num_host_blocks=data.draw(self.host_sizes),
            kv_tiering=self.kv_tiering,
            max_blocks_in_flight=data.draw(st.sampled_from([1, 3, 100])),
            event_buffer_max_size=10_000,
            **limits,
        )
        self.link_fails = False
        self.pace = WhenTold(lambda transfer: "planned" if self.link_fails else None)
        self.driver = Driver(config, runner=FailingRunner(SCRIPT, VOCAB, pace=self.pace))
        self.mirror = Mirror()
        self.requests = {}
        self.cancelled = set()
        self.failed = set()

    def enqueue_now(self, prompt, max_tokens, **fields):
        request_id = self.driver.enqueue(prompt, max_tokens, **fields)
        self.requests[request_id] = (prompt, max_tokens, fields)
        return request_id

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=12),
        max_tokens=st.integers(1, 12),
        priority=st.sampled_from([0.5, 0.5, 0.1, 0.9]),
        cache_salt_id=st.sampled_from([None, None, 1]),
    )
    def enqueue(self, prompt, max_tokens, **fields):
        self.enqueue_now(prompt, max_tokens, **fields)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def resume_a_cancelled_one(self, data):
        """The way pauses work: prompt and what was streamed, with the tokens that are left."""
        ids = [
            i
            for i in self.cancelled
            if self.driver.outputs[i].reason is FinishReason.CANCELLED
            and self.driver.outputs[i].token_ids
        ]
        if ids:
            request_id = data.draw(st.sampled_from(sorted(ids)))
            prompt, max_tokens, fields = self.requests[request_id]
            streamed = self.driver.outputs[request_id].token_ids
            self.enqueue_now(prompt + streamed, max_tokens - len(streamed), **fields)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), swap=st.booleans())
    def cancel(self, data, swap):
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        self.cancelled.add(request_id)
        self.driver.cancel(request_id)

    @rule()
    def step(self):
        self.driver.step()

    @rule(data=st.data())
    def step_with_a_cancel_in_flight(self, data):
        self.driver.step(lambda: self.requests and self.cancel(data, False))

    @rule(after_writing=st.booleans())
    def step_that_fails(self, after_writing):
        self.driver.runner.fail_after_writing = after_writing
        self.driver.step()
        self.driver.runner.fail_after_writing = None

    @invariant()
    def events_give_the_cache(self):
        if not hasattr(self, "driver"):
            return
        kv = self.driver.batcher.kv
        kv.flush_events()
        self.mirror.replay(kv.events.get_latest_events(0))
        self.mirror.check(kv)

    @invariant()
    def outputs_are_beginnings_of_the_script(self):
        for request_id, (prompt, max_tokens, _) in getattr(self, "requests", {}).items():
            output = self.driver.outputs[request_id]
            count = len(output.token_ids)
            assert (output.token_ids, output.log_probs) == expected(SCRIPT, prompt, count)
            if output.reason is FinishReason.CANCELLED:
                assert request_id in self.cancelled
            elif output.reason is not None:
                assert output.reason is FinishReason.LENGTH
                assert count == max_tokens
            if output.error is not None:
                assert output.error == ORDERLY or "fetching new request" in output.error

    def teardown(self):
        if not hasattr(self, "driver"):
            return
        self.driver.run()
        self.pace.complete_all()
        self.driver.batcher.poll(self.driver.now)
        self.driver.batcher.check_integrity()
        self.outputs_are_beginnings_of_the_script()
        self.events_give_the_cache()
        assert not self.driver.batcher.kv.has_flights
        assert self.driver.runner.transport.num_under_way == 0
        assert all(self.driver.outputs[i].final is not None for i in self.requests)
        assert self.driver.batcher.kv.num_used_blocks == 0
        assert self.driver.runner.num_requests == 0
        assert not self.driver.batcher._queue._live_ids


class TwoTiers(Interleavings):
    host_sizes = st.integers(1, 8)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), num_kept=st.integers(0, 12), num_steps=st.integers(0, 6))
    def come_back(self, data, num_kept, num_steps):
        """The next turn of some request: what it was, and some of what it got."""
        self.come_back_now(data, num_kept)
        for _ in range(num_steps):
            self.driver.step()

    def come_back_now(self, data, num_kept):
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        prompt, _, fields = self.requests[request_id]
        streamed = self.driver.outputs[request_id].token_ids[:num_kept]
        self.enqueue_now([*prompt, *streamed][:20], 4, **fields)

    @rule()
    def step_whose_copies_fail(self):
        self.link_fails = True
        self.driver.step()
        self.link_fails = False

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def come_back_from_the_host_in_vain(self, data):
        """Other traffic first, so that there is something to bring back; then it does not come."""
        num_tokens = 4 * self.driver.batcher.kv.num_total_blocks
        self.enqueue_now([2] * min(num_tokens, 40), 1, cache_salt_id=7)
        self.driver.run()
        self.come_back_now(data, 12)
        self.step_whose_copies_fail()


class DrivenTiers(TwoTiers):
    kv_tiering = True

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), more=st.integers(0, 5))
    def kv_command(self, data, more):
        """For what some request is or was, at any moment; then most often a step."""
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        prompt, _, fields = self.requests[request_id]
        token_ids = [*prompt, *self.driver.outputs[request_id].token_ids, *[0] * more]
        salt, tiering = fields["cache_salt_id"], self.driver.tiering
        kind = data.draw(st.sampled_from(["offload", "offload", "prefetch", "prefetch", "drop"]))
        if kind == "offload":
            tiering.offload(token_ids, data.draw(st.integers(1, 5)), salt)
        elif kind == "prefetch":
            tiering.prefetch(token_ids, salt)
        else:
            tiering.drop_host(token_ids, salt)

    @rule(data=st.data(), fails=st.sampled_from([False, False, True]))
    def end_of_a_copy(self, data, fails):
        if self.pace.pending:
            which = data.draw(st.integers(0, len(self.pace.pending) - 1))
            (self.pace.fail if fails else self.pace.complete)(which)


SETTINGS = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = SETTINGS
TestInterleavingsOfTwoTiers = TwoTiers.TestCase
TestInterleavingsOfTwoTiers.settings = SETTINGS
TestInterleavingsOfDrivenTiers = DrivenTiers.TestCase
TestInterleavingsOfDrivenTiers.settings = SETTINGS
