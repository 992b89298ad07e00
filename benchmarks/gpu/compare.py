"""Ways to train one model, side by side: each applied, measured, timed between plain rounds, and taken off again."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from benchmarks.gpu.cases import Case, Column, Found, Log, Skip, gib
from benchmarks.gpu.setting import Setting, fingerprints, milliseconds, quartiles
from benchmarks.jettison_rows import at_peak
from benchmarks.rivals import Rival
from jettison.errors import Infeasible
from jettison.measure import measured_peak
from jettison.measure.tensors import static_tensors

COLUMNS = (
    Column(title="budget GiB", key="budget_bytes", show=gib),
    Column(title="peak GiB", key="peak_bytes", show=gib),
    Column(title="reserved GiB", key="reserved_bytes", show=gib),
    Column(title="step ms", key="milliseconds", show="{:.2f}".format),
    Column(title="÷ plain", key="ratio", show="{:.3f}".format),
    Column(title="quartiles", key="quartiles", show=lambda q: f"{q[0]:.3f}–{q[1]:.3f}"),
    Column(title="gradients", key="gradients"),
)
OURS = "jettison"
"""With which the names of Jettison's rows begin: their checks are the kit's."""


class Comparison:
    """One model and its batch, and the ways to train it so far.

    ``loss_of`` runs the forward; what else it returns is let go before backward.
    """

    def __init__(
        self,
        setting: Setting,
        log: Log,
        build: Callable[[], tuple[nn.Module, Any]],
        loss_of: Callable[[nn.Module, Any], torch.Tensor],
        *,
        rounds: int,
        label: str = "",
    ) -> None:
        self.setting, self.log, self.rounds, self.label = setting, log, rounds, label
        self.model, self.batch = build()
        self.loss_of = loss_of
        self.expect = 5.0 if setting.device.type == "cuda" else 1.0
        first, second = self._gradients(), self._gradients()
        self.plain = first if first == second else None  # None: plain steps differ from themselves
        self._clear()

    def close(self) -> None:
        """Let the model go."""
        del self.model, self.batch
        gc.collect()

    def row(self, rival: Rival, budget_bytes: int | None = None) -> Case:
        """Measure one way."""
        case = self.log.case(
            f"{rival.name}{self.label}", lambda: self._measured(rival, budget_bytes), expect=self.expect
        )
        self.expect = max(self.expect, 0.8 * case.seconds)
        return case

    def at_peaks_of(self, cases: Sequence[Case]) -> None:
        """Jettison under the measured peak of each."""
        for case in cases:
            if "peak_bytes" in case.figures:
                peak_bytes = case.figures["peak_bytes"]
                self.row(at_peak(case.name.removesuffix(self.label), peak_bytes), peak_bytes)

    def _step(self) -> None:
        self.loss_of(self.model, self.batch).backward()

    def _clear(self) -> None:
        self.model.zero_grad(set_to_none=True)

    def _timed(self) -> None:
        self._clear()
        self._step()

    def _gradients(self) -> dict[str, int]:
        self._clear()
        torch.manual_seed(7)
        self._step()
        return fingerprints(self.model)

    def _measured(self, rival: Rival, budget_bytes: int | None) -> Found:
        self._clear()
        try:
            handle = rival.apply(self.model, self.batch)
        except Infeasible as error:
            raise Skip(str(error)) from None
        except Exception as error:
            if rival.name.startswith(OURS):
                raise
            raise Skip(f"{type(error).__name__}: {str(error).splitlines()[0][:200]}") from None
        ours = rival.name.startswith(OURS)
        try:
            gradients = [self._gradients() for _ in range(2)][-1]  # the first run of a plan is checked
            self._timed()
            self._clear()
            report = measured_peak(self._step, static_tensors=static_tensors(self.model, self.batch))
            treated = milliseconds(self._timed, self.rounds, self.setting.device)
        except torch.OutOfMemoryError as error:
            if ours:
                raise
            raise Skip(f"out of memory: {str(error).splitlines()[0][:200]}") from None
        finally:
            handle.remove()
            self._clear()
        figures = {
            "budget_bytes": budget_bytes,
            "peak_bytes": report.peak_bytes,
            "reserved_bytes": report.reserved_bytes,
            "requested_bytes": report.requested_bytes,
            "static_bytes": report.static_bytes,
            "milliseconds": statistics.median(treated),
            "gradients": self._verdict(gradients),
            **self._beside_plain(treated),
        }
        problems = []
        if ours:
            problems += ["gradients differ"] if figures["gradients"] == "differ" else []
            over = report.peak_bytes - (budget_bytes or report.peak_bytes)
            problems += [f"the peak is {over} bytes above the budget"] if over > 0 else []
        return Found(figures=figures, problems=problems)

    def _verdict(self, gradients: dict[str, int]) -> str:
        if self.plain is None:
            return "plain differs from itself"
        return "identical" if gradients == self.plain else "differ"

    def _beside_plain(self, treated: list[float]) -> dict[str, Any]:
        """Plain rounds right after; empty where a plain step does not fit."""
        try:
            milliseconds(self._timed, 2, self.setting.device)
            plain = milliseconds(self._timed, self.rounds, self.setting.device)
        except torch.OutOfMemoryError:
            return {}
        finally:
            self._clear()
        low, middle, high = quartiles(treated)
        usual = statistics.median(plain)
        return {"plain_milliseconds": usual, "ratio": middle / usual, "quartiles": [low / usual, high / usual]}
