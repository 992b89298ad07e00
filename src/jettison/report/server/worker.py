"""Processes of the server. One answers, a question a line on stdin; one makes the page. Both say on stdout, in lines of
JSON, how far they are and what came out.

A worker ends when stdin does, whatever it is doing: with its server, however that ended. To cancel, it is killed.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from importlib import import_module
from typing import Any

from jettison.core.errors import JettisonError
from jettison.core.process import cores
from jettison.models.spec_from_name import never_record
from jettison.report.server.questions import Limits, ServedAnswer, offer

OUT_OF_MEMORY = "memory"
INTERNAL = "internal"
REFUSED = "refused"


def answer_questions(module: str, folder: str, most_bytes: str) -> None:
    """Answer with ``module``, in that folder, in so much address space."""
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is not an answer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's to handle
    os.chdir(folder)
    _bound_memory(int(most_bytes))
    questions: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(questions,), daemon=True).start()

    def say(**what: object) -> None:
        lines.write(json.dumps(what) + "\n")
        lines.flush()

    never_record()
    answer: Callable[..., ServedAnswer] = import_module(module).answer  # what questions need is there before the first
    say(ready=True)
    while True:
        say(**_answered(answer, questions.get(), lambda text: say(progress=text)))


def _read(questions: queue.SimpleQueue[dict[str, Any]]) -> None:
    for line in sys.stdin.buffer:
        questions.put(json.loads(line))
    os._exit(0)  # the server has ended, and no request waits for the answer


def _answered(answer: Callable[..., ServedAnswer], asked: dict[str, Any], progress: Any) -> dict[str, object]:
    try:
        found = answer(asked, progress)
    except JettisonError as error:
        return {"problem": REFUSED, "detail": str(error)}
    except MemoryError:
        return {"problem": OUT_OF_MEMORY, "detail": ""}
    except RecursionError:
        return {"problem": REFUSED, "detail": "the request nests more than can be worked out"}
    except Exception as error:  # a bug of ours: where it is goes to the server's terminal, not to the client
        traceback.print_exc()
        return {"problem": INTERNAL, "detail": type(error).__name__}
    return {"answer": found.text, "exit_code": found.exit_code}


def _bound_memory(most_bytes: int) -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    if sys.platform != "darwin":  # where the limit can be set, and is not heeded
        resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))


def make_page(module: str, most_bytes: str, *models: str) -> None:
    """Make the explorer's page of these models, with the panel that asks the server."""
    from jettison.report.explorer import PANELS, Panel, explorer_page

    def say(**what: str) -> None:
        sys.stdout.write(json.dumps(what) + "\n")
        sys.stdout.flush()

    try:
        offered = offer(Limits(answer_bytes=int(most_bytes)), import_module(module).SERVICE)
        panels = (Panel(name="ask", script="panels/ask.js", data={"serve": lambda _about: offered}), *PANELS)
        told = explorer_page(models, panels=panels, served=True, jobs=cores(), progress=lambda text: say(progress=text))
        say(page=told)
    except JettisonError as error:
        say(refused=str(error))


if __name__ == "__main__":
    (make_page if sys.argv[1] == "page" else answer_questions)(*sys.argv[2:])
