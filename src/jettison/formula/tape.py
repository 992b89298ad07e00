"""A forward written down symbolically: values without numbers, the ops between them, and what autograd keeps of each.

NOTE [ One walk, every figure ]
A layer is described once, as the ops that its forward runs. Each op states what it saves for its backward. Parameters,
saved tensors, FLOPs, bytes moved, collectives and the transients of both passes are all read off that one walk, so
none of them can disagree with another. Ops have PyTorch's names for them, so that what is decided on a recorded
program (`ledger.program`) can be decided here as well.

Shapes are logical, the whole tensor's; a placement says which mesh axis shards which dim, and what one rank holds
follows from it and from the mesh. A view shares the storage of what it views.

NOTE [ Rows of all ranks ]
A gather returns what ranks have one after the other. Where the dim that it joins is not the outermost (b × s × h), they
are put in order by a copy, beside it: ``torch/distributed/_functional_collectives.py``, ``all_gather_tensor``
(``torch.cat(torch.chunk(...), dim=gather_dim)``); before a scatter it is the other way round
(``reduce_scatter_tensor``), and what was given has a name until it is over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod

from jettison.core.dtypes import DTYPE_BYTES
from jettison.ledger.program import Anchor, Source
from jettison.spec.fp8 import Fp8Recipe

GATHER, SCATTER = "all_gather_into_tensor", "reduce_scatter_tensor"
NAMES = "names"
"""Of a step that reads values and does nothing: `Tape.name`."""
Places = tuple[tuple[str, int], ...]
"""Mesh axis and the dim that it shards, sorted; what is not named is whole on every rank."""


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """One tensor of the forward. ``storage`` is the index of the value that owns its memory; ``piece`` that of the
    value which was split off it, -1 where none was.
    """

    index: int
    shape: tuple[int, ...]
    dtype: str
    places: Places
    storage: int
    grad: bool  # backward passes a gradient through it
    local_shape: tuple[int, ...]
    nbytes: int  # that one rank holds of this view
    piece: int = -1


@dataclass(frozen=True, slots=True)
class Saved:
    """A value that an op keeps for its backward, and what people call it."""

    value: Value
    role: str
    reference: str = ""


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter: its logical shape and how it is placed.

    ``expert``: ZeRO spreads it over the ranks of one expert only. ``tied``: another region's weight, read again.
    ``product``: a matrix whose gradient can be added to a buffer within the product that makes it. ``head``: that
    product is the head's, after which autograd is still given a gradient of that size: ``torch.empty`` in Megatron-LM's
    ``megatron/core/tensor_parallel/layers.py``, or TransformerEngine's, which is kept. ``frozen``: it has no gradient.
    ``wide``: it is held in fp32 whatever the others are, with its gradient and its state.
    ``packed_bytes``: on one rank, where it is held in fewer bits than it is read with; 0: it is not.
    ``narrow_bytes``: of copies for narrow products that are held for good, on one rank.
    ``adapter``: it belongs to an adapter, whose products are as wide as activations. ``recipe``: of its product, where
    that is not the run's. ``gradient_ways``: its gradient takes so many times what a rank has of it.
    """

    name: str
    shape: tuple[int, ...]
    places: Places
    nbytes: int  # on one rank, in the dtype that forward reads
    numel: int  # on one rank
    expert: bool = False
    tied: bool = False
    product: bool = False
    head: bool = False
    frozen: bool = False
    packed_bytes: int = 0
    wide: bool = False
    narrow_bytes: int = 0
    adapter: bool = False
    recipe: Fp8Recipe | None = None
    gradient_ways: int = 1

    @property
    def gradient_numel(self) -> int:
        """Elements of its gradient on one rank, whatever is looked at of them."""
        return self.numel * self.gradient_ways

    @property
    def held_bytes(self) -> int:
        """Of a frozen one, on one rank."""
        return self.packed_bytes or self.nbytes

    @property
    def total(self) -> int:
        """Elements of the whole parameter."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Collective:
    """A transfer between the ranks of one axis. ``nbytes`` is the whole tensor's, the gathered or reduced one.

    ``step``: how many steps stand before the place in the forward where it, or what it is the backward of, belongs.
    ``copies``: rows that stand for the same token, each for another expert.
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

    ``casts``: a weight that it copies in another dtype; the gradient of its input is that weight's. ``copied``: copies
    of its weights are among its inputs and take their gradients. ``differentiable``: backward visits it.
    """

    name: str
    path: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    saved: tuple[Saved, ...]
    weights: tuple[Weight, ...]
    flops: int
    bytes_moved: int
    passes: bool
    anchor: Anchor | None
    gradients: tuple[int, ...] | None  # bytes of each input's gradient where it has another size than the input
    workspace: int  # bytes that only live while its backward runs
    in_place: bool = False  # its backward writes the gradient of its input where a saved tensor was
    rounds: int = 1  # kernels that follow one another, where it is a loop
    casts: Weight | None = None
    copied: bool = False
    differentiable: bool = field(init=False, compare=False)  # asked far more often than ops are made

    def __post_init__(self) -> None:
        object.__setattr__(self, "differentiable", any(v.grad for v in self.outputs))

    @property
    def learned(self) -> tuple[Weight, ...]:
        """Its weights that have a gradient."""
        return tuple(w for w in self.weights if not w.frozen)

    @property
    def makes(self) -> tuple[Weight, ...]:
        """Weights whose gradients its backward makes."""
        if self.casts is not None:
            return () if self.casts.frozen else (self.casts,)
        return () if self.copied else self.learned


@dataclass(slots=True, kw_only=True)
class Tape:
    """What has been written so far. Make values with `source` and `op`; read `steps`, `weights` and `collectives`."""

    mesh: Mapping[str, int]
    steps: list[TapeOp] = field(default_factory=list)
    weights: list[Weight] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    sources: dict[int, tuple[Source, str, bool]] = field(default_factory=dict)  # storage -> kind, name, free
    sizes: list[int] = field(default_factory=list)  # bytes on one rank of the storage that a value owns, else 0
    values: list[Value] = field(default_factory=list)
    returned: list[Value] = field(default_factory=list)  # what the model gives its caller beside the loss
    _scope: list[str] = field(default_factory=list)

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
        """A value that reaches the region from outside. ``free``: somebody else pays for its bytes."""
        value = self._new(tuple(shape), dtype, places, None, grad)
        self.sources[value.storage] = (kind, name, free)
        return value

    def view(self, value: Value, shape: Sequence[int], places: Places | None = None) -> Value:
        """The same memory under another shape."""
        return self._new(tuple(shape), value.dtype, value.places if places is None else places, value, value.grad)

    def split(self, value: Value, widths: Sequence[int]) -> list[Value]:
        """Pieces along the last dim, which have gradients of their own until they are put together.

        ``torch.split``, ``chunk``, ``unbind``: their backward is one ``cat``, where that of each slice is as large as
        the whole (``torch/csrc/autograd/FunctionsManual.cpp``, ``split_with_sizes_backward``).
        """
        views = [self.view(value, (*value.shape[:-1], width)) for width in widths]
        pieces = [replace(each, piece=each.index) for each in views]
        for each in pieces:
            self.values[each.index] = each
        return pieces

    def weight(
        self,
        name: str,
        shape: Sequence[int],
        dtype: str,
        places: Places = (),
        *,
        expert: bool = False,
        tied: bool = False,
        product: bool = False,
        head: bool = False,
        frozen: bool = False,
        packed_bytes: int = 0,
        wide: bool = False,
        narrow_bytes: int = 0,
        adapter: bool = False,
        recipe: Fp8Recipe | None = None,
    ) -> Weight:
        """Declare a parameter of the region."""
        local = self.local_shape(tuple(shape), places)
        full = ".".join([*self._scope, name])
        nbytes = prod(local) * DTYPE_BYTES[dtype]
        kind = (expert, tied, product, head, frozen)
        size, more = prod(local), (packed_bytes, wide, narrow_bytes, adapter, recipe)
        made = Weight(full, tuple(shape), places, nbytes, size, *kind, *more)
        self.weights.append(made)
        return made

    def declare(self, weight: Weight) -> Weight:
        """Another form of the parameter that was declared last."""
        assert self.weights[-1].name == weight.name, "only of the last one"
        self.weights[-1] = weight
        return weight

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
        weights: Sequence[Weight] = (),
        flops: int = 0,
        contracted: int = 0,
        passes: bool = False,
        anchor: Anchor | None = None,
        grad: bool | None = None,
        gradients: tuple[int, ...] | None = None,
        workspace: int = 0,
        casts: Weight | None = None,
        copied: bool = False,
    ) -> Value:
        """Run an op with one result, by default of the first input's shape, dtype and placement.

        Args:
            contracted: a matrix product sums over this many local elements; its FLOPs count a multiply-add as two.
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
        self.record(
            name,
            inputs,
            (out,),
            saves=saves,
            weights=weights,
            flops=flops,
            passes=passes,
            anchor=anchor,
            gradients=gradients,
            workspace=workspace,
            casts=casts,
            copied=copied,
        )
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
        passes: bool = False,
        anchor: Anchor | None = None,
        gradients: tuple[int, ...] | None = None,
        workspace: int = 0,
        in_place: bool = False,
        rounds: int = 1,
        casts: Weight | None = None,
        copied: bool = False,
    ) -> None:
        """Write down an op whose results exist already (`empty`). It saves nothing if nothing is differentiated."""
        moved = sum(v.nbytes for v in (*inputs, *outputs)) + (0 if copied else sum(w.nbytes for w in weights))
        kept = tuple(saves) if any(v.grad for v in outputs) else ()
        self.steps.append(
            TapeOp(
                name,
                ".".join(self._scope),
                tuple(inputs),
                tuple(outputs),
                kept,
                tuple(weights),
                flops,
                moved,
                passes,
                anchor,
                gradients,
                workspace,
                in_place,
                rounds,
                casts,
                copied,
            )
        )

    def hold(self, value: Value, role: str, reference: str = "") -> None:
        """Keep a value through backward for other regions, which read it as theirs but do not pay for it."""
        kept = (Saved(value, role, reference),)
        self.steps.append(TapeOp("hold", ".".join(self._scope), (value,), (), kept, (), 0, 0, False, None, None, 0))

    def name(self, *values: Value) -> None:
        """Values that Python has names for up to here, whoever read them last."""
        self.steps.append(TapeOp(NAMES, ".".join(self._scope), values, (), (), (), 0, 0, False, None, None, 0))

    def empty(self, shape: Sequence[int], dtype: str, places: Places = (), *, grad: bool = False) -> Value:
        """A value that the next recorded op makes."""
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
        """Where it is being written."""
        return ".".join(self._scope)

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Paths inside are below ``name``."""
        self._scope.append(name)
        yield
        self._scope.pop()

    def _moved(self, kind: str, axis: str, value: Value, places: Places) -> Value:
        """NOTE [ Rows of all ranks ]."""
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
        """What one rank holds: a size that an axis does not divide is rounded up."""
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
