"""A custom training step on fake tensors: a function of the models and a batch, with any forwards and backwards.

It runs once to observe how it calls its models (`observe`), and then under each candidate plan (`UserStep`), always on
fake copies. Python state that it changes (a scaler's factors, lists of losses) is restored.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim.optimizer import register_optimizer_step_pre_hook

from jettison.capture.dispatch import tracing
from jettison.capture.fake_copies import roughly
from jettison.capture.fsdp2 import sharded_modules
from jettison.capture.isolation import leaving_nothing
from jettison.capture.model_trace import ModelTrace
from jettison.capture.pytrees import tree_leaves, tree_map
from jettison.capture.signature import as_signed, call_signature, global_signature, opaque_copy
from jettison.capture.tensor_subclasses import plain
from jettison.core.errors import JettisonError, TraceError, UnsupportedModule, UsageError
from jettison.core.objects import swapped
from jettison.dryrun.block_levels import with_memory_of_their_own
from jettison.dryrun.counter import AllocationCounter, quiet_gc, static_tensors
from jettison.dryrun.kernel_trial import OpRequest
from jettison.dryrun.op_costs import MeasuredWorkspace
from jettison.dryrun.step import each_of
from jettison.parallel.fake_ranks import FakeDDP, inside_of_ddp
from jettison.runtime.callers import FOREIGN_HOOKS, are_hooks_foreign, is_transforming
from jettison.runtime.graph_fingerprint import next_sequence_number, nodes_behind
from jettison.runtime.loop_assumptions import RETAINED, backward_kinds, is_uniform

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineSchedule

Scheduled: TypeAlias = "_PipelineSchedule"
"""Any schedule of `torch.distributed.pipelining`."""
Step = Callable[..., Any]
"""``step(model, batch)``, or ``step(*models, batch)``: forwards and backwards of one training step."""
Copies: TypeAlias = Sequence[Any]
"""Stand-ins for the models of a step, modules, and for schedules of a pipeline: `FakeSchedule`."""
_TRANSFORMED: Final = "in torch.func's transforms (grad, vmap, jvp) or under forward-mode AD"

# schedules of torch.distributed.pipelining, recognized without importing it, which takes a second


def is_schedule(thing: Any) -> bool:
    """Whether an object is a schedule of torch's."""
    schedules = sys.modules.get("torch.distributed.pipelining.schedules")
    return schedules is not None and isinstance(thing, schedules._PipelineSchedule)


def stages_of(schedule: Scheduled) -> list[PipelineStage]:
    """Return a rank's stages in model order. Raise `UnsupportedModule` if one is no `PipelineStage`."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle

    single = isinstance(schedule, PipelineScheduleSingle)
    found: Any = [schedule._stage] if single else getattr(schedule, "_stages", [])
    for stage in found:
        if not isinstance(stage, PipelineStage):
            raise UnsupportedModule(
                f"got a {type(stage).__name__} in {type(schedule).__name__}; expected stages that are made as "
                "torch.distributed.pipelining.PipelineStage(module, index, count, device)"
            )
    return list(found)


def modules_of(things: Sequence[Any]) -> list[nn.Module]:
    """Return the modules of a step: its models, and the stages of its schedules."""
    found: list[nn.Module] = []
    for one in things:
        of_schedule = [stage.submod for stage in stages_of(one)] if is_schedule(one) else getattr(one, "modules", [])
        found += [one] if isinstance(one, nn.Module) else of_schedule
    return found


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


# how a step calls its models ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ModelCall:
    """A call of a model with gradients. Arguments computed from the batch alone are real, others are fake."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    switches: tuple[Any, ...]  # see `global_signature`

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(plain(t).nbytes for t in _tensors((self.args, self.kwargs)))

    @property
    def uniform(self) -> tuple[bool, ...]:
        """For each integer or Boolean tensor, whether all of its values are known to be equal."""
        found = (plain(t) for t in _tensors((self.args, self.kwargs)) if not t.is_floating_point())
        return tuple(map(is_uniform, found))


@dataclass(kw_only=True)
class ModelUse:
    """Calls of one model in a step."""

    calls: list[ModelCall] = field(default_factory=list)
    in_flight: int = 0  # most calls at a time with saved tensors: before a backward, or after one that retains them
    adds_up: bool = False  # a forward begins when gradients of an earlier one are there
    backwards: set[str] = field(default_factory=set)  # see `backward_kinds`
    gradients: dict[nn.Parameter, Tensor] = field(default_factory=dict)  # fake: as an optimizer steps or the step ends
    unplanned: set[str] = field(default_factory=set)  # where it also runs, but without a plan

    @property
    def kinds(self) -> list[ModelCall]:
        """One call for each kind of arguments and padding; the one with the most bytes comes first."""
        found: dict[Any, ModelCall] = {}
        for call in sorted(self.calls, key=lambda call: -call.nbytes):
            found.setdefault((call_signature(call.args, call.kwargs)[1], call.switches, call.uniform), call)
        return list(found.values())


@dataclass(frozen=True, kw_only=True)
class ObservedStep:
    """Observations of a step."""

    uses: list[ModelUse]  # of each module
    inside: frozenset[int] = frozenset()  # numbers of the loop's optimizers that the step itself runs
    left: frozenset[nn.Parameter] = frozenset()  # that had gradients when it was over


@dataclass(kw_only=True)
class Counted:
    """Allocations of a step's run on fake tensors."""

    levels: list[tuple[str, list[int]]] = field(default_factory=list)  # without workspaces of kernels
    ops: dict[str, OpRequest] = field(default_factory=dict)  # whose kernels may have some, by the keys of their prices


def observe(
    step: Step,
    copies: Copies,
    batches: Sequence[Any],
    mode: FakeTensorMode,
    optimizer: torch.optim.Optimizer | None = None,
    copied: torch.optim.Optimizer | None = None,
    counted: Counted | None = None,
    real: Sequence[nn.Module] = (),
) -> ObservedStep:
    """Run a step on fake copies, once for each batch, and record how it calls each module. No real tensor is computed
    with, and all state is restored. Raise `UsageError` if no model is called with gradients, or no backward runs.

    Args:
        optimizer, copied: the loop's, and its copy over fake parameters.
        counted: records what the step allocates.
        real: the copied modules, which the step's code may also reference (a closure, ``self.model``).
    """
    modules = modules_of(copies)
    uses = [ModelUse() for _ in modules]
    inside: set[int] = set()
    left: set[nn.Parameter] = set()

    def note() -> set[nn.Parameter]:
        for use, module in zip(uses, modules, strict=True):
            use.gradients |= {p: p.grad for p in module.parameters() if p.grad is not None}
        return {p for module in modules for p in module.parameters() if p.grad is not None}

    def stepped(number: int) -> None:
        inside.add(number)
        note()

    for batch in batches:
        watchers = [_Watcher(use) for use in uses]
        hooks = contextlib.ExitStack()
        for watcher, inner in zip(watchers, map(inside_of_ddp, modules), strict=True):
            hooks.callback(inner.register_forward_pre_hook(watcher.before, with_kwargs=True).remove)
            hooks.callback(inner.register_forward_hook(watcher.after).remove)
        try:
            with (
                hooks,
                standing_in(optimizer, copied),
                _on_fakes(step, modules, batch, mode, real),
                noting_steps(optimizer, stepped),
                _counting(counted),
            ):
                step(*copies, opaque_copy(batch))
            left |= note()
        except (JettisonError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # of the user's code
            if any(FOREIGN_HOOKS in use.unplanned for use in uses):  # allow_mutation_on_saved_tensors needs addresses
                raise _without_a_plan(uses) from error
            raise TraceError(
                f"step= failed on tensors without values ({type(error).__name__}: {error}). If it runs by itself: what "
                "reads a tensor's memory (torch.save, pickle, its storage) belongs after it, on what it returns"
            ) from error
        finally:
            for module in modules:
                module.zero_grad(set_to_none=True)
        if not any(watcher.calls for watcher in watchers):
            if any(use.unplanned for use in uses):
                raise _without_a_plan(uses)
            raise UsageError(
                "step= never ran the model's own forward with gradients; expected step(model, batch) to call "
                "model(...). Planning runs it on a copy without memory, also where its code holds the model (a "
                "closure, self.model); it sees no call of other methods alone (model.encode), nor of a model that a "
                "functools.partial holds"
            )
        if all(len(watcher.unasked) == watcher.calls for watcher in watchers):
            raise UsageError("step= ran no backward of the model's output; expected forwards and backwards of one step")
    return ObservedStep(uses=uses, inside=frozenset(inside), left=frozenset(left))


@contextlib.contextmanager
def _counting(counted: Counted | None) -> Iterator[None]:
    """Count allocations within the context."""
    if counted is None:
        yield
        return
    ops = MeasuredWorkspace({})

    def notes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        ops(func, args, kwargs)
        return 0

    with quiet_gc(), AllocationCounter(record_levels=True, workspace=notes) as counter:
        counter.phase("step", first=True)
        yield
        counted.levels += counter.phase_levels
        counted.ops |= ops.unknown


class _Watcher:
    """Hooks before and after a model's forward, for one run of a step: its calls with gradients, and which of them wait
    for a backward. A frozen model's call has none, unless an argument requires them.

    A call's saved tensors are freed by the first backward that does not retain the graph, or with the last node of its
    graph (a double backward keeps some of them): all of them have the call's mark.
    """

    def __init__(self, use: ModelUse) -> None:
        self.use = use
        self.calls = 0
        self.running: list[tuple[int, int] | None] = []  # with the number of the call's first node; None: no gradients
        self.unasked: set[int] = set()  # calls that no backward has come to
        self.held: dict[int, weakref.ref[_GraphMark]] = {}  # calls whose saved tensors may be there

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        use, given = self.use, (*module.parameters(), *_tensors((args, kwargs)))
        self.running.append(None)
        reason = _TRANSFORMED if is_transforming() else FOREIGN_HOOKS if are_hooks_foreign() else ""
        if reason:  # it runs without a plan, and what it keeps is counted as it comes
            use.unplanned.add(reason)
        elif torch.is_grad_enabled() and any(t.requires_grad for t in given):
            call, self.calls = self.calls, self.calls + 1
            self.running[-1] = call, next_sequence_number()
            args, kwargs = tree_map(_apart, opaque_copy((args, kwargs)))
            use.adds_up = use.adds_up or len(self.unasked) < call
            use.calls.append(ModelCall(args=args, kwargs=kwargs, switches=global_signature()))
            self.unasked.add(call)
            use.in_flight = max(use.in_flight, 1 + sum(mark() is not None for mark in self.held.values()))

    def after(self, module: nn.Module, _args: Any, output: Any) -> None:
        if (running := self.running.pop()) is None:
            return
        call, start = running
        trained = [p for p in module.parameters() if p.requires_grad]
        made = [leaf for leaf in _tensors(output) if leaf.requires_grad]
        for leaf in made:
            leaf.register_hook(lambda _gradient: self.asked(call, trained[:1] + trained[-1:]))
        self.held[call] = _marked(made, start)

    def asked(self, call: int, ends: Sequence[Tensor]) -> None:
        """Note that a backward has reached a call."""
        self.unasked.discard(call)
        kinds = backward_kinds(ends)
        self.use.backwards |= kinds
        if RETAINED not in kinds:
            self.held.pop(call, None)


def _without_a_plan(uses: Iterable[ModelUse]) -> UsageError:
    where = " and ".join(sorted({reason for use in uses for reason in use.unplanned}))
    return UsageError(
        f"step= runs its model only {where}: there it runs without a plan. Call it elsewhere and take gradients by "
        "backward(), or train without a plan"
    )


class _GraphMark:
    """Object that lives as long as a node with it in its metadata."""


def _marked(outputs: Iterable[Tensor], start: int) -> weakref.ref[_GraphMark]:
    """Add a mark to all graph nodes of some tensors, from this sequence number on."""
    mark = _GraphMark()
    for node in nodes_behind(outputs, start):
        if node.next_functions:
            node.metadata[_GraphMark] = mark
    return weakref.ref(mark)


def _apart(leaf: Any) -> Any:
    """Detach a fake argument from its graph."""
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, FakeTensor) else leaf


def _parts(real: Sequence[nn.Module], copies: Sequence[nn.Module]) -> Iterator[tuple[Any, Any]]:
    """Modules, parameters and buffers, each with its copy."""
    for one, copied in zip(real, copies, strict=False):
        for kind in ("named_modules", "named_parameters", "named_buffers"):
            known = dict(getattr(copied, kind)(remove_duplicate=False))
            found = getattr(one, kind)(remove_duplicate=False)
            yield from ((part, known[name]) for name, part in found if name in known)


@contextlib.contextmanager
def _on_fakes(
    step: Step, modules: Sequence[nn.Module], batch: Any, mode: FakeTensorMode, real: Sequence[nn.Module]
) -> Iterator[None]:
    """Context of a step's runs: values that its code reads (``loss.item()``) are fake; warnings are suppressed."""
    own: Any = FakeTensor.__format__
    with (
        warnings.catch_warnings(action="ignore"),
        swapped(FakeTensor, __format__=lambda fake, how: format(1.0, how) if fake.dim() == 0 else own(fake, how)),
        leaving_nothing(modules, [step, *tree_leaves(batch)], _parts(real, modules)),
        tracing(mode, values_known=True),
        torch.enable_grad(),
        roughly(modules[0]),
    ):
        try:
            yield
        finally:
            for module in (inner for one in modules for inner in sharded_modules(one)):
                module.reshard()  # a frozen model's root stays whole, and what its modules hold is put back to parts


class UserStep:
    """The user's step as a `DryStep`. Of several batches each runs a step, and the largest figures count.

    Args:
        copies: of the step's models, in the order in which it takes them.
        planned: which of their modules run under plans, by number.
        batches: the largest last.
        gradients: those that the observed step leaves at parameters (`ModelUse`).
        gradients_preallocated: parameters have gradients when the step begins.
        optimizer, copied: the loop's, and its copy over the fake parameters.
        seen: the optimizers that the step runs itself. Such a step begins with the gradients of the previous one.
        real: see `observe`.
    """

    def __init__(
        self,
        step: Step,
        copies: Copies,
        planned: Sequence[int],
        batches: Sequence[Any],
        mode: FakeTensorMode,
        *,
        gradients: Mapping[nn.Parameter, Tensor],
        gradients_preallocated: bool = False,
        optimizer: torch.optim.Optimizer | None = None,
        copied: torch.optim.Optimizer | None = None,
        seen: ObservedStep | None = None,
        real: Sequence[nn.Module] = (),
    ) -> None:
        self.step, self.batches, self.mode, self.gradients_preallocated = step, batches, mode, gradients_preallocated
        self.gradients, self._own = gradients, with_memory_of_their_own(gradients)
        self.copies, self.all, self.real = copies, modules_of(copies), real
        self.modules: Sequence[nn.Module] = [inside_of_ddp(self.all[number]) for number in planned]
        self.loops_own, self.optimizer = optimizer, copied
        self.inside = frozenset() if seen is None else seen.inside
        self.left = seen.left if seen is not None and seen.inside else None
        self.switches = global_signature()

    def alive(self) -> Iterable[Tensor]:
        """Parameters, buffers, gradients, the optimizer's state, and the largest batch."""
        self._hold_gradients()
        found = [t for model in self.all for t in static_tensors(model, (), self.optimizer)]
        found += [t for one in self.copies if not isinstance(one, nn.Module) for t in one.held()]
        found += [t for one in self.all if isinstance(one, FakeDDP) for t in one.unused.values()]
        return [*found, *_tensors(self.batches[-1])]

    @contextlib.contextmanager
    def context(self, trace: ModelTrace) -> Iterator[None]:
        """Context with the global switches of planning's start, so that the step's own autocast empties its cache."""
        with (
            as_signed(self.switches),
            _on_fakes(self.step, self.all, self.batches, trace.mode, self.real),
            standing_in(self.loops_own, self.optimizer),
        ):
            yield

    @property
    def last(self) -> Sequence[torch.optim.Optimizer]:
        return [one for number, one in enumerate(each_of(self.optimizer)) if number not in self.inside]

    def leave_gradients(self, counter: AllocationCounter) -> None:
        for parameter, gradient in self.gradients.items():
            parameter.grad = gradient

    def passes(self, counter: AllocationCounter) -> tuple[int, int, Any]:
        """Run the step. Forwards and backwards alternate, so both peaks are those of the whole step."""
        largest = _tensors(self.batches[-1])
        counter.forget(largest)
        counter.reset_peak()
        for batch in self.batches[:-1]:  # each is there for its own step only
            with counter.not_counting():
                given = copy.deepcopy(batch)
            self.step(*self.copies, given)
            counter.forget(_tensors(given))
            for model in self.all:
                model.zero_grad(set_to_none=not self.gradients_preallocated)
        counter.register(largest)
        counter.phase("forward and backward", first=True)
        result = self.step(*self.copies, opaque_copy(self.batches[-1]))
        torch.clear_autocast_cache()
        return counter.peak_bytes, counter.peak_bytes, result

    def _hold_gradients(self) -> None:
        if self.left is None and not self.gradients_preallocated:
            return
        for owner, parameter in ((one, p) for one in self.all for p in one.parameters() if p.requires_grad):
            if self.left is not None and parameter not in self.left:
                continue
            held = self._own[parameter] if parameter in self._own else torch.empty_like(parameter)
            if isinstance(owner, FakeDDP) and owner.views and parameter not in self.gradients:
                owner.unused[parameter] = held
            else:
                parameter.grad = held


# optimizers that the step steps itself, as a GAN does between its half-steps: it reaches the loop's optimizers by a
# closure or an attribute ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def standing_in(optimizer: torch.optim.Optimizer | None, copied: torch.optim.Optimizer | None) -> Iterator[None]:
    """Context in which the loop's optimizers step fake parameters."""
    pairs = list(zip(each_of(optimizer), each_of(copied), strict=True))
    own = [dict(vars(real)) for real, _ in pairs]
    for real, fake in pairs:
        vars(real).update(vars(fake))
    try:
        yield
    finally:
        for (real, fake), before in zip(pairs, own, strict=True):
            vars(fake).update({name: vars(real)[name] for name in vars(fake) if name in vars(real)})
            vars(real).clear()
            vars(real).update(before)


@contextlib.contextmanager
def noting_steps(optimizer: torch.optim.Optimizer | None, stepped: Callable[[int], None]) -> Iterator[None]:
    """Call ``stepped`` with each optimizer's number before its step. `UsageError` for one unknown to the plan."""
    numbers = {id(one): number for number, one in enumerate(each_of(optimizer))}

    def steps(one: torch.optim.Optimizer, *_: Any) -> None:
        if id(one) not in numbers:
            raise UsageError(
                f"step= runs the step of a {type(one).__name__} that optimizer= does not have; give it all that the "
                "step uses, made before planning: optimizer=(first, second)"
            )
        stepped(numbers[id(one)])

    def frees(one: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        if id(one) not in numbers:
            raise UsageError(
                f"step= calls zero_grad() of a {type(one).__name__} that optimizer= does not have, and which has the "
                "real model's parameters; give it as optimizer=, or call model.zero_grad()"
            )
        own(one, *args, **kwargs)

    own = torch.optim.Optimizer.zero_grad
    with swapped(torch.optim.Optimizer, zero_grad=frees), contextlib.ExitStack() as stack:
        stack.callback(register_optimizer_step_pre_hook(steps).remove)
        yield
