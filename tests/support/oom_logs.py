"""Logs in which memory ran out, in the forms in which people have them, and what is right of each.

Messages are in the forms that programs write; everything around them is made up. Sizes are in GiB.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from jettison.diagnose.finding import FindingKind
from jettison.diagnose.memory_facts import StepPhase
from support.planted_memory import traceback

SITE = "/opt/env/lib/python3.11/site-packages"
CALL = (f"{SITE}/torch/nn/modules/module.py", 1751, "_call_impl")
ME = ("/work/run/train.py", 88, "<module>")
MODEL = (ME, CALL, ("/work/run/model.py", 31, "forward"))
TENSOR = (f"{SITE}/torch/_tensor.py", 581, "backward")
ENGINE = (f"{SITE}/torch/autograd/__init__.py", 347, "backward")
BACKWARD = (ME, TENSOR, ENGINE)
STEP = (ME, (f"{SITE}/torch/optim/optimizer.py", 487, "wrapper"), (f"{SITE}/torch/optim/adamw.py", 232, "step"))
HINT = (
    " If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to "
    "avoid "
    "fragmentation.  See documentation for Memory Management  "
    "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
)
OLD_HINT = (
    " If reserved memory is >> allocated memory try setting max_split_size_mb to avoid fragmentation.  See "
    "documentation "
    "for Memory Management and PYTORCH_CUDA_ALLOC_CONF"
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One log. ``holders``: GiB by name; ``says`` and ``never``: words of the whole output."""

    name: str
    text: str | bytes
    kind: FindingKind
    device: str = "cuda"
    requested: float | None = None
    allocated: float | None = None
    unused: float | None = None
    free: float | None = None
    total: float | None = None
    holders: Mapping[str, float] = field(default_factory=dict)
    phase: StepPhase | None = None
    site: str | None = None
    trainer: str = ""
    first: str = ""
    says: tuple[str, ...] = ()
    never: tuple[str, ...] = ()


def new(
    requested: str,
    total: str,
    free: str,
    allocated: str,
    unused: str,
    *,
    own: str = "",
    others: str = "",
    device: str = "CUDA",
) -> str:
    """torch 2.1 and later."""
    own = f"Including non-PyTorch memory, this process has {own} memory in use. " if own else ""
    return (
        f"torch.OutOfMemoryError: {device} out of memory. Tried to allocate {requested}. GPU 0 has a total capacity of "
        f"{total} "
        f"of which {free} is free. {others}{own}Of the allocated memory {allocated} is allocated by PyTorch, and "
        f"{unused} "
        f"is reserved by PyTorch but unallocated.{HINT}\n"
    )


def old(
    requested: str, total: str, allocated: str, free: str, reserved: str, *, active: str = "", device: str = "CUDA"
) -> str:
    """torch 1.4 to 2.0."""
    unit = "NPU" if device == "NPU" else "GPU"
    return (
        f"RuntimeError: {device} out of memory. Tried to allocate {requested} ({unit} 0; {total} total capacity; "
        f"{allocated} "
        f"already allocated; {active}{free} free; {reserved} reserved in total by PyTorch){OLD_HINT}\n"
    )


def each(prefix: str, text: str) -> str:
    return "".join(f"{prefix}{line}\n" for line in text.splitlines())


PLAIN = new("2.00 GiB", "79.15 GiB", "0.75 GiB", "76.50 GiB", "0.40 GiB", own="78.39 GiB")
PLAIN_IS = {"requested": 2.0, "allocated": 76.5, "unused": 0.4, "free": 0.75, "total": 79.15}
OUTSIDE, OTHERS = "this process, outside PyTorch", "other processes"
UNNAMED = "another process, or this one outside PyTorch"
NO_CUDA = ("nvidia-smi", "NCCL", "CUDA", "PYTORCH_CUDA_ALLOC_CONF")
HF = f"{SITE}/transformers/trainer.py"
TRAINER = (ME, (HF, 2237, "train"), (HF, 2578, "_inner_training_loop"), (HF, 3792, "training_step"))
LOSS = (
    *TRAINER,
    (HF, 3879, "compute_loss"),
    CALL,
    (f"{SITE}/transformers/models/llama/modeling_llama.py", 842, "forward"),
    (f"{SITE}/transformers/loss/loss_utils.py", 47, "ForCausalLMLoss"),
)
RICH = (
    "╭───────────────────── Traceback (most recent call last) ──────────────────────╮\n"
    "│ /work/run/train.py:88 in <module>                                            │\n"
    "│                                                                              │\n"
    "│ ❱  88 loss = model(batch).loss                                               │\n"
    "│                                                                              │\n"
    "│ /opt/env/lib/python3.11/site-packages/torch/nn/modules/module.py:1501 in     │\n"
    "│ _call_impl                                                                   │\n"
    "│                                                                              │\n"
    "│ /work/run/model.py:31 in forward                                             │\n"
    "│                                                                              │\n"
    "│ ❱  31 return self.down(F.silu(self.gate(x)) * self.up(x))                    │\n"
    "╰──────────────────────────────────────────────────────────────────────────────╯\n"
)
KILL = (
    "Nov 20 03:11:07 node7 kernel: python3 invoked oom-killer: gfp_mask=0x140cca(GFP_HIGHUSER_MOVABLE|__GFP_COMP), "
    "order=0\n"
    "Nov 20 03:11:07 node7 kernel: memory: usage 134217728kB, limit 134217728kB, failcnt 51\n"
    "Nov 20 03:11:07 node7 kernel: Memory cgroup out of memory: Killed process 48113 (python3) total-vm:201326592kB, "
    "anon-rss:104857600kB, file-rss:131072kB, shmem-rss:0kB, UID:1000 pgtables:210000kB oom_score_adj:0\n"
)

# as reported ----------------------------------------------------------------------------------------------------------

REPORTED = (
    Case(
        name="memory of an optimizer's first step that lies in pieces",
        text=traceback((f"{SITE}/torch/optim/adamw.py", 599, "_multi_tensor_adamw"))
        + new("98.00 MiB", "15.77 GiB", "5.12 MiB", "13.76 GiB", "540.64 MiB", own="15.76 GiB"),
        kind=FindingKind.FRAGMENTATION,
        phase=StepPhase.OPTIMIZER,
        says=("foreach=False", "2.8 % of the device", "a next request may fail"),
        never=("pad_to_multiple_of", "auto_checkpoint"),
    ),
    Case(
        name="pieces that would leave next to nothing",
        text=new("980.00 MiB", "23.65 GiB", "592.06 MiB", "21.89 GiB", "721.25 MiB", own="23.05 GiB"),
        kind=FindingKind.FRAGMENTATION,
        says=("expandable_segments:True", "1.4 % of the device", "pad_to_multiple_of", "auto_checkpoint(model, batch,"),
    ),
    Case(
        name="DeepSpeed makes its fp32 weights",
        text=traceback(
            ME,
            (f"{SITE}/deepspeed/runtime/zero/stage3.py", 327, "__init__"),
            (f"{SITE}/deepspeed/runtime/zero/stage3.py", 372, "_setup_for_real_optimizer"),
            (f"{SITE}/deepspeed/runtime/zero/stage3.py", 690, "_create_fp32_partitions"),
        )
        + old("1.43 GiB", "23.70 GiB", "21.43 GiB", "1.02 GiB", "21.44 GiB"),
        kind=FindingKind.PEAK,
        phase=StepPhase.OPTIMIZER,
        trainer="DeepSpeed",
        first='"offload_optimizer": {"device": "cpu"}',
        never=("fully_shard", "mmap"),
    ),
    Case(
        name="a mask of a wrong shape, in front of a fused kernel",
        text=traceback(
            (f"{SITE}/axolotl/monkeypatch/attention.py", 340, "forward"),
            (f"{SITE}/flash_attn/bert_padding.py", 17, "forward"),
        )
        + old("341.58 GiB", "79.15 GiB", "5.62 GiB", "72.91 GiB", "5.73 GiB"),
        kind=FindingKind.PEAK,
        trainer="Axolotl",
        first="value.shape",
        never=("scaled_dot_product_attention",),
    ),
    Case(
        name="a cell of Colab, whose output accelerate makes fp32",
        text="OutOfMemoryError                          Traceback (most recent call last)\n"
        "[<ipython-input-7-3d62c5>](https://localhost:8080/#) in <cell line: 1>()\n"
        "----> 1 trainer.train()\n\n13 frames\n"
        f"[{SITE}/accelerate/utils/operations.py](https://localhost:8080/#) in _convert_to_fp32(tensor)\n"
        "--> 781         return tensor.float()\n\n"
        + new("9.47 GiB", "14.75 GiB", "3.78 GiB", "10.69 GiB", "122.44 MiB"),
        kind=FindingKind.PEAK,
        phase=StepPhase.FORWARD,
        site="<ipython-input-7-3d62c5>:0 <cell line: 1>",
        first="LigerFusedLinearCrossEntropyLoss",
    ),
    Case(
        name="an Apple device, in a Trainer",
        text=traceback(
            (HF, 2560, "_inner_training_loop"), (f"{SITE}/accelerate/accelerator.py", 1964, "backward"), TENSOR
        )
        + "RuntimeError: MPS backend out of memory (MPS allocated: 11.14 GB, other allocations: 6.65 GB, max "
        "allowed: 18.13 "
        "GB). Tried to allocate 375.40 MB on private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable "
        "upper limit "
        "for memory allocations (may cause system failure).\n",
        kind=FindingKind.OUTSIDE,
        device="mps",
        requested=375.4 / 1024,
        allocated=11.14,
        total=18.13,
        free=18.13 - 11.14 - 6.65,
        holders={OUTSIDE: 6.65},
        phase=StepPhase.BACKWARD,
        trainer="transformers Trainer",
        says=("TrainingArguments(gradient_checkpointing=True)", "auto_checkpoint_trainer(trainer", "6.7 GiB", "Metal"),
        never=NO_CUDA,
    ),
    Case(
        name="XPU, free enough",
        text=traceback(ME) + new("16.00 GiB", "16.48 GiB", "16.07 GiB", "0 bytes", "0 bytes", device="XPU"),
        kind=FindingKind.UNKNOWN,
        device="xpu",
        requested=16.0,
        allocated=0.0,
        free=16.07,
        total=16.48,
        says=("16.1 GiB were free", "xpu-smi", "torch.xpu.empty_cache()"),
        never=NO_CUDA,
    ),
    Case(
        name="XPU, free not said",
        text="torch.OutOfMemoryError: XPU out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total capacity of "
        "13.74 GiB. "
        "Of the allocated memory 10.10 GiB is allocated by PyTorch, and 3.47 GiB is reserved by PyTorch but "
        "unallocated. "
        "Please use `empty_cache` to release all unoccupied cached memory.\n",
        kind=FindingKind.PEAK,
        device="xpu",
        requested=4.0,
        allocated=10.1,
        unused=3.47,
        free=13.74 - 10.1 - 3.47,
        total=13.74,
        says=("14.1 GiB at once",),
        never=NO_CUDA,
    ),
    Case(
        name="a T4 of which PyTorch has next to nothing",
        text=old("256.00 MiB", "15.56 GiB", "421.00 MiB", "112.00 MiB", "460.00 MiB"),
        kind=FindingKind.OTHERS,
        requested=0.25,
        allocated=421 / 1024,
        unused=39 / 1024,
        free=112 / 1024,
        total=15.56,
        holders={UNNAMED: 15.56 - 112 / 1024 - 460 / 1024},
        says=("15.0 GiB of the device are neither free nor PyTorch's", "nvidia-smi"),
        never=("auto_checkpoint",),
    ),
    Case(
        name="more than the device has, in shared memory",
        text="torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 30.00 MiB. GPU 0 has a total "
        "capacity of "
        "11.00 GiB of which 0 bytes is free. Of the allocated memory 16.98 GiB is allocated by PyTorch, and 696.75 "
        "MiB is "
        f"reserved by PyTorch but unallocated.{HINT}\n",
        kind=FindingKind.PEAK,
        requested=30 / 1024,
        allocated=16.98,
        unused=696.75 / 1024,
        free=0.0,
        total=11.0,
        holders={"shared or virtual memory": -(16.98 + 696.75 / 1024 - 11.0)},
        says=("6.7 GiB are above what the device holds", '"10137MiB"'),
        never=("fragmentation:",),
    ),
    Case(
        name="HIP, of which others have most",
        text=traceback((f"{SITE}/torch/nn/modules/conv.py", 549, "_conv_forward"))
        + new("4.50 GiB", "15.98 GiB", "1.40 GiB", "1.26 GiB", "152.50 MiB", device="HIP"),
        kind=FindingKind.OTHERS,
        device="hip",
        requested=4.5,
        allocated=1.26,
        free=1.4,
        total=15.98,
        phase=StepPhase.FORWARD,
        holders={UNNAMED: 15.98 - 1.4 - 1.26 - 152.5 / 1024},
        says=("13.2 GiB", "rocm-smi", "HIP_VISIBLE_DEVICES"),
        never=("nvidia-smi", "NCCL_DEBUG", "auto_checkpoint"),
    ),
    Case(
        name="an NPU, while a model is loaded",
        text=traceback((f"{SITE}/accelerate/utils/modeling.py", 400, "set_module_tensor_to_device"))
        + "RuntimeError: NPU out of memory. Tried to allocate 386.00 MiB (NPU 2; 60.97 GiB total capacity; 59.57 "
        "GiB already "
        "allocated; 59.57 GiB current active; 16.54 MiB free; 60.06 GiB reserved in total by PyTorch) If reserved "
        "memory is "
        ">> allocated memory try setting max_split_size_mb to avoid fragmentation.\n"
        "Loading checkpoint shards:  42%|████      | 16/38 [00:14<00:19,  1.13it/s]\n",
        kind=FindingKind.PEAK,
        device="npu",
        requested=386 / 1024,
        allocated=59.57,
        unused=60.06 - 59.57,
        free=16.54 / 1024,
        total=60.97,
        phase=StepPhase.PARAMETERS,
        says=("16 of 38 shards", "fully_shard"),
        never=("auto_checkpoint", "nvidia-smi"),
    ),
    Case(
        name="a message that rich wraps within a figure",
        text=RICH
        + "OutOfMemoryError: CUDA out of memory. Tried to allocate 1.25 GiB (GPU 1; 79.10 GiB total capacity; 76.13 "
        "GiB \n"
        "already allocated; 290.12 MiB free; 77.47 GiB reserved in total by PyTorch) If reserved memory is >> "
        "allocated \n"
        "memory try setting max_split_size_mb to avoid fragmentation.  See documentation for Memory Management and \n"
        "PYTORCH_CUDA_ALLOC_CONF\n",
        kind=FindingKind.FRAGMENTATION,
        requested=1.25,
        allocated=76.13,
        unused=77.47 - 76.13,
        free=290.12 / 1024,
        total=79.10,
        site="run/model.py:31 forward",
    ),
    Case(
        name="NCCL, which found no room",
        text="node3:3063028:3066152 [3] include/alloc.h:178 NCCL WARN Cuda failure 'out of memory'\n"
        "node3:3063028:3066152 [3] include/alloc.h:185 NCCL WARN Failed to CUDA calloc 6291456 bytes\n"
        "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1296, "
        "unhandled cuda error, NCCL version 2.18.1\n",
        kind=FindingKind.OUTSIDE,
        requested=6 / 1024,
        says=("NCCL found no room", "set_per_process_memory_fraction"),
        never=("auto_checkpoint",),
    ),
    Case(
        name="an absurd size",
        text=old("130674.91 GiB", "79.15 GiB", "27.53 GiB", "37.61 GiB", "28.21 GiB"),
        kind=FindingKind.SIZE,
        requested=130674.91,
        allocated=27.53,
        total=79.15,
        says=("130674.9 GiB", "no plan helps"),
        never=("auto_checkpoint", "jettison plan"),
    ),
    Case(
        name="cudaMallocAsync",
        text="torch.OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of memory)\n"
        "Currently allocated     : 15.16 GiB\nRequested               : 512.00 KiB\nDevice limit            : 15.99 "
        "GiB\n"
        "Free (according to CUDA): 0 bytes\nPyTorch limit (set by user-supplied memory fraction)\n"
        "                        : 17179869184.00 GiB\n",
        kind=FindingKind.PEAK,
        requested=512 / 1024**2,
        allocated=15.16,
        free=0.0,
        total=15.99,
        says=('"15523MiB"', "512.0 KiB"),
        never=("17179869184", "expandable"),
    ),
)

# of our own making ----------------------------------------------------------------------------------------------------

ALLOCATORS = (
    Case(
        name="our own process in a container, beside others",
        text=traceback(*MODEL)
        + new(
            "1.50 GiB",
            "79.15 GiB",
            "0.90 GiB",
            "71.02 GiB",
            "0.12 GiB",
            others="Process 3712345 has 75.68 GiB memory in use. Process 3712811 has 2.50 GiB memory in use. ",
        ),
        kind=FindingKind.OTHERS,
        requested=1.5,
        allocated=71.02,
        free=0.9,
        total=79.15,
        holders={OUTSIDE: 75.68 - 71.14, OTHERS: 2.5},
        says=("other processes hold 2.5 GiB", "in a container it has another number"),
        never=("75.7 GiB",),
    ),
    Case(
        name="our own process in a container, alone",
        text=new(
            "4.00 GiB",
            "79.15 GiB",
            "3.40 GiB",
            "71.02 GiB",
            "0.12 GiB",
            others="Process 912 has 75.68 GiB memory in use. ",
        ),
        kind=FindingKind.PEAK,
        requested=4.0,
        allocated=71.02,
        holders={OUTSIDE: 75.68 - 71.14},
        says=("4.5 GiB of this process are not PyTorch's",),
        never=("75.7 GiB", "nvidia-smi"),
    ),
    Case(
        name="four runs on one device, in a container",
        text=new(
            "2.11 GiB",
            "14.74 GiB",
            "1.65 GiB",
            "4.50 GiB",
            "0.20 GiB",
            others="Process 19066 has 4.99 GiB memory in use. Process 19069 has 514.00 MiB memory in use. "
            "Process 19060 has 4.93 GiB memory in use. Process 19063 has 894.00 MiB memory in use. ",
        ),
        kind=FindingKind.OTHERS,
        requested=2.11,
        free=1.65,
        holders={OUTSIDE: 0.23, OTHERS: (514 + 894) / 1024 + 4.99},
        says=("other processes hold 6.4 GiB",),
    ),
    Case(
        name="a named process has what is missing",
        text=traceback(*MODEL)
        + new(
            "9.00 GiB",
            "79.18 GiB",
            "7.04 GiB",
            "45.89 GiB",
            "1.01 GiB",
            own="52.02 GiB",
            others="Process 7478 has 20.08 GiB memory in use. ",
        ),
        kind=FindingKind.OTHERS,
        requested=9.0,
        holders={OTHERS: 20.08, OUTSIDE: 52.02 - 46.9},
        phase=StepPhase.FORWARD,
        says=("other processes hold 20.1 GiB", "CUDA_VISIBLE_DEVICES", "54200MiB"),
    ),
    Case(
        name="a desktop has too little to matter",
        text=traceback(*MODEL)
        + new(
            "20.00 MiB",
            "7.51 GiB",
            "40.75 MiB",
            "6.81 GiB",
            "17.19 MiB",
            own="7.01 GiB",
            others="Process 9500 has 148.91 MiB memory in use. ",
        ),
        kind=FindingKind.PEAK,
        requested=20 / 1024,
        allocated=6.81,
        free=40.75 / 1024,
        holders={OTHERS: 148.91 / 1024},
        says=("auto_checkpoint",),
        never=("nvidia-smi",),
    ),
    Case(
        name="the driver does not say what the process has",
        text=traceback(*MODEL)
        + new("1.95 GiB", "8.00 GiB", "0 bytes", "13.67 GiB", "9.62 MiB", own="17179869184.00 GiB"),
        kind=FindingKind.PEAK,
        requested=1.95,
        allocated=13.67,
        total=8.0,
        holders={"shared or virtual memory": -(13.67 + 9.62 / 1024 - 8.0)},
        says=("5.7 GiB are above what the device holds", '"7372MiB"'),
        never=("17179869184",),
    ),
    Case(
        name="a server that sleeps: PyTorch counts more than its process has, in a line that is broken in a word",
        text="(Runner pid=104449) "
        + new("2.12 GiB", "79.19 GiB", "2.11 GiB", "83.48 GiB", "30.59 GiB", own="76.96 GiB").replace(
            "PyT", "P\nyT", 1
        ),
        kind=FindingKind.PEAK,
        requested=2.12,
        allocated=83.48,
        total=79.19,
        holders={"shared or virtual memory": -(83.48 + 30.59 - 76.96)},
        says=("37.1 GiB are above what the device holds",),
        never=("fragmentation:",),
    ),
    Case(
        name="a message without its beginning",
        text="Tried to allocate 20.00 MiB (GPU 0; 1.96 GiB total capacity; 1.24 GiB already allocated; 2.88 MiB free; "
        "1.25 GiB reserved in total by PyTorch)",
        kind=FindingKind.PEAK,
        requested=20 / 1024,
        allocated=1.24,
        total=1.96,
    ),
    Case(
        name="a memory summary without a message",
        text="|            CUDA OOMs: 1            |        cudaMalloc retries: 1         |\n",
        kind=FindingKind.UNKNOWN,
        says=("a memory summary does not say",),
    ),
    Case(
        name="an APU calls more free than it has",
        text=new("4.00 GiB", "15.49 GiB", "84.98 GiB", "1.67 GiB", "8.08 GiB", device="HIP"),
        kind=FindingKind.UNKNOWN,
        device="hip",
        requested=4.0,
        free=15.49 - 1.67 - 8.08,
        total=15.49,
        says=("shared with the host",),
        never=("85.0 GiB", "nvidia-smi"),
    ),
    Case(
        name="one tensor is larger than the device",
        text=traceback(*MODEL) + new("256.00 GiB", "79.15 GiB", "60.00 GiB", "17.50 GiB", "0.40 GiB", own="19.15 GiB"),
        kind=FindingKind.PEAK,
        requested=256.0,
        says=("256.0 GiB is larger than the device", "scaled_dot_product_attention"),
        never=("auto_checkpoint", "jettison plan"),
    ),
    Case(
        name="torch 2.1's spelling",
        text=traceback(*BACKWARD)
        + new("1.00 GiB", "23.69 GiB", "0.51 GiB", "22.01 GiB", "0.20 GiB", own="23.10 GiB").replace(
            "capacity", "capacty"
        ),
        kind=FindingKind.PEAK,
        requested=1.0,
        total=23.69,
        free=0.51,
        phase=StepPhase.BACKWARD,
    ),
    Case(
        name="the same with another letter",
        text=new("1.00 GiB", "23.69 GiB", "0.51 GiB", "22.01 GiB", "0.20 GiB", own="23.10 GiB").replace(
            "capacity", "capactty"
        ),
        kind=FindingKind.PEAK,
        total=23.69,
        free=0.51,
    ),
    Case(
        name="torch 1.1: cached is what is unused",
        text="RuntimeError: CUDA out of memory. Tried to allocate 294.00 MiB (GPU 0; 7.79 GiB total capacity; 6.27 GiB "
        "already allocated; 61.62 MiB free; 617.88 MiB cached)\n",
        kind=FindingKind.FRAGMENTATION,
        requested=294 / 1024,
        allocated=6.27,
        unused=617.88 / 1024,
        free=61.62 / 1024,
        total=7.79,
    ),
    Case(
        name="torch 1.8",
        text=traceback(*MODEL) + old("20.00 MiB", "10.76 GiB", "9.61 GiB", "4.44 MiB", "9.62 GiB"),
        kind=FindingKind.PEAK,
        requested=20 / 1024,
        allocated=9.61,
        total=10.76,
        phase=StepPhase.FORWARD,
    ),
    Case(
        name="more than 1 EB",
        text=traceback(*MODEL)
        + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate more than 1EB memory.\n",
        kind=FindingKind.SIZE,
        site="run/model.py:31 forward",
        says=("more than 1 EiB", "no plan helps"),
        never=("auto_checkpoint",),
    ),
    Case(
        name="more than 1 EB on an NPU",
        text="RuntimeError: NPU out of memory. Tried to allocate more than 1EB memory.\n",
        kind=FindingKind.SIZE,
        device="npu",
        never=("auto_checkpoint", "CUDA"),
    ),
    Case(
        name="an absurd size on the host",
        text="RuntimeError: [enforce fail at alloc_cpu.cpp:114] data. DefaultCPUAllocator: not enough memory: you "
        "tried to "
        "allocate 281474976710656 bytes.\n",
        kind=FindingKind.SIZE,
        device="cpu",
        requested=262144.0,
        says=("262144.0 GiB",),
    ),
    Case(
        name="private pools of CUDA graphs",
        text="OutOfMemoryError: CUDA out of memory. Tried to allocate 10.74 GiB. GPU 0 has a total capacity of "
        "47.53 GiB of "
        "which 3.86 GiB is free. Process 471567 has 43.44 GiB memory in use. Of the allocated memory 24.52 GiB is "
        "allocated "
        f"by PyTorch, with 12.03 GiB allocated in private pools (e.g., CUDA Graphs), and 18.59 GiB is reserved by "
        f"PyTorch but "
        f"unallocated.{HINT}\n",
        kind=FindingKind.FRAGMENTATION,
        requested=10.74,
        allocated=24.52,
        unused=18.59 - 12.03,
        holders={"private pools": 12.03, OUTSIDE: 43.44 - 24.52 - 18.59},
        says=("private pools (CUDA graphs) hold 12.0 GiB", "reduce-overhead"),
        never=("expandable",),
    ),
    Case(
        name="a limit of the process",
        text=new("1.00 GiB", "79.15 GiB", "40.00 GiB", "37.90 GiB", "0.30 GiB", own="39.15 GiB")
        .replace("Of the allocated", "39.57 GiB allowed; Of the allocated")
        .replace("1.00 GiB. GPU", "2.00 GiB. GPU"),
        kind=FindingKind.PEAK,
        requested=2.0,
        total=39.57,
        free=39.57 - 37.9 - 0.3,
        says=("a memory fraction is set",),
    ),
    Case(
        name="an MLU",
        text=old("512.00 MiB", "79.64 GiB", "78.02 GiB", "160.00 MiB", "78.10 GiB", device="MLU"),
        kind=FindingKind.PEAK,
        device="mlu",
        requested=0.5,
        never=("nvidia-smi", "CUDA_", "NCCL"),
    ),
    Case(
        name="an NPU's holes",
        text=traceback(*BACKWARD)
        + old(
            "5.03 GiB",
            "60.96 GiB",
            "49.47 GiB",
            "1.32 GiB",
            "57.55 GiB",
            active="49.47 GiB current active; ",
            device="NPU",
        ),
        kind=FindingKind.FRAGMENTATION,
        device="npu",
        unused=57.55 - 49.47,
        phase=StepPhase.BACKWARD,
        says=("PYTORCH_NPU_ALLOC_CONF=expandable_segments:True",),
        never=("PYTORCH_CUDA_ALLOC_CONF",),
    ),
    Case(
        name="an NPU that others have",
        text=old("22.00 MiB", "60.97 GiB", "10.24 GiB", "19.52 MiB", "10.65 GiB", device="NPU").replace(
            "22.00 MiB (", "640.00 MiB ("
        ),
        kind=FindingKind.OTHERS,
        device="npu",
        requested=640 / 1024,
        holders={UNNAMED: 60.97 - 10.65 - 19.52 / 1024},
        says=("50.3 GiB", "npu-smi", "ASCEND_RT_VISIBLE_DEVICES"),
        never=NO_CUDA,
    ),
    Case(
        name="an Apple device's own tensors",
        text=traceback(*MODEL)
        + "RuntimeError: MPS backend out of memory (MPS allocated: 17.68 GB, other allocations: 3.95 MB, max "
        "allowed: 18.13 "
        "GB). Tried to allocate 1024.00 MB on private pool.\n",
        kind=FindingKind.PEAK,
        device="mps",
        requested=1.0,
        allocated=17.68,
        total=18.13,
        says=("18.7 GiB at once", "auto_checkpoint"),
        never=NO_CUDA,
    ),
    Case(
        name="an Apple device's single buffer",
        text=traceback(*MODEL) + "RuntimeError: Invalid buffer size: 27.83 GB\n",
        kind=FindingKind.UNKNOWN,
        device="mps",
        requested=27.83,
        says=("single buffer",),
        never=NO_CUDA,
    ),
    Case(
        name="cudaMallocAsync above capacity",
        text="torch.OutOfMemoryError: Allocation on device 0 would exceed allowed memory.\nCurrently allocated     "
        ": 22.43 GiB\n"
        "Requested               : 4.07 GiB\nDevice limit            : 16.00 GiB\nFree (according to CUDA): 0 bytes\n",
        kind=FindingKind.PEAK,
        requested=4.07,
        allocated=22.43,
        total=16.0,
        holders={"shared or virtual memory": -6.43},
        says=("6.4 GiB are above what the device holds", '"14745MiB"'),
    ),
)

PLACES = (
    Case(
        name="ranks that are interleaved",
        text="".join(
            f"[rank0]: {a}\n[rank1]: {b}\n"
            for a, b in zip(
                (traceback(*BACKWARD, ("/work/run/zero.py", 1, "hook"), TENSOR) + PLAIN).splitlines(),
                (traceback(*MODEL, *MODEL[1:], *MODEL[1:]) + PLAIN).splitlines(),
                strict=False,
            )
        ),
        kind=FindingKind.PEAK,
        phase=StepPhase.BACKWARD,
        site="run/zero.py:1 hook",
        **PLAIN_IS,
    ),
    Case(
        name="a rank behind a progress bar",
        text="  3%|▎         | 9/352 [40:55<25:10:16, 264.19s/it]" + each("[rank1]: ", traceback(*MODEL) + PLAIN),
        kind=FindingKind.PEAK,
        phase=StepPhase.FORWARD,
        site="run/model.py:31 forward",
        **PLAIN_IS,
    ),
    Case(
        name="times and levels of a logger",
        text=each("2026-11-20 10:00:01,123 ERROR trainer - ", traceback(*STEP) + PLAIN),
        kind=FindingKind.PEAK,
        phase=StepPhase.OPTIMIZER,
        says=("foreach=False",),
        never=("auto_checkpoint",),
        **PLAIN_IS,
    ),
    Case(
        name="journalctl",
        text=each("Nov 20 10:00:01 node7 train.sh[4812]: ", traceback(*MODEL) + PLAIN),
        kind=FindingKind.PEAK,
        phase=StepPhase.FORWARD,
        **PLAIN_IS,
    ),
    Case(
        name="Ray's workers",
        text=each("(WorkerDict pid=45464, ip=10.1.2.3) ", traceback(*MODEL) + PLAIN),
        kind=FindingKind.PEAK,
        phase=StepPhase.FORWARD,
        **PLAIN_IS,
    ),
    Case(
        name="docker compose",
        text=each("trainer-1  | ", traceback(*BACKWARD) + PLAIN),
        kind=FindingKind.PEAK,
        phase=StepPhase.BACKWARD,
        **PLAIN_IS,
    ),
    Case(
        name="srun with labels",
        text=each(" 3: ", traceback(*MODEL) + PLAIN),
        kind=FindingKind.PEAK,
        phase=StepPhase.FORWARD,
        **PLAIN_IS,
    ),
    Case(name="pytest", text=each("E       ", PLAIN), kind=FindingKind.PEAK, **PLAIN_IS),
    Case(
        name="colours",
        text=f"\x1b[31m{traceback(*MODEL)}\x1b[1;35mtorch.OutOfMemoryError\x1b[0m: \x1b[35m"
        + PLAIN.split(": ", 1)[1].replace("CUDA", "CUDA\x1b[0m", 1),
        kind=FindingKind.PEAK,
        phase=StepPhase.FORWARD,
        **PLAIN_IS,
    ),
    Case(
        name="Windows: UTF-16, its line ends and paths",
        text=(
            "\ufeff"
            + traceback(
                ("C:\\run\\train.py", 88, "<module>"),
                ("C:\\env\\Lib\\site-packages\\torch\\nn\\modules\\module.py", 1751, "_call_impl"),
                ("C:\\run\\model.py", 31, "forward"),
            )
            + PLAIN
        )
        .replace("\n", "\r\n")
        .encode("utf-16-le"),
        kind=FindingKind.PEAK,
        phase=StepPhase.FORWARD,
        site="run/model.py:31 forward",
        **PLAIN_IS,
    ),
    Case(
        name="a terminal of 80 columns cuts figures in two",
        text="\n".join(PLAIN[at : at + 80] for at in range(0, len(PLAIN), 80)),
        kind=FindingKind.PEAK,
        **PLAIN_IS,
    ),
    Case(
        name="a box around the message",
        text="".join(f"│ {' '.join(PLAIN.split())[at : at + 70]:<70} │\n" for at in range(0, len(PLAIN), 70)),
        kind=FindingKind.PEAK,
        **PLAIN_IS,
    ),
    Case(
        name="several: the first counts",
        text=traceback(*MODEL)
        + PLAIN
        + traceback(*BACKWARD)
        + new("9.00 GiB", "9.50 GiB", "0.10 GiB", "9.20 GiB", "0 bytes"),
        kind=FindingKind.PEAK,
        phase=StepPhase.FORWARD,
        says=("memory ran out 2 times",),
        **PLAIN_IS,
    ),
    Case(
        name="the device first, torchrun's exit code after it",
        text=traceback(*MODEL)
        + PLAIN
        + "E1120 10:00:07.1 4812 torch/distributed/elastic/multiprocessing/api.py:882] failed "
        "(exitcode: -9) local_rank: 3 (pid: 4817) of binary: /opt/env/bin/python\n",
        kind=FindingKind.PEAK,
        **PLAIN_IS,
    ),
    Case(
        name="TorchScript",
        text="RuntimeError: The following operation failed in the TorchScript interpreter.\n"
        'Traceback of TorchScript (most recent call last):\n  File "/work/run/model.py", line 31, in forward\n    x\n'
        + PLAIN.replace("torch.OutOfMemoryError", "RuntimeError"),
        kind=FindingKind.PEAK,
        phase=StepPhase.FORWARD,
        site="run/model.py:31 forward",
        **PLAIN_IS,
    ),
    Case(
        name="a notebook's cell",
        text="---------------------------------------------------------------------------\n"
        "OutOfMemoryError                          Traceback (most recent call last)\n"
        "Cell In[12], line 4\n      3 out = model(batch)\n----> 4 loss = out.square().sum()\n\n"
        f"File {SITE}/torch/nn/modules/module.py:1751, in Module._call_impl(self, *args, **kwargs)\n\n"
        "File /work/run/model.py:31, in Block.forward(self, x)\n---> 31 return self.down(x)\n\n"
        + PLAIN.split(".", 1)[1],
        kind=FindingKind.PEAK,
        phase=StepPhase.FORWARD,
        site="run/model.py:31 Block.forward",
        **PLAIN_IS,
    ),
    Case(
        name="a compiled function",
        text=traceback(*MODEL, ("/tmp/torchinductor_me/ab/cabc.py", 210, "call")) + PLAIN,
        kind=FindingKind.PEAK,
        phase=StepPhase.FORWARD,
        site="run/model.py:31 forward",
        **PLAIN_IS,
    ),
)

TRAINERS = (
    Case(
        name="logits of a Trainer, made fp32",
        text=traceback(*LOSS) + "    logits = logits.float()\n" + PLAIN,
        kind=FindingKind.PEAK,
        phase=StepPhase.FORWARD,
        trainer="transformers Trainer",
        first="TrainingArguments(use_liger_kernel=True)",
        says=("auto_checkpoint_trainer(trainer, ", "gradient_checkpointing=True", "per_device_train_batch_size=1"),
        **PLAIN_IS,
    ),
    Case(
        name="logits of one's own loop",
        text=traceback(*MODEL, (f"{SITE}/torch/nn/functional.py", 3494, "cross_entropy")) + PLAIN,
        kind=FindingKind.PEAK,
        first="LigerFusedLinearCrossEntropyLoss",
        says=("hidden.split", "auto_checkpoint(model"),
        **PLAIN_IS,
    ),
    Case(
        name="logits on an Apple device: no Triton",
        text=traceback(*MODEL, (f"{SITE}/torch/nn/functional.py", 3494, "cross_entropy"))
        + "RuntimeError: MPS backend out of memory (MPS allocated: 17.68 GB, other allocations: 3.95 MB, max "
        "allowed: 18.13 "
        "GB). Tried to allocate 1024.00 MB on private pool.\n",
        kind=FindingKind.PEAK,
        device="mps",
        first="hidden.split",
        never=("Liger",),
    ),
    Case(
        name="TRL",
        text=traceback(ME, (f"{SITE}/trl/trainer/sft_trainer.py", 1150, "training_step"), *TRAINER[1:], CALL) + PLAIN,
        kind=FindingKind.PEAK,
        phase=StepPhase.FORWARD,
        trainer="TRL",
        says=("SFTConfig(gradient_checkpointing=True)", "auto_checkpoint_trainer"),
        **PLAIN_IS,
    ),
    Case(
        name="Axolotl",
        text=traceback((f"{SITE}/axolotl/train.py", 210, "train"), *LOSS[1:]) + "    logits = logits.float()\n" + PLAIN,
        kind=FindingKind.PEAK,
        trainer="Axolotl",
        first="CutCrossEntropyPlugin",
        says=("gradient_checkpointing: true", "micro_batch_size: 1"),
        **PLAIN_IS,
    ),
    Case(
        name="LLaMA-Factory",
        text=each(
            "[rank0]: ",
            traceback(("/root/LLaMA-Factory/src/llamafactory/train/tuner.py", 110, "run_exp"), *TRAINER[1:], CALL)
            + PLAIN,
        ),
        kind=FindingKind.PEAK,
        trainer="LLaMA-Factory",
        says=("per_device_train_batch_size: 1",),
        **PLAIN_IS,
    ),
    Case(
        name="Lightning, whose step is the optimizer's closure",
        text=traceback(
            ME,
            (f"{SITE}/lightning/pytorch/trainer/trainer.py", 538, "fit"),
            (f"{SITE}/torch/optim/optimizer.py", 487, "wrapper"),
            (f"{SITE}/torch/optim/adamw.py", 197, "step"),
            (f"{SITE}/lightning/pytorch/loops/optimization/automatic.py", 129, "closure"),
            CALL,
            ("/work/run/model.py", 31, "forward"),
        )
        + PLAIN,
        kind=FindingKind.PEAK,
        phase=StepPhase.FORWARD,
        trainer="Lightning",
        says=("jettison.integrations.lightning.AutoCheckpoint(", "accumulate_grad_batches"),
        never=("foreach",),
        **PLAIN_IS,
    ),
    Case(
        name="DeepSpeed's optimizer",
        text=traceback(ME, (f"{SITE}/deepspeed/runtime/engine.py", 2137, "step"), *STEP[1:]) + PLAIN,
        kind=FindingKind.PEAK,
        phase=StepPhase.OPTIMIZER,
        trainer="DeepSpeed",
        says=('"offload_optimizer"',),
        never=("auto_checkpoint",),
        **PLAIN_IS,
    ),
    Case(
        name="an evaluation of a Trainer",
        text=traceback(ME, (HF, 4150, "evaluate"), (HF, 4340, "evaluation_loop"), (HF, 4560, "prediction_step"), CALL)
        + PLAIN,
        kind=FindingKind.PEAK,
        trainer="transformers Trainer",
        says=("eval_accumulation_steps", "torch.inference_mode"),
        never=("auto_checkpoint", "gradient_checkpointing"),
        **PLAIN_IS,
    ),
    Case(
        name="vLLM's engine",
        text=each(
            "(EngineCore_DP0 pid=812) ERROR 11-20 10:00:01 [core.py:708] ",
            traceback((f"{SITE}/vllm/v1/worker/gpu_model_runner.py", 2890, "profile_run"), CALL) + PLAIN,
        ),
        kind=FindingKind.PEAK,
        trainer="vLLM",
        says=("--gpu-memory-utilization",),
        never=("auto_checkpoint",),
        **PLAIN_IS,
    ),
    Case(
        name="vLLM finds the device taken",
        text="ValueError: Free memory on device cuda:0 (9.30/79.15 GiB) on startup is less than desired GPU memory "
        "utilization "
        "(0.9, 71.23 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.\n",
        kind=FindingKind.OTHERS,
        free=9.3,
        total=79.15,
        holders={UNNAMED: 79.15 - 9.3},
        says=("69.9 GiB", "nvidia-smi", "--gpu-memory-utilization"),
        never=("auto_checkpoint",),
    ),
    Case(
        name="vLLM has no room for its cache",
        text="ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when "
        "initializing "
        "the engine.\n",
        kind=FindingKind.UNKNOWN,
        says=("cache of keys and values",),
        never=("auto_checkpoint",),
    ),
)

HOST = (
    Case(
        name="torchrun's exit code",
        text="E1120 10:00:07.1 4812 torch/distributed/elastic/multiprocessing/api.py:882] failed (exitcode: -9) "
        "local_rank: 0 "
        "(pid: 4817) of binary: /opt/env/bin/python\n",
        kind=FindingKind.HOST,
        device="cpu",
        says=("killed with SIGKILL", "dmesg"),
        never=("auto_checkpoint(model", "nvidia-smi"),
    ),
    Case(
        name="torchrun's summary",
        text="Root Cause (first observed failure):\n[0]:\n  time      : 2026-11-20_10:00:07\n  rank      : 0 "
        "(local_rank: 0)\n"
        "  exitcode  : -9 (pid: 4817)\n  error_file: <N/A>\n  traceback : Signal 9 (SIGKILL) received by PID 4817\n",
        kind=FindingKind.HOST,
        device="cpu",
    ),
    Case(
        name="DeepSpeed's launcher",
        text="[2026-11-20 10:00:07,120] [ERROR] [launch.py:325:sigkill_handler] ['/opt/env/bin/python', '-u', "
        "'train.py'] "
        "exits with return code = -9\n",
        kind=FindingKind.HOST,
        device="cpu",
    ),
    Case(
        name="accelerate's launcher",
        text="subprocess.CalledProcessError: Command '['/opt/env/bin/python', 'train.py']' died with "
        "<Signals.SIGKILL: 9>.\n",
        kind=FindingKind.HOST,
        device="cpu",
    ),
    Case(
        name="the kernel's log",
        text=KILL,
        kind=FindingKind.HOST,
        device="cpu",
        allocated=100.0,
        total=128.0,
        says=("held 100.0 GiB", "128.0 GiB"),
    ),
    Case(
        name="dmesg",
        text="[812345.120011] Out of memory: Killed process 4817 (python) total-vm:98566144kB, anon-rss:62914560kB, "
        "file-rss:4kB, shmem-rss:0kB\n",
        kind=FindingKind.HOST,
        device="cpu",
        allocated=60.0,
    ),
    Case(
        name="Slurm",
        text="slurmstepd: error: Detected 1 oom_kill event in StepId=4812.0. Some of the step tasks have been OOM "
        "Killed.\n"
        "srun: error: node7: task 3: Out Of Memory\n",
        kind=FindingKind.HOST,
        device="cpu",
        says=("#SBATCH --mem",),
    ),
    Case(
        name="an older Slurm",
        text="slurmstepd: error: Detected 1 oom-kill event(s) in step 370626.batch cgroup.\n",
        kind=FindingKind.HOST,
        device="cpu",
        says=("#SBATCH --mem",),
    ),
    Case(
        name="Kubernetes",
        text="    Last State:     Terminated\n      Reason:       OOMKilled\n      Exit Code:    137\n",
        kind=FindingKind.HOST,
        device="cpu",
        says=("limits",),
    ),
    Case(
        name="a container's exit code",
        text="Process completed with exit code 137.\n",
        kind=FindingKind.HOST,
        device="cpu",
        says=("SIGKILL",),
    ),
    Case(
        name="a shell",
        text="Loading checkpoint shards:   0%|          | 0/30 [00:00<?, ?it/s]\nKilled\n",
        kind=FindingKind.HOST,
        device="cpu",
    ),
    Case(
        name="a worker of the data loader",
        text="RuntimeError: DataLoader worker (pid 4817) is killed by signal: Killed. \n",
        kind=FindingKind.HOST,
        device="cpu",
        says=("num_workers",),
    ),
    Case(
        name="/dev/shm",
        text="ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory "
        "(shm).\n",
        kind=FindingKind.HOST,
        device="cpu",
        says=("/dev/shm", "--shm-size"),
    ),
    Case(
        name="the CPU's allocator",
        text=traceback(*MODEL)
        + "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
        "you tried to "
        "allocate 67108864 bytes. Error code 12 (Cannot allocate memory)\n",
        kind=FindingKind.HOST,
        device="cpu",
        requested=64 / 1024,
        phase=StepPhase.FORWARD,
        says=("64.0 MiB", "the host's memory"),
    ),
    Case(
        name="NumPy",
        text="numpy.core._exceptions._ArrayMemoryError: Unable to allocate 12.5 GiB for an array with shape "
        "(1677721600,) and "
        "data type float64\n",
        kind=FindingKind.HOST,
        device="cpu",
        requested=12.5,
    ),
    Case(
        name="pinned memory",
        text=traceback(ME, (f"{SITE}/torch/utils/data/_utils/pin_memory.py", 98, "pin_memory"))
        + "RuntimeError: CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some "
        "other API call.\n",
        kind=FindingKind.HOST,
        device="cpu",
        says=("pinned memory", "pin_memory=False"),
    ),
    Case(
        name="the driver",
        text=traceback(ME, (f"{SITE}/torch/cuda/__init__.py", 319, "_lazy_init"))
        + "RuntimeError: CUDA error: out of memory\n",
        kind=FindingKind.UNKNOWN,
        says=("the driver found no room", "nvidia-smi"),
    ),
    Case(
        name="cuBLAS",
        text=traceback(*MODEL)
        + "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`\n",
        kind=FindingKind.UNKNOWN,
        phase=StepPhase.FORWARD,
        says=("cuBLAS found no room", "set_per_process_memory_fraction"),
    ),
    Case(
        name="a caught error without figures",
        text="WARNING: CUDA out of memory, skipping this batch\n",
        kind=FindingKind.UNKNOWN,
        says=("jettison.watch",),
    ),
)

TRAPS = (
    Case(
        name="a structured log",
        text='{"ts": "2026-11-20T10:00:01Z", "level": "error", "msg": "'
        + (traceback(*BACKWARD) + PLAIN).replace('"', '\\"').replace("\n", "\\n")
        + '"}\n',
        kind=FindingKind.PEAK,
        phase=StepPhase.BACKWARD,
        **PLAIN_IS,
    ),
    Case(
        name="a line of the traceback names another error",
        text=traceback(*MODEL) + "    except (MemoryError, RuntimeError):\n" + PLAIN,
        kind=FindingKind.PEAK,
        phase=StepPhase.FORWARD,
        **PLAIN_IS,
    ),
    Case(
        name="a file that could not be opened before it",
        text="WARNING: unable to open file /work/cache/index.json\n" + traceback(*MODEL) + PLAIN,
        kind=FindingKind.PEAK,
        **PLAIN_IS,
    ),
    Case(
        name="the loop calls its output logits, and a block runs out",
        text='Traceback (most recent call last):\n  File "/work/run/train.py", line 88, in <module>\n'
        "    logits = model(batch)\n"
        + traceback(CALL, ("/work/run/model.py", 31, "forward")).split("\n", 1)[1]
        + PLAIN,
        kind=FindingKind.PEAK,
        phase=StepPhase.FORWARD,
        never=("Liger", "hidden.split"),
        **PLAIN_IS,
    ),
    Case(
        name="only the message has its rank",
        text=traceback(*MODEL) + "[rank0]: " + PLAIN,
        kind=FindingKind.PEAK,
        phase=StepPhase.FORWARD,
        **PLAIN_IS,
    ),
    Case(
        name="NCCL's last error",
        text="ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nFailed to CUDA calloc async "
        "4194304 bytes\n",
        kind=FindingKind.OUTSIDE,
        requested=4 / 1024,
    ),
    Case(
        name="THC",
        text="RuntimeError: cuda runtime error (2) : out of memory at /pytorch/aten/src/THC/generic/THCStorage.cu:58\n",
        kind=FindingKind.UNKNOWN,
    ),
    Case(
        name="others have two thirds, and expandable segments are on",
        text="export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n"
        + new("0.50 GiB", "79.15 GiB", "0.20 GiB", "24.00 GiB", "0.10 GiB", own="25.00 GiB"),
        kind=FindingKind.OTHERS,
        holders={UNNAMED: 79.15 - 0.2 - 25.0, OUTSIDE: 0.9},
        says=("54.0 GiB",),
    ),
    Case(
        name="holes in a device that is all but full",
        text=traceback(*BACKWARD) + old("20.00 MiB", "23.70 GiB", "22.06 GiB", "3.31 MiB", "22.32 GiB"),
        kind=FindingKind.FRAGMENTATION,
        unused=0.26,
        says=("1.0 % of the device", "expandable_segments:True", "auto_checkpoint"),
    ),
    Case(
        name="outputs that Accelerate makes fp32",
        text=traceback(*TRAINER, CALL, (f"{SITE}/accelerate/utils/operations.py", 781, "_convert_to_fp32")) + PLAIN,
        kind=FindingKind.PEAK,
        trainer="transformers Trainer",
        first="use_liger_kernel=True",
        **PLAIN_IS,
    ),
    Case(
        name="a process that has just begun, beside one that has all",
        text=new(
            "20.00 MiB",
            "79.15 GiB",
            "0.25 GiB",
            "0 bytes",
            "0 bytes",
            others="Process 77 has 78.40 GiB memory in use. ",
        ).replace("20.00 MiB", "512.00 MiB"),
        kind=FindingKind.OTHERS,
        requested=0.5,
        holders={OTHERS: 78.4},
        says=("other processes hold 78.4 GiB", "nvidia-smi"),
        never=("auto_checkpoint", "another number"),
    ),
    Case(
        name="srun's task",
        text="srun: error: node7: task 3: Out Of Memory\n",
        kind=FindingKind.HOST,
        device="cpu",
        says=("the host's memory ran out",),
        never=("nvidia-smi", "auto_checkpoint"),
    ),
    Case(
        name="sacct's state",
        text="4812.batch  train  OUT_OF_ME+  0:125\n",
        kind=FindingKind.HOST,
        device="cpu",
        says=("the host's memory ran out",),
        never=("nvidia-smi", "auto_checkpoint"),
    ),
    Case(
        name="LSF",
        text="TERM_MEMLIMIT: job killed after reaching LSF memory usage limit.\n",
        kind=FindingKind.HOST,
        device="cpu",
        says=("the host's memory ran out",),
        never=("nvidia-smi", "auto_checkpoint"),
    ),
    Case(
        name="PBS",
        text="=>> PBS: job killed: mem 67109864kb exceeded limit 67108864kb\n",
        kind=FindingKind.HOST,
        device="cpu",
        says=("the host's memory ran out",),
        never=("nvidia-smi", "auto_checkpoint"),
    ),
    Case(
        name="systemd",
        text="train.service: Main process exited, code=killed, status=9/KILL\n",
        kind=FindingKind.HOST,
        device="cpu",
        says=("SIGKILL",),
        never=("nvidia-smi", "auto_checkpoint"),
    ),
    Case(
        name="a shell on a Mac",
        text="zsh: killed     python train.py\n",
        kind=FindingKind.HOST,
        device="cpu",
        says=("SIGKILL",),
        never=("nvidia-smi", "auto_checkpoint"),
    ),
    Case(
        name="a device of no bytes",
        text=traceback(*MODEL) + new("2.00 GiB", "0 bytes", "0 bytes", "1.00 GiB", "0 bytes", device="HIP"),
        kind=FindingKind.PEAK,
        device="hip",
        requested=2.0,
        allocated=1.0,
        says=("3.0 GiB at once",),
        never=("above the device", "auto_checkpoint"),
    ),
    Case(
        name="vLLM loads safetensors",
        text="Loading safetensors checkpoint shards:  43% Completed | 3/7 [00:02<00:03,  1.1it/s]\n"
        + traceback(
            (f"{SITE}/vllm/model_executor/model_loader/loader.py", 402, "load_model"),
            (f"{SITE}/safetensors/torch.py", 315, "load_file"),
        )
        + PLAIN,
        kind=FindingKind.PEAK,
        phase=StepPhase.PARAMETERS,
        trainer="vLLM",
        says=("3 of 7 shards",),
        never=("auto_checkpoint",),
        **PLAIN_IS,
    ),
)

OWN = (*ALLOCATORS, *PLACES, *TRAINERS, *HOST, *TRAPS)
