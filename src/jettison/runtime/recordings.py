"""What is known of one region's calls: by signature a recipe, or why there is none; and whether that still holds.

NOTE [ Settings that do not matter ]
A changed setting (a number, a submodule, a closure) puts every recording of its region in doubt. Each is made again
when it is wanted. Where the new program is the old one, the settings that had changed are ignored from then on: only
when they move is a run compared with the recording, call by call.

NOTE [ Settings that come back ]
Where the programs do differ, as under one adapter and another (PEFT's `set_adapter`), the settings often come back, and
a recording takes far longer than a step. So what is known under some settings is put aside when they change, and is
known again once everything is as it was then; but not where that would keep modules alive which the model has let go
of. Once a run or a tensor tells that a recording is wrong, all that was put aside is let go of.

NOTE [ Interrupts ]
A recording runs the user's Python before the run that counts. Where that Python leaves by a `KeyboardInterrupt` or
another `BaseException`, the run that counts has drawn nothing yet, and without a plan it would have. So it comes first,
without a recording; it raises the exception itself, or the one that was held back is raised after it. Ctrl-C waits for
one call of one region.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map

from jettison.capture.guard import ModuleGuard, Setting, same_values
from jettison.capture.reach import Known
from jettison.capture.recording import Place, RecordedOp, RegionTrace, TensorRef, ValueRead
from jettison.capture.sharded import precision_of
from jettison.capture.tensor_subclasses import is_stepped_in_backward, plain, stepped_in_backward, version_of, wrapping
from jettison.capture.tracer import VALUES_WANTED, trace_region, trace_root
from jettison.core.errors import RecordingLeft, TraceError, UnsupportedModule
from jettison.ledger.program import Program
from jettison.runtime.accelerator import refuse_capture
from jettison.runtime.frame import owners_of
from jettison.runtime.graph_fingerprint import Print
from jettison.runtime.handles import Handle
from jettison.runtime.recipe import Recipe, shared_recipe
from jettison.runtime.views import view_of, whole_copy, within
from jettison.solve.policy import CheckpointPolicy, Offload, offloaded_by, packed_by

if TYPE_CHECKING:
    from jettison.runtime.planned import PlannedForward


GIVE_UP_AFTER = 8  # runs of one signature that were not as recorded, before it is left without a recording
WRITTEN_LATER = "others write to its arguments or results before backward"
STALE_CASTS = (
    "its forward gets casts of weights out of autocast's cache that are older than the weights, since the loop steps "
    "its optimizer without leaving autocast; torch trains so, on gradients of the older weights"
)
MOST_PREPARED = 256  # signatures of one region that are known at a time
MOST_ASIDE = 4  # settings under which something is known that do not hold now


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a trial found: whether the forward may run ``again`` in backward, and if not, why."""

    again: bool
    why: str = ""
    written: tuple[tuple[int, str], ...] = ()  # buffers that the forward writes to: (number of the module, name)
    hollow: frozenset[int] = frozenset()  # numbers of saved tensors that no kernel writes
    interrupt: BaseException | None = None  # left the trial; the run that counts comes first
    known: Known = field(default_factory=dict)  # large containers that it reaches


@dataclass(kw_only=True)
class Prepared:
    """A recipe for one signature. ``recipe`` is None where the region could not be recorded."""

    recipe: Recipe | None
    problem: str = ""
    checked: bool = False
    calls: int = 0
    settings: frozenset[Any] = frozenset()  # ignored ones, as they were at the last checked run
    verdict: Verdict | None = None  # of one without a recipe: whether its Python may run again
    told: bool = False  # the user knows that there is none
    graph: Print | None = None  # of the first run, which was checked call by call


def _is_part(now: Program, planned: Program) -> bool:
    """Whether all ops of a program are of the other as well, and it saves and makes no more."""
    names = Counter(op.name for op in now.ops) <= Counter(op.name for op in planned.ops)
    saved, could = (p.kept_bytes(p.saved_buffers()) for p in (now, planned))
    made, may = (sum(buffer.nbytes for buffer in p.buffers) for p in (now, planned))
    return names and saved <= could and made <= may


def _uncounted() -> contextlib.ExitStack:
    """Who counts bytes of the step that is running sees nothing: a recording takes none."""
    stack = contextlib.ExitStack()
    for mode in _get_current_dispatch_mode_stack():
        if hasattr(mode, "looking_away"):
            stack.enter_context(mode.looking_away())
    return stack


class Recordings:
    """Of one region, on a fake copy of its module if ``fake_model``; ``blocks`` are the regions inside of a root."""

    def __init__(self, region: PlannedForward, *, blocks: tuple[str, ...] | None, fake_model: bool) -> None:
        self.region, self.module, self.blocks, self.fake_model = region, region.module, blocks, fake_model
        self.take_plan(0, region.plan)
        self.count = 0
        self.prepared: dict[tuple[int, Any], Prepared] = {}  # by plan and signature
        self.owners = owners_of(region.module)
        self.guard: ModuleGuard | None = None
        self.fell_back = False  # some call has no program
        self.never = ""  # why no call is recorded
        self.differs = ""  # why its Python may not be recomputed in backward: one run of it was not like the first
        self.shared: frozenset[int] = frozenset()  # leaf positions of arguments that live elsewhere anyway
        self.late: frozenset[Place] = frozenset()  # what others write to before backward
        self.casts: dict[str, tuple[Any, int | None]] = {}  # of parameters, by autocast: see `note_cast`
        self.written: set[str] = set()  # parameters and buffers that somebody wrote to between forward and backward
        self.late_inside: dict[str, frozenset[int]] = {}  # the same of what it leaves behind, by the program's form
        self._planned: dict[Any, Program] = {}  # by plan and signature
        self._precision: tuple[Any, ...] = ()  # what FSDP cast when it was recorded
        self._suspects: frozenset[Setting] = frozenset()
        self._ignored: frozenset[Setting] = frozenset()
        self._everything: ModuleGuard | None = None  # with what is ignored
        self._aside: list[tuple[ModuleGuard, dict[tuple[int, Any], Prepared]]] = []  # the latest last
        self._outdated: dict[Any, Program] = {}
        self._distrusted: dict[Any, str] = {}  # signatures of which a tensor once came back wrong
        self._divergences: dict[Any, int] = {}
        self._last_values: Any = None

    def take_plan(self, number: int, plan: RegionPlan) -> None:
        """Calls from now on are treated so. What is known under other numbers is known when they come back."""
        self.number, self.plan = number, plan

    # known before a run ----------------------------------------------------------------------------------------------

    def adopt(self, key: Any, trace: RegionTrace, *, checked: bool = False) -> None:
        """Follow a program that was recorded elsewhere (``checked``: on these tensors), unless it has a problem."""
        if trace.problem:
            self.give_up(key, trace.problem)
            return
        self.guard = self.guard or ModuleGuard(self.module)
        self._precision = precision_of(self.module)
        self.late |= trace.late
        if trace.late_inside:
            self.late_inside[trace.form] = trace.late_inside
        self.shared |= {p for b, p in trace.inputs.items() if trace.program.buffers[b].free}
        self._planned[self.number, key] = trace.program
        self._store(key, trace).checked = checked

    def give_up(self, key: Any, problem: str, verdict: Verdict | None = None, *, told: bool = True) -> Prepared:
        """Calls of this signature have no program."""
        self.guard = self.guard or ModuleGuard(self.module)
        self.fell_back = True
        known = Prepared(recipe=None, problem=problem, checked=True, verdict=verdict, told=told)
        self.prepared[self.number, key] = known
        return known

    def most_used(self) -> Prepared | None:
        """Of the signature that was called most."""
        return max(self.prepared.values(), key=lambda p: p.calls, default=None)

    def moves_without_recipe(self) -> bool:
        """Whether what calls save goes to the host as it comes by."""
        known = [p for (number, _), p in self.prepared.items() if number == self.number]
        return isinstance(self.plan.policy, Offload) and any(p.recipe is None for p in known)

    # a call ----------------------------------------------------------------------------------------------------------

    def look(self, *, in_dry_run: bool) -> None:
        """See whether settings have changed. In a dry run none has: the copy that runs is what was recorded."""
        if self.guard is None or not (in_dry_run or self.guard.holds()):
            before, known = self.guard, dict(self.prepared)
            self._aside = [one for one in self._aside if one[0].may_be_kept()]
            if not self._know_again():
                self.forget()
            if before is not None and known and before.may_be_kept():
                self._aside = [*self._aside, (before, known)][-MOST_ASIDE:]

    def _know_again(self) -> bool:
        """What was put aside is known again, if all is as it was then. See NOTE [ Settings that come back ]."""
        found = next((known for known in reversed(self._aside) if known[0].holds()), None)
        if found is None:
            return False
        self._aside = [known for known in self._aside if known is not found]
        self.region._forgotten("")
        self.guard, prepared = found
        self.prepared = {key: known for key, known in prepared.items() if key[1] not in self._distrusted}
        self.owners = owners_of(self.module)
        self._suspects, self._outdated = frozenset(), {}
        return True

    def of(self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any], own: Callable[..., Any]) -> Prepared:
        """What a call of this signature follows; recorded now, of the forward ``own``, where nothing is known of it.
        Raises `UnsupportedModule` where recording has moved what cannot be put back.
        """
        prepared = self.prepared.get((self.number, key))
        if prepared is not None and not prepared.checked and precision_of(self.module) != self._precision:
            self.forget()  # FSDP came after the recording, with casts of its own
            prepared = None
        if prepared is not None and prepared.recipe is not None and prepared.recipe.trace.detached:
            tables = [self.owners[name] for name in prepared.recipe.trace.detached.values()]
            if any(is_stepped_in_backward(table[leaf]) for table, leaf in tables):
                self.forget()  # a parameter that is read without its graph has got hooks since
                prepared = None
        return prepared or self._prepare(key, args, kwargs, own)

    def must_check(self, prepared: Prepared, recipe: Recipe, leaves: list[Any]) -> frozenset[Any] | None:
        """What has changed since a run was last checked, although it did not matter then; None if nothing that counts.

        A setting that was found not to matter may come to matter (a counter that reaches a threshold), and so may a
        number that is read out of a tensor: such runs are compared with the recording, call by call.
        """
        settings = self._everything.changed() if self._everything is not None else frozenset()
        if not prepared.checked or settings != prepared.settings or self._moves(settings):
            return settings
        return None if reads_hold(recipe.trace, leaves) else settings

    def _moves(self, settings: frozenset[Any]) -> bool:
        """Whether a setting has another value than at the last look, for those that are known to have changed."""
        if not settings or self._everything is None:
            return False
        values, before = self._everything.values(settings), self._last_values
        self._last_values = values
        return before is None or not same_values(values, before)

    # what does not hold ----------------------------------------------------------------------------------------------

    def start_over(self) -> None:
        """Nothing that was recorded holds."""
        self.prepared.clear()
        self._aside.clear()
        self._outdated = {}
        self._planned = {}
        self.guard = None

    def unguard(self) -> None:
        """Nobody asks whether what was recorded holds: keep nothing alive for it. A call that does ask records anew."""
        if self.guard is not None:
            self.guard = None
            self._aside.clear()

    def forget(self) -> None:
        """Settings have changed: what was recorded may not hold. See NOTE [ Settings that do not matter ]."""
        names = "" if self.guard is None else self.guard.structure_words()
        if names:  # that is said already
            self._planned = {}
        self.region._forgotten(names)
        if self.guard is not None:
            self._suspects = self.guard.changed()
            self._outdated = {k: p.recipe.trace.program for k, p in self.prepared.items() if p.recipe is not None}
            self.prepared.clear()
        self.owners = owners_of(self.module)
        self.guard = ModuleGuard(self.module, self._ignored)

    def diverged(self, prepared: Prepared, key: Any, why: str) -> None:
        """A run was not as recorded, and nothing is lost: record again, or never again."""
        self._aside.clear()
        times = self._divergences[key] = self._divergences.get(key, 0) + 1
        adopted = not self.count  # recorded elsewhere, and earlier: once more, here and now
        if (prepared.checked or adopted) and times <= GIVE_UP_AFTER:
            self.forget()
        else:
            self.lose(key, why)

    def wrong(self, recipe: Recipe, why: str, *, looked: bool) -> str:
        """A tensor came back wrong. What its calls do from now on, in words: one that is known for it, and those whose
        graph was the recorded one, are not trusted again; the others count as runs with another graph.
        """
        self._aside.clear()
        found = next(((key, p) for (_, key), p in self.prepared.items() if p.recipe is recipe), None)
        if found is not None:
            key, prepared = found
            if looked:
                self.distrust(recipe, why)
            else:
                self.diverged(prepared, key, why)
            if key in self._distrusted:
                return "runs without a recording"
        return "has a new recording"

    def lose(self, key: Any, why: str) -> None:
        """Calls of this signature have no program from now on."""
        self._distrusted[key] = why
        self.prepared.pop((self.number, key), None)

    def note_cast(self, name: str, tensor: Tensor) -> None:
        """Autocast has cast this parameter, and keeps the cast until the loop leaves it, whatever is written."""
        table, leaf = self.owners[name]
        self.casts[name] = weakref.ref(plain(tensor).untyped_storage()), version_of(table[leaf])

    def has_stale_casts(self) -> bool:
        """Whether this forward gets casts of parameters that were written to since."""
        for name, (storage, version) in self.casts.items():
            table, leaf = self.owners[name]
            if storage() is not None and version_of(table[leaf]) != version:
                return True
        return False

    def moves(self, names: Set[str], *, places: Set[Place] = frozenset()) -> None:
        """Keep what is computed of parameters, buffers and arguments that somebody wrote to too early, from now on."""
        if names - self.written or places - self.late:
            self.written |= names
            self.late |= places
            self._aside.clear()
            self.forget()

    def leave(self, key: Any, why: str) -> Prepared:
        """Calls of this signature have no program from this one on."""
        self._distrusted[key] = why
        return self.give_up(key, why, told=False)

    def distrust(self, recipe: Recipe, problem: str) -> None:
        """A tensor came back wrong: calls like that one have no program from now on."""
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
                return self.give_up(key, WRITTEN_LATER, Verdict(again=False, why=WRITTEN_LATER), told=False)
            trace.anchor(self.late, inside)
            trace.anchor_reads(self.written)
            trace.anchor_detached(stepped_in_backward(self.module))
            self._acquit(key, trace)
            if not self._is_as_planned(key, trace.program):
                self.region._say_changed()
            return self._store(key, trace)
        except RecordingLeft as error:  # this time only: a hook that has what it wanted, a batch that was refused
            verdict = Verdict(again=False, why=str(error))
        except UnsupportedModule:  # what recording has moved cannot be put back: no run of today is a plain one's
            raise
        except (TraceError, ValueError) as error:
            return self.give_up(key, str(error), told=False)
        except Exception:
            raise
        except BaseException as interrupt:  # this time only, too: see NOTE [ Interrupts ]
            why = f"its recording was left ({type(interrupt).__name__})"
            verdict = Verdict(again=False, why=why, interrupt=interrupt)
        return Prepared(recipe=None, problem=verdict.why, checked=True, told=True, verdict=verdict)

    def _trace(self, args: tuple[Any, ...], kwargs: dict[str, Any], own: Callable[..., Any]) -> RegionTrace:
        if self.blocks is not None:
            return trace_root(self.module, args, kwargs, self.blocks)
        return trace_region(self.module, args, kwargs, shared=self.shared, copy=self.fake_model, runs=(own,))

    def _is_as_planned(self, key: Any, now: Program) -> bool:
        """Whether a program has the ops that were planned with, or some of them on no more bytes (a mask that is of no
        use is left out). What was traced around blocks may end in a loss that is computed after its forward.
        """
        planned = self._planned.get((self.number, key))
        if planned is None or planned.form() == now.form():
            return True
        if _is_part(now, planned):
            return True
        count = len(now.ops)
        return self.blocks is not None and [op.name for op in planned.ops[:count]] == [op.name for op in now.ops]

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


def reads_hold(trace: RegionTrace, leaves: list[Any]) -> bool:
    """Whether the forward would find in these arguments what the recording found; False where a run alone can tell."""
    if not trace.reads:
        return True
    if any(read.calls is None for read in trace.reads):
        return False
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
        except VALUES_WANTED:  # a dry run has none
            return False
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
# How a region is treated under each plan that it has (one for each of several batches, say), and its segment: blocks
# in a row that hold one input, of which each computes its output again for the next.


@dataclass(eq=False, kw_only=True)
class SegmentLink:
    """A region's place in a checkpoint segment."""

    before: SegmentLink | None = None  # the place of the one before
    inputs: tuple[tuple[int, int], ...] = ()  # which the one before recomputes: (leaf position, output leaf of that)
    outputs: tuple[int, ...] = ()  # output leaves that it recomputes itself, for the next
    # by output leaf: its storage, how that was seen, and how it is recomputed
    _left: dict[int, tuple[Any, Any, Handle]] = field(default_factory=dict, init=False)

    @property
    def is_alone(self) -> bool:
        """Neither takes from a block before nor leaves anything for one after."""
        return self.before is None and not self.inputs and not self.outputs

    def leave(self, returned: Sequence[Any], handles: Mapping[int, Handle]) -> None:
        """A call has ended: what the next block may ask for."""
        self._left = {
            leaf: (weakref.ref(plain(returned[leaf]).untyped_storage()), _how(returned[leaf]), handle)
            for leaf, handle in handles.items()
        }

    def take(self, leaves: Sequence[Any]) -> dict[int, Handle]:
        """By leaf position, how inputs of a call are computed again that are the outputs of the block before."""
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
        """The next block asks for nothing that was left."""
        self._left = {}


def _how(tensor: Tensor) -> tuple[Any, ...]:
    """How a storage is seen, and its version: what comes by may be an alias of what was left (FSDP makes one)."""
    inner = plain(tensor)
    return inner.shape, inner.stride(), inner.storage_offset(), inner.dtype, wrapping(tensor), version_of(tensor)


@dataclass(frozen=True, kw_only=True)
class RegionPlan:
    """Under one plan: what is kept, and the region's place in a checkpoint segment."""

    policy: CheckpointPolicy
    link: SegmentLink = field(default_factory=SegmentLink)
    # which of its calls in one forward of the model (1: the first) is the last of all blocks' and moves nothing, since
    # backward begins there at once; 0 where another block's is
    stays: int = 0
    lives: frozenset[Place] = frozenset()  # arguments and results that the loop holds as the model's output
