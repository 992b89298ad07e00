"""Runs in an interpreter of its own: what other people's packages ask of a machine, answered where it has no GPU.

Their packages lie in folders on PYTHONPATH, beside this interpreter's torch. They import Triton, and nothing that runs
here calls it: any name in it is a function that gives back what it decorates.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
import typing
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class _Anything(types.ModuleType):
    """A module with every name."""

    __path__: typing.ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name == "__version__":
            return "3.5.0"
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **_: args[0] if args and callable(args[0]) else (lambda function: function)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, *packages: str) -> None:
        self.packages = packages

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not any(fullname == name or fullname.startswith(f"{name}.") for name in self.packages):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Anything(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        return


def prepare(*beside: str) -> None:
    """Before a package is imported; torch has to look for Triton first, and to find that there is none.

    Args:
        beside: packages that are stood in for like Triton, where they are not there.
    """
    warnings.simplefilter("ignore")
    if not hasattr(typing, "override"):  # Python 3.11
        import typing_extensions

        typing.override = typing_extensions.override  # type: ignore[attr-defined]
    sys.meta_path.insert(0, _Finder(*(name for name in beside if _is_missing(name))))
    if not _is_missing("triton"):
        return
    import torch._dynamo
    import torch._functorch.aot_autograd
    import torch._inductor.codecache
    import torch._inductor.compile_fx
    import torch.distributed
    import torch.utils._triton
    import torch.utils.flop_counter

    torch.utils._triton.has_triton_package()
    torch.utils._triton.has_triton()
    sys.meta_path.insert(0, _Finder("triton"))


def stand_in(name: str) -> types.ModuleType:
    """A module with every name."""
    return _Anything(name)


def _is_missing(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is None
    except ModuleNotFoundError:  # what it lies in is missing
        return True


def without_init(*packages: str) -> None:
    """These packages are found where their files are, and their ``__init__`` is not run: it imports too much."""
    for name in packages:
        above, _, last = name.rpartition(".")
        places = [place for place in importlib.import_module(above).__path__ if (Path(place) / last).is_dir()]
        made = types.ModuleType(name)
        made.__path__ = [str(Path(place) / last) for place in places]
        sys.modules[name] = made
        setattr(importlib.import_module(above), last, made)
