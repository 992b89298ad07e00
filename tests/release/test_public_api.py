"""The public API is what `public_api.txt` lists: names and signatures change on purpose, or not at all."""

from __future__ import annotations

import enum
import inspect
import re
from dataclasses import fields, is_dataclass
from pathlib import Path

import jettison

LISTED = Path(__file__).with_name("public_api.txt")
INTERFACES = ("Applied", "HandleReport", "Forecast", "Estimate", "ModelTrace")
"""Classes that public functions return, whose public methods are interface as well."""


def described(name: str, found: object) -> list[str]:
    """A line for the name, and for each public member of a class."""
    if isinstance(found, str):
        return [f"{name}: str"]
    if inspect.ismodule(found):
        return [f"{name}: module of {', '.join(found.__all__)}"]
    if not inspect.isclass(found):
        assert callable(found), name
        return [f"{name}{inspect.signature(found)}"]
    bases = ", ".join(base.__name__ for base in found.__bases__ if base is not object)
    lines = [f"class {name}({bases})"]
    if is_dataclass(found):
        lines += [f"{name}.{f.name}: {f.type}" for f in fields(found) if not f.name.startswith("_")]
    members = {} if issubclass(found, enum.Enum) else vars(found)
    for member, value in sorted(members.items()):
        if member.startswith("_"):
            continue
        inner = getattr(value, "__func__", value)
        if inspect.isfunction(inner):
            lines.append(f"{name}.{member}{inspect.signature(inner)}")
        elif isinstance(value, property):
            lines.append(f"{name}.{member}: property")
    return lines


def api() -> list[str]:
    from jettison.capture.model_trace import ModelTrace
    from jettison.planner.handle import Applied, HandleReport
    from jettison.predict.forecast import Forecast
    from jettison.predict.time import Estimate

    found = [line for name in jettison.__all__ for line in described(name, getattr(jettison, name))]
    for one in (Applied, HandleReport, Forecast, Estimate, ModelTrace):
        assert one.__name__ in INTERFACES
        found += described(one.__name__, one)
    return [re.sub(r" at 0x[0-9a-f]+", "", " ".join(line.split())) for line in found]


def test_the_public_api_is_the_one_that_is_listed() -> None:
    """After a change that is meant: ``python tests/release/test_public_api.py`` writes the list."""
    listed = LISTED.read_text(encoding="utf-8").splitlines()
    now = api()
    assert sorted(set(listed) - set(now)) == [], "gone, or changed"
    assert sorted(set(now) - set(listed)) == [], "new, or changed"


def test_names_say_where_they_are_from_and_what_they_do() -> None:
    assert jettison.__all__ == sorted(jettison.__all__)
    assert set(jettison.__all__) == {*jettison._HOME_OF, *jettison._ROOMS, "__version__"}
    for name in jettison._HOME_OF:
        found = getattr(jettison, name)
        assert found.__doc__ and not found.__doc__.startswith(f"{name}("), name


if __name__ == "__main__":
    LISTED.write_text("\n".join(api()) + "\n", encoding="utf-8")
