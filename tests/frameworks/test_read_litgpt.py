"""litgpt's YAML for its three recipes, key by key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jettison.cli.main import run
from jettison.core.errors import UsageError
from jettison.frameworks.run_file import RunFile, models, read_run
from jettison.predict.forecast import forecast
from jettison.request.resolve import resolve

PRETRAIN = """
model_name: tiny-llama-1.1b
precision: bf16-true
devices: auto
num_nodes: 2
train: {micro_batch_size: 4, global_batch_size: 512, max_seq_length: 2048}
optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 4e-4}}
"""
TUNE = """
checkpoint_dir: checkpoints/meta-llama/Meta-Llama-3-8B
precision: bf16-true
devices: 1
lora_r: 16
lora_alpha: 32
lora_key: true
lora_mlp: true
lora_head: false
train: {micro_batch_size: 2, global_batch_size: 8, max_seq_length: 512}
optimizer: {class_path: torch.optim.AdamW}
"""
LORA = "r=16,targets=q_proj+k_proj+v_proj+mlp,dropout=0.05"


def given(found: RunFile) -> dict[str, Any]:
    return {name: getattr(found.request, name) for name in found.request.given()}


def written(tmp_path: Path, text: str, *changes: tuple[str, str]) -> Path:
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    file = tmp_path / "run.yaml"
    file.write_text(text)
    return file


SHARED = {"zero": 3, "reshard_after_forward": "always", "fsdp_version": 1, "reduce_dtype": "compute"}
OUTER = {"zero": 3, "reshard_after_forward": "always", "fsdp_wrap_layers_only": True}


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ((), {"zero_replicas": 2}),
        ((("num_nodes: 2", "num_nodes: 1"),), {}),
        ((("bf16-true", "bf16-mixed"),), {"precision": "bf16-autocast", "loss": "upcast", "zero_replicas": 2}),
        ((("bf16-true", "16-mixed"),), {"precision": "bf16-autocast", "loss": "upcast", "zero_replicas": 2}),
        ((("torch.optim.AdamW", "bitsandbytes.optim.AdamW8bit"),), {"optimizer": "adam8bit", "zero_replicas": 2}),
    ],
)
def test_pretraining(tmp_path: Path, changes: tuple[tuple[str, str], ...], fields: dict[str, Any]) -> None:
    found = read_run(written(tmp_path, PRETRAIN, *changes), gpus=16)
    plain = {
        "micro_batch": 4,
        "micro_batches": 8,
        "seq": 2048,
        "dp": 16,
        "precision": "bf16-pure",
        "loss": "chunked-output",
        "kernels": "litgpt",
    }
    plain["gradient_sync"] = "last"
    assert given(found) == {**plain, "optimizer": "adamw", **SHARED, **fields}
    assert (found.compile, found.global_batch, found.spec().depth) == (True, 512, 22)
    assert forecast(resolve(found.spec(), found.request).run).peak_bytes > 0


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ((), {"optimizer": "adamw-foreach", "lora": LORA}),
        (
            (("lora_r: 16", "lora_r: 16\nquantize: bnb.nf4-dq"),),
            {"optimizer": "adamw", "offload_optimizer": "bitsandbytes", "base": "nf4-double", "lora": LORA},
        ),
        (
            (("lora_mlp: true", "lora_projection: true\nlora_dropout: 0.0"),),
            {"optimizer": "adamw-foreach", "lora": "r=16,targets=q_proj+k_proj+v_proj+o_proj"},
        ),
        (
            (("devices: 1", "devices: 4"),),
            {"optimizer": "adamw-foreach", "lora": LORA, "dp": 4, "micro_batches": 1, "recompute": "full", **OUTER},
        ),
        (
            (("lora_r: 16\nlora_alpha: 32\nlora_key: true\nlora_mlp: true\nlora_head: false\n", ""),),
            {"optimizer": "adamw-foreach"},
        ),
    ],
)
def test_fine_tuning(tmp_path: Path, changes: tuple[tuple[str, str], ...], fields: dict[str, Any]) -> None:
    found = read_run(written(tmp_path, TUNE, *changes))
    plain = {
        "micro_batch": 2,
        "micro_batches": 4,
        "seq": 512,
        "dp": 1,
        "precision": "bf16-pure",
        "loss": "chunked-output",
        "kernels": "litgpt",
    }
    assert given(found) == {**plain, "recompute": "none", **fields}
    assert (found.compile, found.model) == (False, "llama3-8b")
    assert forecast(resolve(found.spec(), found.request).run).peak_bytes > 0


def test_the_batch_of_a_step_stays_where_the_command_line_cuts_it_otherwise(tmp_path: Path) -> None:
    found = read_run(written(tmp_path, TUNE), asked={"micro_batch": 1})
    assert (found.request.micro_batch, found.request.micro_batches, found.global_batch) == (1, 8, 8)


def test_gradients_are_reduced_in_the_last_micro_batch(tmp_path: Path) -> None:
    for asked, said in (({}, "last"), ({"micro_batches": 1}, None)):
        found = read_run(written(tmp_path, PRETRAIN), gpus=16, asked=asked)
        assert found.request.gradient_sync == said


def test_a_model_of_the_files_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = (
        "model_config: {block_size: 256, padded_vocab_size: 32000, n_layer: 6, n_head: 6, n_embd: 288, head_size: 48, "
        "intermediate_size: 768, mlp_class_name: LLaMAMLP, norm_class_name: RMSNorm, bias: false, "
        "parallel_residual: false}"
    )
    file = written(tmp_path, PRETRAIN, ("model_name: tiny-llama-1.1b", own), (", max_seq_length: 2048", ""))
    found = read_run(file, gpus=16)
    assert (found.spec().depth, found.spec().hidden, found.spec().vocab, found.request.seq) == (6, 288, 32000, 256)
    assert run(["ledger", "--from", str(file), "--gpus", "16", "--format", "json", "--no-entries"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert run([*read.pop("from")["command"].split()[1:], "--format", "json", "--no-entries"]) == 0
    typed = json.loads(capsys.readouterr().out)
    assert typed.pop("from") is None
    assert typed == read
    text = file.read_text()
    for before, after, why in (
        (", bias: false", "", "block_size = 256 .only Llama's blocks are read, and these have bias true;"),
        ("mlp_class_name: LLaMAMLP, ", "", "these have mlp_class_name gptneoxmlp;"),
        ("bias: false", "bias: false, sliding_window_size: 4096", "these have sliding_window_size 4096;"),
    ):
        with pytest.raises(UsageError, match=why):
            read_run(written(tmp_path, text, (before, after)), gpus=16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ((("lora_head: false", "lora_head: true"),), "adapters of the head"),
        ((("precision: bf16-true", "precision: 64-true"),), "64-true"),
        ((("lora_r: 16", "lora_r: 16\nquantize: bnb.fp4"),), r"bnb\.fp4"),
        ((("global_batch_size: 8", "global_batch_size: 1"),), "at least 2 sequences"),
        ((("lora_r: 16", "lora_r: many"),), "expected a whole number"),
        ((("devices: 1", "devices: auto"),), "give --gpus"),
        ((("devices: 1", "devices: 1\nwarp: 9"),), "unknown key"),
        ((("devices: 1", "devices: 2\nquantize: bnb.nf4"),), r"bnb\.nf4 \(litgpt rejects it on several GPUs"),
    ],
)
def test_what_is_refused(tmp_path: Path, changes: tuple[tuple[str, str], ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_run(written(tmp_path, TUNE, *changes))


def test_every_model_can_be_described(tmp_path: Path) -> None:
    for name in models("litgpt")["models"]:
        found = read_run(written(tmp_path, TUNE, ("Meta-Llama-3-8B", name)))
        assert forecast(resolve(found.spec(), found.request).run).peak_bytes > 0
