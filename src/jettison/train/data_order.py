"""Which sequences a step trains on, and every seed: functions of (seed, position). No torch, no state.

NOTE [ Positions ]
Nothing about data order or random numbers is carried from step to step. Sequence n of a run (n = step x global_batch +
its place in the batch) is a window of the text that `Order` finds from n alone, and random streams are seeded for
each micro-batch from (seed, step, number of the micro-batch in the global batch). A run that is resumed at a step, on
whatever layout, therefore continues with the same sequences, and with the same dropout wherever micro-batches are the
same: a rank is handed its share of the global batch, not a stream of its own.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

_ROUNDS = 4


def derived_seed(*parts: int | str) -> int:
    """A seed below 2^63 for this position: unlike ones for unlike positions, on every machine the same."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


@dataclass(frozen=True)
class Order:
    """The order in which windows are visited: every one once in each pass over the text, shuffled each time."""

    windows: int
    seed: int

    def window(self, n: int) -> int:
        """The window that sequence ``n`` of the run is."""
        turn, place = divmod(n, self.windows)
        return _Shuffle(self.windows, derived_seed(self.seed, "order", turn)).at(place)


class InOrder:
    """Every window in its place, from the first."""

    def window(self, n: int) -> int:
        """The window that sequence ``n`` is."""
        return n


@dataclass(frozen=True)
class _Shuffle:
    """A permutation of range(n) that is worked out point by point: a Feistel network, walked until it is within range.

    It needs no memory, where shuffling a list of all windows of a large corpus would.
    """

    n: int
    key: int

    def at(self, place: int) -> int:
        """Where ``place`` goes."""
        while True:
            place = self._pass(place)
            if place < self.n:
                return place

    @cached_property
    def _half(self) -> int:
        return max(1, ((self.n - 1).bit_length() + 1) // 2)

    def _pass(self, place: int) -> int:
        mask = (1 << self._half) - 1
        left, right = place >> self._half, place & mask
        for number in range(_ROUNDS):
            left, right = right, left ^ (derived_seed(self.key, number, right) & mask)
        return left << self._half | right
