"""What hooks cost where nothing is computed again: keep-all and plain steps in turn, on one model.

Rounds are interleaved and ratios taken inside each; the wide model's kernels take longer than their launches, the
narrow one's do not, so that it shows what the host pays.
"""

from __future__ import annotations

import statistics
from dataclasses import replace

import torch

import jettison
from benchmarks.gpu.cases import Column, Found, Log
from benchmarks.gpu.families import Size, Variant, build
from benchmarks.gpu.setting import Setting, fingerprints, milliseconds, quartiles

WIDE = Size(layers=6, hidden=2048, heads=16, kv_heads=8, ffn=5632, vocab=8192, sequence=2048, micro_batch=4)
NARROW = Size(layers=8, hidden=256, heads=4, kv_heads=4, ffn=688, vocab=8192, sequence=256, micro_batch=2)
TINY = Size(layers=2, hidden=64, heads=4, kv_heads=2, ffn=128, vocab=256, sequence=64, micro_batch=2)
COLUMNS = (
    Column(title="plain ms", key="plain_milliseconds", show="{:.2f}".format),
    Column(title="keep-all ms", key="milliseconds", show="{:.2f}".format),
    Column(title="ratio", key="ratio", show="{:.3f}".format),
    Column(title="quartiles", key="quartiles", show=lambda q: f"{q[0]:.3f}–{q[1]:.3f}"),
    Column(title="tensors saved", key="slots"),
)


def run(setting: Setting, log: Log, *, quick: bool) -> None:
    """Two families, wide and narrow."""
    log.columns = COLUMNS
    for family in ("llama",) if quick else ("llama", "gpt"):
        for word, size in (("tiny", TINY),) if setting.tiny else (("wide", WIDE), ("narrow", NARROW)):
            expect = 5.0 if setting.device.type == "cuda" else 1.0
            log.case(f"{family}, {word}", lambda f=family, s=size: _one(setting, f, s), expect=expect)


def _one(setting: Setting, family: str, size: Size) -> Found:
    sized = size if family == "llama" else replace(size, micro_batch=max(1, size.micro_batch // 2))
    (model, batch), (twin, same) = (build(family, sized, setting.device, torch.bfloat16, Variant()) for _ in range(2))

    def step(of: torch.nn.Module, its: dict[str, torch.Tensor]) -> None:
        of.zero_grad(set_to_none=True)
        of(**its).backward()

    with jettison.apply(model, "none", batch=batch) as handle:
        pairs: list[tuple[float, float]] = []
        for number in range(setting.rounds + 3):
            order = [(model, batch), (twin, same)]
            took = {}
            for of, its in order if number % 2 else order[::-1]:
                took[of] = milliseconds(lambda of=of, its=its: step(of, its), 1, setting.device)[0]
            pairs.append((took[model], took[twin]))
        hooked, plain = (list(column) for column in zip(*pairs[3:], strict=True))
        slots = sum(report.slots_kept for report in handle.report())
        dropped = sum(report.slots_dropped for report in handle.report())
    low, ratio, high = quartiles([a / b for a, b in zip(hooked, plain, strict=True)])
    differ = [] if fingerprints(model) == fingerprints(twin) else ["gradients differ from plain ones"]
    if differ:
        step(model, batch)
        before = fingerprints(model)
        step(model, batch)
        differ = differ if fingerprints(model) == before else []  # plain steps differ from themselves
    return Found(
        figures={
            "plain_milliseconds": statistics.median(plain),
            "milliseconds": statistics.median(hooked),
            "ratio": ratio,
            "quartiles": [low, high],
            "slots": slots,
        },
        problems=[*differ, *([f"{dropped} tensors were dropped although all are kept"] if dropped else [])],
    )
