"""Loops on ranks whose steps change: batches that grow, optimizers that step inside. For `test_loops_on_ranks`."""

from __future__ import annotations

import functools
import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import jettison
from jettison.core.units import Bytes
from jettison.dryrun.counter import measured_peak, static_tensors
from jettison.train.engine import alive
from jettison.train.phase_memory import MemoryMeter
from support.toys import Mlp
from support.users_loops import Language, Mlps, ids, next_word, pair

QUICK = ("gan under ddp", "1F1B")
MORE = (
    "GPipe",
    "interleaved",
    "looped BFS",
    "zero bubble",
    *(() if torch.__version__.startswith("2.11.") else ("zero bubble V",)),  # whose stages send to their own rank there
    "growing under ddp",
    "whole step under fsdp2",
    "thawing under fsdp2",
    "thawing in tensor parallel",
)


def ddp_peak(run: Callable[[], Any], models: Sequence[Any], optimizers: Sequence[Any], batch: Any) -> int:
    """Buckets are there all along, and no operator makes them."""
    gc.collect()
    static = [*static_tensors(nn.ModuleList(models), batch, None)]
    for optimizer in optimizers:
        static += static_tensors(nn.ModuleList(), (), optimizer)
    parameters = [p for model in models for p in model.parameters()]
    static += [p.grad for p in parameters if p.grad is not None]
    return measured_peak(run, static_tensors=static).peak_bytes + sum(p.nbytes for p in parameters)


def gan_under_ddp() -> dict[str, Any]:
    """Two networks under wrappers of their own, and an optimizer's step between the half-steps."""
    batch = pair()

    def made() -> tuple[Any, ...]:
        torch.manual_seed(0)
        maker, judge = DistributedDataParallel(Mlps()), DistributedDataParallel(Mlps(1))
        first, second = torch.optim.Adam(maker.parameters(), 1e-3), torch.optim.AdamW(judge.parameters(), 1e-3)

        def step(maker: Any, judge: Any, batch: Any) -> None:
            second.zero_grad()
            made = maker(batch[0])
            functional.softplus(judge(torch.cat([made.detach(), batch[1]]))).mean().backward()
            second.step()
            first.zero_grad()
            functional.softplus(-judge(made)).mean().backward()
            first.step()

        return maker, judge, first, second, step

    def trained(maker: Any, judge: Any, step: Any) -> list[Tensor]:
        for _ in range(2):
            step(maker, judge, batch)
        return [p.detach().clone() for p in (*maker.parameters(), *judge.parameters())]

    maker, judge, first, second, step = made()
    expected = trained(maker, judge, step)
    plain = ddp_peak(lambda: step(maker, judge, batch), [maker, judge], [first, second], batch)
    maker, judge, first, second, step = made()
    models, budget = (maker, judge), Bytes(int(0.85 * plain))
    handle = jettison.auto_checkpoint(maker, batch, budget, models=models, step=step, optimizer=(first, second))
    same = all(map(torch.equal, trained(maker, judge, step), expected))
    measured = ddp_peak(lambda: step(maker, judge, batch), models, [first, second], batch)
    predicted = handle.plans[0].predicted.peak_bytes
    return {"same": same, "budget": int(budget), "peaks": [[predicted, measured]]}


def growing_under_ddp() -> dict[str, Any]:
    """Batches that are longer from time to time, of another length on each rank."""
    rank = distributed.get_rank()
    lengths = (32, 48) if rank else (34, 46)
    batches = [torch.randint(0, 64, (8, length)) for length in (16, *lengths)]

    def made() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = DistributedDataParallel(Language(rate=0.0))
        return model, torch.optim.AdamW(model.parameters(), 1e-3)

    def step(model: Any, words: Tensor) -> None:
        next_word(model(words), words).backward()

    def run(model: Any, optimizer: Any, words: Tensor, handle: Any = None) -> None:
        if handle is not None:
            handle.expect(words)
        step(model, words)
        optimizer.step()
        optimizer.zero_grad()

    def trained(model: Any, optimizer: Any, handle: Any = None) -> list[Tensor]:
        for words in batches:
            run(model, optimizer, words, handle)
        return [p.detach().clone() for p in model.parameters()]

    model, optimizer = made()
    expected = trained(model, optimizer)
    plain = ddp_peak(lambda: run(model, optimizer, batches[-1]), [model], [optimizer], batches[-1])
    model, optimizer = made()
    budget, peaks = Bytes(int(0.8 * plain)), []
    handle = jettison.auto_checkpoint(model, batches[0], budget, optimizer=optimizer, step=step)
    same = all(map(torch.equal, trained(model, optimizer, handle), expected))
    assert handle.batches is not None
    for words in batches:
        measured = ddp_peak(functools.partial(run, model, optimizer, words, handle), [model], [optimizer], words)
        assert handle.batches.now is not None
        peaks.append([handle.batches.now.peak_bytes, measured])
    return {"same": same, "budget": int(budget), "peaks": peaks}


def whole_step_under_fsdp2() -> dict[str, Any]:
    """One function clips and steps, too; ranks begin with batches of their own lengths."""
    words = ids()[:, : 24 - 4 * distributed.get_rank()].contiguous()

    def made() -> tuple[Any, Any, Callable[..., Any]]:
        torch.manual_seed(0)
        model: Any = Language(rate=0.0)
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

        def step(model: Any, words: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = next_word(model(words), words)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            return loss.detach()

        return model, optimizer, step

    def trained(model: Any, step: Any) -> list[Tensor]:
        for _ in range(2):
            step(model, words)
        whole = [p.detach() for p in model.parameters()]
        return [t.full_tensor() if isinstance(t, DTensor) else t.clone() for t in whole]

    model, _, step = made()
    expected = trained(model, step)
    model, optimizer, step = made()
    handle = jettison.auto_checkpoint(model, words, "1GiB", step=step, optimizer=optimizer)
    assert handle.plan is not None
    budget = Bytes(int(0.9 * handle.plan.predicted.peak_bytes))
    handle.remove()
    handle = jettison.auto_checkpoint(model, words, budget, step=step, optimizer=optimizer)
    same = all(map(torch.equal, trained(model, step), expected))
    gc.collect()
    meter = MemoryMeter(torch.device("cpu"), 1, lambda: [*alive([model], optimizer), words], storages=True)
    with meter.step() as peaks, meter.phase("step"):
        step(model, words)
    found = peaks()
    assert found is not None and handle.plan is not None
    longest = distributed.get_rank() == 0  # the others run under a plan for a longer batch than theirs
    predicted = handle.plan.predicted.peak_bytes
    return {
        "same": same,
        "budget": int(budget),
        "peaks": [[predicted if longest else found.peak_bytes, found.peak_bytes]],
    }


def in_fsdp2(model: Any) -> None:
    """Shard each layer, and the whole."""
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)


def in_tensor_parallel(model: Any) -> None:
    """Split both matmuls of each layer."""
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)


def thawing(parallel: Callable[[Any], None]) -> dict[str, Any]:
    """Layers are unfrozen one after the other; under FSDP2 batches of the ranks differ in their rows."""
    rank, split = distributed.get_rank(), parallel is in_tensor_parallel
    x = torch.randn(
        128 - (0 if split else 32 * rank), 32, generator=torch.Generator().manual_seed(0 if split else rank)
    )

    def made() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model: Any = Mlps(1)
        for layer in [*model.layers][:-1]:
            layer.requires_grad_(False)
        parallel(model)
        return model, torch.optim.AdamW(model.parameters(), 1e-3)

    def step(model: Any, x: Tensor) -> None:
        model(x).square().mean().backward()

    def run(model: Any, optimizer: Any, handle: Any = None) -> None:
        if handle is not None:
            handle.expect(x)
        step(model, x)
        optimizer.step()
        optimizer.zero_grad()

    def thawed(model: Any) -> Iterator[int]:
        yield 0
        for number in (1, 0):
            model.layers[number].requires_grad_(True)
            yield number

    def whole(model: Any) -> list[Tensor]:
        return [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]

    model, optimizer = made()
    for _ in thawed(model):
        run(model, optimizer)
        run(model, optimizer)
    expected = whole(model)
    model, optimizer = made()
    handle = jettison.auto_checkpoint(model, x, "1GiB", step=step, optimizer=optimizer)
    assert handle.plan is not None
    budget, peaks = Bytes(int(1.6 * handle.plan.predicted.peak_bytes)), []
    handle.remove()
    handle = jettison.auto_checkpoint(model, x, budget, step=step, optimizer=optimizer)
    for _ in thawed(model):
        run(model, optimizer, handle)
        gc.collect()
        meter = MemoryMeter(torch.device("cpu"), 1, lambda: [*alive([model], optimizer), x], storages=True)
        with meter.step() as counted, meter.phase("step"):
            run(model, optimizer, handle)
        found, plan = counted(), handle.plan
        assert found is not None and plan is not None
        own = rank and not split
        peaks.append([found.peak_bytes if own else plan.predicted.peak_bytes, found.peak_bytes])  # rank 0's is larger
    handle.remove()
    handle.expect(x)
    return {"same": all(map(torch.equal, whole(model), expected)), "budget": int(budget), "peaks": peaks}


def pipeline(kind: Any) -> dict[str, Any]:
    """More micro-batches than a dry run has; with two stages a rank where a schedule interleaves them."""
    rank, ranks, several = distributed.get_rank(), distributed.get_world_size(), issubclass(kind, PipelineScheduleMulti)
    last = (2 if several else 1) * ranks - 1
    second = last - rank if kind is ScheduleZBVZeroBubble else rank + ranks
    places = [rank, second] if several else [rank]
    words = torch.randint(0, 64, (48, 24), generator=torch.Generator().manual_seed(0))

    def made() -> tuple[nn.ModuleList, list[PipelineStage], Any]:
        torch.manual_seed(rank)
        modules = nn.ModuleList(Part(first=place == 0, last=place == last) for place in places)
        stages = [PipelineStage(m, n, last + 1, torch.device("cpu")) for m, n in zip(modules, places, strict=True)]
        return modules, stages, kind(stages if several else stages[0], 12, loss_fn=next_word)

    def step(schedule: Any, words: Tensor) -> None:
        target = words if last in places else None
        schedule.step(*([words] if rank == 0 else []), target=target, return_outputs=False)

    modules, _, schedule = made()
    step(schedule, words)
    expected = [p.grad for p in modules.parameters()]
    modules, stages, schedule = made()
    optimizer = torch.optim.AdamW(modules.parameters(), 1e-3)
    handle = jettison.auto_checkpoint(schedule, words, "1GiB", step=step, optimizer=optimizer)
    assert handle.plan is not None
    budget = Bytes(int(0.95 * handle.plan.predicted.peak_bytes))
    handle.remove()
    handle = jettison.auto_checkpoint(schedule, words, budget, step=step, optimizer=optimizer)
    step(schedule, words)
    same = all(map(torch.equal, (p.grad for p in modules.parameters()), expected))
    optimizer.zero_grad()

    def run() -> None:
        step(schedule, words)
        optimizer.step()
        optimizer.zero_grad()

    run()
    gc.collect()
    found = [getattr(info, "buffer", None) for stage in stages for infos in _received(stage) for info in infos]
    buffers = [buffer for buffer in found if buffer is not None]
    for buffer in buffers:
        buffer.grad = None  # a split backward leaves it there until the next step
    static = iter([*static_tensors(modules, words, optimizer), *buffers])
    del found, buffers
    buffer = None  # between stages on one rank: the step replaces them, and torch 2.15 has none here
    assert handle.plan is not None
    measured = measured_peak(run, static_tensors=static).peak_bytes
    return {"same": same, "budget": int(budget), "peaks": [[handle.plan.predicted.peak_bytes, measured]]}


def _received(stage: PipelineStage) -> Iterator[Any]:
    yield from stage.args_recv_info.values()
    yield from stage.grad_recv_info.values()


class Part(nn.Module):
    """Of a language model, for one stage."""

    def __init__(self, *, first: bool, last: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32) if first else nn.Identity()
        self.layers = nn.ModuleList(Mlp(32, 128) for _ in range(3))
        self.head = nn.Linear(32, 64) if last else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


LOOPS = {
    "1F1B": functools.partial(pipeline, Schedule1F1B),
    "GPipe": functools.partial(pipeline, ScheduleGPipe),
    "interleaved": functools.partial(pipeline, ScheduleInterleaved1F1B),
    "zero bubble": functools.partial(pipeline, ScheduleInterleavedZeroBubble),
    "looped BFS": functools.partial(pipeline, ScheduleLoopedBFS),
    "zero bubble V": functools.partial(pipeline, ScheduleZBVZeroBubble),
    "thawing under fsdp2": functools.partial(thawing, in_fsdp2),
    "thawing in tensor parallel": functools.partial(thawing, in_tensor_parallel),
    "gan under ddp": gan_under_ddp,
    "growing under ddp": growing_under_ddp,
    "whole step under fsdp2": whole_step_under_fsdp2,
}


def _run(names: Sequence[str]) -> dict[str, Any]:
    found = {}
    for name in names:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found[name] = LOOPS[name]()
        about_views = "returned a view tensor"  # FSDP2's own
        found[name]["said"] = sorted({str(w.message)[:90] for w in said if about_views not in str(w.message)})
    return found


def two_ranks(_: Any) -> dict[str, Any]:
    return _run(QUICK)


def two_ranks_more(_: Any) -> dict[str, Any]:
    return _run(MORE)
