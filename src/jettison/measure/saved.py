"""What planned regions really hold between forward and backward, counted on the real tensors.

An observation, not a copy of the prediction: it listens to what each region hands to autograd in the place of a saved
tensor, lets go of it, and then counts the storages that are still alive, each once.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from jettison.capture.model_trace import LossFn, call_model, loss_of
from jettison.runtime.callers import of_a_region
from jettison.runtime.frame import Frame
from jettison.runtime.handles import Handle, Held

OUTSIDE = "loss"
"""Key of what a loss holds that is computed after the model's forward."""


@dataclass(kw_only=True)
class _Listener:
    """What every region packed, in order, and what was saved outside of all of them."""

    packed: list[tuple[str, Any]] = field(default_factory=list)
    outside: list[Tensor] = field(default_factory=list)
    given: list[set[torch.UntypedStorage]] = field(default_factory=list)

    @contextmanager
    def regions(self) -> Iterator[None]:
        """Listen where regions get their arguments, and at the one place where they decide."""
        enter: Callable[..., None] = Frame.enter
        pack: Callable[[Frame, Tensor], Any] = Frame.pack

        def entering(frame: Frame, leaves: list[Any], *more: Any) -> None:
            if frame.name:
                self.given.append({leaf.untyped_storage() for leaf in leaves if isinstance(leaf, Tensor)})
            enter(frame, leaves, *more)

        @of_a_region
        def packing(frame: Frame, tensor: Tensor) -> Any:
            packed = pack(frame, tensor)
            self.packed.append((frame.name, packed))
            return packed

        Frame.enter, Frame.pack = entering, packing  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            Frame.enter, Frame.pack = enter, pack  # type: ignore[method-assign,assignment]

    @contextmanager
    def loss(self) -> Iterator[None]:
        """Listen to plain autograd."""

        def pack(tensor: Tensor) -> Tensor:
            # a node that saves its own result, with its graph, would own itself: no backward comes to free it
            bare = tensor if tensor.is_leaf else tensor.detach()
            self.outside.append(bare)
            return bare

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield

    def shared(self) -> frozenset[int]:
        """Storages that several block calls were given."""
        uses = Counter(storage._cdata for storages in self.given for storage in storages)
        return frozenset(key for key, count in uses.items() if count > 1)

    def settle(self) -> list[tuple[str, Any, int]]:
        """(region, weak reference to a storage, its bytes), and nothing is held any more."""
        tensors = [found for name, packed in self.packed for found in _tensors(name, packed)]
        tensors += [(OUTSIDE, tensor) for tensor in self.outside]
        self.packed.clear()
        self.outside.clear()
        self.given.clear()
        storages = [(name, tensor.untyped_storage()) for name, tensor in tensors]
        return [(name, weakref.ref(storage), storage.nbytes()) for name, storage in storages]


def observed_saved_bytes(
    model: nn.Module, batch: Any, *, loss_fn: LossFn | None = None, order: tuple[str, ...] = ()
) -> dict[str, int]:
    """Bytes alive between forward and backward because a region holds them, by region name ("" is the root).

    A storage that the root holds, or that several block calls were given, is the root's; else it belongs to the first
    block that holds it (NOTE [ Whose bytes ] in capture/entries.py). Parameters and registered buffers cost a step
    nothing and are left out. Runs one forward of ``model``, whose regions must be planned, and no backward.

    Args:
        order: names to report even where nothing is held.
    """
    listener = _Listener()
    with torch.enable_grad(), listener.regions():
        output = call_model(model, batch)
        with listener.loss():
            loss = loss_of(output, loss_fn)
    del output
    shared = listener.shared()
    held = listener.settle()
    free = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    owners: dict[int, tuple[list[str], int]] = {}
    for name, weak, nbytes in held:
        storage = weak()
        if storage is not None and storage._cdata not in free:
            owners.setdefault(storage._cdata, ([], nbytes))[0].append(name)
    del loss
    totals = dict.fromkeys(order, 0)
    for key, (names, nbytes) in owners.items():
        owner = "" if "" in names or key in shared else names[0]
        totals[owner] = totals.get(owner, 0) + nbytes
    return totals


def _tensors(name: str, packed: Any) -> Iterator[tuple[str, Tensor]]:
    """What a packed tensor holds, with the region that holds it: within a checkpoint segment, also an earlier block."""
    if isinstance(packed, Held):
        yield name, packed[1]
    elif isinstance(packed, Handle):
        for box in packed.boxes:
            if isinstance(box, Handle):
                yield from _tensors(box.frame.name, box)
            elif (held := box.on_device) is not None:
                yield name, held
