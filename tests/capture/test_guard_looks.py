"""A guard's quick look finds what its slow one does: each kind of thing that it watches, changed alone."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from jettison.capture.module_guards import ModuleGuard


class Kinds(nn.Module):
    scale = 2

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
    "a class's number, covered": lambda m: setattr(m, "scale", 3),
    "an entry that is gone": lambda m: m.table.pop("a"),
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


def doubled(module: nn.Module, args: object, output: Any) -> Any:
    return 2 * output


def _hook_on_another(module: Kinds) -> None:
    """Of all hooks in a row nothing differs."""
    module.inner._forward_hooks.clear()
    module.register_forward_hook(doubled)


BESIDE: dict[str, Callable[[Kinds], object]] = {
    "another hook": lambda m: m.register_forward_hook(lambda *_: None),
    "no hook": lambda m: m.inner._forward_hooks.clear(),
    "a hook on another module": _hook_on_another,
    "a frozen parameter": lambda m: m.inner.weight.requires_grad_(False),
    "no parameter": lambda m: m.inner.register_parameter("bias", None),
}


@pytest.mark.parametrize("kind", BESIDE)
def test_hooks_and_parameters_are_seen(kind: str) -> None:
    module = Kinds()
    module.inner.register_forward_hook(doubled)
    guard = ModuleGuard(module)
    for _ in range(2):  # the second look knows what the first one found
        assert guard.holds()
    BESIDE[kind](module)
    assert not guard.holds()


def test_an_equal_number_is_no_change() -> None:
    module = Kinds()
    module.number = 10**9
    guard = ModuleGuard(module)
    module.number = int("1000000000")  # another object
    assert guard.holds()
