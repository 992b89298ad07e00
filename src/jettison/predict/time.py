"""Step time of a run: seconds of each pipeline stage, the replay of the schedule, and a breakdown.

NOTE [ A step ]
`cost.layer` has the seconds of regions; a chunk of a stage is the sum of its regions, of which equal ones are computed
once. A micro-batch also has ZeRO 3's all-gather before each region and the reduction of its gradients after it, which
overlap with neighbouring regions; offloading, which overlaps with the next region; and sending to the next stage.
`cost.pipeline` replays the schedule. The rest of the reduction of gradients after the last backward is exposed, then
the optimizer steps. Ranks of a stage are equal, and nothing else uses the network.

The breakdown is of the busiest stage. Its parts sum to the step: `compute`, the kernels of forwards and backwards;
`communication` that is exposed, or slows compute that it overlaps with; `bubble`, waiting for other stages;
`recompute`, all recomputed ops; `other`, the optimizer, and launch-bound kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from reprlib import repr as short

from jettison.core.errors import UsageError
from jettison.core.objects import summary
from jettison.core.units import format_seconds
from jettison.cost.execution import Execution, execution_of
from jettison.cost.flops import Counting, model_flops, tokens, utilisation
from jettison.cost.layer import RegionSeconds
from jettison.cost.matmul import rate
from jettison.cost.pipeline import Replay, schedule_seconds
from jettison.cost.region_in_step import Item
from jettison.predict.stage_time import StageSeconds, Timing
from jettison.predict.stages import Chosen, Chunk, outline, pipeline_shape
from jettison.spec.hardware import Hardware
from jettison.spec.run import Run, anchored, expect_run


@dataclass(frozen=True, kw_only=True, slots=True)
class Breakdown:
    """Seconds of a step by part: NOTE [ A step ]."""

    compute: float
    communication: float
    bubble: float
    recompute: float
    other: float

    @property
    def seconds(self) -> float:
        """Sum of all parts: the step time."""
        return self.compute + self.communication + self.bubble + self.recompute + self.other


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Step time of a run on given hardware.

    Args:
        lagged: the part of the replay's makespan that is due to overlapped transfers between stages.
        recomputed_flops: of a step, on all ranks.
    """

    run: Run
    hardware: Hardware
    execution: Execution
    stages: tuple[StageSeconds, ...]
    replay: Replay
    lagged: float
    step_seconds: float
    recomputed_flops: float

    def __repr__(self) -> str:
        return summary(
            self, f"{self.run.model.name} on {self.hardware.name}, {format_seconds(self.step_seconds)} a step"
        )

    @property
    def busiest(self) -> int:
        """Index of the stage with the longest work; the first of equals."""
        return max(range(len(self.stages)), key=lambda index: self.replay.busy[index])

    @cached_property
    def breakdown(self) -> Breakdown:
        """Breakdown of the busiest stage's time."""
        stage, times = self.stages[self.busiest], self.run.micro_batches
        total = stage.total
        parts = (total.forward, total.inputs, total.weights)
        moved = sum(part.transfers for part in parts) + sum(a + b for a, b in stage.sent)
        optimizer = max(stage.optimizer for stage in self.stages)
        ended = self.step_seconds - optimizer - self.replay.makespan
        return Breakdown(
            compute=times * sum(part.compute for part in parts),
            communication=max(0.0, times * moved + self.lagged + ended),  # a difference of sums: no -1e-16
            bubble=max(0.0, self.replay.makespan - self.replay.busy[self.busiest] - self.lagged),
            recompute=times * sum(part.seconds for part in stage.again),
            other=times * sum(part.dispatch for part in parts) + optimizer,
        )

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Throughput of one device."""
        return tokens(self.run) / self.step_seconds / self.run.layout.world

    @property
    def peak_flops_per_second(self) -> int:
        """Peak of one device for the dtype of activations."""
        return rate(self.hardware, self.run.precision.compute)

    def model_flops(self, counting: Counting = Counting.LEDGER) -> float:
        """Model FLOPs of a step on all ranks."""
        return model_flops(self.run, counting)

    @property
    def hardware_flops(self) -> float:
        """Hardware FLOPs of a step: model FLOPs and recomputation."""
        return self.model_flops() + self.recomputed_flops

    def mfu_by(self, counting: Counting) -> float:
        """MFU under another convention of model FLOPs."""
        return self._utilization(self.model_flops(counting))

    @property
    def mfu(self) -> float:
        """MFU with the ledger's model FLOPs, attention in full: arXiv 2205.05198 Appendix A."""
        return self.mfu_by(Counting.LEDGER)

    @property
    def hfu(self) -> float:
        """HFU: utilization with recomputation."""
        return self._utilization(self.hardware_flops)

    def _utilization(self, flops: float) -> float:
        world, peak = self.run.layout.world, self.peak_flops_per_second
        return utilisation(flops, seconds=self.step_seconds, devices=world, peak_flops_per_second=peak)


def estimate(
    run: Run,
    hardware: Hardware,
    *,
    execution: Execution | None = None,
    chosen: Chosen | None = None,
    outlined: Sequence[tuple[Chunk, ...]] | None = None,
) -> Estimate:
    """Estimate the step time of a run.

    Args:
        execution: execution model; default: that of the run's kernels, compiled if its layers are.
        chosen: a planner's kept buffers of each layer; None: the run's recompute mode decides.
        outlined: the run's `outline`, if known.

    Raises:
        UsageError: not a run or hardware; a figure missing in the hardware's file, or a layout that does not divide.
    """
    expect_run(run)
    if not isinstance(hardware, Hardware):
        raise UsageError(f"got {short(hardware)}; expected hardware, such as jettison.hardware('h100-80gb')")
    how = execution or execution_of(run)
    _, hardware = anchored(run, hardware)
    given = run
    # without a plan layers are priced as they are written, with the kernels that a compiler makes
    run = replace(run, compiled=run.compiled and chosen is not None)
    timing = Timing(run=run, hardware=hardware, execution=how, planned=chosen is not None)
    layout = run.layout
    items: dict[int, list[Item]] = {}
    passes: dict[object, RegionSeconds] = {}
    known: dict[object, StageSeconds] = {}
    stages = []
    for index, chunks in enumerate(outline(run, chosen) if outlined is None else outlined):
        share, own = recomputing(run, index), tuple(map(id, chunks))
        items |= {at: timing.items(chunk) for at, chunk in zip(own, chunks, strict=True) if at not in items}
        key = own, share, layout.neighbours(index)
        if key not in known:
            known[key] = timing.stage(index, [items[at] for at in own], share, passes)
        stages.append(known[key])
    played, lagged = _play(run, stages, timing)
    over = max(end + stage.end for end, stage in zip(played.ends, stages, strict=True))
    again = sum(stage.recomputed_flops for stage in stages)
    return Estimate(
        run=given,
        hardware=hardware,
        execution=timing.execution,
        stages=tuple(stages),
        replay=played,
        lagged=lagged,
        step_seconds=over + max(stage.optimizer for stage in stages),
        recomputed_flops=again * run.micro_batches * layout.tp * layout.cp * layout.dp,
    )


def recomputing(run: Run, stage: int) -> float:
    """Share of a stage's micro-batches that recompute."""
    whole = run.recompute.whole
    if not whole:
        return 1.0
    return pipeline_shape(run).recomputing_share(stage, whole)


def works(run: Run, stages: Sequence[StageSeconds]) -> list[list[list[float]]]:
    """Seconds of forwards and backwards or, where these are split, of gradients of inputs and of weights, by stage and
    chunk.
    """
    split = run.layout.schedule.splits and run.layout.pp > 1
    kinds = ("forward", "inputs", "weights") if split else ("forward", "backward")
    return [[getattr(stage, kind) for stage in stages] for kind in kinds]


def _play(run: Run, stages: Sequence[StageSeconds], timing: Timing) -> tuple[Replay, float]:
    """Replay of the schedule, and the part of its makespan due to overlapped transfers between stages."""
    if run.layout.pp == 1:
        alone = run.micro_batches * (sum(stages[0].forward) + sum(stages[0].backward))
        return Replay(busy=(alone,), ends=(alone,)), 0.0
    shape, seconds = pipeline_shape(run), works(run, stages)
    lag = timing.sending() if timing.execution.hides_stages else 0.0
    played = schedule_seconds(shape, *seconds, transfer=lag)
    return played, played.makespan - schedule_seconds(shape, *seconds).makespan if lag else 0.0
