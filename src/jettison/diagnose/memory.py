"""Which of three it was when memory ran out, and the smallest changes that fit.

- *A leak*: bytes between steps grow, by as much as is missing.
- *Fragmentation*: what was asked for is there, in pieces. The allocator gives whole segments back to the driver before
  it gives up, so what PyTorch holds and does not use then lies between tensors.
- *A peak*: it is not there, and was never missing between steps.

Two more are said where they are so: other processes hold what is missing, and a source that does not say enough.
"""

from __future__ import annotations

from itertools import pairwise
from statistics import median
from typing import Final

from jettison.diagnose.facts import MemoryFacts, Phase, StepBytes
from jettison.diagnose.finding import Change, Finding, Kind
from jettison.diagnose.growth import lowest_rises, never_falls
from jettison.units import MIB, format_bytes, format_percent

FIRST_STEPS: Final = 2
GROWS_FROM_STEPS: Final = 5
LEAST_GROWTH: Final = 0.01
"""Of what is between steps, over all steps after the first."""
SHARE_GROWING: Final = 0.8
HIGHER_PEAK: Final = 1.05
MOST_PARTS: Final = 5
MUCH_OUTSIDE: Final = 0.1
"""Of a device: CUDA's context, NCCL and cuBLAS have a few GiB between them."""
_LOSS: Final = ("cross_entropy", "log_softmax", "lm_head", "nll_loss", "logits")


def diagnose_memory(facts: MemoryFacts) -> Finding:
    """The verdict."""
    growth = grown_bytes(facts)
    short = facts.short_bytes
    if growth and (short is None or not facts.failed or growth >= short):
        return _leak(facts, growth)
    if facts.failed and short is not None and facts.asked_bytes is not None:
        if short and facts.unused_bytes is not None and facts.unused_bytes >= short:
            return _fragmentation(facts, short)
        if short and facts.other_processes_bytes >= short:
            return _others(facts, short)
        if short and facts.outside_bytes >= max(short, MUCH_OUTSIDE * (facts.total_bytes or 0)):
            return _outside(facts, short)
    if facts.failed and (facts.allocated_bytes is None or short == 0):
        return _unknown(facts)
    return _peak(facts, growth)


def grown_bytes(facts: MemoryFacts) -> int:
    """By how much more is allocated between steps than after the first ones; 0 where it does not grow steadily."""
    left = sum(one.nbytes for one in facts.survivors)
    if left:
        return left
    levels = [step.between_bytes for step in facts.steps[FIRST_STEPS:]]
    if len(levels) < GROWS_FROM_STEPS:
        return 0
    rises = [after - before for before, after in pairwise(levels)]
    growing = sum(rise > 0 for rise in rises) / len(rises)
    total = levels[-1] - levels[0]
    steady = growing == 1
    if len(rises) >= 8:
        steady = never_falls(levels) or (growing >= SHARE_GROWING and lowest_rises(levels))
    return total if steady and total >= LEAST_GROWTH * levels[0] else 0


# what it was ----------------------------------------------------------------------------------------------------------


def _leak(facts: MemoryFacts, growth: int) -> Finding:
    steps = max(1, len(facts.steps) - 1 - FIRST_STEPS)
    evidence = [f"between steps {format_bytes(growth)} more are allocated after {steps} steps than after the first two"]
    changes = []
    for one in facts.survivors[:MOST_PARTS]:
        place = one.module or "an unnamed place"
        evidence.append(
            f"{place}{_role(one.role)} leaves {format_bytes(one.bytes_per_step)} a step behind: "
            f"{format_bytes(one.nbytes)} from {one.steps} steps"
        )
    if not facts.survivors:
        evidence.append(_levels(facts.steps))
    where = facts.survivors[0].module if facts.survivors else "what a step adds to a list, a dictionary or an attribute"
    if not facts.survivors or facts.survivors[0].role in ("forward", "unknown", "recompute"):
        changes.append(
            Change(
                line="total_loss += loss.item()    # not: total_loss += loss",
                why=f"whoever keeps a tensor of the forward keeps the graph behind it; look at {where}",
            )
        )
    else:
        changes.append(
            Change(line=f"# {where}: let go of it when a step ends", why="each step makes it anew, and keeps it")
        )
    if not facts.survivors:
        changes.append(
            Change(line="with jettison.watch(model):", why="on a GPU it writes a snapshot, which names lines")
        )
    claim = f"a leak: {format_bytes(growth // steps)} more stay allocated after each step"
    return Finding(kind=Kind.LEAK, claim=claim, evidence=(*evidence, *_moment(facts)), changes=tuple(changes))


def _fragmentation(facts: MemoryFacts, short: int) -> Finding:
    unused = facts.unused_bytes or 0
    evidence = [
        f"{format_bytes(facts.asked_bytes or 0)} were asked for; {format_bytes(facts.free_bytes or 0)} are free on the "
        f"device and {format_bytes(unused)} lie unused between tensors: enough together"
    ]
    if facts.largest_piece_bytes is not None:
        evidence.append(f"the largest of these pieces has {format_bytes(facts.largest_piece_bytes)}")
    changes = []
    if not facts.expandable:
        changes.append(
            Change(
                line="export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
                why="segments then grow in place, so that pieces join; PYTORCH_ALLOC_CONF from torch 2.10 on",
            )
        )
    else:
        evidence.append("expandable segments are switched on already")
        changes.append(Change(line="torch.cuda.empty_cache()", why="once, where shapes change (before an evaluation)"))
    changes.append(
        Change(
            line="collate = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=512)",
            why="few different lengths leave few different pieces",
        )
    )
    claim = f"fragmentation: {format_bytes(short)} beyond what is free are there, in pieces"
    return Finding(kind=Kind.FRAGMENTATION, claim=claim, evidence=(*evidence, *_moment(facts)), changes=tuple(changes))


def _others(facts: MemoryFacts, short: int) -> Finding:
    others = format_bytes(facts.other_processes_bytes)
    return Finding(
        kind=Kind.OTHERS,
        claim=f"other processes hold {others} of the device; {format_bytes(short)} are missing",
        evidence=_moment(facts),
        changes=(
            Change(line="nvidia-smi --query-compute-apps=pid,used_memory --format=csv", why="says which they are"),
            Change(line="CUDA_VISIBLE_DEVICES=1 python ...", why="takes another device"),
        ),
    )


def _outside(facts: MemoryFacts, short: int) -> Finding:
    outside = format_bytes(facts.outside_bytes)
    return Finding(
        kind=Kind.OTHERS,
        claim=f"{outside} of this process are not PyTorch's; {format_bytes(short)} are missing",
        evidence=_moment(facts),
        changes=(
            Change(
                line="NCCL_DEBUG=INFO python ...",
                why="says how many communicators there are: each has buffers of its own, and few groups need few",
            ),
            Change(
                line="XLA_PYTHON_CLIENT_PREALLOCATE=false TF_FORCE_GPU_ALLOW_GROWTH=true python ...",
                why="JAX and TensorFlow take most of a device for themselves when they start",
            ),
        ),
    )


def _unknown(facts: MemoryFacts) -> Finding:
    if facts.short_bytes == 0:
        return Finding(
            kind=Kind.UNKNOWN,
            claim=f"{format_bytes(facts.free_bytes or 0)} were free, more than was asked for: others may have had it",
            evidence=_moment(facts),
            changes=(Change(line="nvidia-smi", why="says who else uses the device"),),
        )
    asked = "" if facts.asked_bytes is None else f" ({format_bytes(facts.asked_bytes)} were asked for)"
    if facts.device == "cpu":
        asked = f"{asked}: the host's, not a device's"
    return Finding(
        kind=Kind.UNKNOWN,
        claim=f"memory ran out{asked}; how much there was is not said, so peak, fragmentation and leak look alike",
        evidence=_moment(facts),
        changes=(
            Change(line="with jettison.watch(model):", why="around the loop: it writes down what is needed to tell"),
        ),
    )


def _peak(facts: MemoryFacts, growth: int) -> Finding:
    short = facts.short_bytes
    evidence = list(_moment(facts))
    if facts.failed and short is not None:
        evidence.insert(0, _missing(facts, short))
    if growth:
        evidence.append(f"beside that, {format_bytes(growth)} have been left behind by steps: less than is missing")
    shape = _by_shape(facts)
    evidence += shape
    total = (facts.allocated_bytes or 0) + (facts.asked_bytes or 0)
    during = "" if facts.phase is Phase.UNKNOWN else f" in {facts.phase}"
    grew = ", of a batch that is larger than those before" if shape else ""
    if facts.failed:
        claim = f"a peak{during}: the step needs {format_bytes(total)} at once{grew}"
    else:
        claim = f"the peak is {format_bytes(facts.allocated_bytes or 0)}{during}; nothing in here ran out of memory"
    changes = _smaller_peak(facts, short, shape=bool(shape)) if facts.failed else ()
    return Finding(kind=Kind.PEAK, claim=claim, evidence=tuple(evidence), changes=changes)


# what it rests on -----------------------------------------------------------------------------------------------------


def _missing(facts: MemoryFacts, short: int) -> str:
    unused = "" if not facts.unused_bytes else f", and {format_bytes(facts.unused_bytes)} lie unused between tensors"
    missing = format_bytes(max(0, short - (facts.unused_bytes or 0)))
    asked, free = format_bytes(facts.asked_bytes or 0), format_bytes(facts.free_bytes or 0)
    return f"{asked} were asked for, {free} were free{unused}: {missing} are missing"


def _moment(facts: MemoryFacts) -> tuple[str, ...]:
    """Phase and place, and what filled the memory."""
    found = []
    if facts.phase is not Phase.UNKNOWN or facts.site:
        phase = "" if facts.phase is Phase.UNKNOWN else f"in {facts.phase}"
        found.append(f"it was {phase}{f' at {facts.site}' if facts.site else ''}".replace("  ", " "))
    whole = sum(part.nbytes for part in facts.parts)
    for part in facts.parts[:MOST_PARTS]:
        share = format_percent(part.nbytes / max(1, whole))
        found.append(f"{format_bytes(part.nbytes)} ({share}): {part.module or 'no stack'}{_role(part.role)}")
    if facts.outside_bytes > MIB:
        found.append(f"{format_bytes(facts.outside_bytes)} of this process are not PyTorch's: context, NCCL, libraries")
    return (*found, *facts.notes)


def _role(word: str) -> str:
    return "" if word == Phase.UNKNOWN else f" ({word})"


def _by_shape(facts: MemoryFacts) -> list[str]:
    """Where the last step's peak is above those before, while between steps nothing has grown."""
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
        f"this step wanted {format_bytes(last.peak_bytes)}; those before peaked at "
        f"{format_bytes(round(median(peaks)))} (median), at {format_bytes(max(peaks))} at most"
    ]


def _levels(steps: tuple[StepBytes, ...]) -> str:
    shown = steps if len(steps) <= 6 else (*steps[:3], *steps[-3:])
    return "; ".join(f"step {step.step}: {format_bytes(step.between_bytes)}" for step in shown)


# what to do -----------------------------------------------------------------------------------------------------------


def _smaller_peak(facts: MemoryFacts, short: int | None, *, shape: bool) -> tuple[Change, ...]:
    if facts.phase is Phase.PARAMETERS:
        return _SMALLER_PARAMETERS
    changes = []
    if facts.phase is Phase.OPTIMIZER:
        line = "torch.optim.AdamW(model.parameters(), foreach=False)"
        changes.append(Change(line=line, why="its temporaries are then one parameter's, not all parameters'"))
    names = f"{facts.site} {' '.join(part.module for part in facts.parts[:2])}"
    if any(word in names for word in _LOSS):
        line = "for piece in hidden.split(1024, dim=1): loss = loss + head_and_loss(piece)"
        changes.append(Change(line=line, why="logits of a piece of the sequence at a time, under a checkpoint"))
    held = sum(part.nbytes for part in facts.parts if part.role in (Phase.FORWARD, Phase.RECOMPUTE))
    if short and held + (facts.asked_bytes or 0) > short and held:
        share = 1 - short / (held + (facts.asked_bytes or 0))
        changes.append(
            Change(
                line=f"micro_batch = {share:.2f} of this one; accumulate gradients over the rest",
                why=f"activations are {format_bytes(held)} of it, and {format_bytes(short)} are missing",
            )
        )
    if shape:
        fitted = max(facts.steps[1:-1], key=lambda step: (step.batch_elements or 0, step.peak_bytes or 0))
        line = f"batches of at most {fitted.batch}" if fitted.batch else "batches no longer than those before"
        changes.append(Change(line=line, why="those went through: sort by length, or cut what is longer"))
    if facts.allocated_bytes is not None and facts.free_bytes is not None and facts.phase is not Phase.OPTIMIZER:
        budget = (facts.allocated_bytes + facts.free_bytes) // MIB
        changes += [
            Change(
                line=f'jettison.auto_checkpoint(model, batch, "{budget}MiB", optimizer=optimizer)',
                why="plans each layer below what there is, and refuses, with the smallest budget, where that cannot be",
            ),
            Change(line=f"jettison plan MODEL --budget {budget}MiB", why="says beforehand what that costs in time"),
        ]
    return tuple(changes)


_SMALLER_PARAMETERS: Final = (
    Change(line='state = torch.load(file, map_location="cpu", mmap=True)', why="what is read then has no second copy"),
    Change(line="model = model.to(torch.bfloat16)    # before .to(device)", why="half of the bytes of fp32"),
    Change(line="for block in model.layers: fully_shard(block)", why="each rank then holds its share of parameters"),
    Change(
        line="jettison ledger MODEL --dp 8 --zero 3", why="says what each rank would hold, before anything is built"
    ),
)
"""No step has begun: nothing of activations would help."""
