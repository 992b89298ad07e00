"""Kernels that may end the process they run in are run in a process that may end.

A fresh interpreter (never a fork, and never the user's main module again) is given the requests and answers them one by
one. When it dies, or takes too long, no call of the kernel that it ran has a price; a new one is given the rest.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import torch

from jettison.dryrun.kernel_trial import KernelRun, OpRequest, workspaces

SECONDS = 300.0  # of one process: it imports torch, on a machine that does other things as well
MOST_WORKERS = 8
_START = "from jettison.dryrun.kernel_process import serve; serve()"

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
        told: bytes = subprocess.run(
            [sys.executable, "-c", _START],
            input=pickle.dumps(order),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            timeout=SECONDS,
            check=False,
        ).stdout
    except subprocess.TimeoutExpired as late:
        told = late.stdout or b""
    except OSError:  # no interpreter to start: an embedded one, say
        return []
    answers: list[KernelRun | str] = []
    with io.BytesIO(told) as file, contextlib.suppress(EOFError, pickle.UnpicklingError):  # it may end in the middle
        while True:
            answers.append(pickle.load(file))
    return answers


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
        answers.write(pickle.dumps(_ran(call)))
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
