"""From a question to the document that the command line would print. Runs in a worker, and loads no torch."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jettison.errors import Infeasible, JettisonError
from jettison.predict.run_fields import RunRequest
from jettison.progress import Progress
from jettison.report.json_text import json_text
from jettison.search.request import SearchRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A document as text, and the exit code that the command line would have left with."""

    text: str
    exit_code: int


def answer(asked: dict[str, Any], say: Progress) -> Answer:
    """Answer a `Question`, as a dict. An upload lies in the working directory meanwhile, under its name.

    Raises:
        JettisonError: what the verb says.
    """
    name, config = asked["name"], asked["config"]
    if config is None:
        return _answer(asked, say)
    file = Path(name)
    file.write_text(json.dumps(config), encoding="utf-8")
    try:
        return _answer(asked, say)
    finally:
        os.unlink(file)


def _answer(asked: dict[str, Any], say: Progress) -> Answer:
    verbs = {"plan": _plan, "ledger": _ledger, "estimate": _estimate, "search": _search}
    return verbs[asked["verb"]](asked["name"], asked["flags"], asked["run"], say)


def _plan(model: str, flags: dict[str, Any], run: dict[str, Any], say: Progress) -> Answer:
    from jettison.report.plan import infeasible_document
    from jettison.verbs.plan import plan

    say("planning")
    try:
        report = plan(model, RunRequest(**run), **_with("budget", flags), progress=say)
    except Infeasible as error:
        said = _said(model, flags, run)
        return Answer(text=json_text(infeasible_document(error, said)), exit_code=error.exit_code)
    document = report.document()
    for key in ("made_by", "request"):
        document[key] = document[key] | {"model": model}  # where an upload lies here is nobody's concern
    return Answer(text=json_text(document), exit_code=0)


def _ledger(model: str, flags: dict[str, Any], run: dict[str, Any], say: Progress) -> Answer:
    from jettison.verbs.ledger import ledger

    say("adding up")
    compiled = flags.pop("compile")
    report = ledger(model, RunRequest(**run), compiled=compiled, **flags, progress=say)
    text = json_text(report.document())
    try:
        report.require()
    except JettisonError as error:
        return Answer(text=text, exit_code=error.exit_code)
    return Answer(text=text, exit_code=0)


def _estimate(model: str, flags: dict[str, Any], run: dict[str, Any], say: Progress) -> Answer:
    from jettison.verbs.estimate import estimate

    say("estimating")
    compiled = flags.pop("compile")
    report = estimate(model, RunRequest(**run), compiled=compiled, **flags)
    return Answer(text=json_text(report.document()), exit_code=0)


def _search(model: str, flags: dict[str, Any], run: dict[str, Any], say: Progress) -> Answer:
    from jettison.report.search import nothing_document
    from jettison.search.search import NothingFits
    from jettison.verbs.search import search

    say("searching")
    try:
        report = search(model, SearchRequest(**run), **flags, jobs=1, progress=say)
    except NothingFits as error:
        return Answer(
            text=json_text(nothing_document(model, flags["gpus"], flags["gpu"], error, _said(model, flags, run))),
            exit_code=error.exit_code,
        )
    return Answer(text=json_text(report.document()), exit_code=0)


def _said(model: str, flags: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    """What was asked, without what nobody gave, as the command line says it."""
    given = {name: value for name, value in (flags | run).items() if value is not None and value is not False}
    return {"model": model, **given}


def _with(name: str, flags: dict[str, Any]) -> dict[str, Any]:
    """``flags``, with None where this one was not given: the verb has no default for it."""
    return {name: None, **flags}
