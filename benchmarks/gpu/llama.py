"""Llamas of 1B and 8B: peers, and Jettison at the peak of each.

Forward and backward in bf16 with fused attention, as many layers as fit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.cases import Log
from benchmarks.gpu.compare import COLUMNS, Comparison
from benchmarks.gpu.families import Size, Variant, build
from benchmarks.gpu.setting import Setting
from benchmarks.jettison_rows import keep_all
from benchmarks.rivals import EAGER
from jettison.dryrun.counter import have_workspaces, measured_peak, static_tensors

ONE = Size(
    layers=16, hidden=2048, heads=32, kv_heads=8, ffn=8192, vocab=32_000, sequence=2048, micro_batch=4
)  # 1.1e9 parameters
EIGHT = Size(
    layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14_336, vocab=128_256, sequence=4096, micro_batch=1
)  # 8.0e9 parameters
TINY = Size(layers=3, hidden=64, heads=4, kv_heads=2, ffn=128, vocab=256, sequence=64, micro_batch=2)
KEPT = 1.01
"""Time ÷ plain that is asked for where everything is kept."""
SHARE = 0.88
"""Of the free memory that a plain step may take by what a layer was measured to take: the rest is for fragments."""


def run_1b(setting: Setting, log: Log, *, quick: bool) -> None:
    """The small one."""
    _run(setting, log, ONE, 1, rounds=setting.rounds, quick=quick)


def run_8b(setting: Setting, log: Log, *, quick: bool) -> None:
    """The large one, of whose steps fewer are timed."""
    _run(setting, log, EIGHT, 8, rounds=max(3, setting.rounds // 2), quick=quick)


def _run(setting: Setting, log: Log, size: Size, billions: int, *, rounds: int, quick: bool) -> None:
    size = TINY if setting.tiny else size
    have_workspaces(setting.device)
    layers = min(size.layers, _fitting(setting, size))
    log.columns = COLUMNS
    log.text = [
        f"{layers} of {size.layers} layers, h={size.hidden}, s={size.sequence}, b={size.micro_batch}, "
        f"V={size.vocab}, {size.heads} heads, {size.kv_heads} key-value heads, f={size.ffn}, bf16; "
        "forward and backward."
    ]
    subject = f"Llama {billions}B, {layers} layers"
    compared = Comparison(setting, log, lambda: make(setting, size, layers), loss_of, rounds=rounds, subject=subject)
    compared.row(EAGER[0])
    for rival in EAGER[1:2] if quick else EAGER[1:]:  # each pair while there is time
        compared.at_peaks_of([compared.row(rival)])
    compared.row(keep_all(), asked=KEPT)
    compared.close()


def make(setting: Setting, size: Size, layers: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model of so many layers, and its batch."""
    return build("llama", replace(size, layers=layers), setting.device, torch.bfloat16, Variant())


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    """The mean loss; logits are the model's own to let go."""
    return model(**batch)


def _fitting(setting: Setting, size: Size) -> int:
    """Layers of which a plain step fits, by what one and three take."""
    if setting.device.type != "cuda":
        return size.layers
    peaks = []
    for layers in (1, 3):
        model, batch = make(setting, size, layers)
        report = measured_peak(lambda m=model, b=batch: loss_of(m, b).backward(), static_tensors=static_tensors(model))
        peaks.append(report.peak_bytes)
        del model, batch
        torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(setting.device)
    return layers_in(int(SHARE * free), peaks[0], peaks[1])


def layers_in(room_bytes: int, of_one: int, of_three: int) -> int:
    """Layers of which a plain step takes no more than so much, by the peaks of one layer's and of three; at least 1."""
    return max(1, 1 + (room_bytes - of_one) // max(1, (of_three - of_one) // 2))
