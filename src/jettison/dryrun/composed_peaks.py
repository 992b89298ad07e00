"""Peaks of planned steps, each dry-run completely or composed of dry runs of its parts.

Before a plan is chosen, each block has run alone under every policy, and the root with stubs in place of its blocks. In
such a run nothing else references a block's arguments and outputs, so that it shows when the block, or the root, drops
its last reference to each. In the step, such a tensor is freed with the last of these references. A composed step is
the levels of its parts in order, less the bytes that are freed by then.

NOTE [ What may be composed ]
It is assumed that a call's levels depend on its own policy alone, and are equal for all blocks of a class; and that the
optimizer's depend on no policy. Every complete dry run is compared with the composed one, level by level, and any
difference ends composition. A call under a policy may be composed once a complete dry run has contained it; mixtures,
in which equivalent blocks have all likely policies, cover many at a time. The root may be, once two complete dry runs
have differed in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Final

from jettison.capture.model_trace import BlockCall, ModelTrace
from jettison.dryrun.block_levels import dry_run_block
from jettison.dryrun.counter import RETURNED, STORED, CallLevels, IntervalLevels, Role, RootLevels, Summed
from jettison.dryrun.op_costs import Pricing
from jettison.dryrun.step import DryStep, ModulePolicy, OneBatch, StepPeaks, step_of
from jettison.ledger.step_levels import StepLevels
from jettison.solve.checkpoint_policy import CheckpointPolicy, packed_by

Part = tuple[str, frozenset[int], frozenset[int], Summed]
"""A call under a policy: its class, what is kept and packed, and gradients that are not its own alone."""
ALIKE: Final = 2
"""Average number of blocks of a class above which a mixture shows more than the choice itself."""


def why_whole(trace: ModelTrace, dry_step: DryStep, *, offloads: bool) -> str:
    """Reason why steps of this kind cannot be composed; empty if they can."""
    names = [call.name for call in trace.calls]
    if not isinstance(dry_step, OneBatch):
        return "the step is a custom one"
    if offloads:
        return "tensors move to the host, and blocks wait for each other's copies"
    if any(cls.stood_in for cls in trace.classes.values()):
        return "some blocks run as stand-ins"
    if not names or len(set(names)) < len(names):
        return "the model has no blocks" if not names else "a block is called twice"
    return ""


@dataclass(kw_only=True)
class Judge:
    """Peaks of a model's steps. ``calls``: by blocks' class, kept, packed and summed; ``roots``: by what is kept."""

    trace: ModelTrace
    dry_step: DryStep
    pricing: Pricing
    problem: str = "composition is not requested"  # why every step is dry-run completely; empty if steps are composed
    offers: dict[str, list[CheckpointPolicy]] = field(default_factory=dict)  # by class of blocks, most likely first
    calls: dict[Part, CallLevels] = field(default_factory=dict)
    roots: dict[frozenset[int], RootLevels] = field(default_factory=dict)
    _plain: StepPeaks | None = None  # of the first complete step, whose start and optimizer are those of all
    _equal: set[Part] = field(default_factory=set)  # parts of complete steps that were equal to composed ones
    _roots: set[frozenset[int]] = field(default_factory=set)  # the same of what is around the blocks

    def whole(self, part: ModulePolicy) -> StepPeaks:
        found = step_of([part], self.dry_step, self.pricing)
        self._plain = self._plain or found
        composed = self.compose(part)
        if composed is not None and replace(composed, composed=False) != found:
            self.problem = "a composed step is not what it is when it is run"
        elif composed is not None:
            self._equal.update(label for _, label in self._labelled(part))
            self._roots.add(part.root.kept(self.trace.root.program))
        return found

    def step(self, part: ModulePolicy) -> StepPeaks:
        """Compose a step if possible; else dry-run it."""
        if self.compose(part) is None:
            return self.whole(part)
        if not self._seen(part) and len(self.trace.calls) >= ALIKE * len(self.trace.classes):
            self.whole(self._mixture(part))
        composed = self.compose(part) if self._seen(part) else None
        return composed or self.whole(part)

    def compose(self, part: ModulePolicy) -> StepPeaks | None:
        """The step under these policies; None if some part of it was not run."""
        root = self.roots.get(part.root.kept(self.trace.root.program))
        if self.problem or part.segments or root is None or self._plain is None:
            return None
        calls = [self._call(label, part.policies[c.name]) for c, label in self._labelled(part)]
        if any(call.stores for call in calls) and not self.trace.loop.keep_output:
            return None
        return _composed(root, calls, self._plain)

    def _seen(self, part: ModulePolicy) -> bool:
        """Whether complete dry runs have confirmed the levels of all parts of this step."""
        root = part.root.kept(self.trace.root.program)
        is_known = root in self._roots or len(self._roots) > 1
        return not self.problem and is_known and self._equal.issuperset(label for _, label in self._labelled(part))

    def _labelled(self, part: ModulePolicy) -> list[tuple[BlockCall, Part]]:
        root = self.roots[part.root.kept(self.trace.root.program)]
        found: list[tuple[BlockCall, Part]] = []
        for call, summed in zip(self.trace.calls, root.summed, strict=True):
            policy, program = part.policies[call.name], self.trace.program(call)
            found.append((call, (call.class_key, policy.kept(program), packed_by(policy, program), summed)))
        return found

    def _call(self, label: Part, policy: CheckpointPolicy) -> CallLevels:
        """Run of a call alone, cached."""
        if label not in self.calls:
            key, _, _, summed = label
            _, self.calls[label] = self.pricing.known(
                lambda workspace: dry_run_block(self.trace, self.trace.classes[key], policy, "", 0.0, workspace, summed)
            )
        return self.calls[label]

    def _mixture(self, part: ModulePolicy) -> ModulePolicy:
        """The step with unconfirmed policies in equivalent blocks: its own first, then likely ones."""
        policies = dict(part.policies)
        for key, cls in self.trace.classes.items():
            labelled = [(call, label) for call, label in self._labelled(part) if call.class_key == key]
            seen = {label[1:3] for label in self._equal if label[0] == key}
            missing = [part.policies[call.name] for call, label in labelled if label not in self._equal]
            likely = [p for p in self.offers[key] if (p.kept(cls.program), packed_by(p, cls.program)) not in seen]
            once = list(dict.fromkeys([*missing, *likely]))
            to_and_fro = cycle([*once, *reversed(once)])  # so that each comes next to others
            if once:
                policies.update((call.name, policy) for (call, _), policy in zip(labelled, to_and_fro, strict=False))
        return replace(part, policies=policies)


def _composed(root: RootLevels, calls: list[CallLevels], plain: StepPeaks) -> StepPeaks | None:
    extra = plain.extra_bytes
    last: dict[Role, tuple[int, int]] = {}  # by storage, the interval and the level of the last reference
    dying: set[Role] = set()
    pieces: list[tuple[str, IntervalLevels]] = []
    for number, ((phase, call, inside), around) in enumerate(root.intervals):
        # what ends in a call that has not touched it was added to there: alone, it is its own
        dying |= {role for role, _ in around.last_references if not inside or role in root.touched[call].values()}
        last |= {role: (number, 0 if inside else level) for role, level in around.last_references}
        if inside:
            own = calls[call].forward if phase == "forward" else calls[call].backward
            touched = root.touched[call]
            last |= {touched[role]: (number, level) for role, level in own.last_references if role in touched}
        pieces.append((phase, own if inside else around))
    gone: dict[int, list[tuple[int, int]]] = {}
    for role in dying:
        call, *of_call = role
        is_made = of_call[0] in (RETURNED, STORED)
        nbytes = calls[call].watched_bytes.get(tuple(of_call)) if is_made else root.watched_bytes[role]
        if nbytes is None:
            return None
        number, level = last[role]
        gone.setdefault(number, []).append((level, nbytes))
    live = plain.static_bytes - extra
    found: list[tuple[str, list[int]]] = []
    for number, (phase, piece) in enumerate(pieces):
        if not found or found[-1][0] != phase:
            live -= sum(call.cached_bytes for call in calls) if found else 0
            found.append((phase, []))
        levels = [live + level for level in piece.levels]
        live += piece.left_bytes
        for at, nbytes in gone.get(number, ()):
            levels[at:] = [level - nbytes for level in levels[at:]]
            live -= nbytes
        found[-1][1].extend(levels)
    forward, backward = (max(levels, default=0) for _, levels in found)
    optimizer = [live + level for level in plain.optimizer_levels]
    return StepPeaks.of(
        forward,
        max(forward, backward),
        max(optimizer) if optimizer else None,
        static_bytes=plain.static_bytes - extra,
        extra_bytes=extra,
        levels=StepLevels.of([*found, ("optimizer", optimizer)], extra_bytes=extra),
        optimizer_levels=plain.optimizer_levels,
        composed=True,
    )
