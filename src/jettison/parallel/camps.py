"""Which ranks say the same: digests on their way up a tree, and ranks in words.

A branch that is of one mind is 32 bytes. Only where digests differ is there more to say, and it stays short however
many ranks there are: the largest camps, and some runs of ranks of each.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from jettison.parallel.rank_tree import Merge, branch

DIGEST_BYTES = 32
_CAMPS, _RUNS = 8, 8
"""What is carried at most. Of what lies beyond only the number is known."""


@dataclass(frozen=True, kw_only=True)
class Camp:
    """Ranks that said the same.

    Args:
        digest: in hexadecimal; empty for camps that are too many to be told apart.
        count: of ranks.
        runs: of places side by side, the first and the last of each, ascending; not all where they are many.
    """

    digest: str
    count: int
    runs: tuple[tuple[int, int], ...]


def merged(size: int) -> Merge:
    """How words of branches, of so many places, become one."""
    return partial(_merge, size)


def _merge(size: int, words: Sequence[tuple[int, bytes]]) -> bytes:
    own, place = words[0][1], words[0][0]
    if len(own) == DIGEST_BYTES and all(word == own for _, word in words):
        return own
    found: dict[str, list[Camp]] = {}
    for at, word in words:
        for camp in camps_of(word, range(at, at + 1) if at == place else branch(at, size)):
            found.setdefault(camp.digest, []).append(camp)
    return _written(_fewer([_joined(camps) for camps in found.values()]))


def camps_of(word: bytes, places: range) -> list[Camp]:
    """What these places said, the largest camp first."""
    if len(word) == DIGEST_BYTES:
        return [Camp(digest=word.hex(), count=len(places), runs=((places[0], places[-1]),))]
    return [
        Camp(digest=digest, count=count, runs=tuple((first, last) for first, last in runs))
        for digest, count, runs in json.loads(word)
    ]


def _written(camps: Iterable[Camp]) -> bytes:
    text = json.dumps([[camp.digest, camp.count, camp.runs] for camp in camps], separators=(",", ":"))
    return text.encode().ljust(DIGEST_BYTES + 1)  # never of a digest's length


def _joined(camps: Sequence[Camp]) -> Camp:
    """Camps with one digest, in the order of their places, as one."""
    runs: list[tuple[int, int]] = []
    for first, last in (run for camp in camps for run in camp.runs):
        if runs and runs[-1][1] + 1 == first:
            runs[-1] = (runs[-1][0], last)
        else:
            runs.append((first, last))
    return Camp(digest=camps[0].digest, count=sum(camp.count for camp in camps), runs=tuple(runs[:_RUNS]))


def _fewer(camps: list[Camp]) -> list[Camp]:
    """The largest; what is left as one without a digest."""
    known = sorted((c for c in camps if c.digest), key=lambda c: (-c.count, c.runs))
    rest = sum(c.count for c in camps if not c.digest) + sum(c.count for c in known[_CAMPS:])
    return [*known[:_CAMPS], *([Camp(digest="", count=rest, runs=())] if rest else [])]


def listed(ranks: Iterable[int], count: int | None = None) -> str:
    """Ranks in words, ascending: each, or runs of them; the first few, and how many more.

    Args:
        count: how many they are, where not all are given.
    """
    runs: list[list[int]] = []
    total = 0
    for rank in sorted(ranks):
        total += 1
        if runs and runs[-1][1] + 1 == rank:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    parts = [part for first, last in runs[:_RUNS] for part in _run(first, last)][:_RUNS]
    shown = sum(1 if len(part) == 1 else part[1] - part[0] + 1 for part in parts)
    more = (total if count is None else count) - shown
    text = ", ".join(" to ".join(map(str, part)) for part in parts)
    return f"{text} and {more:,} more" if more else text


def _run(first: int, last: int) -> list[tuple[int, ...]]:
    return [(first, last)] if last - first > 1 else [(rank,) for rank in range(first, last + 1)]


def ranks_in_words(ranks: Iterable[int], count: int | None = None) -> str:
    """With the noun."""
    every = list(ranks)
    return f"rank{'s' if (count or len(every)) != 1 else ''} {listed(every, count)}"


__all__ = ["DIGEST_BYTES", "Camp", "camps_of", "listed", "merged", "ranks_in_words"]
