"""Runs read from files of a Trainer and of what is built on it: TRL, accelerate, DeepSpeed, axolotl, LLaMA-Factory."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from jettison.cli.main import run
from jettison.core.errors import UsageError
from jettison.families.presets import preset_named
from jettison.frameworks.run_file import UNKNOWN, RunFile, read_run, run_from
from jettison.predict.forecast import forecast
from jettison.predict.stage_buffers import buffers_of
from jettison.request.resolve import resolve
from jettison.spec.layout import GradientSync

SFT: Mapping[str, Any] = {
    "model_name_or_path": "meta-llama/Llama-2-7b-hf",
    "dtype": "bfloat16",
    "dataset_name": "org/chats",
    "max_length": 2048,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "learning_rate": "2e-5",
}
ZERO3: Mapping[str, Any] = {
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 3, "overlap_comm": True, "reduce_bucket_size": "auto"},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
}
QLORA: Mapping[str, Any] = {
    "base_model": "NousResearch/Meta-Llama-3-8B",
    "load_in_4bit": True,
    "adapter": "qlora",
    "lora_r": 32,
    "lora_alpha": 16,
    "lora_dropout": 0.05,
    "lora_target_linear": True,
    "datasets": [{"path": "org/rows", "type": "alpaca"}],
    "sequence_len": 2048,
    "sample_packing": True,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "optimizer": "paged_adamw_8bit",
    "gradient_checkpointing": True,
    "flash_attention": True,
}
FACTORY: Mapping[str, Any] = {
    "model_name_or_path": "Qwen/Qwen3-8B",
    "stage": "sft",
    "finetuning_type": "lora",
    "lora_rank": 16,
    "cutoff_len": 1024,
    "template": "qwen3",
    "per_device_train_batch_size": 4,
    "bf16": True,
}


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def written(values: Any, name: str = "run.yaml", **more: Any) -> Path:
        values = {**values, **more} if isinstance(values, Mapping) else values
        file = tmp_path / name
        file.write_text(json.dumps(values) if name.endswith(".json") else yaml.safe_dump(values))
        return file

    return written


def _fields(found: RunFile) -> dict[str, Any]:
    return {name: getattr(found.request, name) for name in found.request.given()}


def test_a_trl_run_field_by_field(write: Any) -> None:
    found = read_run(write(SFT))
    assert found.framework == "transformers"
    assert found.model == "llama2-7b"
    assert any("counted as the preset llama2-7b" in note for note in found.notes)
    assert _fields(found) == {
        "like": "huggingface",
        "seq": 2048,
        "micro_batch": 2,
        "micro_batches": 4,
        "precision": "bf16-pure",
        "optimizer": "adamw",
        "loss": "tiled",
        "recompute": "full",
        "pad_to_longest": True,
    }
    assert found.global_batch == 8


def test_defaults_of_a_trainer_are_not_those_of_trl(write: Any) -> None:
    trainer = {"model_name_or_path": "gpt2", "num_train_epochs": 1, "block_size": 512}
    assert _fields(read_run(write(trainer))) == {
        "like": "huggingface",
        "seq": 512,
        "micro_batch": 8,
        "precision": "fp32",
        "optimizer": "adamw",
        "recompute": "none",
    }
    own = _fields(read_run(write(trainer, bf16=True, optim="adamw_torch", gradient_checkpointing=True)))
    assert (own["precision"], own["optimizer"], own["recompute"]) == ("bf16-autocast", "adamw-foreach", "full")
    trl = {"model_name_or_path": "gpt2", "packing": True}
    own = _fields(read_run(write(trl)))
    assert (own["seq"], own["precision"], own["recompute"]) == (1024, "bf16-autocast", "full")


@pytest.mark.parametrize(
    ("more", "base", "precision"),
    [
        ({}, None, "bf16-autocast"),
        ({"dtype": "float32"}, "fp32", "bf16-autocast"),
        ({"load_in_4bit": True}, "nf4", "bf16-pure"),
        ({"load_in_4bit": True, "use_bnb_nested_quant": True}, "nf4-double", "bf16-pure"),
        ({"load_in_8bit": True}, "int8", "bf16-pure"),
    ],
)
def test_adapters_of_trl(write: Any, more: Mapping[str, Any], base: str | None, precision: str) -> None:
    found = read_run(write(SFT, use_peft=True, lora_target_modules=["q_proj", "up_proj"], lora_dropout=0, **more))
    assert found.request.lora == "r=16,targets=q_proj+up_proj"
    assert (found.request.base, found.request.precision) == (base, precision)


def test_deepspeed_beside_a_trainer_or_named_by_it(write: Any, tmp_path: Path) -> None:
    beside = write(ZERO3, "zero3.json")
    found = read_run(write(SFT), beside, gpus=8)
    expected = _fields(found)
    assert expected["like"] == "deepspeed"
    assert (expected["zero"], expected["dp"], expected["micro_batch"], expected["micro_batches"]) == (3, 8, 2, 4)
    assert "precision" not in expected
    assert "optimizer" not in expected
    assert read_run(beside, write(SFT), gpus=8).request == found.request
    assert read_run(write(SFT, deepspeed="zero3.json"), gpus=8).request == found.request
    assert read_run(write(SFT, deepspeed=dict(ZERO3)), gpus=8).request == found.request
    with pytest.raises(UsageError, match=r"deepspeed = none\.json \(file not found"):
        read_run(write(SFT, deepspeed="none.json"), gpus=8)
    with pytest.raises(UsageError, match="give --gpus"):
        read_run(write(SFT), beside)


@pytest.mark.parametrize(
    ("places", "states"),
    [
        ({"offload_optimizer": {"device": "cpu"}}, "deepspeed"),
        ({"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}, "deepspeed-parameters"),
        ({"offload_optimizer": {"device": "none"}}, None),
    ],
)
def test_what_deepspeed_has_on_the_host(write: Any, places: Mapping[str, Any], states: str | None) -> None:
    config = {**ZERO3, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3, **places}}
    assert read_run(write(config, "ds.json"), model="gpt2", gpus=4).request.offload_optimizer == states


@pytest.mark.parametrize(
    ("more", "micro", "micros"),
    [
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2}, 2, 4),
        ({"train_batch_size": 64, "gradient_accumulation_steps": 2}, 4, 2),
        ({"train_batch_size": 64}, 8, None),
        ({"train_micro_batch_size_per_gpu": 2}, 2, None),
    ],
)
def test_batches_of_deepspeed_alone(write: Any, more: Mapping[str, int], micro: int, micros: int | None) -> None:
    config = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}, **more}
    found = read_run(write(config, "ds.json"), model="gpt2", gpus=8).request
    assert (found.micro_batch, found.micro_batches) == (micro, micros)
    sizes = {"train_batch_size": 48, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
    assert read_run(write(config | sizes, "ds.json"), model="gpt2").request.dp == 6  # its sizes imply the ranks


@pytest.mark.parametrize(
    ("zero", "buckets"),
    [
        ({"stage": 3}, None),
        (
            {"stage": 3, "reduce_bucket_size": "5e8", "stage3_max_live_parameters": 1e9},
            "reduce=500000000,live=1000000000",
        ),
        (
            dict.fromkeys(("reduce_bucket_size", "stage3_prefetch_bucket_size"), "auto")
            | {"stage": 3, "param_persistence_threshold": 0, "sub_group_size": 1e12},
            "reduce=auto,prefetch=auto,persist=0,sub-group=1000000000000",
        ),
        ({"stage": 3, "overlap_comm": True, "contiguous_gradients": False}, "buckets=0"),
        ({"stage": 2, "overlap_comm": True, "stage3_max_live_parameters": 1e9}, "buckets=2"),
        ({"stage": 0, "reduce_bucket_size": 5e8}, None),
    ],
)
def test_buckets_of_deepspeed(write: Any, zero: Mapping[str, Any], buckets: str | None) -> None:
    config = {"bf16": {"enabled": True}, "zero_optimization": dict(zero)}
    found = read_run(write(config, "ds.json"), model="gpt2", gpus=8)
    assert found.request.zero_buckets == buckets
    run = run_from(write(config, "ds.json"), model="gpt2", gpus=8, seq=128)
    assert run.layout.by_module == (zero["stage"] > 0)


def test_pipelines_of_deepspeed(write: Any) -> None:
    """Receive buffer, kept outputs and cloned inputs in flight, as ``runtime/pipe/engine.py`` has them."""
    batch = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 8}
    config = {**batch, "bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
    pipe = {"stages": 4, "activation_checkpoint_interval": 2, "partition": "best"}
    file = write({**config, "pipeline": pipe}, "ds.json")
    found = read_run(file, model="gpt2", gpus=8)
    assert (found.request.pp, found.request.dp, found.request.zero) == (4, 2, 1)
    assert (found.request.recompute, found.request.reentrant) == ("every:2", True)
    run = run_from(file, model="gpt2", gpus=8, seq=128)
    stream = 2 * 2 * 128 * 768
    sizes = [sum(nbytes for row, nbytes in buffers_of(run, stage) if "pipeline" in row.name) for stage in range(4)]
    assert sizes == [stream * (1 + outputs + inputs) for outputs, inputs in ((4, 0), (3, 3), (2, 2), (0, 1))]
    with pytest.raises(UsageError, match="DeepSpeed's pipelines take ZeRO 0 and 1"):
        read_run(
            write({**config, "zero_optimization": {"stage": 2}, "pipeline": pipe}, "ds.json"), model="gpt2", gpus=8
        )
    beside = write({**config, "pipeline": pipe}, "zero.json")
    assert read_run(write(SFT, deepspeed=str(beside)), gpus=8).request.pp is None


def test_a_quantized_model_is_the_base_of_adapters(write: Any, tmp_path: Path) -> None:
    """TRL's default dtype of weights, fp32, is that of a model whose config.json has no quantization_config."""
    llama = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128, "rms_norm_eps": 1e-5}
    asked = {"use_peft": True, "lora_r": 8, "max_length": 128, "bf16": True}
    for said, base in (({}, "fp32"), ({"quantization_config": {"load_in_4bit": True}}, "nf4")):
        config = tmp_path / "config.json"
        config.write_text(json.dumps({**llama, **sizes, **said}), encoding="utf-8")
        tuning = run_from(write({**asked, "model_name_or_path": str(config)}, "sft.json")).tuning
        assert tuning is not None and tuning.base == base
    file = write({**asked, "model_name_or_path": str(config)}, "sft.json")
    assert read_run(file, asked={"base": "fp32"}).request.base == "fp32"


def test_sizes_of_deepspeed_that_do_not_fit(write: Any) -> None:
    config = {"zero_optimization": {"stage": 2}, "train_batch_size": 64, "train_micro_batch_size_per_gpu": 3}
    for asked in ({}, {"seq": 128}):
        with pytest.raises(UsageError, match="train_batch_size = 64, and its other sizes make 48 on 8 ranks"):
            read_run(write(config, "ds.json"), model="gpt2", gpus=8, asked=asked)
    found = read_run(write(config, "ds.json"), model="gpt2", gpus=8, asked={"micro_batches": 3})
    open_length = "it has no sequence length: give --seq, such as --seq 2048"
    assert {"a script has the checkpoints: give --recompute", open_length} <= {*found.notes}
    found = read_run(write(config, "ds.json"), model="gpt2", gpus=8, asked={"micro_batches": 3, "seq": 128})
    assert open_length not in found.notes
    wide = {"zero_optimization": {"stage": 2}, "data_types": {"grad_accum_dtype": "fp32"}}
    with pytest.raises(UsageError, match=r"grad_accum_dtype = fp32 \(expected one of bf16, fp16"):
        read_run(write(wide, "ds.json"), model="gpt2", gpus=8)


def test_two_files_that_contradict_each_other_say_so(write: Any) -> None:
    beside = write({**ZERO3, "train_micro_batch_size_per_gpu": 4}, "zero3.json")
    found = read_run(write(SFT), beside, gpus=8)
    assert found.request.micro_batch == 4
    assert any("train_micro_batch_size_per_gpu = 4 is counted, and another" in note for note in found.notes)
    assert not any(
        "contradict" in note for note in read_run(write(SFT), beside, gpus=8, asked={"micro_batch": 1}).notes
    )


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, "last"),
        ({"gradient_accumulation_steps": 1}, None),
        ({"use_peft": True}, "last"),
        ({"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}}, "each"),
        ({"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": False}}}, "last"),
        ({"fsdp": ""}, None),
    ],
)
def test_gradients_are_reduced_in_the_last_micro_batch(write: Any, more: Mapping[str, Any], said: str | None) -> None:
    found = read_run(write({**SFT, "fsdp": "full_shard auto_wrap", **more}), gpus=8)
    run = resolve(found.spec(), found.request).run
    assert said in (None, run.layout.gradient_sync)
    if said == "last":
        each = dataclasses.replace(run, layout=dataclasses.replace(run.layout, gradient_sync=GradientSync.EACH))
        assert run.tuning is not None or forecast(run).peak_bytes > forecast(each).peak_bytes + 7 * 10**9


def test_parts_of_ligers_kernels(write: Any) -> None:
    plain = {"model_name_or_path": "gpt2", "per_device_train_batch_size": 1, "use_liger_kernel": True}
    assert read_run(write(plain)).request.loss == "fused"
    parts = {"fused_linear_cross_entropy": False, "rope": False}
    found = read_run(write(plain, liger_kernel_config=parts))
    assert (found.request.kernels, found.request.loss) == ("liger", "upcast")
    alone = read_run(write(plain, liger_kernel_config={"fused_linear_cross_entropy": False, "cross_entropy": True}))
    assert alone.request.loss == "in-forward"
    for name, value in (("rms_norm", False), ("novel", True)):
        with pytest.raises(UsageError, match=rf"liger_kernel_config\.{name} = "):
            read_run(write(plain, liger_kernel_config={name: value}))
    both = {"base_model": "gpt2", "micro_batch_size": 1, "flash_attention": True, "eager_attention": True}
    assert read_run(write(both)).request.attention == "flash-attn"
    with pytest.raises(UsageError, match=r"flash_attention = true \(axolotl rejects it"):
        read_run(
            write(
                {"base_model": "gpt2", "micro_batch_size": 1, "attn_implementation": "eager", "flash_attention": True}
            )
        )


def test_a_file_that_may_be_of_two_trainers(write: Any) -> None:
    found = read_run(write({"model_name_or_path": "gpt2", "dataset_name": "x", "per_device_train_batch_size": 1}))
    assert found.says == "arguments of a Trainer"
    assert any("no key is TRL's" in note for note in found.notes)


def test_lengths_that_nothing_cuts(write: Any) -> None:
    assert read_run(write({**SFT, "max_length": None})).request.seq is None
    rest = {key: value for key, value in SFT.items() if key != "max_length"}
    assert read_run(write({**rest, "packing": True})).request.seq == 1024


def test_flags_that_switch_off(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    for flag, recompute in (("", "full"), ("--no_gradient_checkpointing", "none")):
        script.write_text(f"trl sft --model_name_or_path gpt2 --max_length 128 --bf16 {flag}\n")
        assert read_run(script).request.recompute == recompute


def test_a_policy_of_wrapping(write: Any) -> None:
    """accelerate 1.15, ``FullyShardedDataParallelPlugin``: none by default; PEFT's models get a Trainer's own."""
    older = {**SFT, "evaluation_strategy": "no"}
    for more, one in (
        ({"fsdp": "full_shard"}, True),
        ({"fsdp": "full_shard auto_wrap"}, None),
        ({"fsdp": "full_shard", "fsdp_config": {"auto_wrap_policy": "NO_WRAP"}}, True),
        ({"fsdp": "full_shard", "lora_r": 8, "use_peft": True}, None),
    ):
        found = _fields(read_run(write({**older, **more}), gpus=8))
        assert (found["zero"], found.get("fsdp_one_unit"), found["fsdp_version"]) == (3, one, 1), more
    with pytest.raises(UsageError, match="TRANSFORMER_BASED_WRAP"):
        read_run(write({**older, "fsdp": "full_shard", "fsdp_config": {"auto_wrap_policy": "SIZE_BASED_WRAP"}}), gpus=8)


def test_accelerate_beside_a_trainer(write: Any) -> None:
    fsdp = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "mixed_precision": "bf16",
        "num_processes": 4,
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": False,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_activation_checkpointing": True,
            "fsdp_offload_params": True,
        },
    }
    beside = write(fsdp, "accelerate.yaml")
    found = _fields(read_run(write(SFT, gradient_checkpointing=False), beside))
    assert (found["zero"], found["dp"], found["reshard_after_forward"]) == (3, 4, "never")
    assert (found["recompute"], found["offload_optimizer"], found["precision"]) == ("full", "fsdp2", "bf16-autocast")
    alone = _fields(read_run(beside, model="gpt2"))
    assert (alone["zero"], alone["dp"], alone["precision"]) == (3, 4, "bf16-autocast")
    assert read_run(beside, model="gpt2", gpus=8).request.dp == 8
    zero2 = {"distributed_type": "DEEPSPEED", "num_processes": 2, "deepspeed_config": {"zero_stage": 2}}
    found = _fields(read_run(write(SFT), write(zero2, "accelerate.yaml")))
    assert (found["like"], found["zero"], found["dp"]) == ("deepspeed", 2, 2)
    config = {"zero_stage": 2, "offload_optimizer_device": "cpu", "offload_param_device": "cpu"}
    offloaded = _fields(read_run(write({**zero2, "deepspeed_config": config}, "accelerate.yaml"), model="gpt2"))
    assert offloaded["offload_optimizer"] == "deepspeed"  # parameters only with ZeRO 3
    config |= {"gradient_accumulation_steps": 8, "main_process_port": 29501}
    ddp = {**zero2, "distributed_type": "MULTI_GPU", "deepspeed_config": config}  # whose launcher passes none of it on
    alone = _fields(read_run(write(ddp, "accelerate.yaml"), model="gpt2"))
    assert alone["dp"] == 2
    assert not {"zero", "offload_optimizer", "micro_batches"} & {*alone}
    zero2["deepspeed_config"] = {"zero_stage": 2, "gradient_accumulation_steps": "auto"}
    asked = write(SFT, gradient_accumulation_steps=4)
    assert _fields(read_run(asked, write(zero2, "accelerate.yaml")))["micro_batches"] == 4


def test_a_command_line_and_the_file_that_it_names(write: Any, tmp_path: Path) -> None:
    write(SFT, "sft.yaml")
    script = tmp_path / "run.sh"
    script.write_text("accelerate launch --num_processes 2 trl/scripts/sft.py --config sft.yaml --max-length 512\n")
    found = _fields(read_run(script))
    assert (found["seq"], found["micro_batch"], found["dp"]) == (512, 2, 2)
    script.write_text(
        "torchrun --nproc_per_node 4 --nnodes 2 run_clm.py --model_name_or_path gpt2 --block_size 256 --bf16\n"
    )
    found = _fields(read_run(script))
    assert (found["seq"], found["dp"], found["precision"]) == (256, 8, "bf16-autocast")


@pytest.mark.parametrize("named", ["--config none.yaml", "--config_file none.yaml", "--deepspeed none.json"])
def test_a_file_that_is_named_and_not_there(tmp_path: Path, named: str) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"accelerate launch train.py --model_name_or_path gpt2 --block_size 64 {named}\n")
    with pytest.raises(UsageError, match=r"none\.\w+ \(file not found: give it as a second --from"):
        read_run(script)


@pytest.mark.parametrize(
    ("values", "more", "states", "gpus"),
    [
        (QLORA, {"deepspeed": "/srv/axolotl/deepspeed_configs/zero2.json"}, (2, "deepspeed"), 4),
        (QLORA, {"deepspeed": "deepspeed_configs/zero3_bf16_cpuoffload_all.json"}, (3, "deepspeed-parameters"), 4),
        (FACTORY, {"deepspeed": "examples/deepspeed/ds_z2_offload_config.json"}, (2, "deepspeed"), 4),
        (FACTORY, {"deepspeed": "ds_z3_config.json"}, (3, None), 4),
        (SFT, {"accelerate_config": "zero3"}, (3, None), None),
        (SFT, {"accelerate_config": "fsdp2"}, (3, None), None),
        (SFT, {"accelerate_config": "single_gpu"}, (None, None), None),
    ],
)
def test_files_that_come_with_a_framework(
    write: Any, values: Any, more: Any, states: tuple[int | None, str | None], gpus: int | None
) -> None:
    values = {**values, "optimizer": "adamw_torch"} if "adapter" in values else values
    found = read_run(write(values, **more), gpus=gpus)
    assert (found.request.zero, found.request.offload_optimizer) == states
    assert any("comes with the framework" in note for note in found.notes)
    ((name, file),) = more.items()
    with pytest.raises(UsageError, match=f"{name} = .*x .*second --from"):
        read_run(write(values, **{name: f"{file}x"}), gpus=gpus or 1)


@pytest.mark.parametrize(
    ("program", "given", "seq"), [("train_bash", "", 1024), ("train", "", 2048), ("train_bash", "512", 512)]
)
def test_an_older_programs_length_of_sequences(tmp_path: Path, program: str, given: str, seq: int) -> None:
    command = f"python src/{program}.py --stage sft --model_name_or_path gpt2 --finetuning_type full --fp16"
    command += f" --cutoff_len {given}" if given else ""
    (tmp_path / "run.sh").write_text(command)
    found = read_run(tmp_path / "run.sh")
    assert (found.framework, found.request.seq) == ("llamafactory", seq)
    assert found.request.optimizer == ("adamw-foreach" if program == "train_bash" else "adamw")


def test_a_preset_for_a_checkpoint_that_is_quantized_by_its_name(write: Any) -> None:
    values = {**FACTORY, "model_name_or_path": "org/Llama-3-8B-Instruct-AWQ"}
    assert read_run(write(values)).model == values["model_name_or_path"]
    with pytest.raises(UsageError, match=r"model_name_or_path = .*AWQ \(weights of a checkpoint in AWQ .* or --base"):
        read_run(write(values), model="llama3-8b")
    assert read_run(write(values), model="llama3-8b", asked={"base": "gptq"}).model == "llama3-8b"
    assert read_run(write(values, quantization_bit=4), model="llama3-8b").request.base == "nf4-double"


def test_defaults_of_older_transformers(write: Any) -> None:
    values = {**SFT, "fsdp": "full_shard auto_wrap"}
    assert read_run(write(values), gpus=8).request.fsdp_version is None
    request = read_run(write(values, evaluation_strategy="no"), gpus=8).request
    assert (request.fsdp_version, request.optimizer) == (1, "adamw-foreach")
    own = {
        **QLORA,
        "optimizer": "adamw_torch",
        "group_by_length": False,
        "fsdp_version": 2,
        "fsdp_config": {"offload_params": False},
    }
    assert read_run(write(own), gpus=8).request.fsdp_version is None  # axolotl's own


def test_an_older_name_of_ligers_kernels(write: Any) -> None:
    request = read_run(write(SFT, use_liger=True)).request
    assert (request.kernels, request.loss) == ("liger", "fused")


def test_a_script_after_alpacas(tmp_path: Path) -> None:
    """A job of two nodes whose site's settings are elsewhere."""
    script = tmp_path / "run.sh"
    lines = (
        "#SBATCH -N 2",
        "#SBATCH --gres=gpu:a100:4",
        "source /opt/site/modules.env",
        "torchrun --nproc_per_node 4 --nnodes $SLURM_NNODES train.py --model_name_or_path llama2-7b --data_path d.json",
        "--model_max_length 1024 --fsdp 'full_shard auto_wrap' --fsdp_transformer_layer_cls_to_wrap LlamaDecoderLayer",
        "--per_device_train_batch_size 2 --bf16 True --lazy_preprocess True",
    )
    script.write_text("\n".join(lines[:3]) + "\n" + " ".join(lines[3:]) + "\n")
    found = read_run(script)
    request = found.request
    assert (request.seq, request.dp, request.zero, request.micro_batch, found.unread) == (1024, 8, 3, 2, ())
    assert (request.fsdp_version, request.optimizer) == (1, "adamw")  # a key that transformers 5 does not have
    assert any("modules.env" in note and "no argument is left to it" in note for note in found.notes)
    script.write_text(script.read_text().replace("d.json", "d.json $MORE"))
    with pytest.raises(UsageError, match=r"modules\.env"):  # it may set MORE
        read_run(script)
    script.write_text(script.read_text().replace("$MORE", "--tf32 ${TF:-True}"))
    with pytest.raises(UsageError, match=r"modules\.env"):
        read_run(script)


def test_llamafactory_by_accelerates_launcher(write: Any, tmp_path: Path) -> None:
    write({"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}, "num_processes": 4}, "fsdp.yaml")
    script = tmp_path / "run.sh"
    script.write_text(
        "accelerate launch --config_file fsdp.yaml --main_process_port 29501 src/train.py --stage sft --bf16 true "
        "--model_name_or_path Qwen/Qwen3-8B --finetuning_type full --template qwen3 --cutoff_len 512 "
        "--per_device_train_batch_size 2 --train_sampling_strategy random --push_to_hub true\n"
    )
    request = read_run(script).request
    assert (request.dp, request.zero, request.seq, request.micro_batch) == (4, 3, 512, 2)


def test_visible_gpus_of_llamafactorys_command(tmp_path: Path) -> None:
    arguments = " ".join(f"--{key} {value}" for key, value in FACTORY.items())
    (tmp_path / "run.sh").write_text(f"CUDA_VISIBLE_DEVICES=0,1,2 llamafactory-cli train {arguments}\n")
    assert read_run(tmp_path / "run.sh").gpus == 3


def test_deepspeed_casts_what_axolotl_upcasts(write: Any, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(ZERO3))
    found = read_run(write(QLORA, adapter=None, load_in_4bit=False, flash_attention=False, deepspeed="ds.json"), gpus=8)
    assert (found.request.like, found.request.zero, found.unread) == ("deepspeed", 3, ())


def test_noise_on_embeddings_keeps_nothing(write: Any) -> None:
    assert _fields(read_run(write(QLORA, neftune_noise_alpha=5))) == _fields(read_run(write(QLORA)))


def test_adapters_that_training_resumes_have_their_own_rank(write: Any, tmp_path: Path) -> None:
    """LLaMA-Factory ff6d4d12, ``model/adapter.py``; axolotl 067b021c, ``loaders/adapter.py``."""
    own = {"r": 4, "lora_dropout": 0.0, "target_modules": ["q_proj"], "modules_to_save": None}
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "adapter_config.json").write_text(json.dumps(own))
    resumed = {"adapter_name_or_path": "first,adapters"}
    assert read_run(write(FACTORY, **resumed)).request.lora == "r=4,targets=q_proj"
    assert read_run(write(FACTORY, **resumed, create_new_adapter=True)).request.lora == "r=16,targets=all-linear"
    assert (
        read_run(write(QLORA, lora_model_dir="adapters", lora_target_linear=False)).request.lora == "r=4,targets=q_proj"
    )
    found = read_run(write(QLORA, lora_model_dir="elsewhere"))
    assert any(note.startswith("elsewhere is not here: rank and targets") for note in found.notes)


def test_a_model_on_the_command_line_replaces_a_variable(write: Any) -> None:
    file = write(FACTORY, model_name_or_path="${WEIGHTS}")
    with pytest.raises(UsageError, match=r"the file has no key WEIGHTS"):
        read_run(file)
    assert read_run(file, model="qwen3-8b").model == "qwen3-8b"


def test_an_older_trl_by_its_key(write: Any) -> None:
    """TRL 0.20 removed ``max_seq_length`` (e102ac8d)."""
    values = {key: value for key, value in SFT.items() if key != "max_length"}
    found = _fields(read_run(write(values, max_seq_length=2048, packing=False)))
    assert (found["seq"], found["loss"], found["recompute"], found["precision"]) == (
        2048,
        "upcast",
        "none",
        "bf16-pure",
    )


def test_axolotls_settings_of_4_bits(write: Any) -> None:
    kwargs = {"bnb_4bit_use_double_quant": False, "bnb_4bit_quant_type": "nf4"}
    assert read_run(write(QLORA, bnb_config_kwargs=kwargs)).request.base == "nf4"
    eight = {**QLORA, "load_in_4bit": False, "load_in_8bit": True, "adapter": "lora", "bnb_config_kwargs": kwargs}
    assert read_run(write(eight)).request.base == "int8"
    with pytest.raises(UsageError, match="expected nf4 or fp4"):
        read_run(write(QLORA, bnb_config_kwargs={"bnb_4bit_quant_type": "nf3"}))


def test_a_reference_under_cpu_offload(write: Any) -> None:
    """The policy's weights and states are offloaded; a reference has no states."""
    sharded = {"fsdp_config": {"fsdp_offload_params": True}, "fsdp_version": 2}
    plain = {"adapter": "lora", "load_in_4bit": False, "optimizer": "adamw_torch_fused"}
    found = read_run(write(QLORA, rl="dpo", **plain, **sharded), gpus=2)
    assert (found.request.reference, found.request.offload_optimizer) == ("base", "fsdp2")
    assert [key.why for key in found.used if key.name == "micro_batch_size"] == ["--micro-batch 4"]
    assert forecast(resolve(found.spec(), found.request).run).peak_bytes > 0


def test_rings_need_the_number_of_gpus(write: Any) -> None:
    with pytest.raises(UsageError, match=r"does not say on how many GPUs it runs; give --gpus, such as --gpus 9"):
        read_run(write(QLORA, context_parallel_size=3))


def test_preferences_have_pairs_and_a_reference(write: Any) -> None:
    found = read_run(write(SFT, beta=0.1)).request
    assert (found.loss, found.reference, found.micro_batch) == ("dpo", "same", 4)
    found = read_run(write(SFT, beta=0.1, use_peft=True)).request
    assert (found.loss, found.reference) == ("dpo", "base")


def test_axolotl_field_by_field(write: Any) -> None:
    found = read_run(write(QLORA))
    assert found.framework == "axolotl"
    assert found.model == "llama3-8b"
    assert _fields(found) == {
        "like": "huggingface",
        "seq": 2048,
        "micro_batch": 2,
        "micro_batches": 4,
        "attention": "flash-attn",
        "lora": "r=32,targets=all-linear,dropout=0.05",
        "base": "nf4-double",
        "precision": "bf16-autocast",
        "optimizer": "adam8bit",
        "offload_optimizer": "bitsandbytes",
        "recompute": "full",
    }


def test_axolotl_without_adapters_and_with_other_kernels(write: Any) -> None:
    plain = {"base_model": "llama3-8b", "micro_batch_size": 1, "optimizer": "adamw_torch", "flash_attention": True}
    found = _fields(read_run(write(plain)))
    assert (found["seq"], found["precision"], found["optimizer"]) == (512, "bf16-pure", "adamw-foreach")
    liger = {
        "plugins": ["axolotl.integrations.liger.LigerPlugin"],
        "liger_rms_norm": True,
        "liger_glu_activation": True,
        "liger_rope": True,
    }
    found = _fields(read_run(write(plain, **liger)))
    assert (found["kernels"], found["loss"]) == ("liger", "upcast")
    assert read_run(write(plain, **liger, liger_fused_linear_cross_entropy=True)).request.loss == "fused"
    assert read_run(write(plain, **liger, liger_cross_entropy=True)).request.loss == "in-forward"
    without = read_run(write(plain, **{**liger, "plugins": [], "liger_fused_linear_cross_entropy": True}))
    assert (without.request.kernels, without.request.loss) == (None, None)
    assert any("LigerPlugin in plugins liger_* have no effect" in note for note in without.notes)
    cut = {"plugins": ["axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"]}
    assert read_run(write(plain, **cut)).request.loss == "fused"
    fsdp = {"fsdp_version": 2, "fsdp_config": {"reshard_after_forward": True, "offload_params": False}}
    found = _fields(read_run(write(plain, **fsdp), gpus=2))
    assert (found["zero"], found["dp"], found["precision"]) == (3, 2, "bf16-pure"), "its FSDP2 casts no weights"
    assert read_run(write(plain, **fsdp | {"fsdp_version": 1}), gpus=2).request.precision == "bf16-autocast"
    lora = {**QLORA, "adapter": "lora", "load_in_4bit": False, "lora_modules_to_save": ["lm_head"]}
    for version, noted in ((1, False), (2, True)):
        found = read_run(write(lora, **fsdp | {"fsdp_version": version}), gpus=2)
        assert any("keep 16 bits under FSDP2" in note for note in found.notes) is noted
    mx = {"model_quantization_config": "Mxfp4Config", "model_quantization_config_kwargs": {"dequantize": True}}
    assert read_run(write(plain, **mx)).request.base is None
    with pytest.raises(UsageError, match="other quantizations than bitsandbytes"):
        read_run(write(plain, **mx | {"model_quantization_config_kwargs": {"dequantize": False}}))


@pytest.mark.parametrize(
    ("more", "kernels"),
    [
        ({}, None),
        ({"lora_dropout": 0}, "axolotl"),
        ({"lora_dropout": 0, "trust_remote_code": True}, None),
        ({"lora_dropout": 0, "lora_o_kernel": False}, None),
        ({"lora_dropout": 0, "lora_mlp_kernel": True, "lora_qkv_kernel": True, "lora_o_kernel": True}, "axolotl"),
        (
            {"lora_dropout": 0, "liger_rms_norm": True, "liger_glu_activation": True, "plugins": ["x.LigerPlugin"]},
            "axolotl-liger",
        ),
    ],
)
def test_axolotls_kernels_of_adapters(write: Any, more: Mapping[str, Any], kernels: str | None) -> None:
    assert read_run(write(QLORA, **more)).request.kernels == kernels


def test_kernels_of_adapters_keep_less(write: Any) -> None:
    plain = QLORA | {"lora_dropout": 0, "gradient_checkpointing": False}
    kept = [forecast(run_from(write(plain, lora_o_kernel=own))).peak_bytes for own in (None, False)]
    assert kept[0] < kept[1]
    with pytest.raises(UsageError, match="modelled only all together"):
        read_run(write(plain, lora_mlp_kernel=True))


def test_llamafactorys_modules_trained_in_full(write: Any) -> None:
    """Read where they stay in the model's dtype, or FSDP or DeepSpeed casts them; else all hidden states are fp32."""
    full: dict[str, Any] = {"additional_target": "embed_tokens,lm_head"}
    with pytest.raises(UsageError, match=r"additional_target = embed_tokens,lm_head \(it casts them to fp32"):
        read_run(write(FACTORY, **full))
    pure = read_run(write(FACTORY, pure_bf16=True, **full)).request
    sharded = read_run(write(FACTORY, deepspeed="ds_z2_config.json", **full), gpus=2).request
    for request in (pure, sharded):
        assert str(request.lora).endswith(",modules_to_save=embed_tokens+lm_head")
    assert (pure.precision, sharded.like) == ("bf16-pure", "deepspeed")
    with pytest.raises(UsageError, match="layernorm is no known embedding or head"):
        read_run(write(FACTORY, pure_bf16=True, additional_target="layernorm"))


def test_llamafactory_with_unsloth(write: Any) -> None:
    assert read_run(write(FACTORY, use_unsloth=True)).request.like == "unsloth"
    assert read_run(write(FACTORY, use_unsloth_gc=True)).request.offload
    with pytest.raises(UsageError, match="only with adapters"):
        read_run(write({**FACTORY, "finetuning_type": "full"}, use_unsloth=True))


def test_llamafactory_field_by_field(write: Any) -> None:
    found = read_run(write(FACTORY))
    assert found.framework == "llamafactory"
    assert _fields(found) == {
        "like": "huggingface",
        "seq": 1024,
        "micro_batch": 4,
        "lora": "r=16,targets=all-linear",
        "precision": "bf16-autocast",
        "optimizer": "adamw",
        "recompute": "full",
        "pad_to_longest": True,
    }
    packed = read_run(write(FACTORY, quantization_bit=4, lora_target="q_proj,v_proj", flash_attn="fa2")).request
    assert (packed.base, packed.lora, packed.attention) == ("nf4-double", "r=16,targets=q_proj+v_proj", "flash-attn")
    half = read_run(write(FACTORY, bf16=False)).request  # the base has the checkpoint's 16 bits, without autocast, too
    assert (half.precision, half.base, half.adapter_dtype) == ("bf16-pure", None, "fp32")
    full = {key: value for key, value in FACTORY.items() if key != "lora_rank"}
    found = read_run(write(full, finetuning_type="full", disable_gradient_checkpointing=True))
    assert (found.request.precision, found.request.recompute) == ("bf16-autocast", "none")
    assert read_run(write(full, finetuning_type="full", pure_bf16=True)).request.precision == "bf16-pure"


def test_eight_bit_moments_of_a_trainer(write: Any) -> None:
    """``trainer.py``: ``register_module_override(module, "weight", {"optim_bits": 32})`` of each embedding: of Llama 3,
    128256 x 4096 elements with 8 bytes in place of 2 and a scale for 256. Adapters alone have none that is trained.
    """
    assert read_run(write(QLORA, optimizer="adamw_bnb_8bit")).request.optimizer == "adam8bit"
    found = read_run(write(QLORA, optimizer="adamw_bnb_8bit", lora_modules_to_save=["embed_tokens"]))
    assert found.request.optimizer == "adam8bit-trainer"
    both = [dataclasses.replace(found.request, optimizer=name) for name in ("adam8bit", "adam8bit-trainer")]
    plain, trainers = (forecast(resolve(found.spec(), one).run) for one in both)
    elements = 128256 * 4096
    more = elements * 8 - 2 * (elements + 4 * elements // 256)
    assert trainers.worst.load.state - plain.worst.load.state == more
    full = {"model_name_or_path": "gpt2", "per_device_train_batch_size": 1}
    assert read_run(write(full, optim="adamw_bnb_8bit")).request.optimizer == "adam8bit-trainer"
    assert read_run(write(full, optim="adamw_torch_8bit")).request.optimizer == "adam8bit"


def test_modules_trained_in_full(write: Any) -> None:
    """PEFT's ``modules_to_save``, by the names of models' code."""
    for names in (["lm_head", "embed_tokens"], ["model.embed_tokens", "lm_head"], "wte,embed_out"):
        found = read_run(write(QLORA, lora_modules_to_save=names))
        assert found.request.lora.endswith(",modules_to_save=embed_tokens+lm_head"), names
    tuned = resolve(found.spec(), found.request).run.tuning
    assert tuned is not None
    assert tuned.full == {"embed_tokens", "lm_head"}
    assert tuned.inputs_need_gradients
    assert not tuned.follows_recompute


@pytest.mark.parametrize(
    ("values", "more", "message"),
    [
        (SFT, {"hyper_drive": 1}, r"hyper_drive = 1 \(unknown key\)"),
        (SFT, {"max_length": "long"}, r"max_length = long; expected a whole number"),
        (SFT, {"max_length": 2.5}, r"max_length = 2\.5; expected a whole number"),
        (SFT, {"optim": "lion_32bit"}, r"optim = lion_32bit \(expected one of adamw_torch"),
        (SFT, {"num_generations": 8}, r"num_generations = 8 \(generation"),
        (SFT, {"use_peft": True, "use_dora": True}, r"use_dora = true \(DoRA"),
        (SFT, {"use_peft": True, "lora_target_modules": ["strange"]}, r"strange is no known target"),
        (SFT, {"use_peft": True, "load_in_4bit": True, "dtype": None}, r"load_in_4bit = true \(set dtype = bfloat16"),
        (SFT, {"gradient_checkpointing_kwargs": {"selective": True}}, "selective checkpoints of a Trainer"),
        (QLORA, {"unfrozen_parameters": ["lm_head"]}, "frozen by name"),
        (QLORA, {"adapter": "relora"}, r": 1 key .* is not read: adapter = relora \(expected lora"),
        (QLORA, {"adapter": None}, r"load_in_4bit = true \(quantized weights cannot be trained without an adapter"),
        (QLORA, {"lora_modules_to_save": ["norm"]}, r"norm is no known embedding or head; expected some of embed_tok"),
        (QLORA, {"lora_target_modules": ["lm_head"]}, r"'lm_head'\] \(lm_head is no known target of adapters"),
        (SFT, {"use_peft": True, "lora_target_modules": ["all-linear", "lm_head"]}, r"lm_head is no known target"),
        (QLORA, {"adapter": None, "load_in_4bit": False, "flash_attention": False}, r"head and norms are fp32"),
        (QLORA, {"adapter": "lora"}, r"load_in_4bit = true \(axolotl quantizes to 4 bits with adapter: qlora alone"),
        (QLORA, {"load_in_4bit": False}, r"adapter = qlora \(axolotl rejects qlora without load_in_4bit"),
        (SFT, {"use_deepspeed": True}, r"use_deepspeed = true \(no key has its settings: give DeepSpeed's JSON"),
        (QLORA, {"rl": "grpo"}, r"rl = grpo \(generation during training"),
        (QLORA, {"optimizer": "came_pytorch"}, r"optimizer = came_pytorch \(expected one of"),
        (QLORA, {"micro_batch_size": True}, r"micro_batch_size = true; expected a whole number"),
        (FACTORY, {"stage": "ppo"}, r"stage = ppo \(generation and reward"),
        (FACTORY, {"use_galore": True}, "GaLore is not modelled"),
        (FACTORY, {"quantization_bit": 3}, r"quantization_bit = 3 \(expected 4 or 8"),
        (FACTORY, {"quantization_bit": 4, "finetuning_type": "full"}, r"quantization_bit = 4 \(quantized weights"),
    ],
)
def test_what_is_not_read_is_named(write: Any, values: Any, more: Mapping[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_run(write(values, **more))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("empty.yaml", "", "it is empty"),
        ("list.yaml", "- base_model: gpt2\n", "it has a list, not keys with values"),
        ("many.json", "[1, 2]", "it has a list, not keys with values"),
        ("torn.yaml", "base_model: [", "is not YAML"),
        ("two.yaml", "base_model: gpt2\n---\nbase_model: gpt2\n", "it has 2 documents; expected FILE.yaml:NUMBER"),
        ("huge.yaml", "base_model: gpt2\nmicro_batch_size: 1e400\n", "expected a whole number"),
    ],
)
def test_files_that_are_none(tmp_path: Path, name: str, text: str, message: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_run(file)


def test_a_document_between_others(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "run.yml"
    text = "base_model: gpt2\nmicro_batch_size: 2\nsequence_len: 64\nflash_attention: true\n"
    file.write_text(f"%YAML 1.2\n---\n# none\n---\n{text}---\n")
    assert read_run(file).request.micro_batch == 2
    file.write_text(f"{text.replace('2', '4')}--- # then\n{text}")
    assert [read_run(f"{file}:{number}").request.micro_batch for number in (1, 2)] == [4, 2]
    with pytest.raises(UsageError, match="it has 2 documents"):
        read_run(f"{file}:3")
    assert run(["plan", "--from", f"{file}:2", "--budget", "4GiB", "--write"]) == 0
    capsys.readouterr()
    written = read_run(tmp_path / "run.planned.yml")
    assert (written.request.micro_batch, written.request.recompute) == (2, "none")


def test_anchors_windows_lines_and_a_missing_model(tmp_path: Path) -> None:
    file = tmp_path / "run.yml"
    common = "common: &c\r\n  micro_batch_size: 2\r\n"
    file.write_bytes((common + "<<: *c\r\nbase_model: gpt2\r\nsequence_len: 128\r\n").encode())
    with pytest.raises(UsageError, match=r"common\.micro_batch_size = 2 \(unknown key\)"):
        read_run(file)
    assert read_run(file, allow_unread=True).request.micro_batch == 2
    file.write_text("max_length: 128\nper_device_train_batch_size: 1\n")
    with pytest.raises(UsageError, match="names no model; give it before --from"):
        read_run(file).spec()
    assert read_run(file, model="gpt2").spec().name == "gpt2"


@pytest.mark.parametrize("values", [SFT, QLORA, FACTORY])
def test_a_file_is_the_command_that_it_prints(write: Any, values: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ledger", "--from", str(write(values)), "--format", "json", "--no-entries"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert run([*found["from"]["command"].split()[1:], "--format", "json", "--no-entries"]) == 0
    typed = json.loads(capsys.readouterr().out)
    assert typed.pop("from") is None
    found.pop("from")
    assert found == typed


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("meta-llama/Llama-2-7b-chat-hf", "llama2-7b"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "llama3.1-8b"),
        ("llama-3-70b", "llama3-70b"),
        ("mistralai/Mistral-7B-v0.1", "mistral-7b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"),
        ("Qwen/Qwen3-4B-Instruct-2507", "qwen3-4b"),
        ("mistralai/Mistral-7B-v0.9", None),
        ("google-bert/bert-base-uncased", "bert-base"),
        ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "tinyllama-1.1b"),
        ("org/llama-3-18b", None),
        ("org/llama-3-8b-wide", None),
    ],
)
def test_presets_by_the_names_of_repositories(name: str, expected: str | None) -> None:
    assert preset_named(name) == expected


def test_pairs_without_a_trainers_name_may_be_orpos(write: Any, tmp_path: Path) -> None:
    pairs = {"model_name_or_path": "gpt2", "beta": 0.1, "max_prompt_length": 64, "max_length": 128, "bf16": True}
    file = write({**pairs, "per_device_train_batch_size": 2}, "pairs.yaml")
    found = read_run(file)
    assert found.request.reference == "same"
    assert any("--reference none" in note for note in found.notes)
    assert not run_from(file, reference="none").frozen and run_from(file).frozen
    script = tmp_path / "run.sh"
    script.write_text(f"trl dpo --config {file.name}\n")
    found = read_run(script)  # the default of 8 is no other key
    assert found.request.micro_batch == 4
    assert not any("contradict" in note or "--reference none" in note for note in found.notes)


def test_an_accelerate_file_that_leaves_precision_to_the_script(write: Any) -> None:
    file = {"distributed_type": "FSDP", "num_processes": 8, "fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD"}}
    for more, noted in (({}, True), ({"mixed_precision": "no"}, False)):
        found = read_run(write({**file, **more}, "fsdp.yaml"), model="gpt2", asked={"seq": 64})
        assert found.request.precision == "fp32"
        assert any("leaves mixed_precision" in note for note in found.notes) is noted


def test_arguments_as_python_prints_them(tmp_path: Path) -> None:
    file = tmp_path / "args.json"
    file.write_text("{'model_name_or_path': 'llama3-8b', 'per_device_train_batch_size': 4, 'deepspeed': None}")
    assert read_run(file).request.micro_batch == 4


def test_an_unknown_key_names_the_closest_one(write: Any) -> None:
    with pytest.raises(UsageError, match=r"Lora_target = all .unknown key: is it lora_target.*ax_samples.*max_samples"):
        read_run(write(FACTORY, Lora_target="all", ax_samples=10))


def test_a_model_that_is_quantized_already(write: Any) -> None:
    path = "/nowhere/Meta-Llama-3.1-8B-Instruct-bnb-4bit"
    found = read_run(write(FACTORY, model_name_or_path=path, quantization_bit=4))
    assert found.model == "llama3.1-8b"
    dynamic = read_run(write(FACTORY, model_name_or_path=path.replace("bnb", "unsloth-bnb"), quantization_bit=4))
    assert dynamic.model == "llama3.1-8b"
    own = {note for note in dynamic.notes if "dynamic 4-bit checkpoint" in note}
    assert own and not own & {*found.notes}
    assert read_run(write(FACTORY, model_name_or_path=path)).model == path
    with pytest.raises(UsageError, match=r"no file or folder here; the closest are llama3\.1-8b"):
        read_run(write(FACTORY, model_name_or_path=path)).spec()


def test_llamafactorys_v1(write: Any) -> None:
    values = {
        "model": "Qwen/Qwen3-8B",
        "model_class": "llm",
        "kernel_config": {"name": "auto"},
        "dist_config": {"name": "fsdp2", "dcp_path": None},
        "micro_batch_size": 2,
        "global_batch_size": 32,
        "cutoff_len": 1024,
    }
    found = read_run(write(values), gpus=4)
    assert found.global_batch == 32
    assert _fields(found) == {
        "like": "huggingface",
        "kernels": "llamafactory-v1",
        "seq": 1024,
        "micro_batch": 2,
        "micro_batches": 4,
        "precision": "bf16-pure",
        "optimizer": "adamw-foreach",
        "recompute": "full",
        "dp": 4,
        "zero": 3,
    }
    lora = {
        "peft_config": {"name": "lora", "r": 16, "target_modules": "all"},
        "quant_config": {"name": "bnb", "quantization_bit": 4},
    }
    found = read_run(write(values, **lora), gpus=4)
    assert (found.request.lora, found.request.base) == ("r=16,targets=all-linear,dropout=0.05", "nf4-double")
    with pytest.raises(UsageError, match=r"peft_config\.name = freeze \(freeze is not modelled"):
        read_run(write(values, peft_config={"name": "freeze"}), gpus=4)


@pytest.mark.parametrize("kind", ["SFTConfig", "DPOConfig", "ModelConfig", "ScriptArguments", "TrainingArguments"])
def test_every_field_of_the_libraries_is_known(write: Any, kind: str) -> None:
    """Each is read, harmless, or refused with a reason: none is unknown."""
    trl, transformers = pytest.importorskip("trl"), pytest.importorskip("transformers")
    arguments = getattr(trl, kind, None) or getattr(transformers, kind)
    unknown = []
    for field in dataclasses.fields(arguments):
        found = read_run(write({"packing": True, field.name: 7}), model="gpt2", gpus=7, allow_unread=True)
        unknown += [key.name for key in found.unread if key.why == UNKNOWN]
    assert unknown == []


OWN = """torchrun --nproc_per_node=2 finetune.py --model_name_or_path Qwen/Qwen2.5-7B --train_data_path a.json
  --per_device_train_batch_size 2 --bf16 True --model_max_length 512 ASKED"""


@pytest.mark.parametrize(
    ("asked", "given", "why"),
    [
        ("--use_lora True", {"lora": "r=64"}, "use_lora = True .what it adapts stands in the script: give --lora"),
        ("--q_lora True", {"base": "nf4"}, "q_lora = True .how it quantizes its base stands in the script: give --ba"),
        ("--lora_r 8", {"lora": "r=64"}, "lora_r = 8 .TRL makes no adapters without use_peft, and another script may"),
    ],
)
def test_adapters_of_a_scripts_own_options(tmp_path: Path, asked: str, given: dict[str, str], why: str) -> None:
    (tmp_path / "run.sh").write_text(OWN.replace("\n", " \\\n").replace("ASKED", asked))
    with pytest.raises(UsageError, match=why):
        read_run(tmp_path / "run.sh")
    assert read_run(tmp_path / "run.sh", asked=given).request.micro_batch == 2
