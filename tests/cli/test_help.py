"""Help that one can read: the usual flags on one screen, every flag in a group, the rest one flag away."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields

import pytest

from jettison.cli.app import GROUPS
from jettison.cli.main import VERB_GROUPS, VERBS, app, run
from jettison.cli.suggestions import _flags
from jettison.core.errors import UsageError
from jettison.core.objects import former_names, renamed
from jettison.request.options import CommonRequest, RunRequest
from jettison.request.resolve import flag_of, run_of
from jettison.search.search import SearchRequest
from jettison.spec.kernels import FORMER_VALUES
from jettison.spec.layout import AS_BUILT

MOST_LINES = 60
MANY = ("ledger", "plan", "estimate", "search", "calibrate")
"""Verbs that take the flags of a run."""
REQUESTS: dict[str, type[CommonRequest]] = {"search": SearchRequest}
USUAL = (
    *("from", "gpu", "seq", "micro-batch", "tp", "pp", "dp", "zero", "recompute", "precision", "optimizer", "lora"),
    "format",
)
TERMS = r"\b(?:again|beside|behind|further|narrow(?:er)?|host|products?|words?)\b"


def page(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(list(arguments)) == 0
    return capsys.readouterr().out


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")


@pytest.mark.parametrize("verb", VERBS)
def test_usual_flags_fit_one_screen(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    brief, full = page(capsys, verb, "--help"), page(capsys, verb, "--help-all")
    assert len(brief.splitlines()) <= MOST_LINES
    titles = re.findall(r"^╭─ (.+?) ─", brief, re.MULTILINE)
    assert titles == [name for name in GROUPS if name in titles]
    assert brief.rstrip().endswith(f"jettison {verb} --help-all") == (verb in MANY or verb == "export")
    assert len(full) > len(brief) or brief == full


@pytest.mark.parametrize("verb", VERBS)
def test_every_flag_has_a_group_and_a_text(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    full = page(capsys, verb, "--help-all")
    assert not re.search(r"^╭─ (?:Parameters|Arguments) ─", full, re.MULTILINE)
    shown = app[verb].assemble_argument_collection(parse_docstring=True)
    for argument in shown:
        if argument.show:
            assert argument.parameter.help, argument.name
            assert not re.search(TERMS, argument.parameter.help), argument.parameter.help
            assert f" {argument.name}" in full
    said = {*re.findall(r"--[a-z0-9-]+|[A-Z]+", full), "*"}
    assert {name for one in shown for name in one.names if not name.startswith("--no-")} <= said
    taken = {name for one in _flags(verb) for name in one.positives}
    kinds = [REQUESTS.get(verb, RunRequest)] if verb in MANY else []
    assert taken - said == {flag_of(former) for kind in kinds for former in former_names(kind).values()}


def test_a_former_name_of_a_flag_is_still_taken() -> None:
    def asked(*flags: str) -> RunRequest:
        _, bound, _ = app.parse_args(["ledger", "llama3-8b", *flags], exit_on_error=False, print_error=False)
        return next(value for value in bound.arguments.values() if isinstance(value, RunRequest))

    former = former_names(RunRequest)
    for field in fields(RunRequest):
        if field.name in former and "bool" in str(field.type):
            assert asked(flag_of(former[field.name])) == RunRequest(**{field.name: True})
            assert asked(f"--no-{flag_of(former[field.name])[2:]}") == RunRequest(**{field.name: False})
        elif field.name in former:
            assert asked(flag_of(former[field.name]), "4") == asked(flag_of(field.name), "4") != RunRequest()


def test_settings_of_older_files_are_read_by_their_former_names() -> None:
    assert renamed(RunRequest, {"holds_output": True, "seq": 1}) == {"keep_logits": True, "seq": 1}
    assert renamed(RunRequest, {"holds_output": True, "keep_logits": False}) == {"keep_logits": False}


@pytest.mark.parametrize("name", ["loss", "gradients", "accumulation"])
def test_former_values_of_a_flag_are_still_taken(name: str) -> None:
    more = {"precision": "bf16-grad32"} if name == "gradients" else {}
    for former, now in FORMER_VALUES[name].items():
        runs = [run_of("llama3-8b", RunRequest(**{name: value}, **more)) for value in (former, now)]
        assert runs[0] == runs[1]
    with pytest.raises(UsageError, match="got --ssm-kernels eager; llama3-8b has no state-space"):
        run_of("llama3-8b", RunRequest(ssm_kernels="written"))


def test_options_that_recorded_models_refuse_are_options() -> None:
    assert {field.name for field in fields(RunRequest)} >= AS_BUILT


@pytest.mark.parametrize("verb", MANY)
def test_flags_that_most_runs_need_are_usual(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    brief = page(capsys, verb, "--help")
    assert [name for name in USUAL if f"--{name} " not in brief] == []
    assert "--json" in brief


def test_jettison_alone_says_what_to_do_next(capsys: pytest.CaptureFixture[str]) -> None:
    text = page(capsys)
    first = re.findall(r"^ (jettison .+?)  +\S", text, re.MULTILINE)
    assert len(first) in (3, 4)
    for command in first:
        verb, *flags = shlex.split(command)[1:]
        assert verb in VERBS
        known = {name for one in _flags(verb) for name in one.names}
        assert [flag for flag in flags if flag.startswith("--") and flag not in known] == []
    titles = re.findall(r"^╭─ (.+?) ─", text, re.MULTILINE)
    assert titles == [*VERB_GROUPS, "Shell"]
    for verb in VERBS:
        said = re.search(rf"^│ {verb} +([A-Z][a-z]+) ", text, re.MULTILINE)
        assert said is not None and not said[1].endswith("s"), verb


def test_completion_knows_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    script = page(capsys, "completion", "bash")
    assert "--help-all" in script and "--keep-batches" in script


def test_json_is_short_for_the_format(capsys: pytest.CaptureFixture[str]) -> None:
    long = page(capsys, "list", "targets", "--format", "json")
    assert page(capsys, "list", "targets", "--json") == long
    assert run(["list", "nothing", "--json"]) == 2
    assert '"jettison.error/1"' in capsys.readouterr().out


def test_errors_name_flags_by_their_new_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ledger", "gpt2", "--hold-output"]) == 2
    assert "Did you mean --keep-logits?" in capsys.readouterr().err
    assert run(["ledger", "gpt2", "--quant-recipe", "all=bf16", "--products", "all=bf16"]) == 2
    assert "--products, the former name of --quant-recipe, specified multiple times" in capsys.readouterr().err
