"""`search`: the fastest way to train a described model on so many devices."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, SupportsIndex

from jettison.cli import app
from jettison.cli.app import CompileFlags, Switch  # noqa: F401 - annotations of the base class are resolved in this module
from jettison.cli.from_file import NO_SOURCE, SourceFlags, in_keys_of, sourced, spec_of
from jettison.core.errors import UsageError
from jettison.core.objects import with_former_names
from jettison.core.parse_units import parse_bytes
from jettison.core.process import cores
from jettison.core.progress import Progress, on_terminal, shown
from jettison.report.console import hint, json_text, progress
from jettison.report.estimate import TrainingBudget
from jettison.report.search import SearchReport, nothing_document
from jettison.request.options import RunRequest
from jettison.request.resolve import flag_of, is_live
from jettison.search.evaluate import Journal
from jettison.search.search import MARGIN, NothingFits, SearchRequest, on_own_framework
from jettison.search.search import search as find
from jettison.search.space import compiled
from jettison.spec.anchor import read_anchor
from jettison.spec.frameworks import named
from jettison.spec.hardware import hardware

NOTHING_FIXED = SearchRequest()


@dataclass(frozen=True, kw_only=True)
class SearchFlags(CompileFlags):
    """Flags of `search` alone.

    Memory and GPU:
        gpus: Devices to train on [default: as --from].
        gpu: GPU, such as h100-80gb (`jettison list gpus`), or a hardware file.
        budget: Limit of a device's peak allocated bytes: 60GiB [default: its memory].
        margin: Memory kept free: expected overhead (0) to upper bound (1).

    Batch and sequence:
        global_batch: Sequences in a step, over all devices [default: as --from].

    Search:
        top: Layouts to list.
        jobs: Processes [default: one for each core].
        state: File to resume the search from, and to save it to.
    """

    gpu: str
    gpus: int | None = None
    global_batch: int | None = None
    budget: str | None = None
    margin: float = MARGIN
    tokens: app.RunTokens = None
    price_per_gpu_hour: app.Price = None
    top: int = field(default=10, metadata={"most": 100})
    jobs: int | None = field(default=None, metadata=app.LOCAL)
    state: Path | None = field(default=None, metadata=app.LOCAL)


@app.verb("search")
def command(
    model: app.Described = None,
    /,
    *,
    flags: Annotated[SearchFlags, app.Flattened],
    request: Annotated[SearchRequest, app.Flattened] = NOTHING_FIXED,
    source: Annotated[SourceFlags, app.Flattened] = NO_SOURCE,
    form: app.Format = "human",
    out: app.Out = None,
    force: app.Force = False,
) -> None:
    """Find the fastest layout, batch and recompute plan, why it wins, and what more memory would buy.

    Every axis that no flag fixes (--tp 8) or limits (--tp 2,4,8) is searched, exhaustively. Plans that are too close to
    call are listed where none fits. Exit code 3: none may fit.
    """
    app.refuse_to_overwrite(out, force=force)
    model, request, found = sourced(model, request, source, verb="search", gpus=flags.gpus)
    if found is not None:
        if request.runs_on is None and found.framework in named("runs"):
            request = replace(request, runs_on=found.framework)
        flags = replace(
            flags,
            compile=flags.compile or found.compile,
            gpus=found.gpus if flags.gpus is None else flags.gpus,
            global_batch=found.global_batch if flags.global_batch is None else flags.global_batch,
        )
    _require_devices(flags)
    with progress() as say, in_keys_of(found):
        try:
            report = answer(model, request, flags, jobs=cores() if flags.jobs is None else flags.jobs, progress=say)
        except NothingFits as error:
            if form == "json":
                print(json_text(nothing(model, request, flags, error)), end="")
                raise app.Answered(error) from None
            raise
        except KeyboardInterrupt:
            if flags.state is not None:
                hint(f"what was worked out is in {flags.state}: the same command goes on from there")
            raise
    app.deliver(report.document, report.table, form=form, out=out, source=found, warnings=report.warnings)


def _require_devices(flags: SearchFlags) -> None:
    """Raise `UsageError` if the number of devices or of sequences is missing."""
    for name in ("gpus", "global_batch"):
        if getattr(flags, name) is None:
            raise UsageError(f"search needs {flag_of(name)}, such as {flag_of(name)} 64")


def nothing(model: str, request: SearchRequest, flags: SearchFlags, error: NothingFits) -> dict[str, object]:
    """Return the document that says that nothing fits."""
    unsaid = replace(flags, tokens=None, price_per_gpu_hour=None, jobs=None, state=None)
    said = app.asked(model=model, flags=unsaid, request=request)
    assert flags.gpus is not None, "checked before the search"
    return nothing_document(model, flags.gpus, flags.gpu, error, said)


def answer(model: str, request: SearchRequest, flags: SearchFlags, *, jobs: int, progress: Progress) -> SearchReport:
    """See `search`."""
    _require_devices(flags)
    given = {one.name: getattr(flags, one.name) for one in fields(flags) if one.name != "jobs"}
    return search(model, request, **given, jobs=jobs, progress=progress)


@on_terminal
def search(
    model: str,
    request: SearchRequest,
    *,
    gpus: int,
    gpu: str,
    global_batch: int,
    budget: str | SupportsIndex | None = None,
    margin: float = MARGIN,
    tokens: float | None = None,
    price_per_gpu_hour: float | None = None,
    compile: bool = False,
    top: int = 10,
    jobs: int = 1,
    state: Path | None = None,
    progress: Progress = shown,
) -> SearchReport:
    """Search for the fastest way to train a preset or a config.json.

    Args:
        margin: memory kept free in addition to the expected allowance, as a share of the way to its upper bound.
        compile: price compiled layers.
        tokens: to train on: says how long, and with a price what it costs.
        state: a file to go on from and to write to.

    Raises:
        NothingFits: no candidate fits.
        UsageError: no such model or GPU, or a request that makes no sense.
    """
    if is_live(model):
        raise UsageError(f"got the live model {model}; a search is for a preset or for a config.json")
    wanted = TrainingBudget(tokens=tokens, price_per_gpu_hour=price_per_gpu_hour)
    budget_bytes = None if budget is None else parse_bytes(budget)
    device = hardware(gpu)
    if request.anchor is not None:
        device = read_anchor(Path(request.anchor)).hardware(device)
    given = {name: getattr(request, name) for name in ("seq", "attention", "precision", "model_type")}
    spec = spec_of(model, RunRequest(**given))
    request = on_own_framework(request, spec, device, gpus=gpus, global_batch=global_batch)
    space = request.space(spec, device, gpus=gpus, global_batch=global_batch)
    if compile:
        space = compiled(space, given=request.recompute is not None)
    begin = time.perf_counter()
    with nullcontext() if state is None else Journal(state) as journal:
        answer = find(
            space,
            device,
            budget_bytes=budget_bytes,
            margin=margin,
            top=top,
            jobs=jobs,
            journal=journal,
            progress=progress,
        )
    said = budget if budget is None or isinstance(budget, str) else f"{budget_bytes}B"
    asked = {"model": model, "gpus": gpus, "gpu": gpu, "global_batch": global_batch, "budget": said, "top": top}
    asked |= {"margin": margin, **({"compile": True} if compile else {})}
    return SearchReport(
        model=model,
        hardware=device,
        answer=answer,
        seconds=time.perf_counter() - begin,
        wanted=wanted,
        request={**asked, **with_former_names(RunRequest, {name: getattr(request, name) for name in request.given()})},
    )
