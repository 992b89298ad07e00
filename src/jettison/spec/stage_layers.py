"""Layers of each pipeline stage where they are not spread evenly, as they are typed."""

from __future__ import annotations

import re
from itertools import product

from jettison.errors import UsageError

EXPECTED = "layers of each stage (5,4,4,3), of the first and the last (first:3,last:5), or Megatron's Et*5|t*4|t*4|t*3L"
_LETTERS = "EtmL"


def stage_layers(text: str, *, layers: int, chunks: int) -> tuple[int, ...]:
    """Layers of each stage of each device, in the order of the model.

    Args:
        text: ``5,4,4,3``; ``first:3``, ``last:5`` or both, what is left being spread evenly (Megatron's
            ``--decoder-first-pipeline-num-layers`` and its like); or a string as of Megatron's
            ``--pipeline-model-parallel-layout``: E embeds, t is a layer, m one for further tokens, L the head, ``|``
            ends a stage, ``(t|)*3`` repeats.
        layers: of the model.
        chunks: pp x virtual stages.

    Raises:
        UsageError: it is none of these, or does not add up.
    """
    if re.fullmatch(r"\d+(,\d+)*", text):
        found = tuple(map(int, text.split(",")))
    elif re.fullmatch(r"(first:\d+)?,?(last:\d+)?", text) and ":" in text:
        found = _ends(text, layers, chunks)
    elif re.fullmatch(rf"[{_LETTERS}|()*\d,]+", text):
        found = _megatron(text)
    else:
        raise UsageError(f"got --stage-layers {text!r}; expected {EXPECTED}")
    check_stage_layers(found, layers=layers, chunks=chunks)
    return found


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


def _megatron(text: str) -> tuple[int, ...]:
    """Repetitions are written out, innermost first."""
    flat, before = text.replace(",", ""), ""
    while flat != before:
        before = flat
        flat = re.sub(rf"(?:\(([{_LETTERS}|]*)\)|([{_LETTERS}|]))\*(\d+)", _repeated, flat)
        flat = re.sub(rf"\(([{_LETTERS}|]*)\)(?!\*)", r"\1", flat)
    if not re.fullmatch(r"E?[t|]*m*L?", flat):
        raise UsageError(
            f"--stage-layers {text} means {flat}; expected the embedding E first, then layers t and stages |, then "
            "layers m for further tokens, with the head L on the last stage"
        )
    return tuple(stage.count("t") for stage in flat.split("|"))


def _repeated(found: re.Match[str]) -> str:
    return (found[1] if found[1] is not None else found[2]) * int(found[3])
