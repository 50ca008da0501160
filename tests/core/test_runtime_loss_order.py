"""The order of a loss: the runtime knows of it before the lost engine is released."""

from __future__ import annotations

import threading
import time

from tests.core.test_runtime import Sink
from tests.core.test_runtime_losses import Keeper, Kept
from tokenflow.executor.api import Executor
from tokenflow.types import TokenEvent


class ReleasingKeeper(Keeper):
    """Shuts the lost engine down before the next one starts, as the supervisor does."""

    def restart(self, reason: str, stop: threading.Event) -> Executor | None:
        self.executor.shutdown()
        return super().restart(reason, stop)


class SlowSink(Sink):
    """Holds the runtime's thread at the first token until it `may_go_on`."""

    def __init__(self) -> None:
        super().__init__()
        self.is_held = threading.Event()
        self.may_go_on = threading.Event()

    def __call__(self, event: TokenEvent) -> None:
        if event.token_ids and not self.may_go_on.is_set():
            self.is_held.set()
            assert self.may_go_on.wait(10.0)
        super().__call__(event)


def test_an_engine_is_not_released_before_the_runtime_knows_that_it_is_lost() -> None:
    sink = SlowSink()
    kept = Kept(keeper_type=ReleasingKeeper, sink=sink)
    keeper = kept.keeper
    handle = kept.submit((1,), 60)
    assert sink.is_held.wait(10.0)
    time.sleep(0.05)  # more responses wait in the inbox
    keeper.executor.die()
    time.sleep(0.2)
    assert not keeper.gone
    sink.may_go_on.set()
    kept.expect_whole(handle, (1,), 60)
    assert len(keeper.gone) == 1
    kept.close()
