"""Mamba 1 as transformers writes it where no kernel of mamba-ssm is installed: a loop over tokens.

b sequences · s tokens · I channels · N numbers of state for each · r rank of time steps. Source:
``models/jamba/modeling_jamba.py``, ``JambaMambaMixer`` and ``mamba_selective_scan``; ``models/mamba`` has the same
without norms. The loop is one op: NOTE [ A loop is one op ] in `delta_rule`. The state is fp32 from the first token
on; in 16 bits each token's is kept a second time, as the product with what is asked takes it. The first state, which is
0, has the dtype of activations.
"""

from __future__ import annotations

from jettison.formula.basic import add, cast, copy, linear, multiply
from jettison.formula.delta_rule import negative_rate
from jettison.formula.mlp import activation
from jettison.formula.norm import norm
from jettison.formula.short_convolution import short_convolution, without_padding
from jettison.formula.tape import Value
from jettison.formula.writer import Writer, saved
from jettison.ledger.record import EACH_ROUND
from jettison.spec.mixers import Mamba1
from jettison.spec.model import Activation, Norm

SELECTIVE = "arXiv 2312.00752 §3.2, Algorithm 2"
WIDE = "float32"
OPERAND, STEP = "scan operand", "time step"
STATE, NARROW, SLICE = (f"{EACH_ROUND}{what}" for what in ("state", "state, narrow", "operand"))
KERNELS_OF_A_TOKEN = 4
"""A product, a sum, a cast, and the product with what is asked."""


def mamba1(w: Writer, x: Value, spec: Mamba1, norm_spec: Norm) -> Value:
    """The whole block, from the normed residual stream to what is added to it."""
    b, s = w.run.micro_batch, w.run.seq
    channels = (b, s, spec.inner)
    with w.tape.scope("mixer"):
        joint = linear(w, without_padding(w, x), 2 * spec.inner, "in_proj", bias=spec.bias)
        rate = negative_rate(w, spec.inner, spec.state)
        mixed = short_convolution(
            w, w.tape.view(joint, channels), spec.inner, spec.taps, bias=spec.convolution_bias, kind=Activation.SILU
        )
        mixed = without_padding(w, mixed)
        step, write, ask = _selected(w, mixed, spec, norm_spec)
        out = _scan(w, mixed, step, rate, write, ask)
        out = add(w, _skipped(w, mixed), out)
        gate = activation(w, w.tape.view(joint, channels), Activation.SILU)
        out = multiply(w, out, gate, ("scan output", "gate"))
        out = w.tape.view(cast(w, out, w.compute), w.shape(spec.inner))
        return linear(w, out, w.run.model.hidden, "out_proj", bias=spec.bias)


def _selected(w: Writer, mixed: Value, spec: Mamba1, norm_spec: Norm) -> tuple[Value, Value, Value]:
    """Time steps, b × s × I, what is written and what is asked, b × s × N: all made of what is scanned."""
    b, s, _ = mixed.shape
    rows = copy(w, mixed) if b > 1 and s > 1 else mixed  # tokens are innermost in it
    joint = linear(w, rows, spec.rank + 2 * spec.state, "x_proj", bias=False)
    widths = {"dt_norm": spec.rank, "b_norm": spec.state, "c_norm": spec.state}
    parts = [w.tape.view(joint, (b, s, width)) for width in widths.values()]
    if spec.normed:
        parts = [norm(w, part, norm_spec, name) for part, name in zip(parts, widths, strict=True)]
    low, write, ask = parts
    step = linear(w, low, spec.inner, "dt_proj", bias=False)
    bias = w.parameter("dt_bias", spec.inner)
    step = w.tape.op("aten.add.Tensor", [step], weights=[bias])
    step = cast(w, step, WIDE) if w.listed else step
    return w.tape.op("aten.softplus.default", [step], saves=[saved(step, "time step input")]), write, ask


def _scan(w: Writer, x: Value, step: Value, rate: Value, write: Value, ask: Value) -> Value:
    """b × s × I: what is asked of each token's state."""
    b, s, channels = x.shape
    state = rate.shape[-1]
    each = (b, channels, s, state)
    column = w.tape.view(step, (*step.shape, 1))
    decay = w.tape.empty(each, WIDE, grad=True)
    logs = _outer(w, rate, column, each, ("decay rate", STEP))
    w.tape.record("aten.exp.default", [logs], [decay], saves=[saved(decay, "decay", SELECTIVE)])
    written = _outer(w, column, cast(w, write, WIDE), each, (STEP, OPERAND))
    written = _outer(w, written, cast(w, x, WIDE), each, (OPERAND, "scan input"))
    narrow = x.dtype != WIDE
    first = w.tape.empty((b, channels, state), x.dtype)
    states = w.tape.empty((max(1, s - 1) if narrow else s, b, channels, state), WIDE, grad=True)
    kept = [saved(first, OPERAND)]
    kept += [saved(decay, "decay", SELECTIVE)] if s > 1 else []
    kept += [saved(states, STATE, SELECTIVE)] if s > 1 or not narrow else []
    w.tape.record(
        "scan.tokens",
        [decay, written],
        [states, first],
        saves=kept,
        workspace=decay.nbytes,  # each round's share of a gradient is as large as the whole, and is added to it
        rounds=s * KERNELS_OF_A_TOKEN,
    )
    asked = w.tape.op("aten._to_copy.default", [states], (s, b, channels, state), x.dtype) if narrow else states
    asks = saved(ask, OPERAND)
    if ask.dtype != asked.dtype:  # under autocast, made by a norm
        ask = w.tape.op("aten._to_copy.default", [ask], (s, b, state, 1), w.products)
        asks = saved(ask, SLICE)
    return w.tape.op(
        "aten.bmm.default",
        [asked, ask],
        (b, s, channels),
        w.products,
        saves=[saved(asked, NARROW if narrow else STATE, SELECTIVE), asks],
        contracted=state,
    )


def _outer(w: Writer, a: Value, b: Value, shape: tuple[int, ...], roles: tuple[str, str]) -> Value:
    """a * b in fp32, each spread over what it lacks."""
    kept = [saved(b, roles[1], SELECTIVE)] if a.grad else []
    kept += [saved(a, roles[0], SELECTIVE)] if b.grad else []
    return w.tape.op("aten.mul.Tensor", [a, b], shape, WIDE, saves=kept, gradients=(a.nbytes, b.nbytes))


def _skipped(w: Writer, x: Value) -> Value:
    """x times D in fp32, of which a copy stays where it is held in fewer bits."""
    weight = w.parameter("D", x.shape[-1])
    dtype = w.held(frozen=weight.frozen)
    held = w.tape.source("D", weight.shape, dtype, weight.places, grad=not weight.frozen, free=True)
    if dtype == WIDE:
        kept = [] if weight.frozen else [saved(x, "scan input")]
        return w.tape.op("aten.mul.Tensor", [x], dtype=WIDE, saves=kept, weights=[weight])
    wide = w.tape.op("aten._to_copy.default", [held], dtype=WIDE, weights=[weight])
    return multiply(w, x, wide, ("scan input", "skip weight"), WIDE)
