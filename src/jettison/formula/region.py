"""A region's program, saved tensors and parameters in closed form. Equal regions are computed once."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Final

from jettison.core.dtypes import tensor_bytes
from jettison.core.errors import UsageError
from jettison.formula.embedding import TOKENS, embedding, looked_up_tokens
from jettison.formula.layer import layer as write_layer
from jettison.formula.loss import head, score
from jettison.formula.norm import norm
from jettison.formula.ops import enter, linear
from jettison.formula.tape import GATHER, NAMES, Collective, Tape, Value, Weight, Writer
from jettison.ledger.ledger import Origin, Placement, SavedTensor
from jettison.ledger.program import Buffer, Op, Program, Slot, Source
from jettison.spec.fine_tuning import ALL, TARGETS, Tuning
from jettison.spec.kernels import Kernels
from jettison.spec.model import AnyLayer, BlockRecorder, Layer, ModelSpec, RecordedLayer
from jettison.spec.run import RegionSignature, Run

EMBEDDING, HEAD = "embedding", "head"
"""Names of the two regions that are not layers."""
_GATHERING = (f"c10d.{GATHER}", "aten.cat.default", NAMES)
HELD = "kept for recompute"
"""Role of tensors that no op saves and a recomputation starts from."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Region:
    """One region, from its tape. All bytes and FLOPs are one rank's.

    ``output`` is the residual stream, or the loss.
    """

    tape: Tape
    output: Value

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Parameters of the region."""
        return tuple(self.tape.weights)

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """Transfers of one forward and one backward."""
        return tuple(self.tape.collectives)

    @cached_property
    def flops(self) -> int:
        """FLOPs of one forward."""
        return sum(step.flops for step in self.tape.steps)

    @cached_property
    def last_read(self) -> int:
        """The last step that reads a weight, a gather of its output by the module included; -1: none does."""
        steps = self.tape.steps
        found = max((number for number, step in enumerate(steps) if step.weights), default=-1)
        within = found >= 0 and steps[found + 1 :] and steps[found + 1].name == f"c10d.{GATHER}"
        while within and found + 1 < len(steps) and steps[found + 1].name in _GATHERING:
            found += 1
        return found

    @cached_property
    def returned(self) -> frozenset[int]:
        """Buffer of the logits that a model returns with its loss; empty if it returns none."""
        return frozenset(self.buffers[value.storage] for value in self.tape.returned)

    @cached_property
    def buffers(self) -> dict[int, int]:
        """Buffer in the program of each storage."""
        owners = [v.index for v in self.tape.values if v.storage == v.index]
        return {storage: index for index, storage in enumerate(owners)}

    @cached_property
    def program(self) -> Program:
        """The region as ledgers, policies and planners read it. Every tensor of it may be kept."""
        tape, of = self.tape, self.buffers
        makers = {v.storage: i for i, step in enumerate(tape.steps) for v in step.outputs}
        buffers = []
        for storage, index in of.items():
            source, name, free = tape.sources.get(storage, (Source.OP, "", False))
            buffers.append(
                Buffer(
                    index=index,
                    nbytes=tape.sizes[storage],
                    source=source,
                    producer=makers.get(storage),
                    name=name,
                    keepable=not free,
                    free=free or (source is Source.RANDOM and not tape.sizes[storage]),
                )
            )
        ops = tuple(
            Op(
                index=i,
                name=step.name,
                inputs=tuple(of[v.storage] for v in step.inputs),
                outputs=tuple(of[v.storage] for v in step.outputs),
                flops=step.flops,
                bytes_moved=step.bytes_moved,
                path=step.path,
                anchor=step.anchor,
            )
            for i, step in enumerate(tape.steps)
        )
        slots = tuple(
            Slot(
                index=i,
                buffer=of[s.value.storage],
                shape=s.value.local_shape,
                dtype=s.value.dtype,
                op=step.name,
                path=step.path,
            )
            for i, (step, s) in enumerate((step, s) for step in tape.steps for s in step.saved)
        )
        return Program(buffers=tuple(buffers), ops=ops, slots=slots, outputs=(of[self.output.storage],))

    @cached_property
    def last_ops(self) -> dict[int, int]:
        """The last op that makes or reads each buffer of the program."""
        return {b: op.index for op in self.program.ops for b in (*op.inputs, *op.outputs)}

    @cached_property
    def saved_bytes(self) -> int:
        """Bytes that one rank holds between forward and backward without recomputation."""
        return self.program.kept_bytes(self.program.saved_buffers())

    def entries(self, layer: str, kept: frozenset[int] | None = None) -> Iterator[SavedTensor]:
        """Saved tensors, one entry a slot, storages named after the layer.

        Args:
            kept: buffers that stay under a policy; None: what autograd saves.
        """
        stays = self.program.saved_buffers() if kept is None else kept
        if stays not in self._unnamed:
            self._unnamed[stays] = tuple(self._entries(stays))
        return (entry.in_layer(layer) for entry in self._unnamed[stays])

    @cached_property
    def _unnamed(self) -> dict[frozenset[int], tuple[SavedTensor, ...]]:
        """Entries of no layer by the buffers that stay: many layers share a region."""
        return {}

    def _entries(self, stays: frozenset[int]) -> Iterator[SavedTensor]:
        program, of = self.program, self.buffers
        named: set[int] = set()
        for step in self.tape.steps:
            for s in step.saved:
                buffer = of[s.value.storage]
                named.add(buffer)
                if buffer in stays:
                    yield self._entry(s.value, step.path, step.name, s.role, s.reference)
        storages = list(of)
        for buffer in sorted(stays - named):
            value = self.tape.values[storages[buffer]]
            source = program.buffers[buffer].source
            role = program.buffers[buffer].name if source in (Source.INPUT, Source.RANDOM) else HELD
            yield self._entry(value, "", "", role, "")

    def _entry(self, value: Value, path: str, op: str, role: str, reference: str) -> SavedTensor:
        owner, storages = self.tape.values[value.storage], list(self.buffers)
        closure = self.program.closure(self.buffers[value.storage])
        return SavedTensor(
            layer="",
            path=path,
            op=op,
            role=role,
            shape=value.shape,
            dtype=value.dtype,
            storage=f"#{value.storage}",
            storage_bytes=tensor_bytes(owner.shape, owner.dtype),
            origin=Origin.FORMULA,
            placement=Placement(value.places),
            anchor=closure.anchor,
            reference=reference,
            recompute_flops=sum(self.program.ops[o].flops for o in closure.ops),
            recompute_bytes_moved=sum(self.program.ops[o].bytes_moved for o in closure.ops),
            inputs=tuple(f"#{storages[stop]}" for stop in closure.stops),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordedRegion(Region):
    """A block from a trace: its program is the recording's own, which the tape repeats op by op."""

    recording: Program

    @cached_property
    def program(self) -> Program:
        """The recorded program: with the tensors that the runtime sees, and the ops that must not be recomputed."""
        return self.recording


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedRegions:
    """A recorded model: the region around its blocks, and the region of each call of a block; equal calls share one."""

    before: Region
    blocks: tuple[Region, ...]
    after: Region


class RegionRecorder(BlockRecorder):
    """Records the regions of a signature."""

    @abstractmethod
    def regions(self, signature: RegionSignature) -> RecordedRegions:
        """Return all regions. Raise `UsageError` if the model cannot be recorded this way."""


def _recorded(signature: RegionSignature) -> RecordedRegions:
    recorder = signature.model.recorder
    assert isinstance(recorder, RegionRecorder), "a recorded layer without its recording"
    return recorder.regions(signature)


@lru_cache(maxsize=4096)
def layer_region(signature: RegionSignature, layer: AnyLayer) -> Region:
    """One transformer layer."""
    if isinstance(layer, RecordedLayer):
        return _recorded(signature).blocks[layer.call]
    if layer.source:
        pair = signature.model.pair
        signature = replace(signature, seq=signature.source_seq, model=signature.model if pair is None else pair.images)
    writer = Writer.of(signature)
    writer.repeats, writer.rules = layer.repeats, layer.gemm_recipes
    hidden = writer.hidden(detached=layer.detached, low_precision=layer.low_precision)
    output = mtp_layer(writer, hidden, layer) if layer.ahead else write_layer(writer, hidden, layer)
    return Region(output=output, tape=writer.tape)


@lru_cache(maxsize=1024)
def embedding_region(signature: RegionSignature) -> Region:
    """Ops before the layers."""
    if signature.model.recorder is not None:
        return _recorded(signature).before
    writer = Writer.of(signature)
    return Region(output=embedding(writer), tape=writer.tape)


@lru_cache(maxsize=1024)
def head_region(signature: RegionSignature) -> Region:
    """Ops after the layers."""
    if signature.model.recorder is not None:
        return _recorded(signature).after
    writer = Writer.of(signature)
    return Region(output=head(writer, writer.hidden(depths=1 + signature.model.mtp_num_layers)), tape=writer.tape)


@lru_cache(maxsize=64)
def score_region(signature: RegionSignature) -> Region:
    """Ops after the layers of a reward model."""
    writer = Writer.of(signature)
    return Region(output=score(writer, writer.hidden()), tape=writer.tape)


# multi-token prediction (MTP) -----------------------------------------------------------------------------------------
#
# NOTE [ Multi-token prediction ]
# MTP layers (arXiv 2412.19437 §2.2) as Megatron-Core builds them with `--mtp-num-layers`:
# ``megatron/core/transformer/multi_token_prediction.py``: on the last stage, after the final norm, each depth embeds
# the tokens shifted by one (with a copy of the embedding, ``gpt_model.py``, if another stage has it), norms them
# and the hidden states (``enorm``, ``hnorm``), joins and projects both (``eh_proj``, 2h to h, its columns over tp,
# all-gathered, and scattered along s again), runs one layer like the model's last one, and norms.
# ``MultiTokenPredictionBlock.forward`` joins the hidden states of all depths at its end; ``process_mtp_loss`` gives
# each to the model's own head and loss, MTP depths first, and ``MTPLossAutoScaler`` ties their losses to the hidden
# states that the head reads last. A checkpoint of such a layer begins after the final norm and the embedding
# (``_checkpointed_forward``).


JOINED: Final = "joined hidden states"


def mtp_layer(w: Writer, x: Value, spec: Layer) -> Value:
    """MTP layer: from the residual stream, or the depth before, to its hidden states; the last one returns all depths'.

    See NOTE [ Multi-token prediction ].
    """
    model = w.run.model
    if spec.ahead == 1 and model.final_norm is not None:
        x = norm(w, x, model.final_norm, "norm")
    with w.tape.scope("mtp"):
        tokens = looked_up_tokens(w, tied=True, declared=spec.ahead == 1)
    hidden = write_layer(w, _joined(w, tokens, x, spec), spec)
    hidden = norm(w, hidden, spec.norm, "mtp_norm")
    if spec.ahead < model.mtp_num_layers:
        return hidden
    rows = list(hidden.shape)
    rows[w.seq_dim] *= model.mtp_num_layers + 1
    parts = [hidden]
    if spec.ahead > 1:  # norms of earlier depths hold their hidden states
        rest = list(hidden.shape)
        rest[w.seq_dim] *= model.mtp_num_layers - 1
        parts.append(w.table(JOINED, tuple(rest), w.compute, w.outside()))
    parts.append(x)
    return w.tape.op("aten.cat.default", parts, tuple(rows), places=w.outside())


def _joined(w: Writer, tokens: Value, hidden: Value, spec: Layer) -> Value:
    """Norms of both, and their joint projection."""
    width = w.run.model.hidden
    tokens, hidden = norm(w, tokens, spec.norm, "enorm"), norm(w, hidden, spec.norm, "hnorm")
    both = w.tape.op("aten.cat.default", [tokens, hidden], w.shape(2 * width))
    whole, kept = enter(w, both)
    out = linear(w, whole, width, "eh_proj", bias=False, split="column", keeps=kept)
    if w.tp == 1:
        return out
    out = w.tape.collective("all_gather_into_tensor", "tp", out, w.inside(), backward=None)
    return w.tape.op("aten.clone.default", [out], places=w.outside()) if w.run.layout.sp else out


# Parameter counts: sums over regions, each weight once ----------------------------------------------------------------


def regions(model: ModelSpec, **tuned: Any) -> Iterator[tuple[Region, int]]:
    """The distinct regions of a model, and how often each occurs."""
    signature = Run(model=model, seq=model.shortest, source_seq=model.shortest_source, **tuned).signature
    yield embedding_region(signature), 1
    counts = Counter(model.layers)
    for kind in model.kinds:
        yield layer_region(signature, kind), counts[kind]
    yield head_region(signature), 1


def parameter_count(model: ModelSpec) -> int:
    """Parameters of the full model; a tied weight counts once."""
    return sum(n * sum(w.total for w in region.weights if not w.tied) for region, n in regions(model))


def trained_parameter_count(model: ModelSpec, tuning: Tuning, kernels: Kernels) -> int:
    """Parameters of the adapters."""
    found = regions(model, tuning=tuning, kernels=kernels, micro_batch=2)  # a pair, for losses that take pairs
    return sum(n * sum(w.total for w in region.weights if not w.frozen) for region, n in found)


def refuse_idle(model: ModelSpec, tuning: Tuning, kernels: Kernels) -> None:
    """Refuse adapters whose target modules a model does not have: nothing would be trained."""
    if ALL not in tuning.targets and not trained_parameter_count(model, tuning, kernels):
        raise UsageError(
            f"got --lora targets={'+'.join(sorted(tuning.targets))}; {model.name} has none of these modules, so that "
            f"nothing would be trained: expected {ALL}, or others of {', '.join(TARGETS)}"
        )


def active_parameter_count(model: ModelSpec) -> int:
    """Parameters that one token uses: of each layer's experts only the chosen ones."""
    signature = Run(model=model, seq=model.shortest, source_seq=model.shortest_source).signature
    idle = 0
    for kind, layers in Counter(model.layers).items():
        if (moe := kind.experts) is not None:
            experts = sum(w.total for w in layer_region(signature, kind).weights if w.expert)
            idle += layers * experts * (moe.experts - moe.top_k) // moe.experts
    return parameter_count(model) - idle


@lru_cache(maxsize=65536)
def cached_bytes(region: Region, kept: frozenset[int]) -> int:
    """Bytes of cast weights that a region does not keep, in autocast's cache until its context exits.

    ``aten/src/ATen/autocast_mode.cpp``, ``cached_cast``: of leaves that require gradients; ``clear_cache`` is called
    when the outermost context exits (``torch/amp/autocast_mode.py``, ``__exit__``), after the loss.
    """
    found = {
        region.buffers[step.outputs[0].storage]
        for step in region.tape.steps
        if step.casts is not None and not step.casts.frozen
    }
    return region.program.kept_bytes(frozenset(found - kept))


def tied_table(region: Region, each: int) -> tuple[int, int]:
    """Bytes of the gradient of a tied embedding, and of its region's other gradients, which come first."""
    learned = [w for w in region.weights if not w.frozen]
    tables = [w for w in learned if w.name == TOKENS] or learned
    table = max((w.numel for w in tables), default=0)
    return table * each, (sum(w.numel for w in learned) - table) * each


def held_over(embedding: Region) -> int:
    """Return the bytes that an embedding allocates for all layers, such as rotary tables."""
    steps = (step for step in embedding.tape.steps if step.name == "hold")
    return sum(embedding.tape.sizes[storage] for storage in {s.value.storage for step in steps for s in step.saved})
