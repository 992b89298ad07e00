"""Models that are copied, compiled, patched or rebuilt after planning: right, and never without a word."""

from __future__ import annotations

import copy
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import jettison

ROWS, WIDTH, BLOCKS = 32, 16, 3


@pytest.fixture(autouse=True, scope="module")
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def compiler() -> Iterator[None]:
    """What it learnt of one model's frames does not count for the next."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.tanh(self.a(x)).exp())


class Other(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.sigmoid(self.a(x)).exp().sin())


class Net(nn.Module):
    def __init__(self, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def batch() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def net() -> Any:
    torch.manual_seed(0)
    return Net()


def planned() -> tuple[Any, Any]:
    model = net()
    return model, jettison.apply(model, "full", batch=(batch(),))


def step(model: nn.Module, call: Callable[[Tensor], Tensor] | None = None) -> list[Tensor]:
    """Loss and gradients, by parameter."""
    for parameter in model.parameters():
        parameter.grad = None
    loss = (model if call is None else call)(batch())
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def same(got: list[Tensor], expected: list[Tensor]) -> bool:
    return len(got) == len(expected) and all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def calls(handle: Any) -> dict[str, int]:
    """So far, by region that the plan still has."""
    return {region.name: region.calls for region in handle.regions if not region.retired}


def said(run: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What a call returns, and the warnings that came with it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = run()
    return found, [str(w.message) for w in caught]


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
    with pytest.raises(jettison.errors.UnsupportedModule, match="is compiled"):
        jettison.apply(torch.compile(net(), backend="eager"), "full", batch=(batch(),))
    model = net()
    model.layers[1].compile(backend="eager")
    with pytest.raises(jettison.errors.UnsupportedModule, match=r"layers\.1 is compiled"):
        jettison.apply(model, "full", batch=(batch(),))


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
        return Offloaded()

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


# parameters -----------------------------------------------------------------------------------------------------------


class Tokens(Net):
    """Its batch does not tell the type of its weights."""

    def __init__(self) -> None:
        super().__init__()
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


@pytest.mark.parametrize(
    "change", [_double, _bfloat16, _frozen, _assigned, _tied, _parametrized, _buffer_for_a_parameter]
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
