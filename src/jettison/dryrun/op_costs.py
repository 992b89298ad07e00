"""Cost of one operator on this machine: seconds, and the bytes that its kernel allocates inside the call.

Requests hold shapes, not data, so that a trace on fake tensors can ask for prices. Each distinct request is run on
stand-in tensors: here if its kernel is known to be safe on made-up values, else in a process of its own
(`kernel_process.py`), which may die without harm.

NOTE [ Every workspace is known ]
Seconds may be estimated, bytes may not: a budget is a promise. So every distinct request runs once for its workspace,
except large elementwise calls of which smaller ones took nothing. The deadline bounds only the repetitions that make
the seconds of recomputed ops precise. If a kernel cannot be run, its workspace is bounded by the bytes that it reads
and writes (for a convolution: by the unfolded columns), and `OpPrice.problem` has the reason.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from jettison.capture.fake_copies import makes_sparse, sparse_workspace
from jettison.capture.fake_tensor_cache import call_key
from jettison.capture.op_traits import is_communication
from jettison.capture.pytrees import op_leaves
from jettison.capture.randomness import private_randomness
from jettison.core.errors import UsageError
from jettison.dryrun.counter import number_bytes
from jettison.dryrun.kernel_process import run_apart
from jettison.dryrun.kernel_trial import KernelRun, OpRequest, StandInMemory, least_seconds, workspaces
from jettison.runtime.offload import free_host_bytes

Figures = TypeVar("Figures")
ROUNDS = 3  # of pricing what a dry run meets; calls that are new every time count as the dearest of their kind
MEMORY_SHARE = 0.5  # of what the machine has free: a kernel whose arguments take more is not run


@dataclass(frozen=True, kw_only=True)
class OpPrice:
    """`seconds`: the least of a few runs, None where the operator could not be run. `workspace_bytes`: the allocator's
    peak inside the call, less its outputs; a bound from above where ``problem`` says why it could not be run.
    ``rough``: only the workspace was asked for, and seconds are those of one run, or None."""

    seconds: float | None
    workspace_bytes: int
    problem: str = ""
    rough: bool = False


UNPRICED = OpPrice(seconds=None, workspace_bytes=0)
ROUGH = replace(UNPRICED, rough=True)

_KNOWN: dict[tuple[int, str], OpPrice] = {}
"""Prices of this process, by threads and key: workspaces depend on the number of threads."""


def measure_ops(
    requests: Iterable[OpRequest], *, total_seconds: float = 10.0, timed: bool = True
) -> dict[str, OpPrice]:
    """Prices by `OpRequest.key`. Distinct requests run once a process, in order of their keys; a cache has the rest.

    See NOTE [ Every workspace is known ]. When ``total_seconds`` are spent, seconds are those of the one run that there
    was. Every random generator is left as it was. The same request has the same price whenever it is asked for in one
    process, so that what a plan said is the least to be had can be had. ``timed``: seconds matter, too.
    """
    threads = torch.get_num_threads()
    distinct = {request.key: request for request in requests}
    missing = [distinct[key] for key in sorted(distinct) if (threads, key) not in _KNOWN]
    deadline = time.perf_counter() + total_seconds
    priced = _priced(missing if timed else _worth_running(missing))
    for request in missing:
        price = priced.get(request.key) or _KNOWN.get((threads, request.key), ROUGH)  # a smaller one's trial has some
        _KNOWN[threads, request.key] = price if timed else replace(price, rough=True)
    if timed:
        rough = [distinct[key] for key in sorted(distinct) if _KNOWN[threads, key].rough]
        unrun = [request for request in rough if _KNOWN[threads, request.key].seconds is None]
        _KNOWN.update(((threads, key), price) for key, price in _priced(unrun).items())
        _time([*missing, *rough], threads, deadline)
    if any(request.device.startswith("cuda") for request in missing) and torch.cuda.is_available():
        torch.cuda.empty_cache()  # what the kernels took is not held on to
    return {key: _KNOWN[threads, key] for key in distinct}


def _time(requests: Sequence[OpRequest], threads: int, deadline: float) -> None:
    """Make the seconds of prices precise, as long as there is time."""
    memory = StandInMemory()
    with private_randomness(r.device for r in requests):
        for request in requests:
            price = replace(_KNOWN[threads, request.key], rough=False)
            if price.seconds is not None and is_safe(request.func) and time.perf_counter() <= deadline:
                # a kernel that ran once may have no room now: what was measured stands
                with contextlib.suppress(Exception):
                    price = replace(price, seconds=least_seconds(request, price.seconds, memory))
            _KNOWN[threads, request.key] = price


LARGE_BYTES = 8 << 20
"""An elementwise call on more is not run for its workspace where `TELLING_BYTES` or more took none."""
TELLING_BYTES = 256 << 10


def _worth_running(requests: Sequence[OpRequest]) -> list[OpRequest]:
    """Requests whose workspaces smaller ones do not tell: an elementwise kernel takes none at any size, or always."""
    kinds: dict[Any, list[OpRequest]] = {}
    for request in requests:
        same = torch.Tag.pointwise in request.func.tags and len({meta.dtype for meta in request.metas}) == 1
        kind = (request.func, request.metas[0].dtype, request.device) if same else request.key
        kinds.setdefault(kind, []).append(request)
    found: list[OpRequest] = []
    for alike in kinds.values():
        sizes = {request.key: sum(meta.nbytes for meta in request.metas) for request in alike}
        large = [request for request in alike if sizes[request.key] > LARGE_BYTES]
        if not large or not any(TELLING_BYTES <= nbytes <= LARGE_BYTES for nbytes in sizes.values()):
            found += alike
            continue
        small = measure_ops([request for request in alike if request not in large], timed=False)
        if any(price.workspace_bytes for price in small.values()):
            found += large
    return found


def _priced(requests: list[OpRequest]) -> dict[str, OpPrice]:
    prices: dict[str, OpPrice] = {}
    here: list[OpRequest] = []
    apart: list[OpRequest] = []
    profiled = torch.autograd._profiler_enabled()  # ours would end a running session, and take its records
    for request in requests:
        if has_no_workspace(request.func) or request.device == "meta":
            prices[request.key] = UNPRICED  # there is no kernel to time
        elif sum(meta.nbytes for meta in request.metas) > MEMORY_SHARE * _free_bytes(request.device):
            prices[request.key] = _bounded(request, "its arguments do not fit the memory that is free here")
        else:
            (here if is_safe(request.func) and not (profiled and request.device == "cpu") else apart).append(request)
    found: dict[str, KernelRun | Exception | str] = {**workspaces(here), **run_apart(apart)}
    for request in [*here, *apart]:
        run = found[request.key]
        if isinstance(run, KernelRun):
            prices[request.key] = OpPrice(seconds=run.seconds, workspace_bytes=run.workspace_bytes)
        elif isinstance(run, str):
            prices[request.key] = _bounded(request, run)
        else:
            first = (str(run).splitlines() or [""])[0][:120]
            prices[request.key] = _bounded(request, f"{type(run).__name__}: {first}")
    return prices


def _bounded(request: OpRequest, problem: str) -> OpPrice:
    """Upper bound of a kernel's workspace, as far as shapes tell: a copy of all that it reads and writes."""
    nbytes = 2 * sum(meta.nbytes for meta in request.metas)
    if "conv" in str(request.func):
        kernels = [meta.shape[2:] for meta in request.metas if len(meta.shape) > 2]
        nbytes *= max(1, min((prod(kernel) for kernel in kernels), default=1))
    return OpPrice(seconds=None, workspace_bytes=nbytes, problem=problem)


def _free_bytes(device: str) -> float:
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(device)[0] if torch.cuda.is_available() else float("inf")
    with contextlib.suppress(UsageError):  # the system does not tell
        return free_host_bytes()
    return float("inf")


class MeasuredWorkspace:
    """A `workspace` for `AllocationCounter` that looks measured prices up.

    Calls without a price are listed in `unknown`, and count as the dearest call of their operator that has one. An
    operator whose every priced call took nothing and whose kernel can take nothing else is not looked up again: a key
    costs more than many a fake kernel. What was answered once is remembered under a key that costs less.

    Args:
        measured: earlier measurements of this process are added to ``prices``.
    """

    def __init__(self, prices: dict[str, OpPrice], *, measured: bool = False) -> None:
        self._prices = prices
        self._measured = measured
        self._most: dict[str, int] = {}
        self._nothing: dict[Any, bool] = {}
        for key, price in prices.items():
            name = key.partition("(")[0]
            self._most[name] = max(self._most.get(name, 0), price.workspace_bytes)
        self.unknown: dict[str, OpRequest] = {}
        self._answers: dict[Any, int] = {}

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        if has_no_workspace(func):
            return 0
        nothing = self._nothing.get(func)
        if nothing is None:
            nothing = self._nothing[func] = self._most.get(str(func)) == 0 and torch.Tag.pointwise in func.tags
        if nothing and _casts_nothing(func, args):
            return 0
        key = call_key(func, args, kwargs)
        found = self._answers.get(key) if key is not None else None
        if found is None:
            found = self._looked_up(func, args, kwargs)
            if key is not None:
                self._answers[key] = found
        return found

    def _looked_up(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        if any(isinstance(leaf, Tensor) and leaf.layout is not torch.strided for leaf in op_leaves(args, kwargs)):
            return sparse_workspace(func, args)
        most = self._most.get(str(func))
        request = OpRequest.of(func, args, kwargs)
        price = self._prices.get(request.key)
        if price is None and self._measured:
            price = _KNOWN.get((torch.get_num_threads(), request.key))
        if price is None:
            self.unknown[request.key] = request
            return most or 0
        self._prices[request.key] = price
        return price.workspace_bytes


def _casts_nothing(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an elementwise kernel casts none of its arguments, which it would do inside, and none is sparse. A number
    in the place of a tensor becomes one there, of another dtype.
    """
    tensors = [value for value in args if isinstance(value, Tensor)]
    alike = all(t.layout is torch.strided and t.dtype is tensors[0].dtype for t in tensors)
    return alike and not number_bytes(func, args)


MEASURED_BELOW_BYTES = 2**30
"""Bytes of parameters below which a model's ops can be tried where it is planned."""


class Pricing:
    """All prices that were asked for so far (workspaces count only if ops are ``run``), and dry runs that know them."""

    def __init__(self, *, run: bool = True) -> None:
        self.run = run
        self.prices: dict[str, OpPrice] = {}
        self._workspace = MeasuredWorkspace(self.prices, measured=run)

    def learn(self, requests: Iterable[OpRequest]) -> None:
        """Have prices for these, seconds among them, where ops are run."""
        missing = [request for request in requests if self.prices.get(request.key, ROUGH).rough]
        if self.run and missing:
            self.prices.update(measure_ops(missing))
            self._workspace = MeasuredWorkspace(self.prices, measured=True)

    def known(self, dry_run: Callable[[MeasuredWorkspace], Figures]) -> Figures:
        """Result of a dry run once every op in it has a price: it is repeated until then."""
        found = dry_run(self._workspace)
        for _ in range(ROUNDS):
            if not self.run or not self._workspace.unknown:
                break
            self.prices.update(measure_ops(self._workspace.unknown.values(), timed=False))
            self._workspace = MeasuredWorkspace(self.prices, measured=True)
            found = dry_run(self._workspace)
        return found

    def problems(self) -> dict[str, str]:
        """By operator: why it could not be run, so that its workspace is a bound."""
        return {key.partition("(")[0]: price.problem for key, price in self.prices.items() if price.problem}


# which kernels may be called in the user's own process with made-up values --------------------------------------------
#
# A kernel that trusts its arguments (lengths, offsets, a workspace that another call filled) can end the process on
# values that no training step would give it. What is listed here indexes with nothing but shapes, or with indices that
# it checks; so do operators that torch tags as pointwise, as reductions or as core. Everything else is priced in a
# process of its own (`kernel_process.py`).

_TAGS = (torch.Tag.core, torch.Tag.pointwise, torch.Tag.reduction, torch.Tag.view_copy)
_NOT_SAFE = frozenset({"_embedding_bag", "_pdist_forward", "grid_sampler_2d"})
"""Tagged as above, but they read lengths or positions out of their arguments."""

_LISTED = (Path(__file__).parent / "safe_ops.txt").read_text(encoding="utf-8").splitlines()
_SAFE = frozenset(name for line in _LISTED if not line.startswith("#") for name in line.split())


def is_safe(func: Any) -> bool:
    """Whether calling this kernel on made-up values can at worst raise."""
    namespace, name = func._schema.name.split("::")
    if namespace == "jettison":  # ours, of kernels that are
        return True
    if namespace != "aten" or name in _NOT_SAFE:
        return False
    return name.removesuffix("_") in _SAFE or name in _SAFE or any(tag in func.tags for tag in _TAGS)


@cache
def has_no_workspace(func: Any) -> bool:
    """Whether a call allocates nothing but its results: views, giving a tensor another storage or no history, an
    optimizer's in-place work over lists, marks of the profiler, questions for a tensor's device, the empty memory of
    dry runs, what talks to other ranks (they may not be asking, and each call names an object of its own).
    """
    is_named = func._schema.name.startswith(_NOTHING_INSIDE) or func._schema.name == "aten::detach_"
    return bool(is_named or func.is_view or makes_sparse(func) or is_communication(func))


_NOTHING_INSIDE = (
    *("aten::_foreach_", "aten::_fused_adam", "aten::_fused_sgd", "aten::new_empty_strided", "aten::set_"),
    *("profiler::", "prim::"),
)
