"""What libraries of matrix products set aside for themselves. They are tensors, and count as allocated.

NOTE [ Workspaces ]
torch gives cuBLAS one for each handle and stream (``aten/src/ATen/cuda/CublasHandlePool.cpp``,
``getChosenWorkspaceSize``): 32 MiB on Hopper, 8.125 MiB on others, or what ``CUBLAS_WORKSPACE_CONFIG`` says. Blackwell
is one of the others until pytorch #175344 (February 2026; NVIDIA's containers have it from 26.04 on), and has 32 after.
Handles belong to threads, and autograd's backward has a thread of its own: two, the second from the first backward on.
TransformerEngine has one for all its products (``get_cublas_workspace_size_bytes``): 32 MiB and 1 KiB on Hopper and
later, 4 MiB before; and one for each of four streams of its grouped products (``get_cublas_workspace`` with
``grouped_gemm``), where there are experts; and three more in one piece, for products that communicate while they run
(``ub``, ``_NUM_MAX_UB_STREAMS``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from jettison.errors import UsageError
from jettison.units import KIB, MIB

GROUPED_STREAMS: Final = 4
OVERLAPPED_STREAMS: Final = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Workspaces:
    """Bytes that are set aside.

    Args:
        torch_bytes: by torch for a thread's products.
        library_bytes: by the library that has the layers' products; 0: torch has them.
        router_alone: the library has a router's products, and no others: Megatron's own layers, which hand these to
            TransformerEngine where it is there (``moe/moe_utils.py``, ``te_general_gemm``).
    """

    name: str
    torch_bytes: int = 0
    library_bytes: int = 0
    router_alone: bool = False

    @property
    def own_layers(self) -> bool:
        """Do layers take their products from torch?"""
        return self.router_alone or not self.library_bytes

    @property
    def grouped_bytes(self) -> int:
        """Of the library's grouped products."""
        return GROUPED_STREAMS * self.library_bytes

    @property
    def overlapped_bytes(self) -> int:
        """Of the library's products that communicate while they run."""
        return OVERLAPPED_STREAMS * self.library_bytes

    def with_torch(self, nbytes: int) -> Workspaces:
        """As ``CUBLAS_WORKSPACE_CONFIG`` changes it: :4096:8 is 32 MiB."""
        return replace(self, torch_bytes=nbytes)


_OLDER, _HOPPER = 8 * MIB + 128 * KIB, 32 * MIB
WORKSPACES: Final = MappingProxyType(
    {
        w.name: w
        for w in (
            Workspaces(name="none"),
            Workspaces(name="torch-ampere", torch_bytes=_OLDER),
            Workspaces(name="torch-hopper", torch_bytes=_HOPPER),
            Workspaces(name="torch-blackwell", torch_bytes=_OLDER),
            Workspaces(name="local-ampere", torch_bytes=_OLDER, library_bytes=4 * MIB, router_alone=True),
            Workspaces(name="local-hopper", torch_bytes=_HOPPER, library_bytes=32 * MIB + KIB, router_alone=True),
            Workspaces(name="local-blackwell", torch_bytes=_OLDER, library_bytes=32 * MIB + KIB, router_alone=True),
            Workspaces(name="te-ampere", torch_bytes=_OLDER, library_bytes=4 * MIB),
            Workspaces(name="te-hopper", torch_bytes=_HOPPER, library_bytes=32 * MIB + KIB),
            Workspaces(name="te-blackwell", torch_bytes=_OLDER, library_bytes=32 * MIB + KIB),
        )
    }
)
"""By whose products they are and on which GPU; Blackwell's are Hopper's from pytorch #175344 on."""


def workspaces(name: str) -> Workspaces:
    """By name.

    Raises:
        UsageError: no such set.
    """
    if name not in WORKSPACES:
        raise UsageError(f"got --workspaces {name!r}; expected one of {', '.join(WORKSPACES)}")
    return WORKSPACES[name]
