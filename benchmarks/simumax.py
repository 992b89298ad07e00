"""SimuMax's runs of Megatron-LM on B200: what each allocated, and how it is described to the ledger.

`tests/facts/simumax_70b.csv`: Llama 3 70B with 12 layers, allocated peaks by rank. What is not in the columns is in the
notes: TransformerEngine 2.11, hence a torch before that of containers from 26.04 on, and its fused cross entropy, the
distributed optimizer, fp32 gradients that products add to. The vocabulary is that of Megatron's NullTokenizer: one
more, padded to a multiple of 128 t.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from jettison.core.units import GIB
from jettison.families.presets import preset
from jettison.predict.forecast import forecast
from jettison.request.options import RunRequest
from jettison.request.resolve import resolve
from jettison.spec.run import Run

FACTS = Path(__file__).parent.parent / "tests" / "facts" / "simumax_70b.csv"


@dataclass(frozen=True, kw_only=True)
class SimuMaxRow:
    """One run: GiB of its first and its last rank, and what SimuMax predicted of the larger."""

    name: str
    run: Run
    first_gib: float
    last_gib: float
    simumax_gib: float

    @property
    def measured(self) -> tuple[float, float]:
        """GiB of the first and of the last rank."""
        return self.first_gib, self.last_gib

    def predicted(self) -> tuple[float, float]:
        """GiB of the first and of the last stage."""
        stages = forecast(self.run).stages
        return stages[0].peak.nbytes / GIB, stages[-1].peak.nbytes / GIB


def rows() -> list[SimuMaxRow]:
    """All of the file."""
    with FACTS.open(encoding="utf-8") as file:
        return [_row(row) for row in csv.DictReader(file)]


def reserved() -> Iterator[tuple[Run, float, str]]:
    """Runs whose reserved bytes are stated as well, with these and a name."""
    with FACTS.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            found = re.search(r"reserved max ([\d.]+) GiB", row["notes"])
            if found is not None:
                yield run_of(row), float(found[1]) * GIB, row["source"].split()[-1]


def _row(row: Mapping[str, str]) -> SimuMaxRow:
    notes = row["notes"]
    ranks = re.search(r"rank0 ([\d.]+) rank7 ([\d.]+) GiB", notes)
    other = re.search(r"predicted by SimuMax [\d.]+ ms ([\d.]+) GiB", notes)
    assert ranks is not None, notes
    assert other is not None, notes
    return SimuMaxRow(
        name=row["source"].split()[-1],
        run=run_of(row),
        first_gib=float(ranks[1]),
        last_gib=float(ranks[2]),
        simumax_gib=float(other[1]),
    )


def run_of(row: Mapping[str, str]) -> Run:
    """A row as Megatron-LM ran it."""
    tp, dp, micro_batch = int(row["tp"]), int(row["dp"]), int(row["mbs"])
    whole = preset("llama3-70b")
    pad = 128 * tp
    vocab = -(-(whole.vocab + 1) // pad) * pad
    model = replace(whole, layers=whole.layers[: int(row["layers"])], vocab=vocab)
    asked = RunRequest(
        like="megatron-0.19",
        loss="te",
        workspaces="te-blackwell",
        seq=int(row["seq"]),
        micro_batch=micro_batch,
        micro_batches=int(row["gbs"]) // (micro_batch * dp),
        tp=tp,
        pp=int(row["pp"]),
        dp=dp,
        zero=int(row["zero"]),
    )
    return resolve(model, asked).run


def layout_words(run: Run) -> str:
    """The ranks of a run."""
    layout = run.layout
    axes = (("tp", layout.tp), ("pp", layout.pp), ("dp", layout.dp))
    return ", ".join(f"{axis} = {size}" for axis, size in axes if size > 1)


if __name__ == "__main__":
    for one in rows():
        first, last = one.predicted()
        print(
            f"{one.name:42} {one.first_gib:7.3f} {first:7.3f} {100 * (first / one.first_gib - 1):+6.2f} %  "
            f"{one.last_gib:7.3f} {last:7.3f} {100 * (last / one.last_gib - 1):+6.2f} %  "
            f"SimuMax {100 * (one.simumax_gib / max(one.first_gib, one.last_gib) - 1):+6.2f} %"
        )
