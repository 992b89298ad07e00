"""Seconds to pack a kept tensor and to have it back, found by doing it here."""

from __future__ import annotations

import time
from typing import Final

import torch

from jettison.dryrun.kernel_trial import REPEATS
from jettison.runtime.packing import Pack, PackedForm, narrow, widen

SAMPLE_BYTES: Final = 1 << 24
"""Of a tensor that is tried; a larger one takes as many times that as it is larger."""

_KNOWN: dict[tuple[int, str, PackedForm, int], float] = {}
"""Of this process, by threads, device, form and bytes: the same plan is made twice from the same prices."""


def packing_seconds(pack: Pack, device: str = "cpu") -> float:
    """The least of a few runs of `packing.narrow` and `packing.widen`, whose time hangs on no values."""
    nbytes = pack.move.nbytes
    tried = min(nbytes, SAMPLE_BYTES)
    key = torch.get_num_threads(), device, pack.form, tried
    if key not in _KNOWN:
        with torch.no_grad():
            flat = torch.zeros(tried, dtype=torch.uint8, device=device)
            _KNOWN[key] = min(_one_run(flat, pack.form) for _ in range(REPEATS + 1))  # the first is cold
            if flat.is_cuda:
                del flat
                torch.cuda.empty_cache()  # it is not held on to
    return _KNOWN[key] * nbytes / max(1, tried)


def _one_run(flat: torch.Tensor, form: PackedForm) -> float:
    start = _now(flat)
    widen(narrow(flat, form), form, flat.numel())
    return _now(flat) - start


def _now(flat: torch.Tensor) -> float:
    if flat.is_cuda:
        torch.cuda.synchronize(flat.device)
    return time.perf_counter()
