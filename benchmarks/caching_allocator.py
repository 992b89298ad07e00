"""Segments that a step of a described run reserves, by the rules of PyTorch's caching allocator.

    python -m benchmarks.caching_allocator

Prints, for published runs on one rank, what the allocator reserves beyond the peak of its blocks after three steps, and
`jettison.predict.stages.cached_segments`.

NOTE [ Rules ]
``c10/cuda/CUDACachingAllocator.cpp`` (v2.9.0), without expandable segments: sizes are rounded up to 512 B
(``round_size``); the least free block of the pool that is large enough is taken (``get_free_block``), else a segment is
reserved: 2 MiB for at most 1 MiB, 20 MiB below 10 MiB, else whole multiples of 2 MiB (``get_allocation_size``); what is
left of a block is split off, in the pool of large blocks where it is above 1 MiB (``should_split``); a freed block
joins its free neighbors (``free_block``). Other streams are not simulated.

NOTE [ Events ]
Allocations and frees are those of `formula.liveness`, whose replay counts them, in the order of the step: parameters,
each micro-batch's forwards and backwards, gradients until the optimizer has stepped, its state in the first step.
Sharded parameters and buffers of frameworks are left out.

NOTE [ Pipelines of DeepSpeed ]
The first stage of a 1F1B schedule under ZeRO 1 (``runtime/zero/stage_1_and_2.py``, ``runtime/engine.py``, 2151c78):
parameters are flattened on the CPU, so that the blocks of single ones stay cached; a rank's share is copied and cast to
fp32; ``initialize_optimizer_states`` steps on a zero gradient. After the backwards gradients are flattened bucket by
bucket (``allreduce_bucket``; ``contiguous_gradients`` is off), and the step flattens a rank's own and casts them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final

from benchmarks import one_gpu
from jettison.core.units import GIB, MIB
from jettison.formula.liveness import Backward
from jettison.formula.region import Region
from jettison.formula.tape import TapeOp
from jettison.predict.forecast import Stage, forecast_sizes
from jettison.predict.stages import FULL, StageRegion, cached_segments, named_frames
from jettison.spec.layout import ZeroBuckets
from jettison.spec.precision import GradientRule
from jettison.spec.run import Run

SMALL, LARGE = MIB, 10 * MIB
STEPS: Final = 3
Key = tuple[Hashable, ...]
Event = tuple[Key, int]
"""A block's key and its bytes; 0: it is freed."""


class CachingAllocator:
    """Blocks and segments of one stream: NOTE [ Rules ]."""

    def __init__(self) -> None:
        self.reserved = self.allocated = self.peak = 0
        self.blocks: dict[Key, tuple[int, int]] = {}
        self._free: tuple[list[tuple[int, int]], ...] = ([], [])  # size and address, of small and of large blocks
        self._sizes: dict[int, int] = {}  # of every block, by address
        self._ends: dict[int, int] = {}  # address of the block that ends there
        self._pools: dict[int, int] = {}
        self._next = 0

    def allocate(self, key: Key, nbytes: int) -> None:
        """Allocate a block."""
        size = max(1, -(-nbytes // 512)) * 512
        pool = int(size > SMALL)
        free = self._free[pool]
        at = bisect_left(free, (size, -1))
        if at == len(free):
            whole = 2 * MIB if not pool else 20 * MIB if size < LARGE else -(-size // (2 * MIB)) * 2 * MIB
            self.reserved += whole
            address, self._next = self._next, self._next + whole + 1  # a gap: segments never join
        else:
            whole, address = free.pop(at)
        if whole - size >= (512, MIB + 1)[pool]:
            self._put(pool, address + size, whole - size)
            whole = size
        self._sizes[address], self._ends[address + whole], self._pools[address] = whole, address, pool
        self.blocks[key] = address, pool
        self.allocated += whole
        self.peak = max(self.peak, self.allocated)

    def size(self, key: Key) -> int:
        """Bytes of a block."""
        return self._sizes[self.blocks[key][0]]

    def _put(self, pool: int, address: int, size: int) -> None:
        insort(self._free[pool], (size, address))
        self._sizes[address], self._ends[address + size], self._pools[address] = size, address, pool

    def _take(self, pool: int, address: int) -> int:
        """Size of a free block that is one no more; 0: none is there."""
        block = self._sizes.get(address, 0), address
        at = bisect_left(self._free[pool], block)
        if self._free[pool][at : at + 1] != [block]:
            return 0
        del self._free[pool][at], self._sizes[address]
        return block[0]

    def free(self, key: Key) -> None:
        """Free a block."""
        address, pool = self.blocks.pop(key)
        size = self._sizes.pop(address)
        self.allocated -= size
        size += self._take(pool, address + size)
        before = self._ends.get(address, -1)
        if self._sizes.get(before, -1) + before == address and (more := self._take(pool, before)):
            address, size = before, size + more
        self._put(pool, address, size)


class _Recorded(Backward):
    """A backward that records its blocks."""

    def __init__(self, *, events: list[Event], **given: Any) -> None:
        self.events = events
        super().__init__(**given)

    def _run(self, op: Any) -> None:
        before = set(self.computed)
        self.pending.discard(op.index)
        for out in op.outputs:
            if self.program.buffers[out].producer == op.index and out not in self.kept:
                self.computed.add(out)
                self._grow(self.program.buffers[out].nbytes)
        self.events += [(("made", b), self.program.buffers[b].nbytes) for b in sorted(self.computed - before)]
        for i in set(op.inputs):
            self._release(i)
        for out in op.outputs:
            if out in self.computed and not self.uses[out]:
                self._free(out)

    def _free(self, b: int) -> None:
        buffer = self.program.buffers[b]
        if b in self.computed:
            self.events.append((("made", b), 0))
        elif b in self.kept and not buffer.free and (buffer.producer is not None or b in self.saved):
            self.events.append((("kept", b), 0))
        super()._free(b)

    def _tensor(self, nbytes: int) -> int:
        tensor = super()._tensor(nbytes)
        self.events.append((("gradient", tensor), nbytes))
        return tensor

    def _unown(self, tensor: int) -> None:
        super()._unown(tensor)
        if self.owners[tensor] == 0:
            self.events.append((("gradient", tensor), 0))

    def _visit(self, step: TapeOp) -> None:
        made = self._made(step, [self.gradient[v.storage] for v in step.outputs if v.storage in self.gradient])
        self.events += [(("weight", w.name), w.gradient_bytes(self.weight_bytes)) for w in made]
        super()._visit(step)
        added = [w.name for w in made if self.accumulates]
        self.events += [(("weight", name), 0) for name in added]


@lru_cache(maxsize=256)
def _backward(part: StageRegion, rule: GradientRule, accumulates: bool) -> tuple[tuple[Event, ...], int | None]:
    """Events of a region's backward, and the gradient of its input."""
    region, events = part.region, list[Event]()
    frames = () if part.held else named_frames(region, part.policy)
    given = {"rule": rule, "accumulates": accumulates, "frames": frames, "held": part.held}
    backward = _Recorded(events=events, region=region, kept=part.kept, **given)
    backward.run(region.last_read, reentrant=rule.reentrant and part.policy == FULL and not part.held)
    return tuple(events), backward.gradient.get(next(iter(region.tape.sources)))


def _forward(region: Region, kept: frozenset[int]) -> Iterator[Event]:
    program, last = region.program, defaultdict[int, list[int]](list)
    for b, index in region.last_ops.items():
        if b not in kept and b not in program.outputs and program.buffers[b].producer is not None:
            last[index].append(b)
    for op in program.ops:
        yield from (((b,), program.buffers[b].nbytes) for b in op.outputs if program.buffers[b].producer == op.index)
        yield from (((b,), 0) for b in last[op.index])


class _Steps:
    """Steps of a run on one rank: NOTE [ Events ]."""

    def __init__(self, run: Run) -> None:
        stage = forecast_sizes(run).worst
        self.run, self.load, self.allocator = run, stage.load, CachingAllocator()
        self.parts = self._parts(stage)
        weights = [w for part in self.parts for w in part.region.weights if not w.tied]
        total = sum(w.held_bytes for w in weights) or 1
        for number, w in enumerate(weights):
            self.allocator.allocate(("parameter", number), w.held_bytes * stage.static.parameters // total)
        self.allocator.allocate(("fixed",), self.load.fixed - stage.static.parameters)
        self.learned = [w.numel for w in weights if not w.frozen]
        self._live: dict[int, tuple[list[dict[Hashable, Key]], Counter[Key]]] = {}

    @staticmethod
    def _parts(stage: Stage) -> list[StageRegion]:
        return [group.part for chunk in stage.groups for group in chunk for _ in group.names]

    def step(self, *, first: bool, lengths: Sequence[int] = ()) -> None:
        """One step of up to two micro-batches, or of one of each length."""
        for micro_batch, seq in enumerate(lengths or [self.run.seq] * min(2, self.run.micro_batches)):
            if lengths:
                self.parts = self._parts(forecast_sizes(replace(self.run, seq=seq)).worst)
            self._micro_batch(micro_batch)
        total, allocator = sum(self.learned), self.allocator
        for name, nbytes in (("state", self.load.state if first else 0), ("stepping", self.load.optimizer_transient)):
            for number, numel in enumerate(self.learned if nbytes else ()):
                allocator.allocate((name, number), numel * nbytes // total)
        for key in [key for key in allocator.blocks if key[0] in ("weight", "stepping")]:
            allocator.free(key)

    def _micro_batch(self, number: int) -> None:
        self._forwards(number)
        self._backwards(number)

    def _forwards(self, number: int) -> Key | None:
        """Forward of a micro-batch; the block of its output."""
        allocator, references = self.allocator, Counter[Key]()
        held: list[dict[Hashable, Key]] = [{} for _ in self.parts]
        given: Key | None = None
        for i, part in enumerate(self.parts):
            program, own = part.region.program, held[i]
            for (b,), nbytes in _forward(part.region, part.kept):
                key: Key = ("forward", number, i, b)
                if nbytes:
                    allocator.allocate(key, nbytes)
                    own[b], references[key] = key, 1
                else:
                    allocator.free(key)
            entry = part.region.buffers.get(next(iter(part.region.tape.sources)), -1)
            if given and entry in part.kept and not program.buffers[entry].free:
                references[given] += 1
                own[entry] = given
            self._drop(references, given)
            out = part.region.buffers[part.region.output.storage]
            given = own.get(out)
            if given and out in part.kept and not program.buffers[out].free:
                references[given] += 1
        self._live[number] = held, references
        return given

    def _backwards(self, number: int) -> None:
        allocator, (held, references) = self.allocator, self._live.pop(number)
        came: Key | None = None
        for i, part in reversed([*enumerate(self.parts)]):
            events, left = _backward(part, self.run.gradient_rule, number > 0)
            for name, nbytes in events:
                own_key: Key = ("weight", i, name[1]) if name[0] == "weight" and not number else ("backward", i, *name)
                if name == ("gradient", 0) and came:
                    own_key = came  # the next region's gradient of its input
                if name[0] == "kept":
                    self._drop(references, held[i].get(name[1]))
                elif nbytes and own_key not in allocator.blocks:
                    allocator.allocate(own_key, nbytes)
                elif not nbytes and own_key in allocator.blocks:
                    allocator.free(own_key)
            came = came if left == 0 and came else ("backward", i, "gradient", left)
            for gone in [each for each in allocator.blocks if each[0] == "backward" and each != came]:
                allocator.free(gone)
            came = came if came in allocator.blocks else None
        for gone in [each for each in allocator.blocks if each[0] == "backward" or each[:2] == ("forward", number)]:
            allocator.free(gone)

    def _drop(self, references: Counter[Key], key: Key | None) -> None:
        if key is None:
            return
        references[key] -= 1
        if references[key] <= 0 and key in self.allocator.blocks:
            self.allocator.free(key)


class _Pipeline(_Steps):
    """The first stage of a run: NOTE [ Pipelines of DeepSpeed ]."""

    def __init__(self, run: Run) -> None:
        stage = forecast_sizes(run).stages[0]
        self.run, self.allocator, self.parts = run, CachingAllocator(), self._parts(stage)
        self.bucket = (run.layout.buckets or ZeroBuckets()).reduce
        weights = [w.numel for part in self.parts for w in part.region.weights if not w.tied]
        self.share = sum(weights) // run.layout.dp
        self._live = {}
        allocate, free = self.allocator.allocate, self.allocator.free
        for number, numel in enumerate(weights):
            allocate(("single", number), 2 * numel)
        allocate(("flat",), 2 * sum(weights))
        for number, _ in enumerate(weights):
            free(("single", number))
        for name, each in (("copy", 2), ("master", 4), ("zero", 4), ("mean", 4), ("square", 4)):
            allocate((name,), each * self.share)
            if name == "master":
                free(("copy",))
        free(("zero",))

    def step(self, *, first: bool = False, lengths: Sequence[int] = ()) -> None:
        """One step of all stages' warm-up and four more micro-batches."""
        ahead, allocator = self.run.layout.pp, self.allocator
        for number in range(ahead + 4):
            output = self._forwards(number)
            self._drop(self._live[number][1], output)  # sent
            if number >= ahead - 1:
                self._backwards(number - ahead + 1)
        for number in sorted(self._live):
            self._backwards(number)
        gradients = {key: allocator.blocks[key] for key in allocator.blocks if key[0] == "weight"}
        sizes = [allocator.size(key) for key in gradients]
        while sizes:
            bucket = sizes.pop()
            while sizes and bucket + sizes[-1] <= 2 * self.bucket:
                bucket += sizes.pop()
            allocator.allocate(("bucket",), bucket)
            allocator.free(("bucket",))
        kept = 0
        for key in gradients:  # of other ranks: freed
            kept += allocator.size(key)
            if kept > 2 * self.share:
                allocator.free(key)
        allocator.allocate(("flattened",), 2 * self.share)
        allocator.allocate(("wide",), 4 * self.share)
        for key in [key for key in allocator.blocks if key[0] in ("weight", "flattened", "wide")]:
            allocator.free(key)


def simulated_pipeline(run: Run, steps: int = STEPS) -> CachingAllocator:
    """The allocator of a pipeline's first stage after some steps under DeepSpeed's ZeRO 1."""
    pipeline = _Pipeline(run)
    for _ in range(steps):
        pipeline.step()
    return pipeline.allocator


def simulated(run: Run, lengths: Sequence[Sequence[int]] = ((),) * STEPS) -> CachingAllocator:
    """The allocator after three steps of a run on one rank, or after steps of micro-batches of these lengths."""
    steps = _Steps(run)
    for number, own in enumerate(lengths):
        steps.step(first=number == 0, lengths=own)
    return steps.allocator


def main() -> None:
    """Print the table."""
    print("| run | allocated | simulated blocks | segments beyond | modelled |\n| --- | ---: | ---: | ---: | ---: |")
    for row in one_gpu.rows():
        if row.recorded or row.figure not in ("reserved", "occupied"):
            continue
        run = row.described()
        if run.layout.zero == 3 and run.layout.dp > 1:
            continue
        found, peak = simulated(run), forecast_sizes(run).peak_bytes
        sizes = (peak, found.peak, found.reserved - found.peak, cached_segments(run))
        print(f"| {row.run} | " + " | ".join(f"{n / GIB:.2f}" for n in sizes) + " |", flush=True)


if __name__ == "__main__":
    main()
