"""How high a region's forward rises where nothing is kept for a backward.

NOTE [ What frames hold ]
Where autograd saves what ops read, it hardly matters how long Python's variables live: the graph holds the tensors
longer. Under ``torch.no_grad()`` only variables hold them, and they die with their function, not with their last use.
As ``transformers`` writes its models (``models/llama/modeling_llama.py``; others copy it):

- ``LlamaDecoderLayer.forward`` and the module that it calls have a block's input until the block is over.
- ``LlamaAttention.forward`` has query, key and value (rotated) until it returns, and eager attention's weights.
- ``sdpa_attention_forward`` and ``eager_attention_forward`` have keys and values as ``repeat_kv`` spread them until
  they return. What a product copies for itself goes at once.
- ``LlamaModel.forward`` has ``inputs_embeds`` until the last layer has run: the caller of `forward_height` adds it.
- ``GPT2Block.forward`` has what attention returned until it is over itself (``names_outputs``).

torchtitan and torchtune write the same but for the last two.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from jettison.formula.region import Region
from jettison.formula.tape import TapeOp, Value

_PRODUCT, _COPY, _WEIGHTS = "aten.bmm.default", "aten.clone.default", "aten._softmax.default"
_CORE = frozenset((_PRODUCT, _WEIGHTS, "aten._scaled_dot_product_flash_attention.default"))


def forward_height(region: Region, *, names_outputs: bool = False) -> tuple[int, int]:
    """Bytes at its worst moment, its input and its output among them: while weights are read, and behind that."""
    program, of = region.program, region.buffers
    last: dict[int, int] = {}
    for op in program.ops:
        last.update(dict.fromkeys((*op.inputs, *op.outputs), op.index))
    for value, until in _held(region, names_outputs):
        buffer = of[value.storage]
        last[buffer] = max(last.get(buffer, until), until)
    ends: dict[int, list[int]] = {}
    for buffer, index in last.items():
        ends.setdefault(index, []).append(buffer)
    live = peak = sum(b.nbytes for b in program.buffers if b.producer is None and not b.free)
    reads = region.last_read
    before = 0
    for op in program.ops:
        if op.index == reads + 1 and reads >= 0:
            before, peak = peak, live
        live += sum(program.buffers[b].nbytes for b in op.outputs if program.buffers[b].producer == op.index)
        peak = max(peak, live)
        for b in ends.get(op.index, ()):
            if b not in program.outputs and program.buffers[b].producer is not None:
                live -= program.buffers[b].nbytes
    return (before, peak) if before else (peak, 0)


def _held(region: Region, names_outputs: bool) -> Iterator[tuple[Value, int]]:
    """Values and the step until which a frame has them. See NOTE [ What frames hold ]."""
    steps = region.tape.steps
    makers = {v.storage: i for i, step in enumerate(steps) for v in step.outputs}
    for scope, run in groupby(range(len(steps)), lambda i: steps[i].path.partition(".")[0]):
        block = list(run)
        if not scope or scope.endswith("norm"):
            continue
        inside = set(block)
        if names_outputs and scope == "attention":
            yield from ((v, len(steps) - 1) for v in steps[block[-1]].outputs)
        for i in block:
            yield from ((v, block[-1]) for v in steps[i].inputs if makers.get(v.storage, i) not in inside)
        yield from _of_attention(steps, [i for i in block if steps[i].name in _CORE], makers, block[-1])


def _of_attention(
    steps: list[TapeOp], core: list[int], makers: dict[int, int], end: int
) -> Iterator[tuple[Value, int]]:
    """Query, key and value; what they were spread from; and weights."""
    if not core:
        return
    within = set(core)
    returned = core[-1] + 1 if core[-1] < end and steps[core[-1] + 1].name == _COPY else core[-1]
    for i in core:
        if steps[i].name == _WEIGHTS:
            yield from ((v, end) for v in steps[i].outputs)
            continue
        for value in steps[i].inputs:
            made = makers.get(value.storage)
            if made is None or made in within:
                continue
            if steps[i].name == _PRODUCT and steps[made].name == _COPY:  # the product's own
                (value,) = steps[made].inputs
                made = makers.get(value.storage)
            if made is not None and steps[made].name == _COPY:  # spread over the heads that share it
                yield value, returned
                (value,) = steps[made].inputs
            yield value, end
