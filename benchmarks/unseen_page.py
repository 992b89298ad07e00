"""Writes docs/accuracy_unseen.md: runs of other people that nobody here had seen when they were predicted.

python -m benchmarks.unseen_page    # writes the page
"""

from __future__ import annotations

import contextlib
import io
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from benchmarks.accuracy_megatron import KINDS, signed
from benchmarks.megatron_golden import HYBRIDS, MORE, Facts, Golden, facts, golden, name_of, recorded, why_not
from benchmarks.megatron_others import PREFIXES
from benchmarks.page_command import page_command
from jettison.cli.main import run
from jettison.core.units import GIB

OTHERS = Path(__file__).parent.parent / "tests" / "facts" / "unseen_runs.csv"
"""Of other projects; a command beside each."""
PAGE = Path(__file__).parent.parent / "docs" / "accuracy_unseen.md"
TEXT = Path(__file__).parent / "pages" / "accuracy_unseen.md"
ASIDE = {
    "bert_": "a BERT, whose pooler (18 MiB here) is not described",
    "t5_": "a T5, described as BART's two stacks with norms first; what its masks take is not described",
    "cross_entropy_loss_fusion": "the first iteration compiles the loss",
    "defer_embedding_wgrad": "what waits for the head's gradient was described after these had been looked at",
    "fine_grained_offloading": "the first iteration sends everything to the host while it learns what comes last",
}
"""Parts of names, and why a test is shown and not counted."""


BESIDE = {
    "lightning": "experts are routed by an untrained router, and one rank is not like another",
    "dgx_a100.json": "files for A100 are copies: of four stages H100's, whose workspaces are 28 MiB larger; of one "
    "stage two are one file of June 2025, and what ran then is not what the arguments say now",
}
"""The same of models with scans, by parts of names or of files."""


def page() -> str:
    """The whole page."""
    pairs = [(row, golden(row)) for row in facts(MORE) if not why_not(row)]
    counted = [pair for pair in pairs if not aside(pair[0])]
    return TEXT.read_text(encoding="utf-8").format(
        summary="\n".join((*_summary(counted), _stacks(pairs))),
        counted="\n".join(_table(counted)),
        aside="\n".join(_table([pair for pair in pairs if aside(pair[0])])),
        why="\n".join(f"- `{part}`: {why}." for part, why in ASIDE.items()),
        hybrids="\n".join((*_hybrids(), "", *(f"- `{part}`: {why}." for part, why in BESIDE.items()))),
        without="\n".join(_without()),
        others="\n".join(_others()),
    )


def aside(row: Facts) -> str:
    """Why a row is not counted; empty where it is."""
    return next((why for part, why in ASIDE.items() if part in name_of(row)), "")


def blind(row: Facts) -> tuple[float, float, float] | None:
    """What was predicted before any of these rows had been looked at."""
    found = [row[f"blind_{kind}_gib"] for kind in ("first", "later", "between")]
    return (float(found[0]), float(found[1]), float(found[2])) if all(found) else None


def errors(row: Facts, found: Golden) -> tuple[list[float], list[float]]:
    """Relative, with their signs: of the blind prediction and of today's."""
    before = blind(row) or found.predicted()
    pairs = zip(before, found.predicted(), found.measured, strict=True)
    return tuple(map(list, zip(*((b / m - 1, p / m - 1) for b, p, m in pairs), strict=True)))  # type: ignore[return-value]


def _summary(pairs: Sequence[tuple[Facts, Golden]]) -> Iterator[str]:
    found = [errors(row, one) for row, one in pairs]
    yield f"- {len(pairs)} functional tests of Megatron-LM on A100, H100 and GB200, predicted before one was looked at."
    for i, kind in enumerate(KINDS):
        then, now = ([abs(each[k][i]) for each in found] for k in (0, 1))
        yield (
            f"- {kind.capitalize()}: blind median {_percent(median(then))}, worst {_percent(max(then))}, "
            f"{_within(then)} within 5 %; today median {_percent(median(now))}, worst {_percent(max(now))}, "
            f"{_within(now)}."
        )


def _hybrids() -> Iterator[str]:
    """Models with scans: a line of those that are comparable, and all of them."""
    pairs = [(row, golden(row)) for row in facts(HYBRIDS)]
    found = [errors(row, one)[0] for row, one in pairs if not _beside(row)]
    spans = (
        f"{kind} {signed(min(e))} to {signed(max(e))}" for kind, e in zip(KINDS, zip(*found, strict=True), strict=True)
    )
    yield f"Blind, {len(found)} of {len(pairs)} rows: {', '.join(spans)}."
    yield ""
    yield from _table(pairs)


def _beside(row: Facts) -> bool:
    return any(part in row["source"] for part in BESIDE)


def _stacks(pairs: Sequence[tuple[Facts, Golden]]) -> str:
    """What is not counted of other models."""
    chosen = [(row, one) for row, one in pairs if name_of(row).startswith(PREFIXES)]
    found = [abs(error) for row, one in chosen for error in errors(row, one)[0]]
    said = f"blind median {_percent(median(found))}, worst {_percent(max(found))}"
    return f"- {len(chosen)} of BERT and T5, not counted: {said}. No constant was fitted to any."


def _within(values: Sequence[float]) -> int:
    return sum(value <= 0.05 for value in values)


def _percent(value: float) -> str:
    return f"{100 * value:.2f} %"


def _table(pairs: Sequence[tuple[Facts, Golden]]) -> Iterator[str]:
    titles = (cell for kind in ("first iteration", "later", "between") for cell in (f"{kind}: GiB", "blind", "now"))
    yield f"| test | GPU | of | {' | '.join(titles)} |"
    yield f"| --- | --- | --- |{' ---: |' * 9}"
    for row, one in pairs:
        then, now = errors(row, one)
        name = one.name.removeprefix("gpt3_").removeprefix("moe_")
        cells = [f"`{name}`", one.gpu.removesuffix("-80GB"), recorded(row)]
        for measured, b, p in zip(one.measured, then, now, strict=True):
            cells += [f"{measured:.3f}", signed(b), signed(p)]
        yield f"| {' | '.join(cells)} |"


def _without() -> Iterator[str]:
    counts = Counter(why_not(row) for row in facts(MORE) if why_not(row))
    return (f"- {count}: {why}." for why, count in counts.most_common())


def _others() -> Iterator[str]:
    yield "| run | source | figure | published GiB | blind GiB | predicted GiB | error | not comparable since |"
    yield f"| --- | --- | --- |{' ---: |' * 4} --- |"
    commands = [""]
    for row in facts(OTHERS):
        published = float(row["published"]) * (1e9 if row["unit"] == "GB" else GIB) / GIB
        predicted = answered(row["command"]) / GIB
        cells = (f"{published:.2f}", row["blind_gib"], f"{predicted:.2f}", signed(predicted / published - 1))
        yield f"| {row['run']} | {row['source']} | {row['figure']} | {' | '.join(cells)} | {row['why']} |"
        commands.append(f"- {row['run']}: `jettison ledger {row['command']}`")
    yield from commands


def answered(command: str) -> int:
    """The peak that `jettison ledger` prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        code = run(["ledger", *command.split(), "--format", "json", "--no-entries"])
    assert code == 0, command
    return int(json.loads(printed.getvalue())["peak_bytes"])


def write_page() -> str:
    """Write it; what was written, in a line."""
    PAGE.write_text(page(), encoding="utf-8")
    return f"{PAGE.name}: {len(facts(MORE))} rows"


if __name__ == "__main__":
    page_command("benchmarks.unseen_page", __doc__, write_page)
