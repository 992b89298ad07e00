"""Cross entropy over chunks of rows beside torch's own: bits, bytes, milliseconds.

Logits come out of a matmul and go once the loss has them, as in a training step. On some processors its kernel needs
more than the loss: its own peak, forward and backward, is a column. Vocabularies are of models that
people train, odd ones among them: kernels load a row in other pieces where it does not start at an aligned address.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu.cases import Column, Found, Log, Skip, mib
from benchmarks.gpu.setting import Setting, milliseconds
from jettison.dryrun.counter import measured_peak
from jettison.runtime.chunked_loss import ChunkedLossPatch, whole_losses
from jettison.verify.differences import same_bits

COLUMNS = (
    Column(title="logits MiB", key="logits_bytes", show=mib),
    Column(title="matmul alone MiB", key="matmul_bytes", show=mib),
    Column(title="torch MiB", key="torch_bytes", show=mib),
    Column(title="in chunks MiB", key="chunked_bytes", show=mib),
    Column(title="torch ms", key="torch_milliseconds", show="{:.2f}".format),
    Column(title="in chunks ms", key="milliseconds", show="{:.2f}".format),
    Column(title="ratio", key="ratio", show="{:.3f}".format),
)
VOCABULARIES = {"GPT-2": 50257, "Llama 2": 32000, "Llama 3": 128256, "Qwen3": 151936, "odd": 100277}
HIDDEN = 64


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A loss: of N tokens over V classes, some of them ignored."""

    rows: int
    columns: int
    dtype: torch.dtype
    reduction: str = "mean"


def run(setting: Setting, log: Log, *, quick: bool) -> None:
    """Vocabularies in fp32; one in 16 bits, one summed."""
    log.columns = COLUMNS
    rows = 63 if setting.tiny else 4095
    names = list(VOCABULARIES)[: 1 if setting.tiny else 2 if quick else None]
    kinds = {name: Kind(rows=rows, columns=VOCABULARIES[name], dtype=torch.float32) for name in names}
    kinds["GPT-2, bf16"] = Kind(rows=rows, columns=VOCABULARIES["GPT-2"], dtype=torch.bfloat16)
    kinds["Llama 2, summed"] = Kind(rows=rows, columns=VOCABULARIES["Llama 2"], dtype=torch.float32, reduction="sum")
    for name, kind in kinds.items():
        log.case(name, lambda kind=kind: _one(setting, kind), expect=4.0 if setting.device.type == "cuda" else 1.0)


def _one(setting: Setting, kind: Kind) -> Found:
    generator = torch.Generator(setting.device).manual_seed(0)
    x = torch.randn(kind.rows, HIDDEN, device=setting.device, generator=generator).to(kind.dtype).requires_grad_()
    head = torch.randn(kind.columns, HIDDEN, device=setting.device, generator=generator).to(kind.dtype)
    target = torch.randint(kind.columns, (kind.rows,), device=setting.device, generator=generator)
    target[::7] = -100

    def step() -> Tensor:
        x.grad = None
        loss = functional.cross_entropy(functional.linear(x, head), target, reduction=kind.reduction)
        loss.backward()
        return loss.detach()

    def whole() -> Tensor:
        with whole_losses():
            return step()

    def matmul() -> None:
        x.grad = None
        logits = functional.linear(x, head)
        logits.backward(logits.detach())

    alone = measured_peak(matmul, static_tensors=[x, head, target])
    hold = ChunkedLossPatch()
    try:
        found, peaks = [], []
        for function in (whole, step):
            loss = function()
            assert x.grad is not None
            found.append((loss, x.grad.clone()))
            report = measured_peak(function, static_tensors=[x, head, target])
            peaks.append(report.peak_bytes - report.static_bytes)
        usual, chunked = _timed(setting, whole, step)
    finally:
        hold.release()
    if not hold.used:
        raise Skip("bits of chunks were tried and differ on this device: torch's own loss is taken")
    problems = [] if all(map(same_bits, *found)) else ["bits differ from torch's own"]
    return Found(
        figures={
            "logits_bytes": kind.rows * kind.columns * kind.dtype.itemsize,
            "matmul_bytes": alone.peak_bytes - alone.static_bytes,
            "torch_bytes": peaks[0],
            "chunked_bytes": peaks[1],
            "torch_milliseconds": statistics.median(usual),
            "milliseconds": statistics.median(chunked),
            "ratio": statistics.median(b / a for a, b in zip(usual, chunked, strict=True)),
        },
        problems=problems,
    )


def _timed(setting: Setting, *steps: Callable[[], Tensor]) -> list[list[float]]:
    """Milliseconds of each, in turns."""
    found: list[list[float]] = [[] for _ in steps]
    for number in range(setting.rounds + 2):
        for taken, step in zip(found, steps, strict=True):
            took = milliseconds(step, 1, setting.device)
            taken += took if number > 1 else []
    return found
