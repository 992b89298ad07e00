"""Programs that use autograd in other ways than one forward and one backward, or set switches around the forward."""

from __future__ import annotations

import dataclasses
import threading
import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from silent.harness import Program, Step
from silent.kit import BLOCKS, Net, block_class, case, program, rows


def dropping(s: Any, x: Tensor) -> Tensor:
    """A block with something to draw and something to drop."""
    return x + s.b(F.dropout(torch.tanh(s.a(x)).exp(), 0.2))


def calm(s: Any, x: Tensor) -> Tensor:
    """A block without draws."""
    return x + s.b(torch.tanh(s.a(x)).exp())


def stepped(step: Step, run: Any = dropping, **more: Any) -> Program:
    """The usual blocks, trained in another way."""
    return program(run, step=step, **more)


@case(works=True)
def usual() -> Program:
    return program(dropping)


@case(works=True)
def backward_twice_over_a_kept_graph() -> Program:
    def step(model: Any, given: Any, i: int) -> list[Tensor]:
        loss = model(*given)
        loss.backward(retain_graph=True)
        loss.backward()
        return [loss]

    return stepped(step)


@case(works=True)
def two_forwards_before_two_backwards() -> Program:
    def step(model: Any, given: Any, i: int) -> list[Tensor]:
        first, second = model(*given), model(rows(50 + i))
        second.backward()
        first.backward()
        return [first, second]

    return stepped(step)


@case(works=True)
def gradients_accumulated() -> Program:
    def step(model: Any, given: Any, i: int) -> list[Tensor]:
        losses = [model(rows(100 * k + i)) / 3 for k in range(3)]
        for loss in losses:
            loss.backward()
        return losses

    return stepped(step)


@case(works=True)
def gradients_asked_for() -> Program:
    def step(model: Any, given: Any, i: int) -> list[Tensor]:
        x = given[0].clone().requires_grad_()
        loss = model(x)
        return [loss, *torch.autograd.grad(loss, [x, *model.parameters()])]

    return stepped(step)


@case(works=True)
def partial_backward_first() -> Program:
    def step(model: Any, given: Any, i: int) -> list[Tensor]:
        x = given[0].clone().requires_grad_()
        loss = model(x)
        loss.backward(inputs=[x], retain_graph=True)
        loss.backward(inputs=list(model.parameters()))
        return [loss, x.grad]

    return stepped(step)


@case()
def gradient_penalty() -> Program:
    def step(model: Any, given: Any, i: int) -> list[Tensor]:
        x = given[0].clone().requires_grad_()
        loss = model(x)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + slope.square().sum()).backward()
        return [loss, slope]

    return stepped(step)


@case()
def second_gradient_of_a_kept_graph() -> Program:
    def step(model: Any, given: Any, i: int) -> list[Tensor]:
        loss = model(*given)
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        sum(g.square().sum() for g in grads).backward()
        return [loss, *grads]

    return stepped(step, calm)


@case(works=True)
def hooks_on_activations_and_parameters() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        h = torch.tanh(s.a(x))
        h.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
        return x + s.b(h.exp())

    return program(run)


@case(works=True)
def saved_by_a_function_of_ones_own() -> Program:
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
            y = x * x
            ctx.save_for_backward(x, y)
            ctx.scale = scale
            return y * x * scale

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            x, y = ctx.saved_tensors
            return g * y * 3 * ctx.scale + 0 * x, None

    return program(
        lambda s, x, k: x + s.b(Cube.apply(torch.tanh(s.a(x)), k).exp()), batch=lambda i: (rows(i), 1.0 + i / 4)
    )


@case()
def function_of_ones_own_with_side_effects() -> Program:
    world = types.SimpleNamespace(calls=[])

    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            world.calls.append("forward")
            ctx.hidden = x.detach() * len(world.calls)
            return x.sin() * len(world.calls)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            world.calls.append("backward")
            return g * ctx.hidden.cos()

    return program(lambda s, x: x + s.b(Counted.apply(s.a(x)).tanh()), world=world)


@case()
def straight_through() -> Program:
    class Round(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.mark_non_differentiable()
            return x.round()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g

    return program(lambda s, x: x + s.b(Round.apply(s.a(x) * 4).tanh().exp()))


@case(works=True)
def lbfgs() -> Program:
    def step(model: Any, given: Any, i: int) -> list[Tensor]:
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.05, max_iter=3)
        losses = []

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(*given)
            loss.backward()
            losses.append(loss.detach().clone())
            return loss

        optimizer.step(closure)
        return losses

    return stepped(step, calm)


@case(works=True)
def checkpoint_in_the_block() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        h = checkpoint(lambda y: F.dropout(torch.tanh(s.a(y)).exp(), 0.2), x, use_reentrant=False)
        return x + s.b(h)

    return program(run, batch=lambda i: (rows(i, grad=True),))


@case()
def reentrant_checkpoint_in_the_block() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        h = checkpoint(lambda y: F.dropout(torch.tanh(s.a(y)).exp(), 0.2), x, use_reentrant=True)
        return x + s.b(h)

    return program(run, batch=lambda i: (rows(i, grad=True),))


@case()
def hooks_of_ones_own_in_the_block() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.double(), lambda t: t.float()):
            h = torch.tanh(s.a(x)).exp()
        return x + s.b(h)

    return program(run)


@case()
def hooks_of_ones_own_that_lose_bits() -> Program:
    def step(model: Any, given: Any, i: int) -> list[Tensor]:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t.float()):
            loss = model(*given)
        loss.backward()
        return [loss]

    return stepped(step, calm)


@case(works=True)
def parts_without_gradients() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            gate = torch.sigmoid(s.b(x))
        return x + s.b((torch.tanh(s.a(x)) * gate).exp()).detach() * 0.1 + s.a(x) * gate

    return program(run)


@case(works=True)
def evaluated_between_forward_and_backward() -> Program:
    def step(model: Any, given: Any, i: int) -> list[Tensor]:
        loss = model(*given)
        with torch.no_grad():
            model.eval()
            other = model(rows(70 + i))
            model.train()
        loss.backward()
        return [loss, other]

    return stepped(step)


@case(works=True)
def forward_without_backward_now_and_then() -> Program:
    def step(model: Any, given: Any, i: int) -> list[Tensor]:
        thrown = model(rows(80 + i))
        loss = model(*given)
        if i != 1:
            loss.backward()
        return [loss, thrown]

    return stepped(step)


@case(works=True)
def backward_in_another_thread() -> Program:
    def step(model: Any, given: Any, i: int) -> list[Tensor]:
        loss = model(*given)
        errors: list[BaseException] = []

        def work() -> None:
            try:
                loss.backward()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return [loss]

    return stepped(step)


@dataclasses.dataclass
class Output:
    """What some models return."""

    loss: Tensor
    hidden: Tensor


@case()
def blocks_that_return_dataclasses() -> Program:
    class Unwrapping(Net):
        def forward(self, x: Tensor) -> Output:
            for layer in self.layers:
                x = layer(x).hidden
            return Output(loss=x.square().mean(), hidden=x)

    def run(s: Any, x: Tensor) -> Output:
        h = torch.tanh(s.a(x))
        return Output(loss=h.mean(), hidden=x + s.b(h.exp()))

    made = block_class(run)
    return Program(model=Unwrapping([made(i) for i in range(BLOCKS)]), batch=lambda i: (rows(i),))


@case()
def blocks_that_are_generators() -> Program:
    class Draining(Net):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                for part in layer(x):
                    x = part
            return x.square().mean()

    def run(s: Any, x: Tensor) -> Any:
        h = torch.tanh(s.a(x))
        yield x + h
        yield x + s.b(h.exp())

    made = block_class(run)
    return Program(model=Draining([made(i) for i in range(BLOCKS)]), batch=lambda i: (rows(i),), live=0)


@case(works=True)
def flow_with_a_running_sum() -> Program:
    class Flow(Net):
        def forward(self, x: Tensor) -> Tensor:
            total = x.new_zeros(len(x))
            for layer in self.layers:
                x, total = layer(x, total)
            return (x.square().sum(-1) - total).mean()

    def run(s: Any, x: Tensor, total: Tensor) -> Any:
        left, right = x.chunk(2, -1)
        scale, shift = s.b(torch.tanh(s.a(torch.cat([left, left], -1)))).chunk(2, -1)
        return torch.cat([right * scale.tanh().exp() + shift, left], -1), total + scale.tanh().sum(-1)

    made = block_class(run)
    return Program(model=Flow([made(i) for i in range(BLOCKS)]), batch=lambda i: (rows(i, grad=True),))


@case()
def backward_under_autocast() -> Program:
    def step(model: Any, given: Any, i: int) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(*given)
            loss.backward()
        return [loss]

    return stepped(step)


@case(works=True)
def autocast_in_some_steps() -> Program:
    def step(model: Any, given: Any, i: int) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=i % 2 == 1):
            loss = model(*given)
        loss.backward()
        return [loss]

    return stepped(step)


@case()
def autocast_switched_off_in_the_block() -> Program:
    def run(s: Any, x: Tensor) -> Tensor:
        h = s.a(x)
        with torch.autocast("cpu", enabled=False):
            h = s.b(torch.tanh(h.float()).exp())
        return x + h

    def step(model: Any, given: Any, i: int) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(*given)
        loss.backward()
        return [loss]

    return program(run, step=step)


@case(works=True)
def anomalies_looked_for() -> Program:
    def step(model: Any, given: Any, i: int) -> list[Tensor]:
        with torch.autograd.set_detect_anomaly(i % 2 == 1, check_nan=False):
            loss = model(*given)
            loss.backward()
        return [loss]

    return stepped(step)


@case()
def a_part_planned_already() -> Program:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            made = block_class(dropping)
            self.parts = nn.ModuleList(Net([made(i) for i in range(2)]) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return sum(part(x) for part in self.parts)

    model = Outer()

    def step(outer: Any, given: Any, i: int) -> list[Tensor]:
        loss = outer(*given) * outer.parts[0](given[0])
        loss.backward()
        return [loss]

    return Program(model=model, batch=lambda i: (rows(i),), step=step)
