"""Bodies of requests: JSON of bounded size and depth becomes one checked question; nothing in it names a file.

NOTE [ No request names a path ]
A verb takes a model and a GPU by name or by path, and a live model as module:factory. From a request it gets a preset's
name out of the table of presets, a GPU's out of those that ship, or a configuration that came in the body. What looks
like a path or a module is refused here, before any verb sees it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields
from functools import cache
from typing import Annotated, Any, Final, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from pydantic import Field as Bounds

from jettison.core.errors import UsageError
from jettison.core.objects import renamed
from jettison.core.parse_units import Length
from jettison.core.process import cores
from jettison.families.presets import PRESETS
from jettison.report.untrusted_json import no_constant
from jettison.request.options import RunRequest
from jettison.spec.fine_tuning import Base
from jettison.spec.hardware import hardware_names
from jettison.spec.precision import PRECISIONS, Optimizer

PROBLEM_TYPE = "application/problem+json"


class Problem(Exception):
    """A request gets no document. ``title`` names the kind, ``detail`` says what was wrong and what to do."""

    def __init__(self, status: int, title: str, detail: str, *, retry_seconds: int | None = None) -> None:
        """``retry_seconds``: when to ask again."""
        super().__init__(detail)
        self.status = status
        self.title = title
        self.detail = detail
        self.retry_seconds = retry_seconds

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {"type": "about:blank", "title": self.title, "status": self.status, "detail": self.detail}

    def headers(self) -> dict[str, str]:
        """Headers of the answer."""
        return {} if self.retry_seconds is None else {"Retry-After": str(self.retry_seconds)}


MIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Bounds of one server; docs/serve.md has them as a table.

    Args:
        workers: processes that answer, one request each at a time.
        waiting: requests that may wait for one; the next is answered 429.
        plan_seconds: of work on a plan, a ledger or an estimate.
        search_seconds: of work on a search.
        worker_bytes: of address space of a worker, where the system can bound it (not on macOS and Windows).
        worker_answers: after so many a worker is replaced, so that what it remembers does not grow.
        answer_bytes: of one document.
        body_bytes: of a request's body, a config.json included.
        depth: of lists and objects in it.
        head_bytes: of the head of a request, its first line included.
        connections: at a time; the next is answered 503.
        stop_seconds: for answers under way when the server ends.
    """

    workers: int = min(2, cores())
    waiting: int = 256
    plan_seconds: float = 60.0
    search_seconds: float = 300.0
    worker_bytes: int = 4096 * MIB
    worker_answers: int = 500
    answer_bytes: int = 64 * MIB
    body_bytes: int = 256 * 1024
    depth: int = 32
    head_bytes: int = 64 * 1024
    connections: int = 1024
    stop_seconds: float = 2.0

    def __post_init__(self) -> None:
        """Refuse bounds that nothing can keep."""
        for name in self.__slots__:
            value = getattr(self, name)
            if value < (0 if name == "waiting" else 1e-9):
                raise UsageError(f"got {name} = {value}; expected more than 0")

    def seconds(self, verb: str) -> float:
        """Seconds of work for one request of this verb."""
        return self.search_seconds if verb == "search" else self.plan_seconds


MOST: Final = 2**40
"""Largest whole number: more tokens, devices and micro-batches than there are."""
LONGEST: Final = 200
"""Characters of a text; a layout string of a thousand layers is shorter."""
MOST_FILES: Final = 4
KINDS: Final = (".toml", ".yaml", ".yml", ".json", ".sh")
"""File extensions of a trainer's files, which are read as text and never run."""
_UPLOADED: Final = "uploaded"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_ID: Final = re.compile(r"[A-Za-z0-9-]{8,64}")

Number = Annotated[int, Bounds(ge=0, le=MOST)]
Text = Annotated[str, Bounds(max_length=LONGEST)]
Share = Annotated[float, Bounds(allow_inf_nan=False)]


@dataclass(frozen=True)
class VerbForm:
    """Request of a verb: dataclasses of its own flags, and of the run or the search space."""

    flags: type[Any]
    request: type[Any]

    def flag_fields(self) -> list[Field[Any]]:
        """The verb's own flags that a client may give: none that names a file of this machine."""
        return _from_afar(self.flags)

    def fields(self) -> list[Field[Any]]:
        """All that a client may give."""
        return [*self.flag_fields(), *_from_afar(self.request)]


def _from_afar(of: type[Any]) -> list[Field[Any]]:
    return [one for one in fields(of) if not one.metadata.get("local")]


@dataclass(frozen=True, kw_only=True)
class Service:
    """Verbs of a server, and the module that answers them.

    Args:
        answers: name of the module whose ``answer(question, say)`` a worker calls.
        forms: by verb.
    """

    answers: str
    forms: Mapping[str, VerbForm]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedAnswer:
    """A document as text, and the exit code that the command line would have left with."""

    text: str
    exit_code: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedQuestion:
    """One request, checked. ``config`` is an uploaded config.json, ``files`` a trainer's; a preset has neither.

    Args:
        id: by which it can be watched and cancelled; the client's, or None.
        name: of the model: a preset, or what the upload is called.
        flags: the verb's own settings.
        run: the fields of the form's request that were given.
    """

    verb: str
    id: str | None
    name: str
    config: dict[str, Any] | None
    flags: dict[str, Any]
    run: dict[str, Any]
    files: tuple[tuple[str, str], ...] = ()
    """Name and text of each."""
    preset: str | None = None
    """Model that the files do not name."""
    gpus: int | None = None
    """Devices of the run, where its files do not say."""


def question(verb: str, form: VerbForm, body: bytes, limits: Limits) -> ServedQuestion:
    """Read a body. Raise `Problem` if it is no JSON object, too deep, or asks what cannot be asked."""
    values = decoded(body, limits)
    for odd in ("id", "name"):
        if odd in values and values[odd] is None:
            del values[odd]
    ident, name, config = values.pop("id", None), values.pop("name", None), values.pop("config", None)
    model, files = values.pop("model", None), values.pop("files", None)
    if ident is not None and not (isinstance(ident, str) and _ID.fullmatch(ident)):
        raise _refused("id: expected 8 to 64 letters, digits and hyphens")
    if [model, config, files].count(None) == 3 or (config is not None and (model or files) is not None):
        expected = "model, a preset's name, config, the object of a config.json, and files, those of a trainer"
        raise _refused(f"expected one of {expected}, or files with the model that they do not name")
    uploaded = () if files is None else _files(files)
    gpus = values.pop("gpus", None) if uploaded else None
    if gpus is not None and not (type(gpus) is int and 1 <= gpus <= MOST):
        raise _refused("gpus: expected a whole number of 1 or more")
    if uploaded and form.request is not RunRequest:
        raise _refused(f"files: {verb} takes a model; plan, estimate, ledger and write take a trainer's files")
    if verb == "write" and not uploaded:
        raise _refused("write: expected files, those of a trainer, to write the first of them again")
    if name is not None and (config is None or not (isinstance(name, str) and _NAME.fullmatch(name))):
        raise _refused("name goes with config: up to 64 letters, digits, dots, underscores and hyphens")
    if config is not None and not isinstance(config, dict):
        raise _refused("config: expected the object that a config.json holds")
    if model is not None and not (isinstance(model, str) and model in PRESETS):
        raise _refused(f"model: expected one of {', '.join(PRESETS)}; a file's content goes into config")
    checked = _checked(form, renamed(form.request, values))
    own = {one.name for one in form.flag_fields()}
    gpu = checked.get("gpu")
    if gpu is not None and gpu not in hardware_names():
        raise _refused(f"gpu: expected one of {', '.join(hardware_names())}")
    run = {key: value for key, value in checked.items() if key not in own and value is not None}
    if config is not None and verb in ("plan", "write"):
        run.setdefault("tp", 1)  # a layout has it planned from its spec; without one it would be built and traced
    stem = (name or "").removesuffix(".json")
    return ServedQuestion(
        verb=verb,
        id=ident,
        name=uploaded[0][0] if uploaded else model or f"{_UPLOADED if stem in ('', 'config') else stem}.json",
        config=config,
        flags={key: value for key, value in checked.items() if key in own},
        run=run,
        files=uploaded,
        preset=model if uploaded else None,
        gpus=gpus,
    )


def _files(given: Any) -> tuple[tuple[str, str], ...]:
    """Name and text of a trainer's files. Raise `Problem` for too many, other kinds of names, or no text."""
    if not isinstance(given, list) or not 1 <= len(given) <= MOST_FILES:
        raise _refused(f"files: expected 1 to {MOST_FILES} objects with name and text")
    found = {}
    for one in given:
        if not isinstance(one, dict) or set(one) != {"name", "text"} or not isinstance(one["text"], str):
            raise _refused("files: expected objects with name and text")
        name = one["name"]
        if not (isinstance(name, str) and _NAME.fullmatch(name) and name.endswith(KINDS)):
            kinds = ", ".join(KINDS)
            raise _refused(f"files: a name has up to 64 letters, digits, dots, _ and -, and ends in {kinds}")
        found[name] = one["text"]
    if len(found) < len(given):
        raise _refused("files: expected names that differ")
    return tuple(found.items())


def decoded(body: bytes, limits: Limits) -> dict[str, Any]:
    """The object that a body holds. Raise `Problem` if it is none, or deeper than is looked into."""
    if _depth(body) > limits.depth:
        raise Problem(400, "too deep", f"expected at most {limits.depth} lists and objects inside of one another")
    try:
        values = json.loads(body.decode("utf-8"), parse_constant=no_constant, object_pairs_hook=_each_key_once)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise Problem(400, "not JSON", f"the body is not JSON: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(values, dict):
        raise Problem(400, "not an object", "expected a JSON object with the verb's flags as its keys")
    return values


def _depth(body: bytes) -> int:
    """Nesting of brackets outside of strings."""
    depth = deepest = 0
    for bracket in re.findall(rb"[\[\]{}]", re.sub(rb'"(?:[^"\\]|\\.)*"', b"", body, flags=re.DOTALL)):
        depth += 1 if bracket in b"[{" else -1
        deepest = max(deepest, depth)
    return deepest


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Readers differ in which of two values they take."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice[:LONGEST]!r} stands twice in one object; expected it once")
    return found


def _refused(detail: str) -> Problem:
    return Problem(422, "refused", detail)


def _checked(form: VerbForm, values: dict[str, Any]) -> dict[str, Any]:
    """The keys and types of a question's flags. Raise `Problem` for unknown keys, or values of other types."""
    shape = _shape(form)
    try:
        return shape.model_validate(values).model_dump(exclude_unset=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part)[:LONGEST] for part in first["loc"])
        if first["type"] == "extra_forbidden":
            known = ", ".join(sorted({*shape.model_fields, "model", "config", "files", "name", "id"}))
            raise _refused(f"{where}: not known; expected some of {known}") from None
        raise _refused(f"{where}: {first['msg']}") from None


@cache
def _shape(form: VerbForm) -> type[BaseModel]:
    """A model of pydantic's, from our own dataclasses: flags are listed once."""
    hints = get_type_hints(form.flags) | get_type_hints(form.request)
    shape: dict[str, Any] = {}
    for one in form.fields():
        kind = _bounded(hints[one.name])
        if "most" in one.metadata:
            kind = Annotated[kind, Bounds(ge=1, le=one.metadata["most"])]
        shape[one.name] = (kind, ... if one.default is MISSING else one.default)
    return create_model("Asked", __config__=ConfigDict(extra="forbid", strict=True), **shape)


def _bounded(hint: Any) -> Any:
    """A type, or one or None, with bounds."""
    bounded = {int: Number, Length: Number, str: Text, float: Share, bool: bool}
    kinds = get_args(hint) or (hint,)
    kind = bounded[next(part for part in kinds if part is not type(None))]
    return kind | None if type(None) in kinds else kind


# What can be asked of a server: for its page, and for programs --------------------------------------------------------


def offer(limits: Limits, service: Service) -> dict[str, Any]:
    """Verbs, models, GPUs, values of some flags, and the limits."""
    return {
        "schema": "jettison.serve/1",
        "verbs": list(service.forms),
        "models": list(PRESETS),
        "gpus": list(hardware_names()),
        "kinds": list(KINDS),
        "choices": {"precision": list(PRECISIONS), "optimizer": list(Optimizer), "base": list(Base)},
        "limits": {name: getattr(limits, name) for name in limits.__slots__},
    }
