"""Options of a traced step: of blocks, of the root and of runs of blocks, each with its memory levels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from math import isqrt
from typing import Any

import torch

from jettison.capture.model_trace import BlockCall, BlockClass, ModelTrace
from jettison.capture.randomness import ADVANCE
from jettison.capture.recorder import RecordedOp, RegionTrace, TensorRef
from jettison.capture.tensor_subclasses import plain
from jettison.core.progress import Progress
from jettison.cost.kernel import memory_seconds, op_seconds
from jettison.dryrun.block_levels import dry_run_block, dry_run_root, observe_block
from jettison.dryrun.compiled import MeasuredChoice, measure_choices, options_of_levels, seconds_of_levels
from jettison.dryrun.composed import Judge
from jettison.dryrun.kernel_trial import OpRequest, TensorMeta
from jettison.dryrun.op_costs import Pricing
from jettison.dryrun.step import ModulePolicy, StepPeaks
from jettison.planner.front_policies import (
    compiled_points,
    exactly,
    packing_seconds,
    policy_of,
    seconds_by_traffic,
    with_packs,
)
from jettison.planner.host import Host, movable, option_at, with_moves, with_moves_of_compiled
from jettison.runtime.lossless_packing import Pack
from jettison.runtime.recipe import costs_like
from jettison.solve.frontier import NONE_KEY, FrontierPoint, pareto_frontier
from jettison.solve.offload_options import MOST_CUTS, lean_points
from jettison.solve.policy import Full, KeepAll
from jettison.solve.problem import ProblemRegion, RegionOption, SegmentOption, StepProblem
from jettison.spec.hardware import Hardware

BLOCK_POINTS = 12
ROOT_POINTS = 6
ROOT_CUTS = 8  # cuts of a model without blocks
SHORT_ROOT = 250  # ops up to which that many are tried, which takes seconds
SEGMENT_SIZES = (2, 3, 4, 6, 8, 12, 16)
PYTHON_SECONDS_PER_OP = 6e-6  # overhead of replaying one op (measured, 2 CPU cores)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The solver's problem and, by class of blocks and option, its kept tensors. ``baseline``: without a plan."""

    baseline: StepPeaks
    problem: StepProblem
    points: Mapping[str, Mapping[str, FrontierPoint]]
    root_points: Mapping[str, FrontierPoint]


ClassOptions = tuple[Mapping[str, FrontierPoint], tuple[RegionOption, ...]]
"""Points of a class of blocks by key, and their levels."""


@dataclass(frozen=True, kw_only=True)
class OptionsBuilder:
    """Makes `Options`; the judge dry-runs the step without a plan, and remembers prices. No host: nothing moves."""

    judge: Judge
    hardware: Hardware
    host: Host | None
    progress: Progress
    _classes: dict[str, ClassOptions] = field(default_factory=dict, init=False)
    _measured: dict[str, Mapping[str, MeasuredChoice]] = field(default_factory=dict, init=False)
    _dry_runs: dict[tuple[str, frozenset[int], frozenset[int]], RegionOption] = field(default_factory=dict, init=False)
    _seconds: dict[str, float] = field(default_factory=dict, init=False)

    @property
    def trace(self) -> ModelTrace:
        return self.judge.trace

    @property
    def pricing(self) -> Pricing:
        return self.judge.pricing

    def options(self) -> Options:
        """Run the plain step, and every option of its regions, on fake tensors."""
        self.progress("dry-running options")
        trace, calls = self.trace, self.trace.calls
        opaque = {c.name: plain_of(self._options(c.class_key)) for c in calls if trace.classes[c.class_key].stood_in}
        recorded = [cls.trace for cls in trace.classes.values() if not cls.stood_in]
        # points depend on measured times, so each op is run before anything is chosen
        self.pricing.learn(
            request
            for region in (*recorded, trace.root)
            for call in region.calls
            for request in ((_request(call),) if costs_like(call) is None else (_request(call), _again(call)))
            if isinstance(call.func, torch._ops.OpOverload)
            and (call.args or call.kwargs)  # ops that only update statistics
        )
        options = {key: self._options(key) for key in trace.classes}
        root_points = self._points_of_root()
        plain = {key: plain_of(of_class) for key, of_class in options.items()}
        root, logs = [], not self.judge.problem
        for p in root_points:
            option, alone = self.pricing.known(
                lambda w, p=p: dry_run_root(trace, p.kept, p.key, p.seconds, w, plain=plain, logs=logs)  # type: ignore[misc]
            )
            root.append(option)
            if alone is not None:
                self.judge.roots[p.kept] = alone
        segments = tuple(self._segments(options))
        # the step without a plan comes last: blocks have shown nearly all ops by then, and a run with ops
        # without a price has to be repeated
        everything = dict.fromkeys((c.name for c in calls), KeepAll())
        baseline = self.judge.whole(ModulePolicy(trace=trace, policies=everything, root=KeepAll(), opaque=opaque))
        forward = sum(self._block_seconds(c.class_key) for c in calls) + self._forward_seconds(trace.root)
        problem = StepProblem(
            static_bytes=baseline.static_bytes,
            optimizer_peak_bytes=max(0, baseline.optimizer_peak_bytes - baseline.static_bytes),
            regions=tuple(self._regions(options)),
            root=tuple(root),
            segments=segments,
            plain_seconds=3 * forward,  # a matmul has two in its backward
            link=self.host.link(self.host.usable_bytes) if self.host is not None else None,
        )
        points = {key: of_class for key, (of_class, _) in self._classes.items()}
        return Options(baseline=baseline, problem=problem, points=points, root_points={p.key: p for p in root_points})

    # blocks -----------------------------------------------------------------------------------------------------------

    def _options(self, key: str) -> tuple[RegionOption, ...]:
        if key not in self._classes:
            cls = self.trace.classes[key]
            of = self._compiled if cls.compiled is not None else self._observed if cls.stood_in else self._recorded
            self._classes[key] = of(cls)
        return self._classes[key][1]

    def _recorded(self, cls: BlockClass) -> ClassOptions:
        seconds, program, key = self.seconds_of(cls.trace), cls.trace.program, cls.key
        smallest, *more = pareto_frontier(program, seconds, max_points=BLOCK_POINTS)
        found: Iterable[FrontierPoint] = (smallest, *lean_points(program, smallest.kept, seconds), *more)
        if self.host is not None and movable(self.trace, key):
            found = tuple(with_moves(self.trace, key, found, self._kinks(key)))
        found = tuple(with_packs(cls.trace, found, seconds, self._packing_seconds))
        options = []
        for p in found:  # offloaded tensors count like kept ones, except in `resident_bytes`
            seen = self._block(key, p.kept, p.key, p.seconds, p.packed)
            if (left := seen.resident_bytes - p.offloaded_bytes) >= 0:
                options.append(replace(seen, resident_bytes=left, offloaded_bytes=p.offloaded_bytes))
        return {p.key: p for p in found}, tuple(options)

    def _observed(self, cls: BlockClass) -> ClassOptions:
        """Options of a block without a program: no checkpointing or full checkpointing."""
        options = self.pricing.known(lambda w: observe_block(self.trace, cls, w))
        nothing = frozenset[int]()
        points = (
            FrontierPoint(key=o.key, kept=nothing, kept_bytes=o.resident_bytes, seconds=o.seconds) for o in options
        )
        return {p.key: p for p in points}, options

    def _compiled(self, cls: BlockClass) -> ClassOptions:
        assert cls.compiled is not None
        levels = self._levels(cls.key)
        saved = {key: level.saved for key, level in levels.items()}
        found: Iterable[FrontierPoint] = compiled_points(cls.compiled, self.hardware)
        if self.host is not None and movable(self.trace, cls.key):
            found = with_moves_of_compiled(self.trace, cls.key, found, saved, self._kinks(cls.key))
        points = {p.key: p for p in found}
        measured = {option.key: option for option in options_of_levels(levels)}
        return points, tuple(option_at(p, measured, saved) for p in points.values())

    def _levels(self, key: str) -> Mapping[str, MeasuredChoice]:
        if key not in self._measured:
            cls = self.trace.classes[key]
            assert cls.compiled is not None
            policies = {p.key: policy_of(cls, p) for p in compiled_points(cls.compiled, self.hardware)}
            may_move = self.host is not None
            self._measured[key] = measure_choices(self.trace, cls, policies, self.progress, may_move=may_move)
        return self._measured[key]

    def _block(
        self, key: str, kept: frozenset[int], name: str, seconds: float, packed: frozenset[int] = frozenset()
    ) -> RegionOption:
        if (key, kept, packed) not in self._dry_runs:
            cls = self.trace.classes[key]
            policy = exactly(cls.program, kept, packed=packed)
            logs = not self.judge.problem
            found, alone = self.pricing.known(
                lambda w: dry_run_block(self.trace, cls, policy, name, seconds, w, logs=logs)
            )
            self._dry_runs[key, kept, packed] = found
            if logs:
                self.judge.calls[key, kept, packed, frozenset()] = alone
        return replace(self._dry_runs[key, kept, packed], key=name, seconds=seconds)

    def _kinks(self, key: str) -> list[int]:
        """Bytes whose copy is as long as the work that hides it: a pass of a block after one of this class."""
        assert self.host is not None
        if not self.host.hides:
            return []
        after = {late.class_key for early, late in pairwise(self.trace.calls) if early.class_key == key}
        forward = [self._block_seconds(k) for k in sorted(after)]
        return [int(s * self.host.bytes_per_second) for f in forward for s in (f / 2, f, 2 * f, 3 * f)]

    def _regions(self, options: Mapping[str, tuple[RegionOption, ...]]) -> Iterator[ProblemRegion]:
        seen: set[str] = set()
        sends = {key: movable(self.trace, key) for key in options}
        names = [call.name for call in self.trace.calls]
        for call in self.trace.calls:
            module = self.judge.dry_step.modules[0].get_submodule(call.name)
            trained = [p for p in module.parameters() if p.requires_grad and not self.trace.loop.gradients_preallocated]
            offered, key = options[call.class_key], call.class_key
            if any(o.offloaded_bytes for o in offered) and call.name not in sends[key]:
                offered, key = tuple(o for o in offered if not o.offloaded_bytes), f"{key}, stays"
            if names.count(call.name) > 1:
                key = call.name  # one policy for all of its calls
            forward = self._block_seconds(call.class_key)
            yield ProblemRegion(
                name=call.name,
                class_key=key,
                options=offered,
                gradient_bytes=sum(plain(p).nbytes for p in trained) if call.name not in seen else 0,
                forward_seconds=forward,
                backward_seconds=2 * forward,
            )
            seen.add(call.name)

    # the root, and runs of blocks -------------------------------------------------------------------------------------

    def _points_of_root(self) -> tuple[FrontierPoint, ...]:
        root = self.trace.root
        seconds = self.seconds_of(root)
        found = pareto_frontier(root.program, seconds, max_points=ROOT_POINTS)
        if root.problem:  # nothing of it may be recomputed
            return tuple(p for p in found if p.kept >= root.program.saved_buffers())
        if self.trace.calls:  # blocks set the peak
            return found
        cuts = ROOT_CUTS if len(root.program.ops) <= SHORT_ROOT else MOST_CUTS
        return (found[0], *lean_points(root.program, found[0].kept, seconds, most=cuts), *found[1:])

    def _segments(self, options: Iterable[str]) -> Iterator[SegmentOption]:
        """Runs of blocks of which only the first holds its input: recomputed tensors add up along the run.

        Levels follow from the blocks' own: a block in a run holds plain autograd's saved tensors until its backward.
        By then they have left the caches: the cost includes one more pass to memory and back.
        """
        calls = self.trace.calls
        if len({c.name for c in calls}) < len(calls):
            return  # a block that is called twice has one policy, not a place in one run
        full = {key: member for key in options if (member := self._full_option(key)) is not None}
        longest = 2 * isqrt(len(calls))
        for size in (n for n in SEGMENT_SIZES if n <= longest):
            for start in range(len(calls) - size + 1):
                run = calls[start : start + size]
                if not all(c.links for c in run[1:]) or any(c.class_key not in full for c in run):
                    continue
                members = [full[c.class_key] for c in run]
                resident = members[0][0].resident_bytes + sum(self._link_bytes(c) for c in run[1:])
                held = [0, *accumulate(saved for _, saved, _ in members[:-1])]
                yield SegmentOption(
                    key="segment",
                    start=start,
                    stop=start + size,
                    resident_bytes=resident,
                    forward_peak_bytes=resident + max(o.forward_peak_bytes for o, _, _ in members),
                    backward_peak_bytes=tuple(
                        o.backward_peak_bytes + before for (o, _, _), before in zip(members, held, strict=True)
                    ),
                    seconds=members[-1][0].seconds
                    + sum(along + memory_seconds(2 * saved, self.hardware) for _, saved, along in members[:-1]),
                )

    def _link_bytes(self, call: BlockCall) -> int:
        """Bytes that a later block of a run holds: unrecomputable buffers, and inputs from outside the run."""
        cls = self.trace.classes[call.class_key]
        linked = {position for position, _ in call.links}
        program = cls.trace.program
        return program.kept_bytes(frozenset(b for b in Full().kept(program) if cls.trace.inputs.get(b) not in linked))

    def _full_option(self, key: str) -> tuple[RegionOption, int, float] | None:
        """Option that keeps only the input, with the output's seconds; None if the output cannot be recomputed."""
        cls = self.trace.classes[key]
        program = cls.trace.program
        kept = Full().kept(program)  # excludes an input that only the output needs
        if cls.stood_in or not all(program.can_compute(b, kept) for b in program.outputs):
            return None
        seconds = self.seconds_of(cls.trace)
        computed = frozenset(b for b in program.outputs if program.buffers[b].producer is not None)
        alone = sum(seconds[i] for i in program.recompute_set(kept))
        along = sum(seconds[i] for i in program.recompute_set(kept, also=computed))
        return self._block(key, kept, "full", alone), program.kept_bytes(program.saved_buffers()), along

    # seconds ----------------------------------------------------------------------------------------------------------

    def seconds_of(self, trace: RegionTrace, request: Callable[[RecordedOp], OpRequest] | None = None) -> list[float]:
        """Seconds to recompute each op of a region, or of another ``request``: measured, or from FLOPs and bytes."""
        asked, out = request or _again, []
        for op, call in zip(trace.program.ops, trace.calls, strict=True):
            price = self.pricing.prices.get(asked(call).key) if self.pricing.prices else None
            measured = price.seconds if price is not None else None
            out.append(PYTHON_SECONDS_PER_OP + (measured if measured is not None else op_seconds(op, self.hardware)))
        return out

    def _packing_seconds(self, pack: Pack) -> float:
        device = self.trace.device_type or "cpu"
        can_run = self.pricing.run and (device == "cpu" or torch.cuda.is_available())
        return packing_seconds(pack, device) if can_run else seconds_by_traffic(pack, self.hardware)

    def _block_seconds(self, key: str) -> float:
        """Seconds of a block's forward; of a compiled one, a third of its fastest forward and backward."""
        if key not in self._seconds:
            cls = self.trace.classes[key]
            if not cls.stood_in:
                self._seconds[key] = self._forward_seconds(cls.trace)
            elif cls.compiled is not None:
                self._seconds[key] = min(seconds_of_levels(self._levels(key)).values()) / 3
            else:
                self._seconds[key] = self._options(key)[1].seconds
        return self._seconds[key]

    def _forward_seconds(self, trace: RegionTrace) -> float:
        """Seconds of the ops that a forward runs, without those of a recipe that only advance a random state."""
        seconds = zip(trace.program.ops, self.seconds_of(trace, _request), strict=True)
        return sum(s for op, s in seconds if op.name != ADVANCE)


def plain_of(options: tuple[RegionOption, ...]) -> RegionOption:
    """The option that keeps what plain autograd keeps."""
    return next(option for option in options if option.key == NONE_KEY)


def _again(call: RecordedOp) -> OpRequest:
    """The request of a call when it is recomputed."""
    other = costs_like(call)
    return _request(call if other is None else replace(call, func=other[0], args=other[1]))


def _request(call: RecordedOp) -> OpRequest:
    def meta(leaf: Any) -> Any:
        if isinstance(leaf, TensorRef):
            return TensorMeta(leaf.size, leaf.stride, leaf.dtype, call.device)
        if isinstance(leaf, list | tuple):
            return type(leaf)(meta(v) for v in leaf)
        return leaf

    return OpRequest(func=call.func, args=meta(call.args), kwargs={k: meta(v) for k, v in call.kwargs.items()})
