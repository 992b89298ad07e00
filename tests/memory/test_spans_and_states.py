"""A step as a product of spans says what `ledger.timeline` says, state by state: on described runs, at random."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest

from jettison import RunRequest, run_of
from jettison.errors import UsageError
from jettison.ledger import timeline
from jettison.ledger.halves import Halves as OldHalves
from jettison.ledger.timeline import Unit as OldUnit
from jettison.memory.actions import Walk, Weights, device_order
from jettison.memory.step import Event, Lifetime, StageLoad, moments, peak, peak_bytes
from jettison.memory.unit import Halves, Unit, WeightStep
from jettison.predict.forecast import forecast
from jettison.spec.layout import Schedule
from jettison.spec.precision import Gradients
from jettison.spec.run import Run

MODELS = ("llama3-8b", "gpt-22b", "llama3-405b", "mixtral-8x7b")
FRAMEWORKS = ("megatron-0.19", "megatron-0.18", "torchtitan", "nanotron", "huggingface", "deepspeed", None)


def _of(old: Any, cls: Any, **more: Any) -> Any:
    return cls(**{f.name: getattr(old, f.name) for f in fields(old)} | more)


def _halves(old: OldHalves | None) -> Halves | None:
    return None if old is None else _of(old, Halves, steps=tuple(_of(s, WeightStep) for s in old.steps))


def _chunks(old: tuple[tuple[OldUnit, ...], ...]) -> tuple[tuple[Unit, ...], ...]:
    made: dict[int, tuple[Unit, ...]] = {}
    return tuple(made.setdefault(id(c), tuple(_of(u, Unit, halves=_halves(u.halves)) for u in c)) for c in old)


def _load(old: timeline.StageLoad, run: Run, stage: int) -> StageLoad:
    layout = run.layout
    weights = Weights.RESIDENT
    if layout.regathers:
        weights = Weights.FETCHED if layout.virtual_stages > 1 or layout.schedule.splits else Weights.GATHERED
    learning = run.gradients is not Gradients.UPFRONT or (layout.keeps_received and layout.virtual_stages > 1)
    reducing = bool(old.shards)
    order = device_order(
        layout.schedule if layout.pp > 1 else Schedule.ONE_F_ONE_B,
        stage=stage,
        stages=layout.pp,
        micro_batches=run.micro_batches,
        virtual_stages=layout.virtual_stages,
        group=layout.micro_batch_group,
        whole=run.recompute.whole,
        walk=Walk(old.sending, learning or reducing, reducing, weights),
    )
    lives = (
        ("around", old.around, Event.FORWARD, Event.OPTIMIZER),
        ("variables", old.variables, Event.BACKWARD if learning else Event.FORWARD, Event.OPTIMIZER),
        ("left", old.left, Event.OPTIMIZER, Event.FORWARD),
        ("copies", old.copies + old.batches, Event.OPTIMIZER, Event.STEP),
    )
    same = {f.name for f in fields(StageLoad)} & {f.name for f in fields(old)} - {"chunks", "whole_chunks"}
    return StageLoad(
        chunks=_chunks(old.chunks),
        whole_chunks=_chunks(old.whole_chunks),
        order=order,
        lifetimes=tuple(Lifetime(name=n, nbytes=b, begin=begin, end=end) for n, b, begin, end in lives),
        transfers=tuple(old.passed * n for n in old.sending),
        **{name: getattr(old, name) for name in same},
    )


def _runs(draw: random.Random) -> Iterator[Run]:
    while True:
        pp = draw.choice([1, 2, 4, 8])
        chunks = draw.choice([1, 1, 2, 4]) if pp > 1 else 1
        said: dict[str, Any] = {
            "seq": 2048,
            "like": draw.choice(FRAMEWORKS),
            "tp": draw.choice([1, 8]),
            "pp": pp,
            "virtual_stages": chunks,
            "dp": draw.choice([1, 4]),
            "micro_batches": pp * draw.choice([1, 2, 4, 9]),
            "recompute": draw.choice(["none", "full", "selective", "selective-op", "every:2"]),
            "zero": draw.choice([None, None, 1, 2, 3]),
            "precision": draw.choice([None, None, "bf16-autocast"]),
        }
        if pp > 1 and draw.random() < 0.4:
            said["schedule"] = "zero-bubble" if draw.random() < 0.5 else "gpipe"
        if pp > 1 and draw.random() < 0.3 and said["recompute"] != "none":
            said["whole_micro_batches"] = draw.choice(["1", "2"])
        if draw.random() < 0.2:
            said["offload"] = True
        try:
            yield run_of(draw.choice(MODELS), RunRequest(**{k: v for k, v in said.items() if v is not None}))
        except UsageError:
            continue


@pytest.mark.parametrize("seed", range(4))
def test_spans_say_what_states_say(seed: int) -> None:
    stages = 0
    runs = _runs(random.Random(seed))
    while stages < 60:
        try:
            run = next(runs)
            found = forecast(run)
        except UsageError:
            continue
        for stage in found.stages:
            stages += 1
            load = _load(stage.load, run, stage.index)
            for first_step in (False, True):
                old = timeline.peak(stage.load, first_step=first_step)
                new = peak(load, first_step=first_step)
                assert (new.nbytes, new.phase, new.where) == (old.nbytes, old.phase, old.where)
                assert peak_bytes(load, first_step=first_step) == old.nbytes
                expected = [_row(each) for each in timeline.moments(stage.load, first_step=first_step)]
                assert [_row(each) for each in moments(load, first_step=first_step)] == expected


def _row(moment: Any) -> tuple[str, str, int, int]:
    return str(moment.phase), moment.where, moment.micro_batch, moment.nbytes
