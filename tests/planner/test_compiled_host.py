"""Plans that send what compiled blocks save: within both budgets, with the gradients of the same compiled blocks."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import jettison
from jettison import Bytes
from jettison.capture.model_trace import CompiledProgram
from jettison.core.errors import Infeasible
from jettison.planner.cpu_offload import with_moves_of_compiled
from jettison.planner.frontier_policies import compiled_points
from jettison.solve.frontier import FrontierPoint
from jettison.solve.plan import Plan
from jettison.solve.problem import OffloadedTensor
from jettison.spec.hardware import Hardware, usual_hardware
from jettison.spec.kernels import Device
from support.compiled_blocks import INPUT_BYTES, QUIET, WIDTH, batch, equal, gradients, peak
from support.compiled_families import Loss, blocks_of, language_model
from support.compiled_sending import Stack, slow_to_compute
from support.recorder import recorder_of
from support.toys import Mlp

pytestmark = [pytest.mark.usefixtures("one_thread", "computing_again_takes_long"), *QUIET]


@pytest.fixture
def computing_again_takes_long() -> Iterator[None]:
    """Blocks are small here, and their seconds waver."""
    with slow_to_compute():
        yield


def linked(bytes_per_second: float = 1e12) -> Hardware:
    """This machine, with a way to a host that copies run along beside its work."""
    given = usual_hardware(Device.CPU)
    return replace(given, host_bytes_per_second=int(bytes_per_second), host_memory_bytes=None, synchronous=False)


def stack(blocks: int = 6, rate: float = 0.2) -> Stack:
    """The same for the same arguments."""
    torch.manual_seed(0)
    return Stack([Mlp(WIDTH, 4 * WIDTH, rate) for _ in range(blocks)], WIDTH)


def compiled(model: Stack) -> Stack:
    made = copy.deepcopy(model)
    for layer in made.layers:
        layer.compile(dynamic=False)
    return made


def smallest(model: nn.Module, given: Any, **how: Any) -> int:
    with pytest.raises(Infeasible) as refused:
        jettison.auto_checkpoint(model, given, Bytes(1000), compile="blocks", **how)
    return refused.value.minimum_budget_bytes


@pytest.mark.parametrize("budgets", [2, pytest.param(12, marks=pytest.mark.slow)])
def test_budgets_hold_on_both_sides(budgets: int) -> None:
    model, given = stack(), batch()
    plain = compiled(model)
    expected, most = gradients(plain, given), peak(plain, given)
    how: dict[str, Any] = {"offload": True, "hardware": linked()}
    least = smallest(model, given, **how)
    assert least < smallest(model, given)
    measured, sending = [], 0
    for part in range(budgets):
        budget = least + (int(1.03 * most) - least) * part // (budgets - 1)
        with jettison.auto_checkpoint(model, given, Bytes(budget), compile="blocks", **how) as handle:
            assert handle.plan is not None
            said, engine = handle.plan.predicted, handle.offload
            assert equal(gradients(model, given), expected)
            measured.append(peak(model, given))
            assert measured[-1] <= said.peak_bytes <= budget
            sending += said.host_bytes > 0
            assert (0 if engine is None else engine.pool.peak_bytes) == said.host_bytes
            if engine is not None:
                device = recorder_of(engine)
                with device.watching():
                    assert equal(gradients(model, given), expected)
                assert not device.races and not engine.pool.live_bytes
    assert measured == sorted(measured)
    assert measured[-1] <= most
    assert budgets // 2 <= sending < budgets


def test_the_host_budget_is_held_and_a_slow_link_left_alone() -> None:
    model, given = stack(), batch()
    plain = compiled(model)
    expected, budget = gradients(plain, given), int(1.2 * smallest(model, given))
    how: dict[str, Any] = {"compile": "blocks", "offload": True}
    a_little = int(0.984 * peak(plain, given))  # for which a part of what one block saves is enough
    for room, asked, speed, most in ((4, a_little, 2e8, 4), (22, budget, 1e12, 20)):
        how["host_budget"] = Bytes(room * INPUT_BYTES)
        with jettison.auto_checkpoint(model, given, Bytes(asked), hardware=linked(speed), **how) as handle:
            assert handle.plan is not None and handle.offload is not None
            assert equal(gradients(model, given), expected)
            assert peak(model, given) <= asked
            assert 0 < handle.plan.predicted.host_bytes == handle.offload.pool.peak_bytes <= most * INPUT_BYTES
            assert handle.offload.pool.real_bytes <= room * INPUT_BYTES
    with jettison.auto_checkpoint(model, given, Bytes(budget), hardware=linked(1.3e6), **how) as handle:
        assert handle.plan is not None and handle.offload is None
        assert not any(entry.offloaded for entry in handle.plan.layers)


def test_a_plan_can_be_kept_verified_and_applied_again() -> None:
    model, given = stack(), batch()
    expected, budget = gradients(compiled(model), given), int(1.2 * smallest(model, given))
    traced = jettison.trace(model, given, compile="blocks")
    made = jettison.plan(traced, Bytes(budget), offload=True, hardware=linked())
    assert any(entry.offloaded for entry in made.layers)
    read = Plan.from_json(made.to_json())
    assert read == made and read.hash == made.hash
    with jettison.apply(model, plan=read, batch=given, compile="blocks") as handle:
        assert equal(gradients(model, given), expected)
        assert peak(model, given) <= made.predicted.peak_bytes
        assert handle.offload is not None and handle.offload.pool.peak_bytes == made.predicted.host_bytes
        proof = jettison.verify(model, given, handle=handle, rounds=2)
    assert proof.gradients_identical and proof.losses_identical and proof.random_state_identical
    assert proof.measured_peak_bytes <= budget


def test_only_what_a_point_keeps_is_sent_and_no_parameter() -> None:
    """Inductor may save more, or something else in its place: that has no name in a plan."""
    traced = jettison.trace(stack(), batch(), compile="blocks")
    (key,) = traced.classes
    made = traced.classes[key].compiled
    assert made is not None
    points = compiled_points(made, linked())
    every = {b.index: OffloadedTensor(nbytes=b.nbytes) for b in made.program.buffers if b.nbytes}
    found = list(with_moves_of_compiled(traced, key, points, {p.key: every for p in points}, [200_000]))
    assert [p for p in found if not p.offloaded] == points
    assert len(found) > len(points)
    for point in found:
        assert point.offloaded <= point.kept
        assert not any(made.program.buffers[b].free for b in point.offloaded)
        whole = point.key.endswith("-send-all")
        assert whole or made.program.kept_bytes(point.offloaded) <= 200_000


def inductors_own(compiled: CompiledProgram, hardware: Hardware) -> list[FrontierPoint]:
    return compiled_points(compiled, hardware)[-1:]


@pytest.mark.slow  # compiled for two batches
def test_a_larger_batch_has_a_plan_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is computed again here: what is compiled for each batch is one way."""
    monkeypatch.setattr("jettison.planner.planner.compiled_points", inductors_own)
    model, larger, how = stack(), batch(12), {"offload": True, "hardware": linked()}
    plain = compiled(model)
    expected, budget = gradients(plain, larger), int(0.8 * peak(plain, larger))
    with jettison.auto_checkpoint(model, batch(), Bytes(budget), compile="blocks", **how) as handle:
        gradients(model, batch())
        before = 0 if handle.offload is None else handle.offload.pool.peak_bytes
        assert equal(gradients(model, larger), expected)
        assert peak(model, larger) <= budget
        assert handle.offload is not None and handle.offload.pool.peak_bytes > before


@pytest.mark.slow  # two families, each compiled in seven ways
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_language_models_keep_twelve_budgets(kind: str) -> None:
    model = Loss(language_model(kind)).train()
    given = (torch.randint(0, 500, (8, 64), generator=torch.Generator().manual_seed(1)),)
    plain = copy.deepcopy(model)
    for block in blocks_of(plain):
        block.compile(dynamic=False)
    expected, most = gradients(plain, given), peak(plain, given)
    how: dict[str, Any] = {"offload": True, "hardware": linked()}
    least = smallest(model, given, **how)
    measured, ratios, hosts = [], [], []
    for twelfth in range(12):
        budget = least + (int(1.03 * most) - least) * twelfth // 11
        with jettison.auto_checkpoint(model, given, Bytes(budget), compile="blocks", **how) as handle:
            assert handle.plan is not None
            said = handle.plan.predicted
            assert equal(gradients(model, given), expected)
            measured.append(peak(model, given))
            hosts.append(0 if handle.offload is None else handle.offload.pool.peak_bytes)
            assert hosts[-1] == said.host_bytes
            assert measured[-1] <= budget
            ratios.append(measured[-1] / said.peak_bytes)
            if handle.offload is not None:
                device = recorder_of(handle.offload)
                with device.watching():
                    assert equal(gradients(model, given), expected)
                assert not device.races
    assert least <= smallest(model, given)
    assert measured == sorted(measured)
    assert all(ratio == pytest.approx(1.0, abs=0.03) for ratio in ratios)
    assert any(hosts)
