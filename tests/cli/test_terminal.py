"""At the terminal: no column is lost, pipes may close, Ctrl-C is a line, names are listed, errors are documents."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from rich.console import Console

from jettison.cli.main import run
from jettison.report.console import LEAST_WIDTH, PLAIN_WIDTH, progress, shown_width
from jettison.report.tables import FittedTable
from support.patience import PATIENCE

WIDTHS = (80, 100, 140)
PIPELINE = ("llama3-8b", "--pp", "4", "--micro-batch", "1")


def lines_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert run(list(arguments)) == 0
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def process(*arguments: str, **more: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "jettison", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more)  # type: ignore[call-overload,no-any-return]


# tables ---------------------------------------------------------------------------------------------------------------


def wide() -> FittedTable:
    table = FittedTable("Stages", ("stage", "layers"), [f"figure {i} of eight" for i in range(8)], ("where it is",))
    for stage in range(3):
        table.add_row(
            f"{stage}", "embedding, 0-7", *[f"{stage}{i}.20 GiB" for i in range(8)], "in backward of layers.7"
        )
    table.add_row("total", "", *["1,024.00 GiB"] * 8, style="bold")
    return table


def printed(table: FittedTable, width: int) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, highlight=False, markup=False).print(table)
    return [line.rstrip() for line in out.getvalue().splitlines()]


@pytest.mark.parametrize("width", [40, 60, 79, 80, 100, 120, 140, 200, 300])
def test_every_figure_stands_whole_and_every_part_says_what_its_rows_are(width: int) -> None:
    lines = printed(wide(), width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for stage in range(3):
        for figure in range(8):
            assert text.count(f"{stage}{figure}.20 GiB") == 1
    assert text.count("1,024.00 GiB") == 8
    parts = text.split("\n\n") if "\n\n" in text else [text]
    assert len(parts) == sum(part.count("─") > 0 for part in parts), "a part without a rule below its headers"
    for part in parts:
        starts = [line.split()[0] for line in part.splitlines() if line[:3].strip()]
        assert [start for start in starts if start in ("0", "1", "2", "total")] == ["0", "1", "2", "total"]
    words = text.split()
    assert sum(word == "figure" for word in words) == 8, "a header was broken within a word"


def test_what_fits_is_one_table_and_text_folds_before_anything_moves_below() -> None:
    assert sum("─" in line for line in printed(wide(), 300)) == 1
    table = FittedTable("Why", ("layer", "why"), ("bytes",))
    table.add_row("layers.0 to 30 (31)", "because " * 12, "1.00 GiB")
    lines = printed(table, 60)
    assert sum("─" in line for line in lines) == 1
    assert " ".join(lines).count("because") == 12


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    ("arguments", "headers", "firsts"),
    [
        (("ledger", *PIPELINE), ("stage layers", "optimizer", "peak is in"), ("0", "1", "2", "3")),
        (("estimate", *PIPELINE, "--gpu", "a100-80gb"), ("of it again", "bubble", "optimizer"), ("0", "1 to 2", "3")),
        (("estimate", "gpt2", "--gpu", "a100-80gb", "--explain"), ("vs none", "break-even link"), ("none", "full")),
        (("plan", "gpt2", "--gpu", "t4", "--micro-batch", "16", "--what-if"), ("why", "recomputed"), ("layers.",)),
        (("list",), ("memory bandwidth", "accumulator"), ("a10-24gb", "bf16-main32", "every:K", "torchtitan")),
    ],
)
def test_tables_at_the_usual_widths(
    width: int,
    arguments: tuple[str, ...],
    headers: tuple[str, ...],
    firsts: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    lines = lines_of(capsys, *arguments)
    assert max(map(len, lines)) <= width
    words = " ".join(lines).split()
    for header in headers:
        assert all(word in words for word in header.split()), header
    for first in firsts:
        assert any(line[1:].startswith(first) for line in lines), first
    assert not any("…" in line for line in lines), "something was cut"
    assert "-0.0" not in words


@pytest.mark.parametrize("width", WIDTHS)
def test_a_search_keeps_its_first_columns(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    flags = ("--gpus", "4", "--gpu", "a100-80gb", "--global-batch", "8", "--seq", "512", "--cp", "1", "--jobs", "1")
    lines = lines_of(capsys, "search", "gpt2", *flags, "--recompute", "none,full", "--micro-batch", "1,2", "--top", "3")
    assert max(map(len, lines)) <= width
    rules = [number for number, line in enumerate(lines) if line.startswith("──")]
    assert len(rules) >= 2
    for rule in rules:
        assert lines[rule + 1].split()[0] == "1", lines[rule - 3 : rule + 3]
    assert "tokens/s/GPU" in " ".join(lines).split()


def test_the_width_is_what_columns_says_else_what_a_pipe_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    with redirect_stdout(io.StringIO()):
        for said, width in (
            ("100", 100),
            ("7", LEAST_WIDTH),
            ("0", PLAIN_WIDTH),
            ("many", PLAIN_WIDTH),
            ("", PLAIN_WIDTH),
        ):
            monkeypatch.setenv("COLUMNS", said)
            assert shown_width() == width
        monkeypatch.delenv("COLUMNS")
        assert shown_width() == PLAIN_WIDTH


# pipes and Ctrl-C -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["human", "json", "csv"])
@pytest.mark.parametrize("model", ["gpt2", "gpt-3"])
def test_a_pipe_that_nobody_reads_is_no_error_to_speak_of(form: str, model: str) -> None:
    """Neither while it is written to, nor for what is in a buffer when the process ends; hints go there, too."""
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "jettison", "ledger", model, "--format", form]
    quiet = subprocess.PIPE if model == "gpt2" else writes
    done = subprocess.run(command, stdout=writes, stderr=quiet, timeout=PATIENCE, check=False)
    os.close(writes)
    assert done.returncode == 141
    assert not done.stderr


INTERRUPTED = """
import sys
import time
class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            exec("raise KeyboardInterrupt")  # as where a dataclass is made: Python notes it for its own end
sys.meta_path.insert(0, Interrupts())
from jettison.cli import run_command
run_command(["ledger", "gpt2", "--format", "json"])
"""


@pytest.mark.parametrize("module", ["cyclopts", "jettison.families.presets", "jettison.cli.ledger"])
def test_ctrl_c_while_things_are_imported_is_one_line(module: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(INTERRUPTED)
    done = subprocess.run(
        [sys.executable, "-m", "program", module],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "jettison: interrupted\n")


def members(group: int) -> list[str]:
    """Processes of a process group."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if stat.read_text().rpartition(")")[2].split()[2] == str(group):
                found.append(stat.parent.name)
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_ctrl_c_during_a_search_on_several_processes_is_one_line() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # children of a shell's background job ignore it
    try:
        flags = ("--gpus", "64", "--gpu", "a100-80gb", "--global-batch", "64", "--jobs", "2")
        one = process("search", "gpt-175b", *flags, start_new_session=True)
    finally:
        signal.signal(signal.SIGINT, before)
    until = time.monotonic() + PATIENCE
    while len(members(one.pid)) < 3 and one.poll() is None and time.monotonic() < until:
        time.sleep(0.1)  # until its workers are there
    time.sleep(1)
    os.killpg(one.pid, signal.SIGINT)  # as a terminal does: to every process of the command
    _, said = one.communicate(timeout=PATIENCE)
    assert (one.returncode, said) == (130, b"jettison: interrupted\n")


def test_a_terminal_shows_for_how_long_work_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = pty.openpty()
    with os.fdopen(write, "w") as screen, monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", screen)
        seen, until = "", time.monotonic() + PATIENCE
        with progress() as say:
            say("counting {layers} [of] two")
            while "two 0:00:02" not in seen and time.monotonic() < until:  # seconds go on where nothing new is said
                seen += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", os.read(read, 4096).decode(errors="ignore"))
        assert "counting {layers} [of] two 0:00:02" in seen
    os.close(read)


def test_shells_are_told_all_verbs_and_flags(capsys: pytest.CaptureFixture[str]) -> None:
    scripts = {}
    for shell in ("bash", "zsh", "fish"):
        assert run(["completion", shell]) == 0
        scripts[shell] = capsys.readouterr().out
        for word in ("ledger", "search", "verify", "global-batch", "micro-batches-without-recompute", "list"):
            assert word in scripts[shell], (shell, word)
    assert run(["completion", "csh"]) == 2
    bash = shutil.which("bash")
    assert bash is not None
    asked = 'COMP_WORDS=(jettison led); COMP_CWORD=1; _jettison; echo "${COMPREPLY[@]}"'
    done = subprocess.run([bash, "-c", f"{scripts['bash']}\n{asked}"], capture_output=True, text=True, timeout=PATIENCE)
    assert done.stdout.split() == ["ledger"]


# names ----------------------------------------------------------------------------------------------------------------


def test_every_listed_name_is_one_that_commands_take(capsys: pytest.CaptureFixture[str]) -> None:
    from jettison.families.presets import PRESETS, preset
    from jettison.formula.region import parameter_count
    from jettison.spec.frameworks import named
    from jettison.spec.hardware import hardware
    from jettison.spec.precision import PRECISIONS, Optimizer
    from jettison.spec.recompute import Recompute

    assert run(["list", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.pop("schema") == "jettison.list/1"
    names = {kind: [row["name"] for row in rows] for kind, rows in found.items()}
    assert names["models"] == list(PRESETS)
    assert {row["name"]: row["parameters"] for row in found["models"]}["gpt2"] == parameter_count(preset("gpt2"))
    assert all(hardware(name).source for name in names["gpus"])
    assert all(row["source"] and row["usable_source"] and row["reached_source"] for row in found["gpus"])
    assert names["precisions"] == list(PRECISIONS) and names["optimizers"] == list(Optimizer)
    assert names["targets"] == list(named("targets"))
    for name in names["policies"]:
        Recompute.parse(name.replace(":K", ":2").replace(":N", ":2").replace("A+B", "core_attn+mlp"), layers=4)


def test_one_kind_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["list", "gpus", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["models"] is None and len(found["gpus"]) > 30
    assert run(["list", "cars"]) == 2


@pytest.mark.parametrize(("said", "tokens"), [("8k", 8192), ("8K", 8192), ("2048", 2048), ("0.5k", 512)])
def test_lengths(said: str, tokens: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ledger", "llama3-8b", "--seq", said, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["request"]["seq"] == tokens


def test_a_million_tokens_and_what_is_no_length(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ledger", "gpt2", "--max-position-embeddings", "1M", "--seq", "1M", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["request"]["seq"] == 1 << 20
    assert run(["ledger", "gpt2", "--seq", "-8k"]) == 2
    capsys.readouterr()
    for wrong in ("8q", "k", "0.3k", "1.3"):
        assert run(["ledger", "gpt2", "--seq", wrong]) == 2
        assert f"--seq: got '{wrong}' as a number of tokens; expected one such as" in capsys.readouterr().err


# Hugging Face ---------------------------------------------------------------------------------------------------------

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that has one model, in two revisions."""
    folder = tmp_path / "hub" / "models--some-org--Some-Model.1"
    for revision, layers in ((COMMIT, 3), ("f" * 40, 5)):
        (folder / "snapshots" / revision).mkdir(parents=True)
        config = {
            "model_type": "gpt2",
            "n_embd": 64,
            "n_layer": layers,
            "n_head": 4,
            "vocab_size": 128,
            "n_positions": 32,
        }
        (folder / "snapshots" / revision / "config.json").write_text(json.dumps(config))
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return folder


def test_an_id_that_the_cache_has(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ledger", "some-org/Some-Model.1", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"] == found["request"]["model"] == "some-org/Some-Model.1"
    assert len(found["layers"]) == 3 + 2


def test_a_folder_that_is_here_comes_before_an_id(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = Path("some-org/Some-Model.1")
    here.mkdir(parents=True)
    (here / "config.json").write_text((cache / "snapshots" / ("f" * 40) / "config.json").read_text())
    assert run(["ledger", str(here), "--format", "json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["layers"]) == 5 + 2


@pytest.mark.parametrize("offline", [True, False])
def test_an_id_that_is_nowhere_is_a_clear_line(
    offline: bool, cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if offline:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    else:
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert run(["ledger", "some-org/another"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "some-org/another" in said and "jettison list models" in said
    assert ("HF_HUB_OFFLINE" if offline else "pip install '.[hf]'") in said


# errors as documents --------------------------------------------------------------------------------------------------


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, object], str]:
    code = run([*arguments, "--format", "json"])
    captured = capsys.readouterr()
    return code, json.loads(captured.out), captured.err


def test_what_went_wrong_is_a_document_where_json_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    code, found, said = refused(capsys, "ledger", "gpt-3")
    assert (code, found["schema"], found["error"], found["exit_code"]) == (2, "jettison.error/1", "UsageError", 2)
    assert str(found["message"]) in said
    assert found["request"] == {"arguments": ["ledger", "gpt-3", "--format", "json"]}
    code, found, _ = refused(capsys, "ledger", "gpt2", "--tensor-parallel", "8")
    assert (code, found["error"]) == (2, "UsageError") and "--tensor-parallel" in str(found["message"])


def test_an_answer_that_is_no_good_is_the_only_document(capsys: pytest.CaptureFixture[str]) -> None:
    code, found, said = refused(capsys, "ledger", "gpt2", "--budget", "1MiB")
    assert (code, found["schema"], found["fits"]) == (3, "jettison.ledger/1", False)
    assert "is above" in said
    code, found, _ = refused(capsys, "plan", "gpt2", "--budget", "1MiB", "--dp", "2")
    assert (code, found["schema"], found["feasible"]) == (3, "jettison.plan/1", False)
    code, found, _ = refused(capsys, "ledger", "gpt2", "--budget", "1MiB", "--recompute", "auto")
    assert (code, found["schema"], found["error"]) == (3, "jettison.error/1", "Infeasible")
    details = found["details"]
    assert isinstance(details, dict) and details["budget_bytes"] == 1 << 20 < details["minimum_budget_bytes"]


@pytest.mark.parametrize(("missing", "extra"), [("torch", "torch"), ("transformers", "hf")])
def test_what_is_not_installed_is_said_in_a_line(
    missing: str, extra: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(*_args: object, **_more: object) -> None:
        raise ModuleNotFoundError(f"No module named {missing!r}", name=f"{missing}.nn")

    monkeypatch.setattr("jettison.cli.ledger.ledger", absent)
    code, found, said = refused(capsys, "ledger", "gpt2")
    assert (code, found["error"]) == (2, "UsageError")
    assert said.count("\n") == 1 and f"pip install '.[{extra}]'" in said


def test_people_get_no_documents(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ledger", "gpt-3"]) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "arguments",
    [["plan", "deep.json", "--budget", "8GiB"], ["verify", "deep.json", "--budget", "8GiB"], ["ledger", "deep.json"]],
    ids=lambda arguments: arguments[0],
)
def test_a_file_of_a_hundred_thousand_brackets_is_one_line(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "deep.json").write_text("[" * 100_000 + "]" * 100_000)
    monkeypatch.chdir(tmp_path)
    assert run(arguments) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1 and "deep.json" in said.err and not said.out
