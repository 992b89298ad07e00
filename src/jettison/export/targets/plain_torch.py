"""Plain torch: a file with ``apply(model)``, of `checkpoint_wrapper` and selective contexts.

It says all that a live plan says about what is kept and what is computed again, in the measure of NOTE [ What a
checkpoint holds ] in export/policy.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from jettison.export.host_text import CODE, IMPORTS, STAND_IN, WRAP, moves_table
from jettison.export.nearest import Checkpoint, Priced, between, fewest_checkpoints, with_host
from jettison.export.policy import (
    Action,
    LayerPolicy,
    OpCall,
    by_ops_and_host,
    checkpointed,
    checkpointed_on_host,
    draws_again,
)
from jettison.export.python_text import PAST_HOOKS, header, names, saves_table
from jettison.export.result import CannotSay, Exported, Pricer, losses
from jettison.export.subject import Decision, Subject

TARGET = "torch"
USE = """\
Import this file, and call apply(model) once after the model was built, before fully_shard, DistributedDataParallel and
torch.compile. It changes the model in place; names in its state_dict stay as they are."""
COULD = "which calls of ops stay, and which layers are checkpoints"
DISPATCHED = (
    "selective contexts put a dispatch mode around every op of a layer; that costs time on the host beside the ops "
    "that run again, and is not in these seconds"
)


def export(subject: Subject, pricer: Pricer) -> Exported:
    """The nearest file to the plan.

    Raises:
        CannotSay: the plan is of a described model of two stacks.
        DoesNotFit: with every layer a checkpoint the peak is above the plan's budget.
    """
    refuse_stacks(subject, TARGET)
    policies, cost = _chosen(subject, pricer)
    selective = any(policy.action is Action.SELECT for policy in policies)
    return Exported(
        target=TARGET,
        subject=subject,
        files={"checkpointing.py": code(subject, policies)},
        policies=policies,
        plan_cost=pricer.plan(),
        cost=cost,
        lost=losses(subject, policies, TARGET),
        notes=(*((DISPATCHED,) if selective else ()), *copied(policies)),
        checked_with="torch 2.13",
    )


def copied(policies: Sequence[LayerPolicy]) -> tuple[str, ...]:
    """A note on what copies cost."""
    if not any(policy.moved for policy in policies):
        return ()
    return ("copies to the host and back run while nothing is computed; a live plan's seconds are without them",)


def _chosen(subject: Subject, pricer: Pricer) -> Priced:
    def write(policies: Sequence[LayerPolicy]) -> str:
        return priced_code(subject, policies)

    def choose(ours: Pricer, checkpoint: Checkpoint) -> Priced:
        could = "which layers are checkpoints"
        return fewest_checkpoints(subject, ours, write, target=TARGET, could=could, checkpoint=checkpoint)

    if not subject.live:  # a description names no ops of a module
        return with_host(subject, pricer, choose)
    wished = tuple(map(by_ops_and_host, subject.decisions))
    return between(
        wished, subject, pricer, write, target=TARGET, could=COULD, as_it_stands=True, checkpoint=as_the_plan_moves
    )


def as_the_plan_moves(decision: Decision) -> LayerPolicy:
    """A checkpoint, with what it is given on the host where the plan moves something of the layer."""
    return checkpointed_on_host(decision) if decision.moved else checkpointed(decision)


def priced_code(subject: Subject, policies: Sequence[LayerPolicy], *, states: bool | None = None) -> str:
    """The file as it is run for its price: what waits on the host has no bytes."""
    text = code(subject, policies, states=states)
    return text + (STAND_IN if any(policy.moved for policy in policies) else "")


def code(subject: Subject, policies: Sequence[LayerPolicy], *, states: bool | None = None) -> str:
    """The file.

    Args:
        states: random states are put back although no layer draws random numbers; None: where one does.
    """
    kinds: dict[tuple[OpCall, ...], str] = {}
    for policy in policies:
        if policy.action is Action.SELECT:
            kinds.setdefault(policy.saves, f"kind {len(kinds) + 1}")
    full = [_name(subject, p, i) for i, p in enumerate(policies) if p.action is Action.CHECKPOINT]
    selective = {_name(subject, p, i): kinds[p.saves] for i, p in enumerate(policies) if p.action is Action.SELECT}
    keep_states = any(map(draws_again, policies)) if states is None else states
    text = header(subject, "plain torch", USE)
    moves = moves_table([(_name(subject, policy, i), policy) for i, policy in enumerate(policies)])
    text += (_IMPORTS_SELECTIVE if kinds else _IMPORTS) + (IMPORTS if moves else "")
    text += f"\nFULL = {names(full)}\n"
    if kinds:
        rows = "".join(f"    {name!r}: {kind!r},\n" for name, kind in selective.items())
        text += f"SELECTIVE = {{\n{rows}}}\n"
        text += "# by kind of layer and op: whose outputs stay, as numbers of its calls in the layer's forward\n"
        text += f"SAVES = {saves_table({kind: saves for saves, kind in kinds.items()})}\n" + PAST_HOOKS
    text += f"PRESERVE_RNG_STATE = {keep_states}  # whether what runs again draws random numbers\n"
    if not subject.live:
        text += f"LAYERS = {len(policies)}\n"
    return text + moves + _body(bool(kinds), subject.live, bool(moves))


def _name(subject: Subject, policy: LayerPolicy, index: int) -> object:
    return policy.layer if subject.live else index


def _body(selective: bool, live: bool, moves: bool) -> str:
    text = _APPLY if live else _APPLY_BY_NUMBER
    beside = (_APPLY_SELECTIVE if selective else "") + (WRAP if moves and live else "")
    text = text.replace("    return model\n", f"{beside}    return model\n", 1)
    if moves and not live:
        text = text.replace("    return model\n", f"{_HOST_BY_NUMBER}    return model\n", 1)
    return text + (_CONTEXTS if selective else "") + (CODE if moves else "")


def refuse_described(subject: Subject, target: str) -> None:
    """Refuse a plan that names no modules.

    Raises:
        CannotSay: it is one.
    """
    if not subject.live:
        raise CannotSay(
            f"{target} wraps modules by name, and this plan of a described run names none; plan the config.json "
            "without a layout, or module:factory, and export that"
        )


def refuse_stacks(subject: Subject, target: str, *, in_order: bool = False) -> None:
    """Refuse a described plan whose layers are not the one list in which the target numbers them.

    Args:
        in_order: layers of several lists are numbered in the order of modules: an encoder's before a decoder's, and a
            tower of words before one of images, which a description has the other way round.

    Raises:
        CannotSay: the model is made of two stacks.
    """
    if subject.described is None:
        return
    model = subject.described.forecast.run.model
    if model.two_stacks and not (in_order and model.source is not None):
        raise CannotSay(
            f"{target} numbers layers in one list, and {subject.model} is {model.two_stacks}; plan the config.json "
            "without a layout, and export that, which names them"
        )


def refuse_images(subject: Subject, target: str) -> None:
    """Refuse a described plan of a model that reads no tokens.

    Raises:
        CannotSay: it is one.
    """
    if subject.described is not None and not subject.described.forecast.run.model.words:
        raise CannotSay(
            f"{target} is told of models of words, and {subject.model} reads none; export --to transformers"
        )


_IMPORTS = """
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
"""
_IMPORTS_SELECTIVE = """
from collections import Counter
from functools import partial
from inspect import signature

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
"""
_APPLY = '''

def apply(model: nn.Module) -> nn.Module:
    """Wrap the layers, in place."""
    for name in FULL:
        _wrap(model, name)
    return model


def _wrap(model: nn.Module, name: str, **how) -> None:
    parent, _, child = name.rpartition(".")
    wrapped = checkpoint_wrapper(model.get_submodule(name), preserve_rng_state=PRESERVE_RNG_STATE, **how)
    setattr(model.get_submodule(parent), child, wrapped)
'''
_APPLY_SELECTIVE = """    for name, kind in SELECTIVE.items():
        _wrap(model, name, context_fn=partial(_contexts, SAVES[kind]), **PAST_HOOKS)
"""
_HOST_BY_NUMBER = """    for number, (name, layer) in enumerate(list(lists[0].named_children())):
        if number in ON_HOST:
            lists[0].register_module(name, _Waiting(layer, ON_HOST[number]))
"""
_APPLY_BY_NUMBER = '''

def apply(model: nn.Module) -> nn.Module:
    """Wrap the layers, in place: the model's one list of LAYERS modules."""
    lists = [m for m in model.modules() if isinstance(m, (nn.ModuleList, nn.ModuleDict)) and len(m) == LAYERS]
    if len(lists) != 1:
        raise ValueError(f"expected one list of {LAYERS} layers in the model; found {len(lists)}")
    for number, (name, layer) in enumerate(list(lists[0].named_children())):
        if number in FULL:
            lists[0].register_module(name, checkpoint_wrapper(layer, preserve_rng_state=PRESERVE_RNG_STATE))
    return model
'''
_CONTEXTS = '''

def _contexts(saves):
    """Fresh contexts for one forward: calls of ops are counted, then and when it is run again."""
    seen = Counter()

    def policy(ctx, op, *args, **kwargs):
        seen[ctx.is_recompute, op] += 1
        if seen[ctx.is_recompute, op] in saves.get(str(op), ()):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
'''
