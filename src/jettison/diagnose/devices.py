"""Per type of device: the tools and settings that advice may name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True)
class DeviceWords:
    """One type of device.

    Args:
        processes: a command that lists the processes on a device; "" where there is none.
        choose: an environment variable's setting that takes another device; "" where there is one device.
        expandable: the setting that lets segments grow in place; "" where the allocator has none.
        communicators: a setting that lists the communication library's groups; "" where there is none.
        library: of communication.
        outside: what a process holds outside of PyTorch's allocator.
        empty_cache: the call that gives unused memory back.
        allocated: the call that returns the bytes of tensors; "" where `jettison.watch` counts them.
        fraction: the call that leaves a share of the device to libraries; "" where there is none.
        checkpoint: a line that recomputes a block, where a plan of ours does not run; "" where it does.
    """

    name: str
    processes: str = ""
    choose: str = ""
    expandable: str = ""
    communicators: str = ""
    library: str = "the communication library"
    outside: str = "context, libraries"
    empty_cache: str = ""
    allocated: str = ""
    fraction: str = ""
    checkpoint: str = ""


DEVICES: Final[dict[str, DeviceWords]] = {
    "cuda": DeviceWords(
        name="CUDA",
        processes="nvidia-smi --query-compute-apps=pid,used_memory --format=csv",
        choose="CUDA_VISIBLE_DEVICES=1",
        expandable="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        communicators="NCCL_DEBUG=INFO",
        library="NCCL",
        outside="CUDA context, NCCL, libraries",
        empty_cache="torch.cuda.empty_cache()",
        fraction="torch.cuda.set_per_process_memory_fraction(0.95)",
    ),
    "hip": DeviceWords(
        name="HIP",
        processes="rocm-smi --showpids",
        choose="HIP_VISIBLE_DEVICES=1",
        expandable="PYTORCH_HIP_ALLOC_CONF=expandable_segments:True",
        communicators="NCCL_DEBUG=INFO",
        library="RCCL",
        outside="HIP context, RCCL, MIOpen workspaces, libraries",
        empty_cache="torch.cuda.empty_cache()",
        fraction="torch.cuda.set_per_process_memory_fraction(0.95)",
    ),
    "xpu": DeviceWords(
        name="XPU",
        processes="xpu-smi ps",
        choose="ZE_AFFINITY_MASK=1",
        communicators="CCL_LOG_LEVEL=info",
        library="oneCCL",
        outside="Level Zero context, oneCCL, libraries",
        empty_cache="torch.xpu.empty_cache()",
        allocated="torch.xpu.memory_allocated()",
        fraction="torch.xpu.set_per_process_memory_fraction(0.95)",
    ),
    "npu": DeviceWords(
        name="NPU",
        processes="npu-smi info",
        choose="ASCEND_RT_VISIBLE_DEVICES=1",
        expandable="PYTORCH_NPU_ALLOC_CONF=expandable_segments:True",
        communicators="ASCEND_GLOBAL_LOG_LEVEL=1",
        library="HCCL",
        outside="CANN context, HCCL, libraries",
        empty_cache="torch.npu.empty_cache()",
        allocated="torch.npu.memory_allocated()",
        fraction="torch.npu.set_per_process_memory_fraction(0.95)",
    ),
    "mlu": DeviceWords(
        name="MLU",
        processes="cnmon info",
        choose="MLU_VISIBLE_DEVICES=1",
        expandable="PYTORCH_MLU_ALLOC_CONF=expandable_segments:True",
        library="CNCL",
        outside="MLU context, CNCL, libraries",
        empty_cache="torch.mlu.empty_cache()",
        allocated="torch.mlu.memory_allocated()",
        fraction="torch.mlu.set_per_process_memory_fraction(0.95)",
    ),
    "musa": DeviceWords(
        name="MUSA",
        processes="mthreads-gmi",
        choose="MUSA_VISIBLE_DEVICES=1",
        library="MCCL",
        outside="MUSA context, MCCL, libraries",
        empty_cache="torch.musa.empty_cache()",
        allocated="torch.musa.memory_allocated()",
        fraction="torch.musa.set_per_process_memory_fraction(0.95)",
    ),
    "hpu": DeviceWords(
        name="HPU",
        processes="hl-smi",
        choose="HABANA_VISIBLE_MODULES=1",
        library="HCCL",
        outside="Synapse graphs, HCCL, libraries",
        allocated="torch.hpu.memory_allocated()",
    ),
    "tpu": DeviceWords(
        name="TPU",
        outside="compiled programs",
        checkpoint="x = torch_xla.utils.checkpoint.checkpoint(block, x)    # JAX: jax.checkpoint(block)(x)",
    ),
    "neuron": DeviceWords(
        name="Neuron",
        processes="neuron-top",
        choose="NEURON_RT_VISIBLE_CORES=1",
        outside="compiled programs, scratchpads",
        checkpoint="x = torch_xla.utils.checkpoint.checkpoint(block, x)",
    ),
    "mps": DeviceWords(
        name="MPS",
        outside="Metal: compiled graphs, other buffers",
        empty_cache="torch.mps.empty_cache()",
        allocated="torch.mps.current_allocated_memory()",
    ),
    "cpu": DeviceWords(name="CPU"),
}


_ANY_ALLOCATED: Final = "torch.accelerator.memory_allocated()"


def words_of(device: str) -> DeviceWords:
    """Return the words of a type of device; those of a device without tools where it is not known."""
    return DEVICES.get(device, DeviceWords(name=device.upper(), allocated=_ANY_ALLOCATED))
