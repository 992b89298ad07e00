"""Products over wrappers of narrow numbers, as torchao's training in 8 bits has them."""

from __future__ import annotations

import importlib.util
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import jettison
from jettison.capture import tensor_subclasses
from jettison.capture.isolation import Undo
from jettison.core.units import Bytes

H, ROWS, BATCH = 32, 64, 8
INPUT_BYTES = BATCH * ROWS * H * 4
NAMES = [f"layers.{n}" for n in range(3)]
WITHOUT = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is not installed (pip install torchao==0.18.0)"
)


class Halves(Tensor):
    """Halves beside the factor that they were multiplied with; a product takes them apart."""

    @staticmethod
    def __new__(cls, numbers: Tensor, factor: Tensor, unit: float = 1.0) -> Halves:
        made: Halves = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, numbers.size(), strides=numbers.stride(), dtype=torch.float32
        )
        made.numbers, made.factor, made.unit = numbers, factor, unit
        return made

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, float]]:
        return ["numbers", "factor"], {"unit": self.unit}

    @staticmethod
    def __tensor_unflatten__(inside: dict[str, Tensor], context: dict[str, float], *_: Any) -> Halves:
        return Halves(inside["numbers"], inside["factor"], context["unit"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            return torch.mm(*(one.whole() for one in args))
        one = args[0]
        return Halves(func(one.numbers, *args[1:]), one.factor, one.unit)  # views

    def whole(self) -> Tensor:
        return self.numbers.float() / self.factor

    __torch_function__ = torch._C._disabled_torch_function_impl


def halved(tensor: Tensor) -> Halves:
    factor = 100 / tensor.abs().max()
    return Halves((tensor * factor).half(), factor)


class Gemm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, saves_halves: bool) -> Tensor:
        flat, narrow = halved(x.reshape(-1, x.shape[-1])), halved(weight)
        ctx.save_for_backward(*((flat, narrow) if saves_halves else (x, weight)))
        return torch.mm(flat, narrow).reshape(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = (one.whole() if isinstance(one, Halves) else one for one in ctx.saved_tensors)
        rows = x.reshape(-1, x.shape[-1])
        return gradient @ weight.t(), rows.t() @ gradient.flatten(0, 1), None


class NarrowLinear(nn.Linear):
    saves_halves = False

    def forward(self, input: Tensor) -> Tensor:
        found: Tensor = Gemm.apply(input, self.weight.t(), self.saves_halves)
        return found + self.bias


class SavingLinear(NarrowLinear):
    saves_halves = True


class Block(nn.Module):
    def __init__(self, linear: type[nn.Linear]) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(H), linear(H, 4 * H), linear(4 * H, H)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, linear: type[nn.Linear] = nn.Linear) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block(linear) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def batches() -> list[Tensor]:
    torch.manual_seed(1)
    return [(1 + number) * torch.randn(BATCH, ROWS, H) for number in range(3)]


def train(model: nn.Module) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for x in batches():
        optimizer.zero_grad()
        model(x).backward()
        found += [p.grad.clone() for p in model.parameters()]
        optimizer.step()
    return found


@pytest.mark.parametrize("linear", [NarrowLinear, SavingLinear])
def test_products_over_wrappers_are_computed_again(linear: type[nn.Linear], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tensor_subclasses.QUANTIZED, (Halves.__module__, Halves.__qualname__), ("numbers", "factor"))
    tensor_subclasses._kind.cache_clear()
    model = Net(linear)
    with jettison.apply(model, "full", batch=(batches()[0],)) as handle:
        found = train(model)
        assert [region.kept_bytes for region in handle.report()[:3]] == [INPUT_BYTES] * 3
    assert all(map(torch.equal, found, train(Net(linear))))


def test_the_parts_of_a_wrapper_that_is_written_to_are_restored() -> None:
    wrapped, undo = halved(torch.ones(4, 4)), Undo()
    undo.note([wrapped])
    wrapped.numbers.zero_()
    undo.restore()
    assert torch.equal(wrapped.whole(), torch.ones(4, 4))


def in_eight_bits(recipe: str = "tensorwise") -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # type: ignore[import-not-found]

    made = _delayed if recipe == "delayed" else Float8LinearConfig.from_recipe_name
    config = made(recipe)
    object.__setattr__(config, "emulate", True)
    model: nn.Module = convert_to_float8_training(Net(), config=config)
    return model


def _delayed(_recipe: str) -> Any:
    from torchao.float8 import CastConfig, Float8LinearConfig, ScalingType

    if not hasattr(ScalingType, "DELAYED"):
        pytest.skip("torchao has delayed scaling up to 0.9 (pip install torchao==0.9.0)")
    cast = CastConfig(scaling_type=ScalingType.DELAYED)
    return Float8LinearConfig(cast_config_input=cast, cast_config_weight=cast, cast_config_grad_output=cast)


@pytest.mark.slow
@WITHOUT
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
@pytest.mark.parametrize("policy", ["none", "full", "selective-op", "every:2"])
def test_torchaos_gradients_are_the_same(policy: str, recipe: str) -> None:
    model = in_eight_bits(recipe)
    with jettison.apply(model, policy, batch=(batches()[0],)) as handle:
        found = train(model)
        kept = [region.kept_bytes for region in handle.report()[:3]]
    assert all(map(torch.equal, found, train(in_eight_bits(recipe))))
    if policy == "full":
        assert kept == [INPUT_BYTES] * 3


@pytest.mark.slow
@WITHOUT
@pytest.mark.parametrize("policy", ["none", "full", "selective-op", "every:2"])
def test_torchaos_delayed_factors_are_the_forwards_and_histories_grow_once(policy: str) -> None:
    model, plain = in_eight_bits("delayed"), in_eight_bits("delayed")
    with jettison.apply(model, policy, batch=(batches()[0],)) as handle:
        found = accumulated(model)
        kept = [region.kept_bytes for region in handle.report()[:3]]
    expected = accumulated(plain)
    assert all(map(torch.equal, found, expected))
    assert any("history" in name for name, _ in plain.named_buffers())
    if policy == "full":
        assert kept == [INPUT_BYTES] * 3


def accumulated(model: nn.Module) -> list[Tensor]:
    """Gradients, factors and histories after each of six micro-batches; factors move after every second."""
    from torchao.float8 import sync_float8_amax_and_scale_history

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for number, x in enumerate(batches() * 2):
        model(x).backward()
        found += [t.detach().clone() for t in (*(p.grad for p in model.parameters()), *model.buffers())]
        if number % 2:
            sync_float8_amax_and_scale_history(model)
            optimizer.step()
            optimizer.zero_grad()
    return found


@pytest.mark.slow
@WITHOUT
def test_torchao_under_a_budget() -> None:
    model = in_eight_bits()
    with jettison.apply(model, "full", batch=(batches()[0],)) as handle:
        proof = jettison.verify(model, (batches()[0],), handle=handle, rounds=1)
    assert proof.passed and proof.saved_bytes_agree, proof.failures()
    budget_bytes = proof.measured_peak_bytes + 1024
    plan = jettison.plan(jettison.trace(in_eight_bits(), (batches()[0],)), Bytes(budget_bytes))
    planned = jettison.verify(in_eight_bits(), (batches()[0],), plan=plan, rounds=1)
    assert planned.passed, planned.failures()
    assert planned.measured_peak_bytes <= budget_bytes
    assert abs(plan.predicted.peak_bytes / planned.measured_peak_bytes - 1) < 0.01
