"""`calibrate`: an anchor file from one measured run, for `--anchor`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from jettison.cli.app import Described, Flattened, Force, Format, asked, deliver, option, refuse_to_overwrite, verb
from jettison.cli.from_file import NO_SOURCE, RunSourceFlags, sourced, spec_of
from jettison.core.documents import document
from jettison.core.errors import UsageError
from jettison.core.files import write_whole
from jettison.core.units import format_bytes, format_seconds
from jettison.cost.flops import sequences, tokens
from jettison.diagnose.fit_anchor import fit_anchor, fragment_bytes, measured_in
from jettison.frameworks.run_file import flags_of
from jettison.predict.forecast import extra_bytes, forecast
from jettison.predict.ranges import ANCHOR_WEIGHT
from jettison.predict.time import estimate
from jettison.report.console import hint
from jettison.report.tables import facts as facts_table
from jettison.request.options import NOTHING_ASKED, RunRequest
from jettison.request.resolve import is_live, resolve
from jettison.spec.anchor import FACTORS, MEASURED_WORDS, MeasuredRun, RunAnchor, parse_measured
from jettison.spec.hardware import Hardware, hardware
from jettison.spec.recompute import Mode
from jettison.spec.run import Run

DOUBTFUL = 0.1
"""Share of the allocated bytes; more that is unexplained is warned about."""
DOUBTFUL_STEP = 2.0
"""Measured over predicted step time, either way; more is warned about."""


@verb("calibrate")
def command(
    model: Described = None,
    /,
    *,
    measured: Annotated[
        str, option("Measurement", f"Any of {MEASURED_WORDS}, or the run's log, memory snapshot or trace.")
    ],
    gpu: Annotated[
        str | None, option("Memory and GPU", "GPU of the run, such as h100-80gb: for a step's time.")
    ] = None,
    request: Annotated[RunRequest, Flattened] = NOTHING_ASKED,
    source: Annotated[RunSourceFlags, Flattened] = NO_SOURCE,
    form: Format = "human",
    out: Annotated[Path | None, option("Output", "File for --anchor, .toml [default: print it].")] = None,
    force: Force = False,
) -> None:
    """Fit an anchor file to a measured run: the fewest physical quantities that explain it.

    `ledger`, `plan`, `estimate` and `search` correct their answers by it: --anchor FILE, for runs of the same stack.
    """
    refuse_to_overwrite(out, force=force)
    model, request, found = sourced(model, request, source, verb="ledger")
    if is_live(model):
        raise UsageError(f"got the live model {model}; an anchor is of a preset, a config.json or --from FILE")
    if request.anchor is not None:
        raise UsageError(f"got --anchor {request.anchor}; a run is anchored on what it measured itself")
    run = resolve(spec_of(model, request), request).run
    if run.recompute.mode is Mode.AUTO:
        raise UsageError("got --recompute auto; say what the measured run recomputed")
    if found is not None and found.compile:
        run = replace(run, compiled=True)
    device = None if gpu is None else hardware(gpu)
    figures = _measured(measured, run)
    name = request.like or run.kernels.name
    typed = (
        found.command("ledger", request)
        if found is not None
        else " ".join(["jettison ledger", model, *flags_of(request)])
    )
    anchor = fit_anchor(run, figures, hardware=device, stack=name, command=typed)
    text = anchor.text()
    if abs(anchor.unexplained) > DOUBTFUL * forecast(run).peak_bytes:
        than = "less" if anchor.unexplained < 0 else "more"
        far = format_bytes(abs(anchor.unexplained))
        hint(f"note: {far} {than} than predicted, which nothing explains; does this describe the run?")
    if figures.step is not None and device is not None:
        times = figures.step / estimate(run, device).step_seconds
        if not 1 / DOUBTFUL_STEP <= times <= DOUBTFUL_STEP:
            hint(f"note: the step took {times:.3g} times what is predicted; does this describe the run?")
    if out is not None:
        write_whole(out, text)
        hint(f"wrote {out}; --anchor {out} corrects further answers for {name}")
    elif form == "human":
        sys.stdout.write(text)
    rows = list(_rows(anchor, run, device))
    if form == "json" or out is not None:
        deliver(
            lambda: _document(anchor, run),
            lambda: facts_table(rows),
            form=form,
            request=asked(model=model, measured=measured, gpu=gpu, request=request),
        )


def _measured(text: str, run: Run) -> MeasuredRun:
    if "=" in text and not Path(text).exists():
        return parse_measured(text)
    path = Path(text)
    if not path.is_file():
        raise UsageError(f"got --measured {text!r}; expected some of {MEASURED_WORDS}, or a log, snapshot or trace")
    return measured_in(
        path,
        tokens_per_device=tokens(run) / run.layout.world,
        micro_batches=run.micro_batches,
        sequences=round(sequences(run)),
    )


def _rows(anchor: RunAnchor, run: Run, device: Hardware | None) -> Iterator[tuple[str, str]]:
    """For people: each figure as predicted, as measured, and what explains the difference."""
    found, measured = forecast(run), anchor.measured
    if measured.allocated is not None:
        extra = extra_bytes(anchor, run) or anchor.unexplained
        why = f"{anchor.copies} x {anchor.buffer}" if anchor.copies else "unexplained, and not given to other runs"
        yield "allocated", f"{format_bytes(found.peak_bytes)} predicted, {format_bytes(measured.allocated)} measured"
        yield "", f"{'-' if extra < 0 else '+'}{format_bytes(abs(extra))}: {why}"
    elif anchor.unexplained:
        yield "allocated", f"{format_bytes(found.peak_bytes)} predicted, and less was measured in all"
        yield "", f"-{format_bytes(-anchor.unexplained)}: unexplained, and not given to other runs"
    if anchor.fragments is not None:
        allocated = measured.allocated or found.peak_bytes
        yield "fragments", f"{format_bytes(fragment_bytes(anchor, allocated))} reserved in addition to allocated bytes"
        yield "", f"an answer is {ANCHOR_WEIGHT:.0%} of the way to that from what is expected of such runs"
    if anchor.context is not None:
        less = "less" if anchor.context < 0 else "more"
        yield "context", f"{format_bytes(abs(anchor.context))} {less} than is expected outside the allocator"
    if measured.step is not None and device is not None:
        took = estimate(run, device).step_seconds
        yield "step", f"{format_seconds(took)} predicted, {format_seconds(measured.step)} measured"
        for name in FACTORS:
            yield "", f"{name} takes {getattr(anchor, name):.3f} times as long"


def _document(anchor: RunAnchor, run: Run) -> dict[str, Any]:
    return document(
        "jettison.anchor/1",
        anchor,
        predicted_peak_bytes=forecast(run).peak_bytes,
        unexplained_bytes=anchor.unexplained,
        context_bytes=anchor.context,
        factors={name: getattr(anchor, name) for name in FACTORS},
    )
