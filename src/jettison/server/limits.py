"""What a server bears: every queue, body, wait and process of it has a bound, and each bound is one of these."""

from __future__ import annotations

from dataclasses import dataclass

from jettison.core.errors import UsageError
from jettison.core.process import cores

MIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Bounds of one server; docs/serve.md has them as a table.

    Args:
        workers: processes that answer, one request each at a time.
        waiting: requests that may wait for one; the next is answered 429.
        plan_seconds: of work on a plan, a ledger or an estimate.
        search_seconds: of work on a search.
        worker_bytes: of address space of a worker, where the system can bound it (not on macOS and Windows).
        worker_answers: after so many a worker is replaced, so that what it remembers does not grow.
        answer_bytes: of one document.
        body_bytes: of a request's body, a config.json included.
        depth: of lists and objects in it.
        body_seconds: until the whole body has come.
        head_bytes: of the head of a request, its first line included.
        head_seconds: until the whole head of a request has come, on a new connection or one that is kept.
        send_seconds: until a client has taken each piece of its answer.
        connections: at a time; the next is answered 503.
        stop_seconds: for answers under way when the server ends.
    """

    workers: int = min(2, cores())
    waiting: int = 256
    plan_seconds: float = 60.0
    search_seconds: float = 300.0
    worker_bytes: int = 4096 * MIB
    worker_answers: int = 500
    answer_bytes: int = 64 * MIB
    body_bytes: int = 256 * 1024
    depth: int = 32
    body_seconds: float = 10.0
    head_bytes: int = 64 * 1024
    head_seconds: float = 10.0
    send_seconds: float = 30.0
    connections: int = 1024
    stop_seconds: float = 2.0

    def __post_init__(self) -> None:
        """Refuse bounds that nothing can keep."""
        for name in self.__slots__:
            value = getattr(self, name)
            if value < (0 if name == "waiting" else 1e-9):
                raise UsageError(f"got {name} = {value}; expected more than 0")

    def seconds(self, verb: str) -> float:
        """Of work, for one request of this verb."""
        return self.search_seconds if verb == "search" else self.plan_seconds
