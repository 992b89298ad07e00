"""A framework's file written again: the keys of recomputation alone are other ones, and comments stay."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from jettison.cli.main import run
from jettison.cli.plan import PlanFlags, plan
from jettison.core.errors import DoesNotFit, UsageError
from jettison.frameworks.config_file import ConfigFile, read_config_file
from jettison.frameworks.run_file import read_run, run_from
from jettison.frameworks.write_back import _other_key, edited, write_back
from jettison.predict.time import estimate
from jettison.report.plan import ForecastPlan
from jettison.spec.hardware import hardware

TITAN = """# top
[model]
name = "llama3"
flavor = "8B"

[training]
seq_len = 8192   # tokens
local_batch_size = 1

[activation_checkpoint]
mode = "selective"   # why
"""


def test_the_fastest_that_fits_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, back = tmp_path / "run.toml", tmp_path / "run.planned.toml"
    file.write_text(TITAN)
    command = ["plan", "--from", str(file), "--gpus", "8", "--gpu", "a100-40gb", "--write"]
    assert run(command) == 0
    assert "lost against the plan" in capsys.readouterr().err
    assert back.read_text() == TITAN.replace('"selective"', '"full"')
    assert file.read_text() == TITAN
    assert read_run(back, gpus=8).request.recompute == "full"
    assert run(command) == 2
    assert "is there already" in capsys.readouterr().err
    assert run([*command, "--force"]) == 0


def test_nothing_that_can_be_said_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.toml"
    file.write_text(TITAN)
    least = json_of(capsys, "plan", "--from", str(file), "--gpus", "8", "--budget", "60GiB")["minimum_budget_bytes"]
    command = ["plan", "--from", str(file), "--gpus", "8", "--budget", f"{least}B", "--write"]
    assert run(command) == 3
    assert "the least of the" in capsys.readouterr().err
    assert not (tmp_path / "run.planned.toml").exists()
    assert run(["plan", "llama3-8b", "--budget", "60GiB", "--write"]) == 2


def test_settings_that_may_fit_are_written_where_none_surely_does(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(TITAN)
    found = read_run(file, gpus=8)
    planned = plan(found.model_argument, replace(found.request, recompute=None), PlanFlags(gpu="a100-40gb"))
    assert isinstance(planned, ForecastPlan)
    tight = replace(planned.choice, budget_bytes=1)
    with pytest.raises(DoesNotFit):
        write_back(found, tight)
    assert write_back(found, tight, limit=planned.limit).changed == {"activation_checkpoint.mode": "full"}


def json_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert run([*arguments, "--format", "json"]) == 0
    return json.loads(capsys.readouterr().out)


NAMES = st.sampled_from(["mode", "lr", "x_y", "full", "a", "zeta"])
LISTS = st.lists(st.integers(0, 9), min_size=1, max_size=2)
LEAVES = st.one_of(
    st.booleans(),
    st.integers(-9, 99),
    st.sampled_from(["text", "a b", "#no", "8"]),
    st.lists(st.integers(0, 9), min_size=1, max_size=2),
)
TREES = st.dictionaries(NAMES, st.one_of(LEAVES, st.dictionaries(NAMES, LEAVES, min_size=1)), min_size=1)
VALUES = st.one_of(st.booleans(), st.integers(0, 99), st.sampled_from(["full", "op: x"]))


def values_of(text: str, syntax: str, folder: Path) -> dict[str, Any]:
    path = folder / f"file.{syntax}"
    path.write_text(text)
    return dict(read_config_file(path).values)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


@given(tree=TREES, key=NAMES, inner=st.one_of(st.none(), NAMES), value=st.one_of(st.none(), VALUES))
def test_yaml_and_json_change_at_one_key(folder: Path, tree: Any, key: str, inner: str | None, value: Any) -> None:
    name = key if inner is None else f"{key}.{inner}"
    for syntax, text in (
        ("yaml", "# first\n" + yaml.safe_dump(tree, sort_keys=False) + "# last\n"),
        ("yaml", yaml.safe_dump(tree, default_flow_style=True)),
        ("json", json.dumps(tree, indent=2)),
    ):
        if "&id" in text:
            continue
        before = values_of(text, syntax, folder)
        file = ConfigFile(path=folder / "x", text=text, syntax=syntax, values=before)
        wanted = {k: v for k, v in before.items() if k != name and not k.startswith(f"{name}.")}
        wanted |= {} if value is None else {name: value}
        if not wanted:
            continue  # no file of keys is left
        try:
            changed = edited(file, {name: value})
        except UsageError as error:
            assert "cannot be changed in place" in str(error)
            assert isinstance(tree.get(key), dict) if inner is None else key in tree
            continue
        found = values_of(changed, syntax, folder)
        assert {k: v for k, v in found.items() if v not in ({}, None)} == {
            k: v for k, v in wanted.items() if v not in ({}, None)
        }
        assert changed.count("# ") >= text.count("# ")


@given(
    tree=st.dictionaries(NAMES, st.dictionaries(NAMES, LEAVES, min_size=1), min_size=1),
    section=NAMES,
    key=NAMES,
    value=st.one_of(st.none(), VALUES),
)
def test_toml_changes_at_one_key(folder: Path, tree: Any, section: str, key: str, value: Any) -> None:
    lines = ["# first"]
    for name, table in tree.items():
        lines += [f"[{name}]", *(f"{k} = {json.dumps(v)}  # {k}" for k, v in table.items()), ""]
    text = "\n".join(lines)
    file = ConfigFile(path=folder / "x", text=text, syntax="toml", values={})
    changed = tomllib.loads(edited(file, {f"{section}.{key}": value}))
    wanted = {name: dict(table) for name, table in tree.items()}
    if value is None:
        wanted.get(section, {}).pop(key, None)
    else:
        wanted.setdefault(section, {})[key] = value
    assert changed == wanted


@pytest.mark.parametrize(
    ("text", "changes", "wanted"),
    [
        ("--a 1 --tp 2\n", {"tp": "4"}, "--a 1 --tp 4\n"),
        ("ARGS=(\n  --a 1\n  --tp 2 # two\n)\n", {"tp": None, "b": True}, "ARGS=(\n  --b --a 1\n   # two\n)\n"),
        ("x --mods one two \\\n  --z", {"mods": ["three"]}, "x --mods three \\\n  --z"),
        ("x --tp=2 --tp-x 3", {"tp": "4"}, "x --tp 4 --tp-x 3"),
        ('x --a "selective" \\\n  --z', {"a": None, "b": "full"}, "x  \\\n  --b full --z"),
        ('A="--a full " B="--z"', {"a": "none"}, 'A="--a none " B="--z"'),
        ("# was --tp 1\nx --a '#1' --tp 2\n", {"tp": "4"}, "# was --tp 1\nx --a '#1' --tp 4\n"),
    ],
)
def test_arguments_change_where_they_are(text: str, changes: dict[str, Any], wanted: str) -> None:
    file = ConfigFile(path=Path("x.sh"), text=text, syntax="arguments", values={})
    assert edited(file, changes) == wanted


@pytest.mark.parametrize(
    ("text", "changes", "wanted"),
    [
        ("a: &one 1\nb: *one\nc: 2\n", {"b": 3}, "a: &one 1\nb: 3\nc: 2\n"),
        ("{a: &one 1, b: *one}\n", {"b": 3}, "{a: &one 1, b: 3}\n"),
        ("d: &all {a: 1}\nr:\n  <<: *all\n", {"r.a": 3}, "d: &all {a: 1}\nr:\n  a: 3\n  <<: *all\n"),
        ("a: 1\r\nb: 2\r\n", {"c": 3}, "c: 3\r\na: 1\r\nb: 2\r\n"),
    ],
)
def test_names_for_values_stay(text: str, changes: dict[str, Any], wanted: str) -> None:
    assert edited(ConfigFile(path=Path("x.yaml"), text=text, syntax="yaml", values={}), changes) == wanted


def test_tabs_of_json() -> None:
    file = ConfigFile(path=Path("x.json"), text='{\n\t"a": 1,\n\t"b": 2\n}', syntax="json", values={})
    assert edited(file, {"b": True, "c": 3}) == '{\n\t"c": 3,\n\t"a": 1,\n\t"b": true\n}'


def test_a_value_that_others_name_is_changed_by_hand() -> None:
    for value in (3, None):
        with pytest.raises(UsageError, match="the key a is written in a way that cannot be changed in place"):
            edited(ConfigFile(path=Path("x.yaml"), text="a: &one 1\nb: *one\n", syntax="yaml", values={}), {"a": value})


def test_nothing_else_may_change(tmp_path: Path) -> None:
    before = tmp_path / "before.yaml"
    before.write_text("a: 1\nb: {c: 2}\nd: 3\n")
    for text, said in (
        ("a: 1\nb: {c: 9}\nd: 3\n", ""),
        ("a: 2\nd: 3\n", "a"),
        ("a: 1\nd: 3\ne: 4\n", "e"),
        ("[", "b.c"),
    ):
        assert _other_key(before, text, {"b.c": 9}) == said


def test_settings_that_the_files_have_together_change_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_text = "model_name_or_path: llama3.1-8b\nmax_length: 4096\nper_device_train_batch_size: 1\nbf16: true\n"
    Path("sft.yaml").write_text(f"{run_text}gradient_checkpointing: false\n")
    Path("fsdp.yaml").write_text(
        "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 8\n"
        "fsdp_config: {fsdp_version: 2, fsdp_activation_checkpointing: true}\n"
    )
    files = ["--from", "sft.yaml", "--from", "fsdp.yaml"]
    assert run(["plan", *files, "--gpu", "h100-80gb", "--budget", "22GiB", "--write"]) == 0
    assert "nothing had to change: --recompute full" in capsys.readouterr().err
    assert Path("sft.planned.yaml").read_text() == Path("sft.yaml").read_text()


def test_an_anchored_step_is_priced_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, anchor = tmp_path / "run.toml", str(tmp_path / "anchor.toml")
    file.write_text(TITAN)
    on = ["--gpus", "8", "--gpu", "h100-80gb"]
    assert run(["calibrate", "--from", str(file), *on, "--measured", "step=1.5s", "--out", anchor]) == 0
    found = read_run(file, gpus=8, asked={"anchor": anchor})
    made = plan(found.model_argument, replace(found.request, recompute=None), PlanFlags(gpu="h100-80gb"))
    assert isinstance(made, ForecastPlan)
    written = write_back(found, made.choice)
    back = tmp_path / "back.toml"
    back.write_text(written.text)
    again = run_from(back, gpus=8, anchor=anchor)
    assert written.step_seconds == pytest.approx(estimate(again, hardware("h100-80gb")).step_seconds, rel=1e-9)


def test_a_file_whose_layers_are_compiled_is_planned_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bytes of compiled layers, seconds of fused kernels; what is written back takes what the file then takes."""
    file = tmp_path / "run.toml"
    file.write_text((Path(__file__).parents[2] / "examples" / "from" / "pretrain.toml").read_text())
    on, js = ["--gpus", "64", "--gpu", "h100-80gb"], ["--format", "json"]
    assert run(["plan", "--from", str(file), *on, *js, "--write", "--out", str(tmp_path / "plan.json")]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["made_by"]["compile"]
    command = plan["from"]["command"].replace("ledger", "plan").replace("--recompute full ", "").split()[1:]
    assert run([*command, *on[2:], *js]) == 0
    again = json.loads(capsys.readouterr().out)
    assert (again["hash"], again["predicted"]) == (plan["hash"], plan["predicted"])
    command.remove("--compile")
    assert run([*command, *on[2:], *js]) == 0
    assert json.loads(capsys.readouterr().out)["predicted"]["step_seconds"] > plan["predicted"]["step_seconds"]
    assert run(["export", str(tmp_path / "plan.json"), "--to", "torchtitan", *js]) == 0
    assert json.loads(capsys.readouterr().out)["cost"]["plan"]["step_seconds"] == plan["predicted"]["step_seconds"]


@pytest.mark.parametrize("prefix", ["", "fit."])
def test_lightning_recomputes_the_layers_that_it_wraps(tmp_path: Path, prefix: str) -> None:
    inside = 2 * " " if prefix else ""
    strategy = "lightning.pytorch.strategies.FSDPStrategy, init_args: {auto_wrap_policy: [my.Block]}"
    lines = [
        "trainer:",
        f"  devices: 8\n{inside}  precision: bf16-mixed\n{inside}  strategy: {{class_path: {strategy}}} # ours",
        "model: {class_path: my.Module, init_args: {model_name_or_path: llama3-8b}}",
        "data: {class_path: my.Data, init_args: {batch_size: 4, max_length: 8192}}",
    ]
    file = tmp_path / "run.yaml"
    file.write_text(("fit:\n" if prefix else "") + "".join(f"{inside}{line}\n" for line in lines))
    for budget, changed in (("75GiB", True), ("275GiB", False)):
        found = read_run(file)
        planned = plan(found.model_argument, found.request, PlanFlags(gpu="b300-288gb", budget=budget))
        assert isinstance(planned, ForecastPlan)
        made = write_back(found, planned.choice)
        key = f"{prefix}trainer.strategy.init_args.activation_checkpointing_policy"
        assert made.changed == ({key: ["my.Block"]} if changed else {})
        assert made.text.count("# ours") == 1
        assert (made.text == file.read_text()) is not changed


def test_what_to_set_where_a_file_has_no_settings(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model_name: tiny-llama-1.1b\nprecision: bf16-mixed\ndevices: 8\ntrain: {micro_batch_size: 4}\n")
    found = read_run(file)
    planned = plan(found.model_argument, replace(found.request, seq=2048), PlanFlags(gpu="h100-80gb"))
    assert isinstance(planned, ForecastPlan)
    with pytest.raises(UsageError, match=r"activation_checkpointing_policy=\{Block\} in litgpt/pretrain.py"):
        write_back(found, planned.choice)
