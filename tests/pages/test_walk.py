"""A newcomer's walk: what the pages show first, copied into an empty folder, on a terminal. No error, no silence.

What counts is silence that Jettison adds. The same program with nothing in Jettison's place says how long imports,
steps and other libraries are silent by themselves, on this machine.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pages.session import ROOT, Block, Reader, blocks_of
from pages.terminal import Run, on_terminal
from support.patience import PATIENCE

SILENT_SECONDS = 2.0
"""Of processor time on each rank, beyond what the program is silent for without Jettison."""
NOTHING = """
import sys


class Nothing:
    def __getattr__(self, name):
        return self

    def __call__(self, *args, **options):
        return self

    def __iter__(self):
        return iter(())

    def __len__(self):
        return 0

    def __le__(self, other):
        return True


sys.modules[__name__] = Nothing()
"""
TORCHRUN = ("torchrun", "--standalone", "--nproc-per-node", "2")


def block(page: str, words: str) -> Block:
    """The first Python on a page that has these words."""
    return next(one for one in blocks_of(ROOT / page) if one.kind == "python" and words in one.text)


def walked(page: str, words: str, launcher: tuple[str, ...], folder: Path, *, plain: bool) -> Run:
    """A block as a script of its own."""
    folder.mkdir()
    reader = Reader(folder, ROOT / page)
    (folder / "script.py").write_text(block(page, words).text, encoding="utf-8")
    if plain:
        (folder / "jettison.py").write_text(NOTHING, encoding="utf-8")
        del reader.env["PYTHONPATH"]
    env = reader.env | {"TERM": "xterm", "PYTHONUNBUFFERED": "1"}
    return on_terminal([*launcher, "script.py"], folder, env, timeout_seconds=PATIENCE)


@pytest.mark.parametrize(
    ("page", "words", "launcher", "said"),
    [
        pytest.param("docs/start.md", "class Block", ("python",), "True 9", id="plain loop"),
        pytest.param(
            "README.md",
            "jettison.auto_checkpoint(model",
            ("python",),
            "<Applied: budget 160.00 MiB, predicted peak ",
            id="README",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "docs/trainers.md",
            "# lora.py",
            ("python",),
            "jettison: planned PeftModel: budget 24.00 MiB, predicted peak ",
            id="Trainer with LoRA",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "docs/distributed.md",
            "# fsdp2.py",
            TORCHRUN,
            "<Applied: budget 24.00 MiB, predicted peak ",
            id="FSDP2 on two ranks",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_no_error_and_no_silence(page: str, words: str, launcher: tuple[str, ...], said: str, tmp_path: Path) -> None:
    run = walked(page, words, launcher, tmp_path / "planned", plain=False)
    assert run.code == 0 and "Traceback" not in run.text, run.text
    assert said in run.text, run.text
    assert run.text.count("jettison: planned ") <= 1, "of several ranks the first speaks"
    plain = walked(page, words, launcher, tmp_path / "plain", plain=True)
    assert plain.code == 0, plain.text
    ranks = 2 if launcher is TORCHRUN else 1
    longest = run.longest
    assert longest.silence <= plain.longest.silence + ranks * SILENT_SECONDS, (longest, plain.longest)
