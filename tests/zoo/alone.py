"""One family after the other in a process of their own, which may die: names on stdin, a line of JSON each on stdout.

``python -m zoo`` starts these.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from dataclasses import asdict
from typing import Any

import torch

from zoo.harness import prove
from zoo.table import TABLE


def by_name(name: str, device: str) -> dict[str, Any]:
    """What is found about a family; ``skipped`` where there is nothing to compare with."""
    torch.set_num_threads(1)
    entry = next(entry for entry in TABLE if entry.name == name)
    gc.collect()
    started = time.perf_counter()
    found: dict[str, Any] = {"name": name, "deterministic": False}
    for found["deterministic"] in (False, True) if device != "cpu" else (False,):
        torch.use_deterministic_algorithms(found["deterministic"], warn_only=True)
        try:
            found |= asdict(prove(entry, device))
            found.pop("skipped", None)
            if not any("another" in problem for problem in found["problems"]):
                break
            found["without deterministic algorithms"] = found["problems"]
        except Exception as error:  # plain PyTorch does not train it here
            found["skipped"] = f"{type(error).__name__}: {str(error)[:200]}"
    torch.use_deterministic_algorithms(False)
    return found | {"seconds": round(time.perf_counter() - started, 1)}


def main() -> None:
    """Until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what models print is no answer
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        print(json.dumps(by_name(line.strip(), sys.argv[1])), file=answers, flush=True)


if __name__ == "__main__":
    main()
