"""The proof as a document: what a plan claimed, and what was seen when it ran. JSON of schema ``jettison.proof/1``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError
from rich.console import Group, RenderableType
from rich.text import Text

from jettison.core.documents import document, part
from jettison.core.errors import UsageError, first_problem
from jettison.core.objects import each_renamed, summary
from jettison.core.units import format_bytes, format_percent, format_ratio, format_seconds
from jettison.ledger.step_levels import StepLevels
from jettison.report.tables import alike, exact, facts, grid
from jettison.solve.plan import PlanTensor

SCHEMA: Literal["jettison.proof/1"] = "jettison.proof/1"


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerProof:
    """One layer between forward and backward: bytes that plain autograd saves, that the plan said, that were held.

    A layer that could not be recorded is not ``counted``: its bytes are 0 on all sides, and unknown. ``kept`` and, of
    these, ``offloaded`` and ``packed`` are buffers of the program with this digest, as in a plan.
    """

    layer: str
    policy: str
    baseline_bytes: int = field(metadata={"former": "plain_bytes"})
    predicted_bytes: int
    observed_bytes: int
    counted: bool = True
    digest: str = ""
    kept: tuple[int, ...] = ()
    offloaded: tuple[int, ...] = ()
    packed: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Proof:
    """Comparison of a planned model with an independent copy that trains plainly, from one state and random numbers.

    ``budget_bytes`` and ``predicted_peak_bytes`` are None where a policy was applied and not a plan. ``differences``
    says what differs, one sentence each. ``step_time_ratio``: median over interleaved rounds, with quartiles.

    Of a model that recomputes or offloads in a way of its own: ``left_out`` says what its plain copy does without,
    ``repeats`` how often its gradients were recomputed from one state, and ``departures`` names the tensors whose
    values in backward were not those of the forward, first ones first. ``left_out`` is None where Jettison's own plan
    is proven. ``values_compared``: number of tensors compared in all bits, in another step; 0 if not requested.

    ``tensors`` say in words what the layers' buffers are. ``predicted_levels`` are bytes over the plan's dry run,
    ``measured_levels`` and ``baseline_levels`` over the steps whose peaks these are; None if not measured.
    """

    gradients_identical: bool
    losses_identical: bool
    random_state_identical: bool
    buffers_identical: bool
    parameters_identical: bool
    gradients_compared: int
    differences: tuple[str, ...]
    steps: int
    budget_bytes: int | None
    predicted_peak_bytes: int | None
    measured_peak_bytes: int
    baseline_peak_bytes: int
    step_time_ratio: float
    step_time_ratio_low: float
    step_time_ratio_high: float
    baseline_step_seconds: float
    rounds: int
    layers: tuple[LayerProof, ...]
    plan_hash: str | None
    device: str
    torch_version: str
    left_out: str | None = None
    repeats: int = 0
    repeats_identical: bool = True
    departures: tuple[str, ...] = ()
    values_compared: int = 0
    values_bytes: int = 0
    tensors: tuple[PlanTensor, ...] = ()
    predicted_levels: StepLevels | None = None
    measured_levels: StepLevels | None = None
    baseline_levels: StepLevels | None = None
    environment: dict[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        bound = "" if self.budget_bytes is None else f" of a budget of {format_bytes(self.budget_bytes)}"
        verdict = f"{len(self.failures())} failed" if self.failures() else "passed"
        return summary(
            self,
            f"{verdict}, measured peak {format_bytes(self.measured_peak_bytes)}{bound}, "
            f"step time {format_ratio(self.step_time_ratio)}",
        )

    @property
    def passed(self) -> bool:
        """Bitwise identical training, and a measured peak within the budget."""
        return not self.failures()

    @property
    def saved_bytes_agree(self) -> bool:
        """Every layer held what was predicted, to the byte."""
        return all(entry.predicted_bytes == entry.observed_bytes for entry in self.layers)

    @property
    def prediction_error(self) -> float | None:
        """Predicted peak minus measured peak, as a fraction of the measured one."""
        if self.predicted_peak_bytes is None or self.measured_peak_bytes == 0:
            return None
        return (self.predicted_peak_bytes - self.measured_peak_bytes) / self.measured_peak_bytes

    def failures(self) -> tuple[str, ...]:
        """Claims that were not shown, one sentence each; empty where the proof holds."""
        claims = {
            "gradients": self.gradients_identical,
            "losses": self.losses_identical,
            "random number streams": self.random_state_identical,
            "buffers": self.buffers_identical,
            "parameters after the steps": self.parameters_identical,
        }
        found = [f"the {name} differ from those of a plain copy" for name, holds in claims.items() if not holds]
        if self.values_compared and self.departures:
            found.append("tensors in backward are not those that forward had")
        if not self.repeats_identical:
            found.append(f"{self.repeats} steps from one state and the same random numbers gave different gradients")
        if self.budget_bytes is not None and self.measured_peak_bytes > self.budget_bytes:
            peak, budget = (
                f"{format_bytes(nbytes)} ({nbytes}B)" for nbytes in (self.measured_peak_bytes, self.budget_bytes)
            )
            found.append(f"the measured peak, {peak}, is above the budget of {budget}")
        return tuple(found)

    def document(self) -> dict[str, Any]:
        """The proof as what JSON is made of."""
        names = ("baseline_bytes", "predicted_bytes", "observed_bytes")
        totals = {name: sum(getattr(entry, name) for entry in self.layers) for name in names}
        return document(SCHEMA, self, saved=part("SavedSums", **totals))

    def to_json(self) -> str:
        """The document as JSON text; `from_json` reads it back."""
        return json.dumps(self.document(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Proof:
        """Read a proof back. Raise `UsageError` if it is none of this schema, with the first wrong key."""
        try:
            TypeAdapter(_ProofHeader).validate_json(text, strict=True)
            stated = json.loads(text)
            if "layers" in stated:
                stated["layers"] = each_renamed(LayerProof, stated["layers"])
            return _adapter().validate_json(json.dumps(stated), strict=True)
        except ValidationError as error:
            raise UsageError(f"not a {SCHEMA} document: {first_problem(error)}") from error


@dataclass(frozen=True, kw_only=True)
class _ProofHeader:
    schema: Literal["jettison.proof/1"]


@cache
def _adapter() -> TypeAdapter[Proof]:
    return TypeAdapter(Proof)


def proof_table(proof: Proof) -> RenderableType:
    """Claims and what was seen, then predicted and observed bytes side by side."""
    verdict = "proven" if proof.passed else "NOT PROVEN: " + "; ".join(proof.failures())
    lines = [Text(f"  {line}") for line in (*proof.departures, *proof.differences)]
    judged = (Text(verdict, style="bold green" if proof.passed else "bold red"), *lines)
    if not proof.layers:
        return Group(facts(_facts(proof)), *judged)
    title, right = "Bytes held between forward and backward", ("plain autograd", "predicted", "observed")
    table = grid(title, ("layer", "policy"), right, last=("",))
    for names, entry in alike(proof.layers, lambda e: (e.policy, *_sides(e), e.counted)):
        agree = entry.predicted_bytes == entry.observed_bytes
        note = "not recorded" if not entry.counted else "" if agree else "differs"
        table.add_row(names, entry.policy, *map(format_bytes, _sides(entry)), note)
    total = [sum(column) for column in zip(*map(_sides, proof.layers), strict=True)]
    table.add_section()
    table.add_row("total", "", *map(format_bytes, total), "" if proof.saved_bytes_agree else "differs")
    return Group(facts(_facts(proof)), table, *judged)


def _facts(proof: Proof) -> Iterator[tuple[str, str]]:
    def same(holds: bool, more: str = "") -> str:
        return ("bitwise identical" if holds else "DIFFERENT") + (f" ({more})" if more else "")

    if proof.left_out is not None:
        yield "plain copy", proof.left_out
    yield "gradients", same(proof.gradients_identical, f"{proof.gradients_compared} tensors, {proof.steps} steps")
    yield "losses", same(proof.losses_identical)
    yield "random number streams", same(proof.random_state_identical)
    yield "buffers", same(proof.buffers_identical)
    yield "parameters afterwards", same(proof.parameters_identical)
    if proof.values_compared:
        said = f"{proof.values_compared:,} tensors came back in backward, {format_bytes(proof.values_bytes)}"
        yield "every value", same(not proof.departures, said)
    if proof.repeats:
        yield "repeated", same(proof.repeats_identical, f"{proof.repeats} times from one state")
    if proof.budget_bytes is not None:
        yield "budget", exact(proof.budget_bytes)
    if proof.predicted_peak_bytes is not None and proof.prediction_error is not None:
        yield "predicted peak", f"{exact(proof.predicted_peak_bytes)}, {proof.prediction_error:+.2%} off"
    share = format_percent(proof.measured_peak_bytes / proof.baseline_peak_bytes)
    yield "measured peak", f"{exact(proof.measured_peak_bytes)}, {share} of plain autograd's"
    yield "plain autograd's peak", exact(proof.baseline_peak_bytes)
    took = f"{format_ratio(proof.step_time_ratio)} plain autograd's {format_seconds(proof.baseline_step_seconds)}"
    low, high = f"{proof.step_time_ratio_low:.2f}", f"{proof.step_time_ratio_high:.2f}"
    yield "step time", f"{took} (quartiles {low} to {high}, {proof.rounds} rounds)"


def _sides(entry: LayerProof) -> tuple[int, int, int]:
    return entry.baseline_bytes, entry.predicted_bytes, entry.observed_bytes
