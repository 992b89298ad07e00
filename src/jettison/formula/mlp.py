"""The feed-forward block: two matmuls with a nonlinearity between them, or three with a gate."""

from __future__ import annotations

from jettison.formula.ops import add, cast, dropout, enter, leave, linear, multiply, name_given, power, scale
from jettison.formula.tape import Saved, Value, Writer
from jettison.spec.model import Activation, Mlp

PAPER = "arXiv 2205.05198 §4.1, MLP"

KERNEL = {
    Activation.GELU: "aten.gelu.default",
    Activation.GELU_TANH: "aten.gelu.default",
    Activation.SILU: "aten.silu.default",
}


def mlp(w: Writer, x: Value, spec: Mlp, name: str = "mlp") -> Value:
    """The feed-forward block, from the normed residual stream to what is added to it (without its dropout)."""
    with w.tape.scope(name):
        whole, kept = enter(w, x)
        routed = name != "mlp" and "shared_experts" not in w.run.again  # the router saves the input
        hidden = _hidden(w, whole, kept, spec, routed)
        hidden = dropout(w, hidden, site=w.run.model.dropout_sites.inner)
        if w.kernels.cast_down_input and w.run.precision.casts:
            hidden = cast(w, hidden, w.held(frozen=w.run.tuning is not None))
        out = linear(w, hidden, w.run.model.hidden, "down", bias=spec.bias, split="row", reference=f"{PAPER}: 8sbh")
        out = leave(w, out)
        name_given(w, x, whole)
        return out


def _hidden(w: Writer, x: Value, kept: Value, spec: Mlp, routed: bool) -> Value:
    more = {"bias": spec.bias, "split": "column", "keeps": kept, "original": routed}
    if not spec.gated:
        up = linear(w, x, spec.ffn, "up", reference=f"{PAPER}: 2sbh", **more)  # type: ignore[arg-type]
        return activation(w, up, spec.activation)
    if spec.fused_gate_up or w.kernels.fused_projections:
        joint = linear(w, x, 2 * spec.ffn, "gate_up", **more)  # type: ignore[arg-type]
        gate, up = halves(w, joint, spec.ffn)
    else:
        gate = linear(w, x, spec.ffn, "gate", **more)  # type: ignore[arg-type]
        up = linear(w, x, spec.ffn, "up", **more)  # type: ignore[arg-type]
    return gate_product(w, gate, up, spec.activation)


def halves(w: Writer, joint: Value, width: int) -> list[Value]:
    """Gate and up halves of one matmul's output: by ``chunk``, or as views inside a kernel that reads both."""
    if w.kernels.fused_gate:
        return [w.tape.view(joint, (*joint.shape[:-1], width)) for _ in range(2)]
    return w.tape.split(joint, (width, width))


def gate_product(w: Writer, gate: Value, up: Value, kind: Activation) -> Value:
    """activation(gate) * up. As one kernel it saves both halves and recomputes the rest."""
    if w.kernels.fused_gate and (w.one_block or not w.kernels.fused_adapters):
        kept = [Saved(gate, "activation input"), Saved(up, "activation input")]
        return w.tape.op("gated_activation", [gate, up], saves=kept, in_place=w.kernels.gate_in_place)
    return multiply(w, activation(w, gate, kind), up, ("activation output", "multiply input"))


def activation(w: Writer, x: Value, kind: Activation) -> Value:
    """The nonlinearity: its input is saved, or for relu its output."""
    if kind is Activation.GELU_WRITTEN and w.kernels.fused_gelu:
        kind = Activation.GELU_TANH
    if kind is Activation.GELU_WRITTEN:
        return _gelu_written(w, x)
    if kind is Activation.GELU_FAST:
        return _gelu_fast(w, x)
    if kind is Activation.GELU_QUICK:
        gate = w.tape.empty(x.shape, x.dtype, x.places, grad=x.grad)
        w.tape.record("aten.sigmoid.default", [scale(w, x)], [gate], saves=[Saved(gate, "activation output")])
        return multiply(w, x, gate, ("activation input", "activation output"))
    if kind is Activation.RELU:
        return w.tape.op("aten.relu.default", [x], keeps="activation output")
    if kind is Activation.RELU_SQUARED:
        out = w.tape.op("aten.relu.default", [x], keeps="activation output")
        return power(w, out, "activation output")
    kept = [Saved(x, "activation input", f"{PAPER}, GeLU input: 8sbh")]
    return w.tape.op(KERNEL[kind], [x], saves=kept, workspace=4 * x.nbytes if w.kernels.gelu_function else 0)


def _gelu_fast(w: Writer, x: Value) -> Value:
    """0.5 x (1 + tanh(c x (1 + 0.044715 x x))), op by op: transformers' FastGELUActivation."""
    half, scaled = scale(w, x), scale(w, x)
    square = multiply(w, scale(w, x), x, ("multiply input", "activation input"))
    factor = w.tape.op("aten.add.Tensor", [square], passes=True)
    tanh = _tanh(w, multiply(w, scaled, factor, ("multiply input", "multiply input")))
    one = w.tape.op("aten.add.Tensor", [tanh], passes=True)
    return multiply(w, half, one, ("multiply input", "multiply input"))


def _tanh(w: Writer, x: Value) -> Value:
    return w.tape.op("aten.tanh.default", [x], keeps="activation output")


def _gelu_written(w: Writer, x: Value) -> Value:
    """0.5 x (1 + tanh(c (x + 0.044715 x^3))), op by op: transformers' NewGELUActivation."""
    half = scale(w, x)
    inner = scale(w, add(w, x, scale(w, power(w, x, "activation input"))))
    tanh = _tanh(w, inner)
    one = w.tape.op("aten.add.Tensor", [tanh], passes=True)
    return multiply(w, half, one, ("multiply input", "multiply input"))
