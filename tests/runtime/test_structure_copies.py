"""Models that are copied or compiled after planning: right, and never without a word."""

from __future__ import annotations

import copy
import functools
import pickle
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import jettison
from jettison.verify.differences import independent_copy
from support.structure import BLOCKS, WIDTH, Other, batch, calls, net, planned, said, same, step
from support.toys import Net

pytestmark = pytest.mark.usefixtures("one_thread")


# copies ---------------------------------------------------------------------------------------------------------------


def _copied(model: Any) -> Any:
    return copy.copy(model)


def _replicated(model: Any) -> Any:
    return model._replicate_for_data_parallel()


def _with_other_blocks(twin: Any) -> Any:
    twin._modules = dict(twin._modules)
    torch.manual_seed(5)
    twin.layers = nn.ModuleList(Other() for _ in range(BLOCKS))
    return twin


@pytest.mark.parametrize("copied", [_copied, _replicated])
def test_a_shallow_copy_runs_its_own_modules(copied: Callable[[Any], Any]) -> None:
    model, handle = planned()
    twin, expected = _with_other_blocks(copied(model)), step(_with_other_blocks(copied(net())))
    got, texts = said(lambda: step(twin))
    assert same(got, expected)
    assert len(texts) == 1
    assert "shallow copy of the model" in texts[0]
    assert "without the plan" in texts[0]
    assert calls(handle) == {"": 0, "layers.0": 0, "layers.1": 0, "layers.2": 0}
    assert said(lambda: step(twin))[1] == []  # once
    assert same(step(model), step(net()))  # the original runs as planned
    assert all(n == 1 for n in calls(handle).values())


def test_shallow_copies_of_blocks_with_hooks_run_their_own_parts() -> None:
    def rebuilt(model: Any) -> Any:
        twin = copy.copy(model)
        twin._modules = {"layers": nn.ModuleList(copy.copy(layer) for layer in model.layers)}
        torch.manual_seed(7)
        for layer in twin.layers:
            layer._modules = {"a": nn.Linear(WIDTH, WIDTH), "b": layer.b}
            layer.register_forward_hook(lambda _m, _a, out: out * 0.5)
        return twin

    model, _ = planned()
    got, texts = said(lambda: step(rebuilt(model)))
    assert same(got, step(rebuilt(net())))
    assert any("shallow copy" in text for text in texts)


def test_a_shallow_copy_outlives_the_plan() -> None:
    model, handle = planned()
    twin = _with_other_blocks(copy.copy(model))
    handle.remove()
    got, texts = said(lambda: step(twin))
    assert same(got, step(_with_other_blocks(copy.copy(net()))))
    assert texts == []
    assert same(step(model), step(net()))


def test_a_copy_with_a_forward_of_its_own_runs_what_it_would_without_a_plan() -> None:
    def patched() -> Any:
        model = net()
        model.forward = types.MethodType(lambda s, x: Net.forward(s, x) * 3, model)
        return model

    model = patched()
    jettison.apply(model, "full", batch=(batch(),))
    got, _ = said(lambda: step(_with_other_blocks(copy.copy(model))))
    assert same(got, step(_with_other_blocks(copy.copy(patched()))))


# deep copies ----------------------------------------------------------------------------------------------------------


def test_a_deep_copy_that_trains_says_that_it_has_no_plan() -> None:
    model, handle = planned()
    twins = [copy.deepcopy(model), copy.deepcopy(copy.deepcopy(model))]
    with torch.no_grad():  # as moving averages and references run
        got, texts = said(lambda: [twin(batch()) for twin in twins])
    assert all(torch.equal(one, net()(batch())) for one in got)
    assert texts == []
    got, texts = said(lambda: step(twins[0]))
    assert same(got, step(net()))
    assert len(texts) == 1
    assert "a deep copy of the model trains without the plan" in texts[0]
    assert said(lambda: [step(twin) for twin in twins])[1] == []  # once in a plan
    assert set(calls(handle).values()) == {0}
    assert "forward" not in vars(twins[0])
    assert same(step(model), step(net()))


def test_a_deep_copy_of_a_block_says_so_too() -> None:
    model, _ = planned()
    block = copy.deepcopy(model.layers[1])
    _, texts = said(lambda: block(batch()).sum().backward())
    assert [text for text in texts if "a deep copy of layers.1" in text] == texts != []


def test_a_deep_copy_can_be_planned() -> None:
    model, handle = planned()
    twin = copy.deepcopy(model)
    got, texts = said(lambda: (jettison.apply(twin, "full", batch=(batch(),)), step(twin)))
    assert texts == []
    assert same(got[1], step(net()))
    assert {region.calls for region in got[0].regions} == {1}
    got[0].remove()
    assert "forward" not in vars(twin)
    assert set(calls(handle).values()) == {0}


def test_a_deep_copy_outlives_the_plan_without_a_word() -> None:
    model, handle = planned()
    twin = copy.deepcopy(model)
    handle.remove()
    got, texts = said(lambda: step(twin))
    assert same(got, step(net()))
    assert texts == []


def test_a_deep_copy_in_the_place_of_a_block_is_treated_as_that_was() -> None:
    model, handle = planned()
    model.layers[1] = copy.deepcopy(model.layers[2])
    twin = net()
    twin.layers[1] = copy.deepcopy(twin.layers[2])
    got, texts = said(lambda: step(model))
    assert same(got, step(twin))
    assert [text for text in texts if "layers.1 is another Block" in text] == texts != []
    assert next(r for r in handle.report() if r.name == "layers.1" and r.calls).slots_dropped > 0


# pickles --------------------------------------------------------------------------------------------------------------


def _read(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def test_a_model_out_of_a_pickle_that_trains_says_that_it_has_no_plan() -> None:
    model, handle = planned()
    twins = [_read(model), _read(_read(copy.deepcopy(model)))]
    with torch.no_grad():
        assert said(lambda: [twin(batch()) for twin in twins])[1] == []
    for twin in twins:
        got, texts = said(lambda twin=twin: step(twin))
        assert same(got, step(net()))
        assert len(texts) == 1  # not of each block
        assert "a pickled copy of the model trains without the plan" in texts[0]
        assert said(lambda twin=twin: step(twin))[1] == []
        assert "forward" not in vars(twin)
    assert set(calls(handle).values()) == {0}
    assert same(step(model), step(net()))


def test_a_pickle_of_a_planned_model_is_read_without_jettison(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
    jettison.apply(model, "full", batch=(torch.ones(2, 4),), loss_fn=torch.sum, regions=["0", "1", "2"])
    torch.save(model, tmp_path / "model.pt")
    expected = model(torch.ones(2, 4)).sum().item()
    program = (
        "import sys; import torch\n"
        "class Missing:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name.startswith('jettison'): raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, Missing())\n"
        "model = torch.load(sys.argv[1], weights_only=False); loss = model(torch.ones(2, 4)).sum(); loss.backward()\n"
        "print(loss.item(), model[0][0].weight.grad is not None)"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "model.pt")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() == [str(expected), "True"]


def twice(model: Any, x: torch.Tensor) -> torch.Tensor:
    return 2 * Net.forward(model, x)


def test_a_forward_that_was_set_on_a_module_is_in_its_pickle() -> None:
    model = net()
    model.forward = functools.partial(twice, model)
    jettison.apply(model, "none", batch=(batch(),))
    with torch.no_grad():
        assert torch.equal(_read(model)(batch()), twice(net(), batch()))


# torch.compile --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("compiler")
def test_compile_over_a_plan_runs_as_planned_and_says_so() -> None:
    model, handle = planned()
    compiled = torch.compile(model, backend="eager")
    got, texts = said(lambda: step(model, compiled))
    assert same(got, step(net()))
    assert [text for text in texts if "torch.compile has no effect" in text] == texts
    assert len(texts) == 1
    assert all(n == 1 for n in calls(handle).values())
    assert said(lambda: step(model, compiled))[1] == []


@pytest.mark.usefixtures("compiler")
def test_blocks_compiled_after_planning_run_as_planned() -> None:
    model, handle = planned()
    for layer in model.layers:
        layer.compile(backend="eager")
    got, _ = said(lambda: [step(model) for _ in range(3)][-1])
    assert same(got, step(net()))
    assert all(n == 3 for n in calls(handle).values())


@pytest.mark.usefixtures("compiler")
def test_a_part_compiled_after_planning_gives_the_same_gradients() -> None:
    model, _ = planned()
    step(model)
    for layer in model.layers:
        layer.a.compile(backend="eager")
    got, _ = said(lambda: step(model))
    assert same(got, step(net()))


@pytest.mark.usefixtures("compiler")
def test_whole_graphs_are_refused_in_words() -> None:
    model, _ = planned()
    with pytest.raises(Exception, match="runs under a plan"):
        torch.compile(model, backend="eager", fullgraph=True)(batch())


@pytest.mark.usefixtures("compiler")
def test_compiled_copies_run_their_own_modules() -> None:
    model, _ = planned()
    twin = _with_other_blocks(copy.copy(model))
    got, _ = said(lambda: step(twin, torch.compile(twin, backend="eager")))
    assert same(got, step(_with_other_blocks(copy.copy(net()))))


@pytest.mark.usefixtures("compiler")
def test_compiled_without_gradients_has_no_plan_to_follow() -> None:
    model, handle = planned()
    with torch.no_grad():
        got, texts = said(lambda: torch.compile(model, backend="eager", fullgraph=True)(batch()))
        assert torch.equal(got, net()(batch()))
    assert texts == []
    assert calls(handle)[""] == 0


@pytest.mark.usefixtures("compiler")
def test_a_planned_model_is_exported_as_it_was() -> None:
    model, _ = planned()
    exported = torch.export.export(model, (batch(),))
    assert torch.allclose(exported.module()(batch()), net()(batch()))


def test_compiled_first_is_refused() -> None:
    with pytest.raises(jettison.core.errors.UnsupportedModule, match="is compiled"):
        jettison.apply(torch.compile(net(), backend="eager"), "full", batch=(batch(),))
    model = net()
    model.layers[1].compile(backend="eager")
    with pytest.raises(jettison.core.errors.UnsupportedModule, match=r"layers\.1 is compiled"):
        jettison.apply(model, "full", batch=(batch(),))


# transforms -----------------------------------------------------------------------------------------------------------


def test_transforms_run_without_the_plan_and_say_so() -> None:
    def gradients(model: Any) -> list[torch.Tensor]:
        params = {name: p.detach() for name, p in model.named_parameters()}
        loss = torch.func.grad(lambda p: torch.func.functional_call(model, p, (batch(),)).square().sum())
        return list(loss(params).values())

    model, handle = planned()
    got, texts = said(lambda: gradients(model))
    assert all(torch.equal(a, b) for a, b in zip(got, gradients(net()), strict=True))
    assert len(texts) == 1
    assert "the model runs without the plan in torch.func's transforms" in texts[0]
    assert set(calls(handle).values()) == {0}
    assert said(lambda: gradients(model))[1] == []
    assert same(step(model), step(net()))


def test_a_copy_that_is_made_to_be_compared_with_trains_plainly_without_a_word() -> None:
    model, handle = planned()
    twin = independent_copy(model)
    assert said(lambda: step(twin))[1] == []
    handle.remove()
