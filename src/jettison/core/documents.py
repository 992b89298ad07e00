"""Documents: `schemas.toml` has the keys of each and of their parts, with types. Documents are made by it, JSON Schema
is generated from it, and tests hold documents to it.

A document has all keys of its schema, whatever was asked: what does not apply is null, and never left out. Keys are
added within a version, never renamed; what would change the meaning of one makes a new version. ``python -m
jettison.core.documents FOLDER`` writes all schemas.
"""

from __future__ import annotations

import json
import sys
from dataclasses import MISSING, fields, is_dataclass
from enum import StrEnum
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from typing_extensions import TypedDict

from jettison.core.files import read_table
from jettison.core.objects import former_names


@cache
def schema_tables() -> dict[str, dict[str, Any]]:
    """Tables of all documents and parts, by name."""
    return read_table(Path(__file__).with_name("schemas.toml"))


@cache
def types_of(name: str) -> dict[str, str]:
    """Types of a document or part by key, as text."""
    found = {"schema": f'Literal["{name}"]'} if "/" in name else {}
    for key, kind in schema_tables()[name].items():
        if key == "_fields":
            found |= {one.name: str(one.type) for one in fields(class_of(kind))}
        elif key not in ("_says", "_former"):
            found[key] = kind
    former = _former(name)
    return {
        name: kind
        for key, kind in found.items()
        for name, kind in ((key, kind), (former.get(key, ""), f"Annotated[{kind}, Field(deprecated=True)]"))
        if name
    }


def class_of(path: str) -> Any:
    """The dataclass of a path."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def _former(name: str) -> dict[str, str]:
    """Former names of a document's or part's renamed keys, by key."""
    table = schema_tables()[name]
    found: dict[str, str] = former_names(class_of(table["_fields"])) if "_fields" in table else {}
    return {**found, **table.get("_former", {})}


def keys_of(name: str) -> tuple[str, ...]:
    """Keys of a document, or of a part of one, in their order.

    Args:
        name: of a schema, or of a part in `schemas.toml`.
    """
    return tuple(types_of(name))


def part(name: str, /, *sources: object, **stated: Any) -> dict[str, Any]:
    """A document, or a part of one, with all its keys: as stated, else the attribute of that name of the first source
    that has one, else null; see `data`.

    Args:
        name: as of `keys_of`.
    """
    keys = keys_of(name)
    assert stated.keys() <= set(keys), (name, stated.keys() - set(keys))
    found = {key: data(stated[key] if key in stated else _attribute(key, sources)) for key in keys}
    return found | {former: found[key] for key, former in _former(name).items()}


def _attribute(name: str, sources: tuple[object, ...]) -> Any:
    values = (getattr(source, name, MISSING) for source in sources)
    return next((value for value in values if value is not MISSING), None)


def data(value: Any) -> Any:
    """A value of a document as what JSON is made of: dataclasses become parts, or the documents that they say."""
    if isinstance(value, (tuple, list)):
        return [data(one) for one in value]
    if isinstance(value, StrEnum):
        return str(value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    if hasattr(value, "document"):
        return value.document()
    if (name := type(value).__name__) in schema_tables():
        return part(name, value)
    return {key.name: data(getattr(value, key.name)) for key in fields(value)}


def document(schema: str, /, *sources: object, **stated: Any) -> dict[str, Any]:
    """A whole document of a schema, the same way."""
    return part(schema, *sources, schema=schema, **stated)


def schema_names() -> tuple[str, ...]:
    """Names of all schemas."""
    return tuple(sorted(name for name in schema_tables() if "/" in name))


@cache
def _shapes() -> dict[str, Any]:
    """Every document and part as a type, with the dataclasses that are parts of them."""
    from pydantic import Field

    tables = dict(schema_tables())
    space: dict[str, Any] = {
        "Annotated": Annotated,
        "Any": Any,
        "Field": Field,
        "Literal": Literal,
        "Request": dict[str, Any],
    }
    for module, names in tables.pop("_imports").items():
        space |= {name: getattr(import_module(module), name) for name in names}
    for name, table in tables.items():
        hints = get_type_hints(type(name, (), {"__annotations__": types_of(name)}), space, include_extras=True)
        made: Any = TypedDict(name, hints)  # type: ignore[misc]
        made.__doc__ = table.get("_says") or (class_of(table["_fields"]).__doc__ if "_fields" in table else None)
        made.__module__ = "jettison.core.documents"  # also when run as a script
        space[name] = made
    return space


def json_schema(schema: str) -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a document."""
    from pydantic import TypeAdapter

    made = _published(TypeAdapter(_shapes()[schema]).json_schema(mode="serialization"))
    words = " ".join(schema_tables()[schema]["_says"].split())
    draft = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": schema}
    return {**draft, **made, "title": schema, "description": words}


def _published(made: Any) -> Any:
    """Forms of documents: all keys are present, enumerations are texts, and arguments of classes are left out."""
    words = {f"#/$defs/{name}" for name, found in made.get("$defs", {}).items() if "enum" in found}

    def walk(node: Any, name: str = "") -> Any:
        if isinstance(node, list):
            return [walk(each) for each in node]
        if not isinstance(node, dict):
            return node
        if node.get("$ref") in words:
            return {"title": name.replace("_", " ").title(), "type": "string"}
        found = {}
        for key, value in node.items():
            if key not in ("default", "required"):
                found[key] = walk(value, key)
            if key == "properties":
                found["required"] = list(value)
        if "properties" in found and "description" in found:
            found["description"] = found["description"].partition("\n\nArgs:")[0]
        return found

    found: dict[str, Any] = walk(made)
    if words:
        found["$defs"] = {name: each for name, each in found["$defs"].items() if f"#/$defs/{name}" not in words}
    return found


def check(document: str | bytes) -> str:
    """Hold a document's text to its schema, unknown and missing keys included; its schema's name.

    Raises:
        pydantic.ValidationError: it is of another shape.
        KeyError: no such schema, or a part lacks a key.
    """
    from pydantic import ConfigDict, TypeAdapter

    text = document if isinstance(document, str) else document.decode()
    said = json.loads(text)
    name: str = said["schema"]
    shape = _shapes()[name]
    # a list of one: pydantic has no way to state the strictness of a TypedDict from outside
    adapter: Any = TypeAdapter(list[shape], config=ConfigDict(extra="forbid"))  # type: ignore[valid-type]
    found = adapter.dump_python(adapter.validate_json(f"[{text}]", strict=True), mode="json")
    if found != [said]:
        raise KeyError(f"{name}: a part lacks a key that its class fills in")
    return name


if __name__ == "__main__":
    from jettison.core import documents  # equal names are told apart by module, which must not be __main__

    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for each in schema_names():
        written = json.dumps(documents.json_schema(each), indent=1, ensure_ascii=False) + "\n"
        (folder / f"{each.replace('/', '-')}.json").write_text(written, encoding="utf-8")
