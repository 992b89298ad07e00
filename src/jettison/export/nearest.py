"""The nearest policy to a plan that a target can say: the fastest that still fits the plan's budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jettison.errors import DoesNotFit
from jettison.export.described import DescribedPricer
from jettison.export.policy import LayerPolicy, by_ops_and_host, checkpointed, checkpointed_on_host, kept_whole
from jettison.export.result import Cost, Pricer, require_fit
from jettison.export.subject import Decision, Subject

Priced = tuple[tuple[LayerPolicy, ...], Cost]
Checkpoint = Callable[[Decision], LayerPolicy]
Write = Callable[[Sequence[LayerPolicy]], str]
"""Policies as Python that defines ``apply(model)``."""


def fewest_checkpoints(
    subject: Subject, pricer: Pricer, write: Write, *, target: str, could: str, checkpoint: Checkpoint = checkpointed
) -> Priced:
    """Whole layers as checkpoints: as the plan has it where it treats layers whole, else as few as fit its budget.

    Of layers that free as much the first go first: what a checkpoint makes again in backward then comes when the layers
    behind it are gone.

    Args:
        checkpoint: what becomes of a layer that is one.

    Raises:
        DoesNotFit: not even all of them fit.
    """
    if all(decision.plain or decision.whole for decision in subject.decisions):
        asked = tuple(kept_whole(d) if d.plain else checkpoint(d) for d in subject.decisions)
        cost = pricer.cost(asked, write(asked))
        if cost.peak_bytes <= subject.budget_bytes:
            return asked, cost
    order = sorted(range(len(subject.decisions)), key=lambda i: (-_freed(subject.decisions[i]), i))

    def made(count: int) -> tuple[LayerPolicy, ...]:
        chosen = set(order[:count])
        return tuple(checkpoint(d) if i in chosen else kept_whole(d) for i, d in enumerate(subject.decisions))

    return least(made, len(order), subject, pricer, write, target=target, could=could)


def with_host(subject: Subject, pricer: Pricer, choose: Callable[[Pricer, Checkpoint], Priced]) -> Priced:
    """Checkpoints, with what they are given on the host where that is faster, or the only way to fit.

    Considered where a described plan moves something. Copies are priced as what nothing is computed beside.

    Args:
        choose: for who prices, and for what becomes of a layer that is a checkpoint.

    Raises:
        DoesNotFit: neither fits.
    """
    if not isinstance(pricer, DescribedPricer) or not any(decision.moved for decision in subject.decisions):
        return choose(pricer, checkpointed)
    stay = pricer.last_of_chunks()
    limit = pricer.choice.host_budget_bytes

    def on_host(decision: Decision) -> LayerPolicy:
        return checkpointed(decision) if decision.layer in stay else checkpointed_on_host(decision)

    found, problem = [], None
    for ours, checkpoint in ((pricer, checkpointed), (pricer.without_overlap(), on_host)):
        try:
            found.append(choose(ours, checkpoint))
        except DoesNotFit as error:
            problem = error
    allowed = [one for one in found if limit is None or one[1].host_bytes <= limit]
    if not allowed:
        assert problem is not None  # what stays on the device is allowed
        raise problem
    return min(allowed, key=lambda one: (one[1].step_seconds or 0.0, one[1].host_bytes))


def with_moves(
    subject: Subject,
    pricer: Pricer,
    write: Write,
    *,
    target: str,
    could: str,
    checkpoint: Checkpoint,
    partly: Checkpoint,
) -> Priced:
    """Whole layers as checkpoints, and what a live plan moves of layers that it leaves alone waits on the host.

    Args:
        checkpoint: what becomes of a layer that is one.
        partly: what becomes of a layer of which the plan computes a part again.

    Raises:
        DoesNotFit: with every layer a checkpoint it does not fit.
    """

    def wish(decision: Decision) -> LayerPolicy:
        if decision.plain or _only_moves(decision):
            return by_ops_and_host(decision)
        return checkpoint(decision) if decision.whole else partly(decision)

    said = all(decision.plain or decision.whole or _only_moves(decision) for decision in subject.decisions)
    wished = tuple(map(wish, subject.decisions))
    return between(wished, subject, pricer, write, target=target, could=could, as_it_stands=said, checkpoint=checkpoint)


def _only_moves(decision: Decision) -> bool:
    return bool(decision.moved) and not decision.packed and not decision.program.recompute_set(decision.kept)


def between(
    wished: Sequence[LayerPolicy],
    subject: Subject,
    pricer: Pricer,
    write: Write,
    *,
    target: str,
    could: str,
    as_it_stands: bool,
    checkpoint: Checkpoint = checkpointed,
) -> Priced:
    """A wish for each layer; where that is above the budget, the first layers are checkpoints instead, as few as fit.

    Args:
        checkpoint: what becomes of a layer that is one.
        as_it_stands: else, where the wish leaves room, the last layers keep everything, as many as fit.

    Raises:
        DoesNotFit: with every layer a checkpoint it does not fit.
    """
    depth = len(wished)
    whole = [kept_whole(policy.decision) for policy in wished]
    full = [checkpoint(policy.decision) for policy in wished]

    def made(count: int) -> tuple[LayerPolicy, ...]:
        if count <= depth:
            return (*wished[:count], *whole[count:])
        return (*full[: count - depth], *wished[count - depth :])

    if not as_it_stands:
        return least(made, 2 * depth, subject, pricer, write, target=target, could=could)
    return least(lambda count: made(depth + count), depth, subject, pricer, write, target=target, could=could)


def least(
    made: Callable[[int], tuple[LayerPolicy, ...]],
    most: int,
    subject: Subject,
    pricer: Pricer,
    write: Write,
    *,
    target: str,
    could: str,
) -> Priced:
    """The first of ``made(0) .. made(most)`` that fits; more of them take fewer bytes.

    Raises:
        DoesNotFit: the last does not fit.
    """
    known: dict[int, Priced] = {}

    def priced(count: int) -> Priced:
        if count not in known:
            policies = made(count)
            known[count] = policies, pricer.cost(policies, write(policies))
        return known[count]

    low, high = 0, most
    if priced(low)[1].peak_bytes <= subject.budget_bytes:
        return priced(low)
    require_fit(priced(high)[1], subject, target, could)
    while high - low > 1:
        middle = (low + high) // 2
        if priced(middle)[1].peak_bytes <= subject.budget_bytes:
            high = middle
        else:
            low = middle
    return priced(high)


def _freed(decision: Decision) -> int:
    return kept_whole(decision).kept_bytes - checkpointed(decision).kept_bytes
