"""Ops that every family uses: casts, sums, linear layers, dropout, entry and exit of tensor-parallel blocks."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from jettison.core.dtypes import DTYPE_BYTES
from jettison.formula.fp8 import QUANTISE, quantized_matmul
from jettison.formula.sums import positive
from jettison.formula.tape import Collective, Places, Saved, Value, Weight, Writer
from jettison.ledger.program import Anchor
from jettison.spec.fine_tuning import FP8_BLOCK, HEAD, Base, Tuning
from jettison.spec.fp8 import FP8

WEIGHT_COPY, ADAPTER_COPY = "weight in the dtype of GEMMs", "adapter in the dtype of GEMMs"


def cast(w: Writer, x: Value, dtype: str) -> Value:
    """x in another dtype; x itself if it has that dtype."""
    return x if x.dtype == dtype else w.tape.op("aten._to_copy.default", [x], dtype=dtype)


def for_matmul(w: Writer, x: Value) -> Value:
    """x as a matmul reads it: under autocast a cast copy, made for each matmul that reads it."""
    return cast(w, x, w.matmul_dtype) if w.run.precision.casts else x


def copy(w: Writer, x: Value, shape: tuple[int, ...] | None = None, places: Places | None = None) -> Value:
    """A new tensor of the same elements."""
    return w.tape.op("aten.clone.default", [x], shape, places=places)


def add(w: Writer, a: Value, b: Value) -> Value:
    """a + b. Backward needs nothing."""
    dtype = wider(a, b) if w.run.precision.casts else None
    return w.tape.op("aten.add.Tensor", [a, b], dtype=dtype, passes=True)


def wider(a: Value, b: Value) -> str:
    """The wider dtype of two values, which an op of both returns."""
    return max(a.dtype, b.dtype, key=DTYPE_BYTES.__getitem__)


def scale(w: Writer, x: Value) -> Value:
    """x times a number. Backward needs nothing."""
    return w.tape.op("aten.mul.Tensor", [x])


def multiply(w: Writer, a: Value, b: Value, roles: tuple[str, str], dtype: str | None = None) -> Value:
    """a * b: each factor's gradient needs the other factor. A smaller b's gradient is made in a's shape and summed."""
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
    """x to a constant power. Backward makes a lower power and a multiple of it for the gradient."""
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
    parts: Sequence[tuple[str, int]] = (),
) -> Value:
    """x @ W^T (+ bias). Backward needs x, for the weight's gradient.

    Args:
        split: "column" shards W's outputs over tp, "row" its inputs; the sum over ranks is the caller's (`leave`).
        tied: the weight is the embedding's.
        keeps: saved instead of x: its shard, which backward all-gathers again.
        head: the matmul of the head, which is torch's whatever library computes those of layers.
        weight: a weight that an earlier matmul of the region has declared.
        original: another op saves the same tensor without quantizing it.
        parts: names and widths of a joint matmul's parts, which share an adapter.
    """
    width = x.shape[-1]
    with w.tape.scope(name):
        dim, module = {"column": 0, "row": 1}.get(split or ""), HEAD if head else ""
        if weight is None:
            weight = w.parameter("weight", features, width, split=dim, tied=tied, gemm=True, head=head, module=module)
        biases = [w.parameter("bias", features, split=0 if split == "column" else None, module=module)] if bias else []
        apart = w.kernels.separate_biases and not head
        weights = [weight] if apart else [weight, *biases]
        last = len(x.shape) - 1
        places = tuple(p for p in x.places if p[1] != last)
        if split == "column" and w.tp > 1:
            places = tuple(sorted((*places, ("tp", last))))
        copies = weight_copies(w, weights)
        given, shared, x = x, keeps is None or keeps is x, for_matmul(w, x)
        kept = x if keeps is None or shared else for_matmul(w, keeps)
        inputs, workspace = [x, *copies], 0
        if split == "column" and not shared and not weight.frozen and (x.grad or not weight.tied):
            workspace = _gathered_again(w, x, weight)
        copy_saved = tuple(Saved(c, WEIGHT_COPY) for c in copies[:1] if x.grad)
        saves: tuple[Saved, ...] = (Saved(kept, role, reference), *copy_saved)
        if w.uses_recipe(features, head=head):
            local = w.tape.local_shape((features,), (("tp", 0),) if split == "column" else ())[0]
            found = quantized_matmul(w, x, kept, local, name, role, original=original)
            saves, workspace = found.saves, found.workspace
        elif w.quantises:
            kept = quantise(w, kept)
            saves = (Saved(kept, role, reference),)
        if weight.packed_bytes:
            read, workspace = _packed_operand(w, x, weight)
            inputs += read
        eight = weight.packed_bytes > 0 and w.base is Base.INT8
        out = w.tape.op(
            "aten.addmm.default" if len(weights) > 1 else "aten.mm.default",
            inputs,
            (*x.shape[:-1], features),
            places=places,
            saves=saves if not weight.frozen or (eight and x.grad) else copy_saved,
            weights=weights,
            dtype=w.matmul_dtype,
            contracted=x.local_shape[-1],
            workspace=workspace,
        )
        if apart and biases:
            dtype = w.held(frozen=biases[0].frozen) if w.run.precision.casts else None
            out = w.tape.op("aten.add.Tensor", [out], dtype=dtype, weights=biases, passes=True)
        if weight.packed_bytes:
            out = cast(w, out, given.dtype)
        tuning = w.run.tuning
        adapts = (lambda _: False) if tuning is None or head else tuning.adapts
        widths = [size for part, size in parts or ((name, features),) if adapts(part) or adapts(name)]
        if widths:
            # a class of the adapter's own, in PEFT
            own_class = weight.packed_bytes > 0 and w.base is not Base.FP8 and not w.kernels.joint_qkv
            out = _adapted(w, given, kept, out, widths, split, packed=own_class)
    return out


def _packed_operand(w: Writer, x: Value, weight: Weight) -> tuple[list[Value], int]:
    """What a matmul with a packed weight reads in addition, and the bytes of the matrix that its backward unpacks."""
    if w.base is Base.INT8:  # forward multiplies int8, backward unpacks the matrix to 16 bits
        return [], weight.numel * DTYPE_BYTES[w.matmul_dtype]
    if w.base is Base.FP8:  # backward: the matrix, and its scales for each row
        elements = weight.numel + weight.numel // FP8_BLOCK
        return [w.tape.op(QUANTISE, [x], dtype=FP8, grad=False)], elements * DTYPE_BYTES[w.matmul_dtype]
    read = unpacked(w, weight, weight.shape)
    return read, read[-1].nbytes


def _gathered_again(w: Writer, x: Value, weight: Weight) -> int:
    """Bytes that a backward all-gathers of its input's shards, in addition to the gradients of input and weight.

    ``jettison/parallel/styles.py``, ``_ColumnLinear.backward``: the matmul for the input's gradient, then the wait,
    the copy that orders rows (`Tape`'s NOTE [ Rows of all ranks ]), and the matmul for the weight's gradient.
    """
    if not w.kernels.batch_first:  # TransformerEngine: measured peaks leave no room for it
        return 0
    in_order = 0 if prod(x.local_shape[: w.seq_dim]) == 1 else positive(x.nbytes - weight.nbytes)
    return x.nbytes + in_order


def unpacked(w: Writer, weight: Weight, shape: tuple[int, ...]) -> list[Value]:
    """A packed matrix as a matmul reads it; the packed form is a parameter, not an activation."""
    held = w.tape.source("packed weight", (weight.packed_bytes,), "uint8", free=True)
    return [w.tape.op("dequantise.nf4", [held], shape, w.matmul_dtype, grad=False)]


def _adapted(
    w: Writer, x: Value, kept: Value, out: Value, widths: Sequence[int], split: str | None, *, packed: bool
) -> Value:
    """out + B(A(dropout(x))) · alpha / r: NOTE [ Adapters as PEFT places them ] in `spec.fine_tuning`.

    Args:
        widths: of the adapted parts of ``out``. litgpt 26857050, ``lora.py``, ``LoRAQKVLinear``: their updates are made
            by one convolution and padded with zeros by ``index_copy_``, which saves them.
    """
    tuning, features = w.run.tuning, sum(widths)
    assert tuning is not None
    ranks = tuning.rank * len(widths)
    if w.kernels.fused_adapters and w.tp == 1:
        return _fused_adapter(w, x, out, features, tuning)
    autocast = w.run.precision.parameter != w.matmul_dtype
    alone = tuning.wide and not autocast  # fp32 adapters, of which only PEFT casts inputs and outputs
    wide = "float32" if tuning.wide else w.run.precision.parameter
    product = wide if alone else w.matmul_dtype
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
    down = w.parameter("lora_A", ranks, x.shape[-1], split=1 if row else None, adapter=True, gemm=True)
    copies = [] if alone else cast_weights(w, [down])
    read = cast(w, dropped, product)
    kept = read if autocast and not (packed and read is given) else kept
    low = w.tape.op(
        "aten.mm.default",
        [read, *copies],
        (*x.shape[:-1], ranks),
        places=rest,
        saves=[Saved(kept, "adapter input"), *(Saved(c, ADAPTER_COPY) for c in copies if x.grad)],
        weights=[down],
        dtype=product,
        contracted=x.local_shape[-1],
    )
    up = w.parameter("lora_B", features, tuning.rank, split=0 if column else None, adapter=True, gemm=True)
    copies = [] if alone else cast_weights(w, [up])
    high = w.tape.op(
        "aten.mm.default",
        [low, *copies],
        (*out.shape[:-1], features),
        places=out.places,
        saves=[Saved(low, "adapter output"), *(Saved(c, ADAPTER_COPY) for c in copies)],
        weights=[up],
        dtype=product,
        contracted=tuning.rank,
    )
    if features < out.shape[-1]:
        index = w.tape.source("adapter index", (features,), "int64")
        saved = [Saved(high, "adapter update"), Saved(index, "adapter index")]
        high = w.tape.op("aten.index_copy.default", [high, index], out.shape, places=out.places, saves=saved)
    high = scale(w, high)
    if alone:
        summed = cast(w, w.tape.op("aten.add.Tensor", [out, high], dtype=product, passes=True), out.dtype)
    else:
        summed = add(w, out, high)
    w.tape.name(given, x)
    return summed


def _fused_adapter(w: Writer, x: Value, out: Value, features: int, tuning: Tuning) -> Value:
    """The adapter added to the matmul's output: only x is saved; the tensor of the adapter's rank is recomputed.

    unslothai/unsloth, ``unsloth/kernels/fast_lora.py``, ``LoRA_W``; ``unsloth/kernels/utils.py``, ``matmul_lora``:
    ``out.addmm_(XA, B.to(dtype), alpha = s)``.
    """
    x = _dropped(w, x, "adapter's dropout mask") if tuning.dropout else x
    down = w.parameter("lora_A", tuning.rank, x.shape[-1], adapter=True, gemm=True)
    up = w.parameter("lora_B", features, tuning.rank, adapter=True, gemm=True)
    again = w.one_block and w.tape.path.endswith("down")  # recomputed from gate and up, which are saved instead
    low = tuning.rank * DTYPE_BYTES[w.matmul_dtype] * prod(x.local_shape[:-1])
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
    """Backward is one op that reads the input and the weight, whichever gradients it makes: both are saved."""
    copies = weight_copies(w, weights)
    x = for_matmul(w, x)
    return w.tape.op(
        "aten.convolution.default",
        [x, *copies],
        shape,
        w.matmul_dtype,
        saves=[Saved(x, role), *(Saved(c, WEIGHT_COPY) for c in copies[:1])],
        weights=weights,
        contracted=contracted,
    )


def name_given(w: Writer, x: Value, whole: Value | None) -> None:
    """Record that a block's callers reference its input, which matters if its matmuls save copies of it instead.

    Args:
        whole: the all-gathered input, an argument of the block that is referenced until it returns.
    """
    tuning = w.run.tuning
    if w.run.precision.casts or (tuning is not None and tuning.targets):
        w.tape.name(x)
    if whole is not None and whole is not x and w.kernels.batch_first:  # Megatron frees it in the first linear layer
        w.tape.name(whole)


def weight_copies(w: Writer, weights: Sequence[Weight]) -> list[Value]:
    """Copies of weights that a matmul reads under autocast; none otherwise."""
    return cast_weights(w, weights) if w.run.precision.casts else []


def cast_weights(w: Writer, weights: Sequence[Weight]) -> list[Value]:
    """Weights cast to the matmuls' dtype; a trained weight is cast once for all its readers: NOTE [ Autocast ].

    The last weight is cast first, since arguments are evaluated from the right.
    """
    wide, first = w.run.precision.parameter, weights[0]
    equal = first.packed_bytes or first.nbytes == first.numel * DTYPE_BYTES[w.matmul_dtype]
    return [] if wide == w.matmul_dtype or equal else [_cast_weight(w, weight) for weight in reversed(weights)][::-1]


def _cast_weight(w: Writer, weight: Weight) -> Value:
    if weight.name in w.copies:
        return w.copies[weight.name]
    copied = w.tape.op("aten._to_copy.default", [w.read(weight)], dtype=w.matmul_dtype, casts=weight)
    if not weight.frozen:
        w.copies[weight.name] = copied
    return copied


def quantise(w: Writer, x: Value) -> Value:
    """x in fp8; one copy for all matmuls that read it. A copy that is only saved passes no gradient."""
    if x.index not in w.quantised:
        product = w.run.precision.gemm_inputs
        assert product is not None
        w.quantised[x.index] = w.tape.op(QUANTISE, [x], dtype=product, grad=False)
    return w.quantised[x.index]


def batched_matmul(
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
    """a @ b for two activations: backward needs both. ``contracted``: local elements summed over.

    ``inner``: part of another op, inside of which autocast does not apply.
    """
    if w.run.precision.casts and not inner:
        a, b, dtype = for_matmul(w, a), for_matmul(w, b), w.matmul_dtype
    kept = [Saved(b, roles[1], reference)] if a.grad else []
    kept += [Saved(a, roles[0], reference)] if b.grad else []
    return w.tape.op(
        "aten.bmm.default", [a, b], shape, dtype=dtype or w.compute, places=places, saves=kept, contracted=contracted
    )


def dropout(w: Writer, x: Value, *, site: bool, reference: str = "") -> Value:
    """Dropout if the architecture has it at this site and the run enables it."""
    return _dropped(w, x, "dropout mask", reference) if site and w.run.dropout else x


def _dropped(w: Writer, x: Value, role: str, reference: str = "") -> Value:
    """Dropout, which saves its mask."""
    if w.kernels.byte_masks:
        out = w.tape.empty(x.shape, x.dtype, x.places, grad=x.grad)
        mask = w.tape.empty(x.shape, "bool", x.places)
        kept = [Saved(mask, role, reference)]
        w.tape.record("aten.native_dropout.default", [x, w.random()], [out, mask], saves=kept)
        return out
    mask = w.tape.op("aten.bernoulli.p", [x, w.random()], grad=False)
    return w.tape.op("aten.mul.Tensor", [x, mask], saves=[Saved(mask, role, reference)])


def enter(w: Writer, x: Value) -> tuple[Value, Value]:
    """Enter a tensor-parallel block: the unsharded x, and the tensor that a column-parallel matmul saves of it.

    The operator g of arXiv 2205.05198 §4.2.2: all-gather along s, whose backward is a reduce-scatter. Without sequence
    parallelism it is f: no op in forward, an all-reduce in backward.
    """
    layout, step = w.run.layout, len(w.tape.steps)
    if w.tp == 1:
        return x, x
    if not layout.sp:
        w.tape.collectives.append(Collective("all_reduce", "tp", x.nbytes, backward=True, step=step))
        return x, x
    if not layout.gathered_inputs:
        x = for_matmul(w, x)  # cast once for all readers: `parallel.styles.gather_input`
    whole = w.tape.collective("all_gather_into_tensor", "tp", x, w.inside(), backward="reduce_scatter_tensor")
    if layout.gathered_inputs:
        return whole, whole
    w.tape.collectives.append(Collective("all_gather_into_tensor", "tp", whole.nbytes, backward=True, step=step))
    return whole, x


def leave(w: Writer, y: Value) -> Value:
    """Leave a tensor-parallel block: partial sums over tp become the residual stream. The operator g-bar."""
    if w.run.layout.sp:
        return w.tape.collective("reduce_scatter_tensor", "tp", y, w.outside(), backward="all_gather_into_tensor")
    return w.tape.collective("all_reduce", "tp", y, y.places, backward=None)


def discrete(w: Writer, x: Value, name: str, shape: tuple[int, ...]) -> Value:
    """A discrete choice, which must not be recomputed."""
    return w.tape.op(name, [x], shape, "int64", grad=False, anchor=Anchor.DISCRETE)
