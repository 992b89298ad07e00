"""Benchmarks that write pages are asked for help without writing any."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

MODULES = ("accuracy", "contradictions", "offload", "parallel_layer")


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize(("asked", "code"), [("--help", 0), ("--no-such-flag", 2)])
@pytest.mark.parametrize("module", MODULES)
def test_no_page_is_written(
    module: str, asked: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def written(path: Path, *_: object, **__: object) -> None:
        raise AssertionError(f"{path} was written")

    monkeypatch.setattr(Path, "write_text", written)
    monkeypatch.setattr(sys, "argv", [module, asked])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_module(f"benchmarks.{module}", run_name="__main__")
    assert stopped.value.code == code
    said = capsys.readouterr()
    assert f"usage: python -m benchmarks.{module}" in said.out + said.err
