"""Reader of Megatron-LM's arguments (a script, plain text, a test's YAML) and of Megatron-Bridge's configuration.

Read: ``megatron/training/arguments.py`` and ``megatron/core/transformer/transformer_config.py`` of Megatron-LM at
d98e8a64 (22 August 2026). Missing arguments have the defaults of these files. The model takes the form of a
``config.json`` with the keys of ``families/models/megatron_gpt.toml``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from jettison.core.errors import UsageError
from jettison.families.config import parse_config
from jettison.frameworks.config_file import ConfigFile
from jettison.frameworks.run_file import Keys, tables
from jettison.frameworks.shell_script import PROGRAM
from jettison.frameworks.trainer_keys import full_length, pipeline, zero_buckets
from jettison.frameworks.transformers.read import adapters
from jettison.spec.model import ModelSpec

_MOST: Final = 100_000
"""Most layers of a pattern."""
_RANKS: Final = ("tp", "pp", "cp")
_PER_NODE: Final = ("nproc_per_node", "gpus_per_node", "ntasks_per_node", "$GPUS_PER_NODE", "$NPROC_PER_NODE")
_NODES: Final = ("nnodes", "nodes", "num_nodes", "$NNODES", "$NUM_NODES", "$NODES")
_WORLD: Final = ("world_size", "$WORLD_SIZE", "$WORLD")


def read(keys: Keys) -> None:
    """Read the keys without a table form."""
    for field, argument in keys.table["opposites"].items():
        if keys.has(field):
            keys.values[argument] = not keys.on(field)
    if keys.form in ("recipe", "yaml"):
        _dataclasses(keys)
    if keys.form == "swift":
        adapters(keys, trl=False)
        if keys.on("packing") or not keys.on("padding_free", True):
            full_length(keys, packed=keys.on("packing"))
        else:
            keys.note("every sequence is counted at its maximum length; if none is as long, give the longest as --seq")
    if keys.form == "deepspeed":  # whose arguments stand for Megatron-LM's
        keys.values |= {"group_query_attention": True} if keys.has("num_query_groups") else {}
    keys.values |= {"num_experts": None} if str(keys.get("num_experts", 1)).strip("[]'") == "1" else {}
    each, nodes, world = (_first(keys, names) for names in (("num_gpus", *_PER_NODE), _NODES, _WORLD))
    if keys.gpus is None:
        keys.gpus = each * (nodes or 1) if each else world
    _program(keys)
    if keys.asked_model is not None:
        keys.read(*keys.table["model"], why=f"the model is {keys.asked_model}")
        sites = [f"{site}_dropout" for site in ("hidden", "attention")]
        if keys.form not in ("recipe", "swift") or any(map(keys.has, sites)):
            keys.give("dropout", max(keys.number(site, 0.1) or 0.0 for site in sites), *sites)
    elif keys.has("hidden_size"):
        found = config(keys)
        keys.config = found if found["vocab_size"] else None
        keys.read(*keys.table["model"])
    _pipeline(keys)
    _batch(keys)
    _kernels(keys)
    _precision(keys)
    _recompute(keys)
    _optimizer(keys)
    if keys.form == "deepspeed":
        _deepspeed(keys)
    if not keys.values.get("use_megatron_fsdp"):
        keys.read("data_parallel_sharding_strategy", why="no effect without --use-megatron-fsdp")


def described(arguments: Mapping[str, Any], name: str) -> ModelSpec:
    """Parse the model of arguments, without dashes or MTP. `UsageError` if a size is missing, or it is not modelled."""
    table = next(one for one in tables() if one["says"] == "Megatron-LM's arguments")
    file = ConfigFile(path=Path(name), text="", syntax="arguments", values=arguments)
    keys = Keys(file, gpus=0, table=table)
    keys.by_table(table)
    return parse_config(config(keys), name=name)


# files with fields of dataclasses instead of arguments ----------------------------------------------------------------


def _dataclasses(keys: Keys) -> None:
    """Replace fields of dataclasses by the equivalent arguments."""
    if keys.form == "recipe":
        _recipe(keys)
    if keys.has("num_query_groups"):
        keys.read("num_query_groups")
        keys.values["group_query_attention"] = True
    activation = " ".join(keys.text(name) for name in keys.matching("activation_func", "activation_func.*"))
    gated = keys.on("gated_linear_unit")
    keys.read("gated_linear_unit", *keys.matching("activation_func.*"))
    if gated and "silu" not in activation and "swiglu" not in activation:
        keys.refuse("gated_linear_unit", "gates other than SiLU are not modelled here: give MODEL before --from")
    keys.values |= {"swiglu": gated, "squared_relu": "squared_relu" in activation}


def _recipe(keys: Keys) -> None:
    """Set the defaults of Megatron-Bridge's recipes: ``recipes/common.py``, ``_pretrain_common``."""
    if not keys.has("micro_batch_size") and keys.field("micro_batch") is None:
        raise UsageError(f"{keys.file.path} has no train.micro_batch_size, which its recipe sets: give --micro-batch 1")
    if not keys.has("hidden_size"):
        keys.note("settings of the Python recipe under this file are unknown: give them as flags with --from")
        keys.model = keys.get("hf_model_id")
    name = keys.text("mixed_precision", "bf16_mixed").replace("-", "_")
    if "mixed_precision" in keys.values and name not in keys.table["precisions"]:
        keys.refuse("mixed_precision", f"expected one of {', '.join(keys.table['precisions'])}")
    said = {key: keys.values[key] for key in ("bf16", "fp16", "fp8_format") if keys.has(key)}
    keys.values |= {**keys.table["precisions"].get(name, {}), **said}
    keys.values = {**keys.table["recipe"], **keys.values}
    if keys.on("skip_getting_attention_mask_from_dataset", True):
        keys.values["no_create_attention_mask_in_dataloader"] = True


def _deepspeed(keys: Keys) -> None:
    """Read the settings of DeepSpeed's engine: sharding, precision, checkpointing."""
    engine = keys.named("deepspeed_config")
    said = {} if engine is None else engine.values
    stage = keys.whole("zero_stage", said.get("zero_optimization.stage"))
    if isinstance(stage, int) and 0 <= stage <= 3:
        keys.give("zero", stage, "zero_stage", "deepspeed_config")
    else:
        keys.refuse("deepspeed_config", "the file is missing, and there is no --zero-stage")
    why = "give --offload-optimizer deepspeed" if stage in (2, 3) else "it is modelled for ZeRO 2 and 3"
    offloads = any(
        key.startswith("zero_optimization.offload") for key, value in said.items() if str(value).lower() != "none"
    )
    for key in ["cpu_optimizer"] * keys.on("cpu_optimizer") + ["deepspeed_config"] * offloads:
        keys.refuse(key, f"CPU offload of optimizer states: {why}")
    if engine is None and keys.has("deepspeed_config"):
        keys.note("the file of deepspeed_config is not here: buckets and offloading that it has are not counted")
    keys.values |= {f"deepspeed_config.{key}": said[key] for key in said}
    zero_buckets(keys, "deepspeed_config.zero_optimization.")
    keys.read(*keys.matching("deepspeed_config.*"), "checkpoint_num_layers")
    for name in ("precision", "accumulation"):
        keys.drop(name)
    if keys.on("fp16") or keys.on("bf16"):
        keys.give("precision", "bf16", "fp16", "bf16")  # as many bytes in fp16
    else:
        keys.give("precision", "fp32")
    keys.give("loss", "vocab-parallel")
    interval = keys.on("checkpoint_activations") or keys.on("no_pipeline_parallel")
    if keys.text("recompute_method") == "block" and not interval:
        keys.give("recompute", "none", "recompute_method")  # ``megatron/model/gpt_model.py``: an interval of 0
    pipeline(keys, "deepspeed_config.")


# ranks and batch ------------------------------------------------------------------------------------------------------


def _first(keys: Keys, names: Sequence[str]) -> int | None:
    values = [str(keys.get(name)) for name in names]
    return next((int(value) for value in values if value.isdecimal() and int(value) > 0), None)


def _batch(keys: Keys) -> None:
    keys.give("dp", keys.share(*_RANKS))
    total = None
    if not keys.has("global_batch_size"):
        schedule = str(keys.get("step_batch_size_schedule", "")).split()
        total = int(schedule[-1].partition(":")[2]) if schedule and schedule[-1].partition(":")[2].isdecimal() else None
        if total is not None:
            keys.notes.append(f"the batch grows to {total}, its counted size")
    if keys.get("rampup_batch_size") is not None:
        keys.notes.append("the batch grows to its full size, which is counted")
    if keys.gpus != 0:
        steps = keys.repeats("global_batch_size", keys.field("micro_batch", 1), total)
        keys.give("micro_batches", steps, "global_batch_size", "step_batch_size_schedule")


def _program(keys: Keys) -> None:
    program = keys.text(PROGRAM)
    other = re.search(keys.table["other_programs"], f"{program} {keys.on('swiglu')}")
    if keys.asked_model is None and other:
        raise UsageError(
            f"{keys.file.path} runs {program}, whose model ({other[0]}) does not follow from its arguments: give MODEL "
            "before --from"
        )


# the model ------------------------------------------------------------------------------------------------------------


def config(keys: Keys) -> Mapping[str, Any]:
    """Return the model in the form of a ``config.json``; a `UsageError` if a size is missing or invalid."""
    hidden, heads = _size(keys, "hidden_size"), _size(keys, "num_attention_heads")
    gated = keys.on("swiglu") or keys.on("quick_geglu")
    positions = _position_kind(keys)
    if positions == "relative":
        keys.refuse("position_embedding_type", "relative positions are not modelled for this model")
    bias = not keys.on("disable_bias_linear")
    latent = keys.on("multi_latent_attention")
    pattern = _pattern(keys)
    if keys.has("spec") and not (pattern and "hybrid_stack_spec" in str(keys.get("spec"))):
        keys.refuse("spec", "other layer specs are not modelled")
    layers = len(pattern) if pattern else _size(keys, "num_layers")
    ffn = keys.whole("ffn_hidden_size") or (int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden)
    found: dict[str, Any] = {
        "model_type": keys.table["model_type"],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys.whole("num_query_groups", 1) if keys.on("group_query_attention") else heads,
        "head_dim": keys.whole("kv_channels") or hidden // heads,
        "intermediate_size": ffn,
        "vocab_size": _vocabulary(keys),
        "max_position_embeddings": keys.whole("max_position_embeddings") or keys.whole("seq_length") or 1024,
        "learned_positions": positions == "learned_absolute",
        "rotary": positions in ("rope", "yarn", "mrope"),
        "partial_rotary_factor": keys.number("rotary_percent", 1.0),
        "tie_word_embeddings": not keys.on("untie_embeddings_and_output_weights"),
        "rms_norm": keys.text("normalization", "layernorm") == "rmsnorm",
        "gated_linear_unit": gated,
        "hidden_act": next(word for key, word in keys.table["activations"].items() if not key or keys.on(key)),
        "attention_bias": (bias or keys.on("add_qkv_bias")) and not latent,
        "attention_out_bias": bias,
        "mlp_bias": bias,
        **{name: keys.on(key) for name, key in keys.table["flags"].items()},
        "learnable_softmax": keys.text("softmax_type", "vanilla") == "learnable",
        "hidden_dropout": keys.number("hidden_dropout", 0.1),
        "attention_dropout": keys.number("attention_dropout", 0.1),
        **_experts(keys, layers, ffn),
        **_windows(keys, layers),
        **(_sizes(keys, "latent") if latent else {}),
        **(_hybrid(keys, pattern, hidden) if pattern else {}),
    }
    if latent and bias:
        keys.notes.append("biases with multi-head latent attention are not counted")
    if heads % found["num_key_value_heads"]:
        raise keys.error(f"{heads} heads do not share {found['num_key_value_heads']} query groups")
    return found


def _size(keys: Keys, name: str) -> int:
    found = keys.whole(name)
    if found is None or found < 1:
        raise keys.error(f"got {keys.written(name)} = {keys.get(name)}; expected a whole number of 1 or more")
    return found


def _position_kind(keys: Keys) -> str:
    if keys.on("use_rotary_position_embeddings"):
        return "rope"
    if keys.on("no_position_embedding"):
        return "none"
    return keys.text("position_embedding_type", "learned_absolute")


def _vocabulary(keys: Keys) -> int:
    """Return the embedding's rows: ``core/tokenizers/utils/build_tokenizer.py``, ``vocab_size_with_padding``."""
    tokenizer = keys.text("tokenizer_type")
    padded = keys.whole("padded_vocab_size")
    if not tokenizer and keys.has("vocab_file") and keys.has("merge_file"):
        tokenizer = "gpt2bpetokenizer"
    known = f"{tokenizer}:{keys.get('tokenizer_model') or keys.get('vocab_file')}".lower()
    said = next((size for name, size in keys.table["vocabularies"].items() if fnmatchcase(known, name)), None)
    found = padded or keys.whole("vocab_size") or said
    if found is None:
        key = next(filter(keys.has, ("tokenizer_model", "tokenizer_type", "vocab_file", "hidden_size")))
        instead = "add --vocab-size 128256, or give MODEL before --from"
        keys.refuse(key, f"only its files have the size of the vocabulary: {instead}")
        return 0
    if not keys.has("vocab_size") and padded is None:
        keys.notes.append(f"a vocabulary of {found} tokens before padding, that of {known.strip(':')}")
    multiple = (keys.whole("make_vocab_size_divisible_by") or 128) * keys.field("tp", 1)
    pads = keys.form != "recipe" or keys.on("should_pad_vocab")
    return -(-found // multiple) * multiple if pads and not padded else found


def _experts(keys: Keys, layers: int, ffn: int) -> dict[str, Any]:
    experts = keys.whole("num_experts")
    score = keys.text("moe_router_score_function", "softmax")
    found: dict[str, Any] = {"moe_layers": []}
    if not experts:
        return found
    return found | {
        "moe_layers": [i for i, one in enumerate(frequencies(keys, "moe_layer_freq", layers, first=True)) if one],
        "num_experts": experts,
        **_sizes(keys, "experts"),
        "moe_intermediate_size": keys.whole("moe_ffn_hidden_size") or ffn,
        "router_pre_softmax": keys.on("moe_router_pre_softmax") and score == "softmax",
        "router_sigmoid": score == "sigmoid",
    }


def _windows(keys: Keys, layers: int) -> dict[str, Any]:
    """Read sliding windows, given as (tokens before, tokens after), such as (127, 0)."""
    size = keys.get("window_size")
    if size is None:
        return {}
    before = re.findall(r"-?\d+", str(size))
    if len(before) != 2 or before[1] != "0":
        keys.refuse("window_size", "expected the number of tokens before, and 0 after, such as 127,0")
        return {}
    found: dict[str, Any] = {"sliding_window": int(before[0]) + 1}
    if keys.has("window_attn_skip_freq"):
        slides = frequencies(keys, "window_attn_skip_freq", layers, first=False)
        found["layer_types"] = ["sliding_attention" if one else "full_attention" for one in slides]
    return found


def _sizes(keys: Keys, section: str) -> dict[str, Any]:
    """Read integers of a ``config.json`` from their arguments, with the arguments' defaults."""
    return {name: keys.whole(key, *default) for name, (key, *default) in keys.table[section].items()}


def _pattern(keys: Keys) -> str:
    """Read the letters of a hybrid model's layers, without MTP."""
    name = "hybrid_layer_pattern" if keys.has("hybrid_layer_pattern") else "hybrid_override_pattern"
    pattern = str(keys.get(name, ""))
    own, *extra = pattern.split("/")
    letters = own.replace("|", "")
    if set(letters) - set("M*-E"):
        keys.refuse(name, "expected layers of M, *, - and E")
        return ""
    if extra:
        keys.give("mtp_num_layers", len(extra), name)
    if "|" in own:
        stages = own.split("|")
        keys.give("stage_layers", ",".join(str(len(stage)) for stage in stages), name)
        ranks = keys.field("pp", 1)
        if len(stages) > ranks and not len(stages) % ranks:
            keys.give("virtual_stages", len(stages) // ranks, name)
    return letters


def _hybrid(keys: Keys, pattern: str, hidden: int) -> dict[str, Any]:
    """Read a hybrid model (hybrid_model.py): a letter a layer; SSM heads together are twice the hidden size."""
    table = keys.table["hybrid"]
    heads, width = (keys.whole(*table[kind]) for kind in ("heads", "width"))
    assert width
    return {
        "hybrid": True,
        "layer_types": [table["words"][letter] for letter in pattern],
        table["heads_are"]: heads or 2 * hidden // width,
        table["width_is"]: width,
        **_sizes(keys, "states"),
    }


def frequencies(keys: Keys, name: str, layers: int, *, first: bool) -> list[int]:
    """Read 0 or 1 per layer, from a list such as ``([0]*3+[1]*12)`` or from N, for every N-th layer.

    Args:
        first: the first of N layers is 1 (experts); else the N-th is 0 (windows).
    """
    value = keys.get(name, 1)
    if isinstance(value, list):
        found = [int(bool(one)) for one in value]
    elif str(value).isdecimal():
        every = max(1, int(value))
        found = [int(not i % every) if first else int(bool((i + 1) % every)) for i in range(layers)]
    else:
        try:
            found = _listed(ast.parse(str(value), mode="eval").body)
        except (SyntaxError, ValueError):
            found = []
    if len(found) != layers:
        got = f"{keys.written(name)} {value}"
        raise keys.error(f"got {got}; expected a number, or a list of {layers} such as ([0]*3+[1]*9)")
    return found


def _listed(node: ast.expr) -> list[int]:
    """Evaluate lists of integers with ``+`` and ``*``."""
    match node:
        case ast.List(elts=items):
            return [one.value for one in items if isinstance(one, ast.Constant) and isinstance(one.value, int)]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            found = _listed(left) + _listed(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=ast.Constant(value=int() as times)) if 0 <= times <= _MOST:
            inner = _listed(left)
            found = inner * times if len(inner) * times <= _MOST else []
        case _:
            raise ValueError
    return found if len(found) <= _MOST else []


# pipeline, kernels, precision -----------------------------------------------------------------------------------------


def _pipeline(keys: Keys) -> None:
    stages = keys.field("pp", 1)
    layers = keys.config["num_hidden_layers"] if keys.config else keys.whole("num_layers") or 0
    if layout := keys.get("pipeline_model_parallel_layout"):
        text = str(layout).strip("'\"")
        keys.give("stage_layers", text, "pipeline_model_parallel_layout")
        unrolled = re.sub(r"\(([^()]*)\)\*(\d{1,3})", lambda found: found[1] * int(found[2]), text)
        chunks = unrolled.count("|") + 1
        if chunks > stages and not chunks % stages:
            keys.give("virtual_stages", chunks // stages, "pipeline_model_parallel_layout")
        return
    each, virtual = keys.whole("num_layers_per_virtual_pipeline_stage"), "num_virtual_stages_per_pipeline_rank"
    ends = [keys.on(f"account_for_{name}_in_pipeline_split") for name in ("embedding", "loss")]
    rows = layers + sum(ends)
    if each and stages > 1 and not rows % (stages * each):
        keys.give("virtual_stages", rows // stages // each, "num_layers_per_virtual_pipeline_stage")
    elif number := keys.whole(virtual):
        keys.give("virtual_stages", number, virtual)
    chunks = stages * keys.field("virtual_stages", 1)
    if any(ends) and chunks > 1:
        sizes = [rows // chunks] * chunks
        sizes[0] -= ends[0]
        sizes[-1] -= ends[1]
        keys.give("stage_layers", ",".join(map(str, sizes)), "account_for_embedding_in_pipeline_split")
    ends_of = {end: f"decoder_{end}_pipeline_num_layers" for end in ("first", "last")}
    uneven = [f"{end}:{count}" for end, key in ends_of.items() if (count := keys.whole(key))]
    if uneven and stages > 1:
        keys.give("stage_layers", ",".join(uneven), *ends_of.values())
    if keys.on("defer_embedding_wgrad_compute") and stages > 1:
        keys.give("wgrad_deferral_limit", keys.whole("wgrad_deferral_limit") or 0, "defer_embedding_wgrad_compute")
        if not keys.whole("wgrad_deferral_limit"):
            keys.refuse("defer_embedding_wgrad_compute", "for all micro-batches: give --wgrad-deferral-limit")


def _kernels(keys: Keys) -> None:
    older = next(keys.matching(*keys.table["before_september_2023"]), "")
    local = keys.text("transformer_impl", "local" if older else "transformer_engine") == "local"
    if older and not keys.has("transformer_impl"):
        keys.note(f"{keys.written(older)} means Megatron-LM before September 2023: --transformer-impl local by default")
    backend = keys.text("attention_backend", "auto")
    eager = backend in ("unfused", "local") or (local and not keys.on("use_flash_attn"))
    keys.give("attention", "eager" if eager else "flash", "attention_backend", "transformer_impl", "use_flash_attn")
    if local:
        keys.give("workspaces", "torch-hopper", "transformer_impl")
    if keys.on("no_masked_softmax_fusion") and eager:
        keys.refuse("no_masked_softmax_fusion", "eager attention without the fused softmax has no flag")
    if keys.on("no_gradient_accumulation_fusion"):
        keys.give("accumulation", "cast", "no_gradient_accumulation_fusion")
    else:
        keys.give("accumulation", "fused" if local else "fused-dummy", "transformer_impl")
    if keys.on("cross_entropy_loss_fusion"):
        kind = keys.text("cross_entropy_fusion_impl", "native")
        keys.give("loss", kind, "cross_entropy_loss_fusion", "cross_entropy_fusion_impl")
    if keys.on("no_create_attention_mask_in_dataloader"):
        keys.give("dataloader_attention_mask", False, "no_create_attention_mask_in_dataloader")
    if keys.field("tp", 1) > 1:
        keys.give("sp", keys.on("sequence_parallel"), "sequence_parallel")
    else:
        keys.read("sequence_parallel", why="off with one rank of tensor parallelism")
    if (keys.config and keys.config.get("num_experts")) or (
        not keys.config and keys.whole("expert_model_parallel_size", 1) != 1
    ):
        _dispatch(keys)
    if kinds := [*dict.fromkeys(words(keys.get("cp_comm_type")))]:
        exchange = {"p2p": "p2p", "a2a": "a2a", "allgather": "gather", "a2a+p2p": "p2p"}.get(kinds[0])
        if exchange is None or len(kinds) > 1:
            keys.refuse("cp_comm_type", "expected one of p2p, a2a, allgather and a2a+p2p for all layers")
        keys.give("cp_comm_type", exchange, "cp_comm_type")
        if kinds == ["a2a+p2p"]:
            keys.notes.append("context parallelism by a2a+p2p is counted as p2p")


def _dispatch(keys: Keys) -> None:
    keys.give("ep", keys.whole("expert_model_parallel_size"), "expert_model_parallel_size")
    dispatcher = keys.text("moe_token_dispatcher_type", "allgather")
    keys.give("dispatcher", dispatcher, "moe_token_dispatcher_type")
    if not keys.on("moe_grouped_gemm", keys.config is None):
        keys.give("sequential_experts", True)
    if (wide := keys.whole("expert_tensor_parallel_size")) and wide != keys.field("tp", 1):
        keys.give("expert_tp", wide, "expert_tensor_parallel_size")


def _precision(keys: Keys) -> None:
    narrow = keys.on("grad_reduce_in_bf16")
    if keys.on("fp16"):
        keys.give("precision", "fp16-main32", "fp16")
        if keys.on("accumulate_allreduce_grads_in_fp32"):
            keys.refuse("accumulate_allreduce_grads_in_fp32", "fp16 with fp32 gradients is not modelled")
    elif keys.on("bf16"):
        keys.give("precision", "bf16-reduce16" if narrow else "bf16-main32", "bf16", "grad_reduce_in_bf16")
    else:
        keys.give("precision", "fp32", "bf16", "fp16")
    _aware(keys)
    if keys.has("fp8_format"):
        recipe = keys.text("fp8_recipe", "delayed")
        history = keys.whole("fp8_amax_history_len", 1)
        keys.give("fp8_recipe", f"{recipe}:{history}" if recipe == "delayed" else recipe, "fp8_format", "fp8_recipe")
        if keys.on("fp8_param_gather"):
            keys.give("fp8_param_gather", True, "fp8_param_gather")
        if keys.on("first_last_layers_bf16"):
            ends = {"first": "num_layers_at_start_in_bf16", "last": "num_layers_at_end_in_bf16"}
            said = ",".join(f"{end}:{count}=bf16" for end, key in ends.items() if (count := keys.whole(key, 1)))
            keys.give("quant_recipe", said or None, "first_last_layers_bf16", *ends.values())
    else:
        keys.read("fp8_recipe", "fp8_param_gather", "fp8_amax_history_len", why="no effect without --fp8-format")


def _dtype(keys: Keys, name: str) -> str:
    word = keys.text(name, "fp32").removeprefix("torch.")
    return {"bfloat16": "bf16", "float32": "fp32", "float": "fp32"}.get(word, word)


def _aware(keys: Keys) -> None:
    """Read the precision-aware optimizer: NOTE [ Precision-aware optimizers ]."""
    name = "use_precision_aware_optimizer"
    if not keys.on(name):
        return
    kinds = [f"{kind}_dtype" for kind in ("main_params", "exp_avg", "exp_avg_sq", "main_grads")]
    params, *moments, gradients = (_dtype(keys, key) for key in kinds)
    if {params, *moments, gradients} == {"fp32"}:
        keys.read(name, why="all in fp32, the default")
    elif (params, *moments) == ("fp32", "bf16", "bf16") and keys.on("bf16"):
        word = "bf16-aware" if gradients == "bf16" else "bf16-aware-grad32"
        keys.give("precision", "bf16-bridge" if keys.form == "recipe" else word, name, *kinds)
    else:
        keys.refuse(name, "expected moments in bf16 (--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16), or all in fp32")


# recomputation, optimizer ---------------------------------------------------------------------------------------------


def _recompute(keys: Keys) -> None:
    granularity, method = keys.text("recompute_granularity"), keys.text("recompute_method")
    number = keys.whole("recompute_num_layers", keys.whole("checkpoint_num_layers", 1))
    by = ["checkpoint_num_layers", *(f"recompute_{n}" for n in ("granularity", "method", "num_layers", "activations"))]
    if keys.has("activations_checkpoint_method"):  # its name until 2022
        granularity, method = "full", keys.text("activations_checkpoint_method")
        number = keys.whole("activations_checkpoint_num_layers", 1)
        by = [*keys.matching("activations_checkpoint_*")]
    if granularity == "full":
        word = f"block:{number}" if method == "block" else f"every:{number}" if number and number > 1 else "full"
        keys.give("recompute", word, *by)
    elif granularity == "selective":
        modules = [*words(keys.get("recompute_modules"))] or ["core_attn"]
        modules += ["moe"] * keys.on("moe_layer_recompute")
        keys.give("recompute_modules", ",".join(dict.fromkeys(modules)), *by, "recompute_modules")
    elif granularity:
        keys.refuse("recompute_granularity", "expected full or selective")
    else:
        keys.read(*by, "recompute_modules", why="no effect without --recompute-granularity")
    if keys.on("fine_grained_activation_offloading"):
        sent = ",".join(words(keys.get("offload_modules"))) or None
        keys.give("offload_modules", sent, "offload_modules", "fine_grained_activation_offloading")


def words(value: Any) -> Iterator[str]:
    """Yield the items of a list from YAML, from arguments, or from one text such as ``[mlp moe_act]``."""
    for one in value if isinstance(value, list) else [] if value is None or value is True else [str(value)]:
        yield from re.findall(r"[\w.+]+", str(one))


def _optimizer(keys: Keys) -> None:
    name, sharded = keys.text("optimizer", "adam"), keys.on("use_distributed_optimizer")
    if name in ("muon", "dist_muon"):
        whole = sharded or name == "dist_muon"
        older = keys.on("no_use_layer_wise_param_layout")
        word = ("dist-muon-pingpong" if older else "dist-muon") if whole else "muon"
        keys.give("optimizer", word, "optimizer", "no_use_layer_wise_param_layout")
    elif name == "sgd":
        keys.give("optimizer", "sgd-momentum" if keys.number("sgd_momentum", 0.9) else "sgd", "optimizer")
    elif name != "adam":
        keys.refuse("optimizer", "expected adam, sgd or muon")
    if sharded:
        keys.give("zero", 1, "use_distributed_optimizer")
    if (groups := keys.whole("num_distributed_optimizer_instances", 1)) and groups > 1:
        keys.give("zero_replicas", groups, "num_distributed_optimizer_instances")
