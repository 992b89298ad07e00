"""Traces of a GPU's steps with a known fault, in the form that torch.profiler exports: there is no device here.

The host launches kernels in order; each begins when the host has launched it and its stream is free. All times are in
microseconds, as in the file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

LAUNCH_US = 5
COMPUTE, TALK = 7, 20
PARAMETERS, ACTIVATION, STATE = 1 << 30, 64 << 20, 2 << 30


@dataclass(kw_only=True)
class Plan:
    """What each step does. All that a healthy one does is here as it stands.

    Args:
        python_us: of the host before each launch.
        exposed: collectives wait for all of backward, as if nothing overlapped.
        gathers: an all-gather before each layer, which nothing runs beside.
        loader_us: in the data loader, and it is waited for.
        reads: numbers that are read in forward, each of which waits for the device.
        mallocs_us: calls of cudaMalloc in each forward, while the device has nothing to do.
        first_us: more of the host in the first step.
        reserved: times what is allocated.
    """

    layers: int = 12
    kernel_us: int = 400
    kernels_a_layer: int = 1
    python_us: int = 20
    reduces: bool = False
    exposed: bool = False
    gathers: bool = False
    loader_us: int = 50
    pageable_us: int = 0
    reads: int = 0
    mallocs_us: int = 0
    first_us: int = 0
    recompute: bool = False
    state_appears: bool = False
    reserved: float = 1.05


@dataclass(kw_only=True)
class Trace:
    """One that is being made."""

    plan: Plan
    events: list[dict[str, Any]] = field(default_factory=list)
    host: float = 1000.0
    free: dict[int, float] = field(default_factory=lambda: {COMPUTE: 0.0, TALK: 0.0})
    correlation: int = 0
    sequence: int = 0
    allocated: int = PARAMETERS

    def span(self, name: str, cat: str, start: float, length: float, *, stream: int | None = None, **args: Any) -> None:
        where = {"pid": 1, "tid": 1} if stream is None else {"pid": 0, "tid": stream}
        self.events.append({"ph": "X", "cat": cat, "name": name, "ts": start, "dur": length, "args": args, **where})

    def runtime(self, name: str, length: float) -> None:
        self.correlation += 1
        self.span(name, "cuda_runtime", self.host, length, correlation=self.correlation)
        self.host += length

    def launch(
        self, name: str, length: float, *, stream: int = COMPUTE, cat: str = "kernel", not_before: float = 0.0
    ) -> None:
        self.runtime("cudaLaunchKernel" if cat == "kernel" else "cudaMemcpyAsync", LAUNCH_US)
        start = max(self.host, self.free[stream], not_before)
        self.span(name, cat, start, length, stream=stream, correlation=self.correlation, device=0)
        self.free[stream] = start + length

    def waits(self) -> None:
        """The host, for the device."""
        length = max(LAUNCH_US, max(self.free.values()) - self.host)
        self.runtime("cudaStreamSynchronize", length)

    def op(self, name: str, *, numbered: bool = True) -> None:
        """An operator of forward, with its kernels."""
        start, plan = self.host, self.plan
        self.sequence += numbered
        for _ in range(plan.kernels_a_layer):
            self.host += plan.python_us
            self.launch("ampere_bf16_gemm", plan.kernel_us)
        args: dict[str, Any] = {"Input Dims": [[4096, 4096], [4096, 4096]], "Input type": ["c10::BFloat16"] * 2}
        if numbered:
            args |= {"Sequence number": self.sequence, "Fwd thread id": 0}
        self.span(name, "cpu_op", start, self.host - start, **args)

    def memory(self, delta: int) -> None:
        self.allocated += delta
        args = {
            "Bytes": delta, "Total Allocated": self.allocated, "Device Type": 1, "Device Id": 0,
            "Total Reserved": int(self.allocated * self.plan.reserved),
        }  # fmt: skip
        self.events.append({"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "ts": self.host, "args": args})

    # a step -----------------------------------------------------------------------------------------------------------

    def step(self, number: int) -> None:
        begin = self.host
        if number == 0:
            self.host += self.plan.first_us
        self.data()
        self.forward()
        self.backward()
        self.optimizer(number)
        self.span(f"ProfilerStep#{number}", "user_annotation", begin, self.host - begin)
        self.host += 1

    def data(self) -> None:
        plan = self.plan
        if plan.loader_us > 1000:
            self.host = max(self.host, max(self.free.values()))
        name = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
        self.span(name, "user_annotation", self.host, plan.loader_us)
        self.host += plan.loader_us
        start = self.host
        if plan.pageable_us:
            self.launch("Memcpy HtoD (Pageable -> Device)", plan.pageable_us, cat="gpu_memcpy")
            self.waits()
            self.span("aten::copy_", "cpu_op", start, self.host - start)
        else:
            self.launch("Memcpy HtoD (Pinned -> Device)", 30, cat="gpu_memcpy")

    def forward(self) -> None:
        plan = self.plan
        for layer in range(plan.layers):
            if plan.gathers:
                self.launch("ncclDevKernel_AllGather_RING_LL(...)", 150, stream=TALK, not_before=self.free[COMPUTE])
                self.free[COMPUTE] = self.free[TALK]
            if plan.mallocs_us:
                self.host = max(self.host, self.free[COMPUTE])
                self.runtime("cudaMalloc", plan.mallocs_us)
            self.memory(ACTIVATION)
            self.op("aten::mm")
            if layer < plan.reads:
                start = self.host
                self.waits()
                self.host += 30
                self.span("aten::_local_scalar_dense", "cpu_op", start, self.host - start)

    def backward(self) -> None:
        plan = self.plan
        for _ in range(plan.layers):
            start = self.host
            if plan.recompute:
                self.op("aten::mm")
            self.op("aten::mm", numbered=False)
            self.op("aten::mm", numbered=False)
            name = "autograd::engine::evaluate_function: MmBackward0"
            self.span(name, "cpu_op", start, self.host - start, **{"Sequence number": 1, "Fwd thread id": 1})
            self.memory(-ACTIVATION)
            if plan.reduces and not plan.exposed:
                self.launch("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(...)", 0.7 * plan.kernel_us, stream=TALK)
        if plan.reduces and plan.exposed:
            for _ in range(plan.layers):
                not_before = max(self.free.values())
                self.launch("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(...)", 280, stream=TALK, not_before=not_before)
            self.free[COMPUTE] = self.free[TALK]

    def optimizer(self, number: int) -> None:
        start = self.host
        self.launch("multi_tensor_apply_kernel", self.plan.kernel_us)
        if number == 0 and self.plan.state_appears:
            self.memory(STATE)
        self.host += 10
        self.span("Optimizer.step#AdamW.step", "user_annotation", start, self.host - start)


def planted(steps: int = 4, **plan: Any) -> dict[str, Any]:
    """A trace's content."""
    made = Trace(plan=Plan(**plan))
    for number in range(steps):
        made.step(number)
    return {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "NVIDIA A100"}], "traceEvents": made.events}
