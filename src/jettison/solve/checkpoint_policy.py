"""Checkpoint policies: from a recorded program to the set of buffers to keep, Megatron's modules among them.

NOTE [ Two kinds of parts ]
A module that Megatron checkpoints keeps its inputs, and results saved by other ops. A module under
`CheckpointWithoutOutput` (``megatron/core/tensor_parallel/random.py``) also frees its results, which are recomputed
before the ops that saved them read them.

NOTE [ Norms of their own ]
``megatron/core/models/gpt/gpt_layer_specs.py``: with TransformerEngine a norm before a linear layer is part of that
layer's module (``column_parallel_layer_norm_linear``), and the layer's own norm is an ``IdentityOp``, for which
``transformer_layer.py`` recomputes and offloads nothing. Norms before MLA and experts are modules of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final, Protocol, runtime_checkable

from jettison.core.errors import UsageError
from jettison.ledger.program import Anchor, Op, Program, Slot, Source

_PRODUCTS = ("aten.mm", "aten.addmm")
"""Matmuls with a weight, which an alternating policy counts."""
BATCHED = ("aten.bmm", "aten.baddbmm")
"""Matmuls of two activations, such as attention scores; a router's scores are a matmul with a weight."""
MATMULS = (*_PRODUCTS, *BATCHED, "aten._scaled_dot_product", "aten._grouped_mm", "aten.convolution")
_SUMMED = ("reduce_scatter", "all_reduce")
"""Collectives that sum the partial results of a matmul over ranks."""
_TRANSFERS = ("c10d.", "_c10d_functional.", "_dtensor.")
"""Prefixes of collectives' names in formulas and in recordings."""


class CheckpointPolicy(Protocol):
    """Selects the buffers that a region keeps. Must be deterministic."""

    @property
    def word(self) -> str:
        """Name of the policy in plans and tables."""

    def kept(self, program: Program) -> frozenset[int]:
        """Buffers to hold between forward and backward; always enough to recompute the rest."""


@runtime_checkable
class OffloadPolicy(CheckpointPolicy, Protocol):
    """Also selects the kept buffers to offload between forward and backward."""

    def offloaded(self, program: Program) -> frozenset[int]:
        """Kept buffers to offload. Buffers that cannot move stay on the device."""


def offloaded_by(policy: CheckpointPolicy, program: Program) -> frozenset[int]:
    """Kept buffers that a policy offloads; empty for most policies."""
    return policy.offloaded(program) if isinstance(policy, OffloadPolicy) else frozenset()


def packed_by(policy: CheckpointPolicy, program: Program) -> frozenset[int]:
    """Kept buffers that a policy's ``packed(program)`` selects, to be packed losslessly into fewer bytes; empty for
    most policies. A buffer that packing would not restore exactly stays as it is.
    """
    return policy.packed(program) if hasattr(policy, "packed") else frozenset()


def can_move(program: Program, b: int) -> bool:
    """Whether a buffer can be offloaded: only the region's own. Parameters, arguments shared by regions and captured
    tensors live anyway, and random states are small.
    """
    buffer = program.buffers[b]
    return not buffer.free and buffer.source in (Source.OP, Source.INPUT, Source.BLOCK) and buffer.nbytes > 0


@dataclass(frozen=True, slots=True)
class KeepAll:
    """Plain autograd: all saved tensors are kept."""

    word: str = "none"

    def kept(self, program: Program) -> frozenset[int]:
        return program.saved_buffers()


@dataclass(frozen=True, slots=True)
class Full:
    """Full checkpointing: only inputs are kept, and buffers that cannot be recomputed."""

    word: str = "full"

    def kept(self, program: Program) -> frozenset[int]:
        wanted = {
            b.index for b in program.buffers if b.source in (Source.INPUT, Source.RANDOM, Source.BLOCK) and b.keepable
        }
        return close(program, frozenset(b for b in wanted if program.buffers[b].producer is None))


@dataclass(frozen=True, slots=True)
class SelectiveOp:
    """Selective checkpointing by op: keep outputs of matmuls, fused attention and reduce-scatters.

    Of a row-parallel matmul the reduced sum is kept. ``alternate`` is torchtitan's per-op policy: every second matmul
    with a weight is recomputed.
    """

    word: str = "selective-op"
    alternate: bool = False

    def kept(self, program: Program) -> frozenset[int]:
        return self._closed(program, self.named(program))

    def _closed(self, program: Program, named: frozenset[int]) -> frozenset[int]:
        inputs = frozenset(b.index for b in program.buffers if b.source is Source.INPUT)
        return close(program, named | inputs | Full().kept(program))

    def cached(self, program: Program) -> frozenset[int]:
        """Buffers that torch's eager selective checkpoint holds (``torch/utils/checkpoint.py``,
        ``_CachingTorchDispatchMode``): outputs of all listed ops, read or not; a compiled region, like `kept`, leaves
        out buffers without readers.
        """
        named = self.named(program)
        return self._closed(program, named) | named

    def named(self, program: Program) -> frozenset[int]:
        """Outputs of the listed ops, whether backward reads them or not."""
        found: set[int] = set()
        readers = _readers(program)
        matmuls = 0
        for op in program.ops:
            matmuls += op.name.startswith(_PRODUCTS)
            second = self.alternate and op.name.startswith(_PRODUCTS) and matmuls % 2 == 0
            if second:
                continue
            if op.name.startswith(MATMULS):
                found.update(b for b in op.outputs if program.buffers[b].keepable)
            elif any(word in op.name for word in _SUMMED[: 1 if self.alternate else None]):
                found.update(_holdable(program, b, readers) for b in op.outputs)
        return frozenset(b for b in found if program.buffers[b].keepable)


@dataclass(frozen=True, slots=True)
class Selective:
    """The paper's selective recomputation: the attention core (scores, softmax, dropout) is recomputed, the rest kept.
    No collective is recomputed: buffers of the core that depend on one are kept too.
    """

    word: str = "selective"

    def kept(self, program: Program) -> frozenset[int]:
        core = attention_core(program)
        base = frozenset(b.index for b in program.buffers if b.source in (Source.INPUT, Source.RANDOM) and b.keepable)
        return close(program, program.saved_buffers() - core | base, transfers=False)


SMALLEST_BYTES: Final = 4096
"""Smaller copies cost more than their bytes save: judgement, and the threshold of torchtitan's graph trainer."""


@dataclass(frozen=True, slots=True)
class Offload:
    """Offload the buffers that another policy keeps: all of a region's own from ``smallest_bytes`` on."""

    keeps: CheckpointPolicy = KeepAll()
    smallest_bytes: int = SMALLEST_BYTES
    word: str = "offload"

    def kept(self, program: Program) -> frozenset[int]:
        return self.keeps.kept(program)

    def offloaded(self, program: Program) -> frozenset[int]:
        found = (b for b in self.kept(program) if can_move(program, b))
        return frozenset(b for b in found if program.buffers[b].nbytes >= self.smallest_bytes)


@dataclass(frozen=True, slots=True)
class Packing:
    """Pack the buffers that another policy keeps, where packing is lossless."""

    keeps: CheckpointPolicy = KeepAll()
    word: str = "pack"

    def kept(self, program: Program) -> frozenset[int]:
        return self.keeps.kept(program)

    def packed(self, program: Program) -> frozenset[int]:
        return self.kept(program)


@dataclass(frozen=True, slots=True)
class Exactly:
    """An earlier decision: these buffers of this program, and of the same ops on other shapes; any other program falls
    back to ``otherwise``. Of the buffers, ``offloaded_buffers`` are offloaded, and ``packed_buffers`` are packed.
    """

    digest: str
    buffers: frozenset[int]
    otherwise: CheckpointPolicy
    form: str = ""
    word: str = "per-tensor"
    offloaded_buffers: frozenset[int] = frozenset()
    packed_buffers: frozenset[int] = frozenset()

    def kept(self, program: Program) -> frozenset[int]:
        if program.digest() == self.digest:
            return self.buffers
        if self.form and program.form() == self.form:
            return close(program, self.buffers)
        return self.otherwise.kept(program)

    def offloaded(self, program: Program) -> frozenset[int]:
        return (
            self.offloaded_buffers & self.kept(program)
            if self._knows(program)
            else offloaded_by(self.otherwise, program)
        )

    def packed(self, program: Program) -> frozenset[int]:
        return self.packed_buffers & self.kept(program) if self._knows(program) else packed_by(self.otherwise, program)

    def _knows(self, program: Program) -> bool:
        return program.digest() == self.digest or bool(self.form and program.form() == self.form)


@dataclass(frozen=True, slots=True)
class KeepShare:
    """The cheapest recomputation that keeps at most this share of plain autograd's bytes."""

    fraction: float
    word: str = "per-tensor"

    def kept(self, program: Program) -> frozenset[int]:
        from jettison.cost.kernel import op_seconds  # imported on use: most users of policies need no prices
        from jettison.solve.frontier import pareto_frontier
        from jettison.spec.hardware import usual_hardware
        from jettison.spec.kernels import Device

        hardware = usual_hardware(Device.CPU)  # any device gives the same share
        points = pareto_frontier(program, [op_seconds(op, hardware) for op in program.ops])
        limit = self.fraction * program.kept_bytes(program.saved_buffers())
        fitting = [p for p in points if p.kept_bytes <= limit]
        return min(fitting, key=lambda p: p.seconds).kept if fitting else points[0].kept


def close(program: Program, wanted: frozenset[int], *, transfers: bool = True) -> frozenset[int]:
    """Add buffers that cannot be recomputed, drop those without readers; ``transfers``: recompute collectives."""
    must = set(wanted)
    while True:
        needed, missing = _demand(program, frozenset(must), transfers=transfers)
        if not missing:
            return frozenset(b for b in must if b in needed and not program.buffers[b].free)
        must |= missing


def _demand(program: Program, kept: frozenset[int], *, transfers: bool) -> tuple[set[int], set[int]]:
    """Buffers that backward reads under ``kept``, and buffers to keep in addition: those that cannot be recomputed, or,
    if one of them cannot be kept, the smallest keepable one on the way to the slot, the nearest to it if sizes tie.
    """
    missing: set[int] = set()
    needed: set[int] = set()
    for slot_buffer in program.needed_buffers():
        stack: list[_Way] = [(slot_buffer, None)]
        local, broken = set(), False
        while stack:
            way = stack.pop()
            b = way[0]
            if b in local:
                continue
            local.add(b)
            buffer = program.buffers[b]
            if b in kept or buffer.free:
                continue
            op = program.ops[buffer.producer] if buffer.producer is not None else None
            if op is None or op.anchor is not None or (not transfers and op.name.startswith(_TRANSFERS)):
                missing.add(b if buffer.keepable else _smallest(program, way))
                broken = True
                continue
            stack += [(read, way) for read in op.inputs]
        if not broken:
            needed |= local
    return needed, missing


_Way = tuple[int, "_Way | None"]
"""A buffer, and the chain from the slot to it."""


def _smallest(program: Program, way: _Way) -> int:
    """The smallest keepable buffer on the way to a slot; the slot's own buffer if none is smaller."""
    passed = [way[0]]
    while (before := way[1]) is not None:
        way = before
        passed.append(way[0])
    slot, *rest = reversed(passed)
    return min([slot, *(b for b in rest if program.buffers[b].keepable)], key=lambda b: program.buffers[b].nbytes)


def _readers(program: Program) -> dict[int, list[Op]]:
    readers: dict[int, list[Op]] = {}
    for op in program.ops:
        for b in op.inputs:
            readers.setdefault(b, []).append(op)
    return readers


def _holdable(program: Program, b: int, readers: dict[int, list[Op]]) -> int:
    """A buffer, or, if it cannot be kept, its only reader's result of equal size (after a bias, say)."""
    buffer = program.buffers[b]
    while not buffer.keepable and len(readers.get(buffer.index, ())) == 1:
        made = readers[buffer.index][0].outputs
        if len(made) != 1 or program.buffers[made[0]].nbytes != buffer.nbytes:
            break
        buffer = program.buffers[made[0]]
    return buffer.index


def attention_core(program: Program) -> frozenset[int]:
    """Buffers between the matmul that makes the attention scores and the one that reads the probabilities.

    Found from each softmax: back through elementwise ops to a matmul, forward to the next ones. Empty with
    fused attention, which never stores them (arXiv 2205.05198 §5; recomputing them there saves nothing).
    """
    readers = _readers(program)
    core: set[int] = set()
    for op in program.ops:
        if "softmax" in op.name and "backward" not in op.name:
            size = max((program.buffers[b].nbytes for b in op.outputs), default=0)
            core |= {b for b in _between_matmuls(program, op, readers) if program.buffers[b].nbytes * 8 >= size}
    return frozenset(core & program.saved_buffers())


def _between_matmuls(program: Program, softmax: Op, readers: dict[int, list[Op]]) -> set[int]:
    """Buffers between the matmul before a softmax and those after it; empty unless both are batched."""
    seen: set[int] = set()

    def makers(op: Op) -> Iterator[tuple[int, list[Op]]]:
        for b in op.inputs:
            producer = program.buffers[b].producer
            if producer is not None and producer not in seen and program.buffers[b].source is not Source.RANDOM:
                yield b, [program.ops[producer]]

    def users(op: Op) -> Iterator[tuple[int, list[Op]]]:
        for b in op.outputs:
            if program.buffers[b].source is not Source.RANDOM:  # later random ops are not part of the core
                yield b, readers.get(b, [])

    def to_matmuls(neighbours: Callable[[Op], Iterator[tuple[int, list[Op]]]]) -> tuple[set[int], bool]:
        """Buffers on the way over unseen ops, and whether a batched matmul ends it."""
        found: set[int] = set()
        batched, waiting = False, [softmax]
        while waiting:
            for b, ops in neighbours(waiting.pop()):
                found.add(b)
                for op in ops:
                    if op.name.startswith(MATMULS):
                        batched = batched or op.name.startswith(BATCHED)
                    elif op.index not in seen:
                        waiting.append(op)
                    seen.add(op.index)
        return found, batched

    (before, begins), (after, ends) = to_matmuls(makers), to_matmuls(users)
    return before | after if begins and ends else set()


def keeps_everything(policy: CheckpointPolicy) -> bool:
    return keeps_everything(policy.keeps) if isinstance(policy, Offload) else policy.word == "none"


NAMED: dict[str, CheckpointPolicy] = {
    t.word: t
    for t in (
        KeepAll(),
        Full(),
        SelectiveOp(),
        SelectiveOp(word="selective-op-alternate", alternate=True),
        Selective(),
        Offload(),
        Offload(keeps=Full(), word="full-offload"),
        Packing(),
    )
}


def policy_named(word: str) -> CheckpointPolicy:
    """Return the policy with this name. Raise `UsageError` for an unknown name."""
    try:
        return NAMED[word]
    except KeyError:
        raise UsageError(f"unknown policy {word!r}; expected one of {', '.join(NAMED)} or every:K") from None


# compiled -------------------------------------------------------------------------------------------------------------
#
# Buffers that a compiled block keeps by default: torch's own rule, applied to a program.
# NOTE [ What torch's partitioner keeps ]
# ``torch/_functorch/partitioners.py``, ``solve_min_cut``: the fewest bytes between forward and backward. Ops that must
# not be recomputed are left out of the cut: matmuls, attention and random ops (``compute_intensive``, ``random``);
# reductions whose results are less than a quarter of their inputs; and buffers that backward would have to write to
# memory for an op that nothing is fused into, such as a matmul (``is_materialized_backwards``). So inputs and outputs
# of matmuls are kept, and statistics of norms; activations, sums and rotations between them are recomputed. A fused op
# of ours stands for several of torch's, all of which are recomputed or none.
#
# An FP8 or FP4 matmul reads the result of a cast, and casts are fused, so the cast's input may be recomputed. torchao's
# linear layers cast all three operands, unless the weight's gradient is a matmul of 16-bit tensors.


COMPILED: Final = "compiled"
COMPILED_QUANTIZED: Final = "compiled, quantized GEMMs"
_REDUCES: Final = 4
"""Ratio of bytes read to bytes made from which an op is a reduction that is not recomputed."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """Default of a compiled block, see NOTE [ What torch's partitioner keeps ]."""

    word: str = COMPILED

    def kept(self, program: Program) -> frozenset[int]:
        wide = [op for op in program.ops if op.name.startswith(MATMULS)] if self.word == COMPILED else []
        read = {b for op in wide for b in op.inputs}
        ops = tuple(
            op if op.anchor is not None or _is_recomputed(program, op, read) else replace(op, anchor=Anchor.OPAQUE)
            for op in program.ops
        )
        from jettison.solve.frontier import fewest_bytes_point

        found = fewest_bytes_point(replace(program, ops=ops), [0.0] * len(ops)).kept
        return found | _statistics(program) if self.word == COMPILED_QUANTIZED else found

    def read(self, program: Program) -> Program:
        """Return a program with slots for what the compiled backward reads; the rest it recomputes in its kernels."""
        kept, saved = self.kept(program), program.saved_buffers()
        own = tuple(slot for slot in program.slots if slot.buffer in kept)
        others = enumerate(sorted(kept - saved), len(program.slots))
        return replace(program, slots=(*own, *(Slot(index=at, buffer=b, shape=(), dtype="") for at, b in others)))


def _statistics(program: Program) -> frozenset[int]:
    """Statistics of norms that are one op: torch recomputes their output but not their reduction."""
    small = {
        b
        for op in program.ops
        for b in op.outputs
        if _REDUCES * program.buffers[b].nbytes < sum(program.buffers[i].nbytes for i in op.inputs)
    }
    return program.saved_buffers() & small


def _is_recomputed(program: Program, op: Op, read_by_matmuls: set[int]) -> bool:
    if op.name.startswith((*MATMULS, "c10d.")) or not read_by_matmuls.isdisjoint(op.outputs):
        return False
    if any(program.buffers[b].source is Source.RANDOM for b in op.inputs):
        return False
    made = sum(program.buffers[b].nbytes for b in op.outputs)
    return _REDUCES * made >= sum(program.buffers[b].nbytes for b in op.inputs)


# Separate checkpoints for parts of a layer: attention, the feed-forward block and each norm ---------------------------
#
# NeMo AutoModel, ``components/distributed/activation_checkpointing.py``, ``apply_submodule_checkpointing``: a
# ``checkpoint_wrapper`` around each. Residual sums between them are not checkpointed.


def ops_of_parts(program: Program) -> tuple[frozenset[int], ...]:
    """Ops of each part, in the order of the forward."""
    found: dict[str, set[int]] = {}
    for op in program.ops:
        if name := op.path.partition(".")[0]:
            found.setdefault(name, set()).add(op.index)
    return tuple(map(frozenset, found.values()))


def kept_apart(program: Program) -> frozenset[int]:
    """Inputs of all parts' checkpoints, and buffers saved between them."""
    between = {slot.buffer for slot in program.slots if not slot.path}
    inputs = frozenset[int]().union(*(program.given(part) for part in ops_of_parts(program)))
    return close(program, inputs | between | Full().kept(program))


WITHOUT_OUTPUT: Final = frozenset({"layernorm", "own_layernorm", "mla_up_proj", "moe_act"})
"""See NOTE [ Two kinds of parts ]."""
OWN: Final = {
    "layernorm": "own_layernorm",
    "attn_norm": "own_attn_norm",
    "mlp_norm": "own_mlp_norm",
    "qkv_linear": "normed_qkv",
}
"""Ops by module name, with the same names for TransformerEngine's linear layers: NOTE [ Norms of their own ]."""
SMALLEST_OFFLOADED: Final = 1024 * 1024
"""Elements; smaller tensors are not offloaded (``min_offloaded_tensor_size``)."""
_FIRST_OF_EXPERTS: Final = ("mlp.experts.gate_up", "mlp.experts.gate", "mlp.experts.up")
_FUSED: Final = "scaled_dot_product"


@dataclass(frozen=True, slots=True, eq=False)
class Recomputed:
    """A layer under recompute modules: the kept buffers, the recomputed ops, and the modules that it has."""

    kept: frozenset[int]
    ops: frozenset[int]
    modules: tuple[str, ...]


def parts_of(program: Program, module: str) -> frozenset[int]:
    """Ops of a module of a layer; empty if the layer has no such module."""
    core = _core(program)
    sparse = _is_sparse(program)
    match module:
        case "core_attn":
            return core
        case "layernorm":
            return _where(program, lambda op: op.path in ("attention_norm", "mlp_norm"))
        case "own_layernorm":
            own = _own_norms(program)
            return _where(program, lambda op: op.path in own)
        case "mla_up_proj":
            if not _is_latent(program):
                return frozenset()
            up = ("attention.query", "attention.key_value")
            first = min(core, default=0)
            return _where(program, lambda op: op.path in up or (op.path == "attention" and op.index < first))
        case "mtp":  # NOTE [ Multi-token prediction ] in `formula.region`
            last = program.ops[-1]  # joins hidden states of all depths
            depths = last.index if last.name.startswith("aten.cat") else None
            return _where(program, lambda op: op.path not in ("norm", "mtp") and op.index != depths)
        case "mlp" | "moe":
            asked = sparse == (module == "moe")
            return _where(program, lambda op: asked and op.path.split(".")[0] == "mlp")
        case "shared_experts":
            return _where(program, lambda op: op.path.startswith("mlp.shared"))
        case _:
            return _where(program, lambda op: op.path == "mlp.experts" and op.name.startswith("gated_activation"))


def saved_by(program: Program, module: str) -> frozenset[int]:
    """Ops whose saved tensors fine-grained offloading moves to CPU for a module."""
    match module:
        case "attn_norm":
            return _where(program, lambda op: op.path == "attention_norm")
        case "mlp_norm":
            return _where(program, lambda op: op.path == "mlp_norm")
        case "own_attn_norm" | "own_mlp_norm":
            path = f"{module.removeprefix('own_').replace('attn', 'attention')}"
            return _where(program, lambda op: op.path == path) if path in _own_norms(program) else frozenset()
        case "qkv_linear":
            first = min(_core(program), default=0)
            own = ("attention",) if _is_latent(program) else ()  # it rotates heads inside the module that makes them
            return _where(program, lambda op: op.index < first and (op.path.startswith("attention.") or op.path in own))
        case "normed_qkv":
            within = frozenset() if _is_latent(program) else saved_by(program, "attn_norm")
            return saved_by(program, "qkv_linear") | within
        case "attn_proj":
            return _where(program, lambda op: op.path == "attention.out")
        case "expert_fc1":
            return _where(program, lambda op: op.path in _FIRST_OF_EXPERTS)
        case _:
            return parts_of(program, module)


def recomputed(program: Program, modules: tuple[str, ...]) -> Recomputed:
    """Return a layer under recompute modules; names of modules that it lacks are ignored."""
    parts = {module: part for module in modules if (part := parts_of(program, module))}
    if not parts:
        return Recomputed(program.saved_buffers(), frozenset(), ())
    again = frozenset(o for part in parts.values() for o in part)
    given_back = {b for m, part in parts.items() if m in WITHOUT_OUTPUT for o in part for b in program.ops[o].outputs}
    inside = {(program.ops[o].path, program.ops[o].name) for o in again}
    saved = {slot.buffer for slot in program.slots if (slot.path, slot.op) not in inside}
    inputs = {b for part in parts.values() for b in program.given(part)}
    kept = close(program, frozenset((saved | inputs) - given_back))
    return Recomputed(kept, again.union(program.recompute_set(kept)), tuple(parts))


def sent(program: Program, kept: frozenset[int], modules: tuple[str, ...]) -> frozenset[int]:
    """Kept buffers that these modules offload: large ones that no other op has saved."""
    names = {(program.ops[o].path, program.ops[o].name) for module in modules for o in saved_by(program, module)}
    here = {slot.buffer for slot in program.slots if (slot.path, slot.op) not in names}
    large = {slot.buffer for slot in program.slots if math.prod(slot.shape) >= SMALLEST_OFFLOADED}
    return frozenset(b for b in kept & large - here if not program.buffers[b].free)


def is_fused(program: Program) -> bool:
    """Whether attention is one kernel. It saves no scores, so recomputing its core frees next to nothing."""
    return any(_FUSED in op.name for op in program.ops)


def _core(program: Program) -> frozenset[int]:
    """Ops from the matmul of the scores to the matmul that reads the probabilities."""
    fused = _where(program, lambda op: _FUSED in op.name)
    if fused:
        return fused
    matmuls = [op.index for op in program.ops if op.name.startswith(BATCHED) and op.path == "attention"]
    if not matmuls:
        return frozenset()
    first, last = matmuls[0], matmuls[-1]
    return _where(program, lambda op: op.path == "attention" and first <= op.index <= last)


def is_mtp(program: Program) -> bool:
    return any(op.path == "eh_proj" for op in program.ops)


def _own_norms(program: Program) -> tuple[str, ...]:
    """See NOTE [ Norms of their own ]."""
    own = {"attention_norm": _is_latent(program), "mlp_norm": _is_sparse(program)}
    return tuple(path for path, alone in own.items() if alone)


def _is_sparse(program: Program) -> bool:
    return any(op.path.startswith("mlp.router") for op in program.ops)


def _is_latent(program: Program) -> bool:
    return any(op.path == "attention.key_value_down" for op in program.ops)


def _where(program: Program, said: Callable[[Op], bool]) -> frozenset[int]:
    return frozenset(op.index for op in program.ops if said(op))
