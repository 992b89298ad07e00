"""What a framework does where a run says nothing else: one word for several flags of a request."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from jettison.errors import UsageError

Rule = Mapping[str, Any]
"""Fields of a request and their values."""

# megatron/training/arguments.py: bf16 with fp32 main gradients, gradient_accumulation_fusion,
# cross_entropy_loss_fusion off; TransformerEngine 2.10 or later
_MEGATRON: Final[Rule] = MappingProxyType(
    {
        "kernels": "megatron",
        "attention": "flash",
        "precision": "bf16-main32",
        "gradients": "upfront",
        "accumulation": "fused-dummy",
        "loss": "vocab-parallel",
        "workspaces": "te-hopper",
        "keep_received": True,
        "loader_masks": True,
    }
)

LIKE: Final[Mapping[str, Rule]] = MappingProxyType(
    {
        "megatron-0.19": _MEGATRON,
        # the same, and each micro-batch stays: see `predict.set_aside.kept_batches`
        "megatron-0.18": {**_MEGATRON, "keep_batches": True},
        # torchtitan: fully_shard with bf16 parameters and fp32 reduction, its default policy of resharding
        # (torchtitan/models/llama3/infra/parallelize.py, apply_fsdp, from 28 July 2025 on), eager loss;
        # torch.distributed.pipelining
        "torchtitan": {
            "kernels": "pytorch",
            "attention": "flash",
            "precision": "bf16-autocast",
            "gradients": "one-by-one",
            "zero": 3,
            "reshard_after_forward": "torchtitan",
            "loss": "upcast",
            "workspaces": "torch-hopper",
            "stage_buffers": True,
        },
        # nanotron: each backward's bf16 gradients are added to fp32 ones and let go of (accumulate_grad_in_fp32,
        # src/nanotron/optim/gradient_accumulator.py, ``_accumulate_grad``: ``half_param.grad = None``)
        "nanotron": {
            "kernels": "nanotron",
            "attention": "flash",
            "precision": "bf16-grad32",
            "gradients": "added",
            "loss": "sharded",
            "workspaces": "torch-hopper",
        },
        # transformers.Trainer with bf16=True: fp32 parameters under autocast
        "huggingface": {
            "kernels": "huggingface",
            "attention": "flash",
            "precision": "bf16-autocast",
            "gradients": "one-by-one",
            "loss": "upcast",
            "workspaces": "torch-hopper",
        },
        # DeepSpeed's bf16: bf16 parameters and gradients, fp32 copies that ZeRO 1 and later shard; its own step. Under
        # ZeRO 3 shards of gradients have a buffer (deepspeed/runtime/zero/stage3.py, ``grad_partitions_flat_buffer``)
        "deepspeed": {
            "kernels": "huggingface",
            "attention": "flash",
            "precision": "bf16",
            "optimizer": "adamw-deepspeed",
            "gradients": "one-by-one",
            "loss": "upcast",
            "workspaces": "torch-hopper",
        },
        # NeMo AutoModel: weights in bf16 alone, Liger's kernels, logits that ``out`` names until backward is over
        # (nemo_automodel/recipes/llm/train_ft.py, ``_forward_backward_step``), parts checkpointed where any is
        # (components/distributed/activation_checkpointing.py, ``apply_submodule_checkpointing``), ``foreach`` AdamW
        "automodel": {
            "kernels": "liger",
            "attention": "flash",
            "precision": "bf16-pure",
            "optimizer": "adamw-foreach",
            "gradients": "one-by-one",
            "loss": "upcast",
            "holds_output": True,
            "workspaces": "torch-hopper",
        },
    }
)
"""By name. What torchtitan and Hugging Face set over several ranks: see `rule`."""


def rule(name: str, *, tp: int, dp: int = 1, zero: int = 0) -> Rule:
    """What a framework sets.

    Args:
        tp: ranks of tensor parallelism; over more than one, torchtitan's loss is `loss_parallel`, its default, and
            products keep gathered inputs.
        dp: replicas; several that shard nothing, with ``zero`` 0, transformers' Trainer has in DistributedDataParallel
            (``accelerate/accelerator.py``, ``prepare_model``), whose gradients are no views of its buckets.

    Raises:
        UsageError: no such framework.
    """
    if name not in LIKE:
        raise UsageError(f"got --like {name!r}; expected one of {', '.join(LIKE)}")
    found = LIKE[name]
    if name == "torchtitan" and tp > 1:
        return {**found, "loss": "dtensor", "gathered_inputs": True}
    if name == "deepspeed" and zero == 3:
        return {**found, "gradients": "upfront"}
    return {**found, "gradients": "buckets"} if name == "huggingface" and dp > 1 and not zero else found
