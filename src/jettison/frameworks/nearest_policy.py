"""Nearest policy to a plan that a target can express: the fastest that fits the plan's budget. And refusals.

Costs of a described run under one policy per layer are those of its planner's ledger, timeline and prices.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from jettison.core.errors import DoesNotFit, UsageError
from jettison.core.objects import OnDemand, renamed
from jettison.cost.execution import execution_of
from jettison.cost.kernel import op_seconds
from jettison.frameworks.layer_policies import (
    Cost,
    Decision,
    LayerAction,
    LayerPolicy,
    Pricer,
    Subject,
    by_ops_and_host,
    checkpointed,
    checkpointed_on_host,
    kept_whole,
)
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
    """Prices a described run; see `jettison.frameworks.layer_policies.Pricer`."""

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
        overhead_fraction=choice.overhead_fraction,
        asked=renamed(RunRequest, made_by) if isinstance(made_by, dict) else {},
        expected_ratio=1.0 if expected is None else expected.expected / choice.step_seconds,
    )


Policies = tuple[LayerPolicy, ...]
Priced = tuple[Policies, Cost]
Checkpoint = Callable[[Decision], LayerPolicy]
"""Policy of a layer that is a checkpoint."""


class CannotSay(UsageError):
    """A target cannot express the plan, or the model that it was made for."""


@dataclass(frozen=True, kw_only=True)
class Nearest:
    """Chooses for one plan and one target.

    Args:
        could: policies that the target can express, for messages.
        write: turns policies into Python that defines ``apply(model)``.

    Each choice raises:
        DoesNotFit: no policy that it tries fits the plan's budget.
    """

    subject: Subject
    pricer: Pricer
    target: str
    could: str = ""
    write: Callable[[Policies], str] = lambda _policies: ""

    def saying(self, could: str, write: Callable[[Policies], str] | None = None) -> Nearest:
        """Return a copy for a target that can express these policies."""
        return replace(self, could=could, write=write or self.write)

    def priced(self, policies: Policies) -> Priced:
        """Return the policies with the cost of a step under them."""
        return policies, self.pricer.cost(policies, self.write(policies))

    def fits(self, found: Priced) -> bool:
        """Whether the step fits the plan's budget."""
        return found[1].peak_bytes <= self.subject.budget_bytes

    def all_or_none(self, checkpoint: Checkpoint = checkpointed) -> Priced:
        """Checkpoint no layer if that fits, else every one."""
        decisions = self.subject.decisions
        plain = self.priced(tuple(map(kept_whole, decisions)))
        return plain if self.fits(plain) else self._fitting(self.priced(tuple(map(checkpoint, decisions))))

    def checkpoints(self, checkpoint: Checkpoint = checkpointed) -> Priced:
        """Checkpoint entire layers: the plan's own if it has no others, else as few as fit its budget.

        Of layers that free equally many bytes the first ones are chosen: they are recomputed last, when later layers
        have freed their tensors.
        """
        decisions = self.subject.decisions
        if self.subject.whole_layers:
            asked = self.priced(tuple(kept_whole(d) if d.plain else checkpoint(d) for d in decisions))
            if self.fits(asked):
                return asked
        freed = [kept_whole(d).kept_bytes - checkpointed(d).kept_bytes for d in decisions]
        order = sorted(range(len(decisions)), key=lambda i: (-freed[i], i))

        def made(count: int) -> Policies:
            chosen = set(order[:count])
            return tuple(checkpoint(d) if i in chosen else kept_whole(d) for i, d in enumerate(decisions))

        return self.least(made, len(order))

    def with_host(self, choose: Callable[[Nearest, Checkpoint], Priced]) -> Priced:
        """Choose checkpoints, with inputs offloaded to CPU if that is faster, or the only way to fit.

        Only for plans that offload. A described plan's copies are priced without overlap; a live plan's inputs are
        offloaded only if nothing else fits.
        """
        pricer, limit = self.pricer, None
        tries: list[tuple[Nearest, Checkpoint]] = [(self, checkpointed)]
        if self.subject.moves and isinstance(pricer, DescribedPricer):
            stay, limit = pricer.last_of_chunks(), pricer.choice.host_budget_bytes
            alone = replace(self, pricer=pricer.without_overlap())
            tries.append((alone, lambda d: checkpointed(d) if d.layer in stay else checkpointed_on_host(d)))
        elif self.subject.moves and self.subject.live:
            tries.append((self, checkpointed_on_host))
        found, problem = [], None
        for nearest, checkpoint in tries:
            try:
                found.append(choose(nearest, checkpoint))
            except DoesNotFit as error:
                problem = error
            if found and self.subject.live:
                break
        allowed = [one for one in found if limit is None or one[1].host_bytes <= limit]
        if not allowed:
            assert problem is not None  # without offloading everything is allowed
            raise problem
        return min(allowed, key=lambda one: (one[1].step_seconds or 0.0, one[1].host_bytes))

    def with_moves(self, checkpoint: Checkpoint, partly: Checkpoint) -> Priced:
        """Checkpoint entire layers, and offload what a live plan offloads of layers without recomputation.

        Args:
            partly: policy of a layer that the plan recomputes in part.
        """

        def wish(decision: Decision) -> LayerPolicy:
            if decision.plain or decision.only_moves:
                return by_ops_and_host(decision)
            return checkpoint(decision) if decision.whole else partly(decision)

        decisions = self.subject.decisions
        said = all(decision.plain or decision.whole or decision.only_moves for decision in decisions)
        return self.between(tuple(map(wish, decisions)), as_it_stands=said, checkpoint=checkpoint)

    def between(self, wished: Policies, *, as_it_stands: bool, checkpoint: Checkpoint = checkpointed) -> Priced:
        """Apply the wished policies; above the budget, checkpoint the fewest first layers that make it fit.

        Args:
            as_it_stands: if false and the wish leaves room, as many last layers as fit keep everything.
        """
        depth = len(wished)
        levels = [
            [kept_whole(policy.decision) for policy in wished],
            wished,
            [checkpoint(policy.decision) for policy in wished],
        ]

        def made(count: int) -> Policies:
            return tuple(levels[(i < count) + (i + depth < count)][i] for i in range(depth))

        if as_it_stands:
            return self.least(lambda count: made(depth + count), depth)
        return self.least(made, 2 * depth)

    def least(self, made: Callable[[int], Policies], most: int) -> Priced:
        """Return the first of ``made(0) .. made(most)`` that fits; later ones need fewer bytes."""
        tried = OnDemand[int, Priced](lambda count: self.priced(made(count)))
        if self.fits(tried[0]):
            return tried[0]
        self._fitting(tried[most])
        return tried[1 + bisect_left(range(1, most), True, key=lambda count: self.fits(tried[count]))]

    def _fitting(self, found: Priced) -> Priced:
        if not self.fits(found):
            raise self.too_much(found[1].peak_bytes)
        return found

    def too_much(self, peak_bytes: int) -> DoesNotFit:
        """Return the error for a target without a policy within the plan's budget."""
        return DoesNotFit(
            peak_bytes=peak_bytes,
            limit_bytes=self.subject.budget_bytes,
            limit_name="the plan's budget",
            advice=f"{self.target} can express {self.could}, and the plan needs more. "
            f"Plan with --budget {peak_bytes}B or more",
        )

    def refuse_described(self) -> None:
        """Refuse the plan of a described run, which names no modules, by a `CannotSay`."""
        if not self.subject.live:
            raise CannotSay(
                f"{self.target} wraps modules by name, and this plan of a described run names none; plan the "
                "config.json without a layout, or module:factory, and export that"
            )

    def refuse_stacks(self, *, in_order: bool = False) -> None:
        """Refuse a described plan whose layers are not one list, if the target numbers them in one. Raise `CannotSay`
        if the model has two stacks.

        Args:
            in_order: the target numbers layers of several lists in the order of modules: an encoder's before a
                decoder's, but a text tower before an image tower, contrary to a description.
        """
        model = None if self.subject.described is None else self.subject.described.forecast.run.model
        if model is not None and model.two_stacks and not (in_order and model.source is not None):
            raise CannotSay(
                f"{self.target} numbers layers in one list, and {self.subject.model} is {model.two_stacks}; plan the "
                "config.json without a layout, and export that, which names them"
            )

    def refuse_images(self) -> None:
        """Refuse a described plan of a model without tokens, by a `CannotSay`."""
        if self.subject.described is not None and not self.subject.described.forecast.run.model.words:
            raise CannotSay(
                f"{self.target} is for language models, and {self.subject.model} reads no tokens; export --to "
                "transformers"
            )
