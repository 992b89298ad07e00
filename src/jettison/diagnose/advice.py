"""Advice after an out-of-memory error: by cause, device (`devices.toml`) and trainer (`trainers.toml`)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from jettison.core.units import GIB, MIB, format_gib
from jettison.diagnose.finding import Change, change, changes, table
from jettison.diagnose.frames import speaks_of_logits
from jettison.diagnose.memory_facts import CPU_ALLOCATOR, Failure, MemoryFacts, StepPhase

HEADROOM: Final = 0.9
"""Share of a device for tensors if the source has no size of its context."""
_TRITON: Final = ("cuda", "hip", "xpu")
_NO_STEP: Final = {StepPhase.PARAMETERS: "loading", StepPhase.SAVING: "saving"}
"""Phases in which fewer activations do not help, and the section of changes that do."""


@dataclass(frozen=True, kw_only=True)
class DeviceTools:
    """Tools and settings of one type of device, from `devices.toml`; "": none."""

    name: str
    processes: str = ""
    choose: str = ""
    expandable: str = ""
    communicators: str = ""
    outside: str = "context, libraries"
    empty_cache: str = ""
    allocated: str = ""
    fraction: str = ""
    checkpoint: str = ""


def device_of(name: str) -> DeviceTools:
    """Return a type of device; one without tools if it is unknown."""
    known = table("devices").get(name)
    return DeviceTools(**(known or {"name": name.upper(), "allocated": "torch.accelerator.memory_allocated()"}))


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """Settings of one training framework, from `trainers.toml`; "": none."""

    name: str = ""
    paths: tuple[str, ...] = ()
    recompute: str = ""
    smaller: str = ""
    loss: str = ""
    optimizer: str = ""
    evaluate: str = ""
    plan: str = ""
    rollout: str = ""
    serves: bool = False
    fixed: bool = False

    def change(self, setting: str, **values: str) -> tuple[Change, ...]:
        """Yield the change of a setting, if it has one."""
        line = getattr(self, setting)
        return (change(f"trainer.{setting}", line=line, trainer=self.name, **values),) if line else ()


@cache
def trainers() -> dict[str, Trainer]:
    """Return all trainers by name."""
    return {name: Trainer(name=name, **row) for name, row in table("trainers").items()}


def trainer_of(files: Sequence[str]) -> str:
    """Return the name of the framework of a traceback's training loop; "": the user's own loop."""
    return next((one.name for one in trainers().values() if _runs(one, files)), "")


def in_server(files: Sequence[str]) -> bool:
    """Whether a traceback runs into an inference server."""
    return any(one.serves and _runs(one, files) for one in trainers().values())


def names_server(text: str) -> bool:
    """Whether a text names an inference server."""
    names = "|".join(one.name for one in trainers().values() if one.serves)
    return re.search(rf"\b(?:{names})\b", text, re.IGNORECASE) is not None


def _runs(trainer: Trainer, files: Sequence[str]) -> bool:
    return any(part in file for file in files for part in trainer.paths)


def _trainer(facts: MemoryFacts) -> Trainer:
    """Return the framework of the training loop; one without settings for the user's own loop."""
    return trainers().get(facts.trainer, Trainer())


def _tool(name: str, line: str) -> tuple[Change, ...]:
    """Yield the change with a device's tool, if it has one."""
    return (change(name, line=line),) if line else ()


def against_leak(facts: MemoryFacts) -> tuple[Change, ...]:
    """Free tensors of a step."""
    first = facts.survivors[0] if facts.survivors else None
    where = first.module if first else "what a step adds to a list, a dictionary or an attribute"
    of_graph = first is None or first.role in ("forward", "unknown", "recompute")
    found = (change("leak.graph" if of_graph else "leak.kept", where=where),)
    names_lines = first is not None or device_of(facts.device).allocated
    return found if names_lines else (*found, change("leak.watch"))


def record(facts: MemoryFacts) -> tuple[Change, ...]:
    """Record the next run, to find the cause."""
    device = device_of(facts.device)
    if device.checkpoint:
        return ()
    if facts.failure in (Failure.KILLED, Failure.HOST) and facts.what != CPU_ALLOCATOR:
        return changes("record", "resident")
    return (change("record.allocated", call=device.allocated),) if device.allocated else changes("record", "watch")


def against_fragmentation(facts: MemoryFacts) -> tuple[Change, ...]:
    """Reduce fragmentation."""
    device = device_of(facts.device)
    if device.expandable and not facts.expandable:
        later = "; PYTORCH_ALLOC_CONF from torch 2.10 on" if facts.device == "cuda" else ""
        first = change("fragmentation.expandable", setting=device.expandable, later=later)
    else:
        first = change("fragmentation.empty_cache", call=device.empty_cache or "torch.accelerator.empty_cache()")
    if facts.phase is StepPhase.OPTIMIZER:  # temporaries there are of parameters' sizes, whatever the batch's
        return (first, *(() if facts.own_optimizer else changes("peak", "foreach")))
    return (first, *(() if _trainer(facts).fixed else changes("fragmentation", "lengths")))


def against_others(facts: MemoryFacts) -> tuple[Change, ...]:
    """Find processes that use the device, or use another one."""
    device = device_of(facts.device)
    found = (*_tool("others.processes", device.processes), *_tool("others.choose", device.choose))
    most = (facts.allocated_bytes or 0) > (facts.total_bytes or 0) / 2 and facts.phase not in _NO_STEP
    return (*_rollout(facts), *found, *(_plan(facts) if most and not facts.evaluating else ()), *of_trainer(facts))


def against_outside(facts: MemoryFacts) -> tuple[Change, ...]:
    """Reduce this process's memory outside of PyTorch's allocator."""
    device = device_of(facts.device)
    found = list(_rollout(facts))
    if facts.device == "mps":
        found += [*_plan(facts), change("outside.mps", line=device.empty_cache)]
    found += _tool("outside.communicators", device.communicators)
    if facts.device in ("cuda", "hip"):
        found += changes("outside", "preallocation")
    return (*found, *of_trainer(facts))


def against_one_tensor(facts: MemoryFacts) -> tuple[Change, ...]:
    """Avoid a tensor larger than the device: attention scores, logits, or one of a wrong shape."""
    if facts.logits:
        return _fused_loss(facts)
    first = against_size_error(facts) if facts.fused_attention else change("size.attention")
    return (first, *of_trainer(facts, recompute=False))


def against_size_error(facts: MemoryFacts) -> Change:
    """Look for the shape that is wrong."""
    return change("size.shapes", where=f" (at {facts.site})" if facts.site else "")


def against_refusal(facts: MemoryFacts) -> tuple[Change, ...]:
    """Look for other processes, if a request failed with enough free memory."""
    device = device_of(facts.device)
    found = (*_tool("refused.processes", device.processes), *_tool("refused.empty_cache", device.empty_cache))
    return (*found, *of_trainer(facts))


def against_elsewhere(facts: MemoryFacts) -> tuple[Change, ...]:
    """Free memory of the host, of /dev/shm, for a library or a server."""
    if facts.failure is Failure.SHARED:
        return changes("host", "shared", "no_shared_nccl" if facts.what == "NCCL" else "no_shared")
    if facts.failure is Failure.SERVER:
        return (*(against_others(facts) if facts.unaccounted_bytes else ()), *_of_server(facts))
    if facts.failure is Failure.LIBRARY:
        return _room_for_libraries(facts)
    found: list[Change] = []
    if facts.failure is Failure.KILLED:
        more = str(2 * -(-facts.total_bytes // GIB)) if facts.total_bytes else "MORE"
        said = table("log_forms")["limits"].items()
        limits = [name for name, words in said if any(word in facts.what for word in words)]
        found += [change("killed.kernel"), *(change(f"killed.{name}", more=more) for name in limits)]
    elif facts.what == "pinned memory":
        found.append(change("host.pinned"))
    return (*found, *changes("host", "workers", "copies"), *record(facts))


def _room_for_libraries(facts: MemoryFacts) -> tuple[Change, ...]:
    device, is_nccl = device_of(facts.device), facts.what == "NCCL"
    own = changes("library", facts.what) if facts.what in ("NCCL", "XLA (JAX)", "TensorFlow") else ()
    with_torch = is_nccl or not own
    found = [*(_tool("library.fraction", device.fraction) if with_torch else ()), *own]
    if is_nccl:
        found.append(change("library.communicators", line=device.communicators))
    else:
        found += _tool("library.processes", device.processes)
    found += _tool("library.checkpoint", device.checkpoint)
    if facts.device == "mps":
        found.append(change("library.mps", line=device.empty_cache))
    if with_torch and not is_nccl:
        found += record(facts)
    return (*found, *of_trainer(facts))


def _rollout(facts: MemoryFacts) -> tuple[Change, ...]:
    """Return a trainer's setting for the inference server that shares its device."""
    return _trainer(facts).change("rollout") if facts.colocated else ()


def _of_server(facts: MemoryFacts) -> tuple[Change, ...]:
    trainer = _trainer(facts) if facts.trainer else next(one for one in trainers().values() if one.serves)
    return (change("trainer.server", line=trainer.smaller if trainer.serves else "--gpu-memory-utilization 0.85"),)


# a peak ---------------------------------------------------------------------------------------------------------------


def against_peak(facts: MemoryFacts, short: int | None, *, shape: bool) -> tuple[Change, ...]:
    """Reduce the peak of a step, the cheapest change first.

    Args:
        shape: the batch is larger than earlier ones.
    """
    if facts.phase in _NO_STEP:
        return changes(_NO_STEP[facts.phase])
    trainer = _trainer(facts)
    if trainer.serves:
        return _of_server(facts)
    found: list[Change] = []
    if facts.phase is StepPhase.OPTIMIZER:
        if not facts.own_optimizer:
            found.append(change("peak.foreach"))
        elif facts.device in _TRITON and not trainer.optimizer:
            found.append(change("peak.paged"))
        found += trainer.change("optimizer")
    sites = (text for p in facts.parts[:2] for text in (p.module, p.site))
    if not facts.evaluating and (facts.logits or speaks_of_logits(facts.site, *sites)):
        found += _fused_loss(facts)
    held = sum(part.nbytes for part in facts.parts if part.role in (StepPhase.FORWARD, StepPhase.RECOMPUTE))
    wanted = held + (facts.requested_bytes or 0)
    if short and wanted > short and held:
        share, bytes_held, missing = f"{1 - short / wanted:.2f}", format_gib(held), format_gib(short)
        found.append(change("peak.micro_batch", share=share, held=bytes_held, short=missing))
    if shape:
        fitted = max(facts.steps[1:-1], key=lambda step: (step.batch_elements or 0, step.peak_bytes or 0))
        line = f"batches of at most {fitted.batch}" if fitted.batch else "batches no longer than those before"
        found.append(change("peak.batches", line=line))
    if facts.evaluating:
        return (*found, *_smaller_evaluation(facts))
    if facts.phase is not StepPhase.OPTIMIZER:
        found += [*_plan(facts), *of_trainer(facts)]
    return tuple(found)


def _plan(facts: MemoryFacts) -> tuple[Change, ...]:
    """Plan for the bytes of tensors and the free ones, or a peak that fitted before; never for more than the device."""
    if facts.allocated_bytes is None or facts.free_bytes is None:
        return ()
    went_through = max((step.peak_bytes or 0 for step in facts.steps[:-1]), default=0)
    most = max(facts.allocated_bytes + facts.free_bytes, went_through)
    if facts.total_bytes is not None:
        most = min(most, int(facts.total_bytes * HEADROOM) if facts.shared_bytes else facts.total_bytes)
    if most < MIB:
        return ()
    budget = f"{most // MIB}MiB"
    first = _trainer(facts).change("plan", budget=budget) or (change("peak.auto", budget=budget),)
    return (*first, change("peak.plan", budget=budget))


def _fused_loss(facts: MemoryFacts) -> tuple[Change, ...]:
    own = changes("peak", "liger") if facts.device in _TRITON else ()
    return (*(_trainer(facts).change("loss") or own), change("peak.pieces"))


def _smaller_evaluation(facts: MemoryFacts) -> tuple[Change, ...]:
    return _rollout(facts) or (change("peak.inference"), *_trainer(facts).change("evaluate"))


def of_trainer(facts: MemoryFacts, *, recompute: bool = True) -> tuple[Change, ...]:
    """Yield the settings of the framework of the training loop; none for the user's own loop."""
    trainer = _trainer(facts)
    if not trainer.name or facts.phase in _NO_STEP:
        return ()
    if trainer.serves:
        return _of_server(facts)
    if facts.evaluating:
        return _smaller_evaluation(facts)
    return (*(trainer.change("recompute") if recompute else ()), *trainer.change("smaller"))
