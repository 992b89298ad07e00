"""Offload against recompute on the real link: torch's `save_on_cpu`, and Jettison at its peak with and without offload.

At the peak of checkpointing every layer as well, where recomputation alone is what torch offers.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.gpu.cases import Log
from benchmarks.gpu.compare import COLUMNS, Comparison
from benchmarks.gpu.llama import ONE, TINY, loss_of, make
from benchmarks.gpu.setting import Setting
from benchmarks.jettison_rows import at_peak
from benchmarks.rivals import EAGER, Rival, save_on_cpu

LAYERS = 8
HARDWARE = {"cpu": "h100-80gb"}
"""Whose link is taken where there is none; of a device its own."""


def run(setting: Setting, log: Log, *, quick: bool) -> None:
    """Peers, Jettison at their peaks, and the better of its two ways beside the other."""
    size = replace(TINY if setting.tiny else ONE, layers=3 if setting.tiny else LAYERS)
    log.columns = COLUMNS
    log.text = [f"{size.layers} layers of the 1B, h={size.hidden}, s={size.sequence}, b={size.micro_batch}, bf16."]
    compared = Comparison(
        setting,
        log,
        lambda: make(setting, size, size.layers),
        loss_of,
        rounds=max(2, setting.rounds // 2),
        subject=f"Llama 1B, {size.layers} layers, offload",
    )
    peers = (Rival(name="save_on_cpu, pinned", apply=save_on_cpu), EAGER[1])
    for rival in peers[:1] if quick else peers:
        theirs = compared.row(rival)
        for alone in compared.at_peaks_of([theirs]):  # offload is a choice: at one budget it is no slower than without
            budget_bytes = theirs.figures["peak_bytes"]
            joint = at_peak(theirs.name, budget_bytes, offload=True, hardware=HARDWARE.get(setting.device.type))
            joint = replace(joint, name=f"jettison with offload at the peak of: {theirs.name}")
            compared.row(joint, budget_bytes, peer=alone if "ratio" in alone.figures else theirs)
    compared.close()
