"""A backward in two halves, as ``torch.distributed.pipelining`` splits it, played through in bytes of one rank.

NOTE [ Two halves ]
``torch/distributed/pipelining/_backward.py``, of 2.13. The first half (``stage_backward_input``) differentiates a
stage's output by its input, with ``retain_graph=True``: no node lets go of what it saved. A *group* is the weights that
one op reads, and that op's node, found from the weight upwards (``get_param_groups``); a prehook keeps the gradient
that the node was given (``param_group["grads"]``). In the end the stage's outputs are detached, which frees the nodes
behind the last group: of a loss all that it saved.

The second half (``stage_backward_weight``) takes group after group, in the order of the module's parameters. The node
runs again for its weights alone, with ``retain_graph=False``, and lets go of what it saved; then the group's gradients
go. A node without a weight does not run, and what it saved stays until the last group that it leads to is done: to
the end. The new gradients have a name (``dweights``) until the next group's are made.

The first stage of a model has no input to differentiate by. Its first half does nothing, and its second is the whole
backward (``stage.py``, ``backward_one_chunk``).

NOTE [ Checkpoints under two halves ]
``torch/utils/checkpoint.py``, not reentrant. A checkpoint computes everything again once for each call of
``torch.autograd.grad`` that unpacks any of it (``is_recomputed[gid]``): once in the first half, and once for each group
of the second. What is unpacked goes at once, as the handle does. In the first half that is everything. In the second
one node alone unpacks, and what was computed for the others stays in ``frame.recomputed[gid]`` as long as the node has
its holder: for nodes without a weight until the end. So a segment of g groups comes to have g copies of what such nodes
save. Nothing is computed behind what is saved last (``early_stop``).

NOTE [ Policies under two halves ]
A selective checkpoint of torch's cannot be differentiated twice. Where something else is kept than one of the two
above, it is carried out by `jettison.runtime` (`frame.is_asked_again`): what a node with a weight saves stays computed
until it runs again, and nothing is computed twice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jettison.dtypes import DTYPE_BYTES
from jettison.formula.liveness import Backward
from jettison.formula.region import Region
from jettison.formula.tape import TapeOp, Weight
from jettison.ledger.halves import WeightStep
from jettison.spec.precision import GradientRule


@dataclass(frozen=True, kw_only=True, slots=True)
class InputHalf:
    """A region's first half, in bytes of one rank.

    Args:
        peak: above what was there before, with the gradient of the region's output.
        gradients: what the groups keep of gradients; ``incoming``: of these, the one of the output.
        computed: what was computed again and stays.
        detached: of what the region holds, what nothing with a weight is behind.
    """

    peak: int
    gradients: int
    incoming: int
    computed: int
    detached: int


def input_half(region: Region, kept: frozenset[int], rule: GradientRule, *, again: bool) -> InputHalf:
    """Play a region's first half. See NOTE [ Two halves ].

    Args:
        kept: buffers of `region.program` that stay between forward and backward.
        again: what is computed again for this half is not for the second one.
    """
    program = region.program
    groups = frozenset[int]()
    if not again:
        groups = frozenset(b for step in _groups(region) for b in _saved(region, step)) - kept
    half = _InputHalf(region, kept, rule, groups)
    half.run(-1)
    stays = sum(program.buffers[b].nbytes for b in groups if program.buffers[b].producer is not None)
    retained = {tensor: half.sizes[tensor] for tensor in half.retained}
    return InputHalf(
        peak=half.peak,
        gradients=sum(retained.values()),
        incoming=retained.get(0, 0),
        computed=stays,
        detached=_detached(region, kept),
    )


class _InputHalf(Backward):
    """The replay of a first half: no gradients of weights, and nothing that was kept goes."""

    def __init__(self, region: Region, kept: frozenset[int], rule: GradientRule, stays: frozenset[int]) -> None:
        again = frozenset(region.program.recompute_set(kept))
        super().__init__(region=region, kept=kept, again=again, rule=rule, accumulates=False)
        self.stays = stays
        self.retained: set[int] = set()

    def _runs(self, step: TapeOp) -> bool:
        return step.differentiable and any(v.grad for v in step.inputs)

    def _workspace(self, step: TapeOp) -> int:
        return 0 if step.learned else step.workspace  # it is the weights'

    def _made(self, step: TapeOp, incoming: list[int]) -> list[Weight]:
        if step.learned:
            for tensor in set(incoming) - self.retained:
                self.owners[tensor] += 1
                self.retained.add(tensor)
        return []

    def _free(self, b: int) -> None:
        if b in self.computed and b not in self.stays:
            super()._free(b)


def _groups(region: Region) -> list[TapeOp]:
    """Steps that read weights which learn."""
    return [step for step in region.tape.steps if step.learned and step.differentiable]


def _saved(region: Region, step: TapeOp) -> Iterator[int]:
    """Buffers that a step saves and that cost something."""
    for each in step.saved:
        buffer = region.buffers[each.value.storage]
        if not region.program.buffers[buffer].free:
            yield buffer


def _detached(region: Region, kept: frozenset[int]) -> int:
    """What is kept for steps behind the last group alone."""
    steps = region.tape.steps
    last = max((number for number, step in enumerate(steps) if step.learned), default=-1)
    before = {b for step in steps[: last + 1] for b in _saved(region, step)}
    behind = {b for step in steps[last + 1 :] if step.differentiable for b in _saved(region, step)}
    return region.program.kept_bytes(frozenset(behind - before) & kept)


# second halves --------------------------------------------------------------------------------------------------------


def weight_half(region: Region, kept: frozenset[int], rule: GradientRule, *, given: int = 0) -> tuple[WeightStep, ...]:
    """A region's second half, where nothing is computed again for it.

    Args:
        kept: what stays between forward and backward.
        given: of what the region saves of its input, bytes that are somebody else's.
    """
    program, steps = region.program, region.tape.steps
    users: defaultdict[int, set[int]] = defaultdict(set)
    for number, step in enumerate(steps):
        for b in _saved(region, step) if step.differentiable else ():
            users[b].add(number)
    groups = {number: step for number, step in enumerate(steps) if step.learned and step.differentiable}
    wanted = {b for step in groups.values() for b in _saved(region, step)}
    there = {b for b in users if b in kept or b in wanted}
    gradients = _Gradients.of(region, kept, rule)
    source = region.buffers[next(iter(region.tape.sources))] if given else -1
    found = []
    for number, step in groups.items():
        gone = {b for b in there if number in users[b] and not (users[b] - {number})}
        for b in there:
            users[b].discard(number)
        there -= gone
        freed = sum(program.buffers[b].nbytes for b in gone) - (given if source in gone else 0)
        found.append(_step(step, rule, rise=step.workspace, change=-freed - gradients.drop(step)))
    return tuple(found)


def checkpointed_weight_half(regions: Sequence[Region], rule: GradientRule) -> tuple[WeightStep, ...]:
    """The second half of a checkpoint over ``regions``, of each of which all is computed again. See NOTE [ Checkpoints
    under two halves ].
    """
    frame = _Frame.of(regions)
    found: list[WeightStep] = []
    before = 0
    for place, region in enumerate(regions):
        gradients = _Gradients.of(region, region.program.saved_buffers(), rule)
        for number, step in enumerate(region.tape.steps):
            if not (step.learned and step.differentiable):
                continue
            unpacked = frame.nbytes
            frame.gone.add((place, number))
            now = (len(found) + 1) * frame.nbytes
            made = _made_bytes(step, rule.kept)
            rise = max(frame.computing - made, unpacked + step.workspace)
            found.append(_step(step, rule, rise=rise, change=now - before - gradients.drop(step)))
            before = now
    return tuple(found)


def _step(step: TapeOp, rule: GradientRule, *, rise: int, change: int) -> WeightStep:
    return WeightStep(
        rise=rise, made=_made_bytes(step, rule.kept), added=_made_bytes(step, rule.added), change=change
    )


def _made_bytes(step: TapeOp, dtype: str) -> int:
    return sum(w.numel for w in step.learned) * DTYPE_BYTES[dtype]


@dataclass(slots=True)
class _Gradients:
    """What groups keep of gradients, let go of with the last group that has it."""

    sizes: dict[int, int]
    owners: dict[int, set[int]]  # gradient -> groups, by the objects that their steps are

    @classmethod
    def of(cls, region: Region, kept: frozenset[int], rule: GradientRule) -> _Gradients:
        half = _Owned(region, kept, rule, frozenset())
        half.run(-1)
        return cls(half.sizes, half.groups)

    def drop(self, step: TapeOp) -> int:
        """Bytes that go with a group."""
        freed = 0
        for tensor, groups in self.owners.items():
            if id(step) in groups:
                groups.discard(id(step))
                freed += 0 if groups else self.sizes[tensor]
        return freed


class _Owned(_InputHalf):
    """It also says whose gradients are kept."""

    def __init__(self, region: Region, kept: frozenset[int], rule: GradientRule, stays: frozenset[int]) -> None:
        super().__init__(region, kept, rule, stays)
        self.groups: defaultdict[int, set[int]] = defaultdict(set)

    def _made(self, step: TapeOp, incoming: list[int]) -> list[Weight]:
        for tensor in incoming if step.learned else ():
            self.groups[tensor].add(id(step))
        return super()._made(step, incoming)


@dataclass(slots=True)
class _Frame:
    """A checkpoint's frame.

    Args:
        users: of each buffer that is computed again, by region, the steps that save it.
        gone: steps whose nodes have let go.
        computing: bytes at the worst moment of computing everything again.
    """

    regions: Sequence[Region]
    users: dict[tuple[int, int], set[tuple[int, int]]]
    gone: set[tuple[int, int]]
    computing: int

    @classmethod
    def of(cls, regions: Sequence[Region]) -> _Frame:
        users: defaultdict[tuple[int, int], set[tuple[int, int]]] = defaultdict(set)
        for place, region in enumerate(regions):
            for number, step in enumerate(region.tape.steps):
                for b in _saved(region, step) if step.differentiable else ():
                    if place or region.program.buffers[b].producer is not None:  # the frame has its input anyway
                        users[place, b].add((place, number))
        return cls(regions, dict(users), set(), _computing(regions, users))

    @property
    def nbytes(self) -> int:
        """What stays of one time that everything is computed again."""
        return sum(
            self.regions[place].program.buffers[b].nbytes
            for (place, b), users in self.users.items()
            if users - self.gone
        )


def _computing(regions: Sequence[Region], saved: dict[tuple[int, int], set[tuple[int, int]]]) -> int:
    """The most that is there while regions run once more, one after the other, up to what is saved last."""
    live = peak = 0
    stop = max((users for users in saved.values()), key=max, default=set())
    end = max(stop, default=(0, 0))
    for place, region in enumerate(regions):
        program = region.program
        last = {b: op.index for op in program.ops for b in (*op.inputs, *op.outputs)}
        for op in program.ops:
            if (place, op.index) >= end and not any((place, b) in saved for b in op.outputs):
                return peak
            live += sum(program.buffers[b].nbytes for b in op.outputs if program.buffers[b].producer == op.index)
            peak = max(peak, live)
            for b in {*op.inputs, *op.outputs}:
                done = last[b] == op.index and program.buffers[b].producer is not None
                if done and (place, b) not in saved and b not in program.outputs:
                    live -= program.buffers[b].nbytes
    return peak
