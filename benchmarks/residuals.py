"""How far predictions are off published figures, by class: src/jettison/predict/ranges.toml, docs/accuracy_ranges.md.

    python -m benchmarks.residuals

Every published figure of a described run takes part; ``results/residuals.csv`` has what each was over what is predicted
today, and all the rest follows from that file. See NOTE [ Ranges of published runs ] in `jettison.predict.ranges`.

NOTE [ Sources, not rows ]
Rows of one source err together: one table has one cluster, one release and one person who measured. So each source
weighs one, however many rows it has, and a range is held against rows of sources that took no part in it. A source is a
publisher; of a vendor who publishes the same configurations again with each release, a model, since one configuration
errs alike in all of them.

NOTE [ Pooling ]
A class counts as `ENOUGH` sources. What it lacks it borrows from the class above: the sources there that it does not
have share the weight that is missing, in equal parts. So a class of one source has a fifth of a say in its range, and
one of five or more has all of it.

NOTE [ Expected times ]
The model counts as `ENOUGH` sources that say 1: of a class of n sources the expected time is n / (n + 5) of the way
from what is modelled to the median. By ranges of other sources that is nearer than either end for rows that took no
part. Bytes are counted, and stay what they are.

NOTE [ Tails ]
The ends are weighted quantiles, with as much outside of each as `TAILS` allows: the first of these with which ranges
hold four in five of rows that took no part, both counted by rows and by sources, each figure for itself. The quantile
theorem for exchangeable rows would take a tenth; sources are few and no sample of anything, so it is less.
"""

from __future__ import annotations

import csv
import tomllib
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate, permutations
from math import sqrt
from pathlib import Path
from statistics import mean, median
from typing import Final

from benchmarks import (
    blind_page,
    megatron_golden,
    newer_runs,
    one_gpu_page,
    published,
    simumax,
    throughput,
    unseen_page,
)
from benchmarks.page_command import page_command
from jettison.core.errors import UsageError
from jettison.core.units import GIB, MIB
from jettison.cost.execution import execution_of
from jettison.predict.allowance import fixed_allowance
from jettison.predict.forecast import forecast_sizes
from jettison.predict.ranges import (
    AGREES,
    ANCHORED,
    DATA,
    FitVerdict,
    Measure,
    Range,
    classes_of,
    figures,
    kind_of,
    residual,
    stack_of,
)
from jettison.predict.time import estimate
from jettison.spec.hardware import hardware
from jettison.spec.run import Run

ROOT: Final = Path(__file__).parent.parent
RESULTS: Final = Path(__file__).parent / "results" / "residuals.csv"
PAGE: Final = ROOT / "docs" / "accuracy_ranges.md"
TEXT: Final = Path(__file__).parent / "pages" / "accuracy_ranges.md"
BLIND: Final = ROOT / "tests" / "facts" / "blind_2026_11.csv"
LAYOUTS: Final = ROOT / "tests" / "facts" / "blind_2026_11_layouts.csv"
ENOUGH: Final = 5
"""Sources."""
TAILS: Final = (0.1, 0.08, 0.06, 0.05, 0.04, 0.03, 0.02, 0.01, 0.0)
CLAIMED: Final = 0.8
FIGURES: Final = {
    "time": Measure.TIME,
    "allocated": Measure.ALLOCATED,
    "reserved": Measure.FRAGMENTS,
    "device": Measure.FRAGMENTS,
}
"""What was published, and what range it is held against."""
NOT_COUNTED: Final = {
    "impossible": "the run cannot have been as it is stated",
    "misread": "the command describes another run",
    "unsaid": "nobody says what was measured",
    "network": "nobody says which network there is",
    "host-bound": "the host is the limit, which nothing prices",
    "nanotron-slow": "its authors found the software to be slow, and mended it",
    "power": "power is limited, and nobody says how far",
    "kept-inputs": "litgpt's QLoRA ran a bitsandbytes that kept inputs of 4-bit products; later ones are described",
}
"""Reasons for which a row says nothing about predictions, as `blind_page` has them, and one more."""
EMPTY_PROCESS: Final = 1343 * MIB
"""That ``one_gpu_more.csv`` has taken off what nvidia-smi said."""
PUBLISHERS: Final = (
    ("torchtitan", "torchtitan"),
    ("pytorch PR", "torchtitan"),
    ("pytorch/ao", "torchao"),
    ("ultrascale", "nanotron"),
    ("nanotron", "nanotron"),
    ("litgpt", "litgpt"),
    ("ms-swift", "ms-swift"),
    ("fms", "foundation-model-stack"),
    ("foundation-model-stack", "foundation-model-stack"),
    ("utomodel", "AutoModel"),
    ("docs.nvidia.com NeMo", "NeMo"),
    ("NeMo", "NeMo"),
    ("DeepSpeed", "DeepSpeed"),
    ("torchtune", "torchtune"),
    ("Megatron-LM, September", "Megatron-LM PR 482"),
)
"""Whose a source is, by a part of its name; of any other, its first word."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published figure over what is predicted: a ratio, of fragments what `Measure` says."""

    figure: str
    source: str
    stack: str
    kind: str
    hardware: str
    run: str
    value: float

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """Its own first; bytes are not told apart by hardware."""
        return classes_of(FIGURES[self.figure], self.stack, self.kind, self.hardware)


# rows -----------------------------------------------------------------------------------------------------------------


def publisher(source: str) -> str:
    """Whose a source is."""
    return next((name for part, name in PUBLISHERS if part in source), source.split()[0])


def predicted() -> Iterator[Row]:
    """All rows, as they are predicted today."""
    yield from _times()
    yield from _memory()
    for path in (blind_page.FACTS, BLIND):
        for row in blind_page.rows(path):
            if row.facts["looked"] not in NOT_COUNTED:
                yield from _blind(row)


def _times() -> Iterator[Row]:
    for row in throughput.rows():
        device, name = throughput.GPUS[row.gpu], row.columns["model"]
        source = publisher(row.source)
        source = f"{source}, {name}" if source == "NeMo" else source
        yield _row("time", source, row.run, row.name, 1 + row.error, device)
    for one in newer_runs.rows():
        source = f"NeMo, {one.name.partition(',')[0]}" if one.stack == "nemo" else "SimuMax"
        yield _row("time", source, one.run, one.name, 1 + one.error, one.gpu)
    device = hardware("a100-80gb")
    for name, run, seconds in throughput.paper_runs():
        yield _row("time", "arXiv 2205.05198", run, name, seconds / estimate(run, device).step_seconds, device.name)


def _memory() -> Iterator[Row]:
    for line in unseen_page.facts(unseen_page.OTHERS):
        nbytes = float(line["published"]) * (1e9 if line["unit"] == "GB" else GIB)
        run = blind_page.described(line["command"])
        yield _bytes(line["figure"], publisher(line["source"]), run, line["run"], nbytes)
    for one in one_gpu_page.rows():
        kept_inputs = one.framework == "litgpt" and "QLoRA" in one.run
        if not one.recorded and not kept_inputs and one.figure in ("allocated", "reserved", "occupied"):
            more = EMPTY_PROCESS if one.figure == "occupied" else 0
            nbytes = one.published * one_gpu_page.UNITS[one.unit] + more
            yield _bytes(one.figure, publisher(one.framework), one.described(), one.run, nbytes)
    for found in published.rows():
        figure = "reserved" if found.figure is published.Figure.RESERVED else "allocated"
        if not found.first_step:
            source = publisher(str(found.framework))
            yield _bytes(figure, source, found.run, found.name, found.gib * GIB)
    for path in (megatron_golden.FACTS, megatron_golden.MORE, megatron_golden.HYBRIDS):
        for facts in megatron_golden.facts(path):
            if not megatron_golden.why_not(facts) and not unseen_page.aside(facts):
                golden = megatron_golden.golden(facts)
                ratio = golden.measured[1] / golden.predicted()[1]
                yield _row("allocated", "Megatron-LM tests", golden.run, golden.name, ratio)
    for run, nbytes, name in simumax.reserved():
        yield _bytes("reserved", "SimuMax", run, name, nbytes)


def _blind(row: blind_page.Row) -> Iterator[Row]:
    figure, looked = row.facts["figure"], row.facts["looked"]
    source, name = publisher(row.facts["source"]), row.facts["run"]
    try:
        run, gpu = described(row.facts["mended"] or row.facts["command"])
        if row.of_time:
            how = execution_of(run)
            device = hardware(gpu)
            found = estimate(replace(run, compiled=False), device, execution=how)
            yield _row("time", source, run, name, found.tokens_per_second_per_gpu / row.published, device.name)
        elif figure != "not said" or looked == "occupied":
            yield _bytes("occupied" if figure == "not said" else figure, source, run, name, row.published * row.unit)
    except UsageError:  # no description has it
        return


def described(command: str) -> tuple[Run, str]:
    """The run of a command, and its GPU; empty where it names none."""
    words = command.split()
    gpu = ""
    if "--gpu" in words:
        at = words.index("--gpu")
        gpu = words[at + 1]
        del words[at : at + 2]
    return blind_page.described(" ".join(words)), gpu


def _bytes(figure: str, source: str, run: Run, name: str, nbytes: float) -> Row:
    peak = forecast_sizes(run).peak_bytes
    if figure == "allocated":
        return _row(figure, source, run, name, nbytes / peak)
    fixed = fixed_allowance(run.layout, run.kernels.device).expected if figure == "occupied" else 0
    return _row("device" if fixed else figure, source, run, name, (nbytes - fixed - peak) / sqrt(peak * GIB))


def _row(figure: str, source: str, run: Run, name: str, value: float, device: str = "") -> Row:
    return Row(
        figure=figure,
        source=source,
        stack=stack_of(run),
        kind=kind_of(run),
        hardware=device,
        run=name,
        value=round(value, 4),
    )


def stored() -> list[Row]:
    """The rows of the file."""
    with RESULTS.open(encoding="utf-8", newline="") as file:
        return [Row(**row | {"value": float(row["value"])}) for row in csv.DictReader(file)]  # type: ignore[arg-type]


# ranges ---------------------------------------------------------------------------------------------------------------


def anchored(measure: Measure, rows: Sequence[Row]) -> list[Row]:
    """Every row as it is off where another of its source and class was measured: `jettison.predict.anchor`.

    A time is divided by the other's; fragments are expected halfway between the other's and the class's; of allocated
    bytes an anchor that the ledger agrees with says that the stack was read, and mends nothing.
    """

    @cache
    def expected(source: str, classes: tuple[str, ...]) -> float:
        return quantile(pool([row for row in rows if row.source != source], classes).values(), 0.5)

    groups: defaultdict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.source, row.classes[0]].append(row)
    found = []
    for alike in groups.values():
        if measure is Measure.ALLOCATED:  # whichever of those it was, it says the same
            agree = [row for row in alike if abs(row.value - 1) <= AGREES]
            found += [_near(row, row.value) for row in alike if agree and agree != [row]]
            continue
        for one, other in permutations(alike, 2):
            value = other.value / one.value
            if measure is Measure.FRAGMENTS:
                value = other.value - (one.value + expected(other.source, other.classes)) / 2
            found.append(_near(other, value))
    return found


def _near(row: Row, value: float) -> Row:
    return replace(row, stack="", kind=ANCHORED, hardware="", value=value)


Weighted = Sequence[tuple[float, float]]
"""Values with weights, in order."""


def pool(rows: Sequence[Row], classes: Sequence[str]) -> dict[str, tuple[float, list[float]]]:
    """Sources with their weights and values: see NOTE [ Pooling ]."""
    found: dict[str, tuple[float, list[float]]] = {}
    for kind in classes:
        lacking = ENOUGH - sum(weight for weight, _ in found.values())
        more: defaultdict[str, list[float]] = defaultdict(list)
        for row in rows:
            if kind in row.classes and row.source not in found:
                more[row.source].append(row.value)
        if more:
            weight = min(1.0, lacking / len(more)) if found else 1.0
            found |= {source: (weight, values) for source, values in more.items()}
        if sum(weight for weight, _ in found.values()) >= ENOUGH - 1e-9:
            break
    return found


def quantile(sources: Iterable[tuple[float, list[float]]], share: float) -> float:
    """The least value with so much of the weight at it or below."""
    pairs = sorted((value, weight / len(values)) for weight, values in sources for value in values)
    below = list(accumulate(weight for _, weight in pairs))
    return pairs[min(len(pairs) - 1, bisect_left(below, share * below[-1] - 1e-9))][0]


def stated(measure: Measure, rows: Sequence[Row], classes: Sequence[str], tail: float) -> Range:
    """What a class states: its low end, what is expected, and its high end."""
    found = pool(rows, classes)
    low, high = (quantile(found.values(), share) for share in (tail, 1 - tail))
    middle = quantile(found.values(), 0.5)
    sources = sum(weight for weight, _ in found.values())
    expected = {
        Measure.ALLOCATED: 1.0,
        Measure.FRAGMENTS: middle,
        Measure.TIME: 1 + sources / (sources + ENOUGH) * (middle - 1),
    }[measure]
    return Range(expected=expected, low=min(low, expected), high=max(high, expected))


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """A row, the range of all other sources, and whether that holds it."""

    row: Row
    range: Range

    @property
    def inside(self) -> bool:
        """Does it?"""
        return self.range.low - 1e-9 <= self.row.value <= self.range.high + 1e-9


def cross_validated(measure: Measure, rows: Sequence[Row], tail: float) -> list[Held]:
    """Every row against the range that all other sources give its class."""
    without = {source: [row for row in rows if row.source != source] for source in {row.source for row in rows}}

    @cache
    def found(source: str, classes: tuple[str, ...]) -> Range:
        return stated(measure, without[source], classes, tail)

    return [Held(row=row, range=found(row.source, row.classes)) for row in rows]


def shares(held: Sequence[Held]) -> tuple[float, float]:
    """Of rows, and of sources, each of which counts once, that ranges hold."""
    by_source: defaultdict[str, list[bool]] = defaultdict(list)
    for one in held:
        by_source[one.row.source].append(one.inside)
    return mean(one.inside for one in held), mean(mean(inside) for inside in by_source.values())


def of_measure(rows: Sequence[Row], measure: Measure) -> list[Row]:
    """Rows that are held against one."""
    return [row for row in rows if FIGURES[row.figure] is measure]


def tail_of(measure: Measure, rows: Sequence[Row]) -> tuple[float, list[Held]]:
    """How much is outside of each end, and how the ranges hold: see NOTE [ Tails ]."""
    for tail in TAILS:
        held = cross_validated(measure, rows, tail)
        groups = [[one for one in held if one.row.figure == figure] for figure in {row.figure for row in rows}]
        if min(min(shares(group)) for group in groups) >= CLAIMED:
            break
    return tail, held


def data(rows: Sequence[Row]) -> str:
    """The whole file of ranges."""
    parts = [
        "# Measured over modelled figures of published runs, by class: written by `python -m benchmarks.residuals`.\n"
        "# See NOTE [ Ranges of published runs ] in ranges.py for units.\n"
    ]
    for measure in Measure:
        chosen = of_measure(rows, measure)
        tail, _ = tail_of(measure, chosen)
        parents = {row.classes[i]: row.classes[i:] for row in chosen for i in range(len(row.classes))}
        near = anchored(measure, chosen)
        tail_near, _ = tail_of(measure, near)
        found = stated(measure, near, (ANCHORED,), tail_near)
        if measure is Measure.FRAGMENTS:  # of what an anchor says: one that a prediction makes changes nothing
            found = replace(found, expected=0.0)
        runs = len({(row.source, row.run, row.figure) for row in near})
        parts.append(_stated_row(measure, ANCHORED, runs, near, found))
        for kind, classes in sorted(parents.items()):
            own = [row for row in chosen if kind in row.classes]
            found = stated(measure, chosen, classes, tail)
            parts.append(_stated_row(measure, kind, len(own), own, found))
    return "\n".join(parts)


def _stated_row(measure: Measure, kind: str, runs: int, own: Sequence[Row], found: Range) -> str:
    ends = f"low = {found.low:.3f}\nexpected = {found.expected:.3f}\nhigh = {found.high:.3f}\n"
    counts = f"runs = {runs}\nsources = {len({row.source for row in own})}\n"
    return f'[[{measure}]]\nkind = "{kind}"\n{counts}{ends}'


# the page -------------------------------------------------------------------------------------------------------------


def page(rows: Sequence[Row]) -> str:
    """The whole page."""
    words: dict[str, str] = {}
    lines = ["| figure | rows | sources | held, of rows | held, by sources | outside of each end |"]
    lines.append("| --- | ---: | ---: | ---: | ---: | ---: |")
    for measure in Measure:
        chosen = of_measure(rows, measure)
        tail, held = tail_of(measure, chosen)
        for figure in dict.fromkeys(name for name, of in FIGURES.items() if of is measure):
            own = [one for one in held if one.row.figure == figure]
            of_rows, of_sources = shares(own)
            sources = len({one.row.source for one in own})
            lines.append(
                f"| {figure} | {len(own)} | {sources} | {_percent(of_rows)} | {_percent(of_sources)} | "
                f"{_percent(tail)} |"
            )
        words[str(measure)] = "\n".join(_classes(measure, chosen, held))
    words["summary"] = "\n".join(lines)
    words["centres"] = _centres(rows)
    words["anchored"] = "\n".join(_anchored(rows))
    words["verdicts"] = "\n".join(_verdicts())
    words["not_counted"] = "\n".join(f"- {why}." for why in NOT_COUNTED.values())
    return TEXT.read_text(encoding="utf-8").format_map(words)


def _classes(measure: Measure, rows: Sequence[Row], held: Sequence[Held]) -> Iterator[str]:
    stated_by = {row["kind"]: row for row in _stated()[measure]}
    yield "| class | rows | sources | low | expected | high | held |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for kind in sorted({kind for row in rows for kind in row.classes}):
        own = [one for one in held if kind in one.row.classes]
        inside, found = sum(one.inside for one in own), stated_by[kind]
        ends = " | ".join(f"{found[name]:.3f}" for name in ("low", "expected", "high"))
        yield f"| {kind} | {len(own)} | {found['sources']} | {ends} | {inside} of {len(own)} |"


def _anchored(rows: Sequence[Row]) -> Iterator[str]:
    """How far rows are off, and how ranges hold them, where another of their source and class was measured."""
    yield "| figure | pairs | sources | error alone | error anchored | held, of pairs | held, by sources |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for measure in Measure:
        chosen = of_measure(rows, measure)
        near = anchored(measure, chosen)
        _, held = tail_of(measure, near)
        of_pairs, of_sources = shares(held)
        centre = 0 if measure is Measure.FRAGMENTS else 1
        there = {(row.source, row.run, row.figure) for row in near}
        alone = [row for row in chosen if (row.source, row.run, row.figure) in there]
        stated_alone = median(abs(row.value - residual(measure, row.classes).expected) for row in alone)
        errors = [f"{100 * stated_alone:.1f} %", f"{100 * median(abs(row.value - centre) for row in near):.1f} %"]
        if not centre:
            errors = [f"{float(text[:-2]) / 100:.2f} GiB/√GiB" for text in errors]
        yield (
            f"| {measure} | {len(near)} | {len({row.source for row in near})} | {' | '.join(errors)} | "
            f"{_percent(of_pairs)} | {_percent(of_sources)} |"
        )


def _stated() -> Mapping[str, list[dict[str, float]]]:
    return tomllib.loads(DATA.read_text(encoding="utf-8"))


def _centres(rows: Sequence[Row]) -> str:
    """How far times are off as they are modelled and as they are expected, by ranges of other sources."""
    chosen = of_measure(rows, Measure.TIME)
    _, held = tail_of(Measure.TIME, chosen)
    lines = ["| rows | modelled | expected |", "| --- | ---: | ---: |"]
    tuned = {"nemo", "base"}
    for name, own in (
        ("vendor's recipes, `--stack` given", [one for one in held if one.row.stack in tuned]),
        ("all others", [one for one in held if one.row.stack not in tuned]),
    ):
        before = median(abs(1 / one.row.value - 1) for one in own)
        after = median(abs(one.range.expected / one.row.value - 1) for one in own)
        lines.append(f"| {len(own)}: {name} | {_percent(before)} | {_percent(after)} |")
    return "\n".join(lines)


def layouts() -> Iterator[tuple[str, bool, FitVerdict]]:
    """Published sheets of layouts: the sheet, whether the layout ran, and what is said of it."""
    with LAYOUTS.open(encoding="utf-8") as file:
        for line in csv.DictReader(file):
            run, gpu = described(line["command"])
            device = hardware(gpu)
            found = figures(run, forecast_sizes(run).peak_bytes, hardware=device.name)
            ran = bool(line["tokens_per_second_per_gpu"])
            yield line["sheet"], ran, found.verdict(usable_bytes=device.usable_bytes)


def _verdicts() -> Iterator[str]:
    found = list(layouts())
    yield "| layouts | rows | fits | too close to call | does not fit |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    for name, ran in (("ran", True), ("ran out of memory", False)):
        own = [verdict for _, there, verdict in found if there is ran]
        counts = " | ".join(str(own.count(verdict)) for verdict in FitVerdict)
        yield f"| {name} | {len(own)} | {counts} |"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def write_data() -> str:
    """Write all files; what was written, in a line."""
    found = sorted(predicted(), key=order)
    with RESULTS.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        names = ("figure", "source", "stack", "kind", "hardware", "run", "value")
        writer.writerow(names)
        writer.writerows([getattr(row, name) for name in names] for row in found)
    rows = stored()
    DATA.write_text(data(rows), encoding="utf-8")
    PAGE.write_text(page(rows), encoding="utf-8")
    return f"{DATA.name}, {PAGE.name}: {len(rows)} rows"


def order(row: Row) -> tuple[str, ...]:
    """Of rows in the file."""
    return row.figure, row.source, row.stack, row.kind, row.hardware, row.run, f"{row.value:.4f}"


if __name__ == "__main__":
    page_command("benchmarks.residuals", __doc__, write_data)
