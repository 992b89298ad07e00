"""What scans keep where they are one kernel: flash-linear-attention's and mamba-ssm's, as transformers calls them.

Read in flash-linear-attention bc3b101d (``fla/ops/gated_delta_rule/chunk.py``, ``ChunkGatedDeltaRuleFunction``),
mamba e9594ce1 (``mamba_ssm/ops/triton/ssd_combined.py``, ``MambaSplitConv1dScanCombinedFn``) and causal-conv1d
(``CausalConv1dFn``: input and weights). Each names what it keeps in ``ctx.save_for_backward``; the rest its backward
works out again, of which the largest are counted: states and their gradients, and what is made of keys and values or
what the convolution returned. FLOPs are those of the mathematics; seconds are those of the bytes that go in and out,
or of the FLOPs at what scans reach (`Reached.scan`), if a device's file says that.
"""

from __future__ import annotations

from math import prod

from jettison.core.dtypes import DTYPE_BYTES
from jettison.formula.basic import WEIGHT_COPY, copy, leave, linear, weight_copies
from jettison.formula.tape import Value, Weight
from jettison.formula.writer import Writer, saved
from jettison.spec.mixers import GatedDelta, Mamba2

WIDE = "float32"
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
            saves=[saved(x, "convolution input")],
            weights=[w.parameter("weight", channels, 1, taps)],
            contracted=taps,
        )


def fused_delta(w: Writer, mixed: Value, strength: Value, rate: Value, spec: GatedDelta) -> Value:
    """b × s × a × dv. Queries and keys are normalised within, not repeated; what is not contiguous is copied first."""
    b, s = w.run.micro_batch, w.run.seq
    keys, values = (b, s, spec.key_heads, spec.key_dim), (b, s, spec.value_heads, spec.value_dim)
    q, k = (copy(w, mixed, keys) for _ in range(2))
    v = copy(w, mixed, values)
    dtype = mixed.dtype
    out = w.tape.empty(values, dtype, grad=True)
    units = [w.tape.empty(keys, dtype) for _ in range(2)]
    roots = [w.tape.empty(keys[:-1], WIDE) for _ in range(2)]
    sums = w.tape.empty(values[:-1], WIDE)
    system = w.tape.empty((*values[:-1], spec.chunk), dtype)
    kept = [saved(unit, "scan operand", DELTA) for unit in units]
    kept += [saved(root, "norm statistics", DELTA) for root in roots]
    kept += [saved(v, "scan operand", DELTA), saved(sums, "decay", DELTA), saved(strength, "write strength", DELTA)]
    kept += [saved(system, "triangular system", DELTA)]
    within = spec.chunk * (3 * spec.key_dim + 2 * spec.value_dim)  # of each token with its chunk
    again = prod(values[:-1]) * (spec.key_dim + 2 * spec.value_dim)
    across = 3 * spec.key_dim * spec.value_dim  # and with the state
    w.tape.record(
        "fused_scan",
        [q, k, v, rate, strength],
        [out, *units, *roots, sums, system],
        saves=kept,
        flops=2 * prod(values[:-1]) * (within + across),
        workspace=DTYPE_BYTES[dtype] * (2 * _states(w, spec.chunk, across // 3 * spec.value_heads) + again),
    )
    return out


def fused_split(w: Writer, joint: Value, rate: Value, spec: Mamba2) -> Value:
    """Convolution, scan, norm and the product behind them, whose input is worked out again in backward."""
    b, s, hidden = w.run.micro_batch, w.run.seq, w.run.model.hidden
    weights = [w.parameter("dt_bias", spec.heads), w.parameter("D", spec.heads), *_convolution(w, spec)]
    with w.tape.scope("norm"):
        weights.append(w.parameter("weight", spec.inner))
    normal = w.tape.empty(w.shape(spec.inner), joint.dtype, grad=True)
    scanned = w.tape.empty((b, s, spec.heads, spec.head_dim), joint.dtype)
    roots = w.tape.empty((spec.groups, b * s), WIDE)
    flops, workspace = _dual(w, joint, spec)
    w.tape.record(
        "fused_scan",
        [joint, rate],
        [normal, scanned, roots],
        saves=[
            saved(joint, "scan input", SPLIT),
            saved(rate, "decay rate", SPLIT),
            saved(scanned, "scan output", SPLIT),
            saved(roots, "norm statistics", SPLIT),
        ],
        weights=weights,
        flops=flops,
        workspace=workspace,
    )
    with w.tape.scope("out_proj"):
        weights = [w.parameter("weight", hidden, spec.inner, product=True)]
        weights += [w.parameter("bias", hidden)] if spec.bias else []
        name = "aten.addmm.default" if spec.bias else "aten.mm.default"
        copies = weight_copies(w, weights)  # of its own: the kernel casts what it is given
        return w.tape.op(
            name,
            [normal, *copies],
            w.shape(hidden),
            saves=[saved(each, WEIGHT_COPY) for each in copies[:1]],
            weights=weights,
            contracted=spec.inner,
            copied=bool(copies),
        )


def megatron_split(w: Writer, joint: Value, rate: Value, spec: Mamba2) -> Value:
    """Convolution, scan and gate; the norm and the product behind it are operators of their own.

    Megatron-Core, ``ssm/mamba_mixer.py``, ``_ssm_training``: ``rmsnorm_weight`` and ``outproj_weight`` are not given,
    so that the kernel returns what it gated beside what it keeps (``out_x``), and ``RMSNormGated`` keeps the first,
    ``TERowParallelLinear`` the normalised. Megatron has sequences innermost, and copies them there and back
    (``rearrange(...).contiguous()``), which for one sequence does nothing. Channels, heads and groups are shared over
    tp.
    """
    b, s = w.run.micro_batch, w.run.seq
    weights = [w.parameter("dt_bias", spec.heads, split=0), w.parameter("D", spec.heads, split=0, wide=True)]
    weights += _convolution(w, spec)
    places = w.on_tp(2)
    turned = copy(w, joint, (b, s, joint.shape[-1]), places) if b > 1 else joint
    gated = w.tape.empty((b, s, spec.inner), joint.dtype, places, grad=True)
    scanned = w.tape.empty((b, s, spec.heads, spec.head_dim), joint.dtype, places)
    flops, workspace = _dual(w, joint, spec)
    w.tape.record(
        "fused_scan",
        [turned, rate],
        [gated, scanned],
        saves=[
            saved(turned, "scan input", SPLIT),
            saved(rate, "decay rate", SPLIT),
            saved(scanned, "scan output", SPLIT),
        ],
        weights=weights,
        flops=flops,
        workspace=workspace,
    )
    gated = copy(w, gated, w.shape(spec.inner), places) if b > 1 else w.tape.view(gated, w.shape(spec.inner))
    normal = w.tape.empty(gated.shape, joint.dtype, places, grad=True)
    roots = w.tape.empty((spec.groups, b * s), WIDE, (("tp", 0),) if w.tp > 1 else ())
    with w.tape.scope("norm"):
        w.tape.record(
            "aten._fused_rms_norm.default",
            [gated],
            [normal, roots],
            saves=[saved(gated, "norm input"), saved(roots, "norm statistics")],
            weights=[w.parameter("weight", spec.inner, split=0)],
        )
    return leave(w, linear(w, normal, w.run.model.hidden, "out_proj", bias=spec.bias, split="row"))


def _convolution(w: Writer, spec: Mamba2) -> list[Weight]:
    """Of the channels that pass it, which ranks of tp share."""
    with w.tape.scope("convolution"):
        weights = [w.parameter("weight", spec.convolved, 1, spec.taps, split=0)]
        return weights + ([w.parameter("bias", spec.convolved, split=0)] if spec.convolution_bias else [])


def _dual(w: Writer, joint: Value, spec: Mamba2) -> tuple[int, int]:
    """FLOPs of a rank's convolution and scan, and what only their backward has: states with their gradients, and what
    the convolution returned.
    """
    tokens = w.run.micro_batch * w.run.seq
    each = spec.heads * (spec.chunk * (spec.state + spec.head_dim) + 2 * spec.head_dim * spec.state)
    states = 4 * 2 * _states(w, spec.chunk, spec.inner * spec.state)
    workspace = states + DTYPE_BYTES[joint.dtype] * tokens * spec.convolved
    return 2 * tokens * (each + spec.convolved * spec.taps) // w.tp, workspace // w.tp


def _states(w: Writer, chunk: int, each: int) -> int:
    """Numbers of the states before all chunks."""
    return w.run.micro_batch * -(-w.run.seq // chunk) * each
