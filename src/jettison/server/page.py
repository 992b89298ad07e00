"""The served page: made by a process of its own while requests are answered, since it takes a core for seconds.

Until it is there, a browser is shown a page that comes again by itself.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module

from jettison.core.errors import JettisonError, UsageError
from jettison.core.process import cores
from jettison.core.progress import Progress, silent
from jettison.report.explorer import PANELS, Panel, explorer_page
from jettison.server.limits import Limits
from jettison.server.pool import started_process
from jettison.server.questions import Service, offer

WAITING = """<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="1">
<title>Jettison</title><p>The page is being worked out. It comes by itself.</p></html>
"""
"""Without scripts and styles, which its policy does not allow."""


class ServedPage:
    """A page's text once it is there; before, None."""

    def __init__(self, page: str | Sequence[str]) -> None:
        """``page``: its text, or the models that it is about."""
        self.text = page if isinstance(page, str) else None
        self._models = [] if isinstance(page, str) else list(page)
        self._process: asyncio.subprocess.Process | None = None

    async def make(self, limits: Limits, answers: str, progress: Progress) -> None:
        """Have it made.

        Raises:
            UsageError: a model that is none.
            RuntimeError: the process ended instead.
        """
        if self.text is not None:
            return
        self._process = process = await started_process(
            ("jettison.server.page", answers, str(limits.answer_bytes), *self._models), limits.answer_bytes
        )
        assert process.stdout is not None
        while line := await process.stdout.readline():
            said = json.loads(line)
            if "refused" in said:
                raise UsageError(said["refused"])
            self.text = said.get("page")
            if self.text is not None:
                return
            progress(said["progress"])
        raise RuntimeError("the process that makes the page ended without one (its own words are above)")

    async def stop(self) -> None:
        """End its process and those that this one has started."""
        if self._process is None or self._process.returncode is not None:
            return
        with suppress(ProcessLookupError, PermissionError):
            if os.name == "posix":
                os.killpg(self._process.pid, signal.SIGKILL)
            else:
                self._process.kill()
        await self._process.wait()


def main(arguments: list[str]) -> None:
    """``page ANSWERS BYTES MODEL ...``: the page as a line of JSON on stdout, and before it what is worked out."""
    answers, most_bytes, *models = arguments

    def say(**what: str) -> None:
        sys.stdout.write(json.dumps(what) + "\n")
        sys.stdout.flush()

    try:
        limits = Limits(answer_bytes=int(most_bytes))
        service = import_module(answers).SERVICE
        say(page=served_explorer(models, limits, service, jobs=cores(), progress=lambda text: say(progress=text)))
    except JettisonError as error:
        say(refused=str(error))


# The explorer's page with one panel more: the one that asks -----------------------------------------------------------


def served_explorer(
    models: Sequence[str], limits: Limits, service: Service, *, jobs: int = 1, progress: Progress = silent
) -> str:
    """The page that `jettison explore --serve` shows.

    Raises:
        UsageError: a model that is none.
    """
    ask = Panel(name="ask", script="panels/ask.js", data={"serve": lambda _about: offer(limits, service)})
    return explorer_page(models, panels=(ask, *PANELS), served=True, jobs=jobs, progress=progress)


if __name__ == "__main__":
    main(sys.argv[1:])
