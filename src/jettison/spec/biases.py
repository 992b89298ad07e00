"""Biases of scores that hang on how far two tokens are apart, learned (arXiv 1910.10683 §2.1), and who makes them."""

from __future__ import annotations

from enum import StrEnum


class Biases(StrEnum):
    """Where a layer's attention has them from."""

    NONE = "none"
    OWN = "own"  # each layer makes its own: umT5
    FIRST = "first"  # this layer makes them and hands them on: the first of each stack of T5
    GIVEN = "given"  # those of the first layer

    @property
    def made(self) -> bool:
        """Are there any?"""
        return self is not Biases.NONE
