"""Plans of described runs in the words of trainers that build their own layers, and the command line."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import jettison
from jettison.cli.main import run
from jettison.cli.plan import PlanFlags, plan, remade
from jettison.core.errors import PlanMismatch, UsageError
from jettison.frameworks.export import Exported
from jettison.frameworks.layer_policies import checkpointed, kept_whole
from jettison.frameworks.megatron.write import by_modules, layout_string
from jettison.frameworks.nearest_policy import CannotSay, DescribedPricer, decisions_of
from jettison.frameworks.torchtitan.write import gemm_of
from jettison.predict.forecast import forecast
from jettison.request.options import RunRequest
from jettison.request.resolve import model_spec, resolve
from jettison.spec.frameworks import named
from jettison.spec.layout import Layout, stage_layers
from jettison.spec.recompute import Mode, Recompute

PAPER = {"tp": 8, "micro_batch": 4, "kernels": "megatron"}


@cache
def document(model: str, budget: str, **asked: Any) -> dict[str, Any]:
    return plan(model, RunRequest(**asked), PlanFlags(budget=budget)).document()


def paper(budget: str = "55GiB") -> dict[str, Any]:
    return document("gpt-22b", budget, **PAPER)


def llama(budget: str = "43GiB") -> dict[str, Any]:
    return document("llama3-8b", budget, tp=4, micro_batch=2)


def exported(made: dict[str, Any], to: str) -> Exported:
    return jettison.export_plan(made, to=to)


def test_core_attention_leaves_what_the_paper_says() -> None:
    """arXiv 2205.05198, equation 6: 34 sbh/t a layer, and the statistics of two norms."""
    choice = remade(paper()["made_by"]).choice
    run = choice.forecast.run
    sbh = run.seq * run.micro_batch * run.model.hidden
    statistics = 2 * 2 * 4 * run.seq * run.micro_batch // 8
    for decision in decisions_of(choice):
        assert by_modules(decision, ["core_attn"]).kept_bytes == 34 * sbh // 8 + statistics
        assert checkpointed(decision).kept_bytes == 2 * sbh // 8
        both = by_modules(decision, ["mlp", "core_attn"])
        assert by_modules(decision, ["core_attn"]).kept_bytes - both.kept_bytes == 16 * sbh // 8
        norms = by_modules(decision, ["layernorm"])
        assert kept_whole(decision).kept_bytes - norms.kept_bytes == 4 * sbh // 8 + statistics


def test_megatron_gets_the_fastest_that_it_can_say() -> None:
    found = exported(paper(), "megatron")
    assert json.loads(found.files["transformer_config.json"]) == {
        "recompute_granularity": "selective",
        "recompute_modules": ["core_attn"],
    }
    flags = found.files["megatron-flags.txt"]
    assert "--recompute-modules core_attn\n" in flags and "--sequence-parallel\n" in flags
    assert "--global-batch-size 4\n" in flags
    request = resolve(model_spec("gpt-22b"), RunRequest(recompute="selective", **PAPER))
    assert (
        found.cost.peak_bytes == forecast(request.run).peak_bytes
    )  # as `jettison ledger --recompute selective` has it
    less = exported(paper("45GiB"), "megatron")
    settings = json.loads(less.files["transformer_config.json"])
    assert settings["recompute_method"] == "block"
    fewer = resolve(
        model_spec("gpt-22b"), RunRequest(recompute=f"block:{settings['recompute_num_layers'] - 1}", **PAPER)
    )
    assert forecast(fewer.run).peak_bytes > 45 * 2**30 >= less.cost.peak_bytes


def test_bridge_has_megatrons_words() -> None:
    lines = exported(paper(), "megatron-bridge").files["overrides.txt"].splitlines()
    for line in ("model.recompute_modules=[core_attn]", 'model.recompute_granularity="selective"'):
        assert line in lines
    assert "train.micro_batch_size=4" in lines and "model.sequence_parallel=true" in lines
    assert "dataset.seq_length=2048" in lines
    for taken_back in ("model.recompute_num_layers=null", "optimizer.use_distributed_optimizer=false"):
        assert taken_back in lines  # a recipe may have it
    assert len({line.partition("=")[0] for line in lines}) == len(lines)


@pytest.mark.parametrize("counts", [(7, 9, 9, 7), (0, 1, 2, 1)])
def test_a_layout_string_is_read_back(counts: tuple[int, ...]) -> None:
    text = layout_string(Layout(pp=4, stage_layers=counts))
    assert stage_layers(text, layers=sum(counts), chunks=4) == counts


def test_what_megatron_has_no_flag_for_is_refused() -> None:
    whole = document(
        "gpt-22b", "70GiB", tp=8, pp=2, micro_batches_without_recompute="1", micro_batches=4, kernels="megatron"
    )
    for target in ("megatron", "torchtitan"):
        with pytest.raises(CannotSay, match="without checkpointing"):
            exported(whole, target)
    gpipe = document("gpt-22b", "70GiB", tp=8, pp=2, schedule="gpipe", kernels="megatron")
    with pytest.raises(CannotSay, match="gpipe"):
        exported(gpipe, "megatron-bridge")


def test_torchtitan_is_told_by_product() -> None:
    found = exported(llama(), "torchtitan")
    compile(found.files["planned_ac.py"], "planned_ac.py", "exec")
    select = [policy for policy in found.policies if policy.saves]
    assert select
    for policy in select:
        for call in policy.saves:
            assert any(op.name == call.op and gemm_of(op) for op in policy.program.ops)
    assert {one.words for one in found.alternatives} == {"FullAC.Config()", "SelectiveAC.Config()"}
    assert found.cost.peak_bytes <= llama()["budget_bytes"]
    assert (found.cost.step_seconds or 0) >= (found.plan_cost.step_seconds or 0)


def test_a_mask_by_number_is_the_fewest_layers_that_fit() -> None:
    for target in ("torch", "transformers"):
        found = exported(llama(), target)
        chosen = [policy.words or str(policy.action) for policy in found.policies]
        count = chosen.count("full")
        assert chosen == ["full"] * count + ["none"] * (len(chosen) - count)
        pricer = DescribedPricer(remade(llama()["made_by"]).choice)
        one_less = [kept_whole(p.decision) if i >= count - 1 else p for i, p in enumerate(found.policies)]
        assert pricer.cost(one_less).peak_bytes > llama()["budget_bytes"] >= found.cost.peak_bytes


def test_whole_layers_are_priced_as_the_ledger_prices_them() -> None:
    pricer = DescribedPricer(remade(llama()["made_by"]).choice)
    decisions = decisions_of(pricer.choice)
    every = tuple(map(checkpointed, decisions))
    assert pricer.cost(every).peak_bytes == pricer.cost_of_mode(Recompute(mode=Mode.FULL), every).peak_bytes


def test_deepspeed_and_accelerate() -> None:
    settings = json.loads(exported(llama(), "deepspeed").files["deepspeed.json"])
    assert settings["activation_checkpointing"]["number_checkpoints"] == 32
    assert settings["activation_checkpointing"]["partition_activations"] is True
    with pytest.raises(CannotSay, match="accelerate wraps modules by name"):
        exported(llama(), "accelerate")


def test_a_described_plan_is_made_again_or_refused() -> None:
    made = llama()
    with pytest.raises(PlanMismatch, match="gives another plan"):
        exported(made | {"hash": "0" * 64}, "brief")
    with pytest.raises(UsageError, match="does not say how it was made"):
        exported({key: value for key, value in made.items() if key != "made_by"}, "brief")
    with pytest.raises(UsageError, match="'colour'"):
        exported(made | {"made_by": made["made_by"] | {"colour": "red"}}, "brief")
    with pytest.raises(UsageError, match="cannot be read"):
        exported(made | {"made_by": made["made_by"] | {"tp": "eight"}}, "brief")


def test_a_brief_says_what_is_offloaded() -> None:
    made = plan(
        "llama3-8b", RunRequest(micro_batch=2, dp=8, zero=3, offload=True), PlanFlags(budget="40GiB", gpu="h100-80gb")
    ).document()
    found = exported(made, "brief")
    assert "offloaded to CPU: 12.62 GiB" in found.files["brief.md"] and "--no-offload" in found.files["brief.md"]
    lost = exported(made, "torchtitan").lost
    assert lost[0].startswith("12.62 GiB of 31 layers are offloaded to CPU in the plan")
    recomputed = ["mlp silu", "attention_norm _fused_rms_norm", "mlp_norm _fused_rms_norm"]
    assert f"layers.31: per-tensor (recomputed {', '.join(recomputed)}) in the plan, selective here" in " ".join(lost)
    last = exported(made, "torchtitan").document()["layers"][-1]
    assert (last["plan"], last["plan_recomputed"], last["plan_offloaded"]) == ("per-tensor", recomputed, [])


def cli(*arguments: object) -> int:
    return run([str(argument) for argument in arguments])


def test_the_command_writes_files_and_replaces_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = tmp_path / "plan.json"
    made.write_text(json.dumps(paper()))
    out = tmp_path / "out"
    assert cli("export", made, "--to", "megatron", "--out", out) == 0
    assert sorted(path.name for path in out.iterdir()) == ["megatron-flags.txt", "transformer_config.json"]
    text = capsys.readouterr().out
    assert "What a step costs" in text and "51.74 GiB" in text
    assert cli("export", made, "--to", "megatron", "--out", out) == 2
    assert "is there already" in capsys.readouterr().err
    assert cli("plan", "gpt2", "--tp", "1", "--budget", "8GiB", "--out", tmp_path / "all.json") == 0
    capsys.readouterr()
    assert cli("export", tmp_path / "all.json", "--to", "megatron") == 0
    assert capsys.readouterr().out.endswith("--num-layers 12\n")
    assert cli("export", made, "--to", "megatron", "--out", made, "--force") == 2
    assert json.loads(made.read_text()) == json.loads(json.dumps(paper()))
    capsys.readouterr()
    assert cli("export", made, "--to", "deepspeed", "--out", tmp_path / "settings.toml") == 2
    assert "deepspeed writes deepspeed.json" in capsys.readouterr().err and not (tmp_path / "settings.toml").exists()
    assert cli("export", made, "--to", "brief") == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("# What to keep") and "What a step costs" not in printed.out
    assert "What a step costs" in printed.err
    assert cli("export", made, "--to", "megatron-bridge", "--format", "json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "jettison.export/1"
    assert found["cost"]["plan"]["peak_bytes"] == paper()["predicted"]["peak_bytes"]
    assert found["layers"][0]["exported"] == "core_attn"


def test_bad_inputs_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad, made = tmp_path / "bad.json", tmp_path / "plan.json"
    made.write_text(json.dumps(paper()))
    for text in (
        "",
        "[]",
        "{",
        '{"schema": "jettison.plan/1"}',
        "\x00\xff",
        '{"schema": "jettison.plan/1", "feasible": 3}',
    ):
        bad.write_text(text)
        assert cli("export", bad, "--to", "torch") == 2, text
        assert capsys.readouterr().err.count("\n") == 1
    for more in (
        ["--to", "nothing"],
        ["--to", "brief", "--gpu", "a100-80gb"],
        ["--to", "brief", "--out", tmp_path / "a" / "b"],
    ):
        assert cli("export", made, *more) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert cli("export", tmp_path / "none.json", "--to", "torch") == 2


def test_described_plans_are_exported_without_torch() -> None:
    code = (
        "import json, sys, jettison; made = json.load(sys.stdin); jettison.export_plan(made, to='megatron'); "
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], input=json.dumps(paper()), text=True, capture_output=True)
    assert done.returncode == 0, done.stderr


PAGE = Path(__file__).parents[2] / "docs" / "export.md"


def test_what_the_document_shows_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command of the page, in order; its Python as well. Its table has all targets."""
    monkeypatch.chdir(tmp_path)
    page = PAGE.read_text(encoding="utf-8")
    block = re.search(r"```console\n(.*?)```", page, flags=re.DOTALL)
    assert block is not None
    for line in block[1].splitlines():
        assert cli(*shlex.split(line.removeprefix("$ jettison "))) == 0, line
    assert (tmp_path / "settings" / "megatron-flags.txt").exists()
    code = re.search(r"## In Python\n\n```python\n(.*?)```", page, flags=re.DOTALL)
    assert code is not None
    exec(code[1], {})
    assert re.findall(r"^\| `([a-z_-]+)` \|", page, flags=re.MULTILINE)[1:] == list(named("targets"))


def test_a_plan_of_a_file_is_the_same_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its hash does not hold how the file was called on the command line."""
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = {"model_type": "llama", "vocab_size": 128, "max_position_embeddings": 64, **shape}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("config.json", str(tmp_path / "config.json"))):
        assert run(["plan", name, "--tp", "1", "--budget", "1GiB", "--out", f"{number}.json"]) == 0
        assert run(["export", f"{number}.json", "--to", "brief"]) == 0, capsys.readouterr().err
    first, second = (json.loads((tmp_path / f"{number}.json").read_text(encoding="utf-8")) for number in (0, 1))
    assert first["hash"] == second["hash"]


def test_what_the_loop_has_to_set_up_is_lost() -> None:
    made = document("llama3-8b", "30GiB", lora="r=16", precision="bf16-pure", seq=2048)
    assert any("adapters on frozen weights (LoRA r=16" in line for line in exported(made, "torchtitan").lost)


TWO_STACKS = {
    "model_type": "bart", "architectures": ["BartForConditionalGeneration"], "vocab_size": 96, "d_model": 32,
    "encoder_layers": 3, "decoder_layers": 3, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
}  # fmt: skip
IMAGES = {
    "model_type": "vit", "architectures": ["ViTForImageClassification"], "hidden_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "intermediate_size": 128, "image_size": 32, "patch_size": 8, "num_labels": 10,
}  # fmt: skip


TOWERS = {
    "model_type": "clip",
    "architectures": ["CLIPModel"],
    "projection_dim": 32,
    "text_config": {
        "model_type": "clip_text_model", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 99, "max_position_embeddings": 16, "projection_dim": 32,
    },
    "vision_config": {
        "model_type": "clip_vision_model", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
        "num_attention_heads": 4, "image_size": 32, "patch_size": 8, "projection_dim": 32,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "asked", "refused"),
    [
        (TWO_STACKS, RunRequest(seq=64, micro_batch=8, dp=2), {"megatron", "megatron-bridge", "torchtitan", "torch"}),
        (TOWERS, RunRequest(seq=16, micro_batch=8, dp=2), {"megatron", "torchtitan", "torch", "transformers"}),
        (IMAGES, RunRequest(micro_batch=8, dp=2), {"megatron", "megatron-bridge", "torchtitan"}),
    ],
    ids=["two stacks", "two towers", "images"],
)
def test_flags_for_one_list_of_layers_of_words_are_written_for_no_other_model(
    config: dict[str, Any], asked: RunRequest, refused: set[str], tmp_path: Path
) -> None:
    """They would be taken, and be of another model."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config), encoding="utf-8")
    peak = forecast(jettison.run_of(str(file), asked)).peak_bytes
    made = plan(str(file), asked, PlanFlags(budget=f"{peak * 93 // 100}B")).document()
    for target in refused:
        with pytest.raises(CannotSay, match=r"is an encoder with a decoder|is two towers|reads no tokens"):
            exported(made, target)
    for target in {"torch", "transformers", "deepspeed"} - refused:
        assert exported(made, target).files
