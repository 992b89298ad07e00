"""Pages whose examples run: Python blocks with what they print, and console blocks with what the commands print.

In a console block a line of three dots stands for any lines, three dots in a line for any text there. Commands run in
this process.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from dataclasses import dataclass

from examples.numpy_engine.__main__ import main as engine

from jettison.cli.main import run as jettison


@dataclass(frozen=True, kw_only=True)
class Said:
    """By a command: its exit code, and lines without spaces at their ends."""

    code: int
    out: list[str]
    err: list[str]


def said(words: str) -> Said:
    """What a command says."""
    program, *arguments = shlex.split(words, comments=True)
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        if program == "jettison":
            code = jettison(arguments)
        else:
            assert arguments[:2] == ["-m", "examples.numpy_engine"], words
            engine(arguments[2:])
    lines = [[line.rstrip() for line in text.getvalue().splitlines()] for text in (out, err)]
    return Said(code=code, out=lines[0], err=lines[1])


def without_figures(line: str) -> str:
    """What is left of a line that states what was measured; columns are as wide as their figures."""
    return re.sub(r"[\s─]+", " ", re.sub(r"\d[\d.,]*( (s|ms|µs|[KMG]iB|B|%)(?![a-z]))?", "#", line)).strip()


def _is(expected: str, got: str) -> bool:
    """Whether a line is one of a page."""
    pattern = ".*".join(re.escape(part) for part in expected.rstrip().split("..."))
    return re.fullmatch(pattern, got) is not None


def first_difference(expected: tuple[str, ...], got: list[str]) -> str | None:
    """The first line of a page that a command does not print there, or None."""
    at, skips = 0, False
    for line in expected:
        if line == "...":
            skips = True
            continue
        places = range(at, len(got)) if skips else range(at, at + 1)
        at = next((place + 1 for place in places if place < len(got) and _is(line, got[place])), -1)
        if at < 0:
            return line
        skips = False
    return None if skips or at == len(got) else f"and then {got[at]!r}"
