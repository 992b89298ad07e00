"""The plan as a document: kept and recomputed tensors, layer by layer. JSON of schema ``jettison.plan/1``.

A plan has all that is needed to apply it: the digest of each layer's program, the kept buffers, and the segments. The
hash covers these decisions and the bytes they were made for. It excludes timings, prices and the solver's figures, so
that every rank with the same decisions has the same hash. Readers ignore unknown keys. Nothing is pickled; loose text
becomes typed in `Plan.from_json` only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import cache
from typing import Any, Final, Literal

from jettison.core.documents import keys_of
from jettison.core.errors import PlanMismatch, UsageError, first_problem
from jettison.core.objects import renamed, summary, with_former_names
from jettison.core.units import format_bytes, format_percent
from jettison.ledger.program import Program, Source
from jettison.ledger.step_levels import StepLevels

SCHEMA: Literal["jettison.plan/1"] = "jettison.plan/1"
ROOT_LAYER = ""

_FORMER: Final = "mixed"  # former value of `PolicyName.PER_TENSOR`, which hashes of plans cover


class PolicyName(StrEnum):
    """A layer's policy in one word of the command line's contract."""

    NONE = "none"  # nothing is recomputed
    SELECTIVE = "selective"  # only the attention core is recomputed; set by the planner
    FULL = "full"  # nothing is kept that could be recomputed
    OFFLOAD = "offload"  # some or all of it is offloaded, and nothing is recomputed
    PER_TENSOR = "per-tensor"  # any other choice of tensors, or some of it is packed

    @classmethod
    def _missing_(cls, value: object) -> PolicyName | None:
        return cls.PER_TENSOR if value == _FORMER else None


def policy_name(
    program: Program, kept: frozenset[int], moved: frozenset[int] = frozenset(), packed: frozenset[int] = frozenset()
) -> PolicyName:
    """Return the word for a region's kept, offloaded and packed buffers."""
    again = program.recompute_set(kept)
    if packed:
        return PolicyName.PER_TENSOR
    if moved:
        return PolicyName.PER_TENSOR if again else PolicyName.OFFLOAD
    if not again:
        return PolicyName.NONE
    return PolicyName.PER_TENSOR if any(_could_run_again(program, b) for b in kept) else PolicyName.FULL


def _could_run_again(program: Program, b: int) -> bool:
    buffer = program.buffers[b]
    if buffer.free or buffer.nbytes == 0 or buffer.producer is None or buffer.source is Source.RANDOM:
        return False
    return program.ops[buffer.producer].anchor is None


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPlan:
    """One layer's decisions. ``kept`` and, of these, ``offloaded`` and ``packed`` are buffer indices of the program
    with this digest, ascending. ``kept_bytes`` are on the device.

    ``price`` is seconds per byte at which this policy is the cheapest; 0 without a price.
    """

    layer: str
    policy: PolicyName
    kept_bytes: int
    offloaded_bytes: int = 0
    recompute_flops: int
    digest: str
    option: str
    kept: tuple[int, ...]
    offloaded: tuple[int, ...] = ()
    packed: tuple[int, ...] = ()
    price: float = 0.0

    def __post_init__(self) -> None:
        for name, indices in (("kept", self.kept), ("offloaded", self.offloaded), ("packed", self.packed)):
            if list(indices) != sorted(set(indices)) or any(b < 0 for b in indices):
                raise ValueError(f"layer {self.layer!r}: {name} must be distinct buffer indices in ascending order")
        for name in ("kept_bytes", "offloaded_bytes", "recompute_flops"):
            if getattr(self, name) < 0:
                raise ValueError(f"layer {self.layer!r}: {name} is {getattr(self, name)}; expected 0 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class Predicted:
    """Peak of allocated bytes in a step, and of bytes on the host; its seconds, and the plan's overhead as a share of a
    step without checkpointing. 0.0 if not known.

    ``composed``: the peak was composed of dry runs of the step's parts; this plan was not dry-run itself.
    """

    peak_bytes: int
    step_seconds: float = 0.0
    overhead_fraction: float = 0.0
    host_bytes: int = 0
    composed: bool = False

    @property
    def added_seconds(self) -> float:
        """Seconds of recomputation in a step."""
        return self.step_seconds * self.overhead_fraction / (1.0 + self.overhead_fraction)


@dataclass(frozen=True, kw_only=True, slots=True)
class SolverReport:
    """Largest share of the step that a better plan could still save, and the time to prove it."""

    gap: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanTensor:
    """One saved tensor of the programs with this digest; ``buffer`` is the index that `LayerPlan` uses. ``free``:
    others hold it anyway (an input that several layers read), so no layer decides about it.
    """

    digest: str
    buffer: int
    path: str
    op: str
    role: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    free: bool = False


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A feasible plan. ``segments`` are (first layer, last layer) by name, both inside the segment.

    ``root`` is the policy of the part around the layers; its layer name is empty. ``tensors`` and ``levels`` (bytes
    over the dry-run step) are for display: neither decisions nor the hash depend on them.
    """

    budget_bytes: int
    minimum_budget_bytes: int
    predicted: Predicted
    solver: SolverReport
    layers: tuple[LayerPlan, ...]
    root: LayerPlan
    segments: tuple[tuple[str, str], ...] = ()
    model: str  # the model's fingerprint
    torch_version: str = ""  # version that recorded the programs
    gradients_preallocated: bool = field(default=False, metadata={"former": "gradients_held"})  # before the forward
    chunked_loss: bool = False  # cross entropy runs over chunks of rows
    tensors: tuple[PlanTensor, ...] = field(default=(), compare=False, repr=False)
    levels: StepLevels | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.predicted.peak_bytes > self.budget_bytes:
            raise ValueError(f"predicted peak {self.predicted.peak_bytes} is above the budget {self.budget_bytes}")
        if self.root.layer != ROOT_LAYER:
            raise ValueError(f"the root's layer name is {self.root.layer!r}; expected an empty one")
        position = {entry.layer: i for i, entry in enumerate(self.layers)}
        if len(position) != len(self.layers) or ROOT_LAYER in position:
            raise ValueError("layer names must be distinct and not empty")
        last = -1
        for start, stop in self.segments:
            if not last < position.get(start, -1) < position.get(stop, -1):
                raise ValueError(f"segment {start!r} .. {stop!r} is out of order, or names a layer that is not there")
            last = position[stop]

    def __repr__(self) -> str:
        overhead = format_percent(self.predicted.overhead_fraction)
        return summary(
            self,
            f"{len(self.layers)} layers, budget {format_bytes(self.budget_bytes)}, predicted peak "
            f"{format_bytes(self.predicted.peak_bytes)}, overhead {overhead}",
        )

    @property
    def hash(self) -> str:
        """sha256 over the canonical JSON of the decisions; equal decisions have equal hashes on every rank."""
        text = json.dumps(self._decisions(), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def _decisions(self) -> dict[str, Any]:
        """All keys except timings and display."""
        fields = asdict(self)
        for shown in ("solver", "tensors", "levels"):
            del fields[shown]
        # hashes of older plans cover neither key, or the former one
        if fields.pop("gradients_preallocated"):
            fields["gradients_held"] = True
        if not self.chunked_loss:
            del fields["chunked_loss"]
        fields["predicted"] = {"peak_bytes": self.predicted.peak_bytes}
        for entry in (*fields["layers"], fields["root"]):
            del entry["price"]
            entry["policy"] = _FORMER if entry["policy"] is PolicyName.PER_TENSOR else entry["policy"]
            if not entry["packed"]:
                del entry["packed"]
        return {"schema": SCHEMA, **fields}

    def document(self) -> dict[str, Any]:
        """Return the plan as JSON data."""
        fields = asdict(self)
        for entry in (*fields["layers"], fields["root"]):
            entry["stage"] = None
        fields["predicted"]["stalled_seconds"] = None
        known = {"schema": SCHEMA, "made_from": "trace", "feasible": True, "hash": self.hash}
        known |= with_former_names(Plan, fields)
        return {key: known.get(key) for key in keys_of(SCHEMA)}

    def to_json(self) -> str:
        """Return the document as JSON text; `from_json` reads it."""
        return json.dumps(self.document(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Plan:
        """Read a plan.

        Raises:
            UsageError: the text is not a feasible plan of this schema; the message names the first wrong key.
            PlanMismatch: the decisions do not match the hash in the text.
        """
        from pydantic import ValidationError  # making and running a plan needs none of it

        try:
            header, whole = _adapters()
            stated: _PlanHeader = header.validate_json(text, strict=True)
            plan: Plan = whole.validate_json(json.dumps(renamed(Plan, json.loads(text))), strict=True)
        except ValidationError as error:
            raise UsageError(f"not a {SCHEMA} document: {first_problem(error)}") from error
        if plan.hash != stated.hash:
            raise PlanMismatch(
                f"the plan was changed after it was written: it states hash {stated.hash}, "
                f"its decisions have {plan.hash}. Create a new plan instead of editing it."
            )
        return plan

    def require(self, *, model: str, digests: Mapping[str, str]) -> None:
        """Raise `PlanMismatch` unless the plan was made for this model; ``digests`` are its programs by layer name, ""
        for the root. The message names the first layer that differs.
        """
        planned = {entry.layer: entry.digest for entry in (self.root, *self.layers)}
        if set(planned) != set(digests):
            missing, extra = sorted(set(planned) - set(digests)), sorted(set(digests) - set(planned))
            raise PlanMismatch(
                f"the plan's layers differ from the model's: only planned {missing}, only in the model {extra}"
            )
        for layer, digest in planned.items():
            if digests[layer] != digest:
                name = layer or "the part around the layers"
                raise PlanMismatch(f"{name} has program {digests[layer]}; the plan was made for {digest}")
        if model != self.model:
            raise PlanMismatch(f"the model's fingerprint is {model}; the plan was made for {self.model}")


@dataclass(frozen=True, kw_only=True)
class _PlanHeader:
    """Metadata that a document states about itself."""

    schema: Literal["jettison.plan/1"]
    feasible: Literal[True]
    hash: str


@cache
def _adapters() -> tuple[Any, Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(_PlanHeader), TypeAdapter(Plan)
