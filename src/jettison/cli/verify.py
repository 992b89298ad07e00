"""`verify`: of a plan file, or of a model and a budget, on the real model."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from jettison.cli import app
from jettison.cli.app import Switch
from jettison.core.errors import ProofFailed, UsageError
from jettison.core.parse_units import Tokens, parse_bytes
from jettison.core.progress import Progress, silent
from jettison.models.model_types import require_known_file
from jettison.report.console import hint, progress
from jettison.report.plan import DESCRIBED
from jettison.report.proof import Proof, proof_table
from jettison.solve.plan import SCHEMA as PLAN_SCHEMA
from jettison.solve.plan import Plan

if TYPE_CHECKING:
    from jettison.memory.timeline import MemoryTimeline
    from jettison.models.live_model import ModelRequest
    from jettison.verify.side_by_side import Side


@dataclass(frozen=True, kw_only=True)
class VerifyFlags:
    """Flags of a proof: the plan, budget or policy to verify, and the model.

    Model:
        model: With a plan file: the model, if the plan does not name it.
        attention: Attention kernels of a config.json's model [default: sdpa].

    Batch and sequence:
        seq: Tokens in a sequence, for a config.json [default: the model's positions, at most 2048].
        micro_batch: Sequences or images in a micro-batch, for a config.json [default: 1].

    Memory and GPU:
        gpu: With --offload: GPU whose link to CPU counts [default: this machine's].
        precision: Dtype of weights and activations, for a config.json [default: fp32].
        optimizer: Optimizer of the step, for a config.json [default: adamw].

    Recompute and offload:
        recompute: Policy to verify: none, selective, full or every:K.
        given: Verify what the model itself recomputes and offloads.
        step: With --given: module:function of (model, batch), a forward and backward.
        against: With --given: module:factory of the same model without checkpointing.
        offload: With --budget: tensors may also be offloaded to CPU.
        host_budget: Limit of CPU memory for offloaded tensors: 128GiB [default: the machine's].

    Measurement:
        values: Compare every tensor of backward bitwise, in one step.
        rounds: Interleaved rounds of timed steps.
    """

    model: str | None = None
    budget: app.Budget = None
    recompute: str | None = None
    given: Switch = False
    step: str | None = None
    against: str | None = None
    values: Switch = False
    offload: Switch = False
    host_budget: str | None = None
    gpu: str | None = None
    seq: Tokens | None = None
    micro_batch: int | None = None
    precision: Literal["fp32", "bf16"] | None = None
    attention: Literal["eager", "sdpa", "flash"] | None = None
    optimizer: Literal["adamw", "sgd", "none"] | None = None
    rounds: int = 8


UNASKED: Final = VerifyFlags()
OF_THE_MODEL: Final = ("seq", "micro_batch", "precision", "attention", "optimizer")
"""Flags that say how a configuration's model is built."""


@app.verb("verify")
def command(
    target: Annotated[
        str, app.option("Model", "plan.json of `jettison plan`, or a model: config.json or module:factory.")
    ],
    /,
    *,
    flags: Annotated[VerifyFlags, app.Flattened] = UNASKED,
    timeline: Annotated[
        Path | None,
        app.option("Output", "Write a planned and a plain step here, for ui.perfetto.dev or chrome://tracing."),
    ] = None,
    snapshot: Annotated[
        Path | None,
        app.option("Output", "Write their allocations here, as a CUDA memory snapshot: device 0 is planned."),
    ] = None,
    form: app.Format = "human",
    out: app.Out = None,
    force: app.Force = False,
) -> None:
    """Prove a plan on the real model: gradients bitwise, predicted and measured peak, saved bytes, step time.

    Exit code 4: the proof failed.
    """
    app.refuse_to_overwrite(out, timeline, snapshot, force=force)
    seen: list[MemoryTimeline] | None = None if timeline is None and snapshot is None else []
    with progress() as say:
        require_known_file(target)
        say("loading torch")
        proof = prove(target, flags, seen=seen, progress=say)
    said = app.asked(target=target, flags=flags)
    app.deliver(proof.document, lambda: proof_table(proof), form=form, out=out, request=said)
    if seen:
        from jettison.report.timeline_files import write_timelines

        for line in write_timelines(target, seen, timeline=timeline, snapshot=snapshot):
            hint(line)
    if not proof.passed:
        with app.answered():
            raise ProofFailed("not proven: " + "; ".join(proof.failures()))


def prove(
    target: str, flags: VerifyFlags, *, seen: list[MemoryTimeline] | None = None, progress: Progress = silent
) -> Proof:
    """Build the real model and verify a plan, a budget, a policy, or what it does already; exactly one is given.

    Args:
        target: a plan's file, or a model.
        seen: gets the timelines of a planned and of a plain step; not with ``given``.

    Raises:
        UsageError: not exactly one of them, or no such model.
        Infeasible: no plan fits the budget.
        PlanMismatch: the plan was made for another model.
    """
    from jettison.models.live_model import load, named_function, optimizer_for
    from jettison.planner import apply
    from jettison.verify.own_checkpointing import verify_given
    from jettison.verify.side_by_side import step_timeline
    from jettison.verify.verify import verify

    request, plan = request_for(target, model=flags.model, **{name: getattr(flags, name) for name in OF_THE_MODEL})
    given = flags.given or flags.step is not None or flags.against is not None
    budget, recompute, host_budget = flags.budget, flags.recompute, flags.host_budget
    if sum((plan is not None, budget is not None, recompute is not None, given)) != 1:
        raise UsageError(
            f"{target}: expected exactly one of a plan file, --budget, --recompute and --given; --budget 20GiB plans "
            "and verifies, --given verifies the model's own checkpointing"
        )
    for flag, wanted in (("--offload", flags.offload), ("--gpu", flags.gpu)):
        if wanted and budget is None:
            raise UsageError(f"got {flag} without --budget: what is moved is chosen under a budget")
    if host_budget is not None and not flags.offload and plan is None:
        raise UsageError(f"got --host-budget {host_budget}, and nothing goes to the host; give --offload, or a plan")
    if seen is not None and given:
        raise UsageError("got --timeline or --snapshot with --given; they show a planned step and a plain one")
    if budget is not None:
        parse_bytes(budget)

    def look(plain: Side, planned: Side) -> None:
        if seen is not None:
            seen.extend([step_timeline(planned, "under the plan"), step_timeline(plain, "plain")])

    progress("building the model")
    loaded = load(request, fake=False)
    optimizer = optimizer_for(request, loaded.model)
    more: dict[str, Any] = {"loss_fn": loaded.loss_fn, "optimizer": optimizer, "rounds": flags.rounds}
    more |= {"progress": progress, "values": flags.values}
    if given:
        step = None if flags.step is None else named_function(flags.step)
        plain = None if flags.against is None else load(replace(request, model=flags.against), fake=False).model
        return verify_given(loaded.model, loaded.batch, step=step, against=plain, **more)
    more["look"] = None if seen is None else look
    if recompute is None:
        moves: dict[str, Any] = {"offload": flags.offload, "host_budget": host_budget, "hardware": flags.gpu}
        return verify(loaded.model, loaded.batch, plan=plan, budget=budget, **moves, **more)
    with apply(loaded.model, recompute, batch=loaded.batch, loss_fn=loaded.loss_fn) as handle:
        return verify(loaded.model, loaded.batch, handle=handle, **more)


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


def request_for(target: str, *, model: str | None = None, **flags: Any) -> tuple[ModelRequest, Plan | None]:
    """Read the target of `jettison verify`: a plan file with its model, or a model. Raise `UsageError` for a flag that
    contradicts what the plan was made for.
    """
    from jettison.models.live_model import ModelRequest

    found = read_plan(Path(target))
    given = {name: value for name, value in flags.items() if value is not None}
    if found is None:
        if model is not None:
            raise UsageError(f"--model needs a plan file, and {target!r} is none")
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
