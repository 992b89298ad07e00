"""What a compiled block keeps for its backward, as Inductor's own partitioner is told.

Of the values that backward asks for, some stay and the others are computed again from them. A `CheckpointPolicy` says
which, for the forward of the joint graph as a program (`joint_graph`); nodes get torch's marks for it (the ones that
selective checkpointing uses), and torch's min-cut partitioner splits the graph as they say. Seeds are never drawn
again, so that a mask that backward makes anew is the one that forward had.

Imported only where something is compiled: it needs Inductor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch.compile_utils import fx_graph_cse
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.utils.checkpoint import CheckpointPolicy as Mark

from jettison.ledger.program import Program
from jettison.runtime.joint_graph import JointProgram, joint_program
from jettison.solve.policy import CheckpointPolicy

_OWN_CODE = hashlib.sha256(
    b"".join((Path(__file__).parent / name).read_bytes() for name in ("partition.py", "joint_graph.py"))
).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Split:
    """One graph that was split: its forward, and the buffers that its backward was left with.

    Args:
        saved: what the compiled forward gives autograd to save, in that order, by buffer; None: none of the program's.
    """

    program: Program
    kept: frozenset[int]
    saved: tuple[int | None, ...]


_SEEN: ContextVar[list[Split] | None] = ContextVar("splits that somebody watches", default=None)


@contextmanager
def watching_splits() -> Iterator[list[Split]]:
    """Every graph that is split meanwhile, in this thread."""
    found: list[Split] = []
    token = _SEEN.set(found)
    try:
        yield found
    finally:
        _SEEN.reset(token)


@dataclass(frozen=True)
class Partition(CustomPartitionerFn):
    """Splits a joint graph as a policy says; ``none`` as torch does where it is told nothing.

    Inductor copies and compares it, and names its cached code by `uuid`.
    """

    policy: CheckpointPolicy

    def uuid(self) -> str:
        """Another one for another decision, and for other code that carries it out."""
        text = repr(
            [(name, sorted(v) if isinstance(v, frozenset) else repr(v)) for name, v in sorted(_fields(self.policy))]
        )
        return hashlib.sha256(f"{_OWN_CODE} {type(self.policy).__name__} {text}".encode()).hexdigest()

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Forward and backward."""
        gm.graph.eliminate_dead_code()
        gm.graph = fx_graph_cse(gm.graph)  # as torch's would: from here on nodes stay who they are
        static = kwargs.get("static_lifetime_input_indices") or ()
        joint = joint_program(gm.graph, kwargs["num_fwd_outputs"], static)
        if self.policy.word != "none":
            mark(joint, self.policy.kept(joint.program))
        with self._undisturbed():
            forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        _tag(forward, backward)
        seen = _SEEN.get()
        if seen is not None:
            saved = joint.buffers_behind(_saved(forward, kwargs["num_fwd_outputs"]))
            kept = frozenset(b for b in saved if b is not None)
            seen.append(Split(program=joint.program, kept=kept, saved=saved))
        return forward, backward

    def _undisturbed(self) -> AbstractContextManager[None]:
        """A budget of torch's own (a share of what a graph saves) is for those that have no plan."""
        if self.policy.word == "none":
            return nullcontext()
        patched: AbstractContextManager[None] = functorch_config.patch(activation_memory_budget=1.0)
        return patched


def _fields(policy: CheckpointPolicy) -> list[tuple[str, Any]]:
    names: Any = getattr(type(policy), "__dataclass_fields__", {})
    return [(name, getattr(policy, name)) for name in names]


def mark(joint: JointProgram, kept: frozenset[int]) -> None:
    """Tell torch's partitioner which nodes to save and which to compute again."""
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
    """Fused attention whose dropout is 0, without the tag of ops that draw.

    For each op with that tag that is recomputed, torch keeps the random state and sets it in backward: 5,056 bytes on a
    CPU, and generators of their own on a GPU. What draws is never recomputed.
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


def _saved(forward: fx.GraphModule, num_fwd_outputs: int) -> list[str]:
    """Names of what a forward returns beside its outputs."""
    (output,) = forward.graph.find_nodes(op="output")
    return [node.name for node in output.args[0][num_fwd_outputs:] if isinstance(node, fx.Node)]
