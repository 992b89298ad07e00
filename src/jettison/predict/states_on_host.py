"""What a stage has on the host for its optimizer, and what a step moves for it. See NOTE [ States on the host ]."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jettison.core.dtypes import DTYPE_BYTES
from jettison.formula.static import Static
from jettison.predict.stages import Chunk
from jettison.spec.run import Run
from jettison.spec.states_on_host import element_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class HostStates:
    """On one rank: bytes on the host, and bytes of a step over the link.

    Args:
        gathered_bytes: of those to the device, parameters on their way to be gathered.
    """

    host_bytes: int
    to_host_bytes: int
    to_device_bytes: int
    gathered_bytes: int = 0


def host_states(run: Run, total: Static) -> HostStates:
    """Of a stage.

    Args:
        total: of its regions.
    """
    rule, precision = run.states_on_host, run.precision
    each = element_bytes(
        rule,
        zero=run.layout.zero,
        micro_batches=run.micro_batches,
        parameter=DTYPE_BYTES[precision.parameter],
        gradient=DTYPE_BYTES[precision.gradient],
    )
    paged = 0 if rule.steps_there else total.host_state
    times, elements = run.micro_batches, total.host_elements
    gathered = times * (1 + run.layout.resharded) * total.host_parameters
    return HostStates(
        host_bytes=total.host_state + elements * each.host + total.host_parameters,
        to_host_bytes=paged + elements * (times * each.sent_each + each.sent),
        to_device_bytes=paged + elements * (times * each.fetched_each + each.fetched) + gathered,
        gathered_bytes=gathered,
    )


def device_buffer(run: Run, chunks: Sequence[Chunk]) -> int:
    """What the rule keeps on the device for it: a gradient of the largest parameter."""
    if not run.states_on_host.keeps_buffer or run.layout.zero == 3:
        return 0
    weights = (w for chunk in chunks for group in chunk for w in group.part.region.weights if not w.frozen)
    return max((w.numel for w in weights), default=0) * DTYPE_BYTES[run.precision.compute]
