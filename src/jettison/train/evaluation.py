"""Evaluation loss: the same on every layout, without effect on training.

Losses of micro-batches are added in the order of their sequences, on whichever rank they were computed, so that layouts
differ only by the rounding of their kernels.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from jettison.core.errors import UsageError
from jettison.train.data import Batches, InOrder, TextDigest, open_corpus, surveyed
from jettison.train.engine import Engine, undisturbed
from jettison.train.ranks import World
from jettison.train.recipe import TrainRecipe


@dataclass(frozen=True, kw_only=True)
class EvaluationSet:
    batches: Batches
    count: int
    text: TextDigest

    @property
    def tokens(self) -> int:
        return self.count * self.batches.global_batch * self.batches.corpus.seq


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """Mean loss per token, and seconds of the evaluation."""

    loss: float
    seconds: float

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf


def evaluation_set(recipe: TrainRecipe, vocab: int | None, world: World) -> EvaluationSet | None:
    """Open a recipe's evaluation text, if any. All ranks call it. `UsageError` if it is too short or unreadable."""
    section, batch = recipe.eval, recipe.batch
    data = section.data
    if data is None:
        return None
    corpus = world.together(lambda: open_corpus(data, batch.seq))
    text = surveyed(corpus, world)

    def counted() -> int:
        text.check_vocabulary(vocab)
        most = corpus.windows // batch.global_batch
        if most < (section.batches or 1):
            raise UsageError(
                f"eval.data: got {corpus.windows} sequences of {batch.seq} tokens; expected at least batches x "
                f"batch.global_batch = {section.batches or 1} x {batch.global_batch}"
            )
        return section.batches or most

    count = world.together(counted)
    batches = Batches(corpus, InOrder(), batch.global_batch, batch.micro_batch)
    return EvaluationSet(batches=batches, count=count, text=text)


def evaluate(
    found: EvaluationSet, engine: Engine, world: World, *, data_rank: int, accumulation: int
) -> EvaluationResult:
    """Evaluate the model. All ranks call it. ``accumulation``: micro-batches a step on one data-parallel rank."""
    started = time.perf_counter()
    losses: dict[int, float] = {}
    first = data_rank * accumulation
    of_a_batch = accumulation * (found.batches.global_batch // (found.batches.micro_batch * accumulation))
    with undisturbed(engine):
        for number in range(found.count):
            micros = range(first, first + accumulation)
            own = engine.evaluate(found.batches.share(number, micros, world.device, "eval"))
            if own is not None:
                losses |= {number * of_a_batch + micro: loss for micro, loss in zip(micros, own.tolist(), strict=True)}
    together = world.merged(losses, lambda earlier, later: later | earlier)  # the first rank's loss counts
    total = math.fsum(together[number] for number in sorted(together))
    return EvaluationResult(loss=total / len(together), seconds=time.perf_counter() - started)
