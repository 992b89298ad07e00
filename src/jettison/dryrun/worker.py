"""Kernels that may end the process they run in are run in a process that may end.

A fresh interpreter (never a fork, and never the user's main module again) is given the requests and answers them one by
one. When it dies, or is silent for too long, no call of its kernel has a price; a new one is given the rest.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import IO, Any

import torch

from jettison.dryrun.kernel_trial import KernelRun, OpRequest, workspaces

START_SECONDS = 240.0  # for importing torch, on a machine that does other things as well, and the first kernel
SILENCE_SECONDS = 60.0  # for any other one
MOST_WORKERS = 8
_START = "from jettison.dryrun.worker import serve; serve()"

TravellingCall = tuple[tuple[str, str, str], tuple[Any, ...], dict[str, Any]]
"""A request as it travels: namespace, name and overload of its operator, arguments, keyword arguments."""


def run_apart(requests: Sequence[OpRequest]) -> dict[str, KernelRun | str]:
    """By key: the run of each kernel, or why there is none."""
    found: dict[str, KernelRun | str] = {}
    left: list[tuple[OpRequest, TravellingCall]] = []
    for request in requests:
        name = (*request.func._schema.name.split("::"), request.func._overloadname)
        call = name, request.args, dict(request.kwargs)
        try:
            pickle.dumps(call)
            left.append((request, call))
        except Exception as error:  # a generator, a script object: it cannot travel
            found[request.key] = f"its arguments cannot be given to another process ({type(error).__name__})"
    for _ in range(MOST_WORKERS):
        if not left:
            break
        answers = _one_worker([call for _, call in left])
        found.update((request.key, answer) for (request, _), answer in zip(left, answers, strict=False))
        left = left[len(answers) :]
        ended = [request for request, _ in left if request.func is left[0][0].func]  # the worker died at the first
        problem = "its kernel ended (or held up) the process that ran it on made-up values"
        found.update((request.key, problem) for request in ended)
        left = [pair for pair in left if pair[0].func is not left[0][0].func]
    problem = f"{MOST_WORKERS} processes ended while kernels were run on made-up values"
    return found | {request.key: problem for request, _ in left}


def _one_worker(calls: list[TravellingCall]) -> list[KernelRun | str]:
    """Answers in order; fewer than calls if the worker did not live to give them all."""
    libraries = sorted(torch.ops.loaded_libraries)  # shared objects that register operators
    modules = sorted({namespace for (namespace, _, _), _, _ in calls if namespace in sys.modules})  # that may do so
    order = torch.get_num_threads(), libraries, modules, calls
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    try:
        worker = subprocess.Popen(
            [sys.executable, "-c", _START],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
    except OSError:  # no interpreter to start: an embedded one, say
        return []
    assert worker.stdin is not None and worker.stdout is not None
    answers: list[KernelRun | str] = []
    try:
        with contextlib.suppress(OSError), worker.stdin:  # it may die early
            pickle.dump(order, worker.stdin)
        while len(answers) < len(calls):
            answer = _answer(worker, worker.stdout, SILENCE_SECONDS if answers else START_SECONDS)
            if answer is None:
                break
            answers.append(answer)
    finally:
        worker.kill()
        worker.stdout.close()
        worker.wait()
    return answers


def _answer(worker: subprocess.Popen[bytes], pipe: IO[bytes], seconds: float) -> KernelRun | str | None:
    """The next answer; None if there will be none, or not in time."""
    alarm = threading.Timer(seconds, worker.kill)
    alarm.start()
    try:
        head = pipe.read(4)
        body = pipe.read(struct.unpack("<I", head)[0]) if len(head) == 4 else b""
    finally:
        alarm.cancel()
    if not body:
        return None
    answer = pickle.loads(body)
    assert isinstance(answer, KernelRun | str)
    return answer


def serve() -> None:
    """Serve requests in a worker: read an order from stdin, write an answer per call to the former stdout."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what kernels print is no answer
    with contextlib.suppress(ImportError):  # not on this system
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threads, libraries, modules, calls = pickle.load(sys.stdin.buffer)
    torch.set_num_threads(threads)
    for library in libraries:
        torch.ops.load_library(library)
    for module in modules:
        __import__(module)
    for call in calls:
        body = pickle.dumps(_ran(call))
        answers.write(struct.pack("<I", len(body)) + body)
        answers.flush()


def _ran(call: TravellingCall) -> KernelRun | str:
    (namespace, name, overload), args, kwargs = call
    try:
        func = getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")
    except (AttributeError, RuntimeError):
        return f"the operator {namespace}::{name} is not there in a fresh process"
    request = OpRequest(func=func, args=args, kwargs=kwargs)
    run = workspaces([request])[request.key]
    return run if isinstance(run, KernelRun) else f"{type(run).__name__} on made-up values"
