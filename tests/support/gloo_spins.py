"""Whether gloo hangs by itself, so that a launch of ranks may be made again.

Seen in one launch of four ranks (torch 2.13, two busy cores): a thread of ProcessGroupGloo never comes back
from an all-reduce: ``gloo::transport::tcp::UnboundBuffer::~UnboundBuffer`` yields for ever, waiting for somebody to let
go of a buffer, and the other ranks wait for that one. The thread has then taken all the time of a core, where others of
its kind take hundredths of a second.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

THREAD = "pt_gloo_runloop"
SECONDS = 60
"""Of the processor, in one such thread."""


def gloo_spins(pid: int, seconds: float = SECONDS, thread: str = THREAD) -> bool:
    """Whether a process, or one that it has started, has a thread of this name that took so much of the processor."""
    ticks = seconds * os.sysconf("SC_CLK_TCK")
    return any(name == thread and taken >= ticks for each in _tree(pid) for name, taken in _threads(each))


def _tree(pid: int) -> Iterator[int]:
    children = defaultdict(list)
    for process in Path("/proc").glob("[0-9]*"):
        if (stat := _stat(process / "stat")) is not None:
            children[int(stat[1][1])].append(int(process.name))
    waiting = [pid]
    while waiting:
        waiting += children[found := waiting.pop()]
        yield found


def _threads(pid: int) -> Iterator[tuple[str, int]]:
    for task in Path(f"/proc/{pid}/task").glob("*"):
        if (stat := _stat(task / "stat")) is not None:
            name, values = stat
            yield name, int(values[11]) + int(values[12])


def _stat(file: Path) -> tuple[str, list[str]] | None:
    """A name, and the values behind it (proc_pid_stat(5)); None: it has ended."""
    try:
        text = file.read_text()
    except OSError:
        return None
    before, _, behind = text.rpartition(")")
    return before.partition("(")[2], behind.split()
