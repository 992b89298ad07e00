"""What is said of the peak of a run: figures, of which `explain.remarks` makes words."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """Bytes of a part, and the fraction that they are of the whole."""

    name: str
    nbytes: int
    fraction: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Core:
    """The attention core (scores, softmax, their product with the values) in the most frequent layer, on one rank.

    Args:
        saved_bytes: of it for one micro-batch; 0 with fused attention, which stores no scores.
        layer_bytes: of the layer, without recompute.
        flops: of its two products in one forward.
        layer_flops: of the layer's forward.
        crossover: the shortest sequence at which its bytes are more than those of the rest of the layer; None: never.
    """

    saved_bytes: int
    layer_bytes: int
    flops: int
    layer_flops: int
    crossover: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """The run with one thing changed.

    Args:
        change: as it is typed.
        current: it is the run as it is.
        layer_bytes: of the layer that saves most for one micro-batch.
        activation_bytes: held between forwards and backwards on the worst stage, at most.
        recompute_flops: of matrix products, for one micro-batch through the whole model on one rank of each stage.
            Only what backward needs is computed again, which may be less than the forward of a layer.
        of_forward: the same as a share of a forward's FLOPs; ``of_step`` of a forward's and a backward's.
    """

    change: str
    current: bool
    peak_bytes: int
    layer_bytes: int
    activation_bytes: int
    recompute_flops: int
    of_forward: float
    of_step: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Remark:
    """Something that a run does in vain, or that its user should know."""

    code: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """Of the worst stage of a forecast; see the classes of the fields.

    Args:
        parts: of the peak; their bytes add up to it.
        roles: of what one micro-batch leaves on the worst stage for its backward, largest first, each storage once.
        sequence_parallelism: off and on; empty without tensor parallelism.
        sharding: ZeRO 1 and 3; empty where there is one data-parallel rank.
    """

    stage: int
    peak_bytes: int
    phase: str
    where: str
    in_flight: int
    parts: tuple[Share, ...]
    roles: tuple[Share, ...]
    core: Core
    recompute: tuple[Variant, ...]
    sequence_parallelism: tuple[Variant, ...]
    sharding: tuple[Variant, ...]
    remarks: tuple[Remark, ...]
    sentences: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)
