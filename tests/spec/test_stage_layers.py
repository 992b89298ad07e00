"""Uneven pipelines: how they are typed, which ones a search tries, and that every stage has what it was given."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jettison.cli.main import run as command
from jettison.core.errors import UsageError
from jettison.families.presets import preset
from jettison.predict.forecast import forecast
from jettison.predict.time import estimate
from jettison.request.options import RunRequest
from jettison.request.resolve import resolve
from jettison.spec.hardware import hardware
from jettison.spec.layout import Layout, cut_of, stage_layers, uneven_cuts


@pytest.mark.parametrize(
    ("text", "layers", "chunks", "expected"),
    [
        ("5,4,4,3", 16, 4, (5, 4, 4, 3)),
        ("0,8,8", 16, 3, (0, 8, 8)),
        ("first:3,last:5", 16, 4, (3, 4, 4, 5)),
        ("first:4", 16, 5, (4, 3, 3, 3, 3)),
        ("last:1", 16, 4, (5, 5, 5, 1)),
        ("Et*5|t*4|t*4|t*3L", 16, 4, (5, 4, 4, 3)),
        ("Et|(tt|)*3t,L", 8, 5, (1, 2, 2, 2, 1)),
        ("E|(t|)*3|L", 3, 6, (0, 1, 1, 1, 0, 0)),
        ("E|((t|)*2tt|)*2L", 8, 8, (0, 1, 1, 2, 1, 1, 2, 0)),
    ],
)
def test_what_is_typed(text: str, layers: int, chunks: int, expected: tuple[int, ...]) -> None:
    assert stage_layers(text, layers=layers, chunks=chunks) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("5,4,4", "has 3 stages; expected pp x virtual stages, 4"),
        ("5,4,4,4", "makes 17 layers; the model has 16"),
        ("first:3", "leaves 13 layers for 3 other stages"),
        ("first:9,last:9", "leaves -2 layers"),
        ("even", "expected layers of each stage"),
        ("", "expected layers of each stage"),
        ("5,-1", "expected layers of each stage"),
        ("tE|t|t|t", "expected the embedding E first"),
        ("Et|tm|t|tL", "then MTP layers m"),
        ("E(t|t", "expected the embedding E first"),
        ("Et*5|t*4|t*4|t*3mL", "1 x m, MTP layers, and --mtp-num-layers is 0"),
        ("t*99999999999", "expected at most 65536 items"),
        ("((t*999)*999)*999", "expected at most 65536 items"),
    ],
)
def test_what_does_not_add_up_is_said(text: str, said: str) -> None:
    with pytest.raises(UsageError) as error:
        stage_layers(text, layers=16, chunks=4)
    assert said in str(error.value)


def test_layers_for_further_tokens_are_told_as_often_as_they_are() -> None:
    assert stage_layers("Et*5|t*4|t*4|t*3mmL", layers=16, chunks=4, mtp=2) == (5, 4, 4, 3)
    with pytest.raises(UsageError, match="2 x m, MTP layers, and --mtp-num-layers is 1"):
        stage_layers("Et*5|t*4|t*4|t*3mmL", layers=16, chunks=4, mtp=1)


@pytest.mark.parametrize(
    ("name", "pp", "expected"),
    [
        ("llama-8b-mha", 8, (5, 4, 4, 5, 4, 4, 4, 2)),  # the head is 2.2 layers: 4.28 a stage
        ("llama3-8b", 4, (9, 9, 8, 6)),
        ("llama3-8b", 2, (18, 14)),
        ("llama3-8b", 1, (32,)),
    ],
)
def test_nanotrons_rule(name: str, pp: int, expected: tuple[int, ...]) -> None:
    assert cut_of("nanotron", preset(name), pp=pp, virtual=1) == expected


@pytest.mark.parametrize(
    ("name", "pp", "virtual", "said"),
    [
        ("llama3-8b", 16, 1, "puts the head on stage 14 of 0 to 15"),
        ("llama3-8b", 4, 2, "--virtual-stages 2"),
        ("mixtral-8x7b", 4, 1, "its rule is for dense Llamas"),
    ],
)
def test_what_nanotrons_rule_is_not_for(name: str, pp: int, virtual: int, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        cut_of("nanotron", preset(name), pp=pp, virtual=virtual)


@given(layers=st.integers(2, 130), stages=st.integers(2, 20))
def test_cuts_add_up_and_are_nearly_even(layers: int, stages: int) -> None:
    cuts = uneven_cuts(layers, stages)
    assert len(set(cuts)) == len(cuts) <= 16
    for cut in cuts:
        assert len(cut) == stages and sum(cut) == layers and min(cut) >= 0
        assert 0 < max(cut) - min(cut) <= 2
    assert (layers % stages != 0) <= bool(cuts), "where no even cut is possible there is another"


def described(*, pp: int = 4, stage: str | None = None, micro_batches: int = 8):
    return resolve(preset("llama3-8b"), RunRequest(pp=pp, stage_layers=stage, micro_batches=micro_batches)).run


def test_every_stage_has_its_layers_and_their_bytes() -> None:
    even, uneven = forecast(described()), forecast(described(stage="7,9,9,7"))
    names = [[p.name for chunk in s.parts for p in chunk if p.is_layer] for s in uneven.stages]
    assert [len(n) for n in names] == [7, 9, 9, 7]
    assert [n for stage in names for n in stage] == list(preset("llama3-8b").layer_names)
    (layer,) = {s.load.state // 8 for s in even.stages[1:3]}
    assert uneven.stages[1].load.state // 9 == layer
    assert forecast(described(stage="8,8,8,8")).peak_bytes == even.peak_bytes
    less = even.stages[0].peak.nbytes - uneven.stages[0].peak.nbytes
    more = uneven.stages[1].peak.nbytes - even.stages[1].peak.nbytes
    held = even.stages[0].parts[0][1].region.program.kept_bytes(even.stages[0].parts[0][1].kept)
    assert less - more == held, "four micro-batches of a layer are held by the first stage, three by the second"


def test_a_shorter_last_stage_is_faster_where_the_head_is_large() -> None:
    device = hardware("a100-80gb")
    even, uneven = (estimate(described(stage=s), device).step_seconds for s in (None, "8,9,8,7"))
    assert uneven < even


def test_a_stage_may_be_empty() -> None:
    found = forecast(described(stage="0,16,0,16"))
    assert found.stages[2].peak.nbytes < found.stages[0].peak.nbytes < found.peak_bytes
    assert estimate(described(stage="0,16,0,16"), hardware("a100-80gb")).step_seconds > 0


def test_it_needs_a_pipeline() -> None:
    with pytest.raises(UsageError, match="without a pipeline"):
        Layout(stage_layers=(32,))


def test_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["ledger", "llama3-8b", "--pp", "4", "--stage-layers", "7,9,9,7", "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["request"]["layout"]["stage_layers"] == [7, 9, 9, 7]
    asked = ["plan", "llama3-8b", "--pp", "4", "--stage-layers", "first:6,last:6", "--gpu", "h100-80gb"]
    assert command([*asked, "--format", "json"]) == 0
    layers = json.loads(capsys.readouterr().out)["layers"]
    assert Counter(layer["stage"] for layer in layers) == {0: 6, 1: 10, 2: 10, 3: 6}
    assert command(["ledger", "llama3-8b", "--pp", "4", "--stage-layers", "7,9"]) == 2
    assert "--stage-layers 7,9 has 2 stages" in capsys.readouterr().err
    assert command(["ledger", "llama3-8b", "--stage-layers", "last:2"]) == 2
    assert "without a pipeline; give --pp 2 or more" in capsys.readouterr().err
    asked = [
        "search",
        "llama3-8b",
        "--gpus",
        "4",
        "--global-batch",
        "32",
        "--gpu",
        "a100-80gb",
        "--tp",
        "1",
        "--cp",
        "1",
    ]
    asked += ["--pp", "4", "--virtual-stages", "1", "--recompute", "none,selective-op", "--format", "json"]
    assert command(asked) == 0
    even = json.loads(capsys.readouterr().out)["candidates"][0]
    assert command([*asked, "--uneven"]) == 0
    best = json.loads(capsys.readouterr().out)["candidates"][0]
    assert best["step_seconds"] < even["step_seconds"] and not even["layout"].get("stage_layers")
    assert f"--stage-layers {','.join(map(str, best['layout']['stage_layers']))}" in best["flags"]
