"""A LightningCLI's YAML: the Trainer's arguments, and the usual ones of modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jettison.core.errors import UsageError
from jettison.frameworks.run_file import RunFile, read_run
from jettison.predict.forecast import forecast
from jettison.request.resolve import resolve

TEXT = """
seed_everything: 42
trainer:
  accelerator: gpu
  devices: 4
  num_nodes: 2
  precision: bf16-mixed
  strategy: ddp
  accumulate_grad_batches: 2
  max_steps: 100
model: {class_path: my.Module, init_args: {model_name_or_path: meta-llama/Llama-2-7b-hf, lr: 1e-4}}
data: {class_path: my.Data, init_args: {batch_size: 2, max_length: 1024, num_workers: 4}}
optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 1e-4}}
"""
PLAIN = {
    "like": "huggingface",
    "micro_batch": 2,
    "micro_batches": 2,
    "seq": 1024,
    "dp": 8,
    "precision": "bf16-autocast",
    "optimizer": "adamw-foreach",
}
FSDP = {"zero": 3, "fsdp_version": 1, "reshard_after_forward": "always"}


def given(found: RunFile) -> dict[str, Any]:
    return {name: getattr(found.request, name) for name in found.request.given()}


def written(tmp_path: Path, *changes: tuple[str, str], text: str = TEXT) -> Path:
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    file = tmp_path / "run.yaml"
    file.write_text(text)
    return file


def strategy(name: str, **arguments: str) -> tuple[str, str]:
    inside = ", ".join(f"{key}: {value}" for key, value in arguments.items())
    return "strategy: ddp", f"strategy: {{class_path: lightning.pytorch.strategies.{name}, init_args: {{{inside}}}}}"


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ((), {"zero": 0}),
        ((("strategy: ddp", "strategy: auto"),), {"zero": 0}),
        ((("strategy: ddp", "strategy: fsdp"),), {**FSDP, "fsdp_one_unit": True}),
        (
            (strategy("FSDPStrategy", auto_wrap_policy="[my.Block]", activation_checkpointing_policy="[my.Block]"),),
            {**FSDP, "recompute": "full"},
        ),
        ((strategy("FSDPStrategy", sharding_strategy="SHARD_GRAD_OP"),), {"zero": 3, "reshard_after_forward": "never"}),
        (
            (strategy("FSDPStrategy", sharding_strategy="HYBRID_SHARD", auto_wrap_policy="[my.Block]"),),
            {**FSDP, "zero_replicas": 2},
        ),
        (
            (("strategy: ddp", "strategy: deepspeed_stage_2"), ("bf16-mixed", "bf16-true")),
            {
                "like": "deepspeed",
                "zero": 2,
                "precision": "bf16",
                "optimizer": "adamw-deepspeed",
                "zero_buckets": "reduce=200000000,buckets=2",
            },
        ),
        (
            (strategy("DeepSpeedStrategy", stage="3", offload_optimizer="true"),),
            {
                "like": "deepspeed",
                "zero": 3,
                "zero_buckets": "reduce=200000000,sub-group=1000000000000",
                "precision": "bf16",
                "optimizer": "adamw-deepspeed",
                "offload_optimizer": "deepspeed",
            },
        ),
        ((("precision: bf16-mixed", "precision: bf16-true"),), {"zero": 0, "precision": "bf16-pure"}),
        ((("precision: bf16-mixed", "precision: 16-mixed"),), {"zero": 0, "precision": "bf16-autocast"}),
        ((("  precision: bf16-mixed\n", ""),), {"zero": 0, "precision": "fp32"}),
        ((("devices: 4", "devices: '0,1,2,3'"),), {"zero": 0}),
        ((("{lr: 1e-4}}\n", "{lr: 1e-4, fused: true}}\n"),), {"zero": 0, "optimizer": "adamw"}),
    ],
)
def test_fields(tmp_path: Path, changes: tuple[tuple[str, str], ...], fields: dict[str, Any]) -> None:
    found = read_run(written(tmp_path, *changes))
    assert given(found) == {**PLAIN, **fields}
    assert (found.model, found.gpus, found.global_batch) == ("llama2-7b", 8, 32)
    assert forecast(resolve(found.spec(), found.request).run).peak_bytes > 0


def test_keys_under_fit_are_the_same(tmp_path: Path) -> None:
    inside = "fit:\n" + "\n".join(f"  {line}" for line in TEXT.splitlines())
    assert read_run(written(tmp_path, text=inside)).request == read_run(written(tmp_path)).request


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ((("precision: bf16-mixed", "precision: 64-true"),), "64-true"),
        ((("strategy: ddp", "strategy: horovod"),), "expected auto, ddp, fsdp"),
        ((("strategy: ddp", "plugins: [x]\n  strategy: ddp"),), "plugins"),
        ((("lr: 1e-4}}\ndata", "lr: 1e-4, depth: 99}}\ndata"),), r"depth = 99 \(unknown key"),
        ((("batch_size: 2", "batch_size: two"),), "expected a whole number"),
        ((("devices: 4", "devices: auto"),), "give --gpus"),
        ((strategy("FSDPStrategy", cpu_offload="true"),), "parameters with FSDP1"),
    ],
)
def test_what_is_refused(tmp_path: Path, changes: tuple[tuple[str, str], ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_run(written(tmp_path, *changes))
