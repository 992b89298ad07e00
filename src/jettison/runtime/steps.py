"""One op that runs again, and the random state that it draws from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from jettison.capture.recording import TensorRef
from jettison.capture.signature import Switches
from jettison.errors import UsageError
from jettison.runtime.accelerator import is_capturing

_enter_vmap, _leave_vmap = torch._C._vmapmode_increment_nesting, torch._C._vmapmode_decrement_nesting


@dataclass(slots=True)
class RecipeStep:
    """One op to run again, with its arguments in a list: those of the call, or where tensors lie deeper, all leaves."""

    func: Callable[..., Any]
    leaves: list[Any]
    spec: Any  # how leaves become arguments; None where they are the positional ones
    named: dict[str, Any]  # the others then, which are no tensors
    tensors: list[tuple[int, int, TensorRef | None]]  # (position, buffer, view to take or None)
    outputs: list[tuple[int, int]]  # (flat output position, buffer), of those that somebody asks for
    written: list[tuple[tuple[int, ...], int, int]]  # (positions of the old buffer's views, it, the new buffer)
    consumes: tuple[int, ...]
    state_in: int | None
    state_out: int | None
    device: str
    waits: bool = False  # a collective: its results are there after waiting for them
    under: Switches | None = None  # kernel switches that the forward itself had set
    into: int | None = None  # position of the argument in whose memory the result is written; nobody else reads that
    needs: tuple[tuple[int, int], ...] = ()  # (buffer, op that makes it) of what runs before, the random state included

    def arguments(self, leaves: list[Any]) -> tuple[Any, dict[str, Any]]:
        """Positional ones, and those by name."""
        if self.spec is None:
            return leaves, self.named
        args, kwargs = tree_unflatten(leaves, self.spec)
        return args, kwargs


def arguments_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any, dict[str, Any]]:
    """Of a recorded call: ``leaves``, ``spec`` and ``named`` of its step."""
    nested = [arg for arg in args if isinstance(arg, list | tuple | dict)]
    if any(isinstance(leaf, TensorRef) for leaf in tree_leaves((nested, kwargs))):
        leaves, spec = tree_flatten((args, kwargs))
        return leaves, spec, {}
    return list(args), None, dict(kwargs)


class OutsideOfVmap:
    """Leave the levels of `vmap`: a backward over several gradients (``is_grads_batched``) refuses random ops."""

    __slots__ = ("levels",)

    def __enter__(self) -> Self:
        self.levels = _enter_vmap() - 1
        for _ in range(self.levels + 1):
            _leave_vmap()
        return self

    def __exit__(self, *_error: object) -> None:
        for _ in range(self.levels):
            _enter_vmap()


class Drawing(OutsideOfVmap):
    """The default generator stands at a state meanwhile, and then where it stood. With ``leaves``, ``after`` is the
    state in which the op left it. Raises `UsageError` in a CUDA graph, if the state is of another graph.
    """

    __slots__ = ("after", "before", "device", "leaves")

    def __init__(self, device: str, state: Tensor, *, leaves: bool = False) -> None:
        self.device, self.leaves = device, leaves
        self.before = get_state(device)
        if device == "cuda" and is_capturing():
            _refuse_another_graph(state, self.before)
        set_state(device, state)

    def __exit__(self, *_error: object) -> None:
        super().__exit__()
        if self.leaves:
            self.after = get_state(self.device)
        set_state(self.device, self.before)


def _refuse_another_graph(state: Tensor, now: Tensor) -> None:
    """Offsets of a generator count from the start of a capture: the forward of the same one has left it further on."""
    (seed, offset), (seed_now, offset_now) = state.view(torch.int64).tolist(), now.view(torch.int64).tolist()
    if seed != seed_now or offset >= offset_now:
        raise UsageError(
            "a CUDA graph is being captured of a backward that draws random numbers of its forward again (dropout), "
            "and that forward is not in the same graph. Capture forward and backward in one torch.cuda.graph, or plan "
            "with a policy that keeps what is drawn"
        )


def get_state(device: str) -> Tensor:
    """State of the default generator."""
    # detach() is an op that a dry run's allocation counter sees; reading the state is not
    return torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state().detach()


def set_state(device: str, state: Tensor) -> None:
    """Put a state of the default generator back."""
    if device == "cuda":
        torch.cuda.set_rng_state(state)
    else:
        torch.set_rng_state(state)
