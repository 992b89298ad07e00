"""What an error suggests is accepted: each suggestion is taken out of the message and run."""

from __future__ import annotations

import errno
import gzip
import json
import os
import pickle
import re
import shlex
from pathlib import Path
from typing import Final

import pytest

from jettison.cli.file_kinds import file_kind, kinds
from jettison.cli.main import app, run
from jettison.cli.suggestions import _flags, _verbs, equivalent_flag
from jettison.families.presets import PRESETS, hub_config
from jettison.models.model_types import nearest, transformers_types
from jettison.spec.frameworks import foreign_flags

LLAMA: Final = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
}


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """The exit code, and what stands on stderr."""
    code = run(list(arguments))
    return code, capsys.readouterr().err


def accepted(capsys: pytest.CaptureFixture[str], arguments: str | list[str]) -> None:
    words = shlex.split(arguments) if isinstance(arguments, str) else arguments
    code, err = said(capsys, *words)
    assert code in (0, 3), (words, err)


# flags of other tools -------------------------------------------------------------------------------------------------

BASES: Final = {
    "ledger": "ledger {model}",
    "search": "search gpt2 --gpus 2 --gpu h100-80gb --jobs 1 --seq 128 --recompute none --micro-batch 1",
    "train": "train no-such-recipe.toml",
}
ACCEPTED: set[str] = set()
"""Command lines of suggestions that were run: many flags of other tools are one of ours."""
BESIDE: Final = {
    "--ep": "--dp 2",
    "--zero": "--dp 2",
    "--base": "--lora r=8",
    "--expert-tp": "--tp 2",
    "--sp": "--tp 2",
}
"""What a flag makes sense with."""


@pytest.mark.parametrize("flag", foreign_flags())
def test_a_flag_of_another_tool_is_named_in_our_words(
    flag: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for verb in ("ledger", "demo"):
        code, err = said(capsys, *(["ledger", "gpt2"] if verb == "ledger" else ["demo"]), flag, "2")
        assert code == 2
        found = re.search(r"(?:try|takes?) (--[a-z0-9-]+(?: (?!\(see)\S+)?)", err)
        assert found is not None, err
        ours = found[1].removesuffix(".")
        taker = re.search(r"; jettison ([a-z]+)", err)
        verb = verb if taker is None else taker[1]
        first = ours.split()[0]
        assert any(first in argument.names for argument in _flags(verb)), (verb, first)
    base = next(name for name in BASES if any(first in argument.names for argument in _flags(name)))
    if base == "ledger":
        model = "mixtral-8x7b" if first in ("--ep", "--expert-tp") else "llama3.1-8b"
        words = f"{BASES[base].format(model=model)} {BESIDE.get(first, '')} {ours}"
        if words not in ACCEPTED:
            accepted(capsys, words)
            ACCEPTED.add(words)
    else:
        app.parse_args([*shlex.split(BASES[base]), *shlex.split(ours)], exit_on_error=False, print_error=False)


def test_a_number_that_was_given_takes_the_example_s_place() -> None:
    assert equivalent_flag("--per_device_train_batch_size", "16") == "--micro-batch 16"
    assert equivalent_flag("--per-device-train-batch-size", "many") == "--micro-batch 1"
    assert equivalent_flag("--Gradient-Checkpointing", "true") == "--recompute full"
    assert equivalent_flag("--no-such-thing", None) is None


def test_no_flag_of_ours_is_called_foreign() -> None:
    own = {name for verb in _verbs() for argument in _flags(verb) for name in argument.names}
    shared = set(foreign_flags()) & own
    assert not shared


# numbers --------------------------------------------------------------------------------------------------------------

WHOLE: Final = sorted(
    {
        name
        for argument in _flags("ledger")
        for name in argument.names
        if name.startswith("--") and argument.hint in (int | None, int)
    }
)


@pytest.mark.parametrize("value", ["0.5", "-5", "2.5", "many", ""])
def test_a_number_that_is_none_is_answered_with_one(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(WHOLE) > 10
    for flag in WHOLE:
        code, err = said(capsys, "ledger", "gpt2", f"{flag}={value}")
        assert code == 2, (flag, value)
        assert err.count("\n") == 1 and ("expected" in err or " needs " in err), err
        assert value in err or not value
        if (found := re.search(rf"such as {flag} (\d+)", err)) is not None:
            again = said(capsys, "ledger", "gpt2", flag, found[1])[1]
            assert "expected a whole number, such as" not in again


@pytest.mark.parametrize(("typed", "taken"), [("1T", "1e+12"), ("1.5b", "1.5e+09"), ("300M", "3e+08"), ("2x", "1")])
def test_a_power_in_letters_is_answered_with_digits(typed: str, taken: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, err = said(capsys, "estimate", "gpt2", "--gpu", "h200-141gb", "--tokens", typed)
    assert code == 2 and f"such as --tokens {taken} " in err
    accepted(capsys, ["estimate", "gpt2", "--gpu", "h200-141gb", "--tokens", taken])


def test_a_folder_that_is_read_only_is_named_before_work(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("os.access", lambda folder, mode: not (folder == tmp_path and mode == os.W_OK))
    code, err = said(capsys, "ledger", "gpt2", "--out", str(tmp_path / "ledger.json"))
    assert code == 2 and err == f"jettison: {tmp_path} cannot be written to; give another --out\n"


def test_a_folder_that_is_missing_is_to_be_made(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, err = said(capsys, "ledger", "gpt2", "--out", str(tmp_path / "new" / "ledger.json"))
    assert code == 2 and err == f"jettison: {tmp_path}/new is no folder; make it first, or give another --out\n"
    (tmp_path / "new").mkdir()
    accepted(capsys, ["ledger", "gpt2", "--out", str(tmp_path / "new" / "ledger.json")])


def test_a_disk_that_is_full_is_no_internal_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", fails)
    out = tmp_path / "ledger.json"
    code, err = said(capsys, "ledger", "gpt2", "--out", str(out))
    assert code == 2
    assert err == f"jettison: cannot write to {out}: No space left on device; make it writable, or name another\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["0.5", "20", "0", "-5", "1e3", "8Gb", "many", "0.0001", "7.25"])
def test_a_budget_that_is_suggested_is_taken(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, err = said(capsys, "plan", "llama3.1-8b", "--budget", text)
    assert code == 2 and err.count("\n") == 1
    suggested = re.findall(r'"([\d.]+ ?[A-Za-z]+)"', err)
    assert suggested or "expected one of" in err
    for one in suggested:
        accepted(capsys, ["ledger", "gpt2", "--budget", one])


@pytest.mark.parametrize("text", ["-5", "0.5", "8q", "many"])
def test_a_length_that_is_suggested_is_taken(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, err = said(capsys, "ledger", "llama3.1-8b", "--seq", text)
    assert code == 2
    suggested = re.findall(r'"(\d+k?)"', err)
    assert suggested
    for one in suggested:
        accepted(capsys, ["ledger", "llama3.1-8b", "--seq", one])


# names ----------------------------------------------------------------------------------------------------------------

REPOSITORIES: Final = {
    "meta-llama/Llama-3.1-8B": "llama3.1-8b",
    "meta-llama/Llama-3.1-70B-Instruct": "llama3.1-70b",
    "meta-llama/Meta-Llama-3-8B": "llama3-8b",
    "meta-llama/Llama-2-7b-hf": "llama2-7b",
    "mistralai/Mistral-7B-v0.1": "mistral-7b",
    "mistralai/Mixtral-8x7B-Instruct-v0.1": "mixtral-8x7b",
    "Qwen/Qwen3-30B-A3B": "qwen3-30b-a3b",
    "Qwen/Qwen2-7B-Instruct": "qwen2-7b",
    "deepseek-ai/DeepSeek-V3": "deepseek-v3",
    "google/gemma-2-9b-it": "gemma2-9b",
    "openai/gpt-oss-20b": "gpt-oss-20b",
    "google-bert/bert-base-uncased": "bert-base",
    "openai-community/gpt2-xl": "gpt2-xl",
    "microsoft/Phi-3-mini-4k-instruct": "phi3-mini",
    "allenai/OLMo-2-1124-7B": "olmo2-7b",
}


@pytest.mark.parametrize("repository", REPOSITORIES)
def test_a_repository_that_cannot_be_read_names_the_nearest_preset(
    repository: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match=f"The nearest preset is {re.escape(REPOSITORIES[repository])}, which needs"):
        hub_config(repository)
    assert REPOSITORIES[repository] in PRESETS


def test_a_repository_like_no_preset_names_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match=r"Give a config\.json") as error:
        hub_config("somebody/zzzz")
    assert "nearest" not in str(error.value)


UNKNOWN: Final = ("qwen9", "llama5", "gemma7_text", "mistral-next", "xyzzy", "olmo9")


@pytest.mark.parametrize("kind", UNKNOWN)
@pytest.mark.parametrize("verb", ["ledger {}", "estimate {} --gpu h100-80gb", "plan {} --budget 4GiB"])
def test_an_unknown_type_is_told_the_nearest_one(
    kind: str, verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA | {"model_type": kind}))
    code, err = said(capsys, *verb.format(file).split())
    assert code == 2
    found = re.search(r"--model-type (\S+) describes it", err)
    assert found is not None, err
    assert found[1] == nearest(kind)
    again = said(capsys, *verb.format(file).split(), "--model-type", found[1])
    if found[1] in ("llama", "qwen3", "mistral", "olmo2", "olmo3"):
        assert again[0] in (0, 3), again
    else:
        assert "lacks" in again[1] or again[0] == 0, again  # of sizes that this architecture has


def test_an_unknown_type_is_refused_before_libraries_are_loaded(tmp_path: Path) -> None:
    import subprocess
    import sys

    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"model_type": "qwen9"}))
    calls = ("ledger . --trace", "plan . --budget 1GiB", "verify . --recompute full", "doctor --model .")
    code = f"""import sys
from jettison.cli.main import run
for words in {calls!r}:
    code = run(words.split())
    heavy = [name for name in ("torch", "transformers") if name in sys.modules]
    if code != 2 or heavy:
        sys.exit(f"{{words}}: {{code}} {{heavy}}")"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("qwen9") >= len(calls)


def test_types_of_transformers_are_read_as_text() -> None:
    known = transformers_types()
    assert known is not None and {"llama", "mamba2", "qwen2_vl", "t5"} <= known and "qwen9" not in known


def test_a_value_that_nobody_wrote_is_called_a_default(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.json"
    mamba = {"model_type": "mamba2", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 1000, "state_size": 16}
    file.write_text(json.dumps(mamba))
    _, err = said(capsys, "ledger", str(file), "--seq", "64")
    assert "The file does not say expand, num_heads, head_dim, which are defaults of its model_type" in err
    file.write_text(json.dumps(mamba | {"num_heads": 2, "n_groups": 1}))
    accepted(capsys, f"ledger {file} --seq 64")


# files ----------------------------------------------------------------------------------------------------------------

TRACE: Final = json.dumps({"schemaVersion": 1, "traceEvents": [{"ph": "X", "name": "aten::mm", "ts": 1, "dur": 2}]})
FILES: Final = {
    "trace.json": (TRACE.encode(), "profile"),
    "trace.json.gz": (gzip.compress(TRACE.encode()), "profile"),
    "snapshot.pickle": (pickle.dumps({"segments": [], "device_traces": []}), "report"),
    "old.pickle": (pickle.dumps({"segments": []}, 0), ""),
    "timeline.html": (b"<html><head><title>GPU Memory Timeline HTML</title></head><body></body></html>", ""),
    "timeline.json": (json.dumps([[1, 2], [[0, 512], [0, 1024]]]).encode(), ""),
    "timeline.raw.json.gz": (gzip.compress(json.dumps([[1, 0, 512, 3], [2, 1, 512, 3]]).encode()), ""),
    "plan.json": (b'{"schema": "jettison.plan/1"}', "report"),
    "proof.json": (b'{"schema": "jettison.proof/1"}', "report"),
    "ledger.json": (b'{"schema": "jettison.ledger/1"}', "ledger"),
    "estimate.json": (b'{"schema": "jettison.estimate/1"}', ""),
    "log.jsonl": (b'{"event": "start", "schema": "jettison.run/1"}\n', "report"),
    "config.json": (json.dumps(LLAMA).encode(), "ledger"),
    "recipe.toml": (b"steps = 3\n[model]\narchitecture = 'gpt'\n", "train"),
    "gpu.toml": (b"[teraflops]\nbf16 = 100\n", "estimate"),
    "oom.log": (b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n", "doctor"),
}
READERS: Final = {
    "report": "report {} --out page.html",
    "profile": "profile {}",
    "doctor": "doctor --oom {}",
    "export": "export {} --to torch",
    "verify": "verify {} --recompute full",
    "ledger": "ledger {}",
    "train": "train {}",
}


def test_a_page_with_command_lines_is_no_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "README.md"
    page.write_text("```sh\ntorchrun train.py --per_device_train_batch_size 4 --output_dir out\n```\n")
    code, err = said(capsys, "report", str(page))
    assert (code, "not JSON" in err, "training framework" in err) == (2, True, False), err
    assert err.rstrip().endswith("expected a document that jettison wrote")


@pytest.mark.parametrize("verb", READERS)
@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_kind_is_named_with_the_command_that_reads_it(
    name: str, verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    content, reader = FILES[name]
    Path(name).write_bytes(content)
    kind = file_kind(Path(name))
    assert kind is not None and kind in kinds()
    if verb in kind.verbs:
        return  # what is wrong with it, if anything, the verb itself says
    code, err = said(capsys, *READERS[verb].format(name).split())
    assert code == 2, err
    assert err.startswith(f"jettison: {name} is {kind.name}; "), err
    if not reader:
        assert "run:" in err or "instead" in err or "again" in err
        return
    command = re.search(r"read it with: jettison ([a-z]+)(.*)", err)
    assert command is not None and command[1] == reader and reader in kind.verbs and name in command[2]
    words = shlex.split(f"{command[1]}{command[2]}".replace("MODEL", "gpt2").partition(" (see ")[0])
    app.parse_args(words, exit_on_error=False, print_error=False)
