"""Switches that a forward moves, and that decide what it computes, are where they were when planning ends."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from jettison.capture.isolation import leaving_nothing
from jettison.capture.side_effects import put_switches_back, read_switches

MOVES: dict[str, Callable[[], object]] = {
    "matmul precision": lambda: torch.set_float32_matmul_precision("high"),
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "deterministic": lambda: torch._C._set_deterministic_algorithms(True, warn_only=False),
    "onednn": lambda: setattr(torch.backends.mkldnn, "enabled", False),
    "flash attention": lambda: torch.backends.cuda.enable_flash_sdp(False),
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "numpy errors": lambda: np.seterr(over="raise"),
    "folder": lambda: os.chdir("/"),
    "environment": lambda: os.environ.update(JETTISON_TEST="1"),
    "threads of autograd": lambda: torch._C._set_multithreading_enabled(False),
    "fast path of attention": lambda: torch.backends.mha.set_fastpath_enabled(False),
    "checks of sparse tensors": lambda: torch.sparse.check_sparse_tensor_invariants.enable(),
    "memory that is filled": lambda: setattr(torch.utils.deterministic, "fill_uninitialized_memory", False),
    "no garbage collection": lambda: gc.disable(),
    "logging": lambda: logging.disable(logging.INFO),
}


@pytest.mark.parametrize("name", MOVES)
def test_put_back(name: str) -> None:
    before, stood = read_switches(), _standing()
    try:
        with leaving_nothing([nn.Linear(2, 2)], [MOVES[name]]):
            MOVES[name]()
            assert _standing() != stood
        assert _standing() == stood
    finally:
        put_switches_back(before)


def _standing() -> list[object]:
    return [value for _, _, value in read_switches()]
