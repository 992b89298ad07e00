"""Files of ms-swift: the command line, the YAML, and what is refused."""

from pathlib import Path

import pytest

from jettison.core.errors import UsageError
from jettison.frameworks.run_file import read_run

SFT = """
nproc_per_node=2
CUDA_VISIBLE_DEVICES=0,1 \\
NPROC_PER_NODE=$nproc_per_node \\
swift sft \\
    --model Qwen/Qwen2.5-7B-Instruct \\
    --tuner_type lora \\
    --dataset 'some/data#500' \\
    --torch_dtype bfloat16 \\
    --per_device_train_batch_size 2 \\
    --gradient_accumulation_steps $(expr 16 / $nproc_per_node) \\
    --max_length 2048 \\
    --attn_impl flash_attn \\
    --deepspeed zero2
"""


def write(tmp_path: Path, text: str, name: str = "run.sh") -> Path:
    (tmp_path / name).write_text(text)
    return tmp_path / name


def test_a_command_field_by_field(tmp_path: Path) -> None:
    found = read_run(write(tmp_path, SFT))
    assert (found.framework, found.model, found.gpus, found.unread) == ("swift", "qwen2.5-7b", 2, ())
    given = {name: getattr(found.request, name) for name in found.request.given()}
    assert given == {
        "seq": 2048,
        "attention": "flash-attn",
        "lora": "r=8,targets=all-linear,dropout=0.05",
        "like": "deepspeed",
        "zero_buckets": "reduce=200000000",
        "micro_batch": 2,
        "micro_batches": 8,
        "dp": 2,
        "zero": 2,
        "recompute": "full",
    }
    assert "torch_dtype" in [key.name for key in found.used]
    assert not {"lora_rank", "gradient_checkpointing"} & {key.name for key in found.used}, "defaults, not the file's"


@pytest.mark.parametrize(
    ("old", "new", "field", "value"),
    [
        ("--tuner_type lora", "--train_type full", "lora", None),
        ("--tuner_type lora", "", "lora", "r=8,targets=all-linear,dropout=0.05"),
        ("--tuner_type lora", "--quant_bits 4 --quant_method bnb", "base", "nf4-double"),
        ("--tuner_type lora", "--quant_bits 4", "base", None),
        ("--tuner_type lora", "--quantization_bit 8", "base", "int8"),
        ("swift sft", "NNODES=2 swift sft", "dp", 4),
        ("--deepspeed zero2", "--use_liger_kernel true", "loss", "fused"),
        ("--deepspeed zero2", "--use_liger_kernel true --loss_scale last_round", "loss", "fused"),
        ("--deepspeed zero2", "--use_liger_kernel true --loss_scale last_round+react", "loss", "upcast"),
        ("--deepspeed zero2", "--use_liger_kernel true --enable_channel_loss true", "loss", "upcast"),
        ("--tuner_type lora", "--modules_to_save embed_tokens lm_head", "lora", None),
        ("--gradient_accumulation_steps $(expr 16 / $nproc_per_node)", "", "micro_batches", 4),
        ("--deepspeed zero2", "--fsdp fsdp2", "zero", 3),
        ("--deepspeed zero2", "--lora_dtype bfloat16", "precision", "bf16-pure"),
        ("--attn_impl flash_attn", "--use_flash_attn true --dtype AUTO", "attention", "flash-attn"),
        ("--deepspeed zero2", "--gradient_checkpointing false", "recompute", "none"),
    ],
)
def test_its_own_defaults(tmp_path: Path, old: str, new: str, field: str, value: object) -> None:
    assert old in SFT
    found = getattr(read_run(write(tmp_path, SFT.replace(old, new))).request, field)
    if "modules_to_save" in new:
        assert found.endswith("modules_to_save=embed_tokens+lm_head")
    else:
        assert found == value


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("swift sft", "swift rlhf --rlhf_type dpo", "preference and reinforcement learning"),
        ("swift sft", "megatron sft --tensor_model_parallel_size 2", "Megatron-SWIFT is not read"),
        ("--tuner_type lora", "--tuner_type adalora", "adalora is not modelled; expected lora or full"),
        ("--tuner_type lora", "--tuner_type full --freeze_parameters_ratio 0.5", "parameters frozen by name"),
        ("--tuner_type lora", "--lora_bias all", "lora_bias = all .trained biases"),
        ("--tuner_type lora", "--target_modules all-linear all-embedding", "all-embedding is no known target"),
        (
            "CUDA_VISIBLE_DEVICES=0,1 ",
            "CUDA_VISIBLE_DEVICES=0,1,2,3 ",
            "CUDA_VISIBLE_DEVICES = 0,1,2,3 .fewer processes",
        ),
        ("--deepspeed zero2", "--novel_option 3", r"novel_option = 3 \(unknown key"),
    ],
)
def test_what_is_refused(tmp_path: Path, old: str, new: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        read_run(write(tmp_path, SFT.replace(old, new)))


def test_nodes_that_a_variable_leaves_open(tmp_path: Path) -> None:
    for nodes, gpus in (("2", 4), ("$WORLD_SIZE", 2)):
        found = read_run(write(tmp_path, SFT.replace("swift sft", f"NNODES={nodes} swift sft")))
        assert (found.gpus, any("on how many nodes" in note for note in found.notes)) == (gpus, gpus == 2)


def test_the_same_as_yaml(tmp_path: Path) -> None:
    text = "model: Qwen/Qwen2.5-7B-Instruct\ntuner_type: lora\ndataset: ['a#1']\nmax_length: 2048\ndeepspeed: zero3\n"
    found = read_run(write(tmp_path, text, "run.yaml"), gpus=8)
    assert (found.framework, found.request.zero, found.request.micro_batches, found.request.dp) == ("swift", 3, 2, 8)
    started = read_run(
        write(tmp_path, text + "ENV: {NPROC_PER_NODE: 4, CUDA_VISIBLE_DEVICES: '0,1,2,3'}\n", "env.yaml")
    )
    assert (started.request.dp, started.gpus) == (4, 4)
