"""A region that runs compiled: Inductor's code for the module's own forward, split as the plan says.

Its saved tensors pass no hooks and have no witness: what is computed again is part of the compiled backward, which
reads what the compiled forward has left, as without a plan. Shapes are compiled one by one (``dynamic=False``): what
was measured is what runs.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import shutil
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from jettison.capture.compiled import CompiledProgram, CompileSettings
from jettison.capture.isolation import without_our_hooks
from jettison.errors import UnsupportedModule
from jettison.runtime.callers import is_transforming
from jettison.runtime.planned import PlannedForward
from jettison.runtime.recordings import Prepared
from jettison.runtime.report import RegionReport
from jettison.runtime.witness import Check
from jettison.solve.policy import CheckpointPolicy, KeepAll

RUNS_COMPILED = "it runs compiled"
MOST_VARIANTS = 256  # of one forward: options, shapes, and layers that differ in what Python reads
_KNOWN = frozenset(inspect.signature(torch.compile).parameters)


def compiled(forward: Callable[..., Any], settings: CompileSettings, policy: CheckpointPolicy) -> Callable[..., Any]:
    """The forward, compiled as one graph, saving what the policy says; with ``none``, as without a plan.

    Instances of a class share what is compiled.
    """
    shared = getattr(forward, "__func__", None)
    if shared is None:  # of this instance alone
        return _made(forward, settings, policy)
    known = _SHARED.setdefault(shared, {})
    key = (repr(settings), policy)
    if key not in known:
        known[key] = _made(shared, settings, policy)
    return functools.partial(known[key], forward.__self__)  # type: ignore[attr-defined]


_SHARED: Any = weakref.WeakKeyDictionary()
"""By function: by settings and policy what it was compiled to."""


def _made(forward: Callable[..., Any], settings: CompileSettings, policy: CheckpointPolicy) -> Callable[..., Any]:
    options = dict(settings.options)
    if policy.word != "none":
        from jettison.runtime.partition import Partition

        options["custom_partitioner_fn"] = Partition(policy)
    return one_graph(forward, options=options or None)


def one_graph(forward: Callable[..., Any], **how: Any) -> Callable[..., Any]:
    """``torch.compile`` of everything that the forward does, for each shape anew.

    Apart from what others compile of it: all that is made of one function counts towards one limit, past which torch
    runs it op by op.
    """
    apart = {"recompile_limit": MOST_VARIANTS, "isolate_recompiles": True}
    known = {name: value for name, value in apart.items() if name in _KNOWN}
    return torch.compile(forward, fullgraph=True, dynamic=False, **known, **how)


def check_compiler(device_type: str) -> None:
    """Whether Inductor can make code here.

    Raises:
        UnsupportedModule: it cannot; what is missing.
    """
    if not torch._dynamo.is_dynamo_supported():
        raise UnsupportedModule("blocks cannot be compiled: torch.compile does not support this system, or this Python")
    try:
        if device_type == "cpu":
            from torch._inductor.cpp_builder import get_cpp_compiler

            found = shutil.which(get_cpp_compiler()) is not None
        else:
            from torch.utils._triton import has_triton

            found = has_triton()
    except (ImportError, RuntimeError):
        found = False
    if not found:
        missing = "a C++ compiler (g++ or clang++, or the one named by CXX)" if device_type == "cpu" else "Triton"
        raise UnsupportedModule(
            f"blocks cannot be compiled: Inductor needs {missing}, and none was found; install it, or plan without "
            "compiling"
        )


class CompiledRegion(PlannedForward):
    """See `PlannedForward`. What the module was compiled with by itself is put aside, and back by `remove`."""

    def __init__(
        self,
        module: nn.Module,
        name: str,
        policy: CheckpointPolicy,
        *,
        compiled: CompiledProgram,
        model: nn.Module,
        how: Check,
    ) -> None:
        super().__init__(module, name, policy, model=model, how=how)
        self.compiled = compiled
        self.own_call: Any = module._compiled_call_impl
        module._compiled_call_impl = None
        self.recordings.never = RUNS_COMPILED
        self.made: dict[CheckpointPolicy, Callable[..., Any]] = {}

    def _compiled(self, policy: CheckpointPolicy) -> Callable[..., Any]:
        """Made when it is first called."""
        if policy not in self.made:
            self.made[policy] = compiled(self.own(), self.compiled.settings, policy)
        return self.made[policy]

    def plainly_compiled(self, alike: nn.Module) -> Callable[..., Any]:
        """The forward of a copy of the module, compiled in the same way and without a plan."""
        return compiled(alike.forward, self.compiled.settings, KeepAll())

    def _called(self, copied: nn.Module | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if copied is None and not (self.retired or torch.is_grad_enabled() or is_transforming()):
            return self._compiled(KeepAll())(*args, **kwargs)  # an evaluation, say
        return super()._called(copied, args, kwargs)

    def _run_plainly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Under somebody else's hooks: they get what the compiled forward saves."""
        return self._compiled(self.way.policy)(*args, **kwargs)

    def _run(
        self, prepared: Prepared, key: Any, leaves: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        prepared.calls += 1
        modes = _get_current_dispatch_mode_stack()
        if any(not type(mode).__module__.startswith("jettison.") for mode in modes):
            return self._run_uncompiled(args, kwargs)
        alone = _disable_current_modes() if modes else contextlib.nullcontext()  # dynamo leaves alone what they see
        with without_our_hooks(), alone:  # what it saves is not the surrounding region's
            return self._compiled(self.way.policy)(*args, **kwargs)

    def _run_uncompiled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As torch runs compiled code under a mode: op by op, for the mode to see."""
        self.say_once(
            "mode",
            f"{self.name or 'the model'} runs op by op under a dispatch mode (a counter of FLOPs, say), as what is "
            "compiled always does; it then keeps what plain autograd keeps",
        )
        with without_our_hooks():
            return self.own()(*args, **kwargs)

    def start_over(self) -> None:
        """See `PlannedForward`."""
        super().start_over()
        self.made.clear()

    def remove(self) -> None:
        """See `PlannedForward`."""
        super().remove()
        if self.module._compiled_call_impl is None:
            self.module._compiled_call_impl = self.own_call
        self.made.clear()

    def report(self) -> RegionReport:
        """What the plan has it keep; its slots are Inductor's, and have no names."""
        program, policy = self.compiled.program, self.way.policy
        kept = self.compiled.default if policy.word == "none" else policy.kept(program)
        again = program.recompute_set(kept) if policy.word != "none" else ()
        return RegionReport(
            name=self.name,
            word=policy.word,
            calls=self.calls,
            recordings=0,
            fallback="",
            check="compiled",
            rounded=0,
            slots_kept=len(kept & program.saved_buffers()),
            slots_dropped=len(program.saved_buffers() - kept),
            slots_parameter=len(program.needed_buffers() - program.saved_buffers()),
            slots_offloaded=0,
            slots_packed=0,
            kept_bytes=program.kept_bytes(kept),
            host_bytes=0,
            recomputed_ops=tuple(program.ops[i].name for i in again),
        )
