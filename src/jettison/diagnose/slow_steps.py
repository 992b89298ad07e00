"""Causes of slow steps: findings with evidence and a change.

A finding needs a share of the steps' time: `LEAST`, or a threshold of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Final

from jettison.core.units import MIB, format_bytes, format_percent, format_seconds
from jettison.diagnose.finding import Finding, FindingKind, change, changes
from jettison.diagnose.memory_facts import MemoryFacts
from jettison.diagnose.out_of_memory import diagnose_memory
from jettison.diagnose.snapshot import DeviceSnapshot
from jettison.diagnose.step_profile import SLOW_FIRST, StepProfile

LEAST: Final = 0.05
LEAST_WAITED: Final = 0.02
SMALL_KERNEL_NS: Final = 10_000
MANY_KERNELS: Final = 300
"""A step."""
ONE_PAUSE: Final = 0.5
"""Share of the time that a device waits for the host, and the fewest steps with such a pause."""
FEWEST_FOR_A_PAUSE: Final = 3
FUSED: Final = ("Adam", "AdamW", "SGD", "Adagrad")
"""Optimizers of torch's with ``fused=True``."""
HELD_UNUSED: Final = 0.2
LEAST_UNUSED_BYTES: Final = 64 * MIB
SAME_LENGTHS: Final = 1.02
"""Largest peak of a step over the smallest, below which lengths do not vary."""
STATE: Final = 0.05
"""Share of the peak in the optimizer's first step; and at least `LEAST_STATE_BYTES`."""
LEAST_STATE_BYTES: Final = 32 * MIB


def slow_findings(profile: StepProfile) -> tuple[Finding, ...]:
    """Find what makes a trace's steps slow, the costliest first where there is a cost in time."""
    found = [*_communication(profile), *_data(profile), *_copies(profile), *_gaps(profile)]
    steps = list(profile.step_ns.items())
    if len(steps) > 2:
        (number, first), *others = steps
        found += _slow_first(number, first / 1e9, median(ns for _, ns in others) / 1e9)
    found += _state(profile.state_bytes, max(profile.peak_bytes.values(), default=0))
    held = profile.reserved_at_peak
    return (*found, *(_held(*held, False, profile.step_peaks) if held else ()))


def snapshot_findings(facts: MemoryFacts, device: DeviceSnapshot) -> tuple[Finding, ...]:
    """Find what a memory snapshot shows; state that the optimizer allocated once in it, and kept, among it."""
    found = diagnose_memory(facts)
    kept = [found] if facts.failed or found.kind is FindingKind.LEAK else []
    allocated = facts.allocated_bytes or 0
    if not facts.failed and facts.unused_bytes is not None:
        peaks = [step.peak_bytes or 0 for step in facts.steps]
        kept += _held(allocated, allocated + facts.unused_bytes, facts.expandable is True, peaks)
    timeline = device.timeline
    alive = (n for n in timeline.alive(len(timeline.allocation) - 1).tolist() if timeline.born[n] >= 0)
    state = [n for n in alive if timeline.labels[timeline.label_of[n]].role == "optimizer"]
    return (*kept, *_state(int(timeline.nbytes[state].sum()) if state else 0, timeline.peak_bytes))


def _share(profile: StepProfile, ns: int) -> str:
    each = format_seconds(ns / profile.steps / 1e9)
    return f"{each} of each step ({format_percent(ns / profile.ns)})"


def _communication(profile: StepProfile) -> Iterator[Finding]:
    if profile.exposed_ns < LEAST * profile.ns:
        return
    hidden = 1 - profile.exposed_ns / max(1, profile.communication_ns)
    evidence = [f"{format_percent(hidden)} of the time of collectives overlaps with computation"]
    evidence += [f"{name}: {_share(profile, ns)} exposed" for name, ns in list(profile.collectives.items())[:3] if ns]
    if profile.exposed_after_backward_ns > 0.5 * profile.exposed_ns:
        evidence.append("most of it runs after the last computation of backward")
    advised = {"AllGather": "fully_shard", "ReduceScatter": "fully_shard", "AllReduce": "buckets"}
    claim = f"exposed communication takes {_share(profile, profile.exposed_ns)}"
    changed = changes("communication", advised.get(next(iter(profile.collectives), ""), "exchange"))
    yield Finding(kind=FindingKind.EXPOSED_COMMUNICATION, claim=claim, evidence=tuple(evidence), changes=changed)


def _data(profile: StepProfile) -> Iterator[Finding]:
    ns = profile.waiting.data_ns if profile.has_device else profile.data_ns
    if ns < LEAST * profile.ns:
        return
    idle = "the device has nothing to do meanwhile" if profile.has_device else "no operator of the step runs meanwhile"
    yield Finding(
        kind=FindingKind.DATA_WAIT,
        claim=f"steps wait for the data loader: {_share(profile, ns)}",
        evidence=(f"in the loader's __next__: {_share(profile, profile.data_ns)}; {idle}",),
        changes=changes("data", "more_workers" if "workers" in profile.settings else "workers"),
    )


def _copies(profile: StepProfile) -> Iterator[Finding]:
    copies, stopped = profile.copies, profile.waiting.sync_ns
    cost = stopped + copies.alone_ns
    if not profile.has_device or cost < LEAST_WAITED * profile.ns:
        return
    evidence = [
        f"copies while nothing is computed: {_share(profile, copies.alone_ns)}; the device without work while "
        f"the host waited for it, or for as long after: {_share(profile, stopped)}",
        f"the host waits in copies and reads for {_share(profile, copies.waited_ns)}",
    ]
    advised = []
    if copies.pageable:
        evidence.append(
            f"{copies.pageable} of {copies.count} copies are of pageable memory, which cannot be asynchronous"
        )
        if copies.pageable > copies.to_host:
            advised.append("pin")
        if copies.to_host:
            advised.append("to_host")
    if copies.reads:
        evidence.append(f"{copies.reads} times a single number is read (.item(), float(), print of a tensor)")
        advised.append("reads")
    claim = f"copies and reads that block: {_share(profile, cost)}"
    changed = changes("copies", *(advised or ["debug"]))
    yield Finding(kind=FindingKind.BLOCKING_COPIES, claim=claim, evidence=tuple(evidence), changes=changed)


def _gaps(profile: StepProfile) -> Iterator[Finding]:
    waiting = profile.waiting
    if waiting.allocator_ns >= LEAST_WAITED * profile.ns:
        yield Finding(
            kind=FindingKind.GAPS,
            claim=f"the device waits for memory from the driver: {_share(profile, waiting.allocator_ns)}",
            evidence=(
                "cudaMalloc and cudaFree run in steps that should find all their memory in the allocator's cache",
            ),
            changes=changes("gaps", "expandable", "empty_cache"),
        )
    if waiting.host_ns < LEAST * profile.ns:
        return
    each = profile.kernels // profile.steps
    once = profile.steps >= FEWEST_FOR_A_PAUSE and waiting.longest_ns >= ONE_PAUSE * waiting.host_ns
    small = not once and profile.median_kernel_ns < SMALL_KERNEL_NS and each >= MANY_KERNELS
    median_time = format_seconds(profile.median_kernel_ns / 1e9)
    evidence = [f"{each:,} kernel{'s' * (each != 1)} a step, {median_time} in the median"]
    if once:
        at, spans = waiting.longest_at_ns, profile.step_spans.items()
        number = next((number for number, (start, end) in spans if start <= at < end), None)
        where = "between steps" if number is None else f"in step {number}"
        evidence.append(f"{format_seconds(waiting.longest_ns / 1e9)} of it are one pause, {where}")
    able = {"compile": True, "fused": profile.optimizer in FUSED}
    missing = [setting for setting, does in able.items() if does and setting not in profile.settings]
    advised = ["pause"] if once else (missing or ["graphs"]) if small else ["stacks"]
    claim = f"the device waits for the host to launch kernels: {_share(profile, waiting.host_ns)}"
    yield Finding(
        kind=FindingKind.SMALL_KERNELS if small else FindingKind.GAPS,
        claim=f"many small kernels: {claim}" if small else claim,
        evidence=tuple(evidence),
        changes=tuple(change(f"gaps.{name}", optimizer=profile.optimizer) for name in advised),
    )


def _slow_first(number: int, seconds: float, others_seconds: float) -> Iterator[Finding]:
    """Report a first step that takes much longer than those after it."""
    if seconds <= SLOW_FIRST * others_seconds:
        return
    yield Finding(
        kind=FindingKind.FIRST_STEP,
        claim=f"step {number} takes {format_seconds(seconds)}, those after it {format_seconds(others_seconds)}",
        evidence=("it loads kernels, fills the allocator's cache and makes the optimizer's state; no average has it",),
        changes=changes("steps", "schedule"),
    )


def _state(nbytes: int, peak_bytes: int) -> Iterator[Finding]:
    if nbytes < max(LEAST_STATE_BYTES, STATE * peak_bytes):
        return
    yield Finding(
        kind=FindingKind.OPTIMIZER_STATE,
        claim=f"the optimizer's state, {format_bytes(nbytes)}, appears in its first step and stays",
        evidence=("the step after the first one peaks higher by as much: that it fits says nothing before then",),
        changes=(change("steps.state", budget=f"{-(-peak_bytes // MIB)}MiB"),),
    )


def _held(allocated: int, reserved: int, expandable: bool, peaks: Sequence[int]) -> Iterator[Finding]:
    """Report reserved memory that is not used; ``peaks``: of steps, which differ where lengths do."""
    unused, vary = reserved - allocated, len(peaks) < 2 or max(peaks) > SAME_LENGTHS * min(peaks)
    if unused < LEAST_UNUSED_BYTES or unused < HELD_UNUSED * reserved:
        return
    yield Finding(
        kind=FindingKind.FRAGMENTATION,
        claim=f"{format_bytes(unused)} of {format_bytes(reserved)} are held and not used where most is allocated",
        evidence=(f"{format_percent(unused / reserved)} of what PyTorch has from the driver lies between tensors",),
        changes=tuple(change(f"steps.{name}") for name in [*["expandable"] * (not expandable), *["lengths"] * vary]),
    )
