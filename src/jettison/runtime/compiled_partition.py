"""Saved tensors of a compiled block: a policy's choice, as marks for torch's min-cut partitioner.

Some of the values that backward needs are saved, and the others are recomputed from them. A `CheckpointPolicy` chooses,
on the forward of the joint graph as a program (`joint_graph`); nodes get torch's marks for it (the ones that selective
checkpointing uses), and torch's min-cut partitioner splits the graph accordingly. Seeds are never recomputed, so that a
recomputed mask is the one that forward had.

Imported only where something is compiled: it needs Inductor.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch import config as functorch_config
from torch._functorch.compile_utils import fx_graph_cse
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.utils.checkpoint import CheckpointPolicy as Mark

from jettison.capture.op_traits import DISCRETE, is_collective, op_cost
from jettison.core.dtypes import dtype_name
from jettison.ledger.program import Anchor, Buffer, Op, Program, Slot, Source
from jettison.solve.checkpoint_policy import CheckpointPolicy

_OWN_CODE = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Split:
    """A partitioned graph's forward, and what it gives autograd to save, in order, by buffer of the program or None."""

    program: Program
    kept: frozenset[int]
    saved: tuple[int | None, ...]


_SEEN: ContextVar[list[Split] | None] = ContextVar("splits that are observed", default=None)


@contextmanager
def watching_splits() -> Iterator[list[Split]]:
    """Collect every graph that is partitioned in this thread within the context."""
    found: list[Split] = []
    token = _SEEN.set(found)
    try:
        yield found
    finally:
        _SEEN.reset(token)


@dataclass(frozen=True)
class Partition(CustomPartitionerFn):
    """Partition a joint graph by a policy; ``none``: torch's default. Inductor copies it, and caches by `uuid`."""

    policy: CheckpointPolicy

    def uuid(self) -> str:
        """Cache key that differs for another decision, and for another version of this code."""
        text = repr(
            [(name, sorted(v) if isinstance(v, frozenset) else repr(v)) for name, v in sorted(_fields(self.policy))]
        )
        return hashlib.sha256(f"{_OWN_CODE} {type(self.policy).__name__} {text}".encode()).hexdigest()

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Return forward and backward."""
        gm.graph.eliminate_dead_code()
        gm.graph = fx_graph_cse(gm.graph)  # torch's partitioner would do so: from here on nodes keep their identity
        static = kwargs.get("static_lifetime_input_indices") or ()
        joint = joint_program(gm.graph, kwargs["num_fwd_outputs"], static)
        if self.policy.word != "none":
            mark(joint, self.policy.kept(joint.program))
        with self._undisturbed():
            forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        _tag(forward, backward)
        seen = _SEEN.get()
        if seen is not None:
            buffers = {node.name: b for node, b in joint.buffer_of.items()}
            (output,) = forward.graph.find_nodes(op="output")
            returned = output.args[0][kwargs["num_fwd_outputs"] :]
            saved = tuple(buffers.get(node.name) for node in returned if isinstance(node, fx.Node))
            kept = frozenset(b for b in saved if b is not None)
            seen.append(Split(program=joint.program, kept=kept, saved=saved))
        return forward, backward

    def _undisturbed(self) -> AbstractContextManager[None]:
        """Disable torch's own activation budget (a share of the saved bytes)."""
        if self.policy.word == "none":
            return nullcontext()
        return functorch_config.patch(activation_memory_budget=1.0)


def _fields(policy: CheckpointPolicy) -> list[tuple[str, Any]]:
    names: Any = getattr(type(policy), "__dataclass_fields__", {})
    return [(name, getattr(policy, name)) for name in names]


def mark(joint: JointProgram, kept: frozenset[int]) -> None:
    """Mark nodes for torch's partitioner, to be saved or to be recomputed."""
    program = joint.program
    again = set(program.recompute_set(kept))
    for op, node in zip(program.ops, joint.makers, strict=True):
        if op.index in again:
            node.meta["recompute"] = Mark.MUST_RECOMPUTE
            if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                node.target = _Drawless(node.target)
        elif kept.intersection(op.outputs) or op.anchor is not None:
            node.meta["recompute"] = Mark.MUST_SAVE


class _Drawless:
    """Fused attention whose dropout is 0, without the tag of random ops.

    For each recomputed op with that tag, torch saves the random state and sets it in backward: 5,056 bytes on a CPU,
    and separate generators on a GPU. Ops that draw are never recomputed here.
    """

    tags = ()

    def __init__(self, op: Any) -> None:
        self.op = op

    def __getattr__(self, name: str) -> Any:
        return getattr(self.op, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.op(*args, **kwargs)


def _tag(*modules: fx.GraphModule) -> None:
    for module in modules:
        for node in module.graph.nodes:
            if isinstance(node.target, _Drawless):
                node.target = node.target.op
        module.recompile()


# joint graph ----------------------------------------------------------------------------------------------------------
#
# A compiled block's joint graph of forward and backward as a `Program`: the values that backward needs, and costs
# NOTE [ What a fused op costs ]
# Inductor fuses elementwise ops into the kernels that read them, so that recomputing one costs next to nothing, as its
# inputs are read anyway. It is charged a small share of its output bytes, and so is a mask that is drawn from its seed:
# reading it takes longer (GPT-2's, on a CPU). A reduction is charged all that it reads; a matmul its FLOPs. These only
# rank candidates for recomputation. Choices are measured on the compiled block (`dryrun.compiled_blocks`).


FUSED_SHARE = 8  # a fused op is charged for one in this many of its output bytes
SIZE_HINT = 4096  # elements of a dim that no run has a size for


@dataclass(frozen=True, kw_only=True)
class JointProgram:
    """A forward as a program, and its buffers' nodes in the graph.

    Args:
        makers: by op, its node.
        buffer_of: by node, its buffer, for every node of the forward that is a tensor.
    """

    program: Program
    makers: tuple[fx.Node, ...]
    buffer_of: Mapping[fx.Node, int]


def joint_program(graph: fx.Graph, num_fwd_outputs: int, static_inputs: Sequence[int]) -> JointProgram:
    """Read a joint graph. ``static_inputs``: positions of parameters and buffers among the forward's inputs."""
    reader = _Reader()
    behind = _behind_tangents(graph)
    primals = [node for node in graph.nodes if node.op == "placeholder" and str(node.target).startswith("primals")]
    static = {node for place, node in enumerate(primals) if place in set(static_inputs)}
    for node in graph.nodes:
        if node in behind or node.op == "output":
            continue
        if node.op == "placeholder":
            reader.given(node, free=node in static or node not in primals)
        else:
            reader.computed(node)
    results = _results(graph)
    forward, backward = results[:num_fwd_outputs], results[num_fwd_outputs:]
    asked = [node for node in reader.buffer_of if any(user in behind for user in node.users)]
    asked += [node for node in backward if node in reader.buffer_of and node not in asked]
    return reader.program(asked, [node for node in forward if node in reader.buffer_of])


def _behind_tangents(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that depend on the gradients of the outputs."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            if str(node.target).startswith("tangents") or "bwd" in str(node.target):
                found.add(node)
        elif node.op != "output" and not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _results(graph: fx.Graph) -> list[Any]:
    (output,) = graph.find_nodes(op="output")
    return list(torch.utils._pytree.tree_leaves(output.args[0]))


@dataclass(kw_only=True)
class _Reader:
    """Collects buffers and ops in the order of the graph."""

    buffers: list[Buffer] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    makers: list[fx.Node] = field(default_factory=list)
    buffer_of: dict[fx.Node, int] = field(default_factory=dict)
    op_of: dict[fx.Node, int] = field(default_factory=dict)  # op of nodes that return several tensors

    def given(self, node: fx.Node, *, free: bool) -> None:
        """Add an argument."""
        if isinstance(node.meta.get("val"), Tensor):
            source = Source.PARAMETER if free else Source.INPUT
            self._buffer(node, source, name=node.name, free=free)

    def computed(self, node: fx.Node) -> None:
        """Add a call of the forward."""
        value = node.meta.get("val")
        if node.target is operator.getitem:
            self._part(node)
        elif _is_view(node):
            self._same(node, node.all_input_nodes[0])
        elif isinstance(value, Tensor | tuple | list) and node.op == "call_function":
            self._op(node, value)

    def program(self, asked: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> JointProgram:
        """Return the program that was read."""
        slots = tuple(
            Slot(
                index=i,
                buffer=self.buffer_of[node],
                shape=tuple(map(_hint, node.meta["val"].shape)),
                dtype=dtype_name(node.meta["val"].dtype),
                op=str(node.target) if node.op == "call_function" else "",
            )
            for i, node in enumerate(asked)
        )
        program = Program(
            buffers=tuple(self.buffers),
            ops=tuple(self.ops),
            slots=slots,
            outputs=tuple(dict.fromkeys(self.buffer_of[node] for node in outputs)),
        )
        return JointProgram(program=program, makers=tuple(self.makers), buffer_of=self.buffer_of)

    def _op(self, node: fx.Node, value: Any) -> None:
        index = len(self.ops)
        inputs = tuple(dict.fromkeys(self._inputs(node)))
        made: tuple[int, ...] = ()
        if isinstance(value, Tensor):
            made = (self._buffer(node, Source.OP, producer=index),)
        flops, moved = _cost(node, value)
        self.op_of[node] = index
        self.makers.append(node)
        self.ops.append(
            Op(
                index=index,
                name=str(node.target),
                inputs=inputs,
                outputs=made,
                flops=flops,
                bytes_moved=moved,
                anchor=_anchor(node),
            )
        )

    def _part(self, node: fx.Node) -> None:
        """Add one of several results."""
        (several,) = node.all_input_nodes
        if several in self.buffer_of:  # parts of one tensor
            self._same(node, several)
        elif several in self.op_of and isinstance(node.meta.get("val"), Tensor):
            index = self.op_of[several]
            b = self._buffer(node, Source.OP, producer=index)
            self.ops[index] = replace(self.ops[index], outputs=(*self.ops[index].outputs, b))

    def _same(self, node: fx.Node, like: fx.Node) -> None:
        if like in self.buffer_of:
            self.buffer_of[node] = self.buffer_of[like]

    def _buffer(
        self, node: fx.Node, source: Source, *, producer: int | None = None, name: str = "", free: bool = False
    ) -> int:
        index = self.buffer_of[node] = len(self.buffers)
        self.buffers.append(
            Buffer(
                index=index,
                nbytes=nbytes_of(node.meta["val"]),
                source=source,
                producer=producer,
                name=name,
                keepable=True,
                free=free,
            )
        )
        return index

    def _inputs(self, node: fx.Node) -> Iterator[int]:
        for given in node.all_input_nodes:
            if given in self.buffer_of:
                yield self.buffer_of[given]
            elif given in self.op_of:
                yield from self.ops[self.op_of[given]].outputs


def _is_view(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is None or not node.all_input_nodes:
        return False
    if str(node.target).startswith(("aten.reshape", "aten._unsafe_view", "prims.broadcast_in_dim")):
        return True
    return any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)


def _anchor(node: fx.Node) -> Anchor | None:
    """Reason why a node may not be recomputed. Masks are drawn from seeds, and only the seeds are saved."""
    func = node.target
    if not isinstance(func, torch._ops.OpOverload):
        return Anchor.OPAQUE  # higher-order operators, the user's kernels
    if torch.Tag.nondeterministic_seeded in func.tags and _draws(node):
        return Anchor.GENERATOR
    if is_collective(func) or func.namespace in ("_c10d_functional", "c10d_functional"):
        return Anchor.COLLECTIVE
    if func._schema.is_mutable:
        return Anchor.MUTATED
    if str(func.overloadpacket).removeprefix("aten.") in DISCRETE:
        return Anchor.DISCRETE
    return None


def _draws(node: fx.Node) -> bool:
    """Whether a node draws random numbers; fused attention without dropout does not."""
    named = dict(zip((a.name for a in node.target._schema.arguments), node.args, strict=False)) | node.kwargs
    return bool(named.get("dropout_p", 1.0) != 0.0)


def _cost(node: fx.Node, value: Any) -> tuple[int, int]:
    """FLOPs, and bytes of an op that is not fused. See NOTE [ What a fused op costs ]."""
    made = sum(nbytes_of(t) for t in _tensors(value))
    read = sum(nbytes_of(given.meta.get("val")) for given in node.all_input_nodes)
    flops = 0
    if isinstance(node.target, torch._ops.OpOverload):
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda given: given.meta.get("val"))
        try:
            flops = op_cost(node.target, args, kwargs, value)[0]
        except (AttributeError, TypeError, ValueError, RuntimeError):  # a FLOP formula for another signature
            flops = 0
    if flops or not isinstance(node.target, torch._ops.OpOverload):
        return flops, read + made
    if 4 * made < read:
        return 0, read
    if node.target.namespace not in ("aten", "prims"):
        return 0, read + made
    return 0, made // FUSED_SHARE


def _tensors(value: Any) -> list[Tensor]:
    return [t for t in (value if isinstance(value, tuple | list) else (value,)) if isinstance(t, Tensor)]


def nbytes_of(value: Any) -> int:
    """Bytes of a node's value; 0 unless it is a tensor."""
    if not isinstance(value, Tensor):
        return 0
    return prod(map(_hint, value.shape)) * value.element_size()


def _hint(size: Any) -> int:
    if isinstance(size, int):
        return size
    known = size.node.hint if hasattr(size, "node") else None
    return int(known) if known is not None else SIZE_HINT
