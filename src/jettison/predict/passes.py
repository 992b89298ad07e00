"""Cached replays of a region's forward and backward under its policy."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from jettison.formula.embedding import TOKENS
from jettison.formula.liveness import Passes, replay
from jettison.formula.region import HEAD, Region
from jettison.predict.stages import CONTEXTS, FULL, PARTS, StageRegion, kept_by, outline
from jettison.solve.policy import ops_of_parts
from jettison.spec.precision import GradientRule
from jettison.spec.recompute import Mode
from jettison.spec.run import Run


def passes_of(part: StageRegion, rule: GradientRule, *, accumulates: bool = False) -> Passes:
    """Return a region's replay under its policy."""
    if part.held:
        return replay(part.region, part.kept, rule, accumulates=accumulates, held=part.held)
    if part.chosen is None:
        return named_passes(part.region, part.policy, rule, accumulates)
    return chosen_passes(part.region, part.chosen.buffers, rule, accumulates)


@lru_cache(maxsize=65536)
def named_passes(region: Region, policy: str, rule: GradientRule, accumulates: bool) -> Passes:
    kept = kept_by(region, policy)
    frames, reentrant = named_frames(region, policy), rule.reentrant and policy == FULL
    return replay(region, kept, rule, accumulates=accumulates, frames=frames, reentrant=reentrant)


def named_frames(region: Region, policy: str) -> Sequence[frozenset[int]]:
    """Ops of each checkpoint of a named policy."""
    if policy == PARTS:
        return ops_of_parts(region.program)
    return (frozenset(range(len(region.program.ops))),) if policy == FULL or policy in CONTEXTS else ()


@lru_cache(maxsize=4096)
def chosen_passes(region: Region, kept: frozenset[int], rule: GradientRule, accumulates: bool) -> Passes:
    return replay(region, kept, rule, accumulates=accumulates)


@lru_cache(maxsize=1024)
def cached_segments(run: Run) -> int:
    """Bytes that the caching allocator has in segments, and that are unallocated at the peak: NOTE [ Cached segments ]
    in `ranges`. A plan that is yet to be chosen is taken for full recomputation."""
    logits, layer = 0, 0
    for part in {group.part for chunks in outline(run) for chunk in chunks for group in chunk}:
        policy = FULL if part.is_layer and run.recompute.mode is Mode.AUTO else part.policy
        passes = named_passes(part.region, policy, run.gradient_rule, False)
        if part.is_layer:
            layer = max(layer, passes.forward_peak - passes.resident + part.static.gathered)
        elif part.name == HEAD:
            logits = passes.forward_peak // 5
    return logits + layer


@lru_cache(maxsize=65536)
def cached_bytes(region: Region, kept: frozenset[int]) -> int:
    """Bytes of cast weights that a region does not keep, in autocast's cache until its context exits.

    ``aten/src/ATen/autocast_mode.cpp``, ``cached_cast``: of leaves that require gradients; ``clear_cache`` is called
    when the outermost context exits (``torch/amp/autocast_mode.py``, ``__exit__``), after the loss.
    """
    found = {
        region.buffers[step.outputs[0].storage]
        for step in region.tape.steps
        if step.casts is not None and not step.casts.frozen
    }
    return region.program.kept_bytes(frozenset(found - kept))


def caches_copies(run: Run) -> bool:
    """Whether autocast caches cast weights; it does not for `parallel.parameters.local_part`, which is no leaf."""
    return run.autocast and (run.layout.tp == 1 or run.layout.gathered_inputs)


def sums_apart(run: Run) -> bool:
    """Whether the two gradients of a tied embedding are summed into a third tensor.

    The engine accumulates in place if no other tensor shares the first one's storage
    (``torch/csrc/autograd/input_buffer.cpp``, ``can_accumulate_inplace``). The head's matmul returns a view of its
    gradient, whose base shares it; under autocast the cast makes a new tensor; for several heads, or chunks of one, the
    sum is the engine's own; and a fused loss returns a new tensor.
    """
    once = not run.kernels.loss.computes_head and not run.model.mtp_num_layers
    return once and run.model.tied_embeddings and not run.gradient_rule.fused and not run.autocast


def tied_table(region: Region, each: int) -> tuple[int, int]:
    """Bytes of the gradient of a tied embedding, and of its region's other gradients, which come first."""
    learned = [w for w in region.weights if not w.frozen]
    tables = [w for w in learned if w.name == TOKENS] or learned
    table = max((w.numel for w in tables), default=0)
    return table * each, (sum(w.numel for w in learned) - table) * each


def held_over(embedding: Region) -> int:
    """Return the bytes that an embedding allocates for all layers, such as rotary tables."""
    steps = (step for step in embedding.tape.steps if step.name == "hold")
    return sum(embedding.tape.sizes[storage] for storage in {s.value.storage for step in steps for s in step.saved})
