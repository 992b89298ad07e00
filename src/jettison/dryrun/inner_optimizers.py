"""Optimizers that the user's step function steps itself, as a GAN does between its half-steps.

The step reaches the loop's optimizers by a closure or an attribute. During a dry run each of them has the parameter
groups and the state of its copy over fake parameters, so that it steps and frees those.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from jettison.core.errors import UsageError


def each_of(optimizer: torch.optim.Optimizer | None) -> Sequence[torch.optim.Optimizer]:
    """Return the optimizers that one object steps."""
    if optimizer is None:
        return ()
    found: Sequence[torch.optim.Optimizer] = getattr(optimizer, "optimizers", (optimizer,))
    return found


@contextlib.contextmanager
def standing_in(optimizer: torch.optim.Optimizer | None, copied: torch.optim.Optimizer | None) -> Iterator[None]:
    """Let the loop's optimizers step fake parameters within this context."""
    pairs = list(zip(each_of(optimizer), each_of(copied), strict=True))
    own = [dict(vars(real)) for real, _ in pairs]
    for real, fake in pairs:
        vars(real).update(vars(fake))
    try:
        yield
    finally:
        for (real, fake), before in zip(pairs, own, strict=True):
            vars(fake).update({name: vars(real)[name] for name in vars(fake) if name in vars(real)})
            vars(real).clear()
            vars(real).update(before)


@contextlib.contextmanager
def noting_steps(optimizer: torch.optim.Optimizer | None, stepped: Callable[[int], None]) -> Iterator[None]:
    """Watch the optimizers' steps within this context.

    Args:
        stepped: called with an optimizer's number before it steps.

    Raises:
        UsageError: one steps, or frees gradients, that the plan was not given.
    """
    numbers = {id(one): number for number, one in enumerate(each_of(optimizer))}

    def steps(one: torch.optim.Optimizer, *_: Any) -> None:
        if id(one) not in numbers:
            raise UsageError(
                f"step= runs the step of a {type(one).__name__} that optimizer= does not have; give it all that the "
                "step uses, made before planning: optimizer=(first, second)"
            )
        stepped(numbers[id(one)])

    def frees(one: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        if id(one) not in numbers:
            raise UsageError(
                f"step= calls zero_grad() of a {type(one).__name__} that optimizer= does not have, and which has the "
                "real model's parameters; give it as optimizer=, or call model.zero_grad()"
            )
        own(one, *args, **kwargs)

    own = torch.optim.Optimizer.zero_grad
    hook = register_optimizer_step_pre_hook(steps)
    torch.optim.Optimizer.zero_grad = frees
    try:
        yield
    finally:
        torch.optim.Optimizer.zero_grad = own
        hook.remove()
