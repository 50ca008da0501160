"""When copies between the tiers of the scripted runner complete: see `CopyPace`."""

from __future__ import annotations

from collections.abc import Callable

from tokenflow.inflight.runner import CopyDirection
from tokenflow.inflight.scripted_transport import ScriptedTransfer

Verdict = Callable[[ScriptedTransfer], str | None]
"""Why a transfer fails, or None."""


def never_fails(transfer: ScriptedTransfer) -> str | None:
    return None


class WhenTold:
    """Transfers complete when the test says so; one that is waited for, at that moment.

    num_waits: how often somebody had to wait.
    """

    def __init__(self, verdict: Verdict = never_fails) -> None:
        self._verdict = verdict
        self._transfers: list[ScriptedTransfer] = []
        self.num_waits = 0

    @property
    def pending(self) -> list[ScriptedTransfer]:
        """Not over, in the order of their start."""
        self._transfers = [t for t in self._transfers if not t.is_over]
        return list(self._transfers)

    def start(self, transfer: ScriptedTransfer) -> None:
        self._transfers.append(transfer)

    def poll(self) -> None:
        pass

    def wait(self, transfer: ScriptedTransfer) -> float:
        self.num_waits += 1
        transfer.finish(error=self._verdict(transfer))
        return 0.0

    def complete(self, which: int = 0) -> None:
        """What `which` needs first is completed too."""
        self.pending[which].finish()

    def fail(self, which: int = 0, error: str = "planned") -> None:
        self.pending[which].finish(error=error)

    def complete_all(self) -> None:
        for transfer in self.pending:
            transfer.finish()


class Timed:
    """Each transfer takes `block_s` for each block, one after the other in each direction.

    now: current instant. sleep: lets time pass, for those who wait. waited_s: how long they did.
    """

    def __init__(
        self,
        now: Callable[[], float],
        sleep: Callable[[float], object],
        block_s: float,
        verdict: Verdict = never_fails,
    ) -> None:
        self._now = now
        self._sleep = sleep
        self._block_s = block_s
        self._verdict = verdict
        self._free_time = dict.fromkeys(CopyDirection, 0.0)
        self._done_times: dict[ScriptedTransfer, float] = {}
        self.num_started = dict.fromkeys(CopyDirection, 0)
        self.waited_s = 0.0

    def start(self, transfer: ScriptedTransfer) -> None:
        times = [self._done_times.get(other, 0.0) for other in transfer.earlier]
        begin = max(self._now(), self._free_time[transfer.direction], *times)
        done_time = begin + self._block_s * len(transfer.copies)
        self._free_time[transfer.direction] = self._done_times[transfer] = done_time
        self.num_started[transfer.direction] += 1

    def poll(self) -> None:
        for transfer, done_time in list(self._done_times.items()):
            if done_time <= self._now():
                self._finish(transfer)

    def wait(self, transfer: ScriptedTransfer) -> float:
        seconds = max(0.0, self._done_times[transfer] - self._now())
        self.waited_s += seconds
        self._sleep(seconds)
        for other in transfer.earlier:
            self._finish(other)
        self._finish(transfer)
        return seconds

    def _finish(self, transfer: ScriptedTransfer) -> None:
        self._done_times.pop(transfer, None)
        transfer.finish(self._block_s * len(transfer.copies), self._verdict(transfer))


class FailsSometimes:
    """At once, or failed: `verdict` is asked for each transfer."""

    def __init__(self, verdict: Verdict) -> None:
        self._verdict = verdict

    def start(self, transfer: ScriptedTransfer) -> None:
        transfer.finish(error=self._verdict(transfer))

    def poll(self) -> None:
        pass

    def wait(self, transfer: ScriptedTransfer) -> float:
        raise AssertionError("a transfer that is over was waited for")
