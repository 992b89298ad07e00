"""The training loop: one function, whatever the layout."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
from torch import distributed as dist

from jettison.errors import JettisonError, UsageError
from jettison.train.checkpoint import SaveFailed
from jettison.train.engine import MicroBatch
from jettison.train.log import SCHEMA, RunLog
from jettison.train.memory import PhasePeaks
from jettison.train.optim import clip, set_rate, total_norm
from jettison.train.order import derived_seed
from jettison.train.rates import learning_rate
from jettison.train.recipe import TrainRecipe
from jettison.train.result import TrainResult
from jettison.train.setup import Session, prepare
from jettison.train.signals import StopRequest
from jettison.train.tools import Say, Tools, silent
from jettison.train.world import World, agreed, joined

_LOST: Final = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket Timeout", "gloo")


class RankLost(JettisonError, RuntimeError):
    """Another rank has gone: what was computed since the last checkpoint is lost, the checkpoint is not."""


def train(
    make: Callable[[], TrainRecipe],
    tools: Tools,
    *,
    must_resume: bool = False,
    say: Say = silent,
    warn: Say = silent,
) -> TrainResult:
    """Run a recipe to its end, to a signal, or from where its checkpoint folder says.

    Args:
        make: reads the recipe, once the ranks can say together what is wrong with it.
        must_resume: there has to be a checkpoint; otherwise one is taken where there is one.
        say: progress, of the leading rank.
        warn: what went wrong and did not end the run, of the leading rank.

    Raises:
        UsageError: what was asked makes no sense on this machine or with these files.
        Infeasible: no plan fits the budget.
        SaveFailed: a checkpoint could not be written, and the recipe says to stop then.
        RankLost: another rank has gone.
    """
    with joined() as world, StopRequest() as stop:
        if not world.leads:
            say = warn = silent
        recipe = world.together(make)
        _same_everywhere(recipe, world)
        session = prepare(recipe, world, tools, must_resume=must_resume, say=say, warn=warn)
        run = _Run(session, stop, say, warn)
        try:
            return run.to_the_end()
        except RuntimeError as error:
            if not _is_loss_of_a_rank(error):
                raise
            first = str(error).splitlines()[0][:200]
            raise RankLost(
                f"another rank has gone during step {session.step + 1}: {first}; start again to resume"
            ) from error
        finally:
            run.close()


def _same_everywhere(recipe: TrainRecipe, world: World) -> None:
    """Ranks that do different things wait for each other until a timeout.

    Raises:
        UsageError: on every rank, about the first that was given something else than rank 0.
    """
    first, *others = [dict(_flat(fields, "")) for fields in world.gather(asdict(recipe))]
    for rank, given in enumerate(others, start=1):
        for name, expected in first.items():
            if given[name] != expected:
                text = f"{name}: rank {rank} was given {given[name]!r} and rank 0 {expected!r}"
                raise agreed(UsageError(f"{text}; expected one recipe, with the same flags, on every rank"))


def _flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Keys of sections, such as plan.budget, with what they are."""
    if not isinstance(value, dict):
        yield name, value
        return
    for key, inner in value.items():
        yield from _flat(inner, f"{name}.{key}" if name else str(key))


@dataclass(kw_only=True)
class _Interval:
    """What has gone by since the last line of the log."""

    started: float
    steps: int = 0
    measured: bool = False


@dataclass(kw_only=True)
class _Seen:
    """What the result is made of."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # of steps that nothing slowed down
    peaks: dict[int, PhasePeaks] = field(default_factory=dict)  # of the first two steps of this process, and the last


class _Run:
    """One process's way through the steps."""

    def __init__(self, session: Session, stop: StopRequest, say: Say, warn: Say) -> None:
        self.session = session
        self.world: World = session.world
        self.stop = stop
        self.say, self.warn = say, warn
        self.seen = _Seen()
        self.first_step = session.step
        self.log = self.world.together(lambda: self._open_log() if self.world.leads else None)

    def to_the_end(self) -> TrainResult:
        """Step after step, each followed by what hangs on it."""
        session, recipe = self.session, self.session.recipe
        self._write("start", **self._about())
        if self.log is not None and session.planned is not None:
            self.log.keep_plans(session.planned.plans)
        interval = _Interval(started=time.perf_counter())
        stopped: str | None = None
        while session.step < recipe.steps and stopped is None:
            interval.measured |= session.meter.measuring and self.world.device.type == "cpu"
            loss, norm, peaks = self._step()
            interval.steps += 1
            self._keep(peaks)
            if session.step % recipe.log.every == 0 or session.step == recipe.steps:
                self._report(loss, norm, peaks, interval)
                interval = _Interval(started=time.perf_counter())
            stopped = self._agree_to_stop()
            if session.checkpoints is not None:
                session.checkpoints.poll()
                if recipe.checkpoint.every and session.step % recipe.checkpoint.every == 0:
                    self._save()
        self._finish()
        result = self._result(stopped)
        self._write("end", **result.document())
        return result

    def close(self) -> None:
        """Let go of files."""
        if self.log is not None:
            self.log.close()

    # a step ----------------------------------------------------------------------------------------------------------

    def _step(self) -> tuple[torch.Tensor | None, torch.Tensor, PhasePeaks | None]:
        """Forward, backward, update. The loss is this rank's, if it knows one; tensors are still on the device."""
        session, section = self.session, self.session.recipe.optimizer
        rate = learning_rate(section, session.step, session.recipe.steps)
        set_rate(session.optimizer, rate)
        with session.meter.step() as measured:
            loss = session.engine.forward_backward(self._batches(), session.meter.phase)
            with session.meter.phase("optimizer"):
                norm = total_norm(session.parameters, stages=session.layout.pp, copies=set(session.engine.tied))
                if section.clip:
                    clip(session.parameters, norm, section.clip)
                session.optimizer.step()
                session.engine.clear(session.optimizer)
        session.step += 1
        return loss, norm, measured()

    def _batches(self) -> list[MicroBatch]:
        """This rank's share of the global batch: see NOTE [ Positions ]."""
        session, seed = self.session, self.session.recipe.seed
        first = session.data_rank * session.accumulation
        return [
            MicroBatch(
                rows=session.batches.rows(session.step, micro).to(self.world.device, non_blocking=True),
                seed=derived_seed(seed, "step", session.step, micro),
            )
            for micro in range(first, first + session.accumulation)
        ]

    # what hangs on it ------------------------------------------------------------------------------------------------

    def _agree_to_stop(self) -> str | None:
        """Ranks get a signal at different moments, and stop after the same step."""
        checkpoints = self.session.checkpoints
        failed = checkpoints is not None and checkpoints.failed
        asked, failed_anywhere = self.world.most(float(self.stop.name is not None), float(failed))
        if failed_anywhere and self.session.recipe.checkpoint.on_error == "stop":
            raise SaveFailed('stopping: a checkpoint could not be written and checkpoint.on_error is "stop"')
        return (self.stop.name or "a signal to another rank") if asked else None

    def _save(self) -> None:
        assert self.session.checkpoints is not None
        self.session.checkpoints.save(self.session.tensors(), self.session.state())
        self._write("checkpoint", step=self.session.step)

    def _finish(self) -> None:
        """The last checkpoint, on the disk."""
        if self.session.checkpoints is None:
            return
        self.say("saving")
        self._save()
        self.session.checkpoints.wait()
        self._agree_to_stop()

    def _report(
        self, loss: torch.Tensor | None, norm: torch.Tensor, peaks: PhasePeaks | None, interval: _Interval
    ) -> None:
        session = self.session
        total, knowing = self.world.sum(*((0.0, 0) if loss is None else (loss.item(), 1)))
        mean = total / knowing
        seconds = (time.perf_counter() - interval.started) / interval.steps
        batch = session.recipe.batch
        tokens = batch.global_batch * batch.seq
        self.seen.losses.append(mean)
        if not interval.measured:
            self.seen.seconds.append(seconds)
        values: dict[str, float | None] = {
            "loss": mean,
            "lr": session.optimizer.param_groups[0]["lr"],
            "grad_norm": norm.item(),
            "step_seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "mfu": session.work.mfu(seconds),
            "hfu": session.work.hfu(seconds),
        }
        self._write(
            "step", step=session.step, tokens=session.step * tokens, **values,
            peak_bytes=None if peaks is None else peaks.phases, measured=interval.measured,
        )  # fmt: skip
        if self.log is not None:
            bytes_of = {f"peak_bytes/{name}": float(n) for name, n in peaks.phases.items()} if peaks else {}
            self.log.scalars(session.step, values | bytes_of)
        if not isfinite(mean):
            self.warn(f"step {session.step}: the loss is {mean}")
        self.say(_line(session.step, session.recipe, values))

    def _keep(self, peaks: PhasePeaks | None) -> None:
        """The first step makes the optimizer's state, the second one has it from the start: they are kept apart."""
        if peaks is not None:
            number = min(self.session.step - self.first_step, 3)
            self.seen.peaks[number] = peaks

    def _about(self) -> dict[str, Any]:
        session = self.session
        planned, layout = session.planned, session.layout
        return {
            "schema": SCHEMA,
            "step": session.step,
            "world": self.world.size,
            "layout": {"dp": layout.dp, "zero": layout.zero, "tp": layout.tp, "sp": layout.sp, "pp": layout.pp},
            "accumulation": session.accumulation,
            "data": session.batches.corpus.digest,
            "parameters": sum(p.numel() for p in session.parameters),
            "plans": [] if planned is None else [json.loads(text)["hash"] for text in planned.plans],
            "predicted_peak_bytes": None if planned is None else planned.predicted_peak_bytes,
            "torch": torch.__version__,
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
        gathered: list[Mapping[int, PhasePeaks]] = self.world.gather(self.seen.peaks)
        worst = {
            number: max((of_rank[number] for of_rank in gathered if number in of_rank), key=lambda p: p.peak_bytes)
            for number in {number for of_rank in gathered for number in of_rank}
        }
        seconds = median(self.seen.seconds) if self.seen.seconds else None
        planned = session.planned
        return TrainResult(
            steps=session.step, resumed_step=self.first_step, stopped=stopped,
            first_loss=self.seen.losses[0] if self.seen.losses else None,
            last_loss=self.seen.losses[-1] if self.seen.losses else None,
            step_seconds=seconds,
            tokens_per_second=None if seconds is None else batch.global_batch * batch.seq / seconds,
            mfu=None if seconds is None else session.work.mfu(seconds),
            hfu=None if seconds is None else session.work.hfu(seconds),
            first_step_peaks=worst.get(1), second_step_peaks=worst.get(2), later_peaks=worst.get(3),
            predicted_peak_bytes=None if planned is None else planned.predicted_peak_bytes,
            budget=session.recipe.plan.budget,
            log=self.session.recipe.log.folder,
            checkpoint=session.recipe.checkpoint.folder,
        )  # fmt: skip


def _line(step: int, recipe: TrainRecipe, values: Mapping[str, float | None]) -> str:
    parts = [
        f"step {step}/{recipe.steps}",
        f"loss {values['loss']:.4f}",
        f"{values['tokens_per_second']:,.0f} tokens/s",
    ]
    if values["mfu"] is not None:
        parts.append(f"MFU {values['mfu']:.1%}")
    return "  ".join(parts)


def _is_loss_of_a_rank(error: RuntimeError) -> bool:
    return isinstance(error, dist.DistError) or any(word in str(error) for word in _LOST)
