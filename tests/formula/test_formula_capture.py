"""The closed form against real models of transformers: every saved tensor of every layer, and every parameter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jettison.families.family import kernels_for
from jettison.formula.region import embedding_region, layer_region
from jettison.ledger.compare import compare
from jettison.spec.kernels import kernels
from jettison.spec.model import Attention
from support.formula_cases import (
    DENSE,
    DTYPES,
    FAMILIES,
    HEADS,
    ROOT,
    WINDOW,
    FormulaCase,
    cases,
    counts,
    differences,
    paired,
    run_of,
    traced,
    written,
)
from support.kernel_sets import KERNELS

BOTH = ("eager", "sdpa")


def _texts(case: FormulaCase) -> list[str]:
    return [str(difference) for difference in differences(case)]


def _with(family: str, attention: str = "sdpa", **more: Any) -> FormulaCase:
    return FormulaCase(family=family, attention=attention, more=tuple(more.items()))


@pytest.mark.parametrize("case", paired(case for family in DENSE for case in cases(family)))
def test_saved_tensors_are_those_of_transformers(case: FormulaCase) -> None:
    assert _texts(case) == []


@pytest.mark.parametrize("family", DENSE)
def test_parameters_are_those_of_transformers(family: str) -> None:
    ours, theirs = counts(FormulaCase(family=family))
    assert ours == theirs


# sizes at which PyTorch or transformers take another way -------------------------------------------------------------


@pytest.mark.parametrize("attention", BOTH)
@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "llama", "phi3", "bert"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_one_odd_sequence_alone(family: str, attention: str, dropout: float) -> None:
    """Heads of a single sequence are a batch of matrices as they are; its shifted labels are a view."""
    assert _texts(FormulaCase(family=family, attention=attention, dropout=dropout, batch=1, sequence=19)) == []


@pytest.mark.parametrize("case", [_with("gpt2", a, n_head=1) for a in BOTH], ids=str)
def test_one_head(case: FormulaCase) -> None:
    assert _texts(case) == []


@pytest.mark.parametrize("case", [_with("llama", a, num_key_value_heads=k) for a in BOTH for k in (1, HEADS)], ids=str)
def test_any_number_of_key_value_heads(case: FormulaCase) -> None:
    assert _texts(case) == []


@pytest.mark.parametrize("head_dim", [256, 264])
def test_wide_heads_have_key_values_of_their_own(head_dim: int) -> None:
    assert _texts(_with("llama", head_dim=head_dim)) == []


@pytest.mark.parametrize("window", [31, 32, 33])
def test_a_window_as_long_as_the_sequence(window: int) -> None:
    assert _texts(_with("mistral windowed", sliding_window=window)) == []


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma3_text", "phi3 partial", "bert"])
@pytest.mark.parametrize("attention", BOTH)
def test_padded_batches(family: str, attention: str) -> None:
    assert _texts(FormulaCase(family=family, attention=attention, precision="bf16-pure", padding=True)) == []


@pytest.mark.parametrize("family", ["gemma", "gemma3_text"])
def test_decoders_that_look_both_ways(family: str) -> None:
    assert _texts(_with(family, use_bidirectional_attention=True)) == []


@pytest.mark.parametrize("word", ["gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "silu", "relu"])
def test_every_activation(word: str) -> None:
    assert _texts(_with("gpt2", "eager", activation_function=word)) == []
    assert _texts(_with("llama", "eager", hidden_act=word)) == []


# that the comparison would notice -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "attention", "delta"),
    [
        # softmax kept in fp32 beside the cast result, twice a layer of 2 x 4 x 32 x 32
        ("gpt2", "eager", -2 * 2 * 4 * 32 * 32 * 4),
        # the loss on bf16 logits (2 x 32 x 128, and its weight), position ids, and the softmax as above
        ("bert", "eager", -2 * 2 * 4 * 32 * 32 * 4 - 2 * 32 * 128 * 2 - 2 - 32 * 8),
        # outputs of the fused kernel copied for the projection: 2 x 32 x 64 a layer
        ("gpt_neox", "sdpa", 2 * 2 * 32 * 64 * 2),
        ("phi3", "sdpa", 2 * 2 * 32 * 64 * 2),
    ],
)
def test_conventions_are_needed(family: str, attention: str, delta: int) -> None:
    """Without what `kernels_for` knows of a family, the closed form is off by exactly that."""
    case = FormulaCase(family=family, attention=attention, precision="bf16-pure")
    run = replace(run_of(case), kernels=kernels("huggingface").with_attention(attention).on_cpu())
    assert sum(d.delta_bytes for d in compare(written(run), traced(case))) == delta


def test_a_wrong_spec_is_noticed() -> None:
    run = run_of(FormulaCase(family="llama", attention="sdpa"))
    layer = run.model.layers[0]
    assert isinstance(layer.attention, Attention)
    wrong = replace(layer, attention=replace(layer.attention, kv_heads=1))
    model = replace(run.model, layers=(layer, wrong))
    found = compare(written(replace(run, model=model)), traced(FormulaCase(family="llama", attention="sdpa")))
    assert {d.layer for d in found} == {"layers.1"}


def test_every_layer_is_compared() -> None:
    ledger = traced(FormulaCase(family="gemma3_text"))
    assert ledger.layers == (ROOT, *(f"layers.{i}" for i in range(4)))
    assert all(nbytes > 0 for nbytes in ledger.by_layer().values())


# what belongs to whom -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "pairs"), [("llama", 1), ("gemma3_text", 2), ("gpt2", 0)])
def test_rotary_tables_are_held_once(family: str, pairs: int) -> None:
    run = run_of(FormulaCase(family=family))
    tables = [entry for entry in embedding_region(run.signature).entries("embedding") if entry.role == "rotary table"]
    assert len({entry.storage for entry in tables}) == len(tables) == 2 * pairs
    for layer in run.model.kinds:
        assert all("rotary" not in entry.role for entry in layer_region(run.signature, layer).entries("layer"))


def test_conventions_are_those_of_transformers_only() -> None:
    for family in DENSE:
        model = run_of(FormulaCase(family=family)).model
        for name in KERNELS:
            if not kernels(name).model_code and (name != "nanotron" or family == "llama"):
                assert kernels_for(model, name) == kernels(name)


@pytest.mark.parametrize("precision", DTYPES)
def test_windows_cost_a_mask_a_layer(precision: str) -> None:
    """scaled_dot_product_attention has no window: q, k, v are as many heads each, and b x 1 x s x s comes on top."""
    near = FormulaCase(family="mistral windowed", attention="sdpa", precision=precision)
    far = FormulaCase(family="mistral", attention="sdpa", precision=precision)
    width = DTYPES[precision].itemsize
    extra = traced(near).by_layer()["layers.0"] - traced(far).by_layer()["layers.0"]
    assert FAMILIES["mistral windowed"].settings["sliding_window"] == WINDOW
    assert extra == width * (2 * 2 * (HEADS - 2) * 32 * 16 + 2 * 32 * 32)
