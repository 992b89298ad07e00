"""The JSON documents of sixty commands, to hold one commit against another.

    python -m benchmarks.documents write FOLDER [--src PATH] [--only WORD]   # runs them with the code in PATH
    python -m benchmarks.documents compare BEFORE AFTER                      # exit code 1 where a document differs

What is measured while a command runs (seconds, tokens, folders) is left out of a comparison; what is predicted is not.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

# one command a line, run in a folder of their own, in which a later command finds what an earlier one wrote
COMMANDS = """
ledger gpt-22b --seq 2048 --micro-batch 4 --tp 8 --precision bf16-main32
ledger gpt-175b --seq 2048 --tp 8 --pp 8 --virtual-stages 3 --recompute selective
ledger gpt-530b --seq 2048 --tp 8 --pp 35 --virtual-stages 3 --recompute full
ledger gpt-1t --seq 2048 --tp 8 --pp 64 --recompute selective --gpu a100-80gb
ledger llama3-8b --seq 8192 --precision bf16-main32
ledger llama3-8b --seq 8192 --tp 4 --zero 1 --dp 2 --kernels pytorch
ledger llama3-8b --seq 8192 --cp 2 --recompute selective-op --explain
ledger llama3-70b --seq 8192 --tp 8 --pp 4 --recompute block:3 --explain
ledger llama3-70b --seq 8192 --tp 8 --dp 8 --zero 3 --recompute every:4
ledger llama3-70b --seq 8192 --tp 8 --pp 4 --dp 2 --recompute auto --budget 70GiB
ledger deepseek-v3 --seq 4096 --ep 8 --dp 64 --recompute full
ledger mixtral-8x7b --seq 4096 --ep 8 --dp 8
ledger gpt-22b --seq 2048 --micro-batch 1 --precision fp32 --optimizer sgd
ledger llama3-8b --seq 4096 --precision fp8 --gpu h100-80gb
ledger gpt-22b --seq 2048 --tp 8 --pp 4 --schedule gpipe --micro-batches 8
ledger gpt-22b --seq 2048 --tp 8 --pp 4 --schedule zero-bubble --micro-batches 8
ledger config.json --seq 32 --precision fp32
ledger config.json --seq 32 --precision fp32 --trace
ledger toys:mlp
ledger toys:net
plan gpt-22b --seq 2048 --tp 8 --budget 60GiB
plan gpt-175b --seq 2048 --tp 8 --pp 8 --virtual-stages 3 --budget 70GiB
plan llama3-8b --seq 8192 --tp 2 --budget 72GiB
plan llama3-70b --seq 8192 --tp 8 --pp 4 --budget 75GiB
plan mixtral-8x7b --seq 4096 --ep 8 --dp 8 --budget 75GiB
plan config.json --seq 32 --budget 20MiB
plan config.json --seq 64 --budget 19MiB
plan config.json --seq 64 --budget 1MiB
plan toys:mlp --budget 700KiB --out mlp.json
plan toys:net --budget 340KiB --out net.json
verify mlp.json
verify net.json
verify toys:net --budget 350KiB
verify config.json --seq 32 --budget 20MiB
estimate gpt-22b --seq 2048 --micro-batch 4 --tp 8 --gpu a100-80gb --recompute selective
estimate gpt-175b --seq 2048 --tp 8 --pp 8 --virtual-stages 3 --micro-batches 64 --gpu a100-80gb --recompute selective
estimate gpt-530b --seq 2048 --tp 8 --pp 35 --virtual-stages 3 --micro-batches 280 --gpu a100-80gb --recompute full
estimate gpt-1t --seq 2048 --tp 8 --pp 64 --micro-batches 512 --gpu a100-80gb --recompute selective
estimate llama3-8b --seq 8192 --gpu h100-80gb --dp 8 --zero 3 --kernels pytorch
estimate llama3-8b --seq 8192 --gpu h100-80gb --dp 8 --zero 2 --recompute full
estimate llama3-8b --seq 8192 --gpu h100-80gb --tp 8 --recompute auto
estimate llama3-70b --seq 8192 --tp 8 --pp 4 --micro-batches 16 --gpu h100-80gb --recompute selective --explain
estimate llama3-70b --seq 8192 --tp 8 --pp 4 --micro-batches 16 --gpu h100-80gb --tp-comm-overlap
estimate mixtral-8x7b --seq 4096 --ep 8 --dp 8 --gpu h100-80gb
estimate deepseek-v3 --seq 4096 --ep 8 --dp 64 --gpu h100-80gb --recompute full
estimate llama3-8b --seq 8192 --tp 2 --gpu h100-80gb --precision fp8 --explain
estimate gpt-22b --seq 2048 --tp 8 --gpu a100-80gb --recompute none
estimate config.json --seq 32 --gpu a100-40gb
search gpt-22b --gpus 8 --gpu a100-80gb --global-batch 4 --seq 2048
search gpt-175b --gpus 64 --gpu a100-80gb --global-batch 64 --seq 2048
search llama3-8b --gpus 8 --gpu h100-80gb --global-batch 64 --seq 8192
search llama3-70b --gpus 64 --gpu h100-80gb --global-batch 128 --seq 8192
search mixtral-8x7b --gpus 16 --gpu h100-80gb --global-batch 64 --seq 4096
search llama3-8b --gpus 16 --gpu h100-80gb --global-batch 64 --seq 8192 --recompute full,selective
search llama3-8b --gpus 1 --gpu a100-40gb --global-batch 8 --seq 8192
search config.json --gpus 4 --gpu a100-40gb --global-batch 8 --seq 32
train one.toml --steps 3
train one.toml --steps 3 --recompute full
train budget.toml --steps 3
train llama.toml --steps 2
"""

TOYS = """
import torch
from torch import nn

class Mean(nn.Module):
    def forward(self, x):
        return x.square().mean()

def mlp():
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 32)) for _ in range(4)]
    return nn.Sequential(*blocks, Mean()), (torch.randn(64, 32),)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)
    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))

def net():
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(6)), Mean()), (torch.randn(128, 16),)
"""

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}

RECIPE = """
steps = 3
[model]
architecture = "{architecture}"
layers = 4
hidden = 64
heads = 4
[data]
kind = "stdlib"
[batch]
global_batch = 8
micro_batch = 4
seq = 64
[plan]
{plan}
"""
RECIPES = {"one": ("gpt", 'policy = "selective"'), "budget": ("gpt", 'budget = "9MiB"'), "llama": ("llama", "")}

MEASURED = re.compile(
    r"^(.*seconds.*|.*_ms|tokens_per_second|mfu|hfu|.*ratio.*|.*_step_peak_bytes|.*folder|.*path|.*file|created|.*version|host|python|platform"
    r"|measured.*|plan|rounds|.*hash|steps_per_.*|cores|.*thread.*)$"
)
PREDICTS = ("ledger", "estimate", "search")  # every number of theirs is worked out, seconds as well


def documents(source: Path, only: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(command, what came of it), one after another."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "toys.py").write_text(TOYS, encoding="utf-8")
        (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
        for recipe, (architecture, plan) in RECIPES.items():
            text = RECIPE.format(architecture=architecture, plan=plan)
            (folder / f"{recipe}.toml").write_text(text, encoding="utf-8")
        env = os.environ | {"PYTHONPATH": f"{source}:{folder}", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        for line in filter(None, map(str.strip, COMMANDS.splitlines())):
            if only not in line:
                continue
            call = [sys.executable, "-m", "jettison", *line.split(), "--format", "json"]
            done = subprocess.run(call, cwd=folder, env=env, capture_output=True, text=True)
            try:
                text = done.stdout.replace(str(folder), ".")
                document = json.loads(text[text.index("\n{") :] if text.startswith("Running HiGHS") else text)
            except json.JSONDecodeError:
                document = (done.stdout + done.stderr).replace(str(folder), ".")
            yield line, {"code": done.returncode, "document": document}


def differences(before: Any, after: Any, predicts: bool, where: str = "") -> Iterator[str]:
    """What two documents disagree in."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in (*before, *(k for k in after if k not in before)):
            if predicts or not MEASURED.match(key):
                yield from differences(before.get(key), after.get(key), predicts, f"{where}.{key}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, (a, b) in enumerate(zip(before, after, strict=True)):
            yield from differences(a, b, predicts, f"{where}[{number}]")
    elif isinstance(before, float) and isinstance(after, float) and math.isclose(before, after, rel_tol=1e-12):
        return  # sums in another order
    elif before != after and where != ".document.seconds":  # how long a search took
        yield f"{where}: {str(before)[:80]} → {str(after)[:80]}"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    write = verbs.add_parser("write")
    write.add_argument("folder", type=Path)
    write.add_argument("--src", type=Path, default=ROOT / "src")
    write.add_argument("--only", default="")
    compare = verbs.add_parser("compare")
    compare.add_argument("before", type=Path)
    compare.add_argument("after", type=Path)
    asked = parser.parse_args()
    if asked.verb == "write":
        asked.folder.mkdir(parents=True, exist_ok=True)
        for number, (line, found) in enumerate(documents(asked.src.resolve(), asked.only)):
            text = json.dumps({"command": line, **found}, indent=1)
            (asked.folder / f"{number:02}.json").write_text(text, encoding="utf-8")
            print(found["code"], line, flush=True)
        return
    differing = 0
    for file in sorted(asked.before.glob("*.json")):
        before = json.loads(file.read_text(encoding="utf-8"))
        after = json.loads((asked.after / file.name).read_text(encoding="utf-8"))
        found = list(differences(before, after, before["command"].split()[0] in PREDICTS))
        differing += bool(found)
        print(f"{'differs' if found else 'equal  '} {before['command']}", *found[:8], sep="\n    ")
    sys.exit(1 if differing else 0)


if __name__ == "__main__":
    main()
