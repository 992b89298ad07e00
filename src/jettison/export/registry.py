"""Targets by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from jettison.errors import UsageError
from jettison.export.result import Exported, Pricer
from jettison.export.subject import Subject
from jettison.export.targets import brief, fsdp, megatron, plain_torch, torch_remat, torchtitan, transformers

Exporter = Callable[[Subject, Pricer], Exported]

TARGETS: Final[dict[str, Exporter]] = {
    "torch": plain_torch.export,
    "torch_remat": torch_remat.export,
    "transformers": transformers.export,
    "accelerate": fsdp.export_accelerate,
    "deepspeed": fsdp.export_deepspeed,
    "lightning": fsdp.export_lightning,
    "megatron": megatron.export,
    "megatron-bridge": megatron.export_bridge,
    "torchtitan": torchtitan.export,
    "brief": brief.export,
}


def exporter(target: str) -> Exporter:
    """Return the exporter of a target.

    Raises:
        UsageError: there is no such target.
    """
    if target not in TARGETS:
        raise UsageError(f"got --to {target!r}; expected one of {', '.join(TARGETS)}")
    return TARGETS[target]
