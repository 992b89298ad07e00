"""A request that failed, read out of any log: PyTorch's message of CUDA, ROCm or the host, old form and new.

What the message leaves out, the rest of the log may say: the traceback has the phase and the line, and loops that print
what is allocated step by step show whether it grows. `max` and `reserved` figures are left alone: they never fall.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from jettison.diagnose.facts import MemoryFacts, Phase, StepBytes
from jettison.errors import UsageError

MOST_READ_BYTES: Final = 256 << 20
_SIZE: Final = r"([\d.,]+) ?(bytes|[KMGT]i?B|B)\b"
_SCALE: Final = {"bytes": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SCALE_2: Final = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_BEGINS: Final = re.compile(rf"(?:CUDA|HIP|XPU) out of memory\. +Tried to allocate {_SIZE}")
_HOST: Final = re.compile(
    r"DefaultCPUAllocator: (?:can't allocate|not enough) memory: you tried to allocate (\d+) bytes"
)
_BARE: Final = re.compile(r"CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|cudaErrorMemoryAllocation")
_STEP: Final = re.compile(r"\b(?:step|iter|iteration)\b[\s:=/#\[]*([\d,]+)", re.IGNORECASE)
_ALLOCATED: Final = re.compile(r"(?<!max )(?<!max_)(?<!peak )\ballocated\b[^\d\n|]{0,12}([\d.,]+) ?([KMGT]i?B)\b")
_MEGATRON: Final = re.compile(r"memory \((MB|GB)\) \| allocated: ([\d.]+)")
_FILE: Final = re.compile(r'^\s*(?:\[[^\]]*\]:?)?\s*File "([^"]+)", line (\d+), in (\S+)', re.MULTILINE)
_LIBRARY: Final = ("/torch/", "site-packages", "/lib/python", "<frozen")
_PHASES: Final = (  # the innermost part of a traceback that fits
    (Phase.OPTIMIZER, "torch/optim/", ""),
    (Phase.RECOMPUTE, "torch/utils/checkpoint", "recompute"),
    (Phase.RECOMPUTE, "torch/utils/checkpoint", "unpack"),
    (Phase.BACKWARD, "torch/autograd/", "backward"),
    (Phase.FORWARD, "torch/nn/modules/", "forward"),
    (Phase.FORWARD, "torch/nn/modules/module.py", "_call_impl"),
    (Phase.PARAMETERS, "torch/nn/modules/module.py", "_apply"),
)


def read_oom_log(path: Path) -> MemoryFacts:
    """What a log says of the first request that failed.

    Raises:
        UsageError: there is no such file, or nothing in it ran out of memory.
    """
    try:
        if path.stat().st_size > MOST_READ_BYTES:
            raise UsageError(f"{path} has {path.stat().st_size} bytes; cut out what stands around 'out of memory'")
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}; give a file that exists") from error
    return facts_of_log(text, path.name)


def facts_of_log(text: str, name: str) -> MemoryFacts:
    """The same of a text.

    Raises:
        UsageError: nothing in it ran out of memory.
    """
    found = _BEGINS.search(text) or _HOST.search(text) or _BARE.search(text)
    if found is None:
        raise UsageError(
            f"{name} says nowhere that memory ran out; expected a log with PyTorch's 'out of memory' message, a "
            "snapshot of torch.cuda.memory._dump_snapshot, or what jettison.watch() wrote"
        )
    before = text[: found.start()]
    phase, site = _traceback(before)
    common = {"source": name, "failed": True, "phase": phase, "site": site, "steps": _steps(before)}
    if found.re is _HOST:
        return MemoryFacts(asked_bytes=int(found[1]), device="cpu", **common)  # type: ignore[arg-type]
    if found.re is _BARE:
        return MemoryFacts(notes=("the message has no figures",), **common)  # type: ignore[arg-type]
    times = len(_BEGINS.findall(text))
    notes = (f"memory ran out {times} times in this log: this is the first",) if times > 1 else ()
    message = text[found.start() : found.start() + 2000]
    figures = _new_form(message) if "in use" in message or "is free" in message else _old_form(message)
    settings = re.sub(r"(?:If reserved but|try setting)[^\n]*", "", text)
    expandable = True if re.search(r"expandable_segments['\"]?\s*[:=]\s*true", settings, re.IGNORECASE) else None
    asked = _size(found[1], found[2])
    return MemoryFacts(asked_bytes=asked, expandable=expandable, notes=notes, **figures, **common)  # type: ignore[arg-type]


def _new_form(message: str) -> dict[str, int | None]:
    """torch 2.1 and later."""
    total = _first(message, rf"total capacity of {_SIZE}")
    free = _first(message, rf"of which {_SIZE} is free")
    own = _first(message, rf"this process has {_SIZE} memory in use")
    allowed = _first(message, rf"{_SIZE} allowed")
    allocated = _first(message, rf"{_SIZE} is allocated by PyTorch")
    unused = _first(message, rf"{_SIZE} is reserved by PyTorch but unallocated")
    others = sum(_size(*pair) for pair in re.findall(rf"Process \d+ has {_SIZE} memory in use", message))
    held = (allocated or 0) + (unused or 0)
    if allowed is not None and free is not None:
        total, free = allowed, max(0, min(free, allowed - held))
    return {
        "total_bytes": total,
        "free_bytes": free,
        "allocated_bytes": allocated,
        "unused_bytes": unused,
        "other_processes_bytes": others,
        "outside_bytes": max(0, own - held) if own is not None else 0,
    }


def _old_form(message: str) -> dict[str, int | None]:
    """torch 1 and 2.0."""
    allocated = _first(message, rf"{_SIZE} already allocated")
    reserved = _first(message, rf"{_SIZE} reserved in total by PyTorch")
    return {
        "total_bytes": _first(message, rf"{_SIZE} total capacity"),
        "free_bytes": _first(message, rf"{_SIZE} free"),
        "allocated_bytes": allocated,
        "unused_bytes": None if allocated is None or reserved is None else max(0, reserved - allocated),
    }


def _first(text: str, pattern: str) -> int | None:
    found = re.search(pattern, text)
    return None if found is None else _size(found[1], found[2])


def _size(number: str, unit: str) -> int:
    scale = (_SCALE | _SCALE_2)[unit]
    try:
        return round(float(number.replace(",", "").rstrip(".")) * scale)
    except ValueError:
        return 0


def _traceback(before: str) -> tuple[Phase, str]:
    """Phase and place of the traceback that ends right before the message."""
    at = before.rfind("Traceback (most recent call last)")
    frames = _FILE.findall(before[at:]) if at >= 0 else []
    place = next(
        ("/".join(file.split("/")[-2:]) + f":{line} {function}")
        for file, line, function in [*reversed(frames), ("", "", "")]
        if not any(part in file for part in _LIBRARY)
    )
    for phase, part, word in _PHASES:
        if any(part in file and word in function for file, _, function in frames):
            return phase, place.strip(": ")
    return Phase.UNKNOWN, place.strip(": ")


def _steps(before: str) -> tuple[StepBytes, ...]:
    """What a loop printed: the step, and what is allocated, in one line."""
    found: dict[int, int] = {}
    for line in before.splitlines():
        step = _STEP.search(line)
        megatron, plain = _MEGATRON.search(line), _ALLOCATED.search(line)
        if step is None or (megatron is None and plain is None):
            continue
        pair = (megatron[2], megatron[1]) if megatron is not None else (plain[1], plain[2]) if plain else ("0", "B")
        found.setdefault(int(step[1].replace(",", "")), _size(*pair))
    return tuple(StepBytes(step=step, between_bytes=nbytes) for step, nbytes in sorted(found.items()))
