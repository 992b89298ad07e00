"""Residuals of step times by kind: writes src/jettison/predict/residuals.toml.

    python -m benchmarks.residuals

NOTE [ Order statistics ]
One more value is equally likely to come before the first, between any two, or behind the last of n that are there: of
n + 1 gaps those between the k-th smallest and the k-th largest are n + 1 - 2 k. With k the tenth part of n + 1, rounded
down, that is 0.8 or more. Quantiles of the values themselves are too narrow: of 14 they hold 0.69.

But runs of one configuration err together, in all releases that ran it, and a further run is mostly of another one.
Of NVIDIA's 272 runs, each held against those of all other configurations, tenths hold 215 and fifteenths 232: those
are taken.

Runs of one kind err together, so one of a kind that is not there is no further value of the same row. Of 618 runs, each
held against those of all other kinds alike (dense, or with experts), tenths hold 342 of 431 dense ones and 147 of 187
with experts; fifteenths 371 and 161.

Every published run whose throughput or iteration is predicted takes part: Table 5 of arXiv 2205.05198, the rows of
`benchmarks.throughput` and those of `benchmarks.newer_runs`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median

from benchmarks import newer_runs, throughput
from benchmarks.page_command import page_command
from jettison.cost.execution import execution_of
from jettison.predict.residuals import DATA, LEAST_RUNS, all_like, kind_of
from jettison.predict.time import estimate
from jettison.spec.hardware import hardware

ENOUGH = 9
"""Runs between whose ends a further one is in eight cases of ten: 8 of 10 gaps."""
PART = 15
"""One in so many of a kind's runs, and one more, is beyond each end of a range, or at it."""
HEAD = """# Measured over predicted seconds of published runs, by kind: written by `python -m benchmarks.residuals`.
# A further run of a kind is between low and high in eight cases of ten or more; of fewer than 29 runs they hold all,
# and of fewer than 9 what all dense ones, or all with experts, say as well.
"""


def ratios(timed: Iterable[throughput.Timed], newer: Iterable[newer_runs.NewerRun]) -> Iterator[tuple[str, float]]:
    """The kind of each run, and what its step took over what was predicted."""
    device = hardware("a100-80gb")
    for _, run, published in throughput.paper_runs():
        how = execution_of(run)
        yield kind_of(device, run.kernels.name, how, run.model), published / estimate(run, device).step_seconds
    for row in timed:
        on = hardware(throughput.GPUS[row.gpu])
        yield kind_of(on, row.run.kernels.name, row.execution, row.run.model), 1 + row.error
    for one in newer:
        yield _kind(one), 1 + one.error


def text(found: Iterable[tuple[str, float]]) -> str:
    """The whole file."""
    by_kind: defaultdict[str, list[float]] = defaultdict(list)
    for kind, ratio in found:
        by_kind[kind].append(ratio)
        by_kind[all_like(kind)].append(ratio)
    parts = [HEAD]
    for kind, values in sorted(by_kind.items()):
        if len(values) >= LEAST_RUNS:
            low, high = _stated(values, by_kind[all_like(kind)])
            figures = f"low = {low:.3f}\nmedian = {median(values):.3f}\nhigh = {high:.3f}\n"
            parts.append(f'[[kinds]]\nkind = "{kind}"\nruns = {len(values)}\n{figures}')
    return "\n".join(parts)


def _stated(own: Sequence[float], alike: Sequence[float]) -> tuple[float, float]:
    """The range of a kind: of fewer than `ENOUGH` runs, with that of all alike, since their own says too little."""
    low, high = _range(own)
    if len(own) >= ENOUGH:
        return low, high
    wide = _range(alike)
    return min(low, wide[0]), max(high, wide[1])


def _range(values: Sequence[float]) -> tuple[float, float]:
    """What holds a further run in eight of ten cases, or more: NOTE [ Order statistics ]."""
    out = max(0, (len(values) + 1) // PART - 1)
    ordered = sorted(values)
    return ordered[out], ordered[-1 - out]


def held(newer: Sequence[newer_runs.NewerRun], group: Callable[[newer_runs.NewerRun], object]) -> tuple[int, int]:
    """Of NVIDIA's runs, so many are in the range that runs of all other groups give, and there are so many."""
    runs = [(_kind(one), 1 + one.error, group(one), one.stack == "nemo") for one in newer]
    inside = every = 0
    for left in {at for _, _, at, ours in runs if ours}:
        by_kind: defaultdict[str, list[float]] = defaultdict(list)
        for kind, ratio, at, _ in runs:
            if at != left:
                by_kind[kind].append(ratio)
                by_kind[all_like(kind)].append(ratio)
        for kind, ratio, at, ours in runs:
            if at == left and ours:
                like = kind if len(by_kind[kind]) >= LEAST_RUNS else all_like(kind)
                low, high = _stated(by_kind[like], by_kind[all_like(kind)])
                inside, every = inside + (low <= ratio <= high), every + 1
    return inside, every


def held_elsewhere(found: Sequence[tuple[str, float]], like: str) -> tuple[int, int]:
    """Of all runs alike (dense, or with experts), so many are in the range that all other kinds give, and there are
    so many.
    """
    alike = [(kind, ratio) for kind, ratio in found if all_like(kind) == like]
    inside = 0
    for left in {kind for kind, _ in alike}:
        low, high = _range([ratio for kind, ratio in alike if kind != left])
        inside += sum(low <= ratio <= high for kind, ratio in alike if kind == left)
    return inside, len(alike)


def _kind(one: newer_runs.NewerRun) -> str:
    return kind_of(hardware(one.gpu), one.run.kernels.name, one.execution, one.run.model)


def write_data() -> str:
    """Write them; the file as it is then."""
    DATA.write_text(text(ratios(throughput.rows(), newer_runs.rows())), encoding="utf-8")
    return DATA.read_text(encoding="utf-8")


if __name__ == "__main__":
    page_command("benchmarks.residuals", __doc__, write_data)
