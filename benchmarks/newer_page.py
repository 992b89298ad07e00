"""Throughput of newer runs, published and predicted, before and now: writes docs/accuracy_newer.md.

    python -m benchmarks.newer_page

What was predicted before, by the version that nobody had compared with these runs, is in
`benchmarks/results/newer-times-before.csv`.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from benchmarks.newer_runs import NewerRun, rows
from benchmarks.page_command import page_command
from benchmarks.throughput import signed

PRECISIONS = ("BF16", "FP8-CS", "FP8-BLOCKS", "MXFP8", "NVFP4")
HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "accuracy_newer.md"
TEMPLATE = HERE / "pages" / "accuracy_newer.md"
BEFORE = HERE / "results" / "newer-times-before.csv"
Group = tuple[str, Callable[[NewerRun], bool]]
GROUPS: tuple[Group, ...] = (
    ("nemo_dense", lambda row: row.stack == "nemo" and not row.experts),
    ("nemo_experts", lambda row: row.stack == "nemo" and row.experts),
    ("simumax_dense", lambda row: row.stack == "megatron" and not row.experts),
    ("simumax_experts", lambda row: row.stack == "megatron" and row.experts),
    ("dense", lambda row: not row.experts),
    ("experts", lambda row: row.experts),
)


def before() -> list[float]:
    """Relative errors of throughput, in the order of `rows`."""
    with BEFORE.open(encoding="utf-8") as file:
        return [float(row["error"]) for row in csv.DictReader(file)]


def page(found: Sequence[NewerRun] | None = None) -> str:
    """The whole page."""
    compared = list(zip(rows() if found is None else found, before(), strict=True))
    words = {"plainly": plainly([row for row, _ in compared])}
    words |= recipes([row for row, _ in compared])
    for name, belongs in GROUPS:
        chosen = [(row, was) for row, was in compared if belongs(row)]
        words[name] = _table(chosen)
        words[f"{name}_medians"] = _medians(chosen)
    return TEMPLATE.read_text(encoding="utf-8").format_map(words)


def _medians(chosen: Sequence[tuple[NewerRun, float]]) -> str:
    """Of absolute errors: all, before, and apart those that were looked at and those that were not."""
    parts = {seen: [abs(row.error) for row, _ in chosen if row.listed is seen] for seen in (True, False)}
    now = median(abs(row.error) for row, _ in chosen)
    was = median(abs(error) for _, error in chosen)
    apart = [
        f"{len(errors)} {name} {_percent(median(errors))}"
        for name, errors in (("looked at", parts[True]), ("not", parts[False]))
        if errors
    ]
    return f"{len(chosen)} runs, median {_percent(now)} (before {_percent(was)}; {', '.join(apart)})"


def plainly(found: Sequence[NewerRun]) -> str:
    """The median of NVIDIA's runs with experts where nothing is said of graphs, libraries, overlap or fused experts."""
    errors = []
    for row in found:
        if row.stack == "nemo" and row.experts:
            off = {"once_to_node": False, "hides_experts": False, "graphed": False, "loops_experts": True}
            plain = replace(row, execution=replace(row.execution, stack="nemo", **off))  # type: ignore[arg-type]
            errors.append(abs(plain.error))
    return _percent(median(errors))


def recipes(found: Sequence[NewerRun]) -> dict[str, str]:
    """NVIDIA's runs by device and precision: a table, and a line of dense ones."""
    groups: defaultdict[tuple[str, str, bool], list[float]] = defaultdict(list)
    for row in found:
        if row.stack == "nemo":
            gpu, precision = row.name.split(" x ")[1].split(",")[0].split()
            for device in (gpu, "all"):
                groups[device, precision, row.experts].append(row.error)
    lines = ["| device | precision | dense | with experts |", "| --- | --- | --- | --- |"]
    for device in ("H100", "B200", "GB200", "B300", "GB300"):
        for precision in PRECISIONS:
            cells = [_errors(groups[device, precision, experts]) for experts in (False, True)]
            if any(cells):
                lines.append(f"| {device} | {precision} | {' | '.join(cells)} |")
    dense = {precision: groups["all", precision, False] for precision in PRECISIONS}
    said = [
        f"{precision} {_percent(median(map(abs, errors)))} of {len(errors)}"
        for precision, errors in dense.items()
        if errors
    ]
    return {"by_recipe": "\n".join(lines), "recipes": ", ".join(said)}


def _errors(errors: Sequence[float]) -> str:
    return f"{len(errors)}: {_percent(median(map(abs, errors)))}, {signed(median(errors))}" if errors else ""


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _table(chosen: Sequence[tuple[NewerRun, float]]) -> str:
    lines = [
        "| run | source | looked at | published tokens/s/GPU | predicted | error before | error |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for row, was in chosen:
        seen = "yes" if row.listed else "no"
        lines.append(
            f"| {row.name} | {row.source} | {seen} | {row.published:,.0f} | "
            f"{row.found.tokens_per_second_per_gpu:,.0f} | {signed(was)} | {signed(row.error)} |"
        )
    return "\n".join(lines)


def write_page() -> str:
    """Write it; what was written, in a line."""
    PAGE.write_text(page(), encoding="utf-8")
    return f"{PAGE.name}: {len(rows())} rows"


if __name__ == "__main__":
    page_command("benchmarks.newer_page", __doc__, write_page)
