"""Programs whose forward runs under other switches (kernels, precision, threads) than their backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from silent.harness import Program
from silent.kit import ROWS, WIDTH, case, program
from silent.passes import dropping


def forward_under(switch: Any, run: Any = dropping) -> Program:
    """The forward alone runs under a context that picks other kernels."""

    def step(model: Any, given: Any, i: int) -> list[Tensor]:
        with switch():
            loss = model(*given)
        loss.backward()
        return [loss]

    return program(run, step=step)


def convolving(s: Any, x: Tensor) -> Tensor:
    """A convolution and a wide product, whose kernels depend on switches."""
    h = F.conv1d(s.a(x).view(4, 16, WIDTH), s.b.weight.view(16, 16, 4)[:, :, :3], padding=1).tanh()
    return x + s.b(torch.tanh(h.reshape(ROWS, WIDTH) @ s.a.weight).exp())


@case()
def onednn_off_in_forward() -> Program:
    return forward_under(lambda: torch.backends.mkldnn.flags(enabled=False), convolving)


@case()
def onednn_in_low_precision_in_forward() -> Program:
    class Low:
        def __enter__(self) -> None:
            torch.set_float32_matmul_precision("medium")

        def __exit__(self, *_: Any) -> None:
            torch.set_float32_matmul_precision("highest")

    return forward_under(Low, convolving)


@case(works=True)
def math_attention_in_forward() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        q = s.a(x).view(1, 2, ROWS, WIDTH // 2)
        return x + s.b(F.scaled_dot_product_attention(q, q, q, is_causal=True).reshape(ROWS, WIDTH)).tanh()

    return forward_under(lambda: sdpa_kernel(SDPBackend.MATH), run)


@case()
def attention_kernel_that_changes() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        q = s.a(x).view(1, 2, ROWS, WIDTH // 2)
        return x + s.b(F.scaled_dot_product_attention(q, q, q, is_causal=True).reshape(ROWS, WIDTH)).tanh()

    def step(model: Any, given: Any, i: int) -> list[Tensor]:
        with sdpa_kernel(SDPBackend.MATH if i % 2 else SDPBackend.FLASH_ATTENTION):
            loss = model(*given)
        loss.backward()
        return [loss]

    return program(run, step=step)


@case()
def deterministic_in_forward() -> Program:
    class Deterministic:
        def __enter__(self) -> None:
            torch.use_deterministic_algorithms(True)

        def __exit__(self, *_: Any) -> None:
            torch.use_deterministic_algorithms(False)

    def run(s: Any, x: Tensor) -> Tensor:
        h = torch.tanh(s.a(x))
        return x + s.b(torch.zeros_like(h).index_add(0, torch.arange(ROWS) % 7, h).exp())

    return forward_under(Deterministic, run)


@case()
def default_dtype_in_forward() -> Program:
    class Double:
        def __enter__(self) -> None:
            torch.set_default_dtype(torch.float64)

        def __exit__(self, *_: Any) -> None:
            torch.set_default_dtype(torch.float32)

    return forward_under(Double, lambda s, x: x + s.b((torch.tanh(s.a(x)) * torch.linspace(0, 1, WIDTH)).float()))


@case(slow=True)
def threads_in_forward() -> Program:
    class Two:
        def __enter__(self) -> None:
            torch.set_num_threads(2)

        def __exit__(self, *_: Any) -> None:
            torch.set_num_threads(1)

    return forward_under(Two, convolving)


@case()
def denormals_flushed_in_forward() -> Program:
    class Flushing:
        def __enter__(self) -> None:
            torch.set_flush_denormal(True)

        def __exit__(self, *_: Any) -> None:
            torch.set_flush_denormal(False)

    return forward_under(Flushing, lambda s, x: x + s.b((torch.tanh(s.a(x)) * 1e-39 * 1e38).exp()))


@case()
def precision_set_by_the_block() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        torch.set_float32_matmul_precision("medium")
        try:
            h = torch.tanh(s.a(x))
        finally:
            torch.set_float32_matmul_precision("highest")
        return x + s.b(h.exp())

    return program(run)
