"""State-space (SSM) and linear-attention layers: as one kernel, and op by op as in transformers.

The kernels: flash-linear-attention bc3b101d (``fla/ops/gated_delta_rule/chunk.py``, ``ChunkGatedDeltaRuleFunction``),
mamba e9594ce1 (``mamba_ssm/ops/triton/ssd_combined.py``, ``MambaSplitConv1dScanCombinedFn``) and causal-conv1d
(``CausalConv1dFn``: input and weights). Each lists its saved tensors in ``ctx.save_for_backward``; backward recomputes
the rest, of which the largest are counted: states and their gradients, and the tensors made of keys and values or by
the convolution. FLOPs are those of the mathematics. Seconds come from the bytes read and written, or from the FLOPs at
the rate that scans reach (`Reached.scan`), if a device's file has it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from jettison.core.dtypes import DTYPE_BYTES
from jettison.formula.mlp import activation
from jettison.formula.norm import norm, root_mean_square
from jettison.formula.ops import (
    WEIGHT_COPY,
    add,
    batched_matmul,
    cast,
    convolution,
    copy,
    enter,
    leave,
    linear,
    multiply,
    scale,
    weigh,
    weight_copies,
)
from jettison.formula.tape import Saved, Value, Weight, Writer
from jettison.ledger.ledger import EACH_ROUND
from jettison.spec.kernels import SsmKernels
from jettison.spec.model import Activation, GatedDelta, Norm, NormKind, SelectiveScan, StateSpaceDual

FP32 = "float32"
DELTA = "flash-linear-attention, ChunkGatedDeltaRuleFunction"
SPLIT = "mamba-ssm, MambaSplitConv1dScanCombinedFn"


def fused_convolution(w: Writer, x: Value, channels: int, taps: int) -> Value:
    """b × s × C, with its activation."""
    b, s = w.run.micro_batch, w.run.seq
    with w.tape.scope("convolution"):
        return w.tape.op(
            "causal_conv1d",
            [x],
            (b, s, channels),
            saves=[Saved(x, "convolution input")],
            weights=[w.parameter("weight", channels, 1, taps)],
            contracted=taps,
        )


def fused_delta(w: Writer, mixed: Value, strength: Value, rate: Value, spec: GatedDelta) -> Value:
    """b × s × a × dv. The kernel normalises queries and keys and does not repeat them; it copies strided inputs."""
    b, s = w.run.micro_batch, w.run.seq
    keys, values = (b, s, spec.key_heads, spec.key_dim), (b, s, spec.value_heads, spec.value_dim)
    q, k = (copy(w, mixed, keys) for _ in range(2))
    v = copy(w, mixed, values)
    dtype = mixed.dtype
    out = w.tape.empty(values, dtype, grad=True)
    units = [w.tape.empty(keys, dtype) for _ in range(2)]
    roots = [w.tape.empty(keys[:-1], FP32) for _ in range(2)]
    sums = w.tape.empty(values[:-1], FP32)
    system = w.tape.empty((*values[:-1], spec.chunk), dtype)
    kept = [Saved(unit, "scan input", DELTA) for unit in units]
    kept += [Saved(root, "norm statistics", DELTA) for root in roots]
    kept += [Saved(v, "scan input", DELTA), Saved(sums, "decay", DELTA), Saved(strength, "write strength", DELTA)]
    kept += [Saved(system, "triangular system", DELTA)]
    within = spec.chunk * (3 * spec.key_dim + 2 * spec.value_dim)  # each token with its chunk
    again = prod(values[:-1]) * (spec.key_dim + 2 * spec.value_dim)
    across = 3 * spec.key_dim * spec.value_dim  # each token with the state
    w.tape.record(
        "fused_scan",
        [q, k, v, rate, strength],
        [out, *units, *roots, sums, system],
        saves=kept,
        flops=2 * prod(values[:-1]) * (within + across),
        workspace=DTYPE_BYTES[dtype] * (2 * _states(w, spec.chunk, across // 3 * spec.value_heads) + again),
    )
    return out


def fused_split(w: Writer, joint: Value, rate: Value, spec: StateSpaceDual) -> Value:
    """Convolution, scan, norm and output projection, whose input backward recomputes."""
    hidden = w.run.model.hidden
    weights = [w.parameter("dt_bias", spec.heads), w.parameter("D", spec.heads), *_convolution(w, spec)]
    with w.tape.scope("norm"):
        weights.append(w.parameter("weight", spec.inner))
    normal = w.tape.empty(w.shape(spec.inner), joint.dtype, grad=True)
    _dual(w, joint, rate, normal, spec, weights, roots=True)
    with w.tape.scope("out_proj"):
        weights = [w.parameter("weight", hidden, spec.inner, gemm=True)]
        weights += [w.parameter("bias", hidden)] if spec.bias else []
        name = "aten.addmm.default" if spec.bias else "aten.mm.default"
        copies = weight_copies(w, weights)  # the kernel casts its inputs itself
        return w.tape.op(
            name,
            [normal, *copies],
            w.shape(hidden),
            saves=[Saved(each, WEIGHT_COPY) for each in copies[:1]],
            weights=weights,
            contracted=spec.inner,
        )


def shared_split(w: Writer, joint: Value, rate: Value, spec: StateSpaceDual) -> Value:
    """Convolution, scan and gate in one kernel; the norm and the output projection are separate ops.

    Megatron-Core, ``ssm/mamba_mixer.py``, ``_ssm_training``: without ``rmsnorm_weight`` and ``outproj_weight`` the
    kernel returns its gated output in addition to the saved ``out_x``; ``RMSNormGated`` saves the gated output, and
    ``TERowParallelLinear`` the normalised one. Megatron's layout is s × b × h, copied there and back
    (``rearrange(...).contiguous()``), a no-op for one sequence. Channels, heads and groups are sharded over tp.
    """
    b, s = w.run.micro_batch, w.run.seq
    weights = [w.parameter("dt_bias", spec.heads, split=0), w.parameter("D", spec.heads, split=0, wide=True)]
    weights += _convolution(w, spec)
    places = w.on_tp(2)
    turned = copy(w, joint, (b, s, joint.shape[-1]), places) if b > 1 else joint
    gated = w.tape.empty((b, s, spec.inner), joint.dtype, places, grad=True)
    _dual(w, turned, rate, gated, spec, weights)
    gated = copy(w, gated, w.shape(spec.inner), places) if b > 1 else w.tape.view(gated, w.shape(spec.inner))
    normal = w.tape.empty(gated.shape, joint.dtype, places, grad=True)
    roots = w.tape.empty((spec.groups, b * s), FP32, (("tp", 0),) if w.tp > 1 else ())
    with w.tape.scope("norm"):
        w.tape.record(
            "aten._fused_rms_norm.default",
            [gated],
            [normal, roots],
            saves=[Saved(gated, "norm input"), Saved(roots, "norm statistics")],
            weights=[w.parameter("weight", spec.inner, split=0)],
        )
    return leave(w, linear(w, normal, w.run.model.hidden, "out_proj", bias=spec.bias, split="row"))


def _convolution(w: Writer, spec: StateSpaceDual) -> list[Weight]:
    """Weights of the convolution on its channels, which are sharded over tp."""
    with w.tape.scope("convolution"):
        weights = [w.parameter("weight", spec.convolved, 1, spec.taps, split=0)]
        return weights + ([w.parameter("bias", spec.convolved, split=0)] if spec.convolution_bias else [])


def _dual(
    w: Writer,
    joint: Value,
    rate: Value,
    out: Value,
    spec: StateSpaceDual,
    weights: list[Weight],
    *,
    roots: bool = False,
) -> None:
    """A rank's convolution and scan; the workspace of their backward: states with their gradients, and the
    convolution's output.

    Args:
        roots: a norm is part of it, whose statistics are saved.
    """
    b, s = w.run.micro_batch, w.run.seq
    scanned = w.tape.empty((b, s, spec.heads, spec.head_dim), joint.dtype, out.places)
    kept = [Saved(joint, "scan input", SPLIT), Saved(rate, "decay rate", SPLIT), Saved(scanned, "scan output", SPLIT)]
    made = [out, scanned]
    if roots:
        made.append(w.tape.empty((spec.groups, b * s), FP32))
        kept.append(Saved(made[-1], "norm statistics", SPLIT))
    tokens = b * s
    each = spec.heads * (spec.chunk * (spec.state + spec.head_dim) + 2 * spec.head_dim * spec.state)
    states = 4 * 2 * _states(w, spec.chunk, spec.inner * spec.state)
    workspace = (states + DTYPE_BYTES[joint.dtype] * tokens * spec.convolved) // w.tp
    flops = 2 * tokens * (each + spec.convolved * spec.taps) // w.tp
    w.tape.record("fused_scan", [joint, rate], made, saves=kept, weights=weights, flops=flops, workspace=workspace)


def _states(w: Writer, chunk: int, each: int) -> int:
    """Number of elements of the states before all chunks."""
    return w.run.micro_batch * -(-w.run.seq // chunk) * each


# short convolution ----------------------------------------------------------------------------------------------------
#
# A causal convolution over the last few tokens, each channel by itself, before a scan; and masked padding.
# b sequences · s tokens · C channels.


def short_convolution(w: Writer, x: Value, channels: int, taps: int, *, bias: bool) -> Value:
    """b × s × C, with SiLU. transformers' ``causal_conv1d_fn`` pads both sides, so that a longer sequence is saved."""
    b, s = w.run.micro_batch, w.run.seq
    with w.tape.scope("convolution"):
        weights = [w.parameter("weight", channels, 1, taps)]
        weights += [w.parameter("bias", channels)] if bias else []
        held = cast(w, w.tape.view(x, (b, channels, s)), w.held(frozen=weights[0].frozen))
        rows = convolution(w, held, (b, channels, s + taps - 1), weights, taps)
        out = activation(w, w.tape.view(rows, (b, channels, s)), Activation.SILU)
        return w.tape.view(cast(w, out, x.dtype), (b, s, channels))


def without_padding(w: Writer, x: Value) -> Value:
    """Zero the tokens that pad a sequence before the scan. The batch's own mask is saved."""
    if not w.run.padding:
        return x
    mask = w.table("token mask", (*x.shape[:2], 1), "int64")
    return w.tape.op("aten.mul.Tensor", [x, mask], saves=[Saved(mask, "token mask")])


# delta rule -----------------------------------------------------------------------------------------------------------
#
# The gated delta rule of transformers without kernels of flash-linear-attention:
# b sequences · s tokens, S of them once chunks are full · n chunks of c tokens · k heads of keys, a of values, whose
# widths are dk and dv. Source: ``models/qwen3_next/modeling_qwen3_next.py``, ``Qwen3NextGatedDeltaNet`` and
# ``torch_chunk_gated_delta_rule``; ``models/qwen3_5`` has the same with projections of its own.
#
# NOTE [ A loop is one op ]
# Chunks follow one another: each reads the state after the one before it. The tape has that loop as one op, and the
# tensors that its rounds save as one tensor of n: as many bytes, whatever the length. `ledger.compare` pairs it with
# the n tensors of a trace. The last round's state is computed and freed, as nothing reads it: a trace counts it, a real
# forward does not hold it, and neither does this. With one chunk that state is all of the decayed keys.
#
# NOTE [ Heads apart ]
# In 16 bits all five inputs become fp32 copies with heads outermost, which a batched matmul reads without a copy. In
# fp32 they are views with tokens outermost. Without padding, which would copy them, each matmul copies its operands,
# and the loop copies a chunk of queries and of keys in each round. If heads do not share queries and keys, these are
# views of the convolution's output, with tokens innermost: a chunk of them needs no copy.


RULE = "arXiv 2412.06464 §3.3, chunkwise form"
OPERAND, DECAY = "scan input", "decay"
DELTA_STATE, NEW, SLICE = (f"{EACH_ROUND}{what}" for what in ("state", "value", "input"))
KERNELS_OF_A_CHUNK = 9
"""Three slices' matmuls with the state or with the written values, the update's, sums, and the write of the result."""


def gated_delta(w: Writer, x: Value, spec: GatedDelta) -> Value:
    """The linear-attention block, from the normed residual stream to what is added to it."""
    b, s, channels = w.run.micro_batch, w.run.seq, 2 * spec.keys + spec.values
    with w.tape.scope("mixer"):
        qkv, z, beta, rate = _delta_project(w, without_padding(w, x), spec)
        strength = w.tape.op("aten.sigmoid.default", [beta], keeps="write strength", reference=RULE)
        if w.kernels.ssm_kernels is SsmKernels.FUSED:
            mixed = fused_convolution(w, qkv, channels, spec.taps)
            out = fused_delta(w, mixed, strength, _decay(w, rate, spec.value_heads), spec)
        else:
            mixed = short_convolution(w, qkv, channels, spec.taps, bias=False)
            decay = _decay(w, rate, spec.value_heads)
            q, k = (_heads_spread(w, w.tape.view(mixed, (b, s, spec.key_heads, spec.key_dim)), spec) for _ in range(2))
            v = w.tape.view(mixed, (b, s, spec.value_heads, spec.value_dim))
            out = _DeltaRule(w, spec).chunks(q, k, v, strength, decay)
        # each head normalised, and weighted by the gate in fp32: ``Qwen3NextRMSNormGated``
        normal = norm(w, out, Norm(kind=NormKind.RMS), "norm")
        gate = activation(w, cast(w, z, FP32), Activation.SILU)
        out = cast(w, multiply(w, normal, gate, ("normalised output", "gate"), FP32), out.dtype)
        return linear(w, w.tape.view(out, w.shape(spec.values)), w.run.model.hidden, "out_proj", bias=False)


def _delta_project(w: Writer, x: Value, spec: GatedDelta) -> tuple[Value, Value, Value, Value]:
    """Query, key and value as one tensor; output gate; write strength; decay rate. All but the first b × s × a."""
    b, s, joint = w.run.micro_batch, w.run.seq, 2 * spec.keys + spec.values
    each, per_head = (b, s, spec.value_heads), (b, s, spec.value_heads, spec.value_dim)
    if not spec.grouped:
        widths = {"in_qkv": joint, "in_z": spec.values, "in_b": spec.value_heads, "in_a": spec.value_heads}
        qkv, z, beta, rate = (linear(w, x, width, name, bias=False) for name, width in widths.items())
        return qkv, w.tape.view(z, per_head), w.tape.view(beta, each), w.tape.view(rate, each)
    both = linear(w, x, joint + spec.values, "in_qkvz", bias=False)
    rates = linear(w, x, 2 * spec.value_heads, "in_ba", bias=False)
    z = w.tape.view(both, per_head)
    if 1 < spec.key_heads < spec.value_heads:  # heads of one group are contiguous, groups are not
        z = copy(w, z)
    beta, rate = (w.tape.view(rates, each) for _ in range(2))
    return w.tape.op("aten.cat.default", [both], w.shape(joint)), z, beta, rate


def _heads_spread(w: Writer, x: Value, spec: GatedDelta) -> Value:
    """Queries or keys, repeated for each head of values."""
    if spec.key_heads == spec.value_heads:
        return x
    return w.tape.op("aten.repeat_interleave.self_int", [x], (*x.shape[:2], spec.value_heads, spec.key_dim))


def _decay(w: Writer, rate: Value, heads: int) -> Value:
    """-exp(A_log) softplus(rate + dt_bias): b × s × a, the logarithm of the state's decay."""
    bias = w.parameter("dt_bias", heads)
    wide = w.tape.op("aten.add.Tensor", [cast(w, rate, FP32)], weights=[bias])
    step = w.tape.op("aten.softplus.default", [wide], saves=[Saved(wide, "time step input")])
    return multiply(w, step, negative_rate(w, heads), ("time step", "decay rate"))


def negative_rate(w: Writer, *shape: int) -> Value:
    """-exp(A_log), computed in each call."""
    weight = w.parameter("A_log", *shape, split=0)
    held = w.read(weight, "A_log")
    rate = w.tape.empty(shape, FP32, weight.places, grad=held.grad)
    wide = cast(w, held, FP32)
    w.tape.record("aten.exp.default", [wide], [rate], saves=[Saved(rate, "decay rate")], weights=[weight])
    return w.tape.op("aten.neg.default", [rate])


def _column(w: Writer, x: Value) -> Value:
    return w.tape.view(x, (*x.shape, 1))


def _exp(w: Writer, x: Value, reference: str, *, kept: bool = True) -> Value:
    grad = x.grad and kept
    return w.tape.op("aten.exp.default", [x], None, FP32, (), keeps=DECAY, reference=reference, grad=grad)


@dataclass(frozen=True, slots=True)
class _DeltaRule:
    """The delta rule over chunks, all of it in fp32."""

    w: Writer
    spec: GatedDelta

    @property
    def count(self) -> int:
        """n."""
        return -(-self.w.run.seq // self.spec.chunk)

    @property
    def heads(self) -> tuple[int, int]:
        """b × a, the batch of matmuls."""
        return self.w.run.micro_batch, self.spec.value_heads

    @property
    def slices_copied(self) -> bool:
        """See NOTE [ Heads apart ]."""
        return self._tokens_outermost and self._spread and all(size > 1 for size in self.heads)

    @property
    def operands_copied(self) -> bool:
        """See NOTE [ Heads apart ]."""
        batch, heads = self.heads
        several = (heads > 1 and (batch > 1 or self.count > 1)) if self._spread else self.count > 1 < batch * heads
        return self._tokens_outermost and several

    @property
    def _tokens_outermost(self) -> bool:
        return self.w.matmul_dtype == FP32 and self.w.run.seq % self.spec.chunk == 0

    @property
    def _spread(self) -> bool:
        """Whether heads share keys, of which each gets a copy."""
        return self.spec.key_heads < self.spec.value_heads

    def chunks(self, q: Value, k: Value, v: Value, strength: Value, rate: Value) -> Value:
        """b × s × a × dv. Arguments have tokens before heads."""
        w, tape, (b, a) = self.w, self.w.tape, self.heads
        q, k, v, strength, rate = (self._heads_first(each) for each in (q, k, v, strength, rate))
        q, k = scale(w, self._unit(q)), self._unit(k)
        q, k, v, strength, rate = (self._filled(each) for each in (q, k, v, strength, rate))
        written, kept = (multiply(w, x, _column(w, strength), (OPERAND, "write strength")) for x in (v, k))
        q, k, written, kept = (self._chunked(x) for x in (q, k, written, kept))
        sums = tape.op("aten.cumsum.default", [self._chunked(rate)])
        pairs = self._pairs(sums)
        system = multiply(w, self._scores(kept, k), pairs, ("key scores", DECAY))
        within = multiply(w, self._scores(q, k), pairs, ("query scores", DECAY))
        corrected = self._solved(system, written)
        read = self._solved(system, multiply(w, kept, _column(w, _exp(w, sums, RULE)), (OPERAND, DECAY)))
        asked = multiply(w, q, _column(w, _exp(w, sums, RULE)), (OPERAND, DECAY))
        states, new = self._states(corrected, read, k, sums)
        kept_of_asked = self._slices(asked)
        shape, last = (self.count, *self.heads, self.spec.chunk, self.spec.value_dim), self.count == 1
        before = tape.op(
            "aten.bmm.default",
            [asked, states],
            shape,
            w.matmul_dtype,
            saves=[Saved(states, DELTA_STATE), *([] if last else [Saved(*kept_of_asked, RULE)])],
            contracted=self.spec.key_dim,
        )
        within, role = self._for_rounds(within, self.count, "query scores")
        here = batched_matmul(w, within, new, shape, (), self.spec.chunk, (role, NEW), RULE, FP32)
        out = tape.view(add(w, before, here), (*self.heads, self.count * self.spec.chunk, self.spec.value_dim))
        return tape.op("aten._to_copy.default", [out], (b, w.run.seq, a, self.spec.value_dim), w.matmul_dtype)

    def _states(self, corrected: Value, read: Value, k: Value, sums: Value) -> tuple[Value, Value]:
        """The state before each chunk, and the values that the chunk writes: NOTE [ A loop is one op ]."""
        w, n, (b, a), spec = self.w, self.count, self.heads, self.spec
        several = n > 1
        left = w.tape.op("aten.sub.Tensor", [sums])  # decay from each token to the end of its chunk
        fade = _column(w, _exp(w, left, RULE, kept=several))
        faded = w.tape.op("aten.mul.Tensor", [k, fade], grad=several, saves=[Saved(k, OPERAND), Saved(fade, DECAY)])
        ends = _exp(w, w.tape.view(sums, (b, a, n)), RULE, kept=several)
        states = w.tape.empty((n, b, a, spec.key_dim, spec.value_dim), FP32, grad=several)
        new = w.tape.empty((n, b, a, spec.chunk, spec.value_dim), FP32, grad=True)
        read, role = self._for_rounds(read, n - 1, OPERAND)
        slices = self._slices(faded)
        kept = [Saved(states, DELTA_STATE), Saved(new, NEW)]
        kept += [Saved(read, role), Saved(*slices, RULE), Saved(ends, DECAY)] if several else []
        flops = 2 * 2 * n * b * a * spec.chunk * spec.key_dim * spec.value_dim
        inputs, results, rounds = [corrected, read, faded, ends], (states, new), n * KERNELS_OF_A_CHUNK
        if w.run.precision.casts:
            results = self._copied(states, n), self._copied(new, n)
            made = [copy_read := self._copied(states, n), *results]
            kept[:2] = [Saved(copy_read, DELTA_STATE)]
            if several:  # the last round's state is freed
                states, again = w.tape.empty((n - 1, *states.shape[1:]), FP32, grad=True), self._copied(new, n - 1)
                made += [states, again]
                kept += [Saved(states, DELTA_STATE), Saved(again, NEW)]
            w.tape.record("scan.chunks", inputs, [new, *made], saves=kept, flops=flops, rounds=rounds)
            return results
        w.tape.record("scan.chunks", inputs, [new, states], saves=kept, flops=flops, rounds=rounds)
        return results

    def _copied(self, x: Value, rounds: int) -> Value:
        """The state, or the written values, as one matmul in each round reads it: a copy under autocast."""
        return self.w.tape.empty((rounds, *x.shape[1:]), self.w.matmul_dtype, grad=x.grad)

    def _for_rounds(self, x: Value, rounds: int, role: str) -> tuple[Value, str]:
        """An operand as matmuls in each round read it: under autocast each copies a chunk."""
        w = self.w
        if not w.run.precision.casts or not rounds:
            return x, role
        shape = (rounds, *self.heads, *x.shape[-2:])
        return w.tape.op("aten._to_copy.default", [x], shape, w.matmul_dtype), SLICE

    def _slices(self, x: Value) -> tuple[Value, str]:
        """Chunks of an operand as the loop's matmuls read them; the last round's, or the first's, is not held."""
        if not self.slices_copied or self.count == 1:
            return self._for_rounds(x, self.count - 1, OPERAND)
        return copy(self.w, x, (self.count - 1, *self.heads, *x.shape[-2:])), SLICE

    # one op each ------------------------------------------------------------------------------------------------------

    def _heads_first(self, x: Value) -> Value:
        """b × heads × s × width. NOTE [ Heads apart ]."""
        b, s, heads, *width = x.shape
        if self.w.matmul_dtype == FP32:
            return self.w.tape.view(x, (b, heads, s, *width))
        return self.w.tape.op("aten._to_copy.default", [x], (b, heads, s, *width), FP32)

    def _unit(self, x: Value) -> Value:
        """Each row normalised to length 1."""
        w, rows = self.w, (*x.shape[:-1], 1)
        total = w.tape.op("aten.sum.dim_IntList", [multiply(w, x, x, (OPERAND, OPERAND))], rows)
        total = w.tape.op("aten.add.Tensor", [total], passes=True)
        root = w.tape.op("aten.rsqrt.default", [total], keeps="norm statistics")
        return multiply(w, x, root, (OPERAND, "norm statistics"))

    def _filled(self, x: Value) -> Value:
        """Padded to full chunks: a copy even if nothing is padded."""
        b, heads, _, *width = x.shape
        return self.w.tape.op("aten.constant_pad_nd.default", [x], (b, heads, self.count * self.spec.chunk, *width))

    def _chunked(self, x: Value) -> Value:
        b, heads, _, *width = x.shape
        return self.w.tape.view(x, (b, heads, self.count, self.spec.chunk, *width))

    def _pairs(self, sums: Value) -> Value:
        """Decay from each token to each later one of its chunk: b × a × n × c × c."""
        w, chunk = self.w, self.spec.chunk
        later = w.tape.empty((chunk, chunk), "bool")
        w.tape.record("aten.triu.default", [], [later])
        between = w.tape.op("aten.sub.Tensor", [sums, sums], (*sums.shape, chunk))
        left = w.tape.op("aten.masked_fill.Scalar", [between, later], saves=[Saved(later, "chunk mask")])
        return _exp(w, left, RULE)

    def _scores(self, rows: Value, keys: Value) -> Value:
        """Rows times keys within each chunk."""
        w = self.w
        if self.operands_copied:
            rows, keys = copy(w, rows), copy(w, keys)
        shape = (*rows.shape[:-1], self.spec.chunk)
        return batched_matmul(w, rows, keys, shape, (), self.spec.key_dim, (OPERAND, OPERAND), RULE, FP32)

    def _solved(self, system: Value, right: Value) -> Value:
        """The triangular system of each chunk, which replaces sequential updates."""
        kept = [Saved(system, "triangular system", RULE)]
        name, operands = "aten.linalg_solve_triangular.default", [system, right]
        return self.w.tape.op(name, operands, right.shape, FP32, (), saves=kept, keeps=OPERAND, reference=RULE)


# Mamba 1 of transformers without kernels of mamba-ssm: a loop over tokens ---------------------------------------------
#
# b sequences · s tokens · I channels · N numbers of state for each · r rank of time steps. Source:
# ``models/jamba/modeling_jamba.py``, ``JambaMambaMixer`` and ``mamba_selective_scan``; ``models/mamba`` has the same
# without norms. The loop is one op: NOTE [ A loop is one op ] . The state is fp32 from the first token on; in 16 bits
# each token's state is saved a second time, cast for the matmul with the read vector. The first state, which is 0, has
# the dtype of activations.


SELECTIVE = "arXiv 2312.00752 §3.2, Algorithm 2"
TOKEN_STATE, CAST = (f"{EACH_ROUND}{what}" for what in ("state", "state, cast"))
KERNELS_OF_A_TOKEN = 4
"""A multiplication, a sum, a cast, and the matmul with the read vector."""


def selective_scan(w: Writer, x: Value, spec: SelectiveScan, norm_spec: Norm) -> Value:
    """The Mamba block, from the normed residual stream to what is added to it."""
    b, s = w.run.micro_batch, w.run.seq
    channels = (b, s, spec.inner)
    with w.tape.scope("mixer"):
        joint = linear(w, without_padding(w, x), 2 * spec.inner, "in_proj", bias=spec.bias)
        rate = negative_rate(w, spec.inner, spec.state)
        channeled = w.tape.view(joint, channels)
        mixed = short_convolution(w, channeled, spec.inner, spec.taps, bias=spec.convolution_bias)
        mixed = without_padding(w, mixed)
        step, write, ask = _selected(w, mixed, spec, norm_spec)
        out = _selective(w, mixed, step, rate, write, ask)
        out = add(w, _skipped(w, mixed), out)
        gate = activation(w, w.tape.view(joint, channels), Activation.SILU)
        out = multiply(w, out, gate, ("scan output", "gate"))
        out = w.tape.view(cast(w, out, w.compute), w.shape(spec.inner))
        return linear(w, out, w.run.model.hidden, "out_proj", bias=spec.bias)


def _selected(w: Writer, mixed: Value, spec: SelectiveScan, norm_spec: Norm) -> tuple[Value, Value, Value]:
    """Time steps, b × s × I, write and read vectors, b × s × N: all projections of the scan's input."""
    b, s, _ = mixed.shape
    rows = copy(w, mixed) if b > 1 and s > 1 else mixed  # its tokens are innermost
    joint = linear(w, rows, spec.rank + 2 * spec.state, "x_proj", bias=False)
    widths = {"dt_norm": spec.rank, "b_norm": spec.state, "c_norm": spec.state}
    parts = [w.tape.view(joint, (b, s, width)) for width in widths.values()]
    if spec.normed:
        parts = [norm(w, part, norm_spec, name) for part, name in zip(parts, widths, strict=True)]
    low, write, ask = parts
    step = linear(w, low, spec.inner, "dt_proj", bias=False)
    bias = w.parameter("dt_bias", spec.inner)
    step = w.tape.op("aten.add.Tensor", [step], weights=[bias])
    step = cast(w, step, FP32) if w.listed else step
    return w.tape.op("aten.softplus.default", [step], saves=[Saved(step, "time step input")]), write, ask


def _selective(w: Writer, x: Value, step: Value, rate: Value, write: Value, ask: Value) -> Value:
    """b × s × I: each token's state times its read vector."""
    b, s, channels = x.shape
    state = rate.shape[-1]
    each = (b, channels, s, state)
    column = w.tape.view(step, (*step.shape, 1))
    decay = w.tape.empty(each, FP32, grad=True)
    logs = _outer(w, rate, column, each, ("decay rate", STEP))
    w.tape.record("aten.exp.default", [logs], [decay], saves=[Saved(decay, "decay", SELECTIVE)])
    written = _outer(w, column, cast(w, write, FP32), each, (STEP, OPERAND))
    written = _outer(w, written, cast(w, x, FP32), each, (OPERAND, "scan input"))
    cast_states = x.dtype != FP32
    first = w.tape.empty((b, channels, state), x.dtype)
    states = w.tape.empty((max(1, s - 1) if cast_states else s, b, channels, state), FP32, grad=True)
    kept = [Saved(first, OPERAND)]
    kept += [Saved(decay, "decay", SELECTIVE)] if s > 1 else []
    kept += [Saved(states, TOKEN_STATE, SELECTIVE)] if s > 1 or not cast_states else []
    w.tape.record(
        "scan.tokens",
        [decay, written],
        [states, first],
        saves=kept,
        workspace=decay.nbytes,  # each round's contribution to a gradient has its full size
        rounds=s * KERNELS_OF_A_TOKEN,
    )
    asked = w.tape.op("aten._to_copy.default", [states], (s, b, channels, state), x.dtype) if cast_states else states
    asks = Saved(ask, OPERAND)
    if ask.dtype != asked.dtype:  # under autocast, made by a norm
        ask = w.tape.op("aten._to_copy.default", [ask], (s, b, state, 1), w.matmul_dtype)
        asks = Saved(ask, SLICE)
    return w.tape.op(
        "aten.bmm.default",
        [asked, ask],
        (b, s, channels),
        w.matmul_dtype,
        saves=[Saved(asked, CAST if cast_states else TOKEN_STATE, SELECTIVE), asks],
        contracted=state,
    )


def _outer(w: Writer, a: Value, b: Value, shape: tuple[int, ...], roles: tuple[str, str]) -> Value:
    """a * b in fp32, each broadcast."""
    kept = [Saved(b, roles[1], SELECTIVE)] if a.grad else []
    kept += [Saved(a, roles[0], SELECTIVE)] if b.grad else []
    return w.tape.op("aten.mul.Tensor", [a, b], shape, FP32, saves=kept, gradients=(a.nbytes, b.nbytes))


def _skipped(w: Writer, x: Value) -> Value:
    """x times D in fp32; its fp32 copy is saved if x has fewer bits."""
    weight = w.parameter("D", x.shape[-1])
    held = w.read(weight, "D")
    if held.dtype == FP32:
        kept = [] if weight.frozen else [Saved(x, "scan input")]
        return w.tape.op("aten.mul.Tensor", [x], dtype=FP32, saves=kept, weights=[weight])
    wide = w.tape.op("aten._to_copy.default", [held], dtype=FP32, weights=[weight])
    return multiply(w, x, wide, ("scan input", "skip weight"), FP32)


# Mamba 2 of transformers without kernels of mamba-ssm -----------------------------------------------------------------
#
# b sequences · s tokens, S of them once chunks are full · n chunks of c tokens · H heads of width p · N state. Source:
# ``models/mamba2/modeling_mamba2.py``, ``Mamba2Mixer`` and ``mamba2_chunk_scan``, which others copy.
#
# NOTE [ Operands as they lie ]
# ``einsum`` makes batches of sequences, chunks and heads, and copies an operand without a single batch stride. Write
# and read vectors are stored token by token, and copied unless there is one head, or one chunk of one sequence. The
# scan's input comes out of a convolution with tokens innermost, and is copied if there are several chunks.


DUAL = "arXiv 2405.21060 §6, block decomposition"
STEP, CARRIED = "time step", "carried state"


def state_space(w: Writer, x: Value, spec: StateSpaceDual) -> Value:
    """The Mamba 2 block, from the normed residual stream to what is added to it."""
    b, s = w.run.micro_batch, w.run.seq
    with w.tape.scope("mixer"):
        width = spec.inner + spec.convolved + spec.heads
        whole, kept = enter(w, without_padding(w, x))
        joint = linear(w, whole, width, "in_proj", bias=spec.bias, split="column", keeps=kept)
        rate = negative_rate(w, spec.heads)
        if w.kernels.ssm_kernels is SsmKernels.FUSED:
            return (shared_split if w.kernels.shards_ssm_heads else fused_split)(w, joint, rate, spec)
        channels = w.tape.view(joint, (b, s, spec.convolved))
        mixed = short_convolution(w, channels, spec.convolved, spec.taps, bias=spec.convolution_bias)
        mixed = without_padding(w, mixed)
        out = _DualScan(w, spec).run(mixed, _time_step(w, w.tape.view(joint, (b, s, spec.heads))), rate)
        out = _normed(w, out, w.tape.view(joint, (b, s, spec.inner)), spec.groups)
        out = w.tape.view(cast(w, out, w.compute), w.shape(spec.inner))
        return linear(w, out, w.run.model.hidden, "out_proj", bias=spec.bias)


def _time_step(w: Writer, x: Value) -> Value:
    """clamp(softplus(x + dt_bias)): b × s × H."""
    bias = w.parameter("dt_bias", x.shape[-1])
    x = w.tape.op("aten.add.Tensor", [x], weights=[bias])
    x = cast(w, x, FP32) if w.listed else x
    step = w.tape.op("aten.softplus.default", [x], saves=[Saved(x, "time step input")])
    return w.tape.op("aten.clamp.default", [step], saves=[Saved(step, STEP)])


def _normed(w: Writer, x: Value, gate: Value, groups: int) -> Value:
    """Weighted by the gate, then normalised within groups of channels, in fp32: ``MambaRMSNormGated``."""
    with w.tape.scope("norm"):
        opened = activation(w, cast(w, gate, FP32), Activation.SILU)
        x = multiply(w, x, opened, ("scan output", "gate"))
        rows = w.tape.view(x, (*x.shape[:-1], groups, x.shape[-1] // groups))
        normal = w.tape.view(root_mean_square(w, rows), x.shape)
        return weigh(w, normal, w.parameter("weight", x.shape[-1]), "normalised output")


@dataclass(frozen=True, slots=True)
class _DualScan:
    """The scan over chunks, all of it in fp32."""

    w: Writer
    spec: StateSpaceDual

    @property
    def count(self) -> int:
        """n."""
        return -(-self.w.run.seq // self.spec.chunk)

    def run(self, mixed: Value, step: Value, rate: Value) -> Value:
        """b × s × H p, without padding.

        Args:
            mixed: scan input, write and read vectors in one tensor. step: b × s × H.
            rate: decay rate of each head's state.
        """
        w, tape, spec = self.w, self.w.tape, self.spec
        b, s, _ = mixed.shape
        n, c, heads, wide = self.count, spec.chunk, spec.heads, (spec.head_dim, spec.state)
        x = cast(w, tape.view(mixed, (b, s, heads, spec.head_dim)), FP32)
        write, ask = (self._spread(cast(w, tape.view(mixed, (b, s, spec.groups, spec.state)), FP32)) for _ in range(2))
        skipped = weigh(w, self._filled(x), w.parameter("D", heads), "scan input")
        x = multiply(w, x, _column(w, cast(w, step, FP32)), ("scan input", STEP))
        lost = multiply(w, cast(w, step, FP32), rate, (STEP, "decay rate"))
        x, lost, write, ask = (self._filled(each) for each in (x, lost, write, ask))
        logs = tape.view(lost, (b, heads, n, c))
        sums = tape.op("aten.cumsum.default", [logs])
        scores = self._product(self._batch(ask), self._batch(write), (b, n, heads, c, c), spec.state)
        scores = multiply(w, scores, self._between(logs, c), ("scores", DECAY))
        here = self._product(scores, self._scanned(x), (b, n, heads, c, spec.head_dim), c)
        left = _exp(w, tape.op("aten.sub.Tensor", [sums]), DUAL)
        faded = self._batch(multiply(w, write, _column(w, left), (OPERAND, DECAY)))
        made = self._product(faded, self._scanned(x), (b, n, heads, *wide), c)
        before = self._before(made, tape.view(sums, (b, heads, n)))
        before = self._product(self._batch(ask), before, (b, n, heads, c, spec.head_dim), spec.state)
        before = multiply(w, before, _column(w, _exp(w, sums, DUAL)), (CARRIED, DECAY))
        out = copy(w, add(w, here, before), skipped.shape)
        return tape.view(add(w, out, skipped), (b, s, spec.inner))

    def _before(self, made: Value, ends: Value) -> Value:
        """The state before each chunk: the decayed contributions of all earlier ones. b × n × H × p × N."""
        w, (b, n, heads, *wide) = self.w, made.shape
        shape = (b, heads, n + 1, *wide)
        made = copy(w, w.tape.op("aten.cat.default", [made], (b, n + 1, heads, *wide)), shape)
        ends = w.tape.op("aten.constant_pad_nd.default", [ends], (b, heads, n + 1))
        carried = self._product(self._between(ends, n + 1), made, shape, n + 1)
        last_cut_off = (b, n, heads, *wide)
        in_place = n == 1 or b * heads == 1
        return w.tape.view(carried, last_cut_off) if in_place else copy(w, carried, last_cut_off)

    # one op each ------------------------------------------------------------------------------------------------------

    def _batch(self, x: Value) -> Value:
        """See NOTE [ Operands as they lie ]."""
        several = self.spec.heads > 1 and (x.shape[0] > 1 or self.count > 1)
        return copy(self.w, x) if several else x

    def _scanned(self, x: Value) -> Value:
        """See NOTE [ Operands as they lie ]."""
        return copy(self.w, x) if self.count > 1 < x.shape[0] * self.spec.heads else x

    def _spread(self, x: Value) -> Value:
        """Groups repeated for each head."""
        shape = (*x.shape[:2], self.spec.heads, self.spec.state)
        return self.w.tape.op("aten.repeat_interleave.self_int", [x], shape)

    def _filled(self, x: Value) -> Value:
        """Padded to full chunks: a copy even if nothing is padded."""
        shape = (x.shape[0], self.count * self.spec.chunk, *x.shape[2:])
        return self.w.tape.op("aten.constant_pad_nd.default", [x], shape)

    def _between(self, logs: Value, length: int) -> Value:
        """Decay from each position to each later one: ``segment_sum``, and its exponential."""
        tape, shape = self.w.tape, (*logs.shape, length)
        filled = logs
        for number in range(2):
            mask = tape.empty((length, length), "bool")
            tape.record("aten.bitwise_not.default", [], [mask])
            kept = [Saved(mask, "chunk mask")]
            filled = tape.op("aten.masked_fill.Scalar", [filled, mask], shape, saves=kept)
            filled = tape.op("aten.cumsum.default", [filled]) if number == 0 else filled
        return _exp(self.w, filled, DUAL)

    def _product(self, one: Value, other: Value, shape: tuple[int, ...], contracted: int) -> Value:
        return batched_matmul(self.w, one, other, shape, (), contracted, (OPERAND, OPERAND), DUAL, FP32)
