"""The explorer's data, made by several processes: planning and tracing are Python's work, and people wait for a page.

This process takes the sets of data from one end of a list, the others from its other end.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, Final

from jettison.processors import deaf_to_interrupts, end_pool
from jettison.progress import Progress, silent
from jettison.report.explorer_models import Subject, subjects

Builder = Callable[[Sequence[Subject]], Any]
MOST_PROCESSES: Final = 4
"""More would wait for the longest set."""
LONG: Final = ("front", "offload", "closed-form", "time")
"""Sets that take half a second and more; the others are made here, and the last of these, while processes start."""


def asked(build: Callable[[list[str]], Any], about: Sequence[Subject]) -> Any:
    """What a builder makes of the models that were asked for by name."""
    return build([subject.argument for subject in about if subject.asked])


def built(
    builders: Mapping[str, Builder], models: Sequence[str], *, jobs: int = 1, progress: Progress = silent
) -> dict[str, Any]:
    """Each builder's data, by its name.

    Args:
        models: what the page is about; see `subjects`.
        jobs: processes at most, this one included.
        progress: is told what is worked out.

    Raises:
        UsageError: a model that is none.
    """
    about = subjects(models)
    found: dict[str, Any] = {}
    sent = [name for name in LONG if name in builders]

    def say(name: str) -> None:
        progress(f"working out {name}")

    if min(jobs, len(sent)) < 2:
        for name, build in builders.items():
            say(name)
            found[name] = build(about)
        return found
    workers = min(jobs, len(sent), MOST_PROCESSES) - 1
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    whole = False
    try:
        with deaf_to_interrupts():
            waiting = {name: pool.submit(_build, builders[name], tuple(models)) for name in sent}
        here = [name for name in builders if name not in waiting]
        for name in [*reversed(sent), *here]:
            if name in here or waiting[name].cancel():  # nobody has begun with it
                say(name)
                found[name] = builders[name](about)
        for name, future in waiting.items():
            if name not in found:
                say(name)
                found[name] = future.result()
        whole = True
    finally:
        end_pool(pool, now=not whole)
    return {name: found[name] for name in builders}


def _build(builder: Builder, models: tuple[str, ...]) -> Any:
    return builder(subjects(models))
