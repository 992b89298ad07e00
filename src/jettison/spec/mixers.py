"""What mixes the tokens of a layer where attention does not: a state that is carried from one token to the next.

Each is a frozen record of sizes, as `Attention` is; what its forward saves stands in `formula`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from jettison.core.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class Scan:
    """Whatever carries a state along the sequence. No description says how ranks would share one.

    Raises:
        UsageError: a size below one.
    """

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not isinstance(value, bool) and (not isinstance(value, int) or value < 1):
                raise UsageError(f"{self.words}: got {each.name} {value!r}; expected a whole number of 1 or more")

    @property
    def words(self) -> str:
        """Its name in a message."""
        return type(self).__name__


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedDelta(Scan):
    """The gated delta rule (arXiv 2412.06464): each head has a matrix of ``key_dim`` x ``value_dim``, which decays and
    is corrected by each token.

    Args:
        taps: tokens that the convolution before it reads.
        chunk: tokens that are worked out together.
        grouped: query, key, value and gate come out of one product, head by head, and both rates out of another:
            Qwen3-Next. Otherwise the gate and either rate have products of their own: Qwen3.5.

    Raises:
        UsageError: a size below one, or value heads that do not share key heads evenly.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int = 4
    chunk: int = 64
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
class Mamba2(Scan):
    """State space duality (arXiv 2405.21060): each head has a matrix of ``head_dim`` x ``state``, which decays by a
    number a token.

    Args:
        groups: of heads that share what is written and what is asked, and of channels that are normalised together.
        taps: tokens that the convolution before it reads.
        chunk: tokens that are worked out together.
        bias: of the projections; ``convolution_bias``: of the convolution.

    Raises:
        UsageError: a size below one, or heads that do not share groups evenly.
    """

    heads: int
    head_dim: int
    state: int
    groups: int
    taps: int
    chunk: int
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
class Mamba1(Scan):
    """A selective state space (arXiv 2312.00752): each channel has ``state`` numbers, which decay at their own rates.

    Args:
        inner: channels.
        rank: of the product that makes their time steps.
        taps: tokens that the convolution before it reads.
        bias: of the projections; ``convolution_bias``: of the convolution.
        normed: time steps, what is written and what is asked are normalised: Jamba.
    """

    inner: int
    state: int
    rank: int
    taps: int
    bias: bool = False
    convolution_bias: bool = True
    normed: bool = False

    @property
    def words(self) -> str:
        return "state-space scan"
