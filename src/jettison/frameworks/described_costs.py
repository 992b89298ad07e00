"""Costs of a described run under one policy per layer, by the ledger, timeline and prices of its planner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jettison.core.objects import renamed
from jettison.cost.execution import execution_of
from jettison.cost.matmul import op_seconds
from jettison.frameworks.policy import Cost, Decision, LayerAction, LayerPolicy, Subject
from jettison.ledger.program import Op
from jettison.predict.forecast import Forecast, forecast
from jettison.predict.ranges import figures
from jettison.predict.stages import Chosen, KeptBuffers
from jettison.predict.time import estimate
from jettison.request.options import RunRequest
from jettison.search.auto_recompute import AutoForecast, layer_policies
from jettison.spec.recompute import Mode, Recompute
from jettison.spec.run import COMPILED_MODES, Run


def decisions_of(choice: AutoForecast) -> tuple[Decision, ...]:
    """Return the decisions of all layers, in the order of the model."""
    words = dict(layer_policies(choice))
    found = {}
    for stage in choice.forecast.stages:
        for part in (part for chunk in stage.parts for part in chunk if part.is_layer):
            found[part.name] = Decision(
                layer=part.name,
                policy=words[part.name],
                program=part.program,
                kept=part.kept,
                offloaded=frozenset() if part.chosen is None else part.chosen.offloaded,
                stage=stage.index,
                shared_bytes=0 if part.first else part.region.program.kept_bytes(part.kept),
                through=part.inner,
            )
    return tuple(found[name] for name in choice.forecast.run.model.layer_names)


class DescribedPricer:
    """Prices a described run; see `jettison.frameworks.policy.Pricer`."""

    def __init__(self, choice: AutoForecast) -> None:
        self.choice = choice
        self.run = replace(choice.forecast.run, recompute=Recompute(mode=Mode.AUTO))
        self.execution = execution_of(self.run)

    def plan(self) -> Cost:
        """Cost under the plan itself, by the same formulas."""
        choice, run = self.choice, self.choice.forecast.run
        parts = {part.name: part for part in choice.forecast.parts if part.is_layer}
        chosen = [parts[name].chosen for name in run.model.layer_names]
        again = [decision.program.ops[o] for decision in decisions_of(choice) for o in decision.again]
        return self._cost(run, choice.forecast, chosen, again, extra=0.0, host_bytes=choice.host_bytes)

    def cost(self, policies: Sequence[LayerPolicy], code: str = "") -> Cost:
        """Cost of one policy per layer; ``code`` is for modules."""
        chosen = [KeptBuffers(policy.kept, policy.offloaded) for policy in policies]
        again = [policy.program.ops[o] for policy in policies for o in policy.again]
        moves = any(policy.offloaded for policy in policies)
        run = replace(self.run, recompute=replace(self.run.recompute, offload=True)) if moves else self.run
        found = forecast(run, chosen)
        return self._cost(run, found, chosen, again, extra=self._beyond(policies), host_bytes=found.host_bytes)

    def without_overlap(self) -> DescribedPricer:
        """Return a pricer of copies to and from CPU memory that do not overlap with compute."""
        other = DescribedPricer(self.choice)
        other.execution = replace(self.execution, hides_offload=False)
        return other

    def last_of_chunks(self) -> frozenset[str]:
        """Layers whose backward follows their forward, so that offloaded tensors would be prefetched at once."""
        chunks = [[part.name for part in c if part.is_layer] for s in self.choice.forecast.stages for c in s.parts]
        return frozenset(names[-1] for names in chunks if names)

    def cost_of_mode(self, recompute: Recompute, policies: Sequence[LayerPolicy]) -> Cost:
        """Cost of a mode that one policy per layer cannot express: segments."""
        compiled = self.run.compiled and str(recompute.mode) in COMPILED_MODES
        run = replace(self.run, recompute=recompute, compiled=compiled)
        again = [policy.program.ops[o] for policy in policies for o in policy.again]
        return self._cost(run, forecast(run), None, again, extra=0.0, host_bytes=0)

    def _cost(
        self, run: Run, found: Forecast, chosen: Chosen | None, again: Sequence[Op], *, extra: float, host_bytes: int
    ) -> Cost:
        took = estimate(run, self.choice.hardware, execution=self.execution, chosen=chosen)
        rows = dict(found.layer_bytes())
        moved = {} if chosen is None else dict(zip(run.model.layer_names, chosen, strict=True))
        parts = {part.name: part for part in found.parts if part.is_layer}
        on_host = sum(
            parts[name].region.program.kept_bytes(kept_buffers.offloaded)
            for name, kept_buffers in moved.items()
            if kept_buffers is not None
        )
        return Cost(
            layer_bytes=sum(rows[name] for name in run.model.layer_names) - on_host,
            peak_bytes=found.peak_bytes,
            recompute_flops=sum(op.flops for op in again),
            recompute_seconds=sum(op_seconds(op, self.choice.hardware) for op in again),
            step_seconds=took.step_seconds + extra,
            host_bytes=host_bytes,
        )

    def _beyond(self, policies: Sequence[LayerPolicy]) -> float:
        """Seconds of a step for recomputed ops whose results nothing needs, on the stage with most of them."""
        by_stage: dict[int, float] = {}
        for policy in policies:
            if policy.action is LayerAction.KEEP:
                continue
            least = set(policy.program.recompute_set(policy.kept))
            more = (policy.program.ops[o] for o in policy.again if o not in least)
            stage = policy.decision.stage
            seconds = sum(op_seconds(op, self.choice.hardware) for op in more)
            by_stage[stage] = by_stage.get(stage, 0.0) + seconds
        return max(by_stage.values(), default=0.0) * self.run.micro_batches


def subject_of(choice: AutoForecast, document: dict[str, object], model: str) -> Subject:
    """Make the subject of an export from a described plan."""
    made_by = document.get("made_by")
    predicted = document.get("predicted")
    run, peak_bytes = choice.forecast.run, choice.forecast.peak_bytes
    expected = figures(run, peak_bytes, hardware=choice.hardware.name, step_seconds=choice.step_seconds).step_seconds
    return Subject(
        model=model,
        plan_hash=str(document["hash"]),
        budget_bytes=choice.budget_bytes,
        minimum_budget_bytes=choice.minimum_budget_bytes,
        decisions=decisions_of(choice),
        hardware=choice.hardware,
        segments=choice.segments,
        described=choice,
        predicted=predicted if isinstance(predicted, dict) else {},
        asked=renamed(RunRequest, made_by) if isinstance(made_by, dict) else {},
        expected_ratio=1.0 if expected is None else expected.expected / choice.step_seconds,
    )
