"""Micro-batches kept whole (arXiv 2205.05198 Appendix C) against a count of every step of every device."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jettison.core.errors import UsageError
from jettison.core.units import GIB
from jettison.families.presets import preset
from jettison.memory.schedule import Work
from jettison.memory.stage_unit import Unit
from jettison.predict.forecast import Stage, forecast, plain
from jettison.predict.stages import pipeline_shape
from jettison.predict.time import estimate
from jettison.request.options import RunRequest
from jettison.request.resolve import resolve
from jettison.search.auto_recompute import choose_with_whole
from jettison.search.largest_fit import most_whole, settled, with_whole
from jettison.spec.hardware import hardware
from jettison.spec.layout import Schedule
from jettison.spec.precision import Gradients
from jettison.spec.recompute import Mode, Recompute
from jettison.spec.run import Run

A100 = hardware("a100-80gb")


def run_of(model: str = "gpt2", **flags: object) -> Run:
    return resolve(preset(model), RunRequest(**flags)).run  # type: ignore[arg-type]


def steps_of(run: Run, stage: int) -> list[tuple[Work, tuple[int, int], bool]]:
    """Every step of a device: what, which micro-batch through which chunk, and is that one kept whole?"""
    steps = pipeline_shape(run).order(stage)
    before = next(i for i, step in enumerate(steps) if step.work is not Work.FORWARD)  # forwards in flight at most
    whole: dict[tuple[int, int], bool] = {}
    for step in steps:
        if step.work is Work.FORWARD:
            whole[step.micro_batch, step.chunk] = len(whole) % before < run.recompute.whole
    return [(s.work, (s.micro_batch, s.chunk), whole[s.micro_batch, s.chunk]) for s in steps]


def counted(run: Run, stage: Stage, whole: Stage) -> int:
    """The most bytes of a device's forwards and backwards, and of its optimizer.

    Args:
        stage, whole: of the run without any micro-batch whole, and with all of them.
    """
    base = stage.load.fixed + stage.load.state
    upfront = run.gradients is Gradients.UPFRONT
    gradients = {c: _gradients(units) for c, units in enumerate(stage.load.chunks) if upfront}
    held: dict[tuple[int, int], int] = {}
    highest = base + stage.load.gradient_bytes + stage.load.optimizer_transient
    for work, key, kept in steps_of(run, stage.index):
        chunk = (whole if kept else stage).load.chunks[key[1]]
        size = sum(len(unit.names) * unit.resident for unit in chunk)
        there = base + sum(held.values()) + sum(gradients.values())
        if work is Work.FORWARD:
            highest = max(highest, there + _forward(chunk))
            held[key] = size
            continue
        highest = max(highest, there - size + _backward(chunk, fresh=key[1] not in gradients))
        if work is Work.WEIGHT or run.layout.schedule is not Schedule.ZERO_BUBBLE:
            del held[key]
            gradients[key[1]] = _gradients(chunk)
    return highest


def _gradients(chunk: tuple[Unit, ...]) -> int:
    return sum(len(unit.names) * unit.gradient for unit in chunk)


def _forward(chunk: tuple[Unit, ...]) -> int:
    level = highest = 0
    for unit in chunk:
        for _ in unit.names:
            highest = max(highest, level + unit.forward_peak)
            level += unit.resident
    return highest


def _backward(chunk: tuple[Unit, ...], *, fresh: bool) -> int:
    """From the chunk's own bytes on; ``fresh``: its gradients appear."""
    level = sum(len(unit.names) * unit.resident for unit in chunk)
    highest = 0
    for unit in reversed(chunk):
        for _ in unit.names:
            highest = max(highest, level + (unit.backward_peak if fresh else unit.adding_peak))
            level += (unit.gradient if fresh else 0) - unit.resident
    return highest


@settings(max_examples=60, deadline=None)
@given(
    shape=st.sampled_from([(2, 1), (4, 1), (2, 2), (3, 2), (2, 3), (4, 3)]),
    rounds=st.integers(1, 6),
    mode=st.sampled_from(["selective", "full", "every:2", "block:1"]),
    schedule=st.sampled_from(["1f1b", "gpipe", "zero-bubble"]),
    whole=st.integers(0, 14),
    gradients=st.sampled_from(["one-by-one", "upfront"]),
)
def test_the_peak_is_that_of_every_step(
    shape: tuple[int, int], rounds: int, mode: str, schedule: str, whole: int, gradients: str
) -> None:
    stages, chunks = shape
    flags = {"pp": stages, "micro_batches": stages * rounds, "recompute": mode, "seq": 256, "kernels": "megatron"}
    flags |= {"gradients": gradients}
    flags |= {"virtual_stages": chunks} if chunks > 1 else {"schedule": schedule}
    run = with_whole(run_of("gpt2-medium" if stages == 4 and chunks == 3 else "gpt2", **flags), whole)
    found, none, every = forecast(run), forecast(with_whole(run, 0)), forecast(plain(run))
    assert [stage.peak.nbytes for stage in found.stages] == [
        counted(run, *pair) for pair in zip(none.stages, every.stages, strict=True)
    ]
    assert found.worst.peak.nbytes == found.peak_bytes
    assert [stage.in_flight for stage in found.stages] == [stage.in_flight for stage in none.stages]


@settings(max_examples=60, deadline=None)
@given(shape=st.sampled_from([(2, 1), (4, 1), (2, 2), (4, 3)]), rounds=st.integers(1, 9), whole=st.integers(1, 20))
def test_the_share_that_computes_again_is_that_of_every_forward(
    shape: tuple[int, int], rounds: int, whole: int
) -> None:
    stages, chunks = shape
    count = stages * rounds
    run = run_of("gpt2-medium", pp=stages, virtual_stages=chunks, micro_batches=count, recompute="full")
    for stage in range(stages):
        less = [not kept for work, _, kept in steps_of(with_whole(run, whole), stage) if work is Work.FORWARD]
        shape = pipeline_shape(run)
        assert shape.recomputing_share(stage, whole) == sum(less) / len(less)
        assert shape.window(stage) <= len(less)


def test_by_hand() -> None:
    """Four stages, 1F1B: 4, 3, 2 and 1 in flight, two of each window whole."""
    run = run_of(pp=4, micro_batches=12, recompute="full", micro_batches_without_recompute="2", kernels="megatron")
    less, every = forecast(with_whole(run, 0)), forecast(plain(run))
    for stage, small, large in zip(forecast(run).stages, less.stages, every.stages, strict=True):
        in_flight = 4 - stage.index
        (held,), (held_whole,) = small.load.chunks, large.load.chunks
        assert stage.activation_bytes == min(2, in_flight) * sum(len(u.names) * u.resident for u in held_whole) + max(
            0, in_flight - 2
        ) * sum(len(u.names) * u.resident for u in held)
    timed, slow, fast = estimate(run, A100), estimate(with_whole(run, 0), A100), estimate(plain(run), A100)
    assert fast.step_seconds < timed.step_seconds < slow.step_seconds
    shares = [
        some.recomputed_flops / all_.recomputed_flops for some, all_ in zip(timed.stages, slow.stages, strict=True)
    ]
    assert shares == [6 / 12, 4 / 12, 0, 0]


def test_as_many_as_fit() -> None:
    run = run_of("gpt-175b", tp=8, pp=8, micro_batches=64, recompute="full")
    for limit in (60 * GIB, 70 * GIB):
        found = most_whole(run, limit)
        assert 0 < found.recompute.whole < pipeline_shape(run).window(0) == 8
        assert forecast(found).peak_bytes <= limit
        assert forecast(with_whole(run, found.recompute.whole + 1)).peak_bytes > limit
    assert most_whole(run, 1000 * GIB).recompute.whole == 8
    assert most_whole(run, GIB).recompute.whole == 0
    with pytest.raises(UsageError, match="needs a limit"):
        settled(run_of(pp=2, recompute="full", micro_batches_without_recompute="most"), ())


def test_a_planner_beside_micro_batches_kept_whole() -> None:
    """Fits with any number; with the best one the step is no slower than with none."""
    run = run_of("gpt-175b", tp=8, pp=8, micro_batches=64, recompute="auto")
    took = {}
    for whole in ("0", "2", "most"):
        asked = replace(run, recompute=resolve(run.model, request(whole)).run.recompute)
        found = choose_with_whole(asked, 56 * GIB, A100)
        assert found.forecast.peak_bytes <= 56 * GIB
        assert found.forecast.run.recompute.mode is Mode.AUTO
        kept = {part.name: part.chosen for part in found.forecast.parts}
        chosen = [kept[name] for name in run.model.layer_names]
        took[whole] = estimate(found.forecast.run, A100, chosen=chosen).step_seconds
    assert took["most"] <= min(took["0"], took["2"])


def request(whole: str) -> RunRequest:
    return RunRequest(tp=8, pp=8, micro_batches=64, recompute="auto", micro_batches_without_recompute=whole)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"recompute": "none"}, "checkpoints no micro-batch"),
        ({"recompute": "full", "offload": True}, "does not go with --offload"),
        ({"recompute": "full", "pp": 1}, "without a pipeline"),
        (
            {"recompute": "full", "micro_batches_without_recompute": "some"},
            "got --micro-batches-without-recompute some",
        ),
        ({"recompute": "full", "micro_batches_without_recompute": "-1"}, "got --micro-batches-without-recompute -1"),
    ],
)
def test_what_does_not_go_together(flags: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run_of(**{"pp": 2, "micro_batches_without_recompute": "1", **flags})


def test_fewer_than_none_are_not_kept_whole() -> None:
    with pytest.raises(UsageError, match="expected 0 or more"):
        Recompute(mode=Mode.FULL, whole=-2)
