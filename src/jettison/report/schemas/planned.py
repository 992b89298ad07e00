"""Documents of plans and of their proofs."""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict

from jettison.report.schemas.common import Request, StepLevels, Tensor


class Predicted(TypedDict):
    """Of a step. ``stalled_seconds`` are waited for copies; null where the plan is of a live model. ``composed``: the
    peak was put together from dry runs of other plans; null where the plan is of a described one.
    """

    peak_bytes: int
    step_seconds: float
    overhead_fraction: float
    host_bytes: int
    stalled_seconds: float | None
    composed: bool | None


class Solver(TypedDict):
    """Share of the step that a better plan could still save, at most, and how long it took to know."""

    gap: float
    seconds: float


class PlanLayer(TypedDict):
    """What one layer does with one micro-batch on one rank.

    ``stage`` is a described plan's; ``digest`` to ``price`` are a live model's: which program, and which of its buffers
    are kept and, of these, offloaded and packed.
    """

    layer: str
    policy: str
    kept_bytes: int
    offloaded_bytes: int
    recompute_flops: int
    stage: int | None
    digest: str | None
    option: str | None
    kept: list[int] | None
    offloaded: list[int] | None
    packed: list[int] | None
    price: float | None


class PlanStage(TypedDict):
    """A pipeline stage's peak, and its micro-batches between forward and backward."""

    stage: int
    peak_bytes: int
    in_flight: int


class Reason(TypedDict):
    """Why a layer does what it does: what is computed again and what moves, and what that takes."""

    layer: str
    again: list[str]
    freed_bytes: int
    again_seconds: float
    moved: list[str]
    moved_bytes: int
    way_seconds: float
    forward_seconds: float
    backward_seconds: float


class Flip(TypedDict):
    """A kind of tensors that changes its place."""

    tensor: str
    before: str
    after: str
    layers: list[str]
    nbytes: int


class NextGiB(TypedDict):
    """What a larger budget would change."""

    budget_bytes: int
    peak_bytes: int
    step_seconds: float
    saved_seconds: float
    host_bytes: int
    flips: list[Flip]


class PlanDocument(TypedDict):
    """What to do with each saved tensor so that a step stays below a budget.

    ``made_from`` says of what: ``trace``, a live model's, which can be applied to it, or ``description``. Where nothing
    fits, ``feasible`` is false, ``minimum_budget_bytes`` would do, and ``reason`` says what takes the bytes. A live
    plan's ``model`` is a fingerprint; what it was made for is under ``made_by``. The hash covers the decisions.
    """

    schema: Literal["jettison.plan/1"]
    made_from: Literal["trace", "description"] | None
    feasible: bool
    model: str | None
    budget_bytes: int
    minimum_budget_bytes: int
    reason: str | None
    predicted: Predicted | None
    solver: Solver | None
    layers: list[PlanLayer] | None
    root: PlanLayer | None
    segments: list[list[str]] | None
    torch_version: str | None
    gradients_held: bool | None
    chunked_loss: bool | None
    offload: bool | None
    host_budget_bytes: int | None
    whole_micro_batches: int | None
    hardware: str | None
    stages: list[PlanStage] | None
    reasons: list[Reason] | None
    warnings: list[str] | None
    what_if: list[NextGiB] | None
    tensors: list[Tensor] | None
    levels: StepLevels | None
    made_by: Request | None
    request: Request | None
    environment: dict[str, str] | None
    hash: str | None


class ProofLayer(TypedDict):
    """Bytes between forward and backward: that plain autograd saves, that the plan said, that were held."""

    layer: str
    policy: str
    plain_bytes: int
    predicted_bytes: int
    observed_bytes: int
    counted: bool
    digest: str
    kept: list[int]
    offloaded: list[int]
    packed: list[int]


class Saved(TypedDict):
    """Sums over the layers."""

    plain_bytes: int
    predicted_bytes: int
    observed_bytes: int


class ProofDocument(TypedDict):
    """A planned model beside an independent copy that trains plainly: what was claimed, and what was seen."""

    schema: Literal["jettison.proof/1"]
    passed: bool
    gradients_identical: bool
    losses_identical: bool
    random_state_identical: bool
    buffers_identical: bool
    parameters_identical: bool
    gradients_compared: int
    differences: list[str]
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
    layers: list[ProofLayer]
    plan_hash: str | None
    device: str
    torch_version: str
    left_out: str | None
    repeats: int
    repeats_identical: bool
    departures: list[str]
    values_compared: int
    values_bytes: int
    tensors: list[Tensor]
    predicted_levels: StepLevels | None
    measured_levels: StepLevels | None
    baseline_levels: StepLevels | None
    environment: dict[str, str]
    saved: Saved
    request: Request | None
