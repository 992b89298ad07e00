"""How sure a predicted step time is: what published runs of the same kind took, as a share of what was predicted.

`residuals.toml` is written by ``python -m benchmarks.residuals`` from the runs of docs/accuracy_time.md and
docs/accuracy_newer.md. A kind is a device, the software whose figures are taken, whether the model has experts, and
what else than a decoder it is. A range is where a further run of its kind is in eight cases of ten; of fewer than 29
runs it holds all, and of fewer than nine also what all dense ones, or all with experts, have.
A kind without runs has the range of these, which is wider. Those who published had tuned their runs: one that is not
tuned takes rather longer.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from jettison.core.units import format_seconds
from jettison.cost.execution import Execution
from jettison.predict.time import Estimate
from jettison.spec.hardware import Hardware
from jettison.spec.kernels import kernels as kernel_set
from jettison.spec.model import ModelSpec

DATA: Final = Path(__file__).with_name("residuals.toml")
LEAST_RUNS: Final = 4
"""Of a kind that has a range of its own."""
DENSE: Final = "dense"
EXPERTS: Final = "experts"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sureness:
    """A range of measured over predicted seconds.

    Args:
        kind: device, software, and dense or experts.
        runs: that were compared.
        low, high: the range.
        of_this_kind: the runs are of this kind; otherwise of all kinds that are dense, or that have experts, as it is.
    """

    kind: str
    runs: int
    low: float
    high: float
    of_this_kind: bool

    def seconds(self, predicted: float) -> tuple[float, float]:
        """The range around a predicted time."""
        return predicted * self.low, predicted * self.high

    def words(self, predicted: float) -> str:
        """The same for people."""
        low, high = map(format_seconds, self.seconds(predicted))
        if not self.of_this_kind:
            others = "runs with experts" if self.kind.endswith(EXPERTS) else "dense runs"
            return f"{low} to {high}; no run of this kind compared: range from all {self.runs} {others}"
        share = "eight in ten, by" if self.runs >= 9 else "all of"
        return f"{low} to {high}: {share} {self.runs} runs of this kind ({self.kind})"

    def document(self) -> dict[str, Any]:
        """For programs."""
        names = ("kind", "runs", "low", "high", "of_this_kind")
        return {name: getattr(self, name) for name in names}


def kind_of(hardware: Hardware, kernels: str, execution: Execution, model: ModelSpec) -> str:
    """The kind of a run.

    Args:
        hardware: as its file states it.
        kernels: their name.
    """
    software = "pytorch"
    if kernel_set(kernels).stacks:
        stack = execution.stack.partition("-")[0]
        software = stack if stack in {"base", *(one.name for one in hardware.stacks)} and hardware.stacks else kernels
    experts = any(getattr(getattr(layer, "mlp", None), "experts", 0) for layer in model.layers)
    shape = _shape(model, kernels)
    return f"{hardware.name}, {software}, {shape}{EXPERTS if experts else DENSE}"


def _shape(model: ModelSpec, kernels: str) -> str:
    """What makes a model another kind than the decoders that were compared; empty where it is one of them. Of layers
    that carry a state, those of Megatron alone were.
    """
    if model.two_stacks:
        return "two stacks, "
    if not model.words:
        return "images, " if model.audio is None else "sound, "
    scans = any(layer.scan is not None for layer in model.described)
    return "scans, " if scans and not kernel_set(kernels).stacks else ""


def all_like(kind: str) -> str:
    """What stands for a kind without runs: all that are dense, or all that have experts."""
    return f"all, {EXPERTS if kind.endswith(EXPERTS) else DENSE}"


def sureness(hardware: Hardware, kernels: str, execution: Execution, model: ModelSpec) -> Sureness:
    """How sure a predicted step of such a run is."""
    kind = kind_of(hardware, kernels, execution, model)
    table = _table()
    known = kind in table
    low, high, runs = table[kind if known else all_like(kind)]
    return Sureness(kind=kind, runs=runs, low=low, high=high, of_this_kind=known)


def sure_of(found: Estimate) -> Sureness:
    """How sure an estimate is."""
    return sureness(found.hardware, found.run.kernels.name, found.execution, found.run.model)


@cache
def _table() -> dict[str, tuple[float, float, int]]:
    rows = tomllib.loads(DATA.read_text(encoding="utf-8"))["kinds"]
    return {row["kind"]: (row["low"], row["high"], row["runs"]) for row in rows}
