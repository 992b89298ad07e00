"""Nothing is lost, and nothing is without a bound: queues, seconds, bytes, slow clients, and the end."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path

import httpx
import pytest

from jettison.cli.served import SERVICE
from jettison.core.errors import UsageError
from jettison.report.server import Limits, serve_page
from support.patience import PATIENCE
from support.serving import PLAN, ROOT, SEARCH, Served, gone, served

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


def until(happens: object, seconds: float = PATIENCE) -> None:
    """Wait for it."""
    end = time.monotonic() + seconds
    while not happens():  # type: ignore[operator]
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def at_once(server: Served, bodies: list[dict[str, object]]) -> list[httpx.Response]:
    """All of them sent before the first is answered."""

    async def ask() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=len(bodies))
        async with httpx.AsyncClient(timeout=PATIENCE, limits=limits) as client:
            return await asyncio.gather(*(client.post(f"{server.url}/api/plan", json=body) for body in bodies))

    return asyncio.run(ask())


def test_80_plans_at_once_are_all_answered() -> None:
    """Each with its own document, by two workers."""
    budgets = [60 * 10**9 + number for number in range(80)]
    with served(Limits(workers=2)) as server:
        answers = at_once(server, [{**PLAN, "budget": f"{budget}B"} for budget in budgets])
    assert Counter(answer.status_code for answer in answers) == {200: 80}
    assert [answer.json()["budget_bytes"] for answer in answers] == budgets
    assert {answer.json()["hash"] for answer in answers} == {answers[0].json()["hash"]}
    assert all(answer.json()["feasible"] for answer in answers)


def test_beyond_the_queue_is_429_and_when_to_come_again() -> None:
    with served(Limits(workers=1, waiting=10)) as server:
        answers = at_once(server, [PLAN] * 60)
        by_status = Counter(answer.status_code for answer in answers)
        assert set(by_status) == {200, 429}
        assert by_status[200] >= 11
        for answer in answers:
            if answer.status_code == 429:
                assert 1 <= int(answer.headers["Retry-After"]) <= 60
                assert "requests are waiting, as many as may" in answer.json()["detail"]
        assert server.post("plan", PLAN).status_code == 200


def test_a_request_is_watched_and_cancelled() -> None:
    """One that is worked on, one that waits, and one whose client goes away; then the worker is free for the next."""
    with served(Limits(workers=1, waiting=1)) as server, ThreadPoolExecutor(2) as beside:
        where = "/api/requests/long-search-1"
        assert server.get(where).json()["state"] == "unknown"
        long = beside.submit(server.post, "search", {**SEARCH, "id": "long-search-1"})
        until(lambda: server.get(where).json().get("progress"))
        standing = server.get(where).json()
        assert standing["state"] == "working"
        assert standing["seconds"] > 0
        behind = beside.submit(server.post, "plan", {**PLAN, "id": "waits-behind"})
        until(lambda: server.get("/api/requests/waits-behind").json()["state"] == "waiting")
        assert server.post("plan", PLAN).status_code == 429
        assert server.post("plan", {**PLAN, "id": "waits-behind"}).json()["title"] == "id in use"
        for ident, asked in (("waits-behind", behind), ("long-search-1", long)):
            assert httpx.delete(f"{server.url}/api/requests/{ident}").status_code == 204
            answer = asked.result(PATIENCE)
            assert (answer.status_code, answer.json()["title"]) == (409, "cancelled")
            assert httpx.delete(f"{server.url}/api/requests/{ident}").status_code == 404
        assert server.post("plan", PLAN).status_code == 200

        talks = {**SEARCH, "id": "says-how-far", "model": "gpt2", "gpus": 8, "global_batch": 64, "recompute": "auto"}
        asked = beside.submit(server.post, "search", talks)
        until(lambda: "candidates" in server.get("/api/requests/says-how-far").json().get("progress", ""))
        assert httpx.delete(f"{server.url}/api/requests/says-how-far").status_code == 204
        assert asked.result(PATIENCE).status_code == 409

        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(request(server, "search", json.dumps({**SEARCH, "id": "goes-away"}).encode()))
            until(lambda: server.get("/api/requests/goes-away").json()["state"] == "working")
        until(lambda: server.get("/api/requests/goes-away").json()["state"] == "unknown")
        assert server.post("plan", PLAN).status_code == 200


def request(server: Served, verb: str, body: bytes, *more: str, length: int | None = None) -> bytes:
    """As it goes over the wire."""
    length = len(body) if length is None else length
    lines = [
        f"POST /api/{verb} HTTP/1.1",
        f"Host: 127.0.0.1:{server.port}",
        "Content-Type: application/json",
        *(more or [f"Content-Length: {length}"]),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


def test_seconds_and_bytes_of_work_are_bounded() -> None:
    limits = Limits(workers=1, search_seconds=1.0, worker_bytes=700 * 2**20, worker_answers=3)
    with served(limits) as server:
        answer = server.post("search", SEARCH)
        assert (answer.status_code, answer.json()["title"]) == (504, "too slow")
        assert "no answer within 1 seconds of work" in answer.json()["detail"]
        assert [server.post("plan", PLAN).status_code for _ in range(7)] == [200] * 7  # two workers were used up
    large = {"model": "gpt-175b", "pp": 2, "virtual_stages": 2, "schedule": "zero-bubble-v", "micro_batches": 4_000_000}
    with served(replace(limits, worker_bytes=215 * 2**20)) as server:
        before = server.workers() if sys.platform == "linux" else [0]
        answer = server.post("estimate", large | {"gpu": "h100-80gb"})
        assert (answer.status_code, answer.json().get("title")) == (422, "too large"), answer.text
        assert "takes more than 215.00 MiB" in answer.json()["detail"]
        if sys.platform == "linux":  # a process that ran out of memory is not asked again
            until(lambda: server.workers() not in ([], before))


def only_worker(server: Served) -> int:
    """The one process of a server that has one, once it is there."""
    until(lambda: len(server.workers()) == 1)
    (worker,) = server.workers()
    return worker


@LINUX
def test_a_worker_that_crashes_is_not_said_to_be_killed() -> None:
    with served(Limits(workers=1)) as server, ThreadPoolExecutor(1) as beside:
        worker = only_worker(server)
        asked = beside.submit(server.post, "search", {**SEARCH, "id": "unlucky-one"})
        until(lambda: server.get("/api/requests/unlucky-one").json().get("state") == "working")
        os.kill(worker, signal.SIGABRT)
        answer = asked.result(PATIENCE)
        assert (answer.status_code, answer.json()["title"]) == (500, "crashed")
        assert "crashed (SIGABRT), as C code does that gets no more than 4.00 GiB" in answer.json()["detail"]


@LINUX
def test_a_worker_that_dies_is_replaced() -> None:
    with served(Limits(workers=1)) as server, ThreadPoolExecutor(1) as beside:
        before = only_worker(server)
        asked = beside.submit(server.post, "search", {**SEARCH, "id": "unlucky-one"})
        until(lambda: server.get("/api/requests/unlucky-one").json().get("state") == "working")
        os.kill(before, signal.SIGKILL)
        answer = asked.result(PATIENCE)
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
        assert "was ended (SIGKILL), by somebody or by a system that is short of memory" in answer.json()["detail"]
        assert server.post("plan", PLAN).status_code == 200
        idle = only_worker(server)
        assert idle != before
        os.kill(idle, signal.SIGKILL)
        until(lambda: gone(idle))
        time.sleep(0.5)  # until the server has heard of it
        assert server.post("plan", PLAN).status_code == 200


def said(client: socket.socket) -> bytes:
    """All until the server closes."""
    found = b""
    while piece := client.recv(65536):
        found += piece
    return found


def test_a_body_is_refused_before_it_is_read() -> None:
    """By its stated length; and without one, as soon as it is too long."""
    with served(Limits(workers=1, body_bytes=1000)) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(request(server, "plan", b"", length=10**12))
            assert b"413" in said(client).partition(b"\r\n")[0]
        for stated in ("-1", "1e3", "9" * 30):
            with socket.create_connection(("127.0.0.1", server.port)) as client:
                client.sendall(request(server, "plan", b"", f"Content-Length: {stated}"))
                assert said(client).partition(b"\r\n")[0].split()[1] in (b"400", b"413")
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(request(server, "plan", b"", "Transfer-Encoding: chunked"))
            client.sendall(b"3e9\r\n" + b" " * 1001 + b"\r\n")  # and no end
            assert b"413" in said(client).partition(b"\r\n")[0]
        assert server.post("plan", PLAN).status_code == 200


def test_drops_keep_nobody_waiting() -> None:
    """Heads and bodies that never end hold a connection each, and nothing else."""
    with served(Limits(workers=1)) as server:
        clients = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(50)]
        for client in clients[:25]:
            client.sendall(b"GET / HTTP/1.1\r\nHost: 127")
        for client in clients[25:]:
            client.sendall(request(server, "plan", b'{"mo', length=100))
        assert server.post("plan", PLAN).status_code == 200
        for client in clients:
            client.close()


def test_many_connections_are_a_503_for_the_next() -> None:
    with served(Limits(workers=1, connections=5)) as server:
        idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(5)]
        until(lambda: server.get("/api").status_code == 503)
        crowded = server.get("/api")
        assert crowded.headers["Content-Type"] == "application/problem+json"
        assert crowded.json()["detail"].startswith("5 connections are open, as many as may")
        for client in idle:
            client.close()
        until(lambda: server.get("/api").status_code == 200)


def padded_head(port: int, nbytes: int) -> bytes:
    """A request whose head has so many bytes, most of them in a header that nobody reads."""
    begin, end = f"GET /api HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nX-Padding: ".encode(), b"x\r\n\r\n"
    return begin + b" " * (nbytes - len(begin) - len(end)) + end


def test_the_head_of_a_request_is_bounded() -> None:
    """To the byte, however it comes: alone, in pieces, or behind another request."""
    limits = Limits(workers=1)
    with served(limits) as server:
        for over, pieces, behind in product((0, 1, 2000, 16_000, 200_000), (1, 7), (False, True)):
            head, status = padded_head(server.port, limits.head_bytes + over), 431 if over else 200
            size = -(-len(head) // pieces)
            with socket.create_connection(("127.0.0.1", server.port)) as client:
                client.settimeout(PATIENCE)
                client.sendall(padded_head(server.port, 200) if behind else b"")
                found = b""
                with contextlib.suppress(ConnectionError):  # it may be closed before the last piece
                    for at in range(0, len(head), size):
                        client.sendall(head[at : at + size])
                        time.sleep(0.005 if pieces > 1 else 0)
                while found.count(b"HTTP/1.1 ") <= behind and (piece := client.recv(65536)):
                    found += piece
                answers = [int(part.split()[0]) for part in found.split(b"HTTP/1.1 ")[1:]]
                assert answers == ([200, status] if behind else [status]), (over, pieces, behind)
                if status == 431:
                    assert b"content-type: application/problem+json" in found.lower()


def test_what_is_no_http_is_a_problem_document() -> None:
    with served(Limits(workers=1)) as server:
        for sent in (b"\x16\x03\x01 hello\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/1.1\r\nHost localhost\r\n\r\n"):
            with socket.create_connection(("127.0.0.1", server.port)) as client:
                client.settimeout(PATIENCE)
                client.sendall(sent)
                head, _, body = said(client).partition(b"\r\n\r\n")
                assert head.split()[1] == b"400"
                assert b"content-type: application/problem+json" in head and b"X-Content-Type" not in body
                problem = json.loads(body)
                assert (problem["status"], problem["title"]) == (400, "bad request")
                assert "expected HTTP/1.1" in problem["detail"]


def test_two_servers_on_one_port() -> None:
    """The second says so; the first goes on."""
    with served(Limits(workers=1)) as server:
        with pytest.raises(
            UsageError, match=rf"port {server.port} cannot be used \(.*\); give another --port, or none"
        ):
            serve_page("", service=SERVICE, port=server.port, started=lambda _: None)
        assert server.post("plan", PLAN).status_code == 200
        port = server.port
    with served(Limits(workers=1), port=port) as again:  # at once, when the first has ended
        assert again.port == port


@pytest.mark.parametrize("port", [-1, 65536])
def test_what_is_no_port(port: int) -> None:
    with pytest.raises(UsageError, match=f"got --port {port}; expected 1 to 65535"):
        serve_page("", service=SERVICE, port=port, started=lambda _: None)


@LINUX
def test_nobody_else_on_the_network_is_listened_to() -> None:
    """The listening socket is bound to 127.0.0.1, by what the kernel says of it."""
    with served(Limits(workers=1)) as server:
        lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        listening = [line[1] for line in lines if line[3] == "0A" and line[1].endswith(f":{server.port:04X}")]
        assert listening == [f"0100007F:{server.port:04X}"]
        if Path("/proc/net/tcp6").exists():
            assert f":{server.port:04X} " not in Path("/proc/net/tcp6").read_text()


@LINUX
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_at_once(number: signal.Signals) -> None:
    """While a worker is busy and a request waits: both are told, nothing is left, and the server was content."""
    with served(Limits(workers=1)) as server, ThreadPoolExecutor(2) as beside:
        worker = only_worker(server)
        asked = [beside.submit(server.post, "search", {**SEARCH, "id": "busy-search"})]
        until(lambda: server.get("/api/requests/busy-search").json()["state"] == "working")
        folder = Path(f"/proc/{worker}/cwd").resolve()
        asked.append(beside.submit(server.post, "plan", {**PLAN, "id": "waiting-plan"}))
        until(lambda: server.get("/api/requests/waiting-plan").json()["state"] == "waiting")
        server.process.send_signal(number)
        answers = [future.result(PATIENCE) for future in asked]
        assert [answer.status_code for answer in answers] == [503, 503]
        assert answers[0].json()["detail"] == "the server is ending"
        assert server.process.wait(PATIENCE) == 0
        assert gone(worker)
        assert not folder.exists()
        assert server.process.stderr is not None
        assert server.process.stderr.read() == ""


@LINUX
def test_workers_end_with_a_server_that_was_killed() -> None:
    with served(Limits(workers=1)) as server, ThreadPoolExecutor(1) as beside:
        worker = only_worker(server)
        beside.submit(server.post, "search", {**SEARCH, "id": "busy-search"})
        until(lambda: server.get("/api/requests/busy-search").json().get("progress"))
        server.process.kill()
        until(lambda: gone(worker), 8)  # before it would have said anything that nobody reads


def test_without_the_extra() -> None:
    code = """import importlib.util
there = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "uvicorn" else there(name, package)
from jettison.report.server import serve_page
try:
    serve_page("", service=None, port=0, started=print)
except Exception as error:
    print(type(error).__name__, error)"""
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "UsageError --serve needs uvicorn: pip install '.[serve]' in a clone of Jettison\n"


def test_a_bound_is_above_nothing() -> None:
    with pytest.raises(UsageError, match="got workers = 0; expected more than 0"):
        Limits(workers=0)
    assert Limits(waiting=0).waiting == 0
