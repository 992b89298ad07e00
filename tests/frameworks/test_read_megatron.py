"""Megatron-LM's runs, read from scripts, arguments as text and tests' YAML."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks import megatron_golden as golden

from jettison.cli.main import run as jettison
from jettison.core.errors import UsageError
from jettison.formula.region import parameter_count
from jettison.frameworks.megatron.write import flags_text, layout_settings, overrides_text
from jettison.frameworks.run_file import read_run, run_from
from jettison.frameworks.shell_script import NOTES, PROGRAM, arguments
from jettison.predict.forecast import forecast
from jettison.request.options import RunRequest
from jettison.request.resolve import run_of
from jettison.spec.model import Activation, Attention, LatentAttention, Layer, Mlp, Moe, NormKind, QkNorm, Router
from jettison.spec.run import Run

SMALL = {
    "num-layers": 4,
    "hidden-size": 256,
    "num-attention-heads": 4,
    "seq-length": 128,
    "max-position-embeddings": 128,
    "vocab-size": 1000,
    "micro-batch-size": 2,
    "global-batch-size": 32,
    "bf16": True,
}
LLAMA = {
    "swiglu": True,
    "normalization": "RMSNorm",
    "disable-bias-linear": True,
    "untie-embeddings-and-output-weights": True,
    "position-embedding-type": "rope",
    "group-query-attention": True,
    "num-query-groups": 2,
    "ffn-hidden-size": 512,
}


def text_of(values: dict[str, Any]) -> str:
    """Arguments as they are typed."""
    return " ".join(f"--{name}" if value is True else f"--{name} {value}" for name, value in values.items())


def yaml_of(values: dict[str, Any]) -> str:
    """The same, as a test's YAML has them."""
    lines = [f"  --{name}: {'true' if value is True else value}" for name, value in values.items()]
    return "ENV_VARS:\n  CUDA_DEVICE_MAX_CONNECTIONS: 1\nMODEL_ARGS:\n" + "\n".join(lines) + "\nTEST_TYPE: regular\n"


@pytest.fixture
def read(tmp_path: Path) -> Any:
    """Read arguments on eight devices."""

    def found(values: dict[str, Any], gpus: int | None = 8, **more: Any) -> Any:
        file = tmp_path / "run.args"
        file.write_text(text_of({**SMALL, **values}))
        return read_run(file, gpus=gpus, **more)

    return found


def test_fields_of_a_request(read: Any) -> None:
    found = read(
        {
            "tensor-model-parallel-size": 2,
            "pipeline-model-parallel-size": 2,
            "sequence-parallel": True,
            "num-layers-per-virtual-pipeline-stage": 1,
            "use-distributed-optimizer": True,
            "recompute-granularity": "full",
            "recompute-method": "block",
            "recompute-num-layers": 1,
            "lr": 0.1,
        }
    )
    request = found.request
    assert {name: getattr(request, name) for name in request.given()} == {
        "seq": 128,
        "micro_batch": 2,
        "micro_batches": 8,
        "tp": 2,
        "sp": True,
        "pp": 2,
        "virtual_stages": 2,
        "dp": 2,
        "zero": 1,
        "attention": "flash",
        "precision": "bf16-main32",
        "accumulation": "fused-dummy",
        "recompute": "block:1",
        "like": "megatron-0.19",
    }
    assert (found.global_batch, found.ignored, found.unread) == (32, ("lr",), ())


def test_three_forms_are_one_run(tmp_path: Path, read: Any) -> None:
    values = {**SMALL, **LLAMA}
    plain, script, test = (tmp_path / name for name in ("plain.args", "run.sh", "model_config.yaml"))
    plain.write_text(text_of(values))
    test.write_text(yaml_of(values))
    script.write_text(
        "#!/bin/bash\r\nGPUS_PER_NODE=4\nNNODES=2 # nodes\nHIDDEN=256\n"
        "ARGS=(\n    " + text_of({**values, "hidden-size": "$HIDDEN"}).replace(" --", "\n    --") + "\n)\n"
        "torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NNODES pretrain_gpt.py ${ARGS[@]}\n"
    )
    runs = [run_from(plain, gpus=8), run_from(script), run_from(test, gpus=8)]
    for one in runs:
        assert replace(one, model=replace(one.model, name="")) == replace(
            runs[0], model=replace(runs[0].model, name="")
        )
    assert runs[1].layout.dp == 8


def test_a_file_is_the_command_that_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.args"
    file.write_text(text_of({**SMALL, **LLAMA, "tensor-model-parallel-size": 2}))
    found = read_run(file, gpus=8)
    assert jettison(["ledger", "--from", str(file), "--gpus", "8"]) == 0
    first = capsys.readouterr()
    assert jettison(found.command().split()[1:]) == 0
    second = capsys.readouterr()
    assert first.out == second.out
    assert "of " + str(file) + " the model alone is read" in second.err


def test_a_command_can_be_pasted(read: Any) -> None:
    found = read({"pipeline-model-parallel-size": 2, "pipeline-model-parallel-layout": "'Et|(t|)*2tL'"})
    assert "--stage-layers 'Et|(t|)*2tL'" in found.command()


def test_the_model_of_a_gpt(read: Any) -> None:
    model = read({}).spec()
    layer = model.layers[0]
    assert isinstance(layer.attention, Attention) and isinstance(layer.mlp, Mlp)
    assert (model.vocab, model.learned_positions, model.tied_embeddings, model.dropout) == (1024, True, True, 0.1)
    assert (layer.attention.qkv_bias, layer.attention.out_bias, layer.attention.rotary_dim) == (True, True, 0)
    assert (layer.mlp.ffn, layer.mlp.activation, layer.mlp.gated) == (1024, Activation.GELU_TANH, False)
    assert (layer.norm.kind, layer.norm.bias) == (NormKind.LAYER, True)
    assert parameter_count(model) == 4 * (12 * 256**2 + 13 * 256) + 1024 * 256 + 128 * 256 + 2 * 256


def test_the_model_of_a_llama(read: Any) -> None:
    model = read({**LLAMA, "qk-layernorm": True, "tensor-model-parallel-size": 4}).spec()
    layer = model.layers[0]
    assert isinstance(layer.attention, Attention) and isinstance(layer.mlp, Mlp)
    assert (model.vocab, model.learned_positions, model.tied_embeddings) == (1024, False, False)
    assert (layer.attention.kv_heads, layer.attention.rotary_dim, layer.attention.qk_norm) == (2, 64, QkNorm.HEAD)
    assert (layer.mlp.gated, layer.mlp.activation, layer.mlp.bias, layer.norm.kind) == (
        True,
        Activation.SILU,
        False,
        NormKind.RMS,
    )
    assert read({**LLAMA, "vocab-size": 1025, "tensor-model-parallel-size": 4}).spec().vocab == 1536
    assert read({**LLAMA, "padded-vocab-size": 1001}).spec().vocab == 1001


def test_experts_windows_and_latent_attention(read: Any) -> None:
    experts = {
        "num-experts": 8,
        "moe-layer-freq": "([0]*1+[1]*3)",
        "moe-ffn-hidden-size": 64,
        "moe-router-topk": 4,
        "moe-shared-expert-intermediate-size": 128,
        "moe-router-score-function": "sigmoid",
        "moe-grouped-gemm": True,
        "moe-token-dispatcher-type": "alltoall",
        "expert-model-parallel-size": 4,
    }
    found = read({**LLAMA, **experts})
    kinds = [layer.experts for layer in found.spec().layers if isinstance(layer, Layer)]
    assert kinds[0] is None
    moe = kinds[1]
    assert isinstance(moe, Moe)
    assert (moe.experts, moe.top_k, moe.ffn, moe.shared_ffn, moe.router) == (8, 4, 64, 128, Router.SIGMOID_GROUPS)
    assert (found.request.ep, found.request.dispatcher, found.request.sequential_experts) == (4, "alltoall", None)
    assert [bool(one.experts) for one in read({**experts, "moe-layer-freq": 2}).spec().layers] == [True, False] * 2
    windows = read({**LLAMA, "window-size": "127,0", "window-attn-skip-freq": 2}).spec().layers
    assert [layer.window for layer in windows] == [128, None, 128, None]
    latent = read({**LLAMA, "multi-latent-attention": True, "q-lora-rank": 96, "kv-lora-rank": 64}).spec().layers[0]
    assert latent.attention == LatentAttention(
        heads=4, query_rank=96, kv_rank=64, nope_dim=128, rope_dim=64, value_dim=128
    )


def test_a_hybrid_model(read: Any) -> None:
    found = read(
        {
            "hybrid-layer-pattern": "M-M-|M*M-/*E/*E",
            "pipeline-model-parallel-size": 2,
            "num-experts": 4,
            "mamba-head-dim": 32,
            "position-embedding-type": "none",
            "disable-bias-linear": True,
        }
    )
    model = found.spec()
    assert (model.depth, found.request.mtp_num_layers, found.request.stage_layers) == (8, 2, "4,4")
    assert [("M" if one.scan else "*" if one.attention else "-") for one in model.layers] == list("M-M-M*M-")
    assert not model.learned_positions
    scan = model.layers[0].scan
    assert scan is not None
    assert (scan.heads, scan.head_dim) == (16, 32)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("values", "field", "value"),
    [
        ({"fp16": True, "bf16": "false"}, "precision", "fp16-main32"),
        ({"grad-reduce-in-bf16": True}, "precision", "bf16-reduce16"),
        ({"bf16": "false"}, "precision", "fp32"),
        ({"fp8-format": "hybrid", "fp8-amax-history-len": 1024}, "fp8_recipe", "delayed:1024"),
        ({"fp8-format": "e4m3", "fp8-recipe": "mxfp8"}, "fp8_recipe", "mxfp8"),
        ({"fp8-format": "hybrid", "first-last-layers-bf16": True}, "quant_recipe", "first:1=bf16,last:1=bf16"),
        ({"recompute-activations": True}, "recompute_modules", "core_attn"),
        (
            {"recompute-granularity": "selective", "recompute-modules": "mlp moe_act"},
            "recompute_modules",
            "mlp,moe_act",
        ),
        ({"recompute-granularity": "full", "recompute-method": "uniform"}, "recompute", "full"),
        (
            {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 2},
            "recompute",
            "every:2",
        ),
        ({"transformer-impl": "local"}, "workspaces", "torch-hopper"),
        ({"attention-backend": "unfused"}, "attention", "eager"),
        ({"no-gradient-accumulation-fusion": True}, "accumulation", "cast"),
        ({"cross-entropy-loss-fusion": True, "cross-entropy-fusion-impl": "te"}, "loss", "te"),
        ({"no-create-attention-mask-in-dataloader": True}, "dataloader_attention_mask", False),
        ({"optimizer": "muon", "use-distributed-optimizer": True}, "optimizer", "dist-muon"),
        ({"optimizer": "sgd"}, "optimizer", "sgd-momentum"),
        ({"context-parallel-size": 2, "cp-comm-type": "a2a"}, "cp_comm_type", "a2a"),
        (
            {"use-precision-aware-optimizer": True, "exp-avg-dtype": "bf16", "exp-avg-sq-dtype": "bf16"},
            "precision",
            "bf16-aware-grad32",
        ),
        ({"pipeline-model-parallel-size": 2, "decoder-first-pipeline-num-layers": 1}, "stage_layers", "first:1"),
        ({"pipeline-model-parallel-size": 2, "pipeline-model-parallel-layout": "'Et|(t|)*2tL'"}, "virtual_stages", 2),
    ],
)
def test_what_an_argument_becomes(read: Any, values: dict[str, Any], field: str, value: Any) -> None:
    assert getattr(read(values).request, field) == value


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"use-megatron-fsdp": True}, r"use-megatron-fsdp = true \(Megatron's own FSDP is not modelled\)"),
        ({"hyper-drive": 9}, r"hyper-drive = 9 \(unknown key\)"),
        ({"optimizer": "lion"}, r"optimizer = lion \(expected adam, sgd or muon\)"),
        ({"spec": "mine.layers spec"}, r"spec = .*other layer specs"),
        ({"no-rope-freq": 4}, "layers without rotary positions"),
        ({"hidden-size": "wide"}, "got hidden-size = wide; expected a whole number"),
        ({"hidden-size": -1}, "got hidden-size = -1; expected a whole number of 1 or more"),
        ({"num-experts": 4, "moe-layer-freq": "__import__('os')"}, "got moe-layer-freq"),
        ({"num-experts": 4, "moe-layer-freq": "([1]*99999999)"}, "got moe-layer-freq"),
        ({"micro-batch-size": 0}, r"global-batch-size = 32, which is no multiple of 0 sequences"),
        ({"global-batch-size": 7}, r"global-batch-size = 7, which is no multiple of 2 sequences x 8 replicas"),
        ({"num-layers": "$LAYERS"}, "num-layers"),
        ({"global-batch-size": "$BATCH"}, r"global-batch-size = \$BATCH \(the file does not set its value\)"),
    ],
)
def test_what_is_refused_names_the_argument(read: Any, values: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        read(values).spec()


@pytest.mark.parametrize(
    ("kind", "key", "model", "size"),
    [
        ("Llama2Tokenizer", "tokenizer-model", "/w/Llama-2-7b/tokenizer.model", 32_000),
        ("Llama2Tokenizer", "tokenizer-model", "$TOKENIZER", 32_000),
        ("Llama2Tokenizer", "tokenizer-model", "/w/jp-100k.model", None),
        ("GPT2BPETokenizer", "vocab-file", "/w/gpt2-vocab.json", 50_304),
        ("GPT2BPETokenizer", "vocab-file", "/w/europe/vocab.json", None),
    ],
)
def test_vocabularies_of_kinds_of_tokenizers(tmp_path: Path, kind: str, key: str, model: str, size: int | None) -> None:
    """The files of a tokenizer say whose vocabulary it has, its class does not."""
    values = {key: value for key, value in SMALL.items() if key != "vocab-size"}
    file = tmp_path / "run.args"
    file.write_text(text_of({**values, "tokenizer-type": kind, key: model}))
    if size is None:
        with pytest.raises(UsageError, match="only its files have the size of the vocabulary"):
            read_run(file, gpus=8)
    else:
        assert read_run(file, gpus=8).spec().vocab == size


def test_a_vocabulary_that_only_its_tokenizer_knows(tmp_path: Path) -> None:
    file, more = tmp_path / "run.args", "--tokenizer-type HuggingFaceTokenizer --tokenizer-model "
    values = {key: value for key, value in SMALL.items() if key != "vocab-size"}
    file.write_text(f"{text_of(values)} {more}mine/own")
    with pytest.raises(UsageError, match=r"tokenizer-model = mine/own \(only its files have .* --vocab-size 128256"):
        read_run(file, gpus=8)
    file.write_text(f"{text_of(values)} {more}meta-llama/Llama-3.1-8B")
    found = read_run(file, gpus=8)
    assert found.spec().vocab == 128_256
    assert found.notes[0].startswith(
        "a vocabulary of 128256 tokens before padding, that of huggingfacetokenizer:meta-llama/llama-3.1-8b"
    )


def test_a_model_that_the_command_names_stands_for_the_files(tmp_path: Path) -> None:
    file = tmp_path / "run.args"
    file.write_text("--use-checkpoint-args --micro-batch-size 1 --hidden-size 8 --num-layers 2 --seq-length 64 --bf16")
    with pytest.raises(UsageError, match="got num-attention-heads = None"):
        read_run(file, gpus=1).spec()
    found = read_run(file, gpus=1, model="gpt2")
    assert (found.model, found.config, found.request.seq, found.request.dropout) == ("gpt2", None, 64, 0.1)


def test_another_program_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text(f"python pretrain_bert.py {text_of(SMALL)}\n")
    with pytest.raises(UsageError, match=r"runs pretrain_bert\.py, whose model \(bert\)"):
        read_run(file, gpus=8)
    command = f"python llama/pretrain_llama.py {text_of(SMALL)}\n"
    file.write_text(command)
    with pytest.raises(UsageError, match=r"runs .*pretrain_llama\.py, whose model \(llama\)"):
        read_run(file, gpus=8)
    for own in (f"{command.strip()} --swiglu", command.replace("pretrain_llama", "pretrain_gpt")):
        file.write_text(own)
        assert read_run(file, gpus=8).config


# tests of Megatron-LM whose figures are facts -------------------------------------------------------------------------


def arguments_of(row: golden.Facts) -> dict[str, Any]:
    """A test's arguments, written anew from what is known of it."""
    described = golden.run_of(row)
    own = golden.arguments(row) | {
        "seq-length": row["seq"],
        "micro-batch-size": row["mbs"],
        "global-batch-size": row["gbs"],
        "context-parallel-size": row["cp"] or 1,
        "expert-model-parallel-size": row["ep"] or 1,
        "hidden-dropout": described.dropout,
        "attention-dropout": described.dropout,
        "fp16" if row["precision"] == "fp16" else "bf16": True,
    }
    own |= {"sequence-parallel": True} if row["sp"] == "1" else {}
    own |= {"use-distributed-optimizer": True} if row["zero"] == "1" else {}
    own |= {} if described.dataloader_attention_mask else {"no-create-attention-mask-in-dataloader": True}
    if row["vpp"] and "|" not in golden._cut(row) and golden.PATTERN not in golden.extras(row):
        own["num-virtual-stages-per-pipeline-rank"] = row["vpp"]
    if row["recompute"].startswith("full"):
        own |= {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1}
    elif row["recompute"].startswith("selective"):
        modules = row["recompute"].removeprefix("selective:")
        own |= {"recompute-granularity": "selective", "recompute-modules": modules}
    if row["offload"]:
        own |= {"fine-grained-activation-offloading": True, "offload-modules": row["offload"]}
    return own


UNSAID = (
    "CUBLAS_WORKSPACE_CONFIG",
    "moe-router-pre-softmax",
    "fp8-recipe",
    "optimizer",
    "defer-embedding-wgrad-compute",
)
"""Rows that have these are left out: what stands beside them is in no column."""


def rows() -> list[golden.Facts]:
    """One row for each kind of test that is described, on a Hopper."""
    found: dict[str, golden.Facts] = {}
    for path in (golden.FACTS, golden.LATER, golden.MORE, golden.HYBRIDS):
        for row in golden.facts(path):
            name = golden.name_of(row)
            described = not golden.why_not(row) and not name.startswith(golden.PREFIXES) and "muon" not in name
            if described and row["gpu"].startswith("H100") and not set(UNSAID) & set(golden.extras(row)):
                kind = [row[key] for key in ("layers", "tp", "sp", "pp", "vpp", "cp", "ep", "zero", "recompute")]
                found.setdefault(" ".join([*kind, row["arch_extra"]]), row)
    return list(found.values())


ROWS = rows()


@pytest.mark.parametrize("row", ROWS, ids=golden.name_of)
def test_a_golden_row_reads_as_it_is_described(row: golden.Facts, tmp_path: Path) -> None:
    file = tmp_path / "model_config.yaml"
    file.write_text(yaml_of(arguments_of(row)))
    ranks = int(row["tp"]) * int(row["pp"]) * int(row["cp"] or 1) * int(row["dp"])
    found = run_from(file, gpus=ranks)
    described = replace(golden.run_of(row), keep_batches=False)
    first, then = (forecast(run).stages[-1] for run in (found, described))
    assert (first.first_step_peak, first.peak) == (then.first_step_peak, then.peak)


# scripts --------------------------------------------------------------------------------------------------------------


def test_branches_of_a_script_that_are_known() -> None:
    found = arguments(
        "SIZE=${SIZE:-8b}\nNODES=2\nif [ $SIZE = 8b ]; then\n  H=64\nelif [[ $SIZE == 70b ]]; then\n  H=128\nelse\n"
        "  H=1\nfi\ncase $SIZE in\n  70b) L=80 ;;\n  8b|9b) L=32 ;;\n  *) L=0 ;;\nesac\n"
        'if [ -z "$MORE" ]; then EXTRA="--more"; fi\n[[ $NODES -gt 1 ]] && EXTRA="$EXTRA --many"\n'
        "ARGS=(--hidden $H \"--split '9,1'\" --layers $L)\nARGS+=(--world $((NODES * 8)))\n"
        "while [[ $# -gt 0 ]]; do shift; L=9; done\nfor n in 3 4; do ARGS+=(--each $n); done\n"
        "cat <<EOF\n--not here\nEOF\npython tools/prepare.py --one 1\n"
        'srun --mem 4 --nodes=2 bash -c "python train.py ${ARGS[@]} $EXTRA -x 3 --path $1"\n'
    )
    assert {key: value for key, value in found.items() if not key.startswith("$")} == {
        "nodes": "2",
        "hidden": "64",
        "split": "9,1",
        "layers": "32",
        "world": "16",
        "each": "3",
        "more": True,
        "many": True,
        "path": "$1",
    }
    assert found[PROGRAM] == "train.py"
    assert found[NOTES] == [
        "only the first iteration of a loop is read: n = 3",
        "of 2 commands with arguments only the first with most of them is read: train.py; "
        "FILE.sh:NAME reads another of prepare.py, train.py",
    ]


def test_a_command_that_is_printed_and_run_is_one() -> None:
    assert NOTES not in arguments('CMD="python train.py --a 1"\necho $CMD\neval $CMD\n')


def test_tests_of_a_script_that_are_not_known_are_said(tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text(f'if [ "$(hostname)" = big ]; then TP=8; else TP=2; fi\npython a.py {text_of(SMALL)} '
                    "--tensor-model-parallel-size $TP\n")  # fmt: skip
    found = read_run(file, gpus=8)
    assert found.request.tp == 2
    assert found.notes == ('a test of the script has an unknown result, and counts as false: [ "$(hostname)" = big ]',)


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("a.sh", "", "no key of a known framework"),
        ("a.yaml", "- 1\n- 2\n", "is not YAML: it has a list"),
        ("a.yaml", "MODEL_ARGS: [--num-layers, 2]\n", "no key of a known framework"),
        ("a.yaml", "a: &a {--num-layers: 2, --hidden-size: 64}\nMODEL_ARGS:\n  <<: *a\n  --micro-batch-size: 1\n",
         "got MODEL_ARGS.*num_attention_heads|num_attention_heads"),
        ("a.sh", "python a.py --micro-batch-size 1 --hidden-size 1e400 --num-layers 2", "expected a whole number"),
        ("a.sh", "A=(--micro-batch-size 1\npython x.py 'never ends", "no key of a known framework|hidden"),
    ],
)  # fmt: skip
def test_files_that_are_no_runs(tmp_path: Path, name: str, text: str, why: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(UsageError, match=why):
        read_run(file, gpus=1).spec()


def test_a_script_that_grows_without_end_is_refused(tmp_path: Path) -> None:
    lines = ["A=xxxxxxxxxx"] + ["A=$A$A$A$A$A$A$A$A"] * 12
    file = tmp_path / "run.sh"
    file.write_text("\n".join(lines) + "\npython a.py --x $A\n")
    with pytest.raises(UsageError, match="expand to more than"):
        read_run(file)


def test_a_plan_is_written_back_into_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.sh"
    lines = text_of({**SMALL, **LLAMA, "seq-length": 4096, "num-layers": 8}).replace(" --", " \\\n    --")
    file.write_text(f'# mine\nDIST=(--nproc_per_node 8)\nARGS="{lines}"\ntorchrun ${{DIST[@]}} pretrain_gpt.py $ARGS\n')
    whole = forecast(run_from(file)).peak_bytes
    least = forecast(run_from(file, recompute="full")).peak_bytes
    plan = ["plan", "--from", str(file), "--gpu", "h100-80gb", "--budget", str((whole + least) // 2 >> 20) + "MiB"]
    assert jettison([*plan, "--write"]) == 0, capsys.readouterr().err
    text = (tmp_path / "run.planned.sh").read_text()
    assert text.startswith('# mine\nDIST=(--nproc_per_node 8)\nARGS="--')
    again = run_from(tmp_path / "run.planned.sh")
    assert again.recompute != run_from(file).recompute
    assert forecast(again).peak_bytes <= (whole + least) // 2


def test_nothing_is_offloaded_where_everything_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.sh"
    large = {"num-layers": 8, "hidden-size": 8192, "num-attention-heads": 64}
    large |= {"seq-length": 8192, "max-position-embeddings": 8192}
    full = {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1}
    tp = {"tensor-model-parallel-size": 8, "sequence-parallel": True}
    file.write_text(f"python pretrain_gpt.py {text_of({**SMALL, **large, **full, **tp})}\n")
    plan = ["plan", "--from", str(file), "--gpus", "8", "--gpu", "h100-80gb", "--write"]
    assert jettison(plan) == 0, capsys.readouterr().err
    text = (tmp_path / "run.planned.sh").read_text()
    assert "recompute" not in text
    assert "offload" not in text


# Megatron-Bridge, and --yaml-cfg --------------------------------------------------------------------------------------

BRIDGE = """
model:
  _target_: megatron.bridge.models.llama.LlamaModelProvider
  num_layers: 4
  hidden_size: 256
  ffn_hidden_size: 512
  num_attention_heads: 4
  num_query_groups: 2
  gated_linear_unit: true
  activation_func: {_target_: torch.nn.functional.silu, _call_: false}
  normalization: RMSNorm
  add_bias_linear: false
  share_embeddings_and_output_weights: false
  position_embedding_type: rope
  hidden_dropout: 0.0
  attention_dropout: 0.0
  vocab_size: 1000
  seq_length: 128
  tensor_model_parallel_size: 2
  sequence_parallel: true
  virtual_pipeline_model_parallel_size: null
  recompute_granularity: selective
  recompute_modules: [mlp]
train: {micro_batch_size: 2, global_batch_size: 32, train_iters: 5}
optimizer: {lr: 0.1, optimizer: adam, use_distributed_optimizer: true}
ddp: {grad_reduce_in_fp32: true, overlap_grad_reduce: true}
scheduler: {lr_decay_style: cosine}
checkpoint: {save: out, save_interval: 5}
dataset: {seq_length: 128}
mixed_precision: bf16_mixed
"""


def test_a_configuration_of_megatron_bridge(tmp_path: Path, read: Any) -> None:
    file = tmp_path / "run_config.yaml"
    file.write_text(BRIDGE)
    found = read_run(file, gpus=8)
    assert (found.says, found.unread) == ("Megatron-Bridge's configuration", ())
    asked = {name: getattr(found.request, name) for name in found.request.given()}
    assert asked == {
        "seq": 128,
        "micro_batch": 2,
        "micro_batches": 4,
        "tp": 2,
        "sp": True,
        "dp": 4,
        "zero": 1,
        "attention": "flash",
        "precision": "bf16-main32",
        "accumulation": "fused-dummy",
        "loss": "native",
        "dataloader_attention_mask": False,
        "recompute_modules": "mlp",
        "like": "megatron-0.19",
    }
    same = read({**LLAMA, "tensor-model-parallel-size": 2, "hidden-dropout": 0, "attention-dropout": 0}).spec()
    assert found.spec().vocab == 1000  # should_pad_vocab is off there
    assert replace(found.spec(), name="", vocab=1024) == replace(same, name="")


@pytest.mark.parametrize(
    ("old", "new", "field", "value"),
    [
        ("bf16_mixed", "bf16-with-mxfp8-mixed", "fp8_recipe", "mxfp8"),
        ("bf16_mixed", "bf16_with_fp8_current_scaling_mixed", "quant_recipe", "first:1=bf16,last:1=bf16"),
        ("bf16_mixed", "bf16_with_fp8_delayed_scaling_mixed", "fp8_recipe", "delayed:1024"),
        ("grad_reduce_in_fp32: true", "grad_reduce_in_fp32: false", "precision", "bf16-reduce16"),
        ("optimizer: adam,", "optimizer: adam, use_precision_aware_optimizer: true, exp_avg_dtype: torch.bfloat16, "
         "exp_avg_sq_dtype: bfloat16, main_grads_dtype: bf16,", "precision", "bf16-bridge"),
        ("seq_length: 128\n", "seq_length: 128\n  gradient_accumulation_fusion: false\n", "accumulation", "cast"),
    ],
)  # fmt: skip
def test_what_a_field_of_megatron_bridge_becomes(tmp_path: Path, old: str, new: str, field: str, value: Any) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(BRIDGE.replace(old, new, 1))
    assert getattr(read_run(file, gpus=8).request, field) == value


def test_overrides_need_the_model_that_their_recipe_has(tmp_path: Path) -> None:
    file = tmp_path / "overrides.yaml"
    file.write_text("model: {tensor_model_parallel_size: 2}\ntrain: {global_batch_size: 8, train_iters: 3}\n")
    with pytest.raises(UsageError, match=r"no train\.micro_batch_size, which its recipe sets: give --micro-batch 1"):
        read_run(file, gpus=8)
    with pytest.raises(UsageError, match="names no model; give it before --from"):
        read_run(file, gpus=8, asked={"micro_batch": 1}).spec()
    found = read_run(file, gpus=8, asked={"micro_batch": 1}, model="llama3-8b")
    assert (found.request.tp, found.request.dp, found.request.micro_batches, found.request.zero) == (2, 4, 2, 1)
    assert any("settings of the Python recipe" in note for note in found.notes)
    file.write_text("train: {global_batch_size: 8, micro_batch_size: 1, train_iters: 3}\npeft: {dim: 8}\n")
    with pytest.raises(UsageError, match=r"peft\.dim = 8 \(adapters of Megatron-Bridge are not modelled"):
        read_run(file, gpus=8, model="llama3-8b")


def test_what_is_exported_is_read_again(tmp_path: Path) -> None:
    asked = run_from_flags(tp=2, sp=True, pp=2, dp=2, micro_batch=2, micro_batches=4, zero=1, seq=512)
    for name, text in (
        ("overrides.txt", overrides_text(asked, {"recompute_granularity": "selective", "recompute_modules": ["mlp"]})),
        ("flags.txt", flags_text({**layout_settings(asked), "recompute_granularity": "selective",
                                  "recompute_modules": ["mlp"], "bf16": True})),
    ):  # fmt: skip
        file = tmp_path / name
        file.write_text(text)
        again = run_from(file, gpus=8, model="llama3-8b")
        assert again.layout == replace(asked.layout, keeps_received=True), name
        assert (again.micro_batch, again.micro_batches, again.seq) == (2, 4, 512)
        assert again.recompute.modules == ("mlp",)


def run_from_flags(**flags: Any) -> Run:
    return run_of("llama3-8b", RunRequest(like="megatron-0.19", **flags))


def test_fields_in_the_place_of_arguments(tmp_path: Path, read: Any) -> None:
    file = tmp_path / "gpt_config.yaml"
    file.write_text(
        "language_model:\n  num_layers: 4\n  hidden_size: 256\n  num_attention_heads: 4\n  add_bias_linear: false\n"
        "  num_query_groups: 2\n  gated_linear_unit: true\n  activation_func: swiglu\n  ffn_hidden_size: 512\n"
        "  normalization: RMSNorm\nmodel_parallel:\n  tensor_model_parallel_size: 2\n  bf16: true\n"
        "  gradient_accumulation_fusion: true\nmicro_batch_size: 2\nglobal_batch_size: 32\nseq_length: 128\n"
        "max_position_embeddings: 128\nvocab_size: 1000\nposition_embedding_type: rope\ndata_path: null\n"
        "untie_embeddings_and_output_weights: true\nuse_distributed_optimizer: false\n"
    )
    found, same = read_run(file, gpus=8), read({**LLAMA, "tensor-model-parallel-size": 2})
    assert found.says == "Megatron-LM's YAML (--yaml-cfg)"
    assert found.request == same.request
    assert replace(found.spec(), name="") == replace(same.spec(), name="")


def test_megatron_deepspeed_has_deepspeeds_states(tmp_path: Path) -> None:
    file, beside = tmp_path / "run.sh", tmp_path / "ds.json"
    beside.write_text('{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}')
    arguments = text_of({**SMALL, "checkpoint-activations": True, "no-pipeline-parallel": True, "num-experts": 1})
    file.write_text(f"deepspeed --num_gpus 8 pretrain_gpt.py {arguments} --deepspeed --deepspeed_config ds.json\n")
    assert read_run(file).request.dp == 8
    found = read_run(file, gpus=8)
    assert found.says == "Megatron-DeepSpeed's arguments"
    assert {name: getattr(found.request, name) for name in found.request.given()} == {
        "seq": 128,
        "micro_batch": 2,
        "micro_batches": 2,
        "dp": 8,
        "zero": 2,
        "attention": "eager",
        "workspaces": "torch-hopper",
        "precision": "bf16",
        "kernels": "megatron",
        "stack": "megatron-deepspeed",
        "loss": "vocab-parallel",
        "recompute": "full",
        "like": "deepspeed",
    }
    assert run_from(file, gpus=8).layout.zero == 2
    script = file.read_text()
    for blocking, stack in ((1, "megatron-deepspeed-blocking"), (0, "megatron-deepspeed")):
        file.write_text(f"export CUDA_LAUNCH_BLOCKING={blocking}\n{script}")
        assert read_run(file, gpus=8).request.stack == stack
    beside.unlink()
    with pytest.raises(
        UsageError, match=r"deepspeed_config = ds\.json \(the file is missing, and there is no --zero-stage"
    ):
        read_run(file, gpus=8)
    pipeline = text_of({**SMALL, "checkpoint-activations": True, "checkpoint-num-layers": 2})
    words = f"deepspeed x.py {pipeline} --pipeline-model-parallel-size 2 --deepspeed --zero-stage"
    file.write_text(f"{words} 1 --deepspeed_config ds.json\n")
    beside.write_text('{"bf16": {"enabled": true}, "pipeline": {"pipe_partitioned": false}}')
    found = read_run(file, gpus=8).request
    assert (found.pp, found.recompute, found.zero) == (2, "every:2", 1)
    file.write_text(f"{words} 1 --deepspeed_config other.json\n")
    assert any("buckets and offloading that it has are not counted" in note for note in read_run(file, gpus=8).notes)
    file.write_text(f"{words} 1 --deepspeed_config ds.json --cpu-optimizer\n")
    with pytest.raises(UsageError, match=r"cpu-optimizer = true \(CPU offload .* modelled for ZeRO 2 and 3"):
        read_run(file, gpus=8)
    file.write_text(f"{words} 1 --deepspeed_config ds.json --tensor-model-parallel-size 2\n")
    with pytest.raises(UsageError, match=r"pipe-partitioned = false \(tensors that are sent unpartitioned"):
        read_run(file, gpus=8)
    file.write_text(f"{words} 2 --deepspeed_config ds.json\n")
    with pytest.raises(UsageError, match="DeepSpeed's pipelines take ZeRO 0 and 1"):
        read_run(file, gpus=8)
    file.write_text(f"deepspeed x.py {arguments} --deepspeed --zero-stage 1 --moe-expert-parallel-size 4\n")
    with pytest.raises(UsageError, match="experts of Megatron-DeepSpeed are not modelled"):
        read_run(file, gpus=8)
    none = "--num-experts 1 --moe-expert-parallel-size 1 --ds-sequence-parallel-size"
    file.write_text(f"deepspeed x.py {arguments} --deepspeed --zero-stage 1 {none} 1\n")
    read_run(file, gpus=8)
    file.write_text(f"deepspeed x.py {arguments} --deepspeed --zero-stage 1 {none} 2\n")
    with pytest.raises(UsageError, match="DeepSpeed's sequence parallelism is not modelled"):
        read_run(file, gpus=8)


def test_arguments_of_older_versions(read: Any) -> None:
    old = {"activations-checkpoint-method": "uniform", "DDP-impl": "local", "data-impl": "mmap"}
    assert read(old).request.recompute == "full"
    assert read({"checkpoint-activations": True}).request.recompute == "full"
    assert read({"checkpoint-activations": True, "checkpoint-num-layers": 2}).request.recompute == "every:2"
    with pytest.raises(UsageError, match="checkpoints sharded over ranks"):
        read({"distribute-checkpointed-activations": True})
    for key, impl, attention in (
        ("lr", None, "flash"),
        ("data-impl", None, "eager"),
        ("data-impl", "transformer_engine", "flash"),
    ):
        found = read({key: "mmap" if key == "data-impl" else 1} | ({} if impl is None else {"transformer-impl": impl}))
        assert found.request.attention == attention
        assert any("before September 2023" in note for note in found.notes) is (attention == "eager")


PRINTED = """
using world size: 8, data-parallel size: 2, context-parallel size: 1 ...
[default0]:------------------------ arguments ------------------------
[default0]:  add_bias_linear ................................. False
  add_position_embedding .......................... True
  attention_backend ............................... AttnBackend.auto
  attention_dropout ............................... 0.0
  bf16 ............................................ True
  create_attention_mask_in_dataloader ............. False
  cross_entropy_loss_fusion ....................... True
  encoder_num_layers .............................. 4
  ffn_hidden_size ................................. 512
  fp8 ............................................. None
  global_batch_size ............................... 32
  gradient_accumulation_fusion .................... False
  group_query_attention ........................... True
  hidden_dropout .................................. 0.0
  hidden_size ..................................... 256
  img_h ........................................... 224
  max_position_embeddings ......................... 128
  micro_batch_size ................................ 2
  normalization ................................... RMSNorm
  num_attention_heads ............................. 4
  num_layers ...................................... 4
  num_query_groups ................................ 2
  pipeline_model_parallel_size .................... 2
  position_embedding_type ......................... rope
  recompute_granularity ........................... full
  recompute_method ................................ uniform
  recompute_num_layers ............................ 2
  seq_length ...................................... 128
  sequence_parallel ............................... True
  swiglu .......................................... True
  tensor_model_parallel_size ...................... 2
  transformer_impl ................................ transformer_engine
  untie_embeddings_and_output_weights ............. True
  use_distributed_optimizer ....................... True
  world_size ...................................... 8
-------------------- end of arguments ---------------------
 > padded vocab (size: 1000) with 24 dummy tokens (new size: 1024)
"""


def test_arguments_that_a_log_has(tmp_path: Path, read: Any) -> None:
    """The same as those that were typed; the vocabulary's size is that after padding."""
    (tmp_path / "train.log").write_text(PRINTED)
    found = read_run(tmp_path / "train.log")
    typed = read(
        LLAMA
        | {
            "vocab-size": 1024,
            "make-vocab-size-divisible-by": 1,
            "hidden-dropout": 0,
            "attention-dropout": 0,
            "tensor-model-parallel-size": 2,
            "pipeline-model-parallel-size": 2,
            "sequence-parallel": True,
            "no-create-attention-mask-in-dataloader": True,
            "cross-entropy-loss-fusion": True,
            "no-gradient-accumulation-fusion": True,
            "recompute-granularity": "full",
            "recompute-method": "uniform",
            "recompute-num-layers": 2,
            "use-distributed-optimizer": True,
        }
    )
    assert (found.gpus, found.unread, found.request, found.config) == (8, (), typed.request, typed.config)
    assert found.request.recompute == "every:2" and found.config["mlp_bias"] is False


def test_what_a_log_does_not_say(tmp_path: Path) -> None:
    """Versions without TransformerEngine do not print it; what is on and not modelled is refused."""
    log = tmp_path / "train.out"
    log.write_text(PRINTED.replace("  transformer_impl ................................ transformer_engine\n", ""))
    assert read_run(log).request.attention == "eager"
    for value, noted in (("False", True), ("True", False)):
        log.write_text(PRINTED.replace("  world_size", f"  use_contiguous_buffers_in_ddp ... {value}\n  world_size"))
        assert any("gradients of the step before stay" in note for note in read_run(log).notes) is noted
    log.write_text(PRINTED.replace("  world_size", "  num_experts ... [1]\n  world_size"))  # Megatron-DeepSpeed's
    assert not read_run(log).unread
    for printed, why in (("optimizer_cpu_offload ... True", "CPU offload"), ("deepspeed ... True", "give its script")):
        log.write_text(PRINTED.replace("  world_size", f"  {printed}\n  world_size"))
        with pytest.raises(UsageError, match=why):
            read_run(log)


def test_a_log_is_not_written_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.log").write_text(PRINTED)
    assert jettison(["plan", "--from", str(tmp_path / "train.log"), "--budget", "70GiB", "--write"]) == 2
    assert "give the launch script as --from" in capsys.readouterr().err


def test_the_last_run_of_a_log_counts(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(PRINTED + PRINTED.replace("full\n", "None\n").replace("new size: 1024", "new size: 2048"))
    found = read_run(log)
    assert (found.request.recompute, found.spec().vocab) == (None, 2048)
    assert found.notes == ("of 2 runs in this log the last is read",)
    log.write_text(PRINTED * 2)
    assert not read_run(log).notes
