"""The scripts of ``examples/``, as they are: with a budget the same gradients to the bit, and no peak above it."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest

from support.patience import PATIENCE
from support.rank_server import Launch

ROOT = Path(__file__).resolve().parents[2]
RANKS = {"fsdp2_llama": 2, "hsdp": 4, "ddp_lora": 2, "tensor_parallel": 2, "pipeline": 2}
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))
NEEDS = {"ddp_lora": "peft"}
FAST = ("grad_scaler",)
"""Those that `make test` runs."""


def run(name: str, folder: Path, *budget: str) -> list[dict[str, Any]]:
    ranks, result = RANKS.get(name, 1), folder / ("planned" if budget else "plain")
    call = [str(ROOT / "tests/support/example_run.py"), str(ROOT / f"examples/{name}.py"), str(result), *budget]
    if ranks > 1:
        call = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *call]
    env = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = Launch(call, env)
    said, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, said[-6000:]
    return [json.loads(Path(f"{result}.{rank}").read_text(encoding="utf-8")) for rank in range(ranks)]


def test_examples_are_short() -> None:
    assert len(EXAMPLES) >= 8
    for name in EXAMPLES:
        assert len((ROOT / f"examples/{name}.py").read_text(encoding="utf-8").splitlines()) < 60


@pytest.mark.parametrize("name", [e if e in FAST else pytest.param(e, marks=pytest.mark.slow) for e in EXAMPLES])
def test_an_example_keeps_its_budget(name: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(NEEDS.get(name, "torch")) is None:
        pytest.skip(f"needs {NEEDS[name]}")
    plain = run(name, tmp_path)
    budget = int(0.8 * max(rank["peak"] for rank in plain))
    planned = run(name, tmp_path, f"{budget}B")
    for before, after in zip(plain, planned, strict=True):
        assert after["digests"] == before["digests"]
        assert len(before["digests"]) >= 3
        (predicted,) = after["predicted"]
        assert after["peak"] <= budget
        assert predicted <= budget
        assert after["peak"] == pytest.approx(predicted, rel=0.03)
