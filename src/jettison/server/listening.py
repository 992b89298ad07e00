"""The socket on loopback that a server listens on, before anything else of it is loaded."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from jettison.core.errors import UsageError

ADDRESS = "127.0.0.1"
HIGHEST_PORT = 65535


@contextmanager
def listening(port: int) -> Iterator[socket.socket]:
    """Listen on loopback alone, on this port or, for 0, on a free one.

    Raises:
        UsageError: the port is taken, or is none.
    """
    if not 0 <= port <= HIGHEST_PORT:
        raise UsageError(f"got --port {port}; expected 1 to {HIGHEST_PORT}, or none for a free one")
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        if os.name == "posix":  # a port that was just given up; one that somebody listens on stays refused
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((ADDRESS, port))
            listener.listen(1024)
        except OSError as error:
            reason = error.strerror or str(error)
            raise UsageError(f"port {port} cannot be used ({reason}); give another --port, or none") from None
        yield listener
    finally:
        listener.close()
