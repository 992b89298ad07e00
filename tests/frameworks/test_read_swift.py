"""Files of ms-swift: the command line, the YAML, and what is refused."""

from pathlib import Path

import pytest

from jettison.core.errors import UsageError
from jettison.frameworks.config_file import read_config_file
from jettison.frameworks.run_file import read_run
from jettison.frameworks.write_back import edited

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


MEGATRON = """
NPROC_PER_NODE=4 \\
CUDA_VISIBLE_DEVICES=0,1,2,3 \\
megatron sft \\
    --model Qwen/Qwen2.5-7B-Instruct \\
    --dataset 'some/data#500' \\
    --tensor_model_parallel_size 2 \\
    --sequence_parallel true \\
    --micro_batch_size 2 \\
    --max_length 2048 \\
    --finetune true \\
    --no_save_optim true
"""


def test_megatron_swift_field_by_field(tmp_path: Path) -> None:
    found = read_run(write(tmp_path, MEGATRON))
    assert (found.framework, found.model, found.gpus, found.global_batch) == ("megatron", "qwen2.5-7b", 4, 16)
    assert {name: getattr(found.request, name) for name in found.request.given()} == {
        "like": "megatron-0.19",
        "seq": 2048,
        "micro_batch": 2,
        "micro_batches": 4,
        "tp": 2,
        "sp": True,
        "dp": 2,
        "zero": 1,
        "attention": "flash",
        "precision": "bf16-main32",
        "accumulation": "fused-dummy",
        "loss": "native",
        "dataloader_attention_mask": False,
        "recompute_modules": "core_attn",
    }
    assert any("give the longest as --seq" in note for note in found.notes)
    full = read_run(write(tmp_path, MEGATRON.replace("--finetune", "--tuner_type full --finetune")))
    assert any("Megatron-SWIFT 4.0 to 4.3" in note for note in full.notes) and full.request == found.request


@pytest.mark.parametrize(
    ("new", "field", "value"),
    [
        ("--recompute_granularity none", "recompute_modules", None),
        ("--recompute_granularity full --recompute_method uniform --recompute_num_layers 2", "recompute", "every:2"),
        ("--use_distributed_optimizer false", "zero", None),
        ("--optimizer dist_muon", "zero", None),
        ("--cross_entropy_loss_fusion false", "loss", None),
        ("--cross_entropy_fusion_impl te", "loss", "te"),
        ("--attention_backend flash_3", "attention", "flash"),
        ("--gradient_accumulation_fusion false", "accumulation", "cast"),
        ("--global_batch_size 32", "micro_batches", 8),
        ("--tuner_type lora", "lora", "r=8,targets=all-linear,dropout=0.05"),
        (
            "--train_type lora --target_modules linear_qkv linear_proj",
            "lora",
            "r=8,targets=linear_qkv+linear_proj,dropout=0.05",
        ),
        ("--padding_free false --model_type qwen2", "pad_to_longest", True),
        ("--torch_dtype float16", "precision", "fp16-main32"),
        ("--pipeline_model_parallel_size 2 --virtual_pipeline_model_parallel_size 2", "virtual_stages", 2),
    ],
)
def test_what_a_megatron_swift_argument_becomes(tmp_path: Path, new: str, field: str, value: object) -> None:
    text = MEGATRON.replace("--finetune true", new)
    assert getattr(read_run(write(tmp_path, text)).request, field) == value
    assert new not in MEGATRON


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("megatron sft", "megatron rlhf --rlhf_type dpo", "preference and reinforcement learning of Megatron-SWIFT"),
        ("--finetune true", "--optimizer_cpu_offload true", "CPU offload of optimizer states is not modelled"),
        ("--finetune true", "--tuner_type lora_llm", "lora_llm is not modelled; expected full or lora"),
        ("--finetune true", "--task_type seq_cls", "heads other than of a language model"),
        ("--finetune true", "--freeze_parameters_ratio 0.5", "parameters frozen by name"),
        ("--finetune true", "--novel_option 3", r"novel_option = 3 \(unknown key"),
    ],
)
def test_what_megatron_swift_is_refused_for(tmp_path: Path, old: str, new: str, why: str) -> None:
    assert old in MEGATRON
    with pytest.raises(UsageError, match=why):
        read_run(write(tmp_path, MEGATRON.replace(old, new)))


def test_megatron_swift_as_yaml(tmp_path: Path) -> None:
    text = "ENV: {NPROC_PER_NODE: 4}\nmodel: Qwen/Qwen2.5-7B-Instruct\ndataset: ['a#1']\nno_save_optim: true\n"
    text += "tensor_model_parallel_size: 2\nsequence_parallel: true\nmicro_batch_size: 2\nmax_length: 2048\n"
    assert read_run(write(tmp_path, text, "run.yaml")).request == read_run(write(tmp_path, MEGATRON)).request


def test_the_file_of_fsdp(tmp_path: Path) -> None:
    """``swift/arguments/sft_args.py``, ``_init_fsdp``."""
    text = SFT.replace("--deepspeed zero2", "--fsdp sharded.json")
    with pytest.raises(UsageError, match=r"fsdp = sharded.json \(file not found, which has the sharding"):
        read_run(write(tmp_path, text))
    own = '{"_note": "ours", "fsdp": "full_shard auto_wrap offload", "fsdp_config": {"activation_checkpointing": true}}'
    write(tmp_path, own, "sharded.json")
    found = read_run(write(tmp_path, text)).request
    assert (found.zero, found.offload_optimizer, found.recompute) == (3, "fsdp2", "full")


@pytest.mark.parametrize("made", ["$(python -c \"print('float32' if wide else 'bfloat16')\")", "`which dtype`"])
def test_the_output_of_a_command_is_unknown(tmp_path: Path, made: str) -> None:
    text = f"DTYPE={made}\n" + SFT.replace("--torch_dtype bfloat16", '--torch_dtype "$DTYPE"')
    with pytest.raises(UsageError, match=r"torch_dtype = \$DTYPE \(the file does not set its value"):
        read_run(write(tmp_path, text))


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


def test_megatron_swift_is_written_in_its_own_settings(tmp_path: Path) -> None:
    """Layers without checkpoints are its ``none``, for without the key core attention is recomputed."""
    file = write(tmp_path, MEGATRON)
    rows = read_run(file).writes
    none = next(row for row in rows if row.get("recompute") == "none")
    written = read_run(write(tmp_path, edited(read_config_file(file), none["set"]))).request
    assert (written.recompute, written.recompute_modules) == (None, None)
    assert not any("offload_modules" in row["set"] for row in rows), "it has none"
