"""What mixes the tokens of a layer where attention does not: a state that is carried from one token to the next.

Each is a frozen record of sizes, as `Attention` is; what its forward saves stands in `formula`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from jettison.errors import UsageError


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
