"""Sizes that a description must have: whole numbers of 1 or more."""

from __future__ import annotations

from jettison.core.errors import UsageError


def positive(who: str, **sizes: object) -> None:
    """Are they?

    Raises:
        UsageError: one is not, by its name.
    """
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(f"{who}: got {name} {value!r}; expected a whole number of 1 or more")
