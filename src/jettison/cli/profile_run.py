"""`profile` of a script or a recipe: some of its steps run under `torch.profiler`, and the trace is read."""

from __future__ import annotations

import runpy
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median

from jettison.cli.profile import profile_files
from jettison.cli.train import train
from jettison.core.errors import UsageError
from jettison.core.progress import Progress, silent
from jettison.core.units import format_seconds
from jettison.diagnose.slow import slow_first
from jettison.measure.profiled import WARMUP_STEPS, Recorded, recorded
from jettison.report.findings import FindingsReport
from jettison.spec.hardware import Hardware
from jettison.train.recipe import CheckpointSection, EvalSection, ExportSection, read_recipe


def profile_run(
    target: str, *, steps: int, gpu: Hardware | None = None, trace: Path | None = None, progress: Progress = silent
) -> FindingsReport:
    """Run it until ``steps`` steps are recorded, after two, or it ends, and say what they show.

    Of a recipe nothing is kept: no log, no checkpoint, no weights.

    Args:
        target: a Python file, or a recipe as `train` takes it.
        trace: where the trace is kept.

    Raises:
        UsageError: there is no such file, or no optimizer of torch's made so many steps.
    """
    if steps < 1:
        raise UsageError(f"got --steps {steps}; expected 1 or more")
    is_script = target.endswith(".py")
    if is_script and not Path(target).is_file():
        raise UsageError(f"there is no script {target}; give a script, a recipe, a trace or a memory snapshot")
    with tempfile.TemporaryDirectory(prefix="jettison-profile-") as folder:
        path = Path(folder) / "trace.json" if trace is None else trace
        with recorded(path, steps=steps, progress=progress) as found:
            if is_script:
                with _as_script(Path(target)):
                    runpy.run_path(target, run_name="__main__")
            else:
                _train(target, WARMUP_STEPS + steps, folder, progress)
        if len(found.seconds) <= WARMUP_STEPS:
            raise UsageError(
                f"{target} ended after {len(found.seconds)} optimizer steps; more than {WARMUP_STEPS} are needed, of "
                "optimizers of torch's"
            )
        return _with_first_step(profile_files([path], gpu), found)


@contextmanager
def _as_script(path: Path) -> Iterator[None]:
    """Set ``sys.argv`` and ``sys.path`` as Python does for a script."""
    arguments, sys.argv = sys.argv, [str(path)]
    sys.path.insert(0, str(path.resolve().parent))
    try:
        yield
    except SystemExit:
        pass
    finally:
        sys.argv = arguments
        sys.path.remove(str(path.resolve().parent))


def _train(target: str, steps: int, folder: str, progress: Progress) -> None:
    asked = read_recipe(target)
    # memory is measured by torch's profiler as well, and there can be one at a time
    log = replace(asked.log, folder=f"{folder}/log", report=False, memory_steps=0)
    checkpoint, evaluation, export = CheckpointSection(), EvalSection(), ExportSection()
    train(
        replace(asked, steps=steps, log=log, checkpoint=checkpoint, eval=evaluation, export=export), progress=progress
    )


def _with_first_step(report: FindingsReport, found: Recorded) -> FindingsReport:
    """The first step is not in the trace: it was timed."""
    first, others = found.seconds[0], found.seconds[1:]
    rows = [*report.facts, ("first step", f"{format_seconds(first)}; {format_seconds(median(others))} the others")]
    more = report.more | {"step_seconds": found.seconds}
    findings = (*report.findings, *slow_first(0, first, median(others)))
    return replace(report, facts=rows, more=more, findings=findings)
