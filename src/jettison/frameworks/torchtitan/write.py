"""torchtitan 0.3: a subclass of its `SelectiveAC` with the plan's policy for each layer.

A live plan of a torchtitan model names calls of ops, which can all be expressed. A described plan's ops are those of a
formula: the file names those that torchtitan has modules for, attention, and results of reduce-scatters.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Final

from jettison.core.errors import DoesNotFit
from jettison.frameworks.export import (
    Alternative,
    TargetOutput,
    filled,
    header,
    moves_table,
    names,
    pieces,
    selective_tables,
)
from jettison.frameworks.layer_policies import (
    Decision,
    LayerAction,
    LayerPolicy,
    OpCall,
    Subject,
    as_the_plan_moves,
    by_ops_and_host,
    checkpointed,
    draws_again,
    kept_whole,
    op_calls,
    saving,
)
from jettison.frameworks.nearest_policy import CannotSay, Nearest, Policies, Priced
from jettison.frameworks.torch.write import notes_of, priced_code
from jettison.ledger.program import Op
from jettison.solve.checkpoint_policy import SelectiveOp

ATTENTION: Final = "attention"
"""Name of any attention kernel that a model was built with."""
USE: Final = """    Trainer.Config(activation_checkpoint=PlannedAC.Config(), ...)

torchtitan applies it to a model's layers, layers.0 and so on, before FSDP and not to a compiled model."""
_LINEAR: Final = ("aten.mm.default", "aten.addmm.default")
_PRODUCTS: Final = {
    **dict.fromkeys(("attention.query", "attention.key", "attention.value", "attention.qkv"), "qkv"),
    "attention.query_down": "query down",
    "attention.key_value_down": "key value down",
    "attention.key_value": "key value",
    "attention.out": "out",
    "mlp.gate": "gate",
    "mlp.up": "up",
    "mlp.down": "down",
}


def write(nearest: Nearest) -> TargetOutput:
    """Write a file with a policy for torchtitan's configuration; torchtitan's own policies are the alternatives."""
    subject = nearest.subject
    _refuse(nearest)
    same_calls = partial(priced_code, subject)  # without torchtitan
    nearest = nearest.saying("which calls of ops stay, and which layers are checkpoints", same_calls)
    policies, cost = _chosen(nearest)
    stock = {"FullAC.Config()": checkpointed, "SelectiveAC.Config()": _stock}
    others = {words: tuple(map(policy, subject.decisions)) for words, policy in stock.items()}
    return TargetOutput(
        files={"planned_ac.py": code(subject, policies)},
        policies=policies,
        cost=cost,
        notes=notes_of(policies),
        alternatives=tuple(Alternative(words=words, cost=nearest.priced(found)[1]) for words, found in others.items()),
    )


def _refuse(nearest: Nearest) -> None:
    subject = nearest.subject
    nearest.refuse_stacks()
    nearest.refuse_images()
    if subject.described is not None and subject.described.forecast.run.recompute.whole:
        raise CannotSay(
            "the plan runs some micro-batches without checkpointing, and torchtitan has one policy for all; plan "
            "without --micro-batches-without-recompute"
        )
    for decision in subject.decisions if subject.live else ():
        if not re.fullmatch(r"layers\.\w+", decision.layer):
            raise CannotSay(
                f"torchtitan checkpoints a model's layers, and the plan names {decision.layer}; expected layers.0 and "
                "so on. Export --to torch"
            )


def _chosen(nearest: Nearest) -> Priced:
    decisions = nearest.subject.decisions
    if nearest.subject.whole_layers:
        return nearest.checkpoints()
    if nearest.subject.live:
        wished = tuple(map(by_ops_and_host, decisions))
        return nearest.between(wished, as_it_stands=True, checkpoint=as_the_plan_moves)
    layers = nearest.with_host(Nearest.checkpoints)
    try:
        found = nearest.between(tuple(map(_by_gemms, decisions)), as_it_stands=False)
    except DoesNotFit:  # only offloaded inputs may fit
        return layers
    return min(found, layers, key=lambda priced: priced[1].step_seconds or 0.0)


def _by_gemms(decision: Decision) -> LayerPolicy:
    """Return the policy of a formula's layer by linear layer; those of query, key and value go together, since
    torchtitan may fuse them. A layer of experts is checkpointed entirely.
    """
    if decision.plain:
        return kept_whole(decision)
    program = decision.program
    if any(op.path.startswith("mlp.router") for op in program.ops):
        return checkpointed(decision)
    gemms: dict[str, list[Op]] = {}
    for op in program.ops:
        if (name := gemm_of(op)) is not None:
            gemms.setdefault(name, []).append(op)

    def mostly_kept(ops: Sequence[Op]) -> bool:
        outputs = frozenset(b for op in ops for b in op.outputs)
        return 2 * program.kept_bytes(outputs & decision.kept) >= program.kept_bytes(outputs)

    return saving(decision, (op.index for ops in gemms.values() if mostly_kept(ops) for op in ops))


def gemm_of(op: Op) -> str | None:
    """Return the file's name of a formula's op; None if torchtitan's code may have another op."""
    if op.name.startswith("aten._scaled_dot_product"):
        return ATTENTION
    if "reduce_scatter" in op.name:
        return f"{op.path} summed"
    return _PRODUCTS.get(op.path) if op.name in _LINEAR else None


def _stock(decision: Decision) -> LayerPolicy:
    """Return the policy of torchtitan's `SelectiveAC`: keep all ops that it names, except for every second matmul."""
    named = SelectiveOp(alternate=True).named(decision.program)
    return saving(decision, (op.index for op in decision.program.ops if named.intersection(op.outputs)))


def code(subject: Subject, policies: Policies) -> str:
    """Write the file."""
    own, host = pieces("torchtitan/planned_ac.py.txt"), pieces("offload.py.txt")
    saves: dict[object, Sequence[OpCall]] = {
        p.layer: _translated(p, live=subject.live) for p in policies if p.action is LayerAction.SELECT
    }
    moves = moves_table({policy.layer: policy for policy in policies})
    text = header(subject, "torchtitan", USE) + own["imports"] + (host["imports"] if moves else "")
    text += f"FULL = {names(policy.layer for policy in policies if policy.action is LayerAction.CHECKPOINT)}\n"
    text += selective_tables(saves) + (moves or "ON_HOST = {}\n")
    states, waiting = any(map(draws_again, policies)), own["waiting"] if moves else ""
    text += filled(own["planned"], states=states, depth=len(policies), waiting=waiting)
    return text + own["by_calls" if subject.live else "by_gemms"] + (host["code"] if moves else "")


def _translated(policy: LayerPolicy, *, live: bool) -> tuple[OpCall, ...]:
    """Calls to save: a live plan's ops, or a formula's by the names of `gemm_of`."""
    if live:
        return policy.saves
    chosen = set(policy.saves)
    calls = op_calls(policy.program)
    found = {gemm_of(op) for op, call in zip(policy.program.ops, calls, strict=True) if call in chosen}
    return tuple(OpCall(op=name, number=1) for name in sorted(filter(None, found)))
