"""Layers that carry a state along the sequence: parameters, and saved tensors beside traces of transformers' code."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from jettison.core.errors import NotDescribed, UsageError
from jettison.families.config import parse_config
from jettison.families.family import kernels_for
from jettison.formula.region import layer_region, parameter_count
from jettison.ledger.ledger import EACH_ROUND
from jettison.request.options import RunRequest
from jettison.request.resolve import resolve
from jettison.spec.kernels import SsmKernels
from jettison.spec.layout import Layout
from jettison.spec.precision import PRECISIONS
from jettison.spec.run import Run
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


_MAMBA = {"hidden_size": 64, "num_hidden_layers": 2, "pad_token_id": 0}
_MAMBA2 = {"ssm_state_size": 24, "n_groups": 2, "chunk_size": 20}
_PURE = {**_MAMBA, "num_heads": 8, "head_dim": 16, "state_size": 24, "n_groups": 2, "chunk_size": 20}
_NEMOTRON = {
    **_GROUPED,
    **_TOKENS,
    **_MAMBA2,
    "head_dim": 12,
    "layers_block_type": ["linear_attention", "full_attention", "mlp", "moe"],
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 40,
    "n_routed_experts": 4,
}
_JAMBA = {
    **_GROUPED,
    **_TOKENS,
    "num_hidden_layers": 4,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 4,
    "expert_layer_offset": 1,
    "mamba_d_state": 6,
    "mamba_dt_rank": 5,
    "num_experts": 4,
}


def _pure(name: str, settings: dict[str, Any]) -> TinyFamily:
    """Without attention, so that there is one implementation of it."""
    return replace(_tiny(name, settings), dropout=(), attentions=("eager",))


TINY = {
    "jamba": _tiny("Jamba", _JAMBA),
    "mamba": _pure("Mamba", {**_MAMBA, "state_size": 6, "time_step_rank": 5}),
    "mamba2": _pure("Mamba2", _PURE),
    "mamba2 narrow": _pure(
        "Mamba2", {**_PURE, "residual_in_fp32": False, "use_bias": True, "use_conv_bias": False, "n_groups": 8}
    ),
    "nemotron_h": _tiny("NemotronH", _NEMOTRON),
    "nemotron_h latent": _tiny("NemotronH", {**_NEMOTRON, "moe_latent_size": 24}),
    "qwen3_next": _tiny("Qwen3Next", {**_QWEN, **_EXPERTS}),
    "qwen3_next heads": _tiny("Qwen3Next", {**_QWEN, **_EXPERTS, "linear_num_key_heads": 4, "mlp_only_layers": [0, 1]}),
    "qwen3_5_text": _tiny("Qwen3_5", _QWEN, config="Qwen3_5Text"),
    "qwen3_5_moe_text": _tiny("Qwen3_5Moe", {**_QWEN, **_EXPERTS}, config="Qwen3_5MoeText"),
}
FEW = {"qwen3_next heads", "qwen3_5_moe_text", "mamba", "mamba2 narrow"}
"""With nothing that another one here has not: tried by the slow tests alone."""
LONG = [(2, 80), (1, 192)]
"""Two chunks of 64 of which one is filled up, and three whole ones; of 20, four whole ones and ten, one filled up."""
SHORT = [(2, 7), (1, 9)]
"""Of a loop over tokens."""


def _shapes(family: str) -> list[tuple[int, int]]:
    return SHORT if family in ("jamba", "mamba") else LONG


def _case(family: str, precision: str, batch: int, sequence: int) -> FormulaCase:
    attention = TINY[family].attentions[-1]
    return FormulaCase(family=family, attention=attention, precision=precision, batch=batch, sequence=sequence)


def _let_go(case: FormulaCase) -> list[int]:
    """What Nemotron-H's router gives to autograd and lets go of: the best two of the group, the group, all others."""
    tokens = case.batch * case.sequence
    return [tokens * 2 * 8, tokens * 8, tokens * 4] if case.family.startswith("nemotron_h") else []


def _equal(case: FormulaCase) -> None:
    found = differences(case)
    assert [str(d) for d in found if d.expected is not None] == []
    assert sorted(d.delta_bytes for d in found) == sorted(_let_go(case))


@pytest.mark.parametrize("family", TINY)
def test_parameters_are_those_of_transformers(family: str) -> None:
    ours, theirs = counts(FormulaCase(family=family))
    assert ours == theirs


@pytest.mark.parametrize("family", [pytest.param(n, marks=pytest.mark.slow) if n in FEW else n for n in TINY])
def test_saved_tensors_are_those_of_transformers(family: str) -> None:
    for precision, (batch, sequence) in zip(("bf16-pure", "fp32"), _shapes(family), strict=True):
        _equal(_case(family, precision, batch, sequence))


@pytest.mark.slow
@pytest.mark.parametrize("family", TINY)
@pytest.mark.parametrize("precision", ["bf16-pure", "fp32"])
def test_saved_tensors_at_other_shapes_are_those_of_transformers(family: str, precision: str) -> None:
    more = [(2, 2)] if _shapes(family) is SHORT else [(3, 100)]
    for batch, sequence in [*_shapes(family), *more]:
        _equal(replace(_case(family, precision, batch, sequence), attention="eager"))


@pytest.mark.parametrize(
    ("family", "precision", "sequence"),
    [("qwen3_next", "bf16-pure", 32), ("qwen3_next", "fp32", 128), ("nemotron_h", "bf16-pure", 50)],
)
def test_a_real_forward_holds_as_many_bytes(family: str, precision: str, sequence: int) -> None:
    """Of one chunk, and of copied slices, a trace counts what the last round hands on to nobody."""
    case = _case(family, precision, 2, sequence)
    assert closed_form_bytes(case) == observed_bytes(case)
    assert differences(case)
    assert all(difference.expected is None for difference in differences(case))


@pytest.mark.parametrize(
    ("family", "sequence"),
    [
        ("qwen3_next", 80),
        ("mamba", 7),
        *(
            pytest.param(n, 7 if n == "jamba" else 80, marks=pytest.mark.slow)
            for n in TINY
            if n not in ("qwen3_next", "mamba")
        ),
    ],
)
def test_a_real_forward_under_autocast_holds_as_many_bytes(family: str, sequence: int) -> None:
    """The convolution and each product of a loop's round cast what they read, the state once for each that reads it."""
    case = _case(family, "fp32", 2, sequence)
    with torch.autocast("cpu", torch.bfloat16):
        observed = observed_bytes(case)
    signature = replace(run_of(case), precision=PRECISIONS["bf16-autocast"]).signature
    assert [layer_region(signature, layer).saved_bytes for layer in signature.model.layers] == observed


@pytest.mark.slow
@pytest.mark.parametrize("family", TINY)
@pytest.mark.parametrize("precision", ["bf16-pure", "fp32"])
def test_a_real_forward_of_another_shape_does(family: str, precision: str) -> None:
    shapes = [(2, 7), (1, 1)] if _shapes(family) is SHORT else [(1, 64), (2, 15), (2, 128), (3, 100)]
    for batch, sequence in shapes:
        case = _case(family, precision, batch, sequence)
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
        region = layer_region(Run(model=model, seq=seq).signature, model.layers[0])
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


def test_fused_scans_keep_what_their_functions_name() -> None:
    """``ctx.save_for_backward`` of flash-linear-attention and mamba-ssm, tensor by tensor; both need a GPU to run."""
    b, s, narrow, wide = 2, 80, 2, 4

    def held(family: str, role: str = "") -> Counter[tuple[str, int]]:
        model = spec_of(tiny_config(_case(family, "bf16-pure", b, s)))
        kernels = replace(kernels_for(model, "huggingface"), ssm_kernels=SsmKernels.FUSED)
        run = Run(model=model, seq=s, micro_batch=b, kernels=kernels, precision=PRECISIONS["bf16-pure"])
        entries = layer_region(run.signature, model.layers[0]).entries("layer")
        found = {e.storage: (e.role, e.storage_bytes) for e in entries if e.op == "fused_scan" or e.role == role}
        return Counter(found.values())

    delta = held("qwen3_5_text", "convolution input")
    assert delta == Counter(
        {
            ("convolution input", b * s * (2 * 2 * 8 + 4 * 16) * narrow): 1,
            ("scan input", b * s * 2 * 8 * narrow): 2,  # unit queries and keys, of two heads
            ("norm statistics", b * s * 2 * wide): 2,
            ("scan input", b * s * 4 * 16 * narrow): 1,  # values
            ("decay", b * s * 4 * wide): 1,
            ("triangular system", b * s * 4 * 64 * narrow): 1,
            ("write strength", b * s * 4 * narrow): 1,
        }
    )
    inner, convolved, heads = 128, 128 + 2 * 2 * 24, 8
    assert held("nemotron_h") == Counter(
        {
            ("scan input", b * s * (inner + convolved + heads) * narrow): 1,
            ("decay rate", heads * wide): 1,
            ("scan output", b * s * inner * narrow): 1,
            ("norm statistics", b * s * 2 * wide): 1,
        }
    )


@pytest.mark.parametrize("family", ["qwen3_next", "mamba2", "nemotron_h"])
def test_fused_scans_have_the_same_parameters(family: str) -> None:
    model = spec_of(tiny_config(FormulaCase(family=family)))
    sizes = []
    for scans in SsmKernels:
        kernels = replace(kernels_for(model, "huggingface"), ssm_kernels=scans)
        regions = (layer_region(Run(model=model, seq=80, kernels=kernels).signature, layer) for layer in model.layers)
        sizes.append([sorted((weight.name, weight.shape) for weight in region.weights) for region in regions])
    assert sizes[0] == sizes[1]


def test_scans_are_asked_for_where_there_are_some() -> None:
    def asked(family: str, scans: str) -> str:
        model = spec_of(tiny_config(FormulaCase(family=family)))
        return str(resolve(model, RunRequest(seq=80, ssm_kernels=scans)).run.kernels.ssm_kernels)

    assert asked("qwen3_5_text", "fused") == "fused"
    assert asked("jamba", "eager") == "eager"
    with pytest.raises(UsageError, match="got --ssm-kernels fused; the fused kernel of tiny's SSM layers"):
        asked("jamba", "fused")
    with pytest.raises(UsageError, match="got --ssm-kernels fused; tiny has no state-space or linear-attention layer"):
        asked("llama", "fused")
