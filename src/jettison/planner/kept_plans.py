"""Plans that are kept in a file, and followed again by a later call that asks for the same.

NOTE [ What a kept plan was made for ]
Gradients do not hang on it: the model is recorded anew, and a plan names the program of each block, so that another
program never runs under it. What can be wrong is the peak that it states. So the file has, beside the plans, everything
that this peak was worked out from: versions, the processor and its switches, the budget and what else was asked, names
and shapes, every recorded program, the optimizer, and the code that a recording of the forward does not show (backwards
of functions of one's own, hooks, the step). Of a step of somebody's own it also has what its first run on fake tensors
took, op by op. Prices of kernels are not asked for again: they are the machine's.
The first fact that differs is named, and the plan is made anew. A file that is no kept plan is never written over.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import sys
import tempfile
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from jettison.capture.function_state import function_reach, is_foreign
from jettison.capture.model_trace import ModelTrace
from jettison.capture.signature import global_signature
from jettison.capture.snapshots import TENSOR_HOOKS, hooks_of
from jettison.capture.tensor_subclasses import plain
from jettison.capture.trees import tree_leaves
from jettison.errors import JettisonError, UsageError
from jettison.planner.budget import AskedBudget, Budget
from jettison.planner.optimizers import inside_of
from jettison.planner.planner import UNSEEN_BYTES, fingerprint
from jettison.progress import Progress, Shown
from jettison.solve.plan import SCHEMA, Plan
from jettison.units import format_bytes

PACKAGE: Final = __name__.partition(".")[0]
KEY: Final = "kept"
"""Of a plan's document, under which a file that is kept has the rest; readers of plans leave it alone."""
ROOM: Final = 0.02
"""Of a budget that is what the device has left: a plan for so much less is followed."""
MOST_CODE = 20_000
"""Functions and classes that are looked at."""

Facts = dict[str, str]
"""What a plan was made for, most telling first."""


@dataclass(kw_only=True)
class KeptPlans:
    """Plans of one call of `auto_checkpoint` in a file.

    Args:
        file: where; it need not be there yet.
        facts: of this call.
        asked, budget: as it was asked for, and in bytes.
        state_bytes: that the optimizer's state takes now; 0 where there is none yet.
        elsewhere_bytes: that are allocated on the device by nothing of the step.
    """

    file: Path
    facts: Facts
    asked: AskedBudget
    budget: Budget
    state_bytes: int = 0
    elsewhere_bytes: int = 0
    progress: Progress
    plans: list[Plan] = field(default_factory=list, init=False)
    planning_seconds: float = field(default=0.0, init=False)

    @classmethod
    def at(cls, where: str | os.PathLike[str], facts: Facts, **more: Any) -> KeptPlans:
        """Plans in a file, or in one of a folder, which is there or ends in a slash; each rank has its own.

        Raises:
            UsageError: the file is something else, or no file can be there.
        """
        path = Path(where)
        if path.is_dir() or str(where).endswith(("/", os.sep)):
            digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
            path = path / f"plan-{digest}.json"
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            path = path.with_name(f"{path.stem}-rank{torch.distributed.get_rank()}{path.suffix}")
        found = cls(file=path, facts=facts, **more)
        found._read()
        return found

    def _read(self) -> None:
        """Read the file; say why its plans are not followed, if they are not."""
        try:
            text = self.file.read_text(encoding="utf-8")
        except FileNotFoundError:
            return
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"plan={str(self.file)!r} cannot be read: {error}") from None
        kept = _kept_in(text, self.file)
        why = self._difference(kept, text)
        if why:
            self._say(f"the plan in {self.file} is not followed: {why}; planning anew")

    def _difference(self, kept: Mapping[str, Any], text: str) -> str:
        """The first; empty where there is none, and the plans are read."""
        before = kept["for"]
        for name in (*self.facts, *before):
            then, now = before.get(name), self.facts.get(name)
            if then != now:
                return _told(name, then, now)
        try:
            plans = [Plan.from_json(text), *(Plan.from_json(json.dumps(other)) for other in kept["others"])]
        except JettisonError as error:
            return str(error)
        needs = max(plan.predicted.peak_bytes for plan in plans) + UNSEEN_BYTES
        made_for = plans[0].budget_bytes
        if made_for != self.budget.nbytes:
            close = (1 - ROOM) * self.budget.nbytes <= made_for
            if self.asked.nbytes is not None or not close or needs > self.budget.nbytes:
                return _told("budget", format_bytes(made_for), format_bytes(self.budget.nbytes))
        for name, what in (("state_bytes", "the optimizer's state"), ("elsewhere_bytes", "memory beside the step")):
            if getattr(self, name) > kept[name] + UNSEEN_BYTES:
                return _told(what, format_bytes(kept[name]), format_bytes(getattr(self, name)))
        self.plans, self.planning_seconds = plans, float(kept["planning_seconds"])
        return ""

    def can_be_followed(self, *, makes: bool) -> bool:
        """Whether this rank can; one that is told by another what its plan is can, unless it once kept its own.

        Args:
            makes: this rank makes plans that others are told of, or its own.
        """
        return bool(self.plans) or not (makes or self.file.exists())

    def followed(self) -> list[Plan]:
        """The plans of the file, said to be followed."""
        peak = format_bytes(max(plan.predicted.peak_bytes for plan in self.plans))
        self._say(f"following the plan in {self.file}, made before for the same: predicted peak {peak}")
        return self.plans

    def write(self, plans: Sequence[Plan], *, state_bytes: int, planning_seconds: float) -> None:
        """Keep plans that were just made, all of the file or nothing. That it cannot be written stops no training."""
        kept = {
            "for": self.facts,
            "others": [plan.document() for plan in plans[1:]],
            "state_bytes": state_bytes,
            "elsewhere_bytes": self.elsewhere_bytes,
            "planning_seconds": round(planning_seconds, 3),
        }
        text = json.dumps({**plans[0].document(), KEY: kept}, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # somebody else may have written to it meanwhile
                _kept_in(self.file.read_text(encoding="utf-8"), self.file)
            handle, name = tempfile.mkstemp(dir=self.file.parent, prefix=f".{self.file.name}-")
            try:
                with open(handle, "w", encoding="utf-8") as stream:
                    stream.write(text)
                os.chmod(name, 0o666 & ~_umask())
                os.replace(name, self.file)
            except BaseException:
                os.unlink(name)
                raise
        except (OSError, UsageError) as error:
            self._say(f"the plan cannot be kept in {self.file}: {error}")

    def _say(self, text: str) -> None:
        self.progress.line(text) if isinstance(self.progress, Shown) else self.progress(text)


def _umask() -> int:
    now = os.umask(0)
    os.umask(now)
    return now


def _kept_in(text: str, file: Path) -> dict[str, Any]:
    """What a file has beside its plan.

    Raises:
        UsageError: it is no kept plan.
    """
    try:
        document = json.loads(text)
    except ValueError:
        document = None
    kept = document.get(KEY) if isinstance(document, dict) and document.get("schema") == SCHEMA else None
    kinds = {"for": dict, "others": list, "state_bytes": int, "elsewhere_bytes": int, "planning_seconds": int | float}
    if not isinstance(kept, dict) or any(not isinstance(kept.get(name), kind) for name, kind in kinds.items()):
        raise UsageError(
            f"plan={str(file)!r} is a file that auto_checkpoint did not keep a plan in, and it is not written over; "
            "expected a file of an earlier call, one that is not there yet, or a folder. A plan that you have is "
            "followed by jettison.apply(model, plan=...)"
        )
    return kept


_DIGESTS: Final = {
    "programs": "its blocks, or what is around them, run other ops, or on other shapes, than before",
    "code": "code of its modules, hooks or autograd functions has changed",
    "optimizer's code": "the optimizer's code has changed",
    "step": "the code of step= or loss_fn= has changed",
    "reached": "the step, or another rank's, reaches other parameters than before",
    "levels": "the step takes other memory, op by op, than before",
}


def _told(name: str, then: str | None, now: str | None) -> str:
    if name in _DIGESTS:
        return _DIGESTS[name]

    def short(text: str | None) -> str:
        return "none" if text is None else text if len(text) <= 120 else f"{text[:117]}..."

    return f"{name} was {short(then)} and is {short(now)}"


@dataclass(frozen=True, kw_only=True)
class Keeping:
    """What ``plan=`` of `auto_checkpoint` asks for.

    Args:
        options: of the call, beside what a step shows.
    """

    where: str | os.PathLike[str]
    asked: AskedBudget
    options: Mapping[str, Any]

    def opened(
        self,
        budget: Budget,
        traces: Sequence[ModelTrace],
        models: Sequence[nn.Module],
        batches: Any,
        optimizer: torch.optim.Optimizer | None,
        functions: Sequence[Any],
        progress: Progress,
        levels: Sequence[tuple[str, Sequence[int]]] | None = None,
        more: Mapping[str, str] | None = None,
    ) -> KeptPlans:
        """The file for a call, as it has become.

        Args:
            levels: of a run of the step on fake tensors, where it is somebody's own.
            more: facts; of each a digest is kept.

        Raises:
            UsageError: the file is something else.
        """
        facts = {**machine_facts(), **step_facts(traces, models, batches, optimizer, functions, **self.options)}
        facts |= {name: _digest(value) for name, value in (more or {}).items()}
        if levels is not None:
            facts["levels"] = _digest([(name, list(stretch)) for name, stretch in levels])
        return KeptPlans.at(
            self.where,
            facts,
            asked=self.asked,
            budget=budget,
            state_bytes=bytes_of_state(optimizer),
            elsewhere_bytes=max((trace.loop.elsewhere_bytes for trace in traces), default=0),
            progress=progress,
        )


# what it was made for -------------------------------------------------------------------------------------------------


def machine_facts() -> Facts:
    """Versions, the processor, accelerators, and switches."""
    cuda = torch.cuda.is_available()
    devices = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())] if cuda else []
    return {
        "jettison": f"{sys.modules[PACKAGE].__version__} ({_own_code()})",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": f"{_processor()}, {torch.backends.cpu.get_cpu_capability()}",
        "accelerators": ", ".join(devices),
        "switches": repr(global_signature()),
    }


@functools.cache
def _own_code() -> str:
    """Digest of Jettison's own files: a version may be one that is worked on."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:8]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # another system
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def step_facts(
    traces: Iterable[ModelTrace],
    models: Sequence[nn.Module],
    batches: Any,
    optimizer: torch.optim.Optimizer | None,
    functions: Sequence[Any],
    **asked: Any,
) -> Facts:
    """Of what is planned.

    Args:
        traces: of the models that run with gradients.
        models: all of the step's.
        functions: of the step and its loss.
        asked: whatever else was.
    """
    traces = list(traces)
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    code = _Code()
    for model in models:
        code.model(model)
    step = _Code()
    for function in functions:
        step.value(function)
    rules = _Code()
    for one in inside_of(optimizer) if optimizer is not None else ():
        rules.value(type(one))
    return {
        **{name: str(value) for name, value in asked.items()},
        "ranks": str(ranks),
        "model": " ".join(f"{type(model).__qualname__}{'' if model.training else ' in eval()'}" for model in models),
        "parameters": " ".join(fingerprint(trace) for trace in traces),
        "buffers": _digest([(n, tuple(b.shape), str(b.dtype)) for m in models for n, b in m.named_buffers()]),
        "batch": repr([_described(leaf) for leaf in tree_leaves(batches)]),
        "loop": " ".join(repr(replace(trace.loop, elsewhere_bytes=0)) for trace in traces),
        "optimizer": _optimizer(optimizer),
        "optimizer's code": rules.digest(),
        "programs": _digest(list(map(_programs, traces))),
        "step": step.digest(),
        "code": code.digest(),
    }


def bytes_of_state(optimizer: torch.optim.Optimizer | None) -> int:
    """Of an optimizer's tensors beside the parameters."""
    if optimizer is None:
        return 0
    leaves = tree_leaves([dict(state) for state in optimizer.state.values() if isinstance(state, dict)])
    return sum(plain(leaf).nbytes for leaf in leaves if isinstance(leaf, Tensor) and leaf.layout is torch.strided)


def _programs(trace: ModelTrace) -> Any:
    calls = [(call.name, trace.program(call).digest(), trace.classes[call.class_key].stood_in) for call in trace.calls]
    return trace.root.program.digest(), calls, list(map(_programs, trace.more))


def _described(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{leaf.dtype} {tuple(leaf.shape)}{' with gradients' if leaf.requires_grad else ''}"
    return repr(leaf) if isinstance(leaf, bool | int | float | str | None) else type(leaf).__qualname__


def _optimizer(optimizer: torch.optim.Optimizer | None) -> str:
    """Numbers of it only by whether they are 0: a learning rate moves, and no bytes hang on it."""
    if optimizer is None:
        return "none"
    found = []
    for one in inside_of(optimizer):
        for group in one.param_groups:
            options = {name: _kind_of(value) for name, value in sorted(group.items()) if name != "params"}
            shapes = _digest([(tuple(p.shape), str(p.dtype), p.requires_grad) for p in group["params"]])
            found.append(f"{type(one).__qualname__} {options} over {len(group['params'])} ({shapes})")
    return "; ".join(found)


def _kind_of(value: Any) -> str:
    if isinstance(value, bool | str | None):
        return repr(value)
    if isinstance(value, int | float):
        return "0" if value == 0 else "number"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_kind_of, value))}]"
    return type(value).__qualname__


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, default=str).encode()).hexdigest()[:16]


class _Code:
    """Digest of functions and classes, and of those that they name, in files that belong to no large library; of such
    a library its version.
    """

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._held: list[Any] = []
        self._found: list[Any] = []

    def digest(self) -> str:
        """Of all that was found, in the order in which it was."""
        return _digest(self._found)

    def model(self, model: nn.Module) -> None:
        """Its modules' classes, and hooks on them and on their parameters."""
        for module in model.modules():
            self.value(type(module))
            self.value(vars(module).get("forward"))
            for name, table in vars(module).items():
                if name.endswith("_hooks") and isinstance(table, dict):
                    self._several(table.values())
        for parameter in model.parameters():
            for name in TENSOR_HOOKS:
                self._several((hooks_of(parameter, name) or {}).values())

    def _several(self, values: Iterable[Any]) -> None:
        for value in values:
            self.value(value)

    def value(self, value: Any) -> None:
        """A function, a method, a class, or what is called like one."""
        waiting = [value]
        while waiting and len(self._seen) < MOST_CODE:
            one = waiting.pop()
            if isinstance(one, types.MethodType | staticmethod | classmethod):
                one = one.__func__
            if isinstance(one, property):
                waiting += [one.fget, one.fset]
                continue
            if hasattr(one, "func") and hasattr(one, "keywords"):  # functools.partial
                waiting += [one.func, *one.args, *one.keywords.values()]
                continue
            if isinstance(one, types.FunctionType):
                waiting += reversed(self._function(one))
            elif isinstance(one, type):
                waiting += reversed(self._class(one))
            elif callable(one) and not isinstance(one, nn.Module | types.BuiltinFunctionType):
                waiting.append(type(one))

    def _new(self, one: Any) -> bool:
        if id(one) in self._seen:
            return False
        self._seen.add(id(one))
        self._held.append(one)
        return True

    def _class(self, cls: type) -> list[Any]:
        found: list[Any] = []
        for base in cls.__mro__:
            if not self._new(base):
                continue
            if is_foreign(base.__module__):
                self._library(base.__module__)
                continue
            self._found.append(base.__qualname__)
            found += [value for value in vars(base).values() if not isinstance(value, type) or value is not base]
        return found

    def _function(self, function: types.FunctionType) -> list[Any]:
        if not self._new(function):
            return []
        if is_foreign(function.__module__):
            self._library(function.__module__)
            return []
        self._found.append(_code(function.__code__))
        reached = list(function_reach(function))
        self._found.append([_kind_of(value) for value in reached if isinstance(value, bool | int | float | str)])
        return reached

    def _library(self, module: str) -> None:
        name = module.partition(".")[0]
        version = getattr(sys.modules.get(name), "__version__", None)
        if isinstance(version, str) and [name, version] not in self._found:
            self._found.append([name, version])


def _code(code: types.CodeType) -> Any:
    """Without the lines and the file that it is in."""
    constants = list(map(_constant, code.co_consts))
    return [code.co_name, code.co_code.hex(), list(code.co_names), list(code.co_varnames), constants]


def _constant(value: Any) -> Any:
    if isinstance(value, types.CodeType):
        return _code(value)
    return sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value)
