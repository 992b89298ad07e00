"""`main`: reads the command line, calls one verb, turns errors into exit codes."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Sequence

from cyclopts import CycloptsError

from jettison.cli.diagnosing import doctor, profile
from jettison.cli.exporting import export
from jettison.cli.pages import explore
from jettison.cli.parameters import app
from jettison.cli.predicting import estimate, ledger, plan, search
from jettison.cli.reporting import report
from jettison.cli.running import demo, train, verify
from jettison.errors import JettisonError
from jettison.report.console import hint

COMMANDS = (demo, doctor, estimate, explore, export, ledger, plan, profile, report, search, train, verify)
"""They are the application's from when they are imported."""

EXIT_INTERNAL, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and leave with its exit code: 0 fits or proven, 2 usage, 3 infeasible, 4 proof failed."""
    sys.exit(run(sys.argv[1:] if arguments is None else list(arguments)))


def run(arguments: list[str]) -> int:
    """Run one command; its exit code."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_rest, **_more: hint(f"note: {message}")
        return _run(arguments)


def _run(arguments: list[str]) -> int:
    try:
        app(arguments, exit_on_error=False, print_error=False, result_action="return_none")
    except CycloptsError as error:
        verb = " ".join(["jettison", *(error.command_chain or ())])
        hint(f"jettison: {' '.join(str(error).split())} (see {verb} --help)")
        return EXIT_USAGE
    except JettisonError as error:
        hint(f"jettison: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        hint("jettison: interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # whoever read our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_INTERNAL
    except Exception:  # a bug of ours, or of the factory that was called: show where
        hint(traceback.format_exc())
        hint("jettison: internal error (above)")
        return EXIT_INTERNAL
    return 0
