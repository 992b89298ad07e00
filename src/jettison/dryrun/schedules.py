"""Schedules of `torch.distributed.pipelining`, recognized without importing it.

That import takes a second, and a schedule exists only after it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import nn

from jettison.core.errors import UnsupportedModule

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineSchedule

    from jettison.dryrun.imagined_pipeline import ImaginedSchedule

Scheduled: TypeAlias = "_PipelineSchedule"
"""Any schedule of torch's."""


def is_schedule(thing: Any) -> bool:
    """Whether an object is a schedule of torch's."""
    schedules = sys.modules.get("torch.distributed.pipelining.schedules")
    return schedules is not None and isinstance(thing, schedules._PipelineSchedule)


def stages_of(schedule: Scheduled) -> list[PipelineStage]:
    """Return a rank's stages, in the order of the model.

    Raises:
        UnsupportedModule: a stage is no `PipelineStage`.
    """
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle

    single = isinstance(schedule, PipelineScheduleSingle)
    found: Any = [schedule._stage] if single else getattr(schedule, "_stages", [])
    for stage in found:
        if not isinstance(stage, PipelineStage):
            raise UnsupportedModule(
                f"got a {type(stage).__name__} in {type(schedule).__name__}; expected stages that are made as "
                "torch.distributed.pipelining.PipelineStage(module, index, count, device)"
            )
    return list(found)


def modules_of(things: Sequence[nn.Module | Scheduled | ImaginedSchedule]) -> list[nn.Module]:
    """Return the modules of a step: its models, and the stages of its schedules."""
    found: list[nn.Module] = []
    for one in things:
        if isinstance(one, nn.Module):
            found.append(one)
        elif is_schedule(one):
            found += [stage.submod for stage in stages_of(one)]
        else:
            found += one.modules
    return found
