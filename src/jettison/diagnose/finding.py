"""Findings: a claim, the figures that it rests on, and the change that would mend it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """Kinds of findings; stable words for programs."""

    PEAK = "peak"
    FRAGMENTATION = "fragmentation"
    LEAK = "leak"
    OTHERS = "other processes"
    OUTSIDE = "outside PyTorch"
    HOST = "host memory"
    SIZE = "size error"
    UNKNOWN = "unknown"
    EXPOSED_COMMUNICATION = "exposed communication"
    GAPS = "gaps"
    BLOCKING_COPIES = "blocking copies"
    FIRST_STEP = "first step"
    OPTIMIZER_STATE = "optimizer state"
    DATA_WAIT = "data wait"
    SMALL_KERNELS = "small kernels"
    AT_RISK_NOW = "at risk now"
    AT_RISK_IF_RUN_AGAIN = "at risk if run again"


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change: ``line`` is a command, or a line of the program; ``why`` is its effect."""

    line: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One finding."""

    kind: Kind
    claim: str
    evidence: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()

    def document(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {
            "kind": str(self.kind),
            "claim": self.claim,
            "evidence": list(self.evidence),
            "changes": [{"line": change.line, "why": change.why} for change in self.changes],
        }
