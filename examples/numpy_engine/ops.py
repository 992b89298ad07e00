"""Ops with their backward, by hand. Letters: b batch, s sequence, h hidden, a heads, d = h / a.

``reads`` says what backward wants of forward: inputs by number, or OUTPUT. Activation memory has no other reason.
FLOPs are those of matmuls, a multiply-add being 2; what the others cost is the bytes that they move.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

OUTPUT = -1
Shape = tuple[int, ...]
Arrays = tuple[np.ndarray, ...]


@dataclass(frozen=True, kw_only=True)
class Op:
    """Unless an op says otherwise its output has its first input's shape, and it has no matmul."""

    reads: ClassVar[tuple[int, ...]] = ()
    gradients: ClassVar[int] = 2
    """Of how many inputs, from the first on, it returns gradients; of all, where there are fewer."""

    def shape(self, *inputs: Shape) -> Shape:
        return inputs[0]

    def flops(self, *inputs: Shape) -> int:
        return 0

    def backward_flops(self, *inputs: Shape) -> int:
        """A matmul has two operands, and so backward two matmuls."""
        return 2 * self.flops(*inputs)

    def forward(self, *inputs: Any) -> np.ndarray:
        raise NotImplementedError

    def backward(self, grad: np.ndarray, *read: Any) -> Arrays:
        """Gradients of the inputs, then of the parameters. ``read`` is what ``reads`` names, then the parameters."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Linear(Op):
    """x @ w + bias. Its weight's gradient is x.T @ grad: that is why x is kept."""

    reads: ClassVar = (0,)

    def shape(self, x: Shape, w: Shape, bias: Shape) -> Shape:
        return (*x[:-1], w[1])

    def flops(self, x: Shape, w: Shape, bias: Shape) -> int:
        return 2 * math.prod(x) * w[1]

    def forward(self, x: Any, w: Any, bias: Any) -> np.ndarray:
        return x @ w + bias

    def backward(self, grad: Any, x: Any, w: Any, bias: Any) -> Arrays:
        rows, grad_rows = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        return grad @ w.T, rows.T @ grad_rows, grad_rows.sum(axis=0)


@dataclass(frozen=True, kw_only=True)
class Gelu(Op):
    """The tanh form. Its slope depends on where it was evaluated: its input is kept."""

    reads: ClassVar = (0,)

    def forward(self, x: Any) -> np.ndarray:
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    def backward(self, grad: Any, x: Any) -> Arrays:
        tanh = np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
        slope = (1 - tanh**2) * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x**2)
        return (grad * (0.5 * (1 + tanh) + 0.5 * x * slope),)


@dataclass(frozen=True, kw_only=True)
class LayerNorm(Op):
    """Mean and deviation are worked out again from the input: libraries keep them, two numbers a row."""

    reads: ClassVar = (0,)
    epsilon: float = 1e-5

    def _normal(self, x: Any) -> tuple[Any, Any]:
        centred = x - x.mean(axis=-1, keepdims=True)
        deviation = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + self.epsilon)
        return centred / deviation, deviation

    def forward(self, x: Any, gain: Any, bias: Any) -> np.ndarray:
        return self._normal(x)[0] * gain + bias

    def backward(self, grad: Any, x: Any, gain: Any, bias: Any) -> Arrays:
        normal, deviation = self._normal(x)
        inner, rows = grad * gain, tuple(range(grad.ndim - 1))
        centred = inner - inner.mean(axis=-1, keepdims=True) - normal * (inner * normal).mean(axis=-1, keepdims=True)
        return centred / deviation, (grad * normal).sum(axis=rows), grad.sum(axis=rows)


def _heads(x: Any, heads: int) -> Any:
    """b s h to b a s d, without a copy."""
    return x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)


def _joined(x: Any) -> np.ndarray:
    """b a s d to b s h, a copy."""
    return x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1)


@dataclass(frozen=True, kw_only=True)
class Scores(Op):
    """q @ k.T of each head: b a s s, from two inputs of b s h. The quadratic tensor begins here."""

    reads: ClassVar = (0, 1)
    heads: int

    def shape(self, q: Shape, k: Shape) -> Shape:
        return (q[0], self.heads, q[1], k[1])

    def flops(self, q: Shape, k: Shape) -> int:
        return 2 * math.prod(q) * k[1]

    def forward(self, q: Any, k: Any) -> np.ndarray:
        scale = math.sqrt(self.heads / q.shape[-1])
        return (_heads(q, self.heads) @ _heads(k, self.heads).swapaxes(2, 3)) * scale

    def backward(self, grad: Any, q: Any, k: Any) -> Arrays:
        grad = grad * math.sqrt(self.heads / q.shape[-1])
        return _joined(grad @ _heads(k, self.heads)), _joined(grad.swapaxes(2, 3) @ _heads(q, self.heads))


@dataclass(frozen=True, kw_only=True)
class Softmax(Op):
    """Its slope is written in its output: that is kept, and the scores need not be."""

    reads: ClassVar = (OUTPUT,)

    def forward(self, x: Any) -> np.ndarray:
        raised = np.exp(x - x.max(axis=-1, keepdims=True))
        return raised / raised.sum(axis=-1, keepdims=True)

    def backward(self, grad: Any, y: Any) -> Arrays:
        return (y * (grad - (grad * y).sum(axis=-1, keepdims=True)),)


@dataclass(frozen=True, kw_only=True)
class Mix(Op):
    """Probabilities @ values: b s h."""

    reads: ClassVar = (0, 1)
    heads: int

    def shape(self, probabilities: Shape, v: Shape) -> Shape:
        return v

    def flops(self, probabilities: Shape, v: Shape) -> int:
        return 2 * math.prod(v) * probabilities[-1]

    def forward(self, probabilities: Any, v: Any) -> np.ndarray:
        return _joined(probabilities @ _heads(v, self.heads))

    def backward(self, grad: Any, probabilities: Any, v: Any) -> Arrays:
        grad = _heads(grad, self.heads)
        return grad @ _heads(v, self.heads).swapaxes(2, 3), _joined(probabilities.swapaxes(2, 3) @ grad)


@dataclass(frozen=True, kw_only=True)
class FusedAttention(Op):
    """Scores, softmax and mix in one kernel, which shows nobody what is s x s: backward makes it again, tile by tile.

    Such a kernel keeps a number for each row beside its output; this one works it out again.
    """

    reads: ClassVar = (0, 1, 2)
    gradients: ClassVar = 3
    heads: int

    def flops(self, q: Shape, k: Shape, v: Shape) -> int:
        return 4 * math.prod(q) * k[1]

    def backward_flops(self, q: Shape, k: Shape, v: Shape) -> int:
        """Four matmuls, and the scores once more."""
        return 10 * math.prod(q) * k[1]

    def forward(self, q: Any, k: Any, v: Any) -> np.ndarray:
        return Mix(heads=self.heads).forward(self._probabilities(q, k), v)

    def backward(self, grad: Any, q: Any, k: Any, v: Any) -> Arrays:
        probabilities = self._probabilities(q, k)
        of_probabilities, of_v = Mix(heads=self.heads).backward(grad, probabilities, v)
        (of_scores,) = Softmax().backward(of_probabilities, probabilities)
        return *Scores(heads=self.heads).backward(of_scores, q, k), of_v

    def _probabilities(self, q: Any, k: Any) -> np.ndarray:
        return Softmax().forward(Scores(heads=self.heads).forward(q, k))


@dataclass(frozen=True, kw_only=True)
class DrawMask(Op):
    """What dropout keeps: a byte for each element. A function of seed and place, so that a second draw is the same."""

    size: Shape
    keep: float
    place: str
    seed: int

    def shape(self) -> Shape:
        return self.size

    def forward(self) -> np.ndarray:
        stream = np.random.Generator(np.random.Philox(key=[self.seed, zlib.crc32(self.place.encode())]))
        return stream.random(self.size) < self.keep


@dataclass(frozen=True, kw_only=True)
class Drop(Op):
    """x * mask / keep. Of its inputs backward wants the mask alone."""

    reads: ClassVar = (1,)
    gradients: ClassVar = 1
    keep: float

    def forward(self, x: Any, mask: Any) -> np.ndarray:
        return x * mask / self.keep

    def backward(self, grad: Any, mask: Any) -> Arrays:
        return (grad * mask / self.keep,)


@dataclass(frozen=True, kw_only=True)
class Add(Op):
    """A residual connection. Backward hands the gradient to both and reads nothing."""

    def forward(self, x: Any, y: Any) -> np.ndarray:
        return x + y

    def backward(self, grad: Any) -> Arrays:
        return grad, grad
