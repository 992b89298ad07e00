"""Bindings that stand for ops: the very overload, the very arguments, or none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from jettison.capture.recorder import TensorRef
from jettison.runtime.recompute_code import binding

aten = torch.ops.aten
T = TensorRef(0, (4, 4), (4, 1), 0, torch.float32)

CASES: dict[str, tuple[Any, list[Any], dict[str, Any], bool]] = {
    "matmul": (aten.mm.default, [T, T], {}, True),
    "product": (aten.mul.Tensor, [T, T], {}, True),
    "a number": (aten.mul.Tensor, [T, 2], {}, True),
    "a number to add": (aten.add.Tensor, [T, 1e-6], {}, True),
    "into memory": (aten.add.out, [T, 1e-6], {"out": T}, True),
    "dims": (aten.mean.dim, [T, [-1], True], {}, True),
    "power": (aten.pow.Tensor_Scalar, [T, 2], {}, True),
    "functional": (aten.gelu.default, [T], {"approximate": "tanh"}, True),
    "norm": (aten.native_layer_norm.default, [T, [4], None, None, 1e-5], {}, True),
    "list": (aten.cat.default, [[T, T], -1], {}, True),
    "softmax": (aten._softmax.default, [T, -1, False], {}, True),
    "draw": (aten.native_dropout.default, [T, 0.5, True], {}, True),
    "other overload": (aten.div.Scalar, [T, 2.0], {}, False),  # torch.div takes a number for a tensor
    "no binding": (aten._to_copy.default, [T], {"dtype": torch.float64}, False),
    "in place": (aten.bernoulli_.float, [T, 0.5], {}, False),
    "keyword": (aten.clone.default, [T], {"memory_format": torch.contiguous_format}, False),  # an argument of no kind
}


class Log(TorchDispatchMode):
    """Ops, and their arguments, that run while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def real(value: Any) -> Any:
    if isinstance(value, TensorRef):
        return torch.rand(value.size)
    return [real(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", CASES)
def test_the_same_op_runs_on_the_same_arguments(name: str) -> None:
    func, args, kwargs, fast = CASES[name]
    found = binding(func, args, kwargs)
    assert (found is not func._op) == fast
    given, named = real(args), {key: real(value) for key, value in kwargs.items()}
    with torch.no_grad(), Log() as log:
        torch.manual_seed(0)
        result = found(*given, **named)
    assert [call[0] for call in log.calls] == [func]
    (seen,) = (call[1] for call in log.calls)
    assert all(a is b for a, b in zip(seen, given, strict=False) if isinstance(a, Tensor))
    torch.manual_seed(0)
    with torch.no_grad():
        expected = func(*given, **named)
    for a, b in zip(*([r] if isinstance(r, Tensor) else list(r) for r in (result, expected)), strict=True):
        assert torch.equal(a, b)


def test_functions_that_are_no_ops_stay_as_they_are() -> None:
    def own(x: Tensor) -> Tensor:
        return x

    assert binding(own, [T], {}) is own
