"""A command on a pseudo-terminal: what it writes, and how much processor time it spends without writing anything.

Silence is counted in processor seconds of the command and its children, not in seconds of a clock: a machine that does
other things as well makes nobody wait in this measure. Reads /proc, so Linux only.
"""

from __future__ import annotations

import os
import pty
import select
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

_TICKS: Final = os.sysconf("SC_CLK_TCK")
_LOOK_SECONDS: Final = 0.05


@dataclass(frozen=True, kw_only=True)
class TargetOutput:
    """A piece of output, and the processor seconds that were spent since the one before it."""

    text: str
    silence: float


@dataclass(kw_only=True)
class Run:
    """A command that has ended."""

    code: int = 0
    pieces: list[TargetOutput] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All of its output."""
        return "".join(piece.text for piece in self.pieces)

    @property
    def longest(self) -> TargetOutput:
        """The piece before which it was silent for longest; what comes after the last one is a piece without text."""
        return max(self.pieces, key=lambda piece: piece.silence)


def on_terminal(command: Sequence[str], folder: Path, env: Mapping[str, str], *, timeout_seconds: float) -> Run:
    """Run a command in a folder, with a terminal as its output."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=slave, stderr=slave, start_new_session=True
    )
    os.close(slave)
    run, spent, deadline = Run(), 0.0, time.monotonic() + timeout_seconds
    try:
        while time.monotonic() < deadline:
            ready, _, _ = select.select([master], [], [], _LOOK_SECONDS)
            now = max(spent, _spent(process.pid))
            if ready:
                try:
                    text = os.read(master, 65536).decode(errors="replace")
                except OSError:  # whoever had the other end has closed it
                    break
                run.pieces.append(TargetOutput(text=text, silence=now - spent))
                spent = now
            elif process.poll() is not None:
                break
        else:
            process.kill()
            raise TimeoutError(f"{command}: not done after {timeout_seconds} s:\n{run.text[-2000:]}")
    finally:
        os.close(master)
    run.code = process.wait()
    return run


def _spent(root: int) -> float:
    """Processor seconds of a process and all that descend from it, those that have ended included."""
    children: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        children.setdefault(int(fields[1]), []).append(int(entry.name))
        ticks[int(entry.name)] = sum(map(int, fields[11:15]))
    total, left = 0, [root]
    while left:
        process = left.pop()
        total += ticks.get(process, 0)
        left += children.get(process, [])
    return total / _TICKS
