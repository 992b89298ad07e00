"""What a benchmark that writes a page is asked on the command line: to write it, or for help."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence


def page_command(
    module: str, about: str | None, write: Callable[[], str], arguments: Sequence[str] | None = None
) -> None:
    """Write the page and say what was written; with ``--help``, or anything that is not known, write nothing.

    Args:
        module: as ``python -m`` has it.
        about: the module's docstring.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args(arguments)
    print(write())
