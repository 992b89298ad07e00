"""The first real run of every region is checked, op by op, against what was recorded on fake tensors."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from jettison.runtime.frame import Diverged
from jettison.trace.capture import RegionTrace, signature_of
from jettison.trace.opinfo import computes, is_bookkeeping
from jettison.trace.wrapped import desugars, infers_shapes


class SequenceCheck(TorchDispatchMode):
    """Raises `Diverged` at the first ATen call that is not the recorded one, or returns other shapes or strides.

    Casts that autocast took from its cache are recorded but do not happen: they are skipped.
    """

    def __init__(self, trace: RegionTrace) -> None:
        super().__init__()
        self.sequence = trace.sequence
        self.at = 0
        self.paused = False  # while a nested region, which checks itself, is running

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if desugars(types):
            return NotImplemented
        out = func(*args, **kwargs)
        if self.paused or infers_shapes() or is_bookkeeping(func) or not computes(func, args, kwargs, out):
            return out
        got = signature_of(func, args, kwargs, out)
        while self.at < len(self.sequence):
            expected, skippable = self.sequence[self.at]
            self.at += 1
            if expected == got:
                return out
            if not skippable:
                raise Diverged(f"call {self.at} was {_text(got)}, recorded was {_text(expected)}")
        raise Diverged(f"call {got[0]} came after the last recorded one")

    def finish(self) -> None:
        """The forward is over: nothing that was recorded may still be to come."""
        missing = [signature for signature, skippable in self.sequence[self.at :] if not skippable]
        if missing:
            raise Diverged(f"{len(missing)} recorded calls did not come, first {missing[0][0]}")


def _text(signature: tuple[Any, ...]) -> str:
    func, results, numbers = signature
    return f"{func}({', '.join(numbers)}) -> {list(results)}"
