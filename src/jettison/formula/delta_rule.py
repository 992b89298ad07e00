"""The gated delta rule as transformers writes it where no kernel of flash-linear-attention is installed.

b sequences · s tokens, S of them once chunks are full · n chunks of c tokens · k heads of keys, a of values, whose
widths are dk and dv. Source: ``models/qwen3_next/modeling_qwen3_next.py``, ``Qwen3NextGatedDeltaNet`` and
``torch_chunk_gated_delta_rule``; ``models/qwen3_5`` has the same with projections of its own.

NOTE [ A loop is one op ]
Chunks follow one another: each reads the state that the one before it left. The tape has that loop as one op, and what
its rounds keep as one tensor of n: as many bytes, whatever the length. `ledger.compare` pairs it with the n of a trace.
What the last round would hand on is asked for and let go of, as nothing reads it: a trace counts it, a real forward
does not hold it, and neither does this. With one chunk that is the whole of the decayed keys.

NOTE [ Heads apart ]
In 16 bits all five inputs become fp32 copies with heads outermost, and a batched product takes them as they are. In
fp32 they are views with tokens outermost. Where no padding makes copies of them, each product copies its operands, and
the loop copies a chunk of queries and of keys in each round. Queries and keys of which no head shares another's are
views of what the convolution made, with tokens innermost: a chunk of those is taken as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

from jettison.formula.basic import add, batched_product, cast, copy, linear, multiply, scale
from jettison.formula.fused_scans import fused_convolution, fused_delta
from jettison.formula.mlp import activation
from jettison.formula.norm import norm
from jettison.formula.short_convolution import short_convolution, without_padding
from jettison.formula.tape import Value
from jettison.formula.writer import Writer, saved
from jettison.ledger.record import EACH_ROUND
from jettison.spec.kernels import Scans
from jettison.spec.mixers import GatedDelta
from jettison.spec.model import Activation, Norm, NormKind

RULE = "arXiv 2412.06464 §3.3, chunkwise form"
WIDE = "float32"
OPERAND, DECAY = "scan operand", "decay"
STATE, NEW, SLICE = (f"{EACH_ROUND}{what}" for what in ("state", "value", "operand"))
KERNELS_OF_A_CHUNK = 9
"""Three slices' products with the state or with what is written, the update's, sums, and the write into the result."""


def gated_delta(w: Writer, x: Value, spec: GatedDelta) -> Value:
    """The whole block, from the normed residual stream to what is added to it."""
    with w.tape.scope("mixer"):
        qkv, z, beta, rate = _project(w, without_padding(w, x), spec)
        channels = 2 * spec.keys + spec.values
        strength = w.tape.empty(beta.shape, beta.dtype, beta.places, grad=beta.grad)
        w.tape.record("aten.sigmoid.default", [beta], [strength], saves=[saved(strength, "write strength", RULE)])
        if w.kernels.scans is Scans.FUSED:
            mixed = fused_convolution(w, qkv, channels, spec.taps)
            out = fused_delta(w, mixed, strength, _decay(w, rate, spec.value_heads), spec)
        else:
            mixed = short_convolution(w, qkv, channels, spec.taps, bias=False, kind=Activation.SILU)
            out = _written(w, mixed, strength, _decay(w, rate, spec.value_heads), spec)
        out = _gated(w, out, z)
        return linear(w, w.tape.view(out, w.shape(spec.values)), w.run.model.hidden, "out_proj", bias=False)


def _written(w: Writer, mixed: Value, strength: Value, rate: Value, spec: GatedDelta) -> Value:
    """The rule op by op: b × s × a × dv."""
    b, s = w.run.micro_batch, w.run.seq
    q, k = (_spread(w, w.tape.view(mixed, (b, s, spec.key_heads, spec.key_dim)), spec) for _ in range(2))
    v = w.tape.view(mixed, (b, s, spec.value_heads, spec.value_dim))
    return _Rule(w, spec).chunks(q, k, v, strength, rate)


def _project(w: Writer, x: Value, spec: GatedDelta) -> tuple[Value, Value, Value, Value]:
    """Query, key and value together; the gate of the output; how strongly a token is written, and what decays. All but
    the first b × s × a, in whatever order a code has its activations otherwise.
    """
    b, s, joint = w.run.micro_batch, w.run.seq, 2 * spec.keys + spec.values
    each, per_head = (b, s, spec.value_heads), (b, s, spec.value_heads, spec.value_dim)
    if not spec.grouped:
        widths = {"in_qkv": joint, "in_z": spec.values, "in_b": spec.value_heads, "in_a": spec.value_heads}
        qkv, z, beta, rate = (linear(w, x, width, name, bias=False) for name, width in widths.items())
        return qkv, w.tape.view(z, per_head), w.tape.view(beta, each), w.tape.view(rate, each)
    both = linear(w, x, joint + spec.values, "in_qkvz", bias=False)
    rates = linear(w, x, 2 * spec.value_heads, "in_ba", bias=False)
    z = w.tape.view(both, per_head)
    if 1 < spec.key_heads < spec.value_heads:  # heads of one group lie side by side, groups do not
        z = copy(w, z)
    beta, rate = (w.tape.view(rates, each) for _ in range(2))
    return w.tape.op("aten.cat.default", [both], w.shape(joint)), z, beta, rate


def _spread(w: Writer, x: Value, spec: GatedDelta) -> Value:
    """Queries or keys, once for each head of values."""
    if spec.key_heads == spec.value_heads:
        return x
    return w.tape.op("aten.repeat_interleave.self_int", [x], (*x.shape[:2], spec.value_heads, spec.key_dim))


def _decay(w: Writer, rate: Value, heads: int) -> Value:
    """-exp(A_log) softplus(rate + dt_bias): b × s × a, of what a state keeps the logarithm."""
    bias = w.parameter("dt_bias", heads)
    wide = w.tape.op("aten.add.Tensor", [cast(w, rate, WIDE)], weights=[bias])
    step = w.tape.op("aten.softplus.default", [wide], saves=[saved(wide, "time step input")])
    return multiply(w, step, negative_rate(w, heads), ("time step", "decay rate"))


def negative_rate(w: Writer, *shape: int) -> Value:
    """-exp(A_log), made anew by each call."""
    weight = w.parameter("A_log", *shape, split=0)
    held = w.tape.source("A_log", shape, w.held(frozen=weight.frozen), weight.places, grad=not weight.frozen, free=True)
    rate = w.tape.empty(shape, WIDE, weight.places, grad=held.grad)
    wide = cast(w, held, WIDE)
    w.tape.record("aten.exp.default", [wide], [rate], saves=[saved(rate, "decay rate")], weights=[weight])
    return w.tape.op("aten.neg.default", [rate])


def _gated(w: Writer, out: Value, z: Value) -> Value:
    """Each head normalised, and weighted by the gate in fp32: ``Qwen3NextRMSNormGated``."""
    normal = norm(w, out, Norm(kind=NormKind.RMS), "norm")
    gate = activation(w, cast(w, z, WIDE), Activation.SILU)
    return cast(w, multiply(w, normal, gate, ("normalised output", "gate"), WIDE), w.compute)


@dataclass(frozen=True, slots=True)
class _Rule:
    """The rule over chunks, all of it in fp32."""

    w: Writer
    spec: GatedDelta

    @property
    def count(self) -> int:
        """n."""
        return -(-self.w.run.seq // self.spec.chunk)

    @property
    def heads(self) -> tuple[int, int]:
        """b × a, of which products are batches."""
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
        return self.w.compute == WIDE and self.w.run.seq % self.spec.chunk == 0

    @property
    def _spread(self) -> bool:
        """Do heads share keys, of which each has a copy?"""
        return self.spec.key_heads < self.spec.value_heads

    def chunks(self, q: Value, k: Value, v: Value, strength: Value, rate: Value) -> Value:
        """b × s × a × dv. ``Args`` as they come, with tokens before heads."""
        w, tape, (b, a) = self.w, self.w.tape, self.heads
        q, k, v, strength, rate = (self._heads_first(each) for each in (q, k, v, strength, rate))
        q, k = scale(w, self._unit(q)), self._unit(k)
        q, k, v, strength, rate = (self._filled(each) for each in (q, k, v, strength, rate))
        written, kept = (multiply(w, x, self._column(strength), (OPERAND, "write strength")) for x in (v, k))
        q, k, written, kept = (self._chunked(x) for x in (q, k, written, kept))
        sums = tape.op("aten.cumsum.default", [self._chunked(rate)])
        pairs = self._pairs(sums)
        system = multiply(w, self._scores(kept, k), pairs, ("key scores", DECAY))
        within = multiply(w, self._scores(q, k), pairs, ("query scores", DECAY))
        corrected = self._solved(system, written)
        read = self._solved(system, multiply(w, kept, self._column(self._exp(sums)), (OPERAND, DECAY)))
        asked = multiply(w, q, self._column(self._exp(sums)), (OPERAND, DECAY))
        states, new = self._states(corrected, read, k, sums)
        kept_of_asked = self._slices(asked)
        shape, last = (self.count, *self.heads, self.spec.chunk, self.spec.value_dim), self.count == 1
        before = tape.op(
            "aten.bmm.default",
            [asked, states],
            shape,
            saves=[saved(states, STATE), *([] if last else [saved(*kept_of_asked, RULE)])],
            contracted=self.spec.key_dim,
        )
        here = batched_product(w, within, new, shape, (), self.spec.chunk, ("query scores", NEW), RULE, WIDE)
        out = tape.view(add(w, before, here), (*self.heads, self.count * self.spec.chunk, self.spec.value_dim))
        return tape.op("aten._to_copy.default", [out], (b, w.run.seq, a, self.spec.value_dim), w.compute)

    def _states(self, corrected: Value, read: Value, k: Value, sums: Value) -> tuple[Value, Value]:
        """The state before each chunk, and what the chunk writes: NOTE [ A loop is one op ]."""
        w, n, (b, a), spec = self.w, self.count, self.heads, self.spec
        several = n > 1
        left = w.tape.op("aten.sub.Tensor", [sums])  # from each token to the end of its chunk
        fade = self._column(self._exp(left, kept=several))
        faded = w.tape.op("aten.mul.Tensor", [k, fade], grad=several, saves=[saved(k, OPERAND), saved(fade, DECAY)])
        ends = self._exp(w.tape.view(sums, (b, a, n)), kept=several)
        states = w.tape.empty((n, b, a, spec.key_dim, spec.value_dim), WIDE, grad=several)
        new = w.tape.empty((n, b, a, spec.chunk, spec.value_dim), WIDE, grad=True)
        slices = self._slices(faded)
        kept = [saved(states, STATE), saved(new, NEW), saved(read, OPERAND), saved(*slices, RULE)]
        w.tape.record(
            "scan.chunks",
            [corrected, read, faded, ends],
            [new, states],
            saves=[*kept, saved(ends, DECAY)] if several else [saved(states, STATE), saved(new, NEW)],
            flops=2 * 2 * n * b * a * spec.chunk * spec.key_dim * spec.value_dim,
            rounds=n * KERNELS_OF_A_CHUNK,
        )
        return states, new

    def _slices(self, x: Value) -> tuple[Value, str]:
        """Chunks of an operand as the loop's products take them; the last round's, or the first's, is not held."""
        if not self.slices_copied or self.count == 1:
            return x, OPERAND
        return copy(self.w, x, (self.count - 1, *self.heads, *x.shape[-2:])), SLICE

    # one op each ------------------------------------------------------------------------------------------------------

    def _heads_first(self, x: Value) -> Value:
        """b × heads × s × width. NOTE [ Heads apart ]."""
        b, s, heads, *width = x.shape
        if self.w.compute == WIDE:
            return self.w.tape.view(x, (b, heads, s, *width))
        return self.w.tape.op("aten._to_copy.default", [x], (b, heads, s, *width), WIDE)

    def _unit(self, x: Value) -> Value:
        """Each row as long as 1."""
        w, rows = self.w, (*x.shape[:-1], 1)
        total = w.tape.op("aten.sum.dim_IntList", [multiply(w, x, x, (OPERAND, OPERAND))], rows)
        total = w.tape.op("aten.add.Tensor", [total], passes=True)
        root = w.tape.empty(rows, WIDE, grad=x.grad)
        w.tape.record("aten.rsqrt.default", [total], [root], saves=[saved(root, "norm statistics")])
        return multiply(w, x, root, (OPERAND, "norm statistics"))

    def _filled(self, x: Value) -> Value:
        """Up to whole chunks: a copy whether something is missing or not."""
        b, heads, _, *width = x.shape
        return self.w.tape.op("aten.constant_pad_nd.default", [x], (b, heads, self.count * self.spec.chunk, *width))

    def _chunked(self, x: Value) -> Value:
        b, heads, _, *width = x.shape
        return self.w.tape.view(x, (b, heads, self.count, self.spec.chunk, *width))

    def _column(self, x: Value) -> Value:
        return self.w.tape.view(x, (*x.shape, 1))

    def _exp(self, x: Value, *, kept: bool = True) -> Value:
        out = self.w.tape.empty(x.shape, WIDE, grad=x.grad and kept)
        self.w.tape.record("aten.exp.default", [x], [out], saves=[saved(out, DECAY, RULE)])
        return out

    def _pairs(self, sums: Value) -> Value:
        """What is left of a token at each later one of its chunk: b × a × n × c × c."""
        w, chunk = self.w, self.spec.chunk
        later = w.tape.empty((chunk, chunk), "bool")
        w.tape.record("aten.triu.default", [], [later])
        between = w.tape.op("aten.sub.Tensor", [sums, sums], (*sums.shape, chunk))
        return self._exp(w.tape.op("aten.masked_fill.Scalar", [between, later], saves=[saved(later, "chunk mask")]))

    def _scores(self, rows: Value, keys: Value) -> Value:
        """Rows times keys within each chunk."""
        w = self.w
        if self.operands_copied:
            rows, keys = copy(w, rows), copy(w, keys)
        shape = (*rows.shape[:-1], self.spec.chunk)
        return batched_product(w, rows, keys, shape, (), self.spec.key_dim, (OPERAND, OPERAND), RULE, WIDE)

    def _solved(self, system: Value, right: Value) -> Value:
        """The triangular system of each chunk, which takes the place of updates one after the other."""
        out = self.w.tape.empty(right.shape, WIDE, grad=True)
        kept = [saved(system, "triangular system", RULE), saved(out, OPERAND, RULE)]
        self.w.tape.record("aten.linalg_solve_triangular.default", [system, right], [out], saves=kept)
        return out
