"""`jettison explore --serve`: the explorer, and the planner behind it."""

import os
import signal
import subprocess
import sys
import time

import httpx
import pytest

from jettison.cli.main import run
from support.browser import Open, axe_violations
from support.patience import PATIENCE
from support.serving import PLAN, ROOT


@pytest.mark.slow
def test_the_explorer_is_served(open_page: Open) -> None:
    """Its panels and the one that asks, on one page; Ctrl-C ends it, and is no failure."""
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "jettison", "explore", "gpt2", "--serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:")
        assert httpx.post(f"{url}api/plan", json=PLAN, timeout=PATIENCE).json()["feasible"]
        end = time.monotonic() + PATIENCE
        stands = set()
        while (found := httpx.get(url, timeout=PATIENCE)).status_code != 200 and time.monotonic() < end:
            stands.add(found.text.partition("<p>")[2].partition(",")[0])
            time.sleep(0.2)  # the page is being made
        assert any(text.startswith("Working out") for text in stands) and "" not in stands
        opened = open_page(url)
        ids = opened.page.locator("main > section").evaluate_all("all => all.map((one) => one.id)")
        assert ids[0] == "ask"
        assert len(ids) > 5
        assert "while jettison explore --serve runs" in opened.page.inner_text("header")
        assert axe_violations(opened, within="#ask") == []
        process.send_signal(signal.SIGINT)
        said, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, said, errors) == (0, "", "Ctrl-C ends it\n")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--port 8000", "got --port 8000 without --serve"),
        ("--serve --out x.html", "got --out x.html and --serve"),
        ("gpt-9000 --serve", "gpt-9000"),
    ],
)
def test_what_makes_no_sense(capsys: pytest.CaptureFixture[str], flags: str, sentence: str) -> None:
    assert run(["explore", *flags.split()]) == 2
    assert sentence in capsys.readouterr().err
