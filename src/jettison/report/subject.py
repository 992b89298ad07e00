"""What a report is about, whatever it was read from: a plan, a proof or a training run, in one form.

Figures, tables and the JSON of a report are all made from this, and nothing is worked out twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from jettison.ledger.levels import StepLevels
from jettison.solve.plan import PlanTensor


class Kind(StrEnum):
    """What was read."""

    PLAN = "plan"
    PROOF = "proof"
    RUN = "training run"


class Fate(StrEnum):
    """What happens to a saved tensor between forward and backward."""

    KEEP = "kept"
    AGAIN = "computed again"
    HOST = "on the host"
    PACK = "kept in fewer bytes"
    SHARED = "held by others"


@dataclass(frozen=True, kw_only=True, slots=True)
class Amount:
    """One number of bytes of a step. ``what``: budget, smallest budget, predicted, measured or plain."""

    what: str
    nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseBytes:
    """The peak in a phase of the step; None where it is not known."""

    phase: str
    predicted_bytes: int | None = None
    measured_bytes: int | None = None
    plain_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerBytes:
    """What a layer holds between forward and backward; None where it is not known."""

    layer: str
    policy: str
    predicted_bytes: int | None = None
    measured_bytes: int | None = None
    plain_bytes: int | None = None
    host_bytes: int | None = None
    recompute_flops: int | None = None
    why: str = ""
    stage: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorKind:
    """A saved tensor as it occurs in several layers."""

    name: str
    path: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """Tensors by layers: ``fates[i][j]`` is that of tensor i in layer j, None where the layer has none such."""

    title: str
    layers: tuple[str, ...]
    tensors: tuple[TensorKind, ...]
    fates: tuple[tuple[Fate | None, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """Step time ÷ that of plain autograd: the median over interleaved rounds and its quartiles."""

    median: float
    low: float
    high: float
    plain_seconds: float
    rounds: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainStep:
    """One line of a run's log."""

    step: int
    loss: float | None = None
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    peak_bytes: int | None = None
    measured: bool = False


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One document.

    Args:
        name: what it was read from.
        holds: whether it shows what it is to show; None where nothing was run.
        sentences: what was shown or not, first ones first.
        facts: what else there is to say, as names and values.
        levels: bytes over the step: predicted, measured, plain.
        command: what makes such a document.
    """

    kind: Kind
    name: str
    holds: bool | None = None
    sentences: tuple[str, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    amounts: tuple[Amount, ...] = ()
    phases: tuple[PhaseBytes, ...] = ()
    layers: tuple[LayerBytes, ...] = ()
    grids: tuple[Grid, ...] = ()
    levels: dict[str, StepLevels] = field(default_factory=dict)
    ratio: Ratio | None = None
    steps: tuple[TrainStep, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    command: str = ""

    def data(self) -> dict[str, Any]:
        """As what JSON is made of."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Decided:
    """What a layer does with the buffers of its program, as plans and proofs say it."""

    layer: str
    digest: str
    kept: frozenset[int]
    offloaded: frozenset[int]
    packed: frozenset[int]

    def fate(self, tensor: PlanTensor) -> Fate:
        """Of one tensor."""
        if tensor.buffer in self.packed:
            return Fate.PACK
        if tensor.buffer in self.offloaded:
            return Fate.HOST
        if tensor.buffer in self.kept:
            return Fate.KEEP
        return Fate.SHARED if tensor.free else Fate.AGAIN


def grid_of(title: str, layers: Sequence[Decided], tensors: Sequence[PlanTensor]) -> Grid | None:
    """Tensors that mean the same in several layers are one row; None where nothing is known of any."""
    columns = [dict(_named(layer, tensors)) for layer in layers]
    kinds = list(dict.fromkeys(kind for column in columns for kind in column))
    if not kinds:
        return None
    return Grid(
        title=title,
        layers=tuple(layer.layer for layer in layers),
        tensors=tuple(kind for kind, _ in kinds),
        fates=tuple(tuple(column.get(kind) for column in columns) for kind in kinds),
    )


def _named(layer: Decided, tensors: Sequence[PlanTensor]) -> Iterator[tuple[tuple[TensorKind, int], Fate]]:
    """A layer's tensors, those that look alike told apart by their order."""
    seen: dict[TensorKind, int] = {}
    for tensor in tensors:
        if tensor.digest != layer.digest:
            continue
        kind = TensorKind(
            name=tensor.role or tensor.op,
            path=tensor.path,
            shape=tensor.shape,
            dtype=tensor.dtype,
            nbytes=tensor.nbytes,
        )
        seen[kind] = seen.get(kind, 0) + 1
        yield (kind, seen[kind]), layer.fate(tensor)
