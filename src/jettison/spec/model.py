"""Architecture of a model: sizes and options that determine its tensors, apart from kernels and layout.

h hidden · a heads · k key-value heads · d head dim · f feed-forward width · V vocabulary · L layers · e experts.
All sizes are the whole model's; a parallel layout divides them elsewhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import cached_property
from itertools import accumulate, groupby
from typing import ClassVar, Final

from jettison.core.errors import UsageError
from jettison.core.objects import summary
from jettison.spec.fp8 import Rule


class NormKind(StrEnum):
    """Kind of norm."""

    LAYER = "layer"  # LayerNorm (arXiv 1607.06450)
    RMS = "rms"  # RMSNorm (arXiv 1910.07467)


class Arrangement(StrEnum):
    """Position of a layer's norms and residuals."""

    PRE = "pre"  # x + f(norm(x)): GPT-2, Llama
    PARALLEL = "parallel"  # x + attention(norm1(x)) + mlp(norm2(x)): GPT-NeoX
    SHARED = "shared"  # x + attention(n) + mlp(n), n = norm(x): GPT-J, Phi
    POST = "post"  # x + norm(f(x)): OLMo 2
    SANDWICH = "sandwich"  # x + norm(f(norm(x))): Gemma 2
    OUTER = "outer"  # norm(x + f(x)): BERT


class Activation(StrEnum):
    """Activation function of an MLP."""

    GELU = "gelu"  # exact, one kernel
    GELU_TANH = "gelu_tanh"  # tanh approximation, one kernel
    GELU_WRITTEN = "gelu_written"  # tanh approximation, op by op: GPT-2's gelu_new
    GELU_FAST = "gelu_fast"  # the same with factors in another order, which saves more tensors
    GELU_QUICK = "gelu_quick"  # x * sigmoid(1.702 x), op by op: CLIP
    SILU = "silu"
    RELU = "relu"
    RELU_SQUARED = "relu2"
    CLAMPED_SWIGLU = "clamped_swiglu"  # gpt-oss: clamp both halves, gate * sigmoid(1.702 gate) * (up + 1)


class QkNorm(StrEnum):
    """Norm of queries and keys."""

    NONE = "none"
    HEAD = "head"  # over each head's d: Qwen3, Gemma 3
    WIDTH = "width"  # over all heads together: OLMo 2
    APIECE = "apiece"  # over each head's d, with a weight for each head: Command R+, StableLM 2 12B
    LENGTH = "length"  # over each head's d, without a weight, and after rotary embeddings: Llama 4


class Router(StrEnum):
    """Selection of a token's experts from router scores."""

    SOFTMAX_TOPK = "softmax, then top-k"  # Mixtral, Qwen3-MoE, DeepSeek-V2
    TOPK_SOFTMAX = "top-k, then softmax"  # gpt-oss
    SIGMOID_GROUPS = "sigmoid, top-k within groups"  # DeepSeek-V3
    TOPK_SIGMOID = "top-k, then sigmoid"  # Llama 4
    SPARSE_MIXER = "one after the other, each drawn from a softmax over those near the best"  # PhiMoE, arXiv 2409.12136


class Biases(StrEnum):
    """Relative position biases of a layer's attention scores (arXiv 1910.10683 §2.1)."""

    NONE = "none"
    OWN = "own"  # computed in each layer: umT5
    FIRST = "first"  # computed in this layer and passed to the next ones: the first of each stack of T5
    GIVEN = "given"  # those of the first layer

    @property
    def made(self) -> bool:
        """Whether scores have biases."""
        return self is not Biases.NONE


def positive(who: str, **sizes: object) -> None:
    """Reject sizes that are not integers of 1 or more, by their names."""
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(f"{who}: got {name} {value!r}; expected a whole number of 1 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class Norm:
    """A norm and its parameters. ``offset`` is Gemma's 1 + weight; OLMo 1 has no ``weight``."""

    kind: NormKind
    bias: bool = False
    offset: bool = False
    weight: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """Softmax attention with k <= a key-value heads; biases: the projections'. `UsageError` unless k divides a."""

    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    key_bias: bool = True  # of keys, with ``qkv_bias``: not in Whisper
    out_bias: bool = False
    fused_qkv: bool = False  # one weight for query, key and value
    qk_norm: QkNorm = QkNorm.NONE
    rotary_dim: int = 0  # rotated part of d; 0: no rotary embeddings
    window: int | None = None  # sliding window in tokens; None: full attention
    softcap: bool = False  # c * tanh(score / c)
    sinks: bool = False  # a learned logit a head is added to the softmax: gpt-oss
    alibi: bool = False  # ALiBi: scores get a multiple of the distance, one factor a head (arXiv 2108.12409)
    clipped: bool = False  # outputs of the QKV projection are clamped
    scaled_queries: bool = False  # by a factor that grows with the position (arXiv 2501.19399)
    gated: bool = False  # the output is multiplied by a gate as wide as queries, from the query projection
    causal: bool = True
    biases: Biases = Biases.NONE  # added to scores
    buckets: int = 0  # rows of the table of biases; 0: they are zeros

    def __post_init__(self) -> None:
        positive("attention", heads=self.heads, kv_heads=self.kv_heads, head_dim=self.head_dim)
        if self.heads % self.kv_heads:
            raise UsageError(f"{self.heads} heads are not a multiple of {self.kv_heads} key-value heads")
        if self.window is not None:
            positive("attention", window=self.window)


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (MLA) with low-rank queries, keys and values (DeepSeek-V2, arXiv 2405.04434 §2.1)."""

    heads: int
    query_rank: int | None  # None: full-rank queries
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    bias: bool = False

    def __post_init__(self) -> None:
        positive(
            "latent attention",
            heads=self.heads,
            kv_rank=self.kv_rank,
            nope_dim=self.nope_dim,
            rope_dim=self.rope_dim,
            value_dim=self.value_dim,
        )

    @property
    def kv_heads(self) -> int:
        """Key-value heads after the up projection: one for each head."""
        return self.heads

    @property
    def query_dim(self) -> int:
        """Width of one head's query and key."""
        return self.nope_dim + self.rope_dim


@dataclass(frozen=True, kw_only=True, slots=True)
class Mlp:
    """An MLP; a gated one multiplies the activation of one half by the other."""

    ffn: int
    activation: Activation
    gated: bool = False
    bias: bool = False
    fused_gate_up: bool = False  # one weight for both halves: Phi-3

    def __post_init__(self) -> None:
        positive("feed-forward block", ffn=self.ffn)


@dataclass(frozen=True, kw_only=True, slots=True)
class Moe:
    """Mixture of ``experts`` MLPs of width ``ffn``, ``top_k`` of them for each token, with optional shared experts."""

    experts: int
    top_k: int
    ffn: int
    activation: Activation
    router: Router
    gated: bool = True
    bias: bool = False  # of the experts
    router_bias: bool = False  # learned: gpt-oss
    correction_frozen: bool = False  # a parameter without a gradient: ERNIE 4.5
    normalise_top_k: bool = False
    clamped_sum: bool = False  # the sum that weights are divided by is clamped, into another tensor
    weighted_inputs: bool = False  # the experts' inputs are weighted, not their outputs: Llama 4
    jitters: int = 0  # number of multiplications by noise before the router
    shared_ffn: int = 0  # width of all shared experts; 0: none
    shared_gate: bool = False  # their output is multiplied by a number a token: Qwen2-MoE
    shared_fused: bool = False  # their gate and up are one weight
    groups: int = 1
    latent: int = 0  # width of experts' inputs and outputs, with projections down and up; 0: h

    def __post_init__(self) -> None:
        positive("mixture of experts", experts=self.experts, top_k=self.top_k, ffn=self.ffn)
        if self.top_k > self.experts:
            raise UsageError(f"top_k {self.top_k} is more than the {self.experts} experts")


# state-space (SSM) and linear-attention layers ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Scan:
    """A state-space or linear-attention layer; only `StateSpaceDual` can be sharded. `UsageError`: a size below 1."""

    words: ClassVar[str] = "state-space scan"
    """Name of its kind, for messages."""

    def __post_init__(self) -> None:
        sizes = {each.name: getattr(self, each.name) for each in fields(self)}
        positive(self.words, **{name: size for name, size in sizes.items() if not isinstance(size, bool)})


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedDelta(Scan):
    """Gated delta rule (arXiv 2412.06464): each head has a state of ``key_dim`` x ``value_dim``, which decays and is
    corrected by each token. Raise `UsageError` for a size below one, or a number of value heads that is no multiple of
    key heads.

    Args:
        grouped: query, key, value and gate come from one projection, head by head, and both rates from another:
            Qwen3-Next. Otherwise the gate and each rate have projections of their own: Qwen3.5.
    """

    words: ClassVar[str] = "gated delta rule"
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int = 4  # kernel size of its convolution
    chunk: int = 64  # chunk length of the scan
    grouped: bool = False

    def __post_init__(self) -> None:
        Scan.__post_init__(self)
        if self.value_heads % self.key_heads:
            raise UsageError(f"{self.value_heads} value heads are not a multiple of {self.key_heads} key heads")

    @property
    def keys(self) -> int:
        """Width of all heads' keys."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Width of all heads' values."""
        return self.value_heads * self.value_dim


@dataclass(frozen=True, kw_only=True, slots=True)
class StateSpaceDual(Scan):
    """Mamba 2, state space duality (arXiv 2405.21060): each head has a decaying state of ``head_dim`` x ``state``.
    Raise `UsageError` for a size below one, or a number of heads that is no multiple of groups.

    Args:
        bias: of the projections; ``convolution_bias``: of the convolution.
    """

    heads: int
    head_dim: int
    state: int
    groups: int  # of heads that share B and C, and of channels in a norm
    taps: int  # kernel size of its convolution
    chunk: int  # chunk length of the scan
    bias: bool = False
    convolution_bias: bool = True

    def __post_init__(self) -> None:
        Scan.__post_init__(self)
        if self.heads % self.groups:
            raise UsageError(f"{self.heads} heads are not a multiple of {self.groups} groups")

    @property
    def inner(self) -> int:
        """Channels of all heads."""
        return self.heads * self.head_dim

    @property
    def convolved(self) -> int:
        """Channels of the convolution."""
        return self.inner + 2 * self.groups * self.state


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectiveScan(Scan):
    """Mamba's selective scan (arXiv 2312.00752): each channel has ``state`` numbers, which decay at their own rates.

    Args:
        bias: of the projections; ``convolution_bias``: of the convolution.
    """

    inner: int  # channels
    state: int
    rank: int  # of the time step projection
    taps: int  # kernel size of its convolution
    bias: bool = False
    convolution_bias: bool = True
    normed: bool = False  # norms of time steps, B and C: Jamba


# layers ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """One layer: attention and an MLP, or one of them. Ledgers are computed once for equal layers.

    ``attention``: attention, or a state-space or linear-attention layer; None: neither. ``mlp``: None: no MLP.
    ``low_precision``: its input is 16-bit under autocast where that of others is fp32.
    ``detached``: its input has no gradient, as in the first layer after a frozen embedding.
    ``source``: it belongs to the encoder, with that one's sequence length. ``cross``: cross-attention to the encoder.
    ``plain_start``: no norm before its attention, since the embedding ends with one.
    ``ahead``: depth of a multi-token prediction (MTP) layer, from 1; 0: one of the model's own layers.
    ``repeats``: it shares the weights of the previous layer.
    ``gemm_recipes``: globs of its GEMMs and recipes that replace the run's: NOTE [ Recipes of single GEMMs ].
    """

    attention: Attention | LatentAttention | Scan | None
    mlp: Mlp | Moe | None
    norm: Norm
    arrangement: Arrangement = Arrangement.PRE
    detached: bool = False
    low_precision: bool = False
    plain_start: bool = False
    source: bool = False
    cross: Attention | None = None
    ahead: int = 0
    repeats: bool = False
    gemm_recipes: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        if self.lone and (self.arrangement is not Arrangement.PRE or self.cross is not None):
            raise UsageError("a layer that is one block alone has its norm before it, and asks no encoder")

    @property
    def lone(self) -> bool:
        """Whether it has attention or an MLP, not both."""
        return self.attention is None or self.mlp is None

    @property
    def scan(self) -> Scan | None:
        """Its state-space or linear-attention part."""
        return self.attention if isinstance(self.attention, Scan) else None

    @property
    def experts(self) -> Moe | None:
        """Its mixture of experts."""
        return self.mlp if isinstance(self.mlp, Moe) else None

    @property
    def window(self) -> int | None:
        """Sliding window in tokens; None: full attention."""
        return self.attention.window if isinstance(self.attention, Attention) else None

    @property
    def causal(self) -> bool:
        """Whether attention is causal."""
        if self.cross is not None:
            return False  # counted in full, since cross-attention is not masked
        if self.attention is None or self.scan is not None:
            return False  # no scores to mask
        return self.attention.causal if isinstance(self.attention, Attention) else True

    @property
    def heads(self) -> int:
        """Query heads; 1 without attention."""
        return self.attention.heads if isinstance(self.attention, Attention | LatentAttention) else 1

    @property
    def attended_width(self) -> int:
        """Width of all heads' values: h in PaLM's FLOPs formula."""
        match self.attention:
            case Attention(heads=heads, head_dim=width) | LatentAttention(heads=heads, value_dim=width):
                return heads * width
            case _:
                return 0


class BlockRecorder(ABC):
    """Recorder of the blocks of a model without a description. Equal recorders record equal blocks."""

    @property
    @abstractmethod
    def words(self) -> str:
        """Name of the recorded model, for messages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedLayer:
    """A recorded block: all its tensors, without information about sharding.

    Args:
        chained: each block reads only the previous one's output, so that a pipeline can be split between any two.
    """

    recorder: BlockRecorder
    call: int  # number of the first equal call in a forward
    kind: str  # name of its class
    causal: bool = True
    attended_width: int = 0  # width of all heads; 0: no attention
    fused: bool = True  # its attention is one kernel
    chained: bool = True
    ahead: ClassVar[int] = 0  # MTP layers are not recorded
    experts: ClassVar[None] = None  # no expert parallelism
    window: ClassVar[None] = None  # masked scores are computed
    heads: ClassVar[int] = 1  # no tensor parallelism


AnyLayer = Layer | RecordedLayer


@dataclass(frozen=True, kw_only=True, slots=True)
class DropoutSites:
    """Places where the architecture has dropout."""

    embedding: bool = False
    attention: bool = False
    residual: bool = False
    projected: bool = False  # after the projection of features to tokens
    inner: bool = False  # before an MLP's down projection
    output: bool = False  # after the last norm of a stack


class Pooling(StrEnum):
    """Input of a classification head."""

    NONE = "none"  # every token: no classification
    FIRST = "first"  # the class token, after the final norm: ViT
    PATCHES = "patches"  # the mean of all other tokens, before the final norm: CLIP


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """Output head. ``transform`` is BERT's dense + activation + norm before the vocabulary."""

    bias: bool = False
    transform: Activation | None = None
    transform_bias: bool = True
    softcap: bool = False
    scaled: bool = False  # its input is multiplied by a number
    pooling: Pooling = Pooling.NONE


# images, audio and encoder inputs -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Patches:
    """An image as patches, with an optional class token (arXiv 2010.11929). Raise `UsageError` for impossible sizes."""

    height: int
    width: int
    patch: int
    channels: int
    bias: bool = True  # of the patch embedding
    class_token: bool = True

    def __post_init__(self) -> None:
        positive("image", height=self.height, width=self.width, patch=self.patch, channels=self.channels)
        if self.patch > min(self.height, self.width):
            raise UsageError(f"a patch of {self.patch} pixels does not fit an image of {self.height} x {self.width}")

    @property
    def count(self) -> int:
        """Number of patches; remaining pixels are ignored."""
        return (self.height // self.patch) * (self.width // self.patch)

    @property
    def tokens(self) -> int:
        """Sequence length s."""
        return self.count + self.class_token


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderInput:
    """Input of an encoder-decoder's encoder. Text shares the decoder's embedding."""

    max_positions: int  # the longest source with learned positions; with ``sound`` the length of every source
    position_rows: int = 0  # of learned positions; 0: any length
    trained_positions: bool = True  # otherwise frozen sines
    sound: int = 0  # frequency bins of a spectrogram, read by two convolutions, the second of stride 2; 0: text

    def __post_init__(self) -> None:
        positive("encoder", max_positions=self.max_positions)

    def longest(self, seq: int) -> int:
        """Return a source length for a decoder of ``seq`` tokens: the same where possible."""
        return self.max_positions if self.sound else min(seq, self.max_positions) if self.position_rows else seq


SECOND: Final = 16_000
"""Samples per second of audio."""
CHARACTERS: Final = 16
"""Labels per second of speech: its text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Audio:
    """Feature encoder from samples to tokens, and CTC loss. Raise `UsageError` for lists of different lengths, or sizes
    below one.

    Args:
        channels, kernels, strides: of the convolutions in order.
        masked_time, masked_features: SpecAugment: a learned vector replaces some tokens, and zeros some features.
        position_kernel, position_groups: of the convolutional position embedding, which has weight norm.
    """

    channels: tuple[int, ...]
    kernels: tuple[int, ...]
    strides: tuple[int, ...]
    bias: bool
    group_norm: bool  # GroupNorm after the first convolution; otherwise LayerNorm after each
    activation: Activation
    projection_norm: bool = True
    masked_time: bool = False
    masked_features: bool = False
    mask: bool = False  # the model has that vector, used or not
    position_kernel: int = 128
    position_groups: int = 16
    mean_loss: bool = False  # ``ctc_loss_reduction`` mean; otherwise sum
    zero_infinity: bool = False  # ``ctc_zero_infinity``

    def lengths(self, samples: int) -> Iterator[int]:
        """Sequence lengths after each convolution."""
        for kernel, stride in zip(self.kernels, self.strides, strict=True):
            samples = (samples - kernel) // stride + 1
            yield samples

    def frames(self, samples: int) -> int:
        """Sequence length s of an audio of ``samples``."""
        *_, last = self.lengths(samples)
        return max(0, last)

    def tokens(self, name: str, samples: int) -> int:
        """Sequence length of ``--source-seq``; a `UsageError` if it has no token."""
        if samples < (least := self.samples(1)):
            raise UsageError(f"got --source-seq {samples}; {name} needs {least} samples or more for a token")
        return self.frames(samples)

    def samples(self, frames: int) -> int:
        """Fewest samples of a sequence of ``frames`` tokens."""
        for kernel, stride in zip(reversed(self.kernels), reversed(self.strides), strict=True):
            frames = (frames - 1) * stride + kernel
        return frames

    def heard(self, samples: int, frames: int) -> int:
        """Samples of a sequence: ``samples`` unless 0, or the fewest for its tokens."""
        return samples or self.samples(frames)

    def labels(self, samples: int) -> int:
        """Number of labels of an audio of ``samples``."""
        return max(1, samples * CHARACTERS // SECOND)

    def check(self, name: str, *, seq: int, samples: int) -> None:
        """Reject samples that do not have ``seq`` tokens."""
        if samples and self.frames(samples) != seq:
            raise UsageError(
                f"got --source-seq {samples} and --seq {seq}; {name} has {self.frames(samples)} tokens for that many "
                "samples: drop one of them"
            )


# models ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Architecture of a model.

    Args:
        vocab: vocabulary size, or number of classes.
        family: the published code that it follows ("llama", "gpt2", "paper", ...).
        max_positions: rows of learned positions, or the longest sequence that rotary embeddings were trained for.
        patches: patches of images, of models that read no text.
        audio: feature encoder of audio models.
        pair: image tower of a contrastive model.
        source: input of an encoder-decoder's encoder, whose layers come first.

    Raises:
        UsageError: a size below one, no layers.
    """

    name: str
    family: str
    hidden: int
    vocab: int
    layers: tuple[AnyLayer, ...]
    final_norm: Norm | None
    max_positions: int
    learned_positions: bool = False
    position_rows: int = 0  # of learned positions, if more than max_positions
    patches: Patches | None = None
    audio: Audio | None = None
    pair: Pair | None = None
    source: EncoderInput | None = None
    token_types: int = 0  # BERT's segment embedding
    embedding_norm: Norm | None = None
    embedding_scale: bool = False  # Gemma multiplies by sqrt(h)
    fp32_residual: bool = False  # fp32 residual stream in every precision: Mamba 2
    tied_embeddings: bool = False
    head: Head = Head()
    dropout_sites: DropoutSites = field(default_factory=DropoutSites)
    dropout: float = 0.0  # of its configuration
    dtype: str = "bfloat16"  # of its configuration
    base: str = field(default="", compare=False)  # ``--base`` of its configuration, for adapters
    unused_weights: tuple[tuple[str, tuple[int, ...]], ...] = ()  # of towers that text does not use: name, shape
    left_out: tuple[str, ...] = field(default=(), compare=False)  # parts that are not modelled, for messages

    def __repr__(self) -> str:
        kind = self.family if self.family == self.name else f"{self.name}, family {self.family}"
        return summary(self, f"{kind}, {len(self.layers)} layers, hidden {self.hidden}, vocab {self.vocab}")

    def __post_init__(self) -> None:
        positive(f"model {self.name}", hidden=self.hidden, vocab=self.vocab, max_positions=self.max_positions)
        if not self.layers:
            raise UsageError(f"model {self.name} has no layers")

    def __hash__(self) -> int:
        """Hash of the fields that most models differ in; cheap, since models are cache keys."""
        return hash((self.name, self.family, self.hidden, self.vocab, self.depth))

    @cached_property
    def kinds(self) -> tuple[AnyLayer, ...]:
        """Distinct layers in order of first occurrence."""
        return tuple(dict.fromkeys(self.layers))

    @cached_property
    def kind_numbers(self) -> tuple[int, ...]:
        """Index in `kinds` of each layer."""
        numbers = {layer: number for number, layer in enumerate(self.kinds)}
        return tuple(numbers[layer] for layer in self.layers)

    @cached_property
    def layer_runs(self) -> tuple[tuple[int, int, int], ...]:
        """Runs of equal consecutive layers: (index in `kinds`, first, one past the last)."""
        runs = [(number, len(list(same))) for number, same in groupby(self.kind_numbers)]
        stops = list(accumulate(length for _, length in runs))
        return tuple((number, stop - length, stop) for (number, length), stop in zip(runs, stops, strict=True))

    @cached_property
    def layer_names(self) -> tuple[str, ...]:
        """Names of the layers in ledgers."""
        own = self.depth - self.mtp_num_layers
        return (*(f"layers.{index}" for index in range(own)), *(f"mtp.{index}" for index in range(self.mtp_num_layers)))

    @cached_property
    def mtp_num_layers(self) -> int:
        """Number of layers for multi-token prediction (MTP), which come last."""
        return sum(layer.ahead > 0 for layer in self.layers)

    @cached_property
    def recorder(self) -> BlockRecorder | None:
        """Recorder of its blocks; None: they are described."""
        first = self.layers[0]
        return first.recorder if isinstance(first, RecordedLayer) else None

    @cached_property
    def described(self) -> tuple[Layer, ...]:
        """Distinct layers with a description."""
        return tuple(layer for layer in self.kinds if isinstance(layer, Layer))

    @property
    def words(self) -> bool:
        """Whether it reads text, not only images or audio."""
        return self.patches is None and self.audio is None

    @property
    def two_stacks(self) -> str:
        """Kind of a model with two stacks, for messages; "": one stack."""
        return "an encoder with a decoder" if self.source else "two towers" if self.pair else ""

    @property
    def shortest(self) -> int:
        """Tokens of the shortest sequence: 1, or those of an image."""
        return 1 if self.patches is None else self.patches.tokens

    @property
    def shortest_source(self) -> int:
        """Tokens of the shortest source; 0: no encoder."""
        if self.pair is not None:
            return self.pair.tokens
        return 0 if self.source is None else self.source.max_positions if self.source.sound else 1

    @property
    def depth(self) -> int:
        """Number of layers L with MTP layers."""
        return len(self.layers)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Image tower of a contrastive model such as CLIP (arXiv 2103.00020 §2.3); its layers come first.

    ``width``: of the joint embedding.
    """

    images: ModelSpec
    width: int

    @property
    def tokens(self) -> int:
        """Tokens of an image."""
        assert self.images.patches is not None, "an image tower without images"
        return self.images.patches.tokens
