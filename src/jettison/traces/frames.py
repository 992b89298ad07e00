"""What a stack says about an allocation: whose it is, and in which part of a step it was made.

A stack of PyTorch's names files and functions, not modules. The module is then the innermost place outside of
libraries; the role is the part of the step that frames of torch give away. Stacks that Jettison writes say both: see
`OWN`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from jettison.traces.timeline import Label

Frame = tuple[str, str, int]
"""Function, file, line; the innermost first."""
OWN: Final = "<jettison>"
"""File name of the outermost frame of stacks that Jettison writes; the innermost is then (role, module, 0)."""
UNKNOWN: Final = "unknown"
_LIBRARIES = ("/torch/", "site-packages", "<frozen", "/lib/python", "torch/csrc", "aten/src", "c10/", "??")
_ROLES: tuple[tuple[str, str, str], ...] = (  # role, part of a file's name, part of a function's name
    ("optimizer", "torch/optim/", ""),
    ("backward", "torch/autograd/", "backward"),
    ("backward", "", "torch::autograd::Engine"),
    ("backward", "", "torch::autograd::python::PythonEngine"),
    ("recompute", "torch/utils/checkpoint", "recompute"),
    ("recompute", "torch/utils/checkpoint", "unpack"),
    ("forward", "torch/nn/modules/module.py", "_call_impl"),
    ("forward", "", "forward"),
    ("parameters", "torch/nn/modules/module.py", "_apply"),
    ("parameters", "", "__init__"),
)


def label_of_frames(frames: Sequence[Frame]) -> Label:
    """What a stack says."""
    if frames and frames[-1][1] == OWN:
        role, module, _ = frames[0]
        return Label(module=module, role=role, site=frames[-1][0] if len(frames) > 1 else "")
    if not frames:
        return Label(module="", role=UNKNOWN)
    place = next((f for f in frames if f[1] and not any(part in f[1] for part in _LIBRARIES)), None)
    return Label(module="" if place is None else _text(place), role=_role(frames), site=_text(frames[0]))


def frames_of_label(label: Label) -> list[dict[str, str | int]]:
    """A stack that says what a label says."""
    return [{"name": label.role, "filename": label.module, "line": 0}, {"name": label.site, "filename": OWN, "line": 0}]


def _text(frame: Frame) -> str:
    function, file, line = frame
    name = "/".join(file.split("/")[-2:])
    return f"{name}:{line} {function}" if name else function


def _role(frames: Sequence[Frame]) -> str:
    """The first role of the list that a frame fits."""
    for role, file, function in _ROLES:
        if any(file in f[1] and function in f[0] for f in frames):
            return role
    return UNKNOWN
