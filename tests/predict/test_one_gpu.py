"""Published peaks of one GPU: the page is what its generator writes, and full training is near."""

from __future__ import annotations

from pathlib import Path

from benchmarks import one_gpu_page

from jettison.predict.run_request import RunRequest, model_spec, resolve

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
