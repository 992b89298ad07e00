"""Running a forward on fake tensors so that nothing of it stays behind.

The module is a copy, and so are the objects among its arguments. What a copy does not cover are tables that the code
reaches by name or closure (side stores, functions with a cache) and the random streams of Python and numpy: they are
put back, and a recording that drew from such a stream is refused, since it cannot hold what was drawn.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from jettison.capture.python_state import Reach
from jettison.capture.snapshots import MOST_BYTES
from jettison.capture.streams import OutsideTorch
from jettison.core.errors import TraceError, UnsupportedModule


class Isolation:
    """What a run on fake tensors changes outside of them."""

    def __init__(self, modules: Iterable[nn.Module], values: Iterable[Any]) -> None:
        values = list(values)
        self.reach = Reach(modules, values)
        self.leaves = [(v, v.requires_grad) for v in values if isinstance(v, Tensor) and v.is_leaf]
        self.streams = OutsideTorch.now()

    def refuse_draws(self) -> None:
        """A recording cannot hold what came out of a stream that it does not know.

        Raises:
            TraceError: numbers were drawn from one.
        """
        moved = self.streams.moved()
        if moved:
            raise TraceError(f"it draws from {' and '.join(moved)}")
        drawn = self.reach.drawn()
        if drawn:
            raise TraceError(f"a {type(drawn[0]).__name__} was drawn from: a generator of its own")

    def refuse_writes(self) -> None:
        """A recording does not see what NumPy writes.

        Raises:
            TraceError: it wrote to the memory of a tensor.
        """
        written = self.reach.written_arrays()
        if written:
            raise TraceError(
                f"NumPy writes to the memory of a tensor (an array of {written[0].nbytes} bytes), which no op tells"
            )

    def undo_draws(self) -> None:
        """Put random streams back."""
        self.streams.restore()
        self.reach.restore_streams()

    def undo(self) -> None:
        """Put everything back.

        Raises:
            UnsupportedModule: something has gone on that cannot be put back.
        """
        self.streams.restore()
        self.reach.restore()
        for leaf, wanted in self.leaves:  # a model of forces asks for the gradient of the positions that it is given
            if leaf.is_leaf and leaf.requires_grad != wanted:
                leaf.requires_grad_(wanted)


@contextlib.contextmanager
def leaving_nothing(
    modules: Iterable[nn.Module], values: Iterable[Any] = (), replaced: Iterable[tuple[Any, Any]] = ()
) -> Iterator[Isolation]:
    """Python's state is as it was when this ends; what tensors hold is `undo`'s.

    Args:
        replaced: objects, and what the run finds where its code holds them.

    Raises:
        UnsupportedModule: something moved that cannot be put back, or would have moved.
    """
    state = Isolation(modules, values)
    state.reach.replace(replaced)
    state.reach.set_aside()
    try:
        yield state
    except (ValueError, TraceError) as error:
        if "read-only" in str(error) and state.reach.arrays:
            sizes = ", ".join(str(array.nbytes) for array in state.reach.arrays)
            raise UnsupportedModule(
                f"the forward writes to a numpy array that outlives it ({error}). Planning and recording run the "
                f"forward once more, and arrays of more than {MOST_BYTES} bytes cannot be put back, so it has not been "
                f"touched (arrays of {sizes} bytes are in reach): write to a copy, or to a tensor"
            ) from error
        raise
    finally:
        state.undo()
    state.reach.raise_refused()


@contextlib.contextmanager
def without_our_hooks() -> Iterator[None]:
    """Autograd saves as it does without a plan or a recording: `torch.func` refuses to run under saved-tensor hooks."""
    autograd: Any = torch._C._autograd
    taken = []
    while (top := autograd._top_saved_tensors_default_hooks(True)) is not None:
        if not str(getattr(top[0], "__module__", "")).startswith("jettison."):
            break
        taken.append(top)
        autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(taken):
            autograd._push_saved_tensors_default_hooks(pack, unpack)


@contextlib.contextmanager
def without_plans(module: nn.Module) -> Iterator[None]:
    """The module and its submodules run their own forwards, where an earlier plan has put its own in their place."""
    taken = [(one, own) for one in module.modules() if _is_of_a_plan(own := vars(one).get("forward"))]
    for one, own in taken:
        if own.had_own:
            vars(one)["forward"] = own.forward
        else:
            del vars(one)["forward"]
    try:
        yield
    finally:
        for one, own in taken:
            vars(one)["forward"] = own


def _is_of_a_plan(forward: Any) -> bool:
    return getattr(forward, "of_a_region", False) and hasattr(forward, "had_own")


def forward_of(module: nn.Module, fake_model: nn.Module) -> Callable[..., Any]:
    """The fake copy's own forward: its class's, or what stands in the place of the class's on the instance."""
    own: Any = vars(fake_model).get("forward")
    if own is not None:  # a planned region's stand-in hands on to what it stands in for
        forward: Callable[..., Any] = own.forward if getattr(own, "of_a_region", False) else own
        return forward
    kind: Any = type(module)
    return types.MethodType(kind.forward, fake_model)
