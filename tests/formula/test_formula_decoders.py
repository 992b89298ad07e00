"""Decoders with blocks of their own: parameters, and saved tensors beside traces of transformers' code."""

from __future__ import annotations

from typing import Any

import pytest

from jettison.core.errors import UsageError
from jettison.families.config import parse_config
from jettison.formula.region import parameter_count
from support.formula_cases import (
    _GROUPED,
    _TOKENS,
    HEADS,
    HIDDEN,
    LAYERS,
    WINDOW,
    FormulaCase,
    TinyFamily,
    counts,
    differences,
)

_GPT2 = {"n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 64, **_TOKENS}
_GPT2_DROPOUT = ("attn_pdrop", "resid_pdrop", "embd_pdrop")
_BLOOM = {"hidden_size": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, **_TOKENS}
_NEO = {
    "hidden_size": HIDDEN,
    "num_layers": LAYERS,
    "num_heads": HEADS,
    "max_position_embeddings": 64,
    "window_size": WINDOW,
    **_TOKENS,
}
_FALCON = {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, **_TOKENS}
_GROUPS = {**_FALCON, "num_kv_heads": 2, "new_decoder_architecture": True}
_MPT = {"d_model": HIDDEN, "n_layers": LAYERS, "n_heads": HEADS, "max_seq_len": 64, **_TOKENS}


def _tiny(name: str, settings: dict[str, Any], *dropout: str, fused: bool = True) -> TinyFamily:
    return TinyFamily(
        model=f"{name}ForCausalLM",
        config=f"{name}Config",
        settings=settings,
        dropout=dropout,
        attentions=("eager", "sdpa") if fused else ("eager",),
    )


TINY = {
    "bloom": _tiny("Bloom", _BLOOM, "attention_dropout", "hidden_dropout", fused=False),
    "codegen": _tiny("CodeGen", {**_GPT2, "rotary_dim": 8}, *_GPT2_DROPOUT, fused=False),
    "falcon": _tiny("Falcon", _FALCON),
    "falcon groups": _tiny("Falcon", _GROUPS),
    "falcon groups, one norm": _tiny("Falcon", {**_GROUPS, "num_ln_in_parallel_attn": 1}),
    "falcon heads": _tiny(
        "Falcon", {**_FALCON, "multi_query": False, "alibi": True, "parallel_attn": False, "bias": True}
    ),
    "gpt_bigcode": _tiny("GPTBigCode", _GPT2, *_GPT2_DROPOUT),
    "gpt_bigcode heads": _tiny("GPTBigCode", {**_GPT2, "multi_query": False}, *_GPT2_DROPOUT),
    "gpt_neo": _tiny(
        "GPTNeo",
        {**_NEO, "attention_types": [[["global", "local"], 1]]},
        *("attention_dropout", "resid_dropout", "embed_dropout"),
        fused=False,
    ),
    "gptj": _tiny("GPTJ", {**_GPT2, "rotary_dim": 8}, *_GPT2_DROPOUT, fused=False),
    "ministral3": _tiny("Ministral3", {**_GROUPED, **_TOKENS, "head_dim": 16}, "attention_dropout"),
    "mpt": _tiny("Mpt", _MPT, fused=False),  # its configuration takes no fraction as a probability
    "mpt clipped": _tiny("Mpt", {**_MPT, "attn_config": {"clip_qkv": 6.0}}, fused=False),
}
FEW = {"codegen", "falcon groups, one norm", "gpt_bigcode heads", "mpt clipped"}
"""With nothing that another one here has not: tried by the slow tests alone."""


@pytest.mark.parametrize("family", TINY)
def test_parameters_are_those_of_transformers(family: str) -> None:
    ours, theirs = counts(FormulaCase(family=family))
    assert ours == theirs


@pytest.mark.parametrize("family", [pytest.param(n, marks=pytest.mark.slow) if n in FEW else n for n in TINY])
def test_saved_tensors_are_those_of_transformers(family: str) -> None:
    precision = "fp32" if family == "codegen" else "bf16-pure"  # its tables would be cast with its weights here
    case = FormulaCase(family=family, attention=TINY[family].attentions[-1], precision=precision)
    assert [str(difference) for difference in differences(case)] == []


@pytest.mark.slow
@pytest.mark.parametrize("family", TINY)
@pytest.mark.parametrize("batch", [1, 3])
def test_saved_tensors_at_other_shapes_with_dropout_are_those_of_transformers(family: str, batch: int) -> None:
    dropout = 0.1 if TINY[family].dropout else 0.0
    case = FormulaCase(family=family, attention="eager", dropout=dropout, batch=batch, sequence=48)
    assert [str(difference) for difference in differences(case)] == []


def test_words_of_their_own_are_read() -> None:
    """As published files of the first GPT-Neo, StarCoder and MPT have them."""
    neo = {**_NEO, "model_type": "gpt_neo", "vocab_size": 128}
    model = parse_config({**neo, "attention_types": [[["global", "local"], 1]]}, name="tiny")
    assert [layer.window for layer in model.layers] == [None, WINDOW]
    assert parse_config({**neo, "attention_layers": ["global", "local"]}, name="tiny") == model
    with pytest.raises(UsageError, match=r"got attention_layers \['global', 'far'\]; expected a list of global and"):
        parse_config({**neo, "attention_layers": ["global", "far"]}, name="tiny")
    with pytest.raises(UsageError, match=r"got attention_types 3; expected pairs such as"):
        parse_config({**neo, "attention_types": 3}, name="tiny")
    code = {**_GPT2, "model_type": "gpt_bigcode", "vocab_size": 128}
    shared, apart = (
        parameter_count(parse_config({**code, "multi_query": shared}, name="tiny")) for shared in (True, False)
    )
    rows = 2 * (HEADS - 1) * HIDDEN // HEADS  # of keys and values that other heads share
    assert apart - shared == LAYERS * rows * (HIDDEN + 1)
    with pytest.raises(UsageError, match=r"got attn_config 'none'; expected an object"):
        parse_config({**_MPT, "model_type": "mpt", "vocab_size": 128, "attn_config": "none"}, name="tiny")
