"""Jettison: train under a byte budget. Decide tensor by tensor what to keep or recompute, and prove it."""

import sys
from importlib import import_module
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:  # what type checkers and editors see; when it runs, `_HOME_OF` says the same, name by name
    from jettison import integrations
    from jettison.capture.entries import ledger_of
    from jettison.cli.export import export_plan
    from jettison.cli.search import search
    from jettison.core.errors import (
        DoesNotFit,
        HostBudgetExceeded,
        Infeasible,
        JettisonError,
        PlanMismatch,
        ProofFailed,
        RecordingLeft,
        StaleTensor,
        TraceError,
        UnsupportedModule,
        UsageError,
        WrongValue,
    )
    from jettison.core.units import Bytes
    from jettison.families.config import read_config
    from jettison.families.presets import preset
    from jettison.frameworks.run_file import run_from
    from jettison.ledger import Ledger
    from jettison.planner import apply, auto_checkpoint, plan, sweep, trace
    from jettison.predict.forecast import forecast
    from jettison.predict.run_fields import RunRequest
    from jettison.predict.run_request import run_of
    from jettison.predict.time import estimate
    from jettison.runtime.recompute_function import checkpoint, checkpointable
    from jettison.search.request import SearchRequest
    from jettison.search.search import NothingFits
    from jettison.solve.plan import Plan
    from jettison.spec.hardware import Hardware, hardware
    from jettison.spec.layout import Layout
    from jettison.spec.model import ModelSpec
    from jettison.spec.run import Run
    from jettison.verify.given import verify_given
    from jettison.verify.planned import verify
    from jettison.verify.watch import watch

_ERRORS = (
    "DoesNotFit", "HostBudgetExceeded", "Infeasible", "JettisonError", "PlanMismatch", "ProofFailed", "RecordingLeft",
    "StaleTensor", "TraceError", "UnsupportedModule", "UsageError", "WrongValue",
)  # fmt: skip

_HOME_OF = MappingProxyType(
    {
        "auto_checkpoint": "jettison.planner",
        "trace": "jettison.planner",
        "plan": "jettison.planner",
        "sweep": "jettison.planner",
        "apply": "jettison.planner",
        "verify": "jettison.verify.planned",
        "verify_given": "jettison.verify.given",
        "export_plan": "jettison.cli.export",
        "watch": "jettison.verify.watch",
        "ledger_of": "jettison.capture.entries",
        "estimate": "jettison.predict.time",
        "checkpoint": "jettison.runtime.recompute_function",
        "checkpointable": "jettison.runtime.recompute_function",
        "forecast": "jettison.predict.forecast",
        "run_of": "jettison.predict.run_request",
        "run_from": "jettison.frameworks.run_file",
        "search": "jettison.cli.search",
        "preset": "jettison.families.presets",
        "hardware": "jettison.spec.hardware",
        "read_config": "jettison.families.config",
        "Bytes": "jettison.core.units",
        "Hardware": "jettison.spec.hardware",
        "Layout": "jettison.spec.layout",
        "Ledger": "jettison.ledger",
        "ModelSpec": "jettison.spec.model",
        "Plan": "jettison.solve.plan",
        "Run": "jettison.spec.run",
        "RunRequest": "jettison.predict.run_fields",
        "SearchRequest": "jettison.search.request",
        "NothingFits": "jettison.search.search",
        **dict.fromkeys(_ERRORS, "jettison.core.errors"),
    }
)

_ROOMS = ("integrations",)
"""Modules of the package that are part of its interface."""

__all__ = [
    "Bytes", "DoesNotFit", "Hardware", "HostBudgetExceeded", "Infeasible", "JettisonError", "Layout", "Ledger",
    "ModelSpec", "NothingFits", "Plan", "PlanMismatch", "ProofFailed", "RecordingLeft", "Run", "RunRequest",
    "SearchRequest", "StaleTensor", "TraceError", "UnsupportedModule", "UsageError", "WrongValue", "__version__",
    "apply", "auto_checkpoint", "checkpoint", "checkpointable", "estimate", "export_plan", "forecast", "hardware",
    "integrations", "ledger_of", "plan", "preset", "read_config", "run_from", "run_of", "search", "sweep", "trace",
    "verify", "verify_given", "watch",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for: ``import jettison`` alone never imports torch."""
    if name in _ROOMS:
        return import_module(f"jettison.{name}")
    home = _HOME_OF.get(name)
    if home is None:
        offered = ", ".join([*_HOME_OF, *_ROOMS])
        raise AttributeError(f"module 'jettison' has no attribute {name!r}; it offers {offered}")
    try:
        return getattr(_imported(home), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        from jettison.core.errors import install

        raise ImportError(f"jettison.{name} needs torch: {install('torch')}") from error


def _imported(home: str) -> ModuleType:
    """Import a module, which may import torch and take seconds: a terminal shows it."""
    if home in sys.modules:
        return import_module(home)  # another thread may be at it still
    from jettison.core.progress import shown

    with shown.running(f"loading {home}"):
        return import_module(home)


def __dir__() -> list[str]:
    return sorted(__all__)


class _Package(ModuleType):
    """Importing a room binds its name here. Where a public function has that name, as `search` does, it keeps it."""

    def __setattr__(self, name: str, value: object) -> None:
        if name not in _HOME_OF or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
