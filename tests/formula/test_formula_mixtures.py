"""Mixtures with routers of their own: parameters, and saved tensors beside traces of transformers' code."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.model_types import CLOSED, tried

from jettison.core.errors import NotDescribed, UsageError
from jettison.families.config import parse_config
from jettison.formula.region import layer_region
from jettison.spec.layout import Layout
from jettison.spec.model import Moe
from jettison.spec.run import Run
from support import formula_cases
from support.formula_cases import (
    _GROUPED,
    _TOKENS,
    HIDDEN,
    WINDOW,
    FormulaCase,
    TinyFamily,
    counts,
    differences,
    spec_of,
    tiny_config,
)
from support.held_by_autograd import closed_form_bytes, observed_bytes
from support.kernel_sets import MEGATRON

_HEADS_16 = {**_GROUPED, **_TOKENS, "head_dim": 16}
_FEW = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ERNIE = {**_GROUPED, **_TOKENS, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32}
_LLAMA = {**_HEADS_16, "intermediate_size_mlp": 80, "num_local_experts": 4, "num_hidden_layers": 4}


def _tiny(name: str, settings: dict[str, Any], *, config: str = "") -> TinyFamily:
    return TinyFamily(model=f"{name}ForCausalLM", config=f"{config or name}Config", settings=settings)


_DBRX = {"d_model": HIDDEN, "n_layers": 2, "n_heads": 4, "max_seq_len": 64, **_TOKENS}
_CLIPPED = {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0}
_EXPERTS = {"hidden_size": HIDDEN, "ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2}


def _dbrx(experts: dict[str, Any]) -> TinyFamily:
    settings = {**_DBRX, "attn_config": _CLIPPED, "ffn_config": experts}
    return TinyFamily(model="DbrxForCausalLM", config="DbrxConfig", settings=settings, dropout=("resid_pdrop",))


TINY = {
    "dots1": _tiny("Dots1", {**_HEADS_16, **_ROUTED, "first_k_dense_replace": 1}),
    "ernie4_5_moe": _tiny("Ernie4_5_Moe", _ERNIE),
    "glm4_moe": _tiny("Glm4Moe", {**_HEADS_16, **_ROUTED, "use_qk_norm": True}),
    "glm4_moe floored": _tiny("Glm4Moe", {**_GROUPED, **_TOKENS, **_ROUTED, "num_attention_heads": 6}),
    "hunyuan_v1_moe": _tiny("HunYuanMoEV1", {**_HEADS_16, "num_experts": 4, "moe_topk": 2}),
    "llama4_text": _tiny("Llama4", _LLAMA, config="Llama4Text"),
    "llama4_text dense": _tiny(
        "Llama4",
        {**_LLAMA, "interleave_moe_layer_step": 2, "attention_chunk_size": WINDOW, "num_experts_per_tok": 2},
        config="Llama4Text",
    ),
    "phimoe": _tiny("Phimoe", {**_GROUPED, **_TOKENS, **_FEW}),
    "phimoe noise": _tiny(
        "Phimoe",
        {**_GROUPED, **_TOKENS, **_FEW, "input_jitter_noise": 0.01, "attention_bias": True, "lm_head_bias": True},
    ),
}
REAL = {
    "dbrx": _dbrx(_EXPERTS),
    "dbrx noise": _dbrx({**_EXPERTS, "moe_jitter_eps": 0.01, "moe_normalize_expert_weights": None}),
}
"""Their blocks look at values, so that no trace of them is made: held beside a real forward."""
WIDE = {"ernie4_5_moe", "hunyuan_v1_moe"}
"""Their routers' weights are fp32 in a model of 16 bits; a case here casts them with all others."""
_INT, _BOOL = 8, 1


def _let_go(case: FormulaCase) -> list[int]:
    """What routing gives to autograd and lets go of before the layer is over; a trace counts it."""
    tokens = case.batch * case.sequence
    if case.family.startswith(("dots1", "glm4_moe")):  # the best two of the only group, the group, and all others
        return [tokens * 2 * _INT, tokens * _INT, tokens * 4 * _BOOL]
    if case.family.startswith("phimoe"):  # where the best gate of each choice is
        return [tokens * _INT] * 2 * formula_cases.LAYERS
    return []


def _equal(case: FormulaCase) -> None:
    found = differences(case)
    assert [str(d) for d in found if d.expected is not None] == []
    assert sorted(d.delta_bytes for d in found) == sorted(_let_go(case))


@pytest.mark.parametrize("family", [*TINY, *REAL])
def test_parameters_are_those_of_transformers(family: str) -> None:
    ours, theirs = counts(FormulaCase(family=family))
    assert ours == theirs


@pytest.mark.parametrize("family", TINY)
def test_saved_tensors_are_those_of_transformers(family: str) -> None:
    _equal(FormulaCase(family=family, attention="sdpa", precision="fp32" if family in WIDE else "bf16-pure"))


@pytest.mark.parametrize("kind", sorted(WIDE))
def test_routers_in_32_bits_stay_so(kind: str) -> None:
    found = tried(kind)
    assert (found.way, found.exact) == (CLOSED, True), (found.parameters, found.saved)


@pytest.mark.slow
@pytest.mark.parametrize("family", TINY)
@pytest.mark.parametrize("batch", [1, 3])
def test_saved_tensors_at_other_shapes_with_dropout_are_those_of_transformers(family: str, batch: int) -> None:
    dropout = 0.0 if family == "ernie4_5_moe" else 0.1
    _equal(FormulaCase(family=family, attention="eager", dropout=dropout, batch=batch, sequence=48))


@pytest.mark.parametrize("family", ["glm4_moe", "phimoe", *REAL])
def test_a_real_forward_holds_as_many_bytes(family: str) -> None:
    case = FormulaCase(family=family, precision="bf16-pure")
    assert closed_form_bytes(case) == observed_bytes(case)


@pytest.mark.slow
@pytest.mark.parametrize("family", REAL)
@pytest.mark.parametrize(("attention", "batch"), [("eager", 1), ("sdpa", 3)])
def test_a_real_forward_of_another_shape_does(family: str, attention: str, batch: int) -> None:
    dropout = 0.1 if attention == "eager" else 0.0
    case = FormulaCase(family=family, attention=attention, dropout=dropout, batch=batch, sequence=48)
    assert closed_form_bytes(case) == observed_bytes(case)


def test_experts_over_ranks_are_sent_their_tokens_alone() -> None:
    """Of Llama 4: on one rank of transformers' code each expert sees all tokens; elsewhere rows go to the chosen."""
    model = spec_of(tiny_config(FormulaCase(family="llama4_text")))
    run = Run(model=model, seq=32, micro_batch=2, kernels=MEGATRON, layout=Layout(tp=2, sp=True, dp=2, ep=2))
    found = layer_region(run.signature, model.layers[0])
    experts = [w for w in found.weights if w.expert]
    assert [w.numel * 4 for w in experts] == [w.total for w in experts]
    rows = {step.outputs[0].shape[0] for step in found.tape.steps if step.name == "aten._grouped_mm.default"}
    assert rows == {2 * 32}


def test_words_of_their_own_are_read() -> None:
    ernie = {**_ERNIE, "model_type": "ernie4_5_moe", "vocab_size": 128, "num_hidden_layers": 6}
    model = parse_config(
        {**ernie, "moe_layer_start_index": 1, "moe_layer_end_index": 4, "moe_layer_interval": 2}, name="e"
    )
    assert [isinstance(layer.mlp, Moe) for layer in model.layers] == [False, True, False, True, False, False]
    tencent = {**_HEADS_16, "model_type": "hunyuan_v1_moe", "vocab_size": 128, "num_experts": 4}
    assert parse_config({**tencent, "moe_topk": [2, 2]}, name="h") == parse_config({**tencent, "moe_topk": 2}, name="h")
    with pytest.raises(NotDescribed, match=r"got moe_topk \[2, 1\], which differs by layer"):
        parse_config({**tencent, "moe_topk": [2, 1]}, name="h")
    llama = {**_LLAMA, "model_type": "llama4_text", "vocab_size": 128}
    model = parse_config({**llama, "moe_layers": [3], "no_rope_layers": [1, 0, 1, 1]}, name="l")
    assert [getattr(layer.attention, "rotary_dim", 0) for layer in model.layers] == [16, 0, 16, 16]
    assert [layer.window for layer in model.layers] == [8192, None, 8192, 8192]
    assert [layer.mlp.ffn for layer in model.layers] == [80, 80, 80, 96]
    with pytest.raises(UsageError, match=r"got moe_layers 3; expected a list of layer numbers"):
        parse_config({**llama, "moe_layers": 3}, name="l")
    phi = {**_GROUPED, **_FEW, "model_type": "phimoe", "vocab_size": 128}
    with pytest.raises(NotDescribed, match=r"got num_experts_per_tok 1, of which its code knows 2 alone"):
        parse_config({**phi, "num_experts_per_tok": 1}, name="p")
    assert parse_config(phi, name="p").hidden == HIDDEN
