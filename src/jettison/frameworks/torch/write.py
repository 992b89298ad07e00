"""Plain torch: a file with ``apply(model)``, by `checkpoint_wrapper` and selective contexts.

It expresses a live plan's kept and recomputed tensors, except for NOTE [ What a checkpoint holds ] in
frameworks/layer_policies.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from jettison.frameworks.export import TargetOutput, header, moves_table, names, pieces, selective_tables
from jettison.frameworks.layer_policies import (
    LayerAction,
    LayerPolicy,
    Subject,
    as_the_plan_moves,
    by_ops_and_host,
    draws_again,
)
from jettison.frameworks.nearest_policy import Nearest

USE = """\
Import this file, and call apply(model) once after the model was built, before fully_shard, DistributedDataParallel and
torch.compile. It changes the model in place; names in its state_dict stay as they are."""


def write(nearest: Nearest) -> TargetOutput:
    """Write the nearest file to the plan. A described plan names no ops of a module."""
    subject = nearest.subject
    nearest.refuse_stacks()
    nearest = nearest.saying("which calls of ops stay, and which layers are checkpoints", partial(priced_code, subject))
    if subject.live:
        wished = tuple(map(by_ops_and_host, subject.decisions))
        policies, cost = nearest.between(wished, as_it_stands=True, checkpoint=as_the_plan_moves)
    else:
        policies, cost = nearest.saying("which layers are checkpoints").with_host(Nearest.checkpoints)
    files = {"checkpointing.py": code(subject, policies)}
    return TargetOutput(files=files, policies=policies, cost=cost, notes=notes_of(policies))


def notes_of(policies: Sequence[LayerPolicy]) -> tuple[str, ...]:
    """Notes on selective contexts, and on the cost of offloading."""
    selective = any(policy.action is LayerAction.SELECT for policy in policies)
    dispatched = (
        "selective contexts put a dispatch mode around every op of a layer; its host time is not in these seconds"
    )
    return (*((dispatched,) if selective else ()), *copied(policies))


def copied(policies: Sequence[LayerPolicy]) -> tuple[str, ...]:
    """Note on the cost of offloading."""
    if not any(policy.offloaded for policy in policies):
        return ()
    return ("offload and prefetch do not overlap with compute; their time is not in a live plan's seconds",)


def priced_code(subject: Subject, policies: Sequence[LayerPolicy], *, states: bool | None = None) -> str:
    """Write the file for a dry run, in which offloaded tensors have no bytes."""
    text = code(subject, policies, states=states)
    return text + (pieces("offload.py.txt")["stand_in"] if any(policy.offloaded for policy in policies) else "")


def one_switch(nearest: Nearest, *, states: bool) -> Nearest:
    """Return a chooser for targets with one switch for all layers."""
    could = "one switch for all layers: every one a checkpoint, or none"
    return nearest.saying(could, partial(priced_code, nearest.subject, states=states))


def code(subject: Subject, policies: Sequence[LayerPolicy], *, states: bool | None = None) -> str:
    """Write the file.

    Args:
        states: restore random generator states; None: if a layer draws random numbers.
    """
    own, host = pieces("torch/checkpointing.py.txt"), pieces("offload.py.txt")
    by_name: dict[object, LayerPolicy] = {p.layer if subject.live else i: p for i, p in enumerate(policies)}
    selective = {name: policy.saves for name, policy in by_name.items() if policy.action is LayerAction.SELECT}
    moves = moves_table(by_name)
    text = header(subject, "plain torch", USE) + own["imports_selective" if selective else "imports"]
    text += host["imports"] if moves else ""
    text += f"\nFULL = {names(name for name, policy in by_name.items() if policy.action is LayerAction.CHECKPOINT)}\n"
    text += selective_tables(selective) if selective else ""
    keep_states = any(map(draws_again, policies)) if states is None else states
    text += f"PRESERVE_RNG_STATE = {keep_states}  # does recomputation draw random numbers?\n"
    body = own["apply"]
    wrapping = (own["apply_selective"] if selective else "") + (host["wrap"] if moves else "")
    if not subject.live:
        text += f"LAYERS = {len(policies)}\n"
        body, wrapping = own["apply_by_number"], own["host_by_number"] if moves else ""
    text += moves + body.replace("    return model\n", f"{wrapping}    return model\n", 1)
    return text + (own["contexts"] if selective else "") + (host["code"] if moves else "")
