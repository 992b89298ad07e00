"""Properties of step times that hold for any run, and what the parts of a step have to do with each other."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jettison.core.errors import UsageError
from jettison.cost.execution import execution_of
from jettison.cost.region import Class, RegionSeconds
from jettison.families.config import parse_config
from jettison.families.presets import preset
from jettison.predict.forecast import available_bytes, forecast
from jettison.predict.ranges import time_residual
from jettison.predict.time import Estimate, estimate
from jettison.report.alternatives import LINKS, alternatives_of, trades
from jettison.request.options import RunRequest
from jettison.request.resolve import resolve
from jettison.search.largest_fit import most_whole
from jettison.spec.hardware import Delays, Hardware, Reached, hardware, slowest
from jettison.spec.run import Run
from support.work import calls

GPUS = ("a100-80gb", "h100-80gb", "gb200-192gb", "mi300x-192gb")
BANDWIDTHS = ("memory_bytes_per_second", "link_bytes_per_second", "host_bytes_per_second", "network_bytes_per_second")
SHARES = ("matmul", "attention", "attention_backward", "memory", "link", "network", "host")
DELAYS = ("kernel", "dispatch", "link", "network", "hook")


def run_of(model: str, **request: object) -> Run:
    return resolve(preset(model), RunRequest(**request)).run  # type: ignore[arg-type]


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """Small models over up to 64 devices."""
    model = draw(st.sampled_from(["gpt2", "llama-1b-mha", "bert-base"]))
    tp, pp, dp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 16]))
    recompute = draw(st.sampled_from(["none", "selective", "full", "every:2", "block:1"]))
    return run_of(
        model,
        seq=512,
        tp=tp,
        pp=pp,
        dp=dp,
        zero=draw(st.integers(0, 3)),
        recompute=recompute,
        micro_batches=draw(st.sampled_from([1, 2, 3])) * pp,
        offload=draw(st.booleans()),
        virtual_stages=draw(st.sampled_from([1, 2])) if pp == 2 and model == "gpt2" else 1,
        kernels=draw(st.sampled_from(["megatron", "pytorch"])),
    )


devices = st.sampled_from(GPUS).map(hardware)


@given(runs(), devices)
def test_the_parts_add_up_to_the_step(run: Run, device: Hardware) -> None:
    found = estimate(run, device)
    parts = found.breakdown
    assert parts.seconds == pytest.approx(found.step_seconds)
    values = (parts.compute, parts.communication, parts.bubble, parts.recompute, parts.other)
    assert all(value >= -1e-12 for value in values) and parts.compute > 0
    assert 0 < found.mfu <= found.hfu < 1
    assert found.tokens_per_second_per_gpu * found.step_seconds * run.layout.world == pytest.approx(
        run.seq * run.micro_batch * run.micro_batches * run.layout.dp
    )


@given(runs(), devices, st.sampled_from(BANDWIDTHS), st.floats(1, 10))
def test_more_bandwidth_never_costs_time(run: Run, device: Hardware, name: str, times: float) -> None:
    faster = replace(device, **{name: int(getattr(device, name) * times)})
    assert estimate(run, faster).step_seconds <= estimate(run, device).step_seconds * (1 + 1e-9)


@given(runs(), devices, st.sampled_from(SHARES), st.floats(0.2, 1))
def test_reaching_less_never_saves_time(run: Run, device: Hardware, name: str, share: float) -> None:
    worse = replace(device, reached=replace(device.reached, **{name: getattr(device.reached, name) * share}))
    assert estimate(run, worse).step_seconds >= estimate(run, device).step_seconds * (1 - 1e-9)


@given(runs(), devices, st.sampled_from(DELAYS), st.floats(1, 10))
def test_delays_never_save_time(run: Run, device: Hardware, name: str, times: float) -> None:
    device = replace(device, delays=replace(device.delays, hook=5e-6))
    worse = replace(device, delays=replace(device.delays, **{name: getattr(device.delays, name) * times}))
    assert estimate(run, worse).step_seconds >= estimate(run, device).step_seconds * (1 - 1e-9)


@given(runs(), devices)
def test_overlap_never_makes_a_step_slower(run: Run, device: Hardware) -> None:
    how = execution_of(run)
    waits = estimate(run, device, execution=how.without_overlap()).step_seconds
    for hidden in ("hides_tensor", "pipelines_tensor", "hides_data", "hides_stages", "hides_offload"):
        one = replace(how.without_overlap(), **{hidden: True})
        assert estimate(run, device, execution=one).step_seconds <= waits * (1 + 1e-9)
    assert estimate(run, device, execution=how).step_seconds <= waits * (1 + 1e-9)


@settings(max_examples=30)
@given(st.sampled_from([1, 2, 4]), st.integers(1, 6), devices)
def test_more_micro_batches_never_lower_throughput(pp: int, groups: int, device: Hardware) -> None:
    fewer, more = (
        estimate(run_of("gpt2", seq=512, pp=pp, micro_batches=count * pp, dp=2), device)
        for count in (groups, groups + 1)
    )
    busiest, less = (sum(found.replay.busy) / found.replay.makespan for found in (more, fewer))
    assert busiest >= less - 1e-12
    # the second micro-batch is the first whose gradients are added to others
    slack = 1.01 if groups * pp == 1 else 1 + 1e-9
    assert more.tokens_per_second_per_gpu * slack >= fewer.tokens_per_second_per_gpu


def test_what_recompute_costs_is_ordered() -> None:
    device = hardware("a100-80gb")
    found = {
        mode: estimate(run_of("gpt-22b", micro_batch=4, tp=8, recompute=mode), device)
        for mode in ("none", "selective", "block:24", "full")
    }
    seconds = [each.step_seconds for each in found.values()]
    assert seconds == sorted(seconds)
    assert found["none"].breakdown.recompute == 0
    assert found["none"].mfu == found["none"].hfu
    half, whole = (found[mode].breakdown.recompute for mode in ("block:24", "full"))
    assert half == pytest.approx(whole / 2)


def test_segments_compute_whole_layers_again() -> None:
    """PyTorch stops a checkpoint where nothing more is needed; within a segment every layer's output is."""
    device = hardware("a100-80gb")
    flops = [
        estimate(run_of("llama2-7b", recompute=mode), device).recomputed_flops
        for mode in ("full", "every:2", "every:4")
    ]
    assert flops == sorted(flops)
    forward = estimate(run_of("llama2-7b"), device).model_flops() / 3
    assert flops[0] < flops[-1] < forward


@pytest.mark.parametrize(
    ("model", "number", "ends"), [("llama3-8b", 6, 6), ("llama3-8b", 31, 2), ("gpt-oss-20b", 5, 5)]
)
def test_a_last_shorter_segment_ends_as_others_do(model: str, number: int, ends: int) -> None:
    """A segment's last layer recomputes what backward needs, all others everything; kinds of layers may alternate."""
    device, depth = hardware("a100-80gb"), preset(model).depth

    def again(mode: str) -> float:
        return estimate(run_of(model, recompute=mode), device).recomputed_flops

    each = (again(f"every:{depth}") - again("full")) / (depth - 1)
    assert each > 0
    assert again(f"every:{number}") == pytest.approx(again("full") + (depth - ends) * each)


def test_ranks_wait_for_the_slowest_of_them() -> None:
    """1.4 standard deviations over eight devices, 3.2 over 1024; bytes take as long on each."""
    device = hardware("a100-80gb")
    peaks = [slowest(device, ranks).flops_per_second.bf16 or 0 for ranks in (1, 8, 1024)]
    assert [peaks[0] / peak - 1 for peak in peaks[1:]] == pytest.approx([0.015 * 1.42, 0.015 * 3.24], rel=0.02)
    alone, together = (estimate(run_of("gpt-22b", dp=ranks), device).breakdown.compute for ranks in (1, 8))
    assert 1.01 < together / alone < peaks[0] / peaks[1]
    assert slowest(device, 8).memory_bytes_per_second == device.memory_bytes_per_second


def test_fsdp_copies_what_it_gathers_and_what_it_reduces() -> None:
    """On the stream of compute: weights twice, read and written, and gradients, read in bf16 and written in fp32. FSDP1
    concatenates gradients in bf16."""
    device = hardware("h100-80gb")
    elements = 6_738_415_616  # of Llama 2 7B

    def compute(**layout: object) -> float:
        run = run_of("llama2-7b", precision="bf16-main32", **layout)
        return sum(part.compute for part in estimate(run, device).stages[0].total)

    alone = compute(dp=8)  # on devices of the same speed
    for layout, nbytes in (({}, 2 * 2 * 2 + 2 + 4), ({"fsdp_version": 1}, 2 + 2)):
        took = (compute(dp=8, zero=3, **layout) - alone) * 3350e9 * 0.85
        assert took == pytest.approx(nbytes * elements, rel=1e-3)


def test_a_planners_choice_is_priced() -> None:
    run, device = run_of("llama2-7b"), hardware("a100-80gb")
    everything = estimate(run, device, chosen=[None] * 32)
    assert everything.step_seconds == pytest.approx(estimate(run, device).step_seconds)
    from jettison.formula.region import layer_region
    from jettison.predict.stages import KeptBuffers, kept_by

    full = KeptBuffers(kept_by(layer_region(run.signature, run.model.layers[0]), "full"))
    mixed = estimate(run, device, chosen=[full] * 8 + [None] * 24)
    whole = estimate(replace(run, recompute=run_of("llama2-7b", recompute="full").recompute), device)
    assert mixed.breakdown.recompute == pytest.approx(whole.breakdown.recompute / 4)


def test_hooks_cost_the_host_what_the_file_says() -> None:
    """For each tensor that the layers, the embedding and the head save; where nothing is planned, nothing."""
    cpu = replace(
        hardware("a100-80gb"), synchronous=True, delays=Delays(kernel=8e-6, dispatch=1e-9, hook=20e-6, link=1e-6)
    )
    free = replace(cpu, delays=replace(cpu.delays, hook=0.0))
    run = run_of("llama-1b-mha", recompute="full", kernels="huggingface", attention="sdpa")
    slots = sum(len(part.region.program.slots) for part in forecast(run).parts)
    assert slots > 25 * run.model.depth
    more = estimate(run, cpu).step_seconds - estimate(run, free).step_seconds
    assert more == pytest.approx(20e-6 * slots)
    assert estimate(run, cpu).breakdown.other - estimate(run, free).breakdown.other == pytest.approx(20e-6 * slots)
    plain = run_of("llama-1b-mha", kernels="huggingface", attention="sdpa")
    assert estimate(plain, cpu).step_seconds == estimate(plain, free).step_seconds
    kept = estimate(plain, cpu, chosen=[None] * plain.model.depth).step_seconds
    assert kept - estimate(plain, cpu).step_seconds == pytest.approx(20e-6 * slots)
    theirs = run_of("llama-1b-mha", recompute="full", kernels="megatron")
    assert estimate(theirs, cpu).step_seconds == estimate(theirs, free).step_seconds


def test_hooks_hide_behind_a_device_that_has_work() -> None:
    gpu = hardware("a100-80gb")
    hooked = replace(gpu, delays=replace(gpu.delays, hook=20e-6))
    long, short = (run_of("llama2-7b", recompute="full", kernels="pytorch", seq=seq) for seq in (4096, 16))
    assert estimate(long, hooked).step_seconds == pytest.approx(estimate(long, gpu).step_seconds, rel=1e-4)
    forward, plain = (sum(estimate(short, device).stages[0].forward) for device in (hooked, gpu))
    assert forward > 1.5 * plain


def test_a_slow_link_is_felt_by_offloading_alone() -> None:
    device = hardware("h100-80gb")
    slow = replace(device, host_bytes_per_second=10**9)
    run = run_of("llama2-7b", recompute="full", offload=False)
    assert estimate(run, slow).step_seconds == estimate(run, device).step_seconds
    moved = replace(run, recompute=replace(run.recompute, offload=True))
    assert estimate(moved, slow).step_seconds > 2 * estimate(moved, device).step_seconds
    with pytest.raises(UsageError, match="does not state its link to the host"):
        estimate(moved, replace(device, host_bytes_per_second=None))


def test_a_file_without_rates_is_refused() -> None:
    with pytest.raises(UsageError, match="does not state its"):
        estimate(run_of("gpt2"), Hardware(name="bare", memory_bytes=1, usable_bytes=1))


def test_a_search_can_ask_thousands_of_times() -> None:
    """Once regions are priced, here for 16 stages x 2 and 64 micro-batches."""
    run = run_of("gpt-175b", tp=8, pp=16, virtual_stages=2, micro_batches=64, recompute="selective", dp=4, zero=1)
    device = hardware("a100-80gb")
    estimate(run, device)
    assert calls(lambda: estimate(run, device)) < 12_000  # 5 800 take a millisecond


# memory, compute and communication -----------------------------------------------------------------------------------


def explained(model: str = "llama2-7b", gpu: str = "a100-80gb", **request: object) -> tuple[Estimate, object]:
    found = estimate(run_of(model, **request), hardware(gpu))
    return found, alternatives_of(found)


def test_options_are_the_run_with_another_mode() -> None:
    found = estimate(run_of("gpt-22b", micro_batch=4, tp=8, recompute="selective"), hardware("a100-80gb"))
    told = alternatives_of(found)
    assert [option.recompute for option in told.options] == [
        "none",
        "selective",
        "selective-op",
        "full",
        "none + offload",
    ]
    assert [option.current for option in told.options] == [False, True, False, False, False]
    times = time_residual(found.run, found.hardware.name).expected
    assert told.options[1].step_seconds == times * found.step_seconds
    peaks = [option.peak_bytes for option in told.options[:4] if option.recompute != "selective-op"]
    assert peaks == sorted(peaks, reverse=True)
    kinds = dict(told.kinds)
    assert kinds[Class.GEMMS] > kinds[Class.ATTENTION] > 0
    assert sum(kinds.values()) == pytest.approx(found.breakdown.compute, rel=0.01)


def test_a_tensors_trade_is_counted_by_hand() -> None:
    """gelu's output: again is a read and a write of 4 bsh/t each in 16 bits; there and back over the link is two."""
    run, device = run_of("gpt-22b", micro_batch=4, tp=8), hardware("a100-80gb")
    (trade,) = (t for t in trades(run, device) if t.path == "mlp.down")
    nbytes = 4 * 2048 * 4 * 6144 * 2 // 8
    assert trade.nbytes == nbytes
    again = 2 * nbytes / (2039e9 * device.reached.memory) + device.delays.kernel
    assert trade.recompute_seconds == pytest.approx(again)
    assert trade.transfer_seconds == pytest.approx(nbytes / (32e9 * device.reached.host))
    assert trade.break_even_bytes_per_second == pytest.approx(2 * nbytes / again)
    assert trade.links == ()


def test_products_are_worth_moving_and_pointwise_results_are_not() -> None:
    """Even over PCIe 4: the input of an activation, which a product makes, against its output."""
    found = {(t.role, t.path): t for t in trades(run_of("llama2-70b", tp=8), hardware("a100-80gb"))}
    gate = next(trade for (role, path), trade in found.items() if "linear input" in role and path == "mlp.down")
    product = next(trade for (role, _), trade in found.items() if role.startswith("attention"))
    assert "PCIe 4.0 x16" not in gate.links
    assert product.links[-1] == "NVLink-C2C (GH200)"


def test_the_grace_example() -> None:
    """ "3 GB a layer, 80 layers, out and back: 480 GB at 900 GB/s, about 0.5 s." 900 GB/s are both directions of the
    link, and out and back are in different passes: 240 GB take 0.53 s out, at 450 GB/s, and as long back.
    """
    links = {link.name: link.bytes_per_second for link in LINKS}
    one_way = 3 * 80 * 10**9
    assert 2 * one_way / 900e9 == pytest.approx(0.53, abs=0.01)  # what the example divides
    assert one_way / links["NVLink-C2C (GH200)"] == pytest.approx(0.53, abs=0.01)  # of each pass
    assert one_way / links["NVLink-C2C shared by two (GB200)"] == pytest.approx(1.07, abs=0.01)
    assert hardware("gb200-192gb").host_bytes_per_second == links["NVLink-C2C shared by two (GB200)"]


def test_the_lessons_layer() -> None:
    """ "d = 8192, L = 8192, B = 1: 800 MB a layer; full recompute costs a third." On an H100 all but the last product
    of a layer is computed again in 19 ms, a fifth of a step. So 800 MB out and back break even at 86 GB/s: no PCIe does
    that, NVLink-C2C does. The 134 MB of a layer's input, all that full recompute keeps, hide even over PCIe 4.
    """
    model = parse_config(
        {
            "model_type": "gpt2",
            "n_embd": 8192,
            "n_layer": 64,
            "n_head": 64,
            "n_positions": 8192,
            "vocab_size": 50304,
            "attn_pdrop": 0.0,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "activation_function": "gelu",
        },
        name="lesson",
    )
    device = hardware("h100-80gb")
    run = resolve(model, RunRequest(seq=8192, attention="flash", kernels="pytorch")).run
    told = alternatives_of(estimate(run, device))
    assert told.offload is not None
    rate = device.reached.matmul * 989.4e12
    again = (16 * 8192 * 8192**2) / rate + 2 * 8192**2 * 8192 / (device.reached.attention * 989.4e12)
    assert told.offload.recompute_seconds == pytest.approx(again, rel=0.1)
    none, full = (next(o for o in told.options if o.recompute == name) for name in ("none", "full"))
    assert 0.18 < full.step_seconds / none.step_seconds - 1 < 1 / 3
    even = 2 * 800e6 / told.offload.recompute_seconds
    quick = [link.name for link in LINKS if link.bytes_per_second > even]
    assert quick == ["NVLink-C2C shared by two (GB200)", "NVLink-C2C (GH200)"]
    assert even == pytest.approx(86e9, rel=0.02)
    assert 8192 * 8192 * 2 / (32e9 * device.reached.host) < told.offload.forward_seconds / 4


@pytest.mark.parametrize("gpu", ["a100-80gb", "h100-80gb", "gb200-192gb"])
def test_a_layer_over_each_link(gpu: str) -> None:
    """Out and back take as long as computing it again exactly at the break-even link."""
    told = alternatives_of(estimate(run_of("llama3-8b", seq=4096), hardware(gpu)))
    offload = told.offload
    assert offload is not None
    assert [trip.link for trip in offload.links] == list(LINKS)
    at_hand = next(w for w in offload.links if w.link.bytes_per_second == hardware(gpu).host_bytes_per_second)
    assert (at_hand.transfer_seconds, at_hand.hidden) == (offload.transfer_seconds, offload.hidden)
    for trip in offload.links:
        reached = trip.link.bytes_per_second * hardware(gpu).reached.host
        assert trip.transfer_seconds == pytest.approx(offload.layer_bytes / reached)
        assert trip.beats_recompute is (reached > offload.break_even_bytes_per_second)
        assert trip.hidden is (trip.transfer_seconds <= min(offload.forward_seconds, offload.backward_seconds))
    slow = alternatives_of(estimate(run_of("llama3-8b"), replace(hardware(gpu), host_bytes_per_second=10**9))).offload
    assert slow is not None and len(slow.links) == len(LINKS) + 1 and not slow.links[0].beats_recompute


def test_the_grace_examples_model_hides_all_it_saves() -> None:
    """Llama 3 70B, 4 x 8192 tokens over 8 devices: the link of a Grace is quick enough, PCIe 5 is not."""
    run = run_of("llama3-70b", seq=8192, micro_batch=4, tp=8)
    for gpu, hides in (("gb200-192gb", True), ("b200-192gb", False)):
        told = alternatives_of(estimate(run, hardware(gpu)))
        assert told.offload is not None and told.offload.hidden is hides, told.offload


def test_all_micro_batches_are_kept_whole_where_all_fit() -> None:
    run = run_of("gpt2", recompute="full", pp=4, micro_batches=8)
    device = hardware("a100-80gb")
    assert estimate(most_whole(run, available_bytes(device, run)), device).breakdown.recompute == 0


def test_reached_shares_are_defaults_that_a_file_may_change() -> None:
    assert Reached().matmul == 0.8
    with pytest.raises(UsageError, match="recompute"):
        resolve(preset("gpt2"), RunRequest(recompute="some"))


def test_stacks_say_what_is_waited_for() -> None:
    """Transfers of tensor parallelism and of gradients beside nothing, all gradients in fp32 on all ranks, and in one
    code whole outputs from each rank."""
    layout = {"tp": 8, "sp": False, "pp": 4, "dp": 4, "zero": 1, "micro_batches": 16, "kernels": "megatron"}
    device = hardware("a100-80gb")

    def found(stack: str | None, precision: str = "bf16-main32") -> Estimate:
        run = run_of("llama2-70b", seq=2048, stack=stack, precision=precision, **layout)
        return estimate(run, device)

    tuned, deepspeed, scaling = found(None), found("megatron-deepspeed"), found("scaling", "bf16")
    assert tuned.step_seconds < deepspeed.step_seconds
    assert tuned.breakdown.communication < min(x.breakdown.communication for x in (deepspeed, scaling))
    assert scaling.stages[0].sent[0][0] > deepspeed.stages[0].sent[0][0]
    assert tuned.stages[1].end < deepspeed.stages[1].end
    reached = (device.network_bytes_per_second or 1) * device.reached.network
    reduced = 4 * (68.98e9 / 32) * 2 * 3 / 4 / reached
    for each in (deepspeed, scaling):
        assert each.stages[1].end == pytest.approx(reduced + reduced / 4, rel=0.05)


def test_transfers_of_blocking_calls_block_both_stages() -> None:
    """DeepSpeed's ``TrainSchedule``: each stage sends and receives an activation and a gradient a micro-batch."""
    layout = {"pp": 4, "dp": 2, "micro_batches": 16, "kernels": "megatron", "stack": "megatron-deepspeed"}
    found = estimate(run_of("llama2-7b", seq=2048, precision="bf16-main32", **layout), hardware("a100-80gb"))
    first, second, _, last = (stage.sent[0] for stage in found.stages)
    hop = first[0]
    assert hop > 0
    assert (first, second, last) == ((hop, hop), (2 * hop, 2 * hop), (hop, hop))


def test_kernels_that_are_waited_for_hide_no_host_time() -> None:
    """CUDA_LAUNCH_BLOCKING=1: the host's time adds to the device's, as often as kernels are launched."""
    layout = {"tp": 8, "sp": False, "pp": 1, "micro_batches": 4, "kernels": "megatron", "recompute": "full"}
    device = hardware("a100-80gb")

    def layers(stack: str, micro_batch: int) -> RegionSeconds:
        precision = {"precision": "fp16-main32", "attention": "eager"}
        run = run_of("gpt-175b", seq=2048, stack=stack, micro_batch=micro_batch, **precision, **layout)
        return estimate(run, device).stages[0].total

    hidden, waited = layers("megatron-deepspeed", 1), layers("megatron-deepspeed-blocking", 1)
    assert waited.forward.compute == hidden.forward.compute and waited.forward.transfers == hidden.forward.transfers
    assert hidden.backward.dispatch == 0
    host = waited.forward.dispatch + waited.backward.dispatch
    assert 96 * 50 * device.delays.waited < host < 96 * 65 * device.delays.waited
    more = layers("megatron-deepspeed-blocking", 4)
    assert more.forward.dispatch + more.backward.dispatch == pytest.approx(host)


def test_batches_without_16_byte_alignment_had_no_tensor_cores() -> None:
    """cuBLAS 11: heads of 108 numbers take longer than heads of 216, by the rates of fp32 and of fp16."""
    device = hardware("a100-80gb")

    def seconds(heads: int, stack: str) -> float:
        shape = {"n_embd": 13824, "n_layer": 2, "n_head": heads, "n_positions": 2048, "vocab_size": 1024}
        model = parse_config({"model_type": "gpt2", **shape}, name="wide")
        request = RunRequest(
            seq=2048, tp=8, kernels="megatron", attention="eager", precision="fp16-main32", stack=stack
        )
        return estimate(resolve(model, request).run, device).stages[0].total.forward.compute

    flops = 2 * 2 * 2 * 2048**2 * 13824 / 8  # scores and values of two layers
    apart = seconds(128, "megatron-deepspeed") - seconds(128, "base")
    assert apart == pytest.approx(flops / (0.8 * 19.5e12) - flops / (0.8 * 312e12), rel=0.2)
    assert seconds(64, "megatron-deepspeed") == pytest.approx(seconds(64, "base"), rel=0.01)


def test_buckets_of_zero_1_and_2_are_all_reduced() -> None:
    """In backward's own stream, unless there is a second bucket that fills meanwhile."""
    device = hardware("a100-80gb")

    def found(zero: int, buckets: str) -> Estimate:
        layout = {"dp": 8, "zero": zero, "micro_batches": 4, "zero_buckets": buckets}
        return estimate(run_of("llama2-7b", like="deepspeed", seq=4096, **layout), device)

    reached = (device.link_bytes_per_second or 1) * device.reached.link
    reduced = 2 * 2 * 6.74e9 * 7 / 8 / reached
    assert found(1, "default").stages[0].end == pytest.approx(reduced + reduced / 2, rel=0.1)
    waited = found(2, "default").step_seconds - found(2, "buckets=2").step_seconds
    assert waited == pytest.approx(4 * reduced * (1 - device.reached.shared), rel=0.1)
