"""A second reading of the exported closed form, beside the page's in JavaScript; and what an ordinary walk says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from jettison.cost.collective import ring_bytes
from jettison.cost.flops import repeated, to_the_end
from jettison.families.presets import preset
from jettison.formula.named_sizes import Choices, resized
from jettison.formula.region import layer_region
from jettison.predict.stages import kept_by
from jettison.report.explorer_closed_form import closed_form_document, form_of, region_signature, sizes_of
from jettison.spec.model import Layer, ModelSpec
from jettison.spec.recompute import UNIFORM_MODES

MODELS = (
    "gpt-175b",
    "llama3-8b",
    "qwen2-7b",
    "gemma2-27b",
    "mixtral-8x7b",
    "deepseek-v2",
    "gpt-oss-20b",
    "gpt-neox-20b",
)
LAYOUTS = ((False, False, False), (True, False, False), (True, True, False), (True, True, True))


def choices(precision: str = "bf16", *, dropout: tuple[bool, ...] = (True, False)) -> list[Choices]:
    """All choices of kernels, attention, layout and dropout."""
    return [
        Choices(
            kernels=kernels,
            attention=attention,
            precision=precision,
            dropout=drop,
            parallel=parallel,
            sp=sp,
            gathered_inputs=gathered,
        )
        for kernels in ("megatron", "pytorch")
        for attention in ("eager", "flash")
        for drop in dropout
        for parallel, sp, gathered in LAYOUTS
    ]


def walked(model: ModelSpec, layer: Layer, choice: Choices, sizes: Mapping[str, int]) -> dict[str, Any]:
    """The figures of an ordinary walk, on plain numbers."""
    other, changed = resized(model, layer, sizes)
    signature = region_signature(other, choice, sizes)
    region = layer_region(signature, changed)
    steps, program = region.tape.steps, region.program
    kept = {mode: kept_by(region, mode) for mode in UNIFORM_MODES}
    return {
        "held": [program.kept_bytes(kept[mode]) for mode in UNIFORM_MODES],
        "entries": sorted(
            [program.buffers[b].nbytes, [mode for mode in UNIFORM_MODES if b in kept[mode]]]
            for b in frozenset().union(*kept.values())
        ),
        "forward": region.flops,
        "again": [sum(steps[i].flops for i in repeated(region, kept[mode])) for mode in UNIFORM_MODES],
        "rerun": [
            sum(steps[i].flops for i in (to_the_end if mode == "selective" else repeated)(region, kept[mode]))
            for mode in UNIFORM_MODES
        ],
        "transfers": [
            [c.kind, int(c.backward), c.nbytes, ring_bytes(c.kind, c.nbytes, signature.layout.tp)]
            for c in region.collectives
            if c.axis == "tp"
        ],
        "parameters": sum(w.numel for w in region.weights),
    }


@dataclass(frozen=True)
class Reader:
    """Evaluates a document, and nothing else."""

    document: Mapping[str, Any]
    sizes: Mapping[str, int]

    def factor(self, index: int) -> int:
        made = self.document["factors"][index]
        if isinstance(made, str):
            return self.sizes[made]
        if made[0] == "positive":
            return max(0, self.sum(made[1]))
        word, above, below = made
        return -(-self.sum(above) // self.sum(below)) if word == "ceil" else self.sum(above) // self.sum(below)

    def sum(self, index: int) -> int:
        total = 0
        for count, *factors in self.document["sums"][index]:
            for each in factors:
                count *= self.factor(each)
            total += count
        return total

    def holds(self, table: Mapping[str, Any]) -> bool:
        return all(
            (self.sum(difference) == 0 if zero else self.sum(difference) > 0) == bool(held)
            for difference, zero, held in table["guards"]
        )

    def figures(self, form: int, key: str) -> dict[str, Any]:
        """As `walked` has them."""
        tables = [self.document["tables"][i] for i in self.document["forms"][form][key]]
        (table,) = [each for each in tables if self.holds(each)]  # two would contradict each other, or one be too many
        entries = [self.document["entries"][i] for i in table["entries"]]
        words, modes = self.document["words"], self.document["modes"]
        return {
            "held": [self.sum(i) for i in table["held"]],
            "entries": sorted(
                [self.sum(entry[5]), [mode for bit, mode in enumerate(modes) if entry[6] >> bit & 1]]
                for entry in entries
            ),
            "forward": self.sum(table["forward"]),
            "again": [self.sum(i) for i in table["again"]],
            "rerun": [self.sum(i) for i in table["rerun"]],
            "transfers": [
                [words[kind], backward, self.sum(n), self.sum(wire)]
                for kind, _, backward, n, wire in table["transfers"]
            ],
            "parameters": self.sum(table["parameters"]),
        }


@cache
def golden() -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]:
    """A document, points of it, and what an ordinary walk says there, numbers as text: sizes that do not divide too."""
    forms, points, expected = [], [], []
    for number, name in enumerate(MODELS):
        model = preset(name)
        layer = model.kinds[-1]
        wanted = choices(dropout=(number % 2 == 0,))
        sizes = [
            sizes_of(model, layer, s=s, b=b, t=t)
            for s, b, t in ((1, 1, 1), (77, 2, 1), (4096, 1, 1), (131, 1, 3), (2048, 2, 8), (1_048_576, 3, 7))
        ]
        forms.append(form_of(model, layer, wanted, sizes))
        for choice in wanted:
            for point in (p for p in sizes if (p["t"] > 1) == choice.parallel):
                points.append({"form": number, "key": choice.key, "sizes": point})
                found = walked(model, layer, choice, point)
                expected.append(
                    {key: list(map(str, found[key])) for key in ("held", "again", "rerun")}
                    | {"sums": list(map(str, found["held"]))}
                    | {key: str(found[key]) for key in ("forward", "parameters")}
                    | {"transfers": [[kind, back, str(n), str(wire)] for kind, back, n, wire in found["transfers"]]}
                )
    return closed_form_document(forms), points, expected
