"""Hugging Face transformers: the exact mask of layers, and the nearest thing that arguments of its Trainer can say."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jettison.errors import DoesNotFit
from jettison.export.nearest import Checkpoint, Priced, fewest_checkpoints, least, with_host
from jettison.export.policy import Action, LayerPolicy, checkpointed, checkpointed_on_host, draws_again, kept_whole
from jettison.export.python_text import header, names
from jettison.export.result import Alternative, CannotSay, Exported, Pricer, losses
from jettison.export.subject import Subject
from jettison.export.targets import plain_torch

TARGET = "transformers"
LAYER = "transformers.modeling_layers:GradientCheckpointingLayer"
COULD = "only which layers are checkpoints"
USE = """\
Call apply(model) after the model was built, and leave activation_checkpointing (and gradient_checkpointing, which TRL's
configurations switch on) at False: the Trainer would put every layer's switch where its own arguments say."""
USE_ARGUMENTS = """\
Trainer(args=TrainingArguments(**TRAINING_ARGUMENTS, ...)) does all of it; apply(model) does so without a Trainer."""


def export(subject: Subject, pricer: Pricer) -> Exported:
    """The mask that is nearest to the plan.

    Raises:
        CannotSay: the layers are none of transformers', or a description's two towers, which it has in another order.
        DoesNotFit: with every layer a checkpoint the peak is above the plan's budget.
    """
    _refuse_others(subject)
    plain_torch.refuse_stacks(subject, TARGET, in_order=True)

    def write(policies: Sequence[LayerPolicy]) -> str:
        if subject.live and offloads(policies):  # its own copies hold a CPU's bytes, on fake tensors as well
            return plain_torch.priced_code(subject, policies)
        return code(subject, policies)

    def choose(ours: Pricer, checkpoint: Checkpoint) -> Priced:
        return fewest_checkpoints(subject, ours, write, target=TARGET, could=COULD, checkpoint=checkpoint)

    policies, cost = _with_host(subject, pricer, choose)
    step = step_of(policies)
    spaced = None if step is not None or not _checkpoints(policies) else _spaced(subject, pricer)
    alternatives, notes = [], []
    if step is not None:
        notes.append(f"the mask is every_n_layers={step}: TRAINING_ARGUMENTS says all of it")
    elif spaced is not None:
        best = step_of(spaced[0])
        alternatives.append(Alternative(words=f"TrainingArguments alone: every_n_layers={best}", cost=spaced[1]))
    elif _checkpoints(policies):
        notes.append("no every_n_layers fits the budget: TrainingArguments alone cannot say it")
    if offloads(policies):
        notes.append("copies to and from the host run on the stream that computes: their time is counted in full")
    return Exported(
        target=TARGET,
        subject=subject,
        files={"checkpointing.py": code(subject, policies)},
        policies=policies,
        plan_cost=pricer.plan(),
        cost=cost,
        lost=losses(subject, policies, TARGET),
        notes=tuple(notes),
        alternatives=tuple(alternatives),
        checked_with="transformers 5.23",
    )


def _with_host(subject: Subject, pricer: Pricer, choose: Callable[[Pricer, Checkpoint], Priced]) -> Priced:
    """Of a live plan that moves something what checkpoints are given waits on the host where nothing else fits."""
    if not subject.live or not any(decision.moved for decision in subject.decisions):
        return with_host(subject, pricer, choose)
    try:
        return choose(pricer, checkpointed)
    except DoesNotFit:
        return choose(pricer, checkpointed_on_host)


def _refuse_others(subject: Subject) -> None:
    if not subject.live:
        return
    for decision in subject.decisions:
        if LAYER not in decision.bases:
            raise CannotSay(
                f"transformers switches checkpoints on in its own layers, and {decision.layer} is a "
                f"{decision.module.partition(':')[2]}, which is no GradientCheckpointingLayer; export --to torch"
            )


def _checkpoints(policies: Sequence[LayerPolicy]) -> int:
    return sum(policy.action is Action.CHECKPOINT for policy in policies)


def step_of(policies: Sequence[LayerPolicy]) -> int | None:
    """The ``every_n_layers`` that is this mask, if one is."""
    chosen = [i for i, policy in enumerate(policies) if policy.action is Action.CHECKPOINT]
    for step in range(1, len(policies) + 1):
        if chosen == list(range(0, len(policies), step)):
            return step
    return None


def _spaced(subject: Subject, pricer: Pricer) -> Priced | None:
    """The largest ``every_n_layers`` that fits; None where none does."""
    depth = len(subject.decisions)
    steps = sorted({-(-depth // count): count for count in range(depth, 0, -1)}, reverse=True)

    def made(count: int) -> tuple[LayerPolicy, ...]:
        step = steps[count]
        return tuple(checkpointed(d) if i % step == 0 else kept_whole(d) for i, d in enumerate(subject.decisions))

    def text(policies: Sequence[LayerPolicy]) -> str:
        return code(subject, policies)

    try:
        return least(made, len(steps) - 1, subject, pricer, text, target=TARGET, could="every_n_layers")
    except DoesNotFit:
        return None


def offloads(policies: Sequence[LayerPolicy]) -> bool:
    """Whether inputs of checkpoints are offloaded."""
    return any(policy.moved for policy in policies)


def code(subject: Subject, policies: Sequence[LayerPolicy]) -> str:
    """The file."""
    step = step_of(policies)
    states = any(map(draws_again, policies))
    chosen = [
        policy.layer if subject.live else i for i, policy in enumerate(policies) if policy.action is Action.CHECKPOINT
    ]
    text = header(subject, "Hugging Face transformers", USE if step is None else USE_ARGUMENTS)
    text += _IMPORTS
    text += f"CHECKPOINTED = {names(chosen)}\n"
    text += f'KWARGS = {{"use_reentrant": False, "preserve_rng_state": {states}}}\n'
    if step is not None:
        text += _ARGUMENTS.format(step=step, more=', "offload": True' if offloads(policies) else "")
    body = _APPLY if subject.live else _APPLY_BY_NUMBER.format(depth=len(policies))
    if offloads(policies):  # what checkpoints are given waits on the host
        body = body.replace("enable(dict(KWARGS))", "enable(dict(KWARGS), offload=True)")
    return text + body


_IMPORTS = """
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

"""
_ARGUMENTS = """TRAINING_ARGUMENTS = {{
    "activation_checkpointing": True,
    "activation_checkpointing_kwargs": {{**KWARGS, "every_n_layers": {step}{more}}},
}}
"""
_APPLY = '''

def apply(model: nn.Module) -> nn.Module:
    """Switch checkpoints on in these layers and off in all others, in place."""
    layers = {name: m for name, m in model.named_modules() if isinstance(m, GradientCheckpointingLayer)}
    unknown = sorted(set(CHECKPOINTED) - set(layers))
    if unknown:
        raise ValueError(f"the model has no layer {unknown[0]}; it has {', '.join(list(layers)[:8])}")
    model.activation_checkpointing_enable(dict(KWARGS))
    for name, layer in layers.items():
        layer.gradient_checkpointing = name in CHECKPOINTED
    return model
'''
_APPLY_BY_NUMBER = '''

def apply(model: nn.Module) -> nn.Module:
    """Switch checkpoints on in these layers, by number, and off in all others, in place."""
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if len(layers) != {depth}:
        raise ValueError(f"expected {depth} layers; the model has {{len(layers)}}")
    model.activation_checkpointing_enable(dict(KWARGS))
    for number, layer in enumerate(layers):
        layer.gradient_checkpointing = number in CHECKPOINTED
    return model
'''
