"""Configurations in words of their own, put into the usual ones, and what of a family they decide.

Most files say their sizes in keys that `Family.spelling` finds. A few keep them in parts, or say in one word what
others say in several; each of those has a function here: from its entry and its values to both as all others have them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import chain
from reprlib import repr as short
from types import MappingProxyType
from typing import Any, Final

from jettison.errors import NotDescribed, UsageError
from jettison.families.family import Family
from jettison.spec.model import Arrangement, QkNorm

Read = tuple[Family, Mapping[str, Any]]


def in_usual_words(kind: str, family: Family, values: Mapping[str, Any], *, name: str) -> Read:
    """The entry and the values of a configuration of this kind.

    Raises:
        UsageError: a value that makes no sense, by its key.
    """
    read = _OWN.get(kind)
    return (family, values) if read is None else read(family, values, name)


def _flag(values: Mapping[str, Any], key: str, default: bool, name: str) -> bool:
    value = values.get(key)
    if value is not None and not isinstance(value, bool):
        raise UsageError(f"{name}: got {key} {short(value)}; expected true or false")
    return default if value is None else value


def _part(values: Mapping[str, Any], key: str, name: str) -> Mapping[str, Any]:
    """An object within the configuration."""
    part = values.get(key) or {}
    if not isinstance(part, Mapping):
        raise UsageError(f"{name}: got {key} {short(part)}; expected an object")
    return part


def _gpt_bigcode(family: Family, values: Mapping[str, Any], name: str) -> Read:
    """One key and value for all heads, unless it says otherwise."""
    return family, {**values, "num_key_value_heads": 1 if _flag(values, "multi_query", True, name) else None}


def _gpt_neo(family: Family, values: Mapping[str, Any], name: str) -> Read:
    """Global and local layers: a list of them, or pairs of a list and how often it repeats."""
    words = {"global": "full_attention", "local": "sliding_attention"}
    layers = values.get("attention_layers")
    if layers is None:
        pairs = values.get("attention_types", [[["global", "local"], 12]])
        try:
            layers = list(chain.from_iterable(list(kinds) * times for kinds, times in pairs))
        except (TypeError, ValueError) as error:
            expected = 'pairs such as [["global", "local"], 12]'
            raise UsageError(f"{name}: got attention_types {short(pairs)}; expected {expected}") from error
    if not isinstance(layers, list | tuple) or any(word not in words for word in layers):
        raise UsageError(f"{name}: got attention_layers {short(layers)}; expected a list of global and local")
    return family, {**values, "layer_types": [words[word] for word in layers]}


def _one(values: Mapping[str, Any], key: str, name: str) -> Any:
    """A number, or a list of the same one for each layer."""
    value = values.get(key)
    if not isinstance(value, list | tuple):
        return value
    if len(set(value)) != 1:
        raise NotDescribed(f"{name}: got {key} {short(value)}, which differs by layer and has no closed form")
    return value[0]


def _dense_but(depth: int, sparse: Iterable[int]) -> list[int]:
    """All layers but these."""
    return sorted(set(range(depth)) - set(sparse))


def _size(values: Mapping[str, Any], key: str, default: int, name: str, *, least: int = 0) -> int:
    value = values.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{name}: got {key} {short(value)}; expected a whole number of {least} or more")
    return value


def _depth(values: Mapping[str, Any], name: str) -> int:
    """How many layers; that there are not too many is asked later."""
    return min(_size(values, "num_hidden_layers", 0, name), 100_000)


def _cohere(family: Family, values: Mapping[str, Any], name: str) -> Read:
    """Each head of queries and keys is normalised if it says so: Command R+."""
    kind = QkNorm.APIECE if _flag(values, "use_qk_norm", False, name) else QkNorm.NONE
    return replace(family, qk_norm=kind), values


def _dbrx(family: Family, values: Mapping[str, Any], name: str) -> Read:
    """Attention and experts have parts of their own; noise on what is routed, once."""
    attention, experts = (_part(values, key, name) for key in ("attn_config", "ffn_config"))
    kind = _part(experts, "ffn_act_fn", name).get("name", "silu")
    weights = experts.get("moe_normalize_expert_weights", 1.0)
    read = {
        "hidden_act": kind,
        "norm_topk_prob": weights is not None,
        "jitters": int(bool(experts.get("moe_jitter_eps"))),
    }
    return family, {
        "moe_num_experts": 4,
        "moe_top_k": 1,
        "ffn_hidden_size": 3584,
        **attention,
        **experts,
        **values,
        **read,
    }


def _ernie4_5_moe(family: Family, values: Mapping[str, Any], name: str) -> Read:
    """Experts from one layer to another, every so often."""
    depth = _depth(values, name)
    first = _size(values, "moe_layer_start_index", 1, name)
    period = _size(values, "moe_layer_interval", 1, name, least=1)
    last = _size(values, "moe_layer_end_index", -1, name, least=-1)
    sparse = (i for i in range(first, depth if last < 0 else min(last + 1, depth)) if (i + 1) % period == 0)
    return family, {**values, "mlp_only_layers": _dense_but(depth, sparse)}


def _falcon(family: Family, values: Mapping[str, Any], name: str) -> Read:
    """Three generations: one key and value for all heads, groups of heads, and heads of their own with distances."""
    groups = _flag(values, "new_decoder_architecture", False, name)
    parallel = _flag(values, "parallel_attn", True, name)
    norms = _size(values, "num_ln_in_parallel_attn", 2 if groups else 1, name, least=1)
    if groups and not parallel:
        raise NotDescribed(
            f"{name}: got parallel_attn false beside new_decoder_architecture, which its code cannot run"
        )
    beside = Arrangement.PARALLEL if groups and norms == 2 else Arrangement.SHARED
    lone = None if not _flag(values, "multi_query", True, name) else 1
    read = {**values, "num_key_value_heads": values.get("num_kv_heads") if groups else lone}
    arrangement = beside if parallel else Arrangement.PRE
    return replace(family, arrangement=arrangement, alibi=_flag(values, "alibi", False, name)), read


def _glm4_moe(family: Family, values: Mapping[str, Any], name: str) -> Read:
    """Queries and keys are normalised if it says so."""
    kind = QkNorm.HEAD if _flag(values, "use_qk_norm", False, name) else QkNorm.NONE
    return replace(family, qk_norm=kind), values


def _hunyuan_v1_moe(family: Family, values: Mapping[str, Any], name: str) -> Read:
    """Sizes may be listed layer by layer."""
    return family, {**values, **{key: _one(values, key, name) for key in ("num_experts", "moe_topk") if key in values}}


def _llama4(family: Family, values: Mapping[str, Any], name: str) -> Read:
    """Two widths, chunks of a sequence that see nothing before them, and which layers have experts."""
    depth = _depth(values, name)
    read = {
        **values,
        "num_experts_per_tok": values.get("num_experts_per_tok", 1),
        "sliding_window": values.get("attention_chunk_size", 8192),
        "no_rope_layers": values.get("no_rope_layers") or None,
    }
    if "intermediate_size" in values:
        read["moe_intermediate_size"] = values["intermediate_size"]
        read["intermediate_size"] = values.get("intermediate_size_mlp", 16384)
    listed = values.get("layer_types")
    if listed is None:
        period = _size(values, "no_rope_layer_interval", 4, name, least=1)
        rotates = read["no_rope_layers"] or [(index + 1) % period for index in range(depth)]
        listed = ["chunked_attention" if rotated else "full_attention" for rotated in rotates]
    if isinstance(listed, list | tuple):
        listed = ["sliding_attention" if word == "chunked_attention" else word for word in listed]
    step = _size(values, "interleave_moe_layer_step", 1, name, least=1)
    sparse = values.get("moe_layers")
    sparse = range(step - 1, depth, step) if sparse is None else sparse
    if not isinstance(sparse, list | tuple | range) or any(not isinstance(index, int) for index in sparse):
        raise UsageError(f"{name}: got moe_layers {short(sparse)}; expected a list of layer numbers")
    kind = QkNorm.LENGTH if _flag(values, "use_qk_norm", True, name) else QkNorm.NONE
    scaled = _flag(values, "attn_temperature_tuning", True, name)
    read |= {"layer_types": listed, "mlp_only_layers": _dense_but(depth, sparse)}
    return replace(family, qk_norm=kind, scaled_where_nope=scaled), read


def _phi(family: Family, values: Mapping[str, Any], name: str) -> Read:
    """Queries and keys are normalised if it says so."""
    kind = QkNorm.HEAD if _flag(values, "qk_layernorm", False, name) else QkNorm.NONE
    return replace(family, qk_norm=kind), values


def _phimoe(family: Family, values: Mapping[str, Any], name: str) -> Read:
    """Noise on what is routed, twice; its router chooses two experts, whatever is asked for."""
    if (chosen := values.get("num_experts_per_tok", 2)) != 2:
        raise NotDescribed(f"{name}: got num_experts_per_tok {short(chosen)}, of which its code knows 2 alone")
    return family, {**values, "num_experts_per_tok": 2, "jitters": 2 if values.get("input_jitter_noise") else 0}


def _jamba(family: Family, values: Mapping[str, Any], name: str) -> Read:
    """Which layers attend, and which have experts: one of so many, from a first one on. One expert is none."""
    _only_silu(values, "hidden_act", name)
    depth = _depth(values, name)
    attends, spreads = (
        [
            index % _size(values, f"{what}_layer_period", period, name, least=1)
            == _size(values, f"{what}_layer_offset", offset, name)
            for index in range(depth)
        ]
        for what, period, offset in (("attn", 8, 4), ("expert", 2, 1))
    )
    several = _size(values, "num_experts", 16, name, least=1) > 1
    sparse = [index for index, spread in enumerate(spreads) if spread and several]
    words = ["full_attention" if attention else "linear_attention" for attention in attends]
    return family, {**values, "layer_types": words, "mlp_only_layers": _dense_but(depth, sparse)}


def _mamba(family: Family, values: Mapping[str, Any], name: str) -> Read:
    """Each layer has a scan; the code knows one nonlinearity."""
    _only_silu(values, "hidden_act", name)
    return family, {**values, "layer_types": ["linear_attention"] * _depth(values, name)}


def _mamba2(family: Family, values: Mapping[str, Any], name: str) -> Read:
    """Each layer has a scan, whose heads are as wide together as it says; the code knows one nonlinearity."""
    _only_silu(values, "hidden_act", name)
    sizes = {key: _size(values, key, default, name) for key, default in _MAMBA2_SIZES.items()}
    if sizes["expand"] * sizes["hidden_size"] != sizes["num_heads"] * sizes["head_dim"]:
        got = ", ".join(f"{key} {size}" for key, size in sizes.items())
        raise UsageError(f"{name}: got {got}; expected expand x hidden_size = num_heads x head_dim")
    words = ["linear_attention"] * _depth(values, name)
    return family, {**_MAMBA2_SIZES, **values, "layer_types": words}


_MAMBA2_SIZES: Final = {"hidden_size": 4096, "expand": 2, "num_heads": 128, "head_dim": 64}


def _only_silu(values: Mapping[str, Any], key: str, name: str) -> None:
    if (word := values.get(key, "silu")) not in ("silu", "swish"):
        raise NotDescribed(f"{name}: got {key} {short(word)}, of which the closed form of a scan knows silu alone")


def _nemotron_h(family: Family, values: Mapping[str, Any], name: str) -> Read:
    """One block a layer: a list of words, or a letter for each of them."""
    _only_silu(values, "mamba_hidden_act", name)
    letters = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
    words = values.get("layers_block_type") or values.get("layer_types") or values.get("hybrid_override_pattern")
    if isinstance(words, str):
        if set(words) - set(letters):
            raise UsageError(f"{name}: got hybrid_override_pattern {short(words)}; expected {' '.join(letters)}")
        words = [letters[letter] for letter in words]
    depth = len(words) if isinstance(words, list) else _depth(values, name)
    old = {"mamba": "linear_attention", "attention": "full_attention"}
    if isinstance(words, list):
        words = [old.get(word, word) if isinstance(word, str) else word for word in words]
    return family, {**values, "layer_types": words, "num_hidden_layers": depth}


def _qwen_hybrid(family: Family, values: Mapping[str, Any], name: str) -> Read:
    """Of so many layers the last has attention, unless each is named."""
    if values.get("layer_types") is not None:
        return family, values
    period = _size(values, "full_attention_interval", 4, name, least=1)
    depth = _depth(values, name)
    words = ["full_attention" if (index + 1) % period == 0 else "linear_attention" for index in range(depth)]
    return family, {**values, "layer_types": words}


def _stablelm(family: Family, values: Mapping[str, Any], name: str) -> Read:
    """StableLM 2 12B: both blocks read one norm, and each head of queries and keys has its own."""
    arrangement = Arrangement.SHARED if _flag(values, "use_parallel_residual", False, name) else Arrangement.PRE
    kind = QkNorm.APIECE if _flag(values, "qk_layernorm", False, name) else QkNorm.NONE
    return replace(family, arrangement=arrangement, qk_norm=kind), values


def _mpt(family: Family, values: Mapping[str, Any], name: str) -> Read:
    """Attention has a part of its own."""
    return family, {**values, **_part(values, "attn_config", name)}


def _t5(family: Family, values: Mapping[str, Any], name: str, *, default: str = "relu") -> Read:
    """An activation, "gated" before it or not; and a head that is tied is one whose input is scaled."""
    word = values.get("feed_forward_proj", default)
    parts = word.split("-") if isinstance(word, str) else []
    if not 1 <= len(parts) <= 2 or (len(parts) == 2 and parts[0] != "gated"):
        raise UsageError(f"{name}: got feed_forward_proj {short(word)}; expected an activation, or gated- before it")
    tied = values.get("tie_word_embeddings") is not False
    read = {"hidden_act": "gelu_new" if word == "gated-gelu" else parts[-1], "scale_decoder_outputs": tied}
    return replace(family, gated=len(parts) == 2), {**read, **values}


def _mt5(family: Family, values: Mapping[str, Any], name: str) -> Read:
    """The same, gated unless it says otherwise, and never scaled."""
    family, read = _t5(family, values, name, default="gated-gelu")
    return family, {**read, "scale_decoder_outputs": False}


def _umt5(family: Family, values: Mapping[str, Any], name: str) -> Read:
    """The same, and always scaled: ``configuration_umt5.py`` has its head tied whatever it is told."""
    family, read = _mt5(family, values, name)
    return family, {**read, "scale_decoder_outputs": True}


def _wav2vec2(family: Family, values: Mapping[str, Any], name: str) -> Read:
    """Norms before the blocks and one at the end, or after each block and before the first."""
    stable = _flag(values, "do_stable_layer_norm", False, name)
    arrangement = Arrangement.PRE if stable else Arrangement.OUTER
    return replace(family, arrangement=arrangement, embedding_norm=not stable), values


_OWN: Final[Mapping[str, Callable[[Family, Mapping[str, Any], str], Read]]] = MappingProxyType(
    {
        "cohere": _cohere,
        "dbrx": _dbrx,
        "ernie4_5_moe": _ernie4_5_moe,
        "falcon": _falcon,
        "glm4_moe": _glm4_moe,
        "gpt_bigcode": _gpt_bigcode,
        "gpt_neo": _gpt_neo,
        "hunyuan_v1_moe": _hunyuan_v1_moe,
        "llama4_text": _llama4,
        "hubert": _wav2vec2,
        "jamba": _jamba,
        "mamba": _mamba,
        "mamba2": _mamba2,
        "mpt": _mpt,
        "mt5": _mt5,
        "nemotron_h": _nemotron_h,
        "phi": _phi,
        "phimoe": _phimoe,
        "qwen3_5_moe_text": _qwen_hybrid,
        "qwen3_5_text": _qwen_hybrid,
        "qwen3_next": _qwen_hybrid,
        "stablelm": _stablelm,
        "t5": _t5,
        "umt5": _umt5,
        "wav2vec2": _wav2vec2,
    }
)
"""By ``model_type``."""
