"""The text of a run, read whole once: is it one on all ranks, which is it, and can the model read it?

NOTE [ Who reads what ]
A small text is read whole by every rank, so that any difference is found. Of a larger one every rank looks at the
length, both ends and places between, which are compared; and reads whole blocks of its own share, which together are
all. So a text that is changed anywhere is another text when a run is resumed, and reading costs a rank its share only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from torch import nn

from jettison.errors import UsageError
from jettison.train.build_model import Built
from jettison.train.data import Block, Corpus, Survey
from jettison.train.ranks import World

_SMALL: Final = 16  # blocks


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """What some ranks found, the first of them first.

    Args:
        other: the first of them that has another text than the first, and how many tokens that has.
    """

    length: int
    sample: str
    blocks: Mapping[int, Block]
    rank: int
    other: tuple[int, int] | None = None


def surveyed(corpus: Corpus, world: World) -> Survey:
    """See NOTE [ Who reads what ]. All ranks call it.

    Raises:
        UsageError: on every rank, about the first that has another text than rank 0.
    """
    step, first = (1, 0) if corpus.blocks <= _SMALL else (world.size, world.rank)

    def look() -> _Seen:
        blocks = {n: corpus.block(n) for n in range(first, corpus.blocks, step)}
        return _Seen(length=len(corpus.tokens), sample=corpus.sample, blocks=blocks, rank=world.rank)

    found = world.gathered(world.together(look), _both)

    def whole() -> Survey:
        assert found is not None
        if found.other is not None:
            rank, length = found.other
            raise UsageError(
                f"data: rank {rank} has another text than rank 0: {length} tokens and {found.length}"
                f"{', of which some differ' if length == found.length else ''}; expected the same under one name "
                "on every machine"
            )
        return Survey.of([found.blocks[number] for number in range(corpus.blocks)])

    return world.from_leader(whole)


def _both(one: _Seen, more: _Seen) -> _Seen:
    """What ranks found, and others that come after them."""
    alike = all(one.blocks.get(number, block) == block for number, block in more.blocks.items())
    differs = (one.length, one.sample) != (more.length, more.sample) or not alike
    other = one.other or ((more.rank, more.length) if differs else more.other)
    return replace(one, blocks={**more.blocks, **one.blocks}, other=other)


def vocabulary(built: Built) -> int | None:
    """How many words a model has; None where it does not say."""
    if built.spec is not None:
        return built.spec.vocab
    embedding = _embedding(built.model)
    return None if embedding is None else int(embedding.num_embeddings)


def _embedding(model: nn.Module) -> Any:
    """The one that a model names, or the only one that it has."""
    try:
        named = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        named = None
    if isinstance(named, nn.Embedding):
        return named
    found = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    return found[0] if len(found) == 1 else None
