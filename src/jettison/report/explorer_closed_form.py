"""Closed forms of a page's layers as data: what a layer saves, computes and sends, in formulas, and sizes for them.

The walk over a layer is run on sizes that remember how they were made (NOTE [ A formula is what the walk did ]), and
the recompute policies decide on its program as they do on any. What comes out is a `Table` for one set of guards; a
`ClosedForm` has the tables of all choices. Nothing in here knows a formula.

NOTE [ The document ]
Compact enough for a page: every factor, sum, word and entry is there once.

{"schema": "jettison.closed-form/1", "modes": [...], "words": [...],
 "factors": ["s", ["ceil", SUM, SUM], ...],    a size by name, a division of two sums, rounded up ("floor": down), or
                                               ["positive", SUM]: a sum, 0 where it is below
 "sums": [[[n, FACTOR, ...], ...], ...],       n times the product of the factors, added up; [] is 0
 "entries": [[role, path, op, split, part, SUM, modes, reference], ...],    words by number; modes are bits, first is 1
 "tables": [{"guards": [[SUM, zero, held], ...], "parts": [WORD, ...], "entries": [ENTRY, ...],
              "transfers": [[kind, part, backward, SUM, wire SUM], ...], "held": [SUM by mode],
             "forward": SUM, "attention": SUM, "again": [SUM by mode], "rerun": [SUM by mode], "parameters": SUM}, ...],
 "forms": [{"megatron eager bf16 dropout sp": [TABLE, ...], ...}, ...]}

A table holds for sizes at which every guard's sum is equal to 0 (zero), or above 0, exactly if ``held`` says so.
"""

from __future__ import annotations

import shlex
from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise, product
from typing import Any, Final, NamedTuple

from jettison.core.errors import UsageError
from jettison.core.objects import grouped
from jettison.cost.collective import ring_bytes
from jettison.cost.flops import to_the_end
from jettison.cost.kernel import BATCHED, FLASH
from jettison.families.family import kernels_for
from jettison.formula.layer import layer as write_layer
from jettison.formula.named_sizes import (
    MODEL_NAMES,
    Choices,
    has_names,
    layer_sizes,
    resized,
    structure,
    traced_signature,
)
from jettison.formula.region import HELD, Region
from jettison.formula.sums import Factor, Positive, SizeGuard, SizeGuards, Sum, sum_of
from jettison.formula.tape import TapeOp, Value, Writer
from jettison.ledger.program import Source
from jettison.predict.stages import kept_by
from jettison.report.explorer_models import PageModel, explorer_table, page_models
from jettison.report.tables import runs_of
from jettison.spec.frameworks import named
from jettison.spec.layout import Layout
from jettison.spec.model import Layer, ModelSpec, Moe
from jettison.spec.precision import PRECISIONS
from jettison.spec.recompute import UNIFORM_MODES, Mode
from jettison.spec.run import RegionSignature

SEQUENCES: Final = tuple(2**n for n in range(7, 21))
"""Tokens, from 128 to 1,048,576: what a slider of the page offers."""
MICRO_BATCHES: Final = (1, 2, 4, 8, 16, 32)
RANKS: Final = (1, 2, 4, 8, 16, 32, 64)
OFFERED: Final = ("bf16", "fp32", "fp8")
_LAYOUTS: Final = ((False, False, False), (True, False, False), (True, True, False), (True, True, True))


def closed_form_data(models: Sequence[str] = ()) -> dict[str, Any]:
    """``{"document": the formulas, "layers": [one for each kind of layer of each model], "sequences": ...}``."""
    return closed_forms(page_models(models))


def closed_forms(subjects: Sequence[PageModel]) -> dict[str, Any]:
    """Closed forms of these models."""
    kinds = [
        (subject, layer)
        for subject in subjects
        for layer in subject.model.described
        if has_names(layer) and not (layer.source and subject.model.pair)
    ]
    alike = grouped((structure(subject.model, layer), (subject, layer)) for subject, layer in kinds)
    forms = list(alike)
    return {
        "document": closed_form_document(map(_form, alike.values())),
        "layers": [_layer(subject, layer, forms.index(structure(subject.model, layer))) for subject, layer in kinds],
        "sequences": list(SEQUENCES),
        "micro_batches": list(MICRO_BATCHES),
        "ranks": list(RANKS),
        "precisions": list(OFFERED),
    }


def all_choices(model: ModelSpec) -> Iterator[Choices]:
    """All that the page's controls can ask of a model."""
    sites = model.dropout_sites
    drops = (True, False) if sites.attention or sites.residual else (False,)
    offered = named("explorer")
    for *others, layout in product(offered, ("eager", "flash"), OFFERED, drops, _LAYOUTS):
        choices = Choices(*others, *layout)
        if offered[choices.kernels]["gathered_inputs"] or not choices.gathered_inputs:
            yield choices


def ranks_of(model: ModelSpec) -> list[int]:
    """Tensor-parallel sizes among `RANKS` over which the model divides."""
    found = []
    for t in RANKS:
        with suppress(UsageError):
            Layout(tp=t).check(model, seq=t)
            found.append(t)
    return found


def _form(kinds: Sequence[tuple[PageModel, Layer]]) -> ClosedForm:
    """The tables that any position of the page's controls needs for these layers, which are alike but for sizes."""
    points = [
        sizes_of(subject.model, layer, s=s, b=b, t=t)
        for subject, layer in kinds
        for s, b, t in product(SEQUENCES, MICRO_BATCHES, ranks_of(subject.model))
    ]
    first, layer = kinds[0]
    return form_of(first.model, layer, all_choices(first.model), points)


def _layer(subject: PageModel, layer: Layer, form: int) -> dict[str, Any]:
    """One entry of the page's choice of models."""
    model, run = subject.model, subject.run
    return {
        "argument": shlex.quote(subject.argument),
        "label": subject.label + _which(model, layer),
        "asked": subject.asked,
        "layers": Counter(model.layers)[layer],
        "name": model.layer_names[model.layers.index(layer)],
        "form": form,
        "sizes": named_sizes(model, layer),
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


# tables of a layer ----------------------------------------------------------------------------------------------------

_OPS: Final[Mapping[str, str]] = explorer_table("ops")
WHOLE: Final = "copy"
"""Dimension of unsharded tensors: every tensor-parallel rank has all of it."""
_DIMS: Final[Mapping[int, tuple[str, ...]]] = {
    4: ("batch", "heads", "sequence", "head"),
    2: ("rows", "width"),
    1: ("rows",),
}
"""Names of dimensions by their number; otherwise the last is the width, and others are of the sequence."""


class SumEntry(NamedTuple):
    """A tensor that stays between a layer's passes under ``modes``. ``split``: the dim that ranks share."""

    role: str
    path: str
    op: str
    split: str
    part: int  # which part of the layer saves it
    nbytes: Sum  # on one rank
    modes: int  # bits
    reference: str


class SumTransfer(NamedTuple):
    """A collective of the tensor-parallel ranks between two parts; ``wire``: bytes that each sends in a ring."""

    kind: str
    part: int  # the part that it leads into
    backward: bool
    nbytes: Sum
    wire: Sum


class Table(NamedTuple):
    """One walk over a layer, as sums, in the document's order. It holds where all guards come out as they did."""

    guards: tuple[SizeGuard, ...]
    parts: tuple[str, ...]  # stretches between the places where ranks meet
    entries: tuple[SumEntry, ...]
    transfers: tuple[SumTransfer, ...]
    held: tuple[Sum, ...]  # by mode: saved bytes of one layer on one rank
    forward: Sum  # FLOPs
    attention: Sum
    again: tuple[Sum, ...]  # by mode: the least that backward needs
    rerun: tuple[Sum, ...]  # by mode: where a checkpointed part runs to its end
    parameters: Sum  # on one rank

    def holds(self, sizes: Mapping[str, int], known: dict[SizeGuard, bool] | None = None) -> bool:
        """Whether it is the table for these sizes. ``known``: outcomes of guards at them, which many tables share."""
        known = {} if known is None else known
        return all(known[g] if g in known else known.setdefault(g, g.same(sizes)) for g in self.guards)


ClosedForm = Mapping[str, Sequence[Table]]
"""The tables of all layers of one structure, by `Choices.key`; of one key as many as have other guards."""


def region_signature(model: ModelSpec, choices: Choices, sizes: Mapping[str, int]) -> RegionSignature:
    """A region signature as a walk takes it. Sizes that do not divide are rounded up, as `Tape.local_shape` does."""
    tp = sizes["t"] if choices.parallel else 1
    cp, ep = sizes.get("cp", 1), sizes.get("ep", 1)
    sites = model.dropout_sites
    return RegionSignature(
        model=model,
        seq=sizes["s"],
        micro_batch=sizes["b"],
        layout=Layout(tp=tp, sp=choices.sp, cp=cp, ep=ep, dp=ep, gathered_inputs=choices.gathered_inputs),
        precision=PRECISIONS[choices.precision],
        kernels=kernels_for(model, choices.kernels).with_attention(choices.attention),
        dropout=0.1 if choices.dropout and (sites.attention or sites.residual) else 0.0,
        capacity_factor=None,
        padding=False,
        imbalance=1.0,
    )


def table_of(model: ModelSpec, layer: Layer, choices: Choices, sizes: Mapping[str, int]) -> Table:
    """Walk over a layer at these sizes, for everywhere where the walk goes the same way."""
    book = SizeGuards()
    signature, named = traced_signature(region_signature(model, choices, sizes), layer, book)
    writer = Writer.of(signature)
    region = Region(output=write_layer(writer, writer.hidden(), named), tape=writer.tape)
    kept = {mode: kept_by(region, mode) for mode in UNIFORM_MODES}
    again = {mode: frozenset(region.program.recompute_set(kept[mode])) for mode in UNIFORM_MODES}
    rerun = {mode: to_the_end(region, kept[mode]) if mode == Mode.SELECTIVE else again[mode] for mode in UNIFORM_MODES}
    steps = region.tape.steps
    cuts = sorted({c.step for c in region.collectives if c.axis == "tp" and 0 < c.step < len(steps)})
    entries = tuple(_entries(region, kept, cuts))
    return Table(
        guards=tuple(book.guards),
        parts=tuple(_named_part(steps[first:stop]) for first, stop in pairwise([0, *cuts, len(steps)])),
        entries=entries,
        transfers=tuple(_transfers(region, cuts)),
        held=tuple(_total(one.nbytes for one in entries if one.modes >> bit & 1) for bit in range(len(UNIFORM_MODES))),
        forward=_flops(steps, range(len(steps))),
        attention=_flops(steps, [i for i, step in enumerate(steps) if step.name in (BATCHED, FLASH)]),
        again=tuple(_flops(steps, again[mode]) for mode in UNIFORM_MODES),
        rerun=tuple(_flops(steps, rerun[mode]) for mode in UNIFORM_MODES),
        parameters=_total(sum_of(weight.numel) for weight in region.weights),
    )


def sizes_of(model: ModelSpec, layer: Layer, *, s: int, b: int, t: int = 1, **ranks: int) -> dict[str, int]:
    """All named sizes of a layer in a batch."""
    return named_sizes(model, layer) | {"s": s, "b": b, "t": t} | ranks


def named_sizes(model: ModelSpec, layer: Layer) -> dict[str, int]:
    """Sizes of a layer, whatever the batch."""
    around = {name: getattr(model, field) for field, name in MODEL_NAMES.items() if getattr(model, field)}
    return around | layer_sizes(layer)


def form_of(
    model: ModelSpec, layer: Layer, choices: Iterable[Choices], sizes: Iterable[Mapping[str, int]]
) -> ClosedForm:
    """Return the tables of a structure that any of these sizes needs; walked only where no table holds yet."""
    points = [(point, dict[SizeGuard, bool]()) for point in sizes]
    tables: dict[str, list[Table]] = {}
    for choice in choices:
        found = tables.setdefault(choice.key, [])
        for point, known in points:
            if (point["t"] > 1) == choice.parallel and not any(table.holds(point, known) for table in found):
                found.append(table_of(*resized(model, layer, point), choice, point))
    return tables


def _named_part(steps: list[TapeOp]) -> str:
    words: dict[str, None] = {}
    for step in steps:
        if not step.name.startswith("c10d."):
            words[step.path.partition(".")[0].replace("_", " ") or _OPS.get(step.name, step.name)] = None
    return ", ".join(words)


def _transfers(region: Region, cuts: list[int]) -> Iterator[SumTransfer]:
    for c in (c for c in region.collectives if c.axis == "tp"):
        wire = sum_of(ring_bytes(c.kind, c.nbytes, region.tape.mesh["tp"]))
        yield SumTransfer(c.kind, bisect_right(cuts, c.step), c.backward, sum_of(c.nbytes), wire)


def _entries(region: Region, kept: Mapping[Mode, frozenset[int]], cuts: list[int]) -> Iterator[SumEntry]:
    """One for each buffer that any mode keeps, under the first name that it is saved by."""
    program, of = region.program, region.buffers
    names: dict[int, tuple[int, TapeOp, Value, str, str]] = {}
    for index, step in enumerate(region.tape.steps):
        for s in step.saved:
            names.setdefault(of[s.value.storage], (index, step, s.value, s.role, s.reference))
    storages = {buffer: storage for storage, buffer in of.items()}
    for buffer in sorted(frozenset().union(*kept.values())):
        made = program.buffers[buffer]
        if buffer in names:
            index, step, value, role, reference = names[buffer]
            path, op = step.path, step.name
        else:
            value = region.tape.values[storages[buffer]]
            index = made.producer or 0
            role = made.name if made.source in (Source.INPUT, Source.RANDOM) else HELD
            path = op = reference = ""
        dim, rank = next((dim for axis, dim in value.places if axis == "tp"), None), len(value.shape)
        yield SumEntry(
            role=role,
            path=path,
            op=op,
            split=WHOLE if dim is None else _DIMS.get(rank, (*["sequence"] * (rank - 1), "width"))[dim],
            part=bisect_right(cuts, index),
            nbytes=sum_of(made.nbytes),
            modes=sum((buffer in kept[mode]) << bit for bit, mode in enumerate(UNIFORM_MODES)),
            reference=reference,
        )


def _flops(steps: list[TapeOp], chosen: Iterable[int]) -> Sum:
    return _total(sum_of(steps[i].flops) for i in sorted(chosen))


def _total(sums: Iterable[Sum]) -> Sum:
    return sum(sums, Sum(()))


# the document ---------------------------------------------------------------------------------------------------------


class _Once(dict[Hashable, int]):
    """Numbers of things by key, each of which is there once."""

    def __init__(self) -> None:
        super().__init__()
        self.items_in_order: list[Any] = []

    def number(self, key: Hashable, item: Any) -> int:
        if key not in self:
            self[key] = len(self.items_in_order)
            self.items_in_order.append(item)
        return self[key]


class SumPool:
    """Sums, factors, words and entries of a document, each once."""

    def __init__(self) -> None:
        self._factors, self._sums, self.words, self.entries = (_Once() for _ in range(4))

    def packed(self, value: Any) -> Any:
        """The same with the numbers of sums, words and entries in their place."""
        if isinstance(value, Sum):
            return self.number(value)
        if isinstance(value, str):
            return self.words.number(value, value)
        if isinstance(value, int):
            return int(value)
        if isinstance(value, Mapping):
            return {key: self.packed(one) for key, one in value.items()}
        found = list(map(self.packed, value))
        return self.entries.number(tuple(found), found) if isinstance(value, SumEntry) else found

    def number(self, one: Sum) -> int:
        """Return the number of a sum."""
        if one.text in self._sums:
            return self._sums[one.text]
        return self._sums.number(one.text, [[n, *map(self._factor, of)] for of, n in one.terms])

    def _factor(self, one: Factor) -> int:
        if isinstance(one, str):
            return self._factors.number(one, one)
        if isinstance(one, Positive):
            parts: list[str | int] = ["positive", self.number(one.of)]
        else:
            parts = ["ceil" if one.up else "floor", self.number(one.above), self.number(one.below)]
        return self._factors.number(tuple(parts), parts)

    def document(self) -> dict[str, Any]:
        """Return all of them."""
        return {"factors": self._factors.items_in_order, "sums": self._sums.items_in_order}


def closed_form_document(forms: Iterable[ClosedForm]) -> dict[str, Any]:
    """Return all forms in one document, in order: NOTE [ The document ]."""
    pool, tables = SumPool(), _Once()

    def table(one: Table) -> int:
        packed = pool.packed(one._asdict())
        return tables.number(repr(packed), packed)

    packed = [{key: list(map(table, of)) for key, of in form.items()} for form in forms]
    return {
        "schema": "jettison.closed-form/1",
        "modes": list(UNIFORM_MODES),
        "words": pool.words.items_in_order,
        **pool.document(),
        "entries": pool.entries.items_in_order,
        "tables": tables.items_in_order,
        "forms": packed,
    }
