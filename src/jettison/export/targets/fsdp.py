"""Accelerate, DeepSpeed and Lightning: configuration of the strategy that wraps a model.

Accelerate's and DeepSpeed's files know one switch for all layers. Lightning's strategy takes a function, which can tell
layers apart.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from jettison.export.host_text import CODE, IMPORTS, WRAP, moves_table
from jettison.export.nearest import Checkpoint, fewest_checkpoints, with_host, with_moves
from jettison.export.policy import Action, LayerPolicy, checkpointed, checkpointed_on_host, draws_again, kept_whole
from jettison.export.python_text import header, names
from jettison.export.result import CannotSay, Cost, Exported, Pricer, losses, require_fit
from jettison.export.subject import Subject
from jettison.export.targets import plain_torch
from jettison.units import format_bytes

ACCELERATE, DEEPSPEED, LIGHTNING = "accelerate", "deepspeed", "lightning"
ALL = "one switch for all layers: every one a checkpoint, or none"
USE_LIGHTNING = """    model = mark(model)                    # before the Trainer sets the model up
    Trainer(strategy=strategy(), ...)      # strategy(**more) hands more on to FSDPStrategy"""


def export_accelerate(subject: Subject, pricer: Pricer) -> Exported:
    """A configuration file for ``accelerate launch --config_file``.

    Raises:
        CannotSay: the plan names no class of layers to wrap, or layers draw random numbers that are not put back.
        DoesNotFit: with every layer a checkpoint the peak is above the plan's budget.
    """
    classes = _classes(subject, ACCELERATE)
    policies, cost = _all_or_none(subject, pricer, ACCELERATE, states=False)
    on, on_host = policies[0].action is Action.CHECKPOINT, any(policy.moved for policy in policies)
    if any(map(draws_again, policies)):
        raise CannotSay(
            "accelerate's checkpoints under FSDP2 put no random states back (preserve_rng_state=False), and the layers "
            "of this model draw random numbers: gradients would be wrong without an error. Export --to torch, or "
            "train without dropout"
        )
    text = _accelerate_yaml(subject, classes, on=on, on_host=on_host)
    return _exported(ACCELERATE, subject, pricer, {"accelerate.yaml": text}, policies, cost, "accelerate 1.15")


def export_deepspeed(subject: Subject, pricer: Pricer) -> Exported:
    """A DeepSpeed configuration with its section ``activation_checkpointing``.

    Raises:
        DoesNotFit: with every layer a checkpoint the peak is above the plan's budget.
    """
    policies, cost = with_host(
        subject,
        pricer,
        lambda ours, checkpoint: _all_or_none(subject, ours, DEEPSPEED, states=True, checkpoint=checkpoint),
    )
    on = policies[0].action is Action.CHECKPOINT
    on_host = any(policy.moved for policy in policies)
    text = json.dumps(_deepspeed_settings(subject, len(policies), on=on, on_host=on_host), indent=2) + "\n"
    found = _exported(DEEPSPEED, subject, pricer, {"deepspeed.json": text}, policies, cost, "deepspeed 0.19.8")
    if not on:
        return found
    lost = (
        "the section takes effect where the model's own code calls deepspeed.checkpointing.checkpoint for each layer; "
        "the file cannot say which layers do (with transformers: activation_checkpointing=True in TrainingArguments)"
    )
    return replace(found, lost=(*found.lost, lost))


def export_lightning(subject: Subject, pricer: Pricer) -> Exported:
    """A file with ``mark(model)`` and ``strategy()``.

    Raises:
        CannotSay: the plan is of a described run, which names no modules.
        DoesNotFit: with every layer a checkpoint the peak is above the plan's budget.
    """
    plain_torch.refuse_described(subject, LIGHTNING)

    def write(policies: Sequence[LayerPolicy]) -> str:
        return plain_torch.priced_code(subject, policies, states=True)  # its wrapper's default

    if any(decision.moved for decision in subject.decisions):
        given = plain_torch.as_the_plan_moves
        could = "which layers are checkpoints, and what waits on the host of those that are none"
        policies, cost = with_moves(
            subject, pricer, write, target=LIGHTNING, could=could, checkpoint=given, partly=given
        )
    else:
        could = "only which layers are checkpoints"
        policies, cost = fewest_checkpoints(subject, pricer, write, target=LIGHTNING, could=could)
    text = _lightning_code(subject, policies)
    return _exported(LIGHTNING, subject, pricer, {"strategy.py": text}, policies, cost, "lightning 2.6.6")


def _lightning_code(subject: Subject, policies: Sequence[LayerPolicy]) -> str:
    chosen = [policy.layer for policy in policies if policy.action is Action.CHECKPOINT]
    moves = moves_table([(policy.layer, policy) for policy in policies])
    text = header(subject, "Lightning's FSDPStrategy", USE_LIGHTNING) + (IMPORTS if moves else "")
    marks = _LIGHTNING.format(chosen=names(chosen), moves=f"\n{moves}" if moves else "", wrap=WRAP if moves else "")
    return text + marks + (CODE if moves else "")


def _exported(
    target: str,
    subject: Subject,
    pricer: Pricer,
    files: dict[str, str],
    policies: tuple[LayerPolicy, ...],
    cost: Cost,
    checked_with: str,
) -> Exported:
    return Exported(
        target=target,
        subject=subject,
        files=files,
        policies=policies,
        plan_cost=pricer.plan(),
        cost=cost,
        lost=losses(subject, policies, target),
        notes=(*_sharding(subject), *_copies(subject, policies)),
        checked_with=checked_with,
    )


def _sharding(subject: Subject) -> tuple[str, ...]:
    if not subject.live:
        return ()
    return ("the peak is of one rank that holds the whole model, as the plan's is; sharding it takes less",)


def _copies(subject: Subject, policies: Sequence[LayerPolicy]) -> tuple[str, ...]:
    if not subject.live or not any(policy.moved for policy in policies):
        return ()
    return ("copies to the host and back run while nothing is computed; their time is not in these seconds",)


def _all_or_none(
    subject: Subject, pricer: Pricer, target: str, *, states: bool, checkpoint: Checkpoint = checkpointed
) -> tuple[tuple[LayerPolicy, ...], Cost]:
    """Nothing where that fits; else everything."""
    plain = tuple(map(kept_whole, subject.decisions))
    cost = pricer.cost(plain, plain_torch.code(subject, plain, states=states))
    if cost.peak_bytes <= subject.budget_bytes:
        return plain, cost
    full = tuple(map(checkpoint, subject.decisions))
    cost = pricer.cost(full, plain_torch.code(subject, full, states=states))
    if cost.peak_bytes > subject.budget_bytes and subject.live and any(d.moved for d in subject.decisions):
        full = tuple(map(checkpointed_on_host, subject.decisions))
        cost = pricer.cost(full, plain_torch.priced_code(subject, full, states=states))
    return full, require_fit(cost, subject, target, ALL)


def _classes(subject: Subject, target: str) -> list[str]:
    """Names of the layers' classes."""
    plain_torch.refuse_described(subject, target)
    found = list(dict.fromkeys(d.module.partition(":")[2].rpartition(".")[2] for d in subject.decisions))
    if not found:
        raise CannotSay(f"{target} wraps layers by their class, and {subject.model} has no repeated layers")
    return found


def _accelerate_yaml(subject: Subject, classes: Sequence[str], *, on: bool, on_host: bool) -> str:
    mixed = "bf16" if subject.asked.get("precision") == "bf16" else "'no'"
    return (
        f"# exported from a Jettison plan for {format_bytes(subject.budget_bytes)}; set num_processes to your ranks\n"
        "compute_environment: LOCAL_MACHINE\n"
        "distributed_type: FSDP\n"
        "fsdp_config:\n"
        "  fsdp_version: 2\n"
        "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
        f"  fsdp_transformer_layer_cls_to_wrap: {','.join(classes)}\n"
        f"  fsdp_activation_checkpointing: {str(on).lower()}\n"
        f"  fsdp_activation_checkpointing_offload: {str(on_host).lower()}\n"
        "  fsdp_reshard_after_forward: true\n"
        "  fsdp_state_dict_type: SHARDED_STATE_DICT\n"
        f"mixed_precision: {mixed}\n"
        "num_machines: 1\n"
        "num_processes: 1\n"
        "use_cpu: false\n"
    )


def _deepspeed_settings(subject: Subject, layers: int, *, on: bool, on_host: bool) -> dict[str, object]:
    found: dict[str, object] = {}
    if subject.described is not None:
        run = subject.described.forecast.run
        found |= {
            "train_micro_batch_size_per_gpu": run.micro_batch,
            "gradient_accumulation_steps": run.micro_batches,
            "zero_optimization": {"stage": run.layout.zero},
        }
        if run.precision.compute == "bfloat16":
            found["bf16"] = {"enabled": True}
    else:
        found["train_micro_batch_size_per_gpu"] = subject.asked.get("micro_batch", 1)
    tp = 1 if subject.described is None else subject.described.forecast.run.layout.tp
    if on:
        found["activation_checkpointing"] = {
            "partition_activations": tp > 1,
            "number_checkpoints": layers,
            "contiguous_memory_optimization": False,
            "cpu_checkpointing": on_host,
            "synchronize_checkpoint_boundary": False,
            "profile": False,
        }
    return found


_LIGHTNING = '''
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn

CHECKPOINTED = {chosen}
{moves}

def mark(model: nn.Module) -> nn.Module:
    """Write into each layer that it is a checkpoint, since the strategy is asked about modules without their names."""
    for name in CHECKPOINTED:
        model.get_submodule(name).is_checkpointed = True
{wrap}    return model


def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    """Look into everything, and wrap what is marked itself, not what hands on a marked module's attributes."""
    return recurse or vars(module).get("is_checkpointed", False)


def strategy(**more) -> FSDPStrategy:
    """The strategy that makes these layers checkpoints."""
    return FSDPStrategy(activation_checkpointing_policy=policy, **more)
'''
