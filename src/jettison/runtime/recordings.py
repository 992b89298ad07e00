"""Recordings of one region: by signature a recipe, or the reason why there is none; and whether they still hold.

NOTE [ Settings that do not matter ]
A changed setting (a number, a submodule, a closure) puts every recording of its region in doubt. Each is recorded again
when it is needed. If the new program equals the old one, the changed settings are ignored from then on: only when they
change is a run compared with the recording, call by call.

NOTE [ Settings that come back ]
If the programs do differ, as under one adapter and another (PEFT's `set_adapter`), the settings often return, and a
recording takes far longer than a step. So recordings are put aside when their settings change, and reused once all
settings are back; but not if that would keep modules alive which the model no longer has. When a run or a tensor shows
that a recording is wrong, all that were put aside are dropped.

NOTE [ Interrupts ]
A recording runs the user's Python before the real run. If that raises a `KeyboardInterrupt` or another `BaseException`,
the real run has drawn no random numbers yet, and without a plan it would have. So the real run follows without a
recording; it raises the exception itself, or the pending one is raised after it. Ctrl-C is late by one call.
"""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map

from jettison.capture.fsdp2 import precision_of
from jettison.capture.module_guards import ModuleGuard, Setting, same_values
from jettison.capture.reachable_state import Known
from jettison.capture.recorder import Place, RecordedOp, RegionTrace, TensorRef, ValueRead
from jettison.capture.tensor_subclasses import is_stepped_in_backward, plain, stepped_in_backward, version_of, wrapping
from jettison.capture.tracer import VALUES_WANTED, trace_region, trace_root
from jettison.core.errors import RecordingLeft, TraceError, UnsupportedModule
from jettison.ledger.program import Program
from jettison.runtime.cuda_graphs import refuse_capture
from jettison.runtime.graph_fingerprint import Print
from jettison.runtime.offload import Group
from jettison.runtime.recipe import Recipe, shared_recipe
from jettison.runtime.saved_handles import Handle
from jettison.runtime.views import view_of, whole_copy, within
from jettison.runtime.witness import Check, Rounded
from jettison.solve.checkpoint_policy import CheckpointPolicy, Offload, offloaded_by, packed_by

GIVE_UP_AFTER = 8  # runs of one signature that differed from their recording, before it is no longer recorded
WRITTEN_LATER = "others write to its arguments or results before backward"
STALE_CASTS = (
    "its forward gets casts of weights out of autocast's cache that are older than the weights, since the loop steps "
    "its optimizer without leaving autocast; torch trains so, on gradients of the older weights"
)
MOST_VARIANTS = 4  # recordings of one signature, by the values that its forward reads
MOST_PREPARED = 256  # signatures of one region that are known at a time
MOST_ASIDE = 4  # inactive settings whose recordings are put aside


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Result of a trial: whether the forward may be rerun in backward, and if not, why."""

    rerun: bool
    why: str = ""
    written: tuple[tuple[int, str], ...] = ()  # buffers that the forward writes to: (number of the module, name)
    unwritten: frozenset[int] = frozenset()  # numbers of saved tensors that no kernel writes
    interrupt: BaseException | None = None  # raised by the trial; the real run comes first
    known: Known = field(default_factory=dict)  # large containers that it reaches


@dataclass(kw_only=True)
class Prepared:
    """Recipe of one signature. ``recipe`` is None if the region could not be recorded."""

    recipe: Recipe | None
    problem: str = ""
    checked: bool = False
    calls: int = 0
    settings: frozenset[Any] = frozenset()  # ignored ones, as of the last checked run
    verdict: Verdict | None = None  # without a recipe: whether its Python may be recomputed
    told: bool = False  # the user was told that there is no recipe
    graph: Print | None = None  # of the first run, which was checked call by call


def _uncounted() -> contextlib.ExitStack:
    """Hide a recording from counters of the running step's bytes."""
    stack = contextlib.ExitStack()
    for mode in _get_current_dispatch_mode_stack():
        if hasattr(mode, "not_counting"):
            stack.enter_context(mode.not_counting())
    return stack


class PlannedRegion(Protocol):
    """A `PlannedForward`, as its recordings, the frames of its calls and reruns of its Python see it."""

    module: nn.Module
    model: nn.Module
    name: str
    calls: int
    how: Check
    rounded: Rounded
    is_root: bool
    forward: Callable[..., Any]
    plan: RegionPlan
    recordings: Recordings
    frames: weakref.WeakSet[Any]

    def own(self) -> Callable[..., Any]: ...
    def stays(self) -> bool: ...
    def begin_group(self, *, moves: bool) -> Group | None: ...
    def refuse_fake(self, does: str, leaves: Sequence[Any] = ()) -> None: ...
    def has_assumptions(self) -> bool: ...
    def forgotten(self, names: str) -> None: ...
    def warn_changed(self) -> None: ...
    def warn_once(self, key: str, text: str) -> None: ...


def owners_of(module: nn.Module) -> dict[str, tuple[dict[str, Any], str]]:
    """Table and name of each parameter and buffer of a module, to look up its current tensor when it is used."""
    return {
        f"{path}.{leaf}" if path else leaf: (table, leaf)
        for path, sub in module.named_modules()
        for table in (sub._parameters, sub._buffers)
        for leaf in table
    }


def _variants(key: Any) -> Iterator[Any]:
    """Keys of the recordings of one signature."""
    return (key if number == 0 else (*key, number) for number in range(MOST_VARIANTS))


class Recordings:
    """Recordings of a `PlannedForward`, on a fake copy of its module if ``fake_model``; ``blocks``: of a root."""

    def __init__(self, region: PlannedRegion, *, blocks: tuple[str, ...] | None, fake_model: bool) -> None:
        self.region, self.module, self.blocks, self.fake_model = region, region.module, blocks, fake_model
        self.take_plan(0, region.plan)
        self.count = 0
        self.prepared: dict[tuple[int, Any], Prepared] = {}  # by plan and signature
        self.owners = owners_of(region.module)
        self.guard: ModuleGuard | None = None
        self.fell_back = False  # some call has no program
        self.never = ""  # reason why no call is recorded
        self.differs = ""  # reason why its Python may not be recomputed: a second run differed from the first
        self.shared: frozenset[int] = frozenset()  # leaf positions of arguments that are alive anyway
        self.late: frozenset[Place] = frozenset()  # arguments that are written to before backward
        self.casts: dict[str, tuple[Any, int | None]] = {}  # of parameters, by autocast: see `note_cast`
        self.written: set[str] = set()  # parameters and buffers that were written to between forward and backward
        self.late_inside: dict[str, frozenset[int]] = {}  # as `late`, for its saved tensors, by the program's form
        self._planned: dict[int, list[Program]] = {}  # by plan
        self._precision: tuple[Any, ...] = ()  # FSDP's casts at recording time
        self._suspects: frozenset[Setting] = frozenset()
        self._ignored: frozenset[Setting] = frozenset()
        self._everything: ModuleGuard | None = None  # with ignored settings
        self._aside: list[tuple[ModuleGuard, dict[tuple[int, Any], Prepared]]] = []  # the latest last
        self._outdated: dict[Any, Program] = {}
        self._distrusted: dict[Any, str] = {}  # signatures with a tensor that was once recomputed wrongly
        self._divergences: dict[Any, int] = {}
        self._varies: set[Any] = set()  # signatures whose ops depend on values, see `variant`
        self._last_values: Any = None

    def take_plan(self, number: int, plan: RegionPlan) -> None:
        """Use this plan for calls from now on. Recordings under other plans are kept for their return."""
        self.number, self.plan = number, plan

    # known before a run ----------------------------------------------------------------------------------------------

    def adopt(self, key: Any, trace: RegionTrace, *, checked: bool = False) -> None:
        """Take a program that was recorded elsewhere (``checked``: on these tensors), unless it has a problem."""
        if trace.problem:
            self.give_up(key, trace.problem)
            return
        if self.region.calls:  # what is known may be of other settings than this recording, such as another adapter
            self.look(in_dry_run=False)
        self.guard = self.guard or ModuleGuard(self.module)
        self._precision = precision_of(self.module)
        self.late |= trace.late
        if trace.late_inside:
            self.late_inside[trace.form] = trace.late_inside
        self.shared |= {p for b, p in trace.inputs.items() if trace.program.buffers[b].free}
        self._planned.setdefault(self.number, []).append(trace.program)
        for one in _variants(key) if trace.reads else (key,):
            known = self.prepared.get((self.number, one))
            if known is None or known.recipe is None or known.recipe.trace.program.form() == trace.program.form():
                break
        if one is not key:
            self._varies.add(key)
        self._store(one, trace).checked = checked

    def give_up(self, key: Any, problem: str, verdict: Verdict | None = None, *, told: bool = True) -> Prepared:
        """Note that calls of this signature have no program."""
        self.guard = self.guard or ModuleGuard(self.module)
        self.fell_back = True
        known = Prepared(recipe=None, problem=problem, checked=True, verdict=verdict, told=told)
        self.prepared[self.number, key] = known
        return known

    def most_used(self) -> Prepared | None:
        """The recipe of the signature that was called most."""
        return max(self.prepared.values(), key=lambda p: p.calls, default=None)

    def moves_without_recipe(self) -> bool:
        """Whether saved tensors of calls without a recipe are offloaded as they are saved."""
        known = [p for (number, _), p in self.prepared.items() if number == self.number]
        return isinstance(self.plan.policy, Offload) and any(p.recipe is None for p in known)

    # a call ----------------------------------------------------------------------------------------------------------

    def look(self, *, in_dry_run: bool) -> None:
        """Check whether settings have changed. In a dry run none has: the copy that runs is the recorded one."""
        if self.guard is None or not (in_dry_run or self.guard.holds()):
            before, known = self.guard, dict(self.prepared)
            self._aside = [one for one in self._aside if one[0].may_be_kept()]
            if not self._know_again():
                self.forget()
            if before is not None and known and before.may_be_kept():
                self._aside = [*self._aside, (before, known)][-MOST_ASIDE:]

    def _know_again(self) -> bool:
        """Reuse recordings that were put aside, if their settings hold again. See NOTE [ Settings that come back ]."""
        found = next((known for known in reversed(self._aside) if known[0].holds()), None)
        if found is None:
            return False
        self._aside = [known for known in self._aside if known is not found]
        self.region.forgotten("")
        self.guard, prepared = found
        self.prepared = {key: known for key, known in prepared.items() if key[1] not in self._distrusted}
        self.owners = owners_of(self.module)
        self._suspects, self._outdated = frozenset(), {}
        return True

    def variant(self, key: Any, leaves: list[Any]) -> Any:
        """The signature of a call, numbered if values decide what it runs (transformers drops a mask of ones)."""
        if not self._varies or key not in self._varies:  # hashing a signature takes as long as making it
            return key
        for one in _variants(key):
            known = self.prepared.get((self.number, one))
            if known is None or known.recipe is None or reads_hold(known.recipe.trace, leaves):
                break
        return one  # other values follow the last, which is compared with them

    def of(self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any], own: Callable[..., Any]) -> Prepared:
        """Recipe for a call of this signature; the forward ``own`` is recorded now if there is none.
        Raises `UnsupportedModule` if recording has changed state that cannot be restored.
        """
        prepared = self.prepared.get((self.number, key))
        if prepared is not None and not prepared.checked and precision_of(self.module) != self._precision:
            self.forget()  # FSDP was applied after the recording, with casts of its own
            prepared = None
        if prepared is not None and prepared.recipe is not None and prepared.recipe.trace.detached:
            tables = [self.owners[name] for name in prepared.recipe.trace.detached.values()]
            if any(is_stepped_in_backward(table[leaf]) for table, leaf in tables):
                self.forget()  # a parameter that is read without its graph has gained hooks
                prepared = None
        return prepared or self._prepare(key, args, kwargs, own)

    def must_check(self, prepared: Prepared, recipe: Recipe, leaves: list[Any]) -> frozenset[Any] | None:
        """Ignored settings that have changed since the last checked run; None if no check is needed. An ignored setting
        may come to matter (a counter that reaches a threshold), and so may a number that is read out of a tensor: such
        runs are compared with the recording, call by call.
        """
        settings = self._everything.changed() if self._everything is not None else frozenset()
        if not prepared.checked or settings != prepared.settings or self._moves(settings):
            return settings
        return None if reads_hold(recipe.trace, leaves) else settings

    def _moves(self, settings: frozenset[Any]) -> bool:
        """Whether a setting that is known to change has another value than at the last check."""
        if not settings or self._everything is None:
            return False
        values, before = self._everything.values(settings), self._last_values
        self._last_values = values
        return before is None or not same_values(values, before)

    # what does not hold ----------------------------------------------------------------------------------------------

    def start_over(self) -> None:
        self.prepared.clear()
        self._aside.clear()
        self._outdated = {}
        self._planned = {}
        self.guard = None

    def unguard(self) -> None:
        """Drop the guard, which keeps objects alive, when nothing checks the recordings. A later check records anew."""
        if self.guard is not None:
            self.guard = None
            self._aside.clear()

    def forget(self) -> None:
        """Distrust recordings after settings have changed. See NOTE [ Settings that do not matter ]."""
        names = "" if self.guard is None else self.guard.structure_words()
        if names:  # then a warning was given already
            self._planned = {}
        self.region.forgotten(names)
        if self.guard is not None:
            self._suspects = self.guard.changed()
            self._outdated = {k: p.recipe.trace.program for k, p in self.prepared.items() if p.recipe is not None}
            self.prepared.clear()
        self.owners = owners_of(self.module)
        self.guard = ModuleGuard(self.module, self._ignored)

    def diverged(self, prepared: Prepared, key: Any, why: str, leaves: list[Any] | None = None) -> None:
        """Handle a run that differed from its recording without loss: record again, or a `variant`, or never again."""
        self._aside.clear()
        varies, recipe = key[:2] in self._varies, prepared.recipe
        if recipe and leaves and not varies and reads_hold(recipe.trace, leaves) is False:
            self._varies.add(key[:2])
            self.region.warn_changed()  # this run keeps what follows the first other op
            return
        times = self._divergences[key] = self._divergences.get(key, 0) + 1
        if times > GIVE_UP_AFTER or (self.count and not prepared.checked):  # without a count, it was recorded elsewhere
            self.lose(key, why)
        elif varies:  # other values keep their recordings
            self.prepared.pop((self.number, key), None)
        else:
            self.forget()

    def wrong(self, recipe: Recipe, why: str, *, looked: bool) -> str:
        """Handle a tensor that was recomputed wrongly, and describe the treatment of further calls: a signature with
        such a past, or whose graph was the recorded one, is not trusted again; others count as runs with another graph.
        """
        self._aside.clear()
        for key, prepared in [(key, p) for (_, key), p in self.prepared.items() if p.recipe is recipe][:1]:
            if looked:
                self.distrust(recipe, why)
            else:
                self.diverged(prepared, key, why)
            if key in self._distrusted:
                return "runs without a recording"
        return "has a new recording"

    def lose(self, key: Any, why: str) -> None:
        """Stop using a program for calls of this signature."""
        self._distrusted[key] = why
        self.prepared.pop((self.number, key), None)

    def note_cast(self, name: str, tensor: Tensor) -> None:
        """Note that autocast caches a cast of this parameter until the loop leaves autocast, whatever is written."""
        table, leaf = self.owners[name]
        self.casts[name] = weakref.ref(plain(tensor).untyped_storage()), version_of(table[leaf])

    def has_stale_casts(self) -> bool:
        """Whether this forward gets casts of parameters that were written to since."""
        casts = ((*self.owners[name], *cast) for name, cast in self.casts.items())
        return any(storage() is not None and version_of(table[leaf]) != v for table, leaf, storage, v in casts)

    def moves(self, names: Set[str], *, places: Set[Place] = frozenset()) -> None:
        """Keep, from now on, all results of parameters, buffers and arguments that were written to too early."""
        if names - self.written or places - self.late:
            self.written |= names
            self.late |= places
            self._aside.clear()
            self.forget()

    def leave(self, key: Any, why: str) -> Prepared:
        """Stop using a program for calls of this signature, this one included."""
        self._distrusted[key] = why
        return self.give_up(key, why, told=False)

    def distrust(self, recipe: Recipe, problem: str) -> None:
        """Stop using a program for calls like the one whose tensor was recomputed wrongly."""
        for (number, key), prepared in self.prepared.items():
            if prepared.recipe is recipe:
                self.prepared[number, key] = Prepared(recipe=None, problem=problem, checked=True)
                self._distrusted[key] = problem

    # recording -------------------------------------------------------------------------------------------------------

    def _prepare(self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any], own: Callable[..., Any]) -> Prepared:
        if self.never:
            return self.give_up(key, self.never, told=False)
        refuse_capture("a planned module is called as it was not called before")
        self.count += 1
        self._precision = precision_of(self.module)
        if key in self._distrusted:
            return self.give_up(key, self._distrusted[key], told=False)
        if len(self.prepared) >= MOST_PREPARED:
            del self.prepared[next(iter(self.prepared))]
        try:
            with _uncounted():
                trace = self._trace(args, kwargs, own)
            if trace.problem:
                return self.give_up(key, trace.problem, told=False)
            inside = self.late_inside.get(trace.program.form(), frozenset())
            if self.late_inside and not inside:
                return self.give_up(key, WRITTEN_LATER, Verdict(rerun=False, why=WRITTEN_LATER), told=False)
            trace.anchor(self.late, inside)
            trace.anchor_reads(self.written)
            trace.anchor_detached(stepped_in_backward(self.module))
            self._acquit(key, trace)
            if not self._is_as_planned(trace.program):
                self.region.warn_changed()
            return self._store(key, trace)
        except RecordingLeft as error:  # this time only: a hook that stops the forward, a batch that was refused
            verdict = Verdict(rerun=False, why=str(error))
        except UnsupportedModule:  # recording has changed state for good: later runs would not equal plain ones
            raise
        except (TraceError, ValueError) as error:
            return self.give_up(key, str(error), told=False)
        except Exception:
            raise
        except BaseException as interrupt:  # this time only, too: see NOTE [ Interrupts ]
            why = f"its recording was left ({type(interrupt).__name__})"
            verdict = Verdict(rerun=False, why=why, interrupt=interrupt)
        return Prepared(recipe=None, problem=verdict.why, checked=True, told=True, verdict=verdict)

    def _trace(self, args: tuple[Any, ...], kwargs: dict[str, Any], own: Callable[..., Any]) -> RegionTrace:
        if self.blocks is not None:
            return trace_root(self.module, args, kwargs, self.blocks)
        return trace_region(self.module, args, kwargs, shared=self.shared, copy=self.fake_model, runs=(own,))

    def _is_as_planned(self, now: Program) -> bool:
        """Whether a program has planned ops, or needs no more bytes than they (without an unneeded mask). A trace
        around blocks may end in a loss that is computed after its forward.
        """
        known, names = self._planned.get(self.number), [op.name for op in now.ops]

        def nbytes(of: Program) -> tuple[int, int]:  # allocated, and saved or returned
            return sum(b.nbytes for b in of.buffers), of.kept_bytes(of.saved_buffers().union(of.outputs))

        def most(planned: Program) -> tuple[int, ...]:
            begins = [op.name for op in planned.ops[: len(names)]] == names
            return nbytes(planned)[: 1 if begins and self.blocks is not None else 2]

        return known is None or any(
            planned.form() == now.form() or all(map(operator.le, nbytes(now), most(planned))) for planned in known
        )

    def _acquit(self, key: Any, trace: RegionTrace) -> None:
        outdated = self._outdated.pop((self.number, key), None)
        if self._suspects and outdated is not None and outdated.digest() == trace.program.digest():
            self._ignored |= self._suspects
            self.guard = ModuleGuard(self.module, self._ignored)
            self._everything = ModuleGuard(self.module)

    def _store(self, key: Any, trace: RegionTrace) -> Prepared:
        prepared = self.prepared[self.number, key] = Prepared(recipe=self._compile(trace))
        return prepared

    def _compile(self, trace: RegionTrace) -> Recipe:
        policy = self.plan.policy
        return shared_recipe(
            trace,
            policy.kept(trace.program),
            linked=frozenset(position for position, _ in self.plan.link.inputs),
            handed=frozenset(self.plan.link.outputs),
            offloaded=offloaded_by(policy, trace.program) - trace.buffers_at(self.plan.lives),
            packed=packed_by(policy, trace.program) - trace.buffers_at(self.plan.lives),
        )


def reads_hold(trace: RegionTrace, leaves: list[Any]) -> bool | None:
    """Whether these arguments hold the values that the recording read; None if only a run can tell."""
    if not trace.reads:
        return True
    if any(read.calls is None for read in trace.reads):
        return None
    values = trace.made | {b: plain(leaves[position]) for b, position in trace.inputs.items()}
    done: set[int] = set()
    with torch.no_grad():
        try:
            for read in trace.reads:
                for index in read.calls or ():
                    if index not in done:
                        done.add(index)
                        _call_again(trace, trace.calls[index], values)
                if not _found_again(trace, read, values):
                    return False
        except VALUES_WANTED:  # a dry run has no values
            return None
    return True


def _call_again(trace: RegionTrace, call: RecordedOp, values: dict[int, Tensor]) -> None:
    def value(leaf: Any) -> Any:
        return view_of(values[leaf.buffer], within(trace, leaf)) if isinstance(leaf, TensorRef) else leaf

    before = {old: values[old] for old, _new in call.written}
    for old in before:
        values[old] = whole_copy(values[old])
    args, kwargs = tree_map(value, (call.args, call.kwargs))
    out = tree_leaves(call.func(*args, **kwargs))
    for ref, tensor in zip(call.outputs, out, strict=False):
        if ref is not None:
            values[ref.buffer] = tensor
    for old, new in call.written:
        values[new] = values[old]
        values[old] = before[old]


def _found_again(trace: RegionTrace, read: ValueRead, values: dict[int, Tensor]) -> bool:
    tensor = values[read.ref.buffer]
    if read.shape_only:
        return tuple(tensor.shape) == tuple(read.found)
    return torch.equal(view_of(tensor, within(trace, read.ref)), read.found)


# plan -----------------------------------------------------------------------------------------------------------------
#
# Treatment of a region under each of its plans (one for each of several batches, say), and its segment: consecutive
# blocks that keep one input, each of which recomputes its output for the next.


@dataclass(eq=False, kw_only=True)
class SegmentLink:
    """A region's position in a checkpoint segment."""

    before: SegmentLink | None = None  # position of the previous block
    inputs: tuple[tuple[int, int], ...] = ()  # recomputed by the previous block: (leaf position, output leaf of that)
    outputs: tuple[int, ...] = ()  # output leaves that it recomputes itself, for the next
    # by output leaf: its storage, the view of it, and its recomputation
    _left: dict[int, tuple[Any, Any, Handle]] = field(default_factory=dict, init=False)

    @property
    def is_alone(self) -> bool:
        """Whether it neither gets inputs from the block before nor leaves outputs for the next."""
        return self.before is None and not self.inputs and not self.outputs

    def leave(self, returned: Sequence[Any], handles: Mapping[int, Handle]) -> None:
        """Leave outputs of a finished call for the next block."""
        self._left = {
            leaf: (weakref.ref(plain(returned[leaf]).untyped_storage()), _how(returned[leaf]), handle)
            for leaf, handle in handles.items()
        }

    def take(self, leaves: Sequence[Any]) -> dict[int, Handle]:
        """Handles, by leaf position, that recompute inputs of a call in the block before."""
        if self.before is None:
            return {}
        left, self.before._left = self.before._left, {}
        found = {}
        for position, leaf in self.inputs:
            tensor = leaves[position]
            if leaf in left and isinstance(tensor, Tensor):
                storage, how, handle = left[leaf]
                if storage() is plain(tensor).untyped_storage() and how == _how(tensor):
                    found[position] = handle
        return found

    def forget(self) -> None:
        """Drop the outputs left for the next block."""
        self._left = {}


def _how(tensor: Tensor) -> tuple[Any, ...]:
    """View and version of a storage: the next block may get an alias of the output (FSDP makes one)."""
    inner = plain(tensor)
    return inner.shape, inner.stride(), inner.storage_offset(), inner.dtype, wrapping(tensor), version_of(tensor)


@dataclass(frozen=True, kw_only=True)
class RegionPlan:
    """Treatment under one plan: the policy, and the region's position in a checkpoint segment."""

    policy: CheckpointPolicy
    link: SegmentLink = field(default_factory=SegmentLink)
    # which of its calls in one forward of the model (1: the first) is the last of all blocks' and offloads nothing,
    # since backward begins there at once; 0 if it is another block's
    stays: int = 0
    lives: frozenset[Place] = frozenset()  # arguments and results that the loop references as the model's output
