"""Variables of the environment that slow training down or change what is measured: left over from debugging."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_DEBUGGING: Final = {
    "CUDA_LAUNCH_BLOCKING": "each kernel is waited for",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "each tensor is a cudaMalloc",
    "TORCH_SHOW_CPP_STACKTRACES": "stacks are walked in each error",
    "TORCHDYNAMO_DISABLE": "nothing is compiled",
    "PYTORCH_JIT": "0 switches scripting off",
}
_ALLOCATORS: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_OPTIONS: Final = (
    "backend", "expandable_segments", "garbage_collection_threshold", "graph_capture_record_stream_reuse",
    "max_non_split_rounding_mb", "max_split_size_mb", "per_process_memory_fraction", "pinned_max_register_threads",
    "pinned_num_register_threads", "pinned_reserve_segment_size_mb", "pinned_use_background_threads",
    "pinned_use_cuda_host_register", "release_lock_on_cudamalloc", "roundup_bypass_threshold_mb",
    "roundup_power2_divisions", "use_cuda_host_register",
)  # fmt: skip


def environment_notes(environment: Mapping[str, str], cores: int) -> list[tuple[str, str]]:
    """(variable, what it does) of those that are worth a line."""
    notes = [
        (name, f"{environment[name]}: {what}")
        for name, what in _DEBUGGING.items()
        if environment.get(name, "") not in (("", "1") if name == "PYTORCH_JIT" else ("", "0"))
    ]
    for name in _ALLOCATORS:
        options = [part.partition(":")[0].strip() for part in environment.get(name, "").split(",") if ":" in part]
        unknown = [option for option in options if option.isidentifier() and option not in _OPTIONS]
        if unknown:
            notes.append((name, f"{', '.join(unknown)}: no option that is known here"))
    threads = environment.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads) > cores:
        notes.append(("OMP_NUM_THREADS", f"{threads}: there are {cores} cores"))
    return notes
