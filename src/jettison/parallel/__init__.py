"""Tensor, sequence and context parallelism on torch.distributed."""

from jettison.parallel.context import Context
from jettison.parallel.context_models import apply_context_parallel
from jettison.parallel.dropout import OwnDraws, seed_ranks
from jettison.parallel.known_models import apply_tensor_parallel, tensor_parallel_plan
from jettison.parallel.parameters import reduce_partial_gradients
from jettison.parallel.styles import BlockInput, ColumnParallel, Replicated, RowParallel, SplitInput, VocabularyParallel

__all__ = [
    "BlockInput",
    "ColumnParallel",
    "Context",
    "OwnDraws",
    "Replicated",
    "RowParallel",
    "SplitInput",
    "VocabularyParallel",
    "apply_context_parallel",
    "apply_tensor_parallel",
    "reduce_partial_gradients",
    "seed_ranks",
    "tensor_parallel_plan",
]
