"""One layer: what mixes tokens and what works on each, norms and residual sums in the arrangement asked for."""

from __future__ import annotations

from jettison.formula.attention import attention
from jettison.formula.basic import add, cast, dropout
from jettison.formula.delta_rule import gated_delta
from jettison.formula.latent import latent_attention
from jettison.formula.mlp import mlp
from jettison.formula.moe import moe
from jettison.formula.norm import norm
from jettison.formula.selective_scan import mamba1
from jettison.formula.state_space import mamba2
from jettison.formula.tape import Value
from jettison.formula.writer import Writer
from jettison.spec.mixers import GatedDelta, Mamba1, Mamba2
from jettison.spec.model import Arrangement, Attention, LatentAttention, Layer, Mlp


def layer(w: Writer, x: Value, spec: Layer) -> Value:
    """The residual stream after the layer."""
    if spec.lone:
        inner = norm(w, cast(w, x, w.compute), spec.norm, "mlp_norm" if spec.attention is None else "attention_norm")
        return add(w, x, _dropped(w, _feed(w, inner, spec) if spec.attention is None else _attend(w, inner, spec)))
    match spec.arrangement:
        case Arrangement.PRE:
            normal = x if spec.plain_start else norm(w, x, spec.norm, "attention_norm")
            attended = _dropped(w, _attend(w, normal, spec))
            x = add(w, x, attended)
            if spec.cross is not None:
                normal = norm(w, x, spec.norm, "cross_attention_norm")
                x = add(w, x, _dropped(w, attention(w, normal, spec.cross, spec.norm, asks=True)))
            x = add(w, x, _dropped(w, _feed(w, norm(w, x, spec.norm, "mlp_norm"), spec)))
            if w.kernels.named_attention:
                w.tape.name(attended)
            return x
        case Arrangement.PARALLEL:
            first = _dropped(w, _attend(w, norm(w, x, spec.norm, "attention_norm"), spec))
            second = _dropped(w, _feed(w, norm(w, x, spec.norm, "mlp_norm"), spec))
            return add(w, add(w, second, first), x)
        case Arrangement.SHARED:
            normal = norm(w, x, spec.norm, "attention_norm")
            first, second = _dropped(w, _attend(w, normal, spec)), _dropped(w, _feed(w, normal, spec))
            return add(w, add(w, first, second), x)
        case Arrangement.POST:
            x = add(w, x, norm(w, _attend(w, x, spec), spec.norm, "attention_norm"))
            return add(w, x, norm(w, _feed(w, x, spec), spec.norm, "mlp_norm"))
        case Arrangement.SANDWICH:
            inner = _attend(w, norm(w, x, spec.norm, "attention_norm"), spec)
            x = add(w, x, norm(w, inner, spec.norm, "attention_output_norm"))
            inner = _feed(w, norm(w, x, spec.norm, "mlp_norm"), spec)
            return add(w, x, norm(w, inner, spec.norm, "mlp_output_norm"))
        case Arrangement.OUTER:
            inner = _dropped(w, _attend(w, x, spec))
            given, x = x, norm(w, add(w, inner, x), spec.norm, "attention_norm")
            if w.kernels.named_blocks:
                w.tape.name(inner, given)
            if spec.cross is not None:
                inner = _dropped(w, attention(w, x, spec.cross, spec.norm, asks=True))
                x = norm(w, add(w, inner, x), spec.norm, "cross_attention_norm")
            inner = _dropped(w, _feed(w, x, spec))
            given, x = x, norm(w, add(w, inner, x), spec.norm, "mlp_norm")
            if w.kernels.named_blocks:
                w.tape.name(inner, given)
            return x


def _dropped(w: Writer, x: Value) -> Value:
    return dropout(w, x, site=w.run.model.dropout_sites.residual, reference="arXiv 2205.05198 §4.1, dropout mask: sbh")


def _attend(w: Writer, x: Value, spec: Layer) -> Value:
    match spec.attention:
        case Attention() as mixer:
            return attention(w, x, mixer, spec.norm)
        case LatentAttention() as mixer:
            return latent_attention(w, x, mixer, spec.norm)
        case GatedDelta() as mixer:
            return gated_delta(w, x, mixer)
        case Mamba2() as mixer:
            return mamba2(w, x, mixer)
        case Mamba1() as mixer:
            return mamba1(w, x, mixer, spec.norm)
        case _:
            raise AssertionError(f"nobody wrote down {spec.attention}")


def _feed(w: Writer, x: Value, spec: Layer) -> Value:
    assert spec.mlp is not None, "a layer without a feed-forward block"
    return mlp(w, x, spec.mlp) if isinstance(spec.mlp, Mlp) else moe(w, x, spec.mlp)
