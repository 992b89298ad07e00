"""A layer whose experts are a group of FSDP2's within its own.

NOTE [ Experts within a layer ]
Experts that are spread over ranks are sharded over fewer ranks than the rest of their layer, and a group has one mesh:
so they are a group of their own, within the layer's (torchtitan, ``apply_fsdp``: ``fully_shard`` of
``transformer_block.moe.experts`` over the mesh "efsdp"). As NOTE [ What FSDP2 holds ] in `predict.gathered` has it of
one group after the other: in backward the layer's own weights come first, with what was gathered for its experts; when
gradients reach the experts, the group before is gathered, without its experts. Behind the experts' backward their
weights are freed, and the buffer of the layer behind, which has no experts' gradients: those went before. Their
gradients are copied and reduced beside what the layer before its experts still holds, and their buffer stays until the
layer's own is filled. Of one rank nothing travels: no buffer is gathered, and the mean is another tensor
(``reduce_scatter_input / gradient_divide_factor`` of ``foreach_reduce``), as gloo's copy is among several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from jettison.core.dtypes import DTYPE_BYTES
from jettison.formula.liveness import Backward, begin
from jettison.formula.region import Region
from jettison.formula.static import Static, static
from jettison.predict.passes import named_frames
from jettison.predict.stages import StageRegion, kept_by
from jettison.spec.kernels import Device
from jettison.spec.precision import GradientRule
from jettison.spec.run import Run

EXPERTS = "mlp.experts"
NOTHING = Static()


@dataclass(frozen=True, kw_only=True, slots=True)
class Phases:
    """Peaks of a layer's backward: until gradients reach its experts, within them, behind them; and how high it is when
    they are done, with their gradients.
    """

    until: int
    within: int
    behind: int
    done: int


def own_experts(run: Run, part: StageRegion | None) -> Static:
    """What the group of a layer's experts has; nothing where there is none."""
    layout = run.layout
    if part is None or layout.ep == 1 or layout.shards == 1 or layout.zero < 3 or layout.keeps_whole_gradients:
        return NOTHING
    found = [weight for weight in part.region.weights if weight.expert]
    return static(found, precision=run.precision, optimizer=run.optimizer, layout=layout, in_layer=part.is_layer)


def phases_of(part: StageRegion, rule: GradientRule) -> Phases:
    """Of a layer as it is treated."""
    if part.held:
        return _phases(part.region, part.kept, rule, (), part.held)
    if part.chosen is None:
        kept, frames = kept_by(part.region, part.policy), tuple(named_frames(part.region, part.policy))
        return _phases(part.region, kept, rule, frames, frozenset())
    return _phases(part.region, part.chosen.buffers, rule, (), frozenset())


@lru_cache(maxsize=4096)
def _phases(
    region: Region, kept: frozenset[int], rule: GradientRule, frames: Sequence[frozenset[int]], held: frozenset[int]
) -> Phases:
    return begin(
        _Phased, region, kept, frozenset(region.program.recompute_set(kept)), rule, frames=frames, held=held
    ).phases()


class _Phased(Backward):
    def phases(self) -> Phases:
        """Play it through."""
        output, steps = self.region.output, self.region.tape.steps
        own = [number for number, step in enumerate(steps) if step.path.startswith(EXPERTS)]
        self._give(output.storage, output.nbytes)
        until = within = done = 0
        for number in reversed(range(len(steps))):
            if number == own[-1]:
                until, self.peak = self.peak, self.live
            if self._runs(steps[number]):
                self._visit(steps[number])
            for b in self.leaving.get(number, ()):
                self._release(b)
            if number == own[0]:
                within, done, self.peak = self.peak, self.live, self.live
        return Phases(until=until, within=within, behind=self.peak, done=done)


def rise_of_experts(
    run: Run, part: StageRegion, own: Static, phases: Phases, *, there: int, ahead: int, waiting: int
) -> int:
    """How high a layer's backward rises, its own group's reduction aside.

    Args:
        own: of its experts.
        there: whole weights of the layer that are not among residents.
        ahead: of the group before; ``waiting``: the buffer of the layer behind.
    """
    precision = run.precision
    gradients = own.reduced // DTYPE_BYTES[precision.gradient] * DTYPE_BYTES[precision.compute]
    out = own.gradients  # shards, as many as all where one rank has them
    copied = own.reduced if run.kernels.device is Device.CPU or run.layout.expert_shards == 1 else 0
    done = phases.done + there - own.gathered + ahead
    return max(
        phases.until + there + waiting,
        phases.within + there + ahead + waiting,
        done + own.reduced,
        done - gradients + own.reduced + out + copied,
        phases.behind - gradients + out + there - own.gathered + ahead + own.reduced,
    )


def least_beside_experts(run: Run, own: Static, *, there: int, ahead: int, waiting: int) -> int:
    """What there is in each phase of `rise_of_experts` beside what the layer's ops have, at least."""
    precision = run.precision
    gradients = own.reduced // DTYPE_BYTES[precision.gradient] * DTYPE_BYTES[precision.compute]
    behind = own.reduced + own.gradients - gradients - own.gathered
    return there + min(waiting, ahead + waiting, ahead + behind)
