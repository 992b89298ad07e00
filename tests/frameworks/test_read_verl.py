"""Files of verl: overrides in a script, its YAML, and what is refused."""

from pathlib import Path

import pytest

from jettison.core.errors import UsageError
from jettison.frameworks.config_file import read_config_file
from jettison.frameworks.run_file import read_run
from jettison.frameworks.write_back import edited
from jettison.predict.forecast import forecast
from jettison.request.resolve import resolve

SFT = """
torchrun --standalone --nnodes=2 --nproc_per_node=4 -m verl.trainer.fsdp_sft_trainer \\
    data.train_files=train.parquet \\
    data.train_batch_size=64 \\
    data.max_length=2048 \\
    data.micro_batch_size_per_gpu=2 \\
    model.partial_pretrain=Qwen/Qwen2.5-7B \\
    model.strategy=fsdp2 \\
    "trainer.logger=['console','wandb']" \\
    +data.apply_chat_template_kwargs.enable_thinking=false $@
"""
ENGINE = (
    SFT.replace("fsdp_sft_", "sft_").replace("partial_pretrain", "path").replace("model.strategy", "engine.strategy")
)


def write(tmp_path: Path, text: str, name: str = "run.sh") -> Path:
    (tmp_path / name).write_text(text)
    return tmp_path / name


def test_a_script_field_by_field(tmp_path: Path) -> None:
    found = read_run(write(tmp_path, SFT))
    assert (found.framework, found.model, found.gpus, found.global_batch) == ("verl", "qwen2.5-7b", 8, 64)
    assert {name: getattr(found.request, name) for name in found.request.given()} == {
        "like": "huggingface",
        "kernels": "verl",
        "seq": 2048,
        "micro_batch": 2,
        "micro_batches": 4,
        "dp": 8,
        "zero": 3,
        "attention": "flash-attn",
        "precision": "bf16-autocast",
        "optimizer": "adamw-foreach",
        "recompute": "full",
        "loss": "in-loop",
        "keep_logits": True,
        "gradient_sync": "each",
        "reduce_dtype": "fp32",
        "fsdp_wrap_layers_only": False,
    }
    assert not any("last micro-batch" in note for note in found.notes), "each micro-batch reduces"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("$@", "ulysses_sequence_parallel_size=2 use_remove_padding=true", {"cp": 2, "cp_comm_type": "a2a", "dp": 4}),
        ("$@", "model.lora_rank=32 model.target_modules=[q_proj,v_proj]", {"lora": "r=32,targets=q_proj+v_proj"}),
        ("$@", "model.lora_rank=32", {"lora": "r=32,targets=all-linear", "base": "fp32"}),
        ("$@", "model.lora_rank=0", {"lora": None}),
        ("$@", "model.fsdp_config.model_dtype=bf16", {"precision": "bf16-pure"}),
        ("$@", "model.fsdp_config.model_dtype=bf16 model.lora_rank=8", {"adapter_dtype": None}),
        ("$@", "model.use_liger=True", {"kernels": "liger", "loss": "in-loop"}),
        ("=fsdp2", "=fsdp", {"fsdp_version": 1}),
        ("$@", "model.enable_gradient_checkpointing=False", {"recompute": "none"}),
        ("$@", "optim.optimizer_impl=bitsandbytes.optim optim.optimizer=AdamW8bit", {"optimizer": "adam8bit"}),
        ("data.train_batch_size=64", "", {"micro_batches": 16}),
        ("data.max_length=2048", "", {"seq": 1024}),
        ("--standalone --nnodes=2 --nproc_per_node=4 -m", "-m --nnodes 2 --nproc_per_node=4", {"dp": 8}),
        ("\ntorchrun", "#SBATCH --nodes=2 --ntasks-per-node=1\n#SBATCH --gpus-per-node=4\ntorchrun", {"dp": 8}),
        ("torchrun", "ray job submit --address=http://head:1 -- torchrun", {"dp": 8, "seq": 2048}),
        (
            "torchrun",
            "MORE=(data.shuffle=true model.lora_rank=32 'trainer.logger=[a, b]')\ntorchrun \"${MORE[@]}\"",
            {"lora": "r=32,targets=all-linear"},
        ),
    ],
)
def test_settings_and_defaults(tmp_path: Path, old: str, new: str, expected: dict[str, object]) -> None:
    assert old in SFT
    request = read_run(write(tmp_path, SFT.replace(old, new))).request
    assert {name: getattr(request, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("", "", {"seq": 8192, "packed": 2048, "micro_batch": 1, "micro_batches": 2, "loss": "in-place"}),
        ("$@", "data.max_token_len_per_gpu=4096", {"seq": 4096, "micro_batches": 4}),
        (
            "$@",
            "engine.ulysses_sequence_parallel_size=2",
            {"seq": 16384, "packed": None, "cp": 2, "dp": 4, "micro_batches": 2},
        ),
        ("$@", "data.use_dynamic_bsz=False", {"seq": 2048, "packed": None, "micro_batch": 2, "micro_batches": 4}),
        ("engine.strategy=fsdp2", "", {"fsdp_version": 1}),
        ("$@", "engine.fsdp_size=4", {"zero_replicas": 2, "dp": 8}),
        ("$@", "engine.fsdp_size=8", {"zero_replicas": None}),
        ("$@", "engine.fsdp_size=-1", {"zero_replicas": None}),
        ("$@", "engine.offload_policy=true", {"offload_optimizer": "fsdp2", "optimizer": "adamw"}),
        ("$@", "engine.reshard_after_forward=False", {"reshard_after_forward": "never"}),
        (
            "engine.strategy=fsdp2",
            "engine.offload_policy=true engine.reshard_after_forward=False",
            {"offload_optimizer": None, "reshard_after_forward": None, "fsdp_version": 1},
        ),
        ("$@", "engine.model_dtype=bf16 model.lora_rank=8", {"precision": "bf16-pure", "adapter_dtype": "fp32"}),
        ("$@", "data.train_batch_size=100", {"micro_batches": 4}),
    ],
)
def test_the_engine(tmp_path: Path, old: str, new: str, expected: dict[str, object]) -> None:
    assert old in ENGINE
    found = read_run(write(tmp_path, ENGINE.replace(old, new) if old else ENGINE))
    assert {name: getattr(found.request, name) for name in expected} == expected
    resolve(found.spec(), found.request)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (SFT.replace("$@", "model.fsdp_config.cpu_offload=true"), "CPU offload of parameters is not modelled"),
        (SFT.replace("$@", "model.novel_thing=1"), r"model.novel_thing = 1 \(unknown key"),
        (SFT.replace("$@", "model.lora_adapter_path=a"), "a checkpoint's adapters are not read"),
        (SFT.replace("=4 -m", "=$N -m"), "how many GPUs"),
        (SFT.replace("$@", "--config-name=mine"), "config-name = mine .settings are in mine.yaml: give that file"),
        (SFT.replace("sft_trainer", "sft_trainer -cp conf -cn mine"), "settings are in mine.yaml"),
        (SFT.replace("=64", "=72"), "data.train_batch_size = 72 .expected a multiple of 2 x 8"),
        (SFT.replace("$@", "+optim.override_optimizer_config.fused=true"), "fused = true .give --optimizer"),
        (ENGINE.replace("max_length=2048", "max_length=$L"), "max_length = .L .the file does not set its value"),
        (ENGINE.replace("$@", "engine=megatron"), "verl's engine megatron is not read"),
        (ENGINE.replace("$@", "model.use_fused_kernels=true"), "its loss is not modelled"),
        (
            "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.model.path=Qwen/Qwen3-8B",
            "program = verl.trainer.main_ppo .generation during training is not modelled: of verl only supervised",
        ),
        (
            SFT.replace("verl.trainer.fsdp_sft", "recipe.dpo.dpo"),
            "program = recipe.dpo.dpo_trainer .of verl's trainers only fsdp_sft_trainer with model.partial_pretrain",
        ),
        (SFT.replace("$@", "trainer.loss_mode=asft"), "trainer.loss_mode = asft .unknown key"),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        read_run(write(tmp_path, text))


def test_the_same_as_yaml(tmp_path: Path) -> None:
    text = """
data: {train_batch_size: 64, max_length: 2048, micro_batch_size_per_gpu: 2}
model: {partial_pretrain: Qwen/Qwen2.5-7B, lora_rank: 0, target_modules: all-linear}
trainer: {nnodes: 2, n_gpus_per_node: 4}
"""
    assert read_run(write(tmp_path, text, "sft.yaml")).request == read_run(write(tmp_path, SFT)).request


def test_overrides_are_written_back(tmp_path: Path) -> None:
    file = read_config_file(write(tmp_path, SFT))
    key = "model.enable_gradient_checkpointing"
    text = edited(file, {key: False})
    assert read_run(write(tmp_path, text)).request.recompute == "none"
    again = edited(read_config_file(write(tmp_path, text)), {key: True})
    assert again == text.replace(f"{key}=false", f"{key}=true") and "--model" not in again


def test_the_loss_copies_16_bit_logits(tmp_path: Path) -> None:
    """b (s - 1) V numbers, which autocast casts; Ulysses and transformers' own loss copy nothing."""
    copied = []
    for extra in ({}, {"cp": 2, "cp_comm_type": "a2a"}, {"kernels": "huggingface"}):
        found = read_run(write(tmp_path, SFT), asked=extra)
        head = forecast(resolve(found.spec(), found.request).run).stages[0].groups[0][-1].part.region.tape
        made = [
            (step.name, step.outputs[0]) for step in head.steps if step.outputs and step.outputs[0].dtype != "int64"
        ]
        copied.append([one.nbytes for name, one in made if name == "aten.clone.default"])
        assert next(one.dtype for name, one in made if name == "aten._log_softmax.default") == "float32"
    assert copied == [[2 * 2 * 2047 * 152064], [], []]
