"""Long work is seen: by a logger, on a terminal, in a trainer's log file; by nobody who did not ask for it."""

from __future__ import annotations

import inspect
import io
import logging
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

import jettison
from jettison.core import progress
from jettison.core.progress import LOGGER, Progress, in_a_trainer, on_terminal, reported, shown, silent


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def unset() -> Iterator[None]:
    """Logging as a script finds it: pytest has handlers of its own."""
    handlers, propagate = logging.getLogger().handlers[:], LOGGER.propagate
    LOGGER.propagate = False
    yield
    LOGGER.propagate = propagate
    LOGGER.setLevel(logging.NOTSET)
    assert logging.getLogger().handlers == handlers


def ran(how: Progress, stream: io.StringIO, monkeypatch: pytest.MonkeyPatch, *, seconds: float = 0.0) -> str:
    """What work that takes so long by its clock writes."""
    ticks = iter([0.0, *[seconds] * 50])
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(ticks))
    monkeypatch.setattr(sys, "stderr", stream)
    with reported(how, "planning Net") as done:
        how("choosing")
        done("planned Net")
    return stream.getvalue()


LINES = "jettison: planning Net\njettison: planned Net (took 3.0 s)\n"


@pytest.mark.usefixtures("unset")
@pytest.mark.parametrize(
    ("how", "stream", "seconds", "written"),
    [
        (shown, io.StringIO, 3.0, ""),
        (shown, Terminal, 0.5, ""),  # nothing to wait for
        (shown, Terminal, 3.0, "jettison: planned Net (took 3.0 s)\n"),
        (in_a_trainer, Terminal, 3.0, LINES),
        (in_a_trainer, io.StringIO, 3.0, LINES),
        (silent, Terminal, 3.0, ""),
    ],
)
def test_who_sees_lines(
    how: Progress, stream: type[io.StringIO], seconds: float, written: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ran(how, stream(), monkeypatch, seconds=seconds).replace("\r\x1b[2K", "") == written


@pytest.mark.usefixtures("unset")
@pytest.mark.parametrize("level", [logging.WARNING, logging.INFO])
def test_a_level_that_somebody_set_decides(level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    LOGGER.setLevel(level)
    assert "jettison:" not in ran(in_a_trainer, Terminal(), monkeypatch, seconds=3.0)


def test_where_logging_is_set_up_lines_are_records(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.INFO):
        assert ran(shown, io.StringIO(), monkeypatch, seconds=3.0) == ""
    said = [(record.name, record.levelname, record.getMessage()) for record in caplog.records]
    assert said == [("jettison", "INFO", "planning Net"), ("jettison", "INFO", "planned Net (took 3.0 s)")]


@pytest.mark.usefixtures("unset")
@pytest.mark.parametrize(("rank", "speaks"), [("0", True), ("1", False)])
def test_of_several_ranks_the_first_speaks(rank: str, speaks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(progress, "_leads", lambda: progress.os.environ["RANK"] == "0")
    assert bool(ran(in_a_trainer, Terminal(), monkeypatch, seconds=3.0)) is speaks


def test_a_custom_function_is_told_all_of_it() -> None:
    said: list[str] = []
    with reported(said.append, "planning Net") as done:
        said.append("choosing")
        done("planned Net")
    assert [text.partition(" (")[0] for text in said] == ["planning Net", "choosing", "planned Net"]


def test_work_that_fails_has_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    with pytest.raises(ZeroDivisionError), reported(said.append, "planning Net"):
        raise ZeroDivisionError
    assert said == ["planning Net"]


@pytest.mark.usefixtures("unset")
def test_a_terminal_is_never_silent_and_is_left_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ticks are counted, not timed: as many as the work waits for."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "TICK_SECONDS", 0.001)
    monkeypatch.setattr(progress, "FIRST_SECONDS", 0.001)
    before = threading.active_count()
    with reported(shown, "planning Net"):
        for text in ("tracing", "choosing"):
            shown(text)
            while f"jettison: {text} (" not in stream.getvalue():
                pass
    assert threading.active_count() == before
    assert stream.getvalue().endswith("\r\x1b[2K") and "\n" not in stream.getvalue()


@pytest.mark.usefixtures("unset")
def test_functions_that_take_long_are_seen_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    by_name = (
        jettison.verify,
        jettison.verify_given,
        jettison.search,
        jettison.plan,
        jettison.sweep,
        jettison.export_plan,
    )
    for function in (*by_name, jettison.auto_checkpoint):
        assert inspect.signature(function).parameters["progress"].default is shown
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "FIRST_SECONDS", 0.001)

    @on_terminal
    def prove(name: str, *, progress: Progress = shown) -> str:
        progress(f"timing {name}")
        while "jettison: timing Net (" not in stream.getvalue():
            pass
        return name

    assert prove("Net") == "Net"
    assert stream.getvalue().endswith("\r\x1b[2K")
    said: list[str] = []

    @on_terminal
    def quick(*, progress: Progress = shown) -> None:
        progress("timing")

    quick(progress=said.append)
    assert said == ["timing"]


@pytest.mark.usefixtures("unset")
def test_a_terminal_that_has_gone_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    closed, closing = Terminal(), Terminal()
    closed.close()
    closed.isatty = io.StringIO.isatty.__get__(closed)  # type: ignore[method-assign]
    closing.close()
    for stream in (None, closed, closing):
        monkeypatch.setattr(sys, "stderr", stream)
        with reported(in_a_trainer, "planning Net") as done:
            done("planned Net")


@pytest.mark.usefixtures("unset")
@pytest.mark.parametrize("rank", [0, 1])
def test_each_public_function_that_takes_long_has_a_status_line(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line for each call, of the first rank only; work inside of other work has none of its own."""
    begun: list[str] = []

    class Status(progress._Status):
        def __enter__(self) -> None:
            begun.append(self.text)
            super().__enter__()

    monkeypatch.setattr(progress, "_leads", lambda: rank == 0)
    monkeypatch.setattr(progress, "_Status", Status)
    monkeypatch.setattr(sys, "stderr", Terminal())
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    batch = (torch.ones(2, 8),)
    traced = jettison.trace(model, batch, loss_fn=torch.sum)
    plan = jettison.plan(traced, "1GiB", measure=False)
    jettison.sweep(traced, ["1GiB", "1KiB"], measure=False)
    jettison.apply(model, plan=plan, batch=batch, loss_fn=torch.sum).remove()
    assert begun == (["trace", "plan", "sweep", "apply"] if rank == 0 else [])
    assert "jettison-progress" not in [one.name for one in threading.enumerate()]
