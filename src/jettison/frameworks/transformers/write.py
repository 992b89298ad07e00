"""Hugging Face transformers: the exact mask of layers, and the nearest arguments of its Trainer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from jettison.core.errors import DoesNotFit
from jettison.frameworks.export import Alternative, TargetOutput, filled, header, names, pieces
from jettison.frameworks.layer_policies import LayerAction, LayerPolicy, Subject, checkpointed, draws_again, kept_whole
from jettison.frameworks.nearest_policy import CannotSay, Nearest, Policies, Priced
from jettison.frameworks.torch.write import priced_code

LAYER = "transformers.modeling_layers:GradientCheckpointingLayer"
USE = """\
Call apply(model) after the model was built, and leave activation_checkpointing (and gradient_checkpointing, which TRL's
configurations switch on) at False: the Trainer would put every layer's switch where its own arguments say."""
USE_ARGUMENTS = """\
Trainer(args=TrainingArguments(**TRAINING_ARGUMENTS, ...)) does all of it; apply(model) does so without a Trainer."""


def write(nearest: Nearest) -> TargetOutput:
    """Write the mask of layers nearest to the plan."""
    subject = nearest.subject
    for decision in subject.decisions if subject.live else ():
        if LAYER not in decision.bases:
            raise CannotSay(
                f"transformers switches checkpoints on in its own layers, and {decision.layer} is a "
                f"{decision.module.partition(':')[2]}, which is no GradientCheckpointingLayer; export --to torch"
            )
    nearest.refuse_stacks(in_order=True)
    nearest = nearest.saying("only which layers are checkpoints", partial(_priced_code, subject))
    policies, cost = nearest.with_host(Nearest.checkpoints)
    step = step_of(policies)
    alternatives, notes = [], []
    if step is not None:
        notes.append(f"the mask is every_n_layers={step}: TRAINING_ARGUMENTS is enough")
    elif any(policy.action is LayerAction.CHECKPOINT for policy in policies):
        try:
            found, spaced_cost = _spaced(nearest.saying("every_n_layers", partial(code, subject)))
            words = f"TrainingArguments alone: every_n_layers={step_of(found)}"
            alternatives.append(Alternative(words=words, cost=spaced_cost))
        except DoesNotFit:
            notes.append("no every_n_layers fits the budget: TrainingArguments alone cannot express the plan")
    if offloads(policies):
        notes.append("offload and prefetch run on the compute stream: their time is counted in full")
    return TargetOutput(
        files={"checkpointing.py": code(subject, policies)},
        policies=policies,
        cost=cost,
        notes=tuple(notes),
        alternatives=tuple(alternatives),
    )


def step_of(policies: Sequence[LayerPolicy]) -> int | None:
    """Return the ``every_n_layers`` of this mask; None if there is none."""
    chosen = [i for i, policy in enumerate(policies) if policy.action is LayerAction.CHECKPOINT]
    steps = range(1, len(policies) + 1)
    return next((step for step in steps if chosen == list(range(0, len(policies), step))), None)


def _spaced(nearest: Nearest) -> Priced:
    """Return the policies of the largest ``every_n_layers`` that fits."""
    decisions = nearest.subject.decisions
    depth = len(decisions)
    steps = sorted({-(-depth // count): count for count in range(depth, 0, -1)}, reverse=True)

    def made(count: int) -> Policies:
        return tuple(checkpointed(d) if i % steps[count] == 0 else kept_whole(d) for i, d in enumerate(decisions))

    return nearest.least(made, len(steps) - 1)


def offloads(policies: Sequence[LayerPolicy]) -> bool:
    """Whether inputs of checkpoints are offloaded."""
    return any(policy.offloaded for policy in policies)


def _priced_code(subject: Subject, policies: Sequence[LayerPolicy]) -> str:
    """Write the file for a dry run. With offloading it is torch's: transformers' copies to CPU would count there."""
    return (priced_code if subject.live and offloads(policies) else code)(subject, policies)


def code(subject: Subject, policies: Sequence[LayerPolicy]) -> str:
    """Write the file."""
    own, step = pieces("transformers/checkpointing.py.txt"), step_of(policies)
    chosen = [p.layer if subject.live else i for i, p in enumerate(policies) if p.action is LayerAction.CHECKPOINT]
    text = header(subject, "Hugging Face transformers", USE if step is None else USE_ARGUMENTS) + own["imports"]
    text += f"CHECKPOINTED = {names(chosen)}\n"
    text += f'KWARGS = {{"use_reentrant": False, "preserve_rng_state": {any(map(draws_again, policies))}}}\n'
    if step is not None:
        text += filled(own["arguments"], step=step, more=', "offload": True' if offloads(policies) else "")
    body = own["apply"] if subject.live else filled(own["apply_by_number"], depth=len(policies))
    if offloads(policies):  # inputs of checkpoints
        body = body.replace("enable(dict(KWARGS))", "enable(dict(KWARGS), offload=True)")
    return text + body
