"""Moving some of what a compiled block saves, by its place among the saved tensors, which Inductor's split says.

NOTE [ Places ]
A compiled forward gives autograd what it saves in the order in which the split graph returns it, and each of these
tensors passes the saved-tensor hooks once. So a place is a node of that graph, and a buffer of the block's program
(`partition.Split`). One function may be compiled for several shapes: what runs says which of them it is, just before.
The split is made where the block is compiled, so code that comes ready from torch's cache of autograd graphs has none;
that cache is left out here (Inductor's own, of what g++ and Triton made, is not).

NOTE [ Whole storages ]
What stays behind of a storage holds all of it. Where saved tensors see most of a storage (queries, keys and values
that one product made), all of it goes, once.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from jettison.capture.compiled import CompileSettings
from jettison.capture.tensor_subclasses import storage_of
from jettison.capture.trees import tree_leaves
from jettison.runtime.callers import of_a_region
from jettison.runtime.handles import Held
from jettison.runtime.offload import Group
from jettison.runtime.offload_hooks import OffloadHooks
from jettison.solve.policy import CheckpointPolicy, offloaded_by
from jettison.solve.problem import Sent

if TYPE_CHECKING:
    from jettison.runtime.partition import Split
    from jettison.runtime.planned import PlannedForward

Runs = Callable[..., Any]
Says = Callable[["Split"], None]

_LISTENING = threading.local()


@contextlib.contextmanager
def listening(says: Says) -> Iterator[None]:
    """What `noting` has compiled says how it was split before it runs, in this thread."""
    before: Says | None = getattr(_LISTENING, "says", None)
    _LISTENING.says = says
    try:
        yield
    finally:
        _LISTENING.says = before


def noting(settings: CompileSettings, policy: CheckpointPolicy) -> Callable[[Any, Any], Runs]:
    """Inductor as a backend of `torch.compile` whose code says how it was split. See NOTE [ Places ]."""
    from torch._inductor.compile_fx import compile_fx

    from jettison.runtime.partition import Partition, watching_splits

    def backend(graph: Any, inputs: Any) -> Runs:
        patches = {**dict(settings.options), "custom_partitioner_fn": Partition(policy)}
        with watching_splits() as seen, torch._functorch.config.patch(enable_autograd_cache=False):
            run: Any = compile_fx(graph, inputs, config_patches=patches)
        if len(seen) != 1:  # nothing asks for gradients, or there are graphs inside of the graph
            return run
        (split,) = seen

        def says_and_runs(*args: Any) -> Any:
            says = getattr(_LISTENING, "says", None)
            if says is not None:
                says(split)
            return run(*args)

        return says_and_runs

    return backend


class _Stays(Held):
    """A saved tensor that stays: asking for it brings back what went before."""

    __slots__ = ()

    def open(self) -> Tensor:
        """See `Held`."""
        self[0].asked()
        return super().open()


class PlaceHooks(OffloadHooks):
    """Of one call of a compiled block.

    Args:
        policy: says what moves; None: nothing does in this call.
    """

    group: Group

    def __init__(self, lives: Iterable[Tensor], group: Group, policy: CheckpointPolicy | None) -> None:
        super().__init__(lives, group, smallest_bytes=1)
        self.policy = policy
        self.places: tuple[int | None, ...] = ()
        self.moved: frozenset[int] = frozenset()
        self.place = 0

    def split(self, found: Split) -> None:
        """What is about to run."""
        self.place, self.places = 0, found.saved
        self.moved = frozenset() if self.policy is None else offloaded_by(self.policy, found.program)

    @of_a_region
    def pack(self, tensor: Tensor) -> Any:
        """See `OffloadHooks`."""
        place, self.place = self.place, self.place + 1
        b = self.places[place] if place < len(self.places) else None
        if b is None or b not in self.moved:
            return _Stays(tensor, self.group)
        return self.sent(tensor)

    def range_of(self, part: Tensor, reach_bytes: int) -> tuple[int, int]:
        """See NOTE [ Whole storages ]."""
        size = part.element_size()
        whole = part.untyped_storage().nbytes() // size * size
        return (0, whole) if whole < 2 * reach_bytes else super().range_of(part, reach_bytes)


@contextlib.contextmanager
def staying() -> Iterator[None]:
    """What autograd saves passes hooks, as where something may move, and stays."""
    with torch.autograd.graph.saved_tensors_hooks(Held, _opened):
        yield


def _opened(held: Held) -> Tensor:
    return held.open()


class Looked:
    """What one call of a compiled block saved."""

    def __init__(self) -> None:
        self.places: tuple[int | None, ...] = ()
        self.tensors: list[Tensor] = []

    def split(self, found: Split) -> None:
        """See `PlaceHooks`."""
        self.places = found.saved
        self.tensors.clear()

    @of_a_region
    def pack(self, tensor: Tensor) -> Tensor:
        """Autograd saves a tensor."""
        self.tensors.append(tensor)
        return tensor

    def alone(self, alive: Iterable[Any], given: Sequence[Any], returned: Sequence[Any]) -> dict[int, Sent]:
        """By buffer, what is saved as one storage of its own and lives because of that alone; in the order of places.

        Args:
            alive: parameters, and whatever else is there anyway.
            given: leaves of the arguments.
            returned: leaves of the results.
        """
        storages: dict[int, dict[int, Tensor]] = {}  # by buffer
        owners: dict[int, set[int | None]] = {}
        for place, tensor in enumerate(self.tensors):
            b, storage = self.places[place] if place < len(self.places) else None, storage_of(tensor)
            owners.setdefault(storage, set()).add(b)
            if b is not None:
                storages.setdefault(b, {})[storage] = tensor
        living = {storage_of(t) for t in alive if isinstance(t, Tensor)}
        found = {}
        for b, seen in storages.items():
            (storage, tensor), *more = seen.items()
            nbytes = tensor.untyped_storage().nbytes()
            if not more and owners[storage] == {b} and storage not in living and nbytes:
                place_of = _place(storage, given, is_result=False) or _place(storage, returned, is_result=True)
                found[b] = Sent(nbytes=nbytes, place=place_of)
        return found


def _place(storage: int, leaves: Sequence[Any], *, is_result: bool) -> tuple[bool, int] | None:
    at = (i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and storage_of(leaf) == storage)
    return next(((is_result, i) for i in at), None)


@contextlib.contextmanager
def looking() -> Iterator[Looked]:
    """What a compiled block saves in here, which it is to do once."""
    found = Looked()
    with listening(found.split), torch.autograd.graph.saved_tensors_hooks(found.pack, lambda tensor: tensor):
        yield found


def run_sending(region: PlannedForward, run: Runs, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One call, of which what the policy names goes to the host. A call that sends nothing has its place in the order
    of copies too.
    """
    group = region.begin_group(moves=True)
    assert group is not None
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    lives = [*region.module.parameters(), *region.module.buffers(), *(leaf for leaf in given if leaf.is_leaf)]
    hooks = PlaceHooks(lives, group, None if region.stays() else region.way.policy)
    try:
        with listening(hooks.split), torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
            return run(*args, **kwargs)
    finally:
        hooks.close()
        group.end()
