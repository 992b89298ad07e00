"""What a run asks for that does nothing, or costs more than it seems to: one sentence each, with what to do instead."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from jettison.predict.forecast import Forecast, forecast_sizes
from jettison.predict.run_request import Resolved, flag_of
from jettison.spec.kernels import AttentionKernel
from jettison.spec.recompute import Mode
from jettison.spec.run import Run
from jettison.units import format_bytes


def advice(asked: Resolved) -> tuple[str, ...]:
    """Remarks about a run, the weightiest first; empty where there are none."""
    run = asked.run
    found = [*run.model.left_out, *_recompute(run), *_tensor_parallel(run)]
    layout, model = run.layout, run.model
    if run.seq > model.max_positions:
        found.append(f"--seq {run.seq} is more than the {model.max_positions} positions that {model.name} is made for")
    if layout.zero and layout.shards == 1 and not run.gathers_parameters:
        found.append(f"--zero {layout.zero} shards nothing: there is one data-parallel rank; give --dp")
    return (*found, *_idle(asked))


_ALONE: Final = {
    "without a pipeline; give --pp": ("schedule", "keep_stage_outputs", "keep_received", "stage_buffers"),
    "where nothing is sharded; give --zero": ("zero_replicas",),
    "without context parallelism; give --cp": ("context_exchange",),
}
"""Flags that need another one, by what is said."""
_OF_EXPERTS: Final = (
    "capacity_factor",
    "dispatcher",
    "expert_tp",
    "sequential_experts",
    "deterministic",
    "ep_comm_overlap",
)


def _idle(asked: Resolved) -> Iterator[str]:
    """What was typed and has no effect on this model or layout."""
    run, layout = asked.run, asked.run.layout
    lacking = dict(zip(_ALONE, (layout.pp == 1, layout.zero == 0, layout.cp == 1), strict=True))
    for why, names in _ALONE.items():
        yield from (f"{flag_of(name)} does nothing {why}" for name in _typed(asked, names) if lacking[why])
    if not any(layer.experts for layer in run.model.kinds):
        idle = _typed(asked, _OF_EXPERTS)
        yield from (f"{flag_of(name)} does nothing: {run.model.name} has no experts" for name in idle)


def _typed(asked: Resolved, names: tuple[str, ...]) -> Iterator[str]:
    return (name for name in names if name not in asked.assumed)


UNEVEN: Final = 1.25
"""Times an even share: what is said beside the even figure. A choice, to show how much depends on it; not measured."""


def routing(found: Forecast) -> Iterator[str]:
    """What ranks that share experts hold is a range: how tokens are spread over them is not known beforehand."""
    run = found.run
    ranks = run.layout.ep
    if ranks == 1 or run.imbalance > 1 or run.capacity_factor is not None:
        return
    uneven = min(UNEVEN, float(ranks))
    peak = forecast_sizes(replace(run, imbalance=uneven)).peak_bytes
    yield (
        f"tokens are taken to be spread evenly over the ranks of --ep; one that is sent {uneven:g} times its share "
        f"peaks at {format_bytes(peak)}, not {format_bytes(found.peak_bytes)} (--expert-imbalance {uneven:g})"
    )


def _recompute(run: Run) -> Iterator[str]:
    if run.recompute.mode is Mode.SELECTIVE and run.kernels.attention is AttentionKernel.FLASH:
        yield (
            "selective recomputation drops attention scores, which flash attention never stores: it saves nothing "
            "here. Use --recompute selective-op, every:K or full"
        )


def _tensor_parallel(run: Run) -> Iterator[str]:
    layout = run.layout
    if layout.tp > 1 and not layout.sp and run.model.words:
        yield (
            f"without sequence parallelism all {layout.tp} tensor-parallel ranks hold what stands between the "
            "products whole (norms, dropouts, residuals); --sp shards it"
        )
    if layout.tp == 1 and layout.sp:
        yield "--sp does nothing without tensor parallelism; give --tp"
    if layout.tp == 1 and run.tp_comm_overlap:
        yield "--tp-comm-overlap does nothing without tensor parallelism; give --tp"
    if layout.gathered_inputs and layout.tp > 1 and layout.sp:
        yield (
            f"--gathered-inputs: each rank holds the whole input of its column-parallel products, {layout.tp} times "
            "the shard that Megatron keeps and gathers again"
        )
    elif layout.gathered_inputs:
        yield "--gathered-inputs does nothing without sequence parallelism"
