"""Suggestions in errors about arguments: the flag or the command to type instead."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, get_args

from cyclopts import CoercionError, CycloptsError, MissingArgumentError, UnknownOptionError, UnusedCliTokensError
from cyclopts.argument import Argument

from jettison.cli.app import app
from jettison.core.errors import JettisonError, UsageError
from jettison.spec.frameworks import foreign_flags

WRITTEN: Final = frozenset(
    {"--out", "--timeline", "--snapshot", "--state", "--figures", "--trace", "--export", "--from", "--measured"}
)
"""Flags whose file is written, or may be of any kind: an existing file of another kind is no mistake there."""
_EXAMPLE: Final = re.compile(r"\{(.*?)\}")
_WHOLE: Final = re.compile(r"[1-9]\d{0,6}")
_POWER: Final = re.compile(r"(?<=\d)[kmbt]$")
_FRACTION: Final = re.compile(r"[-+]?\d*\.\d+")


def message_of(error: CycloptsError, arguments: Sequence[str]) -> str:
    """Return one sentence about an argument that could not be read, with what to type instead."""
    message = _by_new_names(" ".join(str(error).split()), arguments)
    if isinstance(error.__context__, JettisonError):  # a type of ours knows what it expected
        return f"{message.partition(': unable')[0]}: {error.__context__}"
    if isinstance(error, UnknownOptionError) and error.token.keyword:
        return _unknown(message, str(error.token.keyword), arguments)
    if isinstance(error, MissingArgumentError) and error.argument is not None:
        name, described = error.argument.name, app[_verb(arguments)].assemble_argument_collection(parse_docstring=True)
        what = next(str(one.parameter.help or "") for one in described if one.name == name).rstrip(".")
        given = f"got {name} without a value" if name in arguments else f"{_verb(arguments)} needs {name}"
        return f"{given}: {what}" if what else given
    if isinstance(error, UnusedCliTokensError):
        return _unused([str(token) for token in error.unused_tokens or ()], arguments)
    if isinstance(error, CoercionError) and error.token is not None and error.token.keyword:
        kinds = _kinds(error.argument.hint) if error.argument is not None else frozenset()
        if kinds & {int, float}:
            return _no_number(str(error.token.keyword), error.token.value, whole=float not in kinds)
    return message


def _unused(words: Sequence[str], arguments: Sequence[str]) -> str:
    """A word that no argument takes: a file whose flag is missing, or a value of a switch."""
    before = arguments[arguments.index(words[0]) - 1] if words[0] in arguments else ""
    readers = (argument.name for argument in _flags(_verb(arguments)) if Path in _kinds(argument.hint))
    reader = "--from" if "--from" in arguments else next((name for name in readers if name not in WRITTEN), "")
    if reader and Path(words[0]).exists():
        return f"got {words[0]} without a flag; give {reader} {words[0]}"
    if any(before in argument.names and bool in _kinds(argument.hint) for argument in _flags(_verb(arguments))):
        return f"got {before} {words[0]}; {before} takes no value"
    return f"got {' '.join(words)}, which no argument of {_verb(arguments)} takes"


def _by_new_names(message: str, arguments: Sequence[str]) -> str:
    """Suggest new names of renamed flags, and name both where a flag is given by both."""
    for argument in _flags(_verb(arguments)):
        new, *former = argument.positives or ("",)
        for old in former:
            message = message.replace(f"Did you mean {old}?", f"Did you mean {new}?")
            message = message.replace(f"{old} specified", f"{old}, the former name of {new}, specified")
    return message


def refuse_fractions(arguments: Sequence[str]) -> None:
    """Refuse a fraction where a whole number is expected; the parser would take what stands before the point. Raise
    `UsageError` if there is one.
    """
    if not any(_FRACTION.search(word) for word in arguments):
        return
    whole = {
        name
        for argument in _flags(_verb(arguments))
        if (kinds := _kinds(argument.hint)) and int in kinds
        if float not in kinds
        for name in argument.names
    }
    for flag, value in _given(arguments):
        if flag in whole and value is not None and _FRACTION.fullmatch(value):
            raise UsageError(_no_number(flag, value, whole=True))


def misplaced_file(arguments: Sequence[str]) -> str | None:
    """Return the message about an argument's file that another command reads; None where there is none."""
    from jettison.cli.file_kinds import misplaced

    for before, word in pairwise(arguments):
        if not word.startswith("-") and before not in WRITTEN and (said := misplaced(Path(word), _verb(arguments))):
            return said
    return None


def _unknown(message: str, flag: str, arguments: Sequence[str]) -> str:
    value = next((value for given, value in _given(arguments) if given == flag), None)
    found = equivalent_flag(flag, value)
    if found is None:
        return message
    first, verb = found.split()[0], _verb(arguments)
    verbs = [name for name in _verbs() if any(first in argument.names for argument in _flags(name))]
    if verb in verbs:
        return f"got {flag}, which is called otherwise here; try {found}"
    takers = ", ".join(f"jettison {name}" for name in verbs)
    return f"got {flag}, which jettison {verb} does not take; {takers} take {found}"


def equivalent_flag(flag: str, value: str | None) -> str | None:
    """Return our flag for one of another tool; None where none is known.

    Args:
        value: that the user gave it, if any. A whole number takes the place of the example.
    """
    found = foreign_flags().get(flag.lower().replace("_", "-"))
    if found is None:
        return None
    given = value if value is not None and _WHOLE.fullmatch(value) else None
    return _EXAMPLE.sub(lambda match: given if given and _WHOLE.fullmatch(match[1]) else match[1], found)


def _no_number(flag: str, value: str, *, whole: bool) -> str:
    try:
        near = max(1.0, float(_POWER.sub(lambda unit: f"e{'kmbt'.index(unit[0]) * 3 + 3}", value.lower())))
    except ValueError:
        near = 1.0
    kind, near_text = ("a whole number", str(round(min(near, 1e6)))) if whole else ("a number", f"{near:g}")
    return f"got {value!r} for {flag}; expected {kind}, such as {flag} {near_text}"


def _verb(arguments: Sequence[str]) -> str:
    return next((word for word in arguments if not word.startswith("-")), "")


def _verbs() -> list[str]:
    return sorted(name for name in app if not name.startswith("-"))


@cache
def _flags(verb: str) -> tuple[Argument, ...]:
    return tuple(app[verb].assemble_argument_collection()) if verb in _verbs() else ()


def _given(arguments: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Yield flags with their values: ``--flag value`` and ``--flag=value``."""
    for at, word in enumerate(arguments):
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            after = arguments[at + 1] if at + 1 < len(arguments) else None
            yield flag, value if equals else None if after is None or after.startswith("--") else after


def _kinds(hint: Any) -> frozenset[Any]:
    """Return the types of a union, or the type."""
    return frozenset(get_args(hint) or (hint,))
