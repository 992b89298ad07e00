"""Type information is complete for users: a strict program type-checks, and a wrong one does not."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from support.patience import PATIENCE

REPOSITORY = Path(__file__).resolve().parents[2]
CONSUMER = Path(__file__).with_name("consumer.py")
WRONG = """
import jettison

def misused() -> str:
    jettison.auto_checkpoint(None, (), 8.5)
    run = jettison.run_of("gpt2", jettison.RunRequest(sequence=512))
    return jettison.forecast(run).peak_bytes
"""
SETTINGS = """
[mypy]
strict = true
disallow_subclassing_any = false
python_version = 3.11
[mypy-torch.*,transformers.*]
follow_imports = skip
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has the package, and what it needs, among its installed ones."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=PATIENCE)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "all.pth").write_text(f"{REPOSITORY / 'src'}\n{sysconfig.get_path('purelib')}\n")
    return folder / "bin" / "python"


def mypy(installed: Path, program: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "mypy.ini").write_text(SETTINGS)
    flags = ["--config-file", str(folder / "mypy.ini"), "--python-executable", str(installed)]
    return subprocess.run(
        [sys.executable, "-m", "mypy", *flags, str(program)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


@pytest.mark.slow
def test_a_strict_program_type_checks_and_a_wrong_one_does_not(installed: Path, tmp_path: Path) -> None:
    found = mypy(installed, CONSUMER, tmp_path)
    assert (found.returncode, found.stdout.splitlines()[-1]) == (0, "Success: no issues found in 1 source file"), found
    wrong = tmp_path / "wrong.py"
    wrong.write_text(WRONG)
    said = mypy(installed, wrong, tmp_path).stdout
    assert 'incompatible type "float"; expected "str | SupportsIndex"' in said
    assert 'Unexpected keyword argument "sequence"' in said
    assert 'got "int", expected "str"' in said
