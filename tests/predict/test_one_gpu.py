"""Published peaks of one GPU: full training is near."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from benchmarks import one_gpu
from benchmarks.litgpt_rows import PackedProduct
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from jettison.dryrun.counter import AllocationCounter
from jettison.request.options import RunRequest
from jettison.request.resolve import model_spec, resolve
from support.target_packages import ROOT, fetched

VIT = str(Path(__file__).parent.parent / "facts" / "one_gpu" / "vit-h14.json")


def test_full_training_without_autocast_is_near() -> None:
    found = [row for row in one_gpu.rows() if row.framework in ("torchtune", "timm")]
    assert len(found) == 5
    assert max(abs(row.first / row.published - 1) for row in found) <= 0.05


def test_a_framework_rule_leaves_the_loss_away_where_there_is_one_alone() -> None:
    found = resolve(model_spec(VIT), RunRequest(like="huggingface"))
    assert "--loss" not in found.like
    assert "--precision bf16-autocast" in found.like


def test_a_trainer_that_patches_with_liger_and_checkpoints_parts_is_near() -> None:
    rows = [row for row in one_gpu.rows() if row.framework == "Automodel" and "loss=fused" not in row.request]
    assert [
        abs(row.now() / row.published - 1) < most for row, most in zip(rows, (0.015, 0.015, 0.02), strict=True)
    ] == [True] * 3


def test_logits_that_a_loop_holds_stay_through_backward() -> None:
    held, dropped = (_step_of_parts(parts=False, hold=hold)[1] for hold in (True, False))
    assert held - dropped == 2 * 2 * 64 * 1024  # 2 b s V


def test_checkpoints_around_a_layers_parts_keep_four_inputs() -> None:
    parts, layers = (_step_of_parts(parts=parts, hold=False)[0] for parts in (True, False))
    tensors = 3 * 2 * 2 * 64 * 32  # three more of b s h, 2 bytes a number
    states = 3 * torch.get_rng_state().nbytes  # each checkpoint keeps the generator's state, on the host
    assert parts - layers == 2 * (tensors + states)  # two layers


def _step_of_parts(*, parts: bool, hold: bool) -> tuple[int, int]:
    """Bytes between forward and backward, and the peak: bf16 Llama, two layers, b = 2, s = 64, h = 32, V = 1024."""
    config = transformers.LlamaConfig(
        vocab_size=1024,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).train()
    if parts:
        for layer in model.model.layers:
            for name in ("mlp", "self_attn", "input_layernorm", "post_attention_layernorm"):
                setattr(layer, name, checkpoint_wrapper(getattr(layer, name)))
    else:
        for place, layer in enumerate(model.model.layers):
            model.model.layers[place] = checkpoint_wrapper(layer)
    ids = torch.zeros(2, 64, dtype=torch.long)
    with AllocationCounter([*model.parameters(), *model.buffers(), ids]) as counter:
        logits = model(ids).logits
        loss = torch.nn.functional.cross_entropy(logits.float().view(-1, 1024), ids.view(-1))
        if not hold:
            del logits
        held_bytes = counter.live_bytes
        loss.backward()
        return held_bytes, counter.peak_bytes


def test_attributes_of_a_node_outlive_backward() -> None:
    """NOTE [ What Fabric and bitsandbytes hold ]: what `ctx` has as an attribute stays while the loss does."""
    x = torch.ones(4, 8, requires_grad=True)
    with AllocationCounter([x]) as counter:
        loss = PackedProduct.apply(2 * x, (16, 8)).sum()
        loss.backward()
        held = counter.live_bytes
        del loss
        assert held - counter.live_bytes == 4 * 8 * 4 + 4  # the input, and the loss itself


@pytest.mark.slow
def test_litgpts_own_modules_take_what_its_table_says(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = fetched(tmp_path_factory.mktemp("litgpt"), "litgpt==0.4.0")
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.litgpt_rows", str(folder), "TinyLlama 1.1B, LoRA"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))},
        check=True,
    )
    (line,) = ran.stdout.splitlines()
    _, published, own = line.split("|")
    assert float(own) == pytest.approx(float(published), rel=0.01)
