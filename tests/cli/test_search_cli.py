"""A search as it is asked for: cut off and gone on with, over processes, on the command line, and refused."""

from __future__ import annotations

import io
import json
import multiprocessing
import threading
from contextlib import redirect_stdout
from itertools import count, pairwise
from pathlib import Path

import pytest

from jettison.cli.main import run as cli
from jettison.cli.search import search as search_report
from jettison.core.errors import UsageError
from jettison.core.progress import silent
from jettison.core.units import GIB
from jettison.predict.forecast import forecast
from jettison.report.search import SearchReport
from jettison.request.resolve import model_spec
from jettison.search import evaluate
from jettison.search.evaluate import Journal
from jettison.search.search import SearchRequest
from jettison.search.space import setup_run
from jettison.spec.hardware import hardware

# state ----------------------------------------------------------------------------------------------------------------


def report(path=None, jobs: int = 1, progress=silent) -> SearchReport:
    request = SearchRequest(seq=512, cp="1")
    return search_report(
        "gpt2",
        request,
        gpus=4,
        gpu="a100-80gb",
        global_batch=16,
        budget="3GiB",
        state=path,
        jobs=jobs,
        progress=progress,
    )


def answer_of(found: SearchReport) -> dict[str, object]:
    document = found.document()
    return {name: value for name, value in document.items() if name not in ("seconds", "evaluated")}


def keys_of(path) -> list[str]:
    return [json.loads(line)["key"] for line in path.read_text().splitlines()[1:]]


def test_a_search_goes_on_where_it_was_cut_off(tmp_path) -> None:
    path = tmp_path / "state.jsonl"
    whole = report(path)
    written = path.read_bytes()
    assert whole.answer.evaluated >= len(keys_of(path)) > 50
    again = report(path)
    assert again.answer.evaluated == 0
    assert answer_of(again) == answer_of(whole)
    assert path.read_bytes() == written
    for share in (0.1, 0.5, 0.99):
        path.write_bytes(written[: int(share * len(written))])  # the last line is cut off
        kept = len(keys_of_whole_lines(path))
        more = report(path)
        assert 0 < more.answer.evaluated < whole.answer.evaluated
        assert kept + more.answer.evaluated <= whole.answer.evaluated + 1
        assert answer_of(more) == answer_of(whole)


def keys_of_whole_lines(path) -> list[bytes]:
    return path.read_bytes().split(b"\n")[1:-1]


def test_an_interrupted_search_leaves_what_it_has(tmp_path) -> None:
    path = tmp_path / "state.jsonl"
    rounds = iter(range(3))

    def interrupt(_text: str) -> None:
        if next(rounds, None) is None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        report(path, progress=interrupt)
    kept = len(keys_of(path))
    assert kept > 0
    more = report(path)
    assert more.answer.evaluated > 0
    assert answer_of(more) == answer_of(report())
    assert kept + more.answer.evaluated == report().answer.evaluated


def test_what_was_worked_out_within_a_round_is_there_too(tmp_path, monkeypatch) -> None:
    path = tmp_path / "state.jsonl"
    work, calls = evaluate._work, count()

    def interrupted(question, task):
        if next(calls) == 3 * evaluate.NOTED + 5:
            raise KeyboardInterrupt
        return work(question, task)

    monkeypatch.setattr(evaluate, "_work", interrupted)
    with pytest.raises(KeyboardInterrupt):
        report(path)
    monkeypatch.undo()
    assert 2 * evaluate.NOTED < len(keys_of(path)) <= 3 * evaluate.NOTED + 5
    assert answer_of(report(path)) == answer_of(report())


def test_the_state_of_another_question_is_of_no_use_and_does_no_harm(tmp_path) -> None:
    path = tmp_path / "state.jsonl"
    report(path)
    other = search_report(
        "gpt2", SearchRequest(seq=256, cp="1"), gpus=4, gpu="a100-80gb", global_batch=16, budget="3GiB", state=path
    )
    assert other.answer.evaluated > 50
    assert report(path).answer.evaluated == 0


def test_processes_change_nothing() -> None:
    assert answer_of(report(jobs=2)) == answer_of(report(jobs=1))


def test_a_search_that_fails_leaves_neither_processes_nor_threads() -> None:
    device = hardware("a100-80gb")
    space = SearchRequest(seq=512).space(model_spec("gpt2"), device, gpus=8, global_batch=16)
    setups = list(space.setups)[: 2 * evaluate.WORTH_STARTING]
    threads = set(threading.enumerate())
    with (
        pytest.raises(RuntimeError, match="nothing fits"),
        evaluate.Evaluator(evaluate.SearchQuestion(template=space.template, hardware=device), jobs=2) as evaluator,
    ):
        evaluator.planner_bounds(setups, [GIB] * len(setups))
        assert multiprocessing.active_children()
        raise RuntimeError("nothing fits")
    assert not multiprocessing.active_children()
    assert set(threading.enumerate()) == threads


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"hello\n", "is not the state of a search"),
        (b"hel", "is not the state of a search"),
        (b'{"schema": "jettison.search-state/1"}\n{"key": 1}\n', "line 2 is not what a search writes"),
    ],
)
def test_other_files_are_left_alone(tmp_path, content: bytes, words: str) -> None:
    path = tmp_path / "state.jsonl"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=words):
        Journal(path)
    assert path.read_bytes() == content


def test_a_header_that_was_cut_off_is_none(tmp_path) -> None:
    path = tmp_path / "state.jsonl"
    path.write_bytes(b'{"schema": "jett')
    with Journal(path) as journal:
        assert journal.known == {}
    assert path.read_text() == '{"schema": "jettison.search-state/1"}\n'


# the command line -----------------------------------------------------------------------------------------------------

FLAGS = ("--gpus", "4", "--gpu", "a100-80gb", "--seq", "512", "--global-batch", "16", "--cp", "1", "--jobs", "1")


def call(capsys, *arguments: str) -> tuple[int, str, str]:
    code = cli(["search", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_document_with_the_keys_of_the_contract(capsys) -> None:
    price = ("--tokens", "8192e3", "--price-per-gpu-hour", "2")
    code, out, err = call(capsys, "gpt2", *FLAGS, "--budget", "3GiB", "--top", "4", *price, "--format", "json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    sure = found["sureness"]
    assert (sure["kind"], sure["own_class"]) == ("torch, dense, a100-80gb", True)
    assert found["schema"] == "jettison.search/1"
    assert len(found["candidates"]) == 4
    for candidate in found["candidates"]:
        assert candidate["layout"]["world"] == 4
        assert candidate["peak_bytes"] <= candidate["available_bytes"] == 3 * GIB
        assert sum(candidate["breakdown"].values()) == pytest.approx(candidate["step_seconds"])
        assert 0 < candidate["mfu"] < 1
        assert candidate["step_range_seconds"] == [candidate["step_seconds"] * sure[end] for end in ("low", "high")]
        assert candidate["plan"]["recompute"] in candidate["flags"]
    lost = found["runner_up"][0]
    best, second = found["candidates"][:2]
    assert lost["lost_seconds"] == pytest.approx(second["step_seconds"] - best["step_seconds"])
    assert sum(lost["more"].values()) == pytest.approx(lost["lost_seconds"])
    assert lost["more_allocated_bytes"] == second["peak_bytes"] - best["peak_bytes"]
    device = [one["figures"]["device_bytes"]["expected"] for one in (best, second)]
    assert lost["more_device_bytes"] == pytest.approx(device[1] - device[0], abs=1)
    assert any(lost["words"] in line for line in found["explanation"])
    assert any(lost["memory_words"] in line for line in found["explanation"])
    assert found["more_gpus"]["gpus"] == 8
    trainings = {one["gpus"]: one for one in found["trainings"]}  # 16 x 512 tokens a step, so that there are a thousand
    assert trainings.keys() == {4, 8} and {one["steps"] for one in trainings.values()} == {1000}
    assert trainings[4]["price"] == pytest.approx(2 * 4 * 1000 * best["figures"]["step_seconds"]["expected"] / 3600)
    seconds = found["more_gpus"]["candidate"]["figures"]["step_seconds"]["expected"]
    assert trainings[8]["days"] == pytest.approx(1000 * seconds / 86400)
    assert found["more_memory"]["saved_seconds"] >= 0


def test_what_is_printed_can_be_given_to_estimate(capsys) -> None:
    *_, out, _ = call(capsys, "gpt2", *FLAGS, "--budget", "3GiB", "--recompute", "full,none", "--format", "json")
    for candidate in json.loads(out)["candidates"][:3]:
        flags = candidate["flags"].split()
        with redirect_stdout(io.StringIO()) as said:
            assert cli(["estimate", "gpt2", "--gpu", "a100-80gb", "--seq", "512", *flags, "--format", "json"]) == 0
        stated = json.loads(said.getvalue())
        assert stated["step_seconds"] == candidate["step_seconds"]
        assert stated["peak_bytes"] == candidate["peak_bytes"]


def test_compiled_layers_are_priced_as_estimate_prices_them(capsys) -> None:
    space = ("--recompute", "none,full", "--kernels", "pytorch", "--compile")
    *_, out, _ = call(capsys, "gpt2", *FLAGS, *space, "--format", "json")
    found = json.loads(out)
    assert found["request"]["compile"] is True
    best = found["candidates"][0]
    words = ["estimate", "gpt2", "--gpu", "a100-80gb", "--seq", "512", "--kernels", "pytorch", *best["flags"].split()]
    assert cli([*words, "--compile", "--format", "json"]) == 0
    stated = json.loads(capsys.readouterr().out)
    assert (stated["step_seconds"], stated["peak_bytes"]) == (best["step_seconds"], best["peak_bytes"])
    code, _, err = call(capsys, "gpt2", *FLAGS, "--recompute", "none,selective", "--compile")
    assert code == 2 and "got --compile with --recompute selective; expected some of none, full" in err


def test_for_people(capsys) -> None:
    code, out, _ = call(capsys, "gpt2", *FLAGS, "--budget", "3GiB")
    assert code == 0
    rows = [line for line in out.splitlines() if line.startswith(" 1 ")]
    (expected,) = (line.removeprefix("expected ").strip() for line in out.splitlines() if line.startswith("expected"))
    assert f" {expected.partition(' (')[0]} " in rows[0], "one number for a step, in a row and in words"
    words = (
        "The fastest 10",
        "Plan 2, ",
        "Memory of plan 2 against plan 1",
        "10.0 % more memory",
        "8 devices would take",
        "Pareto front: memory against step time",
    )
    for text in words:
        assert text in out


def test_nothing_fits(capsys) -> None:
    """The closest one is the smallest of all, and what it lacks is to the byte."""
    whole = SearchRequest(seq=512, cp="1", recompute="none,full").space(
        model_spec("gpt2"), hardware("a100-80gb"), gpus=4, global_batch=16
    )
    peaks = [
        forecast(setup_run(setup, whole.template, plan)).peak_bytes
        for setup in whole.setups
        for plan in whole.plans(setup)
    ]
    flags = (*FLAGS, "--recompute", "none,full", "--budget", "100MiB", "--format", "json")
    code, out, err = call(capsys, "gpt2", *flags)
    assert code == 3
    found = json.loads(out)
    assert found["feasible"] is False
    assert found["candidates"] == []
    assert found["closest"]["peak_bytes"] == min(peaks)
    assert found["lacks_bytes"] == min(peaks) - 100 * 2**20
    assert f"({found['lacks_bytes']}B)" in err
    assert len(err.splitlines()) == 1


def test_what_may_fit_is_listed_where_nothing_surely_does(capsys) -> None:
    """A budget within the range of what the smallest needs: exit code 0, and every row says so."""
    flags = (*FLAGS, "--recompute", "none,full", "--format", "json")
    _, out, _ = call(capsys, "gpt2", *flags, "--budget", "100MiB")
    least = json.loads(out)["closest"]["peak_bytes"]
    code, out, err = call(capsys, "gpt2", *flags, "--budget", f"{least - 1}B")
    found = json.loads(out)
    assert (code, found["feasible"], found["lacks_bytes"]) == (0, True, 1)
    assert {row["verdict"] for row in (*found["candidates"], found["closest"])} == {"too close to call"}
    assert found["closest"]["peak_bytes"] == least
    assert not any(row["fits"] for row in found["candidates"])
    assert f"{found['candidates'][0]['available_bytes']}" == f"{least - 1}"
    assert "lacks 1 B): those listed are too close to call" in err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--tp", "3"), "--tp 3 does not divide 4"),
        (("--tp", "x"), "expected whole numbers of 1 or more, such as 1,2,4"),
        (("--zero", "4"), "expected some of 0, 1, 2 and 3"),
        (("--schedule", "dualpipe"), "expected some of gpipe, 1f1b"),
        (("--recompute", "some"), "got --recompute 'some'"),
        (("--ep", "2"), "gpt2 has no experts"),
        (("--micro-batch", "3"), "--micro-batch 3 does not divide"),
        (("--budget", "3"), "without a unit"),
        (("--top", "0"), "got --top 0"),
    ],
)
def test_nonsense_is_refused_in_one_line(capsys, flags, words: str) -> None:
    code, out, err = call(capsys, "gpt2", *FLAGS, *flags)
    assert (code, out) == (2, "")
    assert words in err
    assert len(err.splitlines()) == 1


def test_a_live_model_is_refused(capsys) -> None:
    code, _, err = call(capsys, "module:factory", *FLAGS)
    assert code == 2
    assert "a search is for a preset" in err


def test_the_front_is_a_front() -> None:
    front = report().answer.front
    assert len(front) > 2
    for faster, smaller in pairwise(front):
        assert faster.seconds.step < smaller.seconds.step
        assert faster.needed_bytes > smaller.needed_bytes


def test_what_a_configuration_has_beside_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights that lie in fewer bits are counted in sixteen: `plan` and `search` say so, as `ledger` does."""
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    packed = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    config = {"model_type": "llama", "vocab_size": 128, "max_position_embeddings": 64, **shape, **packed}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    path = str(tmp_path / "config.json")
    for words in (
        ["plan", path, "--tp", "1", "--budget", "1GiB"],
        ["search", path, *["--gpus", "1", "--gpu", "a100-80gb", "--global-batch", "1"]],
    ):
        assert cli(words) == 0
        assert "note: " in capsys.readouterr().err
        assert cli([*words, "--format", "json"]) == 0
        said = capsys.readouterr()
        (warning,) = json.loads(said.out)["warnings"]
        assert "quantization_config" in warning
        assert warning in " ".join(said.err.split())


def test_a_trainers_file_is_searched_for_what_its_trainer_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    lines = ["[model]", 'name = "llama3"', 'flavor = "8B"', "[training]", "seq_len = 2048", "local_batch_size = 1"]
    file.write_text("\n".join([*lines, "[compile]", "enable = true"]), encoding="utf-8")
    space = ["search", "--from", str(file), "--gpus", "8", "--global-batch", "8", "--gpu", "h100-80gb", "--jobs", "1"]
    fixed = ["--pp", "1", "--cp", "1", "--recompute", "full"]
    assert cli([*space, *fixed, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["request"]["runs_on"], found["from"]["framework"]) == ("torchtitan", "torchtitan")
    assert found["request"]["compile"] is True
    assert cli([*space, "--recompute", "every:2"]) == 2
    assert "torchtitan cannot run" in capsys.readouterr().err
