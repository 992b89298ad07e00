"""Copies of buffers that a framework allocates and the ledger does not count, found by an anchor: `predict.anchor`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from jettison.predict.forecast import Forecast, forecast
from jettison.spec.anchor import BUFFERS, RunAnchor
from jettison.spec.recompute import NOTHING_AGAIN
from jettison.spec.run import Run


def extra_bytes(anchor: RunAnchor, run: Run) -> int:
    """Bytes of the copies of a buffer that the anchor found, on the worst rank."""
    if not anchor.copies:
        return 0
    return anchor.copies * dict(buffers(forecast(replace(run, recompute=NOTHING_AGAIN)))).get(anchor.buffer, 0)


def buffers(found: Forecast) -> Iterator[tuple[str, int]]:
    """Names and bytes of buffers that a framework may copy, most likely first."""
    run, layout, model = found.run, found.run.layout, found.run.model
    tokens = run.micro_batch * run.seq // layout.cp
    logits = tokens * model.vocab // layout.tp if model.words else 0
    static, stream = found.worst.static, tokens * model.hidden // layout.tp
    yield from zip(BUFFERS, (4 * logits, 2 * logits, static.parameters, static.gradients, 4 * stream), strict=True)
