"""`python -m jettison` is `jettison`."""

from jettison.cli import run_command

run_command()
