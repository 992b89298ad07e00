"""Parameters all-gathered module by module: live parameters and gradient buckets of each region of a chunk.

NOTE [ Live parameters ]
DeepSpeed 0.19.8, ``deepspeed/runtime/zero``, ZeRO 3. ``partitioned_param_coordinator.py``: each module call gathers its
own parameters (``fetch_sub_module``). It then prefetches along the trace recorded in the first step, at least one
parameter and up to ``prefetch_bucket_size`` elements, while fewer than ``max_live_parameters`` are live. A transformer
has more module calls than large weights, so the prefetch queue runs ahead until that many are live.
``release_sub_module`` frees a module's parameters, except those that are used again within ``max_reuse_distance``
elements or that the queue has already seen (``__params_to_release``). Recomputation of a checkpoint calls its modules
once more. Parameters that no backward hook releases, such as an embedding table, are freed after the backward
(``release_backward_leftovers``). A forward starts with no live elements counted (``reset_step``).

Parameters of at most ``param_persistence_threshold`` elements stay unsharded from the end of a step on
(``mark_persistent_parameters``; ``stage3.py``, ``_post_step``), in addition to their shards.

``partition_parameters.py``: a single parameter is gathered into its own storage (``_all_gather_sequential``). Several
are gathered into one buffer (``_all_gather_dtype``) and copied out of it when the first of them is needed
(``AllGatherCoalescedHandle.wait``). The buffer is freed after the last of them is fetched.

``stage3.py``: a gradient is copied into a permanent bucket of ``reduce_bucket_size`` elements, and its own storage is
freed (``__add_grad_to_ipg_bucket``). A larger gradient keeps its storage until the next one comes. A full bucket is
reduced through a copy (``comm/coalesced_collectives.py``, ``reduce_scatter_coalesced``), unless it holds one gradient.
The engine sums the two gradients of a tied table before hooks run.

``stage_1_and_2.py``, ZeRO 1 and 2: buckets exist during backward (``setup_buckets``, ``_release_ipg_buffers``) and are
reduced through a copy (``allreduce_and_copy_with_multiple_ranks``). Under ZeRO 1 gradients stay until they are reduced.

Counted: the highest moment of each region's pass, added to its own peak. DeepSpeed on two gloo ranks has the same
number of live elements at every module call (tests/facts/live_parameters.json).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from jettison.core.dtypes import DTYPE_BYTES
from jettison.formula.region import EMBEDDING, Region
from jettison.formula.tape import Weight
from jettison.predict.stages import StageRegion
from jettison.spec.layout import ZeroBuckets
from jettison.spec.recompute import Mode
from jettison.spec.run import Run

Live = tuple[int, int]
"""Bytes that add to a region's forward, and to its backward."""


class Parameter(NamedTuple):
    """A parameter of an all-gather; ``gradient``: elements of a reduced gradient."""

    numel: int
    nbytes: int
    gradient: int = 0


class Call(NamedTuple):
    """A module's call in the trace, with the parameters of its own; ``stays``: no hook releases them."""

    parameters: tuple[int, ...]
    region: int = 0
    backward: bool = False  # of the pass
    makes_gradients: bool = False
    stays: bool = False


def live_parameters(run: Run, parts: Sequence[StageRegion]) -> tuple[Live, ...]:
    """Return the bytes that add to each region of a chunk."""
    layout, precision = run.layout, run.precision
    assert layout.buckets is not None
    width = DTYPE_BYTES[precision.compute]
    bucket_bytes = layout.buckets.buckets * layout.buckets.reduce * width
    if layout.zero == 1:
        return ((0, bucket_bytes),) * len(parts)
    copying = layout.shards if run.optimizer_offload.moves_parameters else 0
    reruns = run.recompute.mode not in (Mode.NONE, Mode.SELECTIVE, Mode.MODULES)
    ends = tuple((part.name == EMBEDDING, part.region) for part in parts)
    gathers = layout.zero == 3 and (layout.shards > 1 or copying > 0)  # one rank's are views of its own
    found = _live(ends, layout.buckets, width, reruns, gathers, copying)
    return found if layout.zero == 3 else tuple((0, backward + bucket_bytes) for _, backward in found)


@lru_cache(maxsize=256)
def _live(
    ends: tuple[tuple[bool, Region], ...], buckets: ZeroBuckets, width: int, reruns: bool, gathers: bool, copying: int
) -> tuple[Live, ...]:
    parameters: list[Parameter] = []
    calls = [[*_calls(region, parameters, width, gathers)] for _, region in ends]
    trace = [Call(own, at) for at, modules in enumerate(calls) for own in modules]
    for at in reversed(range(len(calls))):
        if reruns and not ends[at][0] and at < len(calls) - 1:
            trace += [Call(own, at, backward=True) for own in calls[at]]
        trace += [Call(own, at, True, True, stays=ends[at][0]) for own in reversed(calls[at])]
    coordinator = Coordinator(parameters=parameters, trace=trace, buckets=buckets, copying=copying, width=width)
    found = [[0, 0] for _ in calls]
    for call, nbytes in zip(trace, coordinator.run(), strict=True):
        found[call.region][call.backward] = max(found[call.region][call.backward], nbytes)
    return tuple((coordinator.always + forward, coordinator.always + backward) for forward, backward in found)


def _calls(region: Region, parameters: list[Parameter], width: int, gathers: bool) -> Iterator[tuple[int, ...]]:
    """Modules in the order of the forward, a region's own and those that have some first; a tied table is the first."""
    yield ()
    modules: dict[str, list[int]] = {}
    for weight in region.weights:
        name, dot, last = weight.name.rpartition(".")
        own = name if dot and last in ("weight", "bias") else weight.name
        for stop in (at for at, letter in enumerate(own) if letter == "."):
            modules.setdefault(own[:stop], [])
        modules.setdefault(own, []).append(0 if weight.tied else len(parameters))
        if not weight.tied:
            parameters.append(_parameter(weight, width, gathers))
    yield from map(tuple, modules.values())


def _parameter(weight: Weight, width: int, gathers: bool) -> Parameter:
    """A parameter; a packed one has elements of the width of the others (``bnb_4bit_quant_storage``)."""
    if not weight.frozen:
        return Parameter(weight.numel, gathers * width * weight.numel, weight.gradient_numel)
    nbytes = weight.packed_bytes - weight.scale_bytes if weight.packed_bytes else weight.numel * width
    return Parameter(nbytes // width, gathers * nbytes)


@dataclass(slots=True)
class _Coalesced:
    """Parameters of one all-gather: those not yet fetched by a module, and whether they were copied out."""

    waiting: set[int]
    nbytes: int
    alone: bool
    copied: bool = False


@dataclass(kw_only=True)
class Coordinator:
    """One forward and backward of a recorded trace.

    Args:
        copying: ranks that each copy their shards from the host first; one copies each parameter into its storage.
        width: bytes of an element of a gradient.
        fetched: live elements, and bytes of all storages, after the gathers of each call.
    """

    parameters: Sequence[Parameter]
    trace: Sequence[Call]
    buckets: ZeroBuckets
    copying: int = 0
    width: int = 2
    fetched: list[tuple[int, int]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        few = self.buckets.persist
        self.persistent = {p for p, each in enumerate(self.parameters) if each.numel <= few or not each.nbytes}
        self.live = {*self.persistent}
        self.gathers: dict[int, _Coalesced] = {}
        self.fetched_for = [-1] * len(self.parameters)  # the last call that the queue has seen it in
        self.queue = deque((p, at) for at, call in enumerate(self.trace) for p in sorted(call.parameters))
        sizes = (sum(self.parameters[p].numel for p in call.parameters) for call in self.trace)
        self.passed = [*accumulate(sizes, initial=0)]  # elements of the calls before each
        self.uses: list[list[int]] = [[] for _ in self.parameters]
        for at in reversed(range(len(self.trace))):
            for p in self.trace[at].parameters:
                self.uses[p].append(at)  # the next one is the last of them
        self.count = self.nbytes = self.peak = 0
        self.filled: list[int] = []  # gradients in the bucket, by elements
        self.outside = 0  # bytes of those that are in no bucket

    @property
    def always(self) -> int:
        """Bytes of parameters that stay unsharded between steps."""
        return sum(self.parameters[p].nbytes for p in self.persistent)

    def run(self) -> list[int]:
        """Return the peak of each call, without persistent parameters."""
        found = []
        for at, call in enumerate(self.trace):
            self.peak = self.nbytes
            self.fetch(at, call.parameters)
            self.fetched.append((self.count, self.nbytes))
            if call.makes_gradients:
                self._reduce(call.parameters)
            if not call.stays:
                self.release(at + 1, call.parameters)
            found.append(self.peak)
        return found

    def _grow(self, nbytes: int, passing: int = 0) -> None:
        self.nbytes += nbytes
        self.peak = max(self.peak, self.nbytes + passing)

    def _gather(self, wanted: Sequence[int]) -> None:
        missing = [p for p in dict.fromkeys(wanted) if p not in self.live]
        if not missing:
            return
        total = sum(self.parameters[p].nbytes for p in missing)
        self.live.update(missing)
        self.count += sum(self.parameters[p].numel for p in missing)
        self.gathers |= dict.fromkeys(
            missing, _Coalesced({*missing}, total, alone=len(missing) == 1 or self.copying == 1)
        )
        self._grow(total, passing=total // self.copying if self.copying > 1 else 0)

    def fetch(self, at: int, own: tuple[int, ...]) -> None:
        """Gather a call's parameters, and prefetch."""
        self._gather(own)
        for gather, p in ((self.gathers.pop(p), p) for p in own if p in self.gathers):
            if not gather.copied and not gather.alone:
                self._grow(gather.nbytes)
            gather.copied = True
            gather.waiting.discard(p)
            if not gather.waiting and not gather.alone:
                self.nbytes -= gather.nbytes  # the buffer
        for _ in range(min(sum(self.fetched_for[p] < at for p in own), len(self.queue))):
            p, use = self.queue.popleft()
            self.fetched_for[p] = use
        self._prefetch()

    def _prefetch(self) -> None:
        most = min(self.buckets.live - self.count, self.buckets.prefetch)
        ahead: list[int] = []
        numel = 0
        while self.queue and numel < most:
            p, use = self.queue.popleft()
            self.fetched_for[p] = max(self.fetched_for[p], use)
            if p not in self.live and p not in ahead:
                ahead.append(p)
                numel += self.parameters[p].numel
        self._gather(ahead)

    def release(self, at: int, own: tuple[int, ...]) -> None:
        """Release a call's parameters before call number ``at``, but for those that are used again soon."""
        for p in own:
            while (uses := self.uses[p]) and uses[-1] < at:
                uses.pop()
            again = uses and self.passed[uses[-1]] - self.passed[at] < self.buckets.reuse
            if p in self.persistent or self.fetched_for[p] > at or again or p not in self.live:
                continue
            self.live.discard(p)
            self.count -= self.parameters[p].numel
            self.nbytes -= self.parameters[p].nbytes

    def _reduce(self, own: tuple[int, ...]) -> None:
        for each in (self.parameters[p] for p in own if self.parameters[p].gradient):
            size, width = self.buckets.reduce, self.width
            if self.filled and sum(self.filled) + each.gradient > size:
                self._grow(0, passing=width * sum(self.filled) if len(self.filled) > 1 else 0)
                self._grow(-self.outside)
                self.filled, self.outside = [], 0
            self.filled.append(each.gradient)
            if each.gradient > size or not self.buckets.buckets:
                self.outside += width * each.gradient
                self._grow(width * each.gradient)
