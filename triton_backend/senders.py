"""The sender thread: the only one that touches Triton's response objects and metric objects.

Owns every open answer. Invariants: responses of a request leave in the order of its tokens, from
this thread only; each request gets exactly one FINAL, on its last data response or its error, also
when its client has left, when answering it fails and at shutdown; a failure of one request touches
no other and never ends the thread.

All work comes through one queue. What has gathered there for one request while the thread was busy
goes out as one response: about 150 us of CPU per response is the server's bottleneck.

A response sender blocks for one round trip to the server per response, and asking for cancellation
is one more (about 80 us), so clients that left are looked for in slow rotation.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tokenflow.clock import Clock
from tokenflow.types import GenerateRequest, TokenEvent
from triton_backend.control_actions import Refusal, carry_out
from triton_backend.responses import encode_chunk
from triton_backend.stream import Chunk, ErrorCode, TextStream
from triton_backend.work import Channel, Controlled, Opened, Refused, RuntimeControl

logger = logging.getLogger("tokenflow")

_POLLS_PER_TURN = 16
_SHUTTING_DOWN = "the server is shutting down"


@dataclass(slots=True)
class _Entry:
    """An open answer. gone: its client left; only the FINAL is still to be sent."""

    handle: int
    channel: Channel
    stream: TextStream
    outputs: tuple[str, ...]
    gone: bool = False

    @property
    def request_id(self) -> str:
        return self.stream.request.generate.request_id


@dataclass(frozen=True, slots=True)
class _Decided:
    """What became of a control request."""

    channel: Channel
    refusal: Refusal | None


class _Stop:
    """Ends the thread."""


_Item = Opened | Refused | Controlled | _Decided | TokenEvent | _Stop


class Sender:
    """Thread around `turn`. `post` may be called from any thread and never blocks.

    poll_period_s: time in which every open answer is asked once whether its client left.
    tick_period_s: time between two calls of what was given as `on_tick`.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        poll_period_s: float,
        tick_period_s: float = 0.1,
    ) -> None:
        self._clock = clock
        self._poll_period_s = poll_period_s
        self._on_tick: Callable[[], None] | None = None
        self._tick_period_s = tick_period_s
        self._inbox: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._runtime: RuntimeControl | None = None
        self._entries: dict[int, _Entry] = {}
        self._handles_of_id: dict[str, set[int]] = {}
        self._early: dict[int, list[TokenEvent]] = {}
        self._undecided: set[Channel] = set()
        self._last_opened = -1
        self._to_poll: deque[int] = deque()
        self._next_poll_time = 0.0
        self._next_tick_time = 0.0
        self._thread = threading.Thread(target=self._run, name="tokenflow-sender", daemon=True)

    def start(self, runtime: RuntimeControl, on_tick: Callable[[], None] | None = None) -> None:
        """Start the thread; once."""
        self.attach(runtime, on_tick)
        self._thread.start()

    def attach(self, runtime: RuntimeControl, on_tick: Callable[[], None] | None = None) -> None:
        """Set whom to tell about clients that left, complete answers and acknowledgements, and what
        to call in this thread every `tick_period_s` (metrics)."""
        self._runtime = runtime
        self._on_tick = on_tick

    def post(self, item: Opened | Refused | Controlled | TokenEvent) -> None:
        """Hand over work. `Opened` must be posted in the order of rising handles; events of a
        handle may overtake its `Opened`."""
        self._inbox.put(item)

    def stop(self, timeout_s: float) -> bool:
        """Send what is queued, end what is still open with an error, join; False if it hangs."""
        self._inbox.put(_Stop())
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def num_open(self) -> int:
        """Answers that have not had their FINAL."""
        return len(self._entries)

    # -- sender thread -------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                if self.turn():
                    return
            except Exception:
                logger.exception("the sender failed; going on")

    def turn(self, max_wait_s: float = 1.0) -> bool:
        """Wait for work and do all that is there; True once stopped."""
        items = self._take(max_wait_s)
        events: dict[int, list[TokenEvent]] = {}
        stopping = False
        for item in items:
            if isinstance(item, TokenEvent):
                self._sort_event(item, events)
            elif isinstance(item, Opened):
                self._open(item, events)
            elif isinstance(item, Controlled):
                self._carry_out(item)
            elif isinstance(item, _Decided):
                self._undecided.discard(item.channel)
                self._answer(item.channel, item.refusal)
            elif isinstance(item, Refused):
                self._answer(item.channel, item)
            else:
                stopping = True
        for handle, batch in events.items():
            self._deliver(handle, batch)
        if stopping:
            self._end_all()
            return True
        self._do_periodic()
        return False

    def _take(self, max_wait_s: float) -> list[_Item]:
        due = self._next_tick_time if self._on_tick else float("inf")
        if self._entries:
            due = min(due, self._next_poll_time)
        wait_s = max(0.0, min(max_wait_s, due - self._clock.now()))
        items: list[_Item] = []
        try:
            items.append(self._inbox.get(block=wait_s > 0, timeout=wait_s))
            while True:
                items.append(self._inbox.get_nowait())
        except queue.Empty:
            return items

    def _open(self, item: Opened, events: dict[int, list[TokenEvent]]) -> None:
        if not self._entries:
            self._next_poll_time = self._clock.now() + self._poll_period_s
        entry = _Entry(item.handle, item.channel, item.stream, item.outputs)
        self._last_opened = max(self._last_opened, item.handle)
        self._entries[item.handle] = entry
        self._handles_of_id.setdefault(entry.request_id, set()).add(item.handle)
        self._to_poll.append(item.handle)
        early = self._early.pop(item.handle, None)
        if early is not None:
            events[item.handle] = early

    def _sort_event(self, event: TokenEvent, events: dict[int, list[TokenEvent]]) -> None:
        handle = event.handle
        if handle in self._entries:
            events.setdefault(handle, []).append(event)
        elif handle > self._last_opened:
            self._early.setdefault(handle, []).append(event)
        # Else the answer is complete: tokens of the steps that ran until the runtime was told.

    def _deliver(self, handle: int, batch: list[TokenEvent]) -> None:
        entry = self._entries.get(handle)
        if entry is None:
            return
        try:
            if entry.gone:
                if batch[-1].end is not None:
                    self._remove(entry)
                    entry.channel.close()
                return
            for chunk in entry.stream.push(batch):
                if chunk.final:
                    self._remove(entry)
                if entry.stream.needs_finish:
                    self._control().finish(handle)
                self._send(entry, chunk)
        except Exception as error:
            logger.exception("answering request %r failed", entry.request_id)
            self._abandon(entry, f"the answer could not be sent: {type(error).__name__}")

    @staticmethod
    def _send(entry: _Entry, chunk: Chunk) -> None:
        if chunk.error is not None:
            entry.channel.fail(chunk.error, chunk.error_code)
        else:
            outputs = encode_chunk(chunk, entry.stream.request, entry.outputs)
            entry.channel.send(outputs, final=chunk.final)

    def _carry_out(self, item: Controlled) -> None:
        channel = item.channel
        self._undecided.add(channel)
        try:
            carry_out(
                item.control,
                self._streams_of(item.control.request_id),
                self._control(),
                lambda refusal: self._inbox.put(_Decided(channel, refusal)),
            )
        except Exception:
            logger.exception("carrying out a control request failed")
            self._undecided.discard(channel)
            _close_quietly(channel)

    @staticmethod
    def _answer(channel: Channel, refusal: Refused | Refusal | None) -> None:
        """The answer to a request that is none of the open ones."""
        try:
            if refusal is None:
                channel.send((), final=True)
            else:
                channel.fail(refusal.message, refusal.code)
        except Exception:
            logger.exception("answering a request failed")
            _close_quietly(channel)

    def _streams_of(self, request_id: str) -> list[tuple[int, GenerateRequest]]:
        """Open answers with this id whose client is still there, in order of arrival."""
        entries = [self._entries[h] for h in sorted(self._handles_of_id.get(request_id, ()))]
        return [(e.handle, e.stream.request.generate) for e in entries if not e.gone]

    def _do_periodic(self) -> None:
        now = self._clock.now()
        if self._entries and now >= self._next_poll_time:
            self._poll(now)
        if self._on_tick is not None and now >= self._next_tick_time:
            self._next_tick_time = now + self._tick_period_s
            self._tick(self._on_tick)

    def _tick(self, on_tick: Callable[[], None]) -> None:
        try:
            on_tick()
        except Exception:
            self._on_tick = None
            logger.exception("updating the metrics failed; they stand still from now on")

    def _poll(self, now: float) -> None:
        """Ask some open answers whether their client left; all of them once per period."""
        num_polls = min(_POLLS_PER_TURN, len(self._entries))
        self._next_poll_time = now + self._poll_period_s * num_polls / len(self._entries)
        while num_polls and self._to_poll:
            handle = self._to_poll.popleft()
            entry = self._entries.get(handle)
            if entry is None or entry.gone:
                continue  # ended or known to be gone: leaves the rotation
            num_polls -= 1
            self._to_poll.append(handle)
            if self._has_left(entry):
                entry.gone = True
                self._control().cancel(handle)

    def _has_left(self, entry: _Entry) -> bool:
        try:
            return entry.channel.is_cancelled()
        except Exception:
            logger.exception("asking request %r for cancellation failed", entry.request_id)
            return True

    def _abandon(self, entry: _Entry, message: str) -> None:
        """Stop the work of a request that cannot be answered, and try to tell its client."""
        self._remove(entry)
        self._control().cancel(entry.handle)
        try:
            entry.channel.fail(message, ErrorCode.INTERNAL)
        except Exception:
            _close_quietly(entry.channel)

    def _end_all(self) -> None:
        channels = [entry.channel for entry in self._entries.values()]
        for entry in tuple(self._entries.values()):
            self._remove(entry)
        for channel in (*channels, *self._undecided):
            try:
                channel.fail(_SHUTTING_DOWN, ErrorCode.UNAVAILABLE)
            except Exception:
                _close_quietly(channel)

    def _remove(self, entry: _Entry) -> None:
        if self._entries.pop(entry.handle, None) is None:
            return
        if not self._entries:
            self._to_poll.clear()  # nobody is polled while all answers end at once
        handles = self._handles_of_id[entry.request_id]
        handles.discard(entry.handle)
        if not handles:
            del self._handles_of_id[entry.request_id]

    def _control(self) -> RuntimeControl:
        assert self._runtime is not None, "attach a runtime before posting work"
        return self._runtime


def _close_quietly(channel: Channel) -> None:
    """FINAL for a channel on which sending failed; it may have been closed by the failed call."""
    try:
        channel.close()
    except Exception:
        logger.debug("the channel was closed before", exc_info=True)
