"""torchtitan's TOML and its Python configurations, key by key."""

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

TOML = """
[model]
name = "llama3"
flavor = "8B"

[training]
local_batch_size = 2
seq_len = 4096

[parallelism]
data_parallel_shard_degree = -1

[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
"""
PLAIN = {"like": "torchtitan", "seq": 4096, "micro_batch": 2, "dp": 64, "recompute": "selective-op-alternate"}


def given(found: RunFile) -> dict[str, Any]:
    return {name: getattr(found.request, name) for name in found.request.given()}


def toml(tmp_path: Path, *lines: str, text: str = TOML) -> Path:
    """The file with other values of ``section.key``, or with keys that it had not."""
    for line in lines:
        place, value = line.split(" = ")
        section, key = place.rsplit(".", 1)
        if f"[{section}]" not in text:
            text += f"\n[{section}]\n"
        head, _, rest = text.partition(f"[{section}]\n")
        body, bracket, others = rest.partition("\n[")
        kept = [one for one in body.splitlines() if one.split(" = ")[0] != key]
        text = f"{head}[{section}]\n{key} = {value}\n" + "\n".join(kept) + f"\n{bracket}{others}"
    file = tmp_path / "run.toml"
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("lines", "fields"),
    [
        ((), {}),
        (("parallelism.tensor_parallel_degree = 8",), {"tp": 8, "dp": 8}),
        (("parallelism.data_parallel_replicate_degree = 4",), {"zero_replicas": 4}),
        (("parallelism.fsdp_reshard_after_forward = 'never'",), {"reshard_after_forward": "never"}),
        (("parallelism.context_parallel_degree = 2",), {"cp": 2, "dp": 32, "cp_comm_type": "gather"}),
        (
            ("parallelism.context_parallel_degree = 2", "parallelism.context_parallel_rotate_method = 'alltoall'"),
            {"cp": 2, "dp": 32, "cp_comm_type": "ring"},
        ),
        (("training.global_batch_size = 512",), {"micro_batches": 4}),
        (("training.dtype = 'bfloat16'",), {"precision": "bf16-pure"}),
        (("training.mixed_precision_param = 'float32'",), {"precision": "fp32"}),
        (("training.mixed_precision_reduce = 'float32'", "infra.set_gpu_affinity = true"), {}),
        (("training.mixed_precision_reduce = 'bfloat16'",), {"reduce_dtype": "bf16"}),
        (
            (
                "training.mixed_precision_reduce = 'bfloat16'",
                "parallelism.data_parallel_shard_degree = 1",
                "parallelism.data_parallel_replicate_degree = 64",
            ),
            {"zero": 0, "gradients": "buckets"},
        ),
        (("training.enable_cpu_offload = true",), {"offload_optimizer": "fsdp2"}),
        (("optimizer.implementation = 'foreach'",), {"optimizer": "adamw-foreach"}),
        (("optimizer.early_step_in_backward = true",), {"gradients": "in-backward"}),
        (("compile.enable = true",), {"loss": "compiled"}),
        (("compile.enable = true", "compile.components = ['model']"), {}),
        (("activation_checkpoint.mode = 'full'",), {"recompute": "full"}),
        (("activation_checkpoint.mode = 'none'",), {"recompute": "none"}),
        (("activation_checkpoint.selective_ac_option = '3'",), {"recompute": "interval:3"}),
        (("activation_checkpoint.selective_ac_option = '1'",), {"recompute": "full"}),
        (("model.converters = ['float8']",), {"fp8_recipe": "tensorwise"}),
        (
            ("model.converters = ['float8']", "quantize.linear.float8.enable_fsdp_float8_all_gather = true"),
            {"fp8_recipe": "tensorwise", "fp8_param_gather": True},
        ),
        (("model.converters = ['float8']", "float8.recipe_name = 'rowwise'"), {"fp8_recipe": "rowwise"}),
        (("model.converters = ['mx']", "mx.filter_fqns = ['output']"), {"fp8_recipe": "mxfp8"}),
        (("float8.enable_float8_linear = true",), {"fp8_recipe": "tensorwise"}),
        (("model.flavor = '8B_flex'",), {"attention": "flex"}),
        (
            ("parallelism.tensor_parallel_degree = 2", "parallelism.disable_loss_parallel = true"),
            {"tp": 2, "dp": 32, "loss": "upcast"},
        ),
        (
            (
                "compile.enable = true",
                "parallelism.tensor_parallel_degree = 2",
                "parallelism.enable_async_tensor_parallel = true",
            ),
            {"tp": 2, "dp": 32, "tp_comm_overlap": True},
        ),
    ],
)
def test_fields_of_a_toml(tmp_path: Path, lines: tuple[str, ...], fields: dict[str, Any]) -> None:
    found = read_run(toml(tmp_path, *lines), gpus=64)
    assert found.model == "llama3.1-8b"
    assert given(found) == {**PLAIN, **fields}
    assert found.unread == ()
    assert found.compile == ("compile.enable = true" in lines)
    resolve(found.spec(), found.request)


@pytest.mark.parametrize("text", [TOML.replace("\n", "\r\n"), "\ufeff" + TOML])
def test_line_ends_and_marks_of_windows(tmp_path: Path, text: str) -> None:
    file = tmp_path / "run.toml"
    file.write_bytes(text.encode())
    assert given(read_run(file, gpus=64)) == PLAIN


def test_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    file = Path(__file__).parents[2] / "examples" / "from" / "pretrain.toml"
    found = read_run(file, gpus=64)
    assert (found.unread, found.compile, found.global_batch) == ((), True, 512)
    for verb in ("ledger", "estimate"):
        assert run([verb, "--from", str(file), "--gpus", "64", "--gpu", "h100-80gb"]) == 0
        assert found.command(verb) in capsys.readouterr().err


def test_what_absence_means(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[model]\nflavor = "8B"\n')
    found = read_run(file, gpus=8)
    assert given(found) == {"like": "torchtitan", "seq": 2048, "micro_batch": 8, "dp": 8, "recompute": "interval:2"}


def test_the_batch_of_a_step_stays_where_the_command_line_cuts_it_otherwise(tmp_path: Path) -> None:
    file = toml(tmp_path, "training.global_batch_size = 512")
    assert read_run(file, gpus=64).request.micro_batches == 4
    found = read_run(file, gpus=64, asked={"micro_batch": 1})
    assert (found.request.micro_batches, found.global_batch) == (8, 512)


def test_one_gpu_and_ddp_have_no_fsdp(tmp_path: Path) -> None:
    assert read_run(toml(tmp_path), gpus=1).request.zero == 0
    ddp = toml(tmp_path, "parallelism.data_parallel_replicate_degree = 8", "parallelism.data_parallel_shard_degree = 1")
    found = read_run(ddp)
    assert (found.request.dp, found.request.zero, found.request.gradients, found.gpus) == (8, 0, "buckets", 8)
    alone = toml(tmp_path, "parallelism.tensor_parallel_degree = 8")
    found = read_run(alone, gpus=8)
    assert (found.request.zero, found.request.precision) == (0, "fp32")
    assert "no mixed precision with" in found.notes[0]
    found = read_run(toml(tmp_path, text=TOML.replace("local_batch_size", "batch_size")), gpus=1)
    assert (found.request.zero, found.request.precision) == (0, "fp32")
    assert "no mixed precision in a version that has training.batch_size" in found.notes[0]


def test_a_file_of_2024(tmp_path: Path) -> None:
    file = tmp_path / "old.toml"
    file.write_text(
        '[model]\nname = "llama3"\nflavor = "8B"\nnorm_type = "rmsnorm"\n'
        "[training]\nbatch_size = 1\nseq_len = 8192\ndata_parallel_shard_degree = -1\ntensor_parallel_degree = 2\n"
        'compile = false\nenable_float8_linear = false\n[activation_checkpoint]\nmode = "selective"\n'
        'selective_ac_option = "op"\n[experimental]\npipeline_parallel_degree = 1\n'
    )
    found = read_run(file, gpus=64)
    assert given(found) == {
        "like": "torchtitan",
        "seq": 8192,
        "micro_batch": 1,
        "tp": 2,
        "pp": 1,
        "dp": 32,
        "recompute": "selective-op-alternate",
        "fsdp_wrap_layers_only": True,
        "kernels": "pytorch-2.8",
    }
    assert "before July 2025" in found.notes[0]


@pytest.mark.parametrize(
    ("lines", "fields"),
    [
        # 32 layers, and one for the embedding and one for the head, over 4 ranks: 9, 9, 8, 8
        ((), {"stage_layers": "8,9,8,7"}),
        (
            ("parallelism.pipeline_parallel_schedule = 'Interleaved1F1B'",),
            {"virtual_stages": 2, "stage_layers": "4,5,4,4,4,4,4,3"},
        ),
        (
            (
                "parallelism.pipeline_parallel_first_stage_less_layers = 0",
                "parallelism.pipeline_parallel_last_stage_less_layers = 0",
            ),
            {},
        ),
        (
            (
                "parallelism.pipeline_parallel_schedule = 'Interleaved1F1B'",
                "parallelism.pipeline_parallel_layers_per_stage = 3",
            ),
            {"virtual_stages": 3, "stage_layers": "2,3,3,3,3,3,3,3,3,3,2,1"},
        ),
        (
            ("parallelism.pipeline_parallel_split_points = ['layers.10', 'layers.16', 'layers.20']",),
            {"stage_layers": "10,6,4,12"},
        ),
        (("parallelism.pipeline_parallel_schedule = 'GPipe'",), {"schedule": "gpipe", "stage_layers": "8,9,8,7"}),
    ],
)
def test_pipelines(tmp_path: Path, lines: tuple[str, ...], fields: dict[str, Any]) -> None:
    lines = ("parallelism.pipeline_parallel_degree = 4", "training.local_batch_size = 8", *lines)
    found = read_run(toml(tmp_path, *lines), gpus=64)
    base = {"pp": 4, "dp": 16, "micro_batch": 1, "micro_batches": 8, "schedule": "1f1b"}
    assert given(found) == {**PLAIN, **base, **fields}
    resolve(found.spec(), found.request)


def test_experts(tmp_path: Path) -> None:
    lines = ("model.name = 'deepseek_v3'", "model.flavor = '671B'", "parallelism.expert_parallel_degree = 16")
    found = read_run(toml(tmp_path, *lines), gpus=64)
    assert found.model == "deepseek-v3"
    assert (found.request.ep, found.request.expert_tp) == (16, None)
    split = "parallelism.tensor_parallel_degree = 4"
    assert read_run(toml(tmp_path, *lines, split), gpus=64).request.expert_tp == 1


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (("activation_checkpoint.mode = 'memory_budget'",), "the compiler chooses recomputation"),
        (
            ("activation_checkpoint.selective_ac_option = 'ops'",),
            r"selective_ac_option = ops \(expected one of none, full",
        ),
        (("model.converters = ['lora']",), r"lora is not modelled"),
        (("model.converters = ['quantize.grouped_mm.float8']",), "experts in 8 bits"),
        (("model.converters = ['float8']", "float8.filter_fqns = ['attention.wq']"), "this choice of FP8 layers"),
        (("optimizer.name = 'SGD'",), r"optimizer\.name = SGD \(expected one of adamw, adam\)"),
        (("optimizer.implementation = 'for-loop'",), r"for-loop"),
        (("fault_tolerance.enable = true",), "changing replicas"),
        (("experimental.custom_import = 'my.module'",), "user code"),
        (("parallelism.enable_fsdp_symm_mem = true",), "symmetric memory"),
        (("training.local_batch_size = 'many'",), "expected a whole number"),
        (("training.global_batch_size = 100",), "no multiple of"),
        (("parallelism.data_parallel_replicate_degree = 7",), "expected a divisor"),
        (("parallelism.data_parallel_shard_degree = 32",), "omit --gpus"),
        (("parallelism.warp = 9",), r"parallelism\.warp = 9 \(unknown key\)"),
    ],
)
def test_what_is_refused(tmp_path: Path, lines: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_run(toml(tmp_path, *lines), gpus=64)


def test_a_model_that_is_not_known_is_asked_for(tmp_path: Path) -> None:
    file = toml(tmp_path, "model.flavor = '9000B'")
    found = read_run(file, gpus=64)
    with pytest.raises(UsageError, match="names no model; give it before --from"):
        found.spec()
    assert read_run(file, gpus=64, model="llama3-8b").spec().depth == 32


def test_sizes_that_the_file_stands_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = toml(tmp_path, "model.name = 'qwen3'", "model.flavor = '1.7B'")
    found = read_run(file, gpus=8)
    assert found.model_argument == str(file)
    assert (found.spec().hidden, found.spec().depth, found.spec().tied_embeddings) == (2048, 28, True)
    assert run(["ledger", "--from", str(file), "--gpus", "8", "--format", "json", "--no-entries"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert run([*read.pop("from")["command"].split()[1:], "--format", "json", "--no-entries"]) == 0
    typed = json.loads(capsys.readouterr().out)
    assert typed.pop("from") is None
    assert typed == read


def test_every_model_can_be_described(tmp_path: Path) -> None:
    for name, flavors in models("torchtitan").items():
        for flavor in flavors if name != "names" else ():
            found = read_run(toml(tmp_path, f"model.name = '{name}'", f"model.flavor = '{flavor}'"), gpus=64)
            assert forecast(resolve(found.spec(), found.request).run).peak_bytes > 0


# Python configurations ------------------------------------------------------------------------------------------------


PYTHON = """
from torchtitan.trainer import Trainer

from . import model_registry

CONTEXT = 4096


def small() -> Trainer.Config:
    spec = model_registry("8B", attn_backend="varlen")
    return Trainer.Config(
        model_spec=spec,
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=words(spec))),
        optimizer=default_adamw(lr=3e-4),
        training=TrainingConfig(
            num_tokens_per_microbatch_per_dp_rank=2 * CONTEXT, max_context_length=CONTEXT, steps=10
        ),
        parallelism=ParallelismConfig(data_parallel_shard_degree=-1),
        activation_checkpoint=SelectiveAC.Config(),
    )


def wide(ranks: int = 8) -> Trainer.Config:
    \"\"\"The same on more ranks.\"\"\"
    config = small()
    assert config.training is not None
    config.parallelism.tensor_parallel_degree = ranks
    config.activation_checkpoint = FullAC.Config()
    return config


def eager() -> Trainer.Config:
    config = dataclasses.replace(small(), activation_checkpoint=None)
    config.training.disable_cuda_graphs = True
    config.training.num_tokens_per_train_step = 64 * 4 * 8192
    return config


def staged() -> Trainer.Config:
    config = small()
    config.parallelism = ParallelismConfig(pipeline_parallel_degree=4, num_pp_microbatches=8)
    config.training.disable_cuda_graphs = True
    return config


def odd() -> Trainer.Config:
    config = small()
    for layer in config.model_spec.model.layers:
        layer.twist()
    return config


def before() -> Trainer.Config:
    return Trainer.Config(
        model_spec=model_registry("8B"),
        training=TrainingConfig(local_batch_size=2, seq_len=4096),
        activation_checkpoint=ActivationCheckpointConfig(mode="selective", selective_ac_option="2"),
        model_converters=ModelConvertersContainer.Config(
            converters=[Float8LinearConverter.Config(enable_fsdp_float8_all_gather=True)]
        ),
        compile=CompileConfig(enable=True),
    )


def adapted() -> Trainer.Config:
    config = small()
    config.model_spec = model_registry("8B", converters=[LoRAConverter.Config(rank=8, target_modules=["wq", "wo"])])
    return config
"""
SMALL = {
    "like": "torchtitan",
    "seq": 4096,
    "attention": "flash",
    "micro_batch": 2,
    "dp": 64,
    "loss": "chunked",
    "recompute": "selective-op-alternate",
    "cuda_graphs": True,
}


@pytest.mark.parametrize(
    ("name", "fields", "without"),
    [
        ("small", {}, ()),
        ("wide", {"tp": 8, "dp": 8, "recompute": "full"}, ()),
        ("eager", {"recompute": "none", "micro_batches": 4}, ("cuda_graphs",)),
        (
            "before",
            {"recompute": "interval:2", "fp8_recipe": "tensorwise", "fp8_param_gather": True, "loss": "compiled"},
            ("cuda_graphs", "attention"),
        ),
        (
            "staged",
            {"pp": 4, "dp": 16, "micro_batches": 8, "schedule": "1f1b", "stage_layers": "8,9,8,7"},
            ("cuda_graphs",),
        ),
        ("adapted", {"lora": "r=8,alpha=16,targets=q_proj+o_proj", "base": "fp32"}, ("attention",)),
    ],
)
def test_fields_of_a_python_configuration(
    tmp_path: Path, name: str, fields: dict[str, Any], without: tuple[str, ...]
) -> None:
    folder = tmp_path / "llama3"
    folder.mkdir()
    (folder / "config_registry.py").write_text(PYTHON)
    found = read_run(folder / f"config_registry.py:{name}", gpus=64)
    assert found.model == "llama3.1-8b"
    assert given(found) == {key: value for key, value in {**SMALL, **fields}.items() if key not in without}
    assert forecast(resolve(found.spec(), found.request).run).peak_bytes > 0


def test_a_python_file_with_several_configurations_needs_a_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "llama3"
    folder.mkdir()
    file = folder / "config_registry.py"
    file.write_text(PYTHON)
    with pytest.raises(UsageError, match=r"it has 7 configurations: small, wide, eager, staged, odd, .*FILE\.py:small"):
        read_run(file, gpus=64)
    with pytest.raises(UsageError, match="no configuration 'large'; expected one of small"):
        read_run(f"{file}:large", gpus=64)
    with pytest.raises(UsageError, match=r"for layer in config\.model_spec\.model\.layers"):
        read_run(f"{file}:odd", gpus=64)
    assert run(["ledger", "--from", f"{file}:small", "--gpus", "64", "--format", "json", "--no-entries"]) == 0
    command = json.loads(capsys.readouterr().out)["from"]["command"]
    assert run([*command.split()[1:], "--format", "json", "--no-entries"]) == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it has no configurations"),
        ("def a(:", "is not PYTHON"),
        ("def a():\n    return a()\n", "calls within each other"),
        ("def a():\n    return T(x=1)\n", "no key of a known framework"),
        ("X = 1 << 100000\ndef a():\n    return T(model_spec=X * X)\n", "names no model|not read"),
        ("def a():\n    return open('/etc/passwd').read()\n", "no key of a known framework"),
        ("(" * 500 + ")" * 500, "is not PYTHON"),
        (
            "A0 = [1]\n"
            + "\n".join(f"A{n} = [A{n - 1}, A{n - 1}]" for n in range(1, 40))
            + "\nX = T(model_spec=A39)\n",
            "more than 20,000 keys",
        ),
        ("def a():\n    x = T(model_spec=1)\n    x.me = x\n    return x\n", "more than 20,000 keys"),
    ],
)
def test_bad_python(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "run.py"
    file.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_run(file, gpus=64).spec()


@pytest.mark.parametrize(
    ("name", "budget", "changed", "unchanged"),
    [
        ("small", "60GiB", "activation_checkpoint=None", "SelectiveAC.Config()"),
        ("small", "16GiB", "activation_checkpoint=FullAC.Config()", "SelectiveAC.Config()"),
        ("wide", "60GiB", "config.activation_checkpoint = None", "FullAC.Config()"),
        ("before", "16GiB", "mode='full'", 'mode="selective"'),
    ],
)
def test_a_python_configuration_is_written_back(
    tmp_path: Path, name: str, budget: str, changed: str, unchanged: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "llama3"
    folder.mkdir()
    file = folder / "config_registry.py"
    file.write_text("# mine\nfrom torchtitan.distributed.activation_checkpoint import SelectiveAC\n" + PYTHON)
    command = ["plan", "--from", f"{file}:{name}", "--gpus", "64", "--gpu", "h100-80gb", "--budget", budget, "--write"]
    assert run(command) == 0, capsys.readouterr().err
    text = (folder / "config_registry.planned.py").read_text()
    assert changed in text
    assert text.count(unchanged) == file.read_text().count(unchanged) - 1
    assert text.startswith("# mine\nfrom torchtitan.distributed.activation_checkpoint import ")
    assert ("import FullAC, SelectiveAC" in text) == ("FullAC" in changed)
    recomputed = "none" if "None" in changed else "full"
    assert read_run(folder / f"config_registry.planned.py:{name}", gpus=64).request.recompute == recomputed
