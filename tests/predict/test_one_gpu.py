"""Published peaks of one GPU: the page is what its generator writes, and full training is near."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks import one_gpu_page
from benchmarks.litgpt_rows import PackedProduct

from jettison.measure.memory import AllocationCounter
from jettison.predict.run_request import RunRequest, model_spec, resolve
from support.target_packages import ROOT, fetched

VIT = str(Path(__file__).parent.parent / "facts" / "one_gpu" / "vit-h14.json")


def test_the_page_is_what_its_generator_writes() -> None:
    assert one_gpu_page.PAGE.read_text(encoding="utf-8") == one_gpu_page.page(), "run python -m benchmarks.one_gpu_page"


def test_full_training_without_autocast_is_near() -> None:
    found = [row for row in one_gpu_page.rows() if row.framework in ("torchtune", "timm")]
    assert len(found) == 5
    assert max(abs(row.first / row.published - 1) for row in found) <= 0.05


def test_a_framework_rule_leaves_the_loss_away_where_there_is_one_alone() -> None:
    found = resolve(model_spec(VIT), RunRequest(like="huggingface"))
    assert "--loss" not in found.like
    assert "--precision bf16-autocast" in found.like


def test_a_trainer_that_patches_with_liger_is_near() -> None:
    rows = [row for row in one_gpu_page.rows() if row.framework == "Automodel" and "recompute" not in row.request]
    assert [abs(row.now() / row.published - 1) < 0.03 for row in rows] == [True, True]
    assert all(row.first / row.published > 1.15 for row in rows)


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
