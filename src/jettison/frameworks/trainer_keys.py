"""Shared readers of Trainer runs: GPUs, precision, optimizer, checkpointing, adapters, sharding."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from jettison.frameworks.config_file import ConfigFile
from jettison.frameworks.run_file import Keys, launched, table_of
from jettison.spec.fine_tuning import TARGETS

MICRO_BATCH: Final = 8
"""transformers/training_args.py, ``per_device_train_batch_size``."""
DEFAULT_TARGETS: Final = "q_proj+v_proj+qkv_proj"
"""PEFT's default target modules (0.21, ``utils/constants.py``), as far as a model has them."""


def reduces_last(keys: Keys, *, synced: bool = False, remedy: str = "sync_each_batch", preset: bool = True) -> None:
    """Read when FSDP reduces the gradients of several micro-batches: in the last one, unless the file says otherwise.

    accelerate 1.15, ``accelerator.py``, ``no_sync``: FSDP1's, and since 1.11 ``set_requires_gradient_sync`` of FSDP2.

    Args:
        synced: gradients are reduced in each micro-batch.
        remedy: the setting of the framework that does so.
        preset: the framework's preset has the last one.
    """
    sharded = keys.field("zero") == 3 and keys.field("dp", 1) > 1 and keys.said("like") != "deepspeed"
    if not sharded or keys.field("micro_batches", 1) == 1 or keys.field("pp", 1) > 1:
        return
    if synced or not preset:
        keys.give("gradient_sync", "each" if synced else "last")
    if not synced and keys.field("gradient_sync") != "each" and keys.field("lora") is None:
        keys.note(
            "FSDP keeps the whole model's gradients unsharded until a step's last micro-batch, which is counted; with "
            f"{remedy}, or FSDP2 by accelerate before 1.11, it reduces them in each: --gradient-sync each counts that"
        )


def pipeline(keys: Keys, prefix: str = "") -> None:
    """Read a pipeline of DeepSpeed: ``runtime/config.py``, ``get_pipeline_config``; ``runtime/pipe/engine.py``.

    ``PipelineModule`` decides the stages, whatever the file says; a model that is none ignores all of it. Under a
    prefix another file has the stages and the checkpoints.
    """
    name = f"{prefix}pipeline."
    if not prefix:
        if keys.text(f"{name}stages").isdecimal():
            keys.give("pp", keys.whole(f"{name}stages"), f"{name}stages")
        if (interval := keys.whole(f"{name}activation_checkpoint_interval", 0) or 0) > 0:
            mode = "full" if interval == 1 else f"every:{interval}"
            keys.give("recompute", mode, f"{name}activation_checkpoint_interval")
            keys.give("reentrant", keys.on(f"{name}use_reentrant", True) or None, f"{name}use_reentrant")
    if keys.field("pp", 1) == 1:
        return
    for key in (f"{prefix}zero_optimization.stage", "zero_stage") if keys.field("zero", 0) > 1 else ():
        keys.refuse(key, "DeepSpeed's pipelines take ZeRO 0 and 1")
    for key in (f"{name}pipe_partitioned", f"{name}grad_partitioned"):
        if keys.field("tp", 1) > 1 and not keys.on(key, True):
            keys.refuse(key, "tensors that are sent unpartitioned are not modelled")


def devices(keys: Keys, each: str, nodes: str, default: str = "auto") -> int:
    """Read the number of GPUs, all of them data-parallel, by the keys of those of a node and of the nodes."""
    said = keys.get(each, default)
    listed = isinstance(said, list) or "," in str(said)
    count = len(keys.listed(each)) if listed else int(said) if str(said).isdecimal() else 0
    total = count * (keys.whole(nodes, 1) or 1)
    keys.gpus = (total or None) if keys.gpus is None else keys.gpus
    if total and keys.gpus != total:
        keys.note(f"the file has {total} GPUs; {keys.gpus} are counted")
    found = keys.share()
    keys.give("dp", found, each, nodes)
    return found


def replicas(keys: Keys) -> None:
    """Read the number of replicas and the sequences of a step; one GPU by default, unless the run shards."""
    for key in ("num_processes", "accelerate.num_processes"):
        if keys.gpus is None and (said := keys.whole(key)) is not None:
            keys.gpus = said
            keys.read(key, why=f"{said} GPUs")
        keys.read(key)
    each, nodes = launched(keys.values)
    if keys.gpus is None and each:
        if nodes is None:
            keys.note("it does not say on how many nodes it runs: one is counted; give --gpus for more")
        keys.gpus = each * (nodes or 1)
    seen, why = keys.text("$CUDA_VISIBLE_DEVICES"), keys.table.get("fewer_processes")
    if why and keys.gpus_asked is None and each is not None and seen.count(",") >= (each or 1):
        keys.refuse("$CUDA_VISIBLE_DEVICES", why)
    if keys.gpus is None:
        keys.gpus = _visible(keys)
    alone = all(keys.field(axis, 1) == 1 for axis in ("tp", "pp", "cp"))
    if keys.gpus is None and not keys.field("zero") and keys.asked.get("dp") is None and alone:
        keys.gpus = 1
        keys.note("it does not say on how many GPUs it runs: one is counted; give --gpus for more")
    dp = keys.share("tp", "pp", "cp")
    if dp > 1 or keys.field("zero"):
        keys.give("dp", dp)
    if 0 < (keys.whole("shard_size") or 0) < (keys.gpus or 1):
        keys.give("zero_replicas", (keys.gpus or 1) // (keys.whole("shard_size") or 1), "shard_size")
    if (whole := keys.whole("sequences_a_step")) and keys.field("micro_batches") is None:
        size = max(1, keys.field("micro_batch", 1)) * keys.sequences_a_row
        keys.give("micro_batches", max(1, -(-whole // size // dp)), "sequences_a_step")
        said = keys.written("sequences_a_step") in keys.file.values and not keys.get("tokens_per_gpu")
        if said and whole % (size * dp):
            keys.refuse("sequences_a_step", f"expected a multiple of {size} x {dp}, the micro-batches of all ranks")
    sync = re.search("sync_each_batch[^a-z]+(true|[a-z0-9.]*)", str(keys.values).lower())
    reduces_last(keys, synced=sync is not None and sync[1] == "true")


def _visible(keys: Keys) -> int | None:
    """Return the number of GPUs that DeepSpeed's ``--include host:0,1`` or CUDA_VISIBLE_DEVICES of a launcher names."""
    hosts = [host.partition(":")[2] for host in keys.text("include").split("@")]
    launched = keys.some("$torchrun", "$accelerate", "$deepspeed", "$axolotl", "$trl", "$llamafactory?cli")
    names = hosts if all(hosts) else [str(keys.values.get("$CUDA_VISIBLE_DEVICES"))] if launched else []
    known = names and all(re.fullmatch(r"\d+(,\d+)*", one) for one in names)
    return sum(one.count(",") + 1 for one in names) if known else None


def half(keys: Keys, *, default: bool = False) -> bool:
    """Whether matmuls run in 16 bits under autocast. They do by default in TRL's trainers."""
    bf16, fp16 = keys.on("bf16", default and not keys.on("fp16")), keys.on("fp16")
    asked = keys.text("accelerate.mixed_precision", keys.text("mixed_precision", "no"))
    if (fp16 and not bf16) or asked == "fp16":
        keys.note("fp16 is counted as bf16, which takes the same bytes; its loss scale is not counted")
    for key in ("accelerate.mixed_precision", "mixed_precision") if asked == "fp8" else ():
        keys.refuse(key, "FP8 by accelerate (torchao under autocast, or TransformerEngine) is not modelled")
    return bf16 or fp16 or asked in ("bf16", "fp16")


def precision(keys: Keys, *, weights: str, mixed: bool, upcast: bool = True) -> None:
    """Read the precision of weights and of compute.

    Args:
        weights: dtype in which weights are loaded, fp32 or bf16.
        mixed: matmuls run in 16 bits under autocast.
        upcast: FSDP casts weights to fp32.
    """
    deepspeed, tuned = keys.said("like") == "deepspeed", keys.field("lora") is not None
    if deepspeed and mixed and keys.field("like") != "deepspeed":
        keys.give("precision", "bf16")  # the engine runs under another preset, too
    if keys.field("precision") is not None or (deepspeed and mixed):
        return  # the framework's own precision, or the engine's bf16, which is the preset's
    if upcast and not deepspeed and mixed and not tuned and keys.field("zero", 0) == 3:
        weights = "fp32"  # accelerate/utils/fsdp_utils.py, ``fsdp2_prepare_model``: upcast for the optimizer
    if tuned and weights == "fp32" and keys.field("base") is None:
        keys.give("base", "fp32")
    if mixed and (tuned or weights == "fp32"):
        keys.give("precision", "bf16-autocast")
    else:
        keys.give("precision", "bf16-pure" if weights == "bf16" else "fp32")
        if tuned and weights == "bf16":
            keys.give("adapter_dtype", "fp32")  # PEFT's ``autocast_adapter_dtype``


def optimizer(keys: Keys, key: str, default: str) -> None:
    """Set the default optimizer unless a key sets one; under DeepSpeed any AdamW steps on copies of gradients.

    Before transformers 4.54 AdamW was torch's, by foreach kernels, and not the fused one (``OptimizerNames``).
    """
    if keys.has("evaluation_strategy") and key == "optim":
        default = "adamw-foreach"
    if not keys.has(key) and keys.field("optimizer") is None:
        keys.give("optimizer", default)
    if keys.said("optimizer") == "adam8bit-trainer" and "embed" not in keys.field("lora", "embed"):
        keys.drop("optimizer")
        keys.give("optimizer", "adam8bit", key)  # embeddings are frozen
    if keys.said("like") == "deepspeed" and keys.field("optimizer") in ("adamw", "adamw-foreach"):
        keys.drop("optimizer")
    elif keys.said("optimizer") == "adamw-foreach" and keys.field("offload_optimizer") is not None:
        keys.give("optimizer", "adamw", key)  # torch's foreach kernels are the default on GPUs only


def layer_checkpoints(keys: Keys, mode_key: str, option_key: str, usual: str, option: str = "2") -> None:
    """Read torchtitan's mode of checkpointing, and its option of selective; ``usual`` and ``option`` by default."""
    mode, option = keys.text(mode_key, usual), keys.text(option_key, option)
    if mode in ("none", "full"):
        keys.give("recompute", mode, mode_key)
    elif mode == "selective" and re.fullmatch("op|[1-9][0-9]*", option):
        word = {"op": "selective-op-alternate", "1": "full"}.get(option, f"interval:{option}")
        keys.give("recompute", word, mode_key, option_key)
    else:
        where = option_key if mode == "selective" else mode_key
        keys.refuse(where, "expected one of none, full, or selective with op or a number")


def checkpointing(keys: Keys, *, default: bool = False) -> None:
    """Read activation checkpointing."""
    key = "activation_checkpointing" if keys.has("activation_checkpointing") else "gradient_checkpointing"
    on = keys.on(key, default)
    if keys.field("recompute") is None or on:
        keys.give("recompute", "full" if on else "none", key)
    for kwargs in ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"):
        value = keys.get(kwargs)
        keys.read(f"{kwargs}.use_reentrant")
        if value not in (None, {}, ""):  # a command line's text; in a file they are keys of their own
            own = str(value).replace('"', "'")
            if not re.fullmatch(r"\{'use_reentrant': ?(true|false)\}", own.lower()):
                keys.refuse(kwargs, "of these only use_reentrant is read, which changes nothing here")
        for other in {*keys.matching(f"{kwargs}.*")} - {f"{kwargs}.use_reentrant"}:
            keys.refuse(other, "selective checkpoints of a Trainer are not read")


def reentrant(keys: Keys, *, default: bool = False) -> None:
    """Read reentrant checkpoints if they matter: they free tensors that bitsandbytes' 8-bit matmuls save.

    Not under FSDP: since transformers 4.53 checkpoints are inside its units, and ``reentrant`` means around them.
    """
    key = "gradient_checkpointing_kwargs.use_reentrant"
    inside = "'use_reentrant': true" in str(keys.values.get("gradient_checkpointing_kwargs")).replace('"', "'").lower()
    on = keys.on(key, default) if keys.has(key) else inside or default
    if on and keys.field("base") == "int8" and keys.field("recompute") == "full" and keys.field("zero", 0) < 3:
        keys.give("reentrant", True, key)


def preference(
    keys: Keys, batch: str, default: int, *came_from: str, loss: str = "dpo", reference: str | None = "same"
) -> None:
    """Set DPO: pairs of sequences, and a reference, which is the base model if there are adapters.

    Args:
        batch: key of the number of pairs; ``default``: without it.
        came_from: keys that ask for DPO.
        loss, reference: as ``--loss`` and ``--reference``.
    """
    keys.give("micro_batch", 2 * keys.field("micro_batch", default), batch)
    keys.give("loss", loss, *came_from)
    if reference is not None:
        before = ",when=before" if keys.on("precompute_ref_log_probs") else ""
        # a model that is given is kept
        within = keys.field("lora") is not None and not keys.some("$*Trainer.ref_model")
        keys.give("reference", "base" if within else reference + before, *came_from, "precompute_ref_log_probs")


def low_rank(keys: Keys, rank: str, ranks: int, dropout: str, share: float, targets: str, *came_from: str) -> None:
    """Set adapters, and modules that are trained in full; alpha changes no bytes.

    Args:
        rank, dropout: their keys. ``ranks``, ``share``: the defaults of these.
    """
    dropped = f",dropout={found:g}" if (found := keys.number(dropout, share)) else ""
    key, names = "lora_modules_to_save", table_of("transformers")["modules_to_save"]
    full = [str(one).rpartition(".")[2] for one in keys.listed(key)]
    for one in {*full} - {*names}:
        keys.refuse(key, f"{one} is no known embedding or head; expected some of {', '.join(names)}")
    saved = "+".join(sorted({names[one] for one in full if one in names}))
    made = f"r={keys.whole(rank, ranks)},targets={targets}{dropped}{f',modules_to_save={saved}' if saved else ''}"
    keys.give("lora", made, rank, dropout, key, *came_from)


def resumed(keys: Keys, key: str) -> None:
    """Read adapters that training resumes: their own rank and targets count, and not the file's."""
    folder = str(keys.get(key) or "").rpartition(",")[2].strip()
    if not folder or not keys.on("use_peft"):
        return
    keys.values["$adapters"] = f"{folder}/adapter_config.json"
    if (file := keys.named("$adapters")) is None:
        keys.note(f"{folder} is not here: rank and targets of its adapters count in a run: give --lora for others")
        return
    names = ("r", "lora_dropout", "target_modules", "modules_to_save")
    own = {name: f"lora_{name.removeprefix('lora_')}" for name in names}
    keys.values = {key: value for key, value in keys.values.items() if key not in own.values()}
    keys.values |= {name: value for theirs, name in own.items() if (value := file.values.get(theirs)) is not None}


def without_adapters(keys: Keys, *globs: str) -> None:
    """Read a run without adapters, whose keys match ``globs``, or with some that are refused."""
    keys.read(*keys.matching(*globs), why="no adapters")
    keys.refuse("$requires_grad", "parameters frozen by hand are not modelled")
    for key in keys.matching("load_in_4bit", "load_in_8bit", "quantization_bit"):
        if keys.on(key) and not keys.has("adapter"):
            keys.refuse(key, "quantized weights cannot be trained without an adapter")


def full_length(keys: Keys, *, packed: bool, expands: bool = False) -> None:
    """Note that every sequence is counted at its maximum length; ``expands``: the trainer sets expandable segments."""
    if packed:
        keys.note("packed sequences are counted as one document each; --packed sets the length of documents")
    else:
        keys.give("pad_to_longest", None if expands else True)
        keys.note("every sequence is counted at its maximum length; if none is as long, give the longest as --seq")


def targets(keys: Keys, key: str, default: str) -> str:
    """Return the adapters' target modules as ``--lora`` takes them. Patterns must end in a list of names."""
    value = keys.get(key)
    if value is None or value == []:
        return default
    several = keys.listed(key) if isinstance(value, str | list) else [value]
    names = [name for one in several for name in str(one).split()]
    found: list[str] = []
    every = {"all", "all-linear", "all_linear"}.intersection(map(str.lower, names))
    for name in (one for one in names if one.lower() not in every):
        listed = re.search(r"\(([\w|]+)\)(\w*)[)$]*$", name)
        found += [one + listed[2] for one in listed[1].split("|")] if listed else [name.rpartition(".")[2]]
    if unknown := [name for name in found if name not in TARGETS]:
        keys.refuse(key, f"{unknown[0]} is no known target of adapters; expected some of {', '.join(TARGETS)}")
        return default
    return "all-linear" if every else "+".join(dict.fromkeys(found))


def follow(keys: Keys, key: str, framework: str, prefix: str) -> None:
    """Read the file of a key, unless given; refuse a missing one that is not the framework's own (``shipped``)."""
    value = keys.values.get(key)
    if (file := keys.named(key)) is None and isinstance(value, str) and not (prefix and keys.some(f"{prefix}*")):
        for name, values in keys.table.get("shipped", {}).items():
            if f"/{value}".endswith(f"/{name}"):
                file = ConfigFile(path=Path(value), text="", syntax="json", values=values)
                keys.note(f"{value} is not here: the file of that name that comes with the framework is counted")
    if file is not None:
        keys.read(key, why="that file")
        keys.under(framework, prefix, file)
    elif isinstance(value, str) and not (prefix and keys.some(f"{prefix}*")):
        keys.refuse(key, "file not found: give it as a second --from")


def sharding(keys: Keys, *, version: int | None = None) -> None:
    """Read FSDP or DeepSpeed from the Trainer's own keys, from accelerate's or from a second file.

    Args:
        version: default of FSDP; None: transformers', 2 (``training_args.py``, ``_process_fsdp_args``), 1 before 5.
    """
    older = next(filter(keys.has, table_of("transformers")["before_5"]), "") if version is None else ""
    version = version or (1 if older else 2)
    given = keys.some("deepspeed.*")
    for key in ("deepspeed", "deepspeed_config_file", "deepspeed_config"):
        follow(keys, key, "deepspeed", "deepspeed.")
    if given:
        keys.under("deepspeed", "deepspeed.")
    for key, own in (("zero_stage", "zero_stage"), ("offload_optimizer_device",) * 2, ("offload_param_device",) * 2):
        if keys.has(key):  # accelerate launch's own flags
            keys.values[f"launch.deepspeed_config.{own}"] = keys.get(key)
            keys.read(key, why="as in accelerate's configuration")
    if keys.some("launch.*"):
        keys.under("accelerate", "launch.")
    if (file := keys.named("fsdp")) is not None:  # ``swift/arguments/sft_args.py``, ``_init_fsdp``
        inside = {key: value for key, value in file.values.items() if key.startswith("fsdp")}
        keys.values |= {"fsdp": "full_shard auto_wrap", **inside}
    elif keys.text("fsdp").endswith(".json"):
        keys.refuse("fsdp", "file not found, which has the sharding")
    words = keys.get("fsdp")
    words = " ".join(map(str, words)) if isinstance(words, list) else str(words or "").lower()
    if words not in ("", "false"):
        follow(keys, "fsdp_config", "accelerate", "fsdp_config.")
        keys.read("fsdp")
        fsdp(keys, "fsdp_config.", words=words, version=version)
        if older and keys.said("fsdp_version") == 1:
            keys.note(f"{keys.written(older)} means transformers before 5, whose FSDP is FSDP1")
    elif any(keys.on(key) for key in keys.matching("use_fsdp")):
        fsdp(keys, "fsdp_", version=1)
    elif keys.said("like") != "deepspeed":
        keys.refuse("use_deepspeed", "no key has its settings: give DeepSpeed's JSON as a second --from")


def fsdp(keys: Keys, prefix: str, *, words: str = "", version: int = 2) -> None:
    """Read FSDP's options; keys are accelerate's (``fsdp_offload_params``) or a Trainer's (``offload_params``).

    Args:
        words: value of a Trainer's older ``fsdp``: full_shard auto_wrap offload.
        version: default of FSDP.
    """

    def key(*names: str) -> str:
        ways = [f"{prefix}{way}{name}" for name in names for way in ("fsdp_", "")]
        return next((way for way in ways if keys.has(way)), ways[-1])

    keys.give("zero", 3, key("version"))
    first = keys.whole(key("version"), version) == 1
    sharded = keys.text(key("sharding_strategy"), "")
    again = keys.text(key("reshard_after_forward"), "true")
    sharded = sharded or (again if again not in ("true", "false") else "")
    words_of = f"{words} {sharded.lower()}"
    if "hybrid" in words_of or sharded in ("4", "5"):
        where = key("sharding_strategy", "reshard_after_forward")
        keys.refuse(where, "hybrid shards are not read: give --zero-replicas")
    if "no_shard" in words_of or sharded == "3":
        keys.give("zero", 0, key("sharding_strategy"))
    elif "shard_grad_op" in words_of or sharded == "2" or again == "false":
        keys.give("reshard_after_forward", "never", key("reshard_after_forward"), key("sharding_strategy"))
    if keys.on(key("offload_params", "cpu_offload")) or "offload" in words.split():
        keys.give("offload_optimizer", "fsdp1" if first else "fsdp2", key("offload_params", "cpu_offload"))
    if keys.on(key("activation_checkpointing")):
        keys.give("recompute", "full", key("activation_checkpointing"))
    whole = first and keys.field("lora") is None and keys.field("reshard_after_forward") != "never"
    wrapped = keys.text(key("auto_wrap_policy"), "")
    if whole and (wrapped == "no_wrap" or (words and not wrapped and "auto_wrap" not in words)):
        keys.give("fsdp_one_unit", True, key("auto_wrap_policy"))
    elif wrapped not in ("", "transformer_based_wrap"):
        keys.refuse(key("auto_wrap_policy"), "only layers are modelled as FSDP units: TRANSFORMER_BASED_WRAP")
    if first and keys.field("zero") == 3 and keys.field("reshard_after_forward") == "never":
        keys.note("units that stay unsharded after a forward are counted as FSDP2's")
    elif first and keys.field("zero") == 3:
        keys.give("fsdp_version", 1, key("version"))
    harmless = table_of("accelerate")["harmless"]
    keys.read(*(key for key in keys.matching(f"{prefix}*") if re.fullmatch(harmless, key[len(prefix) :])))


def zero_buckets(keys: Keys, prefix: str, **defaults: int) -> None:
    """Read DeepSpeed's live parameters and gradient buckets; "auto" is what transformers derives from the hidden size.

    Args:
        defaults: values of absent keys, where a framework passes its own to DeepSpeed.
    """
    stage = keys.field("zero", 0)
    parts: dict[str, str] = {}
    for name, key in table_of("deepspeed")["sizes"].items():
        for there in (f"{prefix}{key}", f"{prefix}{key.removeprefix('stage3_')}"):
            size = "auto" if keys.text(there) == "auto" else keys.whole(there, defaults.get(key))
            if size is not None and (stage == 3 or name == "reduce"):
                parts[there] = f"{name}={size}"
    overlap, contiguous = f"{prefix}overlap_comm", f"{prefix}contiguous_gradients"
    if not keys.on(contiguous, True):
        parts[contiguous] = "buckets=0"
    elif keys.on(overlap, bool(defaults.get("overlap_comm"))) and stage < 3:
        parts[overlap] = "buckets=2"  # stage_1_and_2.py, ``setup_buckets``; stage3.py has one
    if stage and parts:
        keys.give("zero_buckets", ",".join(dict.fromkeys(parts.values())), *parts)


def offloads(keys: Keys, optimizer: str, parameters: str) -> None:
    """Read the CPU offload of optimizer states and parameters."""
    places = {key: keys.text(key, "none") for key in (optimizer, parameters)}
    if keys.field("zero", 0) < 3:  # ``runtime/zero/config.py``: ``offload_param`` is "valid only with stage 3"
        places[parameters] = "none"
    for key, place in places.items():
        if place not in ("none", "cpu", "auto"):
            keys.refuse(key, f"{place} is not modelled; expected cpu or none")
    if places[parameters] == "cpu" and places[optimizer] == "cpu":
        keys.give("offload_optimizer", "deepspeed-parameters", optimizer, parameters)
    elif places[parameters] == "cpu":
        keys.refuse(parameters, "CPU offload of parameters without the optimizer's states is not modelled")
    elif places[optimizer] == "cpu":
        keys.give("offload_optimizer", "deepspeed", optimizer)
