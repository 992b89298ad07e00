"""What is written between a forward and its backward, where plain autograd trains: one step stops at the most."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import jettison
from jettison.core.errors import StaleTensor

WIDTH = 128  # a buffer of this width is too large to be copied in each call
STEPS = 5


class Centred(nn.Module):
    """Reads a buffer that autograd does not save."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("centre", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x) - self.centre.tanh()))


class Middle(Centred):
    """Another class, with another buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("middle", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.sin(self.up(x) * self.middle.cos()))


class Unrecorded(Centred):
    """Asks for a value, so that its Python runs again for backward."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if float(x.detach().abs().sum()) >= 0 else -x)


class Shifted(nn.Module):
    """Autograd does not save what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x + 1)))


class Detached(nn.Module):
    """Reads a weight without its graph, beside what autograd knows of."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = nn.Parameter(torch.randn(8, WIDTH))
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        keys = nn.functional.normalize(self.keys.detach(), dim=1)
        return (
            x + self.down(h * torch.sigmoid(h @ keys.t() @ keys)) + nn.functional.embedding(h.argmax(1) % 8, self.keys)
        )


class Without(Detached):
    """The same under ``no_grad``."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.keys.sin().mean(0)
        return x + self.down(torch.tanh(self.up(x) + scale)) + nn.functional.embedding(x.argmax(1) % 8, self.keys)


def train(model: nn.Module, x: Tensor) -> None:
    model(x).square().mean().backward()


def move_buffers(model: nn.Module, x: Tensor) -> None:
    loss = model(x).square().mean()
    for buffer in model.buffers():
        buffer.add_(0.1)
    loss.backward()


def step_in_backward(model: nn.Module) -> None:
    def stepped(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter.add_(parameter.grad, alpha=-0.1)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(stepped)


def meta_learn(model: nn.Module, x: Tensor) -> None:
    """An inner step by hand, and the outer loss through the model with the stepped weights."""
    named = dict(model.named_parameters())
    inner = functional_call(model, named, (x,)).square().mean()
    gradients = torch.autograd.grad(inner, list(named.values()), create_graph=True)
    stepped = {name: p - 0.1 * g for (name, p), g in zip(named.items(), gradients, strict=True)}
    functional_call(model, stepped, (x,)).square().mean().backward()


def loop_in_autocast(model: nn.Module, x: Tensor) -> None:
    """Three steps without leaving autocast: its cache has casts of the first weights in all of them."""
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            model.zero_grad()
            model(x).square().mean().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(parameter.grad, alpha=-0.1)


def write_to_the_argument(model: nn.Module, x: Tensor) -> None:
    x = x.clone()
    loss = model(x).square().mean()
    x.mul_(2)
    loss.backward()


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model that is planned, and a step; ``stops``: how many steps stop, and with which word in the message."""

    blocks: tuple[type[nn.Module], ...]
    step: Callable[[nn.Module, Tensor], None] = train
    before: Callable[[nn.Module], None] | None = None
    after: Callable[[nn.Module], None] | None = None
    stops: int = 0
    names: str = ""


CASES = {
    "a buffer": Case(blocks=(Centred,) * 3, step=move_buffers, stops=1, names="buffer 'centre'"),
    "buffers of two classes": Case(
        blocks=(Middle, Centred, Middle, Centred), step=move_buffers, stops=1, names="buffer 'centre'"
    ),
    "a buffer that Python reads again": Case(
        blocks=(Unrecorded,) * 3, step=move_buffers, stops=1, names="buffer 'centre'"
    ),
    "hooks that step, then a plan": Case(blocks=(Detached,) * 3, before=step_in_backward),
    "a plan, then hooks that step": Case(blocks=(Detached,) * 3, after=step_in_backward),
    "hooks, read under no_grad": Case(blocks=(Without,) * 3, after=step_in_backward, stops=1, names="parameter 'keys'"),
    "an argument": Case(blocks=(Shifted,) * 2, step=write_to_the_argument, stops=1, names="a kept tensor"),
    "meta-learning": Case(blocks=(Centred,) * 3, step=meta_learn),
    "meta-learning, Python runs again": Case(blocks=(Unrecorded,) * 3, step=meta_learn),
    "a loop in one autocast": Case(blocks=(Centred,) * 3, step=loop_in_autocast),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore")
def test_one_step_stops_at_the_most(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    model = nn.Sequential(*(block() for block in case.blocks))
    plain, x = copy.deepcopy(model), torch.randn(16, WIDTH)
    if case.before is not None:
        case.before(model)
        case.before(plain)
    jettison.apply(model, "full", batch=(x,), loss_fn=lambda y: y.square().mean())
    if case.after is not None:
        case.after(model)
        case.after(plain)
    stopped = []
    for _ in range(STEPS):
        for one in (plain, model):
            one.zero_grad()
        case.step(plain, x)
        try:
            case.step(model, x)
        except StaleTensor as error:
            stopped.append(str(error))
            model.load_state_dict(plain.state_dict())
            continue
        for (path, expected), found in zip(plain.named_parameters(), model.parameters(), strict=True):
            assert torch.equal(expected, found), path
            assert torch.equal(expected.grad, found.grad), path
    assert len(stopped) == case.stops, stopped
    assert all(case.names in text and "From the next step on" in text for text in stopped)


@pytest.mark.parametrize("passes", [1, 2])
def test_a_write_to_a_dropped_tensor_leaves_the_gradients_of_forward(passes: int) -> None:
    """Plain autograd, which has the written tensor alone, raises."""

    def step(model: nn.Module, *, writes: bool) -> list[Tensor]:
        seen: list[Tensor] = []
        hook = model[1].down.register_forward_pre_hook(lambda _module, args: seen.extend(args))
        loss = model(x).square().mean()
        hook.remove()
        parameters = list(model.parameters())
        if passes == 2:
            torch.autograd.grad(loss, parameters[-1:], retain_graph=True)
        if writes:
            seen[0].detach().add_(1)
        return list(torch.autograd.grad(loss, parameters))

    torch.manual_seed(0)
    model, x = nn.Sequential(Centred(), Centred(), Centred()), torch.randn(16, WIDTH)
    expected = step(model, writes=False)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(model, writes=True)
    with jettison.apply(model, "full", batch=(x,), loss_fn=lambda y: y.square().mean()):
        found = step(model, writes=True)
    assert all(map(torch.equal, found, expected))
