"""A tracer that remembers."""

from __future__ import annotations

from typing import Any


class ListTracer:
    """Keeps events in memory, in order: (event, time, fields)."""

    def __init__(self) -> None:
        self.events: list[tuple[str, float, dict[str, Any]]] = []

    def record(self, event: str, time: float, **fields: Any) -> None:
        self.events.append((event, time, fields))

    def flush(self) -> None:
        pass

    def named(self, event: str) -> list[dict[str, Any]]:
        """Fields of all events of one name, each with its time."""
        return [{"time": t, **fields} for name, t, fields in self.events if name == event]
