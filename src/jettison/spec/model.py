"""A model as numbers and choices: enough to write down every tensor of it, nothing of how it is computed.

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
    """What a normalisation divides by."""

    LAYER = "layer"  # mean and standard deviation (arXiv 1607.06450)
    RMS = "rms"  # root mean square (arXiv 1910.07467)


class Arrangement(StrEnum):
    """Where a layer's norms stand."""

    PRE = "pre"  # x + f(norm(x)): GPT-2, Llama
    PARALLEL = "parallel"  # x + attention(norm1(x)) + mlp(norm2(x)): GPT-NeoX
    SHARED = "shared"  # x + attention(n) + mlp(n), n = norm(x): GPT-J, Phi
    POST = "post"  # x + norm(f(x)): OLMo 2
    SANDWICH = "sandwich"  # x + norm(f(norm(x))): Gemma 2
    OUTER = "outer"  # norm(x + f(x)): BERT


class Activation(StrEnum):
    """The nonlinearity of a feed-forward block."""

    GELU = "gelu"  # the exact one, one kernel
    GELU_TANH = "gelu_tanh"  # the approximation, one kernel
    GELU_WRITTEN = "gelu_written"  # the approximation written out op by op: GPT-2's gelu_new
    GELU_FAST = "gelu_fast"  # the same with its factors in another order, which keeps more
    GELU_QUICK = "gelu_quick"  # x * sigmoid(1.702 x), op by op: CLIP
    SILU = "silu"
    RELU = "relu"
    RELU_SQUARED = "relu2"
    CLAMPED_SWIGLU = "clamped_swiglu"  # gpt-oss: clamp both halves, gate * sigmoid(1.702 gate) * (up + 1)


class QkNorm(StrEnum):
    """Normalisation of queries and keys before the product."""

    NONE = "none"
    HEAD = "head"  # over each head's d: Qwen3, Gemma 3
    WIDTH = "width"  # over all heads together: OLMo 2
    APIECE = "apiece"  # over each head's d, with a weight for each head: Command R+, StableLM 2 12B
    LENGTH = "length"  # over each head's d, without a weight, and after the rotation: Llama 4


class Router(StrEnum):
    """How scores become the experts of a token."""

    SOFTMAX_TOPK = "softmax, then top-k"  # Mixtral, Qwen3-MoE, DeepSeek-V2
    TOPK_SOFTMAX = "top-k, then softmax"  # gpt-oss
    SIGMOID_GROUPS = "sigmoid, top-k within groups"  # DeepSeek-V3
    TOPK_SIGMOID = "top-k, then sigmoid"  # Llama 4
    SPARSE_MIXER = "one after the other, each drawn from a softmax over those near the best"  # PhiMoE, arXiv 2409.12136


class Biases(StrEnum):
    """Where a layer's attention has learned biases of scores by distance from (arXiv 1910.10683 §2.1)."""

    NONE = "none"
    OWN = "own"  # each layer makes its own: umT5
    FIRST = "first"  # this layer makes them and hands them on: the first of each stack of T5
    GIVEN = "given"  # those of the first layer

    @property
    def made(self) -> bool:
        """Are there any?"""
        return self is not Biases.NONE


def positive(who: str, **sizes: object) -> None:
    """Refuse sizes that are no whole numbers of 1 or more, by their names."""
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(f"{who}: got {name} {value!r}; expected a whole number of 1 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class Norm:
    """A normalisation's parameters. ``offset`` is Gemma's 1 + weight; OLMo's first has no ``weight``."""

    kind: NormKind
    bias: bool = False
    offset: bool = False
    weight: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """Softmax attention with k <= a key-value heads. Biases are of the projections.

    Raises:
        UsageError: a size below one, or heads that do not share key-value heads evenly.
    """

    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    key_bias: bool = True  # where the others have one: Whisper's keys do not
    out_bias: bool = False
    fused_qkv: bool = False  # one weight for query, key and value
    qk_norm: QkNorm = QkNorm.NONE
    rotary_dim: int = 0  # how much of d is rotated; 0: no rotary positions
    window: int | None = None  # tokens that a query sees; None: all before it
    softcap: bool = False  # scores pass c * tanh(score / c)
    sinks: bool = False  # a learned logit a head takes part in the softmax: gpt-oss
    alibi: bool = False  # scores get a multiple of the distance, one factor a head (arXiv 2108.12409)
    clipped: bool = False  # what the projections give is clamped
    scaled_queries: bool = False  # by a factor that grows with the position (arXiv 2501.19399)
    gated: bool = False  # what it returns is weighted, by as many numbers as queries have, of the same product
    causal: bool = True
    biases: Biases = Biases.NONE  # are added to scores
    buckets: int = 0  # rows of their table, one for distances that are taken together; 0: they are zeros

    def __post_init__(self) -> None:
        positive("attention", heads=self.heads, kv_heads=self.kv_heads, head_dim=self.head_dim)
        if self.heads % self.kv_heads:
            raise UsageError(f"{self.heads} heads cannot share {self.kv_heads} key-value heads evenly")
        if self.window is not None:
            positive("attention", window=self.window)


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434 §2.1): queries and keys-values pass a low rank."""

    heads: int
    query_rank: int | None  # None: queries are projected directly
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
        """Every head has its own keys and values once they are expanded."""
        return self.heads

    @property
    def query_dim(self) -> int:
        """Width of one head's query and key."""
        return self.nope_dim + self.rope_dim


@dataclass(frozen=True, kw_only=True, slots=True)
class Mlp:
    """A feed-forward block; gated ones multiply the activation of one half with the other."""

    ffn: int
    activation: Activation
    gated: bool = False
    bias: bool = False
    fused_gate_up: bool = False  # one weight for both halves: Phi-3

    def __post_init__(self) -> None:
        positive("feed-forward block", ffn=self.ffn)


@dataclass(frozen=True, kw_only=True, slots=True)
class Moe:
    """A mixture of ``experts`` feed-forward blocks of width ``ffn``, ``top_k`` for a token, and perhaps shared ones."""

    experts: int
    top_k: int
    ffn: int
    activation: Activation
    router: Router
    gated: bool = True
    bias: bool = False  # of the experts
    router_bias: bool = False  # learned: gpt-oss
    correction_bias: bool = False  # a buffer, not learned: DeepSeek-V3
    correction_frozen: bool = False  # a parameter without a gradient: ERNIE 4.5
    normalise_top_k: bool = False
    clamped_sum: bool = False  # what they are divided by has a least value, which is a further tensor
    weighted_inputs: bool = False  # tokens get their weights before the experts: Llama 4
    jitters: int = 0  # how often tokens are multiplied by noise before they are routed
    shared_ffn: int = 0  # width of the shared experts together; 0: none
    shared_gate: bool = False  # what they return is weighted by a number a token: Qwen2-MoE
    shared_fused: bool = False  # their gate and up are one weight
    groups: int = 1
    top_groups: int = 1
    latent: int = 0  # what experts read and return, where a product makes it of tokens and another tokens of it

    def __post_init__(self) -> None:
        positive("mixture of experts", experts=self.experts, top_k=self.top_k, ffn=self.ffn)
        if self.top_k > self.experts:
            raise UsageError(f"top_k {self.top_k} is more than the {self.experts} experts")


# layers that carry a state along the sequence: state-space (SSM), linear attention ------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Scan:
    """Whatever carries a state along the sequence. No description says how ranks would share one.

    Raises:
        UsageError: a size below one.
    """

    def __post_init__(self) -> None:
        sizes = {each.name: getattr(self, each.name) for each in fields(self)}
        positive(self.words, **{name: size for name, size in sizes.items() if not isinstance(size, bool)})

    @property
    def words(self) -> str:
        """Its name in a message."""
        return type(self).__name__


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedDelta(Scan):
    """The gated delta rule (arXiv 2412.06464): each head has a matrix of ``key_dim`` x ``value_dim``, which decays and
    is corrected by each token.

    Args:
        grouped: query, key, value and gate come out of one product, head by head, and both rates out of another:
            Qwen3-Next. Otherwise the gate and either rate have products of their own: Qwen3.5.

    Raises:
        UsageError: a size below one, or value heads that do not share key heads evenly.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int = 4  # tokens that the convolution before it reads
    chunk: int = 64  # tokens that are worked out together
    grouped: bool = False

    def __post_init__(self) -> None:
        Scan.__post_init__(self)
        if self.value_heads % self.key_heads:
            raise UsageError(f"{self.value_heads} value heads cannot share {self.key_heads} key heads evenly")

    @property
    def words(self) -> str:
        return "gated delta rule"

    @property
    def keys(self) -> int:
        """Of all heads together."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Of all heads together."""
        return self.value_heads * self.value_dim


@dataclass(frozen=True, kw_only=True, slots=True)
class StateSpaceDual(Scan):
    """State space duality (arXiv 2405.21060): each head has a matrix of ``head_dim`` x ``state``, which decays by a
    number a token.

    Args:
        bias: of the projections; ``convolution_bias``: of the convolution.

    Raises:
        UsageError: a size below one, or heads that do not share groups evenly.
    """

    heads: int
    head_dim: int
    state: int
    groups: int  # of heads that share what is written and what is asked, and of channels that are normalised together
    taps: int  # tokens that the convolution before it reads
    chunk: int  # tokens that are worked out together
    bias: bool = False
    convolution_bias: bool = True

    def __post_init__(self) -> None:
        Scan.__post_init__(self)
        if self.heads % self.groups:
            raise UsageError(f"{self.heads} heads cannot share {self.groups} groups evenly")

    @property
    def words(self) -> str:
        return "state-space scan"

    @property
    def inner(self) -> int:
        """Channels of all heads."""
        return self.heads * self.head_dim

    @property
    def convolved(self) -> int:
        """Channels that pass the convolution."""
        return self.inner + 2 * self.groups * self.state


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectiveScan(Scan):
    """A selective state space (arXiv 2312.00752): each channel has ``state`` numbers, which decay at their own rates.

    Args:
        bias: of the projections; ``convolution_bias``: of the convolution.
    """

    inner: int  # channels
    state: int
    rank: int  # of the product that makes their time steps
    taps: int  # tokens that the convolution before it reads
    bias: bool = False
    convolution_bias: bool = True
    normed: bool = False  # time steps, what is written and what is asked are normalised: Jamba

    @property
    def words(self) -> str:
        return "state-space scan"


# layers ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """One layer: what mixes tokens, what works on each of them, or one of both alone. Equal layers are equal objects:
    they are worked out once.

    ``attention``: what mixes tokens; None: nothing does. ``mlp``: what works on each; None: nothing does.
    ``narrow``: it is given 16 bits where others are given fp32, under autocast.
    ``detached``: no gradient leaves through its input, as of the first layer over a frozen embedding.
    ``source``: it is of the encoder, and as long as what that reads. ``cross``: what its queries ask of the encoder.
    ``plain_start``: no norm before its attention, since the embedding ends with one.
    ``ahead``: it predicts a token that many places further on, after the model's own layers; 0: it is one of these.
    ``repeats``: its weights are those of the layer before it, which it runs once more.
    ``products``: globs of its products, and recipes in the place of the run's: NOTE [ Recipes of single GEMMs ].
    """

    attention: Attention | LatentAttention | Scan | None
    mlp: Mlp | Moe | None
    norm: Norm
    arrangement: Arrangement = Arrangement.PRE
    detached: bool = False
    narrow: bool = False
    plain_start: bool = False
    source: bool = False
    cross: Attention | None = None
    ahead: int = 0
    repeats: bool = False
    products: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        if self.lone and (self.arrangement is not Arrangement.PRE or self.cross is not None):
            raise UsageError("a layer that is one block alone has its norm before it, and asks no encoder")

    @property
    def lone(self) -> bool:
        """Is it one block alone?"""
        return self.attention is None or self.mlp is None

    @property
    def scan(self) -> Scan | None:
        """What carries a state along the sequence, where something does."""
        return self.attention if isinstance(self.attention, Scan) else None

    @property
    def experts(self) -> Moe | None:
        """Its experts, where it has some."""
        return self.mlp if isinstance(self.mlp, Moe) else None

    @property
    def window(self) -> int | None:
        """Tokens that a query sees; None: all before it."""
        return self.attention.window if isinstance(self.attention, Attention) else None

    @property
    def causal(self) -> bool:
        """Does a token see those before it alone?"""
        if self.cross is not None:
            return False  # counted in full, since most of what it asks of the encoder is seen
        if self.attention is None or self.scan is not None:
            return False  # has no scores that a mask leaves out
        return self.attention.causal if isinstance(self.attention, Attention) else True

    @property
    def heads(self) -> int:
        """Of queries; one where there are none, since nothing divides that."""
        return self.attention.heads if isinstance(self.attention, Attention | LatentAttention) else 1

    @property
    def attended_width(self) -> int:
        """Of all heads' values together: h in PaLM's formula."""
        match self.attention:
            case Attention(heads=heads, head_dim=width) | LatentAttention(heads=heads, value_dim=width):
                return heads * width
            case _:
                return 0


class BlockRecorder(ABC):
    """Whoever can record the blocks of a model that nobody has described. Equal ones record the same."""

    @property
    @abstractmethod
    def words(self) -> str:
        """What it records, in a message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedLayer:
    """A block as a trace has it: its record is complete, and nothing in it says how ranks would share it.

    Args:
        chained: each block reads the one before it and no other, so that a pipeline can be cut between any two.
    """

    recorder: BlockRecorder
    call: int  # which of the calls of a forward it stands for: the first of those that are alike
    kind: str  # its class, for people
    causal: bool = True
    attended_width: int = 0  # of all heads together; 0 where there are none
    fused: bool = True  # its attention is one kernel
    chained: bool = True
    ahead: ClassVar[int] = 0  # where layers for multi-token prediction come from is not recorded
    experts: ClassVar[None] = None  # that ranks could share
    window: ClassVar[None] = None  # what a mask leaves out is computed
    heads: ClassVar[int] = 1  # nothing divides it


AnyLayer = Layer | RecordedLayer


@dataclass(frozen=True, kw_only=True, slots=True)
class DropoutSites:
    """Where the architecture drops out once a probability is given."""

    embedding: bool = False
    attention: bool = False
    residual: bool = False
    projected: bool = False  # after what makes tokens of features
    inner: bool = False  # before the last product of a feed-forward block
    output: bool = False  # after the last norm of a stack


class Pooling(StrEnum):
    """What of a sequence is classified."""

    NONE = "none"  # each token is a prediction
    FIRST = "first"  # its first token, after the last norm: ViT
    PATCHES = "patches"  # the mean of all others, which no norm has seen: CLIP


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """From the last layer to logits. ``transform`` is BERT's dense + activation + norm before the vocabulary."""

    bias: bool = False
    transform: Activation | None = None
    transform_bias: bool = True
    softcap: bool = False
    scaled: bool = False  # what it reads is multiplied by a number
    pooling: Pooling = Pooling.NONE


# what a sequence is made of where it is not words alone ---------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Patches:
    """An image as a sequence: its squares, each a token, and perhaps one more to be classified (arXiv 2010.11929).

    Raises:
        UsageError: a size below one, or patches that are larger than the image.
    """

    height: int
    width: int
    patch: int
    channels: int
    bias: bool = True  # of the product that makes tokens
    class_token: bool = True

    def __post_init__(self) -> None:
        positive("image", height=self.height, width=self.width, patch=self.patch, channels=self.channels)
        if self.patch > min(self.height, self.width):
            raise UsageError(f"a patch of {self.patch} pixels does not fit an image of {self.height} x {self.width}")

    @property
    def count(self) -> int:
        """Of an image; pixels that fill none are not seen."""
        return (self.height // self.patch) * (self.width // self.patch)

    @property
    def tokens(self) -> int:
        """s."""
        return self.count + self.class_token


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderInput:
    """What an encoder reads beside a decoder. Words share the decoder's table."""

    max_positions: int  # the longest source where there is a table; with ``sound`` every one is that long
    position_rows: int = 0  # of a learned table; 0: there is none, and positions have no end
    trained_positions: bool = True  # otherwise they are sines that were written into it
    sound: int = 0  # rows of a spectrum, which two convolutions make tokens of, the second one for each two frames

    def __post_init__(self) -> None:
        positive("encoder", max_positions=self.max_positions)

    def longest(self, seq: int) -> int:
        """What it can read beside a decoder of so many tokens, if they are to be equally long."""
        return self.max_positions if self.sound else min(seq, self.max_positions) if self.position_rows else seq


SECOND: Final = 16_000
"""Samples of a second, as these models take it."""
CHARACTERS: Final = 16
"""Labels of a second of speech: its text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Audio:
    """From samples to tokens, and from tokens to a loss.

    Args:
        channels, kernels, strides: of the convolutions, one after the other.
        masked_time, masked_features: a learned vector is written over some tokens, and zeros over some features.
        position_kernel, position_groups: of the convolution that says where a token is, whose weight is normalised.

    Raises:
        UsageError: lists of other lengths, or sizes below one.
    """

    channels: tuple[int, ...]
    kernels: tuple[int, ...]
    strides: tuple[int, ...]
    bias: bool
    group_norm: bool  # after the first of them stands a norm of each channel; otherwise after each a LayerNorm
    activation: Activation
    projection_norm: bool = True
    masked_time: bool = False
    masked_features: bool = False
    mask: bool = False  # that vector is there, used or not
    position_kernel: int = 128
    position_groups: int = 16
    mean_loss: bool = False  # of a sequence's loss by its number of labels; otherwise the sum
    zero_infinity: bool = False  # losses without end count nothing

    def lengths(self, samples: int) -> Iterator[int]:
        """After each convolution."""
        for kernel, stride in zip(self.kernels, self.strides, strict=True):
            samples = (samples - kernel) // stride + 1
            yield samples

    def frames(self, samples: int) -> int:
        """s: tokens of so many samples."""
        *_, last = self.lengths(samples)
        return max(0, last)

    def tokens(self, name: str, samples: int) -> int:
        """The same of what is asked for; too few for one token are refused."""
        if samples < (least := self.samples(1)):
            raise UsageError(f"got --source-seq {samples}; {name} needs {least} samples or more for a token")
        return self.frames(samples)

    def samples(self, frames: int) -> int:
        """The fewest that make so many tokens."""
        for kernel, stride in zip(reversed(self.kernels), reversed(self.strides), strict=True):
            frames = (frames - 1) * stride + kernel
        return frames

    def heard(self, samples: int, frames: int) -> int:
        """Samples of a sequence: as many as are asked for, or the fewest that make its tokens."""
        return samples or self.samples(frames)

    def labels(self, samples: int) -> int:
        """Of a sequence; the text of speech."""
        return max(1, samples * CHARACTERS // SECOND)

    def check(self, name: str, *, seq: int, samples: int) -> None:
        """Refuse samples that do not make so many tokens."""
        if samples and self.frames(samples) != seq:
            raise UsageError(
                f"got --source-seq {samples} and --seq {seq}; {name} makes {self.frames(samples)} tokens of so many "
                "samples: leave one of them away"
            )


# models ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A whole model.

    Args:
        vocab: words; of what classifies, classes.
        family: which published code it follows where codes differ ("llama", "gpt2", "paper", ...).
        max_positions: rows of learned positions, or the longest sequence that rotary positions were made for.
        max_sequence: None where positions have no end.
        patches: what its sequences are made of, where it reads images and no words.
        audio: how it makes tokens of sound.
        pair: images that its texts are held against.
        source: what its encoder reads. The encoder's layers come first, and each layer of the decoder asks its result.

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
    position_rows: int = 0  # of the learned table, where it has more than max_positions
    patches: Patches | None = None
    audio: Audio | None = None
    pair: Pair | None = None
    source: EncoderInput | None = None
    token_types: int = 0  # BERT's segment embedding
    embedding_norm: Norm | None = None
    embedding_scale: bool = False  # Gemma multiplies by sqrt(h)
    wide_stream: bool = False  # the residual stream is fp32 whatever activations are: Mamba 2
    tied_embeddings: bool = False
    head: Head = Head()
    dropout_sites: DropoutSites = field(default_factory=DropoutSites)
    dropout: float = 0.0  # what its configuration asks for
    dtype: str = "bfloat16"  # what its configuration asks for
    beside: tuple[tuple[str, tuple[int, ...]], ...] = ()  # weights that no text runs: of towers, by name
    left_out: tuple[str, ...] = field(default=(), compare=False)  # beside the text model, in words

    def __repr__(self) -> str:
        kind = self.family if self.family == self.name else f"{self.name}, family {self.family}"
        return summary(self, f"{kind}, {len(self.layers)} layers, hidden {self.hidden}, vocab {self.vocab}")

    def __post_init__(self) -> None:
        positive(f"model {self.name}", hidden=self.hidden, vocab=self.vocab, max_positions=self.max_positions)
        if not self.layers:
            raise UsageError(f"model {self.name} has no layers")

    def __hash__(self) -> int:
        """Cheap: models are keys of caches, and most differ in these."""
        return hash((self.name, self.family, self.hidden, self.vocab, self.depth))

    @cached_property
    def kinds(self) -> tuple[AnyLayer, ...]:
        """The distinct layers, in order of first appearance."""
        return tuple(dict.fromkeys(self.layers))

    @cached_property
    def kind_numbers(self) -> tuple[int, ...]:
        """By layer, which of `kinds` it is."""
        numbers = {layer: number for number, layer in enumerate(self.kinds)}
        return tuple(numbers[layer] for layer in self.layers)

    @cached_property
    def stretches(self) -> tuple[tuple[int, int, int], ...]:
        """Runs of neighbours that are alike: (which of `kinds`, first, one past the last)."""
        runs = [(number, len(list(same))) for number, same in groupby(self.kind_numbers)]
        stops = list(accumulate(length for _, length in runs))
        return tuple((number, stop - length, stop) for (number, length), stop in zip(runs, stops, strict=True))

    @cached_property
    def layer_names(self) -> tuple[str, ...]:
        """What ledgers call the layers."""
        own = self.depth - self.further
        return (*(f"layers.{index}" for index in range(own)), *(f"mtp.{index}" for index in range(self.further)))

    @cached_property
    def further(self) -> int:
        """Layers at the end that predict further tokens."""
        return sum(layer.ahead > 0 for layer in self.layers)

    @cached_property
    def recorder(self) -> BlockRecorder | None:
        """Who has its blocks, where they are not described."""
        first = self.layers[0]
        return first.recorder if isinstance(first, RecordedLayer) else None

    @cached_property
    def described(self) -> tuple[Layer, ...]:
        """Of its kinds, those that say what they are made of."""
        return tuple(layer for layer in self.kinds if isinstance(layer, Layer))

    @property
    def words(self) -> bool:
        """Does it read words, which ranks can share, and neither images nor sound alone?"""
        return self.patches is None and self.audio is None

    @property
    def two_stacks(self) -> str:
        """Two of them, in words: an encoder with a decoder, or two towers; "": one."""
        return "an encoder with a decoder" if self.source else "two towers" if self.pair else ""

    @property
    def shortest(self) -> int:
        """Tokens of the shortest sequence: an image is as long as it is."""
        return 1 if self.patches is None else self.patches.tokens

    @property
    def shortest_source(self) -> int:
        """The same of what an encoder reads; 0: there is none beside a decoder."""
        if self.pair is not None:
            return self.pair.tokens
        return 0 if self.source is None else self.source.max_positions if self.source.sound else 1

    @property
    def depth(self) -> int:
        """L, with what predicts further tokens."""
        return len(self.layers)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Images held against texts (arXiv 2103.00020 §2.3): the tower of images, whose layers come first.

    ``width``: of what both become, in which they are compared.
    """

    images: ModelSpec
    width: int

    @property
    def tokens(self) -> int:
        """Of an image."""
        assert self.images.patches is not None, "a tower of images without images"
        return self.images.patches.tokens
