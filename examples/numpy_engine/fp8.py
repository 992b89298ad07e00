"""FP8 with delayed scaling, and what happens to it when a layer runs a second time.

E4M3 reaches to 448. Before a tensor is rounded to it, it is multiplied by 448 over the largest magnitude that the last
few steps saw (its amax history): reading this step's own would mean a second pass over the tensor. So a forward reads
*and writes* state.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from .ops import Gelu

LARGEST = 448.0
GELU = Gelu()


def rounded_to_e4m3(x: np.ndarray) -> np.ndarray:
    """To E4M3's nearest value, ties to even: three bits behind the point, exponents down to -6, then subnormals."""
    exponent = np.floor(np.log2(np.maximum(np.abs(x), 2.0**-9)))
    spacing = 2.0 ** (np.maximum(exponent, -6) - 3)
    return np.clip(np.rint(x / spacing) * spacing, -LARGEST, LARGEST)


class DelayedScale:
    """448 over the largest amax of the last ``length`` pushes."""

    def __init__(self, length: int) -> None:
        self.amaxes: deque[float] = deque(maxlen=length)

    def scale(self) -> float:
        return LARGEST / max(self.amaxes) if self.amaxes else 1.0

    def push(self, x: np.ndarray) -> None:
        self.amaxes.append(float(np.abs(x).max()))


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """One step of one way to recompute, beside the step that kept everything."""

    step: int
    scale: float
    """The first layer's, where everything is kept."""
    again_scale: float
    """The same layer's when it runs a second time, in the copy that is checkpointed."""
    gradients_identical: bool
    worst: float
    """The largest difference of a gradient, as a share of the largest gradient."""


class Stack:
    """Layers of gelu(round(x) @ w). ``snapshot``: a second run takes the scale of the first one, and pushes nothing."""

    def __init__(self, *, layers: int, h: int, history: int, seed: int, snapshot: bool = True) -> None:
        draw = np.random.default_rng(seed)
        self.weights = [draw.standard_normal((h, h)) * h**-0.5 for _ in range(layers)]
        self.scales = [DelayedScale(history) for _ in range(layers)]
        self.snapshot = snapshot
        self.again_scale = 1.0

    def step(self, x: np.ndarray, *, checkpoint: bool) -> tuple[list[np.ndarray], float]:
        """Weights' gradients of half the mean square, and the first layer's scale."""
        inputs, taken, kept = [], [], []
        for weight, scaling in zip(self.weights, self.scales, strict=True):
            scale = scaling.scale()
            inputs.append(x)
            taken.append(scale)
            low, x = self._layer(x, weight, scale)
            scaling.push(inputs[-1])
            kept.append(None if checkpoint else low)
        grad = x / x.size
        grads = []
        for layer in reversed(range(len(self.weights))):
            low = kept[layer]
            if low is None:
                low = self._again(layer, inputs[layer], taken[layer])
            (grad,) = GELU.backward(grad, low @ self.weights[layer])
            grads.append(low.T @ grad)
            grad = grad @ self.weights[layer].T
        return grads[::-1], taken[0]

    def _layer(self, x: np.ndarray, weight: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray]:
        low = rounded_to_e4m3(x * scale) / scale
        return low, GELU.forward(low @ weight)

    def _again(self, layer: int, x: np.ndarray, taken: float) -> np.ndarray:
        scale = taken if self.snapshot else self.scales[layer].scale()
        if not self.snapshot:
            self.scales[layer].push(x)
        if layer == 0:
            self.again_scale = scale
        return self._layer(x, self.weights[layer], scale)[0]


def replay(
    *, snapshot: bool, steps: int = 12, layers: int = 4, h: int = 32, history: int = 4, spike: int = 3
) -> list[Replayed]:
    """Steps on inputs of one size, one of them eight times as large: checkpointed, and in a copy that keeps all."""
    sizes = {"layers": layers, "h": h, "history": history, "seed": 0}
    plain, again = Stack(**sizes), Stack(**sizes, snapshot=snapshot)
    draw, found = np.random.default_rng(1), []
    for step in range(steps):
        x = draw.standard_normal((16, h)) * (8.0 if step == spike else 1.0)
        expected, scale = plain.step(x, checkpoint=False)
        got, _ = again.step(x, checkpoint=True)
        worst = max(float(np.abs(a - b).max() / np.abs(a).max()) for a, b in zip(expected, got, strict=True))
        same = all(np.array_equal(a, b) for a, b in zip(expected, got, strict=True))
        row = Replayed(step=step, scale=scale, again_scale=again.again_scale, gradients_identical=same, worst=worst)
        found.append(row)
    return found
