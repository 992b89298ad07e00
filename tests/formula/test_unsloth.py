"""Unsloth's kernels, which need a GPU: what they keep, by hand."""

from __future__ import annotations

import pytest

from jettison.families.presets import preset
from jettison.formula.liveness import replay
from jettison.formula.region import head_region, layer_region
from jettison.request.options import RunRequest
from jettison.request.resolve import resolve
from jettison.spec.run import Run

SEQUENCE, FFN, VOCABULARY = 1024, 14336, 128256


def llama(kernels: str, targets: str = "all-linear", precision: str = "bf16-pure") -> Run:
    """Llama 3 8B with adapters."""
    request = RunRequest(
        seq=SEQUENCE,
        micro_batch=2,
        lora=f"r=16,targets={targets}",
        precision=precision,
        kernels=kernels,
        attention="flash",
        input_gradients=True,
    )
    return resolve(preset("llama3-8b"), request).run


@pytest.mark.parametrize(("targets", "wide"), [("all-linear", 2), ("q_proj+v_proj", 3)])
def test_a_layer_keeps_what_its_ops_read(targets: str, wide: int) -> None:
    """Of a block whose products all have adapters gate and up; else what activation and product keep of themselves."""
    run = llama("unsloth", targets)
    entries = list(layer_region(run.signature, run.model.layers[1]).entries("layer"))
    tokens = 2 * SEQUENCE
    assert sum(s.storage_bytes for s in entries if s.shape[-1] == FFN) == wide * tokens * FFN * 2
    assert not [s for s in entries if s.shape[-1] == 16], "what has the adapter's rank is made again"


@pytest.mark.parametrize(
    ("kernels", "precision", "kept", "highest"),
    [
        ("unsloth", "bf16-pure", 2, 2),
        ("unsloth", "bf16-autocast", 2, 6),
        ("foak", "bf16-pure", 4, 10),
        ("huggingface-4.48", "bf16-pure", 4, 14),
    ],
)
def test_bytes_of_a_logit(kernels: str, precision: str, kept: int, highest: int) -> None:
    """16 bits in place, with accelerate's fp32 copy of them under autocast; an fp32 copy that is kept, in addition to
    the model's own and the chunks that are copied; and with torch's log-softmax.
    """
    run = llama(kernels, precision=precision)
    region = head_region(run.signature)
    logits = 2 * SEQUENCE * VOCABULARY
    assert region.saved_bytes / logits == pytest.approx(kept, rel=0.05)
    passes = replay(region, frozenset(region.program.saved_buffers()), run.gradient_rule)
    assert passes.forward_peak / logits == pytest.approx(highest, abs=0.3)


@pytest.mark.parametrize(("seq", "rows"), [(4096, 8192), (4224, 2112), (20480, 5120)])
def test_chunks_of_a_fused_loss_have_four_gib_of_fp32_logits(seq: int, rows: int) -> None:
    """All rows at once below that, else a multiple of four chunks: 8,372 rows are 4 GiB."""
    request = RunRequest(seq=seq, micro_batch=2, lora="r=16", like="unsloth")
    region = head_region(resolve(preset("llama3-8b"), request).run.signature)
    (step,) = [step for step in region.tape.steps if step.name == "fused_linear_cross_entropy"]
    assert step.outputs[-1].nbytes == 2 * rows * VOCABULARY * 2  # logits and their gradient
    assert step.workspace == 0
