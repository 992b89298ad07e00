"""Torch's two halves of a backward on one stage, every byte counted, beside what the closed form says of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

if not torch.distributed.is_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)

from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from jettison.core.errors import UsageError
from jettison.dryrun.counter import AllocationCounter, static_tensors
from jettison.formula.region import Region, head_region, layer_region
from jettison.formula.split_backward import input_half, weight_half
from jettison.formula.tape import TapeOp
from jettison.memory.step import Event, StageLoad
from jettison.predict.forecast import forecast
from jettison.predict.stage_buffers import buffers_of
from jettison.predict.stages import KeptBuffers, kept_by
from jettison.spec.layout import Layout, Reshard, Schedule
from jettison.spec.recompute import Recompute
from jettison.spec.run import Run
from support.formula_cases import run_of
from support.pipeline_peaks import Case, Cut, chunks_of

TOKENS, WIDTH = 128, 64
SMALL = 640
"""Bytes of positions and of numbers that autograd keeps, which no forecast has."""
NAMED = TOKENS * WIDTH * 4
"""GPT-2's block has a name for what its attention returns."""


def told(case: Case, recompute: str = "none", schedule: Schedule = Schedule.ZERO_BUBBLE) -> Run:
    run = run_of(case.formula)
    layout = Layout(pp=len(case.stage_layers), schedule=schedule, stage_layers=case.stage_layers, stage_buffers=True)
    found = Recompute.parse(recompute, layers=run.model.depth)
    return replace(run, layout=layout, micro_batches=case.micro_batches, recompute=found)


@dataclass
class Measured:
    """Bytes above parameters and buffers: behind a forward, a first half and a second one, and at their highest."""

    forward: int
    between: int
    behind: int
    peaks: tuple[int, int]


def measured(module: Cut, counter: AllocationCounter, x: torch.Tensor, given: torch.Tensor) -> Measured:
    x.grad = None
    base = counter.live_bytes
    out = module(x)
    forward = counter.live_bytes - base
    counter.reset_peak()
    _, groups = stage_backward_input([out], [given], [x], module.parameters())
    between, first = counter.live_bytes - base, counter.peak_bytes - base
    counter.reset_peak()
    stage_backward_weight(module.parameters(), groups)
    del groups
    second = counter.peak_bytes - base
    return Measured(forward, between, counter.live_bytes - base, (first, second))


def rows(load: StageLoad, *, fresh: bool) -> tuple[int, int]:
    """The highest of either half, above what is fixed."""
    level, highest = load.held(0), 0
    for unit in reversed(load.chunks[0]):
        assert unit.halves is not None
        for _ in unit.names:
            highest, level = max(highest, level + unit.halves.input_peak), level + unit.halves.waiting
    level, second, named = load.held_half(0), 0, 0
    for unit in load.chunks[0]:
        assert unit.halves is not None
        for step in unit.halves.steps * len(unit.names):
            made = step.made if fresh else step.added
            second = max(second, level + step.rise + made + named)
            level += step.change + (made if fresh else 0)
            named = 0 if fresh else made
    return highest, second


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("full", [False, True])
def test_a_stage_between_two_others(family: str, full: bool) -> None:
    case = Case(family=family, stage_layers=(1, 2, 1), schedule="zero-bubble", full=full)
    load = forecast(told(case, "full" if full else "none")).stages[1].load
    ((_, module),) = (found for found in chunks_of(case, 1, 3, Cut))
    x = torch.randn(case.batch, case.sequence, WIDTH, requires_grad=True)
    given = torch.randn(case.batch, case.sequence, WIDTH)
    with AllocationCounter([*static_tensors(module, ()), x, given]) as counter:
        once = measured(module, counter, x, given)
        again = measured(module, counter, x, given)
    stream = TOKENS * WIDTH * 4
    near = SMALL + (NAMED if full and family == "gpt2" else 0)
    for found, fresh in ((once, True), (again, False)):
        assert found.forward == pytest.approx(load.held(0), abs=SMALL)
        assert found.between == pytest.approx(load.held_half(0), abs=SMALL)
        left = load.gradient_bytes if fresh else 0
        assert found.behind == pytest.approx(left + 2 * stream, abs=SMALL), "the output, and the input's gradient"
        for got, says in zip(found.peaks, rows(load, fresh=fresh), strict=True):
            assert 0 <= got - says <= near


def test_what_a_layer_holds_by_hand() -> None:
    """GPT-2, 128 tokens of 64 numbers: outputs of both norms, of queries, keys and values, and of three products."""
    case = Case(family="gpt2", stage_layers=(1, 1))
    run = told(case)
    region = layer_region(run.signature, run.model.layers[0])
    kept, one = kept_by(region, "none"), TOKENS * WIDTH * 4
    half = input_half(region, kept, run.gradient_rule)
    assert half.gradients == (1 + 3 + 1 + 1 + 4 + 1) * one
    assert half.incoming == one, "what the last product is given is what the layer is given"
    assert half.detached == 0
    steps = weight_half(region, kept, run.gradient_rule)
    both = [sum(one for one in pair) for pair in ((64, 64), (3 * 64 * 64, 3 * 64), (64 * 64, 64))]
    assert [step.made for step in steps[:3]] == [4 * numbers for numbers in both]
    statistics = 2 * TOKENS * 4
    assert steps[0].released == one + statistics + one, "input, mean and deviation, and a gradient"
    assert steps[1].released == one + 3 * one, "the normed input, which nothing else reads; q, k and v stay"
    assert steps[2].released == one, "attention's own backward needs what it returned"
    head = input_half(head_region(run.signature), kept_by(head_region(run.signature), "none"), run.gradient_rule)
    logits = TOKENS * 128 * 4
    assert head.gradients == one + logits
    assert head.detached > logits, "the loss is behind the last weight"


def test_a_checkpoint_is_computed_for_each_op_that_reads_weights() -> None:
    """Six of GPT-2's: what other nodes save is there six times before it goes, but for the last layer of a stage."""
    case = Case(family="gpt2", stage_layers=(1, 3, 1), schedule="zero-bubble")
    (chunk,) = forecast(told(case, "full")).stages[1].load.chunks
    region = layer_region(told(case).signature, told(case).model.layers[0])
    inner = chunk[1].halves
    assert inner is not None
    saved = {b for step in region.tape.steps if not step.learned for b in _saved(region, step)}
    assert len(inner.steps) == 6
    assert sum(step.computed for step in inner.steps) == 6 * region.program.kept_bytes(frozenset(saved))
    last = chunk[-1].halves
    assert last is not None
    assert sum(step.computed for step in last.steps) == 0
    assert inner.waiting == (1 + 3 + 1 + 1 + 4 + 1) * TOKENS * WIDTH * 4


def _saved(region: Region, step: TapeOp) -> set[int]:
    return {region.buffers[each.value.storage] for each in step.saved}


def test_segments_and_plans() -> None:
    """A segment of two is computed for each of its twelve; what a plan computes again is there once."""
    case = Case(family="gpt2", stage_layers=(1, 4, 1), schedule="zero-bubble")
    run = told(case, "every:2")
    units = forecast(run).stages[1].load.chunks[0]
    assert [unit.names for unit in units] == [("layers.1 to layers.2",), ("layers.3 to layers.4",)]
    assert all(unit.halves is not None and len(unit.halves.steps) == 12 for unit in units)
    none, full = forecast(told(case)), forecast(told(case, "full"))
    kept = [KeptBuffers(part.kept) for part in full.parts if part.is_layer]
    planned = forecast(told(case, "full"), kept)
    halves = [unit.halves for found in (none, planned) for unit in found.stages[1].load.chunks[0][1:2]]
    assert None not in halves
    reading = 1 + 1 + 1 + 1 + 4  # inputs of five ops with weights, of which the first is what the layer is given
    assert halves[1].waiting - halves[0].waiting == (reading - 1 + 1) * TOKENS * WIDTH * 4 + 2 * 2 * TOKENS * 4
    assert all(step.computed == 0 for step in halves[1].steps)


def test_a_v_has_both_ends_of_a_model_on_its_first_stage() -> None:
    layout = Layout(pp=4, virtual_stages=2, schedule=Schedule.ZERO_BUBBLE_V, stage_buffers=True)
    assert [layout.places(index) for index in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    assert layout.neighbours(3) == ((False, True), (True, False))
    assert layout.neighbours(0) == ((False, False), (False, False))
    run = replace(told(Case(family="gpt2", stage_layers=(1,) * 8)), layout=layout)
    stages = forecast(run).stages
    assert [[group.names for group in chunk] for chunk in stages[0].groups] == [
        [("embedding",), ("layers.0",)],
        [("layers.7",), ("head",)],
    ]
    assert [stage.load.order.walk.sending for stage in stages] == [(1, 1), (2, 2), (2, 2), (1, 1)]
    stream = TOKENS * WIDTH * 4
    assert [stage.load.there(Event.STEP) for stage in stages] == [
        each * run.micro_batches * stream for each in (1, 2, 2, 1)
    ]
    inner, bottom = stages[2].load.chunks, stages[3].load.chunks
    assert inner[0][0].resident - bottom[0][0].resident == stream, "the output is the other chunk's buffer"
    halves = inner[1][0].halves, bottom[1][0].halves
    assert None not in halves
    assert halves[0].waiting - halves[1].waiting == stream, "so is the gradient that comes back"
    assert [part.name for part in forecast(run).parts][1:-1] == [f"layers.{number}" for number in range(8)]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"virtual_stages": 1}, "zero-bubble-v with --virtual-stages 1; it needs 2"),
        ({"virtual_stages": 2, "keeps_received": True}, "give --stage-buffers, or none of them"),
    ],
)
def test_a_v_is_torchs(flags: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Layout(pp=4, schedule=Schedule.ZERO_BUBBLE_V, **flags)


def test_halves_of_stages_that_reshard_are_refused() -> None:
    """torch's second half asks for parameters that are shards by then, and leaves them without gradients."""
    asked: dict[str, Any] = {"pp": 2, "dp": 2, "zero": 3, "stage_buffers": True, "schedule": Schedule.ZERO_BUBBLE}
    with pytest.raises(UsageError, match="torch's split backward misses gradients of parameters that backward"):
        Layout(**asked)
    assert Layout(**asked, reshard=Reshard.NEVER).schedule.splits


def test_the_first_stage_has_no_halves_and_the_paper_none() -> None:
    case = Case(family="llama", stage_layers=(1, 1, 1, 1))
    found = forecast(told(case))
    assert [any(unit.halves for unit in stage.load.chunks[0]) for stage in found.stages] == [False, True, True, True]
    assert [stage.load.there(Event.STEP) for stage in found.stages] == [0, *[4 * TOKENS * WIDTH * 4] * 3]
    assert found.worst.peak.nbytes == found.peak_bytes
    usual = told(case, schedule=Schedule.ONE_F_ONE_B)
    assert not any(unit.halves for stage in forecast(usual).stages for unit in stage.load.chunks[0])
    assert "gradients of inputs" not in {row.name for row, _ in buffers_of(usual, 1)}
