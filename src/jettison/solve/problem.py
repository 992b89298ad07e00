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

NOTE [ What is on its way ]
What an option offloads is in nobody's `resident`. The runtime (its NOTE [ When sources go, and when copies come ])
lets a region's sources go when the next region's forward is over, and brings them back when the next region's backward
begins; what the last region saves never moves. With offloaded_r counted once, whatever is in flight, the levels have

    forward of r    + offloaded_{r-1}                 its own is part of what its forward makes
    backward of r   + offloaded_r + offloaded_{r-1}
    loss, tail      nothing

Each way of a copy takes offloaded / link seconds and hides behind one pass of the next region:

    stall of r-1    max(0, offloaded_{r-1} / link - forward_seconds_r)
                    + max(0, offloaded_{r-1} / link - backward_seconds_r - what r computes again)

A segment is one region here: what the region before it sent stays beside all of it, and comes back behind all of its
backward; in forward the copy is taken to hide behind the segment's first region alone. What a segment sends itself is
its input, and counts as its last region's. A pipeline's micro-batches take
turns on the link: a stage does one pass of one micro-batch at a time, the first region has nothing before it and the
last sends nothing, so no copy reaches into another pass. Their bytes meet on the host, which is a second budget:

    sum_r copies_r * offloaded_r <= host budget
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """One tensor that goes to the host, and which argument or result of its region it is, if any: whether a result, and
    its place among them.
    """

    nbytes: int
    place: tuple[bool, int] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionOption:
    """One way to treat one region. ``key`` names it within its class; seconds are recompute added to a step.

    ``offloaded_bytes`` are of one micro-batch; ``resident_bytes`` are without them, both peaks are with them. ``sent``:
    these bytes tensor by tensor, in the order in which they go, where a stand-in has to send them.
    """

    key: str
    resident_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    seconds: float
    offloaded_bytes: int = 0
    lasting_bytes: int = 0  # of the resident ones, those that its backward does not free
    sent: tuple[Sent, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ProblemRegion:
    """One region of the chain. Regions with equal ``class_key`` have equal options.

    ``forward_seconds`` and ``backward_seconds`` are of its passes when nothing is computed again: what copies of the
    region before hide behind. ``copies``: micro-batches whose offloaded bytes are on the host at once.
    """

    name: str
    class_key: str
    options: tuple[RegionOption, ...]
    gradient_bytes: int
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    copies: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """The way to the host, in one direction, and the bytes that there are for a step; None: nobody has set a limit.

    ``hides``: copies run beside the device's work.

    Raises:
        ValueError: a rate that is not above 0, or a budget below 0.
    """

    bytes_per_second: float
    host_budget_bytes: int | None = None
    hides: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.bytes_per_second < float("inf"):
            raise ValueError(f"the link to the host has {self.bytes_per_second} bytes a second; expected more than 0")
        if self.host_budget_bytes is not None and self.host_budget_bytes < 0:
            raise ValueError(f"the host's budget is {self.host_budget_bytes} bytes; expected 0 or more")

    def stall(self, nbytes: int, beside: float) -> float:
        """Seconds that one way of a copy is waited for, with so many seconds of work beside it."""
        return max(0.0, nbytes / self.bytes_per_second - (beside if self.hides else 0.0))


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentOption:
    """One checkpoint segment over regions ``start .. stop-1``: only the first one's input is held.

    ``backward_peak_bytes[i]`` belongs to region ``start + i`` and counts what the segment computed again and still
    holds. ``offloaded_bytes`` as in `RegionOption`.
    """

    key: str
    start: int
    stop: int
    resident_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: tuple[int, ...]
    seconds: float
    offloaded_bytes: int = 0


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
        ValueError: nothing to choose from, two options of one key, a figure that is negative or missing, an option that
            offloads without a link or from the last region.
    """

    static_bytes: int
    optimizer_peak_bytes: int
    regions: tuple[ProblemRegion, ...]
    root: tuple[RootOption, ...]
    segments: tuple[SegmentOption, ...] = field(default=())
    plain_seconds: float = 0.0  # a step without recompute, for the overhead fraction; 0 where unknown
    link: Link | None = None

    def __post_init__(self) -> None:
        _check_keys("the root", [option.key for option in self.root])
        for region in self.regions:
            _check_keys(f"region {region.name!r}", [option.key for option in region.options])
            for option in region.options:
                what = f"option {option.key!r} of region {region.name!r}"
                _check_costs(what, option.resident_bytes, option.seconds)
                self._check_sent(what, option, last=region is self.regions[-1])
        for root in self.root:
            _check_costs(f"root option {root.key!r}", 0, root.seconds)
            for figures in (root.held_forward_bytes, root.held_backward_bytes):
                if len(figures) != len(self.regions):
                    raise ValueError(
                        f"root option {root.key!r} has {len(figures)} figures, {len(self.regions)} regions"
                    )
        for s in self.segments:
            _check_costs(f"segment {s.key!r}", s.resident_bytes, s.seconds)
            self._check_sent(f"segment {s.key!r}", s, last=s.stop == len(self.regions))
            if not (0 <= s.start < s.stop <= len(self.regions) and len(s.backward_peak_bytes) == s.stop - s.start):
                raise ValueError(f"segment {s.key!r} over {s.start} .. {s.stop - 1} lies outside, or misses a figure")
        if len({(s.start, s.stop, s.key) for s in self.segments}) != len(self.segments):
            raise ValueError("two segments over the same regions have the same key")

    def _check_sent(self, what: str, option: RegionOption | SegmentOption, *, last: bool) -> None:
        _check_costs(what, option.offloaded_bytes, option.seconds)
        if option.offloaded_bytes and (self.link is None or last):
            why = "there is no link" if self.link is None else "what the last region saves never moves"
            raise ValueError(f"{what} offloads {option.offloaded_bytes} bytes; {why}")


def _check_keys(owner: str, keys: list[str]) -> None:
    if not keys or len(set(keys)) != len(keys):
        raise ValueError(f"{owner} has options {keys}; expected at least one, and distinct keys")


def _check_costs(owner: str, resident_bytes: int, seconds: float) -> None:
    if resident_bytes < 0 or not 0 <= seconds < float("inf"):
        raise ValueError(f"{owner} holds {resident_bytes} bytes and takes {seconds} s; expected 0 or more of both")
