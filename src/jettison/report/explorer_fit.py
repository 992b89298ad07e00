"""Data of the explorer's first panel, "Will it fit?": bytes of each region's passes as sums, and what a device leaves.

The page folds them into a step: units, shards of ZeRO and a 1F1B schedule, as `memory.step` and `predict.fsdp` do for
PyTorch's kernels (decision 0114).

NOTE [ Passes as sums ]
A region is walked through on sizes that remember their formulas (NOTE [ A formula is what the walk did ]), and its
passes are replayed op by op on them. The bytes during each op are a sum, and a peak is the largest of these. Of the
sums only those stay that are the largest at some position of the page's controls.

{"schema": "jettison.passes/1", "factors": [...], "sums": [...],    as NOTE [ The document ] in `explorer_closed_form`
 "forms": [{"bf16 tp cp ep lora nf4-double recompute": [TABLE, ...], ...}, ...],
 "tables": [{"guards": [...], "regions": [REGION, ...]}, ...],    embedding, layer, head; perhaps the first layer

REGION: {"output": SUM, "grad": has the output a gradient, "modes": {MODE: [resident SUM, FORWARD, BACKWARD,
 BACKWARD that adds to gradients, opening SUM, PHASES]}, "weights": [[SUM, gradient ways, frozen, tied, wide, is the
 table, of an expert, held SUM if frozen, is it packed]]},
where a pass is two lists of sums: up to the last read of a weight, and after it, in the order of the forward. The
first layer is another one over a frozen embedding. PHASES are there under expert parallelism: lists of sums until
gradients reach the experts, within them and after them (NOTE [ Experts within a layer ] in `predict.fsdp`), and the
sum of what is live in between.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from itertools import product
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from jettison.core.dtypes import DTYPE_BYTES
from jettison.core.errors import UsageError
from jettison.core.objects import grouped
from jettison.core.process import seldom_collected
from jettison.formula.embedding import TOKENS, embedding
from jettison.formula.layer import layer as write_layer
from jettison.formula.liveness import forward_levels
from jettison.formula.loss import head
from jettison.formula.named_sizes import MODEL_NAMES, has_names, structure, traced_signature
from jettison.formula.region import Region, embedding_region
from jettison.formula.sums import Factor, Monomial, Positive, SizeGuard, SizeGuards, Sum, collected, sum_of
from jettison.formula.tape import Writer
from jettison.predict.fsdp import PhasedBackward
from jettison.predict.ranges import Measure, lineage, residual
from jettison.predict.stages import NONE, kept_by, named_frames
from jettison.report.explorer_closed_form import MICRO_BATCHES, SumPool, named_sizes, ranks_of, sizes_of
from jettison.report.explorer_models import PageModel, page_models
from jettison.request.options import RunRequest
from jettison.request.resolve import resolve
from jettison.spec.device_allowance import ALL_TO_ALL, COMMUNICATOR, FRAGMENTS, fixed_allowance
from jettison.spec.fine_tuning import Base
from jettison.spec.hardware import hardware, hardware_names
from jettison.spec.kernels import Device
from jettison.spec.layout import Layout
from jettison.spec.model import AnyLayer, Layer, ModelSpec, Moe
from jettison.spec.precision import GradientRule, Optimizer, Precision
from jettison.spec.recompute import Mode
from jettison.spec.run import RegionSignature, Run

Values = npt.NDArray[np.int64]
SEQUENCES: Final = tuple(2**n for n in range(9, 21))
CONTEXTS: Final = (1, 2, 4, 8)
EXPERT_RANKS: Final = (1, 2, 4, 8, 16, 32, 64)
STAGES: Final = (1, 2, 4, 8, 16)
ACCUMULATED: Final = (0, 1, 2, 4, 8, 16, 32, 64, 128)
"""Micro-batches of a step; 0: as many as stages."""
REPLICAS: Final = tuple(2**n for n in range(11))
ADAPTERS: Final = (0, 8, 16, 64)
"""Ranks of LoRA; 0: all weights are trained."""
PACKED: Final = str(Base.NF4_DOUBLE)
BASES: Final = (str(Base.PLAIN), PACKED)
"""Frozen weights under LoRA."""
PRECISIONS: Final = ("bf16", "fp32", "fp8")
OPTIMIZERS: Final = tuple(
    map(str, (Optimizer.ADAMW, Optimizer.ADAMW_BF16, Optimizer.ADAM8BIT, Optimizer.SGD_MOMENTUM, Optimizer.SGD))
)
"""Those whose step has no transients, and whose state needs no shapes."""
FP8: Final = "fp8"
"""Not under LoRA."""
MODES: Final = tuple(map(str, (Mode.NONE, Mode.SELECTIVE, Mode.SELECTIVE_OP, Mode.FULL)))
KERNELS: Final = {"kernels": "pytorch", "attention": "flash"}
RANK: Final = "R"


def will_it_fit_data(models: Sequence[str] = ()) -> dict[str, Any]:
    """The passes' sums, each model's sizes and what it divides over, and devices."""
    subjects = [one for one in page_models(models) if _described(one)]
    kinds = [(subject, kind) for subject in subjects for kind in subject.model.kinds]
    alike = grouped((_structure(subject.model, kind), (subject, kind)) for subject, kind in kinds)
    with seldom_collected():
        document = passes_document(map(_form, alike.values()))
    devices = [hardware(name) for name in hardware_names() if not name.startswith("cpu")]
    fixed = fixed_allowance(Layout(), Device.CUDA)
    return {
        "document": document,
        "models": [_model(subject, list(alike)) for subject in subjects],
        "precisions": {name: _precision(run_of_page(subjects[0], precision=name).precision) for name in PRECISIONS},
        "sequences": SEQUENCES,
        "micro_batches": MICRO_BATCHES,
        "contexts": CONTEXTS,
        "accumulated": ACCUMULATED,
        "optimizers": OPTIMIZERS,
        "replicas": REPLICAS,
        "adapters": ADAPTERS,
        "bases": BASES,
        "modes": MODES,
        "gpus": [[device.name, device.usable_bytes] for device in devices],
        "fixed": [fixed.low, fixed.expected, fixed.high],
        "communicator": [COMMUNICATOR.low, COMMUNICATOR.expected, COMMUNICATOR.high],
        "all_to_all": [ALL_TO_ALL.low, ALL_TO_ALL.expected, ALL_TO_ALL.high],
        "least_fragments": float(1 + FRAGMENTS[0]),
    }


def _described(subject: PageModel) -> bool:
    """Whether each size of the model has a symbol, and its embedding and head need one kind of layers."""
    model = subject.model
    named = all(isinstance(kind, Layer) and has_names(kind) for kind in model.kinds)
    plain = model.patches is None and model.audio is None and model.pair is None and model.source is None
    if not (named and plain) or model.mtp_num_layers or model.unused_weights or not _longest(model):
        return False
    signature = run_of_page(subject).signature
    alone = replace(signature, model=replace(model, layers=model.kinds[:1]))
    return len({embedding_region(each).saved_bytes for each in (signature, alone)}) == 1


def run_of_page(subject: PageModel, **asked: Any) -> Run:
    """The run of a model under the page's kernels."""
    return resolve(subject.model, RunRequest(**{**KERNELS, **asked})).run


def _precision(held: Precision) -> dict[str, int]:
    """Bytes of an element."""
    assert held.accumulator is None and held.optimizer_gradient is None and held.recipe is None
    master = held.master and DTYPE_BYTES[held.master]
    return {
        "compute": DTYPE_BYTES[held.compute],
        "parameter": DTYPE_BYTES[held.parameter],
        "gradient": DTYPE_BYTES[held.gradient],
        "master": master or 0,
        "moment": held.moment_bytes,
    }


def _model(subject: PageModel, structures: Sequence[str]) -> dict[str, Any]:
    """One entry of the choice of models."""
    model, run, kernels = subject.model, run_of_page(subject), subject.run.kernels
    tuned = run_of_page(subject, lora="16")
    stages = {}
    for pp in STAGES:
        with suppress(UsageError):
            stages[str(pp)] = Layout(pp=pp).layers_per_chunk(model.depth)
    return {
        "argument": shlex.quote(subject.argument),
        "label": subject.label,
        "asked": subject.asked,
        "kinds": [
            {"form": structures.index(_structure(model, kind)), "sizes": named_sizes(model, kind)}
            for kind in model.kinds
            if isinstance(kind, Layer)
        ],
        "layers": model.kind_numbers,
        "tied": model.tied_embeddings,
        "ranks": ranks_of(model),
        "expert_ranks": _expert_ranks(model),
        "stages": stages,
        "longest": _longest(model),
        "seq": run.seq,
        "ranges": [_ranges(run), _ranges(tuned)],
        "flags": " ".join(
            f"--{flag} {theirs}"  # of the page's kernels, where a model's own are others
            for own, (flag, theirs) in zip((kernels.name, kernels.attention), KERNELS.items(), strict=True)
            if own != theirs
        ),
    }


def _expert_ranks(model: ModelSpec) -> list[int]:
    """Sizes of expert parallelism that a model divides over."""
    experts = [layer.mlp.experts for layer in model.kinds if isinstance(layer, Layer) and isinstance(layer.mlp, Moe)]
    return [ep for ep in EXPERT_RANKS if ep == 1 or (experts and not any(count % ep for count in experts))]


def _longest(model: ModelSpec) -> int:
    """The longest sequence of the page that a model has positions for; 0: none."""
    most = model.max_positions if model.learned_positions else SEQUENCES[-1]
    return max((s for s in SEQUENCES if s <= most), default=0)


def _ranges(run: Run) -> list[list[float]]:
    """Residuals of allocated bytes, and of fragments: low, expected, high."""
    found = (residual(measure, lineage(measure, run)) for measure in (Measure.ALLOCATED, Measure.FRAGMENTS))
    return [[each.low, each.expected, each.high] for each in found]


# tables ---------------------------------------------------------------------------------------------------------------


class PassTable(NamedTuple):
    """The regions of one model, at all sizes at which the guards hold."""

    guards: tuple[SizeGuard, ...]
    regions: list[dict[str, Any]]  # NOTE [ Passes as sums ], of sums


PassForm = Mapping[str, Sequence[PassTable]]


def _structure(model: ModelSpec, layer: AnyLayer) -> str:
    """Key that is equal for models that differ only in sizes and in how many layers they have."""
    assert isinstance(layer, Layer)
    sized = {*MODEL_NAMES, "name", "layers", "left_out", "base", "max_positions"}
    own = {f.name: getattr(model, f.name) for f in fields(model) if f.name not in sized}
    rows = [name for name in MODEL_NAMES if getattr(model, name)]
    return f"{structure(model, layer)} {own} {rows}"


def _form(kinds: Iterable[tuple[PageModel, AnyLayer]]) -> PassForm:
    """The tables that any position of the controls needs for these models."""
    points = grouped(
        (key, (subject, layer, sizes)) for subject, layer in kinds for key, sizes in _positions(subject.model, layer)
    )
    found: dict[str, list[PassTable]] = {}
    for key, of in points.items():
        positions = SizeGrid([sizes for *_, sizes in of])
        precision, *words = key.split()
        tables, left = found.setdefault(key, []), np.ones(len(of), dtype=bool)
        while left.any():
            subject, layer, sizes = of[int(np.argmax(left))]
            asked: dict[str, Any] = {name: sizes[size] for name, size in _ASKED.items()} | {"dp": sizes["ep"]}
            modes: Sequence[str] = MODES
            if "lora" in words:
                modes = MODES[1:] if "recompute" in words else (NONE,)
                asked |= {"lora": str(sizes[RANK]), "recompute": modes[-1], "base": BASES[PACKED in words]}
            run = run_of_page(subject, precision=precision, **asked)
            tables.append(pass_table(run, layer, modes, positions))
            left &= ~positions.hold(tables[-1].guards)
    return found


def _positions(model: ModelSpec, layer: AnyLayer) -> Iterator[tuple[str, dict[str, int]]]:
    """Yield every position of the controls, by its key."""
    assert isinstance(layer, Layer)
    lengths, ranks = [s for s in SEQUENCES if s <= _longest(model)], ranks_of(model)
    own = sizes_of(model, layer, s=1, b=1)
    for precision, rank, again, base in product(PRECISIONS, ADAPTERS, (False, True), BASES):
        if not described(precision, rank, base) or (again and not rank):
            continue
        for t, cp, ep in product(ranks, CONTEXTS, (1,) if rank else _expert_ranks(model)):
            key, layout = (
                key_of(precision, t, cp, ep, rank, base, again),
                own | {"t": t, "cp": cp, "ep": ep, RANK: rank or 1},
            )
            yield from ((key, layout | {"s": s, "b": b}) for s, b in product(lengths, MICRO_BATCHES))


_ASKED: Final = {"seq": "s", "micro_batch": "b", "tp": "t", "cp": "cp", "ep": "ep"}


def described(precision: str, rank: int, base: str) -> bool:
    """Whether the page has such weights: no FP8 under adapters, which PyTorch lacks; 4-bit ones in bf16 only."""
    if base == PACKED:
        return rank > 0 and precision == PRECISIONS[0]
    return not (rank and precision == FP8)


def key_of(precision: str, t: int, cp: int, ep: int, rank: int, base: str, again: bool) -> str:
    """Choices that are not sizes. ``again``: adapters' inputs need gradients, since something is recomputed."""
    words = (
        ("tp", t > 1),
        ("cp", cp > 1),
        ("ep", ep > 1),
        ("lora", rank),
        (PACKED, rank and base == PACKED),
        ("recompute", rank and again),
    )
    return " ".join((precision, *(word for word, is_so in words if is_so)))


def pass_table(run: Run, layer: AnyLayer, modes: Sequence[str], positions: SizeGrid) -> PassTable:
    """Walk through a model's regions, and replay their passes."""
    assert isinstance(layer, Layer)
    signature, rule = run.signature, run.gradient_rule
    book = SizeGuards()
    traced, named = traced_signature(signature, layer, book)
    if signature.tuning is not None:
        traced = replace(traced, tuning=replace(signature.tuning, rank=book.size(RANK, signature.tuning.rank)))
    first, last = Writer.of(traced), Writer.of(traced)
    regions = [
        (Region(output=embedding(first), tape=first.tape), (NONE,)),
        (_layer_region(traced, named), modes),
        (Region(output=head(last, last.hidden()), tape=last.tape), (NONE,)),
    ]
    starting = run.model.kinds[0]
    if isinstance(starting, Layer) and starting.detached:  # over a frozen embedding
        regions.append((_layer_region(traced, named, detached=True), modes))
    return PassTable(guards=tuple(book.guards), regions=[_region(*each, rule, positions) for each in regions])


def _layer_region(traced: RegionSignature, layer: Layer, *, detached: bool = False) -> Region:
    writer = Writer.of(traced)
    return Region(output=write_layer(writer, writer.hidden(detached=detached), layer), tape=writer.tape)


def _region(region: Region, modes: Iterable[str], rule: GradientRule, positions: SizeGrid) -> dict[str, Any]:
    for w in region.weights:
        assert not (w.scale_bytes or w.quantized_bytes), f"{w.name} has copies"
    return {
        "output": sum_of(region.output.nbytes),
        "grad": int(region.output.grad),
        "weights": [
            [
                sum_of(w.numel),
                w.gradient_ways,
                *map(int, (w.frozen, w.tied, w.dtype == "float32", w.name == TOKENS, w.expert)),
                # of a frozen weight: bytes on one rank, and whether they are packed
                *([sum_of(w.held_bytes), int(w.packed_bytes > 0)] if w.frozen else []),
            ]
            for w in region.weights
        ],
        "modes": {mode: _passes(region, mode, rule, positions) for mode in modes},
    }


def _passes(region: Region, mode: str, rule: GradientRule, positions: SizeGrid) -> list[Any]:
    program, kept = region.program, kept_by(region, mode)
    stays = kept | {*program.outputs}
    forward = forward_levels(region, stays, region.last_ops, region.last_read, start=PassLevel())
    fresh, adding = (_backward(region, mode, rule, accumulates=again) for again in (False, True))
    peaks = [[*map(positions.highest, each)] for each in (forward, fresh.levels, adding.levels)]
    assert isinstance(fresh.opening, PassLevel)
    found = [sum_of(program.kept_bytes(kept)), *peaks, fresh.opening.sum]
    if region.tape.mesh.get("ep", 1) > 1 and any(w.expert for w in region.weights):
        phased = _begun(region, mode, rule, accumulates=False)
        done = phased.phases().done
        assert isinstance(done, PassLevel)
        found.append([*map(positions.highest, phased.noted), done.sum])
    return found


def _backward(region: Region, mode: str, rule: GradientRule, *, accumulates: bool) -> _Levels:
    found = _begun(region, mode, rule, accumulates=accumulates)
    found.run(region.last_read)
    return found


def _begun(region: Region, mode: str, rule: GradientRule, *, accumulates: bool) -> _Levels:
    return _Levels(region, kept_by(region, mode), rule, accumulates=accumulates, frames=named_frames(region, mode))


class _Levels(PhasedBackward):
    """A backward that notes its levels, and compares none: a comparison of traced sizes would be a guard."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        self.noted: list[list[int]] = []
        super().__init__(*arguments, **more)
        self.live = self.opening = PassLevel()
        self.noted = [[self.live]]

    @property
    def peak(self) -> int:
        """Peak of the stretch that was begun last; not compared."""
        return 0

    @peak.setter
    def peak(self, level: int) -> None:
        self.noted.append([level])

    def _grow(self, nbytes: int) -> None:
        noted = self.noted[-1]
        if noted[-1] is self.live:  # it has only grown since
            noted.pop()
        self.live += nbytes
        noted.append(self.live)

    @property
    def levels(self) -> tuple[list[int], list[int]]:
        """Up to the last read of a weight (in the order of the forward), and after it."""
        *behind, before = self.noted
        return before, behind[0] if behind else []


class PassLevel(int):
    """A number of bytes as the one before it and a traced change, so that no sum is written out that is not chosen."""

    before: PassLevel | None = None
    change: int = 0
    sign = 1
    values: Values | None = None  # at positions of a `SizeGrid`

    def _after(self, change: int, sign: int) -> PassLevel:
        if change.__class__ is int and not change:
            return self
        found = PassLevel(int.__add__(self, change if sign > 0 else -int(change)))
        found.before, found.change, found.sign = self, change, sign
        return found

    def __add__(self, other: int) -> PassLevel:
        return self._after(other, 1)

    def __sub__(self, other: int) -> PassLevel:
        return self._after(other, -1)

    @property
    def sum(self) -> Sum:
        """The level as one sum."""
        terms: list[tuple[Monomial, int]] = []
        level: PassLevel | None = self
        while level is not None:
            terms += [(factors, level.sign * n) for factors, n in sum_of(level.change).terms]
            level = level.before
        return collected(terms)


class SizeGrid:
    """Sizes at every position of the controls, and values of sums there."""

    def __init__(self, points: Sequence[Mapping[str, int]]) -> None:
        self._sizes = {name: np.array([point[name] for point in points], dtype=np.int64) for name in points[0]}
        self._count, self._known = len(points), dict[Monomial, Values]()
        self._nothing, self._values = np.zeros(len(points), dtype=np.int64), dict[Sum, Values]()

    def value(self, one: Sum) -> Values:
        """Return the values of a sum."""
        if one not in self._values:
            terms = (n * self._monomial(factors) for factors, n in one.terms)
            self._values[one] = sum(terms, self._nothing)
        return self._values[one]

    def _monomial(self, factors: Monomial) -> Values:
        if factors not in self._known:
            rest = self._monomial(factors[:-1]) if len(factors) > 1 else np.int64(1)
            self._known[factors] = rest * self._factor(factors[-1]) if factors else np.ones((), dtype=np.int64)
        return self._known[factors]

    def _factor(self, one: Factor) -> Values:
        if isinstance(one, str):
            return self._sizes[one]
        if isinstance(one, Positive):
            return np.maximum(self.value(one.of), 0)
        above, below = self.value(one.above), self.value(one.below)
        return -(-above // below) if one.up else above // below

    def hold(self, guards: Iterable[SizeGuard]) -> npt.NDArray[np.bool_]:
        """Return where all guards have their outcome."""
        found = np.ones(self._count, dtype=bool)
        for guard in guards:
            value = self.value(guard.difference)
            found &= (value == 0 if guard.zero else value > 0) == guard.held
        return found

    def _level(self, one: PassLevel) -> Values:
        unknown: list[PassLevel] = []
        level: PassLevel | None = one
        while level is not None and level.values is None:
            unknown.append(level)
            level = level.before
        values = self._nothing if level is None or level.values is None else level.values
        for level in reversed(unknown):
            change = self.value(sum_of(level.change))
            level.values = values = values + change if level.sign > 0 else values - change
        return values

    def highest(self, levels: Iterable[int]) -> list[Sum]:
        """Return the sums of the levels that are the largest at some position."""
        found = [one if isinstance(one, PassLevel) else PassLevel() + one for one in levels]
        if len(found) < 2:
            return [one.sum for one in found]
        values = np.array([self._level(one) for one in found])
        return [found[at].sum for at in np.unique(values.argmax(axis=0))]


# the document ---------------------------------------------------------------------------------------------------------


def passes_document(forms: Iterable[PassForm]) -> dict[str, Any]:
    """All forms in one document: NOTE [ Passes as sums ]."""
    pool = SumPool()
    tables: list[dict[str, Any]] = []

    def number(one: PassTable) -> int:
        tables.append(pool.packed(one._asdict()))
        return len(tables) - 1

    packed = [{key: list(map(number, found)) for key, found in form.items()} for form in forms]
    return {"schema": "jettison.passes/1", **pool.document(), "forms": packed, "tables": tables}
