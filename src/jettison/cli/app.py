"""The application and its help, parameters that several verbs share, and delivery of a verb's result."""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, get_type_hints

from cyclopts import App, Group, Parameter
from cyclopts.argument import ArgumentCollection

from jettison import __version__
from jettison.core.errors import JettisonError, UsageError
from jettison.core.files import write_whole
from jettison.core.objects import former_names, with_former_names
from jettison.report.console import hint, json_text, show
from jettison.request.options import CommonRequest

if TYPE_CHECKING:
    from rich.console import RenderableType

    from jettison.frameworks.run_file import RunFile

HELP_FLAGS: Final = ("--help", "-h", "--help-all")
GROUPS: Final = {
    name: Group(name, sort_key=order)
    for order, name in enumerate(
        (
            *("Model", "Batch and sequence", "Memory and GPU", "Parallelism", "Recompute and offload", "Fine-tuning"),
            *("Search", "Cost", "Diagnosis", "Measurement", "Output"),
        )
    )
}
"""Groups that ``--help`` shows, in this order; ``--help-all`` shows those of other names after them."""
_BRIEF: Final = ContextVar("brief", default=False)


class CommandLine(App):
    """An application whose flags have groups: a dataclass of flags names them as sections of its docstring.

    ``--help`` shows the flags in `GROUPS`, ``--help-all`` every flag.
    """

    every_flag: bool = False

    def assemble_argument_collection(
        self, *, default_parameter: Parameter | None = None, parse_docstring: bool = False
    ) -> ArgumentCollection:
        """Return the flags; where help is wanted, with the group and the text that their dataclass states."""
        found = super().assemble_argument_collection(
            default_parameter=default_parameter, parse_docstring=parse_docstring
        )
        if not parse_docstring:
            _take_former(found, self.default_command)
            return found
        stated = _stated(self.default_command)
        topics = list(dict.fromkeys(group for group, _ in stated.values() if group not in GROUPS))
        for argument in found:
            group, text = stated.get(argument.field_info.name, ("", ""))
            if not group:
                continue
            known = GROUPS.get(group)
            more = Parameter(group=known or Group(group, sort_key=len(GROUPS) + topics.index(group)), help=text)
            if known is None and _BRIEF.get():
                more = Parameter.combine(more, Parameter(show=False))
            argument.parameter = Parameter.combine(argument.parameter, more)
        return found

    def help_print(
        self,
        tokens: Annotated[str | Iterable[str] | None, Parameter(show=False)] = None,
        *,
        console: Annotated[Any, Parameter(parse=False)] = None,
    ) -> None:
        """Print the help page, and where flags were left out, the flag that shows them."""
        brief = _BRIEF.set(not self.every_flag)
        try:
            super().help_print(tokens, console=console)
        finally:
            _BRIEF.reset(brief)
        chain, path, _ = self.parse_commands(tokens)
        if self.every_flag or path[-1].default_command is None:
            return
        hidden = [group for group, _ in _stated(path[-1].default_command).values() if group not in GROUPS]
        if hidden:
            (console or self.console).print(
                f"{len(hidden)} more flags, by topic: {' '.join([*self.name, *chain])} --help-all"
            )


def verb(name: str) -> Callable[[Callable[..., None]], CommandLine]:
    """Decorator that makes a verb of a function."""

    def made(function: Callable[..., None]) -> CommandLine:
        found = CommandLine(name=name, help_flags=HELP_FLAGS)
        found.default(function)
        return found

    return made


def _stated(command: Callable[..., Any] | None) -> dict[str, tuple[str, str]]:
    """Group and help of each flag that a command takes in a dataclass, by field."""
    owners = (owner for kind in _flag_classes(command) for owner in reversed(kind.__mro__) if is_dataclass(owner))
    return {name: said for owner in owners for name, said in flag_sections(owner.__doc__ or "")}


def _flag_classes(command: Callable[..., Any] | None) -> list[type]:
    return [kind for kind in get_type_hints(command).values() if isinstance(kind, type) and is_dataclass(kind)]


def _take_former(flags: ArgumentCollection, command: Callable[..., Any] | None) -> None:
    """Let renamed flags be given by their former names, too, which no help page shows."""
    former = {name: old for kind in _flag_classes(command) for name, old in former_names(kind).items()}
    for argument in flags:
        if old := former.get(argument.field_info.name):
            names = (*argument.positives, f"--{old.replace('_', '-')}")
            argument.parameter = Parameter.combine(argument.parameter, Parameter(name=names))


def flag_sections(docstring: str) -> Iterator[tuple[str, tuple[str, str]]]:
    """Entries of a docstring's sections: name, and section with text."""
    for title, body in re.findall(r"^(\w.*):\n((?:    .*\n?)+)", inspect.cleandoc(docstring), re.MULTILINE):
        for name, text in re.findall(r"^    (\w+): ((?:.*\n?)(?:        .*\n?)*)", body, re.MULTILINE):
            yield name, (title, " ".join(text.split()))


def option(group: str, text: str, **more: Any) -> Parameter:
    """Group and help of a flag that is an argument of a verb's function; ``more`` as of `Parameter`."""
    return Parameter(group=GROUPS[group], help=text, **more)


ON: Final[Mapping[str, Any]] = {"negative": "", "show_default": False}
"""Settings of a flag that is given or not."""
Switch = Annotated[bool, Parameter(**ON)]


@dataclass(frozen=True, kw_only=True)
class CompileFlags:
    """Flag of verbs that price compiled layers.

    Model:
        compile: torch.compile of each layer.
    """

    compile: Switch = False


Form = Literal["human", "json"]
Budget = Annotated[str | None, option("Memory and GPU", "Limit of a step's peak allocated bytes: 20GiB, 500MB.")]
Model = Annotated[str | None, option("Model", "Preset (llama3-8b), config.json, Hugging Face id, or module:factory.")]
Described = Annotated[str | None, option("Model", "Preset (llama3-8b), config.json or Hugging Face id.")]
RunTokens = Annotated[float | None, option("Cost", "Tokens to train on, such as 1e12: states the days.")]
Price = Annotated[float | None, option("Cost", "With --tokens: price of a GPU for an hour, states the cost.")]
Out = Annotated[Path | None, option("Output", "Also write the JSON document to this file.")]
Force = Annotated[bool, option("Output", "Overwrite the file of --out.", **ON)]
Figures = Annotated[Path | None, option("Output", "Folder for figures as SVG and PNG (needs Chrome).")]
Format = Annotated[Form, option("Output", "human, or json (--json for short).", name="--format", show_choices=False)]
Flattened = Parameter(name="*")
"""Marks a dataclass, each field of which is a flag."""
LOCAL: Final[Mapping[str, bool]] = {"local": True}
"""Metadata of a flag that names a file, or says how this process works: a server does not take it."""

app = CommandLine(name="jettison", version=__version__, help_flags=HELP_FLAGS, suppress_keyboard_interrupt=False)


class Answered(Exception):
    """The document on stdout says it already: what is left is a line on stderr and the exit code."""

    def __init__(self, error: JettisonError) -> None:
        super().__init__(str(error))
        self.error = error


@contextmanager
def answered() -> Iterator[None]:
    """Around what judges a document that has been delivered. Raise `Answered` if it was judged to be no good."""
    try:
        yield
    except JettisonError as error:
        raise Answered(error) from error


def refuse_to_overwrite(*files: Path | None, force: bool) -> None:
    """Check before long work that files can be written. Raise `UsageError` if one is there already, is a folder, or its
    folder is not there or read-only.
    """
    for out in (file for file in files if file is not None):
        if out.is_dir():
            raise UsageError(f"{out} is a folder; give the name of a file")
        if out.exists() and not force:
            raise UsageError(f"{out} is there already; give --force to replace it, or another --out")
        if not out.parent.is_dir():
            raise UsageError(f"{out.parent} is no folder; make it first, or give another --out")
        if not os.access(out.parent, os.W_OK):
            raise UsageError(f"{out.parent} cannot be written to; give another --out")


def asked(**arguments: object) -> dict[str, Any]:
    """Return the arguments that were given, by name, as documents have them; those in a dataclass among them."""
    found: dict[str, Any] = {}
    for name, value in arguments.items():
        if isinstance(value, CommonRequest):
            found |= with_former_names(type(value), {field: getattr(value, field) for field in value.given()})
        elif is_dataclass(value):
            found |= asked(**{field.name: getattr(value, field.name) for field in fields(value)})
        elif isinstance(value, list | tuple):
            found[name] = [str(one) for one in value]
        elif value is not None and value is not False:
            found[name] = str(value) if isinstance(value, Path) else value
    return found


def deliver(
    document: Callable[[], dict[str, Any]],
    table: Callable[[], RenderableType],
    *,
    form: str,
    out: Path | None = None,
    csv: Callable[[], str] | None = None,
    request: Mapping[str, Any] | None = None,
    source: RunFile | None = None,
    warnings: Iterable[str] = (),
) -> None:
    """A table, JSON or CSV on stdout, and JSON or CSV in a file. Only requested forms are made.

    Args:
        warnings: for stderr, in front of it.
        request: what was asked, where the document does not say it itself.
        source: the framework's file that the run was read from.
    """
    for warning in warnings:
        hint(f"note: {warning}")
    text = ""
    if form == "csv" and csv is not None:
        text = csv()
    elif form == "json" or out is not None:
        found = document()
        if found.get("request") is None and request is not None:
            found = found | {"request": dict(request)}
        text = json_text(found if source is None else found | {"from": source.document()})
    if form == "human":
        show(table())
    else:
        sys.stdout.write(text)
        sys.stdout.flush()
    if out is not None:
        write_whole(out, text)
        hint(f"wrote {out}")
