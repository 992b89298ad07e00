"""Base classes of integrations, which replace a trainer's method to see batches before their steps."""

from __future__ import annotations

import contextlib
import copy
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from typing import Any, ClassVar, Final, SupportsIndex

from jettison.core.errors import UsageError
from jettison.core.objects import summary
from jettison.core.progress import in_a_trainer
from jettison.planner.budget import AskedBudget
from jettison.planner.handle import Applied, HandleReport, figures
from jettison.planner.peak_watch import MemoryReport

_PLAIN: Final = (int, float, complex, str, bytes, type(None))


class Planned:
    """Plan made at a trainer's first batch; ``applied`` is None before. Raise `UsageError` if the budget is invalid.

    Args:
        memory_budget: as in `jettison.auto_checkpoint`.
        options: of `jettison.auto_checkpoint`.
    """

    def __init__(self, memory_budget: str | SupportsIndex, options: dict[str, Any]) -> None:
        self._asked = AskedBudget.of(memory_budget)  # an invalid budget raises here, not at the first batch
        self.memory_budget = memory_budget
        self.options = {"progress": in_a_trainer, **options}
        self.applied: Applied | None = None

    def __repr__(self) -> str:
        text = f"budget {self._asked}, no batch so far" if self.applied is None else figures(self.applied)
        return summary(self, text)

    def report(self) -> HandleReport:
        """See `jettison.planner.handle.Applied.report`; a `UsageError` before the first batch."""
        return self._there("report").report()

    def memory(self) -> MemoryReport | None:
        """See `jettison.planner.handle.Applied.memory`; a `UsageError` before the first batch."""
        return self._there("memory").memory()

    def _there(self, asked: str) -> Applied:
        if self.applied is None:
            raise UsageError(
                f"got {asked}() before there is a plan; it is made at the trainer's first batch: call it during or "
                "after training"
            )
        return self.applied


class TrainerPlan(Planned, ABC):
    """Trainer that is planned at its first batch."""

    method: ClassVar[str]
    """Name of the trainer's method that takes a batch and runs forward and backward."""

    def __init__(self, trainer: Any, memory_budget: str | SupportsIndex, options: dict[str, Any]) -> None:
        super().__init__(memory_budget, options)
        if not callable(getattr(trainer, self.method, None)):
            raise UsageError(f"got a {type(trainer).__name__} as a trainer; expected one that has {self.method}()")
        self.trainer = trainer
        self.own = getattr(trainer, self.method)
        self.had_own = self.method in vars(trainer)  # set on the instance by other code
        setattr(trainer, self.method, self._step)

    @abstractmethod
    def plan(self, *args: Any, **kwargs: Any) -> Applied:
        """Plan the trainer's model for a step with these arguments, and apply the plan."""

    def batch_of(self, *_args: Any, **_kwargs: Any) -> Any:
        """Select the batch among the method's arguments, for the plan's step; None if all batches have one shape."""
        return None

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        if self.applied is None:
            self.applied = self.plan(*args, **kwargs)
        batch = self.batch_of(*args, **kwargs)
        if batch is not None:
            self.applied.expect(batch)
        return self.own(*args, **kwargs)

    def remove(self) -> None:
        """Remove the plan, and restore the trainer's method."""
        if self.applied is not None:
            self.applied.remove()
        if vars(self.trainer).get(self.method) != self._step:
            return  # other code has replaced it since
        if self.had_own:
            setattr(self.trainer, self.method, self.own)
        else:
            delattr(self.trainer, self.method)


@contextlib.contextmanager
def unmoved(owner: Any) -> Iterator[None]:
    """Restore an object's attributes and plain containers: a dry run then counts as no step and logs nothing."""
    attributes = dict(vars(owner))
    tables = [v for v in attributes.values() if isinstance(v, dict | list | set | deque) and _is_plain(v)]
    before = copy.deepcopy(tables)
    try:
        yield
    finally:
        vars(owner).clear()
        vars(owner).update(attributes)
        for table, was in zip(tables, before, strict=True):
            table.clear()
            (table.update if isinstance(table, dict | set) else table.extend)(was)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return all(map(_is_plain, value)) if isinstance(value, list | set | tuple | deque) else isinstance(value, _PLAIN)
