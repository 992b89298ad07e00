"""Reader of runs of transformers' Trainer and of TRL's trainers."""

from __future__ import annotations

from typing import Final

from jettison.frameworks import trainer_keys as trainer
from jettison.frameworks.run_file import Keys

TRL_TOKENS: Final = 1024
"""TRL's ``max_length``."""
_DPO: Final = ("$dpo.py", "$dpo", "beta", "precompute_ref_log_probs", "max_prompt_length")
_OTHERS: Final = ("$grpo*", "$kto*", "$reward*", "$ppo*", "$orpo*", "$rloo*", "$gkd*", "$online_dpo*", "$cpo*", "$bco*")


def read(keys: Keys) -> None:
    """Read a Trainer's arguments, or a TRL trainer's if they have its keys."""
    if keys.file.syntax == "arguments":
        trainer.follow(keys, "config", "transformers", "")
    for key in ("config_file", "accelerate_config"):
        trainer.follow(keys, key, "accelerate", "accelerate.")
    if keys.file.syntax == "arguments":  # ``hf_argparser.py``: --no_NAME turns off a default
        for key in [*keys.matching("no_*")]:
            keys.values.setdefault(key.removeprefix("no_"), not keys.on(key))
    trl = keys.form == "trl"
    if not trl and keys.file.syntax != "arguments" and keys.has("dataset_name"):
        keys.note(
            "it is read as a Trainer's, since no key is TRL's, whose defaults differ: for TRL give a script with trl "
            "sft --config"
        )
    for script in keys.matching(*_OTHERS):
        keys.values[f"trainer {script[1:]}"] = True
        keys.refuse(f"trainer {script[1:]}", "generation and reward models during training are not modelled")
    if keys.field("micro_batch") is None:
        keys.give("micro_batch", trainer.MICRO_BATCH)
    _sequence(keys, trl=trl)
    adapters(keys, trl=trl)
    if trl and keys.some(*_DPO):
        _preference(keys)
    elif trl and keys.text("loss_type", "nll") not in ("nll", "dft"):
        keys.refuse("loss_type", "of SFT's losses only nll and dft are modelled")
    mixed = trainer.half(keys, default=trl)
    weights = _weights(keys, trl=trl)
    trainer.checkpointing(keys, default=trl)
    if keys.on("use_liger_kernel"):
        keys.give("kernels", "liger", "use_liger_kernel")
        _liger(keys)
        if not trl and keys.on("liger_kernel_config.fused_linear_cross_entropy", True):
            keys.give("loss", "fused", "use_liger_kernel")  # TRL has its own head with Liger's norms and gates
    else:
        keys.read(*keys.matching("liger_kernel_config*"), why="nothing")
    if trl and keys.on("use_liger"):  # before TRL 0.18, ``sft_trainer.py``: liger_kernel's AutoLigerKernelForCausalLM
        keys.give("kernels", "liger", "use_liger")
        keys.give("loss", "fused", "use_liger")
    if trl and keys.field("loss") is None:
        keys.give("loss", "tiled")
        keys.note("TRL computes its loss on tiles of logits (1.16); give --loss upcast for older ones, which keep all")
    trainer.compiled(keys)
    trainer.sharding(keys)
    if weights == "fp32" and not trl and not (keys.has("dtype") or keys.has("torch_dtype")):
        _say_weights(keys)
    trainer.reentrant(keys)
    trainer.optimizer(keys, "optim", "adamw")
    trainer.precision(keys, weights=weights, mixed=mixed)
    trainer.replicas(keys)


def _liger(keys: Keys) -> None:
    """Read Liger's configuration, with defaults of ``integrations/liger.py``."""
    prefix = "liger_kernel_config."
    for name in ("rms_norm", "swiglu"):
        if not keys.on(f"{prefix}{name}", True):
            keys.refuse(f"{prefix}{name}", "Liger's norms and gates are modelled only together")
    if keys.on(f"{prefix}cross_entropy"):
        keys.refuse(f"{prefix}cross_entropy", "Liger's unfused cross entropy is not modelled")
    if not keys.on(f"{prefix}rope", True):
        keys.note("rope of liger_kernel_config is off in the run but counted as on, which keeps slightly less")


def adapters(keys: Keys, *, trl: bool) -> None:
    """Read adapters and quantization of TRL's ``ModelConfig``."""
    if not keys.on("use_peft"):
        keys.read(*keys.matching("lora_*"), why="" if trl else "no adapters")
        for key in keys.matching("load_in_4bit", "load_in_8bit"):
            if keys.on(key):
                keys.refuse(key, "quantized weights cannot be trained without use_peft")
        return
    targets = trainer.targets(keys, "lora_target_modules", trainer.DEFAULT_TARGETS)
    trainer.low_rank(keys, "lora_r", 16, "lora_dropout", 0.05, targets, "use_peft", "lora_target_modules")
    if keys.on("load_in_8bit") or keys.on("load_in_4bit"):
        keys.give("precision", "bf16-pure")  # ``sft_trainer.py``: adapters on quantized weights are cast to bf16
    if keys.on("load_in_8bit"):
        keys.give("base", "int8", "load_in_8bit")
    if keys.on("load_in_4bit"):
        double = "-double" * keys.on("use_bnb_nested_quant")
        keys.give("base", f"nf4{double}", "load_in_4bit", "use_bnb_nested_quant")
        if keys.text("bnb_4bit_quant_type", "nf4") not in ("nf4", "fp4"):
            keys.refuse("bnb_4bit_quant_type", "expected nf4 or fp4")
        if keys.text("dtype", keys.text("torch_dtype", "float32")) in ("float32", "fp32"):
            keys.refuse(
                "load_in_4bit",
                "without dtype = bfloat16 TRL's matmuls with 4-bit weights run in fp32, which is not modelled",
            )


def _sequence(keys: Keys, *, trl: bool) -> None:
    cut = [key for key in ("max_length", "max_seq_length") if key in keys.values]  # null: not truncated
    if trl and keys.field("seq") is None and not cut:
        keys.give("seq", TRL_TOKENS)
    keys.read(*cut)
    if keys.field("seq") is None:
        keys.note("it has no sequence length: give --seq, such as --seq 2048")
    packed = keys.on("packing") or keys.on("padding_free")
    if packed:
        keys.read("packing", "padding_free", why="sequences of full length")
    if packed or trl:
        trainer.full_length(keys, packed=packed)


def _weights(keys: Keys, *, trl: bool) -> str:
    """Return the dtype of loaded weights; TRL's default is fp32 (``trainer/utils.py``, ``create_model_from_path``)."""
    key = "torch_dtype" if keys.has("torch_dtype") else "dtype"
    found = keys.text(key, "float32" if trl else "")
    if found in ("bfloat16", "bf16", "float16", "fp16", "auto"):
        if found == "auto":
            keys.note(f"{key} = auto is counted as 16 bits")
        keys.read(key, why="weights in 16 bits")
        return "bf16"
    if found not in ("float32", "fp32", ""):
        keys.refuse(key, "expected float32, bfloat16, float16 or auto")
    keys.read(key, why="weights in fp32")
    return "fp32"


def _say_weights(keys: Keys) -> None:
    """Note the default dtype of weights, unless DeepSpeed's engine replaces it."""
    if keys.said("like") != "deepspeed":
        keys.note(
            "weights are counted in fp32; give --precision bf16-pure if the script loads them in 16 bits, as "
            "from_pretrained does since transformers 5"
        )


def _preference(keys: Keys) -> None:
    """Read TRL's DPO: pairs of sequences, and a reference, which is the base model if there are adapters."""
    kinds = keys.get("loss_type", "sigmoid")
    if kinds not in ("sigmoid", ["sigmoid"]):
        keys.refuse("loss_type", "of DPO's losses only sigmoid is modelled")
    keys.read("beta", "max_prompt_length", "max_completion_length", "precompute_ref_batch_size", "disable_dropout")
    keys.give("micro_batch", 2 * keys.field("micro_batch", trainer.MICRO_BATCH), "per_device_train_batch_size")
    keys.give("loss", "dpo")
    if keys.on("disable_dropout", True):
        keys.give("dropout", 0.0, "disable_dropout")
    tuned = keys.field("lora") is not None
    when = ",when=before" if keys.on("precompute_ref_log_probs") else ""
    keys.give("reference", "base" if tuned else f"same{when}", "precompute_ref_log_probs")
