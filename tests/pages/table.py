"""What is to be known of a page's blocks beside the page: which take long, which print what was measured, which are run
elsewhere and why, and which files a reader has already. A block is known by how its first line begins.

What no page here says is run as it stands, in a quick test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pages import worlds


@dataclass(frozen=True, kw_only=True)
class Page:
    """Of a page.

    Args:
        files: by name, that a reader has from a run of his own or from another page: what makes each.
        slow: blocks that take more than two seconds, or follow such a block.
        measured: commands whose figures were measured, and are not compared.
        codes: of commands that do not exit with 0.
        prints: by block, a pattern that its output has, where the page does not show it.
        not_here: why a block is not run here: a test that runs it, or a reason.
    """

    files: Mapping[str, Callable[[Path], None]] = field(default_factory=dict)
    slow: tuple[str, ...] = ()
    measured: tuple[str, ...] = ()
    codes: Mapping[str, int] = field(default_factory=dict)
    prints: Mapping[str, str] = field(default_factory=dict)
    not_here: Mapping[str, str] = field(default_factory=dict)


INSTALLS = "tests/release/test_wheel.py"
SETS_UP = "sets up a machine; continuous integration runs it on an empty one"
RANKS = "tests/parallel/test_parallel_docs.py"
MODELS = {"my_models.py": worlds.my_models}

PAGES: dict[str, Page] = {
    "README.md": Page(
        prints={
            "import torch": r"<Applied: budget 160\.00 MiB, predicted peak .*>\n",
            "from peft": r"\{'train_runtime': .*\}\n",
        },
        not_here={'pip install ".[torch,hf]"': INSTALLS, "make demo": SETS_UP},
        slow=("from peft",),
    ),
    "CONTRIBUTING.md": Page(
        not_here={
            "make setup": SETS_UP,
            ".venv/bin/python -m pytest tests/ledger/test_ledger.py -k alias": "a test, run with the others",
        }
    ),
    "docs/commands.md": Page(
        files={"config.json": worlds.config_json},
        slow=(
            "$ jettison plan llama3-8b --gpu h100-80gb --dp 8 --zero 3 --micro-batch 4 --what-if",
            "$ jettison ledger config.json --trace --seq 32 --precision fp32 --out traced.json",
            "$ jettison search gpt-175b --gpus 64 --gpu a100-80gb --global-batch 64",
        ),
    ),
    "docs/context-parallel.md": Page(
        not_here={"from jettison.parallel import apply_context_parallel": "tests/parallel/test_context.py"}
    ),
    "docs/compiled.md": Page(slow=("import torch", "handle.remove()")),
    "docs/doctor.md": Page(files={"run.log": worlds.run_log, "leak.pickle": worlds.leak_pickle}),
    "docs/explore.md": Page(slow=("$ jettison explore ",), measured=("$ jettison explore ",)),
    "docs/export.md": Page(
        files=MODELS,
        slow=(
            "$ jettison plan gpt-22b --tp 8",
            "import jettison",
            "jettison plan my_models:tower",
            "from checkpointing import apply",
        ),
        not_here={"from planned_ac import PlannedAC": "tests/export/test_export_targets.py"},
    ),
    "docs/fine-tuning.md": Page(
        slow=("$ jettison plan llama3-70b --lora", "$ jettison ledger llama3-8b --lora r=16 --base")
    ),
    "docs/how-to/from-a-trainers-file.md": Page(codes={"$ jettison ledger --from qlora.yaml --from sft.yaml": 2}),
    "docs/how-to/from-oom-to-a-running-step.md": Page(
        files={"oom.log": worlds.oom_log},
        codes={"$ jettison ledger llama3-8b --lora r=16 --seq 8192 --micro-batch 2 --gpu a100-80gb": 3},
        slow=("python train.py",),
    ),
    "docs/how-to/out-of-memory-at-step-2.md": Page(
        codes={"$ jettison ledger gpt2-xl --micro-batch 5 --gpu a100-40gb": 3}
    ),
    "docs/how-to/will-it-fit.md": Page(
        codes={"$ jettison ledger llama3-8b --seq 8192 --dp 8 --zero 3 --gpu a100-40gb --explain": 3},
        slow=("$ jettison ledger llama3-8b --dp 8 --zero 3 --recompute auto", "$ jettison ledger llama3-8b --cp"),
    ),
    "docs/layouts.md": Page(
        slow=("$ jettison search ",),
        codes={"$ jettison search llama3-70b --gpus 8 --gpu a100-80gb --global-batch 8 --budget 10GiB": 3},
    ),
    "docs/lesson/07-choosing.md": Page(slow=("import statistics",)),
    "docs/loops.md": Page(
        slow=("handle.remove()",),
        not_here={"for _ in range(3):  # on a side stream": "tests/runtime/test_captured_steps.py"},
    ),
    "docs/distributed.md": Page(slow=("torchrun",)),
    "docs/parallel.md": Page(not_here={"import torch": RANKS, "import jettison": RANKS}),
    "docs/profile.md": Page(
        files={"rank0.json": worlds.rank0_json},
        slow=("$ jettison profile loop.py",),
        measured=("$ jettison profile loop.py",),
    ),
    "docs/report.md": Page(files=MODELS, slow=("jettison plan my_models:tower", "jettison report proof.json")),
    "docs/serve.md": Page(
        not_here={
            "$ jettison explore --serve": "tests/report/test_explore_served.py",
            "$ curl http": "tests/report/test_documents_served.py",
        }
    ),
    "docs/trainers.md": Page(slow=("python lora.py",)),
    "docs/start.md": Page(not_here={"pip install .": INSTALLS}),
    "docs/traces.md": Page(
        slow=("$ jettison plan my_models:tower --budget 1000KiB --out plan.json --timeline predicted.json",),
        measured=("$ jettison plan my_models:tower --budget 1000KiB --out plan.json --timeline predicted.json",),
    ),
    "docs/train.md": Page(slow=("jettison train recipes/one-process.toml",)),
    "docs/verify.md": Page(
        slow=("$ jettison verify value_models:built --recompute full --values",),
        measured=("$ jettison verify value_models:built --recompute full --values",),
    ),
}
"""By path from the root of the repository."""
