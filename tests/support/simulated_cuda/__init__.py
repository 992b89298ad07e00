"""A CUDA device made of host memory and threads, so that device code runs on a CPU build of PyTorch.

`environment()` is a process's environment in which ``torch.cuda`` finds such devices, for that process and those that
it starts. Each stream is a thread: kernels and copies run later, in its order, so that a missing event shows as wrong
bits. The host cannot read device addresses, and memory is filled with ones when it is freed. The allocator rounds,
splits and counts as CUDACachingAllocator does. No graphs are captured, nothing is compiled, and kernels are the CPU's:
bits and bytes are tested here, times are not.

Settings, in the environment: ``SIMULATED_CUDA_MEMORY`` bytes of each device, separated by commas; ``_DELAY_US`` the
longest random delay of a copy; ``_SEED`` of the delays; ``_POISON=0`` leaves freed memory as it is; ``_SYNC=1`` runs
kernels when they are called.

    python -m support.simulated_cuda benchmarks.gpu.kit --tiny  # in tests/: a module on a simulated device
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.abc
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
MEMORY = "SIMULATED_CUDA_MEMORY"
LIBRARY = "SIMULATED_CUDA_LIBRARY"
"""Environment variable: the library that `build` made."""
STATISTICS = (
    "allocation",
    "segment",
    "active",
    "inactive_split",
    "allocated_bytes",
    "reserved_bytes",
    "active_bytes",
    "inactive_split_bytes",
    "requested_bytes",
)
POOLS = ("all", "small_pool", "large_pool")
FIELDS = ("current", "peak", "allocated", "freed")
COMPILER = shutil.which("g++")
device: ctypes.CDLL | None = None


def environment(**settings: str) -> Mapping[str, str]:
    """A process's environment with simulated devices; ``memory="4194304"`` is ``SIMULATED_CUDA_MEMORY``."""
    folders = (HERE / "site", ROOT / "src", ROOT / "tests", ROOT)
    named = {f"SIMULATED_CUDA_{name.upper()}": value for name, value in settings.items()}
    path = os.pathsep.join(map(str, folders))
    return os.environ | {MEMORY: str(4 << 30), LIBRARY: str(build()), "PYTHONPATH": path} | named


def build() -> Path:
    """Compile the device for the installed torch, once a user, machine and version; a minute."""
    source = HERE / "device.cpp"
    torch = Path(importlib.util.find_spec("torch").origin).parent
    known = hashlib.sha256(source.read_bytes() + importlib.metadata.version("torch").encode() + str(torch).encode())
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "jettison-tests"
    library = folder / f"simulated_cuda-{known.hexdigest()[:16]}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / library.name
            headers = [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"]
            found = [f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch / 'lib'}"]
            command = [str(COMPILER), "-O1", "-std=c++20", "-fPIC", "-shared", "-w", *headers, str(source)]
            subprocess.run([*command, "-o", str(made), *found], check=True)
            made.replace(library)
    return library


def load() -> None:
    """Load torch's libraries and ours, before anything asks which hooks CUDA has."""
    global device
    where = Path(importlib.util.find_spec("torch").origin).parent / "lib"
    for path in (*sorted(where.glob("libgomp*")), where / "libc10.so", where / "libtorch_cpu.so"):
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    device = ctypes.CDLL(os.environ[LIBRARY], mode=ctypes.RTLD_GLOBAL)
    device.sim_stat.restype = device.sim_pinned.restype = ctypes.c_int64
    device.sim_bad_fork.restype = ctypes.c_bool
    device.sim_setup()


def fill(C: Any) -> None:
    """Put into `torch._C` what a CUDA build has there."""
    import torch

    sizes = [int(text) for text in os.environ[MEMORY].split(",")]
    observers: list[Any] = []

    class StreamBase(C.Stream):
        def __new__(cls, priority=0, **kwargs):
            if "stream_ptr" in kwargs:
                raise NotImplementedError
            if kwargs:
                return super().__new__(
                    cls,
                    stream_id=kwargs["stream_id"],
                    device_index=kwargs["device_index"],
                    device_type=kwargs["device_type"],
                )
            return super().__new__(cls, device=f"cuda:{getDevice()}", priority=priority)

        cuda_stream = property(lambda self: self.stream_id)
        priority = 0

    class EventBase(C.Event):
        def __new__(cls, enable_timing=False, blocking=False, interprocess=False, external=False):
            made = super().__new__(cls, device="cuda", enable_timing=enable_timing)
            made.twin = C.Event("cuda", enable_timing=True) if enable_timing else None  # C takes none of a subclass
            return made

        def record(self, stream=None):
            super().record(stream)
            if self.twin is not None:
                self.twin.record(stream)

        def elapsed_time(self, other):
            return self.twin.elapsed_time(other.twin)

        cuda_event = property(lambda self: id(self))

    class Graph:  # not simulated
        def __new__(cls, *_, **__):
            raise RuntimeError("a simulated device captures no graphs")

    class Properties:
        major, minor, multi_processor_count, warp_size = 9, 0, 132, 32
        is_integrated = is_multi_gpu_board = 0
        L2_cache_size, regs_per_multiprocessor, max_threads_per_multi_processor = 50 << 20, 65536, 2048
        shared_memory_per_block, shared_memory_per_block_optin, shared_memory_per_multiprocessor = 49152, 232448, 233472
        gcnArchName, uuid, pci_bus_id, clock_rate, memory_clock_rate, memory_bus_width = (
            "",
            "sim",
            0,
            1980000,
            2619000,
            5120,
        )

        def __init__(self, index):
            self.name, self.total_memory = "simulated", sizes[index]

    def getDevice():
        return C._accelerator_getDeviceIndex()

    def setDevice(index):
        if not index < count():
            raise RuntimeError("CUDA error: invalid device ordinal")
        if index >= 0:
            C._accelerator_setDeviceIndex(index)

    def exchange(index):
        was = getDevice()
        setDevice(index)
        return was

    def count():
        return len(sizes)

    def stats(index):
        found = {
            name: {
                pool: {field: device.sim_stat(index, a, p, f) for f, field in enumerate(FIELDS)}
                for p, pool in enumerate(POOLS)
            }
            for a, name in enumerate(STATISTICS)
        }
        retries, ooms = (device.sim_stat(index, len(STATISTICS), which, 0) for which in (0, 1))
        return found | {"num_alloc_retries": retries, "num_ooms": ooms, "max_split_size": -1}

    def init():
        device.sim_init()
        device.sim_hand_default(True)
        torch.cuda.default_generators = tuple(C.Generator(device=f"cuda:{i}") for i in range(count()))
        device.sim_hand_default(False)

    def stream_data(device):
        s = C._accelerator_getStream(device)
        return s.stream_id, s.device_index, s.device_type

    def set_stream(stream_id, device_index, device_type):
        C._accelerator_setStream(C.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type))

    def snapshot(*_):
        return {
            "segments": [],
            "device_traces": [[] for _ in range(count())],
            "allocator_settings": {},
            "external_annotations": [],
        }

    def nothing(*_, **__):
        return None

    torch.version.cuda = "12.8"
    new = {
        "_has_cuda": True,
        "_CudaStreamBase": StreamBase,
        "_CudaEventBase": EventBase,
        "_CudaDeviceProperties": Properties,
        "_CUDAGraph": Graph,
        "_graph_pool_handle": lambda: (0, 1),
        "_cuda_getDeviceCount": count,
        "_cuda_init": init,
        "_cuda_getDevice": getDevice,
        "_cuda_setDevice": setDevice,
        "_cuda_exchangeDevice": exchange,
        "_cuda_maybeExchangeDevice": exchange,
        "_cuda_isInBadFork": lambda: device.sim_bad_fork(),
        "_cuda_getCurrentStream": stream_data,
        "_cuda_getDefaultStream": lambda d: (0, d, 1),
        "_cuda_setStream": set_stream,
        "_cuda_getCurrentRawStream": lambda d: stream_data(d)[0],
        "_cuda_synchronize": lambda: C._accelerator_synchronizeDevice(getDevice()),
        "_cuda_emptyCache": lambda: C._accelerator_emptyCache(),
        "_cuda_memoryStats": stats,
        "_cuda_resetPeakMemoryStats": lambda d: C._accelerator_resetPeakStats(d),
        "_cuda_resetAccumulatedMemoryStats": lambda d: C._accelerator_resetAccumulatedStats(d),
        "_cuda_getArchFlags": lambda: "sm_90",
        "_cuda_getCompiledVersion": lambda: 12080,
        "_cuda_isCurrentStreamCapturing": lambda: False,
        "_cuda_memorySnapshot": snapshot,
        "_cuda_record_memory_history": nothing,
        "_cuda_attach_out_of_memory_observer": observers.append,
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_hasPrimaryContext": lambda d: True,
        "_cuda_canDeviceAccessPeer": lambda a, b: True,
        "_cuda_ipc_collect": nothing,
        "_cuda_setMemoryFraction": nothing,
        "_cuda_getMemoryFraction": lambda d: 1.0,
        "_cuda_sleep": lambda cycles: device.sim_sleep(ctypes.c_int64(cycles // 2000)),
        "_cuda_hostMemoryStats": lambda: {"allocated_bytes": {f: device.sim_pinned() for f in FIELDS[:2]}},
        "_cuda_set_sync_debug_mode": nothing,
        "_cuda_get_sync_debug_mode": lambda: 0,
        "_cuda_isHistoryEnabled": lambda: False,
        "_cuda_clearCublasWorkspaces": nothing,
        "_cuda_get_cudnn_benchmark_limit": lambda: 10,
        "_cuda_set_cudnn_benchmark_limit": nothing,
    }
    for name, value in new.items():
        setattr(C, name, value)


class Runtime:
    """Functions of CUDA's runtime that `torch.cuda` calls."""

    @staticmethod
    def cudaMemGetInfo(device):
        import torch

        return torch._C._accelerator_getMemoryInfo(device)

    class cudaError:
        success = 0

    @staticmethod
    def cudaGetErrorString(code):
        return str(code)

    @staticmethod
    def cudaDeviceSynchronize():
        import torch

        torch.cuda.synchronize()
        return 0


class Finder(importlib.abc.MetaPathFinder):
    """Load the device before torch, and fill `torch._C` before torch.cuda is imported."""

    def __init__(self) -> None:
        self.busy = False

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        if self.busy or name not in ("torch", "torch.cuda"):
            return None
        self.busy = True
        try:
            if name == "torch":
                if device is None:
                    load()
                return None
            spec = importlib.util.find_spec(name)
        finally:
            self.busy = False
        import torch

        fill(torch._C)
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            module._cudart = Runtime
            module._parse_visible_devices = lambda: ["MIG-simulated"]
            module._get_device_properties = lambda index: torch._C._CudaDeviceProperties(index)

        spec.loader.exec_module = exec_module
        return spec


def install() -> None:
    """Give torch simulated devices, in a process that has not imported it."""
    sys.meta_path.insert(0, Finder())
