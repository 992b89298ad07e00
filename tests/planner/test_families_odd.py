"""Models that do what few do: complex numbers alone, dataclasses, generators, side stores, losses of unknown shape."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jettison.capture.fake_copies import fake_mode
from jettison.capture.model_trace import ModelTrace, call_model, loss_of
from jettison.capture.pytrees import tree_flatten, tree_leaves, tree_unflatten
from jettison.capture.tracer import trace_model
from jettison.core.errors import TraceError
from jettison.planner.apply import apply_candidate
from jettison.planner.planner import make_planner
from jettison.runtime.recordings import Recordings
from jettison.verify.differences import compare_gradients, independent_copy

WIDTH = 16


def trains_the_same(model: nn.Module, *batches: Any) -> ModelTrace:
    """Backward under the smallest plan, batch by batch, gives plain autograd's bits. The trace it was planned by."""
    reference = independent_copy(model)
    trace = trace_model(model, batches[0])
    planner = make_planner(trace, measure=False)
    found = planner.smallest
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some fall back, and say so
        applied = apply_candidate(model, planner, found, planner.minimum_budget_bytes)
        for batch in batches:
            for one in (model, reference):
                torch.manual_seed(3)
                loss_of(call_model(one, batch)).backward()
            assert compare_gradients(model, reference).identical
    applied.remove()
    return trace


class Stack(nn.Module):
    """Blocks between two projections; the output is the loss."""

    def __init__(self, make: Callable[[], nn.Module], blocks: int = 3) -> None:
        super().__init__()
        self.stem, self.layers, self.head = nn.Linear(4, WIDTH), nn.ModuleList(), nn.Linear(WIDTH, 4)
        self.layers.extend(make() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


# complex numbers ------------------------------------------------------------------------------------------------------


class Phase(nn.Module):
    """Complex in, complex out."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(WIDTH, WIDTH, dtype=torch.cfloat) for _ in range(2))

    def forward(self, z: Tensor) -> Tensor:
        return z + self.b(torch.tanh(self.a(z))).conj()


class AllComplex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Phase() for _ in range(3))

    def forward(self, z: Tensor) -> Tensor:
        for layer in self.layers:
            z = layer(z)
        return torch.view_as_real(z).square().mean()


def test_a_model_of_complex_numbers_alone() -> None:
    trace = trains_the_same(AllComplex(), (torch.randn(8, WIDTH, dtype=torch.cfloat),))
    assert len(trace.calls) == 3


# dataclasses ----------------------------------------------------------------------------------------------------------


@dataclass
class State:
    """What blocks hand on."""

    hidden: Tensor
    extra: dict[str, Tensor]
    step: int = 0


@dataclass(frozen=True, slots=True)
class Frozen:
    """One with slots, around another."""

    state: State
    name: str


class OfStates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.gate = mlp(), nn.Linear(WIDTH, WIDTH)

    def forward(self, state: State) -> State:
        gate = torch.sigmoid(self.gate(state.hidden))
        extra = {"penalty": state.extra["penalty"] + gate.mean()}
        return State(hidden=state.hidden + gate * self.body(state.hidden), extra=extra)


class States(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(OfStates() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        state = State(hidden=x * 2, extra={"penalty": torch.zeros(())})
        for layer in self.layers:
            state = layer(state)
        return state.hidden.square().mean() + state.extra["penalty"]


def test_blocks_that_take_and_return_dataclasses_are_planned() -> None:
    trace = trains_the_same(States(), (torch.randn(6, WIDTH),))
    assert len(trace.calls) == 3
    assert len(trace.classes) == 2  # the first penalty wants no gradient
    assert all(call.links for call in trace.calls[1:])


def test_dataclasses_are_trees_where_they_hold_tensors() -> None:
    tree = {"a": Frozen(State(torch.ones(2), {"x": torch.zeros(1)}, 3), "name"), "b": Frozen.__doc__}
    leaves, spec = tree_flatten(tree)
    assert [type(leaf) for leaf in leaves] == [Tensor, Tensor, int, str, str]
    assert all(a is b for a, b in zip(leaves, tree_leaves(tree), strict=True))
    again = tree_unflatten(leaves, spec)
    assert again["a"] is not tree["a"]
    assert again["a"].state.extra["x"] is leaves[1]
    assert spec == tree_flatten(again)[1]
    assert hash(spec) == hash(tree_flatten(again)[1])


def test_a_dataclass_that_refers_to_itself_and_one_without_tensors_are_leaves() -> None:
    state = State(torch.ones(1), {})
    state.extra["self"] = state  # type: ignore[assignment]
    assert tree_leaves([state])[1] is state
    settings = Frozen(None, "settings")  # type: ignore[arg-type]
    assert tree_leaves(settings) == [settings]


# generators and side stores -------------------------------------------------------------------------------------------


class Lazy(nn.Module):
    """Yields its outputs one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([mlp(), mlp()])

    def forward(self, x: Tensor) -> Iterator[Tensor]:
        for part in self.parts:
            x = x + part(x)
            yield x


class Generators(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Lazy() for _ in range(2))
        self.more = nn.ModuleList(mlp() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            for y in layer(x):
                x = x + y
        for layer in self.more:
            x = layer(x)
        return x.square().mean()


def test_blocks_that_return_generators_are_left_to_the_region_around_them() -> None:
    trace = trains_the_same(Generators(), (torch.randn(6, WIDTH),))
    assert [call.name for call in trace.calls] == ["more.0", "more.1"]
    assert any("returns a generator" in text for text in trace.warnings)


class WithStore(nn.Module):
    """Blocks after the first mix in what that left in a store."""

    def __init__(self, store: dict[str, Tensor]) -> None:
        super().__init__()
        self.store, self.body, self.mix = [store], mlp(), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        return x + torch.lerp(y, self.store[0].setdefault("first", y), self.mix)


class Stored(Stack):
    def __init__(self) -> None:
        self.store: dict[str, Tensor] = {}
        store = self.store
        super().__init__(lambda: WithStore(store))

    def forward(self, x: Tensor) -> Tensor:
        self.store.clear()
        loss = super().forward(x)
        self.store.clear()
        return loss


def test_a_model_whose_blocks_share_a_store_is_planned_as_one_region() -> None:
    trace = trains_the_same(Stored(), (torch.randn(6, 4),), (torch.randn(6, 4),))
    assert not trace.calls
    assert any("planned as one region" in text for text in trace.warnings)


# shapes ---------------------------------------------------------------------------------------------------------------


class Speech(nn.Module):
    """A CTC loss around blocks; the lengths are in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(mlp() for _ in range(2)), nn.Linear(WIDTH, 6)

    def forward(self, x: Tensor, targets: Tensor, lengths: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        scores = self.head(x).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(scores, targets, torch.full((len(x),), x.shape[1]), lengths)


def test_a_ctc_loss_and_targets_of_other_lengths() -> None:
    def batch(*lengths: int) -> tuple[Tensor, ...]:
        return torch.randn(3, 12, WIDTH), torch.randint(1, 6, (3, 5)), torch.tensor(lengths)

    trace = trains_the_same(Speech(), batch(5, 3, 4), batch(5, 3, 4), batch(2, 3, 4))
    assert not trace.root.problem


def test_fake_ctc_losses_have_the_real_ones_shapes() -> None:
    scores, targets = torch.randn(12, 3, 7).log_softmax(-1), torch.randint(1, 7, (3, 5))
    real = torch.ops.aten._ctc_loss.default(scores, targets, [12] * 3, [5, 3, 4])
    with fake_mode(allow_non_fake_inputs=True) as mode:
        fake = torch.ops.aten._ctc_loss.default(mode.from_tensor(scores), targets, [12] * 3, [5, 3, 4])
    assert [(t.shape, t.stride()) for t in real] == [(t.shape, t.stride()) for t in fake]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 3, 1, 2), (0, 2, 1, 3), (1, 0, 2, 3)])
def test_fake_batch_norms_have_the_real_ones_strides(order: tuple[int, ...]) -> None:
    x = torch.randn(4, 5, 6, 8).permute(order)
    c = x.shape[1]
    values = [x, torch.ones(c), torch.zeros(c), torch.zeros(c), torch.ones(c)]
    real = torch.ops.aten.native_batch_norm(*values, True, 0.1, 1e-5)
    with fake_mode() as mode:
        fake = torch.ops.aten.native_batch_norm(*(mode.from_tensor(v) for v in values), True, 0.1, 1e-5)
    assert [t.stride() for t in real] == [t.stride() for t in fake]


class Flow(nn.Module):
    """A coupling layer: what its second output is added to, no backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor, logdet: Tensor) -> tuple[Tensor, Tensor]:
        scale = torch.tanh(self.net(x))
        return x * scale.exp(), logdet + scale.sum(-1)


class Flows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Flow() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        logdet = x.new_zeros(len(x))
        for layer in self.layers:
            x, logdet = layer(x, logdet)
        return x.square().mean() - logdet.mean()


def test_an_input_that_only_an_output_needs() -> None:
    trains_the_same(Flows(), (torch.randn(6, WIDTH),))


@pytest.mark.parametrize("loss", [F.mse_loss, F.smooth_l1_loss, F.soft_margin_loss, F.binary_cross_entropy])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_fake_losses_hold_the_bytes_that_the_real_ones_hold(loss: Callable[..., Tensor], reduction: str) -> None:
    x, y = torch.rand(6, 50), torch.rand(6, 50)
    real = loss(x, y, reduction=reduction)
    with fake_mode() as mode:
        fake = loss(mode.from_tensor(x), mode.from_tensor(y), reduction=reduction)
    assert (fake.shape, fake.stride()) == (real.shape, real.stride())
    assert fake.untyped_storage().nbytes() == real.untyped_storage().nbytes()


# around the blocks ----------------------------------------------------------------------------------------------------


class Dropping(Stack):
    """Leaves out layers by a draw."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            if torch.rand([]) > 0.3:
                x = x + layer(x)
        return self.head(x).square().mean()


def test_layers_that_are_left_out_by_a_draw_are_all_counted() -> None:
    trace = trains_the_same(Dropping(mlp, 4), *((torch.randn(6, 4),) for _ in range(4)))
    assert len(trace.calls) == 4
    assert "decides by numbers" in trace.root.problem


class Masked(nn.Module):
    """Attention with a mask that its block does not get on short sequences."""

    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("got no mask")


class Deciding(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.tanh() if x.sum() < 1e9 else x


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project, self.attend, self.out = nn.Linear(WIDTH, WIDTH), Masked(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.attend(self.project(x)))


class Switching(Stack):
    """Its first forward on a short sequence replaces the attention of its blocks."""

    def __init__(self, attention: Callable[[], nn.Module]) -> None:
        super().__init__(Attending)
        self.attention: Callable[[], nn.Module] | None = attention

    def forward(self, x: Tensor) -> Tensor:
        if self.attention is not None:
            for layer in self.layers:
                layer.attend = self.attention()
            self.attention = None
        return super().forward(x)


def test_blocks_whose_modules_the_model_replaces_are_planned_as_called() -> None:
    trace = trains_the_same(Switching(nn.Tanh), torch.randn(8, 4), torch.randn(6, 4))
    assert len(trace.calls) == 3 and not trace.warnings
    model = Switching(Deciding)
    with pytest.raises(TraceError, match="after a forward, if that replaces"):
        trace_model(model, torch.randn(8, 4))
    model(torch.randn(8, 4))
    trains_the_same(model, torch.randn(8, 4))


class Growing(Stack):
    """Adds a hook to its blocks in each forward, as collectors of outputs do."""

    def forward(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        hooks = [layer.register_forward_hook(lambda _m, _a, out: kept.append(out)) for layer in self.layers]
        loss = super().forward(x)
        for hook in hooks:
            hook.remove()
        return loss + sum(t.mean() for t in kept)


def test_a_rehearsal_does_not_take_the_hooks_of_others_for_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Recordings, *_: Any) -> Any:
        raise AssertionError(f"a {type(self.module).__name__} was recorded while it was dry-run")

    trace = trace_model(Growing(mlp), (torch.randn(6, 4),))
    monkeypatch.setattr(Recordings, "_prepare", refuse)
    make_planner(trace, measure=False)


class Choosing(Stack):
    """Decides around its blocks by what they computed."""

    def __init__(self, decide: Callable[[Tensor], Tensor]) -> None:
        super().__init__(mlp)
        self.decide = decide

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.decide(self.head(x))


def by_branch(y: Tensor) -> Tensor:
    return y.square().mean() if bool((y.abs().max() < 1e6).all()) else y.sum()


def by_mask(y: Tensor) -> Tensor:
    return y[y > 0].square().mean() + y.masked_select(y < 0).mean()


def by_rows(y: Tensor) -> Tensor:
    return y[torch.nonzero(y.sum(-1) > 0).squeeze(-1)].square().mean()


def by_number(y: Tensor) -> Tensor:
    return y.square().mean() * float(y.abs().max())


def by_array(y: Tensor) -> Tensor:
    """As a matcher pairs boxes outside of torch."""
    order = np.argsort(y.detach().sum(-1).numpy()), np.asarray(y.detach().argmax(-1))
    return (y[torch.as_tensor(order[0].copy())] * torch.as_tensor(order[1])[:, None]).square().mean()


@pytest.mark.parametrize("decide", [by_branch, by_mask, by_rows, by_number, by_array])
def test_code_around_the_blocks_that_decides_by_values(decide: Callable[[Tensor], Tensor]) -> None:
    trace = trains_the_same(Choosing(decide), (torch.randn(6, 4),), (torch.randn(6, 4),))
    assert len(trace.calls) == 3
    assert trace.root.problem
    assert any("depends on values that are not known" in text for text in trace.warnings)


class Aside(nn.Module):
    """What decides is a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(x[self.first(x).sum(-1) > 0])


class WithAside(Stack):
    def __init__(self) -> None:
        super().__init__(mlp)
        self.aside = Aside()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.aside(self.stem(x)).square().sum()


def test_a_module_around_the_blocks_that_decides_by_values_is_a_region() -> None:
    trace = trains_the_same(WithAside(), (torch.randn(6, 4),), (torch.randn(6, 4),))
    assert {call.name for call in trace.calls} == {"aside", "layers.0", "layers.1", "layers.2"}
    assert not trace.root.problem


def test_a_mask_of_the_batch_tells_how_many_are_selected() -> None:
    def loss(y: Tensor) -> Tensor:
        return y.masked_select(torch.arange(y.numel()).view_as(y) % 3 == 0).square().mean()

    trace = trains_the_same(Choosing(loss), (torch.randn(6, 4),))
    assert not trace.root.problem
    assert not trace.warnings


def test_an_address_that_python_asks_for_around_the_blocks_is_one_clear_error() -> None:
    model = Choosing(lambda y: y.square().mean() * (1 + y.data_ptr() % 2))
    with pytest.raises(TraceError, match="decides by values that are not known when it is planned"):
        trace_model(model, (torch.randn(6, 4),))


class Filling(nn.Module):
    """Writes what it computes into new tensors of zeros, through views, and reads them again."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        room = torch.zeros(2, len(x), WIDTH)
        room[0] = torch.tanh(self.a(x))
        flat = room.view(-1)
        flat[-WIDTH:] += self.b(x)[0]
        return x + room.sum(0) * flat.view(2, len(x), WIDTH)[0]


def test_computed_values_that_are_written_into_new_tensors() -> None:
    trace = trains_the_same(Stack(Filling), (torch.randn(6, 4),))
    assert len(trace.calls) == 3
    assert not trace.root.problem
    assert not any(cls.problem for cls in trace.classes.values())


def test_what_hooks_collect_in_a_block_that_cannot_be_recorded_is_refused_in_one_line() -> None:
    """JetMoE's experts get as many rows as a list says, and its router's logits leave through hooks."""
    transformers = pytest.importorskip("transformers")
    config = transformers.JetMoeConfig(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=2,
        num_key_value_heads=2,
        kv_channels=8,
        intermediate_size=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
    )
    ids = torch.randint(0, 32, (2, 8))
    with pytest.raises(TraceError, match=r"switch that off .*auxiliary losses") as refused:
        trace_model(transformers.JetMoeForCausalLM(config), {"input_ids": ids, "labels": ids.clone()})
    assert "\n" not in str(refused.value)
