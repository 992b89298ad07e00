"""Optimizer states on the host: whole numbers of each framework's rule, and steps on real tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch

from jettison.core.errors import UsageError
from jettison.dryrun.counter import AllocationCounter, static_tensors
from jettison.families.presets import preset
from jettison.predict.forecast import Forecast, forecast
from jettison.predict.time import estimate
from jettison.report.explain import explain
from jettison.request.options import RunRequest
from jettison.request.resolve import resolve
from jettison.search.search import SearchRequest
from jettison.spec.hardware import hardware
from jettison.spec.precision import optimizer_offload
from support.formula_cases import VOCABULARY, FormulaCase, model_of, run_of

N = 8_030_261_248
NORMS = 65 * 4096
FP32 = {"precision": "bf16-autocast"}
KEPT = {"reshard_after_forward": "never"}


def forecast_of(**asked: object) -> Forecast:
    return forecast(resolve(preset("llama3-8b"), RunRequest(recompute="full", **asked)).run)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "host", "sent", "fetched"),
    [
        # fp32 copies, moments and gradients, and 16-bit parameters that wait to go back; gradients in fp32
        ({"offload_optimizer": "deepspeed", "dp": 8, "zero": 2}, 18 * N // 8, 4 * N // 8, 2 * N // 8),
        # with a second micro-batch also 16-bit gradients, to and fro
        (
            {"offload_optimizer": "deepspeed", "dp": 8, "zero": 2, "micro_batches": 2},
            20 * N // 8,
            8 * N // 8,
            6 * N // 8,
        ),
        # gradients in 16 bits there and back, and in fp32
        ({"offload_optimizer": "deepspeed", "dp": 8, "zero": 3}, 18 * N // 8, 6 * N // 8, 4 * N // 8),
        # 16-bit parameters as well, which are fetched for a forward and for a backward, and not behind the step
        ({"offload_optimizer": "deepspeed-parameters", "dp": 8, "zero": 3}, 20 * N // 8, 6 * N // 8, 6 * N // 8),
        ({"offload_optimizer": "deepspeed-parameters", "zero": 3}, 20 * N, 6 * N, 6 * N),
        # parameters, gradients and moments in fp32; gradients go once, parameters come twice, in each micro-batch
        ({"offload_optimizer": "fsdp2", "dp": 8, "zero": 3, **FP32}, 16 * N // 8, 4 * N // 8, 8 * N // 8),
        ({"offload_optimizer": "fsdp2", "dp": 8, "zero": 3, "micro_batches": 2, **FP32}, 2 * N, N, 2 * N),
        # weights that stay whole after a forward come once
        ({"offload_optimizer": "fsdp2", "dp": 8, "zero": 3, **KEPT, **FP32}, 2 * N, N // 2, N // 2),
        # parameters, gradients, moments, all in bf16
        ({"offload_optimizer": "torchao", "precision": "bf16-pure"}, 8 * N, 2 * N, 2 * N),
        ({"offload_optimizer": "torchao", "precision": "fp32", "micro_batches": 2}, 16 * N, 8 * N, 4 * N),
        # moments of one byte, but for those of norms
        (
            {"offload_optimizer": "bitsandbytes", "precision": "bf16-pure", "optimizer": "adam8bit"},
            *(2 * (N - NORMS),) * 3,
        ),
        ({"offload_optimizer": "bitsandbytes", "precision": "bf16-pure"}, *(8 * (N - NORMS),) * 3),
    ],
)
def test_what_the_host_has_and_what_moves(asked: dict[str, object], host: int, sent: int, fetched: int) -> None:
    found = forecast_of(**asked).offloaded_optimizer
    assert found is not None
    assert (found.host_bytes, found.to_host_bytes, found.to_device_bytes) == (host, sent, fetched)


def test_the_device_has_that_much_less() -> None:
    """Of bf16 throughout: 4 bytes of moments a parameter; gradients as well where they go as they are made."""
    pure = {"precision": "bf16-pure"}
    plain, kept, gone = (
        forecast_of(**pure, **more)
        for more in ({}, {"offload_optimizer": "torchao"}, {"offload_optimizer": "torchao-gradients"})
    )
    assert plain.peak_bytes - kept.peak_bytes == 4 * N
    assert gone.stages[0].load.state == gone.stages[0].load.gradient_bytes == 0
    assert forecast_of().offloaded_optimizer is None
    offloaded = forecast_of(offload_optimizer="deepspeed", dp=8, zero=2).stages[0].load
    largest = 2 * 128_256 * 4096  # of the embedding: DeepSpeed's buffer for a gradient on its way
    assert (offloaded.state, offloaded.gradient_bytes, offloaded.fixed) == (0, 0, 2 * N + largest)


def test_shards_of_parameters_wait_on_the_host() -> None:
    """The device has none of them, as it has no gradients and no states; where a group is gathered they come and go."""
    plain, hosted = (
        forecast_of(**FP32, dp=8, zero=3, seq=8192, gradients="one-by-one", **more)
        for more in ({}, {"offload_optimizer": "fsdp2"})
    )
    load, static = hosted.stages[0].load, hosted.stages[0].static
    assert (load.fixed, load.state, load.gradient_bytes, static.host_parameters) == (0, 0, 0, 4 * N // 8)
    assert plain.peak_bytes - hosted.peak_bytes == 4 * N // 8 + 8 * N // 8  # no layer has learned yet
    least = 2 * 2 * 128_256 * 4096  # what the head is gathered to, and its weights
    logits = 8192 * 128_256 * (2 + 4)
    assert hosted.peak_bytes > least + logits


@pytest.mark.parametrize("rule", ["deepspeed-parameters", "fsdp2"])
def test_one_rank_alone_fetches_group_after_group(rule: str) -> None:
    """Its peak is that of a rank among others: nothing that is sharded is on either device."""
    asked = {} if rule == "deepspeed-parameters" else FP32
    alone, among = (forecast_of(**asked, offload_optimizer=rule, zero=3, seq=8192, dp=dp) for dp in (1, 64))
    assert alone.stages[0].load.fixed == among.stages[0].load.fixed
    assert 0 <= alone.peak_bytes - among.peak_bytes < 2**20
    resident = forecast_of(**asked, zero=3, seq=8192)
    assert alone.peak_bytes < resident.peak_bytes - resident.stages[0].load.state


def test_a_slow_link_is_waited_for() -> None:
    """What a step fetches for its gathers cannot be quicker than the link, whatever it goes beside."""
    slow = replace(hardware("h100-80gb"), host_bytes_per_second=10**9)
    for dp in (1, 8):
        found = forecast_of(**FP32, offload_optimizer="fsdp2", zero=3, seq=4096, dp=dp)
        host = found.offloaded_optimizer
        assert host is not None and host.gathered_bytes == host.to_device_bytes == 8 * N // dp
        least = host.gathered_bytes / 10**9 / slow.reached.host
        assert least < estimate(found.run, slow).step_seconds < 1.5 * least


def test_copies_take_time() -> None:
    """Parameters come back when the step is over; gradients go beside backwards, as far as these last."""
    asked = {"precision": "bf16-pure", "seq": 4096, "micro_batch": 4}
    device = hardware("h100-80gb")
    run = forecast_of(**asked, offload_optimizer="torchao").run
    host, found = forecast_of(**asked, offload_optimizer="torchao").offloaded_optimizer, estimate(run, device)
    assert host is not None and device.host_bytes_per_second is not None
    way = 1 / (device.host_bytes_per_second * device.reached.host)
    beside = found.stages[0].total.backward.seconds
    waits = max(0.0, host.to_host_bytes * way - beside)
    stepped = 7 * 2 * N / (device.cpu_bytes_per_second * device.reached.cpu)  # gradients, parameters, moments in bf16
    assert found.stages[0].optimizer == pytest.approx(waits + stepped + host.to_device_bytes * way)


@pytest.mark.parametrize(
    ("asked", "passes"),
    [
        ({"offload_optimizer": "deepspeed", "zero": 2}, 10.5),  # rescaled and cast as well
        ({"offload_optimizer": "fsdp2", "zero": 3, **FP32}, 7),
        ({"offload_optimizer": "torchao", "zero": 3, "precision": "fp32"}, 7),
    ],
)
def test_a_step_on_cpu_is_bound_by_its_memory(asked: dict[str, object], passes: float) -> None:
    """A rank reads and writes so many fp32 arrays of its shard, at its part of the server's bandwidth."""
    run, device = forecast_of(**asked, dp=8, seq=4096).run, hardware("a100-80gb")
    faster = replace(device, cpu_bytes_per_second=2 * device.cpu_bytes_per_second)
    saved = estimate(run, device).step_seconds - estimate(run, faster).step_seconds
    each = 4 * N / 8 / (device.cpu_bytes_per_second * device.reached.cpu)
    assert saved == pytest.approx(passes * each / 2, rel=1e-3)


@pytest.mark.parametrize("rule", ["torchao", "torchao-gradients"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_peak_of_a_backward_whose_gradients_go(rule: str, family: str) -> None:
    """Hooks as torchao has them, on real tensors: gradients are copied to buffers that count as the host's."""
    case = FormulaCase(family=family, attention="sdpa", batch=2, sequence=16)
    model = model_of(case)
    ids = torch.randint(1, VOCABULARY, (case.batch, case.sequence))
    large = [p for p in model.parameters() if p.numel() >= 4096]  # the others' moments stay on the device
    small = [torch.empty_like(p) for p in model.parameters() if p.numel() < 4096 for _ in range(2)]
    host = {p: torch.empty_like(p) for p in large}

    def moved(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        host[parameter].copy_(parameter.grad)  # type: ignore[index]
        if rule == "torchao-gradients":
            parameter.grad = None

    with ExitStack() as hooks:
        for parameter in large:
            hooks.callback(parameter.register_post_accumulate_grad_hook(moved).remove)
        with AllocationCounter([*static_tensors(model, ids), *small, *host.values()]) as counter:
            model(input_ids=ids, labels=ids).loss.backward()
    said = forecast(replace(run_of(case), optimizer_offload=optimizer_offload(rule)))
    assert said.stages[0].load.state == sum(moment.nbytes for moment in small)
    assert said.peak_bytes == pytest.approx(counter.peak_bytes - sum(p.nbytes for p in large), rel=0.01)


@pytest.mark.parametrize(
    ("rule", "stages"), [("deepspeed", {"--zero 3"}), ("fsdp2", {"--zero 3"}), ("none", {"--zero 1", "--zero 3"})]
)
def test_an_explanation_tries_the_stages_of_zero_that_go_with_it(rule: str, stages: set[str]) -> None:
    precision = {"precision": "bf16-pure"} if rule == "fsdp2" else {}
    found = explain(forecast_of(**precision, offload_optimizer=rule, dp=8, zero=3))
    assert {variant.change for variant in found.sharding} == stages


REFUSED = [
    ({"offload_optimizer": "somewhere"}, "expected one of none, deepspeed, deepspeed-parameters, fsdp2, torchao"),
    ({"offload_optimizer": "deepspeed"}, "--zero 0; ZeRO-Offload"),
    ({"offload_optimizer": "deepspeed", "zero": 2, "precision": "bf16-pure"}, "DeepSpeed updates fp32 masters"),
    ({"offload_optimizer": "deepspeed", "zero": 2, "optimizer": "muon"}, "--optimizer muon; expected adamw"),
    ({"offload_optimizer": "deepspeed", "zero": 3, "pp": 2}, "--pp 2; offloaded gradients"),
    ({"offload_optimizer": "deepspeed-parameters", "dp": 8, "zero": 2}, "offloaded parameters need --zero 3"),
    ({"offload_optimizer": "fsdp2", "dp": 8, "zero": 3, "pp": 2, **FP32}, "--pp 2; offloaded gradients"),
    ({"offload_optimizer": "fsdp2", "dp": 8, "zero": 3}, "--precision bf16; no masters are"),
    ({"offload_optimizer": "fsdp2", "zero": 3, "lora": "r=16", "base": "nf4", **FP32}, "in fewer than 16 bits"),
    ({"offload_optimizer": "torchao"}, "--precision bf16; no masters are updated"),
    ({"offload_optimizer": "torchao", "precision": "bf16-pure", "zero": 1}, "--zero 1; give --zero 3"),
    (
        {"offload_optimizer": "torchao-gradients", "precision": "fp32", "micro_batches": 2},
        "--micro-batches 2; each gradient",
    ),
    ({"offload_optimizer": "torchao", "precision": "fp32", "gradients": "upfront"}, "gradients upfront"),
    ({"offload_optimizer": "bitsandbytes", "precision": "fp32", "optimizer": "sgd"}, "expected adamw or adam8bit"),
]


@pytest.mark.parametrize(("asked", "message"), REFUSED)
def test_what_no_framework_does_is_refused(asked: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        forecast_of(**asked)


def test_a_search_keeps_to_the_stages_of_zero_that_a_framework_has() -> None:
    def space(**asked: str) -> Iterator[int]:
        found = SearchRequest(**asked).space(preset("llama3-8b"), hardware("a100-80gb"), gpus=8, global_batch=8)  # type: ignore[arg-type]
        return iter(found.axes.zero)

    assert tuple(space(offload_optimizer="deepspeed")) == (2, 3)
    assert tuple(space(offload_optimizer="fsdp2", precision="bf16-pure")) == (3,)
    assert tuple(space(offload_optimizer="torchao", precision="bf16-pure")) == (0, 3)
    for asked, message in (
        ({"offload_optimizer": "deepspeed", "zero": "1"}, "is modelled for"),
        ({"offload_optimizer": "deepspeed", "pp": "2"}, "which takes --pp 1"),
        ({"offload_optimizer": "torchao-gradients", "precision": "fp32"}, "which takes one micro-batch"),
        ({"reference": "same", "pp": "1,2"}, "--pp 1,2 with --reference"),
    ):
        with pytest.raises(UsageError, match=message):
            space(**asked)


def test_a_base_in_four_bits_waits_on_the_host() -> None:
    """Llama 2 70B on two cards (Answer.AI's fsdp_qlora): scales stay on each, half of the rest waits on each host."""
    request = RunRequest(
        seq=512,
        lora="r=8,targets=q_proj",
        base="nf4-double",
        like="huggingface-4.48",
        dp=2,
        zero=3,
        recompute="full",
        offload_optimizer="fsdp1",
    )
    found = forecast(resolve(preset("llama2-70b"), request).run)
    h, kv, ffn = 8192, 1024, 28672
    numbers = 80 * (2 * h * h + 2 * kv * h + 3 * ffn * h)
    matrices = 80 * 7
    scales = numbers // 64 + 4 * numbers // 64 // 256 + 4 * matrices + 64 * matrices
    assert found.stages[0].static.parameters == scales
    adapters = 80 * 2 * 8 * h
    ends = 2 * 32000 * h + (2 * 80 + 1) * h
    assert found.stages[0].static.host_parameters == (numbers // 2 + 2 * ends + 4 * adapters) // 2
    assert found.peak_bytes < 6 * 2**30
