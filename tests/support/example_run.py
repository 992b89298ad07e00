"""Runs an example as it is, watching its optimizer: what its gradients were, and how high its second step rose.

python tests/support/example_run.py EXAMPLE RESULT [BUDGET]     # or under torchrun: RESULT gets the rank's number
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import jettison
from jettison.capture.tensor_subclasses import plain
from jettison.train.phase_memory import MemoryMeter


class Watch:
    """Of a run's optimizer steps; those of a dry run are on fake tensors, and none of the run's."""

    def __init__(self) -> None:
        self.digests: list[str] = []
        self.peak_bytes = 0
        self.plans: list[Any] = []
        self._open: Any = None

    def before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Note the gradients."""
        if not self._is_real(optimizer):
            return
        found = hashlib.sha256()
        for parameter in self._parameters(optimizer):
            if parameter.grad is not None:
                found.update(plain(parameter.grad).contiguous().view(torch.uint8).numpy().tobytes())
        self.digests.append(found.hexdigest()[:16])

    def after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Measure from the end of the first step to the end of the second."""
        if not self._is_real(optimizer):
            return
        if len(self.digests) == 1:
            gc.collect()
            time.sleep(0.05)  # gloo's threads let go
            meter = MemoryMeter(torch.device("cpu"), 1, lambda: self._alive(optimizer), storages=True)
            self._open = [meter.step(), meter.phase("step")]
            self._peaks = self._open[0].__enter__()
            self._open[1].__enter__()
        elif len(self.digests) == 2:
            for context in reversed(self._open):
                context.__exit__(None, None, None)
            self.peak_bytes = self._peaks().peak_bytes

    def _is_real(self, optimizer: torch.optim.Optimizer) -> bool:
        return not any("Fake" in type(plain(p)).__name__ for p in self._parameters(optimizer))

    def _parameters(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        return [p for group in optimizer.param_groups for p in group["params"]]

    def _alive(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        """All that Python holds: models, frozen ones too, and the optimizer's state."""
        del optimizer
        tensors = [t for t in gc.get_objects() if isinstance(t, torch.Tensor)]
        return [t.to_local() if isinstance(t, DTensor) else t for t in tensors if "Fake" not in type(plain(t)).__name__]


def main(example: str, result: str, *budget: str) -> None:
    """The command line."""
    torch.set_num_threads(1)
    watch, own = Watch(), jettison.auto_checkpoint
    register_optimizer_step_pre_hook(watch.before)
    register_optimizer_step_post_hook(watch.after)

    def noted(*args: Any, **kwargs: Any) -> Any:
        handle = own(*args, **kwargs)
        watch.plans.append(handle.plan)
        return handle

    jettison.auto_checkpoint = noted
    sys.argv = [example, *budget]
    runpy.run_path(example, run_name="__main__")
    found = {
        "digests": watch.digests,
        "peak": watch.peak_bytes,
        "predicted": [plan.predicted.peak_bytes for plan in watch.plans],
    }
    Path(f"{result}.{os.environ.get('RANK', '0')}").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
