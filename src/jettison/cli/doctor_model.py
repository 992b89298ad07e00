"""`doctor --model`: a model's ways to be silently wrong under recompute, and what to do about each."""

from __future__ import annotations

import random
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby
from typing import Any, Final

import numpy as np
import torch
import torch.utils.checkpoint as checkpoints
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from jettison.capture.blocks import find_blocks
from jettison.capture.model_trace import LossFn, call_model, loss_of
from jettison.capture.op_traits import DISCRETE
from jettison.capture.signature import kernel_switches
from jettison.core.objects import swapped
from jettison.core.progress import Progress
from jettison.diagnose.finding import Finding, FindingKind, change
from jettison.models.live_model import ModelRequest, load
from jettison.report.findings import FindingsReport
from jettison.report.tables import span
from jettison.verify.differences import independent_copy, tensor_bytes

# hazards --------------------------------------------------------------------------------------------------------------
#
# Whoever runs a block's Python again in backward relies on the block giving the same tensors twice, and on nothing else
# noticing. Each hazard is a way in which that fails without an error.


class Hazard(StrEnum):
    """One of the ways; the numbers are those of docs/traps.md."""

    RANDOM = "random streams"  # 2
    NESTED = "nested arguments"  # 4
    WRITTEN = "written between forward and backward"  # 5
    SHARED = "shared weights under autocast"  # 9
    CONTEXT = "contexts"  # 10
    CHOICE = "discrete choices"  # 13
    BUFFERS = "buffers"  # 17
    CAPTURED = "captured tensors"  # 20


@dataclass(frozen=True, kw_only=True)
class Sighting:
    """A hazard in a block ("" is the model around them): sightings. ``now``: the block is recomputed in backward."""

    hazard: Hazard
    block: str
    what: str
    now: bool


@dataclass(kw_only=True)
class _HazardWatch:
    """Sightings of one step, by block."""

    seen: dict[tuple[Hazard, str], list[str]] = field(default_factory=lambda: defaultdict(list))
    again: set[str] = field(default_factory=set)
    stack: list[str] = field(default_factory=list)
    given: list[tuple[str, Tensor, int]] = field(default_factory=list)
    switches: dict[str, Any] = field(default_factory=dict)
    autocast: set[str] = field(default_factory=set)
    handed: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))

    def say(self, hazard: Hazard, block: str, what: str) -> None:
        if what not in self.seen[hazard, block]:
            self.seen[hazard, block].append(what)

    @property
    def block(self) -> str:
        """The block whose forward runs; "" between blocks."""
        return self.stack[-1] if self.stack else ""


def look_for_hazards(model: nn.Module, batch: Any, *, loss_fn: LossFn | None = None) -> tuple[Sighting, ...]:
    """Run one training step of ``model`` and return what was seen. The step changes the model: pass a copy. Raise
    `UsageError` if the output has no loss.
    """
    watch, blocks = _HazardWatch(), find_blocks(model)
    modules = dict(model.named_modules())
    before = _Before(model, batch, blocks)
    with ExitStack() as stack:
        for name in blocks:
            _hook(stack, watch, name, modules[name])
        stack.enter_context(_nested_arguments(watch))
        with torch.enable_grad():
            with _Ops(watch, model):
                output = call_model(model, batch)
            before.compare(watch)
            outside = kernel_switches()
            try:
                loss_of(output, loss_fn).backward()
            except RuntimeError:  # torch saw it as well: what was written, or checkpointed twice over
                if not watch.seen:
                    raise
    for name, switches in watch.switches.items():
        if switches != outside:
            watch.say(Hazard.CONTEXT, name, "kernels or precision are chosen by a context that backward is outside of")
    _shared(watch, {name: modules[name] for name in blocks})
    return tuple(
        Sighting(hazard=hazard, block=block, what="; ".join(texts[:3]), now=block in watch.again)
        for (hazard, block), texts in sorted(watch.seen.items())
    )


# around a step --------------------------------------------------------------------------------------------------------


class _Before:
    """Parameters and batch as they were."""

    def __init__(self, model: nn.Module, batch: Any, blocks: list[str]) -> None:
        tensors = [
            (next((block for block in blocks if name.startswith(f"{block}.")), ""), f"parameter {name}", p)
            for name, p in model.named_parameters()
        ]
        tensors += [("", "the batch", leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
        self.versions = [(block, name, tensor, tensor._version) for block, name, tensor in tensors]

    def compare(self, watch: _HazardWatch) -> None:
        for block, name, tensor, version in self.versions:
            if tensor._version != version:
                watch.say(Hazard.WRITTEN, block, f"{name} is written to in forward")
        for block, tensor, version in watch.given:
            if tensor._version != version:
                watch.say(
                    Hazard.WRITTEN, block, f"an argument {list(tensor.shape)} is written to after the block got it"
                )


def _streams() -> dict[str, Any]:
    state = np.random.get_state(legacy=False)
    return {"Python's random": random.getstate(), "numpy's random": repr(state)}


def _hook(stack: ExitStack, watch: _HazardWatch, name: str, module: nn.Module) -> None:
    states: list[tuple[dict[str, Any], dict[str, bytes | int]]] = []

    def enters(_: nn.Module, args: Any, kwargs: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            watch.again.add(name)
            return
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        watch.given += [(name, tensor, tensor._version) for tensor in tensors]
        watch.handed[name] |= {tensor.untyped_storage()._cdata for tensor in tensors}
        watch.switches[name] = kernel_switches()
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            watch.autocast.add(name)
        states.append((_streams(), _buffers(module)))
        watch.stack.append(name)

    def leaves(*_: Any) -> None:
        if torch._C._current_graph_task_id() != -1 or not watch.stack or not states:
            return
        watch.stack.pop()
        streams, buffers = states.pop()
        for stream, state in _streams().items():
            if state != streams[stream]:
                watch.say(Hazard.RANDOM, name, f"draws from {stream}, which checkpoints do not put back")
        for buffer, state in _buffers(module).items():
            if state != buffers.get(buffer):
                watch.say(Hazard.BUFFERS, name, f"buffer {buffer} is written to, and once more in recompute")

    stack.callback(module.register_forward_pre_hook(enters, with_kwargs=True).remove)
    stack.callback(module.register_forward_hook(leaves).remove)


def _buffers(module: nn.Module) -> dict[str, bytes | int]:
    """By name, bytes or, of fakes, the version."""
    is_fake = any(type(buffer).__name__ == "FakeTensor" for buffer in module.buffers())
    return {name: b._version if is_fake else tensor_bytes(b) for name, b in module.named_buffers()}


@contextmanager
def _nested_arguments(watch: _HazardWatch) -> Iterator[None]:
    """Find inputs of reentrant checkpoints that get no gradient: tensors inside lists and dictionaries."""
    real = checkpoints.CheckpointFunction

    class Watched:
        @staticmethod
        def apply(function: Any, keeps_random_state: bool, *args: Any) -> Any:
            hidden = [
                leaf
                for argument in args
                if not isinstance(argument, Tensor)
                for leaf in tree_leaves(argument)
                if isinstance(leaf, Tensor) and leaf.requires_grad
            ]
            direct = any(isinstance(argument, Tensor) and argument.requires_grad for argument in args)
            owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
            of_code = getattr(function, "__qualname__", "a function")
            name = type(owner).__name__ if isinstance(owner, nn.Module) else of_code
            if hidden:
                shapes = ", ".join(str(list(t.shape)) for t in hidden[:3])
                watch.say(
                    Hazard.NESTED, name, f"a reentrant checkpoint gets {shapes} in a container, where it does not look"
                )
                watch.again.add(name)
            elif not direct:
                watch.say(
                    Hazard.NESTED, name, "no argument of a reentrant checkpoint needs gradients: nothing in it does"
                )
                watch.again.add(name)
            return real.apply(function, keeps_random_state, *args)

    with swapped(checkpoints, CheckpointFunction=Watched):
        yield


def _shared(watch: _HazardWatch, blocks: dict[str, nn.Module]) -> None:
    """Weights that several blocks use: autocast's cache has one copy, whose graph belongs to the first."""
    users: dict[int, list[tuple[str, str]]] = defaultdict(list)
    for block, module in blocks.items():
        for name, parameter in module.named_parameters():
            users[id(parameter)].append((block, name))
    for uses in users.values():
        names = [block for block, _ in uses]
        if len(set(names)) > 1 and watch.autocast & set(names):
            watch.say(Hazard.SHARED, names[0], f"{uses[0][1]} is also {', '.join(f'{b}.{n}' for b, n in uses[1:3])}")


# inside of it ---------------------------------------------------------------------------------------------------------


class _Ops(TorchDispatchMode):
    """Operators of the forward: choices, generators, and tensors that came past the arguments."""

    def __init__(self, watch: _HazardWatch, model: nn.Module) -> None:
        super().__init__()
        self.watch = watch
        self.owned = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
        self.makers: dict[int, str] = {}
        self._weak: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        watch, kwargs = self.watch, kwargs or {}
        block = watch.block
        name = func._schema.name.rpartition("::")[2]
        leaves = tree_leaves((args, kwargs))
        if block:
            if name in DISCRETE or name == "multinomial":
                watch.say(
                    Hazard.CHOICE, block, f"{name} chooses by values: a tie may fall the other way the second time"
                )
            if any(isinstance(leaf, torch.Generator) for leaf in leaves):
                watch.say(
                    Hazard.RANDOM, block, f"{name} draws from a generator of its own, which checkpoints do not put back"
                )
            self._past_the_arguments(block, name, leaves)
        out = func(*args, **kwargs)
        if name == "_to_copy" and leaves[0].untyped_storage()._cdata in self.owned:
            self.owned.add(out.untyped_storage()._cdata)  # autocast's copy of a weight: see Hazard.SHARED
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and (key := leaf.untyped_storage()._cdata) not in self.makers:
                self.makers[key] = block
                self._weak.append(weakref.ref(leaf.untyped_storage(), self._forgets(key)))
        return out

    def _forgets(self, key: int) -> Callable[[object], None]:
        def died(_: object) -> None:
            self.makers.pop(key, None)
            self.owned.discard(key)

        return died

    def _past_the_arguments(self, block: str, name: str, leaves: list[Any]) -> None:
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                continue
            key = leaf.untyped_storage()._cdata
            maker = self.makers.get(key, block)
            if maker != block and key not in self.watch.handed[block] and key not in self.owned and leaf.requires_grad:
                where = maker or "the model around the blocks"
                self.watch.say(
                    Hazard.CAPTURED, block, f"{name} reads {list(leaf.shape)} of {where}, which is no argument of it"
                )


# findings -------------------------------------------------------------------------------------------------------------


SCHEMA: Final = "jettison.doctor_model/1"


def diagnose_model(request: ModelRequest, *, progress: Progress) -> FindingsReport:
    """Run one step of the model, or of fake tensors where a configuration says what it is, and say what was seen. Raise
    `UsageError` if there is no such model.
    """
    progress("building the model")
    loaded = load(request, fake=True)
    progress("watching a step")
    with loaded.mode if loaded.mode is not None else nullcontext():
        model = loaded.model if loaded.mode is not None else independent_copy(loaded.model)
        seen = look_for_hazards(model, loaded.batch, loss_fn=loaded.loss_fn)
    now = sorted({one.hazard for one in seen if one.now})
    verdict = ", ".join(now) if now else "none"
    rows = [("model", request.model), ("at risk now", verdict)]
    more: dict[str, Any] = {"model": request.model, "hazards": seen}
    return FindingsReport(schema=SCHEMA, facts=rows, findings=_findings(seen, request.model), more=more)


def _findings(seen: Sequence[Sighting], model: str) -> tuple[Finding, ...]:
    """Merge equal sightings of several blocks; hazards at risk now come first."""
    found = []
    for (late, hazard, what), group in groupby(sorted(seen, key=_alike), key=_alike):
        blocks = [one.block for one in group]
        where = span(blocks) if blocks != [""] else "the model around its blocks"
        claim = f"{hazard}: {where}" if late else f"{hazard}, and it is recomputed in backward: {where}"
        names = [hazard.name.lower(), *(() if late else ("verify",))]
        changes = tuple(change(f"hazard.{name}", model=model) for name in names)
        kind = FindingKind.AT_RISK_IF_RUN_AGAIN if late else FindingKind.AT_RISK_NOW
        evidence = what if not late else f"{what} (nothing runs it again in this step)"
        found.append(Finding(kind=kind, claim=claim, evidence=(evidence,), changes=changes))
    return tuple(found)


def _alike(one: Sighting) -> tuple[bool, Hazard, str]:
    return not one.now, one.hazard, one.what
