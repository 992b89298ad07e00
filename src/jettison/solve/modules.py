"""Megatron's recompute and offload modules on the programs of described layers: kept and recomputed buffers.

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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from jettison.ledger.program import Op, Program
from jettison.solve.policy import BATCHED, close

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
            return _where(program, lambda op: op.path not in ("norm", "mtp") and not _joins_depths(program, op))
        case "mlp" | "moe":
            return _where(program, _in_mlp) if sparse == (module == "moe") else frozenset()
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
            first, latent = min(_core(program), default=0), _is_latent(program)
            return _where(program, lambda op: op.index < first and _makes_heads(op, latent))
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
    """Is attention one kernel? It saves no scores, so recomputing its core frees next to nothing."""
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


def _joins_depths(program: Program, op: Op) -> bool:
    return op.index == len(program.ops) - 1 and op.name.startswith("aten.cat")


def _own_norms(program: Program) -> tuple[str, ...]:
    """See NOTE [ Norms of their own ]."""
    own = {"attention_norm": _is_latent(program), "mlp_norm": _is_sparse(program)}
    return tuple(path for path, alone in own.items() if alone)


def _is_sparse(program: Program) -> bool:
    return any(op.path.startswith("mlp.router") for op in program.ops)


def _is_latent(program: Program) -> bool:
    return any(op.path == "attention.key_value_down" for op in program.ops)


def _makes_heads(op: Op, latent: bool) -> bool:
    """Does the op make heads? Multi-latent attention rotates heads inside the module that makes them."""
    return op.path.startswith("attention.") or (latent and op.path == "attention")


def _in_mlp(op: Op) -> bool:
    return op.path == "mlp" or op.path.startswith("mlp.")


def _where(program: Program, said: Callable[[Op], bool]) -> frozenset[int]:
    return frozenset(op.index for op in program.ops if said(op))
