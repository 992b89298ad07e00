"""`verify` for checkpointing and offloading that a model already has: torch's, a trainer's or the user's own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils.checkpoint as checkpoints
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from jettison.capture.model_trace import LossFn, expect_module
from jettison.capture.randomness import Streams
from jettison.core.errors import ProofFailed, UnsupportedModule, UsageError
from jettison.core.objects import swapped
from jettison.core.progress import Progress, on_terminal, shown
from jettison.report.proof import Proof
from jettison.runtime.planned_forward import PlannedForward
from jettison.verify import differences
from jettison.verify.side_by_side import ROUNDS, STEPS, Side, compare_steps, mirrored, proof_of

REPEATS = 3


@on_terminal
def verify_given(
    model: nn.Module,
    batch: Any,
    *,
    step: Callable[[nn.Module, Any], object] | None = None,
    against: nn.Module | None = None,
    loss_fn: LossFn | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    values: bool = False,
    steps: int = STEPS,
    repeats: int = REPEATS,
    rounds: int = ROUNDS,
    progress: Progress = shown,
) -> Proof:
    """Train ``model`` as it is, alongside an independent plain copy, and report the comparison.

    The copy runs without saved-tensor hooks and without `torch.utils.checkpoint`: libraries that recompute or offload
    through these do so in the model and not in the copy. The comparison is that of `verify`. In addition, ``repeats``
    steps from one state have to give the same gradients; and where anything differs, one more step finds the first
    tensor whose value in backward differs from the forward's. The steps train ``model``.

    Args:
        step: forward and backward as ``step(model, batch)``, if the loop puts hooks around them; may return the loss.
        against: a model of the same parameters that trains plainly, for a model that recomputes or offloads in an
            autograd function of its own (Megatron's, DeepSpeed's). It gets ``model``'s values.
        loss_fn, optimizer, values: as for `verify`.

    Raises:
        UsageError: the step recomputes and offloads nothing that can be disabled, the copy's step does not train the
            copy, or ``against`` has other parameters.
        UnsupportedModule: the model runs under a plan of Jettison's.
        ProofFailed: the step fails in the model as it is, and not in the plain copy.
    """
    expect_module(model)
    for name, module in model.named_modules():
        if isinstance(module.forward, PlannedForward):
            raise UnsupportedModule(
                f"{name or 'the model'} runs under a plan of Jettison's; prove that one with verify(handle=...)"
            )
    progress("copying the model")
    plain = differences.independent_copy(model) if against is None else _like(against, model)
    theirs = Side(model=model, optimizer=optimizer, batch=batch, loss_fn=loss_fn, keep_output=True, own=step)
    plain_side = replace(theirs, model=plain, optimizer=mirrored(optimizer, model, plain), under=plainly)
    start = Streams.now()
    with torch.enable_grad():
        progress("looking for what it drops and moves")
        left_out = _left_out(plain_side)
        if against is None and not (left_out.hooks or left_out.reentrant):
            raise UsageError(
                "nothing to prove: the step runs under no saved-tensor hooks, and no checkpoint of torch's. What "
                "recomputes or offloads in an autograd function of its own is proven with against=, a model without it"
            )
        _check_runs(theirs, start)
        progress("repeating a step")
        first = _step_of_a_copy(theirs, start)
        again = all(
            differences.compare_gradients(first, _step_of_a_copy(theirs, start)).identical for _ in range(1, repeats)
        )
        del first
        progress("training side by side")
        start.restore()
        before = replace(theirs, model=differences.independent_copy(model), optimizer=None)
        found = compare_steps(plain_side, theirs, steps)
        same = found.gradients_identical and found.losses_identical and again and not values
        departures, watch = ((), differences.ValueWatch()) if same else _departures(before, start)
        proof = proof_of(plain_side, theirs, found, "given", steps, rounds, progress)
    model.zero_grad(set_to_none=True)
    return replace(
        proof,
        left_out=_words(left_out),
        repeats=repeats,
        repeats_identical=again,
        departures=tuple(one.sentence() for one in departures),
        values_compared=watch.compared if values else 0,
        values_bytes=watch.compared_bytes if values else 0,
    )


def _like(against: nn.Module, model: nn.Module) -> nn.Module:
    """Copy the values of ``model``'s parameters and buffers into ``against``."""
    kinds = (nn.Module.named_parameters, nn.Module.named_buffers)
    ours, theirs = ({differences.plain_name(n): t for kind in kinds for n, t in kind(m)} for m in (against, model))
    if ours.keys() != theirs.keys():
        odd = sorted(ours.keys() ^ theirs.keys())
        raise UsageError(f"against= has other parameters and buffers than the model: {', '.join(odd[:5])}")
    with torch.no_grad():
        for name, tensor in ours.items():
            if tensor.shape != theirs[name].shape:
                raise UsageError(f"{name} is {list(tensor.shape)} in against=, {list(theirs[name].shape)} in the model")
            tensor.copy_(theirs[name])
    return against


def _left_out(plain: Side) -> SkippedCheckpoints:
    """Run a plain step of a copy, and count the checkpointing and offloading that it skips."""
    side = replace(plain, model=differences.independent_copy(plain.model), optimizer=None, under=nullcontext)
    with plainly() as found:
        side.step()
    if all(p.grad is None for p in side.model.parameters()):
        raise UsageError(
            "a step of a copy of the model leaves no gradients in the copy: something in it holds on to the original "
            "(a closure, a bound method), or step= does not use the model that it is given. Give against=, a model of "
            "the same parameters that trains plainly"
        )
    return found


def _check_runs(theirs: Side, start: Streams) -> None:
    """Check that a step of the unchanged model works at all."""
    watch = differences.ValueWatch()
    try:
        _step_of_a_copy(theirs, start, watch)
    except CheckpointError as error:
        where = f" in {watch.failed_in}" if watch.failed_in else ""
        named = f" ({watch.failed_at})" if watch.failed_at else ""
        text = " ".join(line.strip() for line in str(error).splitlines()[:3])
        raise ProofFailed(f"not proven: a plain copy trains; as it is, the step fails{where}: {text}{named}") from error


def _step_of_a_copy(theirs: Side, start: Streams, watch: differences.ValueWatch | None = None) -> nn.Module:
    """Return a copy of the model after a step from this random state; ``watch`` observes the step."""
    side = replace(theirs, model=differences.independent_copy(theirs.model), optimizer=None)
    start.restore()
    with nullcontext() if watch is None else watch.watching(side.model):
        side.step()
    return side.model


def _departures(theirs: Side, start: Streams) -> tuple[tuple[differences.Departure, ...], differences.ValueWatch]:
    """Tensors whose values differ, with the number of elements for the first ones; and the watch."""
    watch = differences.ValueWatch()
    _step_of_a_copy(theirs, start, watch)
    found = watch.departures[: differences.MAX_DEPARTURES]
    if found:
        _step_of_a_copy(theirs, start, counting := differences.ValueWatch(keep=found[0]))
        counted = [one for one in counting.departures if one.position == found[0].position]
        found[:1] = counted[:1] or found[:1]
    return tuple(found), watch


def _words(left_out: SkippedCheckpoints) -> str:
    parts = []
    if left_out.hooks:
        parts.append(f"saved-tensor hooks ({left_out.hooks} region{'s' * (left_out.hooks > 1)})")
    if left_out.reentrant:
        parts.append(f"reentrant checkpoints ({left_out.reentrant})")
    return f"without {' and '.join(parts)}" if parts else "the model to compare with, as it is"


# plainly --------------------------------------------------------------------------------------------------------------
#
# A model without its own checkpointing and offloading, unchanged otherwise


@dataclass(kw_only=True)
class SkippedCheckpoints:
    """Counts of checkpoints and hooks that were skipped.

    Args:
        hooks: regions under saved-tensor hooks: checkpoints without reentrant autograd, ``save_on_cpu``, the offloading
            of TRL, torchtune and Transformer Engine.
        reentrant: reentrant checkpoints.
    """

    hooks: int = 0
    reentrant: int = 0


@contextlib.contextmanager
def plainly() -> Iterator[SkippedCheckpoints]:
    """Make autograd keep every tensor that it saves: saved-tensor hooks are not installed, and functions given to
    `torch.utils.checkpoint` just run. Random numbers are drawn as before.

    Autograd functions that drop or move tensors by themselves (Megatron's, DeepSpeed's) still do.
    """
    found = SkippedCheckpoints()

    class Plain:
        @staticmethod
        def apply(function: Callable[..., Any], _keeps_random_state: bool, *args: Any) -> Any:
            found.reentrant += 1
            return function(*args)

    def leave_out(*_: Callable[[Tensor], Any]) -> None:
        found.hooks += 1

    push, pop = "_push_saved_tensors_default_hooks", "_pop_saved_tensors_default_hooks"
    with (
        swapped(torch._C._autograd, **{push: leave_out, pop: lambda: None}),
        swapped(checkpoints, CheckpointFunction=Plain),
    ):
        yield found
