"""Documents about runs that a description or a trace says all of: ledgers, estimates, searches."""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict

from jettison.report.schemas.common import Breakdown, Layout, Request

Comparison = TypedDict("Comparison", {"with": str, "equal": bool, "differences": "list[Difference]"})
"""With another ledger's file."""


class Difference(TypedDict):
    """One tensor that two ledgers do not have alike."""

    layer: str
    kind: str
    delta_bytes: int
    text: str


class HostStates(TypedDict):
    """Of the worst rank: the optimizer's bytes in the host's memory, and those of a step over the link."""

    host_bytes: int
    to_host_bytes: int
    to_device_bytes: int


class LedgerLayer(TypedDict):
    """What one layer saves for backward, in one micro-batch on one rank; ``policy`` is null where nobody says."""

    layer: str
    bytes: int
    tensors: int
    stage: int
    policy: str | None


class LedgerStage(TypedDict):
    """What a pipeline stage allocates on one rank; ``in_flight`` micro-batches are between forward and backward."""

    stage: int
    layers: list[str]
    in_flight: int
    activation_bytes: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    peak_bytes: int
    first_step_peak_bytes: int | None
    peak_phase: str | None
    peak_where: str | None


class LedgerPhase(TypedDict):
    """Peak of a phase of a step on the worst stage, or of one region in it."""

    phase: str
    peak_bytes: int
    where: str | None
    stage: int
    micro_batch: int | None
    first_step_peak_bytes: int | None


class Entry(TypedDict):
    """One saved tensor. Entries of one ``storage`` share their bytes; ``anchor`` says why it may not run again."""

    layer: str
    path: str
    op: str
    role: str
    shape: list[int]
    dtype: str
    storage: str
    storage_bytes: int
    origin: str
    placement: dict[str, int]
    recompute_flops: int | None
    recompute_bytes_moved: int | None
    inputs: list[str]
    anchor: str | None
    reference: str
    local_bytes: int
    local_storage_bytes: int


class Allowance(TypedDict):
    """What the device holds beside tensors: context, communicators, workspace, fragments."""

    low_bytes: int
    expected_bytes: int
    high_bytes: int


class Edge(TypedDict):
    """The last value that fits and the next that does not, each with its peak."""

    value: int | None
    peak_bytes: int | None
    beyond: int | None
    beyond_peak_bytes: int | None


class Fit(TypedDict):
    """What would fit, one thing changed at a time."""

    fits: bool
    budget_bytes: int
    peak_bytes: int
    seq_step: int
    micro_batch: Edge
    seq: Edge
    tp: Edge
    zero: Edge


class Share(TypedDict):
    """A part of a whole."""

    name: str
    nbytes: int
    fraction: float


class Core(TypedDict):
    """The attention core's part of a layer; ``crossover`` is the sequence from which on it outweighs the rest."""

    saved_bytes: int
    layer_bytes: int
    flops: int
    layer_flops: int
    crossover: int | None


class Variant(TypedDict):
    """The run with one thing changed."""

    change: str
    current: bool
    peak_bytes: int
    layer_bytes: int
    activation_bytes: int
    recompute_flops: int
    of_forward: float
    of_step: float


class Remark(TypedDict):
    """Something that a run does in vain, or that its user should know."""

    code: str
    text: str


class Explained(TypedDict):
    """What the peak of the worst stage is made of."""

    stage: int
    peak_bytes: int
    phase: str
    where: str
    in_flight: int
    parts: list[Share]
    roles: list[Share]
    core: Core
    recompute: list[Variant]
    sequence_parallelism: list[Variant]
    sharding: list[Variant]
    remarks: list[Remark]
    sentences: list[str]


class Auto(TypedDict):
    """What a planner chose, where recompute was left to it."""

    minimum_budget_bytes: int
    recompute_seconds: float
    stalled_seconds: float | None
    host_bytes: int | None
    gap: float


class LedgerDocument(TypedDict):
    """What a training run needs: bytes of each stage over a step, and the tensors that it saves for backward.

    ``request`` is the run as it was understood, with its defaults; ``assumed`` in it names what nobody asked for.
    ``layers[].bytes`` are of one micro-batch on one rank; ``peak_bytes`` is what the worst rank allocates.
    """

    schema: Literal["jettison.ledger/1"]
    model: str
    recompute: str
    request: Request
    parameters: int
    layers: list[LedgerLayer]
    stages: list[LedgerStage]
    peak_bytes: int
    first_step_peak_bytes: int | None
    worst_stage: int | None
    phases: list[LedgerPhase]
    allowance: Allowance | None
    host_states: HostStates | None
    budget_bytes: int | None
    fits: bool | None
    gpu: str | None
    usable_bytes: int | None
    auto: Auto | None
    fit: Fit | None
    explain: Explained | None
    compare: Comparison | None
    warnings: list[str]
    entries: list[Entry] | None


class EstimateStage(TypedDict):
    """Seconds of one pipeline stage: of one micro-batch forward, backward and of it again; of a step the others."""

    stage: int
    busy_seconds: float
    bubble_seconds: float
    forward_seconds: float
    backward_seconds: float
    recompute_seconds: float
    end_seconds: float
    optimizer_seconds: float


class KindSeconds(TypedDict):
    """Seconds of one kind of kernels."""

    kind: str
    seconds: float


class Option(TypedDict):
    """The run under one way of keeping or not keeping activations."""

    recompute: str
    current: bool
    step_seconds: float
    peak_bytes: int
    fits: bool
    mfu: float


class HostLink(TypedDict):
    """A link to the host, in one direction."""

    name: str
    bytes_per_second: int


class Trade(TypedDict):
    """One saved tensor of a layer: computed again, or moved."""

    role: str
    path: str
    nbytes: int
    again_seconds: float | None
    moved_seconds: float | None
    break_even_bytes_per_second: float | None
    links: list[str]


class Way(TypedDict):
    """All that a layer saves over one link."""

    link: HostLink
    one_way_seconds: float
    hides: bool
    quicker: bool


class Offloaded(TypedDict):
    """All that a layer saves: sent away and fetched back, or computed again."""

    layer_bytes: int
    one_way_seconds: float
    forward_seconds: float
    backward_seconds: float
    again_seconds: float
    ways: list[Way]
    hides: bool
    break_even_bytes_per_second: float


class Sureness(TypedDict):
    """Measured over predicted seconds of published runs, from low to high; of the run's kind where
    ``of_this_kind``, else of all dense ones or of all with experts."""

    kind: str
    runs: int
    low: float
    high: float
    of_this_kind: bool


class Training(TypedDict):
    """What so many tokens take; ranges have a low and a high end, and the price is in the money of an hour's."""

    tokens: float
    gpus: int
    steps: int
    days: float
    days_range: list[float]
    gpu_hours: float
    gpu_hours_range: list[float]
    price_per_gpu_hour: float | None
    price: float | None
    price_range: list[float] | None


class EstimateDocument(TypedDict):
    """What a step of a described run takes. Seconds are of one step on the busiest stage, bytes of the worst rank.

    ``kinds`` to ``sentences`` are there with ``--explain``.
    """

    schema: Literal["jettison.estimate/1"]
    model: str
    request: Request
    gpu: str
    gpus: int
    recompute: str
    whole_micro_batches: int
    fusion: str
    stack: str
    step_seconds: float
    step_range_seconds: list[float]
    sureness: Sureness
    training: Training | None
    tokens_per_second_per_gpu: float
    mfu: float
    hfu: float
    mfu_by: dict[str, float]
    model_flops: float
    hardware_flops: float
    breakdown: Breakdown
    busiest_stage: int
    stages: list[EstimateStage]
    peak_bytes: int
    host_states: HostStates | None
    available_bytes: int
    fits: bool
    reached: dict[str, float]
    reached_source: str
    warnings: list[str]
    kinds: list[KindSeconds] | None
    options: list[Option] | None
    links: list[HostLink] | None
    trades: list[Trade] | None
    offload: Offloaded | None
    sentences: list[str] | None


class CandidatePlan(TypedDict):
    """A candidate's recompute: a word, or a planner's choice under ``budget_bytes`` in words for each of ``stages``."""

    recompute: str
    offload: bool
    offload_modules: list[str]
    whole_micro_batches: int | None
    budget_bytes: int | None
    stages: list[str] | None


class Candidate(TypedDict):
    """One layout, batch and plan. Seconds are null of what does not fit; ``flags`` can be given to other commands."""

    layout: Layout
    micro_batch: int
    micro_batches: int
    plan: CandidatePlan
    peak_bytes: int
    available_bytes: int
    fits: bool
    flags: str
    host_bytes: int | None
    step_seconds: float | None
    step_range_seconds: list[float] | None
    mfu: float | None
    tokens_per_second_per_gpu: float | None
    breakdown: Breakdown | None


class Loss(TypedDict):
    """What a rival takes more than the best."""

    flags: str
    lost_seconds: float
    more: Breakdown
    words: str


class More(TypedDict):
    """What more memory, or more devices, would buy; ``memory`` is a factor."""

    gpus: int
    memory: float
    saved_seconds: float
    candidate: Candidate


class Space(TypedDict):
    """How much was searched."""

    layouts: int
    candidates: int


class SearchDocument(TypedDict):
    """The fastest layout, batch and plan that fit; where nothing does, ``closest`` is what lacks least."""

    schema: Literal["jettison.search/1"]
    model: str
    request: Request
    gpus: int
    gpu: str
    global_batch: int | None
    seq: int | None
    precision: str | None
    optimizer: str | None
    kernels: str | None
    attention: str | None
    space: Space | None
    margin: float | None
    warnings: list[str] | None
    feasible: bool
    sureness: Sureness | None
    trainings: list[Training] | None
    candidates: list[Candidate]
    front: list[Candidate] | None
    front_reach: float | None
    runner_up: list[Loss] | None
    without_recompute: Candidate | None
    more_memory: More | None
    more_gpus: More | None
    explanation: list[str] | None
    evaluated: int | None
    seconds: float | None
    closest: Candidate | None
    lacks_bytes: int | None
