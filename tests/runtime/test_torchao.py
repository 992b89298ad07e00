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
from jettison.units import Bytes

H, ROWS, BATCH = 32, 64, 8
INPUT_BYTES = BATCH * ROWS * H * 4
NAMES = [f"layers.{n}" for n in range(3)]
WITHOUT = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is not installed (pip install torchao==0.18.0)"
)


class Narrow(Tensor):
    """Halves beside the factor that they were multiplied with; a product takes them apart."""

    @staticmethod
    def __new__(cls, data: Tensor, scale: Tensor) -> Narrow:
        made: Narrow = Tensor._make_wrapper_subclass(cls, data.size(), strides=data.stride(), dtype=torch.float32)  # type: ignore[attr-defined]
        made.data_, made.scale = data, scale
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is torch.ops.aten.mm.default
        return torch.mm(*(one.data_.float() / one.scale for one in args))

    __torch_function__ = torch._C._disabled_torch_function_impl


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        flat = x.reshape(-1, x.shape[-1])
        made: Tensor = torch.mm(*(Narrow((each * by).half(), by) for each in (flat, weight) for by in [largest(each)]))
        return made.reshape(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), x.flatten(0, 1).t() @ gradient.flatten(0, 1)


def largest(tensor: Tensor) -> Tensor:
    return 100 / tensor.abs().max()


class NarrowLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        found: Tensor = Product.apply(input, self.weight.t())
        return found + self.bias


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


def test_a_product_over_wrappers_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    wrappers = (*tensor_subclasses.PASSING, (Narrow.__module__, Narrow.__qualname__))
    monkeypatch.setattr(tensor_subclasses, "PASSING", wrappers)
    tensor_subclasses._kind.cache_clear()
    model = Net(NarrowLinear)
    with jettison.apply(model, "full", batch=(batches()[0],)) as handle:
        found = train(model)
        assert [region.kept_bytes for region in handle.report()[:3]] == [INPUT_BYTES] * 3
    assert all(map(torch.equal, found, train(Net(NarrowLinear))))


def in_eight_bits(recipe: str = "tensorwise") -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # type: ignore[import-not-found]

    config = Float8LinearConfig.from_recipe_name(recipe)
    object.__setattr__(config, "emulate", True)
    model: nn.Module = convert_to_float8_training(Net(), config=config)
    return model


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
