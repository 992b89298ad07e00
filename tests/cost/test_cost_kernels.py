"""What a region launches, and what that takes on given hardware."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jettison.core.errors import UsageError
from jettison.cost.collective import RankGroup, group, transfer_seconds
from jettison.cost.execution import Execution, Fusion, execution_of
from jettison.cost.kernel import Gemm, Half, Kernel, gemm_seconds, kernel_seconds, memory_seconds, rate
from jettison.cost.region import PriceModel, RegionSeconds
from jettison.cost.region_kernels import aligned, groups, work
from jettison.families.presets import preset
from jettison.formula.region import Region, head_region, layer_region
from jettison.request.options import RunRequest
from jettison.request.resolve import resolve
from jettison.spec.hardware import Edges, EdgesOf, Hardware, Throughput, hardware
from jettison.spec.layout import Layout
from jettison.spec.run import Run

A100 = hardware("a100-80gb")
BARE = Hardware(name="bare", memory_bytes=1, usable_bytes=1)


def run_of(model: str = "gpt-22b", **request: object) -> Run:
    return resolve(preset(model), RunRequest(**request)).run  # type: ignore[arg-type]


def region_of(model: str = "gpt-22b", **request: object) -> Region:
    run = run_of(model, **request)
    return layer_region(run.signature, run.model.layers[0])


# fusion ---------------------------------------------------------------------------------------------------------------


def names(region: Region, fusion: Fusion) -> list[list[str]]:
    words = [step.name.split(".")[1] if "." in step.name else step.name for step in region.tape.steps]
    return [[words[i] for i in group] for group in groups(region.tape.steps, fusion)]


def test_every_step_is_in_one_group_and_groups_start_in_order() -> None:
    for fusion in Fusion:
        found = groups(region_of("llama3-8b", kernels="huggingface").tape.steps, fusion)
        assert sorted(i for group in found for i in group) == list(range(sum(map(len, found))))
        assert all(group == sorted(group) for group in found)


def test_dropout_and_the_residual_sum_are_one_kernel_in_megatron() -> None:
    region = region_of()
    assert names(region, Fusion.NONE).count(["native_dropout"]) == 3
    fused = names(region, Fusion.POINTWISE)
    assert fused.count(["native_dropout", "add"]) == 2  # after attention and after the feed-forward block
    assert ["native_dropout"] in fused  # of the probabilities, between a softmax and a product
    assert ["gelu"] in fused


def test_compiled_code_fuses_norms_written_out() -> None:
    run = run_of("llama3-8b")
    signature = replace(run, kernels=replace(run.kernels, fused_norm=False)).signature
    region = layer_region(signature, run.model.layers[0])
    separate, fused = names(region, Fusion.NONE), names(region, Fusion.COMPILED)
    norm = ["_to_copy", "pow", "mean", "add", "rsqrt", "mul", "_to_copy", "mul"]
    assert fused[0] == norm and separate[: len(norm)] == [[name] for name in norm]


def test_fusing_moves_fewer_bytes_and_changes_no_flops() -> None:
    region = region_of("llama3-8b", kernels="huggingface")
    listed = [
        work(region, Execution(fusion=fusion), "bfloat16", None)
        for fusion in (Fusion.NONE, Fusion.POINTWISE, Fusion.COMPILED)
    ]
    for passes in ("forward", "backward"):
        moved = [sum(kernel.nbytes for kernel in getattr(each, passes)) for each in listed]
        assert moved[0] > moved[1] > moved[2]
        flops = {sum(k.gemm.flops for k in getattr(each, passes) if k.gemm) for each in listed}
        assert len(flops) == 1


def test_bytes_of_a_norm_are_counted_by_hand() -> None:
    """s x b x h in 16 bits: 2 reads and writes forward; backward reads the gradient and the input and writes one."""
    run = run_of("gpt-22b", micro_batch=4, seq=2048)
    region = layer_region(run.signature, run.model.layers[0])
    whole = 4 * 2048 * 6144 * 2
    listed = work(region, Execution(fusion=Fusion.NONE), "float32", None)
    first = listed.forward[0]
    statistics = 2 * 4 * 2048 * 4
    weights = 2 * 6144 * 2
    assert first.nbytes == 2 * whole + statistics + weights
    last = next(k for k in reversed(listed.backward) if k.steps == (0,) and k.gemm is None)
    assert last.nbytes == 3 * whole + statistics + 2 * 6144 * 4


@pytest.mark.parametrize("tp", [1, 8])
def test_products_are_those_of_the_layer(tp: int) -> None:
    """arXiv 2205.05198 Appendix A: 24 bsh^2 + 4 bs^2h forward, twice that backward, over t ranks."""
    region = region_of(micro_batch=4, seq=2048, tp=tp)
    listed = work(region, Execution(fusion=Fusion.POINTWISE), "float32", None)
    tokens, h, s = 4 * 2048, 6144, 2048
    expected = (24 * tokens * h * h + 4 * tokens * s * h) // tp
    assert sum(k.gemm.flops for k in listed.forward if k.gemm) == expected
    assert sum(k.gemm.flops for k in listed.backward if k.gemm) == 2 * expected
    weights = sum(k.gemm.flops for k in listed.backward if k.gemm and k.half is Half.WEIGHTS)
    assert weights == 24 * tokens * h * h // tp


@pytest.mark.parametrize("loss", ["upcast", "fused", "chunked", "chunked-output"])
def test_every_loss_runs_the_heads_three_products(loss: str) -> None:
    run = run_of("llama3-8b", loss=loss, seq=1024)
    listed = work(head_region(run.signature), Execution(fusion=Fusion.NONE), "float32", None)
    flops = [k.gemm.flops for k in (*listed.forward, *listed.backward) if k.gemm]
    once = 2 * 1024 * 4096 * 128256
    assert sum(flops) == once * (4 if loss == "chunked" else 3)  # chunks are computed again


def test_quantising_is_counted_by_hand() -> None:
    """tokens x h into 4 products of a layer: qkv, projection, up and down, of 12 h^2 weights.

    Scales that are looked for read x, W and dy once more and take W's copy each time; delayed ones let the two norms
    and the activation write fp8 alone, and leave a pass over what attention made.
    """
    region = region_of("gpt-22b", micro_batch=4, seq=2048, precision="fp8", attention="flash")
    tokens, h = 4 * 2048, 6144
    looked, delayed = (
        work(region, Execution(fusion=Fusion.POINTWISE, delayed_scaling=late), "bfloat16", "float8_e4m3fn")
        for late in (False, True)
    )
    inputs, gradients, weights = 7 * tokens * h, 9 * tokens * h, 12 * h * h  # elements; h + h + h + 4h, 3h + h + 4h + h
    forward, backward = (
        sum(k.nbytes for k in getattr(looked, name)) - sum(k.nbytes for k in getattr(delayed, name))
        for name in ("forward", "backward")
    )
    maxima, copies = 2 * inputs, 2 * 2 * weights + weights
    made_narrow = 2 * (2 + 2 + 4) * tokens * h  # norms: not written wide and not read again; the activation was not
    assert forward == maxima + copies + made_narrow
    assert backward == 2 * gradients
    quantised = [k for k in delayed.forward if region.tape.steps[k.steps[0]].name == "quantise.fp8"]
    assert [k.nbytes for k in quantised] == [3 * tokens * h]
    assert not any(step.differentiable for step in region.tape.steps if step.name == "quantise.fp8")
    narrow = [k for k in looked.backward if all(region.tape.steps[i].name == "quantise.fp8" for i in k.steps)]
    assert not narrow  # what is only kept for backward has no gradient, and adds none to its original's


def test_experts_are_products_of_their_own_rows() -> None:
    region = region_of("mixtral-8x7b", seq=4096)
    grouped = [
        k.gemm
        for k in work(region, Execution(fusion=Fusion.NONE), "float32", None).forward
        if k.gemm and k.gemm.batch > 1
    ]
    assert {(p.batch, p.m) for p in grouped} == {(8, 4096 * 2 // 8)}


# seconds --------------------------------------------------------------------------------------------------------------


def test_large_products_reach_what_the_file_says_and_none_more() -> None:
    """8192 cubed on an A100: about 245 TFLOP/s, as cuBLAS has it."""
    gemm = Gemm(1, 8192, 8192, 8192, "bfloat16")
    reached = gemm.flops / gemm_seconds(gemm, A100)
    assert 235e12 < reached < A100.reached.matmul * 312e12


def test_narrow_products_in_fp32_take_narrow_tiles() -> None:
    """Without tensor cores: a down-projection to 16 uses half of a tile's columns, in two waves; an up-projection from
    16 takes as long to write as to compute."""
    ceiling = 19.5e12 * A100.reached.matmul
    down, up = Gemm(1, 16384, 16, 4096, "float32"), Gemm(1, 16384, 4096, 16, "float32")
    assert 2 < gemm_seconds(down, A100) * ceiling / down.flops < 3.5
    assert 1.5 < gemm_seconds(up, A100) * ceiling / up.flops < 2.5


def test_packed_matrices_are_unpacked_in_both_passes() -> None:
    """``MatMul4Bit`` of bitsandbytes: all seven of a layer."""
    run = run_of("llama3-8b", base="nf4", lora="r=8", seq=1024, input_gradients=True)
    region = layer_region(run.signature, run.model.layers[0])
    listed, steps = work(region, Execution(fusion=Fusion.NONE), "float32", None), region.tape.steps
    ahead = [k.nbytes for k in listed.forward if steps[k.steps[0]].name == "dequantise.nf4"]
    back = [k.nbytes for k in listed.backward if k.gemm is None and k.nbytes in ahead]
    assert sorted(ahead) == sorted(back)
    assert len(back) == 7


def test_numbers_of_four_bits_are_unpacked_as_quickly_as_timed_on_a_t4() -> None:
    """4.57 ms for three MLPs (byi8220/unsloth-puzzles 5b4fb6a, Problem1), at 0.4 of its bandwidth; compiled or not."""
    run = run_of("llama3-8b", base="nf4", lora="r=8", seq=1024, input_gradients=True)
    region = layer_region(run.signature, run.model.layers[0])
    for fusion in (Fusion.NONE, Fusion.COMPILED):
        listed = work(region, Execution(fusion=fusion), "float32", None)
        steps = region.tape.steps
        kernels = [k for k in listed.forward if steps[k.steps[0]].name == "dequantise.nf4"]
        ahead = {k.nbytes for k in kernels}
        kernels += [k for k in listed.backward if k.gemm is None and k.nbytes in ahead]
        seconds = sum(kernel_seconds(k, hardware("t4-16gb"), visible=1.0, dtype="float16") for k in kernels)
        numbers = 2 * sum(w.numel for s in steps for w in s.weights if w.packed_bytes)
        mlps = 3 * (2048 * 8192 + 1024 * 4096 + 4096 * 14336)
        assert seconds / numbers * mlps == pytest.approx(4.57e-3, rel=0.03)


def test_bf16_runs_at_the_rate_of_fp32_without_tensor_cores_that_take_it() -> None:
    for name in ("v100-16gb", "v100-32gb", "t4-16gb", "rtx2080ti-11gb"):
        old = hardware(name)
        assert rate(old, "bfloat16") == rate(old, "float32") < rate(old, "float16") / 3
    assert rate(A100, "float16") == rate(A100, "bfloat16") > rate(A100, "float32")


sizes = st.integers(1, 300).map(lambda n: 32 * n)


@given(sizes, sizes, sizes, st.integers(1, 8))
def test_no_product_is_quicker_than_its_ceiling_or_slower_for_being_smaller(m: int, n: int, k: int, batch: int) -> None:
    gemm = Gemm(batch, m, n, k, "bfloat16")
    seconds = gemm_seconds(gemm, A100)
    assert seconds >= gemm.flops / (312e12 * A100.reached.matmul)
    deeper = gemm_seconds(Gemm(batch, m, n, 2 * k, "bfloat16"), A100)
    assert seconds <= deeper <= 2 * seconds * 1.0001


CPU = replace(
    BARE,
    flops_per_second=Throughput(fp32=200 * 10**9, bf16=10**12),
    memory_bytes_per_second=20 * 10**9,
    reached=replace(BARE.reached, matmul=1.0),
    edges=EdgesOf(fp32=Edges(50, 80, 60)),
    synchronous=True,
    delays=replace(BARE.delays, kernel=8e-6, dispatch=1e-9, hook=20e-6),
)


def test_edges_take_the_place_of_tiles() -> None:
    """2 x 100 x 200 x 300 FLOPs at 200 GFLOP/s are 60 µs, and 1/2 + 2/5 + 1/5 as much again."""
    assert gemm_seconds(Gemm(1, 100, 200, 300, "float32"), CPU) == pytest.approx(60e-6 * 2.1)
    assert gemm_seconds(Gemm(3, 100, 200, 300, "float32"), CPU) == pytest.approx(3 * 60e-6 * 2.1)
    tiled = gemm_seconds(Gemm(1, 100, 200, 300, "bfloat16"), CPU)  # nothing is stated of its edges
    assert tiled == gemm_seconds(Gemm(1, 100, 200, 300, "bfloat16"), replace(CPU, edges=EdgesOf()))


@given(sizes, sizes, sizes)
def test_with_edges_no_product_is_slower_for_being_smaller(m: int, n: int, k: int) -> None:
    whole = gemm_seconds(Gemm(1, m, n, k, "float32"), CPU)
    assert whole >= 2 * m * n * k / 200e9
    for half in ((m // 2, n, k), (m, n // 2, k), (m, n, k // 2)):
        smaller = gemm_seconds(Gemm(1, *half, "float32"), CPU)
        assert whole / 2 * 0.9999 <= smaller <= whole


def test_rates_fall_back_to_the_next_wider_type() -> None:
    assert rate(A100, "float8_e4m3fn") == rate(A100, "bfloat16") == 312 * 10**12
    assert rate(A100, "float32") == 19.5e12
    assert rate(hardware("tpu-v5p-95gb"), "float32") == 459 * 10**12
    for price in (lambda: rate(BARE, "bfloat16"), lambda: memory_seconds(1, BARE)):
        with pytest.raises(UsageError, match="does not state"):
            price()


def test_products_of_rows_that_begin_anywhere() -> None:
    """NOTE [ Aligned rows ] in `cost.kernel`: two GEMMs that ml-engineering timed on H100; lines of 128 bytes on
    A100."""
    h100 = hardware("h100-80gb")

    def seconds(n: int, device: Hardware) -> float:
        return gemm_seconds(Gemm(1, 16384, n, 4096, "bfloat16", aligned=aligned(n)), device)

    assert seconds(10944, h100) / seconds(10922, h100) == pytest.approx(273 / 398, rel=0.03)
    assert seconds(10848, h100) == pytest.approx(seconds(10944, h100), rel=0.03)
    assert seconds(14400 // 8, A100) == pytest.approx(seconds(14336 // 8, A100) / 0.8 * 15 / 14, rel=0.08)
    assert seconds(50257, A100) > 1.5 * seconds(50304, A100)
    assert aligned(1800) == 8 and aligned(14400) == 64 and aligned(450, 2048) == 2


# transfers ------------------------------------------------------------------------------------------------------------


def test_where_the_ranks_of_an_axis_are() -> None:
    layout = Layout(tp=4, sp=True, cp=2, dp=8, pp=4, ep=8, zero=1)
    assert group(layout, "tp", 8) == RankGroup(4, 4)
    assert group(layout, "cp", 8) == RankGroup(2, 2)
    assert group(layout, "shards", 8) == RankGroup(16, 2)
    assert group(layout, "ep", 8) == RankGroup(8, 2)
    assert group(layout, "pp", 8) == RankGroup(4, 1)
    assert group(Layout(tp=16, sp=True), "tp", 8).nodes == 2


def test_a_ring_within_a_node_is_counted_by_hand() -> None:
    """100 MB over 8 ranks of 225 GB/s: 7 steps and half of one for its own part, twice for a sum, and latency."""
    nbytes = 10**8
    gather = transfer_seconds("all_gather_into_tensor", nbytes, RankGroup(8, 8), A100)
    assert gather == pytest.approx(nbytes * 7.5 / 8 / 225e9 + 8.4e-6 + 7 * 3.4e-6)
    assert transfer_seconds("reduce_scatter_tensor", nbytes, RankGroup(8, 8), A100) == gather
    both = 2 * (nbytes * 7.25 / 8 / 225e9 + 7 * 3.4e-6) + 8.4e-6
    assert transfer_seconds("all_reduce", nbytes, RankGroup(8, 8), A100) == pytest.approx(both)
    assert transfer_seconds("all_reduce", nbytes, RankGroup(1, 1), A100) == 0


def test_each_rank_of_a_node_brings_an_adapter() -> None:
    nbytes = 10**9
    alone, together = (transfer_seconds("all_gather_into_tensor", nbytes, RankGroup(16, n), A100) for n in (1, 8))
    assert alone == pytest.approx(nbytes * 15 / 16 / (25e9 * 0.85), rel=0.01)
    assert together == pytest.approx(nbytes * 15 / 16 / (8 * 25e9 * 0.85), rel=0.02)


def test_pieces_of_products_hide_all_but_one_of_each_transfer() -> None:
    """Forward over 4 ranks: of two gatherings and two reductions a quarter is waited for, and 15 % of the rest."""
    run = run_of("gpt-22b", micro_batch=4, seq=2048, tp=4, sp=True)
    region, how = layer_region(run.signature, run.model.layers[0]), execution_of(run)
    each = transfer_seconds("all_gather_into_tensor", 4 * 2048 * 6144 * 2, RankGroup(4, 4), A100)

    def found(execution: Execution) -> RegionSeconds:
        prices = PriceModel(hardware=A100, execution=execution, precision=run.precision, layout=run.layout, visible=1.0)
        return prices.seconds(region)

    waiting, cut = found(how), found(replace(how, pipelines_tensor=True))
    assert waiting.forward.transfers == pytest.approx(4 * each)
    assert cut.forward.transfers == pytest.approx(4 * each * (1 / 4 + 3 / 4 * A100.reached.shared))
    assert cut.forward.compute == waiting.forward.compute
    assert cut.inputs.transfers < waiting.inputs.transfers


def test_two_nodes_need_a_network() -> None:
    with pytest.raises(UsageError, match="does not state its network"):
        transfer_seconds("all_reduce", 1, RankGroup(16, 8), hardware("rtx4090-24gb"))


@pytest.mark.parametrize("name", ["v100-32gb", "a10-24gb", "a100-80gb", "t4-16gb"])
def test_a_device_without_fp8_takes_its_products_as_it_takes_wider_ones(name: str) -> None:
    """Peak and share alike: fp8 is no quicker than bf16 where nothing multiplies it."""
    device = hardware(name)
    sizes = (1, 8192, 8192, 8192)
    wide, narrow = (gemm_seconds(Gemm(*sizes, dtype), device) for dtype in ("bfloat16", "float8_e4m3fn"))
    assert device.flops_per_second.fp8 is None and narrow == wide


KINDS = {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor", "all_reduce": "all_reduce"}
"""Names of nccl-tests, and of the collectives that they time."""


@pytest.mark.parametrize(
    ("least", "most", "typical", "worst", "kinds"),
    [
        (1 << 29, 1 << 30, 0.03, 0.15, list(KINDS)[:2]),
        (1 << 23, 1 << 28, 0.09, 0.45, list(KINDS)),
        (512, 512, 0.2, 0.9, ["all_to_all"]),
    ],
)
def test_collectives_within_a_node_as_nccl_takes_them(
    least: int, most: int, typical: float, worst: float, kinds: list[str]
) -> None:
    """Collectives over 2, 4 and 8 devices, of nccl-tests, by size of the full tensor."""
    files = {"a100": "a100-80gb", "b200": "b200-192gb", "h100": "h100-80gb", "h200": "h200-141gb"}
    files |= {"gb200": "gb200-192gb", "gb300": "gb300-288gb"}
    path = Path(__file__).parent.parent / "facts" / "nccl_times.csv"
    errors = []
    for row in csv.DictReader(path.read_text(encoding="utf-8").splitlines()):
        if not least <= int(row["bytes"]) <= most or row["collective"] not in kinds:
            continue
        ranks = RankGroup(int(row["devices"]), int(row["devices"]))
        kind = KINDS.get(row["collective"], "all_to_all_single")
        took = transfer_seconds(kind, int(row["bytes"]), ranks, hardware(files[row["device"]]))
        errors.append(took * 1e3 / float(row["milliseconds"]) - 1)
    assert len(errors) >= 12 and median(map(abs, errors)) < typical and max(map(abs, errors)) < worst


EAGER_KERNELS = {
    ("rms_norm", "forward"): ((6, 1), (8, 0), (4, 0), (8, 1), (6, 0), (6, 1)),
    ("rms_norm", "backward"): (
        *((8, 1), (10, 1), (4, 0), (6, 0), (6, 1), (8, 1), (12, 0)),
        *((4, 0), (4, 1), (8, 0), (8, 0), (12, 0), (12, 0), (6, 0)),
    ),
    ("rotary", "forward"): ((4, 1), (2, 0.5), (4, 1), (4, 1), (6, 0)),
    ("rotary", "backward"): ((4, 1), (4, 1), (2, 0.5), (2, 0), (2, 0), (2, 0.5), (2, 0.5), (6, 0), (6, 0)),
    ("complex_rotary", "forward"): ((6, 1), (8, 0.5), (6, 0)),
}
"""Bytes of each kernel an element, and elements it computes one by one: an fp32 weight, 16-bit activations."""


def test_eager_kernels_take_what_others_timed() -> None:
    """transformers' norms and rotary embeddings on A100, H100 and B200, op by op: NOTE [ Vectorized kernels ]."""
    nvl = replace(hardware("h100-80gb"), memory_bytes_per_second=3938 * 10**9)
    files = {"A100-SXM4-80GB": A100, "H100-SXM5-80GB": hardware("h100-80gb"), "H100-NVL-94GB": nvl}
    files |= {"B200-192GB": hardware("b200-192gb")}
    path = Path(__file__).parent.parent / "facts" / "eager_kernels.csv"
    errors = []
    for row in csv.DictReader(path.read_text(encoding="utf-8").splitlines()):
        keys = 1.25 if row["op"].endswith("rotary") and row["pass"] == "forward" else 1  # a quarter as many as queries
        elements = int(row["elements"]) * keys
        took = sum(
            kernel_seconds(
                Kernel(steps=(0,), nbytes=int(nbytes * elements), singly=int(singly * elements)),
                files[row["device"]],
                visible=1.0,
                dtype="bfloat16",
            )
            for nbytes, singly in EAGER_KERNELS[row["op"], row["pass"]]
        )
        errors.append(took * 1e3 / float(row["milliseconds"]) - 1)
    assert len(errors) == 25 and median(map(abs, errors)) < 0.065 and max(map(abs, errors)) < 0.21


@pytest.mark.parametrize(
    ("kernels", "forward", "backward"), [("huggingface-4.45", 3 * 2 + 3.5 * 1.25, 4 * 2 + 3.5 * 1.25), ("liger", 0, 0)]
)
def test_elements_that_eager_kernels_compute_one_by_one(kernels: str, forward: float, backward: float) -> None:
    """Of a norm: widened, multiplied by rows and by weights; backward also a mean. Of a rotary embedding: both
    multiplications, the turned half and the concatenation, for queries and a quarter as many keys."""
    run = run_of("llama3-8b", kernels=kernels, seq=64)
    found = work(layer_region(run.signature, run.model.layers[0]), execution_of(run), "bfloat16", None)
    for listed, expected in ((found.forward, forward), (found.backward, backward)):
        assert sum(k.singly for k in listed) == expected * run.micro_batch * run.seq * run.model.hidden
    compiled = work(layer_region(run.signature, run.model.layers[0]), execution_of(run).compiled(), "bfloat16", None)
    assert not any(k.singly for k in (*compiled.forward, *compiled.backward))
