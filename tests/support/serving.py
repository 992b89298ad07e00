"""A real server in a process of its own, for tests that talk HTTP to it."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from jettison.report.server import Limits
from support.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
JSON = {"Content-Type": "application/json"}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "max_position_embeddings": 512,
}
"""A configuration that is uploaded."""
PLAN = {"model": "gpt-22b", "tp": 8, "budget": "60GiB"}
"""A quick one."""
SEARCH = {"model": "gpt-175b", "gpus": 512, "gpu": "a100-80gb", "global_batch": 1024}
"""A long one: minutes on one core."""


@dataclass(kw_only=True)
class Served:
    """A server that runs, and its URL without the slash."""

    process: subprocess.Popen[str]
    url: str

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def post(self, verb: str, body: object, **more: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/api/{verb}", json=body, timeout=PATIENCE, **more)

    def get(self, path: str, **more: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=PATIENCE, **more)

    def workers(self) -> list[int]:
        """Processes that it has started, by their ids (on Linux)."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in children.read_text().split()]


def gone(pid: int) -> bool:
    """Whether a process has ended; what nobody has waited for yet has, too."""
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


@contextmanager
def served(limits: Limits | None = None, *, port: int = 0) -> Iterator[Served]:
    """Start one with the page that asks, and end it."""
    asked = {"limits": asdict(limits or Limits()), "port": port}
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])}
    command = [sys.executable, "-m", "support.serving", json.dumps(asked)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("http://127.0.0.1:"), process.communicate()[1]
            yield Served(process=process, url=line.strip().rstrip("/"))
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            process.communicate(timeout=PATIENCE)


def main() -> None:
    """The server's own process."""
    from jettison.cli.served import SERVICE
    from jettison.report.page import page
    from jettison.report.server import offer, serve_page

    asked = json.loads(sys.argv[1])
    limits = Limits(**asked["limits"])
    data = {"serve": offer(limits, SERVICE)}
    shown = page("Ask", intro="Of this machine.", scripts=["panels/ask.js"], data=data, served=True)
    started = functools.partial(print, flush=True)
    serve_page(shown, service=SERVICE, port=asked["port"], limits=limits, started=started)


if __name__ == "__main__":
    main()
