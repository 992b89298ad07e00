"""The command line: exit codes, one JSON document on stdout, hints on stderr, and errors that say what to do."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from jettison.cli.main import EXIT_PIPE, VERBS, run
from jettison.core import errors
from jettison.core.process import EXIT_INTERRUPTED
from support.patience import PATIENCE

TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LIVE = """
import torch
from torch import nn

def alone():
    return nn.Linear(4, 4)

def trio():
    blocks = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3)]
    return nn.Sequential(*blocks), (torch.randn(16, 32),), lambda out: out.square().mean()

class Mean(nn.Module):
    def forward(self, x):
        return x.square().mean()

def own_loss():
    blocks = [nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)) for _ in range(3)]
    return nn.Sequential(*blocks, Mean()), (torch.randn(16, 32),)

def broken():
    raise KeyError("oh")
"""


@pytest.fixture
def config(tmp_path):
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


@pytest.fixture
def live(tmp_path, monkeypatch):
    (tmp_path / "live_models.py").write_text(LIVE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "live_models", raising=False)
    return "live_models"


def call(capsys, *arguments):
    """Exit code, stdout, stderr."""
    code = run([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err or code == 1, captured.err
    return code, captured.out, captured.err


def document(capsys, *arguments):
    code, out, err = call(capsys, *arguments, "--format", "json")
    assert code == 0, err
    return json.loads(out)


def test_trace_of_a_config(capsys, config):
    found = document(capsys, "ledger", config, "--trace")
    assert found["schema"] == "jettison.ledger/1"
    assert found["parameters"] == 195_008
    assert (found["layers"][1]["layer"], found["layers"][1]["bytes"] > 0) == ("model.layers.0", True)
    assert sum(layer["bytes"] for layer in found["layers"]) == found["stages"][0]["activation_bytes"]
    stage = found["stages"][0]
    assert stage["parameter_bytes"] == stage["gradient_bytes"] == 195_008 * 4
    assert stage["optimizer_bytes"] > 2 * stage["parameter_bytes"]
    assert found["peak_bytes"] == max(phase["peak_bytes"] for phase in found["phases"])
    assert len(found["entries"]) > 30


def test_flags_of_a_trace(capsys, config):
    bare = ("--trace", "--optimizer", "none")
    plain = document(capsys, "ledger", config, *bare)
    full = document(capsys, "ledger", config / "config.json", *bare, "--recompute", "full")
    half = document(capsys, "ledger", config, *bare, "--precision", "bf16", "--seq", 32)
    assert full["layers"][1]["bytes"] == 64 * 64 * 4
    assert full["peak_bytes"] < plain["peak_bytes"]
    assert half["stages"][0]["parameter_bytes"] * 2 == plain["stages"][0]["parameter_bytes"]
    eager = document(capsys, "ledger", config, *bare, "--attention", "eager")
    assert any(entry["role"] == "softmax output" for entry in eager["entries"])
    assert not any(entry["role"] == "softmax output" for entry in plain["entries"])
    code, out, _ = call(capsys, "ledger", config, "--trace", "--recompute", "every:2")
    assert code == 0
    assert "model.layers.0" in out


def test_trace_and_closed_form_answer_the_same_question(capsys, config):
    flags = ("--optimizer", "adamw", "--precision", "fp32", "--attention", "eager")
    traced = document(capsys, "ledger", config, "--trace", *flags)
    worked_out = document(capsys, "ledger", config, *flags, "--kernels", "huggingface")
    assert traced["parameters"] == worked_out["parameters"]
    ours, theirs = ({row["layer"]: row["bytes"] for row in found["layers"]} for found in (worked_out, traced))
    assert ours["layers.1"] == theirs["model.layers.1"]
    assert sum(ours.values()) == sum(theirs.values())
    assert traced["peak_bytes"] == pytest.approx(worked_out["peak_bytes"], rel=0.05)


def test_a_traced_peak_is_held_against_a_budget(capsys, live):
    peak = document(capsys, "ledger", f"{live}:trio")["peak_bytes"]
    assert document(capsys, "ledger", f"{live}:trio", "--budget", f"{peak}B")["fits"] is True
    code, out, err = call(capsys, "ledger", f"{live}:trio", "--budget", f"{peak - 1}B")
    assert code == 3
    assert "DOES NOT FIT" in out
    assert f"({peak}B), is above" in err
    code, out, _ = call(capsys, "ledger", f"{live}:trio", "--format", "csv")
    assert (code, out.splitlines()[0].endswith(",local_bytes")) == (0, True)


SMALL_CONFIGS = [
    {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 32, "vocab_size": 128},
    {"model_type": "bert", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128}
    | {"intermediate_size": 128, "max_position_embeddings": 32},
    {"model_type": "t5", "d_model": 64, "d_ff": 96, "d_kv": 16, "num_heads": 4, "num_layers": 2, "vocab_size": 128},
    {"model_type": "vit", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32}
    | {"intermediate_size": 128, "patch_size": 8},
]


@pytest.mark.parametrize("values", SMALL_CONFIGS, ids=[str(values["model_type"]) for values in SMALL_CONFIGS])
def test_other_families_need_no_architectures(capsys, tmp_path, values):
    (tmp_path / "config.json").write_text(json.dumps(values | {"bos_token_id": 1, "eos_token_id": 1}))
    found = document(capsys, "ledger", tmp_path, "--trace", "--optimizer", "none", "--micro-batch", 2)
    assert len([layer for layer in found["layers"] if layer["bytes"]]) >= 3
    assert found["warnings"] == []


def test_plan_then_verify_and_the_minimum_works(capsys, config, tmp_path):
    with_state = ("--optimizer", "adamw")
    code, out, err = call(capsys, "plan", config, "--budget", "1MB", *with_state, "--format", "json")
    refused = json.loads(out)
    assert (code, refused["feasible"], refused["schema"]) == (3, False, "jettison.plan/1")
    smallest = refused["minimum_budget_bytes"]
    assert f'"{smallest}B"' in err
    out_file = tmp_path / "p.json"
    made = document(capsys, "plan", config, "--budget", f"{smallest}B", *with_state, "--out", out_file)
    assert made["feasible"] is True
    assert made["predicted"]["peak_bytes"] <= made["budget_bytes"] == smallest
    assert {"layer", "policy", "kept_bytes", "offloaded_bytes", "recompute_flops"} <= set(made["layers"][0])
    assert json.loads(out_file.read_text()) == made
    proof = document(capsys, "verify", out_file, "--rounds", 1)
    assert proof["gradients_identical"] is True
    assert proof["measured_peak_bytes"] <= proof["budget_bytes"] == smallest
    assert proof["plan_hash"] == made["hash"]
    code, _, err = call(capsys, "verify", out_file, "--seq", 32)
    assert code == 2
    assert "not what the plan was made for" in err


def test_verify_of_a_live_model(capsys, live):
    code, out, _ = call(capsys, "verify", f"{live}:trio", "--recompute", "full", "--optimizer", "sgd", "--rounds", 1)
    assert code == 0
    assert "proven" in out
    assert "loss after the forward" in out


def test_verify_warns_of_no_gradients_of_its_own(capsys, live, tmp_path):
    """Gradients of steps that it has timed are none of a loop's. In its own process: here warnings are errors."""
    plan = tmp_path / "plan.json"
    refused = json.loads(call(capsys, "plan", f"{live}:own_loss", "--budget", "1B", "--format", "json")[1])
    budget = f"{refused['minimum_budget_bytes']}B"
    assert call(capsys, "plan", f"{live}:own_loss", "--budget", budget, "--out", plan)[0] == 0
    command = [sys.executable, "-m", "jettison", "verify", str(plan), "--rounds", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert "are there already" not in done.stderr


def test_the_page_lists_every_exit_code() -> None:
    """Those of errors are said once, by their classes; the others are none of an error's."""
    codes = {each.exit_code for each in vars(errors).values() if isinstance(each, type) and hasattr(each, "exit_code")}
    page = Path(__file__).parents[2].joinpath("docs", "commands.md").read_text("utf-8")
    _, _, table = page.partition("| exit code | meaning |")
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", table, re.M)} == {0, EXIT_PIPE, EXIT_INTERRUPTED} | codes


def test_a_failed_proof_exits_4(capsys, live, monkeypatch):
    from jettison.verify import side_by_side as proof

    monkeypatch.setattr(proof, "parameter_digest", lambda model: id(model))
    code, out, err = call(capsys, "verify", f"{live}:trio", "--recompute", "none", "--rounds", 1, "--format", "json")
    assert code == 4
    assert json.loads(out)["passed"] is False
    assert "parameters after the steps differ" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ledger", "gpt-none", "--trace"], "expected module:factory"),
        (["ledger", "no/such/config.json", "--trace"], "no such file"),
        (["ledger", "no_such_module:make"], "there is no module 'no_such_module'"),
        (["ledger", "live_models:other"], "has no function 'other'; it has alone, trio, own_loss, broken"),
        (["ledger", "live_models:alone"], "without a batch"),
        (["ledger", "live_models:trio", "--seq", "8"], "--seq does not apply"),
        (["ledger", "live_models:trio", "--precision", "bf16"], "--precision does not apply"),
        (["plan", "live_models:trio", "--budget", "20"], "got '20' without a unit; write \"20GiB\""),
        (["plan", "live_models:trio"], "--budget"),
        (["ledger", "live_models:trio", "--recompute", "some"], "unknown policy 'some'"),
        (["ledger", "live_models:trio", "--recompute", "every:0"], "every:K"),
        (["ledger", "live_models:trio", "--trace", "--zero", "1"], "--zero does not apply to the live model"),
        (["verify", "live_models:trio"], "exactly one of a plan file, --budget, --recompute and --given"),
        (["ledger", "live_models.py:trio"], "give the module, without .py: live_models:trio"),
        (["doctor", __file__], f"without a flag; give --oom {__file__}"),
        (["estimate", "llama3-8b"], "estimate needs --gpu: GPU of the run, such as h100-80gb"),
        (["ledger", "llama3-8b", "--quantize", "4bit"], "try --base nf4"),
        (["legder", "x"], "legder"),
        (["ledger", ".", "--trace"], "has no config.json"),
    ],
)
def test_what_is_asked_wrongly_exits_2(capsys, live, arguments, message):
    code, out, err = call(capsys, *arguments)
    assert (code, out) == (2, "")
    assert message in re.sub(r"\s+", " ", err)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "has no model_type"),
        ('{"model_type": "no-such-model"}', "neither has a closed form"),
        (json.dumps(TINY | {"hidden_size": "wide"}), "transformers cannot read"),
        (
            json.dumps(TINY | {"num_hidden_layers": -1}),
            "got num_hidden_layers -1; expected a whole number of 1 or more",
        ),
    ],
)
def test_a_malformed_config_exits_2(capsys, tmp_path, text, message):
    file = tmp_path / "config.json"
    file.write_text(text)
    code, out, err = call(capsys, "ledger", file, "--trace")
    assert (code, out) == (2, "")
    assert message in err


def test_a_file_is_never_replaced_silently(capsys, live, tmp_path):
    out = tmp_path / "ledger.json"
    out.write_text("mine")
    code, _, err = call(capsys, "ledger", f"{live}:trio", "--out", out)
    assert (code, out.read_text()) == (2, "mine")
    assert "--force" in err
    assert call(capsys, "ledger", f"{live}:trio", "--out", tmp_path / "no" / "x.json")[0] == 2
    assert call(capsys, "ledger", f"{live}:trio", "--out", out, "--force")[0] == 0
    assert json.loads(out.read_text())["schema"] == "jettison.ledger/1"


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_a_folder_is_no_file_to_write(capsys, tmp_path, force):
    folder = tmp_path / "there"
    folder.mkdir()
    assert run(["ledger", "gpt2", "--out", str(folder), *force]) == 2
    assert f"{folder} is a folder; give the name of a file" in capsys.readouterr().err


def test_a_bug_in_a_factory_exits_1_and_shows_where(capsys, live):
    code, out, err = call(capsys, "ledger", f"{live}:broken")
    assert (code, out) == (1, "")
    assert "live_models.py" in err


def test_doctor(capsys):
    found = document(capsys, "doctor")
    assert found["torch"] == torch.__version__


@pytest.mark.slow  # tests/capture/test_scale.py traces one as large
def test_a_large_config_is_never_allocated(capsys, tmp_path):
    """A model of 70 billion parameters, in a process whose own memory hardly grows."""
    import resource

    large = TINY | {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    }
    (tmp_path / "config.json").write_text(json.dumps(large))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    flags = ("--precision", "bf16", "--seq", 2048, "--optimizer", "none")
    found = document(capsys, "ledger", tmp_path, "--trace", *flags)
    grown_bytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert found["parameters"] == 70_553_706_496
    assert grown_bytes < 1 << 30


def command(*arguments, **more):
    return [sys.executable, "-m", "jettison", *map(str, arguments)]


def test_as_a_process(config):
    done = subprocess.run(
        command("ledger", config, "--trace", "--format", "json"), capture_output=True, text=True, timeout=PATIENCE
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["schema"] == "jettison.ledger/1"
    done = subprocess.run(command("plan", config, "--budget", "20"), capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("jettison: got '20' without a unit")


@pytest.fixture
def interruptible():
    """A shell that starts something in the background lets it ignore SIGINT, and all that this starts in turn."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_exits_130_with_a_short_line(tmp_path):
    (tmp_path / "slow.py").write_text(
        f"import time\n\ndef make():\n    print('ready', flush=True)\n    time.sleep({PATIENCE})\n"
    )
    process = subprocess.Popen(
        command("ledger", "slow:make"),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert err == "jettison: interrupted\n"


def test_a_trace_of_another_head_does_not_say_that_the_closed_form_is_the_same(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "architectures": ["LlamaForSequenceClassification"]}))
    code, out, _ = call(capsys, "ledger", str(tmp_path / "config.json"), "--trace")
    assert code == 0
    assert "of the same" not in out
    assert "of another model than LlamaForSequenceClassification" in " ".join(out.split())


@pytest.mark.parametrize("optimizer", ["adamw-foreach", "sgd-momentum"])
def test_a_traced_step_has_the_states_that_are_described(capsys, tmp_path, optimizer):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    path, stages = str(tmp_path / "config.json"), []
    for trace in (("--trace",), ("--precision", "fp32", "--kernels", "huggingface")):
        code, out, _ = call(capsys, "ledger", path, *trace, "--optimizer", optimizer, "--format", "json")
        assert code == 0
        stages.append(json.loads(out)["stages"][0]["optimizer_bytes"])
    counters = stages[0] - stages[1]  # torch's count of steps, 4 bytes a tensor
    assert 0 <= counters < 4 * 64


def test_an_optimizer_that_no_trace_steps_with_is_refused_in_words(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    code, _, err = call(capsys, "ledger", str(tmp_path / "config.json"), "--trace", "--optimizer", "adam8bit")
    assert code == 2
    assert "whose step is described and not run: a preset, or a config.json that is not traced, takes it" in err


def test_a_model_that_casts_its_weights_in_its_forward_is_refused_in_words(capsys, tmp_path):
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "num_experts": 4, "vocab_size": 99}
    sparse = {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_decoder_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "switch_transformers", **sizes, **sparse}))
    code, _, err = call(capsys, "ledger", str(tmp_path / "config.json"), "--seq", "16")
    assert code != 0
    assert "its forward moves or casts its own parameters (Module.to)" in err
    assert "_apply()" not in err


@pytest.mark.parametrize("flags", [(), ("--precision", "bf16", "--seq", 64, "--micro-batch", 2)])
def test_a_trace_says_which_flags_of_the_closed_form_are_the_same(capsys, tmp_path, flags):
    """And they are: every saved tensor of every layer."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    config, traced = str(tmp_path / "config.json"), str(tmp_path / "traced.json")
    code, out, _ = call(capsys, "ledger", config, "--trace", *flags, "--out", traced)
    assert code == 0
    line = next(line for line in out.splitlines() if line.startswith("closed form"))
    same = line[line.index("--") :].split()
    assert {"--precision", "--kernels", "--attention", "--seq", "--micro-batch"} <= set(same)
    code, out, _ = call(capsys, "ledger", config, *same, "--compare", traced)
    assert (code, "has the same saved tensors in every layer" in out) == (0, True)


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_each_verb_is_said_in_a_line(capsys, arguments):
    code, out, _ = call(capsys, *arguments)
    assert code == 0
    assert [verb for verb in VERBS if not re.search(rf"^│ {verb} +[A-Z]", out, re.MULTILINE)] == []
