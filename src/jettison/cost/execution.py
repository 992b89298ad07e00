"""How a training code runs a step: which ops are one kernel, and which transfers hide behind work.

These are choices of code, not of hardware, and go with the kernel set of a run unless something else is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from typing import Final

from jettison.spec.fp8 import Fp8Recipe
from jettison.spec.frameworks import named
from jettison.spec.kernels import ContextExchange, Dispatcher
from jettison.spec.run import Run


class Fusion(StrEnum):
    """Which neighbouring ops become one kernel; see NOTE [ Fusion ] in `kernels`."""

    NONE = "none"  # every op is a kernel: PyTorch's eager mode
    POINTWISE = "pointwise"  # chains of elementwise ops, such as dropout + residual sum: Megatron's fused kernels
    COMPILED = "compiled"  # with reductions such as norms and softmax: torch.compile


@dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """A set of choices.

    Args:
        hides_tensor: in backward, the transfer of an input's gradient over tp and the gathering of a saved shard run
            beside the products of the same layer (arXiv 2205.05198 §4.2.2).
        pipelines_tensor: transfers over tp run beside the very product that reads or makes the tensor, in t pieces of
            which one is waited for: Megatron's --tp-comm-overlap.
        fused_optimizer: the optimizer reads and writes everything once; otherwise as often as it has operations.
        splits_outputs: without sequence parallelism, a stage's output crosses the network in t parts, one from each
            rank, and is gathered on the other side (arXiv 2104.04473 §4.1).
        delayed_scaling: fp8 scales come from earlier steps, so that norms and activations can write fp8 themselves and
            nothing is read for its largest magnitude first; weights are quantised once a step (Transformer Engine).
        loops_experts: a grouped product is handed over expert by expert, and what stands around it op by op: see
            NOTE [ Experts in Megatron ] in `launches`. Otherwise products, activation and quantising are few
            kernels.
        permutes: rows that experts are given go back as they came: NOTE [ Permuted rows ] in `launches`.
        fuses_experts: products, activation and quantising of all experts are few kernels of one call, which costs the
            host less: NOTE [ Launch-bound ] of `cost.layer`.
        graphs_experts: they replay those of experts, too: NOTE [ What graphs leave out ] of `cost.layer`.
        narrow_attention: query, key and value are quantised, and so is the gradient of what comes out
            (``fp8_dot_product_attention`` of Megatron), under recipes for which there are figures.
        exchange: how attention sees a sequence that ranks share: NOTE [ Pieces of a ring ] in `launches`.
    """

    fusion: Fusion = Fusion.NONE
    hides_tensor: bool = False
    pipelines_tensor: bool = False
    hides_data: bool = True  # gradients are reduced, and ZeRO 3's parameters gathered, while other layers work
    hides_stages: bool = False  # a pipeline stage goes on while its output is on the way
    hides_offload: bool = True  # copies to and from the host run beside the layers
    repeats_all: bool = False  # full recomputation runs the whole layer again, and not only what backward asks for
    adds_in_product: bool = False  # the product that makes a weight's gradient adds it to the buffer
    casts_gradients: bool = False  # a micro-batch's gradients are cast by kernels of their own before they are added
    reduces_whole: bool = False  # ZeRO 1 reduces gradients on all ranks, which then step on their shards
    reduces_float32: bool = False  # gradients of other dtypes are cast for it
    reduces_each: bool = True  # ZeRO 2 and 3 reduce gradients after every micro-batch, otherwise after the last
    fused_optimizer: bool = False
    splits_outputs: bool = False
    delayed_scaling: bool = False
    recipe: Fp8Recipe | None = None  # how products are made narrow where the precision says that they are, and not how
    hooks: bool = False  # what is computed again is chosen by Jettison's runtime, whose hooks cost the host time
    hides_experts: bool = False  # rows travel to experts and back beside the work of another micro-batch
    once_to_node: bool = False  # they do as in NOTE [ Once to each node ] of `collective`
    loops_experts: bool = False
    fuses_experts: bool = False
    permutes: bool = False
    rotates_in_place: bool = False  # NOTE [ Rotated in place ] in `launches`
    graphed: bool = False  # CUDA graphs replay the kernels of layers, and the host hands none over
    graphs_experts: bool = True
    stack: str = ""  # whose figures of the hardware file hold, where it has any
    attention: float = 1.0  # speed of its fused attention, as a multiple of what the hardware file states
    narrow_attention: bool = False
    narrow_head: bool = False  # a recipe's products include the head's (``fp8_output_proj`` of Megatron)
    exchange: ContextExchange = ContextExchange.RING

    def exposed(self, ranks: int) -> float:
        """Share of a transfer over so many ranks of tensor parallelism that its own product does not cover."""
        return 1 / ranks if self.pipelines_tensor else 1.0

    def compiled(self) -> Execution:
        """The same under torch.compile."""
        return replace(self, fusion=Fusion.COMPILED)

    def without_overlap(self) -> Execution:
        """The same with every transfer waited for."""
        return replace(
            self,
            hides_tensor=False,
            pipelines_tensor=False,
            hides_data=False,
            hides_stages=False,
            hides_offload=False,
            hides_experts=False,
        )


EAGER: Final = Execution(fused_optimizer=True, hooks=True)
"""PyTorch's, and of whoever has no entry ``execution`` in its framework's ``defaults.toml``."""


@cache
def usual_execution(kernels: str) -> Execution:
    """What goes with a set of kernels."""
    found = named("execution").get(kernels)
    if found is None:
        return EAGER
    fields = {key: value for key, value in found.items() if key not in ("fusion", "folder")}
    return Execution(fusion=Fusion(found["fusion"]), **fields)


def execution_of(run: Run) -> Execution:
    """Return the execution of a run's kernels, compiled where its layers are."""
    to_node = run.kernels.dispatcher is Dispatcher.FLEX
    fused = _fuses_experts(run)
    fixed = run.capacity_factor is not None or (fused and to_node)
    named_by = run.kernels.name, run.stack, run.tp_comm_overlap, run.ep_comm_overlap, run.cuda_graphs
    how = _execution(*named_by, to_node, run.kernels.context_exchange, fused, fixed)
    return how.compiled() if run.compiled else how


def _fuses_experts(run: Run) -> bool:
    """Are a layer's experts few kernels? Of gated ones, under the recipes that the stack has such kernels for."""
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
    exchange: ContextExchange,
    fuses_experts: bool,
    graphs_experts: bool,
) -> Execution:
    """Cached executions: there are few kinds, and a search asks for each of its candidates."""
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
