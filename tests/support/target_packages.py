"""Packages of export targets, fetched for slow tests into folders of their own and left out of this environment.

Their wheels are unpacked, without what they depend on: that is large (flash attention, wandb) or asks for another
Python, and what runs here needs little of it. JETTISON_TARGETS names a folder that keeps them for the next time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = 900
MEGATRON = ("--python-version=3.12", "--implementation=cp", "--abi=cp312", "--platform=manylinux_2_28_x86_64")
"""Its wheel says Python 3.12; `support.target_process` gives the one name of it that 3.11 lacks."""

BRIDGE = ("--python-version=3.12",)
"""Pure Python, and says 3.12 as well."""


def fetched(folder: Path, *requirements: str, how: tuple[str, ...] = (), source: bool = False) -> Path:
    """Where the packages lie. Skips the test that asks where pip does not get them."""
    kept = os.environ.get("JETTISON_TARGETS")
    target = (Path(kept) if kept else folder) / "-".join(requirements).replace("=", "")
    done = target / "complete"
    if done.exists():
        return target
    target.mkdir(parents=True, exist_ok=True)
    kind = ("--no-binary=:all:", "--no-build-isolation") if source else ("--only-binary=:all:",)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", f"--dest={target}", *kind, *how]
    ran = subprocess.run([*command, *requirements], capture_output=True, text=True, timeout=SECONDS)
    if ran.returncode != 0:
        last = (ran.stderr.strip().splitlines() or ["no message"])[-1]
        pytest.skip(f"pip does not get {', '.join(requirements)}: {last[:300]}")
    for wheel in target.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(target)
    for archive in target.glob("*.tar.gz"):
        with tarfile.open(archive) as packed:
            packed.extractall(target, filter="data")
        (inner,) = (path for path in target.iterdir() if path.is_dir() and archive.name.startswith(path.name))
        for path in inner.iterdir():
            path.rename(target / path.name)
    done.touch()
    return target


def answered(module: str, job: Any, *folders: Path) -> Any:
    """What a program of tests/support prints as JSON on its last line, given a job in JSON and these packages."""
    paths = [*map(str, folders), str(ROOT / "src"), str(ROOT / "tests")]
    ran = subprocess.run(
        [sys.executable, "-m", module],
        input=json.dumps(job),
        text=True,
        capture_output=True,
        timeout=SECONDS,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return json.loads(ran.stdout.strip().splitlines()[-1])
