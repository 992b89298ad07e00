"""The record of a region: ops, buffers, views, slots, anchors, taps, names."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jettison.capture.op_traits import anchor_of, is_nondeterministic
from jettison.capture.randomness import ADVANCE
from jettison.capture.recorder import RegionTrace, TensorRef
from jettison.capture.tracer import trace_model, trace_region
from jettison.ledger.program import Anchor, Op, Source
from jettison.runtime.recordings import reads_hold

N = 6


class Body(nn.Module):
    """A region made of one function of its linear layer and its argument."""

    def __init__(self, body: Callable[[nn.Linear, Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(N, N)
        self.body = body

    def forward(self, x: Tensor) -> Any:
        return self.body(self.linear, x)


def record(body: Callable[[nn.Linear, Tensor], Any], shape: tuple[int, ...] = (N, N)) -> RegionTrace:
    return trace_region(Body(body), (torch.randn(shape, requires_grad=True),), {})


def op_named(trace: RegionTrace, start: str) -> Op:
    """The only recorded op with this name."""
    found = [op for op in trace.program.ops if op.name.startswith(start)]
    assert len(found) == 1, [op.name for op in trace.program.ops]
    return found[0]


def names(trace: RegionTrace) -> list[str]:
    return [op.name for op in trace.program.ops]


# what is written down -------------------------------------------------------------------------------------------------


def test_ops_buffers_and_slots_of_a_linear_layer_with_an_activation() -> None:
    trace = record(lambda linear, x: linear(x).tanh())
    program = trace.program
    assert names(trace) == ["aten.addmm.default", "aten.tanh.default"]
    x, weight, bias, hidden, out = range(5)
    assert [b.source for b in program.buffers] == [Source.INPUT, *2 * [Source.PARAMETER], *2 * [Source.OP]]
    assert [b.nbytes for b in program.buffers] == [4 * N * N, 4 * N * N, 4 * N, 4 * N * N, 4 * N * N]
    addmm, tanh = program.ops
    assert set(addmm.inputs) == {x, weight, bias} and addmm.outputs == (hidden,)
    assert tanh.inputs == (hidden,) and tanh.outputs == (out,)
    assert [b.producer for b in program.buffers] == [None, None, None, 0, 1]
    assert [(s.buffer, s.path) for s in program.slots] == [(x, "linear"), (weight, "linear"), (out, "")]
    assert program.outputs == (out,)
    assert trace.names == {weight: "linear.weight", bias: "linear.bias"} and trace.inputs == {x: 0}
    assert [b.index for b in program.buffers if b.free] == [weight, bias]
    assert program.saved_buffers() == {x, out} and program.kept_bytes(program.saved_buffers()) == 2 * 4 * N * N
    assert addmm.path == "linear" and tanh.path == ""


def test_flops_are_exact_integers() -> None:
    b, s, h, f = 2, 3, 4, 5

    class Products(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.with_bias = nn.Linear(h, f)
            self.without = nn.Linear(f, h, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            y = self.without(self.with_bias(x))
            return torch.bmm(y, y.transpose(1, 2))

    trace = trace_region(Products(), (torch.randn(b, s, h, requires_grad=True),), {})
    assert op_named(trace, "aten.addmm").flops == 2 * b * s * h * f
    assert op_named(trace, "aten.mm").flops == 2 * b * s * f * h
    assert op_named(trace, "aten.bmm").flops == 2 * b * s * h * s


@pytest.mark.parametrize(("queries", "keys", "d_value"), [(8, 8, 4), (8, 16, 4)])
def test_fused_attention_on_the_cpu_has_flops(queries: int, keys: int, d_value: int) -> None:
    b, a, d = 2, 3, 4

    class Attention(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v)

    q = torch.randn(b, a, queries, d, requires_grad=True)
    k, v = torch.randn(b, a, keys, d, requires_grad=True), torch.randn(b, a, keys, d_value, requires_grad=True)
    op = op_named(trace_region(Attention(), (q, k, v), {}), "aten._scaled_dot_product_flash_attention_for_cpu")
    assert op.flops == 2 * b * a * queries * keys * d + 2 * b * a * queries * keys * d_value


def test_bytes_moved_counts_a_broadcast_dim_once() -> None:
    trace = record(lambda linear, x: x[0].expand(N, N) * x)
    assert op_named(trace, "aten.mul").bytes_moved == 4 * (N + N * N + N * N)


# identity -------------------------------------------------------------------------------------------------------------


def test_views_of_one_buffer_are_told_apart() -> None:
    """The transpose of a square matrix has its shape, and so has the other half of a storage: neither is the matrix."""

    def body(linear: nn.Linear, x: Tensor) -> Tensor:
        hidden = x.exp()
        low, high = hidden[: N // 2], hidden[N // 2 :]
        return (hidden @ hidden.t()).sum() + (low * high).sum() + (hidden[1].expand(N, N) * x).sum()

    trace = record(body)
    buffer = op_named(trace, "aten.exp").outputs[0]
    seen = {(r.size, r.stride, r.offset) for r in trace.slots if r.buffer == buffer}
    whole, turned = ((N, N), (N, 1), 0), ((N, N), (1, N), 0)
    low, high = ((N // 2, N), (N, 1), 0), ((N // 2, N), (N, 1), N * N // 2)
    assert seen == {whole, turned, low, high, ((N, N), (0, 1), N)}
    assert sum(b.nbytes for b in trace.program.buffers if b.index in trace.program.saved_buffers()) == 2 * 4 * N * N


def test_an_in_place_write_makes_a_new_version() -> None:
    def body(linear: nn.Linear, x: Tensor) -> Tensor:
        hidden = linear(x)
        gate = hidden.sigmoid()
        hidden.mul_(2.0)
        return hidden.exp() + gate

    trace = record(body)
    first = op_named(trace, "aten.addmm").outputs[0]
    write = op_named(trace, "aten.mul_")
    assert write.inputs == (first,) and write.outputs != (first,) and write.anchor is None
    assert trace.calls[write.index].written == ((first, write.outputs[0]),)
    assert op_named(trace, "aten.sigmoid").inputs == (first,)
    assert op_named(trace, "aten.exp").inputs == write.outputs
    assert trace.program.buffers[write.outputs[0]].nbytes == trace.program.buffers[first].nbytes == 4 * N * N


def test_only_views_are_not_ops() -> None:
    trace = record(lambda linear, x: linear(x).view(N, 2, N // 2).transpose(0, 1)[1].unsqueeze(0))
    assert names(trace) == ["aten.addmm.default"]
    (out,) = trace.output_leaves
    assert out == TensorRef(3, (1, N, N // 2), (N * N, N, 1), N // 2, torch.float32)


def test_tied_parameters_are_one_buffer() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(N, N, bias=False), nn.Linear(N, N, bias=False)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    trace = trace_region(Tied(), (torch.randn(N, N, requires_grad=True),), {})
    assert list(trace.names.values()) == ["first.weight"]
    (weight,) = trace.names
    assert [op.inputs.count(weight) for op in trace.program.ops] == [1, 1]


def test_registered_buffers_and_closure_tensors() -> None:
    outer = torch.randn(N)

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.randn(N))
            self.plain = torch.randn(N)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale * self.plain * outer

    trace = trace_region(Scaled(), (torch.randn(N, N, requires_grad=True),), {})
    sources = [b.source for b in trace.program.buffers if b.nbytes == 4 * N]
    assert sources == [Source.PARAMETER, Source.OUTER, Source.OUTER]
    assert list(trace.names.values()) == ["scale"]


# anchors --------------------------------------------------------------------------------------------------------------


def test_top_k_is_a_discrete_choice() -> None:
    trace = record(lambda linear, x: linear(x).topk(2).values)
    assert op_named(trace, "aten.topk").anchor is Anchor.DISCRETE


@pytest.mark.parametrize(
    ("name", "floats", "values", "expected"),
    [
        ("index_add_", True, True, True),
        ("index_add_", False, True, False),
        ("scatter_add", True, True, True),
        ("cumsum", True, False, True),
        ("cumsum", False, False, False),
        ("put_", True, True, True),
        ("scatter", True, True, True),
        ("scatter_", True, False, False),
        ("index_put_", False, True, True),
        ("index_put_", True, False, False),
        ("gather", True, True, False),
        ("addmm", True, True, False),
    ],
)
def test_ops_that_torch_calls_nondeterministic(name: str, floats: bool, values: bool, expected: bool) -> None:
    def other_bits(device: str, deterministic: bool) -> bool:
        return is_nondeterministic(name, device, floats=floats, values=values, deterministic=deterministic)

    assert other_bits("cuda", False) is expected
    assert not other_bits("cuda", True) and not other_bits("cpu", False)


def test_an_addition_in_any_order_is_kept_on_an_accelerator() -> None:
    x = TensorRef(0, (N, N), (N, 1), 0, torch.float32)
    index = TensorRef(1, (N,), (1,), 0, torch.int64)
    add = torch.ops.aten.index_add.default
    assert anchor_of(add, {}, (x, 0, index, x), "cuda") is Anchor.NONDETERMINISTIC
    assert anchor_of(add, {}, (x, 0, index, x), "cpu") is None
    fill = torch.ops.aten.scatter_.value
    assert anchor_of(fill, {}, (x, 0, index, 1.0), "cuda") is None
    put = torch.ops.aten.index_put_.default
    assert anchor_of(put, {}, (x, [index], x), "cuda") is Anchor.NONDETERMINISTIC


def test_a_private_generator_is_not_replayed() -> None:
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()

    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.empty_like(x).uniform_(generator=generator)

    trace = trace_region(Noisy(), (torch.randn(N, N, requires_grad=True),), {})
    assert op_named(trace, "aten.uniform_").anchor is Anchor.GENERATOR
    assert not trace.draws
    assert torch.equal(generator.get_state(), before)


def test_ops_that_draw_are_chained_through_the_random_state() -> None:
    def body(linear: nn.Linear, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5) * torch.rand_like(x)

    trace = record(body)
    buffers = trace.program.buffers
    first, second = op_named(trace, "aten.bernoulli_"), op_named(trace, "aten.rand_like")
    start = trace.initial_states.get("cpu")
    assert start is not None and trace.draws
    past_first, past_second = (op for op in trace.program.ops if op.name == ADVANCE)
    (middle,), (end,) = past_first.outputs, past_second.outputs
    assert [b.index for b in buffers if b.source is Source.RANDOM] == [start, middle, end]
    assert start in first.inputs and middle in second.inputs
    assert past_first.inputs == (start,) and past_second.inputs == (middle,), "states depend on states alone"
    assert buffers[start].keepable and not buffers[middle].keepable
    assert buffers[start].nbytes == torch.get_rng_state().nbytes
    assert first.anchor is None and second.anchor is None


def test_dropout_of_zero_and_in_evaluation_does_not_draw() -> None:
    assert not record(lambda linear, x: F.dropout(linear(x), 0.5, training=False)).draws
    q = torch.randn(1, 2, N, 4, requires_grad=True)

    class Attention(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, q, q, dropout_p=0.0)

    assert not trace_region(Attention(), (q,), {}).draws


def test_a_write_to_what_is_not_the_regions_own_is_never_run_again() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(N))

        def forward(self, x: Tensor) -> Tensor:
            scaled = x * self.count
            self.count.add_(1.0)
            return scaled * self.count

    module = Counting()
    trace = trace_region(module, (torch.randn(N, N, requires_grad=True),), {})
    write = op_named(trace, "aten.add_")
    before, product = trace.program.ops[0], trace.program.ops[-1]
    assert write.anchor is Anchor.MUTATED
    assert before.anchor is Anchor.MUTATED, "it reads a value that is gone by the time of backward"
    assert product.anchor is None and write.outputs[0] in product.inputs
    assert torch.equal(module.count, torch.zeros(N))


def test_batch_norm_in_training_writes_its_running_statistics() -> None:
    norm = nn.BatchNorm1d(N)
    trace = trace_region(norm, (torch.randn(4, N, requires_grad=True),), {})
    assert {op.name for op in trace.program.ops if op.anchor is Anchor.MUTATED} == {
        "aten.native_batch_norm.default, its running statistics",
        "aten.add_.Tensor",
    }
    norm_itself = next(op for op in trace.program.ops if op.name == "aten.native_batch_norm.default")
    assert norm_itself.anchor is None, "without its statistics it may run again"
    assert {trace.names.get(b) for b in norm_itself.inputs} == {None, "weight", "bias"}


# module boundaries ----------------------------------------------------------------------------------------------------


def by_constants(linear: nn.Linear, x: Tensor) -> Tensor:
    """Reads what Python's own numbers have made: sizes divided as tensors, arguments that are checked."""
    half = int(torch.div(torch.tensor(x.shape[0]), 2, rounding_mode="floor"))
    return linear(x[:half]) * 0.5 if bool(torch.tensor(0.5) > 0) else x


class ByTruths(nn.Module):
    """Decides by what a chain of writes says of an argument, and by what was there before the write."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(N, N)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        marks = torch.zeros_like(ids, dtype=torch.bool)
        before = marks.logical_not()
        marks[0] = ids[0] > 3
        return self.linear(x) * (0.5 if bool(marks.any()) and bool(before.all()) else 2.0)


def test_what_python_knew_anyway_is_not_read() -> None:
    trace = record(by_constants)
    assert trace.reads == ()
    assert not any(op.anchor for op in trace.program.ops)


def test_a_truth_is_decided_by_and_makes_no_number_doubtful() -> None:
    x, ids = torch.randn(N, N, requires_grad=True), torch.arange(2 * N).view(2, N)
    trace = trace_region(ByTruths(), (x, ids), {})
    assert len(trace.reads) == 2
    assert not any(op.anchor is Anchor.OPAQUE for op in trace.program.ops)
    before = ids.clone()
    assert reads_hold(trace, [x, ids])
    assert reads_hold(trace, [x, torch.full_like(ids, 4)])
    assert not reads_hold(trace, [x, ids.clamp(max=3)])
    assert torch.equal(ids, before), "asking writes to nothing"


def test_values_at_module_boundaries_can_be_held() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = Body(lambda linear, x: linear(x) + 1.0)

        def forward(self, x: Tensor) -> Tensor:
            return self.scale(self.scale(x - 1.0)) * 3.0

    trace = trace_region(Nested(), (torch.randn(N, N, requires_grad=True),), {})
    buffers, ops = trace.program.buffers, trace.program.ops
    assert [op.name.split(".")[1] for op in ops] == ["sub", "addmm", "add", "addmm", "add", "mul"]
    found = {tap.ref.buffer: (tap.path, tap.call, tap.is_output) for tap in trace.taps.values()}
    sub, first, mid, second, last, out = (op.outputs[0] for op in ops)
    assert found == {
        sub: ("scale", 0, False),
        first: ("scale.linear", 0, True),
        mid: ("scale", 0, True),
        second: ("scale.linear", 1, True),
        last: ("scale", 1, True),
    }
    assert all(buffers[b].keepable for b in found) and not buffers[out].keepable


class Made(OrderedDict[str, Any]):
    """Makes what it is asked for, as transformers' table of activations does."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key)()


ACTIVATIONS = Made(tanh=nn.Tanh, relu=nn.ReLU)
ACTIVATIONS.move_to_end("tanh")


class Asks(nn.Module):
    """Makes its activation in each forward, and one more entry for it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        ACTIVATIONS["gelu"] = nn.GELU
        y: Tensor = ACTIVATIONS["tanh"](self.linear(x))
        return y.sum()


def test_a_table_that_makes_what_it_is_asked_for_is_left_as_it_was() -> None:
    trace_model(Asks(), (torch.randn(2, 4),))
    assert list(ACTIVATIONS) == ["relu", "tanh"]
    assert [OrderedDict.__getitem__(ACTIVATIONS, key) for key in ("relu", "tanh")] == [nn.ReLU, nn.Tanh]
