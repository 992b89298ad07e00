"""Predicted peaks against `max_memory_allocated` and `max_memory_reserved`, at several budgets of a few larger models.

A step is forward, backward and fused AdamW, the third one. The budget is what may be allocated; what the caching
allocator holds beside that (blocks that it keeps whole, pieces that fit nothing) is shown next to it and is no part of
a budget.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

import torch

from benchmarks.gpu.cases import Column, Found, Log, Skip, gib
from benchmarks.gpu.families import Size, Variant, build
from benchmarks.gpu.setting import Setting, planner_for
from jettison.dryrun.counter import have_workspaces, measured_peak, static_tensors
from jettison.planner.apply import apply_candidate
from jettison.planner.planner import Planner

LARGE = Size(layers=8, hidden=2048, heads=16, kv_heads=8, ffn=5632, vocab=32_000, sequence=2048, micro_batch=2)
TINY = Size(layers=3, hidden=64, heads=4, kv_heads=2, ffn=128, vocab=256, sequence=64, micro_batch=2, experts=4)
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Of the way from the smallest budget to what a plain step takes."""
COLUMNS = (
    Column(title="budget GiB", key="budget_bytes", show=gib),
    Column(title="predicted GiB", key="predicted_bytes", show=gib),
    Column(title="allocated GiB", key="allocated_bytes", show=gib),
    Column(title="allocated ÷ predicted", key="allocated_of_predicted", show="{:.5f}".format),
    Column(title="reserved GiB", key="reserved_bytes", show=gib),
)


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model whose peaks are predicted."""

    family: str
    dtype: torch.dtype = torch.bfloat16
    autocast: bool = False
    dropout: float = 0.0


MODELS = (
    Model(family="llama"),
    Model(family="gpt", dropout=0.1),
    Model(family="llama", dtype=torch.float32, autocast=True),
    Model(family="mixtral"),
)


def run(setting: Setting, log: Log, *, quick: bool) -> None:
    """Every model at every share."""
    log.columns = COLUMNS
    have_workspaces(setting.device)
    size = TINY if setting.tiny else LARGE
    for model in MODELS[:1] if quick else MODELS:
        whole = replace(size, ffn=size.ffn // 4) if model.family == "mixtral" else size
        _one(setting, log, model, whole)


def _one(setting: Setting, log: Log, chosen: Model, size: Size) -> None:
    precision = "autocast" if chosen.autocast else str(chosen.dtype).removeprefix("torch.")
    name = f"{chosen.family}, {precision}"
    subject: list[Subject] = []

    def prepare() -> Found:
        made = Subject(setting, chosen, size)
        subject.append(made)
        return Found(figures={"allocated_bytes": made.plain_bytes, "reserved_bytes": made.reserved})

    if not log.case(f"{name}, plain", prepare, expect=10.0 if setting.device.type == "cuda" else 2.0).figures:
        return
    try:
        for share in SHARES:
            log.case(f"{name}, {share:.0%} of the way", lambda share=share: subject[0].at(share), expect=2.0)
    finally:
        subject.clear()


class Subject:
    """A model, its planner, and what its plain step takes."""

    def __init__(self, setting: Setting, chosen: Model, size: Size) -> None:
        self.setting, self.autocast = setting, chosen.autocast
        variant = Variant(dropout=chosen.dropout)
        self.model, self.batch = build(chosen.family, size, setting.device, chosen.dtype, variant)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with self._autocast():
                self.planner: Planner = planner_for(self.model, self.batch, self.optimizer)
        try:
            self.plain_bytes, self.reserved = self._peak()
        except torch.OutOfMemoryError as error:
            raise Skip(f"a plain step does not fit: {str(error).splitlines()[0][:200]}") from None

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.setting.device.type, torch.bfloat16, enabled=self.autocast)

    def _step(self) -> None:
        with self._autocast():
            loss = self.model(**self.batch)
        loss.backward()
        self.optimizer.step()

    def _peak(self) -> tuple[int, int | None]:
        for _ in range(2):
            self._step()
            self.optimizer.zero_grad(set_to_none=True)
        static = static_tensors(self.model, self.batch, self.optimizer)
        report = measured_peak(self._step, static_tensors=static)
        self.optimizer.zero_grad(set_to_none=True)
        return report.peak_bytes, report.reserved_bytes

    def at(self, share: float) -> Found:
        """A budget so far from the smallest to the plain step's peak."""
        smallest = self.planner.minimum_budget_bytes
        budget = smallest + int(share * max(0, self.planner.plain_budget_bytes - smallest))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with self._autocast():
                handle = apply_candidate(self.model, self.planner, self.planner.plan(budget), budget)
            with handle:
                allocated, reserved = self._peak()
        assert handle.plan is not None
        predicted = handle.plan.predicted.peak_bytes
        over = allocated - budget
        return Found(
            figures={
                "budget_bytes": budget,
                "predicted_bytes": predicted,
                "allocated_bytes": allocated,
                "reserved_bytes": reserved,
                "allocated_of_predicted": allocated / predicted,
            },
            problems=[f"the peak is {over} bytes above the budget"] if over > 0 else [],
        )
