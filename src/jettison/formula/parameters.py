"""How many parameters a model has: the sum over its regions, each weight once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from jettison.core.errors import UsageError
from jettison.formula.region import Region, embedding_region, head_region, layer_region
from jettison.spec.model import ModelSpec
from jettison.spec.run import Run
from jettison.spec.tuning import ALL, TARGETS, Tuning


def regions(model: ModelSpec, tuning: Tuning | None = None) -> Iterator[tuple[Region, int]]:
    """The distinct regions of a model, and how often each occurs."""
    scene = Run(model=model, seq=model.shortest, source_seq=model.shortest_source, tuning=tuning).scene
    yield embedding_region(scene), 1
    counts = Counter(model.layers)
    for kind in model.kinds:
        yield layer_region(scene, kind), counts[kind]
    yield head_region(scene), 1


def parameter_count(model: ModelSpec) -> int:
    """Parameters of the whole model; a tied weight counts once."""
    return sum(n * sum(w.total for w in region.weights if not w.tied) for region, n in regions(model))


def trained_parameter_count(model: ModelSpec, tuning: Tuning) -> int:
    """Parameters of the adapters."""
    return sum(n * sum(w.total for w in region.weights if not w.frozen) for region, n in regions(model, tuning))


def refuse_idle(model: ModelSpec, tuning: Tuning) -> None:
    """Adapters that no product of a model has.

    Raises:
        UsageError: nothing would be trained.
    """
    if ALL not in tuning.targets and not trained_parameter_count(model, tuning):
        raise UsageError(
            f"got --lora targets={'+'.join(sorted(tuning.targets))}; {model.name} has none of these products, so that "
            f"nothing would be trained: expected {ALL}, or others of {', '.join(TARGETS)}"
        )


def active_parameter_count(model: ModelSpec) -> int:
    """Parameters that one token meets: of each layer's experts those that it is sent to."""
    scene = Run(model=model, seq=model.shortest, source_seq=model.shortest_source).scene
    idle = 0
    for kind, layers in Counter(model.layers).items():
        if (moe := kind.experts) is not None:
            experts = sum(w.total for w in layer_region(scene, kind).weights if w.expert)
            idle += layers * experts * (moe.experts - moe.top_k) // moe.experts
    return parameter_count(model) - idle
