"""`doctor --model`: a model's ways to be silently wrong under recompute, and what to do about each."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import groupby
from typing import Any, Final

from jettison.core.progress import Progress, silent
from jettison.diagnose.finding import Change, Finding, FindingKind
from jettison.measure.gradients import independent_copy
from jettison.measure.hazards import Hazard, Sighting, look_for_hazards
from jettison.models.request import ModelRequest, load
from jettison.report.findings import FindingsReport
from jettison.report.parts import span

SCHEMA: Final = "jettison.doctor_model/1"
_VERIFY: Final = Change(
    line="jettison verify {model} --given", why="proves whether gradients are those of a plain copy"
)
_CHANGES: Final = {
    Hazard.RANDOM: Change(line="torch.rand(...)    # of the default generator", why="checkpoints put that stream back"),
    Hazard.NESTED: Change(
        line="checkpoint(function, *tensors, use_reentrant=False)", why="sees tensors wherever they are"
    ),
    Hazard.WRITTEN: Change(line="y = x + 1    # not: x.add_(1)", why="recompute then reads what forward had"),
    Hazard.SHARED: Change(
        line="torch.autocast(..., cache_enabled=False)", why="each use then casts the weight anew, in forward and again"
    ),
    Hazard.CONTEXT: Change(
        line="with sdpa_kernel(...): loss.backward()", why="recompute chooses kernels where it runs"
    ),
    Hazard.CHOICE: Change(
        line='jettison.apply(model, "selective-op", batch=batch)', why="plans of Jettison's keep what was chosen"
    ),
    Hazard.BUFFERS: Change(
        line="if torch._C._current_graph_task_id() == -1: self.counter += 1", why="counts in forward alone"
    ),
    Hazard.CAPTURED: Change(
        line="block(x, shared)    # as an argument", why="its gradient then flows through the block"
    ),
}


def diagnose_model(request: ModelRequest, *, progress: Progress = silent) -> FindingsReport:
    """Run one step of the model, or of fake tensors where a configuration says what it is, and say what was seen.

    Raises:
        UsageError: no such model.
    """
    progress("building the model")
    loaded = load(request, fake=True)
    progress("watching a step")
    with loaded.mode if loaded.mode is not None else nullcontext():
        model = loaded.model if loaded.mode is not None else independent_copy(loaded.model)
        seen = look_for_hazards(model, loaded.batch, loss_fn=loaded.loss_fn)
    now = sorted({one.hazard for one in seen if one.now})
    verdict = ", ".join(now) if now else "none"
    rows = [("model", request.model), ("at risk now", verdict)]
    more: dict[str, Any] = {"model": request.model, "hazards": [_fields(one) for one in seen]}
    return FindingsReport(schema=SCHEMA, facts=rows, findings=_findings(seen, request.model), more=more)


def _fields(one: Sighting) -> dict[str, Any]:
    return {"hazard": str(one.hazard), "block": one.block, "what": one.what, "now": one.now}


def _findings(seen: Sequence[Sighting], model: str) -> tuple[Finding, ...]:
    """Merge equal sightings of several blocks; hazards at risk now come first."""
    found = []
    for (late, hazard, what), group in groupby(sorted(seen, key=_alike), key=_alike):
        blocks = [one.block for one in group]
        where = span(blocks) if blocks != [""] else "the model around its blocks"
        claim = f"{hazard}: {where}" if late else f"{hazard}, and it runs again in backward: {where}"
        verify = Change(line=_VERIFY.line.format(model=model), why=_VERIFY.why)
        changes = (_CHANGES[hazard],) if late else (_CHANGES[hazard], verify)
        kind = FindingKind.AT_RISK_IF_RUN_AGAIN if late else FindingKind.AT_RISK_NOW
        evidence = what if not late else f"{what} (nothing runs it again in this step)"
        found.append(Finding(kind=kind, claim=claim, evidence=(evidence,), changes=changes))
    return tuple(found)


def _alike(one: Sighting) -> tuple[bool, Hazard, str]:
    return not one.now, one.hazard, one.what
