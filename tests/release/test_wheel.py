"""The wheel and the sdist, in an empty environment: what is in them, what they need, and that commands run there."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import jettison
from support.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
MOST_BYTES = 60 * 10**6
"""Of the core with what it needs, as it is downloaded."""


def pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False, cwd=ROOT)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    done = pip("wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), ".")
    if done.returncode:
        pytest.skip(f"no wheel can be built here: {done.stderr.splitlines()[-1:]}")
    (found,) = folder.glob("*.whl")
    return found


@pytest.mark.slow
def test_what_is_in_the_wheel(wheel: Path) -> None:
    assert wheel.name == f"jettison-{jettison.__version__}-py3-none-any.whl"
    names = zipfile.ZipFile(wheel).namelist()
    for needed in (
        "jettison/py.typed",
        "jettison/spec/hardware_data/h100-80gb.toml",
        "jettison/families/models/llama.toml",
        "jettison/families/blocks/decoder.toml",
        "jettison/families/wrappers.toml",
        "jettison/families/presets.toml",
        "jettison/diagnose/advice.toml",
        "jettison/diagnose/log_forms.toml",
        "jettison/report/assets/panels/report.js",
        "jettison/core/schemas.toml",
    ):
        assert needed in names
    assert not [name for name in names if not name.startswith(("jettison/", f"jettison-{jettison.__version__}"))]
    assert wheel.stat().st_size < 3 * 10**6


@pytest.mark.slow
def test_the_core_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    loaded = pip("download", "--quiet", "--dest", str(tmp_path / "all"), str(wheel))
    if loaded.returncode:
        pytest.skip("what the core needs cannot be had here")
    files = list((tmp_path / "all").iterdir())
    assert not [file for file in files if file.name.startswith(("torch", "transformers"))]
    assert sum(file.stat().st_size for file in files) < MOST_BYTES
    empty = tmp_path / "empty"
    subprocess.run([sys.executable, "-m", "venv", str(empty)], check=True, timeout=PATIENCE)
    python = empty / "bin" / "python"
    flags = ["install", "--quiet", "--no-index", "--find-links", str(tmp_path / "all"), str(wheel)]
    subprocess.run([python, "-m", "pip", *flags], check=True, timeout=PATIENCE)
    ways = (["-m", "jettison"], [str(empty / "bin" / "jettison")])
    for way in ways:
        command = [str(python), *way] if way[0] == "-m" else way
        said = subprocess.run([*command, "--version"], capture_output=True, text=True, cwd=tmp_path, timeout=PATIENCE)
        assert said.stdout.strip() == jettison.__version__
    plan = [python, "-m", "jettison", "plan", "gpt2", "--gpu", "t4", "--micro-batch", "16"]
    said = subprocess.run(plan, capture_output=True, text=True, cwd=tmp_path, timeout=PATIENCE)
    assert said.returncode == 0 and "What each layer does" in said.stdout, said.stderr
    live = [python, "-m", "jettison", "ledger", "somewhere:make"]
    said = subprocess.run(live, capture_output=True, text=True, cwd=tmp_path, timeout=PATIENCE)
    assert said.returncode == 2 and re.search(r"pip install '\.\[torch\]' in a clone", said.stderr), said.stderr
    asked = [python, "-c", "import jettison; print(jettison.run_of('gpt2').seq); jettison.auto_checkpoint"]
    said = subprocess.run(asked, capture_output=True, text=True, cwd=tmp_path, timeout=PATIENCE)
    assert said.stdout == "1024\n" and "jettison.auto_checkpoint needs torch: pip install" in said.stderr


@pytest.mark.slow
def test_what_is_in_the_sdist(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    made = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=PATIENCE,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    (found,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(found) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"src/jettison/__init__.py", "README.md", "CHANGELOG.md", "SECURITY.md", "LICENSE", "docs/index.md"} <= names
    assert not [name for name in names if name.startswith((".venv", "docs/_build", "docs/generated"))]
