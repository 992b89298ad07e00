"""The end of a model: the final norm, the LM head, and the loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from types import MappingProxyType
from typing import Final

from jettison.core.units import GIB
from jettison.formula.embedding import FEATURES
from jettison.formula.mlp import activation
from jettison.formula.norm import norm
from jettison.formula.ops import add, batched_matmul, cast, discrete, dropout, enter, linear, multiply, power, scale
from jettison.formula.tape import Saved, Value, Weight, Writer
from jettison.spec.fine_tuning import HEAD
from jettison.spec.kernels import Device, Loss
from jettison.spec.model import Audio, Pair, Pooling

EXTRA = "arXiv 2205.05198 §4.3"
IN_ROWS: Final = "rows_cross_entropy"


def head(w: Writer, x: Value) -> Value:
    """Final norm, head and loss, from the residual stream."""
    model = w.run.model
    if model.head.pooling is not Pooling.NONE:
        return classify(w, x)
    if model.pair is not None:
        return contrast(w, x, model.pair)
    if model.mtp_num_layers:
        return _with_further(w, x)
    if model.final_norm is not None:
        x = norm(w, x, model.final_norm, "norm")
        x = cast(w, x, w.compute) if model.fp32_residual else x
    x = dropout(w, x, site=model.dropout_sites.output)
    if model.audio is not None:
        return align(w, x, model.audio)
    last, x = x, scale(w, x) if model.head.scaled else x
    if model.head.transform is not None and model.embedding_norm is not None:
        x = linear(w, x, model.hidden, "transform", bias=model.head.transform_bias)
        x = norm(w, activation(w, x, model.head.transform), model.embedding_norm, "transform_norm")
    if w.kernels.loss in (Loss.TILED, Loss.DPO):
        return _tiled(w, x)
    if w.kernels.loss in (Loss.FUSED, Loss.CHUNKED, Loss.CHUNKED_OUTPUT):
        return _without_logits(w, x)
    unkept = w.run.precision.casts is not None or w.run.tuning is not None
    return _from_logits(w, x, named=(last, x) if w.kernels.model_code and unkept else ())


def _from_logits(w: Writer, x: Value, weight: Weight | None = None, named: tuple[Value, ...] = ()) -> Value:
    """Logits and their loss.

    Args:
        weight: the head's weight, if the region has declared it before.
        named: values that the model's own forward references until it returns, where the head saves a copy of them or,
            frozen, nothing: ``modeling_llama.py``, ``LlamaForCausalLM.forward``: ``outputs``, ``hidden_states``;
            ``modeling_t5.py``, ``T5ForConditionalGeneration.forward``: ``decoder_outputs``, ``sequence_output``. A
            training loop's own loss comes after that.
    """
    model = w.run.model
    whole, kept = enter(w, x)
    logits = linear(
        w,
        whole,
        model.vocab,
        "logits",
        bias=model.head.bias,
        split="column",
        keeps=kept,
        tied=model.tied_embeddings,
        head=True,
        weight=weight,
        reference=f"{EXTRA}, output layer: 2sbh",
    )
    if model.head.softcap:
        tanh = w.tape.op("aten.tanh.default", [scale(w, logits)], keeps="capped logits")
        logits = scale(w, tanh)  # c * tanh(logits / c): Gemma 2
    if w.kernels.biased_logits and w.run.precision.casts:  # modeling_bart.py: lm_logits + self.final_logits_bias
        logits = cast(w, logits, "float32")
    w.tape.returned.append(logits)
    outside = w.kernels.loss.in_loop
    if outside:
        w.tape.name(*named)
    loss = _LOSSES[w.kernels.loss](w, logits, _labels(w))
    if named and not outside:
        w.tape.name(*named)
    return loss


def classify(w: Writer, x: Value) -> Value:
    """One prediction a sequence. A norm that only other uses of the model need runs all the same."""
    model = w.run.model
    batch = (w.run.micro_batch, model.hidden)
    if model.head.pooling is Pooling.FIRST:
        x = x if model.final_norm is None else norm(w, x, model.final_norm, "norm")
        x = w.tape.view(x, batch)
    else:
        if model.final_norm is not None:
            norm(w, w.tape.view(x, batch), model.final_norm, "norm")
        x = w.tape.op("aten.mean.dim", [x], batch, places=())
    logits = linear(w, x, model.vocab, "logits", bias=model.head.bias, head=True)
    return _upcast(w, logits, w.tape.source("labels", batch[:1], "int64"))


def score(w: Writer, x: Value) -> Value:
    """One number for each position: ``transformers/modeling_layers.py``, ``GenericForSequenceClassification``."""
    if w.run.model.final_norm is not None:
        x = cast(w, norm(w, x, w.run.model.final_norm, "norm"), w.compute)
    whole, kept = enter(w, x)
    return linear(w, whole, 1, "score", bias=False, keeps=kept, head=True)


def _with_further(w: Writer, x: Value) -> Value:
    """One loss for each depth, those of MTP first: NOTE [ Multi-token prediction ] in `formula.region`."""
    model = w.run.model
    parts = [w.tape.view(x, w.shape(model.hidden)) for _ in range(model.mtp_num_layers + 1)]
    total = _from_logits(w, parts[0])
    weight = next(one for one in w.tape.weights if one.head)
    for part in parts[1:]:
        total = add(w, _from_logits(w, part, weight), total)
    return total


def _labels(w: Writer) -> Value:
    """Next tokens. Padded and shifted within the model, a single sequence's are a view of the padded labels."""
    shape = w.shape()
    padded_once = w.kernels.shifted_labels and not _copies_logits(w)
    if not padded_once or w.run.micro_batch > 1 or w.run.layout.cp > 1:  # cp: shifted before sharding
        return w.tape.source("labels", shape, "int64", w.inside())
    padded = w.tape.source("labels", (1, w.run.seq + 1), "int64")
    return w.tape.view(padded, shape, w.inside())


def _copies_logits(w: Writer) -> bool:
    return w.kernels.copied_logits and w.kernels.shifted_labels and w.run.layout.cp == 1


def _autocast_loss(w: Writer) -> bool:
    """Whether the loss is in 16 bits although on autocast's fp32 list, since layers of a frozen base need no cast."""
    precision = w.run.precision
    mixed = w.run.tuning is not None and precision.parameter == "float32" != precision.compute
    return mixed and w.kernels.model_code and w.kernels.device is not Device.CPU


def _without_last(w: Writer, logits: Value, wide: Value, labels: Value) -> tuple[Value, Value, list[Value]]:
    """Input of the loss, copied if without a sequence's last position; and values that its function references."""
    named = [wide if w.kernels.fp32_logits else logits]
    if (w.kernels.loss is Loss.IN_LOOP and w.kernels.loss_float32) or not _copies_logits(w):
        return wide, labels, named
    b, s, width = wide.shape
    copied = w.tape.op("aten.clone.default", [wide], (b, s - 1, width))
    return copied, w.tape.op("aten.clone.default", [labels], (b, s - 1), grad=False), [*named, wide]


def _gathered(w: Writer, logits: Value) -> Value:
    """Logits of the full vocabulary, all-gathered."""
    return w.tape.collective("all_gather_into_tensor", "tp", logits, w.inside(), backward=None) if w.tp > 1 else logits


def _upcast(w: Writer, logits: Value, labels: Value) -> Value:
    """torch's cross_entropy on fp32 logits: the log-softmax is saved, 4sbV. Sharded logits are all-gathered first.

    transformers before 4.49 dropped the last position of logits, not of labels (``logits[..., :-1, :].contiguous()``):
    a copy in addition to the logits, whose gradient is put into zeros of their shape. Before 4.46 the model's forward
    held the only reference (``logits = logits.float()`` in ``modeling_llama.py``, ``LlamaForCausalLM.forward``), and
    returned it; since then a function holds it (``loss/loss_utils.py``), while the model holds the 16-bit logits.
    """
    logits = _gathered(w, logits)
    wide = cast(w, logits, "float32") if w.kernels.loss_float32 and w.kernels.loss is not Loss.UNCAST else logits
    if w.kernels.fp32_logits:
        w.tape.returned = [wide]
    wide, labels, named = _without_last(w, logits, wide, labels)
    widens = w.run.precision.casts or _autocast_loss(w) or w.kernels.loss is Loss.IN_LOOP
    wide = cast(w, wide, "float32") if widens else wide
    loss = _cross_entropy(w, _log_softmax(w, wide, f"{EXTRA}: 4sbv"), labels)
    w.tape.name(*named)  # arguments of the function that casts or copies them
    return loss


def _log_softmax(w: Writer, wide: Value, reference: str = "") -> Value:
    return w.tape.op("aten._log_softmax.default", [wide], keeps="log-softmax output", reference=reference, grad=True)


def _cross_entropy(w: Writer, rows: Value, labels: Value) -> Value:
    """The loss of log-softmax rows."""
    loss, weight = w.tape.empty((), rows.dtype, grad=True), w.tape.empty((), rows.dtype)
    kept = [Saved(rows, "log-softmax output"), Saved(labels, "labels"), Saved(weight, "loss weight")]
    w.tape.record("aten.nll_loss_forward.default", [rows, labels], [loss, weight], saves=kept)
    return loss


ROWS, DEVICE_CHUNKS, CPU_CHUNK_BYTES, SMALLEST_BYTES = 16, 32, 2 * 1024**2, 4 * 1024**2
"""Chunking of `runtime.chunked_loss`: rows' multiple, chunks' number or size, least logits. A test compares both."""


def _rows(w: Writer, logits: Value, labels: Value) -> Value:
    """torch's cross_entropy over chunks of rows: NOTE [ Cross entropy in chunks ] in `runtime.chunked_loss`.

    Forward has the logits, whose 16-bit form the caller holds, and one chunk of their log-softmax. Backward recomputes
    that and its gradient chunk by chunk, and writes the gradient of the logits over them.
    """
    logits = _gathered(w, logits)
    wide = cast(w, logits, "float32") if w.kernels.loss_float32 or w.run.precision.casts else logits
    if wide.nbytes < SMALLEST_BYTES:
        return _upcast(w, wide, labels)
    row = wide.nbytes // prod(wide.local_shape[:-1])
    size = CPU_CHUNK_BYTES if w.kernels.device is Device.CPU else wide.nbytes // DEVICE_CHUNKS
    chunk = w.tape.empty((max(ROWS, size // row // ROWS * ROWS), wide.shape[-1]), wide.dtype)
    loss, weight = w.tape.empty((), wide.dtype, grad=True), w.tape.empty((), wide.dtype)
    found = w.tape.empty((*wide.shape[:-1], 1), wide.dtype, labels.places)
    kept = [
        Saved(wide, "logits", f"{EXTRA}: 4sbv"),
        Saved(labels, "labels"),
        Saved(found, "log-softmax at the labels"),
        Saved(weight, "loss weight"),
    ]
    outputs = [loss, chunk, found, weight]
    w.tape.record(
        IN_ROWS, [wide, labels, _unread(logits)], outputs, saves=kept, workspace=2 * chunk.nbytes, in_place=True
    )
    return loss


_OVER_SHARDS: Final = MappingProxyType(
    {
        # Megatron's: ``megatron/core/tensor_parallel/cross_entropy.py``: ``logits.float()``, then in place ``-=``,
        # ``torch.exp(..., out=)`` and ``div_``; ``prepare_gradient_calculation_operands`` takes the softmax for the
        # gradient and multiplies it in place. One fp32 buffer from the cast to the gradient, and 16-bit logits or
        # their gradient: 6 bytes a logit at the most.
        Loss.VOCAB_PARALLEL: (None, "vocab_parallel_cross_entropy"),
        # Megatron's ``--cross-entropy-loss-fusion`` with the implementation "native",
        # ``megatron/core/fusions/fused_cross_entropy.py``: each piece is compiled, and a compiled piece returns new
        # tensors: exponentials in addition to fp32 logits and the caller's 16-bit logits: 10 bytes a logit. The
        # gradient is made in bf16 directly.
        Loss.NATIVE: ("fused_cross_entropy.exp", "fused_vocab_parallel_cross_entropy"),
        # nanotron's, ``parallel/tensor_parallel/functional.py``, ``_ShardedCrossEntropy.forward``: ``sharded_logits =
        # sharded_logits - logits_max...``, from there on in place. ``models/llama.py``, ``LlamaForTraining.forward``,
        # references the fp32 logits meanwhile: 8 bytes a logit. Backward writes the gradient over the softmax.
        Loss.SHARDED: ("aten.sub.Tensor", "sharded_cross_entropy"),
    }
)
"""Losses over a sharded vocabulary with a saved fp32 softmax, 4sbV/t: the op that copies fp32 logits, and the loss."""


def _over_shards(w: Writer, logits: Value, labels: Value) -> Value:
    loss, (copying, name) = w.kernels.loss, _OVER_SHARDS[w.kernels.loss]
    softmax = wide = cast(w, logits, "float32")
    if copying is not None:
        held = [_unread(logits)] if loss is Loss.NATIVE else []
        softmax = w.tape.op(copying, [wide, *held], passes=loss is Loss.SHARDED)
    found = _sharded(w, softmax, labels, name)
    if loss is Loss.SHARDED:
        w.tape.name(wide)
    return found


def _sharded(w: Writer, wide: Value, labels: Value, name: str) -> Value:
    """Softmax written over ``wide``, as is its gradient."""
    mask = w.tape.empty(labels.shape, "bool", labels.places)
    target = w.tape.empty(labels.shape, "int64", labels.places)
    loss = w.tape.empty((), "float32", grad=True)
    kept = [
        Saved(wide, "softmax output", f"{EXTRA}, fp32 logits of the loss: 4sbv"),
        Saved(mask, "target mask"),
        Saved(target, "masked targets"),
    ]
    w.tape.record(name, [wide, labels], [loss, mask, target], saves=kept, in_place=True)
    return loss


def _in_forward(w: Writer, logits: Value, labels: Value) -> Value:
    """One kernel whose forward writes the gradient over the logits, which is saved; backward scales it in place.

    TransformerEngine's ``parallel_cross_entropy``, versions 2.0 to 2.14 (``pytorch/triton/cross_entropy.py``,
    ``cross_entropy_forward``): 2 bytes a logit, before and after. (From 2.18 on it is fp32, apart.) Liger-Kernel's
    ``cross_entropy=True`` (ead96b6, ``ops/cross_entropy.py``) gets what ``ForCausalLMLoss`` casts to fp32: 6 bytes.
    """
    uncast = w.kernels.loss is Loss.TE
    logits = logits if uncast else cast(w, logits, "float32")
    kept = [Saved(logits, "gradient of the logits")]
    name = f"{'te_parallel' if uncast else 'in_forward'}_cross_entropy"
    return w.tape.op(name, [logits, labels], (), "float32", (), saves=kept, grad=True, in_place=True)


def _in_place(w: Writer, logits: Value, labels: Value) -> Value:
    """One Triton kernel, which saves logits and a number a row, and writes the gradient over them.

    unslothai/unsloth, ``unsloth/kernels/cross_entropy_loss.py``, ``Fast_CrossEntropyLoss``. fms-acceleration runs it
    after the cast and the copy of transformers (``kernels/unsloth/cross_entropy_loss.py``, ``FastForCausalLMLoss``).
    Under autocast accelerate returns an fp32 copy of the logits (``utils/operations.py``, ``convert_outputs_to_fp32``),
    which other losses' own copies exceed.
    """
    wide = cast(w, logits, "float32") if w.kernels.copied_logits and w.kernels.loss_float32 else logits
    wide, labels, named = _without_last(w, logits, wide, labels)
    row = w.tape.empty((*wide.shape[:-1], 1), "float32")
    loss = w.tape.empty((), "float32", grad=True)
    kept = [Saved(wide, "logits"), Saved(labels, "labels"), Saved(row, "softmax statistics")]
    w.tape.record("in_place_cross_entropy", [wide, labels], [loss, row], saves=kept, in_place=True)
    w.tape.name(*named)
    if w.kernels.loss_float32 and (w.run.precision.casts or _autocast_loss(w)):
        cast(w, _unread(logits), "float32")
    return loss


def _compiled(w: Writer, logits: Value, labels: Value) -> Value:
    """torch's cross_entropy under torch.compile: no fp32 logits.

    Inductor fuses the cast, the row's maximum and sum of exponentials into one reduction over the 16-bit logits; the
    partitioner keeps the logits and two numbers a row, and backward writes a 16-bit gradient in one kernel. Sharded
    logits are all-gathered first, as without compilation.
    """
    logits = _gathered(w, logits)
    rows = [w.tape.empty((*logits.shape[:-1], 1), "float32", labels.places) for _ in range(2)]
    loss = w.tape.empty((), "float32", grad=True)
    kept = [Saved(logits, "logits"), Saved(labels, "labels"), *(Saved(row, "softmax statistics") for row in rows)]
    w.tape.record("compiled_cross_entropy", [logits, labels], [loss, *rows], saves=kept)
    return loss


def _dtensor(w: Writer, logits: Value, labels: Value) -> Value:
    """torch's ``loss_parallel`` over a vocabulary that DTensor shards: the log-softmax stays, 4sbv/t.

    ``torch/distributed/tensor/parallel/loss.py``: forward makes ``shifted``, its exponentials and the log-softmax;
    ``_nll_loss_and_log_softmax_backward`` has the log-softmax, ``grad_input``, ``torch.exp(x)`` and their sum at once:
    four fp32 copies of a rank's logits.
    """
    rows = w.tape.op("loss_parallel.log_softmax", [cast(w, logits, "float32")], grad=True, passes=True)
    kept, copies = [Saved(rows, "log-softmax output", f"{EXTRA}: 4sbv"), Saved(labels, "labels")], 2 * rows.nbytes
    name = "loss_parallel.nll_loss"
    return w.tape.op(name, [rows, labels], (), "float32", (), saves=kept, grad=True, workspace=copies)


def _unread(x: Value) -> Value:
    """x as an input through which no gradient passes."""
    return replace(x, grad=False)


_LOSSES: Final[Mapping[Loss, Callable[[Writer, Value, Value], Value]]] = MappingProxyType(
    {
        **dict.fromkeys((Loss.UPCAST, Loss.IN_LOOP, Loss.UNCAST), _upcast),
        **dict.fromkeys(_OVER_SHARDS, _over_shards),
        **dict.fromkeys((Loss.TE, Loss.IN_FORWARD), _in_forward),
        Loss.CHUNKED_CE: _rows,
        Loss.IN_PLACE: _in_place,
        Loss.COMPILED: _compiled,
        Loss.DTENSOR: _dtensor,
    }
)

TILE_TOKENS, TILE_WORDS = 4096, 32768
"""Rows of a tile. TRL: ``kernels/chunked_logprob.py``, ``TOKEN_CHUNK_SIZE``; ``utils.py``, ``add_fused_lm_head``."""


def _tiled(w: Writer, x: Value) -> Value:
    """Log-probabilities of tokens by tiles of logits: TRL 1.16, ``ChunkedLogProbFunction``.

    ``add_fused_lm_head`` takes the rows whose next token counts (``hidden_states[mask]``), a copy: here all but the
    last of each sequence. Saved are that copy, targets, and two numbers a row: the log of the sum, and the entropy for
    the log. Backward recomputes each tile and adds up both gradients in fp32, the head weight's unsharded.
    """
    model, batch, rows = w.run.model, w.run.micro_batch, w.run.seq - 1
    with w.tape.scope("logits"):
        sizes = model.vocab, model.hidden
        weight = w.parameter("weight", *sizes, tied=model.tied_embeddings, gemm=True, head=True, module=HEAD)
    scored = w.tape.op("aten.index.Tensor", [x], (batch * rows, model.hidden))
    targets = w.tape.op("aten.index.Tensor", [_labels(w)], (batch * rows,))
    numbers = [w.tape.empty((batch * rows,), "float32") for _ in range(2)]
    loss = w.tape.empty((), "float32", grad=True)
    tile = w.tape.empty((min(batch * rows, TILE_TOKENS), TILE_WORDS), w.matmul_dtype)
    workspace = tile.nbytes + (4 * batch * rows * model.hidden if scored.dtype != "float32" else 0)
    workspace += 4 * weight.numel if not weight.frozen and weight.nbytes < 4 * weight.numel else 0
    kept = [Saved(scored, "scored rows"), Saved(targets, "targets")]
    kept += [Saved(each, name) for each, name in zip(numbers, ("log of the sum", "entropy"), strict=True)]
    name, made, flops = "tiled_log_probabilities", [loss, *numbers, tile], 2 * batch * rows * weight.numel
    w.tape.record(name, [scored, targets], made, saves=kept, weights=[weight], flops=flops, workspace=workspace)
    return loss


def _without_logits(w: Writer, x: Value) -> Value:
    """Head and loss together. FUSED makes gradients at once: dx and dW are saved. CHUNKED saves x and recomputes.

    A chunk's logits live while it is computed: FUSED's in the forward, where Liger's gradient overwrites them.

    CHUNKED_OUTPUT saves the logits as well: the model returns a list of chunks of them in the matmuls' dtype, and the
    compiled loss reads them (torchtune, ``CEWithChunkedOutputLoss``; its pull request 1390). Backward has the gradients
    of all chunks before the first matmul of the head, and adds up those of its weight.
    """
    model = w.run.model
    whole, kept = enter(w, x)
    with w.tape.scope("logits"):
        weight = w.parameter("weight", model.vocab, model.hidden, split=0, tied=model.tied_embeddings, module=HEAD)
    labels = _labels(w)
    tokens = whole.local_shape[0] * whole.local_shape[1]
    vocab = weight.numel // model.hidden
    flops = 2 * tokens * weight.numel
    loss, workspace = w.tape.empty((), "float32", grad=True), 8 * -(-tokens // w.kernels.loss_chunks) * vocab
    if w.kernels.loss is Loss.FUSED:
        dx = w.tape.empty(whole.shape, whole.dtype, whole.places)
        name, kept_now, made = "fused_linear", [Saved(dx, "gradient of the head's input")], [loss, dx]
        if not weight.frozen:
            made.append(w.tape.empty(weight.shape, w.matmul_dtype, weight.places))
            kept_now.append(Saved(made[-1], "gradient of the head's weight"))
        flops *= len(made)
        if most := w.kernels.chunk_gib * GIB:  # unsloth_zoo, fused_losses/cross_entropy_loss.py, get_chunk_size
            chunks = -(-4 * tokens * vocab // most)
            rows = -(-tokens // (-(-chunks // 4) * 4)) if chunks > 1 else tokens
            made.append(w.tape.empty((2, rows, vocab), w.matmul_dtype))  # logits and their gradient, compiled
        else:  # Liger-Kernel, ops/fused_linear_cross_entropy.py
            rows = -(-tokens // -(-vocab // model.hidden))
            made.append(w.tape.empty((min(1 << (rows - 1).bit_length(), tokens), vocab), w.matmul_dtype))
        workspace = 0
    else:
        name, made = w.kernels.loss.replace("-", "_"), [loss]
        listed, wide = w.kernels.loss is Loss.CHUNKED_OUTPUT, w.kernels.fp32_logits
        kept_now = [Saved(labels, "labels")]
        if not (listed and weight.frozen):  # a frozen head's matmuls save their weight alone
            kept_now.insert(0, Saved(kept, "linear input"))
        if listed:
            places = w.on_tp(2)
            made.append(w.tape.empty((*whole.shape[:-1], model.vocab), "float32" if wide else w.matmul_dtype, places))
            kept_now.append(Saved(made[-1], "logits", "16-bit logits: 2sbV"))
            if wide:  # the loop references fp32 logits, and each chunk's log-softmax is saved
                made.append(w.tape.empty((*whole.shape[:-1], model.vocab), "float32", places))
                kept_now.append(Saved(made[-1], "log-softmax output"))
            else:  # a chunk's gradient; or, as the second chunk has one, a second gradient of the weight
                chunk = made[-1].nbytes // w.kernels.loss_chunks
                workspace = max(chunk, 0 if weight.frozen else weight.nbytes - chunk)
    name = f"{name}_cross_entropy"
    w.tape.record(name, [whole, labels], made, saves=kept_now, weights=[weight], flops=flops, workspace=workspace)
    return loss


# Contrastive loss of images and texts: arXiv 2103.00020 §2.3 and transformers' ``models/clip/modeling_clip.py`` -------
#
# Each rank compares its own batch.


def contrast(w: Writer, x: Value, pair: Pair) -> Value:
    """Project the last layer of texts, and compute the loss over the rows of a micro-batch."""
    model, batch = w.run.model, w.run.micro_batch
    if model.final_norm is not None:
        x = norm(w, x, model.final_norm, "norm")
    ids = w.table("token ids", w.shape(), "int64")
    rows = w.tape.op("aten.arange.default", [ids], (batch,), grad=False)
    ends = discrete(w, ids, "aten.argmax.default", (batch,))
    kept = [Saved(rows, "row indices"), Saved(ends, "sequence ends")]
    last = w.tape.op("aten.index.Tensor", [x, rows, ends], (batch, model.hidden), places=(), saves=kept)
    text = linear(w, last, pair.width, "projection", bias=False, head=True)
    image = w.tape.source(FEATURES, (batch, pair.width), w.matmul_dtype, grad=True, free=True)
    image, text = (_direction(w, each) for each in (image, text))
    roles = ("text direction", "image direction")
    logits = batched_matmul(w, text, image, (batch, batch), (), pair.width, roles)
    logits = multiply(w, logits, _temperature(w), ("logits", "temperature"))
    losses = [_of_rows(w, each, rows) for each in (logits, w.tape.view(logits, logits.shape))]
    return scale(w, add(w, *losses))


def _direction(w: Writer, x: Value) -> Value:
    """x divided by its norm."""
    square = power(w, x, "features")
    length = power(w, w.tape.op("aten.sum.dim_IntList", [square], (x.shape[0], 1)), "squared length")
    return w.tape.op("aten.div.Tensor", [x, length], saves=[Saved(length, "norms"), Saved(x, "features")])


def _temperature(w: Writer) -> Value:
    """The exponential of the learned logit scale."""
    weight = w.parameter("temperature")
    held = w.read(weight, "temperature")
    return w.tape.op("aten.exp.default", [cast(w, held, w.compute)], keeps="temperature", weights=[weight])


def _of_rows(w: Writer, logits: Value, rows: Value) -> Value:
    """Cross entropy in which each row's own column is the target."""
    found = _log_softmax(w, cast(w, logits, "float32") if w.kernels.loss_float32 else logits)
    return _cross_entropy(w, found, w.tape.op("aten.arange.default", [rows], grad=False))


# Connectionist temporal classification (CTC) -------------------------------------------------------------------------


def align(w: Writer, x: Value, spec: Audio) -> Value:
    """Logits, and the CTC loss over all alignments of a text with them.

    ``torch.nn.functional.ctc_loss``, which keeps log-probabilities in fp32 and a row of 2 labels + 1 for each token.
    """
    model, b, s = w.run.model, w.run.micro_batch, w.run.seq
    whole, kept = enter(w, x)
    logits = linear(
        w, whole, model.vocab, "logits", bias=model.head.bias, split="column", keeps=kept, head=True, role="head input"
    )
    if w.tp > 1:
        logits = w.tape.collective("all_gather_into_tensor", "tp", logits, w.inside(), backward="reduce_scatter_tensor")
    rows = _log_softmax(w, cast(w, logits, "float32"))
    labels = spec.labels(spec.heard(w.run.source_seq, w.run.seq))
    numbers = [w.tape.source(name, (b,), "int64") for name in ("lengths of sequences", "lengths of labels")]
    targets = w.tape.source("labels", (b * labels,), "int64")
    loss = w.tape.empty((b,), "float32", grad=True)
    alphas = w.tape.empty((b, s, 2 * labels + 1), "float32")
    kept_now = [Saved(rows, "log-softmax output"), Saved(loss, "losses"), Saved(alphas, "sums over alignments")]
    kept_now += [Saved(one, "labels") for one in (*numbers, targets)]
    w.tape.record(
        "aten._ctc_loss.Tensor", [rows, targets, *numbers], [loss, alphas], saves=kept_now, workspace=alphas.nbytes
    )
    if spec.zero_infinity:
        endless = w.tape.op("aten.eq.Scalar", [loss], dtype="bool", grad=False)
        loss = w.tape.op("aten.where.self", [loss, endless], saves=[Saved(endless, "infinite losses")])
    if spec.mean_loss:
        divisor = w.tape.op("aten.clamp_min.default", [numbers[1]], grad=False)
        loss = w.tape.op("aten.div.Tensor", [loss, divisor], saves=[Saved(divisor, "loss divisor")])
    return w.tape.op("aten.sum.default", [loss], ())
