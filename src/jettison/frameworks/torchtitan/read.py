"""Reader of torchtitan's TOML, or of a function of its Python configurations.

Read: torchtitan v0.2.2 (February 2026), torchtitan/config/job_config.py and its predecessors for the TOML;
torchtitan/models/llama3/infra/parallelize.py (apply_fsdp, apply_ddp, apply_compile),
torchtitan/distributed/pipeline_parallel.py (generate_llm_fqn_per_model_part, build_pipeline_schedule),
torchtitan/distributed/utils.py (maybe_enable_amp), torchtitan/distributed/activation_checkpoint.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from itertools import pairwise
from math import prod
from typing import Any, Final

from jettison.core.errors import UsageError
from jettison.frameworks.config_file import split_name
from jettison.frameworks.run_file import Keys, models
from jettison.frameworks.trainer_keys import layer_checkpoints

_OLD: Final = ("training.batch_size", "training.compile", "model.norm_type", "experimental.*parallel*")
"""Keys of versions before 28 July 2025, when FSDP's units and the norm's kernel changed."""
_LOOPED: Final = {"interleaved1f1b": "1f1b", "interleavedzerobubble": "zero-bubble", "zbvzerobubble": "zero-bubble-v"}
_FLEX: Final = re.compile(r"_(flex_attn|flex|varlen_attn|varlen)$")
_TOKENS: Final = "training.num_tokens_per_microbatch_per_dp_rank"
_LONGEST: Final = "training.max_context_length"
_KEPT_IN_16_BITS: Final = ("output", "lm_head", "router.gate", "moe.router.gate", "auto_filter_small_kn")
"""Linear layers that torchao keeps in 16 bits; only the time of small GEMMs depends on them."""


def read(keys: Keys) -> None:
    """Read the keys without a table form."""
    python = keys.form == "python"
    depth = _model(keys)
    _layout(keys)
    (_tokens if keys.has(_TOKENS) or keys.has(_LONGEST) else _batch)(keys)
    if keys.field("pp", 1) > 1:
        _pipeline(keys, depth)
    else:
        keys.read(
            *keys.matching("*.pipeline_parallel_*", "parallelism.module_fqns_per_model_part", "*.num_pp_microbatches")
        )
    (_policy if python else _recompute)(keys)
    _converters(keys)
    _others(keys)


def _model_and_flavor(keys: Keys) -> tuple[str, str, tuple[str, ...]]:
    """Return the model's name, its flavor, and their keys.

    Of ``model_spec=model_registry("8B")`` the folder names the model: models/NAME/config_registry.py.
    """
    if keys.form != "python":
        named_by = ("model.name", "model.flavor")
        return keys.text(named_by[0], "llama3"), keys.text(named_by[1], "debugmodel"), named_by
    flavor_key = "model_spec.flavor" if keys.has("model_spec.flavor") else "model_spec.0"
    by = keys.text("model_spec").removesuffix("model_registry").rstrip("_")
    path, function = split_name(keys.file.path)
    folder = path.resolve().parent.name.lower()
    longest = sorted(models("torchtitan"), key=len, reverse=True)
    known = [one for one in longest if one == (by or folder)]
    known = known or [one for one in longest if (function or "").startswith(one)]
    return (known or [by or folder])[0], keys.text(flavor_key, "debugmodel"), ("model_spec", flavor_key)


def _model(keys: Keys) -> int:
    """Find the model, and return its number of layers; 0 if unknown."""
    name, flavor, named_by = _model_and_flavor(keys)
    name = models("torchtitan")["names"].get(name, name)
    flavors = models("torchtitan").get(name, {})
    for key in ("hf_transformers.model", "hf_model"):  # transformers' model code under torchtitan's trainer
        if keys.has(key):
            keys.model = str(keys.get(key))
            keys.read(*named_by, key, why=keys.model)
            keys.give("kernels", "huggingface")
            return 0
    kernel = _FLEX.search(flavor)
    if kernel and flavor not in flavors:
        flavor = flavor[: kernel.start()]
        keys.give("attention", "flex" if kernel[1].startswith("flex") else "flash", named_by[-1])
    sizes = flavors.get(flavor)
    if sizes is None:
        keys.read(*named_by)
        keys.notes.append(f"the sizes of torchtitan's {name} {flavor} are unknown; give the model by name")
        return 0
    return keys.take_model(sizes, *named_by)["num_hidden_layers"]


def _key_of(keys: Keys, name: str) -> str:
    """Return the key of an option of parallelism, whose section was renamed twice."""
    sections = ("parallelism", "training", "experimental")
    return next((f"{one}.{name}" for one in sections if keys.has(f"{one}.{name}")), f"parallelism.{name}")


def _layout(keys: Keys) -> None:
    replicate_key, shard_key = (_key_of(keys, f"data_parallel_{kind}_degree") for kind in ("replicate", "shard"))
    if keys.has("training.data_parallel_degree"):
        shard_key = "training.data_parallel_degree"
        if keys.text("training.data_parallel_type", "fsdp") == "ddp":
            replicate_key, shard_key = shard_key, replicate_key
    each = prod(keys.field(axis, 1) for axis in ("tp", "pp", "cp"))
    if keys.whole(replicate_key) == -1:  # DDP over all devices
        replicas, shards = keys.share("tp", "pp", "cp"), 1
    else:
        replicas, shards = keys.shards(replicate_key, shard_key, "tp", "pp", "cp")
    if "dp" not in keys.asked and keys.gpus and keys.share("tp", "pp", "cp") != replicas * shards:
        needed = f"{keys.file.path}, whose degrees need {replicas * shards * each}"
        raise UsageError(f"got {keys.gpus} GPUs for {needed}; omit --gpus, or give --dp")
    keys.give("dp", replicas * shards, shard_key, replicate_key)
    if keys.gpus is None:
        keys.gpus = keys.field("dp", 1) * each
    if shards > 1 or keys.field("cp", 1) > 1 or keys.form == "python":  # fully_shard
        if replicas > 1:
            keys.give("zero_replicas", replicas, replicate_key)
    else:
        keys.drop("reshard_after_forward")
        keys.drop("reduce_dtype")
        keys.give("zero", 0)
        if replicas > 1:
            keys.give("gradients", "buckets", replicate_key)
        old = next(keys.matching(*_OLD), "")  # autocast is of 0b44d4c4, June 2025
        if old or keys.field("tp", 1) > 1 or keys.field("pp", 1) > 1:
            keys.give("precision", keys.said("precision") or "fp32")
            why = f"in a version that has {old}" if old else "with tensor or pipeline parallelism"
            keys.notes.append(f"without FSDP torchtitan has no mixed precision {why}")
    if keys.field("cp", 1) > 1:
        key = _key_of(keys, "context_parallel_rotate_method")
        keys.give("cp_comm_type", "ring" if keys.text(key, "allgather") == "alltoall" else "gather", key)
    experts = keys.whole("parallelism.expert_parallel_degree", 1) or 1
    if experts > 1:
        keys.give("ep", experts, "parallelism.expert_parallel_degree")
        if keys.field("tp", 1) > 1:
            key = "parallelism.expert_tensor_parallel_degree"
            keys.give("expert_tp", keys.whole(key, 1) or 1, key)


def _batch(keys: Keys) -> None:
    """Read the sequences of a rank's forward and the forwards of a step; by default 8 sequences of 2048 tokens."""
    key = "training.batch_size" if keys.has("training.batch_size") else "training.local_batch_size"
    local = keys.whole(key, 8) or 8
    keys.give("micro_batch", local, key)
    local = keys.field("micro_batch", local)
    keys.give("seq", keys.field("seq", 2048))
    total = "training.global_batch_size"
    if (keys.whole(total) or -1) > 0:
        keys.give("micro_batches", keys.repeats(total, local), total)
    else:
        keys.global_batch = local * keys.field("dp", 1)


def _tokens(keys: Keys) -> None:
    """Since 73aed7f6 (August 2026) a batch is one row of tokens; documents in it are at most so long."""
    tokens, longest = keys.whole(_TOKENS, 16384) or 16384, keys.whole(_LONGEST, 2048) or 2048
    longest = longest if tokens % longest == 0 else tokens
    keys.give("seq", longest, _LONGEST)
    longest = keys.field("seq", longest)
    keys.give("micro_batch", max(1, tokens // longest), _TOKENS)
    tokens = keys.field("micro_batch", 1) * longest
    passes = keys.whole("parallelism.num_pp_microbatches", 1) or 1 if keys.field("pp", 1) > 1 else 1
    total_key = "training.num_tokens_per_train_step"
    total = keys.whole(total_key, -1) or -1
    step = tokens * keys.field("dp", 1) * passes
    if total > 0:
        if total % step:
            raise keys.error(f"got {total_key} = {total}; expected a multiple of {step} tokens of a pass")
        keys.give("micro_batches", total // step, total_key)
    keys.global_batch = max(total, step) // longest


def _pipeline(keys: Keys, depth: int) -> None:
    pp = keys.field("pp", 1)
    local, repeats = keys.field("micro_batch", 1), keys.field("micro_batches", 1)
    number_key = _key_of(keys, "pipeline_parallel_microbatches")
    if keys.has(_TOKENS) or keys.has(_LONGEST):
        key = "parallelism.num_pp_microbatches"
        size, number = local, keys.whole(key, 1) or 1
    elif (
        number_key.startswith("experimental")
        or keys.has(number_key)
        or keys.has("experimental.pipeline_parallel_degree")
    ):
        number = keys.whole(number_key, pp) or pp
        size, key = max(1, local // number), number_key
    else:
        key = "parallelism.pipeline_parallel_microbatch_size"
        size = keys.whole(key, 1) or 1
        number = max(1, local // size)
    if local % size:
        raise keys.error(f"a batch of {local} sequences, which {key} = {size} does not divide")
    if "micro_batch" not in keys.asked:
        keys.give("micro_batch", size, key)
        keys.give("micro_batches", number, key)
    if repeats > 1:
        keys.note(f"a step of {repeats} passes through the pipeline is counted as one: tokens per second are equal")
    schedule_key = _key_of(keys, "pipeline_parallel_schedule")
    schedule = keys.text(schedule_key, "1f1b")
    looped = schedule in _LOOPED
    if schedule in ("1f1b", "gpipe") or looped:
        keys.give("schedule", _LOOPED.get(schedule, schedule), schedule_key)
    else:
        keys.refuse(schedule_key, f"expected one of 1F1B, GPipe, {', '.join(_LOOPED)}")
    cut = _stage_layers(keys, depth, pp, 2 if looped else 1)
    virtual = max(1, len(cut) // pp) if cut else 2 if looped else 1
    if virtual > 1:
        keys.give("virtual_stages", virtual, schedule_key)
    if cut and "pp" not in keys.asked and "virtual_stages" not in keys.asked:
        keys.give("stage_layers", ",".join(map(str, cut)))


def _stage_layers(keys: Keys, depth: int, pp: int, virtual: int) -> list[int]:
    """Layers of each stage: as listed, or by generate_llm_fqn_per_model_part."""
    parts_key, points_key = "parallelism.module_fqns_per_model_part", _key_of(keys, "pipeline_parallel_split_points")
    first, last, each = (
        keys.whole(f"parallelism.pipeline_parallel_{name}", default)
        for name, default in (("first_stage_less_layers", 1), ("last_stage_less_layers", 1), ("layers_per_stage", None))
    )
    parts, points = keys.get(parts_key), keys.get(points_key)
    if isinstance(parts, list) and parts:
        keys.read(parts_key, why="--stage-layers")
        return [sum(str(name).startswith("layers.") for name in part) for part in parts if isinstance(part, list)]
    if not depth:
        return []
    if points:
        listed = points.split(",") if isinstance(points, str) else points
        starts = [re.fullmatch(r"layers\.(\d+)", str(one).strip()) for one in listed]
        if not all(starts):
            keys.refuse(points_key, "expected layers.N")
            return []
        keys.read(points_key, why="--stage-layers")
        edges = [0, *(int(one[1]) for one in starts if one), depth]
        return [end - begin for begin, end in pairwise(edges)]
    first, last = first or 0, last or 0
    stages = -(-(depth + first + last) // each) if each else pp * virtual
    if stages % pp or stages > depth + first + last:
        raise keys.error(f"{stages} stages of {depth} layers do not fit {pp} pipeline ranks")
    share, more = divmod(depth + first + last, stages)
    found = [share + (at < more) for at in range(stages)]
    found[0] -= first
    found[-1] -= last
    even = len(set(found)) == 1
    return [] if even and stages == pp * virtual and not each else found


def _recompute(keys: Keys, usual: str = "2") -> None:
    """Read the checkpointing mode. ``usual``: the default option of selective."""
    mode_key = "activation_checkpoint.mode"
    recomputed = "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns"
    if keys.text(mode_key) == "memory_budget":
        keys.refuse(mode_key, "the compiler chooses recomputation; give --recompute")
        return
    keys.read(recomputed, "activation_checkpoint.memory_budget")
    layer_checkpoints(keys, mode_key, "activation_checkpoint.selective_ac_option", "selective", usual)
    if keys.said("recompute") == "selective-op-alternate" and keys.get(recomputed, []) not in ([], ["moe.router.gate"]):
        keys.refuse(recomputed, "expected none, or moe.router.gate, whose GEMMs are small")


def _policy(keys: Keys) -> None:
    """Read a policy's class, or ActivationCheckpointConfig with the TOML's keys; the default is per-op selective.

    From 114151ad (March 2026) on; before, the default was to checkpoint every second layer.
    """
    key = "activation_checkpoint"
    if key in keys.values and keys.values[key] is None:
        keys.give("recompute", "none", key)
        keys.get(key)
        return
    policy = keys.text(key, "selectiveac.config").removesuffix(".config")
    if policy == "activationcheckpointconfig":
        _recompute(keys, "op")
    elif policy == "fullac":
        keys.give("recompute", "full", key)
    elif policy == "selectiveac":
        keys.give("recompute", "selective-op-alternate", key)
        names = keys.get(f"{key}.force_recompute_mm_shapes_by_fqns", ["moe.router.gate"])
        if names not in ([], ["moe.router.gate"]):
            keys.refuse(f"{key}.force_recompute_mm_shapes_by_fqns", "expected none, or moe.router.gate")
    else:
        keys.refuse(key, "expected None, FullAC.Config() or SelectiveAC.Config(); else give --recompute")


def _converters(keys: Keys) -> None:
    """Read the converters of a model's configuration, each a call with its arguments, or in TOML with its section."""
    key = "model.converters"
    if python := keys.form == "python":
        key = next(keys.matching("model_spec.converters", "model_spec.quantization", "model_converters.converters"), "")
    found = keys.get(key, []) if python else _sections(keys, key)
    if not isinstance(found, list):
        keys.refuse(key, "expected a list of converters")
        return
    for one in found:
        name = str(one.get("", "")).removesuffix(".Config") if isinstance(one, Mapping) else str(one)
        if name == "Float8LinearConverter":
            # tensorwise was the default, with all-gathers in FP8, until only rowwise recipes remained
            fp8_gathers = one.get("enable_fsdp_float8_all_gather") is True
            old = key in ("model_converters.converters", "model.converters")
            recipe = str(one.get("recipe_name") or ("tensorwise" if old else "rowwise"))
            keys.give("fp8_recipe", recipe, key, *one.get("from", ()))
            if fp8_gathers and recipe == "tensorwise":
                keys.give("fp8_param_gather", True, key)
            why = _unmodelled_choice(one, "filter_fqns", _KEPT_IN_16_BITS)
        elif name in ("MXFP8LinearConverter", "MXLinearConverter"):
            recipe = str(one.get("recipe_name") or "mxfp8")
            keys.give("fp8_recipe", "mxfp8" if recipe.startswith("mxfp8") else recipe, key, *one.get("from", ()))
            why = _unmodelled_choice(one, "fqns", ()) or _unmodelled_choice(one, "filter_fqns", _KEPT_IN_16_BITS)
        elif name == "LoRAConverter":
            why = _adapters(keys, key, one)
        else:
            why = f"{name} is not modelled"
        if why:
            keys.refuse(key, why)


def _unmodelled_choice(converter: Mapping[str, Any], key: str, known: Collection[str]) -> str:
    """Reason why a converter's choice of linear layers is not modelled; empty if it is."""
    names = converter.get(key) or []
    others = [str(one) for one in names if one not in known] if isinstance(names, list) else [str(names)]
    if converter.get("emulate"):
        return "emulated FP8 GEMMs have other copies than real ones"
    return f"{key} = {', '.join(others)}: this choice of FP8 layers is not modelled" if others else ""


def _adapters(keys: Keys, key: str, converter: Mapping[str, Any]) -> str:
    names = converter.get("target_modules")
    known = keys.table["targets"]
    if not isinstance(names, list) or not all(name in known for name in names):
        return f"LoRA's target_modules = {names}; expected some of {', '.join(known)}"
    targets = dict.fromkeys(word for name in names for word in known[name])
    rank, alpha = converter.get("rank", 8), converter.get("alpha", 16.0)
    keys.give("lora", f"r={rank},alpha={alpha:g},targets={'+'.join(targets)}", key)
    if keys.text("training.dtype", "float32") == "float32":
        keys.give("base", "fp32")
    return ""


def _listed(keys: Keys, key: str) -> list[str]:
    return [str(one).lower() for one in keys.listed(key)]


def _sections(keys: Keys, key: str) -> list[Mapping[str, Any]]:
    """Return the converters that TOML names, with the arguments of their sections; sections of others do nothing."""
    names = _listed(keys, key)
    if keys.on("float8.enable_float8_linear") or keys.on("training.enable_float8_linear"):
        names.append("float8")
    experts = [name for name in names if name.startswith(("quantize.grouped_mm", "quantize.moe"))]
    if experts:
        keys.refuse(key, f"{experts[0]}: experts in 8 bits by torchao are not modelled")
    keys.read(*keys.matching("quantize.grouped_mm.*", "quantize.moe.*", "*.moe_fqns_prototype"))
    used = {name.rpartition(".")[2]: name for name in names if name not in experts}
    for off in {"float8", "mx"} - {*used}:
        keys.read(*keys.matching(f"{off}.*", f"quantize.linear.{off}.*", f"quantize.dense.{off}.*"))
    found = list[Mapping[str, Any]]()
    for own, name in used.items():
        sections = (own, f"quantize.linear.{own}", f"quantize.dense.{own}")
        section = next((one for one in sections if keys.some(f"{one}.*")), own)
        gather = f"{section}.enable_fsdp_float8_all_gather"
        converter = {
            "": keys.table["converters"].get(own, name) if name in sections else name,
            "from": (f"{section}.recipe_name", "float8.enable_float8_linear"),
            "recipe_name": keys.text(f"{section}.recipe_name"),
            "filter_fqns": _listed(keys, f"{section}.filter_fqns"),
            "enable_fsdp_float8_all_gather": keys.on(gather, keys.on("training.enable_fsdp_float8_all_gather")),
        }
        found.append(converter)
    return found


def _others(keys: Keys) -> None:
    old = list(keys.matching(*_OLD))
    if old:
        if keys.field("zero", 3) == 3 and keys.field("pp", 1) == 1:
            keys.give("fsdp_wrap_layers_only", True)
        keys.give("kernels", "pytorch-2.8")
        keys.notes.append(
            f"{old[0]} means torchtitan before July 2025: norms op by op, embedding and head in the root's FSDP unit"
        )
    compiled = keys.on("compile.enable") or keys.on("training.compile")
    components = _listed(keys, "compile.components") if keys.has("compile.components") else ["model", "loss"]
    if compiled and "model" in components:
        keys.compiles("compile.enable", "training.compile", "compile.components")
    split = keys.field("tp", 1) > 1
    whole = keys.on(_key_of(keys, "disable_loss_parallel")) or not keys.on("training.enable_loss_parallel", True)
    if split and whole:
        keys.give("loss", "upcast", _key_of(keys, "disable_loss_parallel"), "training.enable_loss_parallel")
    elif compiled and "loss" in components and not split:
        keys.give("loss", "compiled", "compile.components")
    off = keys.on("training.disable_cuda_graphs")  # f84224af (August 2026) captures by default
    if keys.field("pp", 1) == 1 and not off and (keys.has(_TOKENS) or keys.has("training.disable_cuda_graphs")):
        keys.give("cuda_graphs", True, "training.disable_cuda_graphs")
    groups = keys.get("optimizer.param_groups", [])
    listed = groups if isinstance(groups, list) else [groups]
    names = (str(one.get("optimizer_name", "AdamW")).lower() for one in listed if isinstance(one, Mapping))
    if sum(name in ("adamw", "adam") for name in names) < len(listed):
        keys.refuse("optimizer.param_groups", "expected AdamW or Adam in each")
    moved = "compile.enable_async_tensor_parallel"
    key = moved if keys.has(moved) else _key_of(keys, "enable_async_tensor_parallel")
    if keys.on(key) and compiled and split:
        keys.give("tp_comm_overlap", True, key)
