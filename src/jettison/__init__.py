"""Jettison: train under a byte budget. Decide tensor by tensor what to keep or recompute, and prove it."""

from importlib import import_module
from types import MappingProxyType
from typing import Any

__version__ = "0.1.0"

_HOME_OF = MappingProxyType(
    {
        "auto_checkpoint": "jettison.planner",
        "trace": "jettison.planner",
        "plan": "jettison.planner",
        "apply": "jettison.planner",
        "verify": "jettison.verbs.verify",
        "verify_given": "jettison.verbs.verify_given",
        "export_plan": "jettison.verbs.export",
        "watch": "jettison.measure.watch",
        "ledger_of": "jettison.capture.entries",
        "estimate": "jettison.predict.time",
        "checkpoint": "jettison.runtime.recompute_function",
        "checkpointable": "jettison.runtime.recompute_function",
        "forecast": "jettison.predict.forecast",
        "preset": "jettison.spec.presets",
        "read_config": "jettison.spec.huggingface_config",
        "Hardware": "jettison.spec.hardware",
        "Layout": "jettison.spec.layout",
        "Ledger": "jettison.ledger",
        "ModelSpec": "jettison.spec.model",
        "Plan": "jettison.solve",
        "Run": "jettison.spec.run",
    }
)


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for: ``import jettison`` alone never imports torch."""
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'jettison' has no attribute {name!r}; it offers {', '.join(_HOME_OF)}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
