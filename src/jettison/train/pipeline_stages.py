"""A reference model cut into the stages of a pipeline.

Parts keep the names that they have in the whole model, so that checkpoints know them in every layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from jettison.errors import UsageError
from jettison.models.reference import Gpt, Llama, LlamaConfig, gpt_beside, gpt_places, llama_beside, mean_loss
from jettison.spec.layout import Layout


class StageModule(nn.Module):
    """A run of layers; the first one starts from ids [b, s], the last one ends in logits.

    Args:
        ends: whether it is the first, and the last: as its layers say, where it has some.
    """

    def __init__(self, whole: Gpt | Llama, layers: range, *, seq: int, ends: tuple[bool, bool] | None = None) -> None:
        super().__init__()
        self.config = whole.config
        self.seq = seq  # the stream may hold a shard of it
        self.is_first, self.is_last = ends or (layers.start == 0, layers.stop == len(whole.layers))
        self.is_gpt = isinstance(whole, Gpt)
        if self.is_first:
            self.tokens = whole.tokens
        if self.is_first and isinstance(whole, Gpt):
            self.positions, self.dropout = whole.positions, whole.dropout
        self.layers = nn.ModuleDict({str(number): whole.layers[number] for number in layers})
        if self.is_last:
            self.norm, self.head = whole.norm, whole.head

    def forward(self, x: Tensor, documents_bs: Tensor | None = None) -> Tensor:
        """From ids, or the stream of the stage before, to the stream, or logits."""
        if self.is_first:
            x = self._embedded(x, documents_bs)
        config, seq = self.config, self.seq
        beside: tuple[Any, ...] = (
            llama_beside(seq, config, x, documents_bs)
            if isinstance(config, LlamaConfig)
            else gpt_beside(seq, x, documents_bs)
        )
        for layer in self.layers.values():
            x = layer(x, *beside)
        return self.head(self.norm(x)) if self.is_last else x

    def loss(self, logits: Tensor, labels_bs: Tensor) -> Tensor:
        """Of one micro-batch, on the last stage."""
        return mean_loss(logits, labels_bs.t() if self.is_gpt else labels_bs)

    def stream(self, micro_batch: int, seq: int, dtype: torch.dtype) -> Tensor:
        """A tensor without values, like what one stage hands to the next."""
        sizes = (seq, micro_batch) if self.is_gpt else (micro_batch, seq)
        return torch.empty((*sizes, self.config.hidden), dtype=dtype, device="meta", requires_grad=True)

    def logits(self, micro_batch: int, dtype: torch.dtype) -> Tensor:
        """A tensor without values, like what the last stage returns."""
        sizes = (self.seq, micro_batch) if self.is_gpt else (micro_batch, self.seq)
        return torch.empty((*sizes, self.config.vocab), dtype=dtype, device="meta", requires_grad=True)

    def _embedded(self, ids_bs: Tensor, documents_bs: Tensor | None) -> Tensor:
        if not self.is_gpt:
            embedded: Tensor = self.tokens(ids_bs)
            return embedded
        places = self.positions(gpt_places(ids_bs, documents_bs))
        summed: Tensor = self.dropout(self.tokens(ids_bs.t().contiguous()) + places)
        return summed


def cut(whole: nn.Module, layout: Layout, rank: int, *, seq: int) -> list[StageModule]:
    """The stages of one pipeline rank, in the order of the model: chunk c of it is on rank c mod pp.

    Raises:
        UsageError: the model is not one that can be cut, its layers do not divide, or a stage has nothing to do.
    """
    if not isinstance(whole, Gpt | Llama):
        raise UsageError(
            f"layout.pp: a {type(whole).__name__} cannot be cut into stages; expected a reference model: "
            'model.architecture with code = "reference"'
        )
    chunks = list(_chunks(whole, layout))
    for number, layers in enumerate(chunks[1:-1], start=1):
        if not layers:
            raise UsageError(f"layout.stage_layers: stage {number} has no layers; only the first and the last may")
    return [
        StageModule(whole, layers, seq=seq, ends=(number == 0, number == len(chunks) - 1))
        for number, layers in enumerate(chunks)
        if number % layout.pp == rank
    ]


def _chunks(whole: Gpt | Llama, layout: Layout) -> Iterator[range]:
    start = 0
    for count in layout.layers_per_chunk(len(whole.layers)):
        yield range(start, start + count)
        start += count
