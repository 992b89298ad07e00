"""A torchtune recipe's YAML, key by key."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jettison.cli.main import run
from jettison.core.errors import UsageError
from jettison.frameworks.run_file import RunFile, models, read_run
from jettison.predict.forecast import forecast
from jettison.request.resolve import resolve

FULL = """
model: {_component_: torchtune.models.llama3_1.llama3_1_8b}
checkpointer: {_component_: torchtune.training.FullModelHFCheckpointer, checkpoint_dir: /data}
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, path: /data/t, max_seq_len: 2048}
dataset: {_component_: torchtune.datasets.alpaca_dataset, packed: true}
batch_size: 2
gradient_accumulation_steps: 4
optimizer: {_component_: torch.optim.AdamW, fused: true, lr: 2e-5}
loss: {_component_: torchtune.modules.loss.LinearCrossEntropyLoss}
enable_activation_checkpointing: true
compile: true
dtype: bf16
"""
PLAIN = {
    "kernels": "torchtune",
    "seq": 2048,
    "micro_batch": 2,
    "micro_batches": 4,
    "dp": 8,
    "zero": 3,
    "reshard_after_forward": "always",
    "fsdp_wrap_layers_only": True,
    "precision": "bf16-pure",
    "optimizer": "adamw",
    "recompute": "full",
    "loss": "chunked-output",
}


def given(found: RunFile) -> dict[str, Any]:
    return {name: getattr(found.request, name) for name in found.request.given()}


def written(tmp_path: Path, *changes: tuple[str, str], name: str = "run.yaml") -> Path:
    text = FULL
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    file = tmp_path / name
    file.write_text(text)
    return file


MODEL = "{_component_: torchtune.models.llama3_1.llama3_1_8b}"
LORA = (
    MODEL,
    "{_component_: torchtune.models.llama3_1.lora_llama3_1_8b, lora_attn_modules: [q_proj, output_proj], "
    "apply_lora_to_mlp: true, lora_rank: 16, lora_alpha: 32, lora_dropout: 0.1}",
)


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ((), {}),
        ((("compile: true", "compile: false"),), {"loss": "upcast"}),
        ((("fused: true", "fused: false"),), {"optimizer": "adamw-foreach"}),
        ((("fused: true", "fused: true, foreach: false"),), {}),
        ((("torch.optim.AdamW", "bitsandbytes.optim.AdamW8bit"),), {"optimizer": "adam8bit"}),
        ((("torch.optim.AdamW, fused: true", "bitsandbytes.optim.PagedAdamW"),), {"offload_optimizer": "bitsandbytes"}),
        ((("dtype: bf16", "dtype: fp32"),), {"precision": "fp32"}),
        ((("enable_activation_checkpointing: true", "ac_mode: selective\nac_option: 3"),), {"recompute": "interval:3"}),
        ((("enable_activation_checkpointing: true", "ac_mode: full"),), {}),
        ((("dtype", "enable_activation_offloading: true\ndtype"),), {"offload": True}),
        ((("steps: 4", "steps: 1\noptimizer_in_bwd: true"),), {"micro_batches": 1, "gradients": "in-backward"}),
        ((("dtype", "custom_sharded_layers: [tok_embeddings, output]\ndtype"),), {"fsdp_wrap_layers_only": None}),
        ((("dtype", "memory_efficient_fsdp_wrap: false\ndtype"),), {"fsdp_wrap_layers_only": None, "fsdp_version": 1}),
        ((("dtype", "fsdp_reshard_after_forward: false\ndtype"),), {"reshard_after_forward": "never"}),
        ((("dtype", "fsdp_cpu_offload: true\ndtype"),), {"offload_optimizer": "fsdp2"}),
        ((("dtype", "tensor_parallel_dim: 2\ndtype"),), {"tp": 2, "dp": 4}),
        ((("dtype", "data_parallel_replicate_dim: 2\ndtype"),), {"zero_replicas": 2}),
        ((("dtype", "enable_fp8_training: true\ndtype"),), {"fp8_recipe": "tensorwise", "fp8_param_gather": True}),
        ((("dtype", "enable_fp8_training: true\nfp8_recipe_name: rowwise\ndtype"),), {"fp8_recipe": "rowwise"}),
        ((LORA,), {"lora": "r=16,targets=q_proj+o_proj+gate_proj+down_proj+up_proj,dropout=0.1"}),
        (
            (LORA, ("lora_llama", "qlora_llama")),
            {"lora": "r=16,targets=q_proj+o_proj+gate_proj+down_proj+up_proj,dropout=0.1", "base": "nf4-double"},
        ),
    ],
)
def test_fields(tmp_path: Path, changes: tuple[tuple[str, str], ...], fields: dict[str, Any]) -> None:
    found = read_run(written(tmp_path, *changes), gpus=8)
    assert found.model == "llama3.1-8b"
    assert given(found) == {name: value for name, value in {**PLAIN, **fields}.items() if value is not None}
    assert found.compile == (("compile: true", "compile: false") not in changes)
    resolve(found.spec(), found.request)


def test_one_device_has_no_shards(tmp_path: Path) -> None:
    found = read_run(written(tmp_path, name="8B_full_single_device.yaml"))
    assert (found.request.dp, found.request.zero, found.global_batch) == (1, None, 8)
    with pytest.raises(UsageError, match="give --gpus"):
        read_run(written(tmp_path))


def test_sizes_of_a_builder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = (
        "{_component_: torchtune.models.llama2.llama2, vocab_size: 32000, num_layers: 22, num_heads: 32, "
        "num_kv_heads: 4, embed_dim: 2048, intermediate_dim: 5632, max_seq_len: 2048, norm_eps: 1e-5}"
    )
    file = written(tmp_path, (MODEL, sizes))
    found = read_run(file, gpus=8)
    assert (found.spec().depth, found.spec().hidden, found.spec().vocab) == (22, 2048, 32000)
    usual = read_run(written(tmp_path, (MODEL, sizes.replace(" intermediate_dim: 5632,", "")), name="b.yaml"), gpus=8)
    assert replace(usual.spec(), name="run") == found.spec()  # two thirds of 4 * 2048, rounded up to 256
    assert run(["ledger", "--from", str(file), "--gpus", "8", "--format", "json", "--no-entries"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert run([*read.pop("from")["command"].split()[1:], "--format", "json", "--no-entries"]) == 0
    typed = json.loads(capsys.readouterr().out)
    assert typed.pop("from") is None
    assert typed == read


def test_a_length_that_nobody_says_is_noted(tmp_path: Path) -> None:
    found = read_run(written(tmp_path, (", max_seq_len: 2048", "")), gpus=8)
    assert found.request.seq is None
    assert any("give --seq" in note for note in found.notes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ((("dtype", "quantizer: {_component_: x.Int8DynActInt4WeightQATQuantizer}\ndtype"),), "quantization-aware"),
        ((("LinearCrossEntropyLoss", "DPOLoss"),), "expected LinearCrossEntropyLoss"),
        ((("torch.optim.AdamW", "torch.optim.Rprop"),), "Rprop"),
        ((LORA, ("lora_rank: 16", "lora_rank: 16, use_dora: true")), "DoRA"),
        ((("batch_size: 2", "batch_size: two"),), "expected a whole number"),
        ((("dtype", "warp: 9\ndtype"),), r"warp = 9 \(unknown key\)"),
        ((("llama3_1_8b", "llama9_8b"),), "names no model"),
    ],
)
def test_what_is_refused(tmp_path: Path, changes: tuple[tuple[str, str], ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_run(written(tmp_path, *changes), gpus=8).spec()


def test_every_model_can_be_described(tmp_path: Path) -> None:
    for name in models("torchtune")["models"]:
        found = read_run(written(tmp_path, ("llama3_1.llama3_1_8b", f"x.{name}")), gpus=8)
        assert forecast(resolve(found.spec(), found.request).run).peak_bytes > 0


def test_references_are_followed_and_resolvers_refused(tmp_path: Path) -> None:
    usual = given(read_run(written(tmp_path), gpus=8))
    file = written(
        tmp_path, ("batch_size: 2", "size: 2\nbatch_size: ${size}"), ("/data/t,", "'${checkpointer.checkpoint_dir}/t',")
    )
    assert given(read_run(file, gpus=8, allow_unread=True)) == usual
    for value, why in (("${oc.env:SIZE}", "unknown resolver oc.env"), ("${sizes}", "the file has no key sizes")):
        with pytest.raises(UsageError, match=rf"batch_size = .* \({why}\)"):
            read_run(written(tmp_path, ("batch_size: 2", f"batch_size: {value}")), gpus=8)
