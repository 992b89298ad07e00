"""`main`: reads the command line, calls one verb, turns errors into exit codes and, for programs, into documents."""

from __future__ import annotations

import os
import stat
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import CycloptsError, Group

from jettison.cli.app import Answered, app, option
from jettison.cli.suggestions import WRITTEN, message_of, misplaced_file, refuse_fractions
from jettison.core.errors import JettisonError, UsageError, install
from jettison.core.files import MOST_FILE_BYTES
from jettison.core.process import EXIT_INTERRUPTED, end_at_once_on_interrupt, end_now, interrupted, say_interrupted
from jettison.report.console import hint, json_text

VERB_GROUPS = {
    "Plan": ("ledger", "plan", "estimate", "search", "export"),
    "Understand": ("doctor", "profile", "explore", "report", "list"),
    "Run": ("demo", "train"),
    "Check": ("verify", "calibrate"),
}
VERBS = tuple(verb for verbs in VERB_GROUPS.values() for verb in verbs)
"""Each has a file, which is loaded when the verb is called."""
FILES = {"list": "list_names"}
_PANELS = {name: Group(name, sort_key=order) for order, name in enumerate((*VERB_GROUPS, "Shell"))}

app.help = """Fit transformer training into GPU memory: decide tensor by tensor what to keep, recompute or offload, and
prove it on the real model.

First commands:

```text
jettison doctor --oom train.log                         why memory ran out
jettison ledger llama3-8b --gpu h100-80gb --lora r=16   will it fit?
jettison plan llama3-8b --gpu h100-80gb --lora r=16     what to recompute
jettison profile train.py                               time and memory
```
"""
for _group, _verbs in VERB_GROUPS.items():
    for _order, _verb in enumerate(_verbs):
        _function = f"jettison.cli.{FILES.get(_verb, _verb)}:command"
        app.command(_function, name=_verb, group=_PANELS[_group], sort_key=_order)
for _flag, _text in (
    ("--help", "Show a verb's usual flags; --help-all: every flag."),
    ("--version", "Show the version."),
):
    app[_flag].group, app[_flag].help = _PANELS["Shell"], _text


@app.command(group=_PANELS["Shell"])
def completion(shell: Annotated[Literal["bash", "zsh", "fish"], option("Model", "Shell of the script.")], /) -> None:
    """Print a shell completion script: eval "$(jettison completion bash)" in the shell's start-up file."""
    sys.stdout.write(app.generate_completion(shell=shell).rstrip("\n") + "\n")


EXTRAS = {"torch": "torch", "transformers": "hf", "safetensors": "hf", "starlette": "serve", "uvicorn": "serve"}
"""The extra that installs each package that some verbs need."""

EXIT_INTERNAL, EXIT_PIPE = 1, 141


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and leave with its exit code: 0 fits or proven, 2 usage, 3 infeasible, 4 proof failed."""
    end_at_once_on_interrupt()
    code = run(sys.argv[1:] if arguments is None else list(arguments))
    if code == EXIT_INTERRUPTED:  # the thread that hears Ctrl-C may not have run yet
        end_now()
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run one command; its exit code."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_rest, **_more: hint(f"note: {message}")
        try:
            code = _run(arguments)
            sys.stdout.flush()
        except BrokenPipeError:  # the reader of stdout or stderr has closed it
            _to_nowhere()
            return EXIT_PIPE
        except KeyboardInterrupt:  # a second one, while the first was being said
            return EXIT_INTERRUPTED
        return code


def _run(arguments: list[str]) -> int:
    try:
        if not arguments or arguments[0] in app.help_flags:  # which says a line of each verb
            for verb in VERBS:
                app[verb]
        app.every_flag = "--help-all" in arguments
        arguments = [word if word != "--json" else "--format=json" for word in arguments]
        refuse_fractions(arguments)
        with _pipes_as_files(arguments) as arguments:
            app(arguments, exit_on_error=False, print_error=False, result_action="return_none")
    except CycloptsError as error:
        verb = " ".join(["jettison", *(error.command_chain or ())])
        message = message_of(error, arguments)
        return _failed(arguments, UsageError(message), said=f"{message} (see {verb} --help)")
    except Answered as answered:
        hint(f"jettison: {answered.error}")
        return answered.error.exit_code
    except BrokenPipeError:
        raise
    except (KeyboardInterrupt, Exception) as error:
        # an import or a library may take an interrupt for a failure of its own
        if isinstance(error, KeyboardInterrupt) or interrupted():
            say_interrupted()
            return EXIT_INTERRUPTED
        if isinstance(error, JettisonError):
            if error.exit_code == UsageError.exit_code and (said := misplaced_file(arguments)) is not None:
                error = UsageError(said)
            return _failed(arguments, error)
        # a package that is not here; a bug of ours, or of the factory that was called: show where
        extra = EXTRAS.get((getattr(error, "name", None) or "").partition(".")[0])
        if isinstance(error, ModuleNotFoundError) and extra is not None:
            return _failed(arguments, UsageError(f"this needs {error.name}, which is not installed: {install(extra)}"))
        if isinstance(error, ValueError) and (said := misplaced_file(arguments)) is not None:  # bytes that are no text
            return _failed(arguments, UsageError(said))
        hint(traceback.format_exc())
        return _failed(arguments, error, said="internal error (above)")
    return 0


@contextmanager
def _pipes_as_files(arguments: list[str]) -> Iterator[list[str]]:
    """Copy stdin (``-``) and pipes to files: several readers look at a file, and a pipe can be read once."""
    names = dict[int, Path]()
    for at, (before, word) in enumerate(pairwise(["", *arguments])):
        with suppress(OSError, ValueError):
            if word == "-" or ((before == "--from" or before not in WRITTEN) and stat.S_ISFIFO(os.stat(word).st_mode)):
                names[at] = Path("/dev/stdin" if word == "-" else word)
    with tempfile.TemporaryDirectory() if names else nullcontext("") as folder:
        for at, name in names.items():
            if sys.stdin is None and name == Path("/dev/stdin"):
                raise UsageError("got -, but stdin is closed; pipe a file into it, or give its name")
            copy = Path(folder, str(at), name.name)
            copy.parent.mkdir()
            with sys.stdin.buffer if arguments[at] == "-" else name.open("rb") as source:
                copy.write_bytes(source.read(MOST_FILE_BYTES + 1))
            arguments[at] = str(copy)
        yield arguments


def _failed(arguments: list[str], error: Exception, said: str = "") -> int:
    """Print the error, or for people ``said``, and its document where JSON was asked for; return the exit code."""
    hint(f"jettison: {said or error}")
    exit_code, details = (error.exit_code, error.details) if isinstance(error, JettisonError) else (EXIT_INTERNAL, {})
    if "--format=json" in arguments or ("--format", "json") in pairwise(arguments):
        document: dict[str, Any] = {"schema": "jettison.error/1", "error": type(error).__name__, "message": str(error)}
        document |= {"exit_code": exit_code, "details": details, "request": {"arguments": arguments}}
        sys.stdout.write(json_text(document))
    return exit_code


def _to_nowhere() -> None:
    """Drop what is still in buffers: its reader has gone."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            os.dup2(nowhere, stream.fileno())
