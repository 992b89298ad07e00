"""What a run came to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

from jettison.ledger.levels import StepLevels
from jettison.train.phase_memory import PhasePeaks
from jettison.units import format_bytes, format_percent, format_seconds

SCHEMA: Final = "jettison.run/1"


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """Peaks are of the rank where they are highest; None where nothing was measured.

    Args:
        steps: done altogether.
        resumed_step: done before this process began.
        stopped: the signal that ended the run early.
        skipped_steps: whose loss or gradient was not finite, in this process.
        step_seconds: the median over steps whose memory was not measured by a profiler.
        first_step_peaks: of this process's first step, in which the optimizer's state is made (or was just read).
        later_peaks: of its last step, where that was measured.
        export: the folder of the weights, if they were written.
        eval_loss, eval_perplexity: of the last evaluation in this process.
        eval_peak_bytes: of its first one.
        levels: bytes over the leading rank's second step, or its first where there was no other.
        report: the page about the run, if one was written.
    """

    steps: int
    resumed_step: int
    stopped: str | None
    first_loss: float | None
    last_loss: float | None
    step_seconds: float | None
    tokens_per_second: float | None
    mfu: float | None
    hfu: float | None
    first_step_peaks: PhasePeaks | None
    second_step_peaks: PhasePeaks | None
    later_peaks: PhasePeaks | None
    predicted_peak_bytes: int | None
    budget: str | None
    log: str
    checkpoint: str | None
    skipped_steps: int = 0
    export: str | None = None
    eval_loss: float | None = None
    eval_perplexity: float | None = None
    eval_peak_bytes: int | None = None
    levels: StepLevels | None = None
    report: str | None = None

    def document(self) -> dict[str, Any]:
        """Schema ``jettison.run/1``."""
        out = asdict(self)
        for name in ("first_step_peaks", "second_step_peaks", "later_peaks"):
            found = out.pop(name)
            out[name.replace("peaks", "peak_bytes")] = None if found is None else found["phases"]
        return {"schema": SCHEMA, "step": self.steps, **out, "request": None}

    def lines(self) -> Iterator[str]:
        """For people."""
        after = f", resumed at {self.resumed_step}" if self.resumed_step else ""
        how = f"stopped by {self.stopped} after" if self.stopped else "done:"
        if self.steps == self.resumed_step and self.stopped is None:
            yield f"nothing left to do: the checkpoint is of step {self.steps}, the last one"
            yield from self._exported()
            return
        yield f"{how} {self.steps} steps{after}"
        if self.skipped_steps:
            yield f"{self.skipped_steps} of them skipped: the loss or the gradient was not finite"
        if self.first_loss is not None and self.last_loss is not None:
            yield f"loss from {self.first_loss:.6f} to {self.last_loss:.6f}"
        if self.eval_loss is not None:
            yield f"evaluation: loss {self.eval_loss:.6f}, perplexity {self.eval_perplexity:.3f}"
        if self.step_seconds is not None:
            speed = f"{format_seconds(self.step_seconds)} a step, {self.tokens_per_second:,.0f} tokens/s"
            used = [
                f"{name} {format_percent(v)}" for name, v in (("MFU", self.mfu), ("HFU", self.hfu)) if v is not None
            ]
            yield ", ".join([speed, *(used or ["MFU and HFU n/a without --gpu"])])
        for name, peaks in (
            ("first", self.first_step_peaks),
            ("second", self.second_step_peaks),
            ("last", self.later_peaks),
        ):
            if peaks is not None:
                each = ", ".join(f"{phase} {format_bytes(n)}" for phase, n in peaks.phases.items())
                yield f"peak of the {name} step: {format_bytes(peaks.peak_bytes)} ({each})"
        if self.predicted_peak_bytes is not None:
            under = f", under a budget of {self.budget}" if self.budget else ""
            yield f"predicted peak: {format_bytes(self.predicted_peak_bytes)}{under}"
        yield f"log: {self.log}" + (f", checkpoints: {self.checkpoint}" if self.checkpoint else "")
        if self.report:
            yield f"report: {self.report}"
        yield from self._exported()

    def _exported(self) -> Iterator[str]:
        if self.export:
            yield f"weights for from_pretrained: {self.export}"
