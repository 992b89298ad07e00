"""From a run's newest checkpoint to a folder that `from_pretrained` loads, on any number of ranks; nothing trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any, Final

from jettison.progress import Progress, silent
from jettison.train.export import export
from jettison.train.failures import same_everywhere
from jettison.train.ranks import joined, waiting_for
from jettison.train.recipe import TrainRecipe
from jettison.train.setup import Session, prepare

_SCHEMA: Final = "jettison.weights/1"
_PATIENCE_SECONDS: Final = 24 * 3600.0
"""One rank puts files together while the others wait."""


@dataclass(frozen=True, kw_only=True)
class ExportResult:
    """The weights after so many steps, and where they are."""

    step: int
    export: str

    def document(self) -> dict[str, Any]:
        """Schema ``jettison.weights/1``."""
        return {"schema": _SCHEMA, **asdict(self), "request": None}

    def lines(self) -> Iterator[str]:
        """For people."""
        yield f"the weights of step {self.step}: {self.export}"


def export_run(make: Callable[[], TrainRecipe], *, say: Progress = silent, warn: Progress = silent) -> ExportResult:
    """Read the checkpoint that a recipe's run would go on from, and write its weights.

    Args:
        make: reads the recipe, which has an ``export.folder``.

    Raises:
        UsageError: there is no checkpoint, or the model has no form that transformers knows.
        ExportFailed: the weights could not be written.
    """
    with joined() as world, ExitStack() as held:
        if not world.leads:
            say = warn = silent
        recipe = world.together(make)
        same_everywhere(recipe, world)
        session = prepare(recipe, world, held, must_resume=True, say=say, warn=warn)
        export_session(session, say)
        assert recipe.export.folder is not None
        return ExportResult(step=session.step, export=recipe.export.folder)


def export_session(session: Session, say: Progress) -> str | None:
    """What the recipe says of weights at the end of a run: the folder, if it names one. Every rank calls it.

    Raises:
        ExportFailed: the weights could not be written.
    """
    section = session.recipe.export
    if session.hub is not None:
        say(f"writing the weights to {section.folder}")
        with waiting_for(session.world, _PATIENCE_SECONDS):
            export(section, session.hub, session.engine, session.world)
    return section.folder
