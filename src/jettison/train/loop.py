"""The training loop: one function for all layouts."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any, Final

import torch
from torch import Tensor

from jettison.core.errors import JettisonError, UsageError
from jettison.core.parse_units import parse_seconds
from jettison.core.progress import Progress, silent
from jettison.ledger.step_levels import StepLevels
from jettison.parallel.store_exchange import ranks_in_words
from jettison.train.checkpoint import SaveFailed
from jettison.train.engine import EvaluationResult, EvaluationSet, evaluate
from jettison.train.export_weights import export_session
from jettison.train.optim import StepTotals, clip, learning_rate, set_rate, squared_norm, step_totals
from jettison.train.phase_memory import PhasePeaks
from jettison.train.ranks import RankLost, agreed, is_loss_of_a_rank, waiting_for
from jettison.train.recipe import TrainRecipe
from jettison.train.run_folder import SCHEMA, RunLog, TrainResult
from jettison.train.setup import Session, prepared
from jettison.verify.timing import environment

_SKIPPED_IN_A_ROW: Final = 10
"""Most skipped steps in a row; after more the weights are bad, not the batch, and skipping does not help."""
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_SAME_SECONDS: Final = 2.0
"""Signals this close count as one: torchrun forwards the SIGINT that a terminal has already sent to its ranks."""
_NAMED: Final = 8  # ranks, of those whose loss is not finite


class NotFinite(JettisonError, RuntimeError):
    """A loss or gradient is not finite, and the recipe stops then, or skipping did not help."""


def train(
    make: Callable[[], TrainRecipe], *, must_resume: bool = False, say: Progress = silent, warn: Progress = silent
) -> TrainResult:
    """Run a recipe to its end or to a signal, resuming from a checkpoint if there is one.

    Args:
        make: reads the recipe, once the ranks can agree on errors.
        must_resume: raise if there is no checkpoint.
        say: called with progress, on the leading rank.
        warn: called with problems that do not end the run, on the leading rank.

    Raises:
        UsageError: the recipe does not fit this machine or these files.
        Infeasible: no plan fits the budget.
        SaveFailed: a checkpoint could not be written, and the recipe stops then.
        ExportFailed: the weights could not be written at the end.
        RankLost: another rank has gone, or hangs.
        NotFinite: a loss or gradient is not finite, and the recipe stops then.
    """
    with (
        prepared(make, must_resume=must_resume, say=say, warn=warn) as session,
        StopRequest() as stop,  # before the first step nothing would be lost
        ExitStack() as stepping,
    ):
        stepping.enter_context(waiting_for(session.world, parse_seconds(session.recipe.timeout)))
        run = _StepLoop(session, stop)
        try:
            result = run.to_the_end()
            stepping.close()
            return result if result.stopped else replace(result, export=export_session(session))
        except IndexError as error:
            raise _out_of_range(error, session) from error
        except RuntimeError as error:
            if not is_loss_of_a_rank(error):
                raise
            raise _lost(error, session) from error
        finally:
            run.close()


def _lost(error: RuntimeError, session: Session) -> RankLost:
    first, step, hang = str(error).splitlines()[0][:200], session.step + 1, list[int]()
    with suppress(RuntimeError):  # the store may be gone
        hang = session.world.absent(error)
    if not hang:
        return RankLost(f"another rank has gone during step {step}: {first}; start again to resume")
    return RankLost(
        f'{ranks_in_words(hang)} did not come within timeout = "{session.recipe.timeout}", and the others wait in step '
        f"{step}; start again to resume, with a longer timeout where this was no fault"
    )


def _out_of_range(error: IndexError, session: Session) -> UsageError:
    """Return the error for an index outside of an embedding; most are found before, see `survey.vocabulary`."""
    return UsageError(
        f"model: it cannot look up what it was given in step {session.step + 1}: {error}; the text has tokens up to "
        f"{session.text.highest}, and batch.seq is {session.recipe.batch.seq}. Expected a vocabulary and positions "
        "above these"
    )


@dataclass(kw_only=True)
class _Interval:
    started: float
    steps: int = 0
    measured: bool = False


@dataclass(kw_only=True)
class _RunFacts:
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # of steps without memory measurement
    peaks: dict[int, PhasePeaks] = field(default_factory=dict)  # of the first two steps of this process, and the last
    skipped: int = 0
    evaluated: EvaluationResult | None = None
    eval_peak_bytes: int | None = None  # of the first one
    levels: StepLevels | None = None  # over this rank's second step, or its first


class _StepLoop:
    def __init__(self, session: Session, stop: StopRequest) -> None:
        self.session, self.world, self.stop = session, session.world, stop
        self.say, self.warn = session.say, session.warn
        self.seen = _RunFacts()
        self._skipped_in_a_row = 0
        self._eval_meter = session.eval_meter()
        self.first_step = session.step
        self.log = self.world.together(lambda: self._open_log() if self.world.leads else None)

    def to_the_end(self) -> TrainResult:
        session, recipe = self.session, self.session.recipe
        self._write("start", **self._about())
        if self.log is not None and session.planned is not None:
            self.log.keep_plans(session.planned.plans)
        interval = _Interval(started=time.perf_counter())
        stopped: str | None = None
        while session.step < recipe.steps and stopped is None:
            interval.measured |= session.meter.measuring and self.world.device.type == "cpu"
            totals, peaks, stopped = self._step()
            interval.steps += 1
            self._keep(peaks)
            if session.step % recipe.log.every == 0 or session.step == recipe.steps:
                self._report(totals, peaks, interval)
                interval = _Interval(started=time.perf_counter())
            if session.evaluation is not None and stopped is None:
                last, every = session.step == recipe.steps, recipe.eval.every
                if last or (every and session.step % every == 0):
                    interval.started += self._evaluate(session.evaluation)
            if session.checkpoints is not None:
                session.checkpoints.poll()
                if recipe.checkpoint.every and session.step % recipe.checkpoint.every == 0:
                    self._save()
        self._finish()
        result = self._result(stopped)
        self._write("end", **result.document())
        return result

    def close(self) -> None:
        if self.log is not None:
            self.log.close()

    # a step ----------------------------------------------------------------------------------------------------------

    def _step(self) -> tuple[StepTotals, PhasePeaks | None, str | None]:
        """Run forward, backward and update; the last result is the signal to stop: NOTE [ One sum a step ]."""
        session, section = self.session, self.session.recipe.optimizer
        rate = learning_rate(section, session.step, session.recipe.steps)
        set_rate(session.optimizer, rate)
        checkpoints, first = session.checkpoints, session.data_rank * session.accumulation
        micros, seed = range(first, first + session.accumulation), session.recipe.seed
        with session.meter.step() as measured:
            batches = session.batches.share(session.step, micros, self.world.device, seed, "step")
            loss = session.engine.forward_backward(batches, session.meter.phase)
            del batches
            with session.meter.phase("optimizer"):
                squares = squared_norm(session.parameters, stages=session.layout.pp, copies=set(session.engine.tied))
                asked, failed = self.stop.name is not None, checkpoints is not None and checkpoints.failed
                totals = step_totals(squares, loss, asked=asked, failed=failed)
            update = self._agreed(totals, loss)
            with session.meter.phase("optimizer"):
                if update:
                    if section.clip:
                        clip(session.parameters, totals.norm, section.clip)
                    session.optimizer.step()
                session.engine.clear(session.optimizer)
        session.step += 1
        return totals, measured(), (self.stop.name or "a signal to another rank") if totals.asked else None

    # after a step ----------------------------------------------------------------------------------------------------

    def _agreed(self, totals: StepTotals, loss: Tensor | None) -> bool:
        """Whether the optimizer steps. All ranks decide alike."""
        checkpoints, recipe = self.session.checkpoints, self.session.recipe
        if totals.failed and recipe.checkpoint.on_error == "stop":
            raise agreed(SaveFailed('stopping: a checkpoint could not be written and checkpoint.on_error is "stop"'))
        if totals.finite:
            self._skipped_in_a_row = 0
            if checkpoints is not None:
                checkpoints.proves(self.session.step)
            return True
        return self._spoilt(totals, None if loss is None else loss.item())

    def _spoilt(self, totals: StepTotals, loss: float | None) -> bool:
        """Apply `on_nan`; return whether the optimizer steps nevertheless, or raise `NotFinite`."""
        recipe, step = self.session.recipe, self.session.step + 1
        own = [] if loss is None or isfinite(loss) else [f"{loss} on rank {self.world.rank}"]
        bad, count = self.world.merged((own, len(own)), lambda a, b: ([*a[0], *b[0]][:_NAMED], a[1] + b[1]))
        words = ", ".join(bad) + (f" and {count - len(bad):,} more" if count > len(bad) else "")
        text = f"step {step}: the loss is {words or 'finite'}, the norm of the gradient {totals.size}"
        if recipe.on_nan == "continue":
            self.warn(text)
            return True
        if recipe.on_nan == "stop":
            raise self._stopping(
                f'{text}; stopped before the weights were changed (on_nan = "stop")', 'or set on_nan = "skip"'
            )
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row > _SKIPPED_IN_A_ROW:
            raise self._stopping(f"{text}, after {_SKIPPED_IN_A_ROW} skipped steps in a row", "go back further")
        self.seen.skipped += 1
        self.warn(f"{text}; skipped")
        self._write("skip", step=step)
        return False

    def _stopping(self, text: str, advice: str) -> Exception:
        checkpoints = self.session.checkpoints
        if checkpoints is not None:
            checkpoints.wait()
            text += f"; {self.world.from_leader(checkpoints.newest)}"
        return agreed(NotFinite(f"{text}. Lower optimizer.lr or optimizer.clip, look at the data, {advice}"))

    def _evaluate(self, found: EvaluationSet) -> float:
        session = self.session
        with self._eval_meter.step() as measured, self._eval_meter.phase("evaluation"):
            seen = evaluate(
                found, session.engine, self.world, data_rank=session.data_rank, accumulation=session.accumulation
            )
        self.seen.evaluated = seen
        peaks = measured()
        if peaks is not None and self.seen.eval_peak_bytes is None:
            self.seen.eval_peak_bytes = peaks.peak_bytes
        values = {"loss": seen.loss, "perplexity": seen.perplexity}
        self._write(
            "eval",
            step=session.step,
            tokens=found.tokens,
            **values,
            seconds=seen.seconds,
            peak_bytes=None if peaks is None else peaks.peak_bytes,
        )
        if self.log is not None:
            self.log.scalars(session.step, {f"eval/{name}": value for name, value in values.items()})
        self.say(f"step {session.step}/{session.recipe.steps}  evaluation loss {seen.loss:.4f}")
        return seen.seconds

    def _save(self) -> None:
        assert self.session.checkpoints is not None
        self.session.checkpoints.save(self.session.tensors(), self.session.state())
        self._write("checkpoint", step=self.session.step)

    def _finish(self) -> None:
        checkpoints = self.session.checkpoints
        if checkpoints is None:
            return
        self.say("saving")
        self._save()
        checkpoints.wait()
        reason = self.world.first(checkpoints.unsaved)
        if reason is not None:
            raise agreed(
                SaveFailed(
                    f"the last weights, of step {self.session.step}, are not saved: {reason}; "
                    f"{self.world.from_leader(checkpoints.newest)}"
                )
            )

    def _report(self, totals: StepTotals, peaks: PhasePeaks | None, interval: _Interval) -> None:
        session = self.session
        seconds = (time.perf_counter() - interval.started) / interval.steps
        batch = session.recipe.batch
        tokens = batch.global_batch * batch.seq
        self.seen.losses.append(totals.loss)
        if not interval.measured:
            self.seen.seconds.append(seconds)
        values: dict[str, float | None] = {
            "loss": totals.loss,
            "lr": session.optimizer.param_groups[0]["lr"],
            "grad_norm": totals.size,
            "step_seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "mfu": session.work.mfu(seconds),
            "hfu": session.work.hfu(seconds),
        }
        self._write(
            "step",
            step=session.step,
            tokens=session.step * tokens,
            **values,
            peak_bytes=None if peaks is None else peaks.phases,
            measured=interval.measured,
        )
        if self.log is not None:
            bytes_of = {f"peak_bytes/{name}": float(n) for name, n in peaks.phases.items()} if peaks else {}
            self.log.scalars(session.step, values | bytes_of)
        self.say(_line(session.step, session.recipe, values))

    def _keep(self, peaks: PhasePeaks | None) -> None:
        """Keep peaks of the first step, which allocates the optimizer's state, of the second, and of the last."""
        if peaks is not None:
            number = min(self.session.step - self.first_step, 3)
            self.seen.peaks[number] = peaks
            if number <= 2:
                self.seen.levels = self.session.meter.levels

    def _about(self) -> dict[str, Any]:
        session = self.session
        planned = session.planned
        return {
            "schema": SCHEMA,
            "step": session.step,
            "world": self.world.size,
            "layout": session.sizes,
            "accumulation": session.accumulation,
            "data": session.text.digest,
            "eval_data": None if session.evaluation is None else session.evaluation.text.digest,
            "parameters": sum(p.numel() for p in session.parameters),
            "plans": [] if planned is None else [plan.hash for plan in planned.plans],
            "predicted_peak_bytes": None if planned is None else planned.predicted_peak_bytes,
            "torch": torch.__version__,
            "environment": environment(),
        }

    def _write(self, event: str, **values: Any) -> None:
        if self.log is not None:
            self.log.write(event, **values)

    def _open_log(self) -> RunLog:
        section = self.session.recipe.log
        return RunLog(
            Path(section.folder), tensorboard=section.tensorboard, resumed_step=self.first_step, warn=self.warn
        )

    def _result(self, stopped: str | None) -> TrainResult:
        session, batch = self.session, self.session.recipe.batch
        worst = self.world.merged(self.seen.peaks, _highest)
        seconds = median(self.seen.seconds) if self.seen.seconds else None
        planned, evaluated = session.planned, self.seen.evaluated
        eval_peak = int(self.world.most(self.seen.eval_peak_bytes or 0))
        return TrainResult(
            steps=session.step,
            resumed_step=self.first_step,
            stopped=stopped,
            skipped_steps=self.seen.skipped,
            first_loss=self.seen.losses[0] if self.seen.losses else None,
            last_loss=self.seen.losses[-1] if self.seen.losses else None,
            step_seconds=seconds,
            tokens_per_second=None if seconds is None else batch.global_batch * batch.seq / seconds,
            mfu=None if seconds is None else session.work.mfu(seconds),
            hfu=None if seconds is None else session.work.hfu(seconds),
            first_step_peaks=worst.get(1),
            second_step_peaks=worst.get(2),
            later_peaks=worst.get(3),
            predicted_peak_bytes=None if planned is None else planned.predicted_peak_bytes,
            eval_loss=None if evaluated is None else evaluated.loss,
            eval_perplexity=None if evaluated is None else evaluated.perplexity,
            eval_peak_bytes=eval_peak or None,
            budget=session.recipe.plan.budget,
            log=self.session.recipe.log.folder,
            checkpoint=session.recipe.checkpoint.folder,
            levels=self.seen.levels,
        )


def _highest(one: dict[int, PhasePeaks], other: dict[int, PhasePeaks]) -> dict[int, PhasePeaks]:
    return {
        number: max((of[number] for of in (one, other) if number in of), key=lambda peaks: peaks.peak_bytes)
        for number in one.keys() | other.keys()
    }


def _line(step: int, recipe: TrainRecipe, values: Mapping[str, float | None]) -> str:
    parts = [
        f"step {step}/{recipe.steps}",
        f"loss {values['loss']:.4f}",
        f"{values['tokens_per_second']:,.0f} tokens/s",
    ]
    if values["mfu"] is not None:
        parts.append(f"MFU {values['mfu']:.1%}")
    return "  ".join(parts)


class StopRequest:
    """Context in which SIGTERM and SIGINT stop a run after its step; a second signal ends it at once."""

    def __init__(self) -> None:
        self.name: str | None = None
        self._asked = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # handlers can be set nowhere else
            self._before = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.name is None:
            self.name, self._asked = signal.Signals(number).name, time.monotonic()
        elif time.monotonic() - self._asked > _SAME_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
