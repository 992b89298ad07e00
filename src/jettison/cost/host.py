"""Seconds until the host has handed over what the device is to do.

NOTE [ Launch-bound ]
Work that takes less than handing it over takes as long as that. For kernels it is `Delays.dispatch` each. A layer of
experts in Megatron takes the host much longer than its kernels say: modules, quantisers and tensors of each expert are
Python objects, and it waits for the device to say how many rows each expert has. TransformerEngine's issue 2897
measured 1.2 ms of host time for a forward and 2.1 ms for a backward of the newest fused experts alone; fp8 costs the
host twice what bf16 does (issue 761). `Delays.experts` is a whole layer's. CUDA graphs replay kernels without the host.

NOTE [ Expert by expert ]
TransformerEngine hands a grouped product over as a loop of cuBLASLt's (``common/gemm/cublaslt_gemm.cu``,
``multi_stream_cublas_gemm``): a description, a search for an algorithm and a launch for each expert, two forward and
four backward for its two matrices. And so are rows of each expert quantised (``csrc/extensions/cast.cpp``,
``multi_tensor_quantize_impl``), but under NVFP4, which has one kernel for all (``split_quantize_nvfp4_impl``). Eight
products of 128 × 2048 × 2048, whose arithmetic takes a few microseconds, took 267 on Blackwell (TransformerEngine's
pull request 3134, "pure"): `Delays.product` is 33 there. Graphs that leave experts out (``moe_router`` and
``moe_preprocess`` alone) leave that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from jettison.cost.execution import Execution
from jettison.cost.kernel import Kernel
from jettison.cost.op_kinds import GROUPED
from jettison.formula.tape import Tape
from jettison.spec.hardware import Delays

FORWARD_OF_EXPERTS: Final = 1.2 / 3.3
"""Of the host's time for a layer of experts: NOTE [ Launch-bound ]."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """Of one region.

    Args:
        ep: ranks that share its experts.
        narrow: its products are in fp8 or less.
        apart: rows of each expert are quantised apart.
    """

    tape: Tape
    execution: Execution
    delays: Delays
    ep: int
    narrow: bool
    apart: bool

    @property
    def experts(self) -> float:
        """A layer of them, both ways, beside `handing`."""
        if self.execution.graphed or not self._loops:
            return 0.0
        return self.delays.experts * (1.0 if self.narrow else 0.5)

    def handing(self, kernels: Sequence[Kernel]) -> float:
        """Handing kernels over, those of experts one by one."""
        launches = 0 if self.execution.graphed else sum(k.launches for k in kernels)
        return launches * self.delays.dispatch + self._one_by_one(kernels)

    @cached_property
    def _loops(self) -> bool:
        """Are there experts that are handed over one by one?"""
        return self.execution.loops_experts and any(step.name == GROUPED for step in self.tape.steps)

    def _one_by_one(self, kernels: Sequence[Kernel]) -> float:
        """NOTE [ Expert by expert ], without the first call that quantises, which is a launch."""
        replayed = self.execution.graphed and self.execution.graphs_experts
        if not self.delays.product or replayed or not self._loops:
            return 0.0
        total = 0.0
        for kernel in kernels:
            step = self.tape.steps[kernel.steps[-1]]
            if kernel.product is not None and kernel.product.grouped:
                total += kernel.product.batch * self.delays.product
            elif step.name == GROUPED and kernel.product is None and self.apart:
                total += (step.weights[0].shape[0] // self.ep - 1) * kernel.launches * self.delays.dispatch
        return total
