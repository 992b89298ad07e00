"""Ranks that a model talks to by itself, in its own forward, whatever its parameters tell."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import distributed

from jettison.capture.model_trace import ModelTrace
from jettison.capture.op_traits import is_communication
from jettison.parallel.agree import ranks_in


def talking_groups(traces: Iterable[ModelTrace]) -> set[tuple[int, ...]]:
    """Groups of the collectives that models call where they are traced.

    Their ranks have to follow one plan: a collective that one rank runs again, for its backward, meets another one of a
    rank that does not. Groups that send nothing are nobody's.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return set()
    named = {str(name): group for group, name in distributed.distributed_c10d._world.pg_names.items()}
    found = set()
    for value in _given(traces):
        group = distributed.ProcessGroup.unbox(value) if isinstance(value, torch.ScriptObject) else value
        group = named.get(group) if isinstance(group, str) else group
        if isinstance(group, distributed.ProcessGroup) and distributed.get_backend(group) != "fake":
            found.add(ranks_in(group))
    return {ranks for ranks in found if len(ranks) > 1}


def _given(traces: Iterable[ModelTrace]) -> Iterator[Any]:
    """Arguments of what talks to other ranks: names of groups, groups, and others."""
    for one in traces:
        yield from _given(one.more)
        for region in (one.root, *(cls.trace for cls in one.classes.values())):
            for call in region.calls:
                if is_communication(call.func):
                    yield from (*call.args, *call.kwargs.values())


__all__ = ["talking_groups"]
