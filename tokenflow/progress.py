"""Progress on stderr for work that takes a person's patience: download, conversion, load.

Owns what such a line looks like, for the command line and the benchmarks alike. Needs tqdm only.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType

from tqdm import tqdm


class StageBar:
    """A bar per stage; call it with (what is being done, fraction done in [0, 1]).

    Use as a context manager. Stages come one after the other; a finished one stays on the screen.
    """

    def __init__(self, subject: str) -> None:
        self._subject = subject
        self._bar: tqdm[None] | None = None
        self._stage = ""

    def __call__(self, stage: str, fraction: float) -> None:
        if stage != self._stage:
            self._close()
            self._stage = stage
            if fraction >= 1:
                return  # over before it began, nothing to watch
            self._bar = tqdm(
                total=100,
                desc=f"{self._subject}: {stage}",
                bar_format="{desc:<40} {percentage:3.0f}% |{bar:30}| {elapsed}",
                file=sys.stderr,
            )
        if self._bar is not None:
            self._bar.update(round(100 * fraction) - self._bar.n)

    def __enter__(self) -> StageBar:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class Waiting:
    """A line with the time that has passed, for work whose end is not known.

    Call it as often as you like; it draws itself twice a second on a terminal, and says what is
    waited for once where there is none.
    """

    _DRAW_S = 0.5

    def __init__(self, what: str) -> None:
        self._what = what
        self._start = self._drawn = time.monotonic()

    def __call__(self) -> None:
        now = time.monotonic()
        if sys.stderr.isatty() and now - self._drawn >= self._DRAW_S:
            self._drawn = now
            _write(f"\r{self._what} … {now - self._start:.0f} s")

    def __enter__(self) -> Waiting:
        _write(f"{self._what} …" + ("" if sys.stderr.isatty() else "\n"))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if sys.stderr.isatty():
            _write(f"\r{self._what} … {time.monotonic() - self._start:.0f} s\n")


def _write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
