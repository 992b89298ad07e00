"""Blocks that cannot be regions of their own, although they look like blocks: what to plan instead.

A region is known by what it gets and what it returns. A block that returns a generator has not run when it returns; one
that reads a tensor of another block's graph out of a side store cannot be looked at alone. What such blocks do belongs
to the region around them. Where it is the code around the blocks that decides by values, the smallest module that does
so becomes a region itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from jettison.capture.recorder import Recorder, ValuesRead
from jettison.capture.recording import RegionTrace
from jettison.core.errors import TraceError

VALUES_WANTED = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


class OtherRegions(TraceError):
    """Raised while a model is traced: it can be, with these ``regions``, or by ``guesses``. The text says why."""

    def __init__(self, regions: Sequence[str], why: str, *, guesses: bool = False) -> None:
        super().__init__(why)
        self.regions = tuple(regions)
        self.guesses = guesses


def refuse_unfit(name: str, trace: RegionTrace, alike: Sequence[str], names: Sequence[str]) -> None:
    """Whether a block can be a region.

    Args:
        alike: names of the blocks of its class.
        names: of all blocks.

    Raises:
        OtherRegions: it cannot.
    """
    if trace.entangled:
        raise OtherRegions(
            (),
            f"{name} reads a tensor that another block computed and that is none of its arguments (out of a side "
            "store, say), so that the model is planned as one region instead of block by block",
        )
    if any(isinstance(leaf, Iterator) for leaf in trace.output_leaves):
        raise OtherRegions(
            [n for n in names if n not in alike],
            f"{name} returns a generator, which runs later: blocks of its class belong to the region around them",
        )


@contextlib.contextmanager
def values_wanted(root: Recorder, names: Sequence[str], *, real: bool, guesses: bool) -> Iterator[None]:
    """What to do where the code around the blocks asks for values that fake tensors do not have.

    Args:
        root: its recorder, which knows the module that is running.
        names: of all blocks.
        real: there is a real model, of which a module that cannot be recorded can be observed.
        guesses: values are made up already.

    Raises:
        OtherRegions: that module can be a region, or the values can be made up.
        TraceError: neither helps.
    """
    try:
        yield
    except (*VALUES_WANTED, ValuesRead) as error:
        path = root.where
        got = f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
        apart = not any(f"{name}.".startswith(f"{path}.") or path.startswith(f"{name}.") for name in names)
        if path and apart and real:
            why = f"what {path} does hangs on values ({got}), so that it is a region of its own"
            raise OtherRegions([*names, path], why) from error
        if not guesses and not isinstance(error, ValuesRead):
            why = (
                f"what {path or 'the model'} does around its blocks hangs on values that are not known when it is "
                f"planned ({got}): conditions count as true, numbers as 1 and masks as choosing everything; where "
                "they are not, a step may need more or less than was planned (gradients are not affected)"
            )
            raise OtherRegions(names, why, guesses=True) from error
        raise TraceError(
            f"{path or 'the model'} itself, around its blocks, decides by values that are not known when it is planned "
            f"({got}); put that code into a module of its own and name it with regions=[...], or compute it from the "
            "output with loss_fn=..."
        ) from error
