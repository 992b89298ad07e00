"""The lesson's engine beside an independent copy in PyTorch, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from examples.numpy_engine.fp8 import rounded_to_e4m3
from examples.numpy_engine.network import Network, transformer
from examples.numpy_engine.policies import every, keep_all
from examples.numpy_engine.training import train_step
from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """Written from the picture in the lesson, with torch's own parts."""

    def __init__(self, h: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.q, self.k, self.v, self.o = (nn.Linear(h, h) for _ in range(4))
        self.up, self.down = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

    def forward(self, x: Tensor, masks: list[Tensor], keep: float) -> Tensor:
        heads = [
            part(self.norm1(x)).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v)
        ]
        probabilities = functional.softmax(heads[0] @ heads[1].mT / heads[0].shape[-1] ** 0.5, dim=-1)
        mixed = (probabilities * masks[0] / keep @ heads[2]).transpose(1, 2).flatten(2)
        x = x + self.o(mixed) * masks[1] / keep
        return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh")) * masks[2] / keep


NAMES = {
    "norm1.weight": "gain1",
    "norm1.bias": "shift1",
    "norm2.weight": "gain2",
    "norm2.bias": "shift2",
    **{f"{name}.weight": f"w_{name}" for name in ("q", "k", "v", "o", "up", "down")},
    **{f"{name}.bias": f"b_{name}" for name in ("q", "k", "v", "o", "up", "down")},
}


def in_torch(network: Network, arrays: tuple, layers: int, heads: int) -> tuple[float, dict[str, np.ndarray]]:
    parameters, x, target = arrays
    blocks = [Block(x.shape[-1], heads).double() for _ in range(layers)]
    y = torch.from_numpy(x)
    masks = {step.output: torch.from_numpy(step.op.forward()) for step in network.steps if not step.inputs}
    for layer, one in enumerate(blocks):
        for name, parameter in one.named_parameters():
            value = torch.from_numpy(parameters[f"{layer}.{NAMES[name]}"])
            parameter.data.copy_(value.mT if value.ndim == 2 else value)
        y = one(y, [masks[f"{layer}.{name}_mask"] for name in ("dropped", "out_dropped", "down_dropped")], 0.9)
    loss = 0.5 * functional.mse_loss(y, torch.from_numpy(target))
    loss.backward()
    grads = {
        f"{layer}.{NAMES[name]}": (parameter.grad.mT if parameter.ndim == 2 else parameter.grad).numpy()
        for layer, one in enumerate(blocks)
        for name, parameter in one.named_parameters()
    }
    return loss.item(), grads


def test_the_same_loss_and_gradients() -> None:
    network = transformer(layers=2, b=2, s=5, h=8, heads=2)
    arrays = network.drawn(seed=4)
    loss, grads = in_torch(network, arrays, layers=2, heads=2)
    for plan in (keep_all(network), every(network, 1)):
        found = train_step(network, plan, arrays)
        assert found.loss == pytest.approx(loss, rel=1e-13)
        assert found.gradients.keys() == grads.keys()
        for name, grad in grads.items():
            np.testing.assert_allclose(found.gradients[name], grad, rtol=1e-10, atol=1e-14, err_msg=name)


def test_e4m3_is_torchs() -> None:
    x = np.random.default_rng(0).standard_normal(4096).astype(np.float32) * np.float32(2.0) ** np.arange(-11, 5).repeat(
        256
    )
    x = x.clip(-440, 440)
    expected = torch.from_numpy(x).to(torch.float8_e4m3fn).double().numpy()
    assert np.array_equal(rounded_to_e4m3(x.astype(np.float64)), expected)
