"""Packages that others import and never use on a CPU."""

from __future__ import annotations

import sys
import types
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any, ClassVar


class _Anything(types.ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name == "__version__":
            return "3.5.0"
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **_: args[0] if args and callable(args[0]) else (lambda function: function)


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, _path: Any, _target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == "triton" else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _Anything(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


def stub_triton() -> None:
    """Imports of triton give a module that has every name; torch has looked for the real one before, and found none."""
    import torch._dynamo
    import torch._functorch.aot_autograd
    import torch._inductor.codecache
    import torch._inductor.compile_fx
    import torch.utils._triton

    torch.utils._triton.has_triton_package()
    torch.utils._triton.has_triton()
    sys.meta_path.insert(0, _Finder())
