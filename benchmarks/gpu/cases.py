"""One section's cases: each within its time, each caught, each written down as soon as it is done."""

from __future__ import annotations

import gc
import json
import re
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch

SCHEMA = "jettison.gpu/1"


class Status(StrEnum):
    """What became of a case."""

    OK = "ok"
    FAILED = "failed"  # it ran, and a check did not hold
    ERROR = "error"  # it did not run to its end
    SKIPPED = "skipped"  # this device, or this torch, cannot run it even without Jettison
    LEFT_OUT = "left out"  # there was no time


class Skip(Exception):
    """A case that nothing can be said about here, with the reason."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a case measured, and what did not hold."""

    figures: Mapping[str, Any] = field(default_factory=dict)
    problems: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Case:
    """A line of a page. Bytes are integers; ``figures`` names its units."""

    name: str
    status: Status
    seconds: float
    figures: Mapping[str, Any]
    said: str = ""

    def document(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "case": self.name,
            "status": str(self.status),
            "seconds": round(self.seconds, 2),
            "said": self.said,
            **self.figures,
        }


@dataclass(frozen=True, kw_only=True)
class Column:
    """A figure on the page: its title, its key, and how it is shown."""

    title: str
    key: str
    show: Callable[[Any], str] = str


@dataclass(kw_only=True)
class Log:
    """Cases of one section, and where they are written.

    Args:
        until: on `time.monotonic`; no case begins that is not expected to end before.
        head: what all of the kit's documents state: the device, versions, the date.
    """

    name: str
    title: str
    stem: Path
    device: torch.device
    until: float
    head: Mapping[str, Any]
    columns: Sequence[Column] = ()
    text: list[str] = field(default_factory=list)
    cases: list[Case] = field(default_factory=list)
    is_lost: bool = False
    """The device does not answer any more, as after an illegal access."""

    @property
    def left_seconds(self) -> float:
        """Until this section's time is up."""
        return self.until - time.monotonic()

    def run_section(self, run: Callable[[], None]) -> None:
        """All of it; what breaks between cases is a case by itself."""
        print(f"[{self.name}] until {self.left_seconds:.0f} s from now", flush=True)
        try:
            run()
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            said = f"{type(error).__name__}: {_line(error)}"
            self._recover()
            self._note(Case(name="the section", status=Status.ERROR, seconds=0.0, figures={}, said=said))
        self.write()

    def case(self, name: str, run: Callable[[], Found], *, expect: float) -> Case:
        """Run one, if it is expected to take no more seconds than there are."""
        if self.is_lost or self.left_seconds < expect:
            why = "the device does not answer" if self.is_lost else f"{max(0.0, self.left_seconds):.0f} s were left"
            return self._note(Case(name=name, status=Status.LEFT_OUT, seconds=0.0, figures={}, said=why))
        start = time.monotonic()
        status, figures, said = Status.OK, {}, ""
        try:
            found = run()
            figures, said = dict(found.figures), "; ".join(found.problems)
            status = Status.FAILED if found.problems else Status.OK
        except Skip as reason:
            status, said = Status.SKIPPED, str(reason)
        except Exception as error:  # whatever it is, the other cases are to run
            status, said = Status.ERROR, f"{type(error).__name__}: {_line(error)}"
            traceback.print_exc(file=sys.stderr)
        self._recover()
        return self._note(Case(name=name, status=status, seconds=time.monotonic() - start, figures=figures, said=said))

    def _recover(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            try:
                torch.cuda.synchronize(self.device)
                torch.cuda.empty_cache()
            except RuntimeError:
                self.is_lost = True

    def _note(self, case: Case) -> Case:
        self.cases.append(case)
        shown = ", ".join(f"{c.title} {cell(c, case)}" for c in self.columns if case.figures.get(c.key) is not None)
        print(
            f"[{self.name}] {case.name}: {case.status} in {case.seconds:.1f} s  {shown}{'  ' if case.said else ''}"
            f"{case.said}",
            flush=True,
        )
        self.write()
        return case

    def write(self) -> None:
        """The section's document and its page."""
        document = {
            "schema": SCHEMA,
            "section": self.name,
            "title": self.title,
            **self.head,
            "cases": [case.document() for case in self.cases],
        }
        self.stem.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        self.stem.with_suffix(".md").write_text(self.page(), encoding="utf-8")

    def page(self) -> str:
        """The section as Markdown."""
        dated = f", {self.head['date']}" if self.head["date"] else ""
        lines = [f"# {self.title}", "", f"{self.head['device']}, torch {self.head['torch']}{dated}", "", *self.text]
        ran = [case for case in self.cases if case.figures]
        if self.text:
            lines.append("")
        if ran and self.columns:
            lines.append("| case | " + " | ".join(c.title for c in self.columns) + " | |")
            lines.append("| --- |" + " ---: |" * len(self.columns) + " --- |")
            for case in ran:
                told = "" if case.status is Status.OK else f"**{case.status}**: {_cell(case.said)}"
                lines.append(f"| {case.name} | " + " | ".join(cell(c, case) for c in self.columns) + f" | {told} |")
            lines.append("")
        for case in self.cases:
            if not case.figures and case.status is not Status.OK:
                lines.append(f"- {case.name}: {case.status}, {_cell(case.said)}")
        return "\n".join(lines).rstrip() + "\n"

    @property
    def has_failed(self) -> bool:
        """Whether a check did not hold, or a case broke."""
        return self.is_lost or any(case.status in (Status.FAILED, Status.ERROR) for case in self.cases)


def cell(column: Column, case: Case) -> str:
    """A figure as the page has it; empty where the case has none."""
    value = case.figures.get(column.key)
    return "" if value is None else column.show(value)


def slug(device_name: str) -> str:
    """A device's name as part of a file's: ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")


def gib(nbytes: int) -> str:
    """Bytes in GiB."""
    return f"{nbytes / 2**30:.3f}"


def mib(nbytes: int) -> str:
    """Bytes in MiB."""
    return f"{nbytes / 2**20:.3f}"


def _line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")[:300]


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")
