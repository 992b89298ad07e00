"""Compiled blocks that send all they can, next to the same blocks without a plan, and what a dry run says."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from torch import Tensor, nn

import jettison
from jettison.capture.model_trace import ModelTrace
from jettison.core.progress import silent
from jettison.dryrun.compiled_blocks import MeasuredChoice, measure_choices, options_of_levels
from jettison.dryrun.step import StepPeaks, dry_run_batch
from jettison.planner.cpu_offload import movable, option_at, with_moves_of_compiled
from jettison.planner.frontier_policies import policy_of
from jettison.solve.checkpoint_policy import CheckpointPolicy, KeepAll
from jettison.solve.frontier import NONE_KEY, FrontierPoint
from support.compiled_blocks import equal, gradients, peak
from support.recorder import Order, Recorder, recorder_of
from support.transfers import Transfer, transfers_in, transfers_of


@contextlib.contextmanager
def slow_to_compute() -> Iterator[None]:
    """Planners in here take it that computing again is slow, the slower the less is kept, and a move costs Python
    nothing.
    """

    def seconds(levels: Mapping[str, MeasuredChoice]) -> dict[str, float]:
        return {key: 1e-3 * (3 + place) for place, key in enumerate(reversed(list(levels)))}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jettison.dryrun.compiled_blocks.seconds_of_levels", seconds)
        patch.setattr("jettison.planner.planner.seconds_of_levels", seconds)
        patch.setattr("jettison.planner.cpu_offload.MOVE_SECONDS", 0.0)
        yield


class Stack(nn.Module):
    """An embedding and blocks; what blocks get is no leaf. ``shared``: blocks get one more tensor, the same for all."""

    def __init__(self, blocks: list[nn.Module], width: int, *, shared: bool = False, returns: bool = False) -> None:
        super().__init__()
        self.embed, self.layers = nn.Linear(width, width), nn.ModuleList(blocks)
        self.turn = nn.Linear(width, width) if shared else None
        self.returns = returns

    def forward(self, x: Tensor) -> Any:
        more: tuple[Tensor, ...] = () if self.turn is None else (self.turn(x).cos(),)
        x, states = self.embed(x), []
        for layer in self.layers:
            x = layer(x, *more)
            states.append(x)
        loss = x.square().mean()
        return {"loss": loss, "states": states} if self.returns else loss


@dataclass(frozen=True, kw_only=True)
class Sending:
    """What a step under such a plan did."""

    sent: dict[str, tuple[int, ...]]
    dry: StepPeaks
    dry_transfers: tuple[Transfer, ...]
    same: bool
    transfers: tuple[Transfer, ...]
    peak_bytes: int
    plain_peak_bytes: int
    host_bytes: int
    races: int
    left_bytes: int


def all_that_can_move(trace: ModelTrace) -> tuple[dict[str, CheckpointPolicy], dict[str, Any]]:
    """By block: Inductor's own choice with all on the host that may go there, and its levels."""
    policies: dict[str, CheckpointPolicy] = {}
    opaque = {}
    for key, cls in trace.classes.items():
        assert cls.compiled is not None
        program = cls.compiled.program
        plain = FrontierPoint(
            key=NONE_KEY,
            kept=cls.compiled.default,
            kept_bytes=program.kept_bytes(cls.compiled.default),
            seconds=0.0,
            price=0.0,
        )
        levels = measure_choices(trace, cls, {NONE_KEY: KeepAll()}, silent, may_move=True)
        saved = {NONE_KEY: levels[NONE_KEY].saved}
        measured = {option.key: option for option in options_of_levels(levels)}
        *_, most = with_moves_of_compiled(trace, key, [plain], saved, [])
        for call in trace.calls:
            if call.class_key == key:
                point = most if call.name in movable(trace, key) else plain
                policies[call.name] = policy_of(cls, point)
                opaque[call.name] = option_at(point, measured, saved)
    return policies, opaque


def send_all(model: nn.Module, given: tuple[Tensor, ...], orders: list[Order]) -> Sending:
    """A step under each order of copies, and one that is measured."""
    plain = copy.deepcopy(model)
    for layer in plain.layers:
        layer.compile(dynamic=False)
    expected = gradients(plain, given)
    how: dict[str, Any] = {"compile": "blocks", "regions": [f"layers.{i}" for i in range(len(plain.layers))]}
    trace = jettison.trace(model, given, **how)
    policies, opaque = all_that_can_move(trace)
    dry, dry_transfers = transfers_in(lambda: dry_run_batch(trace, policies, KeepAll(), opaque=opaque))
    handle = jettison.apply(model, policies, batch=given, **how)
    with handle:
        engine = handle.offload
        device = recorder_of(engine) if engine is not None else Recorder()
        same = True
        for order in orders:
            device.order = order
            transfers = [] if engine is None else transfers_of(engine)
            before = len(transfers)
            with device.watching():
                same = same and equal(gradients(model, given), expected)
        return Sending(
            sent={name: tuple(s.nbytes for s in option.sent) for name, option in opaque.items()},
            dry=dry,
            dry_transfers=dry_transfers,
            same=same,
            transfers=tuple(transfers[before:]),
            peak_bytes=peak(model, given),
            plain_peak_bytes=peak(plain, given),
            host_bytes=engine.pool.peak_bytes if engine is not None else 0,
            races=len(device.races),
            left_bytes=engine.pool.live_bytes if engine is not None else 0,
        )
