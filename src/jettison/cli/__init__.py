"""The command line: one file a verb, with its flags and its function, loaded when the verb is called."""

from __future__ import annotations

from collections.abc import Sequence


def run_command(arguments: Sequence[str] | None = None) -> None:
    """Run one command and leave with its exit code. Ctrl-C while all of it is still being imported is one line, too."""
    import os
    import sys

    try:
        from jettison.cli.main import main
    except KeyboardInterrupt:
        sys.stderr.write("jettison: interrupted\n")
        sys.stderr.flush()
        os._exit(130)  # sys.exit() ends a program of `python -m` by the signal where exec() has seen the interrupt
    main(arguments)


__all__ = ["run_command"]
