"""A fake mode that remembers answers gives those that torch's own gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import fully_shard  # noqa: F401, which has operators of its own

from jettison.capture.fake_tensor_cache import UNKNOWN, QuickFakeMode, call_key

aten, fsdp = torch.ops.aten, torch.ops.fsdp
CALLS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "product": lambda a, b: a @ b,
    "promotion": lambda a, b: a.half() + b.t(),
    "a number": lambda a, b: a * 2,
    "a fraction": lambda a, b: a * 2.0,
    "view": lambda a, b: a.view(3, 2, 4),
    "transposed": lambda a, b: a.t(),
    "an offset": lambda a, b: b[2:, 1:],
    "strided": lambda a, b: aten.as_strided.default(b, [2, 2], [6, 1], 3),
    "in place": lambda a, b: a.add_(1),
    "several": lambda a, b: aten.native_layer_norm.default(a, [4], None, None, 1e-5),
    "a list": lambda a, b: torch.cat([a, b.t()]),
    "made": lambda a, b: torch.empty(3, dtype=torch.int64),
    "in a result": lambda a, b: torch.mul(a, 2, out=a),
    "in another result": lambda a, b: torch.mul(a, 2, out=b.t()),
    "in a result of another size": lambda a, b: torch.mul(a, 2, out=torch.empty(0)),
    "unsafe view": lambda a, b: aten._unsafe_view.default(a, [3, 8]),
    "of a view": lambda a, b: b[2:].exp(),
    "in place of a view": lambda a, b: b[2:].mul_(2),
    "in a view as result": lambda a, b: torch.exp(a[:2], out=b[2:, :4]),
    "indices": lambda a, b: aten.embedding.default(a, INDICES),
    "a real one first": lambda a, b: torch.cat([REAL, a]),
    "a real one in place": lambda a, b: REAL.clone().add_(a[0, 0]),
    "drawn": lambda a, b: torch.rand_like(a),
    "some left out": lambda a, b: aten.native_layer_norm_backward.default(
        a, a, [4], a[:, :1], a[:, :1], None, None, [True, False, False]
    ),
    "gathered": lambda a, b: fsdp.all_gather_copy_in.default([a.view(24)[:12], a[:1, 0]], b.view(24), [12, 1], 13, 0),
    "gathered apart": lambda a, b: fsdp.split_with_sizes_copy.default(
        a.view(2, 12), [4, 8], 1, out=[b.view(24)[:8].view(2, 4), b.view(24)[8:].view(2, 8)]
    ),
    "to be scattered": lambda a, b: fsdp.chunk_cat.default([a, a[:3]], 0, 2, out=torch.empty(2, 20)),
}


INDICES, REAL = torch.tensor([[0, 1], [2, 0]]), torch.ones(2, 4)


def told(mode: FakeTensorMode, call: Callable[[Tensor, Tensor], Any]) -> list[Any]:
    """What a call gives, and of which of its arguments: layouts, and whose memory it is."""
    with mode:
        a, b = torch.empty(6, 4), torch.empty(4, 6)
        out = call(a, b)
    found: list[Any] = []
    for one in out if isinstance(out, tuple) else (out,):
        if one is None:
            found.append(None)
            continue
        owner = [one is a, one is b, *(one.untyped_storage()._cdata == t.untyped_storage()._cdata for t in (a, b))]
        layout = one.shape, one.stride(), one.storage_offset(), one.dtype, one.device, one.untyped_storage().nbytes()
        found.append((type(one), *layout, *owner))
    return found


@pytest.mark.parametrize("name", CALLS)
def test_an_answer_from_memory_is_that_of_torch(name: str) -> None:
    quick = QuickFakeMode(allow_non_fake_inputs=True)
    expected = told(FakeTensorMode(allow_non_fake_inputs=True), CALLS[name])
    answers = [told(quick, CALLS[name]) for _ in range(4)]
    assert answers == [expected] * 4
    remembered = {key[0] if isinstance(key[0], torch._ops.OpOverload) else key[0][0] for key in quick._remembered}
    assert remembered
    assert "fsdp" in {func.namespace for func in remembered} or "fsdp" not in CALLS[name].__code__.co_names


def test_a_third_call_is_answered_from_memory() -> None:
    quick = QuickFakeMode()
    with quick:
        a = torch.empty(6, 4)
        answers = [a.mul(2) for _ in range(4)]
        assert len({one.untyped_storage()._cdata for one in answers}) == 4, "each has memory of its own"
        before = FakeTensorMode.cache_hits
        a.mul(2)
        assert FakeTensorMode.cache_hits == before


def test_views_that_begin_elsewhere_share_one_answer() -> None:
    quick = QuickFakeMode()
    with quick:
        rows = torch.empty(64, 8)
        parts = [rows[start : start + 8] for start in range(0, 64, 8)]
        aten._log_softmax.default(parts[0], 1, False)
        before = len(quick._remembered)
        made = [aten._log_softmax.default(part, 1, False) for part in parts[1:]]
        assert len(quick._remembered) == before
        assert all(one.storage_offset() == 0 and one.shape == (8, 8) for one in made)
        assert [part.view(64).storage_offset() for part in parts] == [64 * n for n in range(8)]


def test_a_mode_above_may_ask_for_an_answer() -> None:
    quick = QuickFakeMode()
    func = aten.mul.Tensor
    with quick:
        a = torch.empty(6, 4)
    assert quick.remembered(func, (a, 2), {}) is UNKNOWN
    with quick:
        expected = a * 2
    found = quick.remembered(func, (a, 2), {})
    assert type(found) is type(expected)
    assert (found.shape, found.stride(), found.dtype) == (expected.shape, expected.stride(), expected.dtype)
    assert found.untyped_storage()._cdata != expected.untyped_storage()._cdata
    assert quick.remembered(func, (a, torch.empty(4)), {}) is UNKNOWN, "a real one"
    with quick:
        torch.zeros(3)
    assert quick.remembered(aten.zeros.default, ([3],), {}) is UNKNOWN, "made of numbers, maybe for real"


def test_views_in_inference_mode_are_those_of_torch() -> None:
    """Their version counters cannot be set."""
    mode = QuickFakeMode()
    with mode:
        a = torch.empty(2, 4)
        for _ in range(3):
            with torch.inference_mode():
                view = a.detach()
                assert not view.is_inference()
                assert view.clone().t().is_inference()


def test_what_differs_is_not_confused() -> None:
    quick = QuickFakeMode()
    with quick:
        whole, fraction, square = torch.empty(4, dtype=torch.int64), torch.empty(4), torch.empty(3, 3)
        for _ in range(3):
            assert (whole * 1).dtype is torch.int64
            assert (whole * 1.0).dtype is torch.float32
            assert (whole * True).dtype is torch.int64
            assert fraction[1:].storage_offset() == 1
            assert fraction[:-1].storage_offset() == 0
            assert fraction[1:].view(3).storage_offset() == 1
            assert fraction[:-1].view(3).storage_offset() == 0
            assert square.mul(2).stride() == (3, 1)
            assert square.t().mul(2).stride() == (1, 3)


def test_nothing_that_was_asked_about_is_held() -> None:
    quick = QuickFakeMode()
    with quick:
        a = torch.empty(1000)
        for _ in range(3):
            a.mul(2)
        held = torch.multiprocessing.reductions.StorageWeakRef(a.untyped_storage())
        del a
    assert held.expired()


def test_what_has_no_key() -> None:
    mode, other = QuickFakeMode(), QuickFakeMode()
    with mode:
        fake = torch.empty(2)
    with other:
        stranger = torch.empty(2)
    func = aten.add.Tensor
    assert call_key(func, (fake, 1), None, mode) == call_key(func, (fake, 1), {}, mode)
    assert call_key(func, (fake, 1), {"alpha": 2}, mode) != call_key(func, (fake, 1), None, mode)
    assert call_key(func, (fake, stranger), None, mode) is None
    assert call_key(func, (fake, stranger), None) is not None
    real = torch.empty(2)
    assert call_key(func, (fake, real), None) != call_key(func, (fake, fake), None)
    assert call_key(func, (fake, real[:1]), None) != call_key(func, (fake, real), None)
    assert call_key(func, (fake, real.to_sparse()), None) is None
    assert call_key(func, (fake, nn.Parameter(real)), None) is None
    assert call_key(func, (fake, torch.Generator()), None) is None
