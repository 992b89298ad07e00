"""What is run on a machine to know it: matrix products, fused attention, copies, and a block of ordinary ops.

NOTE [ Cold data ]
A training step seldom finds a weight, or what a layer saved, in a cache. So operands come from a pool that is larger
than caches, each call from another place of it, and results stay for a while before their memory is used again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from jettison.calibrate.clock import Probe
from jettison.capture.tracer import trace_model
from jettison.cost.kernel import Product
from jettison.runtime.install import install
from jettison.solve.policy import KeepAll

BLOCKS = 6
"""In a step of blocks or layers: together, blocks hold more than caches do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How large the work is that suits a device.

    Args:
        products: (rows, outputs, inputs) of y = x W^T.
        attention: (batch, heads, sequence, width of a head).
        streamed: elements of a copy that no cache holds.
        block: (rows, width) of the block of ordinary ops.
        layer: (rows, width, heads) of layers that are run with and without the runtime's hooks: on a CPU, more weights
            than caches hold, so that Python finds them as cold as between the products of a model.
        pool_bytes: of operands and of results; see NOTE [ Cold data ].
    """

    products: tuple[tuple[int, int, int], ...]
    attention: tuple[tuple[int, int, int, int], ...]
    streamed: int
    block: tuple[int, int]
    layer: tuple[int, int, int]
    pool_bytes: int


CPU_SIZES = Sizes(
    products=(
        (320, 320, 320),
        (640, 128, 512),
        (640, 512, 128),
        (640, 768, 192),
        (1280, 256, 256),
        (1280, 1024, 256),
        (1280, 256, 1024),
        (640, 1536, 512),
        (640, 512, 1536),
        (640, 4096, 384),
        (1280, 768, 768),
        (1536, 1536, 1536),
    ),
    attention=((3, 5, 160, 32), (3, 7, 320, 32), (2, 6, 320, 64), (1, 7, 640, 64)),
    streamed=1 << 24,
    block=(1024, 384),
    layer=(64, 512, 8),
    pool_bytes=128 << 20,
)
CUDA_SIZES = Sizes(
    products=(
        (2048, 2048, 2048),
        (2048, 1024, 4096),
        (4096, 1024, 1024),
        (4096, 4096, 4096),
        (8192, 2048, 8192),
        (8192, 8192, 2048),
        (8192, 12288, 4096),
        (8192, 4096, 14336),
        (16384, 4096, 4096),
        (4096, 32768, 4096),
    ),
    attention=((4, 16, 2048, 128), (1, 32, 4096, 128), (8, 16, 2048, 64), (1, 32, 8192, 128)),
    streamed=1 << 28,
    block=(8192, 4096),
    layer=(8, 16, 2),
    pool_bytes=1 << 30,
)


def quick(sizes: Sizes) -> Sizes:
    """Every second product and attention."""
    return Sizes(
        products=sizes.products[1::2],
        attention=sizes.attention[1::2],
        streamed=sizes.streamed,
        block=sizes.block,
        layer=sizes.layer,
        pool_bytes=sizes.pool_bytes,
    )


class Pool:
    """Operands from a stretch of memory that moves on with every turn, and results that stay for a while."""

    def __init__(self, nbytes: int, dtype: torch.dtype, device: torch.device) -> None:
        self._nbytes = nbytes
        self._flat = torch.rand(nbytes // dtype.itemsize, dtype=torch.float32, device=device).to(dtype)
        self._at = 0
        self._kept: deque[Any] = deque()
        self._kept_bytes = 0

    def take(self, *shape: int) -> Tensor:
        """A tensor whose elements were not used lately."""
        size = 1
        for n in shape:
            size *= n
        if self._at + size > self._flat.numel():
            self._at = 0
        found = self._flat[self._at : self._at + size].view(shape)
        self._at += size
        return found

    def keep(self, result: Tensor) -> None:
        """Hold a result until as many bytes came after it as the pool has."""
        self._kept.append(result)
        self._kept_bytes += result.nbytes
        while self._kept_bytes > self._nbytes:
            self._kept_bytes -= self._kept.popleft().nbytes


# matrix products ------------------------------------------------------------------------------------------------------


def product_probes(sizes: Sizes, pool: Pool, dtype: str) -> Iterator[tuple[Product, Probe]]:
    """Each y = x W^T, and both products of its backward, as autograd calls them."""
    for m, n, k in sizes.products:
        forms: tuple[tuple[str, Product, Callable[[int], None]], ...] = (
            ("y", Product(1, m, n, k, dtype), _call(pool, (m, k), (n, k), lambda x, w: x @ w.t())),
            ("dx", Product(1, m, k, n, dtype), _call(pool, (m, n), (n, k), lambda g, w: g @ w)),
            ("dW", Product(1, n, k, m, dtype), _call(pool, (m, n), (m, k), lambda g, x: g.t() @ x)),
        )
        for form, product, run in forms:
            yield product, Probe(f"{dtype} product {form} {m} x {n} x {k}", run)


def _call(
    pool: Pool, first: tuple[int, int], second: tuple[int, int], op: Callable[[Tensor, Tensor], Tensor]
) -> Callable[[int], None]:
    def run(_turn: int) -> None:
        pool.keep(op(pool.take(*first), pool.take(*second)))

    return run


# attention ------------------------------------------------------------------------------------------------------------


def attention_probes(sizes: Sizes, pool: Pool) -> Iterator[tuple[str, float, Probe, Probe]]:
    """Causal attention: its name, its forward's FLOPs that are not masked, its forward, and both passes."""
    for b, a, s, d in sizes.attention:
        shape = (b, a, s, d)

        def forward(_turn: int, shape: tuple[int, ...] = shape) -> None:
            q, k, v = (pool.take(*shape) for _ in range(3))
            pool.keep(torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))

        def both(_turn: int, shape: tuple[int, ...] = shape) -> None:
            q, k, v = (pool.take(*shape).detach().requires_grad_() for _ in range(3))
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            torch.autograd.grad(out, (q, k, v), pool.take(*shape))

        flops = 4.0 * b * a * s * s * d * (s + 1) / (2 * s)
        name = f"attention {b} x {a} x {s} x {d}"
        yield name, flops, Probe(name, forward), Probe(f"{name}, both passes", both)


# memory ---------------------------------------------------------------------------------------------------------------


def stream_probe(sizes: Sizes, device: torch.device) -> tuple[int, Probe]:
    """A sum of two large tensors into a third: bytes, and the call."""
    a, b, out = (torch.ones(sizes.streamed, device=device) for _ in range(3))
    return 3 * out.nbytes, Probe("streaming", lambda _turn: torch.add(a, b, out=out))


def host_probes(nbytes: int, device: torch.device) -> tuple[Probe, Probe]:
    """Copies to the device and from it, from memory that the device reads by itself."""
    there = torch.empty(nbytes, dtype=torch.uint8, device=device)
    here = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    return (
        Probe("host to device", lambda _turn: there.copy_(here, non_blocking=True)),
        Probe("device to host", lambda _turn: here.copy_(there, non_blocking=True)),
    )


# ordinary ops ---------------------------------------------------------------------------------------------------------


def step_of_blocks(rows: int, width: int, device: torch.device, dtype: torch.dtype) -> Callable[[int], None]:
    """Forward and backward of a few gated blocks without their matrix products: norms, activations and sums."""
    weights = [torch.ones(width, device=device, dtype=dtype, requires_grad=True) for _ in range(2 * BLOCKS)]
    given = torch.randn(rows, width, device=device).to(dtype).requires_grad_()

    def step(_turn: int) -> None:
        x = given
        for number in range(BLOCKS):
            scale, gate = weights[2 * number : 2 * number + 2]
            normed = scale * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))
            x = x + torch.nn.functional.silu(normed) * (normed * gate)
        torch.autograd.grad(x, (given, *weights), given.detach())

    return step


class _Layer(nn.Module):
    """A layer as models have them, modules and views included: what its ops cost is not their kernels alone."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.scale = nn.ParameterList(nn.Parameter(torch.ones(width)) for _ in range(2))
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up, self.down = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        normed = self._norm(x, 0)
        q, k, v = (m(normed).view(b, s, self.heads, -1).transpose(1, 2) for m in (self.query, self.key, self.value))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, s, h))
        normed = self._norm(x, 1)
        return x + self.down(nn.functional.silu(self.gate(normed)) * self.up(normed))

    def _norm(self, x: Tensor, number: int) -> Tensor:
        return self.scale[number] * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))


def step_of_layers(
    rows: int, width: int, heads: int, device: torch.device, dtype: torch.dtype, *, hooked: bool = False
) -> tuple[int, Callable[[int], None]]:
    """Forward and backward of a few layers; and how many tensors they save, where hooks keep all of them."""
    model = nn.Sequential(*(_Layer(width, heads) for _ in range(BLOCKS))).to(device, dtype)
    x = torch.randn(1, rows, width, device=device).to(dtype)
    slots = 0
    if hooked:
        traced = trace_model(model, (x,), loss_fn=torch.sum)
        install(model, traced, {call.name: KeepAll() for call in traced.calls}, KeepAll())
        slots = len(traced.root.program.slots) + sum(len(traced.program(call).slots) for call in traced.calls)

    def step(_turn: int) -> None:
        model(x).sum().backward()
        model.zero_grad()

    return slots, step


class Counted(TorchDispatchMode):
    """Kernels that run, views aside, and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels, self.nbytes = 0, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        read = {id(t): t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}.values()
        given = {t.untyped_storage().data_ptr() for t in read}
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        written = [t for t in made if func._schema.is_mutable or t.untyped_storage().data_ptr() not in given]
        if written:
            self.kernels += 1
            self.nbytes += sum(map(_extent, [*read, *written]))
        return out


def _extent(tensor: Tensor) -> int:
    """Bytes of it in memory: what is expanded counts once."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def counted(step: Callable[[int], None]) -> Counted:
    """What one step runs."""
    with Counted() as found:
        step(0)
    return found
