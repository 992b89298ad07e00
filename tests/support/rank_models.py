"""A tiny transformer that ranks can shard and cut into stages, its data, and what a run of it leaves behind."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from jettison.capture.tensor_subclasses import desugars

VOCABULARY, WIDTH, HEADS, LENGTH, ROWS = 64, 32, 4, 16, 2


class Attention(nn.Module):
    """Eager attention; as many heads as its projections have room for."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (p(x).view(b, s, -1, WIDTH // HEADS).transpose(1, 2) for p in (self.q, self.k, self.v))
        scores = (q @ k.transpose(-1, -2) * (WIDTH // HEADS) ** -0.5).softmax(-1)
        scores = functional.dropout(scores, self.dropout, self.training)
        return self.out((scores @ v).transpose(1, 2).reshape(b, s, -1))


class Mlp(nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x)))


class Block(nn.Module):
    """Pre-norm; counts its calls in a buffer, as batch norms do."""

    calls: Tensor

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = Attention(dropout), Mlp()
        self.after: nn.Module = nn.Identity()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = x + self.attention(self.norm1(x))
        return self.after(x + self.mlp(self.norm2(x)))


class Counting(nn.Module):
    """Writes to buffers in every forward, as batch norms and routers of experts do. May stand after a block."""

    load: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, affine=False)
        self.register_buffer("load", torch.zeros(4, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        chosen = x[..., :4].argmax(-1, keepdim=True)
        self.load += (chosen == torch.arange(4)).sum((0, 1))
        return self.norm(x.flatten(0, 1)).view(x.shape)


class Stage(nn.Module):
    """Some blocks; with the embedding where it is the first stage, and with the head where it is the last."""

    def __init__(self, blocks: int, *, first: bool = True, last: bool = True, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH) if first else None
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH) if last else None
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False) if last else None

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


class Model(Stage):
    """All of it, down to the loss."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return loss_of(super().forward(ids), labels)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy over all tokens."""
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def model(blocks: int = 3, *, dropout: float = 0.1, dtype: torch.dtype = torch.float32) -> Model:
    """From a fixed seed, the same on every rank."""
    torch.manual_seed(0)
    return Model(blocks, dropout=dropout).to(dtype)


def tokens(seed: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Ids and labels."""
    generator = torch.Generator().manual_seed(seed)
    ids, labels = (torch.randint(0, VOCABULARY, (rows, LENGTH), generator=generator) for _ in range(2))
    return ids, labels


def shard(stage: Stage, mesh: DeviceMesh, *, local: bool = True) -> None:
    """Torch's own tensor and sequence parallelism.

    Args:
        local: activations between layers are plain tensors, else DTensors.
    """
    row = RowwiseParallel(output_layouts=Shard(1), use_local_output=local)
    whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    plan: dict[str, Any] = {"norm": SequenceParallel()}
    plan["embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=local)
    plan["head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    parallelize_module(stage, mesh, {name: how for name, how in plan.items() if getattr(stage, name) is not None})
    for block in stage.blocks:
        column = {f"attention.{name}": ColwiseParallel() for name in "qkv"}
        parallelize_module(
            block,
            mesh,
            {
                "norm1": SequenceParallel(),
                "norm2": SequenceParallel(),
                "attention": whole,
                "mlp": whole,
                "attention.out": row,
                "mlp.up": ColwiseParallel(),
                "mlp.down": row,
                **column,
            },
        )


def whole_gradients(module: nn.Module) -> dict[str, Tensor]:
    """By name; what is sharded is gathered."""
    return {name: whole(p.grad) for name, p in module.named_parameters() if p.grad is not None}


def whole(tensor: Tensor) -> Tensor:
    """A plain tensor of the whole."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Bitwise, for the same names."""
    return bool(a) and a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest difference of a tensor, as a share of its own largest value, or of a thousandth of the largest of all
    where that is larger; infinite where the names differ.
    """
    if a.keys() != b.keys():
        return float("inf")
    least = max(float(t.abs().max()) for t in b.values()) / 1000
    return max(float((a[name] - t).abs().max()) / max(least, float(t.abs().max())) for name, t in b.items())


class Ops(TorchDispatchMode):
    """Every op on plain tensors, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if desugars(types):
            return NotImplemented
        self.names.append(str(func).removesuffix(".default"))
        return func(*args, **(kwargs or {}))

    def collectives(self) -> list[str]:
        """Those that talk to other ranks."""
        return [n.split(".")[1] for n in self.names if "c10d" in n and "wait" not in n and "_wrap" not in n]

    def counted(self, *names: str) -> dict[str, int]:
        """How often each ran."""
        found = Counter(self.names)
        return {name: found[f"aten.{name}"] for name in names}
