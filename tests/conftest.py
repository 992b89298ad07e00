"""Settings that all tests share."""

import contextlib
import gc
import importlib.util
import os
import re
import sys
import time
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from support.browser import chromium, open_page  # noqa: F401, fixtures
from support.patience import PATIENCE

# Examples are the same in every run, and a busy machine is no failure.
settings.register_profile(
    "jettison", deadline=None, derandomize=True, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("jettison")

# one thread a worker: two workers with two threads each would wait for one another on two cores
os.environ.setdefault("OMP_NUM_THREADS", "1")

# what commands print does not depend on where the tests run: workers are told a width of 80
os.environ.pop("COLUMNS", None)


ABSENT = [package for package in ("torch", "transformers") if importlib.util.find_spec(package) is None]
WITHOUT_TORCH = {"tests", "spec", "ledger", "formula", "cost", "solve", "predict", "search", "server", "cli"}
"""Folders with tests that run where torch is not installed: those that do not import it."""


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """What needs a package that is not installed is left out."""
    if not ABSENT or not collection_path.name.startswith("test_"):
        return None
    imports = re.compile(rf"^(from|import) ({'|'.join(ABSENT)})\b", re.MULTILINE)
    heavy = "torch" in ABSENT and collection_path.parent.name not in WITHOUT_TORCH
    return True if heavy or imports.search(collection_path.read_text(encoding="utf-8")) else None


def let_gloo_finish() -> None:
    """A process group that is garbage waits for its threads and keeps the interpreter's lock meanwhile (torch 2.13,
    ``~ProcessGroupGloo``). A thread that still has to let go of its last call needs that lock, and both wait for ever.
    """
    for thread in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):
            if thread.read_text() == "pt_gloo_runloop\n":
                time.sleep(0.005)
                return


@pytest.fixture(autouse=True)
def young() -> None:
    """Measurements and dry runs collect garbage first: they need not walk what imports and other tests have made."""
    if "torch.distributed" in sys.modules:
        let_gloo_finish()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def patient() -> None:
    """A kernel that is priced in a process of its own may be long in coming."""
    if "torch" in sys.modules:
        from jettison.dryrun import kernel_process

        kernel_process.SECONDS = PATIENCE


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums over threads are not in a fixed order."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def compiler() -> Iterator[None]:
    """What torch.compile learnt of one model's frames does not count for the next."""
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Modules and items stay: looking for garbage among them takes a third of a collection."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests that open pages, and cases that `slow.toml` names as slow."""
    for item in items:
        if "chromium" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.browser)
    mark_slow_cases(items, complete=not any("::" in arg for arg in config.args))


def mark_slow_cases(items: list[pytest.Item], *, complete: bool) -> None:
    """Mark as slow what `slow.toml` leaves out of the quick suite.

    Raises:
        UsageError: it names a test or a case that is not there, where files were collected completely.
    """
    tests, cases = Path(__file__).parent, defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow") is None:
            name = f"{item.path.relative_to(tests)}::{getattr(item, 'originalname', item.name)}"
            cases[name].append(item)
    files = {item.path for item in items}
    for name, rule in tomllib.loads((tests / "slow.toml").read_text("utf-8")).items():
        found, quick = cases[name], rule.get("quick", [])
        if every := rule.get("every"):
            kept = [item for n, item in enumerate(found) if n % every == 0 or n == len(found) - 1]
        else:
            kept = [item for item in found if getattr(getattr(item, "callspec", None), "id", None) in quick]
        file = tests / name.partition("::")[0]
        gone = complete and (file in files or not file.exists())
        if gone and (not found or len(kept) < len(quick)):
            raise pytest.UsageError(f"tests/slow.toml: {name} has no such cases: {quick or 'no test of that name'}")
        for item in found:
            if item not in kept:
                item.add_marker(pytest.mark.slow)
