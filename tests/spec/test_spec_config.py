"""A configuration file becomes the model that transformers builds from it, or one clear line."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from jettison.errors import UsageError
from jettison.spec.config import MOST_LAYERS, parse_config, read_config
from jettison.spec.families import FAMILIES
from jettison.spec.model import (
    Activation,
    Arrangement,
    Attention,
    LatentAttention,
    ModelSpec,
    Moe,
    NormKind,
    QkNorm,
    Router,
)

Config = dict[str, Any]

COMMON = {"hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "vocab_size": 256, "pad_token_id": 0}
GATED = {**COMMON, "num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": 128}
LATENT = {
    **GATED, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 4, "v_head_dim": 10, "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3,
    "moe_intermediate_size": 20, "first_k_dense_replace": 2,
}  # fmt: skip
QWEN_MOE = {**GATED, "head_dim": 24, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40}

TINY: dict[str, tuple[str, Config]] = {
    "gpt2": ("GPT2", {"n_embd": 64, "n_layer": 6, "n_head": 4, "vocab_size": 256, "n_positions": 128}),
    "gpt2-inner": ("GPT2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 256, "n_inner": 200}),
    "gpt_neox": ("GPTNeoX", {**COMMON, "intermediate_size": 96, "hidden_dropout": 0.2}),
    "gpt_neox-serial": ("GPTNeoX", {**COMMON, "intermediate_size": 96, "use_parallel_residual": False,
                                    "rotary_pct": 0.5, "attention_bias": False}),
    "llama": ("Llama", GATED),
    "llama-biased": ("Llama", {**GATED, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True,
                               "head_dim": 24, "attention_dropout": 0.3}),
    "mistral": ("Mistral", {**GATED, "sliding_window": 32}),
    "mistral-open": ("Mistral", {**GATED, "sliding_window": None, "head_dim": 32}),
    "mixtral": ("Mixtral", {**GATED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("Qwen2", {**GATED, "sliding_window": 32}),
    "qwen2-window": ("Qwen2", {**GATED, "use_sliding_window": True, "sliding_window": 32, "max_window_layers": 4}),
    "qwen3": ("Qwen3", GATED),
    "qwen3-window": ("Qwen3", {**GATED, "head_dim": 24, "use_sliding_window": True, "sliding_window": 32,
                               "max_window_layers": 1}),
    "qwen3_moe": ("Qwen3Moe", QWEN_MOE),
    "qwen3_moe-mixed": ("Qwen3Moe", {**QWEN_MOE, "decoder_sparse_step": 2, "mlp_only_layers": [3],
                                     "norm_topk_prob": True, "use_sliding_window": True, "sliding_window": 32}),
    "deepseek_v2": ("DeepseekV2", LATENT),
    "deepseek_v2-groups": ("DeepseekV2", {**LATENT, "q_lora_rank": None, "attention_bias": True, "n_group": 4,
                                          "topk_group": 2, "topk_method": "group_limited_greedy"}),
    "deepseek_v3": ("DeepseekV3", {**LATENT, "n_group": 4, "topk_group": 2}),
    "gemma": ("Gemma", {**GATED, "head_dim": 24}),
    "gemma2": ("Gemma2", {**GATED, "sliding_window": 32}),
    "gemma2-plain": ("Gemma2", {**GATED, "attn_logit_softcapping": None, "final_logit_softcapping": None,
                                "tie_word_embeddings": False, "layer_types": ["full_attention"] * 6}),
    "gemma3_text": ("Gemma3Text", {**GATED, "num_hidden_layers": 8, "sliding_window": 32}),
    "gemma3_text-pattern": ("Gemma3Text", {**GATED, "sliding_window": 32, "sliding_window_pattern": 3}),
    "phi3": ("Phi3", {**GATED, "sliding_window": 32, "resid_pdrop": 0.1}),
    "phi3-partial": ("Phi3", {**GATED, "partial_rotary_factor": 0.5}),
    "olmo2": ("Olmo2", GATED),
    "gpt_oss": ("GptOss", {**GATED, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 32}),
    "bert": ("Bert", {**COMMON, "intermediate_size": 96, "type_vocab_size": 3}),
}  # fmt: skip


def configuration(case: str) -> transformers.PreTrainedConfig:
    name, settings = TINY[case]
    return getattr(transformers, f"{name}Config")(**settings)


def decoded(case: str) -> Config:
    return json.loads(configuration(case).to_json_string(use_diff=False))


def spec(case: str, **changes: Any) -> ModelSpec:
    return parse_config({**decoded(case), **changes}, name="tiny")


def weights(case: str) -> dict[str, tuple[int, ...]]:
    config = configuration(case)
    auto = transformers.AutoModelForMaskedLM if case == "bert" else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in auto.from_config(config).named_parameters()}


def of_layer(shapes: dict[str, tuple[int, ...]], index: int) -> dict[str, tuple[int, ...]]:
    """Weights of one layer, by what follows its number."""
    found = re.compile(rf"\.(?:h|layers|layer)\.{index}\.(.*)")
    return {match[1]: shape for name, shape in shapes.items() if (match := found.search(name))}


def test_every_family_is_tried() -> None:
    assert {decoded(case)["model_type"] for case in TINY} == set(FAMILIES)


# ------------------------------------------------------------------ the numbers are those of the configuration object


@pytest.mark.parametrize("case", TINY)
def test_sizes(case: str) -> None:
    config, model = configuration(case), spec(case)
    assert model.family == config.model_type
    assert model.hidden == config.hidden_size
    assert model.vocab == config.vocab_size
    assert model.depth == config.num_hidden_layers
    assert model.max_positions == config.max_position_embeddings
    assert model.tied_embeddings == config.tie_word_embeddings
    for layer in model.kinds:
        attention = layer.attention
        assert attention.heads == config.num_attention_heads
        if isinstance(attention, Attention):
            assert attention.kv_heads == getattr(config, "num_key_value_heads", config.num_attention_heads)
            assert attention.head_dim == (getattr(config, "head_dim", None) or config.hidden_size // attention.heads)
        else:
            assert attention.query_rank == config.q_lora_rank
            assert attention.kv_rank == config.kv_lora_rank
            assert (attention.nope_dim, attention.rope_dim) == (config.qk_nope_head_dim, config.qk_rope_head_dim)
            assert attention.value_dim == config.v_head_dim


@pytest.mark.parametrize("case", TINY)
def test_layers_look_back_as_far_as_transformers_says(case: str) -> None:
    config, model = configuration(case), spec(case)
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * model.depth
    expected = [window if word == "sliding_attention" else None for word in types]
    assert [getattr(layer.attention, "window", None) for layer in model.layers] == expected


@pytest.mark.parametrize("case", TINY)
def test_equal_layers_are_one_object(case: str) -> None:
    layers = spec(case).layers
    assert len({id(layer) for layer in layers}) == len(set(layers))


# ----------------------------------------------------------------- the choices are those of the module that is built


@pytest.mark.parametrize("case", TINY)
def test_weights_of_attention(case: str) -> None:
    shapes, model = weights(case), spec(case)
    for index, layer in enumerate(model.layers):
        own, attention = of_layer(shapes, index), layer.attention
        if isinstance(attention, LatentAttention):
            assert attention.bias == ("self_attn.o_proj.bias" in own)
            assert (attention.query_rank is None) == ("self_attn.q_proj.weight" in own)
            continue
        fused = [n for n in own if re.search(r"(c_attn|query_key_value|qkv_proj)\.weight$", n)]
        output = next(n for n in own if re.search(r"(o_proj|attn\.c_proj|attention\.dense|output\.dense)\.weight$", n))
        query = fused[0] if fused else next(n for n in own if re.search(r"(q_proj|query)\.weight$", n))
        assert attention.fused_qkv == bool(fused)
        assert attention.qkv_bias == (query.replace(".weight", ".bias") in own)
        assert attention.out_bias == (output.replace(".weight", ".bias") in own)
        assert attention.sinks == ("self_attn.sinks" in own)
        width = attention.heads * attention.head_dim
        norms = {None: QkNorm.NONE, (attention.head_dim,): QkNorm.HEAD, (width,): QkNorm.WIDTH}
        assert attention.qk_norm is norms[own.get("self_attn.q_norm.weight")]


@pytest.mark.parametrize("case", TINY)
def test_weights_of_the_feed_forward_block(case: str) -> None:
    shapes, model = weights(case), spec(case)
    for index, layer in enumerate(model.layers):
        own, mlp = of_layer(shapes, index), layer.mlp
        assert isinstance(mlp, Moe) == any(".experts." in name for name in own), f"layer {index}"
        if isinstance(mlp, Moe):
            down = own["mlp.experts.down_proj"]
            assert (mlp.experts, {mlp.ffn, model.hidden}) == (down[0], set(down[1:]))
            shared = own.get("mlp.shared_experts.up_proj.weight", (0, 0))
            assert mlp.shared_ffn == shared[0]
            assert mlp.bias == ("mlp.experts.down_proj_bias" in own)
            assert mlp.router_bias == ("mlp.router.bias" in own)
            continue
        down_names = r"((?<!attn\.)c_proj|down_proj|dense_4h_to_h|(?<!attention\.)output\.dense)\.weight$"
        down = next(n for n in own if re.search(down_names, n))
        assert set(own[down]) == {mlp.ffn, model.hidden}
        assert mlp.bias == (down.replace(".weight", ".bias") in own)
        assert mlp.fused_gate_up == ("mlp.gate_up_proj.weight" in own)
        assert mlp.gated == any("gate" in name for name in own)


@pytest.mark.parametrize("case", TINY)
def test_norms(case: str) -> None:
    shapes, model = weights(case), spec(case)
    (layer, *_) = model.layers
    own = [n for n in of_layer(shapes, 0) if re.search(r"(layer_?norm|LayerNorm|ln_\d)\.weight$", n)]
    own = [n for n in own if "_a_layernorm" not in n]  # of the low ranks
    assert len(own) == (4 if layer.arrangement is Arrangement.SANDWICH else 2)
    biased = any(n.endswith((".ln_1.bias", "layernorm.bias", "LayerNorm.bias")) for n in shapes)
    assert layer.norm.bias == biased == (layer.norm.kind is NormKind.LAYER)
    assert layer.norm.offset == ("gemma" in case)


def test_arrangements() -> None:
    found = {case: spec(case).layers[0].arrangement for case in TINY}
    expected = {
        "gpt_neox": Arrangement.PARALLEL, "gpt_neox-serial": Arrangement.PRE, "gemma": Arrangement.PRE,
        "gemma2": Arrangement.SANDWICH, "gemma3_text": Arrangement.SANDWICH, "olmo2": Arrangement.POST,
        "bert": Arrangement.OUTER, "gpt2": Arrangement.PRE, "llama": Arrangement.PRE,
    }  # fmt: skip
    assert {case: found[case] for case in expected} == expected


def test_activations() -> None:
    words = {case: spec(case).layers[-1].mlp.activation for case in ("gpt2", "llama", "gemma", "gemma2", "bert")}
    assert words == {
        "gpt2": Activation.GELU_WRITTEN, "llama": Activation.SILU, "gemma": Activation.GELU_TANH,
        "gemma2": Activation.GELU_TANH, "bert": Activation.GELU,
    }  # fmt: skip
    assert spec("gpt_oss").layers[0].mlp.activation is Activation.CLAMPED_SWIGLU
    assert spec("llama", hidden_act="relu").layers[0].mlp.activation is Activation.RELU


def test_gemmas_gelu_is_the_approximation() -> None:
    """Both for its first files, which say "gelu", and where a null stands beside the word."""
    for words in ({"hidden_act": "gelu"}, {"hidden_act": "gelu", "hidden_activation": None}):
        assert spec("gemma", **words).layers[0].mlp.activation is Activation.GELU_TANH
    assert spec("gemma2", hidden_activation=None).layers[0].mlp.activation is Activation.GELU_TANH


def test_routers() -> None:
    routers = {case: spec(case).layers[-1].mlp for case in TINY if isinstance(spec(case).layers[-1].mlp, Moe)}
    facts = {case: (m.router, m.normalise_top_k, m.groups, m.top_groups) for case, m in routers.items()}
    assert facts == {
        "mixtral": (Router.SOFTMAX_TOPK, True, 1, 1),
        "qwen3_moe": (Router.SOFTMAX_TOPK, False, 1, 1),
        "qwen3_moe-mixed": (Router.SOFTMAX_TOPK, True, 1, 1),
        "deepseek_v2": (Router.SOFTMAX_TOPK, False, 1, 1),
        "deepseek_v2-groups": (Router.SOFTMAX_TOPK, False, 4, 2),
        "deepseek_v3": (Router.SIGMOID_GROUPS, True, 4, 2),
        "gpt_oss": (Router.TOPK_SOFTMAX, True, 1, 1),
    }
    assert [case for case, m in routers.items() if m.correction_bias] == ["deepseek_v3"]


def test_deepseeks_own_layer_frequency() -> None:
    """Its published code takes layers whose number the frequency divides; transformers knows 1 only."""
    sparse = [isinstance(layer.mlp, Moe) for layer in spec("deepseek_v3", moe_layer_freq=2).layers]
    assert sparse == [False, False, True, False, True, False]


@pytest.mark.parametrize(
    ("case", "changes", "expected"),
    [
        ("gpt_neox", {}, 4),  # a quarter of 16
        ("gpt_neox-serial", {}, 8),  # rope_parameters, as transformers 5 writes rotary_pct
        ("gpt_neox", {"rope_parameters": None, "rotary_pct": 0.5}, 8),
        ("phi3", {}, 16),
        ("phi3-partial", {}, 8),
        ("phi3", {"rope_parameters": None, "partial_rotary_factor": 0.75}, 12),
        ("llama", {}, 16),
        ("gpt2", {}, 0),
        ("bert", {}, 0),
    ],
)
def test_rotated_part_of_a_head(case: str, changes: Config, expected: int) -> None:
    attention = spec(case, **changes).layers[0].attention
    assert isinstance(attention, Attention) and attention.rotary_dim == expected


@pytest.mark.parametrize("case", ["gpt_neox", "gpt_neox-serial", "phi3", "phi3-partial", "llama-biased"])
def test_rotated_part_is_that_of_the_built_model(case: str) -> None:
    model = transformers.AutoModelForCausalLM.from_config(configuration(case))
    tables = [buffer for name, buffer in model.named_buffers() if name.endswith("rotary_emb.inv_freq")]
    attention = spec(case).layers[0].attention
    assert isinstance(attention, Attention) and attention.rotary_dim == 2 * tables[0].numel()


@pytest.mark.parametrize(
    ("case", "changes", "sites", "chance"),
    [
        ("gpt2", {}, "embedding attention residual", 0.1),
        ("gpt2", {"attn_pdrop": 0.0, "resid_pdrop": 0.2}, "embedding residual", 0.2),
        ("gpt2", {"attn_pdrop": 0.0, "resid_pdrop": 0, "embd_pdrop": 0.0}, "embedding attention residual", 0.0),
        ("gpt_neox", {}, "embedding residual", 0.2),
        ("llama", {}, "attention", 0.0),
        ("llama-biased", {}, "attention", 0.3),
        ("phi3", {}, "residual", 0.1),
        ("bert", {}, "embedding attention residual", 0.1),
        ("deepseek_v3", {"attention_dropout": None}, "attention", 0.0),
    ],
)
def test_dropout(case: str, changes: Config, sites: str, chance: float) -> None:
    model = spec(case, **changes)
    found = model.dropout_sites
    assert (found.embedding, found.attention, found.residual) == tuple(
        site in sites.split() for site in ("embedding", "attention", "residual")
    )
    assert model.dropout == chance


def test_bert() -> None:
    model, shapes = spec("bert"), weights("bert")
    assert (model.token_types, model.hidden) == shapes["bert.embeddings.token_type_embeddings.weight"]
    assert model.embedding_norm == model.layers[0].norm and model.final_norm is None
    assert model.head.bias and model.head.transform is Activation.GELU
    assert model.learned_positions
    assert isinstance(model.layers[0].attention, Attention) and not model.layers[0].attention.causal
    assert isinstance(layer := spec("bert", is_decoder=True).layers[0].attention, Attention) and layer.causal


def test_softcaps_and_scale() -> None:
    capped, plain = spec("gemma2"), spec("gemma2-plain")
    assert capped.head.softcap and all(getattr(layer.attention, "softcap", False) for layer in capped.layers)
    assert not plain.head.softcap and not any(getattr(layer.attention, "softcap", True) for layer in plain.layers)
    assert capped.embedding_scale and not spec("llama").embedding_scale


def test_a_bidirectional_window_reaches_half_to_each_side() -> None:
    """transformers halves it, and then lets tokens see what is nearer than that on either side."""
    config = transformers.Gemma3TextConfig(**TINY["gemma3_text"][1], use_bidirectional_attention=True)
    model = parse_config(json.loads(config.to_json_string(use_diff=False)), name="tiny")
    attention = model.layers[0].attention
    assert isinstance(attention, Attention) and not attention.causal
    assert attention.window == 2 * (config.sliding_window - 1) + 1 == 33


@pytest.mark.parametrize(
    ("words", "expected"),
    [({"dtype": "float16"}, "float16"), ({"torch_dtype": "float32"}, "float32"), ({}, "bfloat16"),
     ({"dtype": None, "torch_dtype": "torch.float16"}, "float16")],
)  # fmt: skip
def test_dtype(words: Config, expected: str) -> None:
    values = {key: value for key, value in decoded("llama").items() if key != "dtype"}
    assert parse_config({**values, **words}, name="tiny").dtype == expected


# ------------------------------------------------------------------------------------- what may be left out


@pytest.mark.parametrize("case", [case for case in TINY if "-" not in case])
def test_defaults_are_those_of_transformers(case: str) -> None:
    """A file with nothing but the required sizes makes what the configuration class makes of them."""
    family, full = FAMILIES[decoded(case)["model_type"]], decoded(case)
    spellings = [(*family.spelling.get(key, ()), key) for key in family.required]
    least = {key: full[key] for keys in spellings for key in keys if key in full}
    least |= {"num_attention_heads": 128, "hidden_size": 1024} if case not in ("gpt2",) else {}
    least.pop("num_key_value_heads", None)
    config = type(configuration(case))(**least)
    said = json.loads(config.to_json_string(use_diff=False))
    assert parse_config({"model_type": config.model_type, **least}, name="tiny") == parse_config(said, name="tiny")


@pytest.mark.parametrize("case", TINY)
def test_what_transformers_fills_in_changes_nothing(case: str) -> None:
    """Above all `layer_types`, which it works out from the older keys."""
    settings = {"model_type": configuration(case).model_type, **TINY[case][1]}
    assert parse_config(settings, name="tiny") == spec(case)


def test_null_key_value_heads_are_all_heads() -> None:
    attention = spec("llama", num_key_value_heads=None, head_dim=None).layers[0].attention
    assert isinstance(attention, Attention) and (attention.kv_heads, attention.head_dim) == (4, 16)


def test_no_shared_experts() -> None:
    moe = spec("deepseek_v3", n_shared_experts=None).layers[-1].mlp
    assert isinstance(moe, Moe) and moe.shared_ffn == 0


# ------------------------------------------------------------------------------------------- models around models


def test_text_config() -> None:
    config = transformers.Gemma3Config(text_config=TINY["gemma3_text"][1])
    values = json.loads(config.to_json_string(use_diff=False))
    assert parse_config(values, name="tiny") == spec("gemma3_text")


def test_text_config_of_an_unknown_wrapper() -> None:
    outer = {"model_type": "something_vl", "text_config": decoded("llama"), "torch_dtype": "float16"}
    outer["text_config"].pop("dtype")
    model = parse_config({**outer, "tie_word_embeddings": True}, name="tiny")
    assert (model.family, model.dtype, model.tied_embeddings) == ("llama", "float16", True)
    assert model.layers == spec("llama").layers


def test_the_published_form_of_a_small_gemma_3() -> None:
    """Gemma 3 4B's file leaves out what equals the class's defaults: heads, vocabulary, head_dim."""
    inner = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
             "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}  # fmt: skip
    model = parse_config({"model_type": "gemma3", "text_config": inner, "torch_dtype": "bfloat16"}, name="gemma")
    attention = model.layers[5].attention
    assert isinstance(attention, Attention) and attention.window is None
    assert (attention.heads, attention.kv_heads, attention.head_dim, model.vocab) == (8, 4, 256, 262208)


def test_a_text_config_without_a_type_is_the_wrappers_own() -> None:
    inner = {key: value for key, value in decoded("llama").items() if key != "model_type"}
    assert parse_config({"model_type": "llava", "text_config": inner}, name="tiny").family == "llama"


# ------------------------------------------------------------------------------------------------------- refusals


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(UsageError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text and len(text) < 600
    return text


@pytest.mark.parametrize("kind", ["t5", None, 7, ["llama"], {}])
def test_an_unknown_architecture(kind: object) -> None:
    text = refusal(lambda: parse_config({"model_type": kind, "hidden_size": 64}, name="tiny"))
    assert "module:factory" in text and all(known in text for known in FAMILIES)
    assert ("no model_type" if kind is None else repr(kind)) in text


def test_an_unknown_language_model_inside() -> None:
    text = refusal(lambda: parse_config({"model_type": "gemma3", "text_config": {"model_type": "t5"}}, name="tiny"))
    assert "'t5'" in text
    assert "text_config" in refusal(lambda: parse_config({"model_type": "gemma3"}, name="tiny"))


@pytest.mark.parametrize("case", [case for case in TINY if "-" not in case])
def test_missing_sizes_are_all_listed(case: str) -> None:
    kind = decoded(case)["model_type"]
    text = refusal(lambda: parse_config({"model_type": kind}, name="tiny"))
    family = FAMILIES[kind]
    assert all(family.spelling.get(key, (key,))[0] in text for key in family.required)


def test_a_missing_size_is_named_as_the_family_writes_it() -> None:
    values = {key: value for key, value in decoded("gpt2").items() if key != "n_embd"}
    text = refusal(lambda: parse_config(values, name="tiny"))
    assert text == "tiny: the configuration lacks n_embd; expected all of them"


REFUSED: list[tuple[str, str, Any, str]] = [
    ("llama", "hidden_size", "64", "whole number"),
    ("llama", "hidden_size", 64.0, "whole number"),
    ("llama", "hidden_size", True, "whole number"),
    ("llama", "hidden_size", None, "whole number"),
    ("llama", "hidden_size", -64, "whole number"),
    ("llama", "hidden_size", 2**70, "2^63"),
    ("llama", "vocab_size", 0, "whole number"),
    ("llama", "intermediate_size", None, "whole number"),
    ("llama", "max_position_embeddings", [], "whole number"),
    ("llama", "num_hidden_layers", MOST_LAYERS + 1, "at most"),
    ("llama", "num_key_value_heads", 3, "divisor of the 4"),
    ("llama", "head_dim", 0, "whole number"),
    ("llama", "attention_bias", "yes", "true or false"),
    ("llama", "tie_word_embeddings", 1, "true or false"),
    ("llama", "attention_dropout", 1.5, "probability"),
    ("llama", "attention_dropout", float("nan"), "probability"),
    ("llama", "attention_dropout", "0.1", "a number"),
    ("llama", "hidden_act", "xielu", "one of gelu"),
    ("llama", "dtype", "int8", "bfloat16"),
    ("llama", "per_layer_config", {"0": {"num_attention_heads": 2}}, "module:factory"),
    ("gpt2", "n_head", 5, "divisor of the hidden size 64"),
    ("gpt2", "n_inner", 2.5, "whole number"),
    ("gpt2", "add_cross_attention", True, "module:factory"),
    ("mixtral", "num_experts_per_tok", 5, "at most the 4"),
    ("qwen2", "layer_types", ["full_attention"], "a list of 6"),
    ("qwen2", "layer_types", ["full_attention"] * 5 + ["linear_attention"], "linear_attention"),
    ("qwen2", "layer_types", "full_attention", "a list of 6"),
    ("qwen2-window", "sliding_window", "wide", "whole number"),
    ("qwen3_moe", "mlp_only_layers", [0, "1"], "a list of layer numbers"),
    ("qwen3_moe", "decoder_sparse_step", 0, "whole number"),
    ("gemma3_text", "sliding_window", -1, "whole number"),
    ("deepseek_v2", "topk_method", "best", "greedy"),
    ("deepseek_v2", "mlp_bias", True, "shared"),
    ("deepseek_v3", "n_group", 3, "divisor of the 8"),
    ("deepseek_v3", "topk_group", 5, "at most the 4"),
    ("deepseek_v3", "kv_lora_rank", None, "whole number"),
    ("phi3", "rope_parameters", {"partial_rotary_factor": 2}, "at most 1"),
    ("gpt_neox", "rope_scaling", {"partial_rotary_factor": "all"}, "at most 1"),
]


@pytest.mark.parametrize(("case", "key", "value", "expected"), REFUSED, ids=lambda v: str(v)[:30])
def test_refused_values_are_named_with_their_key(case: str, key: str, value: Any, expected: str) -> None:
    changes = {key: value, "rope_parameters": None} if key == "rope_scaling" else {key: value}
    text = refusal(lambda: spec(case, **changes))
    assert text.startswith("tiny: got ") and key in text and expected in text


def test_heads_that_do_not_divide_are_fine_with_a_head_dim() -> None:
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 6}
    assert "or a head_dim" in refusal(lambda: spec("llama", **sizes, head_dim=None))
    attention = spec("llama", **sizes, head_dim=16).layers[0].attention
    assert isinstance(attention, Attention) and attention.head_dim == 16


def test_a_long_value_does_not_fill_the_screen() -> None:
    refusal(lambda: spec("llama", hidden_size="x\n" * 10_000))


@given(data=st.data())
def test_any_value_gives_a_model_or_one_line(data: st.DataObject) -> None:
    case = data.draw(st.sampled_from(sorted(PARSED)))
    known = sorted({*PARSED[case], *FAMILIES[PARSED[case]["model_type"]].defaults, "text_config", "rope_scaling"})
    leaves = st.none() | st.booleans() | st.integers(-3, 300) | st.integers() | st.floats() | st.text(max_size=9)
    anything = st.recursive(leaves, lambda c: st.lists(c, max_size=7) | st.dictionaries(st.text(), c), max_leaves=7)
    changes = data.draw(st.dictionaries(st.sampled_from(known), anything, min_size=1, max_size=4))
    try:
        model = parse_config({**PARSED[case], **changes}, name="tiny")
    except UsageError as error:
        assert "\n" not in str(error)
    else:
        assert model.depth >= 1


PARSED = {case: decoded(case) for case in TINY}


# ---------------------------------------------------------------------------------------------------------- files


def test_read_config(tmp_path: Path) -> None:
    folder = tmp_path / "my-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(decoded("llama")), encoding="utf-8")
    (folder / "other.json").write_text(json.dumps(decoded("gpt2")), encoding="utf-8")
    assert read_config(folder).name == read_config(folder / "config.json").name == "my-llama"
    assert read_config(folder) == parse_config(decoded("llama"), name="my-llama")
    assert read_config(folder / "other.json").name == "other"


def test_files_that_are_no_configuration(tmp_path: Path) -> None:
    assert "No such file" in refusal(lambda: read_config(tmp_path / "nowhere.json"))
    assert "config.json" in refusal(lambda: read_config(tmp_path))
    file = tmp_path / "config.json"
    for content in (b"{", b"", b"\xff\xfe\x00", b"[" * 100_000, b'{"hidden_size": ' + b"9" * 5000 + b"}"):
        file.write_bytes(content)
        assert "is not JSON" in refusal(lambda: read_config(file))
    for content in (b"[]", b"3", b"null", b'"llama"'):
        file.write_bytes(content)
        assert "expected an object" in refusal(lambda: read_config(file))


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys; from jettison.spec.presets import preset; preset('deepseek-v3');"
        "print(sorted({'torch', 'transformers', 'numpy', 'pydantic', 'difflib'} & sys.modules.keys()))"
    )
    source = Path(__file__).resolve().parents[2] / "src"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(source)}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
