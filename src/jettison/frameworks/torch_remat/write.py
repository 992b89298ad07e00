"""torch_remat: a file with ``apply(model)``, which checkpoints layers except for some of their modules.

NOTE [ What a saved region holds ]
torch_remat's checkpoint keeps a layer's inputs and recomputes all of it, to its last op. A region with
``recompute=False`` is not recomputed: tensors that autograd saved inside of it are kept, except for inputs from
recomputed code. Its results are kept, too, since the file marks all of them as read: for a result that only other
regions read torch_remat would return a placeholder without bytes, and fake tensors, on which the file is priced, have
no placeholders. Most results are kept anyway. Random states are saved after each region, if a layer needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Final

from jettison.core.errors import TraceError
from jettison.core.objects import OnDemand
from jettison.cost.kernel import op_seconds
from jettison.frameworks.export import TargetOutput, header, kinds_of, moves_table, names, pieces, rows
from jettison.frameworks.layer_policies import (
    Cost,
    Decision,
    LayerAction,
    LayerPolicy,
    Subject,
    as_the_plan_moves,
    drawing,
    kept_whole,
    random_states,
    writes_in_place,
)
from jettison.frameworks.nearest_policy import CannotSay, Nearest, Policies, Priced
from jettison.frameworks.torch.write import copied
from jettison.ledger.program import Op, Program, Source
from jettison.solve.checkpoint_policy import Full

TRIES: Final = 3
_RETURNS: Final = "checkpoint function must return"  # torch_remat's message
USE: Final = """\
Import this file, and call apply(model) once after the model was built, before fully_shard, DistributedDataParallel and
torch.compile. It changes the model's layers in place; names in its state_dict stay as they are. A layer has to return a
tensor, or a tuple or list of them."""
MOST_MODULES: Final = 40
"""Modules of a layer that are considered, those with most work. A layer of many experts has hundreds."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """Policy of a layer with its seconds of recomputation."""

    policy: LayerPolicy
    seconds: float


@dataclass(frozen=True, kw_only=True)
class PolicyStep:
    """Step from one policy of a layer to the next that keeps less."""

    layer: int
    position: int
    policy: LayerPolicy
    seconds_per_byte: float


def write(nearest: Nearest) -> TargetOutput:
    """Write the nearest file to the plan; torch_remat must be installed."""
    subject = nearest.subject
    nearest.refuse_described()
    if find_spec("torch_remat") is None:
        raise CannotSay(
            "torch_remat is not installed, and its dry run gives the cost of an export; pip install torch_remat, or "
            "export --to torch"
        )
    try:
        policies, cost = _chosen(nearest)
    except TraceError as error:
        if _RETURNS not in str(error):
            raise
        raise CannotSay(
            f"torch_remat's checkpoints take layers that return a tensor, or a tuple or list of tensors; those of "
            f"{subject.model} return something else. Export --to torch"
        ) from error
    files, notes = {"checkpointing.py": code(subject, policies)}, (*_notes(policies), *copied(policies))
    return TargetOutput(files=files, policies=policies, cost=cost, notes=notes)


def _chosen(nearest: Nearest) -> Priced:
    """Choose the plan's own policies if it has only entire layers; else recompute as few seconds as fit."""
    subject = nearest.subject
    could = "which layers are checkpoints, and which of their modules keep their activations"
    if subject.moves:
        could += ", and which tensors of other layers, or inputs of checkpoints, are offloaded"

    def write(policies: Sequence[LayerPolicy]) -> str:
        stand_in = pieces("offload.py.txt")["stand_in"]
        return code(subject, policies) + (stand_in if any(policy.offloaded for policy in policies) else "")

    moved = partial(as_the_plan_moves, checkpoint=by_regions)

    def nearest_of(decision: Decision) -> LayerPolicy:
        """Choose for a partly recomputed layer: its input offloaded, or regions that keep no more."""
        if decision.offloaded:
            return moved(decision)
        ours = options_of(decision, lambda op: op_seconds(op, subject.hardware))
        return next((o.policy for o in ours if o.policy.kept_bytes <= decision.kept_bytes), ours[-1].policy)

    nearest = nearest.saying(could, write)
    if subject.moves:
        return nearest.with_moves(moved, nearest_of)
    if subject.whole_layers:
        whole, cost = nearest.checkpoints()
        carried_out = (by_regions(p.decision) if p.action is LayerAction.CHECKPOINT else p for p in whole)
        return tuple(carried_out), cost
    options = _options(subject)
    steps = steps_down(options)

    def made(count: int) -> Policies:
        found = [ours[0].policy for ours in options]
        for step in steps[:count]:
            found[step.layer] = step.policy
        return tuple(found)

    return _filled(*nearest.least(made, len(steps)), options, nearest)


def _filled(chosen: Policies, cost: Cost, options: Sequence[Sequence[Option]], nearest: Nearest) -> Priced:
    """Spend the rest of the budget, since a step may free more than needed, on the one layer that saves most time."""
    room = nearest.subject.budget_bytes - cost.peak_bytes
    found = []
    for i, ours in enumerate(options):
        spent = next(option.seconds for option in ours if option.policy is chosen[i])
        for option in ours:
            if spent > option.seconds and option.policy.kept_bytes - chosen[i].kept_bytes <= room:
                found.append((option.seconds - spent, i, option.policy))
    for _, i, policy in sorted(found, key=lambda one: one[:2])[:TRIES]:
        filled = nearest.priced((*chosen[:i], policy, *chosen[i + 1 :]))
        if nearest.fits(filled):
            return filled
    return chosen, cost


def _options(subject: Subject) -> list[tuple[Option, ...]]:
    """Options of each layer; layers with the same program share them."""
    first = {id(decision.program): decision for decision in reversed(subject.decisions)}
    known = {key: options_of(decision, lambda op: op_seconds(op, subject.hardware)) for key, decision in first.items()}
    return [
        tuple(replace(one, policy=replace(one.policy, decision=decision)) for one in known[id(decision.program)])
        for decision in subject.decisions
    ]


def _notes(policies: Sequence[LayerPolicy]) -> Iterator[str]:
    if any(policy.action is not LayerAction.KEEP for policy in policies):
        yield "torch_remat recomputes a layer to its last op, also results that backward does not need"
    if any(map(draws_in_replay, policies)):
        yield (
            "the file's own hook restores random generator states, since torch_remat does not: it keeps one for each "
            "layer that draws random numbers and one for each module in it that is not recomputed, of the CPU and of "
            "the current CUDA device"
        )


def code(subject: Subject, policies: Sequence[LayerPolicy]) -> str:
    """Write the file."""
    own, host = pieces("torch_remat/checkpointing.py.txt"), pieces("offload.py.txt")
    checkpoints = [policy for policy in policies if policy.action is not LayerAction.KEEP]
    kinds = kinds_of(policy.regions for policy in checkpoints)
    moves = moves_table({policy.layer: policy for policy in policies})
    text = header(subject, "torch_remat", USE) + own["imports"] + (host["imports"] if moves else "")
    text += f"LAYERS = {rows({policy.layer: kinds[policy.regions] for policy in checkpoints})}\n"
    text += "# by kind of layer: modules that keep their activations and are not recomputed\n"
    text += f"REGIONS = {rows({kind: regions for regions, kind in kinds.items()})}\n"
    draw_again = names(policy.layer for policy in checkpoints if draws_in_replay(policy))
    text += f"DRAWING = {draw_again}  # layers whose recomputation draws random numbers\n" + moves
    wrap = host["wrap"] if moves else ""
    text += own["apply"].replace("    return model\n", f"{wrap}    return model\n", 1)
    return text + (host["code"] if moves else "")


def by_regions(decision: Decision, marks: Iterable[str] = ()) -> LayerPolicy:
    """Return the policy of a checkpoint in which these modules are saved regions."""
    program, chosen = decision.program, tuple(sorted(marks))
    homes = [_home(op.path, chosen) for op in program.ops]
    again = tuple(op.index for op in program.ops if homes[op.index] is None)
    kept = _saved_inside(program, chosen, homes) | _results(program, homes)
    states, given, extra = random_states(program), Full().kept(program), 0
    if drawing(program).intersection(again):
        entry = [b for b in given & states if program.buffers[b].producer is None]
        extra = len(chosen) * sum(program.buffers[b].nbytes for b in entry)
    else:
        given -= states
    return LayerPolicy(
        decision=decision,
        action=LayerAction.SELECT if chosen else LayerAction.CHECKPOINT,
        kept=kept | given,
        again=again,
        words=f"keeps {', '.join(chosen)}" if chosen else "",
        regions=chosen,
        extra_bytes=extra,
    )


def draws_in_replay(policy: LayerPolicy) -> bool:
    """Whether recomputation draws random numbers."""
    return policy.action is not LayerAction.KEEP and not drawing(policy.program).isdisjoint(policy.again)


def steps_down(options: Sequence[Sequence[Option]]) -> tuple[PolicyStep, ...]:
    """Order the steps from no checkpointing to plain checkpoints by seconds per byte; of equals the first layers.

    Args:
        options: of each layer, from most bytes to fewest.
    """
    found = []
    for i, ours in enumerate(options):
        here, position = ours[0], 0
        while below := [option for option in ours if option.policy.kept_bytes < here.policy.kept_bytes]:
            last = here
            here = min(below, key=lambda option: (_rate(last, option), option.policy.kept_bytes))
            found.append(PolicyStep(layer=i, position=position, policy=here.policy, seconds_per_byte=_rate(last, here)))
            position += 1
    return tuple(sorted(found, key=lambda step: (step.seconds_per_byte, step.position, step.layer)))


def _rate(before: Option, after: Option) -> float:
    return (after.seconds - before.seconds) / (before.policy.kept_bytes - after.policy.kept_bytes)


def options_of(decision: Decision, seconds: Callable[[Op], float]) -> tuple[Option, ...]:
    """Pareto front of a layer's options, bytes against seconds, from keeping everything to a checkpoint.

    Args:
        seconds: of a recomputed op.
    """
    times = [seconds(op) for op in decision.program.ops]
    found = [Option(policy=kept_whole(decision), seconds=0.0)]
    tried = (Option(policy=p, seconds=sum(times[o] for o in p.again)) for p in _tried(decision, times).values())
    for option in sorted(tried, key=lambda option: (option.seconds, option.policy.kept_bytes)):
        if option.policy.kept_bytes < found[-1].policy.kept_bytes:
            found.append(option)
    return tuple(found)


def _tried(decision: Decision, times: list[float]) -> dict[frozenset[str], LayerPolicy]:
    """Policies by set of saved modules, grown greedily by the module that saves most seconds for its bytes."""
    modules = _modules(decision.program, times)
    marks: frozenset[str] = frozenset()
    tried = OnDemand[frozenset[str], LayerPolicy](partial(by_regions, decision))
    while True:
        here = tried[marks]
        spent = sum(times[o] for o in here.again)
        best: tuple[float, frozenset[str]] | None = None
        for module in modules:
            if any(_inside(module, mark) for mark in marks):
                continue
            more = frozenset(mark for mark in marks if not _inside(mark, module)) | {module}
            saved = spent - sum(times[o] for o in tried[more].again)
            dearer = max(tried[more].kept_bytes - here.kept_bytes, 1)
            if best is None or saved / dearer > best[0]:
                best = saved / dearer, more
        if best is None:
            return tried
        marks = best[1]


def _modules(program: Program, times: list[float]) -> list[str]:
    """Modules of a layer that may be regions, those with most work first."""
    work: dict[str, float] = {}
    for op, spent in zip(program.ops, times, strict=True):
        parts = op.path.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            if name:
                work[name] = work.get(name, 0.0) + spent
    may = [name for name in work if not overwritten(program, name)]
    return sorted(may, key=lambda name: (-work[name], name))[:MOST_MODULES]


def overwritten(program: Program, module: str) -> bool:
    """Whether code outside the module writes to its outputs in place. torch_remat would raise in backward."""
    homes = [_inside(op.path, module) for op in program.ops]
    made = {b for op in program.ops if homes[op.index] for b in op.outputs}
    return any(
        writes_in_place(op) and not op.name.startswith("jettison.") and made.intersection(op.inputs)
        for op in program.ops
        if not homes[op.index]
    )


def _inside(path: str, module: str) -> bool:
    return path == module or path.startswith(f"{module}.")


def _home(path: str, marks: tuple[str, ...]) -> str | None:
    return next((mark for mark in marks if _inside(path, mark)), None)


def _saved_inside(program: Program, marks: tuple[str, ...], homes: list[str | None]) -> frozenset[int]:
    """Tensors that autograd saves in the regions, except for inputs from recomputed code."""
    inside = (program.buffers[slot.buffer] for slot in program.slots if _home(slot.path, marks) is not None)
    return frozenset(
        buffer.index
        for buffer in inside
        if not buffer.free
        if (buffer.source is Source.OUTER if buffer.producer is None else homes[buffer.producer] is not None)
    )


def _results(program: Program, homes: list[str | None]) -> frozenset[int]:
    found = set()
    for b in {b for op in program.ops for b in op.inputs} | set(program.outputs):
        producer = program.buffers[b].producer
        if producer is None or (home := homes[producer]) is None or program.buffers[b].free:
            continue
        if b in program.outputs or any(b in op.inputs and homes[op.index] != home for op in program.ops):
            found.add(b)
    return frozenset(found)
