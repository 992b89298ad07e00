"""Engines for the regions of a model: which device they are for, and how much of the host a step will take."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from jettison.capture.model_trace import ModelTrace
from jettison.capture.tensor_subclasses import plain
from jettison.runtime.accelerator import device_for
from jettison.runtime.device import Device
from jettison.runtime.host_pool import HostPool, slabs_for
from jettison.runtime.offload import OffloadEngine
from jettison.solve.policy import Offload, offloaded_by

if TYPE_CHECKING:
    from jettison.runtime.planned import PlannedForward


def engine_for(place: torch.device, budget_bytes: int | None = None, *, dry: bool = False) -> OffloadEngine:
    """Return an engine for tensors of one device.

    Args:
        budget_bytes: what pinning may take from the host; None: what the host has.
        dry: tensors are fake: the same moments, and no copies.

    Raises:
        UsageError: nothing can be moved from there; or a budget below 0.
    """
    device = Device(place) if dry else device_for(place)
    pool = HostPool(device, None, left=None) if dry else HostPool(device, budget_bytes)
    return OffloadEngine(device, pool, place)


shared_engine = functools.cache(engine_for)
"""Of regions that belong to no plan of a model: functions."""


def place_of(module: nn.Module, values: Iterable[Any] = ()) -> torch.device:
    """Where a module computes: the accelerator that something of it is on, else the CPU."""
    tensors = [*module.parameters(), *module.buffers(), *(v for v in values if isinstance(v, Tensor))]
    places = {plain(tensor).device for tensor in tensors}
    return min((p for p in places if p.type not in ("cpu", "meta")), key=str, default=torch.device("cpu"))


def host_slabs(
    traced: ModelTrace, regions: Mapping[str, PlannedForward], rounded: Callable[[int], int]
) -> tuple[int, ...]:
    """Slabs for what one forward sends to the host, and its backward has back.

    Args:
        regions: by block name, with their recordings; the model's own under no name.
        rounded: what pinning so many bytes takes.
    """
    sizes: list[int] = []
    for call in traced.calls[:-1]:
        region, made = regions[call.name], traced.classes[call.class_key].compiled
        if made is None:
            sizes += _moved_bytes(region, call.signature)
        elif not isinstance(region.way.policy, Offload):  # sizes of what goes as it comes by show then
            sizes += [made.program.buffers[b].nbytes for b in sorted(offloaded_by(region.way.policy, made.program))]
    return slabs_for([*sizes, *_moved_bytes(regions[""], traced.root_signature)], rounded)


def _moved_bytes(region: PlannedForward, signature: Any) -> list[int]:
    prepared = region.recordings.prepared.get((region.recordings.number, signature))
    recipe = prepared.recipe if prepared is not None else None
    return [] if recipe is None else [move.host_bytes for move in recipe.moved.values()]
