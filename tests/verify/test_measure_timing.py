"""Interleaved rounds and operator prices: order, ratios, caching, and no trace left on the random stream."""

from __future__ import annotations

import gc
import time

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from jettison.dryrun import op_costs
from jettison.dryrun.counter import AllocationCounter
from jettison.dryrun.kernel_trial import OpRequest, StandInMemory, least_seconds, workspaces
from jettison.dryrun.op_costs import MeasuredWorkspace, measure_ops
from jettison.verify.differences import rng_digest
from jettison.verify.timing import interleaved, timed_seconds

aten = torch.ops.aten


def test_interleaved_visits_every_case_each_round_and_reports_ratios():
    now, seen = [0], []

    def case(name, seconds):
        return lambda: (seen.append(name), now.append(now.pop() + seconds))

    cases = {"short": case("short", 4), "long": case("long", 12)}
    report = interleaved(4, cases, warmup=1, clock=lambda: now[0])
    assert [seen.count(name) for name in cases] == [5, 5]
    assert seen[2:6] == ["short", "long", "long", "short"]
    assert report["short"].ratio == 1.0
    long = report["long"]
    assert long.median_seconds == 12
    assert (long.ratio_low, long.ratio, long.ratio_high) == (3, 3, 3)
    assert gc.isenabled()


def test_interleaved_refuses_nonsense():
    with pytest.raises(ValueError, match="0 rounds"):
        interleaved(0, {"a": lambda: None})
    with pytest.raises(ValueError, match="of 0 cases"):
        interleaved(1, {})


def request(func, *args, **kwargs):
    return OpRequest.of(func, args, kwargs)


def test_prices_are_cached_and_leave_the_random_stream_alone():
    x = torch.randn(64, 64)
    mm = request(aten.mm.default, x, x.t())
    embedding = request(aten.embedding.default, torch.randn(100, 8), torch.randint(0, 100, (4, 4)))
    before = rng_digest()
    prices = measure_ops([mm, embedding, mm])
    assert rng_digest() == before
    assert set(prices) == {mm.key, embedding.key}
    assert all(price.seconds > 0 for price in prices.values())
    assert measure_ops([mm])[mm.key] is prices[mm.key]
    assert mm.key != request(aten.mm.default, x, x).key, "strides are part of the key"


def test_operator_that_fails_has_no_seconds_and_a_bounded_workspace():
    bad = request(aten.mm.default, torch.randn(2, 3), torch.randn(2, 3))
    price = measure_ops([bad])[bad.key]
    assert price.seconds is None
    assert price.workspace_bytes == 2 * (24 + 24)
    assert "RuntimeError" in price.problem


def test_a_deadline_never_leaves_a_workspace_unmeasured():
    x, weight = torch.randn(1, 8, 32, 32, dtype=torch.float64), torch.randn(8, 8, 5, 5, dtype=torch.float64)
    late = request(aten.convolution.default, x, weight, None, [1, 1], [2, 2], [1, 1], False, [0, 0], 1)
    price = measure_ops([late], total_seconds=-1.0)[late.key]
    assert price.workspace_bytes >= 25 * x.nbytes, "the unfolded columns"
    assert price.seconds > 0, "of the one run that there was"
    assert measure_ops([late])[late.key].workspace_bytes == price.workspace_bytes


def test_where_only_workspaces_are_asked_for_large_elementwise_calls_follow_from_small_ones(monkeypatch):
    monkeypatch.setattr(op_costs, "_KNOWN", {})
    ran: list[str] = []

    def noted(requests):
        ran.extend(request.key for request in requests)
        return workspaces(requests)

    monkeypatch.setattr(op_costs, "workspaces", noted)
    few, many, most = (torch.rand(n) for n in (1 << 8, 1 << 16, 1 << 22))
    calls = (
        (aten.exp.default, lambda x: (x,)),
        (aten.mul.Tensor, lambda x: (x, x)),
        (aten.cumsum.default, lambda x: (x, 0)),
    )
    named = {(func, x): request(func, *given(x)) for x in (few, many, most) for func, given in calls}
    mixed = request(aten.mul.Tensor, most, most.double())
    prices = measure_ops([*named.values(), mixed], timed=False)
    left = {named[aten.exp.default, most].key, named[aten.mul.Tensor, most].key}
    assert sorted(ran) == sorted({*prices} - left), "each of the others once"
    assert all(prices[key].workspace_bytes == 0 for key in left)
    assert all(price.rough for price in prices.values())
    timed = measure_ops([named[aten.exp.default, most], mixed])
    assert all(price.seconds > 0 and not price.rough for price in timed.values())
    assert sorted(ran) == sorted({*prices} - {named[aten.mul.Tensor, most].key}), "one that had run is only timed"


def test_one_large_elementwise_call_is_run(monkeypatch):
    monkeypatch.setattr(op_costs, "_KNOWN", {})
    most = request(aten.exp.default, torch.rand(1 << 22))
    assert measure_ops([most], timed=False)[most.key].seconds > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int64])
def test_made_up_arguments_are_handed_on(dtype):
    memory, size = StandInMemory(), 1 << 18
    first = memory.take(dtype, size)
    memory.give_back([first.view(2, -1).t()])
    del first
    assert any(memory._free.values()) is dtype.is_floating_point, "zeros are made sooner than looked for"
    again, other = memory.take(dtype, size), memory.take(dtype, size)
    assert not any(memory._free.values())
    assert again.untyped_storage().nbytes() == other.untyped_storage().nbytes() == size * dtype.itemsize
    if dtype.is_floating_point:
        assert all(bool(((one >= 0.09) & (one <= 1)).all()) for one in (again, other))
        assert not torch.equal(again, other)


def test_what_a_kernel_has_written_to_is_not_handed_on():
    memory, x = StandInMemory(), torch.rand(1 << 18)
    for func in (aten.zero_.default, aten.exp.default):
        least_seconds(request(func, x), 0.0, memory)
    (left,) = memory._free.values()
    assert [bool((one >= 0.09).all()) for one in left] == [True], "that of exp"


def test_kernel_that_ends_its_process_is_priced_in_another_one():
    met: dict[str, OpRequest] = {}

    class Meeting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            met[func._schema.name] = OpRequest.of(func, args, kwargs)
            return func(*args, **(kwargs or {}))

    with FakeTensorMode(), Meeting():
        torch.nn.LSTM(8, 8)(torch.randn(20, 4, 8))[0].sum().backward()
    forward, backward = met["aten::mkldnn_rnn_layer"], met["aten::mkldnn_rnn_layer_backward"]
    sliced = request(torch.ops.aten._embedding_bag.default, torch.randn(4, 8), *torch.zeros(2, 3, dtype=torch.long))
    prices = measure_ops([forward, backward, sliced])
    assert prices[backward.key].seconds is None
    assert "ended" in prices[backward.key].problem
    assert prices[backward.key].workspace_bytes > 0
    assert prices[forward.key].seconds > 0, "those before the crash were priced"
    assert prices[sliced.key].seconds > 0, "and those after it, by another worker"


def test_an_optimizers_numbers_are_no_part_of_a_key():
    x = torch.randn(4)
    a, b = (request(aten.addcdiv_.default, x, x, x, value=value) for value in (-0.1, -0.2))
    assert a.key == b.key
    assert request(aten.pow.Tensor_Scalar, x, 2.0).key != request(aten.pow.Tensor_Scalar, x, 2.5).key


def test_timing_waits_for_every_device_in_use(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: [4096, 0, 4096][device])
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    timed_seconds(lambda: waited.append("case"), time.perf_counter)
    assert waited == [0, 2, "case", 0, 2]


def test_expanded_arguments_cost_one_row():
    wide = torch.zeros(1, 8).expand(1 << 40, 8)
    template = request(aten.sum.default, wide).args[0]
    assert template.storage_elements == 8


def test_workspace_is_what_the_kernel_takes_beyond_its_outputs():
    scores = torch.zeros(2, 4, 64, 64)
    safe = request(aten._safe_softmax.default, scores, -1)  # builds a mask of booleans inside
    add = request(aten.add.Tensor, scores, scores)
    prices = measure_ops([safe, add])
    assert prices[add.key].workspace_bytes == 0
    assert prices[safe.key].workspace_bytes >= scores.numel()
    workspace = MeasuredWorkspace(prices)
    with AllocationCounter([scores], workspace=workspace) as counter:
        aten._safe_softmax.default(scores, -1)
        scores.neg()
    extra_bytes = prices[safe.key].workspace_bytes
    assert counter.peak_bytes == 2 * scores.numel() * 4 + extra_bytes
    assert [unknown.func for unknown in workspace.unknown.values()] == [aten.neg.default]


def test_grouped_matmul_is_priced_over_all_its_rows():
    a, b = torch.randn(64, 32), torch.randn(4, 32, 16)
    grouped = request(aten._grouped_mm.default, a, b, torch.tensor([16, 32, 48, 64], dtype=torch.int32))
    assert measure_ops([grouped])[grouped.key].seconds > 0
