"""The peak of a step, predicted from a config alone, next to the one that the allocator reports on the CPU."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass

import pytest
import torch
import transformers

import jettison
from jettison.dryrun.counter import measured_peak, static_tensors
from jettison.families.config import parse_config
from jettison.families.family import kernels_for
from jettison.predict.forecast import Forecast, forecast
from jettison.spec.precision import PRECISIONS
from jettison.spec.recompute import Recompute
from jettison.spec.run import Run

S, B, H, V, LAYERS = 128, 4, 128, 2048, 6
WITHIN = 0.02


@dataclass(frozen=True, kw_only=True)
class Case:
    family: str
    attention: str
    dtype: str
    recompute: str
    micro_batches: int

    def __str__(self) -> str:
        return f"{self.family}-{self.attention}-{self.dtype}-{self.recompute}-x{self.micro_batches}"


def config_of(case: Case):
    gated = {
        "vocab_size": V,
        "hidden_size": H,
        "intermediate_size": 3 * H,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "max_position_embeddings": S,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    gpt2 = {
        "vocab_size": V,
        "n_embd": H,
        "n_layer": LAYERS,
        "n_head": 8,
        "n_positions": S,
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    make, values = {
        "gpt2": (transformers.GPT2Config, gpt2),
        "llama": (transformers.LlamaConfig, gated),
        "qwen3": (transformers.Qwen3Config, gated),
        "olmo2": (transformers.Olmo2Config, gated),
    }[case.family]
    return make(**values, use_cache=False, attn_implementation=case.attention)


def measured(case: Case, config, steps: int = 3) -> list[int]:
    """Peak bytes of each of the first steps of training, by the allocator's own events."""
    torch.manual_seed(0)
    dtype = getattr(torch, case.dtype)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).train()
    ids = torch.randint(0, V, (B, S))
    batches = [{"input_ids": ids.clone(), "labels": ids.clone()} for _ in range(case.micro_batches)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        for batch in batches:
            model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    planned = case.recompute != "none"
    with jettison.apply(model, case.recompute, batch=batches[0], check="off") if planned else contextlib.nullcontext():
        return [
            measured_peak(step, static_tensors=static_tensors(model, batches, optimizer)).peak_bytes
            for _ in range(steps)
        ]


def predicted(case: Case, config) -> Forecast:
    spec = parse_config(json.loads(json.dumps(config.to_dict())), name=case.family)
    kernels = kernels_for(spec, "huggingface").with_attention(case.attention).on_cpu()
    precision = PRECISIONS["fp32" if case.dtype == "float32" else "bf16-pure"]
    recompute = Recompute.parse(case.recompute, layers=spec.depth)
    return forecast(
        Run(
            model=spec,
            seq=S,
            micro_batch=B,
            micro_batches=case.micro_batches,
            kernels=kernels,
            precision=precision,
            recompute=recompute,
        )
    )


def cases() -> list[Case]:
    """Every value of every axis; the whole product is slow."""
    chosen = []
    for family, attention, recompute, micro_batches, dtype in (
        ("gpt2", "eager", "none", 1, "float32"),
        ("llama", "sdpa", "full", 1, "float32"),
        ("olmo2", "sdpa", "every:2", 1, "bfloat16"),
        ("gpt2", "eager", "selective", 2, "float32"),
        ("qwen3", "sdpa", "none", 2, "bfloat16"),
    ):
        case = {"family": family, "attention": attention, "dtype": dtype}
        chosen.append(Case(**case, recompute=recompute, micro_batches=micro_batches))
    return chosen


def product() -> list[Case]:
    return [
        Case(family=family, attention=attention, dtype=dtype, recompute=recompute, micro_batches=micro_batches)
        for family in ("gpt2", "llama", "qwen3", "olmo2")
        for attention in ("eager", "sdpa")
        for dtype in ("float32", "bfloat16")
        for recompute in ("none", "full", "every:2", "every:3", "every:4", "selective")
        for micro_batches in (1, 2, 3)
        if (attention, recompute) != ("sdpa", "selective")  # a policy that saves nothing there
    ]


def check(case: Case) -> None:
    config = config_of(case)
    answer, found = predicted(case, config), measured(case, config)
    assert found[0] == pytest.approx(answer.first_step_peak_bytes, rel=WITHIN)
    assert found[-1] == pytest.approx(answer.peak_bytes, rel=WITHIN)


@pytest.mark.parametrize("case", cases(), ids=str)
def test_predicted_peak_is_the_measured_one(case: Case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", product(), ids=str)
def test_predicted_peak_is_the_measured_one_in_every_combination(case: Case) -> None:
    check(case)


def test_the_first_step_is_lower_by_the_optimizers_state() -> None:
    case = Case(family="llama", attention="sdpa", dtype="float32", recompute="none", micro_batches=1)
    answer = predicted(case, config_of(case))
    assert answer.peak_bytes - answer.first_step_peak_bytes == answer.stages[0].static.state == 8 * answer.parameters
