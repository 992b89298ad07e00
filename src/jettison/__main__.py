"""`python -m jettison` is `jettison`."""

from jettison.cli import main

main()
