"""Real processes for tests: N gloo ranks under torchrun, and what each of them found, as JSON.

    def check(args: Any) -> Any:  # at the top of a file in tests/; runs on every rank, in a process group
        return {"rank": torch.distributed.get_rank(), "sum": args["x"] + 1}

    found = run_ranks(check, 4, {"x": 1})  # [{"rank": 0, "sum": 2}, ...], in the order of the ranks

Ranks are forked from one interpreter (`rank_server`), under torchrun's own agent. Four of them still take seconds, so
one launch does many checks, and `Launches` share them among tests and files.
`launch_ranks` is for runs that are meant to fail.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from support.gloo_spins import gloo_spins
from support.patience import PATIENCE
from support.rank_server import Launch

TESTS = Path(__file__).resolve().parents[1]
SOURCE = TESTS.parent / "src"
FOLDER = "JETTISON_TEST_RESULTS"
"""Environment variable: where ranks leave their results."""


LOOKS = 5.0
"""Seconds from one look at a launch to the next."""

JOIN = 300
"""Seconds in which a process group is made; ranks that wait longer say where, and are launched again once."""


@dataclass(frozen=True, kw_only=True)
class Finished:
    """How a launch ended. ``results`` has None for a rank that left nothing; ``returncode`` None: out of time."""

    returncode: int | None
    results: list[Any]
    output: str

    @property
    def tail(self) -> str:
        """The end of what all ranks wrote, without the launcher's own traceback."""
        return self.output.split('\nTraceback (most recent call last):\n  File "<frozen runpy>"')[0][-8000:]


def run_ranks(
    target: Callable[[Any], Any] | str | Path, nproc: int, args: Any = None, *, timeout: float = PATIENCE
) -> list[Any]:
    """What every rank returned.

    Args:
        target: a function at the top of a file in tests/, given ``args``; or the path of a script, which is given the
            items of ``args`` as words and calls `report`.
        args: anything that JSON can hold.

    Raises:
        AssertionError: a rank failed, left no result, or the launch took more than ``timeout`` seconds.
    """
    done = launch_ranks(target, nproc, args, timeout=timeout)
    how = f"took more than {timeout} s" if done.returncode is None else f"ended with {done.returncode}"
    assert done.returncode == 0, f"{target} on {nproc} ranks {how}:\n{done.tail}"
    assert None not in done.results, f"{target}: ranks without a result in {done.results}:\n{done.tail}"
    return done.results


class Launches:
    """What a function returned on so many ranks: ``launches[4]`` starts them, once for all tests and workers.

    Workers of pytest-xdist share the results of a session through files; the one that comes second waits. What stands
    side by side in `TOGETHER` is run by one launch.
    """

    def __init__(self, session: Path, target: Callable[[Any], Any]) -> None:
        self.folder = session.parent if "PYTEST_XDIST_WORKER" in os.environ else session
        self.name = f"{target.__module__}.{target.__qualname__}"
        self._known: dict[int, list[Any]] = {}

    def __getitem__(self, nproc: int) -> list[Any]:
        if nproc not in self._known:
            found = self._once(nproc)
            assert isinstance(found, list), found
            self._known[nproc] = [by_name[self.name] for by_name in found]
        return self._known[nproc]

    def _once(self, nproc: int) -> list[Any] | str:
        names = next((group for group in TOGETHER.get(nproc, ()) if self.name in group), (self.name,))
        file = self.folder / f"{names[0]}.{nproc}.json"
        with file.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not file.exists():
                file.write_text(json.dumps(_launched(names, nproc)), encoding="utf-8")
            found: list[Any] | str = json.loads(file.read_text("utf-8"))
        return found


_TENSOR = (
    "test_parallel_layer.on_rank",
    "support.parallel_checks.reference",
    "support.parallel_checks.huggingface",
    "support.parallel_blocks.blocks",
)
_SHARDED = (
    "support.parallel_layouts.layouts",
    "support.parallel_pipelines.two_ranks",
    "support.parallel_fsdp.two_ranks",
)
TOGETHER = {
    2: (
        (*_TENSOR, "support.parallel_docs.run", "test_calibrate.link_of_ranks"),
        (*_SHARDED, "test_pipeline_replay.play_orders", "support.parallel_plans.two_ranks"),
        ("support.wrapped_steps.two_ranks", "support.loops_on_ranks.two_ranks"),
    ),
    4: (
        _TENSOR,  # slow
        (
            "support.parallel_layouts.layouts",
            "support.parallel_pipelines.four_ranks",
            "test_pipeline_replay.play_orders",
        ),
    ),
}
"""By number of ranks: what shares a launch. Half the time of a small one is imports, on every rank."""


def _launched(names: tuple[str, ...], nproc: int) -> list[Any] | str:
    """Results of each rank by name, or how the launch failed: once, not for every test."""
    try:
        return run_ranks(one_by_one, nproc, names)
    except AssertionError as error:
        return str(error)


def one_by_one(names: list[str]) -> dict[str, Any]:
    """Results of each function on a rank. One that fails ends the launch: others may wait for this rank."""
    return {name: _function(name)(None) for name in names}


def _function(name: str) -> Callable[[Any], Any]:
    module, _, function = name.rpartition(".")
    found: Callable[[Any], Any] = getattr(importlib.import_module(module), function)
    return found


def launch_ranks(
    target: Callable[[Any], Any] | str | Path,
    nproc: int,
    args: Any = None,
    *,
    timeout: float = PATIENCE,
    environment: Mapping[str, str] | None = None,
) -> Finished:
    """As `run_ranks`, whatever the outcome."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*torchrun(nproc), *_words(target, args)]
        paths = [str(TESTS), str(SOURCE), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
        paths += [str(folder) for folder in TESTS.iterdir() if folder.is_dir()]  # tests are modules without a package
        more = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), FOLDER: folder, "OMP_NUM_THREADS": "1"}
        whole = os.environ | more | dict(environment or {})
        output, code, hangs = _run(command[1:], whole, timeout)
        if hangs or f"Timeout ({timedelta(seconds=JOIN)})!" in output:
            how = "gloo hung by itself in" if hangs else "there was no process group for"
            warnings.warn(f"{how} {target} on {nproc} ranks, which are launched again:\n{output}", stacklevel=2)
            output, code, _ = _run(command[1:], whole, timeout)
        files = [Path(folder) / f"{rank}.json" for rank in range(nproc)]
        results = [json.loads(file.read_text("utf-8")) if file.exists() else None for file in files]
    return Finished(returncode=code, results=results, output=output)


def _run(words: list[str], environment: Mapping[str, str], timeout: float) -> tuple[str, int | None, bool]:
    """What was written, with what it ended (None: out of time), and did gloo hang by itself?"""
    process, end, hangs = Launch(words, environment), time.monotonic() + timeout, False
    try:
        while True:
            try:
                output, _ = process.communicate(timeout=min(LOOKS, timeout))
                return output, process.returncode, False
            except subprocess.TimeoutExpired:
                hangs = gloo_spins(process.pid)
                if hangs or time.monotonic() > end:
                    break
        process.terminate()  # the launcher ends its ranks, which are sessions of their own
        return process.communicate(timeout=PATIENCE)[0], None, hangs
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def torchrun(nproc: int) -> list[str]:
    """The command that starts N ranks of what follows it."""
    module = [sys.executable, "-m", "torch.distributed.run"]
    return [*module, "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(nproc)]


def report(value: Any) -> None:
    """Leave this rank's result, from inside a rank."""
    file = Path(os.environ[FOLDER]) / f"{os.environ['RANK']}.json"
    file.write_text(json.dumps(value), encoding="utf-8")


def _words(target: Callable[[Any], Any] | str | Path, args: Any) -> list[str]:
    if isinstance(target, str | Path):
        return [str(target), *map(str, args or [])]
    return [__file__, target.__module__, target.__qualname__, json.dumps(args)]


def _main(module: str, function: str, args: str) -> None:
    import torch
    from torch import distributed

    faulthandler.enable()
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(JOIN, exit=True)
    distributed.init_process_group("gloo")
    faulthandler.cancel_dump_traceback_later()
    report(getattr(importlib.import_module(module), function)(json.loads(args)))
    distributed.barrier()  # nobody leaves while others still talk
    distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    # gloo's threads may still be ending, and then the interpreter's way out is an abort: once in some 50 launches
    os._exit(0)


if __name__ == "__main__":
    _main(*sys.argv[1:])
