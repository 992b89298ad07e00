"""torch_remat: modules whose activations stay. What is written runs and holds what was said."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import jettison
from jettison import Bytes
from jettison.cli.live_model import PlanReport
from jettison.cli.plan import PlanFlags, plan
from jettison.core.errors import TraceError
from jettison.frameworks.export import Exported, exporter
from jettison.frameworks.layer_policies import kept_whole
from jettison.frameworks.nearest_policy import CannotSay
from jettison.frameworks.torch_remat.write import by_regions, options_of, overwritten, steps_down
from jettison.models.live_model import ModelRequest, load
from jettison.planner.planner import make_planner
from jettison.request.options import RunRequest
from jettison.verify.differences import compare_gradients, independent_copy
from support.export_cases import DEPTH, TOKENS, WIDTH, Stack, applied, held_bytes, remat_applied

pytest.importorskip("torch_remat")
pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, FLOAT, STATE = 4 * TOKENS, 4, 5056  # of a batch; bytes of a number, and of the CPU's random state
GIVEN = ROWS * WIDTH * FLOAT


@cache
def planner(factory: str) -> Any:
    return make_planner(load(ModelRequest(model=f"support.export_cases:{factory}"), fake=True).trace(), measure=False)


@cache
def exported(factory: str, share: float) -> Exported:
    """For a budget so far between the smallest one and the plain step."""
    found = planner(factory)
    low, high = found.minimum_budget_bytes, found.plain_budget_bytes
    made = jettison.plan(found.trace, Bytes(int(low + share * (high - low))), measure=False)
    request = ModelRequest(model=f"support.export_cases:{factory}", optimizer="none")
    return jettison.export_plan(PlanReport(plan=made, request=request).document(), to="torch_remat")


def real(factory: str) -> Any:
    return load(ModelRequest(model=f"support.export_cases:{factory}"), fake=False)


def step(model: nn.Module, batch: Any) -> int:
    torch.manual_seed(1)
    held, loss = held_bytes(model, batch)
    loss.backward()
    return held


@pytest.mark.parametrize(("factory", "share"), [("stack", 0.7), ("noisy", 0.5), ("stack", 1.0)])
def test_held_bytes_are_those_said_and_gradients_those_of_a_copy(factory: str, share: float) -> None:
    found = exported(factory, share)
    assert any(policy.regions for policy in found.policies) == (share < 1)
    loaded = real(factory)
    plain = independent_copy(loaded.model)
    without = step(plain, loaded.batch)
    held = step(applied(found, loaded.model), loaded.batch)
    assert held == found.cost.activation_bytes
    assert compare_gradients(plain, loaded.model).identical
    assert found.cost.peak_bytes <= found.subject.budget_bytes
    kept = sum(kept_whole(policy.decision).kept_bytes for policy in found.policies)
    assert without - held == kept - found.cost.layer_bytes


MARKS = {
    (): GIVEN,
    ("gate",): GIVEN + ROWS * 64 * FLOAT,
    ("norm", "qkv"): GIVEN + ROWS * (WIDTH + 2 + 3 * WIDTH) * FLOAT,
    ("out",): GIVEN + ROWS * WIDTH * FLOAT,  # its result: what it was given is computed again
    ("down", "gate", "up"): GIVEN + ROWS * (64 + 64 + WIDTH) * FLOAT,
}


@pytest.mark.parametrize("marks", MARKS)
@pytest.mark.parametrize("factory", ["stack", "noisy"])
def test_a_region_holds_its_results_and_what_it_saves_of_its_own(factory: str, marks: tuple[str, ...]) -> None:
    decisions = exported("stack" if factory == "stack" else "noisy", 0.5 if factory == "noisy" else 0.7).subject
    policies = tuple(by_regions(decision, marks) for decision in decisions.decisions)
    states = STATE * (1 + len(marks)) if factory == "noisy" else 0  # dropout runs again in all of these
    assert {policy.kept_bytes for policy in policies} == {MARKS[marks] + states}
    loaded = real(factory)
    plain = independent_copy(loaded.model)
    without = step(plain, loaded.batch)
    held = step(remat_applied(decisions, policies, loaded.model), loaded.batch)
    kept = kept_whole(decisions.decisions[0]).kept_bytes
    assert without - held == DEPTH * (kept - MARKS[marks] - states)
    assert compare_gradients(plain, loaded.model).identical


def test_without_the_files_hook_dropout_would_be_drawn_anew() -> None:
    found = exported("noisy", 0.5)
    text = found.files["checkpointing.py"]
    start = text.index("DRAWING = (")
    stop = text.index(")", start)
    assert "layers.0" in text[start:stop]
    broken: dict[str, Any] = {"__name__": "exported"}
    exec(text[:start] + "DRAWING = (" + text[stop:], broken)
    loaded = real("noisy")
    plain = independent_copy(loaded.model)
    step(plain, loaded.batch)
    step(broken["apply"](loaded.model), loaded.batch)
    assert not compare_gradients(plain, loaded.model).identical


def test_a_deep_copy_of_the_model_runs_its_own_layers() -> None:
    found = exported("stack", 0.7)
    loaded = real("stack")
    model = applied(found, loaded.model)
    assert list(model.state_dict()) == list(real("stack").model.state_dict())
    twin = copy.deepcopy(model)
    step(twin, loaded.batch)
    assert all(p.grad is None for p in model.parameters()) and all(p.grad is not None for p in twin.parameters())


def test_options_lie_between_keeping_everything_and_a_checkpoint() -> None:
    decision = exported("stack", 0.7).subject.decisions[0]
    options = options_of(decision, lambda op: float(op.flops + op.bytes_moved))
    held = [option.policy.kept_bytes for option in options]
    assert held == sorted(held, reverse=True) and held[0] == kept_whole(decision).kept_bytes and held[-1] == GIVEN
    seconds = [option.seconds for option in options]
    assert seconds == sorted(seconds) and seconds[0] == 0
    down = steps_down([options, options])
    assert [one.layer for one in down[:2]] == [0, 1] and {one.policy.kept_bytes for one in down[-2:]} == {GIVEN}
    rates = [one.seconds_per_byte for one in down]
    assert rates == sorted(rates)


class Overwriting(nn.Module):
    """Its activation writes over what the first product made."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.third = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.third(self.second(self.first(x).relu_()).tanh())
        return mixed + x


class Overwritten(Stack):
    """Three of them."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.layers = nn.ModuleList(Overwriting() for _ in range(3))


def overwriting() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return Overwritten(), (torch.randn(4, WIDTH),)


def test_a_module_whose_result_is_overwritten_is_no_region() -> None:
    loaded = load(ModelRequest(model="export.test_export_remat:overwriting"), fake=False)
    trace = load(ModelRequest(model="export.test_export_remat:overwriting"), fake=True).trace()
    program = trace.program(trace.calls[0])
    assert [overwritten(program, name) for name in ("first", "second", "third")] == [True, False, False]
    subject = exported("stack", 0.7).subject
    layer = replace(subject.decisions[0], program=program)
    assert all("first" not in option.policy.regions for option in options_of(layer, lambda op: 1.0))
    model = remat_applied(subject, [by_regions(layer, ["first"])], loaded.model)
    with pytest.raises(RuntimeError, match="modified in-place"):
        step(model, loaded.batch)


def test_what_it_cannot_say_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    made = plan("llama3-8b", RunRequest(tp=4, micro_batch=2), PlanFlags(budget="43GiB")).document()
    with pytest.raises(CannotSay, match="torch_remat wraps modules by name"):
        jettison.export_plan(made, to="torch_remat")
    found = exported("stack", 0.7)

    class Refusing:
        def cost(self, policies: Any, code: str = "") -> Any:
            raise TraceError("RuntimeError: torch_remat checkpoint function must return a Tensor")

    with pytest.raises(CannotSay, match="return something else"):
        exporter("torch_remat")(found.subject, Refusing())  # type: ignore[arg-type]
    monkeypatch.setattr("jettison.frameworks.torch_remat.write.find_spec", lambda name: None)
    with pytest.raises(CannotSay, match="pip install torch_remat"):
        exporter("torch_remat")(found.subject, None)  # type: ignore[arg-type]


def test_a_model_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    sizes = {"vocab_size": 200, "hidden_size": 32, "intermediate_size": 88}
    file = tmp_path / "config.json"
    counts = {"num_hidden_layers": 4, "num_attention_heads": 2}
    file.write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes, **counts}))
    request = ModelRequest(model=str(file), seq=48, micro_batch=2, precision="fp32", optimizer="none")
    made = make_planner(load(request, fake=True).trace(), measure=False)
    budget = (made.minimum_budget_bytes + made.plain_budget_bytes) // 2
    document = PlanReport(plan=jettison.plan(made.trace, Bytes(budget), measure=False), request=request).document()
    found = jettison.export_plan(document, to="torch_remat")
    assert any("mlp" in policy.words for policy in found.policies)
    loaded = load(request, fake=False)
    plain = independent_copy(loaded.model)
    plain(**loaded.batch).loss.backward()
    held, output = held_bytes(applied(found, loaded.model), loaded.batch)
    output.loss.backward()
    assert held == found.cost.activation_bytes
    assert compare_gradients(plain, loaded.model).identical
