"""Ways to train one model, side by side: each applied, measured, timed between plain rounds, and taken off again."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from benchmarks.gpu.cases import Case, Column, Found, Log, Skip, gib
from benchmarks.gpu.glance import Line
from benchmarks.gpu.setting import Setting, fingerprints, milliseconds, quartiles
from benchmarks.jettison_rows import at_peak
from benchmarks.rivals import Rival
from jettison.core.errors import Infeasible
from jettison.dryrun.counter import measured_peak, static_tensors

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

    Args:
        subject: the model's name on the page of all peers.
        exact: Jettison's gradients are to be plain autograd's, bit by bit.
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
        subject: str = "",
        exact: bool = True,
    ) -> None:
        self.setting, self.log, self.rounds, self.label = setting, log, rounds, label
        self.subject, self.exact = subject or log.title, exact
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

    def row(
        self, rival: Rival, budget_bytes: int | None = None, *, peer: Case | None = None, asked: float | None = None
    ) -> Case:
        """Measure one way.

        Args:
            peer: the row that this one is compared with, on the page of all peers.
            asked: the time ÷ plain that is asked for; a peer's own where it is left out.
        """

        def measured() -> Found:
            found = self._measured(rival, budget_bytes)
            if "ratio" not in found.figures or (peer is None and asked is None):
                return found
            line = Line(
                model=self.subject,
                peer="" if peer is None else peer.name.removesuffix(self.label),
                ours=rival.name.removeprefix("jettison").removeprefix(", ").strip(),
                peak_bytes=found.figures["peak_bytes"] if peer is None else peer.figures["peak_bytes"],
                peer_ratio=None if peer is None else peer.figures.get("ratio"),
                ratio=found.figures["ratio"],
                asked=asked,
            )
            return replace(found, figures={**found.figures, "line": line.document()})

        case = self.log.case(f"{rival.name}{self.label}", measured, expect=self.expect)
        self.expect = max(self.expect, 0.8 * case.seconds)
        return case

    def at_peaks_of(self, cases: Sequence[Case], *, extra_bytes: int = 0, **options: Any) -> list[Case]:
        """Jettison under the measured peak of each, with further options of `auto_checkpoint`.

        Args:
            extra_bytes: on top of each peak: what plans leave for what they do not see.
        """
        made = []
        for case in cases:
            if "peak_bytes" in case.figures:
                budget_bytes = case.figures["peak_bytes"] + extra_bytes
                rival = at_peak(case.name.removesuffix(self.label), budget_bytes, **options)
                made.append(self.row(rival, budget_bytes, peer=case))
        return made

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
            problems += ["gradients differ"] if figures["gradients"] == "differ" and self.exact else []
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
