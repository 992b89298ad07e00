"""Reader of axolotl's YAML: its Trainer's arguments, and the settings of axolotl's own code."""

from __future__ import annotations

from typing import Final

from jettison.frameworks import trainer_keys as trainer
from jettison.frameworks.run_file import Keys
from jettison.frameworks.transformers.read import adapters

_LORA_KERNELS: Final = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")


def read(keys: Keys) -> None:
    """Read the file, with defaults of the schemas (``utils/schemas``) and of ``utils/config/__init__.py``."""
    for flag in keys.table["on"]:
        if keys.on(flag) and keys.has("attn_implementation"):
            keys.refuse(flag, "axolotl rejects it with attn_implementation")
    _batch(keys)
    _adapters(keys)
    half = _half(keys)
    trainer.checkpointing(keys)  # offloading: ``core/builders/base.py``, ``_configure_gradient_checkpointing``
    _losses(keys)
    if keys.text("rl") == "dpo":
        trainer.preference(keys, "micro_batch_size", 1, "rl")
    _lora_kernels(keys)
    if keys.some("fsdp_config", "fsdp_config.*") and keys.values.get("fsdp_config", True):
        keys.values.setdefault("fsdp", True)  # a configuration turns it on
    trainer.sharding(keys, version=keys.whole("fsdp_version", 1) or 1)  # ``validation.py``, ``check_fsdp_version``
    # ``normalize_config``: reentrant by default
    plain = not keys.has("unfrozen_parameters") and not keys.has("rl") and not keys.has("gradient_checkpointing_kwargs")
    trainer.reentrant(keys, default=plain)
    trainer.optimizer(keys, "optimizer", "adamw")
    _wide_ends(keys, half=half)
    upcast = keys.field("fsdp_version") == 1  # ``monkeypatch/accelerate/fsdp2.py``: not in ``fsdp2_prepare_model``
    trainer.precision(keys, weights="bf16" if half else "fp32", mixed=half, upcast=upcast)
    if keys.said("zero") == 3 and not upcast and half and "save" in keys.field("lora", "") and not keys.field("base"):
        keys.note("modules trained in full keep 16 bits under FSDP2; they are counted in fp32, in twice the bytes")
    _axes(keys)
    trainer.replicas(keys)


def _batch(keys: Keys) -> None:
    """Read the batch. ``normalize_config``: without accumulation steps they follow from batch_size."""
    whole, micro = keys.whole("batch_size"), keys.field("micro_batch", 1)
    if whole is not None and not keys.has("gradient_accumulation_steps"):
        keys.give("micro_batches", max(1, whole // micro), "batch_size")
    packed = keys.on("sample_packing")
    trainer.full_length(keys, packed=packed, expands=True)  # ``utils/__init__.py``, ``set_pytorch_cuda_alloc_conf``


def _adapters(keys: Keys) -> None:
    """Read adapters and quantization.

    ``loaders/model.py``, ``_set_quantization_config``: NF4 with double quantization. ``loaders/adapter.py``: PEFT's
    adapters. ``loaders/model.py``, ``_configure_embedding_dtypes``: with adapters, tensors that PEFT's k-bit
    preparation casts to fp32 are cast back to 16 bits.
    """
    weights = [keys.values.get(f"model_quantization_config{key}") for key in ("", "_kwargs.dequantize")]
    if weights == ["Mxfp4Config", True]:
        keys.read(*keys.matching("model_quantization_config*"), why="16-bit weights")
    if keys.on("lora_target_linear"):  # ``loaders/adapter.py``: in addition to those by name
        keys.values["lora_target_modules"] = ["all-linear", *keys.listed("lora_target_modules")]
    if keys.text("adapter") == "lora" and keys.on("load_in_4bit"):
        keys.refuse("load_in_4bit", "axolotl quantizes to 4 bits with adapter: qlora alone; lora casts weights to fp32")
    elif keys.text("adapter") == "qlora" and not keys.on("load_in_4bit"):
        keys.refuse("adapter", "axolotl rejects qlora without load_in_4bit: true")
    trainer.resumed(keys, "lora_model_dir")  # ``loaders/adapter.py``, ``load_lora``
    adapters(keys, trl=False)
    if keys.field("lora") is not None and keys.on("gptq"):
        keys.give("base", "gptq", "gptq")


def _half(keys: Keys) -> bool:
    """Whether weights and matmuls are in 16 bits. ``resolve_dtype``: bf16 is auto by default, and weights follow it."""
    bf16 = keys.text("bf16", "auto" if not keys.on("fp16") else "false")
    found = bf16 in ("auto", "true", "1") or bool({key for key in ("bfloat16", "fp16", "float16") if keys.on(key)})
    keys.read("bf16", why="weights and matmuls in 16 bits" if found else "weights in fp32")
    return found


def _wide_ends(keys: Keys, *, half: bool) -> None:
    """Refuse fp32 embedding, head and norms. ``loaders/model.py``, ``_configure_embedding_dtypes``: they are cast to
    fp32, except under FSDP; and back to 16 bits for adapters, FlashAttention and cut_cross_entropy. DeepSpeed
    casts all of them.
    """
    cut = "cut_cross_entropy" in str(keys.values.get("plugins")).lower()
    needed = cut or keys.field("attention", "sdpa") not in ("sdpa", "eager")
    if keys.said("like") == "deepspeed":
        return  # ``runtime/engine.py``, ``_configure_distributed_model``
    if half and keys.field("lora") is None and not needed and not keys.some("fsdp_config.*", "fsdp"):
        key = "attn_implementation" if keys.has("attn_implementation") else "base_model"
        keys.refuse(key, "without FlashAttention embedding, head and norms are fp32, which is not modelled")


def _losses(keys: Keys) -> None:
    """Read losses of ``integrations/liger`` and ``integrations/cut_cross_entropy``; the latter's plugin turns it on."""
    plugins = " ".join(map(str, keys.listed("plugins"))).lower()
    if "liger" in plugins:
        _liger(keys)
    elif own := [*keys.matching("liger_*")]:  # ``integrations/config.py``: the plugin's keys are dropped without it
        keys.read(*own, why="nothing")
        keys.note("without axolotl.integrations.liger.LigerPlugin in plugins liger_* have no effect")
    if keys.field("loss") != "fused" and "cutcrossentropy" in plugins and keys.on("cut_cross_entropy", True):
        keys.give("loss", "fused", "plugins", "cut_cross_entropy")
        keys.note("cut_cross_entropy is counted as Liger's fused loss: neither keeps logits")
    # kernels and expert parallelism have keys of their own
    known = ("liger", "cutcrossentropy", "swanlab", "lmeval", "lm_eval", "kernelsplugin", "expertparallel")
    for plugin in (one for one in plugins.split() if not any(name in one for name in known)):
        keys.refuse("plugins", f"unknown plugin {plugin}")


def _liger(keys: Keys) -> None:
    gates = keys.on("liger_glu_activation") or keys.on("liger_swiglu")
    norms, rotary = keys.on("liger_rms_norm"), keys.on("liger_rope")
    if norms and gates:
        keys.give("kernels", "liger", "liger_rms_norm", "liger_glu_activation", "liger_swiglu", "liger_rope")
        keys.give("loss", "upcast")
        if not rotary:
            keys.note("liger_rope is off in the run but counted as on, which keeps slightly less")
    elif norms or gates or rotary:
        for key in keys.matching("liger_rms_norm", "liger_glu_activation", "liger_swiglu", "liger_rope"):
            keys.refuse(key, "Liger's norms and gates are modelled only together")
    if keys.on("liger_fused_linear_cross_entropy"):
        keys.give("loss", "fused", "liger_fused_linear_cross_entropy")
    elif keys.on("liger_cross_entropy"):
        keys.give("loss", "in-forward", "liger_cross_entropy")


def _lora_kernels(keys: Keys) -> None:
    """Read LoRA kernels: on by default if dropout is 0 (``schemas/config.py``, ``check_auto_enable_lora_kernels``)."""
    if keys.field("lora") is None:
        return
    plain = not keys.number("lora_dropout", 0.0) and keys.field("base") not in ("int8", "gptq")
    said = [kernel for kernel in _LORA_KERNELS if keys.has(kernel)]
    fsdp1 = keys.some("fsdp_config.*") and str(keys.get("fsdp_version", 1)) != "2"
    auto = plain and not said and not keys.on("trust_remote_code") and not keys.text("rl") and not fsdp1
    if auto or (plain and all(keys.on(kernel) for kernel in _LORA_KERNELS[:3])):
        keys.give("kernels", "axolotl-liger" if keys.field("kernels") == "liger" else "axolotl", *said)
        if auto:
            keys.note("axolotl enables its own LoRA kernels, since lora_dropout is 0")
    elif any(keys.on(kernel) for kernel in said):
        for kernel in said:
            keys.refuse(kernel, "they are modelled only all together, without dropout, over 4 or 16 bits")


def _axes(keys: Keys) -> None:
    """Read ``dp_shard_size`` and ``dp_replicate_size``, and ring attention, which shards the sequence."""
    if keys.field("cp", 1) > 1:
        keys.give("cp_comm_type", "ring")
        if keys.said("like") != "deepspeed":
            keys.read("ring_attn_func", why="ring")
    else:
        keys.drop("cp")
    if (groups := keys.whole("dp_replicate_size", 1) or 1) > 1:
        keys.give("zero_replicas", groups, "dp_replicate_size")
