"""A torchrun whose interpreters are forked from one that has imported torch, transformers and us already.

On a slow core an import of all three takes five seconds, and a launch of four ranks makes it five times. Here it is
made once for each worker of pytest. All else is torchrun's own: its agent, its store, its environment variables, its
way to end ranks; only `SubprocessHandler._popen`, which starts an interpreter for a rank, asks the server for a fork.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import io
import json
import os
import runpy
import select
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
    "jettison.cli.train",
    "jettison.train.loop",
    "jettison.integrations",
    "jettison.verify.verify",
)


class Forked:
    """A process that the server forked: as much of `subprocess.Popen` as torchrun and tests ask for.

    Args:
        args: an interpreter's path, which is left out, and its arguments.
        environment: all of its environment variables.
        output: a file descriptor for standard output and errors.
    """

    def __init__(self, args: Sequence[str], environment: Mapping[str, str], output: int) -> None:
        self.args = list(args)
        self.returncode: int | None = None
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(_server())
        order = {"words": self.args[1:], "environment": dict(environment), "folder": os.getcwd()}
        _send(self._socket, json.dumps(order).encode())
        send_handle(self._socket, output, None)
        self.pid = int(_received(self._socket))

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
            if not select.select([self._socket], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self.returncode = int(_received(self._socket))
            self._socket.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """As a scheduler would."""
        self.send_signal(signal.SIGTERM)


class Launch(Forked):
    """A process of the server's whose output is read."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        self._written: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        reading, writing = os.pipe()
        self.stdout = io.TextIOWrapper(os.fdopen(reading, "rb"), errors="replace")
        with os.fdopen(writing, "wb"):
            super().__init__([sys.executable, *words], environment, writing)
        self._reader.start()

    def _read(self) -> None:
        self._written.append(self.stdout.read())

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


def _send(connection: socket.socket, message: bytes) -> None:
    connection.sendall(len(message).to_bytes(8, "little") + message)


def _received(connection: socket.socket) -> bytes:
    return _exactly(connection, int.from_bytes(_exactly(connection, 8), "little"))


def _exactly(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        more = connection.recv(size - len(found))
        if not more:
            raise EOFError("the other end is gone")
        found += more
    return found


_address: str | None = None


def _server() -> str:
    """Address of the server of this process, which ends when the process does; what it forks asks the same one."""
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
    """Until standard input closes, which is when the one who started it is gone.

    It has no thread but this one: what another one holds at a fork, the child waits for in vain.
    """
    global _address
    for name in IMPORTED:
        importlib.import_module(name)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(f"{address}.new")
    listening.listen(64)
    os.rename(f"{address}.new", address)
    _address = address
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while sys.stdin not in select.select([listening, sys.stdin], [], [])[0]:
        connection, _ = listening.accept()
        if os.fork() == 0:
            listening.close()
            _keep(connection)
        connection.close()
    shutil.rmtree(Path(address).parent, ignore_errors=True)


def _keep(connection: socket.socket) -> None:
    """Fork what was ordered, and say how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    order = json.loads(_received(connection))
    output, code = recv_handle(connection), 1
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            _send(connection, str(os.getpid()).encode())
            connection.close()
            code = _as_an_interpreter(order["words"], order["environment"], output, order["folder"])
        finally:
            os._exit(code)
    os.close(output)
    with contextlib.suppress(OSError):  # nobody waits
        _send(connection, str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
    os._exit(0)


def _as_an_interpreter(words: list[str], environment: Mapping[str, str], output: int, folder: str) -> int:
    """Do as `python WORDS` does; its exit code."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
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
        return Forked(args, env, sys.stdout.fileno())

    SubprocessHandler._popen = forked  # type: ignore[method-assign, assignment]
    main(sys.argv[1:])


if __name__ == "__main__":
    serve(sys.argv[1])
