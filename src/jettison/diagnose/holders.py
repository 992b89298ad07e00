"""The holders of a device's memory: tensors, PyTorch's cache, this process outside of PyTorch, other processes."""

from __future__ import annotations

from typing import Any, Final

Figures = dict[str, Any]
SLACK: Final = 0.01
"""Share of a device within which figures agree: messages round them to two decimals."""
MOST_OUTSIDE: Final = 0.25
"""Share of a device that a process may hold outside of PyTorch and still be taken for this one."""


def held_figures(
    *,
    total: int | None,
    free: int | None,
    allocated: int | None,
    unused: int | None,
    private: int = 0,
    own: int | None = None,
    processes: tuple[int, ...] = (),
) -> Figures:
    """Account for every byte of a device: figures of `MemoryFacts` that sum to its capacity.

    Args:
        own: bytes of this process by the driver's count; None where the source does not say.
        processes: bytes of each other process. In a container a process is listed under a number that it does not know
            itself: it is the one that holds as much as PyTorch, or a little more.
    """
    held = (allocated or 0) + (unused or 0)
    if total == 0:
        total = free = None  # the driver does not say
    notes: list[str] = []
    if total is not None and held > total * (1 + SLACK):
        return _figures(total, free, allocated, unused, 0) | {"shared_bytes": held + (free or 0) - total}
    if free is not None and total is not None and free > max(0, total - held) * (1 + SLACK):
        free = max(0, total - held)
        notes.append("the driver calls more free than the device has left: memory that is shared with the host")
    if own is None and processes:
        size = total or held
        near = [one for one in processes if held - SLACK * size <= one <= held + MOST_OUTSIDE * size]
        mine = min(near, default=None)
        if mine is not None:
            own = mine
            rest = list(processes)
            rest.remove(mine)
            processes = tuple(rest)
            notes.append(
                "one of the processes that the message lists is this one: in a container it has another number"
            )
    if free is None and total is not None and allocated is not None:
        free = max(0, total - max(held, own or 0) - sum(processes))
        notes.append("what is free is not stated: it is what the others leave, at most")
    figures = _figures(total, free, allocated, unused, private) | {"notes": tuple(notes)}
    outside = max(0, own - held) if own is not None else 0
    others = sum(processes)
    if total is None or free is None or allocated is None:
        return figures | {"outside_bytes": outside, "other_processes_bytes": others}
    rest_bytes = max(0, total - free - held)
    outside = min(outside, rest_bytes)
    others = min(others, rest_bytes - outside)
    left = rest_bytes - outside - others
    return figures | {"outside_bytes": outside, "other_processes_bytes": others, "unaccounted_bytes": left}


def _figures(total: int | None, free: int | None, allocated: int | None, unused: int | None, private: int) -> Figures:
    pools = private if unused is not None and private <= unused else 0
    left = None if unused is None else unused - pools
    return {
        "total_bytes": total,
        "free_bytes": free,
        "allocated_bytes": allocated,
        "unused_bytes": left,
        "private_bytes": pools,
    }
