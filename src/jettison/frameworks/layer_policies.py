"""A plan's decisions by layer, an export target's policies for a layer, and the buffers that they keep.

NOTE [ What a checkpoint holds ]
`torch.utils.checkpoint` keeps all inputs of a layer and recomputes its Python: all ops up to the last one with a result
that backward needs, needed or not. Selective contexts also keep the outputs of chosen calls of ops, all of a call's
outputs or none, and do not recompute these calls. A plan that keeps one of two outputs, or drops an input that it can
recompute, therefore keeps more once exported.

NOTE [ What selective contexts must not save ]
Selective contexts return the saved result in place of a call. For in-place ops that is silently wrong, since the code
around them uses the tensor that they wrote to; and for ops that draw random numbers it advances the generator less than
the forward did, which later draws see. So no in-place op is saved, and of random ops all or none. Nor is the tensor
that an in-place op writes to, its first argument: torch raises if a saved tensor has changed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import count
from typing import Protocol

from jettison.ledger.program import Op, Program, Source
from jettison.search.auto_recompute import AutoForecast
from jettison.solve.checkpoint_policy import Full
from jettison.solve.plan import PolicyName
from jettison.spec.hardware import Hardware


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A plan's decision for one layer; ``kept`` and the subsets ``offloaded`` and ``packed`` are its program's buffers.

    Args:
        layer: name in a described model, or path in a live one.
        policy: name of the plan's policy.
        offloaded: offloaded to CPU. ``packed``: kept in fewer bytes.
        shared_bytes: of kept buffers that an earlier layer of the segment recomputes, so that they take no memory.
        packed_bytes: saved by packing.
        through: backward recomputes the entire layer, for the next layer of its segment.
        module: class of a live model's block, as ``module:Class``; ``bases``: its base classes, itself included.
    """

    layer: str
    policy: str
    program: Program
    kept: frozenset[int]
    offloaded: frozenset[int] = frozenset()
    packed: frozenset[int] = frozenset()
    stage: int = 0
    module: str = ""
    bases: tuple[str, ...] = ()
    shared_bytes: int = 0
    packed_bytes: int = 0
    through: bool = False

    @property
    def plain(self) -> bool:
        """Whether the layer runs under plain autograd."""
        return not self.offloaded and not self.packed and not self.program.recompute_set(self.kept)

    @property
    def whole(self) -> bool:
        """Whether the layer keeps only its inputs and what cannot be recomputed."""
        return not self.offloaded and not self.packed and self.kept <= Full().kept(self.program)

    @property
    def only_moves(self) -> bool:
        """Whether saved tensors are offloaded to CPU, and none recomputed."""
        return bool(self.offloaded) and not self.packed and not self.program.recompute_set(self.kept)

    @property
    def kept_bytes(self) -> int:
        """Bytes kept on the device between forward and backward."""
        return self.program.kept_bytes(self.kept - self.offloaded) - self.shared_bytes - self.packed_bytes

    @property
    def recomputed(self) -> tuple[str, ...]:
        """Names of saved tensors that backward recomputes, the largest first."""
        return tensor_names(self.program, self.program.saved_buffers() - self.kept)

    @property
    def words(self) -> str:
        """The policy, and all tensors that are recomputed and offloaded where the policy does not say it."""
        tensors = {"recomputed": self.recomputed, "offloaded": tensor_names(self.program, self.offloaded)}
        parts = [f"{verb} {', '.join(names)}" for verb, names in tensors.items() if names]
        return f"{self.policy} ({'; '.join(parts)})" if self.policy == PolicyName.PER_TENSOR and parts else self.policy

    @property
    def again(self) -> tuple[int, ...]:
        """Recomputed ops."""
        return tuple(range(len(self.program.ops))) if self.through else self.program.recompute_set(self.kept)


def tensor_names(program: Program, buffers: Iterable[int]) -> tuple[str, ...]:
    """Names of tensors, the largest first: the op that computes each and its module, or which input it is."""
    found = []
    for buffer in sorted((program.buffers[b] for b in buffers), key=lambda buffer: -buffer.nbytes):
        if buffer.producer is None:
            found.append(buffer.name or "input")
        else:
            op = program.ops[buffer.producer]
            found.append(f"{op.path} {op.name.removeprefix('aten.').removesuffix('.default')}".lstrip())
    return tuple(dict.fromkeys(found))


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A plan to export.

    Args:
        hardware: whose prices give the seconds.
        segments: runs of layers of which only the first keeps its input, by the names of the first and the last.
        root_freed_bytes: bytes that the plan drops outside the layers.
        described: the choice for a described run; None for a live model's plan.
        overhead_fraction: recomputation and stalls as a share of a step without them.
        asked: flags of the plan's document.
        expected_ratio: step time that is expected ÷ modelled, from published runs.
    """

    model: str
    plan_hash: str
    budget_bytes: int
    minimum_budget_bytes: int
    decisions: tuple[Decision, ...]
    hardware: Hardware
    segments: tuple[tuple[str, str], ...] = ()
    root_freed_bytes: int = 0
    described: AutoForecast | None = None
    overhead_fraction: float = 0.0
    asked: Mapping[str, object] = field(default_factory=dict)
    expected_ratio: float = 1.0

    @property
    def left_out(self) -> tuple[str, ...]:
        """Parts of the model's configuration that the plan's figures leave out."""
        return () if self.described is None else self.described.forecast.run.model.left_out

    @property
    def moves(self) -> bool:
        """Whether the plan offloads tensors of a layer to CPU."""
        return any(decision.offloaded for decision in self.decisions)

    @property
    def whole_layers(self) -> bool:
        """Whether each layer is either not checkpointed or fully recomputed."""
        return all(decision.plain or decision.whole for decision in self.decisions)

    @property
    def live(self) -> bool:
        """Whether it is the plan of a live module."""
        return self.described is None


class LayerAction(StrEnum):
    """Kind of a layer's policy."""

    KEEP = "none"
    CHECKPOINT = "full"
    SELECT = "selective"


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class OpCall:
    """The ``number``-th call of an op in a layer's forward, counted from 1."""

    op: str
    number: int


@dataclass(frozen=True, kw_only=True)
class LayerPolicy:
    """Policy of one layer: ``kept`` buffers of its program, those of them ``offloaded``, and recomputed ops."""

    decision: Decision
    action: LayerAction
    kept: frozenset[int]
    offloaded: frozenset[int] = frozenset()
    again: tuple[int, ...] = ()
    saves: tuple[OpCall, ...] = ()
    words: str = ""  # name of the policy in the target's terms
    regions: tuple[str, ...] = ()  # modules of the layer that are not recomputed
    extra_bytes: int = 0  # kept in addition to buffers of the program; below 0: saved by packing
    shared_bytes: int = 0  # of kept buffers that an earlier layer of the checkpoint recomputes

    @property
    def layer(self) -> str:
        """Name of the layer."""
        return self.decision.layer

    @property
    def program(self) -> Program:
        """Program of the layer."""
        return self.decision.program

    @property
    def kept_bytes(self) -> int:
        """Bytes kept on the device between forward and backward."""
        return self.program.kept_bytes(self.kept - self.offloaded) + self.extra_bytes - self.shared_bytes

    @property
    def recompute_flops(self) -> int:
        """FLOPs of recomputation."""
        return sum(self.program.ops[o].flops for o in self.again)


def kept_whole(decision: Decision) -> LayerPolicy:
    """Return the policy of plain autograd."""
    return LayerPolicy(decision=decision, action=LayerAction.KEEP, kept=decision.program.saved_buffers())


def checkpointed(decision: Decision) -> LayerPolicy:
    """Return the policy of one checkpoint around the layer."""
    program = decision.program
    return LayerPolicy(
        decision=decision, action=LayerAction.CHECKPOINT, kept=Full().kept(program), again=rerun(program)
    )


def checkpointed_together(decisions: Sequence[Decision]) -> Iterator[LayerPolicy]:
    """Yield the policies of one checkpoint around all layers: only the last is not recomputed to its end."""
    for place, decision in enumerate(decisions):
        policy = checkpointed(decision)
        if place:
            policy = replace(policy, shared_bytes=policy.kept_bytes)
        if place < len(decisions) - 1:
            policy = replace(policy, again=tuple(range(len(decision.program.ops))))
        yield policy


def checkpointed_on_host(decision: Decision) -> LayerPolicy:
    """Return the policy of a checkpoint whose inputs are offloaded to CPU."""
    return with_input_on_host(checkpointed(decision))


def as_the_plan_moves(decision: Decision, checkpoint: Callable[[Decision], LayerPolicy] = checkpointed) -> LayerPolicy:
    """Return the policy of a checkpoint, its inputs offloaded to CPU if the plan offloads tensors of the layer."""
    policy = checkpoint(decision)
    return with_input_on_host(policy) if decision.offloaded else policy


def with_input_on_host(policy: LayerPolicy) -> LayerPolicy:
    """Offload a checkpoint's inputs to CPU."""
    return replace(policy, offloaded=_inputs(policy), words="full, its input offloaded")


def _inputs(policy: LayerPolicy) -> frozenset[int]:
    buffers = policy.program.buffers
    return frozenset(b for b in policy.kept if buffers[b].source is Source.INPUT and not buffers[b].free)


def by_ops(decision: Decision) -> LayerPolicy:
    """Return the policy nearest to a plan that selective contexts can express: NOTE [ What a checkpoint holds ]."""
    if decision.plain:
        return kept_whole(decision)
    return saving(decision, (op.index for op in decision.program.ops if decision.kept.intersection(op.outputs)))


def by_ops_and_host(decision: Decision) -> LayerPolicy:
    """Return the policy of `by_ops` with the plan's offloading: NOTE [ What hooks move ] in frameworks/export.py."""
    if not decision.offloaded:
        return by_ops(decision)
    if not decision.program.recompute_set(decision.kept):
        policy = kept_whole(decision)
        moved = decision.offloaded & policy.kept
        return replace(policy, offloaded=moved, words="offload" if moved == policy.kept else "some offloaded")
    policy = by_ops(decision)
    moved = _inputs(policy) if _inputs(policy) & decision.offloaded else frozenset[int]()
    return replace(policy, offloaded=moved, words=f"{policy.action}, its input offloaded" if moved else "")


def saving(decision: Decision, wanted: Iterable[int]) -> LayerPolicy:
    """Return the policy of a selective checkpoint that saves the outputs of these ops, as far as they are `savable`."""
    program = decision.program
    saved = savable(program, frozenset(wanted))
    if not saved:
        return checkpointed(decision)
    outputs = frozenset(b for o in saved for b in program.ops[o].outputs if not program.buffers[b].free)
    given = Full().kept(program) - (random_states(program) if drawing(program) <= saved else frozenset())
    calls = op_calls(program)
    return LayerPolicy(
        decision=decision,
        action=LayerAction.SELECT,
        kept=outputs | given,
        again=rerun(program, saved),
        saves=tuple(sorted(calls[o] for o in saved)),
    )


def savable(program: Program, wanted: frozenset[int]) -> frozenset[int]:
    """Select the ops that may be saved: NOTE [ What selective contexts must not save ]."""
    written = {op.inputs[0] for op in program.ops if op.inputs and writes_in_place(op)}
    found = wanted - {op.index for op in program.ops if writes_in_place(op) or written.intersection(op.outputs)}
    return found if drawing(program) <= found else found - drawing(program)


def writes_in_place(op: Op) -> bool:
    """Whether the op's name ends in an underscore, or it is not torch's."""
    namespace, _, name = op.name.partition(".")
    return namespace == "jettison" or name.partition(".")[0].endswith("_")


def random_states(program: Program) -> frozenset[int]:
    """Buffers that hold random generator states."""
    return frozenset(buffer.index for buffer in program.buffers if buffer.source is Source.RANDOM)


def drawing(program: Program) -> frozenset[int]:
    """Ops that draw random numbers."""
    states = random_states(program)
    ops = (op for op in program.ops if states.intersection(op.inputs))
    return frozenset(op.index for op in ops if not op.name.startswith("jettison."))


def draws_again(policy: LayerPolicy) -> bool:
    """Whether recomputation draws the layer's random numbers a second time, from the forward's generator state."""
    calls = op_calls(policy.program)
    return policy.action is not LayerAction.KEEP and not {calls[o] for o in drawing(policy.program)} <= set(
        policy.saves
    )


def op_calls(program: Program) -> list[OpCall]:
    """Number the calls of each kind of op."""
    numbers = defaultdict[str, Iterator[int]](lambda: count(1))
    return [OpCall(op=op.name, number=next(numbers[op.name])) for op in program.ops]


def rerun(program: Program, saved: frozenset[int] = frozenset()) -> tuple[int, ...]:
    """Ops that a checkpoint recomputes, in order."""
    makers = [m for b in program.needed_buffers() if (m := program.buffers[b].producer) is not None]
    return tuple(o for o in range(max(makers, default=-1) + 1) if o not in saved)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Cost of one step; None if unknown.

    Args:
        layer_bytes: kept on the device by all layers, of one micro-batch on one rank.
        activation_bytes: kept between forward and backward, with the model's output, without parameters and buffers.
        recompute_seconds: at the prices of one accelerator without other work.
        step_seconds: of the entire step, known for described runs.
    """

    layer_bytes: int
    peak_bytes: int
    activation_bytes: int | None = field(default=None, metadata={"former": "held_bytes"})
    recompute_flops: int = 0
    recompute_seconds: float = 0.0
    step_seconds: float | None = None
    host_bytes: int = 0


class Pricer(Protocol):
    """Cost of a step under a plan and under its exports."""

    def plan(self) -> Cost:
        """Cost under the plan itself."""
        ...

    def cost(self, policies: Sequence[LayerPolicy], code: str = "") -> Cost:
        """Cost under an export.

        Args:
            code: Python that defines ``apply(model)``, which a live model's dry run executes.
        """
        ...
