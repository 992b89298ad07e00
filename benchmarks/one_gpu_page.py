"""Writes docs/accuracy_one_gpu.md: fine-tuning and other training on a GPU or a few, as other people measured it.

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
from jettison.predict.run_fields import RunRequest
from jettison.predict.run_request import run_of
from jettison.spec.run import Run

ROOT: Final = Path(__file__).parent.parent
FACTS: Final = ROOT / "tests" / "facts"
PAGE: Final = ROOT / "docs" / "accuracy_one_gpu.md"
TEXT: Final = Path(__file__).parent / "pages" / "accuracy_one_gpu.md"
UNITS: Final = {"GB": 10**9, "GiB": 2**30, "MiB": 2**20}
BLIND: Final = {
    "yes": "blind",
    "two": "one of two",
    "second": "second answer",
    "no": "seen before",
    "misread": "table misread",
}
FILES: Final = ("one_gpu_memory.csv", "one_gpu_more.csv")
NOT_TENSORS: Final = {
    "fsdp_qlora": "reserved, on cards of 24 GB without expandable segments; allocated, where it is said, is above",
    "Qwen": "how it was measured is not said; 1.8B in full has more than DeepSpeed's states",
    "ms-swift": "reserved, with samples of every length: a cache of blocks that fit no other sample",
    "transformers": "what nvidia-smi says at the end, less 1343 MiB of an empty process",
}
"""Whose figures are not of tensors, and what they are."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A published peak.

    Args:
        figure: allocated, reserved, or what else was printed.
        first: what was predicted when it was compared, in ``unit``.
        blind: "yes"; "two", where another answer was given as well; "second", where a first answer had another size of
            images; "no", where it had been seen; "misread", where the table had been taken to say something else.
        request: fields of a `RunRequest`, as ``name=value`` with blanks between.
        own: of a step of the project's own modules on fake tensors (`benchmarks.litgpt_rows`), in ``unit``.
    """

    run: str
    framework: str
    figure: str
    published: float
    unit: str
    first: float
    blind: str
    model: str
    request: str
    own: float | None

    @property
    def counted(self) -> bool:
        """Is the figure one of tensors?"""
        return self.figure == "allocated"

    @property
    def recorded(self) -> bool:
        """Does its model need torch? Then only the first answer is shown."""
        return "dinov2" in self.model

    def described(self) -> Run:
        """The run."""
        pairs = (word.split("=", 1) for word in self.request.split())
        given: dict[str, Any] = {name: _value(value) for name, value in pairs}
        model = str(FACTS / self.model) if self.model.endswith(".json") else self.model
        return run_of(model, RunRequest(**given))

    def now(self) -> float:
        """What is predicted today, in ``unit``."""
        return forecast_sizes(self.described()).peak_bytes / UNITS[self.unit]


def _value(word: str) -> int | bool | str:
    return int(word) if word.isdigit() else {"yes": True, "no": False}.get(word, word)


def rows() -> list[Row]:
    """All of them."""
    return [_row(line) for name in FILES for line in _lines(FACTS / name)]


def _lines(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _row(line: dict[str, str]) -> Row:
    return Row(
        run=line["run"],
        framework=line["framework"],
        figure=line.get("figure", "allocated"),
        published=float(line["published"]),
        unit=line["unit"],
        first=float(line["first_answer"]),
        blind=line["blind"],
        model=line["model"],
        request=line["request"],
        own=float(line["own_code"]) if line["own_code"] else None,
    )


def page() -> str:
    """The whole page."""
    found = rows()
    counted = [row for row in found if row.counted]
    words = {
        "summary": _summary(counted),
        "table": _table(counted),
        "others": _others([row for row in found if not row.counted]),
    }
    text = TEXT.read_text(encoding="utf-8")
    return text.format(**{name: "\n".join(lines) for name, lines in words.items()})


def _summary(found: Sequence[Row]) -> Iterator[str]:
    full = ("torchtune", "timm", "timm under autocast")
    kinds = {
        "LoRA of litgpt, 16 bits": [row for row in found if row.framework == "litgpt" and " LoRA" in row.run],
        "QLoRA of litgpt, with a bitsandbytes that kept inputs": [row for row in found if "QLoRA" in row.run],
        "full fine-tuning and vision": [row for row in found if row.framework in full],
        "NeMo AutoModel and FSDP with LoRA": [row for row in found if row.framework in ("Automodel", "fsdp_qlora")],
    }
    blind = sum(row.blind == "yes" for row in found)
    yield f"- {len(found)} runs, compared as they were first predicted; {blind} blindly, with one answer."
    for kind, members in kinds.items():
        own = [abs(row.own / row.published - 1) for row in members if row.own is not None]
        yield (
            f"- {kind[0].upper()}{kind[1:]}, {len(members)} runs: {_errors([_first_error(row) for row in members])}"
            + (f" Steps of its own modules on fake tensors, {len(own)} of them: {_errors(own)}" if own else "")
        )
    yield "- No constant was fitted. Terms that came of these rows: what autocast keeps, and Liger's kernels."


def _first_error(row: Row) -> float:
    return abs(row.first / row.published - 1)


def _errors(shares: Sequence[float]) -> str:
    near = sum(share <= 0.05 for share in shares)
    return f"median {100 * median(shares):.1f} %, worst {100 * max(shares):.1f} %, {near} within 5 %."


def _table(found: Sequence[Row]) -> Iterator[str]:
    yield "| run | code | published | first answer | error | today | own modules | |"
    yield "| --- | --- | ---: | ---: | ---: | ---: | ---: | --- |"
    for row in found:
        now = "" if row.recorded else signed(row.now() / row.published - 1)
        own = "" if row.own is None else signed(row.own / row.published - 1)
        yield (
            f"| {row.run} | {row.framework} | {row.published:.2f} {row.unit} | {row.first:.2f} "
            f"| {signed(row.first / row.published - 1)} | {now} | {own} | {BLIND[row.blind]} |"
        )


def _others(found: Sequence[Row]) -> Iterator[str]:
    yield "| code | rows | first answers | figure |"
    yield "| --- | ---: | ---: | --- |"
    for framework, why in NOT_TENSORS.items():
        errors = sorted(row.first / row.published - 1 for row in found if row.framework == framework)
        yield f"| {framework} | {len(errors)} | {signed(errors[0])} to {signed(errors[-1])} | {why} |"


def write_page() -> str:
    """Write it; what was written, in a line."""
    PAGE.write_text(page(), encoding="utf-8")
    return f"{PAGE.name}: {len(rows())} rows"


if __name__ == "__main__":
    page_command("benchmarks.one_gpu_page", __doc__, write_page)
