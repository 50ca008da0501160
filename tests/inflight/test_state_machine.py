"""Any interleaving of requests, cancels, steps and failures, on content-checked blocks.

The scripted runner reads every history back from the blocks it is given and checks fingerprints, so
a wrong, stale or shared-by-mistake block ends in an error or a wrong token, which the model here
(each request's output is a beginning of what its script says) does not accept.
"""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.inflight.helpers import GUARANTEED, MAX_UTILIZATION, VOCAB, Driver, executor_config
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
    @initialize(
        num_blocks=st.integers(6, 14),
        tokens_per_block=st.sampled_from([1, 3, 4]),
        max_batch_size=st.integers(1, 4),
        max_num_tokens=st.integers(4, 16),
        policy=st.sampled_from([GUARANTEED, MAX_UTILIZATION]),
        chunked=st.booleans(),
        partial=st.booleans(),
        copies=st.booleans(),
    )
    def build(self, policy, partial, copies, **limits):
        config = executor_config(
            policy=policy,
            max_seq_len=64,
            enable_partial_reuse=partial,
            copy_on_partial_reuse=copies,
            **limits,
        )
        self.driver = Driver(config, runner=FailingRunner(SCRIPT, VOCAB))
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
        self.outputs_are_beginnings_of_the_script()
        assert all(self.driver.outputs[i].final is not None for i in self.requests)
        assert self.driver.batcher.kv.num_used_blocks == 0
        assert self.driver.runner.num_requests == 0
        assert not self.driver.batcher._live_ids


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
