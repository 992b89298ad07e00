"""Plans kept in a file, and reused by a later call with the same inputs.

NOTE [ What a kept plan was made for ]
Gradients do not depend on a kept plan: the model is recorded anew, and a plan names the program of each block, so it
never applies to another program. Only the stated peak could be wrong. So the file also stores every input of that peak:
versions, the processor and its switches, the budget and other arguments, names and shapes, every recorded program, the
optimizer, and code that a recording of the forward does not show (custom backward functions, hooks, the step). For a
custom step it also stores the memory of its first run on fake tensors, op by op. Prices of kernels are not compared:
they belong to the machine.
The first difference is logged, and a new plan is made. A file that is no kept plan is never overwritten.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from jettison.capture.bytecode_names import function_reach, is_foreign
from jettison.capture.model_trace import ModelTrace
from jettison.capture.pytrees import tree_leaves
from jettison.capture.signature import global_signature
from jettison.capture.state_kinds import TENSOR_HOOKS, hooks_of
from jettison.core.errors import JettisonError, UsageError, warn
from jettison.core.files import read_text, write_whole
from jettison.core.process import cpu_name
from jettison.core.progress import Progress, Shown
from jettison.core.units import format_bytes
from jettison.dryrun.counter import static_tensors, unique_bytes
from jettison.planner.budget import AskedBudget, Budget
from jettison.planner.planner import UNSEEN_BYTES, fingerprint
from jettison.planner.readiness import inside_of
from jettison.solve.plan import SCHEMA, Plan

KEY: Final = "kept"
"""Key of a plan's document under which a kept file has the other facts; readers of plans ignore it."""
ROOM: Final = 0.02
"""Tolerance for a budget of what the device has left: a plan for at most so much less is reused."""
PACKAGE: Final = __name__.partition(".")[0]
MOST_CODE: Final = 20_000
"""Most functions and classes that are read."""

Facts = dict[str, str]
"""Facts that a plan was made for, the most informative first, with the text for a difference."""


@dataclass(kw_only=True)
class KeptPlans:
    """Plans of one call of `auto_checkpoint` in a file, which need not exist. ``state_bytes``: current bytes of the
    optimizer's state, 0 if there is none yet; ``elsewhere_bytes``: on the device, outside the step.
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

    def _read(self) -> None:
        """Read the file, and log why its plans are not reused, if they are not."""
        if not self.file.exists():
            return
        text = read_text(self.file, f"plan={str(self.file)!r}")
        if why := self._difference(_kept_in(text, self.file), text):
            self._log(f"the plan in {self.file} is not reused: {why}; planning anew")

    def _difference(self, kept: Mapping[str, Any], text: str) -> str:
        """The first difference; empty if there is none, and the plans are read."""
        then, now = kept["for"], self.facts
        for name in (*now, *then):
            if then.get(name) != now.get(name):
                return told(name, then.get(name), now.get(name))
        try:
            plans = [Plan.from_json(text), *(Plan.from_json(json.dumps(other)) for other in kept["others"])]
        except JettisonError as error:
            return str(error)
        needs = max(plan.predicted.peak_bytes for plan in plans) + UNSEEN_BYTES
        made_for = plans[0].budget_bytes
        if made_for != self.budget.nbytes:
            close = (1 - ROOM) * self.budget.nbytes <= made_for
            if self.asked.nbytes is not None or not close or needs > self.budget.nbytes:
                return told("budget", format_bytes(made_for), format_bytes(self.budget.nbytes))
        for name, what in (("state_bytes", "the optimizer's state"), ("elsewhere_bytes", "memory outside the step")):
            if getattr(self, name) > kept[name] + UNSEEN_BYTES:
                return told(what, format_bytes(kept[name]), format_bytes(getattr(self, name)))
        self.plans, self.planning_seconds = plans, float(kept["planning_seconds"])
        return ""

    def followed(self) -> list[Plan]:
        """The plans of the file, logged as reused."""
        peak = format_bytes(max(plan.predicted.peak_bytes for plan in self.plans))
        self._log(f"reusing the plan in {self.file}: predicted peak {peak}")
        return self.plans

    def write(self, plans: Sequence[Plan], *, state_bytes: int, planning_seconds: float) -> None:
        """Keep new plans, in an atomic write. A failure to write is a warning."""
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
            with contextlib.suppress(FileNotFoundError):  # another process may have replaced it
                _kept_in(self.file.read_text(encoding="utf-8"), self.file)
            write_whole(self.file, text)
        except (OSError, UsageError) as error:
            warn(f"the plan cannot be kept in {self.file}: {error}")

    def _log(self, text: str) -> None:
        self.progress.line(text) if isinstance(self.progress, Shown) else self.progress(text)


def _kept_in(text: str, file: Path) -> dict[str, Any]:
    """Facts in a kept file besides its plan. Raise `UsageError` if it is no kept plan."""
    try:
        document = json.loads(text)
    except ValueError:
        document = None
    kept = document.get(KEY) if isinstance(document, dict) and document.get("schema") == SCHEMA else None
    kinds = {"for": dict, "others": list, "state_bytes": int, "elsewhere_bytes": int, "planning_seconds": int | float}
    if not isinstance(kept, dict) or any(not isinstance(kept.get(name), kind) for name, kind in kinds.items()):
        raise UsageError(
            f"plan={str(file)!r} is a file that auto_checkpoint did not keep a plan in, and it is not overwritten; "
            "expected a file of an earlier call, a new file, or a folder. Apply a plan of your own with "
            "jettison.apply(model, plan=...)"
        )
    return kept


@dataclass(frozen=True, kw_only=True)
class Keeping:
    """The ``plan=`` argument of `auto_checkpoint`: plans in a file, or in a file of a folder that exists or ends in a
    slash; each rank has its own file. ``options``: arguments of the call that a step does not show.
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
        """Open the file for a call. ``levels``: of a run of the step on fake tensors, for a custom step; ``more``:
        further facts, of which digests are kept. Raise `UsageError` if the file is not a kept plan.
        """
        facts = {**machine_facts(), **step_facts(traces, models, batches, optimizer, functions, **self.options)}
        facts |= {name: digest(value) for name, value in (more or {}).items()}
        if levels is not None:
            facts["levels"] = digest([(name, list(values)) for name, values in levels])
        path = Path(self.where)
        if path.is_dir() or str(self.where).endswith(("/", os.sep)):
            name = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
            path = path / f"plan-{name}.json"
        if torch.distributed.is_initialized():
            path = path.with_name(f"{path.stem}-rank{torch.distributed.get_rank()}{path.suffix}")
        found = KeptPlans(
            file=path,
            facts=facts,
            asked=self.asked,
            budget=budget,
            state_bytes=bytes_of_state(optimizer),
            elsewhere_bytes=max((trace.loop.elsewhere_bytes for trace in traces), default=0),
            progress=progress,
        )
        found._read()
        return found


# facts ----------------------------------------------------------------------------------------------------------------
#
# Values of tensors are not among them, since plans do not depend on them.


_DIGESTS: Final = {
    "programs": "its blocks, or what is around them, run other ops, or on other shapes, than before",
    "code": "code of its modules, hooks or autograd functions has changed",
    "optimizer's code": "the optimizer's code has changed",
    "step": "the code of step= or loss_fn= has changed",
    "reached": "the step, or another rank's, reaches other parameters than before",
    "levels": "the step takes other memory, op by op, than before",
}


def told(name: str, then: str | None, now: str | None) -> str:
    if name in _DIGESTS:
        return _DIGESTS[name]

    def short(text: str | None) -> str:
        return "none" if text is None else text if len(text) <= 120 else f"{text[:117]}..."

    return f"{name} was {short(then)} and is {short(now)}"


def machine_facts() -> Facts:
    devices = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count()) if torch.cuda.is_available()]
    return {
        "jettison": f"{sys.modules[PACKAGE].__version__} ({_own_code()})",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": f"{cpu_name()}, {torch.backends.cpu.get_cpu_capability()}",
        "accelerators": ", ".join(devices),
        "switches": repr(global_signature()),
    }


@functools.cache
def _own_code() -> str:
    """Digest of Jettison's own files, since a development version may change."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:8]


def step_facts(
    traces: Iterable[ModelTrace],
    models: Sequence[nn.Module],
    batches: Any,
    optimizer: torch.optim.Optimizer | None,
    functions: Sequence[Any],
    **asked: Any,
) -> Facts:
    """Facts of a model, its batch and its loop: ``traces`` of the models that run with gradients, all ``models`` of the
    step, ``functions`` of the step and its loss, and other arguments.
    """
    traces = list(traces)
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    code, step, rules = CodeDigest(), CodeDigest(), CodeDigest()
    for model in models:
        code.model(model)
    for function in functions:
        step.value(function)
    for one in inside_of(optimizer) if optimizer is not None else ():
        rules.value(type(one))
    return {
        **{name: str(value) for name, value in asked.items()},
        "ranks": str(ranks),
        "model": " ".join(f"{type(model).__qualname__}{'' if model.training else ' in eval()'}" for model in models),
        "parameters": " ".join(fingerprint(trace) for trace in traces),
        "buffers": digest([(n, tuple(b.shape), str(b.dtype)) for m in models for n, b in m.named_buffers()]),
        "batch": repr([_described(leaf) for leaf in tree_leaves(batches)]),
        "loop": " ".join(repr(replace(trace.loop, elsewhere_bytes=0)) for trace in traces),
        "optimizer": _optimizer(optimizer),
        "optimizer's code": rules.digest(),
        "programs": digest(list(map(_programs, traces))),
        "step": step.digest(),
        "code": code.digest(),
    }


def bytes_of_state(optimizer: torch.optim.Optimizer | None) -> int:
    """Bytes of an optimizer's state, without the parameters."""
    return unique_bytes(static_tensors(nn.Module(), (), optimizer))


def _programs(trace: ModelTrace) -> Any:
    calls = [(call.name, trace.program(call).digest(), trace.classes[call.class_key].stood_in) for call in trace.calls]
    return trace.root.program.digest(), calls, list(map(_programs, trace.more))


def _described(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{leaf.dtype} {tuple(leaf.shape)}{' with gradients' if leaf.requires_grad else ''}"
    return repr(leaf) if isinstance(leaf, bool | int | float | str | None) else type(leaf).__qualname__


def _optimizer(optimizer: torch.optim.Optimizer | None) -> str:
    """Numbers of it only by whether they are 0: learning rates change, and no bytes depend on them."""
    if optimizer is None:
        return "none"
    found = []
    for one in inside_of(optimizer):
        for group in one.param_groups:
            options = {name: _kind_of(value) for name, value in sorted(group.items()) if name != "params"}
            shapes = digest([(tuple(p.shape), str(p.dtype), p.requires_grad) for p in group["params"]])
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


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, default=str).encode()).hexdigest()[:16]


class CodeDigest:
    """Digest of functions, classes and what they reference; of a large library only the version."""

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}
        self._found: list[Any] = []

    def digest(self) -> str:
        return digest(self._found)

    def model(self, model: nn.Module) -> None:
        """Add its modules' classes, and hooks on them and on their parameters."""
        for module in model.modules():
            self.value(type(module))
            self.value(vars(module).get("forward"))
            for name, table in vars(module).items():
                if name.endswith("_hooks") and isinstance(table, dict):
                    for hook in table.values():
                        self.value(hook)
        for parameter in model.parameters():
            for name in TENSOR_HOOKS:
                for hook in (hooks_of(parameter, name) or {}).values():
                    self.value(hook)

    def value(self, value: Any) -> None:
        """Add a function, a method, a class, or a callable object."""
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

    def _reads(self, one: Any, module: str) -> bool:
        """Whether it is new, and of no large library. Of such a library the version is added."""
        if id(one) in self._seen:
            return False
        self._seen[id(one)] = one
        name = module.partition(".")[0]
        version = getattr(sys.modules.get(name), "__version__", None) if is_foreign(module) else None
        if isinstance(version, str) and [name, version] not in self._found:
            self._found.append([name, version])
        return not is_foreign(module)

    def _class(self, cls: type) -> list[Any]:
        found: list[Any] = []
        for base in (base for base in cls.__mro__ if self._reads(base, base.__module__)):
            self._found.append(base.__qualname__)
            found += [value for value in vars(base).values() if value is not base]
        return found

    def _function(self, function: types.FunctionType) -> list[Any]:
        if not self._reads(function, function.__module__):
            return []
        self._found.append(_code(function.__code__))
        reached = list(function_reach(function))
        self._found.append([_kind_of(value) for value in reached if isinstance(value, bool | int | float | str)])
        return reached


def _code(value: Any) -> Any:
    """A code object without line numbers and file; of another constant its text."""
    if isinstance(value, types.CodeType):
        constants = list(map(_code, value.co_consts))
        return [value.co_name, value.co_code.hex(), list(value.co_names), list(value.co_varnames), constants]
    return sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value)
