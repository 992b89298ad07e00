"""Frames whose forward runs now, what they hear at module boundaries, and what a region does after an error."""

from __future__ import annotations

import threading
from collections.abc import Set
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from jettison.capture.dispatch import CaptureMode
from jettison.capture.recording import Place
from jettison.runtime.recipe import Recipe

if TYPE_CHECKING:
    from jettison.runtime.frame import Frame

_running = threading.local()


def regions_of(region: Any) -> list[Any]:
    """All regions of its model that are planned now."""
    found = [vars(module).get("forward") for module in region.model.modules()]
    return [one for one in found if getattr(one, "recordings", None) is not None]


def compute_less_again(region: Any, why: str, names: Set[str] = frozenset(), places: Set[Place] = frozenset()) -> None:
    """A step has stopped, since what this region computes with in backward is not what its forward had. From now on it
    and those of its class, which do alike things, keep what is computed of it; without a recording, all that they save.

    Args:
        names: parameters and buffers of the region that somebody wrote to.
        places: arguments that somebody wrote to.
    """
    for one in regions_of(region):
        written = {name for frame in one.frames for name in frame.written()}
        if type(one.module) is type(region.module):
            one.recordings.differs = why
            one.recordings.moves(written | names, places=places)
        else:
            one.recordings.moves(written)


def likely_kind(recipe: Recipe, slot: int, region: Any) -> str:
    """A guess at what a recording took as fixed and was not."""
    if recipe.slots[slot].kind == "offload":
        return "Something wrote to it, past autograd's version counters, before it had arrived there."
    program = recipe.trace.program
    changed = region.recordings.guard.words() if region.recordings.guard is not None else ""
    if changed:
        return f"Since it was recorded, {changed} changed."
    closure = program.closure(program.slots[slot].buffer)
    if any(recipe.trace.calls[i].state_in is not None for i in closure.ops):
        return "Its values come from a random stream that something moved between forward and its recompute."
    if recipe.trace.reads:
        return "Its forward reads numbers out of tensors."
    return "Its forward hangs on Python state, or on values, that were other ones when it was recorded."


def current_frame() -> Frame | None:
    """The innermost region that is running its forward on this thread."""
    stack = running()
    return stack[-1] if stack else None


def is_inside() -> bool:
    """Whether a region is running its forward, or being recorded, on this thread."""
    return bool(running()) or any(isinstance(mode, CaptureMode) for mode in _get_current_dispatch_mode_stack())


def running() -> list[Frame]:
    if not hasattr(_running, "stack"):
        _running.stack = []
    return _running.stack


class Listener:
    """A module hook that hands what crosses a boundary to the running frame. In a copy of the module it is deaf."""

    def __init__(self, region: Any, module: nn.Module | None, path: str, is_output: bool) -> None:
        self.region = region
        self.module = module
        self.path = path
        self.is_output = is_output

    of_a_region = True

    def __call__(self, module: nn.Module, args: Any, result: Any) -> None:
        frame = current_frame()
        if frame is None or frame.region is not self.region or module is not self.module:  # a shallow copy has it too
            return
        where = (self.path, self.is_output)
        call = frame.taps_seen.get(where, 0)
        frame.taps_seen[where] = call + 1
        frame.tap(self.path, self.is_output, call, result if self.is_output else (args, result))

    def __reduce__(self) -> Any:
        return Listener, (None, None, self.path, self.is_output)


class ViewsReplayed:
    """Backward goes back through a view that was written to view by view, as it does for the fake tensors that plans
    are made on. By itself autograd takes one ``as_strided`` for real ones, whose backward fills memory of its own.
    """

    __slots__ = ("before",)

    def __enter__(self) -> None:
        self.before = torch._C._is_view_replay_enabled()
        torch._C._set_view_replay_enabled(True)

    def __exit__(self, *_: object) -> None:
        torch._C._set_view_replay_enabled(self.before)
