"""Symbolic tape of a forward: values without data, the ops between them, and the tensors that autograd saves.

NOTE [ One walk, every figure ]
A layer is described once, as the ops of its forward. Each op states what it saves for its backward. Parameters,
saved tensors, FLOPs, bytes moved, collectives and the transients of both passes are all derived from that one walk, so
that they cannot disagree. Ops have PyTorch's names, so that decisions on a recorded program apply here, too.

Shapes are logical, of the unsharded tensor; a placement says which mesh axis shards which dim, and the local shape
follows from it and from the mesh. A view shares the storage of its base.

NOTE [ Rows of all ranks ]
An all-gather returns the ranks' parts one after the other. If they are joined along a dim that is not the outermost
(b × s × h), a copy puts them in order: ``torch/distributed/_functional_collectives.py``, ``all_gather_tensor``
(``torch.cat(torch.chunk(...), dim=gather_dim)``); before a scatter it is the other way round
(``reduce_scatter_tensor``), and the input is referenced until it is over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from typing import TypedDict, Unpack

from jettison.core.dtypes import DTYPE_BYTES
from jettison.ledger.program import Anchor, Source
from jettison.spec.fine_tuning import Base, Upcast
from jettison.spec.fp8 import BF16_GEMMS, Fp8Recipe, Rule, rule_for
from jettison.spec.kernels import Device, Kernels
from jettison.spec.run import RegionSignature

GATHER, SCATTER = "all_gather_into_tensor", "reduce_scatter_tensor"
NAMES = "names"
"""Name of a step that reads values and computes nothing: `Tape.name`."""
Places = tuple[tuple[str, int], ...]
"""Mesh axis and the dim that it shards, sorted; axes not in it do not shard the tensor."""


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """A tensor of the forward. ``storage``: index of its memory's owner; ``piece``: of what was split off it, or -1."""

    index: int
    shape: tuple[int, ...]
    dtype: str
    places: Places
    storage: int
    grad: bool  # requires a gradient
    local_shape: tuple[int, ...]
    nbytes: int  # of this view on one rank
    piece: int = -1


@dataclass(frozen=True, slots=True)
class Saved:
    """A value that an op saves for its backward, and its role in the ledger."""

    value: Value
    role: str
    reference: str = ""


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter: its logical shape and its placement.

    ``expert``: ZeRO shards it over the ranks of one expert only. ``tied``: another region's weight, read again.
    ``gemm``: a matrix whose gradient can be accumulated by the matmul that makes it. ``head``: the LM head's matrix;
    autograd still receives a gradient of its size: ``torch.empty`` in Megatron-LM's
    ``megatron/core/tensor_parallel/layers.py``, or TransformerEngine's, which is kept. ``frozen``: it has no gradient.
    ``dtype``: of the weight, its gradient and its state, if not the precision's.
    ``packed_bytes``: bytes on one rank if it is quantized (0: it is not); ``scale_bytes``: the part of them that is
    stored separately and that ZeRO does not shard.
    ``quantized_bytes``: persistent FP8/FP4 copies on one rank.
    ``adapter``: belongs to an adapter, whose matmuls have the activations' dtype. ``recipe``: its matmul's FP8 recipe,
    if not the run's. ``gradient_ways``: size of its gradient, as a multiple of its shard.
    """

    name: str
    shape: tuple[int, ...]
    places: Places
    nbytes: int  # on one rank, in the dtype of the forward
    numel: int  # on one rank
    expert: bool = False
    tied: bool = False
    gemm: bool = False
    head: bool = False
    frozen: bool = False
    packed_bytes: int = 0
    scale_bytes: int = 0
    dtype: str = ""
    quantized_bytes: int = 0
    adapter: bool = False
    recipe: Fp8Recipe | None = None
    gradient_ways: int = 1

    @property
    def gradient_numel(self) -> int:
        """Elements of its gradient on one rank, including parts that are not used."""
        return self.numel * self.gradient_ways

    @property
    def held_bytes(self) -> int:
        """Bytes of a frozen weight on one rank."""
        return self.packed_bytes or self.nbytes

    def gradient_bytes(self, each: int) -> int:
        """Bytes of its gradient on one rank, ``each`` an element for weights of the precision's dtype."""
        return self.numel * self.gradient_ways * (DTYPE_BYTES[self.dtype] if self.dtype else each)

    @property
    def total(self) -> int:
        """Elements of the unsharded parameter."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Collective:
    """A transfer between the ranks of one axis. ``nbytes`` counts the unsharded tensor, all-gathered or reduced.

    ``step``: number of forward steps before it; for a collective of the backward, before its forward counterpart.
    ``copies``: rows for each token, one for each expert that it is sent to.
    """

    kind: str  # all-gather, reduce-scatter, all-reduce, all-to-all
    axis: str
    nbytes: int
    backward: bool
    step: int
    copies: int = 1


@dataclass(frozen=True, slots=True)
class TapeOp:
    """One op. ``passes``: the gradient of an input is the output's, or a view of it; otherwise it is a new tensor.

    ``casts``: the weight that it casts; the gradient of its result is that weight's. ``copied``: cast copies of its
    weights are among its inputs and take their gradients. ``differentiable``: backward runs it.
    """

    name: str
    path: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    saved: tuple[Saved, ...]
    weights: tuple[Weight, ...] = ()
    flops: int = 0
    bytes_moved: int = 0
    passes: bool = False
    anchor: Anchor | None = None
    gradients: tuple[int, ...] | None = None  # bytes of each input's gradient, if they differ from the input's
    workspace: int = 0  # bytes that live only during its backward
    in_place: bool = False  # its backward writes the input's gradient over a saved tensor
    rounds: int = 1  # iterations of a loop, one kernel each
    casts: Weight | None = None
    copied: bool = False
    differentiable: bool = field(init=False, compare=False)  # cached: read far more often than ops are made

    def __post_init__(self) -> None:
        object.__setattr__(self, "differentiable", any(v.grad for v in self.outputs))

    @property
    def learned(self) -> tuple[Weight, ...]:
        """Trained weights that it reads."""
        return tuple(w for w in self.weights if not w.frozen)

    @property
    def makes(self) -> tuple[Weight, ...]:
        """Weights whose gradients its backward makes."""
        if self.casts is not None:
            return () if self.casts.frozen else (self.casts,)
        return () if self.copied else self.learned


class OpTraits(TypedDict, total=False):
    """Optional fields of a `TapeOp`."""

    passes: bool
    anchor: Anchor | None
    gradients: tuple[int, ...] | None
    workspace: int
    in_place: bool
    rounds: int
    casts: Weight | None


@dataclass(slots=True, kw_only=True)
class Tape:
    """The tape so far. Make values with `source` and `op`; read `steps`, `weights` and `collectives`."""

    mesh: Mapping[str, int]
    steps: list[TapeOp] = field(default_factory=list)
    weights: list[Weight] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    sources: dict[int, tuple[Source, str, bool]] = field(default_factory=dict)  # storage -> kind, name, free
    sizes: list[int] = field(default_factory=list)  # bytes on one rank of the storage that a value owns, else 0
    values: list[Value] = field(default_factory=list)
    returned: list[Value] = field(default_factory=list)  # values that the model returns in addition to the loss
    _scope: list[str] = field(default_factory=list)
    _cast: set[int] = field(default_factory=set)  # values that are cast copies of weights

    # values -----------------------------------------------------------------------------------------------------------

    def source(
        self,
        name: str,
        shape: Sequence[int],
        dtype: str,
        places: Places = (),
        *,
        grad: bool = False,
        kind: Source = Source.INPUT,
        free: bool = False,
    ) -> Value:
        """Add an input of the region. ``free``: its bytes are counted elsewhere."""
        value = self._new(tuple(shape), dtype, places, None, grad)
        self.sources[value.storage] = (kind, name, free)
        return value

    def view(self, value: Value, shape: Sequence[int], places: Places | None = None) -> Value:
        """Return the same memory with another shape."""
        return self._new(tuple(shape), value.dtype, value.places if places is None else places, value, value.grad)

    def split(self, value: Value, widths: Sequence[int]) -> list[Value]:
        """Split along the last dim into pieces with gradients of their own.

        ``torch.split``, ``chunk``, ``unbind``: their backward is one ``cat``, whereas each slice's gradient is as large
        as the full tensor (``torch/csrc/autograd/FunctionsManual.cpp``, ``split_with_sizes_backward``).
        """
        views = [self.view(value, (*value.shape[:-1], width)) for width in widths]
        pieces = [replace(each, piece=each.index) for each in views]
        for each in pieces:
            self.values[each.index] = each
        return pieces

    # ops --------------------------------------------------------------------------------------------------------------

    def op(
        self,
        name: str,
        inputs: Sequence[Value],
        shape: Sequence[int] | None = None,
        dtype: str | None = None,
        places: Places | None = None,
        *,
        saves: Iterable[Saved] = (),
        keeps: str = "",
        reference: str = "",
        weights: Sequence[Weight] = (),
        contracted: int = 0,
        flops: int = 0,
        grad: bool | None = None,
        **traits: Unpack[OpTraits],
    ) -> Value:
        """Record an op with one result, by default of the first input's shape, dtype and placement.

        Args:
            keeps: role of the result, if the op saves it as well; ``reference``: where it is published.
            contracted: local elements that a matmul sums over; its FLOPs count a multiply-add as two.
        """
        like = inputs[0]
        carries = any(v.grad for v in inputs) or any(not each.frozen for each in weights)
        out = self._new(
            like.shape if shape is None else tuple(shape),
            like.dtype if dtype is None else dtype,
            like.places if places is None else places,
            None,
            carries if grad is None else grad,
        )
        flops += 2 * prod(out.local_shape) * contracted
        kept = (*saves, Saved(out, keeps, reference)) if keeps else saves
        self.record(name, inputs, (out,), saves=kept, weights=weights, flops=flops, **traits)
        return out

    def record(
        self,
        name: str,
        inputs: Sequence[Value],
        outputs: Sequence[Value],
        *,
        saves: Iterable[Saved] = (),
        weights: Sequence[Weight] = (),
        flops: int = 0,
        **traits: Unpack[OpTraits],
    ) -> None:
        """Record an op whose results exist already (`empty`). It saves nothing if nothing is differentiated."""
        copied = bool(self._cast) and any(v.index in self._cast for v in inputs)
        moved = sum(v.nbytes for v in (*inputs, *outputs)) + (0 if copied else sum(w.nbytes for w in weights))
        if "casts" in traits and traits["casts"] is not None:
            self._cast.update(v.index for v in outputs)
        self.steps.append(
            TapeOp(
                name,
                ".".join(self._scope),
                tuple(inputs),
                tuple(outputs),
                saved=tuple(saves) if any(v.grad for v in outputs) else (),
                weights=tuple(weights),
                flops=flops,
                bytes_moved=moved,
                copied=copied,
                **traits,
            )
        )

    def hold(self, value: Value, role: str, reference: str = "") -> None:
        """Keep a value through backward for other regions, whose ledgers do not count it."""
        self.steps.append(TapeOp("hold", self.path, (value,), (), (Saved(value, role, reference),)))

    def name(self, *values: Value) -> None:
        """Keep Python references to values up to here, whatever reads them last."""
        self.steps.append(TapeOp(NAMES, self.path, values, (), ()))

    def empty(self, shape: Sequence[int], dtype: str, places: Places = (), *, grad: bool = False) -> Value:
        """Return a value that the next recorded op makes."""
        return self._new(tuple(shape), dtype, places, None, grad)

    def collective(
        self, kind: str, axis: str, value: Value, places: Places, *, backward: str | None, copies: int = 1
    ) -> Value:
        """Redistribute a value over an axis; ``backward`` is the collective of its gradient. No-op on an axis of 1."""
        if self.mesh.get(axis, 1) == 1:
            return value
        step = len(self.steps)
        result = self._moved(kind, axis, value, places)
        larger = max(value.nbytes, result.nbytes)
        self.collectives.append(Collective(kind, axis, larger, backward=False, step=step, copies=copies))
        if backward is not None and value.grad:
            self.collectives.append(Collective(backward, axis, larger, backward=True, step=step, copies=copies))
        return result

    @property
    def path(self) -> str:
        """Path of the current scope."""
        return ".".join(self._scope)

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Put paths inside below ``name``."""
        self._scope.append(name)
        yield
        self._scope.pop()

    def _moved(self, kind: str, axis: str, value: Value, places: Places) -> Value:
        """Move between placements: NOTE [ Rows of all ranks ]."""
        name, larger = f"c10d.{kind}", places if kind == GATHER else value.places
        dim = next((dim for each, dim in {*value.places} ^ {*places} if each == axis), 0)
        outer = prod(self.local_shape(value.shape, larger)[:dim])
        if kind not in (GATHER, SCATTER) or outer == 1:
            return self.op(name, [value], places=places)
        if kind == GATHER:
            stacked = self.op(name, [value], places=places, workspace=value.nbytes * self.mesh[axis])
            whole = self.op("aten.cat.default", [stacked])
            self.name(value)
            return whole
        stacked = self.op("aten.cat.default", [value], workspace=value.nbytes // self.mesh[axis])
        result = self.op(name, [stacked], places=places)
        self.name(value)
        return result

    # ------------------------------------------------------------------------------------------------------------------

    def local_shape(self, shape: tuple[int, ...], places: Places) -> tuple[int, ...]:
        """Shape on one rank: a size that an axis does not divide is rounded up."""
        if not places:
            return shape
        local = list(shape)
        for axis, dim in places:
            local[dim] = -(-local[dim] // self.mesh.get(axis, 1))
        return tuple(local)

    def _new(self, shape: tuple[int, ...], dtype: str, places: Places, base: Value | None, grad: bool) -> Value:
        index = len(self.values)
        local = self.local_shape(shape, places)
        nbytes = prod(local) * DTYPE_BYTES[dtype]
        storage = index if base is None else base.storage
        value = Value(index, shape, dtype, places, storage, grad, local, nbytes, -1 if base is None else base.piece)
        self.values.append(value)
        self.sizes.append(nbytes if base is None else 0)
        return value


# The context that every op family needs: the tape, the run, and placements of activations -----------------------------


RANDOM_STATE_BYTES = {Device.CPU: 5056, Device.CUDA: 0}
"""Bytes of the default generator's state. A CUDA generator's 16 bytes are a CPU tensor."""


@dataclass(slots=True, kw_only=True)
class Writer:
    """Writes one region (the embedding, a layer, the head) of a run to a tape."""

    run: RegionSignature
    tape: Tape
    quantised: dict[int, Value] = field(default_factory=dict)
    spread: dict[str, Value] = field(default_factory=dict)
    copies: dict[str, Value] = field(default_factory=dict)
    repeats: bool = False
    """Whether all parameters belong to another region."""
    rules: tuple[Rule, ...] = ()
    """FP8 recipes of layers that differ from the run's."""
    _random: Value | None = None

    @classmethod
    def of(cls, run: RegionSignature) -> Writer:
        """Return a writer of an empty region."""
        return cls(run=run, tape=Tape(mesh=run.layout.mesh_sizes))

    # options of the run ---------------------------------------------------------------------------------------------

    @property
    def kernels(self) -> Kernels:
        """Fused kernels of the run."""
        return self.run.kernels

    @property
    def compute(self) -> str:
        """Dtype of activations."""
        return self.run.precision.compute

    @property
    def matmul_dtype(self) -> str:
        """Dtype of matmuls: under autocast not that of other ops. See NOTE [ Autocast ]."""
        return self.run.precision.casts or self.compute

    @property
    def stream(self) -> str:
        """Dtype of the residual stream. Convolutions of sound output the matmuls' dtype under autocast, unless a norm,
        which is on autocast's fp32 list (`listed`), comes before the first layer.
        """
        model = self.run.model
        if model.audio is not None and self.run.precision.casts and not (self.listed and model.embedding_norm):
            return self.matmul_dtype
        return "float32" if model.fp32_residual else self.compute

    @property
    def listed(self) -> bool:
        """Whether norms, softmax and powers run in fp32 under autocast, as on CUDA only. NOTE [ Autocast ]."""
        return self.run.precision.casts is not None and self.kernels.device is not Device.CPU

    @property
    def tp(self) -> int:
        """t."""
        return self.run.layout.tp

    @property
    def expert_axis(self) -> str:
        """Mesh axis that shards an expert's width."""
        return "etp" if self.run.layout.splits_tp else "tp"

    @property
    def seq_dim(self) -> int:
        """Dim of an activation that is the sequence."""
        return 1 if self.kernels.batch_first else 0

    # shapes ---------------------------------------------------------------------------------------------------------

    def shape(self, *width: int) -> tuple[int, ...]:
        """(b, s, *width), or (s, b, *width)."""
        b, s = self.run.micro_batch, self.run.seq
        return (b, s, *width) if self.kernels.batch_first else (s, b, *width)

    def inside(self, *more: tuple[str, int]) -> Places:
        """Placement inside attention and feed-forward blocks: s over cp, and the given axes."""
        cp = (("cp", self.seq_dim),) if self.run.layout.cp > 1 else ()
        return tuple(sorted((*cp, *more)))

    def outside(self) -> Places:
        """Placement between blocks: under sequence parallelism s is sharded over tp as well."""
        sp = self.run.layout.sp and self.tp > 1
        return self.inside(("tp", self.seq_dim)) if sp else self.inside()

    def on_tp(self, dim: int) -> Places:
        """Placement of an activation inside a block whose ``dim`` is sharded over tp."""
        return self.inside(("tp", dim)) if self.tp > 1 else self.inside()

    # sources --------------------------------------------------------------------------------------------------------

    @property
    def table_dtype(self) -> str:
        """Dtype of embeddings; TRL leaves them in the matmuls' dtype: NOTE [ What is not packed ]."""
        tuning = self.run.tuning
        return self.matmul_dtype if tuning is not None and tuning.upcast is Upcast.NORMS else self.compute

    def hidden(
        self, role: str = "block input", *, detached: bool = False, low_precision: bool = False, depths: int = 1
    ) -> Value:
        """The residual stream as the region's input. ``detached``: no gradient is passed on.

        ``low_precision``: in the matmuls' dtype. ``depths``: number of joined hidden states (MTP).
        """
        rows = list(self.shape(self.run.model.hidden))
        rows[self.seq_dim] *= depths
        shape = tuple(rows)
        dtype = self.matmul_dtype if low_precision else self.stream
        return self.tape.source(role, shape, dtype, self.outside(), grad=not detached)

    def table(self, name: str, shape: tuple[int, ...], dtype: str, places: Places = ()) -> Value:
        """A tensor that every layer reads and no layer counts."""
        return self.tape.source(name, shape, dtype, places, kind=Source.INPUT, free=True)

    def read(self, weight: Weight, name: str = "weight") -> Value:
        """A parameter as read by an op that is not a matmul."""
        dtype, learned = self.held(frozen=weight.frozen), not weight.frozen
        return self.tape.source(name, weight.shape, dtype, weight.places, grad=learned, free=True)

    def random(self) -> Value:
        """State of the random generator at the region's start, from which masks are recomputed."""
        if self._random is None:
            size = RANDOM_STATE_BYTES[self.kernels.device]
            self._random = self.tape.source("random state", (size,), "uint8", kind=Source.RANDOM)
        return self._random

    def follow(self, other: Writer) -> None:
        """Share one random state with another writer on the same tape."""
        self._random = other._random

    def parameter(
        self,
        name: str,
        *shape: int,
        split: int | None = None,
        expert: bool = False,
        tied: bool = False,
        gemm: bool = False,
        head: bool = False,
        adapter: bool = False,
        table: bool = False,
        fixed: bool = False,
        wide: bool = False,
        gradient_ways: int = 1,
        module: str = "",
    ) -> Weight:
        """Declare a parameter; ``split`` is the dim that tp shards, ``expert``: ep shards dim 0, which counts experts.

        ``tied``: it belongs to another region; held once more only on another pipeline stage.
        ``gemm``: a matrix of a GEMM; ``head``: the LM head's. ``adapter``: trained while the others are frozen.
        ``table``: an embedding table. ``fixed``: the model's own code never trains it. ``wide``: held in fp32, whatever
        the others are. ``module``: PEFT's name of it in `Tuning.full`, which trains a copy.
        """
        axis = self.expert_axis if expert else "tp"
        places = [(axis, split)] if split is not None and self.tape.mesh[axis] > 1 else []
        if expert and self.run.layout.ep > 1:
            places.append(("ep", 0))
        tuning, given = self.run.tuning, self.run.precision.parameter
        if full := tuning is not None and module in tuning.full:
            self.parameter(f"original_{name}", *shape, split=split, tied=tied, gemm=gemm, head=head, table=table)
        frozen = fixed or (tuning is not None and not adapter and not full)
        packed = copies = scales = 0
        held = self.recipe
        spread = tuple(sorted(places))
        local = self.tape.local_shape(shape, spread)
        if held is not None and self.uses_recipe(shape[-2] if gemm else 1, head=head) and not adapter:
            copies = held.weight_bytes(local)
        modules = not expert or (self.kernels.looped_experts and self.run.layout.ep == 1)
        if frozen and gemm and not head and modules and self.base.packed:
            count = local[0] if expert else 1  # matrices
            packed = count * self.base.packed_bytes(prod(local) // count, local[-2])
            if self.kernels.model_code:  # bitsandbytes' ``quant_state``, say
                scales = count * self.base.scale_bytes(prod(local) // count, local[-2])
        wide = wide or (adapter and tuning is not None and tuning.wide)
        like = frozen or (full and not self.run.fp32_copies)  # NOTE [ Modules trained in full ] in `spec.fine_tuning`
        dtype = "float32" if wide else self.held(frozen=like)
        dtype = self.table_dtype if like and (table or head) and self.base.packed else dtype
        weight = Weight(
            f"{self.tape.path}.{name}" if self.tape.path else name,
            tuple(shape),
            spread,
            prod(local) * DTYPE_BYTES[dtype],
            prod(local),
            expert=expert,
            tied=(tied and not full) or self.repeats,
            gemm=gemm,
            head=head,
            frozen=frozen,
            packed_bytes=packed,
            scale_bytes=scales,
            dtype=dtype if wide or (full and dtype != given) else "",
            quantized_bytes=copies,
            adapter=adapter,
            recipe=self.other_recipe if gemm else None,
            gradient_ways=gradient_ways,
        )
        self.tape.weights.append(weight)
        return weight

    def uses_recipe(self, features: int, *, head: bool) -> bool:
        """Whether an FP8/FP4 recipe applies to a matmul with so many outputs. The head's is torch's, as are gates'."""
        return self.recipe is not None and features > 1 and not head

    @property
    def one_block(self) -> bool:
        """Whether a gated block with its adapters is one op: only if all its linear layers have adapters."""
        tuning = self.run.tuning
        fused = self.kernels.fused_adapters and self.kernels.fused_gate
        return fused and tuning is not None and all(map(tuning.adapts, ("gate", "up", "down")))

    @property
    def other_recipe(self) -> Fp8Recipe | None:
        """FP8 recipe of the current layers, if not the run's."""
        return rule_for(self.rules, self.tape.path) if self.rules else None

    @property
    def recipe(self) -> Fp8Recipe | None:
        """FP8 recipe of the current layers; None: they run in the activations' dtype, or the run has none."""
        run, other = self.run.precision.recipe, self.other_recipe
        if run is None or other is None:
            return run
        return None if other == BF16_GEMMS else other

    @property
    def quantises(self) -> bool:
        """Whether matmuls run in fp8 without a recipe."""
        precision = self.run.precision
        return precision.gemm_inputs is not None and precision.recipe is None and self.other_recipe != BF16_GEMMS

    @property
    def base(self) -> Base:
        """Storage format of frozen matrices."""
        return Base.PLAIN if self.run.tuning is None else self.run.tuning.base

    def held(self, *, frozen: bool) -> str:
        """Dtype of a parameter; of a quantized one, its dtype after dequantization."""
        if frozen:
            return "float32" if self.base is Base.FP32 else self.compute
        return self.run.precision.parameter
