"""What documents of several schemas have in common."""

from __future__ import annotations

from typing import Any

from typing_extensions import TypedDict

Request = dict[str, Any]
"""What was asked: the model, and each flag that was given, by its name in Python."""


class Breakdown(TypedDict):
    """Seconds of a step by what they go into; they add up to it."""

    compute_seconds: float
    communication_seconds: float
    bubble_seconds: float
    recompute_seconds: float
    other_seconds: float


class Layout(TypedDict):
    """Ranks of each kind of parallelism; ``world`` is their product. ``stage_layers`` is null where layers are even."""

    tp: int
    sp: bool
    pp: int
    virtual_stages: int
    cp: int
    ep: int
    dp: int
    zero: int
    world: int
    schedule: str
    stage_layers: list[int] | None


class Levels(TypedDict):
    """Bytes alive over one phase: the lowest and highest of each of its stretches, in order."""

    phase: str
    levels: int
    low_bytes: list[int]
    high_bytes: list[int]


class StepLevels(TypedDict):
    """Bytes alive over a step, phase after phase."""

    phases: list[Levels]


class Tensor(TypedDict):
    """A saved tensor of the programs with this digest; ``buffer`` is what layers speak of."""

    digest: str
    buffer: int
    path: str
    op: str
    role: str
    shape: list[int]
    dtype: str
    nbytes: int
    free: bool


class Change(TypedDict):
    """What to do, a command or a line of the program, and why."""

    line: str
    why: str


class Finding(TypedDict):
    """A claim, what it rests on, and what would mend it."""

    kind: str
    claim: str
    evidence: list[str]
    changes: list[Change]
