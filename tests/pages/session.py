"""A page as a reader runs it: an empty folder, a fresh interpreter, blocks in the order of the page.

Python runs in a process of its own that knows nothing but what the blocks import; names live on from block to block. A
block whose first line is ``# NAME.py`` is a file to save, and is saved. ``sh`` blocks run in a shell. Commands of
``console`` blocks run in this process where they are Jettison's or the lesson's; what they print stands below them.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest

from support.consoles import said
from support.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
END = "--- end of block ---"
CLONE = ("examples", "recipes")
"""Folders of a clone, for pages that say they are run in one."""
_BLOCK = re.compile(r"^ *```(\S+)\n(.*?)^ *```$(?:\n+^```text\n(.*?)^```$)?", re.DOTALL | re.MULTILINE)
_FILE = re.compile(r"# ([\w.-]+\.(?:py|toml))\n")
_DRIVER = f"""
import sys, traceback, types
main = sys.modules["__main__"] = types.ModuleType("__main__")
sys.path[0] = ""
for line in sys.stdin:
    path = line.rstrip()
    try:
        with open(path, encoding="utf-8") as file:
            code = compile(file.read(), path, "exec")
        exec(code, main.__dict__)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        sys.exit(1)
    print({END!r}, flush=True)
"""


@dataclass(frozen=True, kw_only=True)
class Block:
    """Code of a page: its language, its text, and the output that stands below Python."""

    kind: str
    text: str
    output: str = ""

    @property
    def first_line(self) -> str:
        """What a block is known by."""
        return self.text.partition("\n")[0]

    @property
    def file(self) -> str:
        """The file that it is to be saved as, where it is one."""
        named = _FILE.match(self.text)
        return "" if named is None else named[1]


def blocks_of(page: Path) -> list[Block]:
    """Blocks of a page that can be run, in its order."""
    found = _BLOCK.findall(page.read_text(encoding="utf-8"))
    return [Block(kind=k, text=t, output=o) for k, t, o in found if k in ("python", "console", "sh")]


class Reader:
    """Somebody who runs a page in a folder."""

    def __init__(self, folder: Path, page: Path) -> None:
        self.folder = folder
        self._count = 0
        self._python: subprocess.Popen[str] | None = None
        self._errors: IO[str] | None = None
        self.env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COV"))}
        self.env |= {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "BROWSER": "true", "HF_HUB_OFFLINE": "1"}
        self.env["PATH"] = f"{folder / '.bin'}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{self.env['PATH']}"
        (folder / ".bin").mkdir()
        command = folder / ".bin" / "jettison"  # of this clone, whichever is installed
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m jettison "$@"\n')
        command.chmod(0o755)
        text = page.read_text(encoding="utf-8")
        for name in CLONE:
            if f"{name}/" in text or f"{name}." in text:
                (folder / name).symlink_to(ROOT / name)

    def save(self, block: Block) -> None:
        """Save a block that is a file."""
        (self.folder / block.file).write_text(block.text, encoding="utf-8")

    def python(self, block: Block) -> str:
        """Run a block after those before it; its output."""
        if self._python is None:
            driver = self.folder / ".bin" / "driver.py"
            driver.write_text(_DRIVER, encoding="utf-8")
            self._errors = (self.folder / ".bin" / "stderr").open("w+", encoding="utf-8")
            self._python = subprocess.Popen(
                [sys.executable, "-u", str(driver)],
                cwd=self.folder,
                env=self.env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
            )
        assert self._python.stdin is not None and self._python.stdout is not None and self._errors is not None
        self._count += 1
        path = self.folder / ".bin" / f"block_{self._count}.py"
        path.write_text(block.text, encoding="utf-8")
        self._python.stdin.write(f"{path}\n")
        self._python.stdin.flush()
        lines = []
        for line in self._python.stdout:
            if line.rstrip("\n") == END:
                return "".join(lines)
            lines.append(line)
        self._errors.seek(0)
        raise AssertionError(f"{block.first_line!r} failed:\n{''.join(lines)}{self._errors.read()}")

    def shell(self, text: str) -> None:
        """Run lines of a shell; the first that fails ends them."""
        done = subprocess.run(
            ["sh", "-e", "-c", text],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"

    def command(self, words: str) -> tuple[int, list[str], list[str]]:
        """Exit code and lines of a command."""
        if words.startswith(("jettison ", "python -m examples.numpy_engine")):
            found = said(words)
            return found.code, found.out, found.err
        done = subprocess.run(
            ["sh", "-c", words], cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=PATIENCE
        )
        out, err = ([line.rstrip() for line in text.splitlines()] for text in (done.stdout, done.stderr))
        return done.returncode, out, err

    def close(self) -> None:
        """End the interpreter."""
        if self._python is not None:
            assert self._python.stdin is not None and self._python.stdout is not None and self._errors is not None
            self._python.stdin.close()
            self._python.wait(timeout=PATIENCE)
            self._python.stdout.close()
            self._errors.close()


@contextlib.contextmanager
def reading(folder: Path, page: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    """A reader in a folder; what this process imports from there is forgotten again."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("BROWSER", "true")  # of --open
    before = set(sys.modules)
    reader = Reader(folder, page)
    try:
        yield reader
    finally:
        reader.close()
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)):
                del sys.modules[name]
