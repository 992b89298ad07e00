"""Compiled blocks that are not what they were when they were planned: gradients of the model as it is, or an error."""

from __future__ import annotations

import copy
import io
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import jettison
from jettison.core.errors import TraceError, UsageError
from jettison.core.units import Bytes
from jettison.planner.handle import Applied
from jettison.runtime import compiled_regions
from jettison.runtime.compiled_regions import CompiledRegion
from jettison.runtime.planned_forward import PlannedForward
from support.compiled_blocks import QUIET, WIDTH, batch, compiled_copy, equal, gradients, model_of, peak, smallest
from support.toys import Headed, Mlp

pytestmark = [pytest.mark.usefixtures("one_thread"), *QUIET]


@pytest.fixture(autouse=True)
def more_of_one_function() -> Iterator[None]:
    """Copies without a plan compile one function in many ways, too."""
    with torch._dynamo.config.patch(recompile_limit=64):
        yield


def planned(model: nn.Module, given: Any) -> Applied:
    """With some room."""
    return jettison.auto_checkpoint(model, given, Bytes(int(1.3 * smallest(model, given))), compile="blocks")


def other_rate(model: Headed) -> None:
    for layer in model.layers:
        layer.rate = 0.5


def other_part(model: Headed) -> None:
    torch.manual_seed(5)
    for layer in model.layers:
        layer.up = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh())


def frozen(model: Headed) -> None:
    for parameter in model.layers[0].parameters():
        parameter.requires_grad_(False)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        pytest.param(other_rate, "layers.0 runs other ops than it was planned with", marks=pytest.mark.slow),
        (other_part, r"modules of the model were added, replaced or removed after planning \(up\)"),
        (frozen, "layers.0 runs other ops than it was planned with"),
    ],
)
@pytest.mark.filterwarnings("ignore:layers.0 runs other ops")
def test_blocks_that_changed_have_their_new_gradients_and_say_so(change: Callable[[Headed], None], says: str) -> None:
    model, given = model_of(), batch()
    with planned(model, given):
        gradients(model, given)
        change(model)
        with pytest.warns(UserWarning, match=says):
            got = gradients(model, given)
        assert equal(got, gradients(compiled_copy(model), given))


def test_a_block_in_the_place_of_another_runs_compiled_too() -> None:
    model, given = model_of(), batch()
    with planned(model, given) as handle:
        gradients(model, given)
        model.layers[1] = Mlp(WIDTH, 4 * WIDTH, 0.2)
        with pytest.warns(UserWarning, match=r"layers\.1 is another Mlp"):
            got = gradients(model, given)
        assert equal(got, gradients(compiled_copy(model), given))
        names = [r.name for r in handle.regions if isinstance(r, CompiledRegion) and not r.retired]
        assert sorted(names) == [f"layers.{i}" for i in range(4)]


def doubled(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return 2 * output


def close(ours: list[Tensor | None], theirs: list[Tensor | None]) -> bool:
    """But for what compilation changes."""
    pairs = zip(ours, theirs, strict=True)
    return all(a is not None and b is not None and torch.allclose(a, b, rtol=1e-4, atol=1e-7) for a, b in pairs)


@pytest.mark.slow
def test_hooks_inside_of_blocks_run_whenever_they_are_there() -> None:
    """Dynamo does not look at hooks: what it compiled before one came would leave it out."""
    model, plain, given = model_of(rate=0.0), model_of(rate=0.0), batch()
    with jettison.apply(model, "full", batch=given, compile="blocks"):
        before = gradients(model, given)
        hooks = [each.layers[2].up.register_forward_hook(doubled) for each in (model, plain)]
        hooked = gradients(model, given)
        assert close(hooked, gradients(plain, given)) and not close(hooked, before)
        for hook in hooks:
            hook.remove()
        assert equal(gradients(model, given), before)


def test_hooks_of_one_instance_are_not_those_of_another() -> None:
    given = batch()
    for hooked in (False, True, False):
        model = model_of(rate=0.0)
        if hooked:
            model.layers[2].up.register_forward_hook(doubled)
        expected = gradients(model, given)  # op by op
        with jettison.apply(model, "full", batch=given, compile="blocks"):
            assert close(gradients(model, given), expected)


def breaks(module: nn.Module, args: Any) -> None:
    torch._dynamo.graph_break()


def other_forward(model: Headed) -> None:
    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        return nn.functional.linear(2 * x, self.weight, self.bias)

    model.layers[1].up.forward = types.MethodType(forward, model.layers[1].up)


@pytest.mark.slow
def test_another_forward_of_a_part_is_compiled() -> None:
    model, given = model_of(), batch()
    with jettison.apply(model, "full", batch=given, compile="blocks"):
        before = gradients(model, given)
        other_forward(model)
        got = gradients(model, given)
    assert not equal(got, before)
    assert equal(got, gradients(compiled_copy(model), given))


def test_a_block_that_stops_being_one_graph_is_an_error() -> None:
    model, given = model_of(), batch()
    with jettison.apply(model, "full", batch=given, compile="blocks"):
        before = gradients(model, given)
        hook = model.layers[2].up.register_forward_pre_hook(breaks)
        with pytest.raises(TraceError, match=r"layers\.2 cannot be compiled as it is now .*graph_break"):
            gradients(model, given)
        hook.remove()
        assert equal(gradients(model, given), before)


class Numbered(Mlp):
    """Each one reads another number, and is compiled for itself."""

    number = 0

    def inner(self, h: Tensor) -> Tensor:
        return super().inner(h) * (1 + self.number)


def numbered(count: int) -> Headed:
    torch.manual_seed(0)
    model = Headed([Numbered(WIDTH, 4 * WIDTH) for _ in range(count)], WIDTH, 8)
    for number, layer in enumerate(model.layers):
        layer.number = number
    return model


@pytest.mark.slow
def test_more_blocks_that_differ_than_dynamo_compiles_by_itself() -> None:
    model, given = numbered(4), batch()
    expected = gradients(compiled_copy(model), given)
    compiled_regions._SHARED.clear()  # what other tests made of this class counts as well
    with torch._dynamo.config.patch(recompile_limit=2, accumulated_recompile_limit=6):
        for word in ("full", "none"):
            with jettison.apply(model, word, batch=given, compile="blocks"):
                assert equal(gradients(model, given), expected)


@pytest.mark.filterwarnings("ignore:torch._dynamo hit config")
@pytest.mark.slow
def test_past_the_limit_of_what_is_compiled_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_regions, "MOST_VARIANTS", 2)
    model, given = numbered(4), batch()
    compiled_regions._SHARED.clear()
    refused = pytest.raises(TraceError, match=r"layers\.2 cannot be compiled as it is now \(FailOnRecompileLimitHit")
    with jettison.apply(model, "full", batch=given, compile="blocks"), refused:
        gradients(model, given)
    compiled_regions._SHARED.clear()


def test_evaluations_and_forwards_without_a_backward_leave_nothing_behind() -> None:
    model, given = model_of(), batch()
    expected = gradients(compiled_copy(model), given)
    with planned(model, given) as handle:
        for _ in range(2):
            assert equal(gradients(model, given), expected)
            model.eval()
            for mode in (torch.no_grad(), torch.inference_mode()):
                with mode:
                    model(*given)
            model.train()
            model(*given)
        assert handle.plan is not None
        assert peak(model, given) <= handle.plan.budget_bytes


@pytest.mark.filterwarnings("ignore:the model cannot be planned tensor by tensor")  # in the step that stops
def test_exceptions_in_forward_and_in_backward_leave_nothing_behind() -> None:
    model, given = model_of(), batch()
    expected = gradients(compiled_copy(model), given)

    def stop(*_: Any) -> None:
        raise KeyError("stop")

    with jettison.apply(model, "full", batch=given, compile="blocks"):
        assert equal(gradients(model, given), expected)
        for hook in (model.layers[2].register_forward_pre_hook, model.layers[1].register_full_backward_hook):
            held = hook(stop)
            with pytest.raises(KeyError, match="stop"):
                model(given[0].clone().requires_grad_()).backward()
            held.remove()
            assert equal(gradients(model, given), expected)


@pytest.mark.filterwarnings("ignore:a (deep|pickled) copy of the model trains without the plan")
def test_copies_train_without_the_plan_and_states_are_those_of_the_model() -> None:
    model, given = model_of(), batch()
    names = list(model.state_dict())
    plain = copy.deepcopy(model)
    with jettison.apply(model, "full", batch=given, compile="blocks"):
        assert list(model.state_dict()) == names
        twin = copy.deepcopy(model)
        assert not isinstance(twin.layers[0].forward, PlannedForward)
        loaded = model_of()
        loaded.load_state_dict(model.state_dict())
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        read = torch.load(file, weights_only=False)
        expected = gradients(plain, given)
        assert all(equal(gradients(each, given), expected) for each in (twin, loaded, read))
    assert "forward" not in vars(model.layers[0])
    assert equal(gradients(model, given), expected)


def shared_weights(model: Headed) -> None:
    model.layers[1].up = model.layers[0].up
    model.layers[3].down.weight = model.layers[2].down.weight


def shared_block(model: Headed) -> None:
    model.layers[3] = model.layers[0]


@pytest.mark.parametrize("share", [shared_weights, shared_block])
def test_weights_and_blocks_that_are_there_twice(share: Callable[[Headed], None]) -> None:
    model, given = model_of(), batch()
    share(model)
    expected = gradients(compiled_copy(model), given)
    with planned(model, given) as handle:
        assert equal(gradients(model, given), expected)
        assert handle.plan is not None
        assert peak(model, given) == pytest.approx(handle.plan.predicted.peak_bytes, rel=0.001)


@pytest.mark.slow
def test_two_models_of_one_class_and_other_sizes_and_types() -> None:
    """At once, under one word: they share what is compiled, and nothing else."""
    small = Headed([Mlp(16, 48, 0.2) for _ in range(3)], 16, 8)
    models = [model_of(), model_of().bfloat16(), model_of().double(), small]
    given = [batch(), (batch()[0].bfloat16(),), (batch()[0].double(),), (torch.randn(4, 32, 16),)]
    expected = [gradients(compiled_copy(model), args) for model, args in zip(models, given, strict=True)]
    handles = [
        jettison.apply(model, "full", batch=args, compile="blocks") for model, args in zip(models, given, strict=True)
    ]
    for _ in range(2):
        for model, args, wanted in zip(models, given, expected, strict=True):
            assert equal(gradients(model, args), wanted)
    for handle in handles:
        handle.remove()


@pytest.mark.slow
def test_autocast_is_compiled_in_and_out_of() -> None:
    model, given = model_of(), batch()
    plain = compiled_copy(model)

    def step(each: nn.Module) -> list[Tensor | None]:
        torch.manual_seed(7)
        with torch.autocast("cpu", torch.bfloat16):
            loss = each(*given)
        loss.backward()
        found = [p.grad for p in each.parameters()]
        each.zero_grad()
        return found

    expected, other = step(plain), gradients(plain, given)
    with torch.autocast("cpu", torch.bfloat16):
        handle = jettison.apply(model, "full", batch=given, compile="blocks")
    with handle:
        assert equal(step(model), expected)
        assert equal(gradients(model, given), other)  # and without, where nobody planned


def test_torchs_own_budget_takes_nothing_from_a_plan() -> None:
    model, given = model_of(), batch()
    expected = gradients(compiled_copy(model), given)
    with (
        jettison.apply(model, "selective-op", batch=given, compile="blocks") as handle,
        torch._functorch.config.patch(activation_memory_budget=0.0),
    ):
        kept = handle.report()[0].kept_bytes
        assert equal(gradients(model, given), expected)
        saved: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        x = given[0].clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model.layers[0](x)
        assert sum(nbytes for at, nbytes in saved.items() if at not in own) == kept


def test_torchs_own_budget_is_refused_beside_a_plan() -> None:
    with (
        torch._functorch.config.patch(activation_memory_budget=0.5),
        pytest.raises(UsageError, match=r"activation_memory_budget is 0\.5; expected 1\.0"),
    ):
        jettison.apply(model_of(), "full", batch=batch(), compile="blocks")
