"""The other documents: what was found, exported, trained, listed, and what went wrong."""

from __future__ import annotations

from typing import Any, Literal

from typing_extensions import TypedDict

from jettison.report.schemas.common import Finding, Request, StepLevels

Plain = int | float | str | bool
"""What is one value."""


class ErrorDocument(TypedDict):
    """In the place of the document that was asked for. ``details`` are the numbers that the message has in words."""

    schema: Literal["jettison.error/1"]
    error: str
    message: str
    exit_code: int
    details: dict[str, Plain]
    request: Request


class Slot(TypedDict):
    """One tensor that autograd saved: ``keep``, ``drop`` (computed again), ``offload``, ``pack`` or ``parameter``."""

    index: int
    path: str
    op: str
    shape: list[int]
    dtype: str
    nbytes: int
    action: str


class Region(TypedDict):
    """What a region did so far; ``fallback`` says why it runs without a recording, and is empty where it does not."""

    name: str
    word: str
    calls: int
    recordings: int
    fallback: str
    check: str
    rounded: int
    slots_kept: int
    slots_dropped: int
    slots_parameter: int
    slots_offloaded: int
    slots_packed: int
    kept_bytes: int
    host_bytes: int
    recomputed_ops: list[str]
    slots: list[Slot]


class AppliedDocument(TypedDict):
    """What a plan at work did, region by region: ``handle.report().document()``."""

    schema: Literal["jettison.applied/1"]
    regions: list[Region]


class CalibrationDocument(TypedDict):
    """What this machine reaches; ``hardware`` is what a TOML file for ``--gpu`` would say."""

    schema: Literal["jettison.calibration/1"]
    hardware: dict[str, Any]
    took_seconds: float
    products: list[dict[str, Any]]
    request: Request | None


DoctorDocument = TypedDict(
    "DoctorDocument",
    {
        "schema": Literal["jettison.doctor/1"],
        "python": str,
        "platform": str,
        "jettison": str,
        "torch": str,
        "transformers": str,
        "numpy": str,
        "pydantic": str,
        "cyclopts": str,
        "rich": str,
        "highspy": str,
        "cpu cores": str,
        "memory": "str | None",
        "accelerators": "str | None",
        "facts": dict[str, str],
        "request": "Request | None",
    },
)
DoctorDocument.__doc__ = "Versions and devices. ``facts`` has all by name, environment variables included."


class HazardSighting(TypedDict):
    """A way to be silently wrong that was seen in a block; ``now``: it is at work in the step that was watched."""

    hazard: str
    block: str
    what: str
    now: bool


class HazardsDocument(TypedDict):
    """Ways of a model to be silently wrong under recompute, seen in one step of it."""

    schema: Literal["jettison.doctor_model/1"]
    model: str
    hazards: list[HazardSighting]
    findings: list[Finding]
    request: Request | None


class Cost(TypedDict):
    """Of a step: bytes that layers keep, its peak, bytes held for backward, and what is computed again."""

    layer_bytes: int
    peak_bytes: int
    held_bytes: int | None
    recompute_flops: int
    recompute_seconds: float
    step_seconds: float | None
    host_bytes: int


class Costs(TypedDict):
    """The plan's own, and those of what was exported."""

    plan: Cost
    exported: Cost


class Alternative(TypedDict):
    """Something else that the target could be told."""

    words: str
    layer_bytes: int
    peak_bytes: int
    held_bytes: int | None
    recompute_flops: int
    recompute_seconds: float
    step_seconds: float | None
    host_bytes: int


class ExportLayer(TypedDict):
    """A layer in the plan and in what was exported."""

    layer: str
    stage: int
    plan: str
    exported: str
    plan_kept_bytes: int
    kept_bytes: int
    saves: list[str]
    recompute_flops: int


class ExportDocument(TypedDict):
    """A plan in another trainer's words: its files, what is lost, and what that costs."""

    schema: Literal["jettison.export/1"]
    target: str
    checked_with: str
    model: str
    plan_hash: str
    budget_bytes: int
    exact: bool
    lost: list[str]
    notes: list[str]
    warnings: list[str]
    cost: Costs
    alternatives: list[Alternative]
    hardware: str
    layers: list[ExportLayer]
    files: dict[str, str]
    request: Request | None


class ListedModel(TypedDict):
    """A preset."""

    name: str
    parameters: int
    layers: int
    hidden: int


class ListedGpu(TypedDict):
    """An accelerator, and where its figures come from. Rates are per second; null: not stated."""

    name: str
    memory_bytes: int
    usable_bytes: int
    bf16_flops_per_second: int | None
    memory_bytes_per_second: int | None
    link_bytes_per_second: int | None
    source: str
    usable_source: str
    reached_source: str


class ListedPrecision(TypedDict):
    """Types of a word of ``--precision``."""

    name: str
    compute: str
    weights: str
    gradients: str
    accumulator: str | None
    master: str | None
    moments: str | None
    products: str | None


class ListedWord(TypedDict):
    """A word and what it means."""

    name: str
    meaning: str


class ListDocument(TypedDict):
    """Names that commands take; kinds that nobody asked for are null."""

    schema: Literal["jettison.list/1"]
    models: list[ListedModel] | None
    gpus: list[ListedGpu] | None
    precisions: list[ListedPrecision] | None
    policies: list[ListedWord] | None
    optimizers: list[ListedWord] | None
    targets: list[ListedWord] | None
    request: Request | None


class OomHolder(TypedDict):
    """Who holds bytes of the device; together all of them are its capacity."""

    holder: str
    bytes: int


class OomDocument(TypedDict):
    """Why memory ran out; bytes that a file does not say are null."""

    schema: Literal["jettison.oom/1"]
    cause: str
    phase: str
    site: str
    source: str
    failed: bool
    asked_bytes: int | None
    allocated_bytes: int | None
    unused_bytes: int | None
    free_bytes: int | None
    total_bytes: int | None
    expandable: bool | None
    device: str
    trainer: str
    holders: list[OomHolder]
    findings: list[Finding]
    request: Request | None


class ProfiledTrace(TypedDict):
    """A step in the mean of the steady ones of a trace."""

    name: str
    steps: int
    step_seconds: float
    busy_fraction: float
    phase_seconds: dict[str, float]
    phase_peak_bytes: dict[str, int]
    communication_seconds: float
    exposed_communication_seconds: float
    recompute_seconds: float
    flops: int
    recompute_flops: int
    mfu: float | None
    hfu: float | None
    kernels: int


class ProfiledSnapshot(TypedDict):
    """A memory snapshot in short."""

    name: str
    peak_bytes: int
    steps: int


class ProfileDocument(TypedDict):
    """Where time and memory of a step go, and what would mend it."""

    schema: Literal["jettison.profile/1"]
    trace: ProfiledTrace | None
    snapshot: ProfiledSnapshot | None
    findings: list[Finding]
    request: Request | None


class ReportDocument(TypedDict):
    """Plans, proofs and runs as they are shown: each of ``subjects`` has facts, amounts, phases, layers and grids."""

    schema: Literal["jettison.report/1"]
    subjects: list[dict[str, Any]]
    request: Request | None


class RunDocument(TypedDict):
    """What a training run came to. Peaks are of the rank where they are highest; null: not measured."""

    schema: Literal["jettison.run/1"]
    step: int
    steps: int
    resumed_step: int
    stopped: str | None
    first_loss: float | None
    last_loss: float | None
    step_seconds: float | None
    tokens_per_second: float | None
    mfu: float | None
    hfu: float | None
    predicted_peak_bytes: int | None
    budget: str | None
    log: str
    checkpoint: str | None
    skipped_steps: int
    export: str | None
    eval_loss: float | None
    eval_perplexity: float | None
    eval_peak_bytes: int | None
    levels: StepLevels | None
    report: str | None
    first_step_peak_bytes: dict[str, int] | None
    second_step_peak_bytes: dict[str, int] | None
    later_peak_bytes: dict[str, int] | None
    request: Request | None


class WeightsDocument(TypedDict):
    """Weights of a run's newest checkpoint, and the folder that they were written to."""

    schema: Literal["jettison.weights/1"]
    step: int
    export: str
    request: Request | None


class PeakPart(TypedDict):
    """What of a peak is one module's, in one role."""

    module: str
    role: str
    bytes: int
    count: int


class SnapshotDevice(TypedDict):
    """One device of a memory snapshot."""

    device: int
    events: int
    allocations: int
    complete: bool
    peak_bytes: int
    peak_event: int
    end_bytes: int
    reserved_bytes: int
    segments: int
    peak_roles: dict[str, int]
    peak: list[PeakPart]


class OtherSnapshot(TypedDict):
    """The one that it is held against."""

    name: str
    devices: list[SnapshotDevice]


class SnapshotChange(TypedDict):
    """What is at one peak and not at the other."""

    module: str
    role: str
    before_bytes: int
    after_bytes: int
    before_count: int
    after_count: int
    change: str


class SnapshotDocument(TypedDict):
    """A CUDA memory snapshot; with two of them, what changed at the peak."""

    schema: Literal["jettison.snapshot/1"]
    name: str
    devices: list[SnapshotDevice]
    other: OtherSnapshot | None
    changes: list[SnapshotChange] | None
    request: Request | None
