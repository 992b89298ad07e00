"""Brief in Markdown for a person or an assistant: model, accelerator, plan, reasons, open questions."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import groupby

from jettison.core.errors import DoesNotFit
from jettison.core.units import format_bytes, format_flops, format_percent, format_seconds
from jettison.frameworks.export import TargetOutput, filled, pieces
from jettison.frameworks.layer_policies import Cost, Decision, LayerAction, LayerPolicy, Subject, by_ops
from jettison.frameworks.nearest_policy import Nearest
from jettison.frameworks.torch.write import code

MOST_DROPPED = 5
"""Tensors named for a kind of layer, the largest."""


def write(nearest: Nearest) -> TargetOutput:
    """Write the brief. It loses nothing of the plan, and applies nothing."""
    subject, cost = nearest.subject, nearest.pricer.plan()
    hardware = subject.hardware
    link = hardware.host_bytes_per_second
    text = filled(
        pieces("plan_summary/brief.md.txt")["brief"],
        model=_plain(subject.model),
        run="\n".join(_run(subject)),
        gpu=hardware.name,
        memory=format_bytes(hardware.memory_bytes),
        link="not stated" if link is None else f"{format_bytes(int(link))} a second",
        origin="Recorded from the module itself and dry-run as a whole step on fake tensors"
        if subject.live
        else "Computed from the description, tensor by tensor; nothing was run",
        budget=_bytes(subject.budget_bytes),
        peak=_bytes(cost.peak_bytes),
        minimum=_bytes(subject.minimum_budget_bytes),
        kept=_bytes(cost.layer_bytes),
        again=format_flops(cost.recompute_flops),
        facts="".join(f"{line}\n" for line in _facts(subject, cost)),
        table="".join(f"{line}\n" for line in _table(subject)),
        hash=subject.plan_hash,
        reasons="\n".join(_reasons(subject)) or "- nothing is dropped: what autograd saves fits",
        simpler=_simpler(nearest.saying("which layers are checkpoints", partial(code, subject))),
        questions="".join(f"- {line}\n" for line in _questions(subject)),
    )
    return TargetOutput(
        files={"brief.md": text},
        policies=tuple(map(_as_planned, subject.decisions)),
        cost=cost,
        lost=None,
        notes=("a brief applies nothing: the costs are the plan's own",),
    )


def _as_planned(decision: Decision) -> LayerPolicy:
    return LayerPolicy(
        decision=decision,
        action=by_ops(decision).action,
        kept=decision.kept,
        offloaded=decision.offloaded,
        again=decision.again,
        shared_bytes=decision.shared_bytes,
        extra_bytes=-decision.packed_bytes,
        words=decision.policy,
    )


def _run(subject: Subject) -> Iterator[str]:
    if subject.described is not None:
        found = subject.described.forecast
        run, model, layout = found.run, found.run.model, found.run.layout
        yield f"- {found.parameters:,} parameters, {model.depth} layers, hidden size {model.hidden}"
        yield (
            f"- batch: {run.micro_batch} sequences of {run.seq} tokens in a micro-batch, "
            f"{run.micro_batches} micro-batches in a step on one data-parallel rank"
        )
        yield (
            f"- layout: tp {layout.tp}{' with sequence parallelism' if layout.sp and layout.tp > 1 else ''}, "
            f"cp {layout.cp}, pp {layout.pp}, dp {layout.dp}, ep {layout.ep}, ZeRO {layout.zero}: "
            f"{layout.world} devices"
        )
        yield (
            f"- precision {run.precision.words}, optimizer {run.optimizer}, kernels {run.kernels.name}, "
            f"attention {run.kernels.attention}, dropout {run.dropout}"
        )
    else:
        kinds = dict.fromkeys(decision.module.partition(":")[2] for decision in subject.decisions)
        yield f"- {len(subject.decisions)} layers: {', '.join(kinds)}"
    yield from (f"- not in these figures: {_plain(text)}" for text in subject.left_out)
    asked = [f"{key} {value}" for key, value in subject.asked.items() if key != "model"]
    yield f"- options: {', '.join(asked) or 'none but the model'}"


def _facts(subject: Subject, cost: Cost) -> Iterator[str]:
    if cost.host_bytes:
        yield f"- offloaded to CPU: {_bytes(cost.host_bytes)}"
    yield f"- recomputation as a share of a step without it: {format_percent(subject.overhead_fraction)}"
    if cost.step_seconds is not None:
        step = format_seconds(subject.expected_ratio * cost.step_seconds)
        yield f"- a step: {step}, expected on {subject.hardware.name}"


def _table(subject: Subject) -> Iterator[str]:
    for (policy, kept, moved, flops), group in groupby(subject.decisions, key=_row):
        layers = [decision.layer for decision in group]
        span = layers[0] if len(layers) == 1 else f"{layers[0]} to {layers[-1]} ({len(layers)})"
        yield f"| {span} | {policy} | {format_bytes(kept)} | {format_bytes(moved)} | {format_flops(flops)} |"
    if subject.segments:
        runs = "; ".join(f"{start} to {stop}" for start, stop in subject.segments)
        yield f"\nSegments of layers that keep one input together: {runs}."


def _row(decision: Decision) -> tuple[str, int, int, int]:
    flops = sum(decision.program.ops[o].flops for o in decision.again)
    return decision.policy, decision.kept_bytes, decision.program.kept_bytes(decision.offloaded), flops


def _reasons(subject: Subject) -> Iterator[str]:
    """List the dropped tensors by kind of decision, the largest first."""
    kinds: dict[object, Decision] = {}
    for decision in subject.decisions:
        kinds.setdefault((id(decision.program), decision.kept, decision.offloaded), decision)
    for decision in kinds.values():
        program = decision.program
        dropped = sorted(program.saved_buffers() - decision.kept, key=lambda b: -program.buffers[b].nbytes)
        if dropped:
            yield f"- like {decision.layer}:"
        for b in dropped[:MOST_DROPPED]:
            buffer = program.buffers[b]
            if buffer.producer is None:
                yield f"  - {format_bytes(buffer.nbytes)} of the layer's input"
            else:
                op = program.ops[buffer.producer]
                where = f" in {op.path}" if op.path else ""
                yield f"  - {format_bytes(buffer.nbytes)} of {op.name}{where}: {format_flops(op.flops)}"
        if rest := dropped[MOST_DROPPED:]:
            yield f"  - {format_bytes(sum(program.buffers[b].nbytes for b in rest))} in {len(rest)} more"


def _simpler(nearest: Nearest) -> str:
    try:
        policies, cost = nearest.checkpoints()
    except DoesNotFit as error:
        return f"It does not fit: with every layer a checkpoint a step needs {_bytes(error.peak_bytes)}."
    chosen = [policy.layer for policy in policies if policy.action is LayerAction.CHECKPOINT]
    again = format_flops(cost.recompute_flops)
    what = f"{len(chosen)} of {len(policies)} layers, {chosen[0]} to {chosen[-1]}" if chosen else "no layer"
    return f"{what}: peak {_bytes(cost.peak_bytes)}, {again} recomputed per micro-batch."


def _questions(subject: Subject) -> Iterator[str]:
    if subject.described is None:
        yield "Is the model sharded or compiled in training? Here it was neither."
    elif subject.described.forecast.run.model.depth:
        yield "Does the model's code use the kernels named above? Other code saves other tensors."
    if any(decision.offloaded for decision in subject.decisions):
        yield "Does the trainer overlap offloading with compute? If not, plan with --no-offload."


def _bytes(nbytes: int) -> str:
    return f"{format_bytes(nbytes)} ({nbytes} bytes)"


def _plain(text: str) -> str:
    return "".join(c if c.isprintable() and c not in "<>`|" else "?" for c in text)
