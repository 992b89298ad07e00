"""One row of the zoo's table, and what rows are written with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 96
ROWS = 2

Batch = dict[str, Any] | tuple[Any, ...]
MakeBatch = Callable[[int], Batch]
"""The batch of a step; called under a seed, once a step, in order."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A family: how to make its model and its batches. Everything random in them comes from seeded streams.

    Args:
        loss_fn: makes the loss of the output where the output is not it and has no ``.loss``.
        values_decide: the bytes of a step depend on values (how many rows a mask chooses). A later step may then need
            more than the one that was planned, if that is said.
        by_chance: draws leave layers out. The smallest budget is that of a step that has them all.
        watched_bytes: torch saves so much more of it where anything watches the ops, as every dry run does.
    """

    name: str
    model: Callable[[], nn.Module]
    batch: MakeBatch
    loss_fn: Callable[[Any], Tensor] | None = None
    values_decide: bool = False
    by_chance: bool = False
    watched_bytes: int = 0

    def __str__(self) -> str:
        return self.name


def hugging_face(
    name: str,
    model_class: str,
    config_class: str,
    batch: MakeBatch,
    *,
    loss_fn: Callable[[Any], Tensor] | None = None,
    values_decide: bool = False,
    **settings: Any,
) -> Entry:
    """A tiny transformers model with random weights."""

    def model() -> nn.Module:
        import transformers

        config = getattr(transformers, config_class)(**settings)
        return getattr(transformers, model_class)(config)

    by_chance = any(key.endswith("layerdrop") and share > 0 for key, share in settings.items())
    return Entry(name=name, model=model, batch=batch, loss_fn=loss_fn, values_decide=values_decide, by_chance=by_chance)


def tokens(*lengths: int, vocabulary: int = VOCABULARY, padded: bool = False, low: int = 3) -> MakeBatch:
    """``input_ids`` and ``labels``, [ROWS, length]; the lengths take turns over the steps.

    Args:
        padded: with an attention mask that hides the last quarter of the last row.
    """

    def make(step: int) -> Batch:
        length = lengths[step % len(lengths)]
        ids = torch.randint(low, vocabulary, (ROWS, length))
        batch = {"input_ids": ids, "labels": ids.clone()}
        if padded:
            batch["attention_mask"] = torch.ones_like(ids)
            batch["attention_mask"][-1, -(length // 4) :] = 0
        return batch

    return make


def pairs(source: int, target: int) -> MakeBatch:
    """``input_ids`` [ROWS, source] and ``labels`` [ROWS, target]."""

    def make(step: int) -> Batch:
        return {
            "input_ids": torch.randint(3, VOCABULARY, (ROWS, source)),
            "labels": torch.randint(3, VOCABULARY, (ROWS, target)),
        }

    return make


def images(size: int, *, labels: int = 4, channels: int = 3) -> MakeBatch:
    """``pixel_values`` [ROWS, channels, size, size] and one class each."""

    def make(step: int) -> Batch:
        pixels = torch.randn(ROWS, channels, size, size)
        return {"pixel_values": pixels, "labels": torch.randint(labels, (ROWS,))}

    return make


def normal(*shape: int) -> MakeBatch:
    """One positional tensor of normal numbers."""
    return lambda step: (torch.randn(*shape),)


def by_hand(name: str, model: Callable[[], nn.Module], batch: MakeBatch, **more: Any) -> Entry:
    """A model whose output is its loss."""
    return Entry(name=name, model=model, batch=batch, **more)


class Stack(nn.Module):
    """``head(blocks(stem(x)))``, and the mean square of it as the loss."""

    def __init__(self, stem: nn.Module, blocks: list[nn.Module], head: nn.Module) -> None:
        super().__init__()
        self.stem, self.layers, self.head = stem, nn.ModuleList(blocks), head

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.layers:
            x = block(x)
        return self.head(x).square().mean()
