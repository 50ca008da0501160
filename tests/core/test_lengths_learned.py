"""Which ends of sessions the planner learns answers' lengths from."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.core.harness import CONFIG, ChosenPlanner, Harness
from tokenflow.errors import ConfigError
from tokenflow.inflight.scripts import expected
from tokenflow.types import Decision, LengthEstimate, Snapshot

PROMPT = (5, 6, 7, 8, 9)


class Looking(ChosenPlanner):
    """Keeps what the last snapshot said of lengths."""

    lengths: LengthEstimate | None = None

    def __call__(self, snapshot: Snapshot) -> Decision:
        self.lengths = snapshot.lengths
        return super().__call__(snapshot)


def served(**changes: object) -> tuple[Harness, Looking]:
    config = replace(CONFIG, **changes)  # type: ignore[arg-type]
    looking = Looking(config.max_batch_size)
    return Harness(config, planner=looking), looking


def stop(h: Harness, prompt: tuple[int, ...], num_tokens: int) -> None:
    """An answer that ends by itself after so many tokens."""
    token_ids, _ = expected(h.script, prompt, num_tokens + 1)
    assert token_ids.index(token_ids[-1]) == num_tokens, "it would end before"
    handle = h.submit(prompt, 40, end_id=token_ids[-1])
    h.run_to_empty()
    assert len(h.tokens_of(handle)) == num_tokens


def look(h: Harness, looking: Looking) -> LengthEstimate | None:
    """What a plan sees while nobody generates."""
    looking.hold = True
    handle = h.submit(PROMPT, 4)
    h.plan()
    h.coordinator.cancel(handle, h.now)
    looking.hold = False
    h.run_to_empty()
    return looking.lengths


def test_ends_by_themselves_are_learned_from() -> None:
    h, looking = served()
    assert look(h, looking) is None
    stop(h, PROMPT, 7)
    estimate = look(h, looking)
    assert estimate is not None
    assert estimate.survival.tolist() == [1] * 7 + [0.8]  # 1 of 1 and the 4 that never end


def test_a_stop_string_in_the_text_is_such_an_end() -> None:
    h, looking = served()
    handle = h.submit(PROMPT, 40)
    while len(h.tokens_of(handle)) < 5:
        h.step()
    h.coordinator.finish(handle, h.now)
    h.plan()
    estimate = looking.lengths
    assert estimate is not None
    # Once, though the engine has to let go of it.
    assert estimate.survival.tolist() == [1] * 5 + [0.8]


def test_limits_and_clients_that_leave_only_say_that_it_was_longer() -> None:
    h, looking = served()
    h.submit(PROMPT, 9)
    h.run_to_empty()
    left = h.submit((3, 2, 1), 40)
    while len(h.tokens_of(left)) < 8:
        h.step()
    h.coordinator.cancel(left, h.now)
    h.run_to_empty()
    assert look(h, looking) is None
    stop(h, PROMPT, 7)
    estimate = look(h, looking)
    assert estimate is not None
    np.testing.assert_allclose(estimate.survival, [1] * 7 + [6 / 7])  # 1 of 3 and the 4


def test_those_that_go_on_count_too() -> None:
    h, looking = served()
    goes_on = h.submit((3, 2, 1), 40)
    while len(h.tokens_of(goes_on)) < 20:
        h.step()
    token_ids, _ = expected(h.script, PROMPT, 8)
    other = h.submit(PROMPT, 40, end_id=token_ids[-1])
    while h.end_of(other) is None:
        h.step()
    h.step()
    estimate = looking.lengths
    assert estimate is not None
    np.testing.assert_allclose(estimate.survival, [1] * 7 + [5 / 6])  # 1 of 2 and the 4
    h.run_to_empty()


def test_nothing_is_learned_where_that_is_turned_off() -> None:
    h, looking = served(learn_output_lengths=False)
    stop(h, PROMPT, 7)
    assert look(h, looking) is None


def test_nobody_is_let_in_by_lengths_that_are_not_learned() -> None:
    with pytest.raises(ConfigError, match="needs learn_output_lengths") as error:
        replace(CONFIG, admit_by_expected_lengths=True, learn_output_lengths=False)
    assert error.value.args[0].startswith("admit_by_expected_lengths")
