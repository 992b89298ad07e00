"""`jettison plan` of presets and configurations: stages, devices, reasons by layer, hosts, and errors in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jettison.cli.main import run
from jettison.spec.hardware import hardware


def test_plan_of_a_preset_is_made_for_every_stage(capsys: pytest.CaptureFixture[str]) -> None:
    """`jettison plan` without a model to trace: by stage, and the smallest budget that is feasible."""
    asked = ["plan", "llama3-70b", "--tp", "8", "--pp", "4", "--kernels", "megatron", "--format", "json"]
    assert run([*asked, "--budget", "45GiB"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "jettison.plan/1"
    assert document["feasible"] is True
    assert document["predicted"]["peak_bytes"] <= document["budget_bytes"] == 45 * 2**30
    assert [layer["layer"] for layer in document["layers"]] == [f"layers.{index}" for index in range(80)]
    assert max(stage["peak_bytes"] for stage in document["stages"]) == document["predicted"]["peak_bytes"]
    first, last = ([x["kept_bytes"] for x in document["layers"] if x["stage"] == stage] for stage in (0, 3))
    assert sum(first) <= sum(last), "the first stage holds four micro-batches, the last one"

    smallest = document["minimum_budget_bytes"]
    assert run([*asked, "--budget", f"{smallest}B"]) == 0
    capsys.readouterr()
    assert run([*asked, "--budget", "20GiB"]) == 3
    refused = json.loads(capsys.readouterr().out)
    assert refused["feasible"] is False
    assert refused["minimum_budget_bytes"] >= smallest > refused["budget_bytes"]


def test_plan_fits_what_a_gpu_leaves_and_minimises_its_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "llama3-8b", "--seq", "8192", "--tp", "2", "--kernels", "megatron", "--format", "json"]

    def plan(*more: str) -> dict[str, Any]:
        assert run([*asked, *more]) == 0
        return json.loads(capsys.readouterr().out)

    on_a100, tighter = plan("--gpu", "a100-80gb"), plan("--gpu", "a100-80gb", "--budget", "70GiB")
    assert on_a100["hardware"] == "a100-80gb"
    assert on_a100["predicted"]["peak_bytes"] <= on_a100["budget_bytes"] < 80 * 2**30
    assert tighter["budget_bytes"] == 70 * 2**30
    assert plan("--budget", "70GiB")["hardware"] == "h100-80gb", "where nobody names one"
    assert run(asked) == 2
    assert "give --budget or --gpu" in capsys.readouterr().err


def test_a_plan_that_cannot_surely_fit_a_gpu_is_made_and_marked(capsys: pytest.CaptureFixture[str]) -> None:
    """The smallest budget is above the bytes whose whole range fits."""
    asked = ["plan", "llama3-70b", "--lora", "r=16", "--dp", "2", "--zero", "3", "--seq", "2048", "--gpu", "h100-80gb"]
    assert run([*asked, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "too close to call"
    assert "a smaller --budget is surer, from 72.44 GiB" in found["warnings"][-1]
    assert run([*asked, "--budget", "75GiB"]) == 0
    assert "80 % of runs fit" not in capsys.readouterr().out
    assert run([*EIGHT_B, "--seq", "8192", "--gpu", "h100-80gb", "--format", "json"]) == 0  # is expected to fit
    found = json.loads(capsys.readouterr().out)
    usable, device = hardware("h100-80gb").usable_bytes, found["figures"]["device_bytes"]
    assert 0.99 * usable < device["expected"] <= usable < device["high"]


def test_the_smallest_plan_is_made_where_its_low_end_may_fit(capsys: pytest.CaptureFixture[str]) -> None:
    """Its modelled bytes are above usable memory, as a ledger may be that is too close to call."""
    asked = ["plan", "gemma3-1b", "--zero", "0", "--dp", "4", "--gpu", "a100-40gb", "--format", "json"]
    assert run([*asked, "--seq", "8192"]) == 0
    found = json.loads(capsys.readouterr().out)
    least = found["minimum_budget_bytes"]
    assert found["verdict"] == "too close to call"
    assert hardware("a100-40gb").usable_bytes > least == found["budget_bytes"] == found["predicted"]["peak_bytes"]
    assert "no plan of this run takes less" in found["warnings"][-1]
    ledger = ["ledger", *asked[1:], "--seq", "8192", "--recompute", "auto"]
    assert run(ledger) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "too close to call"
    assert run([*asked, "--seq", "9000"]) == 3
    assert "the smallest feasible budget is" in capsys.readouterr().err


def test_plan_decides_what_is_computed_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "llama3-8b", "--budget", "100GiB", "--recompute", "full"]) == 2
    assert "plan decides" in capsys.readouterr().err


def test_a_described_plan_and_a_preset_cannot_be_verified(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    made = tmp_path / "plan.json"
    assert run(["plan", "gpt2", "--kernels", "pytorch", "--budget", "20GiB", "--out", str(made)]) == 0
    assert run(["verify", str(made)]) == 2
    assert "not which tensors of a module" in capsys.readouterr().err
    assert run(["verify", "gpt2", "--budget", "1GiB"]) == 2
    assert "gpt2 is a preset" in capsys.readouterr().err


EIGHT_B = ("plan", "llama3-8b", "--dp", "8", "--zero", "3", "--micro-batch", "4")


def test_plan_for_a_gpu_says_for_every_layer_what_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a budget; with the GPU's link, unless it is left out; one screen."""
    assert run([*EIGHT_B, "--gpu", "h100-80gb", "--budget", "75GiB", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "too close to call"
    assert run([*EIGHT_B, "--gpu", "h100-80gb", "--format", "json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["offload"] is True and made["verdict"] == "fits"
    assert {layer["policy"] for layer in made["layers"]} <= {"none", "selective", "full", "offload", "per-tensor"}
    assert sum(layer["offloaded_bytes"] for layer in made["layers"]) == made["predicted"]["host_bytes"] > 0
    assert made["predicted"]["host_bytes"] <= made["host_budget_bytes"] == 256 * 2**30
    assert [reason["layer"] for reason in made["reasons"]] == [layer["layer"] for layer in made["layers"]]
    (step,) = made["what_if"]
    assert step["budget_bytes"] == made["budget_bytes"] + 2**30
    assert run([*EIGHT_B, "--gpu", "h100-80gb", "--no-offload", "--format", "json"]) == 0
    without = json.loads(capsys.readouterr().out)
    assert without["offload"] is False
    assert not any(layer["offloaded_bytes"] for layer in without["layers"])
    assert without["predicted"]["step_seconds"] > made["predicted"]["step_seconds"]
    assert run([*EIGHT_B, "--budget", "60GiB", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["offload"] is False, "no link is known where no GPU is named"
    assert run([*EIGHT_B, "--gpu", "h100-80gb", "--what-if"]) == 0
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) <= 60
    for words in ("What each layer does", "offloads ", "recomputes ", "What each next GiB would change"):
        assert words in shown


def test_plan_of_a_config_for_a_gpu_needs_no_torch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    config = {
        "model_type": "llama",
        "num_hidden_layers": 4,
        "vocab_size": 32000,
        "max_position_embeddings": 8192,
        **shape,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert run(["plan", str(tmp_path), "--gpu", "h100-80gb", "--format", "json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["made_from"] == "description"
    assert [layer["policy"] for layer in made["layers"]] == ["none"] * 4


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (("--gpu", "h100-80gb", "--host-budget", "512GiB"), 2, "h100-80gb has 256.00 GiB of CPU memory a device"),
        (("--gpu", "h100-80gb", "--no-offload", "--host-budget", "10GiB"), 2, "nothing is offloaded"),
        (("--budget", "60GiB", "--host-budget", "10GiB"), 2, "give --offload"),
        (("--gpu", "h100-80gb", "--host-budget", "10"), 2, "without a unit"),
        (("--gpu", "h100-80gb", "--budget", "36GiB", "--host-budget", "1GiB"), 3, "to 1.00 GiB of CPU memory"),
        (("--gpu", "h100-80gb", "--budget", "2GiB"), 3, "or offloads it to 256.00 GiB of CPU memory"),
    ],
)
def test_plan_with_a_host_budget_that_cannot_be(
    flags: tuple[str, ...], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*EIGHT_B, *flags]) == code
    said = capsys.readouterr().err
    assert message in said
    assert len(said.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("hardware", "flags", "message"),
    [
        ("memory = 3350\nhost = 0\n", (), "got host = 0; expected a number above 0"),
        ("memory = 3350\nlink = 450\nnetwork = 50\n", (), "does not state its link to the host"),
        ("memory = 3350\nhost = 50\n", ("--host-budget", "4096TiB"), "4096TiB"),
        ("memory = 3350\nhost = 50\n", ("--host-budget", "0B"), "not at least one byte"),
    ],
)
def test_every_verb_says_in_a_line_what_is_wrong_with_a_host(
    hardware: str,
    flags: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A link of nothing, none at all, more than a machine has, and nothing."""
    file = tmp_path / "mine.toml"
    rates = "[teraflops]\nbf16 = 989\nfp32 = 67\n[gigabytes_per_second]\n"
    file.write_text(f'memory = "80GiB"\nhost_memory = "1TiB"\n{rates}{hardware}')
    lines = [
        "import torch",
        "class Model(torch.nn.Linear):",
        "    def forward(self, x): return super().forward(x).sum()",
        "def make(): return Model(4, 4), torch.ones(2, 4)",
    ]
    (tmp_path / "host_model.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(tmp_path))
    asked = [[verb, "host_model:make", "--budget", "1MiB", *flags] for verb in ("plan", "verify")]
    if not flags:  # a search takes the host's bytes from the hardware's file
        asked.append(["search", "gpt2", "--gpus", "2", "--global-batch", "2"])
    for command in asked:
        assert run([*command, "--offload", "--gpu", str(file)]) == 2
        said = capsys.readouterr().err
        assert message in said
        assert len(said.strip().splitlines()) == 1


def test_a_link_of_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "slow.toml"
    file.write_text(
        'memory = "80GiB"\n[teraflops]\nbf16 = 989\nfp32 = 67\n[gigabytes_per_second]\nmemory = 3350\nhost = 0\n'
    )
    assert run([*EIGHT_B, "--gpu", str(file)]) == 2
    assert "got host = 0; expected a number above 0" in capsys.readouterr().err
    file.write_text(file.read_text().replace("host = 0\n", "host = 1e-10\n"))
    assert run([*EIGHT_B, "--gpu", str(file)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    file.write_text(file.read_text().replace("host = 1e-10\n", "host = 1e-6\n"))
    for flags in (EIGHT_B, ["estimate", "gpt2", "--recompute", "full", "--offload"]):
        assert run([*flags, "--gpu", str(file)]) == 2
        assert capsys.readouterr().err.startswith("jettison: hardware slow moves 800 bytes a second to the host")
    file.write_text(file.read_text().replace("host = 1e-6\n", "link = 450\nnetwork = 50\n"))
    assert run([*EIGHT_B, "--gpu", str(file), "--offload"]) == 2
    assert "does not state its link to the host" in capsys.readouterr().err
    assert run([*EIGHT_B, "--gpu", str(file), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["offload"] is False


def answered(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    assert run([*map(str, arguments), "--format", "json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_choice_for_a_gpu_is_the_same_in_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    """Within the bytes that surely fit it, as a search's planner too."""
    asked = ("gpt-22b", "--tp", 8, "--micro-batch", 4, "--kernels", "megatron")
    gpu = ("--gpu", "a100-80gb")
    made = answered(capsys, "plan", *asked, *gpu, "--no-offload")
    assert (made["fit_rule"], made["verdict"]) == ("surely", "fits")
    told = answered(capsys, "ledger", *asked, *gpu, "--recompute", "auto")
    assert (told["auto"]["fit_rule"], told["peak_bytes"]) == ("surely", made["predicted"]["peak_bytes"])
    took = answered(capsys, "estimate", *asked, *gpu, "--recompute", "auto")
    assert (took["fit_rule"], took["peak_bytes"]) == ("surely", told["peak_bytes"])
    space = ("--tp", 8, "--pp", 1, "--cp", 1, "--micro-batch", 4, "--recompute", "auto", "--kernels", "megatron")
    found = answered(
        capsys, "search", "gpt-22b", "--gpus", 8, "--global-batch", 4, *gpu, *space, "--sp", "--jobs", 1, "--margin", 0
    )
    plan = found["candidates"][0]["plan"]
    tp_sp = answered(capsys, "plan", *asked, "--sp", *gpu, "--no-offload")
    assert (plan["fit_rule"], plan["budget_bytes"]) == ("surely", tp_sp["budget_bytes"])
    assert found["candidates"][0]["peak_bytes"] == tp_sp["predicted"]["peak_bytes"]
    held = answered(capsys, "ledger", *asked, "--recompute", "auto", "--budget", "60GiB")
    assert held["auto"]["fit_rule"] == "budget"
