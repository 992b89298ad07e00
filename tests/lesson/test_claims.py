"""docs/claims.csv and docs/claims.md: commands are run, numbers are theirs, verdicts follow from them."""

from __future__ import annotations

import shlex
import subprocess
import sys
from itertools import chain

import pytest
from benchmarks.claims.__main__ import PAGE, ROWS, SOURCES, page, rows
from benchmarks.claims.claim import Claim, Verdict, at

CLAIMS = list(chain.from_iterable(SOURCES.values()))


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.words[:60])
def test_verdicts_follow(claim: Claim) -> None:
    if claim.verdict is not Verdict.PARTLY:
        assert claim.is_within() == (claim.verdict is Verdict.RIGHT), claim.ours()
    assert claim.why or claim.verdict is Verdict.RIGHT, "what is not right has a reason"


def test_files_say_what_commands_print() -> None:
    assert page() == PAGE.read_text(encoding="utf-8"), "write both again: python -m benchmarks.claims"
    assert rows() == ROWS.read_text(encoding="utf-8")


def test_a_command_runs_as_it_stands() -> None:
    """One of each program in a process of its own: the others are run in this one."""
    root = PAGE.parents[1]
    commands = dict.fromkeys(ask.command for claim in CLAIMS for ask in claim.asks)
    for start in ("jettison ledger", "python -m examples.numpy_engine block"):
        words = shlex.split(next(command for command in commands if command.startswith(start)))
        module = ["-m", "jettison", *words[1:]] if words[0] == "jettison" else words[1:]
        call = [sys.executable, *module, "--format", "json"]
        done = subprocess.run(call, capture_output=True, text=True, cwd=root, env={"PYTHONPATH": "src"}, check=True)
        assert done.stdout.startswith("{")


def test_keys_are_read() -> None:
    found = {"rows": [{"k": 1, "peak bytes": 5}, {"k": 8, "peak bytes": 7}], "all": [[1], [2]]}
    assert at(found, "rows[k=8].peak bytes") == 7
    assert at(found, "rows[-1].k") == 8
    assert at(found, "rows[*].peak bytes") == 12
