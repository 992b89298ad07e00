"""Compiled blocks: torch's activation_memory_budget, and Jettison at the peak of each.

Llama 1B of few layers, so that compiling fits the kit's time; all blocks are alike and are compiled once. Gradients
of compiled code are not bitwise identical to eager code's, so that they are shown and not checked.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from benchmarks.gpu.cases import Found, Log, Skip
from benchmarks.gpu.compare import COLUMNS, Comparison
from benchmarks.gpu.llama import ONE, TINY, loss_of, make
from benchmarks.gpu.setting import Setting, why_no_compiler
from benchmarks.rivals import Rival, compiled_blocks
from jettison.planner.planner import UNSEEN_BYTES

LAYERS = 4
BUDGETS = (0.2, 0.0, 0.5, 1.0)  # those that are asked for first: time may be up


def run(setting: Setting, log: Log, *, quick: bool) -> None:
    """A pair for each budget."""
    log.columns = COLUMNS
    why = "--no-compile" if not setting.compiles else why_no_compiler(setting.device.type)
    if why:
        log.case("compiled blocks", lambda: _skipped(why), expect=0.0)
        return
    size = replace(TINY if setting.tiny else ONE, layers=LAYERS)
    log.text = [f"{LAYERS} layers of the 1B, h={size.hidden}, s={size.sequence}, b={size.micro_batch}, bf16."]
    compared = Comparison(
        setting,
        log,
        lambda: make(setting, size, LAYERS),
        loss_of,
        rounds=setting.rounds,
        subject=f"Llama 1B, {LAYERS} layers, compiled blocks",
        exact=False,
    )
    compared.expect = 12.0 if setting.device.type == "cuda" else 5.0
    for budget in BUDGETS[:1] if quick else BUDGETS:
        torch._dynamo.reset()
        theirs = compared.row(Rival(name=f"compiled blocks, budget {budget}", apply=compiled_blocks(budget)))
        compared.at_peaks_of([theirs], extra_bytes=UNSEEN_BYTES, compile="blocks")
    compared.close()


def _skipped(why: str) -> Found:
    raise Skip(why)
