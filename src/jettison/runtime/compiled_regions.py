"""Compiled regions: Inductor's code for the module's own forward, partitioned as the plan says.

Their saved tensors have no witness: recomputation is part of the compiled backward, which reads what the compiled
forward saved, as without a plan. Saved-tensor hooks are used only if some tensor is to be offloaded. Each shape is
compiled separately (``dynamic=False``): the measured code is the code that runs.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import shutil
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from jettison.capture.isolation import without_our_hooks
from jettison.capture.model_trace import CompiledProgram, CompileSettings
from jettison.capture.pytrees import tree_leaves
from jettison.capture.tensor_subclasses import storage_of
from jettison.core.errors import TraceError, UnsupportedModule, UsageError
from jettison.core.objects import swapped
from jettison.runtime.callers import are_hooks_foreign, is_transforming, of_a_region
from jettison.runtime.checkpoint_fallback import OffloadHooks, run_with_offload
from jettison.runtime.cuda_graphs import refuse_capture
from jettison.runtime.offload import Group
from jettison.runtime.planned_forward import PlannedForward, RegionReport
from jettison.runtime.saved_handles import Held, opened
from jettison.runtime.witness import Check
from jettison.solve.checkpoint_policy import CheckpointPolicy, Exactly, KeepAll, Offload, can_move, offloaded_by
from jettison.solve.problem import OffloadedTensor

if TYPE_CHECKING:
    from jettison.runtime.compiled_partition import Split

RUNS_COMPILED = "it runs compiled"
MOST_VARIANTS = 256  # of one option: shapes, and layers whose Python attributes differ; dynamo's own limit
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_KNOWN = frozenset(inspect.signature(torch.compile).parameters)


def compiled(
    forward: Callable[..., Any], settings: CompileSettings, policy: CheckpointPolicy, *, says: bool = False
) -> Callable[..., Any]:
    """Compile the forward as one graph that saves the tensors of the policy; with ``none``, as without a plan.
    ``says``: report the partition of each run to `listening`. Instances of a class share compiled code, except for
    those with hooks inside: dynamo inlines hooks and does not guard on their presence.
    """
    shared = getattr(forward, "__func__", None)
    if shared is None or any(hook_tables(forward.__self__)):  # type: ignore[attr-defined]
        return _made(forward, settings, policy, says)
    known = _SHARED.setdefault(shared, {})
    key = (repr(settings), policy, says)
    if key not in known:
        known[key] = _made(shared, settings, policy, says)
    return functools.partial(known[key], forward.__self__)  # type: ignore[attr-defined]


_SHARED: Any = weakref.WeakKeyDictionary()
"""By function: compiled functions by settings, policy and whether they report their partition."""


def hook_tables(module: object) -> list[dict[int, Any]]:
    """Hook tables of every submodule, by kind. The module's own hooks run around its forward."""
    inside = list(module.modules())[1:] if isinstance(module, nn.Module) else []
    return [vars(each)[kind] for each in inside for kind in _HOOKS]


def _made(
    forward: Callable[..., Any], settings: CompileSettings, policy: CheckpointPolicy, says: bool
) -> Callable[..., Any]:
    if says:
        return one_graph(forward, backend=noting(settings, policy))
    options = dict(settings.options)
    if policy.word != "none":
        from jettison.runtime.compiled_partition import Partition

        options["custom_partitioner_fn"] = Partition(policy)
    return one_graph(forward, options=options or None)


def one_graph(forward: Callable[..., Any], **how: Any) -> Callable[..., Any]:
    """Compile the complete forward with ``torch.compile``, separately for each shape, from other compilations of the
    same function, and from other options: dynamo counts all variants of one code object towards its limits, beyond
    which this is an error (``fullgraph``).
    """
    apart = {"recompile_limit": MOST_VARIANTS, "isolate_recompiles": True}
    known = {name: value for name, value in apart.items() if name in _KNOWN}
    return torch.compile(_own_code(forward), fullgraph=True, dynamic=False, **known, **how)


def _own_code(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same function, or method, with a code object of its own."""
    function = getattr(forward, "__func__", forward)
    if not isinstance(function, types.FunctionType):
        return forward
    made = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    made.__kwdefaults__, made.__module__, made.__qualname__ = (
        function.__kwdefaults__,
        function.__module__,
        function.__qualname__,
    )
    return made if function is forward else types.MethodType(made, forward.__self__)  # type: ignore[attr-defined]


class _Compilations(threading.local):
    """Compilations of this thread, and the region that runs now."""

    times = 0
    region = ""


_COMPILATIONS = _Compilations()


def compilations() -> int:
    """Number of compilations in this thread since the first call."""
    _count_compilations()
    return _COMPILATIONS.times


@functools.cache
def _count_compilations() -> None:
    from torch._dynamo.callback import on_compile_start

    def count(_what: Any) -> None:
        _COMPILATIONS.times += 1
        if _COMPILATIONS.region:
            refuse_capture(f"{_COMPILATIONS.region} is compiled")

    on_compile_start(count)


def first_lines(error: BaseException) -> str:
    """First lines of dynamo's or Inductor's error, which may be pages long."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])[:240]}"


def check_compiler(device_type: str) -> None:
    """Check that Inductor can generate code here, and that the choice of saved tensors is left to the plan.

    Raises:
        UnsupportedModule: it cannot; the message names what is missing.
        UsageError: torch's own activation budget is set, which decides the same. (With one, dropout masks are drawn a
            second time in backward in torch 2.13, pytorch#190758: gradients are wrong.)
    """
    own = torch._functorch.config.activation_memory_budget
    if own != 1.0:
        raise UsageError(
            f"torch._functorch.config.activation_memory_budget is {own}; expected 1.0, its default: what compiled "
            "blocks save is the plan's to decide"
        )
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
    """See `PlannedForward`. The user's own compilation of the module is replaced, and restored by `remove`."""

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
        self.made: dict[tuple[CheckpointPolicy, bool], Callable[..., Any]] = {}
        self.ran: dict[Any, int] = {}  # by plan and signature of the model's forward: index of the first such forward
        self._look_inside()

    def _look_inside(self) -> None:
        """Check hooks and submodules: dynamo does not guard on hooks, nor always on other modules."""
        self.made.clear()
        self.children = [vars(each)["_modules"] for each in self.module.modules()]
        self.parts = list(chain.from_iterable(map(dict.values, self.children)))
        self.hook_tables = hook_tables(self.module)
        self.hooks = list(chain.from_iterable(self.hook_tables))

    def _compiled(self, policy: CheckpointPolicy, *, says: bool = False) -> Callable[..., Any]:
        """Compile at the first call, and again if there are other modules or hooks inside."""
        if (
            list(chain.from_iterable(self.hook_tables)) != self.hooks
            or list(chain.from_iterable(map(dict.values, self.children))) != self.parts
        ):
            self._look_inside()
        made = self.made.get((policy, says))
        if made is None:
            made = self.made[policy, says] = compiled(self.own(), self.compiled.settings, policy, says=says)
        return made

    def _called(self, copied: nn.Module | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if copied is None and not (self.retired or torch.is_grad_enabled() or is_transforming()):
            return self._compiled(KeepAll())(*args, **kwargs)  # an evaluation, say
        return super()._called(copied, args, kwargs)

    def _is_watched(self) -> bool:
        """Always true: it runs compiled under the plan even where every tensor is kept."""
        return True

    def _run_plainly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run under foreign hooks, which get the tensors that the compiled forward saves."""
        return self._compiled(keeping(self.plan.policy, self.compiled))(*args, **kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `PlannedForward`. Nothing is recorded; dynamo's guards notice changes."""
        self._begin_watched_call()
        self.recordings.unguard()
        if are_hooks_foreign():
            return self._run_plainly(args, kwargs)
        modes = _get_current_dispatch_mode_stack()
        if any(not type(mode).__module__.startswith("jettison.") for mode in modes):
            return self._run_uncompiled(args, kwargs)
        alone = _disable_current_modes() if modes else contextlib.nullcontext()  # dynamo does not compile under modes
        began = compilations()
        _COMPILATIONS.region = self.name or "the model"
        try:
            with without_our_hooks(), alone:  # its saved tensors are not the surrounding region's
                output = self._run_alone(args, kwargs)
        finally:
            _COMPILATIONS.region = ""
        if FakeTensor in map(type, tree_leaves(output)):
            self.refuse_fake("returns")
        outer = self.outer or self
        first = self.ran.setdefault((self.recordings.number, outer.key), outer.calls)
        if first != outer.calls and compilations() != began:
            self.warn_changed()
        return output

    def _run_alone(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        policy = self.plan.policy
        all_moves = isinstance(policy, Offload)
        some_may_move = self.offload is not None and not all_moves
        run = self._compiled(keeping(policy, self.compiled), says=some_may_move)
        try:
            if isinstance(policy, Offload):
                return run_with_offload(self, policy, run, args, kwargs)
            return run_sending(self, run, args, kwargs) if some_may_move else run(*args, **kwargs)
        except torch._dynamo.exc.InternalTorchDynamoError:
            refuse_capture(f"{self.name or 'the model'} is compiled")  # dynamo wraps exceptions of its callback
            raise
        except (torch._dynamo.exc.Unsupported, torch._dynamo.exc.FailOnRecompileLimitHit) as error:
            raise TraceError(
                f"{self.name} cannot be compiled as it is now ({first_lines(error)}). It is not run op by op instead, "
                "since then it would keep more than was planned: put back what has changed since planning, or "
                "remove() the plan and plan again"
            ) from error

    def _run_uncompiled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run as torch runs compiled code under a mode: op by op, visible to the mode."""
        self.warn_once(
            "mode",
            f"{self.name or 'the model'} runs op by op under a dispatch mode (a counter of FLOPs, say), as what is "
            "compiled always does; it then keeps what plain autograd keeps",
        )
        with without_our_hooks():
            return self.own()(*args, **kwargs)

    def warn_compiled(self) -> None:
        """Make another `torch.compile` of it a no-op."""
        self.warn_once(
            "torch.compile",
            "torch.compile has no effect on blocks that run under a plan: they are compiled already, as the plan has "
            "it. To compile them otherwise, remove() the plan, call block.compile(...), and plan again",
        )

    def start_over(self) -> None:
        super().start_over()
        self.made.clear()
        self.ran.clear()

    def like(self, module: nn.Module) -> PlannedForward:
        return CompiledRegion(
            module, self.name, self.plans[0].policy, compiled=self.compiled, model=self.model, how=self.how
        )

    def remove(self) -> None:
        super().remove()
        if self.module._compiled_call_impl is None:
            self.module._compiled_call_impl = self.own_call
        self.made.clear()

    def report(self) -> RegionReport:
        """Report what the plan makes it keep; its slots are Inductor's, and have no names."""
        program, policy = self.compiled.program, keeping(self.plan.policy, self.compiled)
        kept = self.compiled.default if policy.word == "none" else policy.kept(program)
        again = program.recompute_set(kept) if policy.word != "none" else ()
        moved = self._moved(kept)
        return RegionReport(
            name=self.name,
            word=self.plan.policy.word,
            calls=self.calls,
            recordings=0,
            fallback="",
            check="compiled",
            rounded=0,
            slots_kept=len(kept & program.saved_buffers() - moved),
            slots_dropped=len(program.saved_buffers() - kept),
            slots_parameter=len(program.needed_buffers() - program.saved_buffers()),
            slots_offloaded=len(moved),
            slots_packed=0,
            kept_bytes=program.kept_bytes(kept - moved),
            host_bytes=program.kept_bytes(moved),
            recomputed_ops=tuple(program.ops[i].name for i in again),
        )

    def _moved(self, kept: frozenset[int]) -> frozenset[int]:
        """The kept buffers that are offloaded, unless something else holds them."""
        policy, program = self.plan.policy, self.compiled.program
        if self.plan.stays == 1:
            return frozenset()
        if not isinstance(policy, Offload):
            return offloaded_by(policy, program) & kept
        return frozenset(b for b in kept if can_move(program, b) and program.buffers[b].nbytes >= policy.smallest_bytes)


def keeping(policy: CheckpointPolicy, of: CompiledProgram) -> CheckpointPolicy:
    """The policy of what is saved, wherever it is stored: blocks that differ only in offloading share their code."""
    if isinstance(policy, Offload):
        return policy.keeps
    if isinstance(policy, Exactly) and policy.offloaded_buffers:
        own_choice = policy.digest == of.program.digest() and policy.buffers == of.default
        return KeepAll() if own_choice else replace(policy, offloaded_buffers=frozenset())
    return policy


# compiled moves -------------------------------------------------------------------------------------------------------
#
# NOTE [ Places ]
# Saved tensors of a compiled block are offloaded by their position, which Inductor's partition tells.
# A compiled forward gives autograd its saved tensors in the order in which the partitioned graph returns them, and each
# passes the saved-tensor hooks once. So a place is a node of that graph, and a buffer of the block's program
# (`partition.Split`). One function may be compiled for several shapes: running code reports which one it is, just
# before. The partition is known where the block is compiled, so code from torch's cache of autograd graphs has none;
# that cache is disabled here (Inductor's own cache of compiled kernels is not).
#
# NOTE [ Whole storages ]
# Whatever part of a storage stays keeps all of it allocated. If saved tensors cover most of a storage (queries, keys
# and values from one matmul), all of it is offloaded, once.


Runs = Callable[..., Any]
Says = Callable[["Split"], None]

_LISTENING = threading.local()


def listening(says: Says) -> contextlib.AbstractContextManager[None]:
    """Receive the partition of code compiled by `noting` just before it runs, in this thread."""
    return swapped(_LISTENING, says=says)


def noting(settings: CompileSettings, policy: CheckpointPolicy) -> Callable[[Any, Any], Runs]:
    """Inductor as a backend of `torch.compile` whose code reports its partition. See NOTE [ Places ]."""
    from torch._inductor.compile_fx import compile_fx

    from jettison.runtime.compiled_partition import Partition, watching_splits

    def backend(graph: Any, inputs: Any) -> Runs:
        patches = {**dict(settings.options), "custom_partitioner_fn": Partition(policy)}
        with watching_splits() as seen, torch._functorch.config.patch(enable_autograd_cache=False):
            run: Any = compile_fx(graph, inputs, config_patches=patches)
        if len(seen) != 1:  # no gradients are requested, or there are graphs inside of the graph
            return run
        (split,) = seen

        def says_and_runs(*args: Any) -> Any:
            says = getattr(_LISTENING, "says", None)
            if says is not None:
                says(split)
            return run(*args)

        return says_and_runs

    return backend


class _Stays(Held):
    """A saved tensor that stays on the device: unpacking it triggers the fetch of earlier offloaded ones."""

    __slots__ = ()

    def open(self) -> Tensor:
        self[0].asked()
        return super().open()


class PlaceHooks(OffloadHooks):
    """Offload hooks of one call of a compiled block. ``policy`` decides what is offloaded; None: nothing."""

    group: Group

    def __init__(self, lives: Iterable[Tensor], group: Group, policy: CheckpointPolicy | None) -> None:
        super().__init__(lives, group, smallest_bytes=1)
        self.policy = policy
        self.places: tuple[int | None, ...] = ()
        self.moved: frozenset[int] = frozenset()
        self.place = 0

    def split(self, found: Split) -> None:
        """Note the partition that is about to run."""
        self.place, self.places = 0, found.saved
        self.moved = frozenset() if self.policy is None else offloaded_by(self.policy, found.program)

    @of_a_region
    def pack(self, tensor: Tensor) -> Any:
        place, self.place = self.place, self.place + 1
        b = self.places[place] if place < len(self.places) else None
        if b is None or b not in self.moved:
            return _Stays(tensor, self.group)
        return self.sent(tensor)

    def range_of(self, part: Tensor, reach_bytes: int) -> tuple[int, int]:
        """See NOTE [ Whole storages ]."""
        size = part.element_size()
        whole = part.untyped_storage().nbytes() // size * size
        return (0, whole) if whole < 2 * reach_bytes else super().range_of(part, reach_bytes)


def kept_buffers() -> contextlib.AbstractContextManager[None]:
    """Pass saved tensors through hooks, as if some might be offloaded, and keep all."""
    return torch.autograd.graph.saved_tensors_hooks(Held, opened)


class Looked:
    """Tensors that one call of a compiled block saved."""

    def __init__(self) -> None:
        self.places: tuple[int | None, ...] = ()
        self.tensors: list[Tensor] = []

    def split(self, found: Split) -> None:
        self.places = found.saved
        self.tensors.clear()

    @of_a_region
    def pack(self, tensor: Tensor) -> Tensor:
        self.tensors.append(tensor)
        return tensor

    def alone(self, alive: Iterable[Any], given: Sequence[Any], returned: Sequence[Any]) -> dict[int, OffloadedTensor]:
        """By buffer, in the order of places, saved tensors that own their storage and are only alive as such.
        ``alive``: parameters, and other tensors that stay allocated anyway; ``given``, ``returned``: leaves of the
        arguments and the results.
        """
        storages: dict[int, dict[int, Tensor]] = {}  # by buffer
        owners: dict[int, set[int | None]] = {}
        for place, tensor in enumerate(self.tensors):
            b, storage = self.places[place] if place < len(self.places) else None, storage_of(tensor)
            owners.setdefault(storage, set()).add(b)
            if b is not None:
                storages.setdefault(b, {})[storage] = tensor
        living = {storage_of(t) for t in alive if isinstance(t, Tensor)}
        found = {}
        for b, seen in storages.items():
            (storage, tensor), *more = seen.items()
            nbytes = tensor.untyped_storage().nbytes()
            if not more and owners[storage] == {b} and storage not in living and nbytes:
                place_of = _place(storage, given, is_result=False) or _place(storage, returned, is_result=True)
                found[b] = OffloadedTensor(nbytes=nbytes, place=place_of)
        return found


def _place(storage: int, leaves: Sequence[Any], *, is_result: bool) -> tuple[bool, int] | None:
    at = (i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and storage_of(leaf) == storage)
    return next(((is_result, i) for i in at), None)


@contextlib.contextmanager
def looking() -> Iterator[Looked]:
    """Record the tensors that a compiled block saves in its one call within the context."""
    found = Looked()
    with listening(found.split), torch.autograd.graph.saved_tensors_hooks(found.pack, lambda tensor: tensor):
        yield found


def run_sending(region: PlannedForward, run: Runs, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one call, and offload the tensors that the policy names. Without any, it takes its turn all the same."""
    group = region.begin_group(moves=True)
    assert group is not None
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    lives = [*region.module.parameters(), *region.module.buffers(), *(leaf for leaf in given if leaf.is_leaf)]
    hooks = PlaceHooks(lives, group, None if region.stays() else region.plan.policy)
    try:
        with listening(hooks.split), torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
            return run(*args, **kwargs)
    finally:
        hooks.close()
        group.end()
