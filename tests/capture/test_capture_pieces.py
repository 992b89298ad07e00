"""Cells of torch's that write in place to pieces of one product: what of it may be computed again."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from jettison.capture.fake_copies import fake_mode
from jettison.capture.recorder import TensorRef, are_apart
from jettison.capture.tracer import trace_region

WIDTH = 8


def elements(ref: TensorRef) -> set[int]:
    places = [range(0, n * step, step) if step else [0] * n for n, step in zip(ref.size, ref.stride, strict=True)]
    return {ref.offset + sum(at) for at in itertools.product(*places)}


def view(size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> TensorRef:
    return TensorRef(0, size, stride, offset, torch.float32)


@st.composite
def views(draw: st.DrawFn) -> TensorRef:
    dims = draw(st.integers(0, 3))
    steps = st.sampled_from([0, 1, 2, 3, 4, 6, 12, 24])
    return view(
        tuple(draw(st.lists(st.integers(0, 4), min_size=dims, max_size=dims))),
        tuple(draw(st.lists(steps, min_size=dims, max_size=dims))),
        draw(st.integers(0, 30)),
    )


@settings(max_examples=1000)
@given(views(), views())
def test_views_that_are_said_to_be_apart_have_no_element_in_common(a: TensorRef, b: TensorRef) -> None:
    if are_apart(a, b):
        assert not elements(a) & elements(b)


@settings(max_examples=200)
@given(st.integers(2, 4), st.integers(0, 2), st.data())
def test_chunks_are_apart_and_no_chunk_is_from_itself(pieces: int, dim: int, data: st.DataObject) -> None:
    sizes = [data.draw(st.integers(1, 4)) for _ in range(3)]
    sizes[dim] *= pieces
    chunks = torch.empty(sizes).chunk(pieces, dim)
    refs = [view(tuple(c.shape), c.stride(), c.storage_offset()) for c in chunks]
    assert all(are_apart(a, b) for a, b in itertools.permutations(refs, 2))
    assert not any(are_apart(a, a) for a in refs)


class Cell(nn.Module):
    """A cell of torch's, which works in pieces of one product that it writes to in place."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.cell = kind(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.cell(x)
        return out[0] if isinstance(out, tuple) else out


@pytest.mark.parametrize("kind", [nn.GRUCell, nn.LSTMCell, nn.RNNCell])
def test_a_cell_can_be_computed_again_from_its_input_alone(kind: type[nn.Module]) -> None:
    trace = trace_region(Cell(kind), (torch.randn(4, WIDTH, requires_grad=True),), {})
    assert [op.name for op in trace.program.ops if op.anchor] == []
    trace.program.recompute_set(frozenset(trace.inputs))


def test_a_piece_that_is_written_to_past_its_version_is_kept() -> None:
    class Overwriting(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            left, right = (x * 2).chunk(2, -1)
            out = left.sin() * right
            left.data.mul_(3)  # what autograd holds of it changes too
            return out

    trace = trace_region(Overwriting(), (torch.randn(4, WIDTH, requires_grad=True),), {})
    with pytest.raises(ValueError, match="may not be recomputed"):
        trace.program.recompute_set(frozenset(trace.inputs))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("weighs", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_statistics_of_a_batch_norm_have_the_real_ones_types(training: bool, weighs: bool, dtype: torch.dtype) -> None:
    def run() -> list[tuple[torch.Size, torch.dtype]]:
        image, mean, variance = torch.randn(4, 3, 5, 5).to(dtype), torch.zeros(3), torch.ones(3)
        weights = (torch.ones(3), torch.zeros(3)) if weighs else (None, None)
        out = torch.ops.aten.native_batch_norm.default(image, *weights, mean, variance, training, 0.1, 1e-5)
        return [(one.shape, one.dtype) for one in out]

    with fake_mode():
        fake = run()
    assert fake == run()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_results_of_a_group_norm_have_the_real_ones_types(dtype: torch.dtype) -> None:
    def run() -> list[tuple[torch.Size, torch.dtype]]:
        image, weight, sizes = torch.randn(2, 4, 5, 5).to(dtype), torch.ones(4), (2, 4, 25, 2)
        out = torch.ops.aten.native_group_norm.default(image, weight, weight, *sizes, 1e-5)
        back = torch.ops.aten.native_group_norm_backward.default(image, image, *out[1:], weight, *sizes, [True] * 3)
        return [(one.shape, one.dtype) for one in (*out, *back)]

    with fake_mode():
        fake = run()
    assert fake == run()
