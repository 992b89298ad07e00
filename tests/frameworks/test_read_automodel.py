"""NeMo AutoModel's YAML, key by key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jettison.cli.main import run
from jettison.core.errors import UsageError
from jettison.frameworks.run_file import RunFile, read_run
from jettison.predict.forecast import forecast
from jettison.request.resolve import resolve

TEXT = """
recipe: TrainFinetuneRecipeForNextTokenPrediction
step_scheduler: {global_batch_size: 64, local_batch_size: 2, max_steps: 10}
model: {_target_: nemo_automodel.NeMoAutoModel.from_pretrained, pretrained_model_name_or_path: meta-llama/Llama-3.1-8B}
distributed: {strategy: fsdp2, dp_size: none, tp_size: 1, cp_size: 1, sequence_parallel: false}
loss_fn: {_target_: nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy}
packed_sequence: {packed_sequence_size: 4096}
optimizer: {_target_: torch.optim.Adam, lr: 1.0e-5}
"""


def test_gradients_are_reduced_in_the_last_micro_batch(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    for more, said in (("", "last"), (", defer_fsdp_grad_sync: false", "each")):
        file.write_text(TEXT.replace("sequence_parallel: false", f"sequence_parallel: false{more}"))
        found = read_run(file, gpus=8)
        assert resolve(found.spec(), found.request).run.layout.gradient_sync == said


PLAIN = {
    "like": "automodel",
    "micro_batch": 2,
    "micro_batches": 4,
    "seq": 4096,
    "tp": 1,
    "cp": 1,
    "dp": 8,
    "zero": 3,
    "loss": "upcast",
    "recompute": "none",
}


def given(found: RunFile) -> dict[str, Any]:
    return {name: getattr(found.request, name) for name in found.request.given()}


def written(tmp_path: Path, *changes: tuple[str, str]) -> Path:
    text = TEXT
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    file = tmp_path / "run.yaml"
    file.write_text(text)
    return file


MODEL = "pretrained_model_name_or_path: meta-llama/Llama-3.1-8B}"


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ((), {}),
        ((("sequence_parallel: false", "activation_checkpointing: true"),), {"recompute": "parts"}),
        (
            (("sequence_parallel: false", "activation_checkpointing: selective"),),
            {"recompute": "selective-op-alternate"},
        ),
        ((("tp_size: 1", "tp_size: 2"),), {"tp": 2, "sp": False, "dp": 4, "micro_batches": 8}),
        ((("cp_size: 1", "cp_size: 2"),), {"cp": 2, "dp": 4, "micro_batches": 8, "cp_comm_type": "gather"}),
        (
            (("masked_ce.MaskedCrossEntropy", "linear_ce.FusedLinearCrossEntropy"),),
            {"loss": "fused", "keep_logits": False},
        ),
        ((("lr: 1.0e-5", "fused: true"),), {"optimizer": "adamw"}),
        ((("strategy: fsdp2", "strategy: ddp"),), {"zero": 0, "gradients": "buckets"}),
        ((("{packed_sequence_size: 4096}", "{packed_sequence_size: 0}\ndataset: {seq_length: 1024}"),), {"seq": 1024}),
        (
            (("optimizer:", "peft: {dim: 16, alpha: 32, target_modules: '*_proj', dropout: 0.1}\noptimizer:"),),
            {"lora": "r=16,targets=all-linear,dropout=0.1"},
        ),
        (
            (
                (
                    "optimizer:",
                    "peft: {target_modules: ['*.q_proj', '*.v_proj']}\nquantization: {load_in_4bit: true}\noptimizer:",
                ),
            ),
            {"lora": "r=8,targets=q_proj+v_proj", "base": "nf4"},
        ),
        (
            (("optimizer:", "fp8: {enabled: true, recipe_name: rowwise, filter_fqns: [lm_head]}\noptimizer:"),),
            {"fp8_recipe": "rowwise"},
        ),
        (
            (
                (MODEL, "config: {pretrained_model_name_or_path: Qwen/Qwen3-30B-A3B}, backend: {dispatcher: deepep}}"),
                ("sequence_parallel: false", "ep_size: 8, activation_checkpointing: true"),
            ),
            {
                "kernels": "pytorch",
                "dispatcher": "flex",
                "ep": 8,
                "reshard_after_forward": "never",
                "recompute": "full",
            },
        ),
    ],
)
def test_fields(tmp_path: Path, changes: tuple[tuple[str, str], ...], fields: dict[str, Any]) -> None:
    found = read_run(written(tmp_path, *changes), gpus=8)
    assert given(found) == {**PLAIN, **fields}
    assert found.global_batch == 64
    assert forecast(resolve(found.spec(), found.request).run).peak_bytes > 0


def test_devices(tmp_path: Path) -> None:
    assert read_run(written(tmp_path, ("dp_size: none", "dp_size: 4"))).gpus == 4
    with pytest.raises(UsageError, match="give --gpus"):
        read_run(written(tmp_path))
    with pytest.raises(UsageError, match="omit --gpus"):
        read_run(written(tmp_path, ("dp_size: none", "dp_size: 4")), gpus=8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ((("strategy: fsdp2", "strategy: megatron_fsdp"),), "megatron_fsdp"),
        ((("global_batch_size: 64", "global_batch_size: 65"),), "no multiple of"),
        ((("tp_size: 1", "pp_size: 2, pipeline: {pp_schedule: interleaved1f1b}"),), "--virtual-stages"),
        ((("torch.optim.Adam", "dion.Muon"),), "muon|Muon"),
        ((("optimizer:", "kd_ratio: 0.5\noptimizer:"),), "distillation"),
        ((("local_batch_size: 2", "local_batch_size: two"),), "expected a whole number"),
        ((("optimizer:", "warp: 9\noptimizer:"),), "unknown key"),
        (((MODEL, "config: {name_or_path: gpt2, num_hidden_layers: 2}}"),), "other sizes"),
    ],
)
def test_what_is_refused(tmp_path: Path, changes: tuple[tuple[str, str], ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_run(written(tmp_path, *changes), gpus=8)


@pytest.mark.parametrize(("budget", "said"), [("110GiB", "false"), ("60GiB", "true")])
def test_checkpoints_are_written_back(tmp_path: Path, budget: str, said: str) -> None:
    file = written(tmp_path, ("sequence_parallel: false", "activation_checkpointing: selective"))
    assert run(["plan", "--from", str(file), "--gpus", "8", "--gpu", "h200", "--budget", budget, "--write"]) == 0
    text = (tmp_path / "run.planned.yaml").read_text()
    assert f"activation_checkpointing: {said}" in text
    assert read_run(tmp_path / "run.planned.yaml", gpus=8).request.recompute in ("none", "parts")
