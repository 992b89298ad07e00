"""Requests that a server takes: verbs about described runs, answered as the command line prints them, without torch."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from jettison.cli.estimate import EstimateFlags, estimate
from jettison.cli.ledger import LedgerFlags, ledger
from jettison.cli.plan import PlanFlags, plan, said
from jettison.cli.search import SearchFlags, nothing
from jettison.cli.search import answer as search
from jettison.core.errors import Infeasible, JettisonError
from jettison.core.progress import Progress
from jettison.predict.run_fields import RunRequest
from jettison.report.console import json_text
from jettison.report.plan import infeasible_document
from jettison.report.server.questions import ServedAnswer, Service, VerbForm
from jettison.search.request import SearchRequest
from jettison.search.search import NothingFits


def answer(asked: dict[str, Any], say: Progress) -> ServedAnswer:
    """Answer a `ServedQuestion`, as a dict. An upload lies in the working directory meanwhile, under its name.

    Raises:
        JettisonError: what the verb says.
    """
    name, config, verb = asked["name"], asked["config"], asked["verb"]
    form = SERVICE.forms[verb]
    flags, request = form.flags(**asked["flags"]), form.request(**asked["run"])
    if config is None:
        return _VERBS[verb](name, request, flags, say)
    file = Path(name)
    file.write_text(json.dumps(config), encoding="utf-8")
    try:
        return _VERBS[verb](name, request, flags, say)
    finally:
        os.unlink(file)


def _plan(model: str, request: RunRequest, flags: PlanFlags, say: Progress) -> ServedAnswer:
    say("planning")
    try:
        report = plan(model, request, flags, progress=say)
    except Infeasible as error:
        document = infeasible_document(error, said(model, request, flags))
        return ServedAnswer(text=json_text(document), exit_code=error.exit_code)
    document = report.document()
    for key in ("made_by", "request"):
        document[key] = document[key] | {"model": model}  # where an upload lies here is nobody's concern
    return ServedAnswer(text=json_text(document), exit_code=0)


def _ledger(model: str, request: RunRequest, flags: LedgerFlags, say: Progress) -> ServedAnswer:
    say("adding up")
    report = ledger(model, request, flags, progress=say)
    text = json_text(report.document())
    try:
        report.require()
    except JettisonError as error:
        return ServedAnswer(text=text, exit_code=error.exit_code)
    return ServedAnswer(text=text, exit_code=0)


def _estimate(model: str, request: RunRequest, flags: EstimateFlags, say: Progress) -> ServedAnswer:
    say("estimating")
    return ServedAnswer(text=json_text(estimate(model, request, flags).document()), exit_code=0)


def _search(model: str, request: SearchRequest, flags: SearchFlags, say: Progress) -> ServedAnswer:
    say("searching")
    try:
        report = search(model, request, flags, jobs=1, progress=say)
    except NothingFits as error:
        return ServedAnswer(text=json_text(nothing(model, request, flags, error)), exit_code=error.exit_code)
    return ServedAnswer(text=json_text(report.document()), exit_code=0)


_VERBS: Final[Mapping[str, Callable[..., ServedAnswer]]] = {
    "plan": _plan,
    "ledger": _ledger,
    "estimate": _estimate,
    "search": _search,
}
SERVICE: Final = Service(
    answers=__name__,
    forms={
        "plan": VerbForm(PlanFlags, RunRequest),
        "ledger": VerbForm(LedgerFlags, RunRequest),
        "estimate": VerbForm(EstimateFlags, RunRequest),
        "search": VerbForm(SearchFlags, SearchRequest),
    },
)
