"""Ctrl-C ends every long command at once, at whatever moment it comes: exit 130, one line, nothing half-written."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from support.patience import PATIENCE

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
TICKS: Final = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
MANY: Final = 10**7
IDLE: Final = 3.0
"""Wall seconds without work after which Ctrl-C comes all the same: a server that waits works no more."""

CONFIG: Final = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 64,
    "num_attention_heads": 8,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
}
RECIPE: Final = f"""
steps = {MANY}
[model]
architecture = "gpt"
layers = 32
hidden = 256
heads = 8
[batch]
global_batch = 4
micro_batch = 4
seq = 256
[plan]
budget = "300MiB"
[log]
folder = "log"
[checkpoint]
folder = "ck"
"""
KEPT: Final = "what was worked out is in state.json: the same command goes on from there"
BUSY: Final = r"note: .* processes were running on .* cores?; figures will be of a busy machine"
SEARCH: Final = "search gpt-175b --gpus 512 --gpu a100-80gb --global-batch 1024 --jobs 2"


@dataclass(frozen=True, kw_only=True)
class Long:
    """A command that takes longer than anybody waits for, and CPU seconds of its processes after which Ctrl-C comes."""

    command: str
    moments: tuple[float, ...]
    quick: int = 0  # how many of them are tried in every run of the tests
    codes: tuple[int, ...] = (130,)
    more: tuple[str, ...] = ()
    """Patterns of lines on stderr that may stand beside."""


LONG: Final = (
    Long(command="explore llama3-8b llama3-70b gpt2 mixtral-8x7b deepseek-v3", moments=(2.0, 0.2, 1.0, 4.0), quick=1),
    Long(command=f"{SEARCH} --state state.json", moments=(2.5, 0.4, 1.0, 5.0), quick=1, more=(KEPT,)),
    Long(command="plan config.json --budget 3GiB --seq 1024 --out plan.json", moments=(4.0, 1.0, 2.0, 8.0), quick=1),
    Long(command="ledger config.json --trace --out ledger.json", moments=(1.0, 3.0, 5.0)),
    Long(command=f"verify config.json --recompute full --rounds {MANY} --out proof.json", moments=(2.0, 6.0, 12.0)),
    Long(command=f"demo --steps {MANY}", moments=(1.0, 3.0, 8.0)),
    Long(command="train recipe.toml", moments=(1.0, 3.0, 5.0)),
    Long(command="doctor --calibrate --out here.toml", moments=(1.0, 3.0, 6.0), more=(BUSY,)),
    Long(command="explore --serve", moments=(0.7, 0.2, 2.0), quick=1, codes=(0, 130), more=("Ctrl-C ends it",)),
)
CASES: Final = tuple(
    pytest.param(
        long, moment, id=f"{long.command.split()[0]}-{moment}", marks=() if n < long.quick else pytest.mark.slow
    )
    for long in LONG
    for n, moment in enumerate(long.moments)
)


def of_session(session: int) -> Iterator[float]:
    """CPU seconds of each process of a session that has not ended."""
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        try:
            fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] not in "ZX":
            yield (int(fields[11]) + int(fields[12])) / TICKS


@LINUX
@pytest.mark.parametrize(("long", "moment"), CASES)
def test_ctrl_c_ends_it(tmp_path: Path, long: Long, moment: float) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "recipe.toml").write_text(RECIPE)
    there = {path.name for path in tmp_path.iterdir()}
    process = subprocess.Popen(
        [sys.executable, "-m", "jettison", *long.command.split()],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        used, since = 0.0, time.monotonic()
        while process.poll() is None and used < moment and time.monotonic() - since < IDLE:
            time.sleep(0.01)
            before, used = used, sum(of_session(process.pid))
            since = time.monotonic() if used > before or used < moment / 2 else since  # not before Python is there
        assert process.poll() is None, process.communicate()
        os.killpg(process.pid, signal.SIGINT)  # as a terminal sends it: to all processes of the command
        _, said = process.communicate(timeout=PATIENCE)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert process.returncode in long.codes, said
    lines = [line for line in said.splitlines() if not any(re.fullmatch(more, line) for more in long.more)]
    assert lines == (["jettison: interrupted"] if process.returncode else []), said
    until = time.monotonic() + PATIENCE
    while list(of_session(process.pid)):  # those that it had started end with it
        assert time.monotonic() < until, "a process is left"
        time.sleep(0.02)
    left = {path.name for path in tmp_path.iterdir()} - there
    assert left <= {"state.json", "log", "ck", "out"}, left
    assert not [path for path in tmp_path.rglob("*") if path.suffix == ".partial"]
    if (tmp_path / "state.json").exists():
        for line in (tmp_path / "state.json").read_text().splitlines():
            json.loads(line)
