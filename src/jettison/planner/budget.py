"""Budgets: bytes, all memory that the device has left, or a share of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Final, SupportsIndex

import torch
from torch import nn

from jettison.core.errors import UsageError
from jettison.core.parse_units import parse_bytes
from jettison.core.units import format_bytes, format_percent
from jettison.dryrun.counter import static_tensors, unique_bytes
from jettison.runtime.offload import free_host_bytes
from jettison.spec.device_allowance import FRAGMENTS

HOST_MARGIN: Final = Fraction(1, 20)
"""Margin of host memory, which other processes use too: judgement."""
_SHARE: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Limit of allocated bytes, and its origin as text; empty for a budget given in bytes. ``reserved_bytes``: limit of
    the caching allocator's reserved memory, if one was requested.
    """

    nbytes: int
    words: str = ""
    reserved_bytes: int | None = None

    def with_least(self, nbytes: int) -> Budget:
        """Return the smallest budget of several ranks."""
        if nbytes == self.nbytes:
            return self
        own = self.words or format_bytes(self.nbytes)
        return replace(self, nbytes=nbytes, words=f"{format_bytes(nbytes)}, the smallest of all ranks'; here {own}")


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedBudget:
    """A requested budget: bytes, or a share of what the device has left; with neither, all of it less a margin."""

    nbytes: int | None = None
    share: Fraction | None = None

    def __str__(self) -> str:
        if self.nbytes is not None:
            return format_bytes(self.nbytes)
        return "what the device has left" if self.share is None else f"{format_percent(float(self.share))} of that"

    @classmethod
    def of(cls, asked: AskedBudget | str | SupportsIndex) -> AskedBudget:
        """Read ``"8GiB"``, whole bytes, ``"90%"`` or ``"auto"``. Raise `UsageError` for others, and above 100 %."""
        if isinstance(asked, AskedBudget):
            return asked
        if isinstance(asked, str) and asked.strip() == "auto":
            return cls()
        if not isinstance(asked, str) or (match := _SHARE.fullmatch(asked)) is None:
            try:
                return cls(nbytes=parse_bytes(asked))
            except UsageError as error:
                raise UsageError(f'{error}; or "90%" of what the device has left, or "auto"') from None
        if not 0 < (share := Fraction(match[1]) / 100) <= 1:
            raise UsageError(f"got {asked!r} as a budget; expected a share above 0 % and up to 100 %, bytes, or 'auto'")
        return cls(share=share)


def budget_of(
    asked: AskedBudget | str | SupportsIndex,
    models: Sequence[nn.Module],
    batch: Any = (),
    optimizer: torch.optim.Optimizer | None = None,
) -> Budget:
    """Return a requested budget in bytes. Raise `UsageError` as `AskedBudget` does.

    ``"auto"`` is all memory that the device has for this process, the models' own included, less a margin: for memory
    that the caching allocator reserves and cannot use (`spec.device_allowance`), or that other processes on a host use.
    ``"90%"`` is that share of the same memory, without a margin.
    """
    read = AskedBudget.of(asked)
    if read.nbytes is not None:
        return Budget(nbytes=read.nbytes)
    tensors = [t for model in models for t in static_tensors(model)]
    tensors += static_tensors(nn.Module(), batch, optimizer)
    device = next((t.device for t in tensors if t.device.type == "cuda"), None)
    if device is not None:  # free bytes, plus those of this process's allocator
        left = int(torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device))
        where, margin = torch.cuda.get_device_name(device), FRAGMENTS[1]
    else:
        left, where, margin = free_host_bytes() + unique_bytes(tensors), "this machine's memory", HOST_MARGIN
    part = 1 - margin if read.share is None else read.share
    nbytes = int(left * part)
    words = f"{format_bytes(nbytes)}: {format_percent(float(part))} of the {format_bytes(left)} that {where} has left"
    return Budget(nbytes=nbytes, words=f"{words} for this process")


def of_reserved(budget: Budget, model: nn.Module) -> Budget:
    """Return the budget as a limit of reserved memory; tensors get it less the usual fragmentation. Raise `UsageError`
    if the model is on no CUDA device, so that nothing is reserved.
    """
    if not any(p.device.type == "cuda" for p in model.parameters()):
        raise UsageError("got reserved=True for a model that is on no CUDA device; only its allocator reserves memory")
    nbytes = int(budget.nbytes * (1 - FRAGMENTS[1]))
    words = f"{format_bytes(nbytes)} for tensors, {format_percent(float(FRAGMENTS[1]))} for fragments"
    return Budget(
        nbytes=nbytes, words=f"{budget.words or format_bytes(budget.nbytes)}: {words}", reserved_bytes=budget.nbytes
    )
