"""`completion`: what a shell needs to complete verbs and flags."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

from cyclopts import Parameter

from jettison.cli.parameters import app


@app.command
def completion(shell: Annotated[Literal["bash", "zsh", "fish"], Parameter(help="Whose script to print.")], /) -> None:
    """Print a script that completes verbs and flags: eval "$(jettison completion bash)" in a shell's start-up file."""
    sys.stdout.write(app.generate_completion(shell=shell).rstrip("\n") + "\n")
