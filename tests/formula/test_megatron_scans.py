"""Mamba 2 in Megatron-Core: what it keeps, and what ranks of tensor parallelism share of it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from jettison.core.errors import UsageError
from jettison.families.config import parse_config
from jettison.formula.region import layer_region
from jettison.request.options import RunRequest
from jettison.request.resolve import resolve
from jettison.spec.model import Attention, Layer, Moe
from jettison.spec.run import Run

CONFIG = {
    "model_type": "nemotron_h",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "hybrid_override_pattern": "ME*E",
    "num_attention_heads": 4,
    "head_dim": 16,
    "num_key_value_heads": 2,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 32,
    "n_groups": 4,
    "conv_kernel": 4,
    "chunk_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 80,
    "moe_latent_size": 16,
}
MODEL = parse_config(CONFIG, name="tiny")
B, S, INNER, GROUPS, HEADS = 2, 32, 8 * 16, 4, 8
CONVOLVED = INNER + 2 * GROUPS * 32
JOINT = INNER + CONVOLVED + HEADS


def asked(**more: Any) -> Run:
    return resolve(MODEL, RunRequest(kernels="megatron", precision="bf16", seq=S, micro_batch=B, **more)).run


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_what_a_scan_of_megatron_keeps(tp: int) -> None:
    """The kernel's input, rate and output; what it gated, for the norm; its statistics; the normalised. All shared."""
    run = asked(tp=tp, sp=tp > 1)
    region = layer_region(run.signature, run.model.layers[0])
    kept = Counter(
        (s.role, s.value.nbytes) for step in region.tape.steps if step.path.startswith("mixer") for s in step.saved
    )
    tokens = B * S
    assert kept == Counter(
        {
            ("linear input", tokens * 64 * 2 // tp): 1,  # under sequence parallelism its shard
            ("decay rate", HEADS * 4 // tp): 2,  # by the exponential and by the kernel, the same tensor
            ("scan input", tokens * JOINT * 2 // tp): 1,
            ("scan output", tokens * INNER * 2 // tp): 1,
            ("norm input", tokens * INNER * 2 // tp): 1,
            ("norm statistics", tokens * GROUPS * 4 // tp): 1,
            ("linear input", tokens * INNER * 2 // tp): 1,
        }
    )
    (scan,) = (step for step in region.tape.steps if step.name == "fused_scan")
    each = HEADS * (16 * (32 + 16) + 2 * 16 * 32)  # of a token: its chunk's scores, and states
    assert scan.flops * tp == 2 * tokens * (each + 4 * CONVOLVED)
    local = sum(w.numel for w in region.weights if w.name.startswith("mixer"))
    everything = 64 * JOINT + 4 * CONVOLVED + CONVOLVED + 3 * HEADS + INNER + 64 * INNER
    assert local * tp == everything


def test_latents_are_what_travels() -> None:
    run = asked(dp=4, ep=4)
    region = layer_region(run.signature, run.model.layers[1])
    sent = [c.nbytes for c in region.collectives if c.axis == "ep" and not c.backward]
    rows = B * S * 2
    assert sorted(sent) == sorted([rows * 16 * 2, rows * 16 * 2, rows * 4])  # there, back, and weights in fp32


def test_further_tokens_have_attention_and_experts() -> None:
    run = asked(mtp_num_layers=2)
    first, second = run.model.layers[-2:]
    assert isinstance(first, Layer) and (first.ahead, second.ahead) == (1, 2)
    assert isinstance(first.attention, Attention) and isinstance(first.mlp, Moe) and first.mlp.latent == 16


def test_ranks_that_cannot_share_are_refused() -> None:
    with pytest.raises(UsageError, match=r"--tp 8 does not divide 8 heads in 4 groups of a scan"):
        asked(tp=8)
    with pytest.raises(UsageError, match="does not shard: give --kernels megatron"):
        resolve(MODEL, RunRequest(seq=S, tp=2))
    with pytest.raises(UsageError, match="got --cp 2; layers of tiny have a state-space scan"):
        asked(cp=2)
