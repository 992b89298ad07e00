"""The command line: one function a verb, no logic. Torch is imported inside the verbs that need it."""

from jettison.cli.main import main

__all__ = ["main"]
