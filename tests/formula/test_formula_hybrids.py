"""Layers that carry a state along the sequence: parameters, and saved tensors beside traces of transformers' code."""

from __future__ import annotations

from typing import Any

import pytest

from jettison.errors import NotDescribed, UsageError
from jettison.formula.parameters import parameter_count
from jettison.formula.region import layer_region
from jettison.ledger.record import EACH_ROUND
from jettison.spec.huggingface_config import parse_config
from jettison.spec.hybrid_families import HYBRIDS
from jettison.spec.layout import Layout
from jettison.spec.run import Run
from support import formula_cases
from support.formula_cases import (
    _GROUPED,
    _TOKENS,
    FormulaCase,
    TinyFamily,
    counts,
    differences,
    run_of,
    spec_of,
    tiny_config,
)
from support.held_by_autograd import closed_form_bytes, observed_bytes

_DELTA = {"linear_key_head_dim": 8, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
_QWEN = {**_GROUPED, **_TOKENS, **_DELTA, "head_dim": 16, "layer_types": ["linear_attention", "full_attention"]}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}


def _tiny(name: str, settings: dict[str, Any], *, config: str = "") -> TinyFamily:
    return TinyFamily(model=f"{name}ForCausalLM", config=f"{config or name}Config", settings=settings)


TINY = {
    "qwen3_next": _tiny("Qwen3Next", {**_QWEN, **_EXPERTS}),
    "qwen3_next heads": _tiny("Qwen3Next", {**_QWEN, **_EXPERTS, "linear_num_key_heads": 4, "mlp_only_layers": [0, 1]}),
    "qwen3_5_text": _tiny("Qwen3_5", _QWEN, config="Qwen3_5Text"),
    "qwen3_5_moe_text": _tiny("Qwen3_5Moe", {**_QWEN, **_EXPERTS}, config="Qwen3_5MoeText"),
}
FEW = {"qwen3_next heads", "qwen3_5_moe_text"}
"""With nothing that another one here has not: tried by the slow tests alone."""
LONG = [(2, 80), (1, 192)]
"""Two chunks of which one is filled up; three whole ones. Both are of several."""


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formula_cases, "FAMILIES", {**formula_cases.FAMILIES, **TINY})


def test_every_family_is_tried() -> None:
    assert {name.partition(" ")[0] for name in TINY} == set(HYBRIDS)


@pytest.mark.parametrize("family", TINY)
def test_parameters_are_those_of_transformers(family: str) -> None:
    ours, theirs = counts(FormulaCase(family=family))
    assert ours == theirs


@pytest.mark.parametrize("family", [pytest.param(n, marks=pytest.mark.slow) if n in FEW else n for n in TINY])
def test_saved_tensors_are_those_of_transformers(family: str) -> None:
    for precision, (batch, sequence) in zip(("bf16-pure", "fp32"), LONG, strict=True):
        case = FormulaCase(family=family, attention="sdpa", precision=precision, batch=batch, sequence=sequence)
        assert [str(difference) for difference in differences(case)] == []


@pytest.mark.slow
@pytest.mark.parametrize("family", TINY)
@pytest.mark.parametrize("precision", ["bf16-pure", "fp32"])
@pytest.mark.parametrize(("batch", "sequence"), [*LONG, (3, 100)])
def test_saved_tensors_at_other_shapes_are_those_of_transformers(
    family: str, precision: str, batch: int, sequence: int
) -> None:
    case = FormulaCase(family=family, precision=precision, batch=batch, sequence=sequence)
    assert [str(difference) for difference in differences(case)] == []


@pytest.mark.parametrize(
    ("family", "precision", "sequence"), [("qwen3_next", "bf16-pure", 32), ("qwen3_next", "fp32", 128)]
)
def test_a_real_forward_holds_as_many_bytes(family: str, precision: str, sequence: int) -> None:
    """Of one chunk, and of copied slices, a trace counts what the last round hands on to nobody."""
    case = FormulaCase(family=family, attention="sdpa", precision=precision, sequence=sequence)
    assert closed_form_bytes(case) == observed_bytes(case)
    assert all(difference.expected is None for difference in differences(case))


@pytest.mark.slow
@pytest.mark.parametrize("family", TINY)
@pytest.mark.parametrize("precision", ["bf16-pure", "fp32"])
@pytest.mark.parametrize(("batch", "sequence"), [(1, 64), (2, 32), (2, 128), (3, 100)])
def test_a_real_forward_of_another_shape_does(family: str, precision: str, batch: int, sequence: int) -> None:
    case = FormulaCase(family=family, attention="sdpa", precision=precision, batch=batch, sequence=sequence)
    assert closed_form_bytes(case) == observed_bytes(case)


def test_padding_is_told_by_the_batch_s_mask() -> None:
    """Which a trace has in the first layer that reads it."""
    case = FormulaCase(family="qwen3_5_text", precision="bf16-pure", sequence=80, padding=True)
    assert [difference.delta_bytes for difference in differences(case)] == [-2 * 80 * 8, 2 * 80 * 8]


def test_parameters_of_published_sizes() -> None:
    """Of transformers' own models at these sizes, which are its defaults: counted without memory."""
    qwen3_next = {
        "model_type": "qwen3_next",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "vocab_size": 151936,
        "intermediate_size": 5632,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    }
    assert parameter_count(parse_config(qwen3_next, name="80B-A3B")) == 79_674_391_296
    qwen3_5 = {
        "model_type": "qwen3_5_text",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "vocab_size": 248320,
        "intermediate_size": 12288,
    }
    assert parameter_count(parse_config(qwen3_5, name="9B")) == 8_953_803_264


def test_states_grow_with_chunks_and_not_with_their_square() -> None:
    model = spec_of(tiny_config(FormulaCase(family="qwen3_5_text")))
    states = []
    for seq in (1024, 2048):
        region = layer_region(Run(model=model, seq=seq).scene, model.layers[0])
        sizes = {e.storage: e.storage_bytes for e in region.entries("layer") if e.role == f"{EACH_ROUND}state"}
        states.append(sum(sizes.values()))
    assert states == [16 * 4 * 8 * 16 * 4, 2 * 16 * 4 * 8 * 16 * 4]


def test_what_cuts_a_scan_is_refused() -> None:
    model = run_of(FormulaCase(family="qwen3_next")).model
    for layout, flag in ((Layout(tp=2), "--tp 2"), (Layout(cp=2), "--cp 2")):
        with pytest.raises(UsageError, match=f"got {flag}; layers of tiny have a gated delta rule"):
            Run(model=model, seq=64, layout=layout)
    with pytest.raises(UsageError, match="got --packed; layers of tiny have a gated delta rule"):
        Run(model=model, seq=64, packed=32)
    assert Run(model=model, seq=64, layout=Layout(dp=2, ep=2, pp=2, zero=1)).layout.world == 4


def test_words_of_their_own_are_read() -> None:
    qwen = {**_QWEN, "model_type": "qwen3_5_text", "vocab_size": 128, "num_hidden_layers": 4, "layer_types": None}
    scans = [layer.scan is not None for layer in parse_config(qwen, name="q").layers]
    assert scans == [True, True, True, False]
    every_second = parse_config({**qwen, "full_attention_interval": 2}, name="q").layers
    assert [layer.scan is not None for layer in every_second] == [True, False, True, False]
    with pytest.raises(NotDescribed, match="got 'conv' in layer_types; expected full_attention or linear_attention"):
        parse_config({**qwen, "layer_types": ["conv"] * 4}, name="q")
    with pytest.raises(UsageError, match=r"got layer_types .*; expected a list of 4, one word a layer"):
        parse_config({**qwen, "layer_types": ["linear_attention"]}, name="q")
    with pytest.raises(UsageError, match="got linear_num_value_heads 5; expected a multiple of the 2 key heads"):
        parse_config({**qwen, "linear_num_value_heads": 5}, name="q")
