"""Generated requests: whatever comes, the answer is a document or a problem in words, and the server goes on."""

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jettison.cli.served import SERVICE
from jettison.families.presets import PRESETS
from jettison.report.server.questions import Limits, Problem, question
from jettison.spec.hardware import hardware_names
from support.patience import PATIENCE
from support.serving import JSON, PLAN, Served, served

LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
ANYTHING = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=2),
    max_leaves=4,
)
SMALL = st.integers(0, 16)
MODELS = st.sampled_from(["gpt2", "gpt-22b", "llama3-8b", "mixtral-8x7b", "deepseek-v2-lite", "bert-base"])
WORDS = ["none", "full", "auto", "every:2", "block:1", "flash", "eager", "fp8", "bf16", "adamw", "megatron", "1f1b"]
KEYS = [
    *("model", "config", "name", "id", "budget", "gpu", "tp", "sp", "pp", "virtual_stages", "cp", "dp", "ep", "zero"),
    *("recompute", "attention", "precision", "schedule", "stage_layers", "micro_batch", "micro_batches", "seq"),
    *("gpus", "global_batch", "dropout", "what_if", "offload", "kernels", "fit", "explain", "compile", "top"),
]
PLAUSIBLE = st.fixed_dictionaries(
    {"model": MODELS},
    optional={
        **dict.fromkeys(("tp", "pp", "virtual_stages", "cp", "dp", "ep", "zero", "micro_batches", "seq"), SMALL),
        **{key: st.booleans() for key in ("sp", "offload", "tp_comm_overlap", "gathered_inputs")},
        **{key: st.sampled_from(WORDS) for key in ("recompute", "attention", "precision", "kernels", "schedule")},
        "stage_layers": st.text("0123456789,:EtL*|", max_size=12),
        "gpu": st.sampled_from(["a100-80gb", "h100-80gb", "tpu-v5p-95gb", "none"]),
        "budget": st.sampled_from(["60GiB", "1B", "-1GiB", "1e9GiB", "9999PiB", "GiB"]),
        "capacity_factor": st.floats(0, 4),
    },
)
ODD = st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=12), ANYTHING, max_size=6)


@given(st.sampled_from(list(SERVICE.forms)), ODD | st.builds(lambda a, b: {**a, **b}, PLAUSIBLE, ODD))
def test_what_is_asked_is_a_question_or_a_problem(verb: Any, body: dict[str, Any]) -> None:
    """Before anything works on it; and a question names a preset and a GPU that are there."""
    try:
        found = question(verb, SERVICE.forms[verb], json.dumps(body).encode("utf-8", "surrogatepass"), Limits())
    except Problem as problem:
        assert problem.status in (400, 413, 422)
        assert len(problem.detail) < 3000
    else:
        assert found.config is not None or found.name in PRESETS
        assert found.flags.get("gpu") in (None, *hardware_names())
        assert "/" not in found.name.removesuffix(".json")


@given(st.sampled_from(list(SERVICE.forms)), st.binary(max_size=200))
def test_bytes_are_refused_or_asked(verb: Any, body: bytes) -> None:
    with pytest.raises(Problem) as caught:
        question(verb, SERVICE.forms[verb], body, Limits())
    assert caught.value.status in (400, 422)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(Limits(workers=2, plan_seconds=20, search_seconds=5)) as found:
        yield found


@pytest.mark.slow
@settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(st.sampled_from(["plan", "ledger", "estimate"]), PLAUSIBLE)
def test_plausible_requests_never_meet_a_bug(server: Served, verb: str, body: dict[str, Any]) -> None:
    answer = server.post(verb, body)
    assert answer.status_code in (200, 422), (verb, body, answer.text)
    document = answer.json()
    if answer.status_code == 200:
        assert document["schema"] == f"jettison.{verb}/1"
    else:
        assert document["title"] == "refused", (verb, body, document)


@pytest.mark.slow
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(["vocab_size", "hidden_size", "num_hidden_layers", "rope_scaling"]), ANYTHING))
def test_odd_configurations_never_meet_a_bug(server: Served, odd: dict[str, Any]) -> None:
    config = {
        "model_type": "llama",
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    body = json.dumps({"config": {**config, **odd}}).encode("utf-8", "surrogatepass")
    answer = httpx.post(f"{server.url}/api/ledger", content=body, headers=JSON, timeout=PATIENCE)
    assert answer.status_code in (200, 400, 413, 422), (odd, answer.text)


@pytest.mark.slow
@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=300), st.booleans())
def test_bytes_on_the_wire(server: Served, noise: bytes, begun: bool) -> None:
    """What is no HTTP at all, or stops being it."""
    start = f"POST /api/plan HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n".encode() if begun else b""
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(start + noise + b"\r\n\r\n")
        client.shutdown(socket.SHUT_WR)
        while client.recv(65536):
            pass
    assert server.get("/api").status_code == 200


@pytest.mark.slow
def test_after_all_that_it_answers(server: Served) -> None:
    assert server.post("plan", PLAN).status_code == 200
