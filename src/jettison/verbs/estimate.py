"""`estimate`: how long a step of a described run takes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from jettison.cost.execution import execution_of
from jettison.errors import UsageError
from jettison.models.described import described_model
from jettison.predict.allowance import available_bytes
from jettison.predict.forecast import Forecast, forecast
from jettison.predict.run_fields import RunRequest
from jettison.predict.run_request import is_live, resolve
from jettison.predict.stages import Chosen
from jettison.predict.time import Estimate
from jettison.predict.time import estimate as estimate_run
from jettison.predict.training_cost import Wanted
from jettison.predict.whole_micro_batches import settled
from jettison.report.estimate import EstimateReport
from jettison.spec.hardware import Hardware, hardware
from jettison.spec.recompute import Mode
from jettison.spec.run import Run

if TYPE_CHECKING:
    from jettison.explain.trilemma import Trilemma


def estimate(
    model: str,
    request: RunRequest,
    *,
    gpu: str,
    compiled: bool = False,
    explain: bool = False,
    tokens: float | None = None,
    price_per_gpu_hour: float | None = None,
) -> EstimateReport:
    """Estimate a step of a described run on a GPU.

    Args:
        compiled: under torch.compile.
        explain: where the time goes, and what else could be chosen, too.
        tokens: to train on: says how long, and with a price what it costs.

    Raises:
        UsageError: no such model or GPU, a run that makes no sense, or a figure that the GPU's file lacks.
        Infeasible: recompute was left to a planner, and no plan fits.
    """
    if is_live(model):
        raise UsageError(f"got the live model {model}; an estimate is of a preset or of a config.json")
    wanted = Wanted(tokens=tokens, price_per_gpu_hour=price_per_gpu_hour)
    asked, device = resolve(described_model(model, request), request), hardware(gpu)
    run = asked.run
    if explain and run.recompute.mode is Mode.AUTO:
        raise UsageError("--explain compares recompute modes; give another than auto")
    how = execution_of(run).compiled() if compiled else execution_of(run)
    memory, chosen = _memory(run, device)
    run = memory.run
    found = estimate_run(run, device, execution=how, chosen=chosen)
    eager = ""
    if compiled:
        memory, eager = _compiled(memory)
    return EstimateReport(
        model=model,
        asked=asked,
        found=found,
        memory=memory,
        available_bytes=available_bytes(device, run),
        trilemma=_explain(found) if explain else None,
        wanted=wanted,
        eager_memory=eager,
    )


def _compiled(memory: Forecast) -> tuple[Forecast, str]:
    """The memory that `ledger --compile` states; where none is described, what there is, and why."""
    try:
        return forecast(replace(memory.run, compiled=True)), ""
    except UsageError as error:
        return memory, str(error)


def _memory(run: Run, device: Hardware) -> tuple[Forecast, Chosen | None]:
    left = available_bytes(device, run)
    if run.recompute.mode is not Mode.AUTO:
        return forecast(settled(run, left)), None
    from jettison.predict.whole_plan import choose_with_whole  # the planner takes its time to load

    found = choose_with_whole(run, left, device).forecast
    return found, [part.chosen for part in found.parts if part.is_layer]


def _explain(found: Estimate) -> Trilemma:
    from jettison.explain.trilemma import explain

    return explain(found)
