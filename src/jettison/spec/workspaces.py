"""What libraries of matrix products set aside for themselves. They are tensors, and count as allocated.

NOTE [ Workspaces ]
torch gives cuBLAS one for each handle and stream (``aten/src/ATen/cuda/CublasHandlePool.cpp``,
``getChosenWorkspaceSize``): 32 MiB on Hopper, 8.125 MiB elsewhere, or what ``CUBLAS_WORKSPACE_CONFIG`` says; 32 MiB on
Blackwell as well from pull request 175344 on, of February 2026 (NVIDIA's containers from 26.04 on).
Handles belong to threads, and autograd's backward has a thread of its own: two, the second from the first backward on.
TransformerEngine has one for all its products (``get_cublas_workspace_size_bytes``): 32 MiB and 1 KiB on Hopper and
later, 4 MiB before; and one for each of four streams of its grouped products (``get_cublas_workspace`` with
``grouped_gemm``), where there are experts; and three in one for products whose transfers run beside them (``ub`` there,
``_NUM_MAX_UB_STREAMS``; Megatron's ``--tp-comm-overlap``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from jettison.core.errors import UsageError
from jettison.core.units import KIB, MIB

GROUPED_STREAMS: Final = 4
OVERLAP_STREAMS: Final = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Workspaces:
    """Bytes that are set aside.

    Args:
        torch_bytes: by torch for a thread's products.
        library_bytes: by the library that has the layers' products; 0: torch has them.
        router_bytes: by the library, where torch has the layers' products and Megatron gives it a router's:
            ``megatron/core/transformer/moe/moe_utils.py``, ``RouterGatingLinearFunction`` with ``te_general_gemm``.
    """

    name: str
    torch_bytes: int = 0
    library_bytes: int = 0
    router_bytes: int = 0

    @property
    def grouped_bytes(self) -> int:
        """Of the library's grouped products."""
        return GROUPED_STREAMS * self.library_bytes

    @property
    def overlap_bytes(self) -> int:
        """Of the library's products that transfers run beside."""
        return OVERLAP_STREAMS * self.library_bytes

    def with_torch(self, nbytes: int) -> Workspaces:
        """As ``CUBLAS_WORKSPACE_CONFIG`` changes it: :4096:8 is 32 MiB."""
        return replace(self, torch_bytes=nbytes)


_OLDER, _HOPPER = 8 * MIB + 128 * KIB, 32 * MIB
_TE_OLDER, _TE_HOPPER = 4 * MIB, 32 * MIB + KIB
WORKSPACES: Final = MappingProxyType(
    {
        w.name: w
        for w in (
            Workspaces(name="none"),
            Workspaces(name="torch-ampere", torch_bytes=_OLDER, router_bytes=_TE_OLDER),
            Workspaces(name="torch-hopper", torch_bytes=_HOPPER, router_bytes=_TE_HOPPER),
            Workspaces(name="torch-blackwell", torch_bytes=_OLDER, router_bytes=_TE_HOPPER),
            Workspaces(name="te-ampere", torch_bytes=_OLDER, library_bytes=_TE_OLDER),
            Workspaces(name="te-hopper", torch_bytes=_HOPPER, library_bytes=_TE_HOPPER),
            Workspaces(name="te-blackwell", torch_bytes=_OLDER, library_bytes=_TE_HOPPER),
        )
    }
)
"""By whose products they are and on which GPU; Hopper's are those of Blackwell as well under a torch of this year."""


def workspaces(name: str) -> Workspaces:
    """By name.

    Raises:
        UsageError: no such set.
    """
    if name not in WORKSPACES:
        raise UsageError(f"got --workspaces {name!r}; expected one of {', '.join(WORKSPACES)}")
    return WORKSPACES[name]
