"""Documents for reports, made by hand: small, and with numbers that a test can name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from jettison.ledger.step_levels import StepLevels
from jettison.report.proof import LayerProof, Proof
from jettison.solve.plan import LayerPlan, Plan, PlanTensor, PolicyName, Predicted, SolverReport

HOSTILE = "x</script><img src=x onerror=boom()>\x1b[31m\u202e"
"""A name that ends elements, colours a terminal and turns the direction of writing."""


def tensor(buffer: int, role: str, *, digest: str = "d", nbytes: int = 1024, free: bool = False) -> PlanTensor:
    """One saved tensor of the program ``digest``."""
    return PlanTensor(
        digest=digest, buffer=buffer, path="mlp", op="aten.mm", role=role, shape=(2, 8), dtype="float32", nbytes=nbytes,
        free=free,
    )  # fmt: skip


TENSORS = (
    tensor(0, "linear input"),
    tensor(1, "activation input", nbytes=2048),
    tensor(2, "softmax output", nbytes=4096),
    tensor(3, "dropout mask", nbytes=512),
    tensor(4, "shared input", free=True),
    tensor(0, "logits", digest="r", nbytes=8192),
)


def levels(peak: int, *, backward: int) -> StepLevels:
    """Up to ``peak`` in forward, to ``backward`` in backward, and down."""
    found = StepLevels.of(
        [
            ("forward", [peak * i // 10 for i in range(1, 11)]),
            ("backward", [backward, *(peak * i // 10 for i in range(9, 0, -1))]),
            ("optimizer", [peak // 2]),
        ]
    )
    assert found is not None
    return found


def proof(*, layers: int = 4, budget: int = 9000, measured: int = 8800, name: str = "layers") -> Proof:
    """Layer 0 computes buffer 1 again, has 2 on the host and 3 in fewer bytes; the others keep all four."""

    def layer(i: int) -> LayerProof:
        first = i == 0
        return LayerProof(
            layer=f"{name}.{i}",
            policy="per-tensor" if first else "none",
            baseline_bytes=7680,
            predicted_bytes=1536 if first else 7680,
            observed_bytes=1536 if first else 7680,
            digest="d",
            kept=(0, 2, 3) if first else (0, 1, 2, 3),
            offloaded=(2,) if first else (),
            packed=(3,) if first else (),
        )

    around = LayerProof(
        layer="embedding, head and loss", policy="none", baseline_bytes=8192, predicted_bytes=8192, observed_bytes=8192,
        digest="r", kept=(0,),
    )  # fmt: skip
    return Proof(
        gradients_identical=True,
        losses_identical=True,
        random_state_identical=True,
        buffers_identical=True,
        parameters_identical=True,
        gradients_compared=12,
        differences=(),
        steps=3,
        budget_bytes=budget,
        predicted_peak_bytes=8900,
        measured_peak_bytes=measured,
        baseline_peak_bytes=20_000,
        step_time_ratio=1.25,
        step_time_ratio_low=1.2,
        step_time_ratio_high=1.3,
        baseline_step_seconds=0.125,
        rounds=8,
        layers=(*map(layer, range(layers)), around),
        plan_hash="f" * 64,
        device="cpu",
        torch_version="2.13.0",
        tensors=TENSORS,
        predicted_levels=levels(8900, backward=8850),
        measured_levels=levels(8800, backward=8750),
        baseline_levels=levels(20_000, backward=19_000),
        environment={"python": "3.11.7", "threads": "2"},
    )


def plan(*, layers: int = 4) -> Plan:
    """The same decisions as the proof's."""

    def entry(i: int) -> LayerPlan:
        first = i == 0
        return LayerPlan(
            layer=f"layers.{i}",
            policy=PolicyName.PER_TENSOR if first else PolicyName.NONE,
            kept_bytes=1536 if first else 7680,
            offloaded_bytes=4096 if first else 0,
            recompute_flops=1000 if first else 0,
            digest="d",
            option="a",
            kept=(0, 2, 3) if first else (0, 1, 2, 3),
            offloaded=(2,) if first else (),
            packed=(3,) if first else (),
        )

    root = LayerPlan(
        layer="", policy=PolicyName.NONE, kept_bytes=8192, recompute_flops=0, digest="r", option="none", kept=(0,)
    )
    return Plan(
        budget_bytes=9000,
        minimum_budget_bytes=7000,
        predicted=Predicted(peak_bytes=8900, step_seconds=0.15, overhead_fraction=0.2, host_bytes=4096),
        solver=SolverReport(gap=0.01, seconds=0.5),
        layers=tuple(map(entry, range(layers))),
        root=root,
        model="m",
        torch_version="2.13.0",
        tensors=TENSORS,
        levels=levels(8900, backward=8850),
    )


def run_log(folder: Path, *, steps: int = 5) -> Path:
    """A run's log with its plan beside it."""
    made = plan()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(made.to_json(), encoding="utf-8")
    found = replace(made, levels=levels(8800, backward=8750)).document()["levels"]
    peaks = {"forward": 8800, "backward": 8750, "optimizer": 4400}
    start = {
        "event": "start", "schema": "jettison.train/1", "step": 0, "world": 2, "layout": {"dp": 2, "tp": 1},
        "parameters": 1000, "plans": [made.hash], "predicted_peak_bytes": 8900, "torch": "2.13.0",
        "environment": {"threads": "1"},
    }  # fmt: skip
    lines = [start]
    for step in range(1, steps + 1):
        lines.append({
            "event": "step", "step": step, "loss": 4.0 / step, "step_seconds": 0.5, "tokens_per_second": 100.0,
            "peak_bytes": peaks if step <= 2 else None, "measured": step <= 2,
        })  # fmt: skip
    lines.append({"event": "end", "step": steps, "second_step_peak_bytes": peaks, "levels": found})
    path = folder / "log.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path
