"""What the choice over a step is given: bytes and seconds of every option of every region.

NOTE [ The step's levels ]
A training step runs the root (embedding, head, loss) around a chain of regions r = 0 .. R-1. With `static` the bytes
that live all along (parameters, buffers, optimizer state, batch), and one option chosen per region and for the root,
the allocated bytes peak at the largest of

    forward of r    static + root.held_forward[r]  + sum_{q<r} resident_q + forward_peak_r
    loss            static + root.loss_peak        + sum_q resident_q
    backward of r   static + root.held_backward[r] + sum_{q<=r} resident_q + sum_{q>r} gradient_q + backward_peak_r
    tail            static + root.tail_peak        + sum_q gradient_q
    optimizer       static + optimizer_peak        (all gradients included)

`forward_peak` counts the region's input and output; `resident` counts the input only where the region holds it;
`backward_peak` counts the incoming gradient, what is computed again, and this region's own parameter gradients.
The root's figures contain its own parameters' gradients. All bytes are integers.

A segment's regions share one `resident`, which counts from its first region on; its `forward_peak` holds for each of
them on top of what the regions before the *segment* hold, so it counts the segment's own input too.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionOption:
    """One way to treat one region. ``key`` names it within its class; seconds are recompute added to a step."""

    key: str
    resident_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    seconds: float
    offloaded_bytes: int = 0
    lasting_bytes: int = 0  # of the resident ones, those that its backward does not free


@dataclass(frozen=True, kw_only=True, slots=True)
class ProblemRegion:
    """One region of the chain. Regions with equal ``class_key`` have equal options."""

    name: str
    class_key: str
    options: tuple[RegionOption, ...]
    gradient_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentOption:
    """One checkpoint segment over regions ``start .. stop-1``: only the first one's input is held.

    ``backward_peak_bytes[i]`` belongs to region ``start + i`` and counts what the segment computed again and still
    holds.
    """

    key: str
    start: int
    stop: int
    resident_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RootOption:
    """One way to treat everything around the regions; one figure a region where it is a tuple."""

    key: str
    held_forward_bytes: tuple[int, ...]
    held_backward_bytes: tuple[int, ...]
    loss_peak_bytes: int
    tail_peak_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepProblem:
    """See NOTE [ The step's levels ]. ``optimizer_peak_bytes`` is 0 where no optimizer was given.

    Raises:
        ValueError: nothing to choose from, two options of one key, a figure that is negative or missing.
    """

    static_bytes: int
    optimizer_peak_bytes: int
    regions: tuple[ProblemRegion, ...]
    root: tuple[RootOption, ...]
    segments: tuple[SegmentOption, ...] = field(default=())
    plain_seconds: float = 0.0  # a step without recompute, for the overhead fraction; 0 where unknown

    def __post_init__(self) -> None:
        _check_keys("the root", [option.key for option in self.root])
        for region in self.regions:
            _check_keys(f"region {region.name!r}", [option.key for option in region.options])
            for option in region.options:
                _check_costs(f"option {option.key!r} of region {region.name!r}", option.resident_bytes, option.seconds)
        for root in self.root:
            _check_costs(f"root option {root.key!r}", 0, root.seconds)
            for figures in (root.held_forward_bytes, root.held_backward_bytes):
                if len(figures) != len(self.regions):
                    raise ValueError(
                        f"root option {root.key!r} has {len(figures)} figures, {len(self.regions)} regions"
                    )
        for s in self.segments:
            _check_costs(f"segment {s.key!r}", s.resident_bytes, s.seconds)
            if not (0 <= s.start < s.stop <= len(self.regions) and len(s.backward_peak_bytes) == s.stop - s.start):
                raise ValueError(f"segment {s.key!r} over {s.start} .. {s.stop - 1} lies outside, or misses a figure")
        if len({(s.start, s.stop, s.key) for s in self.segments}) != len(self.segments):
            raise ValueError("two segments over the same regions have the same key")


def _check_keys(owner: str, keys: list[str]) -> None:
    if not keys or len(set(keys)) != len(keys):
        raise ValueError(f"{owner} has options {keys}; expected at least one, and distinct keys")


def _check_costs(owner: str, resident_bytes: int, seconds: float) -> None:
    if resident_bytes < 0 or not 0 <= seconds < float("inf"):
        raise ValueError(f"{owner} holds {resident_bytes} bytes and takes {seconds} s; expected 0 or more of both")
