"""One training step under every wrapper, with a plan and without: what ranks find. For `test_wrapped_steps`."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import jettison
from jettison.core.units import Bytes
from jettison.dryrun.counter import measured_peak, static_tensors
from jettison.train.engine import alive
from jettison.train.phase_memory import MemoryMeter
from support.toys import Mlp, Words

LAYERS, WIDTH, WORDS, ROWS, LENGTH = 4, 32, 100, 8, 32
TWO = ("blocks kept whole, accumulated", "ddp views accumulated without sync")
MORE = (
    "tp",  # also in test_train_ranks
    "blocks mixed",
    "blocks",
    "whole",
    "blocks offloaded",
    "nothing left for the root",
    "functions around",
    "replicated",
    "two in one unit",
    "gathered ahead",
    "ddp",
    "ddp views",
    "ddp accumulated without sync",
)
"""For which there is time in a slow test."""
REFERENCE = "beside a reference"
OWN = "parameters of its own"
FIRST = ("neither covers",)
"""Which first batches ranks have that share parameters."""
FIRST_MORE = ("longer", "longer, with shapes", "longer, with shapes on meta")
FOUR = ("hsdp", "tp and fsdp")


def wrapped(how: str) -> Any:
    torch.manual_seed(0)
    model, ranks = Words(WORDS, WIDTH, LAYERS), distributed.get_world_size()
    if "ddp" in how:
        return DistributedDataParallel(model, gradient_as_bucket_view="views" in how)
    axes = init_device_mesh("cpu", (2, ranks // 2) if how == "hsdp" else (ranks // 2, 2), mesh_dim_names=("a", "b"))
    if "tp" in how:
        for layer in model.layers:
            parallelize_module(layer, axes["b"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if how == "tp":
        return model
    mesh = axes if how == "hsdp" else axes["a"] if "tp" in how else init_device_mesh("cpu", (ranks,))
    if how == "functions around":
        for layer in model.layers:
            around(layer)
    options: dict[str, Any] = {"mesh": mesh}
    if "mixed" in how:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if "kept whole" in how:
        options["reshard_after_forward"] = False
    if "offloaded" in how:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if how == "replicated":
        for unit in (*model.layers, model):
            replicate(unit, mesh=mesh)
        return model
    if how == "two in one unit":
        for first in range(0, LAYERS, 2):
            fully_shard([model.layers[first], model.layers[first + 1]], **options)
    elif how == "nothing left for the root":
        for unit in (model.embed, *model.layers[:-1], [model.layers[-1], model.head]):
            fully_shard(unit, **options)
    elif how != "whole":
        for layer in model.layers:
            fully_shard(layer, **options)
    fully_shard(model, **options)
    if how == "gathered ahead":
        for number in range(1, LAYERS):
            model.layers[number].set_modules_to_backward_prefetch(list(model.layers[:number]))
    return model


def around(module: Any) -> None:
    """A function on the instance, around its forward."""
    own = module.forward
    module.forward = lambda x: own(x) * 2


def loss_of(model: Any, ids: Tensor) -> Tensor:
    logits = model(ids).float()
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def once(model: Any, ids: Tensor) -> Tensor:
    loss = loss_of(model, ids)
    loss.backward()
    return loss.detach()


def accumulated(model: Any, ids: Tensor) -> None:
    for part in ids.split(ROWS // 2):
        (loss_of(model, part) / 2).backward()


def without_sync(model: Any, ids: Tensor) -> None:
    first, last = ids.split(ROWS // 2)
    with model.no_sync():
        loss_of(model, first).backward()
    loss_of(model, last).backward()


def step_of(how: str) -> Callable[..., Any]:
    return without_sync if "without sync" in how else accumulated if "accumulated" in how else once


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(model: Any, optimizer: Any, step: Callable[..., Any], ids: Tensor) -> list[Tensor]:
    found = []
    for _ in range(2):
        step(model, ids)
        found += [whole(p.grad).clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(whole(p.detach()).clone() for p in model.parameters())]


def peak(how: str, model: Any, optimizer: Any, step: Callable[..., Any], ids: Tensor) -> int:
    """Of a step. DistributedDataParallel's buckets are there all along, and no operator makes them."""

    def run() -> None:
        result = step(model, ids)
        optimizer.step()
        del result
        optimizer.zero_grad()

    gc.collect()
    if "ddp" in how:
        buckets = sum(p.nbytes for p in model.parameters())
        return measured_peak(run, static_tensors=static_tensors(model, ids, optimizer)).peak_bytes + buckets
    meter = MemoryMeter(torch.device("cpu"), 1, lambda: [*alive([model], optimizer), ids], storages=True)
    with meter.step() as peaks, meter.phase("step"):
        run()
    found = peaks()
    assert found is not None
    return found.peak_bytes


def check(how: str) -> dict[str, Any]:
    step, share = step_of(how), 0.8
    same_batch = distributed.get_rank() // 2 if "tp" in how else distributed.get_rank()
    ids = torch.randint(0, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(same_batch))

    def made() -> tuple[Any, Any]:
        model = wrapped(how)
        return model, torch.optim.AdamW(model.parameters(), 1e-3)

    model, optimizer = made()
    expected, plain = train(model, optimizer, step, ids), peak(how, model, optimizer, step, ids)
    model, optimizer = made()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        handle = jettison.auto_checkpoint(model, ids, Bytes(int(share * plain)), optimizer=optimizer, step=step)
        got = train(model, optimizer, step, ids)
        measured = peak(how, model, optimizer, step, ids)
    assert handle.plan is not None
    return {
        "same": all(map(torch.equal, got, expected)),
        "plain": plain,
        "budget": int(share * plain),
        "predicted": handle.plan.predicted.peak_bytes,
        "measured": measured,
        "hash": handle.plan.hash,
        "said": sorted({str(w.message)[:80] for w in said if "returned a view tensor" not in str(w.message)}),
    }


def beside_a_reference() -> dict[str, Any]:
    """A frozen model that is sharded as well, and has no backward after which FSDP would take it apart again."""
    ids = torch.randint(0, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(distributed.get_rank()))
    reference = wrapped("blocks")
    for parameter in reference.parameters():
        parameter.requires_grad_(False)

    def apart(model: Any, frozen: Any, ids: Tensor) -> Tensor:
        with torch.no_grad():
            other = frozen(ids)
        loss = (model(ids) - 0.5 * other).square().mean()
        loss.backward()
        return loss.detach()

    def step(model: Any, ids: Tensor) -> Tensor:
        return apart(model, reference, ids)

    def made() -> tuple[Any, Any]:
        model = wrapped("blocks")
        return model, torch.optim.AdamW(model.parameters(), 1e-3)

    def high(model: Any, optimizer: Any) -> int:
        meter = MemoryMeter(torch.device("cpu"), 1, lambda: [*alive([model, reference], optimizer), ids], storages=True)
        gc.collect()
        with meter.step() as peaks, meter.phase("step"):
            result = step(model, ids)
            optimizer.step()
            del result
            optimizer.zero_grad()
        found = peaks()
        assert found is not None
        return found.peak_bytes

    model, optimizer = made()
    expected, plain = train(model, optimizer, step, ids), high(model, optimizer)
    model, optimizer = made()
    budget = int(0.8 * plain)
    handle = jettison.auto_checkpoint(
        model, ids, Bytes(budget), optimizer=optimizer, step=apart, models=(model, reference)
    )
    assert handle.plan is not None
    return {
        "same": all(map(torch.equal, train(model, optimizer, step, ids), expected)),
        "budget": budget,
        "predicted": handle.plan.predicted.peak_bytes,
        "measured": high(model, optimizer),
        "hash": handle.plan.hash,
    }


def first_batches(how: str) -> dict[str, Any]:
    """Each rank has a first batch of its own shape, and trains on others."""
    rank = distributed.get_rank()
    mine = {"longer": (ROWS, LENGTH - 12 * rank), "neither covers": (ROWS - 2 * rank, LENGTH - 12 + 12 * rank)}
    first = torch.randint(0, WORDS, mine["neither covers" if how == "neither covers" else "longer"])
    largest = torch.randint(0, WORDS, (ROWS, LENGTH))
    shapes = {"longer, with shapes": [largest], "longer, with shapes on meta": [largest.to("meta")]}.get(how, [])
    model = wrapped("blocks")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    handle = jettison.auto_checkpoint(model, first, "2MiB", optimizer=optimizer, step=once, shapes=shapes)
    expected = wrapped("blocks")
    plain = torch.optim.AdamW(expected.parameters(), 1e-3)
    same = True
    for length in (LENGTH - 12, LENGTH - 15):
        ids = torch.randint(0, WORDS, (ROWS - 2, length - rank))
        once(model, ids)
        once(expected, ids)
        pairs = zip(model.parameters(), expected.parameters(), strict=True)
        same = same and all(torch.equal(whole(a.grad), whole(b.grad)) for a, b in pairs)
        for one in (optimizer, plain):
            one.step()
            one.zero_grad()
    assert handle.plan is not None
    return {"same": same, "predicted": handle.plan.predicted.peak_bytes, "hash": handle.plan.hash}


class Own(nn.Module):
    """Each rank uses an expert of its own, and none the last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp(64, 256) for _ in range(LAYERS))
        self.experts = nn.ModuleList(nn.Linear(64, 512) for _ in range(distributed.get_world_size() + 1))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        loss: Tensor = self.experts[distributed.get_rank()](x).square().mean()
        return loss


def of_its_own() -> dict[str, Any]:
    """Parameters that only another rank uses have gradients and state, too."""
    x = torch.randn(256, 64)

    def made() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = DistributedDataParallel(Own(), find_unused_parameters=True)
        return model, torch.optim.AdamW(model.parameters(), 1e-3)

    def step(model: Any, x: Tensor) -> Tensor:
        loss: Tensor = model(x)
        loss.backward()
        return loss

    def trained(model: Any, optimizer: Any) -> list[Tensor]:
        for _ in range(2):
            step(model, x)
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    model, optimizer = made()
    expected, plain = trained(model, optimizer), peak("ddp", model, optimizer, step, x)
    model, optimizer = made()
    handle = jettison.auto_checkpoint(model, x, Bytes(int(0.88 * plain)), optimizer=optimizer)
    assert handle.plan is not None
    return {
        "same": all(map(torch.equal, trained(model, optimizer), expected)),
        "budget": int(0.88 * plain),
        "predicted": handle.plan.predicted.peak_bytes,
        "measured": peak("ddp", model, optimizer, step, x),
    }


def two_ranks(_: Any) -> dict[str, Any]:
    found = {how: check(how) for how in TWO} | {REFERENCE: beside_a_reference()}
    return found | {how: first_batches(how) for how in FIRST} | {OWN: of_its_own()}


def two_ranks_more(_: Any) -> dict[str, Any]:
    return {how: check(how) for how in MORE} | {how: first_batches(how) for how in (*FIRST, *FIRST_MORE)}


def four_ranks(_: Any) -> dict[str, Any]:
    return {how: check(how) for how in FOUR} | {FIRST[0]: first_batches(FIRST[0])}
