"""Plans on one pipeline stage, in one process: split backwards, micro-batches, blocks, and orders of work."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

import jettison
from jettison.core.errors import UsageError
from jettison.memory.schedule import ScheduledPass, Work
from jettison.parallel.pipeline import blocks_of, received, stand_in_loss
from support.parallel_pipelines import COUNTED, MICRO_BATCHES, SEED, apply, checkpointed, work_of
from support.rank_models import LENGTH, ROWS, WIDTH, Ops, Stage, loss_of, same, tokens, whole_gradients

BLOCKS = 2


def middle_stage() -> tuple[Stage, Tensor]:
    torch.manual_seed(0)
    stage = Stage(BLOCKS, first=False, last=False)
    return stage, torch.randn(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))


def split_backward(stage: Stage, x: Tensor) -> tuple[dict[str, Tensor], Tensor, dict[str, int]]:
    """Input gradients first, then those of the weights, as a zero-bubble pipeline does; gradients and op counts."""
    x = x.clone().requires_grad_()
    torch.manual_seed(SEED)
    output = stage(x)
    with Ops() as ops:
        _, groups = stage_backward_input([output], [torch.ones_like(output)], [x], stage.parameters())
        stage_backward_weight(stage.parameters(), groups)
    assert x.grad is not None
    return whole_gradients(stage), x.grad, ops.counted(*COUNTED)


def whole_backward(stage: Stage, x: Tensor) -> tuple[dict[str, Tensor], Tensor, dict[str, int]]:
    x = x.clone().requires_grad_()
    torch.manual_seed(SEED)
    output = stage(x)
    with Ops() as ops:
        output.backward(torch.ones_like(output))
    assert x.grad is not None
    return whole_gradients(stage), x.grad, ops.counted(*COUNTED)


@pytest.mark.parametrize("policy", ["none", "selective-op", "full", "every:2"])
def test_trap_19_a_split_backward_computes_everything_again_once(policy: str) -> None:
    plain, x = middle_stage()
    expected, input_gradient, _ = whole_backward(plain, x)
    stage, _ = middle_stage()
    with apply(stage, policy, received(x)) as handle:
        gradients, input_again, counted = split_backward(stage, x)
        assert all(live.calls == 0 for live in handle.live().values()), "something outlives the second half"
    assert same(gradients, expected)
    assert torch.equal(input_again, input_gradient)
    again = 0 if policy == "none" else BLOCKS
    assert counted == dict.fromkeys(COUNTED, again)


def test_trap_19_torchs_checkpoint_computes_it_at_least_three_times() -> None:
    """What the test before is worth."""
    stage, x = middle_stage()
    checkpointed(stage)
    _, _, counted = split_backward(stage, x)
    assert counted["_softmax"] >= 3 * BLOCKS


def test_what_only_the_input_needs_is_let_go_between_the_halves() -> None:
    """A first half that is never followed by the second one holds what the second one would want, and no more."""
    stage, x = middle_stage()
    with apply(stage, "full", received(x)) as handle:
        x = received(x)[0]
        output = stage(x)
        torch.autograd.grad(output.sum(), [x], retain_graph=True)
        frames = [frame for region in handle.regions for frame in region.frames]
        assert len(frames) == BLOCKS
        for frame in frames:
            program = frame.recipe.trace.program
            cells = frame.code.cells
            held = {program.ops[program.buffers[b].producer].name for b in frame.state.at_hand}  # type: ignore[index]
            assert {b for b, n in cells.items() if frame.values[n] is not None} == frame.state.at_hand
            assert not any("softmax" in name or "bernoulli" in name or "bmm" in name for name in held), held
            assert any("layer_norm" in name for name in held), held


def test_parts_of_a_batch_are_one_signature() -> None:
    """Micro-batches lie at different places of the same memory."""
    torch.manual_seed(0)
    plain = Stage(BLOCKS)
    stage = copy.deepcopy(plain)
    ids, labels = tokens(3, ROWS * MICRO_BATCHES)
    for module in (plain, stage):
        handle = apply(stage, "full", (ids[:ROWS],)) if module is stage else None
        torch.manual_seed(SEED)
        for part, wanted in zip(ids.split(ROWS), labels.split(ROWS), strict=True):
            loss_of(module(part), wanted).backward()
        if handle is not None:
            assert [report.recordings for report in handle.report()] == [0] * (BLOCKS + 1)
    assert same(whole_gradients(stage), whole_gradients(plain))


class Halves(nn.Module):
    """Two arguments in one block, which adds what is in the one to what is in the other."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.down((self.up(a) * b.exp()).tanh())


def test_arguments_that_share_memory_are_told_apart_by_how_they_lie() -> None:
    torch.manual_seed(0)
    module = nn.ModuleList([Halves(), Halves()])
    memory = torch.randn(6, 8)
    plain = copy.deepcopy(module)
    for first, second in ((0, 1), (2, 4), (5, 0), (3, 3), (1, 2)):
        results = []
        for each in (plain, module):
            each.zero_grad()
            a, b = (memory[row : row + 1] for row in (first, second))
            for block in each:
                policy = "full" if each is module else "none"
                a = jettison.checkpoint(block, a, b, policy=policy)
            a.square().sum().backward()
            results.append(whole_gradients(each))
        assert same(*results), (first, second)


def test_blocks_of_a_stage() -> None:
    one, two = Stage(1), Stage(2)
    assert blocks_of(one) == ["blocks.0"]
    assert blocks_of(two) == ["blocks.0", "blocks.1"]
    two.blocks = nn.ModuleDict({"4": two.blocks[0], "5": two.blocks[1]})  # type: ignore[assignment]
    assert blocks_of(two) == ["blocks.4", "blocks.5"]


def test_a_policy_without_blocks_is_said_to_do_nothing() -> None:
    stage, x = Stage(1, first=False, last=False), torch.zeros(ROWS, LENGTH, WIDTH)
    with pytest.raises(UsageError, match="the blocks are none"):
        jettison.apply(stage, {"blocks.0": "full"}, batch=received(x), loss_fn=stand_in_loss)
    with pytest.warns(UserWarning, match="Stage has no repeated blocks"):
        jettison.apply(stage, "full", batch=received(x), loss_fn=stand_in_loss)


def test_a_stage_needs_a_batch_that_wants_a_gradient() -> None:
    with pytest.raises(UsageError, match=r"received\(\)"):
        stand_in_loss(torch.zeros(2))


def test_orders_of_torch_are_written_as_the_ledger_writes_them() -> None:
    class Action:
        def __init__(self, kind: str, micro_batch: int, stage: int) -> None:
            self.computation_type = type("Kind", (), {"value": kind})
            self.microbatch_index, self.stage_index = micro_batch, stage

    stage = type("Stage", (), {"stage_index": 3, "group_rank": 1})
    actions = [Action("F", 0, 3), None, Action("SEND_F", 0, 3), Action("B", 0, 3)]
    made = type("Made", (), {"_stages": [stage], "pipeline_order": {1: actions}})
    assert work_of(made) == (ScheduledPass(Work.FORWARD, 0, 0), ScheduledPass(Work.BACKWARD, 0, 0))
    actions.extend([Action("F", 1, 3), Action("I", 1, 3), Action("W", 1, 3)])
    assert work_of(made)[1:3] == (ScheduledPass(Work.BACKWARD, 0, 0), ScheduledPass(Work.WEIGHT, 0, 0))
    actions.append(Action("OVERLAP_F_B", 1, 3))
    with pytest.raises(UsageError):
        work_of(made)
