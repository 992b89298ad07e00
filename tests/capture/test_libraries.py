"""A walk through Python's state ends at libraries whose globals no model sets."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import networkx
import pytest
import sympy
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from jettison.capture import bytecode_names
from jettison.capture.reachable_state import MOST_OF_LIBRARIES, Reach


@pytest.mark.filterwarnings("ignore::FutureWarning")  # what transformers has renamed
def test_adapters_do_not_lead_into_libraries() -> None:
    """Without an end at PEFT and what it imports there are 20,000 values more, which each dry run would copy."""
    peft = pytest.importorskip("peft")
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, **shape))
    plain = len(Reach([model])._seen)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=1, target_modules=["q_proj"]))
    assert len(Reach([adapted])._seen) < plain + 1000
    layer = adapted.base_model.model.model.layers[0].self_attn.q_proj
    state = Reach([adapted])
    layer.scaling["default"] = 7.0  # what an adapter has itself is looked at
    state.restore()
    assert layer.scaling["default"] != 7.0


def install(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch, *, wide: int, deep: int) -> ModuleType:
    """A package among installed ones: ``start`` leads to a chain of calls ``deep`` long, and from there to ``wide``
    functions, of which each counts in a list of its own.
    """
    lines = [
        "import torch",
        "class Layer(torch.nn.Linear):",
        "    def forward(self, x): start(); return x",
        "SEEN = [0]",
    ]
    lines += ["def start(): SEEN[0] += 1; call_0()", "class Kept:", "    def move(self): start()"]
    lines += [f"def call_{i}(): call_{i + 1}()" for i in range(deep)]
    lines += [f"def call_{deep}():", "    END[0] += 1", "    if not END: " + "; ".join(f"f_{i}()" for i in range(wide))]
    lines += ["END = [0]", *(f"L_{i} = [0]\ndef f_{i}(): L_{i}[0] += 1; last()" for i in range(wide))]
    lines += ["def last(): LAST[0] += 1", "LAST = [0]"]
    (folder / f"{name}.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(bytecode_names, "_library_folders", lambda: (folder,))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module(name)


@pytest.mark.parametrize("how", ["function", "object"])
def test_code_of_libraries_is_followed_for_so_many_values(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small ones are followed to their end; of a large one no more than the first values, nearest first."""
    for wide, ends in ((10, True), (MOST_OF_LIBRARIES, False)):
        package = install(tmp_path, f"library_{how}_{wide}", monkeypatch, wide=wide, deep=3)
        held = package.Kept() if how == "object" else package.start
        reach = Reach([nn.Linear(2, 2)], [held])
        package.start()
        package.last()
        assert (package.SEEN, package.END, package.LAST) == ([1], [1], [1])
        reach.restore()
        assert package.SEEN == package.END == [0]
        assert (package.LAST == [0]) is ends


def test_a_models_own_package_is_followed_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = install(tmp_path, "models_own", monkeypatch, wide=MOST_OF_LIBRARIES, deep=3)
    for given in (([package.Layer(2, 2)], []), ([], [package.Layer(2, 2)])):
        reach = Reach(*given)
        package.last()
        reach.restore()
        assert package.LAST == [0]


class Grows(nn.Module):
    """A block that holds a graph and a symbol, and adds to the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.graph, self.symbol = networkx.DiGraph(), sympy.Symbol("x") + 1

    def forward(self, x: Tensor) -> Tensor:
        self.graph.add_edge(len(self.graph), len(self.graph) + 1)
        return x * len(self.graph)


def test_a_graph_leads_to_few_values_of_its_library() -> None:
    """All of networkx and sympy are 57,000."""
    block = Grows()
    reach = Reach([block])
    assert reach.values < 5_000
    block(torch.ones(1))
    reach.restore()
    assert len(block.graph) == 0 and not block.graph.adj
