"""Megatron's settings as text: flags of Megatron-LM, overrides of a Megatron-Bridge recipe, and a layout string."""

from __future__ import annotations

import json
from collections.abc import Mapping

from jettison.spec.layout import Layout
from jettison.spec.run import Run

Value = str | int | bool | list[str]
_ELSEWHERE = (
    "micro_batch_size",
    "global_batch_size",
    "use_distributed_optimizer",
    "num_virtual_stages_per_pipeline_rank",
    "microbatch_group_size_per_virtual_pipeline_stage",
)
_RECIPES_OWN = (
    "pipeline_model_parallel_layout",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "offload_modules",
)
"""Of Megatron-Bridge: what its recipes set, to take back where a plan is without it."""


def layout_settings(run: Run) -> dict[str, Value]:
    """The run's layout and batch, by name of Megatron's flags."""
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
        "num_layers": run.model.depth - run.model.further,
    }
    if run.model.further:
        found["mtp_num_layers"] = run.model.further
    if any(layer.repeats for layer in run.model.described):
        found["mtp_use_repeated_layer"] = True
    if layout.stage_layers:
        found["pipeline_model_parallel_layout"] = layout_string(layout)
    elif layout.virtual_stages > 1:
        found["num_virtual_stages_per_pipeline_rank"] = layout.virtual_stages
    if layout.deferred_head:
        found |= {"defer_embedding_wgrad_compute": True, "wgrad_deferral_limit": layout.deferred_head}
    if layout.micro_batch_group:
        found["microbatch_group_size_per_virtual_pipeline_stage"] = layout.micro_batch_group
    return found


def layout_string(layout: Layout) -> str:
    """Stages as Megatron has them, with the embedding on the first and the loss on the last."""
    stages = [f"t*{count}" if count > 1 else "t" * count for count in layout.stage_layers]
    return f"E{'|'.join(stages)}{'m' * layout.further}L"


def flags_text(settings: Mapping[str, Value]) -> str:
    """One flag a line, for ``$(cat FILE)``; nothing in it needs quotes but a layout, which has none of the shell's."""
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
    """Overrides of a recipe's configuration. What the plan does not ask for is said as well: a recipe may have it."""
    layout = layout_settings(run)
    found: dict[str, Value | None] = {name: value for name, value in layout.items() if name not in _ELSEWHERE}
    found["virtual_pipeline_model_parallel_size"] = run.layout.virtual_stages if run.layout.virtual_stages > 1 else None
    found["microbatch_group_size_per_vp_stage"] = run.layout.micro_batch_group or None
    found |= dict.fromkeys(_RECIPES_OWN)
    found |= {"fine_grained_activation_offloading": False, **settings}
    if run.layout.stage_layers:
        found["pipeline_model_parallel_layout"] = layout_string(run.layout)
    beside: dict[str, Value] = {
        "train.micro_batch_size": run.micro_batch,
        "train.global_batch_size": run.micro_batch * run.micro_batches * run.layout.dp,
        "dataset.seq_length": run.seq,
    }
    sharded = run.layout.zero > 0
    for section in ("ddp", "optimizer"):
        beside[f"{section}.use_distributed_optimizer"] = sharded
        if not sharded:  # gathers what each rank updated
            beside[f"{section}.overlap_param_gather"] = False
    lines = [f"model.{name}={_override(value)}" for name, value in found.items()]
    lines += [f"{name}={_override(value)}" for name, value in beside.items()]
    return "\n".join(lines) + "\n"


def _override(value: Value | None) -> str:
    return f"[{','.join(value)}]" if isinstance(value, list) else json.dumps(value)
