"""`demo`: the same training twice, plainly and under a budget."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from jettison.cli.app import option, verb
from jettison.report.console import progress, show


@verb("demo")
def command(
    *,
    steps: Annotated[int, option("Batch and sequence", "Training steps, of each run.")] = 20,
    out: Annotated[Path, option("Output", "Folder for plan.json, proof.json and report.html.")] = Path("out/demo"),
) -> None:
    """Train a small Llama with and without a memory budget, and compare."""
    with progress() as say:
        say("loading torch")
        from jettison.cli.demo_run import run_demo

        result = run_demo(out, steps=steps, progress=say)
    show(result.table())
    result.require()
