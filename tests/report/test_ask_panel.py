"""The page that asks: in a real browser, of a real server."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from jettison.core.units import format_bytes, format_seconds
from jettison.report.page import page
from jettison.report.server import Limits
from support.browser import (
    Open,
    OpenedPage,
    avoided_words,
    axe_violations,
    no_sideways_scroll,
    set_dark,
    settle,
    too_wide,
    walk_by_keyboard,
)
from support.serving import LLAMA, PLAN, Served, served

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "from"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(Limits(workers=1)) as found:
        yield found


def fill(opened: OpenedPage, **values: object) -> None:
    for key, value in values.items():
        field = opened.page.locator(f"#ask-{key}")
        if field.evaluate("e => e.tagName") == "SELECT":
            field.select_option(str(value))
        else:
            field.fill(str(value))


def ask(opened: OpenedPage) -> str:
    """Press the button; what came out, in words."""
    opened.page.get_by_role("button", name="Ask").click()
    done = "() => !document.querySelector('#ask button[type=submit]').disabled"
    opened.page.wait_for_function(done)
    return opened.page.inner_text("#ask .trouble") or opened.page.inner_text("#ask [role=status]")


def test_a_plan_is_asked_for_and_shown(open_page: Open, server: Served) -> None:
    document = server.post("plan", PLAN).json()
    opened = open_page(f"{server.url}/")
    fill(opened, model="gpt-22b", gpu="", tp=8, budget="60GiB")
    assert opened.page.inner_text("#ask .command code") == "jettison plan gpt-22b --budget 60GiB --tp 8"
    assert ask(opened) == "answered"
    shown = opened.page.inner_text("#ask .answer")
    for number in (document["predicted"]["peak_bytes"], document["minimum_budget_bytes"]):
        assert f"{format_bytes(number)} ({number}B)" in shown
    rows = opened.page.locator("#ask .answer tbody tr").all_inner_texts()
    assert rows[0].split("\t")[:4] == ["layers.0 to 47", "48", "0", "none"]
    with opened.page.expect_download() as download:
        opened.page.get_by_role("button", name="Save JSON").click()
    saved = json.loads(Path(download.value.path()).read_text(encoding="utf-8"))
    assert (download.value.suggested_filename, saved["hash"]) == ("plan.json", document["hash"])

    full = server.post("estimate", {"model": "gpt-22b", "tp": 8, "recompute": "full", "gpu": "a100-80gb"}).json()
    fill(opened, compare="full", gpu="a100-80gb")
    command = opened.page.inner_text("#ask .command code")
    assert command == "jettison plan gpt-22b --budget 60GiB --gpu a100-80gb --tp 8"
    assert ask(opened) == "answered"
    rows = opened.page.locator("#ask table:has-text('The plan and one recompute setting') tbody tr").all_inner_texts()
    planned, other = (row.split("\t") for row in rows)
    assert planned[0] == "as planned"
    step = format_seconds(full["figures"]["step_seconds"]["expected"])
    assert other == ["full, for all layers", format_bytes(full["peak_bytes"]), step, "yes"]
    fill(opened, gpu="")
    assert ask(opened) == "answered"
    rows = opened.page.locator("#ask table:has-text('The plan and one recompute setting') tbody tr").all_inner_texts()
    assert rows[0].split("\t")[:2] == ["as planned", format_bytes(document["predicted"]["peak_bytes"])]
    assert rows[1].split("\t")[2] == "n/a"
    fill(opened, compare="")

    fill(opened, budget="20GiB")
    assert ask(opened) == "answered"
    assert "no plan fits 20.00 GiB" in opened.page.inner_text("#ask .answer")
    fill(opened, budget="20")
    opened.expect_error("422")  # the browser's console counts answers like this one
    assert ask(opened) == """got '20' without a unit; write "20GiB" or "20GB" or "20B" to say which"""


@pytest.mark.parametrize(
    ("verb", "values", "words"),
    [
        (
            "estimate",
            {"gpu": "a100-80gb", "tp": 8, "sp": "off"},
            ["range", "MFU, HFU", "Where the time goes", "communication"],
        ),
        (
            "ledger",
            {"pp": 2, "zero": 0},
            ["verdict", "reserved", "peak of a step", "micro-batches in flight", "layers.0 to 23"],
        ),
        (
            "ledger",
            {"tp": 8, "micro_batch": 8, "gpu": "a100-80gb", "fit": "on"},
            ["largest micro-batch", "surely fits", "Settings with which it fits, the fastest first", "--recompute"],
        ),
        (
            "search",
            {"model": "gpt2", "gpu": "a100-80gb", "gpus": 1, "global_batch": 1},
            ["The fastest", "Pareto front: memory against step time", "--tp 1"],
        ),
    ],
)
def test_the_other_questions(
    open_page: Open, server: Served, verb: str, values: dict[str, object], words: list[str]
) -> None:
    opened = open_page(f"{server.url}/#ask-model=gpt-22b")  # a view is a link
    fill(opened, verb=verb, **values)
    assert ask(opened) == "answered"
    shown = opened.page.inner_text("#ask .answer")
    assert [word for word in words if word not in shown] == []
    assert "undefined" not in shown
    assert "NaN" not in shown
    assert no_sideways_scroll(opened, 390), too_wide(opened)
    assert axe_violations(opened) == avoided_words(opened) == []
    if verb == "estimate":
        line = "jettison estimate gpt-22b --gpu a100-80gb --tp 8 --no-sp"
        assert opened.page.inner_text("#ask .command code") == line


def test_a_file_is_uploaded(open_page: Open, server: Served, tmp_path: Path) -> None:
    opened = open_page(f"{server.url}/")
    fill(opened, model="(a config.json)", gpu="", budget="1GiB")
    assert ask(opened) == "Choose the config.json to ask about."
    config = tmp_path / "small.json"
    config.write_text(json.dumps({**LLAMA, "quantization_config": {"quant_method": "awq"}}), encoding="utf-8")
    opened.page.set_input_files("#ask-file", config)
    assert opened.page.inner_text("#ask .command code") == "jettison plan small.json --budget 1GiB --tp 1"
    assert ask(opened) == "answered"
    answer = opened.page.inner_text("#ask .answer")
    assert "layers.0 to 3" in answer and "Note: quantization_config (awq) is left out" in answer
    config.write_text("{", encoding="utf-8")
    opened.page.set_input_files("#ask-file", config)
    assert ask(opened) == "small.json is not JSON."
    config.write_text(json.dumps({"x": "x" * 300_000}), encoding="utf-8")
    opened.page.set_input_files("#ask-file", config)
    assert ask(opened) == "small.json has 292.98 KiB; at most 256.00 KiB can be sent."


def test_the_first_question_has_an_answer(open_page: Open, server: Served) -> None:
    opened = open_page(f"{server.url}/")
    assert ask(opened) == "answered"
    assert "verdict\nfits" in opened.page.inner_text("#ask .answer")
    bar = opened.page.locator("#ask figure svg[role=img]")
    assert "the budget is" in str(bar.get_attribute("aria-label"))


@pytest.mark.parametrize("pasted", [True, False])
def test_a_trainers_file_is_planned_and_comes_back(
    open_page: Open, server: Served, tmp_path: Path, pasted: bool
) -> None:
    """Paste torchtitan's TOML, or choose it; see the bar, get the plan, download the file."""
    text = (EXAMPLES / "pretrain.toml").read_text(encoding="utf-8")
    opened = open_page(f"{server.url}/")
    fill(opened, model="(a trainer's own files)", gpus=64)
    assert ask(opened) == "Choose a trainer's file, or paste one."
    fill(opened, pasted="import torch\n")
    assert "command line alone" in ask(opened)
    fill(opened, pasted="")
    if pasted:
        fill(opened, pasted=text)
    else:
        two = [EXAMPLES / "pretrain.toml", EXAMPLES / "sft.yaml"]
        opened.page.set_input_files("#ask-files", two)
        assert "plan --from pretrain.toml --from sft.yaml --gpu" in opened.page.inner_text("#ask .command code")
        opened.page.set_input_files("#ask-files", two[0])
    name = "pasted" if pasted else "pretrain"
    line = f"jettison plan --from {name}.toml --gpu h100-80gb --gpus 64"
    assert opened.page.inner_text("#ask .command code") == line
    assert ask(opened) == "answered"
    assert "saved for backward" in str(opened.page.locator("#ask figure svg[role=img]").get_attribute("aria-label"))
    assert "layers.31" in opened.page.inner_text("#ask .answer")
    assert axe_violations(opened) == avoided_words(opened) == []
    assert no_sideways_scroll(opened, 390), too_wide(opened)
    with opened.page.expect_download() as download:
        opened.page.get_by_role("button", name="Download the file").click()
    written = Path(download.value.path()).read_text(encoding="utf-8")
    assert download.value.suggested_filename == f"{name}.planned.toml"
    assert [one for one in written.splitlines() if one not in text.splitlines()] == [
        'mode = "selective"                      # none, selective, full',
        'selective_ac_option = "32"',
    ]


@pytest.mark.parametrize(
    ("files", "asked", "line", "became"),
    [
        (("qlora.yaml",), {"gpu": "rtx4090-24gb"}, "--from qlora.yaml --gpu rtx4090-24gb", "--base nf4-double"),
        (
            ("sft.yaml", "zero3.json"),
            {"gpus": 8},
            "--from sft.yaml --from zero3.json --gpu h100-80gb --gpus 8",
            "--zero 3",
        ),
    ],
)
def test_other_trainers_files(
    open_page: Open, server: Served, files: tuple[str, ...], asked: dict[str, object], line: str, became: str
) -> None:
    """axolotl's QLoRA on a 24 GB card, and a TRL script's arguments with DeepSpeed's JSON."""
    opened = open_page(f"{server.url}/")
    fill(opened, model="(a trainer's own files)", **asked)
    opened.page.set_input_files("#ask-files", [EXAMPLES / name for name in files])
    assert opened.page.inner_text("#ask .command code") == f"jettison plan {line}"
    assert ask(opened) == "answered"
    opened.page.click("#ask summary")
    assert became in opened.page.inner_text("#ask details")
    assert axe_violations(opened) == avoided_words(opened) == []
    with opened.page.expect_download() as download:
        opened.page.get_by_role("button", name="Download the file").click()
    assert download.value.suggested_filename == files[0].replace(".yaml", ".planned.yaml")
    assert "gradient_checkpointing: " in Path(download.value.path()).read_text(encoding="utf-8")


def test_hostile_names_are_shown_as_text(open_page: Open, server: Served, tmp_path: Path) -> None:
    markup = "<img src=x onerror=alert(1)>"
    opened = open_page(f"{server.url}/")
    opened.expect_error("422")
    fill(opened, model="(a config.json)", gpu="", budget="1GiB")
    config = tmp_path / f"{markup}.json"
    config.write_text(json.dumps({**LLAMA, "model_type": markup}), encoding="utf-8")
    opened.page.set_input_files("#ask-file", config)
    assert opened.page.inner_text("#ask .command code") == f"jettison plan '{markup}.json' --budget 1GiB --tp 1"
    assert markup in ask(opened)
    assert opened.page.locator("#ask img").count() == 0


def test_a_search_is_watched_and_cancelled(open_page: Open, server: Served) -> None:
    opened = open_page(f"{server.url}/")
    fill(opened, verb="search", model="gpt-175b", gpu="a100-80gb", gpus=512, global_batch=1024)
    opened.page.get_by_role("button", name="Ask").click()
    opened.page.wait_for_function(
        "() => document.querySelector('#ask [role=status]').textContent.startsWith('searching')"
    )
    opened.page.get_by_role("button", name="Cancel").click()
    opened.page.wait_for_function("() => document.querySelector('#ask .trouble').textContent === 'Cancelled.'")
    assert server.post("plan", PLAN).status_code == 200  # the one worker is free
    fill(opened, verb="plan", model="gpt2", budget="10GiB")
    assert ask(opened) == "answered"


def test_a_server_that_has_gone_is_said(open_page: Open) -> None:
    with served(Limits(workers=1)) as server:
        opened = open_page(f"{server.url}/")
    fill(opened, budget="10GiB")
    assert ask(opened) == "The server does not answer; is it still running?"
    opened.expect_error("ERR_CONNECTION_REFUSED")


def test_it_is_used_by_keyboard_light_and_dark(open_page: Open, server: Served) -> None:
    opened = open_page(f"{server.url}/")
    assert axe_violations(opened) == []
    set_dark(opened, True)
    assert axe_violations(opened) == []
    for width in (390, 1440):
        assert no_sideways_scroll(opened, width), too_wide(opened)
    stops = walk_by_keyboard(opened)
    assert all(stop.ring and stop.visible and stop.name for stop in stops), stops
    assert [stop.id for stop in stops[:3]] == ["ask-verb", "ask-model", "ask-budget"]
    opened.page.locator("#ask-budget").press_sequentially("20GiB")
    opened.page.keyboard.press("Enter")
    opened.page.wait_for_function("() => document.querySelector('#ask [role=status]').textContent === 'answered'")


def test_without_a_server_there_is_no_such_panel(open_page: Open, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(page("Alone", intro="", scripts=["panels/ask.js"], data={}), encoding="utf-8")
    opened = open_page(tmp_path / "page.html")
    settle(opened)
    assert opened.page.locator("#ask").count() == 0
