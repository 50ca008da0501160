"""Stop strings on text.

Owns the text of one stream that may still become part of a stop string. Invariants: no character of
a stop string that ends the stream is ever released; a character is held only while it belongs to a
live prefix of a stop string; the result does not depend on how the text was cut into deltas.

The stop string that is complete first wins; of those complete at the same character, the one that
starts first. Matching text, not ids, finds stops inside merged tokens; it looks at generated text
only, never at the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches one stream's text. `stops` are non-empty strings; `matched` is set once."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Text that may be shown now. After a match everything else is swallowed."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        hit = self._first_match(text)
        if hit is not None:
            start, self.matched = hit
            self._held = ""
            return text[:start]
        cut = len(text) - self._num_held(text)
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """The held text, at the end of a stream without a match."""
        text, self._held = self._held, ""
        return text

    def _first_match(self, text: str) -> tuple[int, str] | None:
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0:
                candidate = (start + len(stop), start, stop)
                best = candidate if best is None else min(best, candidate)
        return None if best is None else (best[1], best[2])

    def _num_held(self, text: str) -> int:
        """Length of the longest suffix of `text` that is a proper prefix of a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
