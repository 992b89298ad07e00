"""What is served is what the command line prints, and what cannot be asked is refused in words."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from jettison.cli.main import run
from jettison.report.server import Limits
from support.patience import PATIENCE
from support.serving import JSON, LLAMA, PLAN, Served, served


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(Limits(workers=1)) as found:
        yield found


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, int]:
    code = run([*arguments, "--format", "json"])
    return capsys.readouterr().out, code


def timeless(text: str) -> dict[str, Any]:
    """A document without how long it took."""
    document = json.loads(text)
    document.pop("seconds", None)
    (document.get("solver") or {}).pop("seconds", None)
    return document


@pytest.mark.parametrize(
    ("verb", "body", "line", "code"),
    [
        ("plan", PLAN, "plan gpt-22b --tp 8 --budget 60GiB", 0),
        ("plan", {"model": "gpt-22b", "tp": 8, "budget": "20GiB"}, "plan gpt-22b --tp 8 --budget 20GiB", 3),
        (
            "plan",
            {"model": "llama3-8b", "gpu": "h100-80gb", "dp": 8, "zero": 3, "micro_batch": 4, "what_if": True},
            "plan llama3-8b --gpu h100-80gb --dp 8 --zero 3 --micro-batch 4 --what-if",
            0,
        ),
        (
            "estimate",
            {"model": "gpt-22b", "gpu": "a100-80gb", "tp": 8, "sp": False, "recompute": "full", "compile": True},
            "estimate gpt-22b --gpu a100-80gb --tp 8 --no-sp --recompute full --compile",
            0,
        ),
        ("ledger", {"model": "gpt2", "seq": 128}, "ledger gpt2 --seq 128", 0),
        ("ledger", {"model": "gpt-22b", "gpu": "a100-80gb"}, "ledger gpt-22b --gpu a100-80gb", 3),
        (
            "ledger",
            {"model": "llama3-8b", "seq": 128, "gpu": "a100-80gb", "compile": True},
            "ledger llama3-8b --seq 128 --gpu a100-80gb --compile",
            3,
        ),
        (
            "search",
            {
                "model": "gpt2",
                "gpus": 2,
                "gpu": "a100-80gb",
                "global_batch": 2,
                "recompute": "none,full",
                "top": 2,
                "tokens": 1e9,
                "price_per_gpu_hour": 2,
                "margin": 0.5,
            },
            "search gpt2 --gpus 2 --gpu a100-80gb --global-batch 2 --recompute none,full --top 2 --tokens 1e9"
            " --price-per-gpu-hour 2 --margin 0.5",
            0,
        ),
        (
            "search",
            {"model": "gpt-1t", "gpus": 1, "gpu": "a100-80gb", "global_batch": 1, "recompute": "full"},
            "search gpt-1t --gpus 1 --gpu a100-80gb --global-batch 1 --recompute full",
            3,
        ),
    ],
)
def test_a_document_is_the_command_lines(
    server: Served, capsys: pytest.CaptureFixture[str], verb: str, body: dict[str, Any], line: str, code: int
) -> None:
    answer = server.post(verb, body)
    text, left = printed(capsys, *line.split())
    assert (answer.status_code, left) == (200, code)
    assert answer.headers["Jettison-Exit-Code"] == str(code)
    assert answer.headers["Content-Type"] == "application/json"
    assert timeless(answer.text) == timeless(text)
    if verb in ("ledger", "estimate"):
        assert answer.text == text


def test_an_upload_is_what_a_file_would_be(
    server: Served, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    text, _ = printed(capsys, "plan", "small.json", "--tp", "1", "--budget", "1GiB")
    answer = server.post("plan", {"config": LLAMA, "name": "small", "budget": "1GiB"})
    served_one, written = timeless(answer.text), timeless(text)
    for key in ("made_by", "request"):
        assert written[key].pop("model") == str(tmp_path / "small.json")
        assert served_one[key].pop("model") == "small.json"  # and not where this machine had it meanwhile
    assert served_one == written
    assert answer.json()["model"] == "small.json"
    assert "torch" not in loaded(server)
    unnamed = server.post("ledger", {"config": LLAMA}).json()
    named = server.post("ledger", {"config": LLAMA, "name": "config.json"}).json()
    assert unnamed["model"] == named["model"] == "uploaded.json"


def loaded(server: Served) -> str:
    """Libraries in the memory of the workers."""
    if sys.platform != "linux":
        return ""
    return "".join(Path(f"/proc/{pid}/maps").read_text() for pid in server.workers())


WRONG: list[tuple[str, object, str]] = [
    ("plan", {"budget": "60GiB"}, "expected one of model, a preset's name, config"),
    ("plan", {**PLAN, "config": LLAMA}, "expected one of model, a preset's name, config"),
    ("plan", {**PLAN, "model": "/etc/passwd"}, "model: expected one of gpt-22b, "),
    ("plan", {**PLAN, "model": "os:getcwd"}, "model: expected one of gpt-22b, "),
    ("plan", {**PLAN, "model": ["gpt-22b"]}, "model: expected one of gpt-22b, "),
    ("plan", {**PLAN, "gpu": "../../etc/passwd"}, "gpu: expected one of "),
    ("plan", {**PLAN, "name": "x"}, "name goes with config"),
    ("plan", {"config": LLAMA, "name": "../x"}, "name goes with config"),
    ("plan", {"config": [LLAMA]}, "config: expected the object"),
    ("plan", {"config": {"model_type": "rwkv"}}, "uploaded: got the model_type 'rwkv', which has no closed form"),
    ("plan", {"config": {**LLAMA, "hidden_size": -1}}, "uploaded: "),
    ("plan", {**PLAN, "budget": "60"}, "60"),
    ("plan", {"model": "gpt-22b"}, "plan needs to know what to fit into; give --budget or --gpu"),
    ("plan", {**PLAN, "tp": "8"}, "tp: "),
    ("plan", {**PLAN, "tp": True}, "tp: "),
    ("plan", {**PLAN, "tp": 2**41}, "tp: "),
    ("plan", {**PLAN, "tp": 7}, "7"),
    ("plan", {**PLAN, "state": "/tmp/x"}, "state: not known; expected some of accumulation, adapter_dtype, "),
    ("plan", {**PLAN, "stage_layers": "t" * 201}, "stage_layers: "),
    ("plan", {**PLAN, "id": "short"}, "id: expected 8 to 64 letters"),
    ("ledger", {"model": "gpt2", "compare": "/etc/passwd"}, "compare: not known"),
    ("estimate", {"model": "gpt2"}, "gpu: "),
    ("search", {"model": "gpt2", "gpu": "a100-80gb", "gpus": 2}, "search needs --global-batch"),
    ("search", {"model": "gpt2", "gpu": "a100-80gb", "gpus": 2, "global_batch": 2, "top": 101}, "top: "),
]


@pytest.mark.parametrize(("verb", "body", "sentence"), WRONG, ids=[str(number) for number in range(len(WRONG))])
def test_what_cannot_be_asked_is_refused_in_words(server: Served, verb: str, body: object, sentence: str) -> None:
    answer = server.post(verb, body)
    problem = answer.json()
    assert (answer.status_code, answer.headers["Content-Type"]) == (422, "application/problem+json")
    assert problem["status"] == 422
    assert sentence in problem["detail"]
    assert "/tmp" not in problem["detail"]


@pytest.mark.parametrize(
    ("content", "status", "sentence"),
    [
        (b"", 400, "not JSON"),
        (b"{", 400, "not JSON"),
        (b"\xff\xfe{}", 400, "not JSON"),
        (b'{"model": NaN}', 400, "NaN is not JSON"),
        (b'{"tp": ' + b"9" * 5000 + b"}", 400, "not JSON"),
        (b"[]", 400, "expected a JSON object"),
        (b"[" * 33 + b"]" * 33, 400, "at most 32 lists and objects"),
        (b"[" * 200_000, 400, "at most 32 lists and objects"),
        (b'{"model": "' + b"[{" * 50 + b'\\""}', 422, "model: expected one of"),  # brackets in a text are none
        (b'{"model": "gpt2", "model": "gpt-22b", "seq": 0}', 400, "the key 'model' stands twice in one object"),
        (b'{"config": {"model_type": "llama", "model_type": "gpt2"}}', 400, "the key 'model_type' stands twice"),
        (b'{"name": "' + b"x" * 300_000 + b'"}', 413, "at most 262144 bytes"),
    ],
    ids=range(12),
)
def test_bodies_that_are_none(server: Served, content: bytes, status: int, sentence: str) -> None:
    answer = httpx.post(f"{server.url}/api/ledger", content=content, headers=JSON, timeout=PATIENCE)
    assert answer.status_code == status
    assert sentence in answer.json()["detail"]


def test_the_offer_names_models_gpus_and_limits(server: Served) -> None:
    offer = server.get("/api").json()
    assert offer["schema"] == "jettison.serve/1"
    assert "llama3-8b" in offer["models"]
    assert "h100-80gb" in offer["gpus"]
    assert "adam8bit" in offer["choices"]["optimizer"]
    assert offer["limits"]["workers"] == 1
    assert offer["limits"]["body_bytes"] == 262144


@pytest.mark.parametrize(
    "path", ["/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/api/../src", "//etc/passwd", "/docs", "/static/x"]
)
def test_no_path_is_a_file(server: Served, path: str) -> None:
    with httpx.Client() as client:
        request = client.build_request("GET", server.url)
        request.url = request.url.copy_with(raw_path=path.encode())
        answer = client.send(request)
    assert answer.status_code == 404
    assert answer.json()["title"] == "not found"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost:{port}"}, 200),
        ({"Host": "LOCALHOST:{port}"}, 200),
        ({"Host": "rebound.example:{port}"}, 421),
        ({"Host": "127.0.0.1"}, 421),
        ({"Host": "127.0.0.1:1"}, 421),
        ({"Host": ""}, 421),
        ({"Origin": "http://127.0.0.1:{port}"}, 200),
        ({"Origin": "http://localhost:{port}", "Sec-Fetch-Site": "same-origin"}, 200),
        ({"Origin": "https://127.0.0.1:{port}"}, 403),
        ({"Origin": "http://127.0.0.1:{port}.example"}, 403),
        ({"Origin": "http://other.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "none"}, 200),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": "application/json; charset=utf-8"}, 200),
    ],
    ids=str,
)
def test_who_may_ask(server: Served, headers: dict[str, str], status: int) -> None:
    given = JSON | {name: value.format(port=server.port) for name, value in headers.items()}
    answer = httpx.post(f"{server.url}/api/ledger", content=b'{"model": "gpt2"}', headers=given, timeout=PATIENCE)
    assert answer.status_code == status
    assert "Access-Control-Allow-Origin" not in answer.headers
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["X-Frame-Options"] == "DENY"
    assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
    assert "Server" not in answer.headers


def test_what_is_shown_is_text(server: Served) -> None:
    """Names that look like markup come back inside of JSON, which no browser takes for a page."""
    script = "<script>alert(1)</script>"
    answer = server.post("ledger", {"config": {**LLAMA, "model_type": script}})
    assert answer.status_code == 422
    assert script in answer.json()["detail"]
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert answer.headers["X-Content-Type-Options"] == "nosniff"


def test_another_sites_link_may_lead_to_the_page(server: Served) -> None:
    linked = server.get("/", headers={"Sec-Fetch-Site": "cross-site"})
    assert linked.status_code == 200
    assert linked.headers["Content-Type"] == "text/html; charset=utf-8"
    assert "frame-ancestors 'none'" in linked.headers["Content-Security-Policy"]
    assert server.get("/api", headers={"Sec-Fetch-Site": "cross-site"}).status_code == 403
    assert httpx.post(server.url, json={}).status_code == 405


# a trainer's own files ------------------------------------------------------------------------------------------------


def example(*names: str) -> list[dict[str, str]]:
    folder = Path(__file__).resolve().parents[2] / "examples" / "from"
    return [{"name": name, "text": (folder / name).read_text(encoding="utf-8")} for name in names]


@pytest.mark.parametrize("names", [("pretrain.toml",), ("qlora.yaml",), ("sft.yaml", "zero3.json"), ("pretrain.sh",)])
def test_a_trainers_files_are_planned(server: Served, names: tuple[str, ...]) -> None:
    asked = {"files": example(*names), "gpus": 8, "gpu": "h100-80gb"}
    found = server.post("plan", asked)
    assert found.status_code == 200, found.text
    assert found.json()["feasible"] and found.json()["from"] is not None
    assert server.post("ledger", asked).status_code == 200


def test_a_model_that_the_files_do_not_name(server: Served) -> None:
    asked = {"files": example("zero3.json"), "gpus": 8, "gpu": "h100-80gb"}
    assert "names no model" in server.post("plan", asked).json()["detail"]
    found = server.post("plan", asked | {"model": "llama3-8b", "seq": 4096}).json()
    assert found["feasible"] and found["from"]["command"].startswith("jettison ledger llama3-8b --seq 4096")


REFUSED_FILES: dict[str, tuple[object, str]] = {
    "nothing": ([], "1 to 4 objects"),
    "five": (example("pretrain.toml") * 5, "1 to 4 objects"),
    "one name twice": (example("pretrain.toml") * 2, "names that differ"),
    "a path": ([{"name": "../a.toml", "text": ""}], "a name has"),
    "a program": ([{"name": "a.py", "text": "import os"}], "a name has"),
    "no text": ([{"name": "a.toml", "text": 3}], "name and text"),
    "another file of this machine": (
        [{"name": "a.yaml", "text": "model_name_or_path: gpt2\ndeepspeed: /etc/hosts\n"}], "/etc/hosts",
    ),
    "a model of this machine": ([{"name": "a.yaml", "text": "model_name_or_path: /etc\n"}], "/etc"),
    "broken": ([{"name": "a.toml", "text": "[a"}], "a.toml"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED_FILES)
def test_files_that_are_refused(server: Served, name: str) -> None:
    files, words = REFUSED_FILES[name]
    found = server.post("plan", {"files": files, "gpus": 8, "gpu": "h100-80gb"})
    assert found.status_code == 422
    assert words in found.json()["detail"]


def test_only_what_a_trainer_wrote_is_written(server: Served) -> None:
    assert server.post("write", PLAN).status_code == 422
    both = {"files": example("pretrain.toml"), "config": LLAMA, "gpu": "h100-80gb"}
    assert server.post("plan", both).status_code == 422
    found = server.post("search", {"files": example("pretrain.toml"), "gpus": 8, "gpu": "h100-80gb", "global_batch": 8})
    assert found.status_code == 422
    written = server.post("write", {"files": example("pretrain.toml"), "gpus": 64, "gpu": "h100-80gb"}).json()
    assert written["schema"] == "jettison.written/1"
    assert written["name"] == "pretrain.planned.toml"
    assert 'selective_ac_option = "32"' in written["text"] and written["changes"]
