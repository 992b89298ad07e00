"""A region while its forward runs: what its frame hears at module boundaries, and what undoing the run would take."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from jettison.errors import TraceError
from jettison.runtime.frame import Frame
from jettison.runtime.graphprint import next_sequence_number
from jettison.runtime.recipe import Recipe, get_state
from jettison.runtime.verify import SequenceCheck
from jettison.trace.capture import CaptureMode, TensorRef
from jettison.trace.wrapped import plain, wrapping

_running = threading.local()


class ActiveFrame(Frame):
    """A frame while its forward runs: it also listens at module boundaries."""

    __slots__ = ("check", "nested", "region", "start", "taps_seen")

    def __init__(self, recipe: Recipe, region: Any) -> None:
        super().__init__(recipe, region.name, region.owners, region.model)
        self.region = region
        self.check: SequenceCheck | None = None
        self.start = next_sequence_number()
        self.nested: list[tuple[int, int]] = []  # sequence numbers of the nodes that nested regions made
        self.taps_seen: dict[tuple[str, bool], int] = {}

    def tap(self, path: str, is_output: bool, call: int, tree: Any) -> None:
        """A module boundary was crossed; box what recipes want of it."""
        assert self.boxes is not None
        leaves: list[Any] | None = None
        for n, tap in self.recipe.from_taps:
            if tap.path == path and tap.is_output is is_output and tap.call == call:
                leaves = tree_leaves(tree) if leaves is None else leaves
                if tap.leaf < len(leaves) and _is(leaves[tap.leaf], tap.ref):
                    self.boxes[n].fill(leaves[tap.leaf])

    def block_done(self, output: Any) -> None:
        """A nested region has run; box its outputs if this region's recipes read them."""
        call = self.block_calls
        self.block_calls += 1
        wanted = self.recipe.from_blocks
        if wanted and self.boxes is not None:
            for leaf, tensor in enumerate(tree_leaves(output)):
                n = wanted.get((call, leaf))
                if n is not None and _is(tensor, self.recipe.trace.given[self.recipe.boxes[n]]):
                    self.boxes[n].fill(tensor)


def _is(found: Any, recorded: TensorRef) -> bool:
    """Whether a value can be the recorded one. Where a hook has changed it, its box stays empty, which `leave` sees."""
    if not isinstance(found, Tensor):
        return False
    inner = plain(found)
    return inner.shape == recorded.size and inner.dtype is recorded.dtype and wrapping(found) == recorded.wrap


def current_frame() -> ActiveFrame | None:
    """The innermost region that is running its forward on this thread."""
    stack = running()
    return stack[-1] if stack else None


def is_inside() -> bool:
    """Whether a region is running its forward, or being recorded, on this thread."""
    return bool(running()) or any(isinstance(mode, CaptureMode) for mode in _get_current_dispatch_mode_stack())


def running() -> list[ActiveFrame]:
    if not hasattr(_running, "stack"):
        _running.stack = []
    return _running.stack


class Listener:
    """A module hook that hands what crosses a boundary to the running frame. In a copied model it is deaf."""

    def __init__(self, region: Any, path: str, is_output: bool) -> None:
        self.region = region
        self.path = path
        self.is_output = is_output

    def __call__(self, _module: nn.Module, args: Any, result: Any) -> None:
        frame = current_frame()
        if frame is None or frame.region is not self.region:
            return
        where = (self.path, self.is_output)
        call = frame.taps_seen.get(where, 0)
        frame.taps_seen[where] = call + 1
        frame.tap(self.path, self.is_output, call, result if self.is_output else (args, result))

    def __reduce__(self) -> Any:
        return Listener, (None, self.path, self.is_output)


class Before:
    """Enough of the world to run a region's forward again: random states, and proof that nothing else changed."""

    def __init__(self, module: nn.Module, *, cuda: bool) -> None:
        self.module = module
        self.cpu = get_state("cpu")
        # dear on CUDA, and needed only where the region may draw
        self.cuda = torch.cuda.get_rng_state_all() if cuda and torch.cuda.is_initialized() else None
        self.versions = [b._version for b in module.buffers()]

    def restore(self, name: str, why: str) -> None:
        if self.versions != [b._version for b in self.module.buffers()]:
            raise TraceError(
                f"{name or 'the model'} did not run as recorded ({why}) and has written to its buffers, so it cannot "
                "be run again; leave it out with regions=[...]"
            )
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state_all(self.cuda)
