"""Ranks that a model talks to by itself, in its own forward, whatever its parameters tell."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import distributed

from jettison.capture.model_trace import ModelTrace
from jettison.capture.op_traits import is_collective
from jettison.parallel.agree import ranks_in


def talking_groups(traces: Iterable[ModelTrace]) -> set[tuple[int, ...]]:
    """Groups of the functional collectives that models call where they are traced.

    Their ranks have to follow one plan: a collective that one rank runs again, for its backward, meets another one of a
    rank that does not. Groups that send nothing are nobody's.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return set()
    groups = {str(name): group for group, name in distributed.distributed_c10d._world.pg_names.items()}
    named = [groups[value] for value in _given(traces) if isinstance(value, str) and value in groups]
    found = {ranks_in(group) for group in named if distributed.get_backend(group) != "fake"}
    return {ranks for ranks in found if len(ranks) > 1}


def _given(traces: Iterable[ModelTrace]) -> Iterator[Any]:
    """Arguments of what talks to other ranks: names of groups, and others."""
    for one in traces:
        yield from _given(one.more)
        for region in (one.root, *(cls.trace for cls in one.classes.values())):
            for call in region.calls:
                if is_collective(call.func):
                    yield from (*call.args, *call.kwargs.values())


__all__ = ["talking_groups"]
