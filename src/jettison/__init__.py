"""Jettison: train under a byte budget. Decide tensor by tensor what to keep or recompute, and prove it."""

import sys
from importlib import import_module
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:  # what type checkers and editors see; when it runs, `_HOME_OF` says the same, name by name
    from jettison import integrations as integrations
    from jettison.capture.ledger_entries import ledger_of as ledger_of
    from jettison.cli.export import export_plan as export_plan
    from jettison.cli.search import search as search
    from jettison.core.errors import DoesNotFit as DoesNotFit
    from jettison.core.errors import HostBudgetExceeded as HostBudgetExceeded
    from jettison.core.errors import Infeasible as Infeasible
    from jettison.core.errors import JettisonError as JettisonError
    from jettison.core.errors import PlanMismatch as PlanMismatch
    from jettison.core.errors import ProofFailed as ProofFailed
    from jettison.core.errors import RecordingLeft as RecordingLeft
    from jettison.core.errors import StaleTensor as StaleTensor
    from jettison.core.errors import TraceError as TraceError
    from jettison.core.errors import UnsupportedModule as UnsupportedModule
    from jettison.core.errors import UsageError as UsageError
    from jettison.core.errors import WrongValue as WrongValue
    from jettison.core.units import Bytes as Bytes
    from jettison.families.config import read_config as read_config
    from jettison.families.presets import preset as preset
    from jettison.frameworks.run_file import run_from as run_from
    from jettison.ledger.ledger import Ledger as Ledger
    from jettison.planner import apply as apply
    from jettison.planner import auto_checkpoint as auto_checkpoint
    from jettison.planner import plan as plan
    from jettison.planner import sweep as sweep
    from jettison.planner import trace as trace
    from jettison.predict.forecast import forecast as forecast
    from jettison.predict.time import estimate as estimate
    from jettison.request.options import RunRequest as RunRequest
    from jettison.request.resolve import run_of as run_of
    from jettison.runtime.checkpoint_function import checkpoint as checkpoint
    from jettison.runtime.checkpoint_function import checkpointable as checkpointable
    from jettison.search.search import NothingFits as NothingFits
    from jettison.search.search import SearchRequest as SearchRequest
    from jettison.solve.plan import Plan as Plan
    from jettison.spec.hardware import Hardware as Hardware
    from jettison.spec.hardware import hardware as hardware
    from jettison.spec.layout import Layout as Layout
    from jettison.spec.model import ModelSpec as ModelSpec
    from jettison.spec.run import Run as Run
    from jettison.verify.own_checkpointing import verify_given as verify_given
    from jettison.verify.verify import verify as verify
    from jettison.verify.watch import watch as watch

_NAMES_OF = {
    "jettison.planner": "auto_checkpoint trace plan sweep apply",
    "jettison.verify.verify": "verify",
    "jettison.verify.own_checkpointing": "verify_given",
    "jettison.cli.export": "export_plan",
    "jettison.verify.watch": "watch",
    "jettison.capture.ledger_entries": "ledger_of",
    "jettison.predict.time": "estimate",
    "jettison.runtime.checkpoint_function": "checkpoint checkpointable",
    "jettison.predict.forecast": "forecast",
    "jettison.request.resolve": "run_of",
    "jettison.frameworks.run_file": "run_from",
    "jettison.cli.search": "search",
    "jettison.families.presets": "preset",
    "jettison.spec.hardware": "hardware Hardware",
    "jettison.families.config": "read_config",
    "jettison.core.units": "Bytes",
    "jettison.spec.layout": "Layout",
    "jettison.ledger.ledger": "Ledger",
    "jettison.spec.model": "ModelSpec",
    "jettison.solve.plan": "Plan",
    "jettison.spec.run": "Run",
    "jettison.request.options": "RunRequest",
    "jettison.search.search": "NothingFits SearchRequest",
    "jettison.core.errors": "DoesNotFit HostBudgetExceeded Infeasible JettisonError PlanMismatch ProofFailed "
    "RecordingLeft StaleTensor TraceError UnsupportedModule UsageError WrongValue",
}
_HOME_OF = MappingProxyType({name: home for home, names in _NAMES_OF.items() for name in names.split()})

_ROOMS = ("integrations",)
"""Modules of the package that are part of its interface."""

__all__ = sorted([*_HOME_OF, *_ROOMS, "__version__"])


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
