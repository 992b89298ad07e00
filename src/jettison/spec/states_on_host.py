"""Optimizer states that live in the host's memory: which move there, what is copied each step, what stays behind.

A framework's ``defaults.toml`` has its rules, section ``states_on_host``, with the code that was read for each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Final

from jettison.core.errors import UsageError
from jettison.spec.frameworks import named


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StatesOnHost:
    """A rule; by default none moves. One object for each: they are keys of caches.

    Args:
        framework: whose it is, in messages. ``zeros``: stages of ZeRO that it is described for.
        moves_masters: the copies that the optimizer updates move. ``moves_parameters``: a rank's shards of parameters
            wait there, too.
        moves_packed: also of weights in fewer bits than products read.
        keeps_buffer: a gradient of the largest parameter stays on the device. ``copies_shards``: gradients are reduced
            on the device before they go. ``one_micro_batch``: the host adds no gradients up.
    """

    name: str = "none"
    framework: str = ""
    zeros: tuple[int, ...] = (0, 1, 2, 3)
    least_elements: int = 4096  # of a parameter whose states move; smaller ones stay
    steps_there: bool = False  # the host updates the parameters
    frees_gradients: bool = False  # gradients go as backward makes them
    moves_masters: bool = False
    moves_parameters: bool = False
    moves_packed: bool = False
    keeps_buffer: bool = False
    copies_shards: bool = False
    one_micro_batch: bool = False
    moves: bool = True  # is anything on the host?

    def __reduce__(self) -> tuple[Callable[[str], StatesOnHost], tuple[str]]:
        return states_on_host, (self.name,)

    def __str__(self) -> str:
        return self.name


NOT_MOVED: Final = StatesOnHost(moves=False)


@cache
def states_on_host(name: str) -> StatesOnHost:
    """A rule by name, or a `UsageError`."""
    rules = named("states_on_host")
    if name == "none":
        return NOT_MOVED
    if name not in rules:
        raise UsageError(f"got --states-on-host {name!r}; expected one of {', '.join(('none', *rules))}")
    fields = {key: value for key, value in rules[name].items() if key not in ("order", "folder")}
    zeros = tuple(fields.pop("zeros", NOT_MOVED.zeros))
    return StatesOnHost(name=name, zeros=zeros, **fields)


@dataclass(frozen=True, kw_only=True, slots=True)
class ElementBytes:
    """Bytes of one number of a parameter whose states are on the host, beside these.

    Args:
        sent_each, fetched_each: over the link, in every micro-batch.
        sent, fetched: the same, once a step.
    """

    host: int  # copies and gradients there, without parameters that wait for their gathers
    sent_each: int = 0
    fetched_each: int = 0
    sent: int = 0
    fetched: int = 0


def element_bytes(rule: StatesOnHost, *, zero: int, micro_batches: int, parameter: int, gradient: int) -> ElementBytes:
    """What a rule holds and moves beside states.

    Args:
        parameter, gradient: bytes of one number, as the device has them.
    """
    updated = 0 if rule.moves_parameters else parameter  # parameters come back once a step
    if not rule.steps_there:
        return ElementBytes(host=0)
    if not rule.moves_masters:
        return ElementBytes(host=updated + gradient, sent_each=gradient, fetched=updated)
    if zero == 3:
        return ElementBytes(host=gradient + 4, sent_each=gradient + 4, fetched_each=gradient, fetched=updated)
    both = gradient if micro_batches > 1 else 0
    return ElementBytes(host=4 + parameter + both, sent_each=both, fetched_each=both, sent=4, fetched=parameter)
