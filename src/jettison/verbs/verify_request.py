"""`verify`: of a plan file, or of a model and a budget."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jettison.errors import UsageError
from jettison.models.request import ModelRequest, load, named_function, optimizer_for
from jettison.parse_units import parse_bytes
from jettison.planner import apply
from jettison.progress import Progress, silent
from jettison.report.plan import DESCRIBED
from jettison.report.proof import Proof
from jettison.solve.plan import SCHEMA as PLAN_SCHEMA
from jettison.solve.plan import Plan
from jettison.verbs.verify import Look, verify
from jettison.verbs.verify_given import verify_given


@dataclass(frozen=True, kw_only=True)
class Given:
    """Prove what the model does already. ``step`` and ``against`` are ``module:name``; see `verify_given`."""

    step: str | None = None
    against: str | None = None


def prove(
    request: ModelRequest,
    *,
    plan: Plan | None = None,
    budget: str | None = None,
    recompute: str | None = None,
    given: Given | None = None,
    offload: bool = False,
    host_budget: str | None = None,
    gpu: str | None = None,
    values: bool = False,
    rounds: int = 8,
    look: Look | None = None,
    progress: Progress = silent,
) -> Proof:
    """Build the real model and verify a plan, a budget, a policy, or what it does already; exactly one is given.

    Args:
        offload: under the budget, tensors may also wait on the host; ``gpu`` names the link where there is none here.
        look: as for `verify`; not with ``given``.

    Raises:
        UsageError: not exactly one of them, or no such model.
        Infeasible: no plan fits the budget.
        PlanMismatch: the plan was made for another model.
    """
    if sum(asked is not None for asked in (plan, budget, recompute, given)) != 1:
        raise UsageError("verify needs exactly one of a plan file, --budget, --recompute and --given")
    for flag, asked in (("--offload", offload), ("--gpu", gpu)):
        if asked and budget is None:
            raise UsageError(f"got {flag} without --budget: what is moved is chosen under a budget")
    if host_budget is not None and not offload and plan is None:
        raise UsageError(f"got --host-budget {host_budget}, and nothing goes to the host; give --offload, or a plan")
    if look is not None and given is not None:
        raise UsageError("got --timeline or --snapshot with --given; they show a step under a plan beside a plain one")
    if budget is not None:
        parse_bytes(budget)
    progress("building the model")
    loaded = load(request, fake=False)
    optimizer = optimizer_for(request, loaded.model)
    more: dict[str, Any] = {"loss_fn": loaded.loss_fn, "optimizer": optimizer, "rounds": rounds, "progress": progress}
    more["values"] = values
    if given is not None:
        step = None if given.step is None else named_function(given.step)
        plain = None if given.against is None else load(replace(request, model=given.against), fake=False).model
        return verify_given(loaded.model, loaded.batch, step=step, against=plain, **more)
    if recompute is None:
        return verify(
            loaded.model,
            loaded.batch,
            plan=plan,
            budget=budget,
            offload=offload,
            host_budget=host_budget,
            hardware=gpu,
            look=look,
            **more,
        )
    with apply(loaded.model, recompute, batch=loaded.batch, loss_fn=loaded.loss_fn) as handle:
        return verify(loaded.model, loaded.batch, handle=handle, look=look, **more)


def read_plan(path: Path) -> tuple[Plan, Any] | None:
    """A plan file, and what it says under ``made_by``; None where the file is no plan document at all.

    Raises:
        UsageError: it is a plan document, but not a feasible plan, or not of a module.
        PlanMismatch: it was edited.
    """
    if not path.is_file():
        return None
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict) or document.get("schema") != PLAN_SCHEMA:
        return None
    if document.get("made_from") == DESCRIBED:
        raise UsageError(
            f"{path} plans a described run: it says how much each layer keeps, not which tensors of a module. "
            "Plan a config.json without a layout, or module:factory, to get a plan that can be verified"
        )
    return Plan.from_json(text), document.get("made_by")


def request_for(
    target: str, *, model: str | None = None, optimizer: str | None = None, **flags: Any
) -> tuple[ModelRequest, Plan | None]:
    """Read the target of `jettison verify`: a plan file with its model, or a model.

    Raises:
        UsageError: a flag contradicts what the plan was made for.
    """
    found = read_plan(Path(target))
    given = {name: value for name, value in flags.items() if value is not None}
    if optimizer is not None:
        given["optimizer"] = optimizer
    if found is None:
        if model is not None:
            raise UsageError(f"--model goes with a plan file, and {target!r} is none")
        return ModelRequest(model=target, **given), None
    made, document = found
    if model is None:
        stated = ModelRequest.from_document(document)
    else:
        known = document if isinstance(document, dict) else {}
        stated = ModelRequest.from_document({**known, "model": model})
    for name, value in given.items():
        if isinstance(document, dict) and getattr(stated, name) != value:
            flag = f"--{name.replace('_', '-')} {value}"
            raise UsageError(f"{flag} is not what the plan was made for: {getattr(stated, name) or 'not given'}")
    return replace(stated, **given), made
