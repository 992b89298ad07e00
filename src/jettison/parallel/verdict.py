"""Whether plans fit on all ranks of a step: one answer, which each of them gives.

NOTE [ One refusal ]
Ranks may have different plans: stages of a pipeline, replicas with batches of their own. So one may have none where the
others do. What it says, `Infeasible` with a budget that would do, is what scripts catch to ask again. If it alone said
so, it would ask alone, and wait for ranks that are at their first step; and these would wait for it there. So a refusal
is every rank's: the same error, at the same time, with the smallest budget under which all of them find a plan.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from jettison.errors import Infeasible


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Of one rank, or of several together.

    Args:
        needs_bytes: the smallest budget under which all of them have plans.
        refused: that one has none: arguments of its `Infeasible`.
    """

    needs_bytes: int
    refused: dict[str, Any] | None = None

    @classmethod
    def fits(cls, minimum_budget_bytes: Iterable[int]) -> Verdict:
        """Of a rank that has plans, which would have fitted such budgets too."""
        return cls(needs_bytes=max(minimum_budget_bytes, default=0))

    @classmethod
    def refuses(cls, error: Infeasible, rank: int | None = None) -> Verdict:
        """Of a rank that has none.

        Args:
            rank: to be named, where the others have plans of their own.
        """
        reason = error.reason if rank is None else f"This is what rank {rank} says. {error.reason}".strip()
        return cls(
            needs_bytes=int(error.minimum_budget_bytes),
            refused={"budget_bytes": int(error.budget_bytes), "reason": reason},
        )

    @property
    def error(self) -> Infeasible | None:
        """What all of them raise, if one has no plan."""
        return None if self.refused is None else Infeasible(minimum_budget_bytes=self.needs_bytes, **self.refused)

    def written(self) -> bytes:
        """As `read` has it."""
        return json.dumps(asdict(self)).encode()


def read(word: bytes | str) -> Verdict:
    """A verdict that another rank has written."""
    return Verdict(**json.loads(word))


def merged(words: Sequence[tuple[int, bytes]]) -> bytes:
    """Of a rank and of the branches below it. Of several that have no plan the one that needs most is named."""
    found = [read(word) for _, word in words]
    refused = max((one for one in found if one.refused), key=lambda one: one.needs_bytes, default=None)
    most = max(one.needs_bytes for one in found)
    return Verdict(needs_bytes=most, refused=None if refused is None else refused.refused).written()


__all__ = ["Verdict", "merged", "read"]
