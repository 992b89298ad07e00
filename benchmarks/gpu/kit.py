"""Everything that is measured on one GPU, in less than eight minutes.

    python3 -m benchmarks.gpu.kit [--sections gradients llama_1b] [--out FOLDER] [--seconds 465]
    python3 -m benchmarks.gpu.kit --device cpu --tiny        # its logic, without a device

Sections run in order, each within its share of the time, and write a document and a page as they go: what a case
found is on disk when the next one begins. What there was no time for is named; ``--sections`` runs it another time.
Exit codes: 0; 1 where a check did not hold (gradients differ, a peak above its budget) or a case broke; 2 where there
is no CUDA device and ``--device cpu`` was not said.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # products may otherwise differ from run to run

try:
    import torch
except ImportError:
    print(f"gpu kit: {sys.executable} has no torch; say which has, as in: make gpu PYTHON=python3.12", file=sys.stderr)
    raise SystemExit(2) from None

from benchmarks.gpu import (
    calibration,
    compiled,
    environment,
    gradients,
    graphs,
    host,
    layer_22b,
    link,
    llama,
    losses,
    offload,
    overhead,
    predictions,
)
from benchmarks.gpu.cases import Log, Status, slug
from benchmarks.gpu.glance import at_a_glance
from benchmarks.gpu.setting import Setting, name_of

RESULTS = Path(__file__).parents[1] / "results"
TRIALS = Path("out") / "gpu-kit"
LIMIT_SECONDS = 465.0
"""Of the eight minutes; importing torch is before them."""
GRACE_SECONDS = 90.0
"""After which a case that hangs ends the process: its section's other cases are on disk."""


class Run(Protocol):
    """What a section does; ``quick`` leaves all but a few cases out."""

    def __call__(self, setting: Setting, log: Log, *, quick: bool) -> None:
        """Its cases, one after the other, through the log."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the kit. ``seconds`` is its share of the time where all parts run."""

    name: str
    title: str
    seconds: float
    run: Run


SECTIONS = (  # what counts first comes first
    Section(name="environment", title="What it ran on", seconds=10, run=environment.run),
    Section(name="llama_1b", title="Llama 1B at equal peaks", seconds=60, run=llama.run_1b),
    Section(name="llama_8b", title="Llama 8B at equal peaks", seconds=55, run=llama.run_8b),
    Section(name="host", title="Host time and launches of a step", seconds=40, run=host.run),
    Section(name="layer_22b", title="The paper's 22B layer", seconds=25, run=layer_22b.run),
    Section(name="graphs", title="Whole steps as CUDA graphs", seconds=30, run=graphs.run),
    Section(name="link", title="Offload against recompute on the link", seconds=35, run=link.run),
    Section(name="compiled", title="Compiled blocks at equal peaks", seconds=80, run=compiled.run),
    Section(name="gradients", title="Bitwise identical gradients, peaks within budgets", seconds=45, run=gradients.run),
    Section(name="predictions", title="Predicted and measured peaks", seconds=25, run=predictions.run),
    Section(name="losses", title="Cross entropy over chunks of rows", seconds=10, run=losses.run),
    Section(name="overhead", title="Hooks, with everything kept", seconds=15, run=overhead.run),
    Section(name="offload", title="Offloaded tensors: gradients, races, pinned memory", seconds=20, run=offload.run),
    Section(name="calibration", title="Calibration", seconds=20, run=calibration.run),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, write, say what is missing."""
    options = _parser().parse_args(arguments)
    device = _device(options.device)
    if device is None:
        print("gpu kit: no CUDA device here; nothing was measured (its logic: --device cpu --tiny)", file=sys.stderr)
        return 2
    setting = Setting(
        device=device, tiny=options.tiny, rounds=options.rounds or (2 if options.tiny else 8), compiles=options.compile
    )
    options.out = options.out or (TRIALS if device.type == "cpu" else RESULTS)
    options.out.mkdir(parents=True, exist_ok=True)
    faulthandler.dump_traceback_later(options.seconds + GRACE_SECONDS, exit=True, file=sys.__stderr__)
    try:
        logs = run_sections(options, setting)
    finally:
        faulthandler.cancel_dump_traceback_later()
    page = write_index(options.out, slug(name_of(device)))
    print(f"written: {page}", flush=True)
    left_out = [f"{log.name}: {case.name}" for log in logs for case in log.cases if case.status is Status.LEFT_OUT]
    for name in left_out:
        print(f"left out, {name}", flush=True)
    failed = [log.name for log in logs if log.has_failed]
    print(f"gpu kit: {'FAILED in ' + ', '.join(failed) if failed else 'every check held'}", flush=True)
    return 1 if failed else 0


def run_sections(options: argparse.Namespace, setting: Setting) -> list[Log]:
    """Each until its share of the time is over; what one does not use is there for the next."""
    chosen = [section for section in SECTIONS if section.name in options.sections]
    name = name_of(setting.device)
    head = {"device": name, "torch": torch.__version__, "date": options.date, "tiny": options.tiny}
    scale = options.seconds / sum(section.seconds for section in chosen)
    until, logs = time.monotonic(), []
    for section in chosen:
        until += scale * section.seconds
        log = Log(
            name=section.name,
            title=section.title,
            stem=options.out / f"gpu-{slug(name)}-{section.name}",
            device=setting.device,
            until=until,
            head=head,
            is_lost=bool(logs) and logs[-1].is_lost,
        )
        logs.append(log)
        log.run_section(lambda section=section, log=log: section.run(setting, log, quick=options.quick))
        write_index(options.out, slug(name))
    return logs


def write_index(out: Path, device: str) -> Path:
    """A page of what the folder has of this device, earlier runs' sections included: peers first."""
    paths = [path for section in SECTIONS if (path := out / f"gpu-{device}-{section.name}.json").exists()]
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    lines = [f"# {documents[0]['device']}", ""] if documents else []
    if any(document["tiny"] for document in documents):
        lines += ["Sizes are tiny: these figures say nothing about speed.", ""]
    lines += at_a_glance(documents)
    lines += ["| section | cases | run on |", "| --- | --- | --- |"]
    for path, document in zip(paths, documents, strict=True):
        counts = {status: sum(case["status"] == status for case in document["cases"]) for status in Status}
        told = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
        when = f"torch {document['torch']}{', ' + document['date'] if document['date'] else ''}"
        lines.append(f"| [{document['title']}]({path.stem}.md) | {told} | {when} |")
    page = out / f"gpu-{device}.md"
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return page


def _device(name: str | None) -> torch.device | None:
    if name == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None


def _parser() -> argparse.ArgumentParser:
    names = [section.name for section in SECTIONS]
    parser = argparse.ArgumentParser(
        prog="python3 -m benchmarks.gpu.kit", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), help="a CUDA device by default")
    parser.add_argument("--sections", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--seconds", type=float, default=LIMIT_SECONDS, help="after which no case begins")
    parser.add_argument("--out", type=Path, help=f"folder for documents and pages; {RESULTS.name}/, of a CPU {TRIALS}")
    parser.add_argument("--tiny", action="store_true", help="sizes that a CPU runs in seconds")
    parser.add_argument("--quick", action="store_true", help="a few cases of each section")
    parser.add_argument("--rounds", type=int, help="of everything that is timed")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="no comparison with torch.compile")
    parser.add_argument("--date", default=time.strftime("%Y-%m-%d"), help="written into the results; today by default")
    return parser


if __name__ == "__main__":
    faulthandler.enable()
    code = main()
    sys.stdout.flush()
    sys.exit(code)
