"""What a ledger document says beside its entries: the whole step, as bytes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from jettison.ledger.document import ledger_document
from jettison.ledger.record import Ledger


@dataclass(frozen=True, kw_only=True, slots=True)
class StageBytes:
    """What one pipeline stage allocates on one rank. Without pipelining there is one stage."""

    stage: int
    layers: tuple[str, ...]
    in_flight: int  # micro-batches that are between their forward and their backward at once
    activation_bytes: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    peak_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """Peak bytes of one phase of a step."""

    phase: str
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class LedgerReport:
    """A ledger, and the step that it belongs to, rehearsed."""

    model: str
    recompute: str
    parameters: int
    ledger: Ledger
    stages: tuple[StageBytes, ...]
    phases: tuple[Phase, ...]
    warnings: tuple[str, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """Peak of allocated bytes in a step."""
        return max(stage.peak_bytes for stage in self.stages)

    def document(self) -> dict[str, Any]:
        """Schema ``jettison.ledger/1``, with the keys about the step in front of the entries."""
        base = ledger_document(self.ledger)
        entries = base.pop("entries")
        return base | {
            "model": self.model,
            "recompute": self.recompute,
            "parameters": self.parameters,
            "stages": [asdict(stage) for stage in self.stages],
            "peak_bytes": self.peak_bytes,
            "phases": [asdict(phase) for phase in self.phases],
            "warnings": list(self.warnings),
            "entries": entries,
        }
