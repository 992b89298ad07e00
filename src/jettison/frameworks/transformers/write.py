"""Hugging Face transformers: the exact mask of layers, and the nearest thing that arguments of its Trainer can say."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from jettison.core.errors import DoesNotFit
from jettison.frameworks.export import Alternative, Written
from jettison.frameworks.nearest import CannotSay, Nearest, Policies, Priced
from jettison.frameworks.policy import LayerAction, LayerPolicy, Subject, checkpointed, draws_again, kept_whole
from jettison.frameworks.text import filled, header, names, pieces
from jettison.frameworks.torch.write import priced_code

LAYER = "transformers.modeling_layers:GradientCheckpointingLayer"
USE = """\
Call apply(model) after the model was built, and leave activation_checkpointing (and gradient_checkpointing, which TRL's
configurations switch on) at False: the Trainer would put every layer's switch where its own arguments say."""
USE_ARGUMENTS = """\
Trainer(args=TrainingArguments(**TRAINING_ARGUMENTS, ...)) does all of it; apply(model) does so without a Trainer."""


def write(nearest: Nearest) -> Written:
    """The mask that is nearest to the plan. A description has two towers in another order than transformers."""
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
        notes.append(f"the mask is every_n_layers={step}: TRAINING_ARGUMENTS says all of it")
    elif any(policy.action is LayerAction.CHECKPOINT for policy in policies):
        try:
            found, spaced_cost = _spaced(nearest.saying("every_n_layers", partial(code, subject)))
            words = f"TrainingArguments alone: every_n_layers={step_of(found)}"
            alternatives.append(Alternative(words=words, cost=spaced_cost))
        except DoesNotFit:
            notes.append("no every_n_layers fits the budget: TrainingArguments alone cannot say it")
    if offloads(policies):
        notes.append("copies to and from the host run on the stream that computes: their time is counted in full")
    return Written(
        files={"checkpointing.py": code(subject, policies)},
        policies=policies,
        cost=cost,
        notes=tuple(notes),
        alternatives=tuple(alternatives),
    )


def step_of(policies: Sequence[LayerPolicy]) -> int | None:
    """The ``every_n_layers`` that is this mask, if one is."""
    chosen = [i for i, policy in enumerate(policies) if policy.action is LayerAction.CHECKPOINT]
    steps = range(1, len(policies) + 1)
    return next((step for step in steps if chosen == list(range(0, len(policies), step))), None)


def _spaced(nearest: Nearest) -> Priced:
    """The largest ``every_n_layers`` that fits."""
    decisions = nearest.subject.decisions
    depth = len(decisions)
    steps = sorted({-(-depth // count): count for count in range(depth, 0, -1)}, reverse=True)

    def made(count: int) -> Policies:
        return tuple(checkpointed(d) if i % steps[count] == 0 else kept_whole(d) for i, d in enumerate(decisions))

    return nearest.least(made, len(steps) - 1)


def offloads(policies: Sequence[LayerPolicy]) -> bool:
    """Whether inputs of checkpoints are offloaded."""
    return any(policy.moved for policy in policies)


def _priced_code(subject: Subject, policies: Sequence[LayerPolicy]) -> str:
    """Its own copies to the host hold a CPU's bytes, on fake tensors as well: torch's file stands in for them."""
    return (priced_code if subject.live and offloads(policies) else code)(subject, policies)


def code(subject: Subject, policies: Sequence[LayerPolicy]) -> str:
    """The file."""
    own, step = pieces("transformers/checkpointing.py.txt"), step_of(policies)
    chosen = [p.layer if subject.live else i for i, p in enumerate(policies) if p.action is LayerAction.CHECKPOINT]
    text = header(subject, "Hugging Face transformers", USE if step is None else USE_ARGUMENTS) + own["imports"]
    text += f"CHECKPOINTED = {names(chosen)}\n"
    text += f'KWARGS = {{"use_reentrant": False, "preserve_rng_state": {any(map(draws_again, policies))}}}\n'
    if step is not None:
        text += filled(own["arguments"], step=step, more=', "offload": True' if offloads(policies) else "")
    body = own["apply"] if subject.live else filled(own["apply_by_number"], depth=len(policies))
    if offloads(policies):  # what checkpoints are given waits on the host
        body = body.replace("enable(dict(KWARGS))", "enable(dict(KWARGS), offload=True)")
    return text + body
