"""Stop strings on text.

Owns the text of one stream that may still become part of a stop string. Invariants: no character of
a stop string that ends the stream is ever released; a character is held only while it belongs to a
live prefix of a stop string; the result does not depend on how the text was cut into deltas.

The stop string that is complete first wins; of those complete at the same character, the one that
starts first. Matching text, not ids, finds stops inside merged tokens; it looks at generated text
only, never at the prompt. Each character costs a few steps per stop string, whatever the strings
are (Knuth, Morris, Pratt).
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches one stream's text. `stops` are non-empty strings; `matched` is set once."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._prefixes = [_LivePrefix(stop) for stop in stops]
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Text that may be shown now. After a match everything else is swallowed."""
        if self.matched is not None:
            return ""
        if not self._prefixes:
            return text
        num_before = len(self._held)
        text = self._held + text
        for end, character in enumerate(text[num_before:], start=num_before + 1):
            complete = [p.stop for p in self._prefixes if p.feed(character)]
            if complete:
                self.matched = max(complete, key=len)
                self._held = ""
                return text[: end - len(self.matched)]
        cut = len(text) - max(p.length for p in self._prefixes)
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """The held text, at the end of a stream without a match."""
        text, self._held = self._held, ""
        return text


class _LivePrefix:
    """The longest prefix of one stop string with which the text ends; `length` of it."""

    __slots__ = ("_borders", "length", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0
        # Entry i: length of the longest proper prefix of stop[:i] that is its suffix too. Made as
        # far as it is needed: most streams never come near a stop string.
        self._borders = [0, 0]

    def feed(self, character: str) -> bool:
        """Take the next character; True when the stop string is complete."""
        stop, length = self.stop, self.length
        while length and stop[length] != character:
            length = self._border(length)
        if stop[length] == character:
            length += 1
        self.length = length
        return length == len(stop)

    def _border(self, length: int) -> int:
        stop, borders = self.stop, self._borders
        while len(borders) <= length:
            character, border = stop[len(borders) - 1], borders[-1]
            while border and stop[border] != character:
                border = borders[border]
            borders.append(border + 1 if stop[border] == character else 0)
        return borders[length]
