"""From a trace and a budget to a plan that has been rehearsed.

The solver adds up levels that were rehearsed block by block; the whole step's rehearsal is the judge. Where the two
differ the solver's budget is moved by the difference and it is asked again, until what it chooses fits when rehearsed
and no budget is left unused that the next option would need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import isqrt
from typing import Any, TypeVar

import torch

from jettison.cost import CPU, CUDA, Rates, op_seconds
from jettison.errors import Infeasible
from jettison.ledger.program import Program
from jettison.measure.kernels import OpRequest, TensorMeta
from jettison.measure.observe import observe_block
from jettison.measure.ops import Pricing
from jettison.measure.rehearse import OneBatch, Part, Scene, StepRehearsal, rehearse_block, rehearse_scene
from jettison.measure.root import rehearse_root
from jettison.plan.artefact import LayerPlan, Plan, PolicyWord, Predicted, SolverReport, policy_word, recompute_flops
from jettison.plan.chain import Solution, choose
from jettison.plan.frontier import FrontierPoint, pareto_frontier
from jettison.plan.lean import MOST_CUTS, is_lean, lean_points
from jettison.plan.levels import Choice
from jettison.plan.moves import minimum_budget
from jettison.plan.problem import Region, RegionOption, RootOption, SegmentOption, StepProblem
from jettison.plan.treatment import Exactly, Full, KeepAll, Share, Treatment, treatment
from jettison.trace.capture import Call, RegionTrace, TensorRef
from jettison.trace.model import BlockCall, ModelTrace
from jettison.trace.randomness import ADVANCE
from jettison.trace.wrapped import plain

BLOCK_POINTS = 12
ROOT_POINTS = 6
ROOT_CUTS = 8  # of a model without blocks
SHORT_ROOT = 250  # ops up to which that many are looked for: seconds
UNSEEN_BYTES = 256  # Python numbers that C++ wraps into tensors live for an op, out of any dispatch mode's sight
SEGMENT_SIZES = (2, 3, 4, 6, 8, 12, 16)
ATTEMPTS = 8
PYTHON_SECONDS_PER_OP = 6e-6  # replaying one op costs this much beside the op itself (measured, 2 CPU cores)

Progress = Callable[[str], None]
Option = TypeVar("Option", RegionOption, RootOption)


@dataclass(frozen=True, kw_only=True)
class Rehearsed:
    """One choice, as treatments, and what its rehearsal gave."""

    solution: Solution
    part: Part
    step: StepRehearsal


@dataclass(kw_only=True)
class Planner:
    """Everything that is known about one step: made once, asked for as many budgets as wanted.

    Args:
        scene: the step as the loop has it, over one module like the trace's twin, in the trace's mode; where left out,
            one batch through the twin, and ``optimizer``.
    """

    trace: ModelTrace
    measure: bool = True
    optimizer: torch.optim.Optimizer | None = None
    scene: Scene | None = None
    progress: Progress = lambda _text: None
    baseline: StepRehearsal = field(init=False)
    points: dict[str, dict[str, FrontierPoint]] = field(init=False)
    root_points: dict[str, FrontierPoint] = field(init=False)
    problem: StepProblem = field(init=False)
    pricing: Pricing = field(init=False)
    _observations: dict[str, tuple[RegionOption, RegionOption]] = field(default_factory=dict, init=False)
    _rehearsals: dict[Any, Rehearsed] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.pricing = Pricing(run=self.measure)
        self.progress("pricing ops" if self.measure else "rehearsing the plain step")
        everything = dict.fromkeys((c.name for c in self.trace.calls), KeepAll())
        opaque = {
            c.name: self._observed(c.class_key)[0] for c in self.trace.calls if self.trace.classes[c.class_key].opaque
        }
        self.baseline = self._step(Part(trace=self.trace, treatments=everything, root=KeepAll(), opaque=opaque))
        self.progress("rehearsing options")
        self.problem = self._problem()
        self._say_what_was_bounded()

    def _say_what_was_bounded(self) -> None:
        for name, problem in sorted(self.pricing.problems().items()):
            text = (
                f"{name} could not be run by itself ({problem}): its time is an estimate, and what its kernel "
                "allocates inside is taken to be as much as all that it reads and writes"
            )
            if text not in self.trace.warnings:
                self.trace.warnings.append(text)

    def _step(self, part: Part) -> StepRehearsal:
        scene = self.scene or OneBatch(trace=self.trace, optimizer=self.optimizer)
        return self.pricing.known(lambda workspace: rehearse_scene([part], scene, workspace=workspace))

    def _observed(self, key: str) -> tuple[RegionOption, RegionOption]:
        if key not in self._observations:
            cls = self.trace.classes[key]
            self._observations[key] = self.pricing.known(lambda w: observe_block(self.trace, cls, w))
        return self._observations[key]

    # what can be chosen ----------------------------------------------------------------------------------------------

    def _problem(self) -> StepProblem:
        trace = self.trace
        self.points = {}
        options: dict[str, tuple[RegionOption, ...]] = {}
        for key, cls in trace.classes.items():
            if cls.opaque:
                options[key] = self._observed(key)
                self.points[key] = {o.key: _whole(o) for o in options[key]}
                continue
            seconds = self.seconds_of(cls.trace)
            smallest, *more = pareto_frontier(cls.trace.program, seconds, max_points=BLOCK_POINTS)
            found = (smallest, *lean_points(cls.trace.program, smallest.kept, seconds), *more)
            self.points[key] = {p.key: p for p in found}
            options[key] = tuple(self._block(key, p.kept, p.key, p.seconds) for p in found)
        found = self._points_of_root()
        self.root_points = {p.key: p for p in found}
        kept = {key: next(o for o in of_class if o.key == "none") for key, of_class in options.items()}
        roots = tuple(self._root(p, kept) for p in found)
        seen: set[str] = set()
        regions = []
        for call in trace.calls:
            module = (self.scene.modules[0] if self.scene else trace.twin).get_submodule(call.name)
            trained = [p for p in module.parameters() if p.requires_grad and not trace.gradients_held]
            gradients = sum(plain(p).nbytes for p in trained) if call.name not in seen else 0
            seen.add(call.name)
            regions.append(
                Region(
                    name=call.name, class_key=call.class_key, options=options[call.class_key], gradient_bytes=gradients
                )
            )
        base = self.baseline
        return StepProblem(
            static_bytes=base.static_bytes,
            optimizer_peak_bytes=max(0, base.optimizer_peak_bytes - base.static_bytes),
            regions=tuple(regions),
            root=roots,
            segments=tuple(self._segments(options)),
            plain_seconds=self.plain_seconds(),
        )

    def _points_of_root(self) -> tuple[FrontierPoint, ...]:
        root = self.trace.root
        seconds = self.seconds_of(root)
        found = pareto_frontier(root.program, seconds, max_points=ROOT_POINTS)
        if root.problem:  # nothing may be computed again by it
            return tuple(p for p in found if p.kept >= root.program.saved_buffers())
        if self.trace.calls:  # what they hold sets the peak
            return found
        cuts = ROOT_CUTS if len(root.program.ops) <= SHORT_ROOT else MOST_CUTS
        return (found[0], *lean_points(root.program, found[0].kept, seconds, most=cuts), *found[1:])

    def _block(self, key: str, kept: frozenset[int], name: str, seconds: float) -> RegionOption:
        cls = self.trace.classes[key]
        return self.pricing.known(lambda w: rehearse_block(self.trace, cls, kept, name, seconds, w))

    def _root(self, point: FrontierPoint, plain: Mapping[str, RegionOption]) -> RootOption:
        return self.pricing.known(
            lambda w: rehearse_root(self.trace, point.kept, point.key, point.seconds, w, plain=plain)
        )

    def _segments(self, options: dict[str, tuple[RegionOption, ...]]) -> Iterator[SegmentOption]:
        """Runs of blocks of which only the first holds its input: what is computed again adds up along the run.

        Levels follow from the blocks' own: a block in a run holds what plain autograd saves of it until its backward.
        By then it has left the caches: it is charged one more pass out to memory and back.
        """
        rates = self._rates()
        calls = self.trace.calls
        if len({c.name for c in calls}) < len(calls):
            return  # a block that is called twice has one treatment, not a place in one run
        full = {key: self._full_option(key) for key in options if self._ends_in_what_can_be_computed(key)}
        longest = 2 * isqrt(len(calls))
        for size in (n for n in SEGMENT_SIZES if n <= longest):
            for start in range(len(calls) - size + 1):
                run = calls[start : start + size]
                if not all(c.links for c in run[1:]) or any(c.class_key not in full for c in run):
                    continue
                members = [full[c.class_key] for c in run]
                resident = members[0][0].resident_bytes + sum(self._beside_links(c) for c in run[1:])
                held = 0
                peaks = []
                for option, saved, _again in members:
                    peaks.append(option.backward_peak_bytes + held)
                    held += saved
                yield SegmentOption(
                    key="segment", start=start, stop=start + size, resident_bytes=resident,
                    forward_peak_bytes=resident + max(o.forward_peak_bytes for o, _, _ in members),
                    backward_peak_bytes=tuple(peaks),
                    seconds=members[-1][0].seconds
                    + sum(again + 2 * saved / rates.bytes_per_second for _, saved, again in members[:-1]),
                )  # fmt: skip

    def _beside_links(self, call: BlockCall) -> int:
        """Bytes that a later block of a run holds: what cannot be computed again, and inputs that are not handed on."""
        cls = self.trace.classes[call.class_key]
        linked = {position for position, _ in call.links}
        program = cls.trace.program
        return program.kept_bytes(frozenset(b for b in Full().kept(program) if cls.trace.inputs.get(b) not in linked))

    def _ends_in_what_can_be_computed(self, key: str) -> bool:
        cls = self.trace.classes[key]
        if cls.opaque:
            return False
        program = cls.trace.program
        kept = Full().kept(program)  # an input that only the output needs is not among them
        return all(program.can_compute(b, kept) for b in program.outputs)

    def _full_option(self, key: str) -> tuple[RegionOption, int, float]:
        """Only the input held: levels, bytes that plain autograd saves, and seconds with the output computed again
        too.
        """
        cls = self.trace.classes[key]
        program = cls.trace.program
        kept = Full().kept(program)
        seconds = self.seconds_of(cls.trace)
        computed = frozenset(b for b in program.outputs if program.buffers[b].producer is not None)
        alone = sum(seconds[i] for i in program.recompute_set(kept))
        along = sum(seconds[i] for i in program.recompute_set(kept, also=computed))
        option = self._block(key, kept, "full", alone)
        return option, program.kept_bytes(program.saved_buffers()), along

    def _rates(self) -> Rates:
        return CUDA if any(p.is_cuda for p in self.trace.twin.parameters()) else CPU

    def seconds_of(self, trace: RegionTrace) -> list[float]:
        """Seconds to run each op of a region again: measured where it could be, else by its FLOPs and bytes."""
        rates = self._rates()
        out = []
        for op, call in zip(trace.program.ops, trace.calls, strict=True):
            price = self.pricing.prices.get(_request(call).key) if self.pricing.prices else None
            measured = price.seconds if price is not None else None
            out.append(PYTHON_SECONDS_PER_OP + (measured if measured is not None else op_seconds(op, rates)))
        return out

    def plain_seconds(self) -> float:
        """A step without recompute: forward once, and backward at twice that (a matmul has two in its backward)."""
        classes = {
            k: self._observed(k)[1].seconds if c.opaque else self._forward_seconds(c.trace)
            for k, c in self.trace.classes.items()
        }
        forward = sum(classes.get(c.class_key, 0.0) for c in self.trace.calls) + self._forward_seconds(self.trace.root)
        return 3 * forward

    def _forward_seconds(self, trace: RegionTrace) -> float:
        """Of the ops that a forward runs: what moves a random state by itself only a recipe does."""
        seconds = zip(trace.program.ops, self.seconds_of(trace), strict=True)
        return sum(s for op, s in seconds if op.name != ADVANCE)

    # choosing --------------------------------------------------------------------------------------------------------

    def rehearse(self, solution: Solution) -> Rehearsed:
        """Run a choice on fake tensors; every choice once."""
        choice = solution.choice
        known = self._rehearsals.get(choice)
        if known is None:
            part = self.part(choice)
            known = self._rehearsals[choice] = Rehearsed(solution=solution, part=part, step=self._step(part))
        return known

    def part(self, choice: Choice) -> Part:
        """A choice as treatments."""
        treatments, root = self._treatments(choice)
        opaque = {
            c.name: next(o for o in r.options if o.key == key)
            for c, r, key in zip(self.trace.calls, self.problem.regions, choice.regions, strict=True)
            if self.trace.classes[c.class_key].opaque
        }
        segments = [[c.name for c in self.trace.calls[a:b]] for a, b in choice.segments]
        return Part(trace=self.trace, treatments=treatments, root=root, segments=segments, opaque=opaque)

    def _treatments(self, choice: Choice) -> tuple[dict[str, Treatment], Treatment]:
        chosen: dict[str, FrontierPoint] = {}
        programs: dict[str, Program] = {}
        for call, key in zip(self.trace.calls, choice.regions, strict=True):
            program = self.trace.program(call)
            point = self._point(call.class_key, key, program)
            if call.name not in chosen or point.kept_bytes < chosen[call.name].kept_bytes:
                chosen[call.name], programs[call.name] = point, program
        opaque = {c.name for c in self.trace.calls if self.trace.classes[c.class_key].opaque}
        treatments: dict[str, Treatment] = {
            name: treatment(p.key) if name in opaque else exactly(programs[name], p.kept) for name, p in chosen.items()
        }
        return treatments, exactly(self.trace.root.program, self.root_points[choice.root].kept)

    def _point(self, class_key: str, key: str, program: Program) -> FrontierPoint:
        if key != "segment":
            return self.points[class_key][key]
        kept = Full().kept(program)
        return FrontierPoint(key=key, kept=kept, kept_bytes=program.kept_bytes(kept), seconds=0.0, price=0.0)

    def smallest(self) -> Rehearsed:
        """The plan of the fewest bytes."""
        return min([self._least(self.problem), self._least(untimed(self.problem))], key=needs)

    def _least(self, problem: StepProblem) -> Rehearsed:
        """Of the fewest bytes. What runs of blocks need is added up, not rehearsed, and may be too little."""
        ways = [problem, replace(problem, segments=())] if problem.segments else [problem]
        return min([self.rehearse(choose(way, minimum_budget(way))) for way in ways], key=needs)

    @property
    def minimum_budget_bytes(self) -> int:
        """A budget for which there is always a plan. Now and then one for a little less can be found."""
        return min(self.plain_budget_bytes, needs(self._least(untimed(self.problem))))

    @property
    def plain_budget_bytes(self) -> int:
        """The smallest budget under which nothing needs to be done."""
        return self.baseline.peak_bytes + UNSEEN_BYTES

    def plan(self, budget_bytes: int) -> Rehearsed:
        """The fastest plan whose rehearsal fits.

        Raises:
            Infeasible: none does; the error carries the rehearsed peak of the smallest plan.
        """
        smallest = self.smallest()
        if min(needs(smallest), self.plain_budget_bytes) > budget_bytes:
            raise Infeasible(
                minimum_budget_bytes=self.minimum_budget_bytes, budget_bytes=budget_bytes,
                reason=f"The {smallest.step.phase} pass sets the peak.",
            )  # fmt: skip
        if self.plain_budget_bytes <= budget_bytes:  # nothing to do, however the solver's sums are rounded
            return self.rehearse(choose(self.problem, 2 * budget_bytes))
        low, high = minimum_budget(self.problem), None
        effective = max(low, budget_bytes)
        for _ in range(ATTEMPTS):
            self.progress("choosing")
            found = self.rehearse(choose(self.problem, effective))
            spare = budget_bytes - needs(found)
            if spare >= 0:
                low = max(low, effective)
                target = effective + spare
                if found.solution.certificate.objective_seconds <= 0.0:
                    break
            else:  # so does every budget that leads to the same choice, down to its own level
                high = min(found.solution.levels.peak_bytes, effective if high is None else high)
                target = high + spare
            if (target - low if high is None else high - low) <= max(1, budget_bytes // 500):
                break
            effective = target if high is None or low < target < high else (low + high) // 2
        self._say_what_was_bounded()
        fitting = [known for known in self._rehearsals.values() if needs(known) <= budget_bytes]
        return min(fitting, key=_added_seconds)

    def artefact(self, found: Rehearsed, budget_bytes: int, *, minimum_budget_bytes: int | None = None) -> Plan:
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
                held = frozenset(b for b in point.kept if inputs.get(b) not in linked)
                point = replace(point, kept_bytes=program.kept_bytes(held))
            if call.name not in layers or point.kept_bytes < layers[call.name].kept_bytes:
                layers[call.name] = layer_plan(call.name, program, point)
        certificate = found.solution.certificate
        unplanned = self.problem.plain_seconds
        added = certificate.objective_seconds
        return Plan(
            budget_bytes=budget_bytes,
            minimum_budget_bytes=self.minimum_budget_bytes if minimum_budget_bytes is None else minimum_budget_bytes,
            predicted=Predicted(
                peak_bytes=found.step.peak_bytes, step_seconds=unplanned + added,
                overhead_fraction=added / unplanned if unplanned else 0.0,
            ),
            solver=SolverReport(gap=certificate.gap, seconds=certificate.solver_seconds),
            layers=tuple(layers.values()),
            segments=tuple((run[0], run[-1]) for run in found.part.segments),
            root=layer_plan("", trace.root.program, self.root_points[choice.root]),
            model=fingerprint(trace),
            torch_version=torch.__version__, gradients_held=trace.gradients_held,
        )  # fmt: skip


def _whole(option: RegionOption) -> FrontierPoint:
    """An option of a block that has no program: kept whole or checkpointed whole."""
    return FrontierPoint(
        key=option.key, kept=frozenset(), kept_bytes=option.resident_bytes, seconds=option.seconds, price=0.0
    )


def untimed(problem: StepProblem) -> StepProblem:
    """What does not hang on seconds that were measured, and is there whenever a plan is made: both ends, and what
    lowers the peak of the lower one.
    """
    regions = tuple(replace(r, options=_ends(r.options)) for r in problem.regions)
    return replace(problem, regions=regions, root=_ends(problem.root))


def _ends(options: tuple[Option, ...]) -> tuple[Option, ...]:
    last = len(options) - 1
    return tuple(o for i, o in enumerate(options) if i in (0, last) or is_lean(o.key))


def needs(found: Rehearsed) -> int:
    """The smallest budget that a rehearsed choice is sure to fit."""
    return found.step.peak_bytes + UNSEEN_BYTES


def _added_seconds(found: Rehearsed) -> float:
    return found.solution.certificate.objective_seconds


def exactly(program: Program, kept: frozenset[int]) -> Exactly:
    """This decision for this program and its like (a shorter batch); for others as large a share of what they save."""
    total = program.kept_bytes(program.saved_buffers())
    share = Share(program.kept_bytes(kept) / total if total else 1.0)
    return Exactly(program.digest(), kept, share, program.form())


def layer_plan(name: str, program: Program, point: FrontierPoint) -> LayerPlan:
    """One layer's entry."""
    policy = PolicyWord(point.key) if point.key in ("none", "full") else policy_word(program, point.kept)
    return LayerPlan(
        layer=name, policy=policy, kept_bytes=point.kept_bytes,
        recompute_flops=recompute_flops(program, point.kept), digest=program.digest(), option=point.key,
        kept=tuple(sorted(point.kept)), price=point.price,
    )  # fmt: skip


def fingerprint(trace: ModelTrace) -> str:
    """Names the model: its class, and names, shapes and dtypes of its parameters."""
    import hashlib

    text = [type(trace.twin).__qualname__]
    for name, p in trace.twin.named_parameters():
        text.append(f"{name}{tuple(p.shape)}{p.dtype}{p.requires_grad}")
    return hashlib.sha256("\n".join(text).encode()).hexdigest()[:16]


def _request(call: Call) -> OpRequest:
    def meta(leaf: Any) -> Any:
        if isinstance(leaf, TensorRef):
            return TensorMeta(leaf.size, leaf.stride, leaf.dtype, call.device)
        if isinstance(leaf, list | tuple):
            return type(leaf)(meta(v) for v in leaf)
        return leaf

    return OpRequest(func=call.func, args=meta(call.args), kwargs={k: meta(v) for k, v in call.kwargs.items()})
