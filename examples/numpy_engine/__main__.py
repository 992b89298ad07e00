"""The lesson's questions on the command line: ``python -m examples.numpy_engine sweep``."""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from typing import Any

from . import studies
from .studies import Found

SIZES = ("b", "s", "h", "heads", "dropout", "attention", "dtype")
LETTERS = (("b", 1, "sequences"), ("s", 8192, "tokens"), ("h", 8192, "width"), ("heads", 64, "heads"))


def main(words: list[str] | None = None) -> int:
    """Prints what was asked for."""
    parser = _parser()
    asked = parser.parse_args(words)
    heads = getattr(asked, "heads", 1)
    if heads > 1 and asked.h % heads:
        parser.error(f"argument --heads: got {heads}; expected a divisor of the width, {asked.h}, such as 1")
    if asked.question == "figures":
        from .figures import write

        for path in write(asked.out):
            print(path)
        return 0
    facts, rows = _answer(asked)
    sys.stdout.write(_as_json(facts, rows) if asked.format == "json" else _as_table(facts, rows))
    return 0


def _answer(asked: argparse.Namespace) -> Found:
    if asked.question == "gradients":
        return studies.gradients()
    if asked.question == "fp8":
        return studies.fp8(snapshot=asked.scale == "snapshot", history=asked.history)
    if asked.question == "toy":
        return studies.toy(layers=asked.layers, k=asked.k)
    if asked.question == "rules":
        return studies.taught()
    sizes: dict[str, Any] = {name: getattr(asked, name) for name in SIZES}
    if asked.question == "block":
        return studies.saved(**sizes)
    network = studies.networks(asked.network, layers=asked.layers, **sizes)
    if asked.question == "offload":
        return studies.offload(network)
    ask = studies.sweep if asked.question == "sweep" else studies.policies
    return ask(network, to_the_end=asked.to_the_end)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m examples.numpy_engine", description=__doc__)
    questions = parser.add_subparsers(dest="question", required=True)
    helps = {
        "block": "what one block keeps for backward",
        "gradients": "is every policy's gradient the same, and is it right?",
        "sweep": "segments of k layers, for all k up to 16 and one in four above",
        "policies": "bytes and FLOPs of none, selective, block:n and every:k",
        "offload": "seconds by link, and where recompute and offload break even",
        "fp8": "delayed scaling when layers are recomputed",
        "toy": "the matmuls of a toy whose baseline checkpoints already",
        "rules": "rules of thumb beside what is counted",
        "figures": "draw docs/lesson's figures",
    }
    for name, text in helps.items():
        question = questions.add_parser(name, help=text, description=text)
        question.add_argument("--format", choices=("human", "json"), default="human")
        if name in ("block", "sweep", "policies", "offload"):
            _add_sizes(question, name)
        elif name == "fp8":
            question.add_argument("--scale", choices=("snapshot", "current"), default="snapshot", help="a second run's")
            question.add_argument("--history", type=_count, default=4, help="amaxes that are remembered: 4")
        elif name == "toy":
            question.add_argument("--layers", type=_count, default=16)
            question.add_argument("--k", type=_count, default=4)
        elif name == "figures":
            question.add_argument("--out", default="docs/lesson")
    return parser


def _count(text: str, example: int = 16) -> int:
    """A whole number of 1 or more, as argparse takes a type."""
    if not (text.isascii() and text.isdecimal()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}; expected a whole number of 1 or more, such as {example}")
    return int(text)


def _chance(text: str) -> float:
    """A probability below 1, as argparse takes a type."""
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}; expected a probability of at least 0 and below 1, such as 0.1")
    return found


def _add_sizes(question: argparse.ArgumentParser, name: str) -> None:
    for letter, default, text in (
        ("b", 1, "sequences"),
        ("s", 8192, "tokens"),
        ("h", 8192, "width"),
        ("heads", 64, "heads"),
    ):
        question.add_argument(
            f"--{letter}", type=partial(_count, example=default), default=default, help=f"{text}: {default}"
        )
    question.add_argument("--dropout", type=_chance, default=0.1, help="probability: 0.1")
    question.add_argument("--attention", choices=("eager", "fused"), default="eager")
    question.add_argument("--dtype", choices=("float16", "float32", "float64"), default="float16")
    if name == "block":
        return
    question.add_argument("--layers", type=_count, default=32, help="layers: 32")
    question.add_argument("--network", choices=("transformer", "chain"), default="transformer")
    question.add_argument("--to-the-end", action="store_true", help="run segments to their very output")


def _as_json(facts: dict[str, Any], rows: studies.Rows) -> str:
    return json.dumps({**facts, "rows": rows}, indent=1) + "\n"


def _as_table(facts: dict[str, Any], rows: studies.Rows) -> str:
    """Facts, one a line, then the rows as columns."""
    width = max(map(len, facts), default=0)
    lines = [f"{name:<{width}}  {_shown(value)}" for name, value in facts.items()]
    cells = [list(rows[0]), *([_shown(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines += ["", *("  ".join(f"{cell:>{size}}" for cell, size in zip(line, widths, strict=True)) for line in cells)]
    return "\n".join(lines) + "\n"


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 10_000 else f"{value:,.0f}"
    return str(value)


if __name__ == "__main__":
    sys.exit(main())
