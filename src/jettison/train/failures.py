"""How a run ends that cannot go on: other ranks that are gone, hang or do something else, numbers that are none."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Final

from torch import distributed as dist

from jettison.errors import JettisonError, UsageError
from jettison.train.rank_watch import Watch
from jettison.train.ranks import RankLost, World, agreed
from jettison.train.recipe import TrainRecipe
from jettison.train.setup import Session

_LOST: Final = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket Timeout", "gloo")
_TIMED_OUT: Final = ("timed out", "timeout")


class NotFinite(JettisonError, RuntimeError):
    """A loss or gradient is not finite, and the recipe says to stop then, or skipping did not help."""


def same_everywhere(recipe: TrainRecipe, world: World) -> None:
    """Ranks that do different things wait for each other until a timeout. Digests are compared; what is in the recipe
    goes round only where they differ.

    Raises:
        UsageError: on every rank, about the first that was given something else than rank 0.
    """
    own = dict(_flat(asdict(recipe), ""))
    digest = hashlib.sha256(repr(own).encode()).digest()
    if world.merged(digest, lambda a, b: a if a == b else b"") == digest:
        return
    expected: dict[str, Any] = world.from_leader(lambda: own)
    text = next(
        (
            f"{name}: rank {world.rank} was given {own[name]!r} and rank 0 {value!r}"
            for name, value in expected.items()
            if own[name] != value
        ),
        None,
    )
    if (found := world.first(text)) is not None:  # what is equal may be written in two ways
        raise agreed(UsageError(f"{found}; expected one recipe, with the same flags, on every rank"))


def _flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Keys of sections, such as plan.budget, with what they are."""
    if not isinstance(value, dict):
        yield name, value
        return
    for key, inner in value.items():
        yield from _flat(inner, f"{name}.{key}" if name else str(key))


def lost(error: RuntimeError, session: Session, watch: Watch) -> RankLost:
    """An error of a collective, with the rank that is why if that can be told."""
    first, step = str(error).splitlines()[0][:200], session.step + 1
    hangs = watch.who() if any(word in str(error).lower() for word in _TIMED_OUT) else None
    if hangs is None:
        return RankLost(f"another rank has gone during step {step}: {first}; start again to resume")
    return RankLost(
        f'{hangs} has not moved for timeout = "{session.recipe.timeout}", and the others wait in step {step}; '
        "start again to resume, with a longer timeout where this was no fault"
    )


def leave(hangs: str) -> None:
    """Collectives of a device do not return once they wait: end the process, before the device's own timeout does."""
    text = f"jettison: {hangs} has not moved for the recipe's timeout; start again to resume"
    print(text, file=sys.stderr, flush=True)
    os._exit(RankLost.exit_code)


def out_of_range(error: IndexError, session: Session) -> UsageError:
    """An embedding was asked for what it does not have; most are found before, see `survey.vocabulary`."""
    return UsageError(
        f"model: it cannot look up what it was given in step {session.step + 1}: {error}; the text has tokens up to "
        f"{session.text.highest}, and batch.seq is {session.recipe.batch.seq}. Expected a vocabulary and positions "
        "above these"
    )


def is_loss_of_a_rank(error: RuntimeError) -> bool:
    """Was this a collective that others did not come to?"""
    return isinstance(error, dist.DistError) or any(word in str(error) for word in _LOST)
