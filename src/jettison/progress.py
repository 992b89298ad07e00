"""How long work says where it is."""

from collections.abc import Callable

Progress = Callable[[str], None]


def silent(_text: str) -> None:
    """Progress for nobody."""
