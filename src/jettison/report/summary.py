"""What a ledger document says beside its entries: the whole step, as bytes. Traced and forecast ledgers share it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from jettison.core.errors import DoesNotFit, ProofFailed
from jettison.ledger.compare import Difference
from jettison.ledger.ledger import Ledger
from jettison.ledger.record import ENTRY_FIELDS, Placement, SavedTensor
from jettison.predict.allowance import Allowance
from jettison.predict.frozen_models import frozen_bytes
from jettison.predict.limit import Limit
from jettison.predict.run_request import Resolved
from jettison.predict.states_on_host import HostStates
from jettison.report.schemas import shaped

if TYPE_CHECKING:
    from jettison.predict.auto_recompute import AutoForecast
    from jettison.predict.largest import FitAnswer
    from jettison.report.explain import Explanation

SCHEMA = "jettison.ledger/1"


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerRow:
    """What one layer saves for backward in one micro-batch on one rank, in how many tensors."""

    layer: str
    bytes: int
    tensors: int
    stage: int = 0
    policy: str = ""  # what happens to it; empty where nobody says


@dataclass(frozen=True, kw_only=True, slots=True)
class StageBytes:
    """What one pipeline stage allocates on one rank. Without pipelining there is one stage.

    ``peak_bytes`` is of a step that has its optimizer state, ``first_step_peak_bytes`` of the one before there is any.
    """

    stage: int
    layers: tuple[str, ...]
    in_flight: int  # micro-batches that are between their forward and their backward at once
    activation_bytes: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    peak_bytes: int
    first_step_peak_bytes: int | None = None
    peak_phase: str = ""
    peak_where: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseRow:
    """Peak bytes of one phase of a step, or of one region in it."""

    phase: str
    peak_bytes: int
    where: str = ""
    stage: int = 0
    micro_batch: int | None = None
    first_step_peak_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How the ledger of a file differs from this one.

    Args:
        path: of the file.
    """

    path: str
    differences: tuple[Difference, ...]

    def document(self) -> dict[str, Any]:
        """For programs: one entry for each tensor that the two do not have alike."""
        return {
            "with": self.path,
            "equal": not self.differences,
            "differences": [
                {"layer": d.layer, "kind": str(d.kind), "delta_bytes": d.delta_bytes, "text": str(d)}
                for d in self.differences
            ],
        }


@dataclass(frozen=True, kw_only=True)
class LedgerReport:
    """A ledger, and the step that it belongs to, dry-run or forecast.

    Args:
        rows: what each layer saves; empty: as the ledger's entries say.
        mesh_sizes: of the axes that shard the entries.
        asked: the run that a forecast is of.
        phases: of the worst stage.
        allowance: what the worst rank's device holds beside the peak's tensors.
        host_states: what the worst rank's host has for the optimizer.
        limit: what the peak is held against.
        choice: a planner's, where recompute was left to it.
        comparison: with another ledger's document.
        request: what was asked of a live model.
        built: how it is built, and the flags under which its closed form says the same.
        with_entries: the document has every saved tensor.
    """

    model: str
    recompute: str
    parameters: int
    ledger: Ledger
    stages: tuple[StageBytes, ...]
    phases: tuple[PhaseRow, ...]
    warnings: tuple[str, ...] = ()
    rows: tuple[LayerRow, ...] = ()
    mesh_sizes: Mapping[str, int] = field(default_factory=dict)
    asked: Resolved | None = None
    allowance: Allowance | None = None
    host_states: HostStates | None = None
    limit: Limit | None = None
    choice: AutoForecast | None = None
    fit: FitAnswer | None = None
    explanation: Explanation | None = None
    comparison: Comparison | None = None
    request: Mapping[str, Any] = field(default_factory=dict)
    built: tuple[tuple[str, str], ...] = ()
    with_entries: bool = True

    @property
    def worst(self) -> StageBytes:
        """The stage that needs most; the first of equals."""
        return max(self.stages, key=lambda stage: stage.peak_bytes)

    @property
    def peak_bytes(self) -> int:
        """Peak of allocated bytes in a step."""
        return self.worst.peak_bytes

    @property
    def fits(self) -> bool:
        """Is the peak within what it is held against?"""
        return self.limit is None or self.peak_bytes <= self.limit.nbytes

    def require(self) -> None:
        """Nothing where the peak fits, and where another ledger that was given is this one.

        Raises:
            DoesNotFit: it does not.
            ProofFailed: the other ledger differs.
        """
        if self.comparison is not None and self.comparison.differences:
            count = len(self.comparison.differences)
            raise ProofFailed(f"{self.comparison.path} differs in {count} saved tensor{'s' if count > 1 else ''}")
        if self.limit is not None and not self.fits:
            advice = "--recompute, --zero and more ranks lower it, and --fit says what would fit" if self.asked else ""
            raise DoesNotFit(
                peak_bytes=self.peak_bytes, limit_bytes=self.limit.nbytes, limit_name=self.limit.words, advice=advice
            )

    @property
    def layers(self) -> tuple[LayerRow, ...]:
        """What each layer saves, in order."""
        if self.rows:
            return self.rows
        tensors = Counter(entry.layer for entry in self.ledger)
        by_layer = self.ledger.by_layer()
        return tuple(LayerRow(layer=name, bytes=n, tensors=tensors[name]) for name, n in by_layer.items())

    def document(self) -> dict[str, Any]:
        """Schema ``jettison.ledger/1``, with the keys about the step in front of the entries."""
        return shaped(self._document())

    def _document(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "model": self.model,
            "recompute": self.recompute,
            "request": request_document(self.asked) if self.asked else dict(self.request),
            "parameters": self.parameters,
            "layers": [_stated(row) for row in self.layers],
            "stages": [_stated(stage) for stage in self.stages],
            "peak_bytes": self.peak_bytes,
            **self._first_step(),
            "phases": [_stated(phase) for phase in self.phases],
            **({"allowance": _allowance(self.allowance)} if self.allowance else {}),
            "host_states": None if self.host_states is None else asdict(self.host_states),
            **self._limit(),
            **self._choice(),
            **({"fit": self.fit.document()} if self.fit else {}),
            **({"explain": self.explanation.document()} if self.explanation else {}),
            **({"compare": self.comparison.document()} if self.comparison else {}),
            "warnings": list(self.warnings),
            "entries": [self._entry(entry) for entry in self.ledger] if self.with_entries else None,
        }

    def csv(self) -> str:
        """All entries as CSV with a header, the bytes on one rank in the last column."""
        header, *lines = self.ledger.to_csv().splitlines()
        local = [entry.local_bytes(self.mesh_sizes) for entry in self.ledger]
        rows = [f"{line},{nbytes}" for line, nbytes in zip(lines, local, strict=True)]
        return "\n".join([f"{header},local_bytes", *rows, ""])

    def _first_step(self) -> dict[str, int]:
        peaks = [stage.first_step_peak_bytes for stage in self.stages]
        known = [nbytes for nbytes in peaks if nbytes is not None]
        return {"first_step_peak_bytes": max(known), "worst_stage": self.worst.stage} if known else {}

    def _limit(self) -> dict[str, Any]:
        if self.limit is None:
            return {}
        stated = {"budget_bytes": self.limit.nbytes, "fits": self.fits}
        return stated | ({"gpu": self.limit.gpu, "usable_bytes": self.limit.usable_bytes} if self.limit.gpu else {})

    def _choice(self) -> dict[str, Any]:
        choice = self.choice
        if choice is None:
            return {}
        stated = {"minimum_budget_bytes": choice.minimum_budget_bytes, "recompute_seconds": choice.seconds}
        if choice.forecast.run.recompute.offload:
            stated |= {"stalled_seconds": choice.stalled_seconds, "host_bytes": choice.host_bytes}
        return {"auto": {"stalled_seconds": None, "host_bytes": None} | stated | {"gap": choice.gap}}

    def _entry(self, entry: SavedTensor) -> dict[str, Any]:
        return {name: _plain(getattr(entry, name)) for name in ENTRY_FIELDS} | {
            "local_bytes": entry.local_bytes(self.mesh_sizes),
            "local_storage_bytes": entry.local_storage_bytes(self.mesh_sizes),
        }


def request_document(asked: Resolved) -> dict[str, Any]:
    """A run as it was understood; ``assumed`` names what nobody asked for."""
    run = asked.run
    layout = run.layout
    return {
        "model": run.model.name,
        "family": run.model.family,
        "seq": run.seq,
        "micro_batch": run.micro_batch,
        "micro_batches": run.micro_batches,
        "layout": asdict(layout) | {"schedule": str(layout.schedule), "world": layout.world},
        "precision": run.precision.name,
        "fp8_recipe": None if run.precision.recipe is None else str(run.precision.recipe),
        "optimizer": str(run.optimizer),
        "kernels": run.kernels.name,
        "attention": str(run.kernels.attention),
        "loss": str(run.kernels.loss),
        "dropout": run.dropout,
        "recompute": str(run.recompute),
        "offload": run.recompute.offload,
        "offload_modules": list(run.recompute.sent),
        "whole_micro_batches": run.recompute.whole,
        "compiled": run.compiled,
        "gradients": str(run.gradients),
        "states_on_host": str(run.states_on_host),
        "capacity_factor": run.capacity_factor,
        "tp_comm_overlap": run.tp_comm_overlap,
        "accumulation": str(run.adding),
        "workspaces": run.workspaces.name,
        "loader_masks": run.loader_masks,
        "keep_batches": run.keep_batches,
        "holds_output": run.holds_output,
        "packed": run.packed or None,
        "context_exchange": str(run.kernels.context_exchange),
        "scans": str(run.kernels.scans),
        "trained": None if run.tuning is None else str(run.tuning),
        "frozen_models": [
            {
                "role": str(found.beside.role),
                "model": None if found.beside.model is None else found.beside.model.name,
                "when": str(found.beside.when),
                "parameter_bytes": found.parameters,
                "forward_bytes": found.forward,
            }
            for found in frozen_bytes(run)
        ],
        "like": asked.like,
        "assumed": sorted(asked.assumed),
    }


def _allowance(stated: Allowance) -> dict[str, int]:
    return {"low_bytes": stated.low, "expected_bytes": stated.expected, "high_bytes": stated.high}


def _stated(row: LayerRow | StageBytes | PhaseRow) -> dict[str, Any]:
    """Its fields; those that say nothing are null."""
    return {name: None if value == "" else value for name, value in asdict(row).items()}


def _plain(value: object) -> object:
    return dict(value) if isinstance(value, Placement) else value
