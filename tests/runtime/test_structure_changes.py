"""Models that are patched or rebuilt after planning: right, and never without a word."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper

import jettison
from jettison.core.errors import UnsupportedModule
from support.structure import BLOCKS, ROWS, WIDTH, Block, Other, batch, calls, net, planned, said, same, step
from support.toys import Net

pytestmark = pytest.mark.usefixtures("one_thread")


# blocks ---------------------------------------------------------------------------------------------------------------


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).tanh() * 2


class Lora(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.delta = base, nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.delta(x)


def _replace_one(model: Any) -> None:
    model.layers[1] = Other()


def _replace_all(model: Any) -> None:
    model.layers = nn.ModuleList(Other() for _ in range(BLOCKS))


def _wrap(model: Any) -> None:
    model.layers[1] = Wrapper(model.layers[1])


def _wrap_twice(model: Any) -> None:
    model.layers[0] = Wrapper(Wrapper(model.layers[0]))


def _append(model: Any) -> None:
    model.layers.append(Other())


def _remove(model: Any) -> None:
    del model.layers[0]


def _insert(model: Any) -> None:
    model.layers.insert(1, Other())


def _reverse(model: Any) -> None:
    model.layers = nn.ModuleList(reversed(list(model.layers)))


def _share(model: Any) -> None:
    model.layers[2] = model.layers[0]


def _copy_a_block(model: Any) -> None:
    model.layers[1] = copy.copy(model.layers[2])


def _forward_on_an_instance(model: Any) -> None:
    model.layers[1].forward = types.MethodType(Other.forward, model.layers[1])


def _forward_around_the_old_one(model: Any) -> None:
    old = model.layers[1].forward
    model.layers[1].forward = lambda x: old(x).sin()


ALL = ["layers.0", "layers.1", "layers.2"]
CHANGES: list[tuple[Any, list[str], str]] = [
    (_replace_one, ALL, "layers.1 is another Other"),
    (_replace_all, ALL, "layers.0 is another Other, layers.1 is another Other"),
    (_wrap, ["layers.0", "layers.1.inner", "layers.2"], "layers.1 is now layers.1.inner"),
    (_wrap_twice, ["layers.0.inner.inner", "layers.1", "layers.2"], "is now layers.0.inner.inner"),
    (_append, ALL, "modules were added"),
    (_remove, ["layers.0", "layers.1"], "layers.0 is gone"),
    (_insert, ["layers.0", "layers.2", "layers.3"], "layers.1 is now layers.2"),
    (_reverse, ALL, "layers.0 is now layers.2"),
    (_share, ["layers.0", "layers.1"], "layers.2 is gone"),
    (_forward_on_an_instance, ALL, "layers.1 has another forward"),
    (_forward_around_the_old_one, ALL, "layers.1 has another forward"),
]


@pytest.mark.parametrize(("change", "names", "words"), CHANGES, ids=lambda v: getattr(v, "__name__", ""))
@pytest.mark.parametrize("budget", [False, True])
def test_changed_blocks_are_noticed_at_the_next_step(
    change: Callable[[Any], None], names: list[str], words: str, budget: bool
) -> None:
    def changed(model: Any) -> Any:
        torch.manual_seed(3)
        change(model)
        return model

    model = net()
    if budget:
        handle = jettison.auto_checkpoint(model, (batch(),), "1GiB")
    else:
        handle = jettison.apply(model, "full", batch=(batch(),))
    step(model)
    got, texts = said(lambda: step(changed(model)))
    twin = changed(net())
    assert same(got, step(twin))
    assert len(texts) == 1
    assert words in texts[0]
    assert ("budget" in texts[0]) is budget
    before = calls(handle)
    assert sorted(before) == ["", *names]
    got, texts = said(lambda: step(model))
    assert same(got, step(twin))
    assert texts == []
    after = calls(handle)
    assert all(after[name] > before[name] for name in before)
    handle.remove()
    assert same(step(model), step(twin))


def test_a_replaced_block_is_treated_as_the_old_one_was() -> None:
    model, handle = planned()
    said(lambda: (_replace_one(model), step(model)))
    assert next(r for r in handle.report() if r.name == "layers.1" and r.calls).slots_dropped > 0


def test_a_shallow_copy_in_the_place_of_a_block_is_right() -> None:
    model, _ = planned()
    _copy_a_block(model)
    twin = net()
    _copy_a_block(twin)
    for _ in range(2):
        got, _ = said(lambda: step(model))
        assert same(got, step(twin))
    model, _ = planned()
    _copy_a_block(model)
    assert any("plan" in text for text in said(lambda: step(model))[1])


def test_lora_inside_a_block_is_recorded_and_what_it_costs_is_said() -> None:
    def with_lora(model: Any) -> Any:
        torch.manual_seed(3)
        for layer in model.layers:
            layer.a = Lora(layer.a)
        return model

    model = net()
    handle = jettison.auto_checkpoint(model, (batch(),), "1GiB")
    step(model)
    got, texts = said(lambda: step(with_lora(model)))
    assert same(got, step(with_lora(net())))
    assert [text for text in texts if "budget" in text] == texts
    assert len(texts) == 1
    assert said(lambda: step(model))[1] == []
    assert not any(region.fallback for region in handle.report())


def test_a_forward_set_on_the_class_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, handle = planned()
    step(model)
    monkeypatch.setattr(Block, "forward", Other.forward)
    assert same(step(model), step(net()))
    with torch.no_grad():
        assert torch.equal(model(batch()), net()(batch()))
    assert all(n == 2 for n in calls(handle).values())
    handle.remove()
    assert same(step(model), step(net()))


def test_a_forward_of_a_part_set_later_is_noticed() -> None:
    def patched(model: Any) -> Any:
        part = model.layers[1].a
        part.forward = lambda x: torch.sin(nn.functional.linear(x, part.weight, part.bias))
        return model

    model, _ = planned()
    step(model)
    assert same(step(patched(model)), step(patched(net())))


@pytest.mark.parametrize("where", ["model", "block"])
def test_remove_leaves_a_forward_that_the_user_set(where: str) -> None:
    model, handle = planned()
    target = model if where == "model" else model.layers[1]

    def mine(x: Tensor) -> Tensor:
        return x.square().mean() * 3 if where == "model" else x * 3

    target.forward = mine
    handle.remove()
    assert target.forward is mine
    assert "forward" not in vars(model.layers[0])


def test_a_forward_set_over_the_roots_is_said() -> None:
    model, handle = planned()
    model.forward = types.MethodType(lambda s, x: Net.forward(s, x) * 3, model)
    twin = net()
    twin.forward = types.MethodType(lambda s, x: Net.forward(s, x) * 3, twin)
    got, texts = said(lambda: step(model))
    assert same(got, step(twin))
    assert len(texts) == 1
    assert "another forward" in texts[0]
    assert calls(handle)["layers.0"] == 1


# hooks ----------------------------------------------------------------------------------------------------------------


def test_saved_tensor_hooks_of_ones_own_get_what_they_would_get_without_a_plan() -> None:
    def under_hooks(model: Any) -> tuple[list[Tensor], list[Any]]:
        seen: list[Any] = []

        def pack(tensor: Tensor) -> Tensor:
            seen.append(tuple(tensor.shape))
            return tensor.bfloat16()

        def call(x: Tensor) -> Tensor:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t.float()):
                return model(x)

        return step(model, call), seen

    model, handle = planned()
    (got, seen), texts = said(lambda: under_hooks(model))
    expected, expected_seen = under_hooks(net())
    assert same(got, expected)
    assert seen == expected_seen
    assert len(texts) == 1
    assert "without the plan" in texts[0]
    assert "save_on_cpu" in texts[0]
    assert same(step(model), step(net()))  # without hooks, as planned
    assert next(r for r in handle.report() if r.name == "layers.1").slots_dropped > 0


def test_hooks_inside_the_model_around_a_block() -> None:
    class Offloaded(Net):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                with torch.autograd.graph.save_on_cpu():
                    x = layer(x)
            return x.square().mean()

    def made() -> Any:
        torch.manual_seed(0)
        return Offloaded(Block() for _ in range(BLOCKS))

    model = made()
    (_, got), texts = said(lambda: (jettison.apply(model, "full", batch=(batch(),)), step(model)))
    assert same(got, step(made()))
    assert any("plan" in text for text in texts)


def test_a_checkpoint_around_planned_blocks_is_right() -> None:
    def call_of(model: Any) -> Callable[[Tensor], Tensor]:
        return lambda x: torch.utils.checkpoint.checkpoint(model, x.requires_grad_(), use_reentrant=False)

    model, _ = planned()
    got, texts = said(lambda: step(model, call_of(model)))
    twin = net()
    assert same(got, step(twin, call_of(twin)))
    assert len(texts) == 1


@pytest.mark.parametrize("wrapper", [checkpoint_wrapper, offload_wrapper])
def test_wrappers_that_checkpoint_are_refused_before_planning_and_after(
    wrapper: Callable[[nn.Module], nn.Module],
) -> None:
    model = net()
    model.layers[1] = wrapper(model.layers[1])
    with pytest.raises(UnsupportedModule, match=r"layers\.1 is a \w+Wrapper; leave apply_activation_checkpointing"):
        jettison.apply(model, "full", batch=(batch(),))
    model, handle = planned()
    own = model.layers[1]
    model.layers[1] = wrapper(own)
    for _ in range(2):
        with pytest.raises(UnsupportedModule, match=r"layers\.1 is a \w+Wrapper.* after planning"):
            step(model)
    model.layers[1] = own
    assert same(step(model), step(net()))
    assert calls(handle)["layers.1"] == 1


# parameters -----------------------------------------------------------------------------------------------------------


class Tokens(Net):
    """Its batch does not tell the type of its weights."""

    def __init__(self) -> None:
        super().__init__(Block() for _ in range(BLOCKS))
        self.table = nn.Embedding(ROWS, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(self.table(ids))


def _double(model: Any) -> None:
    model.double()


def _bfloat16(model: Any) -> None:
    model.to(torch.bfloat16)


def _frozen(model: Any) -> None:
    model.layers[0].a.weight.requires_grad_(False)
    model.layers[1].requires_grad_(False)


def _assigned(model: Any) -> None:
    state = {key: torch.randn_like(value, dtype=torch.float64) for key, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def _tied(model: Any) -> None:
    model.layers[0].a.weight = model.layers[2].b.weight
    model.layers[1].b = model.layers[1].a


def _parametrized(model: Any) -> None:
    nn.utils.parametrizations.weight_norm(model.layers[1].a)
    nn.utils.parametrizations.orthogonal(model.layers[2].b)


def _buffer_for_a_parameter(model: Any) -> None:
    weight = model.layers[0].a.weight.detach().clone()
    del model.layers[0].a.weight
    model.layers[0].a.register_buffer("weight", weight)


def _flattened(model: Any) -> None:
    """As optimizers that keep one flat tensor do."""
    parameters = list(model.parameters())
    flat = torch.cat([p.detach().flatten() for p in parameters])
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.data = part.view_as(parameter)


@pytest.mark.parametrize(
    "change", [_double, _bfloat16, _frozen, _assigned, _tied, _parametrized, _buffer_for_a_parameter, _flattened]
)
def test_other_parameters_than_when_it_was_planned(change: Callable[[Any], None]) -> None:
    ids = torch.randperm(ROWS, generator=torch.Generator().manual_seed(2))

    def made() -> Any:
        torch.manual_seed(0)
        return Tokens()

    def run(model: Any) -> list[Tensor]:
        return step(model, lambda _x: model(ids))

    def changed(model: Any) -> Any:
        torch.manual_seed(4)
        change(model)
        return model

    model, twin = made(), made()
    handle = jettison.apply(model, "full", batch=(ids,))
    assert same(run(model), run(twin))
    changed(model)
    changed(twin)
    for _ in range(2):
        got, _ = said(lambda: run(model))
        assert same(got, run(twin))
    assert all(n >= 3 for n in calls(handle).values())
