"""Execution choices of a training framework: ops fused into one kernel, transfers overlapped with compute.

These are choices of software, not of hardware; they follow from the run's kernel set unless overridden.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import StrEnum
from functools import cache
from typing import Any, Final

from jettison.spec.fp8 import Fp8Recipe
from jettison.spec.frameworks import named
from jettison.spec.kernels import CpCommType, Dispatcher
from jettison.spec.run import Run


class Fusion(StrEnum):
    """Neighbouring ops that become one kernel; see NOTE [ Fusion ] in `launches`."""

    NONE = "none"  # every op is a kernel: PyTorch's eager mode
    POINTWISE = "pointwise"  # chains of elementwise ops, such as dropout + residual sum: Megatron's fused kernels
    COMPILED = "compiled"  # also with reductions such as norms and softmax: torch.compile


@dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """Execution choices of one kernel set.

    Args:
        hides_tensor: backward's tp collectives (reduction of an input's gradient, all-gather of a saved shard) overlap
            with GEMMs of the same layer (arXiv 2205.05198 §4.2.2).
        pipelines_tensor: tp collectives overlap with the GEMM that reads or writes the tensor, in t pieces of which
            one is exposed: Megatron's --tp-comm-overlap.
        fused_optimizer: the optimizer reads and writes every tensor once; otherwise once per operation.
        splits_outputs: without sequence parallelism, a stage's output crosses the network in t parts, one from each
            rank, and is all-gathered on the other side (arXiv 2104.04473 §4.1).
        delayed_scaling: fp8 scales come from earlier steps: norms and activations can write fp8 themselves, without a
            pass for the amax; weights are quantised once a step (Transformer Engine).
        loops_experts: grouped GEMMs are launched expert by expert, and the ops around them one by one:
            NOTE [ Experts in Megatron ] in `launches`. Otherwise GEMMs, activation and quantisation are few kernels.
        permutes: backward returns experts' rows by a gather, as forward does: NOTE [ Permuted rows ] in `launches`.
        fuses_experts: GEMMs, activation and quantisation of all experts are few kernels of one call, which costs the
            host less: NOTE [ Launch-bound ] of `cost.region`.
        graphs_experts: CUDA graphs replay experts, too: NOTE [ Outside CUDA graphs ] of `cost.region`.
        fp8_attention: query, key, value and the output's gradient are quantised (``fp8_dot_product_attention`` of
            Megatron), under recipes with measured kernels.
        exchange: transfer of keys and values under context parallelism: NOTE [ Pieces of a ring ] in `launches`.
    """

    fusion: Fusion = Fusion.NONE
    hides_tensor: bool = False
    pipelines_tensor: bool = False
    hides_data: bool = True  # gradient reductions and ZeRO 3's all-gathers overlap with other layers
    hides_stages: bool = False  # pipeline sends overlap with compute
    receives_block: bool = False  # a stage's sends and receives are separate calls: each blocks both stages
    hides_offload: bool = True  # copies to and from CPU memory overlap with compute
    repeats_all: bool = False  # full checkpointing recomputes the entire layer, not only what backward needs
    accumulates_in_gemm: bool = False  # the weight-gradient GEMM accumulates into the gradient buffer
    casts_gradients: bool = False  # a micro-batch's gradients are cast by separate kernels before accumulation
    reduces_whole: bool = False  # ZeRO 1 and 2 all-reduce gradients, of which each rank keeps a shard
    reduces_float32: bool = False  # gradients of other dtypes are cast to fp32 for the reduction
    reduces_each: bool = True  # ZeRO 2 and 3 reduce gradients after every micro-batch, otherwise after the last
    fused_optimizer: bool = False
    splits_outputs: bool = False
    delayed_scaling: bool = False
    recipe: Fp8Recipe | None = None  # for FP8 GEMMs of a precision that names no recipe
    hooks: bool = False  # recomputation runs in Jettison's hooks, which take host time
    hides_experts: bool = False  # experts' all-to-alls overlap with another micro-batch
    once_to_node: bool = False  # experts' all-to-alls follow NOTE [ Once to each node ] of `collective`
    loops_experts: bool = False
    fuses_experts: bool = False
    permutes: bool = False
    rotates_in_place: bool = False  # NOTE [ Rotated in place ] in `launches`
    waits_for_kernels: bool = False  # CUDA_LAUNCH_BLOCKING=1: NOTE [ Launch-bound ] of `cost.region`
    simt_batches: bool = False  # batched GEMMs of rows without 16-byte alignment run without tensor cores: cuBLAS 11
    graphed: bool = False  # CUDA graphs replay the kernels of layers, without launches by the host
    graphs_experts: bool = True
    stack: str = ""  # selects the hardware file's figures of one software stack
    attention: float = 1.0  # speed of fused attention, as a multiple of the hardware file's
    fp8_attention: bool = False
    fp8_head: bool = False  # the recipe covers the head's GEMM, too (``fp8_output_proj`` of Megatron)
    exchange: CpCommType = CpCommType.RING

    def exposed(self, ranks: int) -> float:
        """Share of a tp collective over this many ranks that its own GEMM does not hide."""
        return 1 / ranks if self.pipelines_tensor else 1.0

    def compiled(self) -> Execution:
        """Return this execution under torch.compile."""
        return replace(self, fusion=Fusion.COMPILED)

    def without_overlap(self) -> Execution:
        """Return this execution with every transfer exposed."""
        off: dict[str, Any] = {f.name: False for f in fields(self) if f.name.startswith(("hides_", "pipelines_"))}
        return replace(self, **off)


EAGER: Final = Execution(fused_optimizer=True, hooks=True)
"""PyTorch's execution, and that of frameworks whose ``defaults.toml`` has no entry ``execution``."""


@cache
def usual_execution(kernels: str) -> Execution:
    """Return the default execution of a kernel set."""
    found = named("execution").get(kernels)
    if found is None:
        return EAGER
    own = {key: value for key, value in found.items() if key not in ("fusion", "folder")}
    return Execution(fusion=Fusion(found["fusion"]), **own)


def execution_of(run: Run) -> Execution:
    """Return the execution of a run's kernels, compiled where its layers are."""
    to_node = run.kernels.dispatcher is Dispatcher.FLEX
    fused = _fuses_experts(run)
    fixed = run.capacity_factor is not None or (fused and to_node)
    named_by = run.kernels.name, run.stack, run.tp_comm_overlap, run.ep_comm_overlap, run.cuda_graphs
    how = _execution(*named_by, to_node, run.kernels.cp_comm_type, fused, fixed)
    if run.syncs_last:
        how = replace(how, reduces_each=False)
    if run.layout.fsdp_one_unit:  # nothing of the unit is left to compute
        how = replace(how, hides_data=False)
    if (buckets := run.layout.buckets) is not None and run.layout.zero in (1, 2):
        # deepspeed/runtime/zero (edaa722): ``stage_1_and_2.py``, ``average_tensor``, all-reduces each bucket, on
        # backward's stream unless ``overlap_comm``, which ``config.py`` has off below ZeRO 3, takes a second bucket.
        how = replace(how, reduces_whole=True, hides_data=how.hides_data and buckets.buckets > 1)
    return how.compiled() if run.compiled else how


def _fuses_experts(run: Run) -> bool:
    """Whether fused kernels run a layer's experts: gated ones, under a recipe that the stack has kernels for."""
    recipes = named("stacks").get(run.stack or "", {}).get("fused_experts", ())
    if run.precision.recipe is None or run.precision.recipe.name not in recipes:
        return False
    return all(layer.mlp.gated for layer in run.model.described if layer.mlp is not None)


@cache
def _execution(
    kernels: str,
    stack: str | None,
    overlaps_tensor: bool,
    overlaps_experts: bool,
    graphed: bool,
    to_node: bool,
    exchange: CpCommType,
    fuses_experts: bool,
    graphs_experts: bool,
) -> Execution:
    """Cached: a search asks for every candidate, and few differ."""
    how = replace(usual_execution(kernels), **named("stacks").get(stack or "", {}).get("execution", {}))
    return replace(
        how,
        pipelines_tensor=overlaps_tensor,
        hides_experts=overlaps_experts,
        once_to_node=to_node,
        loops_experts=how.loops_experts and not fuses_experts,
        fuses_experts=how.loops_experts and fuses_experts,
        graphed=graphed,
        graphs_experts=graphs_experts or not how.loops_experts,
        stack=stack or how.stack,
        exchange=exchange,
    )
