"""`demo`: the same training twice, plainly and under a budget."""

from __future__ import annotations

from pathlib import Path

from jettison.report.console import progress, show


def command(*, out: Path = Path("out/demo"), steps: int = 20) -> None:
    """Train a small Llama on the standard library's source, plainly and under a budget, and compare.

    Args:
        out: Folder for plan.json, proof.json and report.html, which are replaced.
        steps: Training steps on each side.
    """
    with progress() as say:
        say("loading torch")
        from jettison.cli.demo_run import run_demo

        result = run_demo(out, steps=steps, progress=say)
    show(result.table())
    result.require()
