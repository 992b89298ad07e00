"""A plan's decisions by layer, policies of a target for a layer, and the buffers that it then keeps.

NOTE [ What a checkpoint holds ]
`torch.utils.checkpoint` holds everything that a layer is given and runs the layer's Python again: all ops up to the
last one of which backward asks for something, whether their results are wanted or not. Under selective contexts the
outputs of chosen calls of ops are held as well, all of a call's outputs or none, and these calls are not run again. A
plan that keeps one of two outputs, or leaves out an input that it can compute, therefore holds more once exported.

NOTE [ What selective contexts must not save ]
Where a call is not run again its result is handed out in its place. That is wrong without an error for ops that write
in place, since the code around them goes on with the tensor that they wrote to; and it moves the random stream on less
than the forward did, for whoever draws next. So no op in place is saved, and of those that draw all or none. Nor is
what such an op writes to, its first argument: torch refuses to hand out what has changed since it was saved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol

from jettison.core.units import listed
from jettison.ledger.program import Op, Program, Source
from jettison.predict.auto_recompute import AutoForecast
from jettison.solve.plan import PolicyWord
from jettison.solve.policy import Full
from jettison.spec.hardware import Hardware

MOST_NAMED = 4
"""Tensors named in a sentence; JSON has all."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What a plan does with one layer; ``kept`` and, of these, ``moved`` and ``packed`` are buffers of its program.

    Args:
        layer: its number's name in a description, or its path in a live model.
        policy: the plan's word for it.
        shared_bytes: of what it keeps, what nobody holds: a layer before it in its segment makes it again.
        packed_bytes: of what it keeps, what is spared by packing.
        through: backward runs all of it again, for the next layer of its segment.
        module: class of a live model's block, as ``module:Class``; ``bases`` are those that it is made of, itself too.
    """

    layer: str
    policy: str
    program: Program
    kept: frozenset[int]
    moved: frozenset[int] = frozenset()
    packed: frozenset[int] = frozenset()
    stage: int = 0
    module: str = ""
    bases: tuple[str, ...] = ()
    shared_bytes: int = 0
    packed_bytes: int = 0
    through: bool = False

    @property
    def plain(self) -> bool:
        """Autograd's own saved tensors stay where they are."""
        return not self.moved and not self.packed and not self.program.recompute_set(self.kept)

    @property
    def whole(self) -> bool:
        """Nothing stays but what the layer is given, and what cannot be computed again."""
        return not self.moved and not self.packed and self.kept <= Full().kept(self.program)

    @property
    def only_moves(self) -> bool:
        """Some of what autograd saves waits on the host, and nothing is computed again."""
        return bool(self.moved) and not self.packed and not self.program.recompute_set(self.kept)

    @property
    def kept_bytes(self) -> int:
        """On the device, between forward and backward."""
        return self.program.kept_bytes(self.kept - self.moved) - self.shared_bytes - self.packed_bytes

    @property
    def recomputed(self) -> tuple[str, ...]:
        """Names of saved tensors that backward recomputes, the largest first."""
        return tensor_names(self.program, self.program.saved_buffers() - self.kept)

    @property
    def words(self) -> str:
        """The policy, and which tensors are recomputed and offloaded where the policy does not say it."""
        tensors = {"recomputed": self.recomputed, "offloaded": tensor_names(self.program, self.moved)}
        parts = [f"{verb} {listed(names, MOST_NAMED)}" for verb, names in tensors.items() if names]
        return f"{self.policy} ({'; '.join(parts)})" if self.policy == PolicyWord.MIXED and parts else self.policy

    @property
    def again(self) -> tuple[int, ...]:
        """Ops that backward runs a second time."""
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
        hardware: whose prices seconds are stated at.
        segments: runs of layers of which only the first holds its input, by the names of the first and the last.
        root_freed_bytes: what the plan drops of the part around the layers.
        described: the choice for a described run; None for a live model's plan.
        predicted: what the plan's document says of it, by key.
        asked: what it was made from, by flag, as the document has it.
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
    predicted: Mapping[str, float] = field(default_factory=dict)
    asked: Mapping[str, object] = field(default_factory=dict)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Parts of the model's configuration that the plan's figures leave out."""
        return () if self.described is None else self.described.forecast.run.model.left_out

    @property
    def moves(self) -> bool:
        """Something of a layer waits on the host."""
        return any(decision.moved for decision in self.decisions)

    @property
    def whole_layers(self) -> bool:
        """Each layer is left alone, or computed again as a whole."""
        return all(decision.plain or decision.whole for decision in self.decisions)

    @property
    def live(self) -> bool:
        """It was made for a module, and not for a description."""
        return self.described is None


class LayerAction(StrEnum):
    """One word for a layer."""

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
    """What is done with one layer: ``kept`` stays of its program's buffers, ``moved`` of these on the host, and
    backward runs the ops ``again`` a second time.
    """

    decision: Decision
    action: LayerAction
    kept: frozenset[int]
    moved: frozenset[int] = frozenset()
    again: tuple[int, ...] = ()
    saves: tuple[OpCall, ...] = ()
    words: str = ""  # a target's own
    regions: tuple[str, ...] = ()  # modules of the layer that stay
    beside_bytes: int = 0  # held although it is no buffer of the program; below 0: spared by packing
    shared_bytes: int = 0  # of what is kept, what nobody holds: a layer before it in its checkpoint makes it again

    @property
    def layer(self) -> str:
        """Its name."""
        return self.decision.layer

    @property
    def program(self) -> Program:
        """Program of the layer."""
        return self.decision.program

    @property
    def kept_bytes(self) -> int:
        """On the device, between forward and backward."""
        return self.program.kept_bytes(self.kept - self.moved) + self.beside_bytes - self.shared_bytes

    @property
    def recompute_flops(self) -> int:
        """FLOPs of recomputation."""
        return sum(self.program.ops[o].flops for o in self.again)


def kept_whole(decision: Decision) -> LayerPolicy:
    """Plain autograd."""
    return LayerPolicy(decision=decision, action=LayerAction.KEEP, kept=decision.program.saved_buffers())


def checkpointed(decision: Decision) -> LayerPolicy:
    """The layer is a checkpoint of its own."""
    program = decision.program
    return LayerPolicy(
        decision=decision, action=LayerAction.CHECKPOINT, kept=Full().kept(program), again=rerun(program)
    )


def checkpointed_together(decisions: Sequence[Decision]) -> Iterator[LayerPolicy]:
    """The layers are one checkpoint: it holds what the first is given, and runs all but the last to their ends."""
    for place, decision in enumerate(decisions):
        policy = checkpointed(decision)
        if place:
            policy = replace(policy, shared_bytes=policy.kept_bytes)
        if place < len(decisions) - 1:
            policy = replace(policy, again=tuple(range(len(decision.program.ops))))
        yield policy


def checkpointed_on_host(decision: Decision) -> LayerPolicy:
    """The same, and what it is given waits on the host."""
    return with_input_on_host(checkpointed(decision))


def as_the_plan_moves(decision: Decision) -> LayerPolicy:
    """A checkpoint, with what it is given on the host where the plan moves something of the layer."""
    return checkpointed_on_host(decision) if decision.moved else checkpointed(decision)


def with_input_on_host(policy: LayerPolicy) -> LayerPolicy:
    """A checkpoint, with what it is given on the host."""
    return replace(policy, moved=_inputs(policy), words="full, its input on the host")


def _inputs(policy: LayerPolicy) -> frozenset[int]:
    buffers = policy.program.buffers
    return frozenset(b for b in policy.kept if buffers[b].source is Source.INPUT and not buffers[b].free)


def by_ops(decision: Decision) -> LayerPolicy:
    """The nearest to a plan that selective contexts can say: see NOTE [ What a checkpoint holds ]."""
    if decision.plain:
        return kept_whole(decision)
    return saving(decision, (op.index for op in decision.program.ops if decision.kept.intersection(op.outputs)))


def by_ops_and_host(decision: Decision) -> LayerPolicy:
    """The same, and what the plan moves waits on the host where hooks see it: see NOTE [ What hooks move ] in
    frameworks/text.py.
    """
    if not decision.moved:
        return by_ops(decision)
    if not decision.program.recompute_set(decision.kept):
        policy = kept_whole(decision)
        moved = decision.moved & policy.kept
        return replace(policy, moved=moved, words="offload" if moved == policy.kept else "some on the host")
    policy = by_ops(decision)
    moved = _inputs(policy) if _inputs(policy) & decision.moved else frozenset[int]()
    return replace(policy, moved=moved, words=f"{policy.action}, its input on the host" if moved else "")


def saving(decision: Decision, wanted: Iterable[int]) -> LayerPolicy:
    """The layer is a checkpoint that saves the outputs of these ops, but for those that must not be."""
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
    """Of these ops: see NOTE [ What selective contexts must not save ]."""
    written = {op.inputs[0] for op in program.ops if op.inputs and writes_in_place(op)}
    found = wanted - {op.index for op in program.ops if writes_in_place(op) or written.intersection(op.outputs)}
    return found if drawing(program) <= found else found - drawing(program)


def writes_in_place(op: Op) -> bool:
    """By the convention for names of ops; what stands for no op of torch's counts as well."""
    namespace, _, name = op.name.partition(".")
    return namespace == "jettison" or name.partition(".")[0].endswith("_")


def random_states(program: Program) -> frozenset[int]:
    """Buffers that are states of random numbers."""
    return frozenset(buffer.index for buffer in program.buffers if buffer.source is Source.RANDOM)


def drawing(program: Program) -> frozenset[int]:
    """Ops that draw random numbers."""
    states = random_states(program)
    ops = (op for op in program.ops if states.intersection(op.inputs))
    return frozenset(op.index for op in ops if not op.name.startswith("jettison."))


def draws_again(policy: LayerPolicy) -> bool:
    """Backward draws random numbers of the layer a second time, from where the forward did."""
    calls = op_calls(policy.program)
    return policy.action is not LayerAction.KEEP and not {calls[o] for o in drawing(policy.program)} <= set(
        policy.saves
    )


def op_calls(program: Program) -> list[OpCall]:
    """By op of a program, which call of its kind it is."""
    seen: Counter[str] = Counter()
    found = []
    for op in program.ops:
        seen[op.name] += 1
        found.append(OpCall(op=op.name, number=seen[op.name]))
    return found


def rerun(program: Program, saved: frozenset[int] = frozenset()) -> tuple[int, ...]:
    """Ops that a checkpoint runs again, in order."""
    makers = [m for b in program.needed_buffers() if (m := program.buffers[b].producer) is not None]
    return tuple(o for o in range(max(makers, default=-1) + 1) if o not in saved)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Cost of one step. None where it is not known.

    Args:
        layer_bytes: kept on the device by all layers, of one micro-batch on one rank.
        held_bytes: alive between forward and backward beside what was there before, the model's output included.
        recompute_seconds: at the prices of one accelerator, with nothing else on it.
        step_seconds: of the whole step, where a described run says what that is.
    """

    layer_bytes: int
    peak_bytes: int
    held_bytes: int | None = None
    recompute_flops: int = 0
    recompute_seconds: float = 0.0
    step_seconds: float | None = None
    host_bytes: int = 0


class Pricer(Protocol):
    """Says what a step costs. Lives where the plan can be worked out again."""

    def plan(self) -> Cost:
        """Under the plan itself."""
        ...

    def cost(self, policies: Sequence[LayerPolicy], code: str = "") -> Cost:
        """Under what was exported.

        Args:
            code: Python that defines ``apply(model)``; where there is a module, this is what runs.
        """
        ...
