"""Predicted peaks next to published ones: writes docs/accuracy.md.

    python -m benchmarks.accuracy

NOTE [ What an allocator reserves ]
torch.cuda.max_memory_reserved is more than the tensors of the worst moment, for reasons that do not depend on the run:

- A block that was freed on one stream is not given to another. FSDP2 allocates reduced gradients on the stream of its
  reduce-scatters, and what it gathers on that of its all-gathers, before it is copied into the parameters. So the
  gradients count although they do not exist at the moment of the peak (zero_grad has let go of them), and what is
  gathered counts twice.
- A freed block takes in what fits. The 16-bit logits are freed before the fp32 gradient of the logits is made, which
  needs twice their room: see `room_left_by_logits`.
- The rest is the share that `jettison.predict.allowance` expects.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from statistics import median
from textwrap import fill

from benchmarks import accuracy_megatron
from benchmarks.page_command import page_command
from benchmarks.published import CLAIMED, Figure, Row, rows
from jettison.core.units import GIB
from jettison.formula.region import head_region
from jettison.predict.allowance import FRAGMENTS
from jettison.predict.forecast import Forecast, Stage, forecast
from jettison.report.explain import peak_parts
from jettison.spec.run import Run

PAGE = Path(__file__).parent.parent / "docs" / "accuracy.md"
TEMPLATE = Path(__file__).parent / "pages" / "accuracy.md"
EXPECTED = 1 + FRAGMENTS[1]


def room_left_by_logits(run: Run) -> int:
    """Bytes of a rank's 16-bit logits.

    Logits, their fp32 copy and its log-softmax are allocated in this order, and the first two are freed. The gradient
    of the log-softmax goes where they were and leaves as much as the first of them took, in which the fp32 gradient of
    the logits, made next, finds no room.
    """
    entries = head_region(run.scene).entries("head")
    mesh = run.layout.mesh_sizes
    wide = (e.local_storage_bytes(mesh) for e in entries if e.role in ("log-softmax output", "softmax output"))
    return max(wide, default=0) // 2


def side_streams(run: Run, stage: Stage) -> int:
    """Bytes that only other streams may use again: reduced gradients, unless they exist at the peak, and gathers."""
    there = next(part.nbytes for part in peak_parts(stage) if part.name == "gradients")
    gathered = max(part.static.gathered for chunk in stage.parts for part in chunk)
    return max(0, stage.static.gradients - there) + 2 * gathered


def predicted_bytes(row: Row) -> int:
    """The figure that the row prints, as the ledger has it."""
    found = prediction(row)
    peak = found.first_step_peak_bytes if row.first_step else found.peak_bytes
    if row.figure is not Figure.RESERVED:
        return peak
    return int((peak + side_streams(row.run, found.worst) + room_left_by_logits(row.run)) * EXPECTED)


def prediction(row: Row) -> Forecast:
    """The forecast of a row's run."""
    return forecast(row.run)


def error(row: Row) -> float:
    """Relative, of the prediction."""
    return predicted_bytes(row) / GIB / row.gib - 1


# the page -------------------------------------------------------------------------------------------------------------


def page() -> str:
    """The whole page."""
    found = rows()
    near = [abs(error(row)) for row in found if row.within <= CLAIMED]
    words = {
        "summary": accuracy_megatron.summary(),
        "others": f"{len(near)} runs of torchtitan, torchtune, nanotron and an older Megatron-LM within the claim: "
        f"median {100 * median(near):.1f} %, worst {100 * max(near):.1f} %",
        "golden": accuracy_megatron.golden_tables(),
        "later": accuracy_megatron.later_table(),
        "further": accuracy_megatron.further_table(),
        "simumax": accuracy_megatron.simumax_table(),
        "bridge": accuracy_megatron.bridge_table(),
        "claimed": f"{100 * CLAIMED:.0f} %",
        "percent": f"{100 * float(FRAGMENTS[1]):.0f} %",
        "near": _table(row for row in found if row.within <= CLAIMED),
        "far": _table(row for row in found if row.within > CLAIMED),
        "reasons": _reasons(row for row in found if row.within > CLAIMED),
        "steps": _first_steps(found),
        "commands": _commands(found),
    }
    return TEMPLATE.read_text(encoding="utf-8").format_map(words)


def _table(chosen: Iterable[Row]) -> str:
    lines = [
        "| run | framework | figure | published GiB | predicted GiB | error |",
        "| --- | --- | --- | ---: | ---: | ---: |",
    ]
    for row in chosen:
        gib = predicted_bytes(row) / GIB
        lines.append(
            f"| {row.name} | {row.framework} | {row.figure} | {row.gib:.2f} | {gib:.2f} | {signed(error(row))} |"
        )
    return "\n".join(lines)


def signed(value: float) -> str:
    """A share as a percentage with a sign."""
    return f"{100 * value:+.1f} %".replace("-", "−")


def _reasons(chosen: Iterable[Row]) -> str:
    reasons: dict[str, list[str]] = {}
    for row in chosen:
        reasons.setdefault(row.why, []).append(row.name)
    return "\n".join(_wrapped(f"- {'; '.join(names)}: {why}.") for why, names in reasons.items())


def _first_steps(found: Iterable[Row]) -> str:
    july = {row.first_step: row for row in found if "July 2024" in row.name}
    rise = july[False].gib - july[True].gib
    state = prediction(july[False]).worst.static.state / GIB
    more = state * EXPECTED
    return _wrapped(
        f"In torchtitan PR 382 the reserved memory rises by {rise:.2f} GiB from the first step to the second. The "
        f"ledger's reason is optimizer state, which the first optimizer step makes: {state:.2f} GiB, or {more:.2f} "
        f"with the same share on top ({signed(more / rise - 1)})."
    )


def _commands(found: Iterable[Row]) -> str:
    lines = []
    for framework, chosen in groupby(found, key=lambda row: row.framework):
        lines.append(f"\n{framework}:\n")
        for row in chosen:
            answer = prediction(row)
            peak = answer.first_step_peak_bytes if row.first_step else answer.peak_bytes
            lines.append(f"- {row.name}: {peak / GIB:.2f} GiB")
            lines.append(f"  `{row.shown}`")
    return "\n".join(lines).strip()


def _wrapped(text: str) -> str:
    return fill(text, 118, subsequent_indent="  " * text.startswith("- "), break_on_hyphens=False)


def write_page() -> str:
    """Write it; what was written, in a line."""
    PAGE.write_text(page(), encoding="utf-8")
    return f"{PAGE.name}: {len(rows())} rows"


if __name__ == "__main__":
    page_command("benchmarks.accuracy", __doc__, write_page)
