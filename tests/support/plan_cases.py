"""Random small programs and step problems for the plan room's tests, and brute force over them."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, combinations, product

from hypothesis import strategies as st

from jettison.ledger.program import Anchor, Buffer, Op, Program, Slot, Source
from jettison.solve.problem import Choice, ProblemRegion, RegionOption, RootOption, SegmentOption, StepProblem, evaluate

MILLISECOND = 1e-3
MIB = 1 << 20


@st.composite
def programs(draw: st.DrawFn, *, max_ops: int = 7, most: int = 7, grain: int = 1) -> tuple[Program, tuple[float, ...]]:
    """A region that can be planned, with what each op takes.

    At most ``max_ops`` ops and ``most`` keepable buffers, whose bytes are multiples of ``grain``.
    """
    size = st.integers(0, 40 // grain).map(lambda n: n * grain)
    buffers = [Buffer(index=0, nbytes=draw(size), source=Source.INPUT, keepable=True)]
    buffers.append(Buffer(index=1, nbytes=16, source=Source.PARAMETER, name="w", free=True))
    ops: list[Op] = []
    available = {0, 1}
    slots: list[int] = []
    keepable = 1
    for o in range(draw(st.integers(1, max_ops))):
        inputs = draw(st.sets(st.integers(0, len(buffers) - 1), min_size=1, max_size=3))
        anchor = draw(st.sampled_from([None, None, None, None, Anchor.OPAQUE]))
        outputs = []
        for _ in range(draw(st.sampled_from([1, 1, 1, 2]))):
            b = len(buffers)
            keep = keepable < most and draw(st.booleans())
            keepable += keep
            nbytes = draw(size)
            buffers.append(Buffer(index=b, nbytes=nbytes, source=Source.OP, producer=o, keepable=keep))
            if keep or (anchor is None and inputs <= available):
                available.add(b)
            outputs.append(b)
        ops.append(
            Op(index=o, name="op", inputs=tuple(inputs), outputs=tuple(outputs), flops=1, bytes_moved=1, anchor=anchor)
        )
        slots += [b for b in outputs if buffers[b].keepable and draw(st.booleans())]
    slots += [0] * draw(st.integers(0, 1))
    seconds = tuple(draw(st.integers(0, 30)) * MILLISECOND for _ in ops)
    saved = tuple(Slot(index=i, buffer=b, shape=(1,), dtype="float32") for i, b in enumerate(slots))
    return Program(buffers=tuple(buffers), ops=tuple(ops), slots=saved), seconds


def all_kept_sets(program: Program) -> Iterator[tuple[frozenset[int], tuple[int, ...]]]:
    """Every set of buffers that can be kept, with the ops that then run again."""
    candidates = [b.index for b in program.buffers if b.keepable and not b.free]
    for kept in chain.from_iterable(combinations(candidates, n) for n in range(len(candidates) + 1)):
        try:
            yield frozenset(kept), program.recompute_set(frozenset(kept))
        except ValueError:
            continue  # something needed can neither be had nor computed


@st.composite
def step_problems(draw: st.DrawFn, *, plain_seconds: float = 0.0) -> StepProblem:
    """Up to five regions of up to three options, up to three segments, up to two root options."""
    count = draw(st.integers(0, 5))
    size = st.integers(0, 30)
    seconds = st.integers(0, 20).map(lambda n: n * MILLISECOND)

    def option(key: str) -> RegionOption:
        resident = draw(size)
        return RegionOption(
            key=key,
            resident_bytes=resident,
            forward_peak_bytes=resident + draw(size),
            backward_peak_bytes=draw(size),
            seconds=draw(seconds),
        )

    regions = tuple(
        ProblemRegion(
            name=f"layer.{r}",
            class_key=f"{r}",
            options=tuple(option(f"o{i}") for i in range(draw(st.integers(1, 3)))),
            gradient_bytes=draw(size),
        )
        for r in range(count)
    )
    segments = []
    for i in range(draw(st.integers(0, 3)) if count else 0):
        start = draw(st.integers(0, count - 1))
        stop = draw(st.integers(start + 1, count))
        segments.append(
            SegmentOption(
                key=f"s{i}",
                start=start,
                stop=stop,
                resident_bytes=draw(size),
                forward_peak_bytes=draw(st.integers(0, 60)),
                backward_peak_bytes=tuple(draw(st.integers(0, 60)) for _ in range(stop - start)),
                seconds=draw(seconds) * (stop - start),
            )
        )
    root = tuple(
        RootOption(
            key=f"r{i}",
            held_forward_bytes=tuple(draw(size) for _ in range(count)),
            held_backward_bytes=tuple(draw(size) for _ in range(count)),
            loss_peak_bytes=draw(size),
            tail_peak_bytes=draw(size),
            seconds=draw(seconds),
        )
        for i in range(draw(st.integers(1, 2)))
    )
    return StepProblem(
        static_bytes=draw(st.integers(0, 50)),
        optimizer_peak_bytes=draw(st.integers(0, 60)),
        regions=regions,
        root=root,
        segments=tuple(segments),
        plain_seconds=plain_seconds,
    )


def of_one_class(problem: StepProblem) -> StepProblem:
    """The problem with the first region's options in all regions, and each segment at every place."""
    first, count = problem.regions[0], len(problem.regions)
    places = ((s, start) for s in problem.segments for start in range(count - (s.stop - s.start) + 1))
    return replace(
        problem,
        regions=tuple(replace(r, class_key="block", options=first.options) for r in problem.regions),
        segments=tuple(replace(s, start=start, stop=start + s.stop - s.start) for s, start in places),
    )


def all_choices(problem: StepProblem) -> Iterator[Choice]:
    """Every choice over a small problem."""
    for root, (keys, segments) in product(problem.root, list(_ways(problem, 0))):
        yield Choice(root=root.key, regions=keys, segments=segments)


def _ways(problem: StepProblem, r: int) -> Iterator[tuple[tuple[str, ...], tuple[tuple[int, int], ...]]]:
    if r == len(problem.regions):
        yield (), ()
        return
    for keys, segments in _ways(problem, r + 1):
        yield from (((option.key, *keys), segments) for option in problem.regions[r].options)
    for s in problem.segments:
        if s.start == r:
            for keys, segments in _ways(problem, s.stop):
                yield (s.key,) * (s.stop - s.start) + keys, ((s.start, s.stop), *segments)


def brute_force(problem: StepProblem) -> list[tuple[int, float]]:
    """(peak bytes, seconds) of every choice."""
    replays = [evaluate(problem, choice) for choice in all_choices(problem)]
    return [(levels.peak_bytes, levels.seconds) for levels in replays]


def layer(index: int, options: tuple[RegionOption, ...], *, kind: str = "block", gradient: int = 0) -> ProblemRegion:
    return ProblemRegion(name=f"layers.{index}", class_key=kind, options=options, gradient_bytes=gradient)


def deep_problem(*, same: bool, gradient: int, roots: int = 1, count: int = 128, options: int = 12) -> StepProblem:
    """A deep model: convex trade-offs of up to 2 GB a layer, all layers alike or all different."""
    rng = random.Random(7)

    def trade_off() -> tuple[RegionOption, ...]:
        everything, seconds = rng.randrange(300 * MIB, 2000 * MIB), rng.uniform(5e-3, 20e-3)
        shares = [0.0, *sorted(rng.random() for _ in range(options - 2)), 1.0]
        residents = [int(16 * MIB + (everything - 16 * MIB) * (1 - share)) for share in shares]
        return tuple(
            RegionOption(
                key=f"keep-{i}",
                resident_bytes=resident,
                forward_peak_bytes=resident + rng.randrange(50 * MIB, 100 * MIB),
                backward_peak_bytes=everything - resident + rng.randrange(50 * MIB, 200 * MIB),
                seconds=seconds * share ** rng.uniform(1.2, 3.0),
            )
            for i, (share, resident) in enumerate(zip(shares, residents, strict=True))
        )

    shared = trade_off()
    return StepProblem(
        static_bytes=20 << 30,
        optimizer_peak_bytes=0,
        regions=tuple(
            layer(r, shared if same else trade_off(), kind="block" if same else f"block{r}", gradient=gradient)
            for r in range(count)
        ),
        root=tuple(
            RootOption(
                key=f"root-{i}",
                held_forward_bytes=(64 * MIB,) * count,
                held_backward_bytes=(96 * MIB,) * count,
                loss_peak_bytes=(4 << 30) - i * 200 * MIB,
                tail_peak_bytes=1 << 30,
                seconds=i * 1e-3,
            )
            for i in range(roots)
        ),
        plain_seconds=count * 0.04,
    )
