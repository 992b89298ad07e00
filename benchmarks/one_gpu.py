"""Fine-tuning and other training on a GPU or a few, as other people measured it.

Requests were written from recipes and code while the tables' memory columns were hidden.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from jettison.core.objects import renamed
from jettison.predict.forecast import forecast_sizes
from jettison.request.options import RunRequest
from jettison.request.resolve import run_of
from jettison.spec.run import Run

ROOT: Final = Path(__file__).parent.parent
FACTS: Final = ROOT / "tests" / "facts"
UNITS: Final = {"GB": 10**9, "GiB": 2**30, "MiB": 2**20}
BLIND: Final = {
    "yes": "",
    "two": "one of two answers: the recipe does not say whether the optimizer steps in backward",
    "second": "second answer: the first had images of 518, which the script crops to 224",
    "no": "seen before it was predicted",
    "misread": "the table had been misread: its lines add up, and the answer was without FSDP",
}
FILES: Final = ("one_gpu_memory.csv", "one_gpu_more.csv")
FRAMEWORKS: Final = {
    "litgpt": "first: --kernels pytorch; litgpt's own modules since (--kernels litgpt)",
    "fsdp_qlora": "24 GB without expandable segments; the policy wraps layers and adapters alone "
    "(--fsdp-wrap-layers-only)",
    "Qwen": "the figure is not named; 1.8B in full has more than DeepSpeed's states",
    "transformers": "nvidia-smi at the end, less 1343 MiB of an empty process",
    "Automodel": "the table says GB and is in GiB",
}
"""Notes on each framework's rows."""


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
    source: str
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
        return run_of(model, RunRequest(**renamed(RunRequest, given)))

    def now(self) -> float:
        """Return today's prediction, in ``unit``."""
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
        source=line["source"],
        figure=line.get("figure", "allocated"),
        published=float(line["published"]),
        unit=line["unit"],
        first=float(line["first_answer"]),
        blind=line["blind"],
        model=line["model"],
        request=line["request"],
        own=float(line["own_code"]) if line["own_code"] else None,
    )
