"""Architectures put together from blocks of others: parameters, and saved bytes beside traces of transformers' code."""

from __future__ import annotations

import pytest

from jettison.core.errors import UsageError
from jettison.families.config import parse_config
from jettison.request.options import RunRequest
from jettison.request.resolve import resolve
from support.formula_cases import _GROUPED, _TOKENS, WINDOW, FormulaCase, TinyFamily, counts, differences

_HEADS_16 = {**_GROUPED, **_TOKENS, "head_dim": 16}
_ALTERNATING = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
_RESIDUAL = ("attention_dropout", "residual_dropout")


def _tiny(name: str, settings: dict[str, object], *dropout: str) -> TinyFamily:
    return TinyFamily(
        model=f"{name}ForCausalLM", config=f"{name}Config", settings=settings, dropout=dropout or ("attention_dropout",)
    )


TINY = {
    "arcee": _tiny("Arcee", {**_GROUPED, **_TOKENS}),
    "cwm": _tiny("Cwm", {**_HEADS_16, "sliding_window": WINDOW, **_ALTERNATING}),
    "exaone4": _tiny("Exaone4", {**_GROUPED, **_TOKENS, "sliding_window": WINDOW, "sliding_window_pattern": 2}),
    "hunyuan_v1_dense": _tiny("HunYuanDenseV1", _HEADS_16),
    "jais2": _tiny("Jais2", {**_GROUPED, **_TOKENS}),
    "olmo3": _tiny("Olmo3", {**_GROUPED, **_TOKENS, "sliding_window": WINDOW, **_ALTERNATING}),
    "olmoe": _tiny("Olmoe", {**_GROUPED, **_TOKENS, "num_experts": 4, "num_experts_per_tok": 2}),
    "seed_oss": _tiny("SeedOss", _HEADS_16, *_RESIDUAL),
    "smollm3": _tiny("SmolLM3", {**_GROUPED, **_TOKENS, "no_rope_layer_interval": 2}),
    "stablelm": _tiny("StableLm", {**_GROUPED, **_TOKENS}),
    "stablelm heads": _tiny("StableLm", {**_GROUPED, **_TOKENS, "qk_layernorm": True, "use_parallel_residual": True}),
    "starcoder2": _tiny("Starcoder2", {**_GROUPED, **_TOKENS}, *_RESIDUAL, "embedding_dropout"),
}
_SETTINGS = [pytest.param("eager", "fp32", 0.1, marks=pytest.mark.slow), ("sdpa", "bf16-pure", 0.0)]


@pytest.mark.parametrize("family", TINY)
def test_parameters_are_those_of_transformers(family: str) -> None:
    ours, theirs = counts(FormulaCase(family=family))
    assert ours == theirs


@pytest.mark.parametrize("family", TINY)
@pytest.mark.parametrize(("attention", "precision", "dropout"), _SETTINGS)
def test_saved_tensors_are_those_of_transformers(family: str, attention: str, precision: str, dropout: float) -> None:
    case = FormulaCase(family=family, attention=attention, precision=precision, dropout=dropout)
    assert [str(difference) for difference in differences(case)] == []


_STABLE = {
    "model_type": "stablelm",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "intermediate_size": 96,
}


def test_what_the_code_does_otherwise_is_refused() -> None:
    with pytest.raises(UsageError, match=r"got hidden_dropout 0\.1, which has no closed form"):
        parse_config({**_STABLE, "hidden_dropout": 0.1}, name="tiny")


def test_layers_without_rotary_positions_are_listed_one_by_one() -> None:
    inner = {**_STABLE, "model_type": "smollm3", "num_key_value_heads": 2}
    model = parse_config({**inner, "no_rope_layers": [1, 0]}, name="tiny")
    assert [getattr(layer.attention, "rotary_dim", None) for layer in model.layers] == [16, 0]
    with pytest.raises(UsageError, match=r"got no_rope_layers \[1\]; expected a list of 2"):
        parse_config({**inner, "no_rope_layers": [1]}, name="tiny")


@pytest.mark.parametrize(
    ("said", "base"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "nf4"),
        ({"load_in_4bit": True, "bnb_4bit_use_double_quant": True}, "nf4-double"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}, "int8"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "gptq"),
        ({"quant_method": "gptq", "bits": 8, "group_size": 128}, ""),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, ""),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}, "fp8"),
        ({"quant_method": "fp8", "weight_block_size": None}, ""),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, ""),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, ""),
    ],
)
def test_adapters_train_over_the_weights_that_a_configuration_has(said: dict[str, object], base: str) -> None:
    model = parse_config({**_STABLE, "quantization_config": said}, name="tiny")
    found = resolve(model, RunRequest(lora="8")).run.tuning
    assert found is not None and str(found.base) == (base or "plain")
    (remark,) = model.left_out
    assert remark.endswith("is left out: weights are those of --precision")
    assert (f"says --base {base} for adapters" in remark) is bool(base)
    assert resolve(model, RunRequest()).run.tuning is None
    assert "count as quantized" not in remark
    chosen = resolve(model, RunRequest(lora="8", base="plain")).run.tuning
    assert chosen is not None and chosen.base == "plain"


@pytest.mark.parametrize(
    ("said", "key"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "llm_int8_skip_modules"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "modules_to_not_convert"),
    ],
)
def test_layers_that_keep_16_bits_in_a_quantized_model_are_named(said: dict[str, object], key: str) -> None:
    names = ["lm_head", "model.layers.0.mlp.gate", "model.layers.0.input_layernorm", "vision_tower.layers.0.mlp"]
    (remark,) = parse_config({**_STABLE, "quantization_config": {**said, key: names}}, name="tiny").left_out
    assert "count as quantized" not in remark
    names += ["model.layers.0.mlp", "model.layers.1.self_attn.o_proj", "down_proj"]
    (remark,) = parse_config({**_STABLE, "quantization_config": {**said, key: names}}, name="tiny").left_out
    assert "but for model.layers.0.mlp, model.layers.1.self_attn.o_proj, ..., which count as quantized" in remark


def test_what_stands_beside_the_text_is_named() -> None:
    """A tower of 24 layers, width 1024 and 4096: 12 x 1024^2 parameters each."""
    vision = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "hidden_act": "gelu"}
    inner = {**_STABLE, "model_type": "qwen2", "num_key_value_heads": 2, "num_nextn_predict_layers": 1}
    outer = {"model_type": "internvl", "text_config": inner, "vision_config": vision}
    model = parse_config({**outer, "quantization_config": {"quant_method": "awq"}}, name="tiny")
    tower, further, quantised = model.left_out
    assert tower.startswith(f"the vision tower (about {24 * 12 * 1024**2 / 1e6:.0f} million parameters)")
    assert further.startswith("a layer for multi-token prediction (MTP) left out, as in the code of transformers; ")
    assert further.endswith("--mtp-num-layers counts them")
    assert "quantization_config (awq) is left out" in quantised
    assert parse_config(_STABLE, name="tiny").left_out == ()
