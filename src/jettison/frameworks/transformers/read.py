"""Reader of runs of transformers' Trainer and of TRL's trainers."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from jettison.core.errors import UsageError
from jettison.frameworks import trainer_keys as trainer
from jettison.frameworks.python_values import UnknownValue
from jettison.frameworks.run_file import Keys, table_of
from jettison.frameworks.shell_script import PROGRAM

_QUANTIZES_OR_ADAPTS: Final = ("LoraConfig", "BitsAndBytesConfig")


def read(keys: Keys) -> None:
    """Read a Trainer's arguments, or a TRL trainer's if they have its keys."""
    if keys.file.syntax == "arguments":
        trainer.follow(keys, "config", "transformers", "")
        for key in keys.matching("no_*"):  # ``hf_argparser.py``: --no_NAME turns off a default
            keys.values.setdefault(key.removeprefix("no_"), not keys.on(key))
    for key in ("config_file", "accelerate_config"):
        trainer.follow(keys, key, "accelerate", "accelerate.")
    trl, script = keys.form == "trl", keys.file.syntax == "python script"
    older = next(filter(keys.has, keys.matching(*keys.table.get("older", ()))), "") if trl else ""
    usual = trl and not older and not keys.some("$*TrainingArguments")  # ``sft_trainer.py``: their values
    if script:
        _script(keys, checkpoints=usual)
    elif not trl and keys.file.syntax != "arguments" and keys.has("dataset_name"):
        keys.note(
            "it is read as a Trainer's, since no key is TRL's, whose defaults differ: for TRL give a script with trl "
            "sft --config"
        )
    if not script and keys.form in ("trl", "trainer") and not keys.has("use_peft"):
        _own_adapters(keys)
    generates = others(keys)
    _sequence(keys, trl=trl)
    mixed = trainer.half(keys, default=usual)
    adapters(keys, trl=trl and not older, mixed=mixed)
    if trl and not generates and keys.some(*table_of("transformers")["pairs"]):
        preference(keys)
        if not keys.some("$*dpo*", "$DPO*"):
            keys.note("it is read as DPO's, with a reference; of ORPO and CPO, which have none: --reference none")
    elif trl and keys.text("loss_type", "nll") not in ("nll", "dft"):
        keys.refuse("loss_type", "of SFT's losses only nll and dft are modelled")
    weights = _weights(keys, trl=trl and not script)
    trainer.checkpointing(keys, default=usual)
    if keys.on("use_liger_kernel"):
        keys.give("kernels", "liger", "use_liger_kernel")
        if not trl and keys.field("loss") is None:  # TRL has its own head with Liger's norms and gates
            fused = keys.on("liger_kernel_config.fused_linear_cross_entropy", True)
            alone = keys.on("liger_kernel_config.cross_entropy")
            keys.give("loss", "fused" if fused else "in-forward" if alone else "upcast", "use_liger_kernel")
    else:
        keys.read(*keys.matching("liger_kernel_config*"), why="nothing")
    if older:  # ``SFTConfig`` before 0.20; bf16 is the default since 0.19, gradient_checkpointing since 0.22
        keys.give("loss", keys.field("loss", "upcast"))
        said = f"{keys.written(older).lstrip('$')} means TRL before 0.20"
        keys.note(f"{said}: all logits, foreach AdamW, bf16 and checkpoints off by default")
    elif trl and keys.field("loss") is None:
        keys.give("loss", "tiled")
        keys.note("TRL computes its loss on tiles of logits (1.16); give --loss upcast for older ones, which keep all")
    trainer.sharding(keys)
    whole = keys.said("like") != "deepspeed" and keys.field("zero", 0) < 3 and keys.field("kbit_upcast") is None
    if older and mixed and whole and str(keys.field("base")).startswith("nf4"):  # NOTE [ What is not packed ]
        keys.give("kbit_upcast", "norms" if keys.on("bf16") and not keys.some("$get_peft_model") else "all")
    unsaid = weights == "fp32" and (script or not trl) and not (keys.has("dtype") or keys.has("torch_dtype"))
    if unsaid and keys.said("like") != "deepspeed":  # whose engine replaces it
        keys.note(
            "weights are counted in fp32; give --precision bf16-pure if the script loads them in 16 bits, as "
            "from_pretrained does since transformers 5"
        )
    trainer.reentrant(keys)
    trainer.optimizer(keys, "optim", "adamw-foreach" if older else "adamw")
    trainer.precision(keys, weights=weights, mixed=mixed)
    trainer.replicas(keys)


def packed_loaders(keys: Keys) -> None:
    """Read a script whose loaders pack weights and make adapters, with defaults of their own."""
    if keys.some("$*FastVisionModel*"):
        keys.note("images are not counted")
    if keys.some("$*.get_peft_model"):
        # ``llama.py``, ``get_peft_model``: embedding and head among the targets are trained in full
        own, ends = keys.listed("peft.target_modules"), keys.listed("lora_modules_to_save")
        ends = [*ends, *(name for name in own if name in ("embed_tokens", "lm_head"))]
        if ends:
            own = [name for name in own if name not in ends]
            keys.values |= {"peft.target_modules": own, "lora_modules_to_save": ends}
            if keys.text("peft.use_gradient_checkpointing") == "unsloth":
                keys.note("frozen copies of modules trained in full are on disk in the run, but counted on the GPU")
        targets = trainer.targets(keys, "peft.target_modules", "all-linear")
        trainer.low_rank(keys, "peft.r", 16, "peft.lora_dropout", 0.0, targets, "peft.target_modules")
        if keys.on("model.load_in_4bit", True):
            keys.give("base", "nf4-double", "model.load_in_4bit")
    else:
        keys.refuse("get_peft_model", "only adapters are modelled with its kernels", implied=True)
    others(keys)
    if keys.some("$DPO[CT]*"):
        keys.give("seq", keys.whole("max_length"), "max_length")
        preference(keys, loss="upcast")  # it takes TRL to 0.24 (``pyproject.toml``), which keeps all logits
    elif (length := keys.whole("max_seq_length", 0) or 0) and length < keys.field("seq"):  # ``rl.py``, ``length_check``
        keys.give("seq", length, "max_seq_length")
    trainer.full_length(keys, packed=keys.on("packing"))
    trainer.optimizer(keys, "optim", "adamw")
    trainer.replicas(keys)


def others(keys: Keys) -> bool:
    """Refuse trainers other than of SFT and DPO, and return whether there is one."""
    found = [*keys.matching(*table_of("transformers")["trainers"])]
    for script in found:
        keys.refuse(script, "generation and reward models during training are not modelled")
        if keys.has("max_completion_length"):
            keys.give("seq", (keys.whole("max_prompt_length") or 512) + (keys.whole("max_completion_length") or 0))
    for parser in keys.matching("$HfArgumentParser", "$TrlParser"):
        if not keys.some("$*TrainingArguments", "$[SDGKC]*[FPT]*Config"):
            keys.refuse(parser, "it reads a command line: give the script or YAML that has it as --from")
    return bool(found)


def _script(keys: Keys, *, checkpoints: bool) -> None:
    """Read the calls of a script that stand for arguments of a trainer; ``checkpoints``: it does by default."""
    loads = keys.some("$PeftModel*.from_pretrained", "$AutoPeft*.from_pretrained")
    if keys.some("$LoraConfig"):
        keys.values["use_peft"] = True
    elif loads and not keys.some("$*.merge_and_unload"):
        keys.values["use_peft"] = True
        keys.refuse("peft_config", "a checkpoint's adapters are not read: give --lora", implied=True)
    elif keys.some("$get_peft_model", "$*LoraConfig", "$*TuningConfig"):
        keys.refuse("peft_config", "of PEFT's methods only LoRA is modelled", implied=True)
    prepares = ["$prepare_model_for_*_training"] * keys.on("kbit.use_gradient_checkpointing", True)
    for call in keys.matching("$*.gradient_checkpointing_enable", *prepares):
        if not keys.on("gradient_checkpointing", checkpoints):
            keys.values["gradient_checkpointing"] = keys.values[call]
    if not keys.some("$*Trainer", "$*TrainingArguments", "$*[FP][TO]Config", "$HfArgumentParser", "$TrlParser"):
        keys.refuse("$loop", "its loop is not read: give --micro-batch, --optimizer, --recompute", implied=True)
    if keys.some("$*ForSequenceClassification.*", "$*ForTokenClassification.*"):
        keys.values.setdefault("model.num_labels", 2)


def _own_adapters(keys: Keys) -> None:
    """Refuse adapters that a program makes by options of its own, or whatever its options say."""
    for key in filter(keys.on, ("lora_r", "lora_rank", "lora_dim")):
        keys.refuse(key, "TRL makes no adapters without use_peft, and another script may: give --lora")
    with suppress(UsageError):  # several trainings, or no Python
        program = keys.named(PROGRAM)
        made = {} if program is None else {one: program.values.get(f"${one}") for one in _QUANTIZES_OR_ADAPTS}
        for call in (one for one, line in made.items() if line is not None):
            if isinstance(made[call], UnknownValue):
                keys.note(f"{keys.get(PROGRAM)} may call {call}, not counted: give --lora or --base if it does")
            else:
                keys.refuse(PROGRAM, f"it calls {call} whatever its options: give --lora, and --base if it quantizes")


def adapters(keys: Keys, *, trl: bool, mixed: bool = False) -> None:
    """Read adapters and quantization, of TRL's ``ModelConfig`` or of a script's calls."""
    if not keys.on("use_peft"):
        trainer.without_adapters(keys, "lora_*")
        return
    script = keys.file.syntax == "python script"
    targets = trainer.targets(keys, "lora_target_modules", trainer.DEFAULT_TARGETS)
    rank, dropout = (8, 0.0) if script else (16, 0.05)
    trainer.low_rank(keys, "lora_r", rank, "lora_dropout", dropout, targets, "use_peft", "lora_target_modules")
    wide = keys.some("$prepare_model_for_*_training")
    if trl and not wide and (keys.on("load_in_8bit") or keys.on("load_in_4bit")):
        keys.give("precision", "bf16-pure")  # ``sft_trainer.py``: adapters on quantized weights are cast to bf16
        keys.note("for TRL before 0.27, whose adapters are fp32: --like huggingface-4.57 --precision bf16-autocast")
    if keys.on("load_in_8bit"):
        keys.give("base", "int8", "load_in_8bit")
        if wide:
            keys.note("the script casts embedding, norms and head to fp32, which is not counted over 8 bits")
    if keys.on("load_in_4bit"):
        keys.give("base", "nf4" + "-double" * keys.on("use_bnb_nested_quant"), "load_in_4bit", "use_bnb_nested_quant")
        if wide and mixed:
            keys.give("kbit_upcast", "all")
        # transformers loads a quantized model in 16 bits, whose inputs decide (bitsandbytes, ``set_compute_type``)
        asked = keys.text("dtype", keys.text("torch_dtype", "bfloat16" if script else "float32"))
        if asked in ("float32", "fp32") or (wide and not mixed):
            keys.refuse(
                "load_in_4bit", "set dtype = bfloat16: TRL's matmuls with 4-bit weights in fp32 are not modelled"
            )


def _sequence(keys: Keys, *, trl: bool) -> None:
    if tokens := keys.whole("tokens_per_gpu"):  # as many sequences as fit, without padding between them
        length, axis = keys.field("seq", 1), keys.field("cp", 1)
        keys.sequences_a_row = max(1, tokens * axis // max(1, length))
        keys.give("packed", length if axis == 1 else None)
        keys.give("seq", tokens * axis, "tokens_per_gpu")
        keys.give("micro_batch", 1)
        if axis > 1:
            keys.note("sequences of a micro-batch are counted as one, which takes more time and the same memory")
    cut = [key for key in ("max_length", "max_seq_length") if key in keys.values]  # null: not truncated
    if trl and keys.field("seq") is None and not cut:
        keys.give("seq", 1024)  # ``SFTConfig.max_length``
    packed = keys.on("packing") or keys.on("padding_free") or keys.some("$DataCollatorWithFlattening")
    keys.read("packing", "padding_free", why="sequences of full length" * packed)
    if packed or trl:
        trainer.full_length(keys, packed=packed)


def _weights(keys: Keys, *, trl: bool) -> str:
    """Return the dtype of loaded weights; TRL's default is fp32 (``trainer/utils.py``, ``create_model_from_path``)."""
    key = "torch_dtype" if keys.has("torch_dtype") else "dtype"
    packed = keys.field("base") is not None and keys.file.syntax == "python script"
    found = keys.text(key, "bfloat16" if packed else "float32" if trl else "")
    if found in ("bfloat16", "bf16", "float16", "fp16", "auto"):
        if found == "auto":
            keys.note(f"{key} = auto is counted as 16 bits")
        keys.read(key, why="weights in 16 bits")
        return "bf16"
    keys.read(key, why="weights in fp32")
    return "fp32"


def preference(keys: Keys, loss: str = "dpo") -> None:
    """Read TRL's DPO, with a loss as ``--loss``."""
    if keys.get("loss_type", "sigmoid") not in ("sigmoid", ["sigmoid"]):
        keys.refuse("loss_type", "of DPO's losses only sigmoid is modelled")
    keys.read("beta", "max_prompt_length", "max_completion_length", "precompute_ref_batch_size", "disable_dropout")
    if keys.on("disable_dropout", True):
        keys.give("dropout", 0.0, "disable_dropout")
    trainer.preference(keys, "per_device_train_batch_size", trainer.MICRO_BATCH, loss=loss)
