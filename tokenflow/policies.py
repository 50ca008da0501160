"""Policies: frozen values that `scheduler.plan` is given.

Owns the knobs, their defaults and bounds, and the ranking formula. A policy holds no state and
reads nothing; two policies side by side are two values.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from dataclasses import dataclass

import numpy as np

from tokenflow.config import ServingConfig
from tokenflow.errors import ConfigError
from tokenflow.types import BoolArray, FloatArray

_MAX_RANKED_SLACK_S = 1e6
"""Slack beyond this (no reader at all: infinite) ranks alike, so that P stays finite."""


class WaitForm(enum.Enum):
    """How waiting enters the priority."""

    AGEING = "ageing"
    """w = wait: rises with the wait, nobody is overtaken for ever."""
    FALLING = "falling"
    """w = 1 / (wait + slack floor): falls with the wait; kept so that it can be measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenflowPolicy:
    """Slack-priority scheduling with pause and resume.

    conservativeness: κ >= 1, multiple of a round trip that slack must cover (section 4.2.1).
    slack_margin_s: ε, added to every slack threshold.
    slack_floor_s: δ > 0, slack below it ranks alike.
    wait_weight, wait_form: λ and the form of w. unstarted_bonus: μ.
    priority_shift: what a request priority of 1 gains over 0, in units of P.
    load_limit: ρ, share of the time until any instant that the engine may take to make what readers
        need by then, with a newcomer.
    load_by_expectation: that account goes by how long answers are expected to be, not by how long
        they may be: newcomers start sooner, and where answers turn out to be longer than they used
        to be, readers stall.
    bridge_margins: of what readers have unread, so many times the slack that a pause needs stays
        out of that account: under a lasting load, streams whose readers have read everything cannot
        take turns.
    turn_share: of its output, what a stream that takes turns is given at a time, from which the
        cost of bringing it back is foreseen; more admits more and, beyond what is real, ends in
        thrashing.
    recompute_share: share of the time until a paused stream is due that recomputing may take, its
        own and that of all who are due before it; nobody else is paused for a newcomer beyond that.
    min_quantum_s: time in the engine before a stream is paused for a newcomer or for balance.
    max_bypass_s, max_passes: others may overtake a newcomer that does not fit until it has waited
        so long; at most so many are passed over in one plan.
    max_machine_pause_s, max_machine_pauses: a stream without a reader is due again after so long,
        and yields at most so often, but to a reader that would stall: its paused time is bounded
        by the product, while nobody else's reading depends on it and somebody else may yield. If
        nobody may, it waits for the first of those in the engine to end.
    low_share, high_share, worthless_share: unread tokens as a share of the request's output. At
        a reschedule a stream at or above high yields to one under low that is read out within
        low_slack_s; where readers take a share of what the engine makes, within that share of it,
        because then whoever is low is soon ahead again. A token produced at high is worth 1 and at
        worthless 0, linearly (effective throughput, section 7.1.3).
    max_excess_load: where readers take no more of what the engine makes than this share, a stream
        between high and worthless yields to one that is farther ahead.
    tail_share: what is left of the engine beyond what readers need goes to those with most
        generated tokens: finish a few, do not lift all (section 7.1.3). But a stream that alone
        would take more than this share of the time in which all that is left can be done comes
        first, or it would run alone in the end. 0: always the longest first.
    max_arrival_gaps: nobody will run alone as long as others keep coming, that is, until so many
        mean gaps between arrivals have passed without one.
    min_exchange_gain: tokens' worth gained, per token of round trip, that an exchange must bring.
    link_share: share of the link between the tiers that streams taking turns may use: where a
        pause moves KV, a stream runs, and can be away, as long as moving the whole pool takes at
        that share; if a reader would stall, both together. turn_link_share: the share at which
        they must be able to go on: so long are the turns with which it is foreseen whether all can
        be brought back in time.
    turn_recompute_share: as both, of the engine's time, where a pause loses KV: a turn is as long
        as computing again what those in the engine hold takes at that share.
    anticipate: in a burst, keep room for the arrivals that their averages announce.
    write_through: copy KV to the host while its stream still runs (KvTiering).
    write_through_fill: share of the pool that streams fill, from which that is worth while; in a
        burst it always is. write_through_share: share of the time that those copies may take.
    prefetch: bring KV back to the device before its stream is due (KvTiering).
    """

    conservativeness: float = 1.5
    slack_margin_s: float = 0.5
    slack_floor_s: float = 0.1
    wait_weight: float = 0.2
    wait_form: WaitForm = WaitForm.AGEING
    unstarted_bonus: float = 2.0
    priority_shift: float = 4.0
    load_limit: float = 0.9
    load_by_expectation: bool = False
    bridge_margins: float = 6.0
    turn_share: float = 0.08
    recompute_share: float = 0.08
    min_quantum_s: float = 1.0
    max_bypass_s: float = 2.0
    max_passes: int = 16
    max_machine_pause_s: float = 10.0
    max_machine_pauses: int = 4
    low_share: float = 0.06
    low_slack_s: float = 13.0
    high_share: float = 0.10
    worthless_share: float = 0.20
    max_excess_load: float = 0.5
    min_exchange_gain: float = 3.0
    tail_share: float = 0.5
    max_arrival_gaps: float = 5.0
    link_share: float = 0.35
    turn_link_share: float = 0.1
    turn_recompute_share: float = 0.8
    anticipate: bool = True
    write_through: bool = True
    write_through_fill: float = 0.7
    write_through_share: float = 0.5
    prefetch: bool = True

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if not isinstance(value, enum.Enum) and not (0 <= value < float("inf")):
                raise ConfigError(f.name, f"must be finite and >= 0, got {value!r}")
        if self.conservativeness < 1:
            raise ConfigError("conservativeness", f"must be >= 1, got {self.conservativeness!r}")
        if self.slack_floor_s <= 0:
            raise ConfigError("slack_floor_s", "must be > 0")
        if not self.low_share <= self.high_share < self.worthless_share:
            raise ConfigError("high_share", "low_share <= high_share < worthless_share must hold")
        for name in ("link_share", "turn_recompute_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(name, f"must be in (0, 1], got {getattr(self, name)!r}")
        if not 0 < self.turn_link_share <= self.link_share:
            raise ConfigError(
                "turn_link_share", f"must be in (0, link_share], got {self.turn_link_share!r}"
            )


@dataclass(frozen=True, slots=True)
class FcfsReservePolicy:
    """Run to completion, first come first served: a stock Triton deployment.

    Everything is handed to the engine as it arrives; the engine's own queue holds what does not
    fit; nothing is ever paused. The main baseline.
    """


Policy = TokenflowPolicy | FcfsReservePolicy


def rank(
    policy: TokenflowPolicy,
    slack_s: FloatArray,
    wait_s: FloatArray,
    started: BoolArray,
    priority: FloatArray,
) -> FloatArray:
    """P_i = −ln(max(S_i, δ)) + λ·w(wait_i) + μ·1[not started] + class shift; all shapes [n].

    P only orders: it is negative for S > 1 s and is never summed. Slack is not looked at where
    `started` is False.
    """
    if policy.wait_form is WaitForm.AGEING:
        waiting = wait_s
    else:
        waiting = 1.0 / (wait_s + policy.slack_floor_s)
    p: FloatArray = policy.wait_weight * waiting
    num_started = np.count_nonzero(started)
    if not num_started:
        p += policy.unstarted_bonus - math.log(max(1.0, policy.slack_floor_s))
    else:
        slack = np.minimum(np.maximum(slack_s, policy.slack_floor_s), _MAX_RANKED_SLACK_S)
        if num_started == len(started):
            p = p - np.log(slack)
        else:
            slack = np.where(started, slack, max(1.0, policy.slack_floor_s))
            p = p - np.log(slack) + np.where(started, 0.0, policy.unstarted_bonus)
    p += policy.priority_shift * priority
    return p


def policy_from_config(config: ServingConfig) -> Policy:
    """The policy that `scheduling_policy` names, with the configured margins."""
    if config.scheduling_policy == "fcfs-reserve":
        return FcfsReservePolicy()
    if config.scheduling_policy == "tokenflow":
        return TokenflowPolicy(
            conservativeness=config.conservativeness,
            slack_margin_s=config.slack_margin_s,
            min_quantum_s=config.min_quantum_s,
            anticipate=config.anticipate_arrivals,
            load_by_expectation=config.admit_by_expected_lengths,
        )
    raise ConfigError("scheduling_policy", f"no such policy: {config.scheduling_policy!r}")
