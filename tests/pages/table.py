"""Every block of every page: how it is run, or why it is not. A block is known by how its first line begins."""

from __future__ import annotations

from pages import worlds
from pages.worlds import Page, World

RELEASE = "tests/release/test_wheel.py"
SETS_UP = "sets up a machine; continuous integration runs it on an empty one"
COMPILES = "tests/planner/test_compiled.py"
COMPILED_HOST = "tests/planner/test_compiled_sending.py"
EXPORT = "jettison plan gpt-22b --tp 8 --micro-batch 4 --kernels megatron --budget 55GiB --out plan.json"
RANKS = "tests/parallel/test_parallel_docs.py"

PAGES: dict[str, Page] = {
    "README.md": Page(
        run={
            "jettison.apply(": World(setup=worlds.a_model),
            "$ jettison ledger llama3-405b --tp 8 --pp 16 --dp 8": World(),
        },
        not_here={
            'pip install ".[torch,hf]"': RELEASE,
            "import torch": "tests/test_documents.py",
            "make demo": SETS_UP,
            "$ torchrun": "tests/train/test_train_run.py",
        },
    ),
    "CONTRIBUTING.md": Page(
        not_here={
            "make setup": SETS_UP,
            ".venv/bin/python -m pytest tests/ledger/test_ledger.py -k alias": "a test, run with the others",
        }
    ),
    "docs/commands.md": Page(
        run={
            "$ jettison ledger deepseek-v3 --like megatron-0.19 --tp 2 --pp 16 --ep 64": World(),
            "$ jettison ledger llama3-70b --like megatron-0.19 --tp 4 --pp 4 --dp 8": World(),
            "$ jettison estimate llama3-8b --gpu gb200 --dp 8 --zero 1 --kernels megatron": World(),
            "$ jettison plan llama3-8b --gpu h100-80gb --dp 8 --zero 3 --micro-batch 4 --what-if": World(slow=True),
            "$ jettison ledger config.json --trace --seq 32 --precision fp32 --out traced.json": World(
                setup=worlds.small_config, slow=True
            ),
            "$ jettison search gpt-175b --gpus 64 --gpu a100-80gb --global-batch 64": World(slow=True),
        }
    ),
    "docs/compiled.md": Page(
        not_here={
            'handle = jettison.auto_checkpoint(model, batch, "8GiB", optimizer=': COMPILES,
            'handle = jettison.auto_checkpoint(model, batch, "8GiB", compile=': COMPILED_HOST,
        }
    ),
    "docs/doctor.md": Page(
        run={
            "$ jettison doctor --oom run.log": World(setup=worlds.log_of_pieces),
            "$ jettison doctor --oom leak.pickle": World(setup=worlds.leaking),
            "with jettison.watch(model):": World(setup=worlds.watched),
            "$ jettison doctor --model moe:build": World(setup=worlds.moe),
        }
    ),
    "docs/explore.md": Page(run={"$ jettison explore ": World(slow=True, measured=True)}),
    "docs/export.md": Page(
        run={f"$ {EXPORT}": World(slow=True), "import jettison": World(setup=worlds.exported, slow=True)},
        not_here={
            "from checkpointing import apply": "tests/export/test_export_live.py",
            "from planned_ac import PlannedAC": "tests/export/test_export_targets.py",
        },
    ),
    "docs/fine-tuning.md": Page(
        run={
            "$ jettison plan llama3-70b --lora": World(slow=True),
            "$ jettison ledger llama3-8b --lora": World(),
            "$ jettison ledger llama3-8b --gradients": World(),
            "$ jettison ledger llama3-8b --states-on-host": World(),
            "$ jettison estimate llama3-8b --seq 32768": World(),
        }
    ),
    "docs/layouts.md": Page(
        run={
            "$ jettison search gpt-175b": World(slow=True),
            "$ jettison search llama3-70b --gpus 8 --gpu a100-80gb --global-batch 8 --budget 10GiB": World(
                slow=True, code=3
            ),
        }
    ),
    "docs/loops.md": Page(
        run={
            "def step(model, batch):": World(setup=worlds.accumulating),
            "for attempt in handle.guard():": World(setup=worlds.guarded),
            "# hardware= states the link": World(setup=worlds.a_model),
            'handle = jettison.apply(model, "offload", batch=batch, host_budget="4GiB")': World(setup=worlds.a_model),
        }
    ),
    "docs/parallel.md": Page(not_here={"import torch": RANKS, "import jettison": RANKS}),
    "docs/profile.md": Page(
        run={
            "$ jettison profile rank0.json --gpu a100-80gb": World(setup=worlds.traced_on_a_gpu),
            "$ jettison profile loop.py": World(setup=worlds.loop, slow=True, measured=True),
        }
    ),
    "docs/questions.md": Page(
        run={
            "$ jettison plan llama3-70b --lora": World(slow=True),
            "$ jettison ledger llama3-8b --lora r=16 --base": World(slow=True),
            "$ jettison ledger llama3-8b --reference same": World(),
            "$ jettison ledger llama3-8b --lora r=16 --reference base": World(),
            "$ jettison ledger llama3-8b --dp": World(slow=True),
            "$ jettison ledger llama3-8b --cp": World(slow=True),
            "$ jettison ledger llama3-8b --pp": World(),
            "$ jettison ledger llama3-8b --gradients": World(),
        }
    ),
    "docs/report.md": Page(run={"jettison report proof.json": World(setup=worlds.documents, slow=True)}),
    "docs/serve.md": Page(
        not_here={
            "$ jettison explore --serve": "tests/server/test_explore_served.py",
            "$ curl http": "tests/server/test_documents_served.py",
        }
    ),
    "docs/traces.md": Page(
        run={
            "$ jettison estimate gpt-22b": World(),
            "$ jettison plan my_models:tower --budget 1000KiB --out plan.json --timeline predicted.json": World(
                setup=worlds.tower, slow=True, measured=True
            ),
            "$ jettison report before.pickle after.pickle --out page.html": World(setup=worlds.snapshots),
            "from pathlib import Path": World(setup=worlds.snapshots_and_a_model),
        }
    ),
    "docs/train.md": Page(
        not_here={
            "jettison train recipes/one-process.toml": "tests/train/test_train_run.py",
            "from jettison.parallel import apply_context_parallel": "tests/parallel/test_context.py",
        }
    ),
    "docs/verify.md": Page(
        run={
            "def step(model, batch):": World(setup=worlds.a_model),
            "$ jettison verify value_models:built --recompute full --values": World(
                setup=worlds.values, slow=True, measured=True
            ),
        }
    ),
}
"""By path from the root of the repository. Start, how-to, the lesson and the comparison are run whole: tests/lesson."""
