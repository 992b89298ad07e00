"""A guard's quick look finds what its slow one does: each kind of thing that it watches, changed alone."""

from collections.abc import Callable

import pytest
from torch import nn

from jettison.capture.guard import ModuleGuard


class Kinds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.number = 1
        self.items = [1, 2]
        self.table = {"a": 1}
        self.inner = nn.Linear(2, 2)
        factor = 2

        def closed(more: int = 0) -> int:
            return factor + more

        self.closed = closed


def _set_cell(module: Kinds) -> None:
    module.closed.__closure__[0].cell_contents = 3  # type: ignore[index]


CHANGES: dict[str, Callable[[Kinds], object]] = {
    "a number": lambda m: setattr(m, "number", 2),
    "an item of a list": lambda m: m.items.__setitem__(0, 5),
    "the length of a list": lambda m: m.items.append(3),
    "an entry of a dict": lambda m: m.table.__setitem__("b", 1),
    "a cell": _set_cell,
    "an instance's forward": lambda m: setattr(m.inner, "forward", lambda x: x),
    "a submodule": lambda m: setattr(m, "inner", nn.Linear(2, 2)),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_each_kind_of_change_is_seen(kind: str) -> None:
    module = Kinds()
    guard = ModuleGuard(module)
    assert guard.holds() and not guard.changed()
    CHANGES[kind](module)
    assert guard.changed()
    assert not guard.holds()


def test_an_equal_number_is_no_change() -> None:
    module = Kinds()
    module.number = 10**9
    guard = ModuleGuard(module)
    module.number = int("1000000000")  # another object
    assert guard.holds()
