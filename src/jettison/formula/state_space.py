"""Mamba 2 as transformers writes it where no kernel of mamba-ssm is installed.

b sequences · s tokens, S of them once chunks are full · n chunks of c tokens · H heads of width p · N state. Source:
``models/mamba2/modeling_mamba2.py``, ``Mamba2Mixer`` and ``mamba2_chunk_scan``, of which ``models/nemotron_h`` and
others have copies.

NOTE [ Operands as they lie ]
``einsum`` makes batches of sequences, chunks and heads, and copies an operand in which one stride does not lead from
each matrix to the next. What is written and asked lies token by token, and is copied unless there is one head, or one
chunk of one sequence. What is scanned comes out of a convolution with tokens innermost, and stays so: it is copied
where there are several chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

from jettison.formula.basic import add, batched_product, cast, copy, enter, linear, multiply, weigh
from jettison.formula.delta_rule import negative_rate
from jettison.formula.fused_scans import fused_split, megatron_split
from jettison.formula.mlp import activation
from jettison.formula.norm import root_mean_square
from jettison.formula.short_convolution import short_convolution, without_padding
from jettison.formula.tape import Value
from jettison.formula.writer import Writer, saved
from jettison.spec.kernels import MEGATRON, Scans
from jettison.spec.mixers import Mamba2
from jettison.spec.model import Activation

DUAL = "arXiv 2405.21060 §6, block decomposition"
WIDE = "float32"
OPERAND, DECAY, STEP, STATE = "scan operand", "decay", "time step", "carried state"


def mamba2(w: Writer, x: Value, spec: Mamba2) -> Value:
    """The whole block, from the normed residual stream to what is added to it."""
    b, s = w.run.micro_batch, w.run.seq
    with w.tape.scope("mixer"):
        width = spec.inner + spec.convolved + spec.heads
        whole, kept = enter(w, without_padding(w, x))
        joint = linear(w, whole, width, "in_proj", bias=spec.bias, split="column", keeps=kept)
        rate = negative_rate(w, spec.heads)
        if w.kernels.scans is Scans.FUSED:
            return (megatron_split if w.kernels.name == MEGATRON.name else fused_split)(w, joint, rate, spec)
        channels = w.tape.view(joint, (b, s, spec.convolved))
        mixed = short_convolution(
            w, channels, spec.convolved, spec.taps, bias=spec.convolution_bias, kind=Activation.SILU
        )
        mixed = without_padding(w, mixed)
        out = _Scan(w, spec).run(mixed, _time_step(w, w.tape.view(joint, (b, s, spec.heads))), rate)
        out = _normed(w, out, w.tape.view(joint, (b, s, spec.inner)), spec.groups)
        out = w.tape.view(cast(w, out, w.compute), w.shape(spec.inner))
        return linear(w, out, w.run.model.hidden, "out_proj", bias=spec.bias)


def _time_step(w: Writer, x: Value) -> Value:
    """clamp(softplus(x + dt_bias)): b × s × H."""
    bias = w.parameter("dt_bias", x.shape[-1])
    x = w.tape.op("aten.add.Tensor", [x], weights=[bias])
    step = w.tape.op("aten.softplus.default", [x], saves=[saved(x, "time step input")])
    return w.tape.op("aten.clamp.default", [step], saves=[saved(step, STEP)])


def _normed(w: Writer, x: Value, gate: Value, groups: int) -> Value:
    """Weighted by the gate, then normalised within groups of channels, in fp32: ``MambaRMSNormGated``."""
    with w.tape.scope("norm"):
        opened = activation(w, cast(w, gate, WIDE), Activation.SILU)
        x = multiply(w, x, opened, ("scan output", "gate"))
        rows = w.tape.view(x, (*x.shape[:-1], groups, x.shape[-1] // groups))
        normal = w.tape.view(root_mean_square(w, rows), x.shape)
        return weigh(w, normal, w.parameter("weight", x.shape[-1]), "normalised output")


@dataclass(frozen=True, slots=True)
class _Scan:
    """The scan over chunks, all of it in fp32."""

    w: Writer
    spec: Mamba2

    @property
    def count(self) -> int:
        """n."""
        return -(-self.w.run.seq // self.spec.chunk)

    def run(self, mixed: Value, step: Value, rate: Value) -> Value:
        """b × s × H p, of the tokens that are there.

        Args:
            mixed: what is scanned, what is written and what is asked, side by side. step: b × s × H.
            rate: what a state loses, for each head.
        """
        w, tape, spec = self.w, self.w.tape, self.spec
        b, s, _ = mixed.shape
        n, c, heads, wide = self.count, spec.chunk, spec.heads, (spec.head_dim, spec.state)
        x = cast(w, tape.view(mixed, (b, s, heads, spec.head_dim)), WIDE)
        write, ask = (self._spread(cast(w, tape.view(mixed, (b, s, spec.groups, spec.state)), WIDE)) for _ in range(2))
        skipped = weigh(w, self._filled(x), w.parameter("D", heads), "scan input")
        x = multiply(w, x, self._column(cast(w, step, WIDE)), ("scan input", STEP))
        lost = multiply(w, cast(w, step, WIDE), rate, (STEP, "decay rate"))
        x, lost, write, ask = (self._filled(each) for each in (x, lost, write, ask))
        logs = tape.view(lost, (b, heads, n, c))
        sums = tape.op("aten.cumsum.default", [logs])
        scores = self._product(self._batch(ask), self._batch(write), (b, n, heads, c, c), spec.state)
        scores = multiply(w, scores, self._between(logs, c), ("scores", DECAY))
        here = self._product(scores, self._scanned(x), (b, n, heads, c, spec.head_dim), c)
        left = self._exp(tape.op("aten.sub.Tensor", [sums]))
        faded = self._batch(multiply(w, write, self._column(left), (OPERAND, DECAY)))
        made = self._product(faded, self._scanned(x), (b, n, heads, *wide), c)
        before = self._before(made, tape.view(sums, (b, heads, n)))
        before = self._product(self._batch(ask), before, (b, n, heads, c, spec.head_dim), spec.state)
        before = multiply(w, before, self._column(self._exp(sums)), (STATE, DECAY))
        out = copy(w, add(w, here, before), skipped.shape)
        return tape.view(add(w, out, skipped), (b, s, spec.inner))

    def _before(self, made: Value, ends: Value) -> Value:
        """The state before each chunk: what all earlier ones made, as far as it is left. b × n × H × p × N."""
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
        """Of groups, once for each head."""
        shape = (*x.shape[:2], self.spec.heads, self.spec.state)
        return self.w.tape.op("aten.repeat_interleave.self_int", [x], shape)

    def _filled(self, x: Value) -> Value:
        """Up to whole chunks: a copy whether something is missing or not."""
        shape = (x.shape[0], self.count * self.spec.chunk, *x.shape[2:])
        return self.w.tape.op("aten.constant_pad_nd.default", [x], shape)

    def _column(self, x: Value) -> Value:
        return self.w.tape.view(x, (*x.shape, 1))

    def _exp(self, x: Value) -> Value:
        out = self.w.tape.empty(x.shape, WIDE, grad=x.grad)
        self.w.tape.record("aten.exp.default", [x], [out], saves=[saved(out, DECAY, DUAL)])
        return out

    def _between(self, logs: Value, length: int) -> Value:
        """What is left of each place at each later one: ``segment_sum``, and its exponential."""
        tape, shape = self.w.tape, (*logs.shape, length)
        filled = logs
        for number in range(2):
            mask = tape.empty((length, length), "bool")
            tape.record("aten.bitwise_not.default", [], [mask])
            kept = [saved(mask, "chunk mask")]
            filled = tape.op("aten.masked_fill.Scalar", [filled, mask], shape, saves=kept)
            filled = tape.op("aten.cumsum.default", [filled]) if number == 0 else filled
        return self._exp(filled)

    def _product(self, one: Value, other: Value, shape: tuple[int, ...], contracted: int) -> Value:
        return batched_product(self.w, one, other, shape, (), contracted, (OPERAND, OPERAND), DUAL, WIDE)
