"""Cross entropy in chunks of rows: the same bits, fewer copies of the logits, and nothing left behind."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import jettison
from jettison.core.units import Bytes
from jettison.dryrun.counter import AllocationCounter, measured_peak, static_tensors
from jettison.runtime import chunked_loss
from jettison.runtime.chunked_loss import ChunkedLossPatch, rows_of, whole_losses
from jettison.solve.plan import Plan
from jettison.verify.differences import independent_copy, same_bits

TORCHS = chunked_loss._torchs


def is_chunking() -> bool:
    return functional.cross_entropy.__code__ is not TORCHS.__code__


ROWS, COLUMNS = 128, 8192  # 4 MiB in fp32
LOGITS = ROWS * COLUMNS * 4


@pytest.fixture
def hold() -> Iterator[ChunkedLossPatch]:
    held = ChunkedLossPatch()
    yield held
    held.release()
    assert not is_chunking()


@pytest.fixture
def at_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_loss, "SMALLEST_BYTES", 0)
    monkeypatch.setattr(chunked_loss, "CPU_CHUNK_BYTES", 0)  # chunks of 16 rows


def is_chunked(loss: Tensor) -> bool:
    return type(loss.grad_fn).__name__ == "_CrossEntropyBackward"


def rows(count: int, columns: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits and classes, some of them ignored."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, columns, generator=generator).mul_(3).to(dtype)
    target = torch.randint(columns, (count,), generator=generator)
    target[torch.rand(count, generator=generator) < 0.2] = -100
    return logits, target


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("columns", [64, 257])
def test_loss_and_gradient_have_the_bits_of_torchs_own(
    dtype: torch.dtype, reduction: str, columns: int, hold: ChunkedLossPatch, at_any_size: None
) -> None:
    values, target = rows(75, columns, dtype)  # four chunks and a piece
    weights = torch.linspace(0.1, 2, 75).to(dtype)
    found = []
    for function in (TORCHS, functional.cross_entropy):
        leaf = values.clone().requires_grad_()
        loss = function(leaf * 1.5, target, reduction=reduction)
        assert is_chunked(loss) == (function is not TORCHS)
        (loss * weights).sum().backward() if reduction == "none" else loss.backward()
        assert leaf.grad is not None
        found.append((loss.detach(), leaf.grad))
    assert all(map(same_bits, *found))
    assert hold.used


@pytest.mark.parametrize("again", ["retained", "derivative"])
def test_a_graph_that_is_used_again_gives_the_same_bits(again: str, hold: ChunkedLossPatch, at_any_size: None) -> None:
    values, target = rows(40, 64)
    direction = torch.randn(40, 64, generator=torch.Generator().manual_seed(1))
    found = []
    for function in (TORCHS, functional.cross_entropy):
        leaf = values.clone().requires_grad_()
        loss = function(leaf * 1.5, target)
        if again == "retained":
            first = torch.autograd.grad(loss, leaf, retain_graph=True)
            found.append(first + torch.autograd.grad(loss, leaf))
        else:
            (gradient,) = torch.autograd.grad(loss, leaf, create_graph=True)
            found.append((gradient.detach(), *torch.autograd.grad((gradient * direction).sum(), leaf)))
    assert all(map(same_bits, *found))


def bytes_beside(function: Callable[..., Tensor], *, keeps: bool) -> tuple[int, int]:
    """Most bytes at a time beside one copy of the logits, in forward and in backward."""
    logits, target = rows(ROWS, COLUMNS)
    leaf = logits.requires_grad_()
    taken = []
    with AllocationCounter([leaf, target]) as counter:
        made = leaf.view(ROWS, COLUMNS) + 0.0
        made.register_hook(lambda gradient: taken.append(counter.live_bytes) or gradient)
        loss = function(made, target)
        forward = counter.peak_bytes
        if not keeps:
            del made
        loss.backward()
    return forward - 2 * LOGITS, taken[0] - 2 * LOGITS  # the leaf, and what was made of it


def test_one_copy_of_the_logits_where_torch_has_three(hold: ChunkedLossPatch) -> None:
    whole, chunked = (bytes_beside(function, keeps=False) for function in (TORCHS, functional.cross_entropy))
    small = 4096  # classes, a loss for each row
    assert LOGITS <= whole[0] < LOGITS + small and LOGITS <= whole[1] + LOGITS < 2 * LOGITS + small
    chunk = rows_of(torch.empty(ROWS, COLUMNS)) * COLUMNS * 4
    assert chunk == 2 * 1024**2
    assert 0 <= chunked[0] - chunk < small  # a chunk's log-softmax
    assert 0 <= chunked[1] < small  # the logits are their gradient by then


def test_logits_that_somebody_holds_stay_as_they_are(hold: ChunkedLossPatch) -> None:
    values, target = rows(ROWS, COLUMNS)
    held = values.clone().requires_grad_() + 0.0
    before = held.detach().clone()
    held.retain_grad()
    functional.cross_entropy(held, target).backward()
    assert same_bits(held.detach(), before)
    assert held.grad is not None and held.grad.data_ptr() != held.data_ptr()
    assert 0 <= bytes_beside(functional.cross_entropy, keeps=True)[1] - LOGITS < 4096


def test_logits_that_another_op_saved_stay_as_they_are(hold: ChunkedLossPatch, at_any_size: None) -> None:
    values, target = rows(64, 128)
    found = []
    for function in (TORCHS, functional.cross_entropy):
        leaf = values.clone().requires_grad_()
        made = leaf * 1.5
        flat = made.view(64, 128)
        loss = function(flat, target) + 1e-2 * (flat.logsumexp(1) ** 2).mean() + (made * made).mean()
        del made, flat
        loss.backward()
        assert leaf.grad is not None
        found.append(leaf.grad)
    assert same_bits(*found)


@pytest.mark.parametrize("held", ["storage", "array"])
def test_memory_that_somebody_holds_without_a_tensor_stays_as_it_is(
    held: str, hold: ChunkedLossPatch, at_any_size: None
) -> None:
    values, target = rows(64, 128)
    made = values.clone().requires_grad_() * 1.5
    kept: Any = made.untyped_storage() if held == "storage" else made.detach().numpy()
    loss = functional.cross_entropy(made, target)
    del made
    loss.backward()
    left = torch.empty(0).set_(kept, 0, (64, 128)) if held == "storage" else torch.from_numpy(kept)
    assert same_bits(left, values * 1.5)


def test_memory_that_is_numpys_stays_as_it_is(hold: ChunkedLossPatch, at_any_size: None) -> None:
    values, target = rows(64, 128)
    leaf = values.clone().requires_grad_()
    array = np.zeros((64, 128), np.float32)
    functional.cross_entropy(torch.from_numpy(array).copy_(leaf * 1.5), target).backward()
    assert same_bits(torch.from_numpy(array), values * 1.5)


@pytest.mark.parametrize("swapped", [False, True])
def test_what_hooks_give_from_numpy_stays_as_it_is(swapped: bool, hold: ChunkedLossPatch, at_any_size: None) -> None:
    values, target = rows(64, 128)
    kept: list[Any] = []

    def pack(saved: Tensor) -> int:
        kept.append(saved.detach().clone().numpy())
        return len(kept) - 1

    leaf = values.clone().requires_grad_()
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda number: torch.from_numpy(kept[number]))
    with hooks if swapped else contextlib.nullcontext():
        loss = functional.cross_entropy(leaf * 1.5, target)
    before = [array.copy() for array in kept]
    loss.backward()
    assert bool(kept) == swapped and all(map(np.array_equal, kept, before))


@pytest.mark.parametrize("how", ["data", "numpy"])
def test_logits_that_are_written_to_unseen_stop_the_step(how: str, hold: ChunkedLossPatch, at_any_size: None) -> None:
    """torch's own saved what it needs of them; here the gradient would be another one."""
    values, target = rows(64, 128)
    made = values.requires_grad_() * 1.5
    loss = functional.cross_entropy(made, target)
    if how == "data":
        made.data.mul_(2)
    else:
        array = made.detach().numpy()
        np.exp(array, out=array)
    with pytest.raises(RuntimeError, match="chunked_loss=False"):
        loss.backward()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_no_numbers_give_torchs_bits(value: float, hold: ChunkedLossPatch, at_any_size: None) -> None:
    values, target = rows(64, 128)
    values[3, 5] = value
    found = []
    for function in (TORCHS, functional.cross_entropy):
        leaf = values.clone().requires_grad_()
        function(leaf * 1.5, target).backward()
        assert leaf.grad is not None
        found.append(leaf.grad)
    assert torch.equal(found[0].view(torch.int32), found[1].view(torch.int32))


def test_gradients_in_batches_are_torchs(hold: ChunkedLossPatch, at_any_size: None) -> None:
    values, target = rows(20, 64)
    found = []
    for function in (TORCHS, functional.cross_entropy):
        leaf = values.clone().requires_grad_()
        losses = function(leaf * 1.5, target, reduction="none")
        found.append(torch.autograd.grad(losses, leaf, torch.eye(20), is_grads_batched=True)[0])
    assert hold.used and same_bits(*found)


def test_where_hooks_are_forbidden_torchs_own_is_taken(hold: ChunkedLossPatch, at_any_size: None) -> None:
    values, target = rows(32, 64)
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        assert not is_chunked(functional.cross_entropy(values.requires_grad_(), target))


def left_to_torch() -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    def cross_entropy(*args: Any, **kwargs: Any) -> Tensor:
        return functional.cross_entropy(*args, **kwargs)

    return {
        "weights": lambda x, t: cross_entropy(x, t, weight=torch.ones(64)),
        "smoothing": lambda x, t: cross_entropy(x, t, label_smoothing=0.1),
        "probabilities": lambda x, t: cross_entropy(x, torch.softmax(x.detach(), 1)),
        "more dimensions": lambda x, t: cross_entropy(x.view(4, 8, 64).transpose(1, 2), t.view(4, 8)),
        "one row": lambda x, t: cross_entropy(x[0], t[0].clamp(0)),
        "columns apart": lambda x, t: cross_entropy(x.t().contiguous().t(), t),
        "narrow autocast": lambda x, t: cross_entropy(x.bfloat16(), t),
        "an old word": lambda x, t: cross_entropy(x, t, size_average=False),
    }


@pytest.mark.parametrize("kind", left_to_torch())
@pytest.mark.filterwarnings("ignore:size_average and reduce args")
def test_what_is_more_than_classes_and_a_reduction_is_left_to_torch(
    kind: str, hold: ChunkedLossPatch, at_any_size: None
) -> None:
    values, target = rows(32, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == "narrow autocast"):
        loss = left_to_torch()[kind](values.requires_grad_() * 1.5, target)
    assert not is_chunked(loss) and not hold.used


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_transforms_and_losses_without_gradients_are_left_to_torch(hold: ChunkedLossPatch, at_any_size: None) -> None:
    values, target = rows(32, 64)
    expected = TORCHS(values, target)
    assert same_bits(functional.cross_entropy(values, target), expected)
    gradient = torch.func.grad(lambda x: functional.cross_entropy(x, target))(values)
    leaf = values.clone().requires_grad_()
    TORCHS(leaf, target).backward()
    assert leaf.grad is not None and same_bits(gradient, leaf.grad)
    with torch.no_grad():
        functional.cross_entropy(leaf, target)
    with torch.autograd.forward_ad.dual_level():
        functional.cross_entropy(torch.autograd.forward_ad.make_dual(leaf, torch.ones_like(leaf)), target)
    with whole_losses():
        assert not is_chunked(functional.cross_entropy(leaf, target))
    assert not hold.used
    assert is_chunked(functional.cross_entropy(leaf, target))


def test_small_logits_are_left_to_torch(hold: ChunkedLossPatch) -> None:
    values, target = rows(ROWS - 1, COLUMNS)
    assert not is_chunked(functional.cross_entropy(values.requires_grad_(), target))


def test_where_bits_would_differ_torchs_own_is_taken(
    hold: ChunkedLossPatch, at_any_size: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked_loss, "_same_bits", {})
    tried = chunked_loss._same
    monkeypatch.setattr(chunked_loss, "_same", lambda *given: tried(*given) and False)
    values, target = rows(32, 64)
    assert not is_chunked(functional.cross_entropy(values.requires_grad_(), target))
    assert not hold.used, "chunks that were tried are no loss of a step"


def test_a_class_that_is_not_there_is_said_as_torch_says_it(hold: ChunkedLossPatch, at_any_size: None) -> None:
    values, target = rows(32, 64)
    target[20] = 64
    with pytest.raises(IndexError, match="Target 64 is out of bounds"):
        functional.cross_entropy(values.requires_grad_(), target)


def test_torch_has_its_own_back_once_nobody_holds_it() -> None:
    first, second = ChunkedLossPatch(), ChunkedLossPatch()
    first.release()
    assert is_chunking()
    second.release()
    second.release()
    assert not is_chunking()


class Tiny(nn.Module):
    """Two layers under a wide head; the loss is its own business."""

    def __init__(self, squares: bool = False) -> None:
        super().__init__()
        self.inside = nn.Embedding(COLUMNS, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 512), nn.GELU(), nn.Linear(512, 16)) for _ in range(2))
        self.head = nn.Linear(16, COLUMNS, bias=False)
        self.squares = squares

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.inside(ids)
        for layer in self.layers:
            x = x + layer(x)
        logits = self.head(x)
        loss = functional.cross_entropy(logits.view(-1, COLUMNS), labels.view(-1))
        if self.squares:
            loss = loss + 1e-3 * (logits.logsumexp(-1) ** 2).mean()
        return {"loss": loss, "logits": logits}


def tiny(squares: bool = False, seed: int = 0) -> tuple[Tiny, dict[str, Tensor]]:
    torch.manual_seed(seed)
    model = Tiny(squares)
    ids = torch.randint(COLUMNS, (4, 64))
    return model, {"ids": ids, "labels": ids.roll(1)}


def step(model: nn.Module, batch: dict[str, Tensor], *, holds: bool = False) -> None:
    output = model(**batch)
    loss = output["loss"]
    if not holds:
        del output
    loss.backward()


def same_gradients(model: nn.Module, other: nn.Module) -> bool:
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return all(a.grad is not None and b.grad is not None and same_bits(a.grad, b.grad) for a, b in pairs)


def peak(model: nn.Module, batch: dict[str, Tensor], **kwargs: bool) -> int:
    model.zero_grad(set_to_none=True)
    return measured_peak(lambda: step(model, batch, **kwargs), static_tensors=static_tensors(model, batch)).peak_bytes


@pytest.mark.parametrize("holds", [False, True])
@pytest.mark.parametrize("squares", [False, True])
def test_a_plan_counts_the_copies_that_a_step_has(holds: bool, squares: bool) -> None:
    model, batch = tiny(squares)
    plain = independent_copy(model)
    with whole_losses():
        before = peak(plain, batch, holds=holds)
    budget = before - LOGITS  # logits are twice that
    if not squares:  # else there is more to drop
        with pytest.raises(jettison.Infeasible):
            jettison.auto_checkpoint(model, batch, Bytes(budget), keep_output=holds, chunked_loss=False)
    assert not is_chunking()
    handle = jettison.auto_checkpoint(model, batch, Bytes(budget), keep_output=holds)
    assert handle.plan is not None and handle.plan.chunked_loss
    assert peak(model, batch, holds=holds) == handle.plan.predicted.peak_bytes <= budget
    assert same_gradients(model, plain)
    handle.remove()
    assert not is_chunking()


def test_a_plan_that_was_written_down_says_how_losses_go() -> None:
    model, batch = tiny()
    handle = jettison.auto_checkpoint(model, batch, "1GiB", keep_output=False)
    text = handle.plan.to_json()
    handle.remove()
    other, _ = tiny()
    again = jettison.apply(other, plan=Plan.from_json(text), batch=batch)
    assert is_chunking()
    assert peak(other, batch) == Plan.from_json(text).predicted.peak_bytes
    again.remove()
    assert not is_chunking()
    with whole_losses():
        plain, _ = tiny()
        step(plain, batch)
    assert same_gradients(other, plain)


def test_a_loss_outside_of_the_model_goes_over_chunks_too() -> None:
    model, batch = tiny()
    plain = independent_copy(model)

    def own(model: nn.Module, batch: dict[str, Tensor]) -> None:
        logits = model(**batch)["logits"]
        loss = functional.cross_entropy(logits.view(-1, COLUMNS), batch["labels"].view(-1))
        del logits
        loss.backward()

    with whole_losses():
        own(plain, batch)
    handle = jettison.auto_checkpoint(model, batch, "1GiB", step=own)
    assert handle.plan is not None and handle.plan.chunked_loss
    run = measured_peak(lambda: own(model, batch), static_tensors=static_tensors(model, batch))
    assert run.peak_bytes == handle.plan.predicted.peak_bytes
    assert same_gradients(model, plain)
    handle.remove()
    assert not is_chunking()


def test_a_step_that_writes_to_its_logits_has_torchs_loss() -> None:
    model, batch = tiny()
    plain = independent_copy(model)

    def own(model: nn.Module, batch: dict[str, Tensor]) -> None:
        logits = model(**batch)["logits"].view(-1, COLUMNS)
        loss = functional.cross_entropy(logits, batch["labels"].view(-1))
        with torch.no_grad():
            logits.div_(2)  # torch has the log-softmax
        loss.backward()

    own(plain, batch)
    handle = jettison.auto_checkpoint(model, batch, "1GiB", step=own)
    assert handle.plan is not None and not handle.plan.chunked_loss
    assert not is_chunking()
    own(model, batch)
    assert same_gradients(model, plain)
    handle.remove()


def test_the_plain_side_of_a_proof_has_torchs_loss() -> None:
    model, batch = tiny()
    with whole_losses():
        plain = peak(independent_copy(model), batch)
    proof = jettison.verify(model, batch, budget="1GiB", keep_output=False, steps=1, rounds=1)
    assert proof.baseline_peak_bytes == plain >= proof.measured_peak_bytes + LOGITS
    assert proof.gradients_identical and proof.losses_identical


def test_small_losses_leave_torch_alone() -> None:
    model, batch = tiny()
    short = {name: ids[:, :8].contiguous() for name, ids in batch.items()}
    handle = jettison.auto_checkpoint(model, short, "1GiB")
    assert handle.plan is not None and not handle.plan.chunked_loss
    assert "chunked_loss" not in handle.plan._decisions()
    assert not is_chunking()
    handle.remove()


def test_a_model_that_holds_the_loss_can_be_pickled(hold: ChunkedLossPatch) -> None:
    model = nn.Linear(2, 2)
    model.loss = functional.cross_entropy
    copied = pickle.loads(pickle.dumps(model))
    hold.release()
    assert copied.loss is pickle.loads(pickle.dumps(model)).loss is functional.cross_entropy
    assert functional.cross_entropy.__module__ == "torch.nn.functional"
