"""Plans that are kept in a file: followed for the same, made anew for anything else, and by all ranks or by none."""

from __future__ import annotations

import copy
import functools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional

import jettison
from jettison.core.errors import UsageError
from jettison.dryrun.counter import measured_peak
from jettison.planner import kept_plans, step_description
from jettison.solve.plan import Plan
from support.ranks import run_ranks
from support.toys import Mlp

WIDTH = 16
BUDGET = 400_000  # between the smallest, 318 kB, and what no checkpointing takes, 580 kB


class Planning(Exception):
    """A plan is made anew."""


class Doubled(torch.autograd.Function):
    """Twice what it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


class Block(Mlp):
    """Doubles what comes of it."""

    def forward(self, x: Tensor) -> Tensor:
        return Doubled.apply(super().forward(x))


class Stack(nn.Module):
    """Blocks in a row; the loss is the mean square of what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(WIDTH, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Descent(torch.optim.SGD):
    """With a step of its own."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def made() -> tuple[Stack, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Stack()
    return model, Descent(model.parameters(), 0.1, momentum=0.9)


def batch(rows: int = 256) -> tuple[Tensor]:
    return (torch.randn(rows, WIDTH),)


def planned(where: Path, model: nn.Module, optimizer: Any, given: Any = None, budget: int = BUDGET, **more: Any) -> Any:
    lines: list[str] = []
    x = batch() if given is None else given
    handle = jettison.auto_checkpoint(model, x, budget, optimizer=optimizer, plan=where, progress=lines.append, **more)
    return handle, [line for line in lines if "the plan in" in line]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Plan]:
    """The text of a plan that was kept for `made` and `batch`."""
    file = tmp_path_factory.mktemp("kept") / "plan.json"
    handle, _ = planned(file, *made())
    handle.remove()
    return file.read_text(), handle.plan


@pytest.fixture
def file(kept: tuple[str, Plan], tmp_path: Path) -> Path:
    found = tmp_path / "plan.json"
    found.write_text(kept[0])
    return found


@pytest.fixture
def plans_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def planning(*_: Any, **__: Any) -> Any:
        raise Planning

    monkeypatch.setattr(step_description, "planner_of", planning)


def test_a_kept_plan_is_followed(kept: tuple[str, Plan], file: Path, plans_nothing: None) -> None:
    model, optimizer = made()
    plain = copy.deepcopy(model)
    handle, said = planned(file, model, optimizer)
    assert len(said) == 1 and said[0].startswith(f"reusing the plan in {file}: predicted")
    assert handle.plan == kept[1] and handle.plan.hash == kept[1].hash
    assert any(layer.policy != "none" for layer in handle.plan.layers)
    (x,) = batch()
    for one in (model, plain):
        one(x).backward()
    assert all(map(torch.equal, (p.grad for p in model.parameters()), (p.grad for p in plain.parameters())))
    optimizer.step()
    optimizer.zero_grad()

    def step() -> None:
        loss = model(x)
        loss.backward()
        optimizer.step()

    static = [x, *model.parameters(), *(s["momentum_buffer"] for s in optimizer.state.values())]
    assert measured_peak(step, static_tensors=static).peak_bytes <= handle.plan.predicted.peak_bytes <= BUDGET
    assert file.read_text() == kept[0], "it is left as it is"
    assert Plan.from_json(file.read_text()) == handle.plan, "readers of plans read it"


def test_the_file_of_a_plan_is_applied(file: Path, kept: tuple[str, Plan]) -> None:
    model, _ = made()
    handle = jettison.apply(model, plan=str(file), batch=batch())
    assert handle.plan == kept[1]
    handle.remove()
    with pytest.raises(UsageError, match="cannot be read"):
        jettison.apply(model, plan=file.parent / "none.json", batch=batch())
    file.write_text("{}")
    with pytest.raises(UsageError, match=r"not a jettison\.plan/1 document: "):
        jettison.apply(model, plan=file, batch=batch())


def unchanged_learning_rate(model: Stack, optimizer: Any, _: pytest.MonkeyPatch) -> dict[str, Any]:
    optimizer.param_groups[0]["lr"] = 0.01
    return {}


def trained(model: Stack, optimizer: Any, _: pytest.MonkeyPatch) -> dict[str, Any]:
    model(*batch()).backward()
    optimizer.step()
    optimizer.zero_grad()
    return {}


@pytest.mark.parametrize("change", [unchanged_learning_rate, trained])
def test_what_moves_in_training_does_not_matter(
    file: Path, plans_nothing: None, monkeypatch: pytest.MonkeyPatch, change: Callable[..., Any]
) -> None:
    model, optimizer = made()
    change(model, optimizer, monkeypatch)
    handle, said = planned(file, model, optimizer)
    assert said[0].startswith("reusing")
    handle.remove()


def _relu(self: Any, h: Tensor) -> Tensor:
    return functional.relu(h)


def _backward(ctx: Any, grad: Tensor) -> Tensor:
    return (grad * 3) - grad


def _half(self: Any, x: Tensor) -> Tensor:
    return Doubled.apply(x + 0.5 * self.down(self.inner(self.up(x))))


def _plain_step(self: Any, closure: Any = None) -> None:
    for group in self.param_groups:
        for p in group["params"]:
            p.add_(p.grad, alpha=-1)


def with_state(optimizer: Any) -> dict[str, Any]:
    for p in optimizer.param_groups[0]["params"]:
        optimizer.state[p]["momentum_buffer"] = torch.zeros(p.shape, dtype=torch.float64)
    return {}


OPS, CODE = "run other ops", "code of its modules, hooks or autograd functions"
DIFFERENCES: dict[str, tuple[Callable[[Stack, Any, pytest.MonkeyPatch], dict[str, Any]], str]] = {
    "torch": (lambda m, o, p: p.setattr(torch, "__version__", "9.9") or {}, "torch was .* and is 9.9"),
    "jettison": (lambda m, o, p: p.setattr(jettison, "__version__", "99") or {}, r"jettison was .* and is 99 \("),
    "processor": (lambda m, o, p: p.setattr(kept_plans, "cpu_name", lambda: "Z80") or {}, "processor was .* is Z80"),
    "a larger budget": (lambda m, o, p: {"budget": BUDGET + 5_000}, "budget was 400000 and is 405000"),
    "rows": (lambda m, o, p: {"given": batch(192)}, "batch was .*256, 16.* and is .*192, 16"),
    "an op of a block": (lambda m, o, p: p.setattr(Mlp, "inner", _relu) or {}, OPS),
    "a constant of a block": (lambda m, o, p: p.setattr(Block, "forward", _half) or {}, OPS),
    "a backward": (lambda m, o, p: p.setattr(Doubled, "backward", staticmethod(_backward)) or {}, CODE),
    "a hook": (lambda m, o, p: m.layers[0].up.weight.register_post_accumulate_grad_hook(lambda w: None) and {}, CODE),
    "a frozen layer": (lambda m, o, p: m.layers[0].requires_grad_(False) and {}, "parameters was"),
    "eval": (lambda m, o, p: m.eval() and {}, "model was Stack and is Stack in eval"),
    "held gradients": (lambda m, o, p: {"gradients_preallocated": True}, "loop was"),
    "no held output": (lambda m, o, p: {"keep_output": False}, "loop was"),
    "a loss": (lambda m, o, p: {"loss_fn": lambda out: 2 * out}, OPS),
    "momentum": (lambda m, o, p: o.param_groups[0].update(momentum=0.0) or {}, "optimizer was .*number.* and is .*0"),
    "an optimizer's code": (
        lambda m, o, p: p.setattr(Descent, "step", _plain_step) or {},
        "the optimizer's code has changed",
    ),
    "a larger state": (lambda m, o, p: with_state(o), "optimizer's state was"),
    "an own step": (
        lambda m, o, p: {"step": lambda model, given: model(*given).backward()},
        "levels|code of step|loop|batch",
    ),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_what_differs_is_named_and_planned_anew(
    file: Path, plans_nothing: None, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    change, expected = DIFFERENCES[name]
    model, optimizer = made()
    more = change(model, optimizer, monkeypatch)
    lines: list[str] = []
    before = file.read_text()
    given = {"memory_budget": more.pop("budget", BUDGET), "batch": more.pop("given", batch())}
    with pytest.raises(Planning):
        jettison.auto_checkpoint(model, optimizer=optimizer, plan=file, progress=lines.append, **given, **more)
    (said,) = [line for line in lines if "the plan in" in line]
    assert said.startswith(f"the plan in {file} is not reused: ") and said.endswith("; planning anew")
    assert re.search(expected, said), said
    assert file.read_text() == before, "until there is another"


HELD: list[Any] = []


def own_step(model: nn.Module, given: tuple[Tensor]) -> None:
    for rows in given[0].chunk(2):
        loss = model(rows)
        loss.backward()
        if HELD and HELD[0]:
            HELD.append(torch.empty_like(rows))


def test_a_step_of_ones_own_is_the_same_if_it_takes_the_same_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "plans"
    for _ in range(2):
        handle, said = planned(tmp_path / "own.json", *made(), budget=300_000, step=own_step)
        handle.remove()
    assert said[0].startswith("reusing")
    monkeypatch.setitem(globals(), "HELD", [True])
    handle, said = planned(tmp_path / "own.json", *made(), budget=300_000, step=own_step)
    handle.remove()
    assert "the step takes other memory, op by op, than before" in said[0]
    for _ in range(2):
        handle, said = planned(f"{folder}/", *made(), budget=300_000, step=own_step)
        handle.remove()
    assert said[0].startswith("reusing") and len(list(folder.iterdir())) == 1
    planned(folder, *made())[0].remove()
    assert len(list(folder.iterdir())) == 2, "each has a file of its own"


def whole_step(model: nn.Module, given: tuple[Tensor], optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(*given).backward()
    optimizer.step()


@pytest.mark.parametrize("inside", [False, True], ids=["plain", "an optimizer inside of the step"])
def test_what_thaws_under_a_kept_plan_is_planned_for(tmp_path: Path, inside: bool, one_thread: None) -> None:
    """As under one that was made just now: the same peaks, which are those of the step, and the same bits."""
    given, found = batch(), []
    for _ in range(2):
        model, optimizer = made()
        model.layers[0].requires_grad_(False)
        plain = copy.deepcopy(model)
        optimizer.param_groups[0]["lr"] = 1e-4  # the loss doubles with every layer
        others = Descent(plain.parameters(), 1e-4, momentum=0.9)

        def step(model: nn.Module, given: tuple[Tensor], optimizer: Any = optimizer) -> None:
            whole_step(model, given, optimizer)

        handle, said = planned(
            tmp_path / "plan.json", model, optimizer, given, budget=420_000, **({"step": step} if inside else {})
        )
        assert handle.batches is not None
        peaks = []
        for thawed in (False, True):
            for one in (model, plain):
                one.layers[0].requires_grad_(thawed)
            for _ in range(2):
                handle.expect(given)
                whole_step(model, given, optimizer)
                whole_step(plain, given, others)
            state = [t for held in optimizer.state.values() for t in held.values() if isinstance(t, Tensor)]
            if not inside:
                optimizer.zero_grad()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            static = [*model.parameters(), *given, *state, *gradients]
            handle.expect(given)
            measured = measured_peak(
                functools.partial(whole_step, model, given, optimizer), static_tensors=static
            ).peak_bytes
            whole_step(plain, given, others)
            assert handle.batches.now is not None
            peaks.append(handle.batches.now.peak_bytes)
            assert measured == pytest.approx(peaks[-1], abs=256)
        assert model.layers[0].up.bias.isfinite().all()
        assert all(map(torch.equal, model.parameters(), plain.parameters()))
        assert peaks[0] < peaks[1] <= 420_000
        found.append((peaks, [line.split()[0] for line in said]))
        handle.remove()
    assert found[0][0] == found[1][0]
    assert found[0][1] == [] and found[1][1] == ["reusing"]


def test_a_share_of_what_the_device_has_left_may_move_a_little(
    tmp_path: Path, plans_nothing: None, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = json.loads(file.read_text())
    document["kept"]["for"]["budget"] = "what the device has left"
    file.write_text(json.dumps(document))
    for nbytes, words in ((403_000, "reusing"), (399_900, "reusing"), (340_000, "budget was"), (500_000, "budget was")):
        budget = kept_plans.Budget(nbytes=nbytes)
        monkeypatch.setattr(
            sys.modules["jettison.planner.auto_checkpoint"], "budget_of", lambda *_, found=budget: found
        )
        lines: list[str] = []
        try:
            model, optimizer = made()
            jettison.auto_checkpoint(
                model, batch(), "auto", optimizer=optimizer, plan=file, progress=lines.append
            ).remove()
        except Planning:
            pass
        assert any(words in line for line in lines), lines


def on_ranks(folder: str) -> list[Any]:
    """What each of several calls followed, and its plan: FSDP2, then replicas whose batches are of other sizes."""
    rank, found = torch.distributed.get_rank(), []
    for number in range(5):
        torch.manual_seed(0)
        model = Stack()
        if number < 3:
            for layer in model.layers:
                fully_shard(layer)
            fully_shard(model)
        else:
            model = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        file = Path(folder) / ("sharded.json" if number < 3 else "replicated.json")
        if number == 2 and rank == 0:  # made for another machine
            own = file.with_name("sharded-rank0.json")
            own.write_text(own.read_text().replace('"jettison": "', '"jettison": "0.'))
        torch.distributed.barrier()
        given = batch() if number < 3 else batch(256 + 64 * rank)
        handle, said = planned(file, model, optimizer, given, 420_000)
        model(*given).backward()
        found.append(([line.split()[0] for line in said], handle.plan.hash))
        handle.remove()
    return [found, sorted(one.name for one in Path(folder).iterdir())]


def test_ranks_follow_what_was_kept_together(tmp_path: Path) -> None:
    first, second = run_ranks(on_ranks, 2, str(tmp_path))
    said = [[words for words, _ in found] for found, _ in (first, second)]
    assert said[0] == [[], ["reusing"], ["the"], [], ["reusing"]], "anew where one has none that is right"
    assert said[1] == [[], [], [], [], ["reusing"]], "a rank that is told has nothing to say"
    hashes = [[plan for _, plan in found] for found, _ in (first, second)]
    assert hashes[0][:3] == hashes[1][:3], "ranks that share parameters have one plan"
    assert hashes[0][0] == hashes[0][1] and hashes[0][3] == hashes[0][4] and hashes[1][3] == hashes[1][4]
    assert first[1] == ["replicated-rank0.json", "replicated-rank1.json", "sharded-rank0.json"]


def in_a_pipeline(folder: str) -> list[Any]:
    """The kept plan that each of several calls followed, and its own: stages with files of their own."""
    rank, found = torch.distributed.get_rank(), []
    file = Path(folder) / "stage.json"
    for number in range(4):
        torch.manual_seed(0)
        stage = PipelineStage(nn.Sequential(*(Block(WIDTH, 64) for _ in range(2))), rank, 2, torch.device("cpu"))
        schedule = Schedule1F1B(stage, 2, functional.mse_loss)
        optimizer = torch.optim.SGD(stage.submod.parameters(), 0.1)
        if number == 2 and rank == 1:  # made for another machine
            own = file.with_name("stage-rank1.json")
            own.write_text(own.read_text().replace('"jettison": "', '"jettison": "0.'))
        torch.distributed.barrier()
        where = None if number == 3 and rank == 0 else file

        def step(schedule: Any, x: Tensor) -> None:
            schedule.step(*[x] * (rank == 0), target=x if rank else None, return_outputs=False)

        handle, said = planned(where, schedule, optimizer, batch()[0], 420_000, step=step)
        found.append(([line.split()[0] for line in said], handle.plan.hash))
        handle.remove()
    return found


@pytest.mark.slow
def test_stages_follow_what_was_kept_together(tmp_path: Path) -> None:
    first, second = run_ranks(in_a_pipeline, 2, str(tmp_path))
    assert [words for words, _ in first] == [[], ["reusing"], [], []], "anew where another one has none, or keeps none"
    assert [words for words, _ in second] == [[], ["reusing"], ["the"], []]
    assert first[0][1] == first[1][1] and second[0][1] == second[1][1]


@pytest.mark.parametrize(
    "text", ["", "notes of mine", "[1]", '{"schema": "jettison.plan/1"}', '{"schema": "jettison.plan/1", "kept": {}}']
)
def test_a_file_that_is_something_else_is_not_written_over(tmp_path: Path, plans_nothing: None, text: str) -> None:
    file = tmp_path / "notes"
    file.write_text(text)
    with pytest.raises(UsageError, match=r"notes.* is not overwritten; expected a file of an earlier call"):
        planned(file, *made())
    assert file.read_text() == text


def test_a_plan_that_was_edited_is_not_followed(file: Path, plans_nothing: None) -> None:
    document = json.loads(file.read_text())
    document["predicted"]["peak_bytes"] -= 1
    file.write_text(json.dumps(document))
    lines: list[str] = []
    model, optimizer = made()
    with pytest.raises(Planning):
        jettison.auto_checkpoint(model, batch(), BUDGET, optimizer=optimizer, plan=file, progress=lines.append)
    assert any("the plan was changed after it was written" in line for line in lines)


def test_a_plan_that_cannot_be_kept_stops_nothing(
    kept: tuple[str, Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in the way").write_text("")
    keeps = kept_plans.KeptPlans(
        file=tmp_path / "in the way" / "plan.json",
        facts={},
        asked=kept_plans.AskedBudget(nbytes=1),
        budget=kept_plans.Budget(nbytes=1),
        progress=print,
    )
    with pytest.warns(UserWarning, match="cannot be kept"):
        keeps.write([kept[1]], state_bytes=0, planning_seconds=1.0)

    def fails(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.replace", fails)
    keeps.file = tmp_path / "plan.json"
    with pytest.warns(UserWarning, match="no space left"):
        keeps.write([kept[1]], state_bytes=0, planning_seconds=1.0)
    assert [one.name for one in tmp_path.iterdir()] == ["in the way"], "nothing half-written is left"
