"""Workspaces of kernels that depend on values which are made up."""

import math
from itertools import accumulate

import pytest
import torch

from jettison.dryrun.counter import AllocationCounter, allocation_deltas
from jettison.dryrun.kernel_trial import KernelRun, OpRequest, workspaces
from jettison.dryrun.op_costs import MeasuredWorkspace, measure_ops


@pytest.mark.parametrize("of_weights", [False, True])
def test_a_grouped_product_is_priced_for_its_least_even_split(one_thread: None, of_weights: bool) -> None:
    """Its workspace on the CPU depends on the largest group, which is not known ahead."""
    rows, inner, outer, groups = 320, 128, 64, 4
    a = torch.randn(rows, inner).bfloat16()
    b = torch.randn(rows, outer).bfloat16() if of_weights else torch.randn(groups, inner, outer).bfloat16()
    first = a.t() if of_weights else a
    even = torch.arange(rows // groups, rows + 1, rows // groups, dtype=torch.int32)
    request = OpRequest.of(torch.ops.aten._grouped_mm.default, (first, b, even))
    price = measure_ops([request])[request.key].workspace_bytes

    def taken(largest: int) -> int:
        left = rows - largest
        ends = torch.tensor([left // 3, left * 2 // 3, left, rows], dtype=torch.int32)
        live = peak = 0
        for delta in allocation_deltas(lambda: torch._grouped_mm(first, b, ends)):
            live += delta
            peak = max(peak, live)
        kept = 2 * (groups * inner * outer if of_weights else rows * outer)
        return peak - kept

    assert max(taken(largest) for largest in range(80, rows + 1, 16)) <= price


@pytest.mark.usefixtures("one_thread")
def test_a_grouped_matmul_is_tried_on_several_splits() -> None:
    """A kernel that packs its largest group, as on some processors, is priced for all rows in one group."""
    rows, inner, outer, groups = 320, 8, 4, 4
    largest: list[int] = []

    def packing(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        sizes = ends.diff(prepend=ends.new_zeros(1))
        largest.append(int(sizes.max()))
        packed = torch.empty(largest[-1] * inner, dtype=torch.float32)
        return packed.new_empty(len(a), b.shape[-1])

    a, b = torch.randn(rows, inner), torch.randn(groups, inner, outer)
    even = torch.arange(rows // groups, rows + 1, rows // groups, dtype=torch.int32)
    request = OpRequest.of(torch.ops.aten._grouped_mm.default, (a, b, even))
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_grouped_mm", packing, "CPU", allow_override=True)
        found = workspaces([request])[request.key]
    assert isinstance(found, KernelRun), found
    assert min(largest) == rows // groups and max(largest) == rows
    assert found.workspace_bytes >= rows * inner * 4


@pytest.mark.usefixtures("one_thread")
def test_gradients_that_a_convolution_was_not_asked_for_are_inside_of_its_call() -> None:
    """The CPU's kernel makes all three; a dry run sees the bias's alone, 64 bytes."""
    image, weight = torch.randn(2, 16, 12, 12), torch.randn(16, 16, 3, 3)
    fixed = (image, image, weight, [16], [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    backward = torch.ops.aten.convolution_backward.default
    some, all_of_them = (OpRequest.of(backward, (*fixed, mask)) for mask in ([False, False, True], [True, True, True]))
    found = workspaces([some, all_of_them])
    one, three = found[some.key], found[all_of_them.key]
    assert isinstance(one, KernelRun) and isinstance(three, KernelRun)
    assert one.workspace_bytes >= three.workspace_bytes + weight.nbytes


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("shape", "before"), [((96,), 0), ((12, 8), 0), ((8,), 1)])
def test_rows_that_a_mask_chose_are_put_by_one_of_as_many_places(shape: tuple[int, ...], before: int) -> None:
    """The backward of ``logits[mask]``: made-up masks without a place would be refused."""
    mask = torch.arange(math.prod(shape)).view(shape) % 3 == 0
    x = torch.zeros(*[12] * before, *shape, 16)
    indices = [None] * before + [mask]
    put = torch.ops.aten.index_put.default
    for values in (torch.ones(int(mask.sum()), 16), torch.ones(())):
        request = OpRequest.of(put, (x, indices, values, True))
        found = workspaces([request])[request.key]
        assert isinstance(found, KernelRun)
        live = list(accumulate(allocation_deltas(lambda values=values: put(x, indices, values, True))))
        places = 1 if values.dim() else 3  # one value goes to all places of a mask, of which a third are true here
        assert max(live) - x.nbytes <= found.workspace_bytes <= places * max(0, max(live) - x.nbytes) + 256


def test_a_number_in_the_place_of_a_tensor_has_a_price_of_its_own(one_thread: None) -> None:
    """It becomes a tensor inside of the call. The smallest budget else depended on what was priced before."""
    div, x = torch.ops.aten.div.Tensor, torch.ones(4, 8)
    by_tensor, by_number = OpRequest.of(div, (x, x)), OpRequest.of(div, (x, 2.0))
    workspace = MeasuredWorkspace(measure_ops([by_tensor]))
    assert workspace(div, (x, x), {}) == 0
    workspace(div, (x, 2.0), {})
    assert list(workspace.unknown) == [by_number.key]
    assert measure_ops([by_number])[by_number.key].workspace_bytes > 0


def test_a_number_inside_of_a_call_is_counted_once(one_thread: None) -> None:
    """A wrapped number is 8 bytes until backward, and a copy of the kernel's type lies next to it in the call."""
    x = torch.ones(16, 32)

    def step() -> None:
        (x.sqrt() / 1.5).add_(1e-8)

    most = max(accumulate(allocation_deltas(step)))
    unpriced = MeasuredWorkspace({})
    with AllocationCounter([x], workspace=unpriced):
        step()
    with AllocationCounter([x], workspace=MeasuredWorkspace(measure_ops(unpriced.unknown.values()))) as counter:
        step()
    assert counter.peak_bytes - x.nbytes == most == 2 * x.nbytes + 8 + 4
