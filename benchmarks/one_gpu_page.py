"""Writes docs/accuracy_one_gpu.md: fine-tuning and other training on one GPU, as other people measured it.

python -m benchmarks.one_gpu_page    # writes the page
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks.accuracy_megatron import signed
from benchmarks.page_command import page_command
from jettison.predict.forecast import forecast_sizes
from jettison.predict.run_request import RunRequest, run_of

ROOT: Final = Path(__file__).parent.parent
FACTS: Final = ROOT / "tests" / "facts"
PAGE: Final = ROOT / "docs" / "accuracy_one_gpu.md"
TEXT: Final = Path(__file__).parent / "pages" / "accuracy_one_gpu.md"
UNITS: Final = {"GB": 10**9, "GiB": 2**30}
BLIND: Final = {"yes": "blind", "two": "one of two", "second": "second answer", "no": "seen before"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A published peak.

    Args:
        first: what was predicted when it was compared, in ``unit``.
        blind: "yes"; "two", where another answer was given as well; "second", where a first answer had another size of
            images; "no", where it had been seen.
        request: fields of a `RunRequest`, as ``name=value`` with blanks between.
    """

    run: str
    framework: str
    published: float
    unit: str
    first: float
    blind: str
    model: str
    request: str

    @property
    def recorded(self) -> bool:
        """Does its model need torch? Then only the first answer is shown."""
        return "dinov2" in self.model

    def now(self) -> float:
        """What is predicted today, in ``unit``."""
        pairs = (word.split("=", 1) for word in self.request.split())
        given: dict[str, Any] = {name: int(value) if value.isdigit() else value for name, value in pairs}
        model = str(FACTS / self.model) if self.model.endswith(".json") else self.model
        return forecast_sizes(run_of(model, RunRequest(**given))).peak_bytes / UNITS[self.unit]


def rows() -> list[Row]:
    """All of them."""
    with (FACTS / "one_gpu_memory.csv").open(encoding="utf-8", newline="") as file:
        return [
            Row(
                run=line["run"],
                framework=line["framework"],
                published=float(line["published"]),
                unit=line["unit"],
                first=float(line["first_answer"]),
                blind=line["blind"],
                model=line["model"],
                request=line["request"],
            )
            for line in csv.DictReader(file)
        ]


def page() -> str:
    """The whole page."""
    found = rows()
    return TEXT.read_text(encoding="utf-8").format(summary="\n".join(_summary(found)), table="\n".join(_table(found)))


def _summary(found: Sequence[Row]) -> Iterator[str]:
    kinds = {
        "LoRA of litgpt, 16 bits": [row for row in found if row.framework == "litgpt" and " LoRA" in row.run],
        "QLoRA of litgpt, with a bitsandbytes that kept inputs": [row for row in found if "QLoRA" in row.run],
        "full fine-tuning and vision": [row for row in found if row.framework != "litgpt" and row.blind != "no"],
    }
    blind = sum(row.blind == "yes" for row in found)
    yield f"- {len(found)} runs on one GPU, compared as they were first predicted; {blind} blindly, with one answer."
    for kind, members in kinds.items():
        errors = [abs(row.first / row.published - 1) for row in members]
        yield (
            f"- {kind[0].upper()}{kind[1:]}, {len(members)} runs: median {100 * median(errors):.1f} %, "
            f"worst {100 * max(errors):.1f} %, {sum(e <= 0.05 for e in errors)} within 5 %."
        )
    yield "- No constant was fitted; one term, what autocast keeps, was looked for because of two of these rows."


def _table(found: Sequence[Row]) -> Iterator[str]:
    yield "| run | code | published | first answer | error | today | |"
    yield "| --- | --- | ---: | ---: | ---: | ---: | --- |"
    for row in found:
        now = "" if row.recorded else signed(row.now() / row.published - 1)
        yield (
            f"| {row.run} | {row.framework} | {row.published:.2f} {row.unit} | {row.first:.2f} "
            f"| {signed(row.first / row.published - 1)} | {now} | {BLIND[row.blind]} |"
        )


def write_page() -> str:
    """Write it; what was written, in a line."""
    PAGE.write_text(page(), encoding="utf-8")
    return f"{PAGE.name}: {len(rows())} rows"


if __name__ == "__main__":
    page_command("benchmarks.one_gpu_page", __doc__, write_page)
