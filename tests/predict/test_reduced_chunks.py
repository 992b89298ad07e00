"""What is gone of a chunk of a sharded stage once it is reduced, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jettison.families.presets import preset
from jettison.predict.fsdp import freed, reducing
from jettison.predict.stages import outline
from jettison.request.options import RunRequest
from jettison.request.resolve import resolve

H, FFN, KV, V = 4096, 14336, 1024, 128256
LAYER = 2 * H * H + 2 * H * KV + 3 * H * FFN + 2 * H
"""Parameters of Llama 3 8B."""


@pytest.mark.parametrize(("reshard", "each"), [("never", 3), ("always", 1)])
def test_whole_gradients_go_and_shards_stay(reshard: str, each: int) -> None:
    """In bf16 alone, over two ranks: of each parameter 2 bytes of gradient go and one comes; so do 2 of weights, where
    these are whole from the first forward on.
    """
    asked = RunRequest(seq=128, pp=2, dp=2, zero=3, micro_batches=2, stage_buffers=True, precision="bf16-pure")
    run = resolve(preset("llama3-8b"), replace(asked, reshard_after_forward=reshard)).run
    (first,), (last,) = outline(run)
    assert freed(run, first) == each * (16 * LAYER + V * H)
    assert freed(run, last) == each * (16 * LAYER + V * H + H)
    assert reducing(run, first) > 0
