"""Reports: what documents say is what a report says, and what they must not do they cannot."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from jettison.cli.main import run
from jettison.cli.report import report
from jettison.core.errors import UsageError
from jettison.ledger.step_levels import POINTS, StepLevels
from jettison.report import page as page_module
from jettison.report import untrusted_json
from jettison.report.page import json_for_html
from jettison.report.report_subject import SubjectKind, TensorPolicy
from jettison.solve.plan import Plan
from support.report_cases import HOSTILE, plan, proof, run_log


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def printed(table: Any, width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width, highlight=False, markup=False).print(table)
    return out.getvalue()


# what is said ---------------------------------------------------------------------------------------------------------


def test_a_proof_says_what_it_says(tmp_path: Path) -> None:
    (subject,) = report([written(tmp_path, "proof.json", proof().to_json())]).subjects
    assert (subject.kind, subject.holds) == (SubjectKind.PROOF, True)
    assert {amount.what: amount.nbytes for amount in subject.amounts} == {
        "budget": 9000,
        "predicted peak": 8900,
        "measured peak": 8800,
        "peak of plain autograd": 20_000,
    }
    assert [(p.phase, p.predicted_bytes, p.measured_bytes, p.baseline_bytes) for p in subject.phases] == [
        ("forward", 8900, 8800, 20_000),
        ("backward", 8850, 8750, 19_000),
        ("optimizer", 4450, 4400, 10_000),
    ]
    layers, around = subject.grids
    assert layers.layers == ("layers.0", "layers.1", "layers.2", "layers.3")
    first = {kind.name: policies[0] for kind, policies in zip(layers.tensors, layers.policies, strict=True)}
    assert first == {
        "linear input": TensorPolicy.KEEP,
        "activation input": TensorPolicy.RECOMPUTE,
        "softmax output": TensorPolicy.OFFLOAD,
        "dropout mask": TensorPolicy.PACK,
        "shared input": TensorPolicy.SHARED,
    }
    others = {policy for policies in layers.policies for policy in policies[1:]}
    assert others == {TensorPolicy.KEEP, TensorPolicy.SHARED}
    assert (around.layers, around.policies) == (("embedding, head and loss",), ((TensorPolicy.KEEP,),))


def test_a_proof_that_fails_says_why_first(tmp_path: Path) -> None:
    failed = replace(proof(measured=9500), gradients_identical=False)
    (subject,) = report([written(tmp_path, "p.json", failed.to_json())]).subjects
    assert subject.holds is False
    assert subject.sentences[0] == "the gradients differ from those of a plain copy"
    assert "is above the budget" in subject.sentences[1]


def test_a_plan_says_what_it_decides(tmp_path: Path) -> None:
    (subject,) = report([written(tmp_path, "plan.json", plan().to_json())]).subjects
    assert subject.kind is SubjectKind.PLAN
    assert subject.holds is None
    assert [(row.layer, row.policy, row.predicted_bytes, row.host_bytes) for row in subject.layers[:2]] == [
        ("layers.0", "per-tensor", 1536, 4096),
        ("layers.1", "none", 7680, 0),
    ]
    assert subject.layers[-1].layer == "embedding, head and loss"
    (other,) = report([written(tmp_path, "proof.json", proof().to_json())]).subjects
    assert subject.grids == other.grids


def test_what_only_shows_is_no_decision() -> None:
    made = plan()
    bare = replace(made, tensors=(), levels=None)
    assert made.hash == bare.hash
    assert made == bare
    assert Plan.from_json(made.to_json()).tensors == made.tensors


def test_documents_from_before_are_read(tmp_path: Path) -> None:
    document = proof().document()
    for name in ("tensors", "predicted_levels", "measured_levels", "baseline_levels", "environment"):
        del document[name]
    document["layers"] = [
        {k: v for k, v in row.items() if k not in ("digest", "kept", "offloaded", "packed")}
        for row in document["layers"]
    ]
    made = report([written(tmp_path, "old.json", json.dumps(document))])
    assert made.subjects[0].grids == ()
    assert made.subjects[0].environment == (("torch", "2.13.0"),)
    assert "Budget and peaks" in printed(made.table(), 80)


def test_a_described_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "plan.json"
    flags = ["llama3-8b", "--gpu", "h100-80gb", "--dp", "8", "--zero", "3", "--micro-batch", "4"]
    assert run(["plan", *flags, "--format", "json", "--out", str(target)]) == 0
    capsys.readouterr()
    document = json.loads(target.read_text())
    (subject,) = report([target]).subjects
    assert {a.what: a.nbytes for a in subject.amounts} == {
        "budget": document["budget_bytes"],
        "smallest budget": document["minimum_budget_bytes"],
        "predicted peak": document["predicted"]["peak_bytes"],
        "offloaded": document["predicted"]["host_bytes"],
    }
    assert [row.predicted_bytes for row in subject.layers] == [row["kept_bytes"] for row in document["layers"]]
    (grid,) = subject.grids
    pairs = zip(grid.tensors, grid.policies, strict=True)
    recomputed = {kind.name for kind, policies in pairs if policies[0] is TensorPolicy.RECOMPUTE}
    assert recomputed == set(document["reasons"][0]["recomputed"])
    assert sum(role.nbytes for role in subject.peak_roles) == document["predicted"]["peak_bytes"]
    assert {"parameters", "gradients", "optimizer state", "saved for backward"} <= {r.what for r in subject.peak_roles}
    assert run(["export", str(target), "--to", "torch"]) == 0
    row = next(line for line in capsys.readouterr().err.splitlines() if line.strip().startswith("a step"))
    assert dict(subject.facts)["step"].partition(" (")[0] in row  # one number for the same step


def test_a_run_and_the_plan_that_it_followed(tmp_path: Path) -> None:
    path = run_log(tmp_path)
    (subject,) = report([path]).subjects
    assert report([tmp_path]).subjects == (subject,)
    assert (subject.kind, subject.holds) == (SubjectKind.RUN, True)
    assert subject.sentences == ("the measured peak is within the budget", "5 steps", "loss from 4.000000 to 0.800000")
    assert {a.what: a.nbytes for a in subject.amounts} == {
        "budget": 9000,
        "predicted peak": 8900,
        "measured peak": 8800,
    }
    assert [(p.phase, p.predicted_bytes, p.measured_bytes) for p in subject.phases] == [
        ("forward", 8900, 8800),
        ("backward", 8850, 8750),
        ("optimizer", 4450, 4400),
    ]
    assert [(s.step, s.loss, s.measured) for s in subject.steps][:2] == [(1, 4.0, True), (2, 2.0, True)]
    assert subject.grids
    (tmp_path / "plan.json").write_text(replace(plan(), budget_bytes=9999).to_json())
    (stranger,) = report([path]).subjects
    assert stranger.grids == ()  # another plan's hash: not the one that the run followed


def test_a_torn_last_line_is_left_out_and_another_is_named(tmp_path: Path) -> None:
    path = run_log(tmp_path)
    whole = path.read_text()
    path.write_text(whole + '{"event": "st')
    assert len(report([path]).subjects[0].steps) == 5
    path.write_text('{"event": "st\n' + whole)
    with pytest.raises(UsageError, match=r"log\.jsonl, line 1: not JSON"):
        report([path])


def test_long_runs_keep_their_first_and_last_step(tmp_path: Path) -> None:
    (subject,) = report([run_log(tmp_path, steps=4000)]).subjects
    assert (subject.steps[0].step, subject.steps[-1].step) == (1, 4000)
    assert len(subject.steps) <= 1501


@given(st.lists(st.lists(st.integers(0, 2**40), min_size=1, max_size=900), min_size=1, max_size=5))
def test_no_peak_gets_lost_in_few_points(phases: list[list[int]]) -> None:
    found = StepLevels.of([(str(i), part) for i, part in enumerate(phases)], extra_bytes=7)
    assert found is not None
    assert [p.peak_bytes - 7 for p in found.phases] == [max(part) for part in phases]
    assert [min(p.low_bytes) - 7 for p in found.phases] == [min(part) for part in phases]
    assert [p.levels for p in found.phases] == [len(part) for part in phases]
    assert sum(len(p.high_bytes) for p in found.phases) <= POINTS + len(phases)


# at a terminal and as JSON --------------------------------------------------------------------------------------------


def test_tables_fit_eighty_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [written(tmp_path, f"{i}.json", proof(layers=20 + i).to_json()) for i in range(2)]
    monkeypatch.chdir(tmp_path)
    for files in ([paths[0]], paths):
        text = printed(report([Path(path.name) for path in files]).table(), 80)
        assert max(map(len, text.splitlines())) <= 80
        for expected in ("Peak by phase", "layers.1 to 19 (19)", "recomputed 0", "step time 1.25×"):
            assert expected in text


def test_the_command_writes_a_page_and_does_not_replace_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, "proof.json", proof().to_json())
    assert run(["report", "proof.json", "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "jettison.report/1"
    assert document["subjects"][0]["amounts"][0] == {"what": "budget", "nbytes": 9000}
    page = (tmp_path / "report.html").read_text()
    assert len(page.encode()) < 1_000_000
    assert run(["report", "proof.json"]) == 2
    assert "report.html is there already; give --force" in capsys.readouterr().err
    assert run(["report", "missing.json"]) == 2
    assert "missing.json cannot be read" in capsys.readouterr().err
    assert run(["report", "proof.json", "--force", "--out", "other.html"]) == 0


def test_a_report_of_a_large_model_stays_below_a_megabyte(tmp_path: Path) -> None:
    paths = [written(tmp_path, f"{i}.json", proof(layers=126).to_json()) for i in range(2)]
    assert len(report(paths).html().encode()) < 1_000_000


def test_figures_want_a_browser(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(page_module, "find_browser", lambda: None)
    written(tmp_path, "proof.json", proof().to_json())
    assert run(["report", "proof.json", "--figures", "figs"]) == 2
    assert "needs Chrome, Chromium or Edge on the PATH, and found none" in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


# what somebody was handed ---------------------------------------------------------------------------------------------


def test_names_do_nothing_to_a_page_or_a_terminal(tmp_path: Path) -> None:
    hostile = replace(proof(name=HOSTILE), environment={HOSTILE: HOSTILE}, left_out=HOSTILE)
    hostile = replace(hostile, tensors=tuple(replace(t, role=HOSTILE, path=HOSTILE) for t in hostile.tensors))
    made = report([written(tmp_path, "proof.json", hostile.to_json())])
    page, text = made.html(), printed(made.table(), 200)
    assert "<img src=x" not in page
    assert "\x1b" not in page + text
    assert "\u202e" not in page + text
    assert "onerror=boom()" in text  # it is shown, as the name that it is
    assert page.count("</script>") == report([tmp_path / "proof.json"]).html().count("</script>")


def deep(levels: int) -> str:
    return "[" * levels + "]" * levels


def proof_with(**values: Any) -> str:
    return json.dumps(proof().document() | values)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[1, 2]", "no schema"),
        ('{"schema": "jettison.ledger/1"}', "is a ledger; read it with: jettison ledger MODEL --compare"),
        (deep(1000), "nested deeper than 40"),
        (deep(200_000), "nested deeper than 40"),
        ('{"a": NaN}', "NaN is not JSON"),
        ('{"a": 1e999}', "a number beyond"),
        ('{"a": ' + "9" * 5000 + "}", "not JSON"),
        (proof_with(measured_peak_bytes=-1), "-1; expected 0 or more bytes"),
        (proof_with(measured_peak_bytes=2**70), "a number beyond"),
        (proof_with(measured_peak_bytes="8"), "measured_peak_bytes"),
        (proof_with(device="x" * 30_000), "a text of 30,000 characters"),
        (json.dumps({"schema": "jettison.plan/1", "feasible": False}), "no plan fits its budget"),
        (json.dumps(plan().document() | {"budget_bytes": 9001}), "was changed after it was written"),
        (json.dumps({"schema": "jettison.plan/1", "made_from": "description"}), "model: Field required"),
    ],
)
def test_what_is_no_document_is_refused_in_one_line(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, "given.json", text)
    assert run(["report", str(path), "--out", str(tmp_path / "out.html")]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert len(said.err.strip().splitlines()) == 1
    assert said.out == ""
    assert not (tmp_path / "out.html").exists()


def test_files_that_are_none_or_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        report([tmp_path / "nowhere.json"])
    with pytest.raises(UsageError, match=r"there is no log\.jsonl"):
        report([tmp_path])
    with pytest.raises(UsageError, match="is no file"):
        report([Path("/dev/zero")])
    with pytest.raises(UsageError, match="is not UTF-8 text"):
        (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
        report([tmp_path / "bytes.json"])
    path = written(tmp_path, "proof.json", proof().to_json())
    monkeypatch.setattr(untrusted_json, "MOST_BYTES", 1000)
    with pytest.raises(UsageError, match="at most 1000 B are read"):
        report([path])


def test_two_of_a_kind_and_no_more(tmp_path: Path) -> None:
    a, b = written(tmp_path, "a.json", proof().to_json()), written(tmp_path, "b.json", plan().to_json())
    assert report([a, a]).title == "Two proofs compared"
    with pytest.raises(UsageError, match="got a proof and a plan; expected two of one kind"):
        report([a, b])
    with pytest.raises(UsageError, match="got 3 documents; expected one, or two"):
        report([a, a, a])


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=8
)


@given(value=VALUES, data=st.data())
def test_whatever_stands_in_a_document_it_is_shown_or_refused(value: Any, data: st.DataObject) -> None:
    """Nothing but a `UsageError` comes out, whichever key is replaced by whatever."""
    made = data.draw(st.sampled_from(("proof", "plan", "described")))
    document = {"proof": proof().document, "plan": plan().document, "described": described}[made]()
    place = data.draw(st.sampled_from(sorted(document)))
    if isinstance(document[place], dict) and document[place]:
        inner = data.draw(st.sampled_from(sorted(document[place])))
        document[place] = document[place] | {inner: value}
    else:
        document[place] = value
    with tempfile.TemporaryDirectory() as folder:
        path = written(Path(folder), "given.json", json.dumps(document))
        try:
            found = report([path])
        except UsageError:
            return
    assert "\x1b" not in printed(found.table(), 80)
    json_for_html(found.document())


@pytest.mark.parametrize("made", [lambda: proof().document(), lambda: plan().document(), lambda: described()])
def test_numbers_at_the_ends(made: Any, tmp_path: Path) -> None:
    """Zero, and as large as is let in, in the place of every number at the top and one below."""
    for key, before in made().items():
        inner = before if isinstance(before, dict) else {"": before}
        for name, old in inner.items():
            if isinstance(old, bool) or not isinstance(old, int | float):
                continue
            for number in (0, -1, 2**63, 1e18, -1e-300):
                new = {**before, name: number} if isinstance(before, dict) else number
                path = written(tmp_path, "given.json", json.dumps(made() | {key: new}))
                with contextlib.suppress(UsageError):
                    printed(report([path]).table(), 80)


def described() -> dict[str, Any]:
    """A plan of a run that only a spec describes."""
    return {
        "schema": "jettison.plan/1",
        "made_from": "description",
        "feasible": True,
        "model": "m",
        "budget_bytes": 10,
        "minimum_budget_bytes": 5,
        "predicted": {"peak_bytes": 9, "step_seconds": 1.0, "overhead_fraction": 0.1, "host_bytes": 0},
        "stages": [{"stage": 0, "peak_bytes": 9, "in_flight": 1}],
        "layers": [{"layer": "layers.0", "stage": 0, "policy": "none", "kept_bytes": 3}],
        "reasons": [],
        "hash": "h",
    }
