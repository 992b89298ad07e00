"""What integrations share: a method of a trainer is stood in for, so that its batches are seen before their steps."""

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
from jettison.planner.handle import Applied, figures
from jettison.planner.handle_report import HandleReport
from jettison.planner.watch import MemoryReport

_PLAIN: Final = (int, float, complex, str, bytes, type(None))


class Planned:
    """A plan that is made when a trainer's first batch comes: ``applied`` is there from then on.

    Args:
        memory_budget: as in `jettison.auto_checkpoint`.
        options: of `jettison.auto_checkpoint`.

    Raises:
        UsageError: the budget cannot be read.
    """

    def __init__(self, memory_budget: str | SupportsIndex, options: dict[str, Any]) -> None:
        self._asked = AskedBudget.of(memory_budget)  # refused here, not when the first batch comes
        self.memory_budget = memory_budget
        self.options = {"progress": in_a_trainer, **options}
        self.applied: Applied | None = None

    def __repr__(self) -> str:
        text = f"budget {self._asked}, no batch so far" if self.applied is None else figures(self.applied)
        return summary(self, text)

    def report(self) -> HandleReport:
        """See `jettison.planner.handle.Applied.report`.

        Raises:
            UsageError: no batch came so far, and there is no plan.
        """
        return self._there("report").report()

    def memory(self) -> MemoryReport | None:
        """See `jettison.planner.handle.Applied.memory`.

        Raises:
            UsageError: no batch came so far, and there is no plan.
        """
        return self._there("memory").memory()

    def _there(self, asked: str) -> Applied:
        if self.applied is None:
            raise UsageError(
                f"got {asked}() before there is a plan; it is made when the trainer's first batch comes: ask while it "
                "trains, or afterwards"
            )
        return self.applied


class TrainerPlan(Planned, ABC):
    """A trainer that is planned at its first batch."""

    method: ClassVar[str]
    """The trainer's method that is called with every batch and runs forward and backward."""

    def __init__(self, trainer: Any, memory_budget: str | SupportsIndex, options: dict[str, Any]) -> None:
        super().__init__(memory_budget, options)
        if not callable(getattr(trainer, self.method, None)):
            raise UsageError(f"got a {type(trainer).__name__} as a trainer; expected one that has {self.method}()")
        self.trainer = trainer
        self.own = getattr(trainer, self.method)
        self.had_own = self.method in vars(trainer)  # somebody had set one on it
        setattr(trainer, self.method, self._step)

    @abstractmethod
    def plan(self, *args: Any, **kwargs: Any) -> Applied:
        """The trainer's model under its plan, for a step of these arguments."""

    def batch_of(self, *_args: Any, **_kwargs: Any) -> Any:
        """Select the batch among a method's arguments, for the plan's step; None where all have one shape."""
        return None

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        if self.applied is None:
            self.applied = self.plan(*args, **kwargs)
        batch = self.batch_of(*args, **kwargs)
        if batch is not None:
            self.applied.expect(batch)
        return self.own(*args, **kwargs)

    def remove(self) -> None:
        """The trainer trains plainly again."""
        if self.applied is not None:
            self.applied.remove()
        if vars(self.trainer).get(self.method) != self._step:
            return  # somebody has set another one meanwhile
        if self.had_own:
            setattr(self.trainer, self.method, self.own)
        else:
            delattr(self.trainer, self.method)


@contextlib.contextmanager
def holding(owner: Any, **attributes: Any) -> Iterator[None]:
    """The owner has other attributes meanwhile. What was its class's is so again."""
    before = {name: getattr(owner, name) for name in attributes}
    of_class = {name for name in attributes if name not in vars(owner) and hasattr(type(owner), name)}
    try:
        for name, value in attributes.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            if name in of_class:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


@contextlib.contextmanager
def unmoved(owner: Any) -> Iterator[None]:
    """The owner's attributes, and what those of numbers and words hold, are as before when this ends: a dry run is no
    step, and none of what is logged.
    """
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
