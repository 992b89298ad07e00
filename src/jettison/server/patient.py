"""uvicorn's HTTP/1.1, with bounds on the head of a request, and problem documents where its bytes are no request."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from jettison.server.guard import HEADERS, as_response
from jettison.server.limits import Limits
from jettison.server.problems import Problem


class PatientProtocol(H11Protocol):
    """A connection on which no whole head comes within ``head_seconds`` is closed, whether new or kept; a head of more
    than ``head_bytes`` is refused.

    uvicorn itself bounds the silence of a kept connection, but not a head that comes in drops; and the size of a head
    only until its end has come.
    """

    limits: Limits

    def __init__(self, *arguments: Any, **more: Any) -> None:
        """As uvicorn makes it."""
        super().__init__(*arguments, **more)
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The first head is awaited."""
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """Part of a head begins the wait, where a connection was kept; a whole one ends it."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._head_came()
        elif self._head_timer is None:
            self._await_head()

    def handle_events(self) -> None:
        """Look at the length of a head before it is read."""
        if self.conn.their_state is h11.IDLE and _head_bytes(self.conn.trailing_data[0]) > self.limits.head_bytes:
            self._refuse(Problem(431, "head too long", f"expected at most {self.limits.head_bytes} bytes of headers"))
            return
        super().handle_events()

    def send_400_response(self, msg: str) -> None:
        """For what is no HTTP."""
        detail = (
            f"{msg.rstrip('.')}: expected HTTP/1.1, such as GET / or POST /api/VERB with Content-Type: application/json"
        )
        self._refuse(Problem(400, "bad request", detail))

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is awaited any more."""
        self._head_came()
        super().connection_lost(exc)

    def _refuse(self, problem: Problem) -> None:
        headers, body = as_response(problem)
        headers += [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
        reason = HTTPStatus(problem.status).phrase.encode()
        answer = [h11.Response(status_code=problem.status, headers=headers, reason=reason), h11.Data(data=body)]
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            for event in (*answer, h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self.limits.head_seconds, self._give_up)

    def _head_came(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        self._head_timer = None
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self.transport.close()


def _head_bytes(pending: bytes) -> int:
    """Bytes up to the empty line that ends a head, or of what has come of it."""
    ends = [at + len(end) for end in (b"\r\n\r\n", b"\n\n") if (at := pending.find(end)) >= 0]
    return min(ends, default=len(pending))
