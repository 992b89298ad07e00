"""What each next GiB of a budget would change: what it saves, and which tensors change their place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from jettison.explain.layer_reasons import tensor_name, whereabouts
from jettison.predict.auto_recompute import AutoForecast, choose
from jettison.units import GIB

STEPS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Flip:
    """Tensors of one name that change their place in so many layers; bytes are of one micro-batch on one rank."""

    tensor: str
    before: str
    after: str
    layers: tuple[str, ...]
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class NextGiB:
    """One more GiB on each rank. ``saved_seconds`` of a step are what it is worth."""

    answer: AutoForecast
    saved_seconds: float
    flips: tuple[Flip, ...]


def what_if(answer: AutoForecast, *, steps: int = STEPS) -> Iterator[NextGiB]:
    """GiB by GiB above the budget, until nothing is computed again and nothing waited for."""
    before = answer
    for _ in range(steps):
        if before.seconds <= 0.0 and before.host_bytes == 0:
            return
        after = choose(
            answer.forecast.run, before.budget_bytes + GIB, answer.hardware, host_budget_bytes=answer.host_budget_bytes
        )
        yield NextGiB(
            answer=after, saved_seconds=before.step_seconds - after.step_seconds, flips=tuple(flips(before, after))
        )
        before = after


def flips(before: AutoForecast, after: AutoForecast) -> Iterator[Flip]:
    """Tensors that another plan of the same run has in another place; largest first."""
    found: defaultdict[tuple[str, str, str], list[tuple[str, int]]] = defaultdict(list)
    for old, new in zip(before.forecast.parts, after.forecast.parts, strict=True):
        places = whereabouts(new)
        for buffer, place in whereabouts(old).items():
            if places[buffer] != place:
                key = (tensor_name(old.region, buffer), place, places[buffer])
                found[key].append((old.name, old.region.program.buffers[buffer].nbytes))
    for (tensor, was, becomes), where in found.items():  # layers that only change parts with each other
        back = found.get((tensor, becomes, was), [])
        both = min(len(where), len(back))
        del where[len(where) - both :], back[len(back) - both :]
    changed = [
        Flip(
            tensor=tensor,
            before=was,
            after=becomes,
            layers=tuple(dict.fromkeys(name for name, _ in where)),
            nbytes=sum(nbytes for _, nbytes in where),
        )
        for (tensor, was, becomes), where in found.items()
        if where
    ]
    yield from sorted(changed, key=lambda flip: (-flip.nbytes, flip.tensor))
