"""The errors that Jettison raises on purpose, each with its exit code.

A message says what was got, what was expected and what to do next. Errors about a request are also `ValueError`; errors
while a model runs are also `RuntimeError`.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Collection
from functools import partial
from sysconfig import get_paths
from typing import TYPE_CHECKING, Any, ClassVar

from jettison.core.units import Bytes, format_bytes

if TYPE_CHECKING:
    from pydantic import ValidationError

_HERE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")  # folder of the package


class JettisonError(Exception):
    """Base class of Jettison's errors. ``exit_code`` is the command line's."""

    exit_code: ClassVar[int] = 1

    @property
    def details(self) -> dict[str, Any]:
        """Return the error's data by name: whole numbers, texts, flags."""
        return {name: value for name, value in vars(self).items() if isinstance(value, int | float | str | bool)}


class TooMuchMemory(JettisonError, ValueError):
    """More bytes are needed than there are. Its attributes are the arguments that it is made of."""

    exit_code: ClassVar[int] = 3

    def __reduce__(self) -> tuple[Any, ...]:
        """Survive pickling, so that one rank or worker can hand the error to another."""
        return partial(type(self), **{name: value for name, value in vars(self).items() if name != "__notes__"}), ()


class UsageError(JettisonError, ValueError):
    """The request makes no sense as written: an unknown name, a quantity without a unit, a wrong file."""

    exit_code: ClassVar[int] = 2


def known(name: str, names: Collection[str], what: str) -> str:
    """Return a name that is one of these. Raise `UsageError` for another, with ``what``, its kind, in the message."""
    if name not in names:
        raise UsageError(f"got {what} {name!r}; expected one of {', '.join(names)}")
    return name


class NotDescribed(UsageError):
    """A model without a closed form. With torch and transformers installed, a trace can describe its blocks instead."""


class Infeasible(TooMuchMemory):
    """No plan fits the budget. ``minimum_budget_bytes`` is a budget that does."""

    def __init__(self, *, minimum_budget_bytes: int, budget_bytes: int, reason: str = "") -> None:
        """Build the message out of both budgets; ``reason`` is one more sentence about what takes the bytes."""
        message = (
            f"no plan fits a budget of {format_bytes(budget_bytes)} ({budget_bytes}B); the smallest feasible budget is "
            f"{format_bytes(minimum_budget_bytes)}. {reason + ' ' if reason else ''}"
            f'Ask for "{minimum_budget_bytes}B" or more, or make the batch, the sequence or the model smaller.'
        )
        super().__init__(message)
        self.minimum_budget_bytes = Bytes(minimum_budget_bytes)
        self.budget_bytes = budget_bytes
        self.reason = reason


class DoesNotFit(TooMuchMemory):
    """A run needs more memory than there is. No plan was searched for, so no alternative is suggested."""

    def __init__(self, *, peak_bytes: int, limit_bytes: int, limit_name: str, advice: str = "") -> None:
        """Build the message from the peak, the limit it exceeds, and advice."""
        super().__init__(
            f"the peak, {format_bytes(peak_bytes)} ({peak_bytes}B), is above "
            f"{format_bytes(limit_bytes)} ({limit_bytes}B), {limit_name}{advice and '; '}{advice}"
        )
        self.peak_bytes = peak_bytes
        self.limit_bytes = limit_bytes
        self.limit_name = limit_name
        self.advice = advice


class HostBudgetExceeded(TooMuchMemory):
    """Offloaded tensors need more CPU memory than allowed. ``real_bytes`` includes the round-up of pinned memory."""

    def __init__(self, *, needed_bytes: int, real_bytes: int, limit_bytes: int, limit_name: str) -> None:
        """Build the message; ``limit_name`` says what the limit is."""
        rounded = "" if real_bytes == needed_bytes else f", {format_bytes(real_bytes)} as pinning rounds it up"
        super().__init__(
            f"tensors that move to the host need {format_bytes(needed_bytes)} ({needed_bytes}B) of pinned memory at a "
            f"time{rounded}; {limit_name} is {format_bytes(limit_bytes)} ({limit_bytes}B). Give "
            f'host_budget="{real_bytes}B" or more where the machine has it, or move less'
        )
        self.needed_bytes = needed_bytes
        self.real_bytes = real_bytes
        self.limit_bytes = limit_bytes
        self.limit_name = limit_name


class ProofFailed(JettisonError, RuntimeError):
    """A run did not show what the plan claims: gradients differ, or the measured peak is above the budget."""

    exit_code: ClassVar[int] = 4


class TraceError(JettisonError, RuntimeError):
    """A region's forward could not be recorded."""

    exit_code: ClassVar[int] = 2


class RecordingLeft(TraceError):
    """The user's code raised an exception while its forward was recorded; the real forward may raise it as well."""


class StaleTensor(JettisonError, RuntimeError):
    """A tensor that backward needs was written to after forward had saved it."""


class WrongValue(JettisonError, RuntimeError):
    """A recomputed tensor differs from the forward's. The gradients of this step are not usable."""


class PlanMismatch(JettisonError, RuntimeError):
    """A plan does not belong to this model, this input, or to what the other ranks hold."""


class UnsupportedModule(JettisonError, ValueError):
    """A module does something that no policy can be applied to."""

    exit_code: ClassVar[int] = 2


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the user's line: of the innermost caller that is not Jettison, an installed package or Python's library;
    of the outermost if there is none (a backward's own thread).
    """
    paths = get_paths()
    others = (*(paths[kind] + os.sep for kind in ("stdlib", "purelib", "platlib")), _HERE, "<frozen")
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(others):
        frame = frame.f_back
        level += not frame.f_code.co_filename.startswith("<frozen importlib")  # not counted by `warnings`
    warnings.warn(text, category, stacklevel=level)


def install(extra: str) -> str:
    """Return the command that installs an extra of this package (pyproject.toml), which no package index has."""
    return f"pip install '.[{extra}]' in a clone of Jettison"


def first_problem(error: ValidationError) -> str:
    """Return the first wrong key of a document, what is wrong with it, and the number of such keys."""
    first = error.errors(include_url=False)[0]
    where = ".".join(map(str, first["loc"])) or "the document"
    return f"{where}: {first['msg']} (one of {error.error_count()})"
