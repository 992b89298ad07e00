"""Each log of `oom_logs.py`: cause, device, figures, holders, phase, line, trainer, and what is said and never said."""

import json
import pickle
import random
import re
from pathlib import Path
from typing import Any

import pytest

import jettison
from jettison.cli.main import run
from jettison.core.errors import UsageError
from jettison.diagnose.advice import Trainer, trainer_of, trainers
from jettison.diagnose.finding import Finding
from jettison.diagnose.log import WatchRecord, decoded, facts_of_log, read_oom_log, read_watch_record
from jettison.diagnose.memory_facts import MemoryFacts, StepPhase
from jettison.diagnose.out_of_memory import diagnose_memory
from support.oom_logs import MODEL, OWN, REPORTED, Case, new
from support.oom_logs_of_drivers import ELSEWHERE, NOT_MEMORY
from support.planted_memory import traceback
from support.recorded_snapshots import Mode, Recorder

GIB = 1 << 30
CASES = (*REPORTED, *OWN, *ELSEWHERE)
FIGURES = ("requested", "allocated", "unused", "free", "total")


def read(case: Case) -> tuple[MemoryFacts, Finding]:
    data = case.text if isinstance(case.text, bytes) else case.text.encode()
    facts = facts_of_log(decoded(data), "run.log")
    return facts, diagnose_memory(facts)


def said(found: Finding) -> str:
    return "\n".join((found.claim, *found.evidence, *(f"{c.line}\n{c.why}" for c in found.changes)))


def near(nbytes: int | None, gib: float) -> bool:
    """Figures are exact but for rounding of sums: a few bytes."""
    return nbytes is not None and abs(nbytes - gib * GIB) < 16


def test_there_are_as_many_as_the_table_says() -> None:
    assert len(OWN) >= 40
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_log_is_read_right(case: Case) -> None:
    facts, found = read(case)
    text = said(found)
    assert (found.kind, facts.device) == (case.kind, case.device), text
    for name in FIGURES:
        expected = getattr(case, name)
        assert expected is None or near(getattr(facts, f"{name}_bytes"), expected), (name, facts)
    holders = dict(facts.holders)
    for name, expected in case.holders.items():
        assert near(holders.get(name), expected), (name, holders)
    assert case.phase in (None, facts.phase) and case.site in (None, facts.site), (facts.phase, facts.site)
    assert facts.trainer == case.trainer
    assert not case.first or case.first in found.changes[0].line, found.changes[0].line
    for words in case.says:
        assert words in text, (words, text)
    for words in case.never:
        assert words not in text, (words, text)


@pytest.mark.parametrize("text", NOT_MEMORY)
def test_other_ends_of_a_run_are_no_lack_of_memory(text: str) -> None:
    with pytest.raises(UsageError, match="says nowhere that memory ran out"):
        facts_of_log(text, "run.log")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_lines_that_are_advised_are_not_empty(case: Case) -> None:
    _, found = read(case)
    assert all(change.line.strip() and change.why for change in found.changes)
    assert len({change.line for change in found.changes}) == len(found.changes)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_holders_are_never_more_than_the_device(case: Case) -> None:
    facts, _ = read(case)
    if facts.total_bytes is None or facts.device == "cpu" or facts.free_bytes is None:
        return
    assert abs(sum(nbytes for _, nbytes in facts.holders) - facts.total_bytes) < 0.001 * facts.total_bytes


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_budget_that_is_advised_is_one_that_the_device_has(case: Case) -> None:
    facts, found = read(case)
    for change in found.changes:
        if change.line.startswith("jettison plan"):
            budget = int(change.line.split()[-1].removesuffix("MiB")) << 20
            assert facts.total_bytes is not None and budget <= facts.total_bytes


@pytest.mark.parametrize("seed", range(3))
def test_logs_that_are_cut_and_torn_are_read_or_refused(seed: int) -> None:
    chance = random.Random(seed)
    for case in CASES:
        text = decoded(case.text if isinstance(case.text, bytes) else case.text.encode())
        torn = list(text[: chance.randrange(1, len(text) + 1)])
        for _ in range(chance.randrange(8)):
            torn[chance.randrange(len(torn))] = chance.choice("\n│ .0G:[]()x9")
        try:
            facts = facts_of_log("".join(torn), "run.log")
        except UsageError:
            continue
        found = diagnose_memory(facts)
        assert found.claim
        held = [nbytes for name, nbytes in facts.holders if name != "shared or virtual memory"]
        assert all(nbytes > 0 for nbytes in held)
        assert not facts.total_bytes or facts.device == "cpu" or (facts.free_bytes or 0) <= facts.total_bytes * 1.02


@pytest.mark.parametrize("trainer", [one for one in trainers().values() if one.plan], ids=lambda one: one.name)
def test_plans_of_trainers_are_calls_that_there_are(trainer: Trainer) -> None:
    called = re.search(r"jettison\.integrations\.(\w+)\.(\w+)\(", trainer.plan)
    assert called is not None and "{budget}" in trainer.plan
    source = Path(jettison.__file__).parent / "frameworks" / called[1] / "integration.py"
    assert re.search(rf"^(?:def|class) {called[2]}\b", source.read_text(), re.MULTILINE)


def test_trainers_have_something_to_say() -> None:
    assert all(one.name and one.paths and one.smaller for one in trainers().values())
    assert trainer_of(["/env/site-packages/trl/trainer/x.py", "/env/site-packages/transformers/trainer.py"]) == "TRL"
    assert trainer_of(["/work/run/train.py"]) == ""


def test_the_first_of_several_devices_is_named() -> None:
    message = "OutOfMemoryError: CUDA out of memory. Tried to allocate {0}.00 GiB. GPU {0} has a total capacity of"
    text = "\n".join(f"[rank{rank}]: {message.format(rank)} 79.00 GiB of which 1.00 GiB is free." for rank in (5, 3))
    facts = facts_of_log(text, "x")
    assert facts.requested_bytes == 5 << 30
    assert facts.notes == ("memory ran out 2 times in this log: this is the first, on GPU 5",)


def test_files_are_read_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = next(case for case in OWN if isinstance(case.text, bytes))
    assert isinstance(case.text, bytes)
    file = tmp_path / "run.log"
    file.write_bytes(case.text)
    assert read_oom_log(file).allocated_bytes == round(76.5 * GIB)
    assert run(["doctor", "--oom", str(file), "--format", "json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert document["device"] == "cuda"
    assert sum(one["bytes"] for one in document["holders"]) == pytest.approx(document["total_bytes"], rel=1e-6)


def test_figures_are_shown_in_gib_with_one_decimal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.log"
    file.write_text(str(OWN[0].text))
    assert run(["doctor", "--oom", str(file)]) == 0
    rows = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines()[:8])
    assert (rows["allocated"].strip(), rows["free"].strip()) == ("71.0 GiB", "0.9 GiB")


WATCHED = {
    "AMD's device": traceback(*MODEL) + new("2.00 GiB", "63.9 GiB", "0.50 GiB", "62.0 GiB", "0.1 GiB", device="HIP"),
    "a server in a trainer": next(case.text for case in ELSEWHERE if case.name.startswith("the server in")),
    "a checkpoint": next(case.text for case in ELSEWHERE if case.phase is StepPhase.SAVING),
    "pinned memory": next(case.text for case in OWN if case.name == "pinned memory"),
}


@pytest.mark.parametrize("has_snapshot", [False, True])
@pytest.mark.parametrize("name", WATCHED)
def test_a_watched_loop_is_read_as_its_message_is(name: str, has_snapshot: bool, tmp_path: Path) -> None:
    """The device, the phase and the server are those of the message, though the loop's tensors were on "cuda"."""
    text = str(WATCHED[name])
    if has_snapshot:
        recorder = Recorder(Mode(context=None))
        recorder.oom(1 << 30, 1 << 20, ())
        (tmp_path / "watch.pickle").write_bytes(pickle.dumps(recorder.content()))
    record = WatchRecord(device="cuda", steps=(), error=text, snapshot="watch.pickle" if has_snapshot else "")
    (tmp_path / "watch.json").write_text(json.dumps(record.document()))
    facts, plain = read_watch_record(tmp_path / "watch.json"), facts_of_log(text, "watch.json")
    assert facts is not None
    for field in ("device", "failure", "phase", "trainer", "colocated", "evaluating"):
        assert getattr(facts, field) == getattr(plain, field), field
