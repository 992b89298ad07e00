"""Stacks of allocations: the line that made one, and its part of a training step.

Frames come from PyTorch's memory snapshots and from tracebacks. With ``stacks="all"``, which is the default of
`torch.cuda.memory._record_memory_history`, a stack begins with C++ frames (the unwinder, the allocator, ATen), and
Python frames are between and after frames of the interpreter, in order. Stacks of Jettison's: see `OWN`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Final

from jettison.diagnose.finding import table
from jettison.memory.timeline import Label

Frame = tuple[str, str, int]
"""Function, file, line; the innermost first."""
OWN: Final = "<jettison>"
"""File name of the outermost frame of stacks that Jettison writes; the innermost is then (role, module, 0)."""
UNKNOWN: Final = "unknown"
OPTIMIZER: Final = "optimizer"
ZERO_GRAD: Final = "zero_grad"

_ANGLED: Final = re.compile(r"<[^<>]*>[.\w]*$")
_NODE: Final = re.compile(r"\b(?:generated::(\w+Backward\d*)|(AccumulateGrad|CopySlices|CopyBackwards))::apply\b")
_OP: Final = re.compile(r"\bat::_ops::(\w+)::(?:call|redispatch)\b")
_ORIGINAL: Final = re.compile(r'File "([^"\n]+)", line (\d+), in (\S+)')

_RECOMPUTES: Final = ("recompute", "unpack", "backward")
_ENGINE: Final = ("torch::autograd::Engine", "torch::autograd::python::PythonEngine")
_OUTER: Final = {"forward": ("recompute", "backward"), "parameters": ("forward", "recompute", "backward", OPTIMIZER)}
"""By what a frame of the outside overrules one of the inside."""


@cache
def pattern_of(name: str) -> re.Pattern[str]:
    """Return a list of patterns of `frames.toml` as one."""
    return re.compile("|".join(table("frames")[name]))


def label_of_frames(frames: Sequence[Frame]) -> Label:
    """The label of an allocation.

    ``module`` is the first Python frame of the user's code; else of a library that is not torch; else of torch; else
    the autograd node or the op. ``site`` is the innermost Python frame outside of torch, where that is another one.
    """
    if frames and frames[-1][1] == OWN:
        role, module, _ = frames[0]
        return Label(module=module, role=role, site=frames[-1][0] if len(frames) > 1 else "")
    python = [frame for frame in map(_slashed, frames) if is_python(frame)]
    inner = next((frame for frame in python if not is_torch(frame[1])), python[0] if python else None)
    site = "" if inner is None else text_of_frame(inner)
    return Label(module=place_of(python) or _node(frames), role=role_of(frames), site=site)


def frames_of_label(label: Label) -> list[dict[str, str | int]]:
    """Return a stack with a label's role and module."""
    return [{"name": label.role, "filename": label.module, "line": 0}, {"name": label.site, "filename": OWN, "line": 0}]


def frames_of_original(trace: str) -> list[Frame]:
    """Lines of the model that generated code comes from: ``fx_original_trace`` of a frame, the innermost first."""
    return [(function, file, int(line)) for file, line, function in reversed(_ORIGINAL.findall(trace))]


def place_of(frames: Sequence[Frame]) -> str:
    """The first Python frame of the user's code, else of a library, else of torch; "" where no frame is Python's."""
    python = (frame for frame in map(_slashed, frames) if is_python(frame))
    found = min(python, key=lambda frame: _rank(frame[1]), default=None)
    return "" if found is None else text_of_frame(found)


def _rank(file: str) -> int:
    """Order files by owner: the user, a library, torch, Python."""
    if is_torch(file):
        return 2
    return 1 if pattern_of("library").search(file) else 3 if pattern_of("python").search(file) else 0


def is_python(frame: Frame) -> bool:
    """Whether a frame is Python's, and not C++'s: a Python file, a cell or a string, or a script without a suffix."""
    function, file, line = frame
    name = file.rsplit("/", 1)[-1]
    if name.endswith((".py", ".pyw", ".pyx", ".ipynb")) or _ANGLED.search(name):
        return True
    plain = function.isidentifier() or function.startswith("<")
    return line > 0 and bool(name) and "." not in name and plain and "/include/" not in file and name != "??"


def is_torch(file: str) -> bool:
    """Whether a file is torch's own, or code that torch generated."""
    return bool(pattern_of("torch").search(file))


def is_library(file: str) -> bool:
    """Whether a file is of an installed package or of Python itself."""
    slashed = file.replace("\\", "/")
    return bool(pattern_of("library").search(slashed) or pattern_of("python").search(slashed))


def role_of(frames: Sequence[Frame]) -> str:
    """The part of a step, by the innermost frame that tells; see `_OUTER` for what overrules it.

    A forward within `Optimizer.step` remains one: Lightning runs the whole step in the optimizer's closure.
    """
    slashed = [_slashed(frame) for frame in frames]
    found = UNKNOWN
    for frame in slashed:
        one = _role(frame)
        if found == UNKNOWN or one in _OUTER.get(found, ()):
            found = one
    if found in (OPTIMIZER, "recompute") or not any(function.startswith(_ENGINE) for function, _, _ in slashed):
        return found
    return "backward"  # frames of Python may stand behind those of the engine that called them


def ends_step(frames: Sequence[Frame]) -> str:
    """`OPTIMIZER` or `ZERO_GRAD` where a stack is inside of a step of an optimizer, or of `zero_grad`; else ""."""
    if any(function == ZERO_GRAD and is_python((function, file, line)) for function, file, line in frames):
        return ZERO_GRAD
    return OPTIMIZER if role_of(frames) == OPTIMIZER else ""


def text_of_frame(frame: Frame) -> str:
    """A frame as messages show it: the file with its folder, the line, the function."""
    function, file, line = frame
    name = "/".join(file.split("/")[-2:])
    return f"{name}:{line} {function}" if name else function


def speaks_of_logits(*texts: str) -> bool:
    """Whether frames, or lines of code, are those of a head or of a loss over a vocabulary."""
    return any(pattern_of("logits").search(text) for text in texts)


def _slashed(frame: Frame) -> Frame:
    function, file, line = frame
    return (function, file.replace("\\", "/"), line) if "\\" in file else frame


def _role(frame: Frame) -> str:
    function, file, _ = frame
    if not is_python(frame):
        return UNKNOWN
    name = function.rsplit(".", 1)[-1]
    if "torch/utils/checkpoint" in file and any(word in name for word in _RECOMPUTES):
        return "recompute"
    if name.startswith("_") and name.endswith("_forward"):  # convolutions' and attention's own
        name = "forward"
    roles = table("frames")["roles"]
    return next((role for role, part, whole in roles if part in file and whole in ("", name)), UNKNOWN)


def _node(frames: Sequence[Frame]) -> str:
    """The autograd node that a stack of C++ alone evaluates; where the engine itself allocates, the outermost op."""
    op = ""
    for function, _, _ in frames:
        found = _NODE.search(function)
        if found is not None:
            return str(found[1] or found[2])
        called = _OP.search(function)
        op = f"aten::{called[1]}" if called is not None else op
    return op
