"""Cases by chance: an architecture, a wrapper, the shapes of its batches and a budget, all drawn from one number."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
from benchmarks.gpu.families import FAMILIES as KIT
from benchmarks.gpu.families import Size, Variant, batch_of, build
from torch import Tensor, nn

from support import families
from support.toys import Headed, Mlp, Words
from zoo.harness import seed

LossFn = Callable[[Any], Tensor]

VOCABULARY = 64
TOYS = ("toy:words", "toy:rows")
LIBRARY = tuple(f"hf:{name}" for name in families.NAMES)
WRAPPERS = ("plain", "step", "models", "shapes", "ddp", "fsdp2", "pipeline", "changing", "changing step")
HOWS = ("once", "accumulated", "two forwards", "autocast", "scaler", "clipped")
OPTIMIZERS = ("none", "AdamW", "AdamW fused", "SGD", "SGD momentum", "Adagrad", "RMSprop", "NAdam")


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a seed drew.

    Args:
        source: ``kit:`` a family of `benchmarks.gpu`, ``hf:`` one of `support.families`, ``zoo:`` an entry of the
            zoo's table, or one of `TOYS`.
        frozen: share of the parameters, from the first on, that is not trained.
        shapes: rows and length of the batch of every step. The first is planned for.
        how: what a step of one's own does.
        parts: micro-batches, where it has several.
        evaluates: the model runs without gradients between steps.
        budget: a share of the way from the smallest budget to what a plain step takes; ``below`` the smallest, which
            has to be refused with a number that holds; ``auto`` and ``90%``.
        link: bytes a second to the host, where tensors may wait there; 0: they may not.
        host: bytes that pinned memory may take there; 0: what there is.
    """

    seed: int
    source: str
    layers: int = 2
    width: int = 32
    dropout: float = 0.0
    dtype: str = "fp32"
    tied: bool = False
    frozen: float = 0.0
    wrapper: str = "plain"
    how: str = "once"
    parts: int = 2
    shapes: tuple[tuple[int, int], ...] = ((4, 16),) * 3
    optimizer: str = "AdamW"
    gradients_preallocated: bool = False
    keep_output: bool = True
    check: str = "always"
    evaluates: bool = False
    budget: float | str = 0.5
    link: float = 0.0
    host: int = 0

    def __str__(self) -> str:
        usual = {field.name: field.default for field in fields(self)}
        chosen = {name: value for name, value in asdict(self).items() if value != usual[name]}
        return ", ".join(f"{name}={value!r}" for name, value in chosen.items())


def draw(number: int, *, wrapper: str = "") -> Case:
    """The case of a seed; under a wrapper of choice where one is named."""
    from zoo.table import TABLE

    chance = random.Random(number)
    chosen = chance.choice(WRAPPERS)
    wrapper = wrapper or chosen
    kit = [f"kit:{name}" for name in KIT]
    sources = [*kit, *kit, *LIBRARY, *TOYS * 4]
    if wrapper == "plain":
        sources += [f"zoo:{entry.name}" for entry in TABLE]
    if wrapper == "pipeline":
        sources = ["toy:words"]
    parts = chance.choice((2, 3, 4)) if wrapper in ("step", "ddp", "fsdp2", "pipeline", "changing step") else 1
    own = wrapper in ("step", "ddp", "fsdp2", "changing step") or chance.random() < 0.3
    shapes = [_shape(chance, parts) for _ in range(chance.randint(3, 6 if parts > 1 else 4))]
    if wrapper not in ("shapes", "changing", "changing step"):
        shapes = shapes[:1] * 3
    elif wrapper == "changing":
        shapes = [shape for shape in shapes for _ in range(2)]  # a step in which is planned is not measured
    return Case(
        seed=number,
        source=chance.choice(sources),
        layers=chance.randint(1, 4),
        width=chance.choice((16, 32, 64)),
        dropout=chance.choice((0.0, 0.1, 0.5)),
        dtype=chance.choice(("fp32", "fp32", "bf16")),
        tied=chance.random() < 0.3,
        frozen=chance.choice((0.0, 0.0, 0.0, 0.3, 0.7)),
        wrapper=wrapper,
        how=chance.choice(HOWS) if own and wrapper not in ("models", "pipeline") else "once",
        parts=parts,
        shapes=tuple(shapes),
        optimizer=chance.choice(OPTIMIZERS),
        gradients_preallocated=chance.random() < 0.25,
        keep_output=chance.random() < 0.6,
        check=chance.choice(("always", "always", "sampled", "full", "exact", "off")),
        evaluates=chance.random() < 0.15,
        budget=_budget(chance),
    )


def draw_moving(number: int) -> Case:
    """The case of a seed, with tensors that may wait on the host; none of them is too small for it."""
    chance = random.Random(f"host {number}")
    case = draw(number)
    return replace(
        case,
        budget=case.budget if case.budget == "below" else max(0.0, chance.uniform(-0.2, 0.8)),
        layers=chance.randint(2, 6),
        link=10 ** chance.uniform(7, 11),
        host=chance.choice((0, 0, 2**16, 2**18, 2**20)),
    )


def _shape(chance: random.Random, parts: int) -> tuple[int, int]:
    """Rows that can be cut into so many parts, and a length."""
    return parts * chance.randint(1, 4 if parts > 1 else 8), chance.choice((4, 9, 16, 25, 36, 48))


def _budget(chance: random.Random) -> float | str:
    share = chance.random()
    return chance.choices((0.0, share, "below", "auto", "90%"), (15, 70, 9, 3, 3))[0]


@dataclass(frozen=True, kw_only=True)
class Program:
    """How to make a case's model and batches. Same case, same bits.

    Args:
        batch: of a step.
        says_more: a later step may need more than the one that was planned, if that is said.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss_fn: LossFn | None = None
    steps: int = 3
    says_more: bool = False


def program_of(case: Case) -> Program:
    """What the case trains."""
    kind, _, name = case.source.partition(":")
    return {"kit": _kit, "hf": _library, "zoo": _zoo, "toy": _toy}[kind](case, name)


def _dtype(case: Case) -> torch.dtype:
    return torch.bfloat16 if case.dtype == "bf16" else torch.float32


def _kit(case: Case, name: str) -> Program:
    longest = max(length for _, length in case.shapes)
    sizes = {"layers": case.layers, "hidden": case.width, "heads": 4, "kv_heads": 2, "ffn": 2 * case.width}
    size = Size(**sizes, vocab=VOCABULARY, sequence=longest, experts=4)
    cpu, dtype = torch.device("cpu"), _dtype(case)

    def model() -> nn.Module:
        return build(name, size, cpu, dtype, Variant(repeat=case.tied, dropout=case.dropout), seed=case.seed)[0]

    def batch(step: int) -> Any:
        rows, length = case.shapes[step]
        return batch_of(name, Size(**sizes, vocab=VOCABULARY, sequence=length, micro_batch=rows), cpu, dtype)

    return Program(model=model, batch=batch, steps=len(case.shapes), says_more=name == "mixtral")


def _library(case: Case, name: str) -> Program:
    one = families.Case(
        family=name,
        precision=case.dtype,
        attention="eager" if case.seed % 2 or name == "gemma2" else "sdpa",
        dropout=case.dropout > 0,
        tied=case.tied and name in families.TIED_CHOICE,
        layers=min(case.layers, 3),
    )
    whole = families.build(one, steps=1, seed=case.seed).batch

    def batch(step: int) -> Any:
        rows, length = case.shapes[step]
        times = -(-rows // families.BATCH)
        cut = {key: torch.cat([leaf] * times)[:rows] for key, leaf in whole.items()}
        return {key: leaf[:, :length].contiguous() if leaf.dim() == 2 else leaf for key, leaf in cut.items()}

    return Program(
        model=lambda: families.build(one, steps=1, seed=case.seed).model,
        batch=batch,
        loss_fn=to_the_first if name == "encoder" else None,
        steps=len(case.shapes),
        says_more=name == "mixtral",
    )


def _zoo(case: Case, name: str) -> Program:
    from zoo.harness import STEPS, built
    from zoo.table import TABLE

    (entry,) = (entry for entry in TABLE if entry.name == name)
    batches = built(entry, "cpu")[1]
    return Program(
        model=lambda: built(entry, "cpu")[0],
        batch=lambda step: batches[step],
        loss_fn=entry.loss_fn,
        steps=STEPS,
        says_more=entry.values_decide or entry.by_chance,
    )


def _toy(case: Case, name: str) -> Program:
    def words() -> nn.Module:
        seed(case.seed)
        model = Words(VOCABULARY, case.width, case.layers, case.dropout)
        if case.tied:
            model.head.weight = model.embed.weight
        return model.to(_dtype(case))

    def rows() -> nn.Module:
        seed(case.seed)
        blocks = [Mlp(case.width, 3 * case.width, case.dropout) for _ in range(case.layers)]
        return Headed(blocks, case.width, 4).to(_dtype(case))

    def batch(step: int) -> Any:
        generator = torch.Generator().manual_seed(case.seed + step)
        if name == "words":
            return (torch.randint(0, VOCABULARY, case.shapes[step], generator=generator),)
        return (torch.randn(*case.shapes[step], case.width, generator=generator).to(_dtype(case)),)

    model, loss_fn = (words, to_the_first) if name == "words" else (rows, None)
    return Program(model=model, batch=batch, loss_fn=loss_fn, steps=len(case.shapes))


def to_the_first(logits: Tensor) -> Tensor:
    """The mean loss if every place were of the first class."""
    return logits.float().log_softmax(-1)[..., 0].mean().neg()
