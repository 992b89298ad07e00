"""A bounded pool of worker processes: a queue of stated length, seconds and bytes for each question."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jettison
from jettison.core.units import format_bytes
from jettison.report.server.questions import Limits, Problem, ServedAnswer, ServedQuestion
from jettison.report.server.worker import INTERNAL, OUT_OF_MEMORY, REFUSED

# Processes of the server: our own source in a fresh interpreter, deaf to what the terminal sends ----------------------


async def started_process(arguments: tuple[str, ...], line_bytes: int) -> asyncio.subprocess.Process:
    """Start a process of `worker` with pipes, whatever the working directory is.

    Args:
        line_bytes: longest line that is read from it.
    """
    source = str(Path(jettison.__file__).resolve().parents[1])
    path = os.pathsep.join([source, *(os.path.abspath(p) for p in sys.path if p)])
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "jettison.report.server.worker", *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=env,
        limit=line_bytes,
        start_new_session=True,  # what the terminal sends to us does not go to it
    )


# pool ----------------------------------------------------------------------------------------------------------------


_SIGNALS = frozenset(signal.Signals)
_CRASHES = frozenset(
    number for name in ("SIGABRT", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE") if (number := getattr(signal, name, None))
)
"""Signals that a process gets for what its own code does."""
_ENDING_SECONDS = 5.0
"""From the end of a process's output to its own."""


def cancelled() -> Problem:
    """Somebody asked for it, or the one who waited has gone."""
    return Problem(409, "cancelled", "the request was cancelled")


def ended() -> Problem:
    """Ctrl-C came first."""
    return Problem(503, "ended", "the server is ending")


@dataclass(kw_only=True, eq=False)
class Job:
    """A question on its way. ``outcome`` is its answer, or the problem that it met."""

    id: str
    question: ServedQuestion
    outcome: asyncio.Future[ServedAnswer]
    progress: str = ""
    began: float | None = None
    accepted: float = field(default_factory=time.monotonic)

    def finish(self, result: ServedAnswer | Problem) -> None:
        """Only the first outcome counts."""
        if self.outcome.done():
            return
        if isinstance(result, Problem):
            self.outcome.set_exception(result)
            self.outcome.exception()  # the waiting request may have ended: an exception that nothing reads is no error
        else:
            self.outcome.set_result(result)


class Pool:
    """Workers, and the questions that wait for one."""

    def __init__(self, limits: Limits, answers: str) -> None:
        """Nothing runs before `start`. ``answers``: see `Service`."""
        self.limits, self.answers = limits, answers
        self.jobs: dict[str, Job] = {}
        self._waiting: deque[Job] = deque()
        self._there = asyncio.Semaphore(0)
        self._tasks: list[asyncio.Task[None]] = []
        self._workers: set[Worker] = set()
        self._folder = TemporaryDirectory(prefix="jettison-serve-", ignore_cleanup_errors=True)
        self._mean_seconds = 1.0
        self._ended = False

    async def start(self) -> None:
        """Start all workers, and wait until they can answer."""
        workers = [await self._worker() for _ in range(self.limits.workers)]
        for worker in workers:
            await worker.ready()
        self._tasks = [asyncio.create_task(self._work(worker)) for worker in workers]

    async def stop(self) -> None:
        """End at once: what waits and what runs is told so, workers are killed."""
        self._ended = True
        for job in list(self.jobs.values()):
            job.finish(ended())
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(worker.kill() for worker in list(self._workers)))
        self._folder.cleanup()

    def submit(self, ident: str, asked: ServedQuestion) -> Job:
        """Put a question into the queue. Raise `Problem` if the queue is full, its id is in use, or the server ends."""
        if self._ended:
            raise ended()
        if ident in self.jobs:
            raise Problem(409, "id in use", f"a request with the id {ident} is still being worked on")
        idle = self.limits.workers - (len(self.jobs) - len(self._waiting))
        if len(self._waiting) >= self.limits.waiting + max(idle, 0):
            seconds = math.ceil((len(self._waiting) + 1) * self._mean_seconds / self.limits.workers)
            detail = f"{len(self._waiting)} requests are waiting, as many as may; ask again later"
            raise Problem(429, "too many requests", detail, retry_seconds=min(max(seconds, 1), 60))
        job = Job(id=ident, question=asked, outcome=asyncio.get_running_loop().create_future())
        job.outcome.add_done_callback(lambda _: self._forget(job))
        self.jobs[ident] = job
        self._waiting.append(job)
        self._there.release()
        return job

    def cancel(self, ident: str) -> bool:
        """End a question, waiting or worked on; whether there was one."""
        job = self.jobs.get(ident)
        if job is None:
            return False
        job.finish(cancelled())
        return True

    def standing(self, ident: str) -> dict[str, Any]:
        """State of a question. Of one that is answered, or has not come yet, nothing is known."""
        job, ahead, said = self.jobs.get(ident), 0, ""
        if job is None:
            return {"state": "unknown", "ahead": 0, "progress": "", "seconds": 0.0}
        if job.began is None:
            state, since = "waiting", job.accepted
            ahead = self._waiting.index(job) if job in self._waiting else 0
        else:
            state, since, said = "working", job.began, job.progress
        return {"state": state, "ahead": ahead, "progress": said, "seconds": round(time.monotonic() - since, 3)}

    def _forget(self, job: Job) -> None:
        self.jobs.pop(job.id, None)
        with suppress(ValueError):
            self._waiting.remove(job)

    async def _worker(self) -> Worker:
        folder = Path(self._folder.name) / f"{len(os.listdir(self._folder.name))}"
        folder.mkdir()
        arguments = ("answer", self.answers, str(folder), str(self.limits.worker_bytes))
        worker = Worker(await started_process(arguments, self.limits.answer_bytes), self.limits)
        self._workers.add(worker)
        return worker

    async def _work(self, worker: Worker) -> None:
        """Take one question after the other; a worker that cannot be trusted any more is replaced."""
        while True:
            await self._there.acquire()
            if not self._waiting:
                continue  # it was cancelled meanwhile
            job = self._waiting.popleft()
            if worker.process.returncode is not None:  # it was killed while it was idle
                worker = await self._replaced(worker)
            begin = job.began = time.monotonic()
            healthy = await worker.answer(job)
            self._mean_seconds += 0.1 * (time.monotonic() - begin - self._mean_seconds)
            if not healthy or worker.answers >= self.limits.worker_answers:
                worker = await self._replaced(worker)

    async def _replaced(self, worker: Worker) -> Worker:
        self._workers.discard(worker)
        await worker.kill()
        while True:
            try:
                return await self._worker()
            except OSError as error:  # no memory, or no process left: it may pass
                print(f"jettison: a worker could not be started: {error}; trying again", file=sys.stderr)
                await asyncio.sleep(1)


class Worker:
    """One process, and the questions that it has answered."""

    def __init__(self, process: asyncio.subprocess.Process, limits: Limits) -> None:
        """Wrap a process that has been started."""
        self.process, self.limits, self.answers = process, limits, 0

    async def ready(self) -> None:
        """Wait until it has loaded what it needs. Raise `RuntimeError` if it ended instead."""
        assert self.process.stdout is not None
        if not await self.process.stdout.readline():
            raise RuntimeError("a worker of the server ended as it started (its own words are above)")

    async def answer(self, job: Job) -> bool:
        """Answer a question; whether the worker can be asked again."""
        asking = asyncio.create_task(self._ask(job))
        seconds = self.limits.seconds(job.question.verb)
        try:
            both: set[asyncio.Future[Any]] = {asking, job.outcome}
            await asyncio.wait(both, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            done = asking.done()
            asking.cancel()
        if not done:
            late = f"no answer within {seconds:g} seconds of work; ask for less, or use the command line"
            job.finish(Problem(504, "too slow", late))
            return False
        result = asking.result()
        job.finish(result)
        self.answers += 1
        return isinstance(result, ServedAnswer) or result.title == REFUSED

    async def _ask(self, job: Job) -> ServedAnswer | Problem:
        """Send the question, read until there is an answer."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(json.dumps(asdict(job.question)).encode() + b"\n")
            await stdin.drain()
            while line := await stdout.readline():
                said = json.loads(line)
                if "answer" in said:
                    return ServedAnswer(text=said["answer"], exit_code=said["exit_code"])
                if "problem" in said:
                    return self._problem(said["problem"], said["detail"])
                job.progress = str(said.get("progress", job.progress))[:500]
        except ValueError:  # a line that is longer than the stream's limit
            return Problem(413, "too long", f"the document has more than {format_bytes(self.limits.answer_bytes)}")
        except (ConnectionError, BrokenPipeError):
            pass
        return await self._end_of_process()

    async def _end_of_process(self) -> Problem:
        """Return the error of a worker that closed its output; only C code ends it without an error of its own."""
        try:
            code = await asyncio.wait_for(self.process.wait(), _ENDING_SECONDS)
        except TimeoutError:
            code = 0
        name = signal.Signals(-code).name if -code in _SIGNALS else f"exit code {code}"
        if code > 0 or -code in _CRASHES:
            most = format_bytes(self.limits.worker_bytes)
            detail = f"the process that worked on it crashed ({name}), as C code does that gets no more than {most} of "
            return Problem(500, "crashed", f"{detail}memory, or that has a bug; use the command line to see which")
        detail = f"the process that worked on it was ended ({name}), by somebody or by a system that is short of memory"
        return Problem(503, "worker ended", f"{detail}; ask again", retry_seconds=1)

    def _problem(self, kind: str, detail: str) -> Problem:
        if kind == OUT_OF_MEMORY:
            most = format_bytes(self.limits.worker_bytes)
            large = f"working it out takes more than {most}; ask for less, or use the command line"
            return Problem(422, "too large", large)
        if kind == INTERNAL:
            return Problem(500, "internal error", f"a bug of ours ({detail}); the server's terminal says where")
        return Problem(422, REFUSED, detail)

    async def kill(self) -> None:
        """End it, whatever it is doing."""
        with suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()
