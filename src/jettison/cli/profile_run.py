"""`profile` of a script or a recipe: some of its steps run under `torch.profiler`, and the trace is read."""

from __future__ import annotations

import runpy
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.autograd import profiler as autograd_profiler
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from jettison.cli.train import train
from jettison.core.errors import UsageError
from jettison.core.objects import swapped
from jettison.core.progress import Progress, silent
from jettison.diagnose.profile_file import MODULE, RECOMPUTES
from jettison.dryrun.counter import quiet_profiler
from jettison.runtime.saved_tensor_hooks import Frame
from jettison.train.recipe import CheckpointSection, EvalSection, ExportSection, read_recipe

WARMUP_STEPS = 2


def record_run(target: str, trace: Path, *, steps: int, progress: Progress) -> list[float]:
    """Run it until ``steps`` steps are recorded into a trace, after two, or it ends. Return the seconds of all steps.

    Of a recipe nothing is kept: no log, no checkpoint, no weights. Raise `UsageError` if there is no such file, or no
    optimizer of torch's made so many steps.

    Args:
        target: a Python file, or a recipe as `train` takes it.
    """
    if steps < 1:
        raise UsageError(f"got --steps {steps}; expected 1 or more")
    is_script = target.endswith(".py")
    with recorded(trace, steps=steps, progress=progress) as seconds:
        if is_script:
            with _as_script(Path(target)):
                runpy.run_path(target, run_name="__main__")
        else:
            _train(target, WARMUP_STEPS + steps, progress)
    if len(seconds) <= WARMUP_STEPS:
        raise UsageError(
            f"{target} ended after {len(seconds)} optimizer steps; more than {WARMUP_STEPS} are needed, of "
            "optimizers of torch's"
        )
    return seconds


@contextmanager
def _as_script(path: Path) -> Iterator[None]:
    """Set ``sys.argv`` and ``sys.path`` as Python does for a script."""
    arguments, sys.argv = sys.argv, [str(path)]
    sys.path.insert(0, str(path.resolve().parent))
    try:
        yield
    except SystemExit:
        pass
    finally:
        sys.argv = arguments
        sys.path.remove(str(path.resolve().parent))


def _train(target: str, steps: int, progress: Progress) -> None:
    asked = read_recipe(target)
    with tempfile.TemporaryDirectory(prefix="jettison-profile-") as folder:
        # memory is measured by torch's profiler as well, and there can be one at a time
        log = replace(asked.log, folder=f"{folder}/log", report=False, memory_steps=0)
        checkpoint, evaluation, export = CheckpointSection(), EvalSection(), ExportSection()
        recipe = replace(asked, steps=steps, log=log, checkpoint=checkpoint, eval=evaluation, export=export)
        train(recipe, progress=progress)


class Enough(BaseException):
    """All steps are recorded: leaves the loop past whatever catches errors."""


@contextmanager
def recorded(trace: Path, *, steps: int, progress: Progress = silent) -> Iterator[list[float]]:
    """Record ``steps`` steps into a trace after `WARMUP_STEPS`, then raise `Enough`. Yield the seconds of all steps."""
    seconds: list[float] = []

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
            seconds.append(now - last)
            progress(f"step {len(seconds)} of {WARMUP_STEPS + steps}")
            made.step()
            last = time.perf_counter()
            if len(seconds) == WARMUP_STEPS + steps:
                raise Enough

        hook = register_optimizer_step_post_hook(stepped)
        try:
            with _alone(made):
                yield seconds
        except Enough:
            pass
        finally:
            hook.remove()


@contextmanager
def _alone(made: Any) -> Iterator[None]:
    """There can be one profiler at a time; torch 2.13 ends the process where a second one starts. Raise `UsageError` if
    what runs inside starts one.
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

    with ExitStack() as stack:
        for kind, name in kinds:
            stack.enter_context(swapped(kind, **{name: refusing(getattr(kind, name))}))
        yield


@contextmanager
def _annotated() -> Iterator[None]:
    """Name calls of modules in the trace, and what plans recompute: it runs without gradients, as backward does."""
    recompute: Any = Frame.recompute
    names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
    calls = threading.local()

    def named(frame: Any, handle: Any) -> Any:
        with record_function(RECOMPUTES):
            return recompute(frame, handle)

    def enter(module: nn.Module, _inputs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if module not in names:
            for name, one in module.named_modules():
                kind = type(one).__name__
                names[one] = f"{name} ({kind})" if name else kind
        call = record_function(MODULE + names[module])
        call.__enter__()
        calls.__dict__.setdefault("open", []).append(call)

    def leave(_module: nn.Module, _inputs: Any, _output: Any) -> None:
        if not torch.compiler.is_compiling() and getattr(calls, "open", None):
            calls.open.pop().__exit__(None, None, None)

    with swapped(Frame, recompute=named), warnings.catch_warnings(), ExitStack() as stack:
        warnings.filterwarnings("ignore", r"Using `torch.compile\(module\)` when there are global hooks")
        for hook in (register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)):
            stack.callback(hook.remove)
        yield
