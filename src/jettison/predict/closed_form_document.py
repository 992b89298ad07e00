"""The closed form as one JSON document, compact enough for a page: every factor, sum, word and entry is there once.

{"schema": "jettison.closed-form/1", "modes": [...], "words": [...],
 "factors": ["s", ["ceil", SUM, SUM], ...],    a size by name, or a division of two sums, rounded up ("floor": down)
 "sums": [[[n, FACTOR, ...], ...], ...],       n times the product of the factors, added up; [] is 0
 "entries": [[role, path, op, split, part, SUM, modes, reference], ...],    words by number; modes are bits, first is 1
 "tables": [{"guards": [[SUM, zero, held], ...], "parts": [WORD, ...], "entries": [ENTRY, ...],
              "transfers": [[kind, part, backward, SUM, wire SUM], ...], "held": [SUM by mode],
             "forward": SUM, "attention": SUM, "again": [SUM by mode], "rerun": [SUM by mode], "parameters": SUM}, ...],
 "forms": [{"megatron eager bf16 dropout sp": [TABLE, ...], ...}, ...]}

A table holds for sizes at which every guard's sum is equal to 0 (zero), or above 0, exactly if ``held`` says so.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from jettison.formula.sums import Factor, Sum
from jettison.predict.closed_form import MODES, Form, SumEntry, Table

SCHEMA: Final = "jettison.closed-form/1"


@dataclass(slots=True)
class _Once:
    """Things by number, each there once."""

    numbers: dict[Hashable, int] = field(default_factory=dict)
    items: list[Any] = field(default_factory=list)

    def number(self, key: Hashable, item: Any) -> int:
        """Of something that ``key`` identifies."""
        if key not in self.numbers:
            self.numbers[key] = len(self.items)
            self.items.append(item)
        return self.numbers[key]


class _Packer:
    def __init__(self) -> None:
        self.words, self.factors, self.sums, self.entries, self.tables = (_Once() for _ in range(5))

    def word(self, text: str) -> int:
        return self.words.number(text, text)

    def factor(self, factor: Factor) -> int:
        if isinstance(factor, str):
            return self.factors.number(factor, factor)
        parts = ["ceil" if factor.up else "floor", self.sum(factor.above), self.sum(factor.below)]
        return self.factors.number(tuple(parts), parts)

    def sum(self, total: Sum) -> int:
        known = self.sums.numbers.get(total.text)
        if known is not None:
            return known
        return self.sums.number(total.text, [[n, *map(self.factor, factors)] for factors, n in total.terms])

    def entry(self, entry: SumEntry) -> int:
        words = [self.word(text) for text in (entry.role, entry.path, entry.op, entry.split)]
        bits = sum(1 << MODES.index(mode) for mode in entry.modes)
        packed = [*words, entry.part, self.sum(entry.nbytes), bits, self.word(entry.reference)]
        return self.entries.number(tuple(packed), packed)

    def table(self, table: Table) -> int:
        packed = {
            "guards": [[self.sum(g.difference), int(g.zero), int(g.held)] for g in table.guards],
            "parts": [self.word(part) for part in table.parts],
            "entries": [self.entry(entry) for entry in table.entries],
            "transfers": [
                [self.word(t.kind), t.part, int(t.backward), self.sum(t.nbytes), self.sum(t.wire)]
                for t in table.transfers
            ],
            "held": [self.sum(table.layer_bytes(mode)) for mode in MODES],
            "forward": self.sum(table.forward_flops),
            "attention": self.sum(table.attention_flops),
            "again": [self.sum(total) for _, total in table.again_flops],
            "rerun": [self.sum(total) for _, total in table.rerun_flops],
            "parameters": self.sum(table.parameters),
        }
        return self.tables.number(repr(packed), packed)


def closed_form_document(forms: Iterable[Form]) -> dict[str, Any]:
    """All forms in one document, in order."""
    pack = _Packer()
    packed = [{key: [pack.table(table) for table in tables] for key, tables in form.tables.items()} for form in forms]
    return {
        "schema": SCHEMA,
        "modes": list(MODES),
        "words": pack.words.items,
        "factors": pack.factors.items,
        "sums": pack.sums.items,
        "entries": pack.entries.items,
        "tables": pack.tables.items,
        "forms": packed,
    }
