"""What integrations share: a method of a trainer is stood in for, so that its batches are seen before their steps."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

from jettison.planner.handle import Applied
from jettison.units import Bytes


class TrainerPlan(ABC):
    """What becomes of a trainer: ``applied`` is there once its first batch was."""

    method: ClassVar[str]
    """Of the trainer: called with every batch, runs forward and backward."""

    def __init__(self, trainer: Any, memory_budget: str | Bytes, options: dict[str, Any]) -> None:
        self.trainer, self.memory_budget, self.options = trainer, memory_budget, options
        self.applied: Applied | None = None
        self.own = getattr(trainer, self.method)
        self.had_own = self.method in vars(trainer)  # somebody had set one on it
        setattr(trainer, self.method, self._step)

    @abstractmethod
    def plan(self, *args: Any, **kwargs: Any) -> Applied:
        """The trainer's model under its plan, for a step of these arguments."""

    def batch_of(self, *_args: Any, **_kwargs: Any) -> Any:
        """What of these arguments is the batch that the plan's step is given; None where all have one shape."""
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
    """The owner has other attributes meanwhile."""
    before = {name: getattr(owner, name) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
