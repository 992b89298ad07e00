"""Model families: the fixed choices of an architecture's code, and the keys that its configuration may omit.

``README.md`` has the form of their files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Final

from jettison.core.errors import UsageError
from jettison.core.files import read_table
from jettison.spec.frameworks import named
from jettison.spec.kernels import AttentionKernel, Kernels, kernels
from jettison.spec.model import Activation, Arrangement, Biases, ModelSpec, Norm, NormKind, Pooling, QkNorm, Router

_HERE: Final = Path(__file__).parent
BLOCKS: Final = _HERE / "blocks"


class ScanKind(StrEnum):
    """State-space (SSM) and linear-attention layers."""

    DELTA = "gated delta rule"  # Qwen3.5
    GROUPED_DELTA = "gated delta rule, projections by groups of heads"  # Qwen3-Next
    MAMBA2 = "state space duality"
    MAMBA1 = "selective state space"
    NORMED_MAMBA1 = "selective state space, what it selects by normalised"  # Jamba


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """Fixed choices in the code of a mixture of experts. ``width`` is the key of one expert's feed-forward width."""

    router: Router
    width: str = "moe_intermediate_size"
    normalised: bool = False  # weights of the chosen experts always sum to 1
    bias: bool = False
    router_bias: bool = False
    correction_frozen: bool = False
    clamped_sum: bool = False
    weighted_inputs: bool = False
    shared_width: str = ""  # key of the shared experts' width, if it has one of its own
    shared_gate: bool = False
    shared_fused: bool = False  # their gate and up are one weight
    jitters: int = 0  # number of times that tokens are multiplied by noise before routing, if jitter_key is set
    jitter_key: str = ""
    only_top_k: int = 0  # the only number of experts a token that the code supports
    one_is_dense: bool = False  # with one expert the layer is dense


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One architecture.

    Args:
        spelling: this family's spelling of a key, if it is not the usual one; the first is preferred.
        qkv_bias: fixed in code, like the other choices here; if the configuration decides, ``attention_bias``
            or ``mlp_bias`` is among the defaults.
        described_kernels: sets of kernels with closed forms for few families, this one included.
    """

    norm: Norm
    defaults: Mapping[str, Any] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()  # keys that may not be set: no closed form for their effect
    spelling: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    arrangement: Arrangement = Arrangement.PRE
    activation: Activation | None = None
    gated: bool = True
    qkv_bias: bool = False
    key_bias: bool = True
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    patch_bias: bool = True
    fused_qkv: bool = False
    fused_gate_up: bool = False
    qk_norm: QkNorm = QkNorm.NONE
    scaled_queries: bool = False
    scaled_where_nope: bool = False  # only in layers without rotary positions
    rotary: bool = True
    learned_positions: bool | None = None  # None: if no other kind of positions is set
    rotary_key: str = ""  # a top-level key for the rotated share of a head
    nope_where_full: bool = False  # if some layers have a window, those without one have no rotary positions: EXAONE 4
    latent: bool = False
    sinks: bool = False
    alibi: bool = False
    gated_attention: bool = False  # its output is gated by a part of the query projection
    floored_heads: bool = False  # if heads do not divide the hidden size, head_dim is rounded down
    position_biases: Biases = Biases.NONE  # of scores, by distance
    position_offset: int = 0  # rows of learned positions beyond the longest sequence
    bidirectional: bool = False
    full_first: bool = False  # the first layer of a period has full attention, not the last
    half_window: bool = False  # the configuration gives the window in both directions together
    full_where_nope: bool = False  # layers with rotary positions have a window, unless layer_types is set: Llama 4
    layer_words: Mapping[str, str] = field(default_factory=dict)  # usual values of layer_types by this family's
    scan: ScanKind | None = None  # token mixer of layers without attention; ``layer_types`` selects them
    scan_activation: str = ""  # a key whose only supported value is silu
    single_block: bool = False  # a layer is one block
    experts: Experts | None = None
    embedding_norm: bool = False  # the embedding ends with a norm
    embedding_scale: bool = False
    first_unnormed: bool = False  # so the first layer's attention has none
    masked_language_model: bool = False
    scaled_head: bool = False  # its head's input is scaled
    tied_where_built: bool = False  # transformers ties its head, whatever the key, unless loaded weights have one
    encoder_decoder: bool = False  # an encoder and a decoder, with separate keys for their sizes
    spectrogram: bool = False  # whose encoder reads a spectrum
    waveform: bool = False  # it reads raw audio
    images: bool = False  # it reads images; ``pooling`` selects the classifier's input
    pooling: Pooling = Pooling.NONE
    dropout: Mapping[str, str] = field(default_factory=dict)  # key of each site's probability, of those that have one
    kernels: Mapping[str, Any] = field(default_factory=dict)
    pair: Mapping[str, Any] = field(default_factory=dict)  # the other tower
    described_kernels: tuple[str, ...] = ()
    tensor_parallel: Mapping[str, Any] = field(default_factory=dict)
    when: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    unless: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    reader: str = ""


_CHOICES: Final[Mapping[str, type[Enum]]] = {
    "arrangement": Arrangement,
    "activation": Activation,
    "qk_norm": QkNorm,
    "position_biases": Biases,
    "scan": ScanKind,
    "pooling": Pooling,
    "router": Router,
    "attention": AttentionKernel,
}
"""Fields written as the name of an enum member."""
_AS_THEY_ARE: Final = ("defaults", "dropout", "layer_words", "pair", "tensor_parallel")
"""Tables whose values are a configuration's, or names."""


def _typed(key: str, value: Any) -> Any:
    """A value of a family's file: enum members for names, tuples for lists, and a `Norm`."""
    if key == "norm":
        return Norm(**{**value, "kind": NormKind(value["kind"])})
    if isinstance(value, Mapping):
        return {inner: _typed(inner, its) for inner, its in value.items()}
    return _CHOICES[key][value.upper()] if key in _CHOICES else tuple(value) if isinstance(value, list) else value


def _merge(into: dict[str, Any], table: Mapping[str, Any]) -> None:
    for key, value in table.items():
        if isinstance(value, Mapping) and key != "norm":
            _merge(into.setdefault(key, {}), value)
        else:
            into[key] = value


def _table(file: Path) -> dict[str, Any]:
    """All values of a file, merged with those that it starts from."""
    own, merged = read_table(file), dict[str, Any]()
    if like := own.pop("like", ""):
        _merge(merged, _table(_HERE / "models" / f"{like}.toml"))
        for name in ("described_kernels", "tensor_parallel"):
            merged.pop(name, None)
    for block in own.pop("blocks", ()):
        _merge(merged, _table(BLOCKS / f"{block}.toml"))
    own["defaults"] = dict.fromkeys(own.pop("optional", ())) | own.get("defaults", {})
    _merge(merged, own)
    return merged


@cache
def _family(file: Path) -> Family:
    table = _table(file)
    own = {key: value if key in _AS_THEY_ARE else _typed(key, value) for key, value in table.items()}
    dropout, experts = {"attention": "attention_dropout", **own.pop("dropout", {})}, own.pop("experts", None)
    return Family(**own, dropout=dropout, experts=experts and Experts(**experts))


class Named(Mapping[str, Any]):
    """Entries by name; names are listed on first use, and each entry is read on first use."""

    def __init__(self, listed: Callable[[], Mapping[str, Any]], read: Callable[[Any], Any]) -> None:
        self._listed, self._read = listed, read

    @cached_property
    def names(self) -> Mapping[str, Any]:
        """Arguments of `read`, by name."""
        return self._listed()

    def __getitem__(self, name: str) -> Any:
        return self._read(self.names[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self.names


def files(folder: Path) -> Mapping[str, Family]:
    """Families by the names of their files."""
    return Named(lambda: {file.stem: file for file in sorted(folder.glob("*.toml"))}, _family)


FAMILIES: Final[Mapping[str, Family]] = files(_HERE / "models")
"""Families by ``model_type``."""
PLAIN: Final = "llama"
"""Hint where no name is similar."""
PAIRS: Final[Mapping[str, Family]] = files(_HERE / "pairs")
"""Text towers by the ``model_type`` of models with two encoders, one of texts and one of images."""

WRAPPERS: Final[Mapping[str, str]] = Named(lambda: read_table(_HERE / "wrappers.toml"), str)
"""Family of a wrapped language model without a named one; of two encoders, that of batches with classes."""


def model_code() -> str:
    """Name of the newest kernel set of models' own modules, whose saved tensors a trace sees."""
    return next(name for name, fields in named("kernels").items() if fields.get("model_code"))


def kernels_for(model: ModelSpec, name: str) -> Kernels:
    """The named set of kernels, adapted to this model's family; a `UsageError` without a closed form of it."""
    chosen = kernels(name, model.family)
    family = FAMILIES.get(model.family) or PAIRS.get(model.family)
    if chosen.described and (family is None or chosen.described not in family.described_kernels):
        kinds = ", ".join(kind for kind, one in FAMILIES.items() if chosen.described in one.described_kernels)
        instead = chosen.undescribed.format(kinds=kinds)
        raise UsageError(f"got --kernels {name} for {model.name} ({model.family}); {instead}")
    return chosen if family is None or not chosen.model_code else replace(chosen, **family.kernels)
