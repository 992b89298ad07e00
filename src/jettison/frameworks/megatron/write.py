"""Megatron-Core, and NeMo's Megatron-Bridge with the same options: recompute by module or by number of layers.

The options are global: the same modules in all layers, or the same number of layers on every stage; and with any set of
recomputed modules, others whose saved tensors are offloaded to CPU. They are written as flags of Megatron-LM, as
overrides of a Megatron-Bridge recipe, and as a layout string.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations

from jettison.core.objects import OnDemand
from jettison.frameworks.export import TargetOutput
from jettison.frameworks.layer_policies import (
    Cost,
    Decision,
    LayerAction,
    LayerPolicy,
    Subject,
    checkpointed,
    checkpointed_together,
    kept_whole,
)
from jettison.frameworks.nearest_policy import CannotSay, DescribedPricer, Nearest
from jettison.solve.checkpoint_policy import SMALLEST_OFFLOADED, is_fused, parts_of, recomputed, saved_by, sent
from jettison.spec.layout import Layout, Schedule
from jettison.spec.recompute import CORE_ATTENTION, OFFLOADED, RECOMPUTED, Mode, Recompute
from jettison.spec.run import Run

COULD = "the same modules in all layers, recomputed or offloaded, or the same number of layers on every stage"
Value = str | int | bool | list[str]
_ELSEWHERE = (
    *("micro_batch_size", "global_batch_size", "use_distributed_optimizer", "num_virtual_stages_per_pipeline_rank"),
    "microbatch_group_size_per_virtual_pipeline_stage",
)
_RECIPES_OWN = (
    *("pipeline_model_parallel_layout", "recompute_granularity", "recompute_method", "recompute_num_layers"),
    *("recompute_modules", "offload_modules"),
)
"""Fields that Megatron-Bridge's recipes set, and that a plan without them resets."""


@dataclass(frozen=True, kw_only=True)
class SaidSettings:
    """Settings as fields of `TransformerConfig`, with their policy for each layer."""

    settings: Mapping[str, Value]
    policies: tuple[LayerPolicy, ...]
    cost: Cost


def write(nearest: Nearest) -> TargetOutput:
    """Write flags for Megatron-LM and fields for `TransformerConfig`; or overrides for a recipe, one a line."""
    best, run = _best(nearest)
    if nearest.target == "megatron-bridge":
        files = {"overrides.txt": overrides_text(run, best.settings)}
    else:
        files = {
            "megatron-flags.txt": flags_text({**layout_settings(run), **best.settings}),
            "transformer_config.json": json.dumps(dict(best.settings), indent=2) + "\n",
        }
    return TargetOutput(
        files=files, policies=best.policies, cost=best.cost, lost=_layout_losses(run), notes=tuple(_notes(best, run))
    )


def _best(nearest: Nearest) -> tuple[SaidSettings, Run]:
    subject, pricer, target = nearest.subject, nearest.pricer, nearest.target
    if subject.described is None or not isinstance(pricer, DescribedPricer):
        raise CannotSay(
            f"{target} builds its own layers, and this plan names tensors of {subject.model} as built here; plan the "
            "preset or the config.json with --kernels megatron and a layout, and export that"
        )
    nearest.refuse_stacks()
    nearest.refuse_images()
    run = subject.described.forecast.run
    if run.recompute.whole:
        raise CannotSay(
            f"the plan runs {run.recompute.whole} of each window's micro-batches without checkpointing; megatron-core "
            "0.19 has no flag for it. Plan without --micro-batches-without-recompute"
        )
    if run.layout.schedule is not Schedule.ONE_F_ONE_B and run.layout.pp > 1:
        raise CannotSay(f"the plan's schedule is {run.layout.schedule}; {target} runs 1f1b")
    host = subject.described.host_budget_bytes
    found = [one for one in _candidates(subject, pricer) if host is None or one.cost.host_bytes <= host]
    fitting = [one for one in found if one.cost.peak_bytes <= subject.budget_bytes]
    if not fitting:
        raise nearest.saying(COULD).too_much(min(one.cost.peak_bytes for one in found))
    # the fastest; of these, the one that offloads least
    return min(fitting, key=lambda one: (one.cost.step_seconds or 0.0, one.cost.host_bytes, one.cost.peak_bytes)), run


def _candidates(subject: Subject, pricer: DescribedPricer) -> Iterator[SaidSettings]:
    """Yield the settings worth trying."""
    for modules in _module_sets(subject):
        yield from (_by_modules(subject, pricer, modules, moved) for moved in _offloaded_sets(subject, modules))
    longest, blocks = max(map(len, _chunks(subject))), OnDemand[int, SaidSettings](partial(_block, subject, pricer))
    fits = bisect_left(range(1, longest), True, key=lambda n: blocks[n].cost.peak_bytes <= subject.budget_bytes)
    yield from (blocks[1 + fits], *blocks.values())  # the fewest layers of a stage that fit; fewer need more bytes
    yield from (_uniform(subject, pricer, size) for size in range(1, longest + 1))


def _module_sets(subject: Subject) -> Iterator[tuple[str, ...]]:
    """Sets of modules that the model has; ``moe`` excludes its parts."""
    programs = {id(d.program): d.program for d in subject.decisions}.values()
    there = [module for module in RECOMPUTED if any(parts_of(program, module) for program in programs)]
    if all(map(is_fused, programs)):
        there.remove(CORE_ATTENTION)
    for count in range(len(there) + 1):
        for modules in combinations(there, count):
            if not ("moe" in modules and {"moe_act", "shared_experts"} & set(modules)):
                yield modules


def _offloaded_sets(subject: Subject, again: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Sets of modules that may be offloaded with these recomputed ones, the empty one first.

    Only modules of which the plan offloads a tensor; `TransformerConfig` states which combinations are allowed.
    """
    yield ()
    there = [module for module in OFFLOADED if any(_moves_some(decision, module) for decision in subject.decisions)]
    if "attn_proj" in there and CORE_ATTENTION not in there:
        there.insert(there.index("attn_proj"), CORE_ATTENTION)
    barred = set(again) | ({"moe_act", "expert_fc1"} if "moe" in again else set())
    for count in range(1, len(there) + 1):
        for modules in combinations(there, count):
            if not barred.intersection(modules) and ("attn_proj" not in modules or CORE_ATTENTION in modules):
                yield modules


def _moves_some(decision: Decision, module: str) -> bool:
    inside = {(decision.program.ops[o].path, decision.program.ops[o].name) for o in saved_by(decision.program, module)}
    return any(slot.buffer in decision.offloaded and (slot.path, slot.op) in inside for slot in decision.program.slots)


def offloading(policy: LayerPolicy, modules: Iterable[str]) -> LayerPolicy:
    """Offload the tensors that these modules save."""
    chosen = tuple(modules)
    moved = sent(policy.program, policy.kept, chosen)
    if not moved:
        return policy
    words = f"{policy.words or policy.action} and {', '.join(chosen)} offloaded"
    return replace(policy, offloaded=moved, words=words)


def by_modules(decision: Decision, modules: Iterable[str]) -> LayerPolicy:
    """Return the policy of a layer that recomputes these modules."""
    found = recomputed(decision.program, tuple(modules))
    if not found.modules:
        return kept_whole(decision)
    return LayerPolicy(
        decision=decision,
        action=LayerAction.SELECT,
        kept=found.kept,
        again=tuple(sorted(found.ops)),
        words=", ".join(found.modules),
    )


def _by_modules(
    subject: Subject, pricer: DescribedPricer, modules: tuple[str, ...], moved: tuple[str, ...]
) -> SaidSettings:
    stay = pricer.last_of_chunks()
    recomputed = [by_modules(decision, modules) for decision in subject.decisions]
    policies = tuple(policy if policy.layer in stay else offloading(policy, moved) for policy in recomputed)
    settings: dict[str, Value] = {}
    if modules:
        settings = {"recompute_granularity": "selective", "recompute_modules": list(modules)}
    if moved:
        settings |= {"fine_grained_activation_offloading": True, "offload_modules": list(moved)}
    return SaidSettings(settings=settings, policies=policies, cost=pricer.cost(policies))


def _block(subject: Subject, pricer: DescribedPricer, number: int) -> SaidSettings:
    """Return the settings that checkpoint the first layers of each stage, one by one."""
    position = {decision.layer: i for chunk in _chunks(subject) for i, decision in enumerate(chunk)}
    policies = tuple(checkpointed(d) if position[d.layer] < number else kept_whole(d) for d in subject.decisions)
    return SaidSettings(
        settings={"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": number},
        policies=policies,
        cost=pricer.cost_of_mode(Recompute(mode=Mode.BLOCK, number=number), policies),
    )


def _uniform(subject: Subject, pricer: DescribedPricer, size: int) -> SaidSettings:
    """Return the settings that checkpoint all layers, ``size`` together; the last of a chunk may have fewer."""
    together = [
        policy
        for chunk in _chunks(subject)
        for start in range(0, len(chunk), size)
        for policy in checkpointed_together(chunk[start : start + size])
    ]
    by_name = {policy.layer: policy for policy in together}
    policies = tuple(by_name[decision.layer] for decision in subject.decisions)
    mode = Recompute(mode=Mode.EVERY, number=size) if size > 1 else Recompute(mode=Mode.FULL)
    return SaidSettings(
        settings={"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": size},
        policies=policies,
        cost=pricer.cost_of_mode(mode, policies),
    )


def _chunks(subject: Subject) -> list[list[Decision]]:
    """Layers of each chunk of each stage, without chunks that have none."""
    assert subject.described is not None
    by_name = {decision.layer: decision for decision in subject.decisions}
    chunks = (chunk for stage in subject.described.forecast.stages for chunk in stage.parts)
    layers = ([by_name[part.name] for part in chunk if part.is_layer] for chunk in chunks)
    return [chunk for chunk in layers if chunk]


def _layout_losses(run: Run) -> tuple[str, ...]:
    if run.layout.zero < 2:
        return ()
    what = "gradients" if run.layout.zero == 2 else "gradients and parameters"
    return (
        f"the plan shards {what} (zero {run.layout.zero}); the flags have --use-distributed-optimizer, which shards "
        "optimizer state only. Megatron-FSDP, which shards more, is not exported: these flags alone do not reach the "
        "peak here",
    )


def _notes(best: SaidSettings, run: Run) -> Iterator[str]:
    modules = best.settings.get("recompute_modules")
    gemms = best.policies[0].program.ops
    biases = any(op.path == "mlp.down" and op.name.startswith("aten.addmm") for op in gemms)
    if isinstance(modules, list) and "mlp" in modules and biases:
        yield (
            "mlp in recompute_modules: with biases in linear layers a backward of megatron-core 0.19.2 hangs (seen "
            "with local layers on a CPU); try one step first, or train with --disable-bias-linear"
        )
    if isinstance(modules, list) and "layernorm" in modules:
        yield (
            "layernorm frees tensors only if norms are modules of their own; Transformer Engine fuses the norm before "
            "a linear layer into it"
        )
    if best.settings.get("offload_modules"):
        yield (
            f"Megatron offloads CUDA tensors with {SMALLEST_OFFLOADED} elements or more, overlapped with layers. The "
            "last layer of each stage keeps its own, as in the plan. A tensor that two modules save is counted and "
            "offloaded once here; Megatron may offload it twice. Norms that Transformer Engine fuses into linear "
            "layers offload nothing"
        )
        yield (
            "offloading needs --transformer-impl transformer_engine and, with Transformer Engine 2.10 or later, "
            "NVTE_CPU_OFFLOAD_V1=1 in the environment"
        )
    if run.kernels.name != "megatron":
        yield (f"the plan was made for kernels of {run.kernels.name}; with --kernels megatron bytes are Megatron's")


def layout_settings(run: Run) -> dict[str, Value]:
    """Layout and batch of the run, by name of Megatron's flags."""
    layout = run.layout
    found: dict[str, Value] = {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "sequence_parallel": layout.sp and layout.tp > 1,
        "micro_batch_size": run.micro_batch,
        "global_batch_size": run.micro_batch * run.micro_batches * layout.dp,
        "seq_length": run.seq,
        "use_distributed_optimizer": layout.zero > 0,
        "num_layers": run.model.depth - run.model.mtp_num_layers,
    }
    if run.model.mtp_num_layers:
        found["mtp_num_layers"] = run.model.mtp_num_layers
    if any(layer.repeats for layer in run.model.described):
        found["mtp_use_repeated_layer"] = True
    if layout.stage_layers:
        found["pipeline_model_parallel_layout"] = layout_string(layout)
    elif layout.virtual_stages > 1:
        found["num_virtual_stages_per_pipeline_rank"] = layout.virtual_stages
    if layout.wgrad_deferral_limit:
        found |= {"defer_embedding_wgrad_compute": True, "wgrad_deferral_limit": layout.wgrad_deferral_limit}
    if layout.micro_batch_group:
        found["microbatch_group_size_per_virtual_pipeline_stage"] = layout.micro_batch_group
    return found


def layout_string(layout: Layout) -> str:
    """Megatron's layout string, with the embedding on the first stage and the loss on the last."""
    stages = [f"t*{count}" if count > 1 else "t" * count for count in layout.stage_layers]
    return f"E{'|'.join(stages)}{'m' * layout.mtp_num_layers}L"


def flags_text(settings: Mapping[str, Value]) -> str:
    """Write one flag a line, for ``$(cat FILE)``; only a layout needs quotes, and it has no shell characters."""
    lines = []
    for name, value in settings.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            lines.append(flag)
        elif isinstance(value, list):
            lines.append(" ".join([flag, *value]))
        elif value is not False:
            lines.append(f"{flag} {value}")
    return "\n".join(lines) + "\n"


def overrides_text(run: Run, settings: Mapping[str, Value]) -> str:
    """Write overrides of a recipe's configuration, also of settings that the plan turns off: a recipe may set them."""
    layout = layout_settings(run)
    found: dict[str, Value | None] = {name: value for name, value in layout.items() if name not in _ELSEWHERE}
    found["virtual_pipeline_model_parallel_size"] = run.layout.virtual_stages if run.layout.virtual_stages > 1 else None
    found["microbatch_group_size_per_vp_stage"] = run.layout.micro_batch_group or None
    found |= dict.fromkeys(_RECIPES_OWN)
    found |= {"fine_grained_activation_offloading": False, **settings}
    if run.layout.stage_layers:
        found["pipeline_model_parallel_layout"] = layout_string(run.layout)
    sections: dict[str, Value] = {
        "train.micro_batch_size": run.micro_batch,
        "train.global_batch_size": run.micro_batch * run.micro_batches * run.layout.dp,
        "dataset.seq_length": run.seq,
    }
    sharded = run.layout.zero > 0
    for section in ("ddp", "optimizer"):
        sections[f"{section}.use_distributed_optimizer"] = sharded
        if not sharded:  # the all-gather of parameters needs the distributed optimizer
            sections[f"{section}.overlap_param_gather"] = False
    lines = [f"model.{name}={_override(value)}" for name, value in found.items()]
    lines += [f"{name}={_override(value)}" for name, value in sections.items()]
    return "\n".join(lines) + "\n"


def _override(value: Value | None) -> str:
    return f"[{','.join(value)}]" if isinstance(value, list) else json.dumps(value)
