"""Residuals of step times by kind: writes src/jettison/predict/residuals.toml.

    python -m benchmarks.residuals

Every published run whose throughput or iteration is predicted takes part: Table 5 of arXiv 2205.05198, the rows of
`benchmarks.throughput` and those of `benchmarks.newer_runs`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from statistics import median

from benchmarks import newer_runs, throughput
from benchmarks.page_command import page_command
from jettison.cost.execution import execution_of
from jettison.predict.residuals import ALL, DATA, LEAST_RUNS, kind_of
from jettison.predict.time import estimate
from jettison.spec.hardware import hardware

HEAD = """# Measured over predicted seconds of published runs, by kind: written by `python -m benchmarks.residuals`.
# low and high hold eight runs of ten; of fewer than ten runs, all.
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
        yield kind_of(hardware(one.gpu), one.run.kernels.name, one.execution, one.run.model), 1 + one.error


def text(found: Iterable[tuple[str, float]]) -> str:
    """The whole file."""
    by_kind: defaultdict[str, list[float]] = defaultdict(list)
    for kind, ratio in found:
        by_kind[kind].append(ratio)
        by_kind[ALL].append(ratio)
    parts = [HEAD]
    for kind, values in sorted(by_kind.items()):
        if len(values) >= LEAST_RUNS:
            low, high = _range(sorted(values))
            figures = f"low = {low:.3f}\nmedian = {median(values):.3f}\nhigh = {high:.3f}\n"
            parts.append(f'[[kinds]]\nkind = "{kind}"\nruns = {len(values)}\n{figures}')
    return "\n".join(parts)


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Of sorted values, what holds eight of ten; of fewer than ten, all."""
    if len(values) < 10:
        return values[0], values[-1]
    return _quantile(values, 0.1), _quantile(values, 0.9)


def _quantile(values: Sequence[float], share: float) -> float:
    at = share * (len(values) - 1)
    below = int(at)
    above = min(below + 1, len(values) - 1)
    return values[below] + (at - below) * (values[above] - values[below])


def write_data() -> str:
    """Write them; the file as it is then."""
    DATA.write_text(text(ratios(throughput.rows(), newer_runs.rows())), encoding="utf-8")
    return DATA.read_text(encoding="utf-8")


if __name__ == "__main__":
    page_command("benchmarks.residuals", __doc__, write_data)
