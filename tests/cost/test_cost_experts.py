"""What experts, their rows and a software stack cost: kernels that others timed, and whole numbers of bytes."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from jettison.core.errors import UsageError
from jettison.cost.collective import RankGroup, transfer_seconds
from jettison.cost.execution import execution_of
from jettison.cost.kernel import Gemm, Kernel, kernel_seconds
from jettison.cost.region import PriceModel
from jettison.cost.region_kernels import CLAMPS, WIDE_BIAS, work
from jettison.families.presets import preset
from jettison.formula.region import Region, layer_region
from jettison.request.options import RunRequest
from jettison.request.resolve import resolve
from jettison.spec.hardware import hardware
from jettison.spec.run import Run

FACTS = Path(__file__).parents[1] / "facts"
B200 = hardware("b200-192gb").under("megatron")


def run_of(model: str, **request: object) -> Run:
    return resolve(preset(model), RunRequest(kernels="megatron", **request)).run  # type: ignore[arg-type]


def region_of(run: Run) -> Region:
    return layer_region(run.signature, run.model.layers[-1])


def grouped_errors(*, grouped: bool) -> list[float]:
    """Of SimuMax's products with at most 1232 rows an expert, relative errors of seconds."""
    found = []
    with (FACTS / "simumax_grouped.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            experts, m, n, k = (int(row[name]) for name in ("experts", "rows", "n", "k"))
            if m > 1232:
                continue
            sizes = {"forward": (m, n, k), "input gradient": (m, k, n), "weight gradient": (n, k, m)}[row["pass"]]
            weight = 2 if row["pass"] != "weight gradient" else 8 if row["adds_to_gradient"] == "True" else 4
            kernel = Kernel(
                steps=(0,),
                nbytes=experts * (2 * m * (n + k) + weight * n * k),
                gemm=Gemm(experts, *sizes, "bfloat16", grouped=grouped),
            )
            timed = 2 * experts * m * n * k / (float(row["share_of_peak"]) * 2250e12)
            found.append(kernel_seconds(kernel, B200, visible=1.0, dtype="bfloat16") / timed - 1)
    return found


def test_experts_products_take_their_bytes_on_top_of_their_arithmetic() -> None:
    """NOTE [ Grouped GEMMs ]: 14 % off in the median of 96 products; the larger of both 26 %, and too quick."""
    beside, on_top = grouped_errors(grouped=False), grouped_errors(grouped=True)
    assert len(on_top) == 96
    assert median(map(abs, on_top)) == pytest.approx(0.136, abs=0.005)
    assert median(map(abs, beside)) == pytest.approx(0.265, abs=0.005)
    assert median(beside) < -0.2


@pytest.mark.parametrize(("ranks", "microseconds"), [(2, 32.5), (4, 49.5), (8, 83.5)])
def test_a_collective_of_nothing_takes_its_start_and_its_steps(ranks: int, microseconds: float) -> None:
    """SimuMax's all-gathers on B200: 23.1 + 9.2 a step, reduce-scatters 25.6 + 8.0; both are one figure here."""
    for kind in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        assert transfer_seconds(kind, 1e-9, RankGroup(ranks, ranks), B200) == pytest.approx(microseconds * 1e-6)
    assert transfer_seconds("all_reduce", 1e-9, RankGroup(2, 2), B200) == pytest.approx(41e-6)  # started once


def test_a_token_crosses_the_network_once_to_each_node() -> None:
    """Eight of its rows over two nodes: 255/256 of a token reaches each, in the place of four rows."""
    h100, ranks = hardware("h100-80gb"), RankGroup(16, 8)
    rows = 8 * 10**9
    often = transfer_seconds("all_to_all_single", rows, ranks, h100) - transfer_seconds(
        "all_to_all_single", 1, ranks, h100
    )
    once = transfer_seconds("all_to_all_single", rows, ranks, h100, copies=8) - transfer_seconds(
        "all_to_all_single", 1, ranks, h100, copies=8
    )
    network = h100.network_bytes_per_second * h100.reached.network  # type: ignore[operator]
    assert often == pytest.approx(rows / 2 / network, rel=1e-6)
    assert once == pytest.approx(rows / 8 * 255 / 256 / network, rel=1e-6)


def test_rows_that_a_library_sends_are_not_copied_before() -> None:
    """Of the flex dispatcher: neither the rows of each choice are written before, nor summed after."""
    run = run_of("qwen3-30b-a3b", ep=8, dp=8, seq=4096)
    region = region_of(run)
    plain, flex = (
        work(region, replace(execution_of(run), once_to_node=once), "bfloat16", None) for once in (False, True)
    )
    assert len(plain.forward) - len(flex.forward) == 3  # rows, their weights, and the sum
    moved = sum(k.nbytes for k in plain.forward) - sum(k.nbytes for k in flex.forward)
    row, rows = 2048 * 2, 4096 * 8
    assert moved == (2 * rows * row + rows * 8) + (2 * rows * 4 + rows * 8) + (rows * row + rows * 8 + 4096 * row)


def test_the_bias_of_gpt_oss_passes_through_memory_in_fp32() -> None:
    run = run_of("gpt-oss-20b", ep=8, dp=8, seq=4096, micro_batch=1)
    region = region_of(run)
    looped, fused = (
        work(region, replace(execution_of(run), loops_experts=loops), "bfloat16", None) for loops in (True, False)
    )
    steps = region.tape.steps
    elements = 4096 * 4 * 2880

    def nbytes(kernels: tuple[Kernel, ...], name: str, path: str) -> int:
        chosen = (k for k in kernels if steps[k.steps[0]].name == name and steps[k.steps[0]].path.endswith(path))
        return sum(k.nbytes for k in chosen)

    assert nbytes(looped.forward, "aten.index.Tensor", "down") == 28 * elements
    assert nbytes(looped.backward, "aten.index.Tensor", "down") == 40 * elements
    assert nbytes(looped.forward, "aten.index.Tensor", "gate_up") == 0  # the product's own
    clamped = "gated_activation.clamped"
    more = nbytes(looped.forward, clamped, "") - nbytes(fused.forward, clamped, "")
    assert more == 16 * elements
    more = nbytes(looped.backward, clamped, "") - nbytes(fused.backward, clamped, "")
    assert more == 30 * elements


def bytes_of_ops(function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> tuple[int, int]:
    """Read and written by the kernels of a forward and of its backward, as PyTorch runs them op by op."""

    class Counted(TorchDispatchMode):
        nbytes = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            given, made = ([t for t in tree_leaves(x) if isinstance(t, torch.Tensor)] for x in ((args, kwargs), out))
            stored = {t.untyped_storage().data_ptr() for t in given}
            in_place = func._schema.name.endswith("_")
            if in_place or any(t.untyped_storage().data_ptr() not in stored for t in made):
                self.nbytes += sum(t.nbytes for t in (*given, *made))
            return out

    with Counted() as ahead:
        out = function(*tensors)
    gradient = torch.ones_like(out)
    with Counted() as back:
        out.backward(gradient)
    return ahead.nbytes, back.nbytes


def test_what_pytorch_moves_for_a_bias_in_fp32_and_for_clamped_halves() -> None:
    """The ops of ``TEGroupedMLP._apply_bias`` and ``weighted_bias_quick_geglu_impl`` in Megatron-Core, as they run."""
    rows, width = 512, 2048
    elements = rows * width

    def bias(output: torch.Tensor, first: torch.Tensor, second: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        parts, given = torch.split(output, [rows // 2, rows // 2]), torch.split(weights, [rows // 2, rows // 2])
        added = [part + one * w for part, one, w in zip(parts, (first, second), given, strict=True)]
        return torch.cat(added).view(output.shape).to(output.dtype)

    def clamp(halves: torch.Tensor) -> torch.Tensor:
        gate, up = halves.chunk(2, -1)
        return torch.cat((gate.clamp(min=None, max=7.0), up.clamp(min=-7.0, max=7.0)), -1)

    def leaf(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.ones(sizes, dtype=dtype, requires_grad=True)

    counted = bytes_of_ops(bias, leaf(rows, width), leaf(width), leaf(width), leaf(rows, 1, dtype=torch.float32))
    assert [round(nbytes / elements, 1) for nbytes in counted] == pytest.approx(WIDE_BIAS, abs=0.2)
    counted = bytes_of_ops(clamp, leaf(rows, 2 * width))
    assert [round(nbytes / elements, 3) for nbytes in counted] == list(CLAMPS)


def test_rows_go_back_as_they_came() -> None:
    """TransformerEngine's permute: a gather either way. PyTorch's index adds to zeros."""
    run = run_of("qwen3-30b-a3b", ep=8, dp=8, seq=4096)
    region = region_of(run)
    permuted, indexed = (
        sum(
            k.nbytes
            for k in work(region, replace(execution_of(run), permutes=permutes), "bfloat16", None).backward
            if region.tape.steps[k.steps[0]].name == "aten.index.Tensor"
        )
        for permutes in (True, False)
    )
    row, rows = 2048 * 2, 4096 * 8
    narrow = 4  # of a row's weight
    added = 3 * 4096 * row  # gradients of what router and experts read are summed up
    assert permuted == (rows + 4096) * row + 2 * rows * row + 4 * rows * narrow + added
    assert indexed - permuted == 2 * 2 * rows * (row + narrow)


def test_the_host_bounds_layers_of_experts_unless_a_graph_replays_them() -> None:
    """8.5 ms both ways in fp8, a layer of Qwen3-30B at one short sequence; in bf16 modules take half, not products."""

    def seconds(**more: object) -> float:
        run = run_of("qwen3-30b-a3b", ep=8, dp=8, seq=512, **more)
        prices = PriceModel(
            hardware=hardware("b200-192gb").under("nemo"),
            execution=execution_of(run),
            precision=run.precision,
            layout=run.layout.within_stage,
            visible=0.5,
        )
        found = prices.seconds(region_of(run))
        return found.forward.seconds + found.backward_seconds

    assert seconds(precision="fp8") == pytest.approx(8.5e-3, rel=0.2)
    assert seconds(precision="bf16") == pytest.approx(2.5e-3 + 16 * 6 * 33e-6, rel=0.2)
    assert seconds(fp8_recipe="mxfp8", stack="nemo-26.06") == pytest.approx(3.3e-3, rel=0.2)
    assert seconds(fp8_recipe="tensorwise", stack="nemo-26.06") == pytest.approx(8.5e-3, rel=0.2)  # no such kernels
    assert seconds(precision="fp8", cuda_graphs=True) == pytest.approx(8.2e-3, rel=0.1)  # the host has to know rows
    assert seconds(precision="fp8", cuda_graphs=True, capacity_factor=1.0) < 2e-3
    assert seconds(fp8_recipe="mxfp8", cuda_graphs=True, stack="nemo-26.06") == pytest.approx(3.3e-3, rel=0.1)
    assert seconds(fp8_recipe="mxfp8", cuda_graphs=True, stack="nemo-26.06", dispatcher="flex") < 2e-3


def test_rows_beside_another_micro_batch_cost_a_share_of_their_time() -> None:
    def transfers(**more: object) -> float:
        run = run_of("qwen3-235b-a22b", ep=8, dp=8, seq=4096, precision="fp8", **more)
        prices = PriceModel(
            hardware=hardware("h100-80gb"),
            execution=execution_of(run),
            precision=run.precision,
            layout=run.layout.within_stage,
            visible=0.5,
        )
        found = prices.seconds(region_of(run))
        return found.forward.transfers + found.backward.transfers

    assert transfers(ep_comm_overlap=True) == pytest.approx(0.15 * transfers(), rel=1e-9)


def test_a_stack_changes_what_its_section_states_and_nothing_else() -> None:
    base, nemo = hardware("h100-80gb"), hardware("h100-80gb").under("nemo")
    assert (nemo.reached.matmul_fp8, nemo.reached.matmul) == (0.633, base.reached.matmul)
    assert nemo.attention not in (None, base.attention)
    assert nemo.flops_per_second is base.flops_per_second
    assert base.under("nemo-26.06") == nemo  # a later release takes the stack's
    assert base.under("megatron") is base  # it does not know that one
    assert hardware("b200-192gb").under("megatron").delays.start == 24e-6


@pytest.mark.parametrize("name", ["h100-80gb", "h200-141gb", "h800-80gb", "gh200-96gb", "gh200x4-96gb"])
def test_releases_of_one_time_have_one_attention(name: str) -> None:
    """A release that a file does not state would take the newest one's, which is 1.4 times as fast."""
    device = hardware(name)
    nemo, megatron = (device.under(stack).attention for stack in ("nemo-24.12", "megatron-2024"))
    assert nemo == megatron == hardware("h100-80gb").under("nemo-24.12").attention


def test_a_stack_of_a_file_is_read_with_care(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text('memory = "80GiB"\n[stacks.nemo.reached]\nmatmul = 1.5\n')
    with pytest.raises(UsageError, match=r"section \[stacks.nemo\], section \[reached\]: got matmul = 1.5"):
        hardware(path)
    path.write_text('memory = "80GiB"\n[stacks.nemo]\nfast = true\n')
    with pytest.raises(UsageError, match="got the key 'fast'"):
        hardware(path)


@pytest.mark.parametrize("more", [{}, {"ep_comm_overlap": True}, {"dispatcher": "flex"}], ids=str)
def test_what_an_op_adds_to_a_recompute_is_never_more_than_it_adds(more: dict[str, object]) -> None:
    """What a search's bounds rest on."""
    run = run_of("qwen3-30b-a3b", ep=8, dp=8, seq=4096, precision="fp8", **more)
    prices = PriceModel(
        hardware=hardware("h100-80gb").under("nemo"),
        execution=execution_of(run),
        precision=run.precision,
        layout=run.layout.within_stage,
        visible=0.5,
    )
    region = region_of(run)
    each = prices.op_seconds(region)
    everything = frozenset(range(len(region.tape.steps)))
    assert sum(each) <= prices.seconds(region, everything).again.seconds * (1 + 1e-9)
    assert sum(each) > 0


def test_what_graphs_leave_to_the_host_is_counted_by_experts() -> None:
    """NOTE [ Expert by expert ]: two products forward and four back of each expert, and in MXFP8 a call for each that
    quantises its rows, twice in either direction. Nothing else that takes a kernel is left of a layer whose attention
    and router are replayed."""

    def waiting(layer_experts: int, **more: object) -> tuple[float, float]:
        run = run_of(
            "qwen3-30b-a3b", ep=128 // layer_experts, dp=128 // layer_experts, seq=64, cuda_graphs=True, **more
        )
        device = replace(hardware("b200-192gb").under("nemo"), memory_bytes_per_second=10**18)
        prices = PriceModel(
            hardware=replace(
                device,
                delays=replace(device.delays, expert_gemm=1.0, dispatch=1e-3, experts=0.0, link=0.0, network=0.0),
            ),
            execution=execution_of(run),
            precision=run.precision,
            layout=run.layout.within_stage,
            visible=0.5,
        )
        found = prices.seconds(region_of(run))
        return found.forward.seconds, found.backward_seconds

    for experts in (2, 16):
        forward, backward = waiting(experts, precision="bf16")
        assert forward == pytest.approx(2 * experts, rel=1e-6)
        assert backward == pytest.approx(4 * experts, rel=1e-6)
        forward, backward = waiting(experts, fp8_recipe="mxfp8")
        assert forward == pytest.approx(2 * experts + 2 * (experts - 1) * 1e-3, rel=1e-6)
        assert backward == pytest.approx(4 * experts + 2 * (experts - 1) * 1e-3, rel=1e-6)
        forward, backward = waiting(experts, fp8_recipe="nvfp4")  # one kernel for all rows
        assert (forward, backward) == (pytest.approx(2 * experts, rel=1e-6), pytest.approx(4 * experts, rel=1e-6))
