"""Plans that also send tensors to the host: chosen with what is kept and computed again, within a budget of both.

The recorder stands in for an accelerator: it copies, holds every access against vector clocks, and raises at a race.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import jettison
from jettison.capture.tracer import trace_model
from jettison.core.errors import HostBudgetExceeded, Infeasible, UsageError
from jettison.core.units import Bytes
from jettison.dryrun.counter import measured_peak, static_tensors
from jettison.planner import cpu_offload
from jettison.planner.cpu_offload import Host, host_of, is_timed, movable
from jettison.planner.planner import _times, make_planner
from jettison.runtime.device import power_of_two, whole_pages
from jettison.solve.plan import Plan, PolicyName
from jettison.spec.hardware import Hardware, usual_hardware
from jettison.spec.kernels import Device
from jettison.verify.differences import independent_copy
from support.offloading import Line, seeded
from support.prices import every_op_takes
from support.toys import Mlp, Words
from support.training import adamw, assert_same, train
from support.transfers import Direction, transfers_of

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCKS, ROWS, WIDTH = 8, 256, 64
TENSOR, WIDE = ROWS * WIDTH * 4, ROWS * 4 * WIDTH * 4
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def moves_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Python's time: blocks are small here."""
    monkeypatch.setattr(cpu_offload, "MOVE_SECONDS", 0.0)


@pytest.fixture(autouse=True)
def an_op_takes_a_millisecond(monkeypatch: pytest.MonkeyPatch) -> None:
    every_op_takes(1e-3, monkeypatch)


def linked(bytes_per_second: float = 1e12) -> Hardware:
    """This machine, with a way to a host."""
    return replace(usual_hardware(Device.CPU), host_bytes_per_second=int(bytes_per_second), host_memory_bytes=None)


def line() -> Line:
    torch.manual_seed(0)
    return Line([Mlp(WIDTH, 4 * WIDTH) for _ in range(BLOCKS)], WIDTH)


def smallest(model: nn.Module, x: Any, **more: Any) -> int:
    with pytest.raises(Infeasible) as refused:
        jettison.auto_checkpoint(model, x, Bytes(1), **more)
    return refused.value.minimum_budget_bytes


def peak_of(model: nn.Module, x: Tensor) -> int:
    model.zero_grad(set_to_none=True)
    model(x).backward()
    model.zero_grad(set_to_none=True)
    return measured_peak(lambda: model(x).backward(), static_tensors=static_tensors(model, x)).peak_bytes


def middle(model: nn.Module, x: Tensor) -> int:
    """A budget half of the way from the smallest to plain autograd's peak."""
    least = smallest(model, x)
    return (least + peak_of(independent_copy(model), x)) // 2


@pytest.mark.filterwarnings("ignore:a AdamW steps with")  # the budget is of the step without one
def test_what_a_fast_link_hides_is_sent_and_nothing_is_computed_again() -> None:
    model, x = line(), seeded(ROWS, WIDTH)
    plain, budget = independent_copy(model), middle(line(), x)
    with jettison.auto_checkpoint(model, x, Bytes(budget), offload=True, hardware=linked()) as handle:
        assert handle.plan is not None and handle.offload is not None
        made = handle.plan
        batches = [seeded(ROWS, WIDTH, seed=n) for n in range(3)]
        got = train(model, batches, optimizer=adamw(model.parameters()))
        assert_same(got, train(plain, batches, optimizer=adamw(plain.parameters())))
        transfers_of(handle.offload).clear()
        assert peak_of(model, x) == made.predicted.peak_bytes <= budget
        assert handle.offload.pool.peak_bytes == made.predicted.host_bytes
    words = [entry.policy for entry in made.layers]
    assert set(words) <= {PolicyName.OFFLOAD, PolicyName.NONE} and PolicyName.OFFLOAD in words
    assert words[-1] is PolicyName.NONE and not made.layers[-1].offloaded  # backward begins there
    assert made.predicted.added_seconds < 1e-3
    sent = sum(entry.offloaded_bytes for entry in made.layers)
    assert made.predicted.host_bytes == sent == 0 or made.predicted.host_bytes == sent
    both = [t for t in transfers_of(handle.offload) if t.direction is Direction.OUT]
    assert sum(t.nbytes for t in both) == 2 * sent  # two steps


def test_a_slow_link_is_left_alone() -> None:
    model, x = line(), seeded(ROWS, WIDTH)
    with jettison.auto_checkpoint(model, x, Bytes(middle(line(), x)), offload=True, hardware=linked(1.3e6)) as handle:
        assert handle.plan is not None and handle.offload is None
        assert {entry.policy for entry in handle.plan.layers} <= {
            PolicyName.PER_TENSOR,
            PolicyName.FULL,
            PolicyName.NONE,
        }


def test_a_plan_that_fits_without_it_moves_nothing() -> None:
    model, x = line(), seeded(ROWS, WIDTH)
    budget = 2 * peak_of(independent_copy(model), x)
    with jettison.auto_checkpoint(model, x, Bytes(budget), offload=True, hardware=linked()) as handle:
        assert handle.plan is not None and handle.offload is None
        assert {entry.policy for entry in handle.plan.layers} == {PolicyName.NONE}


class Gemm(nn.Module):
    """Saves its input alone."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def test_what_computing_again_cannot_free_the_host_can() -> None:
    """A product saves its input, which is the output of the block before."""
    torch.manual_seed(0)
    model, x = Line([Gemm(WIDTH) for _ in range(12)], WIDTH), seeded(ROWS, WIDTH)
    regions = [f"layers.{i}" for i in range(12)]
    traced = trace_model(model, x, regions=regions)
    least = {}
    for offload in (False, True):
        with pytest.raises(Infeasible) as refused:
            jettison.plan(traced, Bytes(1), offload=offload, hardware=linked())
        least[offload] = refused.value.minimum_budget_bytes
    assert least[True] <= least[False] - 3 * TENSOR  # runs of blocks that hold one input are the best without a host
    plain = independent_copy(model)
    handle = jettison.auto_checkpoint(model, x, Bytes(least[True]), offload=True, hardware=linked(), regions=regions)
    with handle:
        assert peak_of(model, x) <= least[True]
        batches = [x, seeded(ROWS, WIDTH, seed=3)]
        assert_same(train(model, batches), train(plain, batches))


class Collected(Line):
    """What each block makes is held by the sum at the end too: sent away, it is still there, and comes back beside."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__(blocks, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x, total = self.embed(x), torch.zeros(())
        for layer in self.layers:
            x = layer(x)
            total = total + (x * self.scale).sum()
        return total


def test_a_host_makes_no_budget_infeasible() -> None:
    torch.manual_seed(0)
    model, x = Collected([Gemm(WIDTH) for _ in range(6)]), seeded(ROWS, WIDTH)
    regions = [f"layers.{i}" for i in range(6)]
    least = smallest(model, x, regions=regions)
    assert smallest(model, x, regions=regions, offload=True, hardware=linked()) <= least
    assert smallest(model, x, regions=regions, step=two_of) >= smallest(
        model, x, regions=regions, step=two_of, offload=True, hardware=linked()
    )


def two_of(model: Any, x: Tensor) -> None:
    (model(x) + model(2 * x)).backward()


def test_what_a_move_costs_python_is_in_its_price(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_offload, "MOVE_SECONDS", 1.0)
    model, x = line(), seeded(ROWS, WIDTH)
    with jettison.auto_checkpoint(model, x, Bytes(middle(line(), x)), offload=True, hardware=linked()) as handle:
        assert handle.offload is None


def test_what_copies_hide_behind() -> None:
    """A pass of the next block; of several forwards in flight the host has all bytes."""
    traced = trace_model(line(), seeded(ROWS, WIDTH))
    planner = make_planner(traced, host=host_of(True, None, linked(), CPU))
    for region in planner.options.problem.regions:
        assert region.backward_seconds == 2 * region.forward_seconds > 0
    assert {region.copies for region in _times(planner.options.problem, 3).regions} == {3}


# the host's memory ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tensors", [1, 4, 9])
def test_the_host_budget_is_held(tensors: int) -> None:
    model, x = line(), seeded(ROWS, WIDTH)
    plain, budget, room = independent_copy(model), middle(line(), x), tensors * WIDE
    with jettison.auto_checkpoint(
        model, x, Bytes(budget), offload=True, host_budget=Bytes(room), hardware=linked()
    ) as handle:
        assert handle.plan is not None and handle.plan.predicted.host_bytes <= room
        assert peak_of(model, x) <= budget
        assert_same(train(model, [x]), train(plain, [x]))
        assert handle.offload is not None
        assert 0 < handle.offload.pool.real_bytes <= room
        assert handle.offload.pool.live_bytes == 0


def test_pinning_that_rounds_up_is_what_counts() -> None:
    assert [whole_pages(n) for n in (0, 1, 4096, 4097)] == [0, 4096, 4096, 8192]
    assert [power_of_two(n) for n in (0, 1, 4096, 4097)] == [0, 1, 4096, 8192]
    host = Host(bytes_per_second=1.0, budget_bytes=3 * 2**20, device=torch.device("cuda"))
    assert host.usable_bytes == 3 * 2**20  # a slab of two, and one of one
    assert replace(host, budget_bytes=48 * 2**30 + 4096).usable_bytes == 48 * 2**30
    assert replace(host, device=CPU).usable_bytes == 3 * 2**20
    assert replace(host, device=CPU, budget_bytes=5000).usable_bytes == 4096
    assert replace(host, budget_bytes=None).usable_bytes is None
    assert host.holds(3 * 2**20) and not host.holds(3 * 2**20 + 1)


def test_a_plan_can_be_kept_and_applied_again() -> None:
    model, x = line(), seeded(ROWS, WIDTH)
    plain, budget = independent_copy(model), middle(line(), x)
    traced = trace_model(model, x)
    made = jettison.plan(traced, Bytes(budget), offload=True, hardware=linked())
    assert any(entry.offloaded for entry in made.layers)
    read = Plan.from_json(made.to_json())
    assert read == made and read.hash == made.hash
    with pytest.raises(HostBudgetExceeded):
        jettison.apply(model, plan=read, batch=x, host_budget=Bytes(WIDE))
    with jettison.apply(model, plan=read, batch=x) as handle:
        assert handle.offload is not None
        assert peak_of(model, x) == made.predicted.peak_bytes
        assert_same(train(model, [x]), train(plain, [x]))


# steps of one's own, other batches ------------------------------------------------------------------------------------


def words() -> Words:
    torch.manual_seed(0)
    return Words(40, WIDTH, BLOCKS, rate=0.1)


def two_forwards(model: Any, ids: Tensor) -> None:
    (model(ids[: len(ids) // 2]).square().mean() + model(ids[len(ids) // 2 :]).exp().mean()).backward()


def test_two_forwards_in_flight_share_the_host() -> None:
    model, ids = words(), torch.randint(0, 40, (8, 32))
    plain = independent_copy(model)
    least = smallest(words(), ids, step=two_forwards)
    room = 8 * TENSOR
    handle = jettison.auto_checkpoint(
        model, ids, Bytes(int(1.1 * least)), step=two_forwards, offload=True, host_budget=Bytes(room), hardware=linked()
    )
    with handle:
        assert handle.plan is not None and handle.offload is not None
        for one in (model, plain):
            torch.manual_seed(3)
            two_forwards(one, ids)
        for (name, a), (_, b) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
            assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad), name
        model.zero_grad(set_to_none=True)
        found = measured_peak(lambda: two_forwards(model, ids), static_tensors=static_tensors(model, ids))
        assert found.peak_bytes <= handle.plan.predicted.peak_bytes <= int(1.1 * least)
        assert handle.offload.pool.real_bytes <= room


def test_a_larger_batch_that_comes_gets_a_slab_of_its_own() -> None:
    model, x = line(), seeded(ROWS, WIDTH)
    plain, large = independent_copy(model), seeded(2 * ROWS, WIDTH, seed=5)
    budget = middle(line(), large)
    with jettison.auto_checkpoint(model, x, Bytes(budget), offload=True, hardware=linked()) as handle:
        before = handle.offload.pool.real_bytes if handle.offload is not None else 0
        batches = [x, large, x, large]
        assert_same(train(model, batches), train(plain, batches))
        assert handle.offload is not None and handle.offload.pool.real_bytes > before
        assert len(handle.offload.pool._rooms) == 1
        assert peak_of(model, large) <= budget
    assert {shape.planned_for for shape in handle.shapes()} == {shape.shape for shape in handle.shapes()}


# what does not move, and who is told no -------------------------------------------------------------------------------


class Twice(nn.Module):
    """Its first block is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp(WIDTH, 4 * WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in (self.layers[0], *self.layers):
            x = block(x)
        return x.square().mean()


def test_blocks_that_are_called_twice_and_the_last_one_send_nothing() -> None:
    torch.manual_seed(0)
    traced = trace_model(Twice(), seeded(ROWS, WIDTH), regions=[f"layers.{i}" for i in range(3)])
    assert frozenset().union(*(movable(traced, key) for key in traced.classes)) == {"layers.1"}
    host = host_of(True, None, linked(), CPU)
    problem = make_planner(traced, host=host).options.problem
    sends = [any(option.offloaded_bytes for option in region.options) for region in problem.regions]
    assert sends == [False, False, True, False]


def test_what_is_least_hangs_on_no_seconds() -> None:
    assert [is_timed(key) for key in ("none", "none-send-all", "keep-12-send-4", "lean-3")] == [
        False,
        False,
        True,
        False,
    ]


def test_who_is_told_no(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = line(), seeded(ROWS, WIDTH)
    with pytest.raises(UsageError, match="nothing goes to the host; give offload=True as well"):
        jettison.auto_checkpoint(model, x, "1GiB", host_budget="1MiB")
    with pytest.raises(UsageError, match="whose link to CPU memory is unknown; give hardware="):
        jettison.auto_checkpoint(model, x, "1GiB", offload=True)
    with pytest.raises(UsageError, match="hardware cpu-23gb does not state its link to the host"):
        jettison.auto_checkpoint(model, x, "1GiB", offload=True, hardware="cpu-23gb")
    with pytest.raises(UsageError, match="the closest are"):
        jettison.auto_checkpoint(model, x, "1GiB", offload=True, hardware="h1000-80gb")
    monkeypatch.setattr(cpu_offload, "free_host_bytes", lambda: 2**20)
    with pytest.raises(UsageError, match=r"got host_budget='2MiB'; this machine has 1\.00 MiB for it"):
        jettison.auto_checkpoint(model, x, "1GiB", offload=True, host_budget="2MiB", hardware=linked())
    stated = replace(linked(), host_memory_bytes=2**21)
    assert host_of(True, "2MiB", stated, CPU, elsewhere=True) is not None
    with pytest.raises(UsageError, match=r"the host of cpu-23gb has 2\.00 MiB for it"):
        host_of(True, "3MiB", stated, CPU, elsewhere=True)
