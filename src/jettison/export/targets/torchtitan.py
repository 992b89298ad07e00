"""torchtitan 0.3: a subclass of its `SelectiveAC` that treats each layer as the plan does.

A live plan of a torchtitan model names calls of ops, and all of that can be said. A described plan's ops are those of a
formula: of these it says what torchtitan's layers compute in the same order, products with weights, attention and what
reduce-scatters return.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from jettison.export.described import DescribedPricer
from jettison.export.nearest import Priced, fewest_checkpoints, least
from jettison.export.policy import Action, LayerPolicy, OpCall, by_ops, checkpointed, kept_whole
from jettison.export.python_text import header, names, saves_table
from jettison.export.result import Alternative, CannotSay, Exported, Pricer, losses
from jettison.export.subject import Decision, Subject
from jettison.export.targets import plain_torch
from jettison.spec.run import Mode, Recompute

TARGET: Final = "torchtitan"
ATTENTION: Final = "attention"
"""Stands for whichever kernel of attention a model was built with."""
COULD: Final = "which calls of ops stay, and which layers are checkpoints"
USE: Final = """    Trainer.Config(activation_checkpoint=PlannedAC.Config(), ...)

torchtitan applies it to a model's layers, layers.0 and so on, before FSDP and not beside a compiled model."""
_SAYABLE: Final = {"aten.mm.default": "aten.mm.default", "aten.addmm.default": "aten.addmm.default"}
_SUMMED: Final = "_c10d_functional.reduce_scatter_tensor.default"


def export(subject: Subject, pricer: Pricer) -> Exported:
    """A file with a policy that torchtitan's configuration takes.

    Raises:
        CannotSay: the layers are not those of a torchtitan model, or the plan keeps micro-batches whole.
        Infeasible: with every layer a checkpoint the peak is above the plan's budget.
    """
    _refuse(subject)
    policies, cost = _chosen(subject, pricer)
    return Exported(
        target=TARGET,
        subject=subject,
        files={"planned_ac.py": code(subject, policies)},
        policies=policies,
        plan_cost=pricer.plan(),
        cost=cost,
        lost=losses(subject, policies, TARGET),
        notes=(plain_torch.DISPATCHED,) if any(p.action is Action.SELECT for p in policies) else (),
        alternatives=_alternatives(subject, pricer),
        checked_with="torchtitan 0.3.0",
    )


def _refuse(subject: Subject) -> None:
    if subject.described is not None:
        if subject.described.forecast.run.recompute.whole:
            raise CannotSay(
                "the plan keeps micro-batches whole, and torchtitan treats all alike; plan without --whole-micro-batches"
            )
        return
    for decision in subject.decisions:
        if not re.fullmatch(r"layers\.\w+", decision.layer):
            raise CannotSay(
                f"torchtitan checkpoints what is in a model's layers, and the plan names {decision.layer}; expected "
                "layers.0 and so on. Export --to torch"
            )


def _chosen(subject: Subject, pricer: Pricer) -> Priced:
    def write(policies: Sequence[LayerPolicy]) -> str:
        return plain_torch.code(subject, policies)  # the same calls, without torchtitan

    if all(decision.plain or decision.whole for decision in subject.decisions):
        return fewest_checkpoints(subject, pricer, write, target=TARGET, could=COULD)
    wished = tuple(by_ops(d) if subject.live else _in_its_order(d) for d in subject.decisions)
    changed = [i for i, policy in enumerate(wished) if policy.action is not Action.CHECKPOINT]

    def made(count: int) -> tuple[LayerPolicy, ...]:
        more = set(changed[:count])
        return tuple(checkpointed(p.decision) if i in more else p for i, p in enumerate(wished))

    return least(made, len(changed), subject, pricer, write, target=TARGET, could=COULD)


def _in_its_order(decision: Decision) -> LayerPolicy:
    """What of a formula's decisions torchtitan's own layer can be told. An experts' layer is taken whole: it may run its
    products in another order.
    """
    if decision.plain:
        return kept_whole(decision)
    if any(op.path.startswith("mlp.router") for op in decision.program.ops):
        return checkpointed(decision)
    return by_ops(decision, lambda name: _spoken(name) is not None)


def _spoken(name: str) -> str | None:
    """A formula's op as torchtitan's code has it; None where it may have another."""
    if name.startswith("aten._scaled_dot_product"):
        return ATTENTION
    if "reduce_scatter" in name:
        return _SUMMED
    return _SAYABLE.get(name)


def _alternatives(subject: Subject, pricer: Pricer) -> tuple[Alternative, ...]:
    """torchtitan's own policies."""
    full = tuple(map(checkpointed, subject.decisions))
    found = [Alternative(words="FullAC.Config()", cost=pricer.cost(full, plain_torch.code(subject, full)))]
    if isinstance(pricer, DescribedPricer):
        selective = pricer.cost_of_mode(Recompute(mode=Mode.SELECTIVE_OP_ALTERNATE), full)
        found.append(Alternative(words="SelectiveAC.Config()", cost=selective))
    return tuple(found)


def code(subject: Subject, policies: Sequence[LayerPolicy]) -> str:
    """The file."""
    kinds: dict[tuple[OpCall, ...], str] = {}
    for policy in policies:
        if policy.action is Action.SELECT:
            kinds.setdefault(_translated(subject, policy.saves), f"kind {len(kinds) + 1}")
    full = [policy.layer for policy in policies if policy.action is Action.CHECKPOINT]
    rows = "".join(
        f"    {policy.layer!r}: {kinds[_translated(subject, policy.saves)]!r},\n"
        for policy in policies
        if policy.action is Action.SELECT
    )
    states = any(policy.decision.random for policy in policies)
    text = header(subject, "torchtitan", USE) + _IMPORTS
    text += f"FULL = {names(full)}\nSELECTIVE = {{\n{rows}}}\n" if rows else f"FULL = {names(full)}\nSELECTIVE = {{}}\n"
    text += "# by kind of layer and op: whose outputs stay, as numbers of its calls in the layer's forward\n"
    text += f"SAVES = {saves_table({kind: saves for saves, kind in kinds.items()})}\n"
    return text + _CLASS.format(states=states, depth=len(policies))


def _translated(subject: Subject, saves: tuple[OpCall, ...]) -> tuple[OpCall, ...]:
    """A live plan's ops are torchtitan's own."""
    if subject.live:
        return saves
    return tuple(OpCall(op=_spoken(call.op) or call.op, number=call.number) for call in saves)


_IMPORTS = """
from collections import Counter
from dataclasses import dataclass

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torchtitan.distributed.activation_checkpoint import SelectiveAC

"""
_CLASS = '''KERNELS = ("scaled_dot_product", "flex_attention", "varlen_attn")  # any of them is "attention" above
LAYERS = {depth}


class PlannedAC(SelectiveAC):
    """Each layer as planned: left alone, a checkpoint, or a checkpoint that saves outputs of some calls."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        preserve_rng_state: bool = {states}

    def apply(self, model: nn.Module) -> None:
        found = {{f"layers.{{name}}" for name, _ in model.get_submodule("layers").named_children()}}
        missing = sorted({{*FULL, *SELECTIVE}} - found)
        if missing or len(found) > LAYERS:
            raise ValueError(f"planned for {{LAYERS}} layers, not in this model: {{missing}}; it has {{len(found)}}")
        super().apply(model)

    def _wrap_block(self, module: nn.Module, *, base_fqn: str | None = None) -> nn.Module:
        how = {{"preserve_rng_state": self.config.preserve_rng_state, "determinism_check": self.config.determinism_check}}
        if base_fqn in FULL:
            return checkpoint_wrapper(module, **how)
        if base_fqn in SELECTIVE:
            saves = SAVES[SELECTIVE[base_fqn]]
            return checkpoint_wrapper(module, context_fn=lambda: _contexts(saves), **how)
        return module


def _contexts(saves):
    """Fresh contexts for one forward: calls of ops are counted, in the forward and again when it is run again."""
    seen = Counter()

    def policy(ctx, op, *args, **kwargs):
        name = "attention" if any(kernel in str(op) for kernel in KERNELS) and "attention" in saves else str(op)
        seen[ctx.is_recompute, name] += 1
        if seen[ctx.is_recompute, name] in saves.get(name, ()):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
'''
