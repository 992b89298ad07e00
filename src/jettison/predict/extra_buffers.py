"""Buffers of which a framework may hold copies beside the ledger's, as an anchor has found: see `predict.anchor`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from jettison.predict.forecast import Forecast, forecast
from jettison.spec.anchor import RunAnchor
from jettison.spec.recompute import NOTHING_AGAIN
from jettison.spec.run import Run


def extra_bytes(anchor: RunAnchor, run: Run) -> int:
    """Allocated bytes of a run beside its ledger's, on the worst rank: copies of a buffer that the anchor found."""
    if not anchor.copies:
        return 0
    return anchor.copies * dict(buffers(forecast(replace(run, recompute=NOTHING_AGAIN)))).get(anchor.buffer, 0)


def buffers(found: Forecast) -> Iterator[tuple[str, int]]:
    """Bytes of buffers of which a framework may hold copies beside the ledger's, by name, the likeliest first."""
    run, layout, model = found.run, found.run.layout, found.run.model
    tokens = run.micro_batch * run.seq // layout.cp
    if model.words:
        yield "logits in fp32", 4 * tokens * model.vocab // layout.tp
        yield "logits in bf16", 2 * tokens * model.vocab // layout.tp
    static = found.worst.static
    yield "parameters", static.parameters
    yield "gradients", static.gradients
    yield "residual stream in fp32", 4 * tokens * model.hidden // layout.tp
