"""What PyTorch's allocator counts as allocated beyond what was asked for, in a small Megatron test.

    python -m benchmarks.unsplit_blocks

NOTE [ Blocks that are not split ]
``c10/cuda/CUDACachingAllocator.cpp``: a request of more than 1 MiB is served from the smallest free block of the large
pool that holds it, or from a new segment: of 20 MiB for less than 10, else of its size in multiples of 2. What is left
over becomes a block of its own only if it is more than 1 MiB (``should_split``, without ``expandable_segments``);
otherwise it belongs to the block, and ``allocated_bytes`` counts blocks. Here the allocations of a transformer without
sequence parallelism are replayed in Megatron's order, four micro-batches of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jettison.core.units import MIB

_SEGMENT, _LARGE, _ROUND = 20 * MIB, 10 * MIB, 2 * MIB


@dataclass(eq=False)
class Block:
    """Of a segment, with the blocks beside it."""

    nbytes: int
    place: tuple[int, int]  # segment, offset
    asked: int = 0
    before: Block | None = None
    after: Block | None = None


@dataclass
class Pool:
    """The large pool, and what is counted. Blocks of up to 1 MiB come from the small pool, which splits them all."""

    free: list[Block] = field(default_factory=list)
    segments: int = 0
    allocated: int = 0
    asked: int = 0
    most: tuple[int, int] = (0, 0)

    def take(self, nbytes: int) -> Block:
        """A block for a tensor."""
        if nbytes <= MIB:
            found = Block(nbytes, (-1, 0), nbytes)
        else:
            fitting = [block for block in self.free if block.nbytes >= nbytes]
            found = min(fitting, key=lambda block: (block.nbytes, block.place)) if fitting else self._segment(nbytes)
            if fitting:
                self.free.remove(found)
            self._split(found, nbytes)
            found.asked = nbytes
        self.allocated += found.nbytes
        self.asked += nbytes
        self.most = max(self.most, (self.allocated, self.asked))
        return found

    def give(self, *blocks: Block) -> None:
        """Tensors that are gone; free neighbours become one block."""
        for block in blocks:
            self.allocated -= block.nbytes
            self.asked -= block.asked
            if block.place[0] < 0:
                continue
            for beside in (block.before, block.after):
                if beside is not None and beside in self.free:
                    self.free.remove(beside)
                    block = self._joined(*((beside, block) if beside is block.before else (block, beside)))
            self.free.append(block)

    def _segment(self, nbytes: int) -> Block:
        self.segments += 1
        return Block(_SEGMENT if nbytes < _LARGE else -(-nbytes // _ROUND) * _ROUND, (self.segments, 0))

    def _split(self, block: Block, nbytes: int) -> None:
        if block.nbytes - nbytes <= MIB:
            return
        segment, offset = block.place
        rest = Block(block.nbytes - nbytes, (segment, offset + nbytes), before=block, after=block.after)
        if rest.after is not None:
            rest.after.before = rest
        block.nbytes, block.after = nbytes, rest
        self.free.append(rest)

    def _joined(self, left: Block, right: Block) -> Block:
        left.nbytes += right.nbytes
        left.after = right.after
        if left.after is not None:
            left.after.before = left
        return left


def unsplit_mib(tp: int, *, layers: int = 12, micro_batches: int = 4) -> float:
    """MiB counted beyond what was asked for, at the peak: b = 4, s = 1024, h = 512, 8 heads, V = 50,257."""
    pool, tokens, hidden = Pool(), 4 * 1024, 512
    vocab = -(-50257 // (128 * tp)) * 128
    stream, own, wide, mask = (
        tokens * hidden * 2,
        tokens * hidden // tp * 2,
        tokens * 4 * hidden // tp * 2,
        tokens * hidden,
    )
    for _ in range(micro_batches):
        batch, embedded = pool.take(tokens * 1024), pool.take(stream)
        start = [batch, pool.take(mask), pool.take(stream)]
        pool.give(embedded)
        kept = [_forward(pool, stream, own, wide, mask) for _ in range(layers)]
        norm, logits, softmax = pool.take(stream), pool.take(tokens * vocab * 2), pool.take(tokens * vocab * 4)
        pool.give(logits)
        change = pool.take(tokens * vocab * 2)
        pool.give(softmax)
        gradient = pool.take(stream)
        pool.give(change, norm)
        for layer in reversed(kept):
            gradient = _backward(pool, layer, gradient, (stream, own, wide))
        pool.give(gradient, *start)
    allocated, asked = pool.most
    return (allocated - asked) / MIB


def _forward(pool: Pool, stream: int, own: int, wide: int, mask: int) -> list[Block]:
    """What a layer leaves: norms, queries with keys and values, attention, two sums with their masks, the middle."""
    kept = [pool.take(stream), pool.take(3 * own), pool.take(own)]
    for middle in ((), (stream, wide, wide)):
        kept += [pool.take(nbytes) for nbytes in middle]
        returned = pool.take(stream)
        kept += [pool.take(mask), pool.take(stream)]
        pool.give(returned)
    return kept


def _backward(pool: Pool, layer: list[Block], gradient: Block, sizes: tuple[int, int, int]) -> Block:
    """One layer's; what it kept goes with it."""
    stream, own, wide = sizes
    for inside in ((wide, wide), (own, 3 * own)):
        made = [pool.take(nbytes) for nbytes in (stream, *inside)]
        after = pool.take(stream)
        pool.give(*made, gradient)
        gradient = after
    pool.give(*layer)
    return gradient


if __name__ == "__main__":
    for number in (12, 6):
        for ranks in (1, 2, 4):
            print(f"{number:2} layers, tp = {ranks}: {unsplit_mib(ranks, layers=number):5.2f} MiB")
