"""Memory snapshots as `torch.cuda.memory._record_memory_history` records them, mode by mode, of a training loop.

No device is here, so the caching allocator's bookkeeping is done over again, after torch's C++ sources:

- an event has ``frames`` where its context was recorded: allocations from ``context="alloc"`` on, frees with their own
  stack for ``"all"`` and with that of the allocation for ``"alloc"``; for ``"state"`` only blocks have a stack;
- ``enabled="state"`` keeps one event; ``max_entries`` the last so many;
- ``stacks="all"`` puts the C++ frames of the unwinder, the allocator and ATen first; Python frames stand one by one
  before frames of the interpreter; from Python 3.11 on there are fewer of these, and the outer rest comes last;
- on the autograd engine's own thread there is no Python frame.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

MIB = 1 << 20
SITE = "/opt/env/lib/python3.11/site-packages"
Frames = list[dict[str, Any]]
_GATHER = ("torch::unwind::unwind()", "torch::CapturedTraceback::gather(bool, bool, bool)")
_CACHING = "c10::cuda::CUDACachingAllocator::Native::"
_EVAL = {"name": "_PyEval_EvalFrameDefault", "filename": "??", "line": 0}
_MAIN = ("PyEval_EvalCode", "run_mod", "pymain_run_python.constprop.0", "Py_BytesMain", "__libc_start_main", "_start")


def cpp(name: str, file: str = "??") -> dict[str, Any]:
    return {"name": name, "filename": file, "line": 0}


def py(function: str, file: str, line: int) -> dict[str, Any]:
    return {"name": function, "filename": file, "line": line}


MAIN = py("<module>", "/home/me/run/train.py", 60)
LOOP = py("train", "/home/me/run/train.py", 31)
CALL = py("_call_impl", f"{SITE}/torch/nn/modules/module.py", 1751)
ENTRY = py("<module>", "/opt/env/bin/torchrun", 8)
LINEAR = py("forward", f"{SITE}/torch/nn/modules/linear.py", 125)
EINOPS = py("einsum", f"{SITE}/einops/einops.py", 916)
BLOCK = py("forward", "/home/me/run/model.py", 22)
MODEL = py("forward", "/home/me/run/model.py", 48)
BUILD = py("__init__", "/home/me/run/model.py", 9)
KEEP = py("train", "/home/me/run/train.py", 37)
ADAM = py("_init_group", f"{SITE}/torch/optim/adamw.py", 154)
FOREACH = py("_multi_tensor_adamw", f"{SITE}/torch/optim/adamw.py", 600)
STEP = py("step", f"{SITE}/torch/optim/adamw.py", 232)
WRAPPER = py("wrapper", f"{SITE}/torch/optim/optimizer.py", 487)
STEP_LINE = py("train", "/home/me/run/train.py", 41)
ZERO = py("zero_grad", f"{SITE}/torch/optim/optimizer.py", 955)
ZERO_LINE = py("train", "/home/me/run/train.py", 42)

IN_FORWARD = (LINEAR, CALL, EINOPS, BLOCK, CALL, MODEL, CALL, LOOP, MAIN, ENTRY)
IN_BUILD = (py("__init__", f"{SITE}/torch/nn/modules/linear.py", 106), BUILD, MAIN, ENTRY)
IN_STATE = (ADAM, STEP, WRAPPER, STEP_LINE, MAIN, ENTRY)
IN_STEP = (FOREACH, STEP, WRAPPER, STEP_LINE, MAIN, ENTRY)
IN_HOOK = (FOREACH, STEP, WRAPPER, py("hook", "/home/me/run/train.py", 15))
IN_ZERO = (ZERO, ZERO_LINE, MAIN, ENTRY)
KEPT = (KEEP, MAIN, ENTRY)
ENGINE: tuple[dict[str, Any], ...] = ()
"""No Python frame: the engine's own thread."""
_NODE = (
    "torch::autograd::generated::MmBackward0::apply(std::vector<at::Tensor, std::allocator<at::Tensor> >&&)",
    "torch::autograd::Engine::evaluate_function(std::shared_ptr<torch::autograd::GraphTask>&, torch::autograd::Node*)",
    "torch::autograd::Engine::thread_main(std::shared_ptr<torch::autograd::GraphTask> const&)",
    "torch::autograd::python::PythonEngine::thread_init(int, std::shared_ptr<torch::autograd::ReadyQueue> const&, "
    "bool)",
)


@dataclass(frozen=True, kw_only=True)
class Mode:
    """Arguments of `_record_memory_history`, and of the allocator."""

    enabled: str = "all"
    context: str | None = "all"
    stacks: str = "all"
    max_entries: int = 10**9
    expandable: bool = False
    pool: tuple[int, int] = (0, 0)
    annotations: bool = False
    older: bool = False
    """As torch 2.0 wrote blocks: with a history."""

    def has(self, level: str) -> bool:
        levels = (None, "state", "alloc", "all")
        return levels.index(self.context) >= levels.index(level)


@dataclass
class _Block:
    address: int
    size: int
    requested: int
    frames: Frames | None


@dataclass
class Recorder:
    """One device that is recorded."""

    mode: Mode = field(default_factory=Mode)
    live: dict[int, _Block] = field(default_factory=dict)
    trace: list[dict[str, Any]] = field(default_factory=list)
    annotations: list[dict[str, Any]] = field(default_factory=list)
    _free: dict[int, list[int]] = field(default_factory=dict)
    _sizes: dict[int, int] = field(default_factory=dict)
    _next: int = 0x7F20_0000_0000
    _time: int = 1_748_729_391_819_440
    _known: dict[tuple[int, ...], Frames] = field(default_factory=dict)

    def alloc(self, nbytes: int, stack: Sequence[dict[str, Any]]) -> int:
        size = -(-nbytes // 512) * 512
        frames = self._frames(stack, "malloc") if self.mode.has("state") else None
        free = self._free.setdefault(size, [])
        if free:
            address = free.pop()
        else:
            address, self._next = self._next, self._next + size
            self._sizes[address] = size
            self._event("segment_map" if self.mode.expandable else "segment_alloc", address, size, frames)
        self.live[address] = _Block(address, size, nbytes, frames)
        self._event("alloc", address, nbytes, frames)
        return address

    def free(self, addresses: Iterable[int], stack: Sequence[dict[str, Any]]) -> None:
        for address in addresses:
            block = self.live.pop(address)
            frames = self._frames(stack, "free") if self.mode.has("all") else block.frames
            self._event("free_requested", address, block.requested, frames)
            self._event("free_completed", address, block.requested, frames)
            self._free[block.size].append(address)

    def oom(self, nbytes: int, device_free: int, stack: Sequence[dict[str, Any]]) -> None:
        self._event("oom", device_free, nbytes, self._frames(stack, "malloc") if self.mode.has("state") else None)
        self.trace[-1]["device_free"] = self.trace[-1].pop("addr")

    def annotate(self, name: str) -> None:
        """`record_function` around the optimizer's methods, with global_record_annotations."""
        if self.mode.annotations:
            for stage in ("START", "END"):
                self._time += 3
                self.annotations.append({"name": name, "stage": stage, "device": 0, "time_us": self._time})

    def content(self) -> Any:
        self._event("snapshot", 0, 0, None)
        used = sorted(self._sizes)
        segments = [self._segment(address) for address in used]
        if self.mode.older:
            return segments
        kept = self.trace[-(self.mode.max_entries if self.mode.enabled == "all" else 1) :]
        return {
            "segments": segments,
            "device_traces": [kept],
            "allocator_settings": {
                "PYTORCH_CUDA_ALLOC_CONF": "",
                "max_split_size": -1,
                "garbage_collection_threshold": 0.0,
                "expandable_segments": self.mode.expandable,
                "roundup_power2_divisions": {"1": 0, "2": 0},
            },
            "external_annotations": self.annotations,
        }

    def _segment(self, address: int) -> dict[str, Any]:
        size, block = self._sizes[address], self.live.get(address)
        one: dict[str, Any] = {
            "address": address,
            "size": size,
            "requested_size": 0 if block is None else block.requested,
            "state": "inactive" if block is None else "active_allocated",
            "frames": [] if block is None or block.frames is None else block.frames,
        }
        if self.mode.older:
            frames = one.pop("frames")
            requested = one.pop("requested_size")
            del one["address"]
            if block is not None:
                one["history"] = [{"addr": address, "frames": frames, "real_size": requested}]
        return {
            "device": 0,
            "address": address,
            "total_size": size,
            "allocated_size": 0 if block is None else size,
            "active_size": 0 if block is None else size,
            "requested_size": 0 if block is None else block.requested,
            "stream": 0,
            "segment_type": "large" if size > MIB else "small",
            "segment_pool_id": self.mode.pool,
            "is_expandable": self.mode.expandable,
            "frames": one.get("frames", []),
            "blocks": [one],
        }

    def _event(self, action: str, address: int, size: int, frames: Frames | None) -> None:
        self._time += 7
        entry = {"action": action, "addr": address, "size": size, "stream": 0, "time_us": self._time}
        entry |= {"compile_context": "N/A", "user_metadata": "", "pool_id": self.mode.pool}
        if frames is not None and self.mode.has("alloc"):
            entry["frames"] = frames
        self.trace.append(entry)

    def _frames(self, stack: Sequence[dict[str, Any]], action: str) -> Frames:
        key = (*map(id, stack), hash(action))
        if key not in self._known:
            self._known[key] = list(stack) if self.mode.stacks == "python" else _with_cpp(stack, action)
        return self._known[key]


def _with_cpp(stack: Sequence[dict[str, Any]], action: str) -> Frames:
    """C++ first; Python frames before frames of the interpreter, while there are any, the outer rest after the last."""
    frames = [cpp(name) for name in _GATHER]
    frames.append(cpp("torch::cuda::(anonymous namespace)::gather_with_cpp()", "memory_snapshot.cpp"))
    frames.append(cpp(f"{_CACHING}DeviceCachingAllocator::{action}(unsigned long)", "CUDACachingAllocator.cpp"))
    frames.append(cpp("at::detail::empty_generic(c10::ArrayRef<long>, c10::Allocator*)", "EmptyTensor.cpp"))
    frames.append(cpp("std::function<void ()>::operator()() const", "/usr/include/c++/11/functional"))
    if not stack:
        return [*frames, *(cpp(name) for name in _NODE), cpp("start_thread")]
    matched = len(stack) - len(stack) // 3
    for frame in stack[:matched]:
        frames += [frame, _EVAL, cpp("method_vectorcall.llvm.12275804309777372242")]
    return [*frames, *(cpp(name) for name in _MAIN), *stack[matched:]]


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A training loop: ``keeps`` bytes stay of each step; a fused optimizer allocates in its first step only."""

    steps: int = 10
    layers: int = 4
    keeps: int = 0
    fused: bool = False
    late_state: bool = False
    """Half of the parameters get their first gradient, and their state, one by one."""
    in_backward: bool = False
    """The optimizer steps each parameter once its gradient is there, in a hook."""
    lingers: bool = False
    """What the optimizer allocates lives until the next forward."""

    def record(self, recorder: Recorder) -> None:
        parameters = [recorder.alloc(4 * MIB, IN_BUILD) for _ in range(self.layers)]
        kept: list[int] = []
        for step in range(self.steps):
            held = []
            for _ in range(self.layers):
                held.append(recorder.alloc(8 * MIB, IN_FORWARD))
                recorder.free(kept, IN_FORWARD)
                kept = []
            if self.keeps:
                recorder.alloc(self.keeps, KEPT)
            gradients = []
            for address in reversed(held):
                gradients.append(recorder.alloc(4 * MIB, ENGINE))
                recorder.free([address], ENGINE)
                if self.in_backward:
                    recorder.free([recorder.alloc(6 * MIB, IN_HOOK)], IN_HOOK)
                    recorder.free([gradients.pop()], IN_HOOK)
            if self.in_backward:
                continue
            if self.lingers:
                kept = [recorder.alloc(2 * MIB, IN_STEP)]
            if step == 0:
                for _ in parameters:
                    recorder.alloc(8 * MIB, IN_STATE)
            elif self.late_state:
                recorder.alloc(2 * MIB, IN_STATE)
            if not self.fused:
                recorder.free([recorder.alloc(6 * MIB, IN_STEP)], IN_STEP)
            recorder.annotate("Optimizer.step#AdamW.step")
            recorder.free(gradients, IN_ZERO)
            recorder.annotate("Optimizer.zero_grad#AdamW.zero_grad")


def one_forward(recorder: Recorder, layers: int = 60) -> None:
    """A forward, layer by layer: each saves something and frees a temporary that is as large as a step looks."""
    recorder.alloc(64 * MIB, IN_BUILD)
    for _ in range(layers):
        recorder.alloc(8 * MIB, IN_FORWARD)
        recorder.free([recorder.alloc(40 * MIB, IN_FORWARD)], IN_FORWARD)


def one_step(recorder: Recorder, layers: int = 60) -> None:
    """One step: a forward, a backward, and an optimizer that makes its state parameter by parameter, with "
    "temporaries."""
    recorder.alloc(64 * MIB, IN_BUILD)
    held = [recorder.alloc(8 * MIB, IN_FORWARD) for _ in range(layers)]
    for address in reversed(held):
        recorder.alloc(4 * MIB, ENGINE)
        recorder.free([address], ENGINE)
    for _ in range(layers):
        recorder.alloc(8 * MIB, IN_STATE)
        recorder.free([recorder.alloc(40 * MIB, IN_STEP)], IN_STEP)
