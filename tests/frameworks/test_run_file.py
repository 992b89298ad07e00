"""Runs read from frameworks' own files: every key is read, harmless, or refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import jettison
from jettison.cli.from_file import said
from jettison.cli.main import run
from jettison.core.errors import UsageError
from jettison.frameworks.config_file import MOST_KEYS, read_config_file
from jettison.frameworks.run_file import flags_of, is_run_file, read_run, run_from, tables
from jettison.frameworks.shell_script import NOTES, SOURCED, arguments
from jettison.request.options import RunRequest

TITAN = """
# a comment
[model]
name = "llama3"
flavor = "8B"

[training]
seq_len = 4096
local_batch_size = 2

[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 2

[activation_checkpoint]
mode = "full"
"""


@pytest.fixture
def titan(tmp_path: Path) -> Path:
    file = tmp_path / "run.toml"
    file.write_text(TITAN)
    return file


def test_a_file_is_the_command_that_it_prints(titan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ledger", "--from", str(titan), "--gpus", "8", "--format", "json", "--no-entries"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    command = found["from"]["command"]
    assert f"the same as: {command}" in printed.err
    assert run([*command.split()[1:], "--format", "json", "--no-entries"]) == 0
    typed = json.loads(capsys.readouterr().out)
    assert typed.pop("from") is None
    assert found.pop("from")["framework"] == "torchtitan"
    assert found == typed


def test_settings_that_a_verb_decides_are_marked(titan: Path) -> None:
    found = read_run(titan, gpus=8)
    marked = [line for line in said(found, "plan", replace(found.request, recompute=None)) if "not used" in line]
    assert marked == ["  --recompute full (not used: plan decides)  from  activation_checkpoint.mode = full"]
    assert not any("not used" in line for line in said(found, "ledger", found.request))


def test_flags_count_before_the_file_and_sizes_follow_them(titan: Path) -> None:
    assert read_run(titan, gpus=8).request.dp == 4
    found = read_run(titan, gpus=8, asked={"tp": 4, "recompute": "none"}).request
    assert (found.tp, found.dp, found.recompute) == (4, 2, "none")
    assert run_from(titan, gpus=8, tp=4) == jettison.run_from(str(titan), gpus=8, tp=4)


def test_replicas_that_the_command_line_says_are_devices(titan: Path) -> None:
    found = read_run(titan, asked={"dp": 8})
    assert (found.request.dp, found.gpus) == (8, 16)
    with pytest.raises(UsageError, match="got 8 GPUs and 16 ranks of --dp"):
        read_run(titan, gpus=8, asked={"dp": 8})


def test_a_mode_on_the_command_line_stands_for_a_files_list_of_modules() -> None:
    """And the other way round; a search prints modes, which are given beside the file."""
    script = Path(__file__).parents[2] / "examples" / "from" / "pretrain.sh"
    assert run_from(script).recompute == run_from(script, recompute="selective").recompute
    for mode in ("full", "none", "modules:mlp"):
        assert str(run_from(script, recompute=mode).recompute) == mode
    assert str(run_from(script, recompute_modules="mlp").recompute) == "modules:mlp"
    assert run(["estimate", "--from", str(script), "--gpu", "a100-80gb", "--recompute", "full"]) == 0


def test_an_unknown_key_is_refused_by_name(titan: Path) -> None:
    titan.write_text(TITAN.replace("seq_len", "hyper_drive = true\nseq_len"))
    with pytest.raises(UsageError, match=r"training\.hyper_drive = true \(unknown key\).*--allow-unread"):
        read_run(titan, gpus=8)
    found = read_run(titan, gpus=8, allow_unread=True)
    assert [key.name for key in found.unread] == ["training.hyper_drive"]
    titan.write_text(TITAN.replace("seq_len", "hyper_drive = false\nseq_len"))
    assert read_run(titan, gpus=8).unread == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TITAN.replace("4096", "40.5"), r"training\.seq_len = 40\.5; expected a whole number"),
        (TITAN.replace("[model]", "[model"), "is not TOML"),
        ("[nothing]\nx = 1\n", "no key of a known framework; expected torchtitan"),
        (TITAN.replace("full", "some"), r"activation_checkpoint\.mode = some \(expected one of"),
    ],
)
def test_what_cannot_be_read_says_why(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_run(file, gpus=8)


def test_devices_that_nobody_says_or_that_are_not_divided(titan: Path) -> None:
    with pytest.raises(UsageError, match="give --gpus"):
        read_run(titan)
    with pytest.raises(UsageError, match=r"got 9 GPUs .*; expected a multiple of 2 \(tp 2\)"):
        read_run(titan, gpus=9)
    with pytest.raises(UsageError, match="No such file"):
        read_run(titan.parent / "none.toml")


@pytest.mark.parametrize("gpus", [0, -2])
def test_a_run_has_at_least_one_gpu(titan: Path, gpus: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ledger", "--from", str(titan), "--gpus", str(gpus)]) == 2
    assert f"got --gpus {gpus}; expected 1 or more" in capsys.readouterr().err


def test_a_models_config_is_given_as_the_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 64}')
    with pytest.raises(UsageError, match="which has a model and no run; expected it as MODEL: jettison ledger"):
        read_run(tmp_path / "config.json")


def test_flags_of_a_file_need_the_file(titan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ledger", "gpt2", "--gpus", "8"]) == 2
    assert "got --gpus 8 without --from" in capsys.readouterr().err
    assert run(["ledger"]) == 2
    assert "--from FILE" in capsys.readouterr().err
    assert run(["ledger", str(titan)]) == 2
    assert "ledger --from" in capsys.readouterr().err


def test_a_request_as_typed() -> None:
    request = RunRequest(seq=8, sp=False, offload=True, recompute="full")
    assert list(flags_of(request)) == ["--seq", "8", "--no-sp", "--recompute", "full", "--offload"]


@pytest.mark.parametrize(("first", "later"), [("{x: 1, y: 2}", "{{l: {0}, r: {0}}}"), ("[1, 2]", "[{0}, {0}]")])
def test_aliases_of_yaml_do_not_multiply(tmp_path: Path, first: str, later: str) -> None:
    lines = [f"a0: &a0 {first}", *(f"a{n}: &a{n} " + later.format(f"*a{n - 1}") for n in range(1, 40))]
    file = tmp_path / "bomb.yaml"
    file.write_text("\n".join(lines))
    with pytest.raises(UsageError, match=f"more than {MOST_KEYS:,} keys"):
        read_config_file(file)


def test_arguments_of_a_script(tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text(
        "#!/bin/bash\n"
        "TP=2  # ranks\n"
        'SIZES="--hidden-size 64 \\\n  --layers ${LAYERS:-4}"\n'
        "ARGS=(\n    --tp-size $TP\n    # --off 1\n    --modules one two\n    --name='a b'\n)\n"
        "torchrun --nproc_per_node 8 train.py $SIZES ${ARGS[@]} --bf16 --lr=-1 > log.txt\n"
    )
    found = {key: value for key, value in read_config_file(file).values.items() if not key.startswith("$")}
    assert found == {
        "nproc_per_node": "8",
        "hidden-size": "64",
        "layers": "4",
        "tp-size": "2",
        "modules": ["one", "two"],
        "name": "a b",
        "bf16": True,
        "lr": "-1",
    }


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("python t.py --a 1 `# why` \\\n --b 2\n", {"a": "1", "b": "2"}),
        ("N=3\nrun() {\n  local M=$1\n  python t.py --a $N --b $M\n}\nN=5\nrun 4\n", {"a": "5", "b": "4"}),
        ("function run { python t.py --a ${1:-2}; }\nrun 4 | tee log\n", {"a": "4"}),
        ("run()\n{\n  if true; then\n    python t.py --a 1\n  fi\n}\n", {"a": "1"}),
        ("run() { run; run; }\nrun\npython t.py --a 1\n", {"a": "1"}),
        (": ${N:=4}\npython t.py --a $N\n", {"a": "4"}),
        ("N=3\nunset N\npython t.py --a ${N:-7}\n", {"a": "7"}),
        ("USE=true\nif $USE; then N=1; else N=2; fi\npython t.py --a $N\n", {"a": "1"}),
        ("python t.py --a 1 | tee --append log\n", {"a": "1"}),
        ("python t.py --a $((10#08))\n", {"a": "$((10#08))"}),
        ("cd x || exit 1\npython t.py --a 1\nexit 0\npython t.py --a 2 --b 3\n", {"a": "1"}),
        ("[ -f x ] || exit 1\nif [ -f y ]; then A=1; else exit; fi\npython t.py --a 1\n", {"a": "1"}),
        (
            'A=" \\\n --a 1 \\\n"\n# --c 3 \\\nB="--b 2"\npython t.py $A $B\n',
            {"a": "1", "b": "2"},
        ),  # no backslash continues a comment
        ('python t.py --a="x y" \\\n --b 2 \\', {"a": "x y", "b": "2"}),  # the last backslash continues nothing
        ("srun --label sing exec -B $PWD:/w ./run.sh t.py --a 1\n", {"a": "1"}),
        ("srun --x 1 bash -c 'numactl --membind=0 nsys profile --force true python t.py --a 1'\n", {"a": "1"}),
        ("while true; do python t.py --a 1; sleep 9; done\n", {"a": "1"}),
        (
            "#SBATCH -N 4\n#SBATCH --gres=gpu:h100:8\n#SBATCH --time=09:00:00\npython t.py --a $SLURM_NNODES\n",
            {"nodes": "4", "gpus-per-node": "8", "a": "4"},
        ),
    ],
)
def test_what_a_shell_would_do(text: str, wanted: dict[str, str]) -> None:
    assert {key: value for key, value in arguments(text).items() if not key.startswith("$")} == wanted


def test_what_only_a_run_would_know_is_said() -> None:
    found = arguments('source ours.sh\nif have gpus; then A=1; fi\npython t.py --lr $LR --a 1 $MORE "$@"\n')
    assert found[NOTES] == [
        "a test of the script has an unknown result, and counts as false: have gpus",
        "arguments in a variable that the script does not set are omitted: $MORE",
    ]


def test_sourced_files_are_read_where_they_lie_beside(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "sizes.sh").write_text("source more.sh\nHIDDEN=64 # ours\n")
    (tmp_path / "more.sh").write_text(
        ". ./more.sh\nLAYERS=2\nrun() { python t.py --h $HIDDEN --l $LAYERS --a ${A:-3}; }\n"
    )
    file = tmp_path / "run.sh"
    file.write_text(
        "source ~/.bashrc\n. /opt/venv/bin/activate\nHERE=$(cd $(dirname $0) && pwd)\n"
        'source "$(dirname "$0")/conf/sizes.sh" 8b\n. ${HERE}/env.sh\nrun\n'
    )
    values = read_config_file(file).values
    assert {name: values[name] for name in "hla"} == {"h": "64", "l": "2", "a": "3"}
    assert values[SOURCED] == ["env.sh"]
    assert "conf/sizes.sh, which the script sources, is read too" in values[NOTES]


def test_a_flag_that_a_refusal_asks_for_is_enough(tmp_path: Path) -> None:
    file = tmp_path / "run.args"
    file.write_text(
        "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32 --bf16 "
        "--vocab-size 128 --micro-batch-size 1 --global-batch-size 8 --reset-attention-mask"
    )
    with pytest.raises(UsageError, match=r"reset-attention-mask = true .*give --packed"):
        read_run(file, gpus=8)
    found = read_run(file, gpus=8, asked={"packed": 16})
    assert (found.request.packed, found.unread) == (16, ())
    assert {key.name: key.why for key in found.used}["reset-attention-mask"] == "the command line says it"


def test_a_template_is_said_to_be_one(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("tokenizer:\n  path: {{folder}}/tokenizer.model\n")
    with pytest.raises(UsageError, match=r"is not YAML: it is a template: fill in \{\{folder\}\}"):
        read_config_file(file)


def test_a_framework_in_another_syntax_is_named(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("args = SFTConfig(per_device_train_batch_size=2, max_length=512)\n")
    with pytest.raises(UsageError, match="arguments of a TRL trainer in python; expected yaml, json, arguments"):
        read_run(file)


def test_references_of_yaml_to_its_own_keys(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "out: /data\nn: 4\nflag: true\nsizes: {h: 64, twice: '${.h}', deep: {up: '${..h}'}}\nagain: ${sizes}\n"
        "also: ${again}\npath: ${out}/logs-${n}-${flag}\nwhole: ${n}\nlisted: ['${n}', x]\nfirst: '${listed[0]}'\n"
        "round: ${back}\nback: ${round}\n"
        "missing: ${nothing}/x\nhome: ${oc.env:HOME}\ninner: ${out${n}}\n"
    )
    values = read_config_file(file).values
    sizes = {"h": 64, "twice": 64, "deep.up": 64}
    for table in ("sizes", "again", "also"):
        assert {key: values[f"{table}.{key}"] for key in sizes} == sizes
    assert (values["path"], values["whole"], values["listed"], values["first"]) == ("/data/logs-4-true", 4, [4, "x"], 4)
    for left in ("round", "back", "missing", "home"):
        assert "${" in values[left]
    chain = [f"a{n}: '${{a{n - 1}}}${{a{n - 1}}}'" for n in range(1, 30)]
    file.write_text("\n".join(["a0: text", *chain]))
    with pytest.raises(UsageError, match="references expand"):
        read_config_file(file)


def test_tables_name_fields_of_a_request() -> None:
    for table in tables():
        given = [*table.get("keys", {}).values(), *table.get("usual", {}), *table.get("first", {})]
        for words in (table.get("on", {}), *table.get("words", {}).values()):
            given += [field for said in words.values() if isinstance(said, dict) for field in said]
        given = [name for name in given if name != "note"]
        for field in given:
            assert field in RunRequest.__dataclass_fields__, (table["framework"], field)
        assert {"says", "syntaxes"} <= table.keys()


def test_a_trainers_json_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where it is meant as a further file."""
    (tmp_path / "zero.json").write_text('{"zero_optimization": {"stage": 2}}')
    assert run(["ledger", str(tmp_path / "zero.json")]) == 2
    assert "each further file takes a --from of its own" in capsys.readouterr().err


def test_a_script_that_starts_what_a_file_says(titan: Path) -> None:
    script = titan.with_name("run.sh")
    launch = "srun -N 2 --ntasks-per-node 1 torchrun --nproc_per_node 4 --role rank --tee 3"
    script.write_text(f"{launch} -m train --job.config_file ./{titan.name} --training.local_batch_size 3\n")
    found, alone = read_run(script), read_run(titan, gpus=8)
    assert (found.path, found.gpus, found.request.micro_batch) == (titan, 8, 3)
    assert replace(found.request, micro_batch=alone.request.micro_batch) == alone.request
    assert any("its arguments count: training.local_batch_size" in note for note in found.notes)
    assert not found.writes
    assert "alone as --from" in found.by_hand
    script.with_name("own.yaml").write_text("own: 1\n")
    for text, why in (
        (f"python own.py --text {'x' * 300} --other '\\0'", "no key of a known framework"),
        (
            "tune run full_finetune_distributed --config llama3/8B_full batch_size=4",
            "names the configuration llama3/8B_",
        ),
        ("deepspeed --module own --config own.yaml --only", "no key of a known framework"),
        (
            "accelerate launch train.py recipes/none.yaml --model_name_or_path gpt2 --block_size 8",
            "whose keys count as",
        ),
    ):
        script.write_text(text)
        with pytest.raises(UsageError, match=why):
            read_run(script)


@pytest.mark.parametrize(
    ("command", "gpus"),
    [
        ("accelerate launch --num_processes 4 --num_machines 2 -m axolotl.cli.train run.yml --micro_batch_size=8", 4),
        ("torchrun --nnodes 2 --nproc-per-node 2 -m axolotl.cli.train ./run.yml --micro-batch-size 8", 4),
        ("axolotl train run.yml --micro-batch-size 8", 1),
    ],
)
def test_arguments_over_a_file_without_an_option(tmp_path: Path, command: str, gpus: int) -> None:
    (tmp_path / "run.yml").write_text(
        "base_model: gpt2\nsequence_len: 64\nmicro_batch_size: 2\nflash_attention: true\n"
    )
    (tmp_path / "run.sh").write_text(command)
    found = read_run(tmp_path / "run.sh")
    assert (found.request.micro_batch, found.request.seq, found.gpus) == (8, 64, gpus)


def test_a_file_without_a_suffix(titan: Path) -> None:
    file = titan.with_name("stdin")
    for text, syntax in (
        (TITAN, "toml"),
        ('{"base_model": "gpt2", "micro_batch_size": 2}', "json"),
        ("base_model: gpt2\nmicro_batch_size: 2\n", "yaml"),
        ("import trl\ntrl.SFTConfig()\n", "python script"),
        ("#!/bin/sh\nA=1\n", "arguments"),
        ("trl sft --max_length 8", "arguments"),
    ):
        file.write_text(text)
        assert read_config_file(file).syntax == syntax


def test_a_models_config_is_no_run(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "gpt2"}')
    assert not is_run_file(str(file))


def test_export_of_a_run_is_the_export_of_its_plan(
    titan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = ["--gpus", "8", "--gpu", "a100-40gb"]
    assert run(["export", "--from", str(titan), *gpu, "--to", "torchtitan"]) == 0
    directly = capsys.readouterr().out
    plan = str(tmp_path / "plan.json")
    assert run(["plan", "--from", str(titan), *gpu, "--out", plan]) == 0
    capsys.readouterr()
    assert run(["export", plan, "--to", "torchtitan"]) == 0
    assert capsys.readouterr().out == directly
    assert run(["export", plan, "--from", str(titan), *gpu, "--to", "torchtitan"]) == 2
    assert run(["export", "--to", "torchtitan"]) == 2
    assert "--from FILE of a trainer" in capsys.readouterr().err
