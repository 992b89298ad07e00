"""Memory budgets for trainers, one line each: the public names of ``frameworks/NAME/integration.py``.

A module and its library are imported at first use: ``jettison.integrations.transformers``.
"""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from jettison.core.errors import install

if TYPE_CHECKING:
    from jettison.integrations import lightning, torchtitan, transformers

__all__ = ["lightning", "torchtitan", "transformers"]


def __getattr__(name: str) -> ModuleType:
    """Import a trainer's module. Raise `AttributeError` for another name, `ImportError` without its library."""
    if name not in __all__:
        raise AttributeError(f"module 'jettison.integrations' has no attribute {name!r}; it has {', '.join(__all__)}")
    try:
        return import_module(f"jettison.integrations.{name}")
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing == "jettison":
            raise
        from jettison.spec.frameworks import named

        wanted = "torch" if missing == "torch" else named("trainers")[name]["extra"]
        raise ImportError(f"jettison.integrations.{name} needs {missing}: {install(wanted)}") from error


def __dir__() -> list[str]:
    return list(__all__)
