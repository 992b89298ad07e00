"""`search`: the fastest way to train a described model on so many devices."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from typing import SupportsIndex

from jettison.errors import UsageError
from jettison.models.described import described_model
from jettison.parse_units import parse_bytes
from jettison.predict.run_fields import RunRequest
from jettison.predict.run_request import is_live
from jettison.predict.training_cost import Wanted
from jettison.progress import Progress, on_terminal, shown
from jettison.report.search import SearchReport
from jettison.search.journal import Journal
from jettison.search.request import MARGIN, SearchRequest
from jettison.search.search import search as find
from jettison.spec.hardware import hardware


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
    top: int = 10,
    jobs: int = 1,
    state: Path | None = None,
    progress: Progress = shown,
) -> SearchReport:
    """Search for the fastest way to train a preset or a config.json.

    Args:
        margin: what stays free beside the expected allowance, as a share of the way to its upper bound.
        tokens: to train on: says how long, and with a price what it costs.
        state: a file to go on from and to write to.

    Raises:
        NothingFits: no candidate fits.
        UsageError: no such model or GPU, or a request that makes no sense.
    """
    if is_live(model):
        raise UsageError(f"got the live model {model}; a search is for a preset or for a config.json")
    wanted = Wanted(tokens=tokens, price_per_gpu_hour=price_per_gpu_hour)
    budget_bytes = None if budget is None else parse_bytes(budget)
    device = hardware(gpu)
    space = request.space(
        described_model(
            model,
            RunRequest(
                seq=request.seq, attention=request.attention, precision=request.precision, family=request.family
            ),
        ),
        device,
        gpus=gpus,
        global_batch=global_batch,
    )
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
    asked["margin"] = margin
    return SearchReport(
        model=model,
        hardware=device,
        answer=answer,
        seconds=time.perf_counter() - begin,
        wanted=wanted,
        request={**asked, **{name: getattr(request, name) for name in request.given()}},
    )
