"""Accelerate: a configuration file for ``accelerate launch --config_file``, with one switch for all layers."""

from __future__ import annotations

from jettison.core.units import format_bytes
from jettison.frameworks.export import TargetOutput, filled, pieces, strategy_notes
from jettison.frameworks.layer_policies import LayerAction, draws_again
from jettison.frameworks.nearest_policy import CannotSay, Nearest
from jettison.frameworks.torch.write import one_switch


def write(nearest: Nearest) -> TargetOutput:
    """Write the file. It wraps layers by their class, and does not restore random generator states."""
    subject = nearest.subject
    nearest.refuse_described()
    classes = list(dict.fromkeys(d.module.partition(":")[2].rpartition(".")[2] for d in subject.decisions))
    if not classes:
        raise CannotSay(f"{nearest.target} wraps layers by their class, and {subject.model} has no repeated layers")
    policies, cost = one_switch(nearest, states=False).with_host(Nearest.all_or_none)
    if any(map(draws_again, policies)):
        raise CannotSay(
            "accelerate's checkpoints under FSDP2 do not restore random generator states (preserve_rng_state=False), "
            "and the layers of this model draw random numbers: gradients would be silently wrong. Export --to torch, "
            "or train without dropout"
        )
    text = filled(
        pieces("accelerate/accelerate.yaml.txt")["settings"],
        budget=format_bytes(subject.budget_bytes),
        classes=",".join(classes),
        on=str(policies[0].action is LayerAction.CHECKPOINT).lower(),
        on_host=str(any(policy.offloaded for policy in policies)).lower(),
        mixed="bf16" if subject.asked.get("precision") == "bf16" else "'no'",
    )
    files, notes = {"accelerate.yaml": text}, strategy_notes(subject, policies)
    return TargetOutput(files=files, policies=policies, cost=cost, notes=notes)
