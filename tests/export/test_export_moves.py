"""Plans of modules that move tensors to the host: the written file moves them, holds what was said, and is exact."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import jettison
from jettison.cli.live_model import PlanReport
from jettison.core.errors import DoesNotFit
from jettison.core.units import Bytes
from jettison.frameworks.export import Exported, exporter
from jettison.frameworks.layer_policies import Decision, LayerAction, Pricer, Subject
from jettison.frameworks.live_export import live_export
from jettison.models.live_model import ModelRequest, load
from jettison.planner.planner import make_planner
from jettison.solve.plan import Plan
from jettison.verify.differences import compare_gradients, independent_copy
from support.export_cases import (
    applied,
    everything,
    given,
    given_of_selective,
    held_bytes,
    largest,
    numpy_host,
    unmoved,
)

pytestmark = pytest.mark.usefixtures("one_thread")


LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 200,
    "hidden_size": 32,
    "intermediate_size": 88,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
}


def request(factory: str) -> ModelRequest:
    if factory.endswith(".json"):
        return ModelRequest(model=factory, seq=64, micro_batch=32, precision="fp32", optimizer="none")
    return ModelRequest(model=f"support.export_cases:{factory}", optimizer="none")


@cache
def document(factory: str) -> dict[str, Any]:
    asked = request(factory)
    made = make_planner(load(asked, fake=True).trace(), measure=False)
    plan = jettison.plan(made.trace, Bytes(made.plain_budget_bytes), measure=False)
    return PlanReport(plan=plan, request=asked).document()


def written(
    to: Callable[[Subject, Pricer], Exported], factory: str, *ways: Callable[[Decision], Decision], budget: int = 10**9
) -> Exported:
    """By a target, for a plan whose layers are treated so, one after the other."""

    def write(subject: Subject, pricer: Pricer) -> Exported:
        decisions = tuple(way(decision) for way, decision in zip(ways, subject.decisions, strict=True))
        return to(replace(subject, decisions=decisions, budget_bytes=budget), pricer)

    made = document(factory)
    plan = Plan.from_json(json.dumps(made))
    return live_export(plan, made, write=write, gpu=None, model=None, progress=lambda _: None)


def apply_of(found: Exported, *, away: bool) -> Callable[[Any], Any]:
    """What changes a model, as the file says; Lightning's strategy is asked as its own set-up asks it."""
    defined: dict[str, Any] = {"__name__": "exported"}
    text = next(iter(found.files.values()))
    exec(compile(text, "exported.py", "exec"), defined)
    if away and "_Away" in defined:
        defined["_OnHost"] = numpy_host(defined["_Away"])
    if "apply" in defined:
        apply: Callable[[Any], Any] = defined["apply"]
        return apply
    from lightning.fabric.strategies.fsdp import _setup_activation_checkpointing
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

    def change(model: Any) -> Any:
        arguments = defined["strategy"]()._activation_checkpointing_kwargs
        _setup_activation_checkpointing(defined["mark"](model), arguments)
        assert sum(isinstance(m, CheckpointWrapper) for m in model.modules()) == len(defined["CHECKPOINTED"])
        return model

    return change


def run(found: Exported, factory: str, *, away: bool) -> int:
    """A real step under the file, gradients compared with a plain copy's; bytes held.

    Args:
        away: what waits on the host is held by NumPy there, so that a CPU's own memory is not the device's.
    """
    loaded = load(request(factory), fake=False)
    plain = independent_copy(loaded.model)
    torch.manual_seed(1)
    plain(*loaded.batch).backward()
    names = list(loaded.model.state_dict())
    model = apply_of(found, away=away)(loaded.model)
    assert list(model.state_dict()) == names
    torch.manual_seed(1)
    held, loss = held_bytes(model, loaded.batch)
    loss.backward()
    theirs = [p.grad for p in model.parameters()]
    assert all(torch.equal(p.grad, other) for p, other in zip(plain.parameters(), theirs, strict=True))
    return held


def unchanged(decision: Decision) -> Decision:
    return replace(decision, kept=decision.program.saved_buffers(), offloaded=frozenset(), policy="none")


CASES = {  # the last has all of it; the others are slow tests
    "everything": ("many_rows", (everything,) * 4),
    "some": ("many_rows", (largest, unchanged, largest, everything)),
    "inputs": ("many_rows", (given, given_of_selective, given, unchanged)),
    "dropout": ("noisy", (everything, given, given_of_selective, largest)),
}


@pytest.mark.parametrize("case", [pytest.param(name, marks=[pytest.mark.slow] * (name != "dropout")) for name in CASES])
def test_plain_torch_moves_what_the_plan_moves(case: str) -> None:
    factory, ways = CASES[case]
    found = written(exporter("torch"), factory, *ways)
    there = run(found, factory, away=True)
    here = run(found, factory, away=False)
    assert there == found.cost.activation_bytes < here  # on a CPU the file's own host is the device
    assert [policy.action for policy in found.policies] == [expected(way) for way in ways]
    moved = sum(policy.program.kept_bytes(policy.offloaded) for policy in found.policies)
    assert found.cost.host_bytes == moved > 0
    assert any("do not overlap with compute" in note for note in found.notes)


@pytest.mark.parametrize("case", [pytest.param(name, marks=[pytest.mark.slow] * (name != "some")) for name in CASES])
@pytest.mark.parametrize("target", ["lightning", "torch_remat"])
def test_targets_of_whole_layers_move_what_the_plan_moves(target: str, case: str) -> None:
    pytest.importorskip(target)
    to = exporter(target)
    factory, ways = CASES[case]
    found = written(to, factory, *ways)
    assert run(found, factory, away=True) == found.cost.activation_bytes
    partly = ways.index(given_of_selective) if given_of_selective in ways else None
    actions = [policy.action for policy in found.policies]
    if partly is None:  # nothing that it cannot say, and all of it is said
        assert actions == [expected(way) for way in ways]
        moved = sum(policy.program.kept_bytes(policy.offloaded) for policy in found.policies)
        decided = sum(p.program.kept_bytes(p.decision.offloaded) for p in found.policies)
        assert found.cost.host_bytes == moved == decided > 0
        assert found.exact and any("do not overlap with compute" in note for note in found.notes)
    else:  # of a layer that is computed again in part the input waits there, as few layers as fit
        assert LayerAction.SELECT not in actions and not found.exact
        smallest = written(to, factory, *ways, budget=written_least(to, factory, ways))
        assert smallest.policies[partly].words == "full, its input offloaded"
        assert run(smallest, factory, away=True) == smallest.cost.activation_bytes < found.cost.activation_bytes


def written_least(to: Any, factory: str, ways: Any) -> int:
    """The smallest budget that a target can say of these layers."""
    with pytest.raises(DoesNotFit) as caught:
        written(to, factory, *ways, budget=1)
    return caught.value.peak_bytes


def expected(way: Callable[[Decision], Decision]) -> LayerAction:
    return {given: LayerAction.CHECKPOINT, given_of_selective: LayerAction.SELECT}.get(way, LayerAction.KEEP)


@pytest.mark.slow
def test_transformers_moves_what_checkpoints_are_given_where_nothing_else_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA), encoding="utf-8")
    ways = (given,) * 4
    assert "offload" not in written(exporter("transformers"), str(file), *ways).files["checkpointing.py"]
    full = written(exporter("transformers"), str(file), *(unmoved,) * 4)
    found = written(exporter("transformers"), str(file), *ways, budget=full.cost.peak_bytes - 1)
    hidden = 32 * 64 * 32 * 4
    assert full.cost.activation_bytes is not None
    assert (
        found.cost.activation_bytes == full.cost.activation_bytes - 4 * hidden and found.cost.host_bytes >= 4 * hidden
    )

    def save_on_cpu(*, pin_memory: bool, device_type: str) -> Any:
        def fetched(array: Any) -> torch.Tensor:
            there = torch.from_numpy(array)
            return torch.empty(there.size(), dtype=there.dtype).copy_(there)

        return torch.autograd.graph.saved_tensors_hooks(lambda tensor: numpy.array(tensor.detach().numpy()), fetched)

    monkeypatch.setattr("transformers.modeling_utils.save_on_cpu", save_on_cpu)
    loaded = load(request(str(file)), fake=False)
    plain = independent_copy(loaded.model)
    plain(**loaded.batch).loss.backward()
    held, output = held_bytes(applied(found, loaded.model), loaded.batch)
    output.loss.backward()
    assert held == found.cost.activation_bytes
    assert compare_gradients(plain, loaded.model).identical
