"""A model that nobody has described, recorded: transformers builds it on fake tensors, and a trace fills the record.

One forward is traced for each batch, precision and attention that somebody asks about, and kept. What a trace cannot
know is refused where it is asked: how ranks would share a block, other kernels, another dropout. Recorded kernels are
those of the CPU: a fused attention keeps there what it keeps on a GPU, a dropout mask takes the dtype of what it masks
and not a byte.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from textwrap import shorten
from typing import Any, Final

import torch
from torch import Tensor, nn

from jettison.capture.blocks import find_blocks, only_blocks
from jettison.capture.fakes import fake_mode
from jettison.capture.model_trace import BlockCall, BlockClass, ModelTrace
from jettison.capture.recording import TensorRef
from jettison.capture.tracer import trace_model
from jettison.capture.trees import tree_leaves
from jettison.core.errors import JettisonError, UsageError
from jettison.families.left_out import not_built
from jettison.formula.region import RecordedRegion, RecordedRegions, Region, RegionRecorder
from jettison.formula.tape import Value, Weight
from jettison.ledger.program import Op, Program, Source
from jettison.models.batches import batch_for, longest_of, takes_tokens
from jettison.models.huggingface import ConfigRequest, build, class_for, config_of
from jettison.models.recorded_tape import TapeMaker, weight_of
from jettison.predict.run_fields import RunRequest
from jettison.predict.run_request import LONGEST_DEFAULT
from jettison.spec.model import ModelSpec, RecordedLayer
from jettison.spec.precision import Precision, precision
from jettison.spec.run import Scene

MOST_POSITIONS: Final = 2**31
"""The limit where positions have none."""
DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class RecordedConfig(RegionRecorder):
    """The blocks of a ``config.json``.

    Args:
        text: the configuration, as JSON with sorted keys.
        takes_tokens: its batch is of sequences, and not of images, whose size the configuration fixes.
        attention: as somebody asked for it; None: as transformers builds it.
    """

    kind: str
    text: str
    takes_tokens: bool = True
    attention: str | None = None

    @property
    def words(self) -> str:
        """Name what is recorded, for a message."""
        return f"the architecture {self.kind}"

    def regions(self, scene: Scene) -> RecordedRegions:
        """All regions of a scene; one trace for all scenes that it cannot tell apart."""
        return _recorded(self, self.case(scene.seq, scene.micro_batch, scene.precision))[0]

    def case(self, seq: int, micro_batch: int, precision: Precision) -> _Case:
        """Return the key of a region signature's trace.

        Raises:
            UsageError: a precision that no trace has.
        """
        if precision.product is not None:
            raise UsageError(
                f"got --precision {precision.name}; the blocks of {self.words} are recorded in 16 or 32 bits"
            )
        return _Case(
            seq=seq if self.takes_tokens else 0,
            micro_batch=micro_batch,
            parameter=precision.parameter,
            compute=precision.compute,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Case:
    """Key of a trace."""

    seq: int
    micro_batch: int
    parameter: str
    compute: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Facts:
    """Facts of the model from its trace."""

    firsts: tuple[int, ...]  # by call, the first that is like it
    classes: tuple[str, ...]  # by call, of its module
    hidden: int
    seq: int
    attends: frozenset[int]
    fused: frozenset[int]
    chained: bool
    left_out: tuple[str, ...]


@lru_cache(maxsize=64)
def _recorded(source: RecordedConfig, case: _Case) -> tuple[RecordedRegions, _Facts]:
    trace = _trace(source, case)
    regions = regions_of(trace)
    firsts: dict[int, int] = {}
    for index, region in enumerate(regions.blocks):
        firsts.setdefault(id(region), index)
    classes = tuple(type(trace.fake_model.get_submodule(call.name)).__name__ for call in trace.calls)
    stream = regions.before.output.shape
    facts = _Facts(
        firsts=tuple(firsts[id(region)] for region in regions.blocks),
        classes=classes,
        hidden=stream[-1],
        seq=stream[-2] if len(stream) > 2 else 1,
        attends=_calls_with(trace, "softmax", "attention"),
        fused=_calls_with(trace, "_attention"),
        chained=is_chain(trace),
        left_out=tuple(_idle(trace)),
    )
    return regions, facts


def _calls_with(trace: ModelTrace, *words: str) -> frozenset[int]:
    """Calls of blocks that run an op with one of these in its name."""
    found = {
        key for key, cls in trace.classes.items() for op in cls.trace.program.ops for word in words if word in op.name
    }
    return frozenset(index for index, call in enumerate(trace.calls) if call.class_key in found)


def _idle(trace: ModelTrace) -> list[str]:
    """Parts of the model with weights that no op of the forward reads."""
    model = trace.fake_model
    run = {id(p) for call in trace.calls for p in model.get_submodule(call.name).parameters()}
    read = {trace.root.names[b] for op in trace.root.program.ops for b in op.inputs if b in trace.root.names}
    run |= {id(p) for name, p in model.named_parameters(remove_duplicate=False) if name in read}
    idle: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        if id(parameter) not in run:
            part = _part(model, name, run)
            idle[part] = idle.get(part, 0) + parameter.numel()
    return [
        f"{part} ({count:,} parameters) does not take part in a batch of this kind: its weights, gradients and "
        "optimizer state are counted, what it would save and compute is not"
        for part, count in idle.items()
    ]


def _part(model: nn.Module, name: str, run: set[int]) -> str:
    """The outermost module of a parameter that has nothing in it that runs."""
    pieces = name.split(".")
    for length in range(1, len(pieces)):
        part = ".".join(pieces[:length])
        if not any(id(p) in run for p in model.get_submodule(part).parameters()):
            return part
    return name


def _trace(source: RecordedConfig, case: _Case) -> ModelTrace:
    config = config_of(json.loads(source.text), source.kind)
    asked = ConfigRequest(seq=case.seq or None, micro_batch=case.micro_batch, attention=source.attention)
    mode = fake_mode(allow_non_fake_inputs=True)
    model = build(config, asked, mode, dtype=DTYPES[case.parameter])
    batch = batch_for(model, config, asked)
    regions = None if find_blocks(model) else only_blocks(model)
    with torch.autocast("cpu", DTYPES[case.compute], enabled=case.compute != case.parameter):
        try:
            return trace_model(model, batch, mode=mode, regions=regions)
        except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:  # transformers' own code
            if isinstance(error, JettisonError):
                raise
            why = shorten(" ".join(str(error).split()), 200, placeholder=" ...")
            raise UsageError(
                f"{type(model).__name__} cannot be recorded: its forward fails ({type(error).__name__}: {why})"
            ) from error


def recorded_model(values: Mapping[str, Any], request: RunRequest, *, name: str) -> ModelSpec:
    """The model that a decoded ``config.json`` stands for, with blocks as a trace has them.

    Args:
        request: decides the batch of the first trace, so that the answer needs no second one.

    Raises:
        UsageError: transformers does not know it, cannot build it, or it cannot be recorded.
    """
    kind = str(values.get("model_type"))
    config = config_of(values, name)
    cls = class_for(config)
    tokens = takes_tokens(cls)
    if not tokens and request.seq is not None:
        raise UsageError(f"--seq does not apply to {name}: its configuration says how long its input is")
    source = RecordedConfig(
        kind=kind, text=json.dumps(dict(values), sort_keys=True), takes_tokens=tokens, attention=request.attention
    )
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    longest = longest_of(text) or MOST_POSITIONS
    case = source.case(
        min(longest, LONGEST_DEFAULT) if request.seq is None else request.seq,
        request.micro_batch or 1,
        precision(request.precision or "bf16"),
    )
    _, facts = _recorded(source, case)
    heads = _number(text, "num_attention_heads", "n_head", "num_heads", "n_heads", "decoder_attention_heads")
    width = heads * (_number(text, "head_dim", "d_kv") or facts.hidden // max(1, heads))
    causal = cls.__name__.endswith(("ForCausalLM", "LMHeadModel"))
    layers = tuple(
        RecordedLayer(
            recorder=source,
            call=first,
            kind=facts.classes[index],
            causal=causal,
            fused=index in facts.fused,
            chained=facts.chained,
            attended_width=width if index in facts.attends else 0,
        )
        for index, first in enumerate(facts.firsts)
    )
    return ModelSpec(
        name=name,
        family=kind,
        hidden=facts.hidden,
        vocab=_number(text, "vocab_size") or _number(config, "num_labels") or 1,
        layers=layers,
        final_norm=None,
        max_positions=longest if tokens else facts.seq,
        left_out=(
            f"{kind} is recorded by a trace of transformers' code on the CPU's kernels",
            *facts.left_out,
            *not_built(values, _inner(values)),
        ),
    )


def _inner(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a configuration."""
    found = values.get("text_config")
    return found if isinstance(found, Mapping) else values


def _number(config: Any, *names: str) -> int:
    """The first of these that is a whole number; 0: none."""
    for name in names:
        with contextlib.suppress(Exception):  # a key that differs from layer to layer may not be asked for
            found = getattr(config, name, None)
            if isinstance(found, int) and not isinstance(found, bool):
                return found
    return 0


# A traced model as the regions of a described one: what is around its blocks, and the blocks --------------------------
#
# NOTE [ Around the blocks ]
# What no block's result leads to stands before the blocks. What a result leads to, and leads to a block again (the norm
# after an encoder, a projection between two stacks), is counted there, too: it is held as long. The rest stands after
# them. A storage is paid for once: a tensor that several blocks are given by what stands before them, one that a block
# is given alone by that block.


def regions_of(trace: ModelTrace) -> RecordedRegions:
    """All regions of a trace.

    Raises:
        UsageError: a block could not be recorded, or there is none.
    """
    if not trace.calls:
        why = "; ".join(trace.warnings) or "nothing to lay out or to recompute"
        raise UsageError(f"{type(trace.fake_model).__name__} has no blocks that repeat: {why}")
    for cls in trace.classes.values():
        if cls.opaque:
            raise UsageError(f"blocks like {cls.example} cannot be recorded: {cls.problem}")
    made = _Regions(trace)
    return RecordedRegions(before=made.before(), blocks=tuple(made.blocks()), after=made.after())


def is_chain(trace: ModelTrace) -> bool:
    """Is the result of one block all that a gradient goes back through from the next?"""
    blocks = trace.root.blocks
    for index, call in enumerate(trace.calls[1:], 1):
        cls = trace.classes[call.class_key]
        leaves = tree_leaves((cls.args, cls.kwargs))
        given = [root for position, root in call.given.items() if _differentiable(leaves[position])]
        if any(blocks.get(root, (-1, 0))[0] != index - 1 for root in given):
            return False
    return True


@dataclass
class _Regions:
    trace: ModelTrace

    @property
    def program(self) -> Program:
        return self.trace.root.program

    def called(self, call: BlockCall) -> BlockClass:
        return self.trace.classes[call.class_key]

    # weights ----------------------------------------------------------------------------------------------------------

    @cached_property
    def owned(self) -> tuple[list[dict[str, Weight]], dict[str, Weight]]:
        """By call the parameters that it is the first to have, and those of no block, each by its name."""
        seen: set[int] = set()
        by_call = []
        for call in self.trace.calls:
            module = self.trace.fake_model.get_submodule(call.name)
            by_call.append({name: weight_of(name, p) for name, p in module.named_parameters() if id(p) not in seen})
            seen.update(id(p) for p in module.parameters())
        rest = {n: weight_of(n, p) for n, p in self.trace.fake_model.named_parameters() if id(p) not in seen}
        return by_call, rest

    # blocks -----------------------------------------------------------------------------------------------------------

    def blocks(self) -> Iterator[Region]:
        """By call; alike ones are one object."""
        known: dict[object, Region] = {}
        for call, weights, free in zip(self.trace.calls, self.owned[0], self.handed_on, strict=True):
            key = call.class_key, tuple(weights), free
            if key not in known:
                known[key] = self._block(call, weights, free)
            yield known[key]

    def _block(self, call: BlockCall, weights: dict[str, Weight], free: frozenset[int]) -> Region:
        cls = self.called(call)
        leaves = tree_leaves((cls.args, cls.kwargs))
        streams = {b for b, at in cls.trace.inputs.items() if _differentiable(leaves[at])}
        module = self.trace.fake_model.get_submodule(call.name)
        maker = TapeMaker(trace=cls.trace, module=module, weights=weights, streams=streams)
        buffers = tuple(replace(b, free=True) if b.index in free else b for b in cls.trace.program.buffers)
        output = maker.value(_output(cls))
        return RecordedRegion(tape=maker.tape, output=output, recording=replace(cls.trace.program, buffers=buffers))

    @cached_property
    def handed_on(self) -> list[frozenset[int]]:
        """By call, what it keeps of its results that another block keeps as its argument: that one pays."""
        found = []
        for index, call in enumerate(self.trace.calls):
            trace = self.called(call).trace
            saved = trace.program.saved_buffers()
            refs = [(leaf, ref) for leaf, ref in enumerate(trace.output_leaves) if isinstance(ref, TensorRef)]
            kept = {ref.buffer for leaf, ref in refs if ref.buffer in saved and (index, leaf) in self.kept_results}
            found.append(frozenset(kept))
        return found

    @cached_property
    def kept_results(self) -> set[tuple[int, int]]:
        """Results, by call and leaf, that another block keeps as an argument of its own."""
        return {self.trace.root.blocks[b] for b in self.kept_alone if b in self.trace.root.blocks}

    @cached_property
    def kept_alone(self) -> set[int]:
        """Buffers of the root that a block keeps as an argument that it alone is given."""
        return {root for root, free in self._kept_arguments() if not free}

    def _kept_arguments(self) -> Iterator[tuple[int, bool]]:
        """Buffers of the root that blocks keep, and whether a block counts them as others'."""
        for call in self.trace.calls:
            program = self.called(call).trace.program
            inputs = self.called(call).trace.inputs
            for b in program.needed_buffers():
                if b in inputs and inputs[b] in call.given:
                    yield call.given[inputs[b]], program.buffers[b].free

    # around them ------------------------------------------------------------------------------------------------------

    @cached_property
    def parts(self) -> tuple[list[Op], list[Op]]:
        """Ops before and after the blocks. See NOTE [ Around the blocks ]."""
        after: set[int] = {b.index for b in self.program.buffers if b.source is Source.BLOCK}
        late = []
        for op in self.program.ops:
            if after.intersection(op.inputs):
                after.update(op.outputs)
                late.append(op)
        wanted = {b for call in self.trace.calls for b in call.given.values()}
        between: set[int] = set()
        for op in reversed(late):
            if wanted.intersection(op.outputs):
                between.add(op.index)
                wanted.update(op.inputs)
        later = {op.index for op in late} - between
        ops = self.program.ops
        return [op for op in ops if op.index not in later], [op for op in ops if op.index in later]

    def _kept_of(self, ops: list[Op]) -> set[int]:
        """Buffers that autograd saved for these ops."""
        maker = self._maker(ops, {}, set())
        back = {value.storage: b for b, value in maker.values.items()}
        return {back[s.value.storage] for step in maker.tape.steps for s in step.saved}

    @cached_property
    def saved_before(self) -> set[int]:
        """Buffers that the part before the blocks saves for itself, or for several of them."""
        return self._kept_of(self.parts[0]) | self.held

    @cached_property
    def held(self) -> set[int]:
        """Buffers that several blocks keep, and that none of them counts."""
        shared = {root for root, free in self._kept_arguments() if free} - self.kept_alone
        return {b for b in shared if self._costs(b) and not self._kept_inside(b)}

    def _costs(self, b: int) -> bool:
        buffer = self.program.buffers[b]
        return not buffer.free and buffer.source is not Source.PARAMETER and b not in self.trace.root.names

    def _kept_inside(self, b: int) -> bool:
        """Does the block that made it keep it as well?"""
        if b not in self.trace.root.blocks:
            return False
        call, leaf = self.trace.root.blocks[b]
        trace = self.called(self.trace.calls[call]).trace
        ref = trace.output_leaves[leaf]
        saved = trace.program.saved_buffers() - self.handed_on[call]
        return isinstance(ref, TensorRef) and ref.buffer in saved

    def _maker(self, ops: list[Op], weights: dict[str, Weight], free: set[int]) -> TapeMaker:
        program, root = self.program, self.trace.root
        streams = {b.index for b in program.buffers if b.source is Source.BLOCK and b.index not in root.constants}
        return TapeMaker(
            trace=root, module=self.trace.fake_model, weights=weights, streams=streams, free=free, part=ops
        )

    def before(self) -> Region:
        """Region before the blocks; its result is the first block's stream."""
        ops, later = self.parts
        theirs = {name: w for name, w in self.owned[1].items() if name not in self._only_read_by(later)}
        inside = {b for b in self.trace.root.blocks if self._kept_inside(b)}
        maker = self._maker(ops, theirs, self.kept_alone | inside)
        for b in sorted(self.held):
            maker.hold(b, "shared input")
        return Region(tape=maker.tape, output=self._stream(maker))

    def _stream(self, maker: TapeMaker) -> Value:
        first = self.trace.calls[0]
        cls = self.called(first)
        leaves = tree_leaves((cls.args, cls.kwargs))
        places = [p for p in sorted(first.given) if isinstance(leaves[p], Tensor) and leaves[p].is_floating_point()]
        wanted = [p for p in places if leaves[p].requires_grad] or places
        if not wanted:
            raise UsageError(f"block {first.name} is given no stream of numbers")
        return maker.value(first.given[wanted[0]])

    def after(self) -> Region:
        """Region after the blocks, with the loss."""
        _, ops = self.parts
        only = self._only_read_by(ops)
        weights = {name: w for name, w in self.owned[1].items() if name in only}
        read = {self.trace.root.names[b] for op in ops for b in op.inputs if b in self.trace.root.names}
        weights |= {name: replace(w, tied=True) for name, w in self.owned[1].items() if name in read - only}
        inside = {b for b in self.trace.root.blocks if self._kept_inside(b)}
        maker = self._maker(ops, weights, self.saved_before | self.kept_alone | inside)
        for ref in dict.fromkeys(self.trace.outside):
            if self._costs(ref.buffer):
                maker.hold(ref.buffer, "kept by the loss")
        return Region(tape=maker.tape, output=self._loss(maker))

    def _only_read_by(self, ops: list[Op]) -> set[str]:
        """Names of parameters that no other op around the blocks reads."""
        names, chosen = self.trace.root.names, {op.index for op in ops}
        here = {names[b] for op in ops for b in op.inputs if b in names}
        elsewhere = {names[b] for op in self.program.ops if op.index not in chosen for b in op.inputs if b in names}
        return here - elsewhere

    def _loss(self, maker: TapeMaker) -> Value:
        """The first scalar of the output, or the last that was made."""
        leaves = [leaf for leaf in self.trace.root.output_leaves if isinstance(leaf, TensorRef) and not leaf.size]
        if leaves:
            return maker.value(leaves[0].buffer)
        made = [value for value in maker.values.values() if not value.shape and value.grad]
        return made[-1] if made else maker.tape.values[-1]


def _differentiable(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.requires_grad


def _output(cls: BlockClass) -> int:
    """The buffer of a block's stream: its first result that passes a gradient."""
    refs = [leaf for leaf in cls.trace.output_leaves if isinstance(leaf, TensorRef)]
    chosen = [ref for ref in refs if ref.buffer not in cls.trace.constants and ref.dtype.is_floating_point] or refs
    if not chosen:
        raise UsageError(f"block {cls.example} returns no tensor")
    return chosen[0].buffer
