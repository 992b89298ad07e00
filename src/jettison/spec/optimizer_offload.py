"""Optimizer offload: states and parameters that move to CPU memory, copies of each step, tensors that stay.

A framework's ``defaults.toml`` has its rules, section ``optimizer_offload``, with the framework code of each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Final

from jettison.core.errors import UsageError
from jettison.spec.frameworks import named


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OptimizerOffload:
    """Rule for optimizer offload; by default nothing moves. Each rule is one object, since rules are cache keys.

    Args:
        framework: its framework, in messages. ``zeros``: supported ZeRO stages.
        moves_masters: the optimizer's master weights move. ``moves_parameters``: so do a rank's parameter shards.
        moves_packed: and those of quantized weights.
        keeps_buffer: a gradient of the largest parameter stays on the device. ``copies_shards``: gradients are reduced
            on the device before they are offloaded. ``one_micro_batch``: gradients cannot be accumulated on CPU.
    """

    name: str = "none"
    framework: str = ""
    zeros: tuple[int, ...] = (0, 1, 2, 3)
    least_elements: int = 4096  # states of smaller parameters stay
    cpu_passes: float = 0  # over arrays of all offloaded elements, by a fused step on CPU: docs/decisions/0122
    frees_gradients: bool = False  # gradients are offloaded and freed during backward
    moves_masters: bool = False
    moves_parameters: bool = False
    moves_packed: bool = False
    keeps_buffer: bool = False
    copies_shards: bool = False
    one_micro_batch: bool = False
    moves: bool = True  # whether anything is offloaded

    @property
    def steps_on_cpu(self) -> bool:
        """Whether the optimizer step runs on CPU."""
        return self.cpu_passes > 0

    def __reduce__(self) -> tuple[Callable[[str], OptimizerOffload], tuple[str]]:
        return optimizer_offload, (self.name,)

    def __str__(self) -> str:
        return self.name


NO_OFFLOAD: Final = OptimizerOffload(moves=False)


@cache
def optimizer_offload(name: str) -> OptimizerOffload:
    """Return a rule by name, or raise a `UsageError`."""
    rules = named("optimizer_offload")
    if name == "none":
        return NO_OFFLOAD
    if name not in rules:
        raise UsageError(f"got --offload-optimizer {name!r}; expected one of {', '.join(('none', *rules))}")
    fields = {key: value for key, value in rules[name].items() if key not in ("order", "folder")}
    zeros = tuple(fields.pop("zeros", NO_OFFLOAD.zeros))
    return OptimizerOffload(name=name, zeros=zeros, **fields)


@dataclass(frozen=True, kw_only=True, slots=True)
class ElementBytes:
    """Bytes per element of a parameter whose states are offloaded, without the states.

    Args:
        sent_each, fetched_each: device to host and back in every micro-batch.
        sent, fetched: the same, once a step.
    """

    host: int  # copies and gradients on CPU, without offloaded parameter shards
    sent_each: int = 0
    fetched_each: int = 0
    sent: int = 0
    fetched: int = 0


def element_bytes(
    rule: OptimizerOffload, *, zero: int, micro_batches: int, parameter: int, gradient: int
) -> ElementBytes:
    """CPU memory and transfers of a rule without the states.

    Args:
        parameter, gradient: bytes of one element on the device.
    """
    updated = 0 if rule.moves_parameters else parameter  # parameters come back once a step
    if not rule.steps_on_cpu:
        return ElementBytes(host=0)
    if not rule.moves_masters:
        return ElementBytes(host=updated + gradient, sent_each=gradient, fetched=updated)
    if zero == 3:
        return ElementBytes(host=gradient + 4, sent_each=gradient + 4, fetched_each=gradient, fetched=updated)
    both = gradient if micro_batches > 1 else 0
    return ElementBytes(host=4 + parameter + both, sent_each=both, fetched_each=both, sent=4, fetched=parameter)
