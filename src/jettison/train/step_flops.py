"""How much work a step is, and what share of the devices' peak that comes to.

MFU counts what the model needs: one forward, and two for its backward; HFU also counts what is computed again. A
multiply-add is 2, attention counts in full whatever its mask hides, and only matrix products and attention count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jettison.capture.fakes import fake_copy, fake_mode
from jettison.capture.tracer import trace_model
from jettison.core.errors import TraceError
from jettison.cost.flops import PASSES, forward_flops
from jettison.cost.utilisation import utilisation
from jettison.spec.hardware import hardware
from jettison.spec.model import ModelSpec
from jettison.spec.run import Run
from jettison.train.build_model import Built
from jettison.train.recipe import LogSection


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """FLOPs of one step over all ranks, and the peak FLOP/s of one device; None: not known.

    Args:
        model_flops: what the model needs.
        recomputed_flops: what is computed again on top.
    """

    model_flops: float | None
    recomputed_flops: float = 0.0
    devices: int = 1
    peak_flops_per_second: float | None = None

    def mfu(self, seconds: float) -> float | None:
        """Model FLOPs utilisation of a step that took so long."""
        return self._share(self.model_flops, seconds)

    def hfu(self, seconds: float) -> float | None:
        """Hardware FLOPs utilisation."""
        return self._share(None if self.model_flops is None else self.model_flops + self.recomputed_flops, seconds)

    def _share(self, flops: float | None, seconds: float) -> float | None:
        peak = self.peak_flops_per_second
        if flops is None or peak is None:
            return None
        return utilisation(flops, seconds=seconds, devices=self.devices, peak_flops_per_second=peak)


def spec_flops(spec: ModelSpec, *, sequences: int, seq: int) -> float:
    """FLOPs of training on this many sequences, without recompute, by the closed form."""
    return PASSES * sequences * forward_flops(Run(model=spec, seq=seq))


def traced_flops(built: Built, batch: Any, *, micro_batches: int) -> float | None:
    """The same from a trace of one micro-batch's forward; None where there can be none."""
    mode = fake_mode(allow_non_fake_inputs=True)
    try:
        traced = trace_model(fake_copy(built.model, mode, "cpu"), batch, loss_fn=built.loss_fn, mode=mode)
    except TraceError:
        return None
    programs = [traced.root.program, *(traced.program(call) for call in traced.calls)]
    return float(PASSES * micro_batches * sum(op.flops for program in programs for op in program.ops))


def peak_flops_per_second(log: LogSection, precision: str) -> float | None:
    """Of one device, as the recipe or the accelerator's file says for products of this precision."""
    if log.peak_tflops is not None:
        return log.peak_tflops * 1e12
    if log.gpu is None:
        return None
    rates = hardware(log.gpu).flops_per_second
    found = rates.bf16 if precision.startswith("bf16") else rates.fp32  # torch's fp32 products are not tf32
    return None if found is None else float(found)
