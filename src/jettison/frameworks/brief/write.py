"""A brief in Markdown that a person or an assistant can act on: model, accelerator, plan, reasons, open questions."""

from __future__ import annotations

from functools import partial
from itertools import groupby

from jettison.errors import DoesNotFit
from jettison.frameworks.export import Cost, Pricer, Written
from jettison.frameworks.nearest import Nearest
from jettison.frameworks.policy import Decision, LayerPolicy, Subject, by_ops
from jettison.frameworks.torch.write import code
from jettison.units import format_bytes, format_flops, format_percent, format_seconds


def write(subject: Subject, pricer: Pricer, target: str) -> Written:
    """The brief. Nothing is lost in it; it carries nothing out, either."""
    cost = pricer.plan()
    nearest = Nearest(
        subject=subject,
        pricer=pricer,
        target=target,
        could="which layers are checkpoints",
        write=partial(code, subject),
    )
    sections = (
        _title(subject),
        _model(subject),
        _accelerator(subject),
        _facts(subject, cost),
        _table(subject),
        _reasons(subject),
        _simpler(nearest),
        _questions(subject),
    )
    return Written(
        files={"brief.md": "".join(f"{line}\n" for lines in sections for line in lines)},
        policies=tuple(map(_as_planned, subject.decisions)),
        cost=cost,
        lost=None,
        notes=("a brief carries nothing out: the costs are the plan's own",),
    )


def _as_planned(decision: Decision) -> LayerPolicy:
    policy = by_ops(decision)
    return LayerPolicy(
        decision=decision,
        action=policy.action,
        kept=decision.kept,
        moved=decision.moved,
        again=decision.again,
        shared_bytes=decision.shared_bytes,
        beside_bytes=-decision.packed_bytes,
        words=decision.policy,
    )


def _title(subject: Subject) -> list[str]:
    return [
        f"# What to keep, recompute and offload: {_plain(subject.model)}",
        "",
        "Task: make a training step of this model stay below the budget, by a policy for each layer (none, selective,",
        "full, offload or mixed). The policy below was chosen by Jettison's solver, to be carried out as it stands.",
        "What is not known is asked at the end, and should be answered before anything is changed.",
        "",
    ]


def _model(subject: Subject) -> list[str]:
    lines = ["## Model and run", ""]
    if subject.described is not None:
        run = subject.described.forecast.run
        model, layout = run.model, run.layout
        lines += [
            f"- {subject.described.forecast.parameters:,} parameters, {model.depth} layers, hidden size {model.hidden}",
            f"- batch: {run.micro_batch} sequences of {run.seq} tokens in a micro-batch, "
            f"{run.micro_batches} micro-batches in a step on one data-parallel rank",
            f"- layout: tp {layout.tp}{' with sequence parallelism' if layout.sp and layout.tp > 1 else ''}, "
            f"cp {layout.cp}, pp {layout.pp}, dp {layout.dp}, ep {layout.ep}, ZeRO {layout.zero}: "
            f"{layout.world} devices",
            f"- precision {run.precision.words}, optimizer {run.optimizer}, kernels {run.kernels.name}, "
            f"attention {run.kernels.attention}, dropout {run.dropout}",
        ]
    else:
        kinds = dict.fromkeys(decision.module.partition(":")[2] for decision in subject.decisions)
        lines.append(f"- {len(subject.decisions)} layers: {', '.join(kinds)}")
    lines += [f"- not in these figures: {_plain(text)}" for text in subject.left_out]
    asked = [f"{key} {value}" for key, value in subject.asked.items() if key != "model"]
    lines.append(f"- asked for: {', '.join(asked) or 'nothing beside the model'}")
    return [*lines, ""]


def _accelerator(subject: Subject) -> list[str]:
    hardware = subject.hardware
    link = hardware.host_bytes_per_second
    return [
        "## Accelerator",
        "",
        f"- {hardware.name}: {format_bytes(hardware.memory_bytes)}",
        f"- link to the host: {'not stated' if link is None else f'{format_bytes(int(link))} a second'}",
        "",
    ]


def _facts(subject: Subject, cost: Cost) -> list[str]:
    origin = (
        "Recorded from the module itself and dry-run as a whole step on fake tensors"
        if subject.live
        else "Worked out from the description, tensor by tensor; nothing was run"
    )
    lines = [
        "## Facts",
        "",
        f"{origin}.",
        "",
        f"- budget: {_bytes(subject.budget_bytes)} at the peak of a step, on every rank",
        f"- the plan's peak: {_bytes(cost.peak_bytes)}",
        f"- smallest budget that has a plan: {_bytes(subject.minimum_budget_bytes)}",
        f"- kept by all layers of one micro-batch: {_bytes(cost.layer_bytes)}",
        f"- computed again: {format_flops(cost.recompute_flops)} a micro-batch",
    ]
    if cost.host_bytes:
        lines.append(f"- on the host: {_bytes(cost.host_bytes)}")
    overhead = subject.predicted.get("overhead_fraction")
    if overhead is not None:
        lines.append(f"- recompute as a share of a step without it: {format_percent(overhead)}")
    if cost.step_seconds is not None:
        lines.append(f"- a step: {format_seconds(cost.step_seconds)}, predicted for {subject.hardware.name}")
    return [*lines, ""]


def _table(subject: Subject) -> list[str]:
    lines = [
        "## The plan",
        "",
        "Bytes and FLOPs are of one layer and one micro-batch on one rank.",
        "",
        "| layers | policy | kept | on the host | computed again |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    for (policy, kept, moved, flops), group in groupby(subject.decisions, key=_row):
        layers = [decision.layer for decision in group]
        span = layers[0] if len(layers) == 1 else f"{layers[0]} to {layers[-1]} ({len(layers)})"
        lines.append(f"| {span} | {policy} | {format_bytes(kept)} | {format_bytes(moved)} | {format_flops(flops)} |")
    if subject.segments:
        runs = "; ".join(f"{start} to {stop}" for start, stop in subject.segments)
        lines += ["", f"Runs of layers that hold one input together: {runs}."]
    return [*lines, "", f"Plan hash: `{subject.plan_hash}`", ""]


def _row(decision: Decision) -> tuple[str, int, int, int]:
    flops = sum(decision.program.ops[o].flops for o in decision.again)
    return decision.policy, decision.kept_bytes, decision.program.kept_bytes(decision.moved), flops


def _reasons(subject: Subject) -> list[str]:
    """By kind of decision, which tensors it drops, dearest in bytes first."""
    lines = [
        "## Reasons",
        "",
        "What is dropped, by the op that makes it; a price is what its bytes cost to compute again.",
        "",
    ]
    seen: set[object] = set()
    for decision in subject.decisions:
        key = id(decision.program), decision.kept, decision.moved
        dropped = decision.program.saved_buffers() - decision.kept
        if key in seen or not dropped:
            continue
        seen.add(key)
        lines += [f"- like {decision.layer}:", *_dropped(decision, dropped)]
    if not seen:
        lines.append("- nothing is dropped: what autograd saves fits")
    return [*lines, ""]


def _dropped(decision: Decision, dropped: frozenset[int]) -> list[str]:
    program, lines = decision.program, []
    for b in sorted(dropped, key=lambda b: -program.buffers[b].nbytes)[:5]:
        producer = program.buffers[b].producer
        if producer is None:
            lines.append(f"  - {format_bytes(program.buffers[b].nbytes)} that the layer is given")
            continue
        op = program.ops[producer]
        where = f" in {op.path}" if op.path else ""
        lines.append(f"  - {format_bytes(program.buffers[b].nbytes)} of {op.name}{where}: {format_flops(op.flops)}")
    if len(dropped) > 5:
        rest = sum(program.buffers[b].nbytes for b in dropped) - sum(
            program.buffers[b].nbytes for b in sorted(dropped, key=lambda b: -program.buffers[b].nbytes)[:5]
        )
        lines.append(f"  - {format_bytes(rest)} in {len(dropped) - 5} more")
    return lines


def _simpler(nearest: Nearest) -> list[str]:
    lines = ["## If only whole layers can be checkpoints", ""]
    try:
        policies, cost = nearest.checkpoints()
    except DoesNotFit as error:
        return [*lines, f"It does not fit: with every layer a checkpoint a step needs {_bytes(error.peak_bytes)}.", ""]
    chosen = [policy.layer for policy in policies if str(policy.action) == "full"]
    again = format_flops(cost.recompute_flops)
    what = f"{len(chosen)} of {len(policies)} layers, {chosen[0]} to {chosen[-1]}" if chosen else "no layer"
    return [*lines, f"{what}: peak {_bytes(cost.peak_bytes)}, {again} computed again a micro-batch.", ""]


def _questions(subject: Subject) -> list[str]:
    lines = [
        "## Open questions",
        "",
        "- Is the budget what the accelerator leaves after the CUDA context, the caching allocator's fragmentation and "
        "other processes?",
        "- Which trainer runs it? `jettison export PLAN --to TARGET` writes its settings, and says what they lose.",
        "- Does the batch change in size from step to step? The plan is for the one above.",
    ]
    if subject.live:
        lines.append("- Is the model sharded or compiled in training? Here it was neither.")
    elif subject.described is not None and subject.described.forecast.run.model.depth:
        lines.append("- Is the model's code the one whose kernels are named above? Other code saves other tensors.")
    if any(decision.moved for decision in subject.decisions):
        lines.append(
            "- Does the trainer move tensors to the host beside the computation? If not, plan with --no-offload."
        )
    lines.append("- Was it verified? `jettison verify` compares gradients and the peak on the machine itself.")
    return lines


def _bytes(nbytes: int) -> str:
    return f"{format_bytes(nbytes)} ({nbytes} bytes)"


def _plain(text: str) -> str:
    return "".join(c if c.isprintable() and c not in "<>`|" else "?" for c in text)
