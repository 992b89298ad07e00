"""Messages of memory that ran out, by form: PyTorch's allocators, drivers and libraries, the host, schedulers, servers.

Each form reads its own figures; `holders.held_figures` accounts for the rest of the device.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from jettison.diagnose.facts import CPU_ALLOCATOR, Failure
from jettison.diagnose.holders import Figures, held_figures

EXBI: Final = 1 << 60
"""Bytes: PyTorch refuses requests above without looking; such a figure of a process or of a limit means "not known"."""
_SIZE: Final = r"([\d.,]+) ?(bytes|[KMGTPE]i?B|B)\b"
_SCALE: Final = {"bytes": 1, "B": 1, "": 1} | {
    f"{prefix}{unit}": base**n
    for n, prefix in enumerate("KMGTPE", 1)
    for unit, base in (("B", 1000), ("iB", 1024), ("", 1024))  # XLA writes G for GiB
}
_W: Final = r"(?:\s|[│┃|])+"
WINDOW: Final = 3000
"""Characters of a message."""
KERNEL_WINDOW: Final = 30_000
"""Characters of the kernel's report of a process that it kills."""
_NO_FIGURES: Final = "the message has no figures"


@dataclass(frozen=True, kw_only=True)
class Form:
    """One form of a message.

    Args:
        words: a text without any of these has no such message; a search for words is quick in logs of many megabytes.
        begins: the beginning of the message.
        read: figures of the text from there on.
        window: characters of that text.
    """

    words: tuple[str, ...]
    begins: re.Pattern[str]
    read: Callable[[str, re.Match[str]], Figures]
    window: int = WINDOW

    def search(self, text: str) -> re.Match[str] | None:
        """Find the first message of this form."""
        found = [at for word in self.words if (at := text.find(word)) >= 0]
        return self.begins.search(text, max(0, min(found) - WINDOW)) if found else None


def size_of(number: str, unit: str, *, binary: bool = False) -> int | None:
    """Return the bytes of a figure; None where it is no number.

    Args:
        binary: the source writes GB for GiB, as PyTorch's allocator for Apple's devices does.
    """
    scale = _SCALE[f"{unit[0]}iB" if binary and unit[:1] in tuple("KMGTPE") else unit]
    try:
        return round(float(number.replace(",", "").rstrip(".")) * scale)
    except ValueError:
        return None


def _first(text: str, pattern: str, *, binary: bool = False) -> int | None:
    found = re.search(pattern, text)
    return None if found is None else size_of(found[1], found[2], binary=binary)


def _known(nbytes: int | None) -> int | None:
    """Drop the largest figure that there is: the driver does not say, or there is no limit."""
    return None if nbytes is None or nbytes >= EXBI else nbytes


# allocators -----------------------------------------------------------------------------------------------------------


def _allocator(text: str, found: re.Match[str]) -> Figures:
    device = {"CUDA": "cuda", "HIP": "hip"}.get(found[1], found[1].lower())
    if re.search(r"Tried to allocate more than 1 ?EB", text):
        return {"device": device, "asked_bytes": EXBI}
    asked = _first(text, rf"Tried to allocate {_SIZE}")
    if asked is None:
        return {"device": device, "notes": (_NO_FIGURES,)}
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


def _hpu(text: str, found: re.Match[str]) -> Figures:
    return {"device": "hpu", "asked_bytes": int(found[1])}


# the host -------------------------------------------------------------------------------------------------------------


def _host(what: str, asked: str = "") -> Callable[[str, re.Match[str]], Figures]:
    """Read a message of the host's memory; ``asked``: a pattern of the figure of what was asked for."""

    def read(text: str, found: re.Match[str]) -> Figures:
        nbytes = _first(text, asked) if asked else None
        notes = () if asked else (_NO_FIGURES,)
        return {"device": "cpu", "failure": Failure.HOST, "asked_bytes": nbytes, "what": what, "notes": notes}

    return read


def _killed(text: str, found: re.Match[str]) -> Figures:
    """Read a report of the kernel, a scheduler or Ray: the process and the limit, where it names them."""
    used = [int(kib) for kib in re.findall(r"\b(?:anon|shmem)-rss:(\d+) ?kB", text)[:2]]
    limit = re.search(r"memory: usage \d+ ?kB, limit (\d+) ?kB", text)
    ray = re.search(r"memory used=([\d.]+)GB\) was running was [\d.]+GB / ([\d.]+)GB", text)  # in GiB
    cgroup = re.search(r"Memory cgroup out of memory|constraint=CONSTRAINT_MEMCG", text)
    return {
        "device": "cpu",
        "failure": Failure.KILLED,
        "allocated_bytes": size_of(ray[1], "GiB") if ray else 1024 * sum(used) if used else None,
        "total_bytes": size_of(ray[2], "GiB") if ray else None if limit is None else 1024 * int(limit[1]),
        "what": "Memory cgroup out of memory" if cgroup else " ".join(found[0].split()),
    }


def _shared(text: str, found: re.Match[str]) -> Figures:
    return {"device": "cpu", "failure": Failure.SHARED, "what": "NCCL" if "nccl" in found[0] else ""}


# drivers, libraries, servers ------------------------------------------------------------------------------------------


def _library(
    what: str, device: str = "cuda", asked: str = "", note: str = ""
) -> Callable[[str, re.Match[str]], Figures]:
    """Read a message of a driver or a library; ``asked``: a pattern of the figure of what was asked for."""

    def read(text: str, found: re.Match[str]) -> Figures:
        nbytes = _first(text, asked) if asked else None
        notes = (*((_NO_FIGURES,) if nbytes is None else ()), *((note,) if note else ()))
        return {"device": device, "failure": Failure.LIBRARY, "asked_bytes": nbytes, "what": what, "notes": notes}

    return read


def _nccl(text: str, found: re.Match[str]) -> Figures:
    asked = rf"Failed to CUDA (?:host alloc|calloc|malloc)(?: async)? {_SIZE}"
    if "Failed to CUDA host alloc" in text:
        return _host("pinned memory", asked)(text, found)
    device = "hip" if found[0].startswith("HIP") else "cuda"
    return _library("NCCL", device, asked)(text, found) | {"notes": ()}


def _driver(text: str, found: re.Match[str]) -> Figures:
    pinned = _first(text, rf"cuda(?:Host|Malloc)(?:Alloc|Host) failed to allocate {_SIZE}")
    if pinned is not None:
        return _host("pinned memory", rf"failed to allocate {_SIZE}")(text, found)
    device = "hip" if found[0].lower().startswith(("hip", "rocblas")) else "cuda"
    device = "mps" if found[0].startswith("kIOGPU") else device
    what = next((name for name in ("cuBLAS", "cuDNN", "cuSOLVER") if found[0].startswith(name.upper())), "the driver")
    other = "a library that is set up twice or that the driver does not fit fails in the same way"
    return _library(what, device, note=other if "NOT_INITIALIZED" in found[0] else "")(text, found)


def _xla(text: str, found: re.Match[str]) -> Figures:
    """XLA on a GPU names a request; on a TPU it names what the compiled program needs, and the device."""
    total = _first(text, r"Used [\d.]+[KMGT]? of ([\d.]+)([KMGT]?) hbm") or _first(
        text, r"HBM capacity ([\d.]+)([KMGT])"
    )
    needs = _first(text, r"Used ([\d.]+)([KMGT]?) of [\d.]+[KMGT]? hbm")
    wants = _first(text, r"Attempting to (?:reserve|allocate) ([\d.]+)([KMGT]?)\b")
    if needs is None and wants is None:
        return _library("XLA (JAX)", asked=rf"(?:allocate|allocating) {_SIZE}")(text, found)
    free = _first(text, r"There are ([\d.]+)([KMGT]?) free")
    held = None if total is None or free is None else max(0, total - free)
    figures = {"asked_bytes": needs or wants, "total_bytes": total, "free_bytes": free, "allocated_bytes": held}
    return {"device": "tpu", "failure": Failure.LIBRARY, "what": "XLA", **figures}


def _server(text: str, found: re.Match[str]) -> Figures:
    needs = _first(text, rf"\({_SIZE} KV cache is needed")
    if needs is not None:
        free = _first(text, rf"available KV cache memory \({_SIZE}\)")
        return {"failure": Failure.SERVER, "asked_bytes": needs, "free_bytes": free}
    pair = re.search(r"Free memory on device[^(]*\(([\d.]+)/([\d.]+) GiB\)", text)
    if pair is None:
        return {"failure": Failure.SERVER, "notes": (_NO_FIGURES,)}
    free, total = (size_of(one, "GiB") or 0 for one in pair.groups())
    held = {"free_bytes": free, "total_bytes": total, "allocated_bytes": 0, "unaccounted_bytes": max(0, total - free)}
    return {"failure": Failure.SERVER, **held}


def _form(words: str, begins: str, read: Callable[[str, re.Match[str]], Figures], window: int = WINDOW) -> Form:
    return Form(words=tuple(words.split("|")), begins=re.compile(begins, re.MULTILINE), read=read, window=window)


ALLOCATORS: Final[tuple[Form, ...]] = (
    _form("Tried", begins=rf"\b([A-Z]{{2,5}}){_W}out{_W}of{_W}memory\.{_W}Tried{_W}to{_W}allocate", read=_allocator),
    _form(
        "Allocation on device",
        begins=r"Allocation on device(?: \S+)? would exceed allowed memory|OutOfMemoryError: Allocation on device",
        read=_async,
    ),
    _form("MPS backend", begins=r"MPS backend out of memory", read=_mps),
    _form("Invalid buffer", begins=rf"Invalid buffer size: {_SIZE}", read=_mps_buffer),
    _form("PT_DEVMEM", begins=r"PT_DEVMEM Allocation failed for size::(\d+)", read=_hpu),
    _form(
        "No executable batch size",
        begins=r"No executable batch size found, reached zero",
        read=lambda text, found: {"notes": ("it did with each batch size down to 1", _NO_FIGURES)},
    ),
    _form(
        "NVML_SUCCESS",
        begins=r"NVML_SUCCESS == \w+ INTERNAL ASSERT FAILED at \S*CUDACachingAllocator",
        read=lambda text, found: {"notes": ("PyTorch got no figures from NVML, as on slices of a GPU (MIG)",)},
    ),
)
HOST: Final[tuple[Form, ...]] = (
    _form(
        "DefaultCPUAllocator",
        begins=r"DefaultCPUAllocator: (?:can't allocate|not enough) memory: you tried to allocate (\d+) bytes",
        read=_host(CPU_ALLOCATOR, rf"tried to allocate {_SIZE}"),
    ),
    _form(
        "Unable to allocate",
        begins=r"Unable to allocate ([\d.]+) ([KMGTPE]?i?B|bytes) for an array",
        read=_host("an array of NumPy's", rf"Unable to allocate {_SIZE}"),
    ),
    _form(
        "unable to mmap",
        begins=r"unable to mmap \d+ bytes from file [^\n]{0,200}Cannot allocate memory",
        read=_host("a file that is mapped", rf"unable to mmap {_SIZE}"),
    ),
    _form(
        "MemoryError|bad_alloc|Errno 12|error 1455|Error 1455|<1455>|paging file|OUT_OF_HOST_MEMORY"
        "|HOST_ALLOCATION_FAILED",
        begins=r"(?:^|\]: ?|\| )(?:[\w.]+\.)?MemoryError(?:$|: (?!Unable))|std::bad_alloc"
        r"|\[Errno 12\] Cannot allocate memory|os error 1455|paging file is too small|error code: <1455>"
        r"|_ERROR_OUT_OF_HOST_MEMORY|_HOST_ALLOCATION_FAILED",
        read=_host(""),
    ),
    _form(
        ": -9|ExitCode -9|SIGKILL|code = -9|returncode|ode 137|ode: 137|tatus 137|tatus: 137"
        "|tatus of 137|Exit Code:|oom|OOM|Killed|memory: Kill|out of memory|low on memory"
        "|low on resource: memory|9/KILL|zsh: killed|Out Of Memory|OUT_OF_ME|TERM_MEMLIMIT|exceeded limit"
        "|memory pressure|memory limit|memory allocation",
        begins=r"exitcode\s*: -9\b|Signal 9 \(SIGKILL\)|<Signals\.SIGKILL: 9>|return code = -9\b|returncode[:=] ?-9\b"
        r"|ExitCode -9\b|[Ee]xit(?:ed)?(?: with)?(?: [Ss]tatus| [Cc]ode):?\s+137\b|ran out-of-memory and exited with"
        r"|Memory cgroup out of memory|Out of memory: Kill|was low on resource: memory"
        r"|invoked oom-killer|oom-kill:constraint|oom[_-]kill event|OOM Killed"
        r"|OOMKilled\b(?![\"']?\s*[:=]\s*[\"']?(?:[Ff]alse|0)\b)"
        r"|killed due to (?:the node running low on memory|memory pressure)"
        r"|[Ee]xceeded (?:job |step )?memory (?:limit|allocation)"
        r"|is killed by signal: Killed"
        r"|: line \d+: +\d+ Killed\b|^Killed$|^\[\d+\][+-]?\s+Killed\b|was killed by the OOM killer"
        r"|A process of this unit has been killed by the OOM|status=9/KILL|\bzsh: killed\b|\bKilled: 9\b"
        r"|task \d+: Out Of Memory|\bOUT_OF_ME(?:MORY\b|\+)|TERM_MEMLIMIT|mem \d+kb exceeded limit",
        read=_killed,
        window=KERNEL_WINDOW,
    ),
    _form(
        "shared memory|unable to|No space left|/dev/shm/|SIGBUS|: -7",
        begins=r"(?:insufficient|out of|unable to allocate) shared memory"
        r"|unable to (?:write to|mmap)[^\n]{0,60}</torch_|No space left on device[^\n]{0,9}/torch_"
        r"|(?:failed to extend|shared memory segment) /dev/shm/nccl"
        r"|killed by signal: Bus error|Signal 7 \(SIGBUS\)|exitcode\s*: -7\b",
        read=_shared,
    ),
)
LIBRARIES: Final[tuple[Form, ...]] = (
    _form(
        "Cuda failure|HIP failure|Failed to CUDA",
        begins=r"(?:Cuda|HIP) failure (?:\d+ )?'out of memory'|Failed to CUDA (?:calloc|malloc|host alloc)",
        read=_nccl,
    ),
    _form(
        "rror: out of memory|Error: out of memory|failed: out of memory|(out of memory)|runtime error (2)"
        "|ALLOCATION_FAILED|_ALLOC_FAILED|cublasCreate|cudaErrorMemory|hipErrorOut|MEMORY_ERROR|memory_error"
        "|ERROR_OUT_OF_MEMORY|kIOGPU",
        begins=r"(?:CUDA|HIP)(?: driver)? [Ee]rror: out of memory|cuda runtime error \(2\) ?: out of "
        r"memory|(?:CUBLAS|CUDNN|CUSOLVER|CUSPARSE)_STATUS_(?:INTERNAL_ERROR_DEVICE_ALLOCATION|ALLOC)_FAILED"
        r"|CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate|cudaMalloc failed: out of memory"
        r"|Cuda Runtime \(out of memory\)"
        r"|cudaErrorMemoryAllocation|hipErrorOutOfMemory|ROCBLAS_STATUS_MEMORY_ERROR|rocblas_status_memory_error"
        r"|CUDA_ERROR_OUT_OF_MEMORY|kIOGPUCommandBufferCallbackErrorOutOfMemory",
        read=_driver,
    ),
    _form(
        "_OUT_OF_DEVICE_MEMORY|_OUT_OF_RESOURCES",
        begins=r"\b(?:UR_RESULT|ZE_RESULT|PI)_ERROR_OUT_OF_(?:DEVICE_MEMORY|RESOURCES)|\bCL_OUT_OF_RESOURCES",
        read=_library("the driver", "xpu"),
    ),
    _form(
        "EL0004|Memory resources are exhausted",
        begins=r"\bEL0004\b|Memory resources are exhausted",
        read=_library("CANN", "npu", r"\bsize:(\d+)()"),
    ),
    _form(
        "RESOURCE_EXHAUSTED|Resource exhausted|space hbm",
        begins=rf"RESOURCE_EXHAUSTED: Out of memory (?:while trying to allocate|allocating) {_SIZE}"
        r"|Ran out of memory in memory space hbm|(?:RESOURCE_EXHAUSTED|Resource exhausted): "
        r"(?=[^;]{0,300}Attempting to (?:reserve|allocate))",
        read=_xla,
    ),
    _form(
        "Neuron device|on ND ",
        begins=rf"Failed to allocate {_SIZE} on Neuron device|Failed to allocate {_SIZE} \(usage: [^)\n]*\) on ND \d",
        read=_library("the Neuron runtime", "neuron", rf"Failed to allocate {_SIZE}"),
    ),
    _form(
        "not enough GPU video memory",
        begins=r"Could not allocate tensor with \d+ bytes\. There is not enough GPU video memory",
        read=_library("DirectML", "dml", rf"tensor with {_SIZE}"),
    ),
    _form(
        "OOM when allocating",
        begins=r"OOM when allocating tensor with shape[^\n]{0,200}device:GPU",
        read=_library("TensorFlow"),
    ),
    _form(
        "Error out of memory at line", begins=r"Error out of memory at line \d+ in file", read=_library("bitsandbytes")
    ),
    _form(
        "(allocated so far",
        begins=rf"Out of memory allocating {_SIZE} \(allocated so far",
        read=_library("CuPy", asked=rf"allocating {_SIZE}"),
    ),
    _form(
        "cache blocks|Free memory on device|KV cache|mem-fraction-static",
        begins=r"No available memory for the cache blocks|Free memory on device[^\n]{0,80}is less than desired"
        r"|Not enough memory\. Please try to (?:in|de)crease --mem-fraction-static|\([\d.]+ GiB KV cache is needed"
        r"|is larger than the (?:maximum number of tokens that can be stored in|available) KV cache",
        read=_server,
    ),
)
FORMS: Final = (*ALLOCATORS, *HOST, *LIBRARIES)
_BARE: Final = _form("out of memory", begins=r"\b(CUDA|HIP|XPU|NPU|MLU|MUSA) out of memory", read=_allocator)
"""The message of a program that has caught an error: it counts only where no other message stands."""


def first_form(text: str) -> tuple[Form, re.Match[str]] | None:
    """Find the first message in a text and its form; None where no memory ran out."""
    found = [(match.start(), at, form, match) for at, form in enumerate(FORMS) if (match := form.search(text))]
    if not found:
        bare = _BARE.search(text)
        return None if bare is None else (_BARE, bare)
    _, _, form, match = min(found, key=lambda one: one[:2])
    return form, match


def count_messages(text: str) -> int:
    """Count the requests of PyTorch's allocators that failed in a text."""
    first = [(form, found.start()) for form in ALLOCATORS[:3] if (found := form.search(text)) is not None]
    return sum(len(form.begins.findall(text, at)) for form, at in first)


def more_figures(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether more figures are read in ``one`` than in ``other``."""
    return sum(value is not None for value in one.values()) > sum(value is not None for value in other.values())
