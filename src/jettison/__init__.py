"""Jettison: train under a byte budget. Decide tensor by tensor what to keep, recompute or offload, and prove it.

NOTE [ Verbs that share a room's name ]
`jettison.trace` and `jettison.plan` are functions for users and packages for the import system. Importing a submodule
binds it as an attribute of its parent, which would put a package in the function's place, at a moment that depends on
who imported what first. The module class below drops that binding for the public names, so the attribute is always the
public object. `from jettison.plan.problem import ...` works as ever; `import jettison.plan.problem as name` does not,
and the architecture test keeps it out of this code base.
"""

import sys
from importlib import import_module
from types import MappingProxyType, ModuleType
from typing import Any

__version__ = "0.1.0"

_HOME_OF = MappingProxyType(
    {
        "auto_checkpoint": "jettison.api",
        "trace": "jettison.api",
        "plan": "jettison.api",
        "apply": "jettison.api",
        "verify": "jettison.api",
        "checkpoint": "jettison.api",
        "checkpointable": "jettison.api",
        "forecast": "jettison.forecast.run",
        "preset": "jettison.spec.presets",
        "read_config": "jettison.spec.config",
        "Hardware": "jettison.spec.hardware",
        "Layout": "jettison.spec.layout",
        "Ledger": "jettison.ledger",
        "ModelSpec": "jettison.spec.model",
        "Plan": "jettison.plan",
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


class _Package(ModuleType):
    """See NOTE [ Verbs that share a room's name ]."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in _HOME_OF and isinstance(value, ModuleType):
            return
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
