"""Logs in which a driver, a library, the host or an inference server ran out, and tracebacks outside of a step.

Messages are in the forms that programs write; everything around them is made up. Sizes are in GiB.
"""

from __future__ import annotations

from itertools import zip_longest

from jettison.diagnose.finding import FindingKind
from jettison.diagnose.memory_facts import StepPhase
from support.oom_logs import (
    BACKWARD,
    CALL,
    HF,
    ME,
    MODEL,
    NO_CUDA,
    OUTSIDE,
    PLAIN,
    PLAIN_IS,
    SITE,
    TENSOR,
    Case,
    each,
    new,
)
from support.planted_memory import traceback

RECORDS = "jettison.watch"
NO_PLAN = ("auto_checkpoint", "jettison plan")
NO_DEVICE = ("nvidia-smi", RECORDS, *NO_PLAN)


def steps(*allocated: float) -> str:
    return "".join(f"step {at}: allocated {gib:.2f} GiB\n" for at, gib in enumerate(allocated))


def interleaved(first: str, second: str) -> str:
    """Two hosts, ranks or containers, line by line: one in forward, one in backward."""
    one = (traceback(*MODEL) + PLAIN).splitlines()
    other = traceback(*BACKWARD, ("/work/run/zero.py", 1, "hook"), TENSOR) + new(
        "1.00 GiB", "79.15 GiB", "0.25 GiB", "70.50 GiB", "0.40 GiB", own="71.39 GiB"
    )
    pairs = zip_longest(one, other.splitlines())
    return "".join(f"{first}{a}\n" * (a is not None) + f"{second}{b}\n" * (b is not None) for a, b in pairs)


DRIVERS = (
    Case(
        name="Level Zero",
        text=traceback(*MODEL)
        + "RuntimeError: level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)\n",
        kind=FindingKind.UNKNOWN,
        device="xpu",
        phase=StepPhase.FORWARD,
        says=("the driver found no room", "torch.xpu.set_per_process_memory_fraction", "torch.xpu.memory_allocated()"),
        never=(*NO_CUDA, RECORDS),
    ),
    Case(
        name="an older Level Zero",
        text="RuntimeError: Native API failed. Native API returns: -5 (PI_ERROR_OUT_OF_RESOURCES) -5\n",
        kind=FindingKind.UNKNOWN,
        device="xpu",
        never=NO_CUDA,
    ),
    Case(
        name="Level Zero on the host",
        text="RuntimeError: Native API failed. Native API returns: 38 (UR_RESULT_ERROR_OUT_OF_HOST_MEMORY)\n",
        kind=FindingKind.HOST,
        device="cpu",
        never=NO_DEVICE,
    ),
    Case(
        name="CANN",
        text="[rank7]:[E1120 10:00:01.736525688 compiler_depend.ts:429] operator():build/torch_npu.dir:128 NPU "
        "function "
        "error: call aclnnX failed, error code is 207001\n[Error]: Failed to apply for memory.\nEL0004: [PID: 4817] "
        "2026-11-20-10:00:01.827.496 Failed to allocate memory.\n        Possible Cause: Available memory is "
        "insufficient.\n        Failed to allocate resource[DeviceMemory] with info [size:2147483648]. Reason: Memory "
        "resources are exhausted.\n",
        kind=FindingKind.OUTSIDE,
        device="npu",
        requested=2.0,
        says=("CANN found no room", "npu-smi", "torch.npu.memory_allocated()"),
        never=(*NO_CUDA, RECORDS),
    ),
    Case(
        name="XLA on a TPU, while it compiles",
        text=traceback(*MODEL)
        + "RuntimeError: Bad StatusOr access: RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 21.50G "
        "of "
        "15.50G hbm. Exceeded hbm capacity by 6.00G.\n\nTotal hbm usage >= 22.00G:\n    reserved        530.00M\n",
        kind=FindingKind.PEAK,
        device="tpu",
        requested=21.5,
        total=15.5,
        says=("XLA wants 21.5 GiB on a device of 15.5 GiB", "torch_xla.utils.checkpoint"),
        never=(*NO_CUDA, *NO_PLAN, RECORDS, "larger than the device"),
    ),
    Case(
        name="XLA on a TPU, while it runs",
        text="RuntimeError: Resource exhausted: From /job:tpu_worker/replica:0/task:0:\nAttempting to reserve 3.50G "
        "at the "
        "bottom of memory. That was not possible. There are 1.50G free, 0B reserved, and 1.50G reservable.; \nHBM "
        "capacity 8.00G:\n",
        kind=FindingKind.PEAK,
        device="tpu",
        requested=3.5,
        free=1.5,
        total=8.0,
        says=("of which 1.5 GiB are free",),
        never=(*NO_CUDA, *NO_PLAN),
    ),
    Case(
        name="JAX alone",
        text="W external/xla/xla/tsl/framework/bfc_allocator.cc:501] Allocator (GPU_0_bfc) ran out of memory trying to "
        "allocate 14.00GiB (rounded to 15032385536)requested by op \njaxlib.xla_extension.XlaRuntimeError: "
        "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 15032385536 bytes.\n",
        kind=FindingKind.OUTSIDE,
        requested=14.0,
        says=("XLA_PYTHON_CLIENT_MEM_FRACTION",),
        never=("torch.cuda", RECORDS, *NO_PLAN),
    ),
    Case(
        name="JAX has the device that PyTorch wants",
        text="W external/xla/xla/service/platform_util.cc: XLA service initialized\n"
        + traceback(*MODEL)
        + new("2.00 GiB", "79.15 GiB", "0.75 GiB", "12.50 GiB", "0.40 GiB", own="78.39 GiB"),
        kind=FindingKind.OUTSIDE,
        requested=2.0,
        holders={OUTSIDE: 78.39 - 12.9},
        says=("65.5 GiB of this process are not PyTorch's", "XLA_PYTHON_CLIENT_PREALLOCATE=false"),
        never=NO_PLAN,
    ),
    Case(
        name="TensorFlow",
        text="tensorflow.python.framework.errors_impl.ResourceExhaustedError: Graph execution error:\nOOM when "
        "allocating "
        "tensor with shape[64,512,4096] and type float on /job:localhost/replica:0/task:0/device:GPU:0 by allocator "
        "GPU_0_bfc\n",
        kind=FindingKind.UNKNOWN,
        says=("TensorFlow found no room", "TF_FORCE_GPU_ALLOW_GROWTH"),
        never=("torch.cuda", *NO_PLAN),
    ),
    Case(
        name="a Gaudi",
        text=traceback(*MODEL)
        + "RuntimeError: [Rank:0] FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::4294967296 (4096)MB\n",
        kind=FindingKind.UNKNOWN,
        device="hpu",
        requested=4.0,
        phase=StepPhase.FORWARD,
        says=("torch.hpu.memory_allocated()",),
        never=(*NO_CUDA, RECORDS),
    ),
    Case(
        name="Neuron",
        text=traceback(*MODEL)
        + "2026-Nov-20 10:00:01.123456  812:4812  ERROR  TDRV:log_dev_mem  Failed to allocate 1.500GB (usage: shared "
        "scratchpad) on ND 0:NC 0, current utilization:\n",
        kind=FindingKind.OUTSIDE,
        device="neuron",
        requested=1.5e9 / 2**30,
        says=("the Neuron runtime found no room", "neuron-top"),
        never=(*NO_CUDA, *NO_PLAN, RECORDS),
    ),
    Case(
        name="DirectML",
        text=traceback(*MODEL)
        + "RuntimeError: Could not allocate tensor with 4294967296 bytes. There is not enough GPU video memory "
        "available!\n",
        kind=FindingKind.OUTSIDE,
        device="dml",
        requested=4.0,
        says=("DirectML found no room",),
        never=(*NO_CUDA, *NO_PLAN, RECORDS),
    ),
    Case(
        name="Metal's command buffer",
        text="Error: command buffer exited with error status.\n\tThe Metal Performance Shaders operations encoded on "
        "it may "
        "not have completed.\n\tError: \n\t(null)\n\tInsufficient Memory "
        "(00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)\n",
        kind=FindingKind.UNKNOWN,
        device="mps",
        says=("torch.mps.empty_cache()", "torch.mps.current_allocated_memory()"),
        never=(*NO_CUDA, "torch.cuda", RECORDS),
    ),
    Case(
        name="bitsandbytes",
        text="CUDA SETUP: Loading binary libbitsandbytes_cuda124.so\nError out of memory at line 380 in file "
        "/src/csrc/pythonInterface.cpp\n",
        kind=FindingKind.UNKNOWN,
        says=("bitsandbytes found no room", "nvidia-smi"),
        never=NO_PLAN,
    ),
    Case(
        name="CuPy",
        text="cupy.cuda.memory.OutOfMemoryError: Out of memory allocating 8,589,934,592 bytes (allocated so far: "
        "12,884,901,888 bytes).\n",
        kind=FindingKind.OUTSIDE,
        requested=8.0,
        says=("CuPy found no room",),
    ),
    Case(
        name="cuBLAS's handle",
        text=traceback(*MODEL)
        + "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`\n",
        kind=FindingKind.UNKNOWN,
        phase=StepPhase.FORWARD,
        says=("cuBLAS found no room", "fails in the same way"),
    ),
    Case(
        name="vLLM's allocator",
        text="CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62\n",
        kind=FindingKind.UNKNOWN,
        says=("the driver found no room", "nvidia-smi"),
        never=NO_PLAN,
    ),
    Case(
        name="figures of a slice of a GPU",
        text=traceback(*MODEL) + "RuntimeError: NVML_SUCCESS == r INTERNAL ASSERT FAILED at "
        '"/pytorch/c10/cuda/CUDACachingAllocator.cpp":1016, please report a bug to PyTorch. \n',
        kind=FindingKind.UNKNOWN,
        phase=StepPhase.FORWARD,
        says=("no figures from NVML",),
        never=NO_PLAN,
    ),
    Case(
        name="a slice of a GPU",
        text=traceback(*MODEL) + new("512.00 MiB", "9.50 GiB", "256.00 MiB", "8.75 GiB", "192.00 MiB", own="9.25 GiB"),
        kind=FindingKind.PEAK,
        requested=0.5,
        total=9.5,
        free=0.25,
        holders={OUTSIDE: 9.25 - 8.9375},
        says=('"9216MiB"',),
    ),
    Case(
        name="NCCL's pinned memory",
        text="node3:101:202 [0] include/alloc.h:49 NCCL WARN Cuda failure 2 'out of memory'\n"
        "node3:101:202 [0] include/alloc.h:51 NCCL WARN Failed to CUDA host alloc 8388608 bytes\n",
        kind=FindingKind.HOST,
        device="cpu",
        requested=8 / 1024,
        says=("pinned memory", "ulimit -l"),
        never=NO_DEVICE,
    ),
    Case(
        name="RCCL",
        text="node3:101:202 [0] include/alloc.h:49 NCCL WARN HIP failure 'out of memory'\n",
        kind=FindingKind.OUTSIDE,
        device="hip",
        says=("found no room",),
    ),
    Case(
        name="a growing loop on an XPU",
        text=steps(5.0, *(5.5 + 0.75 * at for at in range(11)))
        + "torch.OutOfMemoryError: XPU out of memory. Tried to allocate 0.50 GiB. GPU 0 has a total capacity of 15.50 "
        "GiB "
        "of which 0.10 GiB is free. Of the allocated memory 14.90 GiB is allocated by PyTorch, and 0.30 GiB is "
        "reserved "
        "by PyTorch but unallocated.\n",
        kind=FindingKind.LEAK,
        device="xpu",
        says=("0.8 GiB more stay allocated after each step",),
        never=(*NO_CUDA, RECORDS),
    ),
)
HOSTS = (
    Case(
        name="a bus error",
        text="RuntimeError: DataLoader worker (pid 4817) is killed by signal: Bus error. It is possible that "
        "dataloader's "
        "workers are out of shared memory. Please try to raise your shared memory limit.\n",
        kind=FindingKind.HOST,
        device="cpu",
        says=("/dev/shm", "--shm-size", "set_sharing_strategy"),
        never=NO_DEVICE,
    ),
    Case(
        name="torchrun's bus error",
        text="torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n  exitcode  : -7 (pid: 4817)\n"
        "  traceback : Signal 7 (SIGBUS) received by PID 4817\n",
        kind=FindingKind.HOST,
        device="cpu",
        says=("/dev/shm",),
        never=NO_DEVICE,
    ),
    Case(
        name="no space for a tensor of a worker",
        text="RuntimeError: unable to allocate shared memory(shm) for file </torch_4817_12>: No space left on device "
        "(28)\n",
        kind=FindingKind.HOST,
        device="cpu",
        says=("workers of the data loader",),
        never=NO_DEVICE,
    ),
    Case(
        name="NCCL's shared memory",
        text="node3:101:202 [0] misc/shmutils.cc:87 NCCL WARN Error: failed to extend /dev/shm/nccl-Tq0Z3a to 9637892 "
        "bytes\n",
        kind=FindingKind.HOST,
        device="cpu",
        says=("ranks exchange data by NCCL", "NCCL_SHM_DISABLE=1", "--shm-size"),
        never=("set_sharing_strategy", *NO_DEVICE),
    ),
    Case(
        name="a tensor that is handed over on Windows",
        text="RuntimeError: Couldn't open shared file mapping: <torch_4321_123>, error code: <1455>\n",
        kind=FindingKind.HOST,
        device="cpu",
        never=NO_DEVICE,
    ),
    Case(
        name="a checkpoint that is mapped",
        text="RuntimeError: unable to mmap 9663676416 bytes from file <pytorch_model.bin>: Cannot allocate memory "
        "(12)\n",
        kind=FindingKind.HOST,
        device="cpu",
        requested=9.0,
        never=NO_DEVICE,
    ),
    Case(
        name="cudaHostAlloc",
        text=traceback(*MODEL)
        + "RuntimeError: CUDA error: out of memory (cudaHostAlloc failed to allocate 17179869184 bytes)\n",
        kind=FindingKind.HOST,
        device="cpu",
        requested=16.0,
        says=("pinned memory",),
        never=NO_DEVICE,
    ),
    Case(
        name="cuDNN on the host",
        text="RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED\n",
        kind=FindingKind.HOST,
        device="cpu",
        never=NO_DEVICE,
    ),
    Case(
        name="Docker's state",
        text='"State": {\n    "Status": "exited",\n    "OOMKilled": true,\n    "ExitCode": 137\n}\n',
        kind=FindingKind.HOST,
        device="cpu",
        says=("the host's memory ran out",),
        never=("256", *NO_DEVICE),
    ),
    Case(
        name="Docker's state of a container that another ended",
        text='"State": {\n    "OOMKilled": false,\n    "ExitCode": 137\n}\ncontainer exited with code 137\n',
        kind=FindingKind.HOST,
        device="cpu",
        says=("no device said so",),
        never=("limits", *NO_DEVICE),
    ),
    Case(
        name="an eviction",
        text="0s Warning Evicted pod/train-0 The node was low on resource: memory. Threshold quantity: 100Mi, "
        "available: "
        "52Mi. Container trainer was using 61Gi, request is 32Gi.\n",
        kind=FindingKind.HOST,
        device="cpu",
        never=NO_DEVICE,
    ),
    Case(
        name="a container in dmesg",
        text="[Fri Nov 20 10:00:00 2026] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=docker-4c.scope,"
        "mems_allowed=0-1,task=python,pid=7899,uid=0\n[Fri Nov 20 10:00:00 2026] Memory cgroup out of memory: Killed "
        "process 7899 (python) total-vm:26184840kB, anon-rss:15728640kB, file-rss:4kB, shmem-rss:8388608kB, UID:0\n",
        kind=FindingKind.HOST,
        device="cpu",
        allocated=15.0 + 8.0,
        says=("held 23.0 GiB", "docker run --memory"),
        never=NO_DEVICE,
    ),
    Case(
        name="Ray's monitor",
        text="ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.\nMemory on the "
        "node "
        "(IP: 10.1.2.3, ID: fc2b) where the task (actor ID: f9cc, name=Trainer, pid=4331, memory used=42.25GB) was "
        "running was 59.50GB / 62.50GB (0.950744), which exceeds the memory usage threshold of 0.95.\n",
        kind=FindingKind.HOST,
        device="cpu",
        allocated=42.25,
        total=62.5,
        says=("held 42.2 GiB", "62.5 GiB"),
        never=NO_DEVICE,
    ),
    Case(
        name="a managed job",
        text="AlgorithmError: ExecuteUserScriptError: ExitCode -9\n",
        kind=FindingKind.HOST,
        device="cpu",
        says=("SIGKILL",),
        never=NO_DEVICE,
    ),
)
GRPO = f"{SITE}/trl/trainer/grpo_trainer.py"
OUTSIDE_OF_STEPS = (
    Case(
        name="the server in a trainer wakes up",
        text=traceback(
            ME,
            (GRPO, 1150, "training_step"),
            (GRPO, 1350, "_generate_and_score_completions"),
            (f"{SITE}/vllm/device_allocator/cumem.py", 190, "wake_up"),
        )
        + PLAIN,
        kind=FindingKind.PEAK,
        trainer="TRL",
        first="GRPOConfig(vllm_gpu_memory_utilization=",
        never=("--gpu-memory-utilization", "inference_mode", *NO_PLAN),
        **PLAIN_IS,
    ),
    Case(
        name="the trainer's backward, beside a server",
        text="INFO 11-20 10:00:01 [gpu_worker.py:144] vLLM sleep mode freed 0.43 GiB memory\n"
        + traceback(ME, (GRPO, 1150, "training_step"), (f"{SITE}/accelerate/accelerator.py", 1964, "backward"), TENSOR)
        + new("2.00 GiB", "79.15 GiB", "0.75 GiB", "36.50 GiB", "0.40 GiB", own="78.39 GiB"),
        kind=FindingKind.OUTSIDE,
        phase=StepPhase.BACKWARD,
        trainer="TRL",
        first="vllm_enable_sleep_mode=True",
        holders={OUTSIDE: 78.39 - 36.9},
    ),
    Case(
        name="a checkpoint of FSDP is saved",
        text=traceback(ME, (HF, 3000, "_save_checkpoint"), (f"{SITE}/torch/distributed/fsdp/api.py", 700, "state_dict"))
        + PLAIN,
        kind=FindingKind.PEAK,
        phase=StepPhase.SAVING,
        trainer="transformers Trainer",
        first="torch.distributed.checkpoint.save",
        says=("cpu_offload=True",),
        never=("gradient_checkpointing", *NO_PLAN),
        **PLAIN_IS,
    ),
    Case(
        name="a model is sharded",
        text=traceback(ME, (f"{SITE}/torch/distributed/fsdp/_fully_shard/_fully_shard.py", 200, "fully_shard")) + PLAIN,
        kind=FindingKind.PEAK,
        phase=StepPhase.PARAMETERS,
        never=NO_PLAN,
        **PLAIN_IS,
    ),
    Case(
        name="gradients are clipped",
        text=traceback(ME, (f"{SITE}/torch/nn/utils/clip_grad.py", 200, "clip_grad_norm_")) + PLAIN,
        kind=FindingKind.PEAK,
        phase=StepPhase.OPTIMIZER,
        says=("foreach=False", "clip_grad_norm_"),
        never=NO_PLAN,
        **PLAIN_IS,
    ),
    *(
        Case(
            name=f"an optimizer of its own: {file}",
            text=traceback(
                ME,
                (f"{SITE}/torch/optim/optimizer.py", 487, "wrapper"),
                (f"{SITE}/{file}", 290, "step"),
                (f"{SITE}/{file}", 490, "init_state"),
            )
            + PLAIN,
            kind=FindingKind.PEAK,
            phase=StepPhase.OPTIMIZER,
            trainer="DeepSpeed" if "deepspeed" in file else "Megatron-LM" if "megatron" in file else "",
            first=line,
            never=("foreach", *NO_PLAN),
            **PLAIN_IS,
        )
        for file, line in (
            ("bitsandbytes/optim/optimizer.py", "PagedAdamW8bit"),
            ("apex/optimizers/fused_adam.py", "PagedAdamW8bit"),
            ("deepspeed/runtime/zero/stage_1_and_2.py", '"offload_optimizer"'),
            ("megatron/core/optimizer/distrib_optimizer.py", "--use-distributed-optimizer"),
        )
    ),
    Case(
        name="a model is spread over devices",
        text=traceback(ME, (f"{SITE}/accelerate/big_modeling.py", 500, "dispatch_model")) + PLAIN,
        kind=FindingKind.PEAK,
        phase=StepPhase.PARAMETERS,
        never=NO_PLAN,
        **PLAIN_IS,
    ),
    Case(
        name="Lightning Fabric has no Trainer",
        text=traceback(ME, (f"{SITE}/lightning/fabric/fabric.py", 450, "backward"), TENSOR) + PLAIN,
        kind=FindingKind.PEAK,
        phase=StepPhase.BACKWARD,
        trainer="Lightning Fabric",
        first="jettison.auto_checkpoint(model",
        never=("Trainer(callbacks",),
        **PLAIN_IS,
    ),
    Case(
        name="vLLM's longest sequence",
        text="ValueError: To serve at least one request with the models's max seq len (131072), (16.00 GiB KV cache is "
        "needed, which is larger than the available KV cache memory (7.50 GiB). Based on the available memory, the "
        "estimated maximum model length is 61424.\n",
        kind=FindingKind.UNKNOWN,
        requested=16.0,
        free=7.5,
        says=("it needs 16.0 GiB, and 7.5 GiB are left", "--max-model-len"),
        never=NO_PLAN,
    ),
    Case(
        name="SGLang's cache",
        text=traceback((f"{SITE}/sglang/srt/model_executor/model_runner.py", 900, "init_memory_pool"))
        + "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.\n",
        kind=FindingKind.UNKNOWN,
        trainer="SGLang",
        says=("cache of keys and values", "--mem-fraction-static"),
        never=NO_PLAN,
    ),
    Case(
        name="no batch size fits",
        text=traceback(ME, (HF, 2237, "train"), (f"{SITE}/accelerate/utils/memory.py", 170, "decorator"))
        + "RuntimeError: No executable batch size found, reached zero.\n",
        kind=FindingKind.UNKNOWN,
        trainer="transformers Trainer",
        says=("each batch size down to 1", "gradient_checkpointing=True"),
        never=("nvidia-smi",),
    ),
    Case(
        name="vLLM's ranks",
        text=each(
            "(VllmWorker rank=0 pid=812) ERROR 11-20 10:00:01 [multiproc_executor.py:470] ",
            traceback((f"{SITE}/vllm/v1/worker/gpu_model_runner.py", 2890, "profile_run"), CALL) + PLAIN,
        ),
        kind=FindingKind.PEAK,
        trainer="vLLM",
        first="--gpu-memory-utilization",
        never=NO_PLAN,
        **PLAIN_IS,
    ),
    *(
        Case(
            name=f"two that are interleaved: {first.strip()}",
            text=interleaved(first, second),
            kind=FindingKind.PEAK,
            phase=StepPhase.FORWARD,
            site="run/model.py:31 forward",
            **PLAIN_IS,
        )
        for first, second in (
            ("node7: ", "node8: "),
            ("node7: [rank3]: ", "node7: [rank4]: "),
            ("[pod/train-0/trainer] ", "[pod/train-1/trainer] "),
        )
    ),
)
NOT_MEMORY = (
    "epoch 1 loss 0.3\nKilled 3 stragglers\n",
    "config: {'skip_oom_batches': true, 'oom_kill': false}\nValueError: bad shape\n",
    '"State": {\n    "OOMKilled": false,\n    "ExitCode": 0\n}\n',
    "slurmstepd: error: *** JOB 4812 ON node7 CANCELLED AT 2026-11-20T10:00:00 DUE TO TIME LIMIT ***\n",
    "failed (exitcode: -11) local_rank: 0 (pid: 4817) of binary: /opt/env/bin/python\n",
    "RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR\n",
    "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 131072, Hardware limit: 101376.\n",
    "OSError: [Errno 28] No space left on device: '/work/checkpoints/step-100'\n",
)
"""Logs of runs that ended, or went on, for other reasons."""

ELSEWHERE = (*DRIVERS, *HOSTS, *OUTSIDE_OF_STEPS)
