"""A toy that lessons like: layers of two products with a ReLU between them, and two ways to run their backward.

It shows how a baseline misleads: the way that is said to keep everything keeps layers' inputs alone, and computes the
ReLU's input again. So it is a checkpoint at every layer already, and one that adds segments computes it a third time.
"""

from __future__ import annotations

import numpy as np

Layer = tuple[np.ndarray, np.ndarray]


class Toy:
    """Layers of relu(x @ w1) @ w2; products are counted."""

    def __init__(self, layers: int, h: int = 8, seed: int = 0) -> None:
        draw = np.random.default_rng(seed)
        self.layers: list[Layer] = [(draw.standard_normal((h, h)), draw.standard_normal((h, h))) for _ in range(layers)]
        self.x = draw.standard_normal((4, h))
        self.products = 0

    def product(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        self.products += 1
        return a @ b

    def forward(self, x: np.ndarray, layers: list[Layer]) -> list[np.ndarray]:
        """The inputs of the layers, then the output."""
        found = [x]
        for w1, w2 in layers:
            found.append(self.product(np.maximum(self.product(found[-1], w1), 0), w2))
        return found

    def backward(
        self, grad: np.ndarray, inputs: list[np.ndarray], layers: list[Layer]
    ) -> tuple[np.ndarray, list[Layer]]:
        """Of layers whose inputs are at hand: the product before each ReLU is not, and runs again."""
        grads = []
        for x, (w1, w2) in zip(reversed(inputs), reversed(layers), strict=True):
            before = self.product(x, w1)
            inner = self.product(grad, w2.T) * (before > 0)
            grads.append((self.product(x.T, inner), self.product(np.maximum(before, 0).T, grad)))
            grad = self.product(inner, w1.T)
        return grad, grads[::-1]

    def step(self) -> list[Layer]:
        """The way that is called keeping everything."""
        *inputs, y = self.forward(self.x, self.layers)
        return self.backward(np.ones_like(y), inputs, self.layers)[1]

    def step_by_segments(self, k: int) -> list[Layer]:
        """The way that is called checkpointing every k layers."""
        everything = self.forward(self.x, self.layers)
        starts, grads = range(0, len(self.layers), k), []
        kept = [everything[start] for start in starts]
        grad = np.ones_like(everything[-1])
        for start, x in zip(reversed(starts), reversed(kept), strict=True):
            layers = self.layers[start : start + k]
            *inputs, _ = self.forward(x, layers)
            grad, found = self.backward(grad, inputs, layers)
            grads = found + grads
        return grads


def products_of(layers: int, k: int) -> dict[str, int]:
    """Products of a step: of one that keeps what backward reads, and of both ways above."""
    plain, segments = Toy(layers), Toy(layers)
    plain.step()
    segments.step_by_segments(k)
    return {"needed": 6 * layers, "called plain": plain.products, "called checkpointed": segments.products}
