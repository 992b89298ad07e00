"""From a trace and a budget to a plan whose step was run on fake tensors.

The solver adds up levels that were found block by block; a dry run of the whole step is the judge (`solve.refine`).
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from jettison.capture.model_trace import BlockClass, ModelTrace
from jettison.core.errors import Infeasible
from jettison.core.progress import Progress, silent
from jettison.dryrun.around_blocks import around_stubs
from jettison.dryrun.composed import Book, Label, Labels
from jettison.dryrun.op_costs import Pricing
from jettison.dryrun.step import DryStep, ModulePolicy, OneBatch, StepPeaks
from jettison.dryrun.tape import Tape
from jettison.ledger.program import Program
from jettison.planner.host import SEND, Host, is_timed, less_on_host
from jettison.planner.options import Options, options_of, step_of
from jettison.planner.plan_tensors import plan_tensors
from jettison.planner.points import PACK, exactly, policy_kept, policy_of
from jettison.solve.chain import Solution, choose
from jettison.solve.frontier import FrontierPoint
from jettison.solve.levels import Choice
from jettison.solve.moves import Walk, least_of, minimum_budget, walks
from jettison.solve.plan import (
    LayerPlan,
    Plan,
    PlanTensor,
    PolicyWord,
    Predicted,
    SolverReport,
    policy_word,
    recompute_flops,
)
from jettison.solve.policy import CheckpointPolicy, Full, KeepAll
from jettison.solve.problem import RegionOption, RootOption, StepProblem
from jettison.solve.refine import fastest, refine
from jettison.solve.transients import is_lean
from jettison.spec.hardware import Hardware

UNSEEN_BYTES = 256  # Python numbers that C++ wraps into tensors live for an op, out of any dispatch mode's sight

Option = TypeVar("Option", RegionOption, RootOption)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One choice, as policies, and what its dry run gave."""

    solution: Solution
    part: ModulePolicy
    step: StepPeaks

    @property
    def needs(self) -> int:
        """The smallest budget that it is sure to fit."""
        return self.step.peak_bytes + UNSEEN_BYTES

    @property
    def level(self) -> int:
        """Its peak as the solver has it."""
        return self.solution.levels.peak_bytes

    @property
    def added_seconds(self) -> float:
        """That a step takes longer."""
        return self.solution.certificate.objective_seconds


def make_planner(
    trace: ModelTrace,
    *,
    measure: bool = True,
    hardware: Hardware | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    dry_step: DryStep | None = None,
    host: Host | None = None,
    composes: bool = False,
    progress: Progress = silent,
) -> Planner:
    """Learn everything about one step that a plan needs. Takes seconds.

    Args:
        measure: price ops by running them; else by FLOPs and bytes.
        hardware: whose rates these are divided by; left out, `usual_hardware`'s.
        optimizer: over the fake copy's parameters.
        dry_step: the step as the loop has it, over one module like the trace's fake copy, in its mode; where left
            out, one batch through the fake copy, and ``optimizer``.
        host: where tensors may wait; None: nowhere.
        composes: many budgets will be asked for: steps are put together from what was seen of others.
    """
    pricing = Pricing(run=measure)
    step = dry_step or OneBatch(trace=trace, optimizer=optimizer)
    judge = Judge.of(trace, step, pricing, composes=composes, offloads=host is not None)
    options = options_of(
        trace,
        pricing,
        hardware=hardware,
        optimizer=optimizer,
        dry_step=dry_step,
        host=host,
        run=judge.whole,
        progress=progress,
    )
    judge.offer({key: _offered(trace.classes[key], points) for key, points in options.points.items()})
    say_what_was_bounded(trace, pricing)
    return Planner(trace=trace, options=options, judge=judge, host=host, progress=progress)


def _offered(cls: BlockClass, points: Mapping[str, FrontierPoint]) -> list[CheckpointPolicy]:
    """What a block of this class may be asked to do, from the most bytes down; what is packed is asked for least."""
    found = sorted(points.values(), key=lambda p: (bool(p.narrowed), -p.kept_bytes))
    return [policy_of(cls, point) for point in found]


def say_what_was_bounded(trace: ModelTrace, pricing: Pricing) -> None:
    """Warn of ops that could not be priced by running them."""
    for name, problem in sorted(pricing.problems().items()):
        text = (
            f"{name} could not be run by itself ({problem}): its time is an estimate, and what its kernel "
            "allocates inside is taken to be as much as all that it reads and writes"
        )
        if text not in trace.warnings:
            trace.warnings.append(text)


@dataclass(frozen=True, kw_only=True)
class Planner:
    """Everything that is known about one step: made once by `make_planner`, asked for as many budgets as wanted."""

    trace: ModelTrace
    options: Options
    judge: Judge
    host: Host | None = None
    progress: Progress = silent
    _candidates: dict[Any, Candidate] = field(default_factory=dict, init=False)
    _answers: list[Candidate] = field(default_factory=list, init=False)  # for budgets so far

    @property
    def problem(self) -> StepProblem:
        """What the solver is given."""
        return self.options.problem

    @functools.cached_property
    def tensors(self) -> tuple[PlanTensor, ...]:
        """What there is to decide about, in words."""
        return plan_tensors(self.trace)

    @property
    def baseline(self) -> StepPeaks:
        """The step without a plan."""
        return self.options.baseline

    def candidate(self, solution: Solution) -> Candidate:
        """Run a choice on fake tensors; every choice once."""
        choice = solution.choice
        known = self._candidates.get(choice)
        if known is None:
            part = self.part(choice)
            step = self.judge.step(part)
            known = self._candidates[choice] = Candidate(solution=solution, part=part, step=step)
        return known

    def part(self, choice: Choice) -> ModulePolicy:
        """A choice as policies."""
        policies, root = self._policies(choice)
        opaque = {
            c.name: next(o for o in r.options if o.key == key)
            for c, r, key in zip(self.trace.calls, self.options.problem.regions, choice.regions, strict=True)
            if self.trace.classes[c.class_key].stood_in
        }
        segments = [[c.name for c in self.trace.calls[a:b]] for a, b in choice.segments]
        return ModulePolicy(trace=self.trace, policies=policies, root=root, segments=segments, opaque=opaque)

    def _policies(self, choice: Choice) -> tuple[dict[str, CheckpointPolicy], CheckpointPolicy]:
        chosen: dict[str, tuple[BlockClass, FrontierPoint]] = {}
        for call, key in zip(self.trace.calls, choice.regions, strict=True):
            point = self._point(call.class_key, key, self.trace.program(call))
            if call.name not in chosen or point.kept_bytes < chosen[call.name][1].kept_bytes:
                chosen[call.name] = self.trace.classes[call.class_key], point
        policies = {name: policy_of(cls, point) for name, (cls, point) in chosen.items()}
        return policies, exactly(self.trace.root.program, self.options.root_points[choice.root].kept)

    def _point(self, class_key: str, key: str, program: Program) -> FrontierPoint:
        if key != "segment":
            return self.options.points[class_key][key]
        kept = Full().kept(program)
        return FrontierPoint(key=key, kept=kept, kept_bytes=program.kept_bytes(kept), seconds=0.0, price=0.0)

    @functools.cached_property
    def smallest(self) -> Candidate:
        """The plan of the fewest bytes."""
        return min(self._least(self.options.problem), self._least_untimed, key=lambda one: one.needs)

    def _least(self, problem: StepProblem) -> Candidate:
        """Of the fewest bytes. What runs of blocks need is added up, not dry-run, and may be too little."""
        ways = [problem, replace(problem, segments=())] if problem.segments else [problem]
        first, *others = sorted(((self._least_budget(way), way) for way in ways), key=lambda pair: pair[0])
        least = self._answer(first[1], first[0])
        found = [self._answer(way, level) for level, way in others if level < least.needs]
        return min([least, *found], key=lambda one: one.needs)

    @functools.cached_property
    def _walks(self) -> tuple[Walk, ...]:
        return walks(self.problem)

    def _chosen(self, problem: StepProblem, asked: int) -> Solution:
        return choose(problem, asked, known=self._walks if problem is self.problem else None)

    def _least_budget(self, problem: StepProblem) -> int:
        return least_of(self._walks) if problem is self.problem else minimum_budget(problem)

    def _answer(self, problem: StepProblem, asked: int) -> Candidate:
        """The choice; with less on the host, step by step, where pinning takes more than that may give."""
        found = self.candidate(self._chosen(problem, asked))
        while not self._held(found):
            assert self.host is not None
            problem = less_on_host(problem, found.solution.levels, self.host, found.step.pinned_bytes)
            found = self.candidate(choose(problem, max(asked, minimum_budget(problem))))
        return found

    def _held(self, found: Candidate) -> bool:
        return self.host is None or self.host.holds(found.step.pinned_bytes)

    @functools.cached_property
    def minimum_budget_bytes(self) -> int:
        """A budget for which there is always a plan. Now and then one for a little less can be found."""
        return min(self.plain_budget_bytes, self._least_untimed.needs)

    @functools.cached_property
    def _least_untimed(self) -> Candidate:
        return self._least(untimed(self.options.problem))

    @property
    def plain_budget_bytes(self) -> int:
        """The smallest budget under which nothing needs to be done."""
        return self.options.baseline.peak_bytes + UNSEEN_BYTES

    def plan(self, budget_bytes: int) -> Candidate:
        """The fastest plan whose dry run fits.

        Raises:
            Infeasible: none does; the error carries the dry-run peak of the smallest plan.
        """
        if self.minimum_budget_bytes > budget_bytes:
            # below what is there before a step no plan is worth a look
            fewest = self._least_untimed if self.baseline.static_bytes > budget_bytes else self.smallest
            if fewest.needs > budget_bytes:
                raise Infeasible(
                    minimum_budget_bytes=self.minimum_budget_bytes,
                    budget_bytes=budget_bytes,
                    reason=f"The {fewest.step.phase} pass sets the peak.",
                )
        if self.plain_budget_bytes <= budget_bytes:  # nothing to do, however the solver's sums are rounded
            return self.candidate(self._chosen(self.problem, 2 * budget_bytes))

        def ask(asked: int) -> Candidate:
            self.progress("choosing")
            return self._answer(self.problem, asked)

        least = least_of(self._walks)
        self._answers.extend(refine(ask, budget_bytes, least, known=self._answers))
        say_what_was_bounded(self.trace, self.judge.pricing)
        return fastest([one for one in self._candidates.values() if self._held(one)], budget_bytes)

    def as_plan(self, found: Candidate, budget_bytes: int, *, minimum_budget_bytes: int | None = None) -> Plan:
        """The plan as a document. ``minimum_budget_bytes``: where it is known otherwise."""
        trace, choice = self.trace, found.solution.choice
        layers: dict[str, LayerPlan] = {}
        followers = {name for run in found.part.segments for name in run[1:]}
        for call, key in zip(trace.calls, choice.regions, strict=True):
            program = trace.program(call)
            point = self._point(call.class_key, key, program)
            if call.name in followers:  # the block before computes this one's input again
                linked = {position for position, _ in call.links}
                inputs = trace.classes[call.class_key].trace.inputs
                held = frozenset(b for b in point.kept - point.moved if inputs.get(b) not in linked)
                point = replace(point, kept_bytes=program.kept_bytes(held))
            if call.name not in layers or point.kept_bytes < layers[call.name].kept_bytes:
                layers[call.name] = layer_plan(call.name, program, point)
        certificate = found.solution.certificate
        unplanned = self.options.problem.plain_seconds
        added = found.added_seconds
        return Plan(
            budget_bytes=budget_bytes,
            minimum_budget_bytes=self.minimum_budget_bytes if minimum_budget_bytes is None else minimum_budget_bytes,
            predicted=Predicted(
                peak_bytes=found.step.peak_bytes,
                step_seconds=unplanned + added,
                overhead_fraction=added / unplanned if unplanned else 0.0,
                host_bytes=found.step.host_bytes,
                composed=found.step.composed,
            ),
            solver=SolverReport(gap=certificate.gap, seconds=certificate.solver_seconds),
            layers=tuple(layers.values()),
            segments=tuple((run[0], run[-1]) for run in found.part.segments),
            root=layer_plan("", trace.root.program, self.options.root_points[choice.root]),
            model=fingerprint(trace),
            torch_version=torch.__version__,
            gradients_held=trace.loop.gradients_held,
            chunked_loss=trace.loop.chunked_loss,
            tensors=self.tensors,
            levels=found.step.levels,
        )


def untimed(problem: StepProblem) -> StepProblem:
    """What does not hang on seconds that were measured, and is there whenever a plan is made: both ends, and what
    lowers the peak of the lower one.
    """
    regions = tuple(replace(r, options=_ends(r.options)) for r in problem.regions)
    return replace(problem, regions=regions, root=_ends(problem.root))


def _ends(options: tuple[Option, ...]) -> tuple[Option, ...]:
    keys: list[str] = [o.key for o in options if SEND not in o.key and not o.key.endswith(PACK)]
    ends = {keys[0], keys[-1], *(key for key in keys if is_lean(key))}
    return tuple(o for o in options if o.key.removesuffix(PACK).partition(SEND)[0] in ends and not is_timed(o.key))


def module_policy(traced: ModelTrace, plan: Plan) -> ModulePolicy:
    """A plan that was made for this trace, as policies. What stands in for opaque blocks in a dry run is left out."""
    names = list(dict.fromkeys(c.name for c in traced.calls))
    policies = {
        entry.layer: policy_kept(
            _class_of(traced, entry), entry.option, *map(frozenset, (entry.kept, entry.offloaded, entry.packed))
        )
        for entry in plan.layers
    }
    root = exactly(traced.root.program, frozenset(plan.root.kept), frozenset(plan.root.offloaded))
    segments = [names[names.index(a) : names.index(b) + 1] for a, b in plan.segments]
    return ModulePolicy(trace=traced, policies=policies, root=root, segments=segments)


def _class_of(traced: ModelTrace, entry: LayerPlan) -> BlockClass:
    """Of a block that runs several programs in one forward (under one adapter, then another), that of the entry."""
    found = [traced.classes[call.class_key] for call in traced.calls if call.name == entry.layer]
    return next((cls for cls in found if cls.program.digest() == entry.digest), found[-1])


def digests_of(traced: ModelTrace, plan: Plan) -> dict[str, str]:
    """By block, of its program that the plan has, if that is among those that it runs."""
    last = {call.name: traced.program(call).digest() for call in traced.calls}
    entries = [entry for entry in plan.layers if entry.layer in last]
    return last | {entry.layer: _class_of(traced, entry).program.digest() for entry in entries}


def layer_plan(name: str, program: Program, point: FrontierPoint) -> LayerPlan:
    """One layer's entry."""
    named = point.key in ("none", "full")
    policy = PolicyWord(point.key) if named else policy_word(program, point.kept, point.moved, point.narrowed)
    return LayerPlan(
        layer=name,
        policy=policy,
        kept_bytes=point.kept_bytes,
        offloaded_bytes=program.kept_bytes(point.moved),
        recompute_flops=recompute_flops(program, point.kept) if policy is not PolicyWord.NONE else 0,
        digest=program.digest(),
        option=point.key,
        kept=tuple(sorted(point.kept)),
        offloaded=tuple(sorted(point.moved)),
        packed=tuple(sorted(point.narrowed)),
        price=point.price,
    )


def fingerprint(trace: ModelTrace) -> str:
    """Names the model: its class, and names, shapes and dtypes of its parameters."""
    text = [type(trace.fake_model).__qualname__]
    for name, p in trace.fake_model.named_parameters():
        text.append(f"{name}{tuple(p.shape)}{p.dtype}{p.requires_grad}")
    return hashlib.sha256("\n".join(text).encode()).hexdigest()[:16]


# judge ----------------------------------------------------------------------------------------------------------------
#
# What a choice takes: by dry-running the whole step, or by putting it together from steps that were dry-run One choice
# is dry-run whole. Where many are asked for, as in a sweep of budgets, most of what a step does was seen before: the
# same block under the same option, in another place. A dry run of a mixture, in which every block has another option,
# shows many of them at once (NOTE [ What may be put together ] in dryrun/composed.py).
#
# The first step that is put together is dry-run whole as well, and must be the same in every level.


Offers = Mapping[str, Sequence[CheckpointPolicy]]
"""By class of blocks: what may be asked for, most likely first."""
ALIKE = 2
"""Blocks of a kind, on average, from which on a mixture shows more than the choice itself."""


def why_whole(trace: ModelTrace, dry_step: DryStep, *, offloads: bool) -> str:
    """Why steps of this kind are not put together; empty where they may be."""
    names = [call.name for call in trace.calls]
    if not isinstance(dry_step, OneBatch):
        return "the step is somebody's own"
    if offloads:
        return "tensors move to the host, and blocks wait for each other's copies"
    if any(cls.stood_in for cls in trace.classes.values()):
        return "some blocks are stood in for"
    if not names or len(set(names)) < len(names):
        return "the model has no blocks" if not names else "a block is called twice"
    return ""


@dataclass(kw_only=True)
class Judge:
    """Says what steps take.

    Args:
        book: of what was seen; None: every step is dry-run whole.
    """

    trace: ModelTrace
    dry_step: DryStep
    pricing: Pricing
    book: Book | None = None
    whole_steps: int = 0
    _proven: bool = False
    _last_root: CheckpointPolicy | None = None  # of a whole step in which something around the blocks was dropped
    _offers: dict[str, list[CheckpointPolicy]] = field(default_factory=dict, init=False)

    @classmethod
    def of(cls, trace: ModelTrace, dry_step: DryStep, pricing: Pricing, *, composes: bool, offloads: bool) -> Judge:
        """One that puts steps together if that is wanted, and possible."""
        book = None
        if composes:
            names, classes = [call.name for call in trace.calls], [call.class_key for call in trace.calls]
            book = Book(names=names, classes=classes, problem=why_whole(trace, dry_step, offloads=offloads))
        return cls(trace=trace, dry_step=dry_step, pricing=pricing, book=book)

    @property
    def problem(self) -> str:
        """Why no step is put together."""
        return "nobody asked for it" if self.book is None else self.book.problem

    def offer(self, offers: Offers) -> None:
        """What may be asked for."""
        self._offers = {key: list(policies) for key, policies in offers.items()}

    def whole(self, part: ModulePolicy) -> StepPeaks:
        """A step that is dry-run."""
        self.whole_steps += 1
        if self.book is None or self.book.problem:
            return step_of([part], self.dry_step, self.pricing)
        told: list[tuple[Tape, int]] = []
        found = step_of([part], self.dry_step, self.pricing, lambda tape, live_bytes: told.append((tape, live_bytes)))
        self._last_root = part.root if not isinstance(part.root, KeepAll) else self._last_root
        self.book.record(told[-1][0], labels_of(part), told[-1][1])  # of the run that knew every workspace
        return found

    def step(self, part: ModulePolicy) -> StepPeaks:
        """A step, put together if possible."""
        if self.book is None or self.book.problem:
            return self.whole(part)
        labels = labels_of(part)
        if not self.book.knows_root(labels.root):
            self._see_around(labels.root)
        found = self._composed(labels)
        if found is None and (mixture := self._mixture(part, labels)) is not None:
            self.whole(mixture)
            found = self._composed(labels)
        if found is None:
            return self.whole(part)
        if self._proven:
            return found
        seen = self.whole(part)
        if seen == replace(found, composed=False):
            self._proven = True
        else:
            self.book.problem = "a step that was put together is not what it is when it is run"
        return seen

    def _see_around(self, root: CheckpointPolicy) -> None:
        """What is around the blocks, in a step over stubs, if such steps show it."""
        assert self.book is not None
        known = self._last_root
        if self.book.stubs is None and known is not None:
            self._over_stubs(known)
        if self.book.stubs:
            self._over_stubs(root)

    def _over_stubs(self, root: CheckpointPolicy) -> None:
        assert self.book is not None
        seen = self.pricing.known(lambda workspace: around_stubs(self.trace, root, self.dry_step, workspace))
        if seen is None:
            self.book.stubs = False
        else:
            self.book.record_around(seen[0], root, seen[1])

    def _composed(self, labels: Labels) -> StepPeaks | None:
        assert self.book is not None
        found = self.book.compose(labels)
        if found is None:
            return None
        beside = self.trace.loop.elsewhere_bytes
        forward = found.peak_of("forward")
        optimizer = bool(self.dry_step.last)
        backward, last = max(forward, found.peak_of("backward")), found.peak_of("optimizer")
        return StepPeaks(
            peak_bytes=max(forward, backward, last) + beside,
            static_bytes=found.start_bytes + beside,
            forward_peak_bytes=forward + beside,
            backward_peak_bytes=backward + beside,
            optimizer_peak_bytes=last + beside if optimizer else 0,
            levels=found.levels(beside),
            composed=True,
        )

    def _mixture(self, part: ModulePolicy, labels: Labels) -> ModulePolicy | None:
        """A step that shows what is missing of another, and more; None where that is shown best by itself."""
        assert self.book is not None
        missing = self.book.missing(labels)
        kinds: dict[int, list[int]] = {}
        for call in range(len(labels.calls)):
            kinds.setdefault(self.book.alike(call), []).append(call)
        if not missing or len(labels.calls) < ALIKE * len(kinds) or any(_run_of(labels, call) for call in missing):
            return None
        policies = dict(part.policies)
        for calls in kinds.values():
            wanted = [labels.calls[call] for call in calls if call in missing]
            offered = self._offers.get(self.trace.calls[calls[0]].class_key, [])
            wanted += [(policy, None) for policy in offered if not self.book.seen(calls[0], (policy, None))]
            for call, label in zip(calls, _to_and_fro(list(dict.fromkeys(wanted))), strict=False):
                policies[self.trace.calls[call].name] = label[0]
        return replace(part, policies=policies, segments=())


def labels_of(part: ModulePolicy) -> Labels:
    """How a part is treated, call by call."""
    names = [call.name for call in part.trace.calls]
    runs = [(names.index(run[0]), names.index(run[-1]) + 1) for run in part.segments]
    places = {call: (call - first, past - first) for first, past in runs for call in range(first, past)}
    calls: list[Label] = [(part.policies[name], places.get(call)) for call, name in enumerate(names)]
    return Labels(root=part.root, calls=tuple(calls), runs=tuple(runs))


def _run_of(labels: Labels, call: int) -> bool:
    return any(first <= call < past for first, past in labels.runs)


def _to_and_fro(labels: Sequence[Label]) -> Iterator[Label]:
    """Again and again, so that each comes beside others."""
    while labels:
        yield from labels
        yield from reversed(labels)
