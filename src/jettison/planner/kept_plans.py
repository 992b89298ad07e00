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
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from jettison.capture.model_trace import ModelTrace
from jettison.core.errors import JettisonError, UsageError
from jettison.core.files import write_whole
from jettison.core.progress import Progress, Shown
from jettison.core.units import format_bytes
from jettison.planner.budget import AskedBudget, Budget
from jettison.planner.plan_facts import Facts, bytes_of_state, digest, first_difference, machine_facts, step_facts, told
from jettison.planner.planner import UNSEEN_BYTES
from jettison.solve.plan import SCHEMA, Plan, read_text

KEY: Final = "kept"
"""Key of a plan's document under which a kept file has the other facts; readers of plans ignore it."""
ROOM: Final = 0.02
"""Tolerance for a budget of what the device has left: a plan for at most so much less is reused."""


@dataclass(kw_only=True)
class KeptPlans:
    """Plans of one call of `auto_checkpoint` in a file.

    Args:
        file: its path; it need not exist.
        facts: of this call.
        asked, budget: as requested, and in bytes.
        state_bytes: current bytes of the optimizer's state; 0 if there is none yet.
        elsewhere_bytes: bytes on the device that do not belong to the step.
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
            self._say(f"the plan in {self.file} is not reused: {why}; planning anew")

    def _difference(self, kept: Mapping[str, Any], text: str) -> str:
        """The first difference; empty if there is none, and the plans are read."""
        if why := first_difference(kept["for"], self.facts):
            return why
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
        self._say(f"reusing the plan in {self.file}: predicted peak {peak}")
        return self.plans

    def write(self, plans: Sequence[Plan], *, state_bytes: int, planning_seconds: float) -> None:
        """Keep new plans, in an atomic write. A failure to write does not stop training."""
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
            self._say(f"the plan cannot be kept in {self.file}: {error}")

    def _say(self, text: str) -> None:
        self.progress.line(text) if isinstance(self.progress, Shown) else self.progress(text)


def _kept_in(text: str, file: Path) -> dict[str, Any]:
    """Facts in a kept file besides its plan.

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
            f"plan={str(file)!r} is a file that auto_checkpoint did not keep a plan in, and it is not overwritten; "
            "expected a file of an earlier call, a new file, or a folder. Apply a plan of your own with "
            "jettison.apply(model, plan=...)"
        )
    return kept


@dataclass(frozen=True, kw_only=True)
class Keeping:
    """The ``plan=`` argument of `auto_checkpoint`: plans in a file, or in a file of a folder that exists or ends in a
    slash; each rank has its own file.

    Args:
        options: arguments of the call that a step does not show.
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
        """Open the file for a call.

        Args:
            levels: of a run of the step on fake tensors, for a custom step.
            more: further facts; a digest of each is kept.

        Raises:
            UsageError: the file is not a kept plan.
        """
        facts = {**machine_facts(), **step_facts(traces, models, batches, optimizer, functions, **self.options)}
        facts |= {name: digest(value) for name, value in (more or {}).items()}
        if levels is not None:
            facts["levels"] = digest([(name, list(stretch)) for name, stretch in levels])
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
