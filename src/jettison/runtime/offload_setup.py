"""Engines for the regions of a model: which device they are for, and how much of the host a step will take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from jettison.capture.model_trace import ModelTrace
from jettison.capture.tensor_subclasses import plain
from jettison.ledger.program import Program
from jettison.runtime.accelerator import device_for
from jettison.runtime.device import Imagined
from jettison.runtime.host_pool import HostPool, Layout, Lifetime, laid_out
from jettison.runtime.offload import OffloadEngine
from jettison.solve.policy import CheckpointPolicy, Offload, offloaded_by

if TYPE_CHECKING:
    from jettison.runtime.planned import PlannedForward

_shared: dict[torch.device, OffloadEngine] = {}


def engine_for(place: torch.device, budget_bytes: int | None = None) -> OffloadEngine:
    """For tensors of one device.

    Args:
        budget_bytes: what pinning may take from the host; None: what the host has.

    Raises:
        UsageError: nothing can be moved from there; or a budget below 0.
    """
    device = device_for(place)
    return OffloadEngine(device, HostPool(device, budget_bytes), place)


def imagined_engine(place: torch.device) -> OffloadEngine:
    """For fake tensors: the same moments, and no copies."""
    device = Imagined(place)
    return OffloadEngine(device, HostPool(device, left=None), place)


def shared_engine(place: torch.device) -> OffloadEngine:
    """Of regions that belong to no plan of a model: functions."""
    if place not in _shared:
        _shared[place] = engine_for(place)
    return _shared[place]


def place_of(module: nn.Module, values: Iterable[Any] = ()) -> torch.device:
    """Where a module computes: the accelerator that something of it is on, else the CPU."""
    tensors = [*module.parameters(), *module.buffers(), *(v for v in values if isinstance(v, Tensor))]
    places = {plain(tensor).device for tensor in tensors}
    return min((p for p in places if p.type not in ("cpu", "meta")), key=str, default=torch.device("cpu"))


def host_layout(
    traced: ModelTrace, regions: Mapping[str, PlannedForward], rounded: Callable[[int], int] = int
) -> Layout:
    """What one forward and its backward have on the host: bytes go in the order of calls, and come back in reverse.

    Args:
        regions: by block name, with their recordings; the model's own under no name.
        rounded: what pinning so many bytes takes.
    """
    sizes: list[int] = []
    last = len(traced.calls) - 1
    for number, call in enumerate(traced.calls):
        if number == last:
            continue
        made = traced.classes[call.class_key].compiled
        if made is not None:
            moved = sorted(_moved_by_name(regions[call.name].way.policy, made.program))
            sizes += [made.program.buffers[b].nbytes for b in moved]
        else:
            sizes += _moved_bytes(regions[call.name], call.signature)
    sizes += _moved_bytes(regions[""], traced.root_signature)
    end = 2 * len(sizes)
    return laid_out([Lifetime(nbytes=size, begins=i, ends=end - i) for i, size in enumerate(sizes)], rounded)


def _moved_by_name(policy: CheckpointPolicy, program: Program) -> frozenset[int]:
    """Not what goes as it comes by, whose sizes show then."""
    return frozenset() if isinstance(policy, Offload) else offloaded_by(policy, program)


def _moved_bytes(region: PlannedForward, signature: Any) -> list[int]:
    prepared = region.recordings.prepared.get((region.recordings.number, signature))
    recipe = prepared.recipe if prepared is not None else None
    return [] if recipe is None else [move.host_bytes for move in recipe.moved.values()]
