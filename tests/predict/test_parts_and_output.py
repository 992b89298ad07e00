"""Checkpoints of a layer's parts, and logits that a loop has a name for: every byte of a step counted, and said."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from jettison.core.errors import UsageError
from jettison.predict.forecast import forecast
from jettison.request.options import RunRequest
from jettison.request.resolve import model_spec, resolve, run_of
from jettison.spec.precision import PRECISIONS
from jettison.spec.recompute import Mode, Recompute
from support import formula_cases
from support.counted_steps import second_step_bytes, with_own_loss
from support.formula_cases import FAMILIES, VOCABULARY, FormulaCase, TinyFamily, model_of
from support.pipeline_peaks import loss_of

MIXTRAL = TinyFamily(
    model="MixtralForCausalLM",
    config="MixtralConfig",
    settings={
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "experts_implementation": "grouped_mm",
    },
)
WRAPPED = (
    *("self_attn", "attn", "mlp"),
    *("input_layernorm", "post_attention_layernorm", "post_feedforward_layernorm", "ln_1", "ln_2"),
)
"""Attention, feed-forward block and norms, by the names that families have for them."""


def case_of(family: str) -> FormulaCase:
    depth = "n_layer" if family == "gpt2" else "num_hidden_layers"
    return FormulaCase(family=family, attention="sdpa", batch=2, sequence=64, more=((depth, 3), ("vocab_size", 512)))


def wrap_parts(model: nn.Module) -> None:
    """A checkpoint around each part of each layer."""
    for module in list(model.modules()):
        if isinstance(module, nn.ModuleList):
            for layer in module:
                for name in WRAPPED:
                    if hasattr(layer, name):
                        setattr(layer, name, checkpoint_wrapper(getattr(layer, name), preserve_rng_state=False))


def counted(case: FormulaCase, precision: str, *, parts: bool, holds: bool) -> int:
    """Bytes at the peak of a second step."""
    model = model_of(case)
    model = model.to(torch.bfloat16) if precision == "bf16-pure" else model
    if parts:
        wrap_parts(model)
    ids = torch.randint(1, VOCABULARY, (case.batch, case.sequence))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-autocast"):
            out = model(input_ids=ids)
            loss = loss_of(out.logits, ids)
        if not holds:
            del out
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return second_step_bytes(step, model, optimizer, ids)


@pytest.fixture(autouse=True)
def mixtral(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formula_cases, "FAMILIES", {**FAMILIES, "mixtral": MIXTRAL})


@pytest.mark.parametrize(
    ("family", "precision", "parts", "holds"),
    [
        ("llama", "bf16-pure", True, True),
        ("gpt2", "fp32", True, True),
        ("qwen3", "bf16-autocast", True, False),
        ("mixtral", "bf16-pure", True, True),
        pytest.param("llama", "bf16-autocast", True, True, marks=pytest.mark.slow),
        pytest.param("llama", "fp32", True, False, marks=pytest.mark.slow),
        pytest.param("gpt2", "bf16-autocast", False, True, marks=pytest.mark.slow),
        pytest.param("qwen3", "bf16-pure", False, True, marks=pytest.mark.slow),
        pytest.param("olmo2", "fp32", True, True, marks=pytest.mark.slow),
        pytest.param("mixtral", "fp32", True, False, marks=pytest.mark.slow),
    ],
)
def test_a_step_takes_what_is_said(family: str, precision: str, parts: bool, holds: bool) -> None:
    case = case_of(family)
    recompute = Recompute(mode=Mode.PARTS) if parts else Recompute()
    asked = replace(
        with_own_loss(formula_cases.run_of(case)),
        recompute=recompute,
        precision=PRECISIONS[precision],
        micro_batches=1,
        keep_logits=holds,
    )
    assert forecast(asked).peak_bytes == pytest.approx(counted(case, precision, parts=parts, holds=holds), rel=0.003)


def test_parts_of_a_llama_hold_four_inputs() -> None:
    """Of b s h each: of both norms, of attention and of the feed-forward block; `full` holds one."""
    held = {
        word: dict(forecast(run_of("llama3-8b", RunRequest(seq=4096, recompute=word))).layer_bytes())["layers.1"]
        for word in ("parts", "full")
    }
    assert held["full"] == 2 * 4096 * 4096
    assert held["parts"] == 4 * held["full"]


def test_logits_stay_beside_every_backward_behind_theirs() -> None:
    def moments(*, holds: bool) -> dict[tuple[str, str], int]:
        found = forecast(run_of("llama3-8b", RunRequest(seq=4096, recompute="full", keep_logits=holds or None)))
        return {(moment.phase, moment.where): moment.nbytes for moment in found.worst.timeline()}

    without, with_logits = moments(holds=False), moments(holds=True)
    logits = 2 * 4096 * 128256
    backward = [key for key in without if key[0] == "backward" and key[1] != "head"]
    assert {with_logits[key] - without[key] for key in backward} == {logits}
    assert with_logits["backward", "head"] - without["backward", "head"] == logits
    assert all(with_logits[key] == without[key] for key in without if key[0] in ("forward", "optimizer"))


def test_automodel_sets_what_its_recipe_does() -> None:
    found = resolve(model_spec("llama3-8b"), RunRequest(like="automodel"))
    assert found.run.keep_logits
    assert "--keep-logits" in found.like
    assert not resolve(model_spec("llama3-8b"), RunRequest(like="automodel", keep_logits=False)).run.keep_logits
    assert not resolve(model_spec("llama3-8b"), RunRequest(like="automodel", pp=2)).run.keep_logits


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"pp": 2}, "whose schedule calls the model"),
        ({"loss": "fused"}, "returns no logits"),
        ({"loss": "chunked-output"}, "saves the logits anyway"),
        ({"loss": "chunked-cross-entropy"}, "overwrites logits"),
    ],
)
def test_logits_that_no_loop_can_hold_are_refused(given: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        run_of("llama3-8b", RunRequest(keep_logits=True, **given))  # type: ignore[arg-type]
