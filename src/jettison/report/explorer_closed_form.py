"""Data of the closed-form panels: the formulas of the page's layers, and the sizes to put into them."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, Final

from jettison.core.errors import UsageError
from jettison.formula.named import Choices, has_names, structure
from jettison.predict.closed_form import ClosedForm, closed_form_document, form_of, sizes_of
from jettison.report.explorer_models import PageModel, page_models
from jettison.report.tables import runs_of
from jettison.spec.layout import Layout
from jettison.spec.model import Layer, ModelSpec, Moe

SEQUENCES: Final = tuple(2**n for n in range(7, 21))
"""Tokens, from 128 to 1,048,576: what a slider of the page offers."""
MICRO_BATCHES: Final = (1, 2, 4, 8, 16, 32)
RANKS: Final = (1, 2, 4, 8, 16, 32, 64)
PRECISIONS: Final = ("bf16", "fp32", "fp8")
_LAYOUTS: Final = ((False, False, False), (True, False, False), (True, True, False), (True, True, True))


def closed_form_data(models: Sequence[str] = ()) -> dict[str, Any]:
    """``{"document": the formulas, "layers": [one for each kind of layer of each model], "sequences": ...}``."""
    return closed_forms(page_models(models))


def closed_forms(subjects: Sequence[PageModel]) -> dict[str, Any]:
    """The same of these models alone."""
    kinds = [
        (subject, layer)
        for subject in subjects
        for layer in subject.model.described
        if has_names(layer) and not (layer.source and subject.model.pair)
    ]
    structures = list(dict.fromkeys(structure(subject.model, layer) for subject, layer in kinds))
    forms = [_form([k for k in kinds if structure(k[0].model, k[1]) == each]) for each in structures]
    return {
        "document": closed_form_document(forms),
        "layers": [
            _layer(subject, layer, structures.index(structure(subject.model, layer))) for subject, layer in kinds
        ],
        "sequences": list(SEQUENCES),
        "micro_batches": list(MICRO_BATCHES),
        "ranks": list(RANKS),
        "precisions": list(PRECISIONS),
    }


def all_choices(model: ModelSpec) -> Iterator[Choices]:
    """All that the page's controls can ask of a model."""
    sites = model.dropout_sites
    drops = (True, False) if sites.attention or sites.residual else (False,)
    for kernels, attention, precision, dropout, (parallel, sp, gathered) in product(
        ("megatron", "pytorch"), ("eager", "flash"), PRECISIONS, drops, _LAYOUTS
    ):
        if gathered and kernels != "pytorch":
            continue  # Megatron saves shards
        yield Choices(
            kernels=kernels,
            attention=attention,
            precision=precision,
            dropout=dropout,
            parallel=parallel,
            sp=sp,
            gathered_inputs=gathered,
        )


def ranks_of(model: ModelSpec) -> list[int]:
    """Tensor-parallel sizes among `RANKS` over which the model divides."""
    return [t for t in RANKS if _divides(model, t)]


def _divides(model: ModelSpec, t: int) -> bool:
    try:
        Layout(tp=t).check(model, seq=t)
    except UsageError:
        return False
    return True


def _form(kinds: Sequence[tuple[PageModel, Layer]]) -> ClosedForm:
    """The tables that any position of the page's controls needs for these layers, which are alike but for sizes."""
    points: list[dict[str, int]] = []
    for subject, layer in kinds:
        points += [
            sizes_of(subject.model, layer, s=s, b=b, t=t)
            for s, b, t in product(SEQUENCES, MICRO_BATCHES, ranks_of(subject.model))
        ]
    first, layer = kinds[0]
    return form_of(first.model, layer, all_choices(first.model), points)


def _layer(subject: PageModel, layer: Layer, form: int) -> dict[str, Any]:
    """One entry of the page's choice of models."""
    model, run = subject.model, subject.run
    sizes = sizes_of(model, layer, s=1, b=1)
    return {
        "argument": shlex.quote(subject.argument),
        "label": subject.label + _which(model, layer),
        "asked": subject.asked,
        "layers": Counter(model.layers)[layer],
        "name": model.layer_names[model.layers.index(layer)],
        "form": form,
        "sizes": {name: n for name, n in sizes.items() if name not in ("s", "b", "t")},
        "ranks": ranks_of(model),
        "seq": run.source_seq if layer.source else run.seq,
        "micro_batch": subject.micro_batch,
        "positions": model.max_positions if model.learned_positions else None,
        "kernels": run.kernels.name,
        "attention": str(run.kernels.attention),
        "dropout": run.dropout,
        "drops": model.dropout_sites.attention or model.dropout_sites.residual,
    }


def _which(model: ModelSpec, layer: Layer) -> str:
    """Name a kind of layers, where a model has several."""
    if len(model.kinds) == 1:
        return ""
    same = [i for i, each in enumerate(model.layers) if each == layer]
    spans = runs_of(same, " to ")
    where = ", ".join(spans) if len(spans) <= 2 else f"{same[0]}, {same[1]}, ... {same[-1]}"
    mlp = "experts" if isinstance(layer.mlp, Moe) else "dense"
    return f", {mlp}{f', window {layer.window}' if layer.window is not None else ''} (layers {where})"
