"""Plans of described runs that Megatron's settings are exported from, and what their models are in its words."""

from __future__ import annotations

from functools import cache
from typing import Any

import jettison
from jettison.cli.plan import PlanFlags, plan
from jettison.frameworks.export import Exported
from jettison.request.options import RunRequest

GPT = {"tp": 8, "micro_batch": 4, "kernels": "megatron"}
MIXTRAL = {"tp": 4, "ep": 8, "dp": 8, "zero": 1, "micro_batch": 4, "kernels": "megatron", "offload": True}
LATENT = {"tp": 8, "ep": 64, "dp": 64, "zero": 1, "micro_batch": 1, "kernels": "megatron"}
STAGES = {"tp": 8, "pp": 2, "stage_layers": "23,25", "micro_batch": 1, "micro_batches": 4, "kernels": "megatron"}
VIRTUAL = {"tp": 8, "pp": 2, "virtual_stages": 2, "micro_batches": 4, "dp": 2, "zero": 1, "kernels": "megatron"}
RUNS = {"tp": 8, "seq": 131072, "kernels": "megatron"}
PLANS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "dense": ("gpt-22b", "55GiB", GPT),
    "layers": ("gpt-22b", "45GiB", GPT),
    "offload": ("gpt-22b", "46GiB", GPT | {"offload": True}),
    "experts": ("mixtral-8x7b", "44GiB", MIXTRAL),
    "latent": ("deepseek-v3", "62GiB", LATENT),
    "stages": ("gpt-22b", "35GiB", STAGES),
    "virtual": ("gpt-22b", "30GiB", VIRTUAL),
    "runs": ("llama3-8b", "27.9GiB", RUNS),
}
MODELS: dict[str, dict[str, Any]] = {
    "llama3-8b": {
        "num_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_query_groups": 8,
        "add_bias_linear": False,
        "gated_linear_unit": True,
    },
    "gpt-22b": {"num_layers": 48, "hidden_size": 6144, "num_attention_heads": 64},
    "mixtral-8x7b": {
        "num_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_moe_experts": 8,
        "moe_grouped_gemm": True,
        "add_bias_linear": False,
    },
    "deepseek-v3": {
        "num_layers": 61,
        "hidden_size": 7168,
        "num_attention_heads": 128,
        "num_moe_experts": 256,
        "moe_grouped_gemm": True,
        "add_bias_linear": False,
        "multi_latent_attention": True,
    },
}


FLAGS = {
    "llama3-8b": "--hidden-size 4096 --num-attention-heads 32 --group-query-attention --num-query-groups 8 --swiglu "
    "--disable-bias-linear --max-position-embeddings 131072",
    "gpt-22b": "--hidden-size 6144 --num-attention-heads 64 --max-position-embeddings 2048",
    "mixtral-8x7b": "--hidden-size 4096 --num-attention-heads 32 --group-query-attention --num-query-groups 8 "
    "--num-experts 8 --moe-grouped-gemm --disable-bias-linear --max-position-embeddings 32768",
    "deepseek-v3": "--hidden-size 7168 --num-attention-heads 128 --multi-latent-attention --num-experts 256 "
    "--moe-grouped-gemm --disable-bias-linear --max-position-embeddings 4096",
}
"""What a launch script says of these models beside what is exported."""


@cache
def exported(name: str, to: str) -> Exported:
    model, budget, asked = PLANS[name]
    gpu = "h100-80gb" if asked.get("offload") else None
    return jettison.export_plan(plan(model, RunRequest(**asked), PlanFlags(budget=budget, gpu=gpu)).document(), to=to)


def world(name: str) -> int:
    """Ranks of a plan."""
    described = exported(name, "megatron").subject.described
    assert described is not None
    return described.forecast.run.layout.world
