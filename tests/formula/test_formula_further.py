"""Further architectures of the same blocks: parameters, and saved tensors beside traces of transformers' code."""

from __future__ import annotations

from typing import Any

import pytest

from support.formula_cases import _GROUPED, _PLAIN, _TOKENS, WINDOW, FormulaCase, TinyFamily, counts, differences

_HEADS_16 = {**_GROUPED, **_TOKENS, "head_dim": 16}
_FEW = {**_GROUPED, **_TOKENS, "num_local_experts": 4, "num_experts_per_tok": 2}
_ENCODER = {**_PLAIN, "pad_token_id": 1, "max_position_embeddings": 64 + 2}
_BERT_DROPOUT = ("hidden_dropout_prob", "attention_probs_dropout_prob")


def _tiny(name: str, settings: dict[str, Any], *dropout: str, head: str = "ForCausalLM") -> TinyFamily:
    return TinyFamily(
        model=f"{name}{head}", config=f"{name}Config", settings=settings, dropout=dropout or ("attention_dropout",)
    )


TINY = {
    "biogpt": _tiny("BioGpt", {**_PLAIN, **_TOKENS, "activation_dropout": 0.0, "layerdrop": 0.0}, *_BERT_DROPOUT),
    "cohere": _tiny("Cohere", {**_GROUPED, **_TOKENS}),
    "cohere heads": _tiny("Cohere", {**_GROUPED, **_TOKENS, "use_qk_norm": True}),
    "cohere2": _tiny("Cohere2", {**_HEADS_16, "sliding_window": WINDOW, "sliding_window_pattern": 2}),
    "ernie4_5": _tiny("Ernie4_5", _HEADS_16),
    "flex_olmo": _tiny("FlexOlmo", {**_GROUPED, **_TOKENS, "num_experts": 4, "num_experts_per_tok": 2}),
    "glm": _tiny("Glm", _HEADS_16),
    "glm4": _tiny("Glm4", _HEADS_16),
    "granite": _tiny("Granite", {**_GROUPED, **_TOKENS}),
    "granitemoe": _tiny("GraniteMoe", _FEW),
    "granitemoeshared": _tiny("GraniteMoeShared", {**_FEW, "shared_intermediate_size": 48}),
    "granitemoeshared none": _tiny("GraniteMoeShared", {**_FEW, "shared_intermediate_size": 0}),
    "helium": _tiny("Helium", _HEADS_16),
    "internlm3": TinyFamily(
        model="LlamaForCausalLM", config="InternLM3Config", settings={**_HEADS_16, "qkv_bias": True, "bias": True}
    ),
    "minimax_m2": _tiny("MiniMaxM2", {**_FEW, "head_dim": 16, "rotary_dim": 8}),
    "ministral": _tiny("Ministral", {**_HEADS_16, "sliding_window": WINDOW}),
    "nemotron": _tiny("Nemotron", _HEADS_16),
    "olmo": _tiny("Olmo", {**_GROUPED, **_TOKENS}),
    "opt": _tiny(
        "OPT", {**_PLAIN, **_TOKENS, "ffn_dim": 96, "word_embed_proj_dim": 64, "max_position_embeddings": 64}, "dropout"
    ),
    "phi": _tiny("Phi", {**_GROUPED, **_TOKENS}, "attention_dropout", "resid_pdrop", "embd_pdrop"),
    "phi heads": _tiny(
        "Phi", {**_GROUPED, **_TOKENS, "qk_layernorm": True}, "attention_dropout", "resid_pdrop", "embd_pdrop"
    ),
    "qwen2_moe": _tiny(
        "Qwen2Moe",
        {
            **_GROUPED,
            **_TOKENS,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
        },
    ),
    "roberta": _tiny("Roberta", _ENCODER, *_BERT_DROPOUT, head="ForMaskedLM"),
}
PLAIN = {"phi heads", "flex_olmo", "glm", "granite", "granitemoe", "internlm3", "ministral", "cohere"}
"""Families with nothing that another one here has not: tried by the slow tests alone."""


def _families() -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow) if name in PLAIN else name for name in TINY]


@pytest.mark.parametrize("family", TINY)
def test_parameters_are_those_of_transformers(family: str) -> None:
    ours, theirs = counts(FormulaCase(family=family))
    assert ours == theirs


@pytest.mark.parametrize("family", _families())
def test_saved_tensors_are_those_of_transformers(family: str) -> None:
    case = FormulaCase(family=family, attention="sdpa", precision="bf16-pure")
    assert [str(difference) for difference in differences(case)] == []


@pytest.mark.slow
@pytest.mark.parametrize("family", TINY)
def test_saved_tensors_with_dropout_are_those_of_transformers(family: str) -> None:
    case = FormulaCase(family=family, attention="eager", precision="fp32", dropout=0.1)
    assert [str(difference) for difference in differences(case)] == []
