"""Random states of dropout: equal on all tensor-parallel ranks for unsharded activations, different for sharded ones.

NOTE [ Random states of tensor-parallel ranks ]
With sequence parallelism every dropout works on the rank's part of the heads or of the sequence: the default generators
differ between ranks (`seed_ranks`), and nothing else is needed. Without it, masks outside the blocks are equal, so
that the default generators have equal states, and the attention core has another one (`OwnDraws`): seeded with the rank
and one number drawn from the common state. A recording notes how the CPU's state becomes the rank's own, and what the
common one is afterwards (`OpRecorder.lend`), so that recipes restore both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from jettison.capture.dispatch import CaptureMode
from jettison.capture.randomness import Movement
from jettison.capture.recorder import OpRecorder
from jettison.parallel.tp_collectives import Axis

_STRIDE = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: seeds of neighbours share no pattern
_SEEDS = 2**62


def seed_ranks(seed: int, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Seed the default generators for training, after parameters have been made.

    Args:
        mesh: the tensor-parallel axis.
        sequence_parallel: every rank gets another state; otherwise all get the same.
    """
    torch.manual_seed(_mixed(seed, Axis.of(mesh).rank) if sequence_parallel else seed)


class OwnDraws:
    """A rank's own state of the default generators, from `begin` to `end`."""

    def __init__(self) -> None:
        self._before: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def begin(self, axis: Axis) -> None:
        """Switch to the rank's own state."""
        if axis.size == 1 or self._before is not None:
            return
        for recorder in _recorders():
            recorder.lend(Movement(_Borrow(axis.rank)), Movement(_TakeNumber()))
        seed = _TakeNumber()()
        with _disable_current_modes():
            cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
            self._before = torch.get_rng_state(), cuda
            torch.manual_seed(_mixed(seed, axis.rank))

    def end(self, *_: Any) -> None:
        """Return to the common state, if `begin` was called; may be a hook."""
        if self._before is None:
            return
        (cpu, cuda), self._before = self._before, None
        for recorder in _recorders():
            recorder.take_back()
        with _disable_current_modes():
            torch.set_rng_state(cpu)
            if cuda is not None:
                torch.cuda.set_rng_state(cuda)

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnDraws:
        return memo.setdefault(id(self), OwnDraws())


def _mixed(seed: int, rank: int) -> int:
    return (seed + (rank + 1) * _STRIDE) % 2**63


@dataclass(frozen=True, slots=True)
class _TakeNumber:
    """Draws from the common state the number that seeds the rank's own."""

    def __str__(self) -> str:
        return "take_number"

    def __call__(self) -> int:
        with _disable_current_modes():
            return int(torch.randint(_SEEDS, (), device="cpu"))


@dataclass(frozen=True, slots=True)
class _Borrow:
    """Sets the CPU's generator to the rank's own state. Its text, like a plan, is the same on every rank."""

    rank: int

    def __str__(self) -> str:
        return "borrow"

    def __call__(self) -> None:
        torch.default_generator.manual_seed(_mixed(_TakeNumber()(), self.rank))


def _recorders() -> list[OpRecorder]:
    """Recorders of the running regions, the innermost of each recording; outer ones break with a block's output."""
    modes = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, CaptureMode)]
    return [mode.recorders[-1] for mode in modes if mode.recorders]
