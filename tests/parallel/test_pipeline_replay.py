"""Torch's own pipeline schedules on real ranks, next to ours: what runs when, what is held, and how long a step takes.

Stages do nothing but sleep: in their forward, in the half of their backward that makes the gradient of their input, and
in the half for their weight. So the cores that ranks share cost little, and the time of a step is the schedule's.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

if not torch.distributed.is_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)

from torch import Tensor, distributed, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from jettison.cost.pipeline import Replay, schedule_seconds
from jettison.memory.schedule import PipelineShape
from jettison.spec.layout import Schedule
from support.orders import most_in_flight, peak_in_flight
from support.ranks import Launches, run_ranks

TORCH = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
}
OURS = {
    "gpipe": Schedule.GPIPE,
    "1f1b": Schedule.ONE_F_ONE_B,
    "interleaved": Schedule.ONE_F_ONE_B,
    "zero-bubble": Schedule.ZERO_BUBBLE,
}
WIDTH, STEPS, WITHIN = 4, 12, 0.05
NOTHING = (0.0, 0.0, 0.0)
Case = dict[str, Any]
"""name, chunks, micro_batches, and seconds: (forward, input half, weight half) by place in the whole model; at most so
many steps, and fewer where one takes little more than is predicted: others on the machine can only make one longer."""


# --- on every rank --------------------------------------------------------------------------------------------------


class _Slow(torch.autograd.Function):
    """The identity, whose backward sleeps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.clone()  # torch detaches a stage's output in place, which a view does not allow

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


class _Stage(nn.Module):
    """x w: a weight on the way from input to output, each with a sleep of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(WIDTH))
        self.seconds: Sequence[float] = NOTHING

    def forward(self, x: Tensor) -> Tensor:
        forward, inputs, weights = self.seconds
        time.sleep(forward)
        return _Slow.apply(x * _Slow.apply(self.w, weights), inputs)


def _forward_states(stage: PipelineStage) -> Mapping[int, Any]:
    """State that torch keeps of each forward until its backward, by micro-batch."""
    return stage.fwd_cache if hasattr(stage, "fwd_cache") else stage._forward_chunk_states  # torch 2.15


class _Watched:
    """What stages are told to do, and the micro-batches that they hold as they let go of one."""

    def __init__(self, stages: Sequence[PipelineStage]) -> None:
        self.stages, self.log, self.held = stages, [], []
        for chunk, stage in enumerate(stages):
            stage.forward_one_chunk = self._noted("F", chunk, stage.forward_one_chunk)
            stage.backward_one_chunk = self._noted("B", chunk, stage.backward_one_chunk)
            stage.backward_weight_one_chunk = self._noted("W", chunk, stage.backward_weight_one_chunk)

    def _noted(self, work: str, chunk: int, call: Any) -> Any:
        def noted(micro_batch: int, *args: Any, **kwargs: Any) -> Any:
            if work != "F":  # what torch itself keeps: outputs with their graphs, and the states of half backwards
                whole = [len(_forward_states(stage)) for stage in self.stages]
                half = [len(stage.backward_state) for stage in self.stages]
                self.held.append([whole, half])
            self.log.append([work, micro_batch, chunk])
            return call(micro_batch, *args, **kwargs)

        return noted


def play_orders(_: Any) -> list[Any]:
    """The cases without seconds, for as many ranks as there are."""
    return play_all(order_cases(distributed.get_world_size()))


def play_all(cases: list[Case]) -> list[Any]:
    """Each case's log, what was held, and when its steps began and ended on this rank's clock."""
    return [_play(case) for case in cases]


def _play(case: Case) -> dict[str, Any]:
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    places = [chunk * ranks + rank for chunk in range(case["chunks"])]
    stages = [PipelineStage(_Stage(), place, ranks * case["chunks"], torch.device("cpu")) for place in places]
    single = case["name"] in ("gpipe", "1f1b")
    schedule = TORCH[case["name"]](
        stages[0] if single else stages, case["micro_batches"], loss_fn=lambda output, target: (output - target).sum()
    )
    x = torch.ones(case["micro_batches"], WIDTH)

    def step() -> None:
        schedule.step(*((x,) if rank == 0 else ()), **({"target": x} if places[-1] == ranks * len(places) - 1 else {}))

    step()  # shapes are inferred, and connections made, in the first
    for stage, place in zip(stages, places, strict=True):
        stage.submod.seconds = case["seconds"][place]
    watched = _Watched(stages)
    spans = []
    for _ in range(case["steps"]):
        watched.log.clear(), watched.held.clear()
        distributed.barrier()
        start = time.perf_counter()  # one clock for all processes of a machine
        step()
        spans.append([start, time.perf_counter()])
        if _took(spans[-1], ranks) < (1 + 0.7 * WITHIN) * case["predicted"]:
            break
    gradients = [stage.submod.w.grad is not None for stage in stages]
    return {"log": watched.log, "held": watched.held, "spans": spans, "gradients": gradients}


def _took(span: list[float], ranks: int) -> float:
    """From the first rank's start to the last one's end, on every rank."""
    found: list[list[float]] = [[]] * ranks
    distributed.all_gather_object(found, span)
    return max(end for _, end in found) - min(start for start, _ in found)


# --- what we say ----------------------------------------------------------------------------------------------------


def ours(case: Case, ranks: int) -> PipelineShape:
    return PipelineShape(
        OURS[case["name"]], stages=ranks, micro_batches=case["micro_batches"], virtual_stages=case["chunks"]
    )


def times(case: Case, ranks: int) -> tuple[list[list[float]], ...]:
    """Forward, backward and weight seconds by stage and chunk.

    Nobody waits for the first place's gradient of its input. Torch skips that half and makes all of its backward the
    weight step.
    """
    table = [[case["seconds"][chunk * ranks + rank] for chunk in range(case["chunks"])] for rank in range(ranks)]
    forward = [[f for f, _, _ in row] for row in table]
    if case["name"] != "zero-bubble":
        return forward, [[b + w for _, b, w in row] for row in table]
    inputs, weights = [[b for _, b, _ in row] for row in table], [[w for _, _, w in row] for row in table]
    inputs[0][0], weights[0][0] = 0.0, inputs[0][0] + weights[0][0]
    return forward, inputs, weights


def predicted(case: Case, ranks: int) -> Replay:
    return schedule_seconds(ours(case, ranks), *times(case, ranks))


def measured(found: list[Any]) -> float:
    """The best step, from the first rank's start to the last one's end."""
    spans = list(zip(*(rank["spans"] for rank in found), strict=True))
    return min(max(end for _, end in step) - min(start for start, _ in step) for step in spans)


# --- cases ----------------------------------------------------------------------------------------------------------


def order_cases(ranks: int) -> list[Case]:
    """Nothing sleeps: more micro-batches than stages, as many, fewer where torch allows it, and an odd number."""
    sizes = {
        "gpipe": [(1, 2 * ranks), (1, 1)],
        "1f1b": [(1, 2 * ranks), (1, ranks), (1, 2 * ranks + 1)],
        "interleaved": [(2, 2 * ranks), (2, ranks), (3, 3 * ranks)],
        "zero-bubble": [(1, 3 * ranks), (1, ranks), (1, ranks - 1), (1, 2 * ranks)],
    }
    return [
        {
            "name": name,
            "chunks": chunks,
            "micro_batches": m,
            "steps": 1,
            "predicted": 0.0,
            "seconds": [NOTHING] * (ranks * chunks),
        }
        for name, found in sizes.items()
        for chunks, m in found
    ]


def timed_cases(ranks: int) -> list[Case]:
    """Unequal stages: a head that takes longest, or one in the middle. Of two chunks the second takes longer."""
    ms = {
        2: {"head": [(48, 56, 40), (72, 112, 56)], "middle": [(112, 72, 72), (56, 72, 40)]},
        4: {
            "head": [(48, 48, 48), (52, 52, 45), (48, 48, 48), (82, 90, 48)],
            "middle": [(48, 48, 38), (48, 60, 48), (96, 72, 60), (48, 48, 38)],
        },
    }[ranks]
    cases = []
    for name, where in (("gpipe", "middle"), ("1f1b", "head"), ("interleaved", "middle"), ("zero-bubble", "head")):
        shares = (0.6, 0.8) if name == "interleaved" else (1.0,)
        seconds = [tuple(share * t / 1e3 for t in stage) for share in shares for stage in ms[where]]
        case = {"name": name, "chunks": len(shares), "micro_batches": 2 * ranks, "steps": STEPS, "seconds": seconds}
        cases.append(case | {"predicted": predicted(case, ranks).makespan})
    return cases


Played = tuple[int, list[tuple[Case, list[Any]]]]
"""Ranks, and each case with what every rank found."""


@pytest.fixture(scope="module", params=[2, 4])
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Played:
    """Stages that take no time."""
    ranks = request.param
    return ranks, by_case(order_cases(ranks), Launches(tmp_path_factory.getbasetemp(), play_orders)[ranks])


@pytest.fixture(scope="module", params=[2, 4])
def timed(request: pytest.FixtureRequest) -> Played:
    """Stages that sleep."""
    ranks = request.param
    return ranks, by_case(timed_cases(ranks), run_ranks(play_all, ranks, timed_cases(ranks)))


def by_case(cases: list[Case], by_rank: list[list[Any]]) -> list[tuple[Case, list[Any]]]:
    return list(zip(cases, map(list, zip(*by_rank, strict=True)), strict=True))


def test_the_orders_are_torchs(played: Played) -> None:
    ranks, results = played
    assert {case["name"] for case, _ in results} == set(TORCH)
    for case, found in results:
        expected = [[[str(s.work), s.micro_batch, s.chunk] for s in steps] for steps in ours(case, ranks).orders]
        assert [rank["log"] for rank in found] == expected, case
        assert all(all(rank["gradients"]) for rank in found)


def test_what_is_held_is_what_torch_holds(played: Played) -> None:
    ranks, results = played
    for case, found in results:
        for steps, rank in zip(ours(case, ranks).orders, found, strict=True):
            whole, half = (list(map(max, zip(*states, strict=True))) for states in zip(*rank["held"], strict=True))
            assert (tuple(whole), tuple(half)) == most_in_flight(steps), case
            assert max(sum(w) + sum(h) for w, h in rank["held"]) == peak_in_flight(steps), case


@pytest.mark.slow
def test_a_step_takes_as_long_as_its_replay(timed: Played) -> None:
    ranks, results = timed
    assert {case["name"] for case, _ in results} == set(TORCH)
    off = {case["name"]: measured(found) / predicted(case, ranks).makespan - 1 for case, found in results}
    assert all(abs(error) < WITHIN for error in off.values()), off


@pytest.mark.slow
def test_stages_as_long_as_their_mean_would_not_do(timed: Played) -> None:
    """The bound above is tight enough to tell real stage times from averages."""
    ranks, results = timed
    for case, found in results:
        mean = tuple(sum(part) / len(part) for part in zip(*case["seconds"], strict=True))
        even = case | {"seconds": [mean] * len(case["seconds"])}
        assert measured(found) > (1 + WITHIN) * predicted(even, ranks).makespan, case["name"]
