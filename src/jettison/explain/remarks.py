"""The explanation of a peak in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from jettison.errors import UsageError
from jettison.explain.figures import Remark, Share, Variant
from jettison.ledger.timeline import Moment, Phase
from jettison.predict.forecast import Forecast, Stage, forecast
from jettison.spec.recompute import Mode, Recompute
from jettison.units import format_bytes, format_percent


def remarks(found: Forecast, budget_bytes: int | None) -> Iterator[Remark]:
    """What a run does in vain, and what its user should know."""
    run, peak = found.run, found.peak_bytes
    mode = run.recompute
    if mode.mode is Mode.SELECTIVE:
        plain = forecast(replace(run, recompute=replace(mode, mode=Mode.NONE)))
        if found.layer_bytes() == plain.layer_bytes():
            yield Remark(
                code="selective-saves-nothing",
                text=f"selective recomputation drops attention scores, and {run.kernels.attention} attention never "
                f"stores them: layers save the same bytes as with --recompute none, and the peak is "
                f"{format_bytes(peak)} with either",
            )
    if mode.mode is Mode.EVERY and mode.number > 1:
        full = forecast(replace(run, recompute=replace(mode, mode=Mode.FULL, number=1))).peak_bytes
        if peak > full:
            yield Remark(
                code="segments-above-full",
                text=f"segments of {mode.number} layers hold fewer inputs, but backward computes {mode.number} layers "
                f"again at once: the peak is {format_bytes(peak)}, with --recompute full {format_bytes(full)}",
            )
    if mode.offload:
        yield from _offloading(found)
    if budget_bytes is not None and found.first_step_peak_bytes <= budget_bytes < peak:
        yield Remark(
            code="second-step-exceeds",
            text=f"the first step fits ({format_bytes(found.first_step_peak_bytes)}), the second does not "
            f"({format_bytes(peak)}): only the first optimizer step allocates "
            f"{format_bytes(found.worst.static.state)} of state",
        )


def _offloading(found: Forecast) -> Iterator[Remark]:
    plain = forecast(replace(found.run, recompute=replace(found.run.recompute, offload=False)))
    held, before = found.worst.activation_bytes, plain.worst.activation_bytes
    if found.peak_bytes >= plain.peak_bytes:
        yield Remark(
            code="offload-misses-peak",
            text=f"offloading lowers what is held between the passes from {format_bytes(before)} to "
            f"{format_bytes(held)}, but not the peak ({format_bytes(plain.peak_bytes)} without it, "
            f"{format_bytes(found.peak_bytes)} with it), which is reached {_place(found.worst.peak)}",
        )


def cause(stage: Stage, parts: tuple[Share, ...]) -> str:
    """Where the peak is, and what most of it is."""
    largest = max(parts, key=lambda part: part.nbytes)
    what = largest.name
    if what == "activations in flight" and stage.in_flight > 1:
        what = f"activations of up to {stage.in_flight} micro-batches in flight"
    return (
        f"The peak of {format_bytes(stage.peak.nbytes)} is reached on stage {stage.index} {_place(stage.peak)}; the "
        f"largest part of it is {what}, {format_bytes(largest.nbytes)} ({format_percent(largest.fraction)})."
    )


def remedy(
    found: Forecast, variants: tuple[Variant, ...], recompute_flops: int, budget_bytes: int | None = None
) -> str:
    """Which of the changes that were tried is the cheapest that fits; without a budget, which helps most.

    Args:
        recompute_flops: of the run itself.
    """
    fitting = [v for v in variants if budget_bytes is not None and v.peak_bytes <= budget_bytes < found.peak_bytes]
    if fitting:

        def dearness(variant: Variant) -> tuple[int, int]:
            """What frees more without a product computed again costs more of something else (transfers, passes over
            memory); where products are computed again, as many of them for less memory is the better bargain.
            """
            again = variant.recompute_flops
            return again, variant.peak_bytes if again > recompute_flops else -variant.peak_bytes

        cheapest = min(fitting, key=dearness)
        more = cheapest.recompute_flops > recompute_flops
        price = f"{format_percent(cheapest.of_forward)} of a forward" if more else "nothing more"
        return (
            f"Of the changes tried, {cheapest.change} is the cheapest that fits: {format_bytes(cheapest.peak_bytes)}, "
            f"for {price} computed again."
        )
    best = min(variants, key=lambda variant: (variant.peak_bytes, variant.recompute_flops))
    if best.peak_bytes >= found.peak_bytes:
        return f"None of the {len(variants)} changes tried lowers it."
    cost = ""
    if best.recompute_flops > recompute_flops:
        cost = f", for {format_percent(best.of_forward)} of a forward computed again"
    return (
        f"Of the changes tried, {best.change} lowers it most: to {format_bytes(best.peak_bytes)}, by "
        f"{format_bytes(found.peak_bytes - best.peak_bytes)}{cost}.{_with_the_host(found, budget_bytes)}"
    )


def _with_the_host(found: Forecast, budget_bytes: int | None) -> str:
    """Does it fit where what stays of each layer goes to the host, too? Empty where it does not, or already goes."""
    run = found.run
    if budget_bytes is None or found.peak_bytes <= budget_bytes or run.recompute.offload or run.recompute.sent:
        return ""
    try:
        sent = replace(run, recompute=Recompute(mode=Mode.FULL, offload=True))
    except UsageError:  # of recorded and compiled layers not every mode is known
        return ""
    peak = forecast(sent).peak_bytes
    return f" --recompute full --offload fits: {format_bytes(peak)}." if peak <= budget_bytes else ""


def _place(moment: Moment) -> str:
    match moment.phase:
        case Phase.OPTIMIZER:
            return "in the optimizer step"
        case Phase.BEFORE | Phase.AFTER:
            return "between steps"
        case Phase.LOSS:
            return "in the forward of the loss"
        case _:
            return f"in the {moment.phase} of {moment.where}"
