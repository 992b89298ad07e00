"""The text of a run, read whole once: is it one on all ranks, which is it, and can the model read it?

NOTE [ Who reads what ]
A small text is read whole by every rank, so that any difference is found. Of a larger one every rank looks at the
length, both ends and places between, which are compared; and reads whole blocks of its own share, which together are
all. So a text that is changed anywhere is another text when a run is resumed, and reading costs a rank its share only.
"""

from __future__ import annotations

from typing import Any, Final

from torch import nn

from jettison.errors import UsageError
from jettison.train.build_model import Built
from jettison.train.data import Block, Corpus, Survey
from jettison.train.ranks import World, agreed

_SMALL: Final = 16  # blocks


def surveyed(corpus: Corpus, world: World) -> Survey:
    """See NOTE [ Who reads what ]. All ranks call it.

    Raises:
        UsageError: on every rank, about the first that has another text than rank 0.
    """
    step, first = (1, 0) if corpus.blocks <= _SMALL else (world.size, world.rank)

    def look() -> tuple[int, str, dict[int, Block]]:
        return len(corpus.tokens), corpus.sample, {n: corpus.block(n) for n in range(first, corpus.blocks, step)}

    found = world.gather(world.together(look))
    length, sample, blocks = found[0]
    for rank, (its_length, its_sample, its_blocks) in enumerate(found[1:], start=1):
        alike = all(blocks.get(number, block) == block for number, block in its_blocks.items())
        if (length, sample) != (its_length, its_sample) or not alike:
            raise agreed(
                UsageError(
                    f"data: rank {rank} has another text than rank 0: {its_length} tokens and {length}"
                    f"{', of which some differ' if its_length == length else ''}; expected the same under one name "
                    "on every machine"
                )
            )
    whole: dict[int, Block] = {}
    for _, _, part in found:
        whole |= part
    return Survey.of([whole[number] for number in range(corpus.blocks)])


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
