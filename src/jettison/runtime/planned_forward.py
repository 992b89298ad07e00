"""A planned region: replaces a module's ``forward``, and runs the real one under saved-tensor hooks; and its report."""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
import types
import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.grad_mode import _force_original_view_tracking

from jettison.capture.dispatch import HOOKS_OFF
from jettison.capture.fsdp2 import unwatched
from jettison.capture.isolation import without_our_hooks
from jettison.capture.pytrees import tree_leaves
from jettison.capture.signature import AUTOCASTS, call_signature, global_signature
from jettison.capture.tensor_subclasses import plain
from jettison.core.errors import TraceError, warn
from jettison.core.objects import summary
from jettison.core.units import format_bytes
from jettison.runtime import witness
from jettison.runtime.callers import (
    COPY,
    FOREIGN_HOOKS,
    are_hooks_foreign,
    copied_forward,
    is_compiled_training,
    is_transforming,
    pickled_forward,
    switches_hooks_off,
    trains_plainly,
    whose_copy,
)
from jettison.runtime.checked_run import SequenceCheck, SomeMode
from jettison.runtime.checkpoint_fallback import run_interrupted, run_without_recipe
from jettison.runtime.cuda_graphs import is_capturing, refuse_capture
from jettison.runtime.graph_fingerprint import GraphBounds, graph_print, is_turn, next_sequence_number
from jettison.runtime.loop_assumptions import Assumptions
from jettison.runtime.offload import Group, OffloadEngine, engine_for, place_of, shared_engine
from jettison.runtime.recipe import Recipe
from jettison.runtime.recompute_code import code_of
from jettison.runtime.recordings import STALE_CASTS, Prepared, Recordings, RegionPlan
from jettison.runtime.saved_handles import Diverged
from jettison.runtime.saved_tensor_hooks import BoundaryHook, Frame, current_frame, is_pack_listened_to, running, unpack
from jettison.runtime.witness import SAMPLED_AFTER, SAMPLED_SHARE, Check, Rounded
from jettison.solve.checkpoint_policy import CheckpointPolicy, KeepAll


@dataclass(frozen=True, kw_only=True)
class SlotReport:
    """A tensor that autograd saved: ``keep``, ``drop`` (recomputed), ``offload``, ``pack`` or ``parameter``."""

    index: int
    path: str
    op: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    action: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingCalls:
    """Calls of a region whose backward is not over, and the bytes that their recipes keep."""

    calls: int
    nbytes: int


@dataclass(kw_only=True)
class RegionReport:
    """A region's tensors and calls so far.

    ``check`` is the share of recomputed values that is compared with the forward's, and ``rounded`` the number of
    tensors that differed in their last bits (on accelerators, where a recomputed matmul may use another kernel).
    """

    name: str
    word: str
    calls: int
    recordings: int
    fallback: str
    check: str
    rounded: int
    slots_kept: int
    slots_dropped: int
    slots_parameter: int
    slots_offloaded: int
    slots_packed: int
    kept_bytes: int
    host_bytes: int
    recomputed_ops: tuple[str, ...] = field(default=())
    slots: tuple[SlotReport, ...] = field(default=())

    def __repr__(self) -> str:
        name = self.name or "around the blocks"
        return summary(self, f"{name}, {self.word}, calls: {self.calls}, {format_bytes(self.kept_bytes)} kept")

    @classmethod
    def of(cls, recipe: Recipe | None, *, stays: bool = False, **known: Any) -> RegionReport:
        """Build from the recipe that ran (None: it fell back); with ``stays`` no call offloads what it might."""
        kinds = [_action(s.kind, stays) for s in recipe.slots] if recipe else []
        ops = recipe.trace.program.ops if recipe else ()
        return cls(
            **known,
            slots_kept=kinds.count("keep"),
            slots_dropped=kinds.count("drop"),
            slots_parameter=kinds.count("parameter"),
            slots_offloaded=kinds.count("offload"),
            slots_packed=kinds.count("pack"),
            kept_bytes=recipe.held_bytes(moves=not stays) if recipe else 0,
            host_bytes=recipe.host_bytes if recipe and not stays else 0,
            recomputed_ops=tuple(ops[i].name for i in recipe.recomputed_ops) if recipe else (),
            slots=_slot_reports(recipe, stays) if recipe else (),
        )


def _action(kind: str, stays: bool) -> str:
    return "keep" if stays and kind == "offload" else kind


def _slot_reports(recipe: Recipe, stays: bool) -> tuple[SlotReport, ...]:
    program = recipe.trace.program
    return tuple(
        SlotReport(
            index=slot.index,
            path=slot.path,
            op=slot.op,
            shape=slot.shape,
            dtype=slot.dtype,
            nbytes=program.buffers[slot.buffer].nbytes,
            action=_action(action.kind, stays),
        )
        for slot, action in zip(program.slots, recipe.slots, strict=True)
    )


_ON_CPU = torch.empty(0, device="cpu")


class CallListener(Protocol):
    """Listener to a region's calls with gradients."""

    def begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called before anything runs; it may choose another plan."""

    def ends(self) -> None:
        """Called when the forward has returned."""


class StructureWatch(Protocol):
    """`Structure` of a model, at the root."""

    def check(self) -> None: ...
    def parts_changed(self, names: str) -> None: ...


class PlannedForward:
    """Callable in place of ``module.forward``. ``remove()`` restores the old one."""

    of_a_region = True

    def __init__(
        self,
        module: nn.Module,
        name: str,
        policy: CheckpointPolicy,
        *,
        blocks: tuple[str, ...] | None = None,
        fake_model: bool = True,
        model: nn.Module | None = None,
        how: Check = Check.ALWAYS,
    ) -> None:
        trains_plainly(module)  # as a copy from another plan, with a warning
        self.module = module
        self.how = how
        self.calls = 0
        self.key: Any = None  # signature of the last watched call
        self.turn = zlib.crc32(name.encode())  # similar regions compare their graphs in different steps
        self.rounded = Rounded()
        self.model = model or module  # the whole model
        self.bound: Callable[[], Callable[..., Any]] | None = None  # the forward of this call
        self.name = name
        self.plans = [RegionPlan(policy=policy)]  # the first is the plan's, or the policy's
        self.plan = self.plans[0]
        self.is_root = blocks is not None
        self.forward: Callable[..., Any] = module.forward
        self.had_own = "forward" in vars(module)
        self.class_forward: Any = type(module).forward
        self.retired = False  # the plan was removed from this module
        self.outer: PlannedForward | None = None  # the root of the plan that this belongs to
        self.eagerly = torch.compiler.disable(self._eagerly, reason="it runs under a plan, op by op")
        functools.update_wrapper(self, self.forward, updated=())
        self.recordings = Recordings(self, blocks=blocks, fake_model=fake_model)
        self.tap_hooks: dict[tuple[str, bool], Any] = {}
        self.said: set[str] = set()
        self.quiet = False  # fall back without a warning
        self.counted = False  # whether `live` is asked for
        self.in_dry_run = False  # runs on the recorded copy: apparent changes are not the model's
        self.before_first: Callable[[], None] | None = None  # called before the first run
        self.listener: CallListener | None = None
        self.frames: weakref.WeakSet[Frame] = weakref.WeakSet()
        self.assumptions: Assumptions | None = None  # the plan's, at the root
        self.structure: StructureWatch | None = None  # the model's, at the root
        self.offload: OffloadEngine | None = None  # the plan's, if it offloads anything
        self._forward_calls = (0, 0)  # the root's calls so far, and our own in the last of them
        vars(module)["forward"] = self  # Lightning Fabric's wrapper would pass an assignment on to the wrapped module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return (self.eagerly if not self.retired and is_compiled_training() else self.forward)(*args, **kwargs)
        return self._called(whose_copy(self), args, kwargs)

    def _called(self, copied: nn.Module | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call of this module or of a shallow copy that has our attributes."""
        if not self.had_own and type(self.module).forward is not self.class_forward:
            self._follow_class()
        if copied is not None:
            return self._run_copy(copied, args, kwargs)
        if self.retired or not torch.is_grad_enabled() or (is_transforming() and self._warn_transformed()):
            self.unwatch()  # some modules take another path if they have hooks, as torch's encoder layers do
            return self.forward(*args, **kwargs)
        outer = current_frame()
        first = next_sequence_number()
        called = self._call if self._is_watched() else self._call_without_hooks
        if outer is None or outer.check is None:
            output = called(args, kwargs)
        else:
            with outer.check.apart():
                output = called(args, kwargs)
        if outer is not None:
            outer.nested.append((first, next_sequence_number()))
            outer.block_done(output)
        return output

    def _eagerly(self, *args: Any, **kwargs: Any) -> Any:
        """Forward for `torch.compile`, which leaves it uncompiled."""
        self.warn_compiled()
        return self._called(whose_copy(self, compiled=True), args, kwargs)

    def _run_plainly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run as without a plan: foreign hooks get the tensors that autograd saves."""
        self.warn_once(
            "hooks",
            f"{self.name or 'the model'} runs without the plan, since it is called {FOREIGN_HOOKS}. Leave those out "
            "to have the plan kept, or remove() the plan",
        )
        return self.forward(*args, **kwargs)

    def warn_compiled(self) -> None:
        """Warn that compiling a planned module has no effect."""
        self.warn_once(
            "torch.compile",
            "torch.compile has no effect on what runs under a plan: a planned model runs op by op. To compile it "
            "instead, remove() the plan first",
        )

    def _warn_transformed(self) -> bool:
        """Warn that nothing is planned under a transform; whether one is active."""
        if not self.in_dry_run:
            self.warn_once(
                "transform",
                f"{self.name or 'the model'} runs without the plan in torch.func's transforms (grad, vmap, jvp) and "
                "under forward-mode AD: they keep what plain autograd keeps, and the budget does not count it",
            )
        return True

    def _run_copy(self, copied: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.retired:
            self.warn_once(
                "copy",
                f"a shallow copy of {self.name or 'the model'} (copy.copy, nn.DataParallel) runs without the plan, "
                "which belongs to the original; make copies first, and plan each of them",
            )
        if self.had_own:
            return self.forward(*args, **kwargs)
        return types.MethodType(type(copied).forward, copied)(*args, **kwargs)

    def _follow_class(self) -> None:
        """Take the class's forward if it has changed since planning."""
        self.class_forward = type(self.module).forward
        self.forward = types.MethodType(self.class_forward, self.module)
        self.start_over()

    def start_over(self) -> None:
        """Discard all recordings."""
        self.recordings.start_over()
        self.plan.link.forget()

    def like(self, module: nn.Module) -> PlannedForward:
        """Return a region for a module that replaces this one, under the first plan."""
        return PlannedForward(module, self.name, self.plans[0].policy, model=self.model, how=self.how)

    def add_plan(self, plan: RegionPlan) -> int:
        """Add a plan and return its number for `take_plan`."""
        self.plans.append(plan)
        return len(self.plans) - 1

    def take_plan(self, number: int) -> None:
        """Use this plan for calls from now on."""
        self.plan.link.forget()
        self.plan = self.plans[number]
        self.recordings.take_plan(number, self.plan)

    def put_plan(self, plan: RegionPlan) -> None:
        """Replace the current plan, before its first call."""
        self.plans[self.recordings.number] = self.plan = plan
        self.recordings.take_plan(self.recordings.number, plan)

    def warn_once(self, key: str, text: str) -> None:
        """Warn, once per plan."""
        said = (self.outer or self).said
        if key not in said and not self.quiet:
            said.add(key)
            warn(text)

    def _begin_call(self) -> None:
        if self.before_first is not None:
            self.before_first()
            self.before_first = None
        self.calls += 1
        if self.structure is not None:
            self.structure.check()

    def _begin_watched_call(self) -> None:
        self._begin_call()
        if self.outer is not None and vars(self.outer.module).get("forward") is not self.outer:
            self.warn_once(
                "root",
                "the model got another forward after planning: its blocks run as planned, and what is around them "
                "as plain autograd keeps it, unless that forward calls the one before. Plan again to have all planned",
            )

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._begin_watched_call()
        if are_hooks_foreign():
            return self._run_plainly(args, kwargs)
        if self.listener is not None:
            try:
                self.listener.begins(args, kwargs)
            except Exception:
                raise
            except BaseException as interrupt:  # Ctrl-C while planning for a new shape: see NOTE [ Interrupts ]
                run_interrupted(self, interrupt, args, kwargs)
        leaves, signature = call_signature(args, kwargs)
        self.recordings.look(in_dry_run=self.in_dry_run)
        if self.assumptions is not None:
            self.assumptions.forward_begins(signature, args, kwargs, self.frames)
        self.key = key = self.recordings.variant((signature, global_signature()), leaves)
        prepared = self.recordings.of(key, args, kwargs, self.own())
        # writes to views are differentiated through the chain of views, as for the fake tensors that plans are made on:
        # by default autograd takes one `as_strided` for real tensors, whose backward allocates memory of its own
        with _force_original_view_tracking(True):
            output = self._run(prepared, key, leaves, args, kwargs)
        returned = tree_leaves(output)
        if FakeTensor in map(type, returned):
            self.refuse_fake("returns", leaves)
        if self.assumptions is not None:
            self.assumptions.forward_ends(returned)
        if self.listener is not None:
            self.listener.ends()
        return output

    def _is_watched(self) -> bool:
        """Whether a call needs hooks: not if it keeps everything that autograd saves."""
        plan = self.plan
        keeps = plan.policy.__class__ is KeepAll and plan.link.is_alone
        told = self.in_dry_run or self.counted or self.assumptions is not None or self.listener is not None
        return not keeps or told or self.recordings.fell_back or is_pack_listened_to()

    def _call_without_hooks(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward as without a plan; the hooks of a surrounding region do not see its saved tensors."""
        self._begin_call()
        self.recordings.unguard()
        if current_frame() is None:
            return self.forward(*args, **kwargs)
        with without_our_hooks():
            return self.forward(*args, **kwargs)

    def refuse_fake(self, does: str, leaves: Sequence[Any] = ()) -> None:
        """Raise `TraceError` for an unexpected fake tensor; in a dry run all tensors are fake."""
        if not any(isinstance(plain(t), FakeTensor) for t in (*self.module.parameters(), *leaves)):
            raise TraceError(
                f"{self.name or 'the model'} {does} a fake tensor, which has a shape and no values: a recording left "
                "it in Python state. Clear the model's caches and lists of outputs and plan again; if that does not "
                "help, plan without the module: regions=[...]"
            )

    @property
    def __code__(self) -> Any:
        """Code object of the real forward, for exporters."""
        return getattr(self.forward, "__code__", None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # a copied model trains plainly: the plan belongs to the original
        if self.had_own:
            return copy.deepcopy(self.forward, memo)
        return copied_forward(self.module, self.name, (self.outer or self).said, memo)

    def __reduce__(self) -> Any:
        # a foreign forward (Accelerate's under mixed precision) is pickled as it is
        if self.had_own:
            return operator.itemgetter(0), ((self.forward,),)
        return pickled_forward(self.module, self.name, (self.outer or self).said)

    def remove(self) -> None:
        """Restore the module's own forward, unless another one was set meanwhile."""
        if vars(self.module).get("forward") is self:
            if self.had_own:
                vars(self.module)["forward"] = self.forward
            else:
                del self.module.__dict__["forward"]
        self.retired = True
        if self.is_root:
            self.said.add(COPY)  # copies lose nothing by it
        self.plan.link.forget()
        self.unwatch()

    def live(self) -> PendingCalls:
        """Calls between forward and backward; in a region that keeps everything, counted from the first request on."""
        self.counted = True
        frames = list(self.frames)
        return PendingCalls(calls=len(frames), nbytes=sum(frame.held_bytes for frame in frames))

    def nested(self, run: Callable[[], Any]) -> Any:
        """Result that a stand-in for a nested region returns inside this one."""
        frame = current_frame()
        if frame is None or frame.region is not self:
            return run()
        with frame.check.apart() if frame.check is not None else contextlib.nullcontext():
            output = run()
        frame.block_done(output)
        return output

    def report(self) -> RegionReport:
        """Report the kept and dropped tensors of the most used signature."""
        best = self.recordings.most_used()
        return RegionReport.of(
            best.recipe if best else None,
            stays=self.plan.stays == 1,
            name=self.name,
            word=self.plan.policy.word,
            calls=self.calls,
            recordings=self.recordings.count,
            fallback=best.problem if best else "",
            check=self.how,
            rounded=self.rounded.tensors,
        )

    def source(self) -> str:
        """Recomputation code of the most used signature."""
        best = self.recordings.most_used()
        return "" if best is None or best.recipe is None else code_of(best.recipe).text()

    # hooks for tensors that recipes need from module boundaries ------------------------------------------------------

    def _watch(self, recipe: Recipe) -> None:
        for _, tap in recipe.from_taps:
            where = (tap.path, tap.is_output)
            if where in self.tap_hooks:
                continue
            module = self.module.get_submodule(tap.path)
            listener = BoundaryHook(self, module, tap.path, tap.is_output)
            if tap.is_output:
                self.tap_hooks[where] = module.register_forward_hook(listener)
            else:
                self.tap_hooks[where] = module.register_forward_pre_hook(listener, with_kwargs=True, prepend=True)

    def unwatch(self) -> None:
        """Remove the hooks that calls have put on submodules; the next call adds them again."""
        for hook in self.tap_hooks.values():
            hook.remove()
        self.tap_hooks.clear()

    def forgotten(self, names: str) -> None:
        """Distrust recordings; ``names`` are submodules that were replaced."""
        if self.structure is not None and names:
            self.structure.parts_changed(names)
        self.unwatch()  # a module may have been replaced

    def has_assumptions(self) -> bool:
        """Whether the plan is of a training loop, which it makes assumptions about."""
        return (self.outer or self).assumptions is not None

    def warn_changed(self) -> None:
        """Warn of other ops than planned, once, if there is a budget that they may exceed."""
        assumptions = (self.outer or self).assumptions
        if assumptions is not None and not assumptions.is_larger:
            self.warn_once(
                "changed",
                f"{self.name or 'the model'} runs other ops than it was planned with (a state that was not there yet, "
                "another setting or argument, padding): the budget may not hold. To have it held: call "
                "handle.expect(batch) before each step of a loop of your own, or plan again with the model and batch "
                "as they are",
            )

    # running ---------------------------------------------------------------------------------------------------------

    def _run(
        self, prepared: Prepared, key: Any, leaves: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        prepared.calls += 1
        if prepared.recipe is None:
            return run_without_recipe(self, prepared, args, kwargs)
        if prepared.recipe.trace.casts and self.recordings.has_stale_casts():
            prepared = self.recordings.leave(key, STALE_CASTS)
            return run_without_recipe(self, prepared, args, kwargs)
        try:
            return self._run_planned(prepared, key, leaves, args, kwargs)
        except Diverged as divergence:
            self.recordings.lose(key, str(divergence))
            raise TraceError(
                f"{self.name or 'the model'} did not run as recorded ({divergence}), and the tensors dropped so far "
                "cannot be recomputed. It is not rerun, because the first run may have changed Python state: repeat "
                "the step. From the next step on it runs without a recording; regions=[...] without it avoids this"
            ) from None
        except RuntimeError as error:
            if not switches_hooks_off(error):
                raise
            self.recordings.lose(key, HOOKS_OFF)
            raise TraceError(
                f"{self.name or 'the model'} runs under the hooks of a plan, and {HOOKS_OFF}, which torch refuses "
                f"there ({error}). It did not when it was planned. Repeat the step: from the next one on it runs "
                "without a recording"
            ) from error

    def _run_planned(
        self, prepared: Prepared, key: Any, leaves: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        recipe = prepared.recipe
        assert recipe is not None
        self._watch(recipe)
        group = self.begin_group(moves=bool(recipe.moved))
        frame = Frame(recipe, self, group, key[1][AUTOCASTS:], moves=not self.stays())
        if not prepared.checked:
            refuse_capture(f"{self.name or 'the model'} has not run under its plan so far")
        if self.how is Check.SAMPLED and prepared.calls > SAMPLED_AFTER and not is_capturing():
            frame.share = SAMPLED_SHARE  # each replay of a graph would sample the same slots
        frame.sees = frame.share == 1 and self.how not in (Check.OFF, Check.FULL) and witness.is_told_at_once(_ON_CPU)
        settings = self.recordings.must_check(prepared, recipe, leaves)
        stack = running()
        stack.append(frame)
        try:
            frame.enter(leaves, self.plan.link.take(leaves))
            back = unpack if self.assumptions is None else self.assumptions.watched(unpack)
            with torch.autograd.graph.saved_tensors_hooks(frame.pack, back):
                if settings is None:
                    with SomeMode() if recipe.sees_modes else contextlib.nullcontext():
                        output = self.forward(*args, **kwargs)
                else:
                    frame.expected = ()
                    frame.check = SequenceCheck(recipe.trace, leaves, self.recordings.owners)
                    with frame.check, unwatched(self.module, frame.check):
                        output = self.forward(*args, **kwargs)
                        frame.check.finish()
        finally:
            stack.pop()
            if group is not None:
                group.end()
        self.frames.add(frame)
        if not frame.leave():
            self.recordings.diverged(prepared, key, frame.broken, leaves)
            return output
        unseen = self.how is Check.OFF or frame.share > 1
        frame.looked = unseen or is_turn(prepared.calls, self.turn)
        if frame.looked and recipe.is_needed and not self._has_graph_of(prepared, frame, output, leaves):
            why = "its autograd graph is another one"
            if unseen and any(slot.kind == "drop" for slot in recipe.slots):
                raise Diverged(why)
            self.recordings.diverged(prepared, key, why)  # nothing is missing, and witnesses check the values
            return output
        prepared.checked = True
        if settings is not None:
            prepared.settings = settings
        if frame.handed:
            self.plan.link.leave(tree_leaves(output), frame.handed)
            frame.handed = {}
        return output

    def _has_graph_of(self, prepared: Prepared, frame: Frame, output: Any, leaves: list[Any]) -> bool:
        """Whether a run built the graph of the first one, which was compared with the recording call by call."""
        bounds = GraphBounds(frame.start, frame.nested, self.recordings.owners, leaves)
        graph = graph_print(tree_leaves(output), bounds)
        if prepared.graph is None:
            prepared.graph = graph
        return bool(prepared.graph == graph)

    def begin_group(self, *, moves: bool) -> Group | None:
        """Begin an offload group for a call, if it or surrounding calls offload saved tensors."""
        if self.offload is None and moves:
            place = place_of(self.module)
            self.offload = engine_for(place, dry=True) if self.in_dry_run else shared_engine(place)
        return None if self.offload is None else Group(self.offload)

    def stays(self) -> bool:
        """Whether this call is the last of all blocks' in its forward, and so keeps its tensors; ask once per call."""
        forward = self.outer.calls if self.outer is not None else 0
        before, count = self._forward_calls
        self._forward_calls = forward, count + 1 if before == forward else 1
        return self.outer is not None and self._forward_calls[1] == self.plan.stays

    def own(self) -> Callable[..., Any]:
        return self.forward if self.bound is None else self.bound()
