"""``python -m zoo [--device cuda] [--workers N] [NAME ...]``: the table's families, one line of JSON each on stdout.

On CUDA a family that plain PyTorch does not train twice the same way, or whose gradients differ, is tried again with
deterministic algorithms.
Exit code 1 where a family has a problem.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections import Counter
from typing import Any


def work(names: queue.SimpleQueue[str], device: str, until: float, tell: Any) -> None:
    """Hand names to a process, and start another one where it dies."""
    worker: subprocess.Popen[str] | None = None
    while time.monotonic() < until:
        try:
            name = names.get_nowait()
        except queue.Empty:
            break
        if worker is None:
            command = [sys.executable, "-m", "zoo.alone", device]
            worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert worker.stdin is not None and worker.stdout is not None
        print(name, file=worker.stdin, flush=True)
        alarm = threading.Timer(max(1.0, until - time.monotonic()), worker.kill)
        alarm.start()
        line = worker.stdout.readline()
        alarm.cancel()
        if line:
            tell(json.loads(line))
        else:
            said = f"its process ended ({worker.wait()})" if time.monotonic() < until else "not done in time"
            tell({"name": name, "problems": [said]})
            worker = None
    if worker is not None:
        worker.kill()


def main() -> int:
    """Run them all."""
    from zoo.table import TABLE

    table = [entry.name for entry in TABLE]
    parser = argparse.ArgumentParser(prog="python -m zoo", description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=7200.0, help="what has not begun by then is left out")
    parser.add_argument("names", nargs="*", metavar="NAME", help="families; all by default")
    options = parser.parse_args()
    if unknown := sorted(set(options.names) - set(table)):
        parser.error(f"got {unknown[0]!r}; families are {', '.join(table)}")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it products may differ from run to run
    names: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in options.names or table:
        names.put(name)
    totals: Counter[str] = Counter()
    lock = threading.Lock()

    def tell(row: dict[str, Any]) -> None:
        with lock:
            totals["skipped" if "skipped" in row else "problems" if row["problems"] else "fine"] += 1
            print(json.dumps(row), flush=True)

    until = time.monotonic() + options.seconds
    given = (names, options.device, until, tell)
    threads = [threading.Thread(target=work, args=given) for _ in range(options.workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    totals["left out"] = names.qsize()
    print(dict(totals), file=sys.stderr)
    return 1 if totals["problems"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
