"""Who else hears of a planned region's calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Watched(Protocol):
    """What a model consists of."""

    def check(self) -> None:
        """Look at it when a step begins."""

    def parts_changed(self, names: str) -> None:
        """Modules inside of blocks are other ones."""


class CallListener(Protocol):
    """Is told of a region's calls with gradients."""

    def begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before anything of it ran; another plan may be followed from here on."""

    def ends(self, returned: Sequence[Any]) -> None:
        """The forward has returned.

        Args:
            returned: its leaves.
        """
