"""Which models the explorer is about: those asked for, and the published ones that figures are held against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

from jettison.core.errors import UsageError
from jettison.families.presets import PRESETS
from jettison.predict.run_fields import RunRequest
from jettison.predict.run_request import model_spec, resolve
from jettison.spec.model import ModelSpec
from jettison.spec.run import Run

PUBLISHED: Final = ("gpt-22b", "gpt-175b", "gpt-530b", "gpt-1t")
"""arXiv 2205.05198 Table 3."""
USUAL: Final = ("llama3-8b", "llama3-70b")
"""Beside them where nothing is asked for."""
PUBLISHED_MICRO_BATCH: Final = {"gpt-22b": 4}
"""Table 3 again; the others train on one sequence at a time."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model of the page. ``argument`` names it on a command line."""

    argument: str
    label: str
    model: ModelSpec
    asked: bool  # by the user, not by the page

    @cached_property
    def run(self) -> Run:
        """As `jettison ledger` would take it without another word."""
        return resolve(self.model, RunRequest()).run

    @property
    def micro_batch(self) -> int:
        """Of its published training."""
        return PUBLISHED_MICRO_BATCH.get(self.argument, 1)


MOST: Final = 8
"""Models that a page may be asked about: it stays below 1 MB, and is worked out within a minute or two."""


def subjects(models: Sequence[str]) -> tuple[Subject, ...]:
    """Those asked for first, then the published ones, each once.

    Raises:
        UsageError: a name that stands for no model, or more than `MOST`.
    """
    wanted = list(dict.fromkeys(models))
    if len(wanted) > MOST:
        raise UsageError(f"got {len(wanted)} models; a page holds at most {MOST}: write several pages")
    more = [name for name in (*PUBLISHED, *(() if wanted else USUAL)) if name not in wanted]
    return tuple(_subject(name, asked=name in wanted) for name in (*wanted, *more))


def _subject(argument: str, *, asked: bool) -> Subject:
    model = model_spec(argument)
    label = argument if argument in PRESETS else _file_label(argument, model)
    return Subject(argument=argument, label=label, model=model, asked=asked)


def _file_label(argument: str, model: ModelSpec) -> str:
    path = Path(argument)
    folder = path.parent.name if path.suffix == ".json" else path.name
    return folder or model.name
