"""Published figures and their predictions: docs/accuracy.csv, docs/accuracy.md and src/jettison/predict/ranges.toml.

    python -m benchmarks.accuracy

Every published figure of a described run is a row of the CSV, and all the rest follows from it. Its columns:

- ``figure``: time, or which bytes; ``source``: its publisher; ``stack``, ``kind``, ``hardware``: its class (NOTE
  [ Ranges of published runs ] in `jettison.predict.ranges`); ``model``, ``layout``, ``run``: what ran.
- ``unit``, ``published``, ``predicted``; ``low`` and ``high``: the 80 % range that all other sources give its class,
  ``inside``: whether that holds it; ``ratio``: predicted over published.
- ``residual``: what ranges are made of, measured over modelled; empty where a row takes no part.
- ``first``: the answer before the row was looked at, where one was recorded; ``round``: those it was compared with;
  ``first residual``: measured over that answer, of reserved and device bytes over the allocated bytes in it.
- ``cached``: of reserved and device bytes, segments in addition to the peak that the model counts, in that unit.
- ``note``: what was found about it; ``where``: where it was published.
"""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from statistics import median
from typing import Final

from benchmarks import blind_runs, bridge, megatron_golden, newer_runs, one_gpu, published, ranges, simumax, throughput
from benchmarks.page_command import page_command
from benchmarks.ranges import FIGURES, Held, Row
from jettison.core.errors import UsageError
from jettison.core.units import GIB, MIB
from jettison.cost.execution import execution_of
from jettison.predict.forecast import forecast_sizes
from jettison.predict.ranges import (
    ANCHORED,
    DATA,
    UNEVEN,
    Measure,
    classes_of,
    figures,
    kind_of,
    residual,
    segments_beyond,
    stack_of,
)
from jettison.predict.time import estimate
from jettison.spec.device_allowance import FitVerdict, Range, fixed_allowance
from jettison.spec.hardware import hardware
from jettison.spec.run import Run

ROOT: Final = Path(__file__).parent.parent
CSV: Final = ROOT / "docs" / "accuracy.csv"
PAGE: Final = ROOT / "docs" / "accuracy.md"
TEXT: Final = Path(__file__).parent / "pages" / "accuracy.md"
BLIND: Final = {
    blind_runs.FACTS: "14 projects, 2026",
    ROOT / "tests" / "facts" / "blind_2026_11.csv": "17 projects, November 2026",
    ROOT / "tests" / "facts" / "blind_posts.csv": "issues, posts and READMEs, November 2026",
    ROOT / "tests" / "facts" / "blind_speeds.csv": "throughput of READMEs, November 2026",
    ROOT / "tests" / "facts" / "blind_throughput.csv": "throughput of benchmarks and issues, November 2026",
    ROOT / "tests" / "facts" / "blind_trainers.csv": "throughput of trainers and rented GPUs, November 2026",
    ROOT / "tests" / "facts" / "blind_machines.csv": "throughput of twelve more publishers, November 2026",
    ROOT / "tests" / "facts" / "blind_stacks.csv": "throughput of eleven projects, November 2026",
    ROOT / "tests" / "facts" / "blind_memory.csv": "memory in examples and documents, November 2026",
    ROOT / "tests" / "facts" / "blind_devices.csv": "devices of ms-swift's examples, 2024 and 2026",
    ROOT / "tests" / "facts" / "blind_logs.csv": "memory in logs, notebooks and issues, November 2026",
    ROOT / "tests" / "facts" / "blind_reports.csv": "memory in reports and notes, November 2026",
    ROOT / "tests" / "facts" / "blind_benchmarks.csv": "memory in benchmarks and logs, November 2026",
    ROOT / "tests" / "facts" / "blind_notes.csv": "notes, reports and logs, November 2026",
}
"""Rounds of blind predictions."""
LAYOUTS: Final = {
    ROOT / "tests" / "facts" / "blind_2026_11_layouts.csv": "of three sheets",
    ROOT / "tests" / "facts" / "blind_posts_layouts.csv": "of issues and posts",
    ROOT / "tests" / "facts" / "blind_logs_layouts.csv": "of notebooks and blogs",
}
FIRST_FRAGMENTS: Final[dict[str, tuple[float, dict[str, float]]]] = {
    "17 projects, November 2026": (0.03, {}),
    "issues, posts and READMEs, November 2026": (
        0.0,
        {
            "transformers, dense, adapters": 1.190,
            "unsloth, dense, adapters": 1.054,
            "transformers, dense": 0.867,
            "torch, dense": 1.005,
            "torch, experts": 1.081,
        },
    ),
}
"""Fragments in a round's first answers of reserved and device bytes: a share of allocated bytes, and by class as
`Measure` has them. Other rounds were answered with allocated bytes alone, those of
`blind_memory.csv`, `blind_devices.csv`, `blind_logs.csv`, `blind_reports.csv`, `blind_benchmarks.csv` and
`blind_notes.csv` with fragments, which are not here."""
OTHERS: Final = ROOT / "tests" / "facts" / "unseen_runs.csv"
NEWER: Final = Path(__file__).parent / "results" / "newer-times-before.csv"
UNITS: Final = {"GiB": GIB, "GB": 10**9, "MiB": MIB}
TOKENS: Final = "tokens/s/GPU"
FEW: Final = 5
"""Rows: the page has no line of a class or round with fewer."""
DIGITS: Final = {"GiB": 3, "GB": 3, "MiB": 1, TOKENS: 1, "s": 3}
"""Decimals of values in the CSV."""
NOT_COUNTED: Final = {
    "impossible": "the run cannot have been as it is stated",
    "misread": "the command describes another run",
    "another-batch": "memory grows with accumulation alone: the micro-batch is another",
    "atorch": "atorch's mixed precision was not read",
    "unsaid": "the figure is not named",
    "network": "the network is not named",
    "host-bound": "the host is the limit, which nothing prices",
    "watts": "GPUs drew less than half of their power",
    "waits": "offloading waits for each copy, which is not modelled",
    "gpu-unsaid": "the GPU is not named",
    "batch-unsaid": "the global batch is not named",
    "own-trainer": "the trainer has kernels of its own",
    "peak": "the rate is above the peak of the GPU that is named",
    "slow": "its authors found the software or the nodes to be slow, and fixed them",
    "asked-why-slow": "its publisher asked why it is so slow",
    "power": "power is limited, how far is not said",
    "offload-unsaid": "whether checkpoints are offloaded is not said",
    "length-unsaid": "the length of sequences is not said",
    "first-step": "measured after the first step",
    "less-than-logits": "it is less than the weights and what logits take, as TRL of October 2025 has them",
    "card-full": "it is 97 % of the GPU's memory or more, which cached segments fill before any are freed",
    "less-than-loss": "it is less than the weights and what logits take, and its loss is not named",
    "own-code": "the model has code of its own on the Hub, which was not read",
    "frees-cache": "its loop frees the cache every tenth step (method_comparison/MetaMathQA/run.py, 5d602fdb), so "
    "that no segments of shorter micro-batches stay",
    "trl-setup": "TRL's list of models is older than the settings in its file, and nearly what is reserved before the "
    "first step",
    "megatron-2021": "without contiguous buffers, parameters refer to the gradients of the step before "
    "(megatron/model/distributed.py, 42c1cf42: param.main_grad = param.grad), whose fp32 copies stay as well",
    "other-files": "the scripts of a day before have ZeRO 2, which is 7 and 21 % low; theirs of that day offload",
    "experts-4bit": "experts in 4 bits are not modelled",
    "old-options": "norms and feed-forward blocks of flash-attn are not modelled",
    "two-lengths": "what 16384 tokens need more than 4096, a token, leaves less than nothing for weights",
    "answers-alone": "logits are made and kept of the answers' tokens alone, whose number is not said",
    "own-modules": "attention, norms and AdamW are written out by hand, which is not described",
    "kept-inputs": "litgpt's QLoRA ran a bitsandbytes that kept inputs of 4-bit matmuls; later versions are described",
}
"""Reasons for which a row takes no part in ranges: `blind_runs.WHY` has their keys, and there is one more."""
PUBLISHERS: Final = (
    ("NousResearch", "NousResearch"),
    ("aws-samples", "aws-samples"),
    ("chenyaofo", "chenyaofo"),
    ("mlc-ai", "mlc-ai"),
    ("odissei-benchmarks", "odissei-benchmarks"),
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
    ("guide to Megatron-LM on MI355X", "guide to MI355X"),
    ("trainer on B300", "B300 trainer"),
    ("Llama step on a GB200", "GB200 note"),
    ("report on CS336", "CS336 report"),
)
"""Publisher of a source, by the first part here that its name has; of any other, its first word."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A published figure and its prediction.

    Args:
        row: its residual and class, as ranges count it.
        counted: it takes part in ranges.
        modelled: in ``unit``; of reserved and device bytes, the modelled allocated bytes, cached segments and the fixed
            parts. None: the run is refused, or needs torch.
        scale: of reserved and device bytes, a square root of allocated bytes, in ``unit``; see `Measure`.
        cached: the part of ``modelled`` that is cached segments, which first answers did not have.
        first: the first answer, in ``unit``.
    """

    row: Row
    counted: bool
    unit: str
    published: float
    modelled: float | None
    scale: float = 0.0
    cached: float = 0.0
    model: str = ""
    layout: str = ""
    first: float | None = None
    round: str = ""
    note: str = ""
    where: str = ""

    def at(self, value: float) -> float | None:
        """The figure at a residual of this size."""
        if self.modelled is None:
            return None
        if self.scale:
            return self.modelled + self.scale * value
        return self.modelled / value if self.unit == TOKENS else self.modelled * value

    @property
    def first_residual(self) -> float | None:
        """Residual of the first answer; None where it is not of this figure."""
        if not self.first or self.modelled is None or self.row.figure not in FIGURES:
            return None
        if not self.scale:
            return round(self.first / self.published if self.unit == TOKENS else self.published / self.first, 4)
        if self.round not in FIRST_FRAGMENTS:
            return None
        unit = GIB / UNITS[self.unit]
        fixed = self.modelled - self.cached - self.scale**2 / unit
        share, classes = FIRST_FRAGMENTS[self.round]
        root = classes.get(f"{self.row.stack}, {self.row.kind.removesuffix(f', {UNEVEN}')}", 0.0) * sqrt(unit)
        allocated = ((sqrt(root**2 + 4 * (1 + share) * (self.first - fixed)) - root) / (2 * (1 + share))) ** 2
        return round((self.published - fixed - self.cached - allocated) / sqrt(allocated * unit), 4)


# rows -----------------------------------------------------------------------------------------------------------------


def publisher(source: str) -> str:
    """Publisher of a source."""
    return next((name for part, name in PUBLISHERS if part in source), source.split()[0])


def entries() -> list[Entry]:
    """All rows, as they are predicted today, in the order of the CSV."""
    found = [*_times(), *_memory(), *_one_gpu(), *_megatron(), *_simumax()]
    found += [one for path in BLIND for row in blind_runs.rows(path) for one in _blind(row, BLIND[path])]
    found = [replace(one, row=replace(one.row, first=one.first_residual, round=one.round)) for one in found]
    return sorted(found, key=lambda one: (order(one.row), one.where, one.published))


def order(row: Row) -> tuple[str, ...]:
    """Sort key of rows in the file."""
    return row.figure, row.source, row.stack, row.kind, row.hardware, row.run, f"{row.value:.4f}"


def _times() -> Iterator[Entry]:
    before = throughput.before()
    for row in throughput.rows():
        device, name = throughput.GPUS[row.gpu], row.columns["model"]
        source = publisher(row.source)
        source = f"{source}, {name}" if source == "NeMo" else source
        first, now = row.columns.get("blind_tokens_per_second_per_gpu"), row.found.tokens_per_second_per_gpu
        if row.name in before:
            first = str(row.published * (1 + before[row.name]))
        yield replace(
            _entry("time", source, row.run, row.name, now / row.published, row.published, now, TOKENS, device),
            first=float(first) if first else None,
            round=throughput.ROUNDS.get(row.file, ""),
            note="read before it was predicted" if row.columns.get("seen") == "yes" else "",
            where=row.source,
        )
    with NEWER.open(encoding="utf-8") as file:
        errors = [float(line["error"]) for line in csv.DictReader(file)]
    for one, error in zip(newer_runs.rows(), errors, strict=True):
        source = f"NeMo, {one.name.partition(',')[0]}" if one.stack == "nemo" else "SimuMax"
        now = one.found.tokens_per_second_per_gpu
        yield replace(
            _entry("time", source, one.run, one.name, now / one.published, one.published, now, TOKENS, one.gpu),
            first=one.published * (1 + error),
            round="NVIDIA and SimuMax since 2025",
            note="looked at while terms were found" if one.listed else "",
            where=one.source,
        )
    a100 = hardware("a100-80gb")
    for name, run, seconds in throughput.paper_runs():
        now = estimate(run, a100).step_seconds
        found = _entry("time", "arXiv 2205.05198", run, name, seconds / now, seconds, now, "s", a100.name)
        yield replace(found, where="arXiv 2205.05198, Table 5")


def _memory() -> Iterator[Entry]:
    with OTHERS.open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            run, unit = blind_runs.described(line["command"]), line["unit"]
            found = _bytes(line["figure"], publisher(line["source"]), run, line["run"], float(line["published"]), unit)
            first = float(line["blind_gib"]) * GIB / UNITS[unit]
            note = f"{line['why']}; first: allocated bytes; jettison ledger {line['command']}"
            yield replace(found, first=first, round="other projects, 2026", note=note, where=line["source"])
    for row in published.rows():
        figure = "reserved" if row.figure is published.Figure.RESERVED else "allocated"
        figure += ", first step" * row.first_step
        found = _bytes(figure, publisher(str(row.framework)), row.run, row.name, row.gib, "GiB", not row.first_step)
        said = [f"{row.figure}: {row.why}" if row.why else str(row.figure)]
        if row.figure is published.Figure.RESERVED:
            said.append(f"by torchtitan's rule {published.predicted_bytes(row) / GIB:.2f} GiB")
        yield replace(found, note="; ".join((*said, row.shown)), where=f"{row.framework} ({row.facts.name})")
    for one in bridge.rows():
        found = _bytes("allocated", "Megatron-Bridge", one.run, one.name, one.gb, "GB", counted=False)
        yield replace(found, note="looked at while its precision was described", where=bridge.FACTS.name)


def _one_gpu() -> Iterator[Entry]:
    for one in one_gpu.rows():
        kept_inputs = one.framework == "litgpt" and "QLoRA" in one.run
        note = [one_gpu.FRAMEWORKS.get(one.framework, ""), one_gpu.BLIND[one.blind]]
        note.append(NOT_COUNTED["kept-inputs"] if kept_inputs else "")
        if one.own is not None:
            note.append(f"the project's own modules on fake tensors: {one.own:.2f} {one.unit}")
        where, first = f"{one.framework}: {one.source}", one.first
        # nvidia-smi's figures are less an empty process there, so that what is left is reserved
        figure = {"allocated": "allocated", "reserved": "reserved", "occupied": "reserved"}.get(one.figure, "unstated")
        if one.recorded:  # its model needs torch
            row = Row(
                figure=figure, source=one.framework, stack="torch", kind="images", hardware="", run=one.run, value=0
            )
            found = Entry(row=row, counted=False, unit=one.unit, published=one.published, modelled=None)
        else:
            counted = figure != "unstated" and not kept_inputs
            source, run = publisher(one.framework), one.described()
            found = _bytes(figure, source, run, one.run, one.published, one.unit, counted)
        words = "; ".join(part for part in note if part)
        yield replace(found, first=first, round="one GPU", note=words, where=where)


def _megatron() -> Iterator[Entry]:
    """Tests of Megatron-LM: the peak of the first step, that of later ones, and what is allocated between steps."""
    golden = megatron_golden
    for path in (golden.FACTS, golden.MORE, golden.HYBRIDS, golden.LATER):
        for facts in golden.facts(path):
            if golden.why_not(facts):
                continue
            found, first = golden.golden(facts), golden.first_answer(facts)
            note = golden.aside(facts) or golden.ASIDE_NAMES.get(found.name, "")
            if path is golden.HYBRIDS:
                note = next((why for part, why in golden.ASIDE_HYBRIDS.items() if part in facts["source"]), "")
            counted = path is not golden.LATER and not golden.aside(facts)
            pairs = zip(("allocated, first step", "allocated", "allocated, between steps"), range(3), strict=True)
            for figure, i in pairs:
                measured, now = found.measured[i], found.predicted()[i]
                one = _entry(figure, "Megatron-LM tests", found.run, found.name, measured / now, measured, now, "GiB")
                yield replace(
                    one,
                    row=replace(one.row, hardware=found.gpu),
                    counted=counted and figure == "allocated",
                    first=first and first[i],
                    round="Megatron-LM tests" if first else "",
                    note=note,
                    where=facts["source"],
                )


def _simumax() -> Iterator[Entry]:
    for row in simumax.rows():
        for rank, measured, now in zip(("first", "last"), row.measured, row.predicted(), strict=True):
            name = f"{row.name}, {rank} rank"
            one = _entry("allocated", "SimuMax", row.run, name, measured / now, measured, now, "GiB")
            yield replace(
                one, counted=False, note=f"SimuMax's own: {row.simumax_gib:.2f} GiB", where=simumax.FACTS.name
            )
    for run, nbytes, name in simumax.reserved():
        yield replace(_bytes("reserved", "SimuMax", run, name, nbytes / GIB, "GiB"), where=simumax.FACTS.name)


def _blind(row: blind_runs.Row, projects: str) -> Iterator[Entry]:
    facts = row.facts
    figure, looked, source, name = facts["figure"], facts["looked"], publisher(facts["source"]), facts["run"]
    figure = "occupied" if looked == "occupied" else "unstated" if figure == "not said" else figure
    counted = looked not in NOT_COUNTED
    command = facts["mended"] or facts["command"]
    try:
        compiled = row.of_time and " --compile" in command  # the time of compiled adapters is modelled, not their bytes
        run, gpu = described(command.replace(" --compile", "") if compiled else command)
        if row.of_time:
            how, device = execution_of(run), hardware(gpu)
            now = estimate(run, device, execution=how.compiled() if compiled else how).tokens_per_second_per_gpu
            found = _entry("time", source, run, name, now / row.published, row.published, now, TOKENS, device.name)
            found = replace(found, counted=counted)
        else:
            known = counted and figure != "unstated"
            found = _bytes(figure, source, run, name, row.published, facts["unit"], known, gpu)
    except UsageError:  # no description has it
        figure = "time" if row.of_time else figure
        unknown = Row(figure=figure, source=source, stack="refused", kind="", hardware="", run=name, value=0)
        unit = TOKENS if row.of_time else facts["unit"]
        found = Entry(row=unknown, counted=False, unit=unit, published=row.published, modelled=None)
    why = blind_runs.WHY.get(looked) or NOT_COUNTED.get(looked, "")
    verb = "estimate" if row.of_time else "ledger"
    note = "; ".join(part for part in (why, facts["note"].strip(), f"jettison {verb} {command}") if part)
    yield replace(found, first=row.blind, round=projects, note=note, where=facts["source"])


def described(command: str) -> tuple[Run, str]:
    """The run of a command, and its GPU; empty where it names none."""
    words = command.split()
    gpu = ""
    if "--gpu" in words:
        at = words.index("--gpu")
        gpu = words[at + 1]
        del words[at : at + 2]
    return blind_runs.described(" ".join(words)), gpu


def _bytes(
    figure: str, source: str, run: Run, name: str, value: float, unit: str, counted: bool = True, gpu: str = ""
) -> Entry:
    size = UNITS[unit]
    nbytes, sizes = value * size, forecast_sizes(run)
    if figure.startswith("allocated") or figure == "unstated":
        peak = sizes.first_step_peak_bytes if "first" in figure else sizes.peak_bytes
        found = _entry(figure, source, run, name, nbytes / peak, value, peak / size, unit)
        return replace(found, counted=counted)
    peak = sizes.first_step_peak_bytes if "first" in figure else sizes.peak_bytes
    fixed = fixed_allowance(run.layout, run.kernels.device, run.stack).expected if figure == "occupied" else 0
    scale, cached = sqrt(peak * GIB), segments_beyond(run, peak, gpu)
    modelled = peak + cached + fixed
    measured = (nbytes - modelled) / scale
    found = _entry("device" if fixed else figure, source, run, name, measured, value, modelled / size, unit)
    found = replace(found, row=replace(found.row, cached=cached / scale))
    return replace(found, counted=counted, scale=scale / size, cached=cached / size)


def _entry(
    figure: str,
    source: str,
    run: Run,
    name: str,
    value: float,
    there: float,
    modelled: float,
    unit: str,
    device: str = "",
) -> Entry:
    row = Row(
        figure=figure,
        source=source,
        stack=stack_of(run),
        kind=kind_of(run),
        hardware=device,
        run=name,
        value=round(value, 4),
    )
    return Entry(
        row=row,
        counted=True,
        unit=unit,
        published=there,
        modelled=modelled,
        model=run.model.name,
        layout=throughput.layout_words(run),
    )


# the CSV --------------------------------------------------------------------------------------------------------------

COLUMNS: Final = (
    *("figure", "source", "stack", "kind", "hardware", "model", "layout", "run", "unit", "published", "predicted"),
    *("low", "high", "ratio", "inside", "residual", "first", "first residual", "cached", "round"),
    *("note", "where"),
)


def table(found: Sequence[Entry]) -> str:
    """The whole CSV."""
    counted = [one.row for one in found if one.counted]
    held: dict[Row, Held] = {}
    for measure in Measure:
        ends, own = ranges.ends_of(measure, ranges.of_measure(counted, measure))
        held |= {one.row: one for one in own}
        if measure is Measure.FRAGMENTS:
            beyond, ends_beyond = ranges.of_measure(counted, measure), ends
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for one in found:
        own_range = held.get(one.row) if one.counted else None
        middle = own_range.range if own_range else None
        if one.scale and middle is None:
            classes = classes_of(Measure.FRAGMENTS, one.row.stack, one.row.kind, "")
            middle = ranges.stated(Measure.FRAGMENTS, beyond, classes, ends_beyond)
        predicted = one.at(middle.expected) if one.scale and middle else one.modelled
        writer.writerow(_line(one, predicted, own_range))
    return text.getvalue()


def _line(one: Entry, predicted: float | None, held: Held | None) -> dict[str, str]:
    row, digits = one.row, DIGITS[one.unit]

    def said(value: float | None) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    ends = sorted(filter(None, (one.at(held.range.low), one.at(held.range.high)))) if held else [None, None]
    names = ("figure", "source", "stack", "kind", "hardware", "run")
    return {name: getattr(row, name) for name in names} | {
        "model": one.model,
        "layout": one.layout,
        "unit": one.unit,
        "published": f"{one.published:.10g}",
        "predicted": said(predicted),
        "low": said(ends[0]),
        "high": said(ends[1]),
        "ratio": "" if predicted is None else f"{predicted / one.published:.4f}",
        "inside": "" if held is None else "yes" if held.inside else "no",
        "residual": f"{row.value:.4f}" if one.counted else "",
        "first": said(one.first),
        "first residual": "" if row.first is None else f"{row.first:.4f}",
        "cached": f"{row.cached:.4f}" if row.cached else "",
        "round": one.round,
        "note": one.note,
        "where": one.where,
    }


def lines() -> list[dict[str, str]]:
    """The lines of the file."""
    with CSV.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def stored() -> list[Row]:
    """The file's rows that take part in ranges."""
    return [_row(line) for line in lines() if line["residual"]]


def _row(line: Mapping[str, str]) -> Row:
    names = ("figure", "source", "stack", "kind", "hardware", "run", "round")
    first = float(line["first residual"]) if line["first residual"] else None
    value, cached = (float(line[name] or 0) for name in ("residual", "cached"))
    return Row(**{name: line[name] for name in names}, value=value, cached=cached, first=first)


# the page -------------------------------------------------------------------------------------------------------------


def page(found: Sequence[Mapping[str, str]]) -> str:
    """The whole page, from the lines of the CSV."""
    rows = stored()
    words = {
        "rows": f"{len(found):,}",
        "sources": str(_sources(found)),
        "counted": f"{sum(bool(line['inside']) for line in found):,}",
        "summary": "\n".join(_summary(found, rows)),
        "classes": "\n".join(_classes(found)),
        "rounds": "\n".join(_rounds(found, rows)),
        "megatron": "\n".join(_tests(found)),
        "centres": _centres(rows),
        "anchored": "\n".join(_anchored(rows)),
        "verdicts": "\n".join(_verdicts()),
        "not_counted": "; ".join(NOT_COUNTED.values()),
    }
    return TEXT.read_text(encoding="utf-8").format_map(words)


def _sources(found: Iterable[Mapping[str, str]]) -> int:
    """Publishers, of which a vendor's models are one."""
    return len({line["source"].partition(",")[0] for line in found})


def _errors(found: Iterable[Mapping[str, str]], column: str = "ratio") -> list[float]:
    """Absolute relative errors of lines that have the column."""
    if column == "ratio":
        return [abs(float(line["ratio"]) - 1) for line in found if line["ratio"]]
    return [abs(float(line[column]) / float(line["published"]) - 1) for line in found if line[column]]


def _spread(errors: Sequence[float]) -> str:
    return f"{_percent(median(errors))} | {_percent(max(errors))}" if errors else " | "


def _summary(found: Sequence[Mapping[str, str]], rows: Sequence[Row]) -> Iterator[str]:
    yield "| figure | rows | sources | median error | worst | inside, rows | inside, sources | inside, first |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    for measure in Measure:
        chosen = ranges.of_measure(rows, measure)
        ends, held = ranges.ends_of(measure, chosen)
        first = ranges.first_answers(measure, chosen, ends, chosen)
        for figure in (name for name, of in FIGURES.items() if of is measure):
            own = [line for line in found if line["figure"] == figure and line["inside"]]
            shares = ranges.shares([one for one in held if one.row.figure == figure])
            answers = ranges.share_by([one for one in first if one.row.figure == figure], ranges.of_round)
            inside = " | ".join(map(_percent, (*shares, answers)))
            yield f"| {figure} | {len(own)} | {_sources(own)} | {_spread(_errors(own))} | {inside} |"


def _grouped(
    found: Iterable[Mapping[str, str]], key: Callable[[Mapping[str, str]], str]
) -> Iterator[tuple[str, list[Mapping[str, str]]]]:
    groups: defaultdict[str, list[Mapping[str, str]]] = defaultdict(list)
    for line in found:
        groups[key(line)].append(line)
    yield from sorted(groups.items())


def _classes(found: Sequence[Mapping[str, str]]) -> Iterator[str]:
    yield "| figure | class | rows | sources | median error | worst | inside |"
    yield "| --- | --- | ---: | ---: | ---: | ---: | ---: |"
    counted = [line for line in found if line["inside"]]
    for figure in FIGURES:
        own = [line for line in counted if line["figure"] == figure]
        for name, group in _grouped(own, lambda line: f"{line['stack']}, {line['kind']}"):
            if len(group) < FEW:
                continue
            inside = sum(line["inside"] == "yes" for line in group)
            yield f"| {figure} | {name} | {len(group)} | {_sources(group)} | {_spread(_errors(group))} | {inside} |"


def _rounds(found: Sequence[Mapping[str, str]], rows: Sequence[Row]) -> Iterator[str]:
    yield "| round | figure | rows | first: median | worst | inside | today: median | worst |"
    yield "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    own = [line for line in found if line["round"] and line["first"]]
    held = _first_answers(found, rows)
    for name, group in _grouped(own, lambda line: f"{line['round']} | {line['figure']}"):
        now = _errors(group)
        if len(group) < FEW:
            continue
        inside = [one.inside for one in held if f"{one.row.round} | {one.row.figure}" == name]
        said = f"{sum(inside)} of {len(inside)}" if inside else ""
        yield f"| {name} | {len(group)} | {_spread(_errors(group, 'first'))} | {said} | {_spread(now)} |"


def _first_answers(found: Sequence[Mapping[str, str]], rows: Sequence[Row]) -> list[Held]:
    """First answers of all lines, those that do not count as well, and ranges without their rounds."""
    held: list[Held] = []
    asked = [_row(line) for line in found if line["first residual"]]
    for measure in Measure:
        own = ranges.of_measure(rows, measure)
        ends, _ = ranges.ends_of(measure, own)
        held += ranges.first_answers(measure, own, ends, ranges.of_measure(asked, measure))
    return held


def _tests(found: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Megatron-LM's tests that nothing sets aside."""
    yield "| Megatron-LM's functional tests | rows | median error | worst |"
    yield "| --- | ---: | ---: | ---: |"
    own = [line for line in found if line["source"] == "Megatron-LM tests" and not line["note"]]
    for name, group in _grouped(own, lambda line: line["figure"]):
        yield f"| {name} | {len(group)} | {_spread(_errors(group))} |"


def _anchored(rows: Sequence[Row]) -> Iterator[str]:
    """Errors of rows, and how their ranges hold, where another of their source and class was measured."""
    yield "| figure | pairs | sources | error alone | error anchored | inside, pairs | inside, sources |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for measure in Measure:
        chosen = ranges.of_measure(rows, measure)
        near = ranges.anchored(measure, chosen)
        _, held = ranges.ends_of(measure, near)
        of_pairs, of_sources = ranges.shares(held)
        centre = 0 if measure is Measure.FRAGMENTS else 1
        there = {(row.source, row.run, row.figure) for row in near}
        alone = _middle(
            (row.source, row.value - residual(measure, row.classes).expected)
            for row in chosen
            if (row.source, row.run, row.figure) in there
        )
        errors = [f"{100 * alone:.1f} %", f"{100 * _middle((row.source, row.value - centre) for row in near):.1f} %"]
        if not centre:
            errors = [f"{float(text[:-2]) / 100:.2f} GiB/√GiB" for text in errors]
        yield (
            f"| {measure} | {len(near)} | {len({row.publisher for row in near})} | {' | '.join(errors)} | "
            f"{_percent(of_pairs)} | {_percent(of_sources)} |"
        )


def _middle(found: Iterable[tuple[str, float]]) -> float:
    """Median of errors' sizes, where each source has the same weight."""
    errors: defaultdict[str, list[float]] = defaultdict(list)
    for source, error in found:
        errors[source].append(abs(error))
    return ranges.quantile(ranges.ordered((1.0, sizes) for sizes in errors.values()), 0.5)


def _centres(rows: Sequence[Row]) -> str:
    """Errors of modelled and of expected times, by ranges of other sources."""
    _, held = ranges.ends_of(Measure.TIME, ranges.of_measure(rows, Measure.TIME))
    lines = ["| step times | rows | modelled | expected |", "| --- | ---: | ---: | ---: |"]
    tuned = {"nemo", "base"}
    for name, own in (
        ("vendor's recipes, `--stack` given", [one for one in held if one.row.stack in tuned]),
        ("all others", [one for one in held if one.row.stack not in tuned]),
    ):
        before = median(abs(1 / one.row.value - 1) for one in own)
        after = median(abs(one.range.expected / one.row.value - 1) for one in own)
        lines.append(f"| {name} | {len(own)} | {_percent(before)} | {_percent(after)} |")
    return "\n".join(lines)


def layouts() -> Iterator[tuple[str, bool, FitVerdict]]:
    """Published layouts: where from, whether the layout ran, and its verdict. Refused commands have none."""
    for path, name in LAYOUTS.items():
        with path.open(encoding="utf-8") as file:
            for line in csv.DictReader(file):
                try:
                    run, gpu = described(line["command"])
                except UsageError:
                    continue
                device = hardware(gpu)
                found = figures(run, forecast_sizes(run).peak_bytes, hardware=device.name)
                ran = bool(line["tokens_per_second_per_gpu"])
                yield name, ran, found.verdict(usable_bytes=device.usable_bytes)


def _verdicts() -> Iterator[str]:
    found = list(layouts())
    yield "| layouts | rows | fits | too close to call | does not fit |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    for sheet in LAYOUTS.values():
        for name, ran in (("ran", True), ("ran out of memory", False)):
            own = [verdict for where, there, verdict in found if there is ran and where == sheet]
            counts = " | ".join(str(own.count(verdict)) for verdict in FitVerdict)
            yield f"| {sheet}: {name} | {len(own)} | {counts} |"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


# ranges ---------------------------------------------------------------------------------------------------------------


def data(rows: Sequence[Row]) -> str:
    """The whole file of ranges."""
    parts = [
        "# Measured over modelled figures of published runs, by class: written by `python -m benchmarks.accuracy`.\n"
        "# See NOTE [ Ranges of published runs ] in ranges.py for units.\n"
    ]
    for measure in Measure:
        chosen = ranges.of_measure(rows, measure)
        ends, _ = ranges.ends_of(measure, chosen)
        parents = {kind: row.classes[i:] for row in chosen for i, kind in enumerate(row.member_of)}
        near = ranges.anchored(measure, chosen)
        ends_near, _ = ranges.ends_of(measure, near)
        found = ranges.stated(measure, near, (ANCHORED,), ends_near)
        if measure is Measure.FRAGMENTS:  # of what an anchor says: one that a prediction makes changes nothing
            found = replace(found, expected=0.0)
        runs = len({(row.source, row.run, row.figure) for row in near})
        parts.append(_stated_row(measure, ANCHORED, runs, near, found))
        for kind, classes in sorted(parents.items()):
            own = [row for row in chosen if kind in row.member_of]
            found = ranges.stated(measure, chosen, classes, ends)
            parts.append(_stated_row(measure, kind, len(own), own, found))
    return "\n".join(parts)


def _stated_row(measure: Measure, kind: str, runs: int, own: Sequence[Row], found: Range) -> str:
    ends = f"low = {found.low:.3f}\nexpected = {found.expected:.3f}\nhigh = {found.high:.3f}\n"
    counts = f"runs = {runs}\nsources = {len({row.publisher for row in own})}\n"
    return f'[[{measure}]]\nkind = "{kind}"\n{counts}{ends}'


def write_all() -> str:
    """Write all files; what was written, in a line."""
    CSV.write_text(table(entries()), encoding="utf-8")
    DATA.write_text(data(stored()), encoding="utf-8")
    PAGE.write_text(page(lines()), encoding="utf-8")
    return f"{CSV.name}, {DATA.name}, {PAGE.name}: {len(lines())} rows"


if __name__ == "__main__":
    page_command("benchmarks.accuracy", __doc__, write_all)
