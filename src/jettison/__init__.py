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

_NAMES_OF = {
    "jettison.planner": "auto_checkpoint trace plan sweep apply",
    "jettison.verify.planned": "verify",
    "jettison.verify.given": "verify_given",
    "jettison.cli.export": "export_plan",
    "jettison.verify.watch": "watch",
    "jettison.capture.entries": "ledger_of",
    "jettison.predict.time": "estimate",
    "jettison.runtime.recompute_function": "checkpoint checkpointable",
    "jettison.predict.forecast": "forecast",
    "jettison.predict.run_request": "run_of",
    "jettison.frameworks.run_file": "run_from",
    "jettison.cli.search": "search",
    "jettison.families.presets": "preset",
    "jettison.spec.hardware": "hardware Hardware",
    "jettison.families.config": "read_config",
    "jettison.core.units": "Bytes",
    "jettison.spec.layout": "Layout",
    "jettison.ledger": "Ledger",
    "jettison.spec.model": "ModelSpec",
    "jettison.solve.plan": "Plan",
    "jettison.spec.run": "Run",
    "jettison.predict.run_fields": "RunRequest",
    "jettison.search.request": "SearchRequest",
    "jettison.search.search": "NothingFits",
    "jettison.core.errors": " ".join(_ERRORS),
}
_HOME_OF = MappingProxyType({name: home for home, names in _NAMES_OF.items() for name in names.split()})

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
