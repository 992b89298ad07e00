"""A torchrun whose interpreters are forked from one that has imported torch, transformers and us already.

On a slow core an import of all three takes five seconds, and a launch of four ranks makes it five times. Here it is
made once for each worker of pytest. All else is torchrun's own: its agent, its store, its environment variables, its
way to end ranks; only `SubprocessHandler._popen`, which starts an interpreter for a rank, forks instead.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import io
import json
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
SOURCE = TESTS.parent / "src"
IMPORTED = (
    "torch.distributed.run",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "transformers.models.llama.modeling_llama",
    "transformers.models.gpt2.modeling_gpt2",
    "jettison.cli.main",
    "jettison.verbs.train",
    "jettison.train.loop",
    "jettison.integrations",
    "jettison.verbs.verify",
)


class Launch:
    """Of a process that the server made: as much of `subprocess.Popen` as tests use."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        self.args = list(words)
        self.returncode: int | None = None
        self._written: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        reading, writing = os.pipe()
        self.stdout = io.TextIOWrapper(os.fdopen(reading, "rb"), errors="replace")
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(_server())
        with os.fdopen(writing, "wb"):
            order = json.dumps({"words": list(words), "environment": dict(environment), "folder": os.getcwd()}).encode()
            self._socket.sendall(len(order).to_bytes(8, "little") + order)
            send_handle(self._socket, writing, None)
        with self._socket.makefile() as answers:
            self.pid = int(answers.readline())
        self._reader.start()

    def _read(self) -> None:
        self._written.append(self.stdout.read())

    def poll(self) -> int | None:
        """The exit code, or None."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.001)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code.

        Raises:
            TimeoutExpired: it still runs.
        """
        if self.returncode is None:
            self._socket.settimeout(timeout)
            try:
                self.returncode = int(self._socket.recv(16).decode())
            except TimeoutError:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0) from None
            self._socket.close()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """All that it and its ranks wrote, when all have ended.

        Raises:
            TimeoutExpired: it still runs; may be asked again.
        """
        self._reader.join(timeout)
        if self._reader.is_alive():
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        self.wait(timeout)
        self.stdout.close()
        return self._written[0], None

    def send_signal(self, number: int) -> None:
        """Unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """As a scheduler would."""
        self.send_signal(signal.SIGTERM)


_address: str | None = None


def _server() -> str:
    """Of this process; it ends when this one does."""
    global _address
    if _address is None:
        _address = os.path.join(tempfile.mkdtemp(prefix="ranks"), "socket")
        paths = os.pathsep.join([str(SOURCE), str(TESTS), os.environ.get("PYTHONPATH", "")])
        more = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        server = subprocess.Popen(
            [sys.executable, "-m", "support.rank_server", _address], env=os.environ | more, stdin=subprocess.PIPE
        )
        while not os.path.exists(_address):
            assert server.poll() is None, "the server of ranks ended before it began"
            time.sleep(0.05)
        atexit.register(server.communicate)
    return _address


# in the server --------------------------------------------------------------------------------------------------------


def serve(address: str) -> None:
    """Until standard input closes, which is when the one who started it is gone."""
    for name in IMPORTED:
        importlib.import_module(name)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(f"{address}.new")
    listening.listen(64)
    os.rename(f"{address}.new", address)
    threading.Thread(target=_end_with_the_parent, args=(Path(address).parent,), daemon=True).start()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        connection, _ = listening.accept()
        if os.fork() == 0:
            listening.close()
            _keep(connection)
        connection.close()


def _end_with_the_parent(folder: Path) -> None:
    sys.stdin.buffer.read()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _keep(connection: socket.socket) -> None:
    """Start what was ordered, and tell its number and how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size = int.from_bytes(_exactly(connection, 8), "little")
    order = json.loads(_exactly(connection, size))
    output = recv_handle(connection)
    process = Forked([sys.executable, *order["words"]], order["environment"], output, order["folder"])
    os.close(output)
    with contextlib.suppress(OSError):  # nobody waits
        connection.sendall(f"{process.pid}\n".encode())
        code = process.wait()
        connection.sendall(str(code).encode())
    os._exit(0)


def _exactly(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        more = connection.recv(size - len(found))
        if not more:
            os._exit(1)
        found += more
    return found


class Forked:
    """What `subprocess.Popen` would have made, without an interpreter's start: as much of it as torchrun asks for."""

    def __init__(self, args: Sequence[str], environment: Mapping[str, str], output: int | None, folder: str) -> None:
        self.args = list(args)
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                code = _as_an_interpreter(self.args[1:], environment, output, folder)
            finally:
                os._exit(code)

    def poll(self) -> int | None:
        """The exit code, or None."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code.

        Raises:
            TimeoutExpired: it still runs.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode


def _as_an_interpreter(words: list[str], environment: Mapping[str, str], output: int | None, folder: str) -> int:
    """What `python WORDS` does and with what it exits."""
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if output is not None:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    known = set(sys.path)
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:0] = [path for path in paths if path not in known]
    words = [word for word in words if word != "-u"]
    code: Any = 0
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            if words[1] == "torch.distributed.run":
                _torchrun()
            else:
                runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            sys.path.insert(0, str(Path(words[0]).resolve().parent))
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if not isinstance(code, int):
        if code is not None:
            print(code, file=sys.stderr)
        code = int(code is not None)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _torchrun() -> None:
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler
    from torch.distributed.run import main

    def forked(self: SubprocessHandler, args: tuple[str, ...], env: dict[str, str]) -> Forked:
        return Forked(args, env, None, os.getcwd())

    SubprocessHandler._popen = forked  # type: ignore[method-assign, assignment]
    main(sys.argv[1:])


if __name__ == "__main__":
    serve(sys.argv[1])
