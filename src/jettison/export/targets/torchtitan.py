"""torchtitan 0.3: a subclass of its `SelectiveAC` that treats each layer as the plan does.

A live plan of a torchtitan model names calls of ops, and all of that can be said. A described plan's ops are those of a
formula: of these it says what torchtitan's layers have modules for, products with weights, and attention and what
reduce-scatters return.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from jettison.errors import DoesNotFit
from jettison.export.host_text import CODE, IMPORTS, moves_table
from jettison.export.nearest import Checkpoint, Priced, between, fewest_checkpoints, with_host
from jettison.export.policy import (
    Action,
    LayerPolicy,
    OpCall,
    by_ops_and_host,
    checkpointed,
    draws_again,
    kept_whole,
    op_calls,
    saving,
)
from jettison.export.python_text import PAST_HOOKS, header, names, saves_table
from jettison.export.result import Alternative, CannotSay, Exported, Pricer, losses
from jettison.export.subject import Decision, Subject
from jettison.export.targets import plain_torch
from jettison.ledger.program import Op
from jettison.solve.policy import SelectiveOp

TARGET: Final = "torchtitan"
ATTENTION: Final = "attention"
"""Stands for whichever kernel of attention a model was built with."""
COULD: Final = "which calls of ops stay, and which layers are checkpoints"
USE: Final = """    Trainer.Config(activation_checkpoint=PlannedAC.Config(), ...)

torchtitan applies it to a model's layers, layers.0 and so on, before FSDP and not beside a compiled model."""
_LINEAR: Final = ("aten.mm.default", "aten.addmm.default")
_PRODUCTS: Final = {
    "attention.query": "qkv",
    "attention.key": "qkv",
    "attention.value": "qkv",
    "attention.qkv": "qkv",
    "attention.query_down": "query down",
    "attention.key_value_down": "key value down",
    "attention.key_value": "key value",
    "attention.out": "out",
    "mlp.gate": "gate",
    "mlp.up": "up",
    "mlp.down": "down",
}


def export(subject: Subject, pricer: Pricer) -> Exported:
    """A file with a policy that torchtitan's configuration takes.

    Raises:
        CannotSay: the layers are not those of a torchtitan model, or the plan keeps micro-batches whole.
        DoesNotFit: with every layer a checkpoint the peak is above the plan's budget.
    """
    _refuse(subject)
    policies, cost = _chosen(subject, pricer)
    selective = any(policy.action is Action.SELECT for policy in policies)
    return Exported(
        target=TARGET,
        subject=subject,
        files={"planned_ac.py": code(subject, policies)},
        policies=policies,
        plan_cost=pricer.plan(),
        cost=cost,
        lost=losses(subject, policies, TARGET),
        notes=(*((plain_torch.DISPATCHED,) if selective else ()), *plain_torch.copied(policies)),
        alternatives=_alternatives(subject, pricer),
        checked_with="torchtitan 0.3.0",
    )


def _refuse(subject: Subject) -> None:
    if subject.described is not None:
        plain_torch.refuse_stacks(subject, TARGET)
        plain_torch.refuse_images(subject, TARGET)
        if subject.described.forecast.run.recompute.whole:
            raise CannotSay(
                "the plan keeps micro-batches whole, and torchtitan treats all alike; plan without "
                "--whole-micro-batches"
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
        return plain_torch.priced_code(subject, policies)  # the same calls, without torchtitan

    def by_layer(ours: Pricer, checkpoint: Checkpoint) -> Priced:
        return fewest_checkpoints(subject, ours, write, target=TARGET, could=COULD, checkpoint=checkpoint)

    if all(decision.plain or decision.whole for decision in subject.decisions):
        return by_layer(pricer, checkpointed)
    if subject.live:
        wished = tuple(map(by_ops_and_host, subject.decisions))
        checkpoint = plain_torch.as_the_plan_moves
        return between(
            wished, subject, pricer, write, target=TARGET, could=COULD, as_it_stands=True, checkpoint=checkpoint
        )
    layers = with_host(subject, pricer, by_layer)
    products = tuple(map(_by_products, subject.decisions))
    try:
        found = between(products, subject, pricer, write, target=TARGET, could=COULD, as_it_stands=False)
    except DoesNotFit:  # nothing does but inputs that wait on the host
        return layers
    return min(found, layers, key=lambda priced: priced[1].step_seconds or 0.0)


def _by_products(decision: Decision) -> LayerPolicy:
    """What of a formula's decisions torchtitan's own layer can be told: by product, the three of query, key and value
    together, since it may compute them as one. An experts' layer is taken whole.
    """
    if decision.plain:
        return kept_whole(decision)
    program = decision.program
    if any(op.path.startswith("mlp.router") for op in program.ops):
        return checkpointed(decision)
    products: dict[str, list[Op]] = {}
    for op in program.ops:
        if (name := product_of(op)) is not None:
            products.setdefault(name, []).append(op)
    calls = op_calls(program)
    saves = [calls[op.index] for ops in products.values() if _mostly_kept(decision, ops) for op in ops]
    return saving(decision, saves)


def _mostly_kept(decision: Decision, ops: Sequence[Op]) -> bool:
    outputs = frozenset(b for op in ops for b in op.outputs)
    return 2 * decision.program.kept_bytes(outputs & decision.kept) >= decision.program.kept_bytes(outputs)


def product_of(op: Op) -> str | None:
    """Return the file's name of a formula's op; None where torchtitan's code may have another."""
    if op.name.startswith("aten._scaled_dot_product"):
        return ATTENTION
    if "reduce_scatter" in op.name:
        return f"{op.path} summed"
    return _PRODUCTS.get(op.path) if op.name in _LINEAR else None


def _alternatives(subject: Subject, pricer: Pricer) -> tuple[Alternative, ...]:
    """torchtitan's own policies."""
    full = tuple(map(checkpointed, subject.decisions))
    stock = tuple(map(_stock, subject.decisions))
    return tuple(
        Alternative(words=words, cost=pricer.cost(policies, plain_torch.code(subject, policies)))
        for words, policies in (("FullAC.Config()", full), ("SelectiveAC.Config()", stock))
    )


def _stock(decision: Decision) -> LayerPolicy:
    """As its `SelectiveAC` does: all that it names is held, asked for or not, but for every second product."""
    program = decision.program
    named = SelectiveOp(alternate=True).named(program)
    calls = zip(program.ops, op_calls(program), strict=True)
    return saving(decision, [call for op, call in calls if named.intersection(op.outputs)])


def code(subject: Subject, policies: Sequence[LayerPolicy]) -> str:
    """The file."""
    kinds: dict[tuple[OpCall, ...], str] = {}
    for policy in policies:
        if policy.action is Action.SELECT:
            kinds.setdefault(_translated(policy, live=subject.live), f"kind {len(kinds) + 1}")
    full = [policy.layer for policy in policies if policy.action is Action.CHECKPOINT]
    rows = "".join(
        f"    {policy.layer!r}: {kinds[_translated(policy, live=subject.live)]!r},\n"
        for policy in policies
        if policy.action is Action.SELECT
    )
    states = any(map(draws_again, policies))
    moves = moves_table([(policy.layer, policy) for policy in policies])
    text = header(subject, "torchtitan", USE) + _IMPORTS + (IMPORTS if moves else "")
    text += f"FULL = {names(full)}\nSELECTIVE = {{\n{rows}}}\n" if rows else f"FULL = {names(full)}\nSELECTIVE = {{}}\n"
    text += "# by kind of layer and op: whose outputs stay, as numbers of its calls in the layer's forward\n"
    text += f"SAVES = {saves_table({kind: saves for saves, kind in kinds.items()})}\n" + PAST_HOOKS
    text += moves or "ON_HOST = {}\n"
    text += _CLASS.format(states=states, depth=len(policies), waiting=_WAITING if moves else "")
    return text + (_BY_CALLS if subject.live else _BY_PRODUCTS) + (CODE if moves else "")


def _translated(policy: LayerPolicy, *, live: bool) -> tuple[OpCall, ...]:
    """A live plan's ops are torchtitan's own; a formula's go by their products' names."""
    if live:
        return policy.saves
    chosen = set(policy.saves)
    calls = op_calls(policy.program)
    found = {product_of(op) for op, call in zip(policy.program.ops, calls, strict=True) if call in chosen}
    return tuple(OpCall(op=name, number=1) for name in sorted(filter(None, found)))


_IMPORTS = """
from collections import Counter
from dataclasses import dataclass
from inspect import signature

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torchtitan.distributed.activation_checkpoint import SelectiveAC

"""
_CLASS = '''LAYERS = {depth}


class PlannedAC(SelectiveAC):
    """Each layer as planned: left alone, a checkpoint, or a checkpoint that saves outputs of some calls."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        preserve_rng_state: bool = {states}

    def apply(self, model: nn.Module) -> None:
        found = {{f"layers.{{name}}" for name, _ in model.get_submodule("layers").named_children()}}
        missing = sorted({{*FULL, *SELECTIVE, *ON_HOST}} - found)
        if missing or len(found) > LAYERS:
            raise ValueError(f"planned for {{LAYERS}} layers, not in this model: {{missing}}; it has {{len(found)}}")
        super().apply(model)

    def _wrap_block(self, module: nn.Module, *, base_fqn: str | None = None) -> nn.Module:
        wrapped = self._wrap_planned(module, base_fqn)
{waiting}        return wrapped

    def _wrap_planned(self, module: nn.Module, base_fqn: str | None) -> nn.Module:
        config = self.config
        how = {{"preserve_rng_state": config.preserve_rng_state, "determinism_check": config.determinism_check}}
        if base_fqn in FULL:
            return checkpoint_wrapper(module, **how)
        if base_fqn in SELECTIVE:
            how |= {{"context_fn": _contexts(module, SAVES[SELECTIVE[base_fqn]]), **PAST_HOOKS}}
            return checkpoint_wrapper(module, **how)
        return module
'''
_WAITING = """        if base_fqn in ON_HOST:
            return _Waiting(wrapped, ON_HOST[base_fqn])
"""
_BY_CALLS = '''

def _contexts(module, saves):
    """Makes fresh contexts for each forward: calls of ops are counted, then and when it is run again."""

    def made():
        seen = Counter()

        def policy(ctx, op, *args, **kwargs):
            seen[ctx.is_recompute, op] += 1
            if seen[ctx.is_recompute, op] in saves.get(str(op), ()):
                return CheckpointPolicy.MUST_SAVE
            return CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    return made
'''
_BY_PRODUCTS = '''

LINEAR = ("aten.mm.default", "aten.addmm.default", "aten.linear.default")
KERNELS = ("scaled_dot_product", "flex_attention", "varlen_attn")  # of attention, any of them
PRODUCTS = {  # torchtitan's names of modules
    "wq": "qkv", "wk": "qkv", "wv": "qkv", "wqkv": "qkv", "wq_b": "qkv", "wo": "out",
    "wq_a": "query down", "wkv_a": "key value down", "wkv_b": "key value",
    "w1": "gate", "w3": "up", "w2": "down",
}  # fmt: skip


def _contexts(module, saves):
    """Makes contexts that know which of the layer's products runs."""
    running = [""]
    for name, child in module.named_modules():
        product = PRODUCTS.get(name.rpartition(".")[2])
        if product is not None:
            child.register_forward_pre_hook(lambda _module, _args, product=product: running.__setitem__(0, product))

    def made():
        seen = Counter()

        def policy(ctx, op, *args, **kwargs):
            name = str(op)
            if name in LINEAR:
                wanted = running[0] in saves
            elif "reduce_scatter" in name:  # the first follows attention
                seen[ctx.is_recompute] += 1
                wanted = ("attention summed" if seen[ctx.is_recompute] == 1 else "mlp summed") in saves
            else:
                wanted = "attention" in saves and any(kernel in name for kernel in KERNELS)
            return CheckpointPolicy.MUST_SAVE if wanted else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    return made
'''
