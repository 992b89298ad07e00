"""Plans on a simulated CUDA device: streams that run later, an allocator that counts, memory that is poisoned when it
is freed. The CPU's kernels say nothing about time; bits, bytes and the order of copies are those of the device code.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.patience import PATIENCE
from support.simulated_cuda import COMPILER, environment

pytestmark = [pytest.mark.slow, pytest.mark.skipif(COMPILER is None, reason="needs g++ to build the device")]


@pytest.mark.parametrize("offload", ["no", "yes"])
@pytest.mark.parametrize(("name", "dtype"), [("llama", "bfloat16"), ("gpt2", "float32")])
def test_steps_are_plain_ones_to_the_bit_within_the_budget(name: str, dtype: str, offload: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "support.simulated_loops", name, dtype, offload],
        env=environment(delay_us="2000"),
        capture_output=True,
        text=True,
        timeout=10 * PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["differing"] == 0
    assert found["peak_bytes"] <= found["budget_bytes"] < found["plain_peak_bytes"]
    assert found["peak_bytes"] <= found["predicted_bytes"]


def test_a_recipe_trains_within_its_budget(tmp_path: Path) -> None:
    """Both steps, the first of which makes the optimizer's state."""
    recipe = Path(__file__).parents[2] / "recipes" / "one-process.toml"
    done = subprocess.run(
        [sys.executable, "-m", "jettison", "train", str(recipe), "--steps", "2", "--json"],
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=10 * PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    logged = (tmp_path / "out" / "one-process" / "log.jsonl").read_text().splitlines()
    peaks = [max(one["peak_bytes"].values()) for one in map(json.loads, logged) if one.get("peak_bytes")]
    assert len(peaks) == 2
    assert max(peaks) <= 120 << 20


def test_a_missing_event_shows_as_wrong_bits() -> None:
    """A copy that nothing waits for is read before it is made, so that races would be seen."""
    code = """
import torch
pinned = torch.zeros(1 << 16).pin_memory()
ones = torch.ones(1 << 16, device="cuda")
torch.cuda.synchronize()
with torch.cuda.stream(torch.cuda.Stream()):
    torch.cuda._sleep(400_000_000)
    pinned.copy_(ones, non_blocking=True)
early = pinned.clone()
torch.cuda.synchronize()
assert early.eq(0).all() and pinned.eq(1).all()
"""
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_device_that_is_full_says_so() -> None:
    code = "import torch\ntry: torch.ones(5 << 20, device='cuda')\nexcept torch.cuda.OutOfMemoryError as e: print(e)"
    env = environment(memory=str(16 << 20))
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout.startswith("CUDA out of memory. Tried to allocate 20.00 MiB"), done.stderr
