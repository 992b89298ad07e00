"""Layers of each pipeline stage where they are not spread evenly, as they are typed."""

from __future__ import annotations

import re
from itertools import product
from reprlib import repr as short

from jettison.core.errors import UsageError
from jettison.spec.model import Attention, Layer, Mlp, ModelSpec

EXPECTED = (
    "layers of each stage (5,4,4,3), of the first and the last (first:3,last:5), Megatron's Et*5|t*4|t*4|t*3L, or "
    "nanotron"
)
NANOTRON = "nanotron"
_LETTERS = "EtmL"
_MOST_ITEMS = 1 << 16
"""Letters of a layout string once its repetitions are written out: more are no model's."""


def cut_of(text: str, model: ModelSpec, *, pp: int, virtual: int) -> tuple[int, ...]:
    """Layers of each stage of each device of this model, as typed, or by nanotron's rule.

    Raises:
        UsageError: `stage_layers` or `nanotron_stages` refuses it, or nanotron has no such model or pipeline.
    """
    layers = model.depth - model.further
    if text != NANOTRON:
        return stage_layers(text, layers=layers, chunks=pp * virtual, further=model.further)
    first = model.layers[0]
    if not (isinstance(first, Layer) and isinstance(first.attention, Attention) and isinstance(first.mlp, Mlp)):
        raise UsageError(f"got --stage-layers {NANOTRON}; its rule has costs of dense Llamas, and {model.name} is none")
    if virtual > 1:
        raise UsageError(f"got --stage-layers {NANOTRON} with --virtual-stages {virtual}, which nanotron has not")
    h, heads = model.hidden, first.attention.heads
    layer_cost = 4 * heads * (h // heads) * h + 3 * first.mlp.ffn * h
    return nanotron_stages(layers=layers, layer_cost=layer_cost, head_cost=model.vocab * h, stages=pp)


def stage_layers(text: str, *, layers: int, chunks: int, further: int = 0) -> tuple[int, ...]:
    """Layers of each stage of each device, in the order of the model.

    Args:
        text: ``5,4,4,3``; ``first:3``, ``last:5`` or both, what is left being spread evenly (Megatron's
            ``--decoder-first-pipeline-num-layers`` and its like); or a string as of Megatron's
            ``--pipeline-model-parallel-layout``: E embeds, t is a layer, m one for further tokens, L the head, ``|``
            ends a stage, ``(t|)*3`` repeats.
        layers: of the model.
        chunks: pp x virtual stages.
        further: layers for further tokens, which a layout string has as m, or leaves to the last stage.

    Raises:
        UsageError: it is none of these, or does not add up.
    """
    if re.fullmatch(r"\d+(,\d+)*", text):
        found = tuple(map(int, text.split(",")))
    elif re.fullmatch(r"(first:\d+)?,?(last:\d+)?", text) and ":" in text:
        found = _ends(text, layers, chunks)
    elif re.fullmatch(rf"[{_LETTERS}|()*\d,]+", text):
        found = _megatron(text, further)
    else:
        raise UsageError(f"got --stage-layers {text!r}; expected {EXPECTED}")
    check_stage_layers(found, layers=layers, chunks=chunks)
    return found


def nanotron_stages(*, layers: int, layer_cost: int, head_cost: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage as nanotron spreads them: by what blocks compute.

    ``nanotron/models/base.py``, ``build_model``: a stage takes blocks up to and with the first that brings the sum of
    all costs so far above the stage's share of the whole. Only layers and the head have a cost
    (``models/llama.py``, ``get_block_compute_costs``).

    Args:
        layers: of the model.
        layer_cost: of one layer: 4 a d h + 3 f h, whatever its key-value heads.
        head_cost: V h.
        stages: of the pipeline.

    Raises:
        UsageError: the head falls before the last stage, where nanotron puts the loss alone.
    """
    whole = layers * layer_cost + head_cost
    counts, stage, done = [0] * stages, 0, 0
    for _ in range(layers):
        counts[stage] += 1
        done += layer_cost
        if done > whole * ((stage + 1) / stages):
            stage += 1
    if stage != stages - 1:
        raise UsageError(
            f"--stage-layers {NANOTRON} puts the head on stage {stage} of 0 to {stages - 1} and the loss on the next, "
            "which no description has: say layers of each stage, or give fewer stages"
        )
    return tuple(counts)


def check_stage_layers(counts: tuple[int, ...], *, layers: int, chunks: int) -> None:
    """Do they add up?

    Raises:
        UsageError: no.
    """
    typed = ",".join(map(str, counts))
    if len(counts) != chunks:
        raise UsageError(
            f"--stage-layers {typed} has {len(counts)} stages; expected pp x virtual stages, {chunks}, in the order of "
            "the model"
        )
    if sum(counts) != layers:
        raise UsageError(f"--stage-layers {typed} makes {sum(counts)} layers; the model has {layers}")


def uneven_cuts(layers: int, stages: int) -> tuple[tuple[int, ...], ...]:
    """Ways to cut a model that are not even: the ends have up to two layers more or less than a share; the rest is
    spread as evenly as it can be, larger shares in the middle. No two stages are more than two layers apart.
    """
    found: dict[tuple[int, ...], None] = {}
    share = layers / stages
    near = [n for n in range(max(0, int(share) - 1), int(share) + 3) if abs(n - share) < 2]
    for first, last in product(near, near):
        left, inner = layers - first - last, stages - 2
        if left < 0 or (inner == 0 and left):
            continue
        cut = (first, *_spread(left, inner), last)
        if 0 < max(cut) - min(cut) <= 2:
            found[cut] = None
    return tuple(found)


def _spread(layers: int, stages: int) -> tuple[int, ...]:
    """As evenly as can be; one more in the middle."""
    if not stages:
        return ()
    each, rest = divmod(layers, stages)
    before = (stages - rest) // 2
    return tuple(each + (before <= i < before + rest) for i in range(stages))


def _ends(text: str, layers: int, chunks: int) -> tuple[int, ...]:
    ends = {name: int(count) for name, count in (part.split(":") for part in text.split(",") if part)}
    inner = chunks - len(ends)
    left = layers - sum(ends.values())
    if inner < 1 or left < 0 or left % inner:
        raise UsageError(
            f"--stage-layers {text} leaves {left} layers for {inner} other stages; expected a number that divides"
        )
    middle = (left // inner,) * inner
    return (*((ends["first"],) if "first" in ends else ()), *middle, *((ends["last"],) if "last" in ends else ()))


def _megatron(text: str, further: int) -> tuple[int, ...]:
    """Repetitions are written out, innermost first."""
    flat, before = text.replace(",", ""), ""
    while flat != before:
        before = flat
        for one in re.finditer(rf"(\([{_LETTERS}|]*\)|[{_LETTERS}|])\*(\d+)", flat):
            if len(one[2]) > 6 or len(flat) + len(one[1]) * int(one[2]) > _MOST_ITEMS:
                raise UsageError(
                    f"--stage-layers {short(text)} has {short(one[0])}; expected at most {_MOST_ITEMS} items"
                )
        flat = re.sub(rf"(?:\(([{_LETTERS}|]*)\)|([{_LETTERS}|]))\*(\d+)", _repeated, flat)
        flat = re.sub(rf"\(([{_LETTERS}|]*)\)(?!\*)", r"\1", flat)
    if not re.fullmatch(r"E?[t|]*m*L?", flat):
        raise UsageError(
            f"--stage-layers {text} means {flat}; expected the embedding E first, then layers t and stages |, then "
            "layers m for further tokens, with the head L on the last stage"
        )
    told = flat.count("m")
    if told and told != further:
        raise UsageError(
            f"--stage-layers {text} has {told} x m, layers for further tokens, and --mtp-num-layers is {further}; give "
            "the same number"
        )
    return tuple(stage.count("t") for stage in flat.split("|"))


def _repeated(found: re.Match[str]) -> str:
    return (found[1] if found[1] is not None else found[2]) * int(found[3])
