"""The runtime: exactly the recorded ops run again, nothing outlives its last use, and every odd backward is right."""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import jettison
from jettison.dryrun.counter import AllocationCounter
from jettison.planner import Applied
from jettison.solve.checkpoint_policy import MATMULS
from jettison.verify.differences import compare_gradients, independent_copy, same_bits
from support.toys import Headed

N, ROWS, LAYERS = 8, 4, 4
POLICIES = ("none", "selective-op", "full", "every:2", "every:3")
RECOMPUTING = POLICIES[1:]


class Block(nn.Module):
    """Norm, two products, two elementwise ops that share a prefix, a residual."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(N)
        self.up, self.down = nn.Linear(N, 2 * N), nn.Linear(2 * N, N)
        self.dropout = nn.Dropout(rate)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(self.norm(x))
        return x + self.dropout(self.down(hidden.tanh() * hidden.sigmoid()))


def stack(block: Callable[[], nn.Module] = Block, layers: int = LAYERS) -> Headed:
    return Headed((block() for _ in range(layers)), N, N)


class OpLog(TorchDispatchMode):
    """Names of the ops that run while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops[str(func)] += 1
        return func(*args, **(kwargs or {}))


def pair(model: nn.Module | None = None) -> tuple[nn.Module, nn.Module, Tensor]:
    """A model, an independent copy that trains plainly, and a batch."""
    torch.manual_seed(0)
    model = model if model is not None else stack()
    return model, independent_copy(model), torch.randn(ROWS, N)


def step(model: nn.Module, x: Tensor, seed: int = 1) -> Tensor:
    torch.manual_seed(seed)
    model.zero_grad(set_to_none=True)
    loss = model(x)
    loss.backward()
    return loss.detach()


def assert_same_step(model: nn.Module, plain: nn.Module, x: Tensor, seed: int = 1) -> None:
    assert same_bits(step(model, x, seed), step(plain, x, seed))
    after = torch.get_rng_state()
    report = compare_gradients(model, plain)
    assert report.identical, report.differences[:3]
    step(model, x, seed)
    assert torch.equal(torch.get_rng_state(), after), "the random stream stands elsewhere"


def backward_ops(model: nn.Module, x: Tensor) -> Counter[str]:
    model.zero_grad(set_to_none=True)
    loss = model(x)
    with OpLog() as log:
        loss.backward()
    return log.ops


def block_regions(handle: Applied) -> list[Any]:
    return [region for region in handle.regions if region.name]


def total(handle: Applied, what: str) -> int:
    return sum(getattr(report, what) for report in handle.report())


# what runs again ------------------------------------------------------------------------------------------------------


def again(policy: str) -> Counter[str]:
    """Ops that a policy adds to backward, views and bookkeeping left out."""
    model, plain, x = pair()
    with jettison.apply(model, policy, batch=(x,), check="off"):
        model(x).backward()  # the first run is checked and is not counted
        extra = backward_ops(model, x) - backward_ops(plain, x)
    return Counter({op: n for op, n in extra.items() if not op.startswith(("aten.as_strided", "aten.detach"))})


ONE_BLOCK = Counter(
    {
        "aten.native_layer_norm.default": 1,
        "aten.addmm.default": 1,
        "aten.tanh.default": 1,
        "aten.sigmoid.default": 1,
        "aten.mul.Tensor": 1,
    }
)


def times(count: int, ops: Counter[str]) -> Counter[str]:
    return Counter({op: n * count for op, n in ops.items()})


def test_keeping_everything_runs_nothing_again() -> None:
    assert again("none") == {}


def test_full_runs_each_needed_op_exactly_once() -> None:
    """`tanh`, `sigmoid` and their product read one `addmm`, which reads the norm: shared prefixes run once."""
    assert again("full") == times(LAYERS, ONE_BLOCK)


def test_keeping_products_runs_no_product_again() -> None:
    found = again("selective-op")
    assert not [op for op in found if op.startswith(MATMULS)]
    assert found == times(LAYERS, ONE_BLOCK - Counter({"aten.addmm.default": 1}))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 9])
def test_segments_run_the_outputs_in_between_again_as_well(size: int) -> None:
    """Inside a segment a block's input is the output of the block before: its second product and its residual, whose
    sum has the product's memory.
    """
    runs = [min(size, LAYERS - start) for start in range(0, LAYERS, size)]
    handed = sum(run - 1 for run in runs)
    expected = times(LAYERS, ONE_BLOCK) + times(handed, Counter({"aten.addmm.default": 1, "aten.add.out": 1}))
    assert again(f"every:{size}") == expected


def test_an_op_that_only_feeds_a_sum_is_not_run_again() -> None:
    class Wasteful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(N, N), nn.Linear(N, N)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x)) + 1.0

    model, plain, x = pair(stack(Wasteful))
    with jettison.apply(model, "full", batch=(x,)) as handle:
        assert total(handle, "slots_dropped") == LAYERS
        step(model, x)
        extra = backward_ops(model, x) - backward_ops(plain, x)
    assert extra["aten.addmm.default"] == LAYERS and extra["aten.add.Tensor"] == 0


# gradients ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.0, 0.5])
@pytest.mark.parametrize("policy", POLICIES)
def test_same_bits_step_after_step(policy: str, rate: float) -> None:
    model, plain, x = pair(stack(lambda: Block(rate)))
    with jettison.apply(model, policy, batch=(x,)) as handle:
        assert (total(handle, "slots_dropped") > 0) == (policy != "none")
        for seed in range(3):
            assert_same_step(model, plain, x * (seed + 1), seed)
        assert total(handle, "recordings") == 0


def test_in_place_activations() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.act = nn.Linear(N, N), nn.Linear(N, N), nn.ReLU(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.second(self.act(self.first(x).mul_(3.0)).sigmoid())

    for policy in POLICIES:
        model, plain, x = pair(stack(InPlace))
        with jettison.apply(model, policy, batch=(x,)):
            assert_same_step(model, plain, x)


class Unrolled(nn.Module):
    """A recurrence: every step's value is made of the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(N, N)

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for _ in range(600):
            h = (self.linear(h) + x).tanh()
        return x + h


def test_a_chain_is_computed_again_however_long_it_is() -> None:
    """Longer than Python's stack is deep."""
    torch.manual_seed(0)
    model = stack(Unrolled, layers=2)
    plain, x = independent_copy(model), torch.randn(ROWS, N)
    with jettison.apply(model, "full", batch=(x,), regions=["layers.0", "layers.1"]) as applied:
        for each in (model, plain):
            each(x).backward()
        assert sum(report.slots_dropped for report in applied.report()) >= 2 * 600
    assert compare_gradients(model, plain).identical


@pytest.mark.parametrize("policy", RECOMPUTING)
def test_retained_graph_gives_the_same_gradients_again(policy: str) -> None:
    model, plain, x = pair(stack(lambda: Block(0.5)))
    with jettison.apply(model, policy, batch=(x,)):
        for m in (model, plain):
            torch.manual_seed(1)
            loss = m(x)
            loss.backward(retain_graph=True)
            loss.backward()
    assert compare_gradients(model, plain).identical


@pytest.mark.parametrize("policy", RECOMPUTING)
def test_a_backward_in_two_halves(policy: str) -> None:
    """Gradients of the inputs first, of the weights later, as zero-bubble pipelines do."""
    model, plain, x = pair()
    halves = []
    with jettison.apply(model, policy, batch=(x,)):
        for m in (model, plain):
            given = x.clone().requires_grad_()
            loss = m(given)
            first = torch.autograd.grad(loss, [given, m.layers[2].up.weight], retain_graph=True)
            loss.backward(inputs=list(m.parameters()))
            halves.append(first)
    assert all(same_bits(a, b) for a, b in zip(*halves, strict=True))
    assert compare_gradients(model, plain).identical


@pytest.mark.parametrize("policy", RECOMPUTING)
def test_a_gradient_of_a_gradient_is_right(policy: str) -> None:
    model, plain, x = pair()
    with jettison.apply(model, policy, batch=(x,)):
        for m in (model, plain):
            given = x.clone().requires_grad_()
            (slope,) = torch.autograd.grad(m(given), given, create_graph=True)
            slope.square().sum().backward()
    report = compare_gradients(model, plain)
    assert report.identical, report.differences[:3]


@pytest.mark.parametrize("policy", RECOMPUTING)
def test_frozen_parameters(policy: str) -> None:
    model, _, x = pair()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("up" in name or name.startswith("layers.2.norm"))
    plain = independent_copy(model)
    with jettison.apply(model, policy, batch=(x,)):
        assert_same_step(model, plain, x)
        model.head.weight.requires_grad_(True)
        model.layers[0].up.weight.requires_grad_(False)
        plain.head.weight.requires_grad_(True)
        plain.layers[0].up.weight.requires_grad_(False)
        assert_same_step(model, plain, x)


@pytest.mark.parametrize("policy", RECOMPUTING)
def test_a_module_used_twice_in_one_forward(policy: str) -> None:
    shared = Block(0.5)
    model, plain, x = pair(stack(lambda: shared))
    with jettison.apply(model, policy, batch=(x,)) as handle:
        assert_same_step(model, plain, x)
        assert any(report.slots_dropped for report in handle.report())


# what stays allocated -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def counted(model: nn.Module, x: Tensor) -> Any:
    gc.collect()
    with AllocationCounter([*model.parameters(), x]) as counter:
        yield counter


@pytest.mark.parametrize("policy", POLICIES)
def test_live_bytes_return_to_the_baseline_for_twenty_steps(policy: str) -> None:
    model, _, x = pair(stack(lambda: Block(0.5)))
    with jettison.apply(model, policy, batch=(x,)), counted(model, x) as counter:
        step(model, x)
        model.zero_grad(set_to_none=True)
        base = sum(p.nbytes for p in model.parameters()) + x.nbytes
        assert counter.live_bytes == base
        gc.disable()  # what needs the collector would not be freed in time
        try:
            for seed in range(20):
                step(model, x, seed)
                model.zero_grad(set_to_none=True)
                assert counter.live_bytes == base
        finally:
            gc.enable()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_graph_that_is_dropped_frees_everything(policy: str) -> None:
    model, _, x = pair(stack(lambda: Block(0.5)))
    with jettison.apply(model, policy, batch=(x,)), counted(model, x) as counter:
        step(model, x)
        model.zero_grad(set_to_none=True)
        base = counter.live_bytes
        loss = model(x)
        assert counter.live_bytes > base
        del loss
        assert counter.live_bytes == base


def test_dropped_slots_are_not_held_and_kept_ones_go_one_by_one() -> None:
    held: dict[str, int] = {}
    falling: dict[str, list[int]] = {}
    for policy in POLICIES:
        model, _, x = pair()
        with jettison.apply(model, policy, batch=(x,), check="off"), counted(model, x) as counter:
            step(model, x)
            model.zero_grad(set_to_none=True)
            base = counter.live_bytes
            loss = model(x)
            held[policy] = counter.live_bytes - base - loss.nbytes
            levels = falling[policy] = []
            hooks = [
                layer.register_full_backward_pre_hook(lambda *_, seen=levels, of=counter: seen.append(of.live_bytes))
                for layer in model.layers
            ]
            del loss
            model(x).backward()
            for hook in hooks:
                hook.remove()
    one = 4 * ROWS * N
    outside = 2  # the head's input and output
    assert held["none"] > held["selective-op"] > held["full"] == (LAYERS + outside) * one
    assert held["every:2"] == held["every:3"] == (2 + outside) * one
    for policy in ("none", "selective-op", "full"):
        grown = sum(p.nbytes for p in Block().parameters())
        steps = [a - b + grown for a, b in zip(falling[policy], falling[policy][1:], strict=False)]
        assert len(steps) == LAYERS - 1 and min(steps) > 0, (policy, steps)


class Failure(Exception):
    """Raised by the tests themselves."""


class Fragile(Block):
    """Raises on demand, in forward or in backward."""

    when = ""

    def forward(self, x: Tensor) -> Tensor:
        hidden = super().forward(x)
        if Fragile.when == "forward":
            raise Failure
        if Fragile.when == "backward":
            hidden.register_hook(_fail)
        return hidden


def _fail(_gradient: Tensor) -> None:
    raise Failure


@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize("policy", ["full", "every:2", "selective-op"])
def test_an_exception_leaves_nothing_behind(policy: str, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = stack(lambda: Block(0.5))
    model.layers[2] = Fragile(0.5)
    _, plain, x = pair(model)
    with jettison.apply(model, policy, batch=(x,)), counted(model, x) as counter:
        assert_same_step(model, plain, x)
        model.zero_grad(set_to_none=True)
        base = counter.live_bytes
        monkeypatch.setattr(Fragile, "when", when)
        for _ in range(5):
            with pytest.raises(Failure):
                model(x).backward()
            model.zero_grad(set_to_none=True)
            gc.collect()  # the exception's traceback holds frames in cycles
            assert counter.live_bytes == base
        monkeypatch.setattr(Fragile, "when", "")
        assert_same_step(model, plain, x)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(self.linear(x)))


class TwiceNormed(Normed):
    """One batch norm moves its statistics twice, and what they are in between is read."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.norm(self.linear(x))
        between = self.norm.running_mean * 2
        return x + torch.tanh(self.norm(first + between).sin())


@pytest.mark.parametrize("kind", [Normed, TwiceNormed])
def test_a_batch_norm_runs_again_without_its_statistics(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(kind(), kind(), kind())
    plain, regions = independent_copy(model), ["0", "1", "2"]
    x = torch.randn(32, 16)
    with jettison.apply(model, "full", batch=(x,), loss_fn=Tensor.sum, regions=regions, check="full") as handle:
        for _ in range(3):
            for one in (model, plain):
                one.zero_grad()
                one(x).sum().backward()
            for ours, theirs in zip(model.buffers(), plain.buffers(), strict=True):
                assert torch.equal(ours, theirs)
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                assert torch.equal(ours.grad, theirs.grad)
        again = [report for report in handle.report() if report.name]
    assert not any(report.fallback for report in again)
    if kind is Normed:  # the argument, and what a batch norm saves of its statistics, which is no new memory
        assert {report.kept_bytes for report in again} == {x.nbytes}
