"""A step under somebody else's checkpointing, on fake tensors: what it holds for backward, and its peak.

Nothing of Jettison's runtime takes part: whoever calls brings a function that changes the model, and what it changed is
put back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from jettison.capture.model_trace import ModelTrace, call_model, loss_of
from jettison.core.errors import TraceError
from jettison.dryrun.block import run_step
from jettison.dryrun.counter import AllocationCounter, Workspace, quiet_gc
from jettison.dryrun.step import OneBatch


@dataclass(frozen=True, kw_only=True)
class GivenStep:
    """Bytes of a step. ``held_bytes`` are alive between forward and backward and were not before: what is saved, and
    what the model returned.
    """

    held_bytes: int
    peak_bytes: int


def dry_run_given(
    trace: ModelTrace,
    change: Callable[[nn.Module], object],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    workspace: Workspace | None = None,
) -> GivenStep:
    """One step of a trace's fake copy after ``change`` was called with it.

    Args:
        optimizer: over the fake copy's parameters; its state is there from before the step that counts.

    Raises:
        TraceError: what was changed cannot run on tensors without values.
    """
    step = OneBatch(trace=trace, optimizer=optimizer)
    model = trace.fake_model
    with _changed(model, change), trace.context(), quiet_gc():
        try:
            return _step(trace, step, workspace)
        except (RuntimeError, NotImplementedError, LookupError, AttributeError) as error:
            text = (str(error).splitlines() or [""])[0]
            raise TraceError(
                f"a step of what was exported failed on fake tensors: {type(error).__name__}: {text}"
            ) from error
        finally:
            model.zero_grad(set_to_none=True)


def _step(trace: ModelTrace, step: OneBatch, workspace: Workspace | None) -> GivenStep:
    model, device, optimizer = trace.fake_model, trace.device_type, step.optimizer
    if optimizer is not None and not optimizer.state:
        with AllocationCounter(step.alive(), device=device) as counter:
            step.leave_gradients(counter)
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    with AllocationCounter(step.alive(), workspace=workspace, device=device) as counter, torch.enable_grad():
        before = counter.live_bytes
        output = call_model(model, trace.batch)
        loss = loss_of(output, trace.loss_fn)
        if not trace.loop.holds_output:
            output = None
        held = counter.live_bytes - before
        del output, loss
    with AllocationCounter(step.alive(), workspace=workspace, device=device) as counter:
        forward, backward, output = run_step(trace, model, counter)
        counter.reset_peak()
        if optimizer is not None:
            optimizer.step()
        last = counter.peak_bytes
        del output
    return GivenStep(held_bytes=held, peak_bytes=max(forward, backward, last) + trace.loop.elsewhere_bytes)


@contextlib.contextmanager
def _changed(model: nn.Module, change: Callable[[nn.Module], object]) -> Iterator[None]:
    """The model after a change; afterwards all its modules have the attributes and children that they had."""
    before = [(module, dict(vars(module)), dict(module._modules)) for module in model.modules()]
    try:
        change(model)
        yield
    finally:
        for module, attributes, children in before:
            vars(module).clear()
            vars(module).update(attributes)
            module._modules.clear()
            module._modules.update(children)
