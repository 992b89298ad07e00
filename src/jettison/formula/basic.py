"""Ops that every family uses: casts, sums, linear layers, dropout, and the passage into and out of parallel blocks."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from jettison.core.dtypes import DTYPE_BYTES
from jettison.formula.narrow import QUANTISE, narrow
from jettison.formula.tape import Collective, Places, Saved, Value, Weight, Writer
from jettison.ledger.program import Anchor
from jettison.spec.tuning import Base, Tuning

WEIGHT_COPY, ADAPTER_COPY = "weight in the dtype of products", "adapter in the dtype of products"


def cast(w: Writer, x: Value, dtype: str) -> Value:
    """x in another dtype; x itself where it has it already."""
    return x if x.dtype == dtype else w.tape.op("aten._to_copy.default", [x], dtype=dtype)


def for_product(w: Writer, x: Value) -> Value:
    """x as a product reads it: under autocast a copy, which is made for each product that reads it."""
    return cast(w, x, w.products) if w.run.precision.casts else x


def copy(w: Writer, x: Value, shape: tuple[int, ...] | None = None, places: Places | None = None) -> Value:
    """A new tensor of the same elements."""
    return w.tape.op("aten.clone.default", [x], shape, places=places)


def add(w: Writer, a: Value, b: Value) -> Value:
    """a + b. Backward needs nothing."""
    dtype = wider(a, b) if w.run.precision.casts else None
    return w.tape.op("aten.add.Tensor", [a, b], dtype=dtype, passes=True)


def wider(a: Value, b: Value) -> str:
    """The dtype of what is made of both."""
    return max(a.dtype, b.dtype, key=DTYPE_BYTES.__getitem__)


def scale(w: Writer, x: Value) -> Value:
    """x times a number. Backward needs nothing."""
    return w.tape.op("aten.mul.Tensor", [x])


def multiply(w: Writer, a: Value, b: Value, roles: tuple[str, str], dtype: str | None = None) -> Value:
    """a * b: each factor's gradient needs the other factor. A smaller b's is made in a's shape and summed."""
    kept = [Saved(b, roles[1])] if a.grad else []
    kept += [Saved(a, roles[0])] if b.grad else []
    workspace = a.nbytes if b.grad and b.local_shape != a.local_shape else 0
    if dtype is None and w.run.precision.casts:
        dtype = wider(a, b)
    return w.tape.op("aten.mul.Tensor", [a, b], dtype=dtype, saves=kept, workspace=workspace)


def weigh(w: Writer, x: Value, weight: Weight, role: str) -> Value:
    """x times a weight of its last dim. The weight's gradient is made in x's shape and summed."""
    kept = [] if weight.frozen else [Saved(x, role)]
    dtype = w.held(frozen=weight.frozen) if w.run.precision.casts else None
    return w.tape.op(
        "aten.mul.Tensor", [x], dtype=dtype, saves=kept, weights=[weight], workspace=0 if weight.frozen else x.nbytes
    )


def power(w: Writer, x: Value, role: str, reference: str = "") -> Value:
    """x to a constant. Backward makes a lower power and a multiple of it on its way to the gradient."""
    x = cast(w, x, "float32") if w.listed else x
    return w.tape.op("aten.pow.Tensor_Scalar", [x], saves=[Saved(x, role, reference)], workspace=2 * x.nbytes)


def linear(
    w: Writer,
    x: Value,
    features: int,
    name: str,
    *,
    bias: bool,
    split: str | None = None,
    keeps: Value | None = None,
    role: str = "linear input",
    reference: str = "",
    tied: bool = False,
    head: bool = False,
    weight: Weight | None = None,
    original: bool = False,
) -> Value:
    """x @ W^T (+ bias). Backward needs x, for the weight's gradient.

    Args:
        split: "column" shards W's outputs over tp, "row" its inputs; the sum over ranks is the caller's (`leave`).
        tied: the weight is the embedding's.
        keeps: what is saved in x's place (its shard, which backward gathers again).
        head: the head's product is torch's, whatever library has those of layers.
        weight: that an earlier product of the region has as well.
        original: what is saved is kept by another op as well, as it is.
    """
    width = x.shape[-1]
    with w.tape.scope(name):
        dim = {"column": 0, "row": 1}.get(split or "")
        if weight is None:
            weight = w.parameter("weight", features, width, split=dim, tied=tied, product=True, head=head)
        biases = [w.parameter("bias", features, split=0 if split == "column" else None)] if bias else []
        apart = w.kernels.biases_apart and not head
        weights = [weight] if apart else [weight, *biases]
        last = len(x.shape) - 1
        places = tuple(p for p in x.places if p[1] != last)
        if split == "column" and w.tp > 1:
            places = tuple(sorted((*places, ("tp", last))))
        copies = weight_copies(w, weights)
        given, shared, x = x, keeps is None or keeps is x, for_product(w, x)
        kept = x if keeps is None or shared else for_product(w, keeps)
        inputs, workspace = [x, *copies], 0
        if split == "column" and not shared and not weight.frozen and (x.grad or not weight.tied):
            workspace = _gathered_again(w, x, weight)
        copy_saved = tuple(Saved(c, WEIGHT_COPY) for c in copies[:1] if x.grad)
        saves: tuple[Saved, ...] = (Saved(kept, role, reference), *copy_saved)
        if w.narrows(features, head=head):
            local = w.tape.local_shape((features,), (("tp", 0),) if split == "column" else ())[0]
            found = narrow(w, x, kept, local, name, role, original=original)
            saves, workspace = found.saves, found.workspace
        elif w.quantises:
            kept = quantise(w, kept)
            saves = (Saved(kept, role, reference),)
        eight = weight.packed_bytes > 0 and w.base is Base.INT8
        if eight:  # forward multiplies bytes, backward has the matrix in 16 bits
            workspace = weight.numel * DTYPE_BYTES[w.products]
        elif weight.packed_bytes:
            inputs += unpacked(w, weight, weight.shape)
            workspace = inputs[-1].nbytes
        out = w.tape.op(
            "aten.addmm.default" if len(weights) > 1 else "aten.mm.default",
            inputs,
            (*x.shape[:-1], features),
            places=places,
            saves=saves if not weight.frozen or (eight and x.grad) else copy_saved,
            copied=bool(copies),
            weights=weights,
            dtype=w.products,
            contracted=x.local_shape[-1],
            workspace=workspace,
        )
        if apart and biases:
            dtype = w.held(frozen=biases[0].frozen) if w.run.precision.casts else None
            out = w.tape.op("aten.add.Tensor", [out], dtype=dtype, weights=biases, passes=True)
        if weight.packed_bytes:
            out = cast(w, out, given.dtype)
        tuning = w.run.tuning
        if tuning is not None and tuning.adapts(name) and not head:
            out = _adapted(w, given, kept, out, features, split, packed=weight.packed_bytes > 0)
    return out


def _gathered_again(w: Writer, x: Value, weight: Weight) -> int:
    """What a backward gathers of its shards, beside the gradients of its input and of its weight.

    ``jettison/parallel/styles.py``, ``_ColumnLinear.backward``: the product for the input's gradient, then the wait,
    the copy that puts rows in order (`Tape`'s NOTE [ Rows of all ranks ]), and the product for the weight's.
    """
    if not w.kernels.batch_first:  # TransformerEngine's products, whose measured peaks have no room for it
        return 0
    in_order = 0 if prod(x.local_shape[: w.seq_dim]) == 1 else max(0, x.nbytes - weight.nbytes)
    return x.nbytes + in_order


def unpacked(w: Writer, weight: Weight, shape: tuple[int, ...]) -> list[Value]:
    """A matrix as a product reads it; it is held as a parameter, which no activation is."""
    held = w.tape.source("packed weight", (weight.packed_bytes,), "uint8", free=True)
    return [w.tape.op("dequantise.nf4", [held], shape, w.products, grad=False)]


def _adapted(w: Writer, x: Value, kept: Value, out: Value, features: int, split: str | None, *, packed: bool) -> Value:
    """out + B(A(dropout(x))) · alpha / r: NOTE [ Adapters as PEFT places them ] in `spec.tuning`."""
    tuning = w.run.tuning
    assert tuning is not None
    if w.kernels.fused_adapters and w.tp == 1:
        return _fused_adapter(w, x, out, features, tuning)
    autocast = w.run.precision.parameter != w.products
    alone = tuning.wide and not autocast  # fp32, and nothing casts what they read and return but PEFT
    wide = "float32" if tuning.wide else w.run.precision.parameter
    product = wide if alone else w.products
    if packed and w.base is not Base.GPTQ:
        out = copy(w, out)
    given = x
    if not (packed and autocast):
        x = cast(w, x, wide)
    dropped = _dropped(w, x, "adapter's dropout mask") if tuning.dropout else x
    kept = kept if dropped.dtype == kept.dtype and not tuning.dropout else dropped
    last = len(x.shape) - 1
    row, column = split == "row" and w.tp > 1, split == "column" and w.tp > 1
    rest = tuple(p for p in x.places if p[1] != last)
    down = w.parameter("lora_A", tuning.rank, x.shape[-1], split=1 if row else None, adapter=True, product=True)
    copies = [] if alone else cast_weights(w, [down])
    narrow = cast(w, dropped, product)
    kept = narrow if autocast and not (packed and narrow is given) else kept
    low = w.tape.op(
        "aten.mm.default",
        [narrow, *copies],
        (*x.shape[:-1], tuning.rank),
        places=rest,
        saves=[Saved(kept, "adapter input"), *(Saved(c, ADAPTER_COPY) for c in copies if x.grad)],
        weights=[down],
        dtype=product,
        contracted=x.local_shape[-1],
        copied=bool(copies),
    )
    up = w.parameter("lora_B", features, tuning.rank, split=0 if column else None, adapter=True, product=True)
    copies = [] if alone else cast_weights(w, [up])
    high = w.tape.op(
        "aten.mm.default",
        [low, *copies],
        out.shape,
        places=out.places,
        saves=[Saved(low, "adapter output"), *(Saved(c, ADAPTER_COPY) for c in copies)],
        weights=[up],
        dtype=product,
        contracted=tuning.rank,
        copied=bool(copies),
    )
    high = scale(w, high)
    if alone:
        summed = cast(w, w.tape.op("aten.add.Tensor", [out, high], dtype=product, passes=True), out.dtype)
    else:
        summed = add(w, out, high)
    w.tape.name(given, x)
    return summed


def _fused_adapter(w: Writer, x: Value, out: Value, features: int, tuning: Tuning) -> Value:
    """The adapter added to what the product has made: x alone is kept, and what has the adapter's rank made again.

    unslothai/unsloth, ``unsloth/kernels/fast_lora.py``, ``LoRA_W``; ``unsloth/kernels/utils.py``, ``matmul_lora``:
    ``out.addmm_(XA, B.to(dtype), alpha = s)``.
    """
    x = _dropped(w, x, "adapter's dropout mask") if tuning.dropout else x
    down = w.parameter("lora_A", tuning.rank, x.shape[-1], adapter=True, product=True)
    up = w.parameter("lora_B", features, tuning.rank, adapter=True, product=True)
    again = w.one_block and w.tape.path.endswith("down")  # activation and product of gate and up, in their place
    low = tuning.rank * DTYPE_BYTES[w.products] * prod(x.local_shape[:-1])
    return w.tape.op(
        "fused_adapter",
        [x, out],
        out.shape,
        out.dtype,
        out.places,
        saves=[] if again else [Saved(x, "adapter input")],
        weights=[down, up],
        flops=2 * prod(x.local_shape[:-1]) * tuning.rank * (x.shape[-1] + features),
        gradients=(x.nbytes, 0),
        workspace=low,
    )


def convolution(
    w: Writer, x: Value, shape: tuple[int, ...], weights: list[Weight], contracted: int, role: str = "convolution input"
) -> Value:
    """Backward is one op that is given the input and the weight, whichever gradients it makes: both stay."""
    copies = weight_copies(w, weights)
    x = for_product(w, x)
    return w.tape.op(
        "aten.convolution.default",
        [x, *copies],
        shape,
        w.products,
        saves=[Saved(x, role), *(Saved(c, WEIGHT_COPY) for c in copies[:1])],
        weights=weights,
        contracted=contracted,
        copied=bool(copies),
    )


def name_given(w: Writer, x: Value, whole: Value | None = None) -> None:
    """Callers of a block have names for its input, which matters where its products keep copies of it instead.

    Args:
        whole: what the block was given of all ranks, which is its own argument until it returns.
    """
    tuning = w.run.tuning
    if w.run.precision.casts or (tuning is not None and tuning.targets):
        w.tape.name(x)
    if whole is not None and whole is not x and w.kernels.batch_first:  # Megatron's is gone within its first layer
        w.tape.name(whole)


def weight_copies(w: Writer, weights: Sequence[Weight]) -> list[Value]:
    """What a product reads of its weights under autocast; nothing without, where it reads them as they are."""
    return cast_weights(w, weights) if w.run.precision.casts else []


def cast_weights(w: Writer, weights: Sequence[Weight]) -> list[Value]:
    """Copies of a product's weights in its dtype; of what has a gradient one for all that read it: NOTE [ Autocast ].

    The last of the weights is cast first, as arguments are taken from the right.
    """
    wide, first = w.run.precision.parameter, weights[0]
    narrow = first.packed_bytes or first.nbytes == first.numel * DTYPE_BYTES[w.products]
    return [] if wide == w.products or narrow else [_cast_weight(w, weight) for weight in reversed(weights)][::-1]


def _cast_weight(w: Writer, weight: Weight) -> Value:
    if weight.name in w.copies:
        return w.copies[weight.name]
    copied = w.tape.op("aten._to_copy.default", [w.read(weight)], dtype=w.products, casts=weight)
    if not weight.frozen:
        w.copies[weight.name] = copied
    return copied


def quantise(w: Writer, x: Value) -> Value:
    """x in fp8 for a product; one copy for all products that read it. No gradient comes through what is only saved."""
    if x.index not in w.quantised:
        product = w.run.precision.product
        assert product is not None
        w.quantised[x.index] = w.tape.op(QUANTISE, [x], dtype=product, grad=False)
    return w.quantised[x.index]


def batched_product(
    w: Writer,
    a: Value,
    b: Value,
    shape: tuple[int, ...],
    places: Places,
    contracted: int,
    roles: tuple[str, str],
    reference: str = "",
    dtype: str | None = None,
    *,
    inner: bool = False,
) -> Value:
    """a @ b for two activations: both are needed in backward. ``contracted`` is the local size summed over.

    ``inner``: it is part of another op, where autocast is over.
    """
    if w.run.precision.casts and not inner:
        a, b, dtype = for_product(w, a), for_product(w, b), w.products
    kept = [Saved(b, roles[1], reference)] if a.grad else []
    kept += [Saved(a, roles[0], reference)] if b.grad else []
    return w.tape.op(
        "aten.bmm.default", [a, b], shape, dtype=dtype or w.compute, places=places, saves=kept, contracted=contracted
    )


def dropout(w: Writer, x: Value, *, site: bool, reference: str = "") -> Value:
    """Dropout where the architecture has it and the run asks for it."""
    return _dropped(w, x, "dropout mask", reference) if site and w.run.dropout else x


def _dropped(w: Writer, x: Value, role: str, reference: str = "") -> Value:
    """Backward needs the mask."""
    if w.kernels.byte_masks:
        out = w.tape.empty(x.shape, x.dtype, x.places, grad=x.grad)
        mask = w.tape.empty(x.shape, "bool", x.places)
        kept = [Saved(mask, role, reference)]
        w.tape.record("aten.native_dropout.default", [x, w.random()], [out, mask], saves=kept)
        return out
    mask = w.tape.op("aten.bernoulli.p", [x, w.random()], grad=False)
    return w.tape.op("aten.mul.Tensor", [x, mask], saves=[Saved(mask, role, reference)])


def enter(w: Writer, x: Value) -> tuple[Value, Value]:
    """Into a tensor-parallel block: x whole on every rank, and what a column-parallel product there saves of it.

    The operator g of arXiv 2205.05198 §4.2.2: all-gather along s, whose backward is a reduce-scatter. Without sequence
    parallelism it is f: nothing, whose backward is an all-reduce.
    """
    layout, step = w.run.layout, len(w.tape.steps)
    if w.tp == 1:
        return x, x
    if not layout.sp:
        w.tape.collectives.append(Collective("all_reduce", "tp", x.nbytes, backward=True, step=step))
        return x, x
    if not layout.gathered_inputs:
        x = for_product(w, x)  # once for all that read it: `parallel.styles.gather_input`
    whole = w.tape.collective("all_gather_into_tensor", "tp", x, w.inside(), backward="reduce_scatter_tensor")
    if layout.gathered_inputs:
        return whole, whole
    w.tape.collectives.append(Collective("all_gather_into_tensor", "tp", whole.nbytes, backward=True, step=step))
    return whole, x


def leave(w: Writer, y: Value) -> Value:
    """Out of a tensor-parallel block: partial sums over tp become the residual stream. The operator g-bar."""
    if w.tp == 1:
        return y
    if w.run.layout.sp:
        return w.tape.collective("reduce_scatter_tensor", "tp", y, w.outside(), backward="all_gather_into_tensor")
    return w.tape.collective("all_reduce", "tp", y, y.places, backward=None)


def discrete(w: Writer, x: Value, name: str, shape: tuple[int, ...], dtype: str = "int64") -> Value:
    """A choice that may not be made a second time."""
    return w.tape.op(name, [x], shape, dtype, grad=False, anchor=Anchor.DISCRETE)
