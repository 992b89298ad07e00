"""What ranks do for tests/runtime/test_offload_ranks.py: plans that move under FSDP2 and tensor parallelism."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import jettison
from jettison.verify.differences import same_bits
from support.offloading import ALL, INPUTS, Shuffled
from support.recorder import Earliest, Latest, recorder_of
from support.toys import Words
from support.transfers import Direction, transfers_of

WORDS, WIDTH, ROWS, LENGTH, BLOCKS = 40, 16, 4, 8, 4


def built(how: str, size: int) -> nn.Module:
    """The same weights each time, under a wrapper."""
    torch.manual_seed(1)
    model = Words(WORDS, WIDTH, BLOCKS)
    if "tensor parallel" in how:
        mesh = init_device_mesh("cpu", (size,))
        local = "dtensor" not in how
        plan = {f"layers.{i}.up": ColwiseParallel(use_local_output=local) for i in range(BLOCKS)}
        plan |= {f"layers.{i}.down": RowwiseParallel() for i in range(BLOCKS)}
        parallelize_module(model, mesh, plan)
    if "fsdp" in how:
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    return model


def step(model: nn.Module, ids: Tensor) -> None:
    """Forward and backward."""
    model.zero_grad(set_to_none=True)
    nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()


def local(tensor: Any) -> Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def check(args: Any) -> Any:
    """Gradients to the bit under every order, races, and what moved, by wrapper and policy."""
    size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    ids = torch.randint(0, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(rank if args["own"] else 0))
    found = {}
    for how in args["wrappers"]:
        for word, policy in (("all", ALL), ("inputs", INPUTS)):
            planned, plain = built(how, size), built(how, size)
            with jettison.apply(planned, policy, batch=ids, loss_fn=lambda y: y.square().mean()) as handle:
                engine = handle.offload
                assert engine is not None
                device = recorder_of(engine)
                differing: list[str] = []
                for order in (Latest(), Earliest(), Shuffled(rank)):
                    device.order = order
                    step(planned, ids)
                    step(plain, ids)
                    differing += [
                        name
                        for (name, p), q in zip(planned.named_parameters(), plain.parameters(), strict=True)
                        if p.grad is None or q.grad is None or not same_bits(local(p.grad), local(q.grad))
                    ]
                out = [t.nbytes for t in transfers_of(engine) if t.direction is Direction.OUT]
                slots = [slot.action for region in handle.report() for slot in region.slots]
                found[f"{how}, {word}"] = {
                    "differing": differing,
                    "races": [str(race) for race in device.races],
                    "out": len(out) // 3,
                    "slots": slots.count("offload"),
                    "fallbacks": [region.fallback for region in handle.report() if region.fallback],
                    "left": engine.pool.live_bytes,
                }
    return found
