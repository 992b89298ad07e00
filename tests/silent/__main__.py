"""``python -m silent [POLICY ...]``: every case in a process of its own, as a table in Markdown on stdout.

``python -m silent CASE POLICY`` judges one, in this process. Exit code 0 whatever the outcomes: they are the answer.
"""

from __future__ import annotations

import collections
import multiprocessing
import sys
import time

import torch

from silent import ALL, POLICIES
from silent.harness import judge

LIMIT_SECONDS = 60


def table(policies: list[str]) -> None:
    """One row a case and policy, and totals."""
    totals: dict[str, collections.Counter[str]] = {policy: collections.Counter() for policy in policies}
    print("| case | policy | outcome | seconds | what was said |\n| --- | --- | --- | ---: | --- |", flush=True)
    for name in ALL:
        for policy in policies:
            row = _alone(name, policy)
            totals[policy][row[0]] += 1
            print(f"| {name} | {policy} | {' | '.join(row)} |", flush=True)
    for policy, counts in totals.items():
        print(f"\n{policy}: " + ", ".join(f"{n} {outcome}" for outcome, n in counts.most_common()))


def _alone(name: str, policy: str) -> tuple[str, str, str]:
    """Judged in a fork, which may die or hang."""
    start = time.perf_counter()
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=lambda: sender.send(one(name, policy)))
    child.start()
    sender.close()
    said = ("HANGS", "")
    if receiver.poll(LIMIT_SECONDS):
        try:
            said = receiver.recv()
        except EOFError:
            child.join()
            said = ("DIES", f"exit code {child.exitcode}")
    child.kill()
    child.join()
    return said[0], f"{time.perf_counter() - start:.1f}", said[1].replace("|", "/").replace("\n", " ")


def one(name: str, policy: str) -> tuple[str, str]:
    """Outcome, and the first things said."""
    verdict = judge(ALL[name].make, policy)
    outcome = verdict.outcome + (" (internal error)" if verdict.internal and verdict.fair else "")
    said = [*verdict.notes[:2], *(f"warned: {w}" for w in verdict.warned[:1])]
    return outcome, "; ".join(said)[:300]


if __name__ == "__main__":
    torch.set_num_threads(1)
    match sys.argv[1:]:
        case [name, policy] if name in ALL:
            print(*one(name, policy), sep="\t")
        case asked:
            policies = asked or list(POLICIES)
            for policy in policies:
                one("usual", policy)  # what the first plan imports, no other has to
            table(policies)
