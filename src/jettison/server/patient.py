"""uvicorn's HTTP/1.1, with a bound on how long the head of a request may take to come."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class PatientProtocol(H11Protocol):
    """A connection on which no whole head comes within ``head_seconds`` is closed, whether new or kept.

    uvicorn itself bounds the size of a head and the silence of a kept connection, but not a head that comes in drops.
    """

    head_seconds: float = 10.0

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

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is awaited any more."""
        self._head_came()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self.head_seconds, self._give_up)

    def _head_came(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        self._head_timer = None
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self.transport.close()
