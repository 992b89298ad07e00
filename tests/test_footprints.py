"""Additions and the files they touch: each row of CONTRIBUTING's table is made in a copy of the package, and tried."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from support.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "jettison"


@dataclass(frozen=True, kw_only=True)
class Example:
    """Something small that is added.

    Attributes:
        files: text by path in the package; appended where there is such a file.
        inserted: by path, a line of the file and the text that follows it; each is a file that is touched.
        lines: run by this Python in a folder with `given`; the last prints what is looked for.
        says: in what the command prints.
    """

    files: Mapping[str, str]
    lines: tuple[str, ...]
    says: str
    given: Mapping[str, str] = field(default_factory=dict)
    inserted: Mapping[str, tuple[str, str]] = field(default_factory=dict)


READER = """
says = "an example's TOML"
syntaxes = ["toml"]
any = ["example.tokens"]
ignored = ["example.colour"]

[keys]
"example.tokens" = "seq"
"""
LOG = """
[logs.example]
patterns = ['EXAMPLE took (?P<step_ms>[0-9]+) ms']
"""
GPU = """memory = "480GiB"
usable = "470GiB"
usable_source = "made up"
source = "made up"
units = 100
reached_source = "made up"
[teraflops]
fp32 = 50
bf16 = 200
[gigabytes_per_second]
memory = 1000
link = 100
host = 32
[reached]
matmul = 0.7
attention = 0.4
attention_backward = 0.3
memory = 0.8
operands = 0.8
gather = 0.5
link = 0.8
all_to_all = 0.6
"""
LLAMA_LIKE = {
    "model_type": "example", "architectures": ["ExampleForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 128, "vocab_size": 1000,
    "max_position_embeddings": 128, "hidden_act": "silu", "rms_norm_eps": 1e-6,
}  # fmt: skip
FRAMEWORK = '[presets.example]\norder = 99\nlike = "torchtitan"\nzero = 2\n'
WRITER = '''"""Which layers are checkpoints, one a line."""

from jettison.frameworks.export import TargetOutput
from jettison.frameworks.nearest_policy import Nearest


def write(nearest: Nearest) -> TargetOutput:
    """See `jettison.frameworks.export.exporter`."""
    planned = [decision.policy for decision in nearest.subject.decisions]
    return TargetOutput(
        files={"layers.txt": "\\n".join(planned)}, policies=(), cost=nearest.pricer.plan(), lost=None, notes=()
    )
'''
POLICY = '''

@dataclass(frozen=True, slots=True)
class EveryOther:
    """Every other buffer that plain autograd keeps."""

    word: str = "every-other"

    def kept(self, program: Program) -> frozenset[int]:
        return close(program, frozenset(sorted(program.saved_buffers())[::2]))


NAMED["every-other"] = EveryOther()
'''
USES_POLICY = """import torch, jettison
model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(4)))
batch = torch.randn(4, 8, requires_grad=True)
handle = jettison.apply(model, "every-other", regions=["0", "1", "2", "3"], batch=batch, loss_fn=lambda out: out.sum())
model(batch).sum().backward()
print(handle.report())
"""
FORM = """
[[form]]
words = ['EXAMPLEMEM']
begins = ['EXAMPLEMEM: no room for {SIZE}']
device = "cuda"
figures.asked = ['no room for {SIZE}']
notes = ['said by a library that nobody knew']
"""
OPTIMIZERS = '    SGD = "sgd", "no state", 0\n'
EXAMPLES = {
    "a GPU": Example(
        files={"spec/hardware_data/example-480gb.toml": GPU},
        lines=("-m jettison ledger llama3-8b --seq 2048 --gpu example-480gb",),
        says="example-480gb",
    ),
    "a model family whose blocks are known": Example(
        files={"families/models/example.toml": 'like = "llama"\n'},
        lines=("-m jettison ledger config.json --seq 64",),
        says="config.json, 210,240 parameters",
        given={"config.json": json.dumps(LLAMA_LIKE)},
    ),
    "a framework, or what one sets": Example(
        files={"frameworks/example/defaults.toml": FRAMEWORK},
        lines=("-m jettison ledger llama3-8b --seq 2048 --dp 8 --like example",),
        says="ZeRO 2",
    ),
    "a file of a framework for `--from`": Example(
        files={"frameworks/example_files/read.toml": READER},
        lines=("-m jettison ledger llama3-8b --from run.toml",),
        says="2048 tokens",
        given={"run.toml": '[example]\ntokens = 2048\ncolour = "red"\n'},
    ),
    "a line of a trainer's log for `calibrate`": Example(
        files={"frameworks/example_log/defaults.toml": LOG},
        lines=("-m jettison calibrate llama3-8b --seq 2048 --gpu h100-80gb --measured example.log",),
        says="step = 2.5",
        given={"example.log": "EXAMPLE took 2500 ms\n" * 3},
    ),
    "a target of `export`": Example(
        files={
            "frameworks/example_target/defaults.toml": '[targets.example]\norder = 99\nsays = "an example"\n',
            "frameworks/example_target/write.py": WRITER,
        },
        lines=(
            "-m jettison plan llama3-8b --seq 2048 --budget 150GiB --gpu b200-192gb --out plan.json",
            "-m jettison export plan.json --to example --out written",
            "-c \"print(open('written').read())\"",
        ),
        says="none",
    ),
    "a recompute policy": Example(
        files={"solve/checkpoint_policy.py": POLICY},
        lines=("use.py",),
        says="every-other",
        given={"use.py": USES_POLICY},
    ),
    "an optimizer with moments in the dtype that it updates": Example(
        files={},
        inserted={
            "spec/precision.py": (
                '    SGD = "sgd", "no state", 0\n',
                '    EXAMPLE = "example-lion", "one moment, by sign", 1\n',
            )
        },
        lines=(
            "-m jettison list optimizers",
            "-m jettison estimate llama3-8b --optimizer example-lion --dp 8 --gpu h100-80gb",
            "-m jettison ledger llama3-8b --optimizer example-lion --no-entries --json",
        ),
        says='"optimizer": "example-lion"',
    ),
    "a message of memory that ran out": Example(
        files={"diagnose/log_forms.toml": FORM},
        lines=("-m jettison doctor --oom run.log",),
        says="said by a library that nobody knew",
        given={"run.log": "step 3\nRuntimeError: EXAMPLEMEM: no room for 3.00 GiB\n"},
    ),
}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a copy that has all examples at once."""
    source = tmp_path_factory.mktemp("copy")
    shutil.copytree(PACKAGE, source / "jettison", ignore=shutil.ignore_patterns("__pycache__"))
    for example in EXAMPLES.values():
        for file, text in example.files.items():
            path = source / "jettison" / file
            path.parent.mkdir(exist_ok=True)
            with path.open("a", encoding="utf-8") as out:
                out.write(text)
        for file, (line, text) in example.inserted.items():
            path = source / "jettison" / file
            before, found, after = path.read_text(encoding="utf-8").partition(line)
            assert found
            path.write_text(before + line + text + after, encoding="utf-8")
    return source


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_works_where_it_was_added(name: str, package: Path, tmp_path: Path) -> None:
    example = EXAMPLES[name]
    for file, text in example.given.items():
        (tmp_path / file).write_text(text, encoding="utf-8")
    printed = ""
    for line in example.lines:
        done = subprocess.run(
            [sys.executable, *shlex.split(line)],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(package)},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        printed = done.stdout
        assert done.returncode in (0, 1) and "Traceback" not in done.stderr, done.stderr
    assert example.says in printed


def test_the_table_says_what_is_touched() -> None:
    """Each addition is one file, or the files of one folder."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = dict(re.findall(r"^\| (.+?) \| (1 file|1 folder) \|", text, flags=re.MULTILINE))
    assert set(table) == set(EXAMPLES)
    for name, example in EXAMPLES.items():
        folders = {Path(file).parent for file in example.files}
        if table[name] == "1 file":
            assert len({*example.files, *example.inserted}) == 1
        else:
            assert len(folders) == 1 and not any((PACKAGE / folder).exists() for folder in folders)
