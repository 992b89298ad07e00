"""A dry run runs what was recorded: a region that records again there is planned by another program than its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import jettison
from jettison.core.errors import Infeasible
from jettison.core.units import Bytes
from jettison.dryrun.counter import measured_peak, static_tensors
from jettison.runtime.recordings import Recordings
from silent.kit import rows

pytestmark = pytest.mark.usefixtures("one_thread")
WIDTH = 32


@pytest.fixture(autouse=True)
def recorded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a dry run nothing is recorded, and nothing leaves its recording."""
    look, prepare, diverge = Recordings.look, Recordings._prepare, Recordings.diverged
    dry: set[Recordings] = set()

    def looked(self: Recordings, *, in_dry_run: bool) -> None:
        (dry.add if in_dry_run else dry.discard)(self)
        look(self, in_dry_run=in_dry_run)

    def prepared(self: Recordings, *given: Any) -> Any:
        assert self not in dry, f"a {type(self.module).__name__} is recorded in a dry run"
        return prepare(self, *given)

    def diverged(self: Recordings, prepared: Any, key: Any, why: str) -> None:
        assert self not in dry, f"a {type(self.module).__name__} has left its recording in a dry run: {why}"
        diverge(self, prepared, key, why)

    for name, function in (("look", looked), ("_prepare", prepared), ("diverged", diverged)):
        monkeypatch.setattr(Recordings, name, function)


class Block(nn.Module):
    """A wide layer in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)

    def forward(self, x: Tensor, *_given: Any) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(torch.tanh(self.up(x))))


class Sized(nn.Module):
    """Blocks get the shape of something, as BeiT's get their resolution: torch's trees hand it back as a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, x.shape[1:])
        return x.square().mean()


class Dropped(nn.Module):
    """LayerDrop under a table of positions that is a buffer: the root draws, decides by it, and reads the table."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(3)])
        self.register_buffer("positions", torch.linspace(0, 1, 64 * WIDTH).view(64, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.positions.index_select(0, torch.arange(len(x)))
        for layer in self.layers:
            if torch.rand([]) > 0.01:
                x = layer(x)
        return x.square().mean()


class Reader(Block):
    """Reads what the block before left beside it."""

    def __init__(self, beside: list[Tensor]) -> None:
        super().__init__()
        self.beside = beside

    def forward(self, x: Tensor, *_given: Any) -> Tensor:
        out = super().forward(x) + (0.5 * self.beside[-1] if self.beside else 0.0)
        self.beside.append(torch.tanh(out))
        return out


class Handed(nn.Module):
    """Values of an earlier block in the later ones: planned as one region."""

    def __init__(self) -> None:
        super().__init__()
        self.beside: list[Tensor] = []
        self.layers = nn.ModuleList([Reader(self.beside) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        self.beside.clear()
        for layer in self.layers:
            x = layer(x)
        self.beside.clear()
        return x.square().mean()


def smallest_budget(model: nn.Module) -> int:
    with pytest.raises(Infeasible) as refused:
        jettison.auto_checkpoint(model, (rows(0),), Bytes(1))
    return refused.value.minimum_budget_bytes


def peak(model: nn.Module) -> int:
    torch.manual_seed(0)
    batch = (rows(0),)
    return measured_peak(lambda: model(*batch).backward(), static_tensors=static_tensors(model, batch)).peak_bytes


@pytest.mark.filterwarnings("ignore:.*it decides by numbers:UserWarning")
@pytest.mark.parametrize("kind", [Sized, Dropped])
def test_blocks_give_up_what_lies_inside_of_them(kind: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = kind().train()
    plain = peak(model)
    model.zero_grad(set_to_none=True)
    least = smallest_budget(model)
    inside = 64 * 8 * WIDTH * 4
    assert least < plain - 2 * inside, "two blocks of three have nothing wide when the third runs again"
    jettison.auto_checkpoint(model, (rows(0),), Bytes(least))
    assert peak(model) <= least


def test_a_model_of_one_region_keeps_what_backward_would_have_to_hold() -> None:
    torch.manual_seed(0)
    model = Handed().train()
    plain = peak(model)
    model.zero_grad(set_to_none=True)
    least = smallest_budget(model)
    inside = 64 * 8 * WIDTH * 4
    assert least < plain - 3 * inside, "the blocks' outputs cut it into pieces that run again one by one"


@pytest.mark.parametrize("check", ["always", "sampled"])
def test_on_the_cpu_witnesses_take_nothing_of_the_allocators(check: str) -> None:
    found = []
    for how in ("off", check):
        torch.manual_seed(0)
        model = Sized().train()
        with jettison.apply(model, "full", batch=(rows(0),), check=how):
            peak(model)  # which is checked against the recording
            model.zero_grad(set_to_none=True)
            found.append(peak(model))
    assert found[0] == found[1]


class Spoken(nn.Module):
    """CTC whose lengths come in tensors: under a dispatch mode torch runs another op for it, which saves them."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Block(), nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor, targets: Tensor, lengths: Tensor) -> Tensor:
        y = self.head(self.body(x)).view(16, 4, 8).log_softmax(-1)
        return torch.nn.functional.ctc_loss(y, targets, torch.full((4,), 16), lengths)


def test_ctc_with_lengths_in_tensors_is_planned_in_every_step() -> None:
    targets, lengths = torch.randint(1, 8, (4, 5)), torch.tensor([5, 3, 4, 2])
    gradients = []
    for planned in (False, True):
        torch.manual_seed(0)
        model, batch = Spoken().train(), (rows(0), targets, lengths)
        if planned:
            with pytest.raises(Infeasible) as refused:
                jettison.auto_checkpoint(model, batch, Bytes(1))
            handle = jettison.auto_checkpoint(model, batch, refused.value.minimum_budget_bytes)
        for step in range(4):
            model.zero_grad(set_to_none=True)
            model(rows(step), targets, lengths).backward()
            gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    (root,) = [report for report in handle.report() if report.name == ""]
    assert root.recordings == 0, "the one that it was planned with holds"
    assert root.fallback == ""
    assert root.slots_dropped > 0
    assert all(torch.equal(a, b) for a, b in zip(gradients[:4], gradients[4:], strict=True))
