"""torch_remat: a file with ``apply(model)``, of a checkpoint for each layer and modules in it that are not run again.

NOTE [ What a saved region holds ]
torch_remat's checkpoint holds what the layer is given and runs the layer again as a whole, to its last op. A region
with ``recompute=False`` is left out of that: what autograd saved inside of it stays, but for what it was given by code
that runs again. So do its results, since the file says of all of them that they are read: torch_remat would hand out a
stand-in without bytes for one that only other regions read, and there are no stand-ins on fake tensors, where the file
is priced. Mostly they stay anyway. After each region the state of the random numbers is taken, where a layer needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Final

from jettison.core.errors import TraceError
from jettison.cost.matmul import op_seconds
from jettison.frameworks.export import Written
from jettison.frameworks.nearest import CannotSay, Nearest, Policies, Priced
from jettison.frameworks.policy import (
    Cost,
    Decision,
    LayerAction,
    LayerPolicy,
    Subject,
    drawing,
    kept_whole,
    random_states,
    with_input_on_host,
    writes_in_place,
)
from jettison.frameworks.text import header, kinds_of, moves_table, names, pieces, rows
from jettison.frameworks.torch.write import copied
from jettison.ledger.program import Op, Program, Source
from jettison.solve.policy import Full

TRIES: Final = 3
_RETURNS: Final = "checkpoint function must return"  # torch_remat's own words
USE: Final = """\
Import this file, and call apply(model) once after the model was built, before fully_shard, DistributedDataParallel and
torch.compile. It changes the model's layers in place; names in its state_dict stay as they are. A layer has to return a
tensor, or a tuple or list of them."""
MOST_MODULES: Final = 40
"""So many modules of a layer are considered: those with the most work. A layer of many experts has hundreds."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """One policy of a layer; ``seconds`` are those of what runs again."""

    policy: LayerPolicy
    seconds: float


@dataclass(frozen=True, kw_only=True)
class PolicyStep:
    """From one policy of a layer to the next that holds less."""

    layer: int
    position: int
    policy: LayerPolicy
    seconds_per_byte: float


def write(nearest: Nearest) -> Written:
    """The nearest file to the plan, where torch_remat is there to be run."""
    subject = nearest.subject
    nearest.refuse_described()
    if find_spec("torch_remat") is None:
        raise CannotSay(
            "torch_remat is not installed here, and what is exported is run to say what it costs; "
            "pip install torch_remat, or export --to torch"
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
    return Written(files=files, policies=policies, cost=cost, notes=notes)


def _chosen(nearest: Nearest) -> Priced:
    """As the plan has it where it treats layers whole; else from all kept as few seconds down as fit."""
    subject = nearest.subject
    could = "which layers are checkpoints, and which of their modules keep their activations"
    if subject.moves:
        could += ", and what waits on the host of layers that are none, or of what a checkpoint is given"

    def write(policies: Sequence[LayerPolicy]) -> str:
        stand_in = pieces("host.py.txt")["stand_in"]
        return code(subject, policies) + (stand_in if any(policy.moved for policy in policies) else "")

    def nearest_of(decision: Decision) -> LayerPolicy:
        """For a partly recomputed layer: its input offloaded, or regions that keep no more."""
        if decision.moved:
            return _as_the_plan_moves(decision)
        ours = options_of(decision, lambda op: op_seconds(op, subject.hardware))
        return next((o.policy for o in ours if o.policy.kept_bytes <= decision.kept_bytes), ours[-1].policy)

    nearest = nearest.saying(could, write)
    if subject.moves:
        return nearest.with_moves(_as_the_plan_moves, nearest_of)
    if subject.whole_layers:
        whole, cost = nearest.checkpoints()
        carried_out = (by_regions(p.decision, ()) if p.action is LayerAction.CHECKPOINT else p for p in whole)
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
    """A step frees more than was asked for: what is left of the budget goes to the one layer that saves most by it."""
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
    """By layer; layers of one program have the same."""
    first = {id(decision.program): decision for decision in reversed(subject.decisions)}
    known = {key: options_of(decision, lambda op: op_seconds(op, subject.hardware)) for key, decision in first.items()}
    return [
        tuple(replace(one, policy=replace(one.policy, decision=decision)) for one in known[id(decision.program)])
        for decision in subject.decisions
    ]


def _as_the_plan_moves(decision: Decision) -> LayerPolicy:
    policy = by_regions(decision, ())
    return with_input_on_host(policy) if decision.moved else policy


def _notes(policies: Sequence[LayerPolicy]) -> tuple[str, ...]:
    found = []
    if any(policy.action is not LayerAction.KEEP for policy in policies):
        found.append("torch_remat runs a layer again to its last op, also what backward asks nothing of")
    if any(map(draws_in_replay, policies)):
        found.append(
            "random states are put back by the file's own hook, since torch_remat does not: one is held for each layer "
            "that draws and one for each module in it that stays, of the CPU and of the current CUDA device"
        )
    return tuple(found)


def code(subject: Subject, policies: Sequence[LayerPolicy]) -> str:
    """The file."""
    own, host = pieces("torch_remat/checkpointing.py.txt"), pieces("host.py.txt")
    checkpoints = [policy for policy in policies if policy.action is not LayerAction.KEEP]
    kinds = kinds_of(policy.regions for policy in checkpoints)
    moves = moves_table({policy.layer: policy for policy in policies})
    text = header(subject, "torch_remat", USE) + own["imports"] + (host["imports"] if moves else "")
    text += f"LAYERS = {rows({policy.layer: kinds[policy.regions] for policy in checkpoints})}\n"
    text += "# by kind of layer: modules that keep their activations and are not run again\n"
    text += f"REGIONS = {rows({kind: regions for regions, kind in kinds.items()})}\n"
    draw_again = names(policy.layer for policy in checkpoints if draws_in_replay(policy))
    text += f"DRAWING = {draw_again}  # layers whose second run draws random numbers\n" + moves
    wrap = host["wrap"] if moves else ""
    text += own["apply"].replace("    return model\n", f"{wrap}    return model\n", 1)
    return text + (host["code"] if moves else "")


def by_regions(decision: Decision, marks: Iterable[str]) -> LayerPolicy:
    """The layer is a checkpoint in which these modules are regions that are saved."""
    program, chosen = decision.program, tuple(sorted(marks))
    homes = [_home(op.path, chosen) for op in program.ops]
    again = tuple(op.index for op in program.ops if homes[op.index] is None)
    kept = _saved_inside(program, chosen, homes) | _results(program, homes)
    states, given, beside = random_states(program), Full().kept(program), 0
    if drawing(program).intersection(again):
        entry = [b for b in given & states if program.buffers[b].producer is None]
        beside = len(chosen) * sum(program.buffers[b].nbytes for b in entry)
    else:
        given -= states
    return LayerPolicy(
        decision=decision,
        action=LayerAction.SELECT if chosen else LayerAction.CHECKPOINT,
        kept=kept | given,
        again=again,
        words=f"keeps {', '.join(chosen)}" if chosen else "",
        regions=chosen,
        beside_bytes=beside,
    )


def draws_in_replay(policy: LayerPolicy) -> bool:
    """Whether recomputation draws random numbers."""
    return policy.action is not LayerAction.KEEP and not drawing(policy.program).isdisjoint(policy.again)


def steps_down(options: Sequence[Sequence[Option]]) -> tuple[PolicyStep, ...]:
    """From keeping everything to plain checkpoints, the cheapest second a byte first; of equals the first layers.

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
    """What can be said of a layer and is not beaten in bytes and seconds, from keeping everything to a checkpoint.

    Args:
        seconds: of an op that runs again.
    """
    times = [seconds(op) for op in decision.program.ops]
    found = [Option(policy=kept_whole(decision), seconds=0.0)]
    tried = (Option(policy=p, seconds=sum(times[o] for o in p.again)) for p in _tried(decision, times).values())
    for option in sorted(tried, key=lambda option: (option.seconds, option.policy.kept_bytes)):
        if option.policy.kept_bytes < found[-1].policy.kept_bytes:
            found.append(option)
    return tuple(found)


def _tried(decision: Decision, times: list[float]) -> dict[frozenset[str], LayerPolicy]:
    """Sets of modules, from none on: always the one more that saves the most seconds for its bytes."""
    modules = _modules(decision.program, times)
    marks: frozenset[str] = frozenset()
    tried = {marks: by_regions(decision, marks)}
    while True:
        here = tried[marks]
        spent = sum(times[o] for o in here.again)
        best: tuple[float, frozenset[str]] | None = None
        for module in modules:
            if any(_inside(module, mark) for mark in marks):
                continue
            more = frozenset(mark for mark in marks if not _inside(mark, module)) | {module}
            if more not in tried:
                tried[more] = by_regions(decision, more)
            saved = spent - sum(times[o] for o in tried[more].again)
            dearer = max(tried[more].kept_bytes - here.kept_bytes, 1)
            if best is None or saved / dearer > best[0]:
                best = saved / dearer, more
        if best is None:
            return tried
        marks = best[1]


def _modules(program: Program, times: list[float]) -> list[str]:
    """Modules of a layer that may be regions, those with the most work first where there are too many."""
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
    """Somebody else writes over what the module made: torch_remat would refuse it in backward."""
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
    """What autograd saves in the regions, but for what code that runs again gave them."""
    inside = (program.buffers[slot.buffer] for slot in program.slots if _home(slot.path, marks) is not None)
    return frozenset(
        buffer.index
        for buffer in inside
        if not buffer.free
        if (buffer.source is Source.OUTER if buffer.producer is None else homes[buffer.producer] is not None)
    )


def _results(program: Program, homes: list[str | None]) -> frozenset[int]:
    """Find the results of the regions."""
    found = set()
    for b in {b for op in program.ops for b in op.inputs} | set(program.outputs):
        producer = program.buffers[b].producer
        if producer is None or (home := homes[producer]) is None or program.buffers[b].free:
            continue
        if b in program.outputs or any(b in op.inputs and homes[op.index] != home for op in program.ops):
            found.add(b)
    return frozenset(found)
