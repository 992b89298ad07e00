"""Files of families: each can be read and is tried, one more is enough for a new family, and few are opened."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest

import jettison
from formula import (
    test_formula_decoders,
    test_formula_encoders,
    test_formula_further,
    test_formula_hybrids,
    test_formula_mixtures,
    test_formula_more,
)
from jettison.families import config
from jettison.families.family import FAMILIES, PAIRS, WRAPPERS, Family, files
from jettison.spec.model import DropoutSites
from support.kernel_sets import HUGGINGFACE
from support.patience import PATIENCE
from support.spec_cases import TINY, decoded

TABLES = (
    test_formula_decoders,
    test_formula_encoders,
    test_formula_further,
    test_formula_hybrids,
    test_formula_mixtures,
    test_formula_more,
)
SAME = {"camembert": "bert", "roberta": "bert", "xlm-roberta": "bert", "kimi_k2": "deepseek_v3"}
"""Other names of a family that has tests of its own, whose code differs at most."""
IN_WRAPPERS = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
"""Text models that are tried with the towers around them."""
NAMED = {"train/recipe.py"}
"""Files about one model: the `Llama` of record by transformers' names, and what a recipe builds."""
OTHER_WORDS = {"clip"}
"""Names of families that mean something else, too."""
OPENED = """
import sys
opened = set()
sys.addaudithook(lambda event, args: opened.add(str(args[0])) if event == "open" else None)
from jettison.cli import run_command
sys.argv = ["jettison", "ledger", "llama3-405b"]
try:
    run_command()
finally:
    print(*sorted(name for name in opened if "families" in name and name.endswith(".toml")), file=sys.stderr)
"""


def test_every_family_is_tried() -> None:
    tiny = {decoded(case)["model_type"] for case in TINY}
    tiny |= {name.partition(" ")[0] for table in TABLES for name in table.TINY}
    tiny |= {name.partition(" ")[0] for name in test_formula_mixtures.REAL}
    tiny = {WRAPPERS[name] if name in PAIRS else name for name in tiny}
    no_class = {"megatron_gpt"}  # held against Megatron's own figures in tests/frameworks/test_read_megatron.py
    assert tiny | set(SAME) | set(IN_WRAPPERS) | {"qwen3_vl_moe_text"} | no_class == set(FAMILIES)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_file_says_what_exists(kind: str) -> None:
    family = FAMILIES[kind]
    replace(HUGGINGFACE, **family.kernels)
    assert not set(family.required) & set(family.defaults)
    keys = {*family.required, *family.defaults}
    assert set(family.spelling) <= keys
    assert {*family.dropout} <= {site.name for site in fields(DropoutSites)}
    assert {*family.dropout.values()} - {"", "attention_dropout"} <= keys


@pytest.mark.parametrize(("name", "other"), [*SAME.items(), *IN_WRAPPERS.items()])
def test_other_names_differ_in_their_code_alone(name: str, other: str) -> None:
    theirs = FAMILIES[other]
    known = {name: getattr(theirs, name) for name in ("kernels", "described_kernels", "tensor_parallel")}
    assert replace(FAMILIES[name], **known) == theirs


def test_wrappers_hold_families() -> None:
    assert set(WRAPPERS.values()) <= set(FAMILIES) and not set(WRAPPERS) & set(FAMILIES)


def test_a_family_of_known_blocks_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.toml").write_text('like = "llama"\nqk_norm = "head"\n\n[defaults]\nvocab_size = 100\n')
    mine = files(tmp_path)
    assert isinstance(mine["mine"], Family)
    monkeypatch.setattr(config, "FAMILIES", mine)
    values = {**decoded("llama"), "model_type": "mine"}
    found = config.parse_config(values, name="m")
    assert found.family == "mine" and found.hidden == values["hidden_size"]
    assert "qk_norm=<QkNorm.HEAD" in repr(found.layers[0])


def test_names_of_families_stand_in_their_room_alone() -> None:
    package, names = Path(jettison.__file__).parent, {*FAMILIES, *WRAPPERS} - OTHER_WORDS
    found = set()
    for file in sorted(package.rglob("*.py")):
        texts = (node.value for node in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(node, ast.Constant))
        if any(isinstance(text, str) and text in names for text in texts):
            found.add(file.relative_to(package).as_posix())
    assert {name for name in found if not name.startswith("families/")} == NAMED


def test_a_file_is_opened_when_it_is_asked_for() -> None:
    done = subprocess.run([sys.executable, "-c", OPENED], capture_output=True, text=True, timeout=PATIENCE, check=True)
    opened = {Path(name).name for name in done.stderr.splitlines()[-1].split()}
    assert opened - {"presets.toml"} == {"llama.toml", "decoder.toml"}
