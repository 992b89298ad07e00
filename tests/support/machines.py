"""``python -m support.machines [NAME ...] [-- ARGUMENTS OF PYTEST]``, from the folder of tests: the tests as other
machines run them, one machine after the other; exit code 1 if a test fails on any.

Memory that a kernel takes inside its call, and the order of its sums, depend on the processor: oneDNN, MKL and ATen are
told to use the kernels of an older one. A busy machine and one with a single core are slow; a clone may lie in a folder
that is called as a package is.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
BURNS = "while True: pass"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """How another machine differs from this one.

    Args:
        environment: what libraries are told of the processor.
        cores: that the tests may use; None: all.
        load: processes that use a core all the time, beside the tests.
        folder: under which a copy of the repository lies; None: the repository itself is tested.
    """

    environment: dict[str, str] = field(default_factory=dict)
    cores: int | None = None
    load: int = 0
    folder: str | None = None


def _kernels(onednn: str, mkl: str, aten: str) -> Machine:
    names = ("ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "ATEN_CPU_CAPABILITY")
    return Machine(environment=dict(zip(names, (onednn, mkl, aten), strict=True)))


MACHINES = {
    "avx512": _kernels("AVX512_CORE", "AVX512", "avx512"),  # no units for 16 bits: matmuls sum in 32 bits beside
    "avx2": _kernels("AVX2", "AVX2", "avx2"),
    "sse": _kernels("SSE41", "SSE4_2", "default"),
    "one-core": Machine(cores=1),
    "busy": Machine(load=4),
    "folder": Machine(folder="site/torch/jettison"),
}


@contextmanager
def _busy(count: int) -> Iterator[None]:
    burning = [subprocess.Popen([sys.executable, "-c", BURNS]) for _ in range(count)]
    try:
        yield
    finally:
        for process in burning:
            process.kill()
            process.wait()


def _copied(folder: str, stack: ExitStack) -> Path:
    copy = Path(stack.enter_context(tempfile.TemporaryDirectory())) / folder
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, files.split("\0")):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name)
    return copy


def exit_code_on(machine: Machine, arguments: list[str]) -> int:
    """Exit code of pytest on a machine."""
    with ExitStack() as stack:
        root = ROOT if machine.folder is None else _copied(machine.folder, stack)
        paths = os.pathsep.join((str(root / "src"), str(root / "tests"), str(root)))
        compiled = stack.enter_context(tempfile.TemporaryDirectory())  # torch's own cache does not ask for kernels
        environment = {**os.environ, **machine.environment, "PYTHONPATH": paths, "TORCHINDUCTOR_CACHE_DIR": compiled}
        stack.enter_context(_busy(machine.load))
        allowed = os.sched_getaffinity(0)
        stack.callback(os.sched_setaffinity, 0, allowed)
        os.sched_setaffinity(0, set(sorted(allowed)[: machine.cores]))  # what is started from here on has no more
        return subprocess.run([sys.executable, "-m", "pytest", *arguments], cwd=root, env=environment).returncode


def main() -> int:
    """Run them."""
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(prog="python -m support.machines", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MACHINES)}; all without one")
    names = parser.parse_args(words[:cut]).names or list(MACHINES)
    if unknown := set(names) - set(MACHINES):
        parser.error(f"got {', '.join(sorted(unknown))}; expected some of {', '.join(MACHINES)}")
    codes = {}
    for name in names:
        print(f"== {name}: {MACHINES[name]}", flush=True)
        codes[name] = exit_code_on(MACHINES[name], words[cut + 1 :])
    print("\n".join(f"{name}: {'passed' if code == 0 else f'failed ({code})'}" for name, code in codes.items()))
    return int(any(codes.values()))


if __name__ == "__main__":
    sys.exit(main())
