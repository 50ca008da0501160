"""Bounds in both directions of the engine's channel.

Invariants:
- Host to proxy: at most `window` iteration messages are unacknowledged (`ResponseOutbox`); the host
  neither sends nor steps beyond that, so a proxy that does not read costs no memory there.
- Proxy to host: sending never blocks (`CommandSender`); what the socket does not take waits in a
  buffer of bounded size, beyond which requests are refused, and hints from a small part of it on.
  Cancels and acknowledgements are always taken: there is at most one cancel per request and one
  acknowledgement per message of the window.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence

from tokenflow.errors import EngineError
from tokenflow.executor.api import IterationStats, Response
from tokenflow.executor.channel import MAX_MESSAGE_BYTES, FromHost, Iteration, encode
from tokenflow.executor.kv_api import KVCacheEvent

MAX_BACKLOG_BYTES = 4 * MAX_MESSAGE_BYTES
"""Room for a few requests that bring LoRA weights at the same time."""
HINT_SHARE = 1 / 64
"""Of the backlog that hints may fill; the rest is for requests."""
DEFAULT_WINDOW = 32

_STEPS_AHEAD_PER_MESSAGE = 8


class CommandSender:
    """The proxy's sending side: never blocks, keeps order, bounded. Safe from any thread.

    A frame goes straight to the socket while nothing waits; otherwise it joins the backlog, which
    the owner of the socket's event loop flushes when the socket takes more (`wants_write`, `flush`;
    `wake` is called when the backlog grows and must not block). After `close` everything
    is dropped silently: the reader learns of the loss and answers for every request.
    """

    def __init__(
        self, sock: socket.socket, wake: Callable[[], None], max_backlog_bytes: int
    ) -> None:
        self._socket = sock
        self._wake = wake
        self._max_backlog_bytes = max_backlog_bytes
        self._lock = threading.Lock()
        self._backlog: deque[memoryview] = deque()
        self._backlog_bytes = 0
        self._closed = False

    @property
    def wants_write(self) -> bool:
        """True while something waits for the socket."""
        return bool(self._backlog)

    def send(self, frame: bytes, *, bounded: bool, share: float = 1.0) -> bool:
        """Send or buffer; False = refused, because `bounded` and `share` of the buffer is full."""
        with self._lock:
            if self._closed:
                return True
            if not self._backlog:
                rest = self._send_some(memoryview(frame))
                if not rest:
                    return True
            else:
                rest = memoryview(frame)
                limit = share * self._max_backlog_bytes
                if bounded and self._backlog_bytes + len(rest) > limit:
                    return False
            self._backlog.append(rest)
            self._backlog_bytes += len(rest)
            self._wake()  # under the lock: never after `close`
        return True

    def flush(self) -> None:
        """Give the socket as much of the backlog as it takes now."""
        with self._lock:
            while self._backlog and not self._closed:
                head = self._backlog.popleft()
                rest = self._send_some(head)
                self._backlog_bytes -= len(head) - len(rest)
                if rest:
                    self._backlog.appendleft(rest)
                    return

    def close(self) -> None:
        """Drop the backlog and everything sent from now on."""
        with self._lock:
            self._closed = True
            self._backlog.clear()
            self._backlog_bytes = 0

    def _send_some(self, data: memoryview) -> memoryview:
        """What the socket did not take. A broken socket takes everything: nobody listens."""
        while data:
            try:
                data = data[self._socket.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL) :]
            except BlockingIOError:
                return data
            except OSError:
                return data[len(data) :]
        return data


class ResponseOutbox:
    """The host's sending side: one message per iteration, at most `window` unacknowledged.

    What finds the window full waits in one pending message, which goes out when an acknowledgement
    makes room. `push` blocks its caller until then, `post` never blocks, and `wait_open` is the
    gate in front of each engine step. `close` opens every gate and drops what comes later.
    """

    def __init__(
        self, sock: socket.socket, window: int, max_message_bytes: int = MAX_MESSAGE_BYTES
    ) -> None:
        self._socket = sock
        self._window = window
        self._max_message_bytes = max_message_bytes
        self._num_steps_ahead = 0
        self._condition = threading.Condition()
        self._sent_seq = 0
        self._acked_seq = 0
        self._responses: list[Response] = []
        self._stats: list[IterationStats] = []
        self._events: list[KVCacheEvent] = []
        self._closed = False

    def send_now(self, message: FromHost) -> None:
        """Send a message that needs no window (progress, ready, failed, answers)."""
        with self._condition:
            self._socket.sendall(encode(message))

    def push(
        self,
        responses: list[Response],
        stats: list[IterationStats],
        events: Sequence[KVCacheEvent] = (),
    ) -> None:
        """Send one iteration; returns when it is on its way."""
        with self._condition:
            self._responses += responses
            self._stats += stats
            self._events += events
            self._send_pending()
            self._condition.wait_for(self._nothing_pending)

    def post(self, response: Response) -> None:
        """Send one response, now or with the next message."""
        with self._condition:
            self._responses.append(response)
            self._send_pending()

    def acknowledge(self, seq: int) -> None:
        """The proxy took everything up to `seq` (two of its threads acknowledge, so an older one
        may come later). Raises EngineError for a seq never sent."""
        with self._condition:
            if seq > self._sent_seq:
                raise EngineError(f"message {seq} acknowledged, {self._sent_seq} sent")
            self._acked_seq = max(self._acked_seq, seq)
            self._send_pending()
            self._condition.notify_all()

    def wait_open(self) -> None:
        """The engine's next step waits here while the window is full, or while the engine is many
        steps ahead of whoever pushes."""
        with self._condition:
            self._condition.wait_for(self._may_step)
            self._num_steps_ahead += 1

    def note_pull(self) -> None:
        """Everything that the engine had ready was taken from it."""
        with self._condition:
            self._num_steps_ahead = 0
            self._condition.notify_all()

    def close(self) -> None:
        """Open all gates; nothing is sent any more."""
        with self._condition:
            self._closed = True
            self._send_pending()
            self._condition.notify_all()

    def _has_room(self) -> bool:
        return self._closed or self._sent_seq - self._acked_seq < self._window

    def _may_step(self) -> bool:
        is_near = self._num_steps_ahead < _STEPS_AHEAD_PER_MESSAGE * self._window
        return self._closed or (is_near and self._has_room())

    def _nothing_pending(self) -> bool:
        return not self._responses and not self._stats and not self._events

    def _send_pending(self) -> None:
        if self._has_room() and not self._nothing_pending():
            responses, self._responses = self._responses, []
            stats, self._stats = self._stats, []
            events, self._events = self._events, []
            if not self._closed:
                self._send(responses, stats, events)

    def _send(
        self, responses: list[Response], stats: list[IterationStats], events: list[KVCacheEvent]
    ) -> None:
        """A batch that is too large goes in parts, KV events first; a single response that is too
        large becomes an error (its stream could not be delivered), and a single event is left out,
        which its reader sees as a gap in the ids."""
        try:
            message = Iteration(self._sent_seq + 1, responses, stats, events)
            frame = encode(message, self._max_message_bytes)
        except EngineError as error:
            self._send_parts(responses, stats, events, error)
            return
        self._sent_seq += 1
        self._socket.sendall(frame)

    def _send_parts(
        self,
        responses: list[Response],
        stats: list[IterationStats],
        events: list[KVCacheEvent],
        error: EngineError,
    ) -> None:
        if events and (responses or stats):
            self._send([], [], events)
            self._send(responses, stats, [])
        elif events:
            middle = len(events) // 2
            if middle:
                self._send([], [], events[:middle])
                self._send([], [], events[middle:])
        elif not responses:
            raise error
        elif len(responses) > 1:
            middle = len(responses) // 2
            self._send(responses[:middle], stats, [])
            self._send(responses[middle:], [], [])
        else:
            first = responses[0]
            failed = Response(
                request_id=first.request_id, client_id=first.client_id, error=str(error)
            )
            if responses == [failed]:
                raise error
            self._send([failed], stats, [])
