"""Networks as straight lines of steps: which op, from which values, to which value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .meter import Array, Ghost
from .ops import OUTPUT, Add, DrawMask, Drop, FusedAttention, Gelu, LayerNorm, Linear, Mix, Op, Scores, Shape, Softmax


@dataclass(frozen=True, kw_only=True)
class Step:
    """``output = op(*inputs, *parameters)``, all of them names."""

    op: Op
    inputs: tuple[str, ...]
    output: str
    parameters: tuple[str, ...] = ()

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """Values of forward that its backward wants."""
        return tuple(self.output if place == OUTPUT else self.inputs[place] for place in self.op.reads)


@dataclass(frozen=True, kw_only=True)
class Network:
    """Steps, cut into layers that can be checkpointed. Its input is called ``x0``."""

    steps: tuple[Step, ...]
    layers: tuple[range, ...]
    shape: Shape
    dtype: str
    parameters: Mapping[str, Shape]
    core: tuple[str, ...] = ()
    """Of a layer's values, those that selective recomputation drops: none where attention is one kernel."""

    @property
    def names(self) -> dict[str, int]:
        """Values, and the number of the step that makes each."""
        return {step.output: number for number, step in enumerate(self.steps)}

    def drawn(self, seed: int = 0) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
        """Parameters, an input and a target."""
        draw = np.random.default_rng(seed)
        weights = {
            name: draw.standard_normal(shape) * (0.3 if len(shape) == 1 else shape[0] ** -0.5)
            for name, shape in self.parameters.items()
        }
        arrays = {name: value.astype(self.dtype) for name, value in weights.items()}
        return arrays, *(draw.standard_normal(self.shape).astype(self.dtype) for _ in range(2))

    def ghosts(self) -> tuple[dict[str, Array], Array, Array]:
        """The same without numbers."""
        weights = {name: Ghost(shape, self.dtype) for name, shape in self.parameters.items()}
        return weights, Ghost(self.shape, self.dtype), Ghost(self.shape, self.dtype)


@dataclass(frozen=True, kw_only=True)
class _Form:
    """What all blocks of a stack have in common."""

    shape: Shape
    heads: int
    keep: float
    seed: int
    is_fused: bool


def _attention(at: str, x: str, form: _Form) -> Iterator[Step]:
    yield Step(op=LayerNorm(), inputs=(x,), output=f"{at}n1", parameters=(f"{at}gain1", f"{at}shift1"))
    for name in "qkv":
        weights = (f"{at}w_{name}", f"{at}b_{name}")
        yield Step(op=Linear(), inputs=(f"{at}n1",), output=f"{at}{name}", parameters=weights)
    if form.is_fused:
        op = FusedAttention(heads=form.heads)
        yield Step(op=op, inputs=(f"{at}q", f"{at}k", f"{at}v"), output=f"{at}mixed")
    else:
        yield from _core(at, form)
    yield Step(op=Linear(), inputs=(f"{at}mixed",), output=f"{at}out", parameters=(f"{at}w_o", f"{at}b_o"))


def _core(at: str, form: _Form) -> Iterator[Step]:
    """Steps of selective recomputation, op by op: eager attention."""
    b, s, _ = form.shape
    mixed = f"{at}probabilities"
    yield Step(op=Scores(heads=form.heads), inputs=(f"{at}q", f"{at}k"), output=f"{at}scores")
    yield Step(op=Softmax(), inputs=(f"{at}scores",), output=mixed)
    if form.keep < 1:
        yield from _dropout(at, "probabilities", "dropped", (b, form.heads, s, s), form)
        mixed = f"{at}dropped"
    yield Step(op=Mix(heads=form.heads), inputs=(mixed, f"{at}v"), output=f"{at}mixed")


def _dropout(at: str, name: str, output: str, shape: Shape, form: _Form) -> Iterator[Step]:
    mask = f"{at}{output}_mask"
    yield Step(op=DrawMask(size=shape, keep=form.keep, place=mask, seed=form.seed), inputs=(), output=mask)
    yield Step(op=Drop(keep=form.keep), inputs=(f"{at}{name}", mask), output=f"{at}{output}")


def _residual(at: str, x: str, branch: str, output: str, form: _Form) -> Iterator[Step]:
    if form.keep < 1:
        yield from _dropout(at, branch, f"{branch}_dropped", form.shape, form)
        branch += "_dropped"
    yield Step(op=Add(), inputs=(x, f"{at}{branch}"), output=output)


def _block(at: str, x: str, y: str, form: _Form) -> list[Step]:
    """Attention and a feed-forward part of 4h, each after a norm and beside a residual connection."""
    return [
        *_attention(at, x, form),
        *_residual(at, x, "out", f"{at}r", form),
        Step(op=LayerNorm(), inputs=(f"{at}r",), output=f"{at}n2", parameters=(f"{at}gain2", f"{at}shift2")),
        Step(op=Linear(), inputs=(f"{at}n2",), output=f"{at}up", parameters=(f"{at}w_up", f"{at}b_up")),
        Step(op=Gelu(), inputs=(f"{at}up",), output=f"{at}act"),
        Step(op=Linear(), inputs=(f"{at}act",), output=f"{at}down", parameters=(f"{at}w_down", f"{at}b_down")),
        *_residual(at, f"{at}r", "down", y, form),
    ]


def _block_parameters(at: str, h: int) -> dict[str, Shape]:
    square = {f"{at}w_{name}": (h, h) for name in "qkvo"}
    vectors = ["gain1", "shift1", "gain2", "shift2", "b_q", "b_k", "b_v", "b_o", "b_down"]
    wide = {f"{at}w_up": (h, 4 * h), f"{at}b_up": (4 * h,), f"{at}w_down": (4 * h, h)}
    return square | wide | {f"{at}{name}": (h,) for name in vectors}


def transformer(
    *,
    layers: int,
    b: int,
    s: int,
    h: int,
    heads: int,
    dropout: float = 0.1,
    attention: str = "eager",
    dtype: str = "float64",
    seed: int = 0,
) -> Network:
    """A stack of transformer blocks. Attention is ``eager``, or ``fused`` and then without dropout of its own."""
    if h % heads:
        raise ValueError(f"{heads} heads do not divide a width of {h}: choose a multiple")
    form = _Form(shape=(b, s, h), heads=heads, keep=1 - dropout, seed=seed, is_fused=attention == "fused")
    steps: list[Step] = []
    parameters: dict[str, Shape] = {}
    spans: list[range] = []
    for layer in range(layers):
        block = _block(f"{layer}.", f"x{layer}", f"x{layer + 1}", form)
        spans.append(range(len(steps), len(steps) + len(block)))
        steps += block
        parameters |= _block_parameters(f"{layer}.", h)
    core = () if form.is_fused else ("probabilities", "dropped_mask", "dropped")
    return Network(
        steps=tuple(steps), layers=tuple(spans), shape=(b, s, h), dtype=dtype, parameters=parameters, core=core
    )


def chain(*, layers: int, b: int, h: int, dtype: str = "float64") -> Network:
    """Matmuls of one width, one after the other: the network of which the square-root rule is true.

    Each layer saves one tensor, its input, of the size of every other.
    """
    steps, parameters = [], {}
    for layer in range(layers):
        names = (f"{layer}.w", f"{layer}.b")
        steps.append(Step(op=Linear(), inputs=(f"x{layer}",), output=f"x{layer + 1}", parameters=names))
        parameters |= {names[0]: (h, h), names[1]: (h,)}
    spans = tuple(range(layer, layer + 1) for layer in range(layers))
    return Network(steps=tuple(steps), layers=spans, shape=(b, h), dtype=dtype, parameters=parameters)
