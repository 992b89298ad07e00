"""What can be chosen for a traced step: options of blocks, of the root and of runs of blocks, each with its levels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import isqrt
from typing import Any

import torch
from torch import nn

from jettison.capture.model_trace import BlockCall, BlockClass, ModelTrace
from jettison.capture.randomness import ADVANCE
from jettison.capture.recording import RecordedOp, RegionTrace, TensorRef
from jettison.capture.tensor_subclasses import plain
from jettison.core.progress import Progress
from jettison.cost.matmul import memory_seconds, op_seconds
from jettison.dryrun.around_blocks import dry_run_root
from jettison.dryrun.compiled import Levels, measure_choices, options_of_levels, seconds_of_levels
from jettison.dryrun.kernel_trial import OpRequest, TensorMeta
from jettison.dryrun.observed import observe_block
from jettison.dryrun.op_costs import Pricing
from jettison.dryrun.packing_price import packing_seconds
from jettison.dryrun.step import DryStep, ModulePolicy, OneBatch, StepPeaks, dry_run, dry_run_block, make_state
from jettison.dryrun.tape import Tape
from jettison.ledger.program import Program
from jettison.planner.host import ALL, MOVE_SECONDS, SEND, Host, movable, with_moves
from jettison.planner.points import compiled_points, exactly, policy_of, seconds_by_traffic, with_packs
from jettison.runtime.install import returned
from jettison.runtime.packing import Pack
from jettison.runtime.recipe import costs_like
from jettison.solve.actions import parts_to_send
from jettison.solve.frontier import NONE_KEY, FrontierPoint, pareto_frontier
from jettison.solve.policy import SMALLEST_BYTES, Full, KeepAll, can_move
from jettison.solve.problem import ProblemRegion, RegionOption, RootOption, SegmentOption, Sent, StepProblem
from jettison.solve.transients import MOST_CUTS, lean_points
from jettison.spec.hardware import Hardware, usual_hardware
from jettison.spec.kernels import Device

BLOCK_POINTS = 12
ROOT_POINTS = 6
ROOT_CUTS = 8  # of a model without blocks
SHORT_ROOT = 250  # ops up to which that many are looked for: seconds
SEGMENT_SIZES = (2, 3, 4, 6, 8, 12, 16)
PYTHON_SECONDS_PER_OP = 6e-6  # replaying one op costs this much beside the op itself (measured, 2 CPU cores)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What there is to choose from: the solver's problem, and what each of its options keeps.

    Args:
        baseline: the step without a plan.
        points: by class of blocks and option.
    """

    baseline: StepPeaks
    problem: StepProblem
    points: Mapping[str, Mapping[str, FrontierPoint]]
    root_points: Mapping[str, FrontierPoint]


def options_of(
    trace: ModelTrace,
    pricing: Pricing,
    *,
    hardware: Hardware | None,
    optimizer: torch.optim.Optimizer | None,
    dry_step: DryStep | None,
    host: Host | None = None,
    run: Callable[[ModulePolicy], StepPeaks] | None = None,
    progress: Progress,
) -> Options:
    """Run the plain step, and every option of its regions, on fake tensors.

    Args:
        pricing: of ops; it remembers what it was asked for.
        hardware: for ops that are not run; left out, `usual_hardware`'s.
        dry_step: as for `jettison.planner.planner.make_planner`.
        host: where tensors may wait; None: nowhere.
        run: dry-runs the step without a plan, if not the usual way.
    """
    progress("dry-running options")
    device = hardware or usual_hardware(Device.CPU if trace.device_type is None else Device.CUDA)
    module = dry_step.modules[0] if dry_step else trace.fake_model
    builder = _Builder(trace=trace, pricing=pricing, hardware=device, module=module, host=host, progress=progress)
    everything = dict.fromkeys((c.name for c in trace.calls), KeepAll())
    opaque = {c.name: plain_of(builder.seen(c.class_key)) for c in trace.calls if trace.classes[c.class_key].stood_in}
    part = ModulePolicy(trace=trace, policies=everything, root=KeepAll(), opaque=opaque)
    step = dry_step or OneBatch(trace=trace, optimizer=optimizer)
    return builder.options(lambda: step_of([part], step, pricing) if run is None else run(part))


def step_of(
    parts: Sequence[ModulePolicy], dry_step: DryStep, pricing: Pricing, told: Callable[[Tape, int], None] | None = None
) -> StepPeaks:
    """A whole step, with what every kernel in it takes inside. Kernels that only it runs have a price before it.

    Args:
        told: as of `dry_run`, of every run that it takes; the last knows every kernel.
    """
    pricing.known(lambda workspace: make_state(parts, dry_step, workspace=workspace))
    return pricing.known(lambda workspace: dry_run(parts, dry_step, workspace=workspace, told=told))


@dataclass(frozen=True, kw_only=True)
class _Builder:
    """Makes `Options`.

    Args:
        module: the one that the step runs, which has the parameters.
        host: where tensors may wait.
    """

    trace: ModelTrace
    pricing: Pricing
    hardware: Hardware
    module: nn.Module
    host: Host | None
    progress: Progress
    _observations: dict[str, tuple[RegionOption, ...]] = field(default_factory=dict, init=False)
    _measured: dict[str, Mapping[str, Levels]] = field(default_factory=dict, init=False)
    _dry_runs: dict[tuple[str, frozenset[int], frozenset[int]], RegionOption] = field(default_factory=dict, init=False)

    def levels(self, key: str) -> Mapping[str, Levels]:
        """Of a class of compiled blocks, by point."""
        if key not in self._measured:
            cls = self.trace.classes[key]
            assert cls.compiled is not None
            ways = {p.key: policy_of(cls, p) for p in compiled_points(cls.compiled, self.hardware)}
            may_move = self.host is not None
            self._measured[key] = measure_choices(self.trace, cls, ways, self.progress, may_move=may_move)
        return self._measured[key]

    def seen(self, key: str) -> tuple[RegionOption, ...]:
        """Ways to treat a block that no dry run can follow: one without a program kept whole or checkpointed whole, a
        compiled one by its points.
        """
        if key not in self._observations:
            cls = self.trace.classes[key]
            if cls.compiled is not None:
                kept = {option.key: option for option in options_of_levels(self.levels(key))}
                saved = {k: levels.saved for k, levels in self.levels(key).items()}
                points = self.points_of(cls).values()
                self._observations[key] = tuple(option_at(p, kept, saved, cls.program) for p in points)
            else:
                self._observations[key] = self.pricing.known(lambda w: observe_block(self.trace, cls, w))
        return self._observations[key]

    def points_of(self, cls: BlockClass) -> dict[str, FrontierPoint]:
        """What a block that no dry run can follow is treated like."""
        if cls.compiled is not None:
            found: Iterable[FrontierPoint] = compiled_points(cls.compiled, self.hardware)
            if self.host is not None and movable(self.trace, cls.key):
                saved = {k: levels.saved for k, levels in self.levels(cls.key).items()}
                found = with_moves_of_compiled(self.trace, cls.key, found, saved, self._kinks(cls.key))
            return {p.key: p for p in found}
        return {o.key: _whole(o) for o in self.seen(cls.key)}

    def options(self, plain: Callable[[], StepPeaks]) -> Options:
        """See `options_of`.

        Args:
            plain: runs the step without a plan. It comes last: blocks have told of nearly all ops by then, and a run
                that meets ops without a price has to be repeated.
        """
        trace = self.trace
        recorded = [cls.trace for cls in trace.classes.values() if not cls.stood_in]
        # what is worth keeping hangs on what ops take here: before anything is chosen, each is run
        self.pricing.learn(
            request
            for region in (*recorded, trace.root)
            for call in region.calls
            for request in ((_request(call),) if costs_like(call) is None else (_request(call), _again(call)))
            if isinstance(call.func, torch._ops.OpOverload) and (call.args or call.kwargs)  # what only moves statistics
        )
        points: dict[str, dict[str, FrontierPoint]] = {}
        options: dict[str, tuple[RegionOption, ...]] = {}
        for key, cls in trace.classes.items():
            if cls.stood_in:
                options[key] = self.seen(key)
                points[key] = self.points_of(cls)
                continue
            seconds = self.seconds_of(cls.trace)
            smallest, *more = pareto_frontier(cls.trace.program, seconds, max_points=BLOCK_POINTS)
            found = (smallest, *lean_points(cls.trace.program, smallest.kept, seconds), *more)
            if self.host is not None and movable(trace, key):
                found = tuple(with_moves(trace, key, found, self._kinks(key)))
            found = tuple(with_packs(cls.trace, found, seconds, self._packing_seconds))
            points[key] = {p.key: p for p in found}
            options[key] = tuple(self._options_of(key, found))
        of_root = self._points_of_root()
        kept = {key: plain_of(of_class) for key, of_class in options.items()}
        root = tuple(self._root(p, kept) for p in of_root)
        segments = tuple(self._segments(options))
        baseline = plain()
        problem = StepProblem(
            static_bytes=baseline.static_bytes,
            optimizer_peak_bytes=max(0, baseline.optimizer_peak_bytes - baseline.static_bytes),
            regions=tuple(self._regions(options)),
            root=root,
            segments=segments,
            plain_seconds=self.plain_seconds(),
            link=self.host.link(self.host.usable_bytes) if self.host is not None else None,
        )
        return Options(baseline=baseline, problem=problem, points=points, root_points={p.key: p for p in of_root})

    def _regions(self, options: Mapping[str, tuple[RegionOption, ...]]) -> Iterator[ProblemRegion]:
        seen: set[str] = set()
        sends = {key: movable(self.trace, key) for key in options}
        for call in self.trace.calls:
            module = self.module.get_submodule(call.name)
            trained = [p for p in module.parameters() if p.requires_grad and not self.trace.loop.gradients_held]
            gradients = sum(plain(p).nbytes for p in trained) if call.name not in seen else 0
            seen.add(call.name)
            offered, key = options[call.class_key], call.class_key
            if any(o.offloaded_bytes for o in offered) and call.name not in sends[key]:
                offered, key = tuple(o for o in offered if not o.offloaded_bytes), f"{key}, stays"
            forward = self._block_seconds(self.trace.classes[call.class_key])
            yield ProblemRegion(
                name=call.name,
                class_key=key,
                options=offered,
                gradient_bytes=gradients,
                forward_seconds=forward,
                backward_seconds=2 * forward,
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

    def _kinks(self, key: str) -> list[int]:
        """Bytes whose copy is as long as what it hides behind: a pass of a block that comes after one of this class."""
        assert self.host is not None
        if not self.host.hides:
            return []
        calls = self.trace.calls
        after = {late.class_key for early, late in pairwise(calls) if early.class_key == key}
        forward = [self._block_seconds(self.trace.classes[k]) for k in sorted(after)]
        return [int(s * self.host.bytes_per_second) for f in forward for s in (f / 2, f, 2 * f, 3 * f)]

    def _options_of(self, key: str, points: Iterable[FrontierPoint]) -> Iterator[RegionOption]:
        """Levels of each point. What is on the host is as what stays, but in `resident_bytes`."""
        program = self.trace.classes[key].trace.program
        for p in points:
            seen = self._block(key, p.kept, p.key, p.seconds, p.narrowed)
            sent = program.kept_bytes(p.moved)
            stays = seen.resident_bytes - sent
            if stays >= 0:
                yield replace(seen, resident_bytes=stays, offloaded_bytes=sent)

    def _block(
        self, key: str, kept: frozenset[int], name: str, seconds: float, narrowed: frozenset[int] = frozenset()
    ) -> RegionOption:
        known = self._dry_runs.get((key, kept, narrowed))
        if known is None:
            cls = self.trace.classes[key]
            policy = exactly(cls.program, kept, narrowed=narrowed)
            known = self.pricing.known(lambda w: dry_run_block(self.trace, cls, policy, name, seconds, w))
            self._dry_runs[key, kept, narrowed] = known
        return replace(known, key=name, seconds=seconds)

    def _root(self, point: FrontierPoint, plain: Mapping[str, RegionOption]) -> RootOption:
        return self.pricing.known(
            lambda w: dry_run_root(self.trace, point.kept, point.key, point.seconds, w, plain=plain)
        )

    def _segments(self, options: dict[str, tuple[RegionOption, ...]]) -> Iterator[SegmentOption]:
        """Runs of blocks of which only the first holds its input: what is computed again adds up along the run.

        Levels follow from the blocks' own: a block in a run holds what plain autograd saves of it until its backward.
        By then it has left the caches: it is charged one more pass out to memory and back.
        """
        calls = self.trace.calls
        if len({c.name for c in calls}) < len(calls):
            return  # a block that is called twice has one policy, not a place in one run
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
                    key="segment",
                    start=start,
                    stop=start + size,
                    resident_bytes=resident,
                    forward_peak_bytes=resident + max(o.forward_peak_bytes for o, _, _ in members),
                    backward_peak_bytes=tuple(peaks),
                    seconds=members[-1][0].seconds
                    + sum(again + memory_seconds(2 * saved, self.hardware) for _, saved, again in members[:-1]),
                )

    def _beside_links(self, call: BlockCall) -> int:
        """Bytes that a later block of a run holds: what cannot be computed again, and inputs that are not handed on."""
        cls = self.trace.classes[call.class_key]
        linked = {position for position, _ in call.links}
        program = cls.trace.program
        return program.kept_bytes(frozenset(b for b in Full().kept(program) if cls.trace.inputs.get(b) not in linked))

    def _ends_in_what_can_be_computed(self, key: str) -> bool:
        cls = self.trace.classes[key]
        if cls.stood_in:
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

    def seconds_of(self, trace: RegionTrace, request: Callable[[RecordedOp], OpRequest] | None = None) -> list[float]:
        """Seconds to run each op of a region again: measured where it could be, else by its FLOPs and bytes.

        Args:
            request: what is looked up for a call, if not what runs again.
        """
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

    def plain_seconds(self) -> float:
        """A step without recompute: forward once, and backward at twice that (a matmul has two in its backward)."""
        classes = {k: self._block_seconds(c) for k, c in self.trace.classes.items()}
        forward = sum(classes.get(c.class_key, 0.0) for c in self.trace.calls) + self._forward_seconds(self.trace.root)
        return 3 * forward

    def _block_seconds(self, cls: BlockClass) -> float:
        """Of a block's forward; of a compiled one, a third of what its forward and backward took at its fastest."""
        if not cls.stood_in:
            return self._forward_seconds(cls.trace)
        if cls.compiled is not None:
            return min(seconds_of_levels(self.levels(cls.key)).values()) / 3
        return self.seen(cls.key)[1].seconds

    def _forward_seconds(self, trace: RegionTrace) -> float:
        """Of the ops that a forward runs: what moves a random state by itself only a recipe does."""
        seconds = zip(trace.program.ops, self.seconds_of(trace, _request), strict=True)
        return sum(s for op, s in seconds if op.name != ADVANCE)


def plain_of(options: tuple[RegionOption, ...]) -> RegionOption:
    """The one that keeps what is kept without a plan."""
    return next(option for option in options if option.key == NONE_KEY)


def _whole(option: RegionOption) -> FrontierPoint:
    """An option of a block that has no program: kept whole or checkpointed whole."""
    return FrontierPoint(
        key=option.key, kept=frozenset(), kept_bytes=option.resident_bytes, seconds=option.seconds, price=0.0
    )


def _again(call: RecordedOp) -> OpRequest:
    """What a call costs when it runs again."""
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


# host compiled --------------------------------------------------------------------------------------------------------
#
# What of a compiled block goes to the host: options that differ from measured ones in where tensors wait


Saved = Mapping[str, Mapping[int, Sent]]
"""By point and buffer, tensors that could wait on the host, as they were seen when the block was measured."""


def with_moves_of_compiled(
    trace: ModelTrace, class_key: str, points: Iterable[FrontierPoint], saved: Saved, kinks: Sequence[int]
) -> Iterator[FrontierPoint]:
    """Each point as it is, and with parts of what it saves on the host, as `planner.host.with_moves`."""
    program, senders = trace.classes[class_key].program, movable(trace, class_key)
    lives = {place for name, places in returned(trace).items() if name in senders for place in places}
    for point in points:
        yield point
        seen = saved[point.key]
        sizes = as_seen(program, seen)
        free = frozenset(
            b
            for b, sent in seen.items()  # Inductor may save something else in the place of what is kept: that stays
            if b in point.kept and can_move(program, b) and sent.nbytes >= SMALLEST_BYTES and sent.place not in lives
        )
        for part in parts_to_send(sizes, point.kept, free, sorted(set(kinks))):
            if part:
                sent_bytes = sizes.kept_bytes(part)
                yield replace(
                    point,
                    key=f"{point.key}{SEND}{ALL if part == free else sent_bytes}",
                    kept_bytes=point.kept_bytes - program.kept_bytes(part),
                    seconds=point.seconds + MOVE_SECONDS * len(part),
                    moved=part,
                )


def as_seen(program: Program, seen: Mapping[int, Sent]) -> Program:
    """With the bytes that Inductor gave these buffers."""
    buffers = tuple(replace(b, nbytes=seen[b.index].nbytes) if b.index in seen else b for b in program.buffers)
    return replace(program, buffers=buffers)


def option_at(
    point: FrontierPoint, measured: Mapping[str, RegionOption], saved: Saved, program: Program
) -> RegionOption:
    """A point's levels: those that were measured where all stays, with what it sends in nobody's resident bytes."""
    key = point.key.partition(SEND)[0]
    option = measured[key]
    if not point.moved:
        return option
    sent = tuple(one for b, one in saved[key].items() if b in point.moved)
    moved_bytes = sum(s.nbytes for s in sent)
    return replace(
        option,
        key=point.key,
        seconds=option.seconds + MOVE_SECONDS * len(sent),
        resident_bytes=max(0, option.resident_bytes - moved_bytes),
        offloaded_bytes=moved_bytes,
        sent=sent,
    )
