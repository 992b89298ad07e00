"""Runs of a region that has no recipe: as `torch.utils.checkpoint` would, where that gives the same, or plainly."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from jettison.capture.compiled import CALLS_COMPILED
from jettison.capture.isolation import without_our_hooks
from jettison.capture.trees import tree_leaves
from jettison.errors import StaleTensor, UsageError, WrongValue
from jettison.runtime.accelerator import is_capturing
from jettison.runtime.checked_run import SequenceCheck, SomeMode
from jettison.runtime.fallback import Rerun, Verdict, trial
from jettison.runtime.forward_run import compute_less_again, named
from jettison.runtime.offload_hooks import OffloadHooks
from jettison.runtime.recordings import WRITTEN_LATER, Prepared
from jettison.runtime.witness import SALT
from jettison.solve.policy import Offload, keeps_everything

if TYPE_CHECKING:
    from jettison.runtime.planned import PlannedForward


def run_without_recipe(
    region: PlannedForward, prepared: Prepared, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """One call. The first one that may be computed again is tried: see `runtime.fallback`."""
    is_kept = region.is_root or keeps_everything(region.way.policy)
    if not is_kept and region.recordings.differs:
        prepared.verdict = Verdict(again=False, why=region.recordings.differs)
    if not is_kept and prepared.verdict is None and prepared.problem == CALLS_COMPILED:
        prepared.verdict = Verdict(again=False, why="compiled functions do not run where ops are watched")
    if not is_kept and prepared.verdict is None:
        late = region.recordings.late or region.recordings.late_inside
        prepared.verdict = (
            Verdict(again=False, why=WRITTEN_LATER) if late else trial(region.module, region.own(), args, kwargs)
        )
        prepared.told = prepared.told and prepared.verdict.again
    if prepared.verdict is not None and prepared.verdict.interrupt is not None:
        interrupt, prepared.verdict = prepared.verdict.interrupt, None
        run_interrupted(region, interrupt, args, kwargs)
    _say(region, prepared)
    if region.is_root:
        return region.forward(*args, **kwargs)
    if not is_kept and prepared.verdict is not None and prepared.verdict.again:
        if is_capturing():
            raise UsageError(
                f"a CUDA graph is being captured, and the Python of {region.name or 'the model'} runs again in its "
                f"backward: {prepared.problem}. Leave it out with regions=[...]"
            )
        return _rerun(region, prepared, prepared.verdict, args, kwargs).run()
    policy = region.way.policy
    with without_our_hooks(), _without_checks():  # what it saves is not the surrounding region's
        if isinstance(policy, Offload) and _may_move(region, prepared):
            return run_moving(region, policy, region.forward, args, kwargs)
        return region.forward(*args, **kwargs)


def run_interrupted(
    region: PlannedForward, interrupt: BaseException, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> NoReturn:
    """The run that counts, and then the exception that left the one before it. See NOTE [ Interrupts ]."""
    with without_our_hooks():
        region.forward(*args, **kwargs)
    raise interrupt


def _without_checks() -> contextlib.AbstractContextManager[Any]:
    """Switch off the dispatch modes of surrounding regions: compiled functions do not run under any."""
    modes = _get_current_dispatch_mode_stack()
    ours = bool(modes) and all(isinstance(mode, SequenceCheck | SomeMode) for mode in modes)
    return _disable_current_modes() if ours else contextlib.nullcontext()


def _may_move(region: PlannedForward, prepared: Prepared) -> bool:
    """Whether what autograd saves is what it gives back, and not what somebody has written there since."""
    late = region.recordings.late or region.recordings.late_inside
    return not late and not (prepared.verdict is not None and prepared.verdict.again)


def run_moving(
    region: PlannedForward, policy: Offload, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """One call, of which what autograd saves goes to the host as it comes by."""
    group = region.begin_group(moves=True)
    assert group is not None
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    lives = [*region.module.parameters(), *region.module.buffers(), *(leaf for leaf in given if leaf.is_leaf)]
    hooks = OffloadHooks(lives, None if region.stays() else group, policy.smallest_bytes)
    try:
        with torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
            return run(*args, **kwargs)
    finally:
        hooks.close()
        group.end()


def _say(region: PlannedForward, prepared: Prepared) -> None:
    """That and why a region is not planned tensor by tensor, once for each reason."""
    if prepared.told:
        return
    prepared.told = True
    verdict = prepared.verdict
    is_kept = region.is_root or keeps_everything(region.way.policy) or (verdict is not None and not verdict.again)
    moves = isinstance(region.way.policy, Offload) and not region.is_root and _may_move(region, prepared)
    kept = "moved to the host as it is saved" if moves else "kept as plain autograd keeps it"
    what = kept if is_kept else "checkpointed whole"
    why = f" and not checkpointed, because {verdict.why}" if verdict is not None and verdict.why else ""
    text = f"{region.name or 'the model'} cannot be planned tensor by tensor and is {what}{why}: {prepared.problem}"
    if is_kept and not moves and not keeps_everything(region.way.policy) and _has_budget(region):
        text += ". The plan counts on less, so that the peak may be above the budget (gradients are not affected)"
    if not region.quiet and text not in region.said:
        region.said.add(text)
        warnings.warn(text, stacklevel=6)


def _has_budget(region: PlannedForward) -> bool:
    return (region.outer or region).assumptions is not None


def _rerun(region: PlannedForward, prepared: Prepared, verdict: Verdict, args: Any, kwargs: Any) -> Rerun:
    name = region.name or "the model"

    def wrong(what: str) -> WrongValue:
        compute_less_again(region, what)
        return WrongValue(
            f"{name} was checkpointed and ran again for backward, and {what} (call {region.calls} of this region). Its "
            "forward hangs on state that changed between the two runs. The gradients of this step must not be used; "
            "from the next step on it is kept as plain autograd keeps it"
        )

    def stale(written: str, then: int | None, now: int | None) -> StaleTensor:
        what = named(region.module, written) if written else "an argument"
        compute_less_again(region, f"{what} was written to between forward and backward", {written} - {""})
        return StaleTensor(
            f"{what} of {name}, which was checkpointed and ran again for backward, was modified by an inplace "
            f"operation between forward and backward: it is at version {now}; expected version {then}. From the next "
            "step on it is kept as plain autograd keeps it"
        )

    return Rerun(
        region.module,
        region.own(),
        args,
        kwargs,
        verdict=verdict,
        how=region.how,
        salt=region.calls * SALT,
        wrong=wrong,
        stale=stale,
        rounded=region.rounded,
    )
