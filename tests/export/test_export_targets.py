"""Exports in other people's packages: their parsers and classes take them, and their layers hold what was said.

Slow: packages are fetched with pip (`support.target_packages`), and are skipped where it does not get them.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

import jettison
from jettison.cli.plan import PlanFlags, plan
from jettison.frameworks.layer_policies import kept_whole
from jettison.request.options import RunRequest
from support.target_packages import MEGATRON, answered, fetched
from support.target_plans import FLAGS, MODELS, PLANS, exported, world

pytestmark = pytest.mark.slow


def settings(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(exported(name, "megatron").files["transformer_config.json"])
    return found


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fetched(tmp_path_factory.mktemp("megatron"), "megatron-core==0.19.2", how=MEGATRON)


def test_plans_have_all_kinds_of_settings() -> None:
    words = {word for name in PLANS for word in settings(name)}
    assert {"recompute_modules", "recompute_method", "recompute_num_layers", "offload_modules"} <= words
    assert "mla_up_proj" in settings("latent")["recompute_modules"]
    assert "moe_act" in settings("experts")["offload_modules"]
    assert "pipeline-model-parallel-layout" in exported("stages", "megatron").files["megatron-flags.txt"]
    assert "num-virtual-stages-per-pipeline-rank 2" in exported("virtual", "megatron").files["megatron-flags.txt"]
    assert settings("runs")["recompute_num_layers"] == 5


def test_megatron_takes_the_fields_and_the_flags_and_refuses_wrong_ones(megatron: Path) -> None:
    wrong = [
        {"recompute_granularity": "full"},
        {"recompute_granularity": "selective", "recompute_modules": ["core_attention"]},
        {"fine_grained_activation_offloading": True, "offload_modules": ["attn_proj"]},
        {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]},
    ]
    configs = [MODELS[PLANS[name][0]] | settings(name) for name in PLANS]
    flags = [shlex.split(exported(name, "megatron").files["megatron-flags.txt"]) for name in PLANS]
    job = {
        "configs": [*configs, *(MODELS["gpt-22b"] | fields for fields in wrong)],
        "flags": [*flags, ["--recompute-modulez", "core_attn"]],
    }
    answer = answered("support.target_megatron", job, megatron)
    assert answer["configs"][: len(PLANS)] == configs
    for refused in answer["configs"][len(PLANS) :]:
        assert set(refused) == {"refused"}, refused
    for name, parsed in zip(PLANS, answer["flags"], strict=False):
        model, _, asked = PLANS[name]
        expected = settings(name) | {
            "num_layers": MODELS[model]["num_layers"],
            "tensor_model_parallel_size": asked["tp"],
            "expert_model_parallel_size": asked.get("ep", 1),
            "pipeline_model_parallel_size": asked.get("pp", 1),
            "sequence_parallel": True,
            "micro_batch_size": asked.get("micro_batch", 1),
        }
        assert {field: parsed[field] for field in expected} == expected, name
    assert "unrecognized arguments: --recompute-modulez" in answer["flags"][-1]["refused"]


USUAL = "--bf16 --lr 1e-4 --train-iters 10 --tokenizer-type NullTokenizer --vocab-size 32000 --mock-data"


def test_megatrons_own_check_of_arguments_takes_the_flags(megatron: Path) -> None:
    """`validate_args`, as its programs call it, on as many ranks as planned; then the configuration that they build."""
    jobs = []
    for name in PLANS:
        flags = shlex.split(f"{FLAGS[PLANS[name][0]]} {USUAL} {exported(name, 'megatron').files['megatron-flags.txt']}")
        jobs.append({"flags": flags, "world": world(name)})
    wrong = {"flags": jobs[0]["flags"], "world": 4}  # tensor parallelism alone asks for eight
    *found, refused = answered("support.target_megatron", {"validated": [*jobs, wrong]}, megatron)["validated"]
    for name, one in zip(PLANS, found, strict=True):
        asked = PLANS[name][2]
        assert {field: one["config"].get(field) for field in settings(name)} == settings(name), (name, one)
        assert one["data_parallel_size"] == asked.get("dp", 1)
        per_replica = asked.get("micro_batch", 1) * asked.get("micro_batches", 1)
        assert one["global_batch_size"] == per_replica * asked.get("dp", 1)
    assert found[list(PLANS).index("virtual")]["virtual_pipeline_model_parallel_size"] == 2
    assert "world size (4)" in refused["refused"]


SIZES = {"seq": 32, "micro_batch": 2, "hidden": 64, "heads": 4, "layers": 4}
RANDOM_STATE = 5056  # of the CPU, for each checkpoint; beside GPUs it lies on the host
MASK_TYPE = 4  # an integer that Megatron gives each checkpoint of core attention


def random_states(chosen: dict[str, Any]) -> int:
    """Bytes beside the layers' own: what a checkpoint of Megatron's holds beside what it is given."""
    beside = {"core_attn": RANDOM_STATE + MASK_TYPE, "mlp": RANDOM_STATE, "layernorm": 2 * RANDOM_STATE}
    if chosen.get("recompute_granularity") == "full":
        return int(chosen["recompute_num_layers"]) * RANDOM_STATE
    return SIZES["layers"] * sum(beside[module] for module in chosen.get("recompute_modules", ()))


def test_megatrons_own_block_holds_the_bytes_that_were_said(megatron: Path, tmp_path: Path) -> None:
    """Four layers in fp32 on a CPU, under what is exported at seven budgets: bytes held, and gradients to the bit."""
    file = tmp_path / "config.json"
    sizes = {"vocab_size": 64, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 32, "n_inner": 256}
    without_dropout = dict.fromkeys(("resid_pdrop", "attn_pdrop", "embd_pdrop"), 0.0)
    kind = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "activation_function": "gelu"}
    file.write_text(json.dumps(kind | sizes | without_dropout))
    asked = RunRequest(micro_batch=2, seq=32, precision="fp32", kernels="megatron", attention="eager")
    budgets = (4647936, 4522137, 4270540, 4144742, 4123776, 4018944, 3809280)
    found = [
        jettison.export_plan(plan(str(file), asked, PlanFlags(budget=f"{b}B")).document(), to="megatron")
        for b in budgets
    ]
    chosen = [json.loads(one.files["transformer_config.json"]) for one in found]
    assert len({json.dumps(one) for one in chosen}) == len(budgets)
    steps = answered("support.target_megatron", {"sizes": SIZES, "policies": chosen}, megatron)["steps"]
    assert chosen[0] == {}
    plain = sum(kept_whole(policy.decision).kept_bytes for policy in found[0].policies)
    sbh = SIZES["seq"] * SIZES["micro_batch"] * SIZES["hidden"] * 4
    outside = steps[0]["held"] - plain
    assert outside == 2 * sbh  # the block's output, and what it makes of its input
    for one, exported_settings, step in zip(found, chosen, steps, strict=True):
        assert step["held"] == one.cost.layer_bytes + outside + random_states(exported_settings), exported_settings
        assert step["same"]


def test_torchtitans_own_llama_holds_the_bytes_that_were_said(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A live plan of its debug model with four layers; and files of described plans, which it imports and applies."""
    needed = ("torchtitan==0.3.0", "tyro==1.0.17", "spmd_types==0.2.3", "docstring_parser", "typeguard", "shtab")
    folder = fetched(tmp_path_factory.mktemp("titan"), *needed)
    described = plan("llama3-8b", RunRequest(tp=4, micro_batch=2), PlanFlags(budget="43GiB")).document()
    text = jettison.export_plan(described, to="torchtitan").files["planned_ac.py"]
    assert "'kind 1': {" in text
    answer = answered("support.target_titan", {"live": True, "files": [_of_four_layers(text)]}, folder)
    live = answer["live"]
    assert live["said"] == live["held"] < live["without"]
    assert live["same"] and live["selective"] > 0
    moving = answer["moving"]
    assert moving["said"] == moving["held"] < live["without"] and moving["same"] and moving["host"] > 0
    assert answer["given"] == [{"wrapped": [True, True, False, False], "same": True}]


def _of_four_layers(text: str) -> str:
    """The same file with one layer of its first kind and one full, for a small model."""
    defined_below = text.index("# by kind of layer")
    above = text.index("FULL = ")
    return f"{text[:above]}FULL = ('layers.1',)\nSELECTIVE = {{'layers.0': 'kind 1'}}\n{text[defined_below:]}"


@pytest.fixture(scope="module")
def deepspeed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("deepspeed")
    packages = fetched(folder / "own", "deepspeed==0.19.8", source=True)
    return packages, fetched(folder / "beside", "hjson", "py-cpuinfo", "msgpack", "einops")


def test_deepspeed_reads_its_file(deepspeed: tuple[Path, Path]) -> None:
    plans = (("26GiB", {"dp": 8, "zero": 3, "micro_batch": 2, "offload": True}), ("43GiB", {"tp": 4, "micro_batch": 2}))
    files = []
    for budget, asked in plans:
        made = plan("llama3-8b", RunRequest(**asked), PlanFlags(budget=budget, gpu="h100-80gb")).document()
        files.append(json.loads(jettison.export_plan(made, to="deepspeed").files["deepspeed.json"]))
    assert [one["activation_checkpointing"]["cpu_checkpointing"] for one in files] == [True, False]
    wrong = files[0] | {"zero_optimization": {"stage": 7}}
    *read, refused = answered("support.target_deepspeed", {"configs": [*files, wrong]}, *deepspeed)["configs"]
    for one, found in zip(files, read, strict=True):
        assert found == {
            "activation_checkpointing": one["activation_checkpointing"],
            "stage": one["zero_optimization"]["stage"],
            "micro_batch": one["train_micro_batch_size_per_gpu"],
            "bf16": True,
        }
    assert "stage" in refused["refused"]


@pytest.mark.parametrize("factory", ["many_rows", "noisy"])
def test_deepspeeds_own_checkpoints_hold_the_bytes_that_were_said(factory: str, deepspeed: tuple[Path, Path]) -> None:
    """A step of its engine. Beside what was said it holds a second random state a layer, the accelerator's: a CPU's."""
    (step,) = answered("support.target_deepspeed", {"steps": [factory]}, *deepspeed)["steps"]
    assert step["settings"]["activation_checkpointing"]["number_checkpoints"] == step["layers"]
    assert step["held"] == step["said"] + step["layers"] * RANDOM_STATE
    assert step["same"] and step["moved"]
