"""A framework is one folder: a preset, a target and a flag are added by its two files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import jettison.frameworks
from jettison.cli.list_names import list_names
from jettison.cli.suggestions import equivalent_flag
from jettison.core.errors import UsageError
from jettison.frameworks.export import exporter
from jettison.frameworks.layer_policies import Cost
from jettison.spec import frameworks
from jettison.spec.frameworks import named, rule

DEFAULTS = """
[targets.toy]
says = "a toy"
checked_with = "toy 1"

[presets.toy]
kernels = "pytorch"

[presets.toy-2]
like = "toy"
attention = "flash"

[[presets.toy-2.when]]
if = "tp > 1 and zero == 0"
loss = "dtensor"

[flags]
--toys = "--micro-batch {1}"
"""
WRITE = """
from jettison.frameworks.export import TargetOutput


def write(nearest):
    cost = nearest.pricer.plan()
    return TargetOutput(files={"toy.txt": nearest.subject.model}, policies=(), cost=cost, lost=("all",))
"""


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy/defaults.toml").write_text(DEFAULTS, encoding="utf-8")
    (tmp_path / "toy/write.py").write_text(WRITE, encoding="utf-8")
    monkeypatch.setattr(frameworks, "FOLDER", tmp_path)
    monkeypatch.setattr(jettison.frameworks, "__path__", [*jettison.frameworks.__path__, str(tmp_path)])
    caches = (frameworks._texts, frameworks._table, frameworks.named)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.mark.usefixtures("toy")
def test_a_framework_is_one_folder() -> None:
    subject: Any = SimpleNamespace(model="a model", root_freed_bytes=0, segments=())
    pricer: Any = SimpleNamespace(plan=lambda: Cost(layer_bytes=1, peak_bytes=2))
    found = exporter("toy")(subject, pricer)
    assert (found.files, found.lost, found.checked_with, found.cost) == (
        {"toy.txt": "a model"},
        ("all",),
        "toy 1",
        found.plan_cost,
    )
    assert [row["meaning"] for row in list_names("targets").document()["targets"]] == ["a toy"]
    assert rule("toy-2", tp=2) == {"kernels": "pytorch", "attention": "flash", "loss": "dtensor"}
    assert rule("toy-2", tp=2, zero=3) == rule("toy-2", tp=1) == {"kernels": "pytorch", "attention": "flash"}
    assert equivalent_flag("--toys", "4") == "--micro-batch 4"


def test_names_that_no_folder_has_are_refused_with_those_there_are() -> None:
    with pytest.raises(UsageError, match="got --to 'toy'; expected one of torch, torch_remat, transformers, "):
        exporter("toy")
    with pytest.raises(
        UsageError, match=r"got --like 'toy'; expected one of megatron, megatron-0\.19, megatron-0\.18, "
    ):
        rule("toy", tp=1)
    assert list(named("targets"))[-1] == "brief"
