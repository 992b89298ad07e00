"""Configurations with values at the edge: each is answered with whole, finite numbers, or refused by a sentence."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from benchmarks.model_types import TRIED, tiny_config

from jettison.capture.fake_copies import fake_mode
from jettison.capture.op_traits import op_cost
from jettison.capture.tracer import trace_model
from jettison.cli.estimate import EstimateFlags
from jettison.cli.estimate import estimate as estimate_verb
from jettison.cli.ledger import ledger
from jettison.core.errors import JettisonError
from jettison.families.config import parse_config
from jettison.families.family import FAMILIES
from jettison.models.huggingface import ConfigRequest, batch_for, build, config_of
from jettison.predict.forecast import forecast
from jettison.predict.time import estimate
from jettison.request.options import RunRequest
from jettison.request.resolve import resolve
from jettison.spec.hardware import hardware

EDGES: Final = (0, 1, None, -1, 3, False, True, 0.5, "x", [], {}, 10**12, [0, 0], 2)
DEEPEST: Final = 8

MIMO: Final[dict[str, Any]] = {
    "architectures": ["MiMoV2FlashForCausalLM"],
    "model_type": "mimo_v2_flash",
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "v_head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "partial_rotary_factor": 0.334,
    "sliding_window": 128,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 24,
    "swa_v_head_dim": 16,
    "hybrid_layer_pattern": [0, 1, 1],
    "moe_layer_freq": [0, 1, 1],
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
"""Experts in grouped matmuls, on layers with and without a window; it has no closed form."""
GLM: Final[dict[str, Any]] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "index_head_dim": 16,
    "index_n_heads": 4,
    "index_topk": 16,
    "indexer_types": ["full", "full", "shared", "shared"],
    "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
    "first_k_dense_replace": 2,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "vocab_size": 500,
    "max_position_embeddings": 4096,
    "dtype": "bfloat16",
}
"""A layer hands the indices that it selected to the next ones, which index by them."""


def file_of(folder: Path, values: dict[str, Any]) -> str:
    file = folder / "config.json"
    file.write_text(json.dumps(values), encoding="utf-8")
    return str(file)


def keys_of(values: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from keys_of(value, (*path, key))
        if key != "model_type":
            yield (*path, key)


def with_value(values: dict[str, Any], path: tuple[str, ...], value: object) -> dict[str, Any]:
    changed: dict[str, Any] = json.loads(json.dumps(values))
    holder = changed
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    return changed


CLOSED: Final = sorted(kind for kind in TRIED if kind in FAMILIES)


@pytest.mark.parametrize("part", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 10))])
def test_a_value_at_the_edge_is_answered_or_refused(part: int) -> None:
    """A twentieth of all values of all keys of all described types each."""
    draw, answered, refused = random.Random(part), 0, 0
    gpu = hardware("h100-80gb")
    for kind in CLOSED:
        values = tiny_config(kind)
        for path in keys_of(values):
            for edge in EDGES:
                if draw.random() > 0.05:
                    continue
                try:
                    model = parse_config(with_value(values, path, edge), name=kind)
                    if model.depth > DEEPEST:
                        continue
                    run = resolve(model, RunRequest(seq=32)).run
                    seconds, peak = estimate(run, gpu).step_seconds, forecast(run).peak_bytes
                except JettisonError:
                    refused += 1
                    continue
                answered += 1
                assert math.isfinite(seconds) and seconds > 0 and peak > 0, (kind, path, edge)
    assert answered > 500 and refused > 250


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (None, None),
        ("sliding_window", 0),
        ("sliding_window", 1),
        *(
            pytest.param(key, value, marks=pytest.mark.slow)
            for key in ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "num_key_value_heads")
            for value in (0, 1, 3)
        ),
    ],
)
def test_a_recorded_value_at_the_edge_is_answered_or_refused(tmp_path: Path, key: str | None, value: object) -> None:
    values = MIMO if key is None else MIMO | {key: value}
    try:
        found = estimate_verb(file_of(tmp_path, values), RunRequest(seq=32), EstimateFlags(gpu="h100-80gb")).found
    except JettisonError:
        assert key is not None
    else:
        assert math.isfinite(found.step_seconds) and found.step_seconds > 0


def test_experts_of_a_recording_have_their_flops(tmp_path: Path) -> None:
    """Six matmuls of a gated expert's size for each of a token's two experts, on two layers."""
    report = estimate_verb(file_of(tmp_path, MIMO), RunRequest(seq=32), EstimateFlags(gpu="h100-80gb"))
    twice = estimate_verb(
        file_of(tmp_path, MIMO | {"moe_intermediate_size": 64}), RunRequest(seq=32), EstimateFlags(gpu="h100-80gb")
    )
    rows, more = 2 * 32, 64 - 32
    assert twice.found.model_flops() - report.found.model_flops() == 3 * 2 * rows * 3 * MIMO["hidden_size"] * more * 2


@pytest.mark.parametrize(
    ("a", "b", "groups", "flops"),
    [
        ((6, 8), (2, 8, 16), 2, 2 * 6 * 8 * 16),
        ((2, 6, 8), (2, 8, 16), 0, 2 * 2 * 6 * 8 * 16),
        ((16, 8), (8, 16), 2, 2 * 16 * 8 * 16),
        ((2, 6, 8), (8, 16), 2, 2 * 6 * 8 * 16),
    ],
)
def test_flops_of_grouped_matmuls(a: tuple[int, ...], b: tuple[int, ...], groups: int, flops: int) -> None:
    """Rows, the shared dim, or columns are dealt out to the groups; each multiply-add is done once."""
    given = (torch.zeros(a), torch.zeros(b), torch.zeros(groups, dtype=torch.int32) if groups else None)
    assert op_cost(torch.ops.aten._grouped_mm.default, given, {}, torch.zeros(1))[0] == flops


def test_indices_that_a_block_returns_are_never_read_from_unwritten_memory(tmp_path: Path) -> None:
    """Memory is full of large numbers when the next block indexes by what a stand-in for the first one returned."""

    def dirty() -> None:
        held = [torch.full((n,), 842080300, dtype=torch.int64) for n in range(16, 4096, 16) for _ in range(4)]
        del held

    dirty()
    first = ledger(file_of(tmp_path, GLM), RunRequest(seq=33)).document()
    dirty()
    assert (
        ledger(file_of(tmp_path, GLM | {"eos_token_id": 1}), RunRequest(seq=33)).document()["peak_bytes"]
        == (first["peak_bytes"])
    )


def test_what_stands_for_a_block_s_integers_is_fake() -> None:
    config = config_of(GLM, "glm")
    mode = fake_mode(allow_non_fake_inputs=True)
    asked = ConfigRequest(seq=32, micro_batch=1)
    model = build(config, asked, mode)
    trace = trace_model(model, batch_for(model, config, asked), mode=mode)
    assert not trace.warnings and len(trace.calls) == GLM["num_hidden_layers"]
