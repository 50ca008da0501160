"""The rules of the default policy, and for each a way to do without it.

Owns the table of rules. A rule is kept only if its removal costs something: `perf.rules` runs the
policy as it is and every variant of this table, and says what each lost or gained. Invariants: a
variant differs from the default in the named values alone; every value of TokenflowPolicy is
changed by one of them.

Rules that are no value of a policy are not in the table, because nothing turns them off: that
nobody is paused in prefill, that no more victims are taken than needed, that nobody is paused
without a way back, that requests of a kind that is never paused hold at most half, what prefill may
be under way at once, and that room which nobody else can use goes to newcomers beyond Γ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from perf.lab.rule_setups import OWN
from perf.lab.runs import Cell, Changes
from perf.lab.setups import Setup
from tokenflow.config import ServingConfig
from tokenflow.policies import TokenflowPolicy, WaitForm

_DEFAULT = TokenflowPolicy()
_NEVER = 1e6
"""A limit that nothing reaches."""

TIERING = "tokenflow-tiering"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """The default policy without one of its rules, or with another value for it.

    name: for the command line. rule: what the default does. instead: what this one does. changes:
    from the default; see runs.Changes. policy: the row that is changed. own: the set-up of OWN
    that was made to show its worth, if any; on that one nothing else is tried.
    """

    name: str
    rule: str
    instead: str
    changes: Changes
    policy: str = "tokenflow"
    own: str = ""

    @property
    def label(self) -> str:
        """What records call it."""
        return Cell(
            setup=next(iter(OWN.values())), policy=self.policy, seed=0, changes=self.changes
        ).label


def find(names: Sequence[str]) -> list[Variant]:
    """The variants of these names. Raises ValueError that lists what there is."""
    known = {variant.name: variant for variant in VARIANTS}
    for name in names:
        if name not in known:
            raise ValueError(f"no rule named {name!r}; there are {', '.join(known)}")
    return [known[name] for name in names]


def tried_on(setup: Setup, variants: Sequence[Variant]) -> list[Variant]:
    """Those of `variants` that are run on `setup`: on a set-up of OWN those that it was made for,
    on one without host memory none that moves KV there."""
    if setup.name in OWN:
        return [variant for variant in variants if setup.name == variant.own]
    return [v for v in variants if setup.host_bytes or v.policy != TIERING]


def cells(chosen: Sequence[Setup], variants: Sequence[Variant], seeds: Sequence[int]) -> list[Cell]:
    """What is run: on each set-up, once, the policies as they are and the variants, with each seed.

    Raises ValueError if nothing is.
    """
    found = []
    for setup in dict.fromkeys(chosen):
        tried = tried_on(setup, variants)
        defaults: list[tuple[str, Changes]] = [
            (policy, ()) for policy in dict.fromkeys(variant.policy for variant in tried)
        ]
        for policy, changes in [*defaults, *((v.policy, v.changes) for v in tried)]:
            found += [Cell(setup=setup, policy=policy, seed=s, changes=changes) for s in seeds]
    if not found:
        raise ValueError("no rule is tried on any of these set-ups")
    return found


def _variants(
    rule: str, *others: tuple[str, str, Mapping[str, object]], own: str = ""
) -> list[Variant]:
    """(name, instead, changes) of each variant of one rule."""
    return [
        Variant(
            name=name,
            rule=rule,
            instead=instead,
            changes=tuple(changes.items()),
            own=own,
        )
        for name, instead, changes in others
    ]


VARIANTS: tuple[Variant, ...] = (
    # Order.
    *_variants(
        "who has less slack comes first",
        ("no-slack-order", "slack does not rank", {"slack_floor_s": _NEVER}),
    ),
    *_variants(
        "who waited longer comes first",
        ("no-ageing", "waiting does not rank", {"wait_weight": 0.0}),
        ("falling-wait", "the guide's 1 / (wait + δ)", {"wait_form": WaitForm.FALLING}),
    ),
    *_variants("newcomers get a bonus", ("no-unstarted-bonus", "none", {"unstarted_bonus": 0.0})),
    *_variants(
        "classes shift the priority",
        ("no-classes", "no classes", {"priority_shift": 0.0}),
        own="classes",
    ),
    *_variants(
        "newcomers that do not fit are passed over for a time",
        ("no-passing", "nobody is", {"max_bypass_s": 0.0, "max_passes": 0}),
        ("any-passing", "without end", {"max_bypass_s": _NEVER, "max_passes": int(_NEVER)}),
    ),
    # Who may be paused.
    *_variants(
        f"slack must cover {_DEFAULT.conservativeness:g} round trips",
        ("conservativeness-1", "one", {"conservativeness": 1.0}),
        ("conservativeness-20", "the paper's 20", {"conservativeness": 20.0}),
    ),
    *_variants(
        f"beyond them {_DEFAULT.slack_margin_s:g} s of slack are kept",
        ("no-margin", "none", {"slack_margin_s": 0.0}),
    ),
    *_variants(
        f"a stream runs {_DEFAULT.min_quantum_s:g} s before it yields",
        ("no-quantum", "no such time", {"min_quantum_s": 0.0}),
    ),
    *_variants(
        f"taking turns uses {_DEFAULT.link_share:g} of the link",
        ("whole-link", "all of it", {"link_share": 1.0}),
        ("whole-link-no-quantum", "all, no quantum", {"link_share": 1.0, "min_quantum_s": 0.0}),
    ),
    *_variants(
        f"it is foreseen to use {_DEFAULT.turn_link_share:g} of it, if it lasts",
        ("short-turns-foreseen", "as much as it may", {"turn_link_share": _DEFAULT.link_share}),
    ),
    *_variants(
        f"computing lost KV again uses {_DEFAULT.turn_recompute_share:g} of the engine in turns",
        ("short-turns-recompute", "all of it", {"turn_recompute_share": 1.0}),
    ),
    *_variants(
        f"recomputing takes at most {_DEFAULT.recompute_share:g} of the time until a stream is due",
        ("recompute-unforeseen", "as long as it takes", {"recompute_share": _NEVER}),
        ("no-recompute", "nothing is recomputed for a newcomer", {"recompute_share": 0.0}),
    ),
    # Who is admitted.
    *_variants(
        f"what readers need by any instant takes at most {_DEFAULT.load_limit:g} of the time",
        ("no-admission-test", "no test", {"load_limit": _NEVER}),
        ("whole-capacity", "all of it", {"load_limit": 1.0}),
    ),
    *_variants(
        "unread text bridges a rush",
        ("no-bridging", "it does not", {"bridge_margins": _NEVER}),
        own="late-burst",
    ),
    *_variants(
        f"the last {_DEFAULT.bridge_margins:g} margins of unread text bridge nothing",
        ("all-bridges", "all bridges", {"bridge_margins": 0.0}),
    ),
    *_variants(
        "Γ knows what taking turns costs",
        ("turns-unforeseen", "turns of whole answers", {"turn_share": _NEVER}),
    ),
    # Who gets what is left.
    *_variants(
        "excess to the most generated, but for long tails",
        ("excess-longest", "to the longest remaining", {"tail_share": 0.0}),
        ("excess-most-generated", "always to the most generated", {"tail_share": _NEVER}),
    ),
    *_variants(
        "there are no tails as long as others keep coming",
        ("tails-always", "there are", {"max_arrival_gaps": 0.0}),
        own="steady",
    ),
    *_variants(
        "excess goes by how long answers are expected to be, the load by how long they may be",
        ("limits-for-lengths", "both by what may be", {"learn_output_lengths": False}),
        ("expected-in-load", "both by what is expected", {"load_by_expectation": True}),
        own="short-answers",
    ),
    *_variants(
        "readers with little unread get free room first",
        ("nobody-low", "nobody counts as low", {"low_share": 0.0}),
    ),
    *_variants(
        f"nobody counts as low who is not read out within {_DEFAULT.low_slack_s:g} s at full load",
        ("low-by-share", "by share of the answer alone", {"low_slack_s": _NEVER}),
    ),
    *_variants(
        "who is far ahead yields to who is low",
        ("no-exchanges", "nobody does", {"min_exchange_gain": 1e9}),
        ("any-exchange", "for any gain", {"min_exchange_gain": 0.0}),
        ("no-gap", "low begins where high does", {"low_share": _DEFAULT.high_share}),
    ),
    *_variants(
        "what is made in excess goes to those farthest ahead",
        ("no-excess-exchanges", "it goes to whoever runs", {"max_excess_load": 0.0}),
        ("excess-always", "so it does under any load", {"max_excess_load": _NEVER}),
    ),
    *_variants(
        "what is unread loses its worth by and by",
        ("worth-at-once", "all at once", {"worthless_share": _DEFAULT.high_share + 1e-3}),
        ("high-later", "later", {"high_share": 0.15, "worthless_share": 0.25}),
    ),
    *_variants(
        "in a burst room is kept for arrivals",
        ("no-anticipation", "none is", {"anticipate": False}),
    ),
    # Without a reader.
    *_variants(
        f"machines are paused {_DEFAULT.max_machine_pauses} times, "
        f"{_DEFAULT.max_machine_pause_s:g} s each, at most",
        (
            "machines-unbounded",
            "without bound",
            {"max_machine_pause_s": _NEVER, "max_machine_pauses": int(_NEVER)},
        ),
        ("machines-unpaused", "never", {"max_machine_pauses": 0}),
        own="machine-crowd",
    ),
    # The engine's side.
    *_variants(
        "blocks of the paused are evicted last",
        ("no-retention", "as the engine likes", {"has_retention": False}),
    ),
    *_variants(
        "blocks are taken as they are filled",
        ("reservation", "reserved to the end", {"capacity_policy": "guaranteed_no_evict"}),
        (
            "lease-256",
            "reserved for 256 tokens",
            {"capacity_policy": "guaranteed_no_evict", "lease_tokens": 256},
        ),
    ),
    *_variants(
        f"a plan every {ServingConfig.plan_interval_s:g} s",
        *(
            (f"plan-{seconds:g}", f"every {seconds:g} s", {"plan_interval_s": seconds})
            for seconds in (0.01, 0.05, 0.2, 1.0)
            if seconds != ServingConfig.plan_interval_s
        ),
    ),
    # KvTiering.
    *(
        dataclasses.replace(variant, policy=TIERING)
        for variant in (
            *_variants(
                "KV is copied out while its stream runs",
                ("no-write-through", "it is not", {"write_through": False}),
            ),
            *_variants(
                f"only into a pool that is {_DEFAULT.write_through_fill:g} full",
                ("write-through-always", "always", {"write_through_fill": 0.0}),
            ),
            *_variants(
                f"for {_DEFAULT.write_through_share:g} of the time",
                ("write-through-unbounded", "all the time", {"write_through_share": 1.0}),
            ),
            *_variants(
                "KV is brought back before its stream is due",
                ("no-prefetch", "it is not", {"prefetch": False}),
            ),
        )
    ),
)
"""Every variant, in the order of tables."""
