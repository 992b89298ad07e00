"""Who may ask: only pages of this server, and programs of this machine. Around the whole application.

NOTE [ What reaches loopback ]
Any web page in a browser on this machine can send requests to 127.0.0.1, and after it has moved its own name there (DNS
rebinding) can read the answers. Therefore a request has to name this server as its Host, by address or as localhost and
with its port; its Origin, where there is one, has to be this server's; and questions have to be application/json, which
a foreign page cannot send unasked. Programs send no Origin, and are let through: they could run the command line, too.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jettison.server.limits import Limits
from jettison.server.problems import MEDIA_TYPE, Problem

HEADERS: Final[Mapping[str, str]] = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""Of every answer; the page has a policy of its own."""


class Guard:
    """Checks each request's Host and Origin, sets headers, and bounds how slowly an answer may be taken."""

    def __init__(self, app: ASGIApp, *, port: int, limits: Limits, crowded: Callable[[], bool]) -> None:
        """``port`` is where the server listens; ``crowded`` says whether it has more connections than it may."""
        self.app = app
        self.limits = limits
        self.crowded = crowded
        self.hosts = frozenset({f"127.0.0.1:{port}", f"localhost:{port}"})
        self.origins = frozenset(f"http://{host}" for host in self.hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it with a problem."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # there are no web sockets here
        sending = self._sending(send)
        problem = self._problem(scope)
        if problem is None:
            await self.app(scope, receive, sending)
        else:
            await _tell(problem, sending)

    def _problem(self, scope: Scope) -> Problem | None:
        if self.crowded():
            detail = f"{self.limits.connections} connections are open, as many as may; close some, or ask again later"
            return Problem(503, "too many connections", detail, retry_seconds=1)
        hosts, origins = _values(scope, b"host"), _values(scope, b"origin")
        if len(hosts) != 1 or hosts[0].lower() not in self.hosts:
            return Problem(421, "misdirected", f"expected the host {' or '.join(sorted(self.hosts))}, as it is printed")
        if any(origin not in self.origins for origin in origins) or len(origins) > 1:
            return Problem(403, "foreign origin", "another site's page may not ask this server")
        foreign = set(_values(scope, b"sec-fetch-site")) - {"same-origin", "none"}
        if foreign and scope["path"] != "/":  # a link to the page is a link
            return Problem(403, "foreign origin", "another site's page may not ask this server")
        return None

    def _sending(self, send: Send) -> Send:
        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                there = {name.lower() for name, _ in message["headers"]}
                more = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *(h for h in more if h[0] not in there)]}
            async with asyncio.timeout(self.limits.send_seconds):
                await send(message)

        return sending


def _values(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in scope["headers"] if key == name]


def as_response(problem: Problem) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Headers and body of a problem after which the connection is closed: what the client still sends is not read."""
    body = json.dumps(problem.document()).encode()
    own = {"content-type": MEDIA_TYPE, "content-length": str(len(body)), "connection": "close", **problem.headers()}
    return [(name.lower().encode(), value.encode()) for name, value in own.items()], body


async def _tell(problem: Problem, send: Send) -> None:
    headers, body = as_response(problem)
    await send({"type": "http.response.start", "status": problem.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
