"""Models without a closed form: transformers builds them on fake tensors, and a traced forward gives their programs.

One forward is traced for each batch, precision and attention, and cached. Options that a trace cannot answer are
refused: tensor parallelism inside a block, other kernels, another dropout. Recorded kernels are those of the CPU: fused
attention saves the same tensors as on a GPU; a dropout mask has the dtype of its input.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import prod
from textwrap import shorten
from typing import Any, Final

import torch
from torch import Tensor, nn

from jettison.capture.blocks import find_blocks, only_blocks
from jettison.capture.fake_copies import fake_mode
from jettison.capture.ledger_entries import Roles, base_name
from jettison.capture.model_trace import BlockCall, BlockClass, ModelTrace
from jettison.capture.pytrees import op_leaves, tree_leaves
from jettison.capture.recorder import RegionTrace, TensorRef
from jettison.capture.tracer import trace_model
from jettison.core.dtypes import DTYPE_BYTES, dtype_name
from jettison.core.errors import JettisonError, UsageError
from jettison.cost.kernel import BATCHED, FLASH
from jettison.families.config import TOWERS, not_built
from jettison.formula.region import RecordedRegion, RecordedRegions, Region, RegionRecorder, parameter_count
from jettison.formula.tape import Saved, Tape, TapeOp, Value, Weight
from jettison.ledger.program import Op, Program, Slot, Source
from jettison.models.huggingface import ConfigRequest, batch_for, build, class_for, config_of, longest_of, takes_tokens
from jettison.request.options import RunRequest
from jettison.request.resolve import LONGEST_DEFAULT
from jettison.spec.model import ModelSpec, RecordedLayer
from jettison.spec.precision import Precision, precision
from jettison.spec.run import RegionSignature

MOST_POSITIONS: Final = 2**31
"""Limit of models without a limit of positions."""
DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class RecordedConfig(RegionRecorder):
    """Recorder of the regions of a ``config.json``.

    Args:
        text: the configuration, as JSON with sorted keys.
        takes_tokens: its batch is of sequences, and not of images, whose size the configuration fixes.
        attention: requested implementation; None: transformers' default.
    """

    kind: str
    text: str
    takes_tokens: bool = True
    attention: str | None = None

    @property
    def words(self) -> str:
        """Name what is recorded, for a message."""
        return f"the architecture {self.kind}"

    def regions(self, signature: RegionSignature) -> RecordedRegions:
        """All regions of a signature. Signatures that do not differ for a trace share one."""
        return _recorded(self, self.case(signature.seq, signature.micro_batch, signature.precision))[0]

    def case(self, seq: int, micro_batch: int, precision: Precision) -> _Case:
        """Return the key of a region signature's trace. Raise `UsageError` for a precision that no trace has."""
        if precision.gemm_inputs is not None:
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
    seq: int
    micro_batch: int
    parameter: str
    compute: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Facts:
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
    found = {
        key for key, cls in trace.classes.items() for op in cls.trace.program.ops for word in words if word in op.name
    }
    return frozenset(index for index, call in enumerate(trace.calls) if call.class_key in found)


def _idle(trace: ModelTrace) -> list[str]:
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
    """Outermost module around a parameter of which no parameter is used."""
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
    """The model of a decoded ``config.json``, with blocks from a trace. The first trace uses the batch of ``request``,
    so that no second one is needed. Raise `UsageError` if transformers does not know the model or cannot build it, or
    if it cannot be recorded.
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
    found = values.get("text_config")
    return found if isinstance(found, Mapping) else values


def _number(config: Any, *names: str) -> int:
    """The first whole number of these; 0 if there is none."""
    for name in names:
        with contextlib.suppress(Exception):  # a key that differs from layer to layer may not be asked for
            found = getattr(config, name, None)
            if isinstance(found, int) and not isinstance(found, bool):
                return found
    return 0


# regions of a trace ---------------------------------------------------------------------------------------------------
#
# NOTE [ Around the blocks ]
# What no block's result leads to stands before the blocks. What a result leads to, and leads to a block again (the norm
# after an encoder, a projection between two stacks), is counted there, too: it is held as long. The rest stands after
# them. A storage is paid for once: a tensor that several blocks are given by what stands before them, one that a block
# is given alone by that block.


def regions_of(trace: ModelTrace) -> RecordedRegions:
    """All regions of a trace. Raise `UsageError` if a block could not be recorded, or there is none."""
    if not trace.calls:
        why = "; ".join(trace.warnings) or "nothing to lay out or to recompute"
        raise UsageError(f"{type(trace.fake_model).__name__} has no blocks that repeat: {why}")
    for cls in trace.classes.values():
        if cls.problem:
            raise UsageError(f"blocks like {cls.example} cannot be recorded: {cls.problem}")
    made = _TraceRegions(trace)
    return RecordedRegions(before=made.before(), blocks=tuple(made.blocks()), after=made.after())


def is_chain(trace: ModelTrace) -> bool:
    """Whether gradients flow back from the next block through the result of this one alone."""
    blocks = trace.root.blocks
    for index, call in enumerate(trace.calls[1:], 1):
        cls = trace.classes[call.class_key]
        leaves = tree_leaves((cls.args, cls.kwargs))
        given = [root for position, root in call.given.items() if _differentiable(leaves[position])]
        if any(blocks.get(root, (-1, 0))[0] != index - 1 for root in given):
            return False
    return True


@dataclass
class _TraceRegions:
    trace: ModelTrace

    @property
    def program(self) -> Program:
        return self.trace.root.program

    def called(self, call: BlockCall) -> BlockClass:
        return self.trace.classes[call.class_key]

    # weights ----------------------------------------------------------------------------------------------------------

    @cached_property
    def owned(self) -> tuple[list[dict[str, Weight]], dict[str, Weight]]:
        """Parameters by name: of each call those that no earlier call has, and those outside of blocks."""
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
        """Kept outputs of each call that are counted in another block, which saves them as its argument."""
        found, blocks = [], self.trace.root.blocks
        elsewhere = {blocks[b] for b in self.kept_alone if b in blocks}  # results by call and leaf
        for index, call in enumerate(self.trace.calls):
            trace = self.called(call).trace
            saved = trace.program.saved_buffers()
            refs = [(leaf, ref) for leaf, ref in enumerate(trace.output_leaves) if isinstance(ref, TensorRef)]
            kept = {ref.buffer for leaf, ref in refs if ref.buffer in saved and (index, leaf) in elsewhere}
            found.append(frozenset(kept))
        return found

    @cached_property
    def kept_alone(self) -> set[int]:
        """Buffers of the root that a block saves as an argument of its own, not shared with other blocks."""
        return {root for root, free in self._kept_arguments() if not free}

    def _kept_arguments(self) -> Iterator[tuple[int, bool]]:
        """Yield buffers of the root that blocks save, and whether they are counted outside of that block."""
        for call in self.trace.calls:
            program = self.called(call).trace.program
            inputs = self.called(call).trace.inputs
            for b in program.needed_buffers():
                if b in inputs and inputs[b] in call.given:
                    yield call.given[inputs[b]], program.buffers[b].free

    # around them ------------------------------------------------------------------------------------------------------

    @cached_property
    def parts(self) -> tuple[list[Op], list[Op]]:
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

    @cached_property
    def saved_before(self) -> set[int]:
        """Buffers that ops before the blocks save, or that several blocks save."""
        maker = self._maker(self.parts[0], {}, set())
        back = {value.storage: b for b, value in maker.values.items()}
        return {back[s.value.storage] for step in maker.tape.steps for s in step.saved} | self.held

    @cached_property
    def held(self) -> set[int]:
        """Buffers that several blocks save, and that no block counts."""
        shared = {root for root, free in self._kept_arguments() if free} - self.kept_alone
        return {b for b in shared if self._costs(b) and not self._kept_inside(b)}

    def _costs(self, b: int) -> bool:
        buffer = self.program.buffers[b]
        return not buffer.free and buffer.source is not Source.PARAMETER and b not in self.trace.root.names

    def _kept_inside(self, b: int) -> bool:
        """Whether the block that computed a buffer also saves it."""
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
        ops, later = self.parts
        theirs = {name: w for name, w in self.owned[1].items() if name not in self._only_read_by(later)}
        inside = {b for b in self.trace.root.blocks if self._kept_inside(b)}
        maker = self._maker(ops, theirs, self.kept_alone | inside)
        for b in sorted(self.held):
            maker.tape.hold(maker.value(b), "shared input")
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
        _, ops = self.parts
        only = self._only_read_by(ops)
        weights = {name: w for name, w in self.owned[1].items() if name in only}
        read = {self.trace.root.names[b] for op in ops for b in op.inputs if b in self.trace.root.names}
        weights |= {name: replace(w, tied=True) for name, w in self.owned[1].items() if name in read - only}
        inside = {b for b in self.trace.root.blocks if self._kept_inside(b)}
        maker = self._maker(ops, weights, self.saved_before | self.kept_alone | inside)
        for ref in dict.fromkeys(self.trace.outside):
            if self._costs(ref.buffer):
                maker.tape.hold(maker.value(ref.buffer), "kept by the loss")
        return Region(tape=maker.tape, output=self._loss(maker))

    def _only_read_by(self, ops: list[Op]) -> set[str]:
        names, chosen = self.trace.root.names, {op.index for op in ops}
        here = {names[b] for op in ops for b in op.inputs if b in names}
        elsewhere = {names[b] for op in self.program.ops if op.index not in chosen for b in op.inputs if b in names}
        return here - elsewhere

    def _loss(self, maker: TapeMaker) -> Value:
        """The loss: the first scalar of the output, else the last computed scalar with a gradient."""
        leaves = [leaf for leaf in self.trace.root.output_leaves if isinstance(leaf, TensorRef) and not leaf.size]
        if leaves:
            return maker.value(leaves[0].buffer)
        made = [value for value in maker.values.values() if not value.shape and value.grad]
        return made[-1] if made else maker.tape.values[-1]


def _differentiable(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.requires_grad


def _output(cls: BlockClass) -> int:
    refs = [leaf for leaf in cls.trace.output_leaves if isinstance(leaf, TensorRef)]
    chosen = [ref for ref in refs if ref.buffer not in cls.trace.constants and ref.dtype.is_floating_point] or refs
    if not chosen:
        raise UsageError(f"block {cls.example} returns no tensor")
    return chosen[0].buffer


# a recorded program as a tape -----------------------------------------------------------------------------------------
#
# Ops keep their numbers, so that what is decided on the program can be timed on the tape. Which op keeps a saved tensor
# is told by when autograd saved it: results after their op ran, arguments before.


_PASSES: Final = frozenset({"add", "add_", "sub", "clone", "alias"})
"""The gradient of an input is the output's."""
_ATTENTION: Final = ("_scaled_dot_product", "_flash_attention", "_efficient_attention")
_CONSTANT: Final = ("detach", "argmax", "zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_empty")
"""No gradient goes back through these."""
_FACTORS: Final = frozenset({"mul", "mul_", "div", "div_"})
_SUMMAND_FIRST: Final = ("addmm", "baddbmm", "addmv")
_SHARED: Final = "shared input"


@dataclass(kw_only=True)
class TapeMaker:
    """Writer of a recording's ops, in order, to a `Tape`.

    Args:
        module: the recorded one.
        weights: counted here, by the module's names of parameters; other parameters are counted elsewhere.
        free: buffers that are counted elsewhere.
        streams: inputs through which backward passes a gradient.
        part: ops to write, if not all. With all ops, buffers keep their numbers.
    """

    trace: RegionTrace
    module: nn.Module
    weights: Mapping[str, Weight]
    streams: Collection[int]
    free: Collection[int] = ()
    part: Sequence[Op] | None = None
    tape: Tape = field(default_factory=lambda: Tape(mesh={}))
    values: dict[int, Value] = field(default_factory=dict)
    seen: dict[TensorRef, Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        program = self.trace.program
        self.roles = Roles(trace=self.trace, module=self.module)
        self.parameters = dict(self.module.named_parameters(remove_duplicate=False))
        self.views = self._views()
        self.tape.weights.extend(self.weights.values())
        ops = program.ops if self.part is None else self.part
        self.made = {b for op in ops for b in op.outputs}
        if self.part is None:
            for b in range(len(program.buffers)):
                self.value(b, grad=self._reached[b])
        kept: dict[int, list[int]] = {}
        for slot, after in zip(program.slots, self.trace.saved_after, strict=True):
            kept.setdefault(self._keeper(slot, after), []).append(slot.index)
        for op in ops:
            self._write(op, kept.get(op.index, ()))

    def _write(self, op: Op, kept: Sequence[int]) -> None:
        found = [(ref, self._weight(ref.buffer)) for ref in self._read(op)]
        weights = {w.name: w for _, w in found if w is not None}
        inputs = tuple(self._seen(ref) for ref, weight in found if weight is None)
        outputs = tuple(self.value(b, grad=self._reached[b]) for b in op.outputs)
        self.tape.steps.append(
            TapeOp(
                _name(op),
                op.path,
                inputs,
                outputs,
                tuple(self._saved(slot) for slot in kept),
                tuple(sorted(weights.values(), key=lambda w: -len(w.shape))),
                op.flops,
                op.bytes_moved,
                base_name(op) in _PASSES,
                op.anchor,
                None,
                _spread(op, inputs, outputs, tuple(weights.values())),
            )
        )

    def _read(self, op: Op) -> list[TensorRef]:
        call = self.trace.calls[op.index]
        refs = [leaf for leaf in op_leaves(call.args, call.kwargs) if isinstance(leaf, TensorRef)]
        return [*refs[1:], refs[0]] if base_name(op) in _SUMMAND_FIRST else refs

    # values -----------------------------------------------------------------------------------------------------------

    def value(self, b: int, *, grad: bool = False) -> Value:
        """Value of a full buffer; ``grad`` counts at the first request only."""
        if b in self.values:
            return self.values[b]
        buffer = self.trace.program.buffers[b]
        shape, dtype = self._form(b)
        index = len(self.tape.values)
        made = Value(index, shape, dtype, (), index, grad or b in self.streams, shape, buffer.nbytes)
        self.values[b] = made
        self.tape.values.append(made)
        self.tape.sizes.append(buffer.nbytes)
        if b not in self.made or buffer.source is not Source.OP:
            source = Source.INPUT if buffer.source in (Source.OP, Source.BLOCK) else buffer.source
            name = self.trace.names.get(b, buffer.name)
            self.tape.sources[index] = (source, name, b in self.free or buffer.free)
        return made

    def _seen(self, ref: TensorRef) -> Value:
        whole, dtype = self.value(ref.buffer), dtype_name(ref.dtype)
        if (whole.shape, whole.dtype) == (ref.size, dtype):
            return whole
        if ref not in self.seen:
            at, nbytes = len(self.tape.values), prod(ref.size) * DTYPE_BYTES[dtype]
            view = replace(whole, index=at, shape=ref.size, local_shape=ref.size, dtype=dtype, nbytes=nbytes)
            self.seen[ref] = view
            self.tape.values.append(view)
            self.tape.sizes.append(0)
        return self.seen[ref]

    @cached_property
    def _reached(self) -> list[bool]:
        program = self.trace.program
        found = [b.index in self.streams or self._weight(b.index) is not None for b in program.buffers]
        for op in program.ops:
            if any(found[b] for b in op.inputs) and not base_name(op).startswith(_CONSTANT):
                for b in op.outputs:
                    found[b] = self._form(b)[1].startswith(("float", "bfloat", "complex"))
        return found

    def _form(self, b: int) -> tuple[tuple[int, ...], str]:
        """Shape and dtype with as many bytes as the buffer."""
        nbytes, view = self.trace.program.buffers[b].nbytes, self.views.get(b)
        if view is None:
            return (nbytes,), "uint8"
        dtype = dtype_name(view.dtype)
        if prod(view.size) * DTYPE_BYTES[dtype] == nbytes:
            return view.size, dtype
        return ((nbytes // DTYPE_BYTES[dtype],), dtype) if nbytes % DTYPE_BYTES[dtype] == 0 else ((nbytes,), "uint8")

    def _views(self) -> dict[int, TensorRef]:
        """View of each buffer: its op's output, else an argument, else a saved tensor."""
        found: dict[int, TensorRef] = {}
        made = [ref for call in self.trace.calls for ref in call.outputs if ref is not None]
        for ref in (*made, *self.trace.given.values(), *self.trace.slots):
            found.setdefault(ref.buffer, ref)
        return found

    def _weight(self, b: int) -> Weight | None:
        """The parameter in a buffer, whether it is counted here or elsewhere; None for other buffers."""
        name = self.trace.names.get(b)
        tensor = None if name is None else self.parameters.get(name)
        if name is None or tensor is None or self.trace.program.buffers[b].source is not Source.PARAMETER:
            return None
        return self.weights.get(name) or weight_of(name, tensor, tied=True)

    # what is kept -----------------------------------------------------------------------------------------------------

    def _keeper(self, slot: Slot, after: int) -> int:
        program = self.trace.program
        producer = program.buffers[slot.buffer].producer
        if producer is not None and producer == after - 1 and self.roles.saver(slot) == program.ops[producer].name:
            return producer
        later = (op.index for op in program.ops[after:] if slot.buffer in op.inputs)
        return next(later, max(0, min(after, len(program.ops)) - 1))

    def _saved(self, index: int) -> Saved:
        slot, ref = self.trace.program.slots[index], self.trace.slots[index]
        seen = self._seen(ref)
        source, _, free = self.tape.sources.get(seen.storage, (None, "", False))
        role = _SHARED if free and source is Source.INPUT else self.roles.role(slot, ref)
        return Saved(seen, role)


def _name(op: Op) -> str:
    """Name of an op in the cost model: fused attention is one op on every device."""
    name = base_name(op)
    return FLASH if name.startswith(_ATTENTION) else BATCHED if name == "baddbmm" else op.name


def _spread(op: Op, inputs: Sequence[Value], outputs: Sequence[Value], weights: Sequence[Weight]) -> int:
    """Transient bytes of a broadcast factor's gradient, which has the product's shape before it is summed."""
    if base_name(op) not in _FACTORS or not outputs:
        return 0
    size = prod(outputs[0].shape)
    smaller = any(v.grad and prod(v.shape) < size for v in inputs) or any(w.numel < size for w in weights)
    return outputs[0].nbytes if smaller else 0


def weight_of(name: str, tensor: Tensor, *, tied: bool = False) -> Weight:
    nbytes, numel = tensor.numel() * tensor.element_size(), tensor.numel()
    return Weight(name=name, shape=tuple(tensor.shape), places=(), nbytes=nbytes, numel=numel, tied=tied)


# towers of a text model in closed form ----------------------------------------------------------------------------
#
# A batch of text does not run a tower of images or sound. Its weights, gradients and optimizer state are counted;
# what it would save and compute is not.


def with_towers(model: ModelSpec, values: Mapping[str, Any]) -> ModelSpec | None:
    """Return the model of a decoded ``config.json`` with the weights of its towers; None if they cannot be
    distinguished from the text model. Raise `UsageError` if transformers cannot make it.
    """
    whole = build(config_of(values, model.name), ConfigRequest(), fake_mode(allow_non_fake_inputs=True))
    text = {id(p) for part in _text_of(whole) for p in part.parameters()}
    unused = tuple((name, tuple(p.shape)) for name, p in whole.named_parameters() if id(p) not in text)
    count = sum(p.numel() for p in whole.parameters() if id(p) not in text)
    if not unused or parameter_count(model) + count != sum(p.numel() for p in whole.parameters()):
        return None
    parts = sorted({name.rsplit(".", name.count(".") - 1)[0] if name.count(".") > 1 else name for name, _ in unused})
    said = (
        f"{' and '.join(filter(None, (', '.join(parts[:-1]), parts[-1])))} ({count:,} parameters) are counted with the "
        "embedding: weights, gradients and optimizer state. A batch of text does not run them: what they save and "
        "compute for images or sound is not in the figures"
    )
    left = tuple(words for words in model.left_out if not any(f"the {tower} tower" in words for tower in TOWERS))
    return replace(model, unused_weights=unused, left_out=(said, *left))


def _text_of(whole: nn.Module) -> list[nn.Module]:
    found = []
    for name in ("get_decoder", "get_input_embeddings", "get_output_embeddings"):
        part = getattr(whole, name, lambda: None)()
        if isinstance(part, nn.Module) and part is not whole:
            found.append(part)
    return found
