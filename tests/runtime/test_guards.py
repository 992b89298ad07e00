"""When the model is not what was recorded: other shapes, other modes, a trace that lies, no trace at all."""

from __future__ import annotations

import copy
import functools
import io
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import jettison
from jettison.capture.model_trace import ModelTrace
from jettison.capture.module_guards import ModuleGuard
from jettison.capture.recorder import RegionTrace
from jettison.capture.tracer import trace_model
from jettison.core.errors import StaleTensor, TraceError, UnsupportedModule
from jettison.ledger.program import Program
from jettison.planner import Applied
from jettison.runtime.install import install
from jettison.runtime.planned_forward import PlannedForward
from jettison.solve.checkpoint_policy import Full, KeepAll
from jettison.verify.differences import compare_gradients, independent_copy, parameter_digest, same_bits
from support.toys import Headed

N, ROWS, LAYERS = 8, 4, 3
FLAGS = {"swap": False, "power": 2.0}


class Block(nn.Module):
    """Two products and two activations, whose order is a process-wide flag, and a power, which is another."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(N, N), nn.Linear(N, N), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        first, second = (self.down, self.up) if FLAGS["swap"] else (self.up, self.down)
        hidden = first(x).sigmoid() ** FLAGS["power"]
        return x + self.dropout(second(hidden.sin()).tanh())


@pytest.fixture(autouse=True)
def plain_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in FLAGS.items():
        monkeypatch.setitem(FLAGS, name, value)


def pair(block: Callable[[], nn.Module] = Block) -> tuple[Headed, nn.Module, Tensor]:
    torch.manual_seed(0)
    model = Headed((block() for _ in range(LAYERS)), N, N)
    return model, independent_copy(model), torch.randn(ROWS, N)


def step(model: nn.Module, x: Tensor) -> Tensor:
    torch.manual_seed(1)
    model.zero_grad(set_to_none=True)
    loss = model(x)
    loss.backward()
    return loss.detach()


def assert_same_step(model: nn.Module, plain: nn.Module, x: Tensor) -> None:
    assert same_bits(step(model, x), step(plain, x))
    report = compare_gradients(model, plain)
    assert report.identical, report.differences[:3]


def recordings(handle: Applied) -> int:
    return sum(report.recordings for report in handle.report())


# without a plan, and after it -----------------------------------------------------------------------------------------


def test_calls_without_gradients_are_not_planned() -> None:
    model, plain, x = pair()
    with jettison.apply(model, "full", batch=(x,)) as handle:
        before = sum(report.calls for report in handle.report())
        with torch.no_grad():
            torch.manual_seed(1)
            out = model(x)
        torch.manual_seed(1)
        assert same_bits(out, plain(x).detach()) and not out.requires_grad
        with torch.inference_mode():
            model.eval()(x)
        assert sum(report.calls for report in handle.report()) == before
        step(model.train(), x)
        assert sum(report.calls for report in handle.report()) == before + LAYERS + 1


def test_remove_gives_the_model_back() -> None:
    model, plain, x = pair()
    own = model.layers[1].forward = model.layers[1].forward  # an instance's own forward comes back as well
    handle = jettison.apply(model, "every:2", batch=(x,))
    assert isinstance(model.layers[0].forward, PlannedForward) and isinstance(model.layers[1].forward, PlannedForward)
    step(model, x)
    handle.remove()
    assert "forward" not in vars(model) and "forward" not in vars(model.layers[0])
    assert vars(model.layers[1])["forward"] is own
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert_same_step(model, plain, x)


def test_a_second_plan_is_refused_until_the_first_is_removed() -> None:
    model, plain, x = pair()
    with jettison.apply(model, "full", batch=(x,)), pytest.raises(UnsupportedModule, match="remove"):
        jettison.apply(model, "none", batch=(x,))
    with jettison.apply(model, "selective-op", batch=(x,)):
        assert_same_step(model, plain, x)


@pytest.mark.parametrize("policy", ["full", "selective-op", "every:2"])
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.filterwarnings("ignore:a (deep|pickled) copy of the model trains without the plan")
def test_a_copy_of_a_planned_model_trains_plainly(how: str, policy: str) -> None:
    model, plain, x = pair()
    with jettison.apply(model, policy, batch=(x,)):
        step(model, x)
        model.zero_grad(set_to_none=True)
        if how == "deepcopy":
            twin = copy.deepcopy(model)
        else:
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            twin = torch.load(file, weights_only=False)
        assert not any(isinstance(m.forward, PlannedForward) for m in twin.modules())
        assert_same_step(twin, plain, x)
        assert all(p.grad is None for p in model.parameters()), "the copy runs its own parameters"
        assert_same_step(model, twin, x)


class Looker:
    """Looks on from a hook, and holds the plan itself."""

    def __init__(self, applied: Applied) -> None:
        self.applied = applied

    def look(self, *_: Any) -> None:
        pass


@pytest.mark.filterwarnings("ignore:a deep copy of the model trains without the plan")
def test_a_hook_that_holds_the_plan_leaves_a_copy_its_own_parameters() -> None:
    """`copy.deepcopy` comes by the blocks through the hook, before it has copied them."""
    model, plain, x = pair()
    with jettison.apply(model, "full", batch=(x,)) as applied:
        model.register_forward_hook(Looker(applied).look)
        twin = copy.deepcopy(model)
        assert_same_step(twin, plain, x)
        assert all(p.grad is None for p in model.parameters()), "the copy runs its own parameters"
        assert_same_step(model, twin, x)


def test_the_state_dict_is_the_models_own() -> None:
    model, plain, x = pair()
    with jettison.apply(model, "full", batch=(x,)):
        step(model, x)
        assert list(model.state_dict()) == list(plain.state_dict())
        plain.load_state_dict(model.state_dict())
        model.load_state_dict(plain.state_dict())
        assert [n for n, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]
        assert_same_step(model, plain, x)
    assert parameter_digest(model) == parameter_digest(plain)


# other calls than the recorded one ------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["full", "selective-op", "every:2"])
def test_another_batch_shape_is_recorded_once(policy: str) -> None:
    model, plain, x = pair()
    with jettison.apply(model, policy, batch=(x,)) as handle:
        for rows in (ROWS, 7, ROWS, 7, 2):
            assert_same_step(model, plain, torch.randn(rows, N))
        assert recordings(handle) == 2 * LAYERS


def test_training_and_evaluation_mode() -> None:
    model, plain, x = pair()
    with jettison.apply(model, "full", batch=(x,)) as handle:
        for mode in (True, False, True):
            assert_same_step(model.train(mode), plain.train(mode), x)
        flips = recordings(handle)
        # what is known in training is known again when that comes back
        assert LAYERS <= flips <= LAYERS + 1
        model.layers[1].dropout.p = plain.layers[1].dropout.p = 0.25  # type: ignore[union-attr,assignment]
        assert_same_step(model, plain, x)
        assert recordings(handle) >= flips + 1


def test_autocast_and_keyword_arguments() -> None:
    model, plain, x = pair()
    with jettison.apply(model, "full", batch=(x,)):
        for m in (model, plain):
            torch.manual_seed(1)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = m(x=x)
            loss.backward()
    assert compare_gradients(model, plain).identical


def test_a_replaced_parameter_and_a_replaced_module() -> None:
    model, plain, x = pair()
    with jettison.apply(model, "full", batch=(x,)):
        step(model, x)
        for m in (model, plain):
            torch.manual_seed(5)
            m.layers[0].up.weight = nn.Parameter(torch.randn(N, N))  # type: ignore[union-attr]
            m.layers[1].down = nn.Linear(N, N, bias=False)  # type: ignore[union-attr]
        assert_same_step(model, plain, x)
        assert_same_step(model, plain, x)


# divergence -----------------------------------------------------------------------------------------------------------


def test_a_flag_that_was_flipped_after_the_first_step_is_detected() -> None:
    """Both orders save tensors of the same shapes: parameters tell them apart."""
    model, plain, x = pair()
    with jettison.apply(model, "full", batch=(x,)) as handle:
        assert_same_step(model, plain, x)
        assert recordings(handle) == 0
        FLAGS["swap"] = True
        assert_same_step(model, plain, x)
        assert recordings(handle) >= LAYERS
        FLAGS["swap"] = False
        assert_same_step(model, plain, x)


def test_a_number_that_was_changed_before_the_first_step_is_detected() -> None:
    """Same ops, same shapes, another exponent: only the first run's check can see it."""
    model, plain, x = pair()
    with jettison.apply(model, "full", batch=(x,)) as handle:
        FLAGS["power"] = 3.0
        assert_same_step(model, plain, x)
        assert_same_step(model, plain, x)
        assert LAYERS <= recordings(handle) <= LAYERS + 1
        assert not any(report.fallback for report in handle.report())


class Counted(Block):
    """Counts its runs on its class, which changes nothing that it computes."""

    runs = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).runs += 1
        return super().forward(x)


def test_a_count_on_a_class_that_changes_nothing_is_recorded_again_once() -> None:
    model, plain, x = pair(Counted)
    with jettison.apply(model, "full", batch=(x,)) as handle:
        for _ in range(6):
            assert_same_step(model, plain, x)
        assert recordings(handle) <= 2 * (LAYERS + 1)


class Tabled:
    def __init__(self, table: dict[str, int]) -> None:
        self.table = table

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.table["scale"]


def scaled(table: dict[str, int], x: Tensor) -> Tensor:
    return x * table["scale"]


@pytest.mark.parametrize("hide", [lambda table: functools.partial(scaled, table), lambda table: Tabled(table).scaled])
def test_a_guard_looks_into_every_partial_and_method_of_a_list(hide: Callable[[dict[str, int]], Any]) -> None:
    tables = [{"scale": n} for n in range(3)]
    module = nn.Identity()
    module.parts = [hide(table) for table in tables]
    for table in tables:
        guard = ModuleGuard(module)
        assert guard.holds()
        table["scale"] += 1
        assert not guard.holds()


@pytest.mark.parametrize("policy", ["full", "selective-op"])
def test_a_number_read_from_the_batch_is_never_the_recorded_one(policy: str) -> None:
    class ByLength(Block):
        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            return x + self.down((self.up(x).sin() * lengths.sum().item()).sin().tanh())

    torch.manual_seed(0)
    model, x = Headed((ByLength() for _ in range(LAYERS)), N, N), torch.randn(ROWS, N)
    plain = independent_copy(model)
    with jettison.apply(model, policy, batch=(x, torch.tensor([1, 2]))) as handle:
        for lengths in ([1, 2], [2, 2], [7, 1]):
            for m in (model, plain):
                m.zero_grad()
                m(x, torch.tensor(lengths)).backward()
            assert compare_gradients(model, plain).identical, lengths
        assert sum(report.slots_dropped for report in handle.report()) > 0
        assert recordings(handle) == 0


class Exposed(Block):
    """Autograd keeps what it returns."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).exp()


@dataclass(frozen=True)
class AllButTanh:
    """Everything that autograd saves, without one activation."""

    word: str = "all but tanh"

    def kept(self, program: Program) -> frozenset[int]:
        tanh = {b for op in program.ops if op.name.startswith("aten.tanh") for b in op.outputs}
        assert tanh
        return program.saved_buffers() - tanh


@pytest.mark.parametrize("steps", [0, 1])  # the first run is compared call by call, later ones are not
def test_a_write_to_a_kept_tensor_is_said(steps: int) -> None:
    model, x = nn.Sequential(Exposed(), Exposed()), torch.randn(ROWS, N)
    with jettison.apply(model, AllButTanh(), batch=(x,), regions=["0", "1"], loss_fn=torch.sum):
        for _ in range(steps):
            model(x).sum().backward()
        out = model(x)
        with torch.no_grad():
            out.mul_(2)
        with pytest.raises(StaleTensor, match="a kept tensor"):
            out.sum().backward()


Tamper = Callable[[RegionTrace], RegionTrace]


def swapped(trace: RegionTrace) -> RegionTrace:
    """The two products change places, in the program and in the expected sequence."""
    calls = list(trace.calls)
    a, b = (i for i, call in enumerate(calls) if str(call.func) == "aten.addmm.default")
    calls[a], calls[b] = (
        replace(calls[a], args=(calls[b].args[0], calls[a].args[1], calls[b].args[2])),
        replace(calls[b], args=(calls[a].args[0], calls[b].args[1], calls[a].args[2])),
    )
    program = trace.program
    slots, refs = list(program.slots), list(trace.slots)
    weights = [i for i, slot in enumerate(slots) if trace.names.get(slot.buffer, "").endswith("weight")]
    (i, j) = weights
    slots[i], slots[j] = replace(slots[i], buffer=slots[j].buffer), replace(slots[j], buffer=slots[i].buffer)
    refs[i], refs[j] = replace(refs[i], buffer=slots[i].buffer), replace(refs[j], buffer=slots[j].buffer)
    return replace(trace, calls=calls, program=replace(program, slots=tuple(slots)), slots=refs)


def two_ops_swapped(trace: RegionTrace) -> RegionTrace:
    sequence = list(trace.sequence)
    i = next(i for i, call in enumerate(sequence) if "sigmoid" in str(call.signature[0]))
    sequence[i], sequence[i + 2] = sequence[i + 2], sequence[i]
    return replace(trace, sequence=sequence)


def another_stride(trace: RegionTrace) -> RegionTrace:
    sequence = list(trace.sequence)
    func, results, *rest = sequence[1].signature
    (size, _stride, dtype), *more = results
    sequence[1] = replace(sequence[1], signature=(func, ((size, (1, ROWS), dtype), *more), *rest))
    return replace(trace, sequence=sequence)


def one_op_less(trace: RegionTrace) -> RegionTrace:
    return replace(trace, sequence=trace.sequence[:-1])


def one_slot_less(trace: RegionTrace) -> RegionTrace:
    return replace(trace, program=replace(trace.program, slots=trace.program.slots[:-1]), slots=trace.slots[:-1])


def one_op_more(trace: RegionTrace) -> RegionTrace:
    return replace(trace, sequence=[*trace.sequence, trace.sequence[-1]])


@pytest.mark.filterwarnings("ignore:.*cannot be planned tensor by tensor:UserWarning")
@pytest.mark.parametrize("tamper", [swapped, two_ops_swapped, another_stride, one_op_less, one_op_more, one_slot_less])
def test_a_trace_that_lies_is_caught_and_the_gradients_are_right(tamper: Tamper) -> None:
    model, plain, x = pair()
    traced = trace_model(model, (x,))
    (cls,) = traced.classes.values()
    cls.trace = tamper(cls.trace)
    handle = apply_full(model, traced)
    try:
        assert_same_step(model, plain, x)
        assert_same_step(model, plain, x)
        blocks = handle.report()[:-1]
        assert all(report.recordings or report.fallback for report in blocks), "nobody noticed"
    finally:
        handle.remove()


def apply_full(model: nn.Module, traced: ModelTrace) -> Applied:
    names = {call.name: Full() for call in traced.calls}
    return Applied(regions=install(model, traced, names, KeepAll()))


# what cannot be recorded ----------------------------------------------------------------------------------------------


class Opaque(Block):
    """Looks at a value of a hidden state."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if bool(x.sum() < 1e9) else x


def test_the_fallback_is_checkpointing_said_once_and_right() -> None:
    model, plain, x = pair(Opaque)
    with pytest.warns(UserWarning, match="cannot be recorded: they are checkpointed whole") as caught:
        handle = jettison.auto_checkpoint(model, (x,), "1MiB")
    assert len(caught) == 1
    with handle:
        for _ in range(3):
            assert_same_step(model, plain, x)
        assert all(report.fallback for report in handle.report()[:-1])


def test_a_fallback_found_while_training_warns_once_a_block() -> None:
    class Later(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if len(x) == ROWS or bool(x.sum() < 1e9) else x

    model, plain, x = pair(Later)
    with jettison.apply(model, "full", batch=(x,)) as handle:
        assert_same_step(model, plain, x)
        with pytest.warns(UserWarning, match="checkpointed whole") as caught:
            for _ in range(3):
                assert_same_step(model, plain, torch.randn(ROWS + 1, N))
        assert len(caught) == LAYERS
        assert_same_step(model, plain, x)
        assert recordings(handle) == LAYERS


class Counting(nn.Module):
    """Counts its calls in a buffer, and can be told to do something else from its second product on."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(N, N), nn.Linear(N, N)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        h = self.a(x)
        g = h.relu()  # saved first, and computed again out of what the sine saves
        h = h.double() if os.environ.get("HIDDEN") else h
        return x + self.b(g) + h.sin().float()


def test_a_run_that_leaves_its_recording_is_kept_from_there_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain, x = pair(Counting)
    with jettison.apply(model, "full", batch=(x,)):
        assert_same_step(model, plain, x)
        monkeypatch.setenv("HIDDEN", "1")
        assert_same_step(model, plain, x)


def test_what_left_its_recording_is_not_run_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was dropped needs what never came, and another run would count twice: an error, not a guess."""
    model, plain, x = pair(Counting)
    with jettison.apply(model, "selective-op", batch=(x,)):
        assert_same_step(model, plain, x)
        monkeypatch.setenv("HIDDEN", "1")
        with pytest.raises(TraceError, match=r"layers.0 did not run as recorded .* repeat the step"):
            step(model, x)
