"""What a body asks: JSON of bounded size and depth becomes one checked question; nothing in it names a file.

NOTE [ No request names a path ]
A verb takes a model and a GPU by name or by path, and a live model as module:factory. From a request it gets a preset's
name out of the table of presets, a GPU's out of those that ship, or a configuration that came in the body. What looks
like a path or a module is refused here, before any verb sees it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Annotated, Any, Final, Literal, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from jettison.parse_units import Length
from jettison.predict.run_fields import RunRequest
from jettison.search.request import MARGIN, SearchRequest
from jettison.server.limits import Limits
from jettison.server.problems import Problem
from jettison.spec.hardware import hardware_names
from jettison.spec.presets import PRESETS

Verb = Literal["plan", "ledger", "estimate", "search"]
VERBS: Final[tuple[Verb, ...]] = get_args(Verb)

MOST: Final = 2**40
"""Of any whole number: more tokens, devices and micro-batches than there are."""
LONGEST: Final = 200
"""Characters of a text; a layout string of a thousand layers is shorter."""
_UPLOADED: Final = "uploaded"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_ID: Final = re.compile(r"[A-Za-z0-9-]{8,64}")

Number = Annotated[int, Field(ge=0, le=MOST)]
Text = Annotated[str, Field(max_length=LONGEST)]
Share = Annotated[float, Field(allow_inf_nan=False)]

_OWN: Final[Mapping[Verb, dict[str, Any]]] = {
    "plan": {"budget": Text | None, "gpu": Text | None, "host_budget": Text | None, "what_if": bool},
    "ledger": {"budget": Text | None, "gpu": Text | None, "fit": bool, "explain": bool, "compile": bool},
    "estimate": {
        "gpu": Text,
        "compile": bool,
        "explain": bool,
        "tokens": Share | None,
        "price_per_gpu_hour": Share | None,
    },
    "search": {
        "gpus": Number,
        "gpu": Text,
        "global_batch": Number,
        "budget": Text | None,
        "margin": Share,
        "tokens": Share | None,
        "price_per_gpu_hour": Share | None,
        "top": Annotated[int, Field(ge=1, le=100)],
    },
}
"""What a verb is asked beside the run: the names are the command line's flags."""
_DEFAULTS: Final[dict[str, Any]] = {
    "what_if": False,
    "fit": False,
    "explain": False,
    "compile": False,
    "top": 10,
    "margin": MARGIN,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """One request, checked. ``config`` is the uploaded configuration, None for a preset.

    Args:
        id: by which it can be watched and cancelled; the client's, or None.
        name: of the model: a preset, or what the upload is called.
        flags: what the verb is asked beside the run.
        run: the fields of a `RunRequest`, or for a search of a `SearchRequest`, that were given.
    """

    verb: Verb
    id: str | None
    name: str
    config: dict[str, Any] | None
    flags: dict[str, Any]
    run: dict[str, Any]


def question(verb: Verb, body: bytes, limits: Limits) -> Question:
    """What a body asks.

    Raises:
        Problem: it is no JSON object, too deep, or asks what cannot be asked.
    """
    values = decoded(body, limits)
    for odd in ("id", "name"):
        if odd in values and values[odd] is None:
            del values[odd]
    ident, name, config = values.pop("id", None), values.pop("name", None), values.pop("config", None)
    model = values.pop("model", None)
    if ident is not None and not (isinstance(ident, str) and _ID.fullmatch(ident)):
        raise _refused("id: expected 8 to 64 letters, digits and hyphens")
    if (model is None) == (config is None):
        raise _refused("expected exactly one of model, a preset's name, and config, the object of a config.json")
    if name is not None and (config is None or not (isinstance(name, str) and _NAME.fullmatch(name))):
        raise _refused("name goes with config: up to 64 letters, digits, dots, underscores and hyphens")
    if config is not None and not isinstance(config, dict):
        raise _refused("config: expected the object that a config.json holds")
    if model is not None and not (isinstance(model, str) and model in PRESETS):
        raise _refused(f"model: expected one of {', '.join(PRESETS)}; a file's content goes into config")
    checked = _checked(verb, values)
    own = _OWN[verb]
    gpu = checked.get("gpu")
    if gpu is not None and gpu not in hardware_names():
        raise _refused(f"gpu: expected one of {', '.join(hardware_names())}")
    flags = _DEFAULTS | {key: value for key, value in checked.items() if key in own}
    run = {key: value for key, value in checked.items() if key not in own and value is not None}
    if config is not None and verb == "plan":
        run.setdefault("tp", 1)  # a layout has it planned from its spec; without one it would be built and traced
    return Question(
        verb=verb,
        id=ident,
        name=_file_name(name) if model is None else model,
        config=config,
        flags={key: flags[key] for key in own if key in flags},
        run=run,
    )


def decoded(body: bytes, limits: Limits) -> dict[str, Any]:
    """The object that a body holds.

    Raises:
        Problem: it is none, or deeper than is looked into.
    """
    if _depth(body) > limits.depth:
        raise Problem(400, "too deep", f"expected at most {limits.depth} lists and objects inside of one another")
    try:
        values = json.loads(body.decode("utf-8"), parse_constant=_no_constant, object_pairs_hook=_each_key_once)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise Problem(400, "not JSON", f"the body is not JSON: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(values, dict):
        raise Problem(400, "not an object", "expected a JSON object with the verb's flags as its keys")
    return values


def _depth(body: bytes) -> int:
    """How deep brackets nest, outside of strings."""
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


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is no JSON")


def _file_name(name: str | None) -> str:
    stem = (name or _UPLOADED).removesuffix(".json")
    return f"{_UPLOADED if stem == 'config' else stem or _UPLOADED}.json"


def _refused(detail: str) -> Problem:
    return Problem(422, "refused", detail)


def _checked(verb: Verb, values: dict[str, Any]) -> dict[str, Any]:
    """The keys and types of a question's flags.

    Raises:
        Problem: a key that is not known, or a value of another type.
    """
    try:
        return _form(verb).model_validate(values).model_dump(exclude_unset=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part)[:LONGEST] for part in first["loc"])
        if first["type"] == "extra_forbidden":
            known = ", ".join(sorted({*_form(verb).model_fields, "model", "config", "name", "id"}))
            raise _refused(f"{where}: not known; expected some of {known}") from None
        raise _refused(f"{where}: {first['msg']}") from None


@cache
def _form(verb: Verb) -> type[BaseModel]:
    """A model of pydantic's, from our own dataclass: the fields are listed once."""
    request = SearchRequest if verb == "search" else RunRequest
    hints = get_type_hints(request)
    run: dict[str, Any] = {field.name: (_bounded(hints[field.name]), None) for field in fields(request)}
    own: dict[str, Any] = {}
    for key, kind in _OWN[verb].items():
        needed = type(None) not in get_args(kind) and key not in _DEFAULTS
        own[key] = (kind, ... if needed else _DEFAULTS.get(key))
    config = ConfigDict(extra="forbid", strict=True)
    return create_model(f"{verb}_question", __config__=config, **run, **own)


def _bounded(hint: Any) -> Any:
    """``int | None`` and its like, with bounds."""
    bounded = {int: Number, Length: Number, str: Text, float: Share, bool: bool}
    kind = next(part for part in get_args(hint) if part is not type(None))
    return bounded[kind] | None
