"""Megatron-LM's models of scans, attention and feed-forward blocks in layers of their own, as its tests have them.

`tests/facts/megatron_hybrids.csv`: predicted, in the columns ``blind_*``, before any figure was opened. Arguments that
a test does not give are the defaults of ``megatron/training/arguments.py`` and of ``megatron/core/ssm/mamba_mixer.py``:
states of 128, heads of 64 that together are twice the hidden size, eight groups, four taps.
"""

from __future__ import annotations

from collections.abc import Mapping

from jettison.spec.kernels import kernels as kernel_set
from jettison.spec.model import (
    Activation,
    Attention,
    DropoutSites,
    Layer,
    Mlp,
    ModelSpec,
    Moe,
    Norm,
    NormKind,
    Router,
    StateSpaceDual,
)
from jettison.spec.model_variants import with_mtp

PATTERN = "hybrid-layer-pattern"
"""M: Mamba 2, *: attention, -: feed-forward, E: experts; | between stages, / before each further token."""


def own(pattern: str) -> str:
    """Layers of the model itself, one letter each."""
    return pattern.split("/")[0].replace("|", "")


def hybrid(row: Mapping[str, str], more: Mapping[str, str], name: str) -> ModelSpec:
    """``megatron/core/models/hybrid/hybrid_model.py``."""
    hidden, heads = int(row["hidden"]), int(row["heads"])
    biased, rms = "disable-bias-linear" not in more, more.get("normalization") == "RMSNorm"
    squared = "squared-relu" in more
    norm = Norm(kind=NormKind.RMS if rms else NormKind.LAYER, bias=not rms)
    head_dim = int(more.get("mamba-head-dim", 64))
    activation = Activation.RELU_SQUARED if squared else Activation.GELU_TANH
    blocks = {
        "M": StateSpaceDual(
            heads=int(more.get("mamba-num-heads", 2 * hidden // head_dim)),
            head_dim=head_dim,
            state=int(more.get("mamba-state-dim", 128)),
            groups=int(more.get("mamba-num-groups", 8)),
            taps=4,
            chunk=128,  # ``chunk_size`` of MambaMixer
            bias=False,
            convolution_bias=True,
        ),
        "*": Attention(
            heads=heads,
            kv_heads=int(row["kv_heads"]),
            head_dim=int(more.get("kv-channels", hidden // heads)),
            qkv_bias=biased,
            out_bias=biased,
            fused_qkv=True,
        ),
        "-": Mlp(ffn=int(row["ffn"]), activation=activation, gated=False, bias=biased),
    }
    if "num-experts" in more:
        blocks["E"] = Moe(
            experts=int(more["num-experts"]),
            top_k=int(more["moe-router-topk"]),
            ffn=int(more.get("moe-ffn-hidden-size", row["ffn"])),
            activation=activation,
            router=Router.SIGMOID_GROUPS,
            gated=False,
            bias=biased,
            correction_bias=True,
            shared_ffn=int(more.get("moe-shared-expert-intermediate-size", 0)),
            groups=1,
            top_groups=1,
            latent=int(more.get("moe-latent-size", 0)),
        )
    pattern = more[PATTERN]
    layers = []
    for letter in own(pattern):
        mixes = letter in "M*"
        layers.append(
            Layer(attention=blocks[letter] if mixes else None, mlp=None if mixes else blocks[letter], norm=norm)
        )
    model = ModelSpec(
        name=name,
        family="nemotron_h",
        hidden=hidden,
        vocab=int(row["vocab_padded"]),
        layers=tuple(layers),
        final_norm=norm,
        max_positions=int(row["seq"]),
        learned_positions=more.get("position-embedding-type", "learned_absolute") == "learned_absolute",
        tied_embeddings="untie-embeddings-and-output-weights" not in more,
        dropout_sites=DropoutSites(embedding=True, attention=True, residual=True),
        dropout=0.1,
    )
    return with_mtp(model, pattern.count("/"), kernel_set("megatron"), repeated="mtp-use-repeated-layer" in more)


def stages(pattern: str) -> str:
    """Layers of each chunk, as ``--stage-layers`` takes them; empty where there is one."""
    return ",".join(str(len(part)) for part in pattern.split("/")[0].split("|")) if "|" in pattern else ""
