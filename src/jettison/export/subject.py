"""Subjects of an export: a plan's decisions by layer, on the programs that they were made for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from jettison.ledger.program import Program
from jettison.predict.auto_recompute import AutoForecast
from jettison.solve.policy import Full
from jettison.spec.hardware import Hardware


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What a plan does with one layer; ``kept`` and, of these, ``moved`` and ``packed`` are buffers of its program.

    Args:
        layer: its number's name in a description, or its path in a live model.
        policy: the plan's word for it.
        shared_bytes: of what it keeps, what nobody holds: a layer before it in its segment makes it again.
        packed_bytes: of what it keeps, what is spared by packing.
        through: backward runs all of it again, for the next layer of its segment.
        module: class of a live model's block, as ``module:Class``; ``bases`` are those that it is made of, itself too.
    """

    layer: str
    policy: str
    program: Program
    kept: frozenset[int]
    moved: frozenset[int] = frozenset()
    packed: frozenset[int] = frozenset()
    stage: int = 0
    module: str = ""
    bases: tuple[str, ...] = ()
    shared_bytes: int = 0
    packed_bytes: int = 0
    through: bool = False

    @property
    def plain(self) -> bool:
        """Autograd's own saved tensors stay where they are."""
        return not self.moved and not self.packed and not self.program.recompute_set(self.kept)

    @property
    def whole(self) -> bool:
        """Nothing stays but what the layer is given, and what cannot be computed again."""
        return not self.moved and not self.packed and self.kept <= Full().kept(self.program)

    @property
    def kept_bytes(self) -> int:
        """On the device, between forward and backward."""
        return self.program.kept_bytes(self.kept - self.moved) - self.shared_bytes - self.packed_bytes

    @property
    def again(self) -> tuple[int, ...]:
        """Ops that backward runs a second time."""
        return tuple(range(len(self.program.ops))) if self.through else self.program.recompute_set(self.kept)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A plan to export.

    Args:
        hardware: whose prices seconds are stated at.
        segments: runs of layers of which only the first holds its input, by the names of the first and the last.
        root_freed_bytes: what the plan drops of the part around the layers.
        described: the choice for a described run; None for a live model's plan.
        predicted: what the plan's document says of it, by key.
        asked: what it was made from, by flag, as the document has it.
    """

    model: str
    plan_hash: str
    budget_bytes: int
    minimum_budget_bytes: int
    decisions: tuple[Decision, ...]
    hardware: Hardware
    segments: tuple[tuple[str, str], ...] = ()
    root_freed_bytes: int = 0
    described: AutoForecast | None = None
    predicted: Mapping[str, float] = field(default_factory=dict)
    asked: Mapping[str, object] = field(default_factory=dict)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Parts of the model's configuration that the plan's figures leave out."""
        return () if self.described is None else self.described.forecast.run.model.left_out

    @property
    def live(self) -> bool:
        """It was made for a module, and not for a description."""
        return self.described is None
