"""Tensor, sequence and context parallelism on torch.distributed.

Names are imported when they are first asked for: planning on one process needs `jettison.parallel.recompute_agreement`,
and not the second that importing torch's DTensor takes.
"""

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jettison.parallel.context_parallel import Context as Context
    from jettison.parallel.context_parallel import apply_context_parallel as apply_context_parallel
    from jettison.parallel.dropout import OwnDraws as OwnDraws
    from jettison.parallel.dropout import seed_ranks as seed_ranks
    from jettison.parallel.known_models import apply_tensor_parallel as apply_tensor_parallel
    from jettison.parallel.known_models import tensor_parallel_plan as tensor_parallel_plan
    from jettison.parallel.parameters import reduce_partial_gradients as reduce_partial_gradients
    from jettison.parallel.styles import BlockInput as BlockInput
    from jettison.parallel.styles import ColumnParallel as ColumnParallel
    from jettison.parallel.styles import Replicated as Replicated
    from jettison.parallel.styles import RowParallel as RowParallel
    from jettison.parallel.styles import SplitInput as SplitInput
    from jettison.parallel.styles import VocabularyParallel as VocabularyParallel

_NAMES_OF = MappingProxyType(
    {
        "styles": ("BlockInput", "ColumnParallel", "Replicated", "RowParallel", "SplitInput", "VocabularyParallel"),
        "context_parallel": ("Context", "apply_context_parallel"),
        "dropout": ("OwnDraws", "seed_ranks"),
        "known_models": ("apply_tensor_parallel", "tensor_parallel_plan"),
        "parameters": ("reduce_partial_gradients",),
    }
)

__all__ = sorted(name for names in _NAMES_OF.values() for name in names)


def __getattr__(name: str) -> Any:
    home = next((home for home, names in _NAMES_OF.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module 'jettison.parallel' has no attribute {name!r}; it offers {', '.join(__all__)}")
    return getattr(import_module(f"jettison.parallel.{home}"), name)
