"""Files that a run would change are refused before they are touched."""
# ruff: noqa: SIM115 (what is refused has nothing to close)

from __future__ import annotations

import builtins
import contextlib
import dbm.dumb
import gzip
import logging.handlers
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from jettison.capture.isolation import leaving_nothing
from jettison.core.errors import UnsupportedModule

CHANGES: dict[str, Callable[[Path], object]] = {
    "opens": lambda path: open(path, "a").write("b"),
    "writes a text": lambda path: path.write_text("b"),
    "opens by flags": lambda path: os.open(path, os.O_WRONLY | os.O_TRUNC),
    "packs": lambda path: gzip.open(path, "wb"),
    "saves an array": lambda path: np.save(path, np.zeros(1)),
    "saves tensors": lambda path: torch.save({"a": torch.zeros(1)}, path),
    "saves tensors without a zip": lambda path: torch.save(
        {"a": torch.zeros(1)}, path, _use_new_zipfile_serialization=False
    ),
    "renames": lambda path: path.rename(f"{path}.old"),
    "copies another over it": lambda path: shutil.copyfile(__file__, path),
    "deletes": lambda path: path.unlink(),
    "cuts off": lambda path: os.truncate(path, 0),
    "keeps a table": lambda path: dbm.dumb.open(str(path.with_suffix("")), "n"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_refused_before_it_is_touched(name: str, tmp_path: Path) -> None:
    (path := tmp_path / "log.dat").write_text("a")
    with pytest.raises(UnsupportedModule, match=r"log.* has not been touched"), leaving_nothing([nn.Linear(2, 2)]):
        CHANGES[name](path)
    assert [one.name for one in tmp_path.iterdir()] == ["log.dat"] and path.read_text() == "a"
    (tmp_path / "more").write_text("from then on files may be written")


def test_code_that_goes_on_after_an_error_is_refused_as_well(tmp_path: Path) -> None:
    with (
        pytest.raises(UnsupportedModule, match=r"opens for writing the file .*log"),
        leaving_nothing([nn.Linear(2, 2)]),
        contextlib.suppress(Exception),
    ):
        open(tmp_path / "log", "w")


def test_a_function_that_somebody_holds_is_replaced(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Handlers of logs remember `open`; they print errors, once for each record, which would not help here."""
    handler = logging.handlers.RotatingFileHandler(tmp_path / "log", maxBytes=20)
    log = logging.Logger("files")
    log.addHandler(handler)
    module = nn.Linear(2, 2)
    module.log = log
    log.warning("a first line")
    try:
        with pytest.raises(UnsupportedModule, match="log"), leaving_nothing([module]):
            for _ in range(3):
                module.log.warning("a line that is too long to be the second")
    finally:
        handler.close()
    assert (tmp_path / "log").read_text() == "a first line\n"
    assert not capfd.readouterr().err
    assert handler.__dict__["_builtin_open"] is builtins.open


def test_what_changes_no_file_that_stays_is_allowed(tmp_path: Path) -> None:
    (path := tmp_path / "log").write_text("a")
    other = tmp_path / "other"
    thread = threading.Thread(target=other.write_text, args=("b",))
    with leaving_nothing([nn.Linear(2, 2)]):
        assert path.read_text() == "a"
        with tempfile.TemporaryFile() as file:
            file.write(b"c")
        with open(os.devnull, "w") as nowhere:
            nowhere.write("d")
        thread.start()
        thread.join()
    assert other.read_text() == "b"
