"""Files that a reader of a page has from somewhere else: logs, traces and snapshots, a model's configuration."""

from __future__ import annotations

import json
import pickle
from pathlib import Path


def run_log(folder: Path) -> None:
    """A log of a run whose memory was in pieces."""
    from support.planted_memory import message, traceback

    calls = "/opt/python/site-packages/torch/nn/modules/module.py", 1780, "_call_impl"
    frames = ("/home/me/train.py", 3, "<module>"), calls, ("/home/me/model.py", 12, "forward")
    sizes = {"asked": "2.00", "free": "1.20", "allocated": "60.00", "unused": "16.50", "used": "77.94"}
    (folder / "run.log").write_text(traceback(*frames) + message(**sizes), encoding="utf-8")


def oom_log(folder: Path) -> None:
    """A log of a run whose step needs more than there is."""
    from support.planted_memory import message

    sizes = {"asked": "3.91", "free": "2.35", "allocated": "73.86", "unused": "1.33", "used": "76.73", "total": "79.11"}
    (folder / "oom.log").write_text(message(**sizes), encoding="utf-8")


def leak_pickle(folder: Path) -> None:
    """A CUDA snapshot of a loop that keeps 3 MiB a step."""
    from support.planted_memory import MIB, Tape

    tape = Tape()
    tape.begin(keep=3 * MIB)
    for _ in range(10):
        tape.step(keep=3 * MIB)
    tape.alloc(8 * MIB)
    tape.oom(8 * MIB, 2 * MIB)
    (folder / "leak.pickle").write_bytes(pickle.dumps(tape.content()))


def rank0_json(folder: Path) -> None:
    """A trace of a GPU."""
    from support.planted_traces import planted

    content = planted(layers=24, recompute=True, reduces=True, exposed=True, state_appears=True)
    (folder / "rank0.json").write_text(json.dumps(content), encoding="utf-8")


def config_json(folder: Path) -> None:
    """The configuration of a small model."""
    from transformers import LlamaConfig

    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    LlamaConfig(vocab_size=128, **shape).save_pretrained(folder)


def my_models(folder: Path) -> None:
    """The file that docs/traces.md shows."""
    from pages.session import ROOT, blocks_of

    (block,) = (block for block in blocks_of(ROOT / "docs" / "traces.md") if block.file == "my_models.py")
    (folder / block.file).write_text(block.text, encoding="utf-8")
