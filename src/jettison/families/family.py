"""Model families: what the code of an architecture fixes, and what its configuration may leave out.

``models/<model_type>.toml`` describes one ``model_type`` of Hugging Face's ``config.json``:

    like = "llama"                  # begin with all that this other family says
    blocks = ["decoder"]            # and with all that these files of ``blocks/`` say, the last one counting most
    norm = { kind = "rms" }         # fields of `Norm`
    gated = false                   # any field of `Family`; a choice is written as the name of its enum member
    required = ["hidden_size"]      # keys without which a configuration says too little
    optional = ["head_dim"]         # keys that may be left out or null
    refused = ["clip_qkv"]          # keys that may not be set: what the code does then is not described
    [defaults]                      # keys that may be left out, and what they are then
    [spelling]                      # how this family writes a key, where it does not write it as most do
    [dropout]                       # fields of `DropoutKeys`
    [experts]                       # fields of `Experts`
    [when.KEY]                      # fields of `Family`, and of its `Experts`, where the file has KEY true
    [unless.KEY]                    # and where it has it false
    reader = "falcon"               # a function of `readers`, for what no table says
    [kernels]                       # fields of `Kernels` in which transformers' code of this family differs

    described_kernels = ["liger"]   # not passed on to those that are like it
    [tensor_parallel]               # nor this: how classes and parts are called, for parallel/known_models.py
    name = "Llama"                  # how its classes begin
    parts = "llama_parts"           # a file of ``blocks/``, unless the parts stand here

Tables are merged key by key, but for ``norm``; anything else that is said again replaces what was said before.
``defaults`` are those of the configuration classes of transformers 5 (``models/*/configuration_*.py``). A key that is
neither required nor among the defaults is not read by the architecture, and so not by us.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Final

from jettison.core.errors import UsageError
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
class DropoutKeys:
    """Which key holds the probability of each site; empty: the code has no dropout there."""

    embedding: str = ""
    attention: str = "attention_dropout"
    residual: str = ""
    projected: str = ""
    inner: str = ""
    output: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """What the code of a mixture of experts fixes. ``width`` is the key of one expert's feed-forward width."""

    router: Router
    width: str = "moe_intermediate_size"
    normalised: bool = False  # weights of the chosen experts always sum to 1
    bias: bool = False
    router_bias: bool = False
    correction_bias: bool = False
    correction_frozen: bool = False
    clamped_sum: bool = False
    weighted_inputs: bool = False
    shared_width: str = ""  # the key of the shared experts' width, where it is none of one expert's
    shared_gate: bool = False
    shared_fused: bool = False  # their gate and up are one weight
    jitters: int = 0  # how often tokens are multiplied by noise before they are routed, where jitter_key is set
    jitter_key: str = ""
    only_top_k: int = 0  # experts of a token, of which the code knows no other number
    one_is_dense: bool = False  # one expert is none


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One architecture.

    Args:
        spelling: how this family writes a key, where it does not write it as most do; the first is preferred.
        qkv_bias: fixed in code, as are the other choices here; where the configuration decides, ``attention_bias``
            or ``mlp_bias`` is among the defaults.
        described_kernels: sets of kernels that are described for few families, of which this is one.
    """

    norm: Norm
    defaults: Mapping[str, Any] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()  # keys that may not be set: what the code does then is not described
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
    scaled_where_nope: bool = False  # in layers without rotary positions alone
    rotary: bool = True
    learned_positions: bool | None = None  # None: where nothing else says positions
    rotary_key: str = ""  # a top-level key that says which share of a head is rotated
    nope_where_full: bool = False  # layers without a window have no rotary positions, where some have one: EXAONE 4
    latent: bool = False
    sinks: bool = False
    alibi: bool = False
    gated_attention: bool = False  # what it returns is weighted by a part of the queries' product
    floored_heads: bool = False  # where heads do not divide the hidden size, they are as wide as it has room for
    position_biases: Biases = Biases.NONE  # of scores, by distance
    position_offset: int = 0  # rows of learned positions beyond the longest sequence
    bidirectional: bool = False
    full_first: bool = False  # of a period of layers the first sees all, and not the last
    half_window: bool = False  # the configuration says how wide it is, both ways together
    full_where_nope: bool = False  # layers with rotary positions have a window, unless each layer is named: Llama 4
    layer_words: Mapping[str, str] = field(default_factory=dict)  # usual words by its own in layer_types
    scan: ScanKind | None = None  # what layers have that are not of attention; ``layer_types`` says which
    scan_activation: str = ""  # a key that may say silu alone
    single_block: bool = False  # a layer is one block
    experts: Experts | None = None
    embedding_norm: bool = False  # the embedding ends with a norm
    embedding_scale: bool = False
    first_unnormed: bool = False  # and the first layer's attention therefore has none
    masked_language_model: bool = False
    scaled_head: bool = False  # what its head reads is multiplied by a number
    tied_where_built: bool = False  # transformers ties its head, whatever is said, unless loaded weights have one
    encoder_decoder: bool = False  # an encoder beside a decoder, whose sizes have names of their own
    spectrogram: bool = False  # which reads a spectrum
    waveform: bool = False  # it hears sound as it was recorded
    images: bool = False  # it reads images; ``pooling`` is what of them it classifies
    pooling: Pooling = Pooling.NONE
    dropout: DropoutKeys = field(default_factory=DropoutKeys)
    kernels: Mapping[str, Any] = field(default_factory=dict)
    pair: Mapping[str, Any] = field(default_factory=dict)  # what stands beside it
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
"""Fields that are written as the name of a member."""


def _typed(table: Mapping[str, Any]) -> dict[str, Any]:
    """The same with members of enums in the place of their names, tuples in that of lists, and a `Norm`."""
    return {key: _typed_value(key, value) for key, value in table.items()}


def _typed_value(key: str, value: Any) -> Any:
    if key == "norm":
        return Norm(**{**value, "kind": NormKind(value["kind"])})
    if isinstance(value, Mapping):
        return _typed(value)
    return _CHOICES[key][value.upper()] if key in _CHOICES else tuple(value) if isinstance(value, list) else value


def _merge(into: dict[str, Any], table: Mapping[str, Any]) -> None:
    for key, value in table.items():
        if isinstance(value, Mapping) and key != "norm":
            _merge(into.setdefault(key, {}), value)
        else:
            into[key] = value


def _table(file: Path) -> dict[str, Any]:
    """All that a file says, with all that it begins with."""
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
    """Read a file."""
    table = _table(file)
    own = _typed({key: value for key, value in table.items() if key == "norm" or not isinstance(value, Mapping)})
    experts = _typed(table.get("experts", {}))
    return Family(
        defaults=table["defaults"],
        spelling=_typed(table.get("spelling", {})),
        dropout=DropoutKeys(**table.get("dropout", {})),
        experts=Experts(**experts) if experts else None,
        kernels=_typed(table.get("kernels", {})),
        pair=table.get("pair", {}),
        tensor_parallel=table.get("tensor_parallel", {}),
        layer_words=table.get("layer_words", {}),
        when={key: _typed(then) for key, then in table.get("when", {}).items()},
        unless={key: _typed(then) for key, then in table.get("unless", {}).items()},
        **own,
    )


class Named(Mapping[str, Any]):
    """Entries by name: the names are listed when one is asked for, and an entry is read when it is."""

    def __init__(self, listed: Callable[[], Mapping[str, Any]], read: Callable[[Any], Any]) -> None:
        self._listed, self._read = listed, read

    @cached_property
    def names(self) -> Mapping[str, Any]:
        """What `read` is given, by name."""
        return self._listed()

    def __getitem__(self, name: str) -> Any:
        return self._read(self.names[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self.names


def read_table(file: Path) -> dict[str, Any]:
    """A TOML file."""
    return tomllib.loads(file.read_text(encoding="utf-8"))


def files(folder: Path) -> Mapping[str, Family]:
    """Families by the names of their files."""
    return Named(lambda: {file.stem: file for file in sorted(folder.glob("*.toml"))}, _family)


FAMILIES: Final[Mapping[str, Family]] = files(_HERE / "models")
"""By ``model_type``."""
PLAIN: Final = "llama"
"""What to suggest where no name is similar."""
PAIRS: Final[Mapping[str, Family]] = files(_HERE / "pairs")
"""Towers of texts by the ``model_type`` of two encoders beside each other, one of texts and one of images."""


WRAPPERS: Final[Mapping[str, str]] = Named(lambda: read_table(_HERE / "wrappers.toml"), str)
"""Models around a language model: which family that is where their ``text_config`` does not say. Of two encoders beside
each other, the one that a batch of images with classes runs."""


def kernels_for(model: ModelSpec, name: str) -> Kernels:
    """The named set, as the code of this model's family has it.

    Raises:
        UsageError: no such set, or one that is not described for this family.
    """
    chosen = kernels(name, model.family)
    family = FAMILIES.get(model.family) or PAIRS.get(model.family)
    if chosen.undescribed and (family is None or chosen.name not in family.described_kernels):
        kinds = ", ".join(kind for kind, one in FAMILIES.items() if chosen.name in one.described_kernels)
        instead = chosen.undescribed.format(kinds=kinds)
        raise UsageError(f"got --kernels {name} for {model.name} ({model.family}); {instead}")
    return chosen if family is None or not chosen.model_code else replace(chosen, **family.kernels)
