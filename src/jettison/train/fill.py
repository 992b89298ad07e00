"""The weights of a model that was cut and sharded without them: each rank's own, a tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from jettison.parallel.parameters import put_whole
from jettison.train.build_model import Built
from jettison.train.engine import Engine, named_parameters


def fill(engine: Engine, built: Built, device: torch.device) -> None:
    """Allocate what this rank holds, and draw it. Does nothing where weights are there."""
    if built.weights is None:
        return
    with _keeping_parameters():
        for part in engine.parts:
            part._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t)
    built.weights.fill(dict(named_parameters(engine)), put_whole)


@contextmanager
def _keeping_parameters() -> Iterator[None]:
    """Those that move stay the same objects: tied ones tied, and FSDP2 knows them."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
