"""Cause of an out-of-memory error, and the smallest changes that fit (`advice.py`).

``docs/doctor.md`` lists the causes. The allocator frees unused segments first: unused bytes then lie between tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from statistics import median
from typing import Final

from jettison.core.units import MIB, format_gib, format_percent
from jettison.diagnose import advice
from jettison.diagnose.advice import device_of
from jettison.diagnose.finding import Change, Finding, FindingKind, changes
from jettison.diagnose.memory_facts import FIRST_STEPS, Failure, MemoryFacts, StepPhase, grown_bytes

HIGHER_PEAK: Final = 1.05
MOST_PARTS: Final = 5
SLACK: Final = 0.01
"""Share of a device: smaller unaccounted figures are not reported."""
LITTLE: Final = 0.05
"""Share of a device that free pieces, if contiguous, must leave after the request: less does not last for a step."""
MUCH: Final = 0.1
MUCH_BYTES: Final = 3 << 29
"""Share of a device, and at least so many bytes: a context, its kernels and communication buffers take as much."""
MUCH_OTHERS: Final = 0.03
"""Share of a device: a desktop takes less."""
_SAYS_MEMORY: Final = re.compile(r"mem|oom|out_of_me", re.IGNORECASE)
ABSURD: Final = 64
"""Multiple of a device's memory, above which a request is a size error."""
ABSURD_BYTES: Final = 16 << 40
"""Such a size for an unknown device."""


def diagnose_memory(facts: MemoryFacts) -> Finding:
    """Find the cause."""
    asked = facts.requested_bytes
    if asked is not None and asked >= (ABSURD * facts.total_bytes if facts.total_bytes else ABSURD_BYTES):
        return _size_error(facts, asked)
    if facts.failure is not Failure.REQUEST:
        kind, claim = _OF_FAILURE[facts.failure](facts)
        return _finding(kind, claim, facts, advice.against_elsewhere(facts))
    growth = grown_bytes(facts)
    short = facts.short_bytes
    if growth and (short is None or not facts.failed or growth >= short):
        return _leak(facts, growth)
    if facts.failed and short and not facts.shared_bytes:
        held = _held_elsewhere(facts, short)
        if held is not None:
            return held
    if facts.failed and (facts.allocated_bytes is None or short == 0):
        return _unknown(facts)
    return _peak(facts, growth)


def _held_elsewhere(facts: MemoryFacts, short: int) -> Finding | None:
    """Find memory that is there and not free: in pieces, in private pools, in other processes, outside of PyTorch."""
    unused, total = facts.unused_bytes or 0, facts.total_bytes or 0
    loading, much = facts.phase is StepPhase.PARAMETERS, max(short, MUCH * total, MUCH_BYTES)
    elsewhere = facts.other_processes_bytes + facts.outside_bytes + facts.unaccounted_bytes
    filled = elsewhere > total / 2 and unused - short < LITTLE * total  # by others: joined pieces do not last a step
    # weights that are read in leave no holes
    if unused >= short and not filled and (not loading or unused >= MUCH * total):
        return _fragmentation(facts, short)
    if facts.private_bytes and unused + facts.private_bytes >= short:
        held = format_gib(facts.private_bytes)
        claim = f"private pools (CUDA graphs) hold {held} unused; {format_gib(short)} are missing"
        return _finding(FindingKind.FRAGMENTATION, claim, facts, changes("private_pools"))
    if facts.other_processes_bytes >= max(short, MUCH_OTHERS * total):
        return _others(facts, short)
    if facts.outside_bytes >= much:
        held = f"{format_gib(facts.outside_bytes)} of this process are not PyTorch's"
        claim = f"{held} ({device_of(facts.device).outside}); {format_gib(short)} are missing"
        return _finding(FindingKind.OUTSIDE, claim, facts, advice.against_outside(facts))
    return _others(facts, short) if elsewhere >= much else None


def _finding(
    kind: FindingKind, claim: str, facts: MemoryFacts, advised: Iterable[Change], evidence: Iterable[str] = ()
) -> Finding:
    """Return a finding whose evidence ends with the moment."""
    return Finding(kind=kind, claim=claim, evidence=(*evidence, *_moment(facts)), changes=tuple(advised))


def _asked(facts: MemoryFacts) -> str:
    return "" if facts.requested_bytes is None else f" ({format_gib(facts.requested_bytes)} were asked for)"


def _leak(facts: MemoryFacts, growth: int) -> Finding:
    steps = max(1, len(facts.steps) - 1 - FIRST_STEPS)
    evidence = [f"between steps {format_gib(growth)} more are allocated after {steps} steps than after the first two"]
    for one in facts.survivors[:MOST_PARTS]:
        place = one.module or "an unnamed place"
        inner = f", made at {one.site}," if one.site and one.site != one.module else ""
        evidence.append(
            f"{place}{_role(one.role)}{inner} leaves {format_gib(one.bytes_per_step)} a step behind: "
            f"{format_gib(one.nbytes)} from {one.steps} steps"
        )
    if not facts.survivors:
        shown = facts.steps if len(facts.steps) <= 6 else (*facts.steps[:3], *facts.steps[-3:])
        evidence.append("; ".join(f"step {step.step}: {format_gib(step.between_bytes)}" for step in shown))
    claim = f"a leak: {format_gib(growth // steps)} more stay allocated after each step"
    return _finding(FindingKind.LEAK, claim, facts, advice.against_leak(facts), evidence)


def _fragmentation(facts: MemoryFacts, short: int) -> Finding:
    unused = facts.unused_bytes or 0
    evidence = [
        f"{format_gib(facts.requested_bytes or 0)} were asked for; {format_gib(facts.free_bytes or 0)} are free on the "
        f"device and {format_gib(unused)} are reserved but unused: enough together"
    ]
    if facts.largest_piece_bytes is not None:
        evidence.append(f"the largest of these blocks has {format_gib(facts.largest_piece_bytes)}")
    if facts.expandable:
        evidence.append("expandable segments are switched on already")
    advised = advice.against_fragmentation(facts)
    left = unused + (facts.free_bytes or 0) - (facts.requested_bytes or 0)
    if facts.total_bytes and left < LITTLE * facts.total_bytes:
        share = format_percent(left / facts.total_bytes)
        evidence.append(f"joined they leave {share} of the device: it is all but full, and a next request may fail")
        advised = tuple(dict.fromkeys((*advised, *advice.against_peak(facts, short, shape=False))))
    claim = f"fragmentation: free memory lacks {format_gib(short)}, which reserved but unused blocks have"
    return _finding(FindingKind.FRAGMENTATION, claim, facts, advised, evidence)


def _others(facts: MemoryFacts, short: int) -> Finding:
    named, left = facts.other_processes_bytes, facts.unaccounted_bytes
    claim = f"other processes hold {format_gib(named)} of the device"
    if named < max(left, short):
        claim = (
            f"{format_gib(left + named)} of the device are neither free nor PyTorch's: another process holds them, or "
            f"this one outside of PyTorch ({device_of(facts.device).outside})"
        )
    claim += f"; {format_gib(short)} are missing"
    return _finding(FindingKind.OTHERS, claim, facts, advice.against_others(facts))


def _size_error(facts: MemoryFacts, asked: int) -> Finding:
    size = "more than 1 EiB" if asked >= 1 << 60 else format_gib(asked)
    times = f", {asked // facts.total_bytes:,} times the device" if facts.total_bytes and asked < 1 << 60 else ""
    claim = f"a size error: {size} were asked for at once{times}; no device has that, and no plan helps"
    return _finding(FindingKind.SIZE, claim, facts, (advice.against_size_error(facts),))


# failures other than a request of PyTorch's allocator on a device -----------------------------------------------------


def _killed(facts: MemoryFacts) -> tuple[FindingKind, str]:
    if not _SAYS_MEMORY.search(facts.what):
        claim = "the process was killed with SIGKILL, as it is when the host's memory runs out; no device said so"
        return FindingKind.HOST, claim
    used = "" if facts.allocated_bytes is None else f"; the process held {format_gib(facts.allocated_bytes)} of it"
    limit = "" if facts.total_bytes is None else f", of {format_gib(facts.total_bytes)} that were allowed"
    return FindingKind.HOST, f"the process was killed: the host's memory ran out, not a device's{used}{limit}"


def _host(facts: MemoryFacts) -> tuple[FindingKind, str]:
    what = f": {facts.what}" if facts.what else ""
    return FindingKind.HOST, f"the host's memory ran out, not a device's{_asked(facts)}{what}"


def _shared(facts: MemoryFacts) -> tuple[FindingKind, str]:
    users = "ranks exchange data by NCCL" if facts.what == "NCCL" else "workers of the data loader hand over batches"
    return FindingKind.HOST, f"/dev/shm is full: {users} in it"


def _server(facts: MemoryFacts) -> tuple[FindingKind, str]:
    others, held = facts.unaccounted_bytes, ""
    if facts.requested_bytes is not None and facts.free_bytes is not None:
        held = f": it needs {format_gib(facts.requested_bytes)}, and {format_gib(facts.free_bytes)} are left for it"
    elif others:
        held = f": {format_gib(others)} of {format_gib(facts.total_bytes or 0)} are taken when it starts"
    claim = f"the server found no room for its cache of keys and values{held}"
    return FindingKind.OTHERS if others else FindingKind.UNKNOWN, claim


def _library(facts: MemoryFacts) -> tuple[FindingKind, str]:
    if facts.requested_bytes is not None and facts.total_bytes is not None:
        free = "" if facts.free_bytes is None else f", of which {format_gib(facts.free_bytes)} are free"
        wants = f"{facts.what} wants {format_gib(facts.requested_bytes)} on a device of {format_gib(facts.total_bytes)}"
        return FindingKind.PEAK, f"a peak: {wants}{free}"
    kind = FindingKind.OUTSIDE if facts.what == "NCCL" or facts.requested_bytes is not None else FindingKind.UNKNOWN
    return kind, f"{facts.what} found no room on the device, outside of PyTorch's allocator{_asked(facts)}"


_OF_FAILURE: Final = {
    Failure.KILLED: _killed,
    Failure.HOST: _host,
    Failure.SHARED: _shared,
    Failure.SERVER: _server,
    Failure.LIBRARY: _library,
}


def _unknown(facts: MemoryFacts) -> Finding:
    if facts.short_bytes == 0:
        claim = (
            f"{format_gib(facts.free_bytes or 0)} were free, more than was asked for{_asked(facts)}: the driver limits "
            "one allocation, or others had it for a moment"
        )
        return _finding(FindingKind.UNKNOWN, claim, facts, advice.against_refusal(facts))
    claim = f"memory ran out{_asked(facts)}; how much there was is not said, so peak, fragmentation and leak look alike"
    return _finding(FindingKind.UNKNOWN, claim, facts, (*advice.record(facts), *advice.of_trainer(facts)))


def _peak(facts: MemoryFacts, growth: int) -> Finding:
    short, asked = facts.short_bytes, facts.requested_bytes or 0
    evidence = list(_moment(facts))
    if facts.failed and short is not None:
        unused = f", and {format_gib(facts.unused_bytes)} lie unused between tensors" if facts.unused_bytes else ""
        there = f"{format_gib(asked)} were asked for, {format_gib(facts.free_bytes or 0)} were free{unused}"
        evidence.insert(0, f"{there}: {format_gib(short)} are missing")
    if growth:
        evidence.append(f"in addition, steps have left {format_gib(growth)} behind: less than is missing")
    shape = _by_shape(facts)
    evidence += shape
    during = "" if facts.phase is StepPhase.UNKNOWN else f" in {facts.phase}"
    advised: tuple[Change, ...] = ()
    if not facts.failed:
        claim = f"the peak is {format_gib(facts.allocated_bytes or 0)}{during}; nothing in here ran out of memory"
    elif facts.total_bytes is not None and asked > facts.total_bytes:
        claim = (
            f"a peak{during}: one tensor of {format_gib(asked)} is larger than the device, which has "
            f"{format_gib(facts.total_bytes)}: no plan of activations helps"
        )
        advised = advice.against_one_tensor(facts)
    else:
        grew = ""
        if shape:
            larger = facts.steps[-1].batch_elements is not None
            grew = ", of a batch that is larger than those before" if larger else ", more than each step before"
        needs = {StepPhase.PARAMETERS: "loading needs more than", StepPhase.SAVING: "a checkpoint of it needs"}
        total = format_gib((facts.allocated_bytes or 0) + asked)
        claim = f"a peak{during}: {needs.get(facts.phase, 'the step needs')} {total} at once{grew}"
        advised = advice.against_peak(facts, short, shape=bool(shape))
        advised += advice.against_leak(facts) if growth else ()
    return Finding(kind=FindingKind.PEAK, claim=claim, evidence=tuple(evidence), changes=advised)


def _moment(facts: MemoryFacts) -> tuple[str, ...]:
    """Phase and line, the largest parts, and the holders of the rest of the device."""
    found = []
    if facts.phase is not StepPhase.UNKNOWN or facts.site:
        phase = "" if facts.phase is StepPhase.UNKNOWN else f"in {facts.phase}"
        found.append(f"it was {phase}{f' at {facts.site}' if facts.site else ''}".replace("  ", " "))
    if facts.trainer:
        found.append(f"the traceback is of {facts.trainer}")
    whole = sum(part.nbytes for part in facts.parts)
    for part in facts.parts[:MOST_PARTS]:
        share = format_percent(part.nbytes / max(1, whole))
        inner = f", most at {part.site}" if part.site and part.site != part.module else ""
        where = part.module or "no stack (not recorded, or allocated before)"
        found.append(f"{format_gib(part.nbytes)} ({share}): {where}{_role(part.role)}{inner}")
    words = device_of(facts.device).outside
    rounding = SLACK * (facts.total_bytes or 0)  # of figures with two decimals
    for what, nbytes in {
        f"of this process are not PyTorch's: {words}": facts.outside_bytes,
        "are other processes'": facts.other_processes_bytes,
        f"are another process's, or this one's outside of PyTorch: {words}": facts.unaccounted_bytes,
        "are held unused in private pools (CUDA graphs)": facts.private_bytes,
        "are above what the device holds: the driver has them in shared or virtual memory, slowly, or a server that "
        "sleeps gave them back": facts.shared_bytes,
    }.items():
        if nbytes > max(MIB, 0 if nbytes != facts.unaccounted_bytes else rounding):
            found.append(f"{format_gib(nbytes)} {what}")
    return (*found, *facts.notes)


def _role(word: str) -> str:
    return "" if word == StepPhase.UNKNOWN else f" ({word})"


def _by_shape(facts: MemoryFacts) -> list[str]:
    """Compare the last step's batch or peak with those before; empty where it is no larger."""
    steps = facts.steps
    if not facts.failed or len(steps) < 3:
        return []
    last, before = steps[-1], steps[1:-1]
    sizes = [step.batch_elements for step in before if step.batch_elements is not None]
    if last.batch_elements is not None and sizes and last.batch_elements > max(sizes):
        largest = max(before, key=lambda step: step.batch_elements or 0)
        return [f"this batch is {last.batch}; the largest that went through is {largest.batch}"]
    peaks = [step.peak_bytes for step in before if step.peak_bytes is not None]
    if last.peak_bytes is None or not peaks or last.peak_bytes < HIGHER_PEAK * max(peaks):
        return []
    return [
        f"this step wanted {format_gib(last.peak_bytes)}; those before peaked at "
        f"{format_gib(round(median(peaks)))} (median), at {format_gib(max(peaks))} at most"
    ]
