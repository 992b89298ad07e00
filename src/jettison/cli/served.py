"""Requests that a server takes: verbs about described runs, answered as the command line prints them, without torch."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final

from jettison.cli.estimate import EstimateFlags, estimate
from jettison.cli.from_file import RunSourceFlags, sourced
from jettison.cli.ledger import LedgerFlags, ledger
from jettison.cli.plan import PlanFlags, plan, said
from jettison.cli.search import SearchFlags, nothing
from jettison.cli.search import answer as search
from jettison.core.documents import document
from jettison.core.errors import Infeasible, JettisonError
from jettison.core.progress import Progress
from jettison.frameworks.run_file import RunFile
from jettison.frameworks.write_back import write_back
from jettison.report.console import json_text
from jettison.report.plan import ForecastPlan, infeasible_document
from jettison.report.server.questions import ServedAnswer, Service, VerbForm
from jettison.request.options import DECIDED, RunRequest
from jettison.search.search import NothingFits, SearchRequest


def answer(asked: dict[str, Any], say: Progress) -> ServedAnswer:
    """Answer a `ServedQuestion`, as a dict. Uploads lie in the working directory meanwhile, under their names. Raise
    `JettisonError` as the verb does.
    """
    name, config, form = asked["name"], asked["config"], SERVICE.forms[asked["verb"]]
    flags, request = form.flags(**asked["flags"]), form.request(**asked["run"])
    files = asked["files"] or ([] if config is None else [(name, json.dumps(config))])
    paths = [Path(file) for file, _ in files]
    for path, (_, text) in zip(paths, files, strict=True):
        path.write_text(text, encoding="utf-8")
    try:
        if asked["files"]:
            found, exit_code = _of_files(asked, paths, request, flags, say)
        else:
            found, exit_code = _VERBS[asked["verb"]](name, request, flags, say)
    finally:
        for path in paths:
            path.unlink(missing_ok=True)
    return ServedAnswer(text=json_text(found), exit_code=exit_code)


Said = tuple[dict[str, Any], int]
"""A verb's document and exit code."""


def _of_files(asked: dict[str, Any], paths: list[Path], request: RunRequest, flags: Any, say: Progress) -> Said:
    """Answer about a trainer's own files; what they name is looked for nowhere else on this machine."""
    verb, source = asked["verb"], RunSourceFlags(from_file=paths, gpus=asked["gpus"])
    as_verb, decides = _AS.get(verb, verb), _DECIDES.get(verb, ())
    with _nothing_else_read():
        model, request, found = sourced(asked["preset"], request, source, verb=as_verb, decides=decides)
        assert found is not None
        if verb == "write":
            return _written(model, request, flags, found, paths[1:]), 0
        answered, exit_code = _VERBS[verb](model, request, flags, say)
        return answered | {"from": found.document()}, exit_code


def _written(model: str, request: RunRequest, flags: PlanFlags, found: RunFile, others: list[Path]) -> dict[str, Any]:
    """The first file with the plan's settings, as `plan --from FILE --write` writes it."""
    report = plan(model, request, flags)
    assert isinstance(report, ForecastPlan), "a run with a layout or a GPU is planned from its spec"
    made = write_back(found, report.choice, limit=report.limit, others=tuple(others))
    name = f"{found.path.stem}.planned{found.path.suffix}"
    return document("jettison.written/1", name=name, text=made.text, changes=list(made.lines()))


_READS: Final = ("open", "os.listdir", "os.scandir")
"""Audit events of Python that look into a file or a folder."""
_reading = False


@contextmanager
def _nothing_else_read() -> Iterator[None]:
    """Find no files outside of the working directory, Python's and this package's own."""
    global _reading
    _hook_once()
    _reading = True
    try:
        yield
    finally:
        _reading = False


@cache
def _hook_once() -> None:
    own: list[str | Path] = [os.getcwd(), sys.prefix, sys.base_prefix, *sys.path, Path(__file__).parents[1]]
    roots = [os.path.realpath(one).rstrip(os.sep) for one in own]

    def hook(event: str, given: tuple[Any, ...]) -> None:
        if not _reading or event not in _READS or not given or not isinstance(given[0], str | bytes | os.PathLike):
            return
        path = os.path.realpath(os.fsdecode(given[0]))
        if not any(path == root or path.startswith(root + os.sep) for root in roots):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)  # as if it were not there

    sys.addaudithook(hook)


def _plan(model: str, request: RunRequest, flags: PlanFlags, say: Progress) -> Said:
    say("planning")
    try:
        found = plan(model, request, flags, progress=say).document()
    except Infeasible as error:
        return infeasible_document(error, said(model, request, flags)), error.exit_code
    for key in ("made_by", "request"):
        found[key] = found[key] | {"model": model}  # without the path of the upload
    return found, 0


def _ledger(model: str, request: RunRequest, flags: LedgerFlags, say: Progress) -> Said:
    say("adding up")
    report, exit_code = ledger(model, request, flags, progress=say), 0
    try:
        report.require()
    except JettisonError as error:
        exit_code = error.exit_code
    return report.document(), exit_code


def _estimate(model: str, request: RunRequest, flags: EstimateFlags, say: Progress) -> Said:
    say("estimating")
    return estimate(model, request, flags).document(), 0


def _search(model: str, request: SearchRequest, flags: SearchFlags, say: Progress) -> Said:
    say("searching")
    try:
        return search(model, request, flags, jobs=1, progress=say).document(), 0
    except NothingFits as error:
        return nothing(model, request, flags, error), error.exit_code


_AS: Final = {"write": "plan"}
_DECIDES: Final = {"plan": DECIDED, "write": DECIDED}
_VERBS: Final[Mapping[str, Callable[..., Said]]] = {
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
        "write": VerbForm(PlanFlags, RunRequest),
    },
)
