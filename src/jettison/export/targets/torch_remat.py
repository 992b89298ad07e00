"""torch_remat: a file with ``apply(model)``, of a checkpoint for each layer and modules in it that are not run again.

See NOTE [ What a saved region holds ] in export/regions.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Final

from jettison.cost.roofline import op_seconds
from jettison.errors import TraceError
from jettison.export.host_text import CODE, IMPORTS, STAND_IN, WRAP, moves_table
from jettison.export.nearest import Priced, fewest_checkpoints, least, with_moves
from jettison.export.policy import Action, LayerPolicy, with_input_on_host
from jettison.export.python_text import header, names
from jettison.export.regions import Option, by_regions, draws_in_replay, options_of, steps_down
from jettison.export.result import CannotSay, Cost, Exported, Pricer, losses
from jettison.export.subject import Decision, Subject
from jettison.export.targets import plain_torch

TARGET: Final = "torch_remat"
PACKAGE: Final = "torch_remat"
COULD: Final = "which layers are checkpoints, and which of their modules keep their activations"
TRIES: Final = 3
_RETURNS: Final = "checkpoint function must return"  # torch_remat's own words
USE: Final = """\
Import this file, and call apply(model) once after the model was built, before fully_shard, DistributedDataParallel and
torch.compile. It changes the model's layers in place; names in its state_dict stay as they are. A layer has to return a
tensor, or a tuple or list of them."""


def export(subject: Subject, pricer: Pricer) -> Exported:
    """The nearest file to the plan.

    Raises:
        CannotSay: the plan is of a described run, which names no modules, torch_remat is not there to be run, or layers
            return what its checkpoints do not take.
        DoesNotFit: with every layer a checkpoint the peak is above the plan's budget.
    """
    plain_torch.refuse_described(subject, TARGET)
    if find_spec(PACKAGE) is None:
        raise CannotSay(
            "torch_remat is not installed here, and what is exported is run to say what it costs; "
            "pip install torch_remat, or export --to torch"
        )
    try:
        policies, cost = _chosen(subject, pricer)
    except TraceError as error:
        if _RETURNS not in str(error):
            raise
        raise CannotSay(
            f"torch_remat's checkpoints take layers that return a tensor, or a tuple or list of tensors; those of "
            f"{subject.model} return something else. Export --to torch"
        ) from error
    return Exported(
        target=TARGET,
        subject=subject,
        files={"checkpointing.py": code(subject, policies)},
        policies=policies,
        plan_cost=pricer.plan(),
        cost=cost,
        lost=losses(subject, policies, TARGET),
        notes=(*_notes(policies), *plain_torch.copied(policies)),
        checked_with="torch_remat 0.2.2, torch 2.13",
    )


def _chosen(subject: Subject, pricer: Pricer) -> Priced:
    """As the plan has it where it treats layers whole; else from all kept as few seconds down as fit."""

    def write(policies: Sequence[LayerPolicy]) -> str:
        return code(subject, policies) + (STAND_IN if any(policy.moved for policy in policies) else "")

    if any(decision.moved for decision in subject.decisions):
        nearest = partial(_nearest, subject=subject)
        could = f"{COULD}, and what waits on the host of layers that are none, or of what a checkpoint is given"
        return with_moves(
            subject, pricer, write, target=TARGET, could=could, checkpoint=_as_the_plan_moves, partly=nearest
        )
    if all(decision.plain or decision.whole for decision in subject.decisions):
        whole, cost = fewest_checkpoints(subject, pricer, write, target=TARGET, could=COULD)
        return tuple(map(_as_carried_out, whole)), cost
    options = _options(subject)
    steps = steps_down(options)

    def made(count: int) -> tuple[LayerPolicy, ...]:
        found = [ours[0].policy for ours in options]
        for step in steps[:count]:
            found[step.layer] = step.policy
        return tuple(found)

    chosen, cost = least(made, len(steps), subject, pricer, write, target=TARGET, could=COULD)
    return _filled(chosen, cost, options, subject, pricer)


def _filled(
    chosen: tuple[LayerPolicy, ...], cost: Cost, options: Sequence[Sequence[Option]], subject: Subject, pricer: Pricer
) -> Priced:
    """A step frees more than was asked for: what is left of the budget goes to the one layer that saves most by it."""
    room = subject.budget_bytes - cost.peak_bytes
    found = []
    for i, ours in enumerate(options):
        spent = next(option.seconds for option in ours if option.policy is chosen[i])
        for option in ours:
            if spent > option.seconds and option.policy.kept_bytes - chosen[i].kept_bytes <= room:
                found.append((option.seconds - spent, i, option.policy))
    for _, i, policy in sorted(found, key=lambda one: one[:2])[:TRIES]:
        filled = (*chosen[:i], policy, *chosen[i + 1 :])
        again = pricer.cost(filled, code(subject, filled))
        if again.peak_bytes <= subject.budget_bytes:
            return filled, again
    return chosen, cost


def _options(subject: Subject) -> list[tuple[Option, ...]]:
    """By layer; layers of one program have the same."""
    known: dict[int, tuple[Option, ...]] = {}
    found = []
    for decision in subject.decisions:
        key = id(decision.program)
        if key not in known:
            known[key] = options_of(decision, lambda op: op_seconds(op, subject.hardware))
        found.append(tuple(replace(option, policy=replace(option.policy, decision=decision)) for option in known[key]))
    return found


def _as_the_plan_moves(decision: Decision) -> LayerPolicy:
    policy = by_regions(decision, ())
    return with_input_on_host(policy) if decision.moved else policy


def _nearest(decision: Decision, subject: Subject) -> LayerPolicy:
    """Return the nearest policy for a partly recomputed layer: its input offloaded, or regions that keep no more."""
    if decision.moved:
        return _as_the_plan_moves(decision)
    options = options_of(decision, lambda op: op_seconds(op, subject.hardware))
    allowed = [option for option in options if option.policy.kept_bytes <= decision.kept_bytes]
    return (allowed or options[-1:])[0].policy


def _as_carried_out(policy: LayerPolicy) -> LayerPolicy:
    return by_regions(policy.decision, ()) if policy.action is Action.CHECKPOINT else policy


def _notes(policies: Sequence[LayerPolicy]) -> tuple[str, ...]:
    found = []
    if any(policy.action is not Action.KEEP for policy in policies):
        found.append("torch_remat runs a layer again to its last op, also what backward asks nothing of")
    if any(map(draws_in_replay, policies)):
        found.append(
            "random states are put back by the file's own hook, since torch_remat does not: one is held for each layer "
            "that draws and one for each module in it that stays, of the CPU and of the current CUDA device"
        )
    return tuple(found)


def code(subject: Subject, policies: Sequence[LayerPolicy]) -> str:
    """The file."""
    checkpoints = [p for p in policies if p.action is not Action.KEEP]
    kinds: dict[tuple[str, ...], str] = {}
    for policy in checkpoints:
        kinds.setdefault(policy.regions, f"kind {len(kinds) + 1}")
    drawing = [policy.layer for policy in checkpoints if draws_in_replay(policy)]
    on_host = any(policy.moved for policy in policies)
    text = header(subject, "torch_remat", USE) + _IMPORTS + (IMPORTS if on_host else "")
    text += "LAYERS = {\n" + "".join(f"    {p.layer!r}: {kinds[p.regions]!r},\n" for p in checkpoints) + "}\n"
    text += "# by kind of layer: modules that keep their activations and are not run again\n"
    rows = "".join(f"    {kind!r}: {regions!r},\n" for regions, kind in kinds.items())
    text += f"REGIONS = {{\n{rows}}}\n"
    text += f"DRAWING = {names(drawing)}  # layers whose second run draws random numbers\n"
    moves = moves_table([(policy.layer, policy) for policy in policies])
    return (
        text
        + moves
        + _APPLY.replace("    return model\n", WRAP * bool(moves) + "    return model\n", 1)
        + CODE * bool(moves)
    )


_IMPORTS = """
from collections import Counter
from functools import partial

import torch
import torch_remat as remat
from torch import nn

"""
_APPLY = '''

class RandomState:
    """Random states of the CPU and of the current CUDA device, for torch_remat's recompute_state_hooks."""

    def snapshot(self):
        return torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None

    def restore(self, state):
        torch.set_rng_state(state[0])
        if state[1] is not None:
            torch.cuda.set_rng_state(state[1])


def apply(model: nn.Module) -> nn.Module:
    """Make the layers checkpoints, in place."""
    for name, kind in LAYERS.items():
        layer = model.get_submodule(name)
        calls = Counter()
        for path in REGIONS[kind]:
            module = layer.get_submodule(path)
            module.forward = partial(_region, module.forward, path, calls)
        layer.forward = partial(_layer, layer.forward, name, calls)
    return model


def _layer(forward, name, calls, *args, **kwargs):
    """A layer's forward as a checkpoint."""

    def run(*args, **kwargs):
        calls.clear()  # regions are named by the number of the call, in the forward as when it is run again
        return forward(*args, **kwargs)

    hooks = (RandomState(),) if name in DRAWING else ()
    return remat.checkpoint(region_name=name, recompute_state_hooks=hooks)(run)(*args, **kwargs)


def _region(forward, path, calls, *args, **kwargs):
    """A module's forward whose activations stay."""
    calls[path] += 1
    result = remat.region(forward, f"{path} {calls[path]}", recompute=False)(*args, **kwargs)
    results = result if isinstance(result, (tuple, list)) else (result,)
    remat.recompute_needs_tensor(*(r for r in results if r is not None))
    return result
'''
