"""Tensor and sequence parallelism on torch.distributed, and the models of record."""

from jettison.parallel.dropout import OwnDraws, seed_ranks
from jettison.parallel.known_models import apply_tensor_parallel, tensor_parallel_plan
from jettison.parallel.parameters import reduce_partial_gradients
from jettison.parallel.styles import BlockInput, ColumnParallel, Replicated, RowParallel, SplitInput, VocabularyParallel

__all__ = [
    "BlockInput",
    "ColumnParallel",
    "OwnDraws",
    "Replicated",
    "RowParallel",
    "SplitInput",
    "VocabularyParallel",
    "apply_tensor_parallel",
    "reduce_partial_gradients",
    "seed_ranks",
    "tensor_parallel_plan",
]
