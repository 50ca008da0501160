"""What the engine says, turned into progress of sessions.

Owns the way from responses and iteration statistics to states, tokens, counters and learned costs.
Runs in the coordinator's thread. Invariants: whatever the engine sends after a session had its end
is discarded; an error response is the request's own as long as the engine takes requests, and a
loss of the engine once it does not.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenflow.answers import Answers
from tokenflow.commands import EngineCommands
from tokenflow.costs import CostModel
from tokenflow.executor.api import FinishReason, IterationStats, Response, Result
from tokenflow.recovery import Recovery
from tokenflow.session import Session
from tokenflow.session_table import SessionTable
from tokenflow.tier_totals import TierTotals
from tokenflow.types import SessionState, end_reason
from tokenflow.whereabouts import KvWhereabouts

_S = SessionState
_STARTING = (_S.PREFILLING, _S.RESUMING)
_CUT_SHORT = (FinishReason.CANCELLED, FinishReason.TIMED_OUT)


class EngineFeedback:
    """Applies responses and statistics.

    num_free_blocks, num_queued: unreferenced device blocks, and requests in the engine's own queue,
        as of the last iteration.
    tiers: both KV tiers, as of the last iteration or the engine's start.
    """

    def __init__(
        self,
        commands: EngineCommands,
        table: SessionTable,
        answers: Answers,
        costs: CostModel,
        whereabouts: KvWhereabouts,
        recovery: Recovery,
        num_total_blocks: int,
    ) -> None:
        self._commands = commands
        self._table = table
        self._answers = answers
        self._counters = answers.counters
        self._costs = costs
        self._whereabouts = whereabouts
        self._recovery = recovery
        self._changed = False
        self._lease_ended_now: list[Session] = []
        self.num_queued = 0
        self.num_free_blocks = num_total_blocks
        self.tiers = TierTotals(answers.counters)

    def on_responses(self, responses: Sequence[Response], now: float) -> bool:
        """Take what the engine said, in order; True if there is a new situation to plan for."""
        self._changed = False
        session_of = self._table.by_executor_id
        for response in responses:
            session = session_of(response.request_id)
            if session is None:
                continue
            result = response.payload
            if result is None:
                self._on_error(session, response.error_msg, now)
            else:
                self._on_result(session, result, now)
        return self._changed

    def num_tokens_to_change(self, session: Session | None) -> int:
        """How many more tokens of a session are no new situation: no first one, none that is
        discarded, none at or right before its end."""
        if session is None or session.state not in (_S.RUNNING, _S.PAUSING):
            return 0
        end = session.lease_end or session.request.max_tokens
        return max(0, end - 2 - len(session.output_token_ids))

    def on_decoded(
        self, sessions: Sequence[Session], token_ids: Sequence[int], times: Sequence[float]
    ) -> None:
        """Each of `sessions` got `token_ids`, one at each of `times`, and for none of them it is
        more than `num_tokens_to_change`. The same as their responses, but that nobody is told."""
        for session in sessions:
            self._table.deliver_each(session, token_ids, times)
        self._counters.num_output_tokens += len(times) * len(sessions)

    def take_lease_ended(self) -> list[Session]:
        """Sessions whose lease ended since the last call."""
        sessions, self._lease_ended_now = self._lease_ended_now, []
        return sessions

    def on_engine_emptied(self, num_total_blocks: int) -> None:
        """Everything was taken from the engine, or it is gone: nothing is queued or in use."""
        self.num_queued, self.num_free_blocks = 0, num_total_blocks

    def on_stats(self, stats: Sequence[IterationStats], now: float) -> None:
        """Learn costs and room from finished iterations, and trace them."""
        self._whereabouts.hear()
        for entry in stats:
            self._costs.observe_iteration(entry)
            if entry.kv_tier_stats is not None:
                self.tiers.observe(entry.kv_tier_stats, now)
                self._whereabouts.set_num_host_blocks(entry.kv_tier_stats.num_host_blocks)
            batch = entry.inflight_batching_stats
            self._counters.num_internal_pauses += batch.num_paused_requests
            self.num_queued = entry.num_queued_requests
            self.num_free_blocks = entry.kv_cache_stats.free_num_blocks
            self._answers.trace_iteration(
                entry,
                num_waiting=self._table.count(_S.WAITING),
                num_preempted=self._table.count(_S.PREEMPTED),
            )

    def _on_error(self, session: Session, message: str, now: float) -> None:
        self._changed = True
        if not self._commands.takes_requests():
            self._recovery.lost(session, message, now)
            return
        if not session.answered and self._commands.adapters.can_send_again(session, message):
            self._start_again(session, now)
            return
        if not session.answered:
            self._answers.failed(session, message, now)
        self._table.transition(session, _S.FINISHED, now)

    def _start_again(self, session: Session, now: float) -> None:
        """The engine did nothing for the enqueue; the session is what it was before."""
        if session.state is _S.PREFILLING:
            self._table.transition(session, _S.WAITING, now)
            return
        self._table.transition(session, _S.PREEMPTED, now)
        self._whereabouts.paused(session)

    def _on_result(self, session: Session, result: Result, now: float) -> None:
        token_ids = result.output_token_ids[0] if result.output_token_ids else []
        if token_ids and session.answered:
            self._on_late_tokens(session, now)
        elif token_ids:
            self._on_tokens(session, token_ids, result, now)
            if not (result.is_final and self._ends(session, result)):
                self._answers.tokens(session, token_ids, result, now)
        if result.is_final:
            self._on_final(session, result, now)

    @staticmethod
    def _ends(session: Session, result: Result) -> bool:
        """True for the final response of a request that ends by itself."""
        if result.finish_reasons[0] in _CUT_SHORT:
            return False
        return not (result.finish_reasons[0] is FinishReason.LENGTH and session.at_lease_end)

    def _on_late_tokens(self, session: Session, now: float) -> None:
        if session.state in _STARTING:
            # A cancel that came before this first token after an enqueue, see Coordinator.
            self._table.transition(session, _S.CANCELLING, now)
            self._changed = True
            self._commands.cancel(session)

    def _on_tokens(
        self, session: Session, token_ids: list[int], result: Result, now: float
    ) -> None:
        first_ever = session.first_token_time is None
        if session.state in _STARTING:
            self._started(session, now)
        if result.log_probs:
            session.cum_log_prob += sum(result.log_probs[0])
        self._table.deliver(session, token_ids, now)
        self._counters.num_output_tokens += len(token_ids)
        end = session.lease_end or session.request.max_tokens
        if len(session.output_token_ids) == end - 1:
            self._changed = True  # it ends in the next step: its place can be given away now
        if first_ever:
            self._answers.first_token(session, now)

    def _started(self, session: Session, now: float) -> None:
        """First token after an enqueue: the session runs."""
        resumed = session.state is _S.RESUMING
        if resumed:  # before the transition forgets what there was to load
            self._costs.observe_resume(
                now - session.enqueue_time, session.num_resume_tokens, session.num_host_blocks
            )
        self._table.transition(session, _S.RUNNING, now)
        self._whereabouts.running(session)
        self._commands.adapters.answered(session)
        self._answers.trace("resumed" if resumed else "first_token", session, now)
        self._changed = True

    def _on_final(self, session: Session, result: Result, now: float) -> None:
        self._changed = True
        self._count_recomputed(session, result, now)
        reason = result.finish_reasons[0]
        self._whereabouts.released(session)
        if session.answered:
            self._table.transition(session, _S.FINISHED, now)
        elif reason is FinishReason.CANCELLED and session.state is _S.PAUSING:
            self._paused(session, now)
        elif reason in _CUT_SHORT:
            message = f"the engine ended the request ({reason.name.lower()})"
            self._answers.failed(session, message, now)
            self._table.transition(session, _S.FINISHED, now)
        elif not self._ends(session, result):
            self._lease_ended(session, now)
        else:
            token_ids = result.output_token_ids[0] if result.output_token_ids else []
            self._answers.tokens(session, token_ids, result, now, end_reason(reason))
            self._table.transition(session, _S.FINISHED, now)

    def _paused(self, session: Session, now: float) -> None:
        self._costs.observe_pause(now - session.last_transition_time)
        self._leave_in_cache(session, now)
        self._answers.trace("paused", session, now, slack_s=session.reader.slack_s(now))

    def _lease_ended(self, session: Session, now: float) -> None:
        """No token is lost; a plan decides at once who goes on."""
        self._counters.num_lease_ends += 1
        if session.state is _S.PAUSING:
            self._paused(session, now)
            return
        self._leave_in_cache(session, now)
        session.renews_lease = True
        self._lease_ended_now.append(session)

    def _leave_in_cache(self, session: Session, now: float) -> None:
        self._table.transition(session, _S.PREEMPTED, now)
        self._whereabouts.paused(session)
        session.is_left_in_cache = True

    def _count_recomputed(self, session: Session, result: Result, now: float) -> None:
        metrics = result.request_perf_metrics
        num_enqueued = session.num_enqueued_tokens
        if metrics is None or num_enqueued == len(session.request.input_token_ids):
            return
        num_recomputed = max(0, num_enqueued - 1 - metrics.num_reused_tokens)
        counters = self._counters
        counters.num_recomputed_tokens += num_recomputed
        if num_recomputed > 0:
            counters.num_resumes_recomputed += 1
            if session.is_left_in_cache:
                self.tiers.pushed_out(num_recomputed, now)
        elif metrics.num_onboarded_blocks > 0:
            counters.num_resumes_from_host += 1
        else:
            counters.num_resumes_from_cache += 1
