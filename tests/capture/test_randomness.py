"""Random states: what moves them by shape alone, and what recipes, policies and loans make of that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import jettison
from jettison.capture.randomness import ADVANCE, MOVES_BY_SHAPE, movement_of
from jettison.capture.tracer import trace_region
from jettison.ledger.program import Anchor, Program
from jettison.runtime.recipe import compile_recipe
from jettison.solve.checkpoint_policy import Exactly, Full, close
from jettison.solve.frontier import pareto_frontier
from jettison.verify.differences import compare_gradients, independent_copy
from support.toys import Net

aten = torch.ops.aten
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
WHOLE = (torch.int64, torch.int32, torch.uint8)
LAYOUTS = (
    ((0,), (1,)),
    ((1,), (1,)),
    ((3,), (1,)),
    ((15,), (1,)),
    ((16,), (1,)),
    ((17,), (1,)),
    ((1000,), (1,)),
    ((4, 5), (5, 1)),
    ((5, 4), (1, 5)),
    ((50, 40), (1, 50)),
    ((8, 8), (16, 1)),
    ((6, 6), (12, 2)),
    ((2, 3, 4, 5), (60, 1, 15, 3)),
    ((70000,), (1,)),
)
P = (0.0, 0.1, 0.5, 1.0)
RANGES = ((0, 2), (-5, 100), (0, 2**40), (-(2**62), 2**62))

Numbers = tuple[Any, ...]
FILLS: dict[Any, tuple[Numbers, ...]] = {
    aten.bernoulli.p: tuple((p,) for p in P),
    aten.bernoulli_.float: tuple((p,) for p in P),
    aten.native_dropout.default: tuple((p, train) for p in P for train in (True, None)),
    **dict.fromkeys((aten.uniform.default, aten.uniform_.default), ((), (-3.0, 5.0))),
    **dict.fromkeys((aten.normal_.default, aten.normal_functional.default), ((), (2.0, 0.1), (2.0, 0.0))),
    **dict.fromkeys((aten.exponential.default, aten.exponential_.default), ((), (7.0,))),
    **dict.fromkeys((aten.cauchy.default, aten.cauchy_.default), ((), (1.0, 0.3))),
    **dict.fromkeys((aten.log_normal.default, aten.log_normal_.default), ((), (1.0, 0.3))),
    **dict.fromkeys((aten.geometric.default, aten.geometric_.default), ((0.3,), (0.9,))),
    **dict.fromkeys((aten.rand_like.default, aten.randn_like.default), ((),)),
}
"""Ops with one tensor, and the numbers that follow it: none of them may matter."""
INTEGERS: dict[Any, tuple[Numbers, ...]] = {
    **dict.fromkeys((aten.random.default, aten.random_.default), ((),)),
    **dict.fromkeys((aten.random.to, aten.random_.to), ((2,), (100,))),
    **dict.fromkeys((getattr(aten.random, "from"), getattr(aten.random_, "from")), RANGES),
    aten.randint_like.default: ((2,), (100,)),
    aten.randint_like.low_dtype: RANGES,
    aten.bernoulli_.float: ((0.5,),),
}
"""The same, for whole numbers; the range may matter."""
SIZED: dict[Any, tuple[Numbers, ...]] = {
    aten.rand.default: (([3, 5],), ([17],)),
    aten.randn.default: (([3, 5],), ([17],)),
    aten.normal.float_float: ((0.0, 1.0, [40]),),
    aten.randint.default: ((10, [7]),),
    aten.randint.low: ((2**33, 2**60, [7]),),
    aten.randperm.default: ((0,), (19,), (20,), (1000,)),
}
TWO = (aten.bernoulli.Tensor, aten.bernoulli_.Tensor, aten.normal.Tensor_Tensor)
ONE = (aten.bernoulli.default, aten.normal.Tensor_float)
ONLY_ON_CUDA = {
    "_fused_dropout",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
}


def values(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Probabilities, in this layout; whole numbers are 0."""
    span = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if 0 not in size else 0
    flat = torch.rand(span, generator=torch.Generator().manual_seed(5)).to(dtype)
    return flat.as_strided(size, stride)


def states(func: Any, args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """After the op itself, and after its movement, from one state with a number and a half in store."""
    torch.manual_seed(3)
    torch.randn(3)
    before = torch.get_rng_state()
    out = func(*args)
    after = torch.get_rng_state()
    move = movement_of(func, args, {}, out, "cpu", numbers_known=True)
    assert move is not None, func
    torch.set_rng_state(before)
    move.func(*move.args, **dict(move.kwargs))
    return after, torch.get_rng_state()


def check(func: Any, rows: tuple[Numbers, ...], made: Callable[[], Tensor], *, numbers_matter: bool = False) -> None:
    ends = []
    for numbers in rows:
        after, moved = states(func, (made(), *numbers))
        assert torch.equal(after, moved), (func, numbers, made().shape, made().stride(), made().dtype)
        ends.append(after)
    assert numbers_matter or all(torch.equal(end, ends[0]) for end in ends), func


@pytest.mark.parametrize("func", FILLS, ids=str)
def test_the_state_moves_by_shape_stride_and_dtype(func: Any) -> None:
    for size, stride in LAYOUTS:
        for dtype in FLOATS:
            check(func, FILLS[func], lambda size=size, stride=stride, dtype=dtype: values(size, stride, dtype))


@pytest.mark.parametrize("func", INTEGERS, ids=str)
def test_the_state_moves_by_shape_and_range(func: Any) -> None:
    for size, stride in LAYOUTS:
        for dtype in WHOLE:
            limit = torch.iinfo(dtype)
            rows = tuple(n for n in INTEGERS[func] if all(limit.min <= v <= limit.max for v in n))
            made = lambda size=size, stride=stride, dtype=dtype: values(size, stride, dtype)  # noqa: E731
            check(func, rows, made, numbers_matter=True)


@pytest.mark.parametrize("func", SIZED, ids=str)
def test_the_state_moves_by_size(func: Any) -> None:
    for args in SIZED[func]:
        after, moved = states(func, args)
        assert torch.equal(after, moved), args


@pytest.mark.parametrize("func", [*ONE, *TWO], ids=str)
def test_probabilities_in_tensors_do_not_move_the_state(func: Any) -> None:
    for size, stride in LAYOUTS:
        for dtype in FLOATS:
            args = tuple(values(size, stride, dtype) for _ in range(2 if func in TWO else 1))
            after, moved = states(func, args)
            assert torch.equal(after, moved), (size, stride, dtype)


def test_every_op_of_the_list_that_a_cpu_has_is_tested() -> None:
    tested = {func._schema.name.split("::")[1] for func in (*FILLS, *INTEGERS, *SIZED, *ONE, *TWO)}
    assert tested | ONLY_ON_CUDA == MOVES_BY_SHAPE


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten.rrelu_with_noise.default, (torch.linspace(-1, 1, 8), torch.zeros(8), 0.1, 0.3, True)),
        (aten.poisson.default, (torch.linspace(1, 40, 8),)),
        (aten.binomial.default, (torch.full((8,), 30.0), torch.linspace(0.1, 0.9, 8))),
        (aten._standard_gamma.default, (torch.linspace(0.1, 4, 8),)),
        (aten.multinomial.default, (torch.linspace(0.1, 1, 8), 2)),
        (aten.randint_like.Tensor, (torch.zeros(8, dtype=torch.int64), torch.tensor(2**40))),
    ],
    ids=["rrelu", "poisson", "binomial", "gamma", "multinomial", "randint_like"],
)
def test_what_draws_by_value_is_not_moved_without_values(func: Any, args: Any) -> None:
    assert movement_of(func, args, {}, func(*args), "cpu", numbers_known=True) is None


# recordings -----------------------------------------------------------------------------------------------------------

N, ROWS = 16, 8


class Block(nn.Module):
    """What ``body`` says, around two products."""

    def __init__(self, body: Callable[[Block, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(N, N), nn.Linear(N, N)
        self.register_buffer("noise", torch.zeros(ROWS, N))
        self.body = body

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return x + self.second(F.gelu(self.body(self, self.first(x), ids)))


def noisy(block: Block, h: Tensor, ids: Tensor) -> Tensor:
    block.noise.normal_()
    return F.dropout(h, 0.3) + block.noise


def by_value_in_a_buffer(block: Block, h: Tensor, ids: Tensor) -> Tensor:
    leaky = aten.rrelu_with_noise(h.detach(), block.noise, 0.1, 0.3, True)
    return F.dropout(h, 0.3) * leaky


def by_value(block: Block, h: Tensor, ids: Tensor) -> Tensor:
    rates = torch.poisson(h.detach().abs() * 10)
    return F.dropout(h.tanh() * rates, 0.3) * torch.rand_like(h)


def by_hand(block: Block, h: Tensor, ids: Tensor) -> Tensor:
    return F.dropout(h, 0.3) * torch.rand(h.shape, generator=torch.default_generator)


def with_a_number_of_the_batch(block: Block, h: Tensor, ids: Tensor) -> Tensor:
    return F.dropout(h, 1 / ids.sum().item()) * torch.bernoulli(torch.sigmoid(h.detach())).tanh()


def many(block: Block, h: Tensor, ids: Tensor) -> Tensor:
    for _ in range(3):
        h = torch.native_dropout(h.tanh(), 0.2, True)[0] * torch.rand_like(h) + torch.randn(N)
    return F.dropout(h, 0.3) * torch.empty_like(h).uniform_(0.5, 1)


BODIES = (noisy, by_value_in_a_buffer, by_value, by_hand, with_a_number_of_the_batch, many)


def batch() -> tuple[Tensor, Tensor]:
    return torch.linspace(-1, 1, ROWS * N).view(ROWS, N), torch.tensor([1, 2])


def assert_same_steps(model: nn.Module, plain: nn.Module) -> None:
    for seed in range(3):
        ends = []
        for each in (plain, model):
            torch.manual_seed(seed)
            each.zero_grad()
            each(*batch()).backward()
            ends.append(torch.get_rng_state())
        report = compare_gradients(model, plain)
        assert report.identical, (seed, report.differences[:3])
        assert torch.equal(*ends), "the random stream stands elsewhere"


@pytest.mark.parametrize("policy", ["full", "selective-op", "every:2"])
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_masks_are_the_forwards_whatever_drew_before(body: Any, policy: str) -> None:
    torch.manual_seed(0)
    model = Net(Block(body) for _ in range(4))
    plain = independent_copy(model)
    with jettison.apply(model, policy, batch=batch()):
        assert_same_steps(model, plain)
    for (name, ours), (_, theirs) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
        assert torch.equal(ours, theirs), name


def traced(body: Any) -> Any:
    x, ids = batch()
    return trace_region(Block(body), (x.requires_grad_(), ids), {})


def test_a_draw_into_a_buffer_moves_the_stream() -> None:
    program = traced(noisy).program
    fill, mask = (next(op for op in program.ops if name in op.name) for name in ("normal_", "bernoulli_"))
    moves = [op for op in program.ops if op.name == ADVANCE]
    assert fill.anchor is Anchor.MUTATED and mask.anchor is None
    assert len(moves) == 2 and moves[0].outputs[0] in mask.inputs


def test_after_a_draw_by_value_that_cannot_run_again_nothing_is_drawn_again() -> None:
    program = traced(by_value_in_a_buffer).program
    assert next(op for op in program.ops if "bernoulli_" in op.name).anchor is Anchor.OPAQUE
    assert not any(op.name == ADVANCE for op in program.ops)


def test_a_probability_out_of_the_batch_moves_the_stream() -> None:
    program = traced(with_a_number_of_the_batch).program
    anchors = {op.name: op.anchor for op in program.ops if "bernoulli" in op.name}
    assert anchors == {"aten.bernoulli_.float": Anchor.OPAQUE, "aten.bernoulli.default": None}
    assert sum(op.name == ADVANCE for op in program.ops) == 2


def test_a_range_out_of_the_batch_ends_the_stream() -> None:
    """Above 2^32 it would take two words for a number."""

    def body(block: Block, h: Tensor, ids: Tensor) -> Tensor:
        return h * torch.empty_like(h).random_(0, ids.sum().item()) * torch.rand_like(h)

    ops = {op.name: op.anchor for op in traced(body).program.ops}
    assert ops["aten.random_.from"] is ops["aten.rand_like.default"] is Anchor.OPAQUE and ADVANCE not in ops


# recipes --------------------------------------------------------------------------------------------------------------


def choices(program: Program) -> Iterator[frozenset[int]]:
    """Many ways to keep something: each point of the hull, and each saved buffer alone."""
    for point in pareto_frontier(program, [1e-6] * len(program.ops)):
        yield point.kept
    full = Full().kept(program)
    for b in sorted(program.saved_buffers()):
        yield close(program, full | {b})


@pytest.mark.parametrize("body", [noisy, by_value, many], ids=lambda body: body.__name__)
def test_every_choice_gives_the_same_gradients_twice(body: Any) -> None:
    """A backward over a retained graph counts from the start; afterwards no state is left behind."""
    torch.manual_seed(0)
    model = Net(Block(body) for _ in range(4))
    plain = independent_copy(model)
    program = traced(body).program
    for kept in {frozenset(choice) for choice in choices(program)}:
        chosen = Exactly(digest=program.digest(), buffers=kept, otherwise=Full())
        with jettison.apply(model, dict.fromkeys((f"layers.{i}" for i in range(4)), chosen), batch=batch()):
            for each in (plain, model):
                torch.manual_seed(1)
                each.zero_grad()
                loss = each(*batch())
                loss.backward(retain_graph=True)
                loss.backward()
            assert compare_gradients(model, plain).identical, sorted(kept)


def again(trace: Any, kept: frozenset[int]) -> list[str]:
    return [trace.program.ops[i].name for i in compile_recipe(trace, kept).recomputed_ops]


def test_what_runs_again_anyway_spares_the_movement() -> None:
    """Each dropout's input depends on the dropout before it, which has left its state by then."""

    def body(block: Block, h: Tensor, ids: Tensor) -> Tensor:
        for _ in range(3):
            h = torch.native_dropout(h.tanh(), 0.2, True)[0]
        return h

    trace = traced(body)
    full = Full().kept(trace.program)
    needed = [trace.program.ops[i].name for i in trace.program.recompute_set(full)]
    assert needed.count(ADVANCE) == 2
    assert again(trace, full) == [name for name in needed if name != ADVANCE]


def test_one_draw_needs_no_op_before_it() -> None:
    def body(block: Block, h: Tensor, ids: Tensor) -> Tensor:
        return F.dropout(torch.native_dropout(h, 0.2, True)[0], 0.3) * torch.rand(ROWS, N)

    trace = traced(body)
    program = trace.program
    (drawn,) = next(op for op in program.ops if op.name == "aten.rand.default").outputs
    kept = close(program, program.saved_buffers() - {drawn} | Full().kept(program))
    assert again(trace, kept) == [ADVANCE, ADVANCE, "aten.rand.default"]
    moved = [program.ops[i].bytes_moved for i in compile_recipe(trace, kept).recomputed_ops]
    assert moved == [ROWS * N, 4 * ROWS * N, 4 * ROWS * N], "a mask of bytes; then four bytes an element"


class DrawsFromItsOwn(nn.Module):
    """Takes noise from a generator of its own; what it does next depends on how many values are above zero."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand(x.shape, generator=self.generator)
        return x + self.linear(self.norm(x) * noise) * len((x > 0).nonzero()) / x.numel()


@pytest.mark.filterwarnings("ignore:.*cannot be recorded", "ignore:.*cannot be planned")
def test_a_block_that_is_observed_leaves_its_own_generator_where_it_was() -> None:
    model = nn.Sequential(DrawsFromItsOwn(), DrawsFromItsOwn(), DrawsFromItsOwn())
    before = [block.generator.get_state() for block in model]
    with jettison.apply(model, "full", batch=(torch.randn(4, 8),), loss_fn=Tensor.sum):
        assert all(torch.equal(b.generator.get_state(), was) for b, was in zip(model, before, strict=True))
