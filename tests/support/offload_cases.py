"""Random chains of small regions under all three actions, and brute force over them by code of its own."""

import random
from dataclasses import dataclass
from itertools import product

from hypothesis import strategies as st

from jettison.ledger.program import Program
from jettison.solve.offload_options import action_points
from jettison.solve.problem import Link, ProblemRegion, RegionOption, RootOption, StepProblem
from support.plan_cases import MIB, MILLISECOND, programs

Costs = tuple[int, int, float, int, int]
"""Bytes on the device, bytes on the host, seconds, and both peaks."""


@dataclass(frozen=True, kw_only=True)
class Region:
    """One region: its program, what its passes take, how much is beside it."""

    program: Program
    seconds: tuple[float, ...]
    movable: frozenset[int]
    forward: float
    backward: float
    copies: int
    gradient: int
    beside: int

    def peaks(self, stays: frozenset[int]) -> tuple[int, int]:
        """Of a forward that makes what stays, and of a backward in which all that runs again is there at once."""
        again = self.program.recompute_set(stays)
        made = {b for o in again for b in self.program.ops[o].outputs}
        fresh = sum(self.program.buffers[b].nbytes for b in made - stays)
        return self.program.kept_bytes(stays) + self.beside, fresh + self.beside


@dataclass(frozen=True, kw_only=True)
class Case:
    """A chain, its link and its problem as the solver has it."""

    regions: tuple[Region, ...]
    link: Link
    static: int

    @property
    def problem(self) -> StepProblem:
        """With every undominated point of every region."""
        count = len(self.regions)
        zeros = (0,) * count
        root = RootOption(
            key="",
            held_forward_bytes=zeros,
            held_backward_bytes=zeros,
            loss_peak_bytes=3,
            tail_peak_bytes=5,
            seconds=0.0,
        )
        return StepProblem(
            static_bytes=self.static,
            optimizer_peak_bytes=0,
            regions=tuple(self._region(r) for r in range(count)),
            root=(root,),
            link=self.link,
        )

    def _region(self, r: int) -> ProblemRegion:
        region = self.regions[r]
        last = r == len(self.regions) - 1
        points = action_points(
            region.program,
            region.seconds,
            movable=frozenset() if last else region.movable,
            kinks=(),
            peaks=region.peaks,
        )
        return ProblemRegion(
            name=f"layers.{r}",
            class_key=f"{r}",
            options=tuple(
                RegionOption(
                    key=p.key,
                    resident_bytes=region.copies * p.kept_bytes,
                    forward_peak_bytes=region.peaks(p.kept)[0],
                    backward_peak_bytes=region.peaks(p.kept)[1],
                    seconds=p.seconds,
                    offloaded_bytes=p.offloaded_bytes,
                )
                for p in points
            ),
            gradient_bytes=region.gradient,
            forward_seconds=region.forward,
            backward_seconds=region.backward,
            copies=region.copies,
        )


@st.composite
def cases(draw: st.DrawFn, *, regions: int = 7, tensors: int = 10, host: bool = True) -> Case:
    """Up to so many regions of up to so many buffers that could stay; copies take about as long as passes."""
    count = draw(st.integers(1, regions) | st.integers(2, regions))
    kinds = [draw(_regions(tensors)) for _ in range(draw(st.integers(1, count)))]
    budget = draw(st.none() | st.integers(0, 15 * count) | st.integers(0, 60 * count)) if host else None
    rate = draw(st.sampled_from([500.0, 2000.0, 8000.0, 1e6]))
    return Case(
        regions=tuple(draw(st.sampled_from(kinds)) for _ in range(count)),
        link=Link(
            bytes_per_second=rate, host_budget_bytes=budget, hides=draw(st.sampled_from([True, True, True, False]))
        ),
        static=draw(st.integers(0, 20)),
    )


@st.composite
def _regions(draw: st.DrawFn, tensors: int) -> Region:
    program, seconds = draw(programs(max_ops=draw(st.sampled_from([2, 3, 5, 10, 10])), most=tensors, grain=5))
    could_stay = [b.index for b in program.buffers if b.keepable and not b.free]
    fixed = draw(st.sets(st.sampled_from(could_stay), max_size=2))
    times = st.integers(0, 30).map(lambda n: n * MILLISECOND)
    return Region(
        program=program,
        seconds=seconds,
        movable=frozenset(could_stay) - fixed,
        forward=draw(times),
        backward=draw(times),
        copies=draw(st.sampled_from([1, 1, 2, 4])),
        gradient=draw(st.integers(0, 10)),
        beside=draw(st.integers(0, 20)),
    )


def fastest(case: Case, budget: int) -> float | None:
    """Seconds of the fastest plan within both budgets, or None: every action of every buffer of every region."""
    states: dict[tuple[int, int, int], float] = {(0, 0, 0): 0.0}
    later = sum(region.gradient for region in case.regions)
    for r, region in enumerate(case.regions):
        later -= region.gradient
        following = case.regions[r + 1] if r + 1 < len(case.regions) else None
        found: dict[tuple[int, int, int], float] = {}
        for (held, sent, host), spent in states.items():
            for kept, moved, seconds, forward, backward in _options(region, last=following is None):
                after = held + region.copies * kept
                taken = host + region.copies * moved
                level = case.static + sent + max(held + forward, after + moved + later + backward)
                limit = case.link.host_budget_bytes
                if level > budget or (limit is not None and taken > limit):
                    continue
                waited = _wait(case, sent, region.backward + seconds)
                if following is not None:
                    waited += _wait(case, moved, following.forward)
                state, total = (after, moved, taken if limit is not None else 0), spent + seconds + waited
                if total < found.get(state, float("inf")):
                    found[state] = total
        states = found
    tail = case.static + 5 + sum(region.gradient for region in case.regions)
    fitting = [spent for (held, _, _), spent in states.items() if case.static + held + 3 <= budget]
    return min(fitting) if fitting and tail <= budget else None


def _wait(case: Case, nbytes: int, beside: float) -> float:
    return max(0.0, nbytes / case.link.bytes_per_second - (beside if case.link.hides else 0.0))


_known: dict[tuple[Region, bool], list[Costs]] = {}


def _options(region: Region, *, last: bool) -> list[Costs]:
    """Every way to treat every buffer, equal ones once."""
    if (region, last) not in _known:
        could_stay = [b.index for b in region.program.buffers if b.keepable and not b.free]
        fixed = [last or b not in region.movable for b in could_stay]
        ways = ["keep recompute" if stuck else "keep recompute send" for stuck in fixed]
        found: dict[Costs, None] = {}
        for actions in product(*(way.split() for way in ways)):
            costs = _costs(region, dict(zip(could_stay, actions, strict=True)))
            if costs is not None:
                found[costs] = None
        _known[region, last] = list(found)
    return _known[region, last]


def _costs(region: Region, actions: dict[int, str]) -> Costs | None:
    stays = frozenset(b for b, action in actions.items() if action != "recompute")
    try:
        again = region.program.recompute_set(stays)
    except ValueError:
        return None
    size = dict.fromkeys(("keep", "send", "recompute"), 0)
    for b, action in actions.items():
        size[action] += region.program.buffers[b].nbytes
    return size["keep"], size["send"], sum(region.seconds[o] for o in again), *region.peaks(stays)


def deep_offload(*, same: bool, count: int = 128, copies: int = 4, host_gib: int | None = None) -> StepProblem:
    """A deep stage: up to 2 GB a layer, of which a part may move over 25 or 40 GB/s; 17 options a layer."""
    rng = random.Random(11)

    def options(last: bool) -> tuple[RegionOption, ...]:
        everything, seconds = rng.randrange(300 * MIB, 2000 * MIB), rng.uniform(5e-3, 20e-3)
        curve = rng.uniform(1.2, 3.0)
        found = []
        for stays in (1.0, 0.75, 0.5, 0.25, 0.05):
            for sent in (0.0,) if last or stays < 0.1 else (0.0, 0.3, 0.6, 0.95):
                total, moved = int(everything * stays), int(everything * stays * sent)
                found.append(
                    RegionOption(
                        key=f"{stays}-{sent}",
                        resident_bytes=copies * (total - moved),
                        forward_peak_bytes=total + rng.randrange(50 * MIB, 100 * MIB),
                        backward_peak_bytes=everything - total + rng.randrange(50 * MIB, 200 * MIB),
                        seconds=seconds * (1 - stays) ** curve,
                        offloaded_bytes=moved,
                    )
                )
        return tuple(found)

    shared = options(False)
    regions = tuple(
        ProblemRegion(
            name=f"layers.{r}",
            class_key="block" if same and r < count - 1 else f"block{r}",
            options=(tuple(o for o in shared if not o.offloaded_bytes) if same else options(True))
            if r == count - 1
            else (shared if same else options(False)),
            gradient_bytes=0,
            forward_seconds=0.015 if same else rng.uniform(0.005, 0.02),
            backward_seconds=0.03 if same else rng.uniform(0.01, 0.04),
            copies=copies,
        )
        for r in range(count)
    )
    zeros = (0,) * count
    root = RootOption(
        key="",
        held_forward_bytes=zeros,
        held_backward_bytes=zeros,
        loss_peak_bytes=4 << 30,
        tail_peak_bytes=1 << 30,
        seconds=0.0,
    )
    return StepProblem(
        static_bytes=20 << 30,
        optimizer_peak_bytes=0,
        regions=regions,
        root=(root,),
        plain_seconds=sum(region.forward_seconds + region.backward_seconds for region in regions),
        link=Link(
            bytes_per_second=25e9 if same else 40e9, host_budget_bytes=None if host_gib is None else host_gib << 30
        ),
    )
