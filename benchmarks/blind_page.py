"""Writes docs/accuracy_blind.md: one round of published runs, all predicted before any answer was looked into.

python -m benchmarks.blind_page    # writes the page
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.accuracy import EXPECTED, room_left_by_logits, side_streams, signed
from benchmarks.page_command import page_command
from jettison.cli.main import run as command_line
from jettison.core.errors import UsageError
from jettison.core.units import GIB, MIB
from jettison.predict.forecast import forecast
from jettison.predict.ranges import figures
from jettison.predict.run_fields import RunRequest
from jettison.predict.run_request import flag_of, model_spec, resolve
from jettison.spec.run import Run

ROOT = Path(__file__).parent.parent
FACTS = ROOT / "tests" / "facts" / "blind_runs.csv"
PAGE = ROOT / "docs" / "accuracy_blind.md"
TEXT = Path(__file__).parent / "pages" / "accuracy_blind.md"
UNITS = {"GiB": GIB, "GB": 10**9, "MiB": MIB, "tokens/s": 1}
REFUSED = "refused"
WHY = {
    "nanotron": "nanotron's attention, loss and gradients were described as its code has them; over ranks of tensor "
    "parallelism its code of July 2024 keeps gathered inputs, for which there is a word (`--gathered-inputs`)",
    "nanotron-slow": "the authors' own software was slow: they mended its throughput in October 2024 (bench_cluster "
    "f55b5e5, versions of torch, Triton and flash-attn); times in one log differ by up to ten times",
    "loss-alone": "the last of 16 stages has the loss and nothing else, which cannot be described",
    "titan-reserved": "what is reserved is more than tensors take; the column beside has the rule of "
    "[accuracy.md](accuracy.md). Runs before 28 July 2025 wrap the model and its layers alone (`--outer-ends`), "
    "those of August 2025 compile the loss with the model (`--loss compiled`), and layers of which every second one is "
    "checkpointed are `interval:2`, where `every:2` was typed",
    "titan-card": "the authors' H100 is one of 500 W and 96 GB (`h100-96gb`), which the tables do not say",
    "titan-rocm": "software of August 2025 on ROCm: with its compiled loss memory is lower than printed, and what its "
    "kernels keep was not read; the rates of MI300X are guesses from a data sheet",
    "power": "the devices are said to be power limited, not how far",
    "unsaid": "neither what was measured nor by what is said; InternEvo's optimizer is code of its own",
    "occupied": "whole GB of what a device has in use, with the context, communicators and what the allocator keeps",
    "weights-host": "weights wait on the host, too (`offload_param`), for which there is a word now; the unit is GiB "
    "(DeepSpeed's `see_memory_usage`), and the figure nvidia-smi's",
    "deepspeed": "DeepSpeed's step makes copies of gradients, and a master in bf16 has a word now "
    "(`--precision bf16-master16`); what it still has of weights that it does not let go of was not described",
    "host-bound": "512 tokens a step: the time is that of ZeRO 3's hooks on the host, which nothing prices",
    "misread": "the program sets `attn_implementation`, which transformers does not read: it runs `sdpa`",
    "impossible": "parameters of 70B in bf16, whole under ZeRO 2, are more than the device has",
    "own-mixtures": "was refused: `--like automodel` says Liger's kernels, which patch no mixtures; AutoModel runs its "
    "own on TransformerEngine (`--kernels megatron`)",
    "packed": "documents are packed, and attention stays within them; how long they are is not said, and one was asked",
    "network": "two nodes, whose network is not said; experts of 768 over eight ranks",
    "gpus-unsaid": "how many GPUs is not said; 64 were asked for",
    "dpo": "Megatron's DPO under tensor parallelism is not described",
}


class Row:
    """One published figure."""

    def __init__(self, facts: dict[str, str]) -> None:
        self.facts = facts
        self.unit = UNITS[facts["unit"]]
        self.published = float(facts["published"])
        self.of_time = facts["kind"] == "time"

    @property
    def blind(self) -> float | None:
        """What was said first; None: nothing was."""
        return None if self.facts["blind"] == REFUSED else float(self.facts["blind"])

    @cached_property
    def now(self) -> float | None:
        """Today's answer to today's command."""
        command = self.facts["mended"] or self.facts["command"]
        if self.of_time:
            return answered("estimate", command)
        try:
            return forecast(described(command)).peak_bytes / self.unit
        except UsageError:
            return None

    @cached_property
    def printed(self) -> float | None:
        """The same as it is printed: by the rule for torchtitan, or as the device has it in use."""
        if self.of_time or self.facts["figure"] == "allocated" or self.now is None:
            return None
        run = described(self.facts["mended"] or self.facts["command"])
        found = forecast(run)
        if self.facts["figure"] != "reserved":
            return figures(run, found.peak_bytes).device.expected / self.unit
        more = side_streams(run, found.worst) + room_left_by_logits(run)
        return (found.peak_bytes + more) * EXPECTED / self.unit

    def error(self, answer: float | None) -> float | None:
        """Relative, of an answer."""
        return None if answer is None else answer / self.published - 1


def described(command: str) -> Run:
    """The run of a command for the ledger, without the command line: a third of the time."""
    model, *words = command.split()
    given: dict[str, Any] = {}
    names = {flag_of(field.name): field for field in fields(RunRequest)}
    compiled = False
    while words:
        word = words.pop(0)
        if word == "--compile":
            compiled = True
        elif word not in names:
            given[names["--" + word.removeprefix("--no-")].name] = False
        elif "bool" in str(names[word].type):
            given[names[word].name] = True
        else:
            given[names[word].name] = _typed(words.pop(0))
    run = resolve(model_spec(_found(model)), RunRequest(**given)).run
    return replace(run, compiled=True) if compiled else run


def _typed(word: str) -> int | float | str:
    if word.isdecimal():
        return int(word)
    return float(word) if word.replace(".", "", 1).isdecimal() else word


def answered(verb: str, command: str) -> float | None:
    """What the command line says to a row; None: it refuses."""
    model, *words = command.split()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        code = command_line([verb, _found(model), *words, "--format", "json"])
    if code:
        return None
    found = json.loads(printed.getvalue())
    return float(found["peak_bytes"] if verb == "ledger" else found["tokens_per_second_per_gpu"])


def _found(model: str) -> str:
    return str(ROOT / model) if model.endswith(".json") else model


def rows(facts: Path = FACTS) -> list[Row]:
    """All of them, in the order of the file."""
    with facts.open(encoding="utf-8") as file:
        return [Row(row) for row in csv.DictReader(file)]


def page() -> str:
    """The whole page."""
    found = rows()
    memory, time = [row for row in found if not row.of_time], [row for row in found if row.of_time]
    return TEXT.read_text(encoding="utf-8").format(
        memory_rows=len(memory),
        time_rows=len(time),
        sources=len({row.facts["source"] for row in found}),
        summary="\n".join(_summary(memory, time)),
        by_source="\n".join(_each_source(memory, time)),
        memory="\n".join(_table(memory, "error as printed")),
        time="\n".join(_table(time, "")),
        why="\n".join(f"- `{key}`: {text}." for key, text in WHY.items()),
    )


FIGURES = {
    "allocated": "Memory of tensors",
    "reserved": "Memory that the allocator reserves",
    "occupied": "Memory in use on a device",
    "not said": "Memory of which nobody says what is counted",
}


def _summary(memory: Sequence[Row], time: Sequence[Row]) -> Iterator[str]:
    for figure, words in FIGURES.items():
        yield f"- {words}: {_medians([row for row in memory if row.facts['figure'] == figure])}."
    yield f"- Tokens a second: {_medians(time)}."


def _each_source(memory: Sequence[Row], time: Sequence[Row]) -> Iterator[str]:
    for source, chosen in _by_source(memory):
        yield f"- Memory, {source}: {_medians(chosen)}."
    for source, chosen in _by_source(time):
        yield f"- Tokens a second, {source}: {_medians(chosen)}."


def _by_source(chosen: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    for source, group in groupby(chosen, key=lambda row: row.facts["source"]):
        yield source, list(group)


def _medians(chosen: Sequence[Row]) -> str:
    said = [f"{len(chosen)} row{'s' * (len(chosen) > 1)}"]
    for name, answers in (
        ("blind", [row.blind for row in chosen]),
        ("now", [row.now for row in chosen]),
        ("as printed", [row.printed for row in chosen]),
    ):
        off = [abs(row.error(answer) or 0.0) for row, answer in zip(chosen, answers, strict=True) if answer is not None]
        if off:
            said.append(f"{name} median {100 * median(off):.1f} %, worst {100 * max(off):.1f} %")
    return "; ".join(said)


def _table(chosen: Sequence[Row], rule: str) -> Iterator[str]:
    more = f" {rule} |" if rule else ""
    yield f"| run | published | blind | now | error blind | error now |{more} looked at |"
    yield f"| --- | ---: | ---: | ---: | ---: | ---: |{' ---: |' * bool(rule)} --- |"
    for source, group in _by_source(chosen):
        yield f"| **{source}** | | | | | |{' |' * bool(rule)} |"
        for row in group:
            cells = [row.facts["run"], f"{row.published:,g} {row.facts['unit']}"]
            cells += [
                REFUSED if value is None else f"{value:,.{0 if row.of_time else 2}f}" for value in (row.blind, row.now)
            ]
            cells += ["" if value is None else signed(value) for value in map(row.error, (row.blind, row.now))]
            if rule:
                cells.append("" if row.printed is None else signed(row.error(row.printed) or 0.0))
            noted = f" ({row.facts['note']})" if row.facts["note"] else ""
            cells.append((f"`{row.facts['looked']}`" if row.facts["looked"] else "") + noted)
            yield f"| {' | '.join(cells)} |"


def write_page() -> str:
    """Write it; what was written, in a line."""
    PAGE.write_text(page(), encoding="utf-8")
    return f"{PAGE.name}: {len(rows())} rows"


if __name__ == "__main__":
    page_command("benchmarks.blind_page", __doc__, write_page)
