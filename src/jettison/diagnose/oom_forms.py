"""Messages of memory that ran out, by form: PyTorch's allocators old and new, the host, libraries, schedulers.

Each form reads its own figures. What holds the device's memory is worked out in `held_figures`, once for all forms.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from jettison.diagnose.facts import Failure

Figures = dict[str, Any]
EXBI: Final = 1 << 60
"""Bytes: PyTorch refuses requests above without looking; such a figure of a process or of a limit means "not known"."""
SLACK: Final = 0.01
"""Of a device: figures are rounded to two decimals."""

MOST_OUTSIDE: Final = 0.25
"""Of a device, that a process may hold beside PyTorch and still be taken for ours where no process says that it is."""

_SIZE: Final = r"([\d.,]+) ?(bytes|[KMGTPE]i?B|B)\b"
_SCALE: Final = {"bytes": 1, "B": 1} | {f"{p}B": 1000**n for n, p in enumerate("KMGTPE", 1)}
_SCALE_2: Final = {f"{p}iB": 1024**n for n, p in enumerate("KMGTPE", 1)}
_W: Final = r"(?:\s|[│┃|])+"
WINDOW: Final = 3000
"""Characters of a message."""
KERNEL_WINDOW: Final = 30_000
"""Characters of what the kernel prints of a process that it kills."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """One form of a message: how it begins, and what is read of the text from there on.

    ``words``: without one of these in a text, it is not there; looking for them is quick in logs of many megabytes.
    """

    words: tuple[str, ...]
    begins: re.Pattern[str]
    read: Callable[[str, re.Match[str]], Figures]
    window: int = WINDOW

    def search(self, text: str) -> re.Match[str] | None:
        """Where the first message of this form begins."""
        found = [at for word in self.words if (at := text.find(word)) >= 0]
        return self.begins.search(text, max(0, min(found) - WINDOW)) if found else None


def size_of(number: str, unit: str, *, binary: bool = False) -> int | None:
    """Bytes of a figure; None where it is no number.

    Args:
        binary: the source writes GB and means GiB, as PyTorch's allocator for Apple's devices does.
    """
    scale = _SCALE_2.get(f"{unit[0]}iB", 1) if binary and unit[:1] in tuple("KMGTPE") else (_SCALE | _SCALE_2)[unit]
    try:
        return round(float(number.replace(",", "").rstrip(".")) * scale)
    except ValueError:
        return None


def _first(text: str, pattern: str, *, binary: bool = False) -> int | None:
    found = re.search(pattern, text)
    return None if found is None else size_of(found[1], found[2], binary=binary)


def _known(nbytes: int | None) -> int | None:
    """None where a figure is the largest that there is: the driver does not say, or there is no limit."""
    return None if nbytes is None or nbytes >= EXBI else nbytes


# who holds a device ---------------------------------------------------------------------------------------------------


def held_figures(
    *,
    total: int | None,
    free: int | None,
    allocated: int | None,
    unused: int | None,
    private: int = 0,
    own: int | None = None,
    processes: tuple[int, ...] = (),
) -> Figures:
    """Who holds the device: figures of `MemoryFacts`, which together are its capacity.

    Args:
        own: what the process holds, by the driver; None where the source does not say.
        processes: what each of the other processes holds. In a container a process does not find its own number, and is
            one of these: the one that holds as much as PyTorch does, or a little more.
    """
    held = (allocated or 0) + (unused or 0)
    if total == 0:
        total = free = None  # the driver does not say
    notes: list[str] = []
    if total is not None and held > total * (1 + SLACK):
        return _figures(total, free, allocated, unused, 0) | {"shared_bytes": held + (free or 0) - total}
    if free is not None and total is not None and free > max(0, total - held) * (1 + SLACK):
        free = max(0, total - held)
        notes.append("the driver calls more free than the device has left: memory that is shared with the host")
    if own is None and processes:
        size = total or held
        near = [one for one in processes if held - SLACK * size <= one <= held + MOST_OUTSIDE * size]
        mine = min(near, default=None)
        if mine is not None:
            own = mine
            rest = list(processes)
            rest.remove(mine)
            processes = tuple(rest)
            notes.append(
                "one of the processes that the message lists is this one: in a container it has another number"
            )
    if free is None and total is not None and allocated is not None:
        free = max(0, total - max(held, own or 0) - sum(processes))
        notes.append("what is free is not stated: it is what the others leave, at most")
    figures = _figures(total, free, allocated, unused, private) | {"notes": tuple(notes)}
    outside = max(0, own - held) if own is not None else 0
    others = sum(processes)
    if total is None or free is None or allocated is None:
        return figures | {"outside_bytes": outside, "other_processes_bytes": others}
    rest_bytes = max(0, total - free - held)
    outside = min(outside, rest_bytes)
    others = min(others, rest_bytes - outside)
    left = rest_bytes - outside - others
    return figures | {"outside_bytes": outside, "other_processes_bytes": others, "unaccounted_bytes": left}


def _figures(total: int | None, free: int | None, allocated: int | None, unused: int | None, private: int) -> Figures:
    pools = private if unused is not None and private <= unused else 0
    left = None if unused is None else unused - pools
    return {
        "total_bytes": total,
        "free_bytes": free,
        "allocated_bytes": allocated,
        "unused_bytes": left,
        "private_bytes": pools,
    }


# allocators -----------------------------------------------------------------------------------------------------------


def _allocator(text: str, found: re.Match[str]) -> Figures:
    device = {"CUDA": "cuda", "HIP": "hip"}.get(found[1], found[1].lower())
    if re.search(r"Tried to allocate more than 1 ?EB", text):
        return {"device": device, "asked_bytes": EXBI}
    asked = _first(text, rf"Tried to allocate {_SIZE}")
    if asked is None:
        return {"device": device, "notes": ("the message has no figures",)}
    new = re.search(r"total capac\w* of|is allocated by PyTorch|memory in use", text) is not None
    return {"device": device, "asked_bytes": asked, **(_new_form(text) if new else _old_form(text))}


def _new_form(text: str) -> Figures:
    """torch 2.1 and later."""
    total = _first(text, rf"total capac\w* of {_SIZE}")
    free = _first(text, rf"of which {_SIZE} is free")
    allocated = _first(text, rf"{_SIZE} is allocated by PyTorch")
    unused = _first(text, rf"{_SIZE} is reserved by PyTorch but unallocated")
    others = [_known(size_of(*pair)) for pair in re.findall(rf"Process \d+ has {_SIZE} memory in use", text)]
    figures = held_figures(
        total=total,
        free=free,
        allocated=allocated,
        unused=unused,
        private=_first(text, rf"with {_SIZE} allocated in private pools") or 0,
        own=_known(_first(text, rf"this process has {_SIZE} memory in use")),
        processes=tuple(one for one in others if one is not None),
    )
    return _limited(figures, _known(_first(text, rf"{_SIZE} allowed")))


def _limited(figures: Figures, allowed: int | None) -> Figures:
    """Below a limit of the process (`set_per_process_memory_fraction`), where that is what failed."""
    held = sum(figures[name] or 0 for name in ("allocated_bytes", "unused_bytes", "private_bytes"))
    if allowed is None or figures["free_bytes"] is None or allowed - held >= figures["free_bytes"]:
        return figures
    notes = (*figures.get("notes", ()), "the process is limited to less than the device has: a memory fraction is set")
    none = {"outside_bytes": 0, "other_processes_bytes": 0, "unaccounted_bytes": 0, "shared_bytes": 0}
    return figures | none | {"total_bytes": allowed, "free_bytes": max(0, allowed - held), "notes": notes}


def _old_form(text: str) -> Figures:
    """torch 1 and 2.0, and what was made of it."""
    allocated = _first(text, rf"{_SIZE} already allocated")
    reserved = _first(text, rf"{_SIZE} reserved in total")
    held = None if allocated is None or reserved is None else max(0, reserved - allocated)
    return held_figures(
        total=_first(text, rf"{_SIZE} total capac\w*"),
        free=_first(text, rf"{_SIZE} free"),
        allocated=allocated,
        unused=_first(text, rf"{_SIZE} cached") if held is None else held,  # torch 1.3 and before: cached is unused
    )


def _async(text: str, found: re.Match[str]) -> Figures:
    """CUDA's cudaMallocAsync as PyTorch's backend."""
    figures = held_figures(
        total=_first(text, rf"Device limit ?: {_SIZE}"),
        free=_first(text, rf"Free \(according to CUDA\) ?: {_SIZE}"),
        allocated=_first(text, rf"Currently allocated ?: {_SIZE}"),
        unused=None,
    )
    limit = _known(_first(text, rf"user-supplied memory fraction\) ?: {_SIZE}"))
    asked = _first(text, rf"Requested ?: {_SIZE}")
    return {"device": "cuda", "asked_bytes": asked, **_limited(figures, limit)}


def _mps(text: str, found: re.Match[str]) -> Figures:
    """Apple's: what is allowed is a share of the machine's memory; other allocations are Metal's, of this process."""
    allocated = _first(text, rf"MPS allocated: {_SIZE}", binary=True)
    outside = _first(text, rf"other allocations: {_SIZE}", binary=True) or 0
    total = _first(text, rf"max allowed: {_SIZE}", binary=True)
    asked = _first(text, rf"Tried to allocate {_SIZE}", binary=True)
    free = None if total is None or allocated is None else max(0, total - allocated - outside)
    figures = {"asked_bytes": asked, "allocated_bytes": allocated, "total_bytes": total, "free_bytes": free}
    return {"device": "mps", "outside_bytes": outside, **figures}


def _mps_buffer(text: str, found: re.Match[str]) -> Figures:
    asked = size_of(found[1], found[2], binary=True)
    return {"device": "mps", "asked_bytes": asked, "notes": ("Metal makes no single buffer of that size",)}


# the host -------------------------------------------------------------------------------------------------------------


def _host(text: str, found: re.Match[str]) -> Figures:
    return {"device": "cpu", "failure": Failure.HOST, "asked_bytes": int(found[1]), "what": "the CPU's allocator"}


def _array(text: str, found: re.Match[str]) -> Figures:
    asked = size_of(found[1], found[2])
    return {"device": "cpu", "failure": Failure.HOST, "asked_bytes": asked, "what": "an array of NumPy's"}


def _host_plain(text: str, found: re.Match[str]) -> Figures:
    return {"device": "cpu", "failure": Failure.HOST, "notes": ("the message has no figures",)}


def _killed(text: str, found: re.Match[str]) -> Figures:
    used = re.search(r"anon-rss:(\d+) ?kB", text)
    limit = re.search(r"memory: usage \d+ ?kB, limit (\d+) ?kB", text)
    return {
        "device": "cpu",
        "failure": Failure.KILLED,
        "allocated_bytes": None if used is None else 1024 * int(used[1]),
        "total_bytes": None if limit is None else 1024 * int(limit[1]),
        "what": " ".join(found[0].split()),
    }


def _shared(text: str, found: re.Match[str]) -> Figures:
    return {"device": "cpu", "failure": Failure.SHARED}


# libraries and servers ------------------------------------------------------------------------------------------------


def _nccl(text: str, found: re.Match[str]) -> Figures:
    asked = re.search(r"Failed to CUDA (?:calloc|malloc)(?: async)? (\d+) bytes", text)
    nbytes = None if asked is None else int(asked[1])
    return {"failure": Failure.LIBRARY, "asked_bytes": nbytes, "what": "NCCL"}


def _driver(text: str, found: re.Match[str]) -> Figures:
    device = "hip" if found[0].startswith(("HIP", "hip", "ROCBLAS", "rocblas")) else "cuda"
    device = "mps" if found[0].startswith("kIOGPU") else device
    what = next((name for name in ("cuBLAS", "cuDNN", "cuSOLVER") if found[0].startswith(name.upper())), "the driver")
    figures = {"device": device, "failure": Failure.LIBRARY, "what": what}
    return figures | {"notes": ("the message has no figures",)}


def _xla(text: str, found: re.Match[str]) -> Figures:
    return {"failure": Failure.LIBRARY, "asked_bytes": int(found[1]), "what": "XLA (JAX)"}


def _server(text: str, found: re.Match[str]) -> Figures:
    pair = re.search(r"Free memory on device[^(]*\(([\d.]+)/([\d.]+) GiB\)", text)
    if pair is None:
        return {"failure": Failure.SERVER, "notes": ("the message has no figures",)}
    free, total = (size_of(one, "GiB") or 0 for one in pair.groups())
    held = {"free_bytes": free, "total_bytes": total, "allocated_bytes": 0, "unaccounted_bytes": max(0, total - free)}
    return {"failure": Failure.SERVER, **held}


FORMS: Final[tuple[Form, ...]] = (
    Form(
        words=("Tried",),
        begins=re.compile(rf"\b([A-Z]{{2,5}}){_W}out{_W}of{_W}memory\.{_W}Tried{_W}to{_W}allocate"),
        read=_allocator,
    ),
    Form(
        words=("Allocation on device",),
        begins=re.compile(
            r"Allocation on device(?: \S+)? would exceed allowed memory|OutOfMemoryError: Allocation on device"
        ),
        read=_async,
    ),
    Form(words=("MPS backend",), begins=re.compile(r"MPS backend out of memory"), read=_mps),
    Form(words=("Invalid buffer",), begins=re.compile(rf"Invalid buffer size: {_SIZE}"), read=_mps_buffer),
    Form(
        words=("DefaultCPUAllocator",),
        begins=re.compile(
            r"DefaultCPUAllocator: (?:can't allocate|not enough) memory: you tried to allocate (\d+) bytes"
        ),
        read=_host,
    ),
    Form(
        words=("Unable to allocate",),
        begins=re.compile(r"Unable to allocate ([\d.]+) ([KMGTPE]?i?B|bytes) for an array"),
        read=_array,
    ),
    Form(
        words=("MemoryError", "bad_alloc", "Errno 12", "error 1455", "paging file"),
        begins=re.compile(
            r"(?:^|\]: ?|\| )(?:[\w.]+\.)?MemoryError(?:$|: (?!Unable))|std::bad_alloc"
            r"|\[Errno 12\] Cannot allocate memory|os error 1455|paging file is too small",
            re.MULTILINE,
        ),
        read=_host_plain,
    ),
    Form(
        words=(
            "exitcode",
            "SIGKILL",
            "return code",
            "returncode",
            "ode 137",
            "ode: 137",
            "tatus 137",
            "tatus: 137",
            "Exit Code:",
            "oom",
            "OOM",
            "Killed",
            "memory: Kill",
            "out of memory",
            "low on memory",
            "9/KILL",
            "zsh: killed",
            "Out Of Memory",
            "OUT_OF_ME",
            "TERM_MEMLIMIT",
            "exceeded limit",
            "memory pressure",
            "memory limit",
            "memory allocation",
        ),
        begins=re.compile(
            r"exitcode\s*: -9\b|Signal 9 \(SIGKILL\)|<Signals\.SIGKILL: 9>|return code = -9\b|returncode[:=] ?-9\b"
            r"|[Ee]xit(?:ed)?(?: with)?(?: [Ss]tatus| [Cc]ode):?\s+137\b"
            r"|Memory cgroup out of memory|Out of memory: Kill"
            r"|invoked oom-killer|oom-kill:constraint|oom[_-]kill event|OOMKilled|OOM Killed"
            r"|killed due to (?:the node running low on memory|memory pressure)"
            r"|[Ee]xceeded (?:job |step )?memory (?:limit|allocation)"
            r"|is killed by signal: Killed"
            r"|: line \d+: +\d+ Killed\b|^Killed$|^\[\d+\][+-]?\s+Killed\b|was killed by the OOM killer"
            r"|A process of this unit has been killed by the OOM|status=9/KILL|\bzsh: killed\b|\bKilled: 9\b"
            r"|task \d+: Out Of Memory|\bOUT_OF_ME(?:MORY\b|\+)|TERM_MEMLIMIT|mem \d+kb exceeded limit",
            re.MULTILINE,
        ),
        read=_killed,
        window=KERNEL_WINDOW,
    ),
    Form(
        words=("shared memory", "unable to"),
        begins=re.compile(r"insufficient shared memory|unable to (?:write to|mmap)[^\n]{0,60}</torch_"),
        read=_shared,
    ),
    Form(
        words=("Cuda failure", "Failed to CUDA"),
        begins=re.compile(r"Cuda failure (?:\d+ )?'out of memory'|Failed to CUDA (?:calloc|malloc)"),
        read=_nccl,
    ),
    Form(
        words=(
            "rror: out of memory",
            "runtime error (2)",
            "_ALLOC_FAILED",
            "cudaErrorMemory",
            "hipErrorOut",
            "MEMORY_ERROR",
            "memory_error",
            "ERROR_OUT_OF_MEMORY",
            "kIOGPU",
        ),
        begins=re.compile(
            r"(?:CUDA|HIP)(?: driver)? [Ee]rror: out of memory|cuda runtime error \(2\) ?: out of "
            r"memory|(?:CUBLAS|CUDNN|CUSOLVER|CUSPARSE)_STATUS_ALLOC_FAILED"
            r"|cudaErrorMemoryAllocation|hipErrorOutOfMemory|ROCBLAS_STATUS_MEMORY_ERROR|rocblas_status_memory_error"
            r"|CUDA_ERROR_OUT_OF_MEMORY|kIOGPUCommandBufferCallbackErrorOutOfMemory"
        ),
        read=_driver,
    ),
    Form(
        words=("RESOURCE_EXHAUSTED",),
        begins=re.compile(r"RESOURCE_EXHAUSTED: Out of memory (?:while trying to allocate|allocating) (\d+)"),
        read=_xla,
    ),
    Form(
        words=("cache blocks", "Free memory on device", "KV cache"),
        begins=re.compile(
            r"No available memory for the cache blocks|Free memory on device[^\n]{0,80}is less than desired"
            r"|is larger than the (?:maximum number of tokens that can be stored in|available) KV cache"
        ),
        read=_server,
    ),
)
_BARE: Final = Form(
    words=("out of memory",), begins=re.compile(r"\b(CUDA|HIP|XPU|NPU|MLU|MUSA) out of memory"), read=_allocator
)
"""What a program makes of an error that it has caught: it counts only where no other message stands."""


def first_form(text: str) -> tuple[Form, re.Match[str]] | None:
    """The form of the first message in a text, and where it begins; None where no memory ran out."""
    found = [(match.start(), at, form, match) for at, form in enumerate(FORMS) if (match := form.search(text))]
    if not found:
        bare = _BARE.search(text)
        return None if bare is None else (_BARE, bare)
    _, _, form, match = min(found, key=lambda one: one[:2])
    return form, match


def count_messages(text: str) -> int:
    """How many requests of PyTorch's allocators failed in a text."""
    first = [(form, found.start()) for form in FORMS[:3] if (found := form.search(text)) is not None]
    return sum(len(form.begins.findall(text, at)) for form, at in first)


def more_figures(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether more figures are read in ``one`` than in ``other``."""
    return sum(value is not None for value in one.values()) > sum(value is not None for value in other.values())
