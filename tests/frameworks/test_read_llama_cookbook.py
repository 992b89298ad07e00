"""Scripts that start llama-cookbook's finetuning.py."""

import re
from pathlib import Path

import pytest

from jettison.core.errors import UsageError
from jettison.frameworks.config_file import read_config_file
from jettison.frameworks.run_file import read_run
from jettison.frameworks.write_back import edited
from jettison.request.resolve import resolve

FSDP = """
torchrun --nnodes 2 --nproc_per_node 4 getting-started/finetuning/finetuning.py --enable_fsdp \\
    --model_name meta-llama/Meta-Llama-3-8B --batch_size_training 2 --context_length 2048 \\
    --dist_checkpoint_root_folder out --fsdp_config.pure_bf16
"""


def write(tmp_path: Path, text: str) -> Path:
    (tmp_path / "run.sh").write_text(text)
    return tmp_path / "run.sh"


def test_a_script_field_by_field(tmp_path: Path) -> None:
    found = read_run(write(tmp_path, FSDP))
    assert (found.framework, found.model, found.gpus) == ("llama_cookbook", "llama3-8b", 8)
    assert {name: getattr(found.request, name) for name in found.request.given()} == {
        "like": "huggingface",
        "seq": 2048,
        "micro_batch": 2,
        "micro_batches": 1,
        "dp": 8,
        "zero": 3,
        "fsdp_version": 1,
        "gradient_sync": "each",
        "reduce_dtype": "bf16",
        "precision": "bf16-pure",
        "optimizer": "adamw-foreach",
        "recompute": "full",
    }


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("--batch_size_training 2 --context_length 2048", "", {"micro_batch": 4, "seq": 4096}),
        (
            "--enable_fsdp",
            "--enable_fsdp --use_peft",
            {"lora": "r=8,targets=q_proj+v_proj,dropout=0.05", "adapter_dtype": "fp32"},
        ),
        (
            "--enable_fsdp",
            "--enable_fsdp --use_peft --lora_config.r 32 --quantization 4bit --quantization_config.quant_type nf4",
            {"lora": "r=32,targets=q_proj+v_proj,dropout=0.05", "base": "nf4"},
        ),
        ("--enable_fsdp", "--use_peft --quantization 8bit", {"base": "int8", "zero": None, "recompute": "none"}),
        ("--enable_fsdp", "--enable_fsdp --fsdp_config.fsdp_activation_checkpointing False", {"recompute": "none"}),
        (
            "--enable_fsdp",
            "--enable_fsdp --sharding_strategy SHARD_GRAD_OP",
            {"reshard_after_forward": "never", "fsdp_version": None},
        ),
        ("--enable_fsdp", "--enable_fsdp --fsdp_config.fsdp_cpu_offload", {"offload_optimizer": "fsdp1"}),
        (
            "--enable_fsdp",
            """--enable_fsdp --use_peft --lora_config.target_modules "['q_proj', 'v_proj']" """,
            {"lora": "r=8,targets=q_proj+v_proj,dropout=0.05"},
        ),
        (
            "--enable_fsdp",
            "--enable_fsdp --gradient_accumulation_steps 4",
            {"micro_batches": 4, "gradient_sync": "each"},
        ),
    ],
)
def test_settings_and_defaults(tmp_path: Path, old: str, new: str, expected: dict[str, object]) -> None:
    assert old in FSDP
    found = read_run(write(tmp_path, FSDP.replace(old, new)))
    assert {name: getattr(found.request, name) for name in expected} == expected
    resolve(found.spec(), found.request)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ("--use_fp16", "fp16 under autocast with a gradient scaler"),
        ("--freeze_layers --num_freeze_layers 3", "partly frozen models"),
        ("--hsdp --sharding_group_size 4", "hsdp = true .hybrid shards"),
        ("--batching_strategy padding", "as long as their longest sample: give --seq"),
        ("--use_peft --peft_method llama_adapter", "only LoRA is modelled"),
        ("--quantization 3bit --use_peft", "expected 4bit or 8bit"),
        ("--novel_option 3", r"novel_option = 3 \(unknown key"),
    ],
)
def test_what_is_refused(tmp_path: Path, more: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        read_run(write(tmp_path, FSDP.replace("--enable_fsdp", f"--enable_fsdp {more}")))


def test_checkpoints_are_written_back(tmp_path: Path) -> None:
    found = read_run(write(tmp_path, FSDP))
    row = next(row for row in found.writes if row["recompute"] == "none")
    text = edited(read_config_file(found.path), {found.written(key): value for key, value in row["set"].items()})
    assert read_run(write(tmp_path, text)).request.recompute == "none"


@pytest.mark.parametrize(("program", "noted"), [("-m llama_recipes.finetuning", True), ("finetuning.py", False)])
def test_releases_that_load_fp32_weights(tmp_path: Path, program: str, noted: bool) -> None:
    found = read_run(write(tmp_path, re.sub(r"\S*finetuning\.py", program, FSDP)))
    assert any(re.match("program = .* before v0.0.3 loads fp32 weights", note) for note in found.notes) is noted
