"""A launch in which gloo hangs by itself is made again, and no other."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import ranks
from support.gloo_spins import gloo_spins
from support.patience import PATIENCE

BURNS = "import time; end = time.process_time() + 0.3\nwhile time.process_time() < end: pass\ntime.sleep(1000)"


@pytest.fixture
def burning() -> Iterator[subprocess.Popen[bytes]]:
    """A shell, and below it a process that works a little and then waits."""
    process = subprocess.Popen(["sh", "-c", '"$0" -c "$1"; true', sys.executable, BURNS], start_new_session=True)
    yield process
    subprocess.run(["pkill", "-KILL", "-s", str(process.pid)], check=False)
    process.wait()


def test_the_time_of_threads_below_a_process_is_seen(burning: subprocess.Popen[bytes]) -> None:
    name, end = Path(sys.executable).name[:15], time.monotonic() + PATIENCE
    while not gloo_spins(burning.pid, 0.25, name) and time.monotonic() < end:
        time.sleep(0.05)
    assert gloo_spins(burning.pid, 0.25, name)
    assert not gloo_spins(burning.pid, 60, name), "that is more than it has taken"
    assert not gloo_spins(burning.pid, 0.25), "it has no thread of gloo's"


def test_a_launch_that_gloo_hangs_is_made_again_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import pathlib, sys, time\nfrom support.ranks import report\nplace = pathlib.Path(sys.argv[1])\n"
        "first = not place.exists()\nplace.touch()\ntime.sleep(1000 if first else 0)\nreport('done')\n"
    )
    monkeypatch.setattr(ranks, "LOOKS", 0.5)
    hung: list[int] = []

    def once(pid: int) -> bool:
        if hung or not (tmp_path / "place").exists():
            return False
        hung.append(pid)
        return True

    monkeypatch.setattr(ranks, "gloo_spins", once)
    with pytest.warns(UserWarning, match="gloo hung by itself"):
        assert ranks.run_ranks(script, 1, [tmp_path / "place"]) == ["done"]
