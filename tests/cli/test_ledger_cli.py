"""`jettison ledger` of presets and configurations: the contract's keys, published figures, and errors in one line."""

from __future__ import annotations

import csv
import io
import json
import pickle
import subprocess
import sys

import pytest

from jettison.cli.main import run
from jettison.core.errors import DoesNotFit
from jettison.families.presets import PRESETS
from jettison.ledger.ledger import ENTRY_FIELDS, Ledger
from jettison.report.tables import span
from support.patience import PATIENCE

GPT_22B = ("gpt-22b", "--tp", 8, "--micro-batch", 4)
LLAMA_405B = ("llama3-405b", "--tp", 8, "--pp", 16, "--dp", 8)


def call(capsys, *arguments):
    """Exit code, stdout, stderr."""
    code = run(["ledger", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def document(capsys, *arguments, code=0):
    got, out, err = call(capsys, *arguments, "--format", "json")
    assert got == code, err
    return json.loads(out)


def layer_bytes(found, name="layers.0"):
    return next(row["bytes"] for row in found["layers"] if row["layer"] == name)


# what the paper and the publishers say --------------------------------------------------------------------------------

S, B, H, A, T = 2048, 4, 6144, 64, 8
CORE = 5 * A * S * S * B
STATISTICS = 2 * 2 * 4 * S * B
"""Mean and deviation in fp32 of each token in two norms, beside what the paper counts."""


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        # arXiv 2205.05198 Table 2, at t = 8
        ((), (34 * S * B * H + CORE + STATISTICS) // T),
        (("--attention", "eager"), (34 * S * B * H + CORE + STATISTICS) // T),
        (("--no-sp",), 10 * S * B * H + (24 * S * B * H + CORE) // T + STATISTICS),
        (("--recompute", "selective"), (34 * S * B * H + STATISTICS) // T),
        (("--no-sp", "--recompute", "selective"), 10 * S * B * H + 24 * S * B * H // T + STATISTICS),
        (("--no-sp", "--recompute", "full"), 2 * S * B * H),
    ],
)
def test_a_layer_of_the_paper_is_what_table_2_says(capsys, flags, expected):
    assert layer_bytes(document(capsys, *GPT_22B, *flags)) == expected


@pytest.mark.parametrize(
    ("model", "parameters"), [("llama3-8b", 8_030_261_248), ("llama3-405b", 405_853_388_800), ("gpt2", 124_439_808)]
)
def test_parameters_are_the_published_ones(capsys, model, parameters):
    found = document(capsys, model)
    stage = found["stages"][0]
    assert found["parameters"] == parameters
    assert stage["parameter_bytes"] == stage["gradient_bytes"] == 2 * parameters
    assert stage["optimizer_bytes"] == 12 * parameters  # an fp32 copy and two fp32 moments


# the contract ---------------------------------------------------------------------------------------------------------


def test_the_document_has_the_keys_of_the_contract(capsys):
    found = document(capsys, *LLAMA_405B)
    assert found["schema"] == "jettison.ledger/1"
    assert {"parameters", "layers", "stages", "peak_bytes", "phases", "entries"} <= set(found)
    assert {"first_step_peak_bytes", "worst_stage", "model", "recompute", "request", "warnings"} <= set(found)
    assert set(found["layers"][0]) == {"layer", "bytes", "tensors", "stage", "policy"}
    stage_keys = {"stage", "layers", "in_flight", "activation_bytes", "parameter_bytes", "gradient_bytes"}
    stage_keys |= {"optimizer_bytes", "peak_bytes", "first_step_peak_bytes", "peak_phase"}
    assert all(stage_keys <= set(stage) for stage in found["stages"])
    assert all({"phase", "peak_bytes", "first_step_peak_bytes", "stage"} <= set(phase) for phase in found["phases"])
    assert all({*ENTRY_FIELDS, "local_bytes", "local_storage_bytes"} == set(entry) for entry in found["entries"])


def test_stages_and_peaks_agree(capsys):
    found = document(capsys, *LLAMA_405B, "--micro-batches", 12)
    stages = found["stages"]
    assert [stage["in_flight"] for stage in stages] == [min(16 - rank, 12) for rank in range(16)]  # 1F1B
    # arXiv 2407.21783 §3.3.2: 126 layers on 16 stages, one fewer on the first and on the last
    assert [len(stage["layers"]) for stage in stages] == [8] * 16
    assert stages[0]["layers"][0] == "embedding"
    assert stages[15]["layers"][-1] == "head"
    assert found["peak_bytes"] == max(stage["peak_bytes"] for stage in stages)
    assert found["first_step_peak_bytes"] == max(stage["first_step_peak_bytes"] for stage in stages)
    worst = stages[found["worst_stage"]]
    assert worst["peak_bytes"] == max(phase["peak_bytes"] for phase in found["phases"])
    assert worst["first_step_peak_bytes"] == max(phase["first_step_peak_bytes"] for phase in found["phases"])
    assert {phase["stage"] for phase in found["phases"]} == {found["worst_stage"]}
    assert sum(stage["parameter_bytes"] for stage in stages) * 8 == pytest.approx(2 * found["parameters"], rel=1e-3)
    assert [row["stage"] for row in found["layers"]] == sorted(row["stage"] for row in found["layers"])


def test_entries_add_up_to_the_layers_and_can_be_read_back(capsys):
    code, out, _ = call(capsys, "gpt-22b", "--tp", 8, "--micro-batch", 4, "--format", "json")
    found = json.loads(out)
    assert code == 0
    held = {}
    for entry in found["entries"]:
        held.setdefault(entry["layer"], {})[entry["storage"]] = entry["local_storage_bytes"]
    assert {layer: sum(sizes.values()) for layer, sizes in held.items()} == {
        row["layer"]: row["bytes"] for row in found["layers"]
    }
    assert sum(row["tensors"] for row in found["layers"]) == len(found["entries"])
    sharded = next(entry for entry in found["entries"] if entry["role"] == "softmax output")
    assert sharded["placement"] == {"tp": 1}
    assert sharded["local_bytes"] * 8 == sharded["storage_bytes"] == 2 * A * S * S * B
    assert len(Ledger.from_json(out)) == len(found["entries"])


def test_csv_has_a_row_for_each_entry(capsys, tmp_path):
    file = tmp_path / "ledger.csv"
    code, out, _ = call(capsys, *GPT_22B, "--format", "csv", "--out", file)
    rows = list(csv.DictReader(io.StringIO(out)))
    entries = document(capsys, *GPT_22B)["entries"]
    assert code == 0
    assert [int(row["local_bytes"]) for row in rows] == [entry["local_bytes"] for entry in entries]
    assert file.read_text() == out


def test_the_request_is_echoed_with_what_was_assumed(capsys):
    asked = document(capsys, "llama3-8b", "--tp", 2, "--pp", 4, "--seq", 512)["request"]
    assert (asked["seq"], asked["micro_batches"], asked["layout"]["sp"], asked["layout"]["world"]) == (512, 4, True, 8)
    assert (asked["kernels"], asked["precision"], asked["gradients"]) == ("pytorch", "bf16", "one by one")
    assert {"micro_batch", "micro_batches", "sp"} <= set(asked["assumed"])
    assert not {"seq", "tp", "pp"} & set(asked["assumed"])


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("gpt-175b", (2048, "megatron", "eager", 0.1, "upfront")),
        ("llama3-8b", (4096, "pytorch", "flash", 0.0, "one by one")),
        ("gpt2", (1024, "pytorch", "flash", 0.1, "one by one")),
    ],
)
def test_defaults_follow_the_model(capsys, model, expected):
    asked = document(capsys, model)["request"]
    assert tuple(asked[key] for key in ("seq", "kernels", "attention", "dropout", "gradients")) == expected


def test_flags_reach_the_run(capsys):
    flags = ("--cp", 2, "--dp", 4, "--ep", 8, "--zero", 3, "--dropout", 0, "--loss", "chunked", "--kernels", "megatron")
    more = ("--optimizer", "sgd", "--precision", "bf16-main32", "--gradients", "one-by-one", "--capacity-factor", 1.5)
    pipeline = ("--pp", 2, "--schedule", "zero-bubble", "--micro-batches", 6, "--recompute", "block:3", "--offload")
    last = (
        "--gathered-inputs",
        "--tp-comm-overlap",
        "--keep-stage-outputs",
        "--attention",
        "sdpa",
        "--micro-batch",
        2,
        "--tp",
        2,
    )
    asked = document(capsys, "mixtral-8x7b", *flags, *more, *pipeline, *last)["request"]
    layout = asked.pop("layout")
    assert {key: layout[key] for key in ("tp", "sp", "cp", "ep", "pp", "dp", "zero", "world")} == {
        "tp": 2,
        "sp": True,
        "cp": 2,
        "ep": 8,
        "pp": 2,
        "dp": 4,
        "zero": 3,
        "world": 32,
    }
    assert layout["schedule"] == "zero-bubble"
    assert layout["gathered_inputs"] is layout["keeps_stage_outputs"] is asked["offload"] is True
    assert asked["tp_comm_overlap"] is True
    assert {
        "recompute": "block:3",
        "loss": "chunked",
        "kernels": "megatron",
        "attention": "flash",
    }.items() <= asked.items()
    assert {
        "optimizer": "sgd",
        "precision": "bf16-main32",
        "capacity_factor": 1.5,
        "dropout": 0,
    }.items() <= asked.items()


def test_a_config_is_what_its_preset_is(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(dict(PRESETS["qwen3-8b"])))
    own, named = document(capsys, tmp_path, "--tp", 4), document(capsys, "qwen3-8b", "--tp", 4)
    assert own["layers"] == named["layers"]
    assert own["peak_bytes"] == named["peak_bytes"]
    assert own["model"] == str(tmp_path)


# budgets --------------------------------------------------------------------------------------------------------------


def test_a_budget_decides_the_exit_code(capsys):
    peak = document(capsys, *GPT_22B)["peak_bytes"]
    assert document(capsys, *GPT_22B, "--budget", f"{peak}B")["fits"] is True
    close = document(capsys, *GPT_22B, "--budget", f"{peak - 1}B")
    assert (close["fits"], close["verdict"], close["budget_bytes"]) == (False, "too close to call", peak - 1)
    assert "TOO CLOSE TO CALL" in call(capsys, *GPT_22B, "--budget", f"{peak - 1}B")[1]
    low, high = (close["figures"]["allocated_bytes"][end] for end in ("low", "high"))
    assert document(capsys, *GPT_22B, "--budget", f"{high + 1}B")["verdict"] == "fits"
    refused = document(capsys, *GPT_22B, "--budget", f"{low - 1}B", code=3)
    assert (refused["fits"], refused["verdict"], refused["peak_bytes"]) == (False, "does not fit", peak)
    code, out, err = call(capsys, *GPT_22B, "--budget", f"{low - 1}B")
    assert code == 3
    assert "DOES NOT FIT" in out
    assert err.startswith(f"jettison: the peak, 81.19 GiB ({peak}B), is above ")
    assert err.count("\n") == 1


def test_a_gpu_keeps_some_of_its_memory_for_itself(capsys):
    found = document(capsys, "gpt2", "--gpu", "h100-80gb")
    assert found["gpu"] == "h100-80gb"
    assert found["peak_bytes"] < found["budget_bytes"] < found["usable_bytes"] < 80 * 2**30
    smaller = document(capsys, "gpt2", "--gpu", "h100-80gb", "--budget", "60GiB")
    assert (smaller["budget_bytes"], smaller["gpu"]) == (60 * 2**30, None)
    assert document(capsys, "llama3-8b", "--gpu", "h100-80gb", code=3)["fits"] is False


def test_fit_and_explain_answer_more(capsys):
    flags = ("gpt-22b", "--tp", 8, "--budget", "75GiB", "--fit", "--explain")
    found = document(capsys, *flags)
    assert found["fit"]["fits"] is True
    assert found["explain"]["peak_bytes"] == found["peak_bytes"]
    largest = found["fit"]["micro_batch"]["value"]
    assert document(capsys, "gpt-22b", "--tp", 8, "--micro-batch", largest)["peak_bytes"] <= 75 * 2**30
    assert document(capsys, "gpt-22b", "--tp", 8, "--micro-batch", largest + 1)["peak_bytes"] > 75 * 2**30
    code, out, _ = call(capsys, *flags)
    assert code == 0
    assert "What fits 75.00 GiB" in out
    assert "What the peak of stage 0 is made of" in out
    assert "--recompute none (as it is)" in out


def test_auto_recompute_is_left_to_the_planner(capsys):
    flags = ("llama3-8b", "--tp", 8, "--zero", 1, "--micro-batch", 4)
    plain = document(capsys, *flags)["peak_bytes"]
    full = document(capsys, *flags, "--recompute", "full")["peak_bytes"]
    budget = (plain + full) // 2
    found = document(capsys, *flags, "--recompute", "auto", "--budget", f"{budget}B")
    assert found["recompute"] == "auto"
    assert full < found["peak_bytes"] <= budget
    assert found["auto"]["minimum_budget_bytes"] <= budget
    assert found["auto"]["recompute_seconds"] > 0
    assert {row["policy"] for row in found["layers"]} <= {"none", "full", "per-tensor"}
    code, _, err = call(capsys, *flags, "--recompute", "auto", "--budget", "1GiB")
    assert code == 3
    assert "smallest feasible budget" in err
    code, out, _ = call(capsys, *flags, "--recompute", "auto", "--budget", f"{budget}B", "--explain")
    assert code == 0
    assert "a micro-batch on the slowest stage" in out


# for people -----------------------------------------------------------------------------------------------------------


def test_the_table_of_a_pipeline(capsys):
    code, out, err = call(capsys, *LLAMA_405B)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 140
    assert "405.85 billion parameters" in out
    assert "tp 8 with sp x pp 16 x dp 8 = 1024 GPUs" in out
    assert "4096 tokens (default)" in out
    assert "layers.0 to 125 (126)" in out
    assert "on stage 1, in backward of layers.14, from step 1 on; step 0: " in out
    assert "Pipeline stages" in out


def test_one_device_has_no_table_of_stages(capsys):
    _, out, _ = call(capsys, "llama3-8b", "--recompute", "every:4")
    assert "Pipeline stages" not in out
    assert "layers.0, 4, 8 ... 28 (8)" in out
    assert "one GPU" in out


def test_a_long_pipeline_is_cut_and_shows_its_worst_stage(capsys):
    _, out, _ = call(capsys, "gpt-1t", "--tp", 8, "--pp", 64)
    stages = out[out.index("Pipeline stages") : out.index("Peak of each phase")].splitlines()
    assert len(stages) < 30
    assert any("more rows" in line for line in stages)
    _, out, _ = call(capsys, "gpt-530b", "--tp", 8, "--pp", 35, "--schedule", "gpipe", "--recompute", "full")
    assert "1 to 33" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("llama3-8b", "--recompute", "selective"), "flash attention never stores: it saves nothing here"),
        (("llama3-8b", "--tp", 2, "--no-sp"), "--sp shards them"),
        (("llama3-8b", "--sp"), "--sp does nothing without tensor parallelism"),
        (("llama3-8b", "--tp", 4, "--gathered-inputs"), "4 times the shard"),
        (("llama3-8b", "--zero", 3), "--zero 3 shards nothing"),
        (("llama3-8b", "--seq", 16384), "more than the 8192 positions"),
        (("llama3-8b", "--capacity-factor", 2), "has no experts"),
        (("llama3-8b", "--schedule", "gpipe"), "--schedule does nothing without a pipeline"),
        (("llama3-8b", "--keep-received"), "--keep-received does nothing without a pipeline"),
        (("llama3-8b", "--dispatcher", "flex"), "--dispatcher does nothing: llama3-8b has no experts"),
        (("llama3-8b", "--expert-tp", 1), "--expert-tp does nothing: llama3-8b has no experts"),
        (("llama3-8b", "--cp-comm-type", "a2a"), "--cp-comm-type does nothing without context parallelism"),
        (("llama3-8b", "--dp", 4, "--zero-replicas", 2), "--zero-replicas does nothing where nothing is sharded"),
        (("llama3-8b", "--zero-buckets", "default"), "--zero-buckets does nothing without ZeRO"),
        (("llama3-8b", "--gradient-sync", "each"), "--gradient-sync does nothing without FSDP"),
        (("llama3-8b", "--reentrant"), "--reentrant does nothing without checkpoints"),
        (("llama3-8b", "--dropout", 0.1), "--dropout does nothing: llama3-8b has none outside of fused attention"),
    ],
)
def test_what_is_asked_in_vain_is_said_on_stderr(capsys, flags, message):
    code, out, err = call(capsys, *flags, "--format", "json")
    assert code == 0
    assert message in err
    assert any(message in warning for warning in json.loads(out)["warnings"])


def test_what_a_frameworks_rule_sets_in_vain_is_not_said(capsys):
    for name in ("megatron-0.19", "torchtitan"):
        assert not [w for w in document(capsys, "llama3-8b", "--dp", 2, "--like", name)["warnings"] if "nothing" in w]


@pytest.mark.parametrize(("tp", "cp", "whose"), [(1, 16, "8 key-value"), (2, 8, "4 key-value"), (8, 16, "4 attention")])
def test_ranks_that_exchange_heads_have_heads_each(capsys, tp, cp, whose):
    flags = ("llama3-8b", "--tp", tp, "--cp", cp, "--cp-comm-type")
    code, _, err = call(capsys, *flags, "a2a")
    assert code == 2
    assert f"does not divide the {whose} heads of a rank" in err
    assert call(capsys, *flags, "p2p")[0] == 0


def test_selective_recomputation_with_eager_attention_is_no_trap(capsys):
    assert document(capsys, *GPT_22B, "--recompute", "selective")["warnings"] == []


def test_spans():
    names = [f"model.layers.{i}" for i in range(12)]
    assert span(names) == "model.layers.0 to 11 (12)"
    assert span(names[::2]) == "model.layers.0, 2, 4 ... 10 (6)"
    assert span([*names[:2], *names[5:7]]) == "model.layers.0 to 1, 5 to 6 (4)"
    assert span(["embedding", *names[:3], "head"], brief=True) == "embedding, 0-2, head"
    assert span(["0", "1"]) == "0 to 1 (2)"
    assert span(["head"]) == "head"
    assert span(names[3:4]) == "model.layers.3"


# what cannot be answered ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("llama3-8c",), "the closest are llama3-8b"),
        (("llama3-8b", "--tpp", 3), "Unknown option: --tpp. Did you mean --tp?"),
        (("llama3-8b", "--micro", 3), "Did you mean --micro-batch?"),
        (("llama3-8b", "more"), "got more, which no argument of ledger takes"),
        (("llama3-8b", "--no-entries", "8"), "got --no-entries 8; --no-entries takes no value"),
        (("llama3-8b", "--from", "no.yaml", __file__), f"without a flag; give --from {__file__}"),
        (("llama3-8b", "--tp"), "got --tp without a value"),
        (("llama3-8b", "--tp", "two"), "--tp"),
        (("llama3-8b", "--tp", 0), "got --tp 0; expected a whole number of 1 or more"),
        (("llama3-8b", "--tp", 3), "--tp 3 does not divide the 32 attention heads"),
        (("llama3-8b", "--pp", 5), "32 layers do not divide over 5 pipeline stages"),
        (("llama3-8b", "--budget", 80), "got '80' without a unit"),
        (("llama3-8b", "--gpu", "h1000"), "the closest are h100-64gb, h100-80gb"),
        (("llama3-8b", "--virtual-stages", 2), "without a pipeline; give --pp 2 or more"),
        (("llama3-8b", "--dropout", 1.5), "got --dropout 1.5"),
        (("llama3-8b", "--zero", 4), "got --zero 4; expected 0, 1, 2 or 3"),
        (("llama3-8b", "--ep", 2, "--dp", 2), "llama3-8b has no experts"),
        (("llama3-8b", "--attention", "fast"), "expected one of eager, flash"),
        (("llama3-8b", "--precision", "bf61"), "expected one of fp32, bf16"),
        (("llama3-8b", "--optimizer", "adam"), "expected one of adamw"),
        (("llama3-8b", "--kernels", "x"), "expected one of megatron, pytorch, huggingface"),
        (("llama3-8b", "--loss", "x"), "expected one of upcast"),
        (("llama3-8b", "--schedule", "x"), "expected one of gpipe, 1f1b"),
        (("llama3-8b", "--gradients", "x"), "expected one of one-by-one, upfront"),
        (("llama3-8b", "--recompute", "every"), "every:K"),
        (("llama3-8b", "--recompute", "every:0"), "1 or more"),
        (("llama3-8b", "--recompute", "auto"), "give --budget or --gpu"),
        (("llama3-8b", "--fit"), "give --budget or --gpu"),
        (("llama3-8b", "--capacity-factor", "nan"), "--capacity-factor nan"),
        (("llama3-8b", "--format", "yaml"), "yaml"),
        (("llama3-8b", "--trace"), "llama3-8b is a preset"),
        (("gpt-22b", "--seq", 4096), "gpt-22b has 2048 positions"),
        (("no/such/config.json",), "No such file"),
        (("some.module:make", "--tp", 2), "--tp does not apply to the live model some.module:make"),
        (("some.module:make", "--explain"), "--explain does not apply to the live model"),
    ],
)
def test_what_is_asked_wrongly_is_one_line_and_exits_2(capsys, arguments, message):
    code, out, err = call(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("jettison: ")
    assert err.count("\n") == 1
    assert message in err


MEGATRON = "llama3-8b --kernels megatron"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("llama3-8b --pp 4 --schedule zero-bubble-v --virtual-stages 3", "it needs 2, and no --micro-batch-group"),
        ("llama3-8b --pp 4 --dp 2 --zero 3 --gradient-sync last", "reduce gradients once: give --stage-buffers"),
        ("llama3-8b --dp 2 --zero 3 --gradient-sync last --gradients upfront", "give --gradients one-by-one"),
        ("llama3-8b --keep-logits --loss chunked-cross-entropy", "(--loss upcast does not); give --no-keep-logits"),
        ("llama3-8b --gradients in-backward --pp 2", "got --gradients in-backward with --pp 2, which needs several"),
        ("mixtral-8x7b --compile", "got --compile and mixtral-8x7b, whose MoE layers have graph breaks; without it"),
        ("mixtral-8x7b --tp 2 --dp 4 --ep 8", "dp x cp = 4, the ranks of expert parallelism; --expert-tp 1 adds"),
        ("llama3-8b --lora q=8", "expected r=16, optionally with alpha=32,targets=qkv+mlp"),
        ("llama3-8b --lora r=8,targets=foo", "got --lora targets=foo; expected all-linear or some of q_proj"),
        ("gpt2 --kernels megatron --mtp-num-layers 1", "and gpt2, which has learned positions"),
        ("llama3-8b --fp8-recipe tensorwise --quant-recipe last:1=bf16", "with torchao's recipe tensorwise"),
        (f"{MEGATRON} --fp8-recipe mxfp8 --quant-recipe foo", "expected what=how, as last:14=bf16"),
        (f"{MEGATRON} --fp8-recipe mxfp8 --quant-recipe x=foo", "expected bf16, delayed"),
        (f"{MEGATRON} --offload-modules attn_proj", "without core_attn, whose output it reads; give both"),
        (f"{MEGATRON} --offload-modules core_attn --recompute full", "does not go with --recompute full; drop one"),
        ("llama3-8b --micro-batches-without-recompute 1 --recompute full --offload --pp 2", "go with --offload; drop"),
        ("llama3-8b --gpu a100-80gb,foo=3", "optionally with ,network=25,link=300,host=50,node=8 (GB/s)"),
    ],
)
def test_flags_that_exclude_each_other(capsys, arguments, message):
    code, out, err = call(capsys, *arguments.split())
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "it has a list, not keys with values"),
        ("{}", "no model_type"),
        ('{"model_type": "no-such-model"}', "the model_type 'no-such-model'"),
        ('{"model_type": "llama", "hidden_size": 64}', "lacks"),
        (json.dumps(dict(PRESETS["llama3-8b"]) | {"hidden_size": "wide"}), "hidden_size 'wide'"),
    ],
)
def test_a_malformed_config_is_one_line_and_exits_2(capsys, tmp_path, text, message):
    file = tmp_path / "config.json"
    file.write_text(text)
    code, out, err = call(capsys, file)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert message in err


def test_as_a_process(tmp_path):
    def process(*arguments):
        command = [sys.executable, "-m", "jettison", "ledger", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, cwd=tmp_path, check=False)

    done = process("llama3-8b", "--tp", "8", "--format", "json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["parameters"] == 8_030_261_248
    done = process("llama3-8b", "--budget", "1GiB")
    assert done.returncode == 3
    done = process("llama3-8b", "--tp", "3")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


def test_the_error_survives_pickling():
    error = DoesNotFit(peak_bytes=3, limit_bytes=2, limit_name="the budget", advice="ask for less")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) == "the peak, 3 B (3B), is above 2 B (2B), the budget; ask for less"
    assert (again.exit_code, again.peak_bytes, again.limit_bytes) == (3, 3, 2)


def test_what_a_device_holds_beside_tensors_is_stated(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ledger", "llama3-8b", "--tp", "8", "--format", "json"]) == 0
    stated = json.loads(capsys.readouterr().out)["allowance"]
    assert 0 < stated["low_bytes"] < stated["expected_bytes"] < stated["high_bytes"]
    assert run(["ledger", "llama3-8b", "--tp", "8"]) == 0
    out = capsys.readouterr().out
    for name in ("allocated", "reserved", "device"):
        assert f"\n{name} " in out


def test_a_sequence_beyond_the_learned_positions_needs_more_of_them(capsys):
    """At 8,192 tokens a layer of GPT-3 keeps what equation 1 says; the table of positions grows with them."""
    flags = ("gpt-175b", "--seq", 8192, "--dropout", 0.1)
    code, _, err = call(capsys, *flags)
    assert code == 2
    assert "2048 positions" in err
    longer = document(capsys, *flags, "--max-position-embeddings", 8192)
    layer = next(row["bytes"] for row in longer["layers"] if row["layer"] == "layers.0")
    assert layer == 8192 * 12288 * 34 + 5 * 96 * 8192**2 + 16 * 8192
    usual = document(capsys, "gpt-175b")
    assert longer["parameters"] - usual["parameters"] == (8192 - 2048) * 12288
    assert call(capsys, "llama3-8b", "--max-position-embeddings", 8192)[0] == 2
