"""Training frameworks as tracebacks show them, and what each calls the settings that save memory.

The lines are those of the frameworks' documentation: a setting of its command, its configuration file or its class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """One framework. The first of `TRAINERS` whose part of a path is in a traceback counts: servers are the last, since
    trainers run them inside of their own loops.

    Args:
        paths: parts of paths of files, one of which is in its tracebacks.
        recompute: switches activation checkpointing on.
        smaller: a smaller micro-batch with the same batch.
        loss: a loss that does not hold all logits; "" where it has none.
        optimizer: a smaller optimizer state; "" where it has no setting.
        evaluate: a smaller evaluation; "" where it has no setting.
        plan: Jettison's line for it, with {budget}; "" where that is `jettison.auto_checkpoint` in the user's loop.
        rollout: the share of the device that its inference server gets; "" where it has none.
        serves: it runs inference, so there is nothing to recompute.
    """

    name: str
    paths: tuple[str, ...]
    recompute: str = ""
    smaller: str = ""
    loss: str = ""
    optimizer: str = ""
    evaluate: str = ""
    plan: str = ""
    rollout: str = ""
    serves: bool = False


_HF_PLAN: Final = 'jettison.integrations.transformers.auto_checkpoint_trainer(trainer, "{budget}")'
_HF_SMALLER: Final = "per_device_train_batch_size=1, gradient_accumulation_steps=8"

TRAINERS: Final[tuple[Trainer, ...]] = (
    Trainer(
        name="verl",
        paths=("/verl/",),
        recompute="actor_rollout_ref.model.enable_gradient_checkpointing=True",
        smaller="actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
        loss="actor_rollout_ref.model.use_fused_kernels=True",
        optimizer="actor_rollout_ref.actor.fsdp_config.optimizer_offload=True",
        rollout="actor_rollout_ref.rollout.gpu_memory_utilization=0.4",
    ),
    Trainer(
        name="OpenRLHF",
        paths=("/openrlhf/",),
        recompute="--gradient_checkpointing",
        smaller="--micro_train_batch_size 1",
        optimizer="--adam_offload",
        rollout="--vllm_gpu_memory_utilization 0.4 --vllm_enable_sleep",
    ),
    Trainer(
        name="Axolotl",
        paths=("/axolotl/",),
        recompute="gradient_checkpointing: true",
        smaller="micro_batch_size: 1",
        loss="plugins: [axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin]",
        optimizer="optimizer: adamw_bnb_8bit",
    ),
    Trainer(
        name="LLaMA-Factory",
        paths=("/llamafactory/", "/llmtuner/"),
        recompute="disable_gradient_checkpointing: false",
        smaller="per_device_train_batch_size: 1",
        loss="enable_liger_kernel: true",
        optimizer="optim: adamw_bnb_8bit",
    ),
    Trainer(
        name="ms-swift",
        paths=("/swift/llm/", "/swift/trainers/", "/ms-swift/"),
        recompute="--gradient_checkpointing true",
        smaller="--per_device_train_batch_size 1",
        loss="--use_liger_kernel true",
        optimizer="--optim adamw_bnb_8bit",
        rollout="--vllm_gpu_memory_utilization 0.4 --sleep_level 1",
    ),
    Trainer(
        name="Unsloth",
        paths=("/unsloth/", "/unsloth_zoo/", "unsloth_compiled_cache/"),
        recompute='FastLanguageModel.get_peft_model(..., use_gradient_checkpointing="unsloth")',
        smaller=f"SFTConfig({_HF_SMALLER})",
        optimizer='SFTConfig(optim="adamw_8bit")',
    ),
    Trainer(
        name="TRL",
        paths=("/trl/trainer/", "/trl/experimental/"),
        recompute="SFTConfig(gradient_checkpointing=True)    # DPOConfig, GRPOConfig: the same argument",
        smaller=f"SFTConfig({_HF_SMALLER})",
        loss="SFTConfig(use_liger_kernel=True)",
        optimizer='SFTConfig(optim="adamw_bnb_8bit")',
        evaluate="SFTConfig(per_device_eval_batch_size=1, eval_accumulation_steps=8)",
        rollout="GRPOConfig(vllm_gpu_memory_utilization=0.3, vllm_enable_sleep_mode=True)",
        plan=_HF_PLAN,
    ),
    Trainer(
        name="transformers Trainer",
        paths=("/transformers/trainer.py", "/transformers/trainer_seq2seq.py"),
        recompute="TrainingArguments(gradient_checkpointing=True)",
        smaller=f"TrainingArguments({_HF_SMALLER})",
        loss="TrainingArguments(use_liger_kernel=True)",
        optimizer='TrainingArguments(optim="adamw_bnb_8bit")',
        evaluate="TrainingArguments(per_device_eval_batch_size=1, eval_accumulation_steps=8)",
        plan=_HF_PLAN,
    ),
    Trainer(
        name="NeMo",
        paths=("/nemo/collections/", "/nemo/lightning/"),
        recompute="model.activations_checkpoint_granularity=full model.activations_checkpoint_method=uniform",
        smaller="model.micro_batch_size=1",
    ),
    Trainer(
        name="Lightning",
        paths=("/lightning/pytorch/", "/pytorch_lightning/"),
        recompute="x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)    # in the module's forward",
        smaller="Trainer(accumulate_grad_batches=8)    # and an eighth of the DataLoader's batch_size",
        plan='Trainer(callbacks=[jettison.integrations.lightning.AutoCheckpoint("{budget}")])',
    ),
    Trainer(
        name="Lightning Fabric",
        paths=("/lightning/fabric/", "/lightning_fabric/"),
        recompute="x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)    # in the module's forward",
        smaller="with fabric.no_backward_sync(model, enabled=accumulating):    # and an eighth of the batch_size",
    ),
    Trainer(
        name="torchtitan",
        paths=("/torchtitan/",),
        recompute="--activation_checkpoint.mode full",
        smaller="--training.local_batch_size 1",
        plan='jettison.integrations.torchtitan.auto_checkpoint_trainer(trainer, "{budget}")',
    ),
    Trainer(
        name="torchtune",
        paths=("/torchtune/",),
        recompute="enable_activation_checkpointing=True",
        smaller="batch_size=1 gradient_accumulation_steps=8",
        loss="loss._component_=torchtune.modules.loss.LinearCrossEntropyLoss",
        optimizer="optimizer._component_=bitsandbytes.optim.PagedAdamW8bit",
    ),
    Trainer(
        name="Megatron-LM",
        paths=("/megatron/core/", "/megatron/training/", "/megatron/model/"),
        recompute="--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        smaller="--micro-batch-size 1",
        loss="--cross-entropy-loss-fusion",
        optimizer="--use-distributed-optimizer",
    ),
    Trainer(
        name="Composer",
        paths=("/composer/trainer/", "/llmfoundry/"),
        recompute="fsdp_config.activation_checkpointing=true",
        smaller="device_train_microbatch_size=auto",
    ),
    Trainer(
        name="ColossalAI",
        paths=("/colossalai/",),
        recompute="model.gradient_checkpointing_enable()",
        smaller="--batch_size 1 --accumulation_steps 8",
    ),
    Trainer(
        name="DeepSpeed",
        paths=("/deepspeed/runtime/",),
        recompute="model.gradient_checkpointing_enable()",
        smaller='"train_micro_batch_size_per_gpu": 1    # in the DeepSpeed configuration',
        optimizer='"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}',
    ),
    Trainer(name="Ultralytics", paths=("/ultralytics/",), smaller="yolo train batch=-1    # chooses a batch that fits"),
    Trainer(
        name="Accelerate",
        paths=("/accelerate/accelerator.py", "/accelerate/optimizer.py", "/accelerate/commands/"),
        recompute="model.gradient_checkpointing_enable()",
        smaller="Accelerator(gradient_accumulation_steps=8)    # and an eighth of the DataLoader's batch_size",
    ),
    Trainer(
        name="vLLM",
        paths=("/vllm/",),
        smaller="--gpu-memory-utilization 0.85 --max-num-seqs 64 --max-model-len 8192",
        serves=True,
    ),
    Trainer(
        name="SGLang", paths=("/sglang/",), smaller="--mem-fraction-static 0.8 --max-running-requests 64", serves=True
    ),
)


def trainer_of(files: Sequence[str]) -> str:
    """Return the name of the framework in whose loop a traceback is; "" where it is the user's own."""
    found = next((one for one in TRAINERS if any(part in file for file in files for part in one.paths)), None)
    return "" if found is None else found.name


def in_server(files: Sequence[str]) -> bool:
    """Whether a traceback runs into an inference server."""
    return any(part in file for one in TRAINERS if one.serves for file in files for part in one.paths)


def trainer_named(name: str) -> Trainer | None:
    """Return a framework by its name; None for ""."""
    return next((one for one in TRAINERS if one.name == name), None)
