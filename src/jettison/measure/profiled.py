"""Some steps of a loop under `torch.profiler`: any loop in which an optimizer of torch's makes steps.

Two steps run first, of which the first is only timed (it loads kernels and makes the optimizer's state) and the second
warms the profiler up. Then the loop is left.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.autograd import profiler as autograd_profiler
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from jettison.core.errors import UsageError
from jettison.core.progress import Progress, silent
from jettison.diagnose.profile_file import RECOMPUTES
from jettison.measure.peak import quiet_profiler
from jettison.runtime.frame import Frame

WARMUP_STEPS = 2


class Enough(BaseException):
    """All steps are recorded: leaves the loop past whatever catches errors."""


@dataclass(kw_only=True)
class Recorded:
    """What was seen: seconds of each step, those before the trace included."""

    seconds: list[float] = field(default_factory=list)


@contextmanager
def recorded(trace: Path, *, steps: int, progress: Progress = silent) -> Iterator[Recorded]:
    """Inside, ``steps`` steps are recorded into a trace, after `WARMUP_STEPS`; then `Enough` leaves what runs."""
    found = Recorded()

    def write(profiler: Any) -> None:
        profiler.export_chrome_trace(str(trace))

    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    turns = schedule(wait=1, warmup=WARMUP_STEPS - 1, active=steps, repeat=1)
    with (
        _annotated(),
        quiet_profiler(),
        profile(
            activities=kinds, schedule=turns, on_trace_ready=write, record_shapes=True, profile_memory=True
        ) as made,
    ):
        leads: list[int] = []
        last = time.perf_counter()

        def stepped(optimizer: torch.optim.Optimizer, *_: object) -> None:
            nonlocal last
            leads.append(id(optimizer)) if not leads else None
            if leads[0] != id(optimizer):
                return
            now = time.perf_counter()
            found.seconds.append(now - last)
            progress(f"step {len(found.seconds)} of {WARMUP_STEPS + steps}")
            made.step()
            last = time.perf_counter()
            if len(found.seconds) == WARMUP_STEPS + steps:
                raise Enough

        hook = register_optimizer_step_post_hook(stepped)
        try:
            with _alone(made):
                yield found
        except Enough:
            pass
        finally:
            hook.remove()


@contextmanager
def _alone(made: Any) -> Iterator[None]:
    """There can be one profiler at a time; torch 2.13 ends the process where a second one starts.

    Raises:
        UsageError: what runs inside starts one.
    """
    kinds: tuple[tuple[Any, str], ...] = (
        (torch.profiler.profile, "start"),
        (torch.profiler._KinetoProfile, "start"),
        (autograd_profiler.profile, "_prepare_trace"),
    )

    def refusing(begin: Any) -> Any:
        def begun(profiler: Any) -> Any:
            if profiler is not made and profiler is not made.profiler:
                raise UsageError(
                    "it profiles itself, and there can be one profiler at a time; give jettison profile the trace that "
                    "it writes, or switch its own profiler off"
                )
            return begin(profiler)

        return begun

    usual = [getattr(kind, name) for kind, name in kinds]
    for (kind, name), begin in zip(kinds, usual, strict=True):
        setattr(kind, name, refusing(begin))
    try:
        yield
    finally:
        for (kind, name), begin in zip(kinds, usual, strict=True):
            setattr(kind, name, begin)


@contextmanager
def _annotated() -> Iterator[None]:
    """What plans compute again has a name in the trace: its operators run without gradients, like any of backward's."""
    recompute: Any = Frame.recompute

    def named(frame: Any, handle: Any) -> Any:
        with record_function(RECOMPUTES):
            return recompute(frame, handle)

    Frame.recompute = named  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        Frame.recompute = recompute  # type: ignore[method-assign]
