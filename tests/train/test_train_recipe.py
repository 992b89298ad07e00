"""Recipes, learning rates and the order of the data: everything that needs no torch."""

import math
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jettison.core.errors import UsageError
from jettison.train.data import ShuffledOrder, derived_seed
from jettison.train.optim import learning_rate
from jettison.train.recipe import (
    BatchSection,
    LayoutSection,
    ModelSection,
    OptimizerSection,
    PlanSection,
    TrainRecipe,
    parse_recipe,
    read_recipe,
)
from support.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
GOOD = """
steps = 3
[model]
architecture = "gpt"
[batch]
global_batch = 4
micro_batch = 2
seq = 16
"""


def test_a_recipe_is_read_as_it_is_written() -> None:
    recipe = parse_recipe(
        GOOD + '[optimizer]\nlr = 1\nbetas = [0.8, 0.9]\n[layout]\ntp = 2\nzero = 3\n[plan]\nbudget = "2GiB"\n'
    )
    assert (recipe.steps, recipe.batch.seq, recipe.model.architecture) == (3, 16, "gpt")
    assert (recipe.optimizer.lr, recipe.optimizer.betas) == (1.0, (0.8, 0.9))
    assert (recipe.layout.tp, recipe.layout.zero, recipe.plan.budget) == (2, 3, "2GiB")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("steps", "r.toml is not TOML"),
        ("steps = 3", "model is missing"),
        (GOOD.replace("[model]", "[modle]"), "modle is not a key; the closest are model"),
        ('steps = "a"' + GOOD.replace("steps = 3", ""), 'steps: got "a"; expected a valid integer'),
        (GOOD.replace("steps = 3", "steps = true"), "steps: got true"),
        (GOOD.replace("steps = 3", "steps = 0"), "got steps 0; expected 1 or more"),
        ("rounds = 2" + GOOD, "rounds is not a key; expected some of model, batch, steps"),
        (GOOD.replace("seq = 16", "seq = 16\nsequence = 3"), "batch.sequence is not a key"),
        (GOOD + "[optimizer]\nlearning_rate = 1\n", "optimizer.learning_rate is not a key; expected some of name, lr"),
        (GOOD + "[optimizer]\nwarmup_step = 1\n", "optimizer.warmup_step is not a key; the closest are warmup_steps"),
        (GOOD + '[optimizer]\nlr = "1"\n', 'optimizer.lr: got "1"; expected a valid number'),
        (GOOD + "[optimizer]\nlr = nan\n", "optimizer: got lr nan; expected a number of 0 or more"),
        (GOOD + "[optimizer]\nbetas = [0.9]\n", "optimizer.betas.1 is missing"),
        (GOOD + "[layout]\nzero = 1\n", "layout.zero: got 1; expected 0, 2 or 3"),
        (GOOD + '[plan]\nbudget = "20"\n', "plan: got '20' without a unit"),
        (GOOD + '[plan]\nbudget = "2GiB"\npolicy = "full"\n', "expected at most one of budget, file and policy"),
        (GOOD + '[data]\nkind = "bytes"\n', "data: kind 'bytes' needs files"),
        (GOOD + '[data]\nfiles = ["a"]\n', "data: kind 'stdlib' does not take files"),
        (GOOD + "[log]\nfolder = 1979-05-27\n", "expected numbers, texts, flags and lists only"),
        (GOOD.replace('architecture = "gpt"', ""), "got none of architecture, preset, config, pretrained, factory"),
        (GOOD.replace('"gpt"', '"gpt"\npreset = "gpt2"'), "got architecture and preset"),
        (GOOD.replace('"gpt"', '"gpt"\npositions = 8'), "batch.seq: got 16; expected at most model.positions, 8"),
        (GOOD.replace('"gpt"', '"gpt"\nbuild = "meta"'), "model.build: got \"meta\"; expected 'sharded' or 'whole'"),
        (GOOD + "[eval]\nevery = 3\n", "eval: got no data; expected a section [eval.data]"),
        (GOOD + "[eval]\nevery = -1\n[eval.data]\n", "eval: got every -1; expected 0 or more"),
        (GOOD + '[eval.data]\nkinds = "bytes"\n', "eval.data.kinds is not a key; the closest are kind"),
        (GOOD + '[eval.data]\nkind = "bytes"\n', "eval.data: kind 'bytes' needs files"),
        (GOOD + '[export]\nmax_file = "5"\n', "export: got '5' without a unit"),
        (GOOD + '[export]\nmax_file = "0B"\n', "export: got '0B', which is not at least one byte"),
        ('timeout = "100ms"' + GOOD, "r.toml: got timeout 100ms; expected 1s or more"),
        (GOOD + '[export]\ndtype = "int8"\n', "export.dtype: got \"int8\"; expected 'fp32', 'bf16' or 'fp16'"),
        ("log = 3" + GOOD, "log: got 3; expected a section [log]"),
    ],
)
def test_a_wrong_key_is_one_clear_line(text: str, says: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_recipe(text, name="r.toml")
    assert says in str(error.value)
    assert str(error.value).startswith("r.toml") and "\n" not in str(error.value)


def test_recipes_in_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "from jettison.train.recipe import parse_recipe\n"
        f"made = parse_recipe('''{GOOD}''')\ndef make(): return made\nno = 1\n"
    )
    (tmp_path / "my_recipes.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    assert read_recipe("my_recipes:made") == read_recipe("my_recipes:make") == parse_recipe(GOOD)
    for target in ("my_recipes:no", "my_recipes:nothing", "no_such_module:x", "nothing.toml", "what"):
        with pytest.raises(UsageError, match=r"recipe"):
            read_recipe(target)


def test_batches_divide_or_are_refused() -> None:
    batch = BatchSection(global_batch=24, micro_batch=2, seq=8)
    assert [batch.accumulation(dp) for dp in (1, 2, 3, 4, 6, 12)] == [12, 6, 4, 3, 2, 1]
    with pytest.raises(UsageError, match=r"24 is no multiple of micro_batch x dp = 2 x 5 = 10"):
        batch.accumulation(5)


def test_a_layout_fills_the_ranks() -> None:
    layout = LayoutSection(tp=2, pp=2).over(16)
    assert (layout.dp, layout.tp, layout.pp, layout.sp, layout.world) == (4, 2, 2, True, 16)
    assert not LayoutSection(tp=2, sp=False).over(2).sp
    assert [LayoutSection(zero=zero).spread(8) for zero in (0, 2, 3)] == [(8, 1), (1, 8), (1, 8)]
    assert LayoutSection(zero=3, shards=2).spread(8) == (4, 2)
    with pytest.raises(UsageError, match=r"layout.shards: got 3, which does not divide the 8 data-parallel ranks"):
        LayoutSection(zero=3, shards=3).spread(8)
    with pytest.raises(UsageError, match=r"got shards 2 with zero 0, which shards nothing; expected zero 2 or 3"):
        LayoutSection(shards=2)
    for section, ranks in ((LayoutSection(tp=2), 3), (LayoutSection(dp=2), 1), (LayoutSection(tp=4), 2)):
        with pytest.raises(UsageError, match=rf"but there (are|is) {ranks} ranks?"):
            section.over(ranks)


def test_the_rate_warms_up_and_comes_down_in_a_cosine() -> None:
    section = OptimizerSection(lr=1.0, min_lr=0.1, warmup_steps=4)
    rates = [learning_rate(section, step, 24) for step in range(30)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[14] == pytest.approx(0.55)  # half-way between
    assert rates[9] == pytest.approx(0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2)
    assert rates[24:] == [0.1] * 6
    assert all(a > b for a, b in pairwise(rates[4:25]))
    longer = OptimizerSection(lr=1.0, decay_steps=10)
    assert learning_rate(longer, 5, 1000) == pytest.approx(0.5)


@given(windows=st.integers(1, 300), seed=st.integers(0, 2**40), turn=st.integers(0, 3))
def test_each_pass_visits_every_window_once(windows: int, seed: int, turn: int) -> None:
    order = ShuffledOrder(windows, seed)
    assert sorted(order.window(turn * windows + n) for n in range(windows)) == list(range(windows))


def test_passes_and_seeds_have_orders_of_their_own() -> None:
    passes = [[ShuffledOrder(500, seed).window(t * 500 + n) for n in range(500)] for seed in (1, 2) for t in (0, 1)]
    for i, one in enumerate(passes):
        assert sum(a == b for a, b in enumerate(one)) < 10  # a shuffle leaves about one in its place
        assert all(sum(a == b for a, b in zip(one, other, strict=True)) < 10 for other in passes[:i])
    assert passes[0] == [ShuffledOrder(500, 1).window(n) for n in range(500)]


def test_a_large_corpus_needs_no_list_of_its_windows() -> None:
    order = ShuffledOrder(10**12, 7)
    seen = [order.window(n) for n in range(2000)]
    assert len(set(seen)) == 2000 and max(seen) < 10**12
    assert 0.45 < sum(w < 5 * 10**11 for w in seen) / 2000 < 0.55


def test_seeds_differ_by_position() -> None:
    seeds = [derived_seed(s, "step", n, m) for s in range(3) for n in range(20) for m in range(20)]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**63 for seed in seeds)
    assert derived_seed(1, "step", 11, 2) != derived_seed(1, "step", 1, 12)


def test_a_run_cannot_be_changed() -> None:
    recipe = parse_recipe(GOOD)
    with pytest.raises(AttributeError):
        recipe.steps = 4  # type: ignore[misc]
    assert isinstance(recipe, TrainRecipe) and isinstance(recipe.model, ModelSection)


RECIPES = {
    "one-process": 1,
    "two-ranks": 2,
    "two-ranks-context": 2,
    "four-ranks": 4,
    "one-gpu": 1,
    "one-node": 8,
    "cluster": 32,
}


@pytest.mark.parametrize("name", RECIPES)
def test_shipped_recipes_fit_the_ranks_that_they_are_for(name: str) -> None:
    recipe = read_recipe(str(ROOT / "recipes" / f"{name}.toml"))
    layout = recipe.layout.over(RECIPES[name])
    assert recipe.batch.accumulation(layout.dp) >= 1


def test_every_shipped_recipe_is_tested() -> None:
    assert {path.stem for path in (ROOT / "recipes").glob("*.toml")} == set(RECIPES)


def test_reading_a_recipe_needs_no_torch() -> None:
    code = "import sys; from jettison.train import recipe; assert not {'torch', 'transformers'} & set(sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"offload": True}, "plan.offload: offloaded tensors are chosen under a budget"),
        ({"budget": "1GiB", "host_budget": "1MiB"}, "plan.host_budget: got '1MiB', and nothing is offloaded"),
        ({"budget": "1GiB", "gpu": "h100-80gb"}, "plan.gpu: got 'h100-80gb' without plan.offload = true"),
        ({"budget": "1GiB", "offload": True, "host_budget": "many"}, "got 'many'"),
    ],
)
def test_a_section_that_means_nothing_is_refused(section: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        PlanSection(**section)
