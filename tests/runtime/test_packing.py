"""Masks wait as bits and indices in few bytes, to the bit; what could lose anything stays as it is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

import jettison
from jettison.capture.tracer import trace_model
from jettison.core.errors import Infeasible
from jettison.core.units import Bytes
from jettison.dryrun.counter import measured_peak, static_tensors
from jettison.planner import frontier_policies
from jettison.planner.frontier_policies import packing_seconds, with_packs
from jettison.runtime import lossless_packing
from jettison.runtime.lossless_packing import PackedForm, pack_bytes, packs_into, unpack_bytes
from jettison.runtime.recipe import compile_recipe
from jettison.solve.checkpoint_policy import Full, KeepAll, Packing, SelectiveOp
from jettison.solve.frontier import pareto_frontier
from jettison.solve.plan import Plan
from jettison.verify.differences import compare_gradients, independent_copy
from support.stacks import ROWS, WIDTH, Block, rows, stack
from support.training import adamw, assert_same, train

pytestmark = pytest.mark.usefixtures("one_thread")


@given(
    st.lists(st.one_of(st.integers(0, 1), st.integers(0, 255)), max_size=200),
    st.integers(0, 9),
    st.sampled_from([8, 64, 1 << 23]),
)
def test_bits_come_back(drawn: list[int], offset: int, chunk: int) -> None:
    """Bytes that a mask does not see may be any."""
    whole = torch.tensor([0] * offset + drawn, dtype=torch.uint8)
    form = PackedForm(of=torch.bool)
    with chunks_of(chunk):
        packed = pack_bytes(whole[offset:], form)
        assert packed.numel() == -(-len(drawn) // 8)
        assert [bool(byte >> i & 1) for byte in packed.tolist() for i in range(8)][: len(drawn)] == list(
            map(bool, drawn)
        )
        assert torch.equal(unpack_bytes(packed, form, len(drawn)), (whole[offset:] != 0).to(torch.uint8))


@given(
    st.lists(st.booleans(), max_size=200),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    st.sampled_from([None, 0.9, 0.3]),
    st.sampled_from([8, 64, 1 << 23]),
)
def test_what_was_drawn_comes_back(drawn: list[bool], dtype: torch.dtype, divided: float | None, chunk: int) -> None:
    form = PackedForm(of=dtype, divided=divided)
    numbers = torch.tensor(drawn, dtype=torch.bool).to(dtype)
    if divided is not None:
        numbers.div_(divided)
    flat = numbers.view(torch.uint8)
    with chunks_of(chunk):
        small = pack_bytes(flat, form)
        assert small.numel() == -(-len(drawn) // 8)
        assert torch.equal(unpack_bytes(small, form, flat.numel()), flat)


@contextmanager
def chunks_of(numbers: int) -> Iterator[None]:
    usual, lossless_packing.CHUNK = lossless_packing.CHUNK, numbers  # type: ignore[misc]
    try:
        yield
    finally:
        lossless_packing.CHUNK = usual  # type: ignore[misc]


class Dropped(Block):
    def inner(self, h: Tensor) -> Tensor:
        return torch.native_dropout(h, 0.3, True)[0]


class Drawn(Block):
    """As torch's dropout on a CPU: zeros and ones that were drawn as numbers, and divided by what is kept."""

    def inner(self, h: Tensor) -> Tensor:
        return functional.dropout(h, 0.3) * torch.empty_like(h).bernoulli_(0.9)


class Chosen(Block):
    def inner(self, h: Tensor) -> Tensor:
        return torch.where(h > 0.1, h * 2, h.sin())


class Masked(Block):
    """The mask is seen as another shape, and from its second row on."""

    def inner(self, h: Tensor) -> Tensor:
        mask = (h < 0).view(WIDTH, ROWS)[1:]
        return h + h.view(WIDTH, ROWS)[1:].masked_fill(mask, 0.5).sum()


class Pooled(Block):
    def inner(self, h: Tensor) -> Tensor:
        return functional.interpolate(functional.max_pool2d(h[None, None], 2), scale_factor=2)[0, 0]


class Sorted(Block):
    def inner(self, h: Tensor) -> Tensor:
        return h.sort(dim=-1, stable=True)[0] + h.topk(WIDTH, -1)[0].flip(-1) + h.max(0)[0]


@pytest.mark.parametrize("block", [Dropped, Drawn, Chosen, Masked, Pooled, Sorted])
def test_what_is_packed_is_what_was_there(block: type[Block]) -> None:
    model, batches = stack(block), [rows(n) for n in range(3)]
    plain = independent_copy(model)
    with jettison.apply(model, "pack", batch=rows()) as handle:
        got = train(model, batches, optimizer=adamw(model.parameters()))
        first = handle.report()[0]
    assert_same(got, train(plain, batches, optimizer=adamw(plain.parameters())))
    assert first.slots_packed > 0 and first.slots_dropped == 0
    assert {slot.dtype.removeprefix("torch.") for slot in first.slots if slot.action == "pack"} <= {
        "bool",
        "int64",
        *(["float32"] if block is Drawn else []),
    }


def test_the_bytes_are_the_bits() -> None:
    """Masks in the bytes of their bits; pooling a plane of 16 x 32 gives positions below 512: two bytes."""
    for block, elements, whole, packed in (
        (Chosen, ROWS * WIDTH, 1, 1 / 8),
        (Pooled, ROWS * WIDTH // 4, 8, 2),
        (Drawn, 2 * ROWS * WIDTH, 4, 1 / 8),
    ):
        kept = {}
        for word in ("none", "pack"):
            model = stack(block)
            with jettison.apply(model, word, batch=rows()) as handle:
                model(*rows()).backward()
                kept[word] = handle.report()[0].kept_bytes
        assert kept["none"] - kept["pack"] == elements * whole - elements * packed


def test_the_peak_falls_by_them() -> None:
    """Of twelve blocks all but the last one's masks are whole nowhere when backward begins."""
    peaks, x = {}, (torch.randn(64 * ROWS, WIDTH),)
    for word in ("none", "pack"):
        model = stack(Chosen, 12)
        with jettison.apply(model, word, batch=x):
            model(*x).backward()
            model.zero_grad(set_to_none=True)
            found = measured_peak(lambda m=model: m(*x).backward(), static_tensors=static_tensors(model, x))
            peaks[word] = found.peak_bytes
    assert peaks["none"] - peaks["pack"] >= 10 * 64 * ROWS * WIDTH * 7 // 8


@pytest.mark.parametrize("keeps", [KeepAll(), SelectiveOp(), Full()], ids=lambda policy: policy.word)
def test_what_is_computed_again_reads_what_is_packed(keeps: Any) -> None:
    model = stack(Dropped)
    plain = independent_copy(model)
    with jettison.apply(model, Packing(keeps=keeps), batch=rows(), check="exact"):
        for one in (model, plain):
            torch.manual_seed(5)
            one(*rows()).backward()
    assert compare_gradients(model, plain).identical


def test_a_graph_that_is_kept_unpacks_again() -> None:
    model = stack(Chosen)
    plain = independent_copy(model)
    with jettison.apply(model, "pack", batch=rows()):
        for one in (model, plain):
            loss = one(*rows())
            loss.backward(retain_graph=True)
            loss.backward()
    assert compare_gradients(model, plain).identical


class Scribbled(Block):
    """Its mask is written to past the version counters: backward is to see what stands there by then."""

    def inner(self, h: Tensor) -> Tensor:
        mask = h > 0
        out = h.masked_fill(mask, 0.0)
        mask.data.fill_(False)
        return out


class Seen(Block):
    """Bytes of a mask, and an index that could be anything."""

    def inner(self, h: Tensor) -> Tensor:
        places = torch.arange(WIDTH) * 2**40 % WIDTH
        return h * (h > 0).view(torch.uint8) + h.index_select(1, places)


class Scaled(Block):
    """Numbers that are no zeros and ones: multiplied since, or drawn in a part of a tensor alone."""

    def inner(self, h: Tensor) -> Tensor:
        part = torch.full_like(h, 0.3)
        part[1:].bernoulli_(0.5)
        return h * torch.empty_like(h).bernoulli_(0.5).mul_(0.7) * part


@pytest.mark.parametrize("block", [Scribbled, Seen, Scaled])
def test_what_may_lose_something_stays(block: type[Block]) -> None:
    model = stack(block)
    plain = independent_copy(model)
    with jettison.apply(model, "pack", batch=rows()) as handle:
        for one in (model, plain):
            torch.manual_seed(5)
            one(*rows()).backward()
        assert handle.report()[0].slots_packed == 0
    assert compare_gradients(model, plain).identical


def test_widths_follow_from_shapes() -> None:
    class Wide(Block):
        def inner(self, h: Tensor) -> Tensor:
            tall = h.flatten().repeat(90)  # 46,080: more than two bytes count
            return h + tall.sort()[0].sum() + tall.view(-1, 256).topk(2)[0].sum() + tall.view(-1, 512).max(1)[0].sum()

    trace = trace_model(stack(Wide), rows())
    (cls,) = trace.classes.values()
    region = cls.trace
    kinds = {
        packs_into(region, ref.buffer, [ref])
        for ref in region.slots
        if ref.dtype is torch.int64 and region.program.buffers[ref.buffer].producer is not None
    }
    assert kinds == {PackedForm(of=torch.int64, into=kind) for kind in (torch.int32, torch.uint8, torch.int16)}


# in a plan ------------------------------------------------------------------------------------------------------------


class Judged(Block):
    """Its masks depend on what is kept nowhere, and on much work."""

    def inner(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            chosen = (h @ h.T @ h).sin().softmax(-1) > 1 / WIDTH
        return torch.where(chosen, h * 2, h.sin())


def test_a_plan_packs_where_that_costs_less_than_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    x = (torch.randn(512, WIDTH),)
    model = stack(Judged, 4)
    plain = independent_copy(model)
    monkeypatch.setattr("jettison.planner.planner.packing_seconds", lambda _pack, _device: 0.0)
    monkeypatch.setattr("jettison.planner.frontier_policies.LEAST_PACKED", 0.0)
    budgets = jettison.plan.sweep(trace_model(model, x), [Bytes(1), "1GiB"])
    assert isinstance(budgets[0], Infeasible) and isinstance(budgets[1], Plan)
    budget = (budgets[0].minimum_budget_bytes + budgets[1].predicted.peak_bytes) // 2
    static = static_tensors(model, x)
    with jettison.auto_checkpoint(model, x, Bytes(budget)) as handle:
        made = handle.plan
        assert made is not None and any(entry.packed for entry in made.layers)
        assert Plan.from_json(made.to_json()).hash == made.hash
        model(*x).backward()
        model.zero_grad(set_to_none=True)
        found = measured_peak(lambda: model(*x).backward(), static_tensors=static)
        assert found.peak_bytes == made.predicted.peak_bytes <= budget
        model.zero_grad(set_to_none=True)
        assert_same(train(model, [x, x]), train(plain, [x, x]))
    proof = jettison.verify(model, x, plan=made, rounds=1)
    assert proof.passed, proof.failures()
    assert any(entry.policy == "per-tensor" and entry.predicted_bytes == entry.observed_bytes for entry in proof.layers)
    unpacked = replace(made, layers=tuple(replace(entry, packed=()) for entry in made.layers))
    assert unpacked.hash != made.hash
    assert '"packed"' not in json.dumps(unpacked._decisions())  # the hash of plans from before is what it was


def test_packing_costs_what_doing_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    region = next(iter(trace_model(stack(Drawn), (torch.randn(256, WIDTH),)).classes.values())).trace
    saved = region.program.saved_buffers()
    pack = next(iter(compile_recipe(region, saved, packed=saved).packed.values()))
    took = iter([9.0, 3.0, 2.0, 5.0])
    monkeypatch.setattr(frontier_policies, "_PACKING", {})
    monkeypatch.setattr(frontier_policies, "one_run", lambda *_: next(took))
    monkeypatch.setattr(frontier_policies, "SAMPLE_BYTES", pack.move.nbytes // 2)
    assert packing_seconds(pack) == 4.0  # the least of all, for twice as much as was tried
    assert packing_seconds(pack) == 4.0  # and what was found stays


def test_nothing_is_tried_where_ops_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[float]()
    monkeypatch.setattr("jettison.planner.planner.packing_seconds", lambda *_: asked.append(1.0) or 1.0)
    trace = trace_model(stack(Drawn), (torch.randn(512, WIDTH),))
    jettison.plan(trace, "1GiB", measure=False)
    assert not asked
    jettison.plan(trace, "1GiB")
    assert asked


def test_a_mask_is_kept_for_its_bits() -> None:
    """Between keeping nothing and keeping all there is no point that keeps it whole; its bits are worth drawing it."""
    (cls,) = trace_model(stack(Drawn), (torch.randn(256, WIDTH),)).classes.values()
    program = cls.trace.program
    seconds = [1.0 if op.name == "aten.bernoulli_.float" else 1e-6 for op in program.ops]
    ends = pareto_frontier(program, seconds, max_points=2)
    small = [p for p in with_packs(cls.trace, ends, seconds, packing_seconds) if 2 * p.kept_bytes < ends[-1].kept_bytes]
    assert min(point.seconds for point in small) < 0.1
    assert min(point.seconds for point in small if not point.packed) > 1.9
