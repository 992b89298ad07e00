"""Settings that change to and fro, as the active adapter does: each program is recorded once."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import jettison
from jettison.core.units import Bytes
from jettison.runtime.recordings import GIVE_UP_AFTER, MOST_VARIANTS
from jettison.verify.differences import compare_gradients, independent_copy
from support.structure import said
from support.toys import Net

WIDTH, ROWS, BLOCKS = 16, 32, 3
KNOWN = "runs other ops than it was planned with"


class Adapted(nn.Module):
    """One of two adapters is at work."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.adapters = nn.ModuleDict(
            {"a": nn.Linear(WIDTH, WIDTH), "b": nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())}
        )
        self.active = "a"
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        return x + self.base(x).tanh() + self.adapters[self.active](x)


def models() -> tuple[Any, Any, Tensor]:
    torch.manual_seed(0)
    model = Net(Adapted() for _ in range(BLOCKS))
    return model, independent_copy(model), torch.randn(ROWS, WIDTH)


def switch(model: Any, name: str) -> None:
    for layer in model.layers:
        layer.active = name


def recordings(handle: Any) -> int:
    return sum(region.recordings.count for region in handle.regions)


def test_each_program_is_recorded_once_and_gradients_are_those_of_a_plain_model() -> None:
    model, twin, x = models()
    handle = jettison.apply(model, "full", batch=(x,))
    counts = []
    for name in "abababab":
        for one in (model, twin):
            switch(one, name)
            one.zero_grad()
            one(x).backward()
        assert compare_gradients(model, twin).identical
        counts.append(recordings(handle))
    assert counts[1] > counts[0]
    assert counts[1:] == [counts[1]] * 7


@pytest.mark.filterwarnings(f"ignore:.*{KNOWN}")
def test_a_plan_made_under_another_setting_leaves_recordings_with_their_own() -> None:
    model, twin, _ = models()
    optimizer, x = torch.optim.SGD(model.parameters()), torch.randn(32 * ROWS, WIDTH)
    handle = jettison.auto_checkpoint(model, (x,), "1GiB", optimizer=optimizer, loss_fn=torch.sum)
    assert handle.batches is not None and handle.plan is not None
    for number, name in enumerate("abaaba"):
        if number == 2:  # a plan of its own is made when the next step begins
            handle.batches.restrict(handle.plan.minimum_budget_bytes)
        for one in (model, twin):
            switch(one, name)
            one.zero_grad()
            one(x).sum().backward()
        assert compare_gradients(model, twin).identical
    assert not any(region.fallback for region in handle.report())


def test_a_recording_that_was_wrong_is_not_known_again() -> None:
    model, _, x = models()
    handle = jettison.apply(model, "full", batch=(x,))
    for name in "ab":
        switch(model, name)
        model(x).backward()
    region = handle.regions[0]
    assert region.recordings._aside
    (known,) = [one for one in region.recordings.prepared.values() if one.recipe is not None]
    region.recordings.wrong(known.recipe, "it was", looked=False)
    assert not region.recordings._aside


@pytest.mark.parametrize("what", ["module", "tensor"])
def test_what_the_model_has_let_go_of_is_not_held(what: str) -> None:
    model, _, x = models()
    handle = jettison.apply(model, "full", batch=(x,))
    layer = model.layers[0]
    gone: Any = layer.adapters["b"] if what == "module" else torch.ones(3)
    if what == "tensor":
        layer.seen.append(gone)
    held = weakref.ref(gone)
    del gone

    def steps() -> None:
        for name in "aba":
            switch(model, name)
            model(x).backward()
        if what == "module":
            layer.adapters["b"] = nn.Linear(WIDTH, WIDTH)
        else:
            layer.seen.clear()
        for name in "ab":
            switch(model, name)
            model(x).backward()

    said(steps)
    gc.collect()
    assert held() is None
    handle.remove()


class Narrower(nn.Module):
    """Leaves out what is of no use this time, as models do with masks of nothing but ones."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scales = nn.Linear(WIDTH, WIDTH), True

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).exp()
        return x + (y.sin() * 2.0 if self.scales else y.sin())


@pytest.mark.parametrize("first", [True, False])
def test_ops_that_are_left_out_are_no_other_ops_and_more_of_them_are(first: bool) -> None:
    torch.manual_seed(0)
    model, x = Net(Narrower() for _ in range(BLOCKS)), torch.randn(ROWS, WIDTH)

    def scales(on: bool) -> None:
        for layer in model.layers:
            layer.scales = on

    scales(first)
    jettison.auto_checkpoint(model, (x,), Bytes(1 << 30))

    def step() -> None:
        scales(not first)
        model(x).backward()

    assert any(KNOWN in text for text in said(step)[1]) is not first


class Masked(nn.Module):
    """Runs more ops where a mask has padding: up to so many."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.layers, self.most = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)), most

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for _ in range(min(self.most, ROWS - int(mask.sum()))):
            x = x.sin() * mask.to(x.dtype).exp()
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x.square().mean()


CHANGING = [*range(1, ROWS - 1), 0] * 2


@pytest.mark.filterwarnings("ignore:the model cannot be planned")
@pytest.mark.parametrize(
    "most, paddings, recorded",
    [(1, [0, 3] * 6, 1), (1, CHANGING, MOST_VARIANTS - 1), (ROWS, CHANGING, MOST_VARIANTS + GIVE_UP_AFTER)],
)
def test_values_that_choose_the_ops_have_a_few_recordings(most: int, paddings: list[int], recorded: int) -> None:
    torch.manual_seed(0)
    model: Any = Masked(most)
    twin, x = independent_copy(model), torch.randn(ROWS, WIDTH, requires_grad=True)
    root = jettison.auto_checkpoint(model, (x, torch.ones(ROWS, 1) > 0), "1MiB").regions[-1]
    root.listener = None  # which would plan for padding when it comes
    with pytest.warns(UserWarning, match=KNOWN):
        for padding in [*paddings, 0]:
            mask = (torch.arange(ROWS) >= padding)[:, None]
            for one in (model, twin):
                one.zero_grad()
                one(x, mask).backward()
            assert compare_gradients(model, twin).identical
    assert root.recordings.count == recorded, "the planned one was adopted"
    assert root.recordings.prepared[root.recordings.number, root.key].recipe is not None, "and is kept"
