"""Logs as people have them: other encodings, colours, prefixes of ranks and times, frames of boxes, wrapped lines."""

from __future__ import annotations

import codecs
import re
from typing import Final

_ANSI: Final = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\))")
_BOX: Final = "│┃║╎|"
_TAG: Final = re.compile(
    r"\s*(?P<tag>\[(?:[A-Za-z_]+)?[ _:-]{0,2}\d+\]:?|\[\d+,\d+\]<std(?:err|out)>:"
    r"|\([\w.-]+(?: [\w.=-]+)* pid=\d+[^)]*\)|\d{1,5}:(?=\s)|[A-Za-z][\w.-]*\s+\|(?=\s)"
    r"|[a-z][\w.-]*\d[\w.-]*:(?=\s)|\[pod/[^\]\s]+\])[ ]?"
)
"""The rank, process, container or host whose line it is: torchrun, mpirun, Ray, srun -l, docker, pdsh, kubectl."""
_PREFIX: Final = re.compile(
    r"\s*(?:"
    r"\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?(?:\s*[-|:](?=\s))?"
    r"|(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)\s+\d+ \d\d:\d\d:\d\d [\w.-]+ [\w./@-]+(?:\[\d+\])?:"
    r"|\[?\d\d:\d\d:\d\d(?:[.,]\d+)?\]?"
    r"|\[\s*\d+\.\d+\]"
    r"|[IWEF]\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ \S+\]"
    r"|\[?(?:DEBUG|INFO|WARNING|ERROR|CRITICAL|FATAL)\]?(?:\s\d\d-\d\d \d\d:\d\d:\d\d)?"
    r"(?:\s\[?[\w./]+:\d+\])?(?:\s*[-|:](?=\s))?(?=\s)"
    r"|E(?=\s{2,}))[ ]?"
)
_BORDER: Final = re.compile(rf"\s*[{_BOX}]\s?|\s*[╭╰├][─━]*")
_TRAILING: Final = re.compile(rf"[ ]*[{_BOX}]\s*$")
MOST_LINES: Final = 400
"""Before a message, in which its traceback is looked for."""


def decoded(data: bytes) -> str:
    """The text of a file: UTF-8, or UTF-16 as Windows' shells write it; without colours, with lines that end in LF."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        text = data.decode("utf-16", errors="replace")
    elif data[:400].count(0) > len(data[:400]) // 4:
        text = data.decode("utf-16-le" if data[1:400:2].count(0) >= data[:400:2].count(0) else "utf-16-be", "replace")
    else:
        text = data.decode("utf-8-sig", errors="replace")
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    if '\\n  File \\"' in text:  # a traceback within a string of a structured log
        text = text.replace('\\"', '"').replace("\\n", "\n")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def tag_of(line: str) -> str:
    """Return the tags in front of a line (host, rank, process, container); "" where there are none."""
    return _split(line)[0]


def without_prefix(line: str) -> str:
    """Strip ranks, times, levels and borders in front of a line, and a border at its end."""
    return _TRAILING.sub("", _split(line)[1])


def _split(line: str) -> tuple[str, str]:
    tag = ""
    for _ in range(6):
        found = _BORDER.match(line) or _PREFIX.match(line)
        if found is None:
            found = _TAG.match(line)
            if found is not None:
                tag += found["tag"].strip()
        if found is None or not found.end():
            break
        line = line[found.end() :]
    return tag, line


def line_around(text: str, at: int) -> str:
    """Return the line of a position, up to that position."""
    return text[text.rfind("\n", 0, at) + 1 : at]


def lines_before(text: str, at: int) -> list[str]:
    """Return the lines that lead to a position, without prefixes; of interleaved ranks those of the same rank."""
    tag = tag_of(line_around(text, at))
    lines = text[max(0, at - 400 * MOST_LINES) : at].split("\n")[-MOST_LINES:]
    return [without_prefix(line) for line in lines if not tag or tag_of(line) in ("", tag)]


def joined(text: str, at: int, length: int) -> tuple[str, str]:
    """Join the lines after a position: with a space for each line's end, and without.

    A terminal cuts a figure in two where a line is full; a formatter does so at a space, which may stay or go.
    """
    tag = tag_of(line_around(text, at))
    first, *more = text[at : at + length].split("\n")
    lines = [_TRAILING.sub("", first), *(without_prefix(line) for line in more if not tag or tag_of(line) in ("", tag))]
    return " ".join(" ".join(lines).split()), " ".join("".join(lines).split())
