"""A configuration file becomes the model that transformers builds from it."""

import json
import re

import pytest
import transformers

from jettison.families.config import parse_config
from jettison.spec.model import Activation, Arrangement, Attention, LatentAttention, Moe, NormKind, QkNorm, Router
from support.spec_cases import TINY, Config, configuration, decoded, of_layer, spec, weights

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
        "gpt_neox": Arrangement.PARALLEL,
        "gpt_neox-serial": Arrangement.PRE,
        "gemma": Arrangement.PRE,
        "gemma2": Arrangement.SANDWICH,
        "gemma3_text": Arrangement.SANDWICH,
        "olmo2": Arrangement.POST,
        "bert": Arrangement.OUTER,
        "gpt2": Arrangement.PRE,
        "llama": Arrangement.PRE,
    }
    assert {case: found[case] for case in expected} == expected


def test_activations() -> None:
    words = {case: spec(case).layers[-1].mlp.activation for case in ("gpt2", "llama", "gemma", "gemma2", "bert")}
    assert words == {
        "gpt2": Activation.GELU_WRITTEN,
        "llama": Activation.SILU,
        "gemma": Activation.GELU_TANH,
        "gemma2": Activation.GELU_TANH,
        "bert": Activation.GELU,
    }
    assert spec("gpt_oss").layers[0].mlp.activation is Activation.CLAMPED_SWIGLU
    assert spec("llama", hidden_act="relu").layers[0].mlp.activation is Activation.RELU


def test_gemmas_gelu_is_the_approximation() -> None:
    """Both for its first files, which say "gelu", and where a null stands beside the word."""
    for words in ({"hidden_act": "gelu"}, {"hidden_act": "gelu", "hidden_activation": None}):
        assert spec("gemma", **words).layers[0].mlp.activation is Activation.GELU_TANH
    assert spec("gemma2", hidden_activation=None).layers[0].mlp.activation is Activation.GELU_TANH


def test_routers() -> None:
    routers = {case: spec(case).layers[-1].mlp for case in TINY if isinstance(spec(case).layers[-1].mlp, Moe)}
    facts = {case: (m.router, m.normalise_top_k, m.groups) for case, m in routers.items()}
    assert facts == {
        "mixtral": (Router.SOFTMAX_TOPK, True, 1),
        "qwen3_moe": (Router.SOFTMAX_TOPK, False, 1),
        "qwen3_moe-mixed": (Router.SOFTMAX_TOPK, True, 1),
        "deepseek_v2": (Router.SOFTMAX_TOPK, False, 1),
        "deepseek_v2-groups": (Router.SOFTMAX_TOPK, False, 4),
        "deepseek_v3": (Router.SIGMOID_GROUPS, True, 4),
        "gpt_oss": (Router.TOPK_SOFTMAX, True, 1),
    }


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
    [
        ({"dtype": "float16"}, "float16"),
        ({"torch_dtype": "float32"}, "float32"),
        ({}, "bfloat16"),
        ({"dtype": None, "torch_dtype": "torch.float16"}, "float16"),
    ],
)
def test_dtype(words: Config, expected: str) -> None:
    values = {key: value for key, value in decoded("llama").items() if key != "dtype"}
    assert parse_config({**values, **words}, name="tiny").dtype == expected
