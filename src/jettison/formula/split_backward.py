"""A backward in two halves, as ``torch.distributed.pipelining`` splits it, replayed in bytes of one rank.

NOTE [ Two halves ]
``torch/distributed/pipelining/_backward.py``, of 2.13. The first half (``stage_backward_input``) differentiates a
stage's output by its input, with ``retain_graph=True``: no node frees its saved tensors. A *group* is the weights that
one op reads, and that op's node, found from the weight upwards (``get_param_groups``); a prehook keeps the gradient
that the node receives (``param_group["grads"]``). At the end the stage's outputs are detached, which frees the nodes
after the last group: of a loss all of its saved tensors.

The second half (``stage_backward_weight``) takes group after group, in the order of the module's parameters. The node
runs a second time for its weights alone, with ``retain_graph=False``, and frees its saved tensors; then the group's
gradients are freed. A node without a weight does not run, and its saved tensors stay until the last group that it leads
to is done, so to the end. New gradients are referenced (``dweights``) until the next group's are made.

The first stage of a model has no input to differentiate by. Its first half does nothing, and its second is the full
backward (``stage.py``, ``backward_one_chunk``).

NOTE [ Checkpoints under two halves ]
``torch/utils/checkpoint.py``, not reentrant. A checkpoint recomputes everything once for each call of
``torch.autograd.grad`` that unpacks any of it (``is_recomputed[gid]``): once in the first half, and once for each group
of the second. An unpacked tensor is freed at once with its handle. In the first half that is everything. In the second
half only one node unpacks, and tensors recomputed for the others stay in ``frame.recomputed[gid]`` as long as the node
has its holder: for nodes without a weight until the end. So a segment of g groups ends up with g copies of what such
nodes save. Nothing after the last saved tensor is recomputed (``early_stop``).

NOTE [ Policies under two halves ]
A selective checkpoint of torch's cannot be differentiated twice. If a policy keeps something other than the two
above, `jettison.runtime` carries it out (`frame.is_unpacked_again`): recomputed tensors that a node with a weight saved
are kept until the node's second half, and nothing is recomputed twice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jettison.core.dtypes import DTYPE_BYTES
from jettison.formula.liveness import Backward
from jettison.formula.region import Region
from jettison.formula.tape import TapeOp, Weight
from jettison.memory.stage_unit import WeightStep
from jettison.spec.precision import GradientRule


@dataclass(frozen=True, kw_only=True, slots=True)
class InputHalf:
    """Bytes of a region's first half on one rank.

    Args:
        gradients: gradients that the groups keep; ``incoming``: the part that is the output's gradient.
    """

    peak: int  # above the bytes before it, with the gradient of the region's output
    gradients: int
    incoming: int
    detached: int  # saved tensors after which no op has a weight


def input_half(
    region: Region,
    kept: frozenset[int],
    rule: GradientRule,
    *,
    stays: frozenset[int] = frozenset(),
    lets_go: bool = False,
) -> InputHalf:
    """Replay a region's first half. See NOTE [ Two halves ].

    Args:
        kept: buffers of `region.program` that exist when it begins.
        stays: the buffers that stay for the second half, if others are freed.
        lets_go: free kept buffers after their last reader, as recomputed ones are.
    """
    half = _InputReplay(region, kept, rule, stays, lets_go)
    half.run(-1)
    retained = {tensor: half.sizes[tensor] for tensor in half.owned}
    steps = region.tape.steps
    last = max((number for number, step in enumerate(steps) if step.learned), default=-1)
    before = {b for step in steps[: last + 1] for b in _saved(region, step)}
    behind = {b for step in steps[last + 1 :] if step.differentiable for b in _saved(region, step)}
    return InputHalf(
        peak=half.peak,
        gradients=sum(retained.values()),
        incoming=retained.get(0, 0),
        detached=region.program.kept_bytes(frozenset(behind - before) & kept),
    )


class _InputReplay(Backward):
    """The replay of a first half: no weight gradients, and no kept buffer is freed."""

    def __init__(
        self, region: Region, kept: frozenset[int], rule: GradientRule, stays: frozenset[int], lets_go: bool
    ) -> None:
        super().__init__(region, kept, rule)
        self.stays, self.lets_go = stays, lets_go
        self.owned: defaultdict[int, set[int]] = defaultdict(set)  # kept gradient -> groups, by the ids of their steps

    def _runs(self, step: TapeOp) -> bool:
        return step.differentiable and any(v.grad for v in step.inputs)

    def _workspace(self, step: TapeOp) -> int:
        return 0 if step.learned else step.workspace  # the workspace of the weights' half

    def _made(self, step: TapeOp, incoming: list[int]) -> list[Weight]:
        if step.learned:
            for tensor in incoming:
                self.owners[tensor] += tensor not in self.owned
                self.owned[tensor].add(id(step))
        return []

    def _free(self, b: int) -> None:
        if b not in self.stays and (self.lets_go or b in self.computed):
            super()._free(b)


def _groups(region: Region) -> list[tuple[int, TapeOp]]:
    """Steps that read trained weights, with their numbers, in the order of the module's parameters.

    That is the order of the forward, except for a layer's RMS norms, which are declared after the block that they
    precede in transformers (``models/llama/modeling_llama.py``, ``LlamaDecoderLayer``;
    ``models/qwen3/modeling_qwen3.py``, ``Qwen3Attention``) and torchtitan (``models/llama3/model/model.py``,
    ``TransformerBlock``). Layer norms come first (``models/gpt2/modeling_gpt2.py``, ``GPT2Block``). The order matters
    little, except under checkpoints.
    """
    steps = region.tape.steps
    found = [(number, step) for number, step in enumerate(steps) if step.learned and step.differentiable]
    if not region.output.shape:  # a loss: the model's last norm is listed before its head
        return found
    first: dict[str, int] = {}
    for number, step in found:
        first.setdefault(step.path.partition(".")[0], number)

    def place(each: tuple[int, TapeOp]) -> tuple[bool, int, bool, int]:
        number, step = each
        module, _, inner = step.path.partition(".")
        last = step.path.endswith("norm") and "layer_norm" not in step.name
        return last and not inner, first[module], last, number

    return sorted(found, key=place)


def computing_groups(region: Region) -> int:
    """Number of groups for which a checkpoint is recomputed: those whose node has saved anything."""
    return sum(bool(step.saved) for _, step in _groups(region))


def read_by_groups(region: Region) -> frozenset[int]:
    """Buffers that a second half reads."""
    return frozenset(b for _, step in _groups(region) for b in _saved(region, step))


def _saved(region: Region, step: TapeOp) -> Iterator[int]:
    """Buffers that a step saves and that have bytes."""
    for each in step.saved:
        buffer = region.buffers[each.value.storage]
        if not region.program.buffers[buffer].free:
            yield buffer


# second halves --------------------------------------------------------------------------------------------------------


def weight_half(
    region: Region, kept: frozenset[int], rule: GradientRule, *, last: bool = False, given: int = 0
) -> tuple[WeightStep, ...]:
    """Steps of a region's second half without recomputation.

    Args:
        kept: buffers held between forward and backward.
        last: the region's output is the stage's output.
        given: bytes of the saved input that another region owns.
    """
    groups = _groups(region)
    until = _until(region, groups, last=last)
    there = kept | read_by_groups(region)
    freed: defaultdict[int, int] = defaultdict(int)
    for b, place in until.items():
        if b in there:
            freed[place] += region.program.buffers[b].nbytes
    if given:
        freed[until.get(region.buffers[next(iter(region.tape.sources))], len(groups))] -= given
    gradients = _GroupGradients.of(region, rule, last=last)
    return tuple(
        _step(step, rule, rise=step.workspace, released=freed[place] + gradients.drop(step))
        for place, (_, step) in enumerate(groups)
    )


def checkpointed_weight_half(regions: Sequence[Region], rule: GradientRule, *, last: bool) -> tuple[WeightStep, ...]:
    """The second half of a checkpoint over ``regions``. See NOTE [ Checkpoints under two halves ].

    Args:
        last: the last region's output is the stage's output.
    """
    groups = [_groups(region) for region in regions]
    total = sum(map(len, groups))
    sizes: defaultdict[int, int] = defaultdict(int)  # recomputed bytes by the group that frees them
    saved: set[tuple[int, int]] = set()
    begin = 0
    for place, (region, own) in enumerate(zip(regions, groups, strict=True)):
        top = last and place == len(regions) - 1
        for b, end in _until(region, own, last=top).items():
            if place or region.program.buffers[b].producer is not None:  # the frame holds its input anyway
                sizes[begin + end if end < len(own) else total] += region.program.buffers[b].nbytes
                saved.add((place, b))
        begin += len(own)
    computing = _computing(regions, saved)
    found: list[WeightStep] = []
    there, before = sum(nbytes for place, nbytes in sizes.items() if place >= 0), 0
    for place, (region, own) in enumerate(zip(regions, groups, strict=True)):
        gradients = _GroupGradients.of(region, rule, last=last and place == len(regions) - 1)
        for _, step in own:
            rise = max(computing - _made_bytes(step, rule.kept), there + step.workspace)
            there -= sizes[len(found)]
            now = (len(found) + 1) * there
            found.append(_step(step, rule, rise=rise, released=gradients.drop(step), computed=now - before))
            before = now
    return tuple(found)


def _until(region: Region, groups: Sequence[tuple[int, TapeOp]], *, last: bool) -> dict[int, int]:
    """By saved buffer, the position of the group that frees it, or the number of groups if none does.

    A node with a weight frees it when it runs, any other when all groups that it leads to are done. Buffers at the
    stage's end that lead to no group are freed before the second half begins.
    """
    places = {number: place for place, (number, _) in enumerate(groups)}
    steps, end = region.tape.steps, len(groups)
    behind: dict[int, int] = {}  # storage -> the last group that reads it, or reads a result of it
    found: defaultdict[int, int] = defaultdict(lambda: -1)
    for number in reversed(range(len(steps))):
        step = steps[number]
        if not step.differentiable:
            continue
        leads = max((behind.get(v.storage, -1) for v in step.outputs), default=-1)
        leads = max(leads, places.get(number, -1))
        for v in step.inputs:
            behind[v.storage] = max(behind.get(v.storage, -1), leads)
        lets_go = places.get(number, leads if last else end)
        for b in _saved(region, step):
            found[b] = max(found[b], lets_go)
    return dict(found)


def _step(step: TapeOp, rule: GradientRule, *, rise: int, released: int, computed: int = 0) -> WeightStep:
    made, added = _made_bytes(step, rule.kept), _made_bytes(step, rule.added)
    return WeightStep(rise=rise, made=made, added=added, released=released, computed=computed)


def _made_bytes(step: TapeOp, dtype: str) -> int:
    return sum(w.gradient_numel for w in step.learned) * DTYPE_BYTES[dtype]


@dataclass(slots=True)
class _GroupGradients:
    """Gradients that groups keep, each freed with its last group."""

    sizes: dict[int, int]
    owners: dict[int, set[int]]  # gradient -> groups, by the ids of their steps

    @classmethod
    def of(cls, region: Region, rule: GradientRule, *, last: bool) -> _GroupGradients:
        """Args: last: the gradient of the region's output belongs to another region."""
        half = _InputReplay(region, region.program.saved_buffers(), rule, frozenset(), False)
        half.run(-1)
        return cls(half.sizes | ({0: 0} if last else {}), half.owned)

    def drop(self, step: TapeOp) -> int:
        """Bytes freed with a group."""
        freed = 0
        for tensor, groups in self.owners.items():
            if id(step) in groups:
                groups.discard(id(step))
                freed += 0 if groups else self.sizes[tensor]
        return freed


def _computing(regions: Sequence[Region], saved: set[tuple[int, int]]) -> int:
    """Most bytes while regions are recomputed in order, up to the last saved tensor.

    Args:
        saved: buffers, each with the number of its region, that stay until the end.
    """
    live = peak = 0
    waits = set(saved)
    for place, region in enumerate(regions):
        program = region.program
        last = region.last_ops
        for op in program.ops:
            if not waits:
                return peak
            live += sum(program.buffers[b].nbytes for b in op.outputs if program.buffers[b].producer == op.index)
            peak = max(peak, live)
            waits -= {(place, b) for b in op.outputs}
            for b in {*op.inputs, *op.outputs}:
                done = last[b] == op.index and program.buffers[b].producer is not None
                if done and (place, b) not in saved and b not in program.outputs:
                    live -= program.buffers[b].nbytes
        waits = {(number, b) for number, b in waits if number > place}
    return peak
