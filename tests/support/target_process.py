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
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != "triton":
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Anything(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        return


def prepare() -> None:
    """Before a package is imported; torch has to look for Triton first, and to find that there is none."""
    warnings.simplefilter("ignore")
    if not hasattr(typing, "override"):  # Python 3.11
        import typing_extensions

        typing.override = typing_extensions.override  # type: ignore[attr-defined]
    if importlib.util.find_spec("triton") is not None:
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
    sys.meta_path.insert(0, _Finder())
