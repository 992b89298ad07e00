"""Anchors: a measured run of a software stack, the physical quantities that explain it, and their file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from jettison.core.errors import UsageError
from jettison.core.files import parse_toml, read_text
from jettison.core.parse_units import parse_bytes, parse_seconds
from jettison.core.units import format_bytes

if TYPE_CHECKING:
    from jettison.spec.hardware import Hardware

SCHEMA: Final = "jettison.anchor/1"
FACTORS: Final = ("compute", "communication", "host")
BUFFERS: Final = ("logits in fp32", "logits in bf16", "parameters", "gradients", "residual stream in fp32")
"""Buffers that a framework may copy, most likely first; `predict.forecast.buffers` computes their sizes."""
MOST_COPIES: Final = 3
MOST_FRAGMENTS: Final = 100.0
"""GiB per square root of allocated GiB, above any device's."""
MEASURED_WORDS: Final = '"allocated=61.2GiB reserved=66GiB device=69GiB step=1.32s"'


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredRun:
    """Figures of one run; None: not measured.

    Args:
        allocated, reserved, device: peak bytes of a step: tensors', the allocator's, nvidia-smi's. step: seconds.
    """

    allocated: int | None = None
    reserved: int | None = None
    device: int | None = None
    step: float | None = None

    def __post_init__(self) -> None:
        sizes = [(name, getattr(self, name)) for name in ("allocated", "reserved", "device")]
        there = [(name, value) for name, value in sizes if value is not None]
        if nothing := [name for name, value in there if value < 1]:
            raise UsageError(f"got {nothing[0]} = {dict(there)[nothing[0]]}; expected bytes of a run")
        for (low, less), (high, more) in pairwise(there):
            if less > more:
                raise UsageError(
                    f"got {low} = {format_bytes(less)} above {high} = {format_bytes(more)}; expected allocated <= "
                    "reserved <= device, of one process"
                )
        if self.step is not None and not 0 < self.step < inf:
            raise UsageError(f"got step = {self.step}s; expected the seconds of a step")
        if not there and self.step is None:
            raise UsageError(f"got nothing that was measured; expected some of {MEASURED_WORDS}")


def parse_measured(text: str) -> MeasuredRun:
    """Read figures such as ``allocated=61.2GiB step=1.32s``. Raise `UsageError` for an unknown name, a figure without a
    unit, or contradicting figures.
    """
    found: dict[str, Any] = {}
    for word in text.replace(",", " ").split():
        name, equals, value = word.partition("=")
        if not equals or name not in MeasuredRun.__dataclass_fields__:
            raise UsageError(f"got --measured {text!r}; expected some of {MEASURED_WORDS}")
        if name in found:
            raise UsageError(f"got {name} twice in --measured {text!r}; give it once")
        found[name] = parse_seconds(value) if name == "step" else parse_bytes(value)
    return MeasuredRun(**found)


@dataclass(frozen=True, kw_only=True)
class RunAnchor:
    """Physical quantities that explain a measured run: NOTE [ Anchored ] in `diagnose.fit_anchor`.

    Args:
        stack: framework preset or kernels of that run.
        gpu: name of the hardware.
        kind: its class among published runs; empty: unknown.
        run: the command that describes the run.
        copies, buffer: number of additional copies of a buffer that the ledger does not count; 0: none.
        unexplained: bytes of the measured run without an explanation; not added to other runs.
        fragments: reserved minus allocated, in GiB per square root of allocated GiB; None: unknown.
        context: device bytes outside the allocator and the layout's allowance; None: unknown.
        compute, communication, host: factors on predicted seconds.
    """

    stack: str
    gpu: str = ""
    kind: str = ""
    run: str = ""
    measured: MeasuredRun = field(default_factory=lambda: MeasuredRun(step=1.0))
    copies: int = 0
    buffer: str = ""
    unexplained: int = 0
    fragments: float | None = None
    context: int | None = None
    compute: float = 1.0
    communication: float = 1.0
    host: float = 1.0

    def __post_init__(self) -> None:
        if wrong := [name for name in FACTORS if not 0 < getattr(self, name) < inf]:
            raise UsageError(f"got {wrong[0]} = {getattr(self, wrong[0])}; expected a factor above 0")
        if self.fragments is not None and not 0 <= self.fragments <= MOST_FRAGMENTS:
            raise UsageError(f"got fragments = {self.fragments}; expected 0 to {MOST_FRAGMENTS}")
        if self.copies and (abs(self.copies) > MOST_COPIES or self.buffer not in BUFFERS):
            raise UsageError(
                f"got {self.copies} copies of {self.buffer!r}; expected up to {MOST_COPIES} of {', '.join(BUFFERS)}"
            )

    def hardware(self, hardware: Hardware) -> Hardware:
        """The device at the speed that this stack reaches."""
        from jettison.spec.hardware import slower  # most runs have no anchor

        factors = {name: getattr(self, name) for name in FACTORS}
        return hardware if set(factors.values()) == {1.0} else slower(hardware, **factors)

    def unlike(self, kind: str, hardware: str) -> tuple[str, ...]:
        """Notes on how a run of this class on this hardware differs."""
        if self.kind not in ("", kind):
            return (f"the anchor is of a run of another kind ({self.kind}; this one: {kind}): ranges are not anchored",)
        if self.measured.step is not None and hardware not in ("", self.gpu):
            return (f"the anchor's step was measured on {self.gpu}, this one on {hardware}: its range is not anchored",)
        return ()

    def text(self) -> str:
        """TOML of the anchor file."""
        return "\n".join(_lines(self)) + "\n"


def _lines(anchor: RunAnchor) -> Iterator[str]:
    yield "# One measured run of a software stack, written by jettison calibrate; --anchor reads it."
    yield f'schema = "{SCHEMA}"'
    copied = ("copies", "buffer") if anchor.copies else ()
    memory = "\n[memory] # bytes; fragments: GiB per square root of allocated GiB"
    for head, owner, names in (
        ("", anchor, ("stack", "gpu", "kind", "run")),
        ("\n[measured]", anchor.measured, [f.name for f in fields(MeasuredRun)]),
        (memory, anchor, (*copied, "unexplained", "fragments", "context")),
        ("\n[time] # factors on predicted seconds", anchor, FACTORS),
    ):
        values = {name: getattr(owner, name) for name in names}
        yield from filter(None, [head])
        yield from (f"{name} = {json.dumps(value)}" for name, value in values.items() if value is not None)


def read_anchor(path: Path) -> RunAnchor:
    """Read a file that `RunAnchor.text` wrote, or raise a `UsageError`."""
    from pydantic import TypeAdapter

    table = parse_toml(read_text(path, f"--anchor {path}"), f"--anchor {path}")
    if table.pop("schema", None) != SCHEMA:
        raise UsageError(f'got --anchor {path}; expected a file of jettison calibrate, with schema = "{SCHEMA}"')
    measured, own = table.pop("measured", {}), {**table.pop("memory", {}), **table.pop("time", {}), **table}
    try:
        for given, kind in ((measured, MeasuredRun), (own, RunAnchor)):
            if unknown := sorted(given.keys() - kind.__dataclass_fields__.keys()):
                raise ValueError(f"unknown key {unknown[0]}")
        made = TypeAdapter(MeasuredRun).validate_python(measured)
        return TypeAdapter(RunAnchor).validate_python({**own, "measured": made})
    except (AttributeError, TypeError, ValueError) as error:  # ValidationError is a ValueError
        said = " ".join(str(error).split())[:200]
        raise UsageError(f"got --anchor {path}, which is not an anchor file: {said}") from None
