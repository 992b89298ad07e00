"""Runs of a region that has no recipe: as `torch.utils.checkpoint` would, where that gives the same, or plainly."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from jettison.capture.isolation import without_our_hooks
from jettison.errors import WrongValue
from jettison.runtime.fallback import Rerun, Verdict, trial
from jettison.runtime.recordings import WRITTEN_LATER, Prepared

if TYPE_CHECKING:
    from jettison.runtime.planned import PlannedForward


def run_without_recipe(
    region: PlannedForward, prepared: Prepared, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """One call. The first one that may be computed again is tried: see `runtime.fallback`."""
    is_kept = region.is_root or region.way.policy.word == "none"
    if not is_kept and prepared.verdict is None:
        late = region.recordings.late or region.recordings.late_inside
        prepared.verdict = (
            Verdict(again=False, why=WRITTEN_LATER) if late else trial(region.module, region.own(), args, kwargs)
        )
        prepared.told = prepared.told and prepared.verdict.again
    _say(region, prepared)
    if region.is_root:
        return region.forward(*args, **kwargs)
    if not is_kept and prepared.verdict is not None and prepared.verdict.again:
        return _rerun(region, prepared, prepared.verdict, args, kwargs).run()
    with without_our_hooks():  # what it saves is not the surrounding region's
        return region.forward(*args, **kwargs)


def _say(region: PlannedForward, prepared: Prepared) -> None:
    """That and why a region is not planned tensor by tensor, once for each reason."""
    if prepared.told:
        return
    prepared.told = True
    verdict = prepared.verdict
    is_kept = region.is_root or region.way.policy.word == "none" or (verdict is not None and not verdict.again)
    what = "kept as plain autograd keeps it" if is_kept else "checkpointed whole"
    why = f" and not checkpointed, because {verdict.why}" if verdict is not None and verdict.why else ""
    text = f"{region.name or 'the model'} cannot be planned tensor by tensor and is {what}{why}: {prepared.problem}"
    if not region.quiet and text not in region.said:
        region.said.add(text)
        warnings.warn(text, stacklevel=6)


def _rerun(region: PlannedForward, prepared: Prepared, verdict: Verdict, args: Any, kwargs: Any) -> Rerun:
    def wrong(what: str) -> WrongValue:
        prepared.verdict = Verdict(again=False, why=what)
        return WrongValue(
            f"{region.name or 'the model'} was checkpointed and ran again for backward, and {what} (call "
            f"{region.calls} of this region). Its forward hangs on state that changed between the two runs. The "
            "gradients of this step must not be used; from the next step on it is kept as plain autograd keeps it"
        )

    return Rerun(
        region.module,
        region.own(),
        args,
        kwargs,
        verdict=verdict,
        how=region.how,
        salt=region.calls,
        wrong=wrong,
        rounded=region.rounded,
    )
