"""What a choice takes: by dry-running the whole step, or by putting it together from steps that were dry-run.

One choice is dry-run whole. Where many are asked for, as in a sweep of budgets, most of what a step does was seen
before: the same block under the same option, in another place. A dry run of a mixture, in which every block has another
option, shows many of them at once (NOTE [ What may be put together ] in dryrun/composed.py).

The first step that is put together is dry-run whole as well, and must be the same in every level.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from jettison.capture.model_trace import ModelTrace
from jettison.dryrun.around_blocks import around_stubs
from jettison.dryrun.composed import Book, Label, Labels
from jettison.dryrun.op_costs import Pricing
from jettison.dryrun.step import DryStep, ModulePolicy, OneBatch, StepPeaks
from jettison.measure.tape import Tape
from jettison.planner.options import step_of
from jettison.solve.policy import CheckpointPolicy, KeepAll

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
