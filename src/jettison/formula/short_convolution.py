"""What stands before a scan: a convolution over the last few tokens, each channel by itself; and what padding is.

b sequences · s tokens · C channels.
"""

from __future__ import annotations

from jettison.formula.basic import cast, convolution
from jettison.formula.mlp import activation
from jettison.formula.tape import Value
from jettison.formula.writer import Writer, saved
from jettison.spec.model import Activation


def short_convolution(w: Writer, x: Value, channels: int, taps: int, *, bias: bool, kind: Activation) -> Value:
    """b × s × C. ``causal_conv1d_fn`` of transformers: padding on both sides, of which the end is cut off again, so
    that what the activation keeps is longer than the sequence.
    """
    b, s = w.run.micro_batch, w.run.seq
    with w.tape.scope("convolution"):
        weights = [w.parameter("weight", channels, 1, taps)]
        weights += [w.parameter("bias", channels)] if bias else []
        held = cast(w, w.tape.view(x, (b, channels, s)), w.held(frozen=weights[0].frozen))
        rows = convolution(w, held, (b, channels, s + taps - 1), weights, taps)
        out = activation(w, w.tape.view(rows, (b, channels, s)), kind)
        return w.tape.view(cast(w, out, x.dtype), (b, s, channels))


def without_padding(w: Writer, x: Value) -> Value:
    """Tokens that fill a sequence up are 0 before anything is carried on. The batch's own mask stays for that."""
    if not w.run.padding:
        return x
    mask = w.table("token mask", (*x.shape[:2], 1), "int64")
    return w.tape.op("aten.mul.Tensor", [x, mask], saves=[saved(mask, "token mask")])
