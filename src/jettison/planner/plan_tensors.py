"""The saved tensors of a trace in words, for whoever reads a plan: by program, so that equal layers have one list."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from jettison.capture.entries import Roles
from jettison.capture.model_trace import ModelTrace
from jettison.capture.recording import RegionTrace
from jettison.ledger.program import Program, Source
from jettison.solve.plan import PlanTensor


def plan_tensors(traced: ModelTrace) -> tuple[PlanTensor, ...]:
    """Of the root, and of one example of each program. Parameters cost a step nothing, and are left out."""
    found = dict.fromkeys(_of(traced.root.program, traced.root, traced.fake_model))
    for call in traced.calls:
        cls, program = traced.classes[call.class_key], traced.program(call)
        if any(tensor.digest == program.digest() for tensor in found):
            continue
        region = cls.trace if cls.program is cls.trace.program else None  # of a compiled block there are only its ops
        found |= dict.fromkeys(_of(program, region, traced.fake_model.get_submodule(call.name)))
    return tuple(found)


def _of(program: Program, region: RegionTrace | None, module: nn.Module) -> Iterator[PlanTensor]:
    roles = None if region is None else Roles(trace=region, module=module)
    refs = dict(zip(program.slots, region.slots, strict=True)) if region is not None else {}
    digest = program.digest()
    for slot in program.slots:
        buffer = program.buffers[slot.buffer]
        if buffer.source is Source.PARAMETER or (region is not None and slot.buffer in region.names):
            continue
        made = PlanTensor(
            digest=digest,
            buffer=slot.buffer,
            path=slot.path,
            op=slot.op,
            role="",
            shape=slot.shape,
            dtype=slot.dtype,
            nbytes=buffer.nbytes,
            free=buffer.free,
        )
        yield made if roles is None else replace(made, op=roles.saver(slot), role=roles.role(slot, refs[slot]))
