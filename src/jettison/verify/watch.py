"""`watch`: record a training loop's memory, to explain an out-of-memory error or growth from step to step.

Steps are counted by the optimizer's. On a GPU the caching allocator's statistics and history are used; on the CPU every
storage is followed from allocation to free, which takes time in each op.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import traceback
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves

from jettison.capture.model_trace import expect_module
from jettison.core.errors import warn
from jettison.core.objects import summary
from jettison.core.units import format_bytes
from jettison.diagnose import memory_facts as facts
from jettison.diagnose.frames import Frame, is_library, place_of, text_of_frame
from jettison.diagnose.log import WatchRecord
from jettison.dryrun.counter import AllocationCounter, static_tensors
from jettison.runtime import offload

HISTORY: Final = 200_000
"""Events of the caching allocator's history that are kept for a snapshot."""
_FOLDERS: Final = tuple(f"{folder}{os.sep}" for folder in (*torch.__path__, Path(__file__).parents[1]))
_ALLOCATORS: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


class LoopMeter:
    device: str

    def step(self) -> tuple[int, int | None]:
        """Bytes allocated now, and the peak since the last call where it is known."""
        raise NotImplementedError

    def survivors(self) -> tuple[facts.Survivor, ...]:
        """Places whose tensors survive most steps, where they are known."""
        return ()

    def snapshot(self, path: Path) -> bool:
        """Write a memory snapshot, where the device has one."""
        return False


class LoopWatch:
    """A watched loop. Call `step` at the end of each step, for loops without an optimizer of torch's."""

    def __init__(self, meter: LoopMeter, out: Path) -> None:
        self.out = out
        self.steps: list[facts.StepBytes] = []
        self._meter = meter
        self._batch: tuple[str, int] | None = None
        self._last: int = meter.step()[0]
        self._said_growth = False
        self._leads: int | None = None

    def __repr__(self) -> str:
        return summary(self, f"{len(self.steps)} steps, {self.out}")

    def step(self) -> None:
        """Mark the end of a step."""
        allocated, peak = self._meter.step()
        self.steps.append(self._begun(peak))
        self._last, self._batch = allocated, None
        levels = (*self.steps, facts.StepBytes(step=len(self.steps), between_bytes=allocated))
        seen = facts.MemoryFacts(source="", failed=False, steps=levels)
        if not self._said_growth and (growth := facts.grown_bytes(seen)):
            self._said_growth = True
            warn(
                f"between steps {format_bytes(growth)} more are allocated than after the first two; {self.written()}",
                RuntimeWarning,
            )

    def written(self, error: str = "") -> str:
        """Write the record so far, and return how it is read. A failure to write does not end the loop."""
        try:
            return f"see: jettison doctor --oom {self.write(error)}"
        except OSError as failed:
            return f"{self.out} cannot be written: {failed.strerror or failed}"

    def write(self, error: str = "") -> Path:
        """Write the record so far and return its file."""
        self.out.parent.mkdir(parents=True, exist_ok=True)
        kept = self.out.with_suffix(".pickle")
        record = WatchRecord(
            device=self._meter.device,
            steps=(*self.steps, self._begun(None)),
            survivors=self._meter.survivors(),
            error=error,
            allocator=next((os.environ[name] for name in _ALLOCATORS if name in os.environ), ""),
            snapshot=kept.name if (error and kept.exists()) or self._meter.snapshot(kept) else "",
        )
        self.out.write_text(json.dumps(record.document(), indent=1), encoding="utf-8")
        return self.out

    def given(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        """Keep the largest batch of a step, when the model is called."""
        shapes = [list(leaf.shape) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        elements = sum(map(prod, shapes))
        if self._batch is None or elements > self._batch[1]:
            self._batch = ", ".join(str(shape) for shape in shapes[:3]), elements

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Count steps by the first optimizer that steps."""
        self._leads = id(optimizer) if self._leads is None else self._leads
        if self._leads == id(optimizer):
            self.step()

    def _begun(self, peak: int | None) -> facts.StepBytes:
        begun = facts.StepBytes(step=len(self.steps), between_bytes=self._last, peak_bytes=peak)
        return begun if self._batch is None else replace(begun, batch=self._batch[0], batch_elements=self._batch[1])


@contextmanager
def watch(model: nn.Module | None = None, *, out: str | Path = "jettison-watch.json") -> Iterator[LoopWatch]:
    """Watch the loop inside. ``jettison doctor --oom OUT`` explains the file.

    The file is written when memory runs out (the error is re-raised with a note), and once if allocated bytes grow in
    every step. On CUDA a snapshot is written next to it.

    Args:
        model: its batches are recorded, so that a peak can be related to the batch, and its device's memory; without
            it, the current device's.

    Raises:
        UsageError: ``model`` is not a module.
    """
    if model is not None:
        expect_module(model)
    with ExitStack() as stack:
        snapshot = Path(out).with_suffix(".pickle")
        current = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        place = current if model is None else offload.place_of(model)
        meter: LoopMeter = CudaLoopMeter(snapshot, place) if place.type == "cuda" else CountingMeter(model, stack)
        found = LoopWatch(meter, Path(out))
        stack.callback(register_optimizer_step_post_hook(found.optimizer_stepped).remove)
        if model is not None:
            stack.callback(model.register_forward_pre_hook(found.given, with_kwargs=True).remove)
        try:
            yield found
        except RuntimeError as error:
            text = str(error)
            if "out of memory" not in text and "you tried to allocate" not in text:
                raise
            error.add_note(found.written("".join(traceback.format_exception(error))))
            raise


class CudaLoopMeter(LoopMeter):
    """The CUDA caching allocator: a device's statistics, history, and a snapshot when it runs out of memory."""

    device = "cuda"

    def __init__(self, snapshot: Path, place: torch.device) -> None:
        snapshot.unlink(missing_ok=True)
        self._highest, self._place = 0, place
        torch.cuda.memory._record_memory_history(max_entries=HISTORY, stacks="python")
        # a snapshot when the error arrives comes after tensors of the failing call were freed
        torch._C._cuda_attach_out_of_memory_observer(lambda *_: self.snapshot(snapshot))

    def step(self) -> tuple[int, int | None]:
        """Read statistics without a reset, as they are the user's: a step's peak is known if it is a new maximum."""
        highest, before = torch.cuda.max_memory_allocated(self._place), self._highest
        self._highest = highest
        return torch.cuda.memory_allocated(self._place), highest if highest > before else None

    def snapshot(self, path: Path) -> bool:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(path))
        return True


class CountingMeter(LoopMeter):
    """Storages that operators return, followed until they are freed."""

    device = "cpu"

    def __init__(self, model: nn.Module | None, stack: ExitStack) -> None:
        self._counter = _Placed(static_tensors(model, ()) if model is not None else ())
        stack.enter_context(self._counter)
        self._steps = -1

    def step(self) -> tuple[int, int | None]:
        self._steps += 1
        self._counter.step = self._steps
        peak_bytes = self._counter.peak_bytes
        self._counter.reset_peak()
        return self._counter.live_bytes, peak_bytes

    def survivors(self) -> tuple[facts.Survivor, ...]:
        """Survivors by the line of the program that made them."""
        possible = self._steps - facts.FIRST_STEPS
        if possible < facts.FEWEST_STEPS:
            return ()
        groups: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        for place, step, nbytes in self._counter.alive():
            if facts.FIRST_STEPS <= step < self._steps:
                groups[place].append((step, nbytes))
        found = []
        for place, pairs in groups.items():
            steps = len({step for step, _ in pairs})
            if steps >= max(3, facts.SHARE_OF_STEPS * possible):
                total = sum(nbytes for _, nbytes in pairs)
                found.append(facts.Survivor(module=place, role=facts.StepPhase.UNKNOWN, nbytes=total, steps=steps))
        return tuple(sorted(found, key=lambda one: -one.nbytes))


class _Placed(AllocationCounter):
    """Counter that knows the step and the program's line of each storage."""

    def __init__(self, tensors: Any) -> None:
        self.step = 0
        self._places: dict[int, tuple[str, int]] = {}
        super().__init__(tensors)

    def alive(self) -> list[tuple[str, int, int]]:
        kept = {entry.number: entry.bytes for entry in self._storages.values()}
        self._places = {number: place for number, place in self._places.items() if number in kept}
        return [(place, step, kept[number]) for number, (place, step) in self._places.items()]

    def _add(self, storage: Any, nbytes: int, operator: Any, node: int) -> None:
        super()._add(storage, nbytes, operator, node)
        self._places[self._storages_seen] = (_place(sys._getframe(1)), self.step)


def _place(frame: FrameType | None) -> str:
    """The innermost line of the user's program, by folder; of a library, if there is none."""
    others: list[Frame] = []
    while frame is not None:
        here: Frame = (frame.f_code.co_name, frame.f_code.co_filename, frame.f_lineno)
        if not here[1].startswith(_FOLDERS):
            if not _is_library(here[1]):
                return text_of_frame(here)
            others.append(here)
        frame = frame.f_back
    return place_of(others)


_is_library = functools.cache(is_library)
