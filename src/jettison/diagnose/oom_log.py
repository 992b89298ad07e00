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
RESTARTS_FROM: Final = 3
"""Steps: a number that falls by less is another rank's line."""
_SIZE: Final = r"([\d.,]+) ?(bytes|[KMGT]i?B|B)\b"
_SCALE: Final = {"bytes": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SCALE_2: Final = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_WRITTEN: Final = {unit.lower(): unit for unit in (_SCALE | _SCALE_2)}
_BEGINS: Final = re.compile(rf"(?:CUDA|HIP|XPU) out of memory\. +Tried to allocate {_SIZE}")
_HOST: Final = re.compile(
    r"DefaultCPUAllocator: (?:can't allocate|not enough) memory: you tried to allocate (\d+) bytes"
)
_MPS: Final = re.compile(
    rf"MPS backend out of memory \(MPS allocated: {_SIZE}, other allocations: {_SIZE}, max allowed: {_SIZE}\)\. "
    rf"Tried to allocate {_SIZE}"
)
_BARE: Final = re.compile(r"CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|cudaErrorMemoryAllocation")
_STEP: Final = re.compile(r"\b(?:step|iter|iteration)\b[\s:=/#\['\"]*([\d,]+)", re.IGNORECASE)
_ALLOCATED: Final = re.compile(r"(?<!max )(?<!max_)(?<!peak )\ballocated\b[^\d\n|]{0,12}([\d.,]+) ?([KMGT]i?B)\b")
_UNIT_FIRST: Final = re.compile(
    r"(?<!max )(?<!max_)(?<!peak )(?<!peak_)allocated[ _]?\(?(GiB|GB|MiB|MB)\)?[\"']?\s*[:=]\s*([\d.]+)", re.IGNORECASE
)
_MEGATRON: Final = re.compile(r"memory \((MB|GB)\) \| allocated: ([\d.]+)")
_FILE: Final = re.compile(r'\bFile "([^"\n]+)", line (\d+), in (\S+)')  # ranks and times may stand before it
_LIBRARY: Final = ("/torch/", "site-packages", "/lib/python", "<frozen")
_PHASES: Final = (  # the innermost part of a traceback that fits
    (Phase.OPTIMIZER, "torch/optim/", ""),
    (Phase.RECOMPUTE, "torch/utils/checkpoint", "recompute"),
    (Phase.RECOMPUTE, "torch/utils/checkpoint", "unpack"),
    (Phase.BACKWARD, "torch/autograd/", "backward"),
    (Phase.FORWARD, "torch/nn/modules/", "forward"),
    (Phase.FORWARD, "torch/nn/modules/module.py", "_call_impl"),
    (Phase.PARAMETERS, "torch/nn/modules/module.py", "_apply"),
    (Phase.PARAMETERS, "torch/serialization.py", "load"),
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
    found = _BEGINS.search(text) or _MPS.search(text) or _HOST.search(text) or _BARE.search(text)
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
    if found.re is _MPS:
        return MemoryFacts(device="mps", **_mps(found), **common)  # type: ignore[arg-type]
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


def _mps(found: re.Match[str]) -> dict[str, int]:
    """Apple's: what is allowed is a share of the machine's memory, and other allocations are the process's as well."""
    allocated, outside, total, asked = (_size(found[2 * i + 1], found[2 * i + 2]) for i in range(4))
    free = max(0, total - allocated - outside)
    figures = {"asked_bytes": asked, "allocated_bytes": allocated, "total_bytes": total, "free_bytes": free}
    return {**figures, "outside_bytes": outside}


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
    """What a loop printed: the step, and what is allocated, in one line. Numbers that begin anew go on counting."""
    found: dict[tuple[int, int], int] = {}
    epoch, last = 0, -1
    first: int | None = None
    for line in before.splitlines():
        step, nbytes = _STEP.search(line), _allocated(line)
        if step is None or nbytes is None:
            continue
        number = int(step[1].replace(",", ""))
        first = number if first is None else min(first, number)
        if number == first and last >= first + RESTARTS_FROM:
            epoch += 1
        last = number
        found.setdefault((epoch, number), nbytes)
    in_order = sorted(found.items())
    if epoch:
        return tuple(StepBytes(step=at, between_bytes=nbytes) for at, (_, nbytes) in enumerate(in_order))
    return tuple(StepBytes(step=number, between_bytes=nbytes) for (_, number), nbytes in in_order)


def _allocated(line: str) -> int | None:
    for pattern, number, unit in ((_MEGATRON, 2, 1), (_ALLOCATED, 1, 2), (_UNIT_FIRST, 2, 1)):
        found = pattern.search(line)
        if found is not None:
            return _size(found[number], _WRITTEN.get(found[unit].lower(), found[unit]))
    return None
