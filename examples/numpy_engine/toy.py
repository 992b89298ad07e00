"""A toy that lessons like: layers of two matmuls with a ReLU between them, and two methods to run their backward.

It shows how a baseline misleads: the method that is said to keep everything keeps layers' inputs alone, and recomputes
the ReLU's input. So it checkpoints every layer already, and one that adds segments computes that input a third time.
"""

from __future__ import annotations

import numpy as np

Layer = tuple[np.ndarray, np.ndarray]


class Toy:
    """Layers of relu(x @ w1) @ w2; matmuls are counted."""

    def __init__(self, layers: int, h: int = 8, seed: int = 0) -> None:
        draw = np.random.default_rng(seed)
        self.layers: list[Layer] = [(draw.standard_normal((h, h)), draw.standard_normal((h, h))) for _ in range(layers)]
        self.x = draw.standard_normal((4, h))
        self.matmuls = 0

    def matmul(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        self.matmuls += 1
        return a @ b

    def forward(self, x: np.ndarray, layers: list[Layer]) -> list[np.ndarray]:
        """The inputs of the layers, then the output."""
        found = [x]
        for w1, w2 in layers:
            found.append(self.matmul(np.maximum(self.matmul(found[-1], w1), 0), w2))
        return found

    def backward(
        self, grad: np.ndarray, inputs: list[np.ndarray], layers: list[Layer]
    ) -> tuple[np.ndarray, list[Layer]]:
        """Backpropagate through layers whose inputs are at hand: the matmul before each ReLU is recomputed."""
        grads = []
        for x, (w1, w2) in zip(reversed(inputs), reversed(layers), strict=True):
            before = self.matmul(x, w1)
            inner = self.matmul(grad, w2.T) * (before > 0)
            grads.append((self.matmul(x.T, inner), self.matmul(np.maximum(before, 0).T, grad)))
            grad = self.matmul(inner, w1.T)
        return grad, grads[::-1]

    def step(self) -> list[Layer]:
        """The method that is called keeping everything."""
        *inputs, y = self.forward(self.x, self.layers)
        return self.backward(np.ones_like(y), inputs, self.layers)[1]

    def step_by_segments(self, k: int) -> list[Layer]:
        """The method that is called checkpointing every k layers."""
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


def matmuls_of(layers: int, k: int) -> dict[str, int]:
    """Matmuls of a step: of one that keeps what backward reads, and of both methods above."""
    plain, segments = Toy(layers), Toy(layers)
    plain.step()
    segments.step_by_segments(k)
    return {"needed": 6 * layers, "called plain": plain.matmuls, "called checkpointed": segments.matmuls}
