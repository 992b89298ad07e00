"""`make test-machines` runs pytest as it says: with other kernels, on fewer cores, in another folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.machines import MACHINES, exit_code_on

SEEN = """
import os
from pathlib import Path

import jettison


def test_it():
    assert {environment!r}.items() <= os.environ.items()
    assert {cores!r} is None or len(os.sched_getaffinity(0)) == {cores!r}
    assert {folder!r} is None or Path(jettison.__file__).match("*/{folder}/src/jettison/__init__.py")
"""


@pytest.mark.parametrize("name", ["sse", "one-core", "folder"])
def test_tests_run_on_another_machine(name: str, tmp_path: Path) -> None:
    machine = MACHINES[name]
    file = tmp_path / "test_seen.py"
    said = SEEN.format(environment=machine.environment, cores=machine.cores, folder=machine.folder)
    file.write_text(said)
    arguments = ["-q", "-p", "no:cacheprovider", "--noconftest", str(file)]
    assert exit_code_on(machine, arguments) == 0
    file.write_text(said + "    raise ValueError\n")
    assert name != "sse" or exit_code_on(machine, arguments) == 1
