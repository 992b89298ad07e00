"""A 1B-class Hugging Face Llama in bf16 with fused attention: peers, and Jettison at each peer's peak.

python -m benchmarks.gpu.llama_1b
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.gpu.common import parse, run_cases, write
from benchmarks.jettison_rows import at_peak, keep_all
from benchmarks.models import Size, build, loss_of
from benchmarks.rivals import EAGER

SIZE = Size(
    layers=16, hidden=2048, heads=32, kv_heads=8, ffn=8192, vocabulary=32_000, sequence=2048, micro_batch=4
)  # 1.1e9 parameters
DESCRIPTION = "Hugging Face Llama, 16 layers, h=2048, s=2048, b=4, V=32000, bf16, SDPA; forward and backward"


def main() -> None:
    """Measure and write."""
    options = parse("llama_1b", DESCRIPTION)

    def make() -> tuple[nn.Module, Any]:
        return build("llama", SIZE, "cuda")

    rows = run_cases([(rival, None) for rival in EAGER], make, loss_of, options.rounds)
    torch.cuda.empty_cache()
    if not options.no_jettison:
        jettison = [(keep_all(), None), *((at_peak(row.case, row.peak_bytes), row.peak_bytes) for row in rows[1:])]
        rows += run_cases(jettison, make, loss_of, options.rounds)
    write(options, DESCRIPTION, rows)


if __name__ == "__main__":
    main()
